"""Hold params, state and batch against a model: a pytree for each stage, with its names, ties and frozen leaves.

params[0]: {"0.weight": w}, params[1]: {"1.w": v}        --> check_params -->        as they are, or a ValueError
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.attributes import modules_of
from fpipe.meaning.purity.sharded import is_sharded, refuse_sharded
from fpipe.meaning.single_device.microbatch import BATCH, named, rows_by_leaf
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.torch_internals import is_fake


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


def wants_grad(leaf: Any) -> bool:
    """Whether it is a tensor that autograd takes a gradient for."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


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


# Refuse what is no batch, and take one that is cut already as streams of microbatches.

_AS_A_PAIR = " If the list is [inputs, target], as a DataLoader gives it, hand in tuple(batch)."


def refuse_spread(more: Sequence[Any], call: str) -> None:
    """A TypeError for what is handed in after the batch, as in `step(params, x, y)`."""
    if more and callable(more[0]) and not isinstance(more[0], Tensor):
        raise TypeError("a step calls no closure: it computes loss, gradients and update itself; leave it out.")
    if more:
        raise TypeError(
            f"a batch is one pair: {call.format('(inputs, target)')}; found {len(more) + 1} arguments after params. "
            "State and key are handed in by name."
        )


def check_batch(batch: Any) -> None:
    """A batch is a pair of pytrees with tensors of torch's."""
    if not isinstance(batch, tuple) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
        more = (
            "" if not isinstance(batch, list) else f" What is cut already goes to split(m, presplit=True).{_AS_A_PAIR}"
        )
        raise ValueError(f"a batch is a pair (inputs, target), found {type(batch).__name__}.{more}")
    tree.register_mappings(batch)
    for place, leaf in named(batch, BATCH):
        refuse_sharded([leaf], place)
        if isinstance(leaf, Tensor):
            continue
        if hasattr(leaf, "__array__") and getattr(leaf, "ndim", 1):
            found = f"{type(leaf).__module__.split('.')[0]}.{type(leaf).__name__}"
            raise TypeError(
                f"{place} is a {found}, which is no tensor of torch's: hand in torch.from_numpy(...) of it, which "
                "shares its memory, or torch.as_tensor(...)."
            )
        inside = _place_of_tensor(leaf)
        if inside is not None:
            raise TypeError(
                f"{place} is a {type(leaf).__name__}, no pytree, and holds a tensor ({inside}), which no microbatch "
                "would get its rows of. Hand in a dict of its entries, or register the class by "
                "torch.utils._pytree.register_pytree_node."
            )


def _place_of_tensor(holder: Any, depth: int = 4) -> str | None:
    """Return where an object that is no pytree holds a tensor, as Python writes it; None where it holds none."""
    parts = [(f".{name}", part) for name, part in getattr(holder, "__dict__", {}).items()]
    parts += [(f".{name}", getattr(holder, name, None)) for name in getattr(type(holder), "__slots__", ())]
    if isinstance(holder, Mapping):
        parts += [(f"[{key!r}]", part) for key, part in holder.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif isinstance(holder, list | tuple | set | frozenset):
        parts += [(f"[{index}]", part) for index, part in enumerate(holder)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    for place, part in parts:
        if isinstance(part, Tensor):
            return place
        inside = _place_of_tensor(part, depth - 1) if depth and not isinstance(part, type) else None
        if inside is not None:
            return place + inside
    return None


def refuse_wanted_gradients(inputs: Any, way_out: str) -> None:
    """Raise ValueError for an input that requires a gradient, which a step does not give unless it is told to."""
    for place, leaf in tree.paths(inputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ValueError(
                f"inputs{place} requires a gradient, which would be lost: say {way_out}, or hand in its .detach()."
            )


IGNORED = -100
"""The class that torch's losses do not count, if nothing else is said."""


def padding_words(loss: Any, batch: Any, ignored: int | None = None) -> str:
    """Return a sentence about labels that the loss ignores, in some rows more often than in others; "" where none are.

    The means of microbatches that count different numbers of labels have another mean than the batch.

    Args:
        loss: of the model; None where the net computes it of labels among its inputs.
        batch: inputs and target.
        ignored: the class that is not counted, where it is not what the loss says.
    """
    word, half = ("inputs", 0) if loss is None else ("target", 1)
    ignored = _ignored_class(loss) if ignored is None else ignored
    if ignored is None:  # a loss that counts all classes
        return ""
    way_out = (
        "hand in num_items_in_batch, a tensor with the number of labels of the whole batch, and say reduction='sum'"
        if loss is None
        else "return (total, count) and say reduction='count'"
    )
    for place, leaf in tree.paths(batch[half]):
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.dtype not in _CLASSES:
            continue
        if leaf.is_meta or leaf.is_nested or is_fake(leaf) or is_sharded(leaf) or not len(leaf):
            continue
        counts = (leaf == ignored).reshape(len(leaf), -1).sum(1)
        if bool((counts != counts[0]).any()):
            return (
                f"{word}{place} holds {ignored}, a class that the loss does not count, in some rows more often than in "
                f"others: with reduction='mean' the loss is a mean of the microbatches' means. For that of all labels "
                f"{way_out}."
            )
    return ""


_CLASSES = (torch.int64, torch.int32, torch.int16, torch.int8)


def _ignored_class(loss: Any) -> int | None:
    """Return the class that a loss does not count; None of a loss of torch's that counts all."""
    while isinstance(loss, partial):
        if "ignore_index" in loss.keywords:
            return loss.keywords["ignore_index"]
        loss = loss.func
    modules = [loss, *(module for _, module in modules_of(loss))]
    said = (getattr(module, "ignore_index", None) for module in modules)
    is_torchs = (loss if isinstance(loss, FunctionType) else type(loss)).__module__.startswith("torch.")
    counts_all = is_torchs and not (callable(loss) and "ignore_index" in signature(loss).parameters)
    return next((index for index in said if isinstance(index, int)), None if counts_all else IGNORED)


def refuse_meta(way_out: str, **given: Any) -> None:
    """A ValueError for a tensor without values."""
    for word, one in given.items():
        for place, leaf in tree.paths(one):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise ValueError(f"{word}{place} is on meta, without values: {way_out}.")


def refuse_unloaded(batch: Any, params: Any, state: Any) -> None:
    """A ValueError for parameters, or a state, without values where the batch has some: they would be read as nan."""
    if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree.leaves(batch)):
        refuse_meta("fpipe.load_params or fpipe.init_params gives it some", params=params)
        refuse_meta("fpipe.load_params(.., of=state) or fpipe.init_params(.., of=state) gives it some", state=state)


def batches_of(batch: Any, steps: int) -> Sequence[Any]:
    """The batches of several training steps."""
    if not isinstance(batch, list) or len(batch) != steps:
        found = f"a list of {len(batch)}" if isinstance(batch, list) else type(batch).__name__
        raise ValueError(f"a program of {steps} training steps takes a list of {steps} batches, found {found}.")
    return batch


def streams(batch: Any, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """A batch that is cut already as two streams, the inputs and the targets of its microbatches.

    It comes so, or as a list of pairs.

    >>> streams([("x0", "t0"), ("x1", "t1")], 2)
    (['x0', 'x1'], ['t0', 't1'])
    """
    if isinstance(batch, list):
        pairs: list[Any] = batch
        odd = next((at for at, pair in enumerate(pairs) if not isinstance(pair, tuple) or len(pair) != 2), None)  # pyright: ignore[reportUnknownArgumentType]
        if odd is not None:
            more = _AS_A_PAIR if len(pairs) == 2 else ""
            raise ValueError(f"microbatch {odd} is a pair (inputs, target), found {type(pairs[odd]).__name__}.{more}")
        batch = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    check_batch(batch)
    for word, stream in zip(BATCH, batch, strict=True):
        if not isinstance(stream, tuple | list):
            raise ValueError(
                f"{word} is a list of {count} microbatches, since they are cut already (presplit=True); found "
                f"{type(stream).__name__}."
            )
    inputs, target = batch
    if len(inputs) != len(target):
        raise ValueError(f"inputs has {len(inputs)} microbatches, target has {len(target)}; none of them is left out.")
    if len(inputs) != count:
        raise ValueError(f"the batch has {len(inputs)} microbatches, the program has {count}.")
    return inputs, target


def rows_of_each(batch: tuple[Sequence[Any], Sequence[Any]], spec: Any = None) -> tuple[int, ...]:
    """Return the rows of each microbatch of two streams: of the first leaf of its target that has some, or else of its
    inputs. Nobody cuts them, so other leaves may have other rows."""
    sizes: list[int] = []
    for number, pair in enumerate(zip(*batch, strict=True)):
        found = rows_by_leaf(pair, spec, (f"inputs of microbatch {number}", f"target of microbatch {number}"))
        of_target = [size for place, size in found.items() if place.startswith("target")]
        sizes.append([*of_target, *found.values()][0])
    return tuple(sizes)
