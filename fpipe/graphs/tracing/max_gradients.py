"""Write the gradient of a whole tensor's max, min or median as torch does of tensors with data.

    dx = mask * (dy / mask.sum())        --> rewritten -->        dx = 0, and where the mask is dy / mask.sum()

Of fake tensors torch multiplies: what was not the largest has 0 times the cotangent, which is -0 or no number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten: Any = torch.ops.aten


def rewrite_max_gradients(traced: fx.GraphModule) -> None:
    """Rewrite such gradients in a trace. On a GPU torch multiplies too."""
    for node in [*traced.graph.nodes]:
        if _is_spread(node) and not node.meta["val"].is_cuda:
            args: Any = node.args
            value = node.meta["val"]
            with traced.graph.inserting_before(node), value.fake_mode:
                zeros = traced.graph.call_function(
                    _aten.zeros.default, ([*value.shape],), {"dtype": value.dtype, "device": value.device}
                )
                made = traced.graph.call_function(_aten.masked_fill.Tensor, (zeros, *args))
                zeros.meta["val"], made.meta["val"] = (torch.zeros_like(value.contiguous()) for _ in range(2))
                made.meta["was"] = value
            node.replace_all_uses_with(made)
            traced.graph.erase_node(node)


def _is_spread(node: fx.Node) -> bool:
    """Whether it is `mask * (dy / mask.sum())` for the mask of a value's places in a tensor."""
    if node.target is not _aten.mul.Tensor:
        return False
    args: Any = node.args
    mask, share = args
    return (
        _calls(mask, _aten.logical_or_.default)
        and _calls(mask.args[0], _aten.eq.Tensor)
        and _calls(mask.args[1], _aten.logical_and.default)
        and [*map(_of_isnan, mask.args[1].args)] == [*map(_itself, mask.args[0].args)]
        and _calls(share, _aten.div.Tensor)
        and _calls(share.args[1], _aten.sum.default)
        and share.args[1].args == (mask,)
    )


def _calls(node: Any, op: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is op


def _of_isnan(node: Any) -> Any:
    return _itself(node.args[0]) if _calls(node, _aten.isnan.default) else None


def _itself(node: Any) -> Any:
    return _itself(node.args[0]) if _calls(node, _aten.detach.default) else node
