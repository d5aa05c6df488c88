"""Lower a program of which this process runs one rank: its part, what it sends and receives, and what it returns.

    0F0 SEND(y) RECV(y) 1F0 1B0 ..        --> rank 1 -->        RECV(y) 1F0 1B0 ..    loss, None for stage 0's gradients

The whole program is lowered, so that each rank knows the shapes of all that travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.recorder import Held, Notes, Recorder
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Program, Value, parts_of
from fpipe.runtimes.faults.agreement import of_inputs, of_stages
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog
from fpipe.runtimes.lowering.host_lanes import made_async
from fpipe.runtimes.lowering.lane import Watch
from fpipe.runtimes.lowering.lowered import AbstractTree
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.rank_part import Slots, of_rank
from fpipe.runtimes.lowering.shards import is_share
from fpipe.runtimes.lowering.slots import Exit, ProcessContext, ResultLeaf
from fpipe.runtimes.lowering.stage_calls import Untraced
from fpipe.runtimes.lowering.untraced import KEPT
from fpipe.runtimes.processes.exchange_lane import ExchangeLane
from fpipe.runtimes.processes.message import Layout
from fpipe.runtimes.processes.replicas import NO_EXCHANGES, Replicas
from fpipe.runtimes.processes.transfers import Transfers

# Put what each rank measured of a step on one clock, that of rank 0.

_PINGS = 50  # on a busy machine the least of ten was off by more than an op took


def ahead_of_rank_0(group: ProcessGroup, rank: int, device: torch.device) -> float:
    """Seconds that this process's clock is ahead of rank 0's; all ranks call it. The answer that took least time is
    taken to have been on its way as long as the question."""
    carrier: Any = group
    word = torch.zeros((), dtype=torch.float64, device=device)
    found = 0.0
    for other in range(1, group.size()):
        best = float("inf")
        for _ in range(_PINGS) if rank in (0, other) else ():
            if rank == other:
                _gone(carrier.recv, word, 0)
                _gone(carrier.send, word.fill_(time.perf_counter()), 0)
                continue
            asked = time.perf_counter()
            _gone(carrier.send, word, other)
            theirs = _gone(carrier.recv, word, other)
            took = time.perf_counter() - asked
            if took < best:
                best, found = took, theirs - asked - took / 2
        if rank == 0:
            _gone(carrier.send, word.fill_(found), other)
        elif rank == other:
            found = _gone(carrier.recv, word, 0)
    return 0.0 if rank == 0 else found


def _gone(carry: Callable[..., Any], word: Tensor, peer: int) -> float:
    """The number, once it has come or gone. On a device a wait alone does not hold up the host, whose clock this is."""
    carry([word], peer, 0).wait()
    return word.item()


def put_together(
    recorder: Recorder, notes: Notes, group: ProcessGroup, rank: int, ahead: float, device: torch.device
) -> None:
    """Add to what this rank noted what all others did, in the first step also what they hold; all ranks call it. It
    travels on a device that the group carries."""
    if recorder.held is None:
        own = recorder.counted(notes)
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, own, group=group)
        changes = [one for other, found in enumerate(every) for one in found.changes if one[1] == other]
        recorder.held = Held(tuple(found.peak[other] for other, found in enumerate(every)), changes)
    began = [notes.began - ahead if other == rank else 0.0 for other in range(group.size())]
    own_times = [now - ahead if now else 0.0 for now in notes.times]  # each row is of one rank: a sum has them all
    both = torch.tensor([*own_times, *began], dtype=torch.float64, device=device)
    dist.all_reduce(both, group=group)
    (*notes.times,) = both[: len(own_times)].tolist()
    notes.began = both[len(own_times) :].min().item()


class RankLinks(NamedTuple):
    """Connections of this process with the others: its rank in the pipeline's group, and the ways between them."""

    rank: int
    group: ProcessGroup
    watchdog: Watchdog
    transfers: Transfers
    replicas: Replicas | None
    lane: ExchangeLane


class PreparedRank(Prepared):
    """A program lowered for one signature, of which this process runs one rank.

    All ranks agree on how it is `given_as`, its `stages` as they were traced and its `messages`; those along an axis on
    what is `exchanged`.
    """

    def __init__(
        self,
        links: RankLinks,
        program: Program,
        model: Model,
        inputs: StepInputs,
        untraced: Untraced,
        options: StepOptions,
    ) -> None:
        rank, group, watchdog, transfers, replicas, lane = links
        self.lane, self.watchdog = lane, watchdog
        self.rank, self.group, self.transfers, self.replicas, self.ahead = rank, group, transfers, replicas, None
        self.number = self.step = 0
        self.step_key: int | None = None
        self.step_batch = 0
        replica = (0, 1) if replicas is None else (replicas.number, replicas.count)
        share = None if replicas is None else replicas.share
        device = transfers.device
        process = ProcessContext(device, replica=replica, share=share)
        super().__init__(program, model, inputs, untraced, options, process)
        sent = [value for one in self.instructions if one.ops[0].kind == "SEND" for value in one.ops[0].writes]
        for value in sent:
            if value.name in KEPT and value.stage in self.untraced.stages:
                raise ValueError(
                    f"{value} is autograd's own, which no message carries: {self.untraced.stages[value.stage]}. Place "
                    "the backward of that stage where its forward is, or recompute it there, by fpipe.checkpoint()."
                )
        self.layouts = {value: Layout(self.trees[value].leaves, device) for value in sent}
        self.exchanges = NO_EXCHANGES
        if replicas is not None:
            self.instructions, self.exchanges = replicas.made_async(self.lowered, self.shared, self.weighed_rows)
        self.instructions = lane.made_async(self.instructions, self.lowered, rank)
        both = partial(transfers.send, self.layouts), partial(transfers.receive, self.layouts)
        around = partial(made_async, lane_by_rank=self.lanes)
        self.part = of_rank(self.instructions, self.model, rank, *both, around, self.lanes)
        of_part = zip(self.part.rows, self.part.instructions, strict=True)
        self._sends = [row for row, one in of_part if one.ops[0].kind == "SEND"]
        prepare = [one for one in self.entrance.prepare if one[2] in self.part.at]
        self.entrance, self.exit = replace(self.entrance, prepare=prepare), self._here(self.exit)
        handed_out = {leaf.slot for leaf in self.exit.leaves if isinstance(leaf, ResultLeaf)}
        self._handed_out = [(slot, self.part.at[slot]) for slot in handed_out if slot in self.part.at]
        read = {*self.part.begins, *(slot for one in prepare for slot in one[1])}
        values = {slot: value for value, slot in self.lowered.slots.items()}
        self._read = [(values[slot], places) for slot, places in self.entrance.inputs if slot in read]
        self.given_as = of_inputs(self.program, self.trees)
        self.stages = of_stages(self.model, self.lowered, device, self.given_as, replica[0])
        self.messages = [f"{value}: {layout.size} bytes" for value, layout in self.layouts.items()]
        self.exchanged = exchanged_by(rank, self.program, self.trees, self.model)

    def refuse_missing(self, leaves: Sequence[Any]) -> None:
        """A ValueError for arguments that lack what this rank reads."""
        for value, places in self._read:
            lacks = [k for k, at in enumerate(places) if isinstance(leaves[at], Tensor) and leaves[at].is_meta]
            if lacks:
                of = self._leaf(value, lacks[0]) if len(lacks) < len(places) else ""
                raise ValueError(
                    f"rank {self.rank} reads {value}{of}, and was handed None or a meta tensor in its place. A rank "
                    "passes local_params(program, params, rank), and its batch."
                )
            if self.replicas is None or value not in self.shared:
                continue
            axis = self.replicas.share.axis
            whole = (leaves[at] for at in places if isinstance(leaves[at], Tensor) and not is_share(leaves[at], axis))
            if (odd := next(whole, None)) is not None:
                raise ValueError(
                    f"the program shards the parameters of stage {value.stage}, and a step was handed a "
                    f"{'DTensor' if is_sharded(odd) else 'plain tensor'} of shape {tuple(odd.shape)} that is none of "
                    f"{axis!r}: fpipe.shard_params(local_params(program, params, rank), mesh[{axis!r}]) makes a "
                    "replica's shards."
                )

    def _leaf(self, value: Value, at: int) -> str:
        """The place of a leaf in a value."""
        known = self.trees[value]
        return "" if known.spec is None else tree.paths(tree.unflatten(known.spec, range(len(known.leaves))))[at][0]

    def _asked(self, program: Program) -> Program:
        """The program with one output of each name: this rank's, where it has one."""
        chosen = {end.name: end for end in program.outputs}
        chosen |= {end.name: end for end in program.outputs if self.rank in end.homes}
        return Program.trusted(program.inputs, program.ops, tuple(chosen.values()))

    def _here(self, everywhere: Exit) -> Exit:
        """The results, with None for those that are at home on other ranks."""
        whole: dict[str, Any] = tree.unflatten(everywhere.containers, everywhere.leaves)
        ends = self._asked(self.program).outputs
        away = {end.name for end in ends if self.rank not in end.homes}
        for name in whole:
            if name in ("grads", "state", "params", "opt"):
                stages = {one.stage for one in away if one.name == name}
                whole[name] = tuple(None if n in stages else one for n, one in enumerate(whole[name]))
                continue
            own = (end.name for end in ends if end.name.name == name)
            each = sorted(own, key=lambda one: (one.microbatch or 0, one.slice or 0))
            if each[0].microbatch is None:
                whole[name] = None if each[0] in away else whole[name]
            else:
                parts = zip(each, whole[name], strict=True)
                whole[name] = tuple(None if one in away else part for one, part in parts)
        leaves, spec = tree.flatten(whole)
        return replace(everywhere, containers=spec, leaves=leaves)

    def _execute(self, slots: Slots, watch: Watch | None) -> None:
        """This rank's instructions."""
        own, watchdog = [slots[slot] for slot in self.part.begins], self.watchdog
        notes = watch and watch.notes
        self.transfers.start(self.step, self.number, self.step_key, keeps=notes is not None)
        if self.replicas is not None:
            self.replicas.begin(self.exchanges, watch)
        watchdog.part = self.part
        self.lane.lane.begin(watch)
        self.part.run(own, watch)
        self.lane.lane.end()
        if notes is not None:
            for row in self._sends:
                notes.see(row, [[self.transfers.sent(value)] for value in self.instructions[row].written])
        self.transfers.end()
        if self.replicas is not None:
            self.replicas.end(self.step_key, self.step_batch)
        if notes is not None and self.recorder is not None:
            processes = tuple(dist.get_process_group_ranks(self.group))
            watchdog.wait = PeerWait(processes, "did not come to the end of the step", "at the end of")
            if self.ahead is None:
                self.ahead = ahead_of_rank_0(self.group, self.rank, self.transfers.carried)
            put_together(self.recorder, notes, self.group, self.rank, self.ahead, self.transfers.carried)
            watchdog.wait = None
        slots.extend([None] * (len(self.lowered.slots) - len(slots)))
        for slot, place in self._handed_out:
            slots[slot] = own[place]


def exchanged_by(
    rank: int, program: Program, trees: Mapping[Value, AbstractTree], model: Model
) -> dict[str, list[str]]:
    """By axis what the forward exchanges of a rank carry, which is alike on all processes of the axis."""
    found: dict[str, list[str]] = {}
    for op in parts_of(program.ops):
        by: Any = model.stages[op.stage or 0].forward
        if op.kind == "F" and op.rank == rank and isinstance(by, Exchanged):
            read = [leaf for value in op.reads if value.name != "params" for leaf in trees[value].leaves]
            read = read if by.leaf is None else [read[by.leaf]]
            known = [str(leaf.aval) for leaf in read if isinstance(leaf, Fact)]
            if by.sizes:  # the data say how many rows
                rows = (leaf.aval for leaf in read[:-1])
                known[:-1] = [f"rows of {one._replace(shape=one.shape[1:])}" for one in rows]
            found.setdefault(by.axis, []).append(f"{op.cell} ({by.__name__}) of {' and '.join(known)}")
    return found


# Stand for the loss on ranks that do not compute it, and say how they get it.


class Elsewhere:
    """The loss of a step on a rank that has none: false, and an error with the way out for who computes with it.

    >>> loss = Elsewhere(3)
    >>> loss, bool(loss), f"loss {loss}"
    (on rank 3, False, 'loss on rank 3')
    >>> loss.item()
    Traceback (most recent call last):
    AttributeError: the loss is on rank 3; build(..., broadcast=True) gives it to every rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"on rank {self._rank}"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the loss is {self}; build(..., broadcast=True) gives it to every rank.")

    def __float__(self) -> NoReturn:
        raise TypeError(f"the loss is {self}; build(..., broadcast=True) gives it to every rank.")

    def __format__(self, how: str) -> str:
        return str(self) if not how else format(float(self), how)

    def __add__(self, other: Any) -> float:
        return float(self)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = __add__
