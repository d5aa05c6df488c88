"""Copy and pickle what holds graphs, so that a model made in one process is handed to others.

stage.graph        --> pickle, deepcopy -->        bytes        -->        a graph of the same operations
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import fx

from fpipe.torch_private.fx import dump_graph, load_graph


class HoldsGraphs:
    """Is copied and pickled with its graphs; what it has found out of them is found out anew."""

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        kinds = type(self).__mro__
        found = {name for kind in kinds for name, one in vars(kind).items() if isinstance(one, cached_property)}
        kept = {name: one for name, one in vars(self).items() if name not in found}
        graphs = {name: dump_graph(one) for name, one in kept.items() if isinstance(one, fx.GraphModule)}
        return {name: one for name, one in kept.items() if name not in graphs}, graphs

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, bytes]]) -> None:
        plain, graphs = state
        vars(self).update(plain | {name: load_graph(one) for name, one in graphs.items()})
