"""Every kind of layer and pattern in `tests.layers` against plain autograd: bits, work, memory, and a whole step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import tree
from property_tests import stage_functions
from property_tests.bits import bits, tensors
from property_tests.lawful import assert_lawful, own, plain, wants
from property_tests.stage_functions import Within
from property_tests.stages import ACTIVATIONS, DTYPES, GIVEN, HELD, LAYERS, RETURNS, DrawnStage, in_place, unread
from tests.layers import CASES, Case, Made
from tests.toys import Toy

PAGE = Path(__file__).parents[1] / "docs" / "linearize.md"
BY_NAME = {case.name: case for case in CASES}
TRACED = [case.name for case in CASES if not case.untraced]
UNTRACED = [case.name for case in CASES if case.untraced]
SMALL = {torch.bfloat16: 2e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


def test_there_are_enough_of_them():
    assert len(BY_NAME) == len(CASES) >= 45


@pytest.mark.parametrize("name", TRACED)
def test_its_four_functions_are_plain_autograds(name: str):
    """Of a module plain autograd is the module itself, with its own parameters."""
    case = BY_NAME[name]
    made = case.make()

    def given() -> tuple[Any, Any]:
        again = case.make()
        return again.params, again.x

    if made.module is None:
        right = plain(made.function, own(made.params), own(made.x))
    else:
        trained = {key: leaf for key, leaf in made.module.named_parameters() if leaf.requires_grad}
        call: Any = made.module
        right = plain(lambda p, x: call(*x) if isinstance(x, tuple) else call(x), trained, own(made.x))
    one = assert_lawful(made.function, given, right, partial(agree, case), more_memory=bool(case.more))
    cut = one.traced
    written = {node.name: node for node in cut.graph.nodes}
    early = [written[name] for name in cut.gradients_made_by_input]
    ops = {written[node.args[0]].op if node.op is getitem else node.op for node in early}
    whole = {op.__name__.removesuffix(".default") for op in ops}
    assert whole == ({case.whole} if case.whole else set()), "after I no parameter has a gradient"


AROUND = {
    **{f"returns {name}": DrawnStage(("linear", "tanh"), returns=name) for name in RETURNS if name != "h"},
    **{f"given {name}": DrawnStage(("of_its_own", "linear"), given=name, takes="all") for name in GIVEN[1:]},
    **{f"parameters {name}": DrawnStage(("twice", "bias"), held=name) for name in HELD[1:]},
    **{name: DrawnStage(("linear", "gelu", "layer_norm"), dtype=name) for name in DTYPES[1:]},
    "given two, takes one": DrawnStage(("linear",), given="two"),
    **{how: DrawnStage((Within(how, ("linear", "twice", "tanh")),)) for how in stage_functions.AROUND},
}
IN_PLACE = [name for name in LAYERS if LAYERS[name].in_place]
OTHERS = [name for name in LAYERS if name not in (*ACTIVATIONS, *IN_PLACE)]


def in_turn(names: Sequence[str], each: int, *last: str) -> list[tuple[str, ...]]:
    """So many words of the grammar in a stage, each after a Linear where they have no parameters."""
    before = ("linear",) if last else ()
    return [
        (*itertools.chain(*((*before, name) for name in names[at : at + each])), *last)
        for at in range(0, len(names), each)
    ]


@pytest.mark.parametrize(
    "layers", [*in_turn(ACTIVATIONS, 5, "linear"), *in_turn(OTHERS, 4), *in_turn(IN_PLACE, 1)], ids="-".join
)
def test_words_of_the_grammar_are_plain_autograd(layers: tuple[str, ...]):
    """Each once; `property_tests/test_linearize_laws.py` draws them in any order and inside each other."""
    recipe = DrawnStage(layers)

    def given() -> tuple[Any, Any]:
        return recipe.params(), recipe.input(4)

    right = plain(recipe, *map(own, given()))
    assert_lawful(recipe.function, given, right, less_work=unread(recipe), more_memory=in_place(recipe))


def agree(case: Case, mine: Any, theirs: Any) -> None:
    if not case.rounding:
        assert bits(mine) == bits(theirs)
        return
    for one, other in zip(tensors(mine), tensors(theirs), strict=True):
        tolerance = SMALL.get(one.dtype, 1e-5)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", UNTRACED)
def test_linearize_refuses_what_cannot_be_traced(name):
    made = BY_NAME[name].make()
    before = bits((made.params, made.x))
    with pytest.raises(ValueError, match=re.escape(BY_NAME[name].untraced)):
        fpipe.linearize(made.function, made.params, made.x)
    assert bits((made.params, made.x)) == before


# A step of two stages, the second of which is the case.


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
            sums = (
                [b if a is None else a if b is None else a + b for a, b in zip(sums, found, strict=True)]
                if k
                else found
            )
            total = total + share.detach() if k else share.detach()
        return total, sums


def trained(case: Case) -> Trained:
    made = case.make()
    batch = (made.x, torch.randn(4))
    if made.module is None:
        params = ({"w": torch.tensor(1.25)}, made.params)
        return Trained(made, fpipe.from_functions([before, made.function], loss=loss), params, batch)
    first = Toy(lambda own, x: before({"w": own.w}, x), w=nn.Parameter(torch.tensor(1.25)))
    spread = Toy(lambda own, x: own.inner(*x), inner=made.module)
    net = nn.Sequential(first, spread if isinstance(made.x, tuple) else made.module)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 1], loss=loss)
    return Trained(made, model, params, batch, net)


def same_step(case: Case, one: Trained, result: fpipe.Result) -> None:
    total, sums = one.plain()
    pairs = zip(tree.leaves(result.grads), tree.leaves(one.params), strict=True)
    agree(case, [result.loss, *(g for g, leaf in pairs if wants(leaf))], [total, *sums])


def of_grammar(recipe: DrawnStage) -> Case:
    return Case("", lambda: Made(recipe.function, recipe.params(), recipe.input(4)))


STEPS = [case for case in CASES if case.step and not case.untraced]


@pytest.mark.parametrize(
    "case", [*STEPS, *map(of_grammar, AROUND.values())], ids=[*(case.name for case in STEPS), *AROUND]
)
def test_a_step_is_traced_and_gives_what_plain_autograd_gives(case: Case):
    one = trained(case)
    before = bits((one.params, one.batch))
    same_step(case, one, one.step())  # a warning is an error here
    assert bits((one.params, one.batch)) == before


@pytest.mark.parametrize("name", [name for name in UNTRACED if not BY_NAME[name].refused])
def test_a_step_that_cannot_be_traced_says_so_and_gives_what_plain_autograd_gives(name):
    one = trained(BY_NAME[name])
    with pytest.warns(UserWarning, match=f"under autograd, without a trace.*: {re.escape(BY_NAME[name].untraced)}"):
        result = one.step()
    same_step(BY_NAME[name], one, result)


@pytest.mark.parametrize("name", [name for name in UNTRACED if BY_NAME[name].refused])
def test_a_step_refuses(name):
    made = BY_NAME[name].make()
    before = bits(made.x)
    with pytest.raises((ValueError, RuntimeError), match=re.escape(BY_NAME[name].refused)):
        trained(Case(name, lambda: made)).step()
    assert bits(made.x) == before


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


def test_the_page_names_every_layer_of_the_grammar():
    names = re.search(r"^Property tests draw these.*: (?P<names>`.*`)\. A stage", PAGE.read_text("utf-8"), re.M)
    assert names is not None
    assert names["names"].split(", ") == [f"`{name}`" for name in LAYERS]
