"""Copy and pickle what holds a graph, so that a model made in one process is handed to others.

stage.graph        --> pickle, deepcopy -->        bytes        -->        a graph of the same operations
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import fx

from fpipe.torch_private.fx import dump_graph, load_graph


class HoldsGraph:
    """Is copied and pickled with its graph; what it has found out of that is found out anew."""

    graph: fx.GraphModule

    def __getstate__(self) -> dict[str, Any]:
        kinds = type(self).__mro__
        found = {name for kind in kinds for name, one in vars(kind).items() if isinstance(one, cached_property)}
        kept = {name: one for name, one in vars(self).items() if name not in found}
        return {**kept, "graph": dump_graph(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "graph": load_graph(state["graph"])})
