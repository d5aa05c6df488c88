"""Tell what flows where in the code of one function: from which attributes into which, and which it changes in place.

    self.count += 1                                              count --> count
    self.mean.lerp_(x.mean(0), 0.1)                              mean --> mean
    delta = x.mean(0) - self.mean; self.var.add_(delta ** 2)     mean, var --> var
    return x - self.mean                                         mean --> out

Whatever is done to an attribute that is not plainly such a flow counts as one out.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

from torch import Tensor

from fpipe.models.tapes import draws_numbers
from fpipe.models.writers import base_of, in_place, text_in, text_of

Flow = tuple[str, str | None]
"""An attribute, and the one that what it holds ends up in; None where it may end up anywhere."""

ANY = "*"
"""Stands for whatever attribute there is."""


class Found(NamedTuple):
    """What the code of a function shows in a mode: what flows where, the attributes that it changes in place (`ANY`
    where it may be another tensor), and those whose .data it assigns, so that they may be in another's memory."""

    flows: frozenset[Flow]
    changes: frozenset[str]
    lent: frozenset[str]


@lru_cache(maxsize=4096)
def found_in(code: CodeType, training: bool) -> Found:
    """What the code of a function shows in training or eval."""
    tree = None if code.co_name == "<lambda>" else text_of(code)  # its text is that of all around it
    if tree is None:  # whatever it names it may read
        names = frozenset((name, None) for name in (ANY, *code.co_names))
        return Found(names, frozenset({ANY}), frozenset())
    flows = _Flows(tree, training)
    return Found(frozenset(flows.found()), frozenset(flows.changes()), frozenset(flows.lent))


_METADATA = frozenset(("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "itemsize", "nbytes"))
_SIZES = frozenset(("size", "numel", "nelement", "dim", "ndimension", "element_size", "is_floating_point"))
# Python would look at the numbers, or at how many there are.
_NUMBERS = frozenset(
    ("item", "tolist", "numpy", "nonzero", "argwhere", "unique", "masked_select", "unbind", "backward", "save")
)
_LIBRARY = ("torch", "F", "functional", "nn", "init", "linalg", "special")
_DOORS = frozenset(
    (
        *("_buffers", "buffers", "named_buffers", "get_buffer", "state_dict", "__dict__", "_call_impl", "apply"),
        *("vars", "locals", "globals", "eval", "exec", "setattr", "delattr", "register_buffer", "__getattr__"),
    )
)
_HARMLESS = ("isinstance", "type", "id", "super", "hasattr", "callable", "issubclass")


class _Flows:
    """What flows where in one function in training or eval, whatever the order of its statements and whichever of those
    run that are for this mode.

    An expression is the set of attributes, and of local names in brackets, that its value may come from.
    """

    def __init__(self, tree: ast.Module, training: bool) -> None:
        self.training = training
        self.flows: set[Flow] = set()
        self.changed: set[Flow] = set()  # flows into a tensor that is written in place
        self.others = False  # whether one is that is no attribute
        self.alias: dict[str, str] = {}
        self.bases: dict[str, set[str | None]] = {}  # all that a local name is bound to
        self.loose: set[str] = set()  # attributes that may be in the memory of another tensor
        self.lent: set[str] = set()  # those that .data was assigned of, and so that memory
        self.itself: set[str] = set()  # what the module itself is called
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                base = base_of(self.alias, node.value)
                names = [to.id for to in node.targets if isinstance(to, ast.Name)]
                for name in names:
                    self.bases.setdefault(name, set()).add(base)
                self.alias |= dict.fromkeys(names, base) if base is not None else {}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not self.itself:
                self.itself |= {one.arg for one in (*node.args.posonlyargs, *node.args.args)[:1]}
        self.body(tree.body)

    def found(self) -> set[Flow]:
        """The flows between attributes: local names are what they come from."""
        # What is written into memory that may be another tensor's may end up anywhere.
        flows = self.flows | self.changed
        flows |= {(source, None) for source, end in self.changed if end in self.loose and source != end}
        comes: dict[str, set[str | None]] = {}
        for source, end in flows:
            comes.setdefault(source, set()).add(end)
        made: set[Flow] = set()
        for start in [name for name in comes if not name.startswith("[")]:
            todo: list[str | None] = [start]
            seen: set[str | None] = set()
            while todo:
                one = todo.pop()
                for end in comes.get(one or "", ()):
                    if end is None or not end.startswith("["):
                        made.add((start, end))
                    elif end not in seen:
                        seen.add(end)
                        todo.append(end)
        return made

    def changes(self) -> set[str]:
        """The attributes that are changed in place."""
        ends = {end for _, end in self.changed if end is not None}
        return {ANY} if self.others or ends & self.loose else ends

    def flow(self, sources: Iterable[str], end: str | None) -> None:
        self.flows |= {(source, end) for source in sources}

    def out(self, node: ast.AST | None) -> set[str]:
        """An expression that may end up anywhere."""
        if node is not None:
            self.flow(self.value(node), None)
        return set()

    def body(self, statements: Iterable[ast.stmt]) -> bool:
        """Statements in a row; whether they surely end in a return, so that those behind never run."""
        for one in statements:
            mode = self.mode(one.test) if isinstance(one, ast.If) else None
            if isinstance(one, ast.If) and mode is not None:
                if self.body(one.body if mode else one.orelse):
                    return True
            else:
                self.statement(one)
                if isinstance(one, ast.Return | ast.Raise):
                    return True
        return False

    def mode(self, test: ast.expr) -> bool | None:
        """What a question comes to, if it is for the mode."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            found = self.mode(test.operand)
            return None if found is None else not found
        if isinstance(test, ast.Attribute) and test.attr == "training" and _is_self(test.value, self.itself):
            return self.training
        return None

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.assign(target, node.value or ast.Constant(None))
        elif isinstance(node, ast.AugAssign):
            self.change(node.target, self.value(node.value))
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, ast.For):  # over the modules inside, if it is over the module itself
            self.flow(self.within(node.iter), None)
            self.out(node.target)
            self.body(node.body)
            self.body(node.orelse)
        elif isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                self.out(default)
            self.body(node.body)
        else:  # what is returned, raised or asked decides what comes out
            for _, inner in ast.iter_fields(node):
                for one in inner if isinstance(inner, list) else [inner]:
                    if isinstance(one, ast.stmt):
                        self.body([one])
                    elif isinstance(one, ast.ExceptHandler):
                        self.body(one.body)
                    elif isinstance(one, ast.withitem):
                        self.out(one.context_expr)
                    elif isinstance(one, ast.AST):
                        self.out(one)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """A name or an attribute is bound, or a part of a tensor written."""
        if isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            if len(parts) == len(target.elts):
                for one, part in zip(target.elts, parts, strict=True):
                    self.assign(one, part)
                return
            self.out(value)
            for one in target.elts:
                self.assign(one, ast.Constant(None))
        elif isinstance(target, ast.Name):
            self.flow(self.value(value), f"[{target.id}")
        elif isinstance(target, ast.Attribute) and base_of({}, target) == target.attr:
            sources = self.value(value)
            self.flow(sources, target.attr)
            # Only what is computed from itself is surely its own memory, and not another tensor's.
            self.loose |= set() if _is_fresh(value) and target.attr in sources else {target.attr}
        elif isinstance(target, ast.Attribute) and target.attr == "data":
            sources, ends = self.value(value), self.places(target)
            for end in ends:
                self.flow(sources, end)
            self.lent |= set() if _is_fresh(value) else {end for end in ends if end is not None}
        else:
            self.change(target, self.value(value))

    def change(self, target: ast.expr, sources: set[str]) -> None:
        """A tensor is written in place."""
        for index in [target.slice] if isinstance(target, ast.Subscript) else []:
            sources = sources | self.value(index)
        for one in self.places(target):
            if one is None:
                self.others = True
                self.flow(sources, None)
            else:
                self.changed |= {(source, one) for source in {*sources, one}}
        if isinstance(target, ast.Name):
            self.flow(sources, f"[{target.id}")

    def places(self, target: ast.expr) -> set[str | None]:
        """The attributes in whose memory an expression may be; None for what is none."""
        base = base_of({name: f"[{name}" for name in self.bases}, target)
        return self.bases[base[1:]] if base is not None and base.startswith("[") else {base}

    def value(self, node: ast.AST) -> set[str]:
        """What the value of an expression may come from."""
        if isinstance(node, ast.Constant):
            return set()
        if isinstance(node, ast.Name):
            return {ANY} if node.id in self.itself else {f"[{node.id}"}
        if isinstance(node, ast.Attribute):
            if node.attr in _DOORS:
                self.flow({ANY}, None)
            inner = self.within(node.value)
            return set() if node.attr in _METADATA else inner | {node.attr}
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            for one in (node.left, *node.comparators):
                self.value(one)
            return set()
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.out(node.operand)
        if isinstance(node, ast.IfExp):
            mode = self.mode(node.test)
            if mode is not None:
                return self.value(node.body if mode else node.orelse)
            self.out(node.test)
            return self.value(node.body) | self.value(node.orelse)
        plain = (ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Subscript)
        if isinstance(node, plain) or (isinstance(node, ast.Compare) and len(node.ops) == 1 and _by_number(node)):
            parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
            return {source for one in parts for source in self.value(one)}
        for one in ast.iter_child_nodes(node):  # what Python decides by, and what is not understood
            self.out(one)
        return set()

    def within(self, node: ast.expr) -> set[str]:
        """What stands before a dot: the module itself is none of its attributes."""
        return set() if isinstance(node, ast.Name) and node.id in self.itself else self.value(node)

    def call(self, node: ast.Call) -> set[str]:
        """What a call gives, and what it may do with what it is given."""
        function = node.func
        arguments = [*node.args, *(one.value for one in node.keywords)]
        if isinstance(function, ast.Name):
            if function.id in _HARMLESS:
                for one in arguments:
                    self.within(one)
                return set()
            if function.id == "len":
                for one in arguments:
                    self.value(one)
                return set()
            if function.id == "getattr" and len(node.args) > 1 and text_in(node.args[1]) is not None:
                self.within(node.args[0])
                return {text_in(node.args[1]) or ANY}
            if function.id in (*_DOORS, "getattr"):
                self.flow({ANY}, None)
        given = {source for one in arguments for source in self.value(one)}
        if not isinstance(function, ast.Attribute):
            self.flow(given, None)
            self.out(function)
            return set()
        word, library = function.attr, _is_library(function.value)
        if word in _DOORS:
            self.flow({ANY}, None)
        of = set[str]() if library else self.within(function.value)
        if draws_numbers(word):  # done again, it would draw others
            self.flow(given | of, None)
        out = next((one.value for one in node.keywords if one.arg == "out"), None)
        if out is not None:
            for one in out.elts if isinstance(out, ast.Tuple | ast.List) else [out]:
                self.change(one, given)
            return given | of
        if in_place(word):
            target = node.args[0] if library and node.args else function.value
            self.change(target, given)
            return given | of
        if word in _SIZES:
            return set()
        self.others |= any(one.arg == "inplace" for one in node.keywords)
        known = library or (hasattr(Tensor, word) and not _is_self(function.value, self.itself))
        if word in _NUMBERS or not known:
            self.flow(given | of, None)
            return set()
        return given | of


def _by_number(node: ast.Compare) -> bool:
    return isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def _is_self(node: ast.expr, itself: Collection[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in itself


def _is_library(node: ast.expr) -> bool:
    """Whether an expression is a module of functions: torch.nn.functional."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in _LIBRARY


def _is_fresh(node: ast.expr) -> bool:
    """Whether a value is surely in memory of its own."""
    return isinstance(node, ast.BinOp | ast.UnaryOp)
