"""gather_state_dict returns the net's whole state_dict if parts are frozen, tied or on meta."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests.processes import Processes
from tests.refusals import refusals

MSE = nn.functional.mse_loss
WIDTH = 6


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def tied() -> nn.Module:
    input_layer, output_layer = linear(), linear()
    output_layer.weight = input_layer.weight
    return nn.Sequential(input_layer, nn.Tanh(), output_layer)


def frozen() -> nn.Module:
    net = nn.Sequential(linear(), linear(), linear())
    net[0].requires_grad_(False)
    net[2].bias.requires_grad_(False)
    return net


def tied_and_frozen() -> nn.Module:
    net = tied()
    net[0].weight.requires_grad_(False)
    return net


class Shifted(nn.Linear):
    """Buffers that nothing writes; one is in no state_dict."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("scale", torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


class Versioned(nn.Linear):
    """A layer with a state that is no tensor, as quantized layers have."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.version = 1

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


NETS: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "frozen": frozen,
    "tied and frozen": tied_and_frozen,
    "constant buffers": lambda: nn.Sequential(linear(), Shifted()),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()),
    "one module twice": lambda: nn.Sequential(*[norm := nn.BatchNorm1d(WIDTH), linear(), norm][:2], linear()),
    "parametrized": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), linear()),
}
DOORS = ["from_sequential", "from_module"]


def cut_into_stages(net: Any, door: str, batch: Any) -> tuple[fpipe.Model, Any, Any]:
    if door == "from_module":
        return fpipe.from_module(net, 2, loss=MSE, batch=batch)
    return fpipe.from_sequential(net, 2, loss=MSE)


def make_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def train_one_step(net: Any, door: str) -> tuple[fpipe.Model, fpipe.Program, fpipe.Result]:
    model, params, state = cut_into_stages(net, door, make_batch())
    pipeline = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge(), fpipe.update("SGD"))
    program = pipeline(fpipe.program(model))
    opt = fpipe.optimizer_state(program, params)
    has_state = {"state": state} if any(state) else {}
    return model, program, fpipe.build(program, model)(params, make_batch(), opt=opt, lr=0.1, **has_state)


@pytest.mark.crossed
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", NETS)
def test_a_trained_net_is_loaded_strictly(name: str, door: str, tmp_path: Path):
    """The state_dict used to lack ties, frozen parameters, buffers and running statistics."""
    torch.manual_seed(0)
    net = NETS[name]()
    expected, fresh = copy.deepcopy(net), copy.deepcopy(net)
    model, program, result = train_one_step(net, door)
    optimizer = torch.optim.SGD([leaf for leaf in expected.parameters() if leaf.requires_grad], lr=0.1)
    for x, target in zip(*(leaf.chunk(2) for leaf in make_batch()), strict=True):
        (MSE(expected(x), target) / 2).backward()
    optimizer.step()
    state_dict: Any = fpipe.gather_state_dict(program, result.params, model=model, state=result.state)
    for leaf in fresh.state_dict().values():
        leaf.zero_()
    fresh.load_state_dict(state_dict)  # strict
    torch.testing.assert_close(fresh.state_dict(), expected.state_dict())  # the gradients of a tied weight round
    file = tmp_path / "net.safetensors"
    fpipe.gather_state_dict(program, result.params, model=model, state=result.state, file=file)
    from safetensors.torch import load_file

    file_tensors = load_file(file)
    fresh.load_state_dict(file_tensors)
    assert all(torch.equal(leaf, state_dict[name]) for name, leaf in file_tensors.items())


@pytest.mark.parametrize("door", DOORS)
def test_extra_states_are_gathered(door: str, tmp_path: Path):
    """Used to be left out, so that a strict load failed."""
    net = nn.Sequential(linear(), Versioned())
    net[1].version = 2
    model, program, result = train_one_step(net, door)
    fresh = nn.Sequential(linear(), Versioned())
    fresh.load_state_dict(fpipe.gather_state_dict(program, result.params, model=model) or {})
    assert fresh[1].version == 2
    with pytest.raises(
        ValueError, match=re.escape("a .safetensors file cannot hold '1._extra_state': gather the dict")
    ):
        fpipe.gather_state_dict(program, result.params, model=model, file=tmp_path / "net.safetensors")


class Spare(nn.Module):
    """A parameter and a module that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = linear(), linear(), linear()
        self.unused = nn.Parameter(torch.randn(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_unused_parameters_are_gathered():
    net = Spare()
    model, program, result = train_one_step(net, "from_module")
    state_dict: Any = fpipe.gather_state_dict(program, result.params, model=model)
    assert state_dict.keys() == net.state_dict().keys()
    assert all(torch.equal(state_dict[name], leaf) for name, leaf in net.spare.state_dict(prefix="spare.").items())


def test_loaded_params_of_a_net_on_meta_are_gathered():
    loaded_net = nn.Sequential(linear(), Shifted(), nn.BatchNorm1d(WIDTH), linear())
    with torch.device("meta"):
        meta_net = nn.Sequential(linear(), Shifted(), nn.BatchNorm1d(WIDTH), linear())
        batch = torch.empty(8, WIDTH), torch.empty(8, WIDTH)
    model, _, state = cut_into_stages(meta_net, "from_module", batch)
    program = fpipe.program(model)
    params = fpipe.load_params(model, program, loaded_net.state_dict(), rank=0, init=lambda _, leaf: leaf.zero_())
    loaded_state = fpipe.load_params(model, program, loaded_net.state_dict(), rank=0, state=state)
    gathered: Any = fpipe.gather_state_dict(program, params, model=model, state=loaded_state)
    assert gathered.keys() == loaded_net.state_dict().keys()
    assert all(torch.equal(gathered[name], leaf) for name, leaf in loaded_net.state_dict().items())


def gather_on_rank(rank: int, file: str) -> list[str] | None:
    torch.manual_seed(0)
    net = nn.Sequential(Shifted(), nn.BatchNorm1d(WIDTH), *tied())
    net[0].bias.requires_grad_(False)
    model, params, state = cut_into_stages(net, "from_sequential", None)
    program = fpipe.schedules.gpipe(2)(fpipe.program(model))
    params, state = (fpipe.local_params(program, tensors, rank) for tensors in (params, state))
    fpipe.gather_state_dict(program, params, model=model, state=state, file=file)
    state_dict = fpipe.gather_state_dict(program, params, model=model, state=state)
    if state_dict is None:
        return None
    net.load_state_dict(state_dict)
    return [*state_dict]


def test_ranks_gather_one_state_dict(pair: Processes, tmp_path: Path):
    file = tmp_path / "net.safetensors"
    names, rank_1_names = pair.run(gather_on_rank, str(file))
    assert rank_1_names is None
    from safetensors.torch import load_file

    file_tensors = load_file(file)
    net = nn.Sequential(Shifted(), nn.BatchNorm1d(WIDTH), *tied())
    assert sorted(file_tensors) == sorted(names)
    net.load_state_dict(file_tensors)


def gather_without_values(rank: int, rank_with_values: int) -> list[str] | str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Shifted())
    net[1].bias.requires_grad_(False)
    model, params, state = cut_into_stages(net, "from_sequential", None)
    program = fpipe.schedules.gpipe(2)(fpipe.program(model))
    local = fpipe.local_params(program, params, rank)
    if rank != rank_with_values:
        net[1].to("meta")
    try:
        state_dict = fpipe.gather_state_dict(program, local, model=model, state=state)
    except ValueError as error:
        return str(error)
    return [*(state_dict or ())]


def test_frozen_parameters_come_from_rank_0(pair: Processes):
    """A rank whose net is on meta used to refuse alone, while rank 0 waited for its tensors."""
    names, rank_1_names = pair.run(gather_without_values, 0)
    assert "1.bias" in names
    assert rank_1_names == []
    rank_0_error, rank_1_error = pair.run(gather_without_values, 1)
    assert rank_0_error == rank_1_error
    assert str(rank_0_error).endswith("is on meta in the net, and not among the params: it has no values to give.")


def store_without_values(rank: int, folder: Path) -> list[str]:
    program = fpipe.schedules.gpipe(2)(fpipe.program(2))
    params: Any = [None, None]
    params[rank] = {"w": torch.ones(2, device="meta" if rank else "cpu")}
    stores: list[Callable[[], object]] = [
        lambda: fpipe.gather_state_dict(program, params),
        lambda: fpipe.save(folder, program, params),
    ]
    messages = list[str]()
    for store in stores:
        with pytest.raises(ValueError, match="on meta") as error_info:
            store()
        messages.append(str(error_info.value))
    return messages


def test_parameters_of_one_rank_on_meta_are_refused_on_all(pair: Processes, tmp_path: Path):
    """Only the rank on meta used to raise; its peer waited for tensors until the timeout."""
    messages, rank_1_messages = pair.run(store_without_values, tmp_path)
    assert messages == rank_1_messages
    assert messages[0].startswith("on rank 1: params[1]['w'] is on meta, without values: fpipe.load_params")


FUNCTIONS = fpipe.from_functions([lambda p, x: x * p["w"]], MSE)
NORM, NORM_PARAMS, NORM_STATE = fpipe.from_sequential(nn.Sequential(nn.BatchNorm1d(WIDTH)), 1, loss=MSE)
ONE_STAGE = fpipe.program(1)
test_incomplete_nets_are_refused = refusals(
    globals(),
    """
fpipe.gather_state_dict(ONE_STAGE, ({"w": torch.ones(1)},), model=FUNCTIONS)
    TypeError: stage 0 is of no module, so its parameters have no names
fpipe.gather_state_dict(ONE_STAGE, NORM_PARAMS, model=NORM)
    ValueError: stage 0 (0) has module state, which a step returns: say state=result.state.
fpipe.gather_state_dict(ONE_STAGE, NORM_PARAMS, model=NORM, state=())
    ValueError: state has one entry for each stage, as params; found 0 and 1.
""",
)


def test_missing_gradients_are_left_out():
    """A parameter that the loss does not read has no gradient, for which gathering used to be refused."""
    program = fpipe.program(2)
    grads = ({"w": torch.ones(2), "spare": None}, {"v": torch.zeros(1)})
    assert {name: leaf.tolist() for name, leaf in fpipe.gather_state_dict(program, grads).items()} == {
        "w": [1.0, 1.0],
        "v": [0.0],
    }
