"""Because stages are pure: a program of a model's derivative, or of its rows, gives what torch.func gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import fpipe
from fpipe import tree
from fpipe.schedules import about
from property_tests.chains import Run, runs
from property_tests.stage_functions import LOSSES
from property_tests.strategies import Net, few, nets, outputs, shared
from tests.processes import Processes
from tests.test_distributed import both

DOUBLE = nets().map(lambda net: replace(net, dtype="float64")).filter(lambda net: any(net.params()))
Params = Sequence[dict[str, Tensor]]


def loss_of(net: Net, params: Params, x: Tensor, target: Tensor) -> Tensor:
    """The loss of a batch, as anyone would write the model."""
    made = LOSSES[net.reduction](outputs(net, shared(net, params), x), target)
    return made[0] / torch.clamp(made[1], min=1) if net.reduction == "count" else made


def close(found: Any, expected: Any) -> bool:
    """Leaf by leaf; a gradient that is None is one of zeros."""
    pairs = zip(tree.leaves(found), tree.leaves(expected), strict=True)
    return all(not bool(b.any()) if a is None else torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs)


def on_duals(run: Run, tangents: Params) -> tuple[Tensor, Any, Any]:
    """A step of the run's model on dual numbers, under its chain: derivative, Hessian product, gradient."""
    model = fpipe.jvp(run.net.model)
    program = run.chain(fpipe.split(run.microbatches)(fpipe.program(model)))
    duals = fpipe.make_dual(run.net.params(run.seed), tangents)
    result = fpipe.build(program, model)(duals, run.net.batch(run.rows, run.seed))
    return result.loss, *fpipe.unpack_dual(result.grads)


@few(2)
@given(runs(DOUBLE))
def test_a_step_on_dual_numbers_gives_derivative_gradient_and_hessian_product(run: Run):
    params, tangents, batch = run.net.params(run.seed), run.net.params(run.seed + 1), run.net.batch(run.rows, run.seed)
    derivative, product, gradient = on_duals(run, tangents)
    grad = torch.func.grad(lambda params: loss_of(run.net, params, *batch))
    assert close((gradient, product), torch.func.jvp(grad, (params,), (tangents,)))
    assert close(derivative, dot(gradient, tangents))


@few(1)
@given(runs(DOUBLE))
def test_the_hessian_is_symmetric(run: Run):
    one, other = run.net.params(run.seed + 1), run.net.params(run.seed + 2)
    assert close(dot(one, on_duals(run, other)[1]), dot(other, on_duals(run, one)[1]))


def dot(one: Any, other: Any) -> Tensor:
    pairs = zip(tree.leaves(one), tree.leaves(other), strict=True)
    return sum((torch.sum(a * b) for a, b in pairs), torch.tensor(0.0, dtype=torch.float64))


@few(3)
@given(runs(DOUBLE))
def test_gradients_of_single_rows_are_mapped_ones(run: Run):
    params, (x, target) = run.net.params(run.seed), run.net.batch(run.rows, run.seed)
    model = fpipe.per_example(run.net.model)
    program = run.chain(fpipe.split(run.microbatches)(fpipe.program(model)), fpipe.merge(grads="rows"))
    found = fpipe.build(program, model)(params, (x, target))

    def alone(params: Params, x: Tensor, target: Tensor) -> Tensor:
        return loss_of(run.net, params, x[None], target[None])

    expected, losses = torch.func.vmap(torch.func.grad_and_value(alone), in_dims=(None, 0, 0))(params, x, target)
    assert close(found.grads, expected)
    assert close(found.aux["loss"], losses)


def small(name: str) -> tuple[int, int, int]:
    """Ranks, microbatches and stages of a small program of a schedule."""
    each = about(name).stages_per_rank
    sizes = ((p, m, p * each) for p in (2, 3, 4) for m in (2, 3, 4, 6, 8))
    return next(size for size in sizes if about(name).refuses(size[0], size[2], size[1]) is None)


MODELS: dict[int, tuple[Net, Any, Any]] = {}
WHOLE = [name for name in fpipe.schedules.names() if about(name).source and name != "seq1f1b"]  # which slices sequences


def deep_but(few: Sequence[str], names: Sequence[str]) -> list[Any]:
    return [*few, *(pytest.param(one, marks=pytest.mark.deep) for one in names if one not in few)]


def under(name: str, ranks: int, microbatches: int, stages: int) -> list[tuple[fpipe.Program, fpipe.Model, Any, Any]]:
    """Programs of a schedule for a model on dual numbers and for its rows, with params and a batch."""
    net = Net(("tied", "mlp", *["mlp", "tied"] * 3)[:stages], ("batch", *range(stages - 1)))
    of_rows, tangent = MODELS.setdefault(stages, (net, fpipe.per_example(net.model), fpipe.jvp(net.model)))[1:]
    schedule, params, batch = fpipe.schedules.get(name)(ranks), net.params(), net.batch(microbatches + 1)
    cases = (tangent, fpipe.make_dual(params, net.params(1)), "sum"), (of_rows, params, "rows")
    return [
        (fpipe.chain(fpipe.split(microbatches), schedule, fpipe.merge(grads=how))(fpipe.program(of)), of, own, batch)
        for of, own, how in cases
    ]


@pytest.mark.parametrize("name", deep_but(WHOLE[::4], WHOLE))
def test_under_every_schedule(name: str):
    """The bits are those of the reference, one microbatch after the other, whatever the schedule; on threads too."""
    ranks, microbatches, stages = small(name)
    for program, model, own, batch in under(name, ranks, microbatches, stages):
        expected = fpipe.reference(model, own, batch, microbatches=microbatches)
        for runtime in ("local", "threads"):
            found = fpipe.build(program, model, runtime=runtime)(own, batch)
            pairs = zip(tree.leaves(found.grads), tree.leaves(expected.grads), strict=True)
            assert all(a is b or torch.equal(a, b) for a, b in pairs)


def differs_under(rank: int, name: str, microbatches: int, stages: int) -> list[str]:
    cases = under(name, 2, microbatches, stages)
    return [odd for program, model, own, batch in cases for odd in both(rank, program, model, own, batch, steps=1)]


OF_TWO = [name for name in WHOLE if small(name)[0] == 2 and name != "roundpipe"]  # whose host is a third rank


@pytest.mark.parametrize("name", deep_but(["zb_h1"], OF_TWO))
def test_under_every_schedule_of_two_processes(pair: Processes, name: str):
    """What the law above says of one process is so of two, bit by bit."""
    assert pair.each(differs_under, name, *small(name)[1:]) == [[], []]
