"""checkpoint(grain="layer") recomputes one layer at a time in the backward, from the input of each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from examples import demo
from tests.refusals import refusals
from tests.test_traces import Peak, attention, equal_bits

M = 4
LAYERS = fpipe.checkpoint(grain="layer")
HALVES = fpipe.split_backward()
aten = torch.ops.aten


def perceptron(layers: int = 8, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)) for _ in range(layers))
    )


def cut_net(net: nn.Sequential, stages: int, rows: int = 32, width: int = 64) -> tuple[fpipe.Model, Any, Any, Any]:
    model, params, state = fpipe.from_sequential(net, stages=stages, loss=nn.functional.mse_loss)
    return model, params, state, (torch.randn(rows, width), torch.randn(rows, width))


def program_of(model: fpipe.Model, *transforms: Any, ranks: int = 1, m: int = M) -> fpipe.Program:
    schedule = fpipe.schedules.gpipe(ranks)
    return fpipe.chain(fpipe.split(m), *transforms, schedule, fpipe.merge(outputs=False))(fpipe.program(model))


TRANSFORMS = {
    "B": (LAYERS,),
    "I W": (LAYERS, HALVES),
    "some": (fpipe.checkpoint(lambda s, m: (s + m) % 2 == 0, "layer"),),
}


@pytest.mark.crossed
@pytest.mark.parametrize("steps", TRANSFORMS)
@pytest.mark.parametrize("trace", [True, False])
def test_layer_checkpoints_are_bitwise_and_hold_the_predicted_bytes(steps: str, trace: bool):
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.Dropout(0.3)]
    net = nn.Sequential(*layers, nn.Unflatten(1, (4, 16)), attention(16), nn.Flatten(), nn.Linear(64, 64))
    model, params, state, batch = cut_net(net, 3)
    program = program_of(model, *TRANSFORMS[steps], ranks=3)
    result = fpipe.build(program, model, trace=trace, record=True)(params, batch, state=state, key=7)
    assert equal_bits(result, fpipe.reference(model, params, batch, microbatches=M, state=state, key=7))
    if trace:
        sizes = fpipe.sizes(program, model, params, batch, state=state)
        assert result.timeline.peak == sizes.peak == fpipe.simulate(program, fpipe.Costs(bytes=sizes)).peak


def peak_mib(model: fpipe.Model, params: Any, batch: Any, *transforms: Any, m: int) -> float:
    """Return the peak MiB alive in a step, temporaries of ops included."""
    step = fpipe.build(program_of(model, *transforms, m=m), model, audit="never")
    step(params, batch)
    with Peak([batch, params]) as peak:
        step(params, batch)
    return peak.peak / 2**20


@pytest.mark.parametrize("halves", [(), (HALVES,)], ids=["B", "I W"])
def test_the_residuals_of_one_layer_at_a_time_are_alive(halves: tuple[Any, ...]):
    model, params, _, batch = cut_net(perceptron(), 1, rows=2048)
    policies = ((), (fpipe.checkpoint(),), (LAYERS,))
    never, stage, layer = (peak_mib(model, params, batch, *policy, *halves, m=1) for policy in policies)
    assert stage > 0.95 * never  # R of a whole stage holds its residuals all at once
    assert layer <= (1 if halves else 0.6) * never  # W keeps the input and cotangent of each layer, recomputed or not


@pytest.mark.parametrize(("grain", "products"), [("stage", 15), ("layer", 9)])
def test_a_stage_is_recomputed_once_for_each_microbatch(grain: Any, products: int):
    """The first forward has 16 products; recompute leaves out those no backward reads.

    They are the last of each stage, or of each layer, but for the one before the loss. The halves of a backward
    recompute nothing twice.
    """
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(8))
    model, params, _, batch = cut_net(nn.Sequential(*blocks), 2)

    def flops(*transforms: Any) -> int:
        step = fpipe.build(program_of(model, *transforms), model, audit="never")
        step(params, batch)
        with FlopCounterMode(display=False) as counter:
            step(params, batch)
        return counter.get_total_flops()

    recompute = fpipe.checkpoint(grain=grain)
    assert flops(recompute) - flops() == flops(recompute, HALVES) - flops(HALVES) == products * 2 * 32 * 64 * 64


def test_the_page_quotes_the_share_of_bytes_that_recomputing_holds():
    """At I the outputs of R and the reads of W are alive at once; outputs of the program are alive under any policy."""
    sizes = demo.Sizes()
    model, params, _ = fpipe.from_sequential(demo.gpt(sizes), stages=4, loss=demo.cross_entropy)
    batch = tuple(torch.empty(64, sizes.context, dtype=torch.long, device="meta") for _ in range(2))

    def peak_bytes(policy: str, halves: Any, outputs: bool) -> int:
        steps = (fpipe.checkpoint(policy), halves, fpipe.schedules.gpipe(4), fpipe.merge(outputs=outputs))
        program = fpipe.chain(fpipe.split(8), *steps)(fpipe.program(model))
        return sum(fpipe.sizes(program, model, params, batch).peak)

    cases = [(halves, outputs) for outputs in (False, True) for halves in (fpipe.identity(), HALVES)]
    shares = [peak_bytes("always", *case) / peak_bytes("never", *case) for case in cases]
    assert [f"{share:.2f}" for share in shares] == ["0.19", "0.24", "0.23", "0.27"]
    page = (Path(__file__).parents[1] / "docs/transforms.md").read_text()
    assert "| outputs dropped | 0.19 | 0.24 |\n| outputs kept | 0.23 | 0.27 |" in page


def test_layer_checkpoints_write_no_r_and_commute_with_split_backward():
    base = fpipe.split(2)(fpipe.program(3))
    program = fpipe.chain(LAYERS, HALVES)(base)
    assert not any(op.kind == "R" for op in program.ops)
    assert {op.kind for op in program.ops if op.options} == {"F", "I", "SPLIT"}
    assert program == fpipe.chain(HALVES, LAYERS)(base) == LAYERS(program) == fpipe.checkpoint()(program)
    assert fpipe.merge_backward()(program) == LAYERS(base)
    assert fpipe.forward_only()(program) == fpipe.forward_only()(base)
    assert fpipe.Program.parse(str(program)) == program
    recomputed = fpipe.checkpoint()(base)
    assert LAYERS(recomputed) == recomputed


def test_a_recomputing_backward_takes_the_time_of_both():
    costs = fpipe.Costs(1, 2, 3, recompute=10)
    checkpoint_one = fpipe.checkpoint(lambda stage, microbatch: microbatch == 1, "layer")
    base = fpipe.split(3)(fpipe.program(1))
    assert fpipe.simulate(base, costs).makespan == 3 * 6
    assert fpipe.simulate(checkpoint_one(base), costs).makespan == 3 * 6 + 10
    assert fpipe.simulate(HALVES(checkpoint_one(base)), costs).makespan == 3 * 6 + 10


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save matrix products, as torch's documentation suggests."""
    saved = op in (aten.addmm.default, aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def save_all_but(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save every op but two. Each saved op is listed by name: a program of four stages had seven million letters."""
    is_recomputed = op in (aten.relu.default, aten.native_layer_norm.default)
    return CheckpointPolicy.PREFER_RECOMPUTE if is_recomputed else CheckpointPolicy.PREFER_SAVE


SAVES = [[aten.addmm.default, aten.mm.default], policy, save_all_but]


@pytest.mark.parametrize("save", SAVES, ids=["list", "policy", "all but"])
def test_saved_ops_are_not_recomputed(save: Any):
    model, params, _, batch = cut_net(perceptron(), 2)
    program = program_of(model, fpipe.checkpoint(grain="layer", save=save))
    step = fpipe.build(program, model, record=True)
    plain = fpipe.build(program_of(model), model, audit="never")
    plain(params, batch)
    with FlopCounterMode(display=False) as never:
        plain(params, batch)
    assert equal_bits(step(params, batch), fpipe.reference(model, params, batch, microbatches=M))
    with FlopCounterMode(display=False) as counter:
        result = step(params, batch)
    assert counter.get_total_flops() == never.get_total_flops()
    bare = fpipe.sizes(program_of(model, LAYERS), model, params, batch)
    assert bare.peak < result.timeline.peak < fpipe.sizes(program_of(model), model, params, batch).peak


def test_a_kept_routing_decision_is_made_once():
    def experts(params: Any, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x @ params["router"], -1)
        weight, route = fpipe.keep(scores.topk(2))
        gates = torch.zeros_like(scores).scatter(-1, route, weight)
        return torch.einsum("nd,edf,ne->nf", torch.tanh(x), params["experts"], gates)

    model = fpipe.from_functions([experts] * 2, loss=nn.functional.mse_loss)
    params = tuple({"router": torch.randn(16, 4), "experts": torch.randn(4, 16, 16)} for _ in range(2))
    batch = torch.randn(8, 16), torch.randn(8, 16)
    program = program_of(model, LAYERS)
    result = fpipe.build(program, model)(params, batch)
    assert equal_bits(result, fpipe.reference(model, params, batch, microbatches=M))
    residual_bytes = fpipe.sizes(program, model, params, batch).bytes[fpipe.Value("res", 0, 0)]
    assert residual_bytes == 2 * 2 * (
        4 + 8
    )  # two rows of two weights (4 bytes) and two expert indices (8 bytes); the batch belongs to the caller


def test_keep_and_boundary_work_in_a_loss_function():
    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x, target = batch
        for w in params:
            x = fpipe.boundary(fpipe.keep(torch.tanh(x @ w)).exp().sin())
        return nn.functional.mse_loss(x * 2, target)

    weights = [torch.randn(16, 16) for _ in range(2)]
    batch = torch.randn(8, 16), torch.randn(8, 16)
    model, params = fpipe.from_loss(loss_fn, weights, batch)
    program = program_of(model, LAYERS, m=1)
    assert equal_bits(fpipe.build(program, model)(params, batch), fpipe.reference(model, params, batch))
    sizes = fpipe.sizes(program, model, params, batch)
    assert sizes.bytes[fpipe.Value("res", 0, 0)] == 8 * 16 * 4  # the tanh


test_wrong_options_are_refused = refusals(
    globals(),
    """
fpipe.checkpoint(grain="layer", groups=[(0, 1)])
    ValueError: groups= is for grain='stage'
fpipe.checkpoint(save=[aten.mm.default])
    ValueError: save= is what a backward finds that computes its stage again
fpipe.checkpoint(grain="layer", save=[aten.mm])
    TypeError: an op is named with its overload, such as
fpipe.checkpoint(grain="layer", save=lambda ctx, op, x: True)
    TypeError: It is asked as policy(ctx, op), without tensors, since a program knows none.
fpipe.checkpoint(grain="layer", save=lambda ctx, op: "yes")
    TypeError: a policy answers with a torch.utils.
""",
)
