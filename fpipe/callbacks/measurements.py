"""Measure a training step from its result and its seconds.

result, .25 s, 8192 tokens        -->        {"loss": 2.31, "seconds": 0.25, "tokens/s": 32768, "MFU": 0.41, "GiB": 3.2}
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from fpipe import tree
from fpipe.limits import checked_init
from fpipe.meaning.single_device.result import Result


@checked_init
@dataclass(frozen=True)
class Workload:
    """The work of one step over all processes, from which rates follow.

    Args:
        tokens: tokens (or rows) of a step, over all replicas.
        flops: floating point operations of a step's forward and backward, without recomputation, as "model FLOPs
            utilisation" (MFU) counts them: about 6 for each parameter and token of a transformer.
        peak_flops: operations a second that all devices of the run can do together, in the dtype that it computes in.

    >>> Workload(tokens=8192, flops=6 * 125e6 * 8192, peak_flops=4 * 989e12).tokens
    8192
    """

    tokens: float | None = None
    flops: float | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number is not None and not number > 0:
                raise ValueError(f"{name} is a positive number, found {number!r}.")
        if self.peak_flops is not None and self.flops is None:
            raise ValueError("a share of the peak needs flops= and peak_flops=.")


def measure(result: Result, seconds: float, workload: Workload | None = None) -> dict[str, float]:
    """Return the numbers of a step by name, in the order in which a table shows them.

    Args:
        result: what the step returned.
        seconds: how long it took.
        workload: the work of the step; without it there are no rates.

    Returns:
        "loss" (of several training steps in one, the last), "norm", "seconds", "tokens/s", "MFU" between 0 and 1, "GiB"
        (the most that this process has held on its device so far, on a CPU its resident memory), and of a step built
        with `record=True` "bubble" between 0 and 1 and "GiB of rank 0", ..; what is not known is left out.

    >>> import fpipe, torch
    >>> numbers = measure(fpipe.Result(loss=torch.tensor(2.5)), 0.25, Workload(tokens=1000))
    >>> numbers["loss"], numbers["tokens/s"]
    (2.5, 4000.0)
    """
    workload = workload or Workload()
    numbers: dict[str, float] = {}
    for name, value in (("loss", result.loss), ("norm", result.norm)):
        if numbers_of_value := [float(leaf) for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]:
            numbers[name] = numbers_of_value[-1]
    numbers["seconds"] = seconds
    if workload.tokens is not None:
        numbers["tokens/s"] = workload.tokens / seconds
    # Recomputation counts as lost time: MFU is of the model's operations, and not of those that the hardware ran.
    if workload.flops is not None and workload.peak_flops is not None:
        numbers["MFU"] = workload.flops / seconds / workload.peak_flops
    numbers["GiB"] = peak_memory() / 2**30
    if result.timeline is not None:
        numbers["bubble"] = result.timeline.bubble
        numbers |= {f"GiB of rank {rank}": peak / 2**30 for rank, peak in enumerate(result.timeline.peak)}
    return numbers


def peak_memory() -> int:
    """Return the most bytes that this process has held on its accelerator, or without one in resident memory."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
