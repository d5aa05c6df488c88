"""What ranks compare of a model: the same wherever it was traced, and another where one thing in it is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.runtimes.faults.agreement import as_sent, of_inputs, of_stages
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.untraced import Untraced
from fpipe.transforms.communicate import with_transfers
from fpipe.tree import tree_map
from tests.toys import Toy

MSE = nn.functional.mse_loss
CPU = torch.device("cpu")


class Made(NamedTuple):
    model: fpipe.Model
    params: Any
    state: Any = None
    batch: Any = None
    compile: bool = False


def functions(odd: bool) -> Made:
    """A skip, a tie, several outputs, a closed-over tensor."""
    held = torch.arange(4.0) + odd

    def first(p: Any, x: Tensor) -> Any:
        return {"y": x @ p["w"], "mask": x > 0, "n": 2}

    def second(p: Any, x: Any) -> Tensor:
        return torch.where(x["mask"], x["y"] * x["n"], held) @ p["w"]

    def third(p: Any, x: Any) -> Tensor:
        return (x[0]["y"] + x[1]) @ p["w"]

    ties = [((0, "w"), (2, "w"))]
    model = fpipe.from_functions([first, second, third], MSE, inputs=["batch", 0, (0, 1)], ties=ties)
    return Made(model, ({"w": torch.ones(4, 4)}, {"w": torch.ones(4, 4)}, {}))


def sequential(odd: bool, **more: Any) -> Made:
    layers = [
        nn.Linear(4, 4),
        nn.BatchNorm1d(4, momentum=0.2 if odd else 0.1),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.Dropout(0.5),
    ]
    return Made(*fpipe.from_sequential(nn.Sequential(*layers), stages=2, loss=MSE), **more)


def frozen(act: Callable[..., Tensor]) -> nn.Module:
    """A block with a buffer and a frozen parameter, constants of its stage: they have values."""
    fixed, scale = nn.Linear(4, 4, device="cpu").requires_grad_(False), torch.ones(4, device="cpu")
    return Toy(lambda own, x: act(own.fixed(own.inner(x)) * own.scale), inner=nn.Linear(4, 4), fixed=fixed, scale=scale)


def of_module(odd: bool) -> Made:
    """Of exports, on other ranks without data too."""
    net = nn.Sequential(frozen(torch.tanh), frozen(torch.sigmoid if odd else torch.tanh))
    example = torch.ones(7, 4), torch.ones(7, 4)
    return Made(*fpipe.from_module(net, 2, loss=MSE, example=example))


def of_loss(odd: bool) -> Made:
    held = torch.tensor([1.0, 2.0, 3.0, 4.0 + odd])

    def loss(params: Any, batch: Any) -> Tensor:
        y = fpipe.boundary(torch.tanh(batch[0] @ params["a"]) * held)
        return MSE(y @ params["b"], batch[1])

    params = {"a": torch.eye(4), "b": torch.eye(4)}
    return Made(*fpipe.from_loss(loss, params, (torch.ones(7, 4), torch.ones(7, 4))))


def updating(odd: bool) -> Made:
    """The update of a state, which is in no graph."""

    def stage(p: Any, x: Tensor, *, state: Any) -> Any:
        return x @ p["w"], {"seen": state["seen"] * (0.9 if odd else 0.8) + x.mean(0)}

    model = fpipe.from_functions([stage, lambda p, x: x @ p["w"]], MSE)
    return Made(model, ({"w": torch.ones(4, 4)},) * 2, ({"seen": torch.zeros(4)}, None))


MODELS: dict[str, Callable[[bool], Made]] = {
    "functions": functions,
    "sequential": sequential,
    "compiled": lambda odd: sequential(odd, compile=True),
    "module": of_module,
    "loss": of_loss,
    "state": updating,
}


def to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def compared(made: Made) -> dict[str, Any]:
    """What a rank would say of a model."""
    batch = torch.ones(7, 4), torch.ones(7, 4)
    schedule = fpipe.schedules.gpipe(len(made.model.stages))
    program = with_transfers(fpipe.chain(fpipe.split(3), schedule, fpipe.merge())(fpipe.program(made.model)))
    params, batch, state = tree_map(to_meta, (made.params, batch, made.state))
    prepared = Prepared(program, made.model, params, batch, state, None, None, Untraced(), compile=made.compile)
    return as_sent(of_stages(made.model, prepared.lowered, CPU, of_inputs(program, prepared.trees)))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_on_a_rank_that_has_no_data_of_it(name: str):
    make = MODELS[name]
    here, other = compared(make(False)), compared(make(True))
    with torch.device("meta" if name in ("sequential", "module", "compiled") else "cpu"):
        away = make(False)
    there = compared(away)
    assert {*here} == {*other}
    assert {*there} <= {*here}
    assert there == {name: here[name] for name in there}
    assert here != other
