import copy
import pickle
import re
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fpipe.models.from_functions import from_functions
from fpipe.models.from_sequential import from_sequential
from fpipe.models.parameters.grads import assign_grads
from fpipe.models.parameters.params import join_params, split_params
from fpipe.runtimes.build import build
from fpipe.schedules import gpipe
from fpipe.single_device.reference import reference
from fpipe.training import program as training_step
from fpipe.transforms.chain import chain, identity
from fpipe.transforms.checkpoint import checkpoint as checkpoint_always
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import split_backward
from fpipe.verification.verify import verify
from tests.toys import Toy, assert_unsplit, one_by_one


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.down = nn.Linear(3, 3, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(self.up(x).tanh())


def bump(tensor):
    tensor.add_(1)


class Writer(nn.Module):
    """Writes a buffer and does not show it: in place, by putting another in its place, or a new one."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.how == "in place":
            bump(self.seen)
        elif self.how == "rebound":
            setattr(self, "".join(["se", "en"]), self.seen + 1)
        elif self.how == "new":
            self.register_buffer("".join(["mo", "re"]), torch.zeros(()), persistent=False)
        return x + self.seen


def frozen(module):
    return module.requires_grad_(False)


def mlp(**more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), **more)


def test_params_and_grads_of_functions_are_joined_by_stage():
    def f(params, x):
        return x

    model = from_functions([f] * 3, ties=[[(0, "e"), (2, "head")]])
    e, w = torch.randn(2), torch.randn(3)
    params = ({"e": e, "more": [w]}, (w, None), {"b": w})
    whole = join_params(model, params)
    assert whole == {0: {"e": e, "more": [w]}, 1: (w, None), 2: {"b": w, "head": e}}
    assert split_params(model, whole) == params
    with pytest.raises(
        ValueError, match=re.escape("[0]['e'] and [2]['head'] are one parameter, but have different values.")
    ):
        split_params(model, {**whole, 2: {"b": w, "head": e + 1}})


def test_an_optimizer_of_the_net_itself_trains_with_its_gradients():
    """It never trained, in silence: no gradient was there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model, params, _ = from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    result = build(training_step(model), model)(params, batch)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=0.5), [leaf.clone() for leaf in net.parameters()]
    assign_grads(net, result.grads)
    optimizer.step()
    grads = join_params(model, result.grads)
    expected = [one - 0.5 * grads[name] for one, name in zip(before, grads, strict=True)]
    assert all(map(torch.equal, net.parameters(), expected))
    with pytest.raises(ValueError, match=re.escape("a gradient of '2.weight', which is no parameter of this Linear.")):
        assign_grads(nn.Linear(3, 3), (result.grads[1],))
    with pytest.raises(ValueError, match="a dict per stage; found Tensor"):
        assign_grads(net, torch.zeros(3))
    alone = result.grads
    del result  # they were known for gradients while it was there
    with pytest.raises(ValueError, match=r"assign_grads\(params, grads\) takes params first"):
        assign_grads(alone, params)


@pytest.mark.parametrize("traced", [True, False])
def test_the_order_of_a_dict_of_parameters_says_nothing(traced: bool):
    """Inside, a stage's parameters are in its own order; what comes back is in the caller's."""
    torch.manual_seed(0)
    model, params, _ = from_sequential(nn.Sequential(Tied(), nn.Linear(3, 3)), stages=2, loss=nn.functional.mse_loss)
    step = build(training_step(model), model, trace=traced)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    turned = tuple(dict(reversed(stage.items())) for stage in params)
    found, expected = step(turned, batch), step(params, batch)
    assert [[*stage] for stage in found.grads] == [[*stage] for stage in turned]
    assert torch.equal(found.loss, expected.loss)
    for one, other in zip(found.grads, expected.grads, strict=True):
        assert all(torch.equal(one[name], grad) for name, grad in other.items())


def test_gradients_of_another_structure_are_refused():
    _, params, _ = from_sequential(mlp(), stages=2)
    grads = tuple({name: torch.zeros_like(leaf) for name, leaf in stage.items()} for stage in params)
    short = (grads[0], {name: grad for name, grad in grads[1].items() if name != "2.bias"})
    with pytest.raises(ValueError, match=re.escape("only one of them has a leaf at [1]['2.bias'].")):
        assign_grads(params, short)
    with pytest.raises(ValueError, match=re.escape("at [0]['0.weight'] has shape (2,), its parameter (8, 3).")):
        assign_grads(params, ({**grads[0], "0.weight": torch.zeros(2)}, grads[1]))
    assert all(leaf.grad is None for stage in params for leaf in stage.values())


def test_stages_are_balanced_by_bytes():
    model, params, _ = from_sequential(mlp(), stages=3)
    assert [stage.name for stage in model.stages] == ["0, 1", "2, 3", "4"]
    assert [list(stage) for stage in params] == [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]]


def test_sizes_say_how_many_children_each_stage_has():
    model, params, _ = from_sequential(mlp(), sizes=[1, 1, 3])
    assert [stage.name for stage in model.stages] == ["0", "1", "2, 3, 4"]
    assert params[1] == {}


@pytest.mark.parametrize("how", ["in place", "rebound", "new"])
@pytest.mark.parametrize("trace", [True, False, None], ids=["traced", "by autograd", "reference"])
def test_a_written_buffer_does_not_pass_silently(how, trace):
    """In place it is refused before the write; what is bound anew is put back."""
    net = nn.Sequential(nn.Linear(3, 3), Writer(how))
    model, params, _ = from_sequential(net, sizes=[1, 1], loss=nn.functional.mse_loss)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    name = "1.more" if how == "new" else "1.seen"
    does = "writes {} in place (aten.add_.Tensor)" if how == "in place" else "binds {} anew"
    sentence = (
        f"stage 1 (1) {does.format(f'buffer or parameter {name!r}')}. What a module remembers is state: cut the net by "
        f"from_sequential(..., example=inputs), or say state={{{name!r}: 'update'}}, or 'ordered' if an output reads"
    )
    batch = torch.zeros(2, 3), torch.zeros(2, 3)
    for example in (None, (params, batch)):
        step = build(training_step(model), model, trace=bool(trace), example=example)
        with pytest.raises(RuntimeError, match=re.escape(sentence)):
            reference(model, params, batch) if trace is None else step(params, batch)
    after = dict(net.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_buffer_that_batch_norm_writes_by_hand_is_seen():
    """F.batch_norm writes its running statistics without a new version."""
    norm = Toy(
        lambda own, x: nn.functional.batch_norm(x, own.mean, own.var, training=True),
        mean=torch.zeros(3),
        var=torch.ones(3),
    )
    model, params, _ = from_sequential(nn.Sequential(norm), stages=1, loss=nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"stage 0 \(0\) writes buffer or parameter '0\.mean' in place"):
        reference(model, params, (torch.randn(4, 3), torch.randn(4, 3)))
    assert torch.equal(norm.mean, torch.zeros(3))


def test_threads_that_run_one_stage_do_not_mix_their_params():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model, params, _ = from_sequential(net, stages=1)
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
    model, params, _ = from_sequential(mlp(), stages=2, loss=nn.functional.mse_loss)
    batch = torch.randn(4, 3), torch.randn(4, 2)
    right = build(training_step(model), model)(params, batch).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(build(training_step(other), other)(params, batch).loss, right)


def test_one_module_may_stand_twice_in_a_stage():
    block = nn.Linear(3, 3)
    model, params, _ = from_sequential(nn.Sequential(block, nn.Tanh(), block), stages=1)
    assert join_params(model, params).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert list(params[0]) == ["0.weight", "0.bias"]


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


HOOKS = "the Sequential itself has hooks; stages call its children and never the whole, so nobody would run them."
SHARE = "'2.weight' in stage 0 and '5.weight' in stage 1 share a storage, but are two parameters; make them one"
GRADIENT_HOOK = (
    "parameter '2.weight' has a gradient hook; stages differentiate detached aliases of parameters, which no hook"
)


def scripted() -> nn.Sequential:
    """It was an AttributeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))


REFUSED = [
    ("'0.weight' is not initialised yet (a lazy module)", lambda: nn.Sequential(nn.LazyLinear(2), Tied())),
    (HOOKS, lambda: hooked(lambda net: net.register_forward_hook(print))),
    (HOOKS, lambda: hooked(lambda net: net.register_forward_pre_hook(print))),
    (HOOKS, lambda: hooked(lambda net: net.register_full_backward_hook(print))),
    (HOOKS, lambda: hooked(lambda net: net.register_full_backward_pre_hook(print))),
    (GRADIENT_HOOK, lambda: hooked(lambda net: net[2].weight.register_hook(print))),
    (GRADIENT_HOOK, lambda: hooked(lambda net: net[2].weight.register_post_accumulate_grad_hook(print))),
    (SHARE, lambda: shared(lambda weight: nn.Parameter(weight.detach().T))),
    ("from_sequential cuts an nn.Sequential with its own forward, found Odd.", lambda: Odd(nn.Tanh(), nn.Tanh())),
    ("from_sequential cuts an nn.Sequential with its own forward, found Linear.", lambda: nn.Linear(2, 2)),
    (" Write it as nn.Sequential(...) of its parts; or hand from_loss a function that", lambda: nn.Linear(2, 2)),
    ("found list. Put the modules into one: nn.Sequential(*modules).", lambda: [nn.Tanh(), nn.Tanh()]),
    ("module '1' (RecursiveScriptModule) is compiled by torch.jit: no trace sees into it, and it runs", scripted),
    ("'scale' belongs to the Sequential itself and to none of its children", lambda: Owner(nn.Tanh(), nn.Tanh())),
]


NOT_FIT = [
    ("5 children make at most 5 stages and at least one, found stages=6.", {"stages": 6}),
    ("5 children make at most 5 stages and at least one, found stages=0.", {"stages": 0}),
    ("sizes=[2, 2] sum to 4, the net has 5 children; a stage has at least one.", {"sizes": [2, 2]}),
    ("sizes=[5, 0] sum to 5, the net has 5 children; a stage has at least one.", {"sizes": [5, 0]}),
    ("stages=3, but sizes=[2, 3] are 2 stages; say one of the two.", {"stages": 3, "sizes": [2, 3]}),
    ("say the number of stages, or sizes= with the number of children in each.", {}),
]


@pytest.mark.parametrize(
    ("sentence", "net", "how"),
    [*((*case, {"stages": 2}) for case in REFUSED), *((sentence, mlp, how) for sentence, how in NOT_FIT)],
)
def test_what_a_stage_cannot_be_is_refused_by_name(sentence, net, how):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        from_sequential(net(), **how)


def test_the_state_dict_of_a_net_with_buffers_is_split():
    """Buffers and frozen parameters stay with the net; those of another net would be lost."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False))
    model, params, _ = from_sequential(net, stages=2)
    found = split_params(model, net.state_dict())
    assert [list(stage) for stage in found] == [list(stage) for stage in params]
    assert all(one[name].is_set_to(other[name]) for one, other in zip(found, params, strict=True) for name in one)
    for name in ("1.running_mean", "2.weight"):
        with pytest.raises(
            ValueError, match=f"the whole has '{name}', which is not a parameter that trains, nor a buff"
        ):
            split_params(model, {**net.state_dict(), name: net.state_dict()[name].clone()})
    with pytest.raises(
        ValueError, match=re.escape("the whole is a dict, as net.state_dict() is one; found Sequential.")
    ):
        split_params(model, net)


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
    model, params, _ = from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    step = build(training_step(model), model, trace=trace)
    before = step(params, batch)
    move(net)
    words = f"have the '{name}' that was handed out with the model; the net has another tensor in its place by now"
    for use in (step, partial(reference, model)):
        with pytest.raises(ValueError, match=re.escape(words)):
            use(params, batch)
    copies = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in params)
    assert torch.equal(step(copies, batch).loss, before.loss)
    batch = tuple(one.to(net[0].weight.dtype) for one in batch)
    own = split_params(model, net.state_dict())
    assert torch.equal(step(own, batch).outputs, net(batch[0]))


def test_a_copy_of_a_model_does_not_look_for_the_parameters_of_the_net():
    model, params, _ = from_sequential(mlp(), stages=2, loss=nn.functional.mse_loss)
    model, batch = copy.deepcopy(model), (torch.zeros(4, 3), torch.zeros(4, 2))
    build(training_step(model), model)(params, batch)


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
    model, params, _ = from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    program = training_step(model)
    step = build(program, model)
    words = re.escape(f"{found} fpipe.split_params(model, net.state_dict()) makes it of those of the whole.")
    for use in (step, build(program, model, trace=False)):
        with pytest.raises(ValueError, match=words):
            use(given(net), batch)
    for use in (partial(verify, program, model), partial(reference, model)):
        with pytest.raises(ValueError, match=words):
            use(given(net), batch)
    right = step(split_params(model, net.state_dict()), batch)
    assert torch.equal(right.loss, step(params, batch).loss)


def test_params_of_another_model_are_refused():
    model, params, _ = from_sequential(mlp(), stages=2)
    whole = join_params(model, params)
    with pytest.raises(ValueError, match=re.escape("params of stage 0 must have '0.weight', which is missing.")):
        model.stages[0].forward({"0.bias": params[0]["0.bias"]}, torch.zeros(2, 3))
    with pytest.raises(
        ValueError, match=re.escape("the whole has 'running', which is not a parameter that trains, nor a buffer or")
    ):
        split_params(model, {**whole, "running": torch.zeros(1)})
    tied, params, _ = from_sequential(nn.Sequential(Tied()), stages=1)
    whole = join_params(tied, params)
    assert split_params(tied, nn.Sequential(Tied()).state_dict())
    sentence = "'0.up.weight' and '0.down.weight' are one parameter, but have different values."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        split_params(tied, {**whole, "0.down.weight": whole["0.down.weight"] + 1})


def test_a_module_that_stands_twice_keeps_its_parameters():
    """Both paths were swapped, and the second put back what the first had swapped in: a tensor without data."""
    linear = nn.Linear(3, 3)
    linear.bias.requires_grad_(False)
    before = linear.weight, linear.bias
    model, params, _ = from_sequential(nn.Sequential(linear, nn.Tanh(), linear), stages=1, loss=nn.functional.mse_loss)
    for trace in (True, False):
        build(training_step(model), model, trace=trace)(params, (torch.randn(4, 3), torch.randn(4, 3)))
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
        model, params, _ = from_sequential(net, sizes=sizes, loss=nn.functional.mse_loss)
        program = chain(split(3), gpipe(2), merge())(training_step(model))
        sentence = rf"stage {number} \(.*\) writes what it was given in place.*; a stage and a loss are pure functions"
        with pytest.raises(RuntimeError, match=sentence) as caught:
            build(program, model, trace=trace)(params, batch, key=1)
        assert any(note.startswith(f"in {cell}: ") for note in caught.value.__notes__)
        assert all(map(torch.equal, batch, given))


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("policy", [identity, checkpoint_always, split_backward], ids=["kept", "recomputed", "split"])
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
    model, params, state = from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    step = build(chain(split(3), policy(), gpipe(2), merge())(training_step(model)), model, trace=trace)
    for factor in (1.0, 1.5):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for leaf in other.parameters():
                leaf.mul_(factor if leaf.requires_grad else 1)
        given = tuple({name: leaf * factor for name, leaf in stage.items()} for stage in params)
        assert_unsplit(model, step(given, batch, state=state), one_by_one(other, batch, 3)[0])
