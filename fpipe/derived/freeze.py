"""Freeze parameters: they stay in `params`, and nothing is computed for a gradient of theirs.

g[0,0] = B ..        --> freeze(model, 0) -->        no cotangent goes into stage 0, Result.grads[0] has None leaves
"""

from __future__ import annotations

from dataclasses import replace

from fpipe.model import Model, the_model


def freeze(model: Model, *what: int | str | tuple[int, str]) -> Model:
    """The model with frozen parameters. In `Result.grads` they have None, which `assign_grads` hands to optimizers.

    Parameters of a module that do not require gradients when `from_sequential` cuts it need no word: they are constants
    of its stages and not among `params`.

    Args:
        model: it stays as it is.
        what: leaves as (stage, name) with the name in the stage's dict; a name of the whole net's state_dict, or of the
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
    the_model(model)
    frozen = model.frozen | {_leaf(model, one) for one in what}
    return replace(model, frozen=frozen, report=model.made(f"frozen: {', '.join(map(_words, what))}"))


def _words(what: int | str | tuple[int, str]) -> str:
    if isinstance(what, tuple):
        return f"{what[1]} of stage {what[0]}"
    return f"all of stage {what}" if isinstance(what, int) else what


def _leaf(model: Model, what: int | str | tuple[int, str]) -> tuple[int, str | None]:
    if isinstance(what, str):
        stages = enumerate(model.stages)
        homes = [(number, leaf[0]) for number, stage in stages for leaf in stage.names or () if what in leaf]
        if not homes:
            raise ValueError(f"no stage has a parameter called {what!r}; say (stage, name) for a model of functions.")
        what = homes[0]
    stage, name = what if isinstance(what, tuple) else (what, None)
    if type(stage) is not int or not 0 <= stage < len(model.stages):
        raise ValueError(f"there is no stage {stage!r} to freeze; the stages are 0 to {len(model.stages) - 1}.")
    return next(((leaf.owner, leaf.owner_name) for leaf in model.tied(stage) if leaf.name == name), (stage, name))


def evaluating(model: Model) -> Model:
    """The model as its net computes in eval mode, for the same params and state.

    The net itself stays in the mode that it is in: what is put into eval mode is a copy of its modules that shares all
    tensors. Dropout is off, and norms use the running statistics in the state that a step is handed.

    Args:
        model: one that `from_module` or `from_sequential` made; it stays as it is.

    Returns:
        Another model, cut after the same modules. Programs of it are its own: a forward reads module state, and leaves
        it as it is.

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
    held = the_model(model).held
    made = None if held is None else held.evaluating()
    if made is None:
        raise ValueError(
            "this model does not know its net: evaluate what from_module or from_sequential has made. Put modules that "
            "functions close over into eval mode, and make another model of these."
        )
    if [stage.names for stage in made.stages] != [stage.names for stage in model.stages] or made.ties != model.ties:
        raise ValueError(
            "in eval mode this net has its parameters in other stages: put it into eval mode and cut it again."
        )
    return made
