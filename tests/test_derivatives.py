"""Derivatives of a whole model, and gradients of single rows: modules, what changes later, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

import fpipe
from fpipe import tree
from tests.refusals import refusals
from tests.toys import Toy

Named = dict[str, Tensor]


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), block(), nn.Linear(8, 11)).double()


def cross_entropy(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


TEXT = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1)), torch.arange(30).reshape(6, 5) % 11
NUMBERS = tuple(torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(2))


def loss_of(net: nn.Module, loss: Any, params: Named, x: Tensor, target: Tensor) -> Tensor:
    return loss(functional_call(net, params, (x,)), target)


def named(grads: Any) -> Named:
    return {name: leaf for stage in grads for name, leaf in stage.items()}


def direction(params: Any) -> Any:
    make = torch.Generator().manual_seed(2)
    return tree.tree_map(lambda leaf: torch.randn(leaf.shape, generator=make, dtype=leaf.dtype), params)


def step(model: fpipe.Model, stages: int = 2, merge: str = "sum", **options: Any) -> Any:
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(stages), fpipe.merge(grads=merge))(fpipe.program(model))
    return fpipe.build(program, model, **options)


def close(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        torch.testing.assert_close(leaf, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("trace", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_the_hessian_product_of_a_transformer(trace: bool):
    """Autograd over forward mode would be wrong, silently: torch forgets the mean inside a layer norm's derivative."""
    net = transformer()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=cross_entropy)
    found = step(fpipe.jvp(model), trace=trace)(fpipe.make_dual(params, direction(params)), TEXT)
    product, gradient = map(named, fpipe.unpack_dual(found.grads))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        own, v = dict(net.named_parameters()), named(direction(params))
        of = grad(lambda params: loss_of(net, cross_entropy, params, *TEXT))
        expected = jvp(of, ({name: leaf.detach() for name, leaf in own.items()},), (v,))
    close(gradient, expected[0])
    close(product, expected[1])
    assert found.loss.item() == pytest.approx(sum((gradient[name] * v[name]).sum().item() for name in v), rel=1e-10)
    assert found.aux["loss"].item() == pytest.approx(loss_of(net, cross_entropy, own, *TEXT).item(), rel=1e-10)


def test_the_gradient_of_each_row_of_a_transformer():
    net = transformer()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=cross_entropy)
    found = step(fpipe.per_example(model), merge="rows")(params, TEXT)
    own = {name: leaf.detach() for name, leaf in net.named_parameters()}
    of_row = grad(lambda params, x, target: loss_of(net, cross_entropy, params, x[None], target[None]))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        close(named(found.grads), vmap(of_row, in_dims=(None, 0, 0))(own, *TEXT))
    assert found.outputs.shape == (6, 1, 5, 11)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)),
        (nn.Unflatten(1, (4, 1)), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(4, 4)),
        (nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    ],
    ids=["batch norm", "group norm", "in place"],
)
def test_the_hessian_product_is_the_difference_of_gradients(layers: tuple[nn.Module, ...]):
    """Of F.mse_loss torch.func.jvp itself needs a tangent for the target, and says so only by an odd error."""
    torch.manual_seed(0)
    model, params, state = fpipe.from_sequential(nn.Sequential(*layers).double(), stages=2, loss=F.mse_loss)
    v, plain = direction(params), step(model)
    found = step(fpipe.jvp(model))(fpipe.make_dual(params, v), NUMBERS, state=state)
    ends = [tree.tree_map(lambda p, d, by=by: p + by * d, params, v) for by in (1e-6, -1e-6)]
    up, down = (named(plain(end, NUMBERS, state=state).grads) for end in ends)
    for name, leaf in named(fpipe.unpack_dual(found.grads)[0]).items():
        torch.testing.assert_close(leaf, (up[name] - down[name]) / 2e-6, rtol=1e-5, atol=1e-7)
    assert state is None or all(
        a is b or torch.equal(a, b)
        for a, b in zip(tree.leaves(found.state), tree.leaves(plain(params, NUMBERS, state=state).state), strict=True)
    )


def test_dropout_draws_the_same_numbers_again():
    """The backward on dual numbers runs the stage once more, as torch.utils.checkpoint does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 4)).double()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    model, plain = fpipe.jvp(model), step(model)(params, NUMBERS, key=3)
    duals = fpipe.make_dual(params, direction(params))
    found = step(model, trace=False)(duals, NUMBERS, key=3)
    close(named(fpipe.unpack_dual(found.grads)[1]), named(plain.grads))
    with pytest.warns(UserWarning, match=r"stage 0 \(0, 1\): its backward draws random numbers"):
        traced = step(model)(duals, NUMBERS, key=3)
    assert all(map(torch.equal, tree.leaves(traced.grads), tree.leaves(found.grads)))


@pytest.mark.parametrize("rows", [True, False])
def test_what_modules_hold_is_read_as_it_is_then(rows: bool):
    """A trace of a function around a stage of modules has their buffers and their mode inside."""

    by = torch.ones(4, dtype=torch.float64)
    shifted = Toy(lambda own, x: x * own.by if own.training else x, by=by)
    net = nn.Sequential(nn.Linear(4, 4).double(), shifted)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    transformed, merge = (fpipe.per_example(model), "rows") if rows else (fpipe.jvp(model), "sum")
    given = params if rows else fpipe.make_dual(params, params)
    run = step(transformed, merge=merge)

    def again() -> bool:
        plain = step(transformed, merge=merge, trace=False)(given, NUMBERS)
        return all(map(torch.equal, tree.leaves(run(given, NUMBERS).grads), tree.leaves(plain.grads)))

    assert again()
    net[1].by = torch.full((4,), 3.0, dtype=torch.float64)
    assert again()
    net.eval()
    assert again()


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def linear(p: Named, x: Tensor) -> Tensor:
    return x @ p["w"]


W = {"w": torch.eye(4, dtype=torch.float64)}


def test_a_loss_of_a_stage_and_a_carry_have_tangents_too():
    def balanced(p: Named, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ p["w"], p["w"].pow(4).sum()

    def summing(p: Named, x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        y = x @ p["w"] if carry is None else x @ p["w"] + carry
        return y.tanh(), y.sum(1, keepdim=True)

    model = fpipe.jvp(fpipe.from_functions([balanced, summing], squares, aux_losses=[0]))
    params, batch = (W, W), tuple(torch.ones(2, 3, 4, dtype=torch.float64) for _ in range(2))
    sliced = fpipe.chain(fpipe.split(2, slices=3), fpipe.merge())(fpipe.program(model))
    found = fpipe.build(sliced, model)(fpipe.make_dual(params, (W, W)), batch)

    def whole(params: tuple[Named, Named]) -> Tensor:
        x, carry, total = batch[0] @ params[0]["w"], None, params[0]["w"].pow(4).sum()
        for k in range(3):
            y, carry = summing(params[1], x[:, k : k + 1], carry=carry)
            total = total + squares(y, batch[1][:, k : k + 1]) / 3
        return total

    expected = jvp(grad(whole), (params,), ((W, W),))
    product, gradient = fpipe.unpack_dual(found.grads)
    for number in range(2):
        close(gradient[number], expected[0][number])
        close(product[number], expected[1][number])


def test_what_has_no_tangent_is_constant_and_what_is_not_used_has_no_gradient():
    def two(p: Named, x: Tensor) -> Tensor:
        return x @ p["w"] * p["scale"]

    model = fpipe.from_functions([two], squares)
    params = ({**W, "scale": torch.tensor(2.0, dtype=torch.float64), "unused": torch.ones(2)},)
    duals = fpipe.make_dual(params, ({"w": W["w"], "scale": None, "unused": None},))
    tangent = fpipe.jvp(model)
    product, gradient = fpipe.unpack_dual(fpipe.build(fpipe.program(tangent), tangent)(duals, NUMBERS).grads)
    expected = jvp(grad(lambda w: squares(NUMBERS[0] @ w * 2, NUMBERS[1])), (W["w"],), (W["w"],))
    close({"w": gradient[0]["w"], "Hw": product[0]["w"]}, dict(zip(("w", "Hw"), expected, strict=True)))
    assert gradient[0]["scale"] is None
    of_rows = fpipe.per_example(model)
    assert fpipe.build(fpipe.program(of_rows), of_rows)(params, NUMBERS).grads[0]["unused"] is None


def test_verify_knows_rows():
    model = fpipe.per_example(fpipe.from_functions([linear, linear], squares))
    split = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2))(fpipe.program(model))
    for program in (fpipe.merge(grads="rows")(split), split):
        report = fpipe.verify(program, model, (W, W), NUMBERS)
        assert report.bitwise
        assert "The undivided batch gives the same loss and gradients" in report.undivided


# What is refused.


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0].cos()


def with_function(p: Named, x: Tensor) -> Tensor:
    return Sine.apply(x @ p["w"])


@pytest.mark.parametrize("rows", [True, False])
def test_a_function_of_autograds_without_the_rule_is_refused_where_it_stands(rows: bool):
    model = fpipe.from_functions([linear, with_function], squares)
    transformed, merge = (fpipe.per_example(model), "rows") if rows else (fpipe.jvp(model), "sum")
    given = (W, W) if rows else fpipe.make_dual((W, W), (W, W))
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod") as caught:
        step(transformed, merge=merge)(given, NUMBERS)
    assert "in 1F0: stage 1 (with_function), microbatch 0, rank 1" in caught.value.__notes__


def test_rows_that_do_not_stand_alone_are_refused_by_name():
    norm, _, _ = fpipe.from_sequential(nn.Sequential(nn.BatchNorm1d(4)), stages=1, loss=F.mse_loss)
    with pytest.raises(ValueError, match=r"stage 0 \(0\) has module state, which is no single row's"):
        fpipe.per_example(norm)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).double()
    drops, params, _ = fpipe.from_sequential(net, stages=1, loss=F.mse_loss)
    with pytest.raises(RuntimeError, match="called random operation") as caught:
        step(fpipe.per_example(drops), 1, "rows")(params, NUMBERS, key=1)
    assert any("stage 0 (0, 1)" in note for note in caught.value.__notes__)


def test_a_model_that_is_made_of_another_prints_how() -> None:
    """It printed what the other one prints, as if nothing had been done to it."""
    model = replace(fpipe.from_functions([linear, linear], loss=squares), report="stage 0: embed")
    frozen = fpipe.freeze(fpipe.freeze(model, 0), (1, "w"))
    assert str(frozen) == "frozen: w of stage 1\nfrozen: all of stage 0\nstage 0: embed"
    how = "jvp: on dual numbers, so a tangent beside each parameter and what depends on it"
    assert str(fpipe.jvp(frozen)) == f"{how}\n{frozen}"
    how = "per_example: gradients row by row, of parameters that each row is handed"
    assert str(fpipe.per_example(model)) == f"{how}\n{model}"


MODEL = fpipe.from_functions([linear], squares)
ROWS = fpipe.per_example(MODEL)


def built(split: Any, *more: Any) -> Any:
    return fpipe.build(fpipe.chain(split, *more)(fpipe.program(ROWS)), ROWS)


test_what_has_no_rows_or_tangents_is_refused = refusals(
    globals(),
    """
fpipe.per_example(ROWS)
    ValueError: this model is per_example already
step(ROWS, 1)
    ValueError: adds gradients of single rows
step(MODEL, 1, "rows")
    ValueError: merge(grads="rows") is for gradients of single rows
built(fpipe.split(2, spec=fpipe.Chunk(1)))
    ValueError: takes rows of dim 0 apart, of whole sequences; found the spec
built(fpipe.split(2, slices=2))
    ValueError: takes rows of dim 0 apart, of whole sequences; found slices
# Row i of one replica was added to row i of another.
built(fpipe.split(2), fpipe.merge(grads="rows"), fpipe.data_parallel())
    ValueError: adds up over replicas, whose single rows are not the same: leave data_par
built(fpipe.split(2), fpipe.merge(grads="rows"), fpipe.shard())
    ValueError: adds up over replicas, whose single rows are not the same: leave shard out
fpipe.merge(grads="mean")
    ValueError: grads is 'sum' or 'rows', found 'mean'
fpipe.make_dual({"w": torch.ones(2)}, {"w": torch.ones(3)})
    ValueError: the tangent at ['w'] is float32[2]; found float32[3]
fpipe.make_dual({"w": torch.ones(2)}, {"w": torch.ones(2).double()})
    ValueError: is float32[2]; found float64[2]
fpipe.make_dual({"w": torch.ones(2)}, {"v": torch.ones(2)})
    ValueError: only one of the two has a leaf at ['w']
fpipe.make_dual({"w": torch.ones(2)}, {"w": 1.0})
    ValueError: is float32[2]; found float
fpipe.make_dual(torch.arange(2), torch.arange(2))
    ValueError: is None: int64[2] has no derivative; found int64[2]
""",
)
