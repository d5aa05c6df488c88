"""Run F, R, B, I and W on real values: a stage under plain autograd, on leaves of a graph of its own.

A rule takes what the op reads, in order, and gives what it writes, in order. What flows: activations are pytrees of
detached tensors; cotangents and gradients are lists over the leaves of what they belong to, None where there is none;
residuals are the stage's own autograd graph, cut off from all others.
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
from fpipe.meaning.purity.own_memory import alias, laid_out_as, of_each_row, rows_of
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.purity.sharded import placed_as
from fpipe.meaning.single_device.microbatch_graph import detached, leaf_of
from fpipe.meaning.single_device.params_and_state import is_differentiable, trained, wants_grad
from fpipe.meaning.stages.keys import seeded, seeder
from fpipe.meaning.stages.outputs import (
    call_stage,
    loss_of,
    outputs_of,
    refuse_missing_gradients,
    refuse_odd_output,
    scaled,
    split_output,
)
from fpipe.model import Model, Turn, who_draws
from fpipe.program import Op, Value, is_exchange
from fpipe.torch_internals import forbids_saved_tensors_hooks

Leaves = list[Any]


@dataclass
class StepContext:
    """The surroundings of a rule, besides the values it reads.

    Attributes:
        model: the stages.
        rows: of the batch.
        watch_saved: whether the tensors that autograd saves are wanted.
        input_grads: where the gradient of the inputs is wanted: stage, and which of its inputs.
        loss_scale: what multiplies the loss's cotangent.
        sizes: the rows of each microbatch, where the batch is cut already.
        key: of the step, or one for each training step.
        replicas: how many data-parallel replicas there are; this one's microbatches are numbered from `first` among
            those of all.
        moves: what travels between devices.
        shared: what replicas share out, by what they are handed of it.
        overwrites: whether a step that runs has overwritten parameters.
        per_step: the microbatches of a training step, where a program is several, and `slices`, those of each.
        places: of each stage the place of each leaf's gradient, in the net's order: its number among all leaves of the
            net, its bundle, and its index there.
    """

    model: Model
    rows: int
    watch_saved: bool = False
    input_grads: frozenset[tuple[int, int]] = frozenset()
    loss_scale: float = 1.0
    sizes: tuple[int, ...] = ()
    key: int | Sequence[int] | None = None
    replicas: int = 1
    first: int = 0
    moves: Moves = field(default_factory=dict[Any, Any])
    shared: Mapping[Value, Any] = field(default_factory=dict[Any, Any])
    places: Sequence[Sequence[tuple[int, int, int]]] = ()
    per_step: int | None = None
    slices: int = 1
    overwrites: bool = False

    @property
    def all_rows(self) -> int:
        """The rows of the batches of all replicas, which have equally many."""
        return self.rows * self.replicas

    def step_of(self, op: Op) -> int:
        """The training step that an op is of."""
        return (op.microbatch or 0) // self.per_step if self.per_step else 0

    def number(self, op: Op) -> int:
        """The number of an op's microbatch among those of all replicas in a training step."""
        number = op.microbatch or 0
        return self.first + (number if self.per_step is None else number % self.per_step)

    def turn(self, op: Op) -> Turn:
        """Whether an op's microbatch (and slice) is the first and the last of its training step."""
        piece, microbatch, last = op.slice or 0, op.microbatch or 0, (self.per_step or 1) - 1
        microbatch %= last + 1
        return (microbatch, piece) == (0, 0), (microbatch, piece) == (last, self.slices - 1)


Rule = Callable[[Op, Sequence[Any], StepContext], Sequence[Any]]


@dataclass
class Residuals:
    """A stage's graph, from the leaves it was given to what it returned; what it `saved`, if a step watches; and how a
    backward that computes things again runs `around` the parameters."""

    params: list[Leaves]
    inputs: list[Leaves]
    carry: Leaves
    outputs: Leaves
    carried: Leaves
    loss: Tensor | None
    saved: list[Tensor]
    around: Callable[[Callable[[], Any]], Any]


@dataclass
class Inputs:
    """The arguments of a stage, for a backward that runs it again."""

    op: Op
    args: Sequence[Any]


class _StageCall:
    """The arguments of an F or R as its stage takes them: leaves of a separate graph, on the storage of its reads."""

    def __init__(self, op: Op, args: Sequence[Any], context: StepContext) -> None:
        number = op.stage or 0
        self.stage = context.model.stages[number]
        self.who = context.model.who(number)
        named: dict[str, list[Any]] = {}
        self.taken: list[Any] = []
        self.inputs: list[Leaves] = []  # of each source, the leaves that may want a cotangent
        for value, arg in zip(op.reads, args, strict=True):
            named.setdefault(value.name, []).append(arg)
            if value.name in ("x", "inputs"):
                takes_grad = (number, len(self.taken)) in context.input_grads
                self.taken.append(tree.tree_map(_trained_leaf if takes_grad else _itself, arg))  # in new containers
                self.inputs.append(tree.leaves(self.taken[-1]) if takes_grad else [])
            elif value.name in ("y", "again"):
                leaves, containers = tree.flatten(arg)
                self.inputs.append([*map(leaf_of, leaves)])
                with torch.enable_grad():
                    self.taken.append(tree.unflatten(containers, map(alias, self.inputs[-1])))
        owners = [(value.stage or 0, value.port) for value in op.reads if value.name == "params"]
        rows = rows_of(tree.leaves(self.taken)) if context.model.per_example else None
        pairs = zip(owners, named["params"], strict=True)
        self.bundles = [_trained_leaves(context.model, *owner, bundle, rows) for owner, bundle in pairs]
        ties = {leaf.name: self.bundles[leaf.bundle] for leaf in context.model.tied(number)}
        self.params = {**self.bundles[0], **ties} if ties else self.bundles[0]
        self.carry = tree.tree_map(leaf_of, named["carry"][0]) if "carry" in named else None
        (state,) = named.get("state", [None])
        key = context.key if isinstance(context.key, int | None) else context.key[context.step_of(op)]
        self.seed = None if key is None else seeder(number, context.number(op), op.slice)(key)
        said = {"microbatch": context.number(op), "carry": self.carry, "key": self.seed, "state": state}
        said["turn"] = context.turn(op)
        self.said = {word: said[word] for word in self.stage.asks}
        self.x = tuple(self.taken) if isinstance(context.model.inputs[number], tuple) else self.taken[0]
        self.has_loss = "t" in named or "target" in named
        self.target = tree.tree_map(_itself, (named.get("t") or named.get("target") or [None])[0])


def forward(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """F and R: run the stage on separate leaves and keep the graph. One code for both gives both the same bits."""
    call = _StageCall(op, args, context)
    stage, params = call.stage, call.params
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    watching = saved_tensors_hooks(keep, lambda tensor: tensor) if context.watch_saved else nullcontext()
    with torch.enable_grad(), watching, seeded(call.seed, who_draws(context.model, op.stage or 0)):
        with pure(stage.forward, call.who, (call.taken, params, call.carry)):
            y, beside = split_output(stage, _run_stage(call))
        with pure(context.model.loss if call.has_loss else None, "the loss", (y, call.target)):
            loss, count, aux = (
                loss_of(context.model, y, call.target) if call.has_loss else (beside.get("loss"), None, None)
            )
    if not context.model.per_example:
        handed = tree.leaves((call.bundles, call.carry, call.inputs, call.taken, call.target))
        refuse_missing_gradients(context.model, tree.leaves((y, beside, loss)), handed)
    outputs, carried = tree.leaves(y), beside.get("carry")
    ports = outputs_of(context.model, op.stage or 0, y)
    for port in ports:
        refuse_odd_output(port, call.who)

    def around(backward_pass: Callable[[], Any]) -> Any:
        return backward_pass() if stage.within is None else stage.within(params, backward_pass)

    results = {
        "state": lambda: tree.tree_map(detached, beside["state"]),
        "carry": lambda: tree.tree_map(leaf_of, carried),
        "loss": lambda: None if loss is None else loss.detach().clone(),  # F.mse_loss's is as large as its input
        "count": lambda: detached(count),
        "aux": lambda: tree.tree_map(detached, aux),
        "res": lambda: (
            Inputs(op, args)
            if op.how and not is_exchange(op)
            else Residuals(
                params=[tree.leaves(bundle) for bundle in call.bundles],
                inputs=call.inputs,
                carry=tree.leaves(call.carry),
                outputs=outputs,
                carried=tree.leaves(carried),
                loss=loss,
                saved=saved,
                around=around,
            )
        ),
    }
    outs = ("y", "again")
    return [
        tree.tree_map(leaf_of, ports[value.port]) if value.name in outs else results[value.name]()
        for value in op.writes
    ]


def _run_stage(call: _StageCall) -> Any:
    try:
        return call_stage(call.stage, call.params, call.x, call.said)
    except RuntimeError as error:
        if not forbids_saved_tensors_hooks(error):
            raise
        raise RuntimeError(
            f"{call.who} runs under autograd and calls torch.func, which does not tell what autograd saves in it: "
            "what a step holds cannot be counted. Build without record=True."
        ) from error


def backward(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """B and I: the gradient of a stage's graph. Autograd cannot stop half-way, so I hands the weight gradients over."""
    named = {value.name: arg for value, arg in zip(op.reads, args, strict=True)}
    residuals: Any = named["res"]
    if isinstance(residuals, Inputs):
        first = residuals.op._replace(writes=tuple(v for v in residuals.op.writes if v.name == "res"), how=())
        (residuals,) = forward(first, residuals.args, context)
    weight = 1.0
    if residuals.loss is not None:
        weight = named.get("w", 1.0) if context.model.reduction == "mean" else 1.0
        weight = scaled(weight, context.loss_scale, residuals.loss.dtype)
    factor = named["scale"][0] if "scale" in named else None
    pairs = zip(op.reads, args, strict=True)
    cotangents = [leaf for value, arg in pairs if value.name in ("dy", "dx") for leaf in arg]  # of one output, the next
    roots = _roots(residuals, cotangents, named.get("dcarry"), weight, factor)
    inputs, carry, params = _gradients(residuals, roots)
    results = {"dx": inputs, "g": params}
    whole = {"dcarry": carry, "wres": params}
    return [results[value.name][value.port] if value.name in results else whole[value.name] for value in op.writes]


def _roots(
    residuals: Residuals, cotangent: Leaves, carried: Leaves | None, weight: float, scale: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Where the gradient starts: outputs that have a cotangent, and the loss with its weight times the loss scale."""
    pairs = [*zip(residuals.outputs, cotangent, strict=False), *zip(residuals.carried, carried or [], strict=False)]
    if residuals.loss is not None:
        seed = torch.full_like(residuals.loss, weight)
        pairs.append((residuals.loss, seed if scale is None else times(seed, scale)))
    return [(root, seed) for root, seed in pairs if wants_grad(root) and seed is not None]


def times(seed: Tensor, scale: Tensor) -> Tensor:
    """A cotangent of the loss times the loss scale, infinite where its dtype has no such number."""
    return (seed * scale.to(seed.device)).to(seed.dtype)


def _gradients(residuals: Residuals, roots: list[tuple[Tensor, Tensor]]) -> tuple[list[Leaves], Leaves, list[Leaves]]:
    """For the leaves of each input, of the carry and of each parameter bundle; None where nothing depends on one."""
    groups = [*residuals.inputs, residuals.carry, *residuals.params]
    wanted = [leaf for group in groups for leaf in group if wants_grad(leaf)]
    found: Iterator[Tensor | None] = iter([None] * len(wanted))
    if roots and wanted:
        ends, seeds = zip(*roots, strict=True)
        with outside_autocast():
            found = iter(residuals.around(lambda: torch.autograd.grad(ends, wanted, seeds, allow_unused=True)))
    grads = [[placed_as(leaf, next(found)) if wants_grad(leaf) else None for leaf in group] for group in groups]
    count = len(residuals.inputs)
    params = [[*map(laid_out_as, *pair)] for pair in zip(residuals.params, grads[count + 1 :], strict=True)]
    return grads[:count], grads[count], params


def weight_gradient(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """W: what I left."""
    wres = next(arg for value, arg in zip(op.reads, args, strict=True) if value.name == "wres")
    return [wres[value.port] for value in op.writes]


def _itself(leaf: Any) -> Any:
    return leaf


def _trained_leaf(leaf: Any) -> Any:
    """A leaf of this stage's graph, on the caller's storage."""
    return leaf.detach().requires_grad_() if is_differentiable(leaf) else leaf


def _trained_leaves(model: Model, stage: int, port: int, bundle: Any, rows: int | None) -> Any:
    """A bundle whose parameters that train are leaves of this stage's graph, with `rows` in front where they have
    some."""
    leaves, containers = tree.flatten(bundle)
    trains = trained(model, stage, port, bundle)
    pairs = zip(leaves if rows is None else of_each_row(leaves, rows), trains, strict=True)
    return tree.unflatten(containers, [_trained_leaf(leaf) if trains else leaf for leaf, trains in pairs])
