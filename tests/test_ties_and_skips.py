"""One value with many readers: tied parameters and skips."""

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
    head = Toy(lambda module, x: x @ module.embedding.weight.t(), embedding=embedding)
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


def concatenate(x, value):
    return torch.cat([x, value], -1)


def unet():
    """Return a net with two nested skips, as in a U-Net."""
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


def unet_by_hand(net, x):
    outer_skip = net[1](net[0](x))
    inner_skip = net[3](outer_skip)
    x = net[8](net[6](net[5](inner_skip)) + inner_skip)
    return net[11](torch.cat([net[9](x), outer_skip], -1))


def make_batch(rows=7):
    return torch.randn(rows, 6), torch.randn(rows, 6)


def test_skips_give_the_outputs_of_plain_code():
    """Behaviour 17. Schedules and balances are tested by `property_tests/test_whole_laws.py`."""
    net, batch = unet(), make_batch()
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 4, 2, 5], loss=F.mse_loss)
    assert torch.equal(fpipe.build(fpipe.program(model), model)(params, batch).outputs, unet_by_hand(net, batch[0]))


TRANSFERS_BY_SIZES = {
    (3, 3, 3, 3): [(0, 1), (1, 2), (2, 3), (0, 3), (1, 2)],  # outer is the first stage's output and one of its own
    (1, 4, 2, 5): [(0, 1), (1, 2), (2, 3), (1, 3), (1, 3)],
}


@pytest.mark.parametrize("sizes", TRANSFERS_BY_SIZES)
def test_a_skip_travels_once_from_its_rank_to_its_readers(sizes):
    """A value of stage 1 for stage 3 passes by stage 2, and returns as one gradient."""
    model, _, _ = fpipe.from_sequential(unet(), sizes=sizes, loss=F.mse_loss)
    program = merged(model, 1, fpipe.schedules.gpipe(4), fpipe.communicate())
    transfers = [(op.rank, int(op.writes[0].location[1:])) for op in program.ops if op.kind == "SEND"]
    assert sorted(transfer for transfer in transfers if transfer[0] < transfer[1]) == sorted(TRANSFERS_BY_SIZES[sizes])
    assert sorted((end, start) for start, end in transfers if start > end) == sorted(TRANSFERS_BY_SIZES[sizes])


def test_a_skip_that_is_an_output_is_sent_once():
    net = nn.Sequential(nn.Linear(6, 6), Stash("s"), nn.Tanh(), nn.Tanh(), Pop("s", add))
    model, _, _ = fpipe.from_sequential(net, sizes=[2, 1, 2], loss=F.mse_loss)
    assert model.inputs == ("batch", 0, (1, 0))
    model, _, _ = fpipe.from_sequential(net, sizes=[1, 2, 2], loss=F.mse_loss)
    assert model.inputs == ("batch", 0, (1, 0))
    model, _, _ = fpipe.from_sequential(net, sizes=[3, 2], loss=F.mse_loss)
    assert model.inputs == ("batch", (0, (0, 1)))


class LiveSines(TorchDispatchMode):
    """Count the outputs of `sin` that are alive when `exp` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.sines: list[StorageWeakRef] = []
        self.counts: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.exp.default:
            self.counts.append((len(self.sines), sum(not ref.expired() for ref in self.sines)))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            self.sines.append(StorageWeakRef(result.untyped_storage()))
        return result


@pytest.mark.parametrize("transforms", [(), (fpipe.forward_only(),)], ids=["trained", "evaluated"])
@pytest.mark.parametrize("trace", [True, False])
def test_nothing_holds_a_skip_after_its_last_reader(trace: bool, transforms):
    """Behaviour 17: the memory itself, by weak references. Stage 3 reads the skip, stage 4 takes the exponential; the
    gradients of sine and sum need it no more. Only autograd's own graph, without a trace, holds its leaves until 3B."""

    def two_outputs(p, x):
        return x @ p["w"], torch.sin(x @ p["w"])

    def add_skip(p, x):
        return (x[0] + x[1]) @ p["w"]

    def plain(p, x):
        return x @ p["w"]

    def exponential(p, x):
        return torch.exp(x @ p["w"])

    inputs = ("batch", 0, 1, (2, (1, 1)), 3)
    model = fpipe.from_functions([plain, two_outputs, plain, add_skip, exponential], F.mse_loss, inputs=inputs)
    params = tuple({"w": torch.randn(6, 6) / 6} for _ in range(5))
    step = fpipe.build(
        merged(model, 3, *transforms), model, trace=trace, audit="never"
    )  # an audit holds what it compares
    step(params, make_batch())
    with LiveSines() as live_sines:
        step(params, make_batch())
    assert [live_count for _, live_count in live_sines.counts] == ([0, 0, 0] if trace or transforms else [1, 1, 1])
    assert [sine_count for sine_count, _ in live_sines.counts] == [1, 2, 3]


def cut_sequential(*children, sizes):
    return fpipe.from_sequential(nn.Sequential(*children), sizes=sizes, loss=F.mse_loss)


def cut_module_twice(module):
    return cut_sequential(module, module, sizes=[1, 1])


def cut_two_views():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = nn.Parameter(first.weight.detach())
    return cut_sequential(first, second, sizes=[1, 1])


test_impossible_skips_and_ties_are_refused = refusals(
    globals(),
    """
Pop('a')(torch.ones(2))
    RuntimeError: Pop('a') runs only inside a stage of fpipe.from_sequential. For the whole net use
Stash('a')(torch.ones(2))
    RuntimeError: Stash('a') runs only inside a stage of fpipe.from_sequential. For the whole net use
cut_sequential(Stash('a'), Stash('a'), sizes=[2])
    ValueError: Stash('a') stands twice; give each a name of its own.
cut_sequential(nn.Tanh(), Pop('a'), Stash('a'), sizes=[3])
    ValueError: Pop('a') has no Stash('a') before it.
cut_sequential(Stash('a'), nn.Tanh(), sizes=[1, 1])
    ValueError: Stash('a') is never popped; leave it out, or add Pop('a').
cut_sequential(nn.Sequential(nn.Tanh(), Stash('a')), Pop('a'), sizes=[1, 1])
    ValueError: Stash('a') is inside '0' as '1'; make it a child of the Sequential itself.
Pop('a', nn.Bilinear(2, 2, 2))
    TypeError: the join of Pop('a') is a function; put the module Bilinear behind it.
unet()(torch.randn(2, 6))
    RuntimeError: Stash('outer') runs only inside a stage of fpipe.from_sequential
fpipe.reference(fpipe.from_functions([lambda p, x: x, lambda p, x: x[0]], F.mse_loss, inputs=('batch', (0, (0, 1)))),
({}, {}), make_batch())
    TypeError: stage 0 (<lambda>) returns a tuple of 2 outputs, which others take; found Tensor.
fpipe.program(2, inputs=('batch', ((0, 1), 'batch')))
    ValueError: nobody takes output 0 of stage 0; only the last stage, 1, gives the loss its input.
fpipe.program(2, inputs=('batch', (0, (1, 0))))
    ValueError: stage 1 takes (1, 0); it can take a stage from 0 to 0, or 'batch'.
cut_module_twice(nn.BatchNorm1d(6))
    ValueError: module '1' (BatchNorm1d) with state stands in stages 0 and 1
cut_two_views()
    ValueError: '0.weight' in stage 0 and '1.weight' in stage 1 share a storage, but are two parameters
""",
)
