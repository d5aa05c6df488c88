"""Trade time for memory: recompute residuals just before the backward, instead of keeping them from the forward.

    0F0 1F0 1B0 0B0        --> checkpoint("always") -->        0F0 1F0 1R0 1B0 0R0 0B0

F writes no residuals then. An op R reads what F read, and writes them. R is placed by its data: it stands just before
the op that reads the residuals, wherever a schedule puts that.

    res[0,0] = F[0,0]   B[0,0] res[0,0]
        --> checkpoint("always", grain="layer") -->
    res[0,0] = F[0,0] {saved=()}   B[0,0] res[0,0] {saved=()}

Here no R is needed: F keeps the inputs of each layer of its stage, and B or I recomputes one layer after the other,
from the last one back, so that only one layer's residuals exist at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from fpipe.program import ALL_BUT, Op, Program, ProgramError, Value, parts_of
from fpipe.transforms._rewrite import Transform, as_transform, map_parts, place_and_rebuild

_Coordinates = tuple[int | None, int | None, int | None]
Policy = Literal["always", "except_last", "never"] | Callable[[int, int], bool]


def checkpoint(
    policy: Policy = "always",
    grain: Literal["stage", "layer"] = "stage",
    *,
    groups: Sequence[Iterable[int]] = (),
    save: Iterable[Any] | Callable[..., Any] = (),
) -> Transform:
    """Recompute residuals instead of keeping them.

    Args:
        policy: for which forwards: "always", "except_last" (all microbatches but the last), "never", or
            `f(stage, microbatch) -> bool`.
        grain: "stage": one R for a whole stage. "layer": no R; the backward computes again itself, from what enters
            each layer (of stages that `from_sequential` makes; other stages are one layer), what `fpipe.keep` marks
            and what was drawn at random. Where peaks are in microbatches such a one counts as any other: they are of
            use in bytes.
        groups: for grain="stage", groups of adjacent stages of which only what enters the group is kept; inside, R
            passes its outputs on.
        save: for grain="layer", ops whose results are kept too: a list such as `[torch.ops.aten.mm.default]`, or
            `policy(ctx, op)` as `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it. A program is
            data and knows no tensors, so the policy is asked of each op once, and not of what the op is called with.

    Returns:
        A transform; what is recomputed already stays so.

    Raises:
        ValueError: another policy or grain.
        TypeError: `save` lists what is no op, or its policy wants to see tensors.
        ProgramError: "except_last" for a program that is not split.

    >>> import fpipe
    >>> program = fpipe.program(2)
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 1B0 0B0
    >>> print(fpipe.plot(fpipe.checkpoint("always")(program)))
    rank 0 | 0F0 1F0 1R0 1B0 0R0 0B0
    >>> print(*fpipe.checkpoint(grain="layer")(fpipe.program(1)).ops, sep="\\n")
    y[0,0] loss[0,0] res[0,0] = F[0,0] params[0] inputs target {saved=()} @ 0
    g[0,0] = B[0,0] params[0] res[0,0] {saved=()} @ 0
    """
    groups = _checked_groups(list(groups))
    saved = _names_of_saved(save)
    _check_arguments(grain, groups, saved)
    group_by_stage = {stage: number for number, group in enumerate(groups) for stage in group}

    @as_transform
    def transform(program: Program) -> Program:
        if policy == "except_last" and not any(op.kind == "SPLIT" for op in program.ops):
            raise ProgramError('"except_last" is about microbatches: put fpipe.split() before fpipe.checkpoint().')
        last_microbatch = program.microbatches - 1
        if group_by_stage and max(group_by_stage) >= program.stages:
            raise ProgramError(
                f"groups name stage {max(group_by_stage)}; this program has stages 0..{program.stages - 1}."
            )

        def is_chosen(op: Op) -> bool:
            if op.kind != "F":
                return False
            if callable(policy):
                return policy(op.stage or 0, op.microbatch or 0)
            return policy == "always" or (policy == "except_last" and op.microbatch != last_microbatch)

        if grain == "layer":
            return _mark_layer_recompute(program, is_chosen, saved)
        recomputes: list[Op] = []

        # Each chosen F hands its residuals over to an R, which reads what that F reads.
        def drop_residuals(op: Op) -> Op:
            residuals = tuple(value for value in op.writes if value.name == "res")
            # Options mark two forwards that get no R: an exchange keeps nothing, and with grain="layer" the backward
            # recomputes already.
            if not is_chosen(op) or not residuals or op.options:
                return op
            recomputes.append(op._replace(kind="R", writes=residuals))
            return op._replace(writes=tuple(value for value in op.writes if value.name != "res"))

        ops = [map_parts(drop_residuals, op) for op in program.ops]
        if not recomputes:
            return program
        ops = _drop_offloads(ops, {value for op in recomputes for value in op.writes})
        return place_and_rebuild(program, [*ops, *_chain_groups(recomputes, group_by_stage)])

    return transform


def _checked_groups(argument: list[Any]) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = [tuple(group) for group in argument]
    for group in groups:
        if not group or list(group) != list(range(group[0], group[0] + len(group))):
            raise ValueError(f"a group lists adjacent stages, such as (1, 2, 3); found {group}.")
    if len({stage for group in groups for stage in group}) < sum(map(len, groups)):
        raise ValueError(f"a stage is in one group at most; found {groups}.")
    return groups


def _names_of_saved(save: Iterable[Any] | Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the ops whose results are saved, or "all but" and the dropped ones if these are fewer.

    >>> import torch
    >>> _names_of_saved([torch.ops.aten.mm.default])
    ('aten.mm.default',)
    >>> _names_of_saved(lambda ctx, op: op is not torch.ops.aten.tanh.default)
    ('all but', 'aten.tanh.default')
    """
    if callable(save):
        # Programs are built without torch. Whoever hands in a policy over its ops has imported it anyway.
        from fpipe.torch_internals import selective_checkpoint_answers

        answers = selective_checkpoint_answers(save)
        saved = tuple(name for name, is_saved in answers.items() if is_saved)
        dropped = tuple(name for name, is_saved in answers.items() if not is_saved)
        return saved if len(saved) <= len(dropped) else (ALL_BUT, *dropped)
    for op in save:
        if type(op).__name__ != "OpOverload":
            raise TypeError(f"an op is named with its overload, such as torch.ops.aten.mm.default; found {op!r}.")
    return tuple(sorted({str(op) for op in save}))


def _check_arguments(grain: str, groups: Sequence[Iterable[int]], saved: tuple[str, ...]) -> None:
    if grain == "stage" and saved:
        raise ValueError("save= is what a backward finds that computes its stage again itself: say grain='layer'.")
    if grain == "layer" and groups:
        raise ValueError("groups= is for grain='stage': by layers, what enters each stage is kept.")


def _mark_layer_recompute(program: Program, is_chosen: Callable[[Op], bool], saved: tuple[str, ...]) -> Program:
    """Mark the chosen forwards, which keep only the inputs of their layers, and their backwards, which recompute."""
    forwards = [
        op for op in parts_of(program.ops) if not op.options and any(value.name == "res" for value in op.writes)
    ]
    chosen = {op[1:4] for op in forwards if is_chosen(op)}

    def mark(op: Op) -> Op:
        return op._replace(options=(("saved", saved),)) if op.kind in "FBI" and op[1:4] in chosen else op

    ops = tuple(map_parts(mark, op) for op in program.ops)
    # Marks change neither reads nor writes, so the order and the sources still hold.
    return Program.trusted(program.inputs, ops, program.outputs, program.sources) if chosen else program


def _drop_offloads(ops: list[Op], residuals: set[Value]) -> list[Op]:
    """Drop OFFLOAD and LOAD of recomputed values; readers of the copy read the value itself."""
    original_by_copy: dict[Value, Value] = {}

    def read_original(op: Op) -> Op:
        return op._replace(reads=tuple(original_by_copy.get(value, value) for value in op.reads))

    kept_ops: list[Op] = []
    for op in ops:
        op = map_parts(read_original, op) if original_by_copy else op
        if op.kind in ("OFFLOAD", "LOAD") and op.reads[0] in residuals:
            original_by_copy[op.writes[0]] = op.reads[0]
        else:
            kept_ops.append(op)
    return kept_ops


def _chain_groups(recomputes: list[Op], group_by_stage: dict[int, int]) -> list[Op]:
    """Let each R read the recomputed output of the R before it in its group, so that only the group's input is kept."""
    outputs = {Value("y", *op[1:4]) for op in recomputes}
    passed_outputs: defaultdict[_Coordinates, set[Value]] = defaultdict(set)

    def read_recomputed(op: Op, value: Value) -> Value:
        group = group_by_stage.get(op.stage or 0)
        if group is None or group_by_stage.get(value.stage or 0) != group or value._replace(port=0) not in outputs:
            return value
        output = value._replace(name="again")
        passed_outputs[value[1:4]].add(output)
        return output

    recomputes = [op._replace(reads=tuple(read_recomputed(op, value) for value in op.reads)) for op in recomputes]
    return [op._replace(writes=(*sorted(passed_outputs[op[1:4]]), *op.writes)) for op in recomputes]
