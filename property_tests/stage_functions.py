"""Define the stages of drawn models: layers by name, in a row or nested, and three losses.

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
    LAYERS[name] = Layer(apply, shapes, in_place)


N, NN = ("n",), ("n", "n")


def attend_halves(p: Params, h: Tensor) -> Tensor:
    """Attention between the two halves of a row."""
    q, k, v = (part.unflatten(-1, (2, -1)) for part in (h @ p["qkv"]).chunk(3, -1))
    return (torch.softmax(q @ k.mT, -1) @ v).flatten(-2) @ p["o"]


def convolve_rows(p: Params, h: Tensor) -> Tensor:
    """A convolution along a row."""
    return F.conv1d(h.reshape(-1, 1, h.shape[-1]), p["w"], p["b"], padding=1).tanh().mean(1).view(h.shape)


row("linear", lambda p, h: F.linear(h, p["w"], p["b"]), w=NN, b=N)
row("mlp", lambda p, h: h + torch.relu(h @ p["w"] + p["b"]) @ p["v"], w=("n", 6), b=(6,), v=(6, "n"))
row("attention", attend_halves, qkv=("n", "3n"), o=NN)
row("conv", convolve_rows, w=(3, 1, 3), b=(3,))
row("tied", lambda p, h: torch.tanh(h @ p["e"]) + p["b"], e=NN, b=N)
row("twice", lambda p, h: torch.tanh(h @ p["w"]) @ p["v"] @ p["w"], w=NN, v=NN)
row("unused", lambda p, h: torch.sin(h), w=NN)
row("tanh", lambda p, h: torch.tanh(h))


@dataclass(frozen=True)
class Wrapped:
    """Layers inside a wrapper, by the wrapper's name in `AROUND`."""

    wrapper: str
    layers: tuple[str | Wrapped, ...]


def _checkpointed(body: Callable[[Tensor], Tensor], h: Tensor) -> Any:
    return checkpoint(body, h, use_reentrant=False)


def _autocast(body: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = body(h)
    return output.to(h.dtype)


AROUND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "residual": lambda body, h: h + body(h),
    "twice": lambda body, h: body(body(h)),
    "both": lambda body, h: body(h) + body(h.flip(-1)),
    "gated": lambda body, h: h * body(h).sigmoid(),
    "columns": lambda body, h: body(h.flip(0)).flip(0),
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


def _apply_layers(layers: tuple[str | Wrapped, ...], p: Params, prefix: str, h: Tensor) -> Tensor:
    for name, layer in _with_prefix(layers, prefix):
        if isinstance(layer, Wrapped):
            h = AROUND[layer.wrapper](partial(_apply_layers, layer.layers, p, name), h)
        else:
            h = LAYERS[layer].apply({key: p[key if key == "e" else name + key] for key in LAYERS[layer].shapes}, h)
    return h


def _with_prefix(layers: tuple[str | Wrapped, ...], prefix: str) -> Iterator[tuple[str, str | Wrapped]]:
    """Yield each layer with the prefix of its parameters' names: its number, if there are several layers."""
    return ((f"{prefix}{number}." if len(layers) > 1 else prefix, layer) for number, layer in enumerate(layers))


def _shapes(layers: tuple[str | Wrapped, ...], prefix: str = "") -> Iterator[tuple[str, Shape]]:
    for name, layer in _with_prefix(layers, prefix):
        if isinstance(layer, Wrapped):
            yield from _shapes(layer.layers, name)
        else:
            yield from ((key if key == "e" else name + key, shape) for key, shape in LAYERS[layer].shapes.items())


def names_of_layers(layers: tuple[str | Wrapped, ...]) -> Iterator[str]:
    """Yield the names of layers and wrappers."""
    for layer in layers:
        yield from (layer.wrapper, *names_of_layers(layer.layers)) if isinstance(layer, Wrapped) else (layer,)


def sized(shape: Shape, width: int) -> list[int]:
    """Return a shape in numbers.

    >>> sized(("n", "3n", 2), 4)
    [4, 12, 2]
    """
    return [int(size.removesuffix("n") or 1) * width if isinstance(size, str) else size for size in shape]


def _laid_out(layout: str, leaf: Tensor) -> Tensor:
    if layout == "strided":
        spread = leaf.new_zeros((*leaf.shape, 2))
        spread[..., 0] = leaf
        return spread[..., 0]
    if layout == "transposed" and leaf.ndim > 1:
        return leaf.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "misaligned":
        room = leaf.new_zeros(leaf.numel() + 1)
        room[1:] = leaf.reshape(-1)
        return room[1:].view(leaf.shape)
    if layout == "expanded" and leaf.ndim:
        return leaf[:1].expand(leaf.shape)
    return leaf


@dataclass(frozen=True)
class DrawnStage:
    """A recipe of a stage function: its layers, inputs and outputs, and the layout of its tensors in memory.

    >>> stage = DrawnStage(("linear", Wrapped("residual", ("tanh",))))
    >>> sorted(stage.params()), stage(stage.params(), stage.input(rows=3)).shape
    (['0.b', '0.w'], torch.Size([3, 4]))
    """

    layers: tuple[str | Wrapped, ...]
    width: int = 4
    time: int = 0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    takes: Literal["first", "all"] = "first"
    returns: str = "h"
    input_kind: str = "plain"
    param_layout: Literal["plain", "strided", "transposed", "misaligned", "one memory"] = "plain"

    @property
    def layer_names(self) -> set[str]:
        """The names of all layers and wrappers."""
        return {*names_of_layers(self.layers)}

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict(_shapes(self.layers))

    @property
    def function(self) -> Callable[[Any, Any], Any]:
        """The stage function, one object for equal recipes, so that they share traces."""
        return _function(self)

    def fresh(self) -> Callable[[Any, Any], Any]:
        """Return a function that has no trace yet."""
        return lambda p, x: self(p, x)

    def __call__(self, p: Params, x: Any) -> Any:
        """Run the layers on the first input tensor, or with `takes="all"` on the sum of all."""
        first_input, *other_inputs = (leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor))
        h = first_input.to(getattr(torch, self.dtype))
        for leaf in other_inputs if self.takes == "all" else ():
            leaf = leaf.to(h.dtype)
            a_row = leaf.shape == h.shape[:-1]
            h = h + (leaf if leaf.shape == h.shape else leaf.tanh().unsqueeze(-1) if a_row else leaf.tanh().mean())
        return RETURNS[self.returns](p, first_input, _apply_layers(self.layers, p, "", h))

    def params(self, seed: int = 0) -> Params:
        make = torch.Generator().manual_seed(seed)
        dtype, params = getattr(torch, self.dtype), Params()
        for name, shape in self.shapes.items():
            if shape == ("order",):
                params[name] = torch.randperm(self.width, generator=make)
            else:
                params[name] = (0.5 * torch.randn(sized(shape, self.width), generator=make)).to(dtype)
        if self.param_layout == "one memory":
            floats = [leaf for leaf in params.values() if leaf.is_floating_point()]
            memory = torch.cat([torch.zeros(1, dtype=dtype), *(leaf.reshape(-1) for leaf in floats)])
            parts = iter(memory[1:].split([leaf.numel() for leaf in floats]) if floats else ())
            return {k: next(parts).view(v.shape) if v.is_floating_point() else v for k, v in params.items()}
        return {name: _laid_out(self.param_layout, leaf) for name, leaf in params.items()}

    def input(self, rows: int, seed: int = 1) -> Any:
        """Draw a tensor `[rows, width]` or `[rows, time, width]`, or several, as `input_kind` says."""
        make = torch.Generator().manual_seed(seed)

        def draw() -> Tensor:
            shape = (rows, *([self.time] if self.time else []), self.width)
            return torch.randn(shape, generator=make).to(getattr(torch, self.dtype))

        if self.input_kind == "pair":
            return draw(), torch.randint(8, (rows,), generator=make)
        if self.input_kind == "two":
            return draw(), draw()
        if self.input_kind == "one twice":
            return (tensor := draw(), tensor)
        if self.input_kind == "dict":
            return {"a": draw(), "mask": draw() > 0, "nothing": None, "other": [draw().double()]}
        return _laid_out(self.input_kind, draw())


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
    """Return a loss that depends on every floating-point tensor of an output."""
    loss = target.square().mean()
    for leaf in tree.leaves(y):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf = leaf.to(target.dtype)
            loss = loss + (leaf - target if leaf.shape == target.shape else leaf).sin().mean()
    return loss


LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "mean": total,
    "sum": lambda y, target: total(y, target) * len(target),
    "count": lambda y, target: (total(y, target) * len(target), (target[:, 0] > -0.5).sum()),
}
