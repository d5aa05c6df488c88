"""Gradients made elsewhere: each mistake is made on purpose, and called by its name."""

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
def made(tied=False, dtype=torch.float64):
    torch.manual_seed(0)
    first = nn.Linear(5, 5)
    again = [Toy(lambda own, x: x @ own.first.weight, first=first)] if tied else []
    net = nn.Sequential(first, nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), *again, nn.Linear(5, 1))
    net = net.to(dtype)
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=F.mse_loss)
    return net, model, params, (torch.randn(ROWS, 5, dtype=dtype), torch.randn(ROWS, 1, dtype=dtype))


def loop(counts=(1,) * PARTS, scale=1.0, sizes=(ROWS // PARTS,) * PARTS, weigh=True, **how):
    """A loop of one's own: how often each microbatch counts, and what the sum is multiplied by."""
    net, _, _, batch = made(**how)
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for count, inputs, target in zip(counts, *(half.split(sizes) for half in batch), strict=True):
        weight = len(inputs) / ROWS if weigh else 1 / len(sizes)
        grads = torch.autograd.grad(F.mse_loss(net(inputs), target) * weight, [*net.parameters()])
        for name, grad in zip(total, grads, strict=True):
            total[name] += count * scale * grad
    return total


def judged(grads, **more) -> fpipe.Report:
    how = {word: more.pop(word) for word in ("tied", "dtype") if word in more}
    _, model, params, batch = made(**how)
    return fpipe.compare_grads(model, params, batch, grads, **more)


def verdict(grads, **more) -> list[str]:
    """What the error says, without names."""
    with pytest.raises(fpipe.GradientMismatch) as caught:
        judged(grads, **more)
    return [line for line in str(caught.value).splitlines()[1:] if not line.startswith("  ")]


def test_equal_bit_by_bit_in_the_microbatches_that_made_them():
    report = judged(loop())
    assert report.bitwise
    assert str(report).splitlines() == [
        "6 of 6 leaves bitwise equal to plain autograd, largest error 0",
        "Compared with 4 microbatches, one after the other.",
        "The undivided batch gives the same loss and gradients, to rounding.",
    ]


def test_equal_to_rounding_is_told_in_ulps():
    grads = loop()
    grads["2.bias"] = grads["2.bias"] + 2.9 * grads["2.bias"].abs().max() * torch.finfo(torch.float64).eps
    leaf = next(leaf for leaf in judged(grads, microbatches=4).leaves if leaf.name == "2.bias")
    assert leaf.verdict == "equal to rounding, 3 ulps of its largest number at most"
    with pytest.raises(fpipe.GradientMismatch, match="equal to rounding, 3 ulps"):
        judged(grads, microbatches=4, rtol=0.0, atol=0.0)
    assert judged(loop(scale=1 + 1e-4), rtol=1e-3).max_error > 0


@pytest.mark.parametrize(
    ("scale", "words"),
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
def test_all_scaled(scale: float, words: str):
    assert verdict(loop(scale=scale), microbatches=4) == [words]


def test_a_sum_that_was_averaged_is_told_from_a_mean_that_was_summed():
    net, _, _, batch = made()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.MSELoss(reduction="sum"), reduction="sum")
    grads = {name: grad * ROWS / 4 for name, grad in loop().items()}
    with pytest.raises(
        fpipe.GradientMismatch, match=r"1/4 x: averaged over 4 microbatches or ranks instead of summed\?"
    ):
        fpipe.compare_grads(model, params, batch, grads)


def test_microbatches_of_other_sizes_that_count_the_same():
    _, model, params, (inputs, target) = made()
    sizes = (5, 4, 3)
    grads = loop((1,) * 3, sizes=sizes, weigh=False)
    batch = [*zip(inputs.split(sizes), target.split(sizes), strict=True)]
    with pytest.raises(fpipe.GradientMismatch, match="each microbatch counts the same, although they differ in rows"):
        fpipe.compare_grads(model, params, batch, grads)
    assert fpipe.compare_grads(model, params, batch, loop((1,) * 3, sizes=sizes)).bitwise


def test_a_mean_of_means_over_padded_tokens_is_named():
    """What many trainers did: each microbatch's mean over its own tokens, and the mean of those."""
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


def uses(net, batch):
    """The gradients of the tied weight by its first use and by its last, by hand."""
    own = {name: p.detach() for name, p in net.named_parameters()}
    first, last = (own["0.weight"].clone().requires_grad_() for _ in range(2))
    h = torch.tanh(batch[0] @ first.T + own["0.bias"])
    h = torch.tanh(h @ own["2.weight"].T + own["2.bias"]) @ last
    return torch.autograd.grad(F.mse_loss(h @ own["5.weight"].T + own["5.bias"], batch[1]), (first, last))


def test_a_tied_use_is_missing():
    """Two stages on two ranks that do not add their gradients of one weight."""
    net, model, _, batch = made(tied=True)
    grads = loop(tied=True)
    early, late = (leaf.stage for leaf in model.tied_uses[0])
    first, last = uses(net, batch)
    assert verdict(grads | {"0.weight": first}, tied=True) == [f"the use in stage {late} is missing"]
    assert set(verdict(grads | {"0.weight": first, "4.first.weight": last}, tied=True)) == {
        f"the use in stage {late} is missing",
        f"the use in stage {early} is missing",
    }
    assert verdict(grads | {"0.weight": grads["0.weight"] + last}, tied=True) == [
        f"the use in stage {late} counts twice"
    ]
    assert judged(grads, tied=True).max_error < 1e-15


def test_two_mistakes_are_told_apart():
    grads = loop()
    grads |= {name: 4 * grad for name, grad in grads.items() if name.startswith("0.")}
    grads["2.weight"] = torch.randn(5, 5, dtype=torch.float64)
    with pytest.raises(fpipe.GradientMismatch) as caught:
        judged(grads, microbatches=4)
    first, scaled, names, odd, name = str(caught.value).splitlines()
    assert first == "3 of 6 gradients are not those of plain autograd."
    assert (scaled[:4], names) == ("4 x:", "  0.weight, 0.bias")
    assert re.fullmatch(r"[\d.]+ x the norm, its cosine with the right one -?[\d.]+", odd)
    assert name == "  2.weight"


def exchanged(grad: torch.Tensor, dim: int, first: slice, second: slice) -> torch.Tensor:
    rows = torch.arange(grad.shape[dim])
    rows[first], rows[second] = rows[second].clone(), rows[first].clone()
    return grad.index_select(dim, rows)


SMALL: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "bfloat16": (lambda grad: grad.bfloat16().float(), "as if rounded to bfloat16"),
    "float8": (lambda grad: grad.to(torch.float8_e5m2).float(), "as if rounded to float8_e5m2"),
    "halves": (lambda grad: exchanged(grad, 0, slice(16), slice(16, 32)), "rows 0-15 and 16-31 are exchanged"),
    "two rows": (lambda grad: exchanged(grad, 0, slice(3, 4), slice(7, 8)), "rows 3 and 7 are exchanged"),
    "columns": (lambda grad: exchanged(grad, 1, slice(2), slice(4, 6)), "columns 0-1 and 4-5 are exchanged"),
    "an order": (lambda grad: grad.roll(1, 0), "rows 0-31 are in another order"),
    "transposed": (lambda grad: grad.T.contiguous(), "transposed"),
    "noise": (lambda grad: grad + 1e-3 * grad.roll(5, 1), "off by 0.1 % of its norm"),
    "a row": (lambda grad: grad * (1 + 0.01 * (torch.arange(32) == 5)[:, None]), "off by 0.24 %"),
}


@pytest.mark.parametrize("case", SMALL)
def test_a_small_or_orderly_difference_is_described(case: str):
    """These read "of 1 x the norm, its cosine with the right one 1"."""
    change, words = SMALL[case]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    batch = torch.randn(12, 32), torch.randn(12, 1)
    right = fpipe.join_params(model, fpipe.reference(model, params, batch).grads)
    with pytest.raises(fpipe.GradientMismatch) as error:
        fpipe.compare_grads(model, params, batch, right | {"0.weight": change(right["0.weight"])})
    first, difference, name = str(error.value).splitlines()
    assert (first, name) == ("1 of 4 gradients are not those of plain autograd.", "  0.weight")
    assert difference.startswith(words)
    assert ("in row 5 alone" in difference) == (case == "a row")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((1, 0, 1, 0), "microbatches 1 and 3 of 4 are missing"),
        ((0, 0, 0, 1), "microbatches 0, 1 and 2 of 4 are missing"),
        ((2, 1, 1, 2), "microbatches 0 and 3 of 4 count twice"),
        ((1, 0, 2, 1), "microbatch 1 of 4 is missing, and microbatch 2 counts twice"),
        ((1, 3, 1, 0), "the 4 microbatches count 1, 3, 1, 0 times"),
    ],
)
def test_several_microbatches_that_count_wrongly_are_named(counts: tuple[int, ...], words: str):
    assert verdict(loop(counts)) == [words]
    scaled = f"{words}, and all is 4 x: summed over the 4 microbatches or 4 ranks instead of averaged?"
    assert verdict(loop(counts, scale=4.0), microbatches=4) == [scaled]


WRAPPERS = {
    "DistributedDataParallel": lambda name: f"module.{name}",
    "compile": lambda name: f"_orig_mod.{name}",
    "compile of a child": lambda name: name.replace("0.", "0._orig_mod."),
    "both": lambda name: f"module._orig_mod.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}",
    "checkpoint": lambda name: f"_checkpoint_wrapped_module.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_wrappers_are_left_out(wrapper: str):
    _, model, params, batch = made()
    grads = {WRAPPERS[wrapper](name): grad for name, grad in loop().items()}
    assert judged(grads).bitwise
    after = {WRAPPERS[wrapper](name): p for name, p in fpipe.join_params(model, params).items()}
    how = {"rule": "SGD", "lr": 0.0}
    assert fpipe.compare_step(model, params, batch, after, grads=grads, microbatches=4, **how).bitwise
    assert fpipe.compare_step(model, params, batch, [after, after], **how).bitwise
    with pytest.raises(ValueError, match=r"no parameter 'module.9.bias'|nothing to compare the gradient of module"):
        judged(grads | {"module.9.bias": torch.ones(5)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_hides_no_missing_microbatch(dtype: torch.dtype):
    """A gradient without one of many microbatches differs by less than a rounding of bfloat16 may."""
    grads = {name: grad.to(dtype) for name, grad in loop().items()}
    assert not judged(grads, microbatches=4).bitwise
    grads = {name: grad.to(dtype) for name, grad in loop((1, 0, 1, 1)).items()}
    assert verdict(grads, microbatches=4) == ["microbatch 1 of 4 is missing"]


def test_one_tree_a_stage_and_a_pytree_of_ones_own():
    _, model, params, batch = made()
    right = fpipe.reference(model, params, batch)
    assert fpipe.compare_grads(model, params, batch, right.grads).bitwise
    whole = {"a": torch.eye(3), "b": [torch.ones(3)]}
    pair = torch.randn(4, 3), torch.randn(4, 3)
    loss_model, own = fpipe.from_loss(
        lambda p, b: F.mse_loss(fpipe.boundary(b[0] @ p["a"]) + p["b"][0], b[1]), whole, pair
    )
    grads = fpipe.join_params(loss_model, fpipe.reference(loss_model, own, pair).grads)
    assert fpipe.compare_grads(loss_model, own, pair, grads).bitwise
    assert fpipe.compare_grads(loss_model, own, pair, {"a": grads["a"], "b.0": grads["b"][0]}).bitwise
    with pytest.raises(fpipe.GradientMismatch, match=r"3 x: .*\n  b\.0$"):
        fpipe.compare_grads(loss_model, own, pair, {"a": grads["a"], "b": [3 * grads["b"][0]]})


def test_count_state_keys_and_frozen_leaves():
    """Whatever a step takes, the reference takes."""
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))
    how = {"loss": lambda y, t: ((y - t).square().sum(), len(y)), "reduction": "count"}
    model, params, state = fpipe.from_sequential(net, stages=2, **how)
    model = fpipe.freeze(model, "0.weight")
    batch = torch.randn(8, 5), torch.randn(8, 1)
    more = {"state": state, "key": 3}
    right = fpipe.reference(model, params, batch, microbatches=2, **more)
    report = fpipe.compare_grads(model, params, batch, right.grads, microbatches=2, **more)
    assert report.bitwise
    assert len(report.leaves) == 5
    noted = []
    half = fpipe.reference(model, params, (batch[0][:4], batch[1][:4]), **more).grads
    for one, other in zip(fpipe.tree.leaves(right.grads), fpipe.tree.leaves(half), strict=True):
        noted.append(None if one is None else one - other / 2)
    lost = fpipe.tree.unflatten(fpipe.tree.flatten(right.grads)[1], noted)
    with pytest.raises(fpipe.GradientMismatch, match="microbatch 0 of 2 is missing"):
        fpipe.compare_grads(model, params, batch, lost, microbatches=2, **more)


def with_norm():
    """A net that has state, which is asked for."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, params, _ = fpipe.from_sequential(net, stages=1, loss=F.mse_loss)
    return fpipe.compare_grads(model, params, (torch.randn(4, 4), torch.randn(4, 4)), dict(net.named_parameters()))


def without_bias():
    return {name: grad for name, grad in loop().items() if name != "2.bias"}


test_refusals = refusals(
    globals(),
    """
judged(loop() | {"9.bias": torch.ones(5)})
    ValueError: there is no parameter '9.bias' in the model, which has 0.weight,
judged(without_bias())
    ValueError: there is no gradient of '2.bias', and plain autograd has one
judged(without_bias() | {"2.bias": torch.ones(3)})
    ValueError: the gradient of '2.bias' has the shape (3,), the parameter (5,)
judged(without_bias() | {"2.bias": 1.0})
    ValueError: the gradient of '2.bias' is a float; expected a tensor
judged(without_bias() | {"2.bias": torch.ones(5) * 1j})
    ValueError: the gradient of '2.bias' is a tensor of torch.complex64
judged(without_bias() | {"2.bias": torch.arange(5)})
    ValueError: the gradient of '2.bias' is a tensor of torch.int64
judged([*loop().values()])
    ValueError: grads is a dict of p.grad by name, or one tree for each of the 3 stages; found 6 in a list.
judged(nn.Linear(1, 1))
    ValueError: grads is a dict of p.grad by name, or one tree for each of the 3 stages; found Linear.
judged(loop(), microbatches=0)
    ValueError: microbatches is a whole number, at least 1; found 0.
with_norm()
    ValueError: hand it in as compare_grads(..., state=...)
judged(loop() | {"0.bias": torch.full((5,), torch.nan)})
    GradientMismatch: 1 of 6 gradients are not those of plain autograd. NaN or infinite numbers 0.bias
""",
)


@given(st.data())
def test_a_mistake_drawn_at_random_is_named(data):
    """Any layers, any mistake: microbatches are counted as one likes, or a scale is forgotten."""
    widths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    m = data.draw(st.sampled_from([2, 3, 4]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    net = nn.Sequential(*layers).double()
    model, params, _ = fpipe.from_sequential(net, stages=1, loss=F.mse_loss)
    batch = (torch.randn(3 * m, widths[0]).double(), torch.randn(3 * m, widths[-1]).double())
    index, times = data.draw(st.integers(0, m - 1)), data.draw(st.sampled_from([0, 1, 2]))
    scale = data.draw(st.sampled_from([1.0, float(m), 1.0 / m, 16.0]))
    counts = [times if at == index else 1 for at in range(m)]
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for count, inputs, target in zip(counts, *(half.chunk(m) for half in batch), strict=True):
        grads = torch.autograd.grad(F.mse_loss(net(inputs), target) / m, [*net.parameters()])
        for name, grad in zip(total, grads, strict=True):
            total[name] += count * scale * grad
    if (times, scale) == (1, 1.0):
        assert fpipe.compare_grads(model, params, batch, total, microbatches=m).bitwise
        return
    with pytest.raises(fpipe.GradientMismatch) as caught:
        fpipe.compare_grads(model, params, batch, total, microbatches=m)
    said = str(caught.value).splitlines()
    assert len(said) == 3, said
    assert (f"microbatch {index} of {m} {'is missing' if times == 0 else 'counts twice'}" in said[1]) == (times != 1)
    shown = f"{scale:g} x: " if scale > 1 else f"1/{m} x: "
    assert (shown in said[1]) == (scale != 1.0)
