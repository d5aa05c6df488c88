"""Let each op of a graph that draws random numbers draw from a generator among the graph's inputs.

    mask = bernoulli(x, 0.9)    --> with_generator_inputs -->    mask = bernoulli(x, 0.9, generator=rng)

A generator with the seed of torch's own gives the same numbers, as long as the ops draw in the same order.
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
from fpipe.meaning.purity.keys import TORCH_CPU_GENERATOR, lock_torch_generators, torch_generators, with_seed
from fpipe.torch_internals import OpOverload, schema_arguments
from fpipe.torch_private.dispatch import without_modes


def draws_random_numbers(op: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an op draws random numbers; dropout with p=0 or p=1 does not."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    values = {argument.name: argument.default_value for argument in schema_arguments(op)}
    values |= dict(zip(values, args, strict=False)) | kwargs
    # Above autograd dropout returns early for p=0 and p=1. Below it, native_dropout draws for every p.
    if op.overloadpacket in _DROPOUTS and values["p"] in (0, 1):
        return False
    return values.get("dropout_p") != 0.0 and values.get("training") is not False and values.get("train") is not False


_DROPOUT_NAMES = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_DROPOUTS = frozenset(getattr(torch.ops.aten, op) for name in _DROPOUT_NAMES for op in (name, f"{name}_"))


def refuse_unkeyed_randomness(calls: list[fx.Node], forward_call_count: int) -> None:
    """Raise Untraceable if an op draws from a generator of its own, or in the backward.

    The backward begins after the first `forward_call_count` calls.
    """
    for position, node in enumerate(calls):
        if draws_random_numbers(node.target, node.args, dict(node.kwargs)):
            if position >= forward_call_count:
                raise Untraceable(f"its backward draws random numbers ({node.target}), as a checkpoint inside it does")
            if node.kwargs.get("generator") is not None:
                raise Untraceable(f"it draws from a generator of its own ({node.target})")


class GeneratorWatch:
    """Detects that a function seeds torch's generators or restores an earlier state.

    Fake tensors draw nothing, so only a seed moves a generator to the start of its sequence. The watch itself advances
    the generator at each op that draws; if the generator is then at an earlier state, somebody restored it.
    """

    def __init__(self) -> None:
        self.generators = torch_generators()
        with without_modes():
            self.initial_states = [(generator.initial_seed(), generator.get_state()) for generator in self.generators]
        self.draw_states: list[Tensor] = []

    def __enter__(self) -> GeneratorWatch:
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the generators if only the watched function moved them, not if another thread drew in between."""
        with without_modes():
            # The last state that the watch itself left is still there: nobody else has drawn.
            if self._describe_misuse() or (
                self.draw_states and torch.equal(TORCH_CPU_GENERATOR.get_state(), self.draw_states[-1])
            ):
                for generator, (_, state) in zip(self.generators, self.initial_states, strict=True):
                    generator.set_state(state)

    def advance(self) -> None:
        """Advance the generator for an op that draws; raise Untraceable if it was seeded or restored before."""
        self.refuse_misuse()
        with without_modes():
            self.draw_states += [] if self.draw_states else [self.initial_states[0][1]]
            torch.rand(1, generator=TORCH_CPU_GENERATOR, device="cpu")
            self.draw_states.append(TORCH_CPU_GENERATOR.get_state())

    def refuse_misuse(self) -> None:
        """Raise Untraceable if a generator was seeded or restored."""
        with without_modes():
            if misuse := self._describe_misuse():
                raise Untraceable(misuse)

    def _describe_misuse(self) -> str | None:
        """Return how the watched function misused torch's generators; None if it did not."""
        for generator, (seed, state) in zip(self.generators, self.initial_states, strict=True):
            seeded_state = torch.Generator(generator.device).manual_seed(seed).get_state()
            current_state = generator.get_state()
            # Another seed, or the same seed anew: the state is the first of the seed, which it was not before.
            if generator.initial_seed() != seed or (
                torch.equal(current_state, seeded_state) and not torch.equal(current_state, state)
            ):
                return "it seeds torch's random numbers itself"
        current_state = TORCH_CPU_GENERATOR.get_state()
        if any(torch.equal(current_state, state) for state in self.draw_states[:-1]):
            return "it restores a state of torch's random numbers and draws from it again"
        return None


def random_nodes_of(graph: Graph) -> list[Node]:
    """Return the ops of a graph that draw random numbers, from torch's generators or from inputs of the graph."""
    generator_names = set(graph.reads.get(GENERATORS, ()))
    return [
        node
        for node in graph.nodes
        if node.kwargs.get("generator") in generator_names
        or draws_random_numbers(node.op, node.args, dict(node.kwargs))
    ]


# `fpipe::filled` is an in-place random op on an empty tensor as one functional op, which keeps the strides of that
# tensor. torch's own functional twin (`bernoulli` of `bernoulli_`) writes contiguous strides. Numbers are drawn in
# memory order, so each element would get another number: a dropout mask of transposed data shows it.
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("filled(Tensor like, str name, float[] numbers) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_FILLED_OP: Any = torch.ops.fpipe.filled.default
_aten: Any = torch.ops.aten
# The random methods whose arguments are floats, as the schema of `filled` wants them.
_FILL_METHODS = ("bernoulli_", "uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_EMPTY_OPS = (_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default)


def fill(tensor: Tensor, method: str, numbers: list[float], generator: torch.Generator | None = None) -> Tensor:
    """Fill an empty tensor by one of its random methods."""
    return getattr(tensor, method)(*numbers, generator=generator)


def _fill_new(layout: Tensor, method: str, numbers: list[float]) -> Tensor:
    return fill(_empty_with_layout(layout, method, numbers), method, numbers)


def _empty_with_layout(layout: Tensor, method: str, numbers: list[float]) -> Tensor:
    return torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=layout.device)


_LIBRARY.impl("filled", _fill_new, "CompositeExplicitAutograd")
torch.library.register_fake("fpipe::filled", _empty_with_layout, lib=_LIBRARY)


def replace_fills(traced: fx.GraphModule) -> None:
    """Replace each pair of an empty tensor and the random op that fills it by one functional op.

    e = empty_like(x); e.bernoulli_(0.9)        -->        m = filled(e, "bernoulli_", [0.9])

    `e` stays only for its shape, strides and device.
    """
    for node in traced.graph.nodes:
        fill_arguments = _parse_fill(node)
        if fill_arguments is not None:
            empty_node, method, numbers = fill_arguments
            with traced.graph.inserting_after(node):
                filled_node = traced.graph.call_function(_FILLED_OP, (empty_node, method, numbers))
            filled_node.meta = node.meta
            # In place, both shared one fake tensor; now the filled tensor has memory of its own.
            with node.meta["val"].fake_mode:
                empty_node.meta["val"] = _empty_with_layout(node.meta["val"], "", [])
            node.replace_all_uses_with(filled_node)
            for user in [user for user in empty_node.users if user not in (filled_node, node)]:
                user.replace_input_with(empty_node, filled_node)
            traced.graph.erase_node(node)


def _parse_fill(node: fx.Node) -> tuple[fx.Node, str, list[float]] | None:
    """Return the empty tensor that a node is the first to fill, the random method and its numbers; None for others."""
    method = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if method not in _FILL_METHODS or node.kwargs.get("generator") is not None:
        return None
    empty_node, *numbers = node.args
    if (
        not isinstance(empty_node, fx.Node)
        or empty_node.target not in _EMPTY_OPS
        or next(iter(empty_node.users)) is not node
    ):
        return None
    floats = [float(number) for number in numbers if isinstance(number, int | float)]
    return (empty_node, method, floats) if len(floats) == len(numbers) else None


def with_generator_inputs(graph: Graph) -> Graph:
    """Return the graph with one generator input for each device on which it draws random numbers."""
    random_names = {node.name for node in random_nodes_of(graph)}
    generator_by_device: dict[str, Name] = {}

    def with_generator(node: Node) -> Node:
        if node.name not in random_names:
            return node
        # An op with several results has no fact of its own: take the device of an input.
        fact = graph.facts.get(node.name) or next(graph.facts[name] for name in node.reads if name in graph.facts)
        device = str(fact.aval.device)
        name = generator_by_device.setdefault(device, Name(f"{GENERATORS}_{device.replace(':', '_')}"))
        return Node(node.name, _overload_with_generator(node.op), node.args, {**node.kwargs, "generator": name})

    nodes = tuple(map(with_generator, graph.nodes))
    reads = {GENERATORS: tuple(generator_by_device.values())} if generator_by_device else {}
    return replace(graph, nodes=nodes, reads={**graph.reads, **reads}, generator_devices=tuple(generator_by_device))


@lru_cache
def _overload_with_generator(op: Any) -> Callable[..., Any]:
    """Return the overload of an op that takes a generator, or an adapter that moves the state of torch's own."""
    if op is _FILLED_OP:
        return fill
    other_names = [argument_name for argument_name in _argument_names(op) if argument_name != "generator"]
    for overload in (op, *(getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())):
        names = _argument_names(overload)
        if "generator" in names and [name for name in names if name != "generator"] == other_names:
            return overload
    return GeneratorAdapter(op)


def _argument_names(op: Any) -> list[str]:
    return [argument.name for argument in schema_arguments(op)]


class GeneratorAdapter:
    """A random op without a generator argument, which draws from the state of a given generator."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__: str = op.__name__
        self.tags: Any = op.tags

    def __call__(self, *args: Any, generator: torch.Generator, **kwargs: Any) -> Any:
        """Call the op while torch's generator has the state of this one, and advance this one."""
        device = generator.device
        if device.type != "cpu":
            return self._call_on_accelerator(torch.get_device_module(device), generator, *args, **kwargs)
        with with_seed(0, ""):
            TORCH_CPU_GENERATOR.set_state(generator.get_state())
            result = self.op(*args, **kwargs)
            generator.set_state(TORCH_CPU_GENERATOR.get_state())
        return result

    def _call_on_accelerator(self, module: Any, generator: torch.Generator, *args: Any, **kwargs: Any) -> Any:
        # There torch's generator can share the state of another. A graph that is captured cannot copy a state.
        torch_generator = module.default_generators[generator.device.index or 0]
        with lock_torch_generators():
            torch_state = torch_generator.graphsafe_get_state()
            torch_generator.graphsafe_set_state(generator)
            try:
                return self.op(*args, **kwargs)
            finally:
                torch_generator.graphsafe_set_state(torch_state)
