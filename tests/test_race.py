"""Runtimes and schedules race on the same nets: each row has numbers or the reason why it has none."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from fpipe.cli.race_nets import NETS, small
from fpipe.cli.race_report import as_text
from fpipe.cli.race_runtimes import (
    Bench,
    Job,
    Row,
    Setting,
    _work,
    jobs_of,
    measure_on_ranks,
    peak_of,
    race,
    start_workers,
)
from fpipe.cli.racers import RACERS
from fpipe.schedules.registry import SCHEDULE_BY_NAME
from tests.fake_accelerator import COMPILER
from tests.fake_accelerator.device_processes import fixture_of
from tests.processes import Processes, free_port
from tests.test_cli import output_of, run

QUICK = Setting("cpu", is_quick=True, rounds=1)
INDEX_BY_NAME = {racer.name: index for index, racer in enumerate(RACERS)}
GRAPH_JOB = Job("mlp", INDEX_BY_NAME["fpipe, graph"], has_update=True)


@pytest.mark.parametrize("net", NETS)
def test_fpipe_trains_with_the_bits_of_the_eager_loop(net: str):
    bench = Bench(net, QUICK)
    row = bench.measure(Job(net, INDEX_BY_NAME["fpipe"], has_update=True))
    assert row.bits == "the same"
    assert row.host_us == pytest.approx(row.ms * 1e3 / 64, rel=0.01)
    assert all(map(torch.equal, bench.case.net.parameters(), bench.first_values))


processes = fixture_of(1)


def measure_graph(rank: int) -> str:
    return Bench("mlp", Setting("fake:0", is_quick=True, rounds=1)).measure(GRAPH_JOB).bits


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.timeout(func_only=True)
def test_a_graph_trains_with_the_bits_of_a_capturable_optimizer(processes: Processes):
    assert processes.run(measure_graph) == ["the same"]


def test_a_race_prints_rows_and_reasons(tmp_path: Path):
    page, file = tmp_path / "race.html", tmp_path / "race.json"
    options = ("--against", "eager", "--nets", "mlp", "--quick", "--rounds", "1")
    lines = output_of("bench", *options, "--html", str(page), "--json", str(file)).splitlines()
    assert lines[2:4] == ["MLP 4 x 256", lines[3]]
    measured = ["eager loop", "fpipe"]
    names = [line.partition("  ")[0] for line in lines[4:8]]
    assert names == [*measured, *(f"{name}, AdamW" for name in measured)]
    assert all(line.endswith("the same") for line in lines[4:6])
    assert "eager loop, captured; eager loop, captured, AdamW: a CUDA graph needs a CUDA device." in lines
    assert any(line.startswith("fpipe, graph; fpipe, graph, AdamW: ") for line in lines)
    assert lines[-2:] == [f"wrote {page}", f"wrote {file}"]
    race_facts = json.loads(file.read_text())
    assert race_facts["torch"] == torch.__version__
    assert [row["racer"] for row in race_facts["rows"] if row["ms"] and not row["has_update"]] == measured
    assert "MLP 4 x 256" in page.read_text()


def test_rows_beyond_the_budget_say_so():
    jobs = jobs_of(["mlp"], ["eager"])
    reasons = [row.reason for row in race(jobs, QUICK, budget=0)]
    assert reasons == ["left out: the 0 s of the budget were over."] * len(jobs)
    assert [row.reason for row in race(jobs[:1], QUICK, budget=60, row_seconds=0.01)] == ["ended after 0 s."]


def test_a_process_that_ends_is_a_reason():
    with start_workers(_work, 1, [Job("no such net", 0, has_update=False)], QUICK) as receive:
        assert receive(40) == "its process ended with exit code 1."


def test_a_row_that_fails_leaves_the_next_one(monkeypatch: pytest.MonkeyPatch):
    """FSDP2 without its ranks, then the eager loop in another process."""
    monkeypatch.setattr(Job, "ranks", 1)
    jobs = [Job("mlp", INDEX_BY_NAME[name], has_update=False) for name in ("FSDP2, 2 ranks", "eager loop")]
    failed_row, row = race(jobs, QUICK, budget=60)
    assert failed_row.reason.startswith("AttributeError: ")
    assert row.ms


def measure_racer(rank: int, name: str) -> Row:
    return measure_on_ranks(Job("mlp", INDEX_BY_NAME[name], has_update=False), QUICK)


def test_shards_race_on_ranks():
    with Processes(2) as processes:
        for name in ("FSDP2, 2 ranks", "fpipe shards, 2 ranks"):
            first, second = processes.run(measure_racer, name)
            assert first.ms == second.ms
            assert first.ms


def test_flops_are_those_of_the_products():
    net = small(NETS["mlp"])
    module, (x, target) = net.make(torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.mse_loss(module(x), target).backward()
    # The first layer's input wants no gradient.
    assert counter.get_total_flops() == net.flops() - 2 * net.tokens * net.width**2
    assert NETS["gpt-wide"].flops() == pytest.approx(82.46e12, rel=1e-4)


def test_a_table_has_the_share_of_the_peak():
    row = Row("GPT", "fpipe", False, 200.0, 220.0, tokens=1000, flops=98.9e12, device="NVIDIA H100 80GB HBM3")
    assert row.mfu == pytest.approx(0.5)
    assert as_text([row]).splitlines()[-1].split()[:6] == ["fpipe", "200.00", "0.91", "5000", "494.5", "50.0%"]
    assert peak_of("a processor") is None


def test_an_unknown_rival_is_refused():
    code, _, complaint = run("bench", "--against", "jax")
    assert code == 2
    assert "'jax' is none of eager, compile, torch, fsdp2." in complaint


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_race_on_a_missing_device_is_refused():
    code, _, complaint = run("bench", "--against", "eager", "--device", "cuda")
    assert (code, complaint) == (1, "error: there is no CUDA device here; --device cpu --quick races small nets.\n")


# Schedules race on processes.

EXAMPLE = Path(__file__).parents[1] / "examples/race.py"
PAPER = """
import fpipe, torch

fpipe.schedules.register("to_and_fro", lambda ranks: fpipe.place([0, 1, 0]), stages_per_rank=lambda ranks: ranks + 1)
mse = torch.nn.functional.mse_loss


def net(length):
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    return net, mse, (torch.ones(8, length, 8), torch.ones(8, length, 8))


def two_stages():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=mse)
    return model, params, (torch.ones(8, 8), torch.ones(8, 8))
"""


def test_a_race_starts_processes_and_writes_table_and_figure(tmp_path: Path):
    """The example, on one rank, where a V of two stages is a schedule too."""
    folder = tmp_path / "results"
    typed = f"race {EXAMPLE} -p 1 -m 2 --length 4 --rounds 1 --model {EXAMPLE}:net --output {folder}"
    try:
        lines = output_of(*typed.split()).splitlines()
    finally:
        SCHEDULE_BY_NAME.pop("patient", None)
    assert lines[0] == "2 microbatches, length 4"
    assert lines[-1] == f"wrote {folder / 'race.csv'}, race.md and race.svg"
    (row,) = csv.DictReader((folder / "race.csv").read_text().splitlines())
    assert float(row["tokens/s"]) * float(row["ms"]) == pytest.approx(1e3 * 2 * 2 * 4)
    assert row["MiB"] == row["predicted MiB"]
    assert (folder / "race.md").read_text().count("\n| patient | ") == 1
    assert "patient</text>" in (folder / "race.svg").read_text()


def run_under_torchrun(rank: int, port: int, typed: list[str]) -> tuple[int, str, str]:
    """Run a command in a process with the environment of torchrun."""
    if dist.is_initialized():
        dist.destroy_process_group()
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ.update(variables)
    try:
        return run(*typed)
    finally:
        for name in variables:
            del os.environ[name]


def test_a_race_joins_the_processes_of_torchrun(tmp_path: Path):
    """Both get the arguments; only the first prints and draws. A schedule of a file has one stage more than ranks."""
    file, page = tmp_path / "paper.py", tmp_path / "both.svg"
    file.write_text(PAPER)
    with Processes(2) as pair:

        def race(typed: str) -> list[str]:
            (code, printed, complaint), second = pair.run(run_under_torchrun, free_port(), ["race", *typed.split()])
            assert (code, complaint, second) == (0, "", (0, "", ""))
            return printed.splitlines()

        typed = f"one_f_one_b {file} -m 4 --length 2 --rounds 2 --model {file}:net --timelines {page}"
        lines = race(typed)
        assert [line.split()[0] for line in lines[2:4]] == ["one_f_one_b", "to_and_fro"]
        assert lines[-1] == f"wrote {page}"
        assert "to_and_fro, measured" in page.read_text()
        lines = race(f"gpipe torch:GPipe zbv -m 4 --length 2/4 --memory-cap 4/2 --rounds 1 --model {file}:net")
        tables = [line.split()[:2] for line in lines if line.startswith(("gpipe ", "torch:GPipe "))]
        assert tables == 2 * [["gpipe", "4"], ["torch:GPipe", "4"]]
        assert "gpipe, cap 2: a rank holds 4 microbatches, more than the cap of 2." in lines
        assert "zbv, cap 2: the net of --model has 6 modules, which 4 stages cannot share equally." in lines
        lines = race(f"gpipe torch:GPipe zbv -m 4 --rounds 1 --model {file}:two_stages")
        assert lines[-2] == "torch:GPipe: torch's classes run a net: let --model return (nn.Sequential, loss, batch)."
        assert lines[-1].startswith("zbv: --model returns a model of 2 stages, and a schedule wants 4.")
