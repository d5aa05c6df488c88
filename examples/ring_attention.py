"""Attention over a sequence that processes share out: keys and values go around a ring while each attends to the last.

torchrun --standalone --nproc-per-node 4 examples/ring_attention.py

Each process of "cp" has its own slice of every sequence. A turn of the ring is a stage of its own, so the next keys and
values are on their way while the rank attends to those that it has, or works on another microbatch.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe

Params = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]


def projected(params: Params, x: Tensor) -> tuple[Tensor, Pair]:
    """Queries, which stay, and keys and values, which go around."""
    query, key, value = (x @ params["qkv"]).chunk(3, -1)
    return query, (key, value)


def attended(query: Tensor, others: Pair) -> Pair:
    """What the queries take of one slice, and the logarithm of how much they weigh it."""
    key, value = others
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weight = scores.logsumexp(-1, keepdim=True)
    return (scores - weight).exp() @ value, weight


def begun(params: Params, x: tuple[Tensor, Pair]) -> Pair:
    """Attention to this process's own slice."""
    return attended(*x)


def gone_on(params: Params, x: tuple[Tensor, tuple[Pair], Pair]) -> Pair:
    """Attention to one more slice, which joins what was found before."""
    query, (others,), (before, weight) = x
    found, own = attended(query, others)
    both = torch.logaddexp(weight, own)
    return before * (weight - both).exp() + found * (own - both).exp(), both


def ended(params: Params, x: tuple[Pair, ...]) -> Tensor:
    return x[0][0] @ params["out"]


def ring(size: int) -> fpipe.Model:
    """Attention over so many processes: a turn of the ring is behind each slice but the last."""
    stages: list[Any] = [projected]
    inputs: list[Any] = ["batch"]
    for turn in range(size):
        at = len(stages)
        mine: Any = at - 2 if turn else (0, 1)  # the ring behind the slice before
        if turn + 1 < size:
            stages.append(fpipe.exchange("ring", axis="cp"))
            inputs.append(mine if turn else (mine,))
        stages.append(gone_on if turn else begun)
        inputs.append(((0, 0), mine, at - 1) if turn else ((0, 0), mine))
    return fpipe.from_functions([*stages, ended], loss, inputs=[*inputs, (len(stages) - 1,)])


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def parameters(width: int) -> tuple[Params, Params]:
    generator = torch.Generator().manual_seed(0)
    qkv, out = (torch.randn(width, n * width, generator=generator, dtype=torch.float64) for n in (3, 1))
    return {"qkv": qkv / width}, {"out": out / width}


def difference(width: int = 8, length: int = 12) -> float:
    """How far gradients are from those of attention over whole sequences in one process, at most."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "cp"))
    size, member, place = mesh["cp"].size(), mesh.get_local_rank("cp"), mesh.get_local_rank("pp")
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(4, length, width, generator=generator, dtype=torch.float64) for _ in range(2)]
    model, (first, last) = ring(size), parameters(width)
    params = (first, *({} for _ in model.stages[2:]), last)
    schedule = fpipe.schedules.one_f_one_b_overlap(2)
    program = fpipe.chain(fpipe.split(2), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    batch = tuple(part.chunk(size, 1)[member].contiguous() for part in whole)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
    grads = step(fpipe.local_params(program, params, place), batch).grads

    leaves = [one.clone().requires_grad_() for one in (first["qkv"], last["out"])]
    query, key, value = (whole[0] @ leaves[0]).chunk(3, -1)
    made = torch.nn.functional.scaled_dot_product_attention(query, key, value) @ leaves[1]
    expected = torch.autograd.grad(loss(made, whole[1]), leaves)
    found = (grads[0] or {}).get("qkv"), (grads[-1] or {}).get("out")
    worst = 0.0
    for grad, right in zip(found, expected, strict=True):
        if grad is not None:
            dist.all_reduce(grad, group=mesh.get_group("cp"))  # each has had a part of every sequence
            worst = max(worst, (grad / size - right).abs().max().item())
    return worst


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("Start it by torchrun: torchrun --standalone --nproc-per-node 4 examples/ring_attention.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    worst = difference()
    print(f"process {dist.get_rank()}: gradients are within {worst:.0e} of whole sequences")
    dist.destroy_process_group()
