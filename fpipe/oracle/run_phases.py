"""Check the batch of a recorded step, and its parameters before and after, as equations on the record.

start         before of step t + 1 = after of step t  batch      rows of the microbatches = rows of the step
replicas      after of rank r = after of rank 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.run_report import PHASES, Fault, Findings
from fpipe.recording.record_files import hash_tensor, hashes_of

Tensors = Mapping[str, Tensor]


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
