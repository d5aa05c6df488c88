"""Stages that run a collective over one dimension of a mesh, with its adjoint as their backward.

    all_to_all      rows for each process      -->  rows from each process        backward: all_to_all
    all_gather      this process's rows        -->  the rows of all               backward: reduce_scatter
    reduce_scatter  rows for each process      -->  the sum of this one's rows    backward: all_gather
    all_reduce      a tensor                   -->  the sum of all                backward: all_reduce
    ring            a tensor                   -->  the previous process's        backward: to the previous process

Where all processes compute the same thing afterwards, as between tensor-parallel layers, the gradient counts once:

    copy            a replicated tensor        -->  the same tensor               backward: all_reduce
    reduce          a tensor                   -->  the sum of all                backward: identity
    gather          this process's rows        -->  the rows of all               backward: this process's rows
    scatter         a replicated tensor        -->  this process's rows           backward: all_gather

An all-to-all with sizes sends each process as many rows as the sizes say; the sizes are exchanged before the rows. A
dimension has one process until the stage is bound to a group, and a collective of one process is the identity. As a
stage, schedules place it, and nothing waits for it early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Stage
from fpipe.torch_private.dispatch import C10D

_FORWARD = {"copy": "identity", "reduce": "all_reduce", "gather": "all_gather", "scatter": "local_rows"}
_BACKWARD = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "ring": "ring_back",
    "copy": "all_reduce",
    "reduce": "identity",
    "gather": "local_rows",
    "scatter": "all_gather",
}
Collective = Literal[
    "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "ring", "copy", "reduce", "gather", "scatter"
]
COLLECTIVES: tuple[str, ...] = get_args(Collective)


@dataclass(frozen=True)
class CollectiveStage:
    """The stage function of a collective along an axis; it communicates once it is bound to a process group.

    Args:
        kind: one of `COLLECTIVES`.
        axis: the dimension of the mesh.
        group: the name of the process group along the axis; empty for one process.
        size: how many processes there are; 0 in a run on zeros, where sizes add up to nothing.
        process_index: the rank of this process in the group.
        leaf_index: the leaf of the input that is exchanged and returned alone; None for all leaves.
        has_sizes: whether the last leaf says how many rows of the others go to each process.
        splits: how many rows come from each process, and go to each, once the sizes are exchanged.
    """

    kind: str
    axis: str
    group: str = ""
    size: int = 1
    process_index: int = 0
    leaf_index: int | None = None
    has_sizes: bool = False
    splits: tuple[list[int], list[int]] | None = None

    @property
    def __name__(self) -> str:
        return f"{self.kind} over {self.axis}"

    def __call__(self, params: Any, x: Any) -> Any:
        """Exchange the tensors of x, leaf by leaf; leaves that are no tensors are the same on all processes."""

        def exchange_leaf(leaf: Any) -> Any:
            return _CollectiveFunction.apply(leaf, self) if isinstance(leaf, Tensor) else leaf

        x = x if self.leaf_index is None else (tree.leaves(x)[self.leaf_index],)
        if self.has_sizes:
            return self._exchange_rows(x)
        return x if self.size == 1 else tree.tree_map(exchange_leaf, x)

    def bind_group(self, group: str, size: int, process_index: int) -> CollectiveStage:
        """Return this function bound to a process group."""
        return replace(self, group=group, size=size, process_index=process_index)

    def _exchange_rows(self, x: Any) -> tuple[Tensor, ...]:
        """Exchange the sizes, wait for them, and start the exchange of the rows."""
        # Every process has to know how many rows it receives before it can allocate them, so the sizes cannot overlap.
        if not isinstance(x, tuple) or len(x) < 2 or not _are_whole_numbers(x[-1]):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(
                f"{self.__name__} with sizes takes (rows, sizes), whole numbers last; found {_describe(x)}."
            )
        rows: Sequence[Tensor] = x[:-1]
        sizes_sent: Tensor = x[-1]
        if not self.size:  # a run on zeros: the sizes are zeros too, and need not add up to the rows
            return (*(_CollectiveFunction.apply(tensor, self) for tensor in rows), sizes_sent)
        if not sizes_sent.ndim or len(sizes_sent) % self.size:
            raise ValueError(
                f"{self.__name__} takes equally many sizes for each process, {self.size} here; found shape "
                f"{tuple(sizes_sent.shape)}."
            )
        if (smallest_size := int(sizes_sent.min()) if sizes_sent.numel() else 0) < 0:
            raise ValueError(f"{self.__name__}: sizes are whole numbers from 0; found {smallest_size}.")
        row_total = int(sizes_sent.sum())
        for tensor in (tensor for tensor in rows if not tensor.ndim or len(tensor) != row_total):
            raise ValueError(
                f"{self.__name__}: the sizes add up to {row_total} rows, but dim 0 of a tensor of shape "
                f"{tuple(tensor.shape)} has another size."
            )
        if self.size == 1:
            return (*(_CollectiveFunction.apply(tensor, self) for tensor in rows), sizes_sent)
        sizes_received = _RUNNERS.stack[-1].wait(_start_collective("all_to_all", sizes_sent, self))
        # Each process may have several sizes, one for each of its experts, say: their sum is its rows.
        row_counts = (sizes.reshape(self.size, -1).sum(1).tolist() for sizes in (sizes_received, sizes_sent))
        exchange = replace(self, splits=tuple(row_counts))
        return (*(_CollectiveFunction.apply(tensor, exchange) for tensor in rows), sizes_received)


class _CollectiveFunction(torch.autograd.Function):
    """A collective as one autograd node, whose backward is its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: CollectiveStage) -> Tensor:
        ctx.stage = stage
        return _start_collective(_FORWARD.get(stage.kind, stage.kind), x, stage)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        stage: CollectiveStage = ctx.stage
        backward_stage = stage if stage.splits is None else replace(stage, splits=stage.splits[::-1])
        return _start_collective(_BACKWARD.get(stage.kind, stage.kind), cotangents[0], backward_stage), None


def _start_collective(kind: str, x: Tensor, stage: CollectiveStage) -> Tensor:
    # What a kind of collective sends is in the table at the top; c10d's functional collectives want contiguous tensors.
    x, start = x.contiguous(), _RUNNERS.stack[-1].start
    if stage.size < 2:
        return x.clone(memory_format=torch.contiguous_format)
    if stage.splits is not None:
        return start(C10D.all_to_all_single, x, *stage.splits, stage.group)
    if kind == "identity":
        return x
    if kind in ("all_to_all", "reduce_scatter", "local_rows"):
        rows, parts = (len(x) if x.ndim else 0), stage.size
        if not rows or rows % parts:
            raise ValueError(
                f"{stage.__name__} cuts dim 0 into {parts} parts, one for each process; found shape {tuple(x.shape)}."
            )
    if kind == "local_rows":
        return x.chunk(stage.size)[stage.process_index].clone()
    if kind == "all_to_all":
        counts = [len(x) // stage.size] * stage.size
        return start(C10D.all_to_all_single, x, counts, counts, stage.group)
    if kind == "all_gather":
        return start(C10D.all_gather_into_tensor, x, stage.size, stage.group)
    if kind == "reduce_scatter":
        return start(C10D.reduce_scatter_tensor, x, "sum", stage.size, stage.group)
    if kind == "all_reduce":
        return start(C10D.all_reduce, x, "sum", stage.group)
    # A ring is an all-to-all in which each process sends to one peer alone: one collective, so no order of sends and
    # receives can deadlock.
    step = 1 if kind == "ring" else -1
    target, source = (stage.process_index + step) % stage.size, (stage.process_index - step) % stage.size
    send_counts, receive_counts = (
        [x.numel() if process == peer else 0 for process in range(stage.size)] for peer in (target, source)
    )
    return start(C10D.all_to_all_single, x.view(-1), receive_counts, send_counts, stage.group).view(x.shape)


class CollectiveRunner(NamedTuple):
    """How collectives run: `start(op, tensor, *arguments)` returns the result tensor, and `wait` waits for it."""

    start: Callable[..., Tensor]
    wait: Callable[[Tensor], Tensor]


def _run_and_wait(op: Any, x: Tensor, *arguments: Any) -> Tensor:
    return C10D.wait_tensor(op(x, *arguments))


def _return_tensor(tensor: Tensor) -> Tensor:
    return tensor


class _RunnerStack(threading.local):
    """The collective runners that are active in a thread, the innermost last."""

    def __init__(self) -> None:
        self.stack = [CollectiveRunner(_run_and_wait, _return_tensor)]


_RUNNERS = _RunnerStack()


@contextmanager
def run_collectives_with(runner: CollectiveRunner) -> Generator[None]:
    """Let a runner start and await the collectives that this thread calls.

    Backwards stay in this thread: for a device autograd would use another thread, where the runner is not active.
    """
    _RUNNERS.stack.append(runner)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _RUNNERS.stack.pop()


def _are_whole_numbers(sizes: Any) -> bool:
    is_integral = isinstance(sizes, Tensor) and not sizes.is_floating_point() and not sizes.is_complex()
    return is_integral and sizes.dtype != torch.bool


def _describe(x: Any) -> str:
    values: Any = x if isinstance(x, tuple) else (x,)
    descriptions = (f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in values)
    return f"({', '.join(descriptions)})"


def exchange(kind: Collective, axis: str, *, sizes: bool = False) -> Stage:
    """Make a stage without parameters that is a collective over the processes along one dimension of the mesh.

    Its F starts the collective, its B (or I) the adjoint, and W does nothing. Both are asynchronous, on the lane
    "exchange" next to the rank's computation, and a stage that reads the result waits for it. Each tensor of `x` is
    exchanged, and keeps its dtype; whole numbers have no gradient.

    Args:
        kind: "all_to_all" (dim 0 has equally many rows for each process, in order), "all_gather" (the rows of all in
            order), "reduce_scatter" (the sum of all, of which each keeps its rows), "all_reduce" (the sum of all) or
            "ring" (each sends to the next process what it has, and gets what the one before had). Or between layers of
            tensor parallelism, where what follows is alike on all processes: "copy" (hands on what it is given, and
            adds up its gradient), "reduce" (the sum of all), "gather" (the rows of all in order) and "scatter" (of rows
            alike on all each keeps its own, and gathers their gradient).
        axis: the name of the dimension, as `init_device_mesh(.., mesh_dim_names=("pp", "ep"))` has it; step and
            gradients are of the sum of the losses of its processes, or of "copy" to "scatter" of the one loss that all
            have. Where the step runs without that mesh, as by
            runtime="local" or "threads", in `reference` and `verify`, the dimension has one process, and the stage
            hands on what it is given.
        sizes: for an all-to-all whose sizes the data decide, as a router does: its x is `(rows, .., sizes)`, and so is
            what it hands on. `sizes` are whole numbers, dim 0 with equally many for each process, in order: those of a
            process add up to how many rows go to it. They are alike in dtype and length on all processes, and travel
            first. Stages that read what it brings run under autograd, without a trace, and are placed on its rank.

    Returns:
        A `Stage` for `from_functions`, or for the stages of a `Model`. In a program its ops say
        `{exchange='all_to_all', axis='ep'}`.

    Raises:
        ValueError: another kind, one that has no sizes, or an axis without a name. When a step is built: a mesh without
            that dimension, rows that its processes do not divide, tensors of other shapes on another process, or rows
            that only data count for another rank. In a step: sizes below 0, or of other rows than there are.

    Source: "copy" to "scatter" are f, g and their like of Megatron-LM (arXiv:1909.08053, figure 3).

    >>> import fpipe
    >>> block = [lambda p, x: x @ p, fpipe.exchange("all_to_all", axis="ep"), lambda p, x: x @ p]
    >>> model = fpipe.from_functions(block, loss=lambda y, t: y.sum())
    >>> table = fpipe.schedules.from_table("0F0 1F0 0F1 1F1 2F0 2B0 1B0 2F1 2B1 1B1 0B0 0B1")
    >>> program = fpipe.chain(fpipe.split(2), table)(fpipe.program(model))
    >>> print(fpipe.plot(fpipe.simulate(program, fpipe.Costs(exchange=1))))
    rank 0 | 0F0 0F1 2F0 2B0---- 2F1 2B1---- 0B0---- 0B1----
    exchange | ....1F0 1F1 ........1B0 ........1B1 ............
             0       2       4       6       8       10      12
    """
    if not axis:
        raise ValueError(f"axis is the name of a dimension of the mesh, such as 'ep'; found {axis!r}.")
    if sizes and kind != "all_to_all":
        raise ValueError(f"sizes are those of an all-to-all, whose parts differ; found {kind!r} with sizes=True.")
    function = CollectiveStage(kind, axis, has_sizes=sizes)
    return Stage(function, name=function.__name__, exchange=(("exchange", kind), ("axis", axis)))
