"""Hand a step the buffers and frozen parameters that are on meta, which have no values yet: leaves without a gradient.

constants: rope.inv_freq (meta)        -->        params[0], params[1]: rope.inv_freq, a leaf of each reader
"""

from __future__ import annotations

from fpipe.models.cutting.marked_graph import MarkedGraph
from fpipe.models.tracing.net_graph import NetTensors


def with_untrained(marked: MarkedGraph, tensors: NetTensors) -> NetTensors:
    """The tensors of a net, where those on meta that no operation writes are parameters of the graph too.

    Raises:
        ValueError: another tensor is there, such as a plain attribute.
    """
    net = marked.net
    lost = next((name for name, literal in tensors.literals.items() if literal.is_meta), None)
    if lost is not None:
        raise ValueError(
            f"{lost!r} is a tensor on meta, without values, that is no parameter or buffer of the net, so nothing can "
            "give it some. Say register_buffer where the net makes it."
        )
    found = {
        node: name
        for node, name in net.constants.items()
        if name in tensors.first and tensors.now(name).is_meta and node not in marked.mutators
    }
    for node in found:
        net.params[node] = net.constants.pop(node)
    names = frozenset(found.values())
    return tensors._replace(trains=tensors.trains | names, untrained=names)
