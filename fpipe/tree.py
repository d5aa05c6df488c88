"""Take nested containers apart and put them together again: pytrees with torch's registry and torch's order.

Dicts keep the order they were written in and None is a leaf, as torch has it, so that leaves line up with a state_dict.
What `torch.utils._pytree.register_pytree_node` knows is a container here; what it does not know is a leaf, and so is
not lost. This is the one file that imports optree.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import optree
import torch.utils._cxx_pytree  # noqa: F401  # pyright: ignore[reportUnusedImport]
from torch.utils._pytree import register_pytree_node  # pyright: ignore[reportPrivateImportUsage]

Spec = optree.PyTreeSpec

# The import of torch's own module is what tells optree of torch's containers, and of dicts in the order written.
_TORCH: Any = {"namespace": "torch", "none_is_leaf": True}


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Spec]:
    """The leaves in order, and the containers around them; `is_leaf` says what else is taken to be a leaf.

    >>> flatten({"b": 1, "a": (None, {})})[0]
    [1, None]
    """
    return optree.tree_flatten(tree, is_leaf, **_TORCH)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Containers with new leaves in them; the inverse of `flatten`."""
    return optree.tree_unflatten(spec, leaves)


def register_mappings(tree: Any) -> None:
    """Let the mappings of transformers among the leaves, such as BatchEncoding, be containers from now on."""
    for kind in {type(leaf) for leaf in leaves(tree) if isinstance(leaf, UserDict)}:
        if kind.__module__.startswith("transformers."):
            register_pytree_node(kind, lambda node: ([*node.values()], [*node]), partial(_mapping, kind))


def _mapping(kind: type, values: Iterable[Any], keys: Iterable[Any]) -> Any:
    return kind(dict(zip(keys, values, strict=True)))


def odd_keys(spec: Spec) -> str | None:
    """Return a text that differs for containers that are equal though their keys are not of one type, as 1 and True."""
    types = {*map(type, chain.from_iterable(spec.paths()))}
    return None if types <= {str, int} else repr(spec)


def leaves(tree: Any) -> list[Any]:
    """The leaves in order."""
    return optree.tree_leaves(tree, **_TORCH)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn` to each leaf, or to the leaves that stand in one place of several trees."""
    return optree.tree_map(fn, tree, *rest, **_TORCH)


def paths(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf with its place, as one would write it in Python.

    >>> paths({"a": [1, 2], "b": None})
    [("['a'][0]", 1), ("['a'][1]", 2), ("['b']", None)]
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, **_TORCH)
    return [(accessor.codify(""), leaf) for accessor, leaf in zip(accessors, leaves, strict=True)]


def difference(tree: Any, other: Any) -> str | None:
    """The first place where only one of two trees has a leaf; None where their leaves stand in the same places."""
    places, other_places = [dict.fromkeys(path for path, _ in paths(either)) for either in (tree, other)]
    return next((path for path in [*places, *other_places] if path not in places or path not in other_places), None)


def like(tree: Any, other: Any) -> Any:
    """`other` with its dicts in the order of `tree`'s, leaves of `tree` standing for any value.

    >>> like({"a": 0, "b": 0}, {"b": 1, "a": 2})
    {'a': 2, 'b': 1}
    """
    spec = flatten(tree)[1]
    return unflatten(spec, spec.flatten_up_to(other))


def broadcast_prefix(prefix: Any, tree: Any) -> list[Any]:
    """For each leaf of `tree` the leaf of `prefix` at or above its place.

    >>> broadcast_prefix(("p", "q"), ([1, 2], 3))
    ['p', 'p', 'q']
    """
    return optree.broadcast_prefix(prefix, tree, **_TORCH)


def misfit(prefix: Any, tree: Any) -> tuple[str, str, str] | None:
    """Find where `tree` is not as `prefix` has it: the place, what the prefix has there, and what the tree has.

    >>> misfit({"a": [0, 0]}, {"a": (1, 2)})
    ("['a']", 'a list of 2', 'a tuple of 2')
    >>> misfit(0, {"a": (1, 2)}) is None
    True
    """
    if optree.tree_is_leaf(prefix, **_TORCH):
        return None
    wanted = optree.tree_flatten_one_level(prefix, **_TORCH)
    found = None if optree.tree_is_leaf(tree, **_TORCH) else optree.tree_flatten_one_level(tree, **_TORCH)
    are_alike = type(prefix) is type(tree) or (isinstance(prefix, dict) and isinstance(tree, dict))
    if found is None or {*wanted.entries} != {*found.entries} or not are_alike:
        return "", _described(prefix), _described(tree)
    child_by_entry = dict(zip(found.entries, found.children, strict=True))
    for entry, child in zip(wanted.entries, wanted.children, strict=True):
        inner = misfit(child, child_by_entry[entry])
        if inner is not None:
            return f"[{entry!r}]{inner[0]}", *inner[1:]
    return None


def _described(tree: Any) -> str:
    kind = type(tree).__name__
    if isinstance(tree, dict):
        return f"a {kind} with {', '.join(map(repr, tree)) or 'nothing'}"
    return f"a {kind} of {len(tree)}" if isinstance(tree, list | tuple) else f"a {kind}"
