"""Find the updates of running statistics that a forward can make itself, as its norms run.

    y[0,0] seen[0,0] = F ..   state[0,0] = U state[0] seen[0,0]    -->    y[0,0] state[0,0] = F .. state[0]

It can where the statistics before are there when it runs: where forwards come in the order of the microbatches. They
are written in place where the step owns them, which it does from the first update on. An update that has to make them
is only folded into a forward that it follows at once, so that every rank holds at any time what the program says. The
program keeps its U; this only says which of them need no call of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fpipe import tree
from fpipe.graphs.compiling.update import Norm, updating
from fpipe.graphs.language.graph import Aval, Fact
from fpipe.graphs.language.labels import label_of
from fpipe.model import Stage
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree, dense
from fpipe.runtimes.lowering.shapes import Shapes


class Update(NamedTuple):
    """An update that a forward makes.

    Attributes:
        at: the position of its U.
        norms: the stage's batch norms.
        state: what is known of the running statistics.
        mine: whether nobody else reads those before, which the step owns: they are written in place.
    """

    at: int
    norms: tuple[Norm, ...]
    state: tuple[Aval, ...]
    mine: bool


def updates_of(
    ops: Sequence[Op], kept: Collection[Value], shapes: Shapes, trees: Mapping[Value, AbstractTree]
) -> tuple[Mapping[int, Update], Mapping[Value, AbstractTree]]:
    """The updates that forwards make in a program whose outputs are `kept`, by the position of the forward; and the
    trees, with statistics in the memory of those before where they are written in place."""
    of, trees = dict[int, Update](), {**trees}
    written = {value: at for at, op in enumerate(ops) for value in op.writes}
    readers = Counter(value for op in ops for value in op.reads)
    mine: set[Value] = set()  # running statistics that the step owns
    for at, op in enumerate(ops):
        if op.kind != "U" or op.how or len(op.reads) != 2 or shapes.is_untraced(op._replace(kind="F")):
            continue
        before, seen = op.reads
        maker = written.get(seen, -1)
        alone = readers[seen] == 1 and seen not in kept
        here = maker > written.get(before, -1) and ops[maker].kind == "F" and ops[maker].rank == op.rank
        norms = _norms(shapes.context.model.stages[op.stage or 0], trees[before], trees[seen])
        if norms is None:
            continue
        mine.add(op.writes[0])
        own = before in mine and readers[before] == 1 and before not in kept
        if not (alone and here and (own or at == maker + 1)):
            continue
        found = _found(at, ops[maker], norms, trees[before], own, shapes)
        if found is None:
            continue
        of[maker] = found
        written[op.writes[0]] = maker
        if own:
            trees[op.writes[0]] = trees[before]
    return of, trees


def _found(
    at: int, forward: Op, norms: tuple[Norm, ...], before: AbstractTree, mine: bool, shapes: Shapes
) -> Update | None:
    """The update, if the graph of the forward can make it."""
    leaves = before.leaves
    if not all(isinstance(leaf, Fact) and dense(leaf) for leaf in leaves):
        return None
    state = tuple(leaf.aval for leaf in leaves)
    cut = shapes.cut_of(forward)
    labels = tuple(label_of(value) for value in forward.writes if value.name != "seen")

    def can() -> bool:
        try:  # a norm whose output nobody reads is no op of this forward
            updating(cut.forward(labels), cut.graph.writes["seen"], norms, state, False)
        except LookupError:
            return False
        return True

    return Update(at, norms, state, mine) if cut.graph.once(("updating", labels, norms, state), can) else None


def _norms(stage: Stage, state: AbstractTree, seen: AbstractTree) -> tuple[Norm, ...] | None:
    """The batch norms of a stage, if all that it remembers is theirs, and each batch weighs the same."""
    cut = stage.forward
    if not isinstance(cut, PositionalStage) or not cut.can_fold or any(norm.momentum is None for _, norm in cut.norms):
        return None
    places: dict[str, int] = tree.unflatten(state.spec, range(len(state.leaves)))
    calls: Sequence[Sequence[int]] = tree.unflatten(seen.spec, range(len(seen.leaves)))
    found: list[Norm] = []
    for (path, _), each in zip(cut.norms, calls, strict=True):
        mean, var = (places.get(f"{path}.{name}") for name in ("running_mean", "running_var"))
        if mean is None or var is None:
            return None
        found.append(Norm(tuple(each), mean, var, places.get(f"{path}.num_batches_tracked")))
    used: list[Any] = [place for norm in found for place in norm[1:] if place is not None]
    return tuple(found) if sorted(used) == [*range(len(state.leaves))] else None
