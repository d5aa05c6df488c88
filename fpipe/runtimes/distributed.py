"""Run one rank of a program in this process: the others run in processes of their own, on `torch.distributed`.

    process 0: 0F0 SEND(y)        -- gloo -->        process 1: RECV(y) 1F0

Each process has the whole program and knows the shapes of all of it, so nothing is asked while a step runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.graphs.ambient import Untraceable, ambient, refuse_odd_modes
from fpipe.graphs.graph import Fact, is_strided
from fpipe.graphs.lru_cache import LRUCache
from fpipe.graphs.sharded import is_sharded
from fpipe.model import Model, PositionalStage, check_params
from fpipe.program import Program, Value
from fpipe.runtimes.clocks import ahead_of_rank_0, put_together
from fpipe.runtimes.ends import check_call
from fpipe.runtimes.lowering.shapes import Untraced
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.meeting import Meeting
from fpipe.runtimes.message import Layout
from fpipe.runtimes.part import Slots, Watch, of_rank
from fpipe.runtimes.prepared import Prepared
from fpipe.runtimes.rank_error import LostRank, RankError
from fpipe.runtimes.rendezvous import check_transfers, messages
from fpipe.runtimes.replicas import Replicas, Sums, reduced_last, replicas_of
from fpipe.runtimes.result import Result
from fpipe.runtimes.transfers import AHEAD, Transfers
from fpipe.runtimes.walk import Step
from fpipe.transforms.communicate import with_transfers
from fpipe.transforms.data_parallel import axis_of

Given = tuple[Any, Any, Any]


def distributed(
    program: Program,
    model: Model,
    *,
    mesh: DeviceMesh | None,
    example: Given,
    timeout: float | None,
    broadcast: bool,
    record: bool,
    check_finite: bool,
    loss_scale: float,
    compile: bool,
) -> Step:
    """A step of one rank: `step(params, batch, *, state=None, key=None) -> Result`, called by all ranks alike."""
    group, rank = _group_of(mesh, program)
    told = program if record else None
    program = reduced_last(with_transfers(_everywhere(program) if broadcast else program))
    check_transfers(program, AHEAD)
    shapes: Given = tree.tree_map(_without_data, example)
    device = next(
        (leaf.device for leaf in tree.leaves(example) if isinstance(leaf, Tensor) and not leaf.is_meta),
        torch.get_default_device(),
    )
    signatures, known = Signatures(model, device), LRUCache[Any, OnRank](_MOST)
    lost, of_nets = list[LostRank](), [one.forward for one in model.stages if isinstance(one.forward, PositionalStage)]
    meeting = Meeting([dist.get_process_group_ranks(group)], rank, group, timeout)
    replicas = replicas_of(program, mesh, group, timeout, device)
    everyone = meeting if replicas is None else replicas.meeting
    transfers = Transfers(messages(program), rank, group, meeting, device)
    numbers = count(1)

    def prepared(given: Given, key: int | None) -> OnRank:
        try:
            more = loss_scale, compile, device
            return OnRank(rank, group, transfers, replicas, program, model, *given, key, Untraced(), *more)
        except Untraceable as error:
            if error.stage is None and isinstance(error.__cause__, ValueError):  # refused, whoever runs it
                raise error.__cause__ from None
            raise ValueError(
                f"{str(error).rstrip('.')}. What cannot be traced runs where the whole program is: write the stage "
                "without what stops the trace, or say runtime='threads' or 'local'."
            ) from error

    def agreed(where: str, what: str, made: OnRank, key: int | None) -> OnRank:
        meeting.agree(where, {what: made.digest, "key": key})
        if compile:
            compiled = f"{where}, compiled"
            try:
                made.compile()
            except BaseException as error:
                meeting.refuse(compiled, _told(rank, error))
                raise
            meeting.agree(compiled, {}, patience=_COMPILING)
        made.number = made.number or transfers.know(made.layouts)
        return made

    def one_step(number: int, own: Given, more: Sequence[Any], key: int | None) -> Result:
        refuse_odd_modes()
        check_call(more, key)
        if any(stage.moved() for stage in of_nets):
            check_params(model, _filled(own[0], shapes[0]))
        given = tuple(_filled(one, of) for one, of in zip(own, shapes, strict=True))
        leaves, containers = tree.flatten(given)
        signature = signatures.of(leaves, containers, example=True)
        made = known.get(signature)
        if made is None or number == 1:  # at the first step the key is new
            made = made or prepared(given, key)
            transfers.meet()
            known[signature] = agreed(f"step {number}", "arguments", made, key)
        if number == 1 and replicas is not None:
            everyone.agree("step 1", {"key": key})
        made.refuse_missing(leaves)
        made.step = number
        result = made.run(leaves, given[2], key, record=told, check_finite=check_finite)
        return result if own[2] is None else replace(result, state=_own(result.state, own[2]))

    def step(
        params: Sequence[Any],
        batch: tuple[Any, Any],
        *more: Any,
        state: Sequence[Any] | None = None,
        key: int | None = None,
    ) -> Result:
        if lost:
            raise LostRank(f"{lost[0]}; start all ranks again.")
        number = next(numbers)
        transfers.begin()
        if replicas is not None:
            replicas.begin(sums)
        with transfers.ctrl_c:
            try:
                return one_step(number, (params, batch, state), more, key)
            except BaseException as error:
                # What goes wrong is told to the others, in place of what they wait for.
                said, broken = _told(rank, error), isinstance(error, LostRank)
                if replicas is not None:
                    said = replicas.first_told(said) if broken else replicas.named(said)
                for each in {meeting, everyone}:
                    each.refuse(f"step {number}", said)
                if record:
                    meeting.refuse(_end_of(number), said)
                if replicas is not None:
                    replicas.owe()  # others of this replica may wait for those of another, which wait for these
                transfers.fail(said, broken)
                if replicas is not None:
                    replicas.fail(said, broken)
                if broken:
                    lost.append(LostRank(said))
                    raise lost[0] from None
                if first.lowered.collective:  # what it did not come to, others would take its next step's for
                    lost.append(LostRank(f"{said.rstrip('.')}; collectives inside stages are no longer in step"))
                raise

    about = {"program": _digest(program), "torch": torch.__version__, "number of threads": torch.get_num_threads()}
    about |= {"autocast or other settings": _digest(ambient())}
    about |= {"parameters": _digest([(name, leaf.shape, leaf.dtype) for name, leaf in _tensors(shapes[0])])}
    everyone.agree("building the step", about)
    try:
        first = agreed(_TRACED, "model or example", prepared(shapes, None), None)
        if replicas is not None:
            everyone.agree(_TRACED, {}, patience=_COMPILING * compile)
    except Exception as error:
        for each in {meeting, everyone}:
            each.refuse(_TRACED, _told(rank, error))
        raise
    sums = first.sums
    known[signatures.of(*tree.flatten(shapes), example=True)] = first
    return step


_TRACED = "building the step, after the trace"
_COMPILING = 1800.0


def _end_of(number: int) -> str:
    return f"the end of step {number}"


def _told(rank: int, error: BaseException) -> str:
    """An error in words for other ranks; one that came from another rank is passed on."""
    if isinstance(error, RankError):
        return str(error)
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
    return f"rank {rank} failed {notes[-1] if notes else 'outside of its ops'}: {type(error).__name__}: {error}"


_MOST = 128


class OnRank(Prepared):
    """A program lowered for one signature, of which this process runs one rank."""

    def __init__(
        self, rank: int, group: ProcessGroup, transfers: Transfers, replicas: Replicas | None, *args: Any
    ) -> None:
        self.rank, self.group, self.transfers, self.replicas, self.ahead = rank, group, transfers, replicas, None
        self.number = self.step = 0
        super().__init__(*args, replica=(0, 1) if replicas is None else (replicas.number, replicas.count))
        device = transfers.device
        sent = [value for one in self.instructions if one.ops[0].kind == "SEND" for value in one.ops[0].writes]
        self.layouts = {value: Layout(self.trees[value].leaves, device) for value in sent}
        self.sums = Sums({}, 0)
        if replicas is not None:
            self.instructions, self.sums = replicas.starting(self.instructions, self.trees, self.weighed_rows)
        both = partial(transfers.send, self.layouts), partial(transfers.receive, self.layouts)
        self.part = of_rank(self.instructions, self.model, rank, *both)
        of_part = zip(self.part.rows, self.part.instructions, strict=True)
        self._sends = [row for row, one in of_part if one.ops[0].kind == "SEND"]
        self.prepare = [one for one in self.prepare if one[2] in self.part.at]
        self.results = self._here(*self.results)
        read = {*self.part.begins, *(slot for one in self.prepare for slot in one[1])}
        values = {slot: value for value, slot in self.lowered.slots.items()}
        self._read = [(values[slot], places) for slot, places in self.inputs if slot in read]
        about: list[Any] = [(str(value), layout.size) for value, layout in self.layouts.items()]
        about += [(str(value), *map(_looks, self.trees[value].leaves)) for value, _ in self.program.inputs]
        self.digest = _digest(about)

    def refuse_missing(self, leaves: Sequence[Any]) -> None:
        """What this rank reads, it is handed.

        Raises:
            ValueError: it is not; the value, and who passes what.
        """
        for value, places in self._read:
            if any(isinstance(leaves[at], Tensor) and leaves[at].is_meta for at in places):
                raise ValueError(
                    f"rank {self.rank} reads {value}, and was handed None or a meta tensor in its place. A rank passes "
                    "local_params(program, params, rank), and its batch."
                )

    def _asked(self, program: Program) -> Program:
        """The program with one output of each name: this rank's, where it has one."""
        ends = sorted(program.outputs, key=lambda end: self.rank in end.homes)
        chosen = {end.name: end for end in ends}
        return Program.trusted(program.inputs, program.ops, tuple(chosen[name] for name in _names(program)))

    def _here(self, containers: Any, found: list[Any], untouched: set[int]) -> tuple[Any, list[Any], set[int]]:
        """The results, with None for those that are at home on other ranks."""
        whole: dict[str, Any] = tree.unflatten(containers, found)
        away = {end.name for end in self._asked(self.program).outputs if self.rank not in end.homes}
        for name in whole:
            if name in ("grads", "state"):
                stages = {one.stage for one in away if one.name == name}
                whole[name] = tuple(None if n in stages else one for n, one in enumerate(whole[name]))
                continue
            each = sorted((one for one in _names(self.program) if one.name == name), key=_turn)
            if each[0].microbatch is None:
                whole[name] = None if each[0] in away else whole[name]
            else:
                parts = zip(each, whole[name], strict=True)
                whole[name] = tuple(None if one in away else part for one, part in parts)
        leaves, spec = tree.flatten(whole)
        return spec, leaves, untouched

    def _execute(self, slots: Slots, watch: Watch | None) -> None:
        """This rank's instructions."""
        own = [slots[slot] for slot in self.part.begins]
        self.transfers.start(self.step, self.number, keeps=watch is not None and watch.notes is not None)
        if self.replicas is not None:
            self.replicas.begin(self.sums, at_once=watch is not None and watch.check_finite)
        self.part.run(own, watch)
        if watch is not None and watch.notes is not None:
            for row in self._sends:
                watch.notes.see(row, [[self.transfers.sent(value)] for value in self.instructions[row].written])
        self.transfers.end()
        if self.replicas is not None:
            self.replicas.end()
        if watch is not None and watch.notes is not None and self.recorder is not None:
            self.transfers.meeting.agree(_end_of(self.step), {})  # one that failed does not come to what follows
            if self.ahead is None:
                self.ahead = ahead_of_rank_0(self.group, self.rank, self.transfers.carried)
            put_together(self.recorder, watch.notes, self.group, self.rank, self.ahead)
        slots.extend([None] * (len(self.lowered.slots) - len(slots)))
        for slot, place in self.part.at.items():
            slots[slot] = own[place]


def _names(program: Program) -> list[Value]:
    return [*dict.fromkeys(end.name for end in program.outputs)]


def _turn(name: Value) -> tuple[int, int]:
    return name.microbatch or 0, name.slice or 0


def _looks(leaf: Any) -> Any:
    """What of a leaf is the same on all ranks, whatever memory it is in."""
    return leaf.aval[:3] if isinstance(leaf, Fact) else repr(leaf)


def _everywhere(program: Program) -> Program:
    """The program whose loss every rank gets."""
    ranks = tuple(range(program.ranks))
    ends = tuple(end._replace(homes=ranks) if end.name.name in ("loss", "aux") else end for end in program.outputs)
    return Program.trusted(program.inputs, program.ops, ends)


def _group_of(mesh: DeviceMesh | None, program: Program) -> tuple[ProcessGroup, int]:
    """The processes that run the ranks of a program, and which of them this is.

    Raises:
        ValueError: there is no such group, it has another size, or the mesh has no dimension for ranks or replicas.
    """
    if not dist.is_initialized():
        raise ValueError("runtime='distributed' is for processes that torch.distributed.init_process_group has joined.")
    axis = axis_of(program)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    of = ({} if axis is None else {axis: "replicas"}) | {"pp": "ranks"}
    missing = next((name for name in of if name not in names), None)
    if missing is not None and (mesh is not None or axis is not None):
        sizes = f"(replicas, {program.ranks})" if axis else f"({program.ranks},)"
        found = "there is no mesh" if mesh is None else f"the mesh has {', '.join(names) or 'none with a name'}"
        raise ValueError(
            f"the program has {of[missing]} along dimension {missing!r} of a mesh, and {found}. Say "
            f"mesh=init_device_mesh(device, {sizes}, mesh_dim_names={tuple(of)})."
        )
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    assert group is not None
    if group.size() != program.ranks:
        where = "the process group" if mesh is None else "dimension 'pp' of the mesh"
        raise ValueError(
            f"the program has {program.ranks} ranks and {where} {group.size()} processes; they must be as many. Start "
            f"{program.ranks}, or say in a mesh which are the ranks."
        )
    return group, group.rank()


def _digest(what: object) -> str:
    return hashlib.sha256(str(what).encode()).hexdigest()[:16]


def _tensors(found: Any) -> list[tuple[str, Tensor]]:
    return [(name, leaf) for name, leaf in tree.paths(found) if isinstance(leaf, Tensor)]


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or is_sharded(leaf) or not is_strided(leaf):
        return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")  # a shard may be a view


def _filled(given: Any, example: Any) -> Any:
    """What a step is handed, with the example's in place of None: what is at home on other ranks."""
    if given is None or not isinstance(given, tuple | list) or len(given) != len(example or ()):
        return example if given is None else given
    return type(example)(one if mine is None else mine for mine, one in zip(given, example, strict=True))


def _own(found: Any, handed: Sequence[Any]) -> Any:
    """The state, None where this rank was handed none."""
    return None if found is None else tuple(a if b is not None else None for a, b in zip(found, handed, strict=True))
