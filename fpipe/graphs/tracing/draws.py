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
    """Whether a call of an op draws random numbers: dropout that keeps everything, or nothing, does not."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    said = {argument.name: argument.default_value for argument in arguments_of(op)}
    said |= dict(zip(said, args, strict=False)) | kwargs
    # These return early. What they call below autograd, native_dropout, draws for each p.
    if op.overloadpacket in _DROPOUTS and said["p"] in (0, 1):
        return False
    return said.get("dropout_p") != 0.0 and said.get("training") is not False and said.get("train") is not False


_DROPOUTS = frozenset(
    getattr(torch.ops.aten, f"{kind}dropout{in_place}")
    for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for in_place in ("", "_")
)


def refuse_hidden(calls: list[fx.Node], forward: int) -> None:
    """Numbers that follow from something else than the key, or are drawn in a backward.

    `forward` is how many of the calls are the function's own.
    """
    for at, node in enumerate(calls):
        if draws(node.target, node.args, dict(node.kwargs)):
            if at >= forward:
                raise Untraceable(f"its backward draws random numbers ({node.target}), as a checkpoint inside it does")
            if node.kwargs.get("generator") is not None:
                raise Untraceable(f"it draws from a generator of its own ({node.target})")


class Unseeded:
    """Whether torch's own random numbers go on as they do by themselves, which is all that a trace can tell of them.

    Fake tensors draw nothing, so a generator that starts anew was seeded; others that draw only move it on. With each
    op that draws it is moved on here, so one that is where it was before such an op was put back.
    """

    def __init__(self) -> None:
        self.generators = torchs_generators()
        with without_modes():
            self.before = [(each.initial_seed(), each.get_state()) for each in self.generators]
        self.left: list[Tensor] = []

    def __enter__(self) -> Unseeded:
        return self

    def __exit__(self, *error: object) -> None:
        """Undo what was seeded, and drawn here; not what another thread has drawn meanwhile."""
        with without_modes():
            if self._odd() or (self.left and torch.equal(TORCHS_GENERATOR.get_state(), self.left[-1])):
                for generator, (_, state) in zip(self.generators, self.before, strict=True):
                    generator.set_state(state)

    def draw(self) -> None:
        """Raise Untraceable if what is drawn now does not come after what was drawn before."""
        self.check()
        with without_modes():
            self.left += [] if self.left else [self.before[0][1]]
            torch.rand(1, generator=TORCHS_GENERATOR, device="cpu")
            self.left.append(TORCHS_GENERATOR.get_state())

    def check(self) -> None:
        """Raise Untraceable if one was seeded or put back."""
        with without_modes():
            if odd := self._odd():
                raise Untraceable(odd)

    def _odd(self) -> str | None:
        for generator, (seed, state) in zip(self.generators, self.before, strict=True):
            fresh = torch.Generator(generator.device).manual_seed(seed).get_state()
            now = generator.get_state()
            if generator.initial_seed() != seed or (torch.equal(now, fresh) and not torch.equal(now, state)):
                return "it seeds torch's random numbers itself"
        now = TORCHS_GENERATOR.get_state()
        if any(torch.equal(now, one) for one in self.left[:-1]):
            return "it draws once more from a state of torch's random numbers that it put back"
        return None


def drawn(graph: Graph) -> list[Node]:
    """The ops of a graph that draw random numbers, those that are handed a generator already too."""
    handed = set(graph.reads.get(GENERATORS, ()))
    return [
        node
        for node in graph.nodes
        if node.kwargs.get("generator") in handed or draws(node.op, node.args, dict(node.kwargs))
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
    """An empty tensor, filled by one of its random methods."""
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
    """The empty tensor that a node fills with random numbers before anybody reads it, by which method, with what."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name not in _FILLS or node.kwargs.get("generator") is not None:
        return None
    like, *numbers = node.args
    if not isinstance(like, fx.Node) or like.target not in _EMPTY or next(iter(like.users)) is not node:
        return None
    plain = [float(number) for number in numbers if isinstance(number, int | float)]
    return (like, name, plain) if len(plain) == len(numbers) else None


def keyed(graph: Graph) -> Graph:
    """The graph with a generator for each device as an input, if it draws."""
    drawing = {node.name for node in drawn(graph)}
    names: dict[str, Name] = {}

    def given(node: Node) -> Node:
        if node.name not in drawing:
            return node
        fact = graph.facts.get(node.name) or next(graph.facts[name] for name in node.reads if name in graph.facts)
        device = str(fact.aval.device)
        name = names.setdefault(device, Name(f"{GENERATORS}_{device.replace(':', '_')}"))
        return Node(node.name, _with_generator(node.op), node.args, {**node.kwargs, "generator": name})

    nodes = tuple(map(given, graph.nodes))
    reads = {GENERATORS: tuple(names.values())} if names else {}
    return replace(graph, nodes=nodes, reads={**graph.reads, **reads}, drawn_on=tuple(names))


@lru_cache
def _with_generator(op: Any) -> Callable[..., Any]:
    """An op, or its overload, that takes a generator; where there is none, torch's own stands in for it."""
    if op is _FILLED:
        return fill
    wanted = [word for word in _words(op) if word != "generator"]
    for one in (op, *(getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())):
        words = _words(one)
        if "generator" in words and [word for word in words if word != "generator"] == wanted:
            return one
    return GeneratorAdapter(op)


def _words(op: Any) -> list[str]:
    return [argument.name for argument in arguments_of(op)]


class GeneratorAdapter:
    """Lets an op that draws from torch's own generator only take another: it draws from that one's state."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__: str = op.__name__
        self.tags: Any = op.tags

    def __call__(self, *args: Any, generator: torch.Generator, **kwargs: Any) -> Any:
        """The op, on the numbers that the generator would give."""
        device = generator.device
        torchs = TORCHS_GENERATOR if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        with seeded(0, ""):
            torchs.set_state(generator.get_state())
            made = self.op(*args, **kwargs)
            generator.set_state(torchs.get_state())
        return made
