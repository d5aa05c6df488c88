"""Let batch norms update their running statistics once a step, with those of the whole batch."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fpipe.model import Model, Stage, the_model
from fpipe.models.modules.batch_norm import has_torchs_forward
from fpipe.models.modules.stage_module import StageModule


def deferred_batch_norm(model: Model) -> Model:
    """The model with batch norms that update their running statistics once a step, with those of the whole batch.

    In training a batch norm normalises by its microbatch, so outputs and gradients depend on how a batch is cut. Its
    running statistics need not: a deferred one merges mean and squared deviations of the microbatches, in float64, and
    updates at the last of them, as it would on a batch that is not cut.

    Args:
        model: made by `from_sequential`; it stays as it is.

    Returns:
        Another model for the same params and state. Without batch norms that track statistics it is the same.

    Raises:
        ValueError: a batch norm shares its stage with a module that reads the buffers that it mutates, or is in a stage
            of `from_module`.

    Source: torchgpipe's DeferredBatchNorm (Kim et al. 2020, section 3.3), whose variance is the biased one.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> model, params, state = fpipe.from_sequential(net, stages=1, loss=torch.nn.functional.mse_loss)
    >>> model = fpipe.deferred_batch_norm(model)
    >>> step = fpipe.build(fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model)), model)
    >>> batch = torch.randn(8, 2), torch.randn(8, 3)
    >>> step(params, batch, state=state).state[0]["1.num_batches_tracked"]
    tensor(1)
    """
    return replace(the_model(model), stages=tuple(map(_deferred, model.stages)))


def _deferred(stage: Stage) -> Stage:
    run = stage.forward
    if not isinstance(run, StageModule):
        norm = next((name for name in getattr(run, "writes", ()) if name.endswith(".running_var")), None)
        if norm is not None:
            raise ValueError(
                f"batch norm {norm.rpartition('.')[0]!r} is in the graph of a net, which updates its statistics after "
                "each microbatch; only those of a model of from_sequential can be deferred."
            )
        return stage
    taken = next(((path, owner) for path, owner, _ in run.held if isinstance(owner, _BatchNorm)), None)
    if taken is not None:
        norm = taken[0].rpartition(".")[0]
        other = next((path for path, owner, _ in run.held if not isinstance(owner, _BatchNorm)), None)
        if other is None:
            who = "another module or a hook that asks it" if has_torchs_forward(taken[1]) else "a forward of its own"
            raise ValueError(
                f"batch norm {norm!r} ({type(taken[1]).__name__}) has {who}, which may read what it writes; only "
                "torch's own batch norms that nobody asks can be deferred."
            )
        raise ValueError(
            f"stage {run.number} has the batch norm {norm!r} beside {other!r}, a buffer that its forward reads and "
            "writes: it takes the norm along, microbatch by microbatch. Choose sizes= that keep them apart."
        )
    if not any(isinstance(module, _BatchNorm) for _, module in run.norms):
        return stage
    later = StageModule(run.number, run.children, run.names, run.skips, deferred=True, state=run.state_of)
    later.lock, later.handed_out = run.lock, run.handed_out  # the lock is of all stages that have a module in common
    return replace(stage, forward=later, within=later.within, **later.remembering())
