"""Train a mixture of experts over a mesh of pipeline ranks and expert-parallel processes, exchanges hidden behind work.

torchrun --standalone --nproc-per-node 4 examples/experts.py
torchrun --standalone --nproc-per-node 4 examples/experts.py --schedule dualpipev --dropless

Each block is four stages: attention and router, dispatch, experts, combine. Each process of "ep" has its own tokens and
some of each block's experts, and all have the rest; gradients of that are added up after the step. An expert takes as
many tokens as fit, or, dropless, all: then sizes travel before rows.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe

EXPERTS, TOP, WIDTH, VOCABULARY, ROOM = 4, 2, 32, 64, 1.25
Params = dict[str, Tensor]


def attend(params: Params, x: Tensor) -> Tensor:
    """Add the self-attention of one head to its input."""
    query, key, value = (F.layer_norm(x, x.shape[-1:]) @ params["qkv"]).chunk(3, -1)
    return x + F.scaled_dot_product_attention(query, key, value, is_causal=True)


def route(params: Params, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return each expert's rows, up to its capacity, and the tokens and weights that combine them again."""
    tokens = x.flatten(0, 1)
    room = int(ROOM * TOP * len(tokens) / EXPERTS)
    weights, chosen = (tokens @ params["gate"]).softmax(-1).topk(TOP)
    choices = F.one_hot(chosen.T.flatten(), EXPERTS)  # first choices go before second ones
    slot = (choices.cumsum(0) - 1).mul(choices).sum(-1)
    fits = F.one_hot(slot.clamp(max=room), room + 1)[:, :room]
    assigned = (choices[:, :, None] * fits[:, None, :]).view(TOP, len(tokens), EXPERTS, room).to(x.dtype)
    buffer = torch.einsum("ktec,td->ecd", assigned, tokens)
    return buffer.flatten(0, 1), (x, torch.einsum("ktec,tk->tec", assigned, weights))


def sorted_by_expert(params: Params, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the rows of all tokens sorted by expert, the counts, and the tensors that combine them again."""
    tokens = x.flatten(0, 1)
    weights, chosen = (tokens @ params["gate"]).softmax(-1).topk(TOP)
    order = chosen.flatten().argsort(stable=True)
    sizes = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
    return tokens[order // TOP], sizes, (x, order, weights.flatten()[order])


def run_experts(params: Params, rows: tuple[Tensor]) -> Tensor:
    """Run this process's experts on the rows that all processes send them, in the order of arrival."""
    count = len(params["up"])
    (tokens,) = rows
    local_rows = tokens.view(EXPERTS // count, count, -1, tokens.shape[-1]).transpose(0, 1)
    outputs = torch.bmm(torch.bmm(local_rows.flatten(1, 2), params["up"]).relu(), params["down"])
    return outputs.view(local_rows.shape).transpose(0, 1).reshape(tokens.shape)


def run_experts_dropless(params: Params, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Run this process's experts on all their rows, whose numbers the routers of all processes send."""
    rows, sizes = inputs
    parts = enumerate(rows.split(sizes.tolist()))
    w_up, w_down = params["up"], params["down"]
    return torch.cat([(part @ w_up[index % len(w_up)]).relu() @ w_down[index % len(w_up)] for index, part in parts])


def combine_rows(weights: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Add the weighted outputs of experts to their tokens."""
    expert_outputs = torch.einsum("tec,ecd->td", weights, rows.view(EXPERTS, -1, rows.shape[-1]))
    return x + expert_outputs.view_as(x)


def embed_and_route(params: Params, ids: Tensor) -> Any:
    return route(params, attend(params, params["embedding"][ids]))


def combine_and_route(params: Params, inputs: tuple[Tensor, tuple[Tensor, Tensor]]) -> Any:
    rows, (x, weights) = inputs
    return route(params, attend(params, combine_rows(weights, x, rows)))


def combine_and_project(params: Params, inputs: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
    rows, (x, weights) = inputs
    return combine_rows(weights, x, rows) @ params["head"]


def combine_rows_dropless(rows: Tensor, x: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Add the weighted outputs of experts to their tokens, where no row was dropped."""
    tokens = x.flatten(0, 1)
    return (tokens + torch.zeros_like(tokens).index_add(0, order // TOP, rows * weights[:, None])).view_as(x)


def embed_and_sort(params: Params, ids: Tensor) -> Any:
    return sorted_by_expert(params, attend(params, params["embedding"][ids]))


def combine_and_sort(params: Params, inputs: Any) -> Any:
    (rows, _), routing = inputs
    return sorted_by_expert(params, attend(params, combine_rows_dropless(rows, *routing)))


def project_dropless(params: Params, inputs: Any) -> Tensor:
    (rows, _), routing = inputs
    return combine_rows_dropless(rows, *routing) @ params["head"]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def mixture(blocks: int, dropless: bool = False) -> fpipe.Model:
    """Build the model: four stages a block, and a head."""
    start, middle, work, end = (embed_and_route, combine_and_route, run_experts, combine_and_project)
    if dropless:
        start, middle, work, end = (embed_and_sort, combine_and_sort, run_experts_dropless, project_dropless)
    stages: list[Any] = []
    inputs: list[Any] = []
    routing_port = 2 if dropless else 1
    for block in range(blocks):
        first_stage = 4 * block
        dispatch, combine = (fpipe.exchange("all_to_all", axis="ep", sizes=dropless) for _ in range(2))
        stages += [middle if block else start, dispatch, work, combine]
        inputs += [(first_stage - 1, (first_stage - 4, routing_port)) if block else "batch"]
        if dropless:  # rows and their sizes, both ways
            dispatched, sizes = (first_stage + 1, 0), (first_stage + 1, 1)
            inputs += [((first_stage, 0), (first_stage, 1)), (dispatched, sizes), (first_stage + 2, sizes)]
        else:
            inputs += [((first_stage, 0),), first_stage + 1, first_stage + 2]
    inputs += [(4 * blocks - 1, (4 * blocks - 4, routing_port))]
    return fpipe.from_functions([*stages, end], cross_entropy, inputs=inputs)


def parameters(blocks: int, member: int, members: int) -> tuple[Params, ...]:
    """Draw the parameters of one process: its own experts, and a copy of all the rest."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape) / shape[-2] ** 0.5

    params: list[Params] = []
    for block in range(blocks):
        router = {"qkv": normal(WIDTH, 3 * WIDTH), "gate": normal(WIDTH, EXPERTS)}
        router |= {} if block else {"embedding": torch.randn(VOCABULARY, WIDTH)}
        experts = {"up": normal(EXPERTS, WIDTH, 2 * WIDTH), "down": normal(EXPERTS, 2 * WIDTH, WIDTH)}
        local_experts = {name: leaf.chunk(members)[member].clone() for name, leaf in experts.items()}
        params += [router, {}, local_experts, {}]
    return (*params, {"head": normal(WIDTH, VOCABULARY)})


def all_reduce_grads(grads: tuple[Any, ...], group: Any) -> None:
    """Average gradients over the processes, since a loss is the mean over one process's tokens."""
    for stage, stage_grads in enumerate(grads):
        for grad in (stage_grads or {}).values():
            if stage % 4 != 2:  # experts have had the tokens of all processes
                dist.all_reduce(grad, group=group)
            grad /= group.size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of four stages (%(default)s)")
    parser.add_argument("--schedule", default="one_f_one_b_overlap", help="a schedule by name (%(default)s)")
    parser.add_argument("--dropless", action="store_true", help="experts take every token that is sent to them")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("Start it by torchrun: torchrun --standalone --nproc-per-node 4 examples/experts.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "ep"))
    member, members = mesh.get_local_rank("ep"), mesh["ep"].size()
    model, params = mixture(options.blocks, options.dropless), parameters(options.blocks, member, members)
    cut = 4 * (options.blocks // 2)  # before a dispatch: what experts bring stays on their rank
    placement = fpipe.place([int(stage > cut) for stage in range(4 * options.blocks + 1)])
    schedule = fpipe.schedules.get(options.schedule)(2)
    program = fpipe.chain(fpipe.split(8), placement, schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    tokens = torch.randint(VOCABULARY, (16, 17), generator=torch.Generator().manual_seed(member))
    batch = tokens[:, :-1], tokens[:, 1:].contiguous()
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch), broadcast=True)
    params = fpipe.local_params(program, params, mesh.get_local_rank("pp"))
    for number in range(1, options.steps + 1):
        result = step(params, batch)
        all_reduce_grads(result.grads, mesh.get_group("ep"))
        for stage_params, grads in zip(params, result.grads, strict=True):
            for name in stage_params or {}:
                stage_params[name] -= 0.3 * grads[name]
        dist.all_reduce(result.loss, group=mesh.get_group("ep"))
        if dist.get_rank() == 0 and number in (1, options.steps):
            print(f"step {number}: loss {result.loss.item() / members:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
