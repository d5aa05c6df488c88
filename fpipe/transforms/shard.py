"""Shard the parameters of each stage over replicas: gather them before their use, scatter gradients behind it.

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

from fpipe.limits import check_whole_number
from fpipe.order import arrange, find_sources, fixed_kinds
from fpipe.program import KINDS, Input, Op, Output, Program, ProgramError, Sources, Value, pair, parts_of
from fpipe.transforms._rewrite import (
    Transform,
    as_transform,
    extended_sources,
    place_by_data_of,
    refuse_freed,
    refuse_transfers,
    refuse_updated,
)
from fpipe.transforms.communicate import NARROW
from fpipe.transforms.data_parallel import data_parallel, reduce_nested, reduce_results, refuse_third_axis, replica_axes

_new = tuple.__new__
Policy = Literal["step", "run", "use"]
GATHERS: tuple[Policy, ...] = get_args(Policy)
NEVER = "never"
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
    """Keep parameters, gradients and optimizer state as shards over replicas, each with its share of the rows.

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
    check_whole_number("lead", lead, minimum=0)
    data_parallel(axis)  # refuses an axis that is no name
    compute_options, reduce_options = _cast_options("compute", compute_dtype), _cast_options("reduce", reduce_dtype)

    @as_transform
    def transform(program: Program) -> Program:
        refuse_freed(program)
        refuse_updated(program, "shard")
        if gathers_params(program):
            raise ProgramError("this program is sharded already; shard it once.")
        refuse_transfers(program, "shard")
        axis_options, axes = (("axis", axis),), replica_axes(program)
        if len(axes) > 1:
            refuse_third_axis(axes, axis)
        # 1) Gradients: sums over replicas as data_parallel makes them, along this axis first, then each a SCATTER.
        if axis in axes:
            reduced = program.ops, program.outputs
        else:
            reduced = reduce_nested(program, *axes, axis) if axes else reduce_results(program, axis)
        ops, outputs = place_by_data_of(
            program, *_scatter_gradients(*reduced, (*axis_options, *reduce_options), scatter == "microbatch")
        )
        # 2) Parameters: one GATHER a stage at the start, whose result keeps the name of the parameters, so that no op
        # changes what it reads; or GATHERs before uses, whose copies have names of their own.
        copies, kinds = _GatheredCopies(program, (*axis_options, *compute_options)), fixed_kinds(program)
        if gather == "step":
            gathers = [copies.make_gather(value, min(homes)) for value, homes in copies.homes.items()]
            return arrange(_sharded_inputs(program), [*gathers, *ops], outputs, kinds)
        # Known sources are extended where possible: to find writers anew is a quarter of the work of `arrange`.
        sources = extended_sources(program, program.inputs, ops) or find_sources(program.inputs, ops)
        ops, sources, rows = copies.gather_before_uses(ops, sources, _copy_sharing(gather), lead, kinds)
        return arrange(_sharded_inputs(program), ops, outputs, kinds | {"GATHER"}, sources, rows)

    return transform


def gathers_params(program: Program) -> bool:
    """Whether replicas hold the parameters as shards."""
    return any(op.kind == "GATHER" for op in program.ops)


def checked_policies(policies: Any, allowed: Collection[str] = GATHERS) -> tuple[Any, ...]:
    """Return the distinct policies in an argument, which is one policy or a list."""
    is_list = isinstance(policies, Collection) and not isinstance(policies, str)
    policy_list: list[Any] = [*policies] if is_list else [policies]
    for policy in policy_list:
        if not is_list or policy not in allowed:
            raise ValueError(f"shard lists some of {', '.join(allowed)}; found {policy!r}.")
    return tuple(dict.fromkeys(policy_list))


Options = tuple[tuple[str, str], ...]


def _cast_options(purpose: str, dtype: object) -> Options:
    """Return the option of a cast, with the dtype as text: a program contains no torch object."""
    if dtype is None:
        return ()
    name = str(dtype).removeprefix("torch.")
    if name not in ("float64", *NARROW):
        raise ValueError(f"{purpose}_dtype is a floating dtype, such as torch.bfloat16; found {dtype!r}.")
    return (("cast", name),)


def _scatter_gradients(
    ops: Sequence[Op], outputs: Sequence[Output], options: Options, of_microbatches: bool
) -> tuple[Sequence[Op], Sequence[Output]]:
    """Replace each REDUCE of gradients by a SCATTER, or scatter each microbatch's gradient before the addition."""

    def adds_gradients(op: Op) -> bool:
        return op[0] == "REDUCE" and op.options == options[:1] and op.writes[0].name in ("all", "cut")

    if not of_microbatches:
        return [op._replace(kind="SCATTER", options=options) if adds_gradients(op) else op for op in ops], outputs
    add_by_sum = {op.writes[0]: op for op in ops if op.kind == "ADD"}
    # scatter="microbatch": g[0,0] and g[0,1] are scattered, and their shards added up. So walk down from each reduced
    # sum to the gradients under it, scatter these, and let the ADDs read the shards. The REDUCE above them goes, and
    # whoever read its total reads the sum of shards.
    sum_by_total, cut_by_gradient = dict[Value, Value](), dict[Value, Value]()
    for op in ops:
        # port > 0 is a leaf that several stages use: its gradients are added within a replica first.
        if adds_gradients(op) and not op.writes[0].port:
            pending = [*op.reads]
            while pending:
                value = pending.pop()
                if value in add_by_sum:
                    pending += add_by_sum[value].reads
                else:
                    cut_by_gradient[value] = value._replace(name="cut")
            (total,) = op.reads
            sum_by_total[op.writes[0]] = cut_by_gradient.get(total, total)
    scattered = list[Op]()
    for op in ops:
        if op.kind in ("ADD", "SCALE", "REDUCE"):
            if op.writes[0] in sum_by_total:
                continue
            new_value = cut_by_gradient if op.kind == "ADD" else sum_by_total
            reads = tuple(new_value.get(value, value) for value in op.reads)
            op = op._replace(reads=reads, **({"kind": "SCATTER", "options": options} if adds_gradients(op) else {}))
        scattered.append(op)
    scattered += [Op("SCATTER", *grad[1:4], 0, (grad,), (cut,), (), options) for grad, cut in cut_by_gradient.items()]
    return scattered, [output._replace(value=sum_by_total.get(output.value, output.value)) for output in outputs]


def _sharded_inputs(program: Program) -> tuple[Input, ...]:
    shard_by_params = {
        program_input.value: program_input.value._replace(name="shard")
        for program_input in program.inputs
        if program_input.value.name == "params"
    }
    return tuple(
        program_input._replace(value=shard_by_params.get(program_input.value, program_input.value))
        for program_input in program.inputs
    )


CopySharing = Callable[[int, Op], object]
"""From an op and its step in the rank's main lane to a key; ops of one key read one gathered copy."""


def _copy_sharing(gather: Gather) -> CopySharing | None:
    """Return which ops share a copy under a policy; None if each op reads a copy of its own."""
    if callable(gather):
        return lambda step, op: gather(op)
    if gather == "use":
        return None
    # A run is a sequence of adjacent steps of one stage on one rank; a gap in the steps starts the next run.
    last_step_and_run = dict[tuple[int, int | None], tuple[int, int]]()

    def run(step: int, op: Op) -> object:
        rank_and_stage = op[4], op[1]
        last_step, run_number = last_step_and_run.get(rank_and_stage, (step, 0))
        run_number += step > last_step + 1
        last_step_and_run[rank_and_stage] = step, run_number
        return run_number

    return run


_CopyByKey = dict[object, tuple[Value, int]]


class _GatheredCopies:
    """The copies of parameters that are gathered, each with its name.

    `copies_by_rank`: for each parameter that a rank gathers, the GATHERs to come, and the copies that have one, by the
    key of the ops that share them: each as its value and the position of its GATHER.
    `gathers`: the GATHERs made so far; they stand behind the program's ops, from `first_position` on.
    """

    def __init__(self, program: Program, options: Options) -> None:
        self.options = options
        self.homes = {
            program_input.value: program_input.homes
            for program_input in program.inputs
            if program_input.value.name == "params"
        }
        homes, params_reads = (
            self.homes,
            [(op[4], value) for op in program.ops for value in op[5] if value[0] == "params"],
        )
        self.travelling_values = {value for rank, value in params_reads if value in homes and rank not in homes[value]}
        self.position_by_travelling: dict[Value, int] = {}  # of the GATHERs of copies that travel
        self.gathers, self.first_position = list[Op](), 0
        self.copies_by_rank: defaultdict[int, dict[Value, tuple[Iterator[Op], _CopyByKey]]] = defaultdict(dict)
        for value, ranks in homes.items():
            for rank in ranks:
                self.copies_by_rank[rank][value] = self.successive_gathers(value, rank), {}

    def make_gather(self, value: Value, rank: int) -> Op:
        shard = value._replace(name="shard")
        return Op("GATHER", value.stage, None, None, rank, (shard,), (value,), (), self.options)

    def successive_gathers(self, value: Value, rank: int) -> Iterator[Op]:
        """Yield the GATHERs of one stage's parameters on a rank: params[0], params[0]@1.1, params[0]@1.2, .."""
        name, stage, microbatch, slice_index, port, location = value
        reads, options = self.make_gather(value, rank).reads, self.options
        if rank != min(self.homes[value]) or value in self.travelling_values:
            location = f"@{rank}"
        for copy_number in count(1):
            copy = _new(Value, (name, stage, microbatch, slice_index, port, location))
            yield _new(Op, ("GATHER", stage, None, None, rank, reads, (copy,), (), options))
            location = f"@{rank}.{copy_number}"

    def gather_before_uses(
        self,
        ops: Sequence[Op],
        sources: Sequence[Sources],
        copy_sharing: CopySharing | None,
        lead: int,
        kinds: Collection[str],
    ) -> tuple[list[Op], list[Sources], list[list[int]]]:
        """Let each op read its copy; return the ops with the GATHERs behind them, all sources, and each rank's row.

        A row has the positions of the ops of these `kinds` and of GATHERs, which stand `lead` ops before their first
        reader.
        """
        away = self.travelling_values
        gathers = [self.make_gather(value, min(homes)) for value, homes in self.homes.items() if value in away]
        self.gathers, self.first_position = gathers, len(ops)
        self.position_by_travelling = {gather.writes[0]: position for position, gather in enumerate(gathers, len(ops))}
        # A rank's row is made in slots. Slot k has the positions of what stands right before timed op k: of timed op
        # k-1, and of all between the two. So a GATHER `lead` ops before timed op k is appended to slot k-lead.
        slots_by_rank: defaultdict[int, list[list[int]]] = defaultdict(lambda: [[]])
        timed_kinds = {name for name, kind in KINDS.items() if kind.time}
        for position, gather in enumerate(gathers, len(ops)):
            slots_by_rank[gather.rank][0].append(position)
        new_ops, new_sources = [*ops], [*sources]
        for position, (op, op_sources) in enumerate(zip(ops, sources, strict=True)):
            kind, slots = op[0], slots_by_rank[op[4]]
            if kind in timed_kinds:
                slots.append([])
            if kind in kinds:
                slots[-1].append(position)
            # Parameters are inputs of the program (source -1). Most ops read some; the rest, and SPLIT, read none.
            if -1 in op_sources and kind != "SPLIT":
                step = len(slots) - 2  # the number of the rank's last timed op; -1 before the first
                next_position = len(ops) + len(gathers)  # reading copies adds GATHERs to `self.gathers`
                read_copies = self.read_copies_in_parts if op[7] else self.read_copies
                new_ops[position], new_sources[position] = read_copies(op, op_sources, copy_sharing, step)
                slots[step - lead if step > lead else 0] += range(next_position, len(ops) + len(gathers))
        rows = [list(chain.from_iterable(slots_by_rank[rank])) for rank in range(1 + max(slots_by_rank))]
        return new_ops + gathers, new_sources + [(-1,)] * len(gathers), rows

    def read_copies(
        self, op: Op, sources: Sequence[int], copy_sharing: CopySharing | None, step: int
    ) -> tuple[Op, Sources]:
        """Return an op that reads its copies, and its sources; make the GATHERs of copies that no earlier op reads."""
        # Plain tuples and no _replace: this runs for every op that reads parameters, and took 8 % off the transform.
        kind, stage, microbatch, slice_index, rank, reads, writes, parts, options = op
        copies, new_reads, new_sources = self.copies_by_rank[rank], [*reads], [*sources]
        for read_index, source in enumerate(sources):
            if source == -1:
                value = reads[read_index]
                if value in copies:
                    gathers_to_come, copy_by_key = copies[value]
                    key = copy_sharing(step, op) if copy_sharing else None
                    copy = copy_by_key.get(key)
                    if copy is None:
                        gather = next(gathers_to_come)
                        copy = gather[6][0], self.first_position + len(self.gathers)
                        self.gathers.append(gather)
                        if copy_sharing:
                            copy_by_key[key] = copy
                    new_reads[read_index], new_sources[read_index] = copy
                elif value in self.position_by_travelling:
                    new_sources[read_index] = self.position_by_travelling[value]
        new_op = _new(Op, (kind, stage, microbatch, slice_index, rank, tuple(new_reads), writes, parts, options))
        return new_op, tuple(new_sources)

    def read_copies_in_parts(
        self, op: Op, sources: Sequence[int], copy_sharing: CopySharing | None, step: int
    ) -> tuple[Op, Sources]:
        """Return a PAIR whose parts read their copies, and its sources. Each part has a key, and so may have a copy."""
        source_by_value = dict(zip(op[5], sources, strict=True))
        new_source_by_value = source_by_value.copy()
        new_parts: list[Op] = []
        for part in op[7]:
            part_sources = [source_by_value[value] for value in part[5]]
            new_part, new_part_sources = self.read_copies(part, part_sources, copy_sharing, step)
            new_parts.append(new_part)
            new_source_by_value.update(zip(new_part[5], new_part_sources, strict=True))
        new_pair = pair(*new_parts)
        return new_pair, tuple([new_source_by_value[value] for value in new_pair[5]])


def forwards_per_microbatch(program: Program) -> list[int]:
    """Return how many forwards one microbatch has on each rank (chunks times slices); peaks count them as one.

    A forward counts where its residuals are made: a stage that is recomputed, maybe on another rank, at its R.
    """
    ops = parts_of(program.ops)
    kinds = list(map(itemgetter(0), ops))
    forwards = compress(ops, map("F".__eq__, kinds))
    if "R" in kinds:
        with_residuals = [op for op in ops if op[0] in "FR" and any(value[0] == "res" for value in op[6])]
        forwards = with_residuals or forwards
    forward_counts = [1] * program.ranks
    for (rank, _), forward_count in Counter(map(itemgetter(4, 2), forwards)).items():
        forward_counts[rank] = max(forward_counts[rank], forward_count)
    return forward_counts
