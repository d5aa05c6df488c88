"""A schedule at a size that no list of ops fits: its numbers, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import fpipe
from fpipe.schedules.periodic_orders import PERIODIC
from tests.refusals import refusals


def test_figures_of_papers_hold_where_no_program_fits():
    """1F1B idles (p-1)T, ZB-H1 a third of it at F = B = W, ZB-V at span 0; 1F1B's first rank holds p."""
    p, m = 256, 4096
    found = {name: fpipe.periodic(name, p, m) for name in ("one_f_one_b", "zb_h1")}
    assert (found["one_f_one_b"].idle, found["zb_h1"].idle) == ((p - 1) * 3, p - 1)
    assert found["one_f_one_b"].peak[:2] == (p, p - 1)
    assert fpipe.periodic("zbv", 64, 1024).span == 6 * 1024


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(PERIODIC))
def test_what_is_read_long_after_it_was_made_arrives(name: str):
    """Sizes at which warm-ups are longer than the window of recent times, with costs that round."""
    ranks, microbatches = 24, 96
    costs = fpipe.Costs([0.1 * (stage % 7 + 1) for stage in range(2 * ranks)], 0.7, 0.3, transfer=0.3)
    whole = fpipe.simulate(fpipe.schedules.about(name).program(ranks, microbatches), costs)
    found = fpipe.periodic(name, ranks, microbatches, costs)
    assert (found.makespan, found.span, found.peak) == (whole.makespan, whole.span, whole.peak)


@pytest.mark.deep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb_h1", "zbv", "dualpipe"])
def test_a_hundred_million_ops_take_two_seconds_and_five_hundred_mebibytes(name: str):
    """In a process of its own, with one thread; seconds of the processor, which others on the machine do not change."""
    said = subprocess.run(
        [sys.executable, "-c", LARGE, name],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds, mebibytes = map(float, said.stdout.split())
    assert seconds <= 2
    assert mebibytes <= 500


LARGE = """
import resource, sys, time
import torch, fpipe
fpipe.periodic(sys.argv[1], 4, 8)
least = 9.0
for _ in range(3):
    began = time.process_time()
    fpipe.periodic(sys.argv[1], 4096, 8192)
    least = min(least, time.process_time() - began)
print(least, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def test_a_row_is_shown_in_runs():
    found = fpipe.periodic("zb_h1", 4, 100)
    assert found.row(1) == "2 x (1F0) | 1F2 1I0 | 97 x (1F3 1I1 1W0) | 2 x (1I98 1W97) | 1W99"
    assert str(found).startswith("zb_h1, 4 ranks, 100 microbatches: makespan 303, ")


ONE = "one_f_one_b", 2, 6

test_what_has_no_period_says_so = refusals(
    globals(),
    """
fpipe.periodic('zb_auto', 4, 8)
    ValueError: zb_auto has no period that is known before its order is
fpipe.periodic('interleaved', 4, 10)
    ValueError: interleaved: its rounds are of 4 microbatches, and 10 leave a short one
fpipe.periodic('zbv', 4, 6)
    ValueError: zbv: it repeats nothing before every rank is full; take 7 microbatches or more, found 6
fpipe.periodic('dualpipe', 3, 6)
    ValueError: dualpipe: the number of ranks is even, found 3
fpipe.periodic('one_f_one_b', 0, 6)
    ValueError: ranks is a whole number, at least 1; found 0.
fpipe.periodic(*ONE, fpipe.Costs(transfer={(0, 1): 1}))
    ValueError: one latency for all links; found a transfer of
fpipe.periodic(*ONE, fpipe.Costs(cluster=fpipe.Cluster.parse('2 ranks')))
    ValueError: all links; found a cluster. Simulate
fpipe.periodic(*ONE, fpipe.Costs(messages='nccl', transfer=0.1))
    ValueError: found a rule of messages. Simulate
fpipe.periodic(*ONE, fpipe.Costs(sender='busy'))
    ValueError: found a busy sender. Simulate a program of a smaller
fpipe.periodic(*ONE, fpipe.Costs(receive=1))
    ValueError: found a send or a receive that takes time. Simulate
fpipe.periodic(*ONE, fpipe.Costs([1]))
    ValueError: forward lists 1 costs, but the program has a stage 1
fpipe.periodic('zb_h1', 4, 100).row(4)
    ValueError: ranks are 0..3, found 4.
""",
)
