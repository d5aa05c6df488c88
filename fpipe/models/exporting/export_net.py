"""Export a module as one graph of torch's operations above autograd, whose nodes say which module they come from.

net(**inputs)        --> torch.export -->        wte  add  h.0: layer_norm, linear, ...  h.1: ...  lm_head: linear

Rows stay symbolic, and so does the second dimension of integers, the length of a sequence, where the net allows it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from fpipe import tree
from fpipe.meaning.purity.attributes import Attributes
from fpipe.meaning.purity.fingerprint import refuse_net
from fpipe.meaning.purity.sharded import is_sharded, refuse_sharded
from fpipe.meaning.stages.outputs import in_words
from fpipe.models.modules.modes import tracks
from fpipe.models.tracing.boundary import marking
from fpipe.models.tracing.net_graph import OnlyTraceable, without_checkpoints
from fpipe.models.tracing.places import noting_places, place_of_caller, place_of_error
from fpipe.models.tracing.sharded_net import as_whole
from fpipe.program import building
from fpipe.torch_internals import held_by
from fpipe.torch_private.fx import import_export, quiet_export
from fpipe.torch_private.modules import told_of_assignments


def export_net(net: nn.Module, inputs: Any) -> ExportedProgram:
    """The module as an exported program, in the mode that it is in; it stays as it is. Of one that torch.export does
    not take a ValueError says why, and in which line."""
    _refuse_unexportable(net)
    refuse_sharded(tree.leaves(inputs), "the example")
    args, kwargs = call_of(two_rows(inputs))
    signature = _signature(net, args, kwargs)
    shapes: Any = tree.tree_map(_open_dims, dict(signature.bind(*args, **kwargs).arguments))
    attributes = Attributes([*net.named_modules()], contents=True)
    assigned: list[str] = []
    only_traceable = OnlyTraceable("the net", False)
    try:
        with (
            torch.enable_grad(),
            only_traceable,
            marking(),
            without_cache(net),
            quiet_export(),
            _noting_attributes(net, assigned),
            noting_places(),
            without_checkpoints(),
            as_whole(net) as trace,
            _on_meta(net) as on_meta,
        ):
            if on_meta:
                args, kwargs = tree.tree_map(_without_data, (args, kwargs))
            forward: Any = partial(trace.run, net.forward) if trace else net.forward
            forward = partial(_writing_back, net, forward, only_traceable.returned)
            forward.__signature__ = signature
            net.forward = forward
            with building():  # a third of the time of its imports is a walk of the collector over all of them
                import_export()
            exported = torch.export.export(net, args, kwargs, strict=False, dynamic_shapes=shapes)
            _name_modules_of_slices(exported, net)
            if trace is not None:
                trace.settle(exported.graph_module)
    except Exception as error:
        late = isinstance(error, UserWarning) and assigned
        place = assigned[-1] if late else place_of_error(error, net.named_modules())
        raise ValueError(_reason(net, error, place, _left_out(signature, args, kwargs))) from error
    finally:
        attributes.restore()
    only_traceable.warn(5)
    return exported


@contextmanager
def _on_meta(net: nn.Module) -> Generator[bool]:
    """Keep all tensors of a net on meta, and make new ones there, if one of its parameters is; yield whether one is."""
    is_on_meta = any(parameter.is_meta for parameter in net.parameters())
    dicts: list[Any] = [held for module in net.modules() for held in (*held_by(module)[:2], vars(module))]
    places = [(held, name, tensor) for held in dicts for name, tensor in held.items() if isinstance(tensor, Tensor)]
    places = [(held, name, tensor) for held, name, tensor in places if is_on_meta and not tensor.is_meta]
    moved = {id(tensor): _without_data(tensor) for _, _, tensor in places}
    try:
        for held, name, tensor in places:
            held[name] = moved[id(tensor)]
        with torch.device("meta") if is_on_meta else nullcontext():
            yield is_on_meta
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(leaf.detach().to("meta"), leaf.requires_grad)
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _writing_back(
    net: nn.Module, forward: Callable[..., Any], returned: Callable[[Any], Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a net, and write what it binds to buffers into those that were there, which is what an export sees: of
    modules inside the net it would lose it."""
    buffer_dicts = [held_by(module).buffers for module in net.modules()]
    before = [(buffers, name, buffer) for buffers in buffer_dicts for name, buffer in buffers.items()]
    output = returned(forward(*args, **kwargs))
    for buffers, name, old in before:
        new = buffers.get(name)
        if new is not old and isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape:
            buffers[name] = old.copy_(new)
    return output


def _signature(net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a net, a parameter for each keyword that it takes by **kwargs, which have no open sizes."""
    signature = inspect.signature(net.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"the example is no call of {type(net).__name__}.forward: {error}.") from None
    named = [word for word in signature.parameters.values() if word.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {word.name for word in named if word.kind is not inspect.Parameter.VAR_POSITIONAL}
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in known]
    return signature.replace(parameters=[*named, *more])


_SLICE = re.compile(r"slice\(([-\w]+), ([-\w]+), ([-\w]+)\)")


def _name_modules_of_slices(exported: ExportedProgram, net: nn.Module) -> None:
    """Give a module that is called out of a part of a list, as in `self.layers[:n]`, its path without the slice."""
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        stack: dict[str, tuple[str, str]] = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (_path_in(net, path), kind) for key, (path, kind) in stack.items()}


def _path_in(net: nn.Module, path: str) -> str:
    while (match := _SLICE.search(path)) is not None:
        above, below = path[: match.start()].rstrip("."), path[match.end() + 1 :].split(".")
        modules = net.get_submodule(above).named_modules(remove_duplicate=False)  # a list may hold a block twice
        names = [name for name, _ in modules if name and "." not in name]
        part = names[slice(*(None if bound == "None" else int(bound) for bound in match.groups()))]
        path = ".".join(word for word in (above, part[int(below[0])], *below[1:]) if word)
    return path


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keywords of a call on inputs.

    >>> call_of({"ids": 1}), call_of((1, 2)), call_of(1)
    (((), {'ids': 1}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}  # pyright: ignore[reportUnknownArgumentType]


@contextmanager
def without_cache(net: nn.Module) -> Generator[None]:
    """Let models of transformers make no cache of keys and values, which is for generating text."""
    configs: list[Any] = [getattr(module, "config", None) for module in net.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _refuse_unexportable(net: nn.Module) -> None:
    """Raise ValueError for a module whose graph would not be what it does."""
    refuse_net(net)
    for path, module in net.named_modules():
        if tracks(module) and getattr(module, "momentum", None) is None:
            raise ValueError(
                f"module {path!r} ({type(module).__name__}) weighs batches by how many there were (momentum=None), a "
                "number that it reads from a buffer, which an export cannot; give it a momentum, or cut by "
                "from_sequential."
            )
    for name, tensor in net.named_buffers():
        if is_sharded(tensor):
            raise ValueError(
                f"buffer {name!r} is a DTensor, and from_module takes only parameters that are. Keep it whole on each "
                "process, or use from_sequential or from_functions."
            )


def two_rows(inputs: Any) -> Any:
    """Inputs of one row twice: the trace of one row would hold for one row only."""
    leaves = [leaf for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    return tree.tree_map(_doubled, inputs) if all(len(leaf) == 1 for leaf in leaves) else inputs


def _doubled(leaf: Any) -> Any:
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _open_dims(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return None
    sequence = leaf.ndim == 2 and not leaf.is_floating_point() and not leaf.is_complex()
    return dict.fromkeys(range(min(leaf.ndim, 2 if sequence else 1)), torch.export.Dim.AUTO)


@contextmanager
def _noting_attributes(net: nn.Module, places: list[str]) -> Generator[None]:
    """Note where a tensor is assigned to a plain attribute, and refuse a new module or parameter."""
    known = {id(vars(module)) for module in net.modules()}

    def is_new(value: Any) -> bool:
        if isinstance(value, nn.Parameter):
            return all(value is not parameter for parameter in net.parameters())
        return isinstance(value, nn.Module) and id(vars(value)) not in known

    def noted(module: nn.Module, name: str, value: Any, assign: Callable[..., None]) -> None:
        if id(vars(module)) in known and is_new(value):
            raise ValueError(
                f"the net changes itself as it runs: it assigns a new module or parameter to {name!r}, and computes "
                "something else the next time. Run it on the example once before, so that it is what it will be"
            )
        assign(module, name, value)
        if isinstance(value, Tensor) and name in vars(module):
            places.append(place_of_caller(module, net.named_modules()))

    with told_of_assignments(noted):
        yield


def _left_out(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    given = signature.bind(*args, **kwargs).arguments
    return [name for name in signature.parameters if "mask" in name and given.get(name) is None]


def _reason(net: nn.Module, error: Exception, place: str, masks: Sequence[str]) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "").rstrip(".")
    if "NoneType" in said and masks:
        said += f"; the example has no {' and no '.join(masks)}, with which it may"
    return (
        f"{type(net).__name__} cannot be exported, so there is nothing to cut: {type(error).__name__}: "
        f"{in_words(said)}. {'Change the line below, or use' if place else 'Use'} from_loss with fpipe.boundary, or "
        f"from_functions.{place}"
    )
