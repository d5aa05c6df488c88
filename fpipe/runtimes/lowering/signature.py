"""Describe all that a step's instructions depend on as one value to compare and look up.

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
    """The parts of a signature, which hashes them once."""

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = super().__hash__()
        return self._hash


class Signatures:
    """The signatures of a step's arguments."""

    def __init__(self, model: Model) -> None:
        pairs = [(stage.forward, of_net(stage.forward)) for stage in model.stages]
        self._stages = [inner for _, inner in pairs if inner is not None]
        self._wrapped = [inner for outer, inner in pairs if inner is not None and inner is not outer]
        self._new, self._said, self._held = 0, False, model.held
        self._last: Any = None
        self._now = Signature()

    def of(
        self, leaves: Sequence[Any], containers: tree.Spec, homes: Iterable[torch.device] | None = None
    ) -> Signature:
        """Return the signature of these leaves in these containers, under the flags and modes that are on now.

        Args:
            leaves, containers: of what a step is handed.
            homes: of an example, the device of each leaf, for leaves without data.

        Raises:
            TypeError: a leaf cannot be compared.
            Untraceable: nothing can be traced under these modes.
        """
        modes, now = [mode for stage in self._stages for mode in stage.modes()], self._now
        if self._held is not None:
            self._held.refuse_unfrozen()
            modes += self._held.modes()
        constants = [leaf for stage in self._stages for leaf in stage.constants()]
        at_home = repeat(None) if homes is None else chain(homes, repeat(torch.get_default_device()))
        known = [*map(_known, chain(leaves, constants), at_home)]
        inside = tuple(id(leaf) for stage in self._wrapped for leaf in stage.constants())  # of their traces
        parts = (ambient(), tuple(modes), inside, containers, tree.odd_keys(containers), *known)
        if parts != now:
            now = Signature(parts)
            hash(now)  # a TypeError for what cannot be hashed
            self._now = now
        return now

    def count(self, signature: Any, given: Any, seconds: float) -> None:
        """Note that a step was traced for a signature; warn of what changed the first time that this takes long, and
        when it happens often."""
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
    """Return the properties of a leaf on which traces depend; a leaf without data stands for one on `home`."""
    if isinstance(leaf, Tensor):
        try:
            local = local_of(leaf)
            device = home if home is not None and local.is_meta else local.device
            known = local.stride(), local.shape, local.dtype, device
            known = known if local is leaf else (*known, sharding_of(leaf))
        except RuntimeError:
            raise Untraceable(f"it is handed a {layout_of(leaf)}") from None
        if type(leaf) not in _TENSORS and not leaf.is_nested and has_own_functions(type(leaf)):
            raise Untraceable(f"it is handed a {type(leaf).__name__}, whose __torch_function__ a trace would not call")
        return known
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf  # -0.0 is not 0.0


def _changed(before: Any, now: Any, given: Any) -> str:
    """Describe the first difference of two signatures."""
    words = (
        "autocast, a flag or the number of threads",
        "the mode of a module",
        "a buffer or a frozen parameter of a module",
        "the containers",
        "the keys of a dict",
    )
    for word, old, new in zip(words, before, now, strict=False):
        if old != new:
            return f"{word} changed"
    names = [name for name, _ in tree.paths(dict(zip(("params", "batch", "state", "opt"), given, strict=True)))]
    pairs = zip(before[len(words) :], now[len(words) :], strict=True)
    at, old, new = next((at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    if at >= len(names):
        return "a buffer or a frozen parameter changed its shape, dtype or strides"
    root, _, rest = names[at].removeprefix("['").partition("']")
    return f"{root}{rest} was {_shown(old)} and is {_shown(new)}"


def _shown(known: Any) -> str:
    if len(known) == 2:
        return str(known[1])
    stride, shape, dtype, device, *_ = known
    return f"{str(dtype).removeprefix('torch.')}{[*shape]} with strides {[*stride]} on {device}"
