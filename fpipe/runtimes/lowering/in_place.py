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
from fpipe.runtimes.lowering.lowered import AbstractTree, Leaves

Trees = Mapping[Value, AbstractTree]


class Overwritten(NamedTuple):
    """The parameters that UPDATEs overwrite, with their state.

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
    """Find the leaves that UPDATEs may overwrite, since nobody reads them again: the step's own, and donated ones."""
    if not any(op.kind == "UPDATE" for op in ops):
        return Overwritten({}, trees, frozenset())
    places, old_storages = dict[int, Collection[int]](), dict[int, int]()
    remote_reads, writers = _remote_reads(ops, trees), {value: at for at, op in enumerate(ops) for value in op.writes}
    live = {storage for value in kept for storage in _storages(trees[value])}
    given_up = set[int]()
    for at in range(len(ops) - 1, -1, -1):
        op = ops[at]
        if op.kind == "UPDATE":
            (params, state, grads), (now, after) = (
                [trees[value] for value in some] for some in (op.reads[:3], op.writes)
            )
            overwritten, waited = list[int](), _Waited(ops, writers, at)
            for k, state_places in enumerate(places_by_leaf(params, state)):
                olds = [params.leaves[k], *(state.leaves[place] for place in state_places)]
                news = [now.leaves[k], *(after.leaves[place] for place in state_places)]
                storages = [leaf.storage for leaf in olds if isinstance(leaf, Fact)]
                foreign = not donate and any(storage in given for storage in storages)
                late = any(not waited.covers(remote_reads.get(storage, ())) for storage in storages)
                if foreign or late or len({*storages}) < len(storages) or not live.isdisjoint(storages):
                    continue
                given_up.update(storages)
                if grads.leaves[k] is not None:
                    overwritten.append(k)
                    pairs = zip(olds, news, strict=True)
                    old_storages.update((new.storage, old.storage) for old, new in pairs if isinstance(old, Fact))
            places[at] = frozenset(overwritten)
        live.update(storage for value in op.reads for storage in _storages(trees[value]))
    renamed = {value: _renamed(known, old_storages) for value, known in trees.items()} if old_storages else trees
    return Overwritten(places, renamed, frozenset(given_up & {*given}))


def places_by_leaf(abstract: AbstractTree, deeper: AbstractTree) -> list[list[int]]:
    """Return for each leaf the places of the leaves that the deeper value, such as a state, has under it."""
    places = tree.unflatten(deeper.spec, range(len(deeper.leaves)))
    return [tree.leaves(subtree) for subtree in abstract.spec.flatten_up_to(places)]


def _remote_reads(ops: Sequence[Op], trees: Trees) -> Mapping[int, Collection[int]]:
    """Find by storage the ops of other ranks than the one that updates it that read it, and its transfers."""
    homes = {value: op.rank for op in ops if op.kind == "UPDATE" for value in op.reads[:2]}
    at_home = {storage: rank for value, rank in homes.items() for storage in _storages(trees[value])}
    positions = defaultdict[int, set[int]](set)
    for at, op in enumerate(ops):
        sends = op.kind in ("SEND", "RECV")
        for value in (*op.reads, *op.writes) if sends else op.reads:
            for storage in _storages(trees[value]):
                if storage in at_home and (sends or at_home[storage] != op.rank):
                    positions[storage].add(at)
    return positions


class _Waited:
    """Ops that an op waits for, directly or through others: they are done when it runs, on whatever rank they are."""

    def __init__(self, ops: Sequence[Op], writers: Mapping[Value, int], at: int) -> None:
        self.ops, self.writers = ops, writers
        self.reached, self.heap = {at}, [-at]  # the last op first

    def covers(self, positions: Collection[int]) -> bool:
        """Whether it waits for all ops in these positions."""
        first = min(positions, default=len(self.ops))
        while self.heap and -self.heap[0] >= first:
            for value in self.ops[-heappop(self.heap)].reads:
                writer = self.writers.get(value)
                if writer is not None and writer not in self.reached:
                    self.reached.add(writer)
                    heappush(self.heap, -writer)
        return self.reached.issuperset(positions)


def _storages(known: AbstractTree) -> list[int]:
    return [leaf.storage for leaf in known.leaves if isinstance(leaf, Fact)]


def _renamed(known: AbstractTree, old_storages: Mapping[int, int]) -> AbstractTree:
    leaves = [*known.leaves]
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Fact) and leaf.storage in old_storages:
            storage = leaf.storage
            while storage in old_storages:
                storage = old_storages[storage]
            leaves[k] = leaf._replace(storage=storage)
    return known._replace(leaves=tuple(leaves))


def updating(op: Op, context: StepContext, trees: Trees, places: Collection[int]) -> Callable[..., Sequence[Leaves]]:
    """Return the function of an UPDATE, which overwrites the parameters in these places, and their state."""
    params, state, grads = (trees[value] for value in op.reads[:3])
    words = words_of(op.how)
    names = names_in(op, params.spec, context.model)
    at = [k for k, grad in enumerate(grads.leaves) if grad is not None]
    states: Any = tree.unflatten(state.spec, range(len(state.leaves)))
    named: list[Any] = params.spec.flatten_up_to(states)
    state_places = [{word: tree.leaves(place)[0] for word, place in named[k].items()} for k in at]
    rest_specs = [(value.name, trees[value].spec) for value in op.reads[3:]]
    run = partial(updated_leaves, words, words.of([names[k] for k in at]), [k in places for k in at])

    def update(*lists: Leaves) -> Sequence[Leaves]:
        context.overwrites = context.overwrites or bool(places)
        params, states, grads = ([*leaves] for leaves in lists[:3])
        rest = {name: tree.unflatten(spec, more) for (name, spec), more in zip(rest_specs, lists[3:], strict=True)}
        for leaves in lists:
            leaves.clear()
        before = [{word: states[place] for word, place in by_word.items()} for by_word in state_places]
        numbers = [rest.get(name) for name in ("norm", "lr", "valid")]
        next_params, after = run([params[k] for k in at], [grads[k] for k in at], before, *numbers)
        for k, place_by_word, param, state in zip(at, state_places, next_params, after, strict=True):
            params[k] = param
            for word, place in place_by_word.items():
                states[place] = state[word]
        return [params, states]

    return update
