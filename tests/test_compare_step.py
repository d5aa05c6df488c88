"""Steps that others made, right ones and wrong ones, each by real code that makes the mistake."""

from __future__ import annotations

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
from tests.test_update import joined, net_of, tied

MICROBATCHES = 4
ENTROPY = nn.functional.cross_entropy


def cut(batch: Any) -> list[tuple[Tensor, Tensor]]:
    return [*zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True)]


class Loop:
    """A training loop by hand, of which each part can be done wrongly; `weights` are those of the microbatches."""

    weights: Sequence[float] = (1 / MICROBATCHES,) * MICROBATCHES

    def __init__(self, net: nn.Module, rule: str = "AdamW", clip: float | None = 0.05, **settings: Any) -> None:
        self.net, self.clip, self.settings = net, clip, settings
        self.optimizer = getattr(torch.optim, rule)(net.parameters(), lr=0.01, **settings)

    def backward(self, batch: Any) -> None:
        for (x, target), weight in zip(cut(batch), self.weights, strict=True):
            (MSE(self.net(x), target) * weight).backward()

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


class OwnNorms(Loop):
    def clipped(self) -> None:
        for stage in (self.net[0], self.net[1]):  # type: ignore[index]
            nn.utils.clip_grad_norm_(stage.parameters(), 0.05)


class CountedTwice(Loop):
    def clipped(self) -> None:
        grads = [leaf.grad for leaf in self.net.parameters()]
        norm = nn.utils.get_total_norm([*grads, *grads])
        nn.utils.clip_grads_with_norm_(self.net.parameters(), 0.05, norm)


class ByMicrobatch(Loop):
    """Gradients of each microbatch are worked on before they are added up."""

    def backward(self, batch: Any) -> None:
        total = list[Tensor]()
        for x, target in cut(batch):
            self.optimizer.zero_grad()
            MSE(self.net(x), target).backward()
            each = self.grads()
            total = [one + other for one, other in zip(total, each, strict=True)] if total else each
        for one, leaf in zip(total, self.net.parameters(), strict=True):
            leaf.grad = one.float() / MICROBATCHES

    def grads(self) -> list[Tensor]:
        return [leaf.grad for leaf in self.net.parameters()]


class ClippedFirst(ByMicrobatch):
    def grads(self) -> list[Tensor]:
        super().clipped()
        return super().grads()

    def clipped(self) -> None:
        pass


class InBfloat16(ByMicrobatch):
    def grads(self) -> list[Tensor]:
        return [grad.bfloat16() for grad in super().grads()]


class NeverZeroed(Loop):
    def zero(self) -> None:
        pass


class StepsOften(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        each = [part for batch in batches for part in cut(batch)]
        super().run(each, [rate for rate in rates for _ in range(MICROBATCHES)])

    def backward(self, batch: Any) -> None:
        MSE(self.net(batch[0]), batch[1]).backward()


class Stale(Loop):
    def run(self, batches: list[Any], rates: list[float]) -> None:
        before = self.net.state_dict()
        for batch, rate in zip(batches, rates, strict=True):
            self.stale, before = before, {name: leaf.clone() for name, leaf in self.net.state_dict().items()}
            super().run([batch], [rate])

    def backward(self, batch: Any) -> None:
        now = {name: leaf.clone() for name, leaf in self.net.state_dict().items()}
        self.net.load_state_dict(self.stale)
        super().backward(batch)
        self.net.load_state_dict(now)


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
    """Its steps were counted otherwise before the first."""

    def __init__(self, net: nn.Module, steps: float, **how: Any) -> None:
        super().__init__(net, **how)
        for leaf in net.parameters():
            zeros = torch.zeros_like(leaf)
            self.optimizer.state[leaf] = {"step": torch.tensor(steps), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


class Frozen(Loop):
    def backward(self, batch: Any) -> None:
        super().backward(batch)
        self.net[1][0].bias.grad = None  # type: ignore[index, union-attr]


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


class On(Loop):
    """The loader hands out other batches, or a schedule other rates."""

    def __init__(self, net: nn.Module, change: Callable[[list[Any], list[float]], Any], **how: Any) -> None:
        super().__init__(net, **how)
        self.change = change

    def run(self, batches: list[Any], rates: list[float]) -> None:
        super().run(*self.change(batches, rates))


def others(
    target: Callable[[Tensor], Tensor] = lambda rows: rows, x: Callable[[Tensor], Tensor] = lambda rows: rows
) -> Callable[..., Loop]:
    """A loop whose targets, or inputs, come in another order."""
    return partial(On, change=lambda batches, rates: ([(x(rows), target(own)) for rows, own in batches], rates))


def drawn(rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(42))]


def dealt(rows: Tensor) -> Tensor:
    return torch.cat([rows[k::4] for k in range(4)])


Made = Callable[[nn.Module], Loop]
SGD: dict[str, Any] = {"rule": "SGD", "clip": None, "momentum": 0.9}
CLIPPED = SGD | {"clip": 0.05}
ADAM: dict[str, Any] = {"rule": "AdamW", "clip": 0.05, "weight_decay": 0.3}


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


def named(made: Made, said: dict[str, Any], words: str, many: int = 1, **size: Any) -> None:
    """The mistake of a loop is called by its name."""
    model, params, batches, rates, after = steps(made, many, **size)
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=MICROBATCHES, **said)


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


@pytest.mark.parametrize("words", WEIGHTS)
def test_a_wrong_sum_is_named(words: str):
    def made(net: nn.Module) -> Loop:
        loop = Loop(net, **SGD)
        loop.weights = WEIGHTS[words]
        return loop

    named(made, SGD, words, rows=12)


WRONG: dict[str, tuple[Callable[..., Loop], dict[str, Any], dict[str, Any]]] = {
    # the words: a loop, how it is made, and what was meant
    "Each stage is clipped by its own norm": (OwnNorms, ADAM, ADAM),
    "[Tt]he norm counts everything 2 times": (CountedTwice, CLIPPED, CLIPPED),
    "Gradients are not clipped, or to more": (Loop, SGD, CLIPPED),
    "is clipped before gradients are added up": (ClippedFirst, CLIPPED, CLIPPED),
    "steps after each microbatch": (StepsOften, SGD, SGD),
    r"added to the gradient \(Adam\)": (Loop, ADAM | {"rule": "Adam"}, ADAM),
    r"decoupled \(AdamW\), not added to the gradient": (Loop, ADAM, ADAM | {"rule": "Adam"}),
    "There is no weight decay": (Loop, ADAM | {"weight_decay": 0.0}, ADAM),
    "There is a weight decay of 0.1": (Loop, SGD | {"weight_decay": 0.1}, SGD),
    "Weight decay is 0.1, not 0.3": (Loop, ADAM | {"weight_decay": 0.1}, ADAM),
    "Epsilon is 0.001, not 1e-08": (Loop, ADAM | {"eps": 1e-3}, ADAM),
    "There is no bias correction": (Uncorrected, ADAM, ADAM),
    "Groups are not told apart": (Loop, ADAM, ADAM | {"groups": {"*bias": {"weight_decay": 0.0}}}),
    "1 of them are as they were": (Frozen, SGD, SGD),
    "added up in bfloat16": (InBfloat16, SGD, SGD),
    "counts one step too many": (partial(Counting, steps=1.0), ADAM, ADAM),
    "Targets are those of the next microbatch": (others(lambda rows: rows.roll(-2, 0)), SGD, SGD),
    "are those of the microbatch before": (others(lambda rows: rows.roll(2, 0)), ADAM, ADAM),
    "those of the next row": (others(lambda rows: rows.roll(-1, 0)), SGD, SGD),
    "those of the row before": (others(lambda rows: rows.roll(1, 0)), SGD, SGD),
    "in the reverse order of the rows": (others(lambda rows: rows.flip(0)), SGD, SGD),
    "next of 2 microbatches or replicas": (others(lambda rows: rows.roll(4, 0)), SGD, SGD),
    "Targets are dealt out one by one to 4": (others(dealt), SGD, SGD),
    "Inputs are dealt out one by one to 4": (others(x=dealt), SGD, SGD),
    "Targets are shuffled by torch.randperm of seed 42, inputs are not": (others(drawn), ADAM, ADAM),
    "Inputs are shuffled by torch.randperm of seed 42, targets are not": (others(x=drawn), ADAM, ADAM),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_of_one_step_is_named(words: str):
    made, how, said = WRONG[words]
    named(lambda net: made(net, **how), said, words)


def test_a_clip_that_nobody_meant_is_named():
    named(lambda net: Loop(net, **SGD | {"clip": 1.0}), SGD, "Gradients are clipped to 1", far=20.0)


OVER_STEPS: dict[str, tuple[Callable[..., Loop], dict[str, Any], dict[str, Any]]] = {
    "zero_grad is missing": (NeverZeroed, SGD, SGD),
    r"one step before \(stale\)": (Stale, SGD, SGD),
    "There is no momentum": (Loop, SGD | {"momentum": 0.0}, SGD),
    r"Betas are \(0.9, 0.95\), not": (Loop, ADAM | {"betas": (0.9, 0.95)}, ADAM),
    "rate is that of the step before": (partial(On, change=lambda b, rates: (b, [rates[0], *rates[:-1]])), SGD, SGD),
    "rate is that of the next step": (partial(On, change=lambda b, rates: (b, [*rates[1:], rates[-1]])), SGD, SGD),
    "All steps are on the first batch": (partial(On, change=lambda each, r: (each[:1] * 3, r)), ADAM, ADAM),
    "Each step is on the batch of the one before": (
        partial(On, change=lambda each, rates: ([each[0], *each[:-1]], rates)),
        ADAM,
        ADAM,
    ),
}


@pytest.mark.parametrize("words", OVER_STEPS)
def test_a_mistake_over_steps_is_named(words: str):
    made, how, said = OVER_STEPS[words]
    named(lambda net: made(net, **how), said, words, many=3 if "batch" in words else 2)


def test_an_optimizer_that_is_resumed_one_step_behind_is_named():
    """Its state is saved before it counts."""
    made: list[Loop] = []
    model, _, batches, rates, before = steps(lambda net: made.append(Loop(net, **ADAM)) or made[0])
    names = {leaf: name for name, leaf in made[0].net.named_parameters()}
    params = fpipe.split_params(model, {name: leaf.clone() for name, leaf in before.items()})
    states = made[0].optimizer.state
    kept = {names[leaf]: {word: one.clone() for word, one in state.items()} for leaf, state in states.items()}
    opt = tuple({name: kept[name] for name in stage} for stage in params)
    for state in states.values():
        state["step"] -= 1
    made[0].run(batches, rates)
    after = {name: leaf.detach() for leaf, name in names.items()}
    with pytest.raises(fpipe.GradientMismatch, match="The optimizer counts one step too few"):
        fpipe.compare_step(model, params, batches, after, opt=opt, lr=rates, **ADAM)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone, for torch's runtime."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_torchs_runtime_does_is_named(alone: None):
    summed = "summed over the 4 microbatches and not averaged"
    named(lambda net: ByTorch(net, average=False, **SGD), SGD, summed)
    named(lambda net: ByTorch(net, rounds=2, **SGD), SGD, "are divided again at each round of 2 microbatches")


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


def of_labels(y: Tensor, labels: Tensor) -> Tensor:
    return ENTROPY(y.flatten(0, 1), labels.flatten())


def test_labels_that_are_shifted_twice_are_named():
    """The data set has shifted them already, and so does the loss."""
    torch.manual_seed(0)
    net, ids = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11)), torch.randint(0, 11, (4, 6))
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=of_labels)
    for by, words in ((-1, "too many"), (1, "too few")):
        trained = copy.deepcopy(net)
        of_labels(trained(ids), ids.roll(-1, 1).roll(by, 1)).backward()
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
        ("norm", [found.norm[0] * 2**0.5, *found.norm[1:]], r"The norm of step 0 is .*: 1\.414 x\."),
        ("loss", [found.loss[0], found.loss[1] * 4], r"The loss of step 1 is .*: 4 x\."),
    ):
        with pytest.raises(fpipe.GradientMismatch, match=words):
            fpipe.compare_step(model, params, batches, found.params, **how, **{word: told})


@pytest.mark.parametrize(
    ("made", "said", "rate", "words"),
    [
        ("AdamW", "AdamW", 0.02, "The learning rate is 0.01, not 0.02"),
        ("SGD", "SGD", 0.03, "The learning rate is 0.01, not 0.03, or gradients are 0.333 times as large"),
        ("SGD", "SGD", 0.02, "once too often, or the learning rate is 0.01, not 0.02"),
        ("AdamW", "SGD", 0.01, "The parameters are those of AdamW with its defaults"),
    ],
)
def test_another_rate_or_rule_is_named(made: str, said: str, rate: float, words: str):
    net, batch = net_of(2), (torch.randn(8, 8), torch.randn(8, 8))
    Loop(net, made, None).run([batch], [0.01])
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(*first(), batch, dict(net.named_parameters()), rule=said, lr=rate)


EFFECTS: dict[str, tuple[dict[str, Any], int, str]] = {
    # how the loop differs from SGD at .05 with a clip of .05, of how many steps, and all that is said
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
def test_mistakes_of_one_effect_are_all_named(case: str):
    """A rate that was halved was said to be a norm that counts everything 4 times, and another clip another rate."""
    change, many, sentence = EFFECTS[case]
    net, (model, params) = net_of(2), first()
    torch.manual_seed(1)
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(many)]
    optimizer = torch.optim.SGD(net.parameters(), lr=change.get("lr", 0.05))
    for x, target in batches:
        optimizer.zero_grad()
        (MSE(net(x), target) * change.get("scale", 1.0)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), change.get("clip", 0.05))
        optimizer.step()
    with pytest.raises(fpipe.GradientMismatch) as error:
        fpipe.compare_step(model, params, batches, dict(net.named_parameters()), rule="SGD", lr=0.05, clip=0.05)
    assert str(error.value).splitlines()[1] == sentence


class Judging(nn.Module):
    """A net that computes its own loss of labels among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": ENTROPY(self.head(self.embed(ids).tanh()).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize(
    ("scale", "words"), [(4.0, "summed over the 4 microbatches"), (1.37, "gradients are 1.37 times as large")]
)
def test_a_net_that_computes_its_own_loss_is_judged(scale: float, words: str):
    """Its target is None, which has no rows: AttributeError."""
    torch.manual_seed(0)
    net, ids = Judging(), torch.randint(0, 7, (8, 3))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}, None
    model, params, _ = fpipe.from_module(copy.deepcopy(net), 2, example=batch)
    (scale * net(**batch[0])["loss"]).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match=words):
        fpipe.compare_step(model, params, batch, dict(net.named_parameters()), rule="SGD", lr=0.1, microbatches=4)


def test_a_warm_up_from_zero_hides_nothing():
    """Its first step moves nothing, and was taken for a rule that does not tell how large gradients are."""
    net, batches = net_of(2), [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    Loop(net, "SGD", None).run(batches, [0.0, 0.1, 0.2])
    found = fpipe.compare_step(*first(), batches, dict(net.named_parameters()), rule="SGD", lr=[0.0, 0.1, 0.2])
    assert "do not tell" not in str(found)


@pytest.mark.parametrize(
    ("times", "clip", "words"),
    [
        ((0, 1), None, "tied 'embed.weight' misses its use in stage 0"),
        ((1, 2), None, "tied 'embed.weight' counts its use in stage 1 twice"),
        ((2, 2), None, "tied 'embed.weight' is added up twice"),
        ((1, 1), 0.1, "The norm counts tied parameters once for each use"),
    ],
)
def test_a_tie_that_is_added_up_wrongly_is_named(times: tuple[int, int], clip: float | None, words: str):
    """The first and the last stage have each a copy, whose gradients they add up, and then perhaps once more."""
    torch.manual_seed(0)
    net, ids = tied(), torch.randint(0, 7, (8,))
    model, params, _ = fpipe.from_module(copy.deepcopy(net), 2, loss=ENTROPY, example=(ids, ids))
    embed, mid, head = net.embed, net.mid, nn.Linear(8, 7, bias=False)
    head.weight = nn.Parameter(embed.weight.detach().clone())
    ENTROPY(head(mid(embed(ids)).tanh()), ids).backward()
    total = times[0] * embed.weight.grad + times[1] * head.weight.grad
    embed.weight.grad, head.weight.grad = total.clone(), total.clone()
    leaves = [embed.weight, mid.weight, mid.bias, head.weight]
    if clip is not None:
        nn.utils.clip_grad_norm_(leaves, clip)
    torch.optim.SGD(leaves, lr=0.1).step()
    with pytest.raises(fpipe.GradientMismatch, match=words):
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
def test_after_one_step_by_signs_no_mistake_is_named_that_nobody_made(width: int, rows: int, seeds: int):
    """Parameters tell the signs of few numbers, which other mistakes than these turn as well: targets of other rows
    were blamed for a row that was dropped, and epsilon for labels that were smoothed."""
    for seed in range(seeds):
        for case, made in UNKNOWN.items():
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
            model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=ENTROPY)
            batch = torch.randn(rows, 4), torch.randint(3, (rows,))
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            made(net, *batch).backward()
            optimizer.step()
            after, how = dict(net.named_parameters()), {"lr": 0.01, "microbatches": 1 + seed % 2}
            try:
                said = str(fpipe.compare_step(model, params, batch, after, rule="AdamW", **how))
                assert "One step of AdamW tells the signs of gradients and hardly their sizes" in said
            except fpipe.GradientMismatch as error:
                told = str(error).split("\n")[1]
                assert told.startswith(("It could be that ", "No mistake that is known")), (case, seed, told)


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
    numbers[1] = {"lr": 0.02, "weight_decay": 0.01}  # the default of AdamW, which need not be said
    _, _, _, _, after = steps(lambda net: Varied(net, clip=None))
    assert fpipe.compare_step(model, params, batches, after, lr=[numbers[0], 0.02], **how).bitwise


def compared(after: Any = None, batches: Any = None, lr: Any = 0.1, **how: Any) -> fpipe.Report:
    """A step of AdamW that has moved nothing."""
    model, params = first()
    batches = (torch.ones(8, 8), torch.zeros(8, 8)) if batches is None else batches
    after = joined(params) if after is None else after
    return fpipe.compare_step(model, params, batches, after, **{"rule": "AdamW", "lr": lr} | how)


def with_bias(leaf: Tensor) -> dict[str, Tensor]:
    return joined(first()[1]) | {"0.0.bias": leaf}


PAIR = torch.ones(8, 8), torch.zeros(8, 8)
WEIGHT = "0.0.weight"

test_what_cannot_be_is_refused_in_a_sentence = refusals(
    globals(),
    """
compared({"v": torch.ones(1)})
    ValueError: there is no '0.0.weight' after the steps; found v
compared({WEIGHT: torch.ones(2)})
    ValueError: '0.0.weight' has the shape [2] after the steps
compared({WEIGHT: torch.ones(2, device="meta")})
    ValueError: '0.0.weight' is a tensor of torch.float32, torch.strided, on meta after
compared(3)
    ValueError: after is a dict by name
compared(lr=[0.1, 0.1])
    ValueError: lr is one number, or a list of 1, one for each step; found 2
compared(lr=None)
    TypeError: lr is a number or a 0-d tensor; found NoneType
compared(lr={"lr": 0.1, "betas": 0.9})
    ValueError: lr is a number, or a dict of lr, eps, weight_decay
compared(lr={"lr": 0.1, "weight_decay": 0.1}, weight_decay=0.3)
    ValueError: weight_decay is said twice: 0.1 by lr=
compared(batches=[])
    ValueError: batches is the batch
compared(batches=(PAIR, PAIR))
    ValueError: one batch of these inputs and these targets, 2 and 2, ends in TypeError: linear
compared(batches=(PAIR,) * 3)
    ValueError: found a tuple of 3; of several steps hand in a list
compared(opt=torch.optim.AdamW(net_of(2).parameters()))
    TypeError: opt is what optimizer_state makes, one tree a stage; found AdamW
compared(opt=({}, {}))
    ValueError: opt of stage 0 has other leaves
compared(opt_after=torch.optim.AdamW(net_of(2).parameters()).state_dict())
    TypeError: opt_after is by name
compared(grads={WEIGHT: None})
    TypeError: grads is a dict of tensors by name
compared(grads=[{"other": torch.zeros(1)}, {"other": torch.ones(1)}])
    ValueError: there is nothing to compare the gradient of other with; there is the gradient of
compared(grads={"other": torch.zeros(1)})
    ValueError: there is nothing to compare the gradient of other with
compared(grads={WEIGHT: torch.ones(1)})
    ValueError: the gradient of 0.0.weight has the shape [1], and is to have
compared(groups={"no": {"lr": 1.0}})
    ValueError: no parameter has a name like 'no' of groups=
# What a step of SGD tells of gradients was solved for, and torch ended that with an assertion of its own.
compared(with_bias(torch.full((8,), torch.nan)))
    GradientMismatch: NaN or infinite numbers in 0.0.bias
""",
)


def test_gradients_and_optimizer_state_are_compared_where_they_are_given():
    made: list[Loop] = []
    model, params, batches, rates, after = steps(lambda net: made.append(Loop(net, **ADAM | {"clip": None})) or made[0])
    grads = {name: leaf.grad for name, leaf in made[0].net.named_parameters()}
    state = {name: dict(made[0].optimizer.state[leaf]) for name, leaf in made[0].net.named_parameters()}
    said: dict[str, Any] = {"lr": rates, "microbatches": MICROBATCHES, **ADAM | {"clip": None}}
    assert fpipe.compare_step(model, params, batches, after, grads=grads, opt_after=state, **said).bitwise
    once_more = state | {WEIGHT: state[WEIGHT] | {"step": torch.tensor(3.0)}}
    with pytest.raises(fpipe.GradientMismatch, match=r"1 of \d+ values beside .* are others: step of 0.0.weight"):
        fpipe.compare_step(model, params, batches, after, opt_after=once_more, **said)
    halved = grads | {WEIGHT: grads[WEIGHT] / 2}
    with pytest.raises(fpipe.GradientMismatch, match=r"are others: the gradient of 0.0.weight\."):
        fpipe.compare_step(model, params, batches, after, grads=halved, **said)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.25, 0.75), "is not added over ranks: those of 2 add up to the right one"),
        ((0.5, 1.5), "is not added over ranks: those of 2 have the mean the right one"),
        ((0.25, 0.75, 0.5, 0.5), "is not added over ranks: those of 4 add up to 2 times the right one"),
        ((1.0, 0.3), "is another one on each of 2 ranks that are to have copies"),
    ],
)
def test_a_gradient_that_ranks_do_not_add_up_is_named(shares: tuple[float, ...], words: str):
    """As of a norm that sees half of a sequence on each rank, or of a router that sees half of the experts."""
    made: list[Loop] = []
    model, params, batches, rates, after = steps(lambda net: made.append(Loop(net, **SGD)) or made[0], many=1)
    right = {name: leaf.grad for name, leaf in made[0].net.named_parameters()}
    grads = [right | {WEIGHT: right[WEIGHT] * share} for share in shares]
    with pytest.raises(fpipe.GradientMismatch, match=f"The gradient of 0.0.weight {words}"):
        fpipe.compare_step(model, params, batches, after, lr=rates, microbatches=4, grads=grads, **SGD)


def test_targets_that_a_loss_ignores_weigh_nothing():
    """Microbatches with different numbers of valid targets, whose mean over all tokens is not the mean of means."""
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
