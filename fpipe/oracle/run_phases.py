"""Check the first phases of a recorded step as equations on the record, each on the results of the phase before.

start         before of step t + 1 = after of step t  batch      rows of the microbatches = rows of the step
accumulation  grads[k] = grads[k - 1] + g[k]          reduction  reduced = sum or mean of the ranks' grads
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.oracle.explain_call import explain_gradient, scale_between
from fpipe.oracle.microbatch_replay import MicrobatchReplay
from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.run_report import PHASES, Fault, Findings, distance, eps_of
from fpipe.recording.record_files import hash_tensor, hashes_of
from fpipe.verification.report import to_double

Tensors = Mapping[str, Tensor]

# Sums over microbatches and ranks round once each.
_SUM_EPSILONS = 8.0


def add_fault(findings: Findings, subject: str, phase: str, mistake: str, step: int, microbatch: int = 0) -> None:
    """Add a fault of a phase, unless the phase has the same one in this step already."""
    fault = Fault(subject, phase, mistake, (step, PHASES.index(phase), microbatch))
    if all((old.phase, old.mistake, old.moment[0]) != (phase, mistake, step) for old in findings.faults):
        findings.faults.append(fault)


def judge_start(ranks: Sequence[RecordedStep], former: Sequence[RecordedStep] | None, findings: Findings) -> None:
    """Check that a step starts where the one before ended, with copies that are equal on all ranks."""
    step = ranks[0].step
    for rank, former_rank in zip(ranks, former or (), strict=False):
        if former_rank.step != step - 1:
            continue
        last_hashes, first_hashes = former_rank.header["after"], rank.header["before"]
        changed = [name for name in first_hashes if name in last_hashes and first_hashes[name] != last_hashes[name]]
        if changed:
            is_stale = all(first_hashes[name] == former_rank.header["before"].get(name) for name in changed)
            numbers = (
                "those before the step before: its update is lost" if is_stale else "not those after the step before"
            )
            add_fault(findings, changed[0], "start", f"the parameters of rank {rank.rank} are {numbers}", step)
        states = former_rank.header["state_after"], rank.header["state_before"]
        if states[0] and states[0] != states[1]:
            name = next((name for name in states[0] if states[0][name] != states[1].get(name)), "the optimizer")
            mistake = f"the optimizer state of rank {rank.rank} is not that after the step before"
            add_fault(findings, name, "start", mistake, step)
    if not former:
        _judge_copies(ranks, "before", "start", findings)


def judge_replicas(ranks: Sequence[RecordedStep], findings: Findings) -> None:
    """Check that copies of a parameter are equal on all ranks after the update."""
    _judge_copies(ranks, "after", "replicas", findings)


def _judge_copies(ranks: Sequence[RecordedStep], key: str, phase: str, findings: Findings) -> None:
    first_copies = dict[str, tuple[int, Any]]()
    is_start = key == "before"
    for rank in ranks:
        hashes: dict[str, Any] = rank.header[key]
        for name, tensor_hash in hashes.items():
            first_rank, first_hash = first_copies.setdefault(
                rank.names.first_name.get(name, name), (rank.rank, tensor_hash)
            )
            # Copies that differed before the step are no fault of this step.
            was_equal = is_start or rank.header["before"].get(name) == ranks[first_rank].header["before"].get(name)
            if first_hash != tensor_hash and was_equal and name not in rank.unjudged:
                sentence = f"rank {rank.rank} has another copy than rank {first_rank}"
                add_fault(
                    findings, name, phase, f"{sentence} {'at the start' if is_start else 'after the step'}", rank.step
                )


def note_equal_draws(ranks: Sequence[RecordedStep], findings: Findings) -> None:
    """Note modules that draw the same random numbers on two ranks for other inputs: their seeds are equal."""
    # No fault: Megatron gives all replicas one seed on purpose.
    inputs_by_draw = dict[tuple[Any, ...], tuple[int, Any]]()
    for rank in ranks:
        for k, microbatch in enumerate(rank.header["microbatches"]):
            for call in microbatch["calls"]:
                if "rng" not in call:
                    continue
                draw = k, call["module"], call["rng"][0]
                first_rank, first_inputs = inputs_by_draw.setdefault(draw, (rank.rank, call["args"]))
                if first_rank != rank.rank and first_inputs != call["args"]:
                    findings.notes[
                        f"{call['module'] or 'The net'} draws the same numbers on ranks {first_rank} and {rank.rank}: "
                        "are their seeds equal?"
                    ] = None


def judge_batch(rank: RecordedStep, findings: Findings) -> None:
    """Check that the microbatches of a rank deal each row of its batch once."""
    batch = [rank.record.tensor(name) for name in hashes_of(rank.header["batch"])]
    parts = [[rank.record.tensor(name) for name in hashes_of(part["batch"])] for part in rank.header["microbatches"]]
    if not batch or not parts or any(len(part) != len(batch) for part in parts):
        return
    for position, tensor in enumerate(batch):
        if not tensor.ndim or any(part[position].shape[1:] != tensor.shape[1:] for part in parts):
            continue
        dealt = Counter(hash_tensor(row) for part in parts for row in part[position])
        meant = Counter(hash_tensor(row) for row in tensor)
        missing, extra = (meant - dealt).total(), (dealt - meant).total()
        if missing or extra:
            texts = [f"{missing} of its {len(tensor)} rows are in no microbatch"] * bool(missing)
            texts += [f"{extra} rows of its microbatches are not in it, or there twice"] * bool(extra)
            subject = f"rank {rank.rank}" if len(batch) == 1 else f"tensor {position} of the batch of rank {rank.rank}"
            add_fault(findings, subject, "batch", " and ".join(texts), rank.step)
            return
    # All tensors of a row have to stay together: inputs and targets, and a mask.
    columns = [tensor for tensor in batch if tensor.ndim and len(tensor) == len(batch[0])]
    if len(columns) == len(batch):
        whole_rows = {tuple(map(hash_tensor, row)) for row in zip(*batch, strict=True)}
        dealt_rows = {tuple(map(hash_tensor, row)) for part in parts for row in zip(*part, strict=False)}
        if whole_rows != dealt_rows:
            mistake = "rows are combined with inputs, targets or masks of other rows"
            add_fault(findings, f"rank {rank.rank}", "batch", mistake, rank.step)


def judge_accumulation(
    ranks: Sequence[RecordedStep], replays: Sequence[Sequence[MicrobatchReplay]], findings: Findings
) -> None:
    """Check that each microbatch adds its gradient, on its rank or, where the backward reduces, on all ranks."""
    grads = [rank.microbatch_grads() for rank in ranks]
    for k in range(max(map(len, grads), default=0)):
        # 1. On each rank, add the replayed gradients of microbatch k to the gradients recorded before it.
        sums: list[Tensors | None] = []
        for number, rank in enumerate(ranks):
            has_all = k < len(grads[number]) and replays[number][k].is_whole
            sums.append(_add(grads[number][k - 1] if k else {}, replays[number][k].param_grads) if has_all else None)
            if k < len(grads[number]) and not has_all:
                findings.notes[f"Gradients of rank {rank.rank} are not judged: not every call could be replayed."] = (
                    None
                )
        # 2. Compare each recorded gradient with the sum of its rank, or of all ranks, and explain a difference.
        for number, rank in enumerate(ranks):
            own_sum = sums[number]
            if own_sum is None:
                continue
            former_grads = grads[number][k - 1] if k else rank.tensors("grads_before")
            for name in {**own_sum, **grads[number][k]}:
                if name in rank.unjudged:
                    continue
                expected = own_sum.get(name)
                if expected is None:
                    expected = former_grads.get(name, torch.zeros_like(grads[number][k][name])) if k else None
                expected = torch.zeros_like(rank.before[name]) if expected is None else expected
                actual = grads[number][k].get(name)
                copies = [copy[name] for copy in sums if copy is not None and name in copy]
                limit = sum(replays[i][k].limits.get(name, 0.0) for i, copy in enumerate(sums) if copy is not None)
                label = f"step {rank.step}: gradient of {name} after microbatch {k}, rank {rank.rank}"
                if actual is None:
                    if expected.count_nonzero():
                        add_fault(findings, name, "accumulation", "no gradient reaches it", rank.step, k)
                    continue
                replay = replays[number][k]
                former = grads[number][k - 1] if k else {}
                is_right = _is_sum_of_later(label, actual, name, former, replay, findings)
                if not is_right and not _is_sum(label, actual, expected, copies, replay.roots, limit, findings):
                    own_grad = replays[number][k].param_grads.get(name, torch.zeros_like(actual))
                    mistake = _explain_accumulation(actual, own_grad, former_grads.get(name), k, expected)
                    add_fault(findings, name, "accumulation", mistake, rank.step, k)


def _is_sum(
    label: str,
    actual: Tensor,
    expected: Tensor,
    copies: Sequence[Tensor],
    roots: int,
    limit: float,
    findings: Findings,
) -> bool:
    """Whether a gradient is the sum of its rank, or the sum or mean over all ranks."""
    # DDP and FSDP reduce in the backward, before any hook of ours.
    candidates = [expected]
    if len(copies) > 1:
        total = torch.stack([to_double(copy) for copy in copies]).sum(0)
        candidates += [(total / len(copies)).to(expected.dtype), total.to(expected.dtype)]
    # torch's pipelines divide by the number of microbatches once all of them are through.
    candidates += [candidate / roots for candidate in candidates] if roots > 1 else []
    nearest = min(candidates, key=lambda candidate: distance(actual, candidate))
    rounding = (
        _SUM_EPSILONS * eps_of(actual, expected) * sum(float(to_double(copy).norm()) for copy in copies or [expected])
    )
    return findings.agree(label, actual, nearest, lambda: limit + rounding)


def _is_sum_of_later(
    label: str, actual: Tensor, name: str, former: Tensors, replay: MicrobatchReplay, findings: Findings
) -> bool:
    """Whether a gradient is the sum of all forwards but the first, which is then a pipeline's trial of shapes."""
    if name not in replay.later_grads:
        return False
    total = _add(former, {name: replay.later_grads[name]})[name]
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


def final_grads(rank: RecordedStep) -> Tensors:
    """Return the gradients of a rank after the reduction and before the clip."""
    if "reduced" in rank.header:
        return rank.tensors("reduced")
    if "clipped" in rank.header or rank.header["meant"]["clip"] is not None or "updated" not in rank.header:
        grads = rank.microbatch_grads()
        return grads[-1] if grads else {}
    return rank.tensors("updated")


def is_clipped_first(rank: RecordedStep) -> bool:
    """Whether a rank clips its gradients before they are reduced."""
    events = rank.header["events"]
    return "reduced" in events and "clipped" in events[: events.index("reduced")]


def judge_reduction(ranks: Sequence[RecordedStep], findings: Findings) -> None:
    """Check that reduced gradients are the sum or mean over the ranks."""
    # A clip before the reduction is a fault of the clip, and what is reduced is clipped.
    local = [
        rank.tensors("clipped") if is_clipped_first(rank) else rank.microbatch_grads()[-1]
        for rank in ranks
        if rank.header["microbatches"]
    ]
    if len(local) != len(ranks):
        return
    final = [final_grads(rank) for rank in ranks]
    for name in dict.fromkeys(name for grads in final for name in grads):
        holders = [i for i, grads in enumerate(local) if name in grads and name in final[i]]
        if not holders:
            continue
        copies = [local[i][name] for i in holders]
        total = torch.stack([to_double(copy) for copy in copies]).sum(0)
        n = len(copies)
        are_equal = all(distance(copy, copies[0]) <= 1e-6 * float(to_double(copies[0]).norm()) for copy in copies)
        # Where copies are equal, the backward has reduced them already, and a sum would do so twice.
        divisors = [n] if are_equal else [k for k in range(n, 0, -1) if n % k == 0]
        for i in holders:
            actual, rank = final[i][name], ranks[i]
            rights = [(total / k).to(actual.dtype) for k in divisors]
            nearest = min(rights, key=lambda right: distance(actual, right))
            limit = _SUM_EPSILONS * eps_of(actual) * sum(float(to_double(copy).norm()) for copy in copies)
            if n > 1 and not are_equal and nearest is not rights[0]:
                findings.notes[f"Gradients are summed over {n} ranks, not averaged: is the loss divided?"] = None
            label = f"step {rank.step}: reduced gradient of {name}, rank {rank.rank}"
            if not findings.agree(label, actual, nearest, lambda limit=limit: limit):
                mistake = _explain_reduction(actual, copies, holders.index(i), total, holders)
                add_fault(findings, name, "reduction", mistake, rank.step)
                break


def _explain_reduction(
    actual: Tensor, copies: Sequence[Tensor], position: int, total: Tensor, holders: Sequence[int]
) -> str:
    n = len(copies)
    # A mistake has to leave a thousandth of the difference: sums over ranks hardly round.
    error = distance(actual, total / n)
    if n == 1:
        return f"it is {explain_gradient(actual, copies[0])}, and no other rank has it"
    if distance(actual, copies[position]) <= 1e-3 * error:
        return f"it is not added over ranks: rank {holders[position]} has its own"
    for missing, copy in enumerate(copies):
        remaining = total - to_double(copy)
        if any(distance(to_double(actual), remaining / k) <= 1e-3 * error for k in (1, n - 1, n)):
            return f"rank {holders[missing]} is missing"
    scale = scale_between(to_double(actual), total / n)
    if scale is not None and scale != 1:
        return f"it is {scale:.6g} x the mean of {n} ranks: {'reduced' if scale > 1 else 'divided'} twice?"
    return f"it is {explain_gradient(to_double(actual), total / n)}, the mean of {n} ranks"


def _add(former: Tensors, grads: Tensors) -> dict[str, Tensor]:
    """Return the sum of two sets of gradients by name."""
    sums: dict[str, Any] = dict(former)
    for name, grad in grads.items():
        sums[name] = sums[name] + grad.to(sums[name].dtype) if name in sums else grad
    return sums
