"""Buffers that a module writes and its output does not read: their updates are apart, forwards come in any order."""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe.transforms._rewrite import Transform

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
            elif self.how == "by name":
                held = self.mean
                held.mul_(0.5).add_(y.sum(0))
            elif self.how == "data":
                self.mean.data = self.mean + y[0]
            elif self.how == "a parameter":
                self.mean.lerp_(self.scale, 0.1)
            else:
                self.mean.lerp_(y.mean(0), 1 / self.count)
        return y


class Last(nn.Module):
    """Keeps what it was given last, and in which rows that was positive."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.zeros(8))
        self.register_buffer("hits", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.row = x.detach()[0]
        self.hits[(x.detach() > 0).sum(0).clamp(max=2)] += 1
        self.hits.scatter_add_(0, torch.tensor([0, 0, 1]), self.hits.new_ones(3))
        return x * 1.0


class Watching(nn.Module):
    """Looks at what passes, which the module behind it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.total.add_(y.detach()[0])
        return self.relu(y)


class Block(nn.Module):
    """Counts, around a tracker that it calls twice, norms and attention, under no_grad and casts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cast", torch.zeros(8))
        self.inner, self.norm, self.linear = Tracker(), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.inner(self.linear(x)) + self.inner(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            self.cast.copy_(torch.nn.functional.linear(self.cast + 1, self.linear.weight) + self.linear(x).mean(0))
        return self.norm(y)


class ByMode(nn.Module):
    """Normalises by its batch in training, and by what it remembers in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        now = x.mean(0)
        self.mean.lerp_(now.detach(), 0.1)
        return x - now


def counted(made: Any, args: Any, out: Tensor) -> None:
    made.seen += out.detach().sum(0)


def hooked() -> nn.Module:
    made = nn.Linear(8, 8)
    made.register_buffer("seen", torch.zeros(8))
    made.register_forward_hook(counted)
    return made


def twice(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Two equal stages."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), make(), nn.Tanh(), nn.Linear(8, 8), make(), nn.Tanh())


def again() -> nn.Sequential:
    """One module in two places of a stage."""
    made = Tracker()
    return nn.Sequential(nn.Linear(8, 8), made, made, nn.Linear(8, 8), nn.Tanh(), nn.Tanh())


NETS: dict[str, Callable[[], nn.Sequential]] = {
    how: lambda how=how: twice(lambda: Tracker(how))
    for how in ("in place", "another", "out", "a part", "by name", "data", "a parameter", "by the count")
} | {
    "what was there": lambda: twice(Last),
    "written behind it": lambda: twice(Watching),
    "a norm beside": lambda: twice(lambda: nn.Sequential(Tracker(), nn.BatchNorm1d(8), nn.ReLU(inplace=True))),
    "inside": lambda: twice(Block),
    "by mode": lambda: twice(ByMode),
    "a hook": lambda: twice(hooked),
    "in two places": again,
}
LATE = [
    ["0F2", "0F0", "0F3", "0F1", "0B1", "0B3", "0B0", "0B2"],
    ["1F1", "1B1", "1F3", "1B3", "1F0", "1B0", "1F2", "1B2"],
]
PLANS: dict[str, tuple[Transform, ...]] = {
    "gpipe": (fpipe.schedules.gpipe(2), fpipe.merge()),
    "out of order": (fpipe.schedules.from_table(LATE), fpipe.merge()),
    "out of order, recomputed": (fpipe.checkpoint("always"), fpipe.schedules.from_table(LATE), fpipe.merge()),
    "out of order, split": (fpipe.split_backward(), fpipe.schedules.from_table(LATE), fpipe.merge()),
    "zb-h1, recomputed": (fpipe.checkpoint("always"), fpipe.schedules.zb_h1(2), fpipe.merge()),
    "layer by layer": (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.from_table(LATE), fpipe.merge()),
    "from both ends": (fpipe.schedules.chimera(2), fpipe.merge(), fpipe.communicate(), fpipe.free()),
}


def one_by_one(net: nn.Module) -> tuple[nn.Module, Tensor]:
    """A copy of the net, and the outputs, after plain autograd on one microbatch after the other."""
    net, outputs = copy.deepcopy(net), list[Tensor]()
    for x, t in zip(*(half.tensor_split(4) for half in ROWS), strict=True):
        outputs.append(net(x))
        (nn.functional.mse_loss(outputs[-1], t) * (len(x) / 10)).backward()
    return net, torch.cat([output.detach() for output in outputs])


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_updates_are_the_unsplit_modules_whatever_the_order(name: str, trace: bool):
    """A stage with a mere counter once had to take its microbatches in order."""
    net = NETS[name]()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=nn.functional.mse_loss)
    right, outputs = one_by_one(net)
    for plan in PLANS.values():
        program = fpipe.chain(fpipe.split(4), *plan)(fpipe.program(model))
        step = fpipe.build(program, model, trace=trace)
        step(params, ROWS, state=state)
        result = step(params, ROWS, state=state)  # a warning is an error
        found = {name: tensor for stage in result.state or () for name, tensor in stage.items()}
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], right.get_buffer(name)) for name in found)
        assert torch.equal(result.outputs, outputs)
        grads = fpipe.join_params(model, result.grads)
        assert all(torch.equal(grads[name], leaf.grad) for name, leaf in right.named_parameters())
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def test_an_update_is_what_the_module_does_and_no_more():
    """No second forward: a running mean reads the mean that F has made."""
    model, params, state = fpipe.from_sequential(twice(Tracker), sizes=[3, 3], loss=nn.functional.mse_loss)
    step = fpipe.build(fpipe.chain(fpipe.split(4), *PLANS["out of order"])(fpipe.program(model)), model)
    step(params, ROWS, state=state)
    with Ops() as ops:
        step(params, ROWS, state=state)
    once = {"aten.lerp_.Scalar": 8, "aten.mean.dim": 8, "aten.tanh.default": 16}
    assert {name: ops.ran[name] for name in once} == once


class Ops(TorchDispatchMode):
    """How often each op runs while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plan", PLANS)
def test_the_bytes_that_are_held_are_told_before(plan: str):
    model, params, state = fpipe.from_sequential(twice(Block), sizes=[3, 3], loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(4), *PLANS[plan])(fpipe.program(model))
    held = fpipe.build(program, model, record=True)(params, ROWS, state=state).timeline
    assert held is not None
    assert fpipe.sizes(program, model, params, ROWS, state=state).peak == held.peak


class Drops(nn.Module):
    """Counts, and remembers what it has drawn: the update draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(x)
        self.kept += (y.detach() != 0).sum(0)
        self.kept += torch.rand(8)
        return y


@pytest.mark.parametrize("trace", [True, False])
def test_what_is_drawn_at_random_is_drawn_once(trace: bool):
    model, params, state = fpipe.from_sequential(twice(Drops), sizes=[3, 3], loss=nn.functional.mse_loss)
    right = twice(Drops)
    for at, x in enumerate(ROWS[0].tensor_split(4)):
        for number, stage in enumerate((right[:3], right[3:])):
            torch.manual_seed(fpipe.fold_in(7, number, at))
            x = stage(x)
    for plan in PLANS.values():
        program = fpipe.chain(fpipe.split(4), *plan)(fpipe.program(model))
        found = fpipe.build(program, model, trace=trace)(params, ROWS, state=state, key=7).state
        for stage in found or ():
            assert all(torch.equal(tensor, right.get_buffer(name)) for name, tensor in stage.items())


@pytest.mark.parametrize("trace", [True, False])
def test_casts_are_those_of_the_forward(trace: bool):
    net = twice(Squared)
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(4), *PLANS["out of order"])(fpipe.program(model))
    with torch.autocast("cpu", torch.bfloat16):
        right, _ = one_by_one(net)
        step = fpipe.build(program, model, trace=trace)
        for _ in range(2):
            found = step(params, ROWS, state=state).state
    for stage in found or ():
        assert all(torch.equal(tensor, right.get_buffer(name)) for name, tensor in stage.items())


class Squared(nn.Module):
    """Multiplies what it remembers, which casts are for, and grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("square", torch.eye(8))
        self.register_buffer("all", torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = x.detach()
        self.square = (self.square @ (h.t() @ h)).float() * 0.1
        self.all = torch.cat([self.all, h.float()])
        return torch.tanh(x)


def test_norms_beside_may_be_deferred():
    """Refused where a forward reads a buffer: it takes the norms along."""
    net = twice(Block)
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=nn.functional.mse_loss)
    deferred = fpipe.deferred_batch_norm(model)
    program = fpipe.chain(fpipe.split(4), *PLANS["out of order"])(fpipe.program(deferred))
    assert fpipe.verify(program, deferred, params, ROWS, state=state).bitwise
    found = fpipe.build(program, deferred)(params, ROWS, state=state).state
    assert found is not None
    assert [list(stage) for stage in found] == [list(stage) for stage in state]
    assert (found[0]["1.norm.num_batches_tracked"], found[0]["1.calls"]) == (1, 4)


def test_slices_update_one_after_the_other():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Words(), nn.Linear(8, 8), Words())
    model, params, state = fpipe.from_sequential(net, sizes=[2, 2], loss=nn.functional.mse_loss)
    batch = torch.randn(4, 8, 8), torch.randn(4, 8, 8)
    for schedule in (fpipe.identity(), fpipe.schedules.seq1f1b(2, slices=4)):
        program = fpipe.chain(fpipe.split(2, slices=4), schedule, fpipe.merge())(fpipe.program(model))
        assert fpipe.verify(program, model, params, batch, state=state).bitwise


class Words(nn.Module):
    """A running mean over rows and words."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return torch.tanh(x)


def test_in_eval_what_is_written_in_training_is_a_constant():
    net = twice(ByMode).eval()
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=nn.functional.mse_loss)
    assert state == ({}, {})
    model, params, state = fpipe.from_sequential(net.train(), sizes=[3, 3], loss=nn.functional.mse_loss)
    step = fpipe.build(fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model)), model)
    step(params, ROWS, state=state)
    net.eval()
    sentence = "module '1' (ByMode) was in training when the net was cut into stages and is in eval now: what it"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        step(params, ROWS, state=state)


# What the code does not show


class Hidden(nn.Module):
    """Reaches its buffer by a function that is no method, and uses it in a way of its own."""

    total: Tensor

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.use, self.read = use, lambda: self.total

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        self.total += y.detach()[0]
        return self.use(y, self.read())


def lent(y: Tensor, total: Tensor) -> Tensor:
    total.data = y[0]
    total.mul_(2)
    return y


def added_to(y: Tensor, total: Tensor) -> Tensor:
    y += total
    return y


def unheard(y: Tensor, total: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return y * total


READ = (
    "stage 0 reads buffer '1.total', which it also writes ({}), and the code of its modules does not show that it does."
)
HIDDEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "in the output": (lambda y, total: y * total, READ.format("its output comes from it")),
    "a view": (lambda y, total: total.expand(y.shape), READ.format("its output comes from it")),
    "its numbers": (lambda y, total: y * float(total.sum()), READ.format("__float__ asks for its numbers")),
    "a question": (lambda y, total: y if total.sum() > 3 else y * 2, READ.format("__bool__ asks for its numbers")),
    "into another": (added_to, READ.format("add_ writes it into another tensor")),
    "at random": (lambda y, total: y + 0 * total.normal_(), READ.format("normal_ draws random numbers by it")),
    "below Python": (unheard, READ.format("aten.mul.Tensor reads it")),
    "other memory": (lent, READ.format("mul_ writes the memory of what its .data was assigned, too")),
    "a change": (
        lambda y, total: y.relu_(),
        "stage 0 changed a tensor in place that the update of its buffers '1.total' reads, and the code of its modules "
        "does not show that it does. Copy the tensor before it is changed.",
    ),
}


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(("use", "sentence"), HIDDEN.values(), ids=HIDDEN.keys())
def test_a_reading_that_the_code_does_not_show_is_refused(use: Any, sentence: str, trace: bool):
    net = twice(lambda: Hidden(use))
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model))
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        fpipe.build(program, model, trace=trace)(params, ROWS, state=state)
    assert not net[1].total.any()


class Lent(nn.Module):
    """Remembers its input, or what it makes of it, in the same memory."""

    last: Tensor

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1 if self.own else x
        self.last.data = y.detach()
        return y * 1


class Doubling(Lent):
    """Changes what it remembers, and so what it goes on with."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1 if self.own else x
        self.last.data = y.detach()
        self.last.mul_(2)
        return y * 1


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("kind", [Lent, Doubling])
def test_what_is_remembered_by_its_data_is_the_unsplit_modules(kind: type[Lent], trace: bool):
    """What was done to the buffer reached the output later, or never: the trace, and the tape, saw two tensors in one
    memory as two."""
    net = nn.Sequential(nn.Linear(8, 8), kind(own=True), nn.Linear(8, 8))
    model, params, state = fpipe.from_sequential(net, sizes=[3], loss=nn.functional.mse_loss)
    assert ("state" in model.stages[0].asks) is (kind is Doubling)
    right, outputs = one_by_one(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it assigns the .data of a buffer that is read, which no trace sees
        step = fpipe.build(fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model)), model, trace=trace)
        found = step(params, ROWS, state=state)
    assert found.state is not None
    assert torch.equal(found.state[0]["1.last"], right.get_buffer("1.last"))
    assert torch.equal(found.outputs, outputs)
    grads = fpipe.join_params(model, found.grads)
    assert all(torch.equal(grads[name], leaf.grad) for name, leaf in right.named_parameters())


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("kind", [Lent, Doubling])
def test_a_batch_in_whose_memory_a_module_remembers_stays_as_it_is(kind: type[Lent], trace: bool):
    """It was twice what it had been, in silence."""
    batch = tuple(half.clone() for half in ROWS)
    net = nn.Sequential(kind(own=False), nn.Linear(8, 8))
    model, params, state = fpipe.from_sequential(net, sizes=[2], loss=nn.functional.mse_loss)
    step = fpipe.build(fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model)), model, trace=trace)
    refused = pytest.raises(RuntimeError, match=re.escape("stage 0 (0, 1) changed what it was given in place; a stage"))
    with refused if kind is Doubling else nullcontext():
        found = step(params, batch, state=state).state
        assert found is not None
        found[0]["0.last"].zero_()
    assert all(map(torch.equal, batch, ROWS))


class Sometimes(nn.Module):
    """Counts, and normalises batches of three."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(x) if len(x) == 3 else x


@pytest.mark.parametrize("trace", [True, False])
def test_norms_that_did_not_run_are_updated_beside_a_counter(trace: bool):
    """Such an update was taken for one of the counter alone, and met the deferred norm's int."""
    net = nn.Sequential(nn.Linear(4, 4), Sometimes(), nn.Linear(4, 2))
    model, params, state = fpipe.from_sequential(net, sizes=[2, 1], loss=nn.functional.mse_loss)
    model = fpipe.deferred_batch_norm(model)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    program = fpipe.chain(fpipe.split(3), fpipe.merge())(fpipe.program(model))
    made = fpipe.build(program, model, trace=trace)(params, batch, state=state).state
    wanted = fpipe.reference(model, params, batch, microbatches=3, state=state).state
    assert made is not None
    assert made[0]["1.count"] == 3
    assert [each.keys() for each in made] == [each.keys() for each in wanted or ()]
    assert all(torch.equal(held, (wanted or ())[0][name]) for name, held in made[0].items() if "gathered" not in name)


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Tally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


def test_a_module_beside_a_counter_may_turn_to_eval():
    """It was refused as if it remembered."""
    net = nn.Sequential(nn.Linear(4, 4), Tally(), Doubles())
    model, params, state = fpipe.from_sequential(net, sizes=[3], loss=nn.functional.mse_loss)
    batch = torch.randn(4, 4), torch.randn(4, 4)
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model)
    for training in (True, False):
        net.train(training)
        outputs = torch.cat([net[2](net[0](x)) for x in batch[0].tensor_split(2)])
        assert torch.equal(step(params, batch, state=state).outputs, outputs)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x

    @property
    def average(self) -> Any:
        return self.mean

    def doubled(self) -> Any:
        return self.mean * 2


class ByProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ema = Mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.ema(x) - self.ema.average


class ByMethod(ByProperty):
    def forward(self, x: Tensor) -> Tensor:
        return self.ema(x) - self.ema.doubled()


@pytest.mark.parametrize("kind", [ByProperty, ByMethod])
def test_what_a_module_around_reads_by_a_property_or_method_counts_as_read(kind: type[nn.Module]):
    """It was taken for unread, and then refused as the module ran."""
    net = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))
    model, params, state = fpipe.from_sequential(net, sizes=[2, 1], loss=nn.functional.mse_loss)
    assert "state" in model.stages[0].asks
    batch = torch.randn(6, 4), torch.randn(6, 2)
    program = fpipe.chain(fpipe.split(3), fpipe.merge())(fpipe.program(model))
    made = fpipe.build(program, model)(params, batch, state=state)
    outputs = torch.cat([net(x) for x in batch[0].tensor_split(3)])
    assert torch.equal(made.outputs, outputs)
    assert made.state is not None
    assert torch.equal(made.state[0]["1.ema.mean"], net.get_buffer("1.ema.mean"))


class Lending(nn.Module):
    """Its second buffer is its first from then on, so that what is written into that shows in this."""

    first: Tensor
    second: Tensor

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("first", torch.zeros(8))
        self.register_buffer("second", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.first.add_(1.0)
        y = x * self.second.mean() if self.reads else x * 2
        self.second = self.first
        return y


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_buffers_left_in_one_memory_are_refused(reads: bool, trace: bool):
    """As state they were apart from the next microbatch on: another loss, without a word."""
    net = nn.Sequential(nn.Linear(8, 8), Lending(reads))
    model, params, state = fpipe.from_sequential(net, stages=1, loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(3), fpipe.merge())(fpipe.program(model))
    sentence = (
        "stage 0 left buffers '1.first' and '1.second' in one memory; module state is a tensor of its own for each"
    )
    with pytest.raises(RuntimeError, match=sentence):
        fpipe.build(program, model, trace=trace)(params, (torch.randn(6, 8), torch.randn(6, 8)), state=state)
