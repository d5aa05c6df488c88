"""Laws of slices and offloading: whatever the order and the policies, the bits are equal."""

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
from property_tests.strategies import DrawnProgram, legal_tables, max_examples, plans, tiny

Body = Literal["sums", "attention", "recurrent", "alone"]


def sums(p: dict[str, Tensor], x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute running sums, whose last row is the carry and part of the output too."""
    total = torch.cumsum(x @ p["w"], 1) if carry is None else carry + torch.cumsum(x @ p["w"], 1)
    return torch.tanh(total + p["b"]), total[:, -1:]


def attention(
    p: dict[str, Tensor], x: Tensor, *, carry: tuple[Tensor, int] | None
) -> tuple[Tensor, tuple[Tensor, int]]:
    """Attend with keys as values; the carry has the keys and the number of earlier positions, which is no tensor."""
    keys = x @ p["w"] if carry is None else torch.cat([carry[0], x @ p["w"]], 1)
    past = keys.shape[1] - x.shape[1]
    later = torch.arange(keys.shape[1]) > torch.arange(past, keys.shape[1])[:, None]
    weights = torch.softmax((x @ keys.transpose(1, 2)).masked_fill(later, float("-inf")), -1)
    return x + weights @ keys * p["b"], (keys, keys.shape[1])


def recurrent(p: dict[str, Tensor], x: Tensor, *, carry: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    h = torch.zeros_like(x[:, 0]) if carry is None else carry["h"]
    states: list[Tensor] = []
    for token in x.unbind(1):
        h = torch.tanh(token @ p["w"] + h * p["b"])
        states.append(h)
    return torch.stack(states, 1), {"h": h}


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

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
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
def sliced_runs(draw: st.DrawFn) -> Sliced:
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
    offloads = draw(st.sampled_from([(), ("offload()",), ("offload(lead=2)",)]))
    lowering = draw(st.sampled_from([(), ("communicate()",), ("free()",), ("communicate()", "free()")]))
    reduction = draw(st.sampled_from(["mean", "sum", "count"]))
    steps = (*chain, *offloads, "merge()", *lowering)
    traced = draw(st.sampled_from([False, False, True]))  # a trace for each slice of each body takes its time
    return Sliced(bodies, reduction, rows, length, m, q, steps, table, traced, draw(st.integers(0, 2**16)))


@max_examples(5)
@given(sliced_runs())
def test_slices_have_the_gradients_of_a_sliced_reference(run: Sliced):
    params, batch = run.inputs()
    assert Program.parse(str(run.program)) == run.program
    actual = fpipe.build(run.program, run.model, trace=run.trace)(params, batch)
    expected = fpipe.reference(run.model, params, batch, microbatches=run.microbatches, slices=run.slices)
    pairs = zip(*(leaves((r.loss, r.grads, r.outputs)) for r in (actual, expected)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@max_examples(5)
@given(sliced_runs())
def test_slices_are_the_undivided_sequence_to_rounding(run: Sliced):
    params, batch = run.inputs(torch.float64)
    actual = fpipe.build(run.program, run.model, trace=run.trace)(params, batch)
    undivided = fpipe.reference(run.model, params, batch)
    pairs = zip(*(leaves((r.loss, r.grads, r.outputs)) for r in (actual, undivided)), strict=True)
    for actual_leaf, expected_leaf in pairs:
        torch.testing.assert_close(actual_leaf, expected_leaf, rtol=1e-10, atol=1e-12)


@max_examples(5)
@given(
    plans(),
    st.sampled_from(["always", "worthwhile"]),
    st.one_of(st.none(), st.sampled_from([1, 2, 3])),
    st.integers(0, 3),
    st.booleans(),
)
def test_offloading_changes_no_bits(plan: DrawnProgram, policy: Any, cap: int | None, lead: int, partner: bool):
    """It keeps the order of a schedule's ops, too."""
    net, base = tiny(plan.takes), plan.program
    target = (lambda rank: (rank + 1) % base.ranks) if partner and base.ranks > 1 else "host"
    program = fpipe.offload(policy, cap=cap and smallest_cap(base, cap, policy, lead), lead=lead, destination=target)(
        base
    )
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))
    assert program.table() == base.table()
    results = (fpipe.build(variant, net.model)(net.params(), net.batch(7)) for variant in (base, program))
    assert all(torch.equal(*pair) for pair in zip(*(leaves(result.grads) for result in results), strict=True))


@given(plans(), st.sampled_from([1, 2, 3]))
def test_offloading_keeps_a_cap(plan: DrawnProgram, cap: int):
    """Copies take no time here, and nothing is recomputed."""
    base = DrawnProgram(plan.takes, plan.microbatches, frozenset(), plan.halved, plan.table).program
    feasible_cap = smallest_cap(base, cap)
    assert max(fpipe.simulate(fpipe.offload(cap=feasible_cap)(base)).peak) <= feasible_cap


def smallest_cap(base: Program, cap: float, policy: Any = "always", lead: int = 0) -> float:
    """Return the cap, or the smallest possible one, which the error names."""
    try:
        fpipe.offload(policy, cap=cap, lead=lead)(base)
    except fpipe.ProgramError as error:
        return float(str(error).split()[-2])
    return cap
