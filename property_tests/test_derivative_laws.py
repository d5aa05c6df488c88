"""Laws of derivatives: a program of a model's derivative, or of its rows, computes what torch.func computes."""

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
from property_tests.strategies import Net, max_examples, nets, outputs, shared
from tests.processes import Processes
from tests.test_distributed import compare_with_one_process

DOUBLE = nets().map(lambda net: replace(net, dtype="float64")).filter(lambda net: any(net.params()))
Params = Sequence[dict[str, Tensor]]


def loss_of(net: Net, params: Params, x: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a batch, by calls of all stages in order."""
    loss = LOSSES[net.reduction](outputs(net, shared(net, params), x), target)
    return loss[0] / torch.clamp(loss[1], min=1) if net.reduction == "count" else loss


def is_close(actual: Any, expected: Any) -> bool:
    """Whether all leaves are close, where a gradient of None stands for zeros."""
    pairs = zip(tree.leaves(actual), tree.leaves(expected), strict=True)
    return all(not bool(b.any()) if a is None else torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs)


def step_on_duals(run: Run, tangents: Params) -> tuple[Tensor, Any, Any]:
    """Run a step on dual numbers, under the run's chain; return derivative, Hessian product and gradient."""
    model = fpipe.jvp(run.net.model)
    program = run.chain(fpipe.split(run.microbatches)(fpipe.program(model)))
    duals = fpipe.make_dual(run.net.params(run.seed), tangents)
    result = fpipe.build(program, model)(duals, run.net.batch(run.rows, run.seed))
    return result.loss, *fpipe.unpack_dual(result.grads)


@max_examples(2)
@given(runs(DOUBLE))
def test_a_step_on_dual_numbers_gives_derivative_gradient_and_hessian_product(run: Run):
    params, tangents, batch = run.net.params(run.seed), run.net.params(run.seed + 1), run.net.batch(run.rows, run.seed)
    derivative, product, gradient = step_on_duals(run, tangents)
    grad = torch.func.grad(lambda params: loss_of(run.net, params, *batch))
    assert is_close((gradient, product), torch.func.jvp(grad, (params,), (tangents,)))
    assert is_close(derivative, dot(gradient, tangents))


@max_examples(1)
@given(runs(DOUBLE))
def test_the_hessian_is_symmetric(run: Run):
    tangent, other_tangent = run.net.params(run.seed + 1), run.net.params(run.seed + 2)
    products = (step_on_duals(run, direction)[1] for direction in (other_tangent, tangent))
    assert is_close(*map(dot, (tangent, other_tangent), products))


def dot(tensors: Any, others: Any) -> Tensor:
    pairs = zip(tree.leaves(tensors), tree.leaves(others), strict=True)
    return sum((torch.sum(a * b) for a, b in pairs), torch.tensor(0.0, dtype=torch.float64))


@max_examples(3)
@given(runs(DOUBLE))
def test_gradients_of_single_rows_are_those_of_vmap(run: Run):
    params, (x, target) = run.net.params(run.seed), run.net.batch(run.rows, run.seed)
    model = fpipe.per_example(run.net.model)
    program = run.chain(fpipe.split(run.microbatches)(fpipe.program(model)), fpipe.merge(grads="rows"))
    result = fpipe.build(program, model)(params, (x, target))

    def loss_of_row(params: Params, x: Tensor, target: Tensor) -> Tensor:
        return loss_of(run.net, params, x[None], target[None])

    expected, losses = torch.func.vmap(torch.func.grad_and_value(loss_of_row), in_dims=(None, 0, 0))(params, x, target)
    assert is_close(result.grads, expected)
    assert is_close(result.aux["loss"], losses)


def smallest_sizes(name: str) -> tuple[int, int, int]:
    """Return the smallest ranks, microbatches and stages that a schedule accepts."""
    stages_per_rank = about(name).stages_per_rank
    sizes = ((p, m, p * stages_per_rank) for p in (2, 3, 4) for m in (2, 3, 4, 6, 8))
    return next(size for size in sizes if about(name).refuses(size[0], size[2], size[1]) is None)


MODELS: dict[int, tuple[Net, Any, Any]] = {}
NAMES = [name for name in fpipe.schedules.names() if about(name).source and name != "seq1f1b"]  # which slices sequences


def mark_deep_except(fast_names: Sequence[str], names: Sequence[str]) -> list[Any]:
    return [*fast_names, *(pytest.param(name, marks=pytest.mark.deep) for name in names if name not in fast_names)]


def derivative_programs(name: str, ranks: int, microbatches: int, stages: int) -> list[tuple[Any, Any, Any, Any]]:
    """Build a schedule's programs for a model on dual numbers and for its rows, with models, params and a batch."""
    net = Net(("tied", "mlp", *["mlp", "tied"] * 3)[:stages], ("batch", *range(stages - 1)))
    of_rows, tangent = MODELS.setdefault(stages, (net, fpipe.per_example(net.model), fpipe.jvp(net.model)))[1:]
    params, batch = net.params(), net.batch(microbatches + 1)
    split, schedule = fpipe.split(microbatches), fpipe.schedules.get(name)(ranks)
    cases = (tangent, fpipe.make_dual(params, net.params(1)), "sum"), (of_rows, params, "rows")
    return [
        (fpipe.chain(split, schedule, fpipe.merge(grads=grads_kind))(fpipe.program(model)), model, case_params, batch)
        for model, case_params, grads_kind in cases
    ]


@pytest.mark.parametrize("name", mark_deep_except(NAMES[::8], NAMES))
def test_every_schedule_has_the_bits_of_the_reference(name: str):
    """Runs in this process and on threads have the bits of the reference, which runs microbatches in order."""
    ranks, microbatches, stages = smallest_sizes(name)
    for program, model, params, batch in derivative_programs(name, ranks, microbatches, stages):
        expected = fpipe.reference(model, params, batch, microbatches=microbatches)
        for runtime in ("local", "threads"):
            result = fpipe.build(program, model, runtime=runtime)(params, batch)
            pairs = zip(tree.leaves(result.grads), tree.leaves(expected.grads), strict=True)
            assert all(a is b or torch.equal(a, b) for a, b in pairs)


def differences_under(rank: int, name: str, microbatches: int, stages: int) -> list[str]:
    cases = derivative_programs(name, 2, microbatches, stages)
    return [difference for case in cases for difference in compare_with_one_process(rank, *case, steps=1)]


OF_TWO = [name for name in NAMES if smallest_sizes(name)[0] == 2 and name != "roundpipe"]  # whose host is a third rank


@pytest.mark.parametrize("name", mark_deep_except(["zb_h1"], OF_TWO))
def test_two_processes_have_the_bits_of_one_under_every_schedule(pair: Processes, name: str):
    assert pair.run(differences_under, name, *smallest_sizes(name)[1:]) == [[], []]
