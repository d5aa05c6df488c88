"""nn.Sequentials in stages: parameters and gradients by name, and errors for nets that no stage can hold."""

import copy
import pickle
import re
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from tests.refusals import refusals
from tests.toys import Toy, assert_unsplit, merged, run_unsplit, scripted

F = nn.functional


class Tied(nn.Module):
    """A module with one weight under two names."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.down = nn.Linear(3, 3, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(self.up(x).tanh())


WRITERS = {
    "1.seen' in place (aten.add_.Tensor)": lambda module, x: x + module.seen.add_(1),
    "1.mean' in place": lambda module, x: F.batch_norm(
        x, module.mean, module.var, training=True
    ),  # batch_norm does not bump their versions
    "1.seen' anew": lambda module, x: (setattr(module, "seen", module.seen + 1), x + module.seen)[1],
    "1.more' anew": lambda module, x: (module.register_buffer("more", torch.zeros(()), persistent=False), x)[1],
}


def mlp(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), **options)


def test_params_and_grads_of_functions_are_joined_by_stage():
    def f(params, x):
        return x

    model = fpipe.from_functions([f] * 3, ties=[[(0, "e"), (2, "head")]])
    e, w = torch.randn(2), torch.randn(3)
    params = ({"e": e, "more": [w]}, (w, None), {"b": w})
    joined_params = fpipe.join_params(model, params)
    assert joined_params == {0: {"e": e, "more": [w]}, 1: (w, None), 2: {"b": w, "head": e}}
    assert fpipe.split_params(model, joined_params) == params
    with pytest.raises(
        ValueError, match=re.escape("[0]['e'] and [2]['head'] are one parameter, but have different values.")
    ):
        fpipe.split_params(model, {**joined_params, 2: {"b": w, "head": e + 1}})


def test_an_optimizer_of_the_net_trains_with_assigned_gradients():
    """Used not to train, in silence: the net's parameters got no gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    result = fpipe.build(fpipe.program(model), model)(params, batch)
    optimizer, old_leaves = torch.optim.SGD(net.parameters(), lr=0.5), [leaf.clone() for leaf in net.parameters()]
    fpipe.assign_grads(net, result.grads)
    optimizer.step()
    grads = fpipe.join_params(model, result.grads)
    expected = [old_leaf - 0.5 * grads[name] for old_leaf, name in zip(old_leaves, grads, strict=True)]
    assert all(map(torch.equal, net.parameters(), expected))
    with pytest.raises(ValueError, match=re.escape("a gradient of '2.weight', which is no parameter of this Linear.")):
        fpipe.assign_grads(nn.Linear(3, 3), (result.grads[1],))
    with pytest.raises(ValueError, match="a dict per stage; found Tensor"):
        fpipe.assign_grads(net, torch.zeros(3))
    with pytest.raises(ValueError, match=r"found Result\. Hand in result\.grads\."):
        fpipe.assign_grads(net, result)
    for leaves in (net, params):
        with pytest.raises(ValueError, match=r"the parameter itself; hand in result\.grads\."):
            fpipe.assign_grads(leaves, params)
    orphaned_grads = result.grads
    del result  # a live result marks its tensors as gradients
    with pytest.raises(ValueError, match=r"assign_grads\(params, grads\) takes params first"):
        fpipe.assign_grads(orphaned_grads, params)


@pytest.mark.parametrize("traced", [True, False])
def test_the_order_of_a_dict_of_parameters_does_not_matter(traced: bool):
    """A stage orders its parameters its own way; results come back in the caller's order."""
    torch.manual_seed(0)
    model, params, _ = fpipe.from_sequential(nn.Sequential(Tied(), nn.Linear(3, 3)), stages=2, loss=F.mse_loss)
    step = fpipe.build(fpipe.program(model), model, trace=traced)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    reversed_params = tuple(dict(reversed(stage.items())) for stage in params)
    result, expected = step(reversed_params, batch), step(params, batch)
    assert [[*stage] for stage in result.grads] == [[*stage] for stage in reversed_params]
    assert torch.equal(result.loss, expected.loss)
    for actual_grads, expected_grads in zip(result.grads, expected.grads, strict=True):
        assert all(torch.equal(actual_grads[name], grad) for name, grad in expected_grads.items())


def test_children_are_balanced_by_bytes_or_counted_by_sizes():
    model, params, _ = fpipe.from_sequential(mlp(), stages=3)
    assert [stage.name for stage in model.stages] == ["0, 1", "2, 3", "4"]
    assert [list(stage) for stage in params] == [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]]
    model, params, _ = fpipe.from_sequential(mlp(), sizes=[1, 1, 3])
    assert [stage.name for stage in model.stages] == ["0", "1", "2, 3, 4"]
    assert params[1] == {}


@pytest.mark.parametrize("problem", WRITERS)
@pytest.mark.parametrize("trace", [True, False, None], ids=["traced", "by autograd", "reference"])
def test_a_written_buffer_is_refused(problem, trace):
    """A write in place is refused before it happens; a rebound buffer is restored."""
    module = Toy(WRITERS[problem], seen=torch.zeros(()), mean=torch.zeros(3), var=torch.ones(3))
    net = nn.Sequential(nn.Linear(3, 3), module)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 1], loss=F.mse_loss)
    buffers_before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    name, verb = problem.partition("'")[0], "binds" if problem.endswith("anew") else "writes"
    sentences = (
        f"stage 1 (1) {verb} buffer or parameter '{problem}",
        ". What a module remembers is state: cut the net by from_sequential(..., batch=batch), or say "
        f"state=[{name!r}]",
    )
    batch = torch.randn(4, 3), torch.randn(4, 3)
    for example in (None, (params, batch)):
        step = fpipe.build(fpipe.program(model), model, trace=bool(trace), example=example)
        with pytest.raises(RuntimeError, match=".*".join(map(re.escape, sentences))):
            fpipe.reference(model, params, batch) if trace is None else step(params, batch)
    buffers_after = dict(net.named_buffers())
    assert buffers_after.keys() == buffers_before.keys()
    assert all(torch.equal(buffers_after[name], buffers_before[name]) for name in buffers_before)


def test_threads_that_run_one_stage_do_not_mix_their_params():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model, params, _ = fpipe.from_sequential(net, stages=1)
    x, wrong = torch.randn(8, 16), []

    def work(number):
        p = {name: torch.full_like(leaf, number) for name, leaf in params[0].items()}
        expected = (x @ p["0.weight"].T + p["0.bias"]).tanh() @ p["2.weight"].T + p["2.bias"]
        wrong.extend(number for _ in range(50) if not torch.allclose(model.stages[0].forward(p, x), expected))

    threads = [threading.Thread(target=work, args=(number / 10,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_can_be_copied_and_sent_to_another_process():
    model, params, _ = fpipe.from_sequential(mlp(), stages=2, loss=F.mse_loss)
    batch = torch.randn(4, 3), torch.randn(4, 2)
    expected_loss = fpipe.build(fpipe.program(model), model)(params, batch).loss
    for model_copy in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(fpipe.build(fpipe.program(model_copy), model_copy)(params, batch).loss, expected_loss)


def net_with_hook(register):
    net = mlp()
    register(net)
    return net


def net_with_shared_weight(weight):
    net = mlp()
    net[2].weight = nn.Parameter(torch.zeros(8, 8))
    net.append(nn.Linear(8, 8))
    net[5].weight = weight(net[2].weight)
    return net


class Negated(nn.Sequential):
    def forward(self, x):
        return -super().forward(x)


class Owner(nn.Sequential):
    def __init__(self, *children):
        super().__init__(*children)
        self.scale = nn.Parameter(torch.ones(()))


def cut(net, **options):
    return fpipe.from_sequential(net, **(options or {"stages": 2}))


def split_changed(change, net=mlp):
    """Join the parameters of a net, change some, and split them again."""
    model, params, _ = cut(net())
    return fpipe.split_params(model, fpipe.join_params(model, params) | change)


def assign_changed(change):
    """Assign changed gradients to the parameters of a net."""
    _, params, _ = cut(mlp())
    grads = [{name: torch.zeros_like(leaf) for name, leaf in stage.items()} for stage in params]
    change(grads)
    fpipe.assign_grads(params, tuple(grads))


SCRIPTED = nn.Sequential(nn.Linear(4, 4), scripted())
test_a_net_that_cannot_be_cut_is_refused_by_name = refusals(
    globals(),
    """
cut(nn.Sequential(nn.LazyLinear(2), Tied()))
    ValueError: '0.weight' is not initialised yet (a lazy module)
cut(net_with_hook(lambda net: net.register_forward_hook(print)))
    ValueError: the Sequential itself has hooks, which no stage would run. Remove them, or register them on the
cut(net_with_hook(lambda net: net[2].weight.register_hook(print)))
    ValueError: parameter '2.weight' has a gradient hook; stages differentiate detached aliases of parameters, which no
    hook
cut(net_with_hook(lambda net: net[2].weight.register_post_accumulate_grad_hook(print)))
    ValueError: parameter '2.weight' has a gradient hook
cut(net_with_shared_weight(lambda weight: nn.Parameter(weight.detach().T)))
    ValueError: '2.weight' in stage 0 and '5.weight' in stage 1 share a storage, but are two parameters;
cut(Negated(nn.Tanh(), nn.Tanh()))
    ValueError: Negated has a forward of its own: use fpipe.from_module.
# Used to end in an AttributeError.
cut(SCRIPTED)
    ValueError: module '1' (RecursiveScriptModule) is compiled by torch.jit: no trace sees into it. Take
cut(Owner(nn.Tanh(), nn.Tanh()))
    ValueError: 'scale' belongs to the Sequential itself; move it into one of its children
cut(mlp(), stages=6)
    ValueError: 5 children make at most 5 stages and at least one, found stages=6.
cut(mlp(), sizes=[5, 0])
    ValueError: sizes=[5, 0] sum to 5, the net has 5 children; a stage has at least one.
cut(mlp(), stages=3, sizes=[2, 3])
    ValueError: stages=3, but sizes=[2, 3] are 2 stages; say one.
cut(mlp(), stages=None)
    ValueError: say the number of stages, or sizes= with the number of children in each.
assign_changed(lambda grads: grads[1].pop("2.bias"))
    ValueError: only one of them has a leaf at [1]['2.bias'].
assign_changed(lambda grads: grads[0].update({"0.weight": torch.zeros(2)}))
    ValueError: at [0]['0.weight'] has shape (2,), its parameter (8, 3).
cut(mlp())[0].stages[0].forward({"0.bias": torch.zeros(8)}, torch.zeros(2, 3))
    ValueError: params of stage 0 must have '0.weight', which is missing.
split_changed({"running": torch.zeros(1)})
    ValueError: the whole has 'running', which is not a parameter that trains, nor a buffer or
split_changed({"0.down.weight": torch.zeros(3, 3)}, lambda: nn.Sequential(Tied(), nn.Tanh()))
    ValueError: '0.up.weight' and '0.down.weight' are one parameter, but have different values.
""",
)


def test_split_params_takes_the_state_dict_of_a_net_with_buffers():
    """Buffers and frozen parameters stay with the net, so those of another net are refused."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False))
    model, params, _ = fpipe.from_sequential(net, stages=2)
    split_stages = fpipe.split_params(model, net.state_dict())
    assert [list(stage) for stage in split_stages] == [list(stage) for stage in params]
    assert all(
        split_stage[name].is_set_to(stage_params[name])
        for split_stage, stage_params in zip(split_stages, params, strict=True)
        for name in split_stage
    )
    for name in ("1.running_mean", "2.weight"):
        with pytest.raises(
            ValueError, match=f"the whole has '{name}', which is not a parameter that trains, nor a buff"
        ):
            fpipe.split_params(model, {**net.state_dict(), name: net.state_dict()[name].clone()})
    with pytest.raises(ValueError, match=re.escape("the whole is a dict such as net.state_dict(); found Sequential.")):
        fpipe.split_params(model, net)


REPLACEMENTS = {
    "another .data": ("2.weight", lambda net: setattr(net[2].weight, "data", net[2].weight.data.clone())),
    "assigned": ("0.weight", lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)),
    "another dtype": ("0.weight", lambda net: net.double()),
}


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "replace"), REPLACEMENTS.values(), ids=REPLACEMENTS.keys())
@pytest.mark.parametrize("trace", [True, False])
def test_parameters_that_the_net_has_replaced_are_refused(name: str, replace, trace: bool):
    """Used to train the replaced parameters, which belonged to no net, while buffers followed the net."""
    net, batch = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), (torch.zeros(4, 3), torch.zeros(4, 2))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    step = fpipe.build(fpipe.program(model), model, trace=trace)
    old_result = step(params, batch)
    replace(net)
    message = f"have the '{name}' that was handed out with the model; the net has another tensor in its place by now"
    for call in (step, partial(fpipe.reference, model)):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(params, batch)
    copies = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in params)
    assert torch.equal(step(copies, batch).loss, old_result.loss)
    batch = tuple(half.to(net[0].weight.dtype) for half in batch)
    new_params = fpipe.split_params(model, net.state_dict())
    assert torch.equal(step(new_params, batch).outputs, net(batch[0]))


NOT_PARAMS = {
    "a state_dict": (nn.Module.state_dict, "OrderedDict."),
    "a list": (lambda net: list(net.parameters()), "found 6 of them."),
    "two of them": (lambda net: list(net.parameters())[:2], "found Parameter; the batch comes after params."),
    "a generator": (nn.Module.parameters, "generator."),
    "the net": (lambda net: net, "Sequential."),
}


@pytest.mark.parametrize(("wrong_params", "complaint"), NOT_PARAMS.values(), ids=NOT_PARAMS.keys())
def test_wrong_params_are_answered_with_split_params(wrong_params, complaint: str):
    net, batch = mlp(), (torch.zeros(4, 3), torch.zeros(4, 2))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    program = fpipe.program(model)
    step = fpipe.build(program, model)
    message = re.escape(f"{complaint} fpipe.split_params(model, net.state_dict()) makes")
    for call in (step, fpipe.build(program, model, trace=False)):
        with pytest.raises(ValueError, match=message):
            call(wrong_params(net), batch)
    for call in (partial(fpipe.verify, program, model), partial(fpipe.reference, model)):
        with pytest.raises(ValueError, match=message):
            call(wrong_params(net), batch)
    result = step(fpipe.split_params(model, net.state_dict()), batch)
    assert torch.equal(result.loss, step(params, batch).loss)


def test_a_module_used_twice_keeps_its_parameters():
    """Used to swap parameters in at both paths, and to restore a tensor without data at the second."""
    linear = nn.Linear(3, 3)
    linear.bias.requires_grad_(False)
    leaves_before = linear.weight, linear.bias
    model, params, _ = fpipe.from_sequential(nn.Sequential(linear, nn.Tanh(), linear), stages=1, loss=F.mse_loss)
    for trace in (True, False):
        fpipe.build(fpipe.program(model), model, trace=trace)(params, (torch.randn(4, 3), torch.randn(4, 3)))
        assert linear.weight is leaves_before[0]
        assert linear.bias is leaves_before[1]


# A change in place at a cut (behaviour 8)


IN_PLACE = {
    "ReLU": nn.ReLU(inplace=True),
    "SiLU": nn.SiLU(inplace=True),
    "Dropout": nn.Dropout(0.5, inplace=True),
    "inside": nn.Sequential(nn.Identity(), nn.Hardtanh(inplace=True)),
}


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_module_that_writes_the_input_of_its_stage_is_refused_by_name(name, trace):
    """torchgpipe computes wrong gradients at such a cut, in silence.

    The error names the op, and the batch stays intact.
    """
    torch.manual_seed(0)
    batch = torch.randn(6, 8), torch.randn(6, 8)
    batch_before = batch[0].clone(), batch[1].clone()
    for sizes, stage, cell in (([1, 2], 1, "1F0"), ([2, 1], 0, "0F0")):
        parts = [nn.Linear(8, 8), IN_PLACE[name], nn.Linear(8, 8)]
        net = nn.Sequential(*parts) if stage else nn.Sequential(*parts[1:], nn.Tanh())
        model, params, _ = fpipe.from_sequential(net, sizes=sizes, loss=F.mse_loss)
        program = merged(model, 3, fpipe.schedules.gpipe(2))
        sentence = rf"stage {stage} \(.*\) writes what it was given in place.*; a stage and a loss are pure functions"
        with pytest.raises(RuntimeError, match=sentence) as error_info:
            fpipe.build(program, model, trace=trace)(params, batch, key=1)
        assert any(note.startswith(f"in {cell}: ") for note in error_info.value.__notes__)
        assert all(map(torch.equal, batch, batch_before))


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    "policy", [(), (fpipe.checkpoint(),), (fpipe.split_backward(),)], ids=["kept", "recomputed", "split"]
)
def test_a_module_recomputed_in_the_backward_has_the_parameters_of_the_step(policy, trace):
    """Used to hold the module's own parameters in what torch.utils.checkpoint recomputes.

    Two equal stages share a trace: the first one's gradients came from the second's weights, and other params had no
    effect.
    """

    def recompute(module, x):
        return checkpoint(module.inner, x, use_reentrant=False)

    def layers():
        return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3).requires_grad_(False))

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), Toy(recompute, inner=layers()), nn.Tanh()) for _ in range(2)))
    batch = torch.randn(6, 3), torch.randn(6, 3)
    model, params, state = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    step = fpipe.build(merged(model, 3, *policy, fpipe.schedules.gpipe(2)), model, trace=trace)
    for factor in (1.0, 1.5):
        scaled_net = copy.deepcopy(net)
        with torch.no_grad():
            for leaf in scaled_net.parameters():
                leaf.mul_(factor if leaf.requires_grad else 1)
        scaled_params = tuple({name: leaf * factor for name, leaf in stage.items()} for stage in params)
        assert_unsplit(model, step(scaled_params, batch, state=state), run_unsplit(scaled_net, batch, 3)[0])
