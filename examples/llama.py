"""Plan a Llama that fits no device, and train a small one of its kind on shards: it is cut on meta, without weights.

python examples/llama.py --plan 8b --ranks 8 --replicas 8
torchrun --standalone --nproc-per-node 4 examples/llama.py --gather use
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from demo import Sizes, batches
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fpipe

MICROBATCHES = 4
FLOPS = 400e12
POLICIES = {
    "replicas": fpipe.data_parallel(),
    "gathered once": fpipe.shard(gather="step"),
    "for each use": fpipe.shard(gather="use"),
    "and scattered": fpipe.shard(gather="use", scatter="microbatch"),
}


class Config(NamedTuple):
    """Sizes of a Llama: rows and columns of its weights, and of a batch."""

    vocabulary: int
    width: int
    blocks: int
    heads: int
    groups: int
    wide: int
    rows: int
    length: int


CONFIGS = {
    "small": Config(vocabulary=256, width=256, blocks=4, heads=8, groups=4, wide=704, rows=16, length=32),
    "8b": Config(vocabulary=128256, width=4096, blocks=32, heads=32, groups=8, wide=14336, rows=32, length=4096),
    "70b": Config(vocabulary=128256, width=8192, blocks=80, heads=64, groups=8, wide=28672, rows=32, length=4096),
}


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.size = config.width, config.width // config.heads
        narrow = config.groups * self.size
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, out_width, bias=False) for out_width in (width, narrow, narrow))
        self.o, self.down = nn.Linear(width, width, bias=False), nn.Linear(config.wide, width, bias=False)
        self.gate, self.up = (nn.Linear(width, config.wide, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        projected = (self.q(h), self.k(h), self.v(h))
        q, k, v = (tensor.unflatten(-1, (-1, self.size)).transpose(1, 2) for tensor in projected)
        q, k = (torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False)
        self.size = config.width // config.heads

    def forward(self, ids: Tensor) -> Tensor:
        rates = 5e5 ** (-torch.arange(0, self.size, 2, device=ids.device) / self.size)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        x = self.embed(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def loss(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def on_meta(config: Config, stages: int, dtype: torch.dtype) -> tuple[fpipe.Model, Any, tuple[Tensor, Tensor]]:
    """Build a model without weights, with the shapes of its parameters and of a batch."""
    with torch.device("meta"):
        net = Llama(config).to(dtype)
        ids = torch.zeros(config.rows, config.length, dtype=torch.int64)
    model, params, _ = fpipe.from_module(net, stages=stages, loss=loss, batch=(ids, ids))
    return model, params, (ids, ids)


def init_weight(name: str, weight: Tensor) -> Any:
    """Draw the initial values of a matrix; False leaves a norm to its own initialization."""
    return weight.normal_(std=0.02) if weight.ndim > 1 else False


def step_of(model: fpipe.Model, ranks: int, microbatches: int, *transforms: Any) -> fpipe.Program:
    order = fpipe.schedules.one_f_one_b(ranks)
    return fpipe.chain(fpipe.split(microbatches), *transforms, order, fpipe.merge(outputs=False))(fpipe.program(model))


def mebibytes(tree: Any) -> float:
    """Return the mebibytes of a tree's tensors, of a DTensor only its shard's."""
    tensors = [leaf for leaf in fpipe.tree.leaves(tree) if isinstance(leaf, Tensor)]
    return sum(getattr(leaf, "to_local", lambda leaf=leaf: leaf)().nbytes for leaf in tensors) / 2**20


def plan(options: argparse.Namespace, console: Console) -> None:
    """Print what ranks would hold under each policy, and plans for a replica's step. No tensor has data."""
    model, params, batch = on_meta(CONFIGS[options.plan], CONFIGS[options.plan].blocks, torch.bfloat16)
    console.print(f"{sum(leaf.numel() for leaf in fpipe.tree.leaves(params)):,} parameters, none of them in memory")
    table = Table("GiB of a rank", *map(str, range(options.ranks)))
    program = step_of(model, options.ranks, len(batch[0]), fpipe.checkpoint("always"))
    for name, share in POLICIES.items():
        replicas = 1 if name == "replicas" else options.replicas
        step_bytes = fpipe.sizes(share(program), model, params, batch, replicas=replicas).peak
        param_mib = [mebibytes(fpipe.local_params(program, params, rank)) / replicas for rank in range(options.ranks)]
        # An optimizer with two moments keeps as much again for each.
        table.add_row(name, *(f"{3 * a / 2**10 + b / 2**30:.1f}" for a, b in zip(param_mib, step_bytes, strict=True)))
    console.print(table)
    ranking = fpipe.plan_run(
        model,
        fpipe.Machine(options.ranks, flops=FLOPS),
        fpipe.Candidates([16, 32], schedules=["one_f_one_b", "interleaved"]),
        example=(params, batch),
    )
    console.print(str(ranking), highlight=False, soft_wrap=True)


def train(options: argparse.Namespace, console: Console) -> tuple[float, float, float]:
    """Train on two replicas of two ranks; return the last loss, and the predicted and counted bytes of a step."""
    config = CONFIGS["small"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank, shows = mesh.get_local_rank("dp"), mesh.get_local_rank("pp"), dist.get_rank() == 0
    model, meta, _ = on_meta(config, config.blocks, torch.float32)
    program = fpipe.shard("dp", gather=options.gather, lead=0)(step_of(model, 2, MICROBATCHES))
    mine = fpipe.init_params(model, program, rank=rank, seed=0, init=init_weight)
    shards = fpipe.shard_params(mine, mesh["dp"])
    local_batches = (tuple(half.tensor_split(2)[replica] for half in batch) for batch in texts(config))
    build_options: dict[str, Any] = {"example": (shards, next(local_batches)), "broadcast": True, "record": True}
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, **build_options)
    adam = torch.optim.AdamW([leaf for leaf in fpipe.tree.leaves(shards) if leaf is not None], lr=3e-3)
    final_loss, peak = 0.0, 0.0
    for number, batch in enumerate(islice(local_batches, options.steps), 1):
        result = step(shards, batch)
        fpipe.assign_grads(shards, result.grads)
        adam.step()
        final_loss, peak = float(result.loss), result.timeline.peak[rank]
        if shows and (number == 1 or number % max(1, options.steps // 5) == 0):
            console.print(f"step {number:>4}   loss {final_loss:.4f}")
    predicted = fpipe.sizes(program, model, meta, batch, runtime="distributed", replicas=2).peak[rank]
    rows: list[Any] = [None] * 4
    dist.all_gather_object(rows, [mebibytes(shards), predicted / 2**20, peak / 2**20])
    table = Table("MiB of", "its shards", "a step, told", "a step, counted")
    for number, row in enumerate(rows):
        table.add_row(f"replica {number // 2}, rank {number % 2}", *(f"{size:.1f}" for size in row))
    if shows:
        console.print(table)
    return final_loss, predicted, peak


def texts(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield bytes of English, each with the next byte as its target."""
    return batches(Sizes(rows=config.rows, context=config.length))


def arguments(typed: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=["8b", "70b"], help="plan this one, in one process")
    parser.add_argument("--ranks", type=int, default=8, help="of a planned replica (%(default)s)")
    parser.add_argument("--replicas", type=int, default=8, help="that share a planned model out (%(default)s)")
    parser.add_argument("--gather", choices=["step", "run", "use"], default="use", help="when (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="to train (%(default)s)")
    return parser.parse_args(typed)


def main() -> None:
    options, console = arguments(), Console()
    if options.plan:
        plan(options, console)
    elif os.environ.get("WORLD_SIZE") == "4":
        torch.set_num_threads(1)
        train(options, console)
        dist.destroy_process_group()
    else:
        raise SystemExit("Start it by torchrun: torchrun --standalone --nproc-per-node 4 examples/llama.py")


if __name__ == "__main__":
    main()
