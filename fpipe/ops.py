"""Define ops, values and kinds of op, and parse and print them.

y[2,0] = F[2,0] params[2] y[1,0] @ 1        reads and writes are values: names of what flows; F is a kind
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from fpipe.limits import LONGEST_WORD, MOST_PARTS, check_whole_number, checked_init, parse_expression, shortened


class ProgramError(ValueError):
    """A program, table or text that means nothing, with the op at fault, where it stands and the way out.

    >>> import fpipe
    >>> fpipe.schedules.from_table(["0F0"])(fpipe.program(1))
    Traceback (most recent call last):
    fpipe.ops.ProgramError: the table has 0F0 without its backward: add 0B0, or 0I0 and 0W0.
    """


class Value(NamedTuple):
    """The name of a value: `y[2,0]` is the output of stage 2 for microbatch 0.

    >>> Value("y", 2, 0), Value("params", 1, port=1), Value("res", 0, 3, 1), Value("y", 2, 0, location="@1")
    (y[2,0], params[1]:1, res[0,3.1], y[2,0]@1)
    """

    name: str
    stage: int | None = None
    microbatch: int | None = None
    slice: int | None = None
    port: int = 0
    location: str = ""

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        return f"{self.name}{_bracketed_indices(self.stage, self.microbatch, self.slice)}{port}{self.location}"

    __repr__ = __str__


class Op(NamedTuple):
    """One operation: its kind, its stage, microbatch and slice, its rank, and the values that it reads and writes.

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
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def cell(self) -> str:
        """The op's short name: `2F0`, `2F0.1`, `(0F7;7B3)`, and `ADD(sum[0,1])` for ops that keep to their data."""
        if self.parts:
            return f"({';'.join(part.cell for part in self.parts)})"
        if kind_of(self.kind).position == "table" or self.kind == "R":
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
        options = [f"{{{', '.join(f'{name}={value!r}' for name, value in self.options)}}}"] if self.options else []
        writes = " ".join(map(str, self.writes)) or "_"
        name = self.kind + (_bracketed_indices(self.stage, self.microbatch, self.slice) or "[]")
        return " ".join((writes, "=", name, *map(str, self.reads), *options))


class Input(NamedTuple):
    """A value that the caller passes in, and the ranks where it does.

    >>> print(Input(Value("params", 0), (0, 3)))
    params[0] @ 0,3
    """

    value: Value
    homes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.value} @ {','.join(map(str, self.homes))}"


class Output(NamedTuple):
    """A result: its name, its value, and the ranks where it is wanted.

    >>> print(Output(Value("grads", 0), Value("sum", 0, 7), (0,)))
    grads[0] = sum[0,7] @ 0
    """

    name: Value
    value: Value
    homes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.value} @ {','.join(map(str, self.homes))}"


@checked_init
@dataclass(frozen=True)
class Kind:
    """A kind of op: what fixes its position in the order, its ticks on the clock, and the lane that it uses.

    `position`: "table" (a schedule names it), "before" (just before its first reader), "after" (as soon as its inputs
    are there). `time`: ticks on the clock that fixes the global order. `lane`: "main", or next to it "copy", for
    transfers between ranks and memories, and "wire", for collectives over replicas; see also `lane_of`.

    >>> KINDS["F"], KINDS["RECV"].lane
    (Kind(position='table', time=1, lane='main'), 'copy')
    """

    position: Literal["table", "before", "after"]
    time: int = 0
    lane: Literal["main", "copy", "wire"] = "main"


# Only ops that compute a stage take a tick, so that the one global order depends on no costs. SEND and RECV are ops of
# no duration that stand where their data are; `simulate` gives them times.
KINDS: dict[str, Kind] = {
    **dict.fromkeys("FBIW", Kind("table", 1)),
    "PAIR": Kind("table", 1),
    "R": Kind("before", 1),
    "SPLIT": Kind("before"),
    # Stands in the instructions of a step only: `runtimes/lowering/hoists.py`.
    "HOIST": Kind("before"),
    "RECV": Kind("before", lane="copy"),
    "LOAD": Kind("before", lane="copy"),
    **dict.fromkeys(("ADD", "SCALE", "MERGE", "FREE", "NORM", "UPDATE", "VALIDATE", "UNSCALE"), Kind("after")),
    **dict.fromkeys(("SEND", "OFFLOAD"), Kind("after", lane="copy")),
    **dict.fromkeys(("REDUCE", "GATHER", "SCATTER"), Kind("after", lane="wire")),
}
LANES = ("main", "copy", "wire", "exchange")
PARAMETERS = frozenset(("params", "shard"))  # inputs that are at home where their stage lives


def register_kind(name: str, kind: Kind) -> None:
    """Add a kind of op to the language; `register_meaning` defines its effect, `register_cost` its duration.

    >>> register_kind("PRUNE", Kind("after"))
    >>> import fpipe
    >>> fpipe.Program.parse("params[0] @ 0 \\n p[0] = PRUNE[0] params[0] @ 0 \\n grads[0] = p[0] @ 0").ops
    (p[0] = PRUNE[0] params[0] @ 0,)
    >>> _ = KINDS.pop("PRUNE")
    """
    check_whole_number("time", kind.time, minimum=0)
    if not re.fullmatch(r"[A-Z]+", name) or name in KINDS:
        raise ValueError(f"a kind's name is new and in capital letters, found {name!r}; taken: {', '.join(KINDS)}")
    KINDS[name] = kind


def kind_of(name: str) -> Kind:
    """Return a kind by its name; the error for an unknown one says how to add it."""
    if name not in KINDS:
        kind_names = ", ".join(KINDS)
        raise ProgramError(f"{name!r} is not a kind of op; known: {kind_names}. Add your own by fpipe.register_kind.")
    return KINDS[name]


def is_exchange(op: Op) -> bool:
    """Whether an op belongs to a stage that is a collective over a dimension of a mesh."""
    return bool(op[8]) and op[8][0][0] == "exchange"


def lane_of(op: Op) -> str:
    """Return the lane that an op occupies while it takes time: "exchange" for a collective stage, else its kind's.

    >>> op = Op("F", 1, 0, None, 0, (), (), options=(("exchange", "all_to_all"), ("axis", "ep")))
    >>> lane_of(op), lane_of(op._replace(options=()))
    ('exchange', 'main')
    """
    return "exchange" if is_exchange(op) else kind_of(op.kind).lane


def cell_of(key: tuple[str, int | None, int | None, int | None]) -> str:
    """Return the cell that names an op of this kind, stage, microbatch and slice."""
    kind, stage, microbatch, slice_index = key
    return f"{stage}{kind}{microbatch}" + ("" if slice_index is None else f".{slice_index}")


def _bracketed_indices(stage: int | None, microbatch: int | None, slice_index: int | None) -> str:
    if microbatch is None and slice_index is None:
        return "" if stage is None else f"[{stage}]"
    tail = "" if slice_index is None else f".{slice_index}"
    return f"[{'' if stage is None else stage},{'' if microbatch is None else microbatch}{tail}]"


def memory_of(value: Value, rank: int) -> int | None:
    """Return the rank whose memory holds a value that an op on `rank` wrote; None for the host.

    >>> y = Value("y", 0, 0)
    >>> memory_of(y, 2), memory_of(y._replace(location="@1"), 0), memory_of(y._replace(location="@host"), 0)
    (2, 1, None)
    """
    last_location = value.location.rpartition("@")[2]
    if not last_location or ">" in last_location:
        return rank
    return None if last_location == "host" else int(last_location.partition(".")[0])


def pair(*parts: Op) -> Op:
    """Join two ops of one rank in one op of kind PAIR, which overlaps them; they must not depend on each other.

    >>> forward, backward = (Op(kind, 0, number, None, 0, (), ()) for number, kind in enumerate("FB"))
    >>> pair(forward, backward).cell
    '(0F0;0B1)'
    """
    if not 2 <= len(parts) <= MOST_PARTS:
        raise ProgramError(f"a PAIR has two parts, at most {MOST_PARTS}; found {len(parts)}.")
    reads = tuple(dict.fromkeys(value for part in parts for value in part.reads))
    writes = tuple(value for part in parts for value in part.writes)
    pair_op = Op("PAIR", *parts[0][1:5], reads, writes, parts)
    writer = {value: part for part in parts for value in part.writes}
    if len(writer) < len(writes):
        raise ProgramError(f"the PAIR {pair_op.cell} has an op twice.")
    for part in parts:
        for value in part.reads:
            if writer.get(value, part) is not part:
                reason = f"{part.cell} reads {value} of {writer[value].cell}; pair ops that do not need each other."
                raise ProgramError(f"inside the PAIR {pair_op.cell}, {reason}")
    return pair_op


def parts_of(ops: Sequence[Op]) -> Sequence[Op]:
    """Return all ops, a PAIR replaced by its parts."""
    # Most programs have no PAIR; any(map(itemgetter)) runs in C, and the same sequence comes back uncopied.
    if not any(map(itemgetter(7), ops)):
        return ops
    return [part for op in ops for part in op.parts or (op,)]


def parse_lines(text: str) -> tuple[list[Input], list[Op], list[Output]]:
    """Parse the text of a program, which has one input, op or output a line."""
    inputs: list[Input] = []
    ops: list[Op] = []
    outputs: list[Output] = []
    for line_number, line in enumerate(refuse_long_words(text).splitlines(), 1):
        if not line.strip():
            continue
        try:
            body, separator, ranks = line.rpartition(" @ ")
            homes = tuple(map(int, ranks.split(","))) if re.fullmatch(rf" *{_NUMBER}(,{_NUMBER})* *", ranks) else ()
            if not separator or not homes:
                raise ProgramError("a line ends in ' @ ' and the ranks, as in 'params[0] @ 0'")
            left_side, equals_sign, right_side = body.partition(" = ")
            if body.lstrip().startswith("{"):
                ops.append(_parse_pair(body.strip(), homes[0]))
            elif right_side.lstrip()[:1].isupper():
                ops.append(_parse_op(body, homes[0]))
            elif equals_sign:
                outputs.append(Output(_parse_value(left_side), _parse_value(right_side), homes))
            else:
                inputs.append(Input(_parse_value(body), homes))
        except ProgramError as error:
            raise ProgramError(f"line {line_number}: {error}\n    {shortened(line)}") from None
    return inputs, ops, outputs


# At most nine digits: a longer number is no index, and int() of a very long text would take quadratic time.
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_INDICES = rf"(?:\[({_NUMBER})?(?:,(?=[0-9.])({_NUMBER})?(?:\.({_NUMBER}))?)?\])?"
_VALUE = re.compile(
    rf"([a-z_]+){_INDICES}(?::({_NUMBER}))?((?:@(?:{_NUMBER}|host)(?:\.{_NUMBER})?|>{_NUMBER}(?:\.{_NUMBER})?)*)"
)
_HEAD = re.compile(r"([A-Z]+)" + _INDICES)


def _parse_indices(*texts: str | None) -> tuple[int | None, int | None, int | None]:
    stage, microbatch, slice_index = (None if text is None else int(text) for text in texts)
    return stage, microbatch, slice_index


def _parse_value(text: str) -> Value:
    match = _VALUE.fullmatch(text.strip())
    if not match:
        example = "y[2,0], params[1]:1, res[0,3.1] or y[2,0]@1"
        raise ProgramError(f"{text.strip()!r} is not a value; a value reads like {example}")
    name, *indices, port, location = match.groups()
    return Value(name, *_parse_indices(*indices), int(port or 0), location)


def _parse_pair(text: str, rank: int) -> Op:
    if not text.endswith("}"):
        raise ProgramError("a PAIR reads { op ; op } @ rank")
    return pair(*(_parse_op(part, rank) for part in text[1:-1].split(" ; ")))


def _parse_op(text: str, rank: int) -> Op:
    text = text.strip()
    left_side, _, right_side = text.partition(" = ")
    right_side, has_options, options = right_side.partition(" {")
    head, *read_texts = right_side.split() or [text]
    match = _HEAD.fullmatch(head)
    if not match:
        raise ProgramError(f"{head!r} is not an op; an op reads like y[2,0] = F[2,0] params[2] y[1,0]")
    kind, *indices = match.groups()
    kind_of(kind)
    reads = tuple(map(_parse_value, read_texts))
    writes = () if left_side.strip() == "_" else tuple(map(_parse_value, left_side.split()))
    return Op(
        kind,
        *_parse_indices(*indices),
        rank,
        reads,
        writes,
        (),
        _parse_options(options.rstrip()) if has_options else (),
    )


def _parse_options(text: str) -> tuple[tuple[str, Any], ...]:
    try:
        # Parse "options(index=0, count=2)" as a Python call, and take only keywords with literal values: nothing is
        # evaluated. The end column proves that the text did not close the call early and go on behind it.
        assert text.endswith("}")
        call_text = f"options({text[:-1]})"
        call = parse_expression(call_text)
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        assert (call.end_col_offset, call.args) == (len(call_text.encode()), [])
        options = tuple((keyword.arg or "", ast.literal_eval(keyword.value)) for keyword in call.keywords)
        assert all(name for name, _ in options)
        assert len({name for name, _ in options}) == len(options)
        hash(options)
    except (ValueError, AssertionError, TypeError):
        rule = "is not a list of name=literal, each of a value that can be hashed"
        raise ProgramError(f"{{{shortened(text)} {rule}") from None
    return options


def refuse_long_words(text: str) -> str:
    """Return the text, or raise ProgramError for a word over the limit, so that errors may quote words."""
    for line_number, line in enumerate(text.splitlines(), 1):
        longest = max(line.replace(",", " ").split(), key=len, default="")
        if len(longest) > LONGEST_WORD:
            quotation = f"{shortened(longest, 20)!r} is a word of {len(longest)} characters"
            raise ProgramError(f"line {line_number}: {quotation}; the longest that are read have {LONGEST_WORD}.")
    return text
