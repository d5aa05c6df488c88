"""Find the parameters that an UPDATE may overwrite, and run it on lists of leaves.

    params[0,1] = UPDATE params[0] sum[0,1]        -->        in place, where nobody reads params[0] any more

Two questions decide. Does the step own the memory? It owns the versions that it has made; what it is handed belongs to
the caller, unless the caller donates it. And has everybody read it? Later ops of the program must not, and other ranks,
which run at their own pace, must be known to be done: the sum is made of what they computed from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.optimizers.optimizer_state import update_settings
from fpipe.meaning.updates import names_of_update, update_leaves
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.lowered import AbstractTree, Leaves

Trees = Mapping[Value, AbstractTree]

_MAX_TRAINED_SUBSETS = 128  # different sets of parameters that data may reach


class Overwritten(NamedTuple):
    """The parameters and optimizer state that UPDATEs overwrite.

    Attributes:
        leaf_indices: for the position of an UPDATE, the indices of these leaves among its parameters.
        trees: the abstract tree of every value, new versions in the memory of the old ones.
        donated_storages: storages of the caller that results lie in.
    """

    leaf_indices: Mapping[int, Collection[int]]
    trees: Trees
    donated_storages: frozenset[int]


def find_overwritten(
    ops: Sequence[Op], outputs: Collection[Value], trees: Trees, external_storages: Collection[int], donate: bool
) -> Overwritten:
    """Find the leaves that UPDATEs may overwrite: nobody reads them again, and the step owns or was donated them.

    Args:
        ops: the ops of the program.
        outputs: its outputs, which live on.
        trees: the abstract tree of every value.
        external_storages: storages of the caller and of stages.
        donate: whether the caller gives its parameters and optimizer state away.
    """
    if not any(op.kind == "UPDATE" for op in ops):
        return Overwritten({}, trees, frozenset())
    leaf_indices, old_storages = dict[int, Collection[int]](), dict[int, int]()
    remote_reads = _remote_reads(ops, trees)
    writers = {value: position for position, op in enumerate(ops) for value in op.writes}
    # Walk backwards: `live` has the storages that a later op reads, or that are returned.
    live = {storage for value in outputs for storage in _storages(trees[value])}
    donated = set[int]()
    for position in range(len(ops) - 1, -1, -1):
        op = ops[position]
        if op.kind == "UPDATE":
            (params, state, grads), (new_params, new_state) = (
                [trees[value] for value in values] for values in (op.reads[:3], op.writes)
            )
            overwritten, awaited = list[int](), _AwaitedOps(ops, writers, position)
            for k, state_indices in enumerate(nested_indices_by_leaf(params, state)):
                old_leaves = [params.leaves[k], *(state.leaves[state_index] for state_index in state_indices)]
                new_leaves = [new_params.leaves[k], *(new_state.leaves[state_index] for state_index in state_indices)]
                storages = [leaf.storage for leaf in old_leaves if isinstance(leaf, Fact)]
                is_external = not donate and any(storage in external_storages for storage in storages)
                is_read_late = any(not awaited.covers(remote_reads.get(storage, ())) for storage in storages)
                # A parameter and its state go together, and none of them may share memory with another.
                if is_external or is_read_late or len({*storages}) < len(storages) or not live.isdisjoint(storages):
                    continue
                donated.update(storages)
                if grads.leaves[k] is not None:
                    overwritten.append(k)
                    pairs = zip(old_leaves, new_leaves, strict=True)
                    old_storages.update((new.storage, old.storage) for old, new in pairs if isinstance(old, Fact))
            leaf_indices[position] = frozenset(overwritten)
        live.update(storage for value in op.reads for storage in _storages(trees[value]))
    if old_storages:
        trees = {value: _in_old_storages(abstract, old_storages) for value, abstract in trees.items()}
    return Overwritten(leaf_indices, trees, frozenset(donated & {*external_storages}))


def nested_indices_by_leaf(abstract: AbstractTree, nested: AbstractTree) -> list[list[int]]:
    """Return, for each leaf of a value, the indices of the leaves under it in a `nested` one, such as Adam's state."""
    nested_indices = tree.unflatten(nested.spec, range(len(nested.leaves)))
    return [tree.leaves(subtree) for subtree in abstract.spec.flatten_up_to(nested_indices)]


def _remote_reads(ops: Sequence[Op], trees: Trees) -> Mapping[int, Collection[int]]:
    """Return, for each storage that is updated, the positions of its transfers and of its readers on other ranks."""
    rank_by_value = {value: op.rank for op in ops if op.kind == "UPDATE" for value in op.reads[:2]}
    rank_by_storage = {storage: rank for value, rank in rank_by_value.items() for storage in _storages(trees[value])}
    positions = defaultdict[int, set[int]](set)
    for position, op in enumerate(ops):
        is_transfer = op.kind in ("SEND", "RECV")
        for value in (*op.reads, *op.writes) if is_transfer else op.reads:
            for storage in _storages(trees[value]):
                if storage in rank_by_storage and (is_transfer or rank_by_storage[storage] != op.rank):
                    positions[storage].add(position)
    return positions


class _AwaitedOps:
    """The ops that one op waits for, directly or through others, on whatever ranks: they are done when it runs."""

    def __init__(self, ops: Sequence[Op], writers: Mapping[Value, int], position: int) -> None:
        self.ops, self.writers = ops, writers
        # Positions as negative numbers, so that the heap yields the last op first: the search goes back only as far as
        # the earliest position that it is asked for, and goes on from there the next time.
        self.reached, self.heap = {position}, [-position]

    def covers(self, positions: Collection[int]) -> bool:
        earliest = min(positions, default=len(self.ops))
        while self.heap and -self.heap[0] >= earliest:
            for value in self.ops[-heappop(self.heap)].reads:
                writer = self.writers.get(value)
                if writer is not None and writer not in self.reached:
                    self.reached.add(writer)
                    heappush(self.heap, -writer)
        return self.reached.issuperset(positions)


def _storages(abstract: AbstractTree) -> list[int]:
    return [leaf.storage for leaf in abstract.leaves if isinstance(leaf, Fact)]


def _in_old_storages(abstract: AbstractTree, old_storages: Mapping[int, int]) -> AbstractTree:
    if old_storages.keys().isdisjoint(_storages(abstract)):  # OPAQUE is known by its identity
        return abstract
    leaves = [*abstract.leaves]
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Fact) and leaf.storage in old_storages:
            # Versions form chains: the third lies where the second lies, which lies where the first does.
            storage = leaf.storage
            while storage in old_storages:
                storage = old_storages[storage]
            leaves[k] = leaf._replace(storage=storage)
    return abstract._replace(leaves=tuple(leaves))


def make_update(
    op: Op, context: StepContext, trees: Trees, overwritten: Collection[int]
) -> Callable[..., Sequence[Leaves]]:
    """Return the function of an UPDATE, which overwrites the parameters with these indices, and their state."""
    # 1. Compute what is the same in each step. `k` counts the parameters; `state_indices[k]` says where their
    # optimizer state lies among the leaves of the state, such as {"exp_avg": 4, "exp_avg_sq": 5}.
    param_tree, state_tree, grad_tree = (trees[value] for value in op.reads[:3])
    with_grad = tuple(k for k, grad in enumerate(grad_tree.leaves) if grad is not None)
    numbered_state = tree.unflatten(state_tree.spec, range(len(state_tree.leaves)))
    numbered_state_by_param: list[Any] = param_tree.spec.flatten_up_to(numbered_state)
    state_indices = {
        k: {name: tree.leaves(index)[0] for name, index in numbered_state_by_param[k].items()} for k in with_grad
    }
    extra_specs = [(value.name, trees[value].spec) for value in op.reads[3:]]
    rule, param_names = update_settings(op.options), names_of_update(op, param_tree.spec, context.model)

    @lru_cache(maxsize=_MAX_TRAINED_SUBSETS)
    def updater_of(trained: tuple[int, ...]) -> Callable[..., Any]:
        settings = rule.of([param_names[k] for k in trained], [param_tree.leaves[k].aval for k in trained])
        return partial(update_leaves, rule, settings, [k in overwritten for k in trained], context.capturable)

    # 2. The instruction. It empties the lists, so that it alone holds the old tensors.
    def update(*lists: Leaves) -> Sequence[Leaves]:
        context.overwrites = context.overwrites or bool(overwritten)
        params, state, grads = ([*leaves] for leaves in lists[:3])
        extra_pairs = zip(extra_specs, lists[3:], strict=True)
        extra_values = {name: tree.unflatten(spec, leaves) for (name, spec), leaves in extra_pairs}
        for leaves in lists:
            leaves.clear()
        trained = with_grad
        if any(grads[k] is None for k in with_grad):
            trained = tuple(k for k in with_grad if grads[k] is not None)
            copy_untrained(params, state, grads)
        old_states = [{name: state[index] for name, index in state_indices[k].items()} for k in trained]
        new_params, new_states = updater_of(trained)(
            [params[k] for k in trained],
            [grads[k] for k in trained],
            old_states,
            *(extra_values.get(name) for name in ("norm", "lr", "valid")),
        )
        for k, new_param, new_state in zip(trained, new_params, new_states, strict=True):
            params[k] = new_param
            for name, index in state_indices[k].items():
                state[index] = new_state[name]
        return [params, state]

    def copy_untrained(params: Leaves, state: Leaves, grads: Leaves) -> None:
        # The data of a stage without a trace may reach fewer parameters than its run on zeros did. Those go on as they
        # are, but as copies: a later op may overwrite what this one returns, and must not write the caller's tensors.
        for k in with_grad:
            if grads[k] is None and k not in overwritten:
                params[k] = params[k].detach().clone().requires_grad_(params[k].requires_grad)
                for index in state_indices[k].values():
                    state[index] = state[index].clone()

    return update
