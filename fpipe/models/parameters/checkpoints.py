"""Save a training and resume it, with any number of ranks, another schedule or other shards.

save(folder, ..)   save(folder, ..)    --> folder/saved-1 whole, then folder/saved-2 whole;  load(folder, ..) the newest
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.limits import check_whole_number
from fpipe.models.parameters.gather import describe_leaves, names_by_stage
from fpipe.program import Program
from fpipe.torch_private.checkpoint_folders import SaveReader, SaveWriter, read_tensors, start_save, write_tensors

Named = dict[str, Tensor]


class Checkpoint(NamedTuple):
    """A training that `load` has read: parameters, optimizer state and module state by stage, and the numbers."""

    params: Any
    opt: Any
    state: Any
    numbers: dict[str, int | float]


def save(
    folder: str | PathLike[str],
    program: Program,
    params: Sequence[Any],
    *,
    opt: Sequence[Any] | None = None,
    state: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
    keep: int = 1,
    background: bool = False,
    **numbers: float,
) -> Future[None]:
    """Save a training by torch.distributed.checkpoint, for `load` to resume; each rank writes the stages that it has.

    A save counts when all ranks have written all of it. What ends it early, such as a kill or a full disk, leaves the
    folder with the save before it.

    Args:
        folder: where to; all processes see it, and one training at a time saves there.
        program: a program that is placed.
        params, opt, state: one entry for each stage, None for those of other ranks.
        mesh: that of the step; without it torch.distributed's default group, or one process. All processes call it.
        keep: how many of the newest saves stay. `load` reads the newest; `folder/saved-1` is the first.
        background: copy everything to the host, and write while steps go on, over connections of gloo's own. The next
            `save` or `load` of this process waits for it; so does the end of the process.
        numbers: further numbers to save, such as step=100, position=6400.

    Returns:
        A future, which is done unless the save is in the background: `result()` waits for that, and raises what it
        failed with; else the next save does, on all ranks if one of them has not asked, or the end of the process
        prints it. Wait before the process group is destroyed.

    Raises:
        ValueError: a number that is none; entries that are not one for each stage, or on meta; a folder that is a file.
        OSError: a file that cannot be written, on all ranks; what was saved before is whole.

    >>> import fpipe, tempfile, torch
    >>> params, program = ({"w": torch.ones(2)},), fpipe.program(1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = save(folder, program, params, step=3)
    ...     load(folder, program, ({"w": torch.zeros(2)},))
    Checkpoint(params=({'w': tensor([1., 1.])},), opt=None, state=None, numbers={'step': 3})
    """
    check_whole_number("keep", keep, maximum=inf)
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"save writes a folder; {existing} is a file; name another.")
    tensors, *_ = _tensors_and_names(program, {"params": params, "opt": opt, "state": state}, mesh)
    tensors |= {f"numbers/{key}": _as_tensor(key, number) for key, number in numbers.items()}
    # A failure of the save before is raised here: whoever calls `save` learns that it is missing.
    _BACKGROUND.raise_failure()
    if not background:
        _write(path, tensors, keep, None)
        saving = _Saving()
        saving.set_result(None)
        return saving
    # Copied to the host before this returns, so that the next step may write the tensors in place.
    group = _BACKGROUND.group()
    return _BACKGROUND.start(path, {name: leaf.to("cpu", copy=True) for name, leaf in tensors.items()}, keep, group)


def _as_tensor(name: str, number: float) -> Tensor:
    if isinstance(number, bool) or not isinstance(number, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name}= is a number, found {type(number).__name__}.")
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)


def _write(folder: Path, tensors: Mapping[str, Tensor], keep: int, group: Any) -> None:
    # The first rank chooses the number of the save and broadcasts it, or its error: all ranks fail alike, and none
    # waits in a collective for one that has raised.
    is_alone = _is_alone()
    rank = 0 if is_alone else dist.get_rank(group)
    choice: list[Any] = [None]
    if rank == 0:
        try:
            choice = [start_save(folder)]
        except OSError as error:
            choice = [f"{folder} could not be written: {error.strerror}."]
    if not is_alone:
        dist.broadcast_object_list(choice, group=group, group_src=0)
    if isinstance(choice[0], str):
        raise OSError(choice[0])
    number, save_id = choice[0]
    write_tensors(SaveWriter(folder, number, save_id, keep), tensors, rank, group, is_alone)


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


class _Saving(Future[None]):
    """A save in the background, which notes in `is_reported` that its result was asked for."""

    is_reported = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save, and raise its error if it failed."""
        try:
            super().result(timeout)
        finally:
            self.is_reported = self.done()


class _Background:
    """The background save of this process, one at a time, and the process group that it uses.

    Steps run at the same time. The save has a group of its own, since collectives of two threads in one group would be
    queued in another order on each rank.
    """

    def __init__(self) -> None:
        self.saving: _Saving | None = None
        self._groups: tuple[Any, Any] = None, None
        self._is_registered = False

    def group(self) -> Any:
        """Return a group of gloo for the default group, made by the first call. All processes call it."""
        if _is_alone():
            return None
        if self._groups[0] is not dist.group.WORLD:
            self._groups = dist.group.WORLD, dist.new_group(backend="gloo")
        return self._groups[1]

    def start(self, folder: Path, tensors: Named, keep: int, group: Any) -> Future[None]:
        """Start a save in a thread, which the end of the process waits for."""
        if not self._is_registered:
            # At the end of the process an error that was not asked for is printed.
            atexit.register(self.wait, reports=True)
            self._is_registered = True
        saving = self.saving = _Saving()

        def run() -> None:
            try:
                _write(folder, tensors, keep, group)
            except BaseException as error:
                saving.set_exception(error)
            else:
                saving.set_result(None)

        threading.Thread(target=run, name="fpipe.save").start()
        return saving

    def wait(self, reports: bool) -> None:
        """Wait for the running save. With `reports`, raise its error unless its result was asked for."""
        saving = self.saving
        failed = saving is not None and saving.exception() is not None
        if reports or not failed:
            self.saving = None
        if saving is not None and failed and reports and not saving.is_reported:
            saving.result()

    def raise_failure(self) -> None:
        """Wait for the running save, and raise its error unless all ranks have asked for its result."""
        saving, self.saving = self.saving, None
        if saving is None:
            return
        failed = saving.exception() is not None
        is_unreported: list[Any] = [failed and not saving.is_reported]
        # A rank that has asked would go on to the next save, and wait there for the ranks that raise here.
        if not _is_alone():
            is_unreported = [None] * dist.get_world_size()
            dist.all_gather_object(is_unreported, failed and not saving.is_reported)
        if any(is_unreported):
            saving.result()


_BACKGROUND = _Background()


def load(
    folder: str | PathLike[str],
    program: Program,
    params: Sequence[Any],
    *,
    opt: Sequence[Any] | None = None,
    state: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> Checkpoint:
    """Read a training that `save` has written, on any number of ranks, in any cut, in shards or whole.

    Only data are read: nothing in the folder runs.

    Args:
        folder: that of `save`, or one of the saves in it.
        program: a program that is placed.
        params, opt, state: trees like those to read, with this process's stages: names, shapes, dtypes and shards are
            taken from them, values do not matter, and they are not changed. Tensors on meta are read onto torch's
            default device.
        mesh: that of the step.

    Returns:
        A `Checkpoint`.

    Raises:
        ValueError: no such folder, one that is damaged or has files of two saves, with the file; a name that was not
            saved, or one that was and is not among these; another shape, or not one entry for each stage.

    >>> import fpipe, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = fpipe.save(folder, fpipe.program(2), ({"a": torch.ones(2)}, {"b": torch.ones(1)}), step=3)
    ...     saved = load(folder, fpipe.program(1), ({"b": torch.zeros(1), "a": torch.zeros(2)},))
    >>> saved.params, saved.numbers["step"]
    (({'b': tensor([1.]), 'a': tensor([1., 1.])},), 3)
    """
    # 1) Make zeros for what this process has, and compare names and shapes with the save before anything is read.
    _BACKGROUND.wait(reports=False)
    tensors, parts, names = _tensors_and_names(
        program, {"params": params, "opt": opt, "state": state}, mesh, into_new_tensors=True
    )
    reader = SaveReader(Path(folder))
    for name in (name for name in tensors if name not in reader.tensors):
        raise ValueError(f"{folder} has no {name.replace('/', ' of ', 1)}: it was saved of another net, or without.")
    for name, leaf in tensors.items():
        size = reader.tensors[name].size
        if tuple(size) != tuple(leaf.shape):
            raise ValueError(f"{name} was saved with shape {[*size]}, and is of shape {[*leaf.shape]} here.")
    # Names that were saved and are missing here are an error only in parts of which the ranks together have all stages:
    # another rank may have what this one has not.
    whole_parts = {name.partition("/")[0] for name in names}
    extra = (name for name in reader.tensors if name not in names and name.partition("/")[0] in whole_parts)
    for name in extra:
        leaf_name = name.replace("/", " of ", 1)
        raise ValueError(f"{folder} has {leaf_name}, which is not among these: it was saved of another net.")
    # 2) Read the tensors in place, and the numbers, which the caller need not name.
    number_names = [name for name in reader.tensors if name.startswith("numbers/")]
    numbers = {name: torch.zeros((), dtype=reader.tensors[name].properties.dtype) for name in number_names}
    read_tensors(reader, tensors | numbers, _is_alone())
    values = {name.partition("/")[2]: number.item() for name, number in numbers.items()}
    return Checkpoint(parts["params"], parts["opt"], parts["state"], values)


def _tensors_and_names(
    program: Program, parts: Mapping[str, Any], mesh: DeviceMesh | None, into_new_tensors: bool = False
) -> tuple[Named, dict[str, Any], set[str]]:
    """Name the tensors of this rank.

    Args:
        parts: `params`, `opt` and `state`, each with an entry for each stage.
        into_new_tensors: put zeros in the place of the tensors, to read into.

    Returns:
        The tensors of this rank by name, `params/0.weight`; the parts with these tensors; and the names of all ranks in
        the parts of which they have all stages.
    """
    tensors, parts_with_tensors, all_names = Named(), dict[str, Any](), set[str]()
    for part_name, part in parts.items():
        parts_with_tensors[part_name] = part
        if part is None:
            continue
        names = names_by_stage(describe_leaves(program, part_name, part, mesh, not into_new_tensors)[1])
        if len(names) == program.stages:
            all_names.update(f"{part_name}/{name}" for stage_names in names.values() for name in stage_names)
        stages: list[Any] = []
        for stage, stage_tree in enumerate(part):
            leaves, spec = tree.flatten(stage_tree)
            if stage_tree is not None:
                leaves = [leaf if leaf is None else _zeros_for(leaf) for leaf in leaves] if into_new_tensors else leaves
                present = [leaf for leaf in leaves if leaf is not None]
                tensors |= {f"{part_name}/{name}": x.detach() for name, x in zip(names[stage], present, strict=True)}
            stages.append(None if stage_tree is None else tree.unflatten(spec, leaves))
        parts_with_tensors[part_name] = tuple(stages)
    return tensors, parts_with_tensors, all_names


def _zeros_for(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf, device=torch.get_default_device() if leaf.is_meta else leaf.device)
