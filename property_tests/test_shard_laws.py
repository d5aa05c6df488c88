"""Laws of sharded parameters: whenever they are gathered, they give the gradients of whole parameters."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor, nn

import fpipe
from fpipe.program import parts_of
from fpipe.wording import StateOrderError
from property_tests.strategies import max_examples
from tests.processes import Processes
from tests.test_data_parallel import meshed
from tests.test_distributed import local_part

POLICIES: dict[str, Any] = {
    "step": "step",
    "run": "run",
    "use": "use",
    "of a kind": lambda op: op.kind,
    "of a microbatch": lambda op: op.microbatch,
}
SCHEDULES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "zbv", "dualpipe", "roundpipe"]


def model_of(stages: int) -> tuple[fpipe.Model, tuple[Any, ...]]:
    """Build stages whose parameters have rows that replicas cannot share equally, and one without dimensions."""
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
    """Build four stages: two share a weight, and one has only a parameter without dimensions, never sharded."""
    params = [{"w": torch.randn(4, 4), "b": torch.randn(3, 4)}, {"w": torch.randn(4, 4)}, {"s": torch.randn(())}, {}]

    def stage(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p.get("w", torch.eye(4))) + p.get("b", torch.zeros(1)).sum(0) * p.get("s", 1.0)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y.sum(1) - target).square().mean()

    return fpipe.from_functions([stage] * 4, loss, ties=[[(0, "w"), (3, "w")]]), tuple(params)


def counting_model() -> tuple[fpipe.Model, Any, Any]:
    """Build a net with a batch norm, and a loss that counts."""

    def loss(y: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (y.sum(1) - target).square().sum(), target.numel()

    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    return fpipe.from_sequential(net, stages=4, loss=loss, reduction="count")


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "plain": lambda: model_of(4),
    "tied": tied_model,
    "counting": counting_model,
}


class Sharding(NamedTuple):
    """A recipe of a sharded program: a schedule, the transforms around it, and the options of shard."""

    schedule: str
    recompute: bool
    split: bool
    gather: str
    lead: int
    scatter: str

    def chain(self) -> Callable[[fpipe.Program], fpipe.Program]:
        """Return the transforms of one replica, up to merge."""
        recompute = [fpipe.checkpoint("except_last")] * self.recompute
        schedule, halves = fpipe.schedules.get(self.schedule)(2), [fpipe.split_backward()] * self.split
        return fpipe.chain(fpipe.split(4), *recompute, schedule, *halves, fpipe.merge(outputs=False))

    def options(self) -> dict[str, Any]:
        return {"gather": POLICIES[self.gather], "lead": self.lead, "scatter": self.scatter}


def shardings() -> st.SearchStrategy[Sharding]:
    schedules, policies, scatters = map(st.sampled_from, (SCHEDULES, [*POLICIES], ["step", "microbatch"]))
    return st.builds(Sharding, schedules, st.booleans(), st.booleans(), policies, st.integers(0, 3), scatters)


def drawn_shardings() -> st.SearchStrategy[tuple[Callable[[fpipe.Program], fpipe.Program], dict[str, Any]]]:
    return shardings().map(lambda sharding: (sharding.chain(), sharding.options()))


@max_examples(8)
@given(drawn_shardings(), st.sampled_from([*MODELS]), st.sampled_from([1, 2, 3, (2, 2), (2, 1), (1, 3)]), st.booleans())
def test_replicas_with_shards_have_the_gradients_of_plain_autograd(
    drawn: Any, name: str, replicas: Any, across_first: bool
):
    chain, options = drawn
    model, params, *state = MODELS[name]()
    rows = 49 if name == "counting" else 48  # replicas may have other rows where they are counted
    replications = [fpipe.shard(**options), *[fpipe.data_parallel("replicate")] * isinstance(replicas, tuple)]
    try:
        program = fpipe.chain(chain, *replications[:: -1 if across_first else 1])(fpipe.program(model))
    except StateOrderError:
        if not state:
            raise
        reject()  # a schedule of two directions, and a stage that keeps state
    state_options = {"state": state[0]} if state else {}
    batch = torch.randn(rows, 4), torch.randn(rows)
    assert fpipe.verify(program, model, params, batch, replicas=replicas, **state_options).bitwise


@given(drawn_shardings())
def test_collectives_that_take_no_time_change_no_time_and_no_order(drawn: Any):
    chain, options = drawn
    base = chain(fpipe.program(4))
    replicas, shards = fpipe.data_parallel()(base), fpipe.shard(**options)(base)
    assert (fpipe.data_parallel()(replicas), fpipe.shard(**options)(replicas)) == (replicas, shards)
    for program in (replicas, shards):
        assert program == fpipe.Program.parse(str(program))
        assert program.table() == base.table()
        assert fpipe.simulate(program).makespan == fpipe.simulate(base).makespan
        communicated = fpipe.communicate()(program)
        for lowered in (communicated, fpipe.free()(program), fpipe.free()(communicated), fpipe.forward_only()(program)):
            fpipe.check(lowered)


@given(drawn_shardings())
def test_each_use_at_home_reads_a_copy_that_is_gathered_for_it(drawn: Any):
    chain, options = drawn
    program = fpipe.shard(**options | {"gather": "use"})(chain(fpipe.program(4)))
    gathers = {value: op for op in program.ops if op.kind == "GATHER" for value in op.writes}
    homes = {value.stage: homes for value, homes in program.inputs if value.name == "shard"}
    uses = [(op, value) for op in parts_of(program.ops) for value in op.reads if value.name == "params"]
    at_home = [value for op, value in uses if op.rank in homes[value.stage]]
    assert len(at_home) == len({*at_home})
    assert all(value in gathers for _, value in uses)


REPLICATIONS = [fpipe.shard()], [fpipe.data_parallel()], [fpipe.shard(), fpipe.data_parallel("replicate")]


@given(shardings(), st.permutations(range(4)), st.sampled_from(REPLICATIONS))
def test_replicas_may_stand_anywhere_in_a_chain(sharding: Sharding, order: list[int], replications: list[Any]):
    """They commute with schedules, recomputation and split backwards, and shards commute with replicas."""
    schedule, merge = fpipe.schedules.get(sharding.schedule)(2), fpipe.merge(outputs=False)
    recompute = fpipe.checkpoint("except_last" if sharding.recompute else "never")
    split = fpipe.split_backward() if sharding.split else fpipe.identity()
    base = fpipe.split(4)(fpipe.program(4))
    single, replicated = ([recompute, schedule, split, fpipe.chain(merge, *extra)] for extra in ([], replications))
    expected = fpipe.chain(*(single[number] for number in order), *replications[::-1])(base)
    assert fpipe.chain(*(replicated[number] for number in order))(base) == expected


def differences_from_lockstep(rank: int, sharding: Sharding, name: str) -> list[str]:
    """Return the results of processes' second step that differ from replicas in lockstep on one device."""
    mesh, replica, pp_rank = meshed()
    model, params, *state = MODELS["counting" if name == "counting" else "plain"]()
    params[0].pop("scale", None)  # a step takes parameters of no dimension whole
    rows = 17 if name == "counting" else 16
    batch, state_options = (torch.randn(rows, 4), torch.randn(rows)), {"state": state[0]} if state else {}
    program = fpipe.shard(**sharding.options())(sharding.chain()(fpipe.program(model)))
    assert fpipe.verify(program, model, params, batch, replicas=2, **state_options).bitwise
    mine, shards = tuple(half.chunk(2)[replica] for half in batch), fpipe.shard_params(params, mesh["dp"])
    options: Any = {"mesh": mesh, "example": (shards, mine, *state), "broadcast": True}
    step = fpipe.build(program, model, runtime="distributed", trace=name != "untraced", **options)
    local_params = local_part(program, pp_rank, shards)
    local_state = {"state": local_part(program, pp_rank, state[0])} if state else {}
    result = [step(local_params, mine, **local_state) for _ in range(2)][1]
    expected = fpipe.reference(model, params, batch, microbatches=4, replicas=2, **state_options)
    trees = map(fpipe.tree.leaves, (result.grads, local_part(program, pp_rank, expected.grads), local_params))
    leaves = [three for three in zip(*trees, strict=True) if three[0] is not None]
    wrong = ["loss"] * (not torch.equal(result.loss, expected.loss)) + ["nothing"] * (not leaves)
    wrong += ["gradient" for grad, whole_grad, _ in leaves if not torch.equal(grad.full_tensor(), whole_grad)]
    return wrong + ["place" for grad, _, shard in leaves if grad.placements != shard.placements]


IN_STEP = shardings().filter(lambda sharding: sharding.scatter == "step" and sharding.schedule != "roundpipe")


@max_examples(2)
@given(IN_STEP, st.sampled_from(["plain", "counting", "untraced"]))
def test_processes_have_the_bits_of_replicas_in_lockstep(four: Processes, sharding: Sharding, name: str):
    """If a loss counts, replicas may have unequal rows. Untraced steps have shards too."""
    assert four.run(differences_from_lockstep, sharding, name) == [[]] * 4
