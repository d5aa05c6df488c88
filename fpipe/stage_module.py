"""The function of a stage that is made of modules: they run on what they are handed instead of what they hold.

f(params, x) = modules(x) while `params`, and where asked buffers, are in the place of the modules' own
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.batch_norm import names_of, noted, remembers, updated, updated_at_the_end
from fpipe.buffers import Buffers
from fpipe.graphs.alike import Same
from fpipe.impure import DEPEND_ON_MODE, draws, refuse_impure
from fpipe.params import same_keys
from fpipe.skips import Skips, through
from fpipe.twins import twin

Names = tuple[tuple[str, ...], ...]
"""The names of each trained parameter."""


class StageModule:
    """The function of a stage made of modules: they run one after the other, with `params` in place of their own.

    The modules' parameters are swapped while it runs, so threads that run one stage at once take turns.
    """

    def __init__(
        self,
        number: int,
        children: Mapping[str, nn.Module],
        names: Names,
        skips: Skips | None = None,
        deferred: bool = False,
    ) -> None:
        self.number, self.children, self.names, self.deferred = number, dict(children), names, deferred
        self.skips = skips or Skips()
        self.bound = _Bound(children)
        modules = [(path, module) for path, module in self.bound.named_modules() if path]
        self.modules = modules
        self.moody = [(path, module) for path, module in modules if isinstance(module, DEPEND_ON_MODE)]
        self.caching = [m for _, m in modules if isinstance(m, nn.RNNBase) or getattr(m, "_forward_pre_hooks", None)]
        self.lock = threading.RLock()
        self.norms = [(path, module) for path, module in modules if remembers(module)]
        trained = {name for leaf in names for name in leaf}
        fixed = [path for path, _ in self.bound.named_parameters(remove_duplicate=False) if path not in trained]
        written = {id(buffer) for _, module in self.norms for buffer in module.buffers(recurse=False)}
        named = self.bound.named_buffers(remove_duplicate=False)
        fixed += [path for path, buffer in named if id(buffer) not in written]
        self.fixed = [(path, *place) for path, place in self._places(fixed)]
        self.swapped = [[path for path, _ in self._places(leaf)] for leaf in names]

    def _places(self, paths: Iterable[str]) -> list[tuple[str, tuple[nn.Module, str]]]:
        """Each place where a tensor is, as its module and name, under the first of its paths.

        A module that stands twice has its tensors under two paths, but they can be swapped, and put back, only once.
        """
        first: dict[tuple[nn.Module, str], str] = {}
        for path in paths:
            owner, _, name = path.rpartition(".")
            first.setdefault((self.bound.get_submodule(owner), name), path)
        return [(path, place) for place, path in first.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return StageModule, (self.number, self.children, self.names, self.skips, self.deferred)

    def __call__(self, params: Mapping[str, Tensor], x: Any) -> Any:
        """The stage's output; with norms that remember, also what their update needs."""
        return self.within(params, partial(self._through, x), noting=bool(self.norms))

    def _through(self, x: Any) -> Any:
        return through(self.children, self.skips, x)

    def within(self, params: Mapping[str, Tensor], what: Callable[[], Any], noting: bool = False) -> Any:
        """Do something while `params` are in the modules' place.

        A backward pass needs this where a module runs again in it: torch.utils.checkpoint recomputes with whatever
        parameters the modules hold by then.
        """
        same_keys(params, [leaf[0] for leaf in self.names], f"params of stage {self.number}")
        self._refuse_changed()
        own = {path: params[leaf[0]] for leaf, paths in zip(self.names, self.swapped, strict=True) for path in paths}
        with self.lock:
            buffers = Buffers(self.modules)
            kept = [_kept(module) for module in self.caching]
            try:
                with noted(self.norms, self.deferred) as notes:
                    made = torch.func.functional_call(self.bound, own, (what,), tie_weights=False)
            finally:
                for module, attributes in zip(self.caching, kept, strict=True):
                    vars(module).update(attributes)
                written = buffers.put_back()
        if written:
            raise RuntimeError(
                f"stage {self.number} wrote buffer {written[0]!r} of its module as it ran (it is put back): buffers "
                "that a stage writes are not supported yet. Switch the writing off, say by .eval()."
            )
        return (made, notes) if noting else made

    def _refuse_changed(self) -> None:
        """The mode may have changed since the stage was made."""
        norms = {path for path, _ in self.norms}
        for path, module in self.moody:
            refuse_impure(path, module)
            if remembers(module) != (path in norms):
                was, now = ("training", "eval") if path in norms else ("eval", "training")
                raise ValueError(
                    f"module {path!r} ({type(module).__name__}) was in {was} when the net was cut into stages and is "
                    f"in {now} now: what it remembers is part of the program. Call from_sequential again."
                )

    def constants(self) -> list[Tensor]:
        """What the stage reads besides its parameters, as it is now: frozen parameters and buffers."""
        with self.lock:
            return [getattr(owner, name) for _, owner, name in self.fixed]

    def pure(self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any) -> Any:
        """The stage's output as a function of all that it reads, `params` in the order of its names."""
        self._refuse_changed()
        own = {path: tensor for paths, tensor in zip(self.swapped, params, strict=True) for path in paths}
        own |= {path: tensor for (path, _, _), tensor in zip(self.fixed, constants, strict=True)}
        with self.lock:
            kept = [vars(module) | _kept(module) for _, module in self.modules]
            try:
                with noted(self.norms, self.deferred) as notes:
                    through = (partial(self._through, x),)
                    made = torch.func.functional_call(self.bound, own, through, tie_weights=False)
                return (made, notes) if self.norms else made
            finally:  # as it was: whatever a module notes now is without data
                for (_, module), attributes in zip(self.modules, kept, strict=True):
                    vars(module).clear()
                    vars(module).update(attributes)

    def state(self) -> dict[str, Tensor]:
        """The buffers that the stage's norms write, by name, as they are now."""
        return {name: self.bound.get_buffer(name).detach() for name in names_of(self.norms)}

    def remembering(self) -> dict[str, Any]:
        """What a `Stage` says about its state: nothing without norms that remember."""
        if not self.norms:
            return {}
        update = updated_at_the_end if self.deferred else updated
        return {"update": partial(update, self.norms), "notes": True, "counts": self.deferred}

    def drawing(self) -> list[str]:
        """The modules that draw random numbers as they are now."""
        return [f"{path!r} ({type(module).__name__})" for path, module in self.modules if draws(module)]

    def twin(self) -> Any:
        """Equal for stages that compute the same function of their parameters and constants, in their order.

        A stage that holds on to an object which cannot be compared (a tensor, another module) is like no other.
        """
        place = {name: str(at) for at, name in enumerate(self.children)}
        short = [tuple(_short(name, place) for name in leaf) for leaf in self.names]
        fixed = tuple(_short(path, place) for path, _, _ in self.fixed)
        odd: list[Any] = []
        twins = tuple(twin(module, odd) for module in self.children.values())
        return tuple(short), fixed, twins, self.skips, self.deferred, Same(self) if odd else None


def _short(path: str, place: Mapping[str, str]) -> str:
    """A leaf's name with its child's place in the stage instead of the child's name."""
    child, dot, rest = path.partition(".")
    return place[child] + dot + rest


class _Bound(nn.Module):
    """A stage's modules under the names they have in the whole net; called, it does what it is given."""

    def __init__(self, children: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in children.items():
            self.add_module(name, module)

    def forward(self, what: Callable[[], Any]) -> Any:
        return what()


def _kept(module: nn.Module) -> dict[str, Any]:
    """What functional_call leaves behind in a module, as it was: the weight that pruning or old-style weight norm keeps
    as an attribute, and an RNN's list of its weights, which would go on computing with another's."""
    attributes = vars(module).items()
    tensors = {name: value for name, value in attributes if isinstance(value, Tensor)}
    return tensors | {name: list(value) for name, value in attributes if name in ("_flat_weights", "_flat_weight_refs")}
