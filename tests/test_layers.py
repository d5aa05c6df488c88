"""Every kind of layer and pattern in `tests.layers` against plain autograd: bits, work, memory, and a whole step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe import tree
from fpipe.graphs.purity.ambient import raw_ops
from property_tests.bits import bits, tensors
from tests.layers import CASES, Case, Made

PAGE = Path(__file__).parents[1] / "docs" / "linearize.md"
BY_NAME = {case.name: case for case in CASES}
TRACED = [case.name for case in CASES if not case.untraced]
UNTRACED = [case.name for case in CASES if case.untraced]
SMALL = {torch.bfloat16: 2e-2, torch.float16: 2e-3}

each = pytest.mark.parametrize("name", TRACED, scope="module")  # all tests of a case in a row, on one worker
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


def wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def own(value: Any) -> Any:
    """The same leaves, as those of a graph to come."""
    return tree.tree_map(lambda leaf: leaf.detach().requires_grad_() if wants(leaf) else leaf, value)


def flops(what: Any) -> tuple[Any, int]:
    with FlopCounterMode(display=False) as counter:
        made = what()
    return made, counter.get_total_flops()


@dataclass
class Autograd:
    """What plain autograd makes of a case."""

    y: Any
    dy: Any
    dx: list[Any]
    dparams: list[Any]
    flops: int
    saved: list[Tensor]
    given: list[Tensor]


@dataclass
class Tried:
    """What the four functions make of a case."""

    made: Made
    one: fpipe.Linearized
    y: Any
    dx: Any
    dparams: Any
    dx_alone: Any
    dparams_alone: Any
    residuals: list[Tensor]
    flops: dict[str, int]


@cache
def autograd(name: str) -> Autograd:
    made = BY_NAME[name].make()
    x, saved = own(made.x), []
    params: Any = own(made.params)
    if made.module is not None:  # the module itself, with its own parameters
        params = {key: leaf for key, leaf in made.module.named_parameters() if leaf.requires_grad}

    def forward() -> Any:
        if made.module is None:
            return made.function(params, x)
        return made.module(*x) if isinstance(x, tuple) else made.module(x)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = forward()
    torch.manual_seed(1)
    grads = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree.leaves(y)]
    seeds = [torch.randn_like(leaf) if has else None for leaf, has in zip(tree.leaves(y), grads, strict=True)]
    wanted = [leaf for leaf in tree.leaves((x, params)) if wants(leaf)]
    cotangents = [seed for seed in seeds if seed is not None]

    def backward(y: Any) -> Any:
        roots = [leaf for leaf, has in zip(tree.leaves(y), grads, strict=True) if has]
        return torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)

    found = backward(y)
    # Counted apart: torch computes some gradients in another way while a mode of dispatch is on.
    again, forth = flops(forward)
    _, back = flops(lambda: backward(again))
    of = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}
    dx, dparams = ([of.get(id(leaf)) for leaf in tree.leaves(value)] for value in (x, params))
    dy = tree.unflatten(tree.flatten(y)[1], seeds)
    return Autograd(y, dy, dx, dparams, forth + back, saved, [*tensors((x, params)), *tensors(made.params)])


@cache
def tried(name: str) -> Tried:
    made = BY_NAME[name].make()
    dy = autograd(name).dy
    one = fpipe.linearize(made.function, made.params, made.x)

    def forward() -> Any:
        return one.forward(made.params, made.x)

    y, res = forward()
    dx, dparams = one.backward(made.params, [*res], dy)
    dx_alone, wres = one.backward_input(made.params, [*res], dy)
    dparams_alone = one.backward_weight(made.params, [*wres])
    counts = {
        "F": flops(forward)[1],
        "B": flops(lambda: one.backward(made.params, [*res], dy))[1],
        "I": flops(lambda: one.backward_input(made.params, [*res], dy))[1],
        "W": flops(lambda: one.backward_weight(made.params, wres))[1],
    }
    return Tried(made, one, y, dx, dparams, dx_alone, dparams_alone, res, counts)


def test_there_are_enough_of_them():
    assert len(BY_NAME) == len(CASES) >= 45


# What linearize makes.


@each
def test_the_output_is_that_of_plain_autograd(name):
    assert tree.flatten(tried(name).y)[1] == tree.flatten(autograd(name).y)[1]
    agree(name, tried(name).y, autograd(name).y)


@each
def test_backward_gives_the_gradients_of_plain_autograd(name):
    agree(name, tree.leaves((tried(name).dx, tried(name).dparams)), [*autograd(name).dx, *autograd(name).dparams])


@each
def test_the_halves_of_the_backward_give_its_bits(name):
    mine = tried(name)
    assert bits((mine.dx_alone, mine.dparams_alone)) == bits((mine.dx, mine.dparams))


def agree(name: str, mine: Any, theirs: Any) -> None:
    if not BY_NAME[name].rounding:
        assert bits(mine) == bits(theirs)
        return
    for one, other in zip(tensors(mine), tensors(theirs), strict=True):
        tolerance = SMALL.get(one.dtype, 1e-5)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@each
def test_nothing_that_was_given_is_changed(name):
    made = tried(name).made
    assert bits((made.params, made.x)) == bits((lambda again: (again.params, again.x))(BY_NAME[name].make()))


@each
def test_forward_and_backward_compute_no_more_than_autograd(name):
    assert tried(name).flops["F"] + tried(name).flops["B"] == autograd(name).flops


@each
def test_the_halves_of_the_backward_compute_nothing_twice(name):
    counts = tried(name).flops
    assert counts["I"] + counts["W"] == counts["B"]


@each
def test_after_i_no_parameter_has_a_gradient(name):
    cut = tried(name).one.traced
    written = {node.name: node for node in cut.graph.nodes}
    early = [written[name] for name in cut.early]
    ops = {written[node.args[0]].op if node.op is getitem else node.op for node in early}
    whole = BY_NAME[name].whole
    assert {op.__name__.removesuffix(".default") for op in ops} == ({whole} if whole else set())


@each
def test_residuals_hold_no_more_than_autograd_saves(name):
    mine = sum(storages(tried(name).residuals, tensors((tried(name).made.params, tried(name).made.x))).values())
    theirs = sum(storages(autograd(name).saved, autograd(name).given).values())
    if BY_NAME[name].more:
        assert theirs < mine
    else:
        assert mine <= theirs


def storages(held: Iterable[Tensor], aside: Sequence[Tensor]) -> dict[int, int]:
    """Bytes of each storage, those that belong to what was given aside."""
    known = {tensor.untyped_storage().data_ptr() for tensor in aside}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return {place: size for place, size in found.items() if place not in known}


@each
@pytest.mark.parametrize(("function", "label"), [("backward", "res"), ("backward_weight", "wres")])
def test_what_is_kept_are_tensors_that_are_read(name, function, label):
    graph = tried(name).one.graphs[function]
    read = {leaf for node in graph.nodes for leaf in node.reads} | {leaf for ls in graph.writes.values() for leaf in ls}
    assert {*graph.reads[label]} <= read & {*graph.facts}


@each
def test_every_tensor_lies_in_memory_as_the_trace_says(name):
    graph, made = tried(name).one.traced.graph, tried(name).made
    given = {"params": made.params, "x": made.x, "dy": autograd(name).dy}
    values: dict[Any, Any] = dict(graph.constants)
    for label, value in given.items():
        values |= dict(zip(graph.reads[label], tree.leaves(value), strict=True))

    def filled(arg: Any) -> Any:
        return type(arg)(map(filled, arg)) if isinstance(arg, list | tuple) else values.get(arg, arg)

    told: dict[str, Any] = {}
    with raw_ops():
        for node in graph.nodes:
            op = torch.enable_grad()(node.op) if "rnn" in str(node.op) else node.op
            values[node.name] = op(*filled(node.args), **{key: filled(arg) for key, arg in node.kwargs.items()})
            told[node.name] = values[node.name], graph.facts.get(node.name)
    for node, (value, fact) in told.items():
        if fact is not None and isinstance(value, Tensor) and value.shape == fact.aval.shape:  # not an RNN's workspace
            taken = [dim for dim, n in enumerate(value.shape) if n > 1 and value.numel()]
            assert [value.stride(dim) for dim in taken] == [fact.aval.stride[dim] for dim in taken], node


@pytest.mark.parametrize("name", UNTRACED)
def test_linearize_refuses_what_cannot_be_traced(name):
    made = BY_NAME[name].make()
    before = bits((made.params, made.x))
    with pytest.raises(ValueError, match=re.escape(BY_NAME[name].untraced)):
        fpipe.linearize(made.function, made.params, made.x)
    assert bits((made.params, made.x)) == before


# A step of two stages, the second of which is the case.


class Before(nn.Module):
    """A stage with something to learn in front of any other."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Any) -> Any:
        return before({"w": self.w}, x)


class Spread(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: tuple[Any, ...]) -> Any:
        return self.inner(*x)


def before(p: Any, x: Any) -> Any:
    return tree.tree_map(lambda leaf: (leaf * p["w"]).to(leaf.dtype) if wants(leaf) else leaf, x)


def loss(y: Any, target: Tensor) -> Tensor:
    """Something of every tensor of an output."""
    total = target.sum() * 0
    for leaf in tensors(y):
        real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        total = total + real.float().sin().mean()
    return total


def half(k: int, leaf: Any) -> Any:
    return leaf.tensor_split(2)[k] if isinstance(leaf, Tensor) else leaf


@dataclass
class Trained:
    """A case as a model, and a batch of four rows for it."""

    made: Made
    model: fpipe.Model
    params: tuple[Any, ...]
    batch: tuple[Any, Tensor]
    net: nn.Module | None = None

    def step(self) -> fpipe.Result:
        program = fpipe.chain(
            fpipe.split(2), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False)
        )(fpipe.program(self.model))
        return fpipe.build(program, self.model)(self.params, self.batch)

    def plain(self) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients, one microbatch after the other."""
        total, sums = torch.tensor(0.0), []
        for k in range(2):
            x, target = tree.tree_map(partial(half, k), self.batch)
            if self.net is not None:
                wanted = [leaf for leaf in self.net.parameters() if leaf.requires_grad]
                y = self.net(x)
            else:
                first, second = own(self.params)
                wanted = [leaf for leaf in tree.leaves((first, second)) if wants(leaf)]
                y = self.made.function(second, before(first, x))
            share = loss(y, target) * 0.5
            found = torch.autograd.grad(share, wanted, allow_unused=True)
            found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, wanted, strict=True)]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if k else found
            total = total + share.detach() if k else share.detach()
        return total, sums


def trained(case: Case) -> Trained:
    made = case.make()
    batch = (made.x, torch.randn(4))
    if made.module is None:
        params = ({"w": torch.tensor(1.25)}, made.params)
        return Trained(made, fpipe.from_functions([before, made.function], loss=loss), params, batch)
    net = nn.Sequential(Before(), Spread(made.module) if isinstance(made.x, tuple) else made.module)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 1], loss=loss)
    return Trained(made, model, params, batch, net)


def same_step(name: str, one: Trained, result: fpipe.Result) -> None:
    total, sums = one.plain()
    pairs = zip(tree.leaves(result.grads), tree.leaves(one.params), strict=True)
    agree(name, [result.loss, *(g for g, leaf in pairs if wants(leaf))], [total, *sums])


@pytest.mark.parametrize("name", [name for name in TRACED if BY_NAME[name].step])
def test_a_step_is_traced_and_gives_what_plain_autograd_gives(name):
    one = trained(BY_NAME[name])
    before = bits((one.params, one.batch))
    same_step(name, one, one.step())  # a warning is an error here
    assert bits((one.params, one.batch)) == before


@pytest.mark.parametrize("name", [name for name in UNTRACED if not BY_NAME[name].refused])
def test_a_step_that_cannot_be_traced_says_so_and_gives_what_plain_autograd_gives(name):
    one = trained(BY_NAME[name])
    with pytest.warns(UserWarning, match=f"under autograd, without a trace.*: {re.escape(BY_NAME[name].untraced)}"):
        result = one.step()
    same_step(name, one, result)


@pytest.mark.parametrize("name", [name for name in UNTRACED if BY_NAME[name].refused])
def test_a_step_refuses(name):
    made = BY_NAME[name].make()
    before = bits(made.x)
    with pytest.raises((ValueError, RuntimeError), match=re.escape(BY_NAME[name].refused)):
        trained(Case(name, lambda: made)).step()
    assert bits(made.x) == before


# A stage that changes its own input would change the batch, or what another stage handed on.


# Where a trace and the run of it could differ.


def mixed(p, x):
    return torch.softmax(torch.tanh(x @ p["w"]) @ p["w"], -1)


def autocast(enabled: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("run", [True, False])
def test_autocast_is_that_of_the_trace_and_not_that_of_the_run(traced, run):
    params, x, dy = {"w": torch.randn(8, 8)}, torch.randn(4, 8), torch.randn(4, 8)
    leaf, again = params["w"].clone().requires_grad_(), x.clone().requires_grad_()
    with autocast(traced):
        y = mixed({"w": leaf}, again)
        one = fpipe.linearize(mixed, params, x)
        expected = torch.autograd.grad(y, [again, leaf], dy.to(y.dtype))
    with autocast(run):
        mine, res = one.forward(params, x)
        dx, dparams = one.backward(params, res, dy.to(mine.dtype))
    assert bits((mine, dx, dparams["w"])) == bits((y, *expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("ambient", [True, False])
def test_the_input_of_a_stage_is_cast_for_each_of_its_uses_as_in_the_model_that_is_not_cut(ambient, trace):
    """Autocast casts a leaf once and keeps it, so the gradients of its uses were added up in bfloat16: a stage's input
    was a leaf, where the model that is not cut has an activation. The loss's input is none either."""

    def before(p, x):
        return torch.tanh(x * p["w"])

    def queries_and_keys(p, x):
        with autocast(True):
            return (x @ p["w"]).float() + torch.sin(x @ p["v"])

    def twice(y, target):
        with autocast(True):
            return (y @ y.t() + (y @ target).sin()).float().square().mean()

    torch.manual_seed(0)
    params = {"w": torch.randn(8)}, {"w": torch.randn(8, 8), "v": torch.randn(8, 8)}
    batch = torch.randn(6, 8), torch.randn(6, 8)
    model = fpipe.from_functions([before, queries_and_keys], loss=lambda y, t: twice(y, t.t()))
    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in each.items()} for each in params]
    flat = [leaf for each in leaves for leaf in each.values()]
    summed = None
    with autocast(ambient):
        for x, t in zip(*(half.tensor_split(2) for half in batch), strict=True):
            loss = twice(queries_and_keys(leaves[1], before(leaves[0], x)), t.t()) * 0.5
            grads = torch.autograd.grad(loss, flat)
            summed = grads if summed is None else [a + b for a, b in zip(summed, grads, strict=True)]
        for halves in ([], [fpipe.split_backward()], [fpipe.checkpoint(), fpipe.split_backward()]):
            program = fpipe.chain(fpipe.split(2), *halves, fpipe.schedules.one_f_one_b(2), fpipe.merge())
            found = fpipe.build(program(fpipe.program(model)), model, trace=trace)(params, batch)
            for one, other in zip(summed, [g for each in found.grads for g in each.values()], strict=True):
                assert torch.equal(one, other)


def test_a_compiled_function_is_never_handed_tensors_without_data():
    # A kernel made by torch.compile reads memory, which such tensors do not have: the process ends with SIGSEGV.
    handed = []

    def backend(graph, examples):
        def kernel(*args):
            handed.extend(type(arg) for arg in args)
            return graph(*args)

        return kernel

    function = torch.compile(lambda a: torch.cos(a) * 2, backend=backend)
    with pytest.raises(ValueError, match="cannot be written down as torch ops"):
        fpipe.linearize(lambda p, x: function(x @ p["w"]), {"w": torch.randn(8, 8)}, torch.randn(4, 8))
    assert {*handed} <= {Tensor}


# The page.


def test_the_page_shows_every_kind_and_its_verdict():
    table = re.search(r"^\| what \| result \|\n\|---\|---\|\n(?P<rows>(?:\|.*\|\n)*)", PAGE.read_text("utf-8"), re.M)
    assert table is not None, "docs/linearize.md has no table"
    shown = [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in table["rows"].splitlines()]
    assert shown == [(case.name, case.verdict) for case in CASES]
