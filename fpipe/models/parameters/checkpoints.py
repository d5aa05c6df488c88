"""Gather what ranks have of a model, and save it to go on from, whatever the ranks, the schedule and the shards then.

rank 0: ({"0.w": ..}, None)   rank 1: (None, {"1.w": ..})        --> gather_state_dict -->        {"0.w": .., "1.w": ..}

Names are those of a state_dict. Of functions, whose stages may use one name twice, they begin with the stage's number.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.meaning.purity.sharded import dimensions, is_sharded
from fpipe.meaning.single_device.params_and_state import refuse_meta
from fpipe.models.parameters.sources import CODES
from fpipe.program import Program, the_program
from fpipe.torch_private.processes import quiet_checkpoints

Named = dict[str, Tensor]


class Checkpoint(NamedTuple):
    """A training that `load` has read: parameters, optimizer state and module state as handed in, and the numbers."""

    params: Any
    opt: Any
    state: Any
    numbers: dict[str, int | float]


def gather_state_dict(
    program: Program, params: Sequence[Any], *, mesh: DeviceMesh | None = None, file: str | PathLike[str] | None = None
) -> dict[str, Tensor] | None:
    """The parameters of all ranks by name, whole and on the host, on rank 0; `load_params` and `shard_params` are the
    way back.

    Args:
        program: a program that is placed, as a schedule does.
        params: one entry for each stage, None for those of other ranks: parameters, or anything of their structure such
            as gradients. Shards are put together.
        mesh: that of the step, whose dimension "pp" has the ranks. Without it torch.distributed's default group, or one
            process. All processes call it.
        file: a `.safetensors` file, which rank 0 writes tensor by tensor as they come: no more than one of them is held
            besides its own.

    Returns:
        On rank 0 of the first replica the dict, else None; nothing where a file is written.

    Raises:
        ValueError: params of another number of stages, a stage that no rank has, a name that two stages have, a file
            of another suffix, or a dtype that its format has not.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, _ = fpipe.from_sequential(net, stages=2)
    >>> list(gather_state_dict(fpipe.program(model), params))
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    if file is not None and Path(file).suffix != ".safetensors":
        raise ValueError(
            f"file= is a .safetensors file, found {str(file)!r}; another format is yours to write of the dict that "
            "rank 0 gets without file=."
        )
    here, every = _everybody(program, params, mesh)
    names = _names(every)
    missing = next((stage for stage in range(program.stages) if stage not in names), None)
    if missing is not None:
        raise ValueError(f"no rank has handed in stage {missing}: each hands in its own, as local_params has them.")
    mine = {stage: tree.leaves(one) for stage, one in enumerate(params) if one is not None}
    first = mesh is None or all(mesh.get_local_rank(name) == 0 for name in mesh.mesh_dim_names or () if name != "pp")
    whole = _whole(mine, every, here, names, first)
    if here.rank == 0 and first:
        return dict(whole) if file is None else _written(Path(file), every, names, whole)
    for _ in whole:
        pass
    return None


class _Here(NamedTuple):
    """This process among the ranks of a program."""

    rank: int = 0
    group: Any = None


def _everybody(
    program: Program, params: Sequence[Any], mesh: DeviceMesh | None
) -> tuple[_Here, list[dict[int, list[tuple[str, tuple[int, ...], torch.dtype]]]]]:
    """This process, and of each rank the stages that it has: of each leaf its name, shape and dtype."""
    if not isinstance(params, tuple | list) or len(params) != the_program(program).stages:
        found = f"{len(params)} entries" if isinstance(params, tuple | list) else type(params).__name__
        raise ValueError(f"the program has {program.stages} stages, and one entry for each is wanted; found {found}.")
    if mesh is not None:
        dimensions(mesh, {"pp": program.ranks})
    own: dict[int, Any] = {}
    for stage, one in enumerate(params):
        if one is not None:
            leaves, spec = tree.flatten(one)
            paths = [".".join(map(str, path)) for path in spec.paths()]
            odd = next((path for path, leaf in zip(paths, leaves, strict=True) if not isinstance(leaf, Tensor)), None)
            if odd is not None:
                raise ValueError(f"stage {stage} has no tensor at {odd}; only tensors have a place in a state_dict.")
            own[stage] = [(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(paths, leaves, strict=True)]
    if not (dist.is_available() and dist.is_initialized()):
        return _Here(), [own]
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    assert group is not None
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    return _Here(group.rank(), group), every


def _names(every: Sequence[Mapping[int, Any]]) -> dict[int, list[str]]:
    """The names of the leaves of each stage; they begin with its number where two stages would have one name."""
    found = {stage: [name for name, *_ in leaves] for own in every for stage, leaves in own.items()}
    flat = [name for _, names in sorted(found.items()) for name in names]
    if len({*flat}) == len(flat):
        return found
    return {stage: [f"{stage}.{name}" for name in names] for stage, names in found.items()}


def _whole(
    mine: Mapping[int, Sequence[Any]], every: Sequence[Mapping[int, Any]], here: _Here, names: Any, first: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all stages, one after the other, on rank 0; others send theirs."""
    for stage in sorted(names):
        owner = next(rank for rank, own in enumerate(every) if stage in own)
        for at, (_, shape, dtype) in enumerate(every[owner][stage]):
            leaf = None
            if owner == here.rank:
                leaf = mine[stage][at].detach()
                leaf = (leaf.full_tensor() if is_sharded(leaf) else leaf).cpu().contiguous()
                if here.rank and first:
                    dist.send(leaf, group=here.group, group_dst=0)
            elif here.rank == 0 and first:
                leaf = torch.empty(shape, dtype=dtype, device="cpu")
                dist.recv(leaf, group=here.group, group_src=owner)
            if here.rank == 0 and first and leaf is not None:
                yield names[stage][at], leaf


def _written(file: Path, every: Sequence[Mapping[int, Any]], names: Any, found: Iterator[tuple[str, Tensor]]) -> None:
    """Write a safetensors file as tensors come: 8 bytes of length, a header in JSON, the bytes of all."""
    header, start = dict[str, Any](), 0
    owners = {stage: leaves for own in reversed(every) for stage, leaves in own.items()}
    for stage in sorted(names):
        for name, (_, shape, dtype) in zip(names[stage], owners[stage], strict=True):
            if dtype not in CODES:
                raise ValueError(f"{name} is of {dtype}, which a safetensors file has no word for.")
            end = start + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, leaf in found:
            out.write(leaf.reshape(-1).view(torch.uint8).numpy().tobytes())


def save(
    folder: str | PathLike[str],
    program: Program,
    params: Sequence[Any],
    *,
    opt: Sequence[Any] | None = None,
    state: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
    **numbers: float,
) -> None:
    """Save a training to go on from with `load`, by torch.distributed.checkpoint: each rank writes what is its own.

    Args:
        folder: where to; what was saved there is overwritten.
        program: a program that is placed.
        params, opt, state: one entry for each stage, None for those of other ranks.
        mesh: that of the step; without it torch.distributed's default group, or one process. All processes call it.
        numbers: whatever else is to be known, such as step=100, position=6400.

    Raises:
        ValueError: a number that is none; entries that are not one for each stage, or on meta; a folder that is a file.

    >>> import fpipe, tempfile, torch
    >>> params, program = ({"w": torch.ones(2)},), fpipe.program(1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, program, params, step=3)
    ...     load(folder, program, ({"w": torch.zeros(2)},))
    Checkpoint(params=({'w': tensor([1., 1.])},), opt=None, state=None, numbers={'step': 3})
    """
    odd = next(
        (word for word, one in numbers.items() if isinstance(one, bool) or not isinstance(one, int | float)), None
    )  # pyright: ignore[reportUnnecessaryIsInstance]
    if odd is not None:
        raise ValueError(f"{odd}= is a number, found {type(numbers[odd]).__name__}.")
    path = Path(folder).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"save writes a folder, and {there} is a file; name another.")
    whole, _ = _entries(program, {"params": params, "opt": opt, "state": state}, mesh)
    whole |= {f"numbers/{word}": torch.tensor(one) for word, one in numbers.items()}
    with _alone_in_silence() as alone:
        state_dict_saver.save(whole, storage_writer=FileSystemWriter(folder, overwrite=True), no_dist=alone)


def load(
    folder: str | PathLike[str],
    program: Program,
    params: Sequence[Any],
    *,
    opt: Sequence[Any] | None = None,
    state: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> Checkpoint:
    """Read what `save` has written, on any number of ranks, in any cut, in shards or whole.

    Args:
        folder: that of `save`.
        program: a program that is placed.
        params, opt, state: what is to be read, as this process has it: names, shapes, dtypes and shards are those of
            these, their values do not matter, and they are not changed. What is on meta is read onto torch's default
            device.
        mesh: that of the step.

    Returns:
        A `Checkpoint`.

    Raises:
        ValueError: no such folder, a name that was not saved, another shape, or not one entry for each stage.

    >>> import fpipe, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fpipe.save(folder, fpipe.program(2), ({"a": torch.ones(2)}, {"b": torch.ones(1)}), step=3)
    ...     saved = load(folder, fpipe.program(1), ({"b": torch.zeros(1), "a": torch.zeros(2)},))
    >>> saved.params, saved.numbers["step"]
    (({'b': tensor([1.]), 'a': tensor([1., 1.])},), 3)
    """
    whole, put = _entries(program, {"params": params, "opt": opt, "state": state}, mesh, fresh=True)
    if not Path(folder, ".metadata").is_file():
        raise ValueError(f"{folder} is no folder that fpipe.save has written, or it was not written to its end.")
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    lacks = next((name for name in whole if name not in saved), None)
    if lacks is not None:
        raise ValueError(f"{folder} has no {lacks.replace('/', ' of ', 1)}: it was saved of another net, or without.")
    for name, leaf in whole.items():
        size = getattr(saved[name], "size", leaf.shape)
        if tuple(size) != tuple(leaf.shape):
            raise ValueError(f"{name} was saved with shape {[*size]}, and is of shape {[*leaf.shape]} here.")
    counted = {
        name: torch.zeros((), dtype=one.properties.dtype)
        for name, one in saved.items()
        if name.startswith("numbers/") and isinstance(one, TensorStorageMetadata)
    }
    with _alone_in_silence() as alone:
        state_dict_loader.load(whole | counted, checkpoint_id=folder, no_dist=alone)
    numbers = {name.partition("/")[2]: one.item() for name, one in counted.items()}
    return Checkpoint(put["params"], put["opt"], put["state"], numbers)


@contextmanager
def _alone_in_silence() -> Generator[bool]:
    """Whether this process has no group."""
    with quiet_checkpoints():
        yield not (dist.is_available() and dist.is_initialized())


def _entries(
    program: Program, parts: Mapping[str, Any], mesh: DeviceMesh | None, fresh: bool = False
) -> tuple[Named, dict[str, Any]]:
    """All tensors by name, and the parts that they are in; `fresh` ones take the place of those."""
    whole, put = Named(), dict[str, Any]()
    for word, part in parts.items():
        put[word] = part
        if part is None:
            continue
        _, every = _everybody(program, part, mesh)
        names, made = _names(every), list[Any]()
        for stage, one in enumerate(part):
            leaves, spec = tree.flatten(one)
            leaves = [*map(_fresh, leaves)] if fresh and one is not None else leaves
            if one is not None:
                whole |= {f"{word}/{name}": leaf.detach() for name, leaf in zip(names[stage], leaves, strict=True)}
            made.append(None if one is None else tree.unflatten(spec, leaves))
        put[word] = tuple(made)
        refuse_meta("fpipe.load_params or init_params gives it some, or optimizer_state of theirs", **{word: made})
    return whole, put


def _fresh(leaf: Tensor) -> Tensor:
    """A tensor to read into."""
    return torch.zeros_like(leaf, device=torch.get_default_device() if leaf.is_meta else leaf.device)
