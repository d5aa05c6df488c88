"""Find in a mesh the processes that run the ranks of a program, and those that run its replicas.

mesh 2 x 2 of ("dp", "pp")        --> process 3 -->        ranks: processes 2 and 3; the other replica's: process 1
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fpipe.program import Program
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import Watchdog
from fpipe.runtimes.processes.communicators import by_nccl
from fpipe.runtimes.processes.replicas import Replicas
from fpipe.torch_private.processes import world_group
from fpipe.transforms.data_parallel import axis_of


def group_of(program: Program, mesh: DeviceMesh | None) -> ProcessGroup:
    """The processes that run the ranks of a program; a warning if replicas that the mesh has would train apart.

    Raises:
        TypeError: the mesh is none.
        ValueError: there is no such group, or the mesh has no dimension for ranks or replicas.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"mesh is a DeviceMesh whose dimension 'pp' has a process for each rank; found {type(mesh).__name__}. Say "
            f"mesh=init_device_mesh(device, ({program.ranks},), mesh_dim_names=('pp',)), or leave it out where the "
            "ranks are all processes."
        )
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
    if mesh is None:
        return world_group()
    for name in names:
        if name.startswith("dp") and name != axis and mesh.size(names.index(name)) > 1:
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
    program: Program,
    mesh: DeviceMesh | None,
    ranks: ProcessGroup,
    timeout: float | None,
    device: torch.device,
    watchdog: Watchdog,
) -> Replicas | None:
    """The other replicas of a program that has them; the mesh has a dimension for them."""
    axis = axis_of(program)
    if axis is None:
        return None
    assert mesh is not None
    names = mesh.mesh_dim_names or ()
    group, both = mesh.get_group(axis), (axis, "pp")
    here = tuple(
        slice(None) if name in both else at for name, at in zip(names, mesh.get_coordinate() or (), strict=True)
    )
    processes = mesh.mesh[here] if names.index(axis) < names.index("pp") else mesh.mesh[here].T
    meeting = Meeting(processes.tolist(), group.rank() * ranks.size() + ranks.rank(), ranks, timeout, watchdog)
    return Replicas(group, axis, ranks.rank(), meeting, device if by_nccl(group, device) else torch.device("cpu"))
