"""A step is traced again if anything changes that its trace depends on."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe.graphs.tracing import trace_cache
from fpipe.meaning.purity.ambient import ambient_key
from fpipe.runtimes.lowering import signature
from fpipe.tree import leaves, tree_map

TRACES: Any = trace_cache


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record one line for each trace."""
    traces: list[str] = []
    plain = TRACES.trace
    monkeypatch.setattr(TRACES, "trace", lambda *args: traces.append("trace") or plain(*args))
    return traces


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def built(*functions: Any, m: int = 2) -> tuple[fpipe.Model, Callable[..., fpipe.Result]]:
    model = fpipe.from_functions(functions, loss=squares)
    pipeline = fpipe.chain(fpipe.split(m), fpipe.schedules.gpipe(len(functions)), fpipe.merge())
    return model, fpipe.build(pipeline(fpipe.program(model)), model)


def has_equal_bits(result: fpipe.Result, expected: fpipe.Result) -> bool:
    return all(map(torch.equal, leaves((result.loss, result.grads)), leaves((expected.loss, expected.grads))))


# What is on around a step.


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.c = nn.Linear(16, 48), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.w(x).view(len(x), 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.silu(torch.tanh(self.c(y.transpose(1, 2).reshape(len(x), 16, 16))))


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def rounding():
    backends = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    precisions = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


@contextmanager
def hooks():
    handle = register_module_forward_hook(lambda module, x, y: y * 2)
    try:
        yield
    finally:
        handle.remove()


class TwiceTanh(TorchFunctionMode):
    """A mode that doubles torch.tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.tanh else output


class TwiceTheOp(TorchDispatchMode):
    """A mode that doubles aten.tanh, and so acts on the ops of a trace."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.ops.aten.tanh.default else output


# Choose among kernels, of which some CPUs have one and some have two with other bits: AMX multiplies in bfloat16 where
# the matmul precision allows it.
BITS_DEPEND_ON_CPU = ("sdpa_kernel", "mkldnn", "deterministic", "matmul precision", "flops")
FLAGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "deterministic": deterministic,
    "matmul precision": rounding,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    # FlopCounterMode takes the gradient of SiLU apart: a step that was first counted had those bits for good.
    "flops": lambda: FlopCounterMode(display=False),
    "ops": TwiceTheOp,
}
UNTRACED: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    # Its trace went on without the mode, and the one from before went on in it.
    "functions": (TwiceTanh, r"a TorchFunctionMode is on \(TwiceTanh\)"),
    "saved tensors": (lambda: saved_tensors_hooks(lambda x: x * 2, lambda x: x), "saved_tensors_hooks are on"),
    "modules": (hooks, "hooks on all modules are called"),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("case", [*FLAGS, *UNTRACED])
def test_ambient_modes_apply_to_a_step_and_not_after_it(case: str, traced: list[str]):
    torch.manual_seed(0)
    net = nn.Sequential(Attends(), Attends())
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model)
    batch = torch.randn(4, 16, 16), torch.randn(4, 16, 16)
    outside = step(params, batch)
    around, reason = UNTRACED.get(case) or (FLAGS[case], None)
    for _ in range(2):
        traced.clear()
        with around():
            with pytest.warns(UserWarning, match=f"every stage under autograd: {reason}") if reason else nullcontext():
                result = step(params, batch)
            assert has_equal_bits(result, fpipe.reference(model, params, batch, microbatches=2))
    assert traced == []  # the second time
    if case not in BITS_DEPEND_ON_CPU:
        assert not has_equal_bits(result, outside)
    assert has_equal_bits(step(params, batch), outside)
    if case == "saved tensors":
        with pytest.raises(ValueError, match="saved_tensors_hooks are on"), around():
            fpipe.linearize(smooth, PARAMS[0], BATCH[0])


def smooth(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def test_the_ambient_key_sees_both_flags_of_einsum(monkeypatch: pytest.MonkeyPatch):
    einsum: Any = torch.backends.opt_einsum
    plain = ambient_key()
    monkeypatch.setattr(einsum, "enabled", not einsum.enabled)
    assert ambient_key() != plain
    monkeypatch.undo()
    vars(einsum).pop("enabled", None)
    monkeypatch.setattr(einsum.m, "enabled", not einsum.enabled)
    assert ambient_key() != plain
    monkeypatch.undo()
    assert ambient_key() == plain


PARAMS, BATCH = ({"w": torch.randn(4, 4)},), (torch.randn(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize("trace", [True, False])
def test_autocast_applies_to_the_state(trace: bool):
    def remember(p: Any, x: Tensor, *, state: dict[str, Tensor]) -> Any:
        return smooth(p, x), {"m": state["m"] + (x.t() @ x).float()}

    model = fpipe.from_functions([remember], squares)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    state = ({"m": torch.zeros(4, 4)},)
    with torch.autocast("cpu", torch.bfloat16):
        result = fpipe.build(program, model, trace=trace)(PARAMS, BATCH, state=state)
        expected = fpipe.reference(model, PARAMS, BATCH, microbatches=2, state=state)
    plain = fpipe.reference(model, PARAMS, BATCH, microbatches=2, state=state)
    assert torch.equal(result.state[0]["m"], expected.state[0]["m"])
    assert not torch.equal(result.state[0]["m"], plain.state[0]["m"])


def test_detect_anomaly_finds_nan():
    _, step = built(lambda p, x: torch.log(x @ p["w"] - 100))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled|Error detected in")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
            step(PARAMS, BATCH)


def test_a_denormal_constant_follows_the_flush_setting():
    """Used to bake the constant as a tensor: 0 for good if torch flushed denormals in the first run."""
    model, step = built(lambda p, x: smooth(p, x) * 1e-40 * 1e30)
    try:
        for flushes in (True, False):
            assert torch.set_flush_denormal(flushes)
            result = step(PARAMS, BATCH)
            assert has_equal_bits(result, fpipe.reference(model, PARAMS, BATCH, microbatches=2))
            assert (result.outputs == 0).all() == flushes
    finally:
        torch.set_flush_denormal(False)


# What a function is.


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_changed_forward_is_traced_again(monkeypatch: pytest.MonkeyPatch):
    model, params, _ = fpipe.from_sequential(nn.Sequential(nn.Linear(4, 4), Doubling()), stages=1, loss=squares)
    program = fpipe.program(model)
    fpipe.build(program, model)(params, BATCH)
    monkeypatch.setattr(Doubling, "forward", lambda self, x: x * 3)
    assert has_equal_bits(fpipe.build(program, model)(params, BATCH), fpipe.reference(model, params, BATCH))


@pytest.mark.usefixtures("small_heap")
def test_a_function_that_closes_over_itself_is_collected():
    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ p["w"] if callable(stage) else x

    built(stage)[1](PARAMS, BATCH)
    stage_ref = weakref.ref(stage)
    stage = None
    gc.collect()
    assert stage_ref() is None


# What changes each step.


def test_a_number_that_changes_each_step_warns_once():
    _, step = built(lambda p, x: torch.tanh(x["x"] @ p["w"]) * x["scale"][0])
    x, target = BATCH
    messages: list[str] = []
    for k in range(12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(PARAMS, ({"x": x, "scale": (k / 8,)}, target))
        messages += [str(warning.message) for warning in caught]
    assert len(messages) == 1
    assert messages[0].startswith(
        "this step was traced again 8 times, since each step was handed something else: last time "
        "batch[0]['scale'][0] was 0.875 and is 1.0. Hand in a number that changes as a 0-d tensor"
    )


def test_a_batch_that_changes_its_shape_is_named():
    def count_in_python(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return smooth(p, x) / int(x.shape[0])

    _, step = built(count_in_python)
    # From the third on they are traced when they have come back.
    batches = [(torch.randn(2 * rows, 4),) * 2 for rows in range(2, 11) for _ in range(signature.TRACED_VISIT)]
    for batch in batches[:-1]:
        step(PARAMS, batch)
    with pytest.warns(UserWarning, match=r"last time batch\[0\] was float32\[18, 4\] .* and is float32\[20, 4\]"):
        step(PARAMS, batches[-1])


def test_a_slow_trace_of_another_row_count_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Used to take twelve seconds for the last batch of an epoch without a message."""
    monkeypatch.setattr(signature, "_SLOW_TRACE", 0)
    model = fpipe.from_functions([lambda p, x: x * p["w"]], lambda y, t: (y - t).square().mean())
    step = fpipe.build(fpipe.program(model), model)
    for rows in (16, 16, 13, 7, 16):
        step(({"w": torch.tensor(2.0)},), (torch.ones(rows, 3), torch.ones(rows, 3)))
    (record,) = [record for record in caplog.records if record.name == "fpipe.runtimes.lowering.signature"]
    assert record.rank == 0
    message = record.getMessage()
    assert "batch[0] was float32[16, 3] with strides [3, 1] on cpu and is float32[13, 3]" in message
    assert message.endswith("(dimension 0).")


def test_sizes_that_cannot_share_a_trace_are_said_to_run_under_autograd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(signature, "_SLOW_TRACE", 0)
    _, step = built(lambda p, x: smooth(p, x) / int(x.shape[0]))
    for rows in (8, 6, 5):
        step(PARAMS, (torch.ones(rows, 4), torch.ones(rows, 4)))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "(dimension 0). Sizes cannot share a trace here: further ones run under autograd until" in message


def test_equal_keys_of_params_keep_their_types():
    model = fpipe.from_functions([lambda p, x: x @ p[1]], loss=squares)
    step = fpipe.build(fpipe.program(model), model)
    for key in (1, True, 1.0):
        grads = step(({key: torch.randn(4, 4)},), BATCH).grads
        assert [repr(name) for name in grads[0]] == [repr(key)]


def test_threads_that_start_together_trace_once(traced: list[str]):
    built(lambda p, x: smooth(p, x))[1](PARAMS, BATCH)  # the loss is traced for good
    traced.clear()
    built(lambda p, x: smooth(p, x))[1](PARAMS, BATCH)
    once = len(traced)
    traced.clear()
    _, step = built(lambda p, x: smooth(p, x))
    results: list[fpipe.Result] = []
    threads = [threading.Thread(target=lambda: results.append(step(PARAMS, BATCH))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traced) == once
    assert all(has_equal_bits(result, results[0]) for result in results)


def arithmetic(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x * 2 + 1) @ p["w"] / 3


def test_a_step_on_tensors_without_data_leaves_no_trace():
    """Used to fail under FakeTensorMode, which refuses the real constants of a trace, and to leave the stage untraced
    for later steps on data. On meta, a warning said that all traces end."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, step = built(arithmetic, arithmetic)
    params, batch = tuple({"w": torch.randn(4, 4)} for _ in range(2)), (torch.randn(6, 4), torch.randn(6, 4))
    with FakeTensorMode() as mode:
        fakes = tree_map(mode.from_tensor, (params, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with mode:
                assert type(step(*fakes).grads[0]["w"]) is type(fakes[1][0])
            assert step(*tree_map(lambda leaf: leaf.to("meta"), (params, batch))).loss.is_meta
            assert has_equal_bits(step(params, batch), fpipe.reference(model, params, batch, microbatches=2))
