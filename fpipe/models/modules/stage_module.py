"""The function of a stage made of modules: they run on what they are handed instead of what they hold.

f(params, x) = modules(x)                         while `params` are in the place of the modules' own
f(params, x, state=s) = modules(x), s'            and buffers too, where the modules write some
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.meaning.purity.attributes import Attributes, Same
from fpipe.meaning.purity.fingerprint import draws_random, module_key, refuse_impure
from fpipe.meaning.purity.own_memory import OwnMemory, memory
from fpipe.meaning.purity.pure import Impure
from fpipe.model import same_keys
from fpipe.models.modules.modes import (
    STATISTICS,
    Modes,
    has_statistics,
    refuse_other_channels,
    tracks,
    without_mutation,
)
from fpipe.models.modules.skips import Skips, run_children
from fpipe.models.parameters.load import HandedOut
from fpipe.positional_stage import Names, PositionalStage
from fpipe.torch_internals import held_by
from fpipe.torch_private.modules import cached_weights, caches_weights, hold, spectral_buffers

Place = tuple[str, nn.Module, str]
"""A tensor of a module: its path in the net, the module that has it, its name there."""


class StageModule(PositionalStage):
    """The function of a stage made of modules: they run one after the other, with `params` in place of their own; so
    threads that run one stage at once take turns.

    Args:
        number: which stage it is.
        children: its modules by their names in the net, and `names`, those of its parameters.
        skips: what it takes of earlier stages, and puts aside for later ones.
        state: the names of the buffers that its modules write, besides those of torch's norms, known by class.

    Attributes:
        norms: the batch and instance norms that keep running statistics.
        held: the buffers that its modules write: the stage's state.
        handed_out: the parameters that live in it, as they were then.
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
        self.bound = BoundModules(self.children)
        self.modules = [(path, module) for path, module in self.bound.named_modules() if path]
        self.caching = [module for _, module in self.modules if caches_weights(module)]
        self.lock = threading.RLock()
        self.handed_out = HandedOut({}, ())
        self.swapped = [[path for path, _, _ in self.placed(leaf)] for leaf in names]
        swapped = {path: self.bound.get_parameter(path) for paths in self.swapped for path in paths}
        self.flags = {path: vars(parameter) for path, parameter in swapped.items() if vars(parameter)}
        self.remember(state)

    def remember(self, state: Collection[str]) -> None:
        """Sort the buffers by who writes them: torch's norms, spectral norms, and what `state` names."""
        self.state_of = tuple(state)
        self.buffers = self.placed(path for path, _ in self.bound.named_buffers(remove_duplicate=False))
        written = {place[1:] for place in self.buffers if place[0] in state}
        self.norms = [(path, module) for path, module in self.modules if tracks(module)]
        written |= {(norm, name) for _, norm in self.norms for name in STATISTICS}
        for _, module in self.modules:
            written |= {(module, name) for name in (spectral_buffers(module) if module.training else ())}
        self.held = [place for place in self.buffers if place[1:] in written]
        trained = {name for leaf in self.names for name in leaf}
        frozen = [path for path, _ in self.bound.named_parameters(remove_duplicate=False) if path not in trained]
        self.read = [*self.placed(frozen), *(place for place in self.buffers if place not in self.held)]
        self.fixed, self.homes = [path for path, _, _ in self.read], [place[1:] for place in self.read]
        self.holds = [path for path, _, _ in self.held]
        # What is written may depend on the mode of any module.
        turning = self.modules if self.held else [one for one in self.modules if has_statistics(one[1])]
        why = "what it remembers is part of the program. Call from_sequential again."
        self.turning = Modes(turning, "the net was cut into stages", why)

    def placed(self, paths: Iterable[str]) -> list[Place]:
        """Return the place of each of these tensors once, under its first path: it can be swapped only once."""
        first: dict[tuple[nn.Module, str], str] = {}
        for path in paths:
            owner, _, name = path.rpartition(".")
            first.setdefault((self.bound.get_submodule(owner), name), path)
        return [(path, *place) for place, path in first.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return StageModule, (self.number, self.children, self.names, self.skips, self.state_of)

    def __call__(self, params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Tensor] | None = None) -> Any:
        """The stage's output; with a state also the new one."""
        tensors = self._by_path(params)
        if not self.held:
            return self._run(tensors, x)[0]
        state = state or {}
        same_keys(state, self.holds, f"state of {self.who}", "a buffer that it writes")
        y, buffers = self._run(tensors | {path: state[path] for path in self.holds}, x)
        return y, {name: buffers[name] for name in state}

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """The stage's output, and by name its state."""
        tensors = self._under_all_names(params, constants) | dict(zip(self.holds, buffers, strict=True))
        with without_mutation(self.norms):
            y, new = self._run(tensors, x)
        return y, {"state": [new[path] for path in self.holds]} if self.held else {}

    def observed(self, tensors: Mapping[str, Tensor], x: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the output with these parameters and buffers, and the buffers afterwards."""
        y, buffers = self._run(dict(tensors), x)
        new = {path: buffers[path] for path in tensors if path in buffers}
        self._refuse_one_memory(new)
        return y, new

    def within(self, params: Mapping[str, Tensor], what: Callable[[], Any]) -> Any:
        """Call a function, such as a backward that recomputes, while `params` stand in the modules."""
        return self._with_tensors_bound(self._by_path(params), what)

    def during(self, params: Sequence[Tensor], constants: Sequence[Tensor], what: Callable[[], Any]) -> Any:
        """Call a function, such as the backward of a trace, while these tensors stand in the modules."""
        attributes = Attributes(self.modules)
        try:
            return self._with_tensors_bound(self._under_all_names(params, constants), what)
        finally:
            attributes.restore()

    def _with_tensors_bound(self, tensors: dict[str, Tensor], what: Callable[[], Any]) -> Any:
        def refuse(tensor: Tensor, op: Any) -> None:
            name = next((path for path, held in self.named_tensors() if memory(held) == memory(tensor)), None)
            raise Impure(
                f"{self.who} writes buffer {name!r} once more as its backward computes it again: "
                "torch.utils.checkpoint around a module that remembers counts twice. Use fpipe.checkpoint()."
            )

        with self._swapping(), OwnMemory(refuse, [tensor for _, tensor in self.named_tensors()]):
            return torch.func.functional_call(self.bound, tensors, (what,), tie_weights=False)

    def _run(self, tensors: dict[str, Tensor], x: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the output, and the buffers afterwards."""

        def run() -> tuple[Any, dict[str, Any]]:
            y = run_children(self.children, self.skips, x)
            return y, {path: held_by(owner).buffers.get(name) for path, owner, name in self.buffers}

        for norm in self.norms:
            refuse_other_channels(*norm, tensors)
        with self._swapping():
            # A copy, since functional_call notes in it what is bound anew.
            y, new = torch.func.functional_call(self.bound, dict(tensors), (run,), tie_weights=False)
        for path in (path for path in self.holds if path in tensors and not isinstance(new[path], Tensor)):
            raise Impure(f"{self.who} left no tensor in buffer {path!r}, which is its module state.")
        self._refuse_one_memory({path: new[path] for path in self.holds if path in tensors})
        return y, new

    @contextmanager
    def _swapping(self) -> Generator[None]:
        """Let one thread at a time swap tensors; put back what pruning, old-style weight norm and RNNs keep of their
        weights as attributes, which functional_call would leave behind."""
        with self.lock:
            self.turning.check()
            for path, module in self.turning.modules:
                refuse_impure(path, module)
            weights = [cached_weights(module) for module in self.caching]
            try:
                yield
            finally:
                for module, attributes in zip(self.caching, weights, strict=True):
                    vars(module).update(attributes)

    def _refuse_one_memory(self, new: Mapping[str, Tensor]) -> None:
        """Refuse buffers that share memory: as state they part, while in the module a write to one shows in both."""
        names: dict[Any, str] = {}
        for name, buffer in new.items():
            first = names.setdefault(memory(buffer), name)
            if first != name and memory(buffer) is not None:
                raise Impure(
                    f"{self.who} left buffers {first!r} and {name!r} in one storage; module state is a tensor of its "
                    "own for each: assign a .clone()."
                )

    def moved(self) -> Mapping[str, int]:
        """The parameters that its modules have elsewhere than when they were handed out."""
        with self.lock:
            return self.handed_out.moved()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and buffers of its modules by their paths."""
        yield from (*self.bound.named_buffers(), *self.bound.named_parameters())

    def all_names(self) -> list[str]:
        """The names of all of them, those of a tied tensor too."""
        named = self.bound.named_parameters(remove_duplicate=False), self.bound.named_buffers(remove_duplicate=False)
        return [name for part in named for name, _ in part]

    def _by_path(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        same_keys(params, [leaf[0] for leaf in self.names], f"params of {self.who}")
        pairs = zip(self.names, self.swapped, strict=True)
        return self._flagged({path: params[leaf[0]] for leaf, paths in pairs for path in paths})

    def _under_all_names(self, params: Sequence[Tensor], constants: Sequence[Tensor]) -> dict[str, Tensor]:
        tensors = {path: tensor for paths, tensor in zip(self.swapped, params, strict=True) for path in paths}
        return self._flagged(tensors) | dict(zip(self.fixed, constants, strict=True))

    def _flagged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give parameters the attributes that modules look for on theirs, such as `weight.sequence_parallel`."""
        for path, attributes in self.flags.items():
            vars(tensors[path]).update(attributes)
        return tensors

    def home_of(self, name: str) -> tuple[Any, str]:
        """Where its modules have a tensor: the module, and the attribute."""
        path, _, attribute = name.rpartition(".")
        return self.bound.get_submodule(path), attribute

    def state(self) -> dict[str, Tensor]:
        """The buffers that the stage writes, by name, as they are now."""
        return {path: getattr(owner, name).detach() for path, owner, name in self.held}

    def remembering(self) -> dict[str, Any]:
        """The fields of a `Stage` that tell of its state."""
        return {"asks": frozenset({"state"} if self.held else ())}

    def drawing(self) -> list[str]:
        """The modules that draw random numbers as they are now."""
        return [f"{path!r} ({type(module).__name__})" for path, module in self.modules if draws_random(module)]

    def twin(self) -> Any:
        """Equal for stages that compute the same function of parameters and constants, as far as one can tell."""
        numbers = {name: str(number) for number, name in enumerate(self.children)}

        def numbered(paths: Iterable[str]) -> tuple[str, ...]:
            """Leaves by their child's place in the stage instead of the child's name."""
            parts = (path.partition(".") for path in paths)
            return tuple(numbers.get(child, child) + dot + rest for child, dot, rest in parts)

        unsupported: list[Any] = []
        keys = tuple(module_key(module, unsupported) for module in self.children.values())
        paths = *self.names, self.fixed, self.holds
        return len(self.names), tuple(map(numbered, paths)), keys, self.skips, Same(self) if unsupported else None


class BoundModules(nn.Module):
    """Modules under the names they have in the whole net; a call calls the function that it is given."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        hold(self, modules)

    def __call__(self, what: Callable[[], Any]) -> Any:
        """Call a function without the hooks on all modules: this is no module of the user's."""
        return what()
