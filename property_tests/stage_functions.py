"""The stages of drawn models: layers by name, one after the other and inside each other, and three losses.

A new layer joins by one `row`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fpipe import tree

Params = dict[str, Any]
Shape = tuple[str | int, ...]


class Layer(NamedTuple):
    """A function of parameters and a tensor `[rows, width]` or `[rows, time, width]` to one of that shape.

    Attributes:
        shapes: of its parameters; "n" is the width, "3n" three times it. One called "e" is one in all of a stage.
        in_place: whether it works in place, on a tensor that it makes itself.
    """

    apply: Callable[[Params, Tensor], Tensor]
    shapes: dict[str, Shape]
    in_place: bool = False


LAYERS: dict[str, Layer] = {}


def row(name: str, apply: Callable[[Params, Tensor], Tensor], in_place: bool = False, **shapes: Any) -> None:
    """Give a layer its name."""
    LAYERS[name] = Layer(apply, shapes, in_place)


N, NN = ("n",), ("n", "n")


def halves(p: Params, h: Tensor) -> Tensor:
    """Attention between the two halves of a row."""
    q, k, v = (part.unflatten(-1, (2, -1)) for part in (h @ p["qkv"]).chunk(3, -1))
    return (torch.softmax(q @ k.mT, -1) @ v).flatten(-2) @ p["o"]


def along(p: Params, h: Tensor) -> Tensor:
    """A convolution along a row."""
    return F.conv1d(h.reshape(-1, 1, h.shape[-1]), p["w"], p["b"], padding=1).tanh().mean(1).view(h.shape)


row("linear", lambda p, h: F.linear(h, p["w"], p["b"]), w=NN, b=N)
row("mlp", lambda p, h: h + torch.relu(h @ p["w"] + p["b"]) @ p["v"], w=("n", 6), b=(6,), v=(6, "n"))
row("attention", halves, qkv=("n", "3n"), o=NN)
row("conv", along, w=(3, 1, 3), b=(3,))
row("tied", lambda p, h: torch.tanh(h @ p["e"]) + p["b"], e=NN, b=N)
row("twice", lambda p, h: torch.tanh(h @ p["w"]) @ p["v"] @ p["w"], w=NN, v=NN)
row("unused", lambda p, h: torch.sin(h), w=NN)
row("tanh", lambda p, h: torch.tanh(h))


@dataclass(frozen=True)
class Within:
    """Layers with something around them, by its name in `AROUND`."""

    how: str
    layers: tuple[str | Within, ...]


def _checkpointed(inner: Callable[[Tensor], Tensor], h: Tensor) -> Any:
    return checkpoint(inner, h, use_reentrant=False)


def _autocast(inner: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        made = inner(h)
    return made.to(h.dtype)


AROUND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "residual": lambda inner, h: h + inner(h),
    "twice": lambda inner, h: inner(inner(h)),
    "both": lambda inner, h: inner(h) + inner(h.flip(-1)),
    "gated": lambda inner, h: h * inner(h).sigmoid(),
    "columns": lambda inner, h: inner(h.flip(0)).flip(0),
    "checkpoint": _checkpointed,
    "autocast": _autocast,
}


def _several(p: Params, x: Tensor, h: Tensor) -> dict[str, Any]:
    return {"h": h, "ids": h.argmax(-1), "nothing": (None, []), "more": [h.sin()]}


RETURNS: dict[str, Callable[[Params, Tensor, Tensor], Any]] = {
    "h": lambda p, x, h: h,
    "dict": _several,
}
"""From parameters, the first tensor that a stage takes, and what its layers made."""


def _applied(layers: tuple[str | Within, ...], p: Params, at: str, h: Tensor) -> Tensor:
    for name, one in _named(layers, at):
        if isinstance(one, Within):
            h = AROUND[one.how](partial(_applied, one.layers, p, name), h)
        else:
            h = LAYERS[one].apply({key: p[key if key == "e" else name + key] for key in LAYERS[one].shapes}, h)
    return h


def _named(layers: tuple[str | Within, ...], at: str) -> Iterator[tuple[str, str | Within]]:
    """Each with the begin of its parameters' names, which is its number if there are several."""
    return ((f"{at}{number}." if len(layers) > 1 else at, one) for number, one in enumerate(layers))


def _shapes(layers: tuple[str | Within, ...], at: str = "") -> Iterator[tuple[str, Shape]]:
    for name, one in _named(layers, at):
        if isinstance(one, Within):
            yield from _shapes(one.layers, name)
        else:
            yield from ((key if key == "e" else name + key, shape) for key, shape in LAYERS[one].shapes.items())


def all_words(layers: tuple[str | Within, ...]) -> Iterator[str]:
    """The names of layers, and of what is around them."""
    for one in layers:
        yield from (one.how, *all_words(one.layers)) if isinstance(one, Within) else (one,)


def sized(shape: Shape, width: int) -> list[int]:
    """The numbers of a shape.

    >>> sized(("n", "3n", 2), 4)
    [4, 12, 2]
    """
    return [int(size.removesuffix("n") or 1) * width if isinstance(size, str) else size for size in shape]


def _in_memory(how: str, leaf: Tensor) -> Tensor:
    if how == "strided":
        spread = leaf.new_zeros((*leaf.shape, 2))
        spread[..., 0] = leaf
        return spread[..., 0]
    if how == "transposed" and leaf.ndim > 1:
        return leaf.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "misaligned":
        room = leaf.new_zeros(leaf.numel() + 1)
        room[1:] = leaf.reshape(-1)
        return room[1:].view(leaf.shape)
    if how == "expanded" and leaf.ndim:
        return leaf[:1].expand(leaf.shape)
    return leaf


@dataclass(frozen=True)
class DrawnStage:
    """A stage function as a recipe: its layers, what it takes and returns, and how its tensors lie in memory.

    >>> stage = DrawnStage(("linear", Within("residual", ("tanh",))))
    >>> sorted(stage.params()), stage(stage.params(), stage.input(rows=3)).shape
    (['0.b', '0.w'], torch.Size([3, 4]))
    """

    layers: tuple[str | Within, ...]
    width: int = 4
    time: int = 0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    takes: Literal["first", "all"] = "first"
    returns: str = "h"
    given: str = "plain"
    held: Literal["plain", "strided", "transposed", "misaligned", "one memory"] = "plain"

    @property
    def words(self) -> set[str]:
        """All its layers, and what is around them."""
        return {*all_words(self.layers)}

    @property
    def shapes(self) -> dict[str, Shape]:
        """Its parameters."""
        return dict(_shapes(self.layers))

    @property
    def function(self) -> Callable[[Any, Any], Any]:
        """The stage function, one object for equal recipes, so that its traces are shared."""
        return _function(self)

    def fresh(self) -> Callable[[Any, Any], Any]:
        """A function that nobody has traced."""
        return lambda p, x: self(p, x)

    def __call__(self, p: Params, x: Any) -> Any:
        """Its layers on the first tensor that it takes, with `takes="all"` on the sum of all."""
        first, *more = (leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor))
        h = first.to(getattr(torch, self.dtype))
        for leaf in more if self.takes == "all" else ():
            leaf = leaf.to(h.dtype)
            a_row = leaf.shape == h.shape[:-1]
            h = h + (leaf if leaf.shape == h.shape else leaf.tanh().unsqueeze(-1) if a_row else leaf.tanh().mean())
        return RETURNS[self.returns](p, first, _applied(self.layers, p, "", h))

    def params(self, seed: int = 0) -> Params:
        """Its parameters, by name."""
        make = torch.Generator().manual_seed(seed)
        dtype, found = getattr(torch, self.dtype), Params()
        for name, shape in self.shapes.items():
            if shape == ("order",):
                found[name] = torch.randperm(self.width, generator=make)
            else:
                found[name] = (0.5 * torch.randn(sized(shape, self.width), generator=make)).to(dtype)
        if self.held == "one memory":
            floats = [leaf for leaf in found.values() if leaf.is_floating_point()]
            whole = torch.cat([torch.zeros(1, dtype=dtype), *(leaf.reshape(-1) for leaf in floats)])
            parts = iter(whole[1:].split([leaf.numel() for leaf in floats]) if floats else ())
            return {k: next(parts).view(v.shape) if v.is_floating_point() else v for k, v in found.items()}
        return {name: _in_memory(self.held, leaf) for name, leaf in found.items()}

    def input(self, rows: int, seed: int = 1) -> Any:
        """A tensor `[rows, width]`, or `[rows, time, width]`, or several, as `given` says."""
        make = torch.Generator().manual_seed(seed)

        def draw() -> Tensor:
            shape = (rows, *([self.time] if self.time else []), self.width)
            return torch.randn(shape, generator=make).to(getattr(torch, self.dtype))

        if self.given == "pair":
            return draw(), torch.randint(8, (rows,), generator=make)
        if self.given == "two":
            return draw(), draw()
        if self.given == "one twice":
            return (one := draw(), one)
        if self.given == "dict":
            return {"a": draw(), "mask": draw() > 0, "nothing": None, "other": [draw().double()]}
        return _in_memory(self.given, draw())


@functools.cache
def _function(stage: DrawnStage) -> Callable[[Any, Any], Any]:
    return stage.fresh()


BODIES = {
    name: DrawnStage((name,), takes="all") for name in ("linear", "mlp", "attention", "conv", "tied", "twice")
} | {
    "dict": DrawnStage(("linear", "unused"), takes="all", returns="dict"),
    "plain": DrawnStage(("tanh",), takes="all"),
}
"""Small stages that have names of their own."""


def total(y: Any, target: Tensor) -> Tensor:
    """Something of every tensor of an output."""
    found = target.square().mean()
    for leaf in tree.leaves(y):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf = leaf.to(target.dtype)
            found = found + (leaf - target if leaf.shape == target.shape else leaf).sin().mean()
    return found


LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "mean": total,
    "sum": lambda y, target: total(y, target) * len(target),
    "count": lambda y, target: (total(y, target) * len(target), (target[:, 0] > -0.5).sum()),
}
