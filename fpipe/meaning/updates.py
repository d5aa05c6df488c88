"""Define UPDATE, NORM, UNSCALE and VALIDATE: the next parameters and state, and what an update waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.optimizers.op_words import UpdateWords, names_of, words_of
from fpipe.meaning.optimizers.rules import State, Words, apply_rule, numbers_of
from fpipe.model import Model
from fpipe.program import Op


def update_params(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """UPDATE: each leaf that has a gradient by the rule, under the settings of its name; others stay as they are."""
    words = words_of(op.how)
    given = {value.name: arg for value, arg in zip(op.reads, args, strict=True)}
    params, states, grads = args[:3]
    leaves, spec = tree.flatten(params)
    now: list[Any] = [*leaves]
    state: list[Any] = spec.flatten_up_to(states)
    names = names_in(op, spec, context.model)
    at = [k for k, grad in enumerate(grads) if grad is not None]
    before, found, states = ([one[k] for k in at] for one in (leaves, grads, state))
    said, beside = words.of([names[k] for k in at]), (given.get("norm"), given.get("lr"), given.get("valid"))
    made, after = updated_leaves(words, said, [False] * len(at), before, found, states, *beside)
    for k, param, one in zip(at, made, after, strict=True):
        now[k], state[k] = param.requires_grad_(leaves[k].requires_grad), one
    return [tree.unflatten(spec, now), tree.unflatten(spec, state)]


def names_in(op: Op, spec: tree.Spec, model: Model) -> list[str]:
    """The names of the parameters that an UPDATE is of."""
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
        made = [one.detach() if mine else one.detach().clone() for one, mine in zip(params, own, strict=True)]
        pairs = zip(states, own, strict=True)
        return made, [one if mine else {word: leaf.clone() for word, leaf in one.items()} for one, mine in pairs]
    if norm is not None and words.clip is not None:
        share = _share(words.clip, norm)
        grads = [grad * share.to(grad.device) for grad in grads]
    grads = [
        grad if grad.dtype == param.dtype else grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)
    ]
    return apply_rule(words.by, settings, params, grads, states, numbers_of(lr), own)


def norm_of(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """NORM: of a stage the norms of its gradients, in the order of its parameters; of all stages the norm of these, as
    `torch.nn.utils.clip_grad_norm_` takes it. Of shards their squares, apart from those of numbers."""
    if op.writes[0].name == "norm":
        home, squared = args[0].device, any(value.port for value in op.reads)
        each = torch.cat([each.to(home) for each in args])
        return [each.sum().sqrt() if squared else torch.linalg.vector_norm(each)]
    grads = [args[port][at] for port, at in context.places[op.stage or 0]]
    if op.writes[0].name == "squares":
        return [_stacked([grad.square().sum() for grad in grads if grad is not None and rows(grad)]) for rows in _ROWS]
    return [_stacked([torch.linalg.vector_norm(grad) for grad in grads if grad is not None])]


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


_ROWS: tuple[Callable[[Tensor], bool], ...] = (lambda grad: grad.ndim > 0, lambda grad: grad.ndim == 0)


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack([*numbers]) if numbers else torch.zeros(0)
