"""Compute the memory of a program before it runs: the bytes of every value, and the peak of each rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fpipe.graphs.language.graph import Fact
from fpipe.limits import check_whole_number
from fpipe.meaning.devices import BATCH
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.recorder import Storages
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Op, Program, Value
from fpipe.runtimes.lowering.lowered import AbstractTree
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.shard_shapes import Share
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import UntracedStages
from fpipe.runtimes.processes.message_layout import Layout
from fpipe.runtimes.processes.message_order import messages_of, peak_bytes_in_flight, with_results_last
from fpipe.timing.amounts import scattered_value
from fpipe.timing.memory import Account
from fpipe.transforms.communicate import with_transfers
from fpipe.transforms.update import is_post_validated

_Cell = tuple[str, int | None, int | None, int | None]
"""Kind, stage, microbatch and slice of an op."""
# In a program of other kinds of op, an op reads what these read together.
_SAME_READS = {"B": ("I", "W"), "I": ("B",), "W": ("B",), "R": ("F",)}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a program's values for one model and one batch.

    Attributes:
        bytes: for each value the bytes of the distinct storages that it lies in, without those of params and batch.
        peak: for each rank the most bytes that it holds: values from their writer to their last reader, copies of other
            ranks' values from just before their first reader, whether the program has transfers as ops or not.
        storages_by_value: for each value its storages, with the bytes of each.
        hoisted: for each op, by kind, stage, microbatch and slice, the values of parameters alone that it reads.
        wire_bytes: for each value the bytes of its message.
        in_flight: for each rank the most bytes of messages next to these, with runtime="distributed" over gloo:
            receives that it has posted ahead, and sends that nobody has acknowledged yet.
        graph: for each rank the bytes that a graph of `build(graph=True)` holds between steps, where parameters and
            optimizer state are read in place: the memory of the peak, and the copies of the batch.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x @ p, lambda p, x: x * p], torch.nn.functional.mse_loss)
    >>> params, x = (torch.ones(4, 4), torch.ones(4)), torch.ones(2, 4)
    >>> sizes = fpipe.sizes(fpipe.place("linear")(fpipe.program(model)), model, params, (x, x))
    >>> sizes.size(fpipe.Value("y", 0, 0)), sizes.peak
    (32, (96, 116))
    """

    bytes: Mapping[Value, int]
    peak: tuple[int, ...]
    storages_by_value: Mapping[Value, Storages] = field(default_factory=dict[Value, Storages], repr=False)
    hoisted: Mapping[_Cell, Sequence[Value]] = field(default_factory=dict[_Cell, Sequence[Value]], repr=False)
    wire_bytes: Mapping[Value, int] = field(default_factory=dict[Value, int], repr=False)
    in_flight: tuple[int, ...] = ()
    graph: tuple[int, ...] = ()

    def storages(self, value: Value) -> Storages:
        """Return the storages of a value, with the bytes of each; storages of params and batch do not count.

        Values that share memory share a storage. A gradient that its backward adds in place to a sum has none.
        """
        return self.storages_by_value[self._original(value)]

    def size(self, value: Value) -> int:
        """Return the bytes of a value's tensors in a message, also of params and batch."""
        return self.wire_bytes[self._original(value)]

    def hoisted_values(self, op: Op) -> Sequence[Value]:
        """Return the hoisted values that an op reads: they depend on parameters alone, and serve several ops."""
        if op[:4] in self.hoisted:
            return self.hoisted[op[:4]]
        cells = ((kind, *op[1:4]) for kind in _SAME_READS.get(op.kind, ()))
        return [*dict.fromkeys(value for cell in cells for value in self.hoisted.get(cell, ()))]

    def _original(self, value: Value) -> Value:
        """Return the value itself if these sizes know it, else the value that it is a copy of."""
        original = value if value in self.wire_bytes else value._replace(location="")
        if original not in self.wire_bytes:
            raise ValueError(
                f"the bytes of {value} are not known: these are sizes of another program. Call fpipe.sizes with this "
                "one."
            )
        return original

    def __str__(self) -> str:
        lines = [f"rank {rank}: {size / 2**20:.2f} MiB at most" for rank, size in enumerate(self.peak)]
        largest = sorted(self.bytes.items(), key=lambda pair: -pair[1])[:8]
        return "\n".join([*lines, *(f"{value}: {size / 2**20:.2f} MiB" for value, size in largest)])


def sizes(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    state: Sequence[Any] | None = None,
    runtime: Literal["local", "threads", "distributed"] = "local",
    replicas: int = 1,
    donate: bool = False,
    hoist: bool = True,
) -> Sizes:
    """Compute the bytes that a step would hold, from shapes alone.

    Args:
        program: what to do, in which order.
        model: the stages it is about.
        params, batch, state: as a step takes them; tensors may be on the meta device.
        runtime: in one process ("local", "threads") a copy on another rank is the memory of its value. In processes
            ("distributed") peaks count messages: one that is sent, beside its value, until the op that receives it, and
            one that is received for as long as a value lies in it.
        replicas: how many share the parameters out of a program that `shard` made: what is gathered counts, shards do
            not, as params and batch do not. `params` are whole.
        donate: of a program with an `update`, whether its step overwrites parameters and optimizer state. With
            validate="after" these are kept until all norms are known.
        hoist: whether what depends on parameters alone is computed once for all microbatches, as of `build`. Such
            values count in `peak`.

    Returns:
        `Sizes`; `build(..., record=True)` counts the same peaks while it runs.

    Raises:
        ValueError: a stage that cannot be traced, with the reason; a program that is not one of this model; a runtime
            that is not known.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    >>> model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> batch = torch.empty(1024, 256, device="meta"), torch.empty(1024, 1, device="meta")
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    >>> sizes = fpipe.sizes(program, model, params, batch)
    >>> sizes.bytes[fpipe.Value("y", 0, 0)]  # 256 rows, 256 wide, 4 bytes each
    262144
    """
    if runtime not in ("local", "threads", "distributed"):
        raise ValueError(f"runtime is 'local', 'threads' or 'distributed'; found {runtime!r}.")
    check_match(program, model)
    # 1. Lower the program as a step would, which tells the storages of every value.
    try:
        inputs = StepInputs(params, batch, state, example_optim(program, params))
        share = Share(0, replicas) if check_whole_number("replicas", replicas) > 1 else None
        options = StepOptions(donate=donate and not is_post_validated(program), hoist=hoist, runs=False)
        transferred = with_transfers(program)
        transferred = with_results_last(transferred) if runtime == "distributed" else transferred
        lowered = PreparedStep(transferred, model, inputs, UntracedStages(), options, ProcessContext(share=share))
    except Untraceable as error:
        raise ValueError(f"the sizes of this program's values are not known before it runs: {error}") from error
    trees = _without_unread_leaves(program, lowered) if share else lowered.trees
    storages_by_value = _storages_by_value(trees, lowered.lowered.external_storages)
    # 2. Follow the instructions: each rank holds a value from its writer to its last reader.
    memory_account, message_bytes = Account(program.ranks), dict[Value, int]()
    local_storages: dict[Value, Storages] = {value: {} for value in (*program.writer, *trees)}
    hoisted_slots = {slot: value for value, slot in lowered.lowered.slots.items() if value[0] == "hoisted"}
    hoisted: dict[_Cell, Sequence[Value]] = {}
    receipts = _Receipts() if runtime == "distributed" else None
    for instruction in lowered.instructions:
        op = instruction.ops[0]
        hoisted[op[:4]] = [hoisted_slots[slot] for slot in instruction.reads if slot in hoisted_slots]
        written_storages = {value: storages_by_value[value] for value in instruction.written_values}
        local_storages.update(written_storages)
        if receipts:
            written_storages = {
                value: receipts.storages(op, trees[value].leaves, storages_by_value[value])
                for value in written_storages
            }
            if op.kind == "SEND":
                message_bytes.update((value, sum(storages.values())) for value, storages in written_storages.items())
        memory_account.record_op(op.rank, written_storages.items(), instruction.dead)
    byte_sizes = {value: sum(memory.values()) for value, memory in storages_by_value.items() if value in program.writer}
    # 3. Bytes of messages. Values without leaves have 0; a transfer that casts sends fewer bytes than its value has.
    wire = dict.fromkeys(local_storages, 0)
    wire.update((value, sum(map(_bytes_on_wire, abstract.leaves))) for value, abstract in trees.items())
    for op in program.ops:
        if op.kind in ("SEND", "SCATTER") and "cast" in dict(op.options):
            message = op.writes[0] if op.kind == "SEND" else scattered_value(op)
            cast = getattr(torch, dict(op.options)["cast"]).itemsize
            leaves = trees[op.reads[0]].leaves
            wire[message] = sum(_bytes_on_wire(leaf, cast, op.kind == "SCATTER") for leaf in leaves)
    messages = messages_of(transferred) if receipts else ()
    bytes_by_message = {message.number: message_bytes[message.value] for message in messages}
    in_flight = tuple(peak_bytes_in_flight(transferred, bytes_by_message)) if receipts else ()
    # 4. A graph keeps the memory of its peak, and has a copy of the batch on each rank that reads it.
    graph = [*memory_account.peak]
    for program_input in transferred.inputs:
        for home in program_input.homes if program_input.value.name in BATCH else ():
            graph[home] += wire[program_input.value]
    return Sizes(byte_sizes, tuple(memory_account.peak), local_storages, hoisted, wire, in_flight, tuple(graph))


def _without_unread_leaves(program: Program, lowered: PreparedStep) -> Mapping[Value, AbstractTree]:
    """Return the trees of all values, without the leaves of gathered parameters that nobody reads or sends."""
    trees, read_leaves = dict(lowered.trees), lowered.lowered.read_leaves
    for value in (op.writes[0] for op in program.ops if op.kind == "GATHER" and op.writes[0] in read_leaves):
        leaves = [leaf if index in read_leaves[value] else None for index, leaf in enumerate(trees[value].leaves)]
        trees[value] = trees[value]._replace(leaves=tuple(leaves))
    return trees


class _Receipts:
    """The memory of values that a process has received: their message, or a copy of leaves that cannot lie in it."""

    def __init__(self) -> None:
        self.received: dict[tuple[int, Hashable], tuple[Hashable, int]] = {}

    def storages(self, op: Op, leaves: Sequence[Any], owned: Storages) -> Storages:
        """Return the storages that a value has on the rank of its writer; `owned` are its storages in one process."""
        # A SEND packs its value into a message.
        if op.kind == "SEND":
            return {op.writes: _layout(leaves).size}
        facts = [leaf for leaf in leaves if isinstance(leaf, Fact)]
        # All leaves that lie in a message are one storage, of its size. Later values that are views of a received one
        # find it here, by the storage that it would have in one process.
        if op.kind == "RECV":
            layout = _layout(leaves)
            for leaf in facts:
                copied_bytes = layout.bytes_to_unpack(leaf)
                storage = (op.writes, leaf.storage) if copied_bytes else op.writes
                self.received[op.rank, leaf.storage] = storage, copied_bytes or layout.size
        received = [self.received[op.rank, leaf.storage] for leaf in facts if (op.rank, leaf.storage) in self.received]
        unreceived = {storage: size for storage, size in owned.items() if (op.rank, storage) not in self.received}
        return unreceived | dict(received)


def _layout(leaves: Sequence[Any]) -> Layout:
    device = next((leaf.aval.device for leaf in leaves if isinstance(leaf, Fact)), torch.device("cpu"))
    return Layout(leaves, device)


def _storages_by_value(trees: Mapping[Value, AbstractTree], external: Collection[int]) -> dict[Value, Storages]:
    # The fact of a view of a received value knows only the part of the storage that it sees: take the largest.
    largest: Storages = {}
    facts = {value: [leaf for leaf in tree.leaves if isinstance(leaf, Fact)] for value, tree in trees.items()}
    for leaf in (leaf for leaves in facts.values() for leaf in leaves):
        largest[leaf.storage] = max(leaf.bytes, largest.get(leaf.storage, 0))
    return {
        value: {leaf.storage: largest[leaf.storage] for leaf in leaves if leaf.storage not in external}
        for value, leaves in facts.items()
    }


def _bytes_on_wire(leaf: Any, cast_bytes: float = math.inf, widens: bool = False) -> int:
    """Return the bytes of a leaf in a message, whose floats are cast to `cast_bytes`, wider only if it `widens`."""
    if not isinstance(leaf, Fact):
        return 0
    dtype = leaf.aval.dtype
    size = cast_bytes if widens else min(dtype.itemsize, cast_bytes)
    return math.prod(leaf.aval.shape) * int(size if dtype.is_floating_point else dtype.itemsize)
