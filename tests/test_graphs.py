"""Steps of one graph refuse options and ops in one sentence each, and go on behind an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.meaning.optimizers.rules import refuse_uncapturable_rule
from tests.fake_accelerator import COMPILER
from tests.fake_accelerator.device_processes import fixture_of
from tests.fake_accelerator.graph_scenarios import DEVICE, GPIPE, batches_of, on_device
from tests.fake_accelerator.model_graph_scenarios import MODEL_GRAPH_SCENARIOS
from tests.fake_accelerator.scenarios import WIDTH, squares
from tests.processes import Processes

pytestmark = pytest.mark.timeout(func_only=True)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
Forward = Callable[[Any, Tensor], Tensor]


processes = fixture_of(1)


def scale(p: Any, x: Tensor) -> Tensor:
    return x * p["w"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"runtime": "threads"}, "graph=True is of runtime='local' or 'distributed'; found 'threads'."),
        ({"trace": False}, "graph=True captures traces: say trace=True."),
        ({"record": True}, "record=True times ops one by one, and a graph has none: profile it by torch.profiler."),
        (
            {"check_finite": True},
            "check_finite=True reads each value, which a graph cannot: leave graph= or check_finite= out.",
        ),
        ({}, "graph=True needs an accelerator, and torch finds none."),
    ],
)
def test_build_refuses(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    model = fpipe.from_functions([scale], squares)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fpipe.build(fpipe.program(model), model, **{"graph": True, **options})


def read_number(p: Any, x: Tensor) -> Tensor:
    y = x * p["w"]
    return y * y.sum().item()


def count_mask(p: Any, x: Tensor) -> Tensor:
    return (x * p["w"]).index_put((x[:, 0] > 0,), torch.zeros(WIDTH, device=x.device))


def invert(p: Any, x: Tensor) -> Tensor:
    return x @ torch.linalg.inv(p["w"].diag())


def step_of(*forwards: Forward, pipeline: fpipe.Transform = GPIPE, **options: Any) -> tuple[fpipe.Step, Any, Any]:
    model = fpipe.from_functions([*forwards], squares)
    program = pipeline(fpipe.program(model))
    params = on_device(tuple({"w": torch.full((WIDTH,), 0.5)} for _ in forwards))
    return fpipe.build(program, model, graph=True, audit="never", **options), program, params


def run_step(*forwards: Forward, pipeline: fpipe.Transform = GPIPE, host: str = "", lr: Any = None) -> None:
    step, program, params = step_of(*forwards, pipeline=pipeline)
    batch = batches_of(1)[0]
    if host == "batch":
        batch = tuple(tensor.cpu() for tensor in batch)
    if host == "both":
        params, batch = fpipe.tree.tree_map(Tensor.cpu, (params, batch))
    step(params, batch, **({} if lr is None else {"opt": fpipe.optimizer_state(program, params), "lr": lr}))


def updates_by(rule: str, **settings: Any) -> fpipe.Transform:
    return fpipe.chain(GPIPE, fpipe.update(rule, **settings))


OFFLOADING = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(1), fpipe.offload(), fpipe.merge())
REFUSED_STEPS: dict[str, tuple[Callable[[], None], str]] = {
    "a number read": (
        lambda: run_step(scale, read_number),
        "graph=True captures traces, and this step cannot be traced: stage 1 (read_number): "
        "DataDependentOutputException: aten._local_scalar_dense.default",
    ),
    "a mask": (
        lambda: run_step(scale, count_mask),
        "graph=True cannot capture aten.index_put.default, which counts where a mask is true; take torch.where, in "
        "1F0: stage 1 (count_mask), microbatch 0, rank 0.",
    ),
    "an inverse": (
        lambda: run_step(invert),
        "graph=True cannot capture aten._linalg_check_errors.default, which reads on the host whether a matrix is "
        "regular; call torch.linalg's .._ex function, in 0F0: stage 0 (invert), microbatch 0, rank 0.",
    ),
    "tensors on the CPU": (
        lambda: run_step(scale, host="both"),
        "graph=True needs an accelerator, and params[0] is on the cpu: move it.",
    ),
    "offloading": (
        lambda: run_step(scale, pipeline=OFFLOADING),
        "graph=True keeps all values on the device, and OFFLOAD(res[0,0]@host) is a copy: leave offload() out.",
    ),
    "a rule that reads its count": (
        lambda: run_step(scale, pipeline=updates_by("Adagrad"), lr=0.1),
        "graph=True cannot capture Adagrad, which looks at its step count; take AdamW, say.",
    ),
    "a first step of another kind": (
        lambda: run_step(scale, pipeline=updates_by("SGD", momentum=0.9, dampening=0.1), lr=0.1),
        "graph=True cannot capture SGD with dampening, which looks at its step count; take AdamW, say.",
    ),
    "a rate on the host": (
        lambda: run_step(scale, pipeline=updates_by("RMSprop", foreach=False), lr=0.1),
        "graph=True: torch's RMSprop without foreach reads lr on the host; set it by update('RMSprop', lr=..).",
    ),
    "another number": (
        lambda: run_step(scale, pipeline=updates_by("AdamW"), lr={"lr": 0.1, "weight_decay": 0.1}),
        "graph=True takes a learning rate alone as lr=; set the other numbers by update(..).",
    ),
}


def test_a_rate_that_torch_reads_is_refused():
    with pytest.raises(ValueError, match="torch's Muon reads lr on the host; set it by update"):
        refuse_uncapturable_rule("Muon", (), rate_is_tensor=True)
    refuse_uncapturable_rule("Muon", (("lr", 0.1),), rate_is_tensor=False)


def error_of(rank: int, name: str) -> str:
    try:
        REFUSED_STEPS[name][0]()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@needs_compiler
@pytest.mark.parametrize("name", REFUSED_STEPS)
def test_a_step_refuses(processes: Processes, name: str):
    assert processes.run(error_of, name) == [REFUSED_STEPS[name][1]]


def profile_replays(rank: int) -> list[int]:
    """Count the ranges of an op and of graphs in five steps; the first two run op by op."""
    model = fpipe.from_functions([scale], squares)
    step = fpipe.build(GPIPE(fpipe.program(model)), model, graph=True, audit="never")
    params = ({"w": on_device(torch.ones(WIDTH))},)
    with torch.profiler.profile() as profile:
        for batch in batches_of(5):
            step(params, batch)
    names = [event.name for event in profile.events() or ()]
    return [names.count("fpipe 0F0"), names.count("fpipe graph")]


@needs_compiler
def test_a_replay_is_a_range_to_profilers(processes: Processes):
    # The definition, two steps without a graph and the capture run the op; the third step and later ones replay it.
    assert processes.run(profile_replays) == [[4, 3]]


FACTORS = [2.0]


@torch.library.custom_op("fpipe_tests::times_factor", mutates_args=())
def times_factor(x: Tensor) -> Tensor:
    return x * FACTORS[0]


times_factor.register_fake(torch.empty_like)
times_factor.register_autograd(lambda context, grad: times_factor(grad))


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return times_factor(x)


def change_what_a_kernel_read(rank: int, cut_net: bool, donate: bool) -> list[Any]:
    """Change a number that only the kernels of a graph have kept; return the step's error with its notes."""
    FACTORS[0] = 2.0
    pipeline = fpipe.chain(GPIPE, fpipe.update("SGD"))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled()).to(DEVICE)
    if cut_net:
        model, params, _ = fpipe.from_module(net, stages=1, batch=batches_of(1)[0], loss=squares)
    else:
        model, params, _ = fpipe.from_sequential(net, stages=1, loss=squares)
    program = pipeline(fpipe.program(model))
    step = fpipe.build(program, model, graph=True, audit="always", donate=donate)
    opt, batches = fpipe.optimizer_state(program, params), batches_of(5)
    for batch in batches[:-1]:
        result = step(params, batch, opt=opt, lr=0.01)
        params, opt = result.params, result.opt
    FACTORS[0] = 3.0
    with pytest.raises(fpipe.StepChanged) as caught:
        step(params, batches[-1], opt=opt, lr=0.01)
    return [str(caught.value), len(getattr(caught.value, "__notes__", ()))]


@needs_compiler
@pytest.mark.parametrize("cut_net", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_an_audit_finds_a_replay_that_computes_otherwise(processes: Processes, cut_net: bool, donate: bool):
    # All kernels agree with the definition, but those that a graph has captured.
    ((message, notes),) = processes.run(change_what_a_kernel_read, cut_net, donate)
    assert re.match(r"the graph replays \['loss'\] off by up to .* or say graph=False\.$", message)
    assert notes == donate


def run_model_scenario(rank: int, name: str) -> list[str]:
    return [*MODEL_GRAPH_SCENARIOS[name]()]


@needs_compiler
@pytest.mark.parametrize("name", MODEL_GRAPH_SCENARIOS)
def test_models_and_options_in_a_graph(processes: Processes, name: str):
    assert processes.run(run_model_scenario, name) == [[]]
