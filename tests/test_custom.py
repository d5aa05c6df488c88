"""Custom stages give the gradients of their rules."""

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.tree import leaves
from tests.refusals import refusals

Params = dict[str, Tensor]


def forward(params: Params, x: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    return torch.addmm(params["b"], x, params["w"].t()), (x,)


def backward_input(params: Params, residuals: tuple[Tensor], dy: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return dy @ params["w"], (*residuals, dy)


def backward_weight(params: Params, wres: tuple[Tensor, Tensor]) -> Params:
    x, dy = wres
    return {"w": dy.t() @ x, "b": dy.sum(0)}


def plain(params: Params, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, params["w"], params["b"])


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y.tanh() - target).square().mean()


CUSTOM = fpipe.custom_stage(forward, backward_input, backward_weight)
PARAMS = tuple({"w": torch.randn(4, 4), "b": torch.randn(4)} for _ in range(2))
BATCH = torch.randn(7, 4), torch.randn(7, 4)


def program(model: fpipe.Model, *steps) -> fpipe.Program:
    return fpipe.chain(fpipe.split(3), *steps, fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("steps", [(), (fpipe.split_backward(),), (fpipe.checkpoint(),)], ids=["B", "I W", "R B"])
def test_rules_equal_to_autograd_give_its_bits(steps, trace: bool):
    model = fpipe.from_functions([CUSTOM, CUSTOM], loss=loss)
    result = fpipe.build(program(model, *steps), model, trace=trace)(PARAMS, BATCH)
    expected = fpipe.reference(fpipe.from_functions([plain, plain], loss=loss), PARAMS, BATCH, microbatches=3)
    assert all(map(torch.equal, leaves((result.loss, result.grads)), leaves((expected.loss, expected.grads))))


def test_gradients_follow_the_rules():
    tripled = fpipe.custom_stage(
        forward, lambda p, residuals, dy: (3 * dy, ()), lambda p, wres: {"w": None, "b": 3 * p["b"]}
    )
    model = fpipe.from_functions([plain, tripled], loss=loss)
    result = fpipe.build(program(model, fpipe.split_backward()), model)(PARAMS, BATCH)
    expected = fpipe.reference(model, PARAMS, BATCH, microbatches=3)
    assert result.grads[1].pop("w") is expected.grads[1].pop("w") is None
    assert all(map(torch.equal, leaves(result.grads), leaves(expected.grads)))
    assert torch.equal(result.grads[1]["b"], sum([3 * PARAMS[1]["b"]] * 2, 3 * PARAMS[1]["b"]))


def test_the_weight_rule_runs_in_w():
    linearized = fpipe.linearize(CUSTOM, PARAMS[0], BATCH[0])
    assert linearized.traced.gradients_made_by_input == []
    assert "sum" not in str(linearized).split("\n\n")[2]  # backward_input
    assert "sum" in str(linearized).split("\n\n")[3]  # backward_weight


def stage_with_number(p: Params, x: Tensor) -> tuple[dict[str, object], Tensor]:
    return {"h": x * p["w"], "n": 3, "none": None}, x


def test_outputs_may_have_leaves_that_are_not_tensors():
    rules = fpipe.custom_stage(
        stage_with_number,
        lambda p, x, dy: (dy["h"] * p["w"], (x, dy["h"])),
        lambda p, wres: {"w": (wres[0] * wres[1]).sum(0)},
    )
    model = fpipe.from_functions([rules, lambda p, x: x["h"] * x["n"]], loss=loss)
    plain_model = fpipe.from_functions(
        [lambda p, x: stage_with_number(p, x)[0], lambda p, x: x["h"] * x["n"]], loss=loss
    )
    params = ({"w": torch.randn(4)}, {})
    assert fpipe.verify(program(model), model, params, BATCH).bitwise
    actual_grad, expected_grad = (
        fpipe.reference(tested_model, params, BATCH).grads[0]["w"] for tested_model in (model, plain_model)
    )
    assert torch.allclose(actual_grad, expected_grad)


def step_of(*rules, trace: bool = True):
    model = fpipe.from_functions([plain, fpipe.custom_stage(*rules)], loss=loss)
    return fpipe.build(program(model), model, trace=trace)(PARAMS, BATCH)


def with_changed_weight(change):
    def rule(params: Params, wres: tuple[Tensor, Tensor]) -> Params:
        grads = backward_weight(params, wres)
        return {**grads, "w": change(grads["w"])}

    return forward, backward_input, rule


test_rules_with_wrong_results_are_refused = refusals(
    globals(),
    """
step_of(lambda p, x: x, backward_input, backward_weight)
    ValueError: forward of a custom_stage returns (y, res)
step_of(forward, lambda p, res, dy: dy, backward_weight)
    ValueError: backward_input of a custom_stage returns (dx, wres)
step_of(forward, backward_input, lambda p, wres: (wres[0], wres[1]))
    ValueError: backward_weight of custom_stage forward returns gradients in the containers of params
step_of(*with_changed_weight(lambda g: g.expand(3, *g.shape)))
    ValueError: backward_weight of custom_stage forward returns float32[3, 4, 4] as the gradient of params['w'], which
    is float32[4, 4].
step_of(*with_changed_weight(lambda g: g.double()), trace=False)
    ValueError: returns float64[4, 4] as the gradient of params['w'], which is float32[4, 4].
step_of(*with_changed_weight(lambda g: 1.5))
    ValueError: returns 1.5 as the gradient of params['w'], which is float32[4, 4].
fpipe.linearize(fpipe.custom_stage(forward, lambda p, r, dy: (dy[:1], (*r, dy)), backward_weight), PARAMS[0], BATCH[0])
    ValueError: returns float32[1, 4] as the gradient of x, which is float32[7, 4]
""",
)
