"""Add the optimizer to the program: it reads parameters and optimizer state, and writes the next ones.

    grads[0] = sum[0,1]        --> update("AdamW") -->        params[0,1] opt[0,1] = UPDATE params[0] opt[0] sum[0,1] lr

A version of parameters is named by the microbatch after which it is written. With a clip the norm of all gradients is a
value that travels: norms[s,i] = NORM of a stage's gradients, norm[,i] = NORM of all these. UPDATE reads it. Or it does
not wait for the norm, and valid[,i] = VALIDATE norm[,i] says afterwards whether the clip would have scaled anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Literal

from fpipe.meaning.optimizers.rule_names import TORCH_RULES, check_rule, check_settings
from fpipe.order import sort_outputs
from fpipe.program import PARAMETERS, Input, Op, Output, Program, ProgramError, Value, parts_of
from fpipe.transforms._rewrite import (
    Transform,
    as_transform,
    homes_of,
    map_parts,
    place_by_data,
    rebuild,
    refuse_freed,
    refuse_transfers,
    refuse_updated,
)
from fpipe.transforms.communicate import communicate, without_frees

_Options = tuple[tuple[str, Any], ...]
_SCALE_SETTINGS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_REFUSED = {"LBFGS": "calls the loss again and again within a step", "SparseAdam": "is of sparse gradients"}
_RESERVED_SETTINGS = ("by", "clip", "groups")
Pattern = str | tuple[str, ...] | Callable[[str, Any], bool]
Groups = Mapping[str, Mapping[str, Any]] | Sequence[tuple[Pattern, Mapping[str, Any]]]
_LR, _SCALE, _NORM = Value("lr"), Value("scale"), "norm"


def update(
    rule: str | type[Any],
    *,
    clip: float | None = None,
    validate: Literal["before", "after"] = "before",
    grads: bool = False,
    loss_scale: Literal["dynamic"] | Mapping[str, float] | None = None,
    groups: Groups | None = None,
    params: Sequence[Any] = (),
    **settings: Any,
) -> Transform:
    """Update parameters in the program, by an optimizer's rule, as soon as the gradients of a stage are added up.

    A step takes the optimizer's state, which `optimizer_state` makes, and the learning rate, and gives the next
    parameters and state: `result = step(params, batch, opt=opt, lr=3e-4)`, `result.params`, `result.opt`. A parameter
    without a gradient stays as it is.

    Args:
        rule: an optimizer of torch.optim, by name or class, or one that `register_update` added. It has the bits of
            torch's own with foreach=False, unless `foreach=True` or `fused=True` are among the settings.
        clip: the largest norm of all gradients, above 0. They are scaled as `torch.nn.utils.clip_grad_norm_` does, and
            `result.norm` is the norm before; `float("inf")` gives the norm alone. Norms of leaves are stacked in the
            order of the net's parameters, whatever is cut or tied, and a parameter that stages share counts once. Of
            shards the squares are added up over replicas, and the norm is that of torch to rounding.
        validate: "before" an update its norm is known; "after" it, updates do not wait: each step goes on as if its
            norm were below the clip, `result.valid` tells whether it was, and where one was not, all steps of the call
            are done again from what was handed in, with updates that wait. Results are the same, bit by bit, and
            `Timeline.break_even_share` says when it pays.
        grads: whether the gradients are a result too, as they are before they are clipped.
        loss_scale: of float16: "dynamic" multiplies the loss's gradient by a scale that a step is handed, as a number
            such as 2.0**16 or as `result.scale`, and divides the gradients by it. Where one is infinite or NaN, nothing
            is updated, `result.valid` says so, and the scale halves; after 2,000 steps without one it doubles. A dict
            with `growth_factor`, `backoff_factor` and `growth_interval` says it otherwise, as in
            `torch.amp.GradScaler`, whose bits it has.
        groups: settings of parameters by patterns of their names, the first that fits: `{"*norm*":
            {"weight_decay": 0.0}}`, or a list of such pairs. "*@2d" fits parameters of two dimensions. A group with a
            `rule` of its own takes none of the other settings: `{"*.weight@2d": {"rule": "Muon"}}`. `lr_scale`
            multiplies the learning rate. Names are those of a state_dict; of functions they are the keys on the way to
            a leaf, with dots between. In a list, a tuple of names may stand for a pattern, or `f(name, param) -> bool`,
            which is asked once for each of `params`.
        params: what a step takes, if there is such a function.
        settings: of the rule, such as weight_decay=0.1. An lr= here is that of all steps, and then no step takes one.
            A step may be handed other numbers too, where neither these nor its groups say them: `step(.., lr={"lr":
            3e-4, "weight_decay": 0.1})`.

    Returns:
        A transform, behind `merge`, and behind `data_parallel` or `shard`; a schedule, `split_backward` and
        `checkpoint` may come before or after it.

    Raises:
        TypeError: a rule that is no name and no class.
        ValueError: a rule that there is not, that looks at more than gradients, or is another library's under a name of
            torch; a setting that it does not take, or that is no literal; a clip that is no number above 0,
            validate="after" without a clip or with a loss scale, or another loss scale.
        ProgramError: gradients are those of single microbatches, the program has its transfers already, or updates.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge(outputs=False))(fpipe.program(2))
    >>> updated = fpipe.update("AdamW", clip=1.0)(program)
    >>> print(*(op for op in updated.ops if op.kind in ("NORM", "UPDATE") and op.stage == 0), sep="\\n")
    norms[0,1] = NORM[0,1] sum[0,1] @ 0
    norm[,1] = NORM[0,1] norms[0,1] norms[1,1] @ 0
    params[0,1] opt[0,1] = UPDATE[0,1] params[0] opt[0] sum[0,1] norm[,1] lr {by='AdamW', clip=1.0} @ 0
    >>> print(*updated.outputs, sep="\\n")
    loss = loss @ 1
    norm = norm[,1] @ 0
    opt[0] = opt[0,1] @ 0
    opt[1] = opt[1,1] @ 1
    params[0] = params[0,1] @ 0
    params[1] = params[1,1] @ 1
    """
    options = update_options(rule, clip, groups, settings, params)
    if validate not in ("before", "after"):
        raise ValueError(f"validate is 'before' or 'after'; found {validate!r}.")
    clips = clip is not None and isfinite(clip)
    if validate == "after" and not clips:
        raise ValueError("validate='after' needs a clip, such as clip=1.0.")
    if validate == "after" and loss_scale is not None:
        raise ValueError("under a loss scale updates always wait: leave validate= out.")
    scale_options = None if loss_scale is None else _scale_options(loss_scale)

    @as_transform
    def transform(program: Program) -> Program:
        refuse_freed(program)
        gradients = [end for end in program.outputs if end.name.name == "grads"]
        _refuse_unsuitable(program, gradients)
        last_microbatch = program.microbatches - 1
        params_by_key = {end.value[1:5]: end.value for end in program.inputs if end.value.name in PARAMETERS}
        inputs, ops = [*program.inputs], [*program.ops]
        outputs_so_far = [end for end in program.outputs if end.name.name != "grads"]
        norm, valid = Value(_NORM, None, last_microbatch), Value("valid", None, last_microbatch)
        waits = clips and validate == "before"
        shared_reads = [*([norm] if waits else []), *([] if "lr" in settings else [_LR])]
        # 1) Loss scale: backwards read the scale, and gradients are divided by it before anything else reads them.
        if scale_options is not None:
            unscale, gradients = _unscale_ops(gradients, valid, _shard_axis_option(program), scale_options)
            ops = [*_scale_backwards(program), *unscale]
            inputs.append(Input(_SCALE, (0,)))
            outputs_so_far += [Output(_SCALE, unscale[-1].writes[1], (0,)), Output(Value("valid"), valid, (0,))]
            shared_reads.append(valid)
        # 2) Norm of all gradients, which UPDATE reads, or VALIDATE afterwards.
        if clip is not None:
            ops += _norm_ops(gradients, norm, _shard_axis_option(program))
            outputs_so_far.append(Output(Value(_NORM), norm, (0,)))
        if validate == "after":
            clip_option = (("clip", clip),)
            ops.append(Op("VALIDATE", ops[-1].stage, last_microbatch, None, 0, (norm,), (valid,), (), clip_option))
            outputs_so_far.append(Output(Value("valid"), valid, (0,)))
        # 3) One UPDATE for each bundle of parameters, which is ready as soon as its gradient (and the norm) is.
        for name, gradient, homes in gradients:
            parameter = params_by_key[name.stage, None, None, name.port]
            state = Value("opt", name.stage, port=name.port)
            writes = tuple(value._replace(microbatch=last_microbatch) for value in (parameter, state))
            inputs.append(Input(state, homes))
            reads = (parameter, state, gradient, *shared_reads)
            ops.append(Op("UPDATE", name.stage, last_microbatch, None, 0, reads, writes, (), options))
            outputs_so_far += [Output(name._replace(name="params"), writes[0], homes), Output(state, writes[1], homes)]
        inputs += [] if "lr" in settings else [Input(_LR, (0,))]
        outputs = sort_outputs((*outputs_so_far, *(gradients if grads else [])))
        placed_inputs, placed_ops, outputs = place_by_data(tuple(inputs), ops, outputs, homes_of(program))
        return rebuild(program, placed_ops, inputs=placed_inputs, outputs=outputs)

    return transform


def _scale_options(loss_scale: Literal["dynamic"] | Mapping[str, float]) -> _Options:
    settings = {} if loss_scale == "dynamic" else loss_scale
    if not {*settings} <= {*_SCALE_SETTINGS}:
        known_settings = ", ".join(_SCALE_SETTINGS)
        raise ValueError(f"loss_scale is 'dynamic', or a dict with some of {known_settings}; found {loss_scale!r}.")
    for setting, value in settings.items():
        if not value > 0:
            raise ValueError(f"{setting} of loss_scale= is a number above 0; found {value!r}.")
    return tuple((_SCALE_SETTINGS | dict(settings)).items())


def _scale_backwards(program: Program) -> list[Op]:
    """Let the backwards of stages that compute a loss read the scale, with which they start the gradient."""
    starts = {op.stage for op in parts_of(program.ops) if op.kind == "F" and any(v.name == "loss" for v in op.writes)}

    def scale(op: Op) -> Op:
        return op._replace(reads=(*op.reads, _SCALE)) if op.kind in "BI" and op.stage in starts else op

    return [map_parts(scale, op) for op in program.ops]


def _unscale_ops(
    gradients: Sequence[Output], valid: Value, axis_option: _Options, options: _Options
) -> tuple[list[Op], list[Output]]:
    """Return ops that divide gradients by the scale and check that all are finite, and the unscaled gradients."""
    # As in GradScaler each gradient has a flag, 1.0 where it has an infinite or NaN element. Of shards each replica
    # sees a part, so their flags are added over the replicas before VALIDATE reads them.
    ops, outputs, flags = list[Op](), list[Output](), list[Value]()
    for output in gradients:
        unscaled = Value("real", output.name.stage, valid.microbatch, port=output.name.port)
        flag, op_fields = unscaled._replace(name="found"), (*unscaled[1:4], 0)
        ops.append(Op("UNSCALE", *op_fields, (output.value, _SCALE), (unscaled, flag)))
        if axis_option:
            ops.append(Op("REDUCE", *op_fields, (flag,), (flag._replace(name="all_found"),), (), axis_option))
        flags.append(ops[-1].writes[-1])
        outputs.append(output._replace(value=unscaled))
    home = min(output.name.stage or 0 for output in gradients)
    writes = (valid, _SCALE._replace(microbatch=valid.microbatch))
    ops.append(Op("VALIDATE", home, valid.microbatch, None, 0, (*flags, _SCALE), writes, (), options))
    return ops, outputs


def _shard_axis_option(program: Program) -> _Options:
    """Return the option with the axis along which gradients are sharded; none where they are whole."""
    scatter = next((op for op in program.ops if op.kind == "SCATTER"), None)
    return () if scatter is None else (("axis", dict(scatter.options)["axis"]),)


def _norm_ops(gradients: Sequence[Output], norm: Value, axis_option: _Options) -> list[Op]:
    """Return the ops that compute the norms of each stage's gradients, and the norm of all.

    Squares of shards are added over replicas first. Gradients of 0-d parameters are not sharded, and every replica has
    them whole, so their norms are separate and are not added.
    """
    gradients_by_stage: dict[int, list[Value]] = {}
    for output in gradients:
        gradients_by_stage.setdefault(output.name.stage or 0, []).append(output.value)
    ops, norms_of_parts = list[Op](), list[Value]()
    for stage, reads in gradients_by_stage.items():
        norms = Value("norms", stage, norm.microbatch)
        op_fields = (stage, norm.microbatch, None, 0)
        if axis_option:
            squares, of_numbers = norms._replace(name="squares"), norms._replace(port=1)
            ops.append(Op("NORM", *op_fields, tuple(reads), (squares, of_numbers)))
            ops.append(Op("REDUCE", *op_fields, (squares,), (norms,), (), axis_option))
            norms_of_parts += [norms, of_numbers]
        else:
            ops.append(Op("NORM", *op_fields, tuple(reads), (norms,)))
            norms_of_parts.append(norms)
    return [*ops, Op("NORM", min(gradients_by_stage), norm.microbatch, None, 0, tuple(norms_of_parts), (norm,))]


def _refuse_unsuitable(program: Program, gradients: Sequence[Output]) -> None:
    refuse_updated(program)
    refuse_transfers(program, "update")
    if not gradients:
        raise ProgramError("this program has no gradients; those with a loss have.")
    if any(output.name.microbatch is not None for output in gradients):
        raise ProgramError("gradients are those of single microbatches: put fpipe.merge() before fpipe.update().")
    if any(program.ops[program.writer[output.value]].writes[0].name == "rows" for output in gradients):
        raise ProgramError("update() needs summed gradients, not those of rows.")


def update_options(
    rule: str | type[Any],
    clip: float | None,
    groups: Groups | None,
    settings: dict[str, Any],
    params: Sequence[Any] = (),
) -> _Options:
    """Return the checked options of an UPDATE; a program is data, so it names the rule."""
    name = _checked_rule(rule)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is a norm, a number above 0; found {clip!r}.")
    options: dict[str, Any] = {"by": name}
    if clip is not None:
        options["clip"] = float(clip) if isfinite(clip) else "inf"  # text: an infinite float is no literal
    rule_settings = _checked_settings(name, settings)
    for pattern, group in groups.items() if isinstance(groups, Mapping) else groups or ():
        group_rule = group.get("rule")
        if group_rule is None:
            group_settings = _checked_settings(name, group, rule_settings)
        else:
            group_name = _checked_rule(group_rule)
            # A learning rate that the program says is that of all rules.
            rate = {"lr": settings["lr"]} if "lr" in settings else {}
            typed = {setting: value for setting, value in group.items() if setting != "rule"}
            group_settings = (("by", group_name), *_checked_settings(group_name, rate | typed))
        names = _names_that_fit(pattern, params) if callable(pattern) else pattern
        options["groups"] = (*options.get("groups", ()), (names, group_settings))
    return (*options.items(), *rule_settings)


def _checked_rule(rule: Any) -> str:
    """Return the name of a rule, or raise TypeError or ValueError for an unknown rule."""
    name = rule.__name__ if isinstance(rule, type) else rule
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = " fpipe.register_update gives a function a name." if callable(rule) else ""
        hint = " An optimizer of parameters stays outside of a program." if hasattr(rule, "param_groups") else hint
        type_and_hint = f"{type(rule).__name__}.{hint}"
        raise TypeError(f"a rule is the name or class of an optimizer, such as 'AdamW'; found {type_and_hint}")
    if name in _REFUSED:
        raise ValueError(f"{name} {_REFUSED[name]}, and no op of a program does: use it outside, on Result.grads.")
    check_rule(name)
    if isinstance(rule, type) and name in TORCH_RULES and not rule.__module__.startswith("torch.optim"):
        raise ValueError(
            f"{rule.__module__}.{name} is another optimizer than torch.optim.{name}: fpipe.register_update gives its "
            "rule a name of its own."
        )
    return name


def _names_that_fit(predicate: Callable[[str, Any], bool], params: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of parameters for which a function holds: a program is text, and names them."""
    from fpipe.meaning.optimizers.optimizer_state import named_leaves

    answers = {(name, bool(predicate(name, leaf))) for stage in params for name, leaf in named_leaves(stage)}
    names = tuple(sorted(name for name, is_fit in answers if is_fit))
    if not names:
        raise ValueError("a function of groups= fits none of params=.")
    for name in (name for name in names if (name, False) in answers):
        raise ValueError(f"a function of groups= fits only one {name!r} of several.")
    return names


def _checked_settings(name: str, settings: Mapping[str, Any], common: _Options = ()) -> _Options:
    """Return a rule's settings as literals, or raise ValueError for a setting that it refuses."""
    check_settings(name, settings)
    literals = _literal_settings(settings)
    if name in TORCH_RULES and (literals or common):
        from fpipe.meaning.optimizers.rules import check_torch_settings  # only settings need torch

        check_torch_settings(name, tuple((dict(common) | dict(literals)).items()))
    return literals


def _literal_settings(settings: Mapping[str, Any]) -> _Options:
    """Return settings as sorted pairs of literals, so that equal settings give equal programs."""
    pairs: list[tuple[str, Any]] = []
    for setting, value in sorted(settings.items()):
        value = tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]
        parts: Sequence[Any] = value if isinstance(value, tuple) else (value,)
        is_literal = all(isinstance(part, bool | int | str | None) or _is_finite(part) for part in parts)
        if not is_literal or setting in _RESERVED_SETTINGS:
            raise ValueError(f"a setting is a number, a text or a tuple; found {setting}={value!r}.")
        pairs.append((setting, value))
    return tuple(pairs)


def _is_finite(number: Any) -> bool:
    return isinstance(number, float) and isfinite(number)


def is_post_validated(program: Program) -> bool:
    """Whether updates run before the norm that would clip them is known (validate="after")."""
    # Every table asks this of its program, so the answer is kept with the program.
    if "post_validated" not in program.__dict__:
        steps = (op for op in program.ops if op.kind in ("UPDATE", "VALIDATE"))
        readers = {op.kind for op in steps if any(value.name == _NORM for value in op.reads)}
        program.__dict__["post_validated"] = "VALIDATE" in readers and "UPDATE" not in readers
    return program.__dict__["post_validated"]


def with_waiting_updates(program: Program) -> Program:
    """Return the program with updates that wait for their norms: the one that redoes an invalid step."""
    bare = without_frees(program)

    def read_norm(op: Op) -> Op:
        if op.kind != "UPDATE":
            return op
        return op._replace(reads=(*op.reads[:3], Value(_NORM, None, op.microbatch), *op.reads[3:]))

    waiting = rebuild(bare, [*map(read_norm, bare.ops)])
    return communicate()(waiting) if any(op.kind == "SEND" for op in program.ops) else waiting


def refuse_without_redo(program: Program) -> None:
    """Raise ProgramError for an order in which steps could not be redone, since an update would wait for itself."""
    try:
        with_waiting_updates(program)
    except ProgramError as error:
        raise ProgramError(
            "validate='after' runs steps again with updates that wait for their norm, which this order forbids: "
            f"leave validate= out, or change the order. {error}"
        ) from None
