"""Ranks without weights of their own: groups of stages go round them in turn, and the weights travel to where they are.

A step is a row of groups: those of the forward plan, then those of the backward plan. Group number g runs on rank
g mod p, all microbatches one after the other. The two plans need not cut the model alike: a backward with its
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
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.cells import Key
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.place import Homes
from fpipe.transforms.reorder import by_table

Group = tuple[int, ...]
RECOMPUTED = 3
"""How many forwards a backward with its recomputation takes, if a full backward takes two."""


@published(
    "RoundPipe",
    "Luo et al. 2026, arXiv 2604.27085",
    idle="at most (p-1)t for groups of t seconds a microbatch, their number a multiple of p, and m >= p",
    peak="the stages of one group, for one microbatch; beside them the inputs of backward groups",
    accepts="any; at least as many groups as ranks",
)
def roundpipe(
    ranks: int,
    forward: Sequence[Iterable[int]] | None = None,
    backward: Sequence[Iterable[int]] | None = None,
    *,
    homes: Homes | None = None,
) -> Transform:
    """Groups of stages go round the ranks, forward and backward cut differently, weights on a host (RoundPipe, 2026).

    The first backward group runs forward and backward together and keeps what it computes; all others keep only what
    enters them and recompute. With groups of equal time t a microbatch, as many as a multiple of p, and m >= p, a rank
    is idle for (p-1)t at most. Where `forward` runs to the last stage, no group is both: all are recomputed. A program
    without a backward has forward groups only. `fpipe.plan` finds the groups that fit the costs.

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

    @transforming
    def transform(program: Program) -> Program:
        if any(op.kind in "BIW" for op in parts_of(program.ops)):
            ahead, back = _plans(program.stages, forward, backward)
        else:
            ahead, back = _forward_only(program.stages, ranks, forward, backward), []
        groups = [*ahead, *back]
        fused = len(ahead) if ahead == [] or ahead[-1][-1] < program.stages - 1 else None
        if len(groups) < ranks:
            raise ProgramError(
                f"roundpipe: groups: {len(groups)}, ranks: {ranks}; each rank runs a group. Use fewer ranks, or say "
                "smaller groups by forward= and backward=."
            )
        rows: list[list[Key]] = [[] for _ in range(ranks)]
        for number, group in enumerate(groups):
            kinds = "F" if number < len(ahead) else "FB" if number == fused else "B"
            rows[number % ranks] += [
                (kind, stage, microbatch, None)
                for microbatch in range(program.microbatches)
                for kind in kinds
                for stage in (group if kind == "F" else group[::-1])
            ]
        with building():
            kept = program.stages if fused is None else back[0][0]
            again = back if fused is None else back[1:]
            recomputing = checkpoint(lambda stage, microbatch: stage < kept, groups=again)(program)
            host = dict.fromkeys(range(program.stages), ranks)
            return by_table(recomputing, rows, move=True, homes=host if homes is None else homes)

    return transform


def _plans(
    stages: int, forward: Sequence[Iterable[int]] | None, backward: Sequence[Iterable[int]] | None
) -> tuple[list[Group], list[Group]]:
    """The groups of both plans, which together run each stage forward and backward once."""
    ahead = None if forward is None else _groups("forward", forward, stages)
    back = None if backward is None else _groups("backward", backward, stages)
    if back is None:
        cut = stages - 1 if ahead is None else ahead[-1][-1] + 1 if ahead else 0
        if cut == stages:
            raise ProgramError(
                f"roundpipe: the forward plan ends with the last stage, {stages - 1}. The first backward group runs "
                "forward and backward together: leave at least the last stage to it."
            )
        back = [tuple(range(cut, stages)), *((stage,) for stage in reversed(range(cut)))]
    if ahead is None:
        cut, most = back[0][0] if back else 0, RECOMPUTED * max(map(len, back), default=1)
        count = -(-cut // most)
        ahead = [tuple(range(cut * n // count, cut * (n + 1) // count)) for n in range(count)]
    _cover("forward", ahead)
    if not back or back[0][-1] != stages - 1:
        found = f"the first ends with stage {back[0][-1]}" if back else "there is none"
        raise ProgramError(
            f"roundpipe: the backward plan misses the last stage, {stages - 1}: its groups go from the last stage "
            f"down, and {found}."
        )
    _cover("backward", back[::-1])
    seam = ahead[-1][-1] + 1 if ahead else 0
    if seam not in (back[0][0], stages):
        raise ProgramError(
            f"roundpipe: the plans do not meet. The first backward group runs forward and backward together, so it "
            f"starts with stage {seam}, where the forward plan ends; found {_shown(back[0])}."
        )
    return ahead, back


def _forward_only(
    stages: int, ranks: int, forward: Sequence[Iterable[int]] | None, backward: Sequence[Iterable[int]] | None
) -> list[Group]:
    """The groups of a program without a backward: by default one for each rank, as even as can be."""
    if backward:
        raise ProgramError("roundpipe: this program has no backward, and so no backward plan; leave backward= out.")
    count = min(stages, ranks)
    even = [range(stages * n // count, stages * (n + 1) // count) for n in range(count)]
    groups = _groups("forward", even if forward is None else forward, stages)
    _cover("forward", groups)
    if not groups or groups[-1][-1] != stages - 1:
        raise ProgramError(f"roundpipe: the forward plan misses the last stage, {stages - 1}; nothing else runs it.")
    return groups


def _groups(word: str, plan: Sequence[Iterable[int]], stages: int) -> list[Group]:
    """The groups of a plan, each of adjacent stages of the program."""
    if not isinstance(plan, Sequence) or isinstance(plan, str):
        raise TypeError(f"roundpipe: {word} is a list of groups of stages, such as [range(0, 3)]; found {plan!r}.")
    groups: list[Group] = []
    for number, given in enumerate(plan):
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise TypeError(f"a group is a list or range of stages, such as range(0, 3); found {given!r}.")
        group = tuple(given)
        if not group:
            raise ProgramError(f"roundpipe: {word} group {number} is empty; a group has at least one stage.")
        if any(type(stage) is not int for stage in group):
            raise TypeError(f"roundpipe: {word} group {number} is {list(group)}; stages are whole numbers.")
        if group != tuple(range(group[0], group[0] + len(group))):
            raise ProgramError(
                f"roundpipe: {word} group {number} is {list(group)}; the stages of a group are adjacent, in order."
            )
        if group[0] < 0 or group[-1] >= stages:
            raise ProgramError(
                f"roundpipe: {word} group {number} is {_shown(group)}; this program has stages 0..{stages - 1}."
            )
        groups.append(group)
    return groups


def _cover(word: str, groups: Sequence[Group]) -> None:
    """Refuse groups, in the order of their stages, that leave a stage out or run one twice."""
    wanted = 0
    for group in groups:
        if group[0] > wanted:
            raise ProgramError(
                f"roundpipe: a gap in the {word} plan: stage {wanted}, before {_shown(group)}, is in no group."
            )
        if group[0] < wanted:
            raise ProgramError(
                f"roundpipe: the {word} plan has stage {group[0]} twice, or out of order, in {_shown(group)}."
            )
        wanted = group[-1] + 1


def _shown(group: Group) -> str:
    return f"[{group[0]}]" if len(group) == 1 else f"[{group[0]}-{group[-1]}]"
