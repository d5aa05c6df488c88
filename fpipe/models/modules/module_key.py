"""A key that is equal for modules that compute the same function of their parameters, so that they share a trace."""

from __future__ import annotations

from typing import Any

from torch import nn

from fpipe.graphs.purity.alike import alike
from fpipe.torch_private.modules import OWN_DICTS, WEIGHT_LISTS, held_by


def module_key(module: nn.Module, odd: list[Any]) -> Any:
    """The computation of a module as a value to compare: class, plain attributes, mode, what is said on its parameters,
    and the keys of its children.

    Args:
        odd: takes what cannot be compared, such as a tensor among the attributes.
    """
    attributes, held = vars(module), held_by(module)
    plain = tuple((name, alike(attributes[name], odd)) for name in sorted(attributes) if name not in _NOT_PLAIN)
    children = tuple((name, None if child is None else module_key(child, odd)) for name, child in held.children.items())
    forward = alike(type(module).forward, odd)
    flags = tuple((name, alike(None if one is None else vars(one), odd)) for name, one in held.parameters.items())
    return type(module), forward, plain, children, flags, tuple(held.buffers)


_NOT_PLAIN = (*OWN_DICTS, *WEIGHT_LISTS)
