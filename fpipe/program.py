"""The pipeline language: a training step written down as data.

The whole language, as a grammar::

    program ::= input*  op*  output*
    input   ::= value @ home,home...                              handed in by the caller, on these ranks
    output  ::= value = value @ home,home...                      result name = the value it is, wanted on these ranks
    op      ::= value* = KIND[stage,microbatch.slice] value* {how} @ rank
              | { op ; op } @ rank                                a PAIR: its parts may not read each other
    value   ::= name[stage,microbatch.slice]:port at              every bracket part and the port may be missing
    at      ::= (nothing) | @rank | >rank | @host                 itself, in a rank's memory, in flight, on the host
    cell    ::= 2F0 | 2F0.1 | (0F7;7B3) | KIND(value)             how tables, grids and errors name an op

Four rules make a list of ops a program. (1) *Single assignment*: every value is written once. (2) *Order is meaning*:
a value is written before it is read, so a walk down the list is always possible and a deadlock cannot be written down.
(3) *Nothing is lost*: what is written is read by someone or is an output; what is in flight lands once, where it was
sent; nothing is read after it is freed. (4) *Numbers are 0..n-1*: each rank has an op or is a home, and each stage,
microbatch and slice has an op.

The names that the front doors use for values (any lower-case word is a value name; these have a meaning in the walk)::

    inputs target params state key      what a caller hands in: the batch's two halves, and per stage or step the rest
    shard                               a replica's part of params, handed in where several replicas share them out
    x t w                               SPLIT's slices of inputs and target, and the microbatch's weight in the mean
    y loss count carry seen             what F writes: output, loss and its count, what a slice hands on, what U needs
    res wres                            residuals: what B or I reads, and what I leaves for W
    dx dy dcarry                        cotangents: of a stage's k-th input, of its output where several are added
    g sum                               one microbatch's gradient of a stage's k-th parameter bundle, the running sum
    all                                 that sum over all data-parallel replicas, as all_loss, all_total, all_count
    cut                                 the sum over those replicas alone that share params out, as cut_loss, cut_total
    opt lr norms norm                   optimizer state and learning rate; the norms of a stage's gradients, that of all
    squares                             those of a stage's shards of gradients, not yet added up over replicas
    inputs:1 target:1 lr:1              those of the second of several training steps
    grads outputs                       result names, besides loss, count, state, params, opt and norm

The kinds: F forward, B full backward, I input gradient, W weight gradient, R recompute, U state update, PAIR, SEND,
RECV, SPLIT, ADD, SCALE, MERGE, REDUCE, GATHER, SCATTER, OFFLOAD, LOAD, FREE, NORM, UPDATE, VALIDATE,
UNSCALE. The set is open: `register_kind` adds one. Those of a stage that is a collective over a dimension of a mesh say
`{exchange='all_to_all', axis='ep'}`, and run on a lane of their own.
(The zero-bubble papers write B for our I and BW for our B; the letters here are those of torch.distributed.pipelining.)

No tensor, shape, module or device lives in a program. Stages are numbers until a reading binds them to a model.
"""

from __future__ import annotations

import ast
import csv
import gc
import io
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple

from fpipe.limits import LONGEST_WORD, MOST_PARTS, expression, shortened


class ProgramError(ValueError):
    """A program, table or text that means nothing, with the op at fault, where it stands and the way out.

    >>> import fpipe
    >>> fpipe.schedules.from_table(["0F0"])(fpipe.program(1))
    Traceback (most recent call last):
    fpipe.program.ProgramError: the table has 0F0 without its backward: add 0B0, or 0I0 and 0W0.
    """


class Value(NamedTuple):
    """The name of one thing that flows: `y[2,0]` is the output of stage 2 for microbatch 0.

    >>> Value("y", 2, 0), Value("params", 1, port=1), Value("res", 0, 3, 1), Value("y", 2, 0, at="@1")
    (y[2,0], params[1]:1, res[0,3.1], y[2,0]@1)
    """

    name: str
    stage: int | None = None
    microbatch: int | None = None
    slice: int | None = None
    port: int = 0
    at: str = ""

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        return f"{self.name}{_bracket(self.stage, self.microbatch, self.slice)}{port}{self.at}"

    __repr__ = __str__


class Op(NamedTuple):
    """One thing that happens: its kind, which stage and microbatch (and slice) it is for, what it reads and writes.

    >>> Op("B", 0, 3, None, 1, (Value("params", 0), Value("res", 0, 3)), (Value("g", 0, 3),))
    g[0,3] = B[0,3] params[0] res[0,3] @ 1
    """

    kind: str
    stage: int | None
    microbatch: int | None
    slice: int | None
    rank: int
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    parts: tuple[Op, ...] = ()
    how: tuple[tuple[str, Any], ...] = ()

    @property
    def cell(self) -> str:
        """The op's short name: `2F0`, `2F0.1`, `(0F7;7B3)`, and `ADD(sum[0,1])` for ops that keep to their data.

        >>> Op("F", 2, 0, None, 0, (), ()).cell
        '2F0'
        """
        if self.parts:
            return f"({';'.join(part.cell for part in self.parts)})"
        if kind_of(self.kind).place == "table" or self.kind == "R":
            return cell_of(self[:4])
        return f"{self.kind}({(self.writes or self.reads)[0]})"

    def __str__(self) -> str:
        return f"{self.equation} @ {self.rank}"

    __repr__ = __str__

    @property
    def equation(self) -> str:
        """The op's text without its rank."""
        if self.parts:
            return f"{{ {' ; '.join(part.equation for part in self.parts)} }}"
        how = [f"{{{', '.join(f'{name}={value!r}' for name, value in self.how)}}}"] if self.how else []
        left = " ".join(map(str, self.writes)) or "_"
        name = self.kind + (_bracket(self.stage, self.microbatch, self.slice) or "[]")
        return " ".join((left, "=", name, *map(str, self.reads), *how))


class Input(NamedTuple):
    """A value the caller hands in, and the ranks where it does.

    >>> print(Input(Value("params", 0), (0, 3)))
    params[0] @ 0,3
    """

    value: Value
    homes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.value} @ {','.join(map(str, self.homes))}"


class Output(NamedTuple):
    """A result: the name the caller asks by, the value it is, and the ranks that want it.

    >>> print(Output(Value("grads", 0), Value("sum", 0, 7), (0,)))
    grads[0] = sum[0,7] @ 0
    """

    name: Value
    value: Value
    homes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.value} @ {','.join(map(str, self.homes))}"


@dataclass(frozen=True)
class Kind:
    """A kind of op: who places it, whether it takes time on the clock, which lane it uses.

    `place`: "table" (a schedule names it), "before" (just before its first reader), "after" (as soon as its inputs
    are there). `time`: ticks on the clock that fixes the global order. `lane`: "main", or beside it "copy", of
    transfers between ranks and memories, and "wire", of collectives over replicas; see also `lane_of`.

    >>> KINDS["F"], KINDS["RECV"].lane
    (Kind(place='table', time=1, lane='main'), 'copy')
    """

    place: Literal["table", "before", "after"]
    time: int = 0
    lane: Literal["main", "copy", "wire"] = "main"


KINDS: dict[str, Kind] = {
    **dict.fromkeys("FBIW", Kind("table", 1)),
    "PAIR": Kind("table", 1),
    "R": Kind("before", 1),
    "SPLIT": Kind("before"),
    "RECV": Kind("before", lane="copy"),
    "LOAD": Kind("before", lane="copy"),
    **dict.fromkeys(("ADD", "SCALE", "MERGE", "U", "FREE", "NORM", "UPDATE", "VALIDATE", "UNSCALE"), Kind("after")),
    **dict.fromkeys(("SEND", "OFFLOAD"), Kind("after", lane="copy")),
    **dict.fromkeys(("REDUCE", "GATHER", "SCATTER"), Kind("after", lane="wire")),
}
LANES = ("main", "copy", "wire", "exchange")
PARAMETERS = frozenset(("params", "shard"))  # inputs that are at home where their stage lives


def register_kind(name: str, kind: Kind) -> None:
    """Add a kind of op to the language; `register_meaning` and `register_cost` say what it does and takes.

    >>> register_kind("PRUNE", Kind("after"))
    >>> Program.parse("params[0] @ 0 \\n pruned[0] = PRUNE[0] params[0] @ 0 \\n grads[0] = pruned[0] @ 0").ops
    (pruned[0] = PRUNE[0] params[0] @ 0,)
    >>> _ = KINDS.pop("PRUNE")
    """
    if not isinstance(kind, Kind):
        raise TypeError(f"say fpipe.Kind('table'), 'before' or 'after', found {type(kind).__name__}.")
    if kind.place not in ("table", "before", "after"):
        raise ValueError(f"a kind's place is 'table', 'before' or 'after', found {kind.place!r}.")
    if type(kind.time) is not int or kind.time < 0:
        raise ValueError(f"a kind's time is a whole number of ticks, at least 0; found {kind.time!r}.")
    if kind.lane not in LANES[:3]:
        raise ValueError(f"a kind's lane is 'main', 'copy' or 'wire', found {kind.lane!r}.")
    if not re.fullmatch(r"[A-Z]+", name) or name in KINDS:
        raise ValueError(f"a kind's name is new and in capital letters, found {name!r}; taken: {', '.join(KINDS)}")
    KINDS[name] = kind


def kind_of(name: str) -> Kind:
    """Look a kind up by name, or say how to add it."""
    if name not in KINDS:
        raise ProgramError(
            f"{name!r} is not a kind of op; known: {', '.join(KINDS)}. Add your own by fpipe.register_kind."
        )
    return KINDS[name]


def is_exchange(op: Op) -> bool:
    """Whether an op is of a stage that is a collective over a dimension of a mesh."""
    how = op[8]
    return bool(how) and how[0][0] == "exchange"


def lane_of(op: Op) -> str:
    """The lane that an op occupies while it takes time: that of its kind, or "exchange" where it is a collective.

    >>> op = Op("F", 1, 0, None, 0, (), (), how=(("exchange", "all_to_all"), ("axis", "ep")))
    >>> lane_of(op), lane_of(op._replace(how=()))
    ('exchange', 'main')
    """
    return "exchange" if is_exchange(op) else kind_of(op.kind).lane


Sources = tuple[int, ...]
"""The positions of the writers of what an op reads, in that order: -1 for an input, `NOWHERE` if nothing above does."""
NOWHERE = sys.maxsize  # later than any op
ALL_BUT = "all but"  # {saved=..} opens with it where it names the ops that are *not* saved


class HtmlRepr:
    """Mixin of values that a notebook shows: it asks for HTML, and the painter gives it.

    A program, timeline or chart is drawn; of others those timelines that `pictured` names, below what they print.
    `fpipe.pictures` puts the painter here when fpipe is imported.

    >>> import fpipe
    >>> fpipe.program(2)._repr_html_()[:27]
    '<div style="overflow-x:auto'
    """

    painter: ClassVar[Callable[[Any], str] | None] = None

    @property
    def pictured(self) -> Mapping[str, Any]:
        """The timelines to draw below the text, by their names."""
        return {}

    def _repr_html_(self) -> str | None:
        return None if HtmlRepr.painter is None else HtmlRepr.painter(self)


ENTRY_RULES: list[Callable[[Program], None]] = []
"""The checks of a program where it enters the library; check.py, one floor up, puts its rules here."""


@dataclass(frozen=True, repr=False, eq=False)
class Program(HtmlRepr):
    """A training step as a value: hashable, comparable, printable. Built from parts, it is checked at once.

    >>> import fpipe
    >>> print(fpipe.program(1))
    params[0] @ 0
    inputs @ 0
    target @ 0
    y[0,0] loss[0,0] res[0,0] = F[0,0] params[0] inputs target @ 0
    g[0,0] = B[0,0] params[0] res[0,0] @ 0
    loss = loss[0,0] @ 0
    outputs = y[0,0] @ 0
    grads[0] = g[0,0] @ 0
    """

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]

    def __post_init__(self) -> None:
        for rule in ENTRY_RULES:
            rule(self)

    @staticmethod
    def trusted(
        inputs: tuple[Input, ...],
        ops: tuple[Op, ...],
        outputs: tuple[Output, ...],
        sources: list[Sources] | None = None,
    ) -> Program:
        """A program that a rewrite of ours has made: the same value, without checking it again."""
        made = object.__new__(Program)
        made.__dict__.update(inputs=inputs, ops=ops, outputs=outputs)
        if sources is not None:
            made.__dict__["sources"] = sources
        return made

    @cached_property
    def sources(self) -> list[Sources]:
        """For each op where what it reads was written: the one index that check, order and simulate share."""
        return sources_of(self.inputs, self.ops)

    @cached_property
    def writer(self) -> dict[Value, int]:
        """The position of the op that writes each value, -1 for an input."""
        made = {value: position for position, op in enumerate(self.ops) for value in op[6]}
        return {given.value: -1 for given in self.inputs} | made

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return 1 + max(set(map(itemgetter(1), self.ops)) - {None}, default=-1)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + max(set(map(itemgetter(2), self.ops)) - {None}, default=-1)

    @cached_property
    def steps(self) -> int:
        """Number of training steps, each with a batch of its own; their microbatches go on counting."""
        return 1 + max((end.value.port for end in self.inputs if end.value.name in ("inputs", "target")), default=0)

    @cached_property
    def slices(self) -> int:
        """Number of slices of each sequence; 1 where it is whole."""
        return 1 + max(set(map(itemgetter(3), self.ops)) - {None}, default=0)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks, those that are only homes included."""
        homes = (rank for end in (*self.inputs, *self.outputs) for rank in end.homes)
        return 1 + max((*homes, *set(map(itemgetter(4), self.ops))), default=-1)

    @cached_property
    def placement(self) -> tuple[int | tuple[int, ...], ...]:
        """The rank of each stage's scheduled ops; a tuple of ranks where a stage has several.

        >>> import fpipe
        >>> fpipe.schedules.gpipe(2)(fpipe.program(4)).placement
        (0, 0, 1, 1)
        """
        ranks: list[set[int]] = [set() for _ in range(self.stages)]
        for op in self.ops:
            for part in op.parts or (op,):
                if part.stage is not None and kind_of(part.kind).place == "table":
                    ranks[part.stage].add(op.rank)
        return tuple(min(found) if len(found) == 1 else tuple(sorted(found)) for found in ranks)

    def table(self, comms: bool = False) -> list[list[str]]:
        """The cells of each rank in order, without idle ones; with `comms` those of every op, transfers included.

        >>> import fpipe
        >>> fpipe.program(2).table()
        [['0F0', '1F0', '1B0', '0B0']]
        """
        rows: list[list[str]] = [[] for _ in range(self.ranks)]
        for op in self.ops:
            if comms or kind_of(op.kind).time:
                rows[op.rank].append(op.cell)
        return rows

    def to_csv(self, comms: bool = False) -> str:
        """The table as CSV, one line a rank; `schedules.from_table` reads it back onto a base program."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.table(comms))
        return text.getvalue()

    @staticmethod
    def parse(text: str) -> Program:
        """Read a program back from its text, `str(program)`; it is checked as it enters.

        >>> import fpipe
        >>> program = fpipe.program(3)
        >>> fpipe.Program.parse(str(program)) == program
        True
        """
        if not isinstance(text, str):
            raise TypeError(f"parse() reads the text of a program, str(program); found {type(text).__name__}.")
        inputs: list[Input] = []
        ops: list[Op] = []
        outputs: list[Output] = []
        for number, line in enumerate(readable(text).splitlines(), 1):
            if not line.strip():
                continue
            try:
                what, at, where = line.rpartition(" @ ")
                homes = tuple(map(int, where.split(","))) if re.fullmatch(rf" *{_N}(,{_N})* *", where) else ()
                if not at or not homes:
                    raise ProgramError("a line ends in ' @ ' and the ranks, as in 'params[0] @ 0'")
                left, equals, right = what.partition(" = ")
                if what.lstrip().startswith("{"):
                    ops.append(_parse_pair(what.strip(), homes[0]))
                elif right.lstrip()[:1].isupper():
                    ops.append(_parse_op(what, homes[0]))
                elif equals:
                    outputs.append(Output(_parse_value(left), _parse_value(right), homes))
                else:
                    inputs.append(Input(_parse_value(what), homes))
            except ProgramError as error:
                raise ProgramError(f"line {number}: {error}\n    {shortened(line)}") from None
        return Program(tuple(inputs), tuple(ops), tuple(outputs))

    @property
    def _content(self) -> tuple[object, ...]:
        return (self.inputs, self.ops, self.outputs)

    @cached_property
    def _hash(self) -> int:
        return hash(self._content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and (self is other or self._content == other._content)

    def __repr__(self) -> str:
        sizes = (self.stages, self.microbatches, self.ranks, len(self.ops))
        return "<Program: {} stages, {} microbatches, {} ranks, {} ops>".format(*sizes)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.inputs, *self.ops, *self.outputs)))


def cell_of(key: tuple[str, int | None, int | None, int | None]) -> str:
    """The cell of an op by its kind, stage, microbatch and slice."""
    kind, stage, microbatch, piece = key
    return f"{stage}{kind}{microbatch}" + ("" if piece is None else f".{piece}")


def _bracket(stage: int | None, microbatch: int | None, piece: int | None) -> str:
    if microbatch is None and piece is None:
        return "" if stage is None else f"[{stage}]"
    tail = "" if piece is None else f".{piece}"
    return f"[{'' if stage is None else stage},{'' if microbatch is None else microbatch}{tail}]"


_N = r"(?:0|[1-9][0-9]{0,8})"
_PLACE = rf"(?:\[({_N})?(?:,(?=[0-9.])({_N})?(?:\.({_N}))?)?\])?"
_VALUE = re.compile(rf"([a-z_]+){_PLACE}(?::({_N}))?((?:@(?:{_N}|host)(?:\.{_N})?|>{_N}(?:\.{_N})?)*)")
_HEAD = re.compile(r"([A-Z]+)" + _PLACE)


def _place(*texts: str | None) -> tuple[int | None, int | None, int | None]:
    stage, microbatch, piece = (None if text is None else int(text) for text in texts)
    return stage, microbatch, piece


def _parse_value(text: str) -> Value:
    found = _VALUE.fullmatch(text.strip())
    if not found:
        raise ProgramError(
            f"{text.strip()!r} is not a value; a value reads like y[2,0], params[1]:1, res[0,3.1] or y[2,0]@1"
        )
    name, *place, port, at = found.groups()
    return Value(name, *_place(*place), int(port or 0), at)


def _parse_pair(text: str, rank: int) -> Op:
    if not text.endswith("}"):
        raise ProgramError("a PAIR reads { op ; op } @ rank")
    return pair(*(_parse_op(part, rank) for part in text[1:-1].split(" ; ")))


def _parse_op(text: str, rank: int) -> Op:
    text = text.strip()
    left, _, right = text.partition(" = ")
    right, has_how, how = right.partition(" {")
    head, *reads = right.split() or [text]
    found = _HEAD.fullmatch(head)
    if not found:
        raise ProgramError(f"{head!r} is not an op; an op reads like y[2,0] = F[2,0] params[2] y[1,0]")
    kind, *place = found.groups()
    kind_of(kind)
    read = tuple(map(_parse_value, reads))
    writes = () if left.strip() == "_" else tuple(map(_parse_value, left.split()))
    return Op(kind, *_place(*place), rank, read, writes, (), _parse_how(how.rstrip()) if has_how else ())


def _parse_how(text: str) -> tuple[tuple[str, Any], ...]:
    try:
        assert text.endswith("}")
        call = expression(f"how({text[:-1]})")
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        assert (call.end_col_offset, call.args) == (len(text.encode()) + 4, [])
        names = [word.arg for word in call.keywords]
        assert None not in names
        assert len(set(names)) == len(names)
        how = tuple((word.arg or "", ast.literal_eval(word.value)) for word in call.keywords)
        hash(how)
    except (ValueError, AssertionError, TypeError):
        raise ProgramError(
            f"{{{shortened(text)} is not a list of name=literal, each of a value that can be hashed"
        ) from None
    return how


def readable(text: str) -> str:
    """A text of which no word is over the limit: then errors may quote it."""
    for number, line in enumerate(text.splitlines(), 1):
        longest = max(line.replace(",", " ").split(), key=len, default="")
        if len(longest) > LONGEST_WORD:
            raise ProgramError(
                f"line {number}: {shortened(longest, 20)!r} is a word of {len(longest)} characters; the longest that "
                f"are read have {LONGEST_WORD}."
            )
    return text


def memory_of(value: Value, rank: int) -> int | None:
    """The rank in whose memory a value is that an op on `rank` wrote; None if it is on the host.

    >>> memory_of(Value("y", 0, 0), 2), memory_of(Value("y", 0, 0, at="@1"), 0), memory_of(Value("y", at="@host"), 0)
    (2, 1, None)
    """
    place = value.at.rpartition("@")[2]
    if not place or ">" in place:
        return rank
    return None if place == "host" else int(place.partition(".")[0])


def the_program(found: object) -> Program:
    """The argument of a transform or a reading, if it is a program."""
    if isinstance(found, Program):
        return found
    raise TypeError(f"a Program is wanted here, such as fpipe.program(model); found {type(found).__name__}.")


def pair(*parts: Op) -> Op:
    """Two ops of one rank as one op of kind PAIR, which overlaps them; they may not read each other.

    >>> forward, backward = (Op(kind, 0, number, None, 0, (), ()) for number, kind in enumerate("FB"))
    >>> pair(forward, backward).cell
    '(0F0;0B1)'
    """
    if not 2 <= len(parts) <= MOST_PARTS:
        raise ProgramError(f"a PAIR has two parts, at most {MOST_PARTS}; found {len(parts)}.")
    odd = next((part for part in parts if not isinstance(part, Op)), None)  # pyright: ignore[reportUnnecessaryIsInstance]
    if odd is not None:
        raise TypeError(f"pair() takes ops, as a program has them; found {type(odd).__name__}.")
    made = {value: part for part in parts for value in part.writes}
    for part in parts:
        other = next((value for value in part.reads if made.get(value, part) is not part), None)
        if other is not None:
            cells = ";".join(each.cell for each in parts)
            raise ProgramError(
                f"inside the PAIR ({cells}), {part.cell} reads {other} of {made[other].cell}; pair ops that do not "
                "need each other."
            )
    reads = tuple(dict.fromkeys(value for part in parts for value in part.reads))
    writes = tuple(value for part in parts for value in part.writes)
    return Op("PAIR", *parts[0][1:5], reads, writes, parts)


class _Writers(dict[Value, int]):
    def __missing__(self, value: Value) -> int:
        return NOWHERE


def sources_of(inputs: tuple[Input, ...], ops: Sequence[Op]) -> list[Sources]:
    """The sources of ops in the order of a list; a read that stands above its writer finds it nowhere."""
    writer = _Writers({given.value: -1 for given in inputs})
    sources: list[Sources] = []
    find, note = writer.__getitem__, sources.append
    with building():
        for position, op in enumerate(ops):
            note(tuple(map(find, op[5])))
            for value in op[6]:
                writer[value] = position
    return sources


def parts_of(ops: Sequence[Op]) -> Sequence[Op]:
    """All ops, with a PAIR given as its parts."""
    if not any(map(itemgetter(7), ops)):
        return ops
    return [part for op in ops for part in op.parts or (op,)]


_MANY = 5_000


@contextmanager
def building() -> Generator[None]:
    """Keep the cyclic garbage collector out while a program is built.

    A program is millions of tuples without one cycle, and the collector walks them again and again as their number
    grows: stamping out 10^5 ops takes 2 us an op without it, and 8 with. When many were made, they join the oldest
    generation unwalked, which freezing and unfreezing does; the first walk alone would take 3 us an op (a quarter of
    the time for 1F1B of 1657 ops).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
