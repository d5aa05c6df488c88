"""Find in a mesh the processes that run the ranks of a program, and those that run its replicas.

mesh 2 x 2 of ("dp", "pp")        --> process 3 -->        ranks: processes 2 and 3; the other replica's: process 1
mesh 2 x 2 x 1 of ("replicate", "shard", "pp")    --> process 3 -->    shares out with process 2, adds up across with 1
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fpipe.meaning.purity.sharded import dimensions
from fpipe.program import Program
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import Watchdog
from fpipe.runtimes.lowering.shards import Share
from fpipe.runtimes.processes.replicas import Replicas
from fpipe.torch_private.processes import is_on_streams, timeout_of, world_group
from fpipe.transforms.data_parallel import axes_of


def group_of(program: Program, mesh: DeviceMesh | None) -> ProcessGroup:
    """The processes that run the ranks of a program, or an error if there are none; a warning if replicas that the mesh
    has would train apart."""
    axes = axes_of(program)
    if isinstance(mesh, DeviceMesh | None) and not dist.is_initialized():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("runtime='distributed' is for processes that torch.distributed.init_process_group has joined.")
    names = dimensions(mesh, dict.fromkeys(axes, "replicas") | {"pp": program.ranks})
    if mesh is None:
        return world_group()
    for name in names:
        if name.startswith("dp") and name not in axes and mesh.size(names.index(name)) > 1:
            warnings.warn(
                f"dimension {name!r} of the mesh has {mesh.size(names.index(name))} processes, and the program no "
                f"replicas along it: each trains apart. Put fpipe.data_parallel({name!r}) behind fpipe.merge(), unless "
                "you add up the gradients yourself.",
                stacklevel=4,
            )
    return mesh.get_group("pp")


def refuse_other_size(group: ProcessGroup, program: Program, mesh: DeviceMesh | None) -> None:
    """A ValueError unless there is a process for each rank."""
    if group.size() != program.ranks:
        where = "the process group" if mesh is None else "dimension 'pp' of the mesh"
        ranks, processes = f"{program.ranks} rank{'s' * (program.ranks > 1)}", f"{group.size()} process"
        raise ValueError(
            f"the program has {ranks} and {where} {processes}{'es' * (group.size() > 1)}; they must be as many. Start "
            f"{program.ranks}, or say in a mesh which are the ranks."
        )


def replicas_of(
    program: Program, mesh: DeviceMesh | None, ranks: ProcessGroup, device: torch.device, watchdog: Watchdog
) -> Replicas | None:
    """The other replicas of a program that has them; the mesh has a dimension, or two, for them."""
    axes = axes_of(program)
    if not axes:
        return None
    assert mesh is not None
    names = mesh.mesh_dim_names or ()
    known = [name for name in names if name in (*axes, "pp")]
    here = tuple(
        slice(None) if name in known else at for name, at in zip(names, mesh.get_coordinate() or (), strict=True)
    )
    order = [known.index(name) for name in (*axes, "pp")]
    processes = sorted(mesh.mesh[here].permute(order).reshape(-1, ranks.size()).tolist())  # as a group sorts its own
    groups = {axis: mesh.get_group(axis) for axis in axes}
    inner = groups[axes[-1]]
    group = inner if len(axes) == 1 else _group_of_all([each[ranks.rank()] for each in processes], inner)
    names = [f"replica {replica}: rank {rank}" for replica in range(len(processes)) for rank in range(ranks.size())]
    everyone = [process for replica in processes for process in replica]
    meeting = Meeting(watchdog, everyone, names)
    watchdog.faults.names.update(zip(everyone, names, strict=True))
    share = Share(inner.rank(), inner.size(), axes[-1])
    where = device if is_on_streams(group, device) else torch.device("cpu")
    return Replicas(group, groups, share, ranks.rank(), watchdog, meeting, where)


def _group_of_all(processes: Sequence[int], inner: ProcessGroup) -> ProcessGroup:
    """The group of the replicas along two axes, where they vote; it is made once, and stays as long as that of the
    inner ones."""
    made = _OF_ALL.setdefault(inner, {})
    key = tuple(processes)
    if key not in made:
        more: Any = {"timeout": timeout_of(inner), "backend": dist.get_backend(inner)}
        made[key] = dist.new_group([*processes], use_local_synchronization=True, **more)
    return made[key]


_OF_ALL: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
