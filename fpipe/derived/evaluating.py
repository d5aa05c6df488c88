"""Evaluate a net that trains: the same stages, parameters and state, as the net computes in eval mode.

F[0,0] of net.train()        --> evaluating(model) -->        F[0,0] of net.eval(), which only reads state[0]
"""

from __future__ import annotations

from fpipe.model import Model, the_model


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
