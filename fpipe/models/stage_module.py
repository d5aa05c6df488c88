"""The function of a stage that is made of modules: they run on what they are handed instead of what they hold.

f(params, x) = modules(x)                         while `params` are in the place of the modules' own
f(params, x, state=s) = modules(x), s'            and buffers too, where a module reads what it writes
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from fpipe.graphs.alike import Same
from fpipe.graphs.graph import is_plain, storage_of
from fpipe.model import ByPlace, Names, same_keys
from fpipe.models.attributes import Attributes
from fpipe.models.batch_norm import STATISTICS, noted, remembers, tracks, updated, updated_at_the_end
from fpipe.models.buffers import Buffers, Places, own_buffers
from fpipe.models.impure import DEPEND_ON_MODE, draws, refuse_impure
from fpipe.models.reads import asks_for_mode, changes_others, names_any, read_buffers
from fpipe.models.skips import Skips, through
from fpipe.models.tapes import Recorder, copy_of, updated_with
from fpipe.models.twins import twin
from fpipe.models.writers import Write, written_buffers


class StageModule(ByPlace):
    """The function of a stage made of modules: they run one after the other, with `params` in place of their own.

    The modules' parameters are swapped while it runs, so threads that run one stage at once take turns.

    Attributes:
        norms: the batch and instance norms that remember; their outputs do not read it, so their updates are apart.
        unread: the buffers that modules write, and read only to do so: their updates are apart too.
        held: where a module reads what it writes: these are the stage's state, all of it, and a forward reads it.
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
        self.held: list[tuple[str, nn.Module, str]] = []
        self.bound = _Bound(children)
        modules = [(path, module) for path, module in self.bound.named_modules() if path]
        self.modules = modules
        self.moody = [(path, module) for path, module in modules if isinstance(module, DEPEND_ON_MODE)]
        self.caching = [m for _, m in modules if isinstance(m, nn.RNNBase) or getattr(m, "_forward_pre_hooks", None)]
        self.lock = threading.RLock()
        self.norms = [(path, module) for path, module in modules if remembers(module)]
        writes = [write for write in written_buffers(m for _, m in modules) if not _is_statistic(write)]
        turning = [write.writer for write in writes if write.moody]
        trained = {name for leaf in names for name in leaf}
        fixed = [path for path, _ in self.bound.named_parameters(remove_duplicate=False) if path not in trained]
        own = {(norm, name) for _, norm in self.norms for name, _ in norm.named_buffers(recurse=False)}
        each = [module for _, module in modules]
        asked = bool(self.norms) and names_any(each, STATISTICS)  # of a norm by another module, or by a hook
        odd = [norm for norm in each if tracks(norm) and (asked or not remembers(norm))]
        reads = {(norm, name) for norm in odd for name, _ in norm.named_buffers(recurse=False)}
        reads |= {(write.owner, write.name) for write in writes if write.now}
        own |= reads
        buffers = self._places(path for path, _ in self.bound.named_buffers(remove_duplicate=False))
        self.remembered = [(path, *place) for path, place in buffers if place in own]
        self.unread: list[tuple[str, nn.Module, str]] = []
        if reads and (odd or read_buffers(each, reads)):
            self.held, self.norms = self.remembered, []
            turning += [module for module in each if isinstance(module, _NormBase)]
        elif reads:
            self.unread = [(path, *place) for path, place in buffers if place in reads]
            turning += [module for module in each if asks_for_mode(module, reads)]
        self.copying = bool(self.unread or self.norms) and changes_others(each, reads)
        self.holds = [path for path, _, _ in self.held]
        self.apart = [path for path, _, _ in self.unread]
        self.writes = [path for path, _, _ in self.remembered]
        self.turning = [(path, m, m.training) for path, m in modules if any(m is one for one in turning)]
        # What is not read is fixed too: stand-ins are made of it.
        fixed += [path for path, place in buffers if place not in own or path in self.apart]
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

    def __call__(self, params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Tensor] | None = None) -> Any:
        """The stage's output; with updates that are apart, also what they need; with a state, also the new."""
        if not self.held:
            return self.within(params, partial(self._through, x), noting=bool(self.norms or self.unread))
        given = state or {}
        same_keys(given, self.holds, f"state of stage {self.number}", "a buffer that it writes")
        made = self.within(params, partial(self._through, x), buffers=[given[name] for name in self.holds])
        new = dict(zip(self.holds, made[1], strict=True))
        return made[0], {name: new[name] for name in given}

    def _through(self, x: Any) -> Any:
        return through(self.children, self.skips, x)

    def within(
        self,
        params: Mapping[str, Tensor],
        what: Callable[[], Any],
        noting: bool = False,
        buffers: Sequence[Tensor] | None = None,
    ) -> Any:
        """Do something while `params` are in the modules' place.

        A backward pass needs this where a module runs again in it: torch.utils.checkpoint recomputes with whatever
        parameters the modules hold by then.
        """
        same_keys(params, [leaf[0] for leaf in self.names], f"params of stage {self.number}")
        own = {path: params[leaf[0]] for leaf, paths in zip(self.names, self.swapped, strict=True) for path in paths}
        with self.lock:
            self._refuse_changed()
            before = Buffers(self.modules)
            kept = [_kept(module) for module in self.caching]
            try:
                with self._noted() as notes:
                    made, new, tape = self._called(own, buffers, what, noting)
            finally:
                for module, attributes in zip(self.caching, kept, strict=True):
                    vars(module).update(attributes)
                written = before.put_back()
        self._refuse_written(written)
        return (made, self._seen(notes, tape)) if noting else (made, new) if buffers is not None else made

    def _noted(self) -> AbstractContextManager[Any]:
        """While it lasts, what the updates of norms need is noted."""
        return noted(self.norms, self.deferred, self.copying, f"stage {self.number}")

    def _seen(self, notes: Any, tape: Any) -> Any:
        """What the updates need, of norms and of others."""
        return (notes, *tape) if self.unread else notes

    def _called(
        self,
        own: dict[str, Tensor],
        buffers: Sequence[Tensor] | None,
        what: Callable[[], Any],
        noting: bool,
    ) -> tuple[Any, list[Any], Any]:
        """What something makes while tensors are in the modules' place; what is then in the place of the buffers that
        it may write, which are copies of those handed in; and what it did to those that it does not read.
        """
        unread = self.unread if noting else []
        recorder = Recorder(self.apart, self.copying, f"stage {self.number}")
        if unread:
            here = [own[path] if path in own else getattr(owner, name) for path, owner, name in unread]
            own |= dict(zip(self.apart, recorder.stand_ins(here), strict=True))
        held = [] if buffers is None else self.held
        copies = [buffer.clone() for buffer in buffers or ()]
        own |= {path: copy for (path, _, _), copy in zip(held, copies, strict=True)}

        def watched() -> tuple[Any, list[Any]]:
            before = Places(self.modules)
            with Attributes(self.modules).watched(f"stage {self.number}"):
                made = what()
            new = [own_buffers(owner).get(name) for _, owner, name in (*held, *unread)]
            self._refuse_written(before.put_back({(owner, name) for _, owner, name in (*held, *unread)}))
            return made, new

        made, new = torch.func.functional_call(self.bound, own, (watched,), tie_weights=False)
        pairs = zip((*held, *unread), new, strict=True)
        odd = next((path for (path, _, _), one in pairs if not isinstance(one, Tensor)), None)
        if odd is not None:
            raise RuntimeError(f"stage {self.number} left no tensor in buffer {odd!r}, which is its module state.")
        self._refuse_one_memory([path for path, _, _ in (*held, *unread)], new)
        recorder.refuse_in(made, "its output comes from it")
        return made, new[: len(held)], recorder.finished(new[len(held) :])

    def _refuse_one_memory(self, names: Sequence[str], new: Sequence[Tensor]) -> None:
        """As state they are apart from then on, while in the module what is written into one shows in the other."""
        first: dict[int, str] = {}
        for name, one in zip(names, new, strict=True):
            copy = copy_of(one)
            other = first.setdefault(storage_of(copy), name) if is_plain(copy) else name
            if other != name:
                raise RuntimeError(
                    f"stage {self.number} left buffers {other!r} and {name!r} in one memory; module state is a tensor "
                    "of its own for each: assign a .clone()."
                )

    def _refuse_written(self, written: Sequence[str]) -> None:
        if not written:
            return
        if written[0] in self.writes:
            raise RuntimeError(
                f"stage {self.number} wrote buffer {written[0]!r} once more as its backward computed it again (it is "
                "put back): torch.utils.checkpoint around a module that remembers counts twice. Use fpipe.checkpoint()."
            )
        name = written[0].rpartition(".")[2]
        raise RuntimeError(
            f"stage {self.number} wrote buffer {written[0]!r} of its module as it ran (it is put back), and the "
            f"module's code does not show that it does. Write it in the module's forward, as self.{name} = ... or "
            f"self.{name}.copy_(...): then it is module state. Or switch the writing off, say by .eval()."
        )

    def _refuse_changed(self) -> None:
        """The mode may have changed since the stage was made."""
        norms = {path for path, _ in self.norms}
        for path, module in self.moody:
            refuse_impure(path, module)
            if not self.held and remembers(module) != (path in norms):
                self._refuse_turned(path, module, path in norms)
        for path, module, was in self.turning:
            if module.training != was:
                self._refuse_turned(path, module, was)

    def _refuse_turned(self, path: str, module: nn.Module, training: bool) -> None:
        was, now = ("training", "eval") if training else ("eval", "training")
        raise ValueError(
            f"module {path!r} ({type(module).__name__}) was in {was} when the net was cut into stages and is in {now} "
            "now: what it remembers is part of the program. Call from_sequential again."
        )

    def constants(self) -> list[Tensor]:
        """What the stage reads besides its parameters, as it is now: frozen parameters and buffers."""
        with self.lock:
            return [getattr(owner, name) for _, owner, name in self.fixed]

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> Any:
        """The stage's output, with its state or what its update needs, as a function of all that it reads."""
        through, noting = partial(self._through, x), bool(self.norms or self.unread)
        with self._untouched(), self._noted() as notes:
            given = buffers if self.held else None
            made, new, tape = self._called(self._own(params, constants), given, through, noting)
        return (made, new) if self.held else (made, self._seen(notes, tape)) if noting else made

    def during(self, params: Sequence[Tensor], constants: Sequence[Tensor], what: Callable[[], Any]) -> Any:
        """Do something while these are in the modules' place, as `within`; what it would write is none of theirs."""
        copies = {path: getattr(owner, name).detach().clone() for path, owner, name in self.remembered}
        versions = [copy._version for copy in copies.values()]
        with self._untouched(), self._noted():
            made, _, _ = self._called(self._own(params, constants) | copies, None, what, False)
        changed = zip(copies.items(), versions, strict=True)
        self._refuse_written([path for (path, copy), version in changed if copy._version != version])
        return made

    def _own(self, params: Sequence[Tensor], constants: Sequence[Tensor]) -> dict[str, Tensor]:
        """What a stage reads, under all its names."""
        own = {path: tensor for paths, tensor in zip(self.swapped, params, strict=True) for path in paths}
        return own | {path: tensor for (path, _, _), tensor in zip(self.fixed, constants, strict=True)}

    @contextmanager
    def _untouched(self) -> Generator[None]:
        """Whatever modules note while it lasts is without data: afterwards they are as they were."""
        with self.lock:
            self._refuse_changed()
            kept = [vars(module) | _kept(module) for _, module in self.modules]
            try:
                yield
            finally:
                for (_, module), attributes in zip(self.modules, kept, strict=True):
                    vars(module).clear()
                    vars(module).update(attributes)

    def state(self) -> dict[str, Tensor]:
        """The buffers that the stage writes, by name, as they are now."""
        return {path: getattr(owner, name).detach() for path, owner, name in self.remembered}

    def remembering(self) -> dict[str, Any]:
        """What a `Stage` says about its state: nothing if it writes no buffer."""
        said: dict[str, Any] = {"asks": frozenset({"state"} if self.held else ())}
        if not self.norms and not self.unread:
            return said
        update = partial(updated_at_the_end if self.deferred else updated, self.norms)
        update = partial(updated_with, update, self.apart) if self.unread else update
        return said | {"update": update, "notes": True, "counts": self.deferred}

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
        written = tuple(tuple(_short(path, place) for path in paths) for paths in (self.holds, self.apart))
        return tuple(short), fixed, written, twins, self.skips, self.deferred, Same(self) if odd else None


def _is_statistic(write: Write) -> bool:
    """Whether it is a norm's way to remember, which is known without reading its code."""
    return isinstance(write.owner, _NormBase) and write.name in STATISTICS


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

    def __call__(self, what: Callable[[], Any]) -> Any:
        """What it is given, without the hooks on all modules: this is none of theirs."""
        return what()


def _kept(module: nn.Module) -> dict[str, Any]:
    """What functional_call leaves behind in a module, as it was: the weight that pruning or old-style weight norm keeps
    as an attribute, and an RNN's list of its weights, which would go on computing with another's."""
    attributes = vars(module).items()
    tensors = {name: value for name, value in attributes if isinstance(value, Tensor)}
    return tensors | {name: list(value) for name, value in attributes if name in ("_flat_weights", "_flat_weight_refs")}
