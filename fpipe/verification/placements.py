"""Type the values of a program over the axes of a mesh: replicated, dealt, partial or sharded.

    over "dp"     x[0,0] dealt     g[0,0] partial     all[0] = REDUCE sum[0,1]: replicated     params[0] replicated

Each process of an axis holds of a value:

    replicated    the same, as parameters and learning rates are
    dealt         what belongs to its own rows of the batch, as activations do
    partial       its summand, as a gradient before it is added up over replicas
    sharded       its part of each tensor, as parameters under `shard` are

A kind of op has one rule. Stages read whole parameters, and from dealt rows they make dealt activations and partial
gradients. MERGE makes partial losses. Sums and scales keep what they read. REDUCE makes partial values replicated,
SCATTER sharded, and GATHER sharded ones replicated. NORM and UPDATE take no partial value, and UPDATE a gradient placed
as its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from fpipe.model import Model
from fpipe.program import Op, Program, ProgramError, Value, parts_of
from fpipe.transforms.data_parallel import replica_axes
from fpipe.wording import describe_value, error_at

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Placement = str
"""The type of a value over an axis: "replicated", "dealt", "partial" or "sharded"."""
REPLICATED, DEALT, PARTIAL, SHARDED = "replicated", "dealt", "partial", "sharded"
_REPLICATED_ONLY, _REPLICATED_OR_DEALT = (REPLICATED,), (REPLICATED, DEALT)


def check_placements(
    program: Program, model: Model | None = None, mesh: DeviceMesh | Sequence[str] | None = None
) -> Mapping[str, Mapping[Value, Placement]]:
    """Raise ProgramError for a program whose sums over replicas are missing, doubled, or read too early; run nothing.

    Args:
        program: with its replicas, if it has any, from `data_parallel` or `shard`.
        model: the model of its stages; those that are exchanges name axes of the mesh.
        mesh: the DeviceMesh that the step will run on, or the names of its dimensions. Rows are dealt over those that
            the program's SPLITs name, and over "dp" and others that begin with it. Inside the processes of another
            dimension, such as "tp", stages look after themselves.

    Returns:
        For each axis over which rows are dealt, the placement of each value: "replicated", "dealt", "partial" or
        "sharded".

    Raises:
        ProgramError: an op or a result that takes a partial value for a whole one, a value that is added up twice, or
            an UPDATE whose gradient is placed unlike its parameters; with the op, and what it reads.
        ValueError: a model of other stages, or an exchange along a dimension that the mesh lacks.

    >>> import fpipe
    >>> local = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False))(fpipe.program(1))
    >>> placements = fpipe.check_placements(fpipe.data_parallel()(local), mesh=("dp", "pp"))["dp"]
    >>> [placements[fpipe.Value(*name)] for name in (("params", 0), ("loss", 0, 0), ("g", 0, 0), ("all", 0))]
    ['replicated', 'dealt', 'partial', 'replicated']
    >>> fpipe.check_placements(local, mesh=("dp", "pp"))
    Traceback (most recent call last):
    fpipe.ops.ProgramError: the result loss is partial over 'dp': add a REDUCE, as fpipe.data_parallel('dp') does.
    """
    dimensions: Any = () if mesh is None else getattr(mesh, "mesh_dim_names", mesh)
    mesh_names = tuple[str, ...](dimensions or ())
    exchange_axes = {dict(op.options)["axis"] for op in parts_of(program.ops) if "exchange" in dict(op.options)}
    if model is not None:
        if len(model.stages) != program.stages:
            raise ValueError(f"the model has {len(model.stages)} stages, the program {program.stages}.")
        exchange_axes |= {dict(stage.exchange)["axis"] for stage in model.stages if stage.exchange}
    for axis in sorted(exchange_axes.difference(mesh_names) if mesh is not None else ()):
        raise ValueError(f"an exchange runs along {axis!r}; the mesh has dimensions {', '.join(mesh_names)}.")
    named_axes = (dict(op.options).get("axis", "") for op in program.ops if op.kind in _SUMS)
    dealt_by_mesh = (name for name in mesh_names if name.startswith("dp"))
    axes = dict.fromkeys((*replica_axes(program), *named_axes, *dealt_by_mesh))
    return {axis: MappingProxyType(_Typing(program, axis).type_all()) for axis in axes}


_SUMS = frozenset(("REDUCE", "SCATTER", "GATHER"))
_STAGE_KINDS = frozenset("FRBIW")
_WHOLE_FOR_ALL = frozenset(("norm", "lr", "valid", "scale"))
_WEIGHED = frozenset(("loss", "total", "count"))


class _Typing:
    """The placements of a program's values over one axis, as a walk down its ops finds them."""

    def __init__(self, program: Program, axis: str) -> None:
        self.program, self.axis = program, axis
        self.is_weighed = axis in replica_axes(program) or all(op.kind != "SPLIT" for op in program.ops)
        self.sharded_stages = {
            op.stage for op in program.ops if op.kind == "GATHER" and dict(op.options)["axis"] == axis
        }
        self.placements: dict[Value, Placement] = {
            program_input.value: self.type_input(program_input.value) for program_input in program.inputs
        }

    def type_input(self, value: Value) -> Placement:
        if value.name in ("inputs", "target"):
            return DEALT
        is_sharded = value.name in ("shard", "opt") and value.stage in self.sharded_stages
        return SHARDED if is_sharded else REPLICATED

    def type_all(self) -> dict[Value, Placement]:
        for position, whole_op in enumerate(self.program.ops):
            for op in whole_op.parts or (whole_op,):
                self.placements.update(self.type_writes(position, op))
        for name, value, _ in self.program.outputs:
            if self.placements[value] == PARTIAL:
                remedy = f"add a REDUCE, as fpipe.data_parallel({self.axis!r}) does."
                raise ProgramError(f"the result {name} is partial over {self.axis!r}: {remedy}")
        return self.placements

    def type_writes(self, position: int, op: Op) -> dict[Value, Placement]:
        reads = [self.placements[value] for value in op.reads]
        # A sum over another axis keeps the type over this one, and falls through to the last line.
        if op.kind in _SUMS and dict(op.options)["axis"] == self.axis:
            self.require(position, op, op.reads[0], (SHARDED,) if op.kind == "GATHER" else (PARTIAL,))
            # Weighed within one replica, each replica's gradient is a mean already, and their sum too large.
            if op.kind != "GATHER" and not self.is_weighed:
                rule = "its SPLITs weigh rows within one replica: let them name the axis, as data_parallel() does."
                raise error_at(self.program, position, f"{op.cell} adds up over {self.axis!r}, but", rule)
            return dict.fromkeys(op.writes, SHARDED if op.kind == "SCATTER" else REPLICATED)
        if op.kind in _STAGE_KINDS:
            for value in op.reads:
                self.require(position, op, value, (REPLICATED,) if value.name == "params" else (REPLICATED, DEALT))
            return {value: PARTIAL if value.name == "g" else DEALT for value in op.writes}
        if op.kind == "MERGE":
            for value in op.reads:
                self.require(position, op, value, _REPLICATED_OR_DEALT)
            return {value: PARTIAL if value.name in _WEIGHED else DEALT for value in op.writes}
        if op.kind in ("ADD", "SCALE"):
            # A sum divided by the count of rows: the count is of all replicas, the sum may wait for its summands.
            for value in op.reads[1:] if op.kind == "SCALE" else ():
                self.require(position, op, value, _REPLICATED_ONLY)
            if op.kind == "ADD" and len(set(reads)) > 1:
                odd_value = op.reads[reads.index(PARTIAL) if PARTIAL in reads else 1]
                self.refuse(position, op, odd_value, sorted({*reads} - {self.placements[odd_value]}))
            return dict.fromkeys(op.writes, reads[0])
        if op.kind in ("NORM", "UNSCALE", "VALIDATE"):
            is_last = op.kind == "VALIDATE" or op.reads[0].name == "norms"
            for value in op.reads:
                self.require(position, op, value, _REPLICATED_ONLY if is_last else (REPLICATED, SHARDED))
            # What a process says of its shard is a summand: the squares of its numbers, whether it met an infinity.
            summary_placement = PARTIAL if reads[0] == SHARDED else REPLICATED
            return {value: self.type_summary(op, value, reads[0], summary_placement) for value in op.writes}
        if op.kind == "UPDATE":
            for value in op.reads:
                self.require(position, op, value, _REPLICATED_ONLY if value.name in _WHOLE_FOR_ALL else (reads[0],))
        return dict.fromkeys(op.writes, reads[0] if reads else REPLICATED)

    def type_summary(
        self, op: Op, value: Value, gradient_placement: Placement, summary_placement: Placement
    ) -> Placement:
        if value.name == "real":
            return gradient_placement
        # Port 1 has the norms of leaves that are whole on each process.
        return REPLICATED if op.kind == "NORM" and value.port else summary_placement

    def require(self, position: int, op: Op, value: Value, accepted: Sequence[Placement]) -> None:
        if self.placements[value] not in accepted:
            self.refuse(position, op, value, accepted)

    def refuse(self, position: int, op: Op, value: Value, accepted: Sequence[Placement]) -> NoReturn:
        placement, axis = self.placements[value], repr(self.axis)
        is_sum = op.kind in ("REDUCE", "SCATTER") and accepted == (PARTIAL,)
        if is_sum and placement in (REPLICATED, SHARDED):
            mistake, remedy = "which is added up already", f"Leave {op.cell} out."
        elif placement == PARTIAL:
            mistake = f"which is partial over {axis}: each process has its own summand"
            remedy = f"Add it up by a REDUCE over {axis} before, as fpipe.data_parallel({axis}) does."
        else:
            mistake = f"which is {placement} over {axis}"
            remedy = f"It takes what is {' or '.join(accepted)}."
        raise error_at(self.program, position, f"{op.cell} reads {describe_value(value)}, {mistake}.", remedy)
