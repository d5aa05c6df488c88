"""Record the training steps of a loop that fpipe did not make, for `compare_run`.

with record_run("run/", net=net, optimizer=opt) as record: <the loop>        -->        run/rank0-step0.safetensors, ..
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fpipe.limits import check_whole_number
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.recording.call_recorder import CallRecorder
from fpipe.recording.canonical_names import CanonicalNames, Names
from fpipe.recording.choice_watch import ChoiceWatch
from fpipe.recording.record_files import TensorWriter, as_spec


class RunRecorder:
    """The recorder of a training loop, which `record_run` makes: `step` and `microbatch` go around its parts."""

    def __init__(
        self,
        names: CanonicalNames,
        optimizer: torch.optim.Optimizer | None,
        writer: TensorWriter,
        modules: Mapping[str, nn.Module],
        interval: int,
        steps: int,
    ):
        self._names, self._optimizer, self._writer = names, optimizer, writer
        self._interval, self._last_step = interval, steps
        self._calls = CallRecorder(modules, writer)
        self._step_number, self._recorded_steps = 0, 0
        self._header: dict[str, Any] | None = None
        # The gradients that the optimizer reads are those of the update, whatever the loop did to them before.
        self._handles = [] if optimizer is None else [optimizer.register_step_pre_hook(self._record_update)]

    @contextmanager
    def step(
        self,
        batch: Any = None,
        *,
        rule: str | None = None,
        clip: float | None = None,
        lr: float | None = None,
        **settings: Any,
    ) -> Generator[None]:
        """Record one step of training.

        Args:
            batch: the rows of this step on this rank, such as (inputs, target).
            rule, clip, lr, settings: the update that is meant, as for `fpipe.update`; by default the optimizer's own.
        """
        is_recorded = self._step_number % self._interval == 0 and self._recorded_steps < self._last_step
        if is_recorded:
            self._header = {
                "rank": self._writer.rank,
                "ranks": dist.get_world_size() if dist.is_initialized() else 1,
                "step": self._step_number,
                "meant": {"rule": rule, "clip": clip, "lr": lr, "settings": as_spec(settings, self._calls.hash_of)},
                "batch": as_spec(batch, self._calls.hash_of),
                "aliases": self._names.aliases,
                "fused": self._names.fused,
                "unseen": self._names.unseen,
                "buffers": {name: self._calls.hash_of(buffer) for name, buffer in self._names.buffers.items()},
                "digest": self._writer.keeps_digests,
                "recorded": [*self._calls.modules],
                "modes": {name: module.training for name, module in self._names.modules.items()},
                "placements": {name: str(p.placements) for name, p in self._names.params.items() if is_sharded(p)},  # pyright: ignore[reportAttributeAccessIssue]
                "before": self._hash_params(),
                "state_before": self._hash_state(),
                "groups": self._describe_groups(),
                "grads_before": self._hash_grads(),
                "events": [],
                "microbatches": [],
            }
        yield
        if self._header is not None:
            header, self._header = self._header, None
            header |= {"after": self._hash_params(), "state_after": self._hash_state()}
            self._writer.write(self._step_number, header)
            self._recorded_steps += 1
        self._step_number += 1

    @contextmanager
    def microbatch(self, batch: Any = None) -> Generator[None]:
        """Record the forward and backward of one microbatch, (inputs, target)."""
        if self._header is None:
            yield
            return
        spec = as_spec(batch, self._calls.hash_of)
        self._calls.start()
        with ChoiceWatch(self._calls.record_choice) if self._calls.modules else nullcontext():
            yield
        # Last of all, since hooks on the outputs have run in the backward only.
        calls, choices = self._calls.finish(), self._calls.choices
        self._header["microbatches"].append(
            {"batch": spec, "calls": calls, "choices": choices, "grads": self._hash_grads()}
        )

    def reduced(self) -> None:
        """Record the gradients after their reduction over ranks."""
        if self._header is not None:
            self._header["events"].append("reduced")
            self._header["reduced"] = self._hash_grads()

    def clipped(self, norm: float | Tensor) -> None:
        """Record the clipped gradients, and their norm before the clip."""
        if self._header is not None:
            whole_norm: Any = norm.full_tensor() if is_sharded(norm) else norm  # pyright: ignore[reportAttributeAccessIssue]
            self._header["events"].append("clipped")
            self._header |= {"clipped": self._hash_grads(), "norm": float(whole_norm)}

    def remove_hooks(self) -> None:
        """Remove every hook that this recorder has set."""
        self._calls.remove()
        for handle in self._handles:
            handle.remove()

    def _record_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._header is not None:
            self._header["events"].append("update")
            self._header |= {"updated": self._hash_grads(), "groups": self._describe_groups()}

    def _hash_part(self, name: str, tensor: Tensor) -> str:
        """Add a parameter, its gradient or its state to the record, joined from the parts of the ranks."""
        dim = self._names.shard_dims.get(name)
        if dim is None or not tensor.ndim:
            return self._calls.hash_of(tensor)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._names.shard_group))]
        dist.all_gather(parts, tensor.detach().contiguous(), group=self._names.shard_group)
        return self._calls.hash_of(torch.cat(parts, dim))

    def _hash_params(self) -> dict[str, str]:
        return {name: self._hash_part(name, param) for name, param in self._names.params.items()}

    def _hash_grads(self) -> dict[str, str]:
        return {
            name: self._hash_part(name, param.grad)
            for name, param in self._names.params.items()
            if param.grad is not None
        }

    def _hash_state(self) -> dict[str, dict[str, str]]:
        # A digest without it takes half the time.
        optimizer = None if self._writer.keeps_digests else self._optimizer
        states: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
        return {
            name: {key: self._hash_part(name, torch.as_tensor(value)) for key, value in states[param].items()}
            for name, param in self._names.params.items()
            if param in states
        }

    def _describe_groups(self) -> list[dict[str, Any]]:
        """Return the rule, settings and names of each of the optimizer's groups."""
        if self._optimizer is None:
            return []
        # By identity, since torch compares tensors number by number.
        name_by_param = {id(param): name for name, param in self._names.params.items()}
        return [
            {
                "rule": type(self._optimizer).__name__,
                "settings": as_spec({k: v for k, v in group.items() if k != "params"}, self._calls.hash_of),
                "names": [name_by_param[id(param)] for param in group["params"] if id(param) in name_by_param],
            }
            for group in self._optimizer.param_groups
        ]


@contextmanager
def record_run(
    folder: str | Path,
    *,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    rank: int | None = None,
    names: Names = None,
    modules: Collection[str] = ("*",),
    shards: Mapping[str, int] | None = None,
    group: Any = None,
    digest: bool = False,
    every: int = 1,
    steps: int = 3,
) -> Generator[RunRecorder]:
    """Record the steps of any training loop, and change no bit of the run.

    The files have, for each step: the batch, inputs and outputs of all modules, gradients of the outputs, gradients of
    parameters after each microbatch, after the reduction and at the update, and parameters and optimizer state before
    and after. Each rank writes its files into the same folder. DTensors are gathered, so all ranks record.

    Args:
        folder: where the files go; empty, or not there yet.
        net: the net as this rank runs it, or its part; with DDP, FSDP, torch.compile or checkpoint wrappers.
        optimizer: the optimizer that updates it; None leaves the update out.
        rank: the number of this process; by default that of torch.distributed, or 0.
        names: how names here become those of the plain net: a function, or a table of prefixes or fused projections.
        modules: patterns of the modules whose calls are recorded, such as `("layers.*",)`, besides the net itself. The
            others are judged as parts of these.
        shards: for patterns of plain parameters of which each rank has a part, the dimension: `{"*.up.*": 0}`. The
            parts are joined in the order of the ranks, and their modules are judged as parts of their parents.
        group: the ranks of these parts; by default all.
        digest: keep a norm and 64 sums of each tensor instead of its numbers, and no calls: start, reduction, norm,
            clip and replicas are judged.
        every, steps: record each such step, and so many.

    Yields:
        A recorder, whose `step`, `microbatch`, `reduced` and `clipped` stand around the parts of the loop.

    Raises:
        ValueError: the folder has a record of this rank.
        ModuleNotFoundError: the package safetensors is not installed.

    >>> import tempfile, torch
    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> x, t = torch.randn(4, 2), torch.randn(4, 1)
    >>> folder = tempfile.mkdtemp()
    >>> with record_run(folder, net=net, optimizer=optimizer) as record:
    ...     with record.step((x, t)), record.microbatch((x, t)):
    ...         torch.nn.functional.mse_loss(net(x), t).backward()
    ...         optimizer.step()
    >>> [path.name for path in Path(folder).iterdir()]
    ['rank0-step0.safetensors']
    """
    check_whole_number("every", every)
    check_whole_number("steps", steps)
    try:
        import safetensors.torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise ModuleNotFoundError("record_run needs safetensors: pip install 'fpipe-torch[safetensors]'.") from None
    number = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob(f"rank{number}-*.safetensors")):
        raise ValueError(f"{folder} has a record of rank {number} already: take an empty folder.")
    canonical_names = CanonicalNames(net, names, shards or {}, group)
    recorded = {} if digest else canonical_names.matching_modules(modules)
    writer = TensorWriter(path, number, keeps_digests=digest)
    recorder = RunRecorder(canonical_names, optimizer, writer, recorded, every, steps)
    try:
        yield recorder
    finally:
        recorder.remove_hooks()
