"""Check that a list of ops is a program; an error names the op at fault, its place, and the remedy.

The rules are the four of the grammar in program.py. Every program passes them where it enters: built from parts, parsed
from text, or made from a table (whose own mistakes, an op that stands twice or a missing rank, `from_table` names).

In all messages of the package ranks, stages, microbatches, steps and cells of a program count from 0, lines and columns
of a text from 1, as editors count them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import chain
from operator import itemgetter

from fpipe.limits import parse_expression, shortened
from fpipe.order import refuse_state_order
from fpipe.program import (
    ENTRY_RULES,
    Op,
    Program,
    ProgramError,
    Value,
    building,
    is_exchange,
    kind_of,
    memory_of,
    pair,
    parts_of,
    require_program,
)
from fpipe.wording import REASON_UNREAD, describe_value, error_at, fill_in, remedy_for


def check(program: Program) -> None:
    """Raise `ProgramError` for a program that breaks a rule of the language.

    Raises:
        ProgramError: a value written twice, read before or without being written, or never read; a transfer that does
            not land once where it was sent; a read after FREE; parts of a PAIR that read each other; a missing rank.

    >>> import fpipe
    >>> fpipe.check(fpipe.program(2))
    >>> text = str(fpipe.program(2)).splitlines()
    >>> fpipe.Program.parse("\\n".join(line for line in text if "= F[0,0]" not in line))
    Traceback (most recent call last):
    fpipe.ops.ProgramError: rank 0, step 0: 1F0 reads y[0,0] (the output of 0F0), which nothing writes.
      rank 0 | [1F0] 1B0 0B0
    Add 0F0.
    """
    program = require_program(program)
    with building():
        kinds = set(map(itemgetter(0), program.ops))
        for kind in kinds:
            kind_of(kind)
        if "PAIR" in kinds:
            for op in program.ops:
                if op.kind == "PAIR":
                    pair(*op.parts)
        refuse_state_order(program.inputs, program.ops)
        # Each check may rely on those before it: a writer is unique once single writes are checked, and stands before
        # its readers once the order is.
        all_values = _check_single_writes(program)
        _check_order(program, all_values)
        _check_all_read(program, all_values)
        if kinds & {"SEND", "RECV"}:
            _check_transfers(program)
        if "FREE" in kinds:
            _check_frees(program)
        check_ranks(program)


def check_kinds(program: Program) -> None:
    """Check each op's reads and writes against its kind, stage, microbatch and slice.

    Rewrites preserve this, so it is checked only where a program enters.

    Raises:
        ProgramError: a backward of another's residuals, a SEND that sends nothing, SPLITs that disagree on how many
            they are, results that name one thing twice.
    """
    for position, op in enumerate(program.ops):
        for part in op.parts or (op,):
            mistake = _find_mistake(part, op)
            if mistake:
                raise error_at(program, position, f"{part.cell} {mistake}.", f"    {op}")
    # Indices before SPLITs: the number of slices, which SPLITs are compared with, is a count of indices.
    _check_indices(program)
    _check_splits(program)
    _check_versions(program)
    homes_by_name: defaultdict[Value, set[int]] = defaultdict(set)
    freed = {value for op in program.ops if op.kind == "FREE" for value in op.reads}
    for output in program.outputs:
        if homes_by_name[output.name] & {*output.homes}:
            raise ProgramError(f"the output {output.name} stands twice; a result has one value on each of its homes.")
        homes_by_name[output.name].update(output.homes)
        if output.name.name == "grads" and output.name.stage != output.value.stage:
            raise ProgramError(f"the output {output} gives stage {output.name.stage} the gradient of another.")
        if ">" in output.value.location.rpartition("@")[2]:
            raise ProgramError(f"the output {output} is in flight; name the copy that its RECV writes.")
        if output.value in freed:
            raise ProgramError(f"the output {output} is freed before it is handed back.")


def _check_splits(program: Program) -> None:
    """Check that all SPLITs cut the batch alike, into as many parts as each stage has SPLITs."""
    for op in program.ops:
        options = dict(op.options)
        slice_counts = {options.get("slices", 1), len(options.get("sizes", range(program.slices)))}
        if op.kind in ("SPLIT", "MERGE") and slice_counts != {program.slices}:
            raise ProgramError(f"{op.cell} says {options}, but the program has {program.slices} slices:\n    {op}")
    splits = [(position, op, dict(op.options)) for position, op in enumerate(program.ops) if op.kind == "SPLIT"]
    counts = Counter((op.stage, op.slice, op.reads[0].port) for _, op, _ in splits)
    for position, op, options in splits:
        index, count = options.get("index"), counts[op.stage, op.slice, op.reads[0].port]
        is_alike = {**splits[0][2], "index": index} == options
        if not is_alike or options.get("count") != count or index not in range(count):
            raise error_at(
                program,
                position,
                f"{op.cell} takes part {index} of {options.get('count')}, but stage {op.stage} has {count} SPLITs: "
                f"all of them say count={count} and index=0..{count - 1}, and cut alike.",
                f"    {op}\nfpipe.split({count}) writes them.",
            )


def _check_versions(program: Program) -> None:
    """Check that the backward of a microbatch reads the version of parameters that its forward read."""
    # F, R, B, I and W of one stage and microbatch share a key; whichever comes first fixes the version.
    first_reads: dict[tuple[object, ...], tuple[Op, Value]] = {}
    for position, op in enumerate(program.ops):
        for part in op.parts or (op,):
            for value in part.reads if part.kind in _STAGE_KINDS else ():
                if value.name != "params":
                    continue
                reader, version = first_reads.setdefault((part[1:4], value.stage, value.port), (part, value))
                if version.microbatch != value.microbatch:
                    versions = f"{part.cell} reads {describe_value(value)}, {reader.cell} {describe_value(version)}"
                    rule = "a stage computes a microbatch with one version of its parameters."
                    raise error_at(program, position, f"{versions}: {rule}")


_STAGE_KINDS = frozenset("FRBIW")
_READS_OF_KIND = {"B": {"res", "w"}, "I": {"res", "w"}, "W": {"wres"}, "F": {"x", "t"}, "R": {"x", "t"}}
_REPLICA_KINDS = frozenset(("REDUCE", "GATHER", "SCATTER"))
_ONE_TO_ONE_KINDS = _REPLICA_KINDS | {"SEND", "RECV", "OFFLOAD", "LOAD"}
_KINDS_WITH_OPTIONS = _REPLICA_KINDS | {"SPLIT", "MERGE", "SEND", *"FRBIW"}
_OPTION_TYPES: dict[str, type] = {
    **dict.fromkeys(("index", "count", "size", "slices", "dim"), int),
    **dict.fromkeys(("spec", "sequence", "aux", "axis", "cast", "exchange"), str),
    **dict.fromkeys(("saved", "sizes"), tuple),
}
_REQUIRED_READ = {"B": "res", "I": "res", "W": "wres"}


@lru_cache
def _find_spec_mistake(text: str) -> str | None:
    try:
        parse_expression(text)
    except ValueError as error:
        return f"has a spec: {str(error).removesuffix('.')}"
    return None


def _find_mistake(op: Op, whole_op: Op) -> str | None:
    """Describe the mistake in an op, which may be a part of the PAIR `whole_op`; None if there is none."""
    # A text may say anything in {..}; a wrong type would otherwise fail deep inside a reading.
    # Kinds that users have registered may have any options.
    for option, value in op.options if op.kind in _KINDS_WITH_OPTIONS else ():
        if option in _OPTION_TYPES and type(value) is not _OPTION_TYPES[option]:
            return f"says {option}={value!r}, where {_OPTION_TYPES[option].__name__} is wanted"
        if option == "spec" and (mistake := _find_spec_mistake(value)):
            return mistake
    if is_exchange(op) and not (op.kind in _STAGE_KINDS and len(op.options) > 1 and op.options[1][0] == "axis"):
        return "is no collective of a stage: F, R, B, I or W that says {exchange='...', axis='...'}"
    if op.rank != whole_op.rank:
        return f"is on rank {op.rank} inside a PAIR on rank {whole_op.rank}"
    if op.kind in _READS_OF_KIND:
        return _find_stage_mistake(op)
    return _find_move_mistake(op) if op.kind in _ONE_TO_ONE_KINDS else None


def _find_stage_mistake(op: Op) -> str | None:
    if op.stage is None or op.microbatch is None:
        return "names no stage and microbatch"
    for value in op.reads:
        if value.name in _READS_OF_KIND[op.kind] and value[1:4] != op[1:4]:
            return f"reads {describe_value(value)}, which is not its own"
    required_reads = [_REQUIRED_READ[op.kind]] if op.kind in _REQUIRED_READ else []
    for name in (*required_reads, "params"):
        if all(value.name != name for value in op.reads):
            return f"reads no {name}"
    for value in op.writes:
        if value[1:4] != op[1:4] and value.name not in ("carry", "dcarry"):
            return f"writes {describe_value(value)}, which is not its own"
    return None


def _find_move_mistake(op: Op) -> str | None:
    """Describe the mistake in an op that reads one value and writes one: a move, or a collective over replicas."""
    if len(op.reads) != 1 or len(op.writes) != 1:
        return "does not read one value and write one"
    (read_value,), (written_value,) = op.reads, op.writes
    if op.kind in _REPLICA_KINDS:
        if not dict(op.options).get("axis"):
            return "says no axis of replicas: {axis='...'}"
        names = read_value.name, written_value.name
        if op.kind == "GATHER" and (names != ("shard", "params") or read_value.stage != written_value.stage):
            return "does not make a stage's params from its shard"
        return "writes another stage's" if read_value.stage != written_value.stage else None
    if read_value[:5] != written_value[:5]:
        return "moves one value and writes another"
    if op.kind == "SEND" and ">" not in written_value.location:
        return "does not read a value and write it in flight"
    if op.kind == "SEND" and written_value.location.rpartition(">")[2].partition(".")[0] == str(op.rank):
        return "sends to its own rank"
    if op.kind == "RECV" and (">" not in read_value.location or "@" not in written_value.location):
        return "does not read what is in flight"
    if op.kind in ("OFFLOAD", "LOAD") and (memory_of(written_value, op.rank) == op.rank) != (op.kind == "LOAD"):
        return f"moves {read_value} {'out of' if op.kind == 'LOAD' else 'into'} the memory of its own rank"
    return None


ENTRY_RULES.extend((check, check_kinds))


def _check_single_writes(program: Program) -> set[Value]:
    """Check that each value has one writer; return all values."""
    # Nearly every program is right, so count first: no value is repeated if the set is as large as all lists together.
    # Only a wrong program pays for the search of the culprit.
    writes = list(map(itemgetter(6), program.ops))
    inputs = {program_input.value for program_input in program.inputs}
    all_values = inputs.union(chain.from_iterable(writes))
    if len(all_values) == len(program.inputs) + sum(map(len, writes)):
        return all_values
    writers: dict[Value, Op] = {}
    for position, op in enumerate(program.ops):
        for value in op.writes:
            if value in inputs or value in writers:
                first_writer = "is an input" if value in inputs else f"{writers[value].cell} writes already"
                duplicate = " The same op stands twice." if writers.get(value) == op else ""
                written = f"{op.cell} writes {describe_value(value)}, which {first_writer}"
                sentence = f"{written}; a value is written once.{duplicate}"
                remedy = "Leave one of them out (a stage's backward is B, or I and W, never both)."
                raise error_at(program, position, sentence, remedy)
            writers[value] = op
    counts = Counter(program_input.value for program_input in program.inputs)
    raise ProgramError(f"{next(v for v, n in counts.items() if n > 1)} is handed in twice; list each input once.")


def _check_order(program: Program, all_values: set[Value]) -> None:
    # A rewrite permutes the sources of a program together with its ops, so their order is checked too.
    # NOWHERE is larger than any position, so this finds reads that nothing writes as well.
    late_reads = (
        (reader, read_index)
        for reader, sources in enumerate(program.sources)
        for read_index, source in enumerate(sources)
        if source >= reader
    )
    position, read_index = next(late_reads, (-1, -1))
    if position < 0:
        for output in program.outputs:
            if output[1] not in all_values:
                remedy = remedy_for(output.value, "leave the output out")
                subject = f"the output {output.name} is {describe_value(output.value)}"
                raise ProgramError(f"{subject}, which nothing writes. {remedy}")
        return
    op = program.ops[position]
    value = op.reads[read_index]
    subject = f"{op.cell} reads {describe_value(value)}, which"
    if value not in program.writer:
        raise error_at(program, position, f"{subject} nothing writes.", remedy_for(value, "name it as an input"))
    writer = program.ops[program.writer[value]]
    if writer is op:
        raise error_at(program, position, f"{subject} it writes itself.", "An op reads only what others wrote before.")
    where = "on the same rank" if writer.rank == op.rank else f"on rank {writer.rank}"
    remedy = f"Put {writer.cell} before {op.cell}, or start from fpipe.schedules.one_f_one_b(ranks={program.ranks})."
    raise error_at(program, position, f"{subject} {writer.cell} writes later {where}.", remedy)


def _check_all_read(program: Program, all_values: set[Value]) -> None:
    # Changed in place: `all_values` is read no more, and a second set of all values would take twice the time.
    unread_values = all_values
    unread_values.difference_update(chain.from_iterable(map(itemgetter(5), program.ops)))
    unread_values.difference_update([end[1] for end in program.outputs], [end[0] for end in program.inputs])
    if not unread_values:
        return
    position = min(program.writer[value] for value in unread_values)
    op = program.ops[position]
    value = next(value for value in op.writes if value in unread_values)
    if op.kind == "SEND":
        remedy = "Add the RECV, or use fpipe.communicate()."
        raise error_at(program, position, f"{op.cell} has no RECV: nobody reads {value}.", remedy)
    reason = fill_in(REASON_UNREAD.get(value.name, "drop it, or name it as an output"), value)
    sentence = f"{op.cell} writes {describe_value(value)}, which nobody reads and which is no output: {reason}."
    raise error_at(program, position, sentence)


# A value in flight to rank 1 is y[0,0]>1: the name itself says where it lands, so SEND and RECV need no match by order.
def _check_transfers(program: Program) -> None:
    receives: dict[Value, Op] = {}
    for position, op in enumerate(program.ops):
        for value in op.reads:
            if ">" not in value.location:
                continue
            target = value.location.rpartition(">")[2].partition(".")[0]
            subject = f"{op.cell} receives {value}, which"
            if op.kind != "RECV":
                raise error_at(program, position, f"{op.cell} reads {value}, which is in flight; only a RECV may.")
            if value in receives:
                sentence = f"{subject} {receives[value].cell} received already."
                raise error_at(program, position, sentence, "Receive it once and read the copy.")
            if op.rank != int(target):
                raise error_at(program, position, f"{subject} is on its way to rank {target}.")
            receives[value] = op


def _check_frees(program: Program) -> None:
    freed: dict[tuple[Value, int], Op] = {}
    for position, op in enumerate(program.ops):
        for value in op.reads:
            if (value, op.rank) in freed:
                sentence = f"{op.cell} reads {describe_value(value)} after it was freed on rank {op.rank}."
                raise error_at(program, position, sentence, "Apply fpipe.free() last.")
        if op.kind == "FREE":
            freed.update(((value, op.rank), op) for value in op.reads)


def check_ranks(program: Program) -> None:
    """Check rule 4 for ranks: they are 0..n-1, and each has an op or is a home."""
    homes = {end.homes for end in (*program.inputs, *program.outputs)}
    used_ranks = set(map(itemgetter(4), program.ops)).union(*homes)
    if min(used_ranks, default=0) < 0:
        raise ProgramError(f"rank {min(used_ranks)} is no rank: ranks are 0..n-1.")
    if used_ranks != set(range(len(used_ranks))):
        missing_rank = next(rank for rank in range(max(used_ranks) + 1) if rank not in used_ranks)
        rule = f"ranks are 0..{max(used_ranks)}, and each has an op or is the home of a value"
        raise ProgramError(f"rank {missing_rank} is missing: {rule}.")
    for input_or_output in (*program.inputs, *program.outputs):
        if not input_or_output.homes:
            raise ProgramError(f"{input_or_output.value} has no home: name at least one rank.")
        if len(set(input_or_output.homes)) < len(input_or_output.homes):
            raise ProgramError(f"{input_or_output.value} names a home twice: {shortened(str(input_or_output))}")


def _check_indices(program: Program) -> None:
    """Check rule 4 for stages, microbatches and slices: each index in 0..n-1 has an op."""
    # Readings make lists of these sizes. Without this check y[999999999,0] in a text would ask for all memory.
    ops = parts_of(program.ops)
    result_and_input_names = {end[0] for end in (*program.inputs, *program.outputs)}
    for index_name, tuple_field in (("stage", 1), ("microbatch", 2), ("slice", 3)):
        used_indices = set(map(itemgetter(tuple_field), ops)) - {None}
        named_indices = (used_indices | set(map(itemgetter(tuple_field), result_and_input_names))) - {None}
        if used_indices and named_indices != set(range(len(used_indices))):
            missing_index = next(number for number in range(len(named_indices) + 1) if number not in used_indices)
            rule = f"{index_name}s are 0..{max(named_indices)}, and each has an op"
            raise ProgramError(f"{index_name} {missing_index} is missing: {rule}.")
