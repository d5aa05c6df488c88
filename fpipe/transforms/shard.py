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
from typing import Any, Literal, get_args

from fpipe.limits import whole
from fpipe.order import arrange, held_kinds, unordered_sources
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
        along, axes = (("axis", axis),), axes_of(program)
        if len(axes) > 1:
            refuse_more(axes, axis)
        if axis in axes:
            reduced_program = program.ops, program.outputs
        else:
            reduced_program = nested(program, *axes, axis) if axes else reduced(program, axis)
        ops, outputs = at_data(program, *_scatter(*reduced_program, (*along, *cast), scatter == "microbatch"))
        copies, held = _Copies(program, (*along, *compute)), held_kinds(program)
        if gather == "step":
            gathers = [copies.gather(value, min(homes)) for value, homes in copies.homes.items()]
            return arrange(_sharded_inputs(program), [*gathers, *ops], outputs, held)
        sources = same_sources(program, program.inputs, ops) or unordered_sources(program.inputs, ops)
        ops, sources, rows = copies.gather_before_uses(ops, sources, _share_of(gather), lead, held)
        return arrange(_sharded_inputs(program), ops, outputs, held | {"GATHER"}, sources, rows)

    return transform


def is_sharded(program: Program) -> bool:
    """Whether replicas share its parameters out."""
    return any(op.kind == "GATHER" for op in program.ops)


def checked_gathers(words: Any, known: Collection[str] = GATHERS) -> tuple[Any, ...]:
    """The policies in a list of them."""
    is_list = isinstance(words, Collection) and not isinstance(words, str)
    listed: list[Any] = [*words] if is_list else [words]
    for word in listed:
        if not is_list or word not in known:
            raise ValueError(f"shard lists some of {', '.join(known)}; found {word!r}.")
    return tuple(dict.fromkeys(listed))


How = tuple[tuple[str, str], ...]


def _cast(word: str, dtype: object) -> How:
    """The words for a cast; a program is data, so dtypes are words in it."""
    if dtype is None:
        return ()
    name = str(dtype).removeprefix("torch.")
    if name not in ("float64", *NARROW):
        raise ValueError(f"{word}_dtype is a floating dtype, such as torch.bfloat16; found {dtype!r}.")
    return (("cast", name),)


def _scatter(
    ops: Sequence[Op], outputs: Sequence[Output], how: How, of_microbatches: bool
) -> tuple[Sequence[Op], Sequence[Output]]:
    """Put a SCATTER in place of each REDUCE of gradients, or behind each microbatch's gradient that it adds up."""

    def adds_gradients(op: Op) -> bool:
        return op[0] == "REDUCE" and op.how == how[:1] and op.writes[0].name in ("all", "cut")

    if not of_microbatches:
        return [op._replace(kind="SCATTER", how=how) if adds_gradients(op) else op for op in ops], outputs
    adds = {op.writes[0]: op for op in ops if op.kind == "ADD"}
    totals, cuts = dict[Value, Value](), dict[Value, Value]()  # by the sum over replicas, and by the gradient
    for op in ops:
        if adds_gradients(op) and not op.writes[0].port:  # what stages share is added up in a replica
            todo = [*op.reads]
            while todo:
                value = todo.pop()
                if value in adds:
                    todo += adds[value].reads
                else:
                    cuts[value] = value._replace(name="cut")
            (total,) = op.reads
            totals[op.writes[0]] = cuts.get(total, total)
    scattered = list[Op]()
    for op in ops:
        if op.kind in ("ADD", "SCALE", "REDUCE"):
            if op.writes[0] in totals:
                continue
            reads = tuple((cuts if op.kind == "ADD" else totals).get(value, value) for value in op.reads)
            op = op._replace(reads=reads, **({"kind": "SCATTER", "how": how} if adds_gradients(op) else {}))
        scattered.append(op)
    scattered += [Op("SCATTER", *value[1:4], 0, (value,), (cut,), (), how) for value, cut in cuts.items()]
    return scattered, [end._replace(value=totals.get(end.value, end.value)) for end in outputs]


def _sharded_inputs(program: Program) -> tuple[Input, ...]:
    """The inputs, shards in place of parameters."""
    shards = {end.value: end.value._replace(name="shard") for end in program.inputs if end.value.name == "params"}
    return tuple(end._replace(value=shards.get(end.value, end.value)) for end in program.inputs)


Share = Callable[[int, Op], object]
"""Which uses share a copy: of an op, and the number of the step of its rank's main lane in which it runs."""


def _share_of(gather: Gather) -> Share | None:
    """The shares of a policy; None if each use has a copy for itself."""
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
    """The copies of parameters that are gathered, each with its name.

    `of_rank`: for the parameters that a rank gathers, the GATHERs to come, and where that for each purpose stands.
    """

    def __init__(self, program: Program, how: How) -> None:
        self.how = how
        self.homes = {end.value: end.homes for end in program.inputs if end.value.name == "params"}
        homes, reads = self.homes, [(op[4], value) for op in program.ops for value in op[5] if value[0] == "params"]
        self.away = {value for rank, value in reads if value in homes and rank not in homes[value]}
        self.travelling: dict[Value, int] = {}  # the GATHERs of copies that travel
        self.of_rank: defaultdict[int, dict[Value, tuple[Iterator[Op], dict[object, int]]]] = defaultdict(dict)
        for value, ranks in homes.items():
            for rank in ranks:
                self.of_rank[rank][value] = self.gathers(value, rank), {}

    def gather(self, value: Value, rank: int) -> Op:
        shard = value._replace(name="shard")
        return Op("GATHER", value.stage, None, None, rank, (shard,), (value,), (), self.how)

    def gathers(self, value: Value, rank: int) -> Iterator[Op]:
        """Make the GATHERs of some parameters on a rank, of one copy after the other."""
        name, stage, microbatch, piece, port, at = value
        reads, how = self.gather(value, rank).reads, self.how
        if rank != min(self.homes[value]) or value in self.away:
            at = f"@{rank}"
        for number in count(1):
            copy = _new(Value, (name, stage, microbatch, piece, port, at))
            yield _new(Op, ("GATHER", stage, None, None, rank, reads, (copy,), (), how))
            at = f"@{rank}.{number}"

    def gather_before_uses(
        self, ops: Sequence[Op], sources: Sequence[Sources], share: Share | None, lead: int, held: Collection[str]
    ) -> tuple[list[Op], list[Sources], list[list[int]]]:
        """Let each op read its copy; return the ops and behind them the GATHERs, all sources, and the rows of `held`
        kinds and GATHERs, `lead` ops before their first reader."""
        travelling = [self.gather(value, min(self.homes[value])) for value in self.homes if value in self.away]
        new_ops, new_sources = [*ops, *travelling], [*sources]
        self.travelling = {op.writes[0]: position for position, op in enumerate(travelling, len(ops))}
        timed = {name for name, kind in KINDS.items() if kind.time}
        # of a rank, what stands between the start of one timed op and that of the next, from before the first
        rows: defaultdict[int, list[list[int]]] = defaultdict(lambda: [[]])
        for position, op in enumerate(travelling, len(ops)):
            rows[op.rank][0].append(position)
        for position, (op, sources_of_op) in enumerate(zip(ops, sources, strict=True)):
            kind, row = op[0], rows[op[4]]
            if kind in timed:
                row.append([])
            if kind in held:
                row[-1].append(position)
            if -1 not in sources_of_op or kind == "SPLIT":
                continue
            step = len(row) - 2
            before = row[step - lead if step > lead else 0]
            if op[7]:
                source_by_value = dict(zip(op[5], sources_of_op, strict=True))
                sources_of_parts = [[source_by_value[value] for value in part[5]] for part in op[7]]
                parts: list[Op] = []
                for part, sources_of_part in zip(op[7], sources_of_parts, strict=True):
                    part, sources_of_part = self.read_copies(part, sources_of_part, share, step, new_ops, before)
                    parts.append(part)
                    source_by_value.update(zip(part[5], sources_of_part, strict=True))
                new_ops[position] = pair(*parts)
                new_sources[position] = tuple(map(source_by_value.__getitem__, new_ops[position][5]))
            else:
                read = self.read_copies(op, sources_of_op, share, step, new_ops, before)
                new_ops[position], new_sources[position] = read
        new_sources += [(-1,)] * (len(new_ops) - len(new_sources))
        return new_ops, new_sources, [list(chain.from_iterable(rows[rank])) for rank in range(1 + max(rows))]

    def read_copies(
        self, op: Op, sources: Sequence[int], share: Share | None, step: int, ops: list[Op], before: list[int]
    ) -> tuple[Op, Sources]:
        """Let an op read its copies; new `ops` gather those that no op before it reads."""
        kind, stage, microbatch, piece, rank, reads, writes, parts, how = op
        copies, new_reads, new_sources = self.of_rank[rank], [*reads], [*sources]
        for place, source in enumerate(sources):
            if source == -1:
                value = reads[place]
                if value in copies:
                    gathers, position_by_share = copies[value]
                    new = len(ops)
                    position = position_by_share.setdefault(share(step, op), new) if share else new
                    if position == new:
                        ops.append(next(gathers))
                        before.append(position)
                    new_reads[place], new_sources[place] = ops[position][6][0], position
                elif value in self.travelling:
                    new_sources[place] = self.travelling[value]
        op = _new(Op, (kind, stage, microbatch, piece, rank, tuple(new_reads), writes, parts, how))
        return op, tuple(new_sources)


def shares(program: Program) -> list[int]:
    """How many forwards one microbatch has on each rank (chunks times slices), which together count 1.

    A forward counts where its residuals are made: a stage that is recomputed, maybe on another rank, at its R.
    """
    ops = parts_of(program.ops)
    kinds = list(map(itemgetter(0), ops))
    forwards = compress(ops, map("F".__eq__, kinds))
    if "R" in kinds:
        with_residuals = [op for op in ops if op[0] in "FR" and any(value[0] == "res" for value in op[6])]
        forwards = with_residuals or forwards
    share = [1] * program.ranks
    for (rank, _), stages in Counter(map(itemgetter(4, 2), forwards)).items():
        share[rank] = max(share[rank], stages)
    return share
