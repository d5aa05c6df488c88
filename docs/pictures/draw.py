"""Draw the pictures of docs/pictures.md and the README anew: python docs/pictures/draw.py [--measure]."""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import fpipe

FOLDER = Path(__file__).parent


def pipeline(
    schedule: str,
    ranks: int,
    microbatches: int,
    *transforms: Callable[[fpipe.Program], fpipe.Program],
    stages: int | None = None,
) -> fpipe.Program:
    """Build a program, by default with as many stages as ranks."""
    ordered = fpipe.schedules.get(schedule)(ranks)
    return fpipe.chain(fpipe.split(microbatches), *transforms, ordered, fpipe.merge())(fpipe.program(stages or ranks))


def draw_simulated(folder: Path) -> None:
    """Draw the simulated pictures, which are equal each time."""
    costs = fpipe.Costs(transfer=0.25)
    programs = pipeline("one_f_one_b", 4, 6), pipeline("zb_h1", 4, 6)
    fpipe.plot(*programs, names=["1F1B", "ZB-H1"], costs=costs, file=folder / "compare.svg", width=1000)
    kinds = pipeline("one_f_one_b", 3, 4, fpipe.checkpoint("except_last"), fpipe.split_backward())
    fpipe.plot(kinds, names=["1F1B, recomputed, backward split"], costs=costs, file=folder / "kinds.svg")
    paper = fpipe.Style(width_mm=84, font_pt=7, labels="microbatch", memory=False, figures=False, critical_path=True)
    column = pipeline("one_f_one_b", 3, 4)
    fpipe.plot(column, costs=fpipe.Costs(transfer=0.5), style=paper, file=folder / "column.svg")
    overlapped = fpipe.Costs(transfer=0.1, pair="max")
    dualpipe = pipeline("dualpipe", 4, 8)
    fpipe.plot(dualpipe, names=["DualPipe"], costs=overlapped, file=folder / "dualpipe.svg", width=1000)
    rank_costs = fpipe.Costs.per_rank(F=10, B=12, W=8, c=0.5)
    names = ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "interleaved_zb", "chimera"]
    plan = fpipe.plan_run(rank_costs, fpipe.Machine(ranks=4, memory=6), fpipe.Candidates([8], schedules=names))
    fpipe.plot(plan, file=folder / "front.svg")
    gathers = {"once a step": "step", "for runs of ops": "run", "for each use": "use"}
    shared = {
        name: fpipe.shard(gather=gather)(pipeline("one_f_one_b", 2, 4, stages=4)) for name, gather in gathers.items()
    }
    wires = fpipe.Costs(2, 2, 2, gather=1.5, scatter=1.5)
    fpipe.plot(*shared.values(), names=[*shared], costs=wires, file=folder / "shard.svg", width=1000)


def draw_measured(folder: Path) -> None:
    """Draw a measured step below its simulation with the median times of its ops."""
    torch.set_num_threads(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=torch.nn.functional.mse_loss)
    program = pipeline("one_f_one_b", 3, 3, fpipe.split_backward())
    step = fpipe.build(program, model, record=True)
    batch = torch.randn(192, 256), torch.randn(192, 256)
    ran = min((step(params, batch).timeline for _ in range(2000)), key=lambda timeline: timeline.makespan)

    def seconds(kind: str) -> list[float]:
        took = [[end - start for op, start, end in ran.events if (op.kind, op.stage) == (kind, s)] for s in range(3)]
        return [statistics.median(times) for times in took]

    sizes = fpipe.sizes(program, model, params, batch)
    plan, most = fpipe.simulate(program, fpipe.Costs(*map(seconds, "FIW"), bytes=sizes)), fpipe.Style(differences=3)
    fpipe.plot(plan, ran, names=["simulated", "measured"], style=most, file=folder / "measured.svg", width=900)


if __name__ == "__main__":
    draw_simulated(FOLDER)
    if "--measure" in sys.argv:
        draw_measured(FOLDER)
