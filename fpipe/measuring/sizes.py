"""Read a program as memory: the bytes of every value, and the most each rank holds, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fpipe.graphs.language.graph import Fact
from fpipe.limits import whole
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.recorder import Storages
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Op, Program, Value
from fpipe.runtimes.lowering.lowered import AbstractTree
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.shards import Share
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import Untraced
from fpipe.runtimes.processes.message import Layout
from fpipe.runtimes.processes.message_order import messages, most_in_flight, results_last
from fpipe.timing.amounts import scattered
from fpipe.timing.memory import Account
from fpipe.transforms.communicate import with_transfers
from fpipe.transforms.update import is_post_validated


@dataclass(frozen=True)
class Sizes:
    """Bytes of a program's values for one model and one batch.

    Attributes:
        bytes: for each value the bytes of the distinct storages it lies in, those of params and batch aside.
        peak: for each rank the most bytes it holds: values from where they are written to where they are read last,
            copies of other ranks' from just before they are read first, whether their transfers are ops or not.
        in_flight: for each rank the most bytes of messages beside these, where runtime="distributed" and gloo carries
            them: receives that it has posted ahead, and what it has sent and nothing has acknowledged yet.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x @ p, lambda p, x: x * p], torch.nn.functional.mse_loss)
    >>> params, x = (torch.ones(4, 4), torch.ones(4)), torch.ones(2, 4)
    >>> found = fpipe.sizes(fpipe.place("linear")(fpipe.program(model)), model, params, (x, x))
    >>> found.size(fpipe.Value("y", 0, 0)), found.peak
    (32, (96, 116))
    """

    bytes: Mapping[Value, int]
    peak: tuple[int, ...]
    where: Mapping[Value, Storages] = field(default_factory=dict[Value, Storages], repr=False)
    wire: Mapping[Value, int] = field(default_factory=dict[Value, int], repr=False)
    in_flight: tuple[int, ...] = ()

    def storages(self, value: Value) -> Storages:
        """The storages that a value lies in, params and batch aside. Values that share memory share a storage; a
        gradient that its backward adds in place to a sum is in none of its own."""
        return self.where[self._known(value)]

    def size(self, value: Value) -> int:
        """Bytes of a value's tensors when they travel, those of params and batch too."""
        return self.wire[self._known(value)]

    def _known(self, value: Value) -> Value:
        """Return the value, or the one that it is a copy of in another program."""
        original = value if value in self.wire else value._replace(at="")
        if original not in self.wire:
            raise ValueError(
                f"the bytes of {value} are not known: these are the sizes of a program without it. Call "
                "fpipe.sizes (or fpipe.profile) with the program that is simulated."
            )
        return original

    def __str__(self) -> str:
        lines = [f"rank {rank}: {size / 2**20:.2f} MiB at most" for rank, size in enumerate(self.peak)]
        largest = sorted(self.bytes.items(), key=lambda item: -item[1])[:8]
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
) -> Sizes:
    """Bytes that a step would hold, from shapes alone: nothing is computed.

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
    >>> found = fpipe.sizes(program, model, params, batch)
    >>> found.bytes[fpipe.Value("y", 0, 0)]  # 256 rows, 256 wide, 4 bytes each
    262144
    """
    if runtime not in ("local", "threads", "distributed"):
        raise ValueError(f"runtime {runtime!r} is not known; there are 'local', 'threads' and 'distributed'.")
    check_match(program, model)
    try:
        inputs = StepInputs(params, batch, state, example_optim(program, params))
        share = Share(0, whole("replicas", replicas)) if replicas > 1 else None
        options = StepOptions(donate=donate and not is_post_validated(program), runs=False)
        sent = with_transfers(program)
        sent = results_last(sent) if runtime == "distributed" else sent
        lowered = Prepared(sent, model, inputs, Untraced(), options, ProcessContext(share=share))
    except Untraceable as error:
        raise ValueError(f"the sizes of this program's values are not known before it runs: {error}") from error
    trees = _without_unread(program, lowered) if share else lowered.trees
    owned = _storages_by_value(trees, lowered.lowered.given)
    account, message_bytes = Account(program.ranks), dict[Value, int]()
    where: dict[Value, Storages] = {value: {} for value in (*program.writer, *trees)}
    receipts = _Receipts() if runtime == "distributed" else None
    for instruction in lowered.instructions:
        op, written = instruction.ops[0], {value: owned[value] for value in instruction.written}
        where.update(written)
        if receipts:
            written = {value: receipts.storages(op, trees[value].leaves, owned[value]) for value in written}
            if op.kind == "SEND":
                message_bytes.update((value, sum(storages.values())) for value, storages in written.items())
        account.note(op.rank, written.items(), instruction.dead)
    byte_sizes = {value: sum(storages.values()) for value, storages in owned.items() if value in program.writer}
    wire = dict.fromkeys(where, 0)  # what has no leaves, too
    wire.update((value, sum(map(_bytes_on_wire, abstract.leaves))) for value, abstract in trees.items())
    for op in program.ops:
        if op.kind in ("SEND", "SCATTER") and "cast" in dict(op.how):
            message = op.writes[0] if op.kind == "SEND" else scattered(op)
            cast = getattr(torch, dict(op.how)["cast"]).itemsize
            leaves = trees[op.reads[0]].leaves
            wire[message] = sum(_bytes_on_wire(leaf, cast, op.kind == "SCATTER") for leaf in leaves)
    by_number = {message.number: message_bytes[message.value] for message in messages(sent)} if receipts else {}
    in_flight = tuple(most_in_flight(sent, by_number)) if receipts else ()
    return Sizes(byte_sizes, tuple(account.peak), where, wire, in_flight)


def _without_unread(program: Program, lowered: Prepared) -> Mapping[Value, AbstractTree]:
    """Return the facts of each value; leaves of gathered parameters that nobody reads are not sent, and left out."""
    trees, read = dict(lowered.trees), lowered.lowered.gathered
    for value in (op.writes[0] for op in program.ops if op.kind == "GATHER" and op.writes[0] in read):
        leaves = [leaf if index in read[value] else None for index, leaf in enumerate(trees[value].leaves)]
        trees[value] = trees[value]._replace(leaves=tuple(leaves))
    return trees


class _Receipts:
    """Where the values that a process has received lie: in their message, or in a copy if they cannot lie there."""

    def __init__(self) -> None:
        self.received: dict[tuple[int, Hashable], tuple[Hashable, int]] = {}

    def storages(self, op: Op, leaves: Sequence[Any], owned: Storages) -> Storages:
        """Return the storages on its rank of a value that an op writes."""
        if op.kind == "SEND":
            return {op.writes: _layout(leaves).size}
        facts = [leaf for leaf in leaves if isinstance(leaf, Fact)]
        if op.kind == "RECV":
            layout = _layout(leaves)
            for leaf in facts:
                copied = layout.copied(leaf)
                place = (op.writes, leaf.storage) if copied else op.writes
                self.received[op.rank, leaf.storage] = place, copied or layout.size
        received = [self.received[op.rank, leaf.storage] for leaf in facts if (op.rank, leaf.storage) in self.received]
        local = {storage: size for storage, size in owned.items() if (op.rank, storage) not in self.received}
        return local | dict(received)


def _layout(leaves: Sequence[Any]) -> Layout:
    device = next((leaf.aval.device for leaf in leaves if isinstance(leaf, Fact)), torch.device("cpu"))
    return Layout(leaves, device)


def _storages_by_value(trees: Mapping[Value, AbstractTree], given: Collection[int]) -> dict[Value, Storages]:
    """Return the storages of each value, without those that the caller gave."""
    largest: Storages = {}  # a reader knows of a storage only the part that it sees
    facts = {value: [leaf for leaf in tree.leaves if isinstance(leaf, Fact)] for value, tree in trees.items()}
    for leaf in (leaf for leaves in facts.values() for leaf in leaves):
        largest[leaf.storage] = max(leaf.bytes, largest.get(leaf.storage, 0))
    return {
        value: {leaf.storage: largest[leaf.storage] for leaf in leaves if leaf.storage not in given}
        for value, leaves in facts.items()
    }


def _bytes_on_wire(leaf: Any, cast: float = math.inf, widens: bool = False) -> int:
    """Return the bytes of a leaf in a message; floating numbers are cast to `cast` bytes, wider only if it `widens`."""
    if not isinstance(leaf, Fact):
        return 0
    dtype = leaf.aval.dtype
    size = cast if widens else min(dtype.itemsize, cast)
    return math.prod(leaf.aval.shape) * int(size if dtype.is_floating_point else dtype.itemsize)
