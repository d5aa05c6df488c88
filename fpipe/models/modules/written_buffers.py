"""Find the buffers that a net mutates by running each stage on fake tensors, as `jax.eval_shape` would.

    a stage, all buffers as inputs                    a buffer is
    it is neither mutated nor bound anew              constant
    it is                                             module state

A stage that looks at data cannot run on fake tensors. It runs on the example itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, aval
from fpipe.graphs.tracing.fake import LeakedTensor
from fpipe.graphs.tracing.trace import outline
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import Attributes
from fpipe.meaning.purity.own_memory import OwnMemory, memory
from fpipe.meaning.purity.pure import Impure, refused
from fpipe.meaning.stages.keys import seeded
from fpipe.meaning.stages.outputs import outputs_of
from fpipe.model import Model
from fpipe.models.modules.modes import without_mutation
from fpipe.models.modules.stage_module import StageModule
from fpipe.torch_internals import held_by


def written_buffers(stages: Sequence[StageModule], model: Model, example: Any) -> list[list[str]]:
    """Return for each stage the buffers that it writes. A ValueError where a stage looks at data, and the example,
    which may be on meta, has none."""
    found: list[list[str]] = []
    real: list[tuple[Any, ...]] = []  # the outputs of stages that ran on the example itself
    tensors_of = {"params": _params, "buffers": _buffers}

    def run_on_fakes(fakes: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        batch, outputs = tree.unflatten(containers, fakes["x"])
        for stage in stages[len(found) :]:
            params, buffers = (
                dict(zip(tensors(stage), fakes[f"{word}:{stage.number}"], strict=True))
                for word, tensors in tensors_of.items()
            )
            x = _input_of(model, stage.number, batch, outputs)
            ports, written = _observed(model, stage, params, buffers, x)
            outputs.append(ports)
            found.append(written)
        return {}

    while len(found) < len(stages):
        leaves, containers = tree.flatten((example, real))
        reads = {"x": [_with_device(x)._replace(wants=False) if isinstance(x, Tensor) else x for x in leaves]}
        for stage in stages[len(found) :]:
            for word, tensors in tensors_of.items():
                reads[f"{word}:{stage.number}"] = [*map(_with_device, tensors(stage).values())]
        try:
            with suppress(LeakedTensor):
                outline(run_on_fakes, reads)
        except Untraceable as why:
            if any(isinstance(x, Tensor) and (x.is_meta or hasattr(x, "fake_mode")) for x in tree.leaves(example)):
                raise ValueError(
                    f"stage {len(found)} cannot run on tensors without data ({why}), so an example has to have some; "
                    "or say what it writes by state=[name, ...]."
                ) from why
            written: list[str] = []
            for stage in stages[len(real) : len(found) + 1]:
                x = _input_of(model, stage.number, example, real)
                with torch.no_grad(), seeded(0, stage.who):
                    params = {name: p.detach().requires_grad_(p.requires_grad) for name, p in _params(stage).items()}
                    ports, written = _observed(model, stage, params, _buffers(stage), x)
                real.append(ports)
            found.append(written)
    return found


def _input_of(model: Model, number: int, batch: Any, outputs: Sequence[tuple[Any, ...]]) -> Any:
    sources: list[tuple[Any, int]] = [
        source if isinstance(source, tuple) else (source, 0) for source in model.sources(number)
    ]
    inputs = tuple(batch if stage == "batch" else outputs[stage][port] for stage, port in sources)
    return inputs if isinstance(model.inputs[number], tuple) else inputs[0]


def _observed(
    model: Model,
    stage: StageModule,
    params: Mapping[str, Any],
    buffers: Mapping[str, Any],
    x: Any,
) -> tuple[tuple[Any, ...], list[str]]:
    """Return the outputs of a stage on copies of its buffers, and the names of those that it writes."""

    def refuse(tensor: Tensor, op: Any) -> None:
        raise Impure(refused(stage.who, f"writes {{}} in place ({op})", None, True))

    attributes, mode, empty = Attributes(stage.modules, contents=True), OwnMemory(refuse), _empty(stage)
    try:
        with stage.lock, without_mutation(stage.norms), mode:
            copies = {path: buffer.clone() for path, buffer in buffers.items()}
            places = {path: memory(copy) for path, copy in copies.items()}
            y, new = stage.observed({**params, **copies}, x)
        if filled := empty - _empty(stage):
            raise ValueError(
                f"{stage.who} makes a tensor of buffer {min(filled)!r}, which is None before: what a module remembers "
                "is a tensor from the start. Make it in __init__."
            )
    finally:
        attributes.restore()
    written = [path for path, place in places.items() if memory(new[path]) != place or place in mode.wrote]
    return outputs_of(model, stage.number, y), written


def _params(stage: StageModule) -> dict[str, Tensor]:
    """Its parameters, each once: a module that stands twice has its tensors in one place."""
    paths = (path for path, _ in stage.bound.named_parameters(remove_duplicate=False))
    return {path: getattr(owner, name) for path, owner, name in stage.placed(paths)}


def _buffers(stage: StageModule) -> dict[str, Tensor]:
    return {path: getattr(owner, name) for path, owner, name in stage.buffers}


def _empty(stage: StageModule) -> set[str]:
    """The buffers that are None."""
    held = ((path, held_by(module).buffers) for path, module in stage.modules)
    return {f"{path}.{name}" for path, buffers in held for name, buffer in buffers.items() if buffer is None}


def _with_device(leaf: Tensor) -> Aval:
    """Return the abstract value of a tensor, on the default device for one without data."""
    return aval(leaf)._replace(device=torch.get_default_device() if leaf.is_meta else leaf.device)
