"""Join the parameters, or the gradients, of all stages in one pytree like a state_dict, and split it again.

({"0.weight": w0}, {"1.weight": w1})        --> join_params -->        {"0.weight": w0, "1.weight": w1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import tree
from fpipe.limits import check_whole_number
from fpipe.meaning.single_device.params_and_state import add_tied_leaves, check_params
from fpipe.model import Model, check_keys
from fpipe.positional_stage import PositionalStage
from fpipe.program import PARAMETERS, Program


def join_params(model: Model, per_stage: Sequence[Any]) -> Any:
    """Join the parameters of all stages in one dict, or their gradients; `split_params` is its inverse.

    Of a model made from a module: by the names of its state_dict, a parameter with several names under each of them.
    Frozen parameters and buffers are not among them. Of a model made by `from_loss`: the pytree it was given. Of one
    made from functions: {stage: its parameters}, a tied leaf with each of its stages.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2)
    >>> fpipe.join_params(model, params).keys() == net.state_dict().keys()
    True
    """
    if model.params_spec is not None:
        names, containers = model.params_spec
        leaves = {name: leaf for stage in check_params(model, per_stage) for name, leaf in stage.items()}
        check_keys(leaves, names, "the params of all stages")
        return tree.unflatten(containers, [leaves[name] for name in names])
    leaf_by_name: dict[Any, Any] = {}
    for number, (stage, params) in enumerate(zip(model.stages, add_tied_leaves(model, per_stage), strict=True)):
        if stage.names is None:
            leaf_by_name[number] = params
            continue
        check_keys(params, [leaf[0] for leaf in stage.names], f"params of stage {number}")
        leaf_by_name.update({name: params[leaf[0]] for leaf in stage.names for name in leaf})
    return leaf_by_name


def split_params(model: Model, whole: Any) -> tuple[Any, ...]:
    """Split the parameters of a whole net, or gradients, by stages; the inverse of `join_params`.

    Of a module's state_dict, buffers and frozen parameters as the module has them are left out: they stay with it.

    Raises:
        ValueError: a name too many or too few, or one parameter with different values under its names.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2)
    >>> [list(stage) for stage in fpipe.split_params(model, net.state_dict())]
    [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """
    if model.params_spec is not None:
        names, containers = model.params_spec
        if tree.flatten(whole)[1] != containers:
            raise ValueError("the whole has another structure than the params that the model was made with.")
        leaves = dict(zip(names, tree.leaves(whole), strict=True))
        return tuple({name: leaves[name] for (name,) in stage.names or ()} for stage in model.stages)
    names_by_stage = [[(number,)] if stage.names is None else stage.names for number, stage in enumerate(model.stages)]
    if not isinstance(whole, Mapping):
        raise ValueError(f"the whole is a dict such as net.state_dict(); found {type(whole).__name__}.")
    net_names = dict.fromkeys(name for stage in names_by_stage for leaf in stage for name in leaf)
    whole = {name: leaf for name, leaf in whole.items() if name in net_names or not _is_net_tensor(model, name, leaf)}  # pyright: ignore[reportUnknownVariableType]
    check_keys(
        whole, [*net_names], "the whole", "a parameter that trains, nor a buffer or frozen parameter as the net has it"
    )
    # 1) Take each stage's leaves by their first names. A leaf with several names must be equal under all of them.
    params_by_stage: list[Any] = []
    for number, stage in enumerate(model.stages):
        if stage.names is None:
            params_by_stage.append(whole[number])
            continue
        for leaf in stage.names:
            for name in leaf[1:]:
                _refuse_different_values(whole[leaf[0]], whole[name], repr(leaf[0]), repr(name))
        params_by_stage.append({leaf[0]: whole[leaf[0]] for leaf in stage.names})
    # 2) A leaf that several stages use lives in the first of them: drop it from the others.
    for uses in model.tied_uses:
        for number, leaf, _, owner, owner_name, _ in uses[1:]:
            is_named = model.stages[number].names is not None
            alias, name = (
                (repr(leaf), repr(owner_name)) if is_named else (f"[{number}][{leaf!r}]", f"[{owner}][{owner_name!r}]")
            )
            _refuse_different_values(params_by_stage[owner][owner_name], params_by_stage[number][leaf], name, alias)
            params_by_stage[number] = {key: value for key, value in params_by_stage[number].items() if key != leaf}
    return tuple(params_by_stage)


def local_params(program: Program, per_stage: Sequence[Any], rank: int | None = None) -> tuple[Any, ...]:
    """Select the params, state or gradients at home on one rank; the stages of other ranks become None.

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
    if rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("say rank=: this process is in no group of torch.distributed.")
        rank = dist.get_rank()
    if not 0 <= check_whole_number("rank", rank, minimum=0) < program.ranks:
        raise ValueError(f"ranks are 0 to {program.ranks - 1}; there is no rank {rank}.")
    if len(per_stage) != program.stages:
        raise ValueError(f"the program has {program.stages} stages; found {len(per_stage)} entries.")
    local = {end.value.stage for end in program.inputs if end.value.name in PARAMETERS and rank in end.homes}
    return tuple(stage_tree if stage in local else None for stage, stage_tree in enumerate(per_stage))


def _is_net_tensor(model: Model, name: Any, leaf: Any) -> bool:
    """Whether a leaf is the very tensor that the modules of a stage have under a name: a constant or a buffer."""
    forwards = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    net_tensors = (getattr(*forward.home_of(name)) for forward in forwards if name in forward.all_names())
    return isinstance(leaf, Tensor) and any(map(leaf.is_set_to, net_tensors))


def _refuse_different_values(x: Any, y: Any, name: str, alias: str) -> None:
    if x is not y and not (isinstance(x, Tensor) and (x.is_set_to(y) or torch.equal(x, y))):
        raise ValueError(f"{name} and {alias} are one parameter, but have different values.")
