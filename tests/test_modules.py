"""nn.Sequentials in stages: their parameters and gradients by name, and what no stage can be."""

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
from tests.toys import Toy, assert_unsplit, merged, one_by_one, scripted

F = nn.functional


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.down = nn.Linear(3, 3, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(self.up(x).tanh())


WRITERS = {
    "1.seen' in place (aten.add_.Tensor)": lambda own, x: x + own.seen.add_(1),
    "1.mean' in place": lambda own, x: F.batch_norm(x, own.mean, own.var, training=True),  # without a new version
    "1.seen' anew": lambda own, x: (setattr(own, "seen", own.seen + 1), x + own.seen)[1],
    "1.more' anew": lambda own, x: (own.register_buffer("more", torch.zeros(()), persistent=False), x)[1],
}


def frozen(module):
    return module.requires_grad_(False)


def mlp(**more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), **more)


def test_params_and_grads_of_functions_are_joined_by_stage():
    def f(params, x):
        return x

    model = fpipe.from_functions([f] * 3, ties=[[(0, "e"), (2, "head")]])
    e, w = torch.randn(2), torch.randn(3)
    params = ({"e": e, "more": [w]}, (w, None), {"b": w})
    whole = fpipe.join_params(model, params)
    assert whole == {0: {"e": e, "more": [w]}, 1: (w, None), 2: {"b": w, "head": e}}
    assert fpipe.split_params(model, whole) == params
    with pytest.raises(
        ValueError, match=re.escape("[0]['e'] and [2]['head'] are one parameter, but have different values.")
    ):
        fpipe.split_params(model, {**whole, 2: {"b": w, "head": e + 1}})


def test_an_optimizer_of_the_net_itself_trains_with_its_gradients():
    """It never trained, in silence: no gradient was there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    result = fpipe.build(fpipe.program(model), model)(params, batch)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=0.5), [leaf.clone() for leaf in net.parameters()]
    fpipe.assign_grads(net, result.grads)
    optimizer.step()
    grads = fpipe.join_params(model, result.grads)
    expected = [one - 0.5 * grads[name] for one, name in zip(before, grads, strict=True)]
    assert all(map(torch.equal, net.parameters(), expected))
    with pytest.raises(ValueError, match=re.escape("a gradient of '2.weight', which is no parameter of this Linear.")):
        fpipe.assign_grads(nn.Linear(3, 3), (result.grads[1],))
    with pytest.raises(ValueError, match="a dict per stage; found Tensor"):
        fpipe.assign_grads(net, torch.zeros(3))
    alone = result.grads
    del result  # they were known for gradients while it was there
    with pytest.raises(ValueError, match=r"assign_grads\(params, grads\) takes params first"):
        fpipe.assign_grads(alone, params)


@pytest.mark.parametrize("traced", [True, False])
def test_the_order_of_a_dict_of_parameters_says_nothing(traced: bool):
    """Inside, a stage's parameters are in its own order; what comes back is in the caller's."""
    torch.manual_seed(0)
    model, params, _ = fpipe.from_sequential(nn.Sequential(Tied(), nn.Linear(3, 3)), stages=2, loss=F.mse_loss)
    step = fpipe.build(fpipe.program(model), model, trace=traced)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    turned = tuple(dict(reversed(stage.items())) for stage in params)
    found, expected = step(turned, batch), step(params, batch)
    assert [[*stage] for stage in found.grads] == [[*stage] for stage in turned]
    assert torch.equal(found.loss, expected.loss)
    for one, other in zip(found.grads, expected.grads, strict=True):
        assert all(torch.equal(one[name], grad) for name, grad in other.items())


def test_children_are_balanced_by_bytes_or_counted_by_sizes():
    model, params, _ = fpipe.from_sequential(mlp(), stages=3)
    assert [stage.name for stage in model.stages] == ["0, 1", "2, 3", "4"]
    assert [list(stage) for stage in params] == [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]]
    model, params, _ = fpipe.from_sequential(mlp(), sizes=[1, 1, 3])
    assert [stage.name for stage in model.stages] == ["0", "1", "2, 3, 4"]
    assert params[1] == {}


@pytest.mark.parametrize("does", WRITERS)
@pytest.mark.parametrize("trace", [True, False, None], ids=["traced", "by autograd", "reference"])
def test_a_written_buffer_does_not_pass_silently(does, trace):
    """In place it is refused before the write; what is bound anew is put back."""
    module = Toy(WRITERS[does], seen=torch.zeros(()), mean=torch.zeros(3), var=torch.ones(3))
    net = nn.Sequential(nn.Linear(3, 3), module)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 1], loss=F.mse_loss)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    name, verb = does.partition("'")[0], "binds" if does.endswith("anew") else "writes"
    sentences = (
        f"stage 1 (1) {verb} buffer or parameter '{does}",
        ". What a module remembers is state: cut the net by from_sequential(..., example=inputs), or say "
        f"state=[{name!r}]",
    )
    batch = torch.randn(4, 3), torch.randn(4, 3)
    for example in (None, (params, batch)):
        step = fpipe.build(fpipe.program(model), model, trace=bool(trace), example=example)
        with pytest.raises(RuntimeError, match=".*".join(map(re.escape, sentences))):
            fpipe.reference(model, params, batch) if trace is None else step(params, batch)
    after = dict(net.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_threads_that_run_one_stage_do_not_mix_their_params():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model, params, _ = fpipe.from_sequential(net, stages=1)
    x, wrong = torch.randn(8, 16), []

    def work(number):
        own = {name: torch.full_like(leaf, number) for name, leaf in params[0].items()}
        want = (x @ own["0.weight"].T + own["0.bias"]).tanh() @ own["2.weight"].T + own["2.bias"]
        wrong.extend(number for _ in range(50) if not torch.allclose(model.stages[0].forward(own, x), want))

    threads = [threading.Thread(target=work, args=(number / 10,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_can_be_copied_and_sent_to_another_process():
    model, params, _ = fpipe.from_sequential(mlp(), stages=2, loss=F.mse_loss)
    batch = torch.randn(4, 3), torch.randn(4, 2)
    right = fpipe.build(fpipe.program(model), model)(params, batch).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(fpipe.build(fpipe.program(other), other)(params, batch).loss, right)


def hooked(register):
    net = mlp()
    register(net)
    return net


def shared(weight):
    net = mlp()
    net[2].weight = nn.Parameter(torch.zeros(8, 8))
    net.append(nn.Linear(8, 8))
    net[5].weight = weight(net[2].weight)
    return net


class Odd(nn.Sequential):
    def forward(self, x):
        return -super().forward(x)


class Owner(nn.Sequential):
    def __init__(self, *children):
        super().__init__(*children)
        self.scale = nn.Parameter(torch.ones(()))


def lazy():
    return nn.Sequential(nn.LazyLinear(2), Tied())


def cut(net, **how):
    return fpipe.from_sequential(net, **(how or {"stages": 2}))


def joined(change, net=mlp):
    """The parameters of a net put together, changed, and split again."""
    model, params, _ = cut(net())
    return fpipe.split_params(model, fpipe.join_params(model, params) | change)


def assigned(change):
    """Gradients of a net, one stage of them changed."""
    _, params, _ = cut(mlp())
    grads = [{name: torch.zeros_like(leaf) for name, leaf in stage.items()} for stage in params]
    change(grads)
    fpipe.assign_grads(params, tuple(grads))


SCRIPTED = nn.Sequential(nn.Linear(4, 4), scripted())
test_what_a_stage_cannot_be_is_refused_by_name = refusals(
    globals(),
    """
cut(lazy())
    ValueError: '0.weight' is not initialised yet (a lazy module)
cut(hooked(lambda net: net.register_forward_hook(print)))
    ValueError: the Sequential itself has hooks, which no stage would run. Remove them, or register them on the children.
cut(hooked(lambda net: net[2].weight.register_hook(print)))
    ValueError: parameter '2.weight' has a gradient hook; stages differentiate detached aliases of parameters, which no
    hook
cut(hooked(lambda net: net[2].weight.register_post_accumulate_grad_hook(print)))
    ValueError: parameter '2.weight' has a gradient hook
cut(shared(lambda weight: nn.Parameter(weight.detach().T)))
    ValueError: '2.weight' in stage 0 and '5.weight' in stage 1 share a storage, but are two parameters;
cut(Odd(nn.Tanh(), nn.Tanh()))
    ValueError: from_sequential cuts an nn.Sequential with its own forward, found Odd.
cut(nn.Linear(2, 2))
    ValueError: found Linear. Write it as nn.Sequential(...) of its parts, or use fpipe.from_module, from_loss
cut([nn.Tanh(), nn.Tanh()])
    ValueError: found list. Put the modules into one: nn.Sequential(*modules).
# It was an AttributeError.
cut(SCRIPTED)
    ValueError: module '1' (RecursiveScriptModule) is compiled by torch.jit: no trace sees into it. Take
cut(Owner(nn.Tanh(), nn.Tanh()))
    ValueError: 'scale' belongs to the Sequential itself; move it into one of its children
cut(mlp(), stages=6)
    ValueError: 5 children make at most 5 stages and at least one, found stages=6.
cut(mlp(), sizes=[5, 0])
    ValueError: sizes=[5, 0] sum to 5, the net has 5 children; a stage has at least one.
cut(mlp(), stages=3, sizes=[2, 3])
    ValueError: stages=3, but sizes=[2, 3] are 2 stages; say one of the two.
cut(mlp(), stages=None)
    ValueError: say the number of stages, or sizes= with the number of children in each.
assigned(lambda grads: grads[1].pop("2.bias"))
    ValueError: only one of them has a leaf at [1]['2.bias'].
assigned(lambda grads: grads[0].update({"0.weight": torch.zeros(2)}))
    ValueError: at [0]['0.weight'] has shape (2,), its parameter (8, 3).
cut(mlp())[0].stages[0].forward({"0.bias": torch.zeros(8)}, torch.zeros(2, 3))
    ValueError: params of stage 0 must have '0.weight', which is missing.
joined({"running": torch.zeros(1)})
    ValueError: the whole has 'running', which is not a parameter that trains, nor a buffer or
joined({"0.down.weight": torch.zeros(3, 3)}, lambda: nn.Sequential(Tied(), nn.Tanh()))
    ValueError: '0.up.weight' and '0.down.weight' are one parameter, but have different values.
""",
)


def test_the_state_dict_of_a_net_with_buffers_is_split():
    """Buffers and frozen parameters stay with the net; those of another net would be lost."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False))
    model, params, _ = fpipe.from_sequential(net, stages=2)
    found = fpipe.split_params(model, net.state_dict())
    assert [list(stage) for stage in found] == [list(stage) for stage in params]
    assert all(one[name].is_set_to(other[name]) for one, other in zip(found, params, strict=True) for name in one)
    for name in ("1.running_mean", "2.weight"):
        with pytest.raises(
            ValueError, match=f"the whole has '{name}', which is not a parameter that trains, nor a buff"
        ):
            fpipe.split_params(model, {**net.state_dict(), name: net.state_dict()[name].clone()})
    with pytest.raises(
        ValueError, match=re.escape("the whole is a dict, as net.state_dict() is one; found Sequential.")
    ):
        fpipe.split_params(model, net)


MOVES = {
    "another .data": ("2.weight", lambda net: setattr(net[2].weight, "data", net[2].weight.data.clone())),
    "assigned": ("0.weight", lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)),
    "another dtype": ("0.weight", lambda net: net.double()),
}


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "move"), MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("trace", [True, False])
def test_parameters_that_the_net_has_no_more_are_not_trained_in_silence(name: str, move, trace: bool):
    """The step went on with the old ones, which trained no net, while buffers followed it."""
    net, batch = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), (torch.zeros(4, 3), torch.zeros(4, 2))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    step = fpipe.build(fpipe.program(model), model, trace=trace)
    before = step(params, batch)
    move(net)
    words = f"have the '{name}' that was handed out with the model; the net has another tensor in its place by now"
    for use in (step, partial(fpipe.reference, model)):
        with pytest.raises(ValueError, match=re.escape(words)):
            use(params, batch)
    copies = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in params)
    assert torch.equal(step(copies, batch).loss, before.loss)
    batch = tuple(one.to(net[0].weight.dtype) for one in batch)
    own = fpipe.split_params(model, net.state_dict())
    assert torch.equal(step(own, batch).outputs, net(batch[0]))


NOT_PARAMS = {
    "a state_dict": (nn.Module.state_dict, "found OrderedDict."),
    "a list": (lambda net: list(net.parameters()), "found 6 of them."),
    "two of them": (lambda net: list(net.parameters())[:2], "found Parameter; the batch comes after params."),
    "a generator": (nn.Module.parameters, "found generator."),
    "the net": (lambda net: net, "found Sequential."),
}


@pytest.mark.parametrize(("given", "found"), NOT_PARAMS.values(), ids=NOT_PARAMS.keys())
def test_what_is_handed_in_for_params_is_answered_with_the_way_out(given, found: str):
    net, batch = mlp(), (torch.zeros(4, 3), torch.zeros(4, 2))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    program = fpipe.program(model)
    step = fpipe.build(program, model)
    words = re.escape(f"{found} fpipe.split_params(model, net.state_dict()) makes it of those of the whole.")
    for use in (step, fpipe.build(program, model, trace=False)):
        with pytest.raises(ValueError, match=words):
            use(given(net), batch)
    for use in (partial(fpipe.verify, program, model), partial(fpipe.reference, model)):
        with pytest.raises(ValueError, match=words):
            use(given(net), batch)
    right = step(fpipe.split_params(model, net.state_dict()), batch)
    assert torch.equal(right.loss, step(params, batch).loss)


def test_a_module_that_stands_twice_keeps_its_parameters():
    """Both paths were swapped, and the second put back what the first had swapped in: a tensor without data."""
    linear = nn.Linear(3, 3)
    linear.bias.requires_grad_(False)
    before = linear.weight, linear.bias
    model, params, _ = fpipe.from_sequential(nn.Sequential(linear, nn.Tanh(), linear), stages=1, loss=F.mse_loss)
    for trace in (True, False):
        fpipe.build(fpipe.program(model), model, trace=trace)(params, (torch.randn(4, 3), torch.randn(4, 3)))
        assert linear.weight is before[0]
        assert linear.bias is before[1]


# A change in place at a cut (behaviour 8)


IN_PLACE = {
    "ReLU": nn.ReLU(inplace=True),
    "SiLU": nn.SiLU(inplace=True),
    "Dropout": nn.Dropout(0.5, inplace=True),
    "inside": nn.Sequential(nn.Identity(), nn.Hardtanh(inplace=True)),
}


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_module_that_changes_what_its_stage_is_given_is_refused_by_name(name, trace):
    """torchgpipe's gradients at such a cut are wrong in silence. The op is named, and the batch stays."""
    torch.manual_seed(0)
    batch = torch.randn(6, 8), torch.randn(6, 8)
    given = batch[0].clone(), batch[1].clone()
    for sizes, number, cell in (([1, 2], 1, "1F0"), ([2, 1], 0, "0F0")):
        parts = [nn.Linear(8, 8), IN_PLACE[name], nn.Linear(8, 8)]
        net = nn.Sequential(*parts) if number else nn.Sequential(*parts[1:], nn.Tanh())
        model, params, _ = fpipe.from_sequential(net, sizes=sizes, loss=F.mse_loss)
        program = merged(model, 3, fpipe.schedules.gpipe(2))
        sentence = rf"stage {number} \(.*\) writes what it was given in place.*; a stage and a loss are pure functions"
        with pytest.raises(RuntimeError, match=sentence) as caught:
            fpipe.build(program, model, trace=trace)(params, batch, key=1)
        assert any(note.startswith(f"in {cell}: ") for note in caught.value.__notes__)
        assert all(map(torch.equal, batch, given))


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    "policy", [(), (fpipe.checkpoint(),), (fpipe.split_backward(),)], ids=["kept", "recomputed", "split"]
)
def test_a_module_that_is_called_again_in_the_backward_has_the_parameters_it_is_given(policy, trace):
    """A trace once had the module's own parameters in what torch.utils.checkpoint computes again: of two equal stages,
    which share their trace, the first had the gradients of the second's weights, and other params were not seen."""

    def again(own, x):
        return checkpoint(own.inner, x, use_reentrant=False)

    def inner():
        return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), frozen(nn.Linear(3, 3)))

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), Toy(again, inner=inner()), nn.Tanh()) for _ in range(2)))
    batch = torch.randn(6, 3), torch.randn(6, 3)
    model, params, state = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    step = fpipe.build(merged(model, 3, *policy, fpipe.schedules.gpipe(2)), model, trace=trace)
    for factor in (1.0, 1.5):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for leaf in other.parameters():
                leaf.mul_(factor if leaf.requires_grad else 1)
        given = tuple({name: leaf * factor for name, leaf in stage.items()} for stage in params)
        assert_unsplit(model, step(given, batch, state=state), one_by_one(other, batch, 3)[0])
