"""Check the loss of a recorded step: the backwards of its microbatches start from the gradient of the batch's loss.

d loss(all outputs, all targets) / d output[k] = share[k] * d loss(output[k], target[k]) / d output[k]

A mean over 4 equal microbatches has shares of 1/4, a mean over tokens those of their tokens, and a sum has shares of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fpipe import tree
from fpipe.meaning.single_device.microbatch import join
from fpipe.oracle.explain_call import explain_gradient, scale_between
from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.run_phases import add_fault
from fpipe.oracle.run_report import Findings
from fpipe.recording.record_files import from_spec, hashes_of, is_plain

Loss = Callable[..., Tensor]


# How near two factors are that count as equal; and two losses, which may draw different dropouts.
_TOLERANCE, _LOSS_TOLERANCE = 1e-3, 0.1


@dataclass(frozen=True)
class _MicrobatchLoss:
    """The output and targets of a microbatch, with the recorded gradient of the output.

    A net that computes its loss itself has the loss as output, no targets, and `inputs`, its arguments by position and
    by keyword.
    """

    output: Tensor
    targets: tuple[Any, ...]
    gradient: Tensor
    inputs: Any = ()


def judge_loss(net: nn.Module, rank: RecordedStep, loss: Loss | None, findings: Findings) -> None:
    """Check that each backward starts from the gradient of the batch's loss, times a factor that they share."""
    losses = [_read_loss(rank, microbatch, loss) for microbatch in rank.header["microbatches"]]
    parts, factors = [part for part in losses if part is not None], list[float]()
    for k, part in enumerate(losses):
        if part is None:
            continue
        expected = _gradient(loss, part.output, part.targets)
        factor = scale_between(part.gradient, expected) if part.targets else float(part.gradient)
        if factor is None:
            add_fault(findings, "the loss", "loss", _explain_loss(part.gradient, expected), rank.step, k)
            return
        factors.append(factor)
    if not parts or len(parts) < len(losses):
        return
    n = len(factors)
    shares, even_shares = _shares(net, rank, loss, parts), [1 / n] * n
    fitting_shares = next((x for x in (shares, even_shares) if x is not None and _are_proportional(factors, x)), None)
    if fitting_shares is None:
        text = ", ".join(f"{factor:.4g}" for factor in factors)
        mistake = f"the losses of the microbatches are {text} x the reference's"
        add_fault(findings, "the loss", "loss", mistake, rank.step)
    elif factors[0] < 0:
        add_fault(findings, "the loss", "loss", "its sign is turned", rank.step)
    elif shares is None and n > 1 and factors[0] == 1:
        findings.notes[f"The losses of {n} microbatches are added: right for sums, and {n} x for means."] = None
    else:
        rank.loss_factor = sum(factors) / sum(fitting_shares)
        if fitting_shares is even_shares and shares is not None:
            text = ", ".join(f"{share:.3g}" for share in shares)
            findings.notes[f"All microbatches count the same, although their shares of the loss are {text}."] = None


def _explain_loss(actual: Tensor, expected: Tensor) -> str:
    # Where the reference has no gradient at all, nothing was to count.
    is_ignored = (expected == 0).all(-1, keepdim=True)
    if is_ignored.any() and scale_between(actual.masked_fill(is_ignored, 0), expected) is not None:
        return "outputs count whose targets are ignored"
    return f"the gradient of the output is {explain_gradient(actual, expected)}"


def judge_loss_factor(rank: RecordedStep, findings: Findings) -> None:
    """Name a factor of the loss that nothing has undone before the clip."""
    factor, n = rank.loss_factor, len(rank.header["microbatches"])
    if rank.is_unscaled or abs(factor - 1) <= _TOLERANCE:
        return
    if n > 1 and abs(factor - n) <= _TOLERANCE * n:
        mistake = f"the losses of {n} microbatches are summed, not averaged"
        add_fault(findings, "the loss", "loss", mistake, rank.step)
    else:
        findings.notes[f"The loss is {factor:.6g} x the reference's."] = None


def _read_loss(rank: RecordedStep, microbatch: dict[str, Any], loss: Loss | None) -> _MicrobatchLoss | None:
    """Return the output of a microbatch with its targets and gradient, None if the record lacks one."""
    roots = [call for call in microbatch["calls"] if call["module"] == "" and call["parent"] is None]
    if len(roots) != 1 or not roots[0]["grads"].get("0") or not is_plain(microbatch["batch"]):
        return None
    output, gradient = (
        rank.record.tensor(name) for name in (next(hashes_of(roots[0]["output"])), roots[0]["grads"]["0"])
    )
    if not output.ndim:
        is_known = all(map(is_plain, (roots[0]["args"], roots[0]["kwargs"])))
        inputs = [from_spec(roots[0][key], rank.record.tensor) for key in ("args", "kwargs")] if is_known else ()
        return _MicrobatchLoss(output, (), gradient, inputs)
    pair: Any = from_spec(microbatch["batch"], rank.record.tensor)
    targets = pair[1:] if isinstance(pair, tuple) else ()
    if loss is None or "tensor" not in roots[0]["output"] or not targets:
        return None
    return _MicrobatchLoss(output, targets, gradient)


def _gradient(loss: Loss | None, output: Tensor, targets: Sequence[Any]) -> Tensor:
    if loss is None or not targets:
        return torch.ones_like(output)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss(output.requires_grad_(), *targets), [output])
    return gradient


def _shares(
    net: nn.Module, rank: RecordedStep, loss: Loss | None, parts: Sequence[_MicrobatchLoss]
) -> list[float] | None:
    """Return the share of each microbatch in the loss of the batch, None where microbatches cannot be joined."""
    try:
        if not parts[0].targets:
            return _shares_of_own_loss(net, rank, parts)
        output, targets = join([(part.output.detach(), part.targets) for part in parts])
        gradients = _gradient(loss, output, targets).split([len(part.output) for part in parts])
        pairs = [*zip(gradients, parts, strict=True)]
        shares = [scale_between(gradient, _gradient(loss, part.output, part.targets)) for gradient, part in pairs]
    # Microbatches that are padded to several lengths, or a net that takes no others.
    except (RuntimeError, ValueError, TypeError):
        return None
    known_shares = [share for share in shares if share is not None]
    return known_shares if len(known_shares) == len(parts) else None


def _shares_of_own_loss(net: nn.Module, rank: RecordedStep, parts: Sequence[_MicrobatchLoss]) -> list[float] | None:
    """Return the shares of microbatches whose loss the net computes itself: of means 1/n, of sums 1."""
    args, kwargs = join([part.inputs for part in parts])
    rank.load(net)
    with torch.no_grad():
        batch_loss = next(leaf for leaf in tree.leaves(net(*args, **kwargs)) if isinstance(leaf, Tensor))
    n, total = len(parts), sum(float(part.output) for part in parts)
    # Far enough from each other for any n.
    errors = {share: abs(float(batch_loss) / total - share) / share for share in (1 / n, 1.0)} if total else {}
    return next(([share] * n for share, error in errors.items() if error <= _LOSS_TOLERANCE), None)


def _are_proportional(factors: Sequence[float], shares: Sequence[float]) -> bool:
    scale = sum(factors) / sum(shares)
    return all(
        abs(factor - scale * share) <= _TOLERANCE * abs(scale * share)
        for factor, share in zip(factors, shares, strict=True)
    )
