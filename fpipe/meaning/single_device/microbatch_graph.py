"""Run one microbatch (or a slice of it) through all stages as one autograd graph, and take its gradients.

leaves: params, carries in, inputs      --> run_stages -->      loss, carries out
gradients of those leaves               <-- take_gradients <--  1 for the loss, gradients of carries out
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.purity.keys import make_seeder, with_seed
from fpipe.meaning.purity.outputs import call_stage, loss_of, outputs_of, refuse_missing_gradients, split_output
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.purity.sharded import redistribute_like
from fpipe.meaning.purity.write_guard import alias, count_rows, expand_per_row
from fpipe.meaning.single_device.params_and_state import is_differentiable, trainable_leaves, wants_grad
from fpipe.model import Model, Turn, label_with_random_modules
from fpipe.program import Value

Observer = Callable[[Value, Any], None]
"""Function that is called with each value's name in a program and its leaves."""


def param_leaves(model: Model, stage: int, full: Any, inputs: Any) -> Any:
    """Return a stage's parameters as graph leaves that share the caller's storage; expanded per row if the model is."""
    leaves, containers = tree.flatten(full)
    params = expand_per_row(leaves, count_rows(tree.leaves(inputs))) if model.per_example else leaves
    pairs = zip(params, trainable_leaves(model, stage, full), strict=True)
    return tree.unflatten(containers, [leaf.detach().requires_grad_() if trains else leaf for leaf, trains in pairs])


def leaves_of_inputs(model: Model, inputs: Any) -> dict[tuple[int, int], Any]:
    """Return the inputs as leaves of the graph, one copy for each use, by stage and index among the stage's inputs.

    A stage that reads the batch has its own gradient of it, as in a program, where it has a value of its own.
    """

    def make_leaf(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if is_differentiable(leaf) else leaf

    return {
        (stage, k): tree.tree_map(make_leaf, inputs)
        for stage in range(len(model.stages))
        for k, source in enumerate(model.sources(stage))
        if source == "batch"
    }


@dataclass
class MicrobatchGraph:
    """An autograd graph of one microbatch, or slice of it, over all stages.

    Attributes:
        stage_params: the parameters of each stage, leaves of the graph.
        input_leaves: the inputs by stage and index, leaves if their gradients are asked for; else {}.
        carries_in: what each stage reads of the slice before, leaves of the graph.
        coordinates: the microbatch and the slice, None if sequences are not sliced.
        loss: where the backward starts.
        carries_out: what each stage hands to the next slice.
        values_by_cotangent: the values between stages, by the names of their gradients, if somebody observes them.
    """

    stage_params: list[Any]
    input_leaves: dict[tuple[int, int], Any]
    carries_in: list[Any]
    coordinates: tuple[int, int | None]
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    carries_out: list[Any] = field(default_factory=list[Any])
    values_by_cotangent: dict[Value, list[Any]] = field(default_factory=dict[Value, list[Any]])


def run_stages(
    model: Model,
    graph: MicrobatchGraph,
    inputs_and_target: tuple[Any, Any],
    states: list[Any],
    turn: Turn,
    key: int | None,
    observe: Observer | None = None,
) -> tuple[Tensor, Any, Any, Any]:
    """Run all stages on one microbatch or slice, and return its loss, count, auxiliary results and output.

    Args:
        model: the stages and the loss.
        graph: has the leaves that the stages read; takes carries_out and, for `observe`, values_by_cotangent.
        inputs_and_target: the microbatch or slice.
        states: the module state of each stage, replaced by what the forward leaves.
        turn: whether it is the first, and the last, microbatch of its replica.
        key: the random key of the step.
        observe: called with name and value of all that passes between stages.
    """
    inputs, target = inputs_and_target
    coordinates, last_stage = graph.coordinates, len(model.stages) - 1
    loss_parts: Any = None
    values: list[Any] = []
    stage_losses: list[Tensor] = []
    for number, stage in enumerate(model.stages):
        # 1. Collect the stage's inputs: aliases of outputs, so that each reader's gradient arrives separately.
        sources = [
            graph.input_leaves.get((number, k), inputs)
            if source == "batch"
            else tree.tree_map(alias, _output(values, source))
            for k, source in enumerate(model.sources(number))
        ]
        x = tuple(sources) if isinstance(model.inputs[number], tuple) else sources[0]
        params, carry = graph.stage_params[number], graph.carries_in[number]
        seed = None if key is None else make_seeder(number, *coordinates)(key)
        options = {"state": states[number], "key": seed, "microbatch": coordinates[0], "carry": carry, "turn": turn}
        # 2. Run the stage, and behind the last one the loss.
        with with_seed(seed, label_with_random_modules(model, number)):
            with pure(stage.forward, model.label_of(number), (x, params, carry)):
                returned = call_stage(stage, params, x, options)
            y, extras = split_output(stage, returned)
            with pure(model.loss if number == last_stage else None, "the loss", (y, target)):
                if number == last_stage:
                    loss_parts = (extras.pop("loss"), None, None) if stage.aux_loss else loss_of(model, y, target)
        # 3. Store what later stages, slices and microbatches read.
        values.append(outputs_of(model, number, y))
        graph.carries_out.append(extras.get("carry"))
        stage_losses += [extras["loss"]] if "loss" in extras else []
        if "state" in stage.keywords:
            states[number] = tree.tree_map(detach_leaf, extras["state"])
        # 4. Report the values under the names that a program gives them.
        if observe is not None:
            for port, output in enumerate(values[-1]):
                graph.values_by_cotangent[Value("dy", number, *coordinates, port)] = tree.leaves(output)
                observe(Value("y", number, *coordinates, port), output)
            graph.values_by_cotangent |= {
                Value("dx", number, *coordinates, k): tree.leaves(source) for k, source in enumerate(sources)
            }
            value_by_name = {name: extra for name, extra in extras.items() if name in ("loss", "carry")}
            value_by_name |= {"state": states[number]} if states[number] is not None else {}
            value_by_name |= dict(zip(("loss", "count", "aux"), loss_parts, strict=True)) if loss_parts else {}
            for name, value in value_by_name.items():
                observe(Value(name, number, *coordinates), value)
    loss, count, aux = loss_parts
    if not model.per_example:
        leaves = tree.leaves((graph.stage_params, [*graph.input_leaves.values()], graph.carries_in, inputs, target))
        refuse_missing_gradients(model, [loss, *stage_losses], leaves)
    return sum(stage_losses, loss), count, aux, values[-1][0]


def _output(values: list[Any], source: Any) -> Any:
    stage, port = source if isinstance(source, tuple) else (source, 0)
    return values[stage][port]


def as_graph_leaf(leaf: Any) -> Any:
    """Return a leaf of a new graph; it requires a gradient if the value that it is made of does."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def detach_leaf(leaf: Any) -> Any:
    """Return a leaf detached from its graph, or unchanged if it is no tensor."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def take_gradients(
    model: Model, graph: MicrobatchGraph, carry_grads: Sequence[Tensor | None], observe: Observer | None = None
) -> tuple[list[list[Tensor | None]], list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of each stage's parameters, of the carries that were read, and of the inputs.

    Args:
        model: the stages.
        graph: of one microbatch or slice.
        carry_grads: the gradients of the carries that the graph handed on; () behind the last slice.
        observe: called with name and value of each gradient.

    Returns:
        Gradients by leaf, None where the loss does not depend on it.
    """
    # All gradients come from one call of autograd: a group for each stage's parameters, one for the carries, one for
    # each use of the inputs (from the last stage back, the order in which backwards run), and the observed values.
    params = [tree.leaves(stage) for stage in graph.stage_params]
    carries = tree.leaves(graph.carries_in)
    inputs_by_use = [tree.leaves(graph.input_leaves[use]) for use in sorted(graph.input_leaves, reverse=True)]
    groups = (*params, carries, *inputs_by_use, *graph.values_by_cotangent.values())
    differentiated = [leaf for group in groups for leaf in group if wants_grad(leaf)]
    carries_out = zip(tree.leaves(graph.carries_out), carry_grads, strict=False)
    root_and_grad = [(carry, grad) for carry, grad in carries_out if grad is not None]
    root_and_grad += [(graph.loss, torch.ones_like(graph.loss))] if graph.loss.requires_grad else []
    grad_of_next: Iterator[Tensor | None] = iter([None] * len(differentiated))
    if root_and_grad and differentiated:
        roots, root_grads = zip(*root_and_grad, strict=True)
        backward: Callable[[], Any] = partial(torch.autograd.grad, roots, differentiated, root_grads, allow_unused=True)
        # A checkpoint inside a stage recomputes in the backward, which needs the stage's tensors in their modules.
        for stage, stage_params in zip(model.stages, graph.stage_params, strict=True):
            backward = (
                backward
                if stage.with_params_bound is None
                else partial(stage.with_params_bound, stage_params, backward)
            )
        with outside_autocast():
            grad_of_next = iter(backward())
    grads = [
        [redistribute_like(leaf, next(grad_of_next)) if wants_grad(leaf) else None for leaf in group]
        for group in groups
    ]
    stages, uses_end = len(params), len(params) + 1 + len(inputs_by_use)
    input_grads = [reduce(add_optional, uses) for uses in zip(*grads[stages + 1 : uses_end], strict=True)]
    if observe is not None:
        for cotangent, cotangent_leaves in zip(graph.values_by_cotangent, grads[uses_end:], strict=True):
            observe(cotangent, cotangent_leaves)
        _observe_gradients(observe, model, graph, grads)
    accumulated = [[*map(_accumulate, *pair)] for pair in zip(params, grads[:stages], strict=True)]
    return accumulated, grads[stages], input_grads


def _accumulate(param: Any, grad: Tensor | None) -> Tensor | None:
    """Return a gradient as torch's AccumulateGrad leaves it in `.grad`: in its parameter's strides."""
    if grad is None:
        return None
    param.backward(grad)
    grad, param.grad = param.grad, None
    return grad


def _observe_gradients(
    observe: Observer, model: Model, graph: MicrobatchGraph, grads: list[list[Tensor | None]]
) -> None:
    # A program has a bundle of parameters for each tied leaf, and one for the rest of a stage.
    carry_grads = iter(grads[len(graph.stage_params)])
    for stage_index, (params, grads_of_stage) in enumerate(zip(graph.stage_params, grads, strict=False)):
        bundles = {leaf.name: leaf.bundle for leaf in model.tied(stage_index)}
        grads_by_name = tree.unflatten(tree.flatten(params)[1], grads_of_stage)
        for name, bundle in bundles.items():
            observe(Value("g", stage_index, *graph.coordinates, bundle), tree.leaves(grads_by_name.pop(name)))
        observe(Value("g", stage_index, *graph.coordinates), tree.leaves(grads_by_name))
        observe(
            Value("dcarry", stage_index, *graph.coordinates),
            [next(carry_grads) for _ in tree.leaves(graph.carries_in[stage_index])],
        )


def add_optional(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """Add two gradients; None stands for zero."""
    if total is None or term is None:
        return term if total is None else total
    return total + term
