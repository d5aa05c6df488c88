"""Let stages read buffers from the state that a step is handed, which they leave as it is.

f(params, x), of a net in eval mode        --> reading ["1.running_mean"] -->        f(params, x, state) -> y, state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fpipe.model import Model
from fpipe.models.cutting.graph_stage import GraphStage


def reading(model: Model, names: Sequence[Sequence[str]]) -> Model:
    """A model just cut whose stages have these names in their state, besides what they write themselves."""
    stages = [*model.stages]
    for number, own in enumerate(names):
        run = stages[number].forward
        assert isinstance(run, GraphStage)
        if own:
            _read(run, own)
            stages[number] = replace(stages[number], **run.remembering())
    return replace(model, stages=tuple(stages))


def _read(run: GraphStage, names: Sequence[str]) -> None:
    if run.change is not None or not {*run.holds} <= {*names}:
        raise ValueError(f"stage {run.number} writes {run.writes[-1]!r} in eval mode: cut the net in that mode.")
    graph = run.graph.graph
    before = graph.find_nodes(op="placeholder")[len(run.takes) :]
    nodes = dict(zip(run.takes, graph.find_nodes(op="placeholder"), strict=False))
    with graph.inserting_before(before[0] if before else next(iter(graph.nodes))):
        nodes |= {name: graph.placeholder(f"state_{at}") for at, name in enumerate(names) if name not in nodes}
    output = graph.output_node()
    returned: Any = output.args[0]
    now = dict(zip(run.holds, returned[1], strict=True))
    run.takes, run.holds, run.writes = [*nodes], [*names], [*names]
    run.fixed = [name for name in run.fixed if name not in names]
    output.args = ((returned[0], [now.get(name, nodes[name]) for name in names]),)
    run.graph.recompile()
