"""`evaluating` gives the outputs of the net in eval mode, from the model that trains it, and leaves the net alone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from tests.processes import Processes
from tests.test_distributed import local_part

MICROBATCHES = 2


class Tied(nn.Module):
    """A net with norms, dropout, a weight in two stages, and a buffer that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.c = nn.Linear(8, 4, bias=False)
        self.c.weight = nn.Parameter(self.a[0].weight.detach().T.clone())
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) @ self.a[0].weight.T * self.scale


def cut_tied_net(door: str) -> tuple[nn.Module, fpipe.Model, Any, Any]:
    torch.manual_seed(0)
    if door == "from_module":
        net: Any = Tied()
        return net, *fpipe.from_module(net, 3, loss=F.mse_loss, example=rows(8))
    net = nn.Sequential(*(child for name, child in Tied().named_children() if name != "c"), nn.Linear(8, 8))
    return net, *fpipe.from_sequential(net, 3, loss=F.mse_loss)


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 8, generator=generator)


def train_one_step(model: fpipe.Model, params: Any, state: Any, ranks: int = 3) -> fpipe.Result:
    program = fpipe.chain(fpipe.split(MICROBATCHES), fpipe.schedules.gpipe(ranks), fpipe.merge())(fpipe.program(model))
    return fpipe.build(program, model)(params, rows(8), state=state, key=1)


def evaluation_program(model: fpipe.Model, schedule: str = "one_f_one_b", ranks: int = 3) -> fpipe.Program:
    transforms = fpipe.split(MICROBATCHES), fpipe.schedules.get(schedule)(ranks), fpipe.merge(), fpipe.forward_only()
    return fpipe.chain(*transforms)(fpipe.program(model))


def plain_outputs(net: nn.Module, state: Any, x: Tensor) -> Tensor:
    """Return the outputs of a copy of the net in eval mode with these running statistics, microbatch by microbatch."""
    net_copy = copy.deepcopy(net).eval()
    net_copy.load_state_dict({name: leaf for stage_state in state for name, leaf in stage_state.items()}, strict=False)
    return torch.cat([net_copy(microbatch_rows) for microbatch_rows in x.tensor_split(MICROBATCHES)]).detach()


@pytest.mark.crossed
@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=repr)
def test_outputs_equal_those_of_the_net_in_eval_mode(door: str, options: dict[str, Any]):
    net, model, params, state = cut_tied_net(door)
    trained_state = train_one_step(model, params, state).state
    eval_model = fpipe.evaluating(model)
    step = fpipe.build(evaluation_program(eval_model), eval_model, **options)
    for count in (8, 2, 5):
        x, target = rows(count, count)
        result = step(params, (x, target), state=trained_state)
        assert torch.equal(result.outputs, plain_outputs(net, trained_state, x))
        assert result.state is None
    assert all(module.training for module in net.modules())
    repeated = train_one_step(model, params, state)
    assert all(map(torch.equal, fpipe.tree.leaves(repeated.state), fpipe.tree.leaves(trained_state)))
    assert all(torch.equal(net.state_dict()[name], leaf) for stage_state in state for name, leaf in stage_state.items())


@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
def test_parameters_that_are_trained_in_place_are_evaluated(door: str):
    net, model, params, state = cut_tied_net(door)
    eval_model = fpipe.evaluating(model)
    step, x = fpipe.build(evaluation_program(eval_model), eval_model), rows(4)[0]
    old_outputs = step(params, (x, rows(4)[1]), state=state).outputs
    for leaf in fpipe.tree.leaves(params):
        leaf.mul_(1.5)
    new_outputs = step(params, (x, rows(4)[1]), state=state).outputs
    assert not torch.equal(old_outputs, new_outputs)
    assert torch.equal(new_outputs, plain_outputs(net, state, x))


def test_a_net_without_state_shares_its_program():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    x, target = rows(4)
    loss = fpipe.build(evaluation_program(model, "zb_h1", 2), fpipe.evaluating(model))(params, (x, target)).loss
    assert torch.allclose(loss, F.mse_loss(copy.deepcopy(net).eval()(x), target))


def evaluate_on_rank(rank: int, door: str) -> bool:
    net, model, params, state = cut_tied_net(door)
    trained_state = train_one_step(model, params, state, ranks=1).state
    eval_model = fpipe.evaluating(model)
    program = fpipe.chain(fpipe.split(MICROBATCHES), fpipe.place([0, 0, 1]), fpipe.merge(), fpipe.forward_only())
    program = program(fpipe.program(eval_model))
    local_params, local_state = local_part(program, rank, params), local_part(program, rank, trained_state)
    step = fpipe.build(program, eval_model, runtime="distributed", example=(params, rows(8), trained_state))
    result = step(local_params, rows(5), state=local_state)
    return result.outputs is None or torch.equal(result.outputs, plain_outputs(net, trained_state, rows(5)[0]))


@pytest.mark.parametrize("door", [pytest.param("from_module", marks=pytest.mark.deep), "from_sequential"])
def test_two_processes_evaluate(pair: Processes, door: str):
    assert pair.run(evaluate_on_rank, door) == [True, True]
