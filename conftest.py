"""What every test runs under: one torch thread, and the same hypothesis examples each time."""

import os

# "Bitwise equal" is promised for one number of threads. The variable reaches the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import HealthCheck, settings

from fpipe.program import Program

torch.set_num_threads(1)

# `ci` must say the same on a slow machine as on a fast one, so nothing in it depends on time or on chance.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
# HYPOTHESIS_PROFILE=deep .venv/bin/pytest property_tests --timeout=0 -o faulthandler_timeout=0
settings.register_profile(
    "deep",
    deadline=None,
    print_blob=True,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_trusted = Program.trusted


def _checked(*parts, **more):
    """Rewrites of ours are not checked again when a user runs them; in tests each of them is, with nothing cached, and
    the index it hands on is the one that is looked up."""
    made = _trusted(*parts, **more)
    looked_up = Program(made.inputs, made.ops, made.outputs)
    assert made.sources == looked_up.sources
    return made


Program.trusted = staticmethod(_checked)
