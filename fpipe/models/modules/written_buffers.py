"""Find the buffers that a net mutates by running each stage on fake tensors, as `jax.eval_shape` would.

    a stage, all buffers as inputs                    a buffer is
    neither mutated nor rebound                       a constant
    mutated or rebound                                module state

A stage that looks at data cannot run on fake tensors. It runs on the example itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, aval_of_tensor
from fpipe.graphs.tracing.fake_tensors import LeakedTensor
from fpipe.graphs.tracing.running_statistics import without_norm_mutation
from fpipe.graphs.tracing.trace import outline
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import AttributeSnapshot
from fpipe.meaning.purity.keys import with_seed
from fpipe.meaning.purity.outputs import outputs_of
from fpipe.meaning.purity.pure import Impure, foreign_write_message
from fpipe.meaning.purity.write_guard import WriteGuard, storage_key
from fpipe.model import Model
from fpipe.models.modules.stage_module import StageModule
from fpipe.torch_internals import direct_members


def written_buffers(stages: Sequence[StageModule], model: Model, example: Any) -> list[list[str]]:
    """Return the names of the buffers that each stage writes.

    Raises:
        ValueError: a stage looks at data, and the example has none, being on meta or fake.
    """
    # All stages run on fake tensors in one go, each on the outputs of those before it. If one looks at data, it and
    # those before it that have run on fakes only run on the example, and the fakes go on behind it:
    #     stage    0      1      2 looks at data   3      4
    #     first    fake   fake   Untraceable
    #     then     real   real   real              fake   fake
    written_by_stage: list[list[str]] = []
    example_outputs: list[tuple[Any, ...]] = []  # of the stages that ran on the example itself
    function_by_part = {"params": _params_by_path, "buffers": _buffers_by_path}

    def run_on_fakes(fakes: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        batch, outputs = tree.unflatten(structure, fakes["x"])
        for stage in stages[len(written_by_stage) :]:
            params, buffers = (
                dict(zip(tensors_of_part(stage), fakes[f"{part}:{stage.number}"], strict=True))
                for part, tensors_of_part in function_by_part.items()
            )
            x = _stage_input(model, stage.number, batch, outputs)
            ports, written_names = _run_and_find_writes(model, stage, params, buffers, x)
            outputs.append(ports)
            written_by_stage.append(written_names)
        return {}

    while len(written_by_stage) < len(stages):
        # 1. Run the stages that are left on fakes.
        leaves, structure = tree.flatten((example, example_outputs))
        avals_by_label = {
            "x": [_input_aval(x)._replace(wants_grad=False) if isinstance(x, Tensor) else x for x in leaves]
        }
        for stage in stages[len(written_by_stage) :]:
            for part, tensors_of_part in function_by_part.items():
                avals_by_label[f"{part}:{stage.number}"] = [*map(_input_aval, tensors_of_part(stage).values())]
        try:
            with suppress(LeakedTensor):
                outline(run_on_fakes, avals_by_label)
        except Untraceable as error:
            if any(isinstance(x, Tensor) and (x.is_meta or hasattr(x, "fake_mode")) for x in tree.leaves(example)):
                raise ValueError(
                    f"stage {len(written_by_stage)} cannot run on tensors without data ({error}). Hand in an example "
                    "with data, or name its buffers by state=[name, ...]."
                ) from error
            # 2. Run the stages up to the one that failed on the example. Its number is the length of written_by_stage,
            # which has an item for each stage that ran on fakes.
            written_names: list[str] = []
            for stage in stages[len(example_outputs) : len(written_by_stage) + 1]:
                x = _stage_input(model, stage.number, example, example_outputs)
                with torch.no_grad(), with_seed(0, stage.who):
                    params = {
                        name: p.detach().requires_grad_(p.requires_grad) for name, p in _params_by_path(stage).items()
                    }
                    ports, written_names = _run_and_find_writes(model, stage, params, _buffers_by_path(stage), x)
                example_outputs.append(ports)
            written_by_stage.append(written_names)
    return written_by_stage


def _stage_input(model: Model, number: int, batch: Any, outputs: Sequence[tuple[Any, ...]]) -> Any:
    sources: list[tuple[Any, int]] = [x if isinstance(x, tuple) else (x, 0) for x in model.sources(number)]
    inputs = tuple(batch if writer == "batch" else outputs[writer][port] for writer, port in sources)
    return inputs if isinstance(model.inputs[number], tuple) else inputs[0]


def _run_and_find_writes(
    model: Model,
    stage: StageModule,
    params: Mapping[str, Any],
    buffers: Mapping[str, Any],
    x: Any,
) -> tuple[tuple[Any, ...], list[str]]:
    """Run a stage on copies of its buffers; return its outputs and the names of the buffers that it writes."""

    def refuse(tensor: Tensor, op: Any) -> None:
        raise Impure(foreign_write_message(stage.who, f"writes {{}} in place ({op})", None, True))

    attributes = AttributeSnapshot(stage.modules, with_containers=True)
    own_memory, old_none_buffers = WriteGuard(refuse), _none_buffers(stage)
    try:
        with stage.lock, without_norm_mutation(stage.norms), own_memory:
            copies = {path: buffer.clone() for path, buffer in buffers.items()}
            address_by_path = {path: storage_key(copy) for path, copy in copies.items()}
            y, new_buffers = stage.run_observed({**params, **copies}, x)
        if filled := old_none_buffers - _none_buffers(stage):
            raise ValueError(
                f"{stage.who} makes a tensor of buffer {min(filled)!r}, which is None before. Make it in __init__."
            )
    finally:
        attributes.restore()
    # A buffer is written if the module holds other memory afterwards, or if an op wrote the memory of its copy.
    writes = own_memory.storages_written
    written_names = [path for path, x in address_by_path.items() if storage_key(new_buffers[path]) != x or x in writes]
    return outputs_of(model, stage.number, y), written_names


def _params_by_path(stage: StageModule) -> dict[str, Tensor]:
    paths = (path for path, _ in stage.bound_modules.named_parameters(remove_duplicate=False))
    return {path: getattr(owner, name) for path, owner, name in stage.owners_of(paths)}


def _buffers_by_path(stage: StageModule) -> dict[str, Tensor]:
    return {path: getattr(owner, name) for path, owner, name in stage.buffers}


def _none_buffers(stage: StageModule) -> set[str]:
    buffers_by_module = ((path, direct_members(module).buffers) for path, module in stage.modules)
    return {f"{path}.{name}" for path, buffers in buffers_by_module for name, x in buffers.items() if x is None}


def _input_aval(leaf: Tensor) -> Aval:
    # A tensor on meta, such as a parameter without values, is taken to be on the default device, where it will be made.
    return aval_of_tensor(leaf)._replace(device=torch.get_default_device() if leaf.is_meta else leaf.device)
