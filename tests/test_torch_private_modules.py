"""Private parts of torch.nn that fpipe uses: each message says what breaks without them."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from fpipe import torch_internals
from fpipe.torch_private import modules

NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_runs_without_its_statistics_and_shows_its_input(name: str):
    norm, inputs, x = NORMS[name](), list[Tensor](), torch.randn(4, 3, 5)
    assert torch_internals.is_norm(norm), f"{name} is no _NormBase any more: what it remembers would not be found"
    assert torch_internals.is_batch_norm(norm), "_BatchNorm is not the class of all batch norms"
    assert modules.has_torch_forward(norm), f"{name}.forward is not torch's: its trace would mutate"
    initial_buffers = {key: buffer.clone() for key, buffer in norm.named_buffers()}
    with modules.without_statistics(norm, inputs.append):
        y = norm(x)
    assert [tensor is x for tensor in inputs] == [True], f"{name} shows its input no longer to _check_input_dim"
    assert all(torch.equal(initial_buffers[key], buffer) for key, buffer in norm.named_buffers()), (
        f"{name} writes its statistics"
    )
    assert torch.equal(y, norm(x)), f"the output of {name} in training reads its running statistics"
    assert not torch.equal(initial_buffers["running_mean"], norm.running_mean), (
        f"{name} does not track again afterwards"
    )


def test_each_write_moves_the_version_of_a_tensor():
    x = torch.ones(2)
    version = torch_internals.version_of(x)
    x.view(2).add_(1)
    assert torch_internals.version_of(x) != version, "_version does not see writes: first values go unseen"


def test_buffers_of_spectral_norms_are_recognized():
    parametrization = parametrizations.spectral_norm(nn.Linear(2, 2)).parametrizations.weight[0]
    buffers = modules.spectral_buffers(parametrization), modules.spectral_buffers(spectral_norm(nn.Linear(2, 2)))
    assert buffers == (["_u", "_v"], ["weight_u", "weight_v"]), "torch's spectral norms have other buffers: say batch="


def test_weights_cached_in_plain_attributes_are_recognized():
    pruned = prune.identity(nn.Linear(2, 2), "weight")
    assert "weight" in modules.cached_weights(pruned), "a pruned weight is no plain attribute any more"
    assert modules.caches_weights(pruned), "pruning is no hook any more: functional_call would leave its weight behind"
    assert "_flat_weights" in modules.cached_weights(nn.LSTM(2, 2)), "RNNs keep their weights elsewhere"
    assert not modules.caches_weights(nn.Linear(2, 2))


def test_hooks_are_recognized():
    net, leaf = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    assert not torch_internals.hooks_of(net)
    assert not torch_internals.has_gradient_hooks(leaf)
    net.register_full_backward_hook(lambda *_: None)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_internals.hooks_of(net), "a module's hooks are in other dicts: from_sequential would not refuse them"
    assert torch_internals.has_gradient_hooks(leaf), "a tensor's hooks are in other dicts: a stage would not run them"


def test_modules_that_draw_random_numbers_are_recognized():
    dropouts = nn.Dropout(), nn.AlphaDropout()
    assert all(map(torch_internals.is_dropout, dropouts)), "dropouts have no common class any more"
    pool_with_samples = nn.FractionalMaxPool2d(2, output_size=2, _random_samples=torch.rand(1, 1, 2))
    pool_without_samples = nn.FractionalMaxPool2d(2, output_size=2)
    has_samples = [torch_internals.has_own_samples(pool) for pool in (pool_with_samples, pool_without_samples)]
    assert has_samples == [True, False], "a fractional pool keeps its random numbers elsewhere"


def test_forward_mode_loads_without_a_warning():
    code = (
        "import fpipe.torch_private.modules as m; m.load_forward_mode(); import torch, torch.autograd.forward_ad as f"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert not run.stderr, "the derivatives of forward mode moved: jvp warns of torch.jit.script"


def test_the_three_dicts_of_a_module_bind_its_members():
    norm = nn.Sequential(nn.BatchNorm1d(2))
    norm_members, net_members = torch_internals.direct_members(norm[0]), torch_internals.direct_members(norm)
    assert [*norm_members.parameters] == ["weight", "bias"], "parameters are elsewhere: a frozen one would go unseen"
    assert net_members.children == {"0": norm[0]}, "children are elsewhere: one that was exchanged would go unseen"
    norm_members.buffers["running_mean"] = torch.ones(2)
    assert torch.equal(norm[0].running_mean, torch.ones(2)), "buffers are elsewhere: the state of a norm would be lost"


def test_tensors_bound_to_modules_are_reported():
    names = list[str]()
    with torch_internals.watch_bindings(lambda module, name: names.append(name)):
        norm = nn.BatchNorm1d(2)
        norm.running_mean = torch.ones(2)
    norm.running_mean = torch.zeros(2)
    assert [*dict.fromkeys(names)] == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


def test_assignments_to_modules_are_reported():
    names: list[str] = []
    module = nn.Linear(2, 2)

    def record(module: nn.Module, name: str, value: object, assign: Callable[..., None]) -> None:
        names.append(name)
        assign(module, name, value)

    with modules.intercept_assignments(record):
        module.seen = torch.ones(2)
    module.later = torch.ones(2)
    assert names == ["seen"], "Module.__setattr__ is not asked: an export would not see what a forward keeps"
    assert torch.equal(module.seen, module.later)
