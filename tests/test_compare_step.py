"""`compare_step` accepts correct foreign steps, and names the phase of wrong ones, and mistakes of their update."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests.refusals import refusals
from tests.test_distributed import MSE
from tests.test_update import join_stages, net_of

MICROBATCHES = 4
ENTROPY = nn.functional.cross_entropy


def split_batch(batch: Any) -> list[tuple[Tensor, Tensor]]:
    return [*zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True)]


class Loop:
    """A training loop whose parts can be overridden to make a mistake; `weights` multiply the microbatches."""

    weights: Sequence[float] = (1 / MICROBATCHES,) * MICROBATCHES

    def __init__(self, net: nn.Module, rule: str = "AdamW", clip: float | None = 0.05, **settings: Any) -> None:
        self.net, self.clip, self.settings = net, clip, settings
        self.optimizer = getattr(torch.optim, rule)(net.parameters(), lr=0.01, **settings)

    def backward(self, batch: Any) -> None:
        for (x, target), weight in zip(split_batch(batch), self.weights, strict=True):
            (MSE(self.net(x), target) * weight).backward()

    def clip_grads(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)

    def zero_grads(self) -> None:
        self.optimizer.zero_grad()

    def run(self, batches: list[Any], rates: list[float]) -> None:
        for batch, rate in zip(batches, rates, strict=True):
            self.optimizer.param_groups[0]["lr"] = rate
            self.zero_grads()
            self.backward(batch)
            self.clip_grads()
            self.optimizer.step()


class ShiftedStepCount(Loop):
    """A loop whose optimizer starts with another count of steps."""

    def __init__(self, net: nn.Module, steps: float, **options: Any) -> None:
        super().__init__(net, **options)
        for leaf in net.parameters():
            zeros = torch.zeros_like(leaf)
            self.optimizer.state[leaf] = {"step": torch.tensor(steps), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


class FrozenBias(Loop):
    def backward(self, batch: Any) -> None:
        super().backward(batch)
        self.net[1][0].bias.grad = None  # type: ignore[index, union-attr]


MakeLoop = Callable[[nn.Module], Loop]
SGD: dict[str, Any] = {"rule": "SGD", "clip": None, "momentum": 0.9}
CLIPPED = SGD | {"clip": 0.05}
ADAM: dict[str, Any] = {"rule": "AdamW", "clip": 0.05, "weight_decay": 0.3}


@cache
def model_and_params() -> tuple[fpipe.Model, Any]:
    """Cut the net once, so that all tests share its traces."""
    return fpipe.from_sequential(net_of(2), stages=2, loss=MSE)[:2]


def train(
    make_loop: MakeLoop, step_count: int = 2, rows: int = 8, target_scale: float = 1.0
) -> tuple[Any, Any, list[Any], list[float], dict[str, Tensor]]:
    """Train by a loop; return model, initial parameters, batches, rates and the trained parameters."""
    net, (model, params) = net_of(2), model_and_params()
    torch.manual_seed(1)
    batches = [(torch.randn(rows, 8), target_scale * torch.randn(rows, 8)) for _ in range(step_count)]
    rates = [0.05, 0.02, 0.03][:step_count]
    make_loop(net).run(batches, rates)
    return model, params, batches, rates, {name: leaf.detach() for name, leaf in net.named_parameters()}


def refusal(make_loop: MakeLoop, intended: dict[str, Any], has_grads: bool, step_count: int = 1) -> Any:
    """Return the error for a loop's parameters, and gradients of its last step if asked for."""
    loops = list[Loop]()
    model, params, batches, rates, params_after = train(
        lambda net: loops.append(make_loop(net)) or loops[0], step_count
    )
    grads = {name: leaf.grad for name, leaf in loops[0].net.named_parameters()} if has_grads else None
    with pytest.raises(fpipe.GradientMismatch) as error_info:
        fpipe.compare_step(
            model, params, batches, params_after, lr=rates, microbatches=MICROBATCHES, grads=grads, **intended
        )
    return error_info.value


MISTAKES: dict[str, tuple[Callable[..., Loop], dict[str, Any], dict[str, Any]]] = {
    # message: the loop, its options, and the intended options
    "gradients before the clip are used": (Loop, SGD, CLIPPED),
    "it is Adam, not AdamW": (Loop, ADAM | {"rule": "Adam"}, ADAM),
    "it is AdamW, not Adam": (Loop, ADAM, ADAM | {"rule": "Adam"}),
    "there is no weight decay": (Loop, ADAM | {"weight_decay": 0.0}, ADAM),
    "weight decay 0.1 is not meant": (Loop, SGD | {"weight_decay": 0.1}, SGD),
    "eps is 0.001, not 1e-08": (Loop, ADAM | {"eps": 1e-3}, ADAM | {"eps": 1e-8}),
    "weight_decay is 0.3, not 0.0": (Loop, ADAM, ADAM | {"groups": {"*bias": {"weight_decay": 0.0}}}),
    "no update reaches 1.0.bias": (FrozenBias, SGD, SGD),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_of_the_update_are_named(message: str):
    make_loop, loop_options, intended = MISTAKES[message]
    error = refusal(lambda net: make_loop(net, **loop_options), intended, has_grads=False)
    assert (error.report.phase, error.report.mistake) == ("update", message)
    assert "hand in grads=, or record the run with fpipe.record_run" in str(error)


def test_a_count_of_steps_is_named_with_the_state():
    """As if the state was saved before the step was counted."""
    loops: list[Loop] = []
    model, _, batches, rates, params_before = train(lambda net: loops.append(Loop(net, **ADAM)) or loops[0])
    names = {leaf: name for name, leaf in loops[0].net.named_parameters()}
    params = fpipe.split_params(model, {name: leaf.clone() for name, leaf in params_before.items()})
    states = loops[0].optimizer.state
    state_by_name = {
        names[leaf]: {key: value.clone() for key, value in state.items()} for leaf, state in states.items()
    }
    opt = tuple({name: state_by_name[name] for name in stage} for stage in params)
    for state in states.values():
        state["step"] -= 1
    loops[0].run(batches[:1], rates[:1])
    params_after = {name: leaf.detach() for leaf, name in names.items()}
    with pytest.raises(fpipe.GradientMismatch, match="the count of steps is off by -1"):
        fpipe.compare_step(model, params, batches[:1], params_after, opt=opt, lr=rates[:1], **ADAM)


WEIGHTS = {
    "summed over the 4 microbatches or 4 ranks instead of averaged": (1, 1, 1, 1),
    "microbatches 0, 1 and 2 of 4 are missing": (0, 0, 0, 1 / 4),
    "microbatch 1 of 4 counts twice": (1 / 4, 1 / 2, 1 / 4, 1 / 4),
    "-1 x: the sign is turned": (-1 / 4,) * 4,
}


@pytest.mark.parametrize("message", WEIGHTS)
def test_wrong_sums_are_named_given_gradients_and_never_guessed_without(message: str):
    def make_loop(net: nn.Module) -> Loop:
        loop = Loop(net, **SGD)
        loop.weights = WEIGHTS[message]
        return loop

    assert message in str(refusal(make_loop, SGD, has_grads=True))
    mistake = refusal(make_loop, SGD, has_grads=False).report.mistake
    assert mistake in ("4 of 4 parameters are not those of SGD", "the sign of the update is turned")


@pytest.mark.parametrize(
    "options", [SGD, ADAM, {"rule": "RMSprop", "clip": 1.0}, {"rule": "Adam", "clip": None}], ids=str
)
def test_correct_steps_are_not_accused(options: dict[str, Any]):
    model, params, batches, rates, params_after = train(lambda net: Loop(net, **options))
    for microbatches in (1, 2, 4):  # sums in another order, equal to rounding
        report = fpipe.compare_step(
            model, params, batches, params_after, lr=rates, microbatches=microbatches, **options
        )
        assert len(report.leaves) == 4


@pytest.mark.parametrize("rule", ["AdamW", "RMSprop"])
def test_leaves_with_gradients_of_pure_rounding_are_not_accused(rule: str):
    """Used to be accused: a bias before a batch norm has a gradient of pure rounding, of any sign.

    A rule that divides by its size moves it by the whole rate, and reordered rows moved it the other way.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    x, target, order = torch.randn(16, 6), torch.randn(16, 3), torch.randperm(16)
    model, params, state = fpipe.from_sequential(copy.deepcopy(net), stages=1, loss=MSE)
    optimizer = getattr(torch.optim, rule)(net.parameters(), lr=0.01, weight_decay=0.0)
    MSE(net(x[order]), target[order]).backward()
    optimizer.step()
    params_after = dict(net.named_parameters())
    options: dict[str, Any] = {"rule": rule, "lr": 0.01, "weight_decay": 0.0, "state": state}
    fpipe.compare_step(model, params, (x, target), params_after, **options)
    params_after = {name: 2 * param - params_after[name] for name, param in join_stages(params).items()}
    with pytest.raises(fpipe.GradientMismatch, match="the sign of the update is turned"):
        fpipe.compare_step(model, params, (x, target), params_after, **options)


def test_fpipe_steps_are_bitwise_equal_and_their_norm_and_loss_compared():
    model, params, batches, rates, _ = train(lambda net: Loop(net, **ADAM))
    parts = fpipe.split(4), fpipe.schedules.zb_h2(2), fpipe.merge(), fpipe.update("AdamW", clip=0.05), fpipe.steps(2)
    program = fpipe.chain(*parts)(fpipe.program(model))
    result = fpipe.build(program, model)(params, batches, opt=fpipe.optimizer_state(program, params), lr=rates)
    options: dict[str, Any] = {"rule": "AdamW", "clip": 0.05, "lr": rates, "microbatches": 4}
    report = fpipe.compare_step(model, params, batches, result.params, norm=result.norm, loss=result.loss, **options)
    assert report.bitwise
    for name, wrong_numbers, message in (
        ("norm", [result.norm[0] * 2**0.5, *result.norm[1:]], r"the norm, norm of step 0: it is .*: 1\.414 x\."),
        ("norm", [result.norm[0], result.norm[1] * 2], r"the norm, norm of step 1: it is "),
        ("loss", [result.loss[0], result.loss[1] * 4], r"the loss, loss of step 1: it is .*: 4 x\."),
    ):
        with pytest.raises(fpipe.GradientMismatch, match=message):
            fpipe.compare_step(model, params, batches, result.params, **options, **{name: wrong_numbers})


UNKNOWN: dict[str, Callable[[nn.Sequential, Tensor, Tensor], Tensor]] = {
    "a row is dropped": lambda net, x, target: ENTROPY(net(x[1:]), target[1:]),
    "other inputs": lambda net, x, target: ENTROPY(net(1.5 * x), target),
    "dropout": lambda net, x, target: ENTROPY(net[2](nn.functional.dropout(net[:2](x), 0.2)), target),
    "another activation": lambda net, x, target: ENTROPY(net[2](nn.functional.hardtanh(net[0](x))), target),
    "a temperature": lambda net, x, target: ENTROPY(net(x) / 2, target),
    "smoothed": lambda net, x, target: ENTROPY(net(x), target, label_smoothing=0.1),
    "scaled": lambda net, x, target: 3 * ENTROPY(net(x), target),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 20))])
def test_unknown_mistakes_get_no_name_after_a_step_by_signs(seed: int):
    """Used to blame reordered targets for a dropped row, and epsilon for smoothed labels.

    A step by signs reveals only the signs of few numbers, which different mistakes flip alike.
    """
    for case, wrong_loss in UNKNOWN.items():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=ENTROPY)
        batch = torch.randn(16, 4), torch.randint(3, (16,))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        wrong_loss(net, *batch).backward()
        optimizer.step()
        try:
            fpipe.compare_step(model, params, batch, dict(net.named_parameters()), rule="AdamW", lr=0.01)
        except fpipe.GradientMismatch as error:
            report: Any = error.report
            assert report.mistake.endswith("parameters are not those of AdamW"), (case, report.mistake)


def test_settings_of_a_rule_may_vary_by_step():
    settings = [{"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.2}]

    class VariedSettings(Loop):
        def run(self, batches: list[Any], rates: list[float]) -> None:
            for batch, step_settings in zip(batches, settings, strict=True):
                self.optimizer.param_groups[0] |= step_settings
                super().run([batch], [step_settings["lr"]])

    model, params, batches, _, params_after = train(lambda net: VariedSettings(net, clip=None))
    options: dict[str, Any] = {"rule": "AdamW", "microbatches": MICROBATCHES}
    assert fpipe.compare_step(model, params, batches, params_after, lr=settings, **options).bitwise
    settings[1] = {"lr": 0.02, "weight_decay": 0.01}  # the default of AdamW, which may be left out
    _, _, _, _, params_after = train(lambda net: VariedSettings(net, clip=None))
    assert fpipe.compare_step(model, params, batches, params_after, lr=[settings[0], 0.02], **options).bitwise


def compare_unmoved(after: Any = None, batches: Any = None, lr: Any = 0.1, **options: Any) -> fpipe.Report:
    """Compare a step of AdamW that has moved nothing."""
    model, params = model_and_params()
    batches = (torch.ones(8, 8), torch.zeros(8, 8)) if batches is None else batches
    after = join_stages(params) if after is None else after
    return fpipe.compare_step(model, params, batches, after, **{"rule": "AdamW", "lr": lr} | options)


PAIR = torch.ones(8, 8), torch.zeros(8, 8)
WEIGHT = "0.0.weight"

test_invalid_arguments_are_refused = refusals(
    globals(),
    """
compare_unmoved({"v": torch.ones(1)})
    ValueError: there is no '0.0.weight' after the steps; found v
compare_unmoved({WEIGHT: torch.ones(2)})
    ValueError: '0.0.weight' has the shape [2] after the steps
compare_unmoved({WEIGHT: torch.ones(2, device="meta")})
    ValueError: '0.0.weight' is a tensor of torch.float32, torch.strided, on meta after
compare_unmoved(3)
    ValueError: after is a dict by name
compare_unmoved(lr=[0.1, 0.1])
    ValueError: lr is one number, or a list of 1, one for each step; found 2
compare_unmoved(lr={"lr": 0.1, "betas": 0.9})
    ValueError: lr is a number, or a dict of lr, eps, weight_decay
compare_unmoved(lr={"lr": 0.1, "weight_decay": 0.1}, weight_decay=0.3)
    ValueError: weight_decay is said twice: 0.1 by lr=
compare_unmoved(batches=[])
    ValueError: batches is the batch
compare_unmoved(batches=(PAIR, PAIR))
    ValueError: one batch of these inputs and these targets, 2 and 2, ends in TypeError: linear
compare_unmoved(batches=(PAIR,) * 3)
    ValueError: found a tuple of 3; of several steps hand in a list
compare_unmoved(opt=({}, {}))
    ValueError: opt of stage 0 has other leaves
compare_unmoved(grads=[{"other": torch.zeros(1)}, {"other": torch.ones(1)}])
    GradientMismatch: other, reduction of step 0: it is not added over ranks
compare_unmoved(grads={"other": torch.zeros(1)})
    ValueError: there is no parameter 'other' in the model
compare_unmoved(grads={WEIGHT: torch.ones(1)})
    ValueError: the gradient of '0.0.weight' has the shape (1,), the parameter (8, 8)
compare_unmoved(groups={"no": {"lr": 1.0}})
    ValueError: no parameter has a name like 'no' of groups=
# Used to end in an assertion of torch while solving for the gradients of SGD.
compare_unmoved(join_stages(model_and_params()[1]) | {"0.0.bias": torch.full((8,), torch.nan)})
    GradientMismatch: NaN or infinite numbers in 0.0.bias
""",
)


def test_given_gradients_and_optimizer_state_are_compared():
    loops: list[Loop] = []
    model, params, batches, rates, params_after = train(
        lambda net: loops.append(Loop(net, **ADAM | {"clip": None})) or loops[0]
    )
    grads = {name: leaf.grad for name, leaf in loops[0].net.named_parameters()}
    state = {name: dict(loops[0].optimizer.state[leaf]) for name, leaf in loops[0].net.named_parameters()}
    options: dict[str, Any] = {"lr": rates, "microbatches": MICROBATCHES, **ADAM | {"clip": None}}
    assert fpipe.compare_step(model, params, batches, params_after, grads=grads, opt_after=state, **options).bitwise
    state_of_other_step = state | {WEIGHT: state[WEIGHT] | {"step": torch.tensor(3.0)}}
    with pytest.raises(fpipe.GradientMismatch, match=r"0\.0\.weight, update of step 1: its step is not that of AdamW"):
        fpipe.compare_step(model, params, batches, params_after, opt_after=state_of_other_step, **options)
    grads_with_a_half = grads | {WEIGHT: grads[WEIGHT] / 2}
    with pytest.raises(fpipe.GradientMismatch, match="1/2 x: averaged over 2 microbatches or ranks"):
        fpipe.compare_step(model, params, batches, params_after, grads=grads_with_a_half, **options)


def test_gradients_that_differ_between_ranks_are_named():
    """As of a norm that sees half a sequence on each rank, or a router that sees half the experts."""
    loops: list[Loop] = []
    model, params, batches, rates, params_after = train(
        lambda net: loops.append(Loop(net, **SGD)) or loops[0], step_count=1
    )
    correct_grads = {name: leaf.grad for name, leaf in loops[0].net.named_parameters()}
    grads = [correct_grads | {WEIGHT: correct_grads[WEIGHT] * share} for share in (0.25, 0.75)]
    with pytest.raises(fpipe.GradientMismatch, match=r"0\.0\.weight, reduction of step 0: it is not added over ranks"):
        fpipe.compare_step(model, params, batches, params_after, lr=rates, microbatches=4, grads=grads, **SGD)
