"""`profile` measures seconds and bytes and changes nothing; `estimate` counts operations as torch does."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe.measuring.timeline_costs import op_seconds, transfer_seconds
from tests.toys import Toy

M, ROWS, WIDTH = 4, 8, 16


def net() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def make_case(stages: int = 3) -> tuple[fpipe.Model, Any, Any, Any]:
    model, params, state = fpipe.from_sequential(net(), stages=stages, loss=nn.functional.mse_loss)
    return model, params, state, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))


def test_a_profile_finds_the_slow_stage_in_every_kind():
    def quick(params: Any, x: Any) -> Any:
        return x * params["w"]

    def slow(params: Any, x: Any) -> Any:
        for _ in range(10):
            x = torch.tanh(x @ params["w"])
        return x

    model = fpipe.from_functions([quick, slow, quick], loss=nn.functional.mse_loss)
    params = {"w": torch.ones(256)}, {"w": torch.eye(256)}, {"w": torch.ones(256)}
    batch = torch.ones(64, 256), torch.ones(64, 256)
    costs: Any = fpipe.profile(fpipe.split(2)(fpipe.program(model)), model, params, batch)
    for seconds in (costs.forward, costs.backward_input, costs.backward_weight, costs.recompute, costs.backward):
        assert max(seconds) == seconds[1]


SHAPES = {
    "plain": fpipe.identity(),
    "ZB-H1": fpipe.schedules.zb_h1(2),
    "freed": fpipe.chain(fpipe.checkpoint(), fpipe.schedules.gpipe(2), fpipe.communicate(), fpipe.free()),
}


@pytest.mark.parametrize(("shape", "runtime"), [*((shape, "local") for shape in SHAPES), ("ZB-H1", "threads")])
def test_a_profile_measures_every_kind_under_any_program(shape: str, runtime: Any):
    model, params, state, batch = make_case(2)
    program = fpipe.chain(fpipe.split(M), fpipe.merge(), SHAPES[shape])(fpipe.program(model))
    costs = fpipe.profile(program, model, params, batch, state=state, repeats=1, runtime=runtime)
    kinds: Any = (costs.forward, costs.backward_input, costs.backward_weight, costs.recompute, costs.backward)
    assert [len(seconds) for seconds in kinds] == [2] * 5
    assert all(second > 0 for seconds in kinds for second in seconds)


@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_profiled_bytes_predict_the_recorded_peak(runtime: Any):
    model, params, state, batch = make_case()
    start = fpipe.chain(fpipe.split(M), fpipe.merge())(fpipe.program(model))
    transforms = (
        fpipe.schedules.gpipe(3),
        fpipe.schedules.zb_h1(3),
        fpipe.chain(fpipe.schedules.one_f_one_b(3), fpipe.communicate(), fpipe.free()),
    )
    profiled = fpipe.schedules.one_f_one_b(3)(start)
    costs = fpipe.profile(profiled, model, params, batch, state=state, repeats=1, runtime=runtime)
    for transform in transforms:
        program = transform(start)
        peak = fpipe.build(program, model, record=True)(params, batch, state=state).timeline.peak
        assert fpipe.simulate(program, costs).peak == peak


def test_a_profile_of_an_evaluation_has_forwards_only():
    model, params, state, batch = make_case(2)
    program = fpipe.chain(fpipe.split(M), fpipe.forward_only())(fpipe.program(model))
    costs: Any = fpipe.profile(program, model, params, batch, state=state, repeats=1)
    assert all(costs.forward)
    assert not any(costs.backward_input)


def test_progress_is_reported_after_each_run():
    model, params, state, batch = make_case(2)
    calls: list[tuple[int, int]] = []
    program = fpipe.split(2)(fpipe.program(model))
    fpipe.profile(program, model, params, batch, state=state, repeats=2, progress=lambda *counts: calls.append(counts))
    assert calls == [(done, 6) for done in range(7)]


def test_costs_of_a_stage_that_cannot_be_traced_come_without_bytes():
    def branching(params: Any, x: torch.Tensor) -> torch.Tensor:
        return x * params["w"] if x.sum() > 0 else x

    model = fpipe.from_functions([branching], loss=nn.functional.mse_loss)
    params, batch = ({"w": torch.ones(WIDTH)},), (torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH))
    with (
        pytest.warns(UserWarning, match="a stage runs under autograd"),
        pytest.warns(UserWarning, match="these costs have no bytes: "),
    ):
        costs: Any = fpipe.profile(fpipe.program(model), model, params, batch, repeats=1)
    assert costs.bytes is None
    assert costs.forward[0] > 0


@pytest.mark.parametrize("repeats", [0, -1])
def test_invalid_repeats_are_refused(repeats: Any):
    model, params, state, batch = make_case(2)
    with pytest.raises(ValueError, match="repeats is how often each op is timed, at least 1; found"):
        fpipe.profile(fpipe.program(model), model, params, batch, state=state, repeats=repeats)


@torch.library.custom_op("fpipe_tests::nap", mutates_args=())
def nap(x: Tensor, seconds: float) -> Tensor:
    """Sleep for some seconds, so that the time of the op does not depend on the machine."""
    time.sleep(seconds)
    return x.clone()


nap.register_fake(lambda x, seconds: torch.empty_like(x))
nap.register_autograd(
    lambda ctx, dy: (nap(dy, 2 * ctx.seconds), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "seconds", inputs[1]),
)


def napping(schedule: str, seconds: tuple[float, ...]) -> tuple[fpipe.Program, fpipe.Model, Any, Any]:
    def stage(nap_seconds: float) -> Any:
        return lambda p, x: nap(x @ p["w"], nap_seconds)

    model = fpipe.from_functions([stage(nap_seconds) for nap_seconds in seconds], nn.functional.mse_loss)
    params = tuple({"w": torch.eye(4)} for _ in seconds)
    pipeline = fpipe.chain(fpipe.split(M), fpipe.schedules.get(schedule)(2), fpipe.merge())
    return pipeline(fpipe.program(model)), model, params, (torch.ones(ROWS, 4), torch.ones(ROWS, 4))


NAPS = 0.004, 0.008


def test_ranks_that_run_together_are_timed_without_their_waits():
    """Rank 0 waits for the slower rank 1 about as long as it works."""
    costs: Any = fpipe.profile(*napping("gpipe", NAPS), repeats=2, runtime="threads")
    for seconds, lower_bounds in zip(
        (costs.forward, costs.backward), (NAPS, [2 * nap_seconds for nap_seconds in NAPS]), strict=True
    ):
        assert all(lower_bound <= measured for measured, lower_bound in zip(seconds, lower_bounds, strict=True))
    assert costs.forward[0] < costs.forward[1]
    assert costs.backward[0] < costs.backward[1]
    assert 0 < costs.send + costs.transfer + costs.receive < min(costs.forward)


COSTS = fpipe.Costs([1, 2, 3, 1], [3, 1, 2, 2], [1, 4, 1, 2], transfer=0.5, send=0.25, receive=0.125)


@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_zb", "zbv", "gpipe"])
def test_op_seconds_of_a_simulation_are_its_costs(schedule: str):
    program = fpipe.chain(fpipe.split(4), fpipe.schedules.get(schedule)(2), fpipe.merge())(fpipe.program(4))
    timeline = fpipe.simulate(fpipe.communicate()(program), COSTS)
    expected = {op.cell: COSTS.seconds(op) for op in program.ops if op.kind in "FBIW"}
    assert {op.cell: seconds for op, seconds in op_seconds(timeline)} == expected
    assert transfer_seconds([timeline]) == (0.25, 0.5, 0.125)


def test_op_seconds_exclude_the_waits_of_receives():
    """1F0 counts 3 s, the SPLIT after it and half a second until 1F1, but not the wait of RECV. The time of SENDs
    counts for neither 0F0 nor 0F1."""
    program = fpipe.communicate()(fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(2)))
    ops = {op.cell if op.kind in "FB" else str(op.writes[0]): op for op in program.ops}
    rows = [("0F0", 0, 2), ("y[0,0]>1", 2, 3), ("0F1", 3, 8.5), ("y[0,1]>1", 8.5, 9)]
    rows += [("y[0,0]@1", 3.5, 3.5), ("1F0", 3.5, 6.5), ("t[1,1]", 6.5, 7), ("y[0,1]@1", 9.5, 9.5), ("1F1", 10, 12)]
    columns = (tuple(ops[name] for name, *_ in rows), tuple(s for _, s, _ in rows), tuple(e for *_, e in rows))
    timeline = fpipe.Timeline(*columns, 2, (0, 0), (0, 0))
    assert {op.cell: seconds for op, seconds in op_seconds(timeline)} == {"0F0": 2, "0F1": 5.5, "1F0": 4, "1F1": 2}
    assert transfer_seconds([timeline]) == (0.75, 0.5, 0)


def attention(module: Any, x: Tensor) -> Tensor:
    q, k, v = (
        projection.view(*projection.shape[:2], 2, 4).transpose(1, 2) for projection in module.into(x).chunk(3, -1)
    )
    return module.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), (4, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3)), (4, 3, 9, 9)),
    "attention": (
        lambda: nn.Sequential(nn.Linear(8, 8), Toy(attention, into=nn.Linear(8, 24), out=nn.Linear(8, 8))),
        (4, 6, 8),
    ),
}


def count_by_torch(net: nn.Module, x: Tensor) -> tuple[int, int]:
    """Count the operations of a forward and a backward on meta, where attention has no fused kernel."""
    with FlopCounterMode(display=False) as forward:
        y = net(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", NETS)
def test_estimated_operations_are_those_that_torch_counts(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fpipe.graphs.compiling.add._same_bits", None)  # tried sums of 4096 x 4096 on real memory
    make_net, shape = NETS[name]
    x, microbatch = torch.empty(shape, device="meta"), torch.empty(1, *shape[1:], device="meta")
    net = make_net().to("meta")
    model, params, state = fpipe.from_module(net, 2, loss=lambda y, t: y.sum(), batch=(x, x))
    program = fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model))
    costs = fpipe.estimate(program, model, params, (x, x), flops=1, state=state or None)
    stages: Any = costs
    forward, backward = count_by_torch(net, microbatch)
    assert sum(stages.forward) == forward
    scores = 2 * 2 * 6 * 6 * 4 if name == "attention" else 0  # the kernel of a CPU computes them once more
    assert sum(stages.backward) == backward + scores
    assert [i + w for i, w in zip(stages.backward_input, stages.backward_weight, strict=True)] == stages.backward
    assert all(
        recompute_ops <= forward_ops
        for recompute_ops, forward_ops in zip(stages.recompute, stages.forward, strict=True)
    )
    twice = fpipe.estimate(program, model, params, (x, x), flops=2, state=state or None)
    assert twice.forward == [seconds / 2 for seconds in stages.forward]


@pytest.mark.parametrize("flops", [0, float("nan")])
def test_an_invalid_rate_is_refused(flops: Any):
    model, params, _ = fpipe.from_sequential(nn.Sequential(nn.Linear(2, 2)), 1, loss=nn.functional.mse_loss)
    batch = torch.ones(2, 2), torch.ones(2, 2)
    with pytest.raises(ValueError, match="flops is how many operations a rank does a second, such as 400e12; found"):
        fpipe.estimate(fpipe.program(model), model, params, batch, flops=flops)
