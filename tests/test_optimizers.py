"""Rules that `register_update` added, in a pipeline and in a plain loop: the same bits."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples import optimizers


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer that writes parameters and state in place."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.step_number = 0

    @torch.no_grad()
    def step(self) -> None:
        self.step_number += 1
        for param in self.param_groups[0]["params"]:
            self.write(param, self.state[param], self.param_groups[0]["lr"])


class Lion(PlainOptimizer):
    def write(self, param: Tensor, state: dict[str, Tensor], lr: float) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param))
        param.sub_(mean.lerp(param.grad, 1 - 0.9).sign_(), alpha=lr)
        mean.lerp_(param.grad, 1 - 0.99)


class ScheduleFree(PlainOptimizer):
    def write(self, param: Tensor, state: dict[str, Tensor], lr: float) -> None:
        z, x = (state.setdefault(name, param.clone()) for name in "zx")
        z.sub_(param.grad, alpha=lr)
        x.lerp_(z, 1 / self.step_number)
        param.copy_(z.lerp(x, 0.9))


OPTIMIZERS = {"Lion": Lion, "Adafactor": torch.optim.Adafactor, "ScheduleFree": ScheduleFree}


def train_plainly(optimizer: torch.optim.Optimizer, net: nn.Sequential, steps: int) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        microbatches = (part.chunk(optimizers.MICROBATCHES) for part in optimizers.batch_of_step(number))
        for x, target in zip(*microbatches, strict=True):
            (F.mse_loss(net(x), target) / optimizers.MICROBATCHES).backward()
        optimizer.step()


@pytest.mark.parametrize("rule", optimizers.RULES)
def test_a_rule_of_the_example_has_the_bits_of_its_plain_loop(rule: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = optimizers.network()
    params, _, losses = optimizers.train(rule, copy.deepcopy(net), 5)
    train_plainly(OPTIMIZERS[rule](net.parameters(), lr=optimizers.RULES[rule][2]), net, 5)
    leaf_by_name = {name: leaf for stage in params for name, leaf in stage.items()}
    assert all(torch.equal(leaf_by_name[name], param) for name, param in net.named_parameters())
    assert losses[-1] < losses[0]
