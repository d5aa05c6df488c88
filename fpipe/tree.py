"""Flatten, rebuild and compare pytrees, with torch's registry and torch's order.

As in torch, dicts keep the order in which they were written and None is a leaf, so that leaves line up with a
state_dict. Types registered by `torch.utils._pytree.register_pytree_node` are containers; objects of all other types
are leaves. No other file imports optree, which is three times as fast as torch's own Python pytrees.
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

# Importing torch.utils._cxx_pytree registers torch's containers with optree, and dicts in the order written.
_TORCH: Any = {"namespace": "torch", "none_is_leaf": True}


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Spec]:
    """Return the leaves in order and the containers around them; `is_leaf` marks further nodes as leaves.

    >>> flatten({"b": 1, "a": (None, {})})[0]
    [1, None]
    """
    return optree.tree_flatten(tree, is_leaf, **_TORCH)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Build the containers of a spec around new leaves; the inverse of `flatten`."""
    return optree.tree_unflatten(spec, leaves)


def register_mappings(tree: Any) -> None:
    """Register the mapping types of transformers among the leaves, such as BatchEncoding, as containers."""
    # They are UserDicts, which neither torch nor optree knows, and would be leaves that are no tensors.
    for kind in {type(leaf) for leaf in leaves(tree) if isinstance(leaf, UserDict)}:
        if kind.__module__.startswith("transformers."):
            register_pytree_node(kind, lambda node: ([*node.values()], [*node]), partial(_make_mapping, kind))


def _make_mapping(kind: type, values: Iterable[Any], keys: Iterable[Any]) -> Any:
    return kind(dict(zip(keys, values, strict=True)))


def mixed_key_text(spec: Spec) -> str | None:
    """Return a text that tells apart specs that compare equal but have keys of other types, as 1 and True."""
    types = {*map(type, chain.from_iterable(spec.paths()))}
    return None if types <= {str, int} else repr(spec)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves in order."""
    return optree.tree_leaves(tree, **_TORCH)


def tree_map(fn: Callable[..., Any], tree: Any, *other_trees: Any) -> Any:
    """Apply `fn` to each leaf, or to the leaves at the same path of several trees."""
    return optree.tree_map(fn, tree, *other_trees, **_TORCH)


def paths(tree: Any) -> list[tuple[str, Any]]:
    """Return each leaf with its path, as one writes it in Python.

    >>> paths({"a": [1, 2], "b": None})
    [("['a'][0]", 1), ("['a'][1]", 2), ("['b']", None)]
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, **_TORCH)
    return [(accessor.codify(""), leaf) for accessor, leaf in zip(accessors, leaves, strict=True)]


def first_difference(tree: Any, other_tree: Any) -> str | None:
    """Return the first path at which only one of two trees has a leaf; None if their leaves have the same paths."""
    paths_of_tree, paths_of_other = [dict.fromkeys(path for path, _ in paths(either)) for either in (tree, other_tree)]
    return next(
        (path for path in [*paths_of_tree, *paths_of_other] if path not in paths_of_tree or path not in paths_of_other),
        None,
    )


def in_order_of(tree: Any, other_tree: Any) -> Any:
    """Return `other_tree` with its dicts in the order of `tree`'s; a leaf of `tree` stands for any value.

    >>> in_order_of({"a": 0, "b": 0}, {"b": 1, "a": 2})
    {'a': 2, 'b': 1}
    """
    spec = flatten(tree)[1]
    return unflatten(spec, spec.flatten_up_to(other_tree))


def broadcast_prefix(prefix: Any, tree: Any) -> list[Any]:
    """Return, for each leaf of `tree`, the leaf of `prefix` at or above its path.

    >>> broadcast_prefix(("p", "q"), ([1, 2], 3))
    ['p', 'p', 'q']
    """
    return optree.broadcast_prefix(prefix, tree, **_TORCH)


def find_mismatch(prefix: Any, tree: Any) -> tuple[str, str, str] | None:
    """Return the first path at which `tree` does not match `prefix`, with descriptions of both; None if it matches.

    >>> find_mismatch({"a": [0, 0]}, {"a": (1, 2)})
    ("['a']", 'a list of 2', 'a tuple of 2')
    >>> find_mismatch(0, {"a": (1, 2)}) is None
    True
    """
    # One level at a time, so that the path is known where the first difference is met.
    if optree.tree_is_leaf(prefix, **_TORCH):
        return None
    prefix_level = optree.tree_flatten_one_level(prefix, **_TORCH)
    tree_level = None if optree.tree_is_leaf(tree, **_TORCH) else optree.tree_flatten_one_level(tree, **_TORCH)
    are_alike = type(prefix) is type(tree) or (isinstance(prefix, dict) and isinstance(tree, dict))
    if tree_level is None or {*prefix_level.entries} != {*tree_level.entries} or not are_alike:
        return "", _describe_container(prefix), _describe_container(tree)
    child_by_key = dict(zip(tree_level.entries, tree_level.children, strict=True))
    for key, child in zip(prefix_level.entries, prefix_level.children, strict=True):
        mismatch = find_mismatch(child, child_by_key[key])
        if mismatch is not None:
            return f"[{key!r}]{mismatch[0]}", *mismatch[1:]
    return None


def _describe_container(tree: Any) -> str:
    kind = type(tree).__name__
    if isinstance(tree, dict):
        return f"a {kind} with {', '.join(map(repr, tree)) or 'nothing'}"
    return f"a {kind} of {len(tree)}" if isinstance(tree, list | tuple) else f"a {kind}"
