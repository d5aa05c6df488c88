"""Assign a rank to every op.

    0F0 1F0 1B0 0B0        --> place("linear") -->        rank 0 | 0F0  .   .  0B0
                                                          rank 1 |  .  1F0 1B0  .

Ops that no schedule names follow their data, and a stage's parameters live where its ops are. A stage on two ranks is
an error unless `homes` allows it. Two homes hold replicas of the parameters, whose gradients are added; a home on a
rank that does not compute the stage means that its weights travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fpipe.check import check_ranks
from fpipe.limits import as_plain, check_whole_number
from fpipe.program import Op, Program, ProgramError, kind_of
from fpipe.transforms._rewrite import Transform, as_transform, is_move, place_by_data, rebuild, with_rank

RankRule = Callable[[str, int, int], int]
Homes = Mapping[int, Iterable[int] | int] | Callable[[int], Iterable[int] | int]
_PLACEMENT_NAMES = ("linear", "looped", "v", "bidirectional")


def place(
    policy: str | Sequence[int] | RankRule = "linear", homes: Homes | None = None, *, ranks: int | None = None
) -> Transform:
    """Put each stage on a rank.

    Args:
        policy: "linear" (stage s on rank s; more stages than ranks: neighbours share one), "looped" (s mod ranks), "v"
            (0 1 .. p-1 p-1 .. 1 0 and again), "bidirectional" (the first half of the microbatches goes down, the second
            up; both directions hold the parameters), a list with the rank of each stage, or
            `f(kind, stage, microbatch) -> rank`.
        homes: `{stage: ranks}` or `f(stage) -> ranks` where parameters live, if not on the rank of the stage's ops.
        ranks: how many; by default as many as stages.

    A schedule of one chunk a rank (`gpipe`, `one_f_one_b`, `zb_h1`, `one_f_one_b_overlap` ..) behind it keeps places of
    as many ranks that go up in order, so that a list says how many stages each has. Other schedules say where stages
    are themselves.

    Raises:
        ProgramError: a stage on two ranks without `homes`; more ranks than stages; transfers are placed already.

    >>> import fpipe
    >>> program = fpipe.program(4)
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0
    >>> print(fpipe.plot(fpipe.place("v", ranks=2)(program)))
    rank 0 | 0F0  .   .  3F0 3B0  .   .  0B0
    rank 1 |  .  1F0 2F0  .   .  2B0 1B0  .
    >>> fpipe.place("looped", ranks=2)(program).placement
    (0, 1, 0, 1)
    """
    names = ", ".join(_PLACEMENT_NAMES)
    if ranks is not None and not isinstance(policy, str):
        raise ValueError(f"ranks= goes with a named placement only ({names}).")
    if isinstance(policy, str) and policy not in _PLACEMENT_NAMES:
        alternatives = f"{names}, a list, or f(kind, stage, microbatch) -> rank"
        raise ValueError(f"{policy!r} is not a placement; known: {alternatives}.")

    @as_transform
    def transform(program: Program) -> Program:
        rule, homes_by_stage = _rule_of(policy, program, ranks), homes
        if isinstance(policy, str) and policy == "bidirectional" and homes is None:
            homes_by_stage = bidirectional_ranks(program.stages, ranks)[1]
        return rebuild_at(program, [_place_op(op, rule) for op in program.ops], homes_by_stage)

    return transform


def rebuild_at(program: Program, ops: Sequence[Op], homes: Homes | None) -> Program:
    """Rebuild a program whose scheduled ops have new ranks, and let all other ops follow."""
    inputs, placed_ops, outputs = place_by_data(program.inputs, ops, program.outputs, checked_homes(program, homes))
    # The names of copies contain ranks, so a program with transfers keeps its placement.
    if any(is_move(op.kind) for op in ops) and [op.rank for op in program.ops] != [op.rank for op in placed_ops]:
        raise ProgramError("this program has its transfers already; place it before fpipe.communicate().")
    rebuilt_program = rebuild(program, placed_ops, inputs=inputs, outputs=outputs)
    check_ranks(rebuilt_program)
    return rebuilt_program


def checked_homes(program: Program, homes: Homes | None) -> dict[int, tuple[int, ...]]:
    """Return the homes of stages that `homes` gives, checked and sorted."""
    if homes is None:
        return {}
    argument = {stage: homes(stage) for stage in range(program.stages)} if callable(homes) else homes
    ranks_by_stage: dict[int, tuple[int, ...]] = {}
    for stage, home in argument.items():
        ranks = tuple(map(as_plain, home if isinstance(home, Iterable) else (home,)))
        if type(as_plain(stage)) is not int or not 0 <= stage < program.stages:
            raise ProgramError(f"homes names stage {stage!r}; this program has stages 0..{program.stages - 1}.")
        if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ProgramError(f"homes gives stage {stage} {home!r}; a home is a rank from 0, or several of them.")
        ranks_by_stage[as_plain(stage)] = tuple(sorted(ranks))
    return ranks_by_stage


def _place_op(op: Op, rule: RankRule) -> Op:
    if kind_of(op.kind).position != "table" or op.stage is None:
        return op
    if op.parts:
        ranks = {_place_op(part, rule).rank for part in op.parts}
        if len(ranks) > 1:
            raise ProgramError(f"the parts of {op.cell} would be on ranks {sorted(ranks)}; a PAIR is on one rank.")
        return with_rank(op, ranks.pop())
    rank = as_plain(rule(op.kind, op.stage, op.microbatch or 0))
    if type(rank) is not int or rank < 0:
        raise ProgramError(f"{op.cell} would be on rank {rank!r}; ranks are whole numbers from 0.")
    return with_rank(op, rank)


def _rule_of(policy: str | Sequence[int] | RankRule, program: Program, ranks: int | None) -> RankRule:
    if callable(policy):
        return policy
    if isinstance(policy, str) and policy == "bidirectional":
        half, p = (program.microbatches + 1) // 2, ranks or program.stages
        ranks_down = stage_ranks("linear", program.stages, ranks)
        return lambda kind, stage, microbatch: ranks_down[stage] if microbatch < half else p - 1 - ranks_down[stage]
    ranks_of_stages = stage_ranks(policy, program.stages, ranks)
    return lambda kind, stage, microbatch: ranks_of_stages[stage]


def stage_ranks(policy: str | Sequence[int], stages: int, ranks: int | None = None) -> list[int]:
    """Return the rank of each stage, for placements that are the same for every microbatch.

    >>> stage_ranks("v", 12, 4)
    [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    """
    if not isinstance(policy, str):
        if len(policy) != stages:
            raise ProgramError(f"the placement lists {len(policy)} ranks for {stages} stages; give one rank a stage.")
        return list(policy)
    p = check_whole_number("ranks", stages if ranks is None else ranks)
    if p > stages:
        remedy = "Cut the model finer, or use fewer ranks."
        raise ProgramError(f"{p} ranks for {stages} stages: each rank needs a stage. {remedy}")
    if policy == "looped":
        return [stage % p for stage in range(stages)]
    if policy == "v":
        wave = [*range(p), *reversed(range(p))]
        return [wave[stage % (2 * p)] for stage in range(stages)]
    return [stage * p // stages for stage in range(stages)]


def ascending_ranks(program: Program, ranks: int | None) -> list[int]:
    """Return the rank of each stage, one chunk a rank: as placed if that ascends over all ranks, else in equal shares.

    >>> import fpipe
    >>> ascending_ranks(fpipe.place([0, 0, 0, 1])(fpipe.program(4)), 2)
    [0, 0, 0, 1]
    >>> ascending_ranks(fpipe.place([0, 1, 0, 1])(fpipe.program(4)), 2)
    [0, 0, 1, 1]
    """
    placement = program.placement if ranks is not None and program.ranks == ranks else ()
    # A stage on several ranks has a tuple in the placement, and no place in an ascending one.
    stage_homes = [rank for rank in placement if isinstance(rank, int)]
    if len(stage_homes) == len(placement) and stage_homes == sorted(stage_homes) and len({*stage_homes}) == ranks:
        return stage_homes
    return stage_ranks("linear", program.stages, ranks)


def stages_by_rank(placement: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the stages of each rank, ascending."""
    return [[stage for stage, home in enumerate(placement) if home == rank] for rank in range(ranks)]


def bidirectional_ranks(stages: int, ranks: int | None = None) -> tuple[list[int], dict[int, set[int]]]:
    """Return each stage's rank on the way down, and its two homes: that rank and the one on the way up.

    >>> bidirectional_ranks(3)
    ([0, 1, 2], {0: {0, 2}, 1: {1}, 2: {0, 2}})
    """
    ranks_down = stage_ranks("linear", stages, ranks)
    last_rank = (stages if ranks is None else ranks) - 1
    return ranks_down, {stage: {rank, last_rank - rank} for stage, rank in enumerate(ranks_down)}
