"""What a loss counts: constants, sizes, sums of masks; the mean over all microbatches is that of plain autograd."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.toys import merged

HELD = torch.tensor(4)
COUNTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a tensor": lambda x, error: torch.tensor(4),
    "a tensor of floats": lambda x, error: torch.tensor(2.5),
    "a tensor closed over": lambda x, error: HELD,
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


def counting(count: Callable[[Any, Tensor], Any], early: bool = False) -> Any:
    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        x, target = batch
        found = count(x, x) if early else None
        error = fpipe.boundary(torch.tanh(x @ params["w"])) @ params["v"] - target
        return error.square().sum(), found if early else count(x, error)

    return loss_fn


def by_hand(loss_fn: Any, params: dict[str, Tensor], batch: tuple[Tensor, Tensor], microbatches: int) -> Any:
    """Totals and counts of the microbatches, divided once at the end."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    parts = zip(*(half.tensor_split(microbatches) for half in batch), strict=True)
    totals, counts = zip(*(loss_fn(leaves, part) for part in parts), strict=True)
    for total in totals:
        total.backward()
    divisor = sum(counts[1:], counts[0])
    return sum(totals[1:], totals[0]).detach() / divisor, {name: leaf.grad / divisor for name, leaf in leaves.items()}


# What is counted before the mark goes on to the next stage: tensors, numbers and floats, constant or not.
EARLY = ("a tensor", "a number", "a float", "rows", "of the target", "of the inputs, as a float")


@pytest.mark.parametrize(("name", "early"), [*((name, False) for name in COUNTS), *((name, True) for name in EARLY)])
def test_whatever_it_counts_the_mean_is_that_of_plain_autograd(name: str, early: bool):
    """A constant tensor was an IndexError, and then an output that no traced step could join; the elements of a mask
    among the inputs were one that differs from microbatch to microbatch."""
    torch.manual_seed(0)
    params, batch = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}, (torch.randn(7, 4), torch.randn(7, 4))
    loss_fn = counting(COUNTS[name], early)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, own = fpipe.from_loss(loss_fn, params, batch, reduction="count")
        program = merged(model, 3, fpipe.schedules.one_f_one_b(2))
        found = fpipe.build(program, model)(own, batch)
    loss, grads = by_hand(loss_fn, params, batch, 3)
    assert torch.equal(found.loss, loss)
    whole = fpipe.join_params(model, found.grads)
    assert all(torch.equal(whole[name], grad) for name, grad in grads.items())


WANTED = "the count of (total, count) is a number or a 0-d tensor of one, found "
NO_COUNTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nothing": (lambda y: None, WANTED + "NoneType."),
    "a word": (lambda y: "4", WANTED + "str."),
    "True": (lambda y: True, WANTED + "bool."),
    "a vector of one": (
        lambda y: y.numel() * torch.ones(1),
        WANTED + "shape (1,); say how many there are, for instance",
    ),
    "a truth": (lambda y: (y > 0).any(), WANTED + "True or False; say how many there are, for instance by .sum()."),
    "one for each": (lambda y: (y > 0).sum(1), WANTED + "shape ("),
    "what has a gradient": (lambda y: y.square().sum(), "has a gradient, which nobody would take: .detach() it."),
}


@pytest.mark.parametrize(("count", "sentence"), NO_COUNTS.values(), ids=NO_COUNTS.keys())
def test_what_is_no_count_is_refused(count: Callable[[Tensor], Any], sentence: str):
    """Truths were added to one, so that the loss was m times too large; a vector of one made a loss of that shape; a
    gradient through the count was lost, and the rest were Python's own errors."""
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
        fpipe.from_loss(counting(lambda x, error: count(error)), params | {"v": params["w"]}, batch, reduction="count")


def test_a_number_in_the_outputs_that_is_the_same_in_all_keeps_the_step_traced():
    """Numbers were compared where there are only shapes, and so every stage ran under autograd."""
    model = fpipe.from_functions(
        [lambda p, x: (x @ p["w"], torch.tensor(4))], loss=lambda y, t: (y[0] - t).square().mean()
    )
    params, batch = ({"w": torch.randn(4, 4)},), (torch.randn(6, 4), torch.randn(6, 4))
    program = fpipe.chain(fpipe.split(3), fpipe.merge())(fpipe.program(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fpipe.build(program, model)(params, batch).outputs[1] == 4
        assert fpipe.verify(program, model, params, batch).bitwise
