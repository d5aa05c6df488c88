"""Make the parameters of one rank's stages: read them from a file, and no others, or initialise them.

load_params(model, program, "model.safetensors", rank=1)        -->        (None, {"2.weight": .., "3.weight": ..})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.model import Model, prefix_hint
from fpipe.models.parameters.first_values import Fill, FirstValues
from fpipe.models.parameters.params import local_params
from fpipe.models.parameters.sources import TensorSource, source_of
from fpipe.positional_stage import PositionalStage, net_stage_of
from fpipe.program import Program
from fpipe.torch_internals import direct_members, warn
from fpipe.torch_private.modules import is_in_state_dict

Params = tuple[dict[str, Tensor] | None, ...]


def load_params(
    model: Model,
    program: Program,
    source: Any,
    rank: int | None = None,
    *,
    init: Fill | None = None,
    state: Sequence[Any] | None = None,
) -> Params:
    """Read the parameters of one rank's stages from a file of the whole net, and no other bytes.

    Args:
        model: made by `from_module` or `from_sequential`, of a net whose parameters may be on meta.
        program: a program that is placed, as a schedule does; its inputs say where parameters are at home.
        source: a `.safetensors` file; the `model.safetensors.index.json` of several; a folder that has one of these, or
            that `torch.distributed.checkpoint` has saved a state_dict in, or `fpipe.save` a training; or a state_dict,
            whose tensors are handed on as they are. One of several names of a tied parameter will do.
        rank: whose; without it this process's rank in torch.distributed's default group.
        init: `init(name, tensor)` fills in place what the source need not have, frozen parameters and buffers on meta
            such as the table of a rotary embedding. Without it, or where it returns False, the `reset_parameters` of
            the module that has the leaf does.
        state: the module state that a front door gave, such as the running statistics of a batch norm on meta. If it
            is given, its leaves are read in place of the parameters.

    Returns:
        The tuple of all stages, as `local_params` gives it: None for the stages of other ranks. Tensors are on torch's
        default device.

    Raises:
        TypeError, ValueError: a source that is none of these; a name that it lacks, or that the net does not have;
            another shape or dtype, or another value of a tied name or of what the net has itself; a leaf that nothing
            gives values.
        OSError: there is no such file.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> weights = net.state_dict()
    >>> model, meta, _ = fpipe.from_sequential(net.to("meta"), stages=2, loss=torch.nn.functional.mse_loss)
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    >>> mine = fpipe.load_params(model, program, weights, rank=1)
    >>> mine[0], list(mine[1])
    (None, ['1.weight', '1.bias'])
    """
    # The names of all stages are compared, so that every rank raises the same error; values are read for one rank.
    tensors, first_values = source_of(source), FirstValues(0, init)
    leaves = _leaves(model, state)
    aliases = _names_in_source(model, tensors, leaves, state is not None)
    _refuse_other_constants(model, tensors, local_params(program, range(len(leaves)), rank))

    def value(leaf: tuple[str, ...], home: tuple[Any, str]) -> Tensor:
        names = aliases[leaf[0]]
        if not names:
            return first_values.make(leaf[0], home)
        tensor_by_name = tensors.read_tensors(names)
        for name in names[1:]:
            if not torch.equal(tensor_by_name[names[0]], tensor_by_name[name]):
                raise ValueError(
                    f"{names[0]!r} and {name!r} are one parameter of the net, and differ in "
                    f"{tensors.saved_tensors[name].file}. Untie them in the net, or drop one of the names."
                )
        tensor = tensor_by_name[names[0]]
        return tensor.to(torch.get_default_device()) if tensors.is_read_to_cpu else tensor

    params = _make_params(model, program, rank, leaves, value)
    first_values.warn()
    return params


def init_params(
    model: Model,
    program: Program,
    rank: int | None = None,
    *,
    seed: int = 0,
    init: Fill | None = None,
    state: Sequence[Any] | None = None,
) -> Params:
    """Make the first values of the parameters on meta of one rank's stages.

    They have the same bits on any number of ranks and in any cut. Parameters that have values, as in a pretrained part
    of the net, keep them.

    Args:
        model, program, rank: as for `load_params`.
        seed: a whole number. The random numbers of each module follow from it and the module's name.
        init: `init(name, tensor)` fills a leaf in place, its random numbers from the seed and its name. Without it, or
            where it returns False, a leaf that is not on meta is copied, and one on meta is filled by the
            `reset_parameters` of the module that has it; what that writes into children is not seen. Values that a
            constructor or another module gives a parameter are lost on meta: say them here. A warning names those
            written in place; not those assigned, written through `.data`, or of deep-copied blocks.
        state: the module state that a front door gave. If it is given, its leaves are made in place of the parameters.

    Returns:
        The tuple of all stages, None for those of other ranks, on torch's default device. A tied parameter has one
        value, where it lives.

    Warns:
        UserWarning: no parameter of the net is on meta, so a seed changes nothing; or values that were lost.

    Raises:
        TypeError: a seed that is no whole number.
        ValueError: a leaf that nothing gives values: the name, and the module that has it.

    >>> import fpipe, torch
    >>> with torch.device("meta"):
    ...     net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, meta, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    >>> alone = fpipe.init_params(model, fpipe.program(model), rank=0, seed=1)
    >>> torch.equal(fpipe.init_params(model, program, rank=1, seed=1)[1]["1.weight"], alone[1]["1.weight"])
    True
    """
    first_values = FirstValues(seed, init)
    leaves = _leaves(model, state)
    if init is None and state is None:
        _warn_if_all_have_values(model, leaves)
    params = _make_params(model, program, rank, leaves, lambda leaf, home: first_values.make(leaf[0], home))
    first_values.warn()
    return params


def _warn_if_all_have_values(model: Model, leaves: Sequence[Sequence[tuple[str, ...]]]) -> None:
    """Warn if all parameters of a net, on whichever rank, have values."""
    names = [(leaf[0], run) for run, stage in zip(net_stages(model), leaves, strict=True) for leaf in stage]
    if names and not any(getattr(*run.home_of(name)).is_meta for name, run in names):
        warn(
            f"init_params copies {names[0][0]!r}{f' and {len(names) - 1} more' * (len(names) > 1)}: no parameter of "
            "the net is on meta, so the seed changes nothing. For first values make the net under "
            'torch.device("meta"), or say init=.',
            stacklevel=3,
        )


def _leaves(model: Model, state: Sequence[Any] | None) -> list[list[tuple[str, ...]]]:
    """Return the leaves of each stage by all their names: parameters that live there, or its state."""
    stages = model.stages
    if state is None:
        return [[*model.owned_param_names(number)] for number in range(len(stages))]
    if len(state) != len(stages):
        raise ValueError(f"state= has {len(stages)} entries, one a stage; found {len(state)}.")
    return [[(name,) for name in names or ()] for names in state]


def _make_params(
    model: Model,
    program: Program,
    rank: int | None,
    leaves: Sequence[Sequence[tuple[str, ...]]],
    value: Callable[[tuple[str, ...], tuple[Any, str]], Tensor],
) -> Params:
    stages = [*net_stages(model)]
    local = local_params(program, range(len(stages)), rank)
    return tuple(
        None if number is None else {leaf[0]: value(leaf, stages[number].home_of(leaf[0])) for leaf in leaves[number]}
        for number in local
    )


def net_stages(model: Model) -> Iterator[PositionalStage]:
    """Yield the stage functions of a model that is made of a net; they know where the net has their parameters."""
    for number, stage in enumerate(model.stages):
        run = net_stage_of(stage.forward)
        if run is None or model.params_spec is not None:
            raise TypeError(
                f"stage {number} is of no module, so its parameters have no names. This takes models of from_module "
                "and from_sequential; otherwise use fpipe.split_params and local_params."
            )
        yield run


def _names_in_source(
    model: Model, source: TensorSource, leaves: Sequence[Sequence[tuple[str, ...]]], may_lack: bool
) -> dict[str, list[str]]:
    """Return the names in a source of each leaf of the model; refuse names, shapes and dtypes that do not fit."""
    # All stages are compared, so that all ranks refuse alike.
    names_by_leaf: dict[str, list[str]] = {}
    net_names: set[str] = set()
    for number, run in enumerate(net_stages(model)):
        net_names.update(run.all_names())
        for leaf in leaves[number]:
            names = names_by_leaf[leaf[0]] = [name for name in leaf if name in source.saved_tensors]
            if not names and not may_lack and (number, leaf[0]) not in model.frozen:
                raise ValueError(
                    f"the source lacks {leaf[0]!r}, a parameter of {model.label_of(number)}; it has "
                    f"{_list_some(source.saved_tensors)}. Its names must be those of net.state_dict()."
                    f"{prefix_hint(source.saved_tensors, leaf[0])}"
                )
            net_tensor: Tensor = getattr(*run.home_of(leaf[0]))
            for name in names:
                dtype, shape, file = source.saved_tensors[name]
                if shape != tuple(net_tensor.shape):
                    raise ValueError(f"{name!r} has shape {[*net_tensor.shape]} in the net, {[*shape]} in {file}.")
                if dtype != net_tensor.dtype:
                    raise ValueError(
                        f"{name!r} is {net_tensor.dtype} in the net, and {dtype} in {file}: cut the net after "
                        f".to({dtype}), or save the file in the net's dtype."
                    )
    unknown = next((name for name in source.saved_tensors if name not in net_names), None)
    if unknown is not None:
        raise ValueError(
            f"{source.saved_tensors[unknown].file} has {unknown!r}, which is no parameter or buffer of the net; "
            f"that has {_list_some(net_names)}."
        )
    return names_by_leaf


def _refuse_other_constants(model: Model, source: TensorSource, local: Sequence[int | None]) -> None:
    """Raise ValueError if a source has other values of constants than the net, whose own the stages of a rank read."""
    for number, run in enumerate(net_stages(model)):
        constants = zip(run.fixed, run.constants(), strict=True) if local[number] is not None else ()
        for name, constant in constants:
            if name in source.saved_tensors and not constant.is_meta and is_in_state_dict(*run.home_of(name)):
                saved = source.read_tensors([name])[name]
                if saved.shape != constant.shape or not torch.equal(saved.to(constant), constant.detach()):
                    raise ValueError(
                        f"{name!r} is a constant of {model.label_of(number)}, and has other values in "
                        f"{source.saved_tensors[name].file}. Load those into the net first, or make it on meta."
                    )


def _list_some(names: Mapping[str, Any] | set[str]) -> str:
    text = ", ".join(map(repr, sorted(names)[:3]))
    return text + f" and {len(names) - 3} more" * (len(names) > 3) or "none"


# Notice that a net's parameters were moved or replaced, say by net.to(..), while an optimizer still writes the tensors
# that a front door has returned.


class ParamAddresses:
    """The addresses in memory of the parameters that a front door has returned, and where the net has these.

    >>> net = nn.Linear(2, 2)
    >>> addresses = ParamAddresses(dict(net.named_parameters()), [net])
    >>> before, net.weight.data = addresses.moved(), net.weight.data + 1
    >>> [*before], [*addresses.moved()]
    ([], ['weight'])
    """

    def __init__(self, parameters: Mapping[str, Tensor], modules: Iterable[nn.Module]) -> None:
        module_dicts = [direct_members(module).parameters for module in modules]
        home_by_id = {id(leaf): (params, key) for params in module_dicts for key, leaf in params.items()}
        home_and_address = {
            name: (home_by_id[id(leaf)], address)
            for name, leaf in parameters.items()
            if id(leaf) in home_by_id and (address := _address(leaf))
        }
        self.names = [*home_and_address]
        self.homes = [home for home, _ in home_and_address.values()]
        self.addresses = [address for _, address in home_and_address.values()]

    def moved(self) -> dict[str, int]:
        """Return the old addresses of the parameters that the net has at other addresses now, by name."""
        # This runs at each step. Comparing two lists of numbers is the fast path; names are looked up only on a change.
        current = [params.get(key) for params, key in self.homes]
        # data_ptr raises TypeError if a parameter has become None.
        with suppress(TypeError):
            if [*map(Tensor.data_ptr, current)] == self.addresses:  # pyright: ignore[reportArgumentType]
                return {}
        triples = zip(self.names, current, self.addresses, strict=True)
        return {name: address for name, leaf, address in triples if leaf is None or leaf.data_ptr() != address}

    def __reduce__(self) -> tuple[type[ParamAddresses], tuple[dict[str, Tensor], tuple[()]]]:
        # A copied net has returned no parameters yet.
        return ParamAddresses, ({}, ())


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor in memory; 0 if it has none, or several."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
