"""Ranks that capture their parts of a step as graphs: bits, orders, and errors, on the fake accelerator."""

from __future__ import annotations

import re
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe.runtimes.processes import captured_rank_step
from tests.fake_accelerator import COMPILER, Graph, capture_call
from tests.fake_accelerator.device_processes import fixture_of
from tests.fake_accelerator.graph_scenarios import STEPS
from tests.fake_accelerator.group import OrderedGroup
from tests.fake_accelerator.mutations import Wait, without_wait
from tests.fake_accelerator.process_graph_scenarios import PROCESS_GRAPH_SCENARIOS, batches_on
from tests.fake_accelerator.process_scenarios import mesh_of_two
from tests.fake_accelerator.scenarios import PARTS, WIDTH, net_of, pipeline_of, schedules, squares
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]


pair = fixture_of(2)


def run_scenario(rank: int, name: str) -> list[str]:
    return PROCESS_GRAPH_SCENARIOS[name](rank)


@pytest.mark.parametrize("name", PROCESS_GRAPH_SCENARIOS)
def test_replays_have_the_bits_of_autograd(pair: Processes, name: str):
    assert pair.run(run_scenario, name) == [[], []]


def build_graph(rank: int, **options: Any) -> tuple[fpipe.Step, Any, list[Any]]:
    device = torch.device("fake", rank)
    model, params, _ = fpipe.from_sequential(net_of(2).to(device), stages=2, loss=squares)
    program, batches = pipeline_of(schedules.gpipe(2))(fpipe.program(model)), batches_on(device)
    arguments: Any = {"mesh": mesh_of_two(), "example": (params, batches[0]), "graph": True, "audit": "never"}
    step = fpipe.build(program, model, runtime="distributed", **arguments, **options)
    return step, fpipe.local_params(program, params, rank), batches


def wait_for_rank_that_hangs(rank: int) -> str:
    """Let rank 1 come late to a replay, when rank 0 has given it up."""
    step, params, batches = build_graph(rank, timeout=1.0, check_batch="never")
    for batch in batches:
        step(params, batch)
    if rank == 1:
        time.sleep(3)
    with pytest.raises(fpipe.RankError) as caught:
        step(params, batches[0])
    return str(caught.value)


def test_a_rank_that_does_not_come_to_a_replay_is_named(pair: Processes):
    for message in pair.run(wait_for_rank_that_hangs):
        assert "rank 1 did not come to the end of the step in time" in message
        assert f"last seen after step {STEPS}" in message


NAPS = list[float]()


@torch.library.custom_op("fpipe_tests::doze", mutates_args=())
def doze(x: Tensor) -> Tensor:
    """Copy, and in a replay sleep for as long as the test says before it."""
    if torch.get_device_module("fake").is_current_stream_capturing():
        capture_call(lambda: time.sleep(NAPS.pop()) if NAPS else None)
    return x.clone()


doze.register_fake(torch.empty_like)
doze.register_autograd(lambda context, grad: grad)


def hang_in_a_replay(rank: int) -> str:
    """Let rank 1 sleep in the graph of its first forward."""
    device = torch.device("fake", rank)
    model = fpipe.from_functions([lambda p, x: doze(x) * p["w"]] * 2, squares)
    params = tuple({"w": torch.full((WIDTH,), 2.0, device=device)} for _ in range(2))
    program, batches = pipeline_of(schedules.gpipe(2))(fpipe.program(model)), batches_on(device)
    options: Any = {"mesh": mesh_of_two(), "example": (params, batches[0]), "graph": True, "audit": "never"}
    step = fpipe.build(program, model, runtime="distributed", timeout=1.0, check_batch="never", **options)
    local_params = fpipe.local_params(program, params, rank)
    for batch in batches:
        step(local_params, batch)
    NAPS.extend([3.0] * rank)
    with pytest.raises(fpipe.RankError) as caught:
        step(local_params, batches[0])
    return str(caught.value)


def test_a_rank_that_hangs_in_a_replay_is_named_with_its_place(pair: Processes):
    for message in pair.run(hang_in_a_replay):
        assert f"last seen in its 1F0, in the graph of step {STEPS + 1}" in message


def hang_on_the_device(rank: int) -> str:
    """Let the replays of rank 1 never come to their end, though its host has queued them."""
    step, params, batches = build_graph(rank, timeout=1.0, check_batch="never")
    for batch in batches:
        step(params, batch)
    endless = patch.object(captured_rank_step, "_ReplayWork", lambda event: SimpleNamespace(is_completed=bool))
    with endless if rank == 1 else nullcontext(), pytest.raises(fpipe.RankError) as caught:
        _ = [step(params, batch) for batch in batches]
    return str(caught.value)


def test_a_replay_without_an_end_is_no_step(pair: Processes):
    for message in pair.run(hang_on_the_device):
        assert "did not come to the end of the step in time" in message


def pass_different_keys(rank: int) -> str:
    """Draw by one key in all steps but the last, in which the ranks have different ones."""
    device = torch.device("fake", rank)
    model = fpipe.from_functions([lambda p, x: F.dropout(x * p["w"], 0.3)] * 2, squares)
    params = tuple({"w": torch.full((WIDTH,), 2.0, device=device)} for _ in range(2))
    program, batches = pipeline_of(schedules.gpipe(2))(fpipe.program(model)), batches_on(device)
    options: Any = {"mesh": mesh_of_two(), "example": (params, batches[0]), "graph": True, "audit": "never"}
    step = fpipe.build(program, model, runtime="distributed", **options)
    local_params, results, expected = fpipe.local_params(program, params, rank), list[Any](), list[Any]()
    for key, batch in enumerate(batches):
        results.append(step(local_params, batch, key=key).grads[rank]["w"])
        expected.append(fpipe.reference(model, params, batch, microbatches=PARTS, key=key).grads[rank]["w"])
    assert all(map(torch.equal, results, expected))
    with pytest.raises(fpipe.RankError) as caught:
        step(local_params, batches[0], key=100 + rank)
    return str(caught.value)


def test_headers_of_replays_have_the_key_of_the_step(pair: Processes):
    for message in pair.run(pass_different_keys):
        assert re.search("has key 10[01] in this step and rank [01] has key 10[01]", message)


def pass_keys_without(rank: int, function: str, call: str) -> bool:
    """Remove a call from the replays of ranks; return whether their headers still show that keys differ."""
    with without_wait(Wait("runtimes/processes/captured_rank_step.py", f"CapturedRankStep.{function}", call, 0)):
        try:
            return "has key 10" in pass_different_keys(rank)
        except BaseException:
            return False


@pytest.mark.parametrize(("function", "call"), [("begin_replay", "begin_replay"), ("end_replay", "check_header")])
def test_without_its_header_a_replay_accepts_other_keys(pair: Processes, function: str, call: str):
    assert pair.run(pass_keys_without, function, call) == [False, False]


def refuse_capture(rank: int, call: str) -> list[str]:
    """Let a call of rank 1 fail in every capture: both ranks go on without graphs, and say why."""
    step, params, batches = build_graph(rank)
    owner: Any = {"capture_begin": Graph, "send": OrderedGroup}[call]
    plain_call = getattr(owner, call)

    def refuse(*arguments: Any, **options: Any) -> Any:
        if call == "capture_begin" or torch.get_device_module("fake").is_current_stream_capturing():
            raise RuntimeError(f"this driver captures no {call}")
        return plain_call(*arguments, **options)

    patched = patch.object(owner, call, refuse if rank == 1 else plain_call)
    with patched, warnings.catch_warnings(record=True, action="always") as caught:
        _ = [step(params, batch) for batch in batches]
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("call", ["capture_begin", "send"])
def test_a_rank_that_cannot_capture_lets_all_run_plainly(pair: Processes, call: str):
    messages = [message for rank_messages in pair.run(refuse_capture, call) for message in rank_messages]
    assert 1 <= len(messages) <= 2  # the first rank that comes to a reason says it
    assert all(re.search(f"runs without a graph, .*this driver captures no {call}", message) for message in messages)


def move_donated_params(rank: int) -> str:
    device = torch.device("fake", rank)
    model, params, _ = fpipe.from_sequential(net_of(2).to(device), stages=2, loss=squares)
    pipeline = fpipe.chain(pipeline_of(schedules.gpipe(2)), fpipe.update("SGD"))
    program, batches = pipeline(fpipe.program(model)), batches_on(device)
    options: Any = {"mesh": mesh_of_two(), "example": (params, batches[0]), "graph": True, "donate": True}
    step = fpipe.build(program, model, runtime="distributed", audit="never", **options)
    params = fpipe.local_params(program, params, rank)
    opt = fpipe.optimizer_state(program, params)
    for batch in batches:
        result = step(params, batch, opt=opt, lr=0.1)
        params, opt = result.params, result.opt
    if rank == 0:
        params = fpipe.tree.tree_map(lambda leaf: leaf if leaf is None else leaf.clone(), params)
    with pytest.raises((ValueError, fpipe.RankError)) as caught:
        step(params, batches[0], opt=opt, lr=0.1)
    return str(caught.value)


def test_donated_parameters_stay_where_they_were_captured(pair: Processes):
    for message in pair.run(move_donated_params):
        assert "reads donated tensors where they were captured" in message


def send_by_gloo(rank: int) -> str:
    model, params, _ = fpipe.from_sequential(net_of(2), stages=2, loss=squares)
    program, batches = pipeline_of(schedules.gpipe(2))(fpipe.program(model)), batches_on(torch.device("cpu"))
    with pytest.raises(ValueError, match="this one sends by gloo") as caught:
        fpipe.build(program, model, runtime="distributed", example=(params, batches[0]), graph=True)
    return str(caught.value)


def test_messages_of_gloo_are_refused(pair: Processes):
    for message in pair.run(send_by_gloo):
        assert "graph=True needs a group that sends from the device" in message
