"""Trace a function and its gradient by plain autograd, on fake tensors, as one graph of torch ops.

    y = f(params, x)        --> trace -->        y = ops(params, x);  dx, g = more ops(params, x, dy)

The gradient is computed by `torch.autograd.grad`, so the ops are those of plain autograd, in their order. (Tracing
`torch.func.vjp` instead decomposes ops: GroupNorm, SiLU, LSTM and weight norm then differ in their last bits.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.language.graph import Aval, Fact, Graph, Name, Node, Outline, fact_of_tensor, without_repeated_views
from fpipe.graphs.language.labels import gradient_of, is_input, is_parameter, result_of, variable_name
from fpipe.graphs.tracing.fake_tensors import LeakedTensor, fake_mode, refuse_data_assignment, refuse_leaks
from fpipe.graphs.tracing.functionalize import functionalize, refuse_mutation
from fpipe.graphs.tracing.higher_order_ops import runnable_op
from fpipe.graphs.tracing.open_sizes import current_open_sizes
from fpipe.graphs.tracing.random_ops import (
    GeneratorWatch,
    draws_random_numbers,
    refuse_unkeyed_randomness,
    replace_fills,
    with_generator_inputs,
)
from fpipe.meaning.purity.ambient import Untraceable, outside_autocast
from fpipe.meaning.purity.keys import lock_torch_generators
from fpipe.meaning.purity.outputs import (
    MissingGradient,
    has_python_backward,
    refuse_max_gradients,
    refuse_missing_gradients,
)
from fpipe.meaning.purity.pure import Impure
from fpipe.meaning.purity.write_guard import (
    count_rows,
    expand_per_row,
    involves_wrapper,
    is_view_in_place,
    mutated_nodes,
    with_layout_of,
)
from fpipe.model import Model
from fpipe.torch_internals import HigherOrderOperator, as_expression, is_jagged_error, is_view
from fpipe.torch_private.dispatch import (
    OpOverload,
    TorchDispatchMode,
    fake_tensor_class,
    has_kernel,
    override_kernel,
    without_modes,
)
from fpipe.torch_private.fx import as_in_make_fx, count_traced_ops, hide_make_fx, trace_on_fakes

Leaves = Sequence[Any]
LeavesByLabel = Mapping[str, Leaves]
FlatFunction = Callable[[Mapping[str, list[Any]]], Mapping[str, list[Any]]]
"""A function of leaves by label (`params`, `x`, `x:1`, ...) to leaves by label (`y`, `loss`, ...)."""

BackwardRunner = Callable[[Mapping[str, list[Any]], Callable[[], Any]], Any]

_aten: Any = torch.ops.aten


def outline(function: FlatFunction, reads: LeavesByLabel, per_row: bool = False, model: Model | None = None) -> Outline:
    """Outline a function: run it on fake tensors, and record its outputs and the ops that ran.

    >>> x = Aval((2, 3), (3, 1), torch.float32, torch.device("cpu"), wants_grad=True)
    >>> transposed = outline(lambda given: {"y": [given["x"][0].t()]}, {"x": [x]})
    >>> shares_memory = transposed.writes["y"][0].storage == transposed.reads["x"][0].storage
    >>> print(transposed.avals("y")[0], shares_memory, transposed.ran)
    float32[3, 2] True ('aten.t.default',)
    """
    with lock_torch_generators(), _as_untraceable(), _fake_mode() as mode, refuse_leaks(mode):
        # A function of its own: when it returns, its local variables no longer hold the tensors that count as leaked.
        return _outline(function, reads, per_row, model)


def _fake_mode() -> Any:
    sizes = current_open_sizes()
    return fake_mode() if sizes is None else fake_mode(sizes.shape_env)


def _outline(function: FlatFunction, reads: LeavesByLabel, per_row: bool, model: Model | None) -> Outline:
    """Return the inputs, results and ops of a function, which runs once on fake tensors."""
    storage_numbers: dict[int, int] = {}
    caches_casts = torch.is_autocast_cache_enabled()
    with _backward_in_this_thread(), _with_autocast_cache(caches_casts), as_in_make_fx():
        inputs = {label: [_empty_tensor(leaf) for leaf in leaves] for label, leaves in reads.items()}
        with GeneratorWatch() as generators:
            with _OpLog(generators) as log, refuse_data_assignment():
                args = _with_dtensors(_with_params_per_row(inputs) if per_row else inputs, reads)
                result_by_label = function(args)
            generators.refuse_misuse()
        result_leaves = [*chain(*result_by_label.values())]
        if model is not None:
            refuse_missing_gradients(model, result_leaves, chain(*inputs.values(), *args.values()))
        refuse_max_gradients(result_leaves)
        facts = _facts_by_label(inputs, storage_numbers), _facts_by_label(result_by_label, storage_numbers)
        ran = () if log.has_higher_order_op else tuple(log.ops)
        return Outline(*facts, ran, tuple(log.scalars), has_python_backward(result_leaves))


_OPEN_NUMBERS = torch.SymInt | torch.SymFloat | torch.SymBool


class _OpLog(TorchDispatchMode):
    """Logs which ops run, and raises Untraceable for two kinds.

    These are ops that draw after the function has seeded or restored torch's generator, and in-place transpositions of
    a view: on fake tensors, autograd sends later writes through such a view to where they went before it was turned.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: GeneratorWatch) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.has_higher_order_op = False
        self.scalars: list[Any] = []
        self.generators = generators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if involves_wrapper(types):
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            # torch traces the functions of this op alone, and other ops run for that.
            self.has_higher_order_op = True
            return func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if has_kernel(func.name(), "CompositeImplicitAutograd"):
            # Inside torch.func a composite op arrives whole, while make_fx sees its parts. Log the parts, so that the
            # log of an outline can be compared with the ops of a trace.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if _is_logged(func, args):
            self.ops.append(str(func))
            self.scalars += [
                as_expression(argument) for argument in args if isinstance(argument, bool | int | float | _OPEN_NUMBERS)
            ]
        if draws_random_numbers(func, args, kwargs or {}):
            self.generators.advance()
        if is_view_in_place(func) and is_view(args[0]):
            raise Untraceable(f"it transposes a view in place ({func}), which autograd follows only on real data")
        return func(*args, **(kwargs or {}))


def _facts_by_label(leaves_by_label: Mapping[str, list[Any]], storage_numbers: dict[int, int]) -> dict[str, list[Any]]:
    return {
        label: [fact_of_tensor(leaf, storage_numbers) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for label, leaves in leaves_by_label.items()
    }


def trace(
    function: FlatFunction,
    reads: LeavesByLabel,
    cotangents: LeavesByLabel,
    run_backward: BackwardRunner | None = None,
    per_row: bool = False,
) -> Graph:
    """Trace a function and its gradient as one graph, or raise Untraceable with the reason.

    Args:
        function: a pure function of leaves by label.
        reads: by label the avals of its tensors, and its other leaves. The graph also writes the gradients `g`, `dx`
            and `dcarry` of those among `params`, `x` and `carry` whose aval wants one.
        cotangents: by label (`dy` for `y` and so on) the avals of cotangents; None where there is none.
        run_backward: runs the gradient while the module has its parameters, as a checkpoint inside it needs.
        per_row: whether each row has parameters of its own.
    """
    leaves_by_label: LeavesByLabel = {**reads, **cotangents}
    # make_fx passes and returns flat lists of tensors. `slots` says which leaf each of its inputs is, and
    # `labelled_results`, which the traced call fills in, which leaf each of its outputs is.
    slots = [(label, i) for label, avals in leaves_by_label.items() for i, x in enumerate(avals) if isinstance(x, Aval)]
    labelled_results: list[tuple[str, list[Any]]] = []
    forward_call_counts: list[int] = []
    caches_casts = torch.is_autocast_cache_enabled()

    def run_joint(*tensors: Tensor) -> list[Tensor]:
        arguments = {label: list(leaves) for label, leaves in leaves_by_label.items()}
        for (label, index), tensor in zip(slots, tensors, strict=True):
            arguments[label][index] = tensor.detach()
        arguments = _with_params_per_row(arguments) if per_row else arguments
        for label, index in slots:
            arguments[label][index].requires_grad_(leaves_by_label[label][index].wants_grad)
        with _with_autocast_cache(caches_casts), refuse_data_assignment():
            labelled_results[:] = _run_with_gradient(
                function, arguments, reads, cotangents, forward_call_counts, run_backward
            )
        return [leaf for _, leaves in labelled_results for leaf in leaves if isinstance(leaf, Tensor)]

    with _as_untraceable():
        with _fake_mode():
            fakes = [_empty_tensor(leaves_by_label[label][index]).detach() for label, index in slots]
        traced: Any = trace_on_fakes(run_joint, fakes)
        # 1. Log the ops as they ran, before any rewrite, to be compared with those of the outline.
        calls = [node for node in traced.graph.nodes if node.op == "call_function"]
        op_calls = (node for node in calls if not isinstance(node.meta.get("val"), _OPEN_NUMBERS))
        op_calls = (node for node in op_calls if isinstance(node.target, OpOverload))
        ran = tuple(str(node.target) for node in op_calls if _is_logged(node.target, node.args))
        refuse_unkeyed_randomness(calls, forward_call_counts[0])
        # 2. Make the graph functional. It has its casts as ops: run under autocast, it would cast once more.
        replace_fills(traced)
        calls = [node for node in traced.graph.nodes if node.op == "call_function"]
        if any(map(mutated_nodes, calls)):
            refuse_mutation(traced)
            with outside_autocast():
                traced = functionalize(traced, fakes)
        # 3. Translate it into our language, with random generators as inputs.
        graph = replace(without_repeated_views(_build_graph(traced, leaves_by_label, slots, labelled_results)), ran=ran)
        return with_generator_inputs(graph)


def _run_with_gradient(
    function: FlatFunction,
    arguments: Mapping[str, list[Any]],
    reads: LeavesByLabel,
    cotangents: LeavesByLabel,
    forward_call_counts: list[int],
    run_backward: BackwardRunner | None,
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the labelled results of a function, then its gradients; append the number of forward calls between them."""
    with _backward_in_this_thread():
        with hide_make_fx():
            args = _with_dtensors(arguments, reads)
            results = function(args)
        forward_call_counts.append(count_traced_ops())
        yield from results.items()
        roots_and_cotangents = [
            (root, cotangent)
            for label in cotangents
            for root, cotangent in zip(results[result_of(label)], arguments[label], strict=True)
            if _requires_grad(root) and cotangent is not None
        ]
        gradients = {label: name for label in reads if (name := gradient_of(label)) is not None}
        differentiated = [leaf for label in gradients for leaf in arguments[label] if _requires_grad(leaf)]
        grads: Iterator[Any] = iter([None] * len(differentiated))
        if roots_and_cotangents and differentiated:
            roots, seeds = zip(*roots_and_cotangents, strict=True)
            compute_grads: Any = partial(torch.autograd.grad, roots, differentiated, seeds, allow_unused=True)
            # As torch advises: a backward inside autocast would compute some gradients in the lower precision.
            with outside_autocast():
                grads = iter(compute_grads() if run_backward is None else run_backward(args, compute_grads))
        for label, gradient_label in gradients.items():
            read_grads = [next(grads) if _requires_grad(leaf) else None for leaf in arguments[label]]
            if is_parameter(label):
                read_grads = [*map(with_layout_of, arguments[label], read_grads)]
            yield gradient_label, read_grads


def _with_params_per_row(arguments: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the arguments of a function with its parameters expanded to a copy for each row of its input."""
    rows = count_rows(leaf for label in arguments if is_input(label) for leaf in arguments[label])
    return {
        label: expand_per_row(leaves, rows) if is_parameter(label) else [*leaves] for label, leaves in arguments.items()
    }


@contextmanager
def _backward_in_this_thread() -> Generator[None]:
    """Enable gradients, and run backwards in this thread."""
    # For tensors on a device autograd would use a thread of its own, where our dispatch modes are not active.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


def _with_dtensors(arguments: Mapping[str, list[Any]], reads: LeavesByLabel) -> dict[str, list[Any]]:
    """Return the arguments of a function, each shard wrapped as the DTensor that its aval describes."""

    def as_dtensor(leaf: Any, aval: Any) -> Any:
        return leaf if not isinstance(aval, Aval) or aval.sharding is None else aval.sharding.to_dtensor(leaf)

    return {label: [*map(as_dtensor, arguments[label], avals)] for label, avals in reads.items()}


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _empty_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, Aval):
        return leaf
    sizes = current_open_sizes()
    leaf = leaf if sizes is None else sizes.empty(leaf)
    return leaf.empty().requires_grad_(leaf.wants_grad)


@contextmanager
def _with_autocast_cache(enabled: bool) -> Generator[None]:
    """Enable or disable autocast's cache of cast weights, which is empty on entry and on exit."""
    # With the cache a weight is cast once for all its uses, so their gradients are added in the lower precision;
    # make_fx disables it. Casts that are made here have no data, so the next real run must not find them in the cache.
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(was_enabled)


# make_fx patches state of the whole process, so one thread traces at a time.
_TRACE_LOCK = threading.RLock()


@contextmanager
def _as_untraceable() -> Generator[None]:
    """Trace outside the caller's dispatch modes, and raise whatever stops the trace as Untraceable."""
    try:
        with _TRACE_LOCK, without_modes(), override_kernel("one_hot", _one_hot):
            yield
    except (Untraceable, LeakedTensor, MissingGradient):
        raise
    except Impure as error:
        raise Untraceable(str(error)) from error
    except Exception as error:
        if is_jagged_error(error):
            raise Untraceable("it makes a jagged nested tensor, whose sizes depend on data") from error
        reason = next(iter(str(error).strip().splitlines()), "")
        raise Untraceable(f"{type(error).__name__}: {reason}") from error


# torch's kernel of one_hot checks labels only where they have data, so a trace of it would lose the error. This kernel
# checks by an op, which a trace keeps: one_hot(labels, 4)  -->  _assert_async(all(labels < 4)); eq(labels, arange(4))
def _one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    if self.dtype is not torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    if num_classes < 1:
        raise RuntimeError("num_classes should be positive")
    _aten._assert_async.msg((self >= 0).all(), "Class values must be non-negative.")
    _aten._assert_async.msg((self < num_classes).all(), "Class values must be smaller than num_classes.")
    return (self.unsqueeze(-1) == torch.arange(num_classes, device=self.device)).to(torch.int64)


def _build_graph(
    traced: Any,
    leaves_by_label: LeavesByLabel,
    slots: Sequence[tuple[str, int]],
    labelled_results: Sequence[tuple[str, list[Any]]],
) -> Graph:
    """Return the traced ops as a Graph of the language."""
    # `detach` and its like are dropped: they compute nothing, and the graph, which has its gradient, is never
    # differentiated again.
    name_by_node: dict[fx.Node, Any] = {}
    facts: dict[Name, Fact] = {}
    constants: dict[Name, Any] = {}
    nodes: list[Node] = []
    storage_numbers: dict[int, int] = {}
    used_names: set[str] = set()
    reads: dict[str, list[Any]] = {label: [None] * len(leaves) for label, leaves in leaves_by_label.items()}
    # 1. Name each node: an input by its slot, in whose order placeholders come. Every other node is a constant, an
    #    argument of its readers (a function, a size), an alias, or an op.
    remaining_slots = iter(slots)
    results: list[Any] = []
    for node in traced.graph.nodes:
        if node.op == "output":
            results = list(node.args[0])
            continue
        name = _unused_name(node.name, used_names)
        if node.op == "placeholder":
            label, index = next(remaining_slots)
            name = _unused_name(variable_name(label, index), used_names)
            reads[label][index] = name
        elif node.op == "get_attr":
            constants[name] = getattr(traced, node.target)
            if isinstance(constants[name], fx.GraphModule):
                # A function that a higher-order op calls, such as a branch of torch.cond, is an argument like a number.
                name_by_node[node] = constants.pop(name)
                continue
            if isinstance(constants[name], fake_tensor_class()):
                raise Untraceable("it keeps a tensor that was created during the trace")
        elif node.target in _IDENTITIES:
            name_by_node[node] = name_by_node[node.args[0]]
            continue
        elif isinstance(node.meta.get("val"), _OPEN_NUMBERS):
            # Arithmetic on open sizes: readers get the expression.
            name_by_node[node] = as_expression(node.meta["val"])
            continue
        else:
            args = _with_names(node.args, name_by_node)
            kwargs = {keyword: _with_names(argument, name_by_node) for keyword, argument in node.kwargs.items()}
            nodes.append(Node(name, runnable_op(node), args, kwargs))
        name_by_node[node] = name
        value = node.meta.get("val", constants.get(name))
        if isinstance(value, Tensor):
            node_fact = fact_of_tensor(value, storage_numbers)
            facts[name] = node_fact._replace(aval=node_fact.aval._replace(wants_grad=False))
    # 2. Put results under their labels: they come in the order of the labelled leaves that are tensors.
    writes: dict[str, list[Any]] = {}
    result_nodes = iter(results)
    for label, leaves in labelled_results:
        writes[label] = [name_by_node[next(result_nodes)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tuples_by_label = [{label: tuple(leaves) for label, leaves in side.items()} for side in (reads, writes)]
    return Graph(tuple(nodes), facts, constants, tuples_by_label[0], tuples_by_label[1])


_IDENTITIES = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
# make_fx copies constants, which a plain run does not, so the copies may not count as ops that ran.
_NOT_LOGGED = (*_IDENTITIES, _aten.lift_fresh_copy.default)


def _is_logged(op: Any, args: Sequence[Any]) -> bool:
    """Whether an op counts as one that ran; of an open size torch takes a slice for `x[:]`, and of a number none."""
    is_whole_slice = op is _aten.slice.Tensor and (*args[2:],) == (0, sys.maxsize)
    return op not in _NOT_LOGGED and not is_whole_slice


def _unused_name(name: str, used_names: set[str]) -> Name:
    unused = next(text for text in chain([name], (f"{name}_{k}" for k in count(1))) if text not in used_names)
    used_names.add(unused)
    return Name(unused)


def _with_names(argument: Any, name_by_node: Mapping[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return name_by_node[argument]
    if isinstance(argument, list | tuple):
        return (list if isinstance(argument, list) else tuple)(_with_names(part, name_by_node) for part in argument)
    return argument
