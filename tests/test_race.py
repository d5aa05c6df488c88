"""Runtimes race on the same nets: each row has numbers or the reason why it has none."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fpipe.cli.race import Bench, Job, Row, Setting, _workers, jobs_of, measure_on_ranks, peak_of, race
from fpipe.cli.race_nets import NETS, small
from fpipe.cli.race_report import as_text
from fpipe.cli.racers import RACERS
from tests.fake_accelerator import COMPILER
from tests.fake_accelerator.device_processes import fixture_of
from tests.processes import Processes
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
    with _workers([Job("no such net", 0, has_update=False)], QUICK, 1) as receive:
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


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ((), "name schedules to race, or say --against eager,torch to race runtimes."),
        (("gpipe", "--quick"), "--quick is of a race of runtimes: add --against eager,torch."),
        (("--against", "eager", "--ranks", "2"), "--ranks is of a race of schedules, without --against."),
        (("--against", "jax"), "'jax' is none of eager, compile, torch, fsdp2."),
    ],
)
def test_wrong_options_of_a_race_are_refused(typed: tuple[str, ...], sentence: str):
    code, _, complaint = run("bench", *typed)
    assert code == 2
    assert sentence in complaint


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_race_on_a_missing_device_is_refused():
    code, _, complaint = run("bench", "--against", "eager", "--device", "cuda")
    assert (code, complaint) == (1, "error: there is no CUDA device here; --device cpu --quick races small nets.\n")
