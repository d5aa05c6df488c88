"""Write and read the files of a recorded run: one safetensors file for each rank and step.

rank0-step0.safetensors:    {"3f9a..": tensor, ..}, and a header in JSON that names tensors by the hash of their bytes

A tensor that occurs twice, such as the output of a module and the input of the next, is written once. So is a parameter
that no step changes: later files refer to the earlier one of the same rank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_char
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpipe.models.parameters.sources import SafetensorsFile

VERSION = 2
Spec = Any
"""A value in JSON: {"tensor": hash}, {"value": 0.5}, {"list": [..]}, {"tuple": [..]}, {"dict": {..}}, {"other": type}.
"""


def hash_tensor(tensor: Tensor) -> str:
    """Return the hash of a tensor's dtype, shape and bytes.

    >>> import torch
    >>> [hash_tensor(torch.zeros(2)) == hash_tensor(tensor) for tensor in (torch.zeros(2), -torch.zeros(2))]
    [True, False]
    """
    summary = hashlib.blake2b(f"{tensor.dtype}{[*tensor.shape]}".encode(), digest_size=16)
    tensor = tensor.contiguous()
    if tensor.numel():
        # The memory itself: not every torch comes with numpy, and bytes() of a storage goes number by number.
        summary.update((c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return summary.hexdigest()


def _hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def as_spec(value: Any, hash_of: Callable[[Tensor], str]) -> Spec:
    """Return a value as JSON, with tensors by the hash that `hash_of` gives them.

    >>> import torch
    >>> as_spec((torch.ones(1), {"eps": 0.5}), lambda tensor: "3f9a")
    {'tuple': [{'tensor': '3f9a'}, {'dict': {'eps': {'value': 0.5}}}]}
    """
    if isinstance(value, Tensor):
        return {"tensor": hash_of(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, Mapping):
        fields: Any = value
        spec: Spec = {"dict": {str(key): as_spec(field, hash_of) for key, field in fields.items()}}
        # An output class of transformers is built again as a mapping that is read in the same ways.
        return spec if type(fields) is dict else spec | {"type": type(fields).__name__}
    if type(value) is tuple or type(value) is list:
        return {type(value).__name__: [as_spec(member, hash_of) for member in value]}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return {"other": type(value).__name__}


def from_spec(spec: Spec, tensor_of: Callable[[str], Any]) -> Any:
    """Build the value again that `as_spec` described."""
    if "tensor" in spec:
        return tensor_of(spec["tensor"])
    if "value" in spec:
        return spec["value"]
    if "dict" in spec:
        fields = {key: from_spec(field, tensor_of) for key, field in spec["dict"].items()}
        return OutputFields(fields) if "type" in spec else fields
    kind = tuple if "tuple" in spec else list
    return kind(from_spec(member, tensor_of) for member in spec[kind.__name__])


class OutputFields(dict[Any, Any]):
    """A mapping whose values are also attributes and, in order, of numbers, as an output of transformers has them.

    >>> output = OutputFields(loss=0.5, logits=2.0)
    >>> output.logits, output[0], output["loss"], output.past_key_values
    (2.0, 0.5, 0.5, None)
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else [*self.values()][key]


def is_plain(spec: Spec) -> bool:
    """Whether a value can be built again from its spec: it holds tensors, numbers, text and containers alone."""
    return "other" not in spec and all(map(is_plain, _members(spec)))


def hashes_of(spec: Spec) -> Iterator[str]:
    """Yield the hashes of all tensors of a spec, in order."""
    if "tensor" in spec:
        yield spec["tensor"]
    for member in _members(spec):
        yield from hashes_of(member)


def _members(spec: Spec) -> list[Spec]:
    return [*spec.get("dict", {}).values(), *spec.get("list", ()), *spec.get("tuple", ())]


DIGEST_SUMS = 64


def digest_tensor(tensor: Tensor) -> Tensor:
    """Return 64 sums of a tensor's numbers, and its norm, in its dtype.

    The sums of a sum of tensors are sums of their sums, so reductions and scales can be checked by them.

    >>> import torch
    >>> digest_tensor(torch.tensor([3.0, 4.0]))[[0, 1, 63, 64]].tolist()
    [3.0, 4.0, 0.0, 5.0]
    """
    numbers = tensor.detach().flatten()
    count = len(numbers) // DIGEST_SUMS * DIGEST_SUMS
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    # Number i goes into sum i mod 64. Numbers are widened as they are added, without a wide copy.
    sums = numbers[:count].view(-1, DIGEST_SUMS).sum(0, dtype=dtype)
    sums[: len(numbers) - count] += numbers[count:]
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    norm = torch.linalg.vector_norm(numbers if is_inexact else numbers.to(dtype))
    digest = torch.cat([sums, norm.to(dtype)[None]])
    return digest.to(tensor.dtype) if is_inexact else digest


class TensorWriter:
    """Collects the tensors of one step of a rank, and writes each once a run.

    Args:
        folder, rank: where the files go.
        keeps_digests: whether to keep the digest of each tensor instead of its numbers.

    Attributes:
        new_tensors: the tensors of this step that no earlier file has, by hash, on the CPU.
        written: the hashes of all tensors that earlier files have.
    """

    def __init__(self, folder: Path, rank: int, keeps_digests: bool = False) -> None:
        self.folder, self.rank, self.keeps_digests = folder, rank, keeps_digests
        self.new_tensors = dict[str, Tensor]()
        self.written = set[str]()

    def add(self, tensor: Tensor) -> str:
        """Copy a tensor to the CPU and return its hash."""
        if self.keeps_digests and tensor.ndim:
            tensor = digest_tensor(tensor)
        # A copy: modules and optimizers go on to change tensors in place.
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        name = hash_tensor(copy)
        if name not in self.written:
            self.new_tensors.setdefault(name, copy)
        return name

    def write(self, step: int, header: Mapping[str, Any]) -> None:
        """Write the file of a step, and forget its tensors."""
        from safetensors.torch import save_file

        path = self.folder / f"rank{self.rank}-step{step}.safetensors"
        # Under another name first: a run that is killed leaves no file that is cut off.
        unfinished_path = path.with_suffix(".partial")
        text = json.dumps({"version": VERSION, **header})
        save_file(self.new_tensors, unfinished_path, {"fpipe": text, "fpipe_hash": _hash_text(text)})
        unfinished_path.replace(path)
        self.written |= self.new_tensors.keys()
        self.new_tensors = {}


class RankRecord:
    """The record of one rank.

    Attributes:
        rank: its number.
        steps: what each step said.
        readers: a function for each hash, which reads the tensor.
    """

    def __init__(
        self, rank: int, steps: Mapping[int, dict[str, Any]], readers: Mapping[str, Callable[[str], Tensor]]
    ) -> None:
        self.rank, self.steps, self.readers = rank, steps, readers

    def tensor(self, name: str) -> Tensor:
        """Read a tensor by its hash; raise ValueError if no file has it."""
        if name not in self.readers:
            raise ValueError(f"rank {self.rank} lacks a tensor: an earlier file is missing.")
        return self.readers[name](name)

    def tensors(self, hash_by_name: Mapping[str, str]) -> dict[str, Tensor]:
        """Read tensors by the names that a step gives them."""
        return {name: self.tensor(tensor_hash) for name, tensor_hash in hash_by_name.items()}


def read_record(folder: str | Path) -> list[RankRecord]:
    """Open the record of all ranks in a folder.

    Raises:
        ValueError: no record, a file that is damaged, or a rank or step that is missing.
    """
    folder = Path(folder)
    files_by_rank = dict[int, dict[int, SafetensorsFile]]()
    for path in sorted(folder.glob("*.safetensors")):
        numbers = re.fullmatch(r"rank(\d+)-step(\d+)", path.stem)
        if numbers is None:
            raise ValueError(f"{path} is no file of a record, such as rank0-step0.safetensors.")
        files_by_rank.setdefault(int(numbers[1]), {})[int(numbers[2])] = SafetensorsFile(path)
    if not files_by_rank:
        raise ValueError(f"{folder} holds no record. Make one with fpipe.record_run.")
    records = [_open_rank(rank, dict(sorted(files_by_rank[rank].items()))) for rank in sorted(files_by_rank)]
    ranks = next(iter(records[0].steps.values()))["ranks"]
    missing = next((rank for rank in range(ranks) if rank not in files_by_rank), None)
    if missing is not None:
        raise ValueError(f"{folder} lacks rank {missing} of {ranks}: copy its files there.")
    for record in records:
        if record.steps.keys() != records[0].steps.keys():
            raise ValueError(
                f"{folder} has steps {[*record.steps]} of rank {record.rank}, and {[*records[0].steps]} of rank "
                f"{records[0].rank}. Record the same steps on each."
            )
    return records


def _open_rank(rank: int, files: Mapping[int, SafetensorsFile]) -> RankRecord:
    steps = {step: _read_header(file, rank, step) for step, file in files.items()}

    def read_from(file: SafetensorsFile, name: str) -> Tensor:
        tensor = file.read_tensor(name)
        # Its name is the hash of its bytes, dtype and shape, so no other tensor is taken for it.
        if hash_tensor(tensor) != name:
            raise ValueError(f"{file.path} is damaged: tensor {name} has other numbers than were written.")
        return tensor

    return RankRecord(rank, steps, {name: partial(read_from, file) for file in files.values() for name in file.entries})


_FIELDS = {"rank", "ranks", "step", "microbatches", "before", "after", "buffers", "modes", "aliases", "digest"}


def _read_header(file: SafetensorsFile, rank: int, step: int) -> Any:
    """Return the header of a step; raise ValueError if the file is of another kind, rank or step."""
    try:
        text = file.metadata["fpipe"]
        header = json.loads(text)
    except (KeyError, ValueError):
        raise ValueError(f"{file.path} has no header of fpipe.record_run.") from None
    if file.metadata.get("fpipe_hash") != _hash_text(text):
        raise ValueError(f"{file.path} has a header that was changed after it was written: record again.")
    if not isinstance(header, dict) or header.get("version") != VERSION or not header.keys() >= _FIELDS:
        raise ValueError(f"{file.path} is of another version of fpipe: record again.")
    if (header["rank"], header["step"]) != (rank, step):
        raise ValueError(
            f"{file.path} holds rank {header['rank']}, step {header['step']}: a file of a record keeps its name."
        )
    return header  # pyright: ignore[reportUnknownVariableType]
