"""Batches are split into microbatches inside a program, and results are merged again or stay a stream."""

import re
from collections import UserDict
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

import fpipe
from tests.refusals import refusals

TRACED = pytest.mark.parametrize("trace", [True, False])


def linear(p, x):
    return torch.tanh(x @ p["w"])


def mean(y, t):
    return (y - t).square().mean()


def params(stages=2, width=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple({"w": torch.randn(width, width, generator=generator, dtype=dtype)} for _ in range(stages))


def batch(rows=7, width=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, width, generator=generator, dtype=dtype), torch.randn(
        rows, width, generator=generator, dtype=dtype
    )


# Sizes


@TRACED
def test_steps_are_lowered_again_for_other_shapes(trace: bool):
    model = fpipe.from_functions([linear] * 2, mean)
    pipeline = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge(), fpipe.communicate())
    step = fpipe.build(pipeline(fpipe.program(model)), model, trace=trace)
    for rows in (10, 7, 10):
        result, expected = step(params(), batch(rows)), fpipe.reference(model, params(), batch(rows), microbatches=4)
        assert torch.equal(result.grads[0]["w"], expected.grads[0]["w"])


# Specs


@TRACED
@pytest.mark.parametrize(
    "spec",
    [
        (fpipe.Replicate(), fpipe.Chunk(1), fpipe.Replicate()),
        (fpipe.Replicate, fpipe.Chunk(-2), None),
        (_Replicate, TensorChunkSpec(1), _Replicate()),
    ],
)
def test_a_prefix_tree_specifies_how_each_leaf_is_split(spec, trace: bool):
    def first_stage(p, x):
        scale, values, number = x
        assert number == 42
        return torch.einsum("anb,bc->nac", values * scale, p["w"])

    model = fpipe.from_functions([first_stage, lambda p, x: torch.tanh(x @ p["w"])], mean)
    inputs = (torch.tensor(0.5), torch.randn(3, 12, 4), 42)
    target = torch.randn(12, 3, 4)
    program = fpipe.chain(fpipe.split(5, (spec, None)), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    assert fpipe.Program.parse(str(program)) == program
    stage_params = params(width=4)
    assert fpipe.verify(program, model, stage_params, (inputs, target)).bitwise
    result = fpipe.build(program, model, trace=trace)(stage_params, (inputs, target))
    assert result.outputs.shape == (12, 3, 4)


def replicate_tables(leaf):
    return fpipe.Replicate() if leaf.shape == (9,) else fpipe.Chunk()


def longest(parts):
    return max(parts, key=len)


fpipe.register_spec("tables whole", replicate_tables)
fpipe.register_spec("longest", longest)
ADDED = fpipe.register_spec("added", _CustomReducer(torch.tensor(0.0), torch.add))


@TRACED
def test_registered_functions_are_specs(trace: bool):
    model = fpipe.from_functions([lambda p, x: x["x"] @ p["w"] + x["table"].sum(), linear], mean)
    x, t = batch(7)
    program = fpipe.chain(fpipe.split(3, replicate_tables), fpipe.merge(longest))(fpipe.program(model))
    parsed = fpipe.Program.parse(str(program))
    assert parsed == program
    result = fpipe.build(parsed, model, trace=trace)(params(), ({"x": x, "table": torch.ones(9)}, t))
    assert result.outputs.shape == (3, 3)


@TRACED
def test_merge_takes_reducers_of_torch(trace: bool):
    model = fpipe.from_functions([linear], lambda y, t: (mean(y, t), y.sum()), aux=True)
    program = fpipe.chain(fpipe.split(3), fpipe.merge(aux=ADDED))(fpipe.program(model))
    result = fpipe.build(program, model, trace=trace)(params(1), batch())
    assert torch.allclose(result.aux, result.outputs.sum())


@TRACED
def test_outputs_are_joined_by_kind(trace: bool):
    """Tensors are joined along rows, 0-d tensors averaged by rows; other leaves must be equal."""

    def stage(p, x):
        return {"y": x @ p["w"], "norm": x.square().mean(), "name": "logits", "none": None, "empty": {}}

    model = fpipe.from_functions([stage], lambda y, t: mean(y["y"], t))
    program = fpipe.chain(fpipe.split(size=3, rows=7), fpipe.merge())(fpipe.program(model))
    x, t = batch(7)
    assert fpipe.verify(program, model, params(1), (x, t)).bitwise
    outputs = fpipe.build(program, model, trace=trace)(params(1), (x, t)).outputs
    assert torch.allclose(outputs["y"], x @ params(1)[0]["w"])
    assert torch.allclose(outputs["norm"], x.square().mean())
    assert (outputs["name"], outputs["none"], outputs["empty"]) == ("logits", None, {})


# Microbatches that are cut already


def ragged(lengths=(5, 2, 9), rows=(2, 3, 1), width=3):
    generator = torch.Generator().manual_seed(0)
    sizes = zip(rows, lengths, strict=True)
    return [
        (
            torch.randn(row_count, length, width, generator=generator),
            torch.randn(row_count, length, width, generator=generator),
        )
        for row_count, length in sizes
    ]


@TRACED
def test_consecutive_pipelines_exchange_unmerged_microbatches(trace: bool):
    """The first pipeline hands on outputs per microbatch, and gets gradients per microbatch from the second."""
    all_params, parts = params(4, dtype=torch.float64), [(x.double(), t.double()) for x, t in ragged()]
    full_model = fpipe.from_functions([linear] * 4, mean)
    front_model = fpipe.from_functions([linear] * 2, lambda y, dy: (y * dy).sum(), reduction="sum")
    back_model = fpipe.from_functions([linear] * 2, mean)
    split = fpipe.split(3, presplit=True)
    forward_program = fpipe.chain(split, fpipe.schedules.gpipe(2), fpipe.forward_only())(fpipe.program(front_model))
    back_program = fpipe.chain(split, fpipe.schedules.one_f_one_b(2))(fpipe.program(back_model, input_grads=True))
    front_program = fpipe.chain(split, fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False))(
        fpipe.program(front_model)
    )
    steps = [
        fpipe.build(program, model, trace=trace)
        for program, model in ((forward_program, front_model), (back_program, back_model), (front_program, front_model))
    ]
    inputs, target = zip(*parts, strict=True)
    hidden = steps[0](all_params[:2], (inputs, inputs)).outputs
    back_result = steps[1](all_params[2:], (hidden, target))
    assert fpipe.verify(fpipe.merge(outputs=False)(back_program), back_model, all_params[2:], (hidden, target)).bitwise
    front_result = steps[2](all_params[:2], (inputs, back_result.input_grads))
    full_program = fpipe.chain(split, fpipe.merge(outputs=False))(fpipe.program(full_model))
    expected = fpipe.build(full_program, full_model)(all_params, parts).grads
    sums = [sum(grads[stage]["w"] for grads in back_result.grads) for stage in range(2)]
    for grad, expected_grads in zip(
        [front_result.grads[0]["w"], front_result.grads[1]["w"], *sums], expected, strict=True
    ):
        assert torch.allclose(grad, expected_grads["w"], rtol=1e-10)


# Keywords


class Encoder(nn.Module):
    """An encoder with the signature of transformers: inputs by name, and an optional mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 3)

    def forward(self, input_ids, mask=None, *, scale=1.0):
        x = self.embedding(input_ids) * scale
        return x if mask is None else x.masked_fill(mask[..., None], 0.25)


@pytest.mark.crossed
@TRACED
@pytest.mark.parametrize("policy", [(), (fpipe.checkpoint(grain="layer"), fpipe.split_backward())])
@pytest.mark.parametrize("keywords", [{"scale": 0.5}, {"mask": torch.arange(7) % 3 == 0}, {"mask": None}])
def test_a_dict_of_inputs_goes_to_the_first_child_as_keywords(keywords, policy, trace: bool):
    """Used to need a wrapper module that unpacked the dict and changed the names of parameters."""
    net = nn.Sequential(Encoder(), nn.Tanh(), nn.Linear(3, 3))
    model, stage_params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss, keywords=True)
    inputs, target = {"input_ids": torch.randint(0, 11, (7,)), **keywords}, batch(7)[1]
    program = fpipe.chain(fpipe.split(3), *policy, fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    result = fpipe.build(program, model, trace=trace)(stage_params, (inputs, target))
    for rows in torch.arange(7).tensor_split(3):
        part = {name: leaf[rows] if isinstance(leaf, torch.Tensor) else leaf for name, leaf in inputs.items()}
        loss = nn.functional.mse_loss(net[2](net[1](net[0](**part))), target[rows])
        (loss * (len(rows) / 7)).backward()
    grads = fpipe.join_params(model, result.grads)
    assert all(torch.equal(grads[name], leaf.grad) for name, leaf in net.named_parameters())
    assert fpipe.verify(program, model, stage_params, (inputs, target)).bitwise


def test_inputs_without_keywords_are_refused():
    net = nn.Sequential(fpipe.Stash("all"), Encoder(), fpipe.Pop("all", lambda x, inputs: x + inputs["more"]))
    model, stage_params, _ = fpipe.from_sequential(net, stages=1, loss=nn.functional.mse_loss, keywords=True)
    step = fpipe.build(fpipe.program(model), model)
    sentence = "with keywords=True the inputs are a dict of what Encoder.forward takes by name, found Tensor."
    with pytest.raises(TypeError, match=re.escape(sentence)):
        step(stage_params, (torch.randint(0, 11, (7,)), batch(7)[1]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        step(stage_params, ({"input_ids": torch.randint(0, 11, (7,)), "more": torch.ones(7, 3)}, batch(7)[1]))


@TRACED
def test_presplit_microbatches_may_have_leaves_of_other_rows(trace: bool):
    """Used to refuse packed sequences, whose cu_seqlens have other lengths than the rows."""

    def packed(p, x):
        borders = x["cu_seqlens"]
        ends = torch.searchsorted(borders[1:], torch.arange(len(x["tokens"])), right=True)
        sums = torch.zeros(len(borders) - 1, 3).index_add(0, ends, torch.tanh(x["tokens"] @ p["w"]))
        return sums[ends]

    model = fpipe.from_functions([packed, linear], mean)
    (x, t), lengths = batch(9), ([2, 1], [3], [1, 1, 1])
    microbatches, start = [], 0
    for sequence_lengths in lengths:
        rows = slice(start, start := start + sum(sequence_lengths))
        borders = torch.tensor([0, *torch.tensor(sequence_lengths).cumsum(0)])
        microbatches.append(({"tokens": x[rows], "cu_seqlens": borders}, t[rows]))
    program = fpipe.chain(fpipe.split(3, presplit=True), fpipe.merge(outputs="stream"))(fpipe.program(model))
    result = fpipe.build(program, model, trace=trace)(params(), microbatches)
    packed_batch = {"tokens": x, "cu_seqlens": torch.tensor([0, *torch.tensor([*chain(*lengths)]).cumsum(0)])}
    leaf_params = tuple({"w": stage["w"].clone().requires_grad_()} for stage in params())
    mean(linear(leaf_params[1], packed(leaf_params[0], packed_batch)), t).backward()
    for stage, grads in zip(leaf_params, result.grads, strict=True):
        torch.testing.assert_close(grads["w"], stage["w"].grad)
    assert fpipe.verify(program, model, params(), microbatches).bitwise


# Refusals


def run(pipeline, step_batch, model=None):
    model = model or fpipe.from_functions([linear] * 2, mean)
    return fpipe.build(pipeline(fpipe.program(model)), model)(params(), step_batch)


def shaped(build_output):
    """Return a model whose outputs are built differently in the first microbatch."""
    return fpipe.from_functions(
        [linear, lambda p, x, *, microbatch: build_output(x @ p["w"], microbatch == 0)], lambda y, t: mean(y[0], t)
    )


@dataclass
class Masks:
    layers: list[Any]


class OwnDict(dict[str, Any]):
    pass


X, T = batch(6)
ATTRIBUTES, USER_DICT = SimpleNamespace(mask=X), UserDict(t=T)
PRESPLIT = fpipe.split(3, presplit=True)


test_refusals = refusals(
    globals(),
    """
run(fpipe.split(3), ({"a": torch.zeros(12, 3), "b": torch.zeros(6)}, torch.zeros(12, 3)))
    ValueError: inputs['a'] has 12 rows, inputs['b'] has 6. Say Replicate() for a leaf that goes whole, Chunk(dim)
run(fpipe.split(3), (X[:2], T[:2]))
    ValueError: 2 rows cannot fill 3 microbatches; use split(3, rows=2, allow_fewer=True).
fpipe.split(4, rows=3)
    ValueError: 3 rows cannot fill 4 microbatches; use at most 3, or allow_fewer=True.
fpipe.split(3, allow_fewer=True)
    ValueError: allow_fewer needs rows=, the number of rows of a batch.
run(fpipe.split(size=3, rows=6), batch(7))
    ValueError: 7 rows in microbatches of 3 make 3, not 2.
run(fpipe.split(3, (fpipe.Chunk(2), None)), (X, T))
    ValueError: inputs has no dim 2 to cut along: its shape is (6, 3). Say another Chunk.
# The error used to suggest Replicate() alone, with which each microbatch reads the borders of the whole batch.
run(fpipe.split(3), ({"x": X, "cu_seqlens": torch.tensor([0, 4, 6])}, T))
    ValueError: a leaf like cu_seqlens needs split(m, presplit=
run(PRESPLIT, [(X, T), (X[:0], T[:0]), (X, T)])
    ValueError: inputs of microbatch 1 has 0 rows; a microbatch has at least one.
run(fpipe.split(3), (X[:0], T[:0]))
    ValueError: inputs has 0 rows; a microbatch has at least one.
run(fpipe.split(3), [(X, T)] * 3)
    ValueError: a batch is a pair (inputs, target), found list. What is cut already goes to split(m, presplit=True).
run(PRESPLIT, [(X, T)] * 2)
    ValueError: the batch has 2 microbatches, the program has 3.
run(PRESPLIT, ([X] * 3, [T] * 2))
    ValueError: inputs has 3 microbatches, target has 2; none of them is left out.
run(PRESPLIT, (X, T))
    ValueError: inputs is a list of 3 microbatches, since they are cut already (presplit=True); found Tensor.
run(PRESPLIT, [(X, T), X, (X, T)])
    ValueError: microbatch 1 is a pair (inputs, target), found Tensor.
# Leaves that are no pytrees used to be handed whole to each microbatch, silently.
run(fpipe.split(3), ({"x": X, "more": ATTRIBUTES}, T))
    TypeError: inputs['more'] is a SimpleNamespace, no pytree, and holds a tensor (.mask). Hand in a dict, or
    call register_pytree_node.
run(fpipe.split(3), ((X, Masks([{"left": X}])), T))
    TypeError: inputs[1] is a Masks, no pytree, and holds a tensor (.layers[0]['left']). Hand in a dict, or call
run(fpipe.split(3), (X, OwnDict(t=T)))
    TypeError: target is a OwnDict, no pytree, and holds a tensor (['t']). Hand in a dict, or call
run(PRESPLIT, [(X, T), (X, USER_DICT), (X, T)])
    TypeError: target[1] is a UserDict, no pytree, and holds a tensor (.data['t']). Hand in a dict, or call
fpipe.reference(fpipe.from_functions([linear] * 2, mean), params(), ({"x": X, "more": Masks([X])}, T))
    TypeError: inputs['more'] is a Masks, no pytree, and holds a tensor (.layers[0]). Hand in a dict, or call
# Its gradient used to be lost silently.
run(fpipe.split(3), (X.clone().requires_grad_(), T))
    ValueError: inputs requires a gradient, which would be lost: say fpipe.program(model, input_grads=True), or hand
    in its .detach().
run(fpipe.chain(fpipe.split(2), fpipe.merge()), ({"x": X, "soft": nn.Parameter(X)}, T))
    ValueError: inputs['soft'] requires a gradient
run(fpipe.chain(fpipe.split(2), fpipe.merge()), (X, {"teacher": T.clone().requires_grad_()}))
    ValueError: target['teacher'] requires a gradient, which would be lost: hand in its .detach().
fpipe.reference(fpipe.from_functions([linear] * 2, mean), params(), (X.clone().requires_grad_(), T))
    ValueError: inputs requires a gradient, which would be lost: say input_grads=True, or hand in
fpipe.split(3, rows=6, presplit=True)
    ValueError: presplit=True goes without size= and rows=.
fpipe.split(3, mean)
    ValueError: a function in a program needs a name: fpipe.register_spec(name, mean).
fpipe.register_spec("rows", fpipe.Chunk(1))
    ValueError: only functions and reducers need a name, found Chunk(dim=1).
fpipe.register_spec("longest", mean)
    ValueError: another spec is called 'longest' already; take another name.
fpipe.split(2, (1, 2, 3))
    ValueError: a tuple of specs has two, for inputs and target; found (1, 2, 3).
run(fpipe.split(3, ({"a": fpipe.Chunk()}, None)), (X, T))
    ValueError: the spec has a dict with 'a' where inputs is a Tensor; a spec says one thing of all, or is built
    like it.
run(fpipe.split(3, [None, None]), (X, T))
    ValueError: the spec has a list of 2 where the batch is a tuple of 2;
run(fpipe.chain(fpipe.split(3), fpipe.merge({"y": fpipe.Sum()})), (X, T))
    ValueError: the spec has a dict with 'y' where outputs is a Tensor;
run(fpipe.chain(fpipe.split(2), fpipe.merge()), (X, T), shaped(lambda y, first: [y] if first else (y,)))
    ValueError: outputs is a list of 1 in microbatch 0 and a tuple of 1 in microbatch 1; all must have one structure.
run(fpipe.chain(fpipe.split(2), fpipe.merge()), (X, T), shaped(lambda y, first: (y, {"no": {}}) if first else (y, {})))
    ValueError: outputs[1] is a dict with 'no' in microbatch 0 and a dict with nothing in microbatch 1; all must
run(fpipe.chain(fpipe.split(2), fpipe.merge()), (X, T), shaped(lambda y, first: (y, y) if first else (y,)))
    ValueError: outputs[1] is in only one of microbatches 0 and 1; all must have one structure.
run(fpipe.chain(fpipe.split(3), fpipe.merge(fpipe.Sum())), batch(7))
    ValueError: outputs cannot be joined by Sum(), which adds its parts: they are (3, 3), (2, 3), (2, 3).
fpipe.transforms.specs.spec_of("Chunk(9)")
    ValueError: 'Chunk(9)' is not a spec of Chunk(dim=0) and Replicate().
fpipe.chain(fpipe.split(2), fpipe.merge(), fpipe.merge(losses=True))(fpipe.program(1))
    ProgramError: losses are merged already; say losses=True in the first merge().
run(lambda program: fpipe.Program.parse(str(fpipe.chain(fpipe.split(3), fpipe.merge(longest))(program))
.replace("longest", "shortest")), (X, T))
    ValueError: no spec is called 'shortest'; add it by fpipe.register_spec.
run(fpipe.chain(PRESPLIT, fpipe.merge()), ragged())
    ValueError: outputs cannot be joined along dim 0: its parts have shapes (2, 5, 3), (3, 2, 3), (1, 9, 3).
run(fpipe.chain(fpipe.split(2), fpipe.merge()), (X, T), fpipe.from_functions([linear, lambda p, x,
*, microbatch: {"y": x, "n": 4 - 2 * microbatch}], lambda y, t: mean(y["y"], t)))
    ValueError: outputs['n'] is 4 in microbatch 0 and 2 in microbatch 1: what has no rows must be equal in all. Say
    Sum(), or a function of the parts.
""",
)
