"""Write and read folders of torch.distributed.checkpoint: a save counts when it is whole, and a load runs no code.

    folder/.metadata --names--> saved-3/__0_0.distcp, saved-3/__1_0.distcp        folder/saved-3/.metadata names its own

A save fills a folder beside the earlier ones. It counts from the moment its `.metadata` takes the place of the one
before it, which the file system does at once. So whatever ends a save early, the folder has the save before it.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

SAVING = ".saving"
"""The folder of a save that is not yet whole."""
SAVE_ID = "save_id/"
"""The id of its save, which each rank writes into its file: this, and the rank."""
_SAVED = re.compile(r"saved-([0-9]{1,9})")


def start_save(folder: Path) -> tuple[int, str]:
    """Return the number and the id of a new save, in a folder that is cleared of a save that was cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / SAVING, ignore_errors=True)
    return max(_saved(folder), default=0) + 1, uuid.uuid4().hex


def write_tensors(writer: SaveWriter, tensors: Mapping[str, Tensor], rank: int, group: Any, is_alone: bool) -> None:
    """Write the tensors of this rank; all ranks call it, of which one is `is_alone` without the others.

    2.13: `_save_state_dict`, which gives no warning where there is no group.

    Raises:
        OSError: a file that cannot be written, with its reason, on all ranks.
    """
    save_id = torch.frombuffer(bytearray(writer.save_id.encode()), dtype=torch.uint8)
    named = {**tensors, f"{SAVE_ID}{rank}": save_id}
    try:
        _SAVE(named, storage_writer=writer, process_group=group, no_dist=is_alone)
    except CheckpointException as error:
        if rank == 0:
            shutil.rmtree(writer.path, ignore_errors=True)
        raise OSError(f"{_first_failure(error)}; what {writer.folder} had before is whole.") from None


def read_tensors(reader: SaveReader, tensors: dict[str, Any], is_alone: bool) -> None:
    """Read into these tensors (2.13: `_load_state_dict`, as above).

    Raises:
        ValueError: a file that is damaged or of another save, on all ranks.
    """
    try:
        _LOAD(tensors, storage_reader=reader, no_dist=is_alone)
    except CheckpointException as error:
        reason = _first_failure(error)
        where = "" if str(reader.folder) in reason else f"{reader.folder} could not be read: "
        raise ValueError(f"{where}{reason}.") from None


_SAVE: Callable[..., Any] = vars(state_dict_saver)["_save_state_dict"]
_LOAD: Callable[..., Any] = vars(state_dict_loader)["_load_state_dict"]


def _first_failure(error: CheckpointException) -> str:
    """Return the sentence of the first rank that failed."""
    failure = error.failures[min(error.failures)][0]
    return str(failure).rstrip(".")


def _reason(error: BaseException | None) -> str:
    """Return what the system says, else the first line of an error: torch hides the one in the other."""
    first = error
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return (str(first).splitlines() or [type(first).__name__])[0]


class SaveWriter(FileSystemWriter):
    """Writes a save into a folder beside the earlier ones, of which the newest `keep` stay."""

    def __init__(self, folder: Path, number: int, save_id: str, keep: int) -> None:
        super().__init__(folder / SAVING)
        self.folder, self.number, self.save_id, self.keep = folder, number, save_id, keep

    def storage_meta(self) -> StorageMeta:
        """Return the facts of the save that its metadata has."""
        return StorageMeta(checkpoint_id=str(self.folder), save_id=self.save_id)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the tensors of this rank, all into one file."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            file = Path(self.path, f"__{self.rank or 0}_0.distcp")
            raise OSError(f"{file} could not be written: {_reason(error)}") from error

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write what was saved where, when all ranks are done: from then on the save counts. One rank calls it."""
        final, saving = self.folder / f"saved-{self.number}", Path(self.path)
        try:
            super().finish(metadata, results)
            saving.rename(final)
            moved = {
                index: replace(info, relative_path=f"{final.name}/{info.relative_path}")
                for index, info in metadata.storage_data.items()
            }
            write_whole(self.folder / ".metadata", pickle.dumps(replace(metadata, storage_data=moved)))
        except Exception as error:
            shutil.rmtree(final, ignore_errors=True)
            raise OSError(f"{self.folder / '.metadata'} could not be written: {_reason(error)}") from error
        earlier = [number for number in sorted(_saved(self.folder)) if number <= self.number]
        for number in earlier[: -self.keep]:
            outdated = self.folder / f"saved-{number}"
            with suppress(OSError):  # the new save counts, whatever becomes of earlier ones
                outdated.joinpath(".metadata").unlink(missing_ok=True)  # so that a part of it is no save
                shutil.rmtree(outdated, ignore_errors=True)
        for file in self.folder.glob("__*.distcp"):  # of torch's own writer
            with suppress(OSError):
                file.unlink(missing_ok=True)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that at any time it has its old content or the new one."""
    part = file.with_name(f"{file.name}{SAVING}")
    with part.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)


def _saved(folder: Path) -> list[int]:
    """Return the numbers of the saves in a folder."""
    return [int(match[1]) for path in folder.iterdir() if (match := _SAVED.fullmatch(path.name))]


class SaveReader(FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint as data: tensors, from files of one save.

    Raises:
        ValueError: the folder has no `.metadata`, or one that is damaged or names what no checkpoint has.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder, self.metadata = folder, _metadata_of(folder)
        self.tensors = {
            name: saved
            for name, saved in self.metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what was saved where."""
        return self.metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read the tensors of a plan, file by file."""
        items_by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:  # torch would unpickle it
                raise ValueError(f"{self.folder} has no tensor under {item.storage_index.fqn!r}")
            items_by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done: Any = super().read_data(replace(plan, items=[]), planner)
        for file, items in items_by_file.items():
            path = Path(self.folder, file)
            try:
                is_alike = self._has_id(path, file)
                self._check_sums(path, {item.storage_index for item in items})
                done = super().read_data(replace(plan, items=items), planner)
            except Exception as error:
                missing = f"{path} is not there, which {self.folder / '.metadata'} names"
                damaged = f"{path} is damaged, or of another save than {self.folder / '.metadata'}: {_reason(error)}"
                raise ValueError(damaged if path.exists() else missing) from error
            if not is_alike:
                raise ValueError(f"{path} is of another save than {self.folder / '.metadata'}; load one of them whole")
        return done

    def _check_sums(self, path: Path, indices: Iterable[Any]) -> None:
        """Read tensors, each a zip archive, and raise if their checksums differ: torch does not look at them."""
        with path.open("rb") as stream:
            for index in indices:
                stream.seek(self.storage_data[index].offset)
                # 2.13: torch's own view of a part of a file seeks wrongly from its end.
                with zipfile.ZipFile(io.BytesIO(stream.read(self.storage_data[index].length))) as archive:
                    record = archive.testzip()
                if record is not None:
                    raise ValueError(f"{index.fqn} has another checksum than it was written with")

    def _has_id(self, path: Path, file: str) -> bool:
        """Whether a file has the id of the metadata; of other writers neither has one."""
        saved = self.metadata.storage_meta and self.metadata.storage_meta.save_id
        for index, info in self.metadata.storage_data.items():
            if index.fqn.startswith(SAVE_ID) and info.relative_path == file:
                with path.open("rb") as stream:
                    found = torch.load(self._slice_file(stream, info), weights_only=True)
                return bytes(found.tolist()).decode() == saved
        return True


def _metadata_of(folder: Path) -> Metadata:
    """Read the `.metadata` of a folder, of which nothing runs."""
    file = folder / ".metadata"
    if not file.is_file():
        raise ValueError(f"{folder} has no file .metadata: nothing was saved there, or not to its end.")
    try:
        with file.open("rb") as stream:
            metadata: Any = _MetadataUnpickler(stream).load()
        paths = [PurePath(info.relative_path) for info in metadata.storage_data.values()]
        names = [*metadata.state_dict_metadata, *(index.fqn for index in metadata.storage_data)]
        tensors = [saved for saved in metadata.state_dict_metadata.values() if isinstance(saved, TensorStorageMetadata)]
        is_sound = isinstance(metadata, Metadata) and all(isinstance(name, str) for name in names)
        is_sound &= all(isinstance(x.size, torch.Size) for x in tensors)
        is_sound &= all(isinstance(x.properties.dtype, torch.dtype) for x in tensors)
    except Exception as error:  # whatever a stream of bytes can do to an unpickler
        raise ValueError(f"{file} is damaged, or no metadata of a checkpoint: {_reason(error)}.") from error
    if not is_sound:
        raise ValueError(f"{file} is no metadata of a checkpoint.")
    outside = next((path for path in paths if path.is_absolute() or ".." in path.parts), None)
    if outside is not None:
        raise ValueError(f"{file} names {str(outside)!r}, which is outside of its folder.")
    return metadata


_UNPICKLER: Any = vars(pickle)["_Unpickler"]  # in Python: the one in C does not ask before it sets attributes


class _MetadataUnpickler(_UNPICKLER):
    """Unpickles what the metadata of checkpoints consist of, and nothing else (2.11 to 2.15: the names below)."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or dtype that metadata have."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")
        return super().find_class(module, name)

    def build(self) -> None:
        """Set the attributes of a dataclass: those of classes and functions would outlast the metadata."""
        if type(self.stack[-2]) not in _DATACLASSES:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-2]).__name__}")
        super().load_build()

    dispatch: Mapping[int, Any] = {**_UNPICKLER.dispatch, pickle.BUILD[0]: build}


_DATACLASSES: tuple[Any, ...] = (
    *(Metadata, StorageMeta, TensorStorageMetadata),
    *(BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, TensorProperties),
    vars(filesystem)["_StorageInfo"],
)
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_CLASSES: dict[str, tuple[str, ...]] = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
}
for _dataclass in _DATACLASSES:
    _CLASSES[_dataclass.__module__] = (*_CLASSES.get(_dataclass.__module__, ()), _dataclass.__name__)
