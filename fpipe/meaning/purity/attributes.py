"""Find the modules and tensors that a function refers to, and notice attributes and modes that change.

self.mean = 0.9 * self.mean         refused where it is a plain attribute: what a module remembers is a buffer
self.calls += 1                     happens once, when the stage is traced, and is undone after the trace
net.eval(), then the step           refused if the net was traced in training
"""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpipe.meaning.purity.write_guard import storage_key
from fpipe.positional_stage import PositionalStage
from fpipe.torch_internals import is_compiled, warn

NamedModules = Sequence[tuple[str, nn.Module]]
"""Modules with their paths."""


class CallCounter(NamedTuple):
    """A number that a module changes as it runs, with its values before and after a call.

    It is the attribute `name` of the module, or stands in a dict or list there: under `key` in `container`.
    """

    path: str
    module: nn.Module
    name: str
    container: Any
    key: Any
    number_before: float
    number_after: float

    def set_calls(self, calls: int) -> None:
        """Set the number as if the module had been called so many times."""
        self.container[self.key] = self.number_before + calls * (self.number_after - self.number_before)


class AttributeSnapshot:
    """The attributes of modules before a call; with copies of dicts, lists and sets if they are to be restored."""

    def __init__(self, modules: NamedModules, with_containers: bool = False) -> None:
        self.snapshots = [(path, module, dict(vars(module))) for path, module in modules]
        values = (value for _, _, attributes in self.snapshots for value in attributes.values())
        self.container_copies = [
            (value, copy(value)) for value in values if with_containers and type(value) in _CONTAINER_TYPES
        ]

    def describe_rebound_tensor(self, label: str, storages_read: set[Any]) -> str | None:
        """Describe the first attribute that holds another tensor now, if the call read the former one's storage.

        A tensor that a call reads and replaces is state, which a trace would freeze.
        """
        for path, module, attributes in self.snapshots:
            for name, value in attributes.items():
                if (
                    isinstance(value, Tensor)
                    and vars(module).get(name) is not value
                    and storage_key(value) in storages_read
                ):
                    return (
                        f"{label} changes {name!r} of module {path!r} ({type(module).__name__}) as it runs, a tensor "
                        f"that is no buffer. Say self.register_buffer({name!r}, ...)."
                    )
        return None

    def counters(self) -> list[CallCounter]:
        """Return the numbers that a call has changed among the attributes, and in the copied dicts and lists."""
        copy_by_id = {id(container): copied for container, copied in self.container_copies}

        def numbers_before(module: nn.Module, name: str, value: Any) -> Iterator[tuple[Any, Any, Any]]:
            copied = copy_by_id.get(id(value), ())
            pairs = copied.items() if isinstance(copied, dict) else enumerate(copied)
            return chain([(vars(module), name, value)], ((value, key, number) for key, number in pairs))

        return [
            CallCounter(path, module, name, container, key, number, container[key])
            for path, module, attributes in self.snapshots
            for name, value in attributes.items()
            for container, key, number in numbers_before(module, name, value)
            if type(number) in (int, float) and _number_at(container, key) not in (None, number)
        ]

    def restore(self) -> None:
        """Give modules their former attributes back, and the containers among them their former contents."""
        for _, module, attributes in self.snapshots:
            for name in [*vars(module)]:
                if name not in attributes:
                    del vars(module)[name]
            vars(module).update(attributes)
        for container, copied in self.container_copies:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(copied)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


_CONTAINER_TYPES = (dict, OrderedDict, list, set)


def _number_at(container: Any, key: Any) -> float | None:
    """Return the number under a key or index, or None."""
    with suppress(LookupError, TypeError):  # a shorter list, a set
        return container[key] if type(container[key]) in (int, float) else None
    return None


class Modes:
    """The train or eval mode that each module had at some occasion, to be compared with its mode today.

    Args:
        modules: the modules by path.
        occasion: what happened in these modes, such as "the net was traced"; the error says it.
        consequence: why a change matters and the way out; the error ends with it.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> modes = Modes([*net.named_modules()], "the net was traced", "call from_module again.")
    >>> modes.current(), net.eval().training, modes.current()
    ((True, True, True), False, (False, False, False))
    """

    def __init__(self, modules: NamedModules, occasion: str, consequence: str) -> None:
        self.modules, self.occasion, self.consequence = modules, occasion, consequence
        self.recorded = self.current()

    def current(self) -> tuple[bool, ...]:
        """Return for each module whether it is in training."""
        return tuple([module.training for _, module in self.modules])

    def check(self) -> None:
        """Raise ValueError if a module has changed its mode."""
        for (module_path, module), was_training in zip(self.modules, self.recorded, strict=True):
            if module.training != was_training:
                old_mode, new_mode = ("training", "eval") if was_training else ("eval", "training")
                raise ValueError(
                    f"module {module_path!r} ({type(module).__name__}) was in {old_mode} when {self.occasion} "
                    f"and is in {new_mode} now: {self.consequence}"
                )


def modules_of(function: Any) -> NamedModules:
    """Return the modules that a function closes over or names, and their submodules, with paths.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> [path for path, _ in modules_of(lambda x: net(x))]
    ['net', 'net.0']
    """
    if isinstance(function, PositionalStage):
        return function.modules
    paths: dict[nn.Module, str] = {}
    for name, value in _named_values(function):
        for path, module in value.named_modules() if isinstance(value, nn.Module) else ():
            paths.setdefault(module, f"{name}.{path}" if path else name)
    return [(path, module) for module, path in paths.items()]


def closed_over_tensors(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and a tensor for each tensor that a function closes over or names, directly or in a module."""
    for name, value in _named_values(function):
        if isinstance(value, nn.Module):
            tensors = (*value.named_buffers(), *value.named_parameters())
            yield from ((f"{name}.{path}", tensor) for path, tensor in tensors)
        else:
            yield name, value


def _named_values(function: Any) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the tensors and modules that a function reaches, by name."""
    for name, value in _reached_values({"it": function}):
        if isinstance(value, Tensor | nn.Module):
            yield name, value


def _reached_values(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what functions reach, by name, through user functions and containers, but not through modules."""
    # The walk makes objects (bound methods, for one). Values are kept so that no new object gets the id of a freed one.
    value_by_id: dict[int, Any] = {}
    pending: list[tuple[str, Any]] = [*roots.items()]
    while pending:
        name, value = pending.pop()
        if id(value) in value_by_id:
            continue
        value_by_id[id(value)] = value
        yield name, value
        if isinstance(value, FunctionType):
            pending += _referenced_values(value) if str(value.__module__).partition(".")[0] not in _LIBRARIES else []
        elif isinstance(value, MethodType):
            pending += [(name, value.__func__), (name, value.__self__)]
        elif isinstance(value, partial):
            pending += [(name, value.func), *((name, argument) for argument in value.args), *value.keywords.items()]
        elif isinstance(value, dict):
            pending += [(f"{name}.{key}", child) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}.{index}", child) for index, child in enumerate(value)]


def warn_of_compiled(functions: Iterable[Any], stacklevel: int) -> None:
    """Warn if functions or modules use code of torch.compile, which runs as plain Python."""
    names: dict[str, None] = {}
    for function in functions:
        modules = modules_of(function)
        functions_by_name = {"it": function}
        for path, module in modules:
            functions_by_name |= {f"{path}.{name}": value for name, value in vars(module).items() if callable(value)}
            functions_by_name[f"{path}.forward"] = getattr(type(module), "forward", None)
        values = chain(modules, _reached_values(functions_by_name))
        names |= dict.fromkeys(name for name, value in values if is_compiled(value))
    if names:
        warn(
            f"{' and '.join(map(repr, names))} runs as it is written, since fpipe traces through torch.compile: "
            "build(..., compile=True) compiles the stages.",
            stacklevel=stacklevel + 1,
        )


_LIBRARIES = frozenset(("torch", *sys.stdlib_module_names))
"""Packages whose functions name nothing of the user's."""


def _referenced_values(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the names and values of a function's closure, its defaults, and the globals that its code names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = [(name, cell.cell_contents) for name, cell in cells if cell != _EMPTY_CELL]
    defaults = [(function.__name__, value) for value in function.__defaults__ or ()]
    variables = function.__globals__
    return (
        closure
        + defaults
        + [(name, variables[name]) for name in _names_in_code(function.__code__) if name in variables]
    )


_EMPTY_CELL = CellType()


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)


# Find the line of the user's code in which an error was raised: not torch's, not Python's, and not this package's.

TORCH_FOLDER = Path(torch.__file__).parent
_FPIPE_FOLDER, _PYTHON_FOLDER = Path(__file__).parents[2], Path(inspect.__file__).parent


@cache
def is_user_file(file: str) -> bool:
    """Whether a file belongs to the user or to a library with the user's net: not to torch, Python or fpipe."""
    path = Path(file)
    is_library = (
        path.parent == _PYTHON_FOLDER or path.is_relative_to(_FPIPE_FOLDER) or path.is_relative_to(TORCH_FOLDER)
    )
    # Python's own modules are frozen, and dataclasses and namedtuples make their methods of strings.
    return not is_library and not file.startswith(("<string", "<frozen"))


def quote_line(file: str, line: int | None, function: str) -> str:
    """Return a line of code with its file and function, as errors quote it."""
    return f"at {Path(file).name}:{line}, in {function}: {linecache.getline(file, line or 0).strip()}"


def quote_user_line(error: BaseException) -> str:
    """Quote the innermost line of the user's code that an error, or its cause, came from; "" if there is none."""
    cause_line = "" if error.__cause__ is None else quote_user_line(error.__cause__)
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return cause_line or (
        quote_line(user_frames[-1].filename, user_frames[-1].lineno, user_frames[-1].name) if user_frames else ""
    )


# Compare values that Python holds: plain ones and their containers by value, all others by identity.


def value_key(value: Any, unsupported: list[Any], ancestors: tuple[int, ...] = ()) -> Any:
    """Return a key by which to compare and hash a value; the key keeps no weakly referable object alive.

    Args:
        value: anything. Functions, classes and Python's modules count as what they are when a trace sees them.
        unsupported: collects every other object, since it may change and remain the same object.
        ancestors: the ids of the containers around the value, which end a container that contains itself.

    >>> value_key([1, 0.0], []) == value_key([True, -0.0], []), value_key({"a": (1,)}, []) == value_key({"a": (1,)}, [])
    (False, True)
    """
    if isinstance(value, _PLAIN_TYPES):
        # The type too: True == 1 in Python, and a trace tells them apart.
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # -0.0 is not 0.0, and NaN is NaN
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        if id(value) in ancestors:
            return "ancestor", ancestors.index(id(value))
        children: Any = value.items() if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        keys = (value_key(child, unsupported, (*ancestors, id(value))) for child in children)
        return type(value), frozenset(keys) if isinstance(value, set | frozenset) else tuple(keys)
    if not isinstance(value, _CODE_TYPES):
        unsupported.append(value)
    return IdentityKey(value)


_PLAIN_TYPES = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
_CODE_TYPES = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)


class IdentityKey:
    """A key that is equal only for one and the same object, which it does not keep alive if it can."""

    def __init__(self, target: Any) -> None:
        try:
            self._reference: Any = weakref.ref(target)
        except TypeError:
            self._reference = lambda: target  # ints, tuples and the like cannot be referred to weakly
        self._id = id(target)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, IdentityKey) and self._reference() is not None and self._reference() is other._reference()
        )

    def __hash__(self) -> int:
        return self._id
