"""The arguments of a step, and how its program cuts, casts, adds and joins, so that plain autograd can do the same.

SPLIT {count=2, size=4}  GATHER {cast='bfloat16'}        -->        microbatches of 4 rows,  params.bfloat16()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.meaning.meaning import make_cast
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.microbatch_graph import detach_leaf
from fpipe.meaning.single_device.microbatch_sums import JoinSpecs, ReplicaOrder, SequenceSlicing
from fpipe.meaning.single_device.params_and_state import as_streams, rows_per_microbatch
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.walk import scatters_microbatches
from fpipe.program import Program
from fpipe.transforms.specs import spec_of


@dataclass(frozen=True)
class StepArguments:
    """The arguments of one call of a step; None for an argument that is left out."""

    params: Sequence[Any]
    batch: Any
    state: Sequence[Any] | None = None
    key: Any = None
    opt: Sequence[Any] | None = None
    lr: Any = None
    scale: Any = None

    def call(self, step: Callable[..., Result]) -> Result:
        """Call a step with the arguments that are not None."""
        keywords = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        given_keywords = {name: argument for name, argument in keywords.items() if argument is not None}
        return step(self.params, self.batch, **given_keywords)


def settings_of_kind(program: Program, kind: str) -> dict[str, Any]:
    """Return the settings of the first op of a kind; empty if there is none."""
    return next((dict(op.options) for op in program.ops if op.kind == kind), {})


def spec_of_split(program: Program) -> Any:
    """Return how the leaves of a batch are cut."""
    return spec_of(settings_of_kind(program, "SPLIT").get("spec"))


def microbatches_of(program: Program, batches: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return the microbatches of one step with their counts of rows, replica after replica.

    Args:
        program: says how its SPLIT cuts.
        batches: the batch of each replica.
    """
    settings, spec = settings_of_kind(program, "SPLIT"), spec_of_split(program)
    count = program.microbatches // program.steps
    if "presplit" in settings:
        streams = as_streams(batches[0], count)
        return [*zip(zip(*streams, strict=True), rows_per_microbatch(streams, spec), strict=True)]
    return [cut(batch, i, count, spec, size=settings.get("size")) for batch in batches for i in range(count)]


def slicing_of(program: Program) -> SequenceSlicing:
    """Return how sequences are cut into slices."""
    settings = settings_of_kind(program, "SPLIT")
    specs = (spec_of(settings.get(setting)) for setting in ("sequence", "spec"))
    sequence_spec, row_spec = (spec if isinstance(spec, tuple) else (spec, spec) for spec in specs)
    counts = settings.get("slices", 1), settings.get("sizes")
    return SequenceSlicing(*counts, settings.get("dim", 1), sequence_spec, row_spec)


def join_specs_of(program: Program, batch: Any) -> JoinSpecs:
    """Return how the results of the microbatches are joined."""
    merge_settings = (dict(op.options) for op in program.ops if op.kind == "MERGE" and op.reads[0].name != "inputs")
    settings = next(merge_settings, {})
    output_counts = Counter(end.name.name for end in program.outputs)
    # An output with a microbatch in its name was not joined, but in a program of several steps: there the joined output
    # of each step is named by its last microbatch.
    numbered_names = [end.name.name for end in program.outputs if end.name.microbatch is not None]
    unmerged_names = {name for name in numbered_names if program.steps == 1 or output_counts[name] > program.steps}
    spec = "stream" if "presplit" in settings_of_kind(program, "SPLIT") else spec_of_split(program)
    return JoinSpecs(
        "stream" if "outputs" in unmerged_names or "outputs" not in output_counts else spec_of(settings.get("spec")),
        "stream" if "aux" in unmerged_names else spec_of(settings.get("aux")),
        batch[0] if "input_grads" in output_counts else None,
        spec[0] if isinstance(spec, tuple) else spec,
    )


def replica_order_of(program: Program, inner_replicas: int) -> ReplicaOrder:
    """Return the order in which gradients are added over replicas."""
    return ReplicaOrder(scatters_microbatches(program), _cast_of(program, "SCATTER"), inner_replicas)


def cast_params_of(program: Program, params: Sequence[Any]) -> tuple[Any, ...]:
    """Return the parameters in the precision that the program computes with."""
    return tuple(tree.tree_map(_cast_of(program, "GATHER"), stage) for stage in params)


def _cast_of(program: Program, kind: str) -> Callable[[Any], Any]:
    """Return the cast that all GATHERs, or all SCATTERs, apply to each leaf."""
    op = next((op for op in program.ops if op.kind == kind), None)
    return detach_leaf if op is None else make_cast(op)


def cast_like_params(params: Sequence[Any], grads: Any) -> Any:
    """Return gradients in the dtypes of their parameters."""
    leaves, spec = tree.flatten(grads)
    pairs = zip(leaves, tree.leaves(tuple(params)), strict=True)
    return tree.unflatten(spec, [grad.to(param.dtype) if isinstance(grad, Tensor) else grad for grad, param in pairs])
