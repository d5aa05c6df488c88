"""Run attention over a sequence split between processes: keys and values go around a ring while each attends.

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


def project_input(params: Params, x: Tensor) -> tuple[Tensor, Pair]:
    """Project to queries, which stay, and to keys and values, which go around."""
    query, key, value = (x @ params["qkv"]).chunk(3, -1)
    return query, (key, value)


def attend(query: Tensor, key_and_value: Pair) -> Pair:
    """Attend to one slice; return the output, and the logarithm of the slice's total weight."""
    key, value = key_and_value
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weight = scores.logsumexp(-1, keepdim=True)
    return (scores - weight).exp() @ value, weight


def attend_first_slice(params: Params, x: tuple[Tensor, Pair]) -> Pair:
    return attend(*x)


def attend_next_slice(params: Params, x: tuple[Tensor, tuple[Pair], Pair]) -> Pair:
    """Attend to one more slice, and merge it with the earlier slices by their weights."""
    query, (key_and_value,), (output, weight) = x
    slice_output, slice_weight = attend(query, key_and_value)
    total_weight = torch.logaddexp(weight, slice_weight)
    return output * (weight - total_weight).exp() + slice_output * (slice_weight - total_weight).exp(), total_weight


def project_output(params: Params, x: tuple[Pair, ...]) -> Tensor:
    return x[0][0] @ params["out"]


def ring(size: int) -> fpipe.Model:
    """Build attention over `size` processes: a turn of the ring follows each slice but the last."""
    stages: list[Any] = [project_input]
    inputs: list[Any] = ["batch"]
    for turn in range(size):
        index = len(stages)
        mine: Any = index - 2 if turn else (0, 1)  # the ring behind the slice before
        if turn + 1 < size:
            stages.append(fpipe.exchange("ring", axis="cp"))
            inputs.append(mine if turn else (mine,))
        stages.append(attend_next_slice if turn else attend_first_slice)
        inputs.append(((0, 0), mine, index - 1) if turn else ((0, 0), mine))
    return fpipe.from_functions([*stages, project_output], loss, inputs=[*inputs, (len(stages) - 1,)])


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def parameters(width: int) -> tuple[Params, Params]:
    generator = torch.Generator().manual_seed(0)
    qkv, output_weight = (torch.randn(width, n * width, generator=generator, dtype=torch.float64) for n in (3, 1))
    return {"qkv": qkv / width}, {"out": output_weight / width}


def difference(width: int = 8, length: int = 12) -> float:
    """Return the largest error of gradients against attention over whole sequences in one process."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "cp"))
    size, member, pp_rank = mesh["cp"].size(), mesh.get_local_rank("cp"), mesh.get_local_rank("pp")
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randn(4, length, width, generator=generator, dtype=torch.float64) for _ in range(2)]
    model, (projection, output_params) = ring(size), parameters(width)
    params = (projection, *({} for _ in model.stages[2:]), output_params)
    schedule = fpipe.schedules.one_f_one_b_overlap(2)
    program = fpipe.chain(fpipe.split(2), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    batch = tuple(part.chunk(size, 1)[member].contiguous() for part in sequences)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
    grads = step(fpipe.local_params(program, params, pp_rank), batch).grads

    leaves = [leaf.clone().requires_grad_() for leaf in (projection["qkv"], output_params["out"])]
    query, key, value = (sequences[0] @ leaves[0]).chunk(3, -1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value) @ leaves[1]
    expected_grads = torch.autograd.grad(loss(output, sequences[1]), leaves)
    actual_grads = (grads[0] or {}).get("qkv"), (grads[-1] or {}).get("out")
    worst = 0.0
    for grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        if grad is not None:
            dist.all_reduce(grad, group=mesh.get_group("cp"))  # each has had a part of every sequence
            worst = max(worst, (grad / size - expected_grad).abs().max().item())
    return worst


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("Start it by torchrun: torchrun --standalone --nproc-per-node 4 examples/ring_attention.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    worst = difference()
    print(f"process {dist.get_rank()}: gradients are within {worst:.0e} of whole sequences")
    dist.destroy_process_group()
