"""Run a stage's modules as a pure function of parameters, state and input.

f(params, x) = modules(x)                         with `params` bound in the modules instead of their own
f(params, x, state=s) = modules(x), s'            with buffers bound too, where the modules write some

`torch.func.functional_call` binds the tensors for the length of one call. It swaps attributes of the modules, so a lock
lets one thread at a time run a stage, and stages that share a module share the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpipe.graphs.tracing.running_statistics import (
    STATISTICS,
    has_statistics,
    refuse_other_channels,
    updates_statistics,
    without_norm_mutation,
)
from fpipe.meaning.purity.attributes import AttributeSnapshot, IdentityKey, Modes
from fpipe.meaning.purity.fingerprint import draws_random, module_key, refuse_impure
from fpipe.meaning.purity.pure import Impure
from fpipe.meaning.purity.write_guard import WriteGuard, is_wrapper, storage_key
from fpipe.model import check_keys
from fpipe.models.modules.skips import Skips, run_children
from fpipe.models.parameters.load import ParamAddresses
from fpipe.positional_stage import Names, PositionalStage
from fpipe.torch_internals import direct_members
from fpipe.torch_private.modules import cached_weights, caches_weights, set_module_dicts, spectral_buffers


class TensorOwner(NamedTuple):
    """The place of a tensor: its path in the net, the module that has it, and its attribute there."""

    path: str
    module: nn.Module
    attribute: str

    @property
    def home(self) -> tuple[nn.Module, str]:
        """The module and the attribute; a module that stands twice in the net has two paths for one home."""
        return self.module, self.attribute


class StageModule(PositionalStage):
    """A stage function that runs modules in order, with the caller's parameters bound in them.

    Args:
        number: the number of the stage.
        children: its modules by their names in the net.
        names: the names of its parameters, several for a tied one.
        skips: the values that it stashes and pops.
        state: the names of the buffers that its modules write, besides those of torch's norms, known by class.

    Attributes:
        norms: the batch and instance norms that update running statistics.
        state_owners: the buffers that its modules write: the stage's state.
        constant_owners: the frozen parameters and the buffers that it only reads.
        wrapper_owners: those among them that are tensors of another class, such as quantized weights.
        param_addresses: its parameters as they were when the front door returned them.
    """

    def __init__(
        self,
        number: int,
        children: Mapping[str, nn.Module],
        names: Names,
        skips: Skips | None = None,
        state: Collection[str] = (),
    ) -> None:
        self.number, self.children, self.names, self.skips = number, dict(children), names, skips or Skips()
        self.who = f"stage {number}"
        self.bound_modules = BoundModules(self.children)
        self.modules = [(path, module) for path, module in self.bound_modules.named_modules() if path]
        self.caching_modules = [module for _, module in self.modules if caches_weights(module)]
        self.lock = threading.RLock()
        self.param_addresses = ParamAddresses({}, ())
        # A tied parameter is one leaf with several names; each module that has it is bound the same tensor.
        self.bound_paths = [[path for path, _, _ in self.owners_of(leaf_names)] for leaf_names in names]
        param_by_path = {path: self.bound_modules.get_parameter(path) for paths in self.bound_paths for path in paths}
        self.param_attributes = {path: vars(parameter) for path, parameter in param_by_path.items() if vars(parameter)}
        self.set_state(state)

    def set_state(self, state: Collection[str]) -> None:
        """Divide the buffers into state and constants.

        State is what torch's norms and spectral norms write in training, and what `state` names.
        """
        self.named_state = tuple(state)
        self.buffers = self.owners_of(path for path, _ in self.bound_modules.named_buffers(remove_duplicate=False))
        self.norms = [(path, module) for path, module in self.modules if updates_statistics(module)]
        norm_homes = {(norm, name) for _, norm in self.norms for name in STATISTICS}
        training_modules = [module for _, module in self.modules if module.training]
        spectral_homes = {(module, name) for module in training_modules for name in spectral_buffers(module)}
        written_homes = norm_homes | spectral_homes
        self.state_owners = [buffer for buffer in self.buffers if buffer.path in state or buffer.home in written_homes]
        trained_paths = {path for paths in self.names for path in paths}
        all_paths = [path for path, _ in self.bound_modules.named_parameters(remove_duplicate=False)]
        frozen_params = self.owners_of(path for path in all_paths if path not in trained_paths)
        constants = [*frozen_params, *(buffer for buffer in self.buffers if buffer not in self.state_owners)]
        # A quantized weight is a tensor of a class of its own. No fake tensor behaves like it, so it stays in its
        # module, and the tensors inside it are constants of the trace.
        self.wrapper_owners = [constant for constant in constants if is_wrapper(getattr(*constant.home))]
        self.constant_owners = [constant for constant in constants if constant not in self.wrapper_owners]
        self.fixed = [constant.path for constant in self.constant_owners]
        self.homes = [constant.home for constant in self.constant_owners]
        self.state_names = [buffer.path for buffer in self.state_owners]
        # Which buffers a forward writes may depend on the mode of any of its modules. A stage that writes none may
        # switch modes, such as a dropout's, but for norms that would begin to write.
        mode_modules = self.modules
        if not self.state_owners:
            mode_modules = [(path, module) for path, module in self.modules if has_statistics(module)]
        consequence = "its state is part of the program. Call from_sequential again."
        self.checked_modes = Modes(mode_modules, "the net was cut into stages", consequence)

    def owners_of(self, paths: Iterable[str]) -> list[TensorOwner]:
        """Return where each of these tensors stands, under its first path.

        A module that stands twice in the net has two paths for one attribute, which functional_call swaps once.
        """
        path_by_home: dict[tuple[nn.Module, str], str] = {}
        for path in paths:
            path_by_home.setdefault(self.home_of(path), path)
        return [TensorOwner(path, module, attribute) for (module, attribute), path in path_by_home.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return StageModule, (self.number, self.children, self.names, self.skips, self.named_state)

    def __call__(self, params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Tensor] | None = None) -> Any:
        """Return the stage's output, with a state also the new state."""
        tensors = self._params_by_path(params)
        if not self.state_owners:
            return self._run(tensors, x)[0]
        state = state or {}
        check_keys(state, self.state_names, f"state of {self.who}", "a buffer that it writes")
        y, buffers = self._run(tensors | {path: state[path] for path in self.state_names}, x)
        return y, {name: buffers[name] for name in state}

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """Compute the output, and the `state` after it, from tensors by position."""
        tensors = self._tensors_by_path(params, constants) | dict(zip(self.state_names, buffers, strict=True))
        with without_norm_mutation(self.norms):
            y, new_buffers = self._run(tensors, x)
        return y, {"state": [new_buffers[path] for path in self.state_names]} if self.state_owners else {}

    def run_observed(self, tensors: Mapping[str, Tensor], x: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the output with these parameters and buffers, and the buffers afterwards."""
        y, buffers = self._run(dict(tensors), x)
        new_buffers = {path: buffers[path] for path in tensors if path in buffers}
        self._refuse_shared_memory(new_buffers)
        return y, new_buffers

    def with_params_bound(self, params: Mapping[str, Tensor], function: Callable[[], Any]) -> Any:
        """Call a function, such as a backward that recomputes, while `params` are bound in the modules."""
        return self._call_with_tensors(self._params_by_path(params), function)

    def with_tensors_bound(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], function: Callable[[], Any]
    ) -> Any:
        """Call a function, such as the backward of a trace, while these tensors are bound in the modules."""
        attributes = AttributeSnapshot(self.modules)
        try:
            return self._call_with_tensors(self._tensors_by_path(params, constants), function)
        finally:
            attributes.restore()

    def _call_with_tensors(self, tensors: dict[str, Tensor], function: Callable[[], Any]) -> Any:
        def refuse(tensor: Tensor, op: Any) -> None:
            name = next((path for path, x in self.named_tensors() if storage_key(x) == storage_key(tensor)), None)
            raise Impure(
                f"{self.who} writes buffer {name!r} once more as its backward recomputes it with "
                "torch.utils.checkpoint. Use fpipe.checkpoint()."
            )

        with self._lock_and_restore_caches(), WriteGuard(refuse, [tensor for _, tensor in self.named_tensors()]):
            return torch.func.functional_call(self.bound_modules, tensors, (function,), tie_weights=False)

    def _run(self, tensors: dict[str, Tensor], x: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the output, and all buffers as the modules left them."""

        def run() -> tuple[Any, dict[str, Any]]:
            y = run_children(self.children, self.skips, x)
            return y, {path: direct_members(owner).buffers.get(name) for path, owner, name in self.buffers}

        for norm in self.norms:
            refuse_other_channels(*norm, tensors)
        with self._lock_and_restore_caches():
            # A copy, since functional_call writes a buffer that a module rebinds into the dict that it is given.
            # tie_weights=False: `bound_paths` names every path of a tied parameter already.
            y, new_buffers = torch.func.functional_call(self.bound_modules, dict(tensors), (run,), tie_weights=False)
        for path in (
            path for path in self.state_names if path in tensors and not isinstance(new_buffers[path], Tensor)
        ):
            raise Impure(f"{self.who} left no tensor in buffer {path!r}, which is part of its state.")
        self._refuse_shared_memory({path: new_buffers[path] for path in self.state_names if path in tensors})
        return y, new_buffers

    @contextmanager
    def _lock_and_restore_caches(self) -> Generator[None]:
        """Let one thread at a time swap tensors, and restore the weights that modules cache as plain attributes."""
        # Pruning, old-style weight norm and RNNs cache tensors made of their weights. functional_call restores
        # parameters and buffers only, so the swapped tensors would stay in these attributes.
        with self.lock:
            # Checked at each call: a hook, a mode or an attribute may have changed since the net was cut.
            self.checked_modes.check()
            for path, module in self.checked_modes.modules:
                refuse_impure(path, module)
            cached_attributes = [cached_weights(module) for module in self.caching_modules]
            try:
                yield
            finally:
                for module, attributes in zip(self.caching_modules, cached_attributes, strict=True):
                    vars(module).update(attributes)

    def _refuse_shared_memory(self, new_buffers: Mapping[str, Tensor]) -> None:
        """Raise Impure if two buffers share memory."""
        # In the module a write to one shows in both. As state they would be two tensors from the next microbatch on.
        name_by_memory: dict[Any, str] = {}
        for name, buffer in new_buffers.items():
            first_name = name_by_memory.setdefault(storage_key(buffer), name)
            if first_name != name and storage_key(buffer) is not None:
                raise Impure(
                    f"{self.who} left buffers {first_name!r} and {name!r} in one storage. Assign a .clone() to one."
                )

    def moved_params(self) -> Mapping[str, int]:
        """Return the parameters whose memory is another than when they were handed out."""
        with self.lock:
            return self.param_addresses.moved()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers of its modules by path, a tied one once."""
        yield from (*self.bound_modules.named_buffers(), *self.bound_modules.named_parameters())

    def all_names(self) -> list[str]:
        """Return the names of all parameters and buffers, with every name of a tied tensor."""
        module = self.bound_modules
        all_named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        return [name for tensors in all_named for name, _ in tensors]

    def _params_by_path(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_keys(params, [leaf_names[0] for leaf_names in self.names], f"params of {self.who}")
        pairs = zip(self.names, self.bound_paths, strict=True)
        return self._with_param_attributes({path: params[names[0]] for names, paths in pairs for path in paths})

    def _tensors_by_path(self, params: Sequence[Tensor], constants: Sequence[Tensor]) -> dict[str, Tensor]:
        tensors = {path: tensor for paths, tensor in zip(self.bound_paths, params, strict=True) for path in paths}
        return self._with_param_attributes(tensors) | dict(zip(self.fixed, constants, strict=True))

    def _with_param_attributes(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Set the attributes that modules look for on their parameters, such as `weight.sequence_parallel`."""
        for path, attributes in self.param_attributes.items():
            vars(tensors[path]).update(attributes)
        return tensors

    def home_of(self, name: str) -> tuple[Any, str]:
        """Return the module that has a tensor, and the attribute."""
        module_path, _, attribute = name.rpartition(".")
        return self.bound_modules.get_submodule(module_path), attribute

    def state(self) -> dict[str, Tensor]:
        """Return the current values of the buffers that the stage writes, by name."""
        return {path: getattr(owner, name).detach() for path, owner, name in self.state_owners}

    def wrappers(self) -> list[Tensor]:
        """Return the frozen tensors of another class, which its traces keep."""
        return [getattr(*owner.home) for owner in self.wrapper_owners]

    def state_fields(self) -> dict[str, Any]:
        """Return the fields of a `Stage` that declare its state."""
        return {"keywords": frozenset({"state"} if self.state_owners else ())}

    def random_modules(self) -> list[str]:
        """Describe the modules that draw random numbers in their current mode."""
        return [f"{path!r} ({type(module).__name__})" for path, module in self.modules if draws_random(module)]

    def sharing_key(self) -> Any:
        """Return a key that is equal for stages that compute the same function of parameters and constants."""
        # Equal blocks of a net then share one trace, whatever their children are called. A stage with a module that the
        # fingerprint does not understand is equal to itself alone.
        index_by_child = {name: str(index) for index, name in enumerate(self.children)}

        def with_child_index(paths: Iterable[str]) -> tuple[str, ...]:
            """Replace the child's name at the head of each path by its index: `6.weight` -> `0.weight`."""
            split_paths = (path.partition(".") for path in paths)
            return tuple(index_by_child.get(child, child) + dot + remainder for child, dot, remainder in split_paths)

        unsupported: list[Any] = []
        module_keys = tuple(module_key(module, unsupported) for module in self.children.values())
        paths = *self.names, self.fixed, self.state_names
        indexed_paths = tuple(map(with_child_index, paths))
        wrappers = tuple(map(IdentityKey, self.wrappers()))
        identity = IdentityKey(self) if unsupported else None
        return len(self.names), indexed_paths, module_keys, self.skips, wrappers, identity


class BoundModules(nn.Module):
    """A module that has children under the names of the whole net, and that calls the function it is called with.

    functional_call binds tensors in a module for one call of that module, and a stage runs several modules in a row.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        set_module_dicts(self, modules)

    def __call__(self, function: Callable[[], Any]) -> Any:
        """Call a function without the global module hooks: this is no module of the user's."""
        return function()
