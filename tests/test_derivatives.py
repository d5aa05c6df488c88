"""Derivatives of whole models and gradients of single rows equal torch.func, or are refused."""

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
    generator = torch.Generator().manual_seed(2)
    return tree.tree_map(lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), params)


def step(model: fpipe.Model, stages: int = 2, merge_grads: str = "sum", **options: Any) -> Any:
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(stages), fpipe.merge(grads=merge_grads))(
        fpipe.program(model)
    )
    return fpipe.build(program, model, **options)


def assert_close(actual: Named, expected: Named) -> None:
    assert actual.keys() == expected.keys()
    for name, leaf in actual.items():
        torch.testing.assert_close(leaf, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("trace", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_jvp_gives_the_hessian_product_of_a_transformer(trace: bool):
    """Autograd over forward mode would be silently wrong: torch drops the mean in a layer norm's derivative."""
    net = transformer()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=cross_entropy)
    result = step(fpipe.jvp(model), trace=trace)(fpipe.make_dual(params, direction(params)), TEXT)
    product, gradient = map(named, fpipe.unpack_dual(result.grads))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        net_params, v = dict(net.named_parameters()), named(direction(params))
        gradient_at = grad(lambda params: loss_of(net, cross_entropy, params, *TEXT))
        expected = jvp(gradient_at, ({name: leaf.detach() for name, leaf in net_params.items()},), (v,))
    assert_close(gradient, expected[0])
    assert_close(product, expected[1])
    assert result.loss.item() == pytest.approx(sum((gradient[name] * v[name]).sum().item() for name in v), rel=1e-10)
    assert result.aux["loss"].item() == pytest.approx(loss_of(net, cross_entropy, net_params, *TEXT).item(), rel=1e-10)


def test_per_example_gives_the_gradient_of_each_row():
    net = transformer()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=cross_entropy)
    result = step(fpipe.per_example(model), merge_grads="rows")(params, TEXT)
    net_params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    row_gradient = grad(lambda params, x, target: loss_of(net, cross_entropy, params, x[None], target[None]))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_close(named(result.grads), vmap(row_gradient, in_dims=(None, 0, 0))(net_params, *TEXT))
    assert result.outputs.shape == (6, 1, 5, 11)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)),
        (nn.Unflatten(1, (4, 1)), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(4, 4)),
        (nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    ],
    ids=["batch norm", "group norm", "in place"],
)
def test_the_hessian_product_equals_a_difference_of_gradients(layers: tuple[nn.Module, ...]):
    """For F.mse_loss torch.func.jvp needs a tangent of the target, and reports that only by an unclear error."""
    torch.manual_seed(0)
    model, params, state = fpipe.from_sequential(nn.Sequential(*layers).double(), stages=2, loss=F.mse_loss)
    v, plain = direction(params), step(model)
    result = step(fpipe.jvp(model))(fpipe.make_dual(params, v), NUMBERS, state=state)
    shifted_params = [
        tree.tree_map(lambda p, d, step_size=step_size: p + step_size * d, params, v) for step_size in (1e-6, -1e-6)
    ]
    upper_grads, lower_grads = (named(plain(shifted, NUMBERS, state=state).grads) for shifted in shifted_params)
    for name, leaf in named(fpipe.unpack_dual(result.grads)[0]).items():
        torch.testing.assert_close(leaf, (upper_grads[name] - lower_grads[name]) / 2e-6, rtol=1e-5, atol=1e-7)
    assert state is None or all(
        a is b or torch.equal(a, b)
        for a, b in zip(tree.leaves(result.state), tree.leaves(plain(params, NUMBERS, state=state).state), strict=True)
    )


def test_derivatives_redraw_the_dropout_of_the_forward():
    """The backward on dual numbers recomputes the stage, like torch.utils.checkpoint."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 4)).double()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    model, plain = fpipe.jvp(model), step(model)(params, NUMBERS, key=3)
    duals = fpipe.make_dual(params, direction(params))
    result = step(model, trace=False)(duals, NUMBERS, key=3)
    assert_close(named(fpipe.unpack_dual(result.grads)[1]), named(plain.grads))
    with pytest.warns(UserWarning, match=r"stage 0 \(0, 1\): its backward draws random numbers"):
        traced = step(model)(duals, NUMBERS, key=3)
    assert all(map(torch.equal, tree.leaves(traced.grads), tree.leaves(result.grads)))


@pytest.mark.parametrize("rows", [True, False])
def test_derivatives_read_the_current_buffers_and_mode_of_modules(rows: bool):
    """A trace of a function around a stage of modules freezes their buffers and their mode."""
    factor = torch.ones(4, dtype=torch.float64)
    shifted = Toy(lambda toy, x: x * toy.factor if toy.training else x, factor=factor)
    net = nn.Sequential(nn.Linear(4, 4).double(), shifted)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    transformed, merge = (fpipe.per_example(model), "rows") if rows else (fpipe.jvp(model), "sum")
    step_params = params if rows else fpipe.make_dual(params, params)
    run = step(transformed, merge_grads=merge)

    def traced_equals_untraced() -> bool:
        plain = step(transformed, merge_grads=merge, trace=False)(step_params, NUMBERS)
        return all(map(torch.equal, tree.leaves(run(step_params, NUMBERS).grads), tree.leaves(plain.grads)))

    assert traced_equals_untraced()
    net[1].factor = torch.full((4,), 3.0, dtype=torch.float64)
    assert traced_equals_untraced()
    net.eval()
    assert traced_equals_untraced()


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def linear(p: Named, x: Tensor) -> Tensor:
    return x @ p["w"]


W = {"w": torch.eye(4, dtype=torch.float64)}


def test_losses_of_stages_and_carries_have_tangents():
    def with_penalty(p: Named, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ p["w"], p["w"].pow(4).sum()

    def with_carry(p: Named, x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        y = x @ p["w"] if carry is None else x @ p["w"] + carry
        return y.tanh(), y.sum(1, keepdim=True)

    model = fpipe.jvp(fpipe.from_functions([with_penalty, with_carry], squares, aux_losses=[0]))
    params, batch = (W, W), tuple(torch.ones(2, 3, 4, dtype=torch.float64) for _ in range(2))
    sliced = fpipe.chain(fpipe.split(2, slices=3), fpipe.merge())(fpipe.program(model))
    result = fpipe.build(sliced, model)(fpipe.make_dual(params, (W, W)), batch)

    def full_loss(params: tuple[Named, Named]) -> Tensor:
        x, carry, total = batch[0] @ params[0]["w"], None, params[0]["w"].pow(4).sum()
        for k in range(3):
            y, carry = with_carry(params[1], x[:, k : k + 1], carry=carry)
            total = total + squares(y, batch[1][:, k : k + 1]) / 3
        return total

    expected = jvp(grad(full_loss), (params,), ((W, W),))
    product, gradient = fpipe.unpack_dual(result.grads)
    for stage in range(2):
        assert_close(gradient[stage], expected[0][stage])
        assert_close(product[stage], expected[1][stage])


def test_leaves_without_tangent_are_constant_and_unused_leaves_have_no_gradient():
    def scaled_linear(p: Named, x: Tensor) -> Tensor:
        return x @ p["w"] * p["scale"]

    model = fpipe.from_functions([scaled_linear], squares)
    params = ({**W, "scale": torch.tensor(2.0, dtype=torch.float64), "unused": torch.ones(2)},)
    duals = fpipe.make_dual(params, ({"w": W["w"], "scale": None, "unused": None},))
    tangent = fpipe.jvp(model)
    product, gradient = fpipe.unpack_dual(fpipe.build(fpipe.program(tangent), tangent)(duals, NUMBERS).grads)
    expected = jvp(grad(lambda w: squares(NUMBERS[0] @ w * 2, NUMBERS[1])), (W["w"],), (W["w"],))
    assert_close({"w": gradient[0]["w"], "Hw": product[0]["w"]}, dict(zip(("w", "Hw"), expected, strict=True)))
    assert gradient[0]["scale"] is None
    per_row = fpipe.per_example(model)
    assert fpipe.build(fpipe.program(per_row), per_row)(params, NUMBERS).grads[0]["unused"] is None


def test_verify_compares_gradients_of_rows():
    model = fpipe.per_example(fpipe.from_functions([linear, linear], squares))
    split = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2))(fpipe.program(model))
    for program in (fpipe.merge(grads="rows")(split), split):
        report = fpipe.verify(program, model, (W, W), NUMBERS)
        assert report.bitwise
        assert "The undivided batch gives the same loss and gradients" in report.undivided


# Refusals.


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
def test_autograd_functions_without_setup_context_are_refused_by_stage(rows: bool):
    model = fpipe.from_functions([linear, with_function], squares)
    transformed, merge = (fpipe.per_example(model), "rows") if rows else (fpipe.jvp(model), "sum")
    step_params = (W, W) if rows else fpipe.make_dual((W, W), (W, W))
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod") as error_info:
        step(transformed, merge_grads=merge)(step_params, NUMBERS)
    assert "in 1F0: stage 1 (with_function), microbatch 0, rank 1" in error_info.value.__notes__


def test_stages_that_mix_rows_are_refused_by_name():
    norm, _, _ = fpipe.from_sequential(nn.Sequential(nn.BatchNorm1d(4)), stages=1, loss=F.mse_loss)
    with pytest.raises(ValueError, match=r"stage 0 \(0\) has module state, which is no single row's"):
        fpipe.per_example(norm)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).double()
    drops, params, _ = fpipe.from_sequential(net, stages=1, loss=F.mse_loss)
    with pytest.raises(RuntimeError, match="called random operation") as error_info:
        step(fpipe.per_example(drops), 1, "rows")(params, NUMBERS, key=1)
    assert any("stage 0 (0, 1)" in note for note in error_info.value.__notes__)


def test_derived_models_print_how_they_were_made() -> None:
    """Used to print only the report of the original model."""
    model = replace(fpipe.from_functions([linear, linear], loss=squares), report="stage 0: embed")
    frozen = fpipe.freeze(fpipe.freeze(model, 0), (1, "w"))
    assert str(frozen) == "frozen: w of stage 1\nfrozen: all of stage 0\nstage 0: embed"
    report = "jvp: on dual numbers, so a tangent beside each parameter and what depends on it"
    assert str(fpipe.jvp(frozen)) == f"{report}\n{frozen}"
    report = "per_example: gradients row by row, of parameters that each row is handed"
    assert str(fpipe.per_example(model)) == f"{report}\n{model}"


MODEL = fpipe.from_functions([linear], squares)
ROWS = fpipe.per_example(MODEL)


def build_rows(split: Any, *transforms: Any) -> Any:
    return fpipe.build(fpipe.chain(split, *transforms)(fpipe.program(ROWS)), ROWS)


test_invalid_rows_and_tangents_are_refused = refusals(
    globals(),
    """
fpipe.per_example(ROWS)
    ValueError: this model is per_example already
step(ROWS, 1)
    ValueError: adds gradients of single rows
step(MODEL, 1, "rows")
    ValueError: merge(grads="rows") is for gradients of single rows
build_rows(fpipe.split(2, spec=fpipe.Chunk(1)))
    ValueError: takes rows of dim 0 apart, of whole sequences; found the spec
build_rows(fpipe.split(2, slices=2))
    ValueError: takes rows of dim 0 apart, of whole sequences; found slices
# Used to add row i of one replica to row i of another.
build_rows(fpipe.split(2), fpipe.merge(grads="rows"), fpipe.data_parallel())
    ValueError: adds up over replicas, whose single rows are not the same: leave data_par
build_rows(fpipe.split(2), fpipe.merge(grads="rows"), fpipe.shard())
    ValueError: adds up over replicas, whose single rows are not the same: leave shard out
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
