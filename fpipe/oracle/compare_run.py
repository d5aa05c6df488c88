"""Judge a training run that fpipe did not make, from its record: where it goes wrong, in which phase, by which mistake.

a folder of record_run, the net, its loss        --> compare_run -->        a RunReport, or the first fault by its name
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from fpipe.oracle.microbatch_replay import MicrobatchReplay
from fpipe.oracle.recorded_step import RecordedStep, ReferenceNames
from fpipe.oracle.run_clip import judge_clip, judge_norm
from fpipe.oracle.run_loss import Loss, judge_loss, judge_loss_factor
from fpipe.oracle.run_phases import (
    judge_batch,
    judge_replicas,
    judge_start,
    note_equal_draws,
)
from fpipe.oracle.run_report import Findings, RunReport, report_of
from fpipe.oracle.run_sums import judge_accumulation, judge_reduction
from fpipe.oracle.run_update import judge_update
from fpipe.recording.record_files import read_record


def compare_run(net: nn.Module, folder: str | Path, *, loss: Loss | None = None) -> RunReport:
    """Judge a recorded run: name the first module or phase that is wrong, and the mistake.

    Each module is replayed on the inputs that it was handed, and each phase on what the phase before left. So a fault
    is named once, and its consequences are none. Tensors agree bitwise, or to the rounding that the reference itself
    shows under noise of one unit of its dtype.

    Args:
        net: the plain net on one device, as it is meant: unwrapped, with all layers. Its numbers do not matter.
        folder: the folder of `record_run`, with the files of all ranks.
        loss: the loss of a microbatch, `loss(output, target)`; None leaves it out.

    Returns:
        A `Report` with `.where`, `.phase` and `.mistake`, which are None, and notes on what was not judged.

    Raises:
        ValueError: a record that is damaged or incomplete, or of another net.
        GradientMismatch: a run that is wrong; its `.report` has where, phase and mistake.

    >>> import tempfile, torch, fpipe
    >>> mse, net = torch.nn.functional.mse_loss, torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.0)
    >>> x, t = torch.randn(4, 2), torch.randn(4, 1)
    >>> folder = tempfile.mkdtemp()
    >>> with fpipe.record_run(folder, net=net, optimizer=optimizer) as record:
    ...     with record.step((x, t), weight_decay=0.1):
    ...         with record.microbatch((x, t)):
    ...             mse(net(x), t).backward()
    ...         optimizer.step()
    >>> compare_run(torch.nn.Linear(2, 1), folder, loss=mse)
    Traceback (most recent call last):
    fpipe.verification.report.GradientMismatch: weight, update of step 0: there is no weight decay.
    """
    records = read_record(folder)
    # A copy, since the record's parameters are put into it.
    net = copy.deepcopy(net)
    names, findings = ReferenceNames(net.named_parameters(remove_duplicate=False)), Findings()
    former: list[RecordedStep] | None = None
    for step in records[0].steps:
        ranks = [RecordedStep(record, step, names) for record in records]
        judge_start(ranks, former, findings)
        judge_step(net, ranks, former, loss, findings)
        former = ranks
    for rank in former or ():
        for name in rank.header["unseen"]:
            findings.notes[f"Modules inside {name or 'the net'} are not seen: torch.compile runs no hooks in them."] = (
                None
            )
        for name in sorted(rank.unjudged):
            findings.notes[f"{name} is not judged: rank {rank.rank} has a part of another shape."] = None
    return report_of(findings)


def judge_step(
    net: nn.Module,
    ranks: Sequence[RecordedStep],
    former: Sequence[RecordedStep] | None,
    loss: Loss | None,
    findings: Findings,
) -> None:
    """Judge one step of all ranks, phase after phase."""
    # A stage of a pipeline has no loss, or that of the others too.
    whole_ranks = [rank for rank in ranks if "" not in rank.partial_modules(net)]
    losses = max(1, len(whole_ranks))
    if any(rank.is_digest for rank in ranks):
        findings.notes["Batch, forward, loss, backward, accumulation and update are not judged: it is a digest."] = None
        judge_reduction(ranks, losses, findings)
        judge_norm(ranks, findings)
        judge_replicas(ranks, findings)
        for rank in ranks:
            judge_clip(rank, ranks, None, findings)
        return
    note_equal_draws(ranks, findings)
    replays = list[list[MicrobatchReplay]]()
    for rank in ranks:
        judge_batch(rank, findings)
        rank.load(net)
        replays.append([])
        for k in range(len(rank.header["microbatches"])):
            replay = MicrobatchReplay(net, rank, k)
            replay.run(findings)
            replays[-1].append(replay)
    for rank in whole_ranks:
        judge_loss(net, rank, loss, findings)
    judge_accumulation(ranks, replays, findings)
    judge_reduction(ranks, losses, findings)
    for rank in whole_ranks:
        judge_loss_factor(rank, findings)
    judge_norm(ranks, findings)
    for number, rank in enumerate(ranks):
        former_rank = None if former is None else former[number]
        judge_clip(rank, ranks, former_rank, findings)
        judge_update(rank, former_rank, findings)
    judge_replicas(ranks, findings)
