"""The buffers that a net mutates are found by running it on an example, or are named: they are module state."""

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.transforms._rewrite import Transform
from tests.refusals import refusals
from tests.toys import Toy, assert_unsplit, merged, one_by_one, remembered, twice

MSE = nn.functional.mse_loss
ROWS = (torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), torch.ones(10, 8))


class Tracker(nn.Module):
    """Counts its calls and keeps a running mean of what it is given."""

    count: Tensor
    mean: Tensor

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = torch.tanh(x) * self.scale
        with torch.no_grad():
            if self.how == "in place":
                self.mean.lerp_(x.mean(0), 0.1)
            elif self.how == "another":
                self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            elif self.how == "out":
                torch.maximum(self.mean, y.amax(0), out=self.mean)
            elif self.how == "a part":
                self.mean[2:] += y[0, 2:]
            elif self.how == "a parameter":
                self.mean.lerp_(self.scale, 0.1)
            else:
                self.mean.lerp_(y.mean(0), 1 / self.count)
        return y


def keeps_last(own: Any, x: Tensor) -> Tensor:
    """Keeps what it was given last, and in which rows that was positive."""
    own.row = x.detach()[0]
    own.hits[(x.detach() > 0).sum(0).clamp(max=2)] += 1
    own.hits.scatter_add_(0, torch.tensor([0, 0, 1]), own.hits.new_ones(3))
    return x * 1.0


def watching(own: Any, x: Tensor) -> Tensor:
    """Looks at what passes, which the module behind it writes in place."""
    y = x * 2
    own.total.add_(y.detach()[0])
    return own.relu(y)


def block(own: Any, x: Tensor) -> Tensor:
    """Counts, around a tracker that it calls twice, norms and attention, under no_grad and casts of its own."""
    own.calls.add_(1)
    y = own.inner(own.linear(x)) + own.inner(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own.cast.copy_(torch.nn.functional.linear(own.cast + 1, own.linear.weight) + own.linear(x).mean(0))
    return own.norm(y)


def made_block() -> Toy:
    return Toy(
        block,
        calls=torch.zeros(()),
        cast=torch.zeros(8),
        inner=Tracker(),
        norm=nn.BatchNorm1d(8),
        linear=nn.Linear(8, 8),
    )


def by_mode(own: Any, x: Tensor) -> Tensor:
    """Normalises by its batch in training, and by what it remembers in eval."""
    if not own.training:
        return x - own.mean
    now = x.mean(0)
    own.mean.lerp_(now.detach(), 0.1)
    return x - now


def undetached(own: Any, x: Tensor) -> Tensor:
    """Averages an output that wants a gradient, which ran under autograd, since the buffer wants none."""
    y = own.linear(x)
    own.mean = 0.9 * own.mean.detach() + 0.1 * y.mean(0)
    return y


def counted(made: Any, args: Any, out: Tensor) -> None:
    made.seen += out.detach().sum(0)


def hooked() -> nn.Module:
    made = nn.Linear(8, 8)
    made.register_buffer("seen", torch.zeros(8))
    made.register_forward_hook(counted)
    return made


def again() -> nn.Sequential:
    """One module in two places of a stage."""
    made = Tracker()
    return nn.Sequential(nn.Linear(8, 8), made, made, nn.Linear(8, 8), nn.Tanh(), nn.Tanh())


NETS: dict[str, Callable[[], nn.Sequential]] = {
    how: lambda how=how: twice(lambda: Tracker(how))
    for how in ("in place", "another", "out", "a part", "a parameter", "by the count")
} | {
    "what was there": lambda: twice(lambda: Toy(keeps_last, row=torch.zeros(8), hits=torch.zeros(3, dtype=torch.long))),
    "written behind it": lambda: twice(lambda: Toy(watching, total=torch.zeros(8), relu=nn.ReLU(inplace=True))),
    "a norm beside": lambda: twice(lambda: nn.Sequential(Tracker(), nn.BatchNorm1d(8), nn.ReLU(inplace=True))),
    "inside": lambda: twice(made_block),
    "by mode": lambda: twice(lambda: Toy(by_mode, mean=torch.zeros(8))),
    "not detached": lambda: twice(lambda: Toy(undetached, linear=nn.Linear(8, 8), mean=torch.zeros(8))),
    "a hook": lambda: twice(hooked),
    "in two places": again,
}
PLANS: dict[str, tuple[Transform, ...]] = {
    "gpipe": (fpipe.schedules.gpipe(2), fpipe.merge()),
    "zb-h1, recomputed": (fpipe.checkpoint("always"), fpipe.schedules.zb_h1(2), fpipe.merge()),
    "layer by layer": (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.one_f_one_b(2), fpipe.merge()),
    "among processes": (fpipe.schedules.one_f_one_b(2), fpipe.merge(), fpipe.communicate(), fpipe.free()),
}


@functools.cache
def cut_case(name: str) -> tuple[nn.Sequential, nn.Module, Tensor, Any]:
    """A net, the same net after plain autograd and what it gave, and the first net cut."""
    net = NETS[name]()
    return net, *one_by_one(net, ROWS), fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, example=ROWS[0])


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_state_is_the_unsplit_modules_whatever_the_plan(name: str, trace: bool):
    before = {name: buffer.clone() for name, buffer in NETS[name]().named_buffers()}
    net, right, outputs, (model, params, state) = cut_case(name)
    for plan in PLANS.values():
        program = fpipe.chain(fpipe.split(4), *plan)(fpipe.program(model))
        step = fpipe.build(program, model, trace=trace)
        if trace:
            step(params, ROWS, state=state)
        result = step(params, ROWS, state=state)  # a warning is an error
        assert remembered(result).keys() == before.keys()
        assert torch.equal(result.outputs, outputs)
        assert_unsplit(model, result, right)
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


@pytest.mark.parametrize("plan", ["zb-h1, recomputed", "among processes"])
def test_the_bytes_that_are_held_are_told_before(plan: str):
    _, _, _, (model, params, state) = cut_case("inside")
    program = fpipe.chain(fpipe.split(4), *PLANS[plan])(fpipe.program(model))
    held = fpipe.build(program, model, record=True)(params, ROWS, state=state).timeline
    assert held is not None
    assert fpipe.sizes(program, model, params, ROWS, state=state).peak == held.peak


def drops(own: Any, x: Tensor) -> Tensor:
    """Counts, and remembers what it has drawn."""
    y = own.dropout(x)
    own.kept += (y.detach() != 0).sum(0)
    own.kept += torch.rand(8)
    return y


@pytest.mark.parametrize("trace", [True, False])
def test_what_is_drawn_at_random_is_drawn_once(trace: bool):
    model, params, state = fpipe.from_sequential(
        twice(lambda: Toy(drops, kept=torch.zeros(8), dropout=nn.Dropout(0.5))), sizes=[3, 3], loss=MSE, example=ROWS[0]
    )
    right = twice(lambda: Toy(drops, kept=torch.zeros(8), dropout=nn.Dropout(0.5)))
    for at, x in enumerate(ROWS[0].tensor_split(4)):
        for number, stage in enumerate((right[:3], right[3:])):
            torch.manual_seed(fpipe.fold_in(7, number, at))
            x = stage(x)
    for plan in PLANS.values():
        program = fpipe.chain(fpipe.split(4), *plan)(fpipe.program(model))
        found = remembered(fpipe.build(program, model, trace=trace)(params, ROWS, state=state, key=7))
        assert all(torch.equal(tensor, right.get_buffer(name)) for name, tensor in found.items())


@pytest.mark.parametrize("trace", [True, False])
def test_casts_are_those_of_the_forward(trace: bool):
    net = twice(lambda: Toy(squared, square=torch.eye(8)))
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, example=ROWS[0])
    program = fpipe.chain(fpipe.split(4), *PLANS["gpipe"])(fpipe.program(model))
    with torch.autocast("cpu", torch.bfloat16):
        right, _ = one_by_one(net, ROWS)
        step = fpipe.build(program, model, trace=trace)
        for _ in range(2):
            found = step(params, ROWS, state=state)
    assert_unsplit(model, found, right)


def squared(own: Any, x: Tensor) -> Tensor:
    """Multiplies what it remembers, which casts are for."""
    h = x.detach()
    own.square = (own.square @ (h.t() @ h)).float() * 0.1
    return torch.tanh(x)


def test_norms_beside_may_be_deferred():
    net = twice(made_block)
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, example=ROWS[0])
    deferred = fpipe.deferred_batch_norm(model)
    program = fpipe.chain(fpipe.split(4), *PLANS["gpipe"])(fpipe.program(deferred))
    assert fpipe.verify(program, deferred, params, ROWS, state=state).bitwise
    found = fpipe.build(program, deferred)(params, ROWS, state=state).state
    assert found is not None
    assert [list(stage) for stage in found] == [list(stage) for stage in state]
    assert (found[0]["1.norm.num_batches_tracked"], found[0]["1.calls"]) == (1, 4)


def grows(own: Any, x: Tensor) -> Tensor:
    """Keeps all that it has seen."""
    own.all = torch.cat([own.all, x.detach()])
    return torch.tanh(x)


def test_a_buffer_may_grow():
    net = nn.Sequential(nn.Linear(8, 8), Toy(grows, all=torch.zeros(0, 8)))
    model, params, state = fpipe.from_sequential(net, stages=1, loss=MSE, example=ROWS[0])
    step = fpipe.build(merged(model, 4), model)
    found = step(params, ROWS, state=state).state
    right, _ = one_by_one(net, ROWS)
    for again in (found, step(params, ROWS, state=state).state):
        assert again is not None
        assert torch.equal(again[0]["1.all"], right.get_buffer("1.all"))


def total_of(module: Any) -> Tensor:
    return module.total


def hidden(use: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Reaches its buffer by a function that is no method, and uses it in a way of its own."""

    def does(own: Any, x: Tensor) -> Tensor:
        y = x * 1
        own.total += y.detach()[0]
        return own.use(y, total_of(own))

    return Toy(does, total=torch.zeros(8), use=use)


def added_to(y: Tensor, total: Tensor) -> Tensor:
    y += total
    return y


def lent(y: Tensor, total: Tensor) -> Tensor:
    total.data = y[0] * 1
    total.mul_(2)
    return y


def shared(y: Tensor, total: Tensor) -> Tensor:
    total.data = y.detach()
    total.mul_(2)
    return y * 1


USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "in the output": (lambda y, total: y * total, ""),
    "a view": (lambda y, total: total.expand(y.shape) * y, ""),
    "into another": (added_to, ""),
    "in place later": (lambda y, total: y.relu_(), ""),
    "its numbers": (lambda y, total: y * float(total.sum()), "_local_scalar_dense"),
    "a question": (lambda y, total: y if total.sum() > 3 else y * 2, "_local_scalar_dense"),
    "its data": (lent, "it assigns the .data of a tensor, which no trace sees"),
    "its data, shared": (shared, "it assigns the .data of a tensor, which no trace sees"),
}


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(("use", "why"), USES.values(), ids=USES.keys())
def test_what_is_written_is_found_by_running(use: Any, why: str, trace: bool):
    """What looks at data runs under autograd."""
    net = twice(lambda: hidden(use))
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, example=ROWS[0])
    assert all("state" in stage.asks for stage in model.stages)
    right, outputs = one_by_one(net, ROWS)
    step = fpipe.build(merged(model, 4), model, trace=trace)
    with pytest.warns(UserWarning, match=re.escape(why)) if why and trace else nullcontext():
        found = step(params, ROWS, state=state)
    assert torch.equal(found.outputs, outputs)
    assert_unsplit(model, found, right)
    assert not net[1].total.any()


def test_an_example_may_be_without_data_where_no_stage_looks_at_any():
    meta = ROWS[0].to("meta")
    model, _, state = fpipe.from_sequential(twice(Tracker), sizes=[3, 3], example=meta)
    assert [list(stage) for stage in state] == [["1.count", "1.mean"], ["4.count", "4.mean"]]
    assert all("state" in stage.asks for stage in model.stages)


@pytest.mark.parametrize("trace", [True, False])
def test_what_is_written_may_be_said(trace: bool):
    """Without an example."""
    said = [f"{at}.{name}" for at in (1, 4) for name in ("count", "mean")]
    net = twice(Tracker)
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, state=said)
    program = fpipe.chain(fpipe.split(4), *PLANS["gpipe"])(fpipe.program(model))
    found = fpipe.build(program, model, trace=trace)(params, ROWS, state=state)
    assert_unsplit(model, found, one_by_one(net, ROWS)[0])


test_what_is_said_of_no_buffer_is_refused = refusals(
    globals(),
    """
fpipe.from_sequential(twice(Tracker), sizes=[3, 3], state=["4.odd"])
    ValueError: state= names '4.odd', which is no buffer of the net; these are: 1.count, 1.mean
fpipe.from_sequential(twice(lambda: hidden(USES["a question"][0])), sizes=[3, 3], example=ROWS[0].to("meta"))
    ValueError: an example has to have some
""",
)


def branching(own: Any, x: Tensor) -> Tensor:
    """Remembers, and counts where there are many rows."""
    y = x * 1
    own.seen += y.detach()[0]
    if len(x) > 4:
        own.more += 1
    return y


@pytest.mark.parametrize("trace", [True, False])
def test_a_branch_that_the_example_did_not_take_is_refused_by_name(trace: bool):
    net = nn.Sequential(nn.Linear(8, 8), Toy(branching, seen=torch.zeros(8), more=torch.zeros(8)))
    model, params, state = fpipe.from_sequential(net, stages=1, loss=MSE, example=ROWS[0][:3])
    assert list(state[0]) == ["1.seen"]
    whole = fpipe.build(fpipe.program(model), model, trace=trace)
    sentence = (
        "stage 0 (0, 1) writes buffer or parameter '1.more' in place (aten.add_.Tensor). What a module remembers is "
        "state: cut the net by from_sequential(..., example=inputs), or say state=['1.more']. Or switch"
    )
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        whole(params, ROWS, state=state)
    assert not net[1].more.any()


def assigns_data(own: Any, x: Tensor) -> Tensor:
    """No op writes the buffer, so nothing told of it, and the net was another after a step."""
    own.mean.data = 0.9 * own.mean.data + x.detach().mean(0)
    return x * 1


def lazy(own: Any, x: Tensor) -> Tensor:
    """The example left a tensor without data in the net, and steps returned such losses."""
    if own.first is None:
        own.first = x.detach().mean(0)
    return x - own.first


def lending(own: Any, x: Tensor) -> Tensor:
    """Its second buffer is its first from then on, so that what is written into that shows in this. As state they were
    apart from the next microbatch on: another loss, without a word."""
    own.first.add_(1.0)
    y = x * own.second.mean() if own.reads else x * 2
    own.second = own.first
    return y


ONE_STORAGE = "stage 0 left buffers '1.first' and '1.second' in one storage. Assign a .clone() to one."
EXAMPLE = {"example": ROWS[0]}
REFUSED: dict[str, tuple[Callable[[], Toy], dict[str, Any], str]] = {
    "by its data, without an example": (
        lambda: Toy(assigns_data, mean=torch.zeros(8)),
        {},
        "assigns the .data of buffer or parameter '1.mean'",
    ),
    "None before": (
        lambda: Toy(lazy, first=None),
        EXAMPLE,
        "makes a tensor of buffer '1.first', which is None before",
    ),
    "two in one memory": (
        lambda: Toy(lending, reads=False, first=torch.zeros(8), second=torch.zeros(8)),
        EXAMPLE,
        ONE_STORAGE,
    ),
    "two in one memory, read": (
        lambda: Toy(lending, reads=True, first=torch.zeros(8), second=torch.zeros(8)),
        EXAMPLE,
        ONE_STORAGE,
    ),
}


@pytest.mark.filterwarnings("ignore:.*runs under autograd")
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(("make", "said", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_state_is_refused_by_name_and_the_net_stays(make: Any, said: Any, sentence: str, trace: bool):
    net = nn.Sequential(nn.Linear(8, 8), make())
    before = dict(net[1]._buffers)

    def run() -> None:
        model, params, state = fpipe.from_sequential(net, stages=1, loss=MSE, **said)
        fpipe.build(fpipe.program(model), model, trace=trace)(params, ROWS, state=state)

    with pytest.raises((ValueError, RuntimeError), match=re.escape(sentence)):
        run()
    assert all(now is before[name] for name, now in net[1]._buffers.items())
    assert not any(now.any() for now in net.buffers() if "first" not in before)


def in_containers(own: Any, x: Tensor) -> Tensor:
    """Keeps tensors and a number in lists, and clamps its weights where it looks at data."""
    own.calls[0] += 1
    own.means[0] = 0.9 * own.means[0] + x.detach().mean(0)
    if own.looks and x.sum() > -1e9:
        own.linear.weight.data = own.linear.weight.data.clamp(-0.1, 0.1)
    return own.linear(x)


@pytest.mark.parametrize("looks", [False, True])
def test_the_example_leaves_the_net_as_it_was(looks: bool):
    """Fake tensors stayed in its lists, counters moved, and weights were clamped."""
    net = nn.Sequential(
        nn.Linear(8, 8), Toy(in_containers, means=[torch.zeros(8)], calls=[0], looks=looks, linear=nn.Linear(8, 8))
    )
    mean, weight = net[1].means[0], net[1].linear.weight.detach().clone()
    fpipe.from_sequential(net, stages=1, loss=MSE, example=ROWS[0])
    assert net[1].means[0] is mean
    assert net[1].calls == [0]
    assert torch.equal(net[1].linear.weight, weight)


def sometimes(own: Any, x: Tensor) -> Tensor:
    """Counts, and normalises batches of three."""
    own.count += 1
    return own.norm(x) if len(x) == 3 else x


@pytest.mark.parametrize("trace", [True, False])
def test_norms_that_did_not_run_are_updated_beside_a_counter(trace: bool):
    """Such an update was taken for one of the counter alone, and met the deferred norm's int."""
    net = nn.Sequential(nn.Linear(4, 4), Toy(sometimes, norm=nn.BatchNorm1d(4), count=torch.zeros(())), nn.Linear(4, 2))
    batch = torch.randn(8, 4), torch.randn(8, 2)
    model, params, state = fpipe.from_sequential(net, sizes=[2, 1], loss=MSE, example=batch[0])
    model = fpipe.deferred_batch_norm(model)
    made = fpipe.build(merged(model, 3), model, trace=trace)(params, batch, state=state).state
    wanted = fpipe.reference(model, params, batch, microbatches=3, state=state).state
    assert made is not None
    assert made[0]["1.count"] == 3
    assert [each.keys() for each in made] == [each.keys() for each in wanted or ()]
    assert all(torch.equal(held, (wanted or ())[0][name]) for name, held in made[0].items() if "gathered" not in name)
