"""Copy and pickle what holds a graph, so that a model made in one process is handed to others.

stage.graph        --> pickle, deepcopy -->        bytes        -->        a graph of the same operations
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class HoldsGraph:
    """Is copied and pickled with its graph; what it has found out of that is found out anew."""

    graph: fx.GraphModule

    def __getstate__(self) -> dict[str, Any]:
        pickler = _pickler()
        found = {name for kind in type(self).__mro__ for name, one in vars(kind).items() if _is_cached(one)}
        kept = {name: one for name, one in vars(self).items() if name not in found}
        return {**kept, "graph": pickler.GraphPickler.dumps(self.graph, pickler.Options(ops_filter=None))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        graph = _pickler().GraphPickler.loads(state["graph"], FakeTensorMode(shape_env=ShapeEnv()))
        graph.recompile()
        vars(self).update({**state, "graph": graph})


def _is_cached(attribute: Any) -> bool:
    return isinstance(attribute, cached_property)


def _pickler() -> Any:
    from torch.fx import _graph_pickler  # it brings torch's compiler, which takes a while to import

    return _graph_pickler
