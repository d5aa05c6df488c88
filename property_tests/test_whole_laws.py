"""Laws of whole steps: whatever the model, its batch, the transforms and the schedule, a step is plain autograd."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import Phase, event, given, reject, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from fpipe import tree
from fpipe.program import Program
from fpipe.schedules.registry import about
from fpipe.wording import StateOrderError
from property_tests.bits import bits
from property_tests.chains import Chain, chains
from property_tests.strategies import max_examples
from property_tests.whole_models import (
    DOORS,
    NORMS,
    ONE_SHAPE,
    WRITE,
    Cut,
    Front,
    ModelRecipe,
    cuts,
    model_recipes,
    of_layer,
    plain_step,
)

IN_ORDER = ("gpipe", "one_f_one_b", "zb_h1")


@dataclass(frozen=True)
class Run:
    """A recipe of a step: a model, the cut of its batch, and the chain of transforms of its program."""

    recipe: ModelRecipe
    cut: Cut
    chain: Chain
    stream: bool
    input_grads: bool
    trace: bool
    seed: int

    def program(self, model: fpipe.Model) -> Program:
        aux = {"rows": fpipe.Sum(), "size": None}
        merge = fpipe.merge(outputs="stream", aux="stream") if self.stream else fpipe.merge(aux=aux)
        try:
            return self.chain(self.cut.split(fpipe.program(model, input_grads=self.input_grads)), merge)
        except StateOrderError:
            if not self.recipe.remembers:
                raise
            reject()  # an order that a stage with state cannot run in

    @property
    def built(self) -> tuple[fpipe.Model, Any, Any]:
        return self.recipe.build(self.cut.parts(self.batch)[0])

    @property
    def batch(self) -> Any:
        return self.cut.batch(self.seed, getattr(torch, self.recipe.dtype))

    @property
    def key(self) -> int | None:
        return self.seed if self.recipe.draws else None

    def joined(self, parts: list[Any]) -> Any:
        """Join the outputs of microbatches and slices as a step returns them."""
        if self.cut.slices > 1:
            slices = self.cut.slices
            parts = [concatenate(parts[start : start + slices], 1) for start in range(0, len(parts), slices)]
        return parts if self.stream else concatenate(parts, 0)


def concatenate(parts: list[Any], dim: int) -> Any:
    """Concatenate tensors; other leaves are equal in all parts."""
    return tree.tree_map(
        lambda leaf, *leaves: torch.cat([leaf, *leaves], dim) if isinstance(leaf, Tensor) else leaf, *parts
    )


FEATURES: dict[str, Callable[[Run], bool]] = {
    "modules": lambda run: run.recipe.front == "modules",
    "functions": lambda run: run.recipe.front == "functions",
    "one loss function": lambda run: run.recipe.front == "loss",
    "skip": lambda run: bool(run.recipe.skips),
    "one value, several readers": lambda run: len({skip.name for skip in run.recipe.skips}) < len(run.recipe.skips),
    "the batch read later": lambda run: any(skip.origin == -1 for skip in run.recipe.skips),
    "several outputs": lambda run: any(skip.inside for skip in run.recipe.skips),
    "a dict with integers and None": lambda run: "many" in run.recipe.kinds,
    "tied": lambda run: run.recipe.layers.count("tied") > 1,
    "used again": lambda run: "twice" in run.recipe.kinds or run.recipe.layers.count("reused") > 1,
    "batch norm": lambda run: run.recipe.training and not run.recipe.kinds.isdisjoint(NORMS),
    "buffers of its own": lambda run: run.recipe.training and not run.recipe.kinds.isdisjoint(WRITE - NORMS),
    "dropout": lambda run: run.recipe.draws,
    "frozen": lambda run: bool(run.recipe.frozen_names),
    "loss of a middle stage": lambda run: bool(run.recipe.losses),
    "asks for its microbatch": lambda run: bool(run.recipe.numbered),
    "eval": lambda run: not run.recipe.training,
    "count": lambda run: run.recipe.reduction == "count",
    "ragged rows": lambda run: len({*run.cut.rows}) > 1,
    "ragged lengths": lambda run: len({*run.cut.lengths[: run.cut.microbatches]}) > 1,
    "cut already": lambda run: run.cut.mode == "presplit",
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
    recipe, cut = draw(model_recipes(undivided, front)), draw(cuts(undivided))
    if recipe.front in ONE_SHAPE:
        cut = replace(cut, lengths=cut.lengths[:1], slices=1, spec=False)
    n, m = len(recipe.stages), cut.microbatches
    ranks = draw(st.integers(1, n))
    served = [
        name
        for name in (("seq1f1b",) if cut.slices > 1 else IN_ORDER if recipe.in_order else fpipe.schedules.names())
        if about(name).refuses(ranks, n, m) is None
        and (name != "seq1f1b" or cut.slices > 1)
        and (name != "hanayo" or n == 2 * ranks)
    ]
    named = st.sampled_from(served).map(lambda name: (name, ranks))
    base = fpipe.split(m, slices=cut.slices)(fpipe.program(n, inputs=[recipe.sources(stage) for stage in range(n)]))
    return Run(
        recipe,
        cut,
        draw(chains(base, named, tables=not recipe.in_order, offload=True)),
        cut.mode == "presplit" or draw(st.sampled_from([False, False, True])),
        draw(st.booleans()),
        draw(st.sampled_from([True, True, False])) and not (recipe.in_order and "mean norm" in recipe.kinds),
        draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("door", DOORS)
@max_examples(2)
@given(st.data())
def test_every_front_door_gives_the_gradients_of_plain_autograd(door: str, data: st.DataObject):
    """The bits of plain autograd over the layers, whatever the model, the batch, the chain and the schedule."""
    run = data.draw(runs(front=DOORS[door]))
    for name, has_feature in FEATURES.items():
        if has_feature(run):
            event(name)
    batch, cut = run.batch, run.cut
    model, params, state = run.built
    program = run.program(model)
    assert Program.parse(str(program)) == program
    result = fpipe.build(program, model, trace=run.trace)(params, batch, state=state, key=run.key)
    expected = plain_step(run.recipe, cut, batch, run.key)
    assert bits(result.loss) == bits(expected.loss)
    for name, grad in run.recipe.grads_by_name(model, result.grads).items():
        assert bits(grad) == bits(expected.grads[name]), name
    if run.input_grads:
        assert bits(result.input_grads) == bits(expected.input_grads)
    if run.recipe.front == "loss":  # outputs are what the loss reads
        return
    assert bits(result.outputs) == bits(run.joined(expected.outputs))
    remembered = {of_layer(name): buffer for stage in result.state or () for name, buffer in stage.items()}
    assert {name: bits(buffer) for name, buffer in remembered.items()} == {
        name: bits(buffer) for name, buffer in expected.state.items() if run.recipe.remembers
    }
    rows = [aux["rows"] for aux in expected.aux]
    assert bits(result.aux) == bits(expected.aux) if run.stream else result.aux["rows"] == sum(rows)


@max_examples(2)
@given(runs().filter(lambda run: run.trace))
def test_every_step_is_the_reference_on_threads_too(run: Run):
    model, params, state = run.built
    program = run.program(model)
    assert fpipe.verify(program, model, params, run.batch, state=state, key=run.key).bitwise
    local_result, threaded_result = (
        fpipe.build(program, model, runtime=runtime)(params, run.batch, state=state, key=run.key)
        for runtime in ("local", "threads")
    )
    for name in ("loss", "grads", "outputs", "state", "input_grads", "aux"):
        assert bits(getattr(local_result, name)) == bits(getattr(threaded_result, name)), name


@max_examples(2)
@given(runs(), st.booleans())
def test_evaluation_is_the_training_forward(run: Run, is_lowered: bool):
    model, params, state = run.built
    trains = replace(run, chain=run.chain.without_step("communicate()").without_step("free()")).program(model)
    steps = (fpipe.forward_only(), *((fpipe.communicate(), fpipe.free()) if is_lowered else ()))
    program = fpipe.chain(*steps)(trains)
    assert not {op.kind for op in program.ops} & {"B", "I", "W", "R", "OFFLOAD", "LOAD"}
    assert {value.name for op in program.ops for value in op.writes}.isdisjoint({"res", "wres", "g", "dx"})
    training_result, evaluation_result = (
        fpipe.build(variant, model, trace=run.trace)(params, run.batch, state=state, key=run.key)
        for variant in (trains, program)
    )
    assert evaluation_result.grads is evaluation_result.input_grads is None
    for name in ("loss", "outputs", "aux"):
        assert bits(getattr(training_result, name)) == bits(getattr(evaluation_result, name)), name


@max_examples(2)
@given(runs(undivided=True))
def test_every_step_is_close_to_the_undivided_batch(run: Run):
    model, params, _ = run.built
    result = fpipe.build(run.program(model), model, trace=run.trace)(params, run.batch)
    expected = plain_step(run.recipe, Cut((sum(run.cut.rows),), spec=run.cut.spec), run.batch)
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-10, atol=1e-12)
    for name, grad in run.recipe.grads_by_name(model, result.grads).items():
        torch.testing.assert_close(grad, expected.grads[name], rtol=1e-10, atol=1e-12)


EXCLUSIVE = {
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
"""Pairs that cannot meet: opposites, features that one front door lacks, and slices with rows outside dim 0."""


def test_the_grammar_draws_most_pairs_of_features():
    """In 200 draws, each feature is in at least a tenth, and 95 % of all possible pairs meet."""
    drawn: list[frozenset[str]] = []

    # Hypothesis derives the seed of a derandomized test from its source, and 200 draws of most seeds miss a tenth.
    @seed(10)
    @settings(max_examples=200, phases=[Phase.generate], database=None)
    @given(runs())
    def draw(run: Run) -> None:
        drawn.append(frozenset(name for name, has_feature in FEATURES.items() if has_feature(run)))

    draw()
    counts = Counter(name for features in drawn for name in features)
    assert not [name for name in FEATURES if counts[name] * 10 < len(drawn)]
    pairs = {*combinations(sorted(FEATURES), 2)} - EXCLUSIVE
    met = {pair for features in drawn for pair in combinations(sorted(features), 2)}
    assert not met & EXCLUSIVE
    assert len(pairs & met) > 0.95 * len(pairs), pairs - met
