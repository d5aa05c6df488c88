"""Group layers for ranks that take groups in turn: which go forward together, which backward, which both at once.

    costs of 4 layers: F 1, R + B 3        --> plan(costs, ranks=2) -->        forward [0-2]    backward [3] [2] [1] [0]

The largest group sets the pace and every group takes a turn, so a step takes max(groups, ranks) turns of the largest.
That product is as small as it can be, exactly: all sums of neighbouring layers are tried as the largest, and under a
bound on the largest, groups that are filled in order are as few as any.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate, takewhile
from math import inf, isfinite
from typing import Any, Literal, NamedTuple, cast, overload

from fpipe.limits import whole
from fpipe.program import Op
from fpipe.timing.balance import balance, whole_numbers
from fpipe.timing.costs import Costs

RunMode = Literal["fused", "train", "infer"]
Groups = list[range]


class Plan(NamedTuple):
    """Groups of layers as `fpipe.schedules.roundpipe(ranks, *plan)` takes them: forward, and from the last one down
    backward.

    >>> import fpipe
    >>> fpipe.plan(fpipe.Costs(forward=[1, 1, 2, 2], backward=[2, 2, 4, 4]), 2)
    Plan(forward=(range(0, 3),), backward=(range(3, 4), range(2, 3), range(0, 2)))
    """

    forward: tuple[range, ...]
    backward: tuple[range, ...]


@overload
def plan(
    costs: Costs,
    ranks: int,
    *,
    run: RunMode = ...,
    stages: int | None = ...,
    threshold: float | None = ...,
    memory: Sequence[float] | None = ...,
    limit: float | None = ...,
) -> Plan: ...
@overload
def plan(
    costs: Sequence[Costs],
    ranks: int,
    *,
    run: RunMode = ...,
    stages: Sequence[int] | None = ...,
    threshold: float | None = ...,
    memory: Sequence[Sequence[float]] | None = ...,
    limit: float | None = ...,
) -> tuple[Plan, ...]: ...
def plan(
    costs: Costs | Sequence[Costs],
    ranks: int,
    *,
    run: RunMode = "fused",
    stages: Any = None,
    threshold: float | None = 1.1,
    memory: Any = None,
    limit: float | None = None,
) -> Plan | tuple[Plan, ...]:
    """Group the layers of a model, or of several that run one after the other, each layer one stage.

    Args:
        costs: of each stage, as `fpipe.profile` measures them; a list for several models.
        ranks: how many take the groups in turn.
        run: "fused": the first backward group runs forward and backward together and recomputes nothing, of several
            models that of the last one. "train": all go forward, then all are recomputed and go backward. "infer": all
            go forward.
        stages: how many there are, where `costs` has one number for all of them.
        threshold: how many times the largest layer the largest group may cost, from 1; None for no bound. A larger one
            makes fewer groups, with more layers at once on a rank.
        memory: bytes of each stage on a rank that runs its group, such as parameters, gradients and residuals.
        limit: the most bytes of a group; needs `memory`.

    Returns:
        A `Plan`, or one for each model. Where more groups than ranks make no difference, the largest are cut in two.

    Raises:
        ValueError: costs, memory or options that are none; a layer beyond the limit; fewer layers than fill the ranks.

    Source: RoundPipe, Luo et al. 2026, arXiv 2604.27085.

    >>> import fpipe
    >>> found = fpipe.plan(fpipe.Costs(forward=1, backward_input=1, backward_weight=1), ranks=2, stages=4)
    >>> found.forward, found.backward
    ((range(0, 3),), (range(3, 4), range(2, 3), range(1, 2), range(0, 1)))
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.roundpipe(2, *found))(fpipe.program(4))
    """
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks is how many take groups in turn, at least 1; found {ranks!r}.")
    if run not in ("fused", "train", "infer"):
        raise ValueError(f'run is "fused", "train" or "infer", found {run!r}.')
    if threshold is not None and not (isinstance(threshold, int | float) and threshold >= 1):
        raise ValueError(
            f"threshold is how many times the largest layer a group may cost, from 1; found {threshold!r}."
        )
    if (limit is None) != (memory is None):
        raise ValueError("memory= says the bytes of each stage and limit= the most of a group: say both, or neither.")
    if limit is not None and not (isinstance(limit, int | float) and limit >= 0):
        raise ValueError(f"limit is the most bytes of a group, at least 0; found {limit!r}.")
    given_costs: Any = costs
    if not isinstance(given_costs, Costs) and not (
        isinstance(given_costs, Collection)
        and all(isinstance(model, Costs) for model in cast("Collection[object]", given_costs))
    ):
        raise TypeError(
            f"costs is an fpipe.Costs, or a list of them, one for each model; found {type(given_costs).__name__}."
        )
    several = not isinstance(costs, Costs)
    for word, values in (("stages", stages), ("memory", memory)):
        if several and values is not None and not isinstance(values, Collection):
            raise TypeError(f"{word} is a list with an entry for each model, found {values!r}.")
    models = list(costs) if several else [costs]
    counts = list(stages) if several and stages is not None else [stages] * len(models)
    sizes = list(memory) if several and memory is not None else [memory] * len(models)
    if not len(models) == len(counts) == len(sizes) or not models:
        raise ValueError(f"stages and memory are lists with an entry for each model; there are {len(models)} models.")
    earlier: list[RunMode] = ["train"] if run == "fused" else [run]
    runs: list[RunMode] = [*earlier * (len(models) - 1), run]
    most = inf if limit is None else limit
    arguments = zip(models, counts, runs, sizes, strict=True)
    layers = _exact([_layers(*model_arguments, most) for model_arguments in arguments])
    plans = _fill_ranks(_fewest_turns(layers, ranks, threshold), layers, ranks)
    return tuple(plans) if several else plans[0]


class _Layers(NamedTuple):
    """The layers of a model: what each costs forward; recomputed and backward; and forward and backward together."""

    run: RunMode
    ahead: Sequence[float]
    back: Sequence[float]
    both: Sequence[float]
    memory: Sequence[float]
    limit: float

    def rows(self) -> list[Sequence[float]]:
        """Return the costs that count in this run."""
        return [self.ahead] if self.run == "infer" else [self.ahead, self.back]


def _layers(costs: Costs, stages: Any, run: RunMode, memory: Any, limit: float) -> _Layers:
    if stages is not None:
        whole("stages", stages)
    if memory is not None and (not isinstance(memory, Collection) or isinstance(memory, str)):
        raise TypeError(f"memory lists the bytes of each stage, found {memory!r}.")
    listed = {len(row) for row in vars(costs).values() if isinstance(row, Sequence) and not isinstance(row, str)}
    listed |= set() if stages is None else {stages}
    if len(listed) != 1 or 0 in listed:
        raise ValueError(
            f"how many stages are there? The costs list {sorted(listed)}. Give one cost a stage, or say stages="
            if listed
            else "these costs have one number for all stages: say how many there are by stages=, at least 1."
        )
    count = listed.pop()
    ops = [Op(kind, stage, 0, None, 0, (), ()) for kind in "FRB" for stage in range(count)]
    seconds = [costs.seconds(op) for op in ops]
    ahead, again, back = (seconds[start : start + count] for start in range(0, 3 * count, count))
    weights = [0.0] * count if memory is None else list(memory)
    if len(weights) != count:
        raise ValueError(f"memory lists {len(weights)} stages, there are {count}; give the bytes of each.")
    for stage, size in enumerate(weights):
        if not isinstance(size, int | float) or not isfinite(size) or size < 0:
            raise ValueError(f"the memory of stage {stage} is in bytes, at least 0; found {size!r}.")
        if size > limit:
            raise ValueError(f"stage {stage} takes {size:g} bytes, more than the limit of {limit:g}: cut it in two.")
    backs, boths = ([first + second for first, second in zip(row, back, strict=True)] for row in (again, ahead))
    return _Layers(run, ahead, backs, boths, weights, limit)


def _exact(models: list[_Layers]) -> list[_Layers]:
    """Write all costs as whole numbers of one unit, so that no sum rounds."""
    numbers = iter(whole_numbers([cost for model in models for row in model[1:4] for cost in row]))
    return [
        model._replace(**{word: [next(numbers) for _ in getattr(model, word)] for word in ("ahead", "back", "both")})
        for model in models
    ]


def _fewest_turns(models: list[_Layers], ranks: int, threshold: float | None) -> list[Plan]:
    """Return the plans with the least product of turns and largest group; turns are groups, but at least the ranks."""
    largest = max(max(map(max, model.rows())) for model in models)
    if models[-1].run == "fused":
        largest = max(largest, models[-1].both[-1])
    bound = inf if threshold is None else largest * threshold
    rows = [row for model in models for row in model.rows()]
    rows += [models[-1].both] if models[-1].run == "fused" else []
    caps = sorted({cost for row in rows for cost in _sums(row, bound)})

    def groups(cap: float) -> float:
        plans = [_filled(model, cap) for model in models]
        return inf if None in plans else sum(map(_size, cast("list[Plan]", plans)))

    best, best_cap, index = inf, 0.0, len(caps) - 1
    while index >= 0 and (count := groups(caps[index])) < inf:  # for each number of groups the least cap that gives it
        index = bisect_left(caps, True, hi=index, key=lambda cap, count=count: groups(cap) <= count)
        if max(ranks, count) * caps[index] <= best:
            best, best_cap = max(ranks, count) * caps[index], caps[index]
        index -= 1
    return [_evened(model, plan, best_cap) for model in models if (plan := _filled(model, best_cap))]


def _size(plan: Plan) -> int:
    return len(plan.forward) + len(plan.backward)


def _sums(row: Sequence[float], bound: float) -> set[float]:
    """Return the sums of neighbouring layers' costs, up to a bound."""
    return {cost for start in range(len(row)) for cost in takewhile(lambda c: c <= bound, accumulate(row[start:]))}


def _filled(model: _Layers, cap: float) -> Plan | None:
    """Return the fewest groups that cost at most `cap` each: a larger fused group leaves less to the others."""
    cut = len(model.ahead)
    if model.run == "fused":
        last = _groups(model.both[::-1], model.memory[::-1], cap, model.limit, most=1)
        if not last:
            return None
        cut -= len(last[0])
    ahead = _groups(model.ahead[:cut], model.memory, cap, model.limit)
    back = [] if model.run == "infer" else _groups(model.back[:cut], model.memory, cap, model.limit)
    return None if ahead is None or back is None else _plan(model, cut, ahead, back)


def _plan(model: _Layers, cut: int, ahead: Groups, back: Groups) -> Plan:
    fused = [range(cut, len(model.ahead))] if model.run == "fused" else []
    return Plan(tuple(ahead), (*fused, *back[::-1]))


def _groups(
    row: Sequence[float], memory: Sequence[float], cap: float, limit: float, most: int | None = None
) -> Groups | None:
    """Fill groups one after the other, at most so many; None where a layer alone costs more than `cap`."""
    groups: Groups = []
    cost = size = inf
    for layer, (seconds, held) in enumerate(zip(row, memory, strict=False)):
        cost, size = cost + seconds, size + held
        if cost > cap or size > limit or not groups:
            if len(groups) == most:
                break
            if seconds > cap:
                return None
            groups.append(range(layer, layer))
            cost, size = seconds, held
        groups[-1] = range(groups[-1].start, layer + 1)
    return groups


def _evened(model: _Layers, plan: Plan, cap: float) -> Plan:
    """Make the largest group forward and the largest backward as small as can be, with as many groups."""
    cut = plan.backward[0].start if model.run == "fused" else len(model.ahead)

    def evened(row: Sequence[float], count: int) -> Groups:
        caps = sorted(_sums(row[:cut], cap))

        def enough(less: float) -> bool:
            groups = _groups(row[:cut], model.memory, less, model.limit)
            return groups is not None and len(groups) <= count

        index = bisect_left(caps, True, key=enough)
        return _groups(row[:cut], model.memory, caps[index], model.limit) or [] if caps else []

    back = [] if model.run == "infer" else evened(model.back, len(plan.backward) - (model.run == "fused"))
    return _plan(model, cut, evened(model.ahead, len(plan.forward)), back)


def _fill_ranks(plans: list[Plan], models: list[_Layers], ranks: int) -> list[Plan]:
    """Cut the group that costs most in two, while there are fewer groups than ranks."""
    while sum(map(_size, plans)) < ranks:
        options: list[tuple[float, int, int, int]] = []  # cost, model, pass, group
        for number, (plan, model) in enumerate(zip(plans, models, strict=True)):
            for direction, row in enumerate((model.ahead, model.back)):
                options += [
                    (sum(row[layer] for layer in group), number, direction, index)
                    for index, group in enumerate(plan[direction])
                    if len(group) > 1 and not (direction and index == 0 and model.run == "fused")
                ]
        if options:
            _, number, direction, index = max(options)
            row = (models[number].ahead, models[number].back)[direction]
            plans[number] = _halved(plans[number], direction, index, row)
        elif models[-1].run == "fused" and len(plans[-1].backward[0]) > 1:
            fused = plans[-1].backward[0]
            first, rest = fused[:1], fused[1:]
            plans[-1] = Plan((*plans[-1].forward, first), (rest, first, *plans[-1].backward[1:]))
        else:
            raise ValueError(
                f"these layers make {sum(map(_size, plans))} groups at most, for {ranks} ranks; use fewer ranks."
            )
    return plans


def _halved(plan: Plan, direction: int, index: int, row: Sequence[float]) -> Plan:
    """Cut a group of the forward (0) or backward (1) pass in two."""
    group = plan[direction][index]
    first = group.start + balance([row[layer] for layer in group], 2)[0]
    halves = range(group.start, first), range(first, group.stop)
    groups = (*plan[direction][:index], *(halves[::-1] if direction else halves), *plan[direction][index + 1 :])
    return plan._replace(**{("forward", "backward")[direction]: groups})
