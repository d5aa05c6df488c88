"""The laws of a traced stage, and of steps made of them, over random stages: bits, work, memory, and what is left."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe import tree
from fpipe.graphs.tracing import trace_cache
from fpipe.program import Program
from property_tests.bits import bits, tensors
from property_tests.chains import Chain, chains
from property_tests.stages import Recipe, Stack, recipes, stacks
from property_tests.strategies import few

SEED = st.integers(0, 2**16)
ROWS = st.integers(1, 5)


def wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def storages(held: Iterable[Tensor], aside: Iterable[Tensor] = ()) -> dict[StorageWeakRef, int]:
    """Bytes of each storage, those of what was given aside."""
    known = {StorageWeakRef(tensor.untyped_storage()) for tensor in aside}
    found = {StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in held}
    return {storage: size for storage, size in found.items() if storage not in known}


def flops(what: Callable[[], Any]) -> tuple[Any, int]:
    """What it gives, and its flops. FlopCounterMode takes silu_backward apart: these bits are nobody's."""
    with FlopCounterMode(display=False) as counter:
        made = what()
    return made, counter.get_total_flops()


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


@dataclass
class Autograd:
    """A stage under plain autograd: what it gives, flops, and the bytes that are saved between."""

    y: Any
    dy: Any
    dx: list[Any]
    dparams: list[Any]
    flops: int
    saved: int


def autograd(recipe: Recipe, rows: int, seed: int, count: Callable[..., Any] = lambda what: (what(), 0)) -> Autograd:
    """With `count=flops` the flops are told."""

    def own(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if wants(leaf) else leaf

    params, x = tree.tree_map(own, recipe.params(seed)), tree.tree_map(own, recipe.input(rows, seed))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y, forth = count(lambda: recipe(params, x))
    leaves, make = tree.leaves(y), torch.Generator().manual_seed(seed)
    has = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    seeds = [_like(leaf, make) if one else None for leaf, one in zip(leaves, has, strict=True)]
    roots, cotangents = ([leaf for leaf, one in zip(found, has, strict=True) if one] for found in (leaves, seeds))
    wanted = [leaf for leaf in tree.leaves((x, params)) if wants(leaf)]
    found: Any = [None] * len(wanted)
    back = 0
    if roots:
        found, back = count(lambda: torch.autograd.grad(roots, wanted, cotangents, allow_unused=True))
    each = iter(found)
    dx, dparams = ([next(each) if wants(leaf) else None for leaf in tree.leaves(value)] for value in (x, params))
    size = sum(storages(saved, tensors((x, params))).values())
    return Autograd(y, tree.unflatten(tree.flatten(y)[1], seeds), dx, dparams, forth + back, size)


def _like(leaf: Tensor, make: torch.Generator) -> Tensor:
    """A cotangent, which lies in memory as what it is for, if that has each number once."""
    return torch.empty_like(leaf).copy_(torch.randn(leaf.shape, generator=make))


@few(7)
@given(recipes(), ROWS, SEED)
def test_the_four_functions_give_plain_autograds_bits(recipe: Recipe, rows: int, seed: int):
    params, x = recipe.params(seed), recipe.input(rows, seed)
    plain, one = autograd(recipe, rows, seed), fpipe.linearize(recipe.function, params, x)
    y, res = one.forward(params, x)
    assert tree.flatten(y)[1] == tree.flatten(plain.y)[1]
    assert bits(y) == bits(plain.y)
    dx, dparams = one.backward(params, [*res], plain.dy)
    assert bits((dx, dparams)) == bits([plain.dx, plain.dparams])
    halves_dx, wres = one.backward_input(params, [*res], plain.dy)
    halves = halves_dx, one.backward_weight(params, wres)
    assert bits(halves) == bits((dx, dparams))
    assert bits((params, x)) == bits((recipe.params(seed), recipe.input(rows, seed)))
    assert bits(plain.dy) == bits(autograd(recipe, rows, seed).dy)


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
def test_nothing_is_computed_twice(recipe: Recipe, rows: int, seed: int):
    params, x = recipe.params(seed), recipe.input(rows, seed)
    plain, one = autograd(recipe, rows, seed, flops), fpipe.linearize(recipe.function, params, x)
    (_, res), forward = flops(lambda: one.forward(params, x))
    _, backward = flops(lambda: one.backward(params, [*res], plain.dy))
    (_, wres), first = flops(lambda: one.backward_input(params, [*res], plain.dy))
    _, then = flops(lambda: one.backward_weight(params, wres))
    assert first + then == backward
    # autograd runs layers that nobody reads, and recomputes what its backward does not need; a trace does not
    if recipe.recomputes or recipe.returns in ("params_alone", "input_alone"):
        assert forward + backward <= plain.flops
    else:
        assert forward + backward == plain.flops


@few(7)
@given(recipes(), ROWS, SEED)
def test_residuals_hold_no_more_than_autograd_saves(recipe: Recipe, rows: int, seed: int):
    """An op in place is a new tensor in a trace, so that what it changed may be kept beside what came of it."""
    params, x = recipe.params(seed), recipe.input(rows, seed)
    one = fpipe.linearize(recipe.function, params, x)
    _, res = one.forward(params, x)
    for function, label in (("backward", "res"), ("backward_weight", "wres")):
        graph = one.graphs[function]
        read = {leaf for node in graph.nodes for leaf in node.reads}
        read |= {leaf for leaves in graph.writes.values() for leaf in leaves}
        assert {*graph.reads[label]} <= read & {*graph.facts}, label
    if not recipe.in_place:
        assert sum(storages(res, tensors((params, x))).values()) <= autograd(recipe, rows, seed).saved


@few(7)
@given(recipes(), ROWS, SEED)
def test_after_i_only_what_w_reads_is_alive(recipe: Recipe, rows: int, seed: int):
    params, x, dy = recipe.params(seed), recipe.input(rows, seed), autograd(recipe, rows, seed).dy
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


@dataclass(frozen=True)
class Run:
    """A model, a batch of `rows` in `microbatches`, and the chain of transforms that makes the program."""

    stack: Stack
    microbatches: int
    rows: int
    chain: Chain
    seed: int

    @property
    def program(self) -> Program:
        return self.chain(fpipe.split(self.microbatches)(fpipe.program(self.stack.model())))

    @property
    def given(self) -> tuple[Any, Any]:
        return self.stack.params(self.seed), self.stack.batch(self.rows, self.seed)

    def step(self, **options: Any) -> Callable[..., fpipe.Result]:
        return fpipe.build(self.program, self.stack.model(), **options)


@st.composite
def runs(draw: st.DrawFn, most: int = 3) -> Run:
    stack = draw(stacks(most))
    m = draw(st.integers(1, 3))
    rows = m * draw(st.integers(1, 2)) + draw(st.integers(0, m - 1))
    named = st.sampled_from(["one_f_one_b", "gpipe"]).map(lambda name: (name, min(2, len(stack.stages))))
    return Run(stack, m, rows, draw(chains(fpipe.split(m)(fpipe.program(stack.model())), named)), draw(SEED))


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


@pytest.mark.slow
@few(6)
@given(runs())
def test_a_step_gives_the_bits_of_the_reference_with_traces_and_without(run: Run):
    params, batch = run.given
    expected = of(fpipe.reference(run.stack.model(), params, batch, microbatches=run.microbatches))
    step = run.step()
    assert of(step(params, batch)) == expected
    assert of(step(params, batch)) == expected
    assert of(run.step(trace=False)(params, batch)) == expected
    assert bits((params, batch)) == bits(run.given)


@few(4)
@given(runs(most=2))
def test_what_was_traced_once_is_traced_no_more(run: Run):
    model = run.stack.model(fresh=True)
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
        step(params, run.stack.batch(run.rows + 4 * run.microbatches, run.seed))
    assert other


@few(6)
@given(runs())
def test_sizes_are_those_of_the_run(run: Run):
    params, batch = run.given
    found = fpipe.sizes(run.program, run.stack.model(), params, batch)
    assert found.peak == run.step(record=True)(params, batch).timeline.peak
    assert found.peak == fpipe.simulate(run.program, fpipe.Costs(bytes=found)).peak


@few(5)
@given(runs())
def test_nothing_outlives_a_step_but_its_results(run: Run):
    params, batch = run.given
    step = run.step()
    step(params, batch)
    with Newborn() as newborn:
        result = step(params, batch)
    results = [leaf for part in (result.loss, result.grads, result.outputs) for leaf in tensors(part)]
    assert newborn.alive == storages(results).keys()
    assert len(storages(results, tensors((params, batch)))) == len(results)
