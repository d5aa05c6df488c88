"""The registry of schedules: factory, paper, formulas and accepted sizes of each name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import ParamSpec

from fpipe.limits import check_whole_number, checked, is_transform
from fpipe.program import Program, ProgramError
from fpipe.transforms._rewrite import Transform, as_transform, chain
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

P = ParamSpec("P")
Refusal = Callable[[int, int, int], str | None]
"""`f(ranks, stages, microbatches)` returns why a schedule refuses these sizes, or None."""


@dataclass(frozen=True)
class Schedule:
    """A named schedule: its factory and the facts about it.

    Args:
        name: its name.
        factory: `factory(ranks, **options) -> Transform`.
        stages_per_rank: the default number of stages of a rank, or `f(ranks)`, that of all ranks together.
        title, source: its name in the literature, and the paper.
        idle, peak: formulas with p ranks, m microbatches, v stages a rank, and the costs F, B, W, T = F+B+W of a whole
            device share: the idle time, and the most microbatches held on rank r.
        accepts: the accepted sizes, in words.
        refuses: the same as a function.
        stages_per: stages a rank for each unit of an option: `{"waves": 2}`.
        searches: whether it searches an order if it gets costs.

    >>> schedule = about("zb_h1")
    >>> schedule.title, schedule.idle, schedule.peak
    ('ZB-H1 (ZB1P)', '(p-1)(F+B-W), m >= p', 'min(m, p)')
    >>> about("chimera").refuses(3, 3, 4)[:32]
    'the number of ranks is even, fou'
    """

    name: str
    factory: Callable[..., Transform]
    stages_per_rank: int | Callable[[int], int] = 1
    title: str = ""
    source: str = ""
    idle: str = ""
    peak: str = ""
    accepts: str = "any"
    refuses: Refusal = lambda ranks, stages, microbatches: None
    stages_per: Mapping[str, int] = field(default_factory=dict[str, int])
    searches: bool = False

    def stage_count(self, ranks: int, options: Mapping[str, object]) -> int:
        """Return the default number of stages on this many ranks.

        >>> about("hanayo").stage_count(2, {}), about("hanayo").stage_count(2, {"waves": 3})
        (4, 12)
        """
        if callable(self.stages_per_rank):
            return self.stages_per_rank(ranks)
        stages_and_count = ((stage_count, options.get(option)) for option, stage_count in self.stages_per.items())
        stage_counts = (stages * count for stages, count in stages_and_count if isinstance(count, int))
        return ranks * next(stage_counts, self.stages_per_rank)

    def program(self, ranks: int, microbatches: int, stages: int | None = None, **options: object) -> Program:
        """Return the program of one step of a plain chain of stages under this schedule, merged.

        >>> about("gpipe").program(ranks=2, microbatches=4)
        <Program: 2 stages, 4 microbatches, 2 ranks, 31 ops>
        """
        steps = (split(check_whole_number("microbatches", microbatches)), self.factory(ranks, **options), merge())
        return chain(*steps)(base_program(self.stage_count(ranks, options) if stages is None else stages))


SCHEDULE_BY_NAME: dict[str, Schedule] = {}


def register(name: str, factory: Callable[..., Transform], *, stages_per_rank: int | Callable[[int], int] = 1) -> None:
    """Register your own schedule under a name, by which the command line, the tables and the tests find it.

    Args:
        name: a new name, as Python writes them.
        factory: `factory(ranks) -> Transform`.
        stages_per_rank: the default number of stages of a rank, or `f(ranks)`, that of all ranks together: `lambda
            ranks: ranks + 1`.

    Raises:
        TypeError: the factory is no function, or a transform.
        ValueError: the name is taken, or is no name; a rank without a stage.

    >>> register("as_it_comes", lambda ranks: get("gpipe")(ranks))
    >>> "as_it_comes" in names()
    True
    >>> _ = SCHEDULE_BY_NAME.pop("as_it_comes")
    """
    if not name.isidentifier():
        raise ValueError(f"a schedule's name is a word like 'my_schedule', found {name!r}.")
    if is_transform(factory):
        raise TypeError(
            f"{name!r} is registered as a transform; a schedule is a function of ranks: use lambda ranks: ..."
        )
    if not callable(stages_per_rank):
        check_whole_number("stages_per_rank", stages_per_rank)
    _add_schedule(Schedule(name, factory, stages_per_rank))


def published(
    title: str,
    source: str,
    *,
    idle: str,
    peak: str,
    accepts: str = "any",
    stages_per_rank: int = 1,
    refuses: Refusal | None = None,
    slices: bool = False,
    stages_per: Mapping[str, int] | None = None,
    searches: bool = False,
) -> Callable[[Callable[P, Transform]], Callable[P, Transform]]:
    """Register a schedule of the literature under its function's name.

    The decorated function refuses sizes that the schedule does not accept, and sequence slices unless it orders them.
    Its docstring ends with source and formulas, so that `help` shows the facts of the registry.
    """

    def decorate(factory: Callable[P, Transform]) -> Callable[P, Transform]:
        @wraps(factory)
        def refusing(*args: P.args, **options: P.kwargs) -> Transform:
            ranks = check_whole_number("ranks", args[0] if args else options.get("ranks"))
            transform = factory(*args, **options)

            # Sizes are known only when the transform meets a program.
            @as_transform
            def checked(program: Program) -> Program:
                refusal = refuses(ranks, program.stages, program.microbatches) if refuses else None
                if not slices and program.slices > 1:
                    refusal = "this program has sequence slices, which it does not order; use seq1f1b or from_table."
                if refusal is not None:
                    raise ProgramError(f"{factory.__name__}: {refusal}")
                return transform(program)

            return checked

        headed_facts = (("Source", source), ("Idle", idle), ("Peak", peak), ("Accepts", accepts))
        facts = "\n".join(f"{heading}: {text}" for heading, text in headed_facts)
        refusing.__doc__ = f"{inspect.cleandoc(factory.__doc__ or title)}\n\n{facts}"
        door = checked(refusing, "fpipe.schedules")
        schedule = Schedule(factory.__name__, door, stages_per_rank, title, source, idle, peak, accepts)
        _add_schedule(
            replace(schedule, refuses=refuses or schedule.refuses, stages_per=stages_per or {}, searches=searches)
        )
        return door

    return decorate


def _add_schedule(schedule: Schedule) -> None:
    if schedule.name in SCHEDULE_BY_NAME:
        raise ValueError(f"{schedule.name!r} is taken; known schedules: {', '.join(SCHEDULE_BY_NAME)}.")
    SCHEDULE_BY_NAME[schedule.name] = schedule


def names() -> tuple[str, ...]:
    """Return the names of all schedules, in the order of registration.

    >>> names()[:2]
    ('gpipe', 'one_f_one_b')
    """
    return tuple(SCHEDULE_BY_NAME)


def about(name: str) -> Schedule:
    """Return the facts of a schedule: paper, formulas, sizes.

    Raises:
        ValueError: nothing has this name; the closest are offered.

    >>> about("looped_bsf")
    Traceback (most recent call last):
    ValueError: there is no schedule 'looped_bsf'; did you mean looped_bfs? fpipe.schedules.names() lists them all.
    """
    if name not in SCHEDULE_BY_NAME:
        close = similar_names(name.lower())
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        if name in ("pipedream", "pipedream_2bw"):
            hint = f"fpipe.schedules.{name}(ranks, steps=k) behind fpipe.update() orders several training steps; "
        raise ValueError(f"there is no schedule {name!r}; {hint}fpipe.schedules.names() lists them all.")
    return SCHEDULE_BY_NAME[name]


def similar_names(text: str) -> list[str]:
    """Return names that may be meant: those whose title has the text (1F1B, ZB-V, VPP), or with a similar spelling."""
    # Fragments of titles first, those at the front of a title before others; else the edit distance of names.
    titles = {name: schedule.title.lower() for name, schedule in SCHEDULE_BY_NAME.items()}
    positions = sorted((title.index(text), name) for name, title in titles.items() if len(text) > 1 and text in title)
    by_title = [name for _, name in positions][:3]
    return by_title or difflib.get_close_matches(text, SCHEDULE_BY_NAME, n=3, cutoff=0.5)


def get(name: str) -> Callable[..., Transform]:
    """Return the factory of a schedule: `get("gpipe")(4)` is `gpipe(4)`.

    >>> get("gpipe").__name__
    'gpipe'
    """
    return about(name).factory
