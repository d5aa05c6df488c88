"""A call is pure if it writes only memory that it made or that was passed as state, and leaves nothing behind."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.graphs.tracing.fake_tensors import LeakedTensor
from fpipe.meaning.purity.pure import Impure, pure
from tests.toys import Toy, merged

torch.manual_seed(0)
ROWS = torch.randn(10, 8), torch.randn(10, 8)
W = torch.randn(8, 8)
CLOSED_OVER = torch.zeros(8)
MSE = nn.functional.mse_loss
PROGRAM = fpipe.chain(fpipe.split(4), fpipe.checkpoint(), fpipe.merge())


# What may be written


ALLOWED_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "what it made": lambda x: (x * 2).add_(1),
    "a view of it": lambda x: (x * 2)[1:].zero_(),
    "as out=": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "a literal": lambda x: torch.tensor([1.0, 2.0]).mul_(2),
    "a slice": lambda x: torch.zeros(8).__setitem__(slice(2, 4), 1.0),
    "by its data": lambda x: (x * 2).data.add_(1),
    "many at once": lambda x: torch._foreach_add_([x * 1, x * 2], 1),
    "statistics": lambda x: nn.functional.batch_norm(x, torch.zeros(8), torch.ones(8), training=True),
}
FOREIGN_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "what it was given": lambda x: x.add_(1),
    "a view of it": lambda x: x[1:].zero_(),
    "as out=": lambda x: torch.add(x, 1, out=x),
    "a slice": lambda x: x.__setitem__(slice(2, 4), 1.0),
    "by its data": lambda x: x.data.add_(1),
    "what it closes over": lambda x: CLOSED_OVER.add_(1),
    "many at once": lambda x: torch._foreach_add_([x * 1, CLOSED_OVER], 1),
    "statistics": lambda x: nn.functional.batch_norm(x, CLOSED_OVER, torch.ones(8), training=True),
    "in place by a module": lambda x: nn.ReLU(inplace=True)(x),
    "at random": lambda x: nn.init.normal_(CLOSED_OVER),
}


@pytest.mark.parametrize("name", ALLOWED_WRITES)
def test_a_call_may_write_its_own_memory(name: str):
    with pure(ALLOWED_WRITES[name], "a stage", ROWS[0]):
        ALLOWED_WRITES[name](ROWS[0])


@pytest.mark.parametrize("name", FOREIGN_WRITES)
def test_a_write_to_foreign_memory_is_refused_before_it_happens(name: str):
    rows_before = ROWS[0].clone()
    with (
        pytest.raises(Impure, match=r"a stage writes .* in place") as error,
        pure(FOREIGN_WRITES[name], "a stage", ROWS[0]),
    ):
        FOREIGN_WRITES[name](ROWS[0])
    assert error.traceback[1].path.name == "test_pure.py"  # the user's line is on the way
    assert torch.equal(ROWS[0], rows_before)
    assert torch.equal(CLOSED_OVER, torch.zeros(8))


# What is bound


class Holder(nn.Module):
    """A layer with a plain attribute, and a function that uses it."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor], held_value: Any) -> None:
        super().__init__()
        self.layer, self.does, self.held = nn.Linear(8, 8), does, held_value

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.layer(x))


def update_average(module: Any, y: Tensor) -> Tensor:
    module.held = 0.9 * module.held + 0.1 * y.detach().mean(0)
    return y - module.held


def swap_memo(module: Any, y: Tensor) -> Tensor:
    previous, module.held = module.held.detach(), y.mean(0)
    return torch.stack([y, previous.expand_as(y)]).sum(0)


def start_memo(module: Any, y: Tensor) -> Tensor:
    shifted = y if module.held is None else y + module.held
    module.held = y.detach().mean(0)
    return shifted


STATE: dict[str, Callable[[], Holder]] = {
    "another": lambda: Holder(update_average, torch.zeros(8)),
    "detached": lambda: Holder(swap_memo, torch.zeros(8)),
    "none at first": lambda: Holder(start_memo, None),
}


@pytest.mark.parametrize("run", ["traced", "by autograd", "reference"])
@pytest.mark.parametrize("name", STATE)
def test_state_in_a_plain_attribute_is_refused(name: str, run: str):
    """Used to bake the value of the first eager step into the trace, and to compute other numbers silently."""
    net = nn.Sequential(STATE[name](), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    step = fpipe.build(PROGRAM(fpipe.program(model)), model, trace=run == "traced")
    sentence = (
        "stage 0 (0) changes 'held' of module '0' (Holder) as it runs, a tensor that is no buffer. "
        "Say self.register_buffer('held', ...)."
    )
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        fpipe.reference(model, params, ROWS, microbatches=4) if run == "reference" else step(params, ROWS)


def store_output(module: Any, y: Tensor) -> Tensor:
    module.held = y.detach()
    return y * 2


def grow_cache(module: Any, y: Tensor) -> Tensor:
    if module.held is None or len(module.held) < len(y):
        module.held = torch.arange(float(len(y)))[:, None]
    return y + module.held[: len(y)]


def cast_memo(module: Any, y: Tensor) -> Tensor:
    module.held = module.held.to(y)
    return y + module.held


HARMLESS_STATE: dict[str, Callable[[], Holder]] = {
    "to look at": lambda: Holder(store_output, torch.zeros(8)),
    "a cache": lambda: Holder(grow_cache, None),
    "moved": lambda: Holder(cast_memo, torch.arange(8)),
    "read": lambda: Holder(lambda module, y: y + module.held, torch.arange(8.0)),
}


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", HARMLESS_STATE)
def test_harmless_plain_attributes_are_allowed(name: str, trace: bool):
    net = nn.Sequential(HARMLESS_STATE[name](), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    program = PROGRAM(fpipe.program(model))
    result = fpipe.build(program, model, trace=trace)(params, ROWS)
    for x, t in zip(ROWS[0].tensor_split(4), ROWS[1].tensor_split(4), strict=True):
        (MSE(net(x), t) * (len(x) / 10)).backward()
    grads = fpipe.join_params(model, result.grads)
    assert all(torch.equal(grads[name], leaf.grad) for name, leaf in net.named_parameters())


# What a trace repeats


def count_calls(module: Any, y: Tensor) -> Tensor:
    module.held += 1
    return y * module.held


def tally_calls(module: Any, y: Tensor) -> Tensor:
    module.held["calls"] = module.held.get("calls", 0) + 1
    return y * module.held["calls"]


@pytest.mark.parametrize("make", [lambda: Holder(count_calls, 0), lambda: Holder(tally_calls, {})])
def test_a_traced_module_runs_its_python_once(make: Callable[[], Holder]):
    """As under `jax.jit`, Python runs once, at the trace, and its side effects are undone. An audit refuses a count."""
    net = nn.Sequential(make(), nn.Linear(8, 8))
    memo_before = copy.copy(net[0].held)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    step = fpipe.build(merged(model, 4), model, example=(params, ROWS), audit="never")
    assert net[0].held == memo_before
    assert torch.equal(step(params, ROWS).loss, step(params, ROWS).loss)


# What is left behind


def caching_module(find: Callable[[Any], Tensor]) -> nn.Module:
    """Return a module that may cache tables in a dict or a list."""
    return Toy(lambda module, x: module.layer(x) + find(module), layer=nn.Linear(8, 8), tables={}, rows=[])


def in_a_dict(module: Any) -> Tensor:
    if 8 not in module.tables:
        module.tables[8] = (torch.arange(8.0), {"shape": 8})
    return module.tables[8][0]


def in_a_list(module: Any) -> Tensor:
    if not module.rows:
        module.rows.append(torch.arange(8.0))
    return module.rows[0]


@functools.cache
def cached_arange(count: int) -> Tensor:
    return torch.arange(float(count))


READINGS: dict[str, Callable[..., Any]] = {
    "sizes": lambda program, model, params: fpipe.sizes(program, model, params, ROWS),
    "example": lambda program, model, params: fpipe.build(program, model, example=(params, ROWS)),
    "linearize": lambda program, model, params: fpipe.linearize(model.stages[0].forward, params[0], ROWS[0]),
}


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("reading", READINGS)
def test_a_leaked_fake_tensor_is_an_error(reading: str):
    """Used to leave tensors without data in the net after `sizes`. A real step first caches a real tensor."""
    cached_arange.cache_clear()
    net = nn.Sequential(caching_module(lambda module: cached_arange(8)))
    model, params, _ = fpipe.from_sequential(net, stages=1, loss=MSE)
    program = PROGRAM(fpipe.program(model))
    with pytest.raises(LeakedTensor, match=r"a tensor of shape \(8,\) without data is left behind"):
        READINGS[reading](program, model, params)
    cached_arange.cache_clear()
    result = fpipe.build(program, model)(params, ROWS)
    assert torch.equal(result.loss, fpipe.reference(model, params, ROWS, microbatches=4).loss)
    READINGS[reading](program, model, params)


@pytest.mark.parametrize("find", [in_a_dict, in_a_list])
def test_a_trace_removes_what_a_module_cached(find: Callable[[Any], Tensor]):
    net: Any = caching_module(find)
    model, params, _ = fpipe.from_sequential(nn.Sequential(net), stages=1, loss=MSE)
    program = PROGRAM(fpipe.program(model))
    fpipe.sizes(program, model, params, ROWS)
    assert not net.tables
    assert not net.rows
    step = fpipe.build(program, model, example=(params, ROWS))
    assert torch.equal(step(params, ROWS).loss, fpipe.reference(model, params, ROWS, microbatches=4).loss)


def test_a_hook_that_stores_outputs_is_refused_by_a_trace():
    """A list of outputs, kept to be looked at, would get the tensors of the trace."""
    outputs = list[Tensor]()
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda module, args, y: outputs.append(y.detach()))
    model, params, _ = fpipe.from_sequential(nn.Sequential(layer), stages=1, loss=MSE)
    program = PROGRAM(fpipe.program(model))
    with pytest.raises(LeakedTensor, match=r"is left behind in a list"):
        fpipe.build(program, model)(params, ROWS)
    outputs.clear()
    fpipe.build(program, model, trace=False)(params, ROWS)
    assert outputs
    assert all(type(y) is Tensor for y in outputs)
