"""Audits find Python values that change after the trace, and kernels that compute wrongly."""

import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.runtimes.audit.stage_audit import StageAudit
from fpipe.runtimes.audit.tensor_bits import largest_error, largest_magnitude, may_be_rounding, refuse_wrong_replay
from fpipe.runtimes.lowering import instructions
from tests.processes import Processes

BATCH = torch.linspace(-1, 1, 32).reshape(8, 4), torch.linspace(0, 1, 32).reshape(8, 4)
LABELS = BATCH[0], torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])


class Trainer:
    """A step with its arguments; each call trains for some steps."""

    def __init__(
        self, cut: Any, batch: Any = BATCH, microbatches: int = 2, audit: Any = "always", **options: Any
    ) -> None:
        self.model, self.params, *state = cut
        self.state, self.batch, self.key = state[0] if state else None, batch, 0
        stages = len(self.model.stages)
        schedule = fpipe.schedules.one_f_one_b(stages)
        self.program = fpipe.chain(fpipe.split(microbatches), schedule, fpipe.merge())(fpipe.program(self.model))
        self.step = fpipe.build(self.program, self.model, audit=audit, **options)

    def __call__(self, times: int = 2) -> None:
        for _ in range(times):
            self.key += 1
            result = self.step(self.params, self.batch, state=self.state, key=self.key)
            self.state = self.state if self.state is None else result.state


def net_with(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 4), nn.ReLU())


def cut_modules(net: nn.Sequential, loss: Any = F.mse_loss) -> Any:
    return fpipe.from_sequential(net, 2, loss=loss)


def cut_graphs(net: nn.Module, loss: Any = F.mse_loss) -> Any:
    return fpipe.from_module(net, 1, batch=BATCH, loss=loss)


CUTS = [cut_modules, cut_graphs]


class DropPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.settings = 0.1, {"temperature": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.rate) / self.settings["temperature"][0]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_unchanged_steps_pass_the_audit(cut: Callable[..., Any], runtime: Any):
    trainer = Trainer(cut(net_with(nn.Dropout(0.5), nn.BatchNorm1d(4))), runtime=runtime)
    trainer(6)


@pytest.mark.parametrize("cut", CUTS)
def test_audit_names_annealed_dropout(cut: Callable[..., Any]):
    dropout = nn.Dropout(0.1)
    trainer = Trainer(cut(net_with(dropout)))
    trainer()
    dropout.p = 0.9
    with pytest.raises(
        fpipe.StepChanged, match=r"'p' of module '1' \(Dropout\), which was 0\.1 and is 0\.9, has changed"
    ):
        trainer()
    dropout.p = 0.1
    trainer()


@pytest.mark.parametrize("cut", CUTS)
def test_audit_finds_annealed_drop_path_and_a_temperature_in_a_dict(cut: Callable[..., Any]):
    path = DropPath()
    trainer = Trainer(cut(net_with(path)))
    trainer()
    path.rate = 0.2
    with pytest.raises(fpipe.StepChanged, match="'rate' of module '1'"):
        trainer()
    path.rate, path.settings["temperature"][0] = 0.1, 2.0
    with pytest.raises(fpipe.StepChanged, match="'settings' of module '1'"):
        trainer()


@pytest.mark.parametrize("cut", CUTS)
def test_audit_finds_changed_label_smoothing(cut: Callable[..., Any]):
    loss, net = nn.CrossEntropyLoss(), net_with()
    trainer = Trainer(cut(net, loss=lambda y, t: loss(y, t[:, 0].long())))
    trainer()
    loss.label_smoothing = 0.2
    with pytest.raises(fpipe.StepChanged, match="'label_smoothing' of module 'loss'"):
        trainer()


SCALES = {"loss": 1.0}
GLOBAL_WEIGHT = 1.0


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("holder", ["closure", "dict", "list", "global"])
def test_audit_finds_a_changed_loss_weight(cut: Callable[..., Any], holder: str):
    weight, weights = 1.0, [1.0]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        factor = {"closure": weight, "dict": SCALES["loss"], "list": weights[0], "global": GLOBAL_WEIGHT}[holder]
        return F.mse_loss(y, target) * factor

    global GLOBAL_WEIGHT
    trainer = Trainer(cut(net_with(), loss=loss))
    trainer()
    try:
        weight = weights[0] = SCALES["loss"] = GLOBAL_WEIGHT = 2.0
        with pytest.raises(fpipe.StepChanged, match="loss"):
            trainer()
    finally:
        SCALES["loss"] = GLOBAL_WEIGHT = 1.0


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["masks the output", "logs", "masks a gradient"])
def test_audit_finds_a_hook_added_later(cut: Callable[..., Any], kind: str):
    net = net_with()
    trainer = Trainer(cut(net))
    trainer()
    linear: Any = net[0]
    handle = {
        "masks the output": lambda: linear.register_forward_hook(lambda module, args, y: y * 0),
        "logs": lambda: linear.register_forward_hook(lambda module, args, y: None),
        "masks a gradient": lambda: linear.weight.register_hook(lambda grad: grad * 0),
    }[kind]()
    with pytest.raises(fpipe.StepChanged, match=r"hook|'weight' of module '0'"):
        trainer()
    handle.remove()


@pytest.mark.parametrize("cut", CUTS)
def test_audit_finds_a_replaced_child(cut: Callable[..., Any]):
    net = net_with()
    trainer = Trainer(cut(net))
    trainer()
    net[2] = nn.Tanh()
    with pytest.raises(fpipe.StepChanged, match="child '2'"):
        trainer()


class PythonFactor(nn.Module):
    """Multiply by a number that Python draws or counts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.counts = kind, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counts":
            COUNTS[0] += 1
        return x * {"draws": random.random, "draws by numpy": np.random.rand, "counts": lambda: COUNTS[0]}[self.kind]()


COUNTS = [1.0]


@pytest.mark.parametrize("kind", ["draws", "draws by numpy", "counts"])
def test_audit_finds_python_numbers_frozen_in_a_graph(kind: str):
    with pytest.raises(fpipe.StepChanged, match=r"off by|by the stages"):
        Trainer(cut_graphs(net_with(PythonFactor(kind))))(2)


class Counting(nn.Module):
    """Count the calls in a plain attribute or a dict; the output follows from the count in a `warmup`."""

    def __init__(self, warmup: int, is_in_dict: bool) -> None:
        super().__init__()
        self.calls, self.statistics, self.warmup, self.is_in_dict = 0, {"calls": 0}, warmup, is_in_dict

    def forward(self, x: Tensor) -> Tensor:
        counts = self.statistics if self.is_in_dict else vars(self)
        counts["calls"] += 1
        return x * (1.0 if counts["calls"] >= self.warmup else 0.5)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("is_in_dict", [False, True])
@pytest.mark.parametrize("warmup", [0, 5000])
def test_audit_finds_a_count_from_which_the_output_follows(cut: Callable[..., Any], warmup: int, is_in_dict: bool):
    """Used to pass: the count was put back after each run of the definition, so it never came to its end."""
    trainer = Trainer(cut(net_with(Counting(warmup, is_in_dict))))
    if not warmup:
        trainer()
        return
    with pytest.raises(fpipe.StepChanged, match=r"results follow from '(calls|statistics)' of module '1' \(Counting\)"):
        trainer()


@pytest.mark.parametrize("cut", CUTS)
def test_audit_finds_a_layer_that_is_unfrozen_by_a_detach_that_ends(cut: Callable[..., Any]):
    """Used to pass: the next stage computed no gradient of its input, so the audit took none of the output."""
    trainer = Trainer(cut(net_with(Detached())))
    trainer()
    Detached.is_on = False
    try:
        with pytest.raises(
            fpipe.StepChanged, match=r"output \(y\[0,.\]\) has a gradient, and had none|gradient of 0.weight"
        ):
            trainer()
    finally:
        Detached.is_on = True


class Detached(nn.Module):
    is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() if self.is_on else x


def test_audit_compares_the_state_of_a_whole_net():
    """Used to pass: a momentum that is annealed changes no loss and no gradient, only the statistics for eval."""
    norm = nn.BatchNorm1d(4)
    trainer = Trainer(cut_graphs(net_with(norm)))
    trainer(4)
    norm.momentum = 0.5
    with pytest.raises(
        fpipe.StepChanged, match=r"The state 1.running_mean .*'momentum' of module '1' .*0.1 and is 0.5"
    ):
        trainer()


@pytest.mark.parametrize("audit", ["always", "never"])
def test_hooks_on_all_modules_are_refused_where_graphs_run(audit: Any):
    """Used to be told to run under autograd, where the graphs of a net do not call them either."""
    trainer = Trainer(cut_graphs(net_with()), audit=audit)
    trainer()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(fpipe.StepChanged, match="there are hooks on all modules, and no graph of a net calls them"):
            trainer()
    finally:
        handle.remove()
    trainer()


def test_audit_finds_one_wrong_bit_of_a_gradient(monkeypatch: pytest.MonkeyPatch):
    code_of = instructions.generate_code

    def generate_corrupted(*arguments: Any) -> Any:
        code = code_of(*arguments)
        if not arguments[-1].startswith("B of"):
            return code

        def run(function: Any, *lists: Any) -> Any:
            results = function(*lists)
            leaf = results[-1][0]
            leaf.view(torch.int32).view(-1)[0] ^= 1
            return results

        return code._replace(code=Mock(with_numbers=lambda numbers: partial(run, code.with_numbers(numbers))))

    monkeypatch.setattr("fpipe.runtimes.lowering.lower.generate_code", generate_corrupted)
    with pytest.raises(fpipe.StepChanged, match=r"the gradient of params\[\d\]\['.*'\] is off by up to"):
        Trainer(cut_modules(net_with()))(2)


class DataDependent(nn.Module):
    """Branch on data; return the output and further values, chosen by `returns`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(4, 4), "one"

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if y.sum() > 1e9:
            y = y * 2
        return {"one": (y, "same"), "flag": (y, "other"), "more": (y, "same", y), "length": (y[:1], "same")}[
            self.returns
        ]


class NetWithDataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branching, self.head = DataDependent(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, *_ = self.branching(x)
        return self.head(y)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the stage runs under autograd
@pytest.mark.parametrize("returns", ["flag", "more", "length"])
def test_audit_finds_changed_returns_of_a_data_dependent_module(returns: str):
    torch.manual_seed(0)
    net = NetWithDataDependent()
    trainer = Trainer(cut_graphs(net), audit="never")
    trainer()
    net.branching.returns = returns
    with pytest.raises(fpipe.StepChanged, match="'branching'"):
        trainer()


def test_the_first_three_steps_and_every_hundredth_are_audited():
    dropout = nn.Dropout(0.1)
    trainer = Trainer(cut_modules(net_with(dropout)), audit="first")
    trainer(4)
    dropout.p = 0.9
    trainer(97)
    with pytest.raises(fpipe.StepChanged):
        trainer()


def test_audit_takes_an_interval_or_never():
    dropout = nn.Dropout(0.1)
    often, never = (Trainer(cut_modules(net_with(dropout)), audit=audit) for audit in (3, "never"))
    often(2)
    never(2)
    dropout.p = 0.9
    never(5)
    often(2)
    with pytest.raises(fpipe.StepChanged):
        often(1)
    with pytest.raises(ValueError, match="audit is 'first', 'always', 'never' or a number above 0; found 0"):
        Trainer(cut_modules(net_with()), audit=0)


def test_audit_compares_the_ops_of_a_net_whose_parameters_are_sharded():
    """Used to pass: stages are graphs, and compute with parameters that a GATHER may round."""
    path = DropPath()
    model, params, _ = cut_graphs(net_with(path))
    shard = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False), fpipe.shard("dp"))
    step = fpipe.build(shard(fpipe.program(model)), model, audit="always")
    for _ in range(3):
        step(params, BATCH)
    path.settings["temperature"][0] = 2.0
    with pytest.raises(fpipe.StepChanged, match=r"aten.div.Tensor\(float32\[4, 4\], 2.0\) now, and was .*, 1.0\)"):
        step(params, BATCH)


SCHEDULES: dict[str, Any] = {
    "1f1b": fpipe.chain(fpipe.schedules.one_f_one_b(2), fpipe.merge()),
    "zb": fpipe.chain(fpipe.schedules.zb_h1(2), fpipe.merge()),
    "checkpoint": fpipe.chain(fpipe.checkpoint(), fpipe.schedules.one_f_one_b(2), fpipe.merge()),
    "shard": fpipe.chain(fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False), fpipe.shard("dp")),
    "rounded": fpipe.chain(fpipe.schedules.one_f_one_b(2), fpipe.merge(), fpipe.communicate(cast=torch.bfloat16)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_correct_programs_pass_the_audit(name: str):
    model, params, state = cut_modules(net_with(nn.Dropout(0.5), nn.LayerNorm(4)))
    program = fpipe.chain(fpipe.split(4), SCHEDULES[name])(fpipe.program(model))
    step = fpipe.build(program, model, audit="always")
    for key in range(9):
        step(params, BATCH, state=state, key=key)


@pytest.mark.parametrize("donate", [False, True])
def test_correct_updates_pass_the_audit(donate: bool):
    model, params, _ = cut_modules(net_with())
    update = fpipe.chain(fpipe.merge(outputs=False), fpipe.update("AdamW", clip=1.0), fpipe.steps(2))
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), update)(fpipe.program(model))
    step, opt = fpipe.build(program, model, audit="always", donate=donate), fpipe.optimizer_state(program, params)
    params = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in params)
    for _ in range(6):
        result = step(params, [BATCH, BATCH], opt=opt, lr=0.1)
        params, opt = result.params, result.opt


TEMPERATURES = [1.0]


class Scaled(nn.Module):
    """Multiply by a number that follows from other Python than attributes, chosen by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.kind == "own count"
        if self.kind == "constant":
            return x * torch.tensor(TEMPERATURES[0])
        if self.kind == "draws":
            return x * random.random()
        return x * (TEMPERATURES[0] if self.kind != "own count" or self.calls < 100 else 0.5)


def train_cut_net(rank: int, kind: str, is_on_meta: bool) -> str:
    """Train a net that is cut into graphs on two processes, and change its Python before the fourth step."""
    TEMPERATURES[0] = 1.0
    random.seed(0)  # all ranks cut the same net
    with torch.device("meta" if is_on_meta else "cpu"):
        net = net_with(Scaled(kind), nn.Dropout(0.5), nn.BatchNorm1d(4))
        model, params, state = fpipe.from_module(net, 2, batch=tuple(torch.zeros(8, 4) for _ in BATCH), loss=F.mse_loss)
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, runtime="distributed", example=(params, BATCH, state), audit="always")
    if is_on_meta:
        params = fpipe.init_params(model, program, rank)
        state = fpipe.init_params(model, program, rank, state=state)
    params, state = (fpipe.local_params(program, part, rank) for part in (params, state))
    try:
        for key in range(5):
            if key == 3 and kind in ("global", "constant"):
                TEMPERATURES[0] = 2.0
            if key == 3 and kind == "attribute":
                net[2].p = 0.9
            state = step(params, BATCH, state=state, key=key).state
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no accusation"


NET_DIFFERENCES = {
    "nothing": "no accusation",
    "global": "op .* is aten.mul.Tensor.*, 2.0. now, and was aten.mul.Tensor",
    "constant": "op .* is aten.lift_fresh.default.2.0. now, and was aten.lift_fresh.default.1.0.",
    "attribute": "op .* is aten.bernoulli_.float.* now, and was .*'p' of module '2' .Dropout., which was 0.5 and is",
    "draws": "op .* is aten.mul.Tensor",
    "own count": "results follow from 'calls' of module '1' .Scaled.",
}


@pytest.mark.crossed
@pytest.mark.parametrize("is_on_meta", [False, True])
@pytest.mark.parametrize("kind", NET_DIFFERENCES)
def test_each_rank_compares_the_ops_that_the_python_of_a_cut_net_calls(pair: Processes, kind: str, is_on_meta: bool):
    """Used to pass unseen: no rank has the parameters to run the whole net, but fake tensors will do."""
    for outcome in pair.run(train_cut_net, kind, is_on_meta):
        is_remote_error = outcome.startswith("RankError")
        assert is_remote_error or re.search(NET_DIFFERENCES[kind], outcome), outcome


def train_rank(rank: int, anneals: bool) -> str:
    dropout = nn.Dropout(0.5)
    model, params, _ = cut_modules(net_with(dropout))
    schedule = fpipe.schedules.one_f_one_b(2)
    program = fpipe.chain(fpipe.split(2), schedule, fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, runtime="distributed", example=(params, BATCH), audit="always")
    local_params = fpipe.local_params(program, params, rank)
    try:
        for key in range(4):
            dropout.p = 0.9 if anneals and key == 3 and rank == 0 else 0.5
            step(local_params, BATCH, key=key)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no accusation"


def test_each_rank_audits_its_own_stage_and_the_run_ends_on_all_ranks():
    with Processes(2) as ranks:
        assert ranks.run(train_rank, False) == ["no accusation"] * 2
        changed, _ = ranks.run(train_rank, True)
        assert changed.startswith("StepChanged: stage 0 (0, 1), microbatch 1: the output (y[0,1]) is off by up to")


def test_short_steps_are_audited_less_often_than_every_hundredth(monkeypatch: pytest.MonkeyPatch):
    """An audit of a millisecond's step costs several steps, mostly Python's time, so audits are spread further."""
    audited = list[int]()
    trainer = Trainer(cut_modules(net_with(nn.Dropout(0.1))), audit="first")
    check = StageAudit.check

    def slow_check(self: StageAudit, changes: str) -> None:
        audited.append(trainer.key - 1)
        time.sleep(0.02)
        check(self, changes)

    monkeypatch.setattr(StageAudit, "check", slow_check)
    trainer(250)
    assert len({*audited}) >= 4
    assert 99 < max(audited) < 110  # each audit is as long as many steps


def test_audit_allows_rounding_next_to_infinite_numbers():
    a = torch.tensor([1.0, float("inf"), float("nan"), -float("inf"), 100.0])
    b = a * torch.tensor([1 + 1e-6, 1, 1, 1, 1])
    assert 0 < largest_error(a, b) < 1e-5
    assert largest_magnitude(a) == 100
    for position in (1, 2, 3):
        c = b.clone()
        c[position] = 0.0
        assert largest_error(a, c) > 1e300
        assert not may_be_rounding(a, c, [c])
    # Compiled code used to be accused of NaN where the definition gives inf, such as inf - inf by another order of ops.
    assert may_be_rounding(a, torch.tensor([1.0, float("nan"), -float("inf"), float("inf"), 100.0]), [b])


class Overflowing(nn.Module):
    """Overflow the range of float32."""

    def forward(self, x: Tensor) -> Tensor:
        return (200 * x.abs() + 100).exp()


def test_a_diverged_training_passes_the_audit():
    """A loss that was infinite by the stages and by the net used to count as a difference."""
    Trainer(cut_graphs(nn.Sequential(nn.Linear(4, 4), Overflowing())))()


class SkipsNegative(nn.Module):
    """Branch on data, so that the stage runs under autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x.sum() > 0).item()) else x


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_a_hook_may_be_added_to_a_stage_that_runs_under_autograd():
    """Used to be refused if another stage of the model was traced, though the hook runs."""
    net = nn.Sequential(nn.Linear(4, 4), SkipsNegative())
    trainer = Trainer(cut_modules(net))
    trainer()
    calls = list[int]()
    net[1].register_forward_hook(lambda *_: calls.append(1))
    trainer()
    assert calls
    net[0].register_forward_hook(lambda *_: None)
    with pytest.raises(fpipe.StepChanged, match=r"a hook of module .0. \(Linear\) has changed"):
        trainer()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda y: self.block(y).tanh(), x, use_reentrant=False))


def cut_loss(net: nn.Module) -> Any:
    params = {name: leaf.detach().clone() for name, leaf in net.named_parameters()}
    return fpipe.from_loss(lambda p, b: F.mse_loss(functional_call(net, p, (b[0],)), b[1]), params, BATCH)


@pytest.mark.parametrize("cut", [cut_graphs, cut_loss])
def test_checkpointed_nets_pass_the_audit_after_their_parameters_change(cut: Callable[..., Any]):
    """Used to be accused: in the backward a checkpoint reads the module's parameters and ignores functional_call."""
    trainer = Trainer(cut(Checkpointed()))
    trainer()
    trainer.params = tuple({name: leaf + 0.5 for name, leaf in stage.items()} for stage in trainer.params)
    trainer(4)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.embed(x).tanh()).tanh() @ self.embed.weight


def test_a_tied_weight_under_autocast_passes_the_audit():
    """Used to be accused: autocast casts the weight of the whole net once, and so adds its gradients in bfloat16."""
    torch.manual_seed(0)
    Trainer(fpipe.from_module(TiedHead(), 2, batch=BATCH, loss=F.mse_loss), autocast=torch.bfloat16)(6)


def test_donated_weights_are_copied_for_an_audit_in_their_layout():
    """A copy without gaps is added up in another order: right steps were accused of an error of one unit."""
    torch.manual_seed(0)
    spread = [(torch.randn(4, 4, 2), torch.randn(4, 2)) for _ in range(10)]
    params = tuple({"w": weight[..., 0], "b": bias[..., 0]} for weight, bias in spread)
    model = fpipe.from_functions([lambda p, x: F.linear(x, p["w"], p["b"])] * 10, loss=F.mse_loss)
    pipeline = fpipe.chain(fpipe.split(1), fpipe.schedules.gpipe(1), fpipe.merge(), fpipe.update("SGD", lr=0.01))
    program = pipeline(fpipe.program(model))
    step, opt = fpipe.build(program, model, audit="always", donate=True), fpipe.optimizer_state(program, params)
    for _ in range(20):
        result = step(params, (torch.randn(1, 4), torch.randn(1, 4)), opt=opt)
        params, opt = result.params, result.opt


def results_of(loss: float, param: float) -> dict[str, Any]:
    return {"loss": torch.tensor(loss), "params": [{"w": torch.tensor([param, 1.0])}]}


@pytest.mark.parametrize(
    ("replay", "repetition", "is_refused"),
    [
        ((1.0, 2.0), (1.0, 2.0), False),
        ((1.0, 2.0 + 1e-6), (1.0, 2.0), True),
        # The instructions do not repeat their own bits: a param may be anything, and a loss is equal to rounding.
        ((1.0 + 1e-6, 3.0), (1.0 - 1e-6, 2.0), False),
        ((1.5, 2.0), (1.0, 2.0 + 1e-6), True),
    ],
)
def test_a_replay_has_the_bits_of_instructions_that_repeat(replay: Any, repetition: Any, is_refused: bool):
    expected = pytest.raises(fpipe.StepChanged, match="the graph replays") if is_refused else nullcontext()
    with expected:
        refuse_wrong_replay(results_of(*replay), results_of(1.0, 2.0), results_of(*repetition))
