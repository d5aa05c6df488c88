"""What is written is read back as the same program, whatever the order and the placement."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.interop import from_json, to_json, torch_pipelining
from fpipe.program import Program
from property_tests.drawn_programs import DrawnProgram, programs

CHAINS = st.integers(1, 5).map(lambda stages: ("batch", *range(stages - 1)))
LAST = {"nothing": fpipe.identity(), "communicate()": fpipe.communicate(), "free()": fpipe.free()}


def without_recompute(plan: DrawnProgram) -> Program:
    """Torch's tables have no R."""
    return DrawnProgram(plan.takes, plan.microbatches, frozenset(), plan.halved, plan.table).program


@given(programs(CHAINS).map(without_recompute))
def test_an_order_written_for_torch_is_read_back(program: Program):
    assert torch_pipelining.from_csv(torch_pipelining.to_csv(program)) == program


@given(programs(CHAINS).map(without_recompute))
def test_transfers_written_for_torch_are_read_back(program: Program):
    text = torch_pipelining.to_csv(program, format="compute_comms")
    found = torch_pipelining.from_csv(text, format="compute_comms")
    assert found.table() == program.table()
    assert torch_pipelining.to_csv(found, format="compute_comms") == text


@given(programs(), st.sampled_from(sorted(LAST)))
def test_json_is_read_back(plan: DrawnProgram, last: str):
    program = LAST[last](plan.program)
    assert from_json(to_json(program)) == program
