"""Laws of sharded parameters: whoever gathers them when, the gradients are those of replicas with the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from fpipe.program import parts_of

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


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Callable[[fpipe.Program], fpipe.Program], dict[str, Any]]:
    """A schedule with what may stand around it, and how it is sharded."""
    schedule = fpipe.schedules.get(draw(st.sampled_from(SCHEDULES)))(2)
    before = [fpipe.checkpoint("except_last")] * draw(st.booleans()) + [schedule]
    after = [fpipe.split_backward()] * draw(st.booleans())
    how = {"gather": POLICIES[draw(st.sampled_from([*POLICIES]))], "lead": draw(st.integers(0, 3))}
    how["scatter"] = draw(st.sampled_from(["step", "microbatch"]))
    return fpipe.chain(fpipe.split(4), *before, *after, fpipe.merge(outputs=False)), how


@given(sharded(), st.sampled_from([1, 2, 3, (2, 2), (2, 1), (1, 3)]), st.booleans())
def test_replicas_with_shards_have_the_gradients_of_plain_autograd(drawn: Any, replicas: Any, across_first: bool):
    chain, how = drawn
    model, params = model_of(4)
    batch = torch.randn(24, 4), torch.randn(24)
    ways = [fpipe.shard(**how), *[fpipe.data_parallel("replicate")] * isinstance(replicas, tuple)]
    program = fpipe.chain(chain, *ways[:: -1 if across_first else 1])(fpipe.program(model))
    assert fpipe.verify(program, model, params, batch, replicas=replicas).bitwise


@given(sharded())
def test_collectives_that_take_no_time_change_no_time_and_no_order(drawn: Any):
    chain, how = drawn
    base = chain(fpipe.program(4))
    program, replicas = fpipe.shard(**how)(base), fpipe.data_parallel()(base)
    assert program == fpipe.Program.parse(str(program))
    assert program.table() == replicas.table()
    assert fpipe.simulate(program).makespan == fpipe.simulate(replicas).makespan
    for more in (fpipe.communicate(), fpipe.free(), fpipe.chain(fpipe.communicate(), fpipe.free())):
        fpipe.check(more(program))


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
