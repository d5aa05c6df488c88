"""Assemble the commands, with exit codes: 0 for success, 1 for a refusal or a difference, 2 for a usage error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated

import typer

from fpipe.cli import bench, find, judge, race, see
from fpipe.cli import plan_command as plan
from fpipe.cli.options import load_module, usage, with_options_of_fields
from fpipe.cli.output import print_error

app = typer.Typer(
    # Plain help reads the same in a pipe.
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Imports = Annotated[
    list[str] | None,
    typer.Option("--import", "-i", metavar="MODULE", help="A module, or a .py file, that registers schedules."),
]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        # Imported here, since it takes a tenth of the time of --help.
        from importlib.metadata import version

        print(f"fpipe {version('fpipe-torch')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which version this is.")
]


@app.callback()
def start(imports: Imports = None, version: Version = False) -> None:
    """Pipeline schedules: list, draw, compare, search, plan, prove, race them, take them elsewhere.

    \b
    Examples:
      python -m fpipe schedules
      python -m fpipe show one_f_one_b --ranks 4 --microbatches 8
      python -m fpipe compare gpipe one_f_one_b --costs F=1,B=1,W=1,c=0.1
      python -m fpipe search -p 4 -m 8 -s 8 --memory-cap 2 --costs F=10,B=12,W=8
      python -m fpipe plan run --model mine.py:step -p 4 -m 8/16/32 --memory 40GiB
      python -m fpipe check my_table.csv
      python -m fpipe verify one_f_one_b
      python -m fpipe check-grads rank0.pt rank1.pt --model mine.py:step
      python -m fpipe check-step after.safetensors --model mine.py:step --rule AdamW --lr 3e-4
      python -m fpipe check-run run/ --net mine.py:net_and_loss
      python -m fpipe race one_f_one_b zb_h1 torch:1F1B --ranks 2
      python -m fpipe bench --against eager,torch --quick
      python -m fpipe export one_f_one_b --format comms > schedule.csv
      python -m fpipe --import mine.py show my_schedule

    A NAME is a schedule (see `schedules`); a FILE is a program's text, a table (grid or CSV), torch's CSV, or JSON.
    Exit codes: 0 success, 1 refused or different, 2 usage error.
    """
    for module in imports or ():
        usage(load_module)(module)


def _with_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that errors of the library are printed on standard error, with exit code 1."""

    @functools.wraps(command)
    def run(*args: object, **options: object) -> None:
        try:
            command(*args, **options)
        except (ValueError, OverflowError, AssertionError, ModuleNotFoundError, OSError) as error:
            # `fpipe show .. | head` closes the pipe early: that is no error to print.
            if isinstance(error, BrokenPipeError):
                raise
            print_error(str(error))
            raise typer.Exit(1) from None

    return run


COMMANDS = (
    *(see.schedules, see.show, see.compare, find.search, judge.check, judge.verify),
    *(judge.check_grads, judge.check_step, judge.check_run, race.race, bench.bench, see.export),
)
for command in COMMANDS:
    app.command()(_with_exit_codes(with_options_of_fields(command)))
plans = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Plan a run of your own.")
plans.command()(_with_exit_codes(with_options_of_fields(plan.run)))
app.add_typer(plans, name="plan")
