"""Judge files of gradients that another pipeline, or a loop of one's own, has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fpipe.cli.options import load_module, usage

if TYPE_CHECKING:
    from fpipe.model import Model

Files = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Gradients by name: .safetensors, or .pt of a dict.")
]


def function(text: str) -> Callable[[], Any]:
    """A function, in a module or a .py file."""
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise ValueError(f"a function reads mine.py:step or package.module:step, found {text!r}.")
    found = getattr(load_module(module), name, None)
    if not callable(found):
        raise ValueError(f"there is no function {name!r} in {module}.")
    return found


Function = Annotated[
    Any,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        parser=usage(function),
        help="A function, in a module or a .py file, that returns (model, params, batch), or (model, params, batch, "
        "state): those of the step that made the gradients.",
    ),
]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", "-m", min=1, help="Of the step; by default 1 to 16 are tried.")
]
Tolerance = Annotated[float | None, typer.Option(min=0.0, help="By default a gradient is equal to rounding.")]
Key = Annotated[int | None, typer.Option(help="Of the step, for a model with random numbers.")]


def made_by(function: Callable[[], Any]) -> tuple[Model, Any, Any, Any]:
    """What such a function returns; None for state where it says none."""
    made = function()
    if not isinstance(made, tuple) or len(made) not in (3, 4):  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"--model returns (model, params, batch) or (model, params, batch, state), found {made!r:.80}."
        )
    found: tuple[Any, ...] = (*made, None)[:4]
    built, params, batch, state = found
    return built, params, batch, state


def check_grads(
    files: Files,
    model: Function,
    microbatches: Microbatches = None,
    key: Key = None,
    rtol: Tolerance = None,
    atol: Tolerance = None,
) -> None:
    """Compare gradients from elsewhere with plain autograd.

    Names the mistake, if one explains them: scaled, a microbatch or a tied use missing.
    One file, or one for each rank; the names are those of the state_dict.

    \b
    Examples:
      python -m fpipe check-grads grads.safetensors --model mine.py:step
      python -m fpipe check-grads rank0.pt rank1.pt --model package.module:step -m 8
    """
    # The other commands start without torch, in a third of the time.
    from fpipe.cli.tensor_files import read_tensors
    from fpipe.verification.compare_grads import compare_grads

    built, params, batch, state = made_by(model)
    grads = read_tensors(files)
    how: dict[str, Any] = {"state": state, "key": key, "microbatches": microbatches, "rtol": rtol, "atol": atol}
    print(compare_grads(built, params, batch, grads, **how))
