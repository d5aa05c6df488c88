"""Nets on meta are cut, sized, loaded by stage, and trained with the bits of plain autograd."""

import functools
import json
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from tests.own_autograd import eager_loss_and_grads
from tests.processes import Processes
from tests.refusals import refusals
from tests.toys import Toy


class Rotary(nn.Module):
    """A module whose constructor fills a table, which no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(1 / torch.arange(1.0, 9.0))


class Net(nn.Module):
    """A net with a tied embedding, a rotary table, and numbers and positions made where the input is.

    Its mask is made on torch's default device: it used to be refused for not being on meta.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(11, 8), Rotary()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril()
        rotations = torch.cos(positions[:, None] * self.rotary.table)
        x = self.embed(ids) * torch.tensor([0.5], device=ids.device)
        for block in self.blocks:
            x = x + mask @ torch.tanh(block(x) * rotations)
        return self.head(x)


def loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def ids(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randint(11, (4, 5)), torch.randint(11, (4, 5))


ON_META: Any = tuple(half.to("meta") for half in ids())
TWO_RANKS = fpipe.Machine(ranks=2), fpipe.Candidates(microbatches=[2])


def cut(net: Any, ranks: int = 2) -> tuple[fpipe.Model, Any, fpipe.Program]:
    model, params, _ = fpipe.from_module(net, stages=2 if ranks < 4 else 4, loss=loss, batch=ON_META)
    schedule = fpipe.schedules.one_f_one_b(ranks)
    return model, params, fpipe.chain(fpipe.split(2), schedule, fpipe.merge())(fpipe.program(model))


@functools.cache
def on_meta(ranks: int = 2) -> tuple[fpipe.Model, Any, fpipe.Program]:
    with torch.device("meta"):
        net = Net()
    return cut(net, ranks)


def join_ranks(rank_params: list[Any]) -> tuple[Any, ...]:
    """Join the parameters that each rank holds into one tuple over stages."""
    return tuple(next(leaves for leaves in stage if leaves is not None) for stage in zip(*rank_params, strict=True))


def load_all_ranks(model: fpipe.Model, program: fpipe.Program, source: Any, **options: Any) -> tuple[Any, ...]:
    return join_ranks(
        [fpipe.load_params(model, program, source, rank=rank, **options) for rank in range(program.ranks)]
    )


def real_net() -> Net:
    torch.manual_seed(1)
    return Net()


def assert_autograd_grads(
    net: Net, actual_grads: dict[str, Any], replica_results: Sequence[tuple[Tensor, dict[str, Tensor]]]
) -> None:
    """Assert the gradients of plain autograd, of one replica or the mean of several.

    Those of a tied weight add up in another order, so only to rounding.
    """
    for name, _ in net.named_parameters():
        expected_grad = sum(grads[name] for _, grads in replica_results) / len(replica_results)
        if name == "embed.weight":
            torch.testing.assert_close(actual_grads[name], expected_grad)
        else:
            assert torch.equal(actual_grads[name], expected_grad), name


def autograd_loss_and_grads(net: Net, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return eager_loss_and_grads(net, batch, 2, key=0, ends=(), loss=loss)


@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_a_net_cut_on_meta_trains_with_the_bits_of_plain_autograd(runtime: Any):
    """Used to train to nan after a warning: tensors made in forward stayed on meta."""
    torch.set_num_threads(1)
    model, meta, program = on_meta()
    assert all(leaf.is_meta for stage in meta for leaf in stage.values())
    params = load_all_ranks(model, program, real_net().state_dict())
    result = fpipe.build(program, model, runtime=runtime)(params, ids())
    net, grads = real_net(), fpipe.join_params(model, result.grads)
    expected = autograd_loss_and_grads(net, ids())
    assert torch.equal(result.loss, expected[0])
    assert grads["rotary.table"] is None
    assert_autograd_grads(net, grads, [expected])


def test_sizes_on_meta_equal_those_of_the_net():
    model, meta, program = on_meta()
    params = load_all_ranks(model, program, real_net().state_dict())
    sizes, expected = (fpipe.sizes(program, model, *arguments) for arguments in ((meta, ON_META), (params, ids())))
    assert (sizes.bytes, sizes.wire_bytes, sizes.peak) == (expected.bytes, expected.wire_bytes, expected.peak)


class NetWithMask(Net):
    """A net whose constructor fills a mask on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5, 5, device="cpu").tril() / 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mask @ super().forward(ids)


def test_a_buffer_that_a_constructor_makes_on_the_cpu_is_a_constant_with_values():
    with torch.device("meta"):
        net = NetWithMask()
    model, meta, program = cut(net)
    assert "mask" not in fpipe.join_params(model, meta)
    torch.manual_seed(1)
    net_on_cpu, batch = NetWithMask(), ids()
    params = load_all_ranks(model, program, net_on_cpu.state_dict())
    result = fpipe.build(program, model)(params, batch)
    expected_result = autograd_loss_and_grads(net_on_cpu, batch)
    assert torch.equal(result.loss, expected_result[0])
    assert_autograd_grads(net_on_cpu, fpipe.join_params(model, result.grads), [expected_result])
    with pytest.raises(ValueError, match=r"'mask' is a constant of stage 1.* has other values in the state_dict"):
        fpipe.load_params(model, program, {**net_on_cpu.state_dict(), "mask": torch.ones(5, 5)}, rank=1)


def test_init_params_copies_leaves_that_have_values():
    """Used to move a live net to meta, and to draw new values in init_params."""
    live_layer = nn.Linear(8, 8)
    with torch.device("meta"):
        model, _, _ = fpipe.from_sequential(nn.Sequential(live_layer, nn.Linear(8, 8)), 1)
    values = fpipe.init_params(model, fpipe.program(model), rank=0)[0]
    assert torch.equal(values["0.weight"], live_layer.weight)
    assert values["0.weight"].data_ptr() != live_layer.weight.data_ptr()
    model, _, _ = fpipe.from_sequential(nn.Sequential(live_layer), 1)
    with pytest.warns(UserWarning, match=r"^init_params copies '0.weight' and 1 more: no parameter .* is on meta"):
        fpipe.init_params(model, fpipe.program(model), rank=0)


def test_parametrized_modules_get_first_values_from_init():
    """Used to fail with torch's refusal to copy such a module, without a word of init=."""
    norm = nn.utils.parametrizations.weight_norm
    with torch.device("meta"):
        model, _, _ = fpipe.from_sequential(nn.Sequential(norm(nn.Linear(8, 8))), 1)
    program = fpipe.program(model)
    with pytest.raises(
        ValueError, match=r"original0' is on meta.*to a ParametrizationList, which.*\(\)\. Fill it by init="
    ):
        fpipe.init_params(model, program, rank=0)
    values = fpipe.init_params(
        model, program, rank=0, init=lambda name, tensor: False if name == "0.bias" else tensor.normal_()
    )
    assert 0 < float(values[0]["0.bias"].abs().max()) <= 8**-0.5


class Zeroed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        nn.init.zeros_(self.bias)


def test_init_params_warns_of_values_that_only_a_constructor_sets():
    with torch.device("meta"):
        model, _, _ = fpipe.from_sequential(nn.Sequential(nn.Linear(8, 8), Zeroed()), 1)
    program = fpipe.schedules.gpipe(1)(fpipe.program(model))
    with pytest.warns(UserWarning, match=r"^'1.bias' has values by reset_parameters.* Give those by init="):
        fpipe.init_params(model, program, rank=0)
    values = fpipe.init_params(model, program, rank=0, init=lambda name, tensor: name == "1.bias" and tensor.zero_())
    assert not values[0]["1.bias"].any()


def save_weights(kind: str, tensors: dict[str, Tensor], folder: Path) -> Path:
    """Save the weights of a net in one file, several files, or a distributed checkpoint."""
    if kind == "checkpoint":
        with warnings.catch_warnings(action="ignore"):  # torch warns that a single process saves
            save(dict(tensors), checkpoint_id=folder / "step", no_dist=True)
        return folder / "step"
    if kind == "file":
        save_file(tensors, folder / "all.safetensors")
        return folder / "all.safetensors"
    names = [*tensors]
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, file_names in halves.items():
        save_file({name: tensors[name] for name in file_names}, folder / file)
    index = {"weight_map": {name: file for file, file_names in halves.items() for name in file_names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder if kind == "folder" else folder / "model.safetensors.index.json"


@pytest.mark.parametrize("kind", ["file", "index", "folder", "checkpoint"])
def test_files_give_the_parameters_of_the_state_dict(kind: str, tmp_path: Path):
    tensors = dict(real_net().state_dict())
    del tensors["head.weight"]  # files of transformers hold a tied weight once
    model, _, program = on_meta()
    params = load_all_ranks(model, program, save_weights(kind, tensors, tmp_path))
    expected = load_all_ranks(model, program, real_net().state_dict())
    assert all(torch.equal(a[name], b[name]) for a, b in zip(params, expected, strict=True) for name in b)


def test_a_rank_reads_only_the_leaves_of_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fpipe.models.parameters.sources import SafetensorsFile

    names: list[str] = []
    plain_read = SafetensorsFile.read_tensor
    monkeypatch.setattr(SafetensorsFile, "read_tensor", lambda file, name: names.append(name) or plain_read(file, name))
    model, _, program = on_meta()
    tensors = dict(real_net().state_dict())
    del tensors["head.weight"]
    local_params = fpipe.load_params(model, program, save_weights("file", tensors, tmp_path), rank=1)
    assert local_params[0] is None
    assert sorted(names) == sorted({*local_params[1]} - {"rotary.table"})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_first_values_have_the_same_bits_on_any_number_of_ranks(ranks: int):
    one_rank_model, _, one_rank_program = on_meta(1)
    expected = fpipe.join_params(one_rank_model, fpipe.init_params(one_rank_model, one_rank_program, rank=0, seed=7))
    model, _, program = on_meta(ranks)
    rank_params = [fpipe.init_params(model, program, rank=rank, seed=7) for rank in range(ranks)]
    actual = fpipe.join_params(model, join_ranks(rank_params))
    params_of_other_seed = fpipe.join_params(
        one_rank_model, fpipe.init_params(one_rank_model, one_rank_program, rank=0, seed=8)
    )
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not torch.equal(params_of_other_seed["head.bias"], expected["head.bias"])


def test_init_params_by_a_function_leaves_torchs_generator_alone():
    model, _, program = on_meta(1)

    def init(name: str, tensor: Tensor) -> Any:
        return False if name == "rotary.table" else tensor.normal_(std=0.02)

    rng_state = torch.get_rng_state()
    params = fpipe.join_params(model, fpipe.init_params(model, program, rank=0, init=init))
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert torch.equal(params["rotary.table"], real_net().rotary.table)
    assert 0 < params["blocks.0.weight"].std() < 0.05


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(11, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8), persistent=False)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) * self.scale + self.shift)


def test_a_leaf_without_values_is_refused_by_name():
    with torch.device("meta"):
        net = Bare()
    model, _, program = cut(net, ranks=1)
    with pytest.raises(
        ValueError, match=r"'(scale|shift)' is on meta.* Bare, which has no reset_parameters\(\)\. Fill it by init="
    ):
        fpipe.init_params(model, program, rank=0)
    with pytest.raises(ValueError, match=r"'shift' is on meta"):
        fpipe.load_params(model, program, Bare().state_dict(), rank=0)
    with pytest.raises(ValueError, match=r"init= leaves '(scale|embed.weight|shift)' as it is"):
        fpipe.init_params(model, program, rank=0, init=lambda name, tensor: None)
    params = load_all_ranks(model, program, Bare().state_dict(), init=lambda name, tensor: tensor.zero_())
    assert fpipe.verify(program, model, params, ids()).bitwise


def test_a_plain_attribute_on_meta_is_refused_at_the_cut():
    class Masked(Bare):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(8)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * self.mask[:1]

    with torch.device("meta"), pytest.raises(ValueError, match=r"'mask' is a tensor on meta.*register_buffer"):
        cut(Masked())


def load_changed(**change: Any) -> Any:
    """Load the parameters of rank 0 from a changed state_dict."""
    state_dict = {name: leaf for name, leaf in {**real_net().state_dict(), **change}.items() if leaf is not None}
    model, _, program = on_meta()
    return fpipe.load_params(model, program, state_dict, rank=0)


def call_on_meta(call: Callable[..., Any], batch: Any = None, **options: Any) -> Any:
    """Call a reading on the program, model and parameters of a net on meta."""
    model, meta, program = on_meta()
    return call(program, model, meta, ids() if batch is None else batch, **options)


def step(program: Any, model: Any, params: Any, batch: Any, example: bool = False) -> Any:
    return fpipe.build(program, model, example=(params, batch) if example else None)(params, batch)


test_leaves_on_meta_and_unknown_leaves_are_refused_by_name = refusals(
    globals(),
    """
load_changed(**{"head.bias": None})
    ValueError: the source lacks 'head.bias', a parameter of stage 1
load_changed(extra=torch.zeros(1))
    ValueError: the state_dict has 'extra', which is no parameter or buffer of the net
load_changed(**{"head.bias": torch.zeros(3)})
    ValueError: 'head.bias' has shape [11] in the net, [3] in the state_dict
load_changed(**{"head.bias": torch.zeros(11).half()})
    ValueError: 'head.bias' is torch.float32 in the net, and torch.float16
load_changed(**{"head.bias": torch.zeros(11, device="meta")})
    ValueError: has a tensor on meta, without values under 'head.bias'
load_changed(**{"head.weight": torch.zeros(11, 8)})
    ValueError: 'embed.weight' and 'head.weight' are one parameter of the net
fpipe.load_params(on_meta()[0], on_meta()[2], 3, rank=0)
    TypeError: a source is a path, or a state_dict; found int
# Used to be read as nan, after a warning.
call_on_meta(step)
    ValueError: params[0]['embed.weight'] is on meta, without values: fpipe.load_params or fpipe.init_params
call_on_meta(step, example=True)
    ValueError: params[0]['embed.weight'] is on meta, without values: fpipe.load_params or fpipe.init_params
call_on_meta(fpipe.verify)
    ValueError: params[0]['embed.weight'] is on meta, without values: fpipe.load_params or fpipe.init_params
call_on_meta(fpipe.profile, ON_META)
    ValueError: params[0]['embed.weight'] is on meta
call_on_meta(lambda program, model, *given: fpipe.plan_run(model, *TWO_RANKS, example=given), ON_META)
    ValueError: say flops=, operations a second of a rank
call_on_meta(fpipe.verify, ON_META)
    ValueError: batch[0] is on meta, without values: there is nothing to compare
""",
)


def test_a_net_on_meta_is_planned_by_operations():
    model, meta, _ = on_meta()
    machine, candidates = fpipe.Machine(ranks=2, flops=1e9), fpipe.Candidates([2, 4], schedules=["gpipe"])
    plans = fpipe.plan_run(model, machine, candidates, example=(meta, ON_META))
    assert {(row.costs, row.fits) for row in plans} == {("estimated", True)}
    assert plans.best.makespan > 0


@pytest.mark.parametrize("has_norm", [False, True])
def test_buffers_without_values_are_refused_by_name(has_norm: bool):
    with torch.device("meta"):
        layer = nn.BatchNorm1d(8) if has_norm else Rotary()
        net = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
    layer.forward = layer.forward if has_norm else lambda x: x * layer.table
    model, _, state = fpipe.from_sequential(net, stages=1, loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    params = fpipe.init_params(model, fpipe.schedules.gpipe(1)(program), rank=0)
    batch = torch.ones(4, 8), torch.ones(4, 8)
    name = r"state\[0\]\['1.running_mean'\]" if has_norm else r"net\['1.table'\]"
    with pytest.raises(ValueError, match=rf"{name} is on meta, without values: "):
        fpipe.build(program, model)(params, batch, **({"state": state} if has_norm else {}))


def net_with_norm() -> nn.Module:
    layers = {"first": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 8)}
    return Toy(lambda module, x: module.last(module.norm(module.first(x))), **layers)


@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
def test_load_params_loads_the_state_of_a_net_on_meta(door: str):
    """Used to leave the statistics of a batch norm on meta without values."""
    torch.manual_seed(0)
    trained_net, batch = net_with_norm(), (torch.randn(4, 8), torch.randn(4, 8))
    trained_net(torch.randn(6, 8))  # move the statistics away from their initial values
    with torch.device("meta"):
        net, example = net_with_norm(), (torch.empty(4, 8), torch.empty(4, 8))
    options = {"loss": nn.functional.mse_loss}
    if door == "from_module":
        model, _, state = fpipe.from_module(net, 2, batch=example, **options)
        state_dict = trained_net.state_dict()
    else:
        model, _, state = fpipe.from_sequential(nn.Sequential(*net.children()), 2, batch=example, **options)
        state_dict = nn.Sequential(*trained_net.children()).state_dict()
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    params = load_all_ranks(model, program, state_dict)
    local_state = load_all_ranks(model, program, state_dict, state=state)
    assert [[*stage_state] for stage_state in local_state] == [[*stage_state] for stage_state in state]
    result = fpipe.build(program, model)(params, batch, state=local_state)
    for microbatch_rows in (slice(0, 2), slice(2, 4)):
        (nn.functional.mse_loss(trained_net(batch[0][microbatch_rows]), batch[1][microbatch_rows]) * 0.5).backward()
    grads = [leaf for stage in result.grads for leaf in stage.values()]
    assert all(map(torch.equal, grads, [leaf.grad for leaf in trained_net.parameters()]))
    state_by_name = {name.rpartition(".")[2]: leaf for name, leaf in result.state[0].items()}
    assert state_by_name.keys() == dict(trained_net.norm.named_buffers()).keys()
    assert all(torch.equal(leaf, state_by_name[name]) for name, leaf in trained_net.norm.named_buffers())
    initial_state = join_ranks([fpipe.init_params(model, program, rank, state=state) for rank in range(2)])
    assert sorted(float(leaf.sum()) for leaf in fpipe.tree.leaves(initial_state)) == [0, 0, 8]
    with pytest.raises(ValueError, match="state= has 2 entries, one a stage; found 1"):
        fpipe.load_params(model, program, state_dict, rank=0, state=state[:1])


def step_on_shards(rank: int, folder: str) -> list[Any]:
    """Train a sharded net on meta from a checkpoint: return the whole gradients of the local stage."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, meta, program = on_meta()
    program = fpipe.shard("dp", gather="use")(program)
    stage = mesh.get_local_rank("pp")
    local_params = fpipe.load_params(model, program, folder, rank=stage)
    shards = fpipe.shard_params(local_params, mesh["dp"])
    batch = tuple(half.chunk(2)[mesh.get_local_rank("dp")] for half in ids())
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batch))
    grads = step(shards, batch).grads[stage]
    whole_grads = {name: grad.full_tensor() for name, grad in grads.items() if grad is not None}
    meta_params = fpipe.local_params(program, meta, stage)
    name = [*meta_params[stage]][-1]
    lacking = tuple(stage_params and {**stage_params, name: meta_params[stage][name]} for stage_params in local_params)
    with pytest.raises(ValueError, match=re.escape(f"reads shard[{stage}]['{name}'], and was handed None or a meta")):
        step(fpipe.shard_params(lacking, mesh["dp"]), batch)  # ends the run
    return [model.stages[stage].name, {name: grad.tolist() for name, grad in whole_grads.items()}]


def test_a_net_on_meta_trains_on_processes_with_its_local_stages_alone(four: Processes, tmp_path: Path):
    """Used to want meta tensors in the example for the stages of other ranks, which the net knows."""
    torch.set_num_threads(1)
    folder = save_weights("checkpoint", dict(real_net().state_dict()), tmp_path)
    grads_by_stage = dict(four.run(step_on_shards, str(folder)))
    grads = {name: torch.tensor(numbers) for stage in grads_by_stage.values() for name, numbers in stage.items()}
    halves = [tuple(half[2 * index : 2 * index + 2] for half in ids()) for index in range(2)]
    assert_autograd_grads(real_net(), grads, [autograd_loss_and_grads(real_net(), half) for half in halves])


def net_out_of_order() -> nn.Module:
    """Return a net that uses its layers in another order than it defines them."""
    layers = {"last": nn.Linear(4, 3), "first": nn.Linear(4, 4), "middle": nn.Linear(4, 4)}
    return Toy(lambda module, x: module.last(torch.tanh(module.middle(torch.tanh(module.first(x))))), **layers)


@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
def test_loaded_parameters_have_the_order_of_the_net(door: str):
    """Used to be refused: ranks that loaded their stages, and ranks that passed the net's, had different orders."""
    net = net_out_of_order() if door == "from_module" else nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    batch, options = (torch.randn(4, 4), torch.randn(4, 3)), {"loss": nn.functional.mse_loss}
    if door == "from_module":
        model, params, _ = fpipe.from_module(net, 2, batch=batch, **options)
    else:
        model, params, _ = fpipe.from_sequential(net, 2, **options)
    loaded_params = fpipe.load_params(model, fpipe.program(model), net.state_dict(), rank=0)
    assert [[*stage] for stage in loaded_params] == [[*stage] for stage in params]


def test_tensors_of_a_state_dict_are_handed_on_as_they_are():
    """Used to be moved to torch's default device."""
    net = nn.Sequential(nn.Linear(2, 2))
    model, *_ = fpipe.from_sequential(net, stages=1)
    with torch.device("meta"):
        (params,) = fpipe.load_params(model, fpipe.program(model), net.state_dict(), rank=0)
    assert params is not None
    assert params["0.weight"].data_ptr() == net[0].weight.data_ptr()
