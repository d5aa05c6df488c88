"""Find out what a stage that cannot be traced writes: run it once on zeros.

    1F0: y[0,0] float32[8, 512]        --> F on zeros -->        y[1,0] float32[8, 512]   loss[1,0] float32[]

So each rank knows what others will send it. Shapes may not depend on data, so any data do; which leaves get a gradient
may, as those of an expert that no row is sent to. So each leaf that wants one is told to get one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, Fact, aval, in_own_storage
from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.meaning.by_autograd import StepContext, forward
from fpipe.meaning.meaning import RULES
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import Attributes, modules_of
from fpipe.meaning.purity.own_memory import is_strided, layout_of, span
from fpipe.model import Stage
from fpipe.positional_stage import of_net
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import OPAQUE, AbstractTree, aval_of, wanting_fact, whole
from fpipe.runtimes.lowering.stage_calls import is_sized

KEPT = ("res", "wres")
"""Values that autograd keeps for a later op of their stage."""
Known = Mapping[tuple[str, int], AbstractTree]


class DryRuns:
    """Runs of a program's stages on zeros, one for all microbatches that are alike."""

    def __init__(self, context: StepContext) -> None:
        alone = replace(context.model, stages=tuple(map(_alone, context.model.stages)))
        self._context = replace(context, model=alone, key=context.key or 0, watch_saved=False)
        self._sizes: dict[Value, Tensor] = {}
        self._forwards: dict[Any, tuple[Op, Sequence[AbstractTree]]] = {}
        self._gradients: dict[Any, Known] = {}
        self._known: dict[Any, Known] = {}

    def written(self, op: Op, trees: Mapping[Value, AbstractTree]) -> list[AbstractTree]:
        """Abstract values of what an op writes, each in its own memory; Untraceable if none come of zeros."""
        place, reads = op[1:4], [trees[value] for value in op.reads]
        if op.kind in "FR":
            self._forwards.setdefault(place, (op, reads))
        found: Known = {}
        if op.kind in "BI":
            found = self._gradients[place] = self._once(op, reads)
        elif op.kind == "F":
            found = self._once(op, reads)
        elif op.kind == "W":
            found = self._gradients[place]
        made = [OPAQUE if v.name in KEPT else _apart(found[v.name, v.port]) for v in op.writes]
        if op.kind == "F" and is_sized(self._context.model, op.stage):
            self._note_sizes([pair for pair in zip(op.writes, made, strict=True) if pair[0].name == "y"])
        return made

    def _note_sizes(self, brought: Sequence[tuple[Value, AbstractTree]]) -> None:
        """Let all rows that an exchange brings be from the first process, so that sizes of them add up to them."""
        rows, sizes = brought[0][1].leaves[0], brought[-1][1].leaves[-1]
        made = self._sizes[brought[-1][0]] = zeros(sizes.aval)
        made.view(-1)[0] = rows.aval.shape[0]

    def _zeros(self, value: Value, known: AbstractTree) -> Any:
        leaves = [zeros(leaf.aval) if isinstance(leaf, Fact) else leaf for leaf in known.leaves]
        if value in self._sizes:
            leaves[-1] = self._sizes[value].clone()
        return whole(known, leaves)

    def _once(self, op: Op, reads: Sequence[AbstractTree]) -> Known:
        first, given = self._forwards[op[1:4]]
        model = self._context.model
        names = [(one.kind, [(v.name, v.stage, v.port) for v in (*one.reads, *one.writes)]) for one in (op, first)]
        looks = [(known.spec, *map(aval_of, known.leaves)) for known in (*reads, *given)]
        asks = model.stages[op.stage or 0].asks
        number = op.microbatch if "microbatch" in asks else self._context.turn(op) if "turn" in asks else None
        sizes = [self._sizes[value] for value in first.reads if value in self._sizes]
        key = op.stage, number, op.slice, repr((names, looks, sizes))
        if key not in self._known:
            function, who = model.stages[op.stage or 0].forward, model.who(op.stage or 0)
            attributes = Attributes(modules_of(of_net(function) or function), contents=True)
            try:
                args = [*map(self._zeros, first.reads, given)]
                self._known[key] = self._run(op, reads, first._replace(how=()), args)
            except Exception as error:
                why = f"a run on zeros, to know what it writes, ended in {type(error).__name__}: {error}"
                raise Untraceable(why).of(op.stage or 0, who) from error
            finally:
                attributes.restore()
        return self._known[key]

    def _run(self, op: Op, reads: Sequence[AbstractTree], first: Op, given: Sequence[Any]) -> Known:
        """Abstract values of what an op writes, by name and port; of a backward also of what its W writes."""
        if op.kind == "F":
            writes = [value for value in op.writes if value.name not in KEPT]
            made = forward(first._replace(writes=tuple(writes)), given, self._context)
            flows = [value.name in ("y", "again", "carry") for value in writes]
            return {(v.name, v.port): _known(*each) for v, *each in zip(writes, made, flows, strict=True)}
        (kept,) = forward(first._replace(writes=(Value("res", *op[1:4]),)), given, self._context)
        pairs = zip(op.reads, reads, strict=True)
        args = [kept if value.name in KEPT else self._zeros(value, known) for value, known in pairs]
        leaves = {("dx", port): found for port, found in enumerate(kept.inputs)} | {("dcarry", 0): kept.carry}
        leaves |= {("g", port): found for port, found in enumerate(kept.params)}
        writes = tuple(Value(name, *op[1:4], port) for name, port in leaves)
        made = RULES["B"](op._replace(kind="B", writes=writes), args, self._context)
        pairs = zip(leaves.items(), made, strict=True)
        return {at: AbstractTree(tuple(map(_gradient, own, grads))) for (at, own), grads in pairs}


def _alone(stage: Stage) -> Stage:
    """A stage as it is where it has nobody to exchange rows with whose sizes are data."""
    function: Any = stage.forward
    sized = isinstance(function, Exchanged) and function.sizes
    return replace(stage, forward=function.over("", 0, 0)) if sized else stage


def zeros(known: Aval) -> Tensor:
    """Zeros of a shape, dtype and strides."""
    if known.sharding is not None:
        raise TypeError("it reads a DTensor, of which other processes have parts")
    memory = torch.zeros(span(known.shape, known.stride), dtype=known.dtype, device=known.device)
    return memory.as_strided(known.shape, known.stride).requires_grad_(known.wants)


def _known(made: Any, flows: bool) -> AbstractTree:
    """The abstract value; what flows to other stages may want a gradient for other data than zeros."""
    leaves, spec = tree.flatten(made)
    facts = map(_fact, leaves)
    return AbstractTree(tuple(map(wanting_fact, facts) if flows else facts), spec)


def _fact(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not is_strided(leaf):
        raise TypeError(f"it writes a {layout_of(leaf)}")
    return in_own_storage(aval(leaf)) if isinstance(leaf, Tensor) else leaf


def _gradient(leaf: Any, grad: Tensor | None) -> Any:
    """The fact of a leaf's gradient; one that zeros have not is laid out as the leaf."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    return _fact(torch.empty_like(leaf.detach()) if grad is None else grad)


def _apart(known: AbstractTree) -> AbstractTree:
    own = (in_own_storage(one.aval) if isinstance(one, Fact) else one for one in known.leaves)
    return known._replace(leaves=tuple(own))
