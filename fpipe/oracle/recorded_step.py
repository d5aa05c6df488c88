"""One recorded step of a rank, with tensors by the names of the reference net.

{"attn.qkv.weight": w}, table of fused projections        -->        {"attn.q.weight": w[:4], "attn.k.weight": ..}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.recording.record_files import DIGEST_SUMS, RankRecord


class ReferenceNames:
    """The names of the reference's parameters: of a tied one the first, whichever name a rank has.

    Args:
        named_params: each name with its parameter; a tied one has several names.
    """

    def __init__(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        self.params, self.first_name = dict[str, Tensor](), dict[str, str]()
        name_by_id = dict[int, str]()
        for name, param in named_params:
            self.first_name[name] = name_by_id.setdefault(id(param), name)
            self.params.setdefault(self.first_name[name], param)
        self.uses = {name: [*self.first_name.values()].count(name) for name in self.params}


class RecordedStep:
    """One recorded step of a rank.

    Attributes:
        header: the description in the file.
        unjudged: the parameters of which this rank has a part that the reference cannot place.
        summed_names: the parameters whose gradients the backward adds up over the ranks.
        loss_factor: the loss of the step, in multiples of the reference's.
        is_unscaled: whether gradients are divided by that factor before the clip.
    """

    def __init__(self, record: RankRecord, step: int, names: ReferenceNames, has_norms: bool = False) -> None:
        self.rank, self.record, self.step, self.names = record.rank, record, step, names
        self.header: dict[str, Any] = record.steps[step]
        # A digest has sums, by which linear equations can be checked, and behind them a norm.
        self._digest_part = slice(DIGEST_SUMS, None) if has_norms else slice(0, DIGEST_SUMS)
        self.unjudged, self.summed_names = set[str](), set[str]()
        self.loss_factor, self.is_unscaled = 1.0, False
        self.before = self.tensors("before")

    @property
    def is_digest(self) -> bool:
        """Whether the record has sums and norms instead of numbers."""
        return bool(self.header["digest"])

    def as_norms(self) -> RecordedStep:
        """Return the step itself, or of a digest the step with a norm in place of each tensor."""
        return RecordedStep(self.record, self.step, self.names, has_norms=True) if self.is_digest else self

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Return tensors by parameter: `before`, `after`, `reduced`, `clipped` or `updated`; {} where not recorded."""
        return self.named(self.header.get(key, {}))

    def named(self, hash_by_name: dict[str, str]) -> dict[str, Tensor]:
        """Read tensors, and name them as the reference does."""
        tensors = dict[str, Tensor]()
        for name, tensor in self.record.tensors(hash_by_name).items():
            if self.is_digest:
                first_target = self._targets(name)[0]
                tensors[self.names.first_name.get(first_target, first_target)] = tensor[self._digest_part]
                continue
            for reference_name, part in self._split_fused(name, tensor):
                first_name = self.names.first_name.get(reference_name)
                if first_name is None:
                    raise ValueError(
                        f"rank {self.rank} has a parameter {reference_name!r}, which the net lacks. Map it by "
                        "record_run(names=)."
                    )
                if part.shape == self.names.params[first_name].shape:
                    tensors[first_name] = part
                else:
                    self.unjudged.add(first_name)
        return tensors

    def states(self, key: str) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state by parameter: `state_before` or `state_after`."""
        states = dict[str, dict[str, Tensor]]()
        for name, hashes in self.header[key].items():
            for state_key, tensor in self.record.tensors(hashes).items():
                parts = self._split_fused(name, tensor) if tensor.ndim else [(f, tensor) for f in self._targets(name)]
                for reference_name, part in parts:
                    states.setdefault(self.names.first_name.get(reference_name, reference_name), {})[state_key] = part
        return states

    def partial_modules(self, net: nn.Module) -> set[str]:
        """Return the names of modules that this rank has without all of their parts, as of a pipeline's stage."""
        fused = {target.rpartition(".")[0] for targets in self.header["fused"].values() for target in targets}
        present = self.header["modes"].keys() | fused | set(self.header["unseen"])
        partial = set[str]()
        # Children before parents: a list of layers is no call, so the module around it lacks what the list lacks.
        for name, module in reversed([*net.named_modules()]):
            children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
            if name not in self.header["unseen"] and any(
                child_name not in present or (child_name in partial and type(child).forward is nn.Module.forward)
                for child_name, child in children.items()
            ):
                partial.add(name)
        return partial

    def microbatch_grads(self) -> list[dict[str, Tensor]]:
        """Return the gradients after each microbatch."""
        return [self.named(microbatch["grads"]) for microbatch in self.header["microbatches"]]

    def load(self, net: nn.Module) -> None:
        """Put this rank's parameters, buffers and modes into the reference net."""
        for name, tensor in self.before.items():
            self.names.params[name].data = tensor.clone()
        saved = net.state_dict(keep_vars=True)
        for name, tensor_hash in self.header["buffers"].items():
            # A buffer that no state_dict has, such as the angles of rotary positions, is code: the reference's counts.
            if name in saved and saved[name].shape == (tensor := self.record.tensor(tensor_hash)).shape:
                saved[name].data = tensor.clone()
        modules = dict(net.named_modules())
        for name, is_training in self.header["modes"].items():
            if name in modules:
                modules[name].training = is_training

    def _targets(self, name: str) -> list[str]:
        return self.header["fused"].get(name, [name])

    def _split_fused(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        targets = self._targets(name)
        if len(targets) == 1 or not all(target in self.names.first_name for target in targets):
            return [(targets[0], tensor)]
        rows = [self.names.params[self.names.first_name[target]].shape[0] for target in targets]
        if sum(rows) != tensor.shape[0]:
            raise ValueError(f"{name!r} has {tensor.shape[0]} rows, and {', '.join(targets)} have {sum(rows)}.")
        return [*zip(targets, torch.split(tensor, rows), strict=True)]
