"""Tell which way of running a program a step needs: all that its instructions depend on, as one value to compare.

step(params, batch, state)    -->    containers, shapes, dtypes, strides, devices, modes, autocast, flags, threads
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import Untraceable, ambient
from fpipe.meaning.purity.own_memory import layout_of
from fpipe.meaning.purity.sharded import local_of, sharding_of
from fpipe.model import Model
from fpipe.positional_stage import of_net
from fpipe.torch_private.dispatch import has_own_functions


class Signature(tuple[Any, ...]):
    """The parts of a signature, of which the hash is found once: steps are told to be alike, and then looked up."""

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = super().__hash__()
        return self._hash


class Signatures:
    """The signatures of what one step is handed."""

    def __init__(self, model: Model) -> None:
        found = [(stage.forward, of_net(stage.forward)) for stage in model.stages]
        self._stages = [inner for _, inner in found if inner is not None]
        self._wrapped = [inner for outer, inner in found if inner is not None and inner is not outer]
        self._new, self._said, self._held = 0, False, model.held
        self._last: Any = None
        self._now = Signature()

    def of(
        self, leaves: Sequence[Any], containers: tree.Spec, homes: Iterable[torch.device] | None = None
    ) -> Signature:
        """The signature of these leaves in these containers, under what is around them now.

        Args:
            leaves, containers: of what a step is handed.
            homes: of an example, where each leaf is at home: those without data stand for tensors there.

        Raises:
            TypeError: a leaf cannot be compared.
            Untraceable: nothing can be traced under what is around them.
        """
        modes, now = [mode for stage in self._stages for mode in stage.modes()], self._now
        if self._held is not None:
            self._held.refuse_unfrozen()
            modes += self._held.modes()
        own = [leaf for stage in self._stages for leaf in stage.constants()]
        at_home = repeat(None) if homes is None else chain(homes, repeat(torch.get_default_device()))
        known = [*map(_known, chain(leaves, own), at_home)]
        inside = tuple(id(leaf) for stage in self._wrapped for leaf in stage.constants())  # of their traces
        found = (ambient(), tuple(modes), inside, containers, tree.odd_keys(containers), *known)
        if found != now:
            now = Signature(found)
            hash(now)  # what cannot be hashed is told here, and never compared
            self._now = now
        return now

    def count(self, signature: Any, given: Any, seconds: float) -> None:
        """Note that a step was traced for a signature, and say what changed: the first time that this takes long, and
        if it happens again and again."""
        self._new += 1
        if self._new > 1 and seconds > _LONG and not self._said:
            self._said = True
            _LOG.warning(
                "this step was traced again, which took %.1f s: %s. For what was handed in before it is not traced "
                "again; a last batch with fewer rows is best dropped (DataLoader(..., drop_last=True)) or padded.",
                seconds,
                _changed(self._last, signature, given),
            )
        if self._new == _OFTEN + 1:
            warnings.warn(
                f"this step was traced again {_OFTEN} times, since each step was handed something else: last time "
                f"{_changed(self._last, signature, given)}. Hand in a number that changes as a 0-d tensor, cut or pad "
                "batches to few sizes, or build with trace=False.",
                stacklevel=3,
            )
        self._last = signature


_OFTEN = 8
_LONG = 0.5
"""Seconds."""
_LOG = logging.getLogger("fpipe")


_TENSORS = (Tensor, torch.nn.Parameter)


def _known(leaf: Any, home: torch.device | None) -> Any:
    """Properties of a leaf on which traces depend; of one without data, where it is at `home`."""
    if isinstance(leaf, Tensor):
        try:
            own = local_of(leaf)
            known = own.stride(), own.shape, own.dtype, home if home is not None and own.is_meta else own.device
            known = known if own is leaf else (*known, sharding_of(leaf))
        except RuntimeError:
            raise Untraceable(f"it is handed a {layout_of(leaf)}") from None
        if type(leaf) not in _TENSORS and not leaf.is_nested and has_own_functions(type(leaf)):
            raise Untraceable(f"it is handed a {type(leaf).__name__}, whose __torch_function__ a trace would not call")
        return known
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf  # -0.0 is not 0.0


def _changed(before: Any, now: Any, given: Any) -> str:
    """The first difference of two signatures, in words."""
    words = (
        "autocast, a flag or the number of threads",
        "the mode of a module",
        "a buffer or a frozen parameter of a module",
        "the containers",
        "the keys of a dict",
    )
    for word, one, other in zip(words, before, now, strict=False):
        if one != other:
            return f"{word} changed"
    names = [name for name, _ in tree.paths(dict(zip(("params", "batch", "state", "opt"), given, strict=True)))]
    pairs = zip(before[len(words) :], now[len(words) :], strict=True)
    at, one, other = next((at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    if at >= len(names):
        return "a buffer or a frozen parameter changed its shape, dtype or strides"
    root, _, rest = names[at].removeprefix("['").partition("']")
    return f"{root}{rest} was {_shown(one)} and is {_shown(other)}"


def _shown(known: Any) -> str:
    if len(known) == 2:
        return str(known[1])
    stride, shape, dtype, device, *_ = known
    return f"{str(dtype).removeprefix('torch.')}{[*shape]} with strides {[*stride]} on {device}"
