"""Tell by its code which buffers a module writes as it runs: where a net is cut no example is at hand to see it.

    self.count += 1      self.mean.lerp_(x.mean(0), 0.1)      self.u = normalize(v, out=self.u)      --> count, mean, u

What this reading misses (a write in a function that was handed the buffer) is noticed when the module runs, and
refused by name.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm


class Read(NamedTuple):
    """What the code of a function shows: the attributes that it writes, and all names in it."""

    writes: frozenset[str]
    names: frozenset[str]


class Write(NamedTuple):
    """A module writes a buffer, of its own or of a module inside it; `moody`: only in training, since it asks."""

    writer: nn.Module
    owner: nn.Module
    name: str
    moody: bool

    @property
    def now(self) -> bool:
        """Whether it does so in the mode that it is in."""
        return self.writer.training or not self.moody


def written_buffers(modules: Iterable[nn.Module]) -> list[Write]:
    """The buffers that modules write.

    >>> import torch
    >>> class Counter(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("count", torch.zeros(()))
    ...
    ...     def forward(self, x):
    ...         self.count += 1
    ...         return x * self.count
    >>> [(write.name, write.now) for write in written_buffers([Counter().eval()])]
    [('count', True)]
    """
    found: list[Write] = []
    for module in modules:
        owners = [(owner, name) for owner in module.modules() for name in _own(owner)]
        if owners:
            writes = _of(module)
            found += [Write(module, *place, writes[place[1]]) for place in owners if place[1] in writes]
    return found


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)]


def _of(module: nn.Module) -> dict[str, bool]:
    """The attributes that are written by what may run when a module is called: its forward, what that calls of its
    class, and hooks. And of each whether only in functions that ask for the mode, or that such a one calls."""
    kind = type(module)
    writes: dict[str, bool] = {}
    seen: dict[CodeType, bool] = {}
    todo: list[tuple[type, Any, bool]] = [(kind, one, False) for one in _methods(kind, "forward")]
    todo += [(kind, vars(module)["forward"], False)] if "forward" in vars(module) else []
    for hook in [hook for kind in _HOOKS for hook in getattr(module, kind).values()]:
        plain = isinstance(hook, FunctionType | MethodType)
        calls = [hook] if plain else _methods(type(hook), "__call__")
        todo += [(kind if plain else type(hook), one, False) for one in calls]
        if isinstance(hook, SpectralNorm):  # it makes the names of its buffers as it runs
            writes |= {f"{hook.name}_u": True, f"{hook.name}_v": True}
    while todo:
        home, function, moody = todo.pop()
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
        if isinstance(code, CodeType) and seen.get(code, True):
            read = _read(code)
            moody |= "training" in read.names
            if seen.get(code) != moody:
                seen[code] = moody
                writes |= {name: writes.get(name, True) and moody for name in read.writes}
                todo += [(home, one, moody) for name in read.names for one in _methods(home, name)]
    return writes


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _methods(home: type, name: str) -> Iterator[Any]:
    """The functions of a name in a class and the classes it is made of, nn.Module's own aside."""
    for one in home.__mro__:
        found = vars(one).get(name)
        found = found.fget if isinstance(found, property) else found
        if one not in (nn.Module, object) and isinstance(found, FunctionType | staticmethod | classmethod):
            yield found


@lru_cache(maxsize=4096)
def _read(code: CodeType) -> Read:
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):  # made where there is no file, or a lambda inside a line
        return _read_code(code)
    names = {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute)}
    return Read(frozenset(_Writes(found).found), frozenset(names))


def _read_code(code: CodeType) -> Read:
    """The same of a function without a text: beside a method that works in place, every attribute may be written."""
    ops = list(dis.get_instructions(code))
    loaded = {op.argval for op in ops if op.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    writes = {op.argval for op in ops if op.opname == "STORE_ATTR"}
    in_place = any(_in_place(name) or name in _NORMS for name in code.co_names)
    out = any(isinstance(words, tuple) and "out" in words for words in code.co_consts)
    if in_place or out or any(op.opname == "STORE_SUBSCR" for op in ops):
        writes |= loaded
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _read_code(inner)
            writes, loaded = writes | more.writes, loaded | more.names
    return Read(frozenset(writes), frozenset(loaded))


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


_NORMS = ("batch_norm", "instance_norm")
_STATISTICS = ("running_mean", "running_var")
_SAME_MEMORY = ("data", "T", "mT", "H", "mH", "real", "imag")
_VIEWS = (
    *("view", "view_as", "reshape", "flatten", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand"),
    *("narrow", "select", "detach", "diagonal", "unbind", "chunk", "split"),
)


class _Writes(ast.NodeVisitor):
    """The attributes that statements write: by assignment, in place, as `out=`, or as a norm's running statistics."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: set[str] = set()
        self.alias: dict[str, str] = {}
        for node in ast.walk(tree):  # buffer = self.buffer
            if isinstance(node, ast.Assign):
                base = self.base(node.value)
                self.alias |= {to.id: base for to in node.targets if isinstance(to, ast.Name) and base is not None}
        self.visit(tree)

    def base(self, node: ast.expr | None) -> str | None:
        """The attribute in whose memory an expression is: `count` of self.count, self.count[0], self.count.view(-1)."""
        if isinstance(node, ast.Attribute):
            return self.base(node.value) if node.attr in _SAME_MEMORY else node.attr
        if isinstance(node, ast.Subscript):
            return self.base(node.value)
        if isinstance(node, ast.Name):
            return self.alias.get(node.id)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and (node.func.attr in _VIEWS or _in_place(node.func.attr)):
                return self.base(node.func.value)
            if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
                return _text(node.args[1])
        return None

    def write(self, node: ast.expr | None) -> None:
        """What is written where an expression is."""
        for one in node.elts if isinstance(node, ast.Tuple | ast.List) else [node]:
            base = self.base(one)
            self.found |= {base} if base is not None else set()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if not isinstance(one, ast.Name):  # a name is bound, and nothing written
                    self.write(one)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.write(node.target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.write(node.target)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        word = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        named = {one.arg: one.value for one in node.keywords}
        self.write(named.get("out"))
        if _in_place(word):
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            library = of is None or ast.unparse(of).split(".")[-1] in ("torch", "functional", "F", "init")
            self.write(node.args[0] if library and node.args else of)
        elif word in _NORMS:
            for one in (*node.args[1:3], *(named.get(name) for name in _STATISTICS)):
                self.write(one)
        elif word in ("setattr", "register_buffer"):
            name = next((one for one in map(_text, node.args) if one is not None), None)
            self.found |= {name} if name is not None else set()
        self.generic_visit(node)


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
