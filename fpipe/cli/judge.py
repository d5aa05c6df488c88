"""Judge files that another pipeline, or a loop of one's own, has written: gradients, or parameters after steps."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fpipe.cli.options import OfModel, made_by

# What needs torch is imported when a command runs: the others start without it, in a third of the time.
Grads = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Gradients by name: .safetensors, or .pt of a dict.")
]
Tried = Annotated[
    int | None, typer.Option("--microbatches", "-m", min=1, help="Of the step; by default 1 to 16 are tried.")
]
Tolerance = Annotated[float | None, typer.Option(min=0.0, help="By default a gradient is equal to rounding.")]
Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", help="Parameters after the steps, by name: .safetensors, or .pt of a dict."),
]
Rule = Annotated[str, typer.Option(help="The optimizer that was meant, by its name in torch.optim.")]
Rate = Annotated[list[float], typer.Option("--lr", help="The learning rate, or one for each step.")]
Clip = Annotated[float | None, typer.Option(help="The largest norm of all gradients.")]
Setting = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="Such as weight_decay=0.1.")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Of each step, over all replicas.")]
Loss = Annotated[list[float] | None, typer.Option(help="What the other pipeline told of each step.")]
Norm = Annotated[list[float] | None, typer.Option(help="What it told of the gradients of each step.")]
Key = Annotated[int | None, typer.Option(help="Of the step, for a model with random numbers.")]


def check_grads(
    files: Grads,
    model: OfModel,
    microbatches: Tried = None,
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
    from fpipe.cli.tensor_files import read_tensors
    from fpipe.oracle.compare_grads import compare_grads

    built, params, batch, state = made_by(model)
    grads = read_tensors(files)
    report = compare_grads(
        built, params, batch, grads, state=state, key=key, microbatches=microbatches, rtol=rtol, atol=atol
    )
    print(report)


def check_step(
    files: Files,
    model: OfModel,
    rule: Rule,
    lr: Rate,
    clip: Clip = None,
    settings: Setting = None,
    microbatches: Microbatches = 1,
    loss: Loss = None,
    norm: Norm = None,
    key: Key = None,
) -> None:
    """Compare parameters after training steps made elsewhere with those of plain autograd and torch.optim.

    Names the mistake, if one explains them: a sum for a mean, a norm that misses
    ranks, no weight decay, stale gradients. One file, or one for each rank; parts
    of a tensor are put together in the order of the files. The --model gives
    parameters before the first step, and the batch, or a list with that of each.

    \b
    Examples:
      python -m fpipe check-step after.safetensors --model mine.py:step --rule AdamW --lr 3e-4 --clip 1
      python -m fpipe check-step rank0.pt rank1.pt --model mine.py:step --rule SGD --lr 0.1 --set momentum=0.9 -m 8
    """
    from fpipe.cli.tensor_files import read_each
    from fpipe.oracle.compare_step import compare_step

    built, params, batch, state = made_by(model)
    steps = len(batch) if isinstance(batch, list) else 1
    tensors = read_each(files)
    report = compare_step(
        built,
        params,
        batch,
        tensors[0] if len(tensors) == 1 else tensors,
        rule=rule,
        lr=lr[0] if len(lr) == 1 else lr,
        clip=clip,
        norm=norm,
        loss=loss,
        microbatches=microbatches,
        state=state,
        key=key if key is None or steps == 1 else [key] * steps,
        **dict(map(_setting, settings or ())),
    )
    print(report)


def _setting(typed: str) -> tuple[str, Any]:
    """A setting of a rule: a number, numbers with commas between, or True or False."""
    name, _, value = typed.partition("=")
    words = {"True": True, "False": False}
    try:
        parts = [words[part] if part in words else float(part) for part in value.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--set is NAME=NUMBER, such as weight_decay=0.1; found {typed!r}.") from None
    return name, parts[0] if len(parts) == 1 else tuple(parts)
