"""Start the collectives that are stages of this rank, and wait for each where its result is read.

    1F0 (dispatch of microbatch 0)  2B1  2F0      -->      start 1F0;  2B1 runs next to it;  wait for 1F0, 2F0

The graph of such a stage's F or B runs as it was traced, but each collective in it only starts, and the lane keeps its
work. All processes along an axis run the same program, and so come to the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fpipe.graphs.compiling.code import compile_graph
from fpipe.graphs.language.graph import Graph, Name, Node
from fpipe.graphs.tracing.collective_stage import CollectiveRunner, CollectiveStage, run_collectives_with
from fpipe.meaning.purity.sharded import is_collective
from fpipe.model import Model
from fpipe.program import is_exchange
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import Watchdog
from fpipe.runtimes.lowering.lane import Launch, Launched
from fpipe.runtimes.lowering.lowered import Instruction, Lowered
from fpipe.runtimes.processes.collective_parts import CollectiveLane
from fpipe.torch_internals import OpOverload, returns_of
from fpipe.torch_private.dispatch import C10D
from fpipe.torch_private.processes import all_gather, group_named, is_on_streams, reduce_scatter

Leaves = list[Any]
StartedCollective = tuple[Tensor, Any]
"""The tensor that a collective writes, and its work to wait for."""
_RESULT_NAMES = ("y", "again", "dx")


class Axis(NamedTuple):
    """A dimension of a mesh by name, and the group of processes along it that includes this one."""

    name: str
    group: ProcessGroup


def bind_exchanges(model: Model, mesh: DeviceMesh | None) -> tuple[Model, dict[str, Axis]]:
    """Bind the exchanges of a model to the processes of a mesh, or to the groups of the net that they were cut from.

    Returns:
        The model, and its axes by the names of their groups.

    Raises:
        ValueError: the mesh lacks a dimension.
    """
    axes: dict[str, Axis] = {}
    names = () if mesh is None else mesh.mesh_dim_names or ()

    def bind_group(forward: Any) -> Any:
        if not isinstance(forward, CollectiveStage):
            return forward
        # A collective that was cut from a net names its group itself.
        if forward.group:
            axes[forward.group] = Axis(forward.axis, group_named(forward.group))
            return forward
        if mesh is None or forward.axis not in names:
            dims = "there is no mesh" if mesh is None else f"the mesh has {', '.join(names) or 'none with a name'}"
            raise ValueError(
                f"a stage of the model is {forward.__name__}, a dimension of the mesh, and {dims}. Say "
                f"mesh=init_device_mesh(device, (ranks, processes), mesh_dim_names=('pp', {forward.axis!r}))."
            )
        group = mesh.get_group(forward.axis)
        axes[group.group_name] = Axis(forward.axis, group)
        return forward.bind_group(group.group_name, group.size(), group.rank())

    stages = tuple(replace(stage, forward=bind_group(stage.forward)) for stage in model.stages)
    return (replace(model, stages=stages), axes) if axes else (model, axes)


class ExchangeLane:
    """The lane of the collectives that are stages of one rank, over axes by the names of their groups."""

    def __init__(self, axes: Mapping[str, Axis], device: torch.device, watchdog: Watchdog) -> None:
        self.groups = {name: group for name, (_, group) in axes.items()}
        on_streams = all(is_on_streams(group, device) for group in self.groups.values())
        self.lane = CollectiveLane(watchdog, self.groups, on_streams)
        self._meetings, names_by_process = dict[str, Meeting](), watchdog.faults.names
        for axis, group in axes.values():
            processes, name = dist.get_process_group_ranks(group), names_by_process[watchdog.faults.process]
            member_names = [f"{axis} {number}: {name}" for number in range(group.size())]
            self._meetings[axis] = Meeting(watchdog, processes, member_names)
            # Errors now name processes along the axis too: those of this process's own pipeline get a prefix.
            for process, member_name in names_by_process.items():
                names_by_process[process] = f"{axis} {group.rank()}: {member_name}"
            names_by_process.update(zip(processes, member_names, strict=True))
        self._works, self._cell = list[Launched](), ""

    def agree(self, sync_point: str, exchanges_by_axis: Mapping[str, Sequence[str]]) -> None:
        """Compare along each axis what its processes exchange, as `Meeting.agree`."""
        for axis, meeting in self._meetings.items():
            meeting.agree(sync_point, {f"exchanges over {axis}": exchanges_by_axis.get(axis, ())})

    def made_async(self, instructions: Sequence[Instruction], lowered: Lowered, rank: int) -> list[Instruction]:
        """Replace each exchange of this rank by its launch, and each first reader by a wait and the read."""
        launches = dict[int, Launch]()
        for row, instruction in enumerate(instructions):
            op = instruction.ops[0]
            sized_graph = lowered.parts.get(op)
            is_collective_op = op.kind in "FBI" if sized_graph is None else sized_graph.graph.is_collective
            if op.rank == rank and is_exchange(op) and is_collective_op:
                graph = None if sized_graph is None else sized_graph.filled()
                # A loss is computed from the result within the same op, so that op waits itself.
                computes_loss = graph is None and any(value.name == "loss" for value in op.writes)
                run = instruction.run if graph is None else compile_graph(self._without_waits(graph), op.kind)
                # Residuals are no result of the collective, so their readers do not wait.
                results = [value for value in instruction.written_values if value.name in _RESULT_NAMES]
                awaited = [] if computes_loss else results
                launches[row] = Launch(partial(self._launch, op.cell, computes_loss, run), awaited)
        return self.lane.made_async(instructions, rank, launches)

    def _without_waits(self, graph: Graph) -> Graph:
        """Return a graph whose collectives only start, with waits just for results that it computes with itself."""
        # Walk backwards from the results: a node is computed with if a computing node reads it, directly or through
        # views. A view of a collective's result, or a wait for it, computes nothing.
        names_computed_with = set[Name]()
        for node in reversed(graph.nodes):
            if node.op is not C10D.wait_tensor.default and (node.name in names_computed_with or not _is_view(node.op)):
                names_computed_with.update(node.reads)
        # Drop the other waits, and read in place of each the tensor that it waits for.
        replacement: dict[Name, Name] = {}
        nodes = list[Node]()
        for node in graph.nodes:
            args = tuple(replacement.get(arg, arg) if isinstance(arg, Name) else arg for arg in node.args)
            if node.op is C10D.wait_tensor.default:
                if node.name in names_computed_with:
                    nodes.append(Node(node.name, self._wait_for_launched, args, node.kwargs))
                else:
                    replacement[node.name] = args[0]
                continue
            op = self._as_launch(STARTS[node.op]) if is_collective(node.op) else node.op
            nodes.append(Node(node.name, op, args, node.kwargs))
        writes = {label: tuple(replacement.get(x, x) for x in leaves) for label, leaves in graph.writes.items()}
        return replace(graph, nodes=tuple(nodes), writes=writes)

    def _as_launch(self, start_collective: Callable[..., StartedCollective]) -> Callable[..., Tensor]:
        def launch(tensor: Tensor, *args: Any) -> Tensor:
            try:
                result, work = start_collective(tensor, *args[:-1], self.groups[args[-1]])
            except RuntimeError as error:
                raise self.lane.watchdog.as_rank_error(error, self.lane.wait_of(args[-1], self._cell)) from error
            self._works.append(Launched(work, tensor, result, group=args[-1]))
            return result

        launch.__name__ = start_collective.__name__
        return launch

    def _launch_eagerly(self, op: Any, tensor: Tensor, *args: Any, waits_at_once: bool = False) -> Tensor:
        result = self._as_launch(STARTS[op.default])(tensor, *args)
        return self._wait_for_launched(result) if waits_at_once else result

    def _wait_for_launched(self, tensor: Tensor) -> Tensor:
        """Wait for all collectives that the graph has started, and return the tensor."""
        for launched in self._works:
            self.lane.wait_on(launched, self._cell)
        return tensor

    def _launch(
        self, cell: str, waits_at_once: bool, run: Callable[..., Any], works: list[Launched], *operands: Leaves
    ) -> Any:
        self._cell, self._works = cell, works
        # A stage that is not traced calls its collectives eagerly: they go through this runner.
        launch_eagerly = partial(self._launch_eagerly, waits_at_once=waits_at_once)
        with run_collectives_with(CollectiveRunner(launch_eagerly, self._wait_for_launched)):
            return run(*operands)


def _is_view(op: Any) -> bool:
    results = returns_of(op) if isinstance(op, OpOverload) else ()
    aliases = [result.alias_info for result in results]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _all_to_all(
    tensor: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], group: ProcessGroup
) -> StartedCollective:
    result = tensor.new_empty((sum(recv_sizes), *tensor.shape[1:]))
    work = dist.all_to_all_single(result, tensor, [*recv_sizes], [*send_sizes], group=group, async_op=True)
    return result, work


def _all_gather(tensor: Tensor, size: int, group: ProcessGroup) -> StartedCollective:
    result = tensor.new_empty((len(tensor) * size, *tensor.shape[1:]))
    return result, all_gather(result, tensor, group)


def _reduce_scatter(tensor: Tensor, _: str, size: int, group: ProcessGroup) -> StartedCollective:
    result = tensor.new_empty((len(tensor) // size, *tensor.shape[1:]))
    return result, reduce_scatter(result, tensor, group)


def _all_reduce(tensor: Tensor, _: str, group: ProcessGroup) -> StartedCollective:
    result = tensor.clone()
    return result, dist.all_reduce(result, group=group, async_op=True)


STARTS: dict[Any, Callable[..., StartedCollective]] = {
    C10D.all_to_all_single.default: _all_to_all,
    C10D.all_gather_into_tensor.default: _all_gather,
    C10D.reduce_scatter_tensor.default: _reduce_scatter,
    C10D.all_reduce.default: _all_reduce,
}
