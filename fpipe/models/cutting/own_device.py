"""Make what a net makes itself where its stage runs: a graph that was traced on meta names no other device.

arange(n, device=meta)        -->        device = x.device;  arange(n, device=device)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate


def follow_device(graph: fx.Graph) -> None:
    """Let each operation of a stage's graph that names meta ask what the stage takes last for its device. Each asks for
    itself, so that equal blocks stay equal."""
    given = graph.find_nodes(op="placeholder")
    for node in [*graph.nodes]:
        if node.op != "call_function" or not given:
            continue
        asked: list[fx.Node] = []

        def device(arg: Any, node: fx.Node = node, asked: list[fx.Node] = asked) -> Any:
            if not isinstance(arg, torch.device) or arg.type != "meta":
                return arg
            if not asked:
                with graph.inserting_before(node):
                    asked.append(graph.call_function(getattr, (given[-1], "device")))
                asked[0].meta = {key: one for key, one in node.meta.items() if key != "val"}
            return asked[0]

        args, kwargs = map_aggregate((node.args, node.kwargs), device)  # pyright: ignore[reportGeneralTypeIssues]
        if asked:
            node.args, node.kwargs = args, dict(kwargs)
