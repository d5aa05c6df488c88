"""RoundPipe: groups of stages go round ranks that own no weights, and the weights travel to them.

A step is a list of groups: those of the forward plan, then those of the backward plan. Group number g runs on rank
g mod p, all microbatches one after the other. The two plans may cut the model differently: a backward with its
recomputation takes three times as long as a forward, so three stages forward balance one stage backward:

    forward [0-2]                     0F 1F 2F        rank 0
    backward [3]: F and B together    3F 3B           rank 1
    backward [2]: recomputed          2R 2B           rank 0
    ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fpipe.program import Program, ProgramError, building, parts_of
from fpipe.schedules.registry import published
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Key
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.place import Homes
from fpipe.transforms.reorder import apply_table

Group = tuple[int, ...]
FORWARDS_PER_BACKWARD = 3
"""A backward with its recomputation takes as long as three forwards, if a full backward takes two."""


@published(
    "RoundPipe",
    "Luo et al. 2026, arXiv 2604.27085",
    idle="at most (p-1)t for groups of t seconds a microbatch, their number a multiple of p, and m >= p",
    peak="the stages of one group, for one microbatch, and the inputs of backward groups",
    accepts="any; at least as many groups as ranks",
)
def roundpipe(
    ranks: int,
    forward: Sequence[Iterable[int]] | None = None,
    backward: Sequence[Iterable[int]] | None = None,
    *,
    homes: Homes | None = None,
) -> Transform:
    """Groups of stages take turns on the ranks; forward and backward are grouped separately; weights live on a host.

    The first backward group runs forward and backward at once and keeps its residuals. All other groups keep only their
    inputs, and recompute. If `forward` covers the last stage, all groups recompute. A program without a backward has
    forward groups only. `fpipe.plan` finds groups that fit the costs.

    Args:
        ranks: those that compute. The host is one more, rank number `ranks`.
        forward: groups of adjacent stages in order, such as `[range(0, 3)]`, up to where the first backward group
            starts, or up to the last stage. By default as few as hold at most three times the stages of the largest
            backward group.
        backward: groups from the last stage down, such as `[[3], [2], [1], [0]]`. By default the first has the stages
            that `forward` leaves, or the last one, and the others one each.
        homes: where parameters live, as in `fpipe.place`, if not on the host.

    Returns:
        A transform. After `fpipe.merge()`, `fpipe.communicate(again={"params": lambda op: op.kind == "F"})` brings the
        weights of a stage once for its forwards and once for its backwards, and `fpipe.free()` drops them in between.

    Raises:
        ProgramError: an empty group, stages of a group that are not adjacent, a gap or an overlap between groups, a
            plan that misses the first or the last stage, a seam where plans do not meet, fewer groups than ranks.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.roundpipe(2))(fpipe.program(4))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 2F0 0F1 1F1 2F1 2R0 2B0 2R1 2B1 0R0 0B0 0R1 0B1
    rank 1 |  .   .   .  3F0 3B0  .  3F1 3B1 1R0 1B0 1R1 1B1  .   .
    rank 2 |  .   .   .   .   .   .   .   .   .   .   .   .   .   .
    >>> print(program.inputs[0])
    params[0] @ 2
    """

    @as_transform
    def transform(program: Program) -> Program:
        if any(op.kind in "BIW" for op in parts_of(program.ops)):
            forward_plan, backward_plan = checked_plans(program.stages, forward, backward)
        else:
            forward_plan, backward_plan = forward_groups(program.stages, ranks, forward, backward), []
        groups = [*forward_plan, *backward_plan]
        fused_group = len(forward_plan) if forward_plan == [] or forward_plan[-1][-1] < program.stages - 1 else None
        if len(groups) < ranks:
            raise ProgramError(
                f"roundpipe: groups: {len(groups)}, ranks: {ranks}; each rank runs a group. Use smaller groups "
                "or fewer ranks."
            )
        # Groups go round the ranks. The fused group runs F and B of a microbatch together: it recomputes nothing.
        rows: list[list[Key]] = [[] for _ in range(ranks)]
        for number, group in enumerate(groups):
            kinds = "F" if number < len(forward_plan) else "FB" if number == fused_group else "B"
            rows[number % ranks] += [
                (kind, stage, microbatch, None)
                for microbatch in range(program.microbatches)
                for kind in kinds
                for stage in (group if kind == "F" else group[::-1])
            ]
        # Parameters live on the host, one rank above those that compute; `communicate` brings them where a group runs.
        with building():
            first_kept_stage = program.stages if fused_group is None else backward_plan[0][0]
            groups = backward_plan if fused_group is None else backward_plan[1:]
            recomputed = checkpoint(lambda stage, microbatch: stage < first_kept_stage, groups=groups)(program)
            host_homes = dict.fromkeys(range(program.stages), ranks)
            return apply_table(recomputed, rows, move=True, homes=host_homes if homes is None else homes)

    return transform


def checked_plans(
    stages: int, forward: Sequence[Iterable[int]] | None, backward: Sequence[Iterable[int]] | None
) -> tuple[list[Group], list[Group]]:
    """Return both plans after checking that they run each stage forward and backward once."""
    # 1) The default backward plan: the stages that `forward` leaves in its first group, the others one each.
    forward_plan = None if forward is None else checked_groups("forward", forward, stages)
    backward_plan = None if backward is None else checked_groups("backward", backward, stages)
    if backward_plan is None:
        forward_stages = stages - 1 if forward_plan is None else forward_plan[-1][-1] + 1 if forward_plan else 0
        if forward_stages == stages:
            raise ProgramError(
                f"roundpipe: the forward plan ends with the last stage, {stages - 1}. Leave that to the first backward "
                "group."
            )
        backward_plan = [tuple(range(forward_stages, stages)), *((stage,) for stage in reversed(range(forward_stages)))]
    if forward_plan is None:
        # 2) The default forward plan: as few even groups as hold at most three times the largest backward group.
        forward_stages = backward_plan[0][0] if backward_plan else 0
        largest_group = FORWARDS_PER_BACKWARD * max(map(len, backward_plan), default=1)
        count = -(-forward_stages // largest_group)
        forward_plan = [
            tuple(range(forward_stages * n // count, forward_stages * (n + 1) // count)) for n in range(count)
        ]
    # 3) Each plan covers its stages without a gap, and they meet where the first backward group begins. Only a forward
    #    plan through the last stage needs no seam: then every backward recomputes.
    check_coverage("forward", forward_plan)
    if not backward_plan or backward_plan[0][-1] != stages - 1:
        problem = f"starts with stage {backward_plan[0][-1]}" if backward_plan else "is empty"
        raise ProgramError(f"roundpipe: the backward plan goes down from stage {stages - 1}, but {problem}.")
    check_coverage("backward", backward_plan[::-1])
    seam = forward_plan[-1][-1] + 1 if forward_plan else 0
    if seam not in (backward_plan[0][0], stages):
        raise ProgramError(
            f"roundpipe: the first backward group starts with stage {seam}, where the forward plan ends; found "
            f"{_group_text(backward_plan[0])}."
        )
    return forward_plan, backward_plan


def forward_groups(
    stages: int, ranks: int, forward: Sequence[Iterable[int]] | None, backward: Sequence[Iterable[int]] | None
) -> list[Group]:
    """Return the forward plan of a program without a backward: by default an even group for each rank."""
    if backward:
        raise ProgramError("roundpipe: this program has no backward; leave backward= out.")
    count = min(stages, ranks)
    even = [range(stages * n // count, stages * (n + 1) // count) for n in range(count)]
    groups = checked_groups("forward", even if forward is None else forward, stages)
    check_coverage("forward", groups)
    if not groups or groups[-1][-1] != stages - 1:
        raise ProgramError(f"roundpipe: the forward plan misses the last stage, {stages - 1}.")
    return groups


def checked_groups(direction: str, plan: Sequence[Iterable[int]], stages: int) -> list[Group]:
    """Return the groups of a plan after checking that each has adjacent stages of the program."""
    groups: list[Group] = []
    for index, stage_range in enumerate(plan):
        group = tuple(stage_range)
        group_name = f"roundpipe: {direction} group {index}"
        if not group:
            raise ProgramError(f"{group_name} is empty.")
        if group != tuple(range(group[0], group[0] + len(group))):
            raise ProgramError(f"{group_name} is {list(group)}; its stages are adjacent, in order.")
        if group[0] < 0 or group[-1] >= stages:
            raise ProgramError(f"{group_name} is {_group_text(group)}; the stages are 0..{stages - 1}.")
        groups.append(group)
    return groups


def check_coverage(direction: str, groups: Sequence[Group]) -> None:
    """Raise ProgramError if groups, in ascending order, leave a stage out or run one twice."""
    next_stage, plan = 0, f"roundpipe: the {direction} plan"
    for group in groups:
        if group[0] > next_stage:
            raise ProgramError(f"{plan} misses stage {next_stage}, before {_group_text(group)}.")
        if group[0] < next_stage:
            raise ProgramError(f"{plan} has stage {group[0]} twice, or out of order, in {_group_text(group)}.")
        next_stage = group[-1] + 1


def _group_text(group: Group) -> str:
    return f"[{group[0]}]" if len(group) == 1 else f"[{group[0]}-{group[-1]}]"
