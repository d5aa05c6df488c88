"""Lion, Adafactor and schedule-free SGD as rules of a program: each updates its stage where its gradients end."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe

RANKS, MICROBATCHES, ROWS, WIDTH = 2, 4, 64, 16
State = dict[str, Tensor]


def lion(
    param: Tensor, grad: Tensor, state: State, *, lr: Tensor, beta1: float = 0.9, beta2: float = 0.99
) -> tuple[Tensor, State]:
    """Move by the sign of a mean of gradients (Chen et al. 2023, algorithm 2)."""
    direction = state["mean"].lerp(grad, 1 - beta1).sign()
    return param.add(direction, alpha=-float(lr)), {"mean": state["mean"].lerp(grad, 1 - beta2)}


def lion_start(param: Tensor) -> State:
    return {"mean": torch.zeros_like(param)}


def adafactor(
    param: Tensor, grad: Tensor, state: State, *, lr: Tensor, beta2_decay: float = -0.8
) -> tuple[Tensor, State]:
    """Scale by a variance of rank one, kept as its rows and columns (Shazeer and Stern 2018, algorithm 5).

    The operations are those of torch.optim.Adafactor, in its order and with its defaults.
    """
    step = state["step"] + 1
    decay, size = step.item() ** beta2_decay, param.numel() ** 0.5
    rate = max(1e-3, param.norm(2).item() / size) * min(float(lr), 1 / step.item() ** 0.5)
    if grad.ndim > 1:
        # means[-1] is that of each row, means[-2] that of each column.
        means = {dim: grad.norm(dim=dim, keepdim=True).square() / grad.size(dim) for dim in (-1, -2)}
        rows, columns = state["rows"].lerp(means[-1], decay), state["columns"].lerp(means[-2], decay)
        variance = (rows @ columns) / rows.mean(dim=-2, keepdim=True).clamp(min=torch.finfo(param.dtype).eps)
        new_state = {"step": step, "rows": rows, "columns": columns}
    else:
        variance = state["variance"].lerp(grad * grad, decay)
        new_state = {"step": step, "variance": variance}
    update = variance.clamp(min=torch.finfo(param.dtype).eps ** 2).rsqrt() * grad
    return param.add(update, alpha=-rate / max(1.0, update.norm(2).item() / size)), new_state


def adafactor_start(param: Tensor) -> State:
    step = {"step": torch.zeros(())}
    if param.ndim < 2:
        return step | {"variance": torch.zeros_like(param)}
    return step | {"rows": torch.zeros_like(param[..., :1]), "columns": torch.zeros_like(param[..., :1, :])}


def schedule_free(param: Tensor, grad: Tensor, state: State, *, lr: Tensor, beta: float = 0.9) -> tuple[Tensor, State]:
    """Take the gradient between the last iterate `z` and the mean `x` of all (Defazio et al. 2024, equations 3 to 5).

    The parameter is that point; evaluate at `state["x"]`.
    """
    step = state["step"] + 1
    z = state["z"].add(grad, alpha=-float(lr))
    x = state["x"].lerp(z, 1 / step.item())
    return z.lerp(x, beta), {"step": step, "z": z, "x": x}


def schedule_free_start(param: Tensor) -> State:
    return {"step": torch.zeros(()), "z": param.clone(), "x": param.clone()}


RULES = {
    "Lion": (lion, lion_start, 1e-2),
    "Adafactor": (adafactor, adafactor_start, 3e-2),
    "ScheduleFree": (schedule_free, schedule_free_start, 0.3),
}
for name, (apply, initial, _) in RULES.items():
    fpipe.register_update(name, apply, initial)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch_of_step(step: int) -> tuple[Tensor, Tensor]:
    """Draw points [rows, 2] and the product of their coordinates."""
    points = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(step)) * 2 - 1
    return points, points.prod(1, keepdim=True)


def train(rule: str, net: nn.Sequential, steps: int, **options: Any) -> tuple[Any, Any, list[float]]:
    """Train by a rule on two ranks; return parameters, optimizer state and losses."""
    model, params, _ = fpipe.from_sequential(net, stages=RANKS, loss=F.mse_loss)
    pipeline = fpipe.chain(
        fpipe.split(MICROBATCHES),
        fpipe.schedules.one_f_one_b(RANKS),
        fpipe.merge(outputs=False),
        fpipe.update(rule, **options),
    )
    program = pipeline(fpipe.program(model))
    step, opt, losses = fpipe.build(program, model), fpipe.optimizer_state(program, params), list[float]()
    for number in range(steps):
        result = step(params, batch_of_step(number), opt=opt, lr=RULES[rule][2])
        params, opt = result.params, result.opt
        losses.append(result.loss.item())
    return params, opt, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    for rule in RULES:
        torch.manual_seed(0)
        *_, losses = train(rule, network(), arguments.steps)
        print(f"{rule:12}: loss {losses[0]:.4f} at the start, {losses[-1]:.4f} after {len(losses)} steps")
