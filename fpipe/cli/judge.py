"""Check files and schedules, and gradients and parameters that another pipeline has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fpipe.cli import options
from fpipe.cli.options import function, parsed_by, read_program
from fpipe.cli.output import print_error
from fpipe.cli.see import sizes
from fpipe.program import Program
from fpipe.schedules import names
from fpipe.verification.placements import check_placements

# Torch is imported when a command needs it: others start in a third of the time.
if TYPE_CHECKING:
    from torch import Tensor

    from fpipe.model import Model

Programs = Annotated[list[str], typer.Argument(metavar="FILE...", help="Files; '-' reads a pipe.")]


def check(files: Programs, replicated: options.Replicated = False) -> None:
    """Check files: programs, tables, CSV (torch's too) or JSON.

    Says the sizes; or what is wrong, in which line and column, and the way out,
    with exit code 1.

    \b
    Examples:
      python -m fpipe check my_table.csv
      python -m fpipe export gpipe --format comms | python -m fpipe check -
      printf '0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1\\n' | python -m fpipe check -
    """
    wrong_files = 0
    for file in files:
        name = "standard input" if file == "-" else file
        try:
            program = read_program(file, replicated=replicated)
            check_placements(program)
            print(f"{name} is right: {sizes(program)}")
        except (ValueError, OSError) as error:
            wrong_files += 1
            # The text of an OSError names the file already.
            hint = f" It is a schedule's name: python -m fpipe verify {file}." if file in names() else ""
            print_error(f"{error}{hint}" if isinstance(error, OSError) else f"{name}: {error}")
    if wrong_files:
        raise typer.Exit(1)


def verify(typed: typer.Context, name_or_file: options.NameOrFile, size: options.Sized) -> None:
    """Prove a schedule on a small real model, bit by bit.

    Every gradient is compared with that of plain autograd.

    \b
    Examples:
      python -m fpipe verify one_f_one_b --ranks 4 --microbatches 6
      python -m fpipe verify my_table.csv
    """
    options.refuse_sizes_of_files(typed, [name_or_file])
    program = size.program(name_or_file)
    print(sizes(program))
    from fpipe.verification.verify import verify as verify_program

    print(verify_program(program, *_small_model(program)))


_WIDTH = 8


def _small_model(program: Program) -> tuple[Model, tuple[dict[str, Tensor], ...], tuple[Tensor, Tensor]]:
    """Return a model of as many stages, its parameters, and a batch of microbatches that differ in rows.

    Microbatches of different sizes show a mean of means, which a schedule must not compute. For a program with sequence
    slices the model is causal along the sequence, and the slices differ in length.
    """
    import torch

    from fpipe.meaning.from_functions import from_functions

    make = torch.Generator().manual_seed(0)
    params = tuple(
        {"w": torch.randn(_WIDTH, _WIDTH, generator=make) / _WIDTH**0.5, "b": torch.randn(_WIDTH, generator=make)}
        for _ in range(program.stages)
    )
    rows = 2 * program.microbatches + (2 if program.microbatches > 2 else 0)
    shape = (rows, _WIDTH) if program.slices == 1 else (rows, 2 * program.slices + 1, _WIDTH)
    batch = (torch.randn(shape, generator=make), torch.randn(shape, generator=make))
    return from_functions([_stage if program.slices == 1 else _causal] * program.stages, _loss), params, batch


def _stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).tanh()


def _causal(params: dict[str, Tensor], x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add to each position the sum of the positions before; the sum at the end of a slice is its carry."""
    total = (x @ params["w"]).cumsum(1)
    if carry is not None:
        total = total + carry
    return (total + params["b"]).tanh(), total[:, -1:]


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


Grads = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Gradients by name: .safetensors, or .pt of a dict.")
]
TriedMicrobatches = Annotated[
    int | None, options.whole_number("--microbatches", "-m", help="Of the step; by default 1 to 16 are tried.")
]
Tolerance = Annotated[float | None, typer.Option(min=0.0, help="By default a gradient is equal to rounding.")]
Parameters = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", help="Parameters after the steps, by name: .safetensors, or .pt of a dict."),
]
Rule = Annotated[str, typer.Option(help="The optimizer that was meant, by its name in torch.optim.")]
Rate = Annotated[list[float], typer.Option("--lr", help="The learning rate, or one for each step.")]
Clip = Annotated[float | None, typer.Option(help="The largest norm of all gradients.")]
Setting = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="Such as weight_decay=0.1.")]
Microbatches = Annotated[int, options.whole_number("--microbatches", "-m", help="Of each step, over all replicas.")]
Loss = Annotated[list[float] | None, typer.Option(help="The other pipeline's loss of each step.")]
Norm = Annotated[list[float] | None, typer.Option(help="Its gradient norm of each step.")]
Key = Annotated[int | None, typer.Option(help="Of the step, for a model with random numbers.")]


def check_grads(
    files: Grads,
    model: options.OfModel,
    microbatches: TriedMicrobatches = None,
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
    from fpipe.oracle.compare_grads import compare_grads

    built, params, batch, state = options.call_model(model)
    grads = read_tensors(files)
    report = compare_grads(
        built, params, batch, grads, state=state, key=key, microbatches=microbatches, rtol=rtol, atol=atol
    )
    print(report)


def check_step(
    files: Parameters,
    model: options.OfModel,
    rule: Rule,
    lr: Rate,
    clip: Clip = None,
    settings: Setting = None,
    microbatches: Microbatches = 1,
    loss: Loss = None,
    norm: Norm = None,
    key: Key = None,
) -> None:
    """Compare parameters after training steps made elsewhere with plain autograd and torch.optim.

    Names the mistake, if one explains them: a sum for a mean, a norm that misses
    ranks, no weight decay, stale gradients. One file, or one for each rank; parts
    of a tensor are put together in the order of the files. The --model gives
    parameters before the first step, and the batch, or a list with that of each.

    \b
    Examples:
      python -m fpipe check-step after.safetensors --model mine.py:step --rule AdamW --lr 3e-4 --clip 1
      python -m fpipe check-step rank0.pt rank1.pt --model mine.py:step --rule SGD --lr 0.1 --set momentum=0.9 -m 8
    """
    from fpipe.oracle.compare_step import compare_step

    built, params, batch, state = options.call_model(model)
    # A list of batches is one for each step. A batch itself is a tuple.
    steps = len(batch) if isinstance(batch, list) else 1
    tensors = read_files(files)
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


def check_run(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of record_run.")],
    net: Annotated[
        Any,
        parsed_by(
            function, "--net", metavar="MODULE:FUNCTION", help="A function that returns the plain net, or (net, loss)."
        ),
    ],
) -> None:
    """Judge a recorded training run.

    Names the first module or phase that is wrong, and the mistake. The --net is the
    plain net on one device, and the loss is loss(output, target).

    \b
    Examples:
      python -m fpipe check-run run/ --net mine.py:net_and_loss
    """
    from fpipe.oracle.compare_run import compare_run

    returned: Any = net()
    plain_net, loss = returned if isinstance(returned, tuple) else (returned, None)
    print(compare_run(plain_net, folder, loss=loss))


def _setting(text: str) -> tuple[str, Any]:
    """Parse a setting of a rule: a number, numbers with commas between, or True or False."""
    name, _, value = text.partition("=")
    booleans = {"True": True, "False": False}
    try:
        parts = [booleans[part] if part in booleans else float(part) for part in value.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--set is NAME=NUMBER, such as weight_decay=0.1; found {text!r}.") from None
    return name, parts[0] if len(parts) == 1 else tuple(parts)


def read_tensors(files: Sequence[str]) -> dict[str, Tensor]:
    """Read the tensors of all files by name; raise ValueError if a name has different numbers in two files."""
    from fpipe.verification.report import Close

    tensor_by_name: dict[str, Tensor] = {}
    file_by_name: dict[str, str] = {}
    for file, tensors in zip(files, read_files(files), strict=True):
        for name, tensor in tensors.items():
            if name in tensor_by_name and not Close()(tensor_by_name[name], tensor):
                raise ValueError(
                    f"{name!r} is in {file_by_name[name]} and in {file}, with different numbers. If it is tied, or "
                    "data parallel, add its gradients up first."
                )
            tensor_by_name[name], file_by_name[name] = tensor, file
    return tensor_by_name


def read_files(files: Sequence[str]) -> list[dict[str, Tensor]]:
    """Read the tensors of each file by name."""
    return [(_safetensors if file.endswith(".safetensors") else _saved)(Path(file)) for file in files]


def _saved(path: Path) -> dict[str, Tensor]:
    """Read a dict of tensors that torch.save wrote; None, a missing gradient, is left out."""
    import torch

    from fpipe.verification.report import describe_tensor, is_comparable

    try:
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # The type of torch's error depends on the first bytes of the file.
    except Exception:
        raise ValueError(f"{path} is no dict of tensors that torch.save wrote.") from None
    if not isinstance(saved, Mapping):
        raise ValueError(f"{path} holds a {type(saved).__name__}; wanted is a dict of tensors by name.")
    tensors: dict[Any, Any] = {name: leaf for name, leaf in saved.items() if leaf is not None}  # pyright: ignore[reportUnknownVariableType]
    wrong_name = next((name for name, x in tensors.items() if not isinstance(name, str) or not is_comparable(x)), None)
    if wrong_name is not None:
        raise ValueError(
            f"{path} holds {describe_tensor(tensors[wrong_name])} under {wrong_name!r}; wanted are tensors by name."
        )
    return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
    import torch

    from fpipe.models.parameters.sources import CODES, SafetensorsFile
    from fpipe.verification.report import is_comparable

    file = SafetensorsFile(path)
    for name, (dtype, *_) in file.entries.items():
        if not is_comparable(torch.empty(0, dtype=dtype)):
            raise ValueError(f"{path} holds {name!r} as {CODES[dtype]}; wanted are F64, F32, F16, BF16 and C64.")
    return {name: file.read_tensor(name) for name in file.entries}
