"""A model is what its modules held at the cut: a step, a build or verify reports later changes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fpipe

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


class Tempered(nn.Module):
    """A module that reads all kinds of values that modules hold."""

    share = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature, self.drop = nn.Linear(4, 4), 2.0, nn.Dropout(0.0)
        self.mask = torch.ones(4)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x)) / self.temperature * self.mask
        return y * self.share


def tempered_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Tempered(), Tempered())


def cut_functions(net: nn.Sequential, loss: Any) -> Any:
    head, tail = net
    fns = [lambda p, x: functional_call(head, p, (x,)), lambda p, x: functional_call(tail, p, (x,))]
    return fpipe.from_functions(fns, loss), tuple(dict(module.named_parameters()) for module in net)


def cut_one_function(net: nn.Sequential, loss: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = fpipe.boundary(functional_call(net[0], params[0], (batch[0],)))
        return loss(functional_call(net[1], params[1], (x,)), batch[1])

    return fpipe.from_loss(loss_fn, tuple(dict(module.named_parameters()) for module in net), ROWS)


DOORS: dict[str, Callable[[nn.Sequential, Any], Any]] = {
    "from_sequential": lambda net, loss: fpipe.from_sequential(net, stages=2, loss=loss),
    "from_module": lambda net, loss: fpipe.from_module(net, stages=2, loss=loss, batch=ROWS),
    "from_functions": cut_functions,
    "from_loss": cut_one_function,
}


def cut(door: str, net: nn.Sequential, loss: Any) -> tuple[fpipe.Program, fpipe.Model, Any]:
    model, params, *_ = DOORS[door](net, loss)
    return fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model)), model, params


def mean_loss(net: nn.Sequential, loss: Any) -> Tensor:
    return torch.stack([loss(net(x), t) for x, t in zip(*(half.split(4) for half in ROWS), strict=True)]).mean()


@pytest.mark.filterwarnings("ignore:target holds classes that the loss weighs")
@pytest.mark.parametrize("door", DOORS)
def test_a_traced_tensor_that_was_rebound_is_refused(door: str):
    """Class weights of a loss used to stay the old ones, in the step, a new build and even a new cut of the same net.

    So did a tensor of the net that is no buffer.
    """
    net, loss = tempered_net(), nn.CrossEntropyLoss(weight=torch.ones(4), reduction="mean")
    program, model, params = cut(door, net, loss)
    step = fpipe.build(program, model, audit="never")
    step(params, ROWS)
    loss.weight = torch.tensor([1.0, 5.0, 2.0, 9.0])
    sentence = (
        "'weight' of the loss (CrossEntropyLoss) was bound anew since it was traced, and the trace holds the tensor"
    )
    new_step = fpipe.build(program, model, audit="never")
    for run in (step, new_step, lambda *args: fpipe.verify(program, model, *args)):
        with pytest.raises(ValueError, match=re.escape(sentence if door != "from_loss" else "was bound anew since it")):
            run(params, ROWS)
    program, model, params = cut(door, net, loss)
    step = fpipe.build(program, model, audit="never")
    assert torch.allclose(step(params, ROWS).loss, mean_loss(net, loss))
    net[1].mask = torch.full((4,), 2.0)
    with pytest.raises(ValueError, match=r"'mask' of .* was bound anew since it was traced"):
        step(params, ROWS)


CHANGES: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "a number": (lambda net: setattr(net[0], "temperature", 7.0), "'temperature' of module '0' (Tempered)"),
    "a probability": (lambda net: setattr(net[1].drop, "p", 0.5), "'p' of module '1.drop' (Dropout)"),
    "a hook": (lambda net: net[0].register_forward_hook(lambda m, a, y: 3 * y), "a hook of module '0' (Tempered)"),
    "a child": (lambda net: setattr(net[0], "drop", nn.Tanh()), "child 'drop' of module '0' (Tempered)"),
    "a block": (lambda net: net.__setitem__(1, nn.Tanh()), "child '1' of module '' (Sequential)"),
}


@pytest.mark.crossed
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("door", ["from_sequential", "from_module"])
def test_a_net_changed_since_its_cut_is_refused_when_a_step_is_built(door: str, change: str):
    """Used to pass: the old step kept the old value, and from_module kept it even in the new step and in verify."""
    net, (change_net, message) = tempered_net(), CHANGES[change]
    program, model, params = cut(door, net, nn.CrossEntropyLoss())
    step = fpipe.build(program, model, audit="never")
    loss_before = step(params, ROWS).loss
    change_net(net)
    for run in (fpipe.build, lambda *args: fpipe.verify(*args, params, ROWS)):
        with pytest.raises(ValueError, match=re.escape(f"{message} has changed since the model was cut.")):
            run(program, model)
    assert torch.equal(step(params, ROWS).loss, loss_before)  # as under jax.jit
    program, model, params = cut(door, net, nn.CrossEntropyLoss())
    if change != "a probability":
        assert torch.allclose(fpipe.build(program, model)(params, ROWS).loss, mean_loss(net, nn.CrossEntropyLoss()))


@pytest.mark.parametrize("door", ["from_sequential", "from_module"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_frozen_or_unfrozen_since_the_cut_is_refused(door: str, requires_grad: bool):
    """Used to pass in assign_grads, verify and a new build: unfreezing gave no gradient."""
    net = tempered_net()
    net[0].linear.weight.requires_grad_(not requires_grad)
    program, model, params = cut(door, net, nn.CrossEntropyLoss())
    step = fpipe.build(program, model)
    step(params, ROWS)
    net[0].linear.weight.requires_grad_(requires_grad)
    at_cut, state_now = ("was frozen", "is to train") if requires_grad else ("trained", "is frozen")
    sentence = f"'weight' of module '0.linear' (Linear) {at_cut} when the model was cut and {state_now} now: cut anew."
    for run in (step, lambda *args: fpipe.build(program, model), lambda *args: fpipe.verify(program, model, *args)):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            run(params, ROWS)


@pytest.mark.parametrize("door", DOORS)
def test_a_new_cut_reads_class_attributes_again(door: str, monkeypatch: pytest.MonkeyPatch):
    """Used to share the trace of the former cut: no fingerprint knows a class attribute."""
    net, loss = tempered_net(), nn.CrossEntropyLoss()
    for share in (1.0, 4.0):
        monkeypatch.setattr(Tempered, "share", share)
        program, model, params = cut(door, net, loss)
        assert torch.allclose(fpipe.build(program, model)(params, ROWS).loss, mean_loss(net, loss))


def test_a_step_takes_the_mode_of_modules_that_its_functions_close_over():
    """Used to keep the mode in which the step was traced."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = fpipe.from_functions([lambda p, x: functional_call(net, p, (x,))], nn.functional.cross_entropy)
    step = fpipe.build(fpipe.program(model), model)
    params = (dict(net.named_parameters()),)
    trained = step(params, ROWS, key=0).loss
    assert torch.equal(
        step(params, ROWS, key=0).loss if net[1].eval() else trained, nn.functional.cross_entropy(net(ROWS[0]), ROWS[1])
    )
    assert torch.equal(step(params, ROWS, key=0).loss if net[1].train() else trained, trained)


class Flagged(nn.Module):
    """A layer that reads an attribute of its parameter, like layers of tensor parallelism."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.weight.factor


def test_modules_with_different_parameter_attributes_share_no_trace():
    """Used to give the second module the factor of the first."""
    net = nn.Sequential(Flagged(2.0), Flagged(5.0))
    program, model, params = cut("from_sequential", net, nn.CrossEntropyLoss())
    loss = fpipe.build(program, model)(params, ROWS).loss
    assert torch.equal(loss, mean_loss(net, nn.CrossEntropyLoss()))


@pytest.mark.parametrize("door", ["from_sequential", "from_module"])
def test_a_gradient_hook_of_a_parameter_is_refused(door: str):
    """from_module used to drop a hook that masks a gradient, as did both doors for a hook registered after the cut."""
    net = tempered_net()
    program, model, _ = cut(door, net, nn.CrossEntropyLoss())
    net[0].linear.weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(ValueError, match=re.escape("'weight' of module '0.linear' (Linear) has changed since")):
        fpipe.build(program, model)
    with pytest.raises(ValueError, match=re.escape("parameter '0.linear.weight' has a gradient hook; stages diff")):
        cut(door, net, nn.CrossEntropyLoss())
