"""What a module's code shows of buffers that it reads only to write them, and of those that something else reads."""

import linecache
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpipe.models.reads import changes_others, read_buffers

UNREAD = {
    "a counter": "self.b += 1",
    "a running mean": "self.b.lerp_(x.mean(0), 0.1)",
    "another tensor": "self.b = 0.9 * self.b + 0.1 * x.detach().mean(0)",
    "under no_grad": "with torch.no_grad():\n    self.b.mul_(0.9).add_(x.mean(0), alpha=0.1)",
    "by the other": "self.c += 1\nself.b.lerp_(x.mean(0), 1 / self.c)",
    "out": "torch.maximum(self.b, x.amax(0), out=self.b)",
    "a part": "self.b[0] = x.mean()",
    "a part by an index": "self.b[x.argmax(0).clamp(max=2)] += 1",
    "a part that a buffer says": "self.b[self.c.long() % 3] = x.mean()",
    "by name": "held = self.b\nheld.add_(x.mean(0))",
    "by the name of one or the other": "held = self.b\nheld += 1\nheld = self.c\nheld += x.mean(0)",
    "by the name of a module": "one = self.inner\none.b += 1",
    "through names": "delta = x.mean(0) - self.b\nself.b += delta / 3\nself.c += delta * (x.mean(0) - self.b)",
    "in training": "if self.training:\n    self.b += x.mean(0)\nelse:\n    return x - self.b",
    "in eval": "if not self.training:\n    return x - self.b\nself.b += x.mean(0)",
    "as Python asks for the mode": "self.b += 1\ny = x if self.training else x - self.b\nreturn y",
    "its shape": "self.b += x.sum(0)[: self.b.shape[0]]\ny = x.new_zeros(self.b.numel())\nreturn x + y.sum()",
    "its dtype": "self.b += x.mean(0).to(self.b.dtype)\nreturn x.to(self.b.dtype)",
    "none of it": "if self.b is not None:\n    self.b += 1",
    "for each": "for part in (x, x + 1):\n    self.b += part.mean(0)",
    "over itself": "self.b += 1\nfor one in self.children():\n    x = x * 1\nfor one in self:\n    x = one(x)",
    "a method": "self.method(x.mean(0))",
    "what was there": "before = self.b.clone()\nself.b.copy_(x.mean(0))\nself.c.copy_(before)",
    "a function of torch": "self.b.copy_(F.normalize(self.b + x.mean(0), dim=0))",
    "of two": "self.b = torch.where(self.c > 0, self.b, x.mean(0))",
    "of a module inside": "self.inner.b.add_(x.mean(0))",
    "a compared one": "self.b += (x > 0).float().mean(0)\nself.c.copy_(self.b > 0.5)",
    "a batch norm that nobody takes": "F.batch_norm(x, self.b, self.c + 1, training=True)",
    "what is not written": "self.b += 1\nreturn x * self.d",
    "by its data": "self.b.data = x.detach()[0]",
    "by its data, new": "self.b.data = self.b + x.detach()[0]\nself.b.mul_(2)",
}
READ = {
    "returned": "self.b += 1\nreturn x * self.b",
    "returned itself": "self.b += 1\nreturn self.b",
    "through names": "self.b += 1\nheld = self.b * 2\nagain = held\nreturn x + again",
    "asked": "if self.b.sum() > 3:\n    x = x * 2\nself.b += 1",
    "asked in a loop": "while self.b.sum() < 3:\n    self.b += 1",
    "asked in an expression": "self.b += 1\nx = x if self.b.sum() > 3 else x * 2",
    "and": "self.b += 1\nx = x * (self.c is None or self.b.sum() > 1)",
    "not": "self.b += 1\nx = x * (not self.b.any())",
    "a number": "self.b += 1\nn = self.b.sum().item()\nself.c += n",
    "a float": "self.b += 1\nself.c += 1 / float(self.b[0])",
    "a slice": "self.b += 1\nself.c[: int(self.b[0])] = 0.0",
    "added": "self.b += 1\nx = x.clone()\nx += self.b",
    "added in place": "self.b += 1\nx = x.clone()\nx.add_(self.b)",
    "written into a part": "self.b += 1\nx = x.clone()\nx[0] = self.b",
    "into a name that may be another": "held = x\nif x.dim() > 5:\n    held = self.c\nself.b += 1\nheld.add_(self.b)",
    "into what was assigned": "self.c = x\nself.b += 1\nself.c.add_(self.b)",
    "into what was computed": "self.c = x.mean(0) * 2\nself.b += 1\nself.c.add_(self.b)",
    "kept elsewhere": "self.b += 1\nself.kept = self.b * 2",
    "in a list": "self.b += 1\nself.list.append(self.b)",
    "handed on": "self.b += 1\nhelper(self.b, x)",
    "handed to a method": "self.b += 1\nself.method(self.b)",
    "handed to a module": "self.b += 1\nself.linear(self.b)",
    "itself handed on": "self.b += 1\nhelper(self, x)",
    "itself under a name": "me = self\nself.b += 1\nhelper(me, x)",
    "getattr": "self.b += 1\nx = x + getattr(self, 'b')",
    "getattr, made": "self.b += 1\nx = x + getattr(self, 'bcd'[0])",
    "_buffers": "self.b += 1\nx = x + self._buffers['b']",
    "named_buffers": "self.b += 1\nx = x + dict(self.named_buffers())['b']",
    "vars": "self.b += 1\nx = x + vars(self)['_buffers']['b']",
    "of a module inside": "self.b += 1\nx = x + self.inner.b",
    "of a module by name": "one = self.inner\none.b += self.c\nx = x + one.b",
    "printed": "self.b += 1\nprint(self.b)",
    "in a text": "self.b += 1\nf'{self.b}'",
    "asserted": "self.b += 1\nassert self.b.sum() > -9",
    "in a lambda": "self.b += 1\nx = (lambda: x * self.b)()",
    "in a comprehension": "self.b += 1\nx = sum(x * part for part in self.b)",
    "taken apart": "self.b += 1\none, two, three = self.b\nself.c += one",
    "in a function inside": "def inner():\n    return self.b\nself.b += 1\nx = x + inner()",
    "a property": "self.b += 1\nx = x + self.prop",
    "a method that returns it": "self.b += 1\nx = x + self.giving()",
    "through the other": "self.b += 1\nself.c += self.b\nreturn x * self.c",
    "random numbers by it": "self.b.uniform_()",
    "random numbers like it": "self.b += torch.rand_like(self.b)",
    "a part of what a function gives": "self.b += 1\nx = x + torch.abs(self.b)[:3].flip(0)",
    "a batch norm": "return F.batch_norm(x, self.b, self.c + 1, training=True)",
    "in training": "self.b += 1\nif self.training:\n    x = x - self.b",
    "in the memory of another": "self.b.data = x\nself.b.mul_(2)",
    "in it by name": "held = self.b\nheld.data = x\nheld.mul_(2)",
    "in it, which is changed": "self.b.data = x\nx.mul_(2)",
    "in it, changed elsewhere": "self.b.data = x[0]\nself.method(x[1])",
}


def helper(*_: Any) -> None:
    pass


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.zeros(3))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "bcd":
            self.register_buffer(name, torch.zeros(3))
        self.inner, self.linear, self.list = Inner(), nn.Linear(3, 3), list[Any]()


def module(body: str, named: bool = True) -> nn.Module:
    """A module with this forward, of which there is a text or none."""
    text = (
        "class Made(Base):\n    def forward(self, x):\n"
        + textwrap.indent(body, "        ")
        + "\n        return x\n    def method(self, x):\n        self.b.add_(x)\n"
        "    def giving(self):\n        return self.b\n"
        "    @property\n    def prop(self):\n        return self.b\n"
    )
    text = text if named else "\n" + text  # equal code is read once, whichever file it is in
    file = f"<made {abs(hash(text))}>" if named else "<nowhere>"
    if named:
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    known: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "Base": Base, "helper": helper}
    exec(compile(text, file, "exec"), known)
    return known["Made"]()


def read(body: str, named: bool = True) -> set[str]:
    """The names of buffers that a forward reads for anything but to write them."""
    made = module(body, named)
    places = [(made, "b"), (made, "c"), (made.inner, "b")]
    return {name for _, name in read_buffers([*made.modules()], places)}


@pytest.mark.parametrize("name", UNREAD)
def test_what_only_goes_into_buffers_is_not_read(name: str):
    assert read(UNREAD[name]) == set()


@pytest.mark.parametrize("name", READ)
def test_what_may_go_anywhere_else_is_read(name: str):
    assert "b" in read(READ[name])


@pytest.mark.parametrize("name", UNREAD)
def test_without_a_text_everything_is_read(name: str):
    assert read(UNREAD[name], named=False) == {"b", "c"}


def hook(made: Any, args: Any, out: Tensor) -> Tensor:
    return out * made.b


def counting(made: Any, args: Any, out: Tensor) -> None:
    made.b += 1


@pytest.mark.parametrize(
    ("one", "expected"), [(hook, {"b"}), (counting, set()), (lambda made, args, out: 0, {"b", "c"})]
)
def test_hooks_may_read_too(one: Any, expected: set[str]):
    made = module("self.b += 1")
    made.linear.register_forward_hook(one)  # of a module of torch's
    assert {name for _, name in read_buffers([*made.modules()], [(made, "b"), (made, "c")])} == expected


CHANGES = {
    "nothing": ("self.b += 1\ny = x * 2", False),
    "what it was given": ("x.relu_()", True),
    "a sum": ("y = x * 2\ny += x", True),
    "a part": ("y = x.clone()\ny[0] = 0.0", True),
    "by a word": ("y = F.relu(x, inplace=True)", True),
    "the memory of a buffer that is another's": ("self.b = x\nself.b.add_(1)", True),
    "another buffer": ("self.d += 1", True),
    "a buffer by name": ("held = self.b\nheld.add_(1)", False),
    "a name that may be another": ("held = x\nheld = self.b\nheld.add_(1)", True),
}


@pytest.mark.parametrize(("body", "expected"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_another_tensor_is_seen(body: str, expected: bool):
    made = module(body)
    assert changes_others([*made.modules()], [(made, "b"), (made, "c")]) is expected
    if not expected:
        assert changes_others([*made.modules(), nn.ReLU(inplace=True)], [(made, "b"), (made, "c")])
