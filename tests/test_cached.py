"""What stages cache: tables that were made while a stage ran on tensors without data are no tables."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fpipe

torch.manual_seed(0)
ROWS = torch.randn(6, 8), torch.randn(6, 8)
W = torch.randn(8, 8)
TABLE: Tensor | None = None


class Tables(nn.Module):
    """Keeps its tables in a dict, a list, or an attribute of something else."""

    def __init__(self, find: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.find = nn.Linear(8, 8), find
        self.tables: dict[int, Any] = {}
        self.rows: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.find(self)


def in_a_dict(module: Any) -> Tensor:
    if 8 not in module.tables:
        module.tables[8] = (torch.arange(8.0), {"shape": 8})
    return module.tables[8][0]


def in_a_list(module: Any) -> Tensor:
    if not module.rows:
        module.rows.append(torch.arange(8.0))
    return module.rows[0]


@functools.cache
def remembered(count: int) -> Tensor:
    return torch.arange(float(count))


def in_a_global(module: Any) -> Tensor:
    global TABLE
    TABLE = torch.arange(8.0) if TABLE is None else TABLE
    return TABLE


def by_function(find: Callable[[Any], Tensor]) -> Any:
    holder = Tables(find)
    model = fpipe.from_functions([lambda p, x: x @ p["w"] + find(holder)], nn.functional.mse_loss)
    return model, ({"w": W},)


def by_module(find: Callable[[Any], Tensor]) -> Any:
    return fpipe.from_sequential(nn.Sequential(Tables(find)), stages=1, loss=nn.functional.mse_loss)[:2]


FINDS: dict[str, Callable[[Any], Tensor]] = {
    "a dict": in_a_dict,
    "a list": in_a_list,
    "functools": lambda module: remembered(8),
    "a global": in_a_global,
}
PROGRAM = fpipe.chain(fpipe.split(3), fpipe.merge())
READINGS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sizes": lambda program, model, params: fpipe.sizes(program, model, params, ROWS),
    "example": lambda program, model, params: fpipe.build(program, model, example=(params, ROWS)),
    "linearize": lambda program, model, params: fpipe.linearize(model.stages[0].forward, params[0], ROWS[0]),
}


@pytest.mark.parametrize("made", [by_function, by_module])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", FINDS)
def test_what_is_cached_without_data_is_not_found_later(name: str, reading: str, made: Any):
    """The steps that came after `sizes`, and the net itself, made tensors without data."""
    global TABLE
    TABLE = None
    remembered.cache_clear()
    model, params = made(FINDS[name])
    program = PROGRAM(fpipe.program(model))
    READINGS[reading](program, model, params)
    assert TABLE is None
    found = fpipe.build(program, model)(params, ROWS)
    expected = fpipe.reference(model, params, ROWS, microbatches=3)
    assert type(found.loss) is Tensor
    assert torch.equal(found.loss, expected.loss)
    assert type(remembered(8)) is Tensor


class Odd:
    """Has an answer of its own to whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_objects_with_odd_attributes_are_walked_past():
    odd = Odd()
    model = fpipe.from_functions([lambda p, x: x @ p["w"] + (odd is None)], nn.functional.mse_loss)
    program = PROGRAM(fpipe.program(model))
    assert fpipe.verify(program, model, ({"w": W},), ROWS).bitwise


def test_a_step_without_data_looks_after_what_has_data():
    """Whether a buffer was written is asked of its numbers, which a mode around the step does not let out."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False, track_running_stats=False))
    net.register_buffer("shift", torch.ones(8))
    model = fpipe.from_functions(
        [lambda p, x: torch.func.functional_call(net, p, (x,)) + net.shift], nn.functional.mse_loss
    )
    params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {name: mode.from_tensor(leaf) for name, leaf in params.items()}
        batch = mode.from_tensor(ROWS[0]), mode.from_tensor(ROWS[1])
        made = fpipe.build(PROGRAM(fpipe.program(model)), model)((given,), batch)
    assert made.loss.fake_mode is mode
    assert torch.equal(net.shift, torch.ones(8))
