"""Share the parameters of each stage out among replicas: gathered before their use, gradients scattered behind it.

    params[0]  ..  all[0] = REDUCE sum[0,1]      -->      shard[0], params[0] = GATHER shard[0], 0F0 .. all[0] = SCATTER

As in ZeRO and FSDP, a replica keeps a part of each parameter, of its gradient and so of the optimizer's state. When a
copy is gathered, and for which ops, is a policy, and the program says it. F, B, I, W and R stay as they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, compress, count
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

from fpipe.limits import whole
from fpipe.order import arrange, held_kinds, sources_anyhow
from fpipe.program import KINDS, Input, Op, Output, Program, ProgramError, Sources, Value, pair, parts_of
from fpipe.transforms._rewrite import (
    Transform,
    at_data,
    refuse_freed,
    refuse_sent,
    refuse_updated,
    same_sources,
    transforming,
)
from fpipe.transforms.communicate import NARROW
from fpipe.transforms.data_parallel import axes_of, data_parallel, nested, reduced, refuse_more

_new = tuple.__new__
Policy = Literal["step", "run", "use"]
GATHERS: tuple[Policy, ...] = get_args(Policy)
WHOLE = "never"
"""The policy of replicas that keep all parameters, those of `data_parallel`: a plan compares it with the others."""
Gather = Policy | Callable[[Op], object]


def shard(
    axis: str = "dp",
    *,
    gather: Gather = "step",
    lead: int = 1,
    scatter: Literal["step", "microbatch"] = "step",
    compute_dtype: object = None,
    reduce_dtype: object = None,
) -> Transform:
    """Keep parameters, gradients and optimizer state as shards over replicas, each of which has rows of its own.

    A step takes a stage's parameters as DTensors placed `Shard(0)` along the axis, which `fpipe.shard_params` makes,
    and its gradients come so. The unit that is gathered is the stage: with several stages on a rank these are gathered
    one after the other. What is gathered for some uses is dropped after the last of them, and a leaf that none of them
    reads is not sent: a linear's W reads no weight.

    Args:
        axis: the dimension of the mesh whose processes are replicas; `build(runtime="distributed", mesh=)` takes it.
            The other runtimes run one replica, whose shard is the whole.
        gather: when a copy is gathered: once in a "step" (as ZeRO-2 does), for each "run" of ops of one stage on a
            rank, or for each "use" (as ZeRO-3 does); or `f(op)`, and ops for which f gives the same share a copy. Uses
            on a rank where a stage is not at home share one copy, which travels.
        lead: how many ops earlier than just before its first reader a GATHER starts, so that it runs beside them; not
            of "step", whose copies are gathered as soon as the step begins.
        scatter: when gradients are added up over replicas: once in a "step", or of each "microbatch", so that no sum of
            whole gradients is held, but for those of leaves that stages share.
        compute_dtype: a floating dtype that parameters are cast to before they are gathered, such as `torch.bfloat16`:
            stages compute in it, and gradients over microbatches are added in it. Floating inputs are the caller's.
        reduce_dtype: the dtype in which gradients are added up over replicas; by default that in which they come. They
            end in the dtype of their parameters, and so does the optimizer's state.

    Returns:
        A transform, behind `merge`, in place of `data_parallel`; behind `data_parallel(axis)` it is the same. Together
        with `data_parallel` along another axis, in any order, gradients are scattered along this axis, and those parts
        added up along the other (HSDP). With gather="step" it may stand before or after a schedule; the others look at
        the order of ops, and come after it.

    Raises:
        ValueError: an axis that is no name, another policy, a lead that is no such number, or another dtype.
        ProgramError: the program is not split and merged, has its transfers or frees already, is sharded already, or
            has replicas along two other axes.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge(outputs=False))(fpipe.program(2))
    >>> sharded = fpipe.shard()(program)
    >>> print(*(op for op in sharded.ops if op.kind in ("GATHER", "SCATTER")), sep="\\n")
    params[0] = GATHER[0] shard[0] {axis='dp'} @ 0
    params[1] = GATHER[1] shard[1] {axis='dp'} @ 1
    all[1] = SCATTER[1] sum[1,1] {axis='dp'} @ 1
    all[0] = SCATTER[0] sum[0,1] {axis='dp'} @ 0
    >>> each = fpipe.shard(gather="use", lead=0)(program)
    >>> [cell for cell in each.table(comms=True)[1] if "SPLIT" not in cell][:4]
    ['GATHER(params[1])', '1F0', 'GATHER(params[1]@1.1)', '1F1']
    """
    if gather not in GATHERS and not callable(gather):
        raise ValueError(f"gather is 'step', 'run', 'use' or f(op), found {gather!r}.")
    if scatter not in ("step", "microbatch"):
        raise ValueError(f"scatter is 'step' or 'microbatch', found {scatter!r}.")
    whole("lead", lead, least=0)
    data_parallel(axis)  # refuses an axis that is no name
    compute, cast = _cast("compute", compute_dtype), _cast("reduce", reduce_dtype)

    @transforming
    def transform(program: Program) -> Program:
        refuse_freed(program)
        refuse_updated(program, "shard")
        if is_sharded(program):
            raise ProgramError("this program is sharded already; shard it once.")
        refuse_sent(program, "shard")
        along, known = (("axis", axis),), axes_of(program)
        if len(known) > 1:
            refuse_more(known, axis)
        if axis in known:
            added = program.ops, program.outputs
        else:
            added = nested(program, *known, axis) if known else reduced(program, axis)
        ops, outputs = at_data(program, *_scattered(*added, (*along, *cast), scatter == "microbatch"))
        copies, held = _Copies(program, (*along, *compute)), held_kinds(program)
        if gather == "step":
            first = [copies.gathered(value, min(homes)) for value, homes in copies.homes.items()]
            return arrange(_inputs(program), [*first, *ops], outputs, held)
        known = same_sources(program, program.inputs, ops) or sources_anyhow(program.inputs, ops)
        made, sources, rows = copies.before_uses(ops, known, _shares(gather), lead, held)
        return arrange(_inputs(program), made, outputs, held | {"GATHER"}, sources, rows)

    return transform


def is_sharded(program: Program) -> bool:
    """Whether replicas share its parameters out."""
    return any(op.kind == "GATHER" for op in program.ops)


def checked_gathers(words: Any, known: Collection[str] = GATHERS) -> tuple[Any, ...]:
    """The policies in a list of them."""
    listed = isinstance(words, Collection) and not isinstance(words, str)
    each: list[Any] = [*words] if listed else [words]
    odd = next((word for word in each if not listed or word not in known), None)
    if odd is not None:
        raise ValueError(f"shard lists some of {', '.join(known)}; found {odd!r}.")
    return tuple(dict.fromkeys(each))


How = tuple[tuple[str, str], ...]


def _cast(word: str, dtype: object) -> How:
    """The words for a cast; a program is data, so dtypes are words in it."""
    if dtype is None:
        return ()
    name = str(dtype).removeprefix("torch.")
    if name not in ("float64", *NARROW):
        raise ValueError(f"{word}_dtype is a floating dtype, such as torch.bfloat16; found {dtype!r}.")
    return (("cast", name),)


def _scattered(
    ops: Sequence[Op], outputs: Sequence[Output], how: How, each: bool
) -> tuple[Sequence[Op], Sequence[Output]]:
    """Ops and results with a SCATTER in place of each REDUCE of gradients, or one behind `each` of what it adds up."""

    def of_gradients(op: Op) -> bool:
        return op[0] == "REDUCE" and op.how == how[:1] and op.writes[0].name in ("all", "cut")

    if not each:
        return [op._replace(kind="SCATTER", how=how) if of_gradients(op) else op for op in ops], outputs
    adds = {op.writes[0]: op for op in ops if op.kind == "ADD"}
    now, cuts = dict[Value, Value](), dict[Value, Value]()
    for op in ops:
        if of_gradients(op) and not op.writes[0].port:  # what stages share is added up in a replica
            todo = [*op.reads]
            while todo:
                value = todo.pop()
                if value in adds:
                    todo += adds[value].reads
                else:
                    cuts[value] = value._replace(name="cut")
            (total,) = op.reads
            now[op.writes[0]] = cuts.get(total, total)
    made = list[Op]()
    for op in ops:
        if op.kind in ("ADD", "SCALE", "REDUCE"):
            if op.writes[0] in now:
                continue
            reads = tuple((cuts if op.kind == "ADD" else now).get(value, value) for value in op.reads)
            op = op._replace(reads=reads, **({"kind": "SCATTER", "how": how} if of_gradients(op) else {}))
        made.append(op)
    made += [Op("SCATTER", *value[1:4], 0, (value,), (cut,), (), how) for value, cut in cuts.items()]
    return made, [end._replace(value=now.get(end.value, end.value)) for end in outputs]


def _inputs(program: Program) -> tuple[Input, ...]:
    """The inputs, shards in place of parameters."""
    shards = {end.value: end.value._replace(name="shard") for end in program.inputs if end.value.name == "params"}
    return tuple(end._replace(value=shards.get(end.value, end.value)) for end in program.inputs)


Share = Callable[[int, Op], object]
"""Which uses share a copy: of an op, and the number of the step of its rank's main lane in which it runs."""


def _shares(gather: Gather) -> Share | None:
    """The shares of a policy; None if each use has a copy of its own."""
    if callable(gather):
        return lambda step, op: gather(op)
    if gather == "use":
        return None
    last = dict[tuple[int, int | None], tuple[int, int]]()  # of a stage on a rank, its last step and its run

    def run(step: int, op: Op) -> object:
        place = op[4], op[1]
        before, number = last.get(place, (step, 0))
        number += step > before + 1
        last[place] = step, number
        return number

    return run


class _Copies:
    """The copies of parameters that are gathered, each with a name of its own."""

    def __init__(self, program: Program, how: How) -> None:
        self.how = how
        self.homes = {end.value: end.homes for end in program.inputs if end.value.name == "params"}
        at, reads = self.homes, [(op[4], value) for op in program.ops for value in op[5] if value[0] == "params"]
        self.away = {value for rank, value in reads if value in at and rank not in at[value]}
        self.own: defaultdict[int, dict[Value, _OwnCopies]] = defaultdict(dict)
        for value, homes in self.homes.items():
            for rank in homes:
                self.own[rank][value] = _OwnCopies(self.gathers(value, rank), {})

    def gathered(self, value: Value, rank: int) -> Op:
        """The GATHER of some parameters on a rank."""
        shard = value._replace(name="shard")
        return Op("GATHER", value.stage, None, None, rank, (shard,), (value,), (), self.how)

    def gathers(self, value: Value, rank: int) -> Iterator[Op]:
        """The GATHERs of some parameters on a rank, of one copy after the other."""
        name, stage, microbatch, piece, port, at = value
        reads, how = self.gathered(value, rank).reads, self.how
        if rank != min(self.homes[value]) or value in self.away:
            at = f"@{rank}"
        for number in count(1):
            copy = _new(Value, (name, stage, microbatch, piece, port, at))
            yield _new(Op, ("GATHER", stage, None, None, rank, reads, (copy,), (), how))
            at = f"@{rank}.{number}"

    def before_uses(
        self, ops: Sequence[Op], sources: Sequence[Sources], share: Share | None, lead: int, held: Collection[str]
    ) -> tuple[list[Op], list[Sources], list[list[int]]]:
        """The ops, each reading its copy, and behind them the GATHERs; all sources; and the rows of `held` kinds and
        GATHERs, `lead` ops before their first reader."""
        travelling = [self.gathered(value, min(self.homes[value])) for value in self.homes if value in self.away]
        now, known = [*ops, *travelling], [*sources]
        self.travelling = {op.writes[0]: len(ops) + number for number, op in enumerate(travelling)}
        timed = {name for name, kind in KINDS.items() if kind.time}
        # of a rank, what stands between the start of one timed op and that of the next, from before the first
        rows: defaultdict[int, list[list[int]]] = defaultdict(lambda: [[]])
        for position, op in enumerate(travelling, len(ops)):
            rows[op.rank][0].append(position)
        for position, (op, found) in enumerate(zip(ops, sources, strict=True)):
            kind, row = op[0], rows[op[4]]
            if kind in timed:
                row.append([])
            if kind in held:
                row[-1].append(position)
            if -1 not in found or kind == "SPLIT":
                continue
            step = len(row) - 2
            before = row[step - lead if step > lead else 0]
            if op[7]:
                of = dict(zip(op[5], found, strict=True))
                parts = [
                    self.reading(part, [of[value] for value in part[5]], share, step, now, before) for part in op[7]
                ]
                for part, found in parts:
                    of.update(zip(part[5], found, strict=True))
                now[position] = made = pair(*[part for part, _ in parts])
                known[position] = tuple(map(of.__getitem__, made[5]))
            else:
                now[position], known[position] = self.reading(op, found, share, step, now, before)
        known += [(-1,)] * (len(now) - len(known))
        return now, known, [list(chain.from_iterable(rows[rank])) for rank in range(1 + max(rows))]

    def reading(
        self, op: Op, sources: Sequence[int], share: Share | None, step: int, ops: list[Op], before: list[int]
    ) -> tuple[Op, Sources]:
        """An op that reads its copies, and its sources; new `ops` gather the copies that no op before it reads."""
        kind, stage, microbatch, piece, rank, reads, writes, parts, how = op
        own, now, found = self.own[rank], [*reads], [*sources]
        for place, source in enumerate(sources):
            if source == -1:
                value = reads[place]
                if value in own:
                    gathers, known = own[value]
                    new = len(ops)
                    at = known.setdefault(share(step, op), new) if share else new
                    if at == new:
                        ops.append(next(gathers))
                        before.append(at)
                    now[place], found[place] = ops[at][6][0], at
                elif value in self.travelling:
                    found[place] = self.travelling[value]
        return _new(Op, (kind, stage, microbatch, piece, rank, tuple(now), writes, parts, how)), tuple(found)


class _OwnCopies(NamedTuple):
    """The copies of some parameters that one rank gathers: GATHERs to come, and where that for each purpose is."""

    gathers: Iterator[Op]
    known: dict[object, int]


def shares(program: Program) -> list[int]:
    """How many forwards one microbatch has on each rank (chunks times slices), which together count 1.

    A forward counts where its residuals are made: a stage that is recomputed, maybe on another rank, at its R.
    """
    ops = parts_of(program.ops)
    kinds = list(map(itemgetter(0), ops))
    forwards = compress(ops, map("F".__eq__, kinds))
    if "R" in kinds:
        made = [op for op in ops if op[0] in "FR" and any(value[0] == "res" for value in op[6])]
        forwards = made or forwards
    share = [1] * program.ranks
    for (rank, _), stages in Counter(map(itemgetter(4, 2), forwards)).items():
        share[rank] = max(share[rank], stages)
    return share
