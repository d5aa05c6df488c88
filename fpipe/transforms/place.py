"""Say where: the rank of every op.

    0F0 1F0 1B0 0B0        --> place("linear") -->        rank 0 | 0F0  .   .  0B0
                                                          rank 1 |  .  1F0 1B0  .

Ops that no schedule names follow their data, and a stage's parameters live where its ops are. A stage on two ranks is
an error unless `homes` says so: two homes are replicas whose gradients meet, a home elsewhere means weights that
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fpipe.check import ranks_are_whole
from fpipe.limits import whole
from fpipe.program import Op, Program, ProgramError, kind_of
from fpipe.transforms._rewrite import Transform, is_move, keep_to_data, moved, rebuilt, transforming

Rule = Callable[[str, int, int], int]
Homes = Mapping[int, Iterable[int] | int] | Callable[[int], Iterable[int] | int]
_NAMED = ("linear", "looped", "v", "bidirectional")


def place(
    policy: str | Sequence[int] | Rule = "linear", homes: Homes | None = None, *, ranks: int | None = None
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
    names = ", ".join(_NAMED)
    if ranks is not None and not isinstance(policy, str):
        raise ValueError(f"ranks= goes with a named placement ({names}); a list or a function says them itself.")
    if not isinstance(policy, str | Sequence) and not callable(policy):
        raise TypeError(f"a placement is a name, a list with each stage's rank, or a function; found {policy!r}.")
    if isinstance(policy, str) and policy not in _NAMED:
        known = f"{names}, a list, or f(kind, stage, microbatch) -> rank"
        raise ValueError(f"{policy!r} is not a placement; known: {known}.")

    @transforming
    def transform(program: Program) -> Program:
        rule, all_homes = _rule(policy, program, ranks), homes
        if policy == "bidirectional" and homes is None:
            all_homes = two_ways(program.stages, ranks)[1]
        return rebuilt_at(program, [_place(op, rule) for op in program.ops], all_homes)

    return transform


def rebuilt_at(program: Program, ops: Sequence[Op], homes: Homes | None) -> Program:
    """Rebuild a program whose scheduled ops have new ranks: the rest follows, and each stage has a home."""
    inputs, placed, outputs = keep_to_data(program.inputs, ops, program.outputs, checked_homes(program, homes))
    if any(is_move(op.kind) for op in ops) and any(a.rank != b.rank for a, b in zip(program.ops, placed, strict=True)):
        raise ProgramError("this program has its transfers already; place it before fpipe.communicate().")
    rebuilt_program = rebuilt(program, placed, inputs=inputs, outputs=outputs)
    ranks_are_whole(rebuilt_program)
    return rebuilt_program


def checked_homes(program: Program, homes: Homes | None) -> dict[int, tuple[int, ...]]:
    """The homes of stages that the argument names."""
    if homes is None:
        return {}
    if not callable(homes) and not isinstance(homes, Mapping):
        raise TypeError(f"homes is {{stage: rank}}, {{stage: ranks}} or f(stage) -> rank or ranks; found {homes!r}.")
    argument = {stage: homes(stage) for stage in range(program.stages)} if callable(homes) else homes
    for stage in argument:
        if type(stage) is not int or not 0 <= stage < program.stages:
            raise ProgramError(f"homes names stage {stage!r}; this program has stages 0..{program.stages - 1}.")
    checked = {stage: tuple(home) if isinstance(home, Iterable) else (home,) for stage, home in argument.items()}
    for stage, ranks in checked.items():
        if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
            rule = "a home is a rank from 0, or several of them"
            raise ProgramError(f"homes gives stage {stage} {argument[stage]!r}; {rule}.")
    return {stage: tuple(sorted(ranks)) for stage, ranks in checked.items()}


def _place(op: Op, rule: Rule) -> Op:
    if kind_of(op.kind).place != "table" or op.stage is None:
        return op
    if op.parts:
        ranks = {_place(part, rule).rank for part in op.parts}
        if len(ranks) > 1:
            raise ProgramError(f"the parts of {op.cell} would be on ranks {sorted(ranks)}; a PAIR is on one rank.")
        return moved(op, ranks.pop())
    rank = rule(op.kind, op.stage, op.microbatch or 0)
    if type(rank) is not int or rank < 0:
        raise ProgramError(f"the placement puts {op.cell} on rank {rank!r}; a rank is a whole number from 0.")
    return moved(op, rank)


def _rule(policy: str | Sequence[int] | Rule, program: Program, ranks: int | None) -> Rule:
    if callable(policy):
        return policy
    if policy == "bidirectional":
        half, p = (program.microbatches + 1) // 2, ranks or program.stages
        down = stage_ranks("linear", program.stages, ranks)
        return lambda kind, stage, microbatch: down[stage] if microbatch < half else p - 1 - down[stage]
    listed = stage_ranks(policy, program.stages, ranks)
    return lambda kind, stage, microbatch: listed[stage]


def stage_ranks(policy: str | Sequence[int], stages: int, ranks: int | None = None) -> list[int]:
    """The rank of each stage, for the placements that need not know the microbatch.

    >>> stage_ranks("v", 12, 4)
    [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    """
    if not isinstance(policy, str):
        if len(policy) != stages:
            raise ProgramError(f"the placement lists {len(policy)} ranks for {stages} stages; give one rank a stage.")
        return list(policy)
    p = whole("ranks", stages if ranks is None else ranks)
    if p > stages:
        mend = "Cut the model finer, or use fewer ranks."
        raise ProgramError(f"{p} ranks for {stages} stages: each rank needs a stage. {mend}")
    if policy == "looped":
        return [stage % p for stage in range(stages)]
    if policy == "v":
        wave = [*range(p), *reversed(range(p))]
        return [wave[stage % (2 * p)] for stage in range(stages)]
    return [stage * p // stages for stage in range(stages)]


def in_order(program: Program, ranks: int | None) -> list[int]:
    """The rank of each stage with one chunk a rank: as placed if that goes up over all ranks, or in equal shares.

    >>> import fpipe
    >>> in_order(fpipe.place([0, 0, 0, 1])(fpipe.program(4)), 2)
    [0, 0, 0, 1]
    >>> in_order(fpipe.place([0, 1, 0, 1])(fpipe.program(4)), 2)
    [0, 0, 1, 1]
    """
    placement = program.placement if ranks is not None and program.ranks == ranks else ()
    listed = [rank for rank in placement if isinstance(rank, int)]
    if len(listed) == len(placement) and listed == sorted(listed) and len({*listed}) == ranks:
        return listed
    return stage_ranks("linear", program.stages, ranks)


def two_ways(stages: int, ranks: int | None = None) -> tuple[list[int], dict[int, set[int]]]:
    """The rank of each stage on the way down, and the homes of each: there, and where it is on the way up.

    >>> two_ways(3)
    ([0, 1, 2], {0: {0, 2}, 1: {1}, 2: {0, 2}})
    """
    down = stage_ranks("linear", stages, ranks)
    last = (stages if ranks is None else ranks) - 1
    return down, {stage: {rank, last - rank} for stage, rank in enumerate(down)}
