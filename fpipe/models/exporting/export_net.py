"""Export a module as one graph of torch ops above autograd, whose nodes know which module they come from.

net(**inputs)        --> torch.export -->        wte  add  h.0: layer_norm, linear, ...  h.1: ...  lm_head: linear

The number of rows stays symbolic, and so does the second dimension of integers (the length of a sequence), where the
net allows it. Ops above autograd can be differentiated in each stage, so one export serves every schedule.
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
from fpipe.graphs.tracing.marks import record_marks
from fpipe.graphs.tracing.running_statistics import updates_statistics
from fpipe.meaning.purity.attributes import AttributeSnapshot
from fpipe.meaning.purity.fingerprint import refuse_unsupported_net
from fpipe.meaning.purity.outputs import with_rows_named
from fpipe.meaning.purity.sharded import is_sharded, refuse_sharded
from fpipe.models.exporting.net_graph import OnlyTraceable, without_checkpoints
from fpipe.models.exporting.opaque_ops import CALLS_KEY
from fpipe.models.exporting.sharded_net import replace_by_whole_tensors
from fpipe.models.exporting.source_locations import location_of_caller, location_of_error, record_locations
from fpipe.program import building
from fpipe.torch_internals import direct_members
from fpipe.torch_private.fx import import_export, silence_export
from fpipe.torch_private.modules import intercept_assignments


def export_net(net: nn.Module, inputs: Any) -> ExportedProgram:
    """Export a module in its current mode, and leave the module unchanged.

    Raises:
        ValueError: torch.export cannot export it; why, and in which line.
    """
    # 1. Bind the example to the arguments of forward.
    _refuse_unexportable(net)
    refuse_sharded(tree.leaves(inputs), "the batch")
    # torch.export gives one placeholder to arguments that are one object, as the ids and labels of an example may be.
    args, kwargs = call_arguments(tree.tree_map(_alias, double_single_rows(inputs)))
    signature = _bindable_signature(net, args, kwargs)
    shapes: Any = tree.tree_map(_dynamic_dims, dict(signature.bind(*args, **kwargs).arguments))
    attributes = AttributeSnapshot([*net.named_modules()], with_containers=True)
    assigned: list[str] = []
    only_traceable = OnlyTraceable("the net", False)
    # 2. Export. Outer contexts decide what the trace records and refuses; inner ones change the net for that time.
    try:
        with (
            torch.enable_grad(),
            only_traceable,
            record_marks(),
            without_cache(net),
            silence_export(),
            _watch_attributes(net, assigned),
            record_locations(),
            without_checkpoints(),
            replace_by_whole_tensors(net) as trace,
            moved_to_meta(net) as is_on_meta,
        ):
            if is_on_meta:
                args, kwargs = tree.tree_map(tensor_without_data, (args, kwargs))
            # torch.export reads the signature of `forward`, which partial() would hide.
            forward: Any = partial(trace.run, net.forward) if trace else net.forward
            forward = partial(_call_and_write_back, net, forward, only_traceable.run)
            forward.__signature__ = signature
            net.forward = forward
            # Pauses the garbage collector, which would take a third of the time of these imports.
            with building():
                import_export()
            exported = torch.export.export(net, args, kwargs, strict=False, dynamic_shapes=shapes)
            _name_modules_of_slices(exported, net)
            if trace is not None:
                trace.expand_calls(exported.graph_module)
    # 3. Explain an error, and restore the module.
    except Exception as error:
        # torch.export reports an assigned attribute only at its end, where no frame of the user's code is left.
        leaks_attribute = isinstance(error, UserWarning) and assigned
        location = assigned[-1] if leaks_attribute else location_of_error(error, net.named_modules())
        raise ValueError(_describe_failure(net, error, location, _omitted_masks(signature, args, kwargs))) from error
    finally:
        attributes.restore()
    only_traceable.warn(5)
    exported.graph_module.meta[CALLS_KEY] = only_traceable.calls
    return exported


@contextmanager
def moved_to_meta(net: nn.Module) -> Generator[bool]:
    """Move all tensors of a net to meta, and create new ones there, if a parameter is on meta; yield whether one is."""
    is_on_meta = any(parameter.is_meta for parameter in net.parameters())
    dicts: list[Any] = [holder for module in net.modules() for holder in (*direct_members(module)[:2], vars(module))]
    slots = [(holder, name, x) for holder in dicts for name, x in holder.items() if isinstance(x, Tensor)]
    slots = [(holder, name, tensor) for holder, name, tensor in slots if is_on_meta and not tensor.is_meta]
    # By id, so that tied parameters stay one tensor.
    meta_by_id = {id(tensor): tensor_without_data(tensor) for _, _, tensor in slots}
    try:
        for holder, name, tensor in slots:
            holder[name] = meta_by_id[id(tensor)]
        with torch.device("meta") if is_on_meta else nullcontext():
            yield is_on_meta
    finally:
        for holder, name, tensor in slots:
            holder[name] = tensor


def tensor_without_data(leaf: Any) -> Any:
    """Return a tensor or parameter like this one on meta; other leaves unchanged."""
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(leaf.detach().to("meta"), leaf.requires_grad)
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _call_and_write_back(
    net: nn.Module, forward: Callable[..., Any], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a net, and copy tensors that it assigned to buffers into the old buffers."""
    # torch.export records writes into a buffer, but loses an assignment to a buffer of an inner module.
    buffer_dicts = [direct_members(module).buffers for module in net.modules()]
    old_buffers = [(buffers, name, buffer) for buffers in buffer_dicts for name, buffer in buffers.items()]
    output = run(forward, *args, **kwargs)
    for buffers, name, old in old_buffers:
        new = buffers.get(name)
        if new is not old and isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape:
            buffers[name] = old.copy_(new)
    return output


def _bindable_signature(net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature of a net, with a parameter for each keyword that it takes by **kwargs."""
    # torch.export leaves no size symbolic for an argument without a parameter.
    signature = inspect.signature(net.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"the batch is no call of {type(net).__name__}.forward: {error}.") from None
    named_parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {parameter.name for parameter in named_parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL}
    keyword_parameters = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in kwargs if key not in names]
    return signature.replace(parameters=[*named_parameters, *keyword_parameters])


_SLICE = re.compile(r"slice\(([-\w]+), ([-\w]+), ([-\w]+)\)")


def _name_modules_of_slices(exported: ExportedProgram, net: nn.Module) -> None:
    """Replace slices in module paths, which come from code like `self.layers[:n]`, by the path of the module itself."""
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        stack: dict[str, tuple[str, str]] = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (_resolve_slices(net, path), kind) for key, (path, kind) in stack.items()}


def _resolve_slices(net: nn.Module, path: str) -> str:
    while (match := _SLICE.search(path)) is not None:
        parent, inner_names = path[: match.start()].rstrip("."), path[match.end() + 1 :].split(".")
        modules = net.get_submodule(parent).named_modules(remove_duplicate=False)
        # With duplicates, since a list may contain a block twice, and the slice counts positions.
        names = [name for name, _ in modules if name and "." not in name]
        sliced_names = names[slice(*(None if bound == "None" else int(bound) for bound in match.groups()))]
        path = ".".join(name for name in (parent, sliced_names[int(inner_names[0])], *inner_names[1:]) if name)
    return path


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call on inputs.

    >>> call_arguments({"ids": 1}), call_arguments((1, 2)), call_arguments(1)
    (((), {'ids': 1}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}  # pyright: ignore[reportUnknownArgumentType]


@contextmanager
def without_cache(net: nn.Module) -> Generator[None]:
    """Disable the cache of keys and values in models of transformers, which only text generation needs."""
    configs: list[Any] = [getattr(module, "config", None) for module in net.modules()]
    caching_configs = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching_configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching_configs:
            config.use_cache = True


def _refuse_unexportable(net: nn.Module) -> None:
    """Raise ValueError for a module whose exported graph would compute something else than the module."""
    refuse_unsupported_net(net)
    for path, module in net.named_modules():
        # Without a momentum a norm reads its count of batches, a number in a buffer, which an export would bake in.
        if updates_statistics(module) and getattr(module, "momentum", None) is None:
            raise ValueError(
                f"module {path!r} ({type(module).__name__}) has momentum=None, which no export supports; give it a "
                "momentum, or use from_sequential."
            )
    for name, tensor in net.named_buffers():
        if is_sharded(tensor):
            raise ValueError(
                f"buffer {name!r} is a DTensor, which from_module takes only as a parameter. Keep it whole, or use "
                "from_sequential or from_functions."
            )


def double_single_rows(inputs: Any) -> Any:
    """Return inputs, doubled if they have a single row, since torch specializes a trace to a size of 1."""
    leaves = [leaf for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    return tree.tree_map(_double_rows, inputs) if all(len(leaf) == 1 for leaf in leaves) else inputs


def _alias(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _double_rows(leaf: Any) -> Any:
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _dynamic_dims(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return None
    # Two dimensions of integers are taken for token ids: rows and the length of a sequence.
    is_sequence = leaf.ndim == 2 and not leaf.is_floating_point() and not leaf.is_complex()
    return dict.fromkeys(range(min(leaf.ndim, 2 if is_sequence else 1)), torch.export.Dim.AUTO)


@contextmanager
def _watch_attributes(net: nn.Module, assigned_locations: list[str]) -> Generator[None]:
    """Record where the net assigns a tensor to a plain attribute, and refuse a new module or parameter."""
    # While torch.export runs, modules are called by proxies, which share the `__dict__` of their module.
    dict_ids = {id(vars(module)) for module in net.modules()}

    def is_new(value: Any) -> bool:
        if isinstance(value, nn.Parameter):
            return all(value is not parameter for parameter in net.parameters())
        return isinstance(value, nn.Module) and id(vars(value)) not in dict_ids

    def check_assignment(module: nn.Module, name: str, value: Any, assign: Callable[..., None]) -> None:
        if id(vars(module)) in dict_ids and is_new(value):
            raise ValueError(
                f"the net assigns a new module or parameter to {name!r} as it runs. Run it on the batch once before"
            )
        assign(module, name, value)
        if isinstance(value, Tensor) and name in vars(module):
            assigned_locations.append(location_of_caller(module, net.named_modules()))

    with intercept_assignments(check_assignment):
        yield


def _omitted_masks(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    arguments = signature.bind(*args, **kwargs).arguments
    return [name for name in signature.parameters if "mask" in name and arguments.get(name) is None]


def _describe_failure(net: nn.Module, error: Exception, location: str, masks: Sequence[str]) -> str:
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "").rstrip(".")
    if "NoneType" in message and masks:
        message += f"; the batch has no {' and no '.join(masks)}, with which it may"
    # As the rotary embedding of Phi-3 does.
    if "assigned during export" in message:
        message += ". If it does so in its first run alone, run it once before"
    advice = "Change the line below, or use" if location else "Use"
    return (
        f"{type(net).__name__} cannot be exported, so there is nothing to cut: {type(error).__name__}: "
        f"{with_rows_named(message)}. {advice} from_loss with fpipe.boundary, or from_functions.{location}"
    )
