"""Share the parameters of each stage out among replicas: gathered before their use, gradients scattered behind it.

    params[0]  ..  all[0] = REDUCE sum[0,1]      -->      shard[0], params[0] = GATHER shard[0], 0F0 .. all[0] = SCATTER

As in ZeRO and FSDP, a replica keeps a part of each parameter, of its gradient and so of the optimizer's state. When a
copy is gathered, and for which ops, is a policy, and the program says it. F, B, I, W and R stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from fpipe.limits import whole
from fpipe.order import arrange, held_kinds, sources_anyhow
from fpipe.program import KINDS, Input, Op, Output, Program, ProgramError, Sources, Value, pair
from fpipe.transforms._rewrite import Transform, at_data, refuse_freed, refuse_updated, same_sources, transforming
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
        odd = next((op for op in program.ops if op.kind in ("SEND", "RECV", "GATHER", "SCATTER")), None)
        if odd is not None:
            is_sharded = odd.kind in ("GATHER", "SCATTER")
            raise ProgramError(
                "this program is sharded already; shard it once."
                if is_sharded
                else "this program has its transfers already; put fpipe.shard() before fpipe.communicate()."
            )
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
        return op.kind == "REDUCE" and op.how == how[:1] and op.writes[0].name in ("all", "cut")

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


def _shares(gather: Gather) -> Share:
    if callable(gather):
        return lambda step, op: gather(op)
    if gather == "use":
        return lambda step, op: object()
    last = dict[tuple[int, int | None], tuple[int, int]]()  # of a stage on a rank, its last step and its run

    def run(step: int, op: Op) -> object:
        before, number = last.get((op.rank, op.stage), (step, 0))
        last[op.rank, op.stage] = step, number + (step > before + 1)
        return last[op.rank, op.stage][1]

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
                plain = rank == min(homes) and value not in self.away
                gather = self.gathered(value, rank)[:6]
                self.own[rank][value] = _OwnCopies(gather, value[:5], "" if plain else f"@{rank}", {})

    def gathered(self, value: Value, rank: int) -> Op:
        """The GATHER of some parameters on a rank."""
        shard = value._replace(name="shard")
        return Op("GATHER", value.stage, None, None, rank, (shard,), (value,), (), self.how)

    def before_uses(
        self, ops: Sequence[Op], sources: Sequence[Sources], share: Share, lead: int, held: Collection[str]
    ) -> tuple[list[Op], list[Sources], list[list[int]]]:
        """The ops, each reading its copy, and behind them the GATHERs; the sources of all; and the rows of `held` kinds
        and GATHERs, that of a copy `lead` ops before its first reader."""
        travelling = [self.gathered(value, min(self.homes[value])) for value in self.homes if value in self.away]
        now, known, first = [*ops, *travelling], [*sources], len(ops)
        self.at = {op.writes[0]: first + number for number, op in enumerate(travelling)}
        steps: defaultdict[int, list[int]] = defaultdict(list)  # of a rank, the positions of timed ops
        before: defaultdict[int, list[int]] = defaultdict(list)  # of an op, those of GATHERs just before it
        timed = {name for name, kind in KINDS.items() if kind.time}
        for position, op in enumerate(ops):
            row = steps[op[4]]
            if op[0] in timed:
                row.append(position)
            if -1 not in known[position] or op[0] == "SPLIT":
                continue
            count, step = len(now), len(row) - 1
            if op[7]:
                of = dict(zip(op[5], known[position], strict=True))
                parts = [self.reading(part, map(of.__getitem__, part[5]), share, step, now) for part in op[7]]
                for part, found in parts:
                    of.update(zip(part[5], found, strict=True))
                now[position] = made = pair(*[part for part, _ in parts])
                known[position] = tuple(map(of.__getitem__, made[5]))
            else:
                now[position], known[position] = self.reading(op, known[position], share, step, now)
            for gather in range(count, len(now)):
                before[row[max(0, step - lead)]].append(gather)
        known += [(-1,)] * (len(now) - len(known))
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for position in range(first, first + len(travelling)):
            rows[now[position].rank].append(position)
        for position, op in enumerate(ops):
            if position in before:
                rows[op[4]] += before[position]
            if op[0] in held:
                rows[op[4]].append(position)
        return now, known, [rows[rank] for rank in range(1 + max(rows))]

    def reading(self, op: Op, sources: Iterable[int], share: Share, step: int, ops: list[Op]) -> tuple[Op, Sources]:
        """An op that reads its copies, and its sources; new `ops` gather the copies that no op before it reads."""
        rank, reads, found = op[4], op[5], [*sources]
        own = self.own[rank]
        for place, value in enumerate(reads):
            if value[0] == "params":
                copies, purpose = own.get(value), share(step, op)
                if copies is None:
                    found[place] = self.at.get(value, found[place])
                    continue
                gather, start, end, known = copies
                copy = known.get(purpose)
                if copy is None:
                    value = _new(Value, (*start, f"@{rank}.{len(known)}" if known else end))
                    known[purpose] = copy = value, len(ops)
                    ops.append(_new(Op, (*gather, (value,), (), self.how)))
                reads, found[place] = (*reads[:place], copy[0], *reads[place + 1 :]), copy[1]
        return _new(Op, (*op[:5], reads, *op[6:])), tuple(found)


class _OwnCopies(NamedTuple):
    """The copies of some parameters that one rank gathers: the start of a GATHER, the start of their names, the end of
    the first one, and those for each purpose, with the position of its GATHER."""

    gather: tuple[Any, ...]
    start: tuple[Any, ...]
    end: str
    known: dict[object, tuple[Value, int]]
