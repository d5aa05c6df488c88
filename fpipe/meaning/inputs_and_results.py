"""Bind a step's arguments to the names of a program's inputs, and its outputs to the fields of a result.

The module also checks that a program, a model and an example belong together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fpipe import tree
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.optimizers.optimizer_state import check_optimizer_state, check_update, find_update, update_settings
from fpipe.meaning.single_device.params_and_state import check_params, check_state, net_order, refuse_meta
from fpipe.meaning.step import MISSING, StepInputs
from fpipe.model import Model, check_keys, require_model, wanted_input_gradients
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Output, Program, Value, parts_of, require_program
from fpipe.transforms.training import program as program_of


def check_inputs(program: Program, model: Model, inputs: StepInputs) -> None:
    """Raise ValueError for params, state or optimizer state of another model or program, before the batch is cut."""
    check_params(model, inputs.params)
    op = find_update(program)
    if inputs.optim is not None and op is not None:
        check_optimizer_state(update_settings(op.options), inputs.params, inputs.optim[0])
        if not any(leaf.is_meta for leaf in tree.leaves(inputs.params) if isinstance(leaf, torch.Tensor)):
            refuse_meta("fpipe.optimizer_state(program, params) gives it some", opt=inputs.optim[0])
    check_state(model, inputs.state, {v.stage for v, _ in program.inputs if v.name == "state" and v.stage is not None})


def example_key(program: Program) -> int | None:
    """Return a random key to trace a step with, which no trace depends on; None if no stage asks for one."""
    return 0 if any(value.name == "key" for value, _ in program.inputs) else None


def bind_inputs(program: Program, model: Model, inputs: StepInputs) -> dict[Value, Any]:
    """Return the caller's values by the names that the program reads.

    Tied leaves become separate bundles. The parameters of a stage that is cut out of a net come in that stage's order,
    whatever the order of the caller's dict.
    """
    params = check_params(model, inputs.params)
    bound: dict[Value, Any] = {Value("key"): inputs.key}
    for step, batch in enumerate(inputs.batch if program.steps > 1 else [inputs.batch]):
        bound |= {Value("inputs", port=step): batch[0], Value("target", port=step): batch[1]}
    bound |= _split_tied(model, "params", _in_model_order(model, params))
    bound |= {} if inputs.state is None else {Value("state", n): stage for n, stage in enumerate(inputs.state)}
    if inputs.optim is not None:
        opt, rates, scale = inputs.optim
        bound |= {} if scale is None else {Value("scale"): scale}
        bound |= {Value("lr", port=step): rate for step, rate in enumerate(rates)}
        bound |= _split_tied(model, "opt", _in_model_order(model, opt))
    # A program with shards reads "shard" where others read "params": the params of its caller are the shards.
    bound |= {value._replace(name="shard"): bundle for value, bundle in bound.items() if value.name == "params"}
    for value, _ in program.inputs:
        if value not in bound or (value.name == "key" and inputs.key is None):
            raise ValueError(MISSING.format(value, value.name, "..."))
    return {end.value: bound[end.value] for end in program.inputs}


def _split_tied(model: Model, name: str, per_stage: Sequence[Any]) -> dict[Value, Any]:
    """Return the bundles of each stage's params (or optimizer state): one for each tied leaf, one for the rest."""
    bundles = dict[Value, Any]()
    for stage_index, stage in enumerate(per_stage):
        tied = model.owned(stage_index)
        untied = bundles[Value(name, stage_index)] = dict(stage) if tied else stage
        for leaf in tied:
            bundles[Value(name, stage_index, port=leaf.port)] = untied.pop(leaf.name)
    return bundles


def make_context(
    program: Program, model: Model, params: Sequence[Any], sizes: tuple[int, ...], replica: tuple[int, int] = (0, 1)
) -> StepContext:
    """Return the context of a step on microbatches of these sizes; `replica` is its index and their number."""
    per_step, (number, count) = program.microbatches // program.steps, replica
    return StepContext(
        model,
        sum(sizes),
        sizes=sizes,
        input_grads=wanted_input_gradients(model, program.ops),
        replicas=count,
        first_microbatch=number * per_step,
        per_step=per_step,
        slices=program.slices,
        leaf_positions=_leaf_positions(model, params),
    )


def _leaf_positions(model: Model, params: Sequence[Any]) -> list[list[tuple[int, int, int]]]:
    """Return the positions of each stage's gradients, as `StepContext.leaf_positions` has them."""
    ordered = _in_model_order(model, params)
    leaves: list[tuple[int, int, int]] = []  # stage, bundle, and index in the bundle, in the order of tree.leaves
    for number, stage in enumerate(ordered):
        ports = {leaf.name: leaf.port for leaf in model.owned(number)}
        if not ports:
            leaves += [(number, 0, index) for index in range(len(tree.leaves(stage)))]
            continue
        counts = Counter[int]()
        for name, value in stage.items():
            port = ports.get(name, 0)
            for _ in tree.leaves(value):
                leaves.append((number, port, counts[port]))
                counts[port] += 1
    positions_by_stage: list[list[tuple[int, int, int]]] = [[] for _ in ordered]
    # net_order gives the indices of leaves in the order of the net; position is then a leaf's index in the net.
    for position, index in enumerate(net_order(model, ordered)):
        stage, port, index_in_bundle = leaves[index]
        positions_by_stage[stage].append((position, port, index_in_bundle))
    return positions_by_stage


def _in_model_order(model: Model, params: Sequence[Any]) -> list[Any]:
    """Return each stage's params, in the order of the stage's names if it is a stage of a net."""
    # load_state_dict and users make dicts in any order, and the leaves of a pytree follow the dict.
    ordered: list[Any] = []
    for number, (stage_params, stage) in enumerate(zip(params, model.stages, strict=True)):
        if isinstance(stage.forward, PositionalStage):
            tied = {leaf.name for leaf in model.tied(number) if leaf.owner != number}
            names = [names[0] for names in stage.forward.names if names[0] not in tied]
            check_keys(stage_params, names, f"params of stage {number}")
            stage_params = {name: stage_params[name] for name in names}
        ordered.append(stage_params)
    return ordered


def collect_results(
    program: Program, model: Model, step_inputs: StepInputs, values: Mapping[Value, Any], unshare: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the results by name, after `unshare` of each leaf; unmerged ones as tuples."""
    params, batch, state = step_inputs.params, step_inputs.batch, step_inputs.state
    presplit = any("presplit" in dict(op.options) for op in program.ops if op.kind == "SPLIT")
    merged: dict[str, Any] = {}
    streams: defaultdict[str, dict[tuple[int, int], Any]] = defaultdict(dict)
    by_name: defaultdict[tuple[str, int | None, int | None], list[Output]] = defaultdict(list)
    for end in program.outputs:
        by_name[end.name.name, end.name.microbatch, end.name.slice].append(end)
    for (name, microbatch, slice_index), ends in by_name.items():
        if name == "grads":
            result: Any = tree.tree_map(unshare, _collect_gradients(model, params, ends, values))
        elif name == "input_grads":
            inputs = batch[0] if microbatch is None or not presplit else batch[0][microbatch]
            result = tree.tree_map(unshare, tree.unflatten(tree.flatten(inputs)[1], values[ends[0].value]))
        elif name in ("params", "opt"):
            result = tree.tree_map(unshare, _by_stage(model, params, _by_bundle(ends, values)))
        elif name == "state":
            assert state is not None
            state_by_stage = {end.name.stage: tree.tree_map(unshare, values[end.value]) for end in ends}
            result = tuple(state_by_stage.get(number, state[number]) for number in range(len(model.stages)))
        else:
            result = tree.tree_map(unshare, values[ends[0].value])
        if microbatch is None:
            merged[name] = result
        else:
            streams[name][microbatch, slice_index or 0] = result
    merged |= {name: tuple(parts[coordinates] for coordinates in sorted(parts)) for name, parts in streams.items()}
    merged.pop("count", None)
    return merged


def _collect_gradients(
    model: Model, params: Sequence[Any], ends: list[Output], values: Mapping[Value, Any]
) -> tuple[Any, ...]:
    """Return gradients in the structure and dtypes of params, which a program may have cast; None for no gradient."""
    grads_by_bundle = _by_bundle(ends, values)
    for value, bundle in _split_tied(model, "params", _in_model_order(model, params)).items():
        stage_and_port = value.stage, value.port
        grads_by_bundle[stage_and_port] = tree.unflatten(tree.flatten(bundle)[1], grads_by_bundle[stage_and_port])
    per_stage: list[Any] = []
    for stage, grads in zip(params, _by_stage(model, params, grads_by_bundle), strict=True):
        leaves, spec = tree.flatten(stage)
        pairs = zip(tree.leaves(grads), leaves, strict=True)
        typed = [grad.to(param.dtype) if isinstance(grad, torch.Tensor) else grad for grad, param in pairs]
        per_stage.append(tree.unflatten(spec, typed))
    return tuple(per_stage)


def _by_bundle(ends: list[Output], values: Mapping[Value, Any]) -> dict[tuple[int | None, int], Any]:
    return {(end.name.stage, end.name.port): values[end.value] for end in ends}


def _by_stage(model: Model, params: Sequence[Any], by_bundle: Mapping[tuple[int | None, int], Any]) -> tuple[Any, ...]:
    """Return each stage's pytree, put together from its bundles, with tied leaves back in their order."""
    per_stage: list[Any] = []
    for number, stage in enumerate(params):
        tied = {leaf.name: by_bundle[number, leaf.port] for leaf in model.owned(number)}
        untied = by_bundle[number, 0]
        is_named = tied or isinstance(model.stages[number].forward, PositionalStage)
        per_stage.append({name: tied[name] if name in tied else untied[name] for name in stage} if is_named else untied)
    return tuple(per_stage)


# Check that a program, a model and an example belong together, before anything is built.


def check_match(program: Program, model: Model) -> None:
    """Raise ValueError if a stage reads or writes other values in the program than in the model."""
    require_program(program)
    require_model(model)
    if program.stages != len(model.stages):
        raise ValueError(
            f"the program has {program.stages} stages and the model {len(model.stages)}; start from "
            f"fpipe.program(model)."
        )
    model_ops = {(op.kind, op.stage): (op, _comparable_reads(op)) for op in program_of(model).ops}
    has_loss = any(value.name == "loss" for op in parts_of(program.ops) for value in op.writes)
    # Each stage op of the program is compared with the one in the model's plain program; an I reads what a B reads.
    for op in parts_of(program.ops):
        model_op, model_reads = model_ops.get(("B" if op.kind == "I" else op.kind, op.stage), (None, []))
        if model_op is None:
            continue
        if op.kind in "FBI" and model_reads != (program_reads := _comparable_reads(op)):
            raise ValueError(
                f"stage {op.stage} of the model takes {' '.join(map(str, model_reads))}, in the program {op.cell} "
                f"takes {' '.join(map(str, program_reads))}; start from fpipe.program(model)."
            )
        model_extras, written_extras = ({value.name for value in side.writes} & _LOSS_EXTRAS for side in (model_op, op))
        if op.kind == "F" and not (model_extras if has_loss else set()) <= written_extras <= model_extras:
            program_names, model_names = (
                " and ".join(sorted(names, reverse=True)) or "no loss" for names in (written_extras, model_extras)
            )
            raise ValueError(
                f"stage {op.stage} of the model gives {model_names}, in the program {op.cell} gives {program_names}; "
                "start from fpipe.program(model)."
            )
    of_modules = all(stage.names is not None for stage in model.stages)
    check_update(program, [leaf[0] for stage in model.stages for leaf in stage.names or ()] if of_modules else None)
    _refuse_mixed_rows(program, model)


def refuse_meta_constants(model: Model) -> None:
    """Raise ValueError if a constant of a stage, neither parameter nor state, is on meta."""
    nets = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    for net in nets:
        constants = dict(zip(net.fixed, net.constants(), strict=True))
        refuse_meta(
            'give it some before the net is cut, or make it with device="cpu" in the constructor', net=constants
        )


def _refuse_mixed_rows(program: Program, model: Model) -> None:
    """Raise ValueError if a program would add gradients of single rows, or concatenate others."""
    joined = next((op for op in program.ops if op.kind == "MERGE" and op.writes[0].name == "rows"), None)
    if joined is not None and not model.per_example:
        raise ValueError(
            'merge(grads="rows") is for gradients of single rows; build it with a model of fpipe.per_example.'
        )
    for op in parts_of(program.ops) if model.per_example else ():
        added = {value.microbatch for value in op.reads if value.name in ("g", "sum")}
        if op.kind == "ADD" and len(added) > 1:
            raise ValueError(
                f"{op.writes[0]} adds gradients of single rows, which are of others in each microbatch: say "
                'merge(grads="rows").'
            )
        if op.kind in ("REDUCE", "SCATTER"):
            transform = "shard" if any(other_op.kind == "GATHER" for other_op in program.ops) else "data_parallel"
            raise ValueError(
                f"{op.writes[0]} adds up over replicas, whose single rows are not the same: leave {transform} out and "
                "add clipped rows."
            )
        if op.kind == "SPLIT" and (
            misfit := next((setting for setting, _ in op.options if setting in ("spec", "slices")), None)
        ):
            actual = "slices of sequences" if misfit == "slices" else f"the spec {dict(op.options)[misfit]}"
            raise ValueError(f"per_example takes rows of dim 0 apart, of whole sequences; found {actual} in split().")


def _comparable_reads(op: Op) -> list[Value]:
    """Return an op's reads in a form that is equal in a model's plain program and after transforms of it.

    Microbatch and copy are dropped, and the values that slices, weights and a loss scale add.
    """
    return [
        Value(_BATCH_NAME_BY_PART[value.name])
        if value.name in _BATCH_NAME_BY_PART
        else Value(value.name, value.stage, port=value.port)
        for value in op.reads
        if value.name not in ("carry", "dcarry", "w", "scale")
    ]


_BATCH_NAME_BY_PART = {"x": "inputs", "t": "target"}
_LOSS_EXTRAS = {"loss", "count", "aux"}  # written only by programs that compute the loss


def check_example(example: Any) -> tuple[Any, Any, Any]:
    """Return params, batch and state (or None) of an example; raise ValueError if it is no such tuple."""
    if not isinstance(example, tuple) or len(example) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        actual = f"a tuple of {len(example)}" if isinstance(example, tuple) else type(example).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"example is (params, batch) or (params, batch, state), as a step takes them; found {actual}.")
    if isinstance(example[0], torch.Tensor):
        raise ValueError("example is (params, batch), as a step takes them; found a batch alone.")
    params, batch, state = (*example, None)[:3]  # pyright: ignore[reportUnknownVariableType]
    return params, batch, state  # pyright: ignore[reportUnknownVariableType]
