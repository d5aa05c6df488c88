"""Write a schedule down: by a name with options, such as hanayo:waves=2, as a table, or as a generator of its cells."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from fpipe.limits import MOST_OPS_OF_A_SHARE, check_whole_number, parse_expression, refuse_too_many_ops
from fpipe.program import Program, ProgramError
from fpipe.schedules.registry import Schedule, about
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Cell, Table, from_zero_bubble_letters, keys_of, read_table
from fpipe.transforms.place import RankRule, ascending_ranks, place
from fpipe.transforms.reorder import apply_table


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule of the registry with options, and a number of stages if not its default.

    >>> parse("hanayo:waves=2").program(2, 4)
    <Program: 8 stages, 4 microbatches, 2 ranks, 97 ops>
    """

    schedule: Schedule
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    stages: int | None = None

    def program(self, ranks: int, microbatches: int, costs: Callable[[float], Costs] | None = None) -> Program:
        """Return the program of a step at this size.

        Args:
            costs: `f(parts)`, the costs of an op if each rank cuts its share of a microbatch into this many; a schedule
                that orders by costs gets them, unless its options have some.

        Raises:
            ValueError: a rank cuts its share of a microbatch into too many ops, or they are too many for a program.
        """
        stages = self.schedule.stage_count(ranks, self.options) if self.stages is None else self.stages
        slices = self.options.get("slices")
        slices = slices if type(slices) is int else 1
        ops_per_rank = stages / ranks * slices
        if ops_per_rank > MOST_OPS_OF_A_SHARE:
            raise ValueError(f"stages times slices on a rank is at most {MOST_OPS_OF_A_SHARE}, found {ops_per_rank:g}.")
        refuse_too_many_ops(stages * slices, microbatches)
        takes_costs = "costs" in _parameters(self.schedule)
        options = ({"costs": costs(stages / ranks)} if costs is not None and takes_costs else {}) | self.options
        return self.schedule.program(ranks, microbatches, stages, **options)


def parse(text: str) -> NamedSchedule:
    """Read a name and its options; `stages` is the number of stages, whatever the schedule.

    Raises:
        ValueError: no name, no such schedule, or no such option of it.

    >>> parse("zb_auto:memory_cap=2.5,objective=span").options
    {'memory_cap': 2.5, 'objective': 'span'}
    >>> parse("gpipe:waves=2")
    Traceback (most recent call last):
    ValueError: gpipe has no option 'waves'; it has: stages.
    """
    return with_options(text, {})


def with_options(text: str, more_options: Mapping[str, Any]) -> NamedSchedule:
    """Read a name and its options, and add further options."""
    name, _, option_text = text.partition(":")
    schedule = about(name)
    parameters = _parameters(schedule)
    size_names = {next(iter(parameters)), "ranks", "microbatches"}
    # A comma separates options only in front of the next `name=`: a value may be a list with commas.
    options = dict(option(part) for part in re.split(r",(?=[A-Za-z_]\w*=)", option_text) if part) | dict(more_options)
    stages = options.pop("stages", None)
    if stages is not None:
        check_whole_number("stages", stages)
    # A factory with **options checks its own.
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = (key for key in options if key in size_names or (key not in parameters and not takes_any))
    unknown_option = next(unknown, None)
    if unknown_option is not None:
        option_names = ", ".join([*(parameter for parameter in list(parameters)[1:] if parameter != "costs"), "stages"])
        raise ValueError(f"{name} has no option {unknown_option!r}; it has: {option_names}.")
    return NamedSchedule(schedule, options, stages)


def option(text: str) -> tuple[str, Any]:
    """Read one option as its name and value; a value that is no literal stays text.

    >>> option("waves=2"), option("placement=v")
    (('waves', 2), ('placement', 'v'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"an option reads waves=2, found {text!r}.")
    try:
        return name, ast.literal_eval(parse_expression(value))
    except (ValueError, TypeError):
        return name, value


def _parameters(schedule: Schedule) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(schedule.factory).parameters)


def from_table(rows: Table, *, replicated: bool = False, notation: Literal["fpipe", "zb"] = "fpipe") -> Transform:
    """Place and order a program by a table.

    Args:
        rows: a list of cells for each rank, `{rank: cells}`, a grid or CSV text with one line a rank (a grid's lines
            may start with "rank 0 |"), or the path of such a file. Idle cells ("", ".", None) are left out. A cell
            names an F, B, I, W or R; a pair reads "(0F7;7B3)". B or I and W, cell by cell: a full backward that the
            table names as I and W is split, and B names I then W of a split one.
        replicated: stages may be on several ranks, which then hold replicas of their parameters.
        notation: "zb" reads the letters of the zero-bubble papers: B is our I, and BW our B.

    Raises:
        ProgramError: a cell that cannot be read (with line and column), a missing rank, an op that is missing, stands
            twice or is not in the program, a stage on two ranks, orders that wait for each other for ever.
        FileNotFoundError: there is no such file.

    >>> import fpipe
    >>> table = '''
    ... 0F0 0F1 .   0B0 .   0B1
    ... .   1F0 1B0 1F1 1B1 .
    ... '''
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(table))(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1  .  0B0  .  0B1
    rank 1 |  .  1F0 1B0 1F1 1B1  .
    """
    if notation not in ("fpipe", "zb"):
        raise ValueError(f"notation is 'fpipe' or 'zb', found {notation!r}.")
    cells = read_table(rows)
    cells = from_zero_bubble_letters(cells) if notation == "zb" else cells

    @as_transform
    def transform(program: Program) -> Program:
        # A stage in the rows of several ranks has its parameters on each of them.
        homes = None
        if replicated:
            ranks_by_stage: dict[int, set[int]] = {stage: set() for stage in range(program.stages)}
            for rank, row in enumerate(cells):
                for cell in row:
                    for key in keys_of(cell):
                        ranks_by_stage.setdefault(key[1] or 0, set()).add(rank)
            homes = {stage: sorted(ranks) for stage, ranks in ranks_by_stage.items()}
        return apply_table(program, cells, move=True, homes=homes)

    return transform


def from_generator(
    f: Callable[[int, int, int], Iterable[Cell | None]], ranks: int, placement: str | Sequence[int] = "linear"
) -> Transform:
    """Order a program by a generator: `f(rank, ranks, microbatches)` yields the cells of one rank.

    Args:
        f: gives the cells of a rank in order, each as text ("2F0", "(0F7;7B3)") or as `(kind, stage, microbatch,
            slice)`; idle ones ("", ".", None) are left out.
        ranks: the number of ranks.
        placement: "linear", "looped", "v", or a list with the rank of each stage.

    Raises:
        ProgramError: a cell that cannot be read, names no op of the program, stands twice or is on another rank (which
            rank, and which of its cells); an op that no rank names.

    >>> import fpipe
    >>> def all_forwards_first(rank, ranks, microbatches):
    ...     yield from (f"{rank}F{index}" for index in range(microbatches))
    ...     yield from (f"{rank}B{index}" for index in reversed(range(microbatches)))
    >>> schedule = fpipe.schedules.from_generator(all_forwards_first, ranks=2)
    >>> print(fpipe.plot(fpipe.chain(fpipe.split(2), schedule)(fpipe.program(2))))
    rank 0 | 0F0 0F1  .   .  0B1 0B0
    rank 1 |  .  1F0 1F1 1B1 1B0  .
    """
    check_whole_number("ranks", ranks)

    @as_transform
    def transform(program: Program) -> Program:
        program = placed_on(program, placement, ranks, "from_generator")
        rows = [checked_row(rank, f(rank, ranks, program.microbatches), 4 * len(program.ops)) for rank in range(ranks)]
        return apply_table(program, read_table(rows), move=False)

    return transform


def placed_on(program: Program, placement: str | Sequence[int] | RankRule, ranks: int, name: str) -> Program:
    """Return the program placed on this many ranks, which a placement has to name all."""
    resolved = ascending_ranks(program, ranks) if placement == "linear" else placement
    program = place(resolved, ranks=ranks if isinstance(resolved, str) else None)(program)
    if program.ranks != ranks:
        raise ProgramError(f"the placement names {program.ranks} ranks, but {name} got {ranks}.")
    return program


def checked_row(rank: int, cells: Any, limit: int) -> list[Any]:
    """Return the cells that a generator yields; a key without a slice gets None for it."""
    # A generator may never stop. No row has more cells than four times the ops, idle ones included.
    if isinstance(cells, str) or not isinstance(cells, Iterable):
        raise ProgramError(f"rank {rank}: the generator gave {cells!r}; it yields cells such as '{rank}F0'.")
    row: list[Any] = [*islice(cells, limit + 1)]  # pyright: ignore[reportUnknownArgumentType]
    if len(row) > limit:
        raise ProgramError(f"rank {rank}: {limit} cells and no end; a generator stops after its last op.")
    row = [(*cell, None) if isinstance(cell, tuple) and len(cell) == 3 else cell for cell in row]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    for cell in row:
        if isinstance(cell, tuple) and [*map(type, cell)][:2] != [str, int]:  # pyright: ignore[reportUnknownArgumentType]
            raise ProgramError(f"rank {rank}: {cell!r} is not a cell, such as '2F0', '(0F7;7B3)' or ('F', 2, 0, None).")
    return row
