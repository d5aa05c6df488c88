"""Trace what plain autograd does: a function and its gradient, run once on fake tensors, op by op.

    y = f(params, x)        --> trace -->        y = ops(params, x);  dx, g = more ops(params, x, dy)

The gradient is `torch.autograd.grad`'s own, so the ops are those that run without us, in their order. (Tracing
`torch.func.vjp` instead takes ops apart: GroupNorm, SiLU, LSTM and weight norm then differ in their last bits.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.language.graph import Aval, Fact, Graph, Name, Node, Outline, fact, without_repeated_views
from fpipe.graphs.language.labels import gradient_of, is_input, is_parameter, result_of, variable
from fpipe.graphs.tracing.draws import GeneratorWatch, draws, keyed, refuse_unkeyed_randomness, without_fills
from fpipe.graphs.tracing.fake import LeakedTensor, fake_mode, no_leaks, watched_memory
from fpipe.graphs.tracing.functional import functional, refuse_mutation
from fpipe.meaning.purity.ambient import Untraceable, outside_autocast
from fpipe.meaning.purity.own_memory import is_view_in_place, laid_out_as, mutated_by, of_each_row, rows_of
from fpipe.meaning.purity.pure import Impure
from fpipe.meaning.stages.keys import exclusive_generator
from fpipe.meaning.stages.outputs import MissingGradient, partly_python, refuse_max_gradients, refuse_missing_gradients
from fpipe.model import Model
from fpipe.torch_internals import is_view
from fpipe.torch_private.dispatch import (
    OpOverload,
    TorchDispatchMode,
    fake_tensor_class,
    has_kernel,
    kernel_instead,
    without_modes,
)
from fpipe.torch_private.fx import calls_so_far, traced_by_torch, unnoticed, without_compiled_functions

Leaves = Sequence[Any]
Groups = Mapping[str, Leaves]
Flat = Callable[[Mapping[str, list[Any]]], Mapping[str, list[Any]]]
"""A function of leaves by label (`params`, `x`, `x:1`, ...) to leaves by label (`y`, `loss`, ...)."""

Around = Callable[[Mapping[str, list[Any]], Callable[[], Any]], Any]

_aten: Any = torch.ops.aten


def outline(function: Flat, reads: Groups, per_row: bool = False, model: Model | None = None) -> Outline:
    """Outline a function, by running it on fake tensors.

    >>> x = Aval((2, 3), (3, 1), torch.float32, torch.device("cpu"), wants=True)
    >>> one = outline(lambda given: {"y": [given["x"][0].t()]}, {"x": [x]})
    >>> print(one.avals("y")[0], one.writes["y"][0].storage == one.reads["x"][0].storage, one.ran)
    float32[3, 2] True ('aten.t.default',)
    """
    with exclusive_generator(), _reasons(), fake_mode() as mode, no_leaks(mode):
        return _outline(function, reads, per_row, model)  # whose variables hold no tensor from here on


def _outline(function: Flat, reads: Groups, per_row: bool, model: Model | None) -> Outline:
    numbers: dict[int, int] = {}
    cached = torch.is_autocast_cache_enabled()
    with _in_this_thread(), _autocast_cache(cached), without_compiled_functions():
        given = {label: [_empty(leaf) for leaf in leaves] for label, leaves in reads.items()}
        with GeneratorWatch() as generators:
            with _OpLog(generators) as log, watched_memory():
                args = _with_dtensors(_with_params_per_row(given) if per_row else given, reads)
                written = function(args)
            generators.check()
        results = [*chain(*written.values())]
        if model is not None:
            refuse_missing_gradients(model, results, chain(*given.values(), *args.values()))
        refuse_max_gradients(results)
        facts = _facts(given, numbers), _facts(written, numbers)
        return Outline(*facts, tuple(log.ops), tuple(log.numbers), partly_python(results))


class _OpLog(TorchDispatchMode):
    """Notes which ops run, and refuses two kinds.

    Ops that draw after the function has seeded torch's generator or put it back. And a transposition of a view in
    place, since on fake tensors autograd sends later writes through it to where they would have gone before.
    """

    def __init__(self, generators: GeneratorWatch) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.numbers: list[Any] = []
        self.generators = generators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:  # inside torch.func such an op comes whole, while make_fx sees its parts
                return func.decompose(*args, **(kwargs or {}))
        if func not in _NOT_LOGGED:
            self.ops.append(str(func))
            self.numbers += [arg for arg in args if isinstance(arg, bool | int | float)]
        if draws(func, args, kwargs or {}):
            self.generators.draw()
        if is_view_in_place(func) and is_view(args[0]):
            raise Untraceable(f"it turns a view in place ({func}), which autograd follows where there is data alone")
        return func(*args, **(kwargs or {}))


def _facts(groups: Mapping[str, list[Any]], numbers: dict[int, int]) -> dict[str, list[Any]]:
    return {
        label: [fact(leaf, numbers) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for label, leaves in groups.items()
    }


def trace(
    function: Flat,
    reads: Groups,
    cotangents: Groups,
    around: Around | None = None,
    per_row: bool = False,
) -> Graph:
    """Trace a function and its gradient as one graph; Untraceable says why there is none.

    Args:
        function: it depends on nothing but what it reads, and constants.
        reads: by label, avals of tensors; leaves that are no tensors as they are. What wants a gradient among
            `params`, `x` and `carry` gets it: the graph also writes `g`, `dx` and `dcarry`.
        cotangents: the avals of cotangents, `dy` for `y` and so on; None where there is none.
        around: keeps what is read where the function has it, for a gradient that calls parts of the function again.
        per_row: whether each row is handed parameters of its own.
    """
    groups: Groups = {**reads, **cotangents}
    places = [(label, at) for label, ls in groups.items() for at, leaf in enumerate(ls) if isinstance(leaf, Aval)]
    shown: list[tuple[str, list[Any]]] = []
    before: list[int] = []
    cached = torch.is_autocast_cache_enabled()

    def joint(*tensors: Tensor) -> list[Tensor]:
        given = {label: list(leaves) for label, leaves in groups.items()}
        for (label, at), tensor in zip(places, tensors, strict=True):
            given[label][at] = tensor.detach()
        given = _with_params_per_row(given) if per_row else given
        for label, at in places:
            given[label][at].requires_grad_(groups[label][at].wants)
        with _autocast_cache(cached), watched_memory():
            shown[:] = _with_gradient(function, given, reads, cotangents, before, around)
        return [leaf for _, leaves in shown for leaf in leaves if isinstance(leaf, Tensor)]

    with _reasons():
        with fake_mode():
            fakes = [_empty(groups[label][at]).detach() for label, at in places]
        traced: Any = traced_by_torch(joint, fakes)
        calls = [node for node in traced.graph.nodes if node.op == "call_function"]
        ran = tuple(str(n.target) for n in calls if isinstance(n.target, OpOverload) and n.target not in _NOT_LOGGED)
        refuse_unkeyed_randomness(calls, before[0])
        without_fills(traced)
        calls = [node for node in traced.graph.nodes if node.op == "call_function"]
        if any(map(mutated_by, calls)):
            refuse_mutation(traced)
            traced = functional(traced, fakes)
        graph = replace(without_repeated_views(_graph(traced, groups, places, shown)), ran=ran)
        return keyed(graph)


def _with_gradient(
    function: Flat,
    given: Mapping[str, list[Any]],
    reads: Groups,
    cotangents: Groups,
    before: list[int],
    around: Around | None,
) -> Iterator[tuple[str, list[Any]]]:
    """Yield results of the function, then gradients; note in `before` how many calls come before these."""
    with _in_this_thread():
        with unnoticed():
            args = _with_dtensors(given, reads)
            results = function(args)
        before.append(calls_so_far())
        yield from results.items()
        pairs = [
            (root, start)
            for label in cotangents
            for root, start in zip(results[result_of(label)], given[label], strict=True)
            if _wants(root) and start is not None
        ]
        gradients = {label: name for label in reads if (name := gradient_of(label)) is not None}
        wanted = [leaf for label in gradients for leaf in given[label] if _wants(leaf)]
        grads: Iterator[Any] = iter([None] * len(wanted))
        if pairs and wanted:
            roots, starts = zip(*pairs, strict=True)
            gradient: Any = partial(torch.autograd.grad, roots, wanted, starts, allow_unused=True)
            with outside_autocast():
                grads = iter(gradient() if around is None else around(args, gradient))
        for label, written in gradients.items():
            read_grads = [next(grads) if _wants(leaf) else None for leaf in given[label]]
            yield written, [*map(laid_out_as, given[label], read_grads)] if is_parameter(label) else read_grads


def _with_params_per_row(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the arguments of a function, with parameters of its own for each row of its input."""
    rows = rows_of(leaf for label in given if is_input(label) for leaf in given[label])
    return {label: of_each_row(leaves, rows) if is_parameter(label) else [*leaves] for label, leaves in given.items()}


@contextmanager
def _in_this_thread() -> Generator[None]:
    """Keep backwards in this thread: on a device autograd would take another one, which is under none of our modes."""
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


def _with_dtensors(given: Mapping[str, list[Any]], reads: Groups) -> dict[str, list[Any]]:
    """Return the arguments of a function, with DTensors in the place of their shards."""

    def whole(leaf: Any, known: Any) -> Any:
        return leaf if not isinstance(known, Aval) or known.sharding is None else known.sharding.whole(leaf)

    return {label: [*map(whole, given[label], known)] for label, known in reads.items()}


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _empty(leaf: Any) -> Any:
    if not isinstance(leaf, Aval):
        return leaf
    return leaf.empty().requires_grad_(leaf.wants)


@contextmanager
def _autocast_cache(enabled: bool) -> Generator[None]:
    """Autocast casts a weight once for all its uses, so their gradients are added in the lower precision.

    make_fx switches that off. What is cast here has no data and must not be found later.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


_TRACING = threading.RLock()  # torch traces for one thread at a time


@contextmanager
def _reasons() -> Generator[None]:
    """Turn whatever stops a trace into Untraceable, and hide the ops of a trace from the caller's modes."""
    try:
        with _TRACING, without_modes(), kernel_instead("one_hot", _one_hot):
            yield
    except (Untraceable, LeakedTensor, MissingGradient):
        raise
    except Impure as error:
        raise Untraceable(str(error)) from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise Untraceable(f"{type(error).__name__}: {reason}") from error


# torch's own kernel leaves its look at the labels out where there is no data to look at. With an op of its own for it a
# trace keeps the error: one_hot(labels, 4)  -->  _assert_async(all(labels < 4)); eq(labels, arange(4))
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


def _graph(
    traced: Any, groups: Groups, places: Sequence[tuple[str, int]], shown: Sequence[tuple[str, list[Any]]]
) -> Graph:
    """Return the traced ops under our names, without `detach`, which does nothing where nobody differentiates."""
    names: dict[fx.Node, Any] = {}
    facts: dict[Name, Fact] = {}
    constants: dict[Name, Tensor] = {}
    nodes: list[Node] = []
    numbers: dict[int, int] = {}
    taken: set[str] = set()
    reads: dict[str, list[Any]] = {label: [None] * len(leaves) for label, leaves in groups.items()}
    given = iter(places)
    results: list[Any] = []
    for node in traced.graph.nodes:
        if node.op == "output":
            results = list(node.args[0])
            continue
        name = _unused(node.name, taken)
        if node.op == "placeholder":
            label, at = next(given)
            name = _unused(variable(label, at), taken)
            reads[label][at] = name
        elif node.op == "get_attr":
            constants[name] = getattr(traced, node.target)
            if isinstance(constants[name], fake_tensor_class()):
                raise Untraceable("it holds on to a tensor that was made while it was traced")
        elif node.target in _IDENTITIES:
            names[node] = names[node.args[0]]
            continue
        else:
            args, kwargs = _plain(node.args, names), {word: _plain(arg, names) for word, arg in node.kwargs.items()}
            nodes.append(Node(name, node.target, args, kwargs))
        names[node] = name
        value = node.meta.get("val", constants.get(name))
        if isinstance(value, Tensor):
            known = fact(value, numbers)
            facts[name] = known._replace(aval=known.aval._replace(wants=False))
    writes: dict[str, list[Any]] = {}
    found = iter(results)
    for label, leaves in shown:
        writes[label] = [names[next(found)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tuples = [{label: tuple(leaves) for label, leaves in side.items()} for side in (reads, writes)]
    return Graph(tuple(nodes), facts, constants, tuples[0], tuples[1])


_IDENTITIES = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
_NOT_LOGGED = (*_IDENTITIES, _aten.lift_fresh_copy.default)  # make_fx copies constants where nothing else does


def _unused(name: str, taken: set[str]) -> Name:
    unused = next(new for new in chain([name], (f"{name}_{k}" for k in count(1))) if new not in taken)
    taken.add(unused)
    return Name(unused)


def _plain(arg: Any, names: Mapping[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, list | tuple):
        return (list if isinstance(arg, list) else tuple)(_plain(item, names) for item in arg)
    return arg
