"""Start the collectives that are stages of this rank, and wait for each where its result is read.

    1F0 (dispatch of microbatch 0)  2B1  2F0      -->      start 1F0;  2B1 meanwhile;  wait for 1F0, 2F0

The graph of such a stage's F or B runs as it was traced, but a collective in it hands its work to the lane, and what
waits for it there waits for nothing. All processes along its axis run the same program, and so come to the same
collectives in the same order.
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

from fpipe.graphs.compiling.code import compiled
from fpipe.graphs.language.graph import Graph, Name, Node
from fpipe.graphs.tracing.exchanged import Carrier, Exchanged, carried_by
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
Started = tuple[Tensor, Any]
"""The tensor that a collective writes, and its work to wait for."""
_BROUGHT = ("y", "again", "dx")


class Axis(NamedTuple):
    """A dimension of a mesh by its name, and the processes along it with which this process exchanges."""

    name: str
    group: ProcessGroup


def over_mesh(model: Model, mesh: DeviceMesh | None) -> tuple[Model, dict[str, Axis]]:
    """Bind the exchanges of a model to the processes of a mesh, or to the groups of the net that they were cut from.

    Returns:
        The model, and its axes by the names of their groups.

    Raises:
        ValueError: the mesh lacks a dimension.
    """
    axes: dict[str, Axis] = {}
    names = () if mesh is None else mesh.mesh_dim_names or ()

    def bound(function: Any) -> Any:
        if not isinstance(function, Exchanged):
            return function
        if function.group:  # cut from a net, which says itself over whom
            axes[function.group] = Axis(function.axis, group_named(function.group))
            return function
        if mesh is None or function.axis not in names:
            dims = "there is no mesh" if mesh is None else f"the mesh has {', '.join(names) or 'none with a name'}"
            raise ValueError(
                f"a stage of the model is {function.__name__}, a dimension of the mesh, and {dims}. Say "
                f"mesh=init_device_mesh(device, (ranks, processes), mesh_dim_names=('pp', {function.axis!r}))."
            )
        group = mesh.get_group(function.axis)
        axes[group.group_name] = Axis(function.axis, group)
        return function.over(group.group_name, group.size(), group.rank())

    stages = tuple(replace(stage, forward=bound(stage.forward)) for stage in model.stages)
    return (replace(model, stages=stages), axes) if axes else (model, axes)


class ExchangeLane:
    """The collectives that are stages of one rank, over axes by the names of their groups."""

    def __init__(self, axes: Mapping[str, Axis], device: torch.device, watchdog: Watchdog) -> None:
        self.groups = {name: group for name, (_, group) in axes.items()}
        on_streams = all(is_on_streams(group, device) for group in self.groups.values())
        self.lane = CollectiveLane(watchdog, self.groups, on_streams)
        self._meetings, names = dict[str, Meeting](), watchdog.faults.names
        for axis, group in axes.values():
            processes, name = dist.get_process_group_ranks(group), names[watchdog.faults.process]
            along = [f"{axis} {number}: {name}" for number in range(group.size())]
            self._meetings[axis] = Meeting(watchdog, processes, along)
            names.update({process: f"{axis} {group.rank()}: {known}" for process, known in names.items()})
            names.update(zip(processes, along, strict=True))
        self._works, self._cell = list[Launched](), ""

    def agree(self, where: str, exchanged: Mapping[str, Sequence[str]]) -> None:
        """Let all processes along each axis agree on what they exchange, as `Meeting.agree`."""
        for axis, meeting in self._meetings.items():
            meeting.agree(where, {f"exchanges over {axis}": exchanged.get(axis, ())})

    def made_async(self, instructions: Sequence[Instruction], lowered: Lowered, rank: int) -> list[Instruction]:
        """Replace each exchange of this rank by its launch, and each first reader by a wait and the read."""
        launches = dict[int, Launch]()
        for row, instruction in enumerate(instructions):
            op = instruction.ops[0]
            graph = lowered.parts.get(op)
            if op.rank == rank and is_exchange(op) and (op.kind in "FBI" if graph is None else graph.collective):
                at_once = graph is None and any(value.name == "loss" for value in op.writes)  # it is computed with this
                run = instruction.run if graph is None else compiled(self._posting(graph), op.kind)
                # Residuals are not brought by an exchange, so nobody waits for them.
                brought = [value for value in instruction.written if value.name in _BROUGHT and not at_once]
                launches[row] = Launch(partial(self._launch, op.cell, at_once, run), brought)
        return self.lane.made_async(instructions, rank, launches)

    def _posting(self, graph: Graph) -> Graph:
        """Let the collectives of a graph only start, without waits but for results that the graph itself computes with,
        as the loss behind a last stage does."""
        computed = set[Name]()
        for node in reversed(graph.nodes):
            if node.op is not C10D.wait_tensor.default and (node.name in computed or not _is_view(node.op)):
                computed.update(node.reads)
        now: dict[Name, Name] = {}
        nodes = list[Node]()
        for node in graph.nodes:
            args = tuple(now.get(arg, arg) if isinstance(arg, Name) else arg for arg in node.args)
            if node.op is C10D.wait_tensor.default:
                if node.name in computed:
                    nodes.append(Node(node.name, self._waited, args, node.kwargs))
                else:
                    now[node.name] = args[0]
                continue
            op = self._post(STARTS[node.op]) if is_collective(node.op) else node.op
            nodes.append(Node(node.name, op, args, node.kwargs))
        writes = {label: tuple(now.get(leaf, leaf) for leaf in leaves) for label, leaves in graph.writes.items()}
        return replace(graph, nodes=tuple(nodes), writes=writes)

    def _post(self, start: Callable[..., Started]) -> Callable[..., Tensor]:
        def post(tensor: Tensor, *how: Any) -> Tensor:
            try:
                result, work = start(tensor, *how[:-1], self.groups[how[-1]])
            except RuntimeError as error:
                raise self.lane.watchdog.lost(error, self.lane.wait_of(how[-1], self._cell)) from error
            self._works.append(Launched(work, tensor, result, group=how[-1]))
            return result

        post.__name__ = start.__name__
        return post

    def _posted_now(self, op: Any, tensor: Tensor, *how: Any, at_once: bool = False) -> Tensor:
        result = self._post(STARTS[op.default])(tensor, *how)
        return self._waited(result) if at_once else result

    def _waited(self, tensor: Tensor) -> Tensor:
        """Return a result of the collectives that this graph has started, once all are over."""
        for launched in self._works:
            self.lane.wait_on(launched, self._cell)
        return tensor

    def _launch(self, cell: str, at_once: bool, run: Callable[..., Any], works: list[Launched], *lists: Leaves) -> Any:
        self._cell, self._works = cell, works
        with carried_by(Carrier(partial(self._posted_now, at_once=at_once), self._waited)):
            return run(*lists)


def _is_view(op: Any) -> bool:
    results = returns_of(op) if isinstance(op, OpOverload) else ()
    aliases = [result.alias_info for result in results]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _all_to_all(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup) -> Started:
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = dist.all_to_all_single(result, tensor, [*received], [*sent], group=group, async_op=True)
    return result, work


def _all_gather(tensor: Tensor, size: int, group: ProcessGroup) -> Started:
    result = tensor.new_empty((len(tensor) * size, *tensor.shape[1:]))
    return result, all_gather(result, tensor, group)


def _reduce_scatter(tensor: Tensor, _: str, size: int, group: ProcessGroup) -> Started:
    result = tensor.new_empty((len(tensor) // size, *tensor.shape[1:]))
    return result, reduce_scatter(result, tensor, group)


def _all_reduce(tensor: Tensor, _: str, group: ProcessGroup) -> Started:
    result = tensor.clone()
    return result, dist.all_reduce(result, group=group, async_op=True)


STARTS: dict[Any, Callable[..., Started]] = {
    C10D.all_to_all_single.default: _all_to_all,
    C10D.all_gather_into_tensor.default: _all_gather,
    C10D.reduce_scatter_tensor.default: _reduce_scatter,
    C10D.all_reduce.default: _all_reduce,
}
