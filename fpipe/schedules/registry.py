"""The schedules by name: what makes each one, where it comes from, and which sizes it serves."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import ParamSpec

from fpipe.limits import whole
from fpipe.program import Program, ProgramError
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import Transform, chain, transforming
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split

P = ParamSpec("P")
Refusal = Callable[[int, int, int], str | None]
"""`f(ranks, stages, microbatches)`: why a schedule does not serve these sizes, or None if it does."""


@dataclass(frozen=True)
class Schedule:
    """Facts of a schedule beside its order.

    Args:
        name: what it is called by.
        factory: `factory(ranks, **options) -> Transform`.
        stages_per_rank: how many stages each rank has where nothing else is said.
        title, source: what people call it, and the paper it is from.
        idle, peak: formulas with p ranks, m microbatches, v stages a rank, and the costs F, B, W, T = F+B+W of a whole
            device share: the idle time, and the most microbatches held on rank r.
        accepts: the sizes it serves, in words.
        refuses: the same as a function.
        stages_per: how many stages each rank has for one more of an option, by its name: `{"waves": 2}`.
        searches: whether it searches an order when it is told costs.

    >>> schedule = about("zb_h1")
    >>> schedule.title, schedule.idle, schedule.peak
    ('ZB-H1 (ZB1P)', '(p-1)(F+B-W), m >= p', 'min(m, p)')
    >>> about("chimera").refuses(3, 3, 4)[:32]
    'the number of ranks is even, fou'
    """

    name: str
    factory: Callable[..., Transform]
    stages_per_rank: int = 1
    title: str = ""
    source: str = ""
    idle: str = ""
    peak: str = ""
    accepts: str = "any"
    refuses: Refusal = lambda ranks, stages, microbatches: None
    stages_per: Mapping[str, int] = field(default_factory=dict[str, int])
    searches: bool = False

    def wants(self, ranks: int, options: Mapping[str, object]) -> int:
        """How many stages it has on some ranks, where nothing else is said.

        >>> about("hanayo").wants(2, {}), about("hanayo").wants(2, {"waves": 3})
        (4, 12)
        """
        said = ((each, options.get(word)) for word, each in self.stages_per.items())
        return ranks * next((each * count for each, count in said if isinstance(count, int)), self.stages_per_rank)

    def program(self, ranks: int, microbatches: int, stages: int | None = None, **options: object) -> Program:
        """A step of a plain chain of stages under this schedule, merged.

        >>> about("gpipe").program(ranks=2, microbatches=4)
        <Program: 2 stages, 4 microbatches, 2 ranks, 31 ops>
        """
        steps = (split(microbatches), self.factory(ranks, **options), merge())
        return chain(*steps)(base_program(self.wants(ranks, options) if stages is None else stages))


_SCHEDULES: dict[str, Schedule] = {}


def register(name: str, factory: Callable[..., Transform], *, stages_per_rank: int = 1) -> None:
    """Give a schedule of your own a name, under which the command line, the tables and the tests find it.

    Args:
        name: a new name, as Python writes them.
        factory: `factory(ranks) -> Transform`.
        stages_per_rank: how many stages a rank has where nothing else is said.

    Raises:
        TypeError: the factory is no function, or a transform.
        ValueError: the name is taken, or is no name; a rank without a stage.

    >>> register("as_it_comes", lambda ranks: get("gpipe")(ranks))
    >>> "as_it_comes" in names()
    True
    >>> _ = _SCHEDULES.pop("as_it_comes")
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a schedule's name is a word such as 'my_schedule', found {name!r}.")
    if not callable(factory):
        raise TypeError(f"a schedule is a function of ranks that gives a transform, found {factory!r}.")
    if next(iter(inspect.signature(factory).parameters), "") == "program":  # as each transform of this library has it
        raise TypeError(
            f"a schedule is a function of ranks that gives a transform; {name!r} is to be the transform itself: say "
            "lambda ranks: ..."
        )
    whole("stages_per_rank", stages_per_rank)
    _add(Schedule(name, factory, stages_per_rank))


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
    """Register a schedule of the literature under its function's name, and refuse the sizes that it does not serve, and
    sequence slices, if it does not order them.

    Its docstring ends with its source and its formulas, so that `help` shows what the registry knows.
    """

    def decorate(factory: Callable[P, Transform]) -> Callable[P, Transform]:
        @wraps(factory)
        def refusing(*args: P.args, **options: P.kwargs) -> Transform:
            name = factory.__name__
            try:
                ranks = inspect.signature(factory).bind(*args, **options).arguments["ranks"]
            except TypeError as error:
                raise TypeError(f"{name}() {error}; it takes the number of ranks, as {name}(4).") from None
            if isinstance(ranks, Program):
                raise TypeError(
                    f"{name} makes a transform of a number of ranks: say {name}(4), and hand that the program."
                )
            ranks = whole("ranks", ranks)
            transform = factory(*args, **options)

            @transforming
            def checked(program: Program) -> Program:
                why = refuses(ranks, program.stages, program.microbatches) if refuses else None
                if not slices and program.slices > 1:
                    why = "this program has sequence slices, which it does not order; use seq1f1b or from_table."
                if why is not None:
                    raise ProgramError(f"{factory.__name__}: {why}")
                return transform(program)

            return checked

        said = (("Source", source), ("Idle", idle), ("Peak", peak), ("Accepts", accepts))
        facts = "\n".join(f"{word}: {text}" for word, text in said)
        refusing.__doc__ = f"{inspect.cleandoc(factory.__doc__ or title)}\n\n{facts}"
        known = Schedule(factory.__name__, refusing, stages_per_rank, title, source, idle, peak, accepts)
        _add(replace(known, refuses=refuses or known.refuses, stages_per=stages_per or {}, searches=searches))
        return refusing

    return decorate


def _add(schedule: Schedule) -> None:
    if schedule.name in _SCHEDULES:
        raise ValueError(f"{schedule.name!r} is taken; known schedules: {', '.join(_SCHEDULES)}.")
    _SCHEDULES[schedule.name] = schedule


def names() -> tuple[str, ...]:
    """The names of all schedules, in the order in which they were registered.

    >>> names()[:2]
    ('gpipe', 'one_f_one_b')
    """
    return tuple(_SCHEDULES)


def about(name: str) -> Schedule:
    """Look up the facts of a schedule: paper, formulas, sizes.

    Raises:
        ValueError: nothing has this name; the closest are offered.

    >>> about("looped_bsf")
    Traceback (most recent call last):
    ValueError: there is no schedule 'looped_bsf'; did you mean looped_bfs? fpipe.schedules.names() lists them all.
    """
    if not isinstance(name, str) or name not in _SCHEDULES:  # pyright: ignore[reportUnnecessaryIsInstance]
        close = _closest(str(name).lower())
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        if name in ("pipedream", "pipedream_2bw"):
            hint = f"fpipe.schedules.{name}(ranks, steps=k) behind fpipe.update() orders several training steps; "
        raise ValueError(f"there is no schedule {name!r}; {hint}fpipe.schedules.names() lists them all.")
    return _SCHEDULES[name]


def _closest(said: str) -> list[str]:
    """The names that may be meant: by title (1F1B, ZB-V, VPP), or spelled much like this."""
    titles = {name: schedule.title.lower() for name, schedule in _SCHEDULES.items()}
    by_title = sorted((title.index(said), name) for name, title in titles.items() if len(said) > 1 and said in title)
    return [name for _, name in by_title][:3] or difflib.get_close_matches(said, _SCHEDULES, n=3, cutoff=0.5)


def get(name: str) -> Callable[..., Transform]:
    """The function that makes a schedule: `get("gpipe")(4)` is `gpipe(4)`.

    >>> get("gpipe").__name__
    'gpipe'
    """
    return about(name).factory
