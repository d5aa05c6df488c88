"""The laws of a linearized stage beside plain autograd: its bits, no more work, no more memory, nothing changed."""

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


def wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def as_fresh_leaves(value: Any) -> Any:
    """Return detached leaves that require gradients where they can."""
    return tree.tree_map(lambda leaf: leaf.detach().requires_grad_() if wants_grad(leaf) else leaf, value)


def storages(kept_tensors: Iterable[Tensor], excluded_tensors: Iterable[Tensor] = ()) -> dict[StorageWeakRef, int]:
    """Return the bytes of each tensor's storage, without storages of the excluded tensors."""
    excluded = {StorageWeakRef(tensor.untyped_storage()) for tensor in excluded_tensors}
    memories = [tensor.untyped_storage() for tensor in kept_tensors]
    size_by_storage = {StorageWeakRef(memory): memory.nbytes() for memory in memories}
    return {storage: size for storage, size in size_by_storage.items() if storage not in excluded}


def flops(function: Callable[[], Any]) -> int:
    """Count a function's flops. Separate runs: torch computes some gradients differently under a dispatch mode."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@dataclass
class Plain:
    """A stage's run under plain autograd: results, flops, and the bytes saved for the backward."""

    y: Any
    dy: Any
    grads: list[Any]
    flops: int
    saved: int


def run_plain(function: Function, params: Any, x: Any, seed: int = 1) -> Plain:
    """Run a stage and its backward under plain autograd, from drawn cotangents."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = function(params, x)
    make = torch.Generator().manual_seed(seed)
    has_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree.leaves(y)]
    roots = zip(tree.leaves(y), has_grad, strict=True)
    seeds = [_draw_cotangent(leaf, make) if is_root else None for leaf, is_root in roots]
    inputs = tree.leaves((x, params))
    leaves = [leaf for leaf in inputs if wants_grad(leaf)]
    cotangents = [seed for seed in seeds if seed is not None]

    def backward(y: Any) -> Any:
        roots = [leaf for leaf, is_root in zip(tree.leaves(y), has_grad, strict=True) if is_root]
        return torch.autograd.grad(roots, leaves, cotangents, allow_unused=True) if roots else [None] * len(leaves)

    grad_iterator = iter(backward(y))
    grads = [next(grad_iterator) if wants_grad(leaf) else None for leaf in inputs]
    rerun: list[Any] = []
    work = flops(lambda: rerun.append(function(params, x))) + flops(lambda: backward(rerun[0]))
    size = sum(storages(saved, tensors((x, params))).values())
    return Plain(y, tree.unflatten(tree.flatten(y)[1], seeds), grads, work, size)


def _draw_cotangent(leaf: Tensor, make: torch.Generator) -> Tensor:
    """Draw a cotangent with the leaf's layout in memory, if no two elements of the leaf overlap."""
    return torch.empty_like(leaf).copy_(torch.randn(leaf.shape, generator=make))


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert bits(actual) == bits(expected)


def assert_lawful(
    function: Function,
    make_inputs: Callable[[], tuple[Any, Any]],
    expected: Plain,
    agree: Callable[[Any, Any], None] = assert_same_bits,
    less_work: bool = False,
    more_memory: bool = False,
) -> fpipe.Linearized:
    """Linearize a stage at the inputs that `make_inputs` returns each time, and check all the laws.

    `less_work`: autograd also runs unread layers. `more_memory`: a trace keeps tensors that autograd does not.
    """
    params, x = make_inputs()
    linearized = fpipe.linearize(function, params, x)
    y, residuals = linearized.forward(params, x)
    assert tree.flatten(y)[1] == tree.flatten(expected.y)[1]
    agree(y, expected.y)
    actual_grads = linearized.backward(params, [*residuals], expected.dy)
    agree(tree.leaves(actual_grads), expected.grads)
    dx, weight_residuals = linearized.backward_input(params, [*residuals], expected.dy)
    assert bits((dx, linearized.backward_weight(params, [*weight_residuals]))) == bits(actual_grads)
    assert bits((params, x)) == bits(make_inputs()), "what was given is changed"

    forward = flops(lambda: linearized.forward(params, x))
    backward = flops(lambda: linearized.backward(params, [*residuals], expected.dy))
    halves = flops(lambda: linearized.backward_input(params, [*residuals], expected.dy))
    assert halves + flops(lambda: linearized.backward_weight(params, [*weight_residuals])) == backward
    assert forward + backward <= expected.flops if less_work else forward + backward == expected.flops

    for name, label in (("backward", "res"), ("backward_weight", "wres")):
        graph = linearized.graphs[name]
        read_leaves = {leaf for node in graph.nodes for leaf in node.reads}
        read_leaves |= {leaf for leaves in graph.writes.values() for leaf in leaves}
        assert {*graph.reads[label]} <= read_leaves & {*graph.facts}, "only tensors that are read are kept"
    assert more_memory or sum(storages(residuals, tensors((params, x))).values()) <= expected.saved
    return linearized
