"""Refuse steps that no graph of a device can repeat, before anything is captured."""

from __future__ import annotations

import torch

from fpipe.graphs.language.graph import Fact, Graph, Node
from fpipe.graphs.language.labels import GENERATORS
from fpipe.meaning.optimizers.optimizer_state import find_update, update_settings
from fpipe.meaning.optimizers.rule_names import RULES
from fpipe.meaning.optimizers.rules import refuse_uncapturable_rule
from fpipe.meaning.walk import describe_op
from fpipe.runtimes.lowering.prepared_step import PreparedStep

NEEDS_TRACES = "graph=True captures traces, and this step cannot be traced: {}"


def refuse_graph_options(runtime: str, trace: bool, record: bool, check_finite: bool) -> None:
    """Raise ValueError for options of `build` that a step of one graph cannot have."""
    if runtime == "threads":
        raise ValueError("graph=True is of runtime='local' or 'distributed'; found 'threads'.")
    if not trace:
        raise ValueError("graph=True captures traces: say trace=True.")
    if record:
        raise ValueError("record=True times ops one by one, and a graph has none: profile it by torch.profiler.")
    if check_finite:
        raise ValueError("check_finite=True reads each value, which a graph cannot: leave graph= or check_finite= out.")
    if torch.accelerator.current_accelerator(check_available=True) is None:
        raise ValueError("graph=True needs an accelerator, and torch finds none.")


def single_accelerator(step: PreparedStep) -> torch.device:
    """Return the accelerator that all tensors of a step are on; raise ValueError if one is elsewhere."""
    devices = dict[torch.device, str]()
    for program_input in step.program.inputs:
        abstract = step.trees[program_input.value]
        for leaf in abstract.leaves:
            if isinstance(leaf, Fact):
                devices.setdefault(leaf.aval.device, str(program_input.value))
    misplaced = next((device for device in devices if device.type in ("cpu", "meta")), None)
    if misplaced is not None:
        raise ValueError(f"graph=True needs an accelerator, and {devices[misplaced]} is on the {misplaced}: move it.")
    if len(devices) != 1:
        locations = " and ".join(f"{value} is on {device}" for device, value in devices.items())
        raise ValueError(f"graph=True captures one device: {locations or 'this step has no tensors'}.")
    return next(iter(devices))


def refuse_uncapturable(step: PreparedStep, in_processes: bool) -> None:
    """Raise ValueError for a step that cannot be one graph; the error names op, stage and module."""
    model, lowered = step.model, step.lowered
    for stage, reason in step.untraced.stages.items():
        label = model.label_of(stage)
        raise ValueError(NEEDS_TRACES.format(reason if reason.startswith(label) else f"{label}: {reason}"))
    if lowered.is_collective and not in_processes:
        raise ValueError("graph=True of runtime='local' captures one process, and stages talk to others.")
    for op in step.program.ops:
        if op.kind in ("OFFLOAD", "LOAD"):
            raise ValueError(
                f"graph=True keeps all values on the device, and {op.cell} is a copy: leave offload() out."
            )
    _refuse_rule(step)
    for op, (graph, _) in lowered.parts.items():
        for node in graph.nodes:
            reason = _why_uncapturable(node, graph)
            if reason is not None:
                position = f"{op.cell}: {describe_op(op, model)}"
                raise ValueError(f"graph=True cannot capture {node.op}, which {reason}, in {position}.")


def _refuse_rule(step: PreparedStep) -> None:
    op = find_update(step.program)
    if op is None:
        return
    rates = next((step.trees[value] for value in op.reads if value.name == "lr"), None)
    update = update_settings(op.options)
    # Torch compares a weight decay with 0 on the host. A registered rule computes with any number on the device.
    if rates is not None and len(rates.leaves) > 1 and update.rule not in RULES:
        raise ValueError("graph=True takes a learning rate alone as lr=; set the other numbers by update(..).")
    for settings in update.distinct_settings:
        refuse_uncapturable_rule(update.rule, settings, rates is not None)


def _why_uncapturable(node: Node, graph: Graph) -> str | None:
    """Return why an op cannot be captured; None if it can be. Most ops that read the device cannot even be traced."""
    facts = graph.facts
    # A number on the host is a constant of the kernels that read it.
    if any(name in facts and facts[name].aval.device.type == "cpu" and facts[name].aval.shape for name in node.reads):
        return "reads a tensor on the host"
    generators = graph.reads.get(GENERATORS, ())
    devices = dict(zip(generators, graph.generator_devices, strict=True)) if generators else {}
    if any(torch.device(devices[name]).type == "cpu" for name in node.reads if name in devices):
        return "draws on the host"
    if node.op is torch.ops.aten._linalg_check_errors.default:
        return "reads on the host whether a matrix is regular; call torch.linalg's .._ex function"
    if node.op in (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        # One number of the host is written by masked_fill. For others, the positions where a mask is true are listed.
        indices, values = node.args[1:3]
        masks = [index for index in indices if index in facts and facts[index].aval.dtype in (torch.bool, torch.uint8)]
        if masks and (facts[values].aval.shape or facts[values].aval.device.type != "cpu"):
            return "counts where a mask is true; take torch.where"
    return None
