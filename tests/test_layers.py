"""Every layer and pattern of `tests.layers` against plain autograd: bits, work, memory, and a whole step."""

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
from property_tests.lawful import as_fresh_leaves, assert_lawful, run_plain, wants_grad
from property_tests.stage_functions import Wrapped
from property_tests.stages import (
    ACTIVATIONS,
    DTYPES,
    INPUT_KINDS,
    LAYERS,
    LAYOUTS,
    RETURNS,
    DrawnStage,
    has_unread_work,
    works_in_place,
)
from tests.layers import CASES, Case, StageExample
from tests.toys import Toy

PAGE = Path(__file__).parents[1] / "docs" / "linearize.md"
BY_NAME = {case.name: case for case in CASES}
TRACED_NAMES = [case.name for case in CASES if not case.untraced]
UNTRACED_NAMES = [case.name for case in CASES if case.untraced]
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning",
    "ignore:.* runs as it is written, since fpipe traces through torch.compile",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


def test_there_are_at_least_45_cases():
    assert len(BY_NAME) == len(CASES) >= 45


@pytest.mark.parametrize("name", TRACED_NAMES)
def test_a_layer_linearized_is_plain_autograd(name: str):
    """For a module, plain autograd is the module itself, with its parameters."""
    case = BY_NAME[name]
    example = case.make()

    def args() -> tuple[Any, Any]:
        new_example = case.make()
        return new_example.params, new_example.x

    function, params = example.function, as_fresh_leaves(example.params)
    if example.module is not None:
        params = {key: leaf for key, leaf in example.module.named_parameters() if leaf.requires_grad}
        call: Any = example.module
        function = lambda p, x: call(*x) if isinstance(x, tuple) else call(x)  # noqa: E731
    expected = run_plain(function, params, as_fresh_leaves(example.x))
    lawful = assert_lawful(
        example.function, args, expected, partial(assert_agree, case), more_memory=bool(case.extra_memory)
    )
    traced = lawful.traced
    node_by_name = {node.name: node for node in traced.graph.nodes}
    early_nodes = [node_by_name[name] for name in traced.gradients_made_by_input]
    ops = {node_by_name[node.args[0]].op if node.op is getitem else node.op for node in early_nodes}
    joint_ops = {op.__name__.removesuffix(".default") for op in ops}
    assert joint_ops == ({case.joint_op} if case.joint_op else set()), "after I no parameter has a gradient"


GRAMMAR_STAGES = {
    **{f"returns {name}": DrawnStage(("linear", "tanh"), returns=name) for name in RETURNS if name != "h"},
    **{f"given {name}": DrawnStage(("of_its_own", "linear"), input_kind=name, takes="all") for name in INPUT_KINDS[1:]},
    **{f"parameters {name}": DrawnStage(("twice", "bias"), param_layout=name) for name in LAYOUTS[1:]},
    **{name: DrawnStage(("linear", "gelu", "layer_norm"), dtype=name) for name in DTYPES[1:]},
    "given two, takes one": DrawnStage(("linear",), input_kind="two"),
    **{name: DrawnStage((Wrapped(name, ("linear", "twice", "tanh")),)) for name in stage_functions.AROUND},
}
IN_PLACE = [name for name in LAYERS if LAYERS[name].in_place]
OTHER_LAYERS = [name for name in LAYERS if name not in (*ACTIVATIONS, *IN_PLACE)]


def layer_groups(names: Sequence[str], count: int, *suffix: str) -> list[tuple[str, ...]]:
    """Group layers of the grammar, `count` in a stage, each after a Linear if it has no parameters."""
    prefix = ("linear",) if suffix else ()
    return [
        (*itertools.chain(*((*prefix, name) for name in names[start : start + count])), *suffix)
        for start in range(0, len(names), count)
    ]


@pytest.mark.parametrize(
    "layers",
    [*layer_groups(ACTIVATIONS, 5, "linear"), *layer_groups(OTHER_LAYERS, 4), *layer_groups(IN_PLACE, 1)],
    ids="-".join,
)
def test_each_layer_of_the_grammar_is_plain_autograd(layers: tuple[str, ...]):
    """Each layer runs once here; `property_tests/test_linearize_laws.py` draws them nested and in any order."""
    recipe = DrawnStage(layers)

    def args() -> tuple[Any, Any]:
        return recipe.params(), recipe.input(4)

    expected = run_plain(recipe, *map(as_fresh_leaves, args()))
    assert_lawful(
        recipe.function, args, expected, less_work=has_unread_work(recipe), more_memory=works_in_place(recipe)
    )


def assert_agree(case: Case, result: Any, expected: Any) -> None:
    if not case.rounding:
        assert bits(result) == bits(expected)
        return
    for leaf, expected_leaf in zip(tensors(result), tensors(expected), strict=True):
        tolerance = TOLERANCES.get(leaf.dtype, 1e-5)
        torch.testing.assert_close(leaf, expected_leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", UNTRACED_NAMES)
def test_linearize_refuses_what_cannot_be_traced(name):
    example = BY_NAME[name].make()
    bits_before = bits((example.params, example.x))
    with pytest.raises(ValueError, match=re.escape(BY_NAME[name].untraced)):
        fpipe.linearize(example.function, example.params, example.x)
    assert bits((example.params, example.x)) == bits_before


# A step of two stages, the second of which is the case.


def scale_stage(p: Any, x: Any) -> Any:
    return tree.tree_map(lambda leaf: (leaf * p["w"]).to(leaf.dtype) if wants_grad(leaf) else leaf, x)


def loss(y: Any, target: Tensor) -> Tensor:
    """Sum a smooth function of every tensor of an output."""
    total = target.sum() * 0
    for leaf in tensors(y):
        real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        total = total + real.float().sin().mean()
    return total


def half(index: int, leaf: Any) -> Any:
    return leaf.tensor_split(2)[index] if isinstance(leaf, Tensor) else leaf


@dataclass
class TrainingCase:
    """A case as a model of two stages, and a batch of four rows for it."""

    example: StageExample
    model: fpipe.Model
    params: tuple[Any, ...]
    batch: tuple[Any, Tensor]
    net: nn.Module | None = None

    def step(self) -> fpipe.Result:
        program = fpipe.chain(
            fpipe.split(2), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False)
        )(fpipe.program(self.model))
        return fpipe.build(program, self.model)(self.params, self.batch)

    def run_plain(self) -> tuple[Tensor, list[Tensor]]:
        """Return loss and gradients of plain autograd, one microbatch after the next."""
        total, sums = torch.tensor(0.0), []
        for index in range(2):
            x, target = tree.tree_map(partial(half, index), self.batch)
            if self.net is not None:
                trained_leaves = [leaf for leaf in self.net.parameters() if leaf.requires_grad]
                y = self.net(x)
            else:
                first_params, second_params = as_fresh_leaves(self.params)
                trained_leaves = [leaf for leaf in tree.leaves((first_params, second_params)) if wants_grad(leaf)]
                y = self.example.function(second_params, scale_stage(first_params, x))
            loss_share = loss(y, target) * 0.5
            grads = torch.autograd.grad(loss_share, trained_leaves, allow_unused=True)
            pairs = zip(sums, grads, strict=True)
            sums = [b if a is None else a if b is None else a + b for a, b in pairs] if index else grads
            total = total + loss_share.detach() if index else loss_share.detach()
        return total, sums


def training_case(case: Case) -> TrainingCase:
    example = case.make()
    batch = (example.x, torch.randn(4))
    if example.module is None:
        params = ({"w": torch.tensor(1.25)}, example.params)
        return TrainingCase(example, fpipe.from_functions([scale_stage, example.function], loss=loss), params, batch)
    scale_module = Toy(lambda module, x: scale_stage({"w": module.w}, x), w=nn.Parameter(torch.tensor(1.25)))
    unpack = Toy(lambda module, x: module.inner(*x), inner=example.module)
    net = nn.Sequential(scale_module, unpack if isinstance(example.x, tuple) else example.module)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 1], loss=loss)
    return TrainingCase(example, model, params, batch, net)


def assert_same_step(case: Case, case_run: TrainingCase, result: fpipe.Result) -> None:
    total, sums = case_run.run_plain()
    pairs = zip(tree.leaves(result.grads), tree.leaves(case_run.params), strict=True)
    assert_agree(case, [result.loss, *(g for g, leaf in pairs if wants_grad(leaf))], [total, *sums])


def case_of(recipe: DrawnStage) -> Case:
    return Case("", lambda: StageExample(recipe.function, recipe.params(), recipe.input(4)))


STEP_CASES = [case for case in CASES if case.step and not case.untraced]


# Every layer is linearized above; of the steps around them `make test` runs each third.
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.deep if i % 3 else []) for i, case in enumerate(STEP_CASES)),
        *map(case_of, GRAMMAR_STAGES.values()),
    ],
    ids=[*(case.name for case in STEP_CASES), *GRAMMAR_STAGES],
)
def test_a_traced_step_gives_the_bits_of_plain_autograd(case: Case):
    training = training_case(case)
    bits_before = bits((training.params, training.batch))
    assert_same_step(case, training, training.step())  # a warning is an error here
    assert bits((training.params, training.batch)) == bits_before


@pytest.mark.parametrize("name", [name for name in UNTRACED_NAMES if not BY_NAME[name].refused])
def test_an_untraceable_step_warns_and_gives_the_bits_of_plain_autograd(name):
    training = training_case(BY_NAME[name])
    with pytest.warns(UserWarning, match=f"under autograd, without a trace.*: {re.escape(BY_NAME[name].untraced)}"):
        result = training.step()
    assert_same_step(BY_NAME[name], training, result)


@pytest.mark.parametrize("name", [name for name in UNTRACED_NAMES if BY_NAME[name].refused])
def test_a_step_refuses_a_layer_without_a_gradient(name):
    example = BY_NAME[name].make()
    bits_before = bits(example.x)
    with pytest.raises((ValueError, RuntimeError), match=re.escape(BY_NAME[name].refused)):
        training_case(Case(name, lambda: example)).step()
    assert bits(example.x) == bits_before


# Where a trace and the run of it could differ.


def softmax_layer(p, x):
    return torch.softmax(torch.tanh(x @ p["w"]) @ p["w"], -1)


def autocast(enabled: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("run", [True, False])
def test_a_step_runs_under_the_autocast_of_its_trace(traced, run):
    params, x, dy = {"w": torch.randn(8, 8)}, torch.randn(4, 8), torch.randn(4, 8)
    weight_leaf, input_leaf = params["w"].clone().requires_grad_(), x.clone().requires_grad_()
    with autocast(traced):
        y = softmax_layer({"w": weight_leaf}, input_leaf)
        linearized = fpipe.linearize(softmax_layer, params, x)
    expected = torch.autograd.grad(y, [input_leaf, weight_leaf], dy.to(y.dtype))
    with autocast(run):
        output, residuals = linearized.forward(params, x)
        dx, dparams = linearized.backward(params, residuals, dy.to(output.dtype))
    assert bits((output, dx, dparams["w"])) == bits((y, *expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("ambient", [True, False])
def test_the_input_of_a_stage_is_cast_anew_for_each_use(ambient, trace):
    """Used to add the gradients of several uses in bfloat16: autocast casts a leaf once and keeps the copy.

    The input of a stage was such a leaf, as was that of the loss; uncut, both are activations.
    """

    def scale_input(p, x):
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
    model = fpipe.from_functions([scale_input, queries_and_keys], loss=lambda y, t: twice(y, t.t()))
    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in stage_params.items()} for stage_params in params]
    flat = [leaf for stage_leaves in leaves for leaf in stage_leaves.values()]
    summed = None
    with autocast(ambient):
        for x, t in zip(*(half.tensor_split(2) for half in batch), strict=True):
            loss = twice(queries_and_keys(leaves[1], scale_input(leaves[0], x)), t.t()) * 0.5
            grads = torch.autograd.grad(loss, flat)
            summed = grads if summed is None else [a + b for a, b in zip(summed, grads, strict=True)]
        for halves in ([], [fpipe.split_backward()], [fpipe.checkpoint(), fpipe.split_backward()]):
            program = fpipe.chain(fpipe.split(2), *halves, fpipe.schedules.one_f_one_b(2), fpipe.merge())
            result = fpipe.build(program(fpipe.program(model)), model, trace=trace)(params, batch)
            for expected, grad in zip(summed, tree.leaves(result.grads), strict=True):
                assert torch.equal(grad, expected)


def test_a_compiled_function_is_never_handed_tensors_without_data():
    # A kernel made by torch.compile reads memory, which such tensors do not have: the process ends with SIGSEGV.
    argument_types = []

    def backend(graph, examples):
        def kernel(*args):
            argument_types.extend(type(argument) for argument in args)
            return graph(*args)

        return kernel

    function = torch.compile(lambda a: torch.cos(a) * 2, backend=backend)
    fpipe.linearize(lambda p, x: function(x @ p["w"]), {"w": torch.randn(8, 8)}, torch.randn(4, 8))
    assert argument_types == []


# The page.


def test_the_page_shows_every_case_that_is_not_bitwise():
    page = PAGE.read_text("utf-8")
    bitwise = re.search(r"^(?P<count>\d+) of its cases are bitwise: ", page, re.M)
    table = re.search(r"^\| what \| result \|\n\|---\|---\|\n(?P<rows>(?:\|.*\|\n)*)", page, re.M)
    assert bitwise is not None, "docs/linearize.md has no number"
    assert table is not None, "docs/linearize.md has no table"
    assert int(bitwise["count"]) == [case.verdict for case in CASES].count("bitwise")
    table_rows = [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in table["rows"].splitlines()]
    assert table_rows == [(case.name, case.verdict) for case in CASES if case.verdict != "bitwise"]
