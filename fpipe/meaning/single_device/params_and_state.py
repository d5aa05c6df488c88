"""Hold params and state against a model: one pytree for each stage, with the names, ties and frozen leaves it has.

params[0]: {"0.weight": w}, params[1]: {"1.w": v}        --> check_params -->        as they are, or a ValueError
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage


def check_params(model: Model, params: Any) -> Sequence[Any]:
    """Parameters are one pytree per stage, and a dict where a leaf is tied; else a ValueError names the stage."""
    if not isinstance(params, (tuple, list)) or len(params) != len(model.stages):
        found = f"{len(params)} of them" if isinstance(params, (tuple, list)) else type(params).__name__
        raise ValueError(
            f"params is a tuple with one pytree for each of the {len(model.stages)} stages, found {found}."
            f"{_way_to_params(model)}"
        )
    for number, stage in enumerate(model.stages):
        if stage.names and not isinstance(params[number], Mapping):
            found = type(params[number]).__name__
            raise ValueError(
                f"params of stage {number} is a dict of its parameters by name, found {found}; the batch comes after "
                f"params.{_way_to_params(model)}"
            )
    tied = [leaf for uses in model.tied_uses for leaf in uses]
    for leaf in tied:
        if not isinstance(params[leaf.stage], Mapping):
            found = type(params[leaf.stage]).__name__
            raise ValueError(
                f"leaf {leaf.name!r} of stage {leaf.stage} is tied, so that stage's params are a dict; found {found}."
            )
    _refuse_lost(model, params)
    for stage, leaf in model.frozen:
        if leaf is not None and not (isinstance(params[stage], Mapping) and leaf in params[stage]):
            raise ValueError(
                f"leaf {leaf!r} of stage {stage} is frozen, but params of stage {stage} have no such leaf."
            )
    for stage, name, _, owner, owner_name, _ in tied:
        if owner_name not in params[owner]:
            raise ValueError(f"params of stage {owner} must have the tied leaf {owner_name!r}, which lives there.")
        if stage != owner and name in params[stage]:
            raise ValueError(f"params of stage {stage} come without {name!r}: it is tied and lives in stage {owner}.")
    return params


def _refuse_lost(model: Model, params: Sequence[Any]) -> None:
    """A ValueError for a parameter that a front door handed out, if the net has another tensor in its place by now."""
    for number, stage in enumerate(model.stages):
        moved = stage.forward.moved() if isinstance(stage.forward, PositionalStage) else {}
        for name, address in moved.items():
            given = params[number].get(name)
            if hasattr(given, "data_ptr") and not hasattr(given, "fake_mode") and given.data_ptr() == address:
                raise ValueError(
                    f"params of stage {number} have the {name!r} that was handed out with the model; the net has "
                    "another tensor in its place by now (by p.data = ..., .to() or load_state_dict(assign=True)), "
                    f"which no step would train.{_way_to_params(model)} Or cut the net again."
                )


def _way_to_params(model: Model) -> str:
    """How to get the parameters of each stage from those of the whole, in a sentence."""
    if all(stage.names is None for stage in model.stages):
        return ""
    if model.whole is None:
        return " fpipe.split_params(model, net.state_dict()) makes it of those of the whole."
    return " fpipe.split_params(model, whole) makes it of the whole pytree, as from_loss takes it."


def check_state(
    model: Model, state: Any, readers: Collection[int], who: str = "this program", call: str = "step"
) -> None:
    """Module state is one pytree per stage; that of a stage made from modules has the buffers that they write.

    Args:
        readers: the stages whose state somebody reads.
        who, call: how errors call that somebody, and what the state is handed to.

    Raises:
        ValueError: it is not; the stage is named.
    """
    if state is None:
        for number in sorted(readers):
            what = f", the module state of {model.who(number)}" if model.stages[number].name else ""
            raise ValueError(f"{who} reads state[{number}]{what}: hand it in as {call}(..., state=...).")
        return
    if not isinstance(state, (tuple, list)) or len(state) != len(model.stages):  # pyright: ignore[reportUnknownArgumentType]
        found = len(state) if isinstance(state, (tuple, list)) else type(state).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"state has one entry for each of the {len(model.stages)} stages, found {found}.")
    for number in sorted(readers):
        own: Any = state[number]
        stage = model.stages[number].forward
        wanted = stage.holds if isinstance(stage, PositionalStage) else ()
        if wanted and not isinstance(own, Mapping):
            raise ValueError(f"state of stage {number} is a dict of its buffers, found {type(own).__name__}.")
        for missing in (name for name in wanted if name not in own):
            raise ValueError(f"state of stage {number} must have {missing!r}, which is missing.")


def check_all_state(model: Model, state: Sequence[Any] | None, call: str) -> None:
    """Every stage that has module state is handed it; `call` is what takes it."""
    reading = {n for n, stage in enumerate(model.stages) if "state" in stage.asks}
    check_state(model, state, reading, "this model", call)


def train(model: Model, stage: int, full: Any) -> list[bool]:
    """For each leaf of a stage, tied ones too, whether it has a gradient: floating, and not frozen where it lives."""
    homes: dict[Any, tuple[int, str]] = {leaf.name: (leaf.owner, leaf.owner_name) for leaf in model.tied(stage)}
    names: Any = full if isinstance(full, Mapping) and (homes or model.frozen) else {None: full}
    found: list[bool] = []
    for name, own in names.items():
        owner, leaf = homes.get(name, (stage, name))
        frozen = not model.frozen.isdisjoint({(owner, leaf), (owner, None)})
        found += [is_differentiable(one) and not frozen for one in tree.leaves(own)]
    return found


def trained(model: Model, stage: int, port: int, bundle: Any) -> list[bool]:
    """For each leaf of a parameter bundle whether it has a gradient. Bundle 0 of a stage is its own, the others are its
    tied leaves in order."""
    return train(model, stage, {model.owned(stage)[port - 1].name: bundle} if port else bundle)


def is_differentiable(leaf: Any) -> bool:
    """Whether it is a tensor of floating or complex numbers."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def net_order(model: Model, per_stage: Sequence[Any]) -> list[int]:
    """Return the indices of the leaves of all stages, those of the parameters or their gradients, in the net's order.

    That is the order of `named_parameters()`, in which torch stacks the norms of gradients. Floats round differently in
    another order, so whatever takes a norm of several leaves asks here, and not how the net was cut.
    """
    position = {name: index for index, name in enumerate(model.leaf_order)}
    positions = [position.get(name, len(position)) for stage in per_stage for name in _leaf_names(stage)]
    return sorted(range(len(positions)), key=positions.__getitem__)


def _leaf_names(stage: Any) -> list[str]:
    """Return the name of each leaf of a stage of a net; a pytree that is no dict has none."""
    if not isinstance(stage, Mapping):
        return [""] * len(tree.leaves(stage))
    return [name for name, value in stage.items() for _ in tree.leaves(value)]


def with_ties(model: Model, params: Sequence[Any]) -> list[Any]:
    """Each stage's parameters as its function takes them: with the tied leaves it reads from other stages."""
    full = list(check_params(model, params))
    for stage, name, _, owner, owner_name, _ in (leaf for uses in model.tied_uses for leaf in uses[1:]):
        full[stage] = {**full[stage], name: params[owner][owner_name]}
    return full
