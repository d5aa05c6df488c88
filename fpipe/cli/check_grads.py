"""Judge files of gradients that another pipeline, or a loop of one's own, has written."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fpipe.cli.options import OfModel, made_by

Files = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Gradients by name: .safetensors, or .pt of a dict.")
]


Microbatches = Annotated[
    int | None, typer.Option("--microbatches", "-m", min=1, help="Of the step; by default 1 to 16 are tried.")
]
Tolerance = Annotated[float | None, typer.Option(min=0.0, help="By default a gradient is equal to rounding.")]
Key = Annotated[int | None, typer.Option(help="Of the step, for a model with random numbers.")]


def check_grads(
    files: Files,
    model: OfModel,
    microbatches: Microbatches = None,
    key: Key = None,
    rtol: Tolerance = None,
    atol: Tolerance = None,
) -> None:
    """Compare gradients from elsewhere with plain autograd.

    Names the mistake, if one explains them: scaled, a microbatch or a tied use missing.
    One file, or one for each rank; the names are those of the state_dict. The
    --model is that of the step which made the gradients.

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
