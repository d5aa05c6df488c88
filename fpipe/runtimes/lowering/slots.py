"""Fill the slots of a step from what it is handed, and read its results out of them.

params, batch, state        --> Entrance --> slots --> Exit -->        loss, grads, outputs, state
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact, fact, in_own_storage
from fpipe.meaning.devices import BATCH, brought, check_at_home, home_of
from fpipe.meaning.inputs_and_results import bind_inputs, collect_results
from fpipe.meaning.meaning import batch_of
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.own_memory import is_strided, layout_of
from fpipe.meaning.purity.sharded import Sharding, local_of, sharding_of
from fpipe.meaning.single_device.params_and_state import streams, trained
from fpipe.meaning.stages.keys import needs_key
from fpipe.meaning.step import NO_KEY, Keys, StepInputs
from fpipe.model import Model, who_draws
from fpipe.positional_stage import PositionalStage
from fpipe.program import PARAMETERS, Program, Value
from fpipe.runtimes.lowering.lowered import KEY, AbstractTree, Lowered, dense
from fpipe.runtimes.lowering.rank_part import Slots
from fpipe.runtimes.lowering.shards import Share, Shared, refuse_shards, shared_of, state_of


@dataclass(frozen=True)
class ProcessContext:
    """Devices and replicas around the step of one process.

    Attributes:
        home: where leaves without data would be; None for the default device.
        devices: one for each rank, or none where ranks compute where their tensors are.
        replica: the number of this replica, and how many there are.
        share: which part of each sharded parameter this process has.
    """

    home: torch.device | None = None
    devices: Sequence[torch.device] = ()
    replica: tuple[int, int] = (0, 1)
    share: Share | None = None


@dataclass(frozen=True)
class InputLeaves:
    """The leaves that a step is handed, by the values of its program.

    Attributes:
        trees: what is known of each value.
        places: of each, where its leaves are among all.
        at_home: for each leaf the device where it would be if it had data.
        shared: what replicas share out.
    """

    trees: Mapping[Value, AbstractTree]
    places: Mapping[Value, Sequence[int]]
    at_home: Sequence[torch.device]
    shared: Mapping[Value, Shared]


def handed_by(
    program: Program,
    model: Model,
    inputs: StepInputs,
    process: ProcessContext,
    homes: Mapping[Value, torch.device],
    storages: dict[int, int],
) -> InputLeaves:
    """Find the leaves of a step's arguments; `homes` are the devices of the ranks that read them."""
    leaves, containers = tree.flatten(inputs.trees)
    params, batch, state, optim = tree.unflatten(containers, range(len(leaves)))
    whole, sizes = batch_of(program, inputs.batch)
    batch = batch if whole is inputs.batch else streams(batch, len(sizes))
    state = None if inputs.state is None else state
    optim = None if inputs.optim is None else optim
    places_of = bind_inputs(program, model, StepInputs(params, batch, state, optim, inputs.key))
    trees, places, shared = dict[Value, AbstractTree](), dict[Value, Sequence[int]](), dict[Value, Shared]()
    at_home = [process.home or torch.get_default_device()] * len(leaves)
    if places_of.pop(Value("key"), None) is not None:  # each stage and microbatch folds its number into it
        trees[Value("key")] = AbstractTree((inputs.key,), tree.flatten(inputs.key)[1])
    for value, subtree in places_of.items():
        places[value], spec = tree.flatten(subtree)
        found = [leaves[at] for at in places[value]]
        moved = {at: home_of(value, leaves[at], homes.get(value)) for at in places[value]}
        if value.name not in BATCH:
            for at, device in moved.items():
                if device is not None:
                    check_at_home(value, [leaves[at]], device, example=True)
                    at_home[at] = device
        train = [False] * len(found)
        if value.name in PARAMETERS:
            train = trained(model, value.stage or 0, value.port, tree.unflatten(spec, found))
        rows = zip(found, train, places[value], strict=True)
        facts = (fact_of(leaf, storages, trains, at_home[at]) for leaf, trains, at in rows)
        trees[value] = AbstractTree(tuple(map(_moved_home, facts, moved.values())), spec)
        if value.name == "shard":
            who, paths = f"params[{value.stage}]", [path for path, _ in tree.paths(subtree)]
            if process.share is None:
                refuse_shards(trees[value], who, paths)
            else:
                shared[value] = shared_of(trees[value], process.share, who, paths)
                trees[value] = shared[value].own
        shard = shared.get(value._replace(name="shard")) if value.name == "opt" else None
        if shard is not None:
            trees[value] = state_of(shard, trees[value])
    return InputLeaves(trees, places, at_home, shared)


class KeyWatch:
    """Warns if the first two steps of a training draw the same random numbers: one key, and parameters that changed."""

    def __init__(self) -> None:
        self._steps: list[tuple[Keys, list[tuple[int, int]]]] = []

    def note(self, key: Keys, params: Sequence[Any]) -> None:
        """Note the key and the parameters of a step that draws."""
        if len(self._steps) == 2:
            return
        versions = [(leaf.data_ptr(), leaf._version) for leaf in params if isinstance(leaf, torch.Tensor)]
        self._steps.append((key, versions))
        (first, before), (last, after) = self._steps[0], self._steps[-1]
        if before != after and first == last:
            warnings.warn(
                f"two steps of a training were handed key={key!r}, so that they dropped the same units: hand in "
                "another in each step, such as fpipe.fold_in(key, step).",
                stacklevel=5,
            )


@dataclass(frozen=True)
class Entrance:
    """The content of slots before the first instruction.

    Attributes:
        start: the slots with what they hold in every step.
        inputs: a slot, and the places of its leaves among those that the step is handed; `homes`, the device of it.
        held: a slot, and how a stage gives what is in it: its constants.
        key, asked: the slots of the step's key, for stages that draw and for those that ask for it.
        drawing: a stage that draws, and `draws`, the watch over its keys.
        params: the places of the parameters among the leaves that the step is handed.
        prepare: a function that reads slots, and the one that it fills: views of parameters.
    """

    start: Slots
    inputs: Sequence[tuple[int, Sequence[int]]]
    homes: Sequence[tuple[int, torch.device]]
    held: Sequence[tuple[int, Callable[[], list[Any]]]]
    key: int | None
    asked: int | None
    drawing: Any
    draws: KeyWatch
    params: Sequence[int]
    prepare: Sequence[tuple[Callable[..., Any], tuple[int, ...], int]]

    def filled(self, leaves: Sequence[Any], key: Keys) -> Slots:
        """Return the slots of a step."""
        slots = self.start[:]
        if self.key is not None:
            if key is None and self.drawing is not None:
                raise ValueError(needs_key(self.drawing))
            if self.drawing is not None:
                self.draws.note(key, [leaves[place] for place in self.params])
            slots[self.key] = key
        if self.asked is not None:
            if key is None:
                raise ValueError(NO_KEY)
            slots[self.asked] = [None]  # its last reader empties this list
        for slot, places in self.inputs:
            slots[slot] = [leaves[at] for at in places]
        for slot, leaves_of in self.held:
            slots[slot] = [*map(local_of, leaves_of())]
        for slot, home in self.homes:
            slots[slot] = [brought(leaf, home) for leaf in slots[slot]]
        for function, reads, slot in self.prepare:
            slots[slot] = function(*[slots[k] for k in reads])[0]
        return slots


def entrance_of(lowered: Lowered, model: Model, handed: InputLeaves, homes: Mapping[Value, torch.device]) -> Entrance:
    """Return what a lowered program finds in its slots before its first instruction."""
    slots, held = lowered.slots, dict[Any, Callable[[], list[Any]]]()
    for n, net in nets_of(model).items():
        held |= {Value("const", n): net.constants}
    count = len(slots) - sum(len(instruction.writes) for instruction in lowered.instructions)
    return Entrance(
        start=[lowered.constants.get(slot) for slot in range(count)],
        inputs=[(slots[value], places) for value, places in handed.places.items()],
        homes=[(slots[value], homes[value]) for value in handed.places if value in homes and value.name in BATCH],
        held=[(slots[name], leaves_of) for name, leaves_of in held.items() if name in slots],
        key=slots.get(KEY),
        asked=slots.get(Value("key")),
        drawing=None if lowered.drawing is None else who_draws(model, lowered.drawing),
        draws=KeyWatch(),
        params=[place for value, places in handed.places.items() if value.name in PARAMETERS for place in places],
        prepare=lowered.prepare,
    )


def nets_of(model: Model) -> dict[int, PositionalStage]:
    """Return the stages that are cut out of a net, by number."""
    return {n: stage.forward for n, stage in enumerate(model.stages) if isinstance(stage.forward, PositionalStage)}


@dataclass(frozen=True)
class ResultLeaf:
    """The place of a leaf of the results in a slot, and how it leaves: copied, as a DTensor, in another dtype."""

    at: int
    slot: int
    copied: bool = False
    sharding: Sharding | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Exit:
    """Where results are in the slots, their containers, and the stages whose state stays the caller's."""

    containers: Any
    leaves: Sequence[Any]
    untouched: frozenset[int]

    def results(self, slots: Sequence[Any], state: Any) -> dict[str, Any]:
        """Return the results by name."""
        results = tree.unflatten(self.containers, [_result(leaf, slots) for leaf in self.leaves])
        if self.untouched:
            pairs = enumerate(results["state"])
            results["state"] = tuple(state[n] if n in self.untouched else written for n, written in pairs)
        return results


def exit_of(
    program: Program,
    model: Model,
    lowered: Lowered,
    inputs: StepInputs,
    own: bool,
) -> Exit:
    """Return the way out to the outputs of a program; what shares memory, or is not the step's `own`, is copied."""
    state = inputs.state
    taken, values = {*lowered.given} - lowered.given_up, dict[Value, Any]()
    for end in program.outputs:
        abstract = lowered.trees[end.value]
        places: list[Any] = []
        for at, leaf in enumerate(abstract.leaves):
            copied = isinstance(leaf, Fact) and (not own or leaf.storage in taken or not dense(leaf))
            places.append(None if leaf is None else ResultLeaf(at, lowered.slots[end.value], copied))
            taken.update([leaf.storage] if isinstance(leaf, Fact) else [])
        values[end.value] = places if abstract.spec is None else tree.unflatten(abstract.spec, places)
    written = {end.name.stage for end in program.outputs if end.name.name == "state"}
    untouched = frozenset(n for n in range(len(model.stages)) if written and n not in written)
    state = [None if n in untouched else tensors for n, tensors in enumerate(state)] if written else None
    results = collect_results(program, model, replace(inputs, state=state), values, lambda leaf: leaf)
    of_params, of_state = tree.leaves(inputs.params), tree.leaves(None if inputs.optim is None else inputs.optim[0])
    for name, given_as in (("grads", of_params), ("params", of_params), ("opt", of_state)):
        if name in results:  # in the containers of what is handed in; gradients once or for each microbatch
            places, spec = tree.flatten(results[name])
            pairs = zip(places, cycle(given_as), strict=False)
            results[name] = tree.unflatten(spec, [_as_given(*pair) for pair in pairs])
    leaves, containers = tree.flatten(results)
    return Exit(containers, leaves, untouched)


def _as_given(leaf: Any, given: Any) -> Any:
    """Let a gradient, or a leaf of the next parameters or state, be sharded and of a dtype as what is handed in."""
    if not isinstance(leaf, ResultLeaf):
        return leaf
    return replace(leaf, sharding=sharding_of(given), dtype=getattr(given, "dtype", None))


def fact_of(leaf: Any, storages: dict[int, int], trains: bool = False, home: torch.device | None = None) -> Any:
    """Return the fact of a leaf that a step is handed; `trains` says whether it gets a gradient."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_strided(leaf):
        raise Untraceable(f"it is handed a {layout_of(leaf)}")
    known = fact(leaf, storages)
    device = (home or torch.get_default_device()) if leaf.is_meta else known.aval.device  # an example without data
    return known._replace(aval=known.aval._replace(wants=trains, device=device))


def _moved_home(known: Any, home: torch.device | None) -> Any:
    """Return the fact of a leaf of the batch on the device of the rank that reads it."""
    if home is None or not isinstance(known, Fact) or known.aval.device == home:
        return known
    return in_own_storage(known.aval._replace(device=home))


def _result(leaf: Any, slots: Sequence[Any]) -> Any:
    """Return a leaf of the results: from its slot, or itself."""
    if not isinstance(leaf, ResultLeaf):
        return leaf
    tensor = slots[leaf.slot][leaf.at]
    tensor = tensor.clone() if leaf.copied else tensor
    tensor = tensor if leaf.dtype is None or tensor.dtype is leaf.dtype else tensor.to(leaf.dtype)
    return tensor if leaf.sharding is None else leaf.sharding.whole(tensor)
