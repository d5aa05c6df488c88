"""Say whether a list of ops is a program, and if not, which op is at fault, where it stands and what would mend it.

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

from fpipe.limits import expression, shortened
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
    the_program,
)
from fpipe.wording import UNREAD, fault, fill, phrase, repair


def check(program: Program) -> None:
    """Return nothing for a program that means something, or raise the `ProgramError` that says what is wrong.

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
    program = the_program(program)
    with building():
        kinds = set(map(itemgetter(0), program.ops))
        for kind in kinds:
            kind_of(kind)
        if "PAIR" in kinds:
            for op in program.ops:
                if op.kind == "PAIR":
                    pair(*op.parts)
        refuse_state_order(program.inputs, program.ops)
        written = _written_once(program)
        _written_before_read(program, written)
        _read_or_wanted(program, written)
        if kinds & {"SEND", "RECV"}:
            _flights_land(program)
        if "FREE" in kinds:
            _nothing_after_free(program)
        ranks_are_whole(program)


def check_kinds(program: Program) -> None:
    """Check that each op does what the letter of its kind says, with values of its own stage, microbatch and slice.

    Rewrites keep that, so it is looked at where a program enters and not again.

    Raises:
        ProgramError: a backward of another's residuals, a SEND that sends nothing, SPLITs that disagree on how many
            they are, results that name one thing twice.
    """
    for position, op in enumerate(program.ops):
        for part in op.parts or (op,):
            mistake = _mistake_in(part, op)
            if mistake:
                raise fault(program, position, f"{part.cell} {mistake}.", f"    {op}")
    _stages_are_whole(program)
    _batch_is_cut_once(program)
    _versions_agree(program)
    homes_by_name: defaultdict[Value, set[int]] = defaultdict(set)
    freed = {value for op in program.ops if op.kind == "FREE" for value in op.reads}
    for end in program.outputs:
        if homes_by_name[end.name] & {*end.homes}:
            raise ProgramError(f"the output {end.name} stands twice; a result has one value on each of its homes.")
        homes_by_name[end.name].update(end.homes)
        if end.name.name == "grads" and end.name.stage != end.value.stage:
            raise ProgramError(f"the output {end} gives stage {end.name.stage} the gradient of another.")
        if ">" in end.value.at.rpartition("@")[2]:
            raise ProgramError(f"the output {end} is in flight; name the copy that its RECV writes.")
        if end.value in freed:
            raise ProgramError(f"the output {end} is freed before it is handed back.")


def _batch_is_cut_once(program: Program) -> None:
    """All SPLITs cut the batch in the same way, into as many parts as each stage has SPLITs."""
    for op in program.ops:
        if op.kind in ("SPLIT", "MERGE") and dict(op.how).get("slices", 1) != program.slices:
            raise ProgramError(f"{op.cell} says {dict(op.how)}, but the program has {program.slices} slices:\n    {op}")
    splits = [(position, op, dict(op.how)) for position, op in enumerate(program.ops) if op.kind == "SPLIT"]
    counts = Counter((op.stage, op.slice, op.reads[0].port) for _, op, _ in splits)
    for position, op, how in splits:
        index, count = how.get("index"), counts[op.stage, op.slice, op.reads[0].port]
        is_alike = {**splits[0][2], "index": index} == how
        if not is_alike or how.get("count") != count or index not in range(count):
            raise fault(
                program,
                position,
                f"{op.cell} takes part {index} of {how.get('count')} of the batch, but stage {op.stage} has "
                f"{count} SPLITs: all of them say count={count} and index=0..{count - 1}, and cut alike.",
                f"    {op}\nfpipe.split({count}) writes them.",
            )


def _versions_agree(program: Program) -> None:
    """A backward reads the version of parameters that its forward read."""
    first_reads: dict[tuple[object, ...], tuple[Op, Value]] = {}
    for position, op in enumerate(program.ops):
        for part in op.parts or (op,):
            for value in part.reads if part.kind in _OF_STAGES else ():
                if value.name != "params":
                    continue
                reader, version = first_reads.setdefault((part[1:4], value.stage, value.port), (part, value))
                if version.microbatch != value.microbatch:
                    both = f"{part.cell} reads {phrase(value)}, and {reader.cell} read {phrase(version)}"
                    rule = "a stage computes a microbatch with one version of its parameters."
                    raise fault(program, position, f"{both}: {rule}")


_OF_STAGES = frozenset("FRBIW")
_OWN_READS = {"B": {"res", "w"}, "I": {"res", "w"}, "W": {"wres"}, "F": {"x", "t"}, "R": {"x", "t"}}
_OVER_REPLICAS = frozenset(("REDUCE", "GATHER", "SCATTER"))
_ONE_TO_ONE = _OVER_REPLICAS | {"SEND", "RECV", "OFFLOAD", "LOAD"}
_WITH_WORDS = _OVER_REPLICAS | {"SPLIT", "MERGE", "SEND", *"FRBIW"}
_WORDS: dict[str, type] = {
    **dict.fromkeys(("index", "count", "size", "slices", "dim"), int),
    **dict.fromkeys(("spec", "sequence", "aux", "axis", "cast", "exchange"), str),
    "saved": tuple,
}
_NEEDED = {"B": "res", "I": "res", "W": "wres"}


@lru_cache
def _mistake_in_spec(text: str) -> str | None:
    try:
        expression(text)
    except ValueError as error:
        return f"has a spec: {str(error).removesuffix('.')}"
    return None


def _mistake_in(op: Op, whole: Op) -> str | None:
    """Name the mistake in an op by itself, or in a part of a `whole` PAIR, if there is one."""
    for word, value in op.how if op.kind in _WITH_WORDS else ():
        if word in _WORDS and type(value) is not _WORDS[word]:
            return f"says {word}={value!r}, where {_WORDS[word].__name__} is wanted"
        if word == "spec" and (mistake := _mistake_in_spec(value)):
            return mistake
    if is_exchange(op) and not (op.kind in _OF_STAGES and len(op.how) > 1 and op.how[1][0] == "axis"):
        return "is no collective of a stage: F, R, B, I or W that says {exchange='...', axis='...'}"
    if op.rank != whole.rank:
        return f"is on rank {op.rank} inside a PAIR on rank {whole.rank}"
    if op.kind in _OWN_READS:
        return _mistake_in_stage(op)
    return _mistake_in_move(op) if op.kind in _ONE_TO_ONE else None


def _mistake_in_stage(op: Op) -> str | None:
    if op.stage is None or op.microbatch is None:
        return "names no stage and microbatch"
    for value in op.reads:
        if value.name in _OWN_READS[op.kind] and value[1:4] != op[1:4]:
            return f"reads {phrase(value)}, which is not its own"
    needed = [_NEEDED[op.kind]] if op.kind in _NEEDED else []
    for name in (*needed, "params"):
        if all(value.name != name for value in op.reads):
            return f"reads no {name}"
    for value in op.writes:
        if value[1:4] != op[1:4] and value.name not in ("carry", "dcarry"):
            return f"writes {phrase(value)}, which is not its own"
    return None


def _mistake_in_move(op: Op) -> str | None:
    """Name the mistake in an op that reads one value and writes one: a move, or a collective over replicas."""
    if len(op.reads) != 1 or len(op.writes) != 1:
        return "does not read one value and write one"
    (before,), (after,) = op.reads, op.writes
    if op.kind in _OVER_REPLICAS:
        if not dict(op.how).get("axis"):
            return "says no axis of replicas: {axis='...'}"
        if op.kind == "GATHER" and (before.name, after.name, after.stage) != ("shard", "params", before.stage):
            return "does not make a stage's params from its shard"
        return "writes another stage's" if before.stage != after.stage else None
    if before[:5] != after[:5]:
        return "moves one value and writes another"
    if op.kind == "SEND" and ">" not in after.at:
        return "does not read a value and write it in flight"
    if op.kind == "SEND" and after.at.rpartition(">")[2].partition(".")[0] == str(op.rank):
        return "sends to its own rank"
    if op.kind == "RECV" and (">" not in before.at or "@" not in after.at):
        return "does not read what is in flight"
    if op.kind in ("OFFLOAD", "LOAD") and (memory_of(after, op.rank) == op.rank) != (op.kind == "LOAD"):
        return f"moves {before} {'out of' if op.kind == 'LOAD' else 'into'} the memory of its own rank"
    return None


ENTRY_RULES.extend((check, check_kinds))


def _written_once(program: Program) -> set[Value]:
    """Return all values of the program, each written by one op or handed in."""
    writes = list(map(itemgetter(6), program.ops))
    inputs = {end.value for end in program.inputs}
    written = inputs.union(chain.from_iterable(writes))
    if len(written) == len(program.inputs) + sum(map(len, writes)):
        return written
    writers: dict[Value, Op] = {}
    for position, op in enumerate(program.ops):
        for value in op.writes:
            if value in inputs or value in writers:
                first = "is an input" if value in inputs else f"{writers[value].cell} writes already"
                twice = " The same op stands twice." if writers.get(value) == op else ""
                words = f"{op.cell} writes {phrase(value)}, which {first}; a value is written once.{twice}"
                mend = "Leave one of them out (a stage's backward is B, or I and W, never both)."
                raise fault(program, position, words, mend)
            writers[value] = op
    counts = Counter(end.value for end in program.inputs)
    raise ProgramError(f"{next(v for v, n in counts.items() if n > 1)} is handed in twice; list each input once.")


def _written_before_read(program: Program, written: set[Value]) -> None:
    # The sources of a program of our own making were permuted with its ops, so their order is looked at too.
    rows = enumerate(program.sources)
    late = ((place, step) for place, sources in rows for step, source in enumerate(sources) if source >= place)
    position, step = next(late, (-1, -1))
    if position < 0:
        for end in program.outputs:
            if end[1] not in written:
                mend = repair(end.value, "leave the output out")
                raise ProgramError(f"the output {end.name} is {phrase(end.value)}, which nothing writes. {mend}")
        return
    op = program.ops[position]
    value = op.reads[step]
    head = f"{op.cell} reads {phrase(value)}, which"
    if value not in program.writer:
        raise fault(program, position, f"{head} nothing writes.", repair(value, "name it as an input"))
    writer = program.ops[program.writer[value]]
    if writer is op:
        raise fault(program, position, f"{head} it writes itself.", "An op reads only what others wrote before.")
    place = "on the same rank" if writer.rank == op.rank else f"on rank {writer.rank}"
    mend = f"Put {writer.cell} before {op.cell}, or start from fpipe.schedules.one_f_one_b(ranks={program.ranks})."
    raise fault(program, position, f"{head} {writer.cell} writes later {place}.", mend)


def _read_or_wanted(program: Program, written: set[Value]) -> None:
    unread = written  # changed in place: a second set of all values would take twice the time
    unread.difference_update(chain.from_iterable(map(itemgetter(5), program.ops)))
    unread.difference_update([end[1] for end in program.outputs], [end[0] for end in program.inputs])
    if not unread:
        return
    position = min(program.writer[value] for value in unread)
    op = program.ops[position]
    value = next(value for value in op.writes if value in unread)
    if op.kind == "SEND":
        mend = "Add the RECV, or use fpipe.communicate()."
        raise fault(program, position, f"{op.cell} has no RECV: nobody reads {value}.", mend)
    why = fill(UNREAD.get(value.name, "drop it, or name it as an output"), value)
    words = f"{op.cell} writes {phrase(value)}, which nobody reads and which is no output: {why}."
    raise fault(program, position, words)


def _flights_land(program: Program) -> None:
    receives: dict[Value, Op] = {}
    for position, op in enumerate(program.ops):
        for value in op.reads:
            if ">" not in value.at:
                continue
            target = value.at.rpartition(">")[2].partition(".")[0]
            head = f"{op.cell} receives {value}, which"
            if op.kind != "RECV":
                raise fault(program, position, f"{op.cell} reads {value}, which is in flight; only a RECV may.")
            if value in receives:
                words = f"{head} {receives[value].cell} received already."
                raise fault(program, position, words, "Receive it once and read the copy.")
            if op.rank != int(target):
                raise fault(program, position, f"{head} is on its way to rank {target}.")
            receives[value] = op


def _nothing_after_free(program: Program) -> None:
    freed: dict[tuple[Value, int], Op] = {}
    for position, op in enumerate(program.ops):
        for value in op.reads:
            if (value, op.rank) in freed:
                words = f"{op.cell} reads {phrase(value)} after it was freed on rank {op.rank}."
                raise fault(program, position, words, "Apply fpipe.free() last.")
        if op.kind == "FREE":
            freed.update(((value, op.rank), op) for value in op.reads)


def ranks_are_whole(program: Program) -> None:
    """Rule 4: ranks are 0..n-1."""
    homes = {end[1] for end in program.inputs} | {end[2] for end in program.outputs}
    used = set(map(itemgetter(4), program.ops)).union(*homes)
    if min(used, default=0) < 0:
        raise ProgramError(f"rank {min(used)} is no rank: ranks are 0..n-1.")
    if used != set(range(len(used))):
        gap = next(rank for rank in range(max(used) + 1) if rank not in used)
        rule = f"ranks are 0..{max(used)}, and each has an op or is the home of a value"
        raise ProgramError(f"rank {gap} is missing: {rule}.")
    for end in (*program.inputs, *program.outputs):
        if not end.homes:
            raise ProgramError(f"{end.value} has no home: name at least one rank.")
        if len(set(end.homes)) < len(end.homes):
            raise ProgramError(f"{end.value} names a home twice: {shortened(str(end))}")


def _stages_are_whole(program: Program) -> None:
    """Rule 4 of stages, microbatches and slices: no reading makes room for those of which there is no op."""
    ops = parts_of(program.ops)
    ends = {end[0] for end in (*program.inputs, *program.outputs)}
    for word, field in (("stage", 1), ("microbatch", 2), ("slice", 3)):
        used = set(map(itemgetter(field), ops)) - {None}
        named = (used | set(map(itemgetter(field), ends))) - {None}
        if used and named != set(range(len(used))):
            gap = next(number for number in range(len(named) + 1) if number not in used)
            raise ProgramError(f"{word} {gap} is missing: {word}s are 0..{max(named)}, and each has an op.")
