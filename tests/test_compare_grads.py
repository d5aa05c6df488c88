"""`compare_grads` names each mistake in the gradients of a foreign loop."""

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpipe
from tests.refusals import refusals
from tests.toys import Toy

F = nn.functional
ROWS, PARTS = 12, 4


@cache
def build_case(tied=False, dtype=torch.float64):
    torch.manual_seed(0)
    linear = nn.Linear(5, 5)
    reuse = [Toy(lambda layer, x: x @ layer.first.weight, first=linear)] if tied else []
    net = nn.Sequential(linear, nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), *reuse, nn.Linear(5, 1))
    net = net.to(dtype)
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=F.mse_loss)
    return net, model, params, (torch.randn(ROWS, 5, dtype=dtype), torch.randn(ROWS, 1, dtype=dtype))


def loop_grads(counts=(1,) * PARTS, scale=1.0, sizes=(ROWS // PARTS,) * PARTS, weigh=True, **case_options):
    """Return gradients of a plain loop, with a count for each microbatch and a factor on the sum."""
    net, _, _, batch = build_case(**case_options)
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for count, inputs, target in zip(counts, *(half.split(sizes) for half in batch), strict=True):
        weight = len(inputs) / ROWS if weigh else 1 / len(sizes)
        grads = torch.autograd.grad(F.mse_loss(net(inputs), target) * weight, [*net.parameters()])
        for name, grad in zip(total, grads, strict=True):
            total[name] += count * scale * grad
    return total


def compare(grads, **options) -> fpipe.Report:
    case_options = {name: options.pop(name) for name in ("tied", "dtype") if name in options}
    _, model, params, batch = build_case(**case_options)
    return fpipe.compare_grads(model, params, batch, grads, **options)


def verdict(grads, **options) -> list[str]:
    """Return the lines of the error without the names of leaves."""
    with pytest.raises(fpipe.GradientMismatch) as error_info:
        compare(grads, **options)
    return [line for line in str(error_info.value).splitlines()[1:] if not line.startswith("  ")]


def test_gradients_are_bitwise_equal_in_their_own_microbatches():
    report = compare(loop_grads())
    assert report.bitwise
    assert str(report).splitlines() == [
        "6 of 6 leaves bitwise equal to plain autograd, largest error 0",
        "Compared with 4 microbatches, one after the other.",
        "The undivided batch gives the same loss and gradients, to rounding.",
    ]


def test_rounding_is_reported_in_ulps():
    grads = loop_grads()
    grads["2.bias"] = grads["2.bias"] + 2.9 * grads["2.bias"].abs().max() * torch.finfo(torch.float64).eps
    leaf = next(leaf for leaf in compare(grads, microbatches=4).leaves if leaf.name == "2.bias")
    assert leaf.verdict == "equal to rounding, 3 ulps of its largest number at most"
    with pytest.raises(fpipe.GradientMismatch, match="equal to rounding, 3 ulps"):
        compare(grads, microbatches=4, rtol=0.0, atol=0.0)
    assert compare(loop_grads(scale=1 + 1e-4), rtol=1e-3).max_error > 0


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (4.0, "4 x: summed over the 4 microbatches or 4 ranks instead of averaged?"),
        (0.25, "1/4 x: averaged over the 4 microbatches or 4 ranks once too often?"),
        (8.0, "8 x: summed over 8 microbatches or ranks instead of averaged?"),
        (2.0**-3, "1/8 x: averaged over 8 microbatches or ranks once too often?"),
        (65536.0, "65536 x: a loss scale that was not divided out?"),
        (-1.0, "-1 x: the sign is turned"),
        (0.0, "0: nothing was added to it"),
        (0.7, "0.7 x"),
    ],
)
def test_a_common_factor_is_named(scale: float, message: str):
    assert verdict(loop_grads(scale=scale), microbatches=4) == [message]


def test_an_averaged_sum_is_named():
    net, _, _, batch = build_case()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.MSELoss(reduction="sum"), reduction="sum")
    grads = {name: grad * ROWS / 4 for name, grad in loop_grads().items()}
    with pytest.raises(
        fpipe.GradientMismatch, match=r"1/4 x: averaged over 4 microbatches or ranks instead of summed\?"
    ):
        fpipe.compare_grads(model, params, batch, grads)


def test_equal_weights_of_unequal_microbatches_are_named():
    _, model, params, (inputs, target) = build_case()
    sizes = (5, 4, 3)
    grads = loop_grads((1,) * 3, sizes=sizes, weigh=False)
    batch = [*zip(inputs.split(sizes), target.split(sizes), strict=True)]
    with pytest.raises(fpipe.GradientMismatch, match="each microbatch counts the same, although they differ in rows"):
        fpipe.compare_grads(model, params, batch, grads)
    assert fpipe.compare_grads(model, params, batch, loop_grads((1,) * 3, sizes=sizes)).bitwise


def test_a_mean_of_means_over_padded_tokens_is_named():
    """Many trainers averaged each microbatch over its own tokens, and then averaged the means."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    inputs, target = torch.randn(12, 4), torch.randint(0, 5, (12,))
    target[[0, 1, 2, 7]] = -100

    def loss(y, t):
        return F.cross_entropy(y, t, reduction="sum"), (t != -100).sum()

    model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss, reduction="count")
    for x, t in zip(inputs.split(4), target.split(4), strict=True):
        (F.cross_entropy(net(x), t) / 3).backward()
    grads = {name: p.grad for name, p in net.named_parameters()}
    with pytest.raises(fpipe.GradientMismatch, match="each microbatch counts the same, although their counts differ"):
        fpipe.compare_grads(model, params, (inputs, target), grads)


def tied_grads(net, batch):
    """Compute the gradients of the tied weight by its first and last use by hand."""
    params = {name: p.detach() for name, p in net.named_parameters()}
    first_use, last_use = (params["0.weight"].clone().requires_grad_() for _ in range(2))
    h = torch.tanh(batch[0] @ first_use.T + params["0.bias"])
    h = torch.tanh(h @ params["2.weight"].T + params["2.bias"]) @ last_use
    return torch.autograd.grad(F.mse_loss(h @ params["5.weight"].T + params["5.bias"], batch[1]), (first_use, last_use))


def test_a_missing_use_of_a_tied_weight_is_named():
    """As if two stages on two ranks did not sum their gradients of one weight."""
    net, model, _, batch = build_case(tied=True)
    grads = loop_grads(tied=True)
    first_stage, last_stage = (leaf.stage for leaf in model.tied_uses[0])
    first_grad, last_grad = tied_grads(net, batch)
    assert verdict(grads | {"0.weight": first_grad}, tied=True) == [f"the use in stage {last_stage} is missing"]
    assert set(verdict(grads | {"0.weight": first_grad, "4.first.weight": last_grad}, tied=True)) == {
        f"the use in stage {last_stage} is missing",
        f"the use in stage {first_stage} is missing",
    }
    assert verdict(grads | {"0.weight": grads["0.weight"] + last_grad}, tied=True) == [
        f"the use in stage {last_stage} counts twice"
    ]
    assert compare(grads, tied=True).max_error < 1e-15


def test_two_mistakes_are_named_separately():
    grads = loop_grads()
    grads |= {name: 4 * grad for name, grad in grads.items() if name.startswith("0.")}
    grads["2.weight"] = torch.randn(5, 5, dtype=torch.float64)
    with pytest.raises(fpipe.GradientMismatch) as error_info:
        compare(grads, microbatches=4)
    headline, scaled, names, cosine_line, name = str(error_info.value).splitlines()
    assert headline == "3 of 6 gradients are not those of plain autograd."
    assert (scaled[:4], names) == ("4 x:", "  0.weight, 0.bias")
    assert re.fullmatch(r"[\d.]+ x the norm, its cosine with the right one -?[\d.]+", cosine_line)
    assert name == "  2.weight"


def exchange_rows(grad: torch.Tensor, dim: int, source: slice, target: slice) -> torch.Tensor:
    rows = torch.arange(grad.shape[dim])
    rows[source], rows[target] = rows[target].clone(), rows[source].clone()
    return grad.index_select(dim, rows)


DIFFERENCES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "bfloat16": (lambda grad: grad.bfloat16().float(), "as if rounded to bfloat16"),
    "float8": (lambda grad: grad.to(torch.float8_e5m2).float(), "as if rounded to float8_e5m2"),
    "halves": (lambda grad: exchange_rows(grad, 0, slice(16), slice(16, 32)), "rows 0-15 and 16-31 are exchanged"),
    "two rows": (lambda grad: exchange_rows(grad, 0, slice(3, 4), slice(7, 8)), "rows 3 and 7 are exchanged"),
    "columns": (lambda grad: exchange_rows(grad, 1, slice(2), slice(4, 6)), "columns 0-1 and 4-5 are exchanged"),
    "an order": (lambda grad: grad.roll(1, 0), "rows 0-31 are in another order"),
    "transposed": (lambda grad: grad.T.contiguous(), "transposed"),
    "noise": (lambda grad: grad + 1e-3 * grad.roll(5, 1), "off by 0.1 % of its norm"),
    "a row": (lambda grad: grad * (1 + 0.01 * (torch.arange(32) == 5)[:, None]), "off by 0.24 %"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_small_or_regular_differences_are_described(case: str):
    """Used to be reported as "of 1 x the norm, its cosine with the right one 1"."""
    change, message = DIFFERENCES[case]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    batch = torch.randn(12, 32), torch.randn(12, 1)
    expected_grads = fpipe.join_params(model, fpipe.reference(model, params, batch).grads)
    with pytest.raises(fpipe.GradientMismatch) as error_info:
        fpipe.compare_grads(model, params, batch, expected_grads | {"0.weight": change(expected_grads["0.weight"])})
    headline, difference, name = str(error_info.value).splitlines()
    assert (headline, name) == ("1 of 4 gradients are not those of plain autograd.", "  0.weight")
    assert difference.startswith(message)
    assert ("in row 5 alone" in difference) == (case == "a row")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((1, 0, 1, 0), "microbatches 1 and 3 of 4 are missing"),
        ((0, 0, 0, 1), "microbatches 0, 1 and 2 of 4 are missing"),
        ((2, 1, 1, 2), "microbatches 0 and 3 of 4 count twice"),
        ((1, 0, 2, 1), "microbatch 1 of 4 is missing, and microbatch 2 counts twice"),
        ((1, 3, 1, 0), "the 4 microbatches count 1, 3, 1, 0 times"),
    ],
)
def test_miscounted_microbatches_are_named(counts: tuple[int, ...], message: str):
    assert verdict(loop_grads(counts)) == [message]
    scaled_message = f"{message}, and all is 4 x: summed over the 4 microbatches or 4 ranks instead of averaged?"
    assert verdict(loop_grads(counts, scale=4.0), microbatches=4) == [scaled_message]


WRAPPERS = {
    "DistributedDataParallel": lambda name: f"module.{name}",
    "compile": lambda name: f"_orig_mod.{name}",
    "compile of a child": lambda name: name.replace("0.", "0._orig_mod."),
    "both": lambda name: f"module._orig_mod.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}",
    "checkpoint": lambda name: f"_checkpoint_wrapped_module.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_prefixes_of_wrappers_are_removed(wrapper: str):
    _, model, params, batch = build_case()
    grads = {WRAPPERS[wrapper](name): grad for name, grad in loop_grads().items()}
    assert compare(grads).bitwise
    params_after = {WRAPPERS[wrapper](name): p for name, p in fpipe.join_params(model, params).items()}
    options = {"rule": "SGD", "lr": 0.0}
    assert fpipe.compare_step(model, params, batch, params_after, grads=grads, microbatches=4, **options).bitwise
    assert fpipe.compare_step(model, params, batch, [params_after, params_after], **options).bitwise
    with pytest.raises(ValueError, match=r"no parameter 'module.9.bias'|nothing to compare the gradient of module"):
        compare(grads | {"module.9.bias": torch.ones(5)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_hides_no_missing_microbatch(dtype: torch.dtype):
    """A gradient that lacks one of many microbatches differs by less than bfloat16 rounds."""
    grads = {name: grad.to(dtype) for name, grad in loop_grads().items()}
    assert not compare(grads, microbatches=4).bitwise
    grads = {name: grad.to(dtype) for name, grad in loop_grads((1, 0, 1, 1)).items()}
    assert verdict(grads, microbatches=4) == ["microbatch 1 of 4 is missing"]


def test_grads_may_be_trees_per_stage_or_a_user_pytree():
    _, model, params, batch = build_case()
    result = fpipe.reference(model, params, batch)
    assert fpipe.compare_grads(model, params, batch, result.grads).bitwise
    user_params = {"a": torch.eye(3), "b": [torch.ones(3)]}
    pair = torch.randn(4, 3), torch.randn(4, 3)
    loss_model, stage_params = fpipe.from_loss(
        lambda p, b: F.mse_loss(fpipe.boundary(b[0] @ p["a"]) + p["b"][0], b[1]), user_params, pair
    )
    grads = fpipe.join_params(loss_model, fpipe.reference(loss_model, stage_params, pair).grads)
    assert fpipe.compare_grads(loss_model, stage_params, pair, grads).bitwise
    assert fpipe.compare_grads(loss_model, stage_params, pair, {"a": grads["a"], "b.0": grads["b"][0]}).bitwise
    with pytest.raises(fpipe.GradientMismatch, match=r"3 x: .*\n  b\.0$"):
        fpipe.compare_grads(loss_model, stage_params, pair, {"a": grads["a"], "b": [3 * grads["b"][0]]})


def test_grads_are_compared_with_counts_state_keys_and_frozen_leaves():
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))
    model_options = {"loss": lambda y, t: ((y - t).square().sum(), len(y)), "reduction": "count"}
    model, params, state = fpipe.from_sequential(net, stages=2, **model_options)
    model = fpipe.freeze(model, "0.weight")
    batch = torch.randn(8, 5), torch.randn(8, 1)
    step_options = {"state": state, "key": 3}
    result = fpipe.reference(model, params, batch, microbatches=2, **step_options)
    report = fpipe.compare_grads(model, params, batch, result.grads, microbatches=2, **step_options)
    assert report.bitwise
    assert len(report.leaves) == 5
    other_half = []
    half_grads = fpipe.reference(model, params, (batch[0][:4], batch[1][:4]), **step_options).grads
    for grad, half_grad in zip(fpipe.tree.leaves(result.grads), fpipe.tree.leaves(half_grads), strict=True):
        other_half.append(None if grad is None else grad - half_grad / 2)
    incomplete_grads = fpipe.tree.unflatten(fpipe.tree.flatten(result.grads)[1], other_half)
    with pytest.raises(fpipe.GradientMismatch, match="microbatch 0 of 2 is missing"):
        fpipe.compare_grads(model, params, batch, incomplete_grads, microbatches=2, **step_options)


def with_norm():
    """Compare gradients of a net with state, without handing the state in."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, params, _ = fpipe.from_sequential(net, stages=1, loss=F.mse_loss)
    return fpipe.compare_grads(model, params, (torch.randn(4, 4), torch.randn(4, 4)), dict(net.named_parameters()))


def without_bias():
    return {name: grad for name, grad in loop_grads().items() if name != "2.bias"}


test_refusals = refusals(
    globals(),
    """
compare(loop_grads() | {"9.bias": torch.ones(5)})
    ValueError: there is no parameter '9.bias' in the model, which has 0.weight,
compare(without_bias())
    ValueError: there is no gradient of '2.bias', and plain autograd has one
compare(without_bias() | {"2.bias": torch.ones(3)})
    ValueError: the gradient of '2.bias' has the shape (3,), the parameter (5,)
compare(without_bias() | {"2.bias": 1.0})
    ValueError: the gradient of '2.bias' is a float; expected a tensor
compare(without_bias() | {"2.bias": torch.ones(5) * 1j})
    ValueError: the gradient of '2.bias' is a tensor of torch.complex64
compare(without_bias() | {"2.bias": torch.arange(5)})
    ValueError: the gradient of '2.bias' is a tensor of torch.int64
compare([*loop_grads().values()])
    ValueError: grads is a dict of p.grad by name, or one tree for each of the 3 stages; found 6 in a list.
compare(nn.Linear(1, 1))
    ValueError: grads is a dict of p.grad by name, or one tree for each of the 3 stages; found Linear.
compare(loop_grads(), microbatches=0)
    ValueError: microbatches is a whole number, at least 1; found 0.
with_norm()
    ValueError: hand it in as compare_grads(..., state=...)
compare(loop_grads() | {"0.bias": torch.full((5,), torch.nan)})
    GradientMismatch: 1 of 6 gradients are not those of plain autograd. NaN or infinite numbers 0.bias
""",
)


@given(st.data())
def test_randomly_drawn_mistakes_are_named(draws):
    """Draw layers, counts of microbatches and a forgotten scale."""
    widths = draws.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    m = draws.draw(st.sampled_from([2, 3, 4]))
    torch.manual_seed(draws.draw(st.integers(0, 99)))
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    net = nn.Sequential(*layers).double()
    model, params, _ = fpipe.from_sequential(net, stages=1, loss=F.mse_loss)
    batch = (torch.randn(3 * m, widths[0]).double(), torch.randn(3 * m, widths[-1]).double())
    index, times = draws.draw(st.integers(0, m - 1)), draws.draw(st.sampled_from([0, 1, 2]))
    scale = draws.draw(st.sampled_from([1.0, float(m), 1.0 / m, 16.0]))
    counts = [times if number == index else 1 for number in range(m)]
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for count, inputs, target in zip(counts, *(half.chunk(m) for half in batch), strict=True):
        grads = torch.autograd.grad(F.mse_loss(net(inputs), target) / m, [*net.parameters()])
        for name, grad in zip(total, grads, strict=True):
            total[name] += count * scale * grad
    if (times, scale) == (1, 1.0):
        assert fpipe.compare_grads(model, params, batch, total, microbatches=m).bitwise
        return
    with pytest.raises(fpipe.GradientMismatch) as error_info:
        fpipe.compare_grads(model, params, batch, total, microbatches=m)
    lines = str(error_info.value).splitlines()
    assert len(lines) == 3, lines
    assert (f"microbatch {index} of {m} {'is missing' if times == 0 else 'counts twice'}" in lines[1]) == (times != 1)
    factor = f"{scale:g} x: " if scale > 1 else f"1/{m} x: "
    assert (factor in lines[1]) == (scale != 1.0)
