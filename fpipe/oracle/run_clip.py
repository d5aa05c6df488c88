"""Check the norm of a recorded step's gradients, and their clip, as equations on the record.

norm    norm = |all reduced|            clip    clipped = reduced * min(1, c / norm)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt

from torch import Tensor

from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.run_phases import add_fault, final_grads, is_clipped_first
from fpipe.oracle.run_report import Findings, eps_of
from fpipe.verification.report import joint_norm, list_names, to_double

Tensors = Mapping[str, Tensor]

# Norms add many numbers, in an order of their own.
_NORM_TOLERANCE = 1e-4


def judge_norm(ranks: Sequence[RecordedStep], findings: Findings) -> None:
    """Check that the norm counts each gradient once."""
    # By name: a replica, or a tied parameter on two stages, is one leaf.
    leaves, ranks = dict[str, Tensor](), [rank.as_norms() for rank in ranks]
    for rank in ranks:
        leaves |= {name: grad for name, grad in final_grads(rank).items() if name not in leaves}
    if not leaves or any(rank.unjudged or is_clipped_first(rank) for rank in ranks):
        return
    right = joint_norm(leaves.values())
    tolerance = max(_NORM_TOLERANCE, 2 * eps_of(*leaves.values()))
    for rank in ranks:
        norm = rank.header.get("norm")
        if norm is None or abs(norm - right) <= tolerance * right:
            continue
        explanations = (
            sentence
            for sentence, value in _wrong_norms(rank, ranks, leaves, right)
            if abs(norm - value) <= tolerance * value
        )
        mistake = next(explanations, f"it is {norm:.6g}, not {right:.6g}")
        add_fault(findings, "the norm", "norm", mistake, rank.step)


def _wrong_norms(
    rank: RecordedStep, ranks: Sequence[RecordedStep], leaves: Tensors, right: float
) -> Iterator[tuple[str, float]]:
    n = len(ranks)
    rank_norms = [other_rank.header.get("norm") or 0.0 for other_rank in ranks]
    # Parts of DTensors are not recorded, but the squares of their norms add up.
    if n > 1 and abs(sqrt(sum(norm**2 for norm in rank_norms)) - right) <= _NORM_TOLERANCE * right:
        yield "each rank has the norm of its own part", rank.header["norm"]
    yield f"each rank has the norm of its own part (rank {rank.rank})", joint_norm(final_grads(rank).values())
    if rank.header["microbatches"]:
        yield (
            f"it is the norm before the reduction (rank {rank.rank})",
            joint_norm(rank.microbatch_grads()[-1].values()),
        )
    yield "it is that after the clip", joint_norm(rank.tensors("clipped").values())
    if n > 1:
        yield f"{n} copies are counted as {n} parts", right * sqrt(n)
        yield f"norms of {n} ranks are added, not their squares", right * n
    yield "it is the largest number, not the norm", max(float(to_double(grad).abs().max()) for grad in leaves.values())
    yield "norms of parameters are added, not their squares", sum(float(to_double(g).norm()) for g in leaves.values())
    for name, grad in leaves.items():
        square = float(to_double(grad).norm()) ** 2
        yield f"{name} is left out", sqrt(max(right**2 - square, 0.0))
        if rank.names.uses[name] > 1:
            yield f"the tied {name} is counted {rank.names.uses[name]} times", sqrt(right**2 + square)


def judge_clip(
    rank: RecordedStep, ranks: Sequence[RecordedStep], former: RecordedStep | None, findings: Findings
) -> None:
    """Check that clipped gradients are the reduced ones times min(1, clip / norm)."""
    final, updated = final_grads(rank), rank.tensors("updated") or rank.tensors("clipped")
    clip, events = rank.header["meant"]["clip"], rank.header["events"]
    if len(ranks) > 1 and is_clipped_first(rank):
        add_fault(findings, "the clip", "clip", "it stands before the reduction", rank.step)
        return
    if (
        not updated
        or final.keys() != updated.keys()
        or ("clipped" not in events and "reduced" not in events and clip is None)
    ):
        return
    # 1. The factor that is meant.
    norm = rank.header.get("norm")
    if norm is None and clip is not None:
        if len(ranks) > 1:
            return
        norm = joint_norm(final_grads(rank.as_norms()).values())
    factor = None if clip is None or norm is None else min(1.0, clip / (norm + 1e-6))
    scales = {name: _scale_of(updated[name], final[name]) for name in final if final[name].count_nonzero()}
    if factor is None:
        # Without a clip that is meant, any one factor may be: that of a clip, or of a loss scale.
        factor = next((scale for scale in scales.values() if scale), 1.0)
    # 2. The gradients that another factor scales.
    wrong = [name for name, scale in scales.items() if not _is_scaled(updated[name], scale, factor)]
    for name in scales:
        findings.agree(
            f"step {rank.step}: clipped gradient of {name}", updated[name], final[name] * factor, lambda: float("inf")
        )
    if not wrong:
        return
    clipped = rank.tensors("clipped")
    is_stale = (
        former is not None and "updated" in rank.header and rank.header["updated"] == former.header.get("updated")
    )
    if is_stale or (
        clipped and all(_is_scaled(clipped[name], _scale_of(clipped[name], final[name]), factor) for name in wrong)
    ):
        mistake = "gradients of the step before are used" if is_stale else "gradients change after the clip"
        add_fault(findings, wrong[0], "update", mistake, rank.step)
        return
    # 3. The mistake: their own factor, if they share one.
    wrong_scales = {scales[name] for name in wrong}
    common = next((scale for scale in wrong_scales if scale is not None), None)
    if any(s is None or abs(s - (common or 0.0)) > 1e-3 * abs(common or 0.0) for s in wrong_scales):
        common = None
    if len(wrong) == len(scales) and all(s is not None and abs(s - 1) < 1e-3 for s in wrong_scales):
        mistake = "gradients are not clipped"
    elif len(wrong) < len(scales):
        mistake = f"{list_names(wrong)} {'is' if len(wrong) == 1 else 'are'} not scaled as the others are"
    elif common is None:
        mistake = f"gradients are not {factor:.4g} x those before the clip, each by a factor of its own"
    else:
        mistake = f"gradients are {common:.4g} x those before the clip, not {factor:.4g} x"
    add_fault(findings, wrong[0] if len(wrong) < len(scales) else "the clip", "clip", mistake, rank.step)


def _is_scaled(actual: Tensor, scale: float | None, factor: float) -> bool:
    return scale is not None and abs(scale - factor) <= _clip_tolerance(actual) * factor


def _clip_tolerance(grad: Tensor) -> float:
    return max(_NORM_TOLERANCE, 2 * eps_of(grad))


def _scale_of(actual: Tensor, expected: Tensor) -> float | None:
    """Return the factor between two tensors, to the rounding of their dtype; None if there is none."""
    wide_actual, wide_expected = to_double(actual).flatten(), to_double(expected).flatten()
    scale = float(wide_actual @ wide_expected / (wide_expected @ wide_expected))
    error = float((wide_actual - scale * wide_expected).norm())
    return scale if error <= _clip_tolerance(actual) * float(wide_actual.norm()) else None
