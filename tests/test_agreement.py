"""What ranks compare of a model: the same wherever it was traced, and another where one thing in it is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.runtimes.faults.agreement import claims_of_stages, describe_inputs, hash_lines
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import UntracedStages
from fpipe.transforms.communicate import with_transfers
from fpipe.tree import tree_map
from tests.test_distributed import MSE, to_meta
from tests.toys import Toy

Made = tuple[fpipe.Model, Any, Any]


def sequential(odd: bool) -> Made:
    norm = nn.BatchNorm1d(4, momentum=0.2 if odd else 0.1)
    layers = nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 4), nn.Dropout(0.5)
    return fpipe.from_sequential(nn.Sequential(*layers), stages=2, loss=MSE)


def frozen(act: Callable[..., Tensor]) -> nn.Module:
    """A block with a buffer and a frozen parameter, constants of its stage: they have values."""
    fixed, scale = nn.Linear(4, 4, device="cpu").requires_grad_(False), torch.ones(4, device="cpu")
    return Toy(lambda own, x: act(own.fixed(own.inner(x)) * own.scale), inner=nn.Linear(4, 4), fixed=fixed, scale=scale)


def of_module(odd: bool) -> Made:
    """Of exports, on other ranks without data too."""
    net = nn.Sequential(frozen(torch.tanh), frozen(torch.sigmoid if odd else torch.tanh))
    example = torch.ones(7, 4), torch.ones(7, 4)
    return fpipe.from_module(net, 2, loss=MSE, example=example)


def of_loss(odd: bool) -> Made:
    held = torch.tensor([1.0, 2.0, 3.0, 4.0 + odd])

    def loss(params: Any, batch: Any) -> Tensor:
        y = fpipe.boundary(torch.tanh(batch[0] @ params["a"]) * held)
        return MSE(y @ params["b"], batch[1])

    params = {"a": torch.eye(4), "b": torch.eye(4)}
    return *fpipe.from_loss(loss, params, (torch.ones(7, 4), torch.ones(7, 4))), None


def updating(odd: bool) -> Made:
    """The update of a state, which is in no graph."""

    def stage(p: Any, x: Tensor, *, state: Any) -> Any:
        return x @ p["w"], {"seen": state["seen"] * (0.9 if odd else 0.8) + x.mean(0)}

    model = fpipe.from_functions([stage, lambda p, x: x @ p["w"]], MSE)
    return model, ({"w": torch.ones(4, 4)},) * 2, ({"seen": torch.zeros(4)}, None)


MODELS: dict[str, Callable[[bool], Made]] = {
    "sequential": sequential,
    "module": of_module,
    "loss": of_loss,
    "state": updating,
}


def compared(model: fpipe.Model, params: Any, state: Any) -> dict[str, Any]:
    """What a rank would say of a model."""
    batch = torch.ones(7, 4), torch.ones(7, 4)
    schedule = fpipe.schedules.gpipe(len(model.stages))
    program = with_transfers(fpipe.chain(fpipe.split(3), schedule, fpipe.merge())(fpipe.program(model)))
    inputs = StepInputs(*tree_map(to_meta, (params, batch, state)))
    prepared = PreparedStep(program, model, inputs, UntracedStages(), StepOptions(), ProcessContext())
    return hash_lines(
        claims_of_stages(model, prepared.lowered, torch.device("cpu"), describe_inputs(program, prepared.trees))
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_on_a_rank_that_has_no_data_of_it(name: str):
    make = MODELS[name]
    here, other = compared(*make(False)), compared(*make(True))
    with torch.device("meta" if name in ("sequential", "module") else "cpu"):
        away = make(False)
    there = compared(*away)
    assert {*here} == {*other}
    assert {*there} <= {*here}
    assert there == {name: here[name] for name in there}
    assert here != other
