"""Read single tensors by name from a state_dict, safetensors files or a distributed checkpoint.

source_of("model.safetensors.index.json")        -->        known: {name: dtype, shape};  read(names): those alone
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.limits import shortened
from fpipe.torch_private.checkpoint_folders import SaveReader, read_tensors

# Read single tensors of a safetensors file, by the package of that name.

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in _DTYPES.items()}
"""The name of each dtype in the format."""


class SavedTensor(NamedTuple):
    """The description of a tensor of a source: its dtype, its shape, and its file or folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str


class SafetensorsFile:
    """An open safetensors file, whose header is read at once and whose tensors are read one by one.

    Attributes:
        entries: its tensors by name, in the order of their data.
        metadata: its header's texts by name.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: it is no such file, or is cut off.
        OSError: there is no file.
    """

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ModuleNotFoundError(f"{path} needs the package safetensors: pip install safetensors.") from None
        self.path = path
        try:
            # A file mapped into memory would count twice: its pages, and the tensors made of them.
            self._file: Any = safe_open(path, "pt", backend="pread")
        except SafetensorError as error:
            reason = shortened(str(error)).rstrip(".")
            raise ValueError(f"{path} is no file in the safetensors format: {reason}.") from None
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.entries: dict[str, SavedTensor] = {}
        for name in self._file.offset_keys():
            view = self._file.get_slice(name)
            code = view.get_dtype()
            if code not in _DTYPES:
                raise ValueError(f"{path} holds {name!r} as {code}; what is read is {', '.join(_DTYPES)}.")
            self.entries[name] = SavedTensor(_DTYPES[code], (*view.get_shape(),), str(path))

    def read_tensor(self, name: str) -> Tensor:
        """Read one tensor, and no other bytes of the data."""
        return self._file.get_tensor(name)


class TensorSource(ABC):
    """A source of tensors by name.

    Attributes:
        saved_tensors: the descriptions of its tensors, known before any is read.
        is_read_to_cpu: whether tensors are read from a file to the CPU, and not passed on.
    """

    saved_tensors: Mapping[str, SavedTensor]
    is_read_to_cpu = True

    @abstractmethod
    def read_tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read these tensors."""


def source_of(source: Any) -> TensorSource:
    """Open the source of `load_params`.

    Raises:
        TypeError, ValueError: it is none of them.
        OSError: there is no such file.
    """
    if isinstance(source, Mapping):
        return _StateDictSource(source)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(source, str | Path):
        raise TypeError(f"a source is a path, or a state_dict; found {type(source).__name__}.")
    path = Path(source)
    if path.is_dir():
        # transformers saves a large model in several files with an index, a small one in a single file.
        files = (path / "model.safetensors.index.json", path / "model.safetensors")
        file = next((file for file in files if file.exists()), None)
        return _CheckpointSource(path) if file is None else source_of(file)
    if path.suffix == ".json":
        return _SafetensorsSource(_files_of_index(path))
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is no source of parameters: hand in a .safetensors file, its index, a folder of "
            "torch.distributed.checkpoint, or a state_dict."
        )
    file = SafetensorsFile(path)
    return _SafetensorsSource(dict.fromkeys(file.entries, file))


class _StateDictSource(TensorSource):
    """A dict of tensors, which are passed on without a copy."""

    is_read_to_cpu = False

    def __init__(self, named: Mapping[str, Any]) -> None:
        for name, leaf in named.items():
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                actual = "a tensor on meta, without values" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(f"the state_dict has {actual} under {name!r}; a source has tensors.")
        self.tensor_by_name = named
        self.saved_tensors = {name: SavedTensor(x.dtype, tuple(x.shape), "the state_dict") for name, x in named.items()}

    def read_tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: self.tensor_by_name[name].detach() for name in names}


class _SafetensorsSource(TensorSource):
    """The safetensors files that have the tensors, by name."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self.files = files
        self.saved_tensors = {name: file.entries[name] for name, file in files.items()}

    def read_tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: self.files[name].read_tensor(name) for name in names}


def _files_of_index(index: Path) -> dict[str, SafetensorsFile]:
    try:
        file_by_name: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{index} is no index of safetensors: it has no weight_map of names to files.") from None
    opened_files = {file: SafetensorsFile(index.parent / file) for file in sorted({*file_by_name.values()})}
    for name, file in file_by_name.items():
        if name not in opened_files[file].entries:
            raise ValueError(f"{index} says that {name!r} is in {file}, which lacks it.")
    return {name: opened_files[file] for name, file in file_by_name.items()}


class _CheckpointSource(TensorSource):
    """A folder of torch.distributed.checkpoint, also of `fpipe.save`, whose names begin with "params/" or "state/"."""

    def __init__(self, folder: Path) -> None:
        self.reader = SaveReader(folder)
        saved = self.reader.tensors
        parts = ("params/", "state/") if any(name.startswith("params/") for name in saved) else ("",)
        self.key_by_name = {name.removeprefix(part): name for part in parts for name in saved if name.startswith(part)}
        self.saved_tensors = {
            name: SavedTensor(saved[key].properties.dtype, tuple(saved[key].size), str(folder))
            for name, key in self.key_by_name.items()
        }

    def read_tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        tensors = {
            name: torch.empty(self.saved_tensors[name].shape, dtype=self.saved_tensors[name].dtype) for name in names
        }
        if tensors:
            read_tensors(self.reader, {self.key_by_name[name]: x for name, x in tensors.items()}, is_alone=True)
        return tensors
