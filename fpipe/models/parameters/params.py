"""Parameters, or their gradients, of all stages in one pytree, as a state_dict has them, and back.

({"0.weight": w0}, {"1.weight": w1})        --> join_params -->        {"0.weight": w0, "1.weight": w1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import tree
from fpipe.limits import whole as whole_number
from fpipe.meaning.single_device.params_and_state import check_params, with_ties
from fpipe.model import Model, same_keys, the_model
from fpipe.positional_stage import PositionalStage
from fpipe.program import PARAMETERS, Program, the_program


def join_params(model: Model, per_stage: Sequence[Any]) -> Any:
    """The parameters of all stages in one dict, or their gradients; `split_params` is its inverse.

    Of a model made from a module: by the names of its state_dict, a parameter with several names under each of them.
    Frozen parameters and buffers are not among them. Of a model made by `from_loss`: the pytree it was given. Of one
    made from functions: {stage: its parameters}, a tied leaf with each of its stages.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2)
    >>> fpipe.join_params(model, params).keys() == net.state_dict().keys()
    True
    """
    the_model(model)
    if model.whole is not None:
        names, containers = model.whole
        leaves = {name: leaf for stage in check_params(model, per_stage) for name, leaf in stage.items()}
        same_keys(leaves, names, "the params of all stages")
        return tree.unflatten(containers, [leaves[name] for name in names])
    whole: dict[Any, Any] = {}
    for number, (stage, params) in enumerate(zip(model.stages, with_ties(model, per_stage), strict=True)):
        if stage.names is None:
            whole[number] = params
            continue
        same_keys(params, [leaf[0] for leaf in stage.names], f"params of stage {number}")
        whole.update({name: params[leaf[0]] for leaf in stage.names for name in leaf})
    return whole


def split_params(model: Model, whole: Any) -> tuple[Any, ...]:
    """Parameters, or gradients, per stage; the inverse of `join_params`.

    Of a module's state_dict, buffers and frozen parameters as the module has them are left out: they stay with it.

    Raises:
        ValueError: a name too many or too few, or one parameter with different values under its names.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2)
    >>> [list(stage) for stage in fpipe.split_params(model, net.state_dict())]
    [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """
    the_model(model)
    if model.whole is not None:
        names, containers = model.whole
        if tree.flatten(whole)[1] != containers:
            raise ValueError("the whole has another structure than the params that the model was made with.")
        leaves = dict(zip(names, tree.leaves(whole), strict=True))
        return tuple({name: leaves[name] for (name,) in stage.names or ()} for stage in model.stages)
    names_by_stage = [[(number,)] if stage.names is None else stage.names for number, stage in enumerate(model.stages)]
    if not isinstance(whole, Mapping):
        raise ValueError(f"the whole is a dict, as net.state_dict() is one; found {type(whole).__name__}.")
    wanted = dict.fromkeys(name for stage in names_by_stage for leaf in stage for name in leaf)
    whole = {name: leaf for name, leaf in whole.items() if name in wanted or not _stays(model, name, leaf)}  # pyright: ignore[reportUnknownVariableType]
    same_keys(
        whole, [*wanted], "the whole", "a parameter that trains, nor a buffer or frozen parameter as the net has it"
    )
    split: list[Any] = []
    for number, stage in enumerate(model.stages):
        if stage.names is None:
            split.append(whole[number])
            continue
        for leaf in stage.names:
            for name in leaf[1:]:
                _same_tensor(whole[leaf[0]], whole[name], repr(leaf[0]), repr(name))
        split.append({leaf[0]: whole[leaf[0]] for leaf in stage.names})
    for uses in model.tied_uses:
        for number, leaf, _, owner, first, _ in uses[1:]:
            is_named = model.stages[number].names is not None
            alias, name = (repr(leaf), repr(first)) if is_named else (f"[{number}][{leaf!r}]", f"[{owner}][{first!r}]")
            _same_tensor(split[owner][first], split[number][leaf], name, alias)
            split[number] = {key: value for key, value in split[number].items() if key != leaf}
    return tuple(split)


def local_params(program: Program, per_stage: Sequence[Any], rank: int | None = None) -> tuple[Any, ...]:
    """Params, state or gradients at home on one rank: the tuple of all stages, with None for the stages of other ranks.

    Args:
        program: a program that is placed, as a schedule does; its inputs say where parameters are at home.
        per_stage: one entry for each stage.
        rank: whose; without it this process's rank in torch.distributed's default group. On a mesh with more than one
            dimension say `mesh.get_local_rank("pp")`.

    Raises:
        ValueError: there is no such rank, or no process group to take it from.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.zbv(2), fpipe.merge())(fpipe.program(4))
    >>> local_params(program, ("p0", "p1", "p2", "p3"), rank=1)
    (None, 'p1', 'p2', None)
    """
    the_program(program)
    if rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("say rank=: there is no process group of torch.distributed that this process is in.")
        rank = dist.get_rank()
    if not 0 <= whole_number("rank", rank, least=0) < program.ranks:
        raise ValueError(f"the program has ranks 0 to {program.ranks - 1}; there is no rank {rank}.")
    if len(per_stage) != program.stages:
        raise ValueError(f"the program has {program.stages} stages; found {len(per_stage)} entries.")
    local = {end.value.stage for end in program.inputs if end.value.name in PARAMETERS and rank in end.homes}
    return tuple(entry if stage in local else None for stage, entry in enumerate(per_stage))


def _stays(model: Model, name: Any, leaf: Any) -> bool:
    """Whether a leaf is a tensor that stays with the modules of a stage, as they have it now."""
    runs = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    held = (getattr(*run.home_of(name)) for run in runs if name in run.all_names())
    return isinstance(leaf, Tensor) and any(map(leaf.is_set_to, held))


def _same_tensor(x: Any, y: Any, name: str, alias: str) -> None:
    if x is not y and not (isinstance(x, Tensor) and (x.is_set_to(y) or torch.equal(x, y))):
        raise ValueError(f"{name} and {alias} are one parameter, but have different values.")
