"""Cut a graph of operations into stages at its marks: which operation runs where, and what it needs from whom.

    embed  MARK  block  MARK  head  loss(target)        -->        [embed]  [block]  [head]  loss

An operation belongs to the stage that the marks above it say, and runs as in the block (no_grad, autocast) that it is
in, wherever that began. What needs no tensor of anybody (a mask, a size) is made anew by each stage that reads it, and
no stage hands it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from fpipe import tree
from fpipe.graphs.draws import draws
from fpipe.graphs.functional import mutated_by
from fpipe.model import Source
from fpipe.models.graph_stage import GraphStage, Rows
from fpipe.models.loss_graph import MARK, Traced
from fpipe.models.modes import PLAIN, SIZE, Switch, as_found, modes_of, switches


class Marked:
    """A traced function as stages.

    Attributes:
        stages: `f(params, x)` of each, `loss`: `loss(y, target)`.
        sources: what each stage takes, as `from_functions` has it.
        owned: per stage the parameters that it is the first to read; those that nobody reads are the first stage's.
        ties: groups of (stage, parameter) for those that several stages read.
    """

    def __init__(self, traced: Traced, names: list[str]) -> None:
        self.traced = traced
        self.name_of = dict(zip(traced.params, names, strict=True))
        self.inputs, self.target = ({n: at for at, n in enumerate(tree.leaves(t)) if _is(n)} for t in traced.batch)
        self.alias: dict[fx.Node, fx.Node] = {}
        self.at: dict[fx.Node, int] = {}
        self.last = self._place()
        self.modes = modes_of(traced.module.graph)
        self.changed = {one: node for node in self.at for written in mutated_by(node) for one in self._memory(written)}
        self.free = self._free()
        self.judged = self._judged()
        self._refuse_odd()
        results = [self.root(node) for node in traced.module.graph.output_node().all_input_nodes]
        loss = _Part(self, None, results)
        self.outs: list[dict[fx.Node, None]] = [{} for _ in range(self.last + 1)]
        if not loss.taken:
            raise ValueError("the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.")
        self.outs[self.last] = loss.taken
        parts: list[_Part] = []
        for stage in reversed(range(self.last + 1)):
            part = _Part(self, stage, list(self.outs[stage]))
            for node in part.taken:
                self.outs[self.at[node]][node] = None
            parts.insert(0, part)
        order = {node: number for number, node in enumerate(traced.module.graph.nodes)}
        self.outs = [dict.fromkeys(sorted(outs, key=order.__getitem__)) for outs in self.outs]
        self.groups = [*(_by_readers(outs, parts) for outs in self.outs[:-1]), [list(self.outs[-1])]]
        ports = ((stage, at, node) for stage, gs in enumerate(self.groups) for at, g in enumerate(gs) for node in g)
        # The last stage hands on outputs of other stages too.
        self.port = {node: at for stage, at, node in ports if self.at.get(node) == stage}
        self.sources: tuple[Source | tuple[Source, ...], ...] = tuple(part.sources for part in parts)
        readers = {name: [s for s, part in enumerate(parts) if name in part.params] for name in names}
        self.owned = [[n for n, read in readers.items() if min(read, default=0) == s] for s in range(len(parts))]
        self.ties = tuple(tuple((stage, name) for stage in read) for name, read in readers.items() if len(read) > 1)
        self.stages = [part.function() for part in parts]
        self.loss = loss.function()

    def root(self, node: fx.Node) -> fx.Node:
        """What a mark handed on."""
        return self.alias.get(node, node)

    def needs(self, node: fx.Node) -> list[fx.Node]:
        """What an operation reads, seen through the marks."""
        return [self.root(one) for one in node.all_input_nodes]

    def _memory(self, node: fx.Node) -> list[fx.Node]:
        """An operation, and what it is a view of."""
        seen = [self.root(node)]
        for one in seen:  # it grows
            seen += map(self.root, _viewed(one))
        return seen

    def _place(self) -> int:
        """The stage of every operation, by the marks above it; which the last is."""
        stage = 0
        for node in self.traced.module.graph.nodes:
            if node.target is MARK:
                if stage not in self.at.values():
                    raise ValueError(f"boundary {stage + 1} has nothing to compute before it; leave it out.")
                stage += 1
                handed = [self.root(one) for one in node.args[0]]
                self.alias |= {user: handed[user.args[1]] for user in node.users}
            elif node.op == "call_function" and node not in self.alias and not switches(node):
                self.at[node] = stage
        if not self.at:
            raise ValueError("loss_fn computes nothing, so there is no stage to cut it into.")
        if stage not in self.at.values():
            raise ValueError(f"boundary {stage} has nothing to compute behind it; leave it out.")
        return stage

    def _free(self) -> set[fx.Node]:
        """What needs no tensor of anybody, and whose memory nothing writes: sizes, masks, literals; but no numbers
        drawn at random, which would be others in another stage."""
        free: set[fx.Node] = set()
        for node in self.traced.module.graph.nodes:
            literal = node.op == "get_attr"
            size = node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | int)
            made = node in self.at and all(one in free for one in self.needs(node))
            if (literal or size or made) and node not in self.changed and not _writes(node) and not _draws(node):
                free.add(node)
        return free

    def _judged(self) -> set[fx.Node]:
        """What depends on the target."""
        judged = set(self.target)
        for node in self.at:
            if node not in self.free and not judged.isdisjoint(self.needs(node)):
                judged.add(node)
        return judged

    def in_loss(self, node: fx.Node) -> bool:
        """What the loss computes: what depends on the target, and how many there are of something. A stage would hand
        that number on as an output, and no two of them join."""
        if node in self.judged:
            return True
        value = node.meta.get("val")
        counts = isinstance(value, Tensor) and not value.ndim and not value.dtype.is_floating_point
        pure = node in self.at and node not in self.changed and not _stays(node)
        return pure and counts and not any(one in self.name_of for one in self.needs(node))

    def _refuse_odd(self) -> None:
        for held, node in self.changed.items():
            if held.op == "get_attr":
                shape = tuple(getattr(self.traced.module, str(held.target)).shape)
                raise ValueError(
                    f"loss_fn writes a tensor of shape {shape} that it closes over ({node.target}): what it remembers "
                    "is state, and a loss function has none. Write a clone of it; of a module's buffer, call .eval() "
                    "on the module."
                )
        for node in [one for one in (*self.target, *self.at) if one in self.judged]:
            if self.at.get(node, self.last) < self.last:
                raise ValueError(
                    f"stage {self.at[node]} reads the target ({node.name}); only what comes after the last boundary "
                    "may. What a stage reads of the batch is one of its inputs."
                )
            if node in self.at and any(one in self.name_of for one in self.needs(node)):
                name = next(self.name_of[one] for one in self.needs(node) if one in self.name_of)
                raise ValueError(
                    f"{node.name} reads the target and the parameter {name!r}: a loss(y, target) has no parameters. "
                    "Compute what needs them before the target comes in."
                )
        drawing = [node for node in self.at if _draws(node)]
        for before, node in pairwise(drawing):
            if before in self.judged and node not in self.judged:
                raise ValueError(
                    f"{before.name} draws random numbers for the loss, and {node.name} after it for what comes before "
                    "the loss; draw them in the other order."
                )


class _Part:
    """One stage, or the loss (stage None): which operations it runs, and what it takes.

    Attributes:
        nodes: what it runs, in order. params: the names of what it reads. taken: what other stages wrote.
    """

    def __init__(self, whole: Marked, stage: int | None, wanted: Iterable[fx.Node]) -> None:
        self.whole, self.stage, self.wanted = whole, stage, list(wanted)
        own = whole.in_loss if stage is None else self._mine
        half = whole.target if stage is None else whole.inputs
        found: set[fx.Node] = set()
        self.params: dict[str, fx.Node] = {}
        self.batch: dict[fx.Node, int] = {}
        self.taken: dict[fx.Node, None] = {}
        self.sizes: list[fx.Node] = []
        todo = [*self.wanted, *(node for node in whole.at if own(node) and _stays(node))]
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            if node.target is SIZE:
                self.sizes.append(node)
            elif node in whole.name_of and stage is not None:
                self.params[whole.name_of[node]] = node
            elif node in half:
                self.batch[node] = half[node]
            elif node in whole.free or own(node):
                todo += whole.needs(node)
            else:
                self.taken[node] = None
        self.size_of = {node: self._sized(node) for node in self.sizes}
        self.nodes = [node for node in whole.traced.module.graph.nodes if node in found]

    def _mine(self, node: fx.Node) -> bool:
        whole = self.whole
        return whole.at.get(node) == self.stage and node not in whole.judged

    def _sized(self, node: fx.Node) -> tuple[fx.Node, int]:
        """A tensor that this part takes anyway, and its dimension, that has the size which a node asks another for."""
        tensor, dim = self.whole.root(node.args[0]), node.args[1]  # pyright: ignore[reportArgumentType]
        mine = [*self.taken, *self.batch]
        for other in mine:
            shape: torch.Size = other.meta["val"].shape
            for at, size in enumerate(shape):
                if str(size) == str(node.meta["val"]):
                    return other, at
        half = self.whole.target if self.stage is None else self.whole.inputs
        if tensor in half:
            self.batch[tensor] = half[tensor]
        else:
            self.taken[tensor] = None
        return tensor, int(dim)  # pyright: ignore[reportArgumentType]

    @property
    def sources(self) -> Source | tuple[Source, ...]:
        """What a stage takes: the batch, and earlier stages."""
        earlier = sorted(set(map(self._source, self.taken)))
        sources: list[Source] = ["batch"] if self.batch or not earlier else []
        sources += [source if source[1] else source[0] for source in earlier]
        many = len(sources) > 1 or isinstance(sources[0], tuple)
        return tuple(sources) if many else sources[0]

    def _source(self, node: fx.Node) -> tuple[int, int]:
        """The stage that an operation runs in, and which of its outputs has it."""
        return self.whole.at[node], self.whole.port[node]

    def function(self) -> Callable[..., Any]:
        """The part as a function: `f(params, x) -> y` of a stage, `loss(y, target)`."""
        whole = self.whole
        made = fx.Graph()
        now = {node: made.placeholder(node.name) for node in (*self.params.values(), *self.batch, *self.taken)}
        asked: dict[tuple[fx.Node, int], fx.Node] = {}  # each size once and first: so do equal stages
        for node, (tensor, dim) in self.size_of.items():
            if (tensor, dim) not in asked:
                asked[tensor, dim] = made.call_function(SIZE, (now[tensor], dim))
            now[node] = asked[tensor, dim]
        switch = Switch(made)
        for node in self.nodes:
            if node not in now:
                switch.to(whole.modes.get(node, switch.mode))
                now[node] = made.node_copy(node, lambda one: now[whole.root(one)])
        switch.to(PLAIN)
        if self.stage is None:
            result = whole.traced.module.graph.output_node().args[0]
            made.output(fx.map_arg(result, lambda one: now[whole.root(one)]))
        else:
            outs = [tuple(now[node] for node in group) for group in whole.groups[self.stage]]
            made.output(_one_or_all([_one_or_all(group) for group in outs]))
        run = fx.GraphModule(whole.traced.module, made)
        if self.stage is None:
            return self._loss(run.forward)
        rows = Rows(whole.traced.example[0], "inputs", whole.traced.guards) if self.batch else None
        unread = [name for name in whole.owned[self.stage] if name not in self.params]
        many = isinstance(self.sources, tuple)
        return GraphStage(self.stage, run, list(self.params), unread, self._takes(), many=many, rows=rows)

    def _loss(self, run: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        at = list(self.whole.outs[self.whole.last])
        places = [at.index(node) for node in self.taken]
        checked = Rows(self.whole.traced.example[1], "target", self.whole.traced.guards)

        def loss(y: Any, target: Any) -> Any:
            leaves, made = tree.leaves(target), tree.leaves(y)
            checked.check(leaves)
            with as_found():
                return run(*[leaves[place] for place in self.batch.values()], *[made[place] for place in places])

        return loss

    def _takes(self) -> list[tuple[int, int]]:
        """For each tensor taken, which of the stage's inputs it is in, and at which leaf."""
        sources: tuple[Source, ...] = self.sources if isinstance(self.sources, tuple) else (self.sources,)
        found = [(0, at) for at in self.batch.values()]
        for node in self.taken:
            stage, port = self._source(node)
            group = self.whole.groups[stage][port]
            found.append((sources.index((stage, port) if port else stage), group.index(node)))
        return found


def _by_readers(outs: Iterable[fx.Node], parts: list[_Part]) -> list[list[fx.Node]]:
    """What a stage hands on, in groups that the same stages read: each group is an output of its own. What the next one
    reads comes first."""
    groups: dict[tuple[int, ...], list[fx.Node]] = {}
    for node in outs:
        groups.setdefault(tuple(stage for stage, part in enumerate(parts) if node in part.taken), []).append(node)
    return [groups[readers] for readers in sorted(groups)]


def _one_or_all(values: Sequence[Any]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]


def _is(node: Any) -> bool:
    return isinstance(node, fx.Node)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _viewed(node: fx.Node) -> list[fx.Node]:
    """What an operation returns a view of, or the same again."""
    schema: Any = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or all(one.alias_info is None for one in schema.returns):
        return []
    given = [*zip((one.name for one in schema.arguments), node.args, strict=False), *node.kwargs.items()]
    lent = {one.name for one in schema.arguments if one.alias_info is not None}
    values = [arg if isinstance(arg, list | tuple) else (arg,) for name, arg in given if name in lent]
    return [one for many in values for one in many if isinstance(one, fx.Node)]


def _stays(node: fx.Node) -> bool:
    """Whether an operation is there for more than its result."""
    return _writes(node) or _draws(node)


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers: those after it are others without it."""
    return draws(node.target, node.args, dict(node.kwargs))
