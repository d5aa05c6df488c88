"""Give the parameters of a rank's stages values: out of a file, or the first ones. Those of other ranks stay unread.

load_params(model, program, "model.safetensors", rank=1)        -->        (None, {"2.weight": .., "3.weight": ..})
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.model import Model, the_model
from fpipe.models.parameters.first_values import Fill, FirstValues
from fpipe.models.parameters.params import local_params
from fpipe.models.parameters.sources import TensorSource, source_of
from fpipe.positional_stage import PositionalStage, of_net
from fpipe.program import Program
from fpipe.torch_internals import held_by
from fpipe.torch_private.modules import is_saved

Params = tuple[dict[str, Tensor] | None, ...]


def load_params(
    model: Model,
    program: Program,
    source: Any,
    rank: int | None = None,
    *,
    init: Fill | None = None,
    of: Sequence[Any] | None = None,
) -> Params:
    """The parameters of one rank's stages, out of a file of the whole net. No other bytes are read.

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
        of: the module state that a front door gave, to load it in place of the parameters: the running statistics of a
            batch norm on meta.

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
    tensors, first = source_of(source), FirstValues(0, init)
    leaves = _leaves(model, of)
    aliases = _names_in_source(model, tensors, leaves, of is not None)
    _refuse_other_constants(model, tensors, local_params(program, range(len(leaves)), rank))

    def value(leaf: tuple[str, ...], home: tuple[Any, str]) -> Tensor:
        names = aliases[leaf[0]]
        if not names:
            return first.make(leaf[0], home)
        read = tensors.read(names)
        for name in names[1:]:
            if not torch.equal(read[names[0]], read[name]):
                raise ValueError(
                    f"{names[0]!r} and {name!r} are one parameter of the net, but have different values in "
                    f"{tensors.known[name].where}. Untie them in the net, or drop one of the names."
                )
        return read[names[0]].to(torch.get_default_device()) if tensors.moves else read[names[0]]

    params = _make_params(model, program, rank, leaves, value)
    first.warn()
    return params


def init_params(
    model: Model,
    program: Program,
    rank: int | None = None,
    *,
    seed: int = 0,
    init: Fill | None = None,
    of: Sequence[Any] | None = None,
) -> Params:
    """First values of the parameters of one rank's stages that are on meta, with the same bits on any number of ranks
    and in any cut. Those that have values, as a pretrained part of the net has, keep them.

    Args:
        model, program, rank: as for `load_params`.
        seed: a whole number. The random numbers of each module follow from it and the module's name.
        init: `init(name, tensor)` fills a leaf in place, its random numbers from the seed and its name. Without it, or
            where it returns False, a leaf that is not on meta is copied, and one on meta is filled by the
            `reset_parameters` of the module that has it; what that writes into children is not seen. Values that a
            constructor or another module gives a parameter are lost on meta: say them here. A warning names those
            written in place; not those assigned, written through `.data`, or of deep-copied blocks.
        of: the module state that a front door gave, for the first values of that in place of the parameters'.

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
    first = FirstValues(seed, init)
    leaves = _leaves(model, of)
    if init is None and of is None:
        _warn_if_all_have_values(model, leaves)
    params = _make_params(model, program, rank, leaves, lambda leaf, home: first.make(leaf[0], home))
    first.warn()
    return params


def _warn_if_all_have_values(model: Model, leaves: Sequence[Sequence[tuple[str, ...]]]) -> None:
    """Warn if all parameters of a net, on whichever rank, have values."""
    names = [(leaf[0], run) for run, stage in zip(net_stages(model), leaves, strict=True) for leaf in stage]
    if names and not any(getattr(*run.home_of(name)).is_meta for name, run in names):
        warnings.warn(
            f"init_params copies {names[0][0]!r}{f' and {len(names) - 1} more' * (len(names) > 1)}: no parameter of "
            "the net is on meta, so the seed changes nothing. For first values make the net under "
            'torch.device("meta"), or say init=.',
            stacklevel=3,
        )


def _leaves(model: Model, state: Sequence[Any] | None) -> list[list[tuple[str, ...]]]:
    """Return the leaves of each stage by all their names: parameters that live there, or its state."""
    stages = the_model(model).stages
    if state is None:
        return [[*model.living(number)] for number in range(len(stages))]
    if len(state) != len(stages):
        raise ValueError(f"of= is the module state of all {len(stages)} stages; found {len(state)}.")
    return [[(name,) for name in names or ()] for names in state]


def _make_params(
    model: Model,
    program: Program,
    rank: int | None,
    leaves: Sequence[Sequence[tuple[str, ...]]],
    value: Callable[[tuple[str, ...], tuple[Any, str]], Tensor],
) -> Params:
    """Make the leaves that live in the stages of a rank, each from its names and its home in the net."""
    stages = [*net_stages(model)]
    local = local_params(program, range(len(stages)), rank)
    return tuple(
        None if number is None else {leaf[0]: value(leaf, stages[number].home_of(leaf[0])) for leaf in leaves[number]}
        for number in local
    )


def net_stages(model: Model) -> Iterator[PositionalStage]:
    """Yield the stages, which know where a net has their parameters."""
    for number, stage in enumerate(the_model(model).stages):
        run = of_net(stage.forward)
        if run is None or model.whole is not None:
            raise TypeError(
                f"the parameters of stage {number} are of no module that could say their names and shapes: this is for "
                "models of from_module and from_sequential. fpipe.split_params and local_params take what you have."
            )
        yield run


def _names_in_source(
    model: Model, source: TensorSource, leaves: Sequence[Sequence[tuple[str, ...]]], may_lack: bool
) -> dict[str, list[str]]:
    """Return the names in a source of each leaf of the model; refuse names, shapes and dtypes that do not fit.

    All stages are compared, so that all ranks refuse alike.
    """
    names_by_leaf: dict[str, list[str]] = {}
    net_names: set[str] = set()
    for number, run in enumerate(net_stages(model)):
        net_names.update(run.all_names())
        for leaf in leaves[number]:
            names = names_by_leaf[leaf[0]] = [name for name in leaf if name in source.known]
            if not names and not may_lack and (number, leaf[0]) not in model.frozen:
                raise ValueError(
                    f"the source lacks {leaf[0]!r}, a parameter of {model.who(number)}; it has "
                    f"{_few(source.known)}. Names are those of net.state_dict(); hand in a state_dict whose keys are."
                )
            wanted: Tensor = getattr(*run.home_of(leaf[0]))
            for name in names:
                dtype, shape, where = source.known[name]
                if shape != tuple(wanted.shape):
                    raise ValueError(f"{name!r} has shape {[*wanted.shape]} in the net, and {[*shape]} in {where}.")
                if dtype != wanted.dtype:
                    raise ValueError(
                        f"{name!r} is {wanted.dtype} in the net, and {dtype} in {where}: cut the net after "
                        f".to({dtype}), or save the file in the net's dtype."
                    )
    unknown = next((name for name in source.known if name not in net_names), None)
    if unknown is not None:
        raise ValueError(
            f"{source.known[unknown].where} has {unknown!r}, which is no parameter or buffer of the net; that has "
            f"{_few(net_names)}."
        )
    return names_by_leaf


def _refuse_other_constants(model: Model, source: TensorSource, local: Sequence[int | None]) -> None:
    """Raise ValueError if a source has other values of what a rank's stages read of the net itself."""
    for number, run in enumerate(net_stages(model)):
        constants = zip(run.fixed, run.constants(), strict=True) if local[number] is not None else ()
        for name, constant in constants:
            if name in source.known and not constant.is_meta and is_saved(*run.home_of(name)):
                saved = source.read([name])[name]
                if saved.shape != constant.shape or not torch.equal(saved.to(constant), constant.detach()):
                    raise ValueError(
                        f"{name!r} is a constant of {model.who(number)}, which reads the net's own, and has other "
                        f"values in {source.known[name].where}. Load those into the net before it is cut, or make "
                        "it on meta, where what nothing writes is loaded as parameters are."
                    )


def _few(names: Mapping[str, Any] | set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(map(repr, first)) + f" and {len(names) - len(first)} more" * (len(names) > len(first)) or "none"


# Notice that a net has other parameters than those that a front door handed out, which an optimizer goes on writing.


class HandedOut:
    """The parameters of a net that were handed out: where the net has them, and their addresses in memory.

    >>> net = nn.Linear(2, 2)
    >>> handed_out = HandedOut(dict(net.named_parameters()), [net])
    >>> before, net.weight.data = handed_out.moved(), net.weight.data + 1
    >>> [*before], [*handed_out.moved()]
    ([], ['weight'])
    """

    def __init__(self, parameters: Mapping[str, Tensor], modules: Iterable[nn.Module]) -> None:
        module_dicts = [held_by(module).parameters for module in modules]
        homes = {id(leaf): (held, key) for held in module_dicts for key, leaf in held.items()}
        known = {
            name: (homes[id(leaf)], address)
            for name, leaf in parameters.items()
            if id(leaf) in homes and (address := _address(leaf))
        }
        self.names = [*known]
        self.homes = [home for home, _ in known.values()]
        self.addresses = [address for _, address in known.values()]

    def moved(self) -> dict[str, int]:
        """Return the parameters that the net has elsewhere by now, with the addresses of what was handed out."""
        current = [held.get(key) for held, key in self.homes]
        with suppress(TypeError):  # one may be None by now
            if [*map(Tensor.data_ptr, current)] == self.addresses:  # pyright: ignore[reportArgumentType]
                return {}
        triples = zip(self.names, current, self.addresses, strict=True)
        return {name: address for name, leaf, address in triples if leaf is None or leaf.data_ptr() != address}

    def __reduce__(self) -> tuple[type[HandedOut], tuple[dict[str, Tensor], tuple[()]]]:
        return HandedOut, ({}, ())  # of a copied net nothing was handed out


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor in memory; 0 if it has none, or several."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
