"""Arguments of a step, and how its program cuts, casts, adds and joins, so that plain autograd can do the same.

SPLIT {count=2, size=4}  GATHER {cast='bfloat16'}        -->        microbatches of 4 rows,  params.bfloat16()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.meaning.meaning import cast_of
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.microbatch_graph import detached
from fpipe.meaning.single_device.over_parts import Joined, OverReplicas, Sliced
from fpipe.meaning.single_device.params_and_state import rows_of_each, streams
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.walk import scatters_microbatches
from fpipe.program import Program
from fpipe.transforms.specs import spec_of


@dataclass(frozen=True)
class StepArguments:
    """The arguments of one call of a step; None for those that it is not handed."""

    params: Sequence[Any]
    batch: Any
    state: Sequence[Any] | None = None
    key: Any = None
    opt: Sequence[Any] | None = None
    lr: Any = None
    scale: Any = None

    def call(self, step: Callable[..., Result]) -> Result:
        """Call a step with those that are not None."""
        keywords = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return step(self.params, self.batch, **{word: x for word, x in keywords.items() if x is not None})


def settings_of(program: Program, kind: str) -> dict[str, Any]:
    """The settings of the first op of a kind."""
    return next((dict(op.how) for op in program.ops if op.kind == kind), {})


def spec_of_split(program: Program) -> Any:
    """How the leaves of a batch are cut."""
    return spec_of(settings_of(program, "SPLIT").get("spec"))


def microbatches_of(program: Program, batches: Sequence[Any]) -> list[tuple[Any, int]]:
    """The microbatches of one step with their rows, replica after replica; `batches` has that of each replica."""
    settings, spec, count = settings_of(program, "SPLIT"), spec_of_split(program), program.microbatches // program.steps
    if "presplit" in settings:
        halves = streams(batches[0], count)
        return [*zip(zip(*halves, strict=True), rows_of_each(halves, spec), strict=True)]
    return [cut(batch, i, count, spec, size=settings.get("size")) for batch in batches for i in range(count)]


def sliced_by(program: Program) -> Sliced:
    """How sequences are cut."""
    settings = settings_of(program, "SPLIT")
    specs = (spec_of(settings.get(word)) for word in ("sequence", "spec"))
    along, rows = (spec if isinstance(spec, tuple) else (spec, spec) for spec in specs)
    return Sliced(settings.get("slices", 1), settings.get("dim", 1), along, rows)


def joined_by(program: Program, batch: tuple[Any, Any]) -> Joined:
    """How the results of the microbatches are joined."""
    merges = (dict(op.how) for op in program.ops if op.kind == "MERGE" and op.reads[0].name != "inputs")
    settings = next(merges, {})
    counts = Counter(end.name.name for end in program.outputs)
    # Joined outputs of several steps have the name of the last microbatch of each.
    numbered = [end.name.name for end in program.outputs if end.name.microbatch is not None]
    unmerged = {name for name in numbered if program.steps == 1 or counts[name] > program.steps}
    spec = "stream" if "presplit" in settings_of(program, "SPLIT") else spec_of_split(program)
    return Joined(
        "stream" if "outputs" in unmerged or "outputs" not in counts else spec_of(settings.get("spec")),
        "stream" if "aux" in unmerged else spec_of(settings.get("aux")),
        batch[0] if "input_grads" in counts else None,
        spec[0] if isinstance(spec, tuple) else spec,
    )


def added_by(program: Program, within: int) -> OverReplicas:
    """How gradients are added up over replicas."""
    return OverReplicas(scatters_microbatches(program), _cast_by(program, "SCATTER"), within)


def computed(program: Program, params: Sequence[Any]) -> tuple[Any, ...]:
    """Parameters as the program computes with them."""
    return tuple(tree.tree_map(_cast_by(program, "GATHER"), stage) for stage in params)


def _cast_by(program: Program, kind: str) -> Callable[[Any], Any]:
    """The cast that all GATHERs, or SCATTERs, make of each leaf."""
    op = next((op for op in program.ops if op.kind == kind), None)
    return detached if op is None else cast_of(op)


def like_params(params: Sequence[Any], grads: Any) -> Any:
    """Gradients in the dtypes of their parameters."""
    leaves, spec = tree.flatten(grads)
    pairs = zip(leaves, tree.leaves(tuple(params)), strict=True)
    return tree.unflatten(spec, [grad.to(param.dtype) if isinstance(grad, Tensor) else grad for grad, param in pairs])
