"""Run a stage that cannot be traced: once on zeros, to know what it will write, and in each step under autograd.

    1F0: y[0,0] float32[8, 512]        --> F on zeros -->        y[1,0] float32[8, 512]   loss[1,0] float32[]

So each rank knows what others will send it. Shapes may not depend on data, so any data do. Which leaves get a gradient
may depend on data, as in an expert that no row is sent to; so each leaf that wants a gradient gets one, zeros if need
be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, Fact, aval, in_own_storage
from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.meaning.by_autograd import StepContext, forward
from fpipe.meaning.meaning import RULES
from fpipe.meaning.purity.ambient import Casts, Untraceable, casting
from fpipe.meaning.purity.attributes import Attributes, modules_of
from fpipe.meaning.purity.own_memory import is_strided, layout_of, span
from fpipe.model import Model, Stage
from fpipe.positional_stage import of_net
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.lowered import OPAQUE, AbstractTree, Leaves, aval_of, dense, wanting_fact, whole
from fpipe.runtimes.lowering.stage_calls import WHOLE_BLOCKS, by_sizes, is_sized

KEPT = ("res", "wres")
"""Values that autograd keeps for a later op of their stage."""
Results = Mapping[tuple[str, int], AbstractTree]


class DryRuns:
    """Runs of a program's stages on zeros, one for all microbatches that are alike."""

    def __init__(self, context: StepContext) -> None:
        alone = replace(context.model, stages=tuple(map(_alone, context.model.stages)))
        self._context = replace(context, model=alone, key=context.key or 0, watch_saved=False)
        self._sizes: dict[Value, Tensor] = {}
        self._forwards: dict[Any, tuple[Op, Sequence[AbstractTree]]] = {}
        self._gradients: dict[Any, Results] = {}
        self._results: dict[Any, Results] = {}

    def written(self, op: Op, trees: Mapping[Value, AbstractTree]) -> list[AbstractTree]:
        """Return the abstract values that an op writes, each in its own memory.

        Raises Untraceable if the stage does not run on zeros.
        """
        place, reads = op[1:4], [trees[value] for value in op.reads]
        if op.kind in "FR":
            self._forwards.setdefault(place, (op, reads))
        results: Results = {}
        if op.kind in "BI":
            results = self._gradients[place] = self._once(op, reads)
        elif op.kind == "F":
            results = self._once(op, reads)
        elif op.kind == "W":
            results = self._gradients[place]
        abstracts = [OPAQUE if v.name in KEPT else _in_own_storages(results[v.name, v.port]) for v in op.writes]
        if op.kind == "F" and is_sized(self._context.model, op.stage):
            self._note_sizes([pair for pair in zip(op.writes, abstracts, strict=True) if pair[0].name == "y"])
        return abstracts

    def _note_sizes(self, outputs: Sequence[tuple[Value, AbstractTree]]) -> None:
        """Let all rows that an exchange brings be from the first process, so that its sizes add up to them."""
        rows, sizes = outputs[0][1].leaves[0], outputs[-1][1].leaves[-1]
        tensor = self._sizes[outputs[-1][0]] = zeros(sizes.aval)
        tensor.view(-1)[0] = rows.aval.shape[0]

    def _zeros(self, value: Value, abstract: AbstractTree) -> Any:
        leaves = [zeros(leaf.aval) if isinstance(leaf, Fact) else leaf for leaf in abstract.leaves]
        if value in self._sizes:
            leaves[-1] = self._sizes[value].clone()
        return whole(abstract, leaves)

    def _once(self, op: Op, reads: Sequence[AbstractTree]) -> Results:
        first, first_reads = self._forwards[op[1:4]]
        model = self._context.model
        names = [(o.kind, [(v.name, v.stage, v.port) for v in (*o.reads, *o.writes)]) for o in (op, first)]
        avals = [(abstract.spec, *map(aval_of, abstract.leaves)) for abstract in (*reads, *first_reads)]
        asks = model.stages[op.stage or 0].asks
        number = op.microbatch if "microbatch" in asks else self._context.turn(op) if "turn" in asks else None
        sizes = [self._sizes[value] for value in first.reads if value in self._sizes]
        key = op.stage, number, op.slice, repr((names, avals, sizes))
        if key not in self._results:
            function, who = model.stages[op.stage or 0].forward, model.who(op.stage or 0)
            attributes = Attributes(modules_of(of_net(function) or function), contents=True)
            try:
                args = [*map(self._zeros, first.reads, first_reads)]
                self._results[key] = self._run(op, reads, first._replace(how=()), args)
            except Exception as error:
                why = f"a run on zeros, to know what it writes, ended in {type(error).__name__}: {error}"
                raise Untraceable(why).of(op.stage or 0, who) from error
            finally:
                attributes.restore()
        return self._results[key]

    def _run(self, op: Op, reads: Sequence[AbstractTree], first: Op, args: Sequence[Any]) -> Results:
        """Return the abstract values that an op writes, by name and port; of a backward also those of its W."""
        if op.kind == "F":
            writes = [value for value in op.writes if value.name not in KEPT]
            results = forward(first._replace(writes=tuple(writes)), args, self._context)
            flows = [value.name in ("y", "again", "carry") for value in writes]
            return {(v.name, v.port): _abstract(*pair) for v, *pair in zip(writes, results, flows, strict=True)}
        (residuals,) = forward(first._replace(writes=(Value("res", *op[1:4]),)), args, self._context)
        pairs = zip(op.reads, reads, strict=True)
        args = [residuals if value.name in KEPT else self._zeros(value, abstract) for value, abstract in pairs]
        leaves = {("dx", port): inputs for port, inputs in enumerate(residuals.inputs)}
        leaves |= {("dcarry", 0): residuals.carry}
        leaves |= {("g", port): params for port, params in enumerate(residuals.params)}
        writes = tuple(Value(name, *op[1:4], port) for name, port in leaves)
        gradients = RULES["B"](op._replace(kind="B", writes=writes), args, self._context)
        return {
            name: AbstractTree(tuple(map(_gradient, leaves[name], grads)))
            for name, grads in zip(leaves, gradients, strict=True)
        }


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


def _abstract(value: Any, flows: bool) -> AbstractTree:
    """The abstract value; what flows to other stages may want a gradient for other data than zeros."""
    leaves, spec = tree.flatten(value)
    facts = map(_fact, leaves)
    return AbstractTree(tuple(map(wanting_fact, facts) if flows else facts), spec)


def _fact(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not is_strided(leaf):
        raise TypeError(f"it writes a {layout_of(leaf)}")
    return in_own_storage(aval(leaf)) if isinstance(leaf, Tensor) else leaf


def _gradient(leaf: Any, grad: Tensor | None) -> Any:
    """The fact of a leaf's gradient, laid out as the leaf where zeros lead to none."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    return _fact(torch.empty_like(leaf.detach()) if grad is None else grad)


def _in_own_storages(abstract: AbstractTree) -> AbstractTree:
    leaves = (in_own_storage(leaf.aval) if isinstance(leaf, Fact) else leaf for leaf in abstract.leaves)
    return abstract._replace(leaves=tuple(leaves))


class UnexpectedValue(ValueError):
    """A stage under autograd wrote tensors of other shapes or dtypes than for zeros."""


def under_autograd(
    op: Op,
    reads: Sequence[AbstractTree],
    writes: Sequence[AbstractTree],
    free: Collection[Value],
    context: StepContext,
    casts: Casts,
    *lists: Any,
) -> Sequence[Leaves]:
    """Run an op of a stage that is not traced; nobody relies on the shapes of the values that are `free`."""
    if op.kind in "FRBI":
        lists, context = lists[:-1], replace(context, key=lists[-1])
    if op.kind == "F" and is_sized(context.model, op.stage):
        _check_as_agreed(op, reads, lists, context.model)
    args = [
        whole(abstract, [*map(_wanting, abstract.leaves, leaves)])
        for abstract, leaves in zip(reads, lists, strict=True)
    ]
    with casting(casts) if casts else nullcontext():
        results = RULES[op.kind](op, args, context)
    for leaves in lists:
        leaves.clear()
    return [
        [result] if abstract is OPAQUE else _conformed(op, value, abstract, result, value in free, context.model)
        for value, abstract, result in zip(op.writes, writes, results, strict=True)
    ]


def _check_as_agreed(op: Op, reads: Sequence[AbstractTree], lists: Sequence[Leaves], model: Model) -> None:
    """Raise UnexpectedValue if an exchange is handed other rows than processes agreed on; their number may change."""
    exchange: Any = model.stages[op.stage or 0].forward
    if exchange.size < 2:
        return
    flowing = [at for at, value in enumerate(op.reads) if value.name != "params"]
    *agreed, sizes = (aval_of(leaf).shape for at in flowing for leaf in reads[at].leaves)
    *rows, length = (tuple(getattr(leaf, "shape", ())) for at in flowing for leaf in lists[at])
    if [shape[1:] for shape in rows] != [shape[1:] for shape in agreed] or length != sizes:
        found, expected = (
            f"{' and '.join(f'rows of {[*shape[1:]]}' for shape in shapes)} with sizes {[*last]}"
            for shapes, last in ((rows, length), (agreed, sizes))
        )
        raise UnexpectedValue(
            f"{model.who(op.stage or 0)} is handed {found} in {op.cell}, and the processes along its axis agreed on "
            f"{expected}, as a run on zeros has them; only how many rows there are may change."
        )


def _wanting(known: Any, leaf: Any) -> Any:
    """A leaf that asks for its gradient, as what it was computed from does."""
    return leaf.detach().requires_grad_() if isinstance(known, Fact) and known.aval.wants else leaf


def _conformed(op: Op, value: Value, expected: AbstractTree, result: Any, free: bool, model: Model) -> Leaves:
    """The leaves of a value in the strides that others know, zeros for no gradient; where `free`, of any shape."""
    leaves, spec = ([*result], None) if expected.spec is None else tree.flatten(result)
    pairs = zip(expected.leaves, leaves, strict=True)
    if spec == expected.spec and all(_is_as_known(known, leaf, free) for known, leaf in pairs):
        return leaves if free else [*map(_laid_out, expected.leaves, leaves)]
    now, before = (", ".join(map(_shown, each)) or "nothing" for each in (leaves, expected.leaves))
    who = model.who(op.stage or 0)
    if op.stage in by_sizes(model):
        raise UnexpectedValue(
            f"{who} reads as many rows as the data say, and {op.cell} wrote {value} as {now}, and for zeros as "
            f"{before}; what goes to another rank, to a stage with a trace or is a result has one shape. {WHOLE_BLOCKS}"
        )
    raise UnexpectedValue(
        f"{who} runs without a trace, and {op.cell} wrote {value} as {now}, and for zeros as {before}; what it hands "
        "on has one structure and shape, whatever the data: fill it up to a fixed size, with a mask beside, or place "
        "the stages that read it on this rank and let them run without a trace, too."
    )


def _is_as_known(known: Any, leaf: Any, free: bool) -> bool:
    if not isinstance(known, Fact):
        return (type(known), repr(known)) == (type(leaf), repr(leaf))
    if not isinstance(leaf, Tensor) or not is_strided(leaf):
        return leaf is None and not known.aval.wants
    now = aval(leaf)
    now = now._replace(shape=known.aval.shape, stride=known.aval.stride) if free else now
    alike = now._replace(stride=known.aval.stride, wants=known.aval.wants) == known.aval
    return alike and (known.aval.wants or not now.wants) and (now.stride == known.aval.stride or dense(known))


def _laid_out(known: Any, leaf: Any) -> Any:
    if not isinstance(known, Fact) or (leaf is not None and leaf.stride() == known.aval.stride):
        return leaf
    tensor = zeros(known.aval._replace(wants=False))
    return tensor if leaf is None else tensor.copy_(leaf.detach())


def _shown(leaf: Any) -> str:
    known = aval(leaf) if isinstance(leaf, Tensor) else leaf.aval if isinstance(leaf, Fact) else None
    if known is None:
        return repr(leaf)
    return f"{known} with strides {[*known.stride]} on {known.device}{', which wants a gradient' * known.wants}"
