"""Record the contents of a model's modules when the model is cut, and raise ValueError if they have changed since.

criterion.weight = w  ;  step(..)           -->        ValueError: 'weight' of the loss was bound anew .. cut anew
net[1] = nn.ReLU()    ;  build(..)          -->        ValueError: child '1' of the net is another .. cut anew

A trace repeats what it saw. Its constant tensors and `requires_grad` are compared in every step; all other contents of
modules when a step is built. Other Python values are those of the trace, as under `jax.jit`.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from fpipe.meaning.purity.attributes import IdentityKey, NamedModules, modules_of, value_key
from fpipe.meaning.purity.write_guard import storage_key
from fpipe.model import Model
from fpipe.positional_stage import net_stage_of
from fpipe.torch_internals import (
    MEMBER_DICTS,
    WEIGHT_LISTS,
    direct_members,
    has_gradient_hooks,
    has_own_samples,
    hooks_of,
    is_dropout,
    is_norm,
)

# Decide by the class of a module whether it draws random numbers, depends on its mode, or cannot be pure.


def may_depend_on_mode(module: nn.Module) -> bool:
    """Whether a module may compute something else in training than in eval mode."""
    has_modes = isinstance(module, nn.RReLU | nn.MultiheadAttention | nn.RNNBase)
    # A class of the user's may read self.training anywhere.
    return has_modes or is_dropout(module) or is_norm(module) or not type(module).__module__.startswith("torch.")


def refuse_unsupported_net(net: nn.Module) -> None:
    """Raise ValueError if a module of a net cannot be part of a pure stage, or a tensor is not initialised."""
    for path, module in net.named_modules():
        refuse_unswappable_params(path, module)
        refuse_impure(path, module)
    for tensor_path, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{tensor_path!r} is not initialised yet (a lazy module); run the net once on an example.")
    for tensor_path, tensor in net.named_parameters():
        if tensor.requires_grad and has_gradient_hooks(tensor):
            raise ValueError(
                f"parameter {tensor_path!r} has a gradient hook; stages differentiate detached aliases of parameters, "
                "which no hook sees. Change the returned gradients instead."
            )


def refuse_unswappable_params(path: str, module: nn.Module) -> None:
    """Raise ValueError if a module cannot run with other parameters than its own."""
    refuse_parallel_wrapper(path, module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"module {path!r} ({type(module).__name__}) is compiled by torch.jit: no trace sees into it. Take the "
            "original module."
        )


def refuse_parallel_wrapper(path: str, module: nn.Module) -> None:
    """Raise ValueError for a wrapper that gathers parameters and reduces gradients by hooks, or copies the module."""
    # FSDP classes are looked up, not imported: no module is wrapped by them before somebody has imported them.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    class_by_wrapper = {"DistributedDataParallel": nn.parallel.DistributedDataParallel}
    if fsdp is not None:
        class_by_wrapper |= {"fully_shard": fsdp.FSDPModule, "FullyShardedDataParallel": fsdp.FullyShardedDataParallel}
    for wrapper, wrapper_class in class_by_wrapper.items():
        if isinstance(module, wrapper_class):
            raise ValueError(
                f"module {path!r} ({type(module).__name__}) is wrapped by {wrapper}, whose hooks gather the module's "
                "own parameters. Take the module itself, and fpipe.data_parallel or parallelize_module."
            )
    if isinstance(module, nn.DataParallel):
        raise ValueError(
            f"module {path!r} (DataParallel) makes copies of its module as it runs; a stage computes with parameters "
            "that it is handed. Take its .module."
        )


def refuse_impure(path: str, module: nn.Module) -> None:
    """Raise ValueError for a module that would mutate its weights, or wait for other processes in a forward."""
    label = f"module {path!r} ({type(module).__name__})"
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(
            f"{label}: max_norm rewrites the weight as it runs, which a pure function cannot; leave it out."
        )
    has_processes = distributed.is_available() and distributed.is_initialized()
    if isinstance(module, nn.SyncBatchNorm) and module.training and has_processes:
        world_size = distributed.get_world_size(module.process_group)
        if world_size == 1:
            return
        raise ValueError(
            f"{label} averages over {world_size} processes in the middle of a forward, which a pure function cannot. "
            "Use fpipe.deferred_batch_norm."
        )


def draws_random(module: nn.Module) -> bool:
    """Whether a module draws random numbers in its current mode."""
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return not has_own_samples(module)
    if isinstance(module, nn.RReLU):
        return module.training and module.lower != module.upper
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0 and module.num_layers > 1
    drops = module.dropout if isinstance(module, nn.MultiheadAttention) else module.p if is_dropout(module) else 0
    return module.training and drops > 0


class StepChanged(RuntimeError):
    """A step, or a module in it, computes something else now than when it was traced.

    >>> import fpipe, torch
    >>> scale = [1.0]
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"] * scale[0]], loss=lambda y, t: (y - t).square().mean())
    >>> step, params = fpipe.build(fpipe.program(model), model), ({"w": torch.tensor(1.0)},)
    >>> batch = torch.ones(2), torch.zeros(2)
    >>> step(params, batch).loss
    tensor(1.)
    >>> scale[0] = 2.0
    >>> step(params, batch)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fpipe.meaning.purity.fingerprint.StepChanged: stage 0 (<lambda>), microbatch 0: the output (y[0,0]) is off ...
    """


TensorSlot = tuple[Any, str, str]
"""The place of a tensor in a module: the dict that contains it, its name there, and its label in errors."""


class Fingerprint:
    """Contents of a model's modules when the model was cut.

    Args:
        functions: the stages and the loss. Tensors of modules that they close over are constants of their traces.
        nets: modules that were cut into stages, which take the modules' tensors as arguments.

    Attributes:
        nets, modules: the modules that were cut, and all modules, with their paths.

    >>> loss = nn.CrossEntropyLoss(reduction="sum")
    >>> held = Fingerprint([loss])
    >>> loss.label_smoothing = 0.1
    >>> held.refuse_changed()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: 'label_smoothing' of the loss (CrossEntropyLoss) has changed since the model was cut. ...
    """

    def __init__(self, functions: Iterable[Callable[..., Any] | None], nets: NamedModules = ()) -> None:
        functions = [function for function in functions if function and not net_stage_of(function)]
        closed_over = [named_module for function in functions for named_module in modules_of(function)]
        self.nets: NamedModules = nets
        self.modules: NamedModules = [*closed_over, *nets]
        self._label_by_closed_over = {module: _module_label(path, module) for path, module in closed_over}
        self._label_by_net_module = {module: _module_label(path, module) for path, module in nets}
        self._contents_at_cut = [
            (label, module, _content_of(module))
            for module, label in (self._label_by_closed_over | self._label_by_net_module).items()
        ]
        self._requires_grad_by_slot: list[tuple[TensorSlot, bool]] = [
            ((tensor_dict, name, f"{name!r} of {label}"), param.requires_grad)
            for module, label in self._label_by_net_module.items()
            for tensor_dict in [direct_members(module).parameters]
            for name, param in tensor_dict.items()
            if param is not None
        ]
        self._requires_grad_at_cut = [requires_grad for _, requires_grad in self._requires_grad_by_slot]
        self._tensor_by_slot = [
            ((tensor_dict, name, f"{name!r} of {label}"), weakref.ref(tensor))
            for module, label in (self._label_by_net_module | self._label_by_closed_over).items()
            for tensor_dict in (
                *(direct_members(module)[:2] if module in self._label_by_closed_over else ()),
                vars(module),
            )
            for name, tensor in tensor_dict.items()
            if isinstance(tensor, Tensor)
        ]
        self._mode_dependent_closed_over = [
            module for module in self._label_by_closed_over if may_depend_on_mode(module)
        ]
        self._mode_dependent_in_nets = [module for module in self._label_by_net_module if may_depend_on_mode(module)]
        self._modes_at_cut = tuple([module.training for module in self._mode_dependent_in_nets])
        self._recut: tuple[weakref.ref[Model], Callable[[], Model]] | None = None
        self._model_by_modes: dict[tuple[bool, ...], Model] = {}
        self._source: tuple[nn.Module, Callable[[Any], Model]] | None = None

    def __reduce__(self) -> tuple[type[Fingerprint], tuple[tuple[()]]]:
        return Fingerprint, ((),)  # a copied model was not cut out of anything

    def refuse_changed(self) -> None:
        """Raise ValueError if the contents of modules are not those at the cut."""
        for subject, _, _ in self.changes():
            raise ValueError(f"{subject} has changed since the model was cut. Put it back, or cut anew.")
        self.refuse_changed_requires_grad()

    def changes(self, live: Container[nn.Module] = ()) -> list[tuple[str, str, bool]]:
        """Return name, values (if numbers) and whether it is a plain attribute, for each change since the cut.

        Modules that are `live` run as they are now, so they may change.
        """
        changes: list[tuple[str, str, bool]] = []
        for label, module, at_cut in self._contents_at_cut:
            if module in live:
                continue
            current = _content_of(module)
            for name in {**at_cut, **current} if current != at_cut else ():
                old, new = at_cut.get(name, _ABSENT), current.get(name, _ABSENT)
                if old != new:
                    is_plain = name.startswith("'") and not _TENSOR_TAGS & {_tag_of(old), _tag_of(new)}
                    are_numbers = {_tag_of(old), _tag_of(new)} <= _NUMBER_TYPES
                    values = f", which was {old[1]} and is {new[1]}," if are_numbers else ""
                    changes.append((f"{name} of {label}", values, is_plain))
        return changes

    def refuse_changed_requires_grad(self) -> None:
        """Raise ValueError if a parameter of a net was frozen or unfrozen since the cut."""
        # This runs in every step: one comparison of lists, and the loop that names a parameter only after it failed.
        slots = [slot for slot, _ in self._requires_grad_by_slot]
        flags = [getattr(tensor_dict.get(name), "requires_grad", None) for tensor_dict, name, _ in slots]
        if flags != self._requires_grad_at_cut:
            for (tensor_dict, name, label), requires_grad in self._requires_grad_by_slot:
                if tensor_dict.get(name) is not None and tensor_dict[name].requires_grad != requires_grad:
                    status_at_cut, status = ("trained", "is frozen") if requires_grad else ("was frozen", "is to train")
                    raise ValueError(f"{label} {status_at_cut} when the model was cut and {status} now: cut anew.")

    def set_recut(self, model: Model, recut: Callable[[], Model]) -> None:
        """Set how to cut the model again after modes of the net have changed; a trace contains its modes."""
        self._recut = weakref.ref(model), recut  # weak: the model refers to this fingerprint

    def set_source(self, net: nn.Module, cut_net: Callable[[Any], Model]) -> None:
        """Set the net of the model, and how to cut another net into the same stages with the same state."""
        self._source = net, cut_net

    def eval_model(self) -> Model | None:
        """Return the model of a copy of the net in eval mode, which shares the net's tensors; None without a net."""
        if self._source is None:
            return None
        net, cut = self._source
        tensors = (*net.parameters(), *net.buffers())
        # A tensor in deepcopy's memo counts as copied already: the copy shares it.
        return cut(copy.deepcopy(net, {id(tensor): tensor for tensor in tensors}).eval())

    def model_in_current_modes(self, model: Model) -> Model:
        """Return the model of the net's current modes: `model`, or one that is cut again and has the same stages."""
        modes = tuple([module.training for module in self._mode_dependent_in_nets])
        if self._recut is None or self._recut[0]() is not model or modes == self._modes_at_cut:
            return model
        if modes not in self._model_by_modes:
            self._model_by_modes[modes] = self._recut[1]()
        recut_model = self._model_by_modes[modes]
        return recut_model if _interface(recut_model) == _interface(model) else model

    def modes(self) -> tuple[bool, ...]:
        """Return the current modes of modules that functions close over."""
        return tuple([module.training for module in self._mode_dependent_closed_over])

    def slots_of(self, tensors: Collection[Tensor]) -> list[tuple[TensorSlot, Tensor]]:
        """Return the slots that the constants of a trace had in modules at the cut, each with its tensor."""
        keys = {*map(storage_key, tensors)} - {None}
        candidates = ((slot, reference()) for slot, reference in self._tensor_by_slot) if keys else ()
        return [(slot, tensor) for slot, tensor in candidates if tensor is not None and storage_key(tensor) in keys]

    def refuse_rebound(self, tensors_by_slot: Iterable[tuple[TensorSlot, Tensor]]) -> None:
        """Raise ValueError if another tensor is in one of these slots now."""
        for (tensor_dict, name, label), tensor in tensors_by_slot:
            if tensor_dict.get(name) is not tensor:
                raise ValueError(
                    f"{label} was bound anew since it was traced, and the trace holds the tensor of then. Use "
                    ".copy_(), or cut anew."
                )


def _interface(model: Model) -> tuple[Any, ...]:
    """Return the parts of a model on which programs and parameters depend."""
    stage_interfaces = [(sorted(stage.names or ()), stage.keywords) for stage in model.stages]
    return model.inputs, sorted(model.ties), stage_interfaces


_ABSENT = object()
_TENSOR_TAGS, _NUMBER_TYPES = {"parameter", "buffer"}, {bool, int, float}


def _tag_of(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) and key else None  # pyright: ignore[reportUnknownVariableType]


def _module_label(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path != "it" else f"the loss ({type(module).__name__})"


def _content_of(module: nn.Module) -> Mapping[str, Any]:
    """Return a module's plain attributes, hooks, children and tensor names, by their labels in errors."""
    # Values of tensors are left out: training changes them. So are attributes that every nn.Module has.
    values_by_name = {
        repr(name): value_key(value, [])
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and not isinstance(value, Tensor)
    }
    registries = direct_members(module)
    values_by_name |= {"a hook": tuple(map(IdentityKey, hooks_of(module)))}
    values_by_name |= {
        f"child {name!r}": None if child is None else IdentityKey(child) for name, child in registries.children.items()
    }
    for tag, tensor_dict in (("parameter", registries.parameters), ("buffer", registries.buffers)):
        values_by_name |= {
            repr(name): (tag, tensor is None or has_gradient_hooks(tensor)) for name, tensor in tensor_dict.items()
        }
    return values_by_name


def module_key(module: nn.Module, unsupported: list[Any]) -> Any:
    """Return a key that is equal for modules that compute the same function of their parameters and can share a trace.

    `unsupported` collects values that cannot be compared, such as a tensor among the attributes.
    """
    attributes, registries = vars(module), direct_members(module)
    plain = tuple(
        (name, value_key(attributes[name], unsupported)) for name in sorted(attributes) if name not in _NOT_PLAIN
    )
    children = tuple(
        (name, None if child is None else module_key(child, unsupported)) for name, child in registries.children.items()
    )
    forward = value_key(type(module).forward, unsupported)
    flags = tuple(
        (name, value_key(None if param is None else vars(param), unsupported))
        for name, param in registries.parameters.items()
    )
    return type(module), forward, plain, children, flags, tuple(registries.buffers)


_NOT_PLAIN = (*MEMBER_DICTS, *WEIGHT_LISTS)
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *WEIGHT_LISTS))
