"""Load a net of 1.2 GiB by stage on four processes, and compare the peak memory of each with its own parameters.

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
from step import against
from torch import Tensor, nn

import fpipe

RANKS, WIDTH, LIMIT = 4, 2048, 1.2


def cut(layers: int) -> tuple[fpipe.Model, fpipe.Program]:
    """Cut the net on meta into a model and a program of four ranks."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        x = torch.empty(8, WIDTH)
    model, _, _ = fpipe.from_module(net, stages=RANKS, loss=nn.functional.mse_loss, batch=(x, x))
    order = fpipe.schedules.one_f_one_b(RANKS)
    return model, fpipe.chain(fpipe.split(8), order, fpipe.merge(outputs=False))(fpipe.program(model))


def save(file: Path, layers: int) -> None:
    """Save the net's weights as safetensors, one layer in memory at a time; and for torch.load."""
    sizes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    header, offset = dict[str, Any](), 0
    for layer in range(layers):
        for name, shape in sizes.items():
            end = offset + 4 * torch.Size(shape).numel()
            header[f"{layer}.{name}"] = {"dtype": "F32", "shape": [*shape], "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _ in range(layers):
            for shape in sizes.values():
                stream.write(torch.randn(shape).numpy().tobytes())
    named = {name: torch.zeros(tensor_header["shape"]) for name, tensor_header in header.items()}
    torch.save(named, file.with_suffix(".pt"))


def peak() -> float:
    """Return the most mebibytes that this process has held."""
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("VmHWM:") + 1]) / 1024


def work(rank: int, file: str, layers: int, loader: str, measurements: Any) -> None:
    torch.set_num_threads(1)
    model, program = cut(layers)
    start, param_mebibytes = time.perf_counter(), 0.0
    if loader == "fpipe":
        mine = fpipe.load_params(model, program, file, rank=rank)
        param_mebibytes = sum(leaf.nbytes for leaf in fpipe.tree.leaves(mine) if isinstance(leaf, Tensor)) / 2**20
    elif loader == "torch.load":
        tensors = torch.load(Path(file).with_suffix(".pt"), mmap=True)
        names = {name for names in model.owned_param_names(rank) for name in names}
        mine = {name: tensor.clone() for name, tensor in tensors.items() if name in names}
    measurements[rank] = peak(), param_mebibytes, time.perf_counter() - start


def run(file: Path, layers: int, loader: str) -> list[tuple[float, float, float]]:
    with mp.Manager() as manager:
        measurements = manager.dict()
        mp.start_processes(work, (str(file), layers, loader, measurements), nprocs=RANKS, start_method="spawn")
        return [measurements[rank] for rank in range(RANKS)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1200, help="of the net (%(default)s)")
    layers = parser.parse_args().mebibytes * 2**20 // (4 * WIDTH * (WIDTH + 1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "net.safetensors")
        save(file, layers)
        empty, loaded, torchs = (run(file, layers, loader) for loader in ("nothing", "fpipe", "torch.load"))
    for rank, ((base, *_), (peaks, params, _)) in enumerate(zip(empty, loaded, strict=True)):
        ratio = against((peaks - base) / params, LIMIT)
        print(
            f"rank {rank}: {params:.0f} MiB of parameters, holds {base:.0f} + {peaks - base:.0f} MiB at most: {ratio}"
        )
    ours, theirs = (max(took for *_, took in measurements) for measurements in (loaded, torchs))
    print(f"load_params / torch.load(mmap=True) and a copy, the slowest rank: {ours / theirs:.2f}  ({ours:.1f} s)")
