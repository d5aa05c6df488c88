"""Remember what the modules of a model held when it was cut, and refuse to go on where that has changed.

criterion.weight = w  ;  step(..)           -->        ValueError: 'weight' of the loss was bound anew .. cut anew
net[1] = nn.ReLU()    ;  build(..)          -->        ValueError: child '1' of the net is another .. cut anew

A trace repeats what it saw. Tensors that it holds and `requires_grad` are compared in every step, all else that modules
hold when a step is built. Other Python values are those of the trace, as under `jax.jit`.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from fpipe.meaning.purity.attributes import Modules, Same, modules_of, value_key
from fpipe.meaning.purity.own_memory import memory
from fpipe.model import Model
from fpipe.positional_stage import of_net
from fpipe.torch_internals import (
    OWN_DICTS,
    WEIGHT_LISTS,
    has_gradient_hooks,
    has_own_samples,
    held_by,
    hooks_of,
    is_dropout,
    is_norm,
)

# Tell by the class of a module whether it draws random numbers, depends on its mode, or cannot be pure.


def may_depend_on_mode(module: nn.Module) -> bool:
    """Whether a module may do something else in training than in eval: one of those, or not one of torch's own."""
    known = isinstance(module, nn.RReLU | nn.MultiheadAttention | nn.RNNBase) or is_dropout(module) or is_norm(module)
    return known or not type(module).__module__.startswith("torch.")


def refuse_net(net: nn.Module) -> None:
    """A ValueError for a net with a module that cannot be part of a pure stage, or a tensor that is not there yet."""
    for path, module in net.named_modules():
        refuse_wrapped(path, module)
        refuse_impure(path, module)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} is not initialised yet (a lazy module); run the net once on an example.")
    for name, tensor in net.named_parameters():
        if tensor.requires_grad and has_gradient_hooks(tensor):
            raise ValueError(
                f"parameter {name!r} has a gradient hook; stages differentiate detached aliases of parameters, which "
                "no hook sees. Remove it, and change the gradients that a step returns."
            )


def refuse_wrapped(path: str, module: nn.Module) -> None:
    """A ValueError for a module that runs with no parameters but its own."""
    refuse_hooked(path, module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"module {path!r} ({type(module).__name__}) is compiled by torch.jit: no trace sees into it, and it runs "
            "with no parameters but its own. Take the module that it was made from."
        )


def refuse_hooked(path: str, module: nn.Module) -> None:
    """A ValueError for a module whose hooks gather its parameters and reduce their gradients, or that copies itself."""
    sharded: Any = sys.modules.get("torch.distributed.fsdp")
    by_hooks = {"DistributedDataParallel": nn.parallel.DistributedDataParallel}
    if sharded is not None:
        by_hooks |= {"fully_shard": sharded.FSDPModule, "FullyShardedDataParallel": sharded.FullyShardedDataParallel}
    for name, kind in by_hooks.items():
        if isinstance(module, kind):
            raise ValueError(
                f"module {path!r} ({type(module).__name__}) is wrapped by {name}, whose hooks gather the module's own "
                "parameters and reduce their gradients; a stage computes with those that it is handed, and no hook "
                "would run. Take the module without it: fpipe.data_parallel adds gradients up over replicas, and "
                "inside a stage parameters are sharded by parallelize_module, or by a parametrization that gathers "
                "them (docs/running.md)."
            )
    if isinstance(module, nn.DataParallel):
        raise ValueError(
            f"module {path!r} (DataParallel) makes copies of its module as it runs; a stage computes with parameters "
            "that it is handed. Take its .module: fpipe.data_parallel makes replicas of a program."
        )


def refuse_impure(path: str, module: nn.Module) -> None:
    """A ValueError for a module that would mutate its weights, or wait for other processes."""
    who = f"module {path!r} ({type(module).__name__})"
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(f"{who}: max_norm rewrites the weight as it runs, which a pure function cannot; leave it out.")
    several = distributed.is_available() and distributed.is_initialized()
    if isinstance(module, nn.SyncBatchNorm) and module.training and several:
        many = distributed.get_world_size(module.process_group)
        if many == 1:
            return
        raise ValueError(
            f"{who} averages over {many} processes in the middle of a forward, which a pure function cannot. Put a "
            "BatchNorm in its place; fpipe.deferred_batch_norm gives it the statistics of the whole batch."
        )


def draws_random(module: nn.Module) -> bool:
    """Whether a module draws random numbers in the mode that it is in; they follow from the step's key."""
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return not has_own_samples(module)
    if isinstance(module, nn.RReLU):
        return module.training and module.lower != module.upper
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0 and module.num_layers > 1
    drops = module.dropout if isinstance(module, nn.MultiheadAttention) else module.p if is_dropout(module) else 0
    return module.training and drops > 0


class StepChanged(RuntimeError):
    """A step, or a module in it, does something else now than when it was traced.

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


Home = tuple[Any, str, str]
"""Where a tensor is: the dict that has it, its name there, and what errors call it."""


class Fingerprint:
    """Content of the modules of a model at its cut.

    Args:
        functions: the stages and the loss; what modules they close over is in their traces.
        nets: modules that were cut into stages, whose tensors are handed to them.

    >>> loss = nn.CrossEntropyLoss(reduction="sum")
    >>> held = Fingerprint([loss])
    >>> loss.label_smoothing = 0.1
    >>> held.refuse_changed()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: 'label_smoothing' of the loss (CrossEntropyLoss) has changed since the model was cut. ...
    """

    def __init__(self, functions: Iterable[Callable[..., Any] | None], nets: Modules = ()) -> None:
        functions = [function for function in functions if function and not of_net(function)]
        closed = [one for function in functions for one in modules_of(function)]
        self._closed = {module: _named(path, module) for path, module in closed}
        self._nets = {module: _named(path, module) for path, module in nets}
        self._known = [(who, module, _content(module)) for module, who in (self._closed | self._nets).items()]
        self._flags: list[tuple[Home, bool]] = [
            ((own, name, f"{name!r} of {who}"), one.requires_grad)
            for module, who in self._nets.items()
            for own in [held_by(module).parameters]
            for name, one in own.items()
            if one is not None
        ]
        self._wanted = [wanted for _, wanted in self._flags]
        self._tensors = [
            ((own, name, f"{name!r} of {who}"), weakref.ref(one))
            for module, who in (self._nets | self._closed).items()
            for own in (*(held_by(module)[:2] if module in self._closed else ()), vars(module))
            for name, one in own.items()
            if isinstance(one, Tensor)
        ]
        self._turning = [module for module in self._closed if may_depend_on_mode(module)]
        self._traced = [module for module in self._nets if may_depend_on_mode(module)]
        self._then = tuple([module.training for module in self._traced])
        self._again: tuple[weakref.ref[Model], Callable[[], Model]] | None = None
        self._by_mode: dict[tuple[bool, ...], Model] = {}
        self._cut: tuple[nn.Module, Callable[[Any], Model]] | None = None

    def __reduce__(self) -> tuple[type[Fingerprint], tuple[tuple[()]]]:
        return Fingerprint, ((),)  # a copied model was not cut out of anything

    def refuse_changed(self) -> None:
        """A ValueError if modules hold anything else than then."""
        for what, _, _ in self.changes():
            raise ValueError(
                f"{what} has changed since the model was cut. A model is what it was then: put it back, or cut anew."
            )
        self.refuse_unfrozen()

    def changes(self) -> list[tuple[str, str, bool]]:
        """Name all that modules hold otherwise than at the cut, with the numbers, and whether it is an attribute."""
        changes: list[tuple[str, str, bool]] = []
        for who, module, before in self._known:
            now = _content(module)
            for name in {**before, **now} if now != before else ():
                old, new = before.get(name, _NONE), now.get(name, _NONE)
                if old != new:
                    is_plain = name.startswith("'") and not _TENSOR_WORDS & {_first(old), _first(new)}
                    values = f", which was {old[1]} and is {new[1]}," if {_first(old), _first(new)} <= _NUMBERS else ""
                    changes.append((f"{name} of {who}", values, is_plain))
        return changes

    def refuse_unfrozen(self) -> None:
        """A ValueError if a parameter of a net does not want a gradient as it did."""
        if [getattr(own.get(name), "requires_grad", None) for (own, name, _), _ in self._flags] != self._wanted:
            for (own, name, what), wanted in self._flags:
                if own.get(name) is not None and own[name].requires_grad != wanted:
                    then, now = ("trained", "is frozen") if wanted else ("was frozen", "is to train")
                    raise ValueError(f"{what} {then} when the model was cut and {now} now: cut anew.")

    def trace_again(self, model: Model, again: Callable[[], Model]) -> None:
        """Where modes are in a trace: how this model is cut again as the net is now."""
        self._again = weakref.ref(model), again

    def cut_from(self, net: nn.Module, cut: Callable[[Any], Model]) -> None:
        """Which net this is the model of, and how another one is cut into the same stages with the same state."""
        self._cut = net, cut

    def evaluating(self) -> Model | None:
        """The model of a copy of the net in eval mode, which shares its tensors; None where there is no net."""
        if self._cut is None:
            return None
        net, cut = self._cut
        tensors = (*net.parameters(), *net.buffers())
        return cut(copy.deepcopy(net, {id(tensor): tensor for tensor in tensors}).eval())

    def in_mode(self, model: Model) -> Model:
        """The model as the modes of its net are now: that of another trace, where it has the same stages."""
        now = tuple([module.training for module in self._traced])
        if self._again is None or self._again[0]() is not model or now == self._then:
            return model
        if now not in self._by_mode:
            self._by_mode[now] = self._again[1]()
        made = self._by_mode[now]
        return made if _interface(made) == _interface(model) else model

    def modes(self) -> tuple[bool, ...]:
        """The modes of modules that functions close over, as they are now."""
        return tuple([module.training for module in self._turning])

    def homes_of(self, held: Collection[Tensor]) -> list[tuple[Home, Tensor]]:
        """Where the tensors were at the cut that a trace holds, among those of closed-over modules."""
        memories = {*map(memory, held)} - {None}
        known = ((home, one()) for home, one in self._tensors) if memories else ()
        return [(home, one) for home, one in known if one is not None and memory(one) in memories]

    def refuse_bound_anew(self, held: Iterable[tuple[Home, Tensor]]) -> None:
        """A ValueError if one of these tensors is no longer where it was."""
        for (own, name, what), tensor in held:
            if own.get(name) is not tensor:
                raise ValueError(
                    f"{what} was bound anew since it was traced, and the trace holds the tensor of then. Write into "
                    "that one with .copy_(), or cut anew."
                )


def _interface(model: Model) -> tuple[Any, ...]:
    """Parts of a model on which programs and parameters depend."""
    each = [(sorted(one.names or ()), one.asks) for one in model.stages]
    return model.inputs, sorted(model.ties), each


_NONE = object()
_TENSOR_WORDS, _NUMBERS = {"parameter", "buffer"}, {bool, int, float}


def _first(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) and key else None  # pyright: ignore[reportUnknownVariableType]


def _named(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path != "it" else f"the loss ({type(module).__name__})"


def _content(module: nn.Module) -> Mapping[str, Any]:
    """Plain attributes, hooks, children and names of tensors of a module, by what errors call them."""
    found = {
        repr(name): value_key(value, [])
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and not isinstance(value, Tensor)
    }
    held = held_by(module)
    found |= {"a hook": tuple(map(Same, hooks_of(module)))}
    found |= {f"child {name!r}": None if child is None else Same(child) for name, child in held.children.items()}
    for word, own in (("parameter", held.parameters), ("buffer", held.buffers)):
        found |= {repr(name): (word, one is None or has_gradient_hooks(one)) for name, one in own.items()}
    return found


def module_key(module: nn.Module, odd: list[Any]) -> Any:
    """A key that is equal for modules that compute the same function of their parameters, so that they share a trace.
    `odd` takes what cannot be compared, such as a tensor among the attributes."""
    attributes, held = vars(module), held_by(module)
    plain = tuple((name, value_key(attributes[name], odd)) for name in sorted(attributes) if name not in _NOT_PLAIN)
    children = tuple((name, None if child is None else module_key(child, odd)) for name, child in held.children.items())
    forward = value_key(type(module).forward, odd)
    flags = tuple((name, value_key(None if one is None else vars(one), odd)) for name, one in held.parameters.items())
    return type(module), forward, plain, children, flags, tuple(held.buffers)


_NOT_PLAIN = (*OWN_DICTS, *WEIGHT_LISTS)
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *WEIGHT_LISTS))
