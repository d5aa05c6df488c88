"""The law of ops in place: with ops in place and views in any order, a trace computes what plain autograd does."""

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
def test_ops_in_place_compute_what_plain_autograd_does(lines: list[tuple[str, str, int, int]]):
    """All tensors, views and parts are read at the end."""

    def function(params: dict[str, Tensor], x: Tensor) -> Tensor:
        values = [x @ params["w"], x + 1]
        for kind, name, linearized, source in lines:
            a, b = values[linearized % len(values)], values[source % len(values)]
            if kind == "view" and a.dim() == 2 and a.shape[1] > 1:
                values.append(VIEWS[name](a))
            elif kind == "step":
                STEPS[name](a, b * 1)
        return torch.stack([value.sum() for value in values])

    make = torch.Generator().manual_seed(0)
    w, x = (torch.randn(5, 5, generator=make, dtype=torch.float64) for _ in range(2))
    weight_leaf, input_leaf = w.clone().requires_grad_(), x.clone().requires_grad_()
    try:
        y = function({"w": weight_leaf}, input_leaf)
        grads = torch.autograd.grad(y, [input_leaf, weight_leaf], torch.ones_like(y), materialize_grads=True)
    except RuntimeError:
        reject()  # autograd forbids writes to tensors that it has saved
    linearized = fpipe.linearize(function, {"w": w}, x)
    output, residuals = linearized.forward({"w": w}, x)
    dx, dparams = linearized.backward({"w": w}, residuals, torch.ones_like(y))
    actual_grads = [torch.zeros_like(w) if grad is None else grad for grad in (dx, dparams["w"])]
    torch.testing.assert_close([output, *actual_grads], [y.detach(), *grads], rtol=1e-12, atol=1e-12)
