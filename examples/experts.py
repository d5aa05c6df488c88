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

EXPERTS, TOP, WIDTH, WORDS, ROOM = 4, 2, 32, 64, 1.25
Params = dict[str, Tensor]


def attended(params: Params, x: Tensor) -> Tensor:
    """Self-attention of one head, added to what it reads."""
    query, key, value = (F.layer_norm(x, x.shape[-1:]) @ params["qkv"]).chunk(3, -1)
    return x + F.scaled_dot_product_attention(query, key, value, is_causal=True)


def routed(params: Params, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The rows that each expert gets, up to its capacity, and what combines them again: tokens and weights."""
    tokens = x.flatten(0, 1)
    room = int(ROOM * TOP * len(tokens) / EXPERTS)
    weights, chosen = (tokens @ params["gate"]).softmax(-1).topk(TOP)
    wanted = F.one_hot(chosen.T.flatten(), EXPERTS)  # first choices go before second ones
    place = (wanted.cumsum(0) - 1).mul(wanted).sum(-1)
    fits = F.one_hot(place.clamp(max=room), room + 1)[:, :room]
    sent = (wanted[:, :, None] * fits[:, None, :]).view(TOP, len(tokens), EXPERTS, room).to(x.dtype)
    buffer = torch.einsum("ktec,td->ecd", sent, tokens)
    return buffer.flatten(0, 1), (x, torch.einsum("ktec,tk->tec", sent, weights))


def sorted_by_expert(params: Params, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The rows of all tokens by expert, how many each gets, and what combines them again."""
    tokens = x.flatten(0, 1)
    weights, chosen = (tokens @ params["gate"]).softmax(-1).topk(TOP)
    order = chosen.flatten().argsort(stable=True)
    sizes = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
    return tokens[order // TOP], sizes, (x, order, weights.flatten()[order])


def worked(params: Params, rows: tuple[Tensor]) -> Tensor:
    """This process's experts on the rows that all processes send them, in the order in which they came."""
    count = len(params["up"])
    (tokens,) = rows
    own = tokens.view(EXPERTS // count, count, -1, tokens.shape[-1]).transpose(0, 1)
    made = torch.bmm(torch.bmm(own.flatten(1, 2), params["up"]).relu(), params["down"])
    return made.view(own.shape).transpose(0, 1).reshape(tokens.shape)


def worked_on_all(params: Params, taken: tuple[Tensor, Tensor]) -> Tensor:
    """This process's experts on all rows for them, of which there are as many as the routers of all say."""
    rows, sizes = taken
    parts = enumerate(rows.split(sizes.tolist()))
    up, down = params["up"], params["down"]
    return torch.cat([(part @ up[at % len(up)]).relu() @ down[at % len(up)] for at, part in parts])


def combined(weights: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Tokens, and beside them what their experts made of them."""
    made = torch.einsum("tec,ecd->td", weights, rows.view(EXPERTS, -1, rows.shape[-1]))
    return x + made.view_as(x)


def first(params: Params, words: Tensor) -> Any:
    return routed(params, attended(params, params["embedding"][words]))


def between(params: Params, taken: tuple[Tensor, tuple[Tensor, Tensor]]) -> Any:
    rows, (x, weights) = taken
    return routed(params, attended(params, combined(weights, x, rows)))


def last(params: Params, taken: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
    rows, (x, weights) = taken
    return combined(weights, x, rows) @ params["head"]


def added(rows: Tensor, x: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Tokens, and beside them what their experts made of all their rows."""
    tokens = x.flatten(0, 1)
    return (tokens + torch.zeros_like(tokens).index_add(0, order // TOP, rows * weights[:, None])).view_as(x)


def first_of_all(params: Params, words: Tensor) -> Any:
    return sorted_by_expert(params, attended(params, params["embedding"][words]))


def between_all(params: Params, taken: Any) -> Any:
    (rows, _), beside = taken
    return sorted_by_expert(params, attended(params, added(rows, *beside)))


def last_of_all(params: Params, taken: Any) -> Tensor:
    (rows, _), beside = taken
    return added(rows, *beside) @ params["head"]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def mixture(blocks: int, dropless: bool = False) -> fpipe.Model:
    """Four stages a block, and a head."""
    start, middle, work, end = (first, between, worked, last)
    if dropless:
        start, middle, work, end = (first_of_all, between_all, worked_on_all, last_of_all)
    stages: list[Any] = []
    inputs: list[Any] = []
    beside = 2 if dropless else 1
    for block in range(blocks):
        at = 4 * block
        dispatch, combine = (fpipe.exchange("all_to_all", axis="ep", sizes=dropless) for _ in range(2))
        stages += [middle if block else start, dispatch, work, combine]
        inputs += [(at - 1, (at - 4, beside)) if block else "batch"]
        if dropless:  # rows and their sizes, both ways
            inputs += [((at, 0), (at, 1)), ((at + 1, 0), (at + 1, 1)), (at + 2, (at + 1, 1))]
        else:
            inputs += [((at, 0),), at + 1, at + 2]
    inputs += [(4 * blocks - 1, (4 * blocks - 4, beside))]
    return fpipe.from_functions([*stages, end], cross_entropy, inputs=inputs)


def parameters(blocks: int, member: int, members: int) -> tuple[Params, ...]:
    """Those of one process: its experts, and of all else a copy."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape) / shape[-2] ** 0.5

    found: list[Params] = []
    for block in range(blocks):
        router = {"qkv": normal(WIDTH, 3 * WIDTH), "gate": normal(WIDTH, EXPERTS)}
        router |= {} if block else {"embedding": torch.randn(WORDS, WIDTH)}
        experts = {"up": normal(EXPERTS, WIDTH, 2 * WIDTH), "down": normal(EXPERTS, 2 * WIDTH, WIDTH)}
        own = {name: leaf.chunk(members)[member].clone() for name, leaf in experts.items()}
        found += [router, {}, own, {}]
    return (*found, {"head": normal(WIDTH, WORDS)})


def all_reduced(grads: tuple[Any, ...], group: Any) -> None:
    """Losses are means over each process's tokens: gradients of all tokens are added up, and divided."""
    for stage, own in enumerate(grads):
        for grad in (own or {}).values():
            if stage % 4 != 2:  # experts have had the tokens of all processes
                dist.all_reduce(grad, group=group)
            grad /= group.size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of four stages (%(default)s)")
    parser.add_argument("--schedule", default="one_f_one_b_overlap", help="a schedule by name (%(default)s)")
    parser.add_argument("--dropless", action="store_true", help="experts take every token that is sent to them")
    said = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("Start it by torchrun: torchrun --standalone --nproc-per-node 4 examples/experts.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "ep"))
    member, members = mesh.get_local_rank("ep"), mesh["ep"].size()
    model, params = mixture(said.blocks, said.dropless), parameters(said.blocks, member, members)
    cut = 4 * (said.blocks // 2)  # before a dispatch: what experts bring stays on their rank
    where = fpipe.place([int(stage > cut) for stage in range(4 * said.blocks + 1)])
    schedule = fpipe.schedules.get(said.schedule)(2)
    program = fpipe.chain(fpipe.split(8), where, schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    tokens = torch.randint(WORDS, (16, 17), generator=torch.Generator().manual_seed(member))
    batch = tokens[:, :-1], tokens[:, 1:].contiguous()
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch), broadcast=True)
    params = fpipe.local_params(program, params, mesh.get_local_rank("pp"))
    for number in range(1, said.steps + 1):
        result = step(params, batch)
        all_reduced(result.grads, mesh.get_group("ep"))
        for own, grads in zip(params, result.grads, strict=True):
            for name in own or {}:
                own[name] -= 0.3 * grads[name]
        dist.all_reduce(result.loss, group=mesh.get_group("ep"))
        if dist.get_rank() == 0 and number in (1, said.steps):
            print(f"step {number}: loss {result.loss.item() / members:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
