"""Exchange programs with torch.distributed.pipelining: read and write its tables, and run programs on its runtime.

    compute_only     0F0,0F1,,0B0,(2F3;2B1)OVERLAP_F_B,...             one line a rank; an empty cell is idle
    compute_comms    0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD

`2SEND_F0` sends the output of stage 2, which `3RECV_F0` receives; `2SEND_B0` sends the gradient of its input, which
`1RECV_B0` receives. UNSHARD and RESHARD gather and drop the weights of a stage that FSDP has sharded; REDUCE_GRAD
reduces its gradients. From torch 2.15 on a table with transfers also says when a rank waits for what it has sent or
reduces: `2WAIT_SEND_F0`, `2WAIT_SEND_B0`, `2WAIT_REDUCE_GRAD`.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fpipe.interop._torch_tables import (
    COMPUTE,
    TRANSFERS,
    WAITS,
    WEIGHTS,
    Action,
    Cell,
    Format,
    Table,
    actions_of,
    cells_by_tick,
    cells_with_transfers,
    matching_receive,
    read_torch_table,
    refuse_unsupported_ops,
    sends_of,
)
from fpipe.model import Model
from fpipe.program import Op, Program, ProgramError, require_program
from fpipe.transforms._rewrite import Transform, as_transform, chain
from fpipe.transforms.cells import sizes_of
from fpipe.transforms.communicate import communicate
from fpipe.transforms.merge import merge
from fpipe.transforms.reorder import apply_table
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining import PipelineStage

    from fpipe.interop._torch_runtime import ProgramRuntime

__all__ = ["from_csv", "gathers", "grads", "runtime", "schedule", "stages", "to_csv"]


def __dir__() -> list[str]:
    return __all__


def from_csv(table: Table, *, format: Format | None = None) -> Program:
    """Read a table of torch's as a step of a plain chain of stages, merged.

    Args:
        table: CSV text, one line a rank, the path of a CSV file, or the `pipeline_order` of one of torch's schedules.
            Stages and microbatches are those it names.
        format: "compute_only" or "compute_comms", as torch's `_load_csv` calls them; by default whichever it is.

    Returns:
        A program, with SEND and RECV in the places of the table's transfers. What the table says of sharded weights
        and of waits is not in it: `to_csv` writes that anew, and `gathers` reads it for `fpipe.shard`.

    Raises:
        ProgramError: an unrecognised cell, by line and column; an op or a transfer that is missing or stands twice;
            orders that wait for each other for ever.

    Source: torch.distributed.pipelining, `_Action.from_str`.

    >>> import fpipe
    >>> program = from_csv("0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1,")
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1  .  0B0  .  0B1
    rank 1 |  .  1F0 1B0 1F1 1B1  .
    >>> from_csv(to_csv(program)) == program
    True
    """
    rows = read_torch_table(table, format)
    forwards = [("F", action.stage, action.microbatch, None) for _, action in actions_of(rows, ("F",))]
    stages, microbatches, _ = sizes_of(forwards)
    return chain(split(microbatches), merge(), _as_transform(rows, format))(base_program(stages))


def schedule(table: Table, *, format: Format | None = None) -> Transform:
    """Return a table of torch's as a schedule, for programs of your own.

    Args:
        table, format: as for `from_csv`.

    >>> import fpipe
    >>> order = schedule("0F0,0SEND_F0,0RECV_B0,0B0\\n1RECV_F0,1F0,1B0,1SEND_B0")
    >>> fpipe.chain(fpipe.split_backward(), order)(fpipe.program(2)).table()
    [['0F0', '0I0', '0W0'], ['1F0', '1I0', '1W0']]
    """
    return _as_transform(read_torch_table(table, format), format)


def _as_transform(rows: list[list[Cell]], format: Format | None) -> Transform:
    """Return the transform that orders a program as torch's table does, with its transfers if it has any."""
    cells = [[cell.compute for cell in row if cell.compute is not None] for row in rows]
    # Weight actions are no sign of transfers: torch's GPipe and 1F1B have REDUCE_GRAD in tables of computation.
    has_transfers = format == "compute_comms" or any(actions_of(rows, TRANSFERS))

    @as_transform
    def transform(program: Program) -> Program:
        ordered = apply_table(program, cells, move=True)
        if not has_transfers:
            return ordered
        # Move the ops first, then place the transfers: these exist only once the ranks of their ops are known.
        communicated = communicate()(ordered)
        cell_by_action = _cell_by_action(communicated)
        _refuse_different_transfers(rows, cell_by_action)
        op_cells = [[cell for cell in row if cell.actions[0].kind not in (*WEIGHTS, *WAITS)] for row in rows]
        cell_names = [[cell.compute or cell_by_action[cell.actions[0]] for cell in row] for row in op_cells]
        return apply_table(communicated, cell_names, move=False) if cell_by_action else communicated

    return transform


def gathers(table: Table) -> Callable[[Op], object]:
    """Return when a table of torch's gathers the weights of each stage, for `fpipe.shard(gather=)`.

    Args:
        table: as for `from_csv`, with UNSHARD and RESHARD.

    Returns:
        A function that gives the ops of a stage between an UNSHARD and the next one the same share. How early a table
        gathers is not in it: `shard(lead=)` says that. The program has no transfers yet, as of `from_csv` with a table
        of computation.

    Raises:
        ProgramError: an op of a stage stands where its weights are not gathered.

    >>> import fpipe
    >>> text = "0UNSHARD,0F0,0SEND_F0,0RESHARD,0UNSHARD,0RECV_B0,0B0,0RESHARD\\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0"
    >>> program = fpipe.shard(gather=gathers(text), lead=0)(from_csv("0F0,,,0B0\\n,1F0,1B0,"))
    >>> [op.writes[0].stage for op in program.ops if op.kind == "GATHER"]
    [0, 1, 0]
    """
    gather_number: dict[tuple[str, int | None, int | None], int] = {}
    for row in read_torch_table(table, None):
        gather_counts, gathered = Counter[int](), set[int]()
        for cell in row:
            for action in cell.actions:
                # A second UNSHARD of gathered weights does nothing.
                if action.kind == "UNSHARD":
                    gather_counts[action.stage] += action.stage not in gathered
                    gathered.add(action.stage)
                elif action.kind == "RESHARD":
                    gathered.discard(action.stage)
                elif action.kind in COMPUTE:
                    if action.stage not in gathered:
                        raise ProgramError(
                            f"{cell.location}: {action} has no weights: there is no {action.stage}UNSHARD before it, "
                            "as tables with 'compute_comms' have."
                        )
                    gather_number[action.kind, action.stage, action.microbatch] = gather_counts[action.stage]
    return lambda op: gather_number.get((op.kind, op.stage, op.microbatch))


def _cell_by_action(program: Program) -> dict[Action, str]:
    """Map torch's name of each SEND and RECV to the cell that fpipe's tables have for it."""
    sends = sends_of(program)
    cell_by_action: dict[Action, str] = {}
    for op in program.ops:
        if op.kind == "SEND" and op.reads[0] in sends:
            send = sends[op.reads[0]]
            cell_by_action[send] = op.cell
            cell_by_action[matching_receive(send)] = f"RECV({op.reads[0]}@{op.writes[0].location.removeprefix('>')})"
    return cell_by_action


def _refuse_different_transfers(rows: list[list[Cell]], names: dict[Action, str]) -> None:
    """Raise ProgramError unless the table's transfers are exactly the program's."""
    named = {action: cell for cell, action in actions_of(rows, TRANSFERS)}
    for action, cell in named.items():
        if action not in names:
            raise ProgramError(
                f"{cell.location}: {action} moves nothing: no other rank reads that value. Leave the cell out."
            )
    for missing in (action for action in names if action not in named):
        raise ProgramError(f"the table has no {missing}, though the value is read on another rank.")


def to_csv(program: Program, *, format: Format = "compute_only", waits: bool | None = None) -> str:
    """Write a program as torch's runtime loads it.

    Args:
        program: a chain of stages with one rank a stage, without recompute, slices or offload. Of one that is sharded
            GATHER, the last read of what it gathered, and SCATTER are UNSHARD, RESHARD and REDUCE_GRAD.
        format: "compute_only": one column a tick, and torch adds transfers by itself; "compute_comms": with transfers,
            each value sent as soon as it is there, wherever the program has them.
        waits: whether "compute_comms" says when to wait for what is in flight, which torch asks for from 2.15 on and
            does not know before; by default as the torch that is installed has it.

    Returns:
        CSV text, one line a rank; `from_csv` reads it back.

    Raises:
        ProgramError: the program has what torch's tables have no cell for.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2))(fpipe.program(2))
    >>> print(to_csv(program), end="")
    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,
    >>> print(to_csv(fpipe.schedules.gpipe(2)(fpipe.program(2)), format="compute_comms", waits=False), end="")
    0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD
    1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD
    """
    if format not in ("compute_only", "compute_comms"):
        raise ValueError(f"format is 'compute_only' or 'compute_comms', found {format!r}.")
    refuse_unsupported_ops(require_program(program))
    if format == "compute_only":
        rows = cells_by_tick(program)
    else:
        if waits is None:
            from torch.torch_version import TorchVersion, __version__

            waits = TorchVersion(__version__) >= "2.15"
        rows = cells_with_transfers(program, waits)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def runtime(
    program: Program,
    model: Model,
    params: Sequence[Any],
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> ProgramRuntime:
    """Build torch's own `_PipelineScheduleRuntime` for a program: its table, and stages made of the model.

    Every process calls `runtime.step(inputs, target=target)`; inputs that are a tuple are spread, a dict goes as
    keywords. `grads(runtime.stages)` is what this process's stages have added up, until somebody sets it to None.

    Args:
        program: an order that torch has cells for, merged: one rank a stage, equal microbatches of rows.
        model: a plain chain of stages that hand on a tensor, or a tuple of two or more.
        params: one pytree of tensors per stage; the entries of other processes' stages may be None.
        group: the processes that run the ranks; by default all.
        device: where the stages run; by default where their parameters are.

    Returns:
        Torch's runtime. Its loss is the model's, times the microbatch's weight 1/m where that is a mean, so gradients
        are those of `fpipe.build`, bitwise where each stage's B or W come in ascending microbatches: torch adds a
        gradient as soon as it is there. `losses=` gets the weighted losses.

    Raises:
        ProgramError: an op, an order or a result that torch's runtime has not, by its cell.
        ValueError: a model that asks for more than torch's runtime hands to a stage; a process group of another size.

    Source: torch.distributed.pipelining.schedules, `_PipelineScheduleRuntime`.

    >>> import fpipe, torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> order = fpipe.schedules.from_table("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1")
    >>> program = fpipe.chain(fpipe.split(2), order, fpipe.merge())(fpipe.program(model))
    >>> batch = torch.randn(6, 2), torch.randn(6, 1)
    >>> torchs = runtime(program, model, params)
    >>> outputs = torchs.step(batch[0], target=batch[1])
    >>> ours = fpipe.build(program, model)(params, batch)
    >>> all(torch.equal(grad, ours.grads[0][name]) for name, grad in grads(torchs.stages)[0].items())
    True
    >>> dist.destroy_process_group()
    """
    from fpipe.interop import _torch_runtime

    _torch_runtime.refuse_unsupported(require_program(program), model)
    local_stages = stages(program, model, params, group=group, device=device)
    # Torch runs the table with transfers, and also asks for the one without.
    tables = to_csv(program), to_csv(program, format="compute_comms")
    loss: Any = model.loss
    # The mean of a batch is the sum of the microbatches' means, each times 1/m, since torch's microbatches are equal.
    weight = 1 / program.microbatches if model.reduction == "mean" else 1.0
    return _torch_runtime.ProgramRuntime(local_stages, program.microbatches, lambda y, t: loss(y, t) * weight, *tables)


def stages(
    program: Program,
    model: Model,
    params: Sequence[Any],
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> list[PipelineStage]:
    """Build this process's stages for torch's own schedules, such as `ScheduleInterleaved1F1B(stages, 8, loss_fn=f)`.

    Each `stage.submod` is a module whose parameters share memory with `params`, under their names in the net's
    state_dict, or in a stage's pytree, and whose forward is the model's stage function.

    Args:
        program: where the stages are, as a schedule places them.
        model, params, group, device: as for `runtime`.

    Raises:
        ProgramError, ValueError: as for `runtime`.

    >>> import fpipe, torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.pipelining import ScheduleGPipe
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> (stage,) = stages(fpipe.program(model), model, ({"w": torch.tensor(3.0)},))
    >>> outputs = ScheduleGPipe(stage, 2, model.loss).step(torch.tensor([1.0, 2.0]), target=torch.zeros(2))
    >>> grads([stage])
    ({'w': tensor(15.)},)
    >>> dist.destroy_process_group()
    """
    from fpipe.interop import _torch_runtime

    _torch_runtime.refuse_unsupported_order(require_program(program), model)
    placement = [rank for rank in program.placement if isinstance(rank, int)]
    return _torch_runtime.build_stages(model, params, placement, group, device)


def grads(stages: Sequence[PipelineStage]) -> tuple[Any, ...]:
    """Return the gradients that torch's runtime has left in stages, as a step of fpipe returns them on one rank.

    Args:
        stages: those of this process, as `stages` or `runtime` made them.

    Returns:
        One entry a stage of the model, in the containers of its params; None for stages of other processes, for frozen
        leaves, and for a leaf that no backward has come to.

    >>> import fpipe, torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> program = fpipe.chain(fpipe.split(1), fpipe.merge())(fpipe.program(model))
    >>> torchs = runtime(program, model, ({"w": torch.ones(1)},))
    >>> outputs = torchs.step(torch.ones(2), target=torch.zeros(2))
    >>> grads(torchs.stages)
    ({'w': tensor([2.])},)
    >>> dist.destroy_process_group()
    """
    modules: dict[int, Any] = {stage.stage_index: stage.submod for stage in stages}
    return tuple(modules[stage].grads() if stage in modules else None for stage in range(stages[0].num_stages))
