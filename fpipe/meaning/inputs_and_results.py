"""Bind the two ends of a step: the caller's values under the program's names, and the program's under the caller's.

A program, a model or an example that do not belong together are refused before that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fpipe import tree
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.optimizers.optimizer_state import check_optimizer_state, check_update, update_of, words_of
from fpipe.meaning.single_device.params_and_state import check_params, check_state, net_order, refuse_meta
from fpipe.meaning.step import MISSING, StepInputs
from fpipe.model import Model, same_keys, taken_gradients, the_model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Output, Program, Value, parts_of, the_program
from fpipe.training import program as program_of


def check_inputs(program: Program, model: Model, inputs: StepInputs) -> None:
    """Raise ValueError for params, state or optimizer state of another model or program, before the batch is cut."""
    check_params(model, inputs.params)
    op = update_of(program)
    if inputs.optim is not None and op is not None:
        check_optimizer_state(words_of(op.how), inputs.params, inputs.optim[0])
        if not any(leaf.is_meta for leaf in tree.leaves(inputs.params) if isinstance(leaf, torch.Tensor)):
            refuse_meta("fpipe.optimizer_state(program, params) gives it some", opt=inputs.optim[0])
    check_state(model, inputs.state, {v.stage for v, _ in program.inputs if v.name == "state" and v.stage is not None})


def bind_inputs(program: Program, model: Model, inputs: StepInputs) -> dict[Value, Any]:
    """Return the caller's values by the names that the program reads.

    Tied leaves become bundles of their own. The parameters of a stage that is cut out of a net come in that stage's
    order, whatever the order of the caller's dict.
    """
    params = check_params(model, inputs.params)
    bound: dict[Value, Any] = {Value("key"): inputs.key}
    for step, batch in enumerate(inputs.batch if program.steps > 1 else [inputs.batch]):
        bound |= {Value("inputs", port=step): batch[0], Value("target", port=step): batch[1]}
    bound |= _bundles(model, "params", _in_order(model, params))
    bound |= {} if inputs.state is None else {Value("state", n): stage for n, stage in enumerate(inputs.state)}
    if inputs.optim is not None:
        opt, rates, scale = inputs.optim
        bound |= {} if scale is None else {Value("scale"): scale}
        bound |= {Value("lr", port=step): rate for step, rate in enumerate(rates)}
        bound |= _bundles(model, "opt", _in_order(model, opt))
    bound |= {value._replace(name="shard"): bundle for value, bundle in bound.items() if value.name == "params"}
    for value, _ in program.inputs:
        if value not in bound or (value.name == "key" and inputs.key is None):
            raise ValueError(MISSING.format(value, value.name, "..."))
    return {end.value: bound[end.value] for end in program.inputs}


def _bundles(model: Model, name: str, per_stage: Sequence[Any]) -> dict[Value, Any]:
    """Values that belong to the parameters of each stage, apart for each tied leaf that lives there."""
    found = dict[Value, Any]()
    for number, stage in enumerate(per_stage):
        tied = model.owned(number)
        own = found[Value(name, number)] = dict(stage) if tied else stage
        for leaf in tied:
            found[Value(name, number, port=leaf.port)] = own.pop(leaf.name)
    return found


def context_of(
    program: Program,
    model: Model,
    params: Sequence[Any],
    sizes: tuple[int, ...],
    replica: tuple[int, int] = (0, 1),
) -> StepContext:
    """The context of a step on microbatches of these sizes, of one replica of so many."""
    per_step, (number, count) = program.microbatches // program.steps, replica
    return StepContext(
        model,
        sum(sizes),
        sizes=sizes,
        input_grads=taken_gradients(model, program.ops),
        replicas=count,
        first=number * per_step,
        per_step=per_step,
        slices=program.slices,
        places=_places_of(model, params),
    )


def _places_of(model: Model, params: Sequence[Any]) -> list[list[tuple[int, int, int]]]:
    """Return the places of each stage's gradients, as `StepContext.places` has them."""
    ordered = _in_order(model, params)
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
    places: list[list[tuple[int, int, int]]] = [[] for _ in ordered]
    for position, index in enumerate(net_order(model, ordered)):
        stage, port, place = leaves[index]
        places[stage].append((position, port, place))
    return places


def _in_order(model: Model, params: Sequence[Any]) -> list[Any]:
    """The params of each stage, those of stages that know their names in the order of these."""
    ordered: list[Any] = []
    for number, (own, stage) in enumerate(zip(params, model.stages, strict=True)):
        if isinstance(stage.forward, PositionalStage):
            tied = {leaf.name for leaf in model.tied(number) if leaf.owner != number}
            names = [names[0] for names in stage.forward.names if names[0] not in tied]
            same_keys(own, names, f"params of stage {number}")
            own = {name: own[name] for name in names}
        ordered.append(own)
    return ordered


def collect_results(
    program: Program,
    model: Model,
    step_inputs: StepInputs,
    values: Mapping[Value, Any],
    own: Callable[[Any], Any],
) -> dict[str, Any]:
    """The results by name, `own` of each leaf; a tuple over microbatches (and slices) where they were not merged."""
    params, batch, state = step_inputs.params, step_inputs.batch, step_inputs.state
    presplit = any("presplit" in dict(op.how) for op in program.ops if op.kind == "SPLIT")
    whole: dict[str, Any] = {}
    streams: defaultdict[str, dict[tuple[int, int], Any]] = defaultdict(dict)
    by_name: defaultdict[tuple[str, int | None, int | None], list[Output]] = defaultdict(list)
    for end in program.outputs:
        by_name[end.name.name, end.name.microbatch, end.name.slice].append(end)
    for (name, index, piece), ends in by_name.items():
        if name == "grads":
            made: Any = tree.tree_map(own, _gradients(model, params, ends, values))
        elif name == "input_grads":
            inputs = batch[0] if index is None or not presplit else batch[0][index]
            made = tree.tree_map(own, tree.unflatten(tree.flatten(inputs)[1], values[ends[0].value]))
        elif name in ("params", "opt"):
            made = tree.tree_map(own, _of_stages(model, params, _by_bundle(ends, values)))
        elif name == "state":
            assert state is not None
            found = {end.name.stage: tree.tree_map(own, values[end.value]) for end in ends}
            made = tuple(found.get(number, state[number]) for number in range(len(model.stages)))
        else:
            made = tree.tree_map(own, values[ends[0].value])
        if index is None:
            whole[name] = made
        else:
            streams[name][index, piece or 0] = made
    whole |= {name: tuple(parts[place] for place in sorted(parts)) for name, parts in streams.items()}
    whole.pop("count", None)
    return whole


def _gradients(model: Model, params: Sequence[Any], ends: list[Output], values: Mapping[Value, Any]) -> tuple[Any, ...]:
    """Gradients in the shape of params and in their dtypes, which a program may have cast; None where there is none."""
    grads_by_bundle = _by_bundle(ends, values)
    for value, bundle in _bundles(model, "params", _in_order(model, params)).items():
        place = value.stage, value.port
        grads_by_bundle[place] = tree.unflatten(tree.flatten(bundle)[1], grads_by_bundle[place])
    per_stage: list[Any] = []
    for stage, grads in zip(params, _of_stages(model, params, grads_by_bundle), strict=True):
        leaves, spec = tree.flatten(stage)
        pairs = zip(tree.leaves(grads), leaves, strict=True)
        typed = [grad.to(param.dtype) if isinstance(grad, torch.Tensor) else grad for grad, param in pairs]
        per_stage.append(tree.unflatten(spec, typed))
    return tuple(per_stage)


def _by_bundle(ends: list[Output], values: Mapping[Value, Any]) -> dict[tuple[int | None, int], Any]:
    return {(end.name.stage, end.name.port): values[end.value] for end in ends}


def _of_stages(model: Model, params: Sequence[Any], by_bundle: Mapping[tuple[int | None, int], Any]) -> tuple[Any, ...]:
    """Values of the parameters of each stage, tied ones among them, in the containers of these."""
    per_stage: list[Any] = []
    for number, stage in enumerate(params):
        tied = {leaf.name: by_bundle[number, leaf.port] for leaf in model.owned(number)}
        untied = by_bundle[number, 0]
        is_named = tied or isinstance(model.stages[number].forward, PositionalStage)
        per_stage.append({name: tied[name] if name in tied else untied[name] for name in stage} if is_named else untied)
    return tuple(per_stage)


# Refuse a program, a model or an example that do not belong together, before anything is made of them.


def check_match(program: Program, model: Model) -> None:
    """Refuse a program in which a stage reads or gives other values than in the model; the error names the stage."""
    the_program(program)
    the_model(model)
    if program.stages != len(model.stages):
        raise ValueError(
            f"the program has {program.stages} stages and the model {len(model.stages)}; start from "
            f"fpipe.program(model)."
        )
    own = {(op.kind, op.stage): (op, _read(op)) for op in program_of(model).ops}
    judged = any(value.name == "loss" for op in parts_of(program.ops) for value in op.writes)
    for op in parts_of(program.ops):
        mine, taken = own.get(("B" if op.kind == "I" else op.kind, op.stage), (None, []))
        if mine is None:
            continue
        if op.kind in "FBI" and taken != (found := _read(op)):
            raise ValueError(
                f"stage {op.stage} of the model takes {' '.join(map(str, taken))}, in the program {op.cell} takes "
                f"{' '.join(map(str, found))}; start from fpipe.program(model)."
            )
        gives, written = ({value.name for value in each.writes} & _BESIDE for each in (mine, op))
        if op.kind == "F" and not (gives if judged else set()) <= written <= gives:
            found, wanted = (" and ".join(sorted(names, reverse=True)) or "no loss" for names in (written, gives))
            raise ValueError(
                f"stage {op.stage} of the model gives {wanted}, in the program {op.cell} gives {found}; start from "
                "fpipe.program(model)."
            )
    of_modules = all(stage.names is not None for stage in model.stages)
    check_update(program, [leaf[0] for stage in model.stages for leaf in stage.names or ()] if of_modules else None)
    _refuse_mixed_rows(program, model)


def refuse_lost_constants(model: Model) -> None:
    """A ValueError for what stages read besides parameters and state, and has no values."""
    nets = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    for net in nets:
        held = dict(zip(net.fixed, net.constants(), strict=True))
        refuse_meta('give it some before the net is cut, or make it with device="cpu" in the constructor', net=held)


def _refuse_mixed_rows(program: Program, model: Model) -> None:
    """Gradients of single rows are put one behind the other, and others are added up; rows are those of dim 0."""
    joined = next((op for op in program.ops if op.kind == "MERGE" and op.writes[0].name == "rows"), None)
    if joined is not None and not model.per_example:
        raise ValueError(
            'merge(grads="rows") is for gradients of single rows; build it with the model that fpipe.per_example made, '
            "or merge() without it."
        )
    for op in parts_of(program.ops) if model.per_example else ():
        added = {value.microbatch for value in op.reads if value.name in ("g", "sum")}
        if op.kind == "ADD" and len(added) > 1:
            raise ValueError(
                f"{op.writes[0]} adds gradients of single rows, which are of others in each microbatch: say "
                'merge(grads="rows").'
            )
        if op.kind in ("REDUCE", "SCATTER"):
            door = "shard" if any(one.kind == "GATHER" for one in program.ops) else "data_parallel"
            raise ValueError(
                f"{op.writes[0]} adds up over replicas, whose single rows are not the same: leave {door} out, clip and "
                "add up the rows of each replica, and all-reduce that sum."
            )
        if op.kind == "SPLIT" and (odd := next((word for word, _ in op.how if word in ("spec", "slices")), None)):
            found = "slices of sequences" if odd == "slices" else f"the spec {dict(op.how)[odd]}"
            raise ValueError(f"per_example takes rows of dim 0 apart, of whole sequences; found {found} in split().")


def _read(op: Op) -> list[Value]:
    """Reads of an op, whichever the microbatch and copy, without what a SPLIT, a slice or a loss scale adds."""
    return [
        Value(_WHOLE[value.name]) if value.name in _WHOLE else Value(value.name, value.stage, port=value.port)
        for value in op.reads
        if value.name not in ("carry", "dcarry", "w", "scale")
    ]


_WHOLE = {"x": "inputs", "t": "target"}
_BESIDE = {"loss", "count", "aux"}  # a program without a loss may leave them out


def check_example(example: Any) -> tuple[Any, Any, Any]:
    """The params, batch, and state of an example, if it has one; a ValueError for anything else."""
    if not isinstance(example, tuple) or len(example) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        found = f"a tuple of {len(example)}" if isinstance(example, tuple) else type(example).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"example is (params, batch) or (params, batch, state), as a step takes them; found {found}.")
    params, batch, state = (*example, None)[:3]  # pyright: ignore[reportUnknownVariableType]
    return params, batch, state  # pyright: ignore[reportUnknownVariableType]
