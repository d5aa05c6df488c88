"""Freeze parameters: they stay in `params`, and their gradients are not computed. Put a model into eval mode.

g[0,0] = B ..        --> freeze(model, 0) -->        no cotangent goes into stage 0, Result.grads[0] has None leaves
"""

from __future__ import annotations

from dataclasses import replace

from fpipe.model import Model


def freeze(model: Model, *leaves: int | str | tuple[int, str]) -> Model:
    """Make a model with frozen parameters. In `Result.grads` they have None, which `assign_grads` passes to optimizers.

    Parameters of a module that do not require gradients when `from_sequential` cuts it are frozen already: they are
    constants of its stages and not among `params`.

    Args:
        model: it stays as it is.
        leaves: each as (stage, name) with the name in the stage's dict; a name of the whole net's state_dict, or of the
            params of `from_loss`; a stage, for all that lives there. A tied leaf lives where it is named first, and is
            frozen in all its stages.

    Returns:
        Another model for the same params.

    Raises:
        ValueError: no such stage or name.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> model = fpipe.freeze(model, 0, "1.bias")
    >>> grads = fpipe.build(fpipe.program(model), model)(params, (torch.ones(4, 2), torch.zeros(4, 1))).grads
    >>> grads[0], list(grads[1]), grads[1]["1.bias"]
    ({'0.weight': None, '0.bias': None}, ['1.weight', '1.bias'], None)
    """
    frozen = model.frozen | {_find_leaf(model, leaf) for leaf in leaves}
    return replace(
        model, frozen=frozen, report=model.derived_report(f"frozen: {', '.join(map(_describe_leaf, leaves))}")
    )


def _describe_leaf(leaf: int | str | tuple[int, str]) -> str:
    if isinstance(leaf, tuple):
        return f"{leaf[1]} of stage {leaf[0]}"
    return f"all of stage {leaf}" if isinstance(leaf, int) else leaf


def _find_leaf(model: Model, leaf: int | str | tuple[int, str]) -> tuple[int, str | None]:
    """Return (stage, name) of a leaf where it lives; the name is None for all leaves of a stage."""
    if isinstance(leaf, str):
        stages = enumerate(model.stages)
        owners = [(number, names[0]) for number, stage in stages for names in stage.names or () if leaf in names]
        if not owners:
            raise ValueError(f"no stage has a parameter called {leaf!r}; say (stage, name) for a model of functions.")
        leaf = owners[0]
    stage, name = leaf if isinstance(leaf, tuple) else (leaf, None)
    if type(stage) is not int or not 0 <= stage < len(model.stages):
        raise ValueError(f"there is no stage {stage!r} to freeze; the stages are 0 to {len(model.stages) - 1}.")
    return next(((tied.owner, tied.owner_name) for tied in model.tied(stage) if tied.name == name), (stage, name))


def evaluating(model: Model) -> Model:
    """Make the model that computes as its net does in eval mode, for the same params and state.

    The net itself stays in its mode: a copy of its modules, which shares all tensors, is put into eval mode. Dropout is
    off, and norms use the running statistics in the state of the step.

    Args:
        model: one that `from_module` or `from_sequential` made; it stays as it is.

    Returns:
        Another model, cut after the same modules. It has programs of its own: its forwards read module state, and
        return it unchanged.

    Raises:
        ValueError: a model that another front door made, or was copied; a net that in eval mode has its parameters in
            other stages.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    >>> model, params, state = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> model = fpipe.evaluating(model)
    >>> program = fpipe.chain(fpipe.split(1), fpipe.merge(), fpipe.forward_only())(fpipe.program(model))
    >>> step = fpipe.build(program, model)
    >>> x = torch.ones(3, 2)
    >>> seen = step(params, (x, x), state=state).outputs
    >>> net.training, torch.equal(seen, net.eval()(x))
    (True, True)
    """
    fingerprint = model.fingerprint
    eval_model = None if fingerprint is None else fingerprint.eval_model()
    if eval_model is None:
        raise ValueError(
            "this model does not know its net; evaluating takes models of from_module and from_sequential. Otherwise "
            "put the modules into eval mode and make another model."
        )
    if [stage.names for stage in eval_model.stages] != [
        stage.names for stage in model.stages
    ] or eval_model.ties != model.ties:
        raise ValueError(
            "in eval mode this net has its parameters in other stages: put it into eval mode and cut it again."
        )
    return eval_model
