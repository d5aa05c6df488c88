"""Judge a training run that fpipe did not make, from its record: where it goes wrong, in which phase, by which mistake.

a folder of record_run, the net, its loss        --> compare_run -->        a RunReport, or the first fault by its name
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.oracle.call_replay import MicrobatchReplay
from fpipe.oracle.explain_call import explain_gradient, scale_between
from fpipe.oracle.recorded_step import RecordedStep, ReferenceNames
from fpipe.oracle.run_phases import (
    add_fault,
    judge_accumulation,
    judge_batch,
    judge_clip,
    judge_norm,
    judge_reduction,
    judge_replicas,
    judge_start,
)
from fpipe.oracle.run_report import Findings, RunReport, report_of
from fpipe.oracle.run_update import judge_update
from fpipe.recording.record_files import from_spec, hashes_of, is_plain, read_record

Loss = Callable[[Any, Any], Tensor]


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
            findings.notes[f"Modules inside {name} are not seen: torch.compile runs no hooks in them."] = None
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
    replays = list[list[MicrobatchReplay]]()
    for rank in ranks:
        judge_batch(rank, findings)
        rank.load(net)
        replays.append([])
        for k, microbatch in enumerate(rank.header["microbatches"]):
            moment = (rank.step, k)
            replay = MicrobatchReplay(net, rank.record, microbatch["calls"], moment, rank.partial_modules(net))
            replay.run(findings)
            replays[-1].append(replay)
    for rank in ranks:
        if "" not in rank.partial_modules(net):
            _judge_loss(rank, loss, findings)
    judge_accumulation(ranks, replays, findings)
    judge_reduction(ranks, findings)
    judge_norm(ranks, findings)
    for number, rank in enumerate(ranks):
        judge_clip(rank, ranks, findings)
        judge_update(rank, None if former is None else former[number], findings)
    judge_replicas(ranks, findings)


def _judge_loss(rank: RecordedStep, loss: Loss | None, findings: Findings) -> None:
    """Check that the backward of each microbatch starts from the loss's gradient, by the same factor in each."""
    factors = list[tuple[float, int]]()
    for k, microbatch in enumerate(rank.header["microbatches"]):
        roots = [call for call in microbatch["calls"] if call["module"] == "" and call["parent"] is None]
        root = roots[0] if len(roots) == 1 else None
        batch = microbatch["batch"]
        if loss is None or root is None or "tensor" not in root["output"] or not is_plain(batch):
            continue
        pair: Any = from_spec(batch, rank.record.tensor)
        if not isinstance(pair, tuple) or len(pair) < 2 or not root["grads"].get("0"):
            continue
        output = rank.record.tensor(next(hashes_of(root["output"]))).requires_grad_()
        with torch.enable_grad():
            (expected,) = torch.autograd.grad(loss(output, *pair[1:]), [output])
        actual = rank.record.tensor(root["grads"]["0"])
        factor = scale_between(actual, expected)
        if factor is None:
            mistake = f"the gradient of the output is {explain_gradient(actual, expected)}"
            add_fault(findings, "the loss", "loss", mistake, rank.step, k)
            return
        factors.append((factor, len(output)))
    if not factors:
        return
    # Each microbatch counts the same, or by its rows.
    (first_factor, first_rows), *later_factors = factors
    are_equal = all(abs(factor - first_factor) <= 1e-3 * abs(first_factor) for factor, _ in later_factors)
    by_rows = all(
        abs(f * first_rows - first_factor * rows) <= 1e-3 * abs(first_factor * rows) for f, rows in later_factors
    )
    if not are_equal and not by_rows:
        texts = ", ".join(f"{factor:.4g}" for factor, _ in factors)
        mistake = f"the losses of the microbatches are {texts} x the reference's"
        add_fault(findings, "the loss", "loss", mistake, rank.step)
    elif first_factor < 0:
        add_fault(findings, "the loss", "loss", "its sign is turned", rank.step)
    elif first_factor != 1.0:
        factor = f"{first_factor:.6g} x" if are_equal else "its share of the rows times"
        findings.notes[f"The loss of a microbatch is {factor} the reference's."] = None
