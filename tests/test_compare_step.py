"""`compare_step` accepts correct foreign steps and names mistakes, each made by a real training loop."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fpipe
from tests.refusals import refusals
from tests.test_distributed import MSE
from tests.test_update import join_stages, net_of, tied

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


class StageNorms(Loop):
    def clip_grads(self) -> None:
        for stage in (self.net[0], self.net[1]):  # type: ignore[index]
            nn.utils.clip_grad_norm_(stage.parameters(), 0.05)


class DoubledNorm(Loop):
    def clip_grads(self) -> None:
        grads = [leaf.grad for leaf in self.net.parameters()]
        norm = nn.utils.get_total_norm([*grads, *grads])
        nn.utils.clip_grads_with_norm_(self.net.parameters(), 0.05, norm)


class MicrobatchGrads(Loop):
    """A loop that changes the gradients of each microbatch before they are summed."""

    def backward(self, batch: Any) -> None:
        total = list[Tensor]()
        for x, target in split_batch(batch):
            self.optimizer.zero_grad()
            MSE(self.net(x), target).backward()
            grads = self.grads()
            total = [summand + grad for summand, grad in zip(total, grads, strict=True)] if total else grads
        for grad_sum, leaf in zip(total, self.net.parameters(), strict=True):
            leaf.grad = grad_sum.float() / MICROBATCHES

    def grads(self) -> list[Tensor]:
        return [leaf.grad for leaf in self.net.parameters()]


class ClippedMicrobatches(MicrobatchGrads):
    def grads(self) -> list[Tensor]:
        super().clip_grads()
        return super().grads()

    def clip_grads(self) -> None:
        pass


class Bfloat16Sums(MicrobatchGrads):
    def grads(self) -> list[Tensor]:
        return [grad.bfloat16() for grad in super().grads()]


class WithoutZeroGrad(Loop):
    def zero_grads(self) -> None:
        pass


class StepPerMicrobatch(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        microbatches = [part for batch in batches for part in split_batch(batch)]
        super().run(microbatches, [rate for rate in rates for _ in range(MICROBATCHES)])

    def backward(self, batch: Any) -> None:
        MSE(self.net(batch[0]), batch[1]).backward()


class StaleGrads(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        previous = self.net.state_dict()
        for batch, rate in zip(batches, rates, strict=True):
            self.stale, previous = previous, {name: leaf.clone() for name, leaf in self.net.state_dict().items()}
            super().run([batch], [rate])

    def backward(self, batch: Any) -> None:
        current = {name: leaf.clone() for name, leaf in self.net.state_dict().items()}
        self.net.load_state_dict(self.stale)
        super().backward(batch)
        self.net.load_state_dict(current)


class AdamWithoutCorrection(Loop):
    """Adam without bias correction, as in BERT."""

    def run(self, batches: list[Any], rates: list[float]) -> None:
        self.moments = [(torch.zeros_like(leaf), torch.zeros_like(leaf)) for leaf in self.net.parameters()]
        self.optimizer.step = self.step  # type: ignore[method-assign]
        super().run(batches, rates)

    @torch.no_grad()
    def step(self) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        for leaf, (mean, square_mean) in zip(self.net.parameters(), self.moments, strict=True):
            mean.lerp_(leaf.grad, 0.1)
            square_mean.mul_(0.999).addcmul_(leaf.grad, leaf.grad, value=0.001)
            leaf.mul_(1 - rate * self.settings["weight_decay"])
            leaf.addcdiv_(mean, square_mean.sqrt() + 1e-8, value=-rate)


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


class TorchPipeline(Loop):
    """A loop on torch's pipeline runtime, in rounds of microbatches."""

    def __init__(self, net: nn.Module, rounds: int = 1, average: bool = True, **options: Any) -> None:
        super().__init__(net, **options)
        stage = PipelineStage(net, 0, 1, torch.device("cpu"))
        self.rounds, microbatches = rounds, MICROBATCHES // rounds
        self.schedule = ScheduleGPipe(stage, microbatches, self.loss, scale_grads=average)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return MSE(output, target) / self.rounds

    def backward(self, batch: Any) -> None:
        for x, target in zip(*(half.chunk(self.rounds) for half in batch), strict=True):
            self.schedule.step(x, target=target)


class ChangedData(Loop):
    """A loop that gets other batches or learning rates."""

    def __init__(self, net: nn.Module, change: Callable[[list[Any], list[float]], Any], **options: Any) -> None:
        super().__init__(net, **options)
        self.change = change

    def run(self, batches: list[Any], rates: list[float]) -> None:
        super().run(*self.change(batches, rates))


def with_reordered(
    target: Callable[[Tensor], Tensor] = lambda rows: rows, x: Callable[[Tensor], Tensor] = lambda rows: rows
) -> Callable[..., Loop]:
    """Return a loop whose targets or inputs are reordered."""
    return partial(
        ChangedData, change=lambda batches, rates: ([(x(rows), target(targets)) for rows, targets in batches], rates)
    )


def shuffle_rows(rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(42))]


def deal_to_four(rows: Tensor) -> Tensor:
    return torch.cat([rows[k::4] for k in range(4)])


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


def assert_named(make_loop: MakeLoop, intended: dict[str, Any], message: str, step_count: int = 1, **size: Any) -> None:
    """Assert that the mistake of a loop is reported by this message."""
    model, params, batches, rates, params_after = train(make_loop, step_count, **size)
    with pytest.raises(fpipe.GradientMismatch, match=message):
        fpipe.compare_step(model, params, batches, params_after, lr=rates, microbatches=MICROBATCHES, **intended)


WEIGHTS = {
    "summed over the 4 microbatches and not averaged": (1, 1, 1, 1),
    "over the 4 microbatches once too often": (1 / 16,) * 4,
    "gradients are overwritten, not accumulated": (0, 0, 0, 1 / 4),
    "Microbatch 1 counts twice": (1 / 4, 1 / 2, 1 / 4, 1 / 4),
    "Microbatch 3 is missing": (1 / 4, 1 / 4, 1 / 4, 0),
    "All 2 replicas are handed the same rows, those of replica 0": (1 / 2, 1 / 2, 0, 0),
    "summed over the 96 rows or tokens and not averaged": (24,) * 4,
    "over the 3 rows or tokens of each microbatch and not averaged": (3 / 4,) * 4,
    "Gradients have the wrong sign": (-1 / 4,) * 4,
}


@pytest.mark.parametrize("message", WEIGHTS)
def test_wrong_sums_are_named(message: str):
    def make_loop(net: nn.Module) -> Loop:
        loop = Loop(net, **SGD)
        loop.weights = WEIGHTS[message]
        return loop

    assert_named(make_loop, SGD, message, rows=12)


MISTAKES: dict[str, tuple[Callable[..., Loop], dict[str, Any], dict[str, Any]]] = {
    # message: the loop, its options, and the intended options
    "Each stage is clipped by its own norm": (StageNorms, ADAM, ADAM),
    "[Tt]he norm counts everything 2 times": (DoubledNorm, CLIPPED, CLIPPED),
    "Gradients are not clipped, or to more": (Loop, SGD, CLIPPED),
    "is clipped before gradients are added up": (ClippedMicrobatches, CLIPPED, CLIPPED),
    "steps after each microbatch": (StepPerMicrobatch, SGD, SGD),
    r"added to the gradient \(Adam\)": (Loop, ADAM | {"rule": "Adam"}, ADAM),
    r"decoupled \(AdamW\), not added to the gradient": (Loop, ADAM, ADAM | {"rule": "Adam"}),
    "There is no weight decay": (Loop, ADAM | {"weight_decay": 0.0}, ADAM),
    "There is a weight decay of 0.1": (Loop, SGD | {"weight_decay": 0.1}, SGD),
    "Weight decay is 0.1, not 0.3": (Loop, ADAM | {"weight_decay": 0.1}, ADAM),
    "Epsilon is 0.001, not 1e-08": (Loop, ADAM | {"eps": 1e-3}, ADAM),
    "There is no bias correction": (AdamWithoutCorrection, ADAM, ADAM),
    "Groups are not told apart": (Loop, ADAM, ADAM | {"groups": {"*bias": {"weight_decay": 0.0}}}),
    "1 of them are as they were": (FrozenBias, SGD, SGD),
    "added up in bfloat16": (Bfloat16Sums, SGD, SGD),
    "counts one step too many": (partial(ShiftedStepCount, steps=1.0), ADAM, ADAM),
    "Targets are those of the next microbatch": (with_reordered(lambda rows: rows.roll(-2, 0)), SGD, SGD),
    "are those of the microbatch before": (with_reordered(lambda rows: rows.roll(2, 0)), ADAM, ADAM),
    "those of the next row": (with_reordered(lambda rows: rows.roll(-1, 0)), SGD, SGD),
    "those of the row before": (with_reordered(lambda rows: rows.roll(1, 0)), SGD, SGD),
    "in the reverse order of the rows": (with_reordered(lambda rows: rows.flip(0)), SGD, SGD),
    "next of 2 microbatches or replicas": (with_reordered(lambda rows: rows.roll(4, 0)), SGD, SGD),
    "Targets are dealt out one by one to 4": (with_reordered(deal_to_four), SGD, SGD),
    "Inputs are dealt out one by one to 4": (with_reordered(x=deal_to_four), SGD, SGD),
    "Targets are shuffled by torch.randperm of seed 42, inputs are not": (with_reordered(shuffle_rows), ADAM, ADAM),
    "Inputs are shuffled by torch.randperm of seed 42, targets are not": (with_reordered(x=shuffle_rows), ADAM, ADAM),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_of_one_step_are_named(message: str):
    make_loop, loop_options, intended = MISTAKES[message]
    assert_named(lambda net: make_loop(net, **loop_options), intended, message)


def test_an_unintended_clip_is_named():
    assert_named(lambda net: Loop(net, **SGD | {"clip": 1.0}), SGD, "Gradients are clipped to 1", target_scale=20.0)


MISTAKES_OVER_STEPS: dict[str, tuple[Callable[..., Loop], dict[str, Any], dict[str, Any]]] = {
    "zero_grad is missing": (WithoutZeroGrad, SGD, SGD),
    r"one step before \(stale\)": (StaleGrads, SGD, SGD),
    "There is no momentum": (Loop, SGD | {"momentum": 0.0}, SGD),
    r"Betas are \(0.9, 0.95\), not": (Loop, ADAM | {"betas": (0.9, 0.95)}, ADAM),
    "rate is that of the step before": (
        partial(ChangedData, change=lambda b, rates: (b, [rates[0], *rates[:-1]])),
        SGD,
        SGD,
    ),
    "rate is that of the next step": (
        partial(ChangedData, change=lambda b, rates: (b, [*rates[1:], rates[-1]])),
        SGD,
        SGD,
    ),
    "All steps are on the first batch": (
        partial(ChangedData, change=lambda batches, r: (batches[:1] * 3, r)),
        ADAM,
        ADAM,
    ),
    "Each step is on the batch of the one before": (
        partial(ChangedData, change=lambda batches, rates: ([batches[0], *batches[:-1]], rates)),
        ADAM,
        ADAM,
    ),
}


@pytest.mark.parametrize("message", MISTAKES_OVER_STEPS)
def test_mistakes_over_several_steps_are_named(message: str):
    make_loop, loop_options, intended = MISTAKES_OVER_STEPS[message]
    assert_named(
        lambda net: make_loop(net, **loop_options), intended, message, step_count=3 if "batch" in message else 2
    )


def test_an_optimizer_that_is_resumed_one_step_behind_is_named():
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
    loops[0].run(batches, rates)
    params_after = {name: leaf.detach() for leaf, name in names.items()}
    with pytest.raises(fpipe.GradientMismatch, match="The optimizer counts one step too few"):
        fpipe.compare_step(model, params, batches, params_after, opt=opt, lr=rates, **ADAM)


@pytest.fixture
def single_process_group() -> Iterator[None]:
    """Start a process group of one process for torch's runtime."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_mistakes_with_torchs_runtime_are_named(single_process_group: None):
    summed = "summed over the 4 microbatches and not averaged"
    assert_named(lambda net: TorchPipeline(net, average=False, **SGD), SGD, summed)
    assert_named(
        lambda net: TorchPipeline(net, rounds=2, **SGD), SGD, "are divided again at each round of 2 microbatches"
    )


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
    with pytest.raises(fpipe.GradientMismatch, match="Gradients have the wrong sign"):
        fpipe.compare_step(model, params, (x, target), params_after, **options)


def label_loss(y: Tensor, labels: Tensor) -> Tensor:
    return ENTROPY(y.flatten(0, 1), labels.flatten())


def test_labels_shifted_twice_are_named():
    """As if both the data set and the loss shifted the labels."""
    torch.manual_seed(0)
    net, ids = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11)), torch.randint(0, 11, (4, 6))
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=label_loss)
    for offset, amount in ((-1, "too many"), (1, "too few")):
        trained_net = copy.deepcopy(net)
        label_loss(trained_net(ids), ids.roll(-1, 1).roll(offset, 1)).backward()
        torch.optim.SGD(trained_net.parameters(), lr=0.1).step()
        params_after = dict(trained_net.named_parameters())
        with pytest.raises(fpipe.GradientMismatch, match=f"Targets are shifted by one position {amount}"):
            fpipe.compare_step(model, params, (ids, ids.roll(-1, 1)), params_after, rule="SGD", lr=0.1)


def test_fpipe_steps_are_bitwise_equal_and_their_norm_and_loss_compared():
    model, params, batches, rates, _ = train(lambda net: Loop(net, **ADAM))
    parts = fpipe.split(4), fpipe.schedules.zb_h2(2), fpipe.merge(), fpipe.update("AdamW", clip=0.05), fpipe.steps(2)
    program = fpipe.chain(*parts)(fpipe.program(model))
    result = fpipe.build(program, model)(params, batches, opt=fpipe.optimizer_state(program, params), lr=rates)
    options: dict[str, Any] = {"rule": "AdamW", "clip": 0.05, "lr": rates, "microbatches": 4}
    report = fpipe.compare_step(model, params, batches, result.params, norm=result.norm, loss=result.loss, **options)
    assert report.bitwise
    assert len(report.notes) == 1  # a norm shows the scale of gradients, so no note warns of it
    for name, wrong_numbers, message in (
        ("norm", [result.norm[0] * 2**0.5, *result.norm[1:]], r"The norm of step 0 is .*: 1\.414 x\."),
        ("loss", [result.loss[0], result.loss[1] * 4], r"The loss of step 1 is .*: 4 x\."),
    ):
        with pytest.raises(fpipe.GradientMismatch, match=message):
            fpipe.compare_step(model, params, batches, result.params, **options, **{name: wrong_numbers})


@pytest.mark.parametrize(
    ("trained_rule", "claimed_rule", "rate", "message"),
    [
        ("AdamW", "AdamW", 0.02, "The learning rate is 0.01, not 0.02"),
        ("SGD", "SGD", 0.03, "The learning rate is 0.01, not 0.03, or gradients are 0.333 times as large"),
        ("SGD", "SGD", 0.02, "once too often, or the learning rate is 0.01, not 0.02"),
        ("AdamW", "SGD", 0.01, "The parameters are those of AdamW with its defaults"),
    ],
)
def test_another_rate_or_rule_is_named(trained_rule: str, claimed_rule: str, rate: float, message: str):
    net, batch = net_of(2), (torch.randn(8, 8), torch.randn(8, 8))
    Loop(net, trained_rule, None).run([batch], [0.01])
    with pytest.raises(fpipe.GradientMismatch, match=message):
        fpipe.compare_step(*model_and_params(), batch, dict(net.named_parameters()), rule=claimed_rule, lr=rate)


EFFECTS: dict[str, tuple[dict[str, Any], int, str]] = {
    # difference of the loop from SGD at .05 with a clip of .05, number of steps, and the whole message
    "half the rate": (
        {"lr": 0.025},
        1,
        "Gradients are clipped to 0.025, not 0.05, or the learning rate is 0.025, not 0.05.",
    ),
    "another clip": (
        {"clip": 0.1},
        2,
        "The learning rate is 0.1, not 0.05, or gradients are clipped to 0.1, not 0.05.",
    ),
    "a clip that is never reached": ({"clip": 9.0}, 2, "Gradients are not clipped, or to more than their norm."),
    "a loss that is divided": ({"scale": 1 / 300}, 2, "Gradients are 0.00333 times as large."),
}


@pytest.mark.parametrize("case", EFFECTS)
def test_mistakes_with_equal_effects_are_all_named(case: str):
    """Used to name only one cause: a halved rate was reported as a norm that counts everything 4 times."""
    change, step_count, sentence = EFFECTS[case]
    net, (model, params) = net_of(2), model_and_params()
    torch.manual_seed(1)
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(step_count)]
    optimizer = torch.optim.SGD(net.parameters(), lr=change.get("lr", 0.05))
    for x, target in batches:
        optimizer.zero_grad()
        (MSE(net(x), target) * change.get("scale", 1.0)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), change.get("clip", 0.05))
        optimizer.step()
    with pytest.raises(fpipe.GradientMismatch) as error_info:
        fpipe.compare_step(model, params, batches, dict(net.named_parameters()), rule="SGD", lr=0.05, clip=0.05)
    assert str(error_info.value).splitlines()[1] == sentence


class NetWithLoss(nn.Module):
    """A net that computes its loss from labels in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": ENTROPY(self.head(self.embed(ids).tanh()).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize(
    ("scale", "message"), [(4.0, "summed over the 4 microbatches"), (1.37, "gradients are 1.37 times as large")]
)
def test_nets_that_compute_their_loss_are_compared(scale: float, message: str):
    """Used to raise an AttributeError, since the target is None and has no rows."""
    torch.manual_seed(0)
    net, ids = NetWithLoss(), torch.randint(0, 7, (8, 3))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}, None
    model, params, _ = fpipe.from_module(copy.deepcopy(net), 2, example=batch)
    (scale * net(**batch[0])["loss"]).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match=message):
        fpipe.compare_step(model, params, batch, dict(net.named_parameters()), rule="SGD", lr=0.1, microbatches=4)


def test_warm_up_from_zero_hides_no_mistake():
    """Used to take the unmoved first step for a rule that does not depend on the scale of gradients."""
    net, batches = net_of(2), [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    Loop(net, "SGD", None).run(batches, [0.0, 0.1, 0.2])
    report = fpipe.compare_step(
        *model_and_params(), batches, dict(net.named_parameters()), rule="SGD", lr=[0.0, 0.1, 0.2]
    )
    assert "do not tell" not in str(report)


@pytest.mark.parametrize(
    ("counts", "clip", "message"),
    [
        ((0, 1), None, "tied 'embed.weight' misses its use in stage 0"),
        ((1, 2), None, "tied 'embed.weight' counts its use in stage 1 twice"),
        ((2, 2), None, "tied 'embed.weight' is added up twice"),
        ((1, 1), 0.1, "The norm counts tied parameters once for each use"),
    ],
)
def test_wrong_sums_of_tied_gradients_are_named(counts: tuple[int, int], clip: float | None, message: str):
    """The first and last stage each have a copy, and sum its gradients with these counts."""
    torch.manual_seed(0)
    net, ids = tied(), torch.randint(0, 7, (8,))
    model, params, _ = fpipe.from_module(copy.deepcopy(net), 2, loss=ENTROPY, example=(ids, ids))
    embed, mid, head = net.embed, net.mid, nn.Linear(8, 7, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    ENTROPY(head(mid(embed(ids)).tanh()), ids).backward()
    total = counts[0] * embed.weight.grad + counts[1] * head.weight.grad
    embed.weight.grad, head.weight.grad = total.clone(), total.clone()
    leaves = [embed.weight, mid.weight, mid.bias, head.weight]
    if clip is not None:
        nn.utils.clip_grad_norm_(leaves, clip)
    torch.optim.SGD(leaves, lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match=message):
        fpipe.compare_step(model, params, (ids, ids), dict(net.named_parameters()), rule="SGD", lr=0.1, clip=clip)


UNKNOWN: dict[str, Callable[[nn.Sequential, Tensor, Tensor], Tensor]] = {
    "a row is dropped": lambda net, x, target: ENTROPY(net(x[1:]), target[1:]),
    "other inputs": lambda net, x, target: ENTROPY(net(1.5 * x), target),
    "dropout": lambda net, x, target: ENTROPY(net[2](nn.functional.dropout(net[:2](x), 0.2)), target),
    "another activation": lambda net, x, target: ENTROPY(net[2](nn.functional.hardtanh(net[0](x))), target),
    "a temperature": lambda net, x, target: ENTROPY(net(x) / 2, target),
    "smoothed": lambda net, x, target: ENTROPY(net(x), target, label_smoothing=0.1),
    "scaled": lambda net, x, target: 3 * ENTROPY(net(x), target),
}


@pytest.mark.parametrize(
    ("width", "rows", "seeds"),
    [(4, 16, 1), *(pytest.param(*sizes, 8, marks=pytest.mark.deep) for sizes in ((4, 8), (4, 16), (16, 16), (64, 32)))],
)
def test_unknown_mistakes_are_not_called_by_other_names_after_a_step_by_signs(width: int, rows: int, seeds: int):
    """Used to blame reordered targets for a dropped row, and epsilon for smoothed labels.

    A step by signs reveals only the signs of few numbers, which different mistakes flip alike.
    """
    for seed in range(seeds):
        for case, wrong_loss in UNKNOWN.items():
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
            model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=ENTROPY)
            batch = torch.randn(rows, 4), torch.randint(3, (rows,))
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            wrong_loss(net, *batch).backward()
            optimizer.step()
            params_after, options = dict(net.named_parameters()), {"lr": 0.01, "microbatches": 1 + seed % 2}
            try:
                report = str(fpipe.compare_step(model, params, batch, params_after, rule="AdamW", **options))
                assert "One step of AdamW tells the signs of gradients and hardly their sizes" in report
            except fpipe.GradientMismatch as error:
                sentence = str(error).split("\n")[1]
                assert sentence.startswith(("It could be that ", "No mistake that is known")), (case, seed, sentence)


def test_notes_warn_that_scaled_gradients_may_look_right():
    options: dict[str, Any] = ADAM | {"clip": None}
    for step_count, note in (
        (1, "Hand in grads=, or several steps with norm="),
        (2, "a loss that is scaled looks right"),
    ):
        model, params, batches, rates, params_after = train(lambda net: Loop(net, **options), step_count)
        report = fpipe.compare_step(
            model, params, batches, params_after, lr=rates, microbatches=MICROBATCHES, **options
        )
        assert note in report.notes[-1]
    model, params, batches, rates, params_after = train(lambda net: Loop(net, **SGD), 1)
    assert len(fpipe.compare_step(model, params, batches, params_after, lr=rates, **SGD).notes) == 1


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
    _, _, _, rates, params_after = train(lambda net: Loop(net, clip=None, weight_decay=0.3))
    with pytest.raises(fpipe.GradientMismatch, match=r"Weight decay is 0.3, not 0.1\."):
        fpipe.compare_step(
            model, params, batches, params_after, lr=[{"lr": rate, "weight_decay": 0.1} for rate in rates], **options
        )
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
compare_unmoved(lr=None)
    TypeError: lr is a number or a 0-d tensor; found NoneType
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
compare_unmoved(opt=torch.optim.AdamW(net_of(2).parameters()))
    TypeError: opt is what optimizer_state makes, one tree a stage; found AdamW
compare_unmoved(opt=({}, {}))
    ValueError: opt of stage 0 has other leaves
compare_unmoved(opt_after=torch.optim.AdamW(net_of(2).parameters()).state_dict())
    TypeError: opt_after is by name
compare_unmoved(grads={WEIGHT: None})
    TypeError: grads is a dict of tensors by name
compare_unmoved(grads=[{"other": torch.zeros(1)}, {"other": torch.ones(1)}])
    ValueError: there is nothing to compare the gradient of other with; there is the gradient of
compare_unmoved(grads={"other": torch.zeros(1)})
    ValueError: there is nothing to compare the gradient of other with
compare_unmoved(grads={WEIGHT: torch.ones(1)})
    ValueError: the gradient of 0.0.weight has the shape [1], and is to have
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
    with pytest.raises(fpipe.GradientMismatch, match=r"1 of \d+ values beside .* are others: step of 0.0.weight"):
        fpipe.compare_step(model, params, batches, params_after, opt_after=state_of_other_step, **options)
    grads_with_a_half = grads | {WEIGHT: grads[WEIGHT] / 2}
    with pytest.raises(fpipe.GradientMismatch, match=r"are others: the gradient of 0.0.weight\."):
        fpipe.compare_step(model, params, batches, params_after, grads=grads_with_a_half, **options)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.25, 0.75), "is not added over ranks: those of 2 add up to the right one"),
        ((0.5, 1.5), "is not added over ranks: those of 2 have the mean the right one"),
        ((0.25, 0.75, 0.5, 0.5), "is not added over ranks: those of 4 add up to 2 times the right one"),
        ((1.0, 0.3), "is another one on each of 2 ranks that are to have copies"),
    ],
)
def test_gradients_not_summed_over_ranks_are_named(shares: tuple[float, ...], message: str):
    """As of a norm that sees half a sequence on each rank, or a router that sees half the experts."""
    loops: list[Loop] = []
    model, params, batches, rates, params_after = train(
        lambda net: loops.append(Loop(net, **SGD)) or loops[0], step_count=1
    )
    correct_grads = {name: leaf.grad for name, leaf in loops[0].net.named_parameters()}
    grads = [correct_grads | {WEIGHT: correct_grads[WEIGHT] * share} for share in shares]
    with pytest.raises(fpipe.GradientMismatch, match=f"The gradient of 0.0.weight {message}"):
        fpipe.compare_step(model, params, batches, params_after, lr=rates, microbatches=4, grads=grads, **SGD)


def test_ignored_targets_have_no_weight():
    """With unequal numbers of valid targets, the mean over all tokens is not the mean of means."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    x, target = torch.randn(8, 8), torch.randint(0, 5, (8,))
    target[1:4] = -100
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=ENTROPY)
    for rows, ids in zip(x.chunk(2), target.chunk(2), strict=True):
        (ENTROPY(net(rows), ids, reduction="sum") / 5).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match="weighs as much as it has valid targets, not rows"):
        fpipe.compare_step(model, params, (x, target), dict(net.named_parameters()), rule="SGD", lr=0.1, microbatches=2)
