"""Run a stage that cannot be traced: once on zeros, to learn the shapes, and in each step under autograd.

    1F0: y[0,0] float32[8, 512]        --> F on zeros -->        y[1,0] float32[8, 512]   loss[1,0] float32[]

A rank must know the shapes that others will send it. They may not depend on data, so any data will do; zeros end most
loops at once, and every rank can make them, without the parameters of another. Which leaves get a gradient
may depend on data, as in an expert that no row is sent to. A parameter without one stays without one, as in autograd,
for sums, updates and results; what another rank reads has zeros there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, Fact, aval_of_tensor, fact_in_own_storage
from fpipe.graphs.tracing.collective_stage import CollectiveStage
from fpipe.meaning.by_autograd import StepContext, forward
from fpipe.meaning.meaning import RULES
from fpipe.meaning.purity.ambient import AutocastSettings, Untraceable, autocast_as
from fpipe.meaning.purity.attributes import AttributeSnapshot, modules_of
from fpipe.meaning.purity.write_guard import is_strided, layout_of, storage_span
from fpipe.model import Model, Stage
from fpipe.positional_stage import net_stage_of
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.lowered import (
    OPAQUE,
    AbstractTree,
    Leaves,
    aval_of_leaf,
    fact_wanting_grad,
    is_dense_fact,
    unflatten_value,
)
from fpipe.runtimes.lowering.stage_calls import WHOLE_BLOCKS, has_data_sizes, stages_with_data_sizes

RESIDUALS = ("res", "wres")
"""Values that autograd keeps for a later op of their stage."""
Results = Mapping[tuple[str, int], AbstractTree]


class DryRuns:
    """Runs of a program's stages on zeros, one for all microbatches with equal shapes.

    Args:
        context: the facts of the step.
        allows_sparse: whether gradients of parameters may be sparse.
        integers: the integer tensors of the batch by storage number: lengths and sizes of zeros would be no example.
            Those that a run writes join them.
    """

    def __init__(self, context: StepContext, allows_sparse: bool, integers: Mapping[int, Tensor]) -> None:
        self._allows_sparse, self._integers = allows_sparse, dict(integers)
        alone = replace(context.model, stages=tuple(map(_without_exchange, context.model.stages)))
        self._context = replace(context, model=alone, key=context.key or 0, watch_saved=False)
        self._sizes: dict[Value, Tensor] = {}
        self._forwards: dict[Any, tuple[Op, Sequence[AbstractTree]]] = {}
        self._gradients: dict[Any, Results] = {}
        self._results: dict[Any, Results] = {}

    def infer_writes(self, op: Op, trees: Mapping[Value, AbstractTree]) -> list[AbstractTree]:
        """Return the abstract values that an op writes, each in its own memory.

        Raises Untraceable if the stage does not run on zeros.
        """
        # One run of forward and backward tells the gradients of a B, or of an I and its W: the W finds them here.
        coordinates, reads = op[1:4], [trees[value] for value in op.reads]
        if op.kind in "FR":
            self._forwards.setdefault(coordinates, (op, reads))
        results: Results = {}
        if op.kind in "BI":
            results = self._gradients[coordinates] = self._cached_run(op, reads)
        elif op.kind == "F":
            results = self._cached_run(op, reads)
        elif op.kind == "W":
            results = self._gradients[coordinates]
        abstracts = [
            OPAQUE if v.name in RESIDUALS else self._in_own_storages(results[v.name, v.port]) for v in op.writes
        ]
        if op.kind == "F" and has_data_sizes(self._context.model, op.stage):
            self._note_sizes([pair for pair in zip(op.writes, abstracts, strict=True) if pair[0].name == "y"])
        return abstracts

    def _note_sizes(self, outputs: Sequence[tuple[Value, AbstractTree]]) -> None:
        """Let all rows that an exchange brings be from the first process, so that its sizes add up to them."""
        rows, sizes = outputs[0][1].leaves[0], outputs[-1][1].leaves[-1]
        tensor = self._sizes[outputs[-1][0]] = zeros(sizes.aval)
        tensor.view(-1)[0] = rows.aval.shape[0]

    def _zeros(self, value: Value, abstract: AbstractTree) -> Any:
        leaves = [self._example_of(leaf) if isinstance(leaf, Fact) else leaf for leaf in abstract.leaves]
        if value in self._sizes:
            leaves[-1] = self._sizes[value].clone()
        return unflatten_value(abstract, leaves)

    def _example_of(self, fact: Fact) -> Tensor:
        batch_leaf = self._integers.get(fact.storage)
        if batch_leaf is None or batch_leaf.dtype != fact.aval.dtype:
            return zeros(fact.aval)
        # A microbatch is a view of the batch, so its fact says where it lies.
        return batch_leaf.as_strided(fact.aval.shape, fact.aval.stride, fact.offset).clone()

    def _cached_run(self, op: Op, reads: Sequence[AbstractTree]) -> Results:
        # The key of a run: everything that its results depend on. Microbatches with equal shapes share one.
        forward_op, forward_reads = self._forwards[op[1:4]]
        model = self._context.model
        value_names = [(o.kind, [(v.name, v.stage, v.port) for v in (*o.reads, *o.writes)]) for o in (op, forward_op)]
        avals = [(abstract.spec, *map(aval_of_leaf, abstract.leaves)) for abstract in (*reads, *forward_reads)]
        keywords = model.stages[op.stage or 0].keywords
        number = op.microbatch if "microbatch" in keywords else self._context.turn(op) if "turn" in keywords else None
        sizes = [self._sizes[value] for value in forward_op.reads if value in self._sizes]
        key = op.stage, number, op.slice, repr((value_names, avals, sizes))
        if key not in self._results:
            function, stage_name = model.stages[op.stage or 0].forward, model.label_of(op.stage or 0)
            # A run on zeros must leave no trace in a module, such as a counter of calls.
            attributes = AttributeSnapshot(modules_of(net_stage_of(function) or function), with_containers=True)
            try:
                args = [*map(self._zeros, forward_op.reads, forward_reads)]
                self._results[key] = self._run(op, reads, forward_op._replace(options=()), args)
            except Exception as error:
                reason = f"a run on zeros, to know what it writes, ended in {type(error).__name__}: {error}"
                raise Untraceable(reason).for_stage(op.stage or 0, stage_name) from error
            finally:
                attributes.restore()
        return self._results[key]

    def _run(self, op: Op, reads: Sequence[AbstractTree], forward_op: Op, args: Sequence[Any]) -> Results:
        """Return the abstract values that an op (and the W of a backward) writes, by name and port."""
        if op.kind == "F":
            writes = [value for value in op.writes if value.name not in RESIDUALS]
            results = forward(forward_op._replace(writes=tuple(writes)), args, self._context)
            flows = [value.name in ("y", "again", "carry") for value in writes]
            outputs = zip(writes, results, flows, strict=True)
            return {(v.name, v.port): self._abstract_tree(*output) for v, *output in outputs}
        (residuals,) = forward(forward_op._replace(writes=(Value("res", *op[1:4]),)), args, self._context)
        pairs = zip(op.reads, reads, strict=True)
        args = [residuals if value.name in RESIDUALS else self._zeros(value, abstract) for value, abstract in pairs]
        leaves = {("dx", port): inputs for port, inputs in enumerate(residuals.inputs)}
        leaves |= {("dcarry", 0): residuals.carry}
        leaves |= {("g", port): params for port, params in enumerate(residuals.params)}
        writes = tuple(Value(name, *op[1:4], port) for name, port in leaves)
        gradients = RULES["B"](op._replace(kind="B", writes=writes), args, self._context)
        return {
            name: AbstractTree(tuple(map(partial(_gradient_fact, self._allows_sparse), leaves[name], grads)))
            for name, grads in zip(leaves, gradients, strict=True)
        }

    def _abstract_tree(self, value: Any, flows: bool) -> AbstractTree:
        """Return the abstract tree of a value; leaves that flow to other stages count as wanting a gradient.

        With other data than zeros they may want one, even if they do not here.
        """
        leaves, spec = tree.flatten(value)
        facts = [*map(_fact, leaves)]
        for fact, leaf in zip(facts, leaves, strict=True):
            # Such as a mask of rows: with zeros there, the stage that selects by it would find none.
            if isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
                self._integers[fact.storage] = zeros(fact.aval).copy_(leaf)
        return AbstractTree(tuple(map(fact_wanting_grad, facts) if flows else facts), spec)

    def _in_own_storages(self, abstract: AbstractTree) -> AbstractTree:
        """Return the facts of copies of these leaves, each in memory of its own; integers keep their numbers."""
        leaves = [fact_in_own_storage(leaf.aval) if isinstance(leaf, Fact) else leaf for leaf in abstract.leaves]
        for leaf, own_leaf in zip(abstract.leaves, leaves, strict=True):
            if isinstance(leaf, Fact) and leaf.storage in self._integers:
                self._integers[own_leaf.storage] = self._integers[leaf.storage]
        return abstract._replace(leaves=tuple(leaves))


def _without_exchange(stage: Stage) -> Stage:
    """Return a stage whose exchange, if its sizes are data, is with nobody: a run on zeros has no partners."""
    function: Any = stage.forward
    has_sizes = isinstance(function, CollectiveStage) and function.has_sizes
    return replace(stage, forward=function.bind_group("", 0, 0)) if has_sizes else stage


_SKIPS_MISSING = {"ADD", "SCALE", "UNSCALE", "NORM", "UPDATE"}
"""Kinds of ops that skip a parameter without a gradient, as autograd and torch's optimizers do."""


def partial_gradients(ops: Sequence[Op], untraced: Collection[int]) -> frozenset[Value]:
    """Return the gradients of parameters, and their sums, in which leaves may be missing that the trace has.

    What another rank reads has every leaf: messages and collectives have one shape.
    """
    partial_values: set[Value] = set()
    for op in ops:
        if op.kind in ("B", "W") and op.stage in untraced:
            partial_values.update(value for value in op.writes if value.name == "g")
        elif op.kind in ("ADD", "SCALE", "UNSCALE") and not partial_values.isdisjoint(op.reads):
            partial_values.update(op.writes)
    # Backwards, since a sum that must have every leaf needs every leaf of what it adds up. NORM and UPDATE write
    # complete values whatever they read, and so is the flag of an UNSCALE, its second write.
    complete: set[Value] = set()
    for op in reversed(ops):
        passes_on = op.kind in ("ADD", "SCALE", "UNSCALE") and op.writes[0] in complete
        if op.kind not in _SKIPS_MISSING or passes_on:
            complete.update(op.reads)
    return frozenset(partial_values - complete)


def sparse_gradients(ops: Sequence[Op], untraced: Collection[int]) -> frozenset[Value]:
    """Return the gradients of parameters, and their sums, that may be sparse, since only ADDs and callers read them."""
    partial_values = partial_gradients(ops, untraced)
    backwards = (op for op in ops if op.kind in ("B", "W") and op.stage in untraced)
    gradients = (value for op in backwards for value in op.writes if value.name == "g")
    is_added_only = {op.kind for op in ops}.isdisjoint(_SKIPS_MISSING - {"ADD"})
    return partial_values if is_added_only and partial_values.issuperset(gradients) else frozenset()


def norm_of_partial(
    run: Callable[..., Any],
    reads: Sequence[Value],
    trees: Mapping[Value, AbstractTree],
    partial_values: Collection[Value],
) -> Callable[..., Any]:
    """Let a NORM read zeros for missing gradients: it packs one number for each leaf that the trace has."""
    leaves_by_index = {index: trees[value].leaves for index, value in enumerate(reads) if value in partial_values}

    def norm(*lists: Leaves) -> Any:
        for index, expected in leaves_by_index.items():
            lists[index][:] = map(_lay_out, expected, lists[index])
        return run(*lists)

    return norm


def zeros(aval: Aval) -> Tensor:
    """Return zeros of an aval's shape, dtype, strides and device."""
    if aval.sharding is not None:
        raise TypeError("it reads a DTensor, of which other processes have parts")
    memory = torch.zeros(storage_span(aval.shape, aval.stride), dtype=aval.dtype, device=aval.device)
    return memory.as_strided(aval.shape, aval.stride).requires_grad_(aval.wants_grad)


def _fact(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not is_strided(leaf):
        raise TypeError(f"it writes a {layout_of(leaf)}")
    return fact_in_own_storage(aval_of_tensor(leaf)) if isinstance(leaf, Tensor) else leaf


def _gradient_fact(allows_sparse: bool, leaf: Any, grad: Tensor | None) -> Any:
    """Return the fact of a leaf's gradient; laid out as the leaf, if it is sparse or zeros gave it none."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    is_laid_out_as_leaf = grad is None or (allows_sparse and grad.is_sparse)
    return _fact(torch.empty_like(leaf.detach()) if is_laid_out_as_leaf else grad)


class UnexpectedValue(ValueError):
    """A stage under autograd wrote other shapes or dtypes than in its run on zeros."""


def under_autograd(
    op: Op,
    reads: Sequence[AbstractTree],
    writes: Sequence[AbstractTree],
    unconstrained: Collection[Value],
    partial_values: Collection[Value],
    sparse_values: Collection[Value],
    context: StepContext,
    casts: AutocastSettings,
    *lists: Any,
) -> Sequence[Leaves]:
    """Run an op of a stage that is not traced, by the walk's rule.

    Args:
        op: the op.
        reads, writes: the abstract trees of its values.
        unconstrained: the values whose shapes nobody relies on, as only stages without a trace read them.
        partial_values, sparse_values: the gradients of parameters in which leaves may be missing, or sparse.
        context: the facts of the step; its key comes as the last of `lists`.
        casts: the autocast settings of the step's signature.
        lists: the leaves of what it reads.
    """
    # A backward runs its forward again where nothing was saved, so it needs the key too.
    if op.kind in "FRBI":
        lists, context = lists[:-1], replace(context, key=lists[-1])
    if op.kind == "F" and has_data_sizes(context.model, op.stage):
        _refuse_other_rows(op, reads, lists, context.model)
    args = [
        unflatten_value(abstract, [*map(_requiring_grad, abstract.leaves, leaves)])
        for abstract, leaves in zip(reads, lists, strict=True)
    ]
    with autocast_as(casts) if casts else nullcontext():
        results = RULES[op.kind](op, args, context)
    for leaves in lists:
        leaves.clear()
    return [
        [result]
        if abstract is OPAQUE
        else _conform(
            op,
            value,
            abstract,
            result,
            any_shape=value in unconstrained,
            is_partial=value in partial_values,
            may_be_sparse=value in sparse_values,
            model=context.model,
        )
        for value, abstract, result in zip(op.writes, writes, results, strict=True)
    ]


def _refuse_other_rows(op: Op, reads: Sequence[AbstractTree], lists: Sequence[Leaves], model: Model) -> None:
    """Raise UnexpectedValue unless an exchange is handed rows of the shape that processes agreed on."""
    exchange: Any = model.stages[op.stage or 0].forward
    if exchange.size < 2:
        return
    flowing = [index for index, value in enumerate(op.reads) if value.name != "params"]
    *agreed, sizes = (aval_of_leaf(leaf).shape for index in flowing for leaf in reads[index].leaves)
    *rows, length = (tuple(getattr(leaf, "shape", ())) for index in flowing for leaf in lists[index])
    if [shape[1:] for shape in rows] != [shape[1:] for shape in agreed] or length != sizes:
        actual, expected = (
            f"{' and '.join(f'rows of {[*shape[1:]]}' for shape in shapes)} with sizes {[*sizes_shape]}"
            for shapes, sizes_shape in ((rows, length), (agreed, sizes))
        )
        raise UnexpectedValue(
            f"{model.label_of(op.stage or 0)} is handed {actual} in {op.cell}, and all processes agreed on "
            f"{expected}; only the number of rows may change."
        )


def _requiring_grad(expected: Any, leaf: Any) -> Any:
    """Return a leaf as the input of an autograd graph, which requires a gradient if its fact wants one."""
    return leaf.detach().requires_grad_() if isinstance(expected, Fact) and expected.aval.wants_grad else leaf


def _conform(
    op: Op,
    value: Value,
    expected: AbstractTree,
    result: Any,
    *,
    any_shape: bool,
    is_partial: bool,
    may_be_sparse: bool,
    model: Model,
) -> Leaves:
    """Return the leaves of a value in the strides that its readers expect; if `any_shape`, unchanged."""
    leaves, spec = ([*result], None) if expected.spec is None else tree.flatten(result)
    pairs = [*zip(expected.leaves, leaves, strict=spec == expected.spec)]
    sparse = [may_be_sparse and _is_sparse_form(*pair) for pair in pairs]
    if spec == expected.spec and all(
        is_sparse or _matches(*pair, any_shape) for is_sparse, pair in zip(sparse, pairs, strict=True)
    ):
        if any_shape:
            return leaves
        return [
            leaf if is_sparse or (is_partial and leaf is None) else _lay_out(expected_leaf, leaf)
            for is_sparse, (expected_leaf, leaf) in zip(sparse, pairs, strict=True)
        ]
    actual_text, expected_text = (
        ", ".join(map(_describe_leaf, value_leaves)) or "nothing" for value_leaves in (leaves, expected.leaves)
    )
    subject = model.label_of(op.stage or 0)
    difference = f"{op.cell} wrote {value} as {actual_text}, and for zeros as {expected_text}"
    if op.stage in stages_with_data_sizes(model):
        raise UnexpectedValue(
            f"{subject} reads as many rows as the data say, and {difference}. Other ranks and traced stages need one "
            f"shape. {WHOLE_BLOCKS}"
        )
    raise UnexpectedValue(
        f"{subject} runs without a trace, and {difference}. Give it one structure and shape, or place its readers on "
        "this rank, without a trace too."
    )


def _is_sparse_form(expected: Any, leaf: Any) -> bool:
    """Whether a leaf is a sparse tensor of the expected shape and dtype."""
    is_sparse = isinstance(leaf, Tensor) and leaf.is_sparse and isinstance(expected, Fact)
    return is_sparse and (tuple(leaf.shape), leaf.dtype) == (expected.aval.shape, expected.aval.dtype)


def _matches(expected: Any, leaf: Any, any_shape: bool) -> bool:
    if not isinstance(expected, Fact):
        return (type(expected), repr(expected)) == (type(leaf), repr(leaf))
    if not isinstance(leaf, Tensor) or not is_strided(leaf):
        return leaf is None and not expected.aval.wants_grad
    # Strides may differ, since `_lay_out` copies; and a gradient may be wanted that this run has none for.
    actual = aval_of_tensor(leaf)
    actual = actual._replace(shape=expected.aval.shape, stride=expected.aval.stride) if any_shape else actual
    is_equal = actual._replace(stride=expected.aval.stride, wants_grad=expected.aval.wants_grad) == expected.aval
    return (
        is_equal
        and (expected.aval.wants_grad or not actual.wants_grad)
        and (actual.stride == expected.aval.stride or is_dense_fact(expected))
    )


def _lay_out(expected: Any, leaf: Any) -> Any:
    if not isinstance(expected, Fact) or (leaf is not None and leaf.stride() == expected.aval.stride):
        return leaf
    tensor = zeros(expected.aval._replace(wants_grad=False))
    return tensor if leaf is None else tensor.copy_(leaf.detach())


def _describe_leaf(leaf: Any) -> str:
    aval = aval_of_tensor(leaf) if isinstance(leaf, Tensor) else leaf.aval if isinstance(leaf, Fact) else None
    if aval is None:
        return repr(leaf)
    return f"{aval} with strides {[*aval.stride]} on {aval.device}{', which wants a gradient' * aval.wants_grad}"
