"""One value with many readers: tied parameters and skips, under every schedule, policy, balance and replica."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import Pop, Stash
from tests.refusals import refusals
from tests.toys import Toy, merged

F = nn.functional


def test_a_tied_parameter_lives_in_the_first_stage_and_travels_to_the_others():
    embedding = nn.Embedding(11, 6)
    head = Toy(lambda own, x: x @ own.embedding.weight.t(), embedding=embedding)
    net = nn.Sequential(embedding, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), head)
    model, params, _ = fpipe.from_sequential(net, sizes=[2, 2, 2], loss=F.mse_loss)
    assert [list(stage) for stage in params] == [["0.weight", "1.weight", "1.bias"], ["3.weight", "3.bias"], []]
    assert model.ties == (((0, "0.weight"), (2, "5.embedding.weight")),)
    pipeline = merged(model, 3, fpipe.schedules.one_f_one_b(3))
    sends = [op.reads[0].name for op in fpipe.communicate()(pipeline).ops if op.kind == "SEND"]
    assert sends.count("params") == 1
    assert sends.count("g") + sends.count("sum") == 1


def add(x, value):
    return x + value


def concatenated(x, value):
    return torch.cat([x, value], -1)


def unet():
    """Two skips, one inside the other, as in a U-Net."""
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.Tanh(),
        Stash("outer"),
        nn.Linear(6, 6),
        Stash("inner"),
        nn.Tanh(),
        nn.Linear(6, 6),
        Pop("inner", add),
        nn.Tanh(),
        nn.Linear(6, 6),
        Pop("outer", lambda x, value: torch.cat([x, value], -1)),
        nn.Linear(12, 6),
    )


def by_hand(net, x):
    outer = net[1](net[0](x))
    inner = net[3](outer)
    x = net[8](net[6](net[5](inner)) + inner)
    return net[11](torch.cat([net[9](x), outer], -1))


def numbers(rows=7):
    return torch.randn(rows, 6), torch.randn(rows, 6)


def test_skips_are_the_values_that_they_are_by_hand():
    """Behaviour 17; that schedules and balances do not matter says `property_tests/test_whole_laws.py`."""
    net, batch = unet(), numbers()
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 4, 2, 5], loss=F.mse_loss)
    assert torch.equal(fpipe.build(fpipe.program(model), model)(params, batch).outputs, by_hand(net, batch[0]))


TRIPS = {
    (3, 3, 3, 3): [(0, 1), (1, 2), (2, 3), (0, 3), (1, 2)],  # outer is the first stage's output and one of its own
    (1, 4, 2, 5): [(0, 1), (1, 2), (2, 3), (1, 3), (1, 3)],
}


@pytest.mark.parametrize("sizes", TRIPS)
def test_a_skip_travels_once_from_its_rank_to_its_readers(sizes):
    """Stage 1's value read by stage 3 goes past stage 2, and back again as one gradient."""
    model, _, _ = fpipe.from_sequential(unet(), sizes=sizes, loss=F.mse_loss)
    program = merged(model, 1, fpipe.schedules.gpipe(4), fpipe.communicate())
    trips = [(op.rank, int(op.writes[0].at[1:])) for op in program.ops if op.kind == "SEND"]
    assert sorted(trip for trip in trips if trip[0] < trip[1]) == sorted(TRIPS[sizes])
    assert sorted((to, start) for start, to in trips if start > to) == sorted(TRIPS[sizes])


def test_a_skip_that_is_an_output_anyway_is_not_handed_on_twice():
    net = nn.Sequential(nn.Linear(6, 6), Stash("s"), nn.Tanh(), nn.Tanh(), Pop("s", add))
    model, _, _ = fpipe.from_sequential(net, sizes=[2, 1, 2], loss=F.mse_loss)
    assert model.inputs == ("batch", 0, (1, 0))
    model, _, _ = fpipe.from_sequential(net, sizes=[1, 2, 2], loss=F.mse_loss)
    assert model.inputs == ("batch", 0, (1, 0))
    model, _, _ = fpipe.from_sequential(net, sizes=[3, 2], loss=F.mse_loss)
    assert model.inputs == ("batch", (0, (0, 1)))


class Alive(TorchDispatchMode):
    """Which of the tensors that `sin` has made are alive when `exp` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.exp.default:
            self.found.append((len(self.made), sum(not ref.expired() for ref in self.made)))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result


@pytest.mark.parametrize("more", [(), (fpipe.forward_only(),)], ids=["trained", "evaluated"])
@pytest.mark.parametrize("trace", [True, False])
def test_nothing_holds_a_skip_after_its_last_reader(trace: bool, more):
    """Behaviour 17: the memory itself, by weak references. Stage 3 reads the skip, stage 4 takes the exponential; the
    gradients of sine and sum need it no more. Only autograd's own graph, without a trace, holds its leaves until 3B."""

    def skips(p, x):
        return x @ p["w"], torch.sin(x @ p["w"])

    def joins(p, x):
        return (x[0] + x[1]) @ p["w"]

    def plain(p, x):
        return x @ p["w"]

    def last(p, x):
        return torch.exp(x @ p["w"])

    inputs = ("batch", 0, 1, (2, (1, 1)), 3)
    model = fpipe.from_functions([plain, skips, plain, joins, last], F.mse_loss, inputs=inputs)
    params = tuple({"w": torch.randn(6, 6) / 6} for _ in range(5))
    step = fpipe.build(merged(model, 3, *more), model, trace=trace, audit="never")  # an audit holds what it compares
    step(params, numbers())
    with Alive() as seen:
        step(params, numbers())
    assert [alive for _, alive in seen.found] == ([0, 0, 0] if trace or more else [1, 1, 1])
    assert [made for made, _ in seen.found] == [1, 2, 3]


def sequential(*children, sizes):
    return fpipe.from_sequential(nn.Sequential(*children), sizes=sizes, loss=F.mse_loss)


def twice(module):
    return sequential(module, module, sizes=[1, 1])


def two_views():
    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight = nn.Parameter(one.weight.detach())
    return sequential(one, other, sizes=[1, 1])


test_what_cannot_be_is_refused = refusals(
    globals(),
    """
Pop('a', 3)
    TypeError: the join of Pop('a') is a function f(x, value), found 3.
Pop('a')(torch.ones(2))
    RuntimeError: Pop('a') runs only inside a stage of fpipe.from_sequential. For the whole net use
Stash('a')(torch.ones(2))
    RuntimeError: Stash('a') runs only inside a stage of fpipe.from_sequential. For the whole net use
sequential(Stash('a'), Stash('a'), sizes=[2])
    ValueError: Stash('a') stands twice; give each a name of its own.
sequential(nn.Tanh(), Pop('a'), Stash('a'), sizes=[3])
    ValueError: Pop('a') has no Stash('a') before it.
sequential(Stash('a'), nn.Tanh(), sizes=[1, 1])
    ValueError: Stash('a') is never popped; leave it out, or add Pop('a').
sequential(nn.Sequential(nn.Tanh(), Stash('a')), Pop('a'), sizes=[1, 1])
    ValueError: Stash('a') is inside '0' as '1'; make it a child of the Sequential itself.
Pop('a', nn.Bilinear(2, 2, 2))
    TypeError: the join of Pop('a') is a function; put the module Bilinear behind it.
unet()(torch.randn(2, 6))
    RuntimeError: Stash('outer') runs only inside a stage of fpipe.from_sequential
fpipe.reference(fpipe.from_functions([lambda p, x: x, lambda p, x: x[0]], F.mse_loss, inputs=('batch', (0, (0, 1)))),
({}, {}), numbers())
    TypeError: stage 0 (<lambda>) returns a tuple of 2 outputs, which others take; found Tensor.
fpipe.program(2, inputs=('batch', ((0, 1), 'batch')))
    ValueError: nobody takes output 0 of stage 0; only the last stage, 1, gives the loss its input.
fpipe.program(2, inputs=('batch', (0, (1, 0))))
    ValueError: stage 1 takes (1, 0); it can take a stage from 0 to 0, or 'batch'.
twice(nn.BatchNorm1d(6))
    ValueError: module '1' (BatchNorm1d) with state stands in stages 0 and 1
two_views()
    ValueError: '0.weight' in stage 0 and '1.weight' in stage 1 share a storage, but are two parameters
""",
)
