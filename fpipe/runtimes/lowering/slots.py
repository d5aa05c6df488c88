"""Fill the slots of a step from its arguments, and read its results from the slots.

params, batch, state        --> Entrance --> slots --> Exit -->        loss, grads, outputs, state
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact, fact_in_own_storage, fact_of_tensor
from fpipe.meaning.devices import BATCH, bring_batch_leaf, check_at_home, leaf_home
from fpipe.meaning.inputs_and_results import bind_inputs, collect_results
from fpipe.meaning.meaning import check_and_measure_batch
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.keys import KeyWatch, missing_key_message
from fpipe.meaning.purity.sharded import Sharding, local_shard, sharding_of
from fpipe.meaning.purity.write_guard import is_strided, layout_of
from fpipe.meaning.single_device.params_and_state import as_streams, trainable_bundle_leaves
from fpipe.meaning.step import NO_KEY, Keys, StepInputs
from fpipe.model import Model, label_with_random_modules
from fpipe.positional_stage import PositionalStage
from fpipe.program import PARAMETERS, Program, Value
from fpipe.runtimes.lowering.instructions import InstructionGenerators
from fpipe.runtimes.lowering.lowered import KEY, AbstractTree, Lowered, is_dense_fact
from fpipe.runtimes.lowering.rank_part import Slots
from fpipe.runtimes.lowering.shard_shapes import Share, SharedValue, refuse_shards, shard_state, share_out


@dataclass(frozen=True)
class ProcessContext:
    """The devices and replicas that the step of one process runs on.

    Attributes:
        home: the device for leaves without data; None for the default device.
        devices: the device of each rank; none if ranks compute where their tensors are.
        replica: the number of this replica, and how many there are.
        share: which part of each sharded parameter this process has.
        first_microbatch: the index of this replica's first microbatch; None if all replicas have equally many.
    """

    home: torch.device | None = None
    devices: Sequence[torch.device] = ()
    replica: tuple[int, int] = (0, 1)
    share: Share | None = None
    first_microbatch: int | None = None


@dataclass(frozen=True)
class InputLeaves:
    """The leaves of a step's arguments, by the input values of its program.

    Attributes:
        trees: the abstract tree of each input value.
        leaf_indices: for each input value, the indices of its leaves among the leaves of all arguments.
        leaf_devices: for each leaf, the device where it is, or would be if it had data.
        shared: the values that replicas share out.
    """

    trees: Mapping[Value, AbstractTree]
    leaf_indices: Mapping[Value, Sequence[int]]
    leaf_devices: Sequence[torch.device]
    shared: Mapping[Value, SharedValue]


def input_leaves_of(
    program: Program,
    model: Model,
    inputs: StepInputs,
    process: ProcessContext,
    homes: Mapping[Value, torch.device],
    storages: dict[int, int],
) -> InputLeaves:
    """Bind the leaves of a step's arguments to the input values of its program.

    Args:
        program, model, inputs, process: as a step has them.
        homes: for an input value, the device of the rank that reads it.
        storages: the storage numbers by address so far; those of the leaves are added.
    """
    # 1. Bind indices instead of tensors to the inputs of the program: only the structure of the arguments counts.
    leaves, containers = tree.flatten(inputs.trees)
    params, batch, state, optim = tree.unflatten(containers, range(len(leaves)))
    whole_batch, sizes = check_and_measure_batch(program, inputs.batch)
    batch = batch if whole_batch is inputs.batch else as_streams(batch, len(sizes))
    state = None if inputs.state is None else state
    optim = None if inputs.optim is None else optim
    places_of = bind_inputs(program, model, StepInputs(params, batch, state, optim, inputs.key))
    trees, leaf_indices, shared = dict[Value, AbstractTree](), dict[Value, Sequence[int]](), dict[Value, SharedValue]()
    leaf_devices = [process.home or torch.get_default_device()] * len(leaves)
    # The key is no tensor. Each stage and microbatch folds its number into it.
    if places_of.pop(Value("key"), None) is not None:
        trees[Value("key")] = AbstractTree((inputs.key,), tree.flatten(inputs.key)[1])
    for value, subtree in places_of.items():
        leaf_indices[value], spec = tree.flatten(subtree)
        value_leaves = [leaves[index] for index in leaf_indices[value]]
        # 2. Devices: the batch is copied to the rank that reads it; everything else has to be there.
        device_by_index = {index: leaf_home(value, leaves[index], homes.get(value)) for index in leaf_indices[value]}
        if value.name not in BATCH:
            for index, device in device_by_index.items():
                if device is not None:
                    check_at_home(value, [leaves[index]], device, example=True)
                    leaf_devices[index] = device
        # 3. Facts: parameters that train want a gradient.
        train = [False] * len(value_leaves)
        if value.name in PARAMETERS:
            train = trainable_bundle_leaves(model, value.stage or 0, value.port, tree.unflatten(spec, value_leaves))
        rows = zip(value_leaves, train, leaf_indices[value], strict=True)
        facts = (fact_of_input(leaf, storages, trains, leaf_devices[index]) for leaf, trains, index in rows)
        trees[value] = AbstractTree(tuple(map(_fact_at_home, facts, device_by_index.values())), spec)
        # 4. Of parameters and optimizer state that replicas share out, this process has its rows.
        if value.name == "shard":
            name, paths = f"params[{value.stage}]", [path for path, _ in tree.paths(subtree)]
            if process.share is None:
                refuse_shards(trees[value], name, paths)
            else:
                shared[value] = share_out(trees[value], process.share, name, paths)
                trees[value] = shared[value].shard
        shard = shared.get(value._replace(name="shard")) if value.name == "opt" else None
        if shard is not None:
            trees[value] = shard_state(shard, trees[value])
    return InputLeaves(trees, leaf_indices, leaf_devices, shared)


@dataclass(frozen=True)
class Entrance:
    """How the slots are filled before the first instruction.

    Attributes:
        start: the slots with what they hold in every step.
        inputs: slots of input values, each with the indices of its leaves among the leaves of all arguments.
        homes: slots of the batch whose leaves are copied to a device, with the device.
        constants: slots of a stage's constants, each with the function that returns them.
        draw_key_slot: the slot of the step's key for stages that draw.
        requested_key_slot: the slot of the key for stages that ask for it as an argument.
        drawing_stage: the name of a stage that draws, for errors.
        key_watch: warns if two steps draw with one key.
        params: the indices of the parameters among the leaves of all arguments.
        donated: the indices of leaves that the step may overwrite, and whose memory results lie in.
        new_each_step: the indices of leaves that are other tensors in each step: the batch, and numbers of an update.
    """

    start: Slots
    inputs: Sequence[tuple[int, Sequence[int]]]
    homes: Sequence[tuple[int, torch.device]]
    constants: Sequence[tuple[int, Callable[[], list[Any]]]]
    draw_key_slot: int | None
    requested_key_slot: int | None
    drawing_stage: Any
    key_watch: KeyWatch
    params: Sequence[int]
    donated: frozenset[int]
    new_each_step: frozenset[int]

    def fill(self, leaves: Sequence[Any], key: Keys) -> Slots:
        """Check the key, and return the slots of a step, filled for its first instruction."""
        self.check_key(leaves, key)
        return self.fill_slots(leaves, key)

    def constant_leaves(self) -> list[Any]:
        """Return the present tensors that stages hold, which a step reads besides its arguments."""
        return [local_shard(leaf) for _, leaves_of in self.constants for leaf in leaves_of()]

    def check_key(self, leaves: Sequence[Any], key: Keys) -> None:
        """Raise ValueError if a step needs a key and has none; note the key of a step that draws."""
        if self.draw_key_slot is not None and self.drawing_stage is not None:
            if key is None:
                raise ValueError(missing_key_message(self.drawing_stage))
            self.key_watch.note(key, [leaves[index] for index in self.params])
        if self.requested_key_slot is not None and key is None:
            raise ValueError(NO_KEY)

    def fill_slots(self, leaves: Sequence[Any], key: Keys | InstructionGenerators) -> Slots:
        """Return the slots of a step, filled for its first instruction; `key` may stand for generators."""
        slots = self.start[:]
        if self.draw_key_slot is not None:
            slots[self.draw_key_slot] = key
        if self.requested_key_slot is not None:
            # Stages without a trace get the key from the other slot. The last reader of this list empties it.
            slots[self.requested_key_slot] = [None]
        for slot, indices in self.inputs:
            slots[slot] = [leaves[index] for index in indices]
        for slot, leaves_of in self.constants:
            slots[slot] = [*map(local_shard, leaves_of())]
        for slot, home in self.homes:
            slots[slot] = [bring_batch_leaf(leaf, home) for leaf in slots[slot]]
        return slots


def build_entrance(
    lowered: Lowered, model: Model, inputs: InputLeaves, homes: Mapping[Value, torch.device]
) -> Entrance:
    """Return the entrance to a lowered program: how its arguments get into slots."""
    slots, constants_by_value = lowered.slots, dict[Any, Callable[[], list[Any]]]()
    for n, net in nets_of(model).items():
        constants_by_value |= {Value("const", n): net.constants}
    count = len(slots) - sum(len(instruction.writes) for instruction in lowered.instructions)

    def indices_of(names: Collection[str]) -> list[int]:
        return [index for value, indices in inputs.leaf_indices.items() if value.name in names for index in indices]

    return Entrance(
        start=[lowered.constants.get(slot) for slot in range(count)],
        inputs=[(slots[value], indices) for value, indices in inputs.leaf_indices.items()],
        homes=[(slots[value], homes[value]) for value in inputs.leaf_indices if value in homes and value.name in BATCH],
        constants=[(slots[name], leaves_of) for name, leaves_of in constants_by_value.items() if name in slots],
        draw_key_slot=slots.get(KEY),
        requested_key_slot=slots.get(Value("key")),
        drawing_stage=None
        if lowered.first_drawing_stage is None
        else label_with_random_modules(model, lowered.first_drawing_stage),
        key_watch=KeyWatch(),
        params=indices_of(PARAMETERS),
        donated=frozenset(
            index
            for value, indices in inputs.leaf_indices.items()
            for index, leaf in zip(indices, inputs.trees[value].leaves, strict=True)
            if isinstance(leaf, Fact) and leaf.storage in lowered.donated_storages
        ),
        new_each_step=frozenset(indices_of((*BATCH, "lr", "scale"))),
    )


def nets_of(model: Model) -> dict[int, PositionalStage]:
    """Return the functions of stages that are cut from a net, by stage number."""
    return {n: stage.forward for n, stage in enumerate(model.stages) if isinstance(stage.forward, PositionalStage)}


@dataclass(frozen=True)
class ResultLeaf:
    """Where a leaf of the results lies in the slots, and how it is returned: copied, as a DTensor, in another dtype."""

    leaf_index: int
    slot: int
    copied: bool = False
    sharding: Sharding | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Exit:
    """How results are read from the slots.

    Attributes:
        containers: the containers of all results.
        leaves: the leaves of the results: a `ResultLeaf`, or the leaf itself.
        kept_stages: the stages whose state no op writes, so that the caller's is returned.
    """

    containers: Any
    leaves: Sequence[Any]
    kept_stages: frozenset[int]

    def results(self, slots: Sequence[Any], state: Any) -> dict[str, Any]:
        """Return the results by name."""
        results = tree.unflatten(self.containers, [_read_result(leaf, slots) for leaf in self.leaves])
        if self.kept_stages:
            pairs = enumerate(results["state"])
            results["state"] = tuple(state[n] if n in self.kept_stages else new_state for n, new_state in pairs)
        return results


def build_exit(program: Program, model: Model, lowered: Lowered, inputs: StepInputs, owns_memory: bool) -> Exit:
    """Return the exit from a lowered program: where its outputs are in the slots.

    Results that share memory with arguments or other results are copied; all but donated ones are, unless the step
    `owns_memory`.
    """
    # 1. Each leaf of an output, with whether it needs a copy: the caller may write into a result, and nothing else may
    #    change by that.
    state = inputs.state
    used_storages, values = {*lowered.external_storages} - lowered.donated_storages, dict[Value, Any]()
    for end in program.outputs:
        abstract = lowered.trees[end.value]
        result_leaves: list[Any] = []
        for leaf_index, leaf in enumerate(abstract.leaves):
            is_shared = isinstance(leaf, Fact) and (leaf.storage in used_storages or not is_dense_fact(leaf))
            is_owned = owns_memory or (isinstance(leaf, Fact) and leaf.storage in lowered.donated_storages)
            copied = isinstance(leaf, Fact) and (is_shared or not is_owned)
            result_leaves.append(None if leaf is None else ResultLeaf(leaf_index, lowered.slots[end.value], copied))
            used_storages.update([leaf.storage] if isinstance(leaf, Fact) else [])
        values[end.value] = result_leaves if abstract.spec is None else tree.unflatten(abstract.spec, result_leaves)
    # 2. Results in the structure that callers know. State that no op writes is returned as it was handed in.
    written_stages = {end.name.stage for end in program.outputs if end.name.name == "state"}
    kept_stages = frozenset(n for n in range(len(model.stages)) if written_stages and n not in written_stages)
    state = [None if n in kept_stages else tensors for n, tensors in enumerate(state)] if written_stages else None
    results = collect_results(program, model, replace(inputs, state=state), values, lambda leaf: leaf)
    # 3. Gradients, parameters and state are sharded, and of a dtype, as the arguments that they belong to. `cycle`:
    #    gradients come once, or once for each microbatch.
    of_params, of_state = tree.leaves(inputs.params), tree.leaves(None if inputs.optim is None else inputs.optim[0])
    for name, originals in (("grads", of_params), ("params", of_params), ("opt", of_state)):
        if name in results:
            result_leaves, spec = tree.flatten(results[name])
            pairs = zip(result_leaves, cycle(originals), strict=False)
            results[name] = tree.unflatten(spec, [_like_input(*pair) for pair in pairs])
    leaves, containers = tree.flatten(results)
    return Exit(containers, leaves, kept_stages)


def _like_input(leaf: Any, original: Any) -> Any:
    """Return a leaf of gradients, parameters or state with the sharding and dtype of the argument it belongs to."""
    if not isinstance(leaf, ResultLeaf):
        return leaf
    return replace(leaf, sharding=sharding_of(original), dtype=getattr(original, "dtype", None))


def fact_of_input(leaf: Any, storages: dict[int, int], trains: bool = False, home: torch.device | None = None) -> Any:
    """Return the fact of a leaf of a step's arguments; `trains` says whether it gets a gradient."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_strided(leaf):
        raise Untraceable(f"it is handed a {layout_of(leaf)}")
    fact = fact_of_tensor(leaf, storages)
    # An example without data, on meta, stands for a tensor on the device where steps will have it.
    device = (home or torch.get_default_device()) if leaf.is_meta else fact.aval.device
    return fact._replace(aval=fact.aval._replace(wants_grad=trains, device=device))


def _fact_at_home(fact: Any, home: torch.device | None) -> Any:
    """Return the fact of a leaf after its copy to the device of the rank that reads it."""
    if home is None or not isinstance(fact, Fact) or fact.aval.device == home:
        return fact
    return fact_in_own_storage(fact.aval._replace(device=home))


def _read_result(leaf: Any, slots: Sequence[Any]) -> Any:
    if not isinstance(leaf, ResultLeaf):
        return leaf
    tensor = slots[leaf.slot][leaf.leaf_index]
    if tensor is None:  # the gradient of a parameter that no row reached, in a stage without a trace
        return None
    tensor = tensor.clone() if leaf.copied else tensor
    tensor = tensor if leaf.dtype is None or tensor.dtype is leaf.dtype else tensor.to(leaf.dtype)
    return tensor if leaf.sharding is None else leaf.sharding.to_dtensor(tensor)
