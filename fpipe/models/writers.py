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
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm


class Read(NamedTuple):
    """What the code of a function shows: the attributes that it writes, and all attributes in it, which it may call.
    Of each whether only in training."""

    writes: Mapping[str, bool]
    names: Mapping[str, bool]


class Write(NamedTuple):
    """A module writes a buffer, of its own or of a module inside it; `moody`: only in training, behind a question."""

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
    """The attributes that are written by what may run when a module is called. Of each whether only in training."""
    writes: dict[str, bool] = {}
    for hook in _hooks(module):
        if isinstance(hook, SpectralNorm):  # it makes the names of its buffers as it runs
            writes |= {f"{hook.name}_u": True, f"{hook.name}_v": True}
    for code, moody in codes_of(module).items():
        writes |= {name: writes.get(name, True) and (moody or own) for name, own in _read(code).writes.items()}
    return writes


def codes_of(module: nn.Module) -> dict[CodeType, bool]:
    """What may run when a module is called: its forward, what that calls of its class, and hooks. Of each whether only
    in training."""
    kind = type(module)
    seen: dict[CodeType, bool] = {}
    todo: list[tuple[type, Any, bool]] = [(kind, one, False) for one in _methods(kind, "forward")]
    todo += [(kind, vars(module)["forward"], False)] if "forward" in vars(module) else []
    for hook in _hooks(module):
        plain = isinstance(hook, FunctionType | MethodType)
        calls = [hook] if plain else _methods(type(hook), "__call__")
        todo += [(kind if plain else type(hook), one, False) for one in calls]
    while todo:
        home, function, moody = todo.pop()
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
        if isinstance(code, CodeType) and (code not in seen or seen[code] > moody):
            seen[code] = moody
            todo += [
                (home, one, moody or own) for name, own in _read(code).names.items() for one in _methods(home, name)
            ]
    return seen


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for kind in _HOOKS for hook in getattr(module, kind).values()]


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
    found = text_of(code)
    if found is None:
        return _read_code(code)
    seen = _Writes(found)
    return Read(seen.found, seen.names)


def text_of(code: CodeType) -> ast.Module | None:
    """The text of a function; none where it was made without a file, or is a lambda inside a line."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None


def _read_code(code: CodeType) -> Read:
    """The same of a function without a text: beside a method that works in place, every attribute may be written."""
    ops = list(dis.get_instructions(code))
    loaded = {op.argval for op in ops if op.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    texts = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    loaded |= texts if {"getattr", "setattr"} & {*code.co_names} else set()
    writes = {op.argval for op in ops if op.opname == "STORE_ATTR"} | (texts if "setattr" in code.co_names else set())
    changes = any(in_place(name) or name in _NORMS for name in code.co_names)
    changes |= any(op.opname == "BINARY_OP" and op.argrepr.endswith("=") for op in ops)  # held += 1
    out = any(isinstance(words, tuple) and "out" in words for words in code.co_consts)
    if changes or out or any(op.opname in _STORES for op in ops):
        writes |= loaded
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _read_code(inner)
            writes, loaded = writes | {*more.writes}, loaded | {*more.names}
    return Read(dict.fromkeys(writes, "training" in loaded), dict.fromkeys(loaded, "training" in loaded))


_STORES = ("STORE_SUBSCR", "STORE_SLICE")  # the second is how Python 3.12 stores to x[1:]


def in_place(name: str) -> bool:
    """Whether torch would call a function so that changes what it is given."""
    return name.endswith("_") and not name.endswith("__")


_NORMS = ("batch_norm", "instance_norm")
_STATISTICS = ("running_mean", "running_var")
_SAME_MEMORY = ("data", "T", "mT", "H", "mH", "real", "imag")
_VIEWS = (
    *("view", "view_as", "reshape", "flatten", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand"),
    *("narrow", "select", "detach", "diagonal", "unbind", "chunk", "split"),
)


class _Writes:
    """The attributes that statements write: by assignment, in place, as `out=`, or as a norm's running statistics."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: dict[str, bool] = {}
        self.names: dict[str, bool] = {}
        self.moody = False
        self.alias: dict[str, str] = {}
        self.path: tuple[int, ...] = ()  # the blocks around what is visited
        self.bound: dict[str, tuple[int, ...]] = {}  # those around where a name last became an alias
        self.modes: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                names = {to.id for to in node.targets if isinstance(to, ast.Name)}
                base = base_of(self.alias, node.value)
                self.alias |= dict.fromkeys(names, base) if base is not None else {}  # buffer = self.buffer
                self.modes |= names if self.asks(node.value) else set()  # updates = self.training and self.tracks
        self.visit(tree)

    def asks(self, test: ast.expr | None) -> bool:
        """Whether an expression is false in eval."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return any(map(self.asks, test.values))
        return (isinstance(test, ast.Attribute) and test.attr == "training") or (
            isinstance(test, ast.Name) and test.id in self.modes
        )

    def denies(self, test: ast.expr) -> bool:
        """Whether an expression is true in eval."""
        return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and self.asks(test.operand)

    def visit(self, node: ast.AST) -> None:
        """A node; statements in a row are visited as one."""
        if isinstance(node, ast.If):
            self.visit(node.test)
            self.block(node.body, self.asks(node.test))
            self.block(node.orelse, self.denies(node.test))
            return
        if isinstance(node, ast.Attribute):
            self.names[node.attr] = self.names.get(node.attr, True) and self.moody
        own: Any = getattr(self, f"visit_{type(node).__name__}", None)
        if own is not None:
            own(node)
        for _, inner in ast.iter_fields(node):
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                self.block(inner, False)
            else:
                for one in inner if isinstance(inner, list) else [inner]:
                    if isinstance(one, ast.AST):
                        self.visit(one)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.bind(target, node.value)

    def bind(self, target: ast.expr, value: ast.expr | None) -> None:
        """A name stands for an attribute until it is bound anew, wherever the first binding was: in a block that may
        be passed over, it may still."""
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self.bind(one, None)
        elif isinstance(target, ast.Name):
            base = base_of(self.alias, value)
            if base is not None:
                self.alias[target.id], self.bound[target.id] = base, self.path
            elif self.bound.get(target.id, ())[: len(self.path)] == self.path:
                self.alias.pop(target.id, None)

    def block(self, body: list[ast.stmt], moody: bool) -> None:
        """Statements that run in training only, or wherever those around them do."""
        before, around = self.moody, self.path
        self.moody |= moody
        self.path = (*around, id(body))
        for one in body:
            self.visit(one)
            if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return | ast.Raise):
                self.moody |= self.denies(one.test)  # if not self.training: return
        self.moody, self.path = before, around

    def note(self, name: str | None, moody: bool = False) -> None:
        """An attribute is written here."""
        if name is not None:
            self.found[name] = self.found.get(name, True) and (self.moody or moody)

    def write(self, node: ast.expr | None, moody: bool = False) -> None:
        """What is written where an expression is."""
        for one in node.elts if isinstance(node, ast.Tuple | ast.List) else [node]:
            self.note(base_of(self.alias, one), moody)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if not isinstance(one, ast.Name):  # a name is bound, and nothing written
                    self.write(one)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.write(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.write(node.target)

    def visit_Call(self, node: ast.Call) -> None:
        word = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        named = {one.arg: one.value for one in node.keywords}
        self.write(named.get("out"))
        if in_place(word):
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            library = of is None or ast.unparse(of).split(".")[-1] in ("torch", "functional", "F", "init")
            self.write(node.args[0] if library and node.args else of)
        elif word in _NORMS:
            asks = any(self.asks(one) for one in (*node.args[5:6], *named.values()))
            for one in (*node.args[1:3], *(named.get(name) for name in _STATISTICS)):
                self.write(one, asks)
        elif word in ("setattr", "register_buffer"):
            self.note(next((one for one in map(text_in, node.args) if one is not None), None))


def base_of(alias: Mapping[str, str], node: ast.expr | None) -> str | None:
    """The attribute in whose memory an expression is: `count` of self.count, self.count[0], self.count.view(-1), and of
    a name that is its `alias`."""
    if isinstance(node, ast.Attribute):
        return base_of(alias, node.value) if node.attr in _SAME_MEMORY else node.attr
    if isinstance(node, ast.Subscript):
        return base_of(alias, node.value)
    if isinstance(node, ast.Name):
        return alias.get(node.id)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and (node.func.attr in _VIEWS or in_place(node.func.attr)):
            return base_of(alias, node.func.value)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            return text_in(node.args[1])
    return None


def text_in(node: ast.expr) -> str | None:
    """The text that an expression is, if it is one."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
