"""The law of graphs: a drawn program that is captured as one graph has the bits of its instructions in every replay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given as drawn

import fpipe
from fpipe.tree import leaves, tree_map
from property_tests.chains import Run, runs
from property_tests.strategies import max_examples, nets
from tests.fake_accelerator import COMPILER, reports_of
from tests.fake_accelerator.device_processes import processes_with_device
from tests.fake_accelerator.graph_scenarios import counted_replays, on_device
from tests.fake_accelerator.scenarios import differing_bits
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]
STEPS, REPLAYS = 4, 2


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes_with_device(request, tmp_path_factory, 1) as workers:
        yield workers


def compare_with_instructions(rank: int, run: Run) -> list[str]:
    """Run a graph and the instructions on the same batches; return reports of the checker and bits that differ."""
    model, program, (params, batch) = run.net.model, run.program, on_device(run.inputs)
    batches = [tree_map(lambda leaf, k=k: leaf + k if leaf.is_floating_point() else leaf, batch) for k in range(STEPS)]
    graph_step = fpipe.build(program, model, graph=True, audit="never")
    results = list[fpipe.Result]()

    def run_graph() -> None:
        results.extend(graph_step(params, step_batch, key=run.seed) for step_batch in batches)

    with counted_replays() as replayed:
        reports = reports_of(run_graph)
    step = fpipe.build(program, model, audit="never")
    expected = [step(params, step_batch, key=run.seed) for step_batch in batches]
    pairs = [[(result.loss, result.outputs, result.grads) for result in side] for side in (results, expected)]
    tensors = [[leaf for leaf in leaves(side) if isinstance(leaf, torch.Tensor)] for side in pairs]
    return reports + differing_bits(*tensors) + [f"{len(replayed)} replays"] * (len(replayed) != REPLAYS)


# The fake device has no convolutions.
@max_examples(4)
@drawn(run=runs(nets().filter(lambda net: "conv" not in net.bodies)))
def test_a_graph_has_the_bits_of_its_instructions(processes: Processes, run: Run):
    assert processes.run(compare_with_instructions, run) == [[]]
