"""Modules whose code is drawn at random remember what the unsplit ones do, and forwards come in any order where no
output reads what is remembered."""

from __future__ import annotations

import copy
import linecache
import textwrap
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fpipe
from property_tests.strategies import few

WIDTH = 4
START = "now, h, y = x.detach().mean(0), x.detach()[0], x * 1"


class Remembering(nn.Module):
    """What modules have whose forward is drawn."""

    a: Tensor
    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("b", torch.zeros(WIDTH))


def expressions(names: list[str]) -> st.SearchStrategy[str]:
    """A row of numbers, computed from these."""
    return st.recursive(
        st.sampled_from(names),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda parts: f"({' '.join(parts)})"),
            st.tuples(inner, inner).map(lambda pair: f"torch.maximum({pair[0]}, {pair[1]})"),
            st.tuples(inner, inner).map(lambda pair: f"torch.where({pair[0]} > 0, {pair[1]}, now)"),
            inner.map(lambda one: f"torch.tanh({one})"),
            inner.map(lambda one: f"{one}.abs().clone()"),
            inner.map(lambda one: f"{one}.flip(0)[: {one}.shape[0]]"),
        ),
        max_leaves=3,
    )


ALL, OWN = ["self.a", "self.b", "h", "now"], ["now", "x.detach()[-1]"]
UPDATES = (
    "self.{to} += {of}",
    "self.{to}.lerp_({of}, 0.5)",
    "self.{to} = 0.5 * self.{to} + {of}",
    "self.{to} = {of} * 0.5",
    "self.{to}.data = 0.5 * self.{to} + {of}",
    "self.{to}.data = torch.tanh({of})",
    "self.{to}.data = x.detach()[-1]",
    "self.{to}[1:] = ({of})[1:]",
    "self.{to}[{of} > 0] = 0.25",
    "torch.add(self.{to}, {of}, out=self.{to})",
    "held = self.{to}\nheld.mul_(0.5).add_({of})",
    "h = {of}",
    "with torch.no_grad():\n    self.{to}.copy_({of})",
    "if self.training:\n    self.{to} -= {of}\nelse:\n    x = x * self.{to}",
)
OUTPUTS = (
    "x = x + {of}",
    "x = torch.sin(x) * {of}",
    "y += {of}\nx = x * y\ny = x * 1",
    "y[0] = {of}\nx = x + y\ny = x * 1",
    "x = y.relu_() + x\ny = x * 1",
    "x = x * ({of}).shape[0]",
)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal numbers, NaN for NaN: what is multiplied often overflows."""
    return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())


@dataclass(frozen=True)
class Case:
    """The code of the module, the order of microbatches, and whether stages are traced."""

    body: tuple[str, ...]
    reads: bool
    order: tuple[int, ...]
    trace: bool

    def module(self) -> nn.Module:
        text = "class Made(Remembering):\n    def forward(self, x):\n"
        text += textwrap.indent("\n".join([START, *self.body, "return x * 2"]), " " * 8) + "\n"
        file = f"<drawn {abs(hash(text))}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        known: dict[str, Any] = {"torch": torch, "Remembering": Remembering}
        exec(compile(text, file, "exec"), known)
        return known["Made"]()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    reads = draw(st.booleans())
    update = st.builds(
        lambda form, to, of: form.format(to=to, of=of),
        st.sampled_from(UPDATES),
        st.sampled_from("ab"),
        expressions(ALL),
    )
    output = st.builds(
        lambda form, of: form.format(of=of), st.sampled_from(OUTPUTS), expressions(ALL if reads else OWN)
    )
    body = draw(st.lists(st.one_of(update, update, output), min_size=1, max_size=5))
    order = draw(st.permutations(range(3)))
    return Case(tuple(body), reads, tuple(order), draw(st.booleans()))


@few(8)
@given(cases())
def test_a_module_remembers_the_same_whatever_its_code_and_the_order(case: Case):
    """What a module reads is seen in its code: nothing that was seen as unread is refused as it runs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), case.module(), nn.Linear(WIDTH, WIDTH), case.module())
    right, outputs = copy.deepcopy(net), list[Tensor]()
    batch = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    for x, t in zip(*(half.tensor_split(3) for half in batch), strict=True):
        for buffer in right.buffers():
            buffer.detach_()
        outputs.append(right(x))
        try:
            (nn.functional.mse_loss(outputs[-1], t) * (2 / 6)).backward()
        except RuntimeError as error:  # it writes what its own backward reads
            assume("modified by an inplace operation" not in str(error))
            raise
    model, params, state = fpipe.from_sequential(net, sizes=[2, 2], loss=nn.functional.mse_loss)
    held = "state" in model.stages[0].asks
    bound = any((line.startswith("self.") and line.endswith("* 0.5")) or ".data = " in line for line in case.body)
    assert case.reads or bound or not held  # what is bound to another tensor and changed then is read
    order = sorted(case.order) if held else case.order
    rows = [[f"{stage}{kind}{at}" for kind in "FB" for at in order] for stage in range(2)]
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.from_table(rows), fpipe.merge())(fpipe.program(model))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"a stage runs under autograd.*it assigns the \.data")
        result = fpipe.build(program, model, trace=case.trace)(params, batch, state=state)
    found = {name: buffer for stage in result.state or () for name, buffer in stage.items()}
    assert all(same(buffer, right.get_buffer(name)) for name, buffer in found.items())
    assert same(result.outputs, torch.cat([output.detach() for output in outputs]))
    grads = fpipe.join_params(model, result.grads)
    assert all(same(grads[name], leaf.grad) for name, leaf in right.named_parameters())
