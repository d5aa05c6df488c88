"""Everything at once: whatever a model is made of, however its batch is cut, whatever the chain of transforms and the
schedule, a step is plain autograd, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from fpipe import tree
from fpipe.program import Program
from fpipe.schedules.registry import about
from property_tests.bits import bits
from property_tests.chains import Chain, chains
from property_tests.strategies import few
from property_tests.whole_models import (
    DOORS,
    NORMS,
    ONE_SHAPE,
    WRITE,
    Cut,
    Front,
    Whole,
    cuts,
    of_layer,
    plain_step,
    wholes,
)

IN_ORDER = ("gpipe", "one_f_one_b", "zb_h1")


@dataclass(frozen=True)
class Run:
    """A model, how its batch is cut, and the chain of transforms that makes the program."""

    whole: Whole
    cut: Cut
    chain: Chain
    stream: bool
    input_grads: bool
    trace: bool
    seed: int

    def program(self, model: fpipe.Model) -> Program:
        aux = {"rows": fpipe.Sum(), "size": None}
        merge = fpipe.merge(outputs="stream", aux="stream") if self.stream else fpipe.merge(aux=aux)
        return self.chain(self.cut.split(fpipe.program(model, input_grads=self.input_grads)), merge)

    @property
    def made(self) -> tuple[fpipe.Model, Any, Any]:
        """Model, parameters and state."""
        return self.whole.made(self.cut.parts(self.batch)[0])

    @property
    def batch(self) -> Any:
        return self.cut.batch(self.seed, getattr(torch, self.whole.dtype))

    @property
    def key(self) -> int | None:
        return self.seed if self.whole.draws else None

    def joined(self, parts: list[Any]) -> Any:
        """Outputs of each microbatch and slice as a step gives them."""
        if self.cut.slices > 1:
            parts = [along(parts[at : at + self.cut.slices], 1) for at in range(0, len(parts), self.cut.slices)]
        return parts if self.stream else along(parts, 0)


def along(parts: list[Any], dim: int) -> Any:
    """Tensors put together; other leaves are the same in all."""
    return tree.tree_map(
        lambda first, *more: torch.cat([first, *more], dim) if isinstance(first, Tensor) else first, *parts
    )


def several(names: Iterable[str]) -> bool:
    return max(Counter(names).values(), default=0) > 1


FEATURES: dict[str, Callable[[Run], bool]] = {
    "modules": lambda run: run.whole.front == "modules",
    "functions": lambda run: run.whole.front == "functions",
    "one loss function": lambda run: run.whole.front == "loss",
    "skip": lambda run: bool(run.whole.skips),
    "one value, several readers": lambda run: several(skip.name for skip in run.whole.skips),
    "the batch read later": lambda run: any(skip.out == -1 for skip in run.whole.skips),
    "several outputs": lambda run: any(skip.inside for skip in run.whole.skips),
    "a dict with integers and None": lambda run: "many" in run.whole.kinds,
    "tied": lambda run: run.whole.layers.count("tied") > 1,
    "used again": lambda run: "twice" in run.whole.kinds or run.whole.layers.count("reused") > 1,
    "batch norm": lambda run: run.whole.training and not run.whole.kinds.isdisjoint(NORMS),
    "buffers of its own": lambda run: run.whole.training and not run.whole.kinds.isdisjoint(WRITE - NORMS),
    "dropout": lambda run: run.whole.draws,
    "frozen": lambda run: bool(run.whole.still),
    "loss of a middle stage": lambda run: bool(run.whole.losses),
    "asks for its microbatch": lambda run: bool(run.whole.numbered),
    "eval": lambda run: not run.whole.training,
    "count": lambda run: run.whole.reduction == "count",
    "ragged rows": lambda run: len({*run.cut.rows}) > 1,
    "ragged lengths": lambda run: len({*run.cut.lengths[: run.cut.microbatches]}) > 1,
    "cut already": lambda run: run.cut.how == "presplit",
    "whole and Chunk(1) leaves": lambda run: run.cut.spec,
    "slices": lambda run: run.cut.slices > 1,
    "gradients of inputs": lambda run: run.input_grads,
    "recompute": lambda run: any("checkpoint" in name for name in run.chain.steps),
    "I and W": lambda run: any("split_backward" in name for name in run.chain.steps),
    "offload": lambda run: any("offload" in name for name in run.chain.steps),
    "several ranks": lambda run: run.chain.ranks > 1,
    "an order of its own": lambda run: not run.chain.named,
    "a published schedule": lambda run: run.chain.named and run.chain.schedule[0] not in IN_ORDER,
    "traced": lambda run: run.trace,
}


@st.composite
def runs(draw: st.DrawFn, undivided: bool = False, front: Front | None = None) -> Run:
    whole, cut = draw(wholes(undivided, front)), draw(cuts(undivided))
    if whole.front in ONE_SHAPE:
        cut = replace(cut, lengths=cut.lengths[:1], slices=1, spec=False)
    n, m = len(whole.stages), cut.microbatches
    ranks = draw(st.integers(1, n))
    served = [
        name
        for name in (("seq1f1b",) if cut.slices > 1 else IN_ORDER if whole.in_order else fpipe.schedules.names())
        if about(name).refuses(ranks, n, m) is None
        and (name != "seq1f1b" or cut.slices > 1)
        and (name != "hanayo" or n == 2 * ranks)
    ]
    named = st.sampled_from(served).map(lambda name: (name, ranks))
    base = fpipe.split(m, slices=cut.slices)(fpipe.program(n, inputs=[whole.sources(stage) for stage in range(n)]))
    return Run(
        whole,
        cut,
        draw(chains(base, named, tables=not whole.in_order, away=True)),
        cut.how == "presplit" or draw(st.sampled_from([False, False, True])),
        draw(st.booleans()),
        draw(st.sampled_from([True, True, False])) and not (whole.in_order and "mean norm" in whole.kinds),
        draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("door", DOORS)
@few(4)
@given(st.data())
def test_every_door_gives_the_nets_own_gradient(door: str, data: st.DataObject):
    """The bits of plain autograd over the layers, whatever the model, the batch, the chain and the schedule."""
    run = data.draw(runs(front=DOORS[door]))
    for name, found in FEATURES.items():
        if found(run):
            event(name)
    batch, cut = run.batch, run.cut
    model, params, state = run.made
    program = run.program(model)
    assert Program.parse(str(program)) == program
    found = fpipe.build(program, model, trace=run.trace)(params, batch, state=state, key=run.key)
    right = plain_step(run.whole, cut, batch, run.key)
    assert bits(found.loss) == bits(right.loss)
    for name, grad in run.whole.named(model, found.grads).items():
        assert bits(grad) == bits(right.grads[name]), name
    if run.input_grads:
        assert bits(found.input_grads) == bits(right.input_grads)
    if run.whole.front == "loss":  # outputs are what the loss reads
        return
    assert bits(found.outputs) == bits(run.joined(right.outputs))
    remembered = {of_layer(name): buffer for stage in found.state or () for name, buffer in stage.items()}
    assert {name: bits(buffer) for name, buffer in remembered.items()} == {
        name: bits(buffer) for name, buffer in right.state.items() if run.whole.remembers
    }
    rows = [aux["rows"] for aux in right.aux]
    assert bits(found.aux) == bits(right.aux) if run.stream else found.aux["rows"] == sum(rows)


@few(4)
@given(runs().filter(lambda run: run.trace))
def test_every_step_is_the_reference_on_threads_too(run: Run):
    model, params, state = run.made
    program = run.program(model)
    assert fpipe.verify(program, model, params, run.batch, state=state, key=run.key).bitwise
    one, other = (
        fpipe.build(program, model, runtime=runtime)(params, run.batch, state=state, key=run.key)
        for runtime in ("local", "threads")
    )
    for name in ("loss", "grads", "outputs", "state", "input_grads", "aux"):
        assert bits(getattr(one, name)) == bits(getattr(other, name)), name


@few(4)
@given(runs(), st.booleans())
def test_evaluation_is_the_training_forward(run: Run, sent: bool):
    model, params, state = run.made
    trains = replace(run, chain=run.chain.without("communicate()").without("free()")).program(model)
    steps = (fpipe.forward_only(), *((fpipe.communicate(), fpipe.free()) if sent else ()))
    program = fpipe.chain(*steps)(trains)
    assert not {op.kind for op in program.ops} & {"B", "I", "W", "R", "OFFLOAD", "LOAD"}
    assert {value.name for op in program.ops for value in op.writes}.isdisjoint({"res", "wres", "g", "dx"})
    one, other = (
        fpipe.build(made, model, trace=run.trace)(params, run.batch, state=state, key=run.key)
        for made in (trains, program)
    )
    assert other.grads is other.input_grads is None
    for name in ("loss", "outputs", "aux"):
        assert bits(getattr(one, name)) == bits(getattr(other, name)), name


@few(5)
@given(runs(undivided=True))
def test_every_step_is_close_to_the_undivided_batch(run: Run):
    model, params, _ = run.made
    found = fpipe.build(run.program(model), model, trace=run.trace)(params, run.batch)
    whole = plain_step(run.whole, Cut((sum(run.cut.rows),), spec=run.cut.spec), run.batch)
    torch.testing.assert_close(found.loss, whole.loss, rtol=1e-10, atol=1e-12)
    for name, grad in run.whole.named(model, found.grads).items():
        torch.testing.assert_close(grad, whole.grads[name], rtol=1e-10, atol=1e-12)


APART = {
    ("a published schedule", "an order of its own"),
    ("asks for its microbatch", "modules"),
    ("batch norm", "eval"),
    ("buffers of its own", "eval"),
    ("dropout", "eval"),
    ("functions", "modules"),
    ("loss of a middle stage", "modules"),
    ("slices", "whole and Chunk(1) leaves"),
    *((name, "one loss function") for name in ("batch norm", "buffers of its own", "eval", "functions", "modules")),
    *((name, "one loss function") for name in ("asks for its microbatch", "loss of a middle stage")),
    *(("one loss function", name) for name in ("ragged lengths", "slices", "whole and Chunk(1) leaves")),
}
"""What is not drawn together: opposites, what only functions can say or one loss function cannot, and slices of what
has its rows elsewhere."""


def test_the_grammar_draws_everything_together():
    """Each feature in a tenth of what is drawn or more, and 95 % of all pairs that can meet in 200 draws."""
    drawn: list[frozenset[str]] = []

    @settings(max_examples=200, phases=[Phase.generate], derandomize=True, database=None)
    @given(runs())
    def draw(run: Run) -> None:
        drawn.append(frozenset(name for name, found in FEATURES.items() if found(run)))

    draw()
    counts = Counter(name for features in drawn for name in features)
    assert not [name for name in FEATURES if counts[name] * 10 < len(drawn)]
    pairs = {*combinations(sorted(FEATURES), 2)} - APART
    met = {pair for features in drawn for pair in combinations(sorted(features), 2)}
    assert not met & APART
    assert len(pairs & met) > 0.95 * len(pairs), pairs - met
