"""Check params, state and batch against a model: a pytree for each stage, with its names, ties and frozen leaves.

params[0]: {"0.weight": w}, params[1]: {"1.w": v}        --> check_params -->        unchanged, or a ValueError
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.sharded import refuse_sharded
from fpipe.meaning.single_device.microbatch import BATCH, named_leaves, rows_by_leaf
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage


def check_params(model: Model, params: Any) -> Sequence[Any]:
    """Return params if they fit the model: one pytree per stage, a dict where a leaf is tied; else raise ValueError."""
    if not isinstance(params, (tuple, list)) or len(params) != len(model.stages):
        count = f"{len(params)} of them" if isinstance(params, (tuple, list)) else type(params).__name__
        raise ValueError(
            f"params is a tuple with one pytree for each of the {len(model.stages)} stages, found {count}."
            f"{_how_to_split_params(model)}"
        )
    for number, stage in enumerate(model.stages):
        if stage.names and not isinstance(params[number], Mapping):
            class_name = type(params[number]).__name__
            raise ValueError(
                f"params of stage {number} is a dict of its parameters by name, found {class_name}; the batch comes "
                f"after params.{_how_to_split_params(model)}"
            )
    # Tied leaves are moved between stages by name, so both stages need dicts.
    tied = [leaf for uses in model.tied_uses for leaf in uses]
    for leaf in tied:
        if not isinstance(params[leaf.stage], Mapping):
            class_name = type(params[leaf.stage]).__name__
            raise ValueError(
                f"leaf {leaf.name!r} of stage {leaf.stage} is tied, so that stage's params are a dict; found "
                f"{class_name}."
            )
    _refuse_replaced_params(model, params)
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


def _refuse_replaced_params(model: Model, params: Sequence[Any]) -> None:
    """Raise ValueError for a parameter that was returned with the model and has been replaced in the net since."""
    for number, stage in enumerate(model.stages):
        addresses = stage.forward.moved_params() if isinstance(stage.forward, PositionalStage) else {}
        # A tensor in params at the address that the net's had before: the caller passes the old one on.
        for name, address in addresses.items():
            param = params[number].get(name)
            if hasattr(param, "data_ptr") and not hasattr(param, "fake_mode") and param.data_ptr() == address:
                raise ValueError(
                    f"params of stage {number} have the {name!r} that was handed out with the model; the net has "
                    f"another tensor in its place by now.{_how_to_split_params(model)} Or cut the net again."
                )


def _how_to_split_params(model: Model) -> str:
    if all(stage.names is None for stage in model.stages):
        return ""
    if model.params_spec is None:
        return " fpipe.split_params(model, net.state_dict()) makes it of those of the whole."
    return " fpipe.split_params(model, whole) makes it of the whole pytree, as from_loss takes it."


def check_state(
    model: Model, state: Any, readers: Collection[int], reader: str = "this program", call: str = "step"
) -> None:
    """Check that module state is one pytree per stage, with the buffers that a stage's modules write.

    Args:
        model: the stages.
        state: the state to check.
        readers: the stages whose state is read.
        reader, call: what reads the state and what it is passed to, for errors.

    Raises:
        ValueError: the state does not fit; the error names the stage.
    """
    if state is None:
        for number in sorted(readers):
            description_of_stage = (
                f", the module state of {model.label_of(number)}" if model.stages[number].name else ""
            )
            raise ValueError(
                f"{reader} reads state[{number}]{description_of_stage}: hand it in as {call}(..., state=...)."
            )
        return
    if not isinstance(state, (tuple, list)) or len(state) != len(model.stages):  # pyright: ignore[reportUnknownArgumentType]
        description = len(state) if isinstance(state, (tuple, list)) else type(state).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"state has {len(model.stages)} entries, one a stage; found {description}.")
    for number in sorted(readers):
        stage_state: Any = state[number]
        stage = model.stages[number].forward
        buffer_names = stage.state_names if isinstance(stage, PositionalStage) else ()
        if buffer_names and not isinstance(stage_state, Mapping):
            raise ValueError(f"state of stage {number} is a dict of its buffers, found {type(stage_state).__name__}.")
        for missing in (name for name in buffer_names if name not in stage_state):
            raise ValueError(f"state of stage {number} must have {missing!r}, which is missing.")


def check_all_state(model: Model, state: Sequence[Any] | None, call: str) -> None:
    """Check that `state` has the state of every stage that reads one; `call` is what takes it, for errors."""
    reading = {n for n, stage in enumerate(model.stages) if "state" in stage.keywords}
    check_state(model, state, reading, "this model", call)


def trainable_leaves(model: Model, stage: int, full: Any) -> list[bool]:
    """Return for each leaf of a stage, tied ones too, whether it is trained: floating, and not frozen at its owner."""
    owner_by_name: dict[Any, tuple[int, str]] = {leaf.name: (leaf.owner, leaf.owner_name) for leaf in model.tied(stage)}
    names: Any = full if isinstance(full, Mapping) and (owner_by_name or model.frozen) else {None: full}
    trainable: list[bool] = []
    for name, subtree in names.items():
        owner, leaf = owner_by_name.get(name, (stage, name))
        is_frozen = not model.frozen.isdisjoint({(owner, leaf), (owner, None)})
        trainable += [is_differentiable(leaf_value) and not is_frozen for leaf_value in tree.leaves(subtree)]
    return trainable


def trainable_bundle_leaves(model: Model, stage: int, port: int, bundle: Any) -> list[bool]:
    """Return for each leaf of a parameter bundle whether it is trained.

    Bundle 0 of a stage is all parameters that are not tied; the others are the tied leaves that it owns, in order.
    """
    return trainable_leaves(model, stage, {model.owned(stage)[port - 1].name: bundle} if port else bundle)


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf is a tensor of floating or complex numbers."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def wants_grad(leaf: Any) -> bool:
    """Whether a leaf is a tensor that autograd takes a gradient of."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def net_order(model: Model, per_stage: Sequence[Any]) -> list[int]:
    """Return the indices of all stages' leaves (parameters or gradients) in the order of the net.

    That is the order of `named_parameters()`, in which torch stacks the norms of gradients. Floats round differently in
    another order, so whatever takes a norm of several leaves asks here, and not how the net was cut.
    """
    position = {name: index for index, name in enumerate(model.leaf_order)}
    positions = [position.get(name, len(position)) for stage in per_stage for name in _leaf_names(stage)]
    return sorted(range(len(positions)), key=positions.__getitem__)


def _leaf_names(stage: Any) -> list[str]:
    """Return the name of each leaf of a stage; "" for a pytree that is no dict."""
    if not isinstance(stage, Mapping):
        return [""] * len(tree.leaves(stage))
    return [name for name, value in stage.items() for _ in tree.leaves(value)]


def add_tied_leaves(model: Model, params: Sequence[Any]) -> list[Any]:
    """Return each stage's parameters as its function takes them, with the tied leaves that other stages own."""
    # uses[0] is the owner's own use, where the leaf is already.
    full = list(check_params(model, params))
    for stage, name, _, owner, owner_name, _ in (leaf for uses in model.tied_uses for leaf in uses[1:]):
        full[stage] = {**full[stage], name: params[owner][owner_name]}
    return full


# Check a batch, and turn one that is cut already into streams of microbatches.

_AS_A_PAIR = " If the list is [inputs, target], as a DataLoader gives it, hand in tuple(batch)."


def refuse_extra_arguments(extra: Sequence[Any], call: str) -> None:
    """Raise TypeError for arguments after the batch, as in `step(params, x, y)`."""
    if extra and callable(extra[0]) and not isinstance(extra[0], Tensor):
        raise TypeError("a step calls no closure: it computes loss, gradients and update itself; leave it out.")
    if extra:
        raise TypeError(
            f"a batch is one pair: {call.format('(inputs, target)')}; found {len(extra) + 1} arguments after params. "
            "Pass state and key by name."
        )


def check_batch(batch: Any) -> None:
    """Raise ValueError or TypeError unless a batch is a pair of pytrees of torch tensors."""
    if not isinstance(batch, tuple) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
        hint = (
            "" if not isinstance(batch, list) else f" What is cut already goes to split(m, presplit=True).{_AS_A_PAIR}"
        )
        raise ValueError(f"a batch is a pair (inputs, target), found {type(batch).__name__}.{hint}")
    # Hugging Face's BatchEncoding and the like are mappings that torch does not know as pytrees.
    tree.register_mappings(batch)
    # Every step comes here, and the paths of sixteen microbatches take 0.2 ms.
    if all(type(leaf) is Tensor for leaf in tree.leaves(batch)):
        return
    for path, leaf in named_leaves(batch, BATCH):
        refuse_sharded([leaf], path)
        if isinstance(leaf, Tensor):
            continue
        # A numpy scalar has no rows and may go whole to every microbatch; an array would lose its rows.
        if hasattr(leaf, "__array__") and getattr(leaf, "ndim", 1):
            class_name = f"{type(leaf).__module__.split('.')[0]}.{type(leaf).__name__}"
            raise TypeError(
                f"{path} is a {class_name}, which is no tensor of torch's: hand in torch.from_numpy(...) of it."
            )
        tensor_path = _find_tensor(leaf)
        if tensor_path is not None:
            # The function of a mask takes the index of a row in the whole batch, which a split would change.
            is_mask = type(leaf).__name__ == "BlockMask"
            advice = "Hand in a dict, or call register_pytree_node."
            advice = "Make it in the stage, by create_block_mask on tensors of the batch." if is_mask else advice
            raise TypeError(
                f"{path} is a {type(leaf).__name__}, no pytree, and holds a tensor ({tensor_path}). {advice}"
            )


def _find_tensor(holder: Any, depth: int = 4, depth_by_id: dict[int, int] | None = None) -> str | None:
    """Return the path to a tensor inside an object that is no pytree, as Python code; None if it holds none."""
    # An object is searched again only where a shorter path to it leaves more depth.
    depth_by_id = {} if depth_by_id is None else depth_by_id
    if depth_by_id.get(id(holder), -1) >= depth or isinstance(holder, type | str | bytes | int | float):
        return None
    depth_by_id[id(holder)] = depth
    parts = [(f".{name}", part) for name, part in getattr(holder, "__dict__", {}).items()]
    parts += [(f".{name}", getattr(holder, name, None)) for name in getattr(type(holder), "__slots__", ())]
    if isinstance(holder, Mapping):
        parts += [(f"[{key!r}]", part) for key, part in holder.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif isinstance(holder, list | tuple | set | frozenset):
        parts += [(f"[{index}]", part) for index, part in enumerate(holder)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    for path, part in parts:
        if isinstance(part, Tensor):
            return path
        tensor_path = _find_tensor(part, depth - 1, depth_by_id) if depth else None
        if tensor_path is not None:
            return path + tensor_path
    return None


def refuse_lost_gradients(inputs: Any, target: Any, remedy: str) -> None:
    """Raise ValueError for a tensor of a batch that requires a gradient which the step does not return.

    Args:
        inputs, target: both sides of the batch; None for inputs whose gradients are returned.
        remedy: how to get the gradients of inputs.
    """
    for name, side, advice in (("inputs", inputs, f"say {remedy}, or "), ("target", target, "")):
        for path, leaf in tree.paths(side):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"{name}{path} requires a gradient, which would be lost: {advice}hand in its .detach()."
                )


def refuse_meta(remedy: str, **pytree_by_name: Any) -> None:
    """Raise ValueError for a tensor on meta, which has no values."""
    for name, pytree in pytree_by_name.items():
        for path, leaf in tree.paths(pytree):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise ValueError(f"{name}{path} is on meta, without values: {remedy}.")


def refuse_unloaded(batch: Any, params: Any, state: Any) -> None:
    """Raise ValueError for parameters or a state on meta where the batch has values."""
    if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree.leaves(batch)):
        refuse_meta("fpipe.load_params or fpipe.init_params gives it some", params=params)
        refuse_meta(
            "fpipe.load_params(.., state=state) or fpipe.init_params(.., state=state) gives it some", state=state
        )


def check_batches(batch: Any, steps: int) -> Sequence[Any]:
    """Return the batches of several training steps, or raise ValueError if their number is another."""
    if not isinstance(batch, list) or len(batch) != steps:
        description = f"a list of {len(batch)}" if isinstance(batch, list) else type(batch).__name__
        raise ValueError(f"a program of {steps} training steps takes a list of {steps} batches, found {description}.")
    return batch


def as_streams(batch: Any, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return a batch that is cut already as two streams: the inputs and the targets of its microbatches.

    The batch is such a pair of streams, or a list of pairs.

    >>> as_streams([("x0", "t0"), ("x1", "t1")], 2)
    (['x0', 'x1'], ['t0', 't1'])
    """
    if isinstance(batch, list):
        pairs: list[Any] = batch
        misfit = next(
            (index for index, pair in enumerate(pairs) if not isinstance(pair, tuple) or len(pair) != 2), None
        )  # pyright: ignore[reportUnknownArgumentType]
        if misfit is not None:
            hint = _AS_A_PAIR if len(pairs) == 2 else ""
            class_name = type(pairs[misfit]).__name__
            raise ValueError(f"microbatch {misfit} is a pair (inputs, target), found {class_name}.{hint}")
        batch = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    check_batch(batch)
    for name, stream in zip(BATCH, batch, strict=True):
        if not isinstance(stream, tuple | list):
            raise ValueError(
                f"{name} is a list of {count} microbatches, since they are cut already (presplit=True); found "
                f"{type(stream).__name__}."
            )
    inputs, target = batch
    if len(inputs) != len(target):
        raise ValueError(f"inputs has {len(inputs)} microbatches, target has {len(target)}; none of them is left out.")
    if len(inputs) != count:
        raise ValueError(f"the batch has {len(inputs)} microbatches, the program has {count}.")
    return inputs, target


def rows_per_microbatch(batch: tuple[Sequence[Any], Sequence[Any]], spec: Any = None) -> tuple[int, ...]:
    """Return the number of rows of each microbatch, from the first leaf with rows of its target, or else inputs."""
    # Microbatches that the user cut may have leaves of several lengths; only the weight in the loss needs one number.
    sizes: list[int] = []
    for index, pair in enumerate(zip(*batch, strict=True)):
        rows_by_path = rows_by_leaf(pair, spec, (f"inputs of microbatch {index}", f"target of microbatch {index}"))
        of_target = [size for path, size in rows_by_path.items() if path.startswith("target")]
        sizes.append([*of_target, *rows_by_path.values()][0])
    return tuple(sizes)
