"""Ops that raise for some data raise in a trace as in plain torch.

A traced torch.linalg.cholesky went on with half a factor: what raises is an op of its own, which returns nothing, so
that no result needed it. Fake tensors do not look at the labels of one_hot at all, whose row then was 0.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fpipe

_EYE = torch.eye(4)


def _bad(x: Tensor) -> Tensor:
    """1 where the batch is the bad one."""
    return (x[:1, :1].abs() > 50).float()


def _squared(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).mean()


class _Of(nn.Module):
    """A linear layer, and something that looks at data beside it."""

    def __init__(self, look: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.look = nn.Linear(4, 4), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        seen = self.look(x, y)
        return y + seen if isinstance(seen, Tensor) else y


_LOOKS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "cholesky": lambda x, y: torch.linalg.cholesky(_EYE * (1 - 2 * _bad(x)) + 0 * y[:1].sum()).sum(),
    "inv": lambda x, y: torch.linalg.inv(_EYE * (1 - _bad(x))).sum(),
    "solve": lambda x, y: torch.linalg.solve(_EYE * (1 - _bad(x)), y[:4]).sum(),
    "one_hot": lambda x, y: nn.functional.one_hot((99 * _bad(x)).long().view(1), 4),
    "one_hot, negative": lambda x, y: nn.functional.one_hot((-100 * _bad(x)).long().view(1), num_classes=4),
    "assert": lambda x, y: [torch._assert_async((y.abs() < 1e3).all())],
}


def _raised(run: Callable[[], object]) -> tuple[type[BaseException], str] | None:
    try:
        run()
    except Exception as error:
        return type(error), next(iter(str(error).splitlines()))
    return None


@pytest.mark.crossed
@pytest.mark.parametrize("look", _LOOKS)
@pytest.mark.parametrize("door", ["from_sequential", "from_module"])
def test_what_plain_torch_refuses_a_trace_refuses(look: str, door: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), _Of(_LOOKS[look]), nn.Linear(4, 4))
    with torch.no_grad():
        net[0].weight.copy_(100 * _EYE)
    good, target = torch.rand(8, 4) / 1e3, torch.randn(8, 4)
    batch, wrong = (good, target), (good * 1e4, target)
    if door == "from_module":
        model, params, _ = fpipe.from_module(net, 3, loss=_squared, example=(torch.rand(8, 4), target))
    else:
        model, params, _ = fpipe.from_sequential(net, 3, loss=_squared)
    recomputed = [fpipe.checkpoint("always"), fpipe.schedules.zb_h1(3)]
    for rest in ([], recomputed, [fpipe.forward_only()]):
        step = fpipe.build(fpipe.chain(fpipe.split(2), *rest, fpipe.merge(outputs=False))(fpipe.program(model)), model)
        step(params, batch)
        expected = _raised(lambda: [_squared(net(x), target[:4]) for x in wrong[0].tensor_split(2)])
        assert expected is not None
        assert _raised(lambda step=step: step(params, wrong)) == expected
        net.zero_grad()
        sum(
            _squared(net(x), t) / 2 for x, t in zip(good.tensor_split(2), target.tensor_split(2), strict=True)
        ).backward()
        again = step(params, batch)  # an error leaves the next step intact
        if again.grads is not None:
            assert all(torch.equal(g, net.get_parameter(n).grad) for part in again.grads for n, g in part.items())


class _Asserted(torch.autograd.Function):
    """x, whose gradient may not be large."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        torch._assert_async((gradient.abs() < 50).all())
        return gradient


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_gradient_that_is_refused_is_refused_in_i(compile: bool) -> None:
    model = fpipe.from_functions([lambda params, x: _Asserted.apply(x * params["w"])], lambda y, t: (y * t).sum())
    program = fpipe.chain(fpipe.split_backward(), fpipe.merge(outputs=False))(fpipe.program(model))
    step = fpipe.build(program, model, compile=compile)
    params, x = ({"w": torch.ones(4)},), torch.ones(2, 4)
    assert torch.equal(step(params, (x, x)).grads[0]["w"], torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="got zero"):
        step(params, (x, 100 * x))
