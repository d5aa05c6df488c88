"""Define the options and arguments of the commands, each once, with the errors for wrong ones."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from fpipe.cli import cost_options as costs
from fpipe.cli.cost_options import TypedCosts
from fpipe.interop import from_json, torch_pipelining
from fpipe.limits import check_whole_number, read_text
from fpipe.pictures.plot import plot
from fpipe.pictures.style import SWITCHES
from fpipe.pictures.style import Style as PictureStyle
from fpipe.program import KINDS, Program, ProgramError
from fpipe.schedules import names
from fpipe.schedules.notations import from_table, option, with_options
from fpipe.schedules.notations import parse as parse_name
from fpipe.timing.cluster import Cluster, parse_bytes
from fpipe.transforms._rewrite import chain
from fpipe.transforms.cells import keys_of, read_table, read_text_file, require_file, sizes_of
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import GATHERS, NEVER, checked_policies
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

if TYPE_CHECKING:
    from fpipe.model import Model


# Make a program of what is typed: the name of a schedule with sizes, or a file in any format.

_TORCH = re.compile(r"OVERLAP_F_B|[0-9](SEND_|RECV_|UNSHARD|RESHARD|REDUCE_)")


def is_file(text: str) -> bool:
    """Whether a text means a file: "-" (standard input), a path that exists, or a text that looks like a path."""
    return text.partition(":")[0] not in names() and (text == "-" or Path(text).is_file() or "/" in text or "." in text)


def read_program(file: str, *, replicated: bool = False) -> Program:
    """Read the program in a file: a program's text, JSON, a table (grid or CSV), or a table of torch's."""
    text = read_text(sys.stdin, "standard input") if file == "-" else read_text_file(Path(file))
    return program_of(text, replicated=replicated)


def program_of(text: str, *, replicated: bool = False) -> Program:
    """Read a program from a text in any format.

    >>> program_of("0F0 0F1 0B0 0B1\\n1F0 1F1 1B0 1B1")
    <Program: 2 stages, 2 microbatches, 2 ranks, 15 ops>
    """
    if not text.strip():
        raise ProgramError("there is nothing in it; write a program, a table, CSV or JSON.")
    # Each format is told by a sign that no other has: JSON by `{"`, a program's text by ` = .. @ `, torch's tables by
    # names such as 1SEND_F0. What is left is a grid or CSV of cells.
    if text.lstrip().startswith("{") and '"' in text.partition("\n")[0]:
        return from_json(text)
    if " = " in text and " @ " in text:
        return Program.parse(text)
    if _TORCH.search(text):
        return torch_pipelining.from_csv(text)
    rows = read_table(text)
    keys = [key for row in rows for cell in row for key in keys_of(cell)]
    if not keys:
        raise ProgramError("the table names no F, B, I or W.")
    stages, microbatches, slices = sizes_of(keys)
    recomputed = {(key[1], key[2]) for key in keys if key[0] == "R"}
    steps = (
        split(microbatches, slices=slices),
        checkpoint(lambda stage, microbatch: (stage, microbatch) in recomputed),
        from_table(rows, replicated=replicated),
        merge(),
    )
    return chain(*steps)(base_program(stages))


def table_of(program: Program) -> str:
    """Return the table of a program as CSV, if that says all of it.

    Raises:
        ProgramError: the table reads back as another program, such as one without its offloads.
    """
    text = program.to_csv()
    try:
        read_back = program_of(text, replicated=True)
    except ProgramError as error:
        raise ProgramError(f"a table cannot say this: {error} Write a .fpipe file.") from None
    lost = sorted({op.kind for op in program.ops} - {op.kind for op in read_back.ops} - {"SEND", "RECV", "FREE"})
    if lost or read_back.table() != program.table():
        losses = ", ".join(lost) or "where some ops stand"
        raise ProgramError(f"a table would lose {losses}: write a .fpipe file.")
    return text


T = TypeVar("T")


def usage(reading: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser of an option so that its errors end with exit code 2 and the usage line."""

    def read_or_refuse(text: str) -> T:
        try:
            return reading(text)
        except (ValueError, OSError, ImportError) as error:
            raise typer.BadParameter(str(error)) from None

    return read_or_refuse


def parsed_by(reading: Callable[[str], Any], *names: str, metavar: str, help: str) -> Any:
    """Return an option that a function parses; without names, an argument."""
    if not names:
        return typer.Argument(metavar=metavar, parser=usage(reading), help=help)
    return typer.Option(*names, metavar=metavar, parser=usage(reading), help=help)


def schedule_or_file(text: str) -> str:
    """Return the name of a schedule or of an existing file; raise an error for another text."""
    if is_file(text):
        if text != "-":
            require_file(Path(text))
        return text
    try:
        parse_name(text)
    except ValueError as error:
        # In a shell a command lists the names.
        raise ValueError(str(error).replace("fpipe.schedules.names()", "python -m fpipe schedules")) from None
    return text


def schedule_name(text: str) -> str:
    """Return the name of a schedule; raise ValueError for a file."""
    if is_file(text):
        raise ValueError(f"name a schedule; found the file {text!r}. Register it in a file for --import.")
    return schedule_or_file(text)


def load_module(module: str) -> ModuleType:
    """Import a module, or run a file, once."""
    # `python -m` has the working folder on its path; an installed script has its own folder there instead.
    sys.path.insert(0, "")
    try:
        if module.startswith(".") and not module.endswith(".py"):
            raise ValueError(f"{module!r} is a relative name; say package.module, or the path of a .py file.")
        if not module.endswith(".py"):
            return importlib.import_module(module)
        if not Path(module).is_file():
            raise ValueError(f"there is no file {module!r}.")
        return _run_file(Path(module).resolve())
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno} is no Python: {error.msg}.") from None


# A file may be named twice, for its schedules and for its model; a second run would register its schedules again.
@cache
def _run_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    namespace = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namespace)
    return namespace


def function(text: str) -> Callable[[], Any]:
    """Load a function from a module or a .py file."""
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise ValueError(f"a function reads mine.py:step or package.module:step, found {text!r}.")
    loaded = getattr(load_module(module), name, None)
    if not callable(loaded):
        raise ValueError(f"there is no function {name!r} in {module}.")
    return loaded


def numbers(text: str) -> list[int]:
    """Parse whole numbers, as in 8/16/32."""
    try:
        return [check_whole_number("each number", int(part)) for part in text.split("/")]
    except ValueError:
        raise ValueError(f"several numbers read 8/16/32, found {text!r}.") from None


class Bytes(float):
    """An amount that was typed with a unit."""


def amount(text: str) -> float:
    """Parse an amount of memory: a number of microbatches, or bytes as in 40GiB."""
    try:
        return float(text)
    except ValueError:
        return Bytes(parse_bytes(text))


def refuse_other_unit(memory: float | None, *, has_bytes: bool) -> None:
    """Raise ValueError unless the memory of a rank has the unit of the values' costs: both in bytes, or neither."""
    if isinstance(memory, Bytes) and not has_bytes:
        raise ValueError("the memory of a rank is in bytes, so --costs need bytes too, as in y=8MiB,res=40MiB.")
    if memory is not None and not isinstance(memory, Bytes) and has_bytes:
        raise ValueError(
            f"--costs are in bytes, and the memory of a rank ({memory:g}) has no unit: say 40GiB, or {memory:.0f}B."
        )


def _picture(format: str, help: str, ending: str = "") -> Any:
    ending = ending or f".{format}"

    def picture(text: str) -> Path:
        if Path(text).suffix != ending:
            raise ValueError(f"--{format} writes {ending}, found {text!r}; name it {Path(text).with_suffix(ending)}.")
        return Path(text)

    return parsed_by(picture, f"--{format}", metavar=f"FILE{ending}", help=help)


_STYLE_KEYS = tuple(field.name for field in fields(PictureStyle) if field.name != "colours")


def parse_style(text: str) -> PictureStyle:
    """Parse the option --style, width_mm=84,memory=no; KIND=COLOUR colours a kind of op.

    >>> style = parse_style("width_mm=84,labels=none,memory=no,window=0/20,ranks=a/b,F=#2a66be")
    >>> style.width_mm, style.labels, style.memory, style.window, style.ranks, style.colours
    (84.0, 'none', False, (0.0, 20.0), ['a', 'b'], {'F': '#2a66be'})
    """
    values: dict[str, Any] = {}
    colours: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key in KINDS:
            colours[key] = value
        elif key in _STYLE_KEYS:
            values[key] = _style_value(key, value)
        else:
            close = difflib.get_close_matches(key, _STYLE_KEYS, 1)
            meant = f"did you mean {close[0]}?" if close else f"known: {', '.join(_STYLE_KEYS)}."
            raise ValueError(f"a style has no {key!r}; {meant} Colours are said by kind: F=#2a66be.")
    return PictureStyle(**values, colours=colours)


def _style_value(key: str, text: str) -> Any:
    if key in SWITCHES:
        if text not in ("yes", "no"):
            raise ValueError(f"{key}= is yes or no, found {text!r}.")
        return text == "yes"
    if key == "labels":
        return text
    if key == "ranks":
        return text.split("/")
    if key == "differences" and text.isdecimal():
        return int(text)
    try:
        numbers = tuple(map(float, text.split("/")))
    except ValueError:
        raise ValueError(f"{key}= is {'start/end' if key == 'window' else 'a number'}, found {text!r}.") from None
    return numbers if key == "window" else numbers[0]


def whole_number(*names: str, help: str, minimum: int = 1) -> Any:
    """Return an option for a whole number."""

    def parse_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"it is a whole number, at least {minimum}; found {text!r}.") from None
        return check_whole_number("it", number, minimum=minimum, maximum=math.inf)

    return parsed_by(parse_number, *names, metavar="N", help=help)


_WITH_OPTIONS = "with options behind a colon (hanayo:waves=2)"
NameOrFile = Annotated[
    str,
    parsed_by(
        schedule_or_file, metavar="NAME|FILE", help=f"A schedule's name, {_WITH_OPTIONS}, or a file ('-' reads a pipe)."
    ),
]
NamesOrFiles = Annotated[
    list[str] | None,
    parsed_by(schedule_or_file, metavar="NAME|FILE", help=f"Names, {_WITH_OPTIONS}, and files; none: all names."),
]
Ranks = Annotated[int, whole_number("--ranks", "-p", help="Ranks (of a NAME).")]
Microbatches = Annotated[int, whole_number("--microbatches", "-m", help="Microbatches (of a NAME).")]
Stages = Annotated[
    int | None, whole_number("--stages", "-s", help="Stages; by default as many a rank as the schedule wants.")
]
Options = Annotated[
    list[Any] | None, parsed_by(option, "--option", "-o", metavar="WORD=VALUE", help="Of the schedule: -o waves=2.")
]
Costs = Annotated[
    Any,
    parsed_by(
        costs.parse,
        "--costs",
        "-c",
        metavar="LIST",
        help="Seconds, or 10ms, 5us. F=1,B=1,W=1,c=0.1: forward, input gradient and weight gradient of a microbatch "
        "on a whole rank, and the latency of a transfer, as papers count. forward=1,backward_input=1/2/1: of one "
        "stage's op, or one for each stage; 1:4/2:2 of each microbatch too. Bytes of values: y=8MiB (and dx), "
        "res=40MiB (and wres), params=2GiB (and gradients).",
    ),
]
OnCluster = Annotated[
    Any,
    parsed_by(
        Cluster.parse,
        "--cluster",
        metavar="TEXT",
        help="What it runs on: '2 hosts x 4 ranks; inside 5us 200GB/s; between 20us 25GB/s shared; rank 3 speed 0.8 "
        "memory 40GiB'. Bandwidths need bytes in --costs.",
    ),
]
Seed = Annotated[int, whole_number("--seed", help="Of the random choices.", minimum=0)]
Shard = Annotated[
    list[str] | None,
    parsed_by(
        lambda text: checked_policies([text], (*GATHERS, NEVER))[0],
        "--shard",
        metavar="|".join(GATHERS),
        help="When parameters that replicas share are gathered; of a plan also 'never', whole ones. Repeatable.",
    ),
]
Replicated = Annotated[bool, typer.Option("--replicated", help="A table may put a stage on several ranks.")]
Counts = Annotated[Any, parsed_by(numbers, "--microbatches", "-m", metavar="LIST", help="Numbers to try: 8/16/32.")]
OfModel = Annotated[
    Any,
    parsed_by(
        function,
        "--model",
        metavar="MODULE:FUNCTION",
        help="A function, in a module or a .py file, that returns (model, params, batch) or (model, params, batch, "
        "state).",
    ),
]
Svg = Annotated[Path | None, _picture("svg", "Draw it, to scale, for a page.")]
Png = Annotated[Path | None, _picture("png", "Draw it for a document (needs matplotlib).")]
Pdf = Annotated[Path | None, _picture("pdf", "The same as PDF, for a paper (needs matplotlib).")]
Html = Annotated[Path | None, _picture("html", "Draw it on a page to zoom into.")]
Perfetto = Annotated[Path | None, _picture("perfetto", "A trace for ui.perfetto.dev.", ".json")]
Style = Annotated[
    Any,
    parsed_by(
        parse_style,
        "--style",
        metavar="LIST",
        help="How the files look: width_mm=84, font_pt=7, labels=all, microbatch or none, ranks=GPU 0/GPU 1, "
        "window=0/20, F=#2a66be; yes or no: memory, waits, arrows, figures, legend, critical_path.",
    ),
]


def call_model(function: Callable[[], Any]) -> tuple[Model, Any, Any, Any]:
    """Call the function of --model; return (model, params, batch, state), the state None if there is none."""
    return checked_model(call_with_sizes(function))


def call_with_sizes(function: Callable[..., Any], **sizes: int) -> Any:
    """Call the function of --model with the sizes for which it has parameters."""
    arguments: dict[str, int] = {}
    try:
        signature = inspect.signature(function)
        arguments = {name: sizes[name] for name in signature.parameters if name in sizes}
        signature.bind(**arguments)
    except TypeError as error:
        kind = f"of {', '.join(sizes)} or some of them" if sizes else "without arguments"
        raise ValueError(f"--model is a function {kind}: {error}.") from None
    except ValueError:
        # A function of a C extension need not have a signature.
        pass
    return function(**arguments)


def checked_model(returned: Any) -> tuple[Model, Any, Any, Any]:
    """Return (model, params, batch, state) if a function of --model has returned that, or all but the state."""
    # This imports torch, without which other commands start.
    from fpipe.model import require_model

    if not isinstance(returned, tuple) or len(returned) not in (3, 4):  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"--model returns (model, params, batch) or (model, params, batch, state), found {returned!r:.80}."
        )
    require_model(returned[0])  # pyright: ignore[reportUnknownArgumentType]
    return (*returned, None)[:4]  # pyright: ignore[reportReturnType, reportUnknownVariableType]


def is_typed(typed: typer.Context, name: str) -> bool:
    """Whether an option was typed, or has its default."""
    source = typed.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def refuse_sizes_of_files(typed: typer.Context, texts: Sequence[str]) -> None:
    """Raise an error if a size or option of a schedule is typed, and all schedules are files, which have their own."""
    names = [name for name in ("ranks", "microbatches", "stages", "option") if is_typed(typed, name)]
    if names and texts and all(map(is_file, texts)):
        sentence = f"--{names[0]} is of a schedule by name; {texts[0]} is a file, which has its own."
        raise typer.BadParameter(sentence, ctx=typed)


@dataclass(frozen=True)
class Sized:
    """The size and options of a named schedule, and how the table of a file is read."""

    ranks: Ranks = 4
    microbatches: Microbatches = 8
    stages: Stages = None
    option: Options = None
    replicated: Replicated = False

    def program(self, name_or_file: str, costs: TypedCosts | None = None) -> Program:
        """Return the program of a named schedule, which may order its ops by the typed costs, or of a file."""
        if is_file(name_or_file):
            return read_program(name_or_file, replicated=self.replicated)
        # An option behind the name (hanayo:waves=2) is joined with those of --option.
        named = with_options(name_or_file, dict(self.option or ()))
        named = replace(named, stages=named.stages or self.stages)
        return named.program(self.ranks, self.microbatches, costs.per_op if costs and costs.are_typed else None)


@dataclass(frozen=True)
class Priced:
    """The options --costs and --cluster."""

    costs: Costs = ""
    cluster: OnCluster = None

    @property
    def on_cluster(self) -> TypedCosts:
        """The costs on the cluster."""
        return self.costs.on_cluster(self.cluster)


@dataclass(frozen=True)
class Charts:
    """Files to draw charts into."""

    svg: Svg = None
    png: Png = None
    pdf: Pdf = None

    def write(self, *pictured: Any, **keywords: Any) -> None:
        """Draw into each typed file by `plot`, with its arguments, and print the file's name."""
        for file in (getattr(self, field.name) for field in fields(self)):
            if file is not None:
                print(f"wrote {plot(*pictured, file=file, **keywords)}")


@dataclass(frozen=True)
class Pictures(Charts):
    """Files to draw programs and timelines into."""

    html: Html = None
    perfetto: Perfetto = None


def with_options_of_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Make each field of a command's dataclasses an option, as typer reads a signature.

    show(what, files: Pictures)        -->        show(what, svg=None, png=None, pdf=None, html=None, perfetto=None)
    """
    # typer reads the signature and the annotations of a function. The wrapper has one parameter for each field, and
    # makes the dataclasses of them when it is called.
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            option_fields = [(field.name, field.default, types[field.name]) for field in fields(groups[name])]
        else:
            option_fields = [(name, parameter.default, hints[name])]
        parameters += [
            inspect.Parameter(option_name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for option_name, default, hint in option_fields
        ]

    @wraps(command)
    def run(**typed: Any) -> None:
        for name, group in groups.items():
            typed[name] = group(**{field.name: typed.pop(field.name) for field in fields(group)})
        command(**typed)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
