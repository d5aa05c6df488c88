"""Tell which way of running a program a step needs: all that its calls are made for, as one value to compare.

step(params, batch, state)    -->    containers, shapes, dtypes, strides, devices, modes, autocast, flags, threads
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.ambient import ambient
from fpipe.models import Model
from fpipe.stage_module import StageModule


class Signatures:
    """The signatures of what one step is handed."""

    def __init__(self, model: Model) -> None:
        self._modules = [stage.forward for stage in model.stages if isinstance(stage.forward, StageModule)]
        self._new = 0
        self._last: Any = None

    def of(self, leaves: Sequence[Any], containers: tree.Spec) -> Any:
        """The signature of these leaves in these containers, under what is around them now.

        Raises:
            Untraceable: nothing can be traced under what is around them.
        """
        modes = tuple(mode for module in self._modules for mode in module.modes())
        own = (leaf for module in self._modules for leaf in module.constants())
        return ambient(), modes, containers, tree.odd_keys(containers), *map(_known, leaves), *map(_known, own)

    def count(self, signature: Any, given: Any) -> None:
        """Note that a step was traced for a signature, and say what changes if that happens again and again."""
        self._new += 1
        if self._new == _OFTEN + 1:
            warnings.warn(
                f"this step was traced again {_OFTEN} times, since each step was handed something else: last time "
                f"{_changed(self._last, signature, given)}. Hand in a number that changes as a 0-d tensor, cut or pad "
                "batches to few sizes, or build with trace=False.",
                stacklevel=3,
            )
        self._last = signature


_OFTEN = 8


def _known(leaf: Any) -> Any:
    """What of a leaf the traces depend on."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, torch.get_default_device() if leaf.is_meta else leaf.device
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf  # -0.0 is not 0.0


def _changed(before: Any, now: Any, given: Any) -> str:
    """The first difference of two signatures, in words."""
    words = (
        "autocast, a flag or the number of threads",
        "the mode of a module",
        "the containers",
        "the keys of a dict",
    )
    for word, one, other in zip(words, before, now, strict=False):
        if one != other:
            return f"{word} changed"
    names = [name for name, _ in tree.paths(dict(zip(("params", "batch", "state"), given, strict=True)))]
    pairs = zip(before[len(words) :], now[len(words) :], strict=True)
    at, one, other = next((at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    if at >= len(names):
        return "a buffer or a frozen parameter changed its shape, dtype or strides"
    root, _, rest = names[at].removeprefix("['").partition("']")
    return f"{root}{rest} was {_shown(one)} and is {_shown(other)}"


def _shown(known: Any) -> str:
    if len(known) == 2:
        return str(known[1])
    shape, stride, dtype, device = known
    return f"{str(dtype).removeprefix('torch.')}{[*shape]} with strides {[*stride]} on {device}"
