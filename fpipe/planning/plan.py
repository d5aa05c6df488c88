"""Group layers for ranks that take groups in turn, forward, backward, and both at once.

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

from fpipe.limits import check_whole_number
from fpipe.program import Op
from fpipe.timing.balance import balance, scale_to_integers
from fpipe.timing.costs import Costs

RunMode = Literal["fused", "train", "infer"]
Groups = list[range]


class Plan(NamedTuple):
    """Groups of layers for `fpipe.schedules.roundpipe(ranks, *plan)`: forward, and backward from the last layer.

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
    """Group the layers of a model, or of several models that run in a row; each layer is a stage.

    Args:
        costs: of each stage, as `fpipe.profile` measures them; a list for several models. Of costs
            `[stage][microbatch]` the mean over microbatches counts.
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
    >>> grouped = fpipe.plan(fpipe.Costs(forward=1, backward_input=1, backward_weight=1), ranks=2, stages=4)
    >>> grouped.forward, grouped.backward
    ((range(0, 3),), (range(3, 4), range(2, 3), range(1, 2), range(0, 1)))
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.roundpipe(2, *grouped))(fpipe.program(4))
    """
    # 1. Check the options.
    check_whole_number("ranks", ranks)
    if threshold is not None and not threshold >= 1:
        raise ValueError(f"threshold is a multiple of the largest layer, from 1; found {threshold!r}.")
    if (limit is None) != (memory is None):
        raise ValueError("memory= and limit= go together: say both, or neither.")
    if limit is not None and not limit >= 0:
        raise ValueError(f"limit is in bytes, at least 0; found {limit!r}.")
    has_several_models = not isinstance(costs, Costs)
    for name, values in (("stages", stages), ("memory", memory)):
        if has_several_models and values is not None and not isinstance(values, Collection):
            raise TypeError(f"{name} has an entry for each model, found {values!r}.")
    # 2. One of each for each model. Only the last model can run forward and backward together: its loss is at its end.
    models = list(costs) if has_several_models else [costs]
    counts = list(stages) if has_several_models and stages is not None else [stages] * len(models)
    sizes = list(memory) if has_several_models and memory is not None else [memory] * len(models)
    if not len(models) == len(counts) == len(sizes) or not models:
        raise ValueError(f"stages and memory have {len(models)} entries, one a model.")
    earlier_runs: list[RunMode] = ["train"] if run == "fused" else [run]
    runs: list[RunMode] = [*earlier_runs * (len(models) - 1), run]
    # 3. Group, exactly: in integers.
    byte_limit = inf if limit is None else limit
    arguments = zip(models, counts, runs, sizes, strict=True)
    layers = _scale_models([_make_layers(*model_arguments, byte_limit) for model_arguments in arguments])
    plans = _fill_ranks(_plan_fewest_turns(layers, ranks, threshold), layers, ranks)
    return tuple(plans) if has_several_models else plans[0]


class _Layers(NamedTuple):
    """Costs of each layer of a model: forward; recomputed and backward; and fused, which is forward and backward."""

    run: RunMode
    forward: Sequence[float]
    recomputed: Sequence[float]
    fused: Sequence[float]
    memory: Sequence[float]
    limit: float

    def cost_lists(self) -> list[Sequence[float]]:
        return [self.forward] if self.run == "infer" else [self.forward, self.recomputed]


def _make_layers(costs: Costs, stages: Any, run: RunMode, memory: Any, limit: float) -> _Layers:
    # How many stages there are follows from the lists among the fields of costs, or is said.
    if stages is not None:
        check_whole_number("stages", stages)
    if memory is not None and (not isinstance(memory, Collection) or isinstance(memory, str)):
        raise TypeError(f"memory lists the bytes of each stage, found {memory!r}.")
    costs = costs.mean_microbatch()
    lengths = {len(row) for row in vars(costs).values() if isinstance(row, Sequence) and not isinstance(row, str)}
    lengths |= set() if stages is None else {stages}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"how many stages are there? The costs list {sorted(lengths)}. Give one cost a stage, or say stages="
            if lengths
            else "these costs have one number for all stages: say how many there are by stages=, at least 1."
        )
    stage_count = lengths.pop()
    ops = [Op(kind, stage, 0, None, 0, (), ()) for kind in "FRB" for stage in range(stage_count)]
    seconds = [costs.seconds(op) for op in ops]
    forward, recompute, backward = (seconds[i * stage_count : (i + 1) * stage_count] for i in range(3))
    stage_bytes = [0.0] * stage_count if memory is None else list(memory)
    if len(stage_bytes) != stage_count:
        raise ValueError(f"memory lists {len(stage_bytes)} stages, there are {stage_count}.")
    for stage, size in enumerate(stage_bytes):
        if not isinstance(size, int | float) or not isfinite(size) or size < 0:
            raise ValueError(f"the memory of stage {stage} is in bytes, at least 0; found {size!r}.")
        if size > limit:
            raise ValueError(f"stage {stage} takes {size:g} bytes, and the limit is {limit:g}: cut it.")
    recomputed, fused = ([a + b for a, b in zip(row, backward, strict=True)] for row in (recompute, forward))
    return _Layers(run, forward, recomputed, fused, stage_bytes, limit)


def _scale_models(models: list[_Layers]) -> list[_Layers]:
    """Scale the costs of all models to integers of one unit, so that no sum rounds."""
    integers = iter(scale_to_integers([cost for model in models for costs in model[1:4] for cost in costs]))

    def scaled(costs: Sequence[float]) -> list[int]:
        return [next(integers) for _ in costs]

    return [
        model._replace(forward=scaled(model.forward), recomputed=scaled(model.recomputed), fused=scaled(model.fused))
        for model in models
    ]


def _plan_fewest_turns(models: list[_Layers], ranks: int, threshold: float | None) -> list[Plan]:
    """Return the plans with the least product of turns and largest group; turns are groups, but at least the ranks.

    The largest group is a sum of neighbouring layers, so only these sums, called caps, are tried. Fewer groups need a
    larger cap, so for each number of groups, from few to many, the least cap that gives it is found by bisection.
    """
    largest = max(max(map(max, model.cost_lists())) for model in models)
    if models[-1].run == "fused":
        largest = max(largest, models[-1].fused[-1])
    # The largest layer, or the last one fused, is in some group whole, so nothing below it is possible.
    bound = inf if threshold is None else largest * threshold
    cost_lists = [costs for model in models for costs in model.cost_lists()]
    cost_lists += [models[-1].fused] if models[-1].run == "fused" else []
    caps = sorted({cost for costs in cost_lists for cost in _range_costs(costs, bound)})

    def group_count(cap: float) -> float:
        plans = [_fill_model(model, cap) for model in models]
        return inf if None in plans else sum(map(_count_groups, cast("list[Plan]", plans)))

    best, best_cap, index = inf, 0.0, len(caps) - 1
    while index >= 0 and (total := group_count(caps[index])) < inf:
        index = bisect_left(caps, True, hi=index, key=lambda cap, total=total: group_count(cap) <= total)
        # Of equal products the one with the smaller groups wins, which holds fewer layers at once on a rank.
        if max(ranks, total) * caps[index] <= best:
            best, best_cap = max(ranks, total) * caps[index], caps[index]
        index -= 1
    return [_even_out(model, plan, best_cap) for model in models if (plan := _fill_model(model, best_cap))]


def _count_groups(plan: Plan) -> int:
    return len(plan.forward) + len(plan.backward)


def _range_costs(costs: Sequence[float], bound: float) -> set[float]:
    """Return the costs of all ranges of neighbouring layers, up to a bound."""
    return {cost for start in range(len(costs)) for cost in takewhile(lambda c: c <= bound, accumulate(costs[start:]))}


def _fill_model(model: _Layers, cap: float) -> Plan | None:
    """Return the fewest groups of a model that cost at most `cap` each; None if there are none."""
    # The fused group is filled first, from the last layer back: the larger it is, the less is left to the others.
    cut = len(model.forward)
    if model.run == "fused":
        fused_groups = _fill_groups(model.fused[::-1], model.memory[::-1], cap, model.limit, max_groups=1)
        if not fused_groups:
            return None
        cut -= len(fused_groups[0])
    forward = _fill_groups(model.forward[:cut], model.memory, cap, model.limit)
    backward = [] if model.run == "infer" else _fill_groups(model.recomputed[:cut], model.memory, cap, model.limit)
    return None if forward is None or backward is None else _as_plan(model, cut, forward, backward)


def _as_plan(model: _Layers, cut: int, forward: Groups, backward: Groups) -> Plan:
    fused = [range(cut, len(model.forward))] if model.run == "fused" else []
    return Plan(tuple(forward), (*fused, *backward[::-1]))


def _fill_groups(
    costs: Sequence[float], memory: Sequence[float], cap: float, limit: float, max_groups: int | None = None
) -> Groups | None:
    """Fill groups in order, at most `max_groups`; None if a layer alone costs more than `cap`."""
    groups: Groups = []
    cost = size = inf  # more than any cap, so the first layer opens a group
    for layer, (seconds, layer_bytes) in enumerate(zip(costs, memory, strict=False)):
        cost, size = cost + seconds, size + layer_bytes
        if cost > cap or size > limit or not groups:
            if len(groups) == max_groups:
                break
            if seconds > cap:
                return None
            groups.append(range(layer, layer))
            cost, size = seconds, layer_bytes
        groups[-1] = range(groups[-1].start, layer + 1)
    return groups


def _even_out(model: _Layers, plan: Plan, cap: float) -> Plan:
    """Make the largest group of each pass as small as possible, with as many groups as before."""
    cut = plan.backward[0].start if model.run == "fused" else len(model.forward)

    def even_groups(costs: Sequence[float], count: int) -> Groups:
        # The least cap that still needs no more groups than now.
        caps = sorted(_range_costs(costs[:cut], cap))

        def is_enough(lower_cap: float) -> bool:
            groups = _fill_groups(costs[:cut], model.memory, lower_cap, model.limit)
            return groups is not None and len(groups) <= count

        index = bisect_left(caps, True, key=is_enough)
        return _fill_groups(costs[:cut], model.memory, caps[index], model.limit) or [] if caps else []

    count = len(plan.backward) - (model.run == "fused")
    backward = [] if model.run == "infer" else even_groups(model.recomputed, count)
    return _as_plan(model, cut, even_groups(model.forward, len(plan.forward)), backward)


def _fill_ranks(plans: list[Plan], models: list[_Layers], ranks: int) -> list[Plan]:
    """Cut the most expensive group in two, while there are fewer groups than ranks: a rank without one would idle."""
    while sum(map(_count_groups, plans)) < ranks:
        # A group can be cut if it has two layers and is not the fused one, which is both passes at once.
        candidates: list[tuple[float, int, int, int]] = []  # cost, model, pass (0 forward, 1 backward), group
        for model_index, (plan, model) in enumerate(zip(plans, models, strict=True)):
            for pass_index, costs in enumerate((model.forward, model.recomputed)):
                candidates += [
                    (sum(costs[layer] for layer in group), model_index, pass_index, index)
                    for index, group in enumerate(plan[pass_index])
                    if len(group) > 1 and not (pass_index and index == 0 and model.run == "fused")
                ]
        if candidates:
            _, model_index, pass_index, index = max(candidates)
            costs = (models[model_index].forward, models[model_index].recomputed)[pass_index]
            plans[model_index] = _split_group(plans[model_index], pass_index, index, costs)
        # Else the fused group gives up its first layer, which then goes forward and backward as groups of its own.
        elif models[-1].run == "fused" and len(plans[-1].backward[0]) > 1:
            fused = plans[-1].backward[0]
            front, back = fused[:1], fused[1:]
            plans[-1] = Plan((*plans[-1].forward, front), (back, front, *plans[-1].backward[1:]))
        else:
            count = sum(map(_count_groups, plans))
            raise ValueError(f"these layers make {count} groups at most, for {ranks} ranks; use fewer ranks.")
    return plans


def _split_group(plan: Plan, pass_index: int, index: int, costs: Sequence[float]) -> Plan:
    """Cut a group of the forward (0) or backward (1) pass in two."""
    group = plan[pass_index][index]
    middle = group.start + balance([costs[layer] for layer in group], 2)[0]
    # Backward groups run from the last layers to the first.
    halves = range(group.start, middle), range(middle, group.stop)
    groups = (*plan[pass_index][:index], *(halves[::-1] if pass_index else halves), *plan[pass_index][index + 1 :])
    return plan._replace(**{("forward", "backward")[pass_index]: groups})
