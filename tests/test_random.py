"""Random numbers follow from the key under every schedule, policy and runtime; torch's generator is left alone."""

import contextlib
import copy
import functools
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe.graphs.tracing.random_ops import draws_random_numbers
from tests.toys import POLICIES, Toy, merged

KEY = 7


@pytest.mark.parametrize("kind", ["", "alpha_", "feature_", "feature_alpha_", "native_"])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_if_it_moves_the_generator(kind: str, p: float, training: bool):
    op, args = getattr(torch.ops.aten, f"{kind}dropout").default, (torch.ones(3, 4), p, training)
    rng_state = torch.get_rng_state()
    op(*args)
    assert draws_random_numbers(op, args, {}) is not torch.equal(torch.get_rng_state(), rng_state)


def draw_by_functions(module: Any, x: Tensor) -> Tensor:
    """Draw by every function of torch that draws."""
    x = x + torch.rand(x.shape[-1]) * torch.randn_like(x) + torch.rand_like(x) + torch.randint(3, x.shape)
    x = x * torch.bernoulli(torch.sigmoid(x.detach())) + torch.empty_like(x).exponential_() + torch.normal(x.detach())
    return F.gumbel_softmax(x, dim=-1) + x[:, torch.randperm(x.shape[1])]


def draw_without_reading(module: Any, x: Tensor) -> Tensor:
    """Draw numbers that nobody reads: they still advance the generator for the next draws."""
    torch.rand(5)
    F.dropout(x, 0.3)
    torch.empty(3).normal_()
    return F.dropout(x, 0.5)


def lstm() -> nn.Module:
    return Toy(lambda module, x: module.rnn(x)[0], rnn=nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)


def linears(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 8))


TABLE, SEQUENCE, IMAGE = (10, 8), (10, 5, 8), (10, 3, 6, 6)
NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Dropout": (lambda: linears(nn.Dropout(0.3), nn.GELU(), nn.Dropout(0.5)), TABLE),
    "AlphaDropout": (lambda: linears(nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.2)), TABLE),
    "RReLU": (lambda: linears(nn.RReLU()), TABLE),
    "TransformerEncoderLayer": (lambda: nn.Sequential(attention(), attention(), nn.Linear(8, 8)), SEQUENCE),
    "LSTM": (lambda: nn.Sequential(lstm(), nn.Linear(8, 8)), SEQUENCE),
    "functions": (lambda: linears(Toy(draw_by_functions)), TABLE),
    "numbers that nobody reads": (lambda: linears(Toy(draw_without_reading)), TABLE),
    "BatchNorm and Dropout2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 8)),
        IMAGE,
    ),
}


def make_case(name: str) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make()
    x = torch.randn(shape)
    return net, (x, torch.randn_like(copy.deepcopy(net)(x)))


def seeded_grads(net: nn.Sequential, model: fpipe.Model, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of plain autograd, seeded for each stage and microbatch as `fold_in` does."""
    net = copy.deepcopy(net)
    for index, (x, t) in enumerate(zip(*(tensor.tensor_split(4) for tensor in batch), strict=True)):
        y, children = x, iter(net)
        for stage_index, stage in enumerate(model.stages):
            torch.manual_seed(fpipe.fold_in(KEY, stage_index, index))
            for _ in stage.name.split(", "):
                y = next(children)(y)
        (F.mse_loss(y, t) * (len(x) / len(batch[0]))).backward()
    return {name: leaf.grad for name, leaf in net.named_parameters() if leaf.grad is not None}


@functools.cache
def cut_case(name: str) -> tuple[fpipe.Model, Any, Any, Any, dict[str, Tensor]]:
    """Return a net in stages with its expected gradients, shared by all policies."""
    net, batch = make_case(name)
    model, params, state = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    return model, params, state, batch, seeded_grads(net, model, batch)


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NETS)
def test_the_draws_of_a_stage_follow_from_the_key(name: str, policy: str, trace: bool):
    model, params, state, batch, expected_grads = cut_case(name)
    schedule = (*POLICIES[policy], fpipe.schedules.one_f_one_b(2), fpipe.merge())
    program = fpipe.chain(fpipe.split(4), *schedule)(fpipe.program(model))
    rng_state = torch.get_rng_state()
    result = fpipe.build(program, model, trace=trace)(params, batch, state=state, key=KEY)
    assert torch.equal(rng_state, torch.get_rng_state())
    grads = fpipe.join_params(model, result.grads)
    assert all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())
    if trace:
        assert fpipe.verify(program, model, params, batch, state=state, key=KEY).bitwise


@pytest.mark.parametrize("trace", [True, False])
def test_dropout_drops_the_same_numbers_in_the_gradient(trace: bool):
    """The zeros of y are the zeros of the gradient of x, under every policy."""
    net = nn.Sequential(nn.Identity(), *(nn.Dropout(0.001) for _ in range(100)))
    model, params, _ = fpipe.from_sequential(net, sizes=[51, 50], loss=lambda y, t: (y * t).sum(), reduction="sum")
    batch = torch.ones(200, 50), torch.ones(200, 50)
    outputs: list[Tensor] = []
    for transforms in POLICIES.values():
        program = fpipe.chain(fpipe.split(10), *transforms, fpipe.merge())(fpipe.program(model, input_grads=True))
        result = fpipe.build(program, model, trace=trace)(params, batch, key=KEY)
        assert torch.equal(result.outputs == 0, result.input_grads == 0)
        assert torch.equal(result.outputs, result.input_grads)  # of ones, by which both are multiplied
        assert 0.05 < (result.outputs == 0).float().mean() < 0.15
        outputs.append(result.outputs)
    assert all(torch.equal(outputs[0], output) for output in outputs)


def noisy_loss(y: Tensor, target: Tensor) -> Tensor:
    return (F.dropout(y) - target).square().mean()


def draw_unread(p: dict[str, Tensor], x: Tensor) -> Tensor:
    y = F.dropout(x @ p["w"])
    torch.rand(3)
    return y


def branch_on_data(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.dropout(x @ p["w"]) * (2 if float(x.detach().sum()) > 0 else 3)


def checkpoint_inside(p: dict[str, Tensor], x: Tensor) -> Tensor:
    dropped = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x @ p["w"]), x, use_reentrant=False)
    return torch.tanh(dropped)


DRAWS: dict[str, tuple[Any, Any, str]] = {
    "a loss that goes on from its stage": (lambda p, x: F.dropout(x @ p["w"], 0.3), noisy_loss, ""),
    # In the last stage they came after the loss's own, which then were others.
    "numbers that nobody reads before those of the loss": (draw_unread, noisy_loss, ""),
    "a stage that looks at data": (branch_on_data, F.mse_loss, "a stage runs under autograd"),
    "a checkpoint inside a stage": (
        checkpoint_inside,
        F.mse_loss,
        "its backward draws random numbers .*, as a checkpoint inside it does",
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_recompute_repeats_the_draws_of_a_stage_and_its_loss(name: str):
    stage, loss, warning = DRAWS[name]
    model = fpipe.from_functions([stage], loss)
    params, batch = ({"w": torch.randn(4, 4)},), (torch.randn(6, 4), torch.randn(6, 4))
    program = merged(model, 3, *(() if stage is checkpoint_inside else (fpipe.checkpoint(),)))
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        assert fpipe.verify(program, model, params, batch, key=KEY).bitwise
        traced_result = fpipe.build(program, model)(params, batch, key=KEY)
    untraced_result = fpipe.build(program, model, trace=False)(params, batch, key=KEY)
    assert torch.equal(traced_result.loss, untraced_result.loss)


def draw_from_key(p: dict[str, Tensor], x: Tensor, *, key: int) -> Tensor:
    """Draw from generators that the stage derives from the key, and from torch's own in between."""
    generator = torch.Generator().manual_seed(fpipe.fold_in(key, 3, 5))
    y = F.dropout(x @ p["w"] * torch.rand(x.shape, generator=generator)) + torch.randn(4, generator=generator)
    return y * random.Random(key).random() * (2 if key % 2 else 3)


def stages_and_batch(stage: Any) -> tuple[fpipe.Model, Any, Any]:
    torch.manual_seed(0)
    model = fpipe.from_functions([stage, stage], F.mse_loss)
    return model, tuple({"w": torch.randn(4, 4)} for _ in range(2)), (torch.randn(6, 4), torch.randn(6, 4))


def autograd_step(stage: Any, params: Any, batch: Any, key: int) -> tuple[Tensor, list[Tensor]]:
    """Return loss and gradients of plain autograd over three microbatches, seeded by the key of each stage."""
    stage_leaves = [{"w": stage["w"].detach().requires_grad_()} for stage in params]
    total = torch.tensor(0.0)
    for index, (x, t) in enumerate(zip(*(tensor.tensor_split(3) for tensor in batch), strict=True)):
        for stage_index, leaves in enumerate(stage_leaves):
            torch.manual_seed(fpipe.fold_in(key, stage_index, index))
            x = stage(leaves, x, key=fpipe.fold_in(key, stage_index, index))
        share = F.mse_loss(x, t) * (2 / 6)
        share.backward()
        total = total + share.detach() if index else share.detach()
    return total, [leaves["w"].grad for leaves in stage_leaves]


def test_a_step_whose_function_asks_for_its_key_is_built_for_an_example():
    """The build used to ask for a key, which it does not take."""
    model, params, batch = stages_and_batch(draw_from_key)
    step = fpipe.build(merged(model, 3), model, example=(params, batch))
    with pytest.warns(UserWarning, match="it asks for its key"):
        result = step(params, batch, key=KEY)
    assert_autograd_bits([result], draw_from_key, params, batch, [KEY])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_function_may_ask_for_its_key(policy: str):
    """Used to lose the key in the third step. Such a stage runs under autograd."""
    model, params, batch = stages_and_batch(draw_from_key)
    program, keys = merged(model, 3, *POLICIES[policy], fpipe.schedules.one_f_one_b(2)), (KEY, KEY, 8, -3)
    step = fpipe.build(program, model)
    rng_state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="it asks for its key, and a trace would repeat what Python computes from"):
        results = [step(params, batch, key=key) for key in keys]
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert_autograd_bits(results, draw_from_key, params, batch, keys)
    with pytest.raises(ValueError, match="this program reads key: hand it in as step"):
        step(params, batch)


def assert_autograd_bits(
    results: list[fpipe.Result], stage: Any, params: Any, batch: Any, keys: tuple[int, ...]
) -> None:
    for result, key in zip(results, keys, strict=True):
        loss, grads = autograd_step(stage, params, batch, key)
        assert torch.equal(result.loss, loss)
        assert all(torch.equal(stage_grads["w"], grad) for stage_grads, grad in zip(result.grads, grads, strict=True))


def draw_in_fork(draw: Any) -> Any:
    with torch.random.fork_rng():
        return draw()


def seed_stages() -> Tensor:
    torch.manual_seed(3)
    return torch.rand(4)


SEEDED = "it seeds torch's random numbers itself"
PUT_BACK = "it restores a state of torch's random numbers and draws from it again"


SEEDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "seed_stages": (seed_stages, SEEDED),
    "forking": (lambda: draw_in_fork(seed_stages), SEEDED),
    "seed_stages last": (lambda: (torch.rand(4), torch.manual_seed(3))[0], SEEDED),
    "putting back": (lambda: draw_in_fork(lambda: torch.rand(4)) * torch.rand(4), PUT_BACK),
}


@pytest.mark.parametrize("outside", [3, 5])
@pytest.mark.parametrize(("draw", "reason"), SEEDS.values(), ids=SEEDS.keys())
def test_a_stage_that_seeds_torch_itself_is_not_traced(draw: Any, reason: str, outside: int):
    """Used to draw from the key in the trace, where the stage draws from a seed it sets. torch's generator then stayed
    seeded, or went on after a fork where the stage repeats its draws."""

    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.dropout(x @ p["w"] * draw(), 0.5)

    model, params, batch = stages_and_batch(stage)
    step = fpipe.build(merged(model, 3, fpipe.checkpoint()), model)
    torch.manual_seed(outside)
    torch.rand(7)
    rng_state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=re.escape(reason)):
        results = [step(params, batch, key=KEY) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert_autograd_bits(results, lambda p, x, key: stage(p, x), params, batch, (KEY, KEY))


@pytest.mark.parametrize(
    "transform",
    [
        lambda y: F.dropout(draw_in_fork(lambda: y * 2), 0.5) * torch.rand(4),
        lambda y: F.dropout(F.hardtanh(F.dropout(y, 0.25).T).T, 0.5),
    ],
    ids=["late draw", "strides asked"],
)
def test_a_stage_that_leaves_the_generator_unchanged_is_traced(transform: Any):
    """One stage forks before any draw; for the second stage, the tracer forks to ask an op for its strides."""
    model, params, batch = stages_and_batch(lambda p, x: transform(x @ p["w"]))
    result = fpipe.build(merged(model, 3, fpipe.checkpoint()), model)(params, batch, key=KEY)
    assert_autograd_bits([result], lambda p, x, key: transform(x @ p["w"]), params, batch, (KEY,))


def test_without_a_key_the_module_that_draws_is_named():
    net, batch = make_case("Dropout")
    model, params, _ = fpipe.from_sequential(net, sizes=[2, 3], loss=F.mse_loss)
    step = fpipe.build(fpipe.program(model), model)
    sentence = r"stage 0 \(0, 1\): '1' \(Dropout\) draws random numbers: hand in key=, an int that they follow from"
    with pytest.raises(ValueError, match=sentence):
        step(params, batch)
    step(params, batch, key=KEY)
    with pytest.raises(ValueError, match=sentence):
        step(params, batch)
    with pytest.raises(ValueError, match=sentence):
        fpipe.reference(model, params, batch)


def test_rrelu_of_transposed_data_keeps_the_masks_behind_it():
    """Used to draw other masks in the next dropout, since the functional rrelu writes another memory order."""

    def turned(p: Any, x: Tensor) -> Tensor:
        return (x.T @ p["w"]).T

    def masked(p: Any, x: Tensor) -> Tensor:
        return F.dropout(F.rrelu(x, training=True), 0.2)

    torch.manual_seed(0)
    model = fpipe.from_functions([turned, masked], F.mse_loss)
    params, batch = ({"w": torch.randn(2, 2)}, {"w": torch.randn(2, 2)}), (torch.randn(6, 4), torch.randn(6, 4))
    with pytest.warns(UserWarning, match="rrelu of transposed data draws in another order"):
        loss = fpipe.build(merged(model, 3), model)(params, batch, key=4).loss
    assert torch.equal(loss, fpipe.reference(model, params, batch, microbatches=3, key=4).loss)


def test_an_unexpected_draw_mentions_other_threads():
    """Used to accuse a stage of drawing if a thread that loads data drew from torch's generator."""
    drawn, called, finished = threading.Event(), threading.Event(), threading.Event()

    def waits(p: dict[str, Tensor], x: Tensor) -> Tensor:
        called.set()
        assert drawn.wait(5)
        return x @ p["w"]

    def loads() -> None:
        assert called.wait(5)
        torch.randperm(4)
        drawn.set()
        assert finished.wait(5)

    batch = torch.randn(2, 4), torch.randn(2, 4)
    thread = threading.Thread(target=loads)
    thread.start()
    model = fpipe.from_functions([waits], loss=lambda y, target: (y - target).square().mean())
    with pytest.raises(ValueError, match="Or another thread drew meanwhile"):
        fpipe.reference(model, ({"w": torch.eye(4)},), batch)
    finished.set()
    thread.join()


def test_idle_threads_of_a_step_are_not_blamed_for_a_draw():
    """The hint stood in errors of any later step, as long as one with runtime="threads" was kept."""
    model = fpipe.from_functions([lambda p, x: x @ p["w"]] * 2, loss=lambda y, target: (y - target).square().mean())
    params, batch = ({"w": torch.eye(4)},) * 2, (torch.randn(2, 4), torch.randn(2, 4))
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, runtime="threads")
    step(params, batch)
    drawing = fpipe.from_functions([lambda p, x: torch.dropout(x @ p["w"], 0.5, True)], loss=model.loss)
    with pytest.raises(ValueError, match=r"hand in key=, an int that they follow from\.$"):
        fpipe.reference(drawing, params[:1], batch)


def test_a_trace_keeps_the_draws_of_another_thread():
    """Used to restore torch's generator after a trace, and so to undo the draws of other threads."""
    drawn: list[Tensor] = []

    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(2, generator=torch.default_generator)))
        thread.start()
        thread.join()
        return x @ p["w"]

    torch.manual_seed(0)
    expected = [torch.rand(2) for _ in range(9)]
    torch.manual_seed(0)
    fpipe.linearize(stage, {"w": torch.eye(3)}, torch.ones(2, 3))
    drawn.append(torch.rand(2))
    assert len(drawn) > 2
    assert all(map(torch.equal, drawn, expected))


@pytest.mark.parametrize("trace", [True, False])
def test_a_key_repeated_in_two_steps_warns_once(trace: bool):
    """Used to drop the same units in every step if the key never changed, without a warning."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    batch = torch.randn(4, 4), torch.randn(4, 4)
    first_step, second_step, repeated_step = (fpipe.build(program, model, trace=trace) for _ in range(3))
    for _ in range(2):  # the same step again
        repeated_step(params, batch, key=0)
    with torch.no_grad():
        first_step(params, batch, key=0)
        second_step(params, batch, key=0)
        net[0].weight.mul_(0.5)
    with pytest.warns(UserWarning, match="two steps of a training were handed key=0, so that they dropped the same"):
        first_step(params, batch, key=0)
    first_step(params, batch, key=0)
    second_step(params, batch, key=1)
