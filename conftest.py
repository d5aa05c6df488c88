"""Set up every test: one torch thread, Ctrl-C, reproducible hypothesis examples, groups of processes, slow files."""

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
# Until the first test nothing is garbage: collections took a quarter of the time to import and collect the tests.
gc.disable()
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
    max_examples=10,
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

# Their functions are those of other modules, where doctests find them too.
collect_ignore = ["fpipe/__init__.py", "fpipe/schedules/__init__.py"]

# Files that take about four seconds or more each: `make quick` leaves them out.
ROOT = Path(__file__).parent
SLOW = {
    "tests": """
        autocast batches bounds checkpoints cli compare_step compare_step_ranks compile conformance
        counts cut_dtensors data_parallel demo derivatives digits distributed evaluating exchange
        experts fake_accelerator fake_graph_groups fake_graph_refusals fake_graph_reports fake_graphs families
        faults fingerprint from_loss from_module grain kernels
        hybrid_shards interop layers loss_scale memory meta module_kinds offload opaque peers
        plan_run plot post_validation pure random readme references safe_saves same_step schedules
        search search_memory searched shard sharded shards_inside_stages signatures slices state
        state_dict steps testing threads ties_and_skips torch_runtime traces train_gpt written_buffers
        transformers_trainer untraced_processes update verify vision_language words
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
    """Fail a test that leaves a process group or a setting of torch behind, before it misleads later tests."""
    had_group, settings_before = dist.is_initialized(), process_settings()
    yield
    changes = sorted({*process_settings()} - {*settings_before})
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
    """Freeze modules and tests, which are no garbage: each full collection walked through them for half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def small_heap() -> None:
    """Freeze all objects before a test that collects garbage, so that it walks through its own alone."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collect once: pytest would walk through all objects five times."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    for warned in torch_versions.TORCHS_OWN_WARNINGS:
        config.addinivalue_line("filterwarnings", warned)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for test in items:
        if reason := torch_versions.reason_to_leave_out(test.nodeid):
            test.add_marker(pytest.mark.skip(reason=reason))
        if test.path in SLOW_FILES:
            test.add_marker(pytest.mark.slow)
        if test.path.is_relative_to(ROOT / "property_tests"):
            test.add_marker(pytest.mark.law)
    crossed = [test for test in items if isinstance(test, pytest.Function) and test.get_closest_marker("crossed")]
    for _, group in itertools.groupby(crossed, lambda test: test.function):
        for test in outside_the_star([*group]):
            test.add_marker(pytest.mark.deep)


def outside_the_star(combinations: list[pytest.Function]) -> list[pytest.Function]:
    """Return the combinations of several parameters, in their order, that `make test` leaves out.

    It keeps each value of the longest parameter with the first values of the rest, and each combination of the rest
    with every ninth value of the longest.
    """
    sizes = [len(mark.args[1]) for mark in combinations[0].iter_markers("parametrize")]
    if len(combinations) < math.prod(sizes):  # asked for by name
        return []
    longest, deep_tests = sizes.index(max(sizes)), list[pytest.Function]()
    rest_combinations = [*itertools.product(*map(range, sizes[:longest] + sizes[longest + 1 :]))]
    stride = min(9, max(sizes))
    for test, indices in zip(combinations, itertools.product(*map(range, sizes)), strict=True):
        rest_index = rest_combinations.index(indices[:longest] + indices[longest + 1 :])
        if rest_index and indices[longest] % stride != rest_index % stride:
            deep_tests.append(test)
    return deep_tests


_trusted = Program.trusted
_sources: dict[int, int] = {}


def _trusted_and_checked(*parts, **options):
    """Check the index of writers that a rewrite passes on, which users' runs trust. Equal programs are checked once."""
    program = _trusted(*parts, **options)
    digest = hash((program.inputs, program.ops, program.outputs))
    if digest not in _sources:
        _sources[digest] = hash((*Program(program.inputs, program.ops, program.outputs).sources,))
    assert hash((*program.sources,)) == _sources[digest]
    return program


Program.trusted = staticmethod(_trusted_and_checked)
