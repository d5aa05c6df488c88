"""torch.profiler and Nsight see each op of a step as a range, and a step without a profiler makes none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig

import fpipe
from fpipe.meaning import recorder
from fpipe.runtimes.processes.message_order import with_results_last
from fpipe.transforms.communicate import with_transfers
from tests.processes import Processes

RANKS = 2


def build(**options: Any) -> tuple[fpipe.Program, Callable[[], Any]]:
    """Return a program with every kind of op of a usual step, and its step on a net and a batch."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=nn.functional.mse_loss)
    order = fpipe.place([0, 1, 0]), fpipe.checkpoint(lambda stage, microbatch: stage == 0), fpipe.split_backward()
    parts = fpipe.split(3), *order, fpipe.merge(), fpipe.update("SGD", clip=1.0)
    program = fpipe.chain(*parts)(fpipe.program(model))
    batch = torch.randn(6, 4), torch.randn(6, 4)
    step = fpipe.build(program, model, example=(params, batch), **options)
    optim = fpipe.optimizer_state(program, params)
    step(params, batch, opt=optim, lr=0.1)
    return program, lambda: step(params, batch, opt=optim, lr=0.1)


def cells_in_ranges(step: Callable[[], Any]) -> list[list[str]]:
    """Return the cells in the names of ranges, by their start, of a step under torch.profiler."""
    with torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profile:
        step()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name.removeprefix("fpipe ").split(" + ") for event in events if event.name.startswith("fpipe ")]


def assert_in_order(ranges: list[list[str]], ops: list[fpipe.Op]) -> None:
    """Every op is in a range once, and the first ops of ranges, into which ADDs are folded, follow the program."""
    cells = [op.cell for op in ops]
    # Work that a step hoists out of its microbatches has a range too, and is no op of the program.
    ranges = [cells for cells in ranges if not cells[0].startswith("HOIST")]
    assert sorted(cell for cells in ranges for cell in cells) == sorted(cells)
    first_cells = [cells[0] for cells in ranges]
    assert first_cells == [cell for cell in cells if cell in first_cells]


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("record", [True, False])
def test_a_profile_has_the_ranges_of_all_ops_in_program_order(trace: bool, record: bool):
    program, step = build(trace=trace, record=record)
    assert_in_order(cells_in_ranges(step), [*(with_transfers(program) if record else program).ops])


def test_each_thread_has_the_ranges_of_its_rank():
    program, step = build(runtime="threads")
    ranges = cells_in_ranges(step)
    ops = [*with_transfers(program).ops]
    for rank in range(RANKS):
        rank_ops = [op for op in ops if op.rank == rank]
        rank_cells = {op.cell for op in rank_ops}
        assert_in_order([cells for cells in ranges if cells[0] in rank_cells], rank_ops)


def profile_process(rank: int) -> None:
    program, step = build(runtime="distributed")
    ops = with_results_last(with_transfers(program)).ops
    assert_in_order(cells_in_ranges(step), [op for op in ops if op.rank == rank])


def test_each_process_has_the_ranges_of_its_rank():
    with Processes(RANKS) as processes:
        processes.run(profile_process)


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}])
def test_a_step_without_a_profiler_makes_no_range(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> None:
        raise AssertionError(f"the range {name!r} was made")

    _, step = build(**options)
    expected = step()
    monkeypatch.setattr(recorder, "record_function", refuse)
    assert torch.equal(step().loss, expected.loss)
    with torch.profiler.profile(), pytest.raises(AssertionError, match="the range 'fpipe "):
        step()
