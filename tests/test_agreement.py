"""Ranks compare claims about a model: equal wherever it was traced, and different if anything in it differs."""

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

ModelWithParams = tuple[fpipe.Model, Any, Any]


def sequential_model(is_changed: bool) -> ModelWithParams:
    norm = nn.BatchNorm1d(4, momentum=0.2 if is_changed else 0.1)
    layers = nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 4), nn.Dropout(0.5)
    return fpipe.from_sequential(nn.Sequential(*layers), stages=2, loss=MSE)


def block_with_constants(act: Callable[..., Tensor]) -> nn.Module:
    """Return a block whose buffer and frozen parameters are constants of its stage, so their values count."""
    fixed, scale = nn.Linear(4, 4, device="cpu").requires_grad_(False), torch.ones(4, device="cpu")
    return Toy(
        lambda block, x: act(block.fixed(block.inner(x)) * block.scale), inner=nn.Linear(4, 4), fixed=fixed, scale=scale
    )


def module_model(is_changed: bool) -> ModelWithParams:
    """Return an exported model, which other ranks export without data."""
    net = nn.Sequential(
        block_with_constants(torch.tanh), block_with_constants(torch.sigmoid if is_changed else torch.tanh)
    )
    example = torch.ones(7, 4), torch.ones(7, 4)
    return fpipe.from_module(net, 2, loss=MSE, batch=example)


def loss_model(is_changed: bool) -> ModelWithParams:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0 + is_changed])

    def loss(params: Any, batch: Any) -> Tensor:
        y = fpipe.boundary(torch.tanh(batch[0] @ params["a"]) * scale)
        return MSE(y @ params["b"], batch[1])

    params = {"a": torch.eye(4), "b": torch.eye(4)}
    return *fpipe.from_loss(loss, params, (torch.ones(7, 4), torch.ones(7, 4))), None


def state_model(is_changed: bool) -> ModelWithParams:
    """Return a model whose state is updated by Python, outside all graphs."""

    def stage(p: Any, x: Tensor, *, state: Any) -> Any:
        return x @ p["w"], {"seen": state["seen"] * (0.9 if is_changed else 0.8) + x.mean(0)}

    model = fpipe.from_functions([stage, lambda p, x: x @ p["w"]], MSE)
    return model, ({"w": torch.ones(4, 4)},) * 2, ({"seen": torch.zeros(4)}, None)


MODELS: dict[str, Callable[[bool], ModelWithParams]] = {
    "sequential": sequential_model,
    "module": module_model,
    "loss": loss_model,
    "state": state_model,
}


def claims_of(model: fpipe.Model, params: Any, state: Any) -> dict[str, Any]:
    """Return the hashed claims of a rank about a model."""
    batch = torch.ones(7, 4), torch.ones(7, 4)
    schedule = fpipe.schedules.gpipe(len(model.stages))
    program = with_transfers(fpipe.chain(fpipe.split(3), schedule, fpipe.merge())(fpipe.program(model)))
    inputs = StepInputs(*tree_map(to_meta, (params, batch, state)))
    prepared = PreparedStep(program, model, inputs, UntracedStages(), StepOptions(), ProcessContext())
    return hash_lines(
        claims_of_stages(model, prepared.lowered, torch.device("cpu"), describe_inputs(program, prepared.trees))
    )


@pytest.mark.parametrize("name", MODELS)
def test_ranks_without_data_claim_the_same_model(name: str):
    make = MODELS[name]
    local_claims, changed_claims = claims_of(*make(False)), claims_of(*make(True))
    with torch.device("meta" if name in ("sequential", "module") else "cpu"):
        remote_model = make(False)
    remote_claims = claims_of(*remote_model)
    assert {*local_claims} == {*changed_claims}
    assert {*remote_claims} <= {*local_claims}
    assert remote_claims == {name: local_claims[name] for name in remote_claims}
    assert local_claims != changed_claims
