"""Check the sums of gradients in a recorded step: over its microbatches, and over the ranks.

accumulation  grads[k] = grads[k - 1] + g[k]          reduction  reduced = sum or mean of the ranks' grads
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fpipe.oracle.explain_call import explain_gradient, scale_between
from fpipe.oracle.microbatch_replay import MicrobatchReplay
from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.run_phases import add_fault, final_grads, is_clipped_first
from fpipe.oracle.run_report import Findings, distance, eps_of
from fpipe.verification.report import to_double

Tensors = Mapping[str, Tensor]

# Sums over microbatches and ranks round once each.
_SUM_EPSILONS = 8.0


@dataclass(frozen=True)
class _Accumulation:
    """The gradients of a rank before and after a microbatch k, with the replay of the microbatch."""

    rank: RecordedStep
    k: int
    replay: MicrobatchReplay
    former: Tensors
    actual: Tensors

    @cached_property
    def sums(self) -> dict[str, Tensor]:
        """The gradients that the rank should have, if nothing is reduced yet."""
        sums: dict[str, Any] = dict(self.former)
        for name, grad in self.replay.param_grads.items():
            sums[name] = sums[name] + grad.to(sums[name].dtype) if name in sums else grad
        return sums


def judge_accumulation(
    ranks: Sequence[RecordedStep], replays: Sequence[Sequence[MicrobatchReplay]], findings: Findings
) -> None:
    """Check that each microbatch adds its gradient, on its rank or, where the backward reduces, on all ranks."""
    grads = [rank.microbatch_grads() for rank in ranks]
    for k in range(max(map(len, grads), default=0)):
        accumulations = list[_Accumulation]()
        for rank, rank_grads, rank_replays in zip(ranks, grads, replays, strict=True):
            if k < len(rank_grads) and rank_replays[k].is_whole:
                former = rank_grads[k - 1] if k else {}
                accumulations.append(_Accumulation(rank, k, rank_replays[k], former, rank_grads[k]))
            elif k < len(rank_grads):
                sentence = f"Gradients of rank {rank.rank} are not judged: not every call could be replayed."
                findings.notes[sentence] = None
        for accumulation in accumulations:
            for name in {**accumulation.sums, **accumulation.actual}:
                if name not in accumulation.rank.unjudged:
                    _judge_sum(name, accumulation, accumulations, findings)


def _judge_sum(
    name: str, accumulation: _Accumulation, accumulations: Sequence[_Accumulation], findings: Findings
) -> None:
    """Compare a gradient with the sum of its rank, or of all ranks."""
    rank, k, replay = accumulation.rank, accumulation.k, accumulation.replay
    expected, actual = accumulation.sums.get(name), accumulation.actual.get(name)
    expected = torch.zeros_like(rank.before[name]) if expected is None else expected
    if actual is None:
        if expected.count_nonzero():
            add_fault(findings, name, "accumulation", "no gradient reaches it", rank.step, k)
        return
    holders = [holder for holder in accumulations if name in holder.sums]
    candidates = _list_sums(name, expected, accumulation.former.get(name, 0.0), holders)
    divisor, nearest = min(candidates, key=lambda candidate: distance(actual, candidate[1]))
    size = sum(float(to_double(holder.sums[name]).norm()) for holder in holders)
    limit = sum(holder.replay.limits.get(name, 0.0) for holder in holders)
    limit += _SUM_EPSILONS * eps_of(actual, expected) * size
    if divisor == 1:
        rank.summed_names.add(name)
    label = f"step {rank.step}: gradient of {name} after microbatch {k}, rank {rank.rank}"
    if _is_sum_of_later(label, actual, name, accumulation.former, replay, findings):
        return
    if not findings.agree(label, actual, nearest, lambda: limit):
        grad = replay.param_grads.get(name, torch.zeros_like(actual))
        former = accumulation.former.get(name) if k else rank.tensors("grads_before").get(name)
        mistake = _explain_accumulation(actual, grad, former, k, expected)
        add_fault(findings, name, "accumulation", mistake, rank.step, k)


def _list_sums(
    name: str, expected: Tensor, former: Tensor | float, holders: Sequence[_Accumulation]
) -> list[tuple[int, Tensor]]:
    """Return the values that a gradient may have, each with the divisor of a sum over ranks, or 0 before a reduction.

    Args:
        name: of the parameter.
        expected: the sum over the microbatches of this rank.
        former: what the microbatches before have left.
        holders: the ranks that have the parameter.
    """
    sums = [(0, expected)]
    if len(holders) > 1:
        # DDP and FSDP reduce in the backward, before any hook of ours: all that has been added up, or the last
        # microbatch's gradient alone.
        grads = (holder.replay.param_grads.get(name) for holder in holders)
        for terms, start in (([holder.sums[name] for holder in holders], 0.0), (grads, former)):
            total = _sum(term for term in terms if term is not None)
            sums += [(k, (start + total / k).to(expected.dtype)) for k in _divisors_of(len(holders))]
    # torch's pipelines divide by the number of microbatches once all of them are through.
    roots = max((holder.replay.roots for holder in holders), default=1)
    return sums + [(k, value / roots) for k, value in sums] * (roots > 1)


def _is_sum_of_later(
    label: str, actual: Tensor, name: str, former: Tensors, replay: MicrobatchReplay, findings: Findings
) -> bool:
    """Whether a gradient is the sum of all forwards but the first, which is then a pipeline's trial of shapes."""
    if name not in replay.later_grads:
        return False
    grad = replay.later_grads[name]
    total = former[name] + grad if name in former else grad
    limit = replay.later_limits[name] + _SUM_EPSILONS * eps_of(actual, total) * float(to_double(total).norm())
    nearest = min((total, total / (replay.roots - 1)), key=lambda candidate: distance(actual, candidate))
    if distance(actual, nearest) > limit:
        return False
    findings.agree(label, actual, nearest, lambda: limit)
    findings.notes["The first forward adds no gradient: it counts as a pipeline's trial run of shapes."] = None
    return True


def _explain_accumulation(actual: Tensor, grad: Tensor, former_grad: Tensor | None, k: int, expected: Tensor) -> str:
    former = torch.zeros_like(grad) if former_grad is None else former_grad.to(grad.dtype)
    mistakes = (
        (grad, f"microbatch {k} overwrites the gradients of those before"),
        (former, f"microbatch {k} adds nothing"),
        (former + grad, "gradients of the step before are still in it"),
        (former + 2 * grad, f"microbatch {k} counts twice"),
    )
    error = distance(actual, expected)
    for value, sentence in mistakes:
        if distance(actual, value) <= 1e-3 * error and value.count_nonzero():
            return sentence
    return f"the gradient of microbatch {k} is {explain_gradient(actual - former, grad)}"


def judge_reduction(ranks: Sequence[RecordedStep], losses: int, findings: Findings) -> None:
    """Check that reduced gradients are the sum or mean over the ranks.

    Args:
        ranks: the step of each rank.
        losses: on how many ranks a loss is computed, over which a gradient of all of them may be averaged.
        findings: where the faults go.
    """
    # A clip before the reduction is a fault of the clip, and what is reduced is clipped.
    local = [
        rank.tensors("clipped") if is_clipped_first(rank) else rank.microbatch_grads()[-1]
        for rank in ranks
        if rank.header["microbatches"]
    ]
    if len(local) != len(ranks):
        return
    final, name_by_times = [final_grads(rank) for rank in ranks], dict[float, str]()
    for name in dict.fromkeys(name for grads in final for name in grads):
        holders = [i for i, grads in enumerate(local) if name in grads and name in final[i]]
        if not holders:
            continue
        copies = [local[i][name] for i in holders]
        n, total = len(copies), _sum(copies)
        are_equal = all(distance(copy, copies[0]) <= 1e-6 * float(to_double(copies[0]).norm()) for copy in copies)
        # Where copies are equal, the backward has reduced them already, and a sum would do so twice. An expert that
        # takes tokens of all ranks has the sum of their gradients; a digest does not say which one that is.
        is_digest = ranks[0].is_digest
        is_expert = n < losses or is_digest or all(name in ranks[i].summed_names for i in holders)
        addends = losses if is_expert else 1
        divisors = [n * k for k in _divisors_of(addends)] if are_equal else _divisors_of(n)
        for i in holders:
            actual, rank = final[i][name], ranks[i]
            # A loss scale is divided out before the clip.
            scales = dict.fromkeys((k, factor) for factor in (1.0, rank.loss_factor) for k in divisors)
            rights = {scale: (total / (scale[0] * scale[1])).to(actual.dtype) for scale in scales}
            divisor, factor = min(rights, key=lambda scale: distance(actual, rights[scale]))
            nearest, times = rights[divisor, factor], 1.0 if is_digest and are_equal else divisors[0] / divisor
            # A sum over ranks undoes a loss that is divided by their number.
            is_undone = factor != 1.0 or (times != 1.0 and abs(times * rank.loss_factor - 1) < 1e-3)
            rank.is_unscaled |= is_undone
            limit = _SUM_EPSILONS * eps_of(actual) * sum(float(to_double(copy).norm()) for copy in copies)
            if times != 1.0 and not is_undone:
                name_by_times.setdefault(times, name)
            label = f"step {rank.step}: reduced gradient of {name}, rank {rank.rank}"
            if not findings.agree(label, actual, nearest, lambda limit=limit: limit):
                mistake = _explain_reduction([final[j][name] for j in holders], copies, holders.index(i), holders)
                add_fault(findings, name, "reduction", mistake, rank.step)
                break
    for times, name in name_by_times.items():
        sentence = f"Gradients such as that of {name} are {times:g} x the mean of the ranks: is the loss divided?"
        findings.notes[sentence] = None


def _explain_reduction(
    reduced: Sequence[Tensor], copies: Sequence[Tensor], position: int, holders: Sequence[int]
) -> str:
    n, total, actual = len(copies), _sum(copies), reduced[position]
    # A mistake has to leave a thousandth of the difference: sums over ranks hardly round.
    error = distance(actual, total / n)
    if n == 1:
        return f"it is {explain_gradient(actual, copies[0])}, and no other rank has it"
    for group_by_rank in _list_groupings(n):
        sums = [_sum(copies[i] for i in group) for group in group_by_rank]
        # Gradients may be divided all the same.
        pairs = [*zip(map(to_double, reduced), sums, strict=True)]
        if any(all(distance(grad, total / k) <= 1e-3 * error for grad, total in pairs) for k in _divisors_of(n)):
            group = [holders[i] for i in group_by_rank[position]]
            if len(group) == 1:
                return f"it is not added over ranks: rank {group[0]} has its own"
            return f"it is added over ranks {', '.join(map(str, group))} alone"
    for missing, copy in enumerate(copies):
        remaining = total - to_double(copy)
        if any(distance(to_double(actual), remaining / k) <= 1e-3 * error for k in (1, n - 1, n)):
            return f"rank {holders[missing]} is missing"
    scale = scale_between(to_double(actual), total / n)
    if scale is not None and scale != 1:
        return f"it is {scale:.6g} x the mean of {n} ranks: {'reduced' if scale > 1 else 'divided'} twice?"
    return f"it is {explain_gradient(to_double(actual), total / n)}, the mean of {n} ranks"


def _list_groupings(n: int) -> Iterator[list[range]]:
    """Yield the ranks that each of n ranks adds with, along each axis that their mesh may have, small groups first.

    >>> [*_list_groupings(4)][1]
    [range(0, 2), range(0, 2), range(2, 4), range(2, 4)]
    >>> [*_list_groupings(4)][2]
    [range(0, 4, 2), range(1, 4, 2), range(0, 4, 2), range(1, 4, 2)]
    """
    yield [range(i, i + 1) for i in range(n)]
    for size in _divisors_of(n)[-2:0:-1]:
        yield [range(i - i % size, i - i % size + size) for i in range(n)]
        yield [range(i % (n // size), n, n // size) for i in range(n)]


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors in double precision."""
    return sum(map(to_double, tensors), torch.zeros(()))


def _divisors_of(n: int) -> list[int]:
    """Return the divisors of a number, the largest first.

    >>> _divisors_of(6)
    [6, 3, 2, 1]
    """
    return [k for k in range(n, 0, -1) if n % k == 0]
