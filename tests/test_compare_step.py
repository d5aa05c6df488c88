"""Steps that others made, right ones and wrong ones, each by real code that makes the mistake."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, DistributedSampler

import fpipe
from tests.test_distributed import MSE
from tests.test_update import joined, net_of, tied

MICROBATCHES = 4


class Loop:
    """A training loop by hand, of which each part can be done wrongly."""

    def __init__(self, net: nn.Module, rule: str = "AdamW", clip: float | None = 0.05, **settings: Any) -> None:
        self.net, self.clip, self.settings = net, clip, settings
        self.optimizer = getattr(torch.optim, rule)(net.parameters(), lr=0.01, **settings)

    def backward(self, batch: Any) -> None:
        for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
            (MSE(self.net(x), target) / MICROBATCHES).backward()

    def clipped(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def run(self, batches: list[Any], rates: list[float]) -> None:
        for batch, rate in zip(batches, rates, strict=True):
            self.optimizer.param_groups[0]["lr"] = rate
            self.zero()
            self.backward(batch)
            self.clipped()
            self.optimizer.step()


class Summed(Loop):
    def backward(self, batch: Any) -> None:
        for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
            MSE(self.net(x), target).backward()


class Overwritten(Loop):
    def backward(self, batch: Any) -> None:
        for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
            self.optimizer.zero_grad()
            (MSE(self.net(x), target) / MICROBATCHES).backward()


class Twice(Loop):
    def backward(self, batch: Any) -> None:
        super().backward(batch)
        x, target = (half.chunk(MICROBATCHES)[1] for half in batch)
        (MSE(self.net(x), target) / MICROBATCHES).backward()


class AveragedTwice(Loop):
    def backward(self, batch: Any) -> None:
        super().backward(batch)
        for leaf in self.net.parameters():
            leaf.grad /= MICROBATCHES


class Dropped(Loop):
    """The last microbatch is dropped, as by drop_last=True."""

    def backward(self, batch: Any) -> None:
        for x, target in [*zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True)][:-1]:
            (MSE(self.net(x), target) / MICROBATCHES).backward()


class OwnNorms(Loop):
    def clipped(self) -> None:
        for stage in (self.net[0], self.net[1]):  # type: ignore[index]
            nn.utils.clip_grad_norm_(stage.parameters(), 0.05)


class NormOfEach(Loop):
    def clipped(self) -> None:
        for leaf in self.net.parameters():
            nn.utils.clip_grad_norm_(leaf, 0.05)


class CountedTwice(Loop):
    def clipped(self) -> None:
        grads = [leaf.grad for leaf in self.net.parameters()]
        norm = nn.utils.get_total_norm([*grads, *grads])
        nn.utils.clip_grads_with_norm_(self.net.parameters(), 0.05, norm)


class ClippedFirst(Loop):
    def backward(self, batch: Any) -> None:
        total = [torch.zeros_like(leaf) for leaf in self.net.parameters()]
        for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
            self.optimizer.zero_grad()
            MSE(self.net(x), target).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
            total = [one + leaf.grad / MICROBATCHES for one, leaf in zip(total, self.net.parameters(), strict=True)]
        for one, leaf in zip(total, self.net.parameters(), strict=True):
            leaf.grad = one

    def clipped(self) -> None:
        pass


class NeverZeroed(Loop):
    def zero(self) -> None:
        pass


class StepsOften(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        for batch, rate in zip(batches, rates, strict=True):
            self.optimizer.param_groups[0]["lr"] = rate
            for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
                self.zero()
                MSE(self.net(x), target).backward()
                self.clipped()
                self.optimizer.step()


class Stale(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        before = [leaf.detach().clone() for leaf in self.net.parameters()]
        for batch, rate in zip(batches, rates, strict=True):
            self.optimizer.param_groups[0]["lr"] = rate
            now = [leaf.detach().clone() for leaf in self.net.parameters()]
            self.put(before)
            self.zero()
            self.backward(batch)
            self.clipped()
            self.put(now)
            before = now
            self.optimizer.step()

    def put(self, values: list[Tensor]) -> None:
        for leaf, value in zip(self.net.parameters(), values, strict=True):
            leaf.data.copy_(value)


class LateRate(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        super().run(batches, [rates[0], *rates[:-1]])


class EarlyRate(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        super().run(batches, [*rates[1:], rates[-1]])


class Uncorrected(Loop):
    """Adam as BERT had it."""

    def run(self, batches: list[Any], rates: list[float]) -> None:
        self.moments = [(torch.zeros_like(leaf), torch.zeros_like(leaf)) for leaf in self.net.parameters()]
        self.optimizer.step = self.step  # type: ignore[method-assign]
        super().run(batches, rates)

    @torch.no_grad()
    def step(self) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        for leaf, (first, second) in zip(self.net.parameters(), self.moments, strict=True):
            first.lerp_(leaf.grad, 0.1)
            second.mul_(0.999).addcmul_(leaf.grad, leaf.grad, value=0.001)
            leaf.mul_(1 - rate * self.settings["weight_decay"]).addcdiv_(first, second.sqrt() + 1e-8, value=-rate)


class Counting(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        for leaf in self.net.parameters():
            zeros = torch.zeros_like(leaf)
            self.optimizer.state[leaf] = {"step": torch.ones(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        super().run(batches, rates)


class Frozen(Loop):
    def backward(self, batch: Any) -> None:
        super().backward(batch)
        self.net[1][0].bias.grad = None  # type: ignore[index, union-attr]


class InBfloat16(Loop):
    def backward(self, batch: Any) -> None:
        total = [torch.zeros_like(leaf, dtype=torch.bfloat16) for leaf in self.net.parameters()]
        for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
            self.optimizer.zero_grad()
            (MSE(self.net(x), target) / MICROBATCHES).backward()
            for one, leaf in zip(total, self.net.parameters(), strict=True):
                one += leaf.grad.to(torch.bfloat16)
        for one, leaf in zip(total, self.net.parameters(), strict=True):
            leaf.grad = one.float()


class SharedRows(Loop):
    """Two replicas whose sampler was not told which of them it is."""

    def backward(self, batch: Any) -> None:
        for _ in range(2):
            for x, target in zip(*(half.chunk(MICROBATCHES)[:2] for half in batch), strict=True):
                (MSE(self.net(x), target) / MICROBATCHES).backward()


class OtherTargets(Loop):
    """The last stage is microbatches ahead of the first, or behind it."""

    def __init__(self, net: nn.Module, by: int, **how: Any) -> None:
        super().__init__(net, **how)
        self.by = by

    def backward(self, batch: Any) -> None:
        inputs, targets = (half.chunk(MICROBATCHES) for half in batch)
        for x, target in zip(inputs, targets[self.by :] + targets[: self.by], strict=True):
            (MSE(self.net(x), target) / MICROBATCHES).backward()


class DealtTargets(Loop):
    """The first stage cuts a batch in blocks, the last one by strides."""

    def backward(self, batch: Any) -> None:
        for k, x in enumerate(batch[0].chunk(MICROBATCHES)):
            (MSE(self.net(x), batch[1][k::MICROBATCHES]) / MICROBATCHES).backward()


class OnBatches(Loop):
    """The loader has an order of its own."""

    def __init__(self, net: nn.Module, order: Callable[[list[Any]], list[Any]], **how: Any) -> None:
        super().__init__(net, **how)
        self.order = order

    def run(self, batches: list[Any], rates: list[float]) -> None:
        super().run(self.order(batches), rates)


def others(x: Callable[[Tensor], Tensor], target: Callable[[Tensor], Tensor]) -> Callable[[list[Any]], list[Any]]:
    """Batches whose inputs, or targets, come in another order."""
    return lambda batches: [(x(inputs), target(targets)) for inputs, targets in batches]


def kept(rows: Tensor) -> Tensor:
    return rows


def drawn(rows: Tensor, seed: int = 42) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def pooled(order: Callable[[Tensor], Tensor], batches: list[Any]) -> list[Any]:
    """The rows of all batches as a sampler has mixed them."""
    whole = [order(torch.cat(halves)) for halves in zip(*batches, strict=True)]
    return [*zip(*(half.chunk(len(batches)) for half in whole), strict=True)]


def dealt(rows: Tensor, ways: int) -> Tensor:
    return torch.cat([rows[k::ways] for k in range(ways)])


class OverTokens(Loop):
    def backward(self, batch: Any) -> None:
        for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
            ((self.net(x) - target) ** 2).sum().backward()


class OverRows(Loop):
    def backward(self, batch: Any) -> None:
        for x, target in zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True):
            (((self.net(x) - target) ** 2).mean(1).sum() / MICROBATCHES).backward()


class ByTorch(Loop):
    """Torch's own runtime, in rounds of microbatches."""

    def __init__(self, net: nn.Module, rounds: int = 1, average: bool = True, **how: Any) -> None:
        super().__init__(net, **how)
        stage = PipelineStage(net, 0, 1, torch.device("cpu"))
        self.rounds, microbatches = rounds, MICROBATCHES // rounds
        self.schedule = ScheduleGPipe(stage, microbatches, self.loss, scale_grads=average)

    def loss(self, found: Tensor, target: Tensor) -> Tensor:
        return MSE(found, target) / self.rounds

    def backward(self, batch: Any) -> None:
        for x, target in zip(*(half.chunk(self.rounds) for half in batch), strict=True):
            self.schedule.step(x, target=target)


Made = Callable[[nn.Module], Loop]
SGD: dict[str, Any] = {"rule": "SGD", "clip": None, "momentum": 0.9}
ADAM: dict[str, Any] = {"rule": "AdamW", "clip": 0.05, "weight_decay": 0.3}
WRONG: dict[str, tuple[Made, dict[str, Any], str]] = {
    "summed": (lambda net: Summed(net, **SGD), SGD, "summed over the 4 microbatches and not averaged"),
    "overwritten": (lambda net: Overwritten(net, **SGD), SGD, "gradients are overwritten, not accumulated"),
    "twice": (lambda net: Twice(net, **SGD), SGD, "Microbatch 1 counts twice"),
    "own norms": (lambda net: OwnNorms(net, **ADAM), ADAM, "Each stage is clipped by its own norm"),
    "norm counts twice": (lambda net: CountedTwice(net, **SGD | {"clip": 0.05}), SGD | {"clip": 0.05}, "2 times"),
    "not clipped": (lambda net: Loop(net, **SGD), SGD | {"clip": 0.05}, "Gradients are not clipped"),
    "clipped first": (
        lambda net: ClippedFirst(net, **SGD | {"clip": 0.05}),
        SGD | {"clip": 0.05},
        "is clipped before gradients are added up",
    ),
    "never zeroed": (lambda net: NeverZeroed(net, **SGD), SGD, "zero_grad is missing"),
    "often": (lambda net: StepsOften(net, **SGD), SGD, "steps after each microbatch"),
    "stale": (lambda net: Stale(net, **SGD), SGD, r"one step before \(stale\)"),
    "late rate": (lambda net: LateRate(net, **SGD), SGD, "rate is that of the step before"),
    "counts": (lambda net: Counting(net, **ADAM), ADAM, "counts one step too many"),
    "Adam": (lambda net: Loop(net, **ADAM | {"rule": "Adam"}), ADAM, "added to the gradient"),
    "no decay": (lambda net: Loop(net, **ADAM | {"weight_decay": 0.0}), ADAM, "There is no weight decay"),
    "epsilon": (lambda net: Loop(net, **ADAM | {"eps": 1e-3}), ADAM, "Epsilon is 0.001, not 1e-08"),
    "no momentum": (lambda net: Loop(net, **SGD | {"momentum": 0.0}), SGD, "There is no momentum"),
    "one is frozen": (lambda net: Frozen(net, **SGD), SGD, "1 of them are as they were"),
    "bfloat16": (lambda net: InBfloat16(net, **SGD), SGD, "added up in bfloat16"),
    "shared rows": (
        lambda net: SharedRows(net, **SGD),
        SGD,
        "All 2 replicas are handed the same rows, those of replica 0",
    ),
    "other targets": (lambda net: OtherTargets(net, 1, **SGD), SGD, "Targets are those of the next microbatch"),
    "targets before": (lambda net: OtherTargets(net, -1, **ADAM), ADAM, "are those of the microbatch before"),
    "dealt targets": (
        lambda net: DealtTargets(net, **ADAM),
        ADAM,
        "Targets are dealt out one by one to 4 microbatches or replicas, inputs in blocks",
    ),
    "averaged twice": (lambda net: AveragedTwice(net, **SGD), SGD, "over the 4 microbatches once too often"),
    "dropped": (lambda net: Dropped(net, **SGD), SGD, "Microbatch 3 is missing"),
    "norm of each": (lambda net: NormOfEach(net, **ADAM), ADAM, "Each parameter is clipped by its own norm"),
    "early rate": (lambda net: EarlyRate(net, **SGD), SGD, "rate is that of the next step"),
    "no correction": (lambda net: Uncorrected(net, **ADAM), ADAM, "There is no bias correction"),
    "AdamW": (
        lambda net: Loop(net, **ADAM),
        ADAM | {"rule": "Adam"},
        r"decoupled \(AdamW\), not added to the gradient",
    ),
    "some decay": (lambda net: Loop(net, **SGD, weight_decay=0.1), SGD, "There is a weight decay of 0.1"),
    "no groups": (
        lambda net: Loop(net, **ADAM),
        ADAM | {"groups": {"*bias": {"weight_decay": 0.0}}},
        "Groups are not told apart",
    ),
    "uphill": (lambda net: Loop(net, **SGD, maximize=True), SGD, "Gradients have the wrong sign"),
    "another decay": (lambda net: Loop(net, **ADAM | {"weight_decay": 0.1}), ADAM, "Weight decay is 0.1, not 0.3"),
    "other betas": (lambda net: Loop(net, **ADAM | {"betas": (0.9, 0.95)}), ADAM, r"Betas are \(0.9, 0.95\), not"),
    "tokens": (lambda net: OverTokens(net, **SGD), SGD, "summed over the 64 rows or tokens and not averaged"),
    "torch's sum": (
        lambda net: ByTorch(net, average=False, **SGD),
        SGD,
        "summed over the 4 microbatches and not averaged",
    ),
    "torch in two rounds": (
        lambda net: ByTorch(net, rounds=2, **SGD),
        SGD,
        "are divided again at each round of 2 microbatches",
    ),
}


# A first step does not tell these.
IN_TWO_STEPS = {"never zeroed", "stale", "late rate", "early rate", "no momentum", "other betas"}


@cache
def first() -> tuple[fpipe.Model, Any]:
    """Cut once, so that all mistakes share its traces."""
    return fpipe.from_sequential(net_of(2), stages=2, loss=MSE)[:2]


def steps(
    made: Made, many: int = 2, rows: int = 8, far: float = 1.0
) -> tuple[Any, Any, list[Any], list[float], dict[str, Tensor]]:
    """A model with its first parameters, batches and rates, and the parameters that a loop has made of them."""
    net, (model, params) = net_of(2), first()
    torch.manual_seed(1)
    batches = [(torch.randn(rows, 8), far * torch.randn(rows, 8)) for _ in range(many)]
    rates = [0.05, 0.02, 0.03][:many]
    made(net).run(batches, rates)
    return model, params, batches, rates, {name: leaf.detach() for name, leaf in net.named_parameters()}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of this process alone, for torch's runtime."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(case: str, alone: None):
    made, said, words = WRONG[case]
    model, params, batches, rates, after = steps(made, many=2 if case in IN_TWO_STEPS else 1)
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=MICROBATCHES, **said)


@pytest.mark.parametrize("said", [SGD, ADAM, {"rule": "RMSprop", "clip": 1.0}, {"rule": "Adam", "clip": None}], ids=str)
def test_what_is_right_is_not_accused(said: dict[str, Any]):
    model, params, batches, rates, after = steps(lambda net: Loop(net, **said))
    for microbatches in (1, 2, 4):  # other orders of additions, to rounding
        report = fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=microbatches, **said)
        assert len(report.leaves) == 4


@pytest.mark.parametrize("rule", ["AdamW", "RMSprop"])
def test_a_leaf_whose_gradient_is_rounding_alone_is_not_accused(rule: str):
    """A batch norm takes the mean off, so the bias before it has a gradient of rounding, of any sign, and a rule that
    divides by its size moves it by the whole rate: the same rows in another order moved it the other way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    x, target, order = torch.randn(16, 6), torch.randn(16, 3), torch.randperm(16)
    model, params, state = fpipe.from_sequential(copy.deepcopy(net), stages=1, loss=MSE)
    optimizer = getattr(torch.optim, rule)(net.parameters(), lr=0.01, weight_decay=0.0)
    MSE(net(x[order]), target[order]).backward()
    optimizer.step()
    after = dict(net.named_parameters())
    how: dict[str, Any] = {"rule": rule, "lr": 0.01, "weight_decay": 0.0, "state": state}
    fpipe.compare_step(model, params, (x, target), after, **how)
    after = {name: 2 * old - after[name] for name, old in joined(params).items()}
    with pytest.raises(fpipe.GradientMismatch, match="Gradients have the wrong sign"):
        fpipe.compare_step(model, params, (x, target), after, **how)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda net: OverRows(net, **SGD), "over the 3 rows or tokens of each microbatch and not averaged"),
        (lambda net: Loop(net, **SGD | {"clip": 1.0}), "Gradients are clipped to 1"),
    ],
    ids=["rows", "a clip"],
)
def test_a_mistake_of_one_step_is_named(made: Made, words: str):
    model, params, batches, rates, after = steps(made, many=1, rows=12, far=20.0)
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=MICROBATCHES, **SGD)


IN_A_STEP: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "Targets are those of the next row": (kept, lambda rows: rows.roll(-1, 0)),
    "Targets are those of the row before": (kept, lambda rows: rows.roll(1, 0)),
    "Targets come in the reverse order of the rows": (kept, lambda rows: rows.flip(0)),
    "Targets are shuffled by torch.randperm of seed 42, inputs are not": (kept, drawn),
    "Targets are those of the next of 2 microbatches or replicas": (kept, lambda rows: rows.roll(6, 0)),
    "Targets of 4 microbatches or replicas come in reverse": (kept, lambda rows: torch.cat(rows.chunk(4)[::-1])),
    "Inputs are dealt out one by one to 4 microbatches or replicas, targets in": (lambda rows: dealt(rows, 4), kept),
    "Inputs are shuffled by torch.randperm of seed 42, targets are not": (drawn, kept),
}


@pytest.mark.parametrize("words", IN_A_STEP)
def test_rows_that_meet_the_targets_of_others_are_named(words: str):
    model, params, batches, rates, after = steps(
        lambda net: OnBatches(net, others(*IN_A_STEP[words]), **ADAM), many=1, rows=12
    )
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=MICROBATCHES, **ADAM)


OVER_STEPS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "All steps are on the first batch": lambda each: [each[0]] * 3,
    "The batches come in reverse": lambda each: each[::-1],
    "Rows are dealt out one by one to the steps": lambda each: pooled(lambda rows: dealt(rows, 3), each),
    "Each step is on the batch of the one before": lambda each: [each[0], *each[:-1]],
    "Step 2 is on the batch of step 0": lambda each: [*each[:2], each[0]],
    "Steps 1 and 2 have each other's batch": lambda each: [each[0], each[2], each[1]],
    "Rows of all steps are shuffled by torch.randperm of seed 42": lambda each: pooled(drawn, each),
}


@pytest.mark.parametrize("words", OVER_STEPS)
def test_steps_on_rows_of_others_are_named(words: str):
    model, params, batches, rates, after = steps(lambda net: OnBatches(net, OVER_STEPS[words], **ADAM), many=3)
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=1, **ADAM)


def test_an_optimizer_that_is_resumed_one_step_behind_is_named():
    """Its state is saved before it counts."""
    made: list[Loop] = []
    model, _, batches, rates, _ = steps(lambda net: made.append(Loop(net, **ADAM)) or made[0])
    net, optimizer = made[0].net, made[0].optimizer
    params = fpipe.split_params(model, {name: leaf.detach().clone() for name, leaf in net.named_parameters()})
    names = {leaf: name for name, leaf in net.named_parameters()}
    kept = {names[leaf]: {word: one.clone() for word, one in state.items()} for leaf, state in optimizer.state.items()}
    opt = tuple({name: kept[name] for name in stage} for stage in params)
    for state in optimizer.state.values():
        state["step"] -= 1
    made[0].run(batches, rates)
    with pytest.raises(fpipe.GradientMismatch, match="The optimizer counts one step too few"):
        fpipe.compare_step(model, params, batches, dict(net.named_parameters()), opt=opt, lr=rates, **ADAM)


def test_labels_that_are_shifted_twice_are_named():
    """The data set has shifted them already, and so does the loss."""
    torch.manual_seed(0)
    net, ids = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11)), torch.randint(0, 11, (4, 6))

    def loss(y: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())

    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=loss)
    for by, words in ((-1, "too many"), (1, "too few")):
        trained = copy.deepcopy(net)
        loss(trained(ids), ids.roll(-1, 1).roll(by, 1)).backward()
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
        after = dict(trained.named_parameters())
        with pytest.raises(fpipe.GradientMismatch, match=f"Targets are shifted by one position {words}"):
            fpipe.compare_step(model, params, (ids, ids.roll(-1, 1)), after, rule="SGD", lr=0.1)


def test_a_pipeline_of_ours_is_right_and_what_it_tells_is_compared():
    model, params, batches, rates, _ = steps(lambda net: Loop(net, **ADAM))
    parts = fpipe.split(4), fpipe.schedules.zb_h2(2), fpipe.merge(), fpipe.update("AdamW", clip=0.05), fpipe.steps(2)
    program = fpipe.chain(*parts)(fpipe.program(model))
    found = fpipe.build(program, model)(params, batches, opt=fpipe.optimizer_state(program, params), lr=rates)
    how: dict[str, Any] = {"rule": "AdamW", "clip": 0.05, "lr": rates, "microbatches": 4}
    report = fpipe.compare_step(model, params, batches, found.params, norm=found.norm, loss=found.loss, **how)
    assert report.bitwise
    assert len(report.notes) == 1  # the norm tells how large gradients are
    for word, told, words in (
        ("norm", [found.norm[0] * 2**0.5, *found.norm[1:]], "The norm of step 0 is .*: counts everything 2 times"),
        ("loss", [found.loss[0], found.loss[1] * 4], "The loss of step 1 is .*: 4 x"),
    ):
        with pytest.raises(fpipe.GradientMismatch, match=words):
            fpipe.compare_step(model, params, batches, found.params, **how, **{word: told})


@pytest.mark.parametrize(
    ("made", "said", "rate", "words"),
    [
        ("AdamW", "AdamW", 0.02, "The learning rate is 0.01, not 0.02"),
        ("SGD", "SGD", 0.03, "The learning rate is 0.01, not 0.03, or gradients are 0.333 times as large"),
        ("SGD", "SGD", 0.02, "once too often, or the learning rate is 0.01, not 0.02"),
        ("AdamW", "Adam", 0.01, "The parameters are those of AdamW with its defaults"),
        ("AdamW", "SGD", 0.01, "The parameters are those of AdamW with its defaults"),
    ],
)
def test_another_rate_or_rule_is_named(made: str, said: str, rate: float, words: str):
    net, batch = net_of(2), (torch.randn(8, 8), torch.randn(8, 8))
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    Loop(net, made, None).run([batch], [0.01])
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, batch, dict(net.named_parameters()), rule=said, lr=rate)


def test_what_is_no_number_is_named():
    """What a step of SGD tells of gradients was solved for, and torch ended that with an assertion of its own."""
    net, batch = net_of(2), (torch.randn(8, 8), torch.randn(8, 8))
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    Loop(net, "SGD", None).run([batch], [0.01])
    after = {name: leaf.detach().clone() for name, leaf in net.named_parameters()}
    next(iter(after.values()))[0] = torch.nan
    with pytest.raises(fpipe.GradientMismatch, match="NaN or infinite numbers in"):
        fpipe.compare_step(model, params, batch, after, rule="SGD", lr=0.01)


def test_a_warm_up_from_zero_hides_nothing():
    """Its first step moves nothing, and was taken for a rule that does not tell how large gradients are."""
    net, batches = net_of(2), [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    Loop(net, "SGD", None).run(batches, [0.0, 0.1, 0.2])
    found = fpipe.compare_step(model, params, batches, dict(net.named_parameters()), rule="SGD", lr=[0.0, 0.1, 0.2])
    assert "do not tell" not in str(found)


def test_a_tie_of_which_a_use_is_missing_is_named():
    torch.manual_seed(0)
    net, ids = tied(), torch.randint(0, 7, (8,))
    model, params, _ = fpipe.from_module(copy.deepcopy(net), 2, loss=nn.functional.cross_entropy, example=(ids, ids))
    weight = net.embed.weight.detach()  # the embedding's lookup has no part in its gradient
    hidden = net.mid(nn.functional.embedding(ids, weight)).tanh()
    nn.functional.cross_entropy(hidden @ net.head.weight.T, ids).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match=r"tied 'embed\.weight' is that of its use in stage 1 alone"):
        fpipe.compare_step(model, params, (ids, ids), dict(net.named_parameters()), rule="SGD", lr=0.1)


def test_one_of_three_uses_of_a_tie_that_is_missing_is_named():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    net[1].weight = net[2].weight = net[0].weight
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=3, loss=MSE)
    weight = net[0].weight.detach()  # the stage in the middle keeps the gradient of its copy to itself
    MSE(net[2]((net[0](x)) @ weight.T), target).backward()
    torch.optim.SGD([net[0].weight], lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match=r"tied '0\.weight' misses its use in stage 1"):
        fpipe.compare_step(model, params, (x, target), {"0.weight": net[0].weight}, rule="SGD", lr=0.1)


@pytest.mark.parametrize(
    ("times", "clip", "words"),
    [
        ((1, 2), None, "tied 'embed.weight' counts its use in stage 1 twice"),
        ((2, 2), None, "tied 'embed.weight' is added up twice"),
        ((1, 1), 0.1, "The norm counts tied parameters once for each use"),
        ((1, 1), -0.1, "The norm misses tied parameters"),
    ],
)
def test_a_tie_that_counts_too_often_is_named(times: tuple[int, int], clip: float | None, words: str):
    """The first and the last stage have each a copy, whose gradients they add up, and then perhaps once more."""
    torch.manual_seed(0)
    ids, embed, mid = torch.randint(0, 7, (8,)), nn.Embedding(7, 8), nn.Linear(8, 8)
    head = nn.Linear(8, 7, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    net = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7, bias=False))
    net[3].weight = net[0].weight
    net.load_state_dict(
        {f"{k}.{name}": leaf for k, one in ((0, embed), (1, mid), (3, head)) for name, leaf in one.state_dict().items()}
    )
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.cross_entropy)
    nn.functional.cross_entropy(head(mid(embed(ids)).tanh()), ids).backward()
    total = times[0] * embed.weight.grad + times[1] * head.weight.grad
    embed.weight.grad, head.weight.grad = total.clone(), total.clone()
    leaves = [embed.weight, mid.weight, mid.bias, head.weight]
    if clip is not None:
        counted = leaves if clip > 0 else [mid.weight, mid.bias]
        nn.utils.clip_grads_with_norm_(leaves, abs(clip), nn.utils.get_total_norm([leaf.grad for leaf in counted]))
        clip = abs(clip)
    torch.optim.SGD(leaves, lr=0.1).step()
    after = {"0.weight": embed.weight, "1.weight": mid.weight, "1.bias": mid.bias}
    with pytest.raises(fpipe.GradientMismatch, match=words.replace("embed", "0")):
        fpipe.compare_step(model, params, (ids, ids), after, rule="SGD", lr=0.1, clip=clip)


@pytest.mark.parametrize(
    ("rule", "classes"),
    [("SGD", 0), ("SGD", 1), ("SGD", 5), ("AdamW", 5)],
    ids=["vectors", "numbers", "labels", "state"],
)
def test_targets_that_are_shuffled_by_another_seed_are_named(rule: str, classes: int):
    """Two loaders, one of inputs and one of targets, whose generators have seeds of their own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, classes or 8))
    x = torch.randn(12, 8)
    target = torch.randint(0, 5, (12,)) if classes > 1 else torch.randn(12, classes or 8)
    loss: Any = nn.functional.cross_entropy if classes > 1 else MSE
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=loss)
    loaders = [
        DataLoader([*zip(range(12), half, strict=True)], 4, shuffle=True, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        for seed, half in enumerate((x, target))
    ]
    pairs = dict[int, int]()
    for (rows, inputs), (others, targets) in zip(*loaders, strict=True):
        (loss(net(inputs), targets) / 3).backward()
        pairs |= zip(rows.tolist(), others.tolist(), strict=True)
    optimizer = getattr(torch.optim, rule)(net.parameters(), lr=0.1)
    optimizer.step()
    state = named_state(net, optimizer) if rule == "AdamW" else None
    after = dict(net.named_parameters())
    with pytest.raises(fpipe.GradientMismatch) as found:
        fpipe.compare_step(model, params, (x, target), after, rule=rule, lr=0.1, opt_after=state)
    first, other, second, third, more = map(int, re.findall(r"\d+", str(found.value).split("\n")[1]))
    moved = [row for row, met in pairs.items() if not torch.equal(target[row], target[met])]
    assert len(moved) == more + 2
    assert [first, second] == sorted(moved)[:2]
    assert all(torch.equal(target[pairs[row]], target[met]) for row, met in ((first, other), (second, third)))


def test_rows_that_replicas_draw_by_themselves_are_named():
    """Two samplers that shuffle under different seeds: some rows are drawn by both, others by none."""
    net, (x, target) = net_of(), (torch.randn(8, 8), torch.randn(8, 8))
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    drawn = [[*DistributedSampler(range(8), 2, rank, seed=rank)] for rank in range(2)]  # type: ignore[arg-type]
    for rows in drawn:
        (MSE(net(x[rows]), target[rows]) / 2).backward()
    missing = sorted({*range(8)} - {*drawn[0], *drawn[1]})
    both = sorted({*drawn[0]} & {*drawn[1]})
    assert missing
    torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1).step()
    said: dict[str, Any] = {"rule": "SGD", "lr": 0.1, "weight_decay": 0.1}
    words = f"Rows? {', '.join(map(str, missing))} .* missing, rows? {', '.join(map(str, both))} counts? 2 times"
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, (x, target), dict(net.named_parameters()), **said)
    grads = {name: leaf.grad for name, leaf in net.named_parameters()}
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)
    for name, leaf in net.named_parameters():
        leaf.data.copy_(joined(params)[name])
    adam.step()
    after = dict(net.named_parameters())
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, (x, target), after, rule="AdamW", lr=0.1, grads=grads)


def smoothed(found: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(found, target, label_smoothing=0.1)


def focal(found: Tensor, target: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(found, target, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


ENTROPY = nn.functional.cross_entropy
UNKNOWN: dict[str, Callable[[nn.Sequential, Tensor, Tensor], Tensor]] = {
    "a row is dropped": lambda net, x, target: ENTROPY(net(x[1:]), target[1:]),
    "other inputs": lambda net, x, target: ENTROPY(net(1.5 * x), target),
    "noise": lambda net, x, target: ENTROPY(net(x + 0.05 * torch.randn_like(x)), target),
    "dropout": lambda net, x, target: ENTROPY(net[2](nn.functional.dropout(net[:2](x), 0.2)), target),
    "another activation": lambda net, x, target: ENTROPY(net[2](nn.functional.hardtanh(net[0](x))), target),
    "a temperature": lambda net, x, target: ENTROPY(net(x) / 2, target),
    "smoothed": lambda net, x, target: smoothed(net(x), target),
    "focal": lambda net, x, target: focal(net(x), target),
    "scaled": lambda net, x, target: 3 * ENTROPY(net(x), target),
}


@pytest.mark.parametrize(
    ("width", "rows", "seeds"),
    [(4, 16, 1), *(pytest.param(*sizes, 8, marks=pytest.mark.deep) for sizes in ((4, 8), (4, 16), (16, 16), (64, 32)))],
)
def test_after_one_step_by_signs_no_mistake_is_named_that_nobody_made(width: int, rows: int, seeds: int):
    """Parameters tell the signs of few numbers, which other mistakes than these turn as well: targets of other rows
    were blamed for a row that was dropped, and epsilon for labels that were smoothed."""
    for seed in range(seeds):
        for case, made in UNKNOWN.items():
            for microbatches in (1, 2)[:seeds]:
                torch.manual_seed(seed)
                net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
                model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=ENTROPY)
                batch = torch.randn(rows, 4), torch.randint(3, (rows,))
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
                made(net, *batch).backward()
                optimizer.step()
                after, how = dict(net.named_parameters()), {"lr": 0.01, "microbatches": microbatches}
                try:
                    said = str(fpipe.compare_step(model, params, batch, after, rule="AdamW", **how))
                    assert "One step of AdamW tells the signs of gradients and hardly their sizes" in said
                except fpipe.GradientMismatch as error:
                    named = str(error).split("\n")[1]
                    assert named.startswith(("It could be that ", "No mistake that is known")), (case, seed, named)


def test_it_is_said_that_gradients_of_another_size_may_look_right():
    said: dict[str, Any] = ADAM | {"clip": None}
    for many, words in ((1, "Hand in grads=, or several steps with norm="), (2, "a loss that is scaled looks right")):
        model, params, batches, rates, after = steps(lambda net: Loop(net, **said), many)
        report = fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=MICROBATCHES, **said)
        assert words in report.notes[-1]
    model, params, batches, rates, after = steps(lambda net: Loop(net, **SGD), 1)
    assert len(fpipe.compare_step(model, params, batches, after, lr=rates, **SGD).notes) == 1


def test_numbers_of_a_rule_are_those_of_each_step():
    numbers = [{"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.2}]

    class Varied(Loop):
        def run(self, batches: list[Any], rates: list[float]) -> None:
            for batch, one in zip(batches, numbers, strict=True):
                self.optimizer.param_groups[0] |= one
                super().run([batch], [one["lr"]])

    model, params, batches, _, after = steps(lambda net: Varied(net, clip=None))
    how: dict[str, Any] = {"rule": "AdamW", "microbatches": MICROBATCHES}
    assert fpipe.compare_step(model, params, batches, after, lr=numbers, **how).bitwise
    _, _, _, rates, after = steps(lambda net: Loop(net, clip=None, weight_decay=0.3))
    with pytest.raises(fpipe.GradientMismatch, match=r"Weight decay is 0.3, not 0.1\."):
        fpipe.compare_step(model, params, batches, after, lr=[{"lr": one, "weight_decay": 0.1} for one in rates], **how)
    with pytest.raises(ValueError, match="lr is a number, or a dict of lr, eps, weight_decay"):
        fpipe.compare_step(model, params, batches, after, lr={"lr": 0.1, "betas": 0.9}, **how)
    with pytest.raises(ValueError, match=r"weight_decay is said twice: 0.1 by lr=.*, and 0.3 beside it"):
        fpipe.compare_step(model, params, batches, after, lr=numbers[0], weight_decay=0.3, **how)
    numbers[1] = {"lr": 0.02, "weight_decay": 0.01}  # the default of AdamW, which need not be said
    _, _, _, _, after = steps(lambda net: Varied(net, clip=None))
    assert fpipe.compare_step(model, params, batches, after, lr=[numbers[0], 0.02], **how).bitwise


REFUSED: dict[str, tuple[Any, str]] = {
    "a missing name": ({"v": torch.ones(1)}, "there is no '0.0.weight' after the steps; found v"),
    "another shape": ({"0.0.weight": torch.ones(2)}, r"'0.0.weight' has the shape \[2\] after the steps"),
    "on meta": ({"0.0.weight": torch.ones(2, device="meta")}, r"'0.0.weight' is a tensor of .* on meta after"),
    "no names": (3, "after is a dict by name"),
    "few rates": (None, "lr is one number, or a list of 2, one for each step; found 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(case: str):
    after, words = REFUSED[case]
    model, params, batches, rates, own = steps(lambda net: Loop(net, **SGD))
    with pytest.raises(ValueError, match=words):
        fpipe.compare_step(model, params, batches, after or own, rule="SGD", lr=rates if after else rates[:1])


@pytest.mark.parametrize("word", ["opt", "opt_after", "grads"])
def test_torchs_own_shapes_are_refused_in_a_sentence(word: str):
    net, batch = net_of(2), (torch.randn(8, 8), torch.randn(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    adam = torch.optim.AdamW(net.parameters())
    odd: Any = {"opt": adam, "opt_after": adam.state_dict(), "grads": {"0.0.weight": None}}[word]
    said: dict[str, Any] = {"rule": "AdamW", "lr": 0.1, word: odd}
    with pytest.raises(TypeError, match=f"^{word} is "):
        fpipe.compare_step(model, params, batch, joined(params), **said)
    apart = [{"other": torch.zeros(1)}, {"other": torch.ones(1)}]
    for odd, kind, words in (
        ({"batches": []}, ValueError, "batches is the batch"),
        ({"batches": (batch, batch)}, ValueError, "ends in TypeError: linear.*hand in a list, .batch, ...,"),
        ({"batches": (batch,) * 3}, ValueError, "found a tuple of 3; of several steps hand in a list"),
        ({"lr": None}, TypeError, "lr is a number or a 0-d tensor; found NoneType"),
        ({"grads": apart}, ValueError, "nothing to compare the gradient of other with"),
        ({"groups": {"no": {"lr": 1.0}}}, ValueError, "no parameter has a name like 'no' of groups="),
        ({"opt": ({}, {})}, ValueError, "opt of stage 0 has other leaves"),
    ):
        how: Any = {"batches": batch, "rule": "AdamW", "lr": 0.1} | odd
        with pytest.raises(kind, match=words):
            fpipe.compare_step(model, params, how.pop("batches"), joined(params), **how)


def named_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: dict(optimizer.state[leaf]) for name, leaf in net.named_parameters()}


def test_gradients_and_optimizer_state_are_compared_where_they_are_given():
    made: list[Loop] = []
    model, params, batches, rates, after = steps(lambda net: made.append(Loop(net, **ADAM | {"clip": None})) or made[0])
    grads = {name: leaf.grad for name, leaf in made[0].net.named_parameters()}
    state = named_state(made[0].net, made[0].optimizer)
    said: dict[str, Any] = {"lr": rates, "microbatches": MICROBATCHES, **ADAM | {"clip": None}}
    assert fpipe.compare_step(model, params, batches, after, grads=grads, opt_after=state, **said).bitwise
    once_more = state | {"0.0.weight": state["0.0.weight"] | {"step": torch.tensor(3.0)}}
    with pytest.raises(fpipe.GradientMismatch, match=r"1 of \d+ values beside .* are others: step of 0.0.weight"):
        fpipe.compare_step(model, params, batches, after, opt_after=once_more, **said)
    halved = grads | {"0.0.weight": grads["0.0.weight"] / 2}
    with pytest.raises(fpipe.GradientMismatch, match=r"are others: the gradient of 0.0.weight\."):
        fpipe.compare_step(model, params, batches, after, grads=halved, **said)
    with pytest.raises(ValueError, match="nothing to compare the gradient of other with; there is the gradient of"):
        fpipe.compare_step(model, params, batches, after, grads={"other": grads["0.0.weight"]}, **said)
    with pytest.raises(ValueError, match=r"the gradient of 0.0.weight has the shape \[1\], and is to have"):
        fpipe.compare_step(model, params, batches, after, grads={"0.0.weight": torch.ones(1)}, **said)


def test_a_gradient_that_tensor_parallel_ranks_have_parts_of_is_explained():
    """Sequence parallelism: each rank normalises its half of the sequence, and nobody adds up the norm's gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    x, target = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    ranks = [copy.deepcopy(net) for _ in range(2)]
    halves = [one[0](half) for one, half in zip(ranks, x.chunk(2, 1), strict=True)]
    MSE(net[1](torch.cat(halves, 1)), target).backward()  # the linear layer reads all of it
    grads, after = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    for one in ranks:
        one[1].weight.grad, one[1].bias.grad = net[1].weight.grad.clone(), net[1].bias.grad.clone()
        grads.append({name: leaf.grad.clone() for name, leaf in one.named_parameters()})
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        after.append({name: leaf.detach() for name, leaf in one.named_parameters()})
    words = r"tensor-parallel ranks: 0.weight, 0.bias\.\nThe gradient of 0.weight is not added over 2 tensor-parallel"
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, (x, target), after, rule="SGD", lr=0.1, grads=grads)


def test_targets_that_a_loss_ignores_weigh_nothing():
    """Microbatches with different numbers of valid targets, whose mean over all tokens is not the mean of means."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    x, target = torch.randn(8, 8), torch.randint(0, 5, (8,))
    target[1:4] = -100
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=nn.functional.cross_entropy)
    for rows, ids in zip(x.chunk(2), target.chunk(2), strict=True):
        (nn.functional.cross_entropy(net(rows), ids, reduction="sum") / 5).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match="weighs as much as it has valid targets, not rows"):
        fpipe.compare_step(model, params, (x, target), dict(net.named_parameters()), rule="SGD", lr=0.1, microbatches=2)
