"""What every test runs under: one torch thread, Ctrl-C heard, the same hypothesis examples each time, groups of
processes, and which files are slow."""

import gc
import itertools
import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# "Bitwise equal" is promised for one number of threads. The variable reaches the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from fpipe.meaning.purity import ambient
from fpipe.program import Program
from tests import torch_versions
from tests.processes import processes

torch.set_num_threads(1)
# pytest listens to each logger that keeps to itself. Where anybody listens to torch's record of its own tracing, each
# tensor that is traced comes with its stack: a sixth of the time that laws took.
logging.getLogger("torch.__trace").propagate = True
# A shell starts what runs in its background with Ctrl-C ignored; tests send it, to processes that they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `ci` must say the same on a slow machine as on a fast one, so nothing in it depends on time or on chance.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make deep`
settings.register_profile(
    "deep",
    deadline=None,
    print_blob=True,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Files that take about four seconds or more each: `make quick` leaves them out.
ROOT = Path(__file__).parent
SLOW = {
    "tests": """
        autocast batches bounds checkpoints cli compare_step compare_step_ranks compile conformance
        counts cut_dtensors data_parallel demo derivatives digits distributed evaluating exchange
        experts fake_accelerator families faults fingerprint from_loss from_module grain
        hybrid_shards interop layers loss_scale memory meta module_kinds offload opaque peers
        plan_run plot post_validation pure random readme references safe_saves same_step schedules
        search search_memory searched shard sharded shards_inside_stages signatures slices state
        state_dict steps testing threads ties_and_skips torch_runtime traces train_gpt written_buffers
        untraced_processes update verify
    """,
    "property_tests": """
        derivative_laws distributed_laws gradients language_laws linearize_laws schedule_laws
        schedule_search shard_laws slice_laws time_laws update_laws whole_laws
    """,
}
SLOW_FILES = {ROOT / folder / f"test_{name}.py" for folder, names in SLOW.items() for name in names.split()}


pair, trio, four = map(processes, (2, 3, 4))


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Fail a test that leaves a process group or a setting of torch behind, and not those that it would mislead."""
    had_group, before = dist.is_initialized(), process_settings()
    yield
    changes = sorted({*process_settings()} - {*before})
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
        changes.append("a default process group")
    if changes:
        pytest.fail(f"the test leaves behind: {', '.join(changes)}")


def process_settings() -> list[str]:
    threads = f"{torch.get_num_threads()} threads"
    return [
        *ambient.describe_settings(),
        threads,
        f"autocast {ambient.describe_autocast()}",
        f"device {torch.get_default_device()}",
    ]


def pytest_collection_finish() -> None:
    """Modules and tests are no garbage: each full collection walked through them, which is half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_heap() -> None:
    """For a test that collects garbage: of its own alone."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Once, where pytest would walk through all of it five times."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    for warned in torch_versions.TORCHS_OWN_WARNINGS:
        config.addinivalue_line("filterwarnings", warned)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if why := torch_versions.left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=why))
        if item.path in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if item.path.is_relative_to(ROOT / "property_tests"):
            item.add_marker(pytest.mark.law)
    crossed = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("crossed")]
    for _, group in itertools.groupby(crossed, lambda item: item.function):
        for item in outside_the_star([*group]):
            item.add_marker(pytest.mark.deep)


def outside_the_star(items: list[pytest.Function]) -> list[pytest.Function]:
    """Of the combinations of several parameters, in their order, those that `make test` leaves out. It has each value
    of the longest with the first values of the others, and each combination of these with every fifth of the longest.
    """
    sizes = [len(mark.args[1]) for mark in items[0].iter_markers("parametrize")]
    if len(items) < math.prod(sizes):  # asked for by name
        return []
    longest, left_out = sizes.index(max(sizes)), list[pytest.Function]()
    others = [*itertools.product(*map(range, sizes[:longest] + sizes[longest + 1 :]))]
    every = min(5, max(sizes))
    for item, place in zip(items, itertools.product(*map(range, sizes)), strict=True):
        other = others.index(place[:longest] + place[longest + 1 :])
        if other and place[longest] % every != other % every:
            left_out.append(item)
    return left_out


_trusted = Program.trusted
_sources: dict[int, int] = {}


def _checked(*parts, **more):
    """Rewrites of ours are not checked again when a user runs them; in tests each of them is, and the index it hands on
    is the one that is looked up. Of programs that are equal the first is checked."""
    made = _trusted(*parts, **more)
    number = hash((made.inputs, made.ops, made.outputs))
    if number not in _sources:
        _sources[number] = hash((*Program(made.inputs, made.ops, made.outputs).sources,))
    assert hash((*made.sources,)) == _sources[number]
    return made


Program.trusted = staticmethod(_checked)
