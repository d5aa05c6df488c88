"""Models of functions: stages in a chain, their inputs, ties and keywords, and wrong models."""

import functools

import torch

from fpipe.meaning.from_functions import from_functions
from fpipe.model import normalise_inputs
from tests.refusals import refusals


def f(params, x):
    return x


def asks(params, x, *, microbatch):
    return x


def test_functions_become_a_chain():
    model = from_functions([f, asks, torch.add], loss=f)
    assert [stage.forward for stage in model.stages] == [f, asks, torch.add]
    assert [sorted(stage.keywords) for stage in model.stages] == [[], ["microbatch"], []]
    assert [stage.name for stage in model.stages] == ["f", "asks", "add"]
    assert (model.inputs, model.ties, model.reduction, model.loss) == (("batch", 0, 1), (), "mean", f)


def test_keywords_filled_by_partial_are_not_asked_for():
    def g(params, x, *, microbatch, key, scale=2):
        return x

    assert from_functions([functools.partial(g, key=3)]).stages[0].keywords == {"microbatch"}
    assert from_functions([functools.partial(g, key=3, microbatch=0)]).stages[0].keywords == frozenset()


def test_inputs_are_normalised_to_tuples():
    inputs = ("batch", 0, (0, "batch"), (1, 2))
    assert normalise_inputs(inputs, 4) == normalise_inputs(list(inputs), 4) == inputs
    assert normalise_inputs(None, 3) == ("batch", 0, 1)


def test_ties_keep_their_order():
    ties = [[(0, "e"), (3, "e"), (2, "head")], ((1, "a"), (2, "b"))]
    assert from_functions([f] * 4, ties=ties).ties == (((0, "e"), (3, "e"), (2, "head")), ((1, "a"), (2, "b")))


def model_with_tie(*leaves):
    return from_functions([f, f], ties=[list(leaves)])


test_wrong_models_are_refused = refusals(
    globals(),
    """
from_functions([])
    ValueError: stages is a whole number, at least 1; found 0.
normalise_inputs(["batch"], 2)
    ValueError: inputs says what each stage takes: 2 entries for 2 stages, found 1.
normalise_inputs(["batch", 1], 2)
    ValueError: stage 1 takes 1; it can take a stage from 0 to 0, or 'batch'.
normalise_inputs(["batch", "inputs"], 2)
    ValueError: stage 1 takes 'inputs'; it can
normalise_inputs([1, "batch"], 2)
    ValueError: stage 0 takes 1; it can take 'batch'.
normalise_inputs(["batch", ()], 2)
    ValueError: stage 1 takes nothing
normalise_inputs(["batch", 0, 0], 3)
    ValueError: nobody takes the output of stage 1; only the last stage, 2, gives the loss its input.
from_functions([f, 3])
    ValueError: stage 1 is a function f(params, x), found int.
from_functions([torch.nn.Tanh()])
    ValueError: stage 0 is a function f(params, x), found a module; use from_sequential.
from_functions([lambda x: x])
    ValueError: stage 0 (<lambda>) takes (x); a stage is f(params, x), its x one pytree and never spread.
from_functions([lambda p, a, b: a])
    ValueError: stage 0 (<lambda>) takes (p, a, b); a stage
from_functions([lambda p, x, *, mask: x])
    ValueError: stage 0 (<lambda>) asks for 'mask'; a stage can ask for state, key, microbatch and carry, and nothing
    else.
model_with_tie((0, "e"))
    ValueError: a tie joins leaves of several stages, found ((0, 'e'),).
model_with_tie((0, "e"), (2, "e"))
    ValueError: names stage 2; the stages are 0 to 1.
model_with_tie((0, "a"), (0, "b"), (1, "a"))
    ValueError: names stage 0 twice; inside one stage, use one leaf twice.
from_functions([f] * 3, ties=[[(0, "e"), (1, "e")], [(0, "e"), (2, "e")]])
    ValueError: leaf 'e' of stage 0 is in two ties; put all of its uses in one group.
model_with_tie((1, "e"), (0, "e"))
    ValueError: the tie ((1, 'e'), (0, 'e')) names stage 1 first; the leaf lives in the earliest, 0.
""",
)
