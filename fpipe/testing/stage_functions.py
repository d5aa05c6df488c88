"""The stage functions of drawn models: eight small ones over parameters and rows of four numbers, and three losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

Body = Literal["linear", "mlp", "attention", "conv", "dict", "plain", "tied", "twice"]
Params = dict[str, Tensor]


def gathered(x: Any) -> Tensor:
    """One tensor from whatever a stage takes: a tensor, the dict of a "dict" stage, a tuple of these."""
    if isinstance(x, tuple):
        return reduce(torch.add, map(gathered, x))
    if isinstance(x, dict):
        return (x["h"] * x["gate"]).masked_fill(x["ids"].unsqueeze(1) == 0, 0.5)
    return x


def linear(p: Params, x: Any) -> Tensor:
    """One matrix and a bias."""
    return gathered(x) @ p["w"] + p["b"]


def mlp(p: Params, x: Any) -> Tensor:
    """Two matrices with a ReLU between, around a residual."""
    h = gathered(x)
    return h + torch.relu(h @ p["w"] + p["b"]) @ p["v"]


def attention(p: Params, x: Any) -> Tensor:
    """Attention between the two halves of a row."""
    q, k, v = (gathered(x) @ p["qkv"]).chunk(3, dim=1)
    q, k, v = (part.view(-1, 2, 2) for part in (q, k, v))
    return (torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v).reshape(-1, 4) @ p["o"]


def conv(p: Params, x: Any) -> Tensor:
    """A convolution along a row."""
    return torch.nn.functional.conv1d(gathered(x).unsqueeze(1), p["w"], p["b"], padding=1).tanh().mean(1)


def many(p: Params, x: Any) -> dict[str, Any]:
    """A dict of tensors: two with a gradient, one of integers, and None."""
    h = gathered(x)
    return {"h": h @ p["w"], "nothing": None, "ids": h.argmax(1), "gate": torch.sigmoid(h + p["b"])}


def plain(p: Params, x: Any) -> Tensor:
    """No parameters."""
    return torch.tanh(gathered(x))


def tied(p: Params, x: Any) -> Tensor:
    """A matrix that all stages of this kind share."""
    return torch.tanh(gathered(x) @ p["e"]) + p["b"]


def twice(p: Params, x: Any) -> Tensor:
    """One matrix used twice, with another between."""
    return torch.tanh(gathered(x) @ p["w"]) @ p["v"] @ p["w"]


BODIES: dict[Body, Callable[..., Any]] = {
    "linear": linear,
    "mlp": mlp,
    "attention": attention,
    "conv": conv,
    "dict": many,
    "plain": plain,
    "tied": tied,
    "twice": twice,
}
SHAPES: dict[Body, dict[str, tuple[int, ...]]] = {
    "linear": {"w": (4, 4), "b": (4,)},
    "mlp": {"w": (4, 6), "b": (6,), "v": (6, 4)},
    "attention": {"qkv": (4, 12), "o": (4, 4)},
    "conv": {"w": (3, 1, 3), "b": (3,)},
    "dict": {"w": (4, 4), "b": (4,), "unused": (2,)},
    "plain": {},
    "tied": {"e": (4, 4), "b": (4,)},
    "twice": {"w": (4, 4), "v": (4, 4)},
}


def _squares(y: Any, target: Tensor) -> Tensor:
    return (gathered(y) - target).square().sum(1)


def _mean(y: Any, target: Tensor) -> Tensor:
    return _squares(y, target).mean()


def _sum(y: Any, target: Tensor) -> Tensor:
    return _squares(y, target).sum()


def _counted(y: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target[:, 0] > -0.5
    return (_squares(y, target) * kept).sum(), kept.sum()


LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {"mean": _mean, "sum": _sum, "count": _counted}
