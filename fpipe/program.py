"""The pipeline language: a training step written down as data.

The whole language, as a grammar::

    program ::= input*  op*  output*
    input   ::= value @ home,home...                              handed in by the caller, on these ranks
    output  ::= value = value @ home,home...                      result name = the value it is, wanted on these ranks
    op      ::= value* = KIND[stage,microbatch.slice] value* {options} @ rank
              | { op ; op } @ rank                                a PAIR: its parts may not read each other
    value   ::= name[stage,microbatch.slice]:port location        every bracket part and the port may be missing
    location ::= (nothing) | @rank | >rank | @host                itself, in a rank's memory, in flight, on the host
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
    y loss count carry                  what F writes: output, loss and its count, what a slice hands on
    res wres                            residuals: what B or I reads, and what I leaves for W
    dx dy dcarry                        cotangents: of a stage's k-th input, of its output where several are added
    g sum                               one microbatch's gradient of a stage's k-th parameter bundle, the running sum
    all                                 that sum over all data-parallel replicas, as all_loss, all_total, all_count
    cut                                 the sum over those replicas alone that share params out, as cut_loss, cut_total
    opt lr norms norm                   optimizer state and learning rate; the norms of a stage's gradients, that of all
    squares                             those of a stage's shards of gradients, not yet added up over replicas
    inputs:1 target:1 lr:1              those of the second of several training steps
    grads outputs                       result names, besides loss, count, state, params, opt and norm

The kinds: F forward, B full backward, I input gradient, W weight gradient, R recompute, PAIR, SEND,
RECV, SPLIT, ADD, SCALE, MERGE, REDUCE, GATHER, SCATTER, OFFLOAD, LOAD, FREE, NORM, UPDATE, VALIDATE,
UNSCALE. The set is open: `register_kind` adds one. Those of a stage that is a collective over a dimension of a mesh say
`{exchange='all_to_all', axis='ep'}`, and run on a lane of their own.
(The zero-bubble papers write B for our I and BW for our B; the letters here are those of torch.distributed.pipelining.)

No tensor, shape, module or device lives in a program. Stages are numbers until a reading binds them to a model.
"""

from __future__ import annotations

import csv
import gc
import io
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar

from fpipe.limits import argument_error
from fpipe.ops import KINDS as KINDS
from fpipe.ops import LANES as LANES
from fpipe.ops import PARAMETERS as PARAMETERS
from fpipe.ops import Input as Input
from fpipe.ops import Kind as Kind
from fpipe.ops import Op as Op
from fpipe.ops import Output as Output
from fpipe.ops import ProgramError as ProgramError
from fpipe.ops import Value as Value
from fpipe.ops import cell_of as cell_of
from fpipe.ops import is_exchange as is_exchange
from fpipe.ops import kind_of as kind_of
from fpipe.ops import lane_of as lane_of
from fpipe.ops import memory_of as memory_of
from fpipe.ops import pair as pair
from fpipe.ops import parse_lines
from fpipe.ops import parts_of as parts_of
from fpipe.ops import refuse_long_words as refuse_long_words
from fpipe.ops import register_kind as register_kind

Sources = tuple[int, ...]
"""The positions of the writers of what an op reads, in that order: -1 for an input, `NOWHERE` if nothing above does."""
NOWHERE = sys.maxsize  # later than any op
ALL_BUT = "all but"  # {saved=..} opens with it where it names the ops that are *not* saved


class HtmlRepr:
    """Mixin for values that a notebook draws; `fpipe.pictures` sets the painter.

    A program, timeline or chart is drawn itself. Others print their text, with the timelines of `pictured` below it.

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
"""The checks of a program where it enters the library; check.py, which imports this module, adds its rules here."""


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
        for name, kind in (("inputs", Input), ("ops", Op), ("outputs", Output)):
            parts = getattr(self, name)
            # A loop of its own, since a program may have a million ops.
            if not isinstance(parts, tuple | list) or not all(isinstance(part, kind) for part in parts):
                raise argument_error(name, tuple[kind, ...], parts)
        for rule in ENTRY_RULES:
            rule(self)

    @staticmethod
    def trusted(
        inputs: tuple[Input, ...],
        ops: tuple[Op, ...],
        outputs: tuple[Output, ...],
        sources: list[Sources] | None = None,
    ) -> Program:
        """Build a program from the parts that a rewrite has made, without checking it again."""
        # Past the dataclass's __init__, which would run the ENTRY_RULES: 3.5 s for a million ops, built in 11 s.
        program = object.__new__(Program)
        program.__dict__.update(inputs=inputs, ops=ops, outputs=outputs)
        if sources is not None:
            program.__dict__["sources"] = sources
        return program

    @cached_property
    def sources(self) -> list[Sources]:
        """For each op the positions of the writers of its reads: the index that check, order and simulate share."""
        return find_ordered_sources(self.inputs, self.ops)

    @cached_property
    def writer(self) -> dict[Value, int]:
        """The position of the op that writes each value, -1 for an input."""
        writer = {value: position for position, op in enumerate(self.ops) for value in op[6]}
        return {end.value: -1 for end in self.inputs} | writer

    @property
    def buffers(self) -> Mapping[int, Sequence[str]]:
        """For errors, the names of the buffers in the module state of each stage, if a model has named them."""
        return self.__dict__.get("_buffers", {})

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
        """Number of ranks, including ranks that are only homes."""
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
                if part.stage is not None and kind_of(part.kind).position == "table":
                    ranks[part.stage].add(op.rank)
        return tuple(min(stage_ranks) if len(stage_ranks) == 1 else tuple(sorted(stage_ranks)) for stage_ranks in ranks)

    def table(self, comms: bool = False) -> list[list[str]]:
        """Return the cells of each rank in order, without idle ones; with `comms` the cells of every op.

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
        """Return the table as CSV, one line a rank; `schedules.from_table` reads it back onto a base program."""
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
        inputs, ops, outputs = parse_lines(text)
        return Program(tuple(inputs), tuple(ops), tuple(outputs))

    @property
    def _fields(self) -> tuple[object, ...]:
        return (self.inputs, self.ops, self.outputs)

    @cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Program) and (self is value or self._fields == value._fields)

    def __repr__(self) -> str:
        sizes = (self.stages, self.microbatches, self.ranks, len(self.ops))
        return "<Program: {} stages, {} microbatches, {} ranks, {} ops>".format(*sizes)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.inputs, *self.ops, *self.outputs)))


def with_buffer_names(program: Program, buffers: Mapping[int, Sequence[str]]) -> Program:
    """Note the names of buffers in the module state of stages, which errors quote; return the program itself."""
    # In __dict__ and not a field: the names are no part of a program's value, and equal programs stay equal.
    if buffers and isinstance(program, Program):  # pyright: ignore[reportUnnecessaryIsInstance]
        program.__dict__["_buffers"] = buffers
    return program


def require_program(argument: object) -> Program:
    """Return the argument of a transform or a reading if it is a program, else raise TypeError."""
    if isinstance(argument, Program):
        return argument
    raise argument_error("program", Program, argument)


class _Writers(dict[Value, int]):
    def __missing__(self, value: Value) -> int:
        return NOWHERE


def find_ordered_sources(inputs: tuple[Input, ...], ops: Sequence[Op]) -> list[Sources]:
    """Return the sources of ops that stand in order; a read above its writer has the source NOWHERE."""
    # `writer` grows with the walk, so that it knows only the ops above. NOWHERE is larger than any position, and the
    # check finds a missing writer and a late one by the same comparison.
    writer = _Writers({program_input.value: -1 for program_input in inputs})
    sources: list[Sources] = []
    position_of, append = writer.__getitem__, sources.append
    with building():
        for position, op in enumerate(ops):
            append(tuple(map(position_of, op[5])))
            for value in op[6]:
                writer[value] = position
    return sources


_MANY_NEW_OBJECTS = 5_000


@contextmanager
def building() -> Generator[None]:
    """Disable the cyclic garbage collector while a program is built, or many modules are imported.

    A program is millions of tuples without a cycle: copying 10^5 ops takes 2 us an op without the collector, 8 with.
    """
    # On leaving, the collector would walk all the new objects once, at 3 us an op. gc.freeze moves them to the
    # permanent generation and gc.unfreeze from there to the oldest, both without a walk. Objects that someone else has
    # frozen would be unfrozen as well, so then it is left alone.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] > _MANY_NEW_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
