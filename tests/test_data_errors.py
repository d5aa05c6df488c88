"""Ops that raise for some data raise in a trace as in plain torch.

A traced torch.linalg.cholesky used to go on with half a factor: its check is an op without results, which was dropped.
Fake tensors do not check the labels of one_hot, whose row then was 0.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fpipe

_EYE = torch.eye(4)


def _is_bad_batch(x: Tensor) -> Tensor:
    """Return 1 for the bad batch, else 0."""
    return (x[:1, :1].abs() > 50).float()


def _squared(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).mean()


class _Looking(nn.Module):
    """A linear layer next to an op that checks data."""

    def __init__(self, look: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.look = nn.Linear(4, 4), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        summand = self.look(x, y)
        return y + summand if isinstance(summand, Tensor) else y


_LOOKS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "cholesky": lambda x, y: torch.linalg.cholesky(_EYE * (1 - 2 * _is_bad_batch(x)) + 0 * y[:1].sum()).sum(),
    "inv": lambda x, y: torch.linalg.inv(_EYE * (1 - _is_bad_batch(x))).sum(),
    "solve": lambda x, y: torch.linalg.solve(_EYE * (1 - _is_bad_batch(x)), y[:4]).sum(),
    "one_hot": lambda x, y: nn.functional.one_hot((99 * _is_bad_batch(x)).long().view(1), 4),
    "one_hot, negative": lambda x, y: nn.functional.one_hot((-100 * _is_bad_batch(x)).long().view(1), num_classes=4),
    "assert": lambda x, y: [torch._assert_async((y.abs() < 1e3).all())],
}


def _error_of(run: Callable[[], object]) -> tuple[type[BaseException], str] | None:
    try:
        run()
    except Exception as error:
        return type(error), next(iter(str(error).splitlines()))
    return None


@pytest.mark.crossed
@pytest.mark.parametrize("look", _LOOKS)
@pytest.mark.parametrize("door", ["from_sequential", "from_module"])
def test_traces_raise_the_errors_of_plain_torch(look: str, door: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), _Looking(_LOOKS[look]), nn.Linear(4, 4))
    with torch.no_grad():
        net[0].weight.copy_(100 * _EYE)
    good_rows, target = torch.rand(8, 4) / 1e3, torch.randn(8, 4)
    batch, bad_batch = (good_rows, target), (good_rows * 1e4, target)
    if door == "from_module":
        model, params, _ = fpipe.from_module(net, 3, loss=_squared, batch=(torch.rand(8, 4), target))
    else:
        model, params, _ = fpipe.from_sequential(net, 3, loss=_squared)
    recomputed = [fpipe.checkpoint("always"), fpipe.schedules.zb_h1(3)]
    for transforms in ([], recomputed, [fpipe.forward_only()]):
        step = fpipe.build(
            fpipe.chain(fpipe.split(2), *transforms, fpipe.merge(outputs=False))(fpipe.program(model)), model
        )
        step(params, batch)
        expected = _error_of(lambda: [_squared(net(x), target[:4]) for x in bad_batch[0].tensor_split(2)])
        assert expected is not None
        assert _error_of(lambda step=step: step(params, bad_batch)) == expected
        net.zero_grad()
        sum(
            _squared(net(x), t) / 2 for x, t in zip(good_rows.tensor_split(2), target.tensor_split(2), strict=True)
        ).backward()
        result = step(params, batch)  # an error leaves the next step intact
        if result.grads is not None:
            assert all(torch.equal(g, net.get_parameter(n).grad) for part in result.grads for n, g in part.items())


class _BoundedGradient(torch.autograd.Function):
    """The identity, which raises on large gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        torch._assert_async((gradient.abs() < 50).all())
        return gradient


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_refused_gradients_raise_in_split_backwards(compile: bool) -> None:
    model = fpipe.from_functions(
        [lambda params, x: _BoundedGradient.apply(x * params["w"])], lambda y, t: (y * t).sum()
    )
    program = fpipe.chain(fpipe.split_backward(), fpipe.merge(outputs=False))(fpipe.program(model))
    step = fpipe.build(program, model, compile=compile)
    params, x = ({"w": torch.ones(4)},), torch.ones(2, 4)
    assert torch.equal(step(params, (x, x)).grads[0]["w"], torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="got zero"):
        step(params, (x, 100 * x))
