"""Write and read folders of torch.distributed.checkpoint: saves are atomic, and loads run no code.

    folder/.metadata --names--> saved-3/__0_0.distcp, saved-3/__1_0.distcp        folder/saved-3/.metadata names its own

A save fills a folder next to the earlier ones. It counts from the moment when its `.metadata` replaces the one before,
which a file system does atomically. So if a save is cut off, the folder still has the save before it.
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
"""The name of the folder of a save that is not complete yet."""
SAVE_ID = "save_id/"
"""The name, followed by the rank, of the tensor with the save's id, which each rank writes into its file."""
_SAVE_FOLDER = re.compile(r"saved-([0-9]{1,9})")


def start_save(folder: Path) -> tuple[int, str]:
    """Clear a folder of a save that was cut off, and return the number and the id of a new save."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / SAVING, ignore_errors=True)
    return max(_save_numbers(folder), default=0) + 1, uuid.uuid4().hex


def write_tensors(writer: SaveWriter, tensors: Mapping[str, Tensor], rank: int, group: Any, is_alone: bool) -> None:
    """Write the tensors of this rank. All ranks call it; `is_alone` if there is only one.

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
        raise OSError(f"{_first_failure_text(error)}; what {writer.folder} had before is whole.") from None


def read_tensors(reader: SaveReader, tensors: dict[str, Any], is_alone: bool) -> None:
    """Read a save into these tensors (2.13: `_load_state_dict`).

    Raises:
        ValueError: a file that is damaged or of another save, on all ranks.
    """
    try:
        _LOAD(tensors, storage_reader=reader, no_dist=is_alone)
    except CheckpointException as error:
        reason = _first_failure_text(error)
        prefix = "" if str(reader.folder) in reason else f"{reader.folder} could not be read: "
        raise ValueError(f"{prefix}{reason}.") from None


_SAVE: Callable[..., Any] = vars(state_dict_saver)["_save_state_dict"]
_LOAD: Callable[..., Any] = vars(state_dict_loader)["_load_state_dict"]


def _first_failure_text(error: CheckpointException) -> str:
    """Return the message of the error on the first rank that failed."""
    failure = error.failures[min(error.failures)][0]
    return str(failure).rstrip(".")


def _reason(error: BaseException | None) -> str:
    """Return the operating system's reason in the chain of an error, else the first line of the error."""
    original = error
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return (str(original).splitlines() or [type(original).__name__])[0]


class SaveWriter(FileSystemWriter):
    """Writes a save next to the earlier ones, and deletes all but the newest `keep` when it is complete."""

    def __init__(self, folder: Path, number: int, save_id: str, keep: int) -> None:
        super().__init__(folder / SAVING)
        self.folder, self.number, self.save_id, self.keep = folder, number, save_id, keep

    def storage_meta(self) -> StorageMeta:
        """Return the ids that the metadata of the save has."""
        return StorageMeta(checkpoint_id=str(self.folder), save_id=self.save_id)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the tensors of this rank, all into one file."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            file = Path(self.path, f"__{self.rank or 0}_0.distcp")
            raise OSError(f"{file} could not be written: {_reason(error)}") from error

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Make the save count: write its metadata, when all ranks are done. One rank calls it."""
        # 1. Rename the folder, and let its own metadata, which torch has written there, name the files in it.
        final, saving = self.folder / f"saved-{self.number}", Path(self.path)
        try:
            super().finish(metadata, results)
            saving.rename(final)
            # 2. Replace the metadata of the folder above, with the paths from there: from now on the save counts.
            relocated = {
                index: replace(storage_info, relative_path=f"{final.name}/{storage_info.relative_path}")
                for index, storage_info in metadata.storage_data.items()
            }
            write_atomically(self.folder / ".metadata", pickle.dumps(replace(metadata, storage_data=relocated)))
        except Exception as error:
            shutil.rmtree(final, ignore_errors=True)
            raise OSError(f"{self.folder / '.metadata'} could not be written: {_reason(error)}") from error
        # 3. Delete older saves. The new one counts, whatever becomes of them. Their metadata goes first, so that no
        #    half of a save looks like one.
        earlier = [number for number in sorted(_save_numbers(self.folder)) if number <= self.number]
        for number in earlier[: -self.keep]:
            outdated = self.folder / f"saved-{number}"
            with suppress(OSError):
                outdated.joinpath(".metadata").unlink(missing_ok=True)
                shutil.rmtree(outdated, ignore_errors=True)
        # Files of torch's own writer, which has no folders.
        for file in self.folder.glob("__*.distcp"):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def write_atomically(file: Path, file_bytes: bytes) -> None:
    """Write a file so that at any time it has its old or its new content, never a part."""
    part = file.with_name(f"{file.name}{SAVING}")
    with part.open("wb") as stream:
        stream.write(file_bytes)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def _save_numbers(folder: Path) -> list[int]:
    """Return the numbers of the saves in a folder, in no order."""
    return [int(match[1]) for path in folder.iterdir() if (match := _SAVE_FOLDER.fullmatch(path.name))]


class SaveReader(FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint as data: tensors, from files of one save.

    Raises:
        ValueError: the folder has no `.metadata`, or one that is damaged or names what no checkpoint has.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder, self.metadata = folder, _read_metadata(folder)
        saved_values = self.metadata.state_dict_metadata.items()
        self.tensors = {name: saved for name, saved in saved_values if isinstance(saved, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata: which tensor is in which file."""
        return self.metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read the tensors of a plan, file by file."""
        requests_by_file: dict[str, list[Any]] = {}
        for request in plan.items:
            # Torch would unpickle it, which runs code.
            if request.type == LoadItemType.BYTE_IO:
                raise ValueError(f"{self.folder} has no tensor under {request.storage_index.fqn!r}")
            requests_by_file.setdefault(self.storage_data[request.storage_index].relative_path, []).append(request)
        future: Any = super().read_data(replace(plan, items=[]), planner)
        for file, read_requests in requests_by_file.items():
            path = Path(self.folder, file)
            # All of a file is checked before any error is told: that it is missing, damaged, or of another save.
            try:
                has_save_id = self._has_id(path, file)
                self._check_sums(path, {request.storage_index for request in read_requests})
                future = super().read_data(replace(plan, items=read_requests), planner)
            except Exception as error:
                missing = f"{path} is not there, which {self.folder / '.metadata'} names"
                damaged = f"{path} is damaged, or of another save than {self.folder / '.metadata'}: {_reason(error)}"
                raise ValueError(damaged if path.exists() else missing) from error
            if not has_save_id:
                raise ValueError(f"{path} is of another save than {self.folder / '.metadata'}; load one whole")
        return future

    def _check_sums(self, path: Path, indices: Iterable[Any]) -> None:
        """Raise ValueError if the checksum of a tensor differs: each is a zip archive, and torch checks no sums."""
        with path.open("rb") as stream:
            for index in indices:
                stream.seek(self.storage_data[index].offset)
                # 2.13: torch's own view of a part of a file seeks wrongly from its end.
                with zipfile.ZipFile(io.BytesIO(stream.read(self.storage_data[index].length))) as archive:
                    record = archive.testzip()
                if record is not None:
                    raise ValueError(f"{index.fqn} has another checksum than it was written with")

    def _has_id(self, path: Path, file: str) -> bool:
        """Whether a file has the save id of the metadata, or no id at all, as files of other writers."""
        save_id = self.metadata.storage_meta and self.metadata.storage_meta.save_id
        for index, storage_info in self.metadata.storage_data.items():
            if index.fqn.startswith(SAVE_ID) and storage_info.relative_path == file:
                with path.open("rb") as stream:
                    id_tensor = torch.load(self._slice_file(stream, storage_info), weights_only=True)
                return bytes(id_tensor.tolist()).decode() == save_id
        return True


def _read_metadata(folder: Path) -> Metadata:
    """Read and check the `.metadata` of a folder, without running code from it."""
    file = folder / ".metadata"
    if not file.is_file():
        raise ValueError(f"{folder} has no file .metadata: nothing was saved there, or not to its end.")
    try:
        with file.open("rb") as stream:
            metadata: Any = _MetadataUnpickler(stream).load()
        paths = [PurePath(storage_info.relative_path) for storage_info in metadata.storage_data.values()]
        names = [*metadata.state_dict_metadata, *(index.fqn for index in metadata.storage_data)]
        tensors = [saved for saved in metadata.state_dict_metadata.values() if isinstance(saved, TensorStorageMetadata)]
        is_sound = isinstance(metadata, Metadata) and all(isinstance(name, str) for name in names)
        is_sound &= all(isinstance(tensor.size, torch.Size) for tensor in tensors)
        is_sound &= all(isinstance(tensor.properties.dtype, torch.dtype) for tensor in tensors)
    # Any exception: a damaged stream of bytes can do anything to an unpickler.
    except Exception as error:
        raise ValueError(f"{file} is damaged, or no metadata of a checkpoint: {_reason(error)}.") from error
    if not is_sound:
        raise ValueError(f"{file} is no metadata of a checkpoint.")
    outside = next((path for path in paths if path.is_absolute() or ".." in path.parts), None)
    if outside is not None:
        raise ValueError(f"{file} names {str(outside)!r}, which is outside of its folder.")
    return metadata


# The unpickler in Python: the one in C sets attributes without a hook to refuse it.
_UNPICKLER: Any = vars(pickle)["_Unpickler"]


class _MetadataUnpickler(_UNPICKLER):
    """Unpickles only the classes that metadata of checkpoints consist of (2.11 to 2.15: the names below)."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or dtype that metadata may name; raise UnpicklingError for any other."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")
        return super().find_class(module, name)

    def build(self) -> None:
        """Set the attributes of a dataclass, and of nothing else: a class or function would keep them."""
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
