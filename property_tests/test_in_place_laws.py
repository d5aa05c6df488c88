"""Ops in place and views in any order: a trace computes what plain autograd does, whoever reads what was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given as drawn
from hypothesis import reject
from torch import Tensor

import fpipe

STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a.add_(b.sum()),
    "scale": lambda a, b: a.mul_(b.mean()),
    "sigmoid": lambda a, b: a.sigmoid_(),
    "copy": lambda a, b: a.copy_(b.mean().expand_as(a)),
    "fill": lambda a, b: a.fill_(0.5),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda a: a,
    "columns": lambda a: a[:, 1:],
    "a row": lambda a: a[:1],
    "turned": lambda a: a.t(),
    "a copy": lambda a: a.clone(),
    "detached": lambda a: a.detach(),
}
LINE = st.one_of(
    st.tuples(st.just("view"), st.sampled_from([*VIEWS]), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("step"), st.sampled_from([*STEPS]), st.integers(0, 9), st.integers(0, 9)),
)


@drawn(lines=st.lists(LINE, max_size=6))
def test_what_ops_in_place_write_is_read_as_plain_autograd_reads_it(lines: list[tuple[str, str, int, int]]):
    """Whatever is read at the end: tensors, views of them, and parts."""

    def function(params: dict[str, Tensor], x: Tensor) -> Tensor:
        values = [x @ params["w"], x + 1]
        for kind, name, one, other in lines:
            a, b = values[one % len(values)], values[other % len(values)]
            if kind == "view" and a.dim() == 2 and a.shape[1] > 1:
                values.append(VIEWS[name](a))
            elif kind == "step":
                STEPS[name](a, b * 1)
        return torch.stack([value.sum() for value in values])

    make = torch.Generator().manual_seed(0)
    w, x = (torch.randn(5, 5, generator=make, dtype=torch.float64) for _ in range(2))
    own, given = w.clone().requires_grad_(), x.clone().requires_grad_()
    try:
        y = function({"w": own}, given)
        grads = torch.autograd.grad(y, [given, own], torch.ones_like(y), materialize_grads=True)
    except RuntimeError:
        reject()  # autograd does not let write what it has saved
    one = fpipe.linearize(function, {"w": w}, x)
    found, res = one.forward({"w": w}, x)
    dx, dparams = one.backward({"w": w}, res, torch.ones_like(y))
    made = [torch.zeros_like(w) if grad is None else grad for grad in (dx, dparams["w"])]
    torch.testing.assert_close([found, *made], [y.detach(), *grads], rtol=1e-12, atol=1e-12)
