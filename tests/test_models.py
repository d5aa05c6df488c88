import functools
import re

import pytest
import torch

from fpipe.model import normalise_inputs
from fpipe.models.from_functions import from_functions


def f(params, x):
    return x


def asks(params, x, *, microbatch):
    return x


def test_functions_become_a_chain():
    model = from_functions([f, asks, torch.add], loss=f)
    assert [stage.forward for stage in model.stages] == [f, asks, torch.add]
    assert [sorted(stage.asks) for stage in model.stages] == [[], ["microbatch"], []]
    assert [stage.name for stage in model.stages] == ["f", "asks", "add"]
    assert (model.inputs, model.ties, model.reduction, model.loss) == (("batch", 0, 1), (), "mean", f)


def test_what_partial_has_filled_in_is_not_asked_for():
    def g(params, x, *, microbatch, key, scale=2):
        return x

    assert from_functions([functools.partial(g, key=3)]).stages[0].asks == {"microbatch"}
    assert from_functions([functools.partial(g, key=3, microbatch=0)]).stages[0].asks == frozenset()


def test_inputs_are_kept_as_said():
    inputs = ("batch", 0, (0, "batch"), (1, 2))
    assert normalise_inputs(inputs, 4) == normalise_inputs(list(inputs), 4) == inputs
    assert normalise_inputs(None, 3) == ("batch", 0, 1)


def test_ties_keep_their_order():
    ties = [[(0, "e"), (3, "e"), (2, "head")], ((1, "a"), (2, "b"))]
    assert from_functions([f] * 4, ties=ties).ties == (((0, "e"), (3, "e"), (2, "head")), ((1, "a"), (2, "b")))


REFUSED = {
    "stages is a whole number, at least 1; found 0.": lambda: from_functions([]),
    "inputs says what each stage takes: 2 entries for 2 stages, found 1.": lambda: normalise_inputs(["batch"], 2),
    "stage 1 takes 1; it can take a stage from 0 to 0, or 'batch'.": lambda: normalise_inputs(["batch", 1], 2),
    "stage 1 takes 'inputs'; it can": lambda: normalise_inputs(["batch", "inputs"], 2),
    "stage 0 takes 1; it can take 'batch'.": lambda: normalise_inputs([1, "batch"], 2),
    "stage 1 takes nothing": lambda: normalise_inputs(["batch", ()], 2),
    "nobody takes the output of stage 1; only the last stage, 2, gives the loss its input.": lambda: normalise_inputs(
        ["batch", 0, 0], 3
    ),
    "stage 1 is a function f(params, x), found int.": lambda: from_functions([f, 3]),
    "stage 0 is a function f(params, x), found a module; use from_sequential.": lambda: from_functions(
        [torch.nn.Tanh()]
    ),
    "stage 0 (<lambda>) takes (x); a stage is f(params, x), its x one pytree and never spread.": lambda: from_functions(
        [lambda x: x]
    ),
    "stage 0 (<lambda>) takes (p, a, b); a stage": lambda: from_functions([lambda p, a, b: a]),
    "stage 0 (<lambda>) asks for 'mask'; a stage can ask for state, key, microbatch and carry, and nothing else.": (
        lambda: from_functions([lambda p, x, *, mask: x])
    ),
    "loss is a function loss(y, target) or None, found str.": lambda: from_functions([f], loss="mse"),
    "reduction is 'mean', 'sum' or 'count', found 'avg'.": lambda: from_functions([f], reduction="avg"),
    "a tie is between leaves of at least two stages, found ((0, 'e'),).": lambda: from_functions(
        [f], ties=[[(0, "e")]]
    ),
    "names stage 2; the stages are 0 to 1.": lambda: from_functions([f, f], ties=[[(0, "e"), (2, "e")]]),
    "names stage 0 twice; inside one stage, use one leaf twice.": lambda: from_functions(
        [f, f], ties=[[(0, "a"), (0, "b"), (1, "a")]]
    ),
    "leaf 'e' of stage 0 is in two ties; put all of its uses in one group.": lambda: from_functions(
        [f] * 3, ties=[[(0, "e"), (1, "e")], [(0, "e"), (2, "e")]]
    ),
    "the tie ((1, 'e'), (0, 'e')) names stage 1 first; the leaf lives in the earliest, 0.": lambda: from_functions(
        [f, f], ties=[[(1, "e"), (0, "e")]]
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_makes_no_model_is_refused(sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        REFUSED[sentence]()
