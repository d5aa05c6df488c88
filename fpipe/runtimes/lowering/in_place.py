"""Find the parameters that an UPDATE may overwrite, and run it on lists of leaves.

    params[0,1] = UPDATE params[0] sum[0,1]        -->        in place, where nobody reads params[0] any more

Ranks elsewhere that read params[0] are known to have done so where the sum is made of what they computed.

The memory of a version that the step has made is its own; that of what it is handed is the caller's, who may give it
up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.optimizers.optimizer_state import words_of
from fpipe.meaning.updates import names_in, updated_leaves
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree

Leaves = list[Any]
Trees = Mapping[Value, AbstractTree]


class Overwritten(NamedTuple):
    """The leaves that UPDATEs overwrite, with their state.

    Attributes:
        places: of the position of an UPDATE, the places of these leaves among its parameters.
        trees: what is known of every value, new versions in the memory of the old ones.
        given_up: storages of the caller that results lie in.
    """

    places: Mapping[int, Collection[int]]
    trees: Trees
    given_up: frozenset[int]


def overwritten_by(
    ops: Sequence[Op], kept: Collection[Value], trees: Trees, given: Collection[int], donate: bool
) -> Overwritten:
    """The leaves that UPDATEs overwrite, since nobody reads them again: the step's own, and what it is donated."""
    if not any(op.kind == "UPDATE" for op in ops):
        return Overwritten({}, trees, frozenset())
    places, same = dict[int, Collection[int]](), dict[int, int]()
    away, writers = _read_away(ops, trees), {value: at for at, op in enumerate(ops) for value in op.writes}
    live = {storage for value in kept for storage in _storages(trees[value])}
    given_up = set[int]()
    for at in range(len(ops) - 1, -1, -1):
        op = ops[at]
        if op.kind == "UPDATE":
            (params, state, grads), (now, after) = (
                [trees[value] for value in some] for some in (op.reads[:3], op.writes)
            )
            mine, waited = list[int](), _Waited(ops, writers, at)
            for k, own in enumerate(places_by_leaf(params, state)):
                olds = [params.leaves[k], *(state.leaves[place] for place in own)]
                news = [now.leaves[k], *(after.leaves[place] for place in own)]
                storages = [leaf.storage for leaf in olds if isinstance(leaf, Fact)]
                foreign = not donate and any(storage in given for storage in storages)
                late = any(not waited.covers(away.get(storage, ())) for storage in storages)
                if foreign or late or len({*storages}) < len(storages) or not live.isdisjoint(storages):
                    continue
                given_up.update(storages)
                if grads.leaves[k] is not None:
                    mine.append(k)
                    pairs = zip(olds, news, strict=True)
                    same.update((new.storage, old.storage) for old, new in pairs if isinstance(old, Fact))
            places[at] = frozenset(mine)
        live.update(storage for value in op.reads for storage in _storages(trees[value]))
    renamed = {value: _renamed(known, same) for value, known in trees.items()} if same else trees
    return Overwritten(places, renamed, frozenset(given_up & {*given}))


def places_by_leaf(abstract: AbstractTree, deeper: AbstractTree) -> list[list[int]]:
    """For each parameter the places of its state: the leaves of a value that has a pytree where another has a leaf."""
    places = tree.unflatten(deeper.spec, range(len(deeper.leaves)))
    return [tree.leaves(one) for one in abstract.spec.flatten_up_to(places)]


def _read_away(ops: Sequence[Op], trees: Trees) -> Mapping[int, Collection[int]]:
    """Where storages are read by another rank than the one that updates them, or sent there."""
    homes = {value: op.rank for op in ops if op.kind == "UPDATE" for value in op.reads[:2]}
    at_home = {storage: rank for value, rank in homes.items() for storage in _storages(trees[value])}
    found = defaultdict[int, set[int]](set)
    for at, op in enumerate(ops):
        sends = op.kind in ("SEND", "RECV")
        for value in (*op.reads, *op.writes) if sends else op.reads:
            for storage in _storages(trees[value]):
                if storage in at_home and (sends or at_home[storage] != op.rank):
                    found[storage].add(at)
    return found


class _Waited:
    """Ops that an op waits for, directly or through others: they are over when it runs, on whatever rank they are."""

    def __init__(self, ops: Sequence[Op], writers: Mapping[Value, int], at: int) -> None:
        self.ops, self.writers = ops, writers
        self.found, self.left = {at}, [-at]  # a heap, the last op first

    def covers(self, positions: Collection[int]) -> bool:
        """Whether it waits for all of these."""
        first = min(positions, default=len(self.ops))
        while self.left and -self.left[0] >= first:
            for value in self.ops[-heappop(self.left)].reads:
                writer = self.writers.get(value)
                if writer is not None and writer not in self.found:
                    self.found.add(writer)
                    heappush(self.left, -writer)
        return self.found.issuperset(positions)


def _storages(known: AbstractTree) -> list[int]:
    return [leaf.storage for leaf in known.leaves if isinstance(leaf, Fact)]


def _renamed(known: AbstractTree, same: Mapping[int, int]) -> AbstractTree:
    if not any(isinstance(leaf, Fact) and leaf.storage in same for leaf in known.leaves):
        return known

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Fact):
            return leaf
        storage = leaf.storage
        while storage in same:
            storage = same[storage]
        return leaf._replace(storage=storage)

    return known._replace(leaves=tuple(map(of, known.leaves)))


def updating(op: Op, context: StepContext, trees: Trees, places: Collection[int]) -> Callable[..., Sequence[Leaves]]:
    """Function of an UPDATE, on lists of leaves; the parameters in these `places` it overwrites, with their state."""
    params, state, grads = (trees[value] for value in op.reads[:3])
    words = words_of(op.how)
    names = names_in(op, params.spec, context.model)
    at = [k for k, grad in enumerate(grads.leaves) if grad is not None]
    states: Any = tree.unflatten(state.spec, range(len(state.leaves)))
    named: list[Any] = params.spec.flatten_up_to(states)
    words_there = [{word: tree.leaves(place)[0] for word, place in named[k].items()} for k in at]
    own = [k in places for k in at]
    said = words.of([names[k] for k in at])
    beside = [(value.name, trees[value].spec) for value in op.reads[3:]]
    run = partial(updated_leaves, words, said, own)

    def update(*lists: Leaves) -> Sequence[Leaves]:
        context.overwrites = context.overwrites or bool(places)
        leaves, states, grads = ([*one] for one in lists[:3])
        more = {name: tree.unflatten(spec, one) for (name, spec), one in zip(beside, lists[3:], strict=True)}
        for one in lists:
            one.clear()
        before = [{word: states[place] for word, place in one.items()} for one in words_there]
        rest = [more.get(name) for name in ("norm", "lr", "valid")]
        made, after = run([leaves[k] for k in at], [grads[k] for k in at], before, *rest)
        for k, where, param, new in zip(at, words_there, made, after, strict=True):
            leaves[k] = param
            for word, place in where.items():
                states[place] = new[word]
        return [leaves, states]

    return update
