"""Gather the parameters of all ranks as the state_dict of the whole net.

rank 0: ({"0.w": ..}, None)   rank 1: (None, {"1.w": ..})        --> gather_state_dict -->        {"0.w": .., "1.w": ..}

Names are those of a state_dict. Of functions, whose stages may use one name twice, they begin with the stage's number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.meaning.purity.sharded import is_sharded, mesh_dim_names
from fpipe.meaning.single_device.params_and_state import refuse_meta
from fpipe.model import Model
from fpipe.models.parameters.load import net_stages
from fpipe.models.parameters.sources import CODES
from fpipe.program import Program
from fpipe.torch_internals import direct_members
from fpipe.torch_private.modules import is_in_state_dict


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
            as gradients. Shards are joined.
        model: made by `from_module` or `from_sequential`: then a tied parameter stands under each of its names, and
            frozen parameters, buffers and extra states are there as the net of rank 0 has them.
        state: the module state of the last step, as `params` with None for other ranks: the statistics of batch norms.
        mesh: that of the step, whose dimension "pp" has the ranks. Without it torch.distributed's default group, or one
            process. All processes call it.
        file: a `.safetensors` file, which rank 0 writes tensor by tensor as they come: no more than one of them is held
            besides its own. It takes the place of an earlier one when it is whole.

    Returns:
        On rank 0 of the first replica the dict, else None; nothing where a file is written.

    Raises:
        ValueError: params of another number of stages, a stage that no rank has, a name that two stages have, a file
            of another suffix, or a dtype or extra state that its format has not; a model with module state, and no
            `state`.
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
            f"file= is a .safetensors file, found {str(file)!r}. For another format write the dict that rank 0 gets."
        )
    per_stage = params if state is None else _with_state(params, state)
    # 1) All ranks tell each other the names and shapes of their leaves; from then on all know the same list of tensors,
    #    and walk it in one order: sends and receives on rank 0 meet without tags.
    group_rank, leaves_by_rank = describe_leaves(program, "params", per_stage, mesh)
    named_tensors = _named_tensors(per_stage, leaves_by_rank, program.stages)
    extra_states = {} if model is None else _extra_states(model)
    if extra_states and file is not None:
        raise ValueError(
            f"a .safetensors file cannot hold {next(iter(extra_states))!r}: gather the dict, and save that."
        )
    if model is not None:
        named_tensors = _with_net_names(model, named_tensors, state is not None, group_rank)
    # 2) Only the first replica sends. The others take part in joining shards, a collective over their mesh.
    axes = () if mesh is None else mesh.mesh_dim_names or ()
    is_first = mesh is None or all(mesh.get_local_rank(axis) == 0 for axis in axes if axis != "pp")
    full_tensors = _full_tensors(named_tensors, group_rank, is_first)
    is_reader = group_rank.rank == 0 and is_first
    if file is not None:
        _write_file(Path(file) if is_reader else None, named_tensors, full_tensors, group_rank)
        return None
    tensor_by_name = {name: tensor for named_tensor, tensor in full_tensors for name in named_tensor.names}
    return tensor_by_name | {name: get() for name, get in extra_states.items()} if is_reader else None


class GroupRank(NamedTuple):
    """The rank of this process in the program, and the process group of its ranks."""

    rank: int = 0
    group: Any = None


class NamedLeaf(NamedTuple):
    """The description of a tensor that a rank has."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def describe_leaves(
    program: Program, part_name: str, per_stage: Sequence[Any], mesh: DeviceMesh | None, needs_values: bool = True
) -> tuple[GroupRank, list[dict[int, list[NamedLeaf]]]]:
    """Return the rank of this process, and for each rank the leaves of the stages that it has. A collective.

    Args:
        program, mesh: as for `gather_state_dict`.
        part_name, per_stage: the name and the trees of the stages.
        needs_values: whether tensors on meta are an error.
    """
    if mesh is not None:
        mesh_dim_names(mesh, {"pp": program.ranks})
    is_alone = not (dist.is_available() and dist.is_initialized())
    # An error is described too, and so raised by all ranks: none waits for one that has raised.
    try:
        description: Any = _describe_local(program.stages, part_name, per_stage, needs_values)
    except ValueError as error:
        if is_alone:
            raise
        description = f"on rank {dist.get_rank()}: {error}"
    if is_alone:
        return GroupRank(), [description]
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    assert group is not None
    descriptions: list[Any] = [None] * group.size()
    dist.all_gather_object(descriptions, description, group=group)
    for message in (description for description in descriptions if isinstance(description, str)):
        raise ValueError(message)
    return GroupRank(group.rank(), group), descriptions


def _describe_local(
    stages: int, part_name: str, per_stage: Sequence[Any], needs_values: bool
) -> dict[int, list[NamedLeaf]]:
    if not isinstance(per_stage, tuple | list) or len(per_stage) != stages:
        actual = f"{len(per_stage)} entries" if isinstance(per_stage, tuple | list) else type(per_stage).__name__
        raise ValueError(f"the program has {stages} stages, one entry each; found {actual}.")
    local: dict[int, list[NamedLeaf]] = {}
    for stage, stage_tree in enumerate(per_stage):
        if stage_tree is not None:
            leaves, spec = tree.flatten(stage_tree)
            paths = [".".join(map(str, path)) for path in spec.paths()]
            # A gradient of a parameter that nobody reads is None.
            pairs = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if leaf is not None]
            non_tensor_path = next((path for path, leaf in pairs if not isinstance(leaf, Tensor)), None)
            if non_tensor_path is not None:
                raise ValueError(
                    f"stage {stage} has no tensor at {non_tensor_path}; only tensors have a place in a state_dict."
                )
            local[stage] = [NamedLeaf(path, tuple(x.shape), x.dtype) for path, x in pairs]
    if needs_values:
        refuse_meta(
            "fpipe.load_params or init_params gives it some, or optimizer_state of theirs", **{part_name: per_stage}
        )
    return local


def names_by_stage(leaves_by_rank: Sequence[Mapping[int, Sequence[NamedLeaf]]]) -> dict[int, list[str]]:
    """Return the names of the leaves of each stage; they begin with its number where two stages would have one name."""
    paths = {stage: [leaf.path for leaf in leaves] for stages in leaves_by_rank for stage, leaves in stages.items()}
    all_paths = [path for _, stage_paths in sorted(paths.items()) for path in stage_paths]
    if len({*all_paths}) == len(all_paths):
        return paths
    return {stage: [f"{stage}.{path}" for path in stage_paths] for stage, stage_paths in paths.items()}


class NamedTensor(NamedTuple):
    """A tensor of the state_dict: its names, the rank that sends it, and the tensor itself if this process has it."""

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    local_tensor: Tensor | None


def _with_state(params: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    if len(params) != len(state):
        raise ValueError(f"state has one entry for each stage, as params; found {len(state)} and {len(params)}.")
    return [None if p is None else {**p, **(s or {})} for p, s in zip(params, state, strict=True)]


def _named_tensors(
    per_stage: Sequence[Any], leaves_by_rank: Sequence[Mapping[int, Sequence[NamedLeaf]]], stages: int
) -> list[NamedTensor]:
    names = names_by_stage(leaves_by_rank)
    named_tensors: list[NamedTensor] = []
    for stage in range(stages):
        owner = next((rank for rank, local in enumerate(leaves_by_rank) if stage in local), None)
        if owner is None:
            raise ValueError(f"no rank has passed stage {stage}; each passes the stages of its local_params.")
        leaves = leaves_by_rank[owner][stage]
        present = [leaf for leaf in tree.leaves(per_stage[stage]) if leaf is not None]
        tensors = [None] * len(leaves) if per_stage[stage] is None else present
        for name, leaf, tensor in zip(names[stage], leaves, tensors, strict=True):
            named_tensors.append(NamedTensor([name], leaf.shape, leaf.dtype, owner, tensor))
    return named_tensors


def _with_net_names(
    model: Model, named_tensors: Sequence[NamedTensor], has_state: bool, group_rank: GroupRank
) -> list[NamedTensor]:
    """Return the tensors of the state_dict of a model's net, under all their names.

    The caller's leaves come first, with the names that the net has for them. All other tensors of the net are
    constants: frozen parameters and buffers, which rank 0 takes from its own modules.
    """
    stages = [*net_stages(model)]
    stateful_stage = next((number for number, stage in enumerate(model.stages) if "state" in stage.keywords), None)
    if stateful_stage is not None and not has_state:
        raise ValueError(
            f"{model.label_of(stateful_stage)} has module state, which a step returns: say state=result.state."
        )
    # Stages may list one tensor each, by the same name.
    home_by_name = {name: stage.home_of(name) for stage in stages for name in stage.all_names()}
    tensor_by_name: dict[str, Tensor] = {name: getattr(*home) for name, home in home_by_name.items()}
    names_by_leaf: dict[str, list[str]] = {name: [] for named_tensor in named_tensors for name in named_tensor.names}
    leaf_by_name = _leaf_by_name(model, stages, names_by_leaf, tensor_by_name)
    constants: list[NamedTensor] = []
    for name, tensor in tensor_by_name.items():
        if not _is_in_state_dict(*home_by_name[name]):
            continue
        if leaf_by_name[name] in names_by_leaf:
            names_by_leaf[leaf_by_name[name]].append(name)
        else:
            local_tensor = tensor if group_rank.rank == 0 else None
            constants.append(NamedTensor([name], tuple(tensor.shape), tensor.dtype, 0, local_tensor))
    _refuse_meta_constants(constants, group_rank)
    renamed = [named_tensor._replace(names=names_by_leaf[named_tensor.names[0]]) for named_tensor in named_tensors]
    return [*(named_tensor for named_tensor in renamed if named_tensor.names), *constants]


def _leaf_by_name(
    model: Model, stages: Sequence[Any], leaf_names: Iterable[str], tensor_by_name: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return for each name in the net the name of the leaf that would hold its tensor."""
    # A parameter that trains is the leaf of its first name, or of its owner's name if stages tie it. Another tensor is
    # the leaf that is the same object in the net, as two modules may share a buffer; else it would be a leaf of its
    # own.
    owner_name_by_use = {use.name: use.owner_name for uses in model.tied_uses for use in uses}
    leaf_by_id = {id(tensor_by_name[name]): name for name in leaf_names if name in tensor_by_name}
    leaf_by_name = {name: leaf_by_id.get(id(tensor), name) for name, tensor in tensor_by_name.items()}
    for names in (names for stage in stages for names in stage.names):
        leaf_by_name |= dict.fromkeys(names, owner_name_by_use.get(names[0], names[0]))
    return leaf_by_name


def _extra_states(model: Model) -> dict[str, Callable[[], Any]]:
    """Return the functions that give the extra states of a net's modules, under their names in a state_dict."""
    modules = () if model.fingerprint is None else model.fingerprint.nets
    # What a module keeps there may be any object, which a strict load_state_dict asks for by this name.
    return {
        f"{path}._extra_state".removeprefix("."): module.get_extra_state
        for path, module in modules
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _refuse_meta_constants(constants: Sequence[NamedTensor], group_rank: GroupRank) -> None:
    """Raise ValueError on all ranks if a constant of rank 0's net is on meta; the nets of other ranks may be."""
    local_constants = ((constant.names[0], constant.local_tensor) for constant in constants)
    meta_name = [next((name for name, tensor in local_constants if tensor is not None and tensor.is_meta), None)]
    if group_rank.group is not None:
        dist.broadcast_object_list(meta_name, group=group_rank.group, group_src=0)
    if meta_name[0] is not None:
        raise ValueError(f"{meta_name[0]!r} is on meta in the net, and not among the params: it has no values to give.")


def _is_in_state_dict(module: Any, key: str) -> bool:
    """Whether a module has a tensor as a parameter or as a persistent buffer."""
    if not isinstance(module, nn.Module):
        return False
    parameters, buffers, _ = direct_members(module)
    return key in parameters or (key in buffers and is_in_state_dict(module, key))


def _full_tensors(
    named_tensors: Sequence[NamedTensor], group_rank: GroupRank, is_first: bool
) -> Iterator[tuple[NamedTensor, Tensor]]:
    """Yield all tensors on rank 0 of the first replica; on every further rank send the local ones."""
    # They come one at a time, so that rank 0 holds at most one tensor besides its own.
    for named_tensor in named_tensors:
        leaf: Any = None
        if named_tensor.local_tensor is not None:
            leaf = named_tensor.local_tensor.detach()
            leaf = (leaf.full_tensor() if is_sharded(leaf) else leaf).cpu().contiguous()
        if not is_first:
            continue
        if leaf is not None and group_rank.rank and named_tensor.owner == group_rank.rank:
            dist.send(leaf, group=group_rank.group, group_dst=0)
        if group_rank.rank == 0:
            if leaf is None:
                leaf = torch.empty(named_tensor.shape, dtype=named_tensor.dtype, device="cpu")
                dist.recv(leaf, group=group_rank.group, group_src=named_tensor.owner)
            yield named_tensor, leaf


def _write_file(
    file: Path | None,
    named_tensors: Sequence[NamedTensor],
    tensors: Iterator[tuple[NamedTensor, Tensor]],
    group_rank: GroupRank,
) -> None:
    """Write a safetensors file while tensors come; `file` is None on the ranks that send. All raise OSError alike."""
    header = _header(named_tensors)
    failure: list[str | None] = [None]
    if file is not None:
        partial_file = file.with_name(f"{file.name}.saving")
        try:
            with partial_file.open("wb") as output:
                output.write(header)
                for named_tensor, tensor in tensors:
                    for _ in named_tensor.names:
                        output.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
                output.flush()
                os.fsync(output.fileno())
            partial_file.replace(file)
        except OSError as error:
            with suppress(OSError):
                partial_file.unlink(missing_ok=True)
            failure = [f"{file} could not be written: {error.strerror}. What it held before is whole."]
    # The sending ranks know nothing of a failure: receive the rest, or their sends would block for ever.
    for _ in tensors:
        pass
    if group_rank.group is not None:
        dist.broadcast_object_list(failure, group=group_rank.group, group_src=0)
    if failure[0] is not None:
        raise OSError(failure[0])


def _header(named_tensors: Sequence[NamedTensor]) -> bytes:
    """Return the beginning of a safetensors file: 8 bytes of length, then a header in JSON."""
    header, start = dict[str, Any](), 0
    for named_tensor in named_tensors:
        for name in named_tensor.names:
            if named_tensor.dtype not in CODES:
                raise ValueError(f"{name} is of {named_tensor.dtype}, which a safetensors file has no word for.")
            end = start + named_tensor.dtype.itemsize * torch.Size(named_tensor.shape).numel()
            dtype, shape = CODES[named_tensor.dtype], [*named_tensor.shape]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            start = end
    # The format aligns the data to 8 bytes; spaces after JSON are allowed.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
