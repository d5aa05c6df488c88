"""Hold a traced function, forward and backward, as a list of torch ops with named values, without its Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.language.labels import GENERATORS, is_cotangent
from fpipe.meaning.purity.sharded import Sharding, is_collective, local_shard, sharding_of
from fpipe.meaning.purity.write_guard import is_check, storage_span
from fpipe.torch_internals import as_expression, storage_of


class Name(str):
    """The name of a tensor (or of an op's list of tensors) in a graph; any other argument of an op is itself.

    >>> Node(Name("b"), torch.ops.aten.add.Tensor, (Name("a"), 1), {}).reads
    ['a']
    """

    __slots__ = ()


class Aval(NamedTuple):
    """An abstract tensor: everything but its data, and whether its gradient is wanted.

    Of a DTensor these are the properties of the local shard, and `sharding` says how shards make up the whole.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wants_grad: bool = False
    sharding: Sharding | None = None

    @property
    def is_open(self) -> bool:
        """Whether a size or stride is an expression of symbols."""
        return not all(isinstance(size, int) for size in (*self.shape, *self.stride))

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return a tensor like this, with any data, here or on another device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class Fact(NamedTuple):
    """An abstract tensor and its memory.

    Attributes:
        aval: the abstract tensor.
        storage: the number of its storage; tensors with one number share memory.
        bytes: the size of the storage.
        offset: where in the storage it begins, in elements.
        lazy: whether readers must conjugate it, and whether they must negate it (torch's lazy bits).
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
    """A call of a torch op, or `getitem` of an op's list of results: `name = op(*args, **kwargs)`."""

    @cached_property
    def reads(self) -> list[Name]:
        """Return the names that it reads, in order."""
        return [*_names_in(self.args), *_names_in(self.kwargs.values())]


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced function: its ops in an order that can be run, and the names of its arguments and results.

    Attributes:
        nodes: the ops; none writes what it reads.
        facts: the fact of each tensor.
        constants: tensors that the function holds on to.
        reads: for a label (`params`, `params:1`, `x`, `target`, `dy`), a name for each leaf, None for one that is no
            tensor.
        writes: for a label (`y`, `loss`, `g`, `dx`), a name for each leaf, or the leaf itself if it is no tensor.
        ran: the names of the ops as they were traced.
        generator_devices: the devices of the generators that it reads under the label `rng`.
    """

    nodes: tuple[Node, ...]
    facts: Mapping[Name, Fact]
    constants: Mapping[Name, Tensor]
    reads: Mapping[str, tuple[Any, ...]]
    writes: Mapping[str, tuple[Any, ...]]
    ran: tuple[str, ...] = ()
    generator_devices: tuple[str, ...] = ()
    _cache: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    def compute_once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Call `compute` once for this key, and keep its result for as long as the graph lives."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    @cached_property
    def is_collective(self) -> bool:
        """Whether it has collectives, so that other processes must run it too."""
        return any(is_collective(node.op) for node in self.nodes)

    def inputs(self) -> Iterator[Name]:
        """Yield the names of all tensors that it reads."""
        return (name for names in self.reads.values() for name in names if name is not None)

    def ops_needed_by(self, roots: Iterable[Any], excluded: Collection[Name] = ()) -> set[Name]:
        """Return the ops that `roots` need, directly or through others; the search stops at `excluded` ones."""
        node_by_name = {node.name: node for node in self.nodes}
        needed: set[Name] = set()
        pending = [name for name in roots if isinstance(name, Name)]
        while pending:
            name = pending.pop()
            if name in node_by_name and name not in needed and name not in excluded:
                needed.add(name)
                pending.extend(node_by_name[name].reads)
        return needed


@dataclass(frozen=True)
class Outline:
    """A function seen from outside: the facts of its arguments and results, and the ops that it ran.

    Attributes:
        reads, writes: by label, a fact for each tensor leaf, or the leaf itself. Facts with one storage number share
            memory.
        ran, numbers: the names of its ops, and the numbers that they were handed.
        has_python_gradient: whether part of its gradient is Python, which may ask which gradients are wanted.
        specs: by label, the containers around its results.
    """

    reads: Mapping[str, Sequence[Any]]
    writes: Mapping[str, Sequence[Any]]
    ran: tuple[str, ...]
    numbers: tuple[Any, ...]
    has_python_gradient: bool
    specs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def avals(self, label: str) -> tuple[Any, ...]:
        """Return the avals of the results under a label; leaves that are no tensors are themselves."""
        return tuple(leaf.aval if isinstance(leaf, Fact) else leaf for leaf in self.writes[label])


def checks_by_direction(graph: Graph) -> tuple[list[Name], list[Name]]:
    """Return the ops that only check their arguments: (of the forward, of the backward)."""
    # Nodes are in the order in which they ran: the backward begins with the first reader of a cotangent.
    seeds = {name for label, leaves in graph.reads.items() if is_cotangent(label) for name in leaves}
    names_by_direction: tuple[list[Name], list[Name]] = [], []
    is_backward = False
    for node in graph.nodes:
        is_backward = is_backward or not seeds.isdisjoint(node.reads)
        if is_check(node.op):
            names_by_direction[is_backward].append(node.name)
    return names_by_direction


def aval_of_tensor(tensor: Tensor) -> Aval:
    """Return the abstract tensor of a tensor."""
    local = local_shard(tensor)
    shape, stride = tuple(map(as_expression, local.shape)), tuple(map(as_expression, local.stride()))
    return Aval(shape, stride, local.dtype, local.device, tensor.requires_grad, sharding_of(tensor))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape whose last dimension is innermost, without gaps."""
    return tuple(accumulate(shape[:0:-1], lambda stride, size: stride * (size or 1), initial=1))[::-1]


def fact_of_tensor(tensor: Tensor, number_by_storage: dict[int, int]) -> Fact:
    """Return the fact of a tensor. `number_by_storage` has the storage numbers by address so far, and is extended."""
    local, tensor_aval = local_shard(tensor), aval_of_tensor(tensor)
    size, offset = as_expression(local.untyped_storage().nbytes()), as_expression(local.storage_offset())
    number = number_by_storage.setdefault(storage_of(local), fresh_storage())
    return Fact(tensor_aval, number, size, offset, (local.is_conj(), local.is_neg()))


def fact_in_own_storage(aval: Aval) -> Fact:
    """Return the fact of a tensor that is alone in its storage."""
    return Fact(aval, fresh_storage(), storage_span(aval.shape, aval.stride) * aval.dtype.itemsize)


def substitute_names(arguments: Any, replacements: Mapping[Name, Any]) -> Any:
    """Replace names in the arguments of an op, by other names or by values."""
    if isinstance(arguments, Name):
        return replacements.get(arguments, arguments)
    if isinstance(arguments, list | tuple):
        return type(arguments)(substitute_names(argument, replacements) for argument in arguments)
    return arguments


def meta_arguments(node: Node, graph: Graph) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an op with meta tensors for names, and None for names of other things."""
    meta_tensors = {name: graph.facts[name].aval.empty("meta") if name in graph.facts else None for name in node.reads}
    kwargs = {keyword: substitute_names(argument, meta_tensors) for keyword, argument in node.kwargs.items()}
    return substitute_names(node.args, meta_tensors), kwargs


def rewire_node(node: Node, replacements: Mapping[Name, Any], name: Name | None = None) -> Node:
    """Return a node that reads other names, and writes `name` if it is given."""
    kwargs = {keyword: substitute_names(argument, replacements) for keyword, argument in node.kwargs.items()}
    return Node(node.name if name is None else name, node.op, substitute_names(node.args, replacements), kwargs)


# Numbers are unique in this process, so that facts of different traces never share one by accident.
_FRESH = count()


def fresh_storage() -> int:
    """Return a number that no storage has yet."""
    return next(_FRESH)


def without_repeated_views(graph: Graph) -> Graph:
    """Read each view of a tensor under one name: `t(t(w))` is w. A view computes nothing, so the bits stay."""
    # Two tensors with one storage, offset, lazy bits, shape, strides, dtype and device are the same tensor.
    name_by_memory: dict[Any, Name] = {}
    names: dict[Name, Name] = {}
    distinct_nodes: list[Node] = []
    # Generators are inputs without a fact.
    for name in (input_name for input_name in graph.inputs() if input_name in graph.facts):
        name_by_memory.setdefault(_memory_key(graph.facts[name]), name)
    for node in graph.nodes:
        rewired = rewire_node(node, names)
        fact = graph.facts.get(node.name)
        equal_name = node.name if fact is None else name_by_memory.setdefault(_memory_key(fact), node.name)
        if equal_name is node.name:
            distinct_nodes.append(rewired)
        else:
            names[node.name] = equal_name
    writes = {label: substitute_names(leaves, names) for label, leaves in graph.writes.items()}
    return replace(graph, nodes=tuple(distinct_nodes), writes=writes)


def _memory_key(fact: Fact) -> Any:
    return fact.storage, fact.offset, fact.lazy, fact.aval[:4]


def inline_loss(stage: Graph, loss: Graph) -> Graph:
    """Join a stage and the loss behind it, with their gradients, to one graph.

    x -> stage -> y -> loss     dloss -> loss -> dx = dy -> stage -> dx, g
    """
    # 1. New names. The output of the stage takes the place of the input of the loss; the gradient that the loss
    #    computes for its input takes the place of the stage's cotangent; the rest of the loss gets a prefix.
    cotangent_by_seed = dict(zip(stage.reads["dy"], loss.writes["dx"], strict=True))
    names: dict[Name, Any] = {name: Name(f"loss_{name}") for name in (*loss.inputs(), *(n.name for n in loss.nodes))}
    names |= {name: Name(f"loss_{name}") for name in loss.constants}
    # The loss draws from the generators of the stage, and goes on where that ended.
    names |= {name: name for name in loss.reads.get(GENERATORS, ())}
    output_by_input = {name: y for name, y in zip(loss.reads["x"], stage.writes["y"], strict=True) if name is not None}
    names |= output_by_input
    gradient_by_seed = {seed: substitute_names(dx, names) for seed, dx in cotangent_by_seed.items() if seed is not None}
    # 2. Facts. A tensor that one graph hands to the other has one storage in both.
    storages = {loss.facts[name].storage: stage.facts[y].storage for name, y in output_by_input.items()}
    facts = {names.get(name, name): _map_storage(fact, storages) for name, fact in loss.facts.items() if name in names}
    storages = {stage.facts[seed].storage: facts[dx].storage for seed, dx in gradient_by_seed.items()}
    facts |= {name: _map_storage(fact, storages) for name, fact in stage.facts.items() if name not in gradient_by_seed}
    # 3. Order: forward of the stage, all of the loss, backward of the stage.
    forward_count = forward_end(stage)
    stage_nodes = [rewire_node(node, gradient_by_seed) for node in stage.nodes]
    loss_nodes = [rewire_node(node, names, names[node.name]) for node in loss.nodes]
    reads = {label: substitute_names(leaves, names) for label, leaves in loss.reads.items() if label != "x"}
    generator_devices = tuple(dict.fromkeys((*stage.generator_devices, *loss.generator_devices)))
    if generator_devices:
        reads[GENERATORS] = tuple(dict.fromkeys((*stage.reads.get(GENERATORS, ()), *reads.get(GENERATORS, ()))))
    writes = {label: substitute_names(leaves, names) for label, leaves in loss.writes.items() if label != "dx"}
    return Graph(
        (*stage_nodes[:forward_count], *loss_nodes, *stage_nodes[forward_count:]),
        facts,
        {**stage.constants, **{names[name]: tensor for name, tensor in loss.constants.items()}},
        {label: leaves for label, leaves in stage.reads.items() if label != "dy"} | reads,
        {label: substitute_names(leaves, gradient_by_seed) for label, leaves in stage.writes.items()} | writes,
        generator_devices=generator_devices,
    )


def forward_end(graph: Graph) -> int:
    """Return how many of the first nodes are the forward: up to the last one that its results need."""
    # Like eager, a forward draws numbers that nobody reads, and makes all its checks.
    needed = graph.ops_needed_by(leaf for label in ("y", "carry", "state") for leaf in graph.writes.get(label, ()))
    needed |= {node.name for node in graph.nodes if node.kwargs.get("generator") in graph.reads.get(GENERATORS, ())}
    needed |= {*checks_by_direction(graph)[0]}
    return 1 + max((index for index, node in enumerate(graph.nodes) if node.name in needed), default=-1)


def _map_storage(fact: Fact, storages: Mapping[int, int]) -> Fact:
    return fact._replace(storage=storages.get(fact.storage, fact.storage))


def _names_in(arguments: Iterable[Any]) -> Iterator[Name]:
    for argument in arguments:
        if isinstance(argument, Name):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _names_in(argument)
