"""Read from a program how it cuts, casts, adds up and joins, so that plain autograd can do so too.

SPLIT {count=2, size=4}  GATHER {cast='bfloat16'}        -->        microbatches of 4 rows,  params.bfloat16()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.meaning.lockstep import scatters_microbatches
from fpipe.meaning.meaning import cast_of
from fpipe.meaning.single_device.batches import rows_of_each, streams
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.microbatch_graph import detached
from fpipe.meaning.single_device.over_parts import Joined, OverReplicas, Sliced
from fpipe.program import Program
from fpipe.transforms.specs import spec_of


def how_of(program: Program, kind: str) -> dict[str, Any]:
    """The words of the first op of a kind."""
    return next((dict(op.how) for op in program.ops if op.kind == kind), {})


def spec_of_split(program: Program) -> Any:
    """How the leaves of a batch are cut."""
    return spec_of(how_of(program, "SPLIT").get("spec"))


def microbatches_of(program: Program, own: Sequence[Any]) -> list[tuple[Any, int]]:
    """The microbatches of one step, those of each replica, with their rows."""
    how, spec, many = how_of(program, "SPLIT"), spec_of_split(program), program.microbatches // program.steps
    if "presplit" in how:
        whole = streams(own[0], many)
        return [*zip(zip(*whole, strict=True), rows_of_each(whole, spec), strict=True)]
    return [cut(one, index, many, spec, size=how.get("size")) for one in own for index in range(many)]


def sliced_by(program: Program) -> Sliced:
    """How sequences are cut."""
    how = how_of(program, "SPLIT")
    specs = (spec_of(how.get(word)) for word in ("sequence", "spec"))
    along, rows = (spec if isinstance(spec, tuple) else (spec, spec) for spec in specs)
    return Sliced(how.get("slices", 1), how.get("dim", 1), along, rows)


def joined_by(program: Program, batch: tuple[Any, Any]) -> Joined:
    """How what the microbatches give is joined."""
    said = next((dict(op.how) for op in program.ops if op.kind == "MERGE" and op.reads[0].name != "inputs"), {})
    names = Counter(end.name.name for end in program.outputs)
    # Joined outputs of several steps have the name of the last microbatch of each.
    apart = [end.name.name for end in program.outputs if end.name.microbatch is not None]
    streams = {name for name in apart if program.steps == 1 or names[name] > program.steps}
    spec = "stream" if "presplit" in how_of(program, "SPLIT") else spec_of_split(program)
    return Joined(
        "stream" if "outputs" in streams or "outputs" not in names else spec_of(said.get("spec")),
        "stream" if "aux" in streams else spec_of(said.get("aux")),
        batch[0] if "input_grads" in names else None,
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
    return tree.unflatten(spec, [grad.to(own.dtype) if isinstance(grad, Tensor) else grad for grad, own in pairs])
