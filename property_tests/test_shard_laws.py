"""Laws of sharded parameters: whoever gathers them when, the gradients are those of replicas with the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fpipe
from fpipe.program import parts_of
from property_tests.strategies import few
from tests.processes import Processes
from tests.test_data_parallel import meshed
from tests.test_distributed import own

POLICIES: dict[str, Any] = {
    "step": "step",
    "run": "run",
    "use": "use",
    "of a kind": lambda op: op.kind,
    "of a microbatch": lambda op: op.microbatch,
}
SCHEDULES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "zbv", "dualpipe", "roundpipe"]


def model_of(stages: int) -> tuple[fpipe.Model, tuple[Any, ...]]:
    """Stages whose parameters have rows that replicas have not equally many of, and one of no dimension."""
    sizes = [4, 3, 5, 2, 4][: stages + 1]
    torch.manual_seed(stages)
    params = [{"w": torch.randn(a, b), "b": torch.randn(b)} for a, b in pairwise(sizes)]
    params[0]["scale"] = torch.ones(())

    def stage(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"] + p["b"]) * p.get("scale", 1.0)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y.sum(1) - target).square().mean()

    return fpipe.from_functions([stage] * stages, loss), tuple(params)


def tied_model() -> tuple[fpipe.Model, tuple[Any, ...]]:
    """Four stages of which two share a weight, and one has parameters alone that replicas have whole."""
    params = [{"w": torch.randn(4, 4), "b": torch.randn(3, 4)}, {"w": torch.randn(4, 4)}, {"s": torch.randn(())}, {}]

    def stage(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p.get("w", torch.eye(4))) + p.get("b", torch.zeros(1)).sum(0) * p.get("s", 1.0)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y.sum(1) - target).square().mean()

    return fpipe.from_functions([stage] * 4, loss, ties=[[(0, "w"), (3, "w")]]), tuple(params)


def counting_model() -> tuple[fpipe.Model, Any, Any]:
    """A loss that counts, behind a norm that remembers."""

    def loss(y: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (y.sum(1) - target).square().sum(), target.numel()

    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    return fpipe.from_sequential(net, stages=4, loss=loss, reduction="count")


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "plain": lambda: model_of(4),
    "tied": tied_model,
    "counting": counting_model,
}


class Words(NamedTuple):
    """A schedule with what may stand around it, and how it is sharded."""

    schedule: str
    recompute: bool
    split: bool
    gather: str
    lead: int
    scatter: str

    def chain(self) -> Callable[[fpipe.Program], fpipe.Program]:
        """Up to the sums of one replica."""
        before = [fpipe.checkpoint("except_last")] * self.recompute + [fpipe.schedules.get(self.schedule)(2)]
        after = [fpipe.split_backward()] * self.split
        return fpipe.chain(fpipe.split(4), *before, *after, fpipe.merge(outputs=False))

    def how(self) -> dict[str, Any]:
        return {"gather": POLICIES[self.gather], "lead": self.lead, "scatter": self.scatter}


def words() -> st.SearchStrategy[Words]:
    schedules, policies, scatters = map(st.sampled_from, (SCHEDULES, [*POLICIES], ["step", "microbatch"]))
    return st.builds(Words, schedules, st.booleans(), st.booleans(), policies, st.integers(0, 3), scatters)


def sharded() -> st.SearchStrategy[tuple[Callable[[fpipe.Program], fpipe.Program], dict[str, Any]]]:
    return words().map(lambda said: (said.chain(), said.how()))


@few(25)
@given(sharded(), st.sampled_from([*MODELS]), st.sampled_from([1, 2, 3, (2, 2), (2, 1), (1, 3)]), st.booleans())
def test_replicas_with_shards_have_the_gradients_of_plain_autograd(
    drawn: Any, name: str, replicas: Any, across_first: bool
):
    chain, how = drawn
    model, params, *state = MODELS[name]()
    rows = 49 if name == "counting" else 48  # replicas may have other rows where they are counted
    ways = [fpipe.shard(**how), *[fpipe.data_parallel("replicate")] * isinstance(replicas, tuple)]
    program = fpipe.chain(chain, *ways[:: -1 if across_first else 1])(fpipe.program(model))
    given = {"state": state[0]} if state else {}
    batch = torch.randn(rows, 4), torch.randn(rows)
    assert fpipe.verify(program, model, params, batch, replicas=replicas, **given).bitwise


@given(sharded())
def test_collectives_that_take_no_time_change_no_time_and_no_order(drawn: Any):
    chain, how = drawn
    base = chain(fpipe.program(4))
    replicas, shards = fpipe.data_parallel()(base), fpipe.shard(**how)(base)
    assert (fpipe.data_parallel()(replicas), fpipe.shard(**how)(replicas)) == (replicas, shards)
    for program in (replicas, shards):
        assert program == fpipe.Program.parse(str(program))
        assert program.table() == base.table()
        assert fpipe.simulate(program).makespan == fpipe.simulate(base).makespan
        sent = fpipe.communicate()(program)
        for made in (sent, fpipe.free()(program), fpipe.free()(sent), fpipe.forward_only()(program)):
            fpipe.check(made)


@given(sharded())
def test_each_use_at_home_reads_a_copy_that_is_gathered_for_it(drawn: Any):
    chain, how = drawn
    program = fpipe.shard(**how | {"gather": "use"})(chain(fpipe.program(4)))
    gathers = {value: op for op in program.ops if op.kind == "GATHER" for value in op.writes}
    homes = {value.stage: homes for value, homes in program.inputs if value.name == "shard"}
    uses = [(op, value) for op in parts_of(program.ops) for value in op.reads if value.name == "params"]
    at_home = [value for op, value in uses if op.rank in homes[value.stage]]
    assert len(at_home) == len({*at_home})
    assert all(value in gathers for _, value in uses)


WAYS = [fpipe.shard()], [fpipe.data_parallel()], [fpipe.shard(), fpipe.data_parallel("replicate")]


@given(words(), st.permutations(range(4)), st.sampled_from(WAYS))
def test_once_a_step_replicas_stand_anywhere_behind_merge(said: Words, order: list[int], ways: list[Any]):
    """Before or after a schedule, recomputation, and the halves of backwards; shards before or after replicas."""
    schedule, last = fpipe.schedules.get(said.schedule)(2), fpipe.merge(outputs=False)
    recompute = fpipe.checkpoint("except_last" if said.recompute else "never")
    split = fpipe.split_backward() if said.split else fpipe.identity()
    base = fpipe.split(4)(fpipe.program(4))
    alone, both = ([recompute, schedule, split, fpipe.chain(last, *more)] for more in ([], ways))
    expected = fpipe.chain(*(alone[number] for number in order), *ways[::-1])(base)
    assert fpipe.chain(*(both[number] for number in order))(base) == expected


def differs(rank: int, said: Words, name: str) -> list[str]:
    """Results of a second step of processes that are not those of one device, which replicas in lockstep have."""
    mesh, replica, place = meshed()
    model, params, *state = MODELS["counting" if name == "counting" else "plain"]()
    params[0].pop("scale", None)  # a step takes parameters of no dimension whole
    rows = 17 if name == "counting" else 16
    batch, given = (torch.randn(rows, 4), torch.randn(rows)), {"state": state[0]} if state else {}
    program = fpipe.shard(**said.how())(said.chain()(fpipe.program(model)))
    assert fpipe.verify(program, model, params, batch, replicas=2, **given).bitwise
    mine, shards = tuple(half.chunk(2)[replica] for half in batch), fpipe.shard_params(params, mesh["dp"])
    more: Any = {"mesh": mesh, "example": (shards, mine, *state), "broadcast": True}
    step = fpipe.build(program, model, runtime="distributed", trace=name != "untraced", **more)
    handed = own(program, place, shards)
    kept = {"state": own(program, place, state[0])} if state else {}
    found = [step(handed, mine, **kept) for _ in range(2)][1]
    alone = fpipe.reference(model, params, batch, microbatches=4, replicas=2, **given)
    trees = map(fpipe.tree.leaves, (found.grads, own(program, place, alone.grads), handed))
    leaves = [three for three in zip(*trees, strict=True) if three[0] is not None]
    wrong = ["loss"] * (not torch.equal(found.loss, alone.loss)) + ["nothing"] * (not leaves)
    wrong += ["gradient" for one, right, _ in leaves if not torch.equal(one.full_tensor(), right)]
    return wrong + ["place" for one, _, shard in leaves if one.placements != shard.placements]


IN_STEP = words().filter(lambda said: said.scatter == "step" and said.schedule != "roundpipe")


@few(8)
@given(IN_STEP, st.sampled_from(["plain", "counting", "untraced"]))
def test_processes_have_the_bits_of_replicas_in_lockstep(four: Processes, said: Words, name: str):
    """Where a loss counts, replicas may have other rows; what is not traced has shards too."""
    assert four.each(differs, said, name) == [[]] * 4
