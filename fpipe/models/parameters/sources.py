"""Read tensors by name from where weights are kept, a few of them: a state_dict, safetensors, a distributed checkpoint.

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
from fpipe.torch_private.checkpoints import SaveReader, read_tensors

# Read single tensors out of a file in the safetensors format, by the package of that name.

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
"""How the format calls each dtype."""


class HeaderEntry(NamedTuple):
    """A tensor of a file: its dtype as the format calls it and as torch does, and its shape."""

    code: str
    dtype: torch.dtype
    shape: list[int]


class SafetensorsFile:
    """An open file in the safetensors format, of which only the header has been read.

    Attributes:
        entries: its tensors by name, in the order of their data.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: it is no such file, or is cut off.
        OSError: there is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ModuleNotFoundError(
                f"{path} is read by the package safetensors, which is not installed: pip install 'fpipe[safetensors]'."
            ) from None
        self.path = path
        try:
            # A file mapped into memory would count twice: its pages, and the tensors made of them.
            self._file: Any = safe_open(path, "pt", backend="pread")
        except SafetensorError as error:
            reason = shortened(str(error)).rstrip(".")
            raise ValueError(f"{path} is no file in the safetensors format: {reason}.") from None
        self.entries: dict[str, HeaderEntry] = {}
        for name in self._file.offset_keys():
            view = self._file.get_slice(name)
            code = view.get_dtype()
            if code not in _DTYPES:
                raise ValueError(f"{path} holds {name!r} as {code}; what is read is {', '.join(_DTYPES)}.")
            self.entries[name] = HeaderEntry(code, _DTYPES[code], view.get_shape())

    def read(self, name: str) -> Tensor:
        """Read one tensor, and no other bytes of the data."""
        return self._file.get_tensor(name)


class SavedTensor(NamedTuple):
    """A tensor of a source: dtype, shape, and where it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    where: str


class TensorSource(ABC):
    """Tensors by name; what they are is `known` before any is read. `moves`: they are read to the CPU."""

    known: Mapping[str, SavedTensor]
    moves = True

    @abstractmethod
    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read some of them, by name."""


def source_of(source: Any) -> TensorSource:
    """Open the source that load_params is handed.

    Raises:
        TypeError, ValueError: it is none of them.
        OSError: there is no such file.
    """
    if isinstance(source, Mapping):
        return _StateDict(source)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(source, str | Path):
        raise TypeError(f"a source is a path, or a state_dict; found {type(source).__name__}.")
    path = Path(source)
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if index.exists() or single.exists():  # as transformers saves a model
            return source_of(index if index.exists() else single)
        return _Checkpoint(path)
    if path.suffix == ".json":
        return _Safetensors(_indexed(path))
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is no source of parameters: hand in a .safetensors file, a model.safetensors.index.json, a folder "
            "that torch.distributed.checkpoint has saved, or a state_dict, such as torch.load(.., mmap=True) gives."
        )
    file = SafetensorsFile(path)
    return _Safetensors(dict.fromkeys(file.entries, file))


class _StateDict(TensorSource):
    """A dict of tensors, which are handed on as they are."""

    moves = False

    def __init__(self, named: Mapping[str, Any]) -> None:
        for name, leaf in named.items():
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                found = "a tensor on meta, without values" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(f"the state_dict has {found} under {name!r}; a source has tensors.")
        self.named = named
        self.known = {name: SavedTensor(x.dtype, tuple(x.shape), "the state_dict") for name, x in named.items()}

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read some of them, by name."""
        return {name: self.named[name].detach() for name in names}


class _Safetensors(TensorSource):
    """Files in the safetensors format, by the names that are in them."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self.files = files
        each = ((name, file, file.entries[name]) for name, file in files.items())
        self.known = {name: SavedTensor(entry.dtype, (*entry.shape,), str(file.path)) for name, file, entry in each}

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read some of them, by name."""
        return {name: self.files[name].read(name) for name in names}


def _indexed(index: Path) -> dict[str, SafetensorsFile]:
    """The files that an index names, by the names of their tensors."""
    try:
        files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{index} is no index of safetensors: it has no weight_map of names to files.") from None
    opened = {file: SafetensorsFile(index.parent / file) for file in sorted({*files.values()})}
    for name, file in files.items():
        if name not in opened[file].entries:
            raise ValueError(f"{index} says that {name!r} is in {file}, which has no such tensor.")
    return {name: opened[file] for name, file in files.items()}


class _Checkpoint(TensorSource):
    """A folder of torch.distributed.checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.reader = SaveReader(folder)
        saved = self.reader.tensors
        parts = ("params/", "state/") if any(name.startswith("params/") for name in saved) else ("",)  # of fpipe.save
        self.keys = {name.removeprefix(part): name for part in parts for name in saved if name.startswith(part)}
        self.known = {
            name: SavedTensor(saved[key].properties.dtype, tuple(saved[key].size), str(folder))
            for name, key in self.keys.items()
        }

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read some of them, by this process alone."""
        tensors: dict[str, Any] = {
            self.keys[name]: torch.empty(self.known[name].shape, dtype=self.known[name].dtype) for name in names
        }
        if tensors:
            read_tensors(self.reader, tensors, is_alone=True)
        return {name: tensors[self.keys[name]] for name in names}
