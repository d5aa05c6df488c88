"""Refuse what a pure function does not do: write memory that its call neither made nor was handed as state.

    y = x * 2; y.add_(1)              fine: the call made y
    x.add_(1)                         refused before the write, on the line that does it
    self.mean = 0.9 * self.mean       the same, where it is a buffer
    self.calls += 1                   seen after a trace, by comparing the attributes of modules
    numpy.random.rand()               seen after a trace, by the state of the generator

So there is nothing to restore, but for what a trace leaves in attributes of modules.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import tree
from fpipe.graphs.alike import alike, content_of, named_in
from fpipe.graphs.ambient import Untraceable
from fpipe.graphs.schema import written
from fpipe.model import PositionalStage

Modules = Sequence[tuple[str, nn.Module]]


class Impure(RuntimeError):
    """A stage or a loss does what no pure function does."""


class OwnMemory(TorchDispatchMode):
    """While it is on, an op may write only storages that were made since.

    Args:
        refuse: is called before an op writes another storage; it raises.
        forbidden: if given, only these storages may not be written.

    Attributes:
        read: the storages that ops read and that were there before; moving, casting and detaching are no reading.
        wrote: the storages that ops wrote.
    """

    def __init__(self, refuse: Callable[[Tensor, Any], None], forbidden: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.refuse = refuse
        self.forbidden = None if forbidden is None else {memory(tensor) for tensor in forbidden}
        self.made: dict[Any, StorageWeakRef] = {}  # weak: no memory lives longer for it, and no number is used again
        self.read: set[Any] = set()
        self.wrote: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written(func, args, kwargs):
            if isinstance(tensor, Tensor) and tensor.numel():
                place = memory(tensor)
                self.wrote.add(place)
                if not self.is_own(place):
                    self.refuse(tensor, func)
        taken = {memory(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        if func not in _MOVES:
            self.read |= taken - self.made.keys()
        results = func(*args, **kwargs)
        for tensor in _tensors(results if isinstance(results, list | tuple) else (results,)):
            place = memory(tensor)
            if place is not None and (place not in taken or func is _LITERAL):
                self.made[place] = StorageWeakRef(tensor.untyped_storage())
        return results

    def is_own(self, place: Any) -> bool:
        """Whether a storage may be written."""
        return place is None or (place in self.made if self.forbidden is None else place not in self.forbidden)


_aten: Any = torch.ops.aten
_MOVES = (_aten._to_copy.default, _aten.detach.default, _aten.alias.default)
_LITERAL = _aten.lift_fresh.default  # torch.tensor([1, 2]) in a function


def memory(tensor: Tensor) -> Any:
    """What tells the storage of a tensor from all others that are alive; None where it has none, as sparse ones."""
    try:
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except (NotImplementedError, RuntimeError):
        return None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def pure(function: Any, who: str, given: Any = (), *, tracing: bool = False) -> Generator[OwnMemory]:
    """While it lasts a stage, an update or a loss runs.

    Args:
        function: what runs; its closure says what errors call a tensor.
        who: what errors call it.
        given: what it was handed and may not write. State that it may is cloned within.
        tracing: whether it runs on fake tensors. Attributes of modules are then put back, and none may have changed.

    Raises:
        Impure: it writes other memory than its own, or binds another tensor in the place of a buffer.
        Untraceable: what it does to attributes and to Python's random numbers is lost in a trace.
    """
    lock = function.lock if isinstance(function, PositionalStage) else nullcontext()
    with lock:  # another thread swaps the tensors of modules while it runs them
        modules = modules_of(function)
        attributes = Attributes(modules, who, every=tracing)
        mode = OwnMemory(partial(_refuse, function, who, given))
        try:
            with unmoved_random_numbers() if tracing else nullcontext(), _bound(function, who, modules, mode), mode:
                yield mode
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):  # autograd was faster
                raise Impure(_GIVEN.format(who)) from error
            raise
        finally:
            moved = attributes.moved(mode.read)
            if tracing:
                attributes.put_back()
        if moved is not None:
            raise (Untraceable if tracing else Impure)(moved)
        stale = next((name for name, one in _unreadable(function) if memory(one) in mode.read), None)
        if stale is not None:
            raise Impure(
                f"{who} reads {stale!r} of a norm, which only updates know: hand in from_sequential(..., "
                f"example=inputs), which shows it, or say state={{{stale!r}: 'ordered'}}."
            )


@contextmanager
def _bound(function: Any, who: str, modules: Modules, mode: OwnMemory) -> Generator[None]:
    """Meanwhile a module's tensor is bound anew only where the one before is the call's own, as state is that
    functional_call has put there."""
    thread = threading.get_ident()
    known = {id(module): path for path, module in modules}

    def bind(module: nn.Module, name: str, value: Any) -> None:
        before = vars(module)["_buffers"].get(name, vars(module)["_parameters"].get(name))
        new = before is None and id(module) not in known  # its __init__ may run
        if threading.get_ident() == thread and not new and not (before is not None and mode.is_own(memory(before))):
            path = known.get(id(module), type(module).__name__)
            whole = f"{path}.{name}" if path else name
            raise Impure(refused(who, "binds {} anew", whole, isinstance(function, PositionalStage)))

    hooks = register_module_buffer_registration_hook(bind), register_module_parameter_registration_hook(bind)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_GIVEN = (
    "{} writes what it was given in place; a stage and a loss are pure functions. Work on a copy, or use inplace=False."
)


def _refuse(function: Any, who: str, given: Any, tensor: Tensor, op: Any) -> None:
    """Raise for a write, and name the tensor."""
    place = memory(tensor)
    if any(place == memory(leaf) for leaf in tree.leaves(given) if isinstance(leaf, Tensor)):
        raise Impure(f"{_GIVEN.format(who)} The op is {op}.")
    of_module = isinstance(function, PositionalStage)
    named = function.named_tensors() if of_module else closed_over(function)
    found = next((name for name, one in named if memory(one) == place), None)
    raise Impure(refused(who, f"writes {{}} in place ({op})", found, of_module))


def refused(who: str, does: str, name: str | None, of_module: bool) -> str:
    """The sentence for memory that is not the function's own.

    >>> refused("stage 1", "writes {} in place (aten.add_.Tensor)", "held", False).partition(";")[0]
    "stage 1 writes 'held' in place (aten.add_.Tensor), which it closes over"
    """
    if of_module:
        what = "its parameters or buffers" if name is None else f"buffer or parameter {name!r}"
        return (
            f"{who} {does.format(what)}. What a module remembers is state: cut the net by from_sequential(..., "
            f"example=inputs), or say state={{{name or 'name'!r}: 'update'}}, or 'ordered' if an output reads it. Or "
            "switch the writing off, say by .eval()."
        )
    what = "a tensor" if name is None else repr(name)
    return (
        f"{who} {does.format(what)}, which it closes over; a stage and a loss are pure functions. Hand it in, among "
        "params or as state; of a module call .eval(), or cut the net by from_sequential."
    )


class Attributes:
    """The plain attributes of modules, to tell after a call which of them it has moved.

    Args:
        modules: with their paths.
        who: what errors call the function that runs.
        every: whether numbers, words and containers count too; else only tensors.
    """

    def __init__(self, modules: Modules, who: str, every: bool = False) -> None:
        self.who = who
        self.before = [(path, module, dict(vars(module))) for path, module in modules]
        values = (value for _, _, attributes in self.before for value in attributes.values())
        self.containers = [(one, copy(one)) for one in values if every and type(one) in (dict, list, set)]
        self.plain = [_fingerprint(attributes) for _, _, attributes in self.before] if every else None

    def moved(self, read: set[Any]) -> str | None:
        """What the first change was, in words; `read` are the storages that the call read."""
        for at, (path, module, attributes) in enumerate(self.before):
            what = f"of module {path!r} ({type(module).__name__})"
            for name, value in attributes.items():
                if isinstance(value, Tensor) and vars(module).get(name) is not value and memory(value) in read:
                    return (
                        f"{self.who} changes {name!r} {what} as it runs, a tensor that is no buffer: what a module "
                        f"remembers is state. Say self.register_buffer({name!r}, ...)."
                    )
            if self.plain is not None:
                now, known = _fingerprint(vars(module)), self.plain[at]
                other = next((name for name in now if name in known and now[name] != known[name]), None)
                if other is not None:
                    return f"{self.who} changes {other!r} {what}"
        return None

    def put_back(self) -> None:
        """Everything as it was."""
        for _, module, attributes in self.before:
            for name in [*vars(module)]:
                if name not in attributes:
                    del vars(module)[name]
            vars(module).update(attributes)
        for container, content in self.containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)


# What every module has, its hooks say, and an RNN's lists of its weights.
_NOT_PLAIN = frozenset((*vars(nn.Module()), "_flat_weights", "_flat_weight_refs")) - {"training"}


def _fingerprint(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: alike(value)
        for name, value in attributes.items()
        if name not in _NOT_PLAIN and not isinstance(value, Tensor)
    }


def closed_over(function: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a function closes over, with those of the modules that it does, each by a name."""
    for name, one in _reached(function):
        if isinstance(one, nn.Module):
            yield from ((f"{name}.{path}", leaf) for path, leaf in (*one.named_buffers(), *one.named_parameters()))
        elif isinstance(one, Tensor):
            yield name, one


def modules_of(function: Any) -> Modules:
    """The modules that a function closes over or names, with those inside.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> [path for path, _ in modules_of(lambda x: net(x))]
    ['net', 'net.0']
    """
    found: dict[nn.Module, str] = {}
    if isinstance(function, PositionalStage):
        return function.modules
    for name, one in _reached(function):
        for path, module in one.named_modules() if isinstance(one, nn.Module) else ():
            found.setdefault(module, f"{name}.{path}" if path else name)
    return [(path, module) for module, path in found.items()]


def _unreadable(function: Any) -> Iterable[tuple[str, Tensor]]:
    return function.unreadable() if isinstance(function, PositionalStage) else ()


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function closes over or names: through other functions and containers, and not through objects."""
    seen: dict[int, Any] = {}  # the objects too, so that none that is made meanwhile has the id of another
    todo: list[tuple[str, Any]] = [("it", function)]
    while todo:
        name, one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor | nn.Module):
            yield name, one
        elif isinstance(one, FunctionType):
            if one.__module__ and one.__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names):
                code, around = one.__code__, one.__globals__
                todo += [(word, around[word]) for word in named_in(code) if word in around]
                todo += zip(code.co_freevars, map(content_of, one.__closure__ or ()), strict=True)
                todo += [(name, value) for value in one.__defaults__ or ()] + [*(one.__kwdefaults__ or {}).items()]
        elif isinstance(one, MethodType):
            todo += [(name, one.__func__), (name, one.__self__)]
        elif isinstance(one, partial):
            todo += [(name, one.func), *((name, value) for value in one.args), *one.keywords.items()]
        elif isinstance(one, dict):
            todo += [(f"{name}.{key}", value) for key, value in one.items()]
        elif isinstance(one, list | tuple):
            todo += [(f"{name}.{at}", value) for at, value in enumerate(one)]


@contextmanager
def unmoved_random_numbers() -> Generator[None]:
    """Python's and numpy's own random numbers are as they were; a trace would repeat what it drew of them for ever.

    Raises:
        Untraceable: some were drawn.
    """
    before, numpy = random.getstate(), sys.modules.get("numpy.random")
    ours = None if numpy is None else numpy.get_state()
    yield
    moved = "Python's" if random.getstate() != before else None
    random.setstate(before)
    if numpy is not None:
        moved = "numpy's" if not _same(numpy.get_state(), ours) else moved
        numpy.set_state(ours)
    if moved:
        raise Untraceable(f"it draws {moved} random numbers, which follow from no key and which a trace would repeat")


def _same(one: Any, other: Any) -> bool:
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(one, other, strict=True))
