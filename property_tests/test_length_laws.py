"""The law of lengths: a step has the bits of plain autograd at every length in a row, whatever is traced for it."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from property_tests.strategies import max_examples

WIDTH, LONGEST = 4, 24


class Layer(nn.Module):
    """A layer of drawn kind, whose trace depends on the length in its own way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.recurrent = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST).tril().log())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.kind == "attention":
            q, k, v = self.linear(x), x, x.tanh()
            return x + torch.softmax(q @ k.mT + self.mask[:length, :length], -1) @ v
        if self.kind == "positions":
            return self.linear(x + self.positions.exp()[:length])
        if self.kind == "branch":
            return self.linear(x) if length < 9 else self.linear(x).sigmoid()
        if self.kind == "number":
            return self.linear(x).cumsum(1) / int(length)
        if self.kind == "root":
            return self.linear(x) / length**0.5 + torch.arange(length)[:, None] * 0.1
        return self.recurrent(x)[0] if self.kind == "recurrent" else self.linear(x - x.mean(1, keepdim=True)).relu()


KINDS = ("attention", "positions", "branch", "number", "root", "recurrent", "centred")
LOSSES = (F.mse_loss, lambda y, target: (y - target).square().mean(), lambda y, target: (y * target).sum())


def plain_autograd(net: nn.Module, microbatches: list[Any], loss: Any) -> list[Tensor]:
    """Return the loss and the gradients of a loop over microbatches of one row."""
    net.zero_grad()
    total = torch.zeros(())
    for x, target in microbatches:
        part = loss(net(x), target) * (1 / len(microbatches))
        part.backward()
        total += part.detach()
    return [total, *(param.grad for param in net.parameters() if param.grad is not None)]


@max_examples(2)
@given(
    st.lists(st.sampled_from(KINDS), min_size=2, max_size=2),
    st.sampled_from(LOSSES),
    st.lists(st.tuples(*[st.integers(2, LONGEST)] * 2), min_size=3, max_size=4),
)
def test_new_lengths_have_the_bits_of_autograd(kinds: list[str], loss: Any, lengths: list[tuple[int, int]]):
    """The two microbatches of a step may have unlike lengths."""
    net = nn.Sequential(*map(Layer, kinds))
    model, params, state = fpipe.from_sequential(net, stages=2, loss=loss)
    chain = fpipe.chain(fpipe.split(2, presplit=True), fpipe.schedules.zb_h1(ranks=2), fpipe.merge(outputs=False))
    step = fpipe.build(chain(fpipe.program(model)), model)
    for step_lengths in lengths:
        batch = [(torch.randn(1, length, WIDTH), torch.randn(1, length, WIDTH)) for length in step_lengths]
        result = step(params, batch, state=state)
        grads = [grad for grad in fpipe.tree.leaves(result.grads) if grad is not None]
        pairs = zip([result.loss, *grads], plain_autograd(net, batch, loss), strict=True)
        assert all(torch.equal(actual, expected) for actual, expected in pairs)
