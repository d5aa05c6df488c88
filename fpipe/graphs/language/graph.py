"""Hold a traced function, forward and backward, as a list of torch ops with named values, without its Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.language.labels import GENERATORS, is_cotangent
from fpipe.meaning.purity.own_memory import is_check, span
from fpipe.meaning.purity.sharded import Sharding, is_collective, local_of, sharding_of
from fpipe.torch_internals import storage_of


class Name(str):
    """The name of a tensor (or of an op's list of tensors) in a graph; any other argument of an op is itself.

    >>> Node(Name("b"), torch.ops.aten.add.Tensor, (Name("a"), 1), {}).reads
    ['a']
    """

    __slots__ = ()


class Aval(NamedTuple):
    """An abstract value: a tensor without data, and whether a gradient of it is wanted; of a DTensor that of
    the shard, and how it is put together."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wants: bool = False
    sharding: Sharding | None = None

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """A tensor like this, there or on another device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class Fact(NamedTuple):
    """A tensor's aval, and the storage it is in: tensors of one number share it; `bytes` is its size.

    `lazy`: whether it is to be conjugated, or negated, by whoever reads it.
    """

    aval: Aval
    storage: int
    bytes: int
    offset: int = 0
    lazy: tuple[bool, bool] = (False, False)


class _NodeFields(NamedTuple):
    name: Name
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Node(_NodeFields):
    """One call of a torch op, or the k-th part of a list: `name = op(*args, **kwargs)`."""

    @cached_property
    def reads(self) -> list[Name]:
        """The values it reads, in order."""
        return [*_names(self.args), *_names(self.kwargs.values())]


@dataclass(frozen=True, eq=False)
class Graph:
    """Ops in an order that can be run, and what a traced function reads and writes, label by label.

    Attributes:
        nodes: the ops; none writes what it reads.
        facts: of each tensor, what is known of it.
        constants: tensors that the function holds on to.
        reads: `params`, `params:1`, `x`, `target`, `dy` and so on: the leaves' names, None where a leaf is no tensor.
        writes: `y`, `loss`, `g`, `dx` and so on: a name, or a leaf that is no tensor.
        ran: the ops as they were traced, by name.
        drawn_on: the devices of the generators that it reads under the label `rng`.
    """

    nodes: tuple[Node, ...]
    facts: Mapping[Name, Fact]
    constants: Mapping[Name, Tensor]
    reads: Mapping[str, tuple[Any, ...]]
    writes: Mapping[str, tuple[Any, ...]]
    ran: tuple[str, ...] = ()
    drawn_on: tuple[str, ...] = ()
    _made: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Call `make` once for this key, and keep its result for as long as the graph lives."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def collective(self) -> bool:
        """Whether other processes have to run it too."""
        return any(is_collective(node.op) for node in self.nodes)

    def inputs(self) -> Iterator[Name]:
        """The names of all that it reads."""
        return (name for names in self.reads.values() for name in names if name is not None)

    def behind(self, roots: Iterable[Any], known: Collection[Name] = ()) -> set[Name]:
        """The ops that `roots` need, directly or through others, those `known` aside."""
        written = {node.name: node for node in self.nodes}
        found: set[Name] = set()
        todo = [name for name in roots if isinstance(name, Name)]
        while todo:
            name = todo.pop()
            if name in written and name not in found and name not in known:
                found.add(name)
                todo.extend(written[name].reads)
        return found


@dataclass(frozen=True)
class Outline:
    """The outline of a function: what it reads and writes, and what it ran.

    Attributes:
        reads, writes: a fact for each tensor leaf, by label; other leaves as they are. Facts of one storage number
            share their memory.
        ran, numbers: the ops, by name, and the numbers that they were handed.
        python: whether its gradient is partly Python, which may ask what is wanted of it.
        specs: the containers around what it writes.
    """

    reads: Mapping[str, Sequence[Any]]
    writes: Mapping[str, Sequence[Any]]
    ran: tuple[str, ...]
    numbers: tuple[Any, ...]
    python: bool
    specs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def avals(self, label: str) -> tuple[Any, ...]:
        """The avals of what is written under a label, other leaves as they are."""
        return tuple(leaf.aval if isinstance(leaf, Fact) else leaf for leaf in self.writes[label])


def checks(graph: Graph) -> tuple[list[Name], list[Name]]:
    """The ops that are there for the error that they may raise: those of the forward, and those of the way back."""
    seeds = {name for label, leaves in graph.reads.items() if is_cotangent(label) for name in leaves}
    found: tuple[list[Name], list[Name]] = [], []
    back = False
    for node in graph.nodes:
        back = back or not seeds.isdisjoint(node.reads)
        if is_check(node.op):
            found[back].append(node.name)
    return found


def aval(tensor: Tensor) -> Aval:
    """The abstract value of a tensor."""
    own = local_of(tensor)
    return Aval(tuple(own.shape), own.stride(), own.dtype, own.device, tensor.requires_grad, sharding_of(tensor))


def fact(tensor: Tensor, numbers: dict[int, int]) -> Fact:
    """The fact of a tensor; `numbers` are those given to storages so far."""
    own, known = local_of(tensor), aval(tensor)
    size, offset = own.untyped_storage().nbytes(), int(own.storage_offset())
    number = numbers.setdefault(storage_of(own), fresh_storage())
    return Fact(known, number, size, offset, (own.is_conj(), own.is_neg()))


def in_own_storage(known: Aval) -> Fact:
    """The fact of a tensor in a storage of its own."""
    return Fact(known, fresh_storage(), span(known.shape, known.stride) * known.dtype.itemsize)


def renamed(args: Any, names: Mapping[Name, Any]) -> Any:
    """Arguments of an op with other names in them."""
    if isinstance(args, Name):
        return names.get(args, args)
    if isinstance(args, list | tuple):
        return type(args)(renamed(arg, names) for arg in args)
    return args


def on_meta(node: Node, graph: Graph) -> tuple[Any, dict[str, Any]]:
    """The arguments of an op, tensors without data, and None for what is none."""
    tensors = {name: graph.facts[name].aval.empty("meta") if name in graph.facts else None for name in node.reads}
    return renamed(node.args, tensors), {word: renamed(arg, tensors) for word, arg in node.kwargs.items()}


def rewritten(node: Node, names: Mapping[Name, Any], name: Name | None = None) -> Node:
    """A node that reads (and if asked, writes) other names."""
    kwargs = {word: renamed(arg, names) for word, arg in node.kwargs.items()}
    return Node(node.name if name is None else name, node.op, renamed(node.args, names), kwargs)


_FRESH = count()


def fresh_storage() -> int:
    """A number that no storage has yet."""
    return next(_FRESH)


def without_repeated_views(graph: Graph) -> Graph:
    """Each view of a tensor once: `t(t(w))` is w. A view computes nothing, so the bits are the same."""
    first: dict[Any, Name] = {}
    names: dict[Name, Name] = {}
    kept: list[Node] = []
    for name in (one for one in graph.inputs() if one in graph.facts):  # a generator is no tensor
        first.setdefault(_place(graph.facts[name]), name)
    for node in graph.nodes:
        new = rewritten(node, names)
        fact = graph.facts.get(node.name)
        known = first.setdefault(_place(fact), node.name) if fact is not None else node.name
        if known is node.name:
            kept.append(new)
        else:
            names[node.name] = known
    writes = {label: renamed(leaves, names) for label, leaves in graph.writes.items()}
    return replace(graph, nodes=tuple(kept), writes=writes)


def _place(fact: Fact) -> Any:
    return fact.storage, fact.offset, fact.lazy, fact.aval[:4]


def inlined(first: Graph, then: Graph) -> Graph:
    """`then(first)` as one graph: what `first` writes as `y` is what `then` reads as `x`; on the way back `dx` is `dy`.

    x -> first -> y -> then -> loss     dloss -> then -> dx = dy -> first -> dx, g
    """
    back = dict(zip(first.reads["dy"], then.writes["dx"], strict=True))
    names: dict[Name, Any] = {name: Name(f"loss_{name}") for name in (*then.inputs(), *(n.name for n in then.nodes))}
    names |= {name: Name(f"loss_{name}") for name in then.constants}
    names |= {name: name for name in then.reads.get(GENERATORS, ())}  # the loss draws on from where the stage ended
    handed = {name: y for name, y in zip(then.reads["x"], first.writes["y"], strict=True) if name is not None}
    names |= handed
    up = {seed: renamed(dx, names) for seed, dx in back.items() if seed is not None}
    # A tensor that one graph hands to the other has one storage in both.
    same = {then.facts[name].storage: first.facts[y].storage for name, y in handed.items()}
    facts = {names.get(name, name): _moved(fact, same) for name, fact in then.facts.items() if name in names}
    same = {first.facts[seed].storage: facts[dx].storage for seed, dx in up.items()}
    facts |= {name: _moved(fact, same) for name, fact in first.facts.items() if name not in up}
    end = forward_end(first)
    own = [rewritten(node, up) for node in first.nodes]
    others = [rewritten(node, names, names[node.name]) for node in then.nodes]
    reads = {label: renamed(leaves, names) for label, leaves in then.reads.items() if label != "x"}
    drawn_on = tuple(dict.fromkeys((*first.drawn_on, *then.drawn_on)))
    if drawn_on:
        reads[GENERATORS] = tuple(dict.fromkeys((*first.reads.get(GENERATORS, ()), *reads.get(GENERATORS, ()))))
    writes = {label: renamed(leaves, names) for label, leaves in then.writes.items() if label != "dx"}
    return Graph(
        (*own[:end], *others, *own[end:]),
        facts,
        {**first.constants, **{names[name]: tensor for name, tensor in then.constants.items()}},
        {label: leaves for label, leaves in first.reads.items() if label != "dy"} | reads,
        {label: renamed(leaves, up) for label, leaves in first.writes.items()} | writes,
        drawn_on=drawn_on,
    )


def forward_end(graph: Graph) -> int:
    """The place behind the last op that a forward needs; numbers that nobody reads are drawn too, and checks made."""
    needed = graph.behind(leaf for label in ("y", "carry", "state") for leaf in graph.writes.get(label, ()))
    needed |= {node.name for node in graph.nodes if node.kwargs.get("generator") in graph.reads.get(GENERATORS, ())}
    needed |= {*checks(graph)[0]}
    return 1 + max((at for at, node in enumerate(graph.nodes) if node.name in needed), default=-1)


def _moved(fact: Fact, storages: Mapping[int, int]) -> Fact:
    return fact._replace(storage=storages.get(fact.storage, fact.storage))


def _names(args: Iterable[Any]) -> Iterator[Name]:
    for arg in args:
        if isinstance(arg, Name):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _names(arg)
