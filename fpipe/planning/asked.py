"""The checked arguments of a plan: sizes, words, memory, costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fpipe.limits import whole
from fpipe.model import Model
from fpipe.planning.cost_curve import CostCurve, Share
from fpipe.planning.work import Work
from fpipe.schedules.compare import shared
from fpipe.schedules.named import Named, parse
from fpipe.schedules.registry import names
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs
from fpipe.timing.value_bytes import NamedBytes
from fpipe.transforms.shard import GATHERS, WHOLE, checked_gathers

Said = Costs | Callable[[float], Costs]
POLICIES = ("never", "except_last", "always")


@dataclass(frozen=True)
class Asked:
    """The candidates to try, and the limits: the memory of each rank."""

    ranks: int
    microbatches: tuple[int, ...]
    checkpoint: tuple[str, ...]
    schedules: Mapping[str, Named]
    cluster: Cluster | None
    limits: tuple[float, ...]
    search: float
    replicas: int
    shard: tuple[str, ...]


def asked_for(
    ranks: object,
    microbatches: Any,
    checkpoint: Any,
    schedules: Any,
    memory: object,
    cluster: Cluster | None,
    search: object,
    replicas: object,
    shard: Any,
) -> Asked:
    """Check the arguments of a plan, and hold them as a value."""
    ranks = whole("ranks", ranks)
    counts = _listed("microbatches", microbatches, "numbers of microbatches, such as [8, 16]")
    odd = next((count for count in counts if type(count) is not int or count < 1), None)
    if odd is not None:
        raise ValueError(f"microbatches lists whole numbers, at least 1; found {odd!r}.")
    policies = [policy(one) for one in _listed("checkpoint", checkpoint, f"some of {', '.join(POLICIES)}")]
    shown = names() if schedules is None else _listed("schedules", schedules, "names, such as ['zbv']")
    for word, found, least in (("memory", memory, False), ("search", search, True)):
        if found is None and word == "memory":
            continue
        amount = found if isinstance(found, int | float) and not isinstance(found, bool) else math.nan
        if not (0 < amount < math.inf or (least and amount == 0)):
            unit = "seconds, from 0" if least else "the most that a rank may hold, above 0"
            raise ValueError(f"{word} is {unit}; found {found!r}.")
    if cluster is not None and len(cluster.speed) < ranks:
        raise ValueError(f"there are {ranks} ranks, and the cluster has {len(cluster.speed)}.")
    limits = [math.inf if memory is None else float(cast("float", memory))] * ranks
    if cluster is not None:
        limits = [min(both) for both in zip(limits, cluster.memory, strict=False)]
    return Asked(
        ranks,
        tuple(dict.fromkeys(counts)),
        tuple(dict.fromkeys(policies)),
        {name: parse(name) for name in shown},
        cluster,
        tuple(limits),
        float(cast("float", search)),
        *_sharing(replicas, shard, cluster),
    )


def _sharing(replicas: object, shard: Any, cluster: Cluster | None) -> tuple[int, tuple[str, ...]]:
    """How many replicas share parameters out, and by which policies; none where they do not."""
    known = (*GATHERS, WHOLE)
    across = 1 if cluster is None else cluster.replicas
    count = across if replicas is None else whole("replicas", replicas)
    if across > 1 and count != across:
        raise ValueError(f"replicas={count}, and the cluster has {across}; say them once.")
    if shard is None:
        if replicas is not None:
            raise ValueError(f"replicas= share parameters out: say how in shard=, some of {', '.join(known)}.")
        return 1, ("",)
    gathers = checked_gathers(_listed("shard", shard, f"some of {', '.join(known)}"), known)
    if count < 2:
        raise ValueError("shard= needs replicas that share parameters out: say replicas=2, or those of the cluster.")
    return count, gathers


def policy(word: Any) -> str:
    """One of the policies that are tried."""
    if word not in POLICIES:
        raise ValueError(f"checkpoint lists some of {', '.join(POLICIES)}; found {word!r}.")
    return word


def _listed(word: str, given: Any, what: str) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Collection) or not given:
        raise ValueError(f"{word} lists {what}; found {given!r}.")
    return tuple(cast("Collection[Any]", given))


def work_of_costs(given: Said | Mapping[float, Said], asked: Asked, rows: object, stages: object) -> Work:
    """Costs that were said, by the rows of a microbatch."""
    for word, found in (("rows", rows), ("stages", stages)):
        if found is not None:
            whole(word, found, most=math.inf)
    sizes = [1.0 if rows is None else cast("int", rows) / count for count in asked.microbatches]
    if isinstance(given, Mapping):
        said = given
        if rows is None:
            raise ValueError("costs by the rows of a microbatch need rows=, how many the batch has.")
    else:
        said = dict.fromkeys(sizes, given)
        if len(said) > 1:
            raise ValueError(
                f"microbatches of {', '.join(f'{size:g}' for size in said)} rows cost different times: say "
                "{rows: costs} for two sizes or more, or leave rows= out for batches of different size."
            )
    if not said or not all(isinstance(one, int | float) and one > 0 for one in said):
        raise ValueError(f"costs are listed by the rows of a microbatch, above 0; found {list(said)}.")
    shares = {float(size): _share(one, stages is not None) for size, one in said.items()}
    own = [share(1, 1).bytes for share in shares.values()]
    if len(shares) > 1 and any(hasattr(each, "storages") and not isinstance(each, NamedBytes) for each in own):
        raise ValueError("bytes by fpipe.sizes are of microbatches of one size; say {name: bytes} for each.")
    silent = [f"{size:g}" for size, each in zip(shares, own, strict=True) if each is None]
    if 0 < len(silent) < len(own):
        raise ValueError(
            f"costs of several sizes all say bytes, or none do; those of {', '.join(silent)} rows say none."
        )
    curve = CostCurve(shares, "given")
    work = Work(cast("int | None", stages), curve, cast("float | None", rows), asked.cluster, None, asked.replicas)
    known = [work.costs(count, 1)[0] for count in asked.microbatches]
    in_bytes = asked.cluster is not None and min(asked.cluster.memory) < math.inf
    if in_bytes and known[0].bytes is None:
        raise ValueError("a cluster's memory is in bytes: say the bytes of values, Costs(bytes=...).")
    return work


def _share(given: Said, of_stage: bool) -> Share:
    """The costs of an op for each number of parts of a rank."""
    if isinstance(given, Costs):
        return (lambda parts, slices: given) if of_stage else partial(shared, given)
    if not callable(given):
        raise TypeError(
            "what is planned is an fpipe.Model, fpipe.Costs, {rows: costs} or f(parts) -> costs; found "
            f"{type(given).__name__}."
        )
    return lambda parts, slices: given(parts)


def work_of_model(
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    state: Sequence[Any] | None,
    asked: Asked,
    profiled: Collection[int] | None,
    repeats: int,
    flops: float | None,
    progress: Callable[[int, int, str], None],
) -> Work:
    """A model that is profiled at some numbers of microbatches, or estimated there."""
    from fpipe.planning.model_costs import Measured  # torch, which costs that are said do without

    counts = asked.microbatches if profiled is None else _listed("profiled", profiled, "numbers of microbatches")
    odd = next((count for count in counts if type(count) is not int or count < 1), None)
    if odd is not None:
        raise ValueError(f"profiled lists whole numbers of microbatches, at least 1; found {odd!r}.")
    beyond = [count for count in asked.microbatches if not min(counts) <= count <= max(counts)]
    if beyond:
        raise ValueError(
            f"costs at {beyond[0]} microbatches are not between those at {', '.join(map(str, sorted(counts)))}, which "
            "are profiled; add a number beyond it to profiled=."
        )
    measured = Measured(model, params, batch, state, flops)
    costs = measured.costs(counts, repeats, progress)
    shares: dict[float, Share] = {rows: (lambda parts, slices, one=one: one) for rows, one in costs.items()}
    curve = CostCurve(shares, "measured" if flops is None else "estimated")
    return Work(model, curve, measured.rows, asked.cluster, measured, asked.replicas)
