"""Share the parameters of each stage out among replicas: gathered before their use, gradients scattered behind it.

    params[0]  ..  all[0] = REDUCE sum[0,1]      -->      shard[0], params[0] = GATHER shard[0], 0F0 .. all[0] = SCATTER

As in ZeRO and FSDP, a replica keeps a part of each parameter, of its gradient and so of the optimizer's state. When a
copy is gathered, and for which ops, is a policy, and the program says it. F, B, I, W and R stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

from fpipe.limits import whole
from fpipe.order import arrange, held_kinds
from fpipe.program import Input, Op, Output, Program, ProgramError, Value, kind_of, pair, parts_of
from fpipe.transforms._rewrite import Transform, at_data, refuse_freed, refuse_updated, transforming
from fpipe.transforms.communicate import NARROW
from fpipe.transforms.data_parallel import axes_of, data_parallel, nested, reduced, refuse_more

_new = tuple.__new__
Policy = Literal["step", "run", "use"]
GATHERS: tuple[Policy, ...] = get_args(Policy)
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
    one after the other. What is gathered for some uses is dropped after the last of them.

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
        return arrange(_inputs(program), copies.before_uses(ops, _shares(gather), lead), outputs, held | {"GATHER"})

    return transform


def checked_gathers(words: Any) -> tuple[Policy, ...]:
    """The policies in a list of them."""
    listed = isinstance(words, Collection) and not isinstance(words, str)
    each: list[Any] = [*words] if listed else [words]
    odd = next((word for word in each if not listed or word not in GATHERS), None)
    if odd is not None:
        raise ValueError(f"shard lists some of {', '.join(GATHERS)}; found {odd!r}.")
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
        return lambda step, op: (step, *op[:4])
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
        reads = [(value, op.rank) for op in parts_of(program.ops) for value in op.reads if value in self.homes]
        self.away = {value for value, rank in reads if rank not in self.homes[value]}
        self.known: dict[tuple[Value, int, object], Value] = {}
        self.many: defaultdict[tuple[Value, int], int] = defaultdict(int)

    def gathered(self, value: Value, rank: int, copy: Value | None = None) -> Op:
        """The GATHER of some parameters on a rank."""
        shard = value._replace(name="shard")
        return _new(Op, ("GATHER", value.stage, None, None, rank, (shard,), (copy or value,), (), self.how))

    def before_uses(self, ops: Sequence[Op], share: Share, lead: int) -> list[Op]:
        """The ops, each reading its copy, with the GATHER of a copy `lead` ops before its first reader."""
        rows: defaultdict[int, list[int]] = defaultdict(list)  # the positions of timed ops
        made: list[Op] = []
        gathers: defaultdict[int, list[Op]] = defaultdict(list)
        for position, op in enumerate(ops):
            row = rows[op.rank]
            if kind_of(op.kind).time:
                row.append(position)
            new: list[Op] = []
            parts = [self.reading(part, share, len(row) - 1, new) for part in op.parts or (op,)]
            made.append(pair(*parts) if op.parts else parts[0])
            if new:
                gathers[row[max(0, len(row) - 1 - lead)]] += new
        travelling = [self.gathered(value, min(self.homes[value])) for value in self.homes if value in self.away]
        return [*travelling, *(one for at, op in enumerate(made) for one in (*gathers[at], op))]

    def reading(self, op: Op, share: Share, step: int, new: list[Op]) -> Op:
        """An op that reads its copies; `new` takes the GATHERs of those that no op before it reads."""
        named = [value for value in op.reads if value[0] == "params"]
        own = [value for value in named if op.rank in self.homes.get(value, ())]
        if not own:
            return op
        purpose, now = share(step, op), dict[Value, Value]()
        for value in own:
            place = value, op.rank, purpose
            if place not in self.known:
                plain = op.rank == min(self.homes[value]) and value not in self.away
                number = self.many[value, op.rank]
                self.many[value, op.rank] += 1
                at = f"@{op.rank}.{number}" if number else "" if plain else f"@{op.rank}"
                self.known[place] = _new(Value, (*value[:5], at))
                new.append(self.gathered(value, op.rank, self.known[place]))
            now[value] = self.known[place]
        reads = tuple([now.get(value, value) if value[0] == "params" else value for value in op.reads])
        return _new(Op, (*op[:5], reads, *op[6:]))
