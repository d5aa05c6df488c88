"""`evaluating` gives the outputs of the net in eval mode, from the model that trains it, and leaves the net alone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from tests.processes import Processes
from tests.refusals import refusals
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
        return net, *fpipe.from_module(net, 3, loss=F.mse_loss, batch=rows(8))
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


class Labelled(nn.Module):
    """A net that with labels returns its outputs and their loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4 + 4 * i, 8 + 4 * i), nn.Tanh()) for i in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        outputs = x
        for layer in self.layers:
            outputs = layer(outputs)
        return outputs if labels is None else (outputs, F.mse_loss(outputs, labels))


def cut_labelled_net(**inputs: Tensor) -> tuple[nn.Module, fpipe.Model, Any]:
    torch.manual_seed(0)
    net = Labelled()
    model, params, _ = fpipe.from_module(net, 3, batch=inputs)
    return net, model, params


def three_stages_on_two_ranks(model: fpipe.Model) -> fpipe.Program:
    transforms = fpipe.split(MICROBATCHES), fpipe.place([0, 0, 1]), fpipe.merge()
    return fpipe.chain(*transforms)(fpipe.program(model))


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=repr)
def test_outputs_are_what_a_net_returns_next_to_its_loss(options: dict[str, Any]):
    x, labels = torch.randn(6, 4), torch.randn(6, 16)
    net, model, params = cut_labelled_net(x=x, labels=labels)
    program, batch = three_stages_on_two_ranks(model), ({"x": x, "labels": labels}, None)
    result = fpipe.build(program, model, **options)(params, batch)
    expected_loss, outputs = torch.zeros(()), list[Tensor]()
    for part in range(MICROBATCHES):
        output, loss = net(x.tensor_split(MICROBATCHES)[part], labels.tensor_split(MICROBATCHES)[part])
        (loss / MICROBATCHES).backward()
        outputs.append(output.detach())
        expected_loss += loss.detach() / MICROBATCHES
    assert torch.equal(result.outputs, torch.cat(outputs))
    assert torch.equal(result.loss, expected_loss)
    grads = fpipe.join_params(model, result.grads)
    assert [name for name, leaf in net.named_parameters() if not torch.equal(grads[name], leaf.grad)] == []
    assert fpipe.verify(program, model, params, batch).bitwise


@pytest.mark.parametrize("derive", [fpipe.per_example, fpipe.jvp])
def test_derivatives_are_of_a_loss_that_is_returned_next_to_outputs(derive: Any):
    x, labels = torch.randn(6, 4), torch.randn(6, 16)
    _, model, params = cut_labelled_net(x=x, labels=labels)
    derived_params = fpipe.make_dual(params, params) if derive is fpipe.jvp else params
    derived = derive(model)
    result = fpipe.build(fpipe.program(derived), derived)(derived_params, ({"x": x, "labels": labels}, None))
    expected = fpipe.reference(model, params, ({"x": x, "labels": labels}, None)).loss
    torch.testing.assert_close(result.aux["loss"].mean(), expected)


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=repr)
def test_a_net_without_a_loss_has_forwards_alone(options: dict[str, Any]):
    net, model, params = cut_labelled_net(x=rows(8)[0])
    program = three_stages_on_two_ranks(model)
    assert {op.kind for op in program.ops} == {"SPLIT", "F", "MERGE"}
    step = fpipe.build(program, model, **options)
    for count in (8, 5):
        x, _ = rows(count, count)
        result = step(params, ({"x": x}, None))
        assert (result.loss, result.grads) == (None, None)
        assert torch.equal(result.outputs, torch.cat([net(part) for part in x.tensor_split(MICROBATCHES)]))
    report = fpipe.verify(program, model, params, ({"x": x}, None))
    assert (len(report.leaves), report.bitwise) == (1, True)


def generate_on_rank(rank: int) -> bool:
    x, _ = rows(5)
    net, model, params = cut_labelled_net(x=rows(8)[0])
    program = three_stages_on_two_ranks(model)
    step = fpipe.build(program, model, runtime="distributed", example=(params, ({"x": rows(8)[0]}, None)))
    result = step(local_part(program, rank, params), ({"x": x}, None))
    if rank == 0:
        return (result.loss, result.outputs) == (None, None)
    return torch.equal(result.outputs, torch.cat([net(part) for part in x.tensor_split(MICROBATCHES)]))


def test_the_last_rank_has_the_outputs_of_a_net_without_a_loss(pair: Processes):
    assert pair.run(generate_on_rank) == [True, True]


X = torch.ones(2, 4)
NET, MODEL, PARAMS = cut_labelled_net(x=X)
BATCH = {"x": X}, None
test_gradients_of_a_net_without_a_loss_are_refused = refusals(
    globals(),
    """
fpipe.program(MODEL, input_grads=True)
    ValueError: the net computes no loss, so its inputs have no gradients: say loss=.
fpipe.per_example(MODEL)
    ValueError: the net computes no loss, so its rows have no gradients
fpipe.jvp(MODEL)
    ValueError: the net computes no loss, so it has no derivative
fpipe.compare_grads(MODEL, PARAMS, BATCH, PARAMS)
    ValueError: the net computes no loss, so there are no gradients to compare
fpipe.reference(MODEL, PARAMS, BATCH, rule="SGD", lr=0.1)
    ValueError: the net computes no loss, so there are no gradients to update by
fpipe.update("SGD")(fpipe.program(MODEL))
    ProgramError: this program has no gradients; those with a loss have.
fpipe.assign_grads(NET, fpipe.build(fpipe.program(MODEL), MODEL)(PARAMS, BATCH).grads)
    ValueError: found no gradients: a program without a loss has none.
fpipe.from_module(NET, 2, batch={"x": X}, aux=True)
    ValueError: aux=True says what loss= returns, which is missing.
fpipe.interop.torch_pipelining.runtime(fpipe.program(MODEL), MODEL, PARAMS)
    ValueError: this model has no loss=, which torch's runtime computes.
""",
)
