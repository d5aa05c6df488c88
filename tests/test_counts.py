"""Losses may count constants, sizes and sums of masks; their mean over microbatches equals plain autograd."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.toys import merged

CLOSED_OVER = torch.tensor(4)
COUNTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a tensor": lambda x, error: torch.tensor(4),
    "a tensor of floats": lambda x, error: torch.tensor(2.5),
    "a tensor closed over": lambda x, error: CLOSED_OVER,
    "a number": lambda x, error: 4,
    "a float": lambda x, error: 0.5,
    "rows": lambda x, error: error.shape[0],
    "elements": lambda x, error: error.numel(),
    "a share of them": lambda x, error: error.numel() / 2,
    "a tensor of a size": lambda x, error: torch.tensor(error.shape[1]),
    "made like a tensor": lambda x, error: error.new_tensor(3),
    "of the target": lambda x, error: (error > 0).sum() + 1,
    "of the inputs": lambda x, error: (x > 0).sum(),
    "of the inputs, as a float": lambda x, error: (x > 0).sum().float(),
    "of one column": lambda x, error: (x > 0).sum(0)[1] + 1,
    "of literals": lambda x, error: (torch.tensor([1, 0, 2]) > 0).sum(),
}


def counting_loss(count: Callable[[Any, Tensor], Any], counts_first: bool = False) -> Any:
    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        x, target = batch
        early_count = count(x, x) if counts_first else None
        error = fpipe.boundary(torch.tanh(x @ params["w"])) @ params["v"] - target
        return error.square().sum(), early_count if counts_first else count(x, error)

    return loss_fn


def loss_and_grads_by_hand(
    loss_fn: Any, params: dict[str, Tensor], batch: tuple[Tensor, Tensor], microbatches: int
) -> Any:
    """Sum the totals and counts of microbatches, and divide once at the end."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    parts = zip(*(half.tensor_split(microbatches) for half in batch), strict=True)
    totals, counts = zip(*(loss_fn(leaves, part) for part in parts), strict=True)
    for total in totals:
        total.backward()
    divisor = sum(counts[1:], counts[0])
    return sum(totals[1:], totals[0]).detach() / divisor, {name: leaf.grad / divisor for name, leaf in leaves.items()}


# Counts computed before the boundary go on to the next stage: tensors, numbers and floats, constant or not.
BEFORE_BOUNDARY = ("a tensor", "a number", "a float", "rows", "of the target", "of the inputs, as a float")


@pytest.mark.parametrize(
    ("name", "counts_first"), [*((name, False) for name in COUNTS), *((name, True) for name in BEFORE_BOUNDARY)]
)
def test_means_over_any_count_equal_plain_autograd(name: str, counts_first: bool):
    """Used to fail for a constant tensor, by an IndexError and then by an output that no traced step could join."""
    torch.manual_seed(0)
    params, batch = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}, (torch.randn(7, 4), torch.randn(7, 4))
    loss_fn = counting_loss(COUNTS[name], counts_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, stage_params = fpipe.from_loss(loss_fn, params, batch, reduction="count")
        program = merged(model, 3, fpipe.schedules.one_f_one_b(2))
        result = fpipe.build(program, model)(stage_params, batch)
    loss, grads = loss_and_grads_by_hand(loss_fn, params, batch, 3)
    assert torch.equal(result.loss, loss)
    actual_grads = fpipe.join_params(model, result.grads)
    assert all(torch.equal(actual_grads[name], grad) for name, grad in grads.items())


EXPECTED = "the count of (total, count) is a number or a 0-d tensor of one, found "
INVALID_COUNTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nothing": (lambda y: None, EXPECTED + "NoneType."),
    "a word": (lambda y: "4", EXPECTED + "str."),
    "True": (lambda y: True, EXPECTED + "bool."),
    "a vector of one": (
        lambda y: y.numel() * torch.ones(1),
        EXPECTED + "shape (1,); say how many there are, as by",
    ),
    "a truth": (lambda y: (y > 0).any(), EXPECTED + "True or False; say how many there are, as by .sum()."),
    "one for each": (lambda y: (y > 0).sum(1), EXPECTED + "shape ("),
    "what has a gradient": (lambda y: y.square().sum(), "has a gradient, which nobody would take: .detach() it."),
}


@pytest.mark.parametrize(("count", "sentence"), INVALID_COUNTS.values(), ids=INVALID_COUNTS.keys())
def test_invalid_counts_are_refused(count: Callable[[Tensor], Any], sentence: str):
    """Used to be accepted or raise errors of Python: a boolean count made the loss m times too large, a vector gave a
    loss of its shape, and a gradient through the count was lost."""
    params, batch = {"w": torch.randn(4, 4)}, (torch.randn(6, 4), torch.randn(6, 4))
    model = fpipe.from_functions(
        [lambda p, x: x @ p["w"]], loss=lambda y, t: ((y - t).square().sum(), count(y)), reduction="count"
    )
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        fpipe.reference(model, (params,), batch)
    for trace in (True, False):
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            fpipe.build(fpipe.split(3)(fpipe.program(model)), model, trace=trace)((params,), batch)
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        fpipe.from_loss(
            counting_loss(lambda x, error: count(error)), params | {"v": params["w"]}, batch, reduction="count"
        )


def test_equal_numbers_in_outputs_keep_the_step_traced():
    """Used to compare numbers where only shapes are known, so that every stage ran under autograd."""
    model = fpipe.from_functions(
        [lambda p, x: (x @ p["w"], torch.tensor(4))], loss=lambda y, t: (y[0] - t).square().mean()
    )
    params, batch = ({"w": torch.randn(4, 4)},), (torch.randn(6, 4), torch.randn(6, 4))
    program = fpipe.chain(fpipe.split(3), fpipe.merge())(fpipe.program(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fpipe.build(program, model)(params, batch).outputs[1] == 4
        assert fpipe.verify(program, model, params, batch).bitwise
