"""The laws of a traced stage, and of steps made of them, over random stages: bits, work, memory, and what is left."""

from __future__ import annotations

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
from property_tests.lawful import assert_lawful, own, plain, storages
from property_tests.stages import DrawnStage, in_place, recipes, stacks, unread
from property_tests.strategies import few

SEED = st.integers(0, 2**16)
ROWS = st.integers(1, 5)


class Newborn(TorchDispatchMode):
    """Weak references to the memory that is made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.seen |= storages(tensors(made), tensors([args, kwargs])).keys()
        return made

    @property
    def alive(self) -> set[StorageWeakRef]:
        return {storage for storage in self.seen if not storage.expired()}


# One stage.


@few(10)
@given(recipes(), ROWS, SEED)
def test_the_four_functions_are_plain_autograds(recipe: DrawnStage, rows: int, seed: int):
    """In their bits, and without more work or memory. autograd runs layers that nobody reads, and recomputes what its
    backward does not need. An op in place is a new tensor in a trace: what it changed may be kept beside what came of
    it."""

    def given() -> tuple[Any, Any]:
        return recipe.params(seed), recipe.input(rows, seed)

    right = plain(recipe, *map(own, given()), seed)
    assert_lawful(recipe.function, given, right, less_work=unread(recipe), more_memory=in_place(recipe))


NUMBERS = st.one_of(
    st.floats(allow_nan=False), st.just(float("nan")), st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9)
)
ARITHMETIC = st.sampled_from([operator.add, operator.sub, operator.mul, operator.truediv])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@few(12)
@given(ARITHMETIC, NUMBERS, DTYPES, st.sampled_from([(), (3,), (2, 3)]), SEED)
def test_numbers_in_a_stage_have_the_bits_that_torch_gives_them(
    op: Callable[[Any, Any], Tensor], number: float, dtype: torch.dtype, shape: tuple[int, ...], seed: int
):
    """Numbers are made into tensors beforehand: rounded no sooner, and to no other dtype, than torch would."""

    def stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return op(op(x, number) * params["w"], number)

    make = torch.Generator().manual_seed(seed)
    w, x, dy = (torch.randn(shape, generator=make).to(dtype) for _ in range(3))
    wanted = [leaf.clone().requires_grad_() for leaf in (x, w)]
    y = stage({"w": wanted[1]}, wanted[0])
    one = fpipe.linearize(stage, {"w": w}, x)
    own, res = one.forward({"w": w}, x)
    assert bits(own) == bits(y)
    dx, dparams = one.backward({"w": w}, res, dy)
    assert bits([dx, dparams["w"]]) == bits(torch.autograd.grad(y, wanted, dy))


@few(7)
@given(recipes(), ROWS, SEED)
def test_after_i_only_what_w_reads_is_alive(recipe: DrawnStage, rows: int, seed: int):
    params, x = recipe.params(seed), recipe.input(rows, seed)
    dy = plain(recipe, own(params), own(x), seed).dy
    one = fpipe.linearize(recipe.function, params, x)
    whole = bits(one.backward(params, one.forward(params, x)[1], dy)[1])
    assert all(one.graphs.values())  # written down before anybody counts
    one.backward_weight(params, one.backward_input(params, one.forward(params, x)[1], dy)[1])
    with Newborn() as newborn:
        y, res = one.forward(params, x)
        dx, wres = one.backward_input(params, res, dy)
        del y, res, dx
        assert newborn.alive <= storages(wres).keys()
    del x, dy
    assert bits(one.backward_weight(params, wres)) == whole


# Steps.


def of(result: fpipe.Result) -> dict[str, Any]:
    """The bits of a result, by name."""
    return {
        name + path: bits(leaf)
        for name in ("loss", "grads", "outputs")
        for path, leaf in tree.paths(getattr(result, name))
    }


@contextmanager
def traced() -> Iterator[list[str]]:
    """What is traced in the meantime. A warning, such as that of a step without a trace, is an error here."""
    module: Any = trace_cache
    before, made = (module.trace, module.outline), []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (made.append(name), function(*args))[1]

    module.trace, module.outline = counted("trace", module.trace), counted("outline", module.outline)
    try:
        yield made
    finally:
        module.trace, module.outline = before


@few(4)
@given(runs(stacks(3)))
def test_a_step_has_the_bits_of_the_reference_holds_what_sizes_told_and_leaves_nothing(run: Run):
    """With traces and without; once it has traced, what it makes is gone but for its results. Two steps are twice one:
    torch 2.13's scale_grads gives 1.25 to 1.5 of one."""
    random, (params, batch) = torch.get_rng_state(), run.given
    model, program = run.net.model, run.program
    expected = of(fpipe.reference(model, params, batch, microbatches=run.microbatches))
    step = fpipe.build(program, model)
    assert of(step(params, batch)) == expected
    with Newborn() as newborn:
        result = step(params, batch)
    results = [leaf for part in (result.loss, result.grads, result.outputs) for leaf in tensors(part)]
    assert newborn.alive == storages(results).keys()
    assert len(storages(results, tensors((params, batch)))) == len(results)
    assert of(result) == expected
    assert of(fpipe.build(program, model, trace=False)(params, batch)) == expected
    found = fpipe.sizes(program, model, params, batch)
    assert found.peak == fpipe.build(program, model, record=True)(params, batch).timeline.peak
    assert found.peak == fpipe.simulate(program, fpipe.Costs(bytes=found)).peak
    assert bits((params, batch)) == bits(run.given)
    assert torch.equal(torch.get_rng_state(), random)
    twice = fpipe.add_grads(result.grads, result.grads)
    pairs = zip(tensors(twice), tensors(result.grads), strict=True)
    assert all(torch.equal(both, 2 * once) for both, once in pairs if not both.isnan().any())


@few(4)
@given(runs(stacks(2)))
def test_what_was_traced_once_is_traced_no_more(run: Run):
    model = model_of(run.net, [stage.fresh() for stage in run.net.stages])
    params, batch = run.given
    step = fpipe.build(run.program, model)
    with traced() as first:
        one = of(step(params, batch))
    assert first
    with traced() as again:
        assert of(step(params, batch)) == one
        assert of(fpipe.build(run.program, model)(params, batch)) == one
    assert not again
    with traced() as other:
        step(params, run.net.batch(run.rows + 4 * run.microbatches, run.seed))
    assert other
