"""The dimensions of a mesh of processes, which say which processes run the ranks of a program, and which replicas."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh


def dimensions(mesh: object, wanted: Mapping[str, object]) -> tuple[str, ...]:
    """The names of a mesh's dimensions, or of none where there is no mesh and none is wanted but that of the ranks.

    Args:
        mesh: what was handed in.
        wanted: how long each dimension is that it has to have, for the sentence: {"dp": "replicas", "pp": 4}.

    Raises:
        TypeError: the mesh is none.
        ValueError: it lacks a dimension.
    """
    sizes = f"({', '.join(map(str, wanted.values()))}{',' * (len(wanted) == 1)})"
    say = f"Say mesh=init_device_mesh(device, {sizes}, mesh_dim_names={tuple(wanted)})"
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a DeviceMesh whose dimension 'pp' has a process for each rank; found {type(mesh).__name__}. "
            f"{say}, or leave it out where the ranks are all processes."
        )
    names = () if mesh is None else mesh.mesh_dim_names or ()
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None and (mesh is not None or len(wanted) > 1):
        found = "there is no mesh" if mesh is None else f"the mesh has {', '.join(names) or 'none with a name'}"
        of = "ranks" if missing == "pp" else "replicas"
        raise ValueError(f"the program has {of} along dimension {missing!r} of a mesh, and {found}. {say}.")
    return names
