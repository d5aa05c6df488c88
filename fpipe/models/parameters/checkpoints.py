"""Save a training and go on from it, whatever the ranks, the schedule and the shards then.

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
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.limits import whole
from fpipe.meaning.single_device.params_and_state import refuse_meta
from fpipe.models.parameters.gather import describe_leaves, names_by_stage
from fpipe.program import Program
from fpipe.torch_private.checkpoints import SaveReader, SaveWriter, read_tensors, start_save, write_tensors

Named = dict[str, Tensor]


class Checkpoint(NamedTuple):
    """A training that `load` has read: parameters, optimizer state and module state as handed in, and the numbers."""

    params: Any
    opt: Any
    state: Any
    numbers: dict[str, int | float]


@overload
def save(
    folder: str | PathLike[str],
    program: Program,
    params: Sequence[Any],
    *,
    opt: Sequence[Any] | None = ...,
    state: Sequence[Any] | None = ...,
    mesh: DeviceMesh | None = ...,
    keep: int = ...,
    background: Literal[False] = ...,
    **numbers: float,
) -> None: ...
@overload
def save(
    folder: str | PathLike[str],
    program: Program,
    params: Sequence[Any],
    *,
    opt: Sequence[Any] | None = ...,
    state: Sequence[Any] | None = ...,
    mesh: DeviceMesh | None = ...,
    keep: int = ...,
    background: Literal[True],
    **numbers: float,
) -> Future[None]: ...
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
) -> Future[None] | None:
    """Save a training to go on from with `load`, by torch.distributed.checkpoint: each rank writes what is its own.

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
        numbers: whatever else is to be known, such as step=100, position=6400.

    Returns:
        Of a background save a future: `result()` waits for it, and raises what it failed with; else the next save does,
        or the end of the process prints it. Wait before the process group is destroyed.

    Raises:
        ValueError: a number that is none; entries that are not one for each stage, or on meta; a folder that is a file.
        OSError: a file that cannot be written, on all ranks; what was saved before is whole.

    >>> import fpipe, tempfile, torch
    >>> params, program = ({"w": torch.ones(2)},), fpipe.program(1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, program, params, step=3)
    ...     load(folder, program, ({"w": torch.zeros(2)},))
    Checkpoint(params=({'w': tensor([1., 1.])},), opt=None, state=None, numbers={'step': 3})
    """
    whole("keep", keep, most=inf)
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"save writes a folder, and {existing} is a file; name another.")
    tensors, *_ = _entries(program, {"params": params, "opt": opt, "state": state}, mesh)
    tensors |= {f"numbers/{word}": _as_tensor(word, number) for word, number in numbers.items()}
    _BACKGROUND.wait(reports=True)
    if not background:
        _write(path, tensors, keep, None)
        return None
    group = _BACKGROUND.group()
    return _BACKGROUND.start(path, {name: leaf.to("cpu", copy=True) for name, leaf in tensors.items()}, keep, group)


def _as_tensor(word: str, number: float) -> Tensor:
    if isinstance(number, bool) or not isinstance(number, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{word}= is a number, found {type(number).__name__}.")
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)


def _write(folder: Path, tensors: Mapping[str, Tensor], keep: int, group: Any) -> None:
    """Write the tensors of this process into a new save, which the first rank numbers."""
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
    """A save in the background; `is_reported` when somebody has asked for its result."""

    is_reported = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save, and raise what it failed with."""
        try:
            super().result(timeout)
        finally:
            self.is_reported = self.done()


class _Background:
    """The save in the background of this process, one at a time, and the group that its ranks meet in.

    Steps go on meanwhile, and their collectives must not mix with those of the save.
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
        """Write in a thread, which the end of the process waits for."""
        if not self._is_registered:
            atexit.register(self.wait, reports=True)  # an error that nobody asked for is printed
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
        """Wait for the save under way; raise what it failed with if it `reports` and nobody has asked yet."""
        saving = self.saving
        failed = saving is not None and saving.exception() is not None
        if reports or not failed:
            self.saving = None
        if saving is not None and failed and reports and not saving.is_reported:
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
    """Read what `save` has written, on any number of ranks, in any cut, in shards or whole.

    What is read is data: nothing in the folder runs.

    Args:
        folder: that of `save`, or one of the saves in it.
        program: a program that is placed.
        params, opt, state: what is to be read, as this process has it: names, shapes, dtypes and shards are those of
            these, their values do not matter, and they are not changed. What is on meta is read onto torch's default
            device.
        mesh: that of the step.

    Returns:
        A `Checkpoint`.

    Raises:
        ValueError: no such folder, one that is damaged or has files of two saves, with the file; a name that was not
            saved, or one that was and is not among these; another shape, or not one entry for each stage.

    >>> import fpipe, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fpipe.save(folder, fpipe.program(2), ({"a": torch.ones(2)}, {"b": torch.ones(1)}), step=3)
    ...     saved = load(folder, fpipe.program(1), ({"b": torch.zeros(1), "a": torch.zeros(2)},))
    >>> saved.params, saved.numbers["step"]
    (({'b': tensor([1.]), 'a': tensor([1., 1.])},), 3)
    """
    _BACKGROUND.wait(reports=False)
    tensors, parts, names = _entries(program, {"params": params, "opt": opt, "state": state}, mesh, fresh=True)
    reader = SaveReader(Path(folder))
    missing = next((name for name in tensors if name not in reader.tensors), None)
    if missing is not None:
        raise ValueError(f"{folder} has no {missing.replace('/', ' of ', 1)}: it was saved of another net, or without.")
    for name, leaf in tensors.items():
        size = reader.tensors[name].size
        if tuple(size) != tuple(leaf.shape):
            raise ValueError(f"{name} was saved with shape {[*size]}, and is of shape {[*leaf.shape]} here.")
    whole_parts = {name.partition("/")[0] for name in names}
    extra = (name for name in reader.tensors if name not in names and name.partition("/")[0] in whole_parts)
    for name in extra:
        who = name.replace("/", " of ", 1)
        raise ValueError(f"{folder} has {who}, which is not among these: it was saved of another net.")
    numbers = {
        name: torch.zeros((), dtype=saved.properties.dtype)
        for name, saved in reader.tensors.items()
        if name.startswith("numbers/")
    }
    read_tensors(reader, tensors | numbers, _is_alone())
    values = {name.partition("/")[2]: number.item() for name, number in numbers.items()}
    return Checkpoint(parts["params"], parts["opt"], parts["state"], values)


def _entries(
    program: Program, parts: Mapping[str, Any], mesh: DeviceMesh | None, fresh: bool = False
) -> tuple[Named, dict[str, Any], set[str]]:
    """Return the tensors of this rank by name, the parts with these, and all names of parts that the ranks have whole.

    `fresh` tensors take the place of those of the parts.
    """
    tensors, new_parts, all_names = Named(), dict[str, Any](), set[str]()
    for word, part in parts.items():
        new_parts[word] = part
        if part is None:
            continue
        names = names_by_stage(describe_leaves(program, part, mesh)[1])
        if len(names) == program.stages:
            all_names.update(f"{word}/{name}" for stage_names in names.values() for name in stage_names)
        stages: list[Any] = []
        for stage, entry in enumerate(part):
            leaves, spec = tree.flatten(entry)
            if entry is not None:
                leaves = [leaf if leaf is None else _fresh(leaf) for leaf in leaves] if fresh else leaves
                present = [leaf for leaf in leaves if leaf is not None]
                tensors |= {f"{word}/{name}": leaf.detach() for name, leaf in zip(names[stage], present, strict=True)}
            stages.append(None if entry is None else tree.unflatten(spec, leaves))
        new_parts[word] = tuple(stages)
        refuse_meta("fpipe.load_params or init_params gives it some, or optimizer_state of theirs", **{word: stages})
    return tensors, new_parts, all_names


def _fresh(leaf: Tensor) -> Tensor:
    """Make a tensor to read into."""
    return torch.zeros_like(leaf, device=torch.get_default_device() if leaf.is_meta else leaf.device)
