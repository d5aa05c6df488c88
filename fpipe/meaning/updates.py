"""Define UPDATE, NORM, UNSCALE and VALIDATE: the update of parameters, and the numbers that it depends on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.optimizers.optimizer_state import UpdateSettings, names_of_leaves, update_settings
from fpipe.meaning.optimizers.rules import RuleSettings, State, apply_rule, as_number_by_name
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.purity.write_guard import with_layout_of
from fpipe.model import Model
from fpipe.program import Op


@outside_autocast()
def update_params(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define UPDATE: step each leaf with a gradient by the rule and the settings of its name; keep the others."""
    update = update_settings(op.options)
    args_by_name = {value.name: pytree for value, pytree in zip(op.reads, args, strict=True)}
    bundle, bundle_states, grads = args[:3]
    leaves, spec = tree.flatten(bundle)
    leaf_states: list[Any] = spec.flatten_up_to(bundle_states)
    names = names_of_update(op, spec, context.model)
    indices = [index for index, grad in enumerate(grads) if grad is not None]
    params, dense_grads, states = ([column[index] for index in indices] for column in (leaves, grads, leaf_states))
    settings = update.of([names[index] for index in indices], params)
    numbers = map(args_by_name.get, ("norm", "lr", "valid"))
    overwrites = [False] * len(indices)
    params, states = update_leaves(
        update, settings, overwrites, context.capturable, params, dense_grads, states, *numbers
    )
    for index, param, state in zip(indices, params, states, strict=True):
        leaves[index], leaf_states[index] = param.requires_grad_(leaves[index].requires_grad), state
    return [tree.unflatten(spec, leaves), tree.unflatten(spec, leaf_states)]


def names_of_update(op: Op, spec: tree.Spec, model: Model) -> list[str]:
    """Return the names of the parameters that an UPDATE steps."""
    names, port = names_of_leaves(spec), op.reads[0].port
    if not port:
        return names
    # A bundle above 0 is one tied leaf: its names are below that leaf's.
    tied = str(model.owned(op.stage or 0)[port - 1].name)
    return [".".join(filter(None, (tied, name))) for name in names]


def update_leaves(
    update: UpdateSettings,
    settings: Sequence[RuleSettings],
    may_overwrite: Sequence[bool],
    capturable: bool,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    norm: Tensor | None,
    lr: Tensor | Mapping[str, Tensor] | None,
    valid: Tensor | None,
) -> tuple[list[Tensor], list[State]]:
    """Return the next parameters and states of leaves that have gradients; the former ones if not `valid`."""
    if capturable:
        return _update_on_device(update, settings, may_overwrite, params, grads, states, norm, lr, valid)
    if valid is not None and not bool(valid):
        kept_params = [
            param.detach() if overwrites else param.detach().clone()
            for param, overwrites in zip(params, may_overwrite, strict=True)
        ]
        pairs = zip(states, may_overwrite, strict=True)
        return kept_params, [
            state if overwrites else {name: leaf.clone() for name, leaf in state.items()} for state, overwrites in pairs
        ]
    grads = _grads_of_rule(update, params, grads, norm)
    return apply_rule(update.rule, settings, params, grads, states, as_number_by_name(lr), may_overwrite)


def _update_on_device(
    update: UpdateSettings,
    settings: Sequence[RuleSettings],
    may_overwrite: Sequence[bool],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    norm: Tensor | None,
    lr: Tensor | Mapping[str, Tensor] | None,
    valid: Tensor | None,
) -> tuple[list[Tensor], list[State]]:
    """Update leaves as `update_leaves` does, without a number that the host reads."""
    grads, numbers = _grads_of_rule(update, params, grads, norm), lr if isinstance(lr, Mapping) else {"lr": lr}
    # Which leaves to keep is known on the device alone: compute the next ones in any case, then choose.
    overwrites = may_overwrite if valid is None else [False] * len(params)
    pairs = apply_rule(update.rule, settings, params, grads, states, numbers, overwrites, capturable=True)
    if valid is None:
        return pairs

    def choose(new: Tensor, former: Tensor, overwrites: bool) -> Tensor:
        chosen = torch.where(valid.to(new.device), new, former.detach())
        return former.detach().copy_(chosen) if overwrites else chosen

    new_params, new_states = pairs
    rows = [*zip(new_states, states, may_overwrite, strict=True)]
    return [*map(choose, new_params, params, may_overwrite)], [
        {name: choose(leaf, state[name], overwrites) for name, leaf in new_state.items()}
        for new_state, state, overwrites in rows
    ]


def _grads_of_rule(
    update: UpdateSettings, params: Sequence[Tensor], grads: Sequence[Tensor], norm: Tensor | None
) -> list[Tensor]:
    """Return gradients as a rule reads them: clipped, in the layout and the dtype of their parameters."""
    if norm is not None and update.clip is not None:
        clip_factor = _clip_factor(update.clip, norm)
        grads = [grad * clip_factor.to(grad.device) for grad in grads]
    # What is scattered to shards is contiguous; else a gradient has the strides of its parameter since its backward.
    return [with_layout_of(param, grad).to(param.dtype) for grad, param in zip(grads, params, strict=True)]


# The norms of a stage travel in one vector for each dtype, together with the indices of their leaves in the net. The op
# that joins the stages sorts by these indices, so that the bits do not depend on the cut. Sums of squares, which
# replicas add, travel without indices, since only tensors can be added.
Packed = tuple[tuple[tuple[int, ...], Tensor], ...]


@outside_autocast()
def take_norms(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define NORM: the norms of a stage's gradients, or of all stages, as `torch.nn.utils.clip_grad_norm_` takes them.

    If parameters are sharded, a stage writes sums of squares: those of shards, which replicas add up, and separately
    those of 0-d gradients, which every replica has whole.
    """
    if op.writes[0].name == "norm":
        return [_total_of_squares(args) if any(value.port for value in op.reads) else _total_norm(args)]
    positions = context.leaf_positions[op.stage or 0]
    grads = {number: grad for number, port, index in positions if (grad := args[port][index]) is not None}
    if op.writes[0].name == "squares":
        sums = {number: grad.square().sum() for number, grad in grads.items()}
        sharded = _pack({number: norm for number, norm in sums.items() if grads[number].ndim})
        unsharded = _pack({number: norm for number, norm in sums.items() if not grads[number].ndim})
        return [[vector for _, vector in sharded], (tuple(numbers for numbers, _ in sharded), unsharded)]
    return [_pack({number: torch.linalg.vector_norm(grad) for number, grad in grads.items()})]


def _pack(norms: Mapping[int, Tensor]) -> Packed:
    """Stack 0-d tensors into a vector for each dtype, each with the indices of its leaves in the net."""
    dtypes = dict.fromkeys(norm.dtype for norm in norms.values())
    norms_by_dtype = [{number: norm for number, norm in norms.items() if norm.dtype == dtype} for dtype in dtypes]
    return tuple((tuple(group), torch.stack([*group.values()])) for group in norms_by_dtype)


def _unpack_in_net_order(vectors: Iterable[tuple[tuple[int, ...], Tensor]]) -> list[Tensor]:
    """Return the 0-d tensors of packed vectors in the order of the net, on the device of the first vector."""
    pairs = [*vectors]
    norms = {
        number: norm
        for numbers, vector in pairs
        for number, norm in zip(numbers, vector.to(pairs[0][1].device).unbind(), strict=True)
    }
    return [norms[number] for number in sorted(norms)]


def _total_norm(stages: Sequence[Packed]) -> Tensor:
    norms = _unpack_in_net_order(chain.from_iterable(stages))
    if len({norm.dtype for norm in norms}) == 1:
        return torch.linalg.vector_norm(torch.stack(norms))
    # torch stacks norms dtype by dtype, in an order of its own. The norm of a 0-d tensor is its absolute value.
    return torch.nn.utils.get_total_norm(norms, foreach=False)


def _total_of_squares(args: Sequence[Any]) -> Tensor:
    """Return the root of all sums of squares, from the added vectors and the unsharded part of each stage."""
    # Each stage gives two arguments: the vectors that REDUCE has added, and (indices, unsharded sums) from its NORM.
    packed: list[tuple[tuple[int, ...], Tensor]] = []
    for vectors, (numbers, unsharded) in zip(args[::2], args[1::2], strict=True):
        packed += [*zip(numbers, vectors, strict=True), *unsharded]
    squares = _unpack_in_net_order(packed)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


@outside_autocast()
def validate(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define VALIDATE: whether a norm is below the clip; or whether all gradients are finite, and the next loss scale.

    A norm that is NaN or infinite is not below. The scale follows `torch.amp.GradScaler`: it grows after
    `growth_interval` finite steps, unless it would be infinite, and shrinks after any other step.
    """
    settings = dict(op.options)
    if op.reads[0].name == "norm":
        return [_clip_factor(settings["clip"], args[0]) == 1]
    *flags, (scale, steps) = args
    valid = torch.stack([flag.to(scale.device) for flag in flags]).amax() == 0
    grows = valid & (steps + 1 == settings["growth_interval"])
    grown = scale * settings["growth_factor"]
    grown = torch.where(torch.isfinite(grown), grown, scale)
    next_scale = torch.where(grows, grown, torch.where(valid, scale, scale * settings["backoff_factor"]))
    return [valid, (next_scale, torch.where(valid & ~grows, steps + 1, torch.zeros_like(steps)))]


@outside_autocast()
def unscale(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define UNSCALE: divide gradients by the loss scale, and return 1.0 if one is not finite, else 0.0."""
    grads, (scale, _) = args
    # The reciprocal in double and then float is GradScaler's own, for the same bits.
    inverse = scale.double().reciprocal().float()
    unscaled = [None if grad is None else grad * inverse.to(grad.device) for grad in grads]
    nonfinite_flags = [(~torch.isfinite(grad)).any().float() for grad in unscaled if grad is not None]
    return [unscaled, torch.stack(nonfinite_flags).amax() if nonfinite_flags else torch.zeros(())]


def _clip_factor(clip: float, norm: Tensor) -> Tensor:
    """Return the factor of all gradients under a clip, as `torch.nn.utils.clip_grad_norm_` computes it."""
    return torch.clamp(clip / (norm + 1e-6), max=1.0)
