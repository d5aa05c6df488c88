"""Load a net of 1.2 GiB by stage on four processes: what each holds at most, beside its own parameters.

    python benchmarks/load_by_stage.py [--mebibytes 1200]

The net is made on meta, cut into four stages, and its weights are in one safetensors file. Each process reads those of
its rank. Held is the peak of the resident memory, less that of a process that has cut the net on meta and read nothing;
beside it how long reading takes, against `torch.load(mmap=True)` of the whole net and a copy of the same tensors.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from step import within
from torch import Tensor, nn

import fpipe

RANKS, WIDTH, MOST = 4, 2048, 1.2


def cut(layers: int) -> tuple[fpipe.Model, fpipe.Program]:
    """The net on meta, as a model and a program of four ranks."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        x = torch.empty(8, WIDTH)
    model, _, _ = fpipe.from_module(net, stages=RANKS, loss=nn.functional.mse_loss, example=(x, x))
    order = fpipe.schedules.one_f_one_b(RANKS)
    return model, fpipe.chain(fpipe.split(8), order, fpipe.merge(outputs=False))(fpipe.program(model))


def save(file: Path, layers: int) -> None:
    """Weights of the net, one layer in memory at a time; and for torch.load."""
    sizes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    header, at = dict[str, Any](), 0
    for layer in range(layers):
        for name, shape in sizes.items():
            end = at + 4 * torch.Size(shape).numel()
            header[f"{layer}.{name}"] = {"dtype": "F32", "shape": [*shape], "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _ in range(layers):
            for shape in sizes.values():
                out.write(torch.randn(shape).numpy().tobytes())
    named = {name: torch.zeros(entry["shape"]) for name, entry in header.items()}
    torch.save(named, file.with_suffix(".pt"))


def peak() -> float:
    """Mebibytes that this process held at most."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) / 1024


def work(rank: int, file: str, layers: int, way: str, found: Any) -> None:
    torch.set_num_threads(1)
    model, program = cut(layers)
    start, own = time.perf_counter(), 0.0
    if way == "fpipe":
        mine = fpipe.load_params(model, program, file, rank=rank)
        own = sum(leaf.nbytes for leaf in fpipe.tree.leaves(mine) if isinstance(leaf, Tensor)) / 2**20
    elif way == "torch.load":
        whole = torch.load(Path(file).with_suffix(".pt"), mmap=True)
        names = {name for names in model.owned_param_names(rank) for name in names}
        mine = {name: one.clone() for name, one in whole.items() if name in names}
    found[rank] = peak(), own, time.perf_counter() - start


def run(file: Path, layers: int, way: str) -> list[tuple[float, float, float]]:
    with mp.Manager() as manager:
        found = manager.dict()
        mp.start_processes(work, (str(file), layers, way, found), nprocs=RANKS, start_method="spawn")
        return [found[rank] for rank in range(RANKS)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1200, help="of the net (%(default)s)")
    layers = parser.parse_args().mebibytes * 2**20 // (4 * WIDTH * (WIDTH + 1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "net.safetensors")
        save(file, layers)
        empty, loaded, torchs = (run(file, layers, way) for way in ("nothing", "fpipe", "torch.load"))
    for rank, ((base, *_), (most, own, _)) in enumerate(zip(empty, loaded, strict=True)):
        ratio = within((most - base) / own, MOST)
        print(f"rank {rank}: {own:.0f} MiB of parameters, holds {base:.0f} + {most - base:.0f} MiB at most: {ratio}")
    ours, theirs = (max(took for *_, took in one) for one in (loaded, torchs))
    print(f"load_params / torch.load(mmap=True) and a copy, the slowest rank: {ours / theirs:.2f}  ({ours:.1f} s)")
