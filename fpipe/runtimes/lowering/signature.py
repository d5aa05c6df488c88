"""Describe everything that a step's instructions depend on as one hashable value.

step(params, batch, state)    -->    containers, shapes, dtypes, strides, devices, modes, autocast, flags, threads
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import Untraceable, ambient_key
from fpipe.meaning.purity.sharded import local_shard, sharding_of
from fpipe.meaning.purity.write_guard import layout_of
from fpipe.model import Model
from fpipe.positional_stage import net_stage_of
from fpipe.torch_internals import logger_of, warn
from fpipe.torch_private.dispatch import overrides_torch_functions


class Signature(tuple[Any, ...]):
    """The parts of a signature, as a tuple that computes its hash once."""

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = super().__hash__()
        return self._hash


class Signatures:
    """Computes the signatures of a step's arguments, and warns if they change too often."""

    def __init__(self, model: Model) -> None:
        pairs = [(stage.forward, net_stage_of(stage.forward)) for stage in model.stages]
        self._stages = [net for _, net in pairs if net is not None]
        self._wrapped = [net for function, net in pairs if net is not None and net is not function]
        self._trace_count, self._has_warned, self._fingerprint = 0, False, model.fingerprint
        self._last_traced: Any = None
        self._current = Signature()

    def of(
        self, leaves: Sequence[Any], containers: tree.Spec, homes: Iterable[torch.device] | None = None
    ) -> Signature:
        """Return the signature of these leaves in these containers, under the flags and modes that are on now.

        Args:
            leaves, containers: the flattened arguments of a step.
            homes: the device of each leaf, for an example whose leaves are without data.

        Raises:
            TypeError: a leaf cannot be compared.
            Untraceable: nothing can be traced under these modes.
        """
        modes = [mode for stage in self._stages for mode in stage.modes()]
        if self._fingerprint is not None:
            self._fingerprint.refuse_changed_requires_grad()
            modes += self._fingerprint.modes()
        constants = [leaf for stage in self._stages for leaf in stage.constants()]
        device_by_leaf = repeat(None) if homes is None else chain(homes, repeat(torch.get_default_device()))
        leaf_properties = [*map(_leaf_properties, chain(leaves, constants), device_by_leaf)]
        # Where a transform of the model wraps a net, its traces keep the constants of the net: compare identities.
        constant_ids = tuple(id(leaf) for stage in self._wrapped for leaf in stage.constants())
        constant_ids += tuple(id(leaf) for stage in self._stages for leaf in stage.wrappers())
        parts = (
            ambient_key(),
            tuple(modes),
            constant_ids,
            containers,
            tree.mixed_key_text(containers),
            *leaf_properties,
        )
        # Most steps have the signature of the step before them: one comparison, and no hash.
        if parts != self._current:
            signature = Signature(parts)
            # Raises TypeError here, in front of the caller, if a leaf cannot be hashed.
            hash(signature)
            self._current = signature
        return self._current

    def note_trace(self, signature: Any, arguments: Any, seconds: float, has_closed_sizes: bool) -> None:
        """Note that a step was traced for a signature, and say what changed if that is slow or happens often.

        `has_closed_sizes` says that further sizes cannot share a trace, and will run by the definition at first.
        """
        self._trace_count += 1
        if self._trace_count > 1 and seconds > _SLOW_TRACE and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "this step was traced again, which took %.1f s: %s.%s",
                seconds,
                _describe_change(self._last_traced, signature, arguments),
                _CLOSED_SIZES if has_closed_sizes else "",
            )
        if self._trace_count == _MAX_TRACES + 1:
            change = _describe_change(self._last_traced, signature, arguments)
            warn(
                f"this step was traced again {_MAX_TRACES} times, since each step was handed something else: last time "
                f"{change}. Hand in a number that changes as a 0-d tensor, pad batches to few sizes, or build with "
                "trace=False.",
                stacklevel=3,
            )
        self._last_traced = signature


_MAX_TRACES = 8
TRACED_VISIT = 5
"""The visit at which a step is traced for sizes that cannot share a trace: a trace pays from about five steps on."""
_CLOSED_SIZES = (
    f" Sizes cannot share a trace here: further ones run under autograd until they come {TRACED_VISIT} times. "
    "Drop a last batch with fewer rows (drop_last=True), or pad to few lengths (fpipe.pad)."
)
_SLOW_TRACE = 0.5
"""Seconds after which a second trace is worth a line in the log."""
_LOG = logger_of(__name__)


_TENSORS = (Tensor, torch.nn.Parameter)


def _leaf_properties(leaf: Any, home: torch.device | None) -> Any:
    """Return the properties of a leaf on which traces depend; a leaf without data stands for one on `home`."""
    if isinstance(leaf, Tensor):
        try:
            local = local_shard(leaf)
            device = home if home is not None and local.is_meta else local.device
            properties = local.stride(), local.shape, local.dtype, device
            properties = properties if local is leaf else (*properties, sharding_of(leaf))
        except RuntimeError:
            raise Untraceable(f"it is handed a {layout_of(leaf)}") from None
        return (*properties, type(leaf)) if _overrides_functions(leaf) else properties
    # By its text, since 0.0 == -0.0 and nan != nan.
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def _overrides_functions(leaf: Any) -> bool:
    is_plain = not isinstance(leaf, Tensor) or type(leaf) in _TENSORS or leaf.is_nested
    return not is_plain and overrides_torch_functions(type(leaf))


def refuse_overriding_tensors(model: Model, params: Sequence[Any], batch: Any, untraced: Collection[int]) -> None:
    """Raise Untraceable for tensors whose class has a `__torch_function__`, which a trace would not call.

    Of parameters the error names the stage; those of stages that run untraced pass.
    """
    for stage, leaves in [*enumerate(map(tree.leaves, params)), (None, tree.leaves(batch))]:
        for leaf in filter(_overrides_functions, leaves if stage not in untraced else ()):
            reason = f"it is handed a {type(leaf).__name__}, whose __torch_function__ a trace would not call"
            error = Untraceable(reason)
            raise error if stage is None else error.for_stage(stage, model.label_of(stage))


def _describe_change(previous: Any, current: Any, arguments: Any) -> str:
    part_names = (
        "autocast, a flag or the number of threads",
        "the mode of a module",
        "a buffer or a frozen parameter of a module",
        "the containers",
        "the keys of a dict",
    )
    for part, old, new in zip(part_names, previous, current, strict=False):
        if old != new:
            return f"{part} changed"
    paths = [name for name, _ in tree.paths(dict(zip(("params", "batch", "state", "opt"), arguments, strict=True)))]
    pairs = zip(previous[len(part_names) :], current[len(part_names) :], strict=True)
    index, old, new = next((index, *pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
    if index >= len(paths):
        return "a buffer or a frozen parameter changed its shape, dtype or strides"
    root, _, leaf_path = paths[index].removeprefix("['").partition("']")
    changed = _changed_dims(old, new)
    dims = f" (dimension {' and '.join(map(str, changed))})" if changed else ""
    return f"{root}{leaf_path} was {_describe_properties(old)} and is {_describe_properties(new)}{dims}"


def _changed_dims(old: Any, new: Any) -> list[int]:
    if len(old) == 2 or len(new) == 2:
        return []
    return [dim for dim, sizes in enumerate(zip(old[1], new[1], strict=False)) if sizes[0] != sizes[1]]


def _describe_properties(properties: Any) -> str:
    if len(properties) == 2:
        return str(properties[1])
    stride, shape, dtype, device, *_ = properties
    return f"{str(dtype).removeprefix('torch.')}{[*shape]} with strides {[*stride]} on {device}"
