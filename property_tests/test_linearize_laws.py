"""Laws of traced stages and of steps with them, on random stages: bits, work, memory, and leaks."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import tree
from fpipe.graphs.tracing import trace_cache
from property_tests.bits import bits, tensors
from property_tests.chains import Run, runs
from property_tests.drawn_models import model_of
from property_tests.lawful import as_fresh_leaves, assert_lawful, run_plain, storages
from property_tests.stages import DrawnStage, has_unread_work, recipes, stacks, works_in_place
from property_tests.strategies import max_examples

SEED = st.integers(0, 2**16)
ROWS = st.integers(1, 5)


class Newborn(TorchDispatchMode):
    """Collect weak references to the memory that ops allocate in this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.storages |= storages(tensors(output), tensors([args, kwargs])).keys()
        return output

    @property
    def alive(self) -> set[StorageWeakRef]:
        return {storage for storage in self.storages if not storage.expired()}


# One stage.


@max_examples(4)
@given(recipes(), ROWS, SEED)
def test_the_four_functions_compute_what_plain_autograd_does(recipe: DrawnStage, rows: int, seed: int):
    """With equal bits, and no more work or memory. But autograd also runs unread layers, and a trace may keep two
    versions of a tensor that an op changes in place."""

    def make_inputs() -> tuple[Any, Any]:
        return recipe.params(seed), recipe.input(rows, seed)

    expected = run_plain(recipe, *map(as_fresh_leaves, make_inputs()), seed)
    allowed = {"less_work": has_unread_work(recipe), "more_memory": works_in_place(recipe)}
    assert_lawful(recipe.function, make_inputs, expected, **allowed)


NUMBERS = st.one_of(
    st.floats(allow_nan=False), st.just(float("nan")), st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9)
)
ARITHMETIC = st.sampled_from([operator.add, operator.sub, operator.mul, operator.truediv])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@max_examples(4)
@given(ARITHMETIC, NUMBERS, DTYPES, st.sampled_from([(), (3,), (2, 3)]), SEED)
def test_numbers_in_a_stage_have_the_bits_that_torch_gives_them(
    op: Callable[[Any, Any], Tensor], number: float, dtype: torch.dtype, shape: tuple[int, ...], seed: int
):
    """A trace turns numbers into tensors; it must round no earlier, and to no other dtype, than torch does."""

    def stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return op(op(x, number) * params["w"], number)

    make = torch.Generator().manual_seed(seed)
    w, x, dy = (torch.randn(shape, generator=make).to(dtype) for _ in range(3))
    leaves = [leaf.clone().requires_grad_() for leaf in (x, w)]
    y = stage({"w": leaves[1]}, leaves[0])
    linearized = fpipe.linearize(stage, {"w": w}, x)
    as_fresh_leaves, residuals = linearized.forward({"w": w}, x)
    assert bits(as_fresh_leaves) == bits(y)
    dx, dparams = linearized.backward({"w": w}, residuals, dy)
    assert bits([dx, dparams["w"]]) == bits(torch.autograd.grad(y, leaves, dy))


@max_examples(4)
@given(recipes(), ROWS, SEED)
def test_only_inputs_of_w_are_alive_after_i(recipe: DrawnStage, rows: int, seed: int):
    params, x = recipe.params(seed), recipe.input(rows, seed)
    dy = run_plain(recipe, as_fresh_leaves(params), as_fresh_leaves(x), seed).dy
    linearized = fpipe.linearize(recipe.function, params, x)
    expected = bits(linearized.backward(params, linearized.forward(params, x)[1], dy)[1])
    assert all(linearized.graphs.values())  # written down before anybody counts
    linearized.backward_weight(params, linearized.backward_input(params, linearized.forward(params, x)[1], dy)[1])
    with Newborn() as newborn:
        y, residuals = linearized.forward(params, x)
        dx, weight_residuals = linearized.backward_input(params, residuals, dy)
        del y, residuals, dx
        assert newborn.alive <= storages(weight_residuals).keys()
    del x, dy
    assert bits(linearized.backward_weight(params, weight_residuals)) == expected


# Steps.


def result_bits(result: fpipe.Result) -> dict[str, Any]:
    return {
        name + path: bits(leaf)
        for name in ("loss", "grads", "outputs")
        for path, leaf in tree.paths(getattr(result, name))
    }


@contextmanager
def record_traces() -> Iterator[list[str]]:
    """Yield a list of the traces that are made inside this context. Warnings are errors, so a missing trace is one."""
    module: Any = trace_cache
    originals, traces = (module.trace, module.outline), []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (traces.append(name), function(*args))[1]

    module.trace, module.outline = counted("trace", module.trace), counted("outline", module.outline)
    try:
        yield traces
    finally:
        module.trace, module.outline = originals


@max_examples(2)
@given(runs(stacks(3)), st.booleans())
def test_a_step_has_reference_bits_and_predicted_peaks_and_leaks_nothing(run: Run, hoist: bool):
    """With traces and without, hoisted or not. After tracing, only the results of a step stay alive. The gradients of
    two steps are twice those of one; with torch 2.13's scale_grads they are 1.25 to 1.5 times those of one."""
    random, (params, batch) = torch.get_rng_state(), run.inputs
    model, program = run.net.model, run.program
    expected = result_bits(fpipe.reference(model, params, batch, microbatches=run.microbatches))
    step = fpipe.build(program, model, hoist=hoist)
    assert result_bits(step(params, batch)) == expected
    with Newborn() as newborn:
        result = step(params, batch)
    results = [leaf for part in (result.loss, result.grads, result.outputs) for leaf in tensors(part)]
    assert newborn.alive == storages(results).keys()
    assert len(storages(results, tensors((params, batch)))) == len(results)
    assert result_bits(result) == expected
    assert result_bits(fpipe.build(program, model, trace=False)(params, batch)) == expected
    sizes = fpipe.sizes(program, model, params, batch, hoist=hoist)
    assert sizes.peak == fpipe.build(program, model, record=True, hoist=hoist)(params, batch).timeline.peak
    assert sizes.peak == fpipe.simulate(program, fpipe.Costs(bytes=sizes)).peak
    assert bits((params, batch)) == bits(run.inputs)
    assert torch.equal(torch.get_rng_state(), random)
    twice = fpipe.add_grads(result.grads, result.grads)
    pairs = zip(tensors(twice), tensors(result.grads), strict=True)
    assert all(torch.equal(doubled, 2 * single) for doubled, single in pairs if not doubled.isnan().any())


@max_examples(2)
@given(runs(stacks(2)))
def test_a_stage_is_traced_once_for_each_size(run: Run):
    model = model_of(run.net, [stage.fresh() for stage in run.net.stages])
    params, batch = run.inputs
    step = fpipe.build(run.program, model)
    with record_traces() as first_traces:
        expected = result_bits(step(params, batch))
    assert first_traces
    with record_traces() as second_traces:
        assert result_bits(step(params, batch)) == expected
        assert result_bits(fpipe.build(run.program, model)(params, batch)) == expected
    assert not second_traces
    with record_traces() as traces_of_more_rows:
        step(params, run.net.batch(run.rows + 4 * run.microbatches, run.seed))
    assert traces_of_more_rows
