"""Run F, R, B, I and W on real values: a stage under plain autograd, on leaves of a separate graph.

A rule takes the values that an op reads, in order, and returns those that it writes, in order. Activations are pytrees
of detached tensors. Cotangents and gradients are lists over the leaves of the values that they belong to, None where
there is none. Residuals are the stage's autograd graph, separate from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fpipe import tree
from fpipe.meaning.devices import Moves
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.purity.keys import make_seeder, with_seed
from fpipe.meaning.purity.outputs import (
    call_stage,
    check_output,
    loss_of,
    outputs_of,
    refuse_missing_gradients,
    scaled_weight,
    split_output,
)
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.purity.sharded import redistribute_like
from fpipe.meaning.purity.write_guard import alias, count_rows, expand_per_row, with_layout_of
from fpipe.meaning.single_device.microbatch_graph import as_graph_leaf, detach_leaf
from fpipe.meaning.single_device.params_and_state import is_differentiable, trainable_bundle_leaves, wants_grad
from fpipe.model import Model, Turn, label_with_random_modules
from fpipe.program import Op, Value, is_exchange
from fpipe.torch_internals import is_hooks_forbidden_error

Leaves = list[Any]


@dataclass
class StepContext:
    """All that a rule needs to know besides the values that its op reads.

    Attributes:
        model: the stages.
        rows: the number of rows of the batch.
        watch_saved: whether to collect the tensors that autograd saves.
        input_grads: the uses of the inputs that need a gradient, as (stage, index among its inputs).
        loss_scale: a factor of the loss's cotangent.
        sizes: the rows of each microbatch, if the batch is cut already.
        key: the random key of the step, or one for each training step.
        replicas: how many data-parallel replicas there are.
        first_microbatch: the index of this replica's first microbatch among those of all replicas.
        moves: the values that travel between devices.
        shared: the parameters that replicas share out, by the value of a shard.
        leaf_positions: for each stage and gradient, in the net's order: the leaf's index in the net, its bundle, and
            its index in the bundle.
        per_step: the number of microbatches of a training step, if a program has several steps.
        slices: the number of slices of each microbatch.
        overwrites: whether a step that runs has overwritten parameters.
        capturable: whether updates leave their numbers on the device, as torch.optim's do with capturable=True.
    """

    model: Model
    rows: int
    watch_saved: bool = False
    input_grads: frozenset[tuple[int, int]] = frozenset()
    loss_scale: float = 1.0
    sizes: tuple[int, ...] = ()
    key: int | Sequence[int] | None = None
    replicas: int = 1
    first_microbatch: int = 0
    moves: Moves = field(default_factory=dict[Any, Any])
    shared: Mapping[Value, Any] = field(default_factory=dict[Any, Any])
    leaf_positions: Sequence[Sequence[tuple[int, int, int]]] = ()
    per_step: int | None = None
    slices: int = 1
    overwrites: bool = False
    capturable: bool = False

    @property
    def all_rows(self) -> int:
        """The number of rows of all replicas' batches, which are equally long."""
        return self.rows * self.replicas

    def step_of(self, op: Op) -> int:
        """Return the index of an op's training step."""
        return (op.microbatch or 0) // self.per_step if self.per_step else 0

    def number(self, op: Op) -> int:
        """Return the index of an op's microbatch within its training step, counted over all replicas."""
        number = op.microbatch or 0
        return self.first_microbatch + (number if self.per_step is None else number % self.per_step)

    def turn(self, op: Op) -> Turn:
        """Return whether an op's microbatch (and slice) is the first, and whether it is the last, of its step."""
        slice_index, microbatch, last_microbatch = op.slice or 0, op.microbatch or 0, (self.per_step or 1) - 1
        microbatch %= last_microbatch + 1
        return (microbatch, slice_index) == (0, 0), (microbatch, slice_index) == (last_microbatch, self.slices - 1)


Rule = Callable[[Op, Sequence[Any], StepContext], Sequence[Any]]


@dataclass
class Residuals:
    """A stage's autograd graph.

    Attributes:
        params, inputs, carry: the leaves that the stage read, by bundle and by source.
        outputs, carry_out, loss: the leaves that it returned.
        saved: the tensors that autograd saved, if they are collected.
        run_backward: runs a backward pass with the parameters in their modules, for a stage that recomputes.
    """

    params: list[Leaves]
    inputs: list[Leaves]
    carry: Leaves
    outputs: Leaves
    carry_out: Leaves
    loss: Tensor | None
    saved: list[Tensor]
    run_backward: Callable[[Callable[[], Any]], Any]


@dataclass
class StageInputs:
    """The residuals of a checkpointed op: the arguments of its stage, which the backward runs again."""

    op: Op
    args: Sequence[Any]


class _StageCall:
    """The arguments of an F or R as its stage takes them: leaves of a separate graph that share the reads' storage."""

    def __init__(self, op: Op, args: Sequence[Any], context: StepContext) -> None:
        stage_index = op.stage or 0
        self.stage = context.model.stages[stage_index]
        self.label = context.model.label_of(stage_index)
        args_by_name: dict[str, list[Any]] = {}
        self.sources: list[Any] = []
        self.inputs: list[Leaves] = []  # by source, the leaves that may need a cotangent
        # 1. What other stages and the batch give. Autograd stops at these leaves: a backward is an op of one stage.
        for value, pytree in zip(op.reads, args, strict=True):
            args_by_name.setdefault(value.name, []).append(pytree)
            if value.name in ("x", "inputs"):
                takes_grad = (stage_index, len(self.sources)) in context.input_grads
                # New containers in any case: a stage may change the dict that it was given.
                self.sources.append(tree.tree_map(_as_trained_leaf if takes_grad else _identity, pytree))
                self.inputs.append(tree.leaves(self.sources[-1]) if takes_grad else [])
            elif value.name in ("y", "again"):
                leaves, containers = tree.flatten(pytree)
                self.inputs.append([*map(as_graph_leaf, leaves)])
                with torch.enable_grad():
                    self.sources.append(tree.unflatten(containers, map(alias, self.inputs[-1])))
        # 2. Parameters: bundle 0 is the stage's own, the others are tied leaves.
        owners = [(value.stage or 0, value.port) for value in op.reads if value.name == "params"]
        rows = count_rows(tree.leaves(self.sources)) if context.model.per_example else None
        pairs = zip(owners, args_by_name["params"], strict=True)
        self.bundles = [_as_trained_leaves(context.model, *owner, bundle, rows) for owner, bundle in pairs]
        ties = {leaf.name: self.bundles[leaf.bundle] for leaf in context.model.tied(stage_index)}
        self.params = {**self.bundles[0], **ties} if ties else self.bundles[0]
        self.carry = tree.tree_map(as_graph_leaf, args_by_name["carry"][0]) if "carry" in args_by_name else None
        (state,) = args_by_name.get("state", [None])
        key = context.key if isinstance(context.key, int | None) else context.key[context.step_of(op)]
        self.seed = None if key is None else make_seeder(stage_index, context.number(op), op.slice)(key)
        # 3. The keyword arguments that the stage asks for.
        options = {"microbatch": context.number(op), "carry": self.carry, "key": self.seed, "state": state}
        options["turn"] = context.turn(op)
        self.options = {name: options[name] for name in self.stage.keywords}
        self.x = tuple(self.sources) if isinstance(context.model.inputs[stage_index], tuple) else self.sources[0]
        self.has_loss = ("t" in args_by_name or "target" in args_by_name) and not self.stage.aux_loss
        self.target = tree.tree_map(_identity, (args_by_name.get("t") or args_by_name.get("target") or [None])[0])


def forward(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Run F or R: call the stage on leaves of a separate graph, and keep the graph as residuals.

    One function runs both, so that a recomputed forward has the bits of the first.
    """
    # 1. Run the stage, and the loss behind the last one.
    call = _StageCall(op, args, context)
    stage, params = call.stage, call.params
    saved: list[Tensor] = []

    # For a timeline: the bytes that a stage holds are those that autograd saves.
    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    watching = saved_tensors_hooks(save, lambda tensor: tensor) if context.watch_saved else nullcontext()
    with torch.enable_grad(), watching, with_seed(call.seed, label_with_random_modules(context.model, op.stage or 0)):
        with pure(stage.forward, call.label, (call.sources, params, call.carry)):
            y, extras = split_output(stage, _run_stage(call))
        with pure(context.model.loss if call.has_loss else None, "the loss", (y, call.target)):
            loss, count, aux = (
                loss_of(context.model, y, call.target) if call.has_loss else (extras.get("loss"), None, None)
            )
    if not context.model.per_example:
        leaves_read = tree.leaves((call.bundles, call.carry, call.inputs, call.sources, call.target))
        refuse_missing_gradients(context.model, tree.leaves((y, extras, loss)), leaves_read)
    # 2. Check what it returned.
    outputs, carry_out = tree.leaves(y), extras.get("carry")
    ports = outputs_of(context.model, op.stage or 0, y)
    for port in ports:
        check_output(port, call.label)

    def run_backward(backward_pass: Callable[[], Any]) -> Any:
        return backward_pass() if stage.with_params_bound is None else stage.with_params_bound(params, backward_pass)

    # 3. Write only the values that the op writes, which depend on the program: each is computed on demand.
    result_by_name = {
        "state": lambda: tree.tree_map(detach_leaf, extras["state"]),
        "carry": lambda: tree.tree_map(as_graph_leaf, carry_out),
        # A copy: the 0-d result of F.mse_loss is a view into storage as large as its input.
        "loss": lambda: None if loss is None else loss.detach().clone(),
        "count": lambda: detach_leaf(count),
        "aux": lambda: tree.tree_map(detach_leaf, aux),
        "res": lambda: (
            StageInputs(op, args)
            if op.options and not is_exchange(op)
            else Residuals(
                params=[tree.leaves(bundle) for bundle in call.bundles],
                inputs=call.inputs,
                carry=tree.leaves(call.carry),
                outputs=outputs,
                carry_out=tree.leaves(carry_out),
                loss=loss,
                saved=saved,
                run_backward=run_backward,
            )
        ),
    }
    activation_names = ("y", "again")
    return [
        tree.tree_map(as_graph_leaf, ports[value.port])
        if value.name in activation_names
        else result_by_name[value.name]()
        for value in op.writes
    ]


def _run_stage(call: _StageCall) -> Any:
    try:
        return call_stage(call.stage, call.params, call.x, call.options)
    except RuntimeError as error:
        if not is_hooks_forbidden_error(error):
            raise
        raise RuntimeError(
            f"{call.label} runs under autograd and calls torch.func, so its bytes cannot be counted. Build without "
            "record=True."
        ) from error


def backward(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Run B or I: take the gradients of a stage's graph.

    Autograd cannot stop half-way, so here an I computes the weight gradients too, and its W only hands them on.
    """
    args_by_name = {value.name: pytree for value, pytree in zip(op.reads, args, strict=True)}
    residuals: Any = args_by_name["res"]
    # A checkpointed op kept only its arguments: run its forward now, for the residuals alone.
    if isinstance(residuals, StageInputs):
        recompute = residuals.op._replace(writes=tuple(v for v in residuals.op.writes if v.name == "res"), options=())
        (residuals,) = forward(recompute, residuals.args, context)
    weight = 1.0
    if residuals.loss is not None:
        weight = args_by_name.get("w", 1.0) if context.model.reduction == "mean" else 1.0
        weight = scaled_weight(weight, context.loss_scale, residuals.loss.dtype)
    factor = args_by_name["scale"][0] if "scale" in args_by_name else None
    pairs = zip(op.reads, args, strict=True)
    # Cotangents in the order of the outputs: each output (port) of a stage has a value of its own.
    cotangents = [leaf for value, grads in pairs if value.name in ("dy", "dx") for leaf in grads]
    roots = _gradient_roots(residuals, cotangents, args_by_name.get("dcarry"), weight, factor)
    inputs, carry, params = _take_gradients(residuals, roots)
    results_by_name = {"dx": inputs, "g": params}
    result_by_name = {"dcarry": carry, "wres": params}
    return [
        results_by_name[value.name][value.port] if value.name in results_by_name else result_by_name[value.name]
        for value in op.writes
    ]


def _gradient_roots(
    residuals: Residuals, output_grads: Leaves, carry_grads: Leaves | None, weight: float, scale: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Return where the gradient starts: outputs with their cotangents, and the loss with its weight and scale."""
    pairs = [
        *zip(residuals.outputs, output_grads, strict=False),
        *zip(residuals.carry_out, carry_grads or [], strict=False),
    ]
    if residuals.loss is not None:
        seed = torch.full_like(residuals.loss, weight)
        pairs.append((residuals.loss, seed if scale is None else scale_cotangent(seed, scale)))
    return [(root, seed) for root, seed in pairs if wants_grad(root) and seed is not None]


def scale_cotangent(seed: Tensor, scale: Tensor) -> Tensor:
    """Return the loss's cotangent times the loss scale; infinite where that overflows the cotangent's dtype."""
    return (seed * scale.to(seed.device)).to(seed.dtype)


def _take_gradients(
    residuals: Residuals, roots: list[tuple[Tensor, Tensor]]
) -> tuple[list[Leaves], Leaves, list[Leaves]]:
    """Return the gradients of each source, of the carry and of each parameter bundle; None for unused leaves."""
    groups = [*residuals.inputs, residuals.carry, *residuals.params]
    differentiated = [leaf for group in groups for leaf in group if wants_grad(leaf)]
    next_grads: Iterator[Tensor | None] = iter([None] * len(differentiated))
    if roots and differentiated:
        root_tensors, seeds = zip(*roots, strict=True)
        with outside_autocast():
            next_grads = iter(
                residuals.run_backward(
                    lambda: torch.autograd.grad(root_tensors, differentiated, seeds, allow_unused=True)
                )
            )
    grads = [
        [redistribute_like(leaf, next(next_grads)) if wants_grad(leaf) else None for leaf in group] for group in groups
    ]
    input_count = len(residuals.inputs)
    params = [[*map(with_layout_of, *pair)] for pair in zip(residuals.params, grads[input_count + 1 :], strict=True)]
    return grads[:input_count], grads[input_count], params


def weight_gradient(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Run W: return the weight gradients that I computed."""
    wres = next(pytree for value, pytree in zip(op.reads, args, strict=True) if value.name == "wres")
    return [wres[value.port] for value in op.writes]


def _identity(leaf: Any) -> Any:
    return leaf


def _as_trained_leaf(leaf: Any) -> Any:
    """Return a leaf of this stage's graph that shares the caller's storage."""
    return leaf.detach().requires_grad_() if is_differentiable(leaf) else leaf


def _as_trained_leaves(model: Model, stage: int, port: int, bundle: Any, rows: int | None) -> Any:
    """Return a bundle with its trained parameters as leaves of this stage's graph, expanded to `rows` if given."""
    leaves, containers = tree.flatten(bundle)
    trains = trainable_bundle_leaves(model, stage, port, bundle)
    pairs = zip(leaves if rows is None else expand_per_row(leaves, rows), trains, strict=True)
    return tree.unflatten(containers, [_as_trained_leaf(leaf) if trains else leaf for leaf, trains in pairs])
