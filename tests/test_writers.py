"""What a module's code shows of the buffers that it writes: every way to write one, and ways that only read."""

import linecache
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpipe.models.writers import written_buffers

WRITES = {
    "augmented": "self.b += 1",
    "another": "self.b = self.b * 2",
    "several at once": "self.b, other = self.b + 1, 3",
    "annotated": "self.b: Tensor = self.b + 1",
    "in place": "self.b.add_(1)",
    "in place, twice": "self.b.mul_(0.9).add_(x.mean())",
    "of a view": "self.b.view(-1)[0:1].add_(1)",
    "data": "self.b.data.mul_(2)",
    "a part": "self.b[0] = 3.0",
    "a part, augmented": "self.b[0] += 3.0",
    "through a name": "held = self.b\nheld.copy_(x.mean().expand(3))",
    "a name, augmented": "held = self.b\nheld += 1",
    "a name, before it is bound anew": "held = self.b\nheld.add_(1)\nheld = held * 2",
    "a name, as it is bound anew": "held = self.b\nheld = held.add_(1) * 2",
    "a name that may be bound anew": "held = self.b\nif x.dim() > 5:\n    held = held * 2\nheld.add_(1)",
    "a name that may be bound": "held = x.clone()\nif x.dim() > 1:\n    held = self.b\nheld.add_(1)",
    "a name, bound to another": "held = self.c\nheld = self.b\nheld.add_(1)",
    "a name, in the next round": "held = x.clone()\nfor _ in range(2):\n    held.add_(1)\n    held = self.b",
    "a name, a part": "held = self.b\nheld[1:] = 0.0",
    "out": "torch.add(self.b, 1, out=self.b)",
    "out of several": "torch.sort(x[0, :3], out=(self.b, torch.empty(3, dtype=torch.long)))",
    "a function in place": "torch.relu_(self.b)",
    "init": "nn.init.ones_(self.b)",
    "setattr": "setattr(self, 'b', self.b + 1)",
    "getattr": "getattr(self, 'b').add_(1)",
    "batch norm": "F.batch_norm(x[:, :3], self.b, self.c.abs() + 1, training=True)",
    "batch norm, by word": "F.batch_norm(x[:, :3], running_mean=self.b, running_var=torch.ones(3), training=True)",
    "under no_grad": "with torch.no_grad():\n    self.b.lerp_(x.mean().expand(3), 0.1)",
    "in a loop": "for part in range(2):\n    self.b += part",
    "inside a condition": "if x.dim() > 1:\n    self.b = self.b + 1",
    "in a method": "self.method(x)",
    "in a property": "self.prop",
    "of the module inside": "self.inner.b.add_(1)",
    "in a comprehension": "[self.b.add_(n) for n in range(2)]",
    "in a lambda": "(lambda: self.b.add_(1))()",
}
READS = {
    "a product": "x * self.b.sum()",
    "a name that is bound": "y = self.b\ny = y + 1",
    "a name, bound anew and then changed": "held = self.b.view(1, -1)\nheld = held * 2\nheld.relu_()",
    "a name, bound anew among others": "held = self.b\nheld, other = held * 2, 3\nheld.relu_()",
    "a name, bound anew after a question": "held = x\nif x.dim() > 1:\n    held = self.b\nheld = held + 1\nheld += 1",
    "a part": "x[:, :3] + self.b[None]",
    "the other side of a change": "x = x.clone()\nx[:, :3] += self.b",
    "the argument of a change": "x = x.clone()\nx.masked_fill_(self.b.sum() > 100, 0.0)",
    "an index": "x = x.clone()\nx[:, self.b.long()] = 0.0",
    "a new tensor, changed": "(self.b + 1).add_(1)",
    "a copy, changed": "self.b.clone().add_(1)",
    "a name of a copy, changed": "held = self.b * 2\nheld.add_(1)",
    "batch norm in eval": "F.layer_norm(x[:, :3], (3,), self.b)",
    "a word that ends in _": "x.__len__()\nself.b.__len__()",
    "another module's": "x + self.inner.b.sum()",
    "an attribute of that name": "held = Holder()\nheld.own = self.b",
}


class Holder:
    own: Any


def module(body: str, named: bool) -> nn.Module:
    """A module with this forward, of which there is a text or none."""
    text = (
        "class Made(Base):\n    def forward(self, x):\n"
        + textwrap.indent(body, "        ")
        + "\n        return x\n    def method(self, x):\n        return self.deeper(x.mean())\n"
        "    def deeper(self, x):\n        self.b.add_(x)\n"
        "    @property\n    def prop(self):\n        self.b.add_(1)\n"
    )
    if "method" not in body:
        text = text[: text.index("    def method")] + text[text.index("    @property") :]
    if "prop" not in body:
        text = text[: text.index("    @property")]
    text = text if named else "\n" + text  # equal code is read once, whichever file it is in
    file = f"<made {abs(hash(text))}>" if named else "<nowhere>"
    if named:
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    known: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "Base": Base, "Holder": Holder}
    exec(compile(text, file, "exec"), known)
    return known["Made"]()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.full((3,), -2.0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.full((3,), -2.0))
        self.register_buffer("c", torch.ones(3))
        self.inner = Inner()


def really_written(made: nn.Module) -> set[tuple[nn.Module, str]]:
    """What a call leaves other than it was."""
    before = [(owner, name, buffer, buffer.clone()) for owner in made.modules() for name, buffer in buffers(owner)]
    made(torch.rand(4, 5) + 1)
    return {
        (owner, name)
        for owner, name, buffer, was in before
        if getattr(owner, name) is not buffer or not torch.equal(buffer, was)
    }


def buffers(owner: nn.Module) -> list[tuple[str, Tensor]]:
    return list(owner.named_buffers(recurse=False))


@pytest.mark.parametrize("named", [True, False], ids=["text", "no text"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen(name: str, named: bool):
    made = module(WRITES[name], named)
    seen = {(write.owner, write.name) for write in written_buffers([made]) if write.now}
    written = really_written(made)
    assert written
    assert written <= seen


@pytest.mark.parametrize("name", READS)
def test_what_only_reads_writes_nothing(name: str):
    """A name that once was a buffer was so to the end: h = self.b; h = h * x; h.relu_() made b module state."""
    made = module(READS[name], True)
    assert not written_buffers([made])
    assert not really_written(made)


CALLS = {"in a method", "in a property"}


@pytest.mark.parametrize("name", sorted(WRITES.keys() - CALLS))
def test_what_asks_for_the_mode_writes_in_training_only(name: str):
    made = module("if self.training:\n" + textwrap.indent(WRITES[name], "    "), True)
    assert all(write.moody for write in written_buffers([made]))
    assert any(write.now for write in written_buffers([made.train()]))
    assert not any(write.now for write in written_buffers([made.eval()]))


MOODS = {
    "behind another question too": ("if self.training and x.dim() > 1:\n    self.b += 1", False),
    "the other way": ("if not self.training:\n    pass\nelse:\n    self.b += 1", False),
    "after leaving": ("if not self.training:\n    return x\nself.b += 1", False),
    "by a name": ("updates = self.training and x.dim() > 1\nif updates:\n    self.b += 1", False),
    "a method": ("if self.training:\n    self.method(x)", False),
    "batch norm": ("F.batch_norm(x[:, :3], self.b, self.c, training=self.training)", False),
    "batch norm, in its place": ("F.batch_norm(x[:, :3], self.b, self.c, None, None, self.training)", False),
    "or": ("if self.training or x.dim() > 1:\n    self.b += 1", True),
    "beside": ("x = F.dropout(x, 0.1, self.training)\nself.b += 1", True),
    "both": ("if self.training:\n    self.b += 1\nelse:\n    self.b -= 1", True),
    "in eval only": ("if not self.training:\n    self.b += 1", True),
    "a method, also elsewhere": ("if self.training:\n    self.method(x)\nself.method(x)", True),
}


@pytest.mark.parametrize("name", MOODS)
def test_a_write_behind_the_mode_is_known_by_its_place(name: str):
    """Once a function that asked for the mode anywhere was taken to write in training only, and refused in eval."""
    body, still = MOODS[name]
    made = module(body, True).eval()
    assert any(write.now for write in written_buffers([made])) is still
    assert {place[1] for place in really_written(made)} == ({"b"} if still else set())
    assert any(write.now for write in written_buffers([made.train()]))
