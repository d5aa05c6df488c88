"""Let each op that draws random numbers draw from a generator that the graph is handed.

    mask = bernoulli(x, 0.9)        --> keyed -->        mask = bernoulli(x, 0.9, generator=rng)

A generator that was seeded as torch would be gives the numbers that torch would give, in the order of the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.language.graph import Graph, Name, Node
from fpipe.graphs.language.labels import GENERATORS
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.stages.keys import TORCHS_GENERATOR, seeded, torchs_generators
from fpipe.torch_internals import OpOverload, arguments_of
from fpipe.torch_private.dispatch import without_modes


def draws(op: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an op draws random numbers; dropout that keeps everything, or nothing, does not."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    values = {argument.name: argument.default_value for argument in arguments_of(op)}
    values |= dict(zip(values, args, strict=False)) | kwargs
    # These return early. What they call below autograd, native_dropout, draws for each p.
    if op.overloadpacket in _DROPOUTS and values["p"] in (0, 1):
        return False
    return values.get("dropout_p") != 0.0 and values.get("training") is not False and values.get("train") is not False


_DROPOUTS = frozenset(
    getattr(torch.ops.aten, f"{kind}dropout{in_place}")
    for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for in_place in ("", "_")
)


def refuse_unkeyed_randomness(calls: list[fx.Node], forward: int) -> None:
    """Raise Untraceable if an op draws from a generator of its own, or in the backward, behind the first calls."""
    for at, node in enumerate(calls):
        if draws(node.target, node.args, dict(node.kwargs)):
            if at >= forward:
                raise Untraceable(f"its backward draws random numbers ({node.target}), as a checkpoint inside it does")
            if node.kwargs.get("generator") is not None:
                raise Untraceable(f"it draws from a generator of its own ({node.target})")


class GeneratorWatch:
    """Finds out whether a function seeds torch's generators, or puts back a state of them.

    Fake tensors draw nothing, so a generator that starts anew was seeded. With each op that draws, the generator is
    advanced here; so if it is where it was before such an op, somebody put it back.
    """

    def __init__(self) -> None:
        self.generators = torchs_generators()
        with without_modes():
            self.before = [(generator.initial_seed(), generator.get_state()) for generator in self.generators]
        self.states: list[Tensor] = []

    def __enter__(self) -> GeneratorWatch:
        return self

    def __exit__(self, *error: object) -> None:
        """Undo what was seeded and drawn here, but not what another thread has drawn meanwhile."""
        with without_modes():
            if self._misuse() or (self.states and torch.equal(TORCHS_GENERATOR.get_state(), self.states[-1])):
                for generator, (_, state) in zip(self.generators, self.before, strict=True):
                    generator.set_state(state)

    def draw(self) -> None:
        """Advance the generator for an op that draws; raise Untraceable if it was seeded or put back before."""
        self.check()
        with without_modes():
            self.states += [] if self.states else [self.before[0][1]]
            torch.rand(1, generator=TORCHS_GENERATOR, device="cpu")
            self.states.append(TORCHS_GENERATOR.get_state())

    def check(self) -> None:
        """Raise Untraceable if a generator was seeded or put back."""
        with without_modes():
            if misuse := self._misuse():
                raise Untraceable(misuse)

    def _misuse(self) -> str | None:
        for generator, (seed, state) in zip(self.generators, self.before, strict=True):
            fresh = torch.Generator(generator.device).manual_seed(seed).get_state()
            now = generator.get_state()
            if generator.initial_seed() != seed or (torch.equal(now, fresh) and not torch.equal(now, state)):
                return "it seeds torch's random numbers itself"
        now = TORCHS_GENERATOR.get_state()
        if any(torch.equal(now, state) for state in self.states[:-1]):
            return "it draws once more from a state of torch's random numbers that it put back"
        return None


def drawn(graph: Graph) -> list[Node]:
    """Return the ops of a graph that draw random numbers, with or without a generator among its inputs."""
    generators = set(graph.reads.get(GENERATORS, ()))
    return [
        node
        for node in graph.nodes
        if node.kwargs.get("generator") in generators or draws(node.op, node.args, dict(node.kwargs))
    ]


# Tensors that a random op has filled in place, as a new tensor in the same order in memory. The op without its `_`
# would write another order, and so give each number to another element: a mask of transposed data shows it.
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("filled(Tensor like, str name, float[] numbers) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_FILLED: Any = torch.ops.fpipe.filled.default
_aten: Any = torch.ops.aten
# Those whose arguments are floats, which is what `filled` takes.
_FILLS = ("bernoulli_", "uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default)


def fill(like: Tensor, name: str, numbers: list[float], generator: torch.Generator | None = None) -> Tensor:
    """Fill an empty tensor by one of its random methods."""
    return getattr(like, name)(*numbers, generator=generator)


def _filled(like: Tensor, name: str, numbers: list[float]) -> Tensor:
    return fill(_empty(like, name, numbers), name, numbers)


def _empty(like: Tensor, name: str, numbers: list[float]) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


_LIBRARY.impl("filled", _filled, "CompositeExplicitAutograd")
torch.library.register_fake("fpipe::filled", _empty, lib=_LIBRARY)


def without_fills(traced: fx.GraphModule) -> None:
    """Replace what fills an empty tensor, and nothing else does, by an op that makes it."""
    for node in traced.graph.nodes:
        filling = _filling(node)
        if filling is not None:
            like, name, numbers = filling
            with traced.graph.inserting_after(node):
                new = traced.graph.call_function(_FILLED, (like, name, numbers))
            new.meta = node.meta
            with node.meta["val"].fake_mode:  # what is filled is another tensor than the empty one
                like.meta["val"] = _empty(node.meta["val"], "", [])
            node.replace_all_uses_with(new)
            for user in [user for user in like.users if user not in (new, node)]:
                user.replace_input_with(like, new)
            traced.graph.erase_node(node)


def _filling(node: fx.Node) -> tuple[fx.Node, str, list[float]] | None:
    """Return the empty tensor that a node fills before anybody reads it, the random method and its numbers."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name not in _FILLS or node.kwargs.get("generator") is not None:
        return None
    like, *numbers = node.args
    if not isinstance(like, fx.Node) or like.target not in _EMPTY or next(iter(like.users)) is not node:
        return None
    plain = [float(number) for number in numbers if isinstance(number, int | float)]
    return (like, name, plain) if len(plain) == len(numbers) else None


def keyed(graph: Graph) -> Graph:
    """Let a graph that draws read a generator for each device."""
    drawing = {node.name for node in drawn(graph)}
    names: dict[str, Name] = {}

    def with_generator(node: Node) -> Node:
        if node.name not in drawing:
            return node
        fact = graph.facts.get(node.name) or next(graph.facts[name] for name in node.reads if name in graph.facts)
        device = str(fact.aval.device)
        name = names.setdefault(device, Name(f"{GENERATORS}_{device.replace(':', '_')}"))
        return Node(node.name, _with_generator(node.op), node.args, {**node.kwargs, "generator": name})

    nodes = tuple(map(with_generator, graph.nodes))
    reads = {GENERATORS: tuple(names.values())} if names else {}
    return replace(graph, nodes=nodes, reads={**graph.reads, **reads}, drawn_on=tuple(names))


@lru_cache
def _with_generator(op: Any) -> Callable[..., Any]:
    """Return an op, or its overload, that takes a generator; if there is none, an adapter that moves torch's own."""
    if op is _FILLED:
        return fill
    wanted = [word for word in _words(op) if word != "generator"]
    for overload in (op, *(getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())):
        words = _words(overload)
        if "generator" in words and [word for word in words if word != "generator"] == wanted:
            return overload
    return GeneratorAdapter(op)


def _words(op: Any) -> list[str]:
    return [argument.name for argument in arguments_of(op)]


class GeneratorAdapter:
    """Lets an op that draws only from torch's own generator draw from the state of another."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__: str = op.__name__
        self.tags: Any = op.tags

    def __call__(self, *args: Any, generator: torch.Generator, **kwargs: Any) -> Any:
        """Call the op on the numbers that the generator would give."""
        device = generator.device
        torchs = TORCHS_GENERATOR if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        with seeded(0, ""):
            torchs.set_state(generator.get_state())
            result = self.op(*args, **kwargs)
            generator.set_state(torchs.get_state())
        return result
