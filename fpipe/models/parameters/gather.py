"""Gather what ranks have of a model, as the state_dict of the whole net.

rank 0: ({"0.w": ..}, None)   rank 1: (None, {"1.w": ..})        --> gather_state_dict -->        {"0.w": .., "1.w": ..}

Names are those of a state_dict. Of functions, whose stages may use one name twice, they begin with the stage's number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.meaning.purity.sharded import dimensions, is_sharded
from fpipe.model import Model
from fpipe.models.parameters.load import net_stages
from fpipe.models.parameters.sources import CODES
from fpipe.program import Program, the_program
from fpipe.torch_internals import held_by
from fpipe.torch_private.modules import is_saved


def gather_state_dict(
    program: Program,
    params: Sequence[Any],
    *,
    model: Model | None = None,
    state: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
    file: str | PathLike[str] | None = None,
) -> dict[str, Tensor] | None:
    """Gather the parameters of all ranks by name, whole and on the host, on rank 0. With `model` it is the whole
    state_dict of its net, which a strict `load_state_dict` takes; `load_params` and `shard_params` are the way back.

    Args:
        program: a program that is placed, as a schedule does.
        params: one entry for each stage, None for those of other ranks: parameters, or anything of their structure such
            as gradients. Shards are put together.
        model: made by `from_module` or `from_sequential`: then a tied parameter stands under each of its names, and
            frozen parameters and buffers are there as the net of rank 0 has them.
        state: the module state of the last step, as `params` with None for other ranks: the statistics of batch norms.
        mesh: that of the step, whose dimension "pp" has the ranks. Without it torch.distributed's default group, or one
            process. All processes call it.
        file: a `.safetensors` file, which rank 0 writes tensor by tensor as they come: no more than one of them is held
            besides its own. It takes the place of an earlier one when it is whole.

    Returns:
        On rank 0 of the first replica the dict, else None; nothing where a file is written.

    Raises:
        ValueError: params of another number of stages, a stage that no rank has, a name that two stages have, a file
            of another suffix, or a dtype that its format has not; a model with module state, and no `state`.
        TypeError: a model of functions.
        OSError: a file that cannot be written, on all ranks of the first replica. What it held before is whole.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> model, params, state = fpipe.from_sequential(net, stages=2)
    >>> list(gather_state_dict(fpipe.program(model), params))
    ['0.weight', '0.bias', '1.weight', '1.bias']
    >>> net.load_state_dict(gather_state_dict(fpipe.program(model), params, model=model, state=state))
    <All keys matched successfully>
    """
    if file is not None and Path(file).suffix != ".safetensors":
        raise ValueError(
            f"file= is a .safetensors file, found {str(file)!r}; another format is yours to write of the dict that "
            "rank 0 gets without file=."
        )
    per_stage = params if state is None else _with_state(params, state)
    place, leaves_by_rank = describe_leaves(program, per_stage, mesh)
    entries = _entries(per_stage, leaves_by_rank, program.stages)
    if model is not None:
        entries = _of_net(model, entries, state is not None)
    axes = () if mesh is None else mesh.mesh_dim_names or ()
    is_first = mesh is None or all(mesh.get_local_rank(axis) == 0 for axis in axes if axis != "pp")
    whole = _whole(entries, place, is_first)
    is_reader = place.rank == 0 and is_first
    if file is not None:
        _write_file(Path(file) if is_reader else None, entries, whole, place)
        return None
    named = {name: tensor for entry, tensor in whole for name in entry.names}
    return named if is_reader else None


class GroupRank(NamedTuple):
    """This process among the ranks of a program."""

    rank: int = 0
    group: Any = None


class NamedLeaf(NamedTuple):
    """A tensor that a rank has."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def describe_leaves(
    program: Program, per_stage: Sequence[Any], mesh: DeviceMesh | None
) -> tuple[GroupRank, list[dict[int, list[NamedLeaf]]]]:
    """Return the place of this process, and for each rank the leaves of the stages that it has."""
    if not isinstance(per_stage, tuple | list) or len(per_stage) != the_program(program).stages:
        found = f"{len(per_stage)} entries" if isinstance(per_stage, tuple | list) else type(per_stage).__name__
        raise ValueError(f"the program has {program.stages} stages, and one entry for each is wanted; found {found}.")
    if mesh is not None:
        dimensions(mesh, {"pp": program.ranks})
    local: dict[int, list[NamedLeaf]] = {}
    for stage, entry in enumerate(per_stage):
        if entry is not None:
            leaves, spec = tree.flatten(entry)
            paths = [".".join(map(str, path)) for path in spec.paths()]
            # A gradient of a parameter that nobody reads is None.
            pairs = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if leaf is not None]
            other = next((path for path, leaf in pairs if not isinstance(leaf, Tensor)), None)
            if other is not None:
                raise ValueError(f"stage {stage} has no tensor at {other}; only tensors have a place in a state_dict.")
            local[stage] = [NamedLeaf(path, tuple(x.shape), x.dtype) for path, x in pairs]
    if not (dist.is_available() and dist.is_initialized()):
        return GroupRank(), [local]
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    assert group is not None
    leaves_by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(leaves_by_rank, local, group=group)
    return GroupRank(group.rank(), group), leaves_by_rank


def names_by_stage(leaves_by_rank: Sequence[Mapping[int, Sequence[NamedLeaf]]]) -> dict[int, list[str]]:
    """Return the names of the leaves of each stage; they begin with its number where two stages would have one name."""
    paths = {stage: [leaf.path for leaf in leaves] for stages in leaves_by_rank for stage, leaves in stages.items()}
    every = [path for _, stage_paths in sorted(paths.items()) for path in stage_paths]
    if len({*every}) == len(every):
        return paths
    return {stage: [f"{stage}.{path}" for path in stage_paths] for stage, stage_paths in paths.items()}


class _Entry(NamedTuple):
    """A tensor of the state_dict: its names, the rank that hands it on, and the tensor where this process has it."""

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    leaf: Tensor | None


def _with_state(params: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    """Put the module state of each stage to its parameters."""
    if len(params) != len(state):
        raise ValueError(f"state has one entry for each stage, as params; found {len(state)} and {len(params)}.")
    return [None if own is None else {**own, **(more or {})} for own, more in zip(params, state, strict=True)]


def _entries(
    per_stage: Sequence[Any], leaves_by_rank: Sequence[Mapping[int, Sequence[NamedLeaf]]], stages: int
) -> list[_Entry]:
    """Return what the ranks have, each leaf once, stage after stage."""
    names = names_by_stage(leaves_by_rank)
    entries: list[_Entry] = []
    for stage in range(stages):
        owner = next((rank for rank, local in enumerate(leaves_by_rank) if stage in local), None)
        if owner is None:
            raise ValueError(f"no rank has handed in stage {stage}: each hands in its own, as local_params has them.")
        leaves = leaves_by_rank[owner][stage]
        present = [leaf for leaf in tree.leaves(per_stage[stage]) if leaf is not None]
        tensors = [None] * len(leaves) if per_stage[stage] is None else present
        for name, leaf, tensor in zip(names[stage], leaves, tensors, strict=True):
            entries.append(_Entry([name], leaf.shape, leaf.dtype, owner, tensor))
    return entries


def _of_net(model: Model, entries: Sequence[_Entry], has_state: bool) -> list[_Entry]:
    """Return the tensors of the state_dict of a model's net, under all their names.

    What is handed in goes by the names of its leaf, and else by the tensor that the net has under a name: two names of
    one tensor are tied. Everything else has stayed with the modules, and is taken from there.
    """
    stages = [*net_stages(model)]
    lacking = next((number for number, stage in enumerate(model.stages) if "state" in stage.asks), None)
    if lacking is not None and not has_state:
        raise ValueError(f"{model.who(lacking)} has module state, which a step returns: say state=result.state.")
    owner_names = {use.name: use.owner_name for uses in model.tied_uses for use in uses}
    first_names = {name: owner_names.get(leaf[0], leaf[0]) for stage in stages for leaf in stage.names for name in leaf}
    entry_by_name = {name: entry for entry in entries for name in entry.names}
    tensors = {name: getattr(*stage.home_of(name)) for stage in stages for name in stage.all_names()}
    name_by_id = {id(tensors[name]): name for name in entry_by_name if name in tensors}
    names_by_entry: dict[str, list[str]] = {name: [] for name in entry_by_name}
    constants: list[_Entry] = []
    for stage in stages:
        for name in stage.all_names():
            module, key = stage.home_of(name)
            if not _is_in_state_dict(module, key):
                continue
            tensor = tensors.pop(name, None)
            if tensor is None:  # another stage has it too
                continue
            source = first_names.get(name, name_by_id.get(id(tensor), name))
            if source in names_by_entry:
                names_by_entry[source].append(name)
            elif tensor.is_meta:
                raise ValueError(f"{name!r} is on meta in the net, and not among the params: it has no values to give.")
            else:
                constants.append(_Entry([name], tuple(tensor.shape), tensor.dtype, 0, tensor))
    renamed = [entry._replace(names=names_by_entry[entry.names[0]]) for entry in entries]
    return [*(entry for entry in renamed if entry.names), *constants]


def _is_in_state_dict(module: Any, key: str) -> bool:
    """Whether a module has a tensor as a parameter or as a persistent buffer."""
    if not isinstance(module, nn.Module):
        return False
    parameters, buffers, _ = held_by(module)
    return key in parameters or (key in buffers and is_saved(module, key))


def _whole(entries: Sequence[_Entry], place: GroupRank, is_first: bool) -> Iterator[tuple[_Entry, Tensor]]:
    """Yield the tensors one after the other on rank 0 of the first replica; others send theirs."""
    for entry in entries:
        leaf: Any = None
        if entry.leaf is not None:
            leaf = entry.leaf.detach()
            leaf = (leaf.full_tensor() if is_sharded(leaf) else leaf).cpu().contiguous()
        if not is_first:
            continue
        if leaf is not None and place.rank and entry.owner == place.rank:
            dist.send(leaf, group=place.group, group_dst=0)
        if place.rank == 0:
            if leaf is None:
                leaf = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                dist.recv(leaf, group=place.group, group_src=entry.owner)
            yield entry, leaf


def _write_file(
    file: Path | None, entries: Sequence[_Entry], tensors: Iterator[tuple[_Entry, Tensor]], place: GroupRank
) -> None:
    """Write a safetensors file as tensors come; None on the ranks that send them. All raise what hinders it."""
    header = _header(entries)
    failure: list[str | None] = [None]
    if file is not None:
        part = file.with_name(f"{file.name}.saving")
        try:
            with part.open("wb") as out:
                out.write(header)
                for entry, tensor in tensors:
                    for _ in entry.names:
                        out.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
                out.flush()
                os.fsync(out.fileno())
            part.replace(file)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            failure = [f"{file} could not be written: {error.strerror}. What it held before is whole."]
    for _ in tensors:  # others send all the same
        pass
    if place.group is not None:
        dist.broadcast_object_list(failure, group=place.group, group_src=0)
    if failure[0] is not None:
        raise OSError(failure[0])


def _header(entries: Sequence[_Entry]) -> bytes:
    """Return the beginning of a safetensors file: 8 bytes of length, a header in JSON."""
    header, start = dict[str, Any](), 0
    for entry in entries:
        for name in entry.names:
            if entry.dtype not in CODES:
                raise ValueError(f"{name} is of {entry.dtype}, which a safetensors file has no word for.")
            end = start + entry.dtype.itemsize * torch.Size(entry.shape).numel()
            header[name] = {"dtype": CODES[entry.dtype], "shape": [*entry.shape], "data_offsets": [start, end]}
            start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
