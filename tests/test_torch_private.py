"""Private parts of torch that fpipe uses: each message says what breaks without them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from fpipe import torch_internals as internals
from fpipe.torch_internals import (
    OpOverload,
    StorageWeakRef,
    TorchDispatchMode,
    all_ops,
    function_behind,
    in_fake_mode,
    is_compiled,
    is_hooks_forbidden_error,
    is_leaf_write_error,
    is_profiled,
    is_view,
    op_and_overload_names,
    returns_of,
    scale_each,
    schema_arguments,
    selective_checkpoint_answers,
    storage_of,
    without_compiler,
)
from fpipe.torch_private import cuda
from fpipe.torch_private.dispatch import (
    NAMESPACES,
    as_functional,
    c_function_of,
    fake_mode_class,
    fake_tensor_class,
    has_kernel,
    override_kernel,
    refuse_data_assignments,
    silence_fake_errors,
    without_any_mode,
    without_modes,
)
from fpipe.torch_private.fx import count_traced_ops, hide_make_fx, trace_on_fakes


def test_errors_of_autograd_are_recognized_by_their_sentences():
    with pytest.raises(RuntimeError) as error_info:
        torch.ones(2, requires_grad=True).add_(1)
    assert is_leaf_write_error(error_info.value), (
        "a write to a leaf has another sentence: stages that write are not named"
    )
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with hooks, pytest.raises(RuntimeError) as error_info:
        torch.func.grad(torch.sin)(torch.ones(()))
    assert is_hooks_forbidden_error(error_info.value), (
        "torch.func refuses hooks in another sentence: record= is not named"
    )


def test_torch_lists_the_ops_it_knows():
    assert torch.ops.aten.mm.default in all_ops(), "torch no longer lists its ops: checkpoint(save=policy) needs them"


def test_a_selective_checkpoint_policy_can_be_asked_without_a_forward():
    answers = selective_checkpoint_answers(lambda context, op: CheckpointPolicy.PREFER_SAVE)
    assert answers["aten.mm.default"], "a SelectiveCheckpointContext can no longer be made by hand"


def test_an_op_is_an_overload_with_a_kernel():
    op = torch.ops.aten.mm.default
    assert isinstance(op, OpOverload), "the type of ops has another name: nothing can be traced"
    assert has_kernel(op.name(), "CPU"), "torch no longer says which ops have kernels: custom ops cannot be traced"


def test_schemas_say_which_arguments_an_op_mutates():
    op = torch.ops.aten.add_.Tensor
    self_argument, *_ = schema_arguments(op)
    assert [self_argument.name, self_argument.alias_info.is_write] == ["self", True], (
        "ops in place are not seen: traces are wrong"
    )
    assert returns_of(op)[0].alias_info is not None, "ops that make tensors are not told from those that hand them on"
    assert op_and_overload_names(op) == ("add_", "Tensor"), (
        "an op in place is not replaced by its twin: traces run once more"
    )
    x = torch.ones(2)
    assert c_function_of(op)(x, 1) is x, "graphs run, but call some ops by their slow overload"


def test_a_composite_op_is_overridden_for_a_while():
    labels = torch.tensor([1, 0])
    with override_kernel("one_hot", lambda self, num_classes=-1: self + num_classes):
        assert torch.nn.functional.one_hot(labels, 2).tolist() == [3, 2], "a trace does not look at labels of one_hot"
    assert torch.nn.functional.one_hot(labels, 2).tolist() == [[0, 1], [1, 0]], "torch's own one_hot is gone"


def test_freed_storages_are_recognized():
    x = torch.ones(2)
    weak = StorageWeakRef(x.untyped_storage())
    assert not weak.expired()
    del x
    assert weak.expired(), "memory that is used again would be taken for that of the tensor before"


def test_autograd_tells_views_and_custom_functions():
    x = torch.ones(2, requires_grad=True)
    assert [is_view(x), is_view(x[:1])] == [False, True], "a view turned in place is traced, and its gradient is wrong"

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert function_behind((2 * x).grad_fn) is None, "torch's own ops are taken for somebody's Python"
    assert function_behind(Twice.apply(x).grad_fn) is Twice, "a Function of one's own is taken for an op of torch's"


def test_compiled_functions_are_recognized():
    assert is_compiled(torch.compile(lambda x: x)), "from_loss traces what torch.compile made, without a word"


def test_tensors_are_multiplied_in_one_call():
    scaled = scale_each([torch.ones(2), torch.ones(())], [2.0, 3.0])
    assert [tensor.tolist() for tensor in scaled] == [[2, 2], 3], "losses cannot be weighed"


@pytest.mark.parametrize("name", ["add", "linear", "relu_", "linalg_inv", "special_erf", "fft_fft"])
def test_c_functions_are_in_their_namespaces(name: str):
    assert any(hasattr(namespace, name) for namespace in NAMESPACES), (
        "graphs run, but call each op by its slow overload"
    )


def test_dispatch_modes_are_switched_off_for_a_while():
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError("the mode is on: generators and constants cannot be read while a stage is traced")

    with Refusing(), without_modes():
        torch.ones(2) + 1


def test_all_modes_are_switched_off_for_a_while():
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError("a mode is on: nets of DTensors are traced twice, and cannot be exported")

    with Refusing(), without_any_mode():
        torch.ones(2).sum()


def test_views_share_a_storage():
    x = torch.ones(4)
    assert storage_of(x[1:]) == storage_of(x) != storage_of(x.clone()), "storages are not told apart: memory is wrong"


def test_fake_tensors_are_recognized():
    with fake_mode_class()():
        assert in_fake_mode(), "a mode of fake tensors is not seen: a trace would be handed real ones"
        assert isinstance(torch.ones(2), fake_tensor_class()), "fake tensors are of another class: they leak unseen"
    assert not in_fake_mode()


def test_a_profiler_is_seen():
    assert not is_profiled()
    with torch.autograd.profiler.profile(use_kineto=False):
        assert is_profiled(), "a profiler is not seen: it shows no ops of the program"


def test_the_data_of_a_fake_tensor_is_assigned_where_nobody_refuses():
    def refuse() -> None:
        raise ValueError("refused")

    with fake_mode_class()():
        fake = torch.zeros(2)
        with refuse_data_assignments(refuse), pytest.raises(ValueError, match="refused"):
            fake.data = torch.ones(2)
        fake.data = torch.ones(2)
    assert "data" not in vars(fake_tensor_class()), "threads that are gone leave torch as it was"


def test_errors_of_fake_tensors_are_logged_outside(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger(fake_mode_class().__module__)
    with silence_fake_errors():
        logger.warning("unheard")
    logger.warning("heard")
    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == ["heard"]


def test_a_function_is_made_functional():
    x = torch.ones(2)
    assert as_functional(lambda x: x.clone().add_(1))(x).tolist() == [2, 2], "ops in place cannot be rewritten"


def test_a_trace_has_the_ops_of_an_untraced_run():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval().requires_grad_(False)
    counts: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with hide_make_fx():
            y = attention(x, x, x)[0] if x.ndim == 3 else x + 1
        counts.append(count_traced_ops())
        return y

    with fake_mode_class()(allow_non_fake_inputs=True):
        fakes = torch.ones(2, 3, 4), torch.ones(2)
    add, one_op = (trace_on_fakes(function, [fake]) for fake in reversed(fakes))
    calls = [
        [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
        for graph_module in (add, one_op)
    ]
    assert calls[0] == [torch.ops.aten.add.Tensor], "make_fx traces something else: there are no graphs"
    assert counts[0] == 1, "make_fx no longer tells what it has traced so far: a backward that draws is not refused"
    assert torch.ops.aten._native_multi_head_attention.default in calls[1], "frozen attention has others of its bits"


def test_a_compiled_function_runs_as_it_is_written():
    runs_python: list[bool] = []
    compiled = torch.compile(lambda x: runs_python.append(not torch.compiler.is_compiling()) or x + 1, backend="eager")
    with without_compiler():
        compiled(torch.ones(2))
        trace_on_fakes(compiled, [torch.ones(2)])
    assert runs_python == [True, True], "torch.compile runs inside a trace: its kernels would read fake tensors"


def test_flags_of_kernels_are_read():
    assert {"deterministic_algorithms", "mkldnn_enabled", "math_sdp_enabled"} <= {*internals.FLAGS}, (
        "torch renamed flags: a step that was traced under others would be used"
    )
    assert len(internals.fp32_precisions()) == len(internals.PRECISIONS)
    assert internals.sdp_priority(), "torch no longer tells in which order it tries kernels of attention"
    assert internals.einsum_is_optimised() in (True, False)


def test_modes_and_hooks_around_a_call_are_seen():
    assert internals.default_device() is None
    with torch.device("meta"):
        assert internals.default_device() == torch.device("meta"), "a default device is not seen by the trace's key"
        assert not [*internals.function_modes()]
    with torch.overrides.TorchFunctionMode():
        assert [*internals.function_modes()], "a TorchFunctionMode is not seen, and a trace passes it by"
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert internals.has_saved_tensors_hooks(), "saved_tensors_hooks are not seen, and a trace passes them by"
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert internals.has_hooks_on_all_modules(), "hooks on all modules are not seen, and a trace passes them by"
    finally:
        hook.remove()
    with torch.autocast("cpu"):
        assert internals.is_autocast_on(), "autocast is not seen: a step traced without it would be used"
    transforms = []
    torch.func.vmap(lambda x: transforms.append(internals.function_transform()) or x)(torch.ones(2))
    assert transforms == ["vmap"], "torch.func around a step is not seen, and its gradients would be zeros"


def test_captures_free_workspaces_and_end_their_allocation(monkeypatch: pytest.MonkeyPatch):
    calls = list[str]()

    def end(*arguments: Any) -> None:
        calls.append("end")
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    names = {"_cuda_clearCublasWorkspaces": lambda: calls.append("clear"), "_cuda_endAllocateToPool": end}
    monkeypatch.setattr(cuda, "_C", SimpleNamespace(**names))
    for device in (torch.device("cpu"), torch.device("cuda:0")):
        cuda.clear_workspaces(device)
        cuda.end_allocation(device, (0, 1))
    assert calls == ["clear", "end"]


@pytest.mark.parametrize(
    ("device", "version", "count"),
    [("cuda:0", "2.13.0+cu130", 2), ("cuda:0", "2.14.1+cu130", 0), ("xpu:0", "2.15.0", 2)],
)
def test_generators_are_registered_where_graphs_do_not_register_them(
    monkeypatch: pytest.MonkeyPatch, device: str, version: str, count: int
):
    monkeypatch.setattr(cuda, "__version__", version)
    registered = list[torch.Generator]()
    graph = SimpleNamespace(register_generator_state=registered.append)
    generators = [torch.Generator(), torch.Generator()]
    cuda.register_generators(torch.device(device), graph, generators)
    assert registered == generators[:count]
