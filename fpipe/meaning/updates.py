"""Define UPDATE, NORM, UNSCALE and VALIDATE: the next parameters and state, and what an update waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.optimizers.optimizer_state import UpdateWords, names_of, words_of
from fpipe.meaning.optimizers.rules import State, Words, apply_rule, numbers_of
from fpipe.meaning.purity.own_memory import laid_out_as
from fpipe.model import Model
from fpipe.program import Op


def update_params(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """UPDATE: each leaf that has a gradient by the rule, under the settings of its name; others stay as they are."""
    words = words_of(op.how)
    named = {value.name: arg for value, arg in zip(op.reads, args, strict=True)}
    bundle, bundle_states, grads = args[:3]
    leaves, spec = tree.flatten(bundle)
    leaf_states: list[Any] = spec.flatten_up_to(bundle_states)
    names = names_in(op, spec, context.model)
    trained = [k for k, grad in enumerate(grads) if grad is not None]
    params, dense_grads, states = ([column[k] for k in trained] for column in (leaves, grads, leaf_states))
    settings, numbers = words.of([names[k] for k in trained]), map(named.get, ("norm", "lr", "valid"))
    params, states = updated_leaves(words, settings, [False] * len(trained), params, dense_grads, states, *numbers)
    for k, param, state in zip(trained, params, states, strict=True):
        leaves[k], leaf_states[k] = param.requires_grad_(leaves[k].requires_grad), state
    return [tree.unflatten(spec, leaves), tree.unflatten(spec, leaf_states)]


def names_in(op: Op, spec: tree.Spec, model: Model) -> list[str]:
    """List the names of the parameters that an UPDATE is of."""
    names, port = names_of(spec), op.reads[0].port
    if not port:
        return names
    tied = str(model.owned(op.stage or 0)[port - 1].name)
    return [".".join(filter(None, (tied, name))) for name in names]


def updated_leaves(
    words: UpdateWords,
    settings: Sequence[Words],
    own: Sequence[bool],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    norm: Tensor | None,
    lr: Tensor | Mapping[str, Tensor] | None,
    valid: Tensor | None,
) -> tuple[list[Tensor], list[State]]:
    """The next parameters and states of leaves with gradients, `own` ones overwritten; if not `valid`, those before."""
    if valid is not None and not bool(valid):
        kept = [param.detach() if is_own else param.detach().clone() for param, is_own in zip(params, own, strict=True)]
        pairs = zip(states, own, strict=True)
        return kept, [state if is_own else {word: x.clone() for word, x in state.items()} for state, is_own in pairs]
    if norm is not None and words.clip is not None:
        share = _share(words.clip, norm)
        grads = [grad * share.to(grad.device) for grad in grads]
    # What is scattered to shards is contiguous; else a gradient has the strides of its parameter since its backward.
    grads = [laid_out_as(param, grad).to(param.dtype) for grad, param in zip(grads, params, strict=True)]
    return apply_rule(words.by, settings, params, grads, states, numbers_of(lr), own)


# The norms of a stage travel in one vector for each dtype, next to the numbers that their leaves have in the net. What
# joins the stages puts them in the net's order with these, so the cut does not show in the bits. Sums of squares, which
# replicas add up, travel without numbers, since only tensors can be added.
Packed = tuple[tuple[tuple[int, ...], Tensor], ...]


def norm_of(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """NORM: the norms of a stage's gradients, or the norm of all stages', as `torch.nn.utils.clip_grad_norm_` has it.

    Of shards a stage writes the sums of squares, and apart from them those of 0-d gradients, which are never sharded.
    """
    if op.writes[0].name == "norm":
        return [_total_of_squares(args) if any(value.port for value in op.reads) else _total(args)]
    places = context.places[op.stage or 0]
    grads = {number: grad for number, port, index in places if (grad := args[port][index]) is not None}
    if op.writes[0].name == "squares":
        sums = {number: grad.square().sum() for number, grad in grads.items()}
        sharded = _packed({number: norm for number, norm in sums.items() if grads[number].ndim})
        whole = _packed({number: norm for number, norm in sums.items() if not grads[number].ndim})
        return [[vector for _, vector in sharded], (tuple(numbers for numbers, _ in sharded), whole)]
    return [_packed({number: torch.linalg.vector_norm(grad) for number, grad in grads.items()})]


def _packed(norms: Mapping[int, Tensor]) -> Packed:
    """Pack 0-d tensors into a vector for each dtype, next to their numbers."""
    dtypes = dict.fromkeys(norm.dtype for norm in norms.values())
    each = [{number: norm for number, norm in norms.items() if norm.dtype == dtype} for dtype in dtypes]
    return tuple((tuple(group), torch.stack([*group.values()])) for group in each)


def _in_net_order(packed: Iterable[tuple[tuple[int, ...], Tensor]]) -> list[Tensor]:
    """Unpack 0-d tensors in the order of their numbers, on the device of the first vector."""
    pairs = [*packed]
    norms = {
        number: norm
        for numbers, vector in pairs
        for number, norm in zip(numbers, vector.to(pairs[0][1].device).unbind(), strict=True)
    }
    return [norms[number] for number in sorted(norms)]


def _total(stages: Sequence[Packed]) -> Tensor:
    norms = _in_net_order(chain.from_iterable(stages))
    if len({norm.dtype for norm in norms}) == 1:
        return torch.linalg.vector_norm(torch.stack(norms))
    # torch stacks norms dtype by dtype, in an order of its own. The norm of a 0-d tensor is its absolute value.
    return torch.nn.utils.get_total_norm(norms, foreach=False)


def _total_of_squares(args: Sequence[Any]) -> Tensor:
    """Take the root of all squares, of which each stage has added vectors, and then what its NORM put next to them."""
    packed: list[tuple[tuple[int, ...], Tensor]] = []
    for vectors, (numbers, whole) in zip(args[::2], args[1::2], strict=True):
        packed += [*zip(numbers, vectors, strict=True), *whole]
    squares = _in_net_order(packed)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def validate(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """VALIDATE: whether a norm leaves gradients as they are; one that is NaN or infinite does not. Or whether no
    infinite gradients were found, and the scale of the next step, as `torch.amp.GradScaler` has it."""
    how = dict(op.how)
    if op.reads[0].name == "norm":
        return [_share(how["clip"], args[0]) == 1]
    *flags, (scale, steps) = args
    valid = torch.stack([flag.to(scale.device) for flag in flags]).amax() == 0
    grows = valid & (steps + 1 == how["growth_interval"])
    grown = scale * how["growth_factor"]
    grown = torch.where(torch.isfinite(grown), grown, scale)
    after = torch.where(grows, grown, torch.where(valid, scale, scale * how["backoff_factor"]))
    return [valid, (after, torch.where(valid & ~grows, steps + 1, torch.zeros_like(steps)))]


def unscale(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """UNSCALE: gradients divided by the loss scale, in their dtype, and 1 if one of them is infinite or NaN, else 0."""
    grads, (scale, _) = args
    inverse = scale.double().reciprocal().float()
    real = [None if grad is None else grad * inverse.to(grad.device) for grad in grads]
    odd = [(~torch.isfinite(grad)).any().float() for grad in real if grad is not None]
    return [real, torch.stack(odd).amax() if odd else torch.zeros(())]


def _share(clip: float, norm: Tensor) -> Tensor:
    """Factor of all gradients, as `torch.nn.utils.clip_grad_norm_` does."""
    return torch.clamp(clip / (norm + 1e-6), max=1.0)
