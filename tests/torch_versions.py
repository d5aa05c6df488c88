"""Differences between versions of torch: tests to leave out, features, and torch's own warnings. conftest.py applies
them; a test asks for a name in here, never for a version."""

import torch
from torch.torch_version import TorchVersion

TORCH = TorchVersion(torch.__version__)

POSTS_RECEIVES_BY_THE_TABLE = TORCH < "2.15"
"""torch.distributed.pipelining, which adds transfers to a table."""

TORCHS_OWN_WARNINGS = (
    # torch 2.13 builds its own ScriptModules when torch.compile first runs, and warns about itself.
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
    # torch 2.15 warns with another class, and on Python 3.14 in other words.
    "ignore:.torch.jit.(script|trace|script_method). is (deprecated|not supported in Python):FutureWarning",
    # torch 2.13 warns of its own pytrees when torch.distributed.pipelining copies an exported program.
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    # torch 2.11 warns where a test says which checks it wants, once in a process.
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)

_OWN_WORDS = "torch 2.11 says something of its own there"
_SENDS_TO_ITSELF = "gloo refuses what torch 2.11 sends to itself"
_NOT_AWAITED = "torch.accelerator.synchronize of torch 2.11 does not wait for a device that a test builds"
_ACCELERATOR = "tests/test_fake_accelerator.py::test_every_read_waits_for_its_write"
_RUNTIME = "tests/test_torch_runtime.py::"
_BEFORE_2_13 = {
    "tests/test_from_loss.py::test_a_function_that_cannot_be_cut_is_refused_with_the_reason": _OWN_WORDS,
    f"{_ACCELERATOR}[built on another stream]": _NOT_AWAITED,
    f"{_ACCELERATOR}[device time]": _NOT_AWAITED,
    f"{_RUNTIME}test_a_program_on_torchs_runtime_gives_the_gradients_of_autograd": _SENDS_TO_ITSELF,
    f"{_RUNTIME}test_torchs_tables_run_on_both_runtimes_with_stages_of_ours": _SENDS_TO_ITSELF,
    f"{_RUNTIME}test_a_dict_of_inputs_becomes_keywords": _SENDS_TO_ITSELF,
    f"{_RUNTIME}test_a_later_stage_may_index_by_its_input": _SENDS_TO_ITSELF,
    f"{_RUNTIME}test_a_module_recomputes_in_its_backward_with_the_params_of_the_step": _SENDS_TO_ITSELF,
    "fpipe/interop/torch_pipelining.py::fpipe.interop.torch_pipelining.runtime": _SENDS_TO_ITSELF,
    "fpipe/interop/torch_pipelining.py::fpipe.interop.torch_pipelining.stages": _SENDS_TO_ITSELF,
}

_FROM_2_15 = {
    "tests/test_judged_files.py::test_tensors_whose_numbers_cannot_be_compared_are_refused_by_name[nested]": (
        "torch 2.15 reads no nested tensor from a file"
    ),
    "tests/test_readme.py::test_a_notebook_runs_and_prints_what_its_page_shows[your_own_schedule]": (
        "torch 2.15 writes waits into its tables"
    ),
}
_REASON_BY_TEST = (_BEFORE_2_13 if TORCH < "2.13" else {}) | (_FROM_2_15 if TORCH >= "2.15" else {})


def reason_to_leave_out(test_id: str) -> str | None:
    """Return why a test is left out on this version of torch, or None if it runs."""
    return next((reason for name, reason in _REASON_BY_TEST.items() if test_id.startswith(name)), None)
