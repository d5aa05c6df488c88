"""Run one rank of a program in this process: the others run in processes of their own, on `torch.distributed`.

    process 0: 0F0 SEND(y)        -- gloo -->        process 1: RECV(y) 1F0

Each process has the whole program and knows the shapes of all of it, so nothing is asked while a step runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.graphs.ambient import Untraceable, ambient, refuse_odd_modes
from fpipe.graphs.graph import Fact
from fpipe.graphs.lru_cache import LRUCache
from fpipe.model import Model, PositionalStage, check_params
from fpipe.program import Program, Value
from fpipe.runtimes.clocks import ahead_of_rank_0, put_together
from fpipe.runtimes.ends import check_call
from fpipe.runtimes.lowering.shapes import Untraced
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.part import Slots, Watch, of_rank
from fpipe.runtimes.prepared import Prepared
from fpipe.runtimes.rank_error import LostRank, RankError
from fpipe.runtimes.result import Result
from fpipe.runtimes.transfers import Transfers, messages
from fpipe.runtimes.walk import Step
from fpipe.transforms.communicate import with_transfers

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
) -> Step:
    """A step of one rank: `step(params, batch, *, state=None, key=None) -> Result`, called by all ranks alike."""
    group, rank = _group_of(mesh, program.ranks)
    told = program if record else None
    program = with_transfers(_everywhere(program) if broadcast else program)
    shapes: Given = tree.tree_map(_without_data, example)
    signatures, known = Signatures(model), LRUCache[Any, OnRank](_MOST)
    lost, started = list[LostRank](), list[int | None]()
    of_nets = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]

    def prepared(given: Given, key: int | None) -> OnRank:
        try:
            made = OnRank(rank, group, timeout, program, model, *given, key, Untraced(), loss_scale)
        except Untraceable as error:
            raise ValueError(
                f"{error}. What cannot be traced runs where the whole program is: write the stage without what stops "
                "the trace, or say runtime='threads' or 'local'."
            ) from error
        _agree(group, rank, {"model or example": made.digest, "key": key})
        started.append(key)
        return made

    def step(
        params: Sequence[Any],
        batch: tuple[Any, Any],
        *more: Any,
        state: Sequence[Any] | None = None,
        key: int | None = None,
    ) -> Result:
        refuse_odd_modes()
        check_call(more, key)
        if lost:
            raise LostRank(f"{lost[0]}; start all ranks again.")
        if any(stage.moved() for stage in of_nets):
            check_params(model, _filled(params, shapes[0]))
        own = params, batch, state
        given = tuple(_filled(one, of) for one, of in zip(own, shapes, strict=True))
        leaves, containers = tree.flatten(given)
        signature = signatures.of(leaves, containers, example=True)
        made = known.get(signature)
        if made is None:
            made = known[signature] = prepared(given, key)
        if len(started) == 1:  # the first step, where the example is what it was traced for
            _agree(group, rank, {"key": key})
            started.append(key)
        try:
            result = made.run(leaves, given[2], key, record=told, check_finite=check_finite)
        except LostRank as error:
            lost.append(error)
            raise
        return result if state is None else replace(result, state=_own(result.state, state))

    about = {"program": _digest(program), "torch": torch.__version__, "number of threads": torch.get_num_threads()}
    _agree(group, rank, about | {"autocast or other settings": _digest(ambient())})
    first = prepared(shapes, None)
    known[signatures.of(*tree.flatten(shapes), example=True)] = first
    return step


_MOST = 128


class OnRank(Prepared):
    """A program lowered for one signature, of which this process runs one rank."""

    def __init__(self, rank: int, group: ProcessGroup, timeout: float | None, *args: Any) -> None:
        self.rank, self.group, self.ahead = rank, group, None
        super().__init__(*args)
        every = messages(self.instructions, self.trees)
        self.transfers = Transfers(every, rank, group, timeout)
        self.part = of_rank(self.instructions, self.model, rank, self.transfers.send, self.transfers.receive)
        self.prepare = [one for one in self.prepare if one[2] in self.part.at]
        self.results = self._here(*self.results)
        about = [(str(one.value), one.source, one.target, one.layout.size) for one in every]
        about += [(str(value), *map(_looks, self.trees[value].leaves)) for value, _ in self.program.inputs]
        self.digest = _digest(about)

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
        """This rank's instructions. What goes wrong is told to the others, in place of what they wait for."""
        own = [slots[slot] for slot in self.part.begins]
        self.transfers.begin()
        try:
            self.part.run(own, watch)
            self.transfers.end()
        except BaseException as error:
            self.transfers.fail(self._told(error), broken=isinstance(error, LostRank))
            raise
        if watch is not None and watch.notes is not None and self.recorder is not None:
            self.ahead = ahead_of_rank_0(self.group, self.rank) if self.ahead is None else self.ahead
            put_together(self.recorder, watch.notes, self.group, self.rank, self.ahead)
        slots.extend([None] * (len(self.lowered.slots) - len(slots)))
        for slot, place in self.part.at.items():
            slots[slot] = own[place]

    def _told(self, error: BaseException) -> str:
        """An error in words for other ranks; one that came from another rank is passed on."""
        if isinstance(error, RankError):
            return str(error)
        where = getattr(error, "__notes__", [f"on rank {self.rank}"])[0]
        return f"rank {self.rank} failed {where}: {type(error).__name__}: {error}"


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


def _group_of(mesh: DeviceMesh | None, ranks: int) -> tuple[ProcessGroup, int]:
    """The processes that run the ranks of a program, and which of them this is.

    Raises:
        ValueError: there is no such group, or it has another size.
    """
    if not dist.is_initialized():
        raise ValueError("runtime='distributed' is for processes that torch.distributed.init_process_group has joined.")
    if mesh is None:
        group = dist.group.WORLD
    else:
        names = mesh.mesh_dim_names
        if names is not None and "pp" not in names:
            raise ValueError(f"the mesh has no dimension 'pp' for the ranks of a program; it has {', '.join(names)}.")
        group = mesh.get_group("pp" if names else 0)
    assert group is not None
    if group.size() != ranks:
        raise ValueError(
            f"the program has {ranks} ranks and the process group {group.size()} processes; they must be as many."
        )
    return group, group.rank()


def _agree(group: ProcessGroup, rank: int, told: Mapping[str, object]) -> None:
    """All ranks must be about to do the same.

    Raises:
        ValueError: they are not; who differs from rank 0, and in what.
    """
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, dict(told), group=group)
    for other, said in enumerate(every):
        odd = [name for name in told if said[name] != every[0][name]]
        if odd:
            raise ValueError(
                f"rank {other} differs from rank 0 in its {' and '.join(odd)}: "
                + "; ".join(f"{name} {_short(every[0][name])} there, {_short(said[name])} here" for name in odd)
                + f". This is rank {rank}; all ranks build the same step."
            )


def _short(what: object) -> str:
    return str(what)[:80]


def _digest(what: object) -> str:
    return hashlib.sha256(str(what).encode()).hexdigest()[:16]


def _without_data(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _filled(given: Any, example: Any) -> Any:
    """What a step is handed, with the example's in place of None: what is at home on other ranks."""
    if given is None or not isinstance(given, tuple | list) or len(given) != len(example or ()):
        return example if given is None else given
    return type(example)(one if mine is None else mine for mine, one in zip(given, example, strict=True))


def _own(found: Any, handed: Sequence[Any]) -> Any:
    """The state, None where this rank was handed none."""
    return None if found is None else tuple(a if b is not None else None for a, b in zip(found, handed, strict=True))
