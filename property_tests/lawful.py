"""The laws of a linearized stage beside plain autograd: its bits, no more work, no more memory, nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe import tree
from property_tests.bits import bits, tensors

Function = Callable[[Any, Any], Any]


def wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def own(value: Any) -> Any:
    """The same leaves, as those of a graph to come."""
    return tree.tree_map(lambda leaf: leaf.detach().requires_grad_() if wants(leaf) else leaf, value)


def storages(held: Iterable[Tensor], aside: Iterable[Tensor] = ()) -> dict[StorageWeakRef, int]:
    """Bytes of each storage, those of what was given aside."""
    known = {StorageWeakRef(tensor.untyped_storage()) for tensor in aside}
    found = {StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in held}
    return {storage: size for storage, size in found.items() if storage not in known}


def flops(what: Callable[[], Any]) -> int:
    """Counted apart: torch computes some gradients in another way while a mode of dispatch is on."""
    with FlopCounterMode(display=False) as counter:
        what()
    return counter.get_total_flops()


@dataclass
class Plain:
    """A stage under plain autograd: what it gives, flops, and the bytes that are saved between."""

    y: Any
    dy: Any
    grads: list[Any]
    flops: int
    saved: int


def plain(function: Function, params: Any, x: Any, seed: int = 1) -> Plain:
    """Of leaves that want gradients, from cotangents that are drawn."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = function(params, x)
    make = torch.Generator().manual_seed(seed)
    has = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree.leaves(y)]
    seeds = [_like(leaf, make) if one else None for leaf, one in zip(tree.leaves(y), has, strict=True)]
    given = tree.leaves((x, params))
    wanted = [leaf for leaf in given if wants(leaf)]
    cotangents = [seed for seed in seeds if seed is not None]

    def backward(y: Any) -> Any:
        roots = [leaf for leaf, one in zip(tree.leaves(y), has, strict=True) if one]
        return torch.autograd.grad(roots, wanted, cotangents, allow_unused=True) if roots else [None] * len(wanted)

    each = iter(backward(y))
    grads = [next(each) if wants(leaf) else None for leaf in given]
    again: list[Any] = []
    work = flops(lambda: again.append(function(params, x))) + flops(lambda: backward(again[0]))
    size = sum(storages(saved, tensors((x, params))).values())
    return Plain(y, tree.unflatten(tree.flatten(y)[1], seeds), grads, work, size)


def _like(leaf: Tensor, make: torch.Generator) -> Tensor:
    """A cotangent, which lies in memory as what it is for, if that has each number once."""
    return torch.empty_like(leaf).copy_(torch.randn(leaf.shape, generator=make))


def same_bits(found: Any, right: Any) -> None:
    assert bits(found) == bits(right)


def assert_lawful(
    function: Function,
    given: Callable[[], tuple[Any, Any]],
    right: Plain,
    agree: Callable[[Any, Any], None] = same_bits,
    less_work: bool = False,
    more_memory: bool = False,
) -> fpipe.Linearized:
    """Linearize a stage of what `given` makes, the same each time, and hold it to all the laws.

    `less_work` where autograd also runs what nobody reads, `more_memory` where a trace keeps what autograd need not.
    """
    params, x = given()
    one = fpipe.linearize(function, params, x)
    y, res = one.forward(params, x)
    assert tree.flatten(y)[1] == tree.flatten(right.y)[1]
    agree(y, right.y)
    found = one.backward(params, [*res], right.dy)
    agree(tree.leaves(found), right.grads)
    dx, wres = one.backward_input(params, [*res], right.dy)
    assert bits((dx, one.backward_weight(params, [*wres]))) == bits(found)
    assert bits((params, x)) == bits(given()), "what was given is changed"

    forward, backward = flops(lambda: one.forward(params, x)), flops(lambda: one.backward(params, [*res], right.dy))
    halves = flops(lambda: one.backward_input(params, [*res], right.dy))
    assert halves + flops(lambda: one.backward_weight(params, [*wres])) == backward
    assert forward + backward <= right.flops if less_work else forward + backward == right.flops

    for name, label in (("backward", "res"), ("backward_weight", "wres")):
        graph = one.graphs[name]
        read = {leaf for node in graph.nodes for leaf in node.reads}
        read |= {leaf for leaves in graph.writes.values() for leaf in leaves}
        assert {*graph.reads[label]} <= read & {*graph.facts}, "only tensors that are read are kept"
    assert more_memory or sum(storages(res, tensors((params, x))).values()) <= right.saved
    return one
