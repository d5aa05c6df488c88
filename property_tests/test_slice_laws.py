"""Sequences in slices, and values that wait elsewhere: whatever the order and the policies, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from fpipe.program import Program
from fpipe.tree import leaves
from property_tests.strategies import DrawnProgram, few, legal_tables, plans, tiny

Body = Literal["sums", "attention", "recurrent", "alone"]


def sums(p: dict[str, Tensor], x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is handed on is part of the output, too."""
    total = torch.cumsum(x @ p["w"], 1) if carry is None else carry + torch.cumsum(x @ p["w"], 1)
    return torch.tanh(total + p["b"]), total[:, -1:]


def attention(
    p: dict[str, Tensor], x: Tensor, *, carry: tuple[Tensor, int] | None
) -> tuple[Tensor, tuple[Tensor, int]]:
    """Keys that are values, and the number of positions so far, which is no tensor."""
    keys = x @ p["w"] if carry is None else torch.cat([carry[0], x @ p["w"]], 1)
    seen = keys.shape[1] - x.shape[1]
    later = torch.arange(keys.shape[1]) > torch.arange(seen, keys.shape[1])[:, None]
    weights = torch.softmax((x @ keys.transpose(1, 2)).masked_fill(later, float("-inf")), -1)
    return x + weights @ keys * p["b"], (keys, keys.shape[1])


def recurrent(p: dict[str, Tensor], x: Tensor, *, carry: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    h = torch.zeros_like(x[:, 0]) if carry is None else carry["h"]
    found: list[Tensor] = []
    for now in x.unbind(1):
        h = torch.tanh(now @ p["w"] + h * p["b"])
        found.append(h)
    return torch.stack(found, 1), {"h": h}


def alone(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]) + p["b"]


BODIES: dict[Body, Callable[..., Any]] = {"sums": sums, "attention": attention, "recurrent": recurrent, "alone": alone}


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum(2)


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda y, target: squares(y, target).mean(),
    "sum": lambda y, target: squares(y, target).sum(),
    "count": lambda y, target: ((squares(y, target) * (target[..., 0] > 0)).sum(), (target[..., 0] > 0).sum()),
}


@dataclass(frozen=True)
class Sliced:
    """A causal model, a batch of sequences in `microbatches` and `slices`, and the chain of transforms around it."""

    bodies: tuple[Body, ...]
    reduction: Literal["mean", "sum", "count"]
    rows: int
    length: int
    microbatches: int
    slices: int
    chain: tuple[str, ...]
    table: tuple[tuple[str, ...], ...] | int
    trace: bool
    seed: int

    @property
    def model(self) -> fpipe.Model:
        return fpipe.from_functions(
            [BODIES[body] for body in self.bodies], LOSSES[self.reduction], reduction=self.reduction
        )

    @property
    def program(self) -> Program:
        scheduled = (
            fpipe.schedules.seq1f1b(self.table, slices=self.slices)
            if isinstance(self.table, int)
            else fpipe.schedules.from_table(self.table)
        )
        steps = {**STEPS, "schedule": lambda: scheduled}
        split = fpipe.split(self.microbatches, slices=self.slices)
        return fpipe.chain(split, *(steps[name]() for name in self.chain))(fpipe.program(self.model))

    def given(self, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        make = torch.Generator().manual_seed(self.seed)
        draw = lambda *shape: torch.randn(shape, generator=make, dtype=dtype) * 0.5  # noqa: E731
        params = tuple({"w": draw(4, 4), "b": draw(4)} for _ in self.bodies)
        return params, (draw(self.rows, self.length, 4), draw(self.rows, self.length, 4))


STEPS: dict[str, Callable[[], Callable[[Program], Program]]] = {
    "checkpoint()": lambda: fpipe.checkpoint(),
    "checkpoint('except_last')": lambda: fpipe.checkpoint("except_last"),
    "checkpoint(grain='layer')": lambda: fpipe.checkpoint(grain="layer"),
    "split_backward()": lambda: fpipe.split_backward(),
    "merge()": lambda: fpipe.merge(),
    "offload()": lambda: fpipe.offload(),
    "offload(lead=2)": lambda: fpipe.offload("worthwhile", lead=2),
    "communicate()": lambda: fpipe.communicate(),
    "free()": lambda: fpipe.free(),
}


@st.composite
def sliced(draw: st.DrawFn) -> Sliced:
    bodies = tuple(draw(st.lists(st.sampled_from(list(BODIES)), min_size=1, max_size=3)))
    m, q = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows, length = m + draw(st.integers(0, 2)), q + draw(st.integers(0, 3))
    halves = ("split_backward()",)
    base = fpipe.chain(fpipe.split(m, slices=q), fpipe.split_backward())(fpipe.program(len(bodies)))
    table = draw(st.one_of(st.integers(1, len(bodies)), legal_tables(base)))
    middle = draw(st.lists(st.sampled_from(["checkpoint()", "checkpoint('except_last')", *halves]), max_size=2))
    if not isinstance(table, int):
        middle = [*halves, *middle]
    chain = draw(st.permutations(["schedule", *middle]))
    if not isinstance(table, int):
        chain = [*halves, *chain]
    away = draw(st.sampled_from([(), ("offload()",), ("offload(lead=2)",)]))
    last = draw(st.sampled_from([(), ("communicate()",), ("free()",), ("communicate()", "free()")]))
    reduction = draw(st.sampled_from(["mean", "sum", "count"]))
    steps = (*chain, *away, "merge()", *last)
    traced = draw(st.sampled_from([False, False, True]))  # a trace for each slice of each body takes its time
    return Sliced(bodies, reduction, rows, length, m, q, steps, table, traced, draw(st.integers(0, 2**16)))


@few(10)
@given(sliced())
def test_slices_have_the_gradients_of_a_sliced_reference(run: Sliced):
    params, batch = run.given()
    assert Program.parse(str(run.program)) == run.program
    found = fpipe.build(run.program, run.model, trace=run.trace)(params, batch)
    expected = fpipe.reference(run.model, params, batch, microbatches=run.microbatches, slices=run.slices)
    pairs = zip(*(leaves((r.loss, r.grads, r.outputs)) for r in (found, expected)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@few(10)
@given(sliced())
def test_slices_are_the_undivided_sequence_to_rounding(run: Sliced):
    params, batch = run.given(torch.float64)
    found = fpipe.build(run.program, run.model, trace=run.trace)(params, batch)
    whole = fpipe.reference(run.model, params, batch)
    for one, other in zip(*(leaves((r.loss, r.grads, r.outputs)) for r in (found, whole)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@few(10)
@given(
    plans(),
    st.sampled_from(["always", "worthwhile"]),
    st.one_of(st.none(), st.sampled_from([1, 2, 3])),
    st.integers(0, 3),
    st.booleans(),
)
def test_offloading_changes_no_bits(plan: DrawnProgram, policy: Any, cap: int | None, lead: int, partner: bool):
    """Nor the order of the ops that a schedule names."""
    net, base = tiny(plan.takes), plan.program
    to = (lambda rank: (rank + 1) % base.ranks) if partner and base.ranks > 1 else "host"
    program = fpipe.offload(policy, cap=cap and least(base, cap, policy, lead), lead=lead, to=to)(base)
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))
    assert program.table() == base.table()
    one, other = (fpipe.build(made, net.model)(net.params(), net.batch(7)) for made in (base, program))
    assert all(torch.equal(*pair) for pair in zip(leaves(one.grads), leaves(other.grads), strict=True))


@given(plans(), st.sampled_from([1, 2, 3]))
def test_a_cap_is_kept(plan: DrawnProgram, cap: int):
    """Copies take no time here; what is recomputed is beside the point."""
    base = DrawnProgram(plan.takes, plan.microbatches, frozenset(), plan.halved, plan.table).program
    kept = least(base, cap)
    assert max(fpipe.simulate(fpipe.offload(cap=kept)(base)).peak) <= kept


def least(base: Program, cap: float, policy: Any = "always", lead: int = 0) -> float:
    """The cap, or what the error says is the least."""
    try:
        fpipe.offload(policy, cap=cap, lead=lead)(base)
    except fpipe.ProgramError as error:
        return float(str(error).split()[-2])
    return cap
