"""What the front doors compare with the function itself: two rows of the example, where these say as much as all."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe

SEEN: list[int] = []


class Layers(nn.Module):
    """Notes how many rows it is really run on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            SEEN.append(len(x))
        for block in self.blocks:
            x = self.around(block(x))
        return x

    def around(self, x: Tensor) -> Tensor:
        return x.relu()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (2 if len(grads[0]) == 2 else 3)


class AsksForRows(Layers):
    """Its gradient is the traced one for two rows alone."""

    def around(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)  # pyright: ignore[reportReturnType]


def cut(net: nn.Module, x: Tensor, loss: Any = F.mse_loss) -> list[int]:
    """The numbers of rows that a net was run on to compare it."""
    SEEN.clear()
    torch.manual_seed(0)
    for block in net.blocks if isinstance(net.blocks, nn.ModuleList) else ():
        nn.init.constant_(block.weight, 0.5)
    fpipe.from_module(net, 2, loss=loss, example=(x, torch.zeros(len(x), 3)))
    return SEEN


def test_two_rows_are_compared_where_they_say_as_much_as_all() -> None:
    """All rows of the example were, a third of what cutting a GPT-2 took beside its export."""
    assert cut(Layers(), torch.ones(64, 3)) == [2]
    assert cut(Layers(), torch.ones(2, 3)) == [2]


def test_all_rows_are_compared_where_two_leave_something_open() -> None:
    """A parameter without a gradient, a loss that is no number, a batch that the net does not take."""
    rows = torch.ones(8, 3)
    dead = rows * torch.tensor([-9.0, -9, 1, 1, 1, 1, 1, 1])[:, None]
    assert cut(Layers(), dead) == [2, 8]

    def of_later_rows(y: Tensor, target: Tensor) -> Tensor:
        return (y - target)[2:].square().mean()

    assert cut(Layers(), rows, of_later_rows) == [2, 8]

    def of_pairs(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).view(-1, 4, 3).square().mean()

    assert cut(Layers(), rows, of_pairs) == [2, 8]


def test_a_gradient_in_python_is_compared_on_all_rows() -> None:
    with pytest.raises(ValueError, match=r"the stages give another gradient of .* a custom autograd\.Function"):
        cut(AsksForRows(), torch.ones(8, 3))


class Clips(Layers):
    """Its hooks clip what only an outlier reaches."""

    def around(self, x: Tensor) -> Tensor:
        x = x.tanh()
        if x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        return x


class KeepsLaterRows(Layers):
    """What is computed in inference_mode has a gradient for autograd from row 2 on alone."""

    def around(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            square = x.square()
        return x + square.clone() * (x[:, :1].detach() > 2)


@pytest.mark.parametrize("net", [Clips, KeepsLaterRows])
def test_gradients_beside_autograd_are_compared_on_all_rows(net: type[Layers]) -> None:
    """Two rows told nothing of them, and a pipeline with other gradients was taken."""
    rows = torch.ones(8, 3)
    rows[5] *= 100
    with pytest.raises(ValueError, match=r"the stages give another gradient of .* a hook or inference_mode"):
        cut(net(), rows, lambda y, target: ((y - target) * rows[: len(y)]).square().sum())
