"""Wrong input raises an error that names the stage at fault; unusual input works."""

import math
import re
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.meaning.meaning import RULES
from fpipe.program import KINDS
from property_tests.strategies import Net, plain_autograd
from tests import toys
from tests.refusals import refusals
from tests.toys import squares

NET = Net(("linear", "mlp"), ("batch", 0))
PIPELINE = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(2), fpipe.merge())
PROGRAM = PIPELINE(fpipe.program(NET.model))
STEP = fpipe.build(PROGRAM, NET.model)
PARAMS, BATCH = NET.params(), NET.batch(6)
EYE = {"w": torch.eye(4), "b": torch.zeros(4)}


def linear(p, x: Tensor) -> Tensor:
    return x @ p["w"] + p["b"]


def step_of(*stages, loss=squares, reduction="mean"):
    model = fpipe.from_functions(stages, loss, reduction=reduction)
    return fpipe.build(fpipe.program(model), model)


def raise_boom(p, x):
    raise KeyError("boom")


ERRORS_IN_STAGES = {
    "another dtype": (
        linear,
        {name: leaf.double() for name, leaf in EYE.items()},
        RuntimeError,
        "dtype",
        "in 1F0: stage 1 (linear), microbatch 0, rank 0",
    ),
    "a missing leaf": (linear, {"w": torch.eye(4)}, KeyError, "'b'", "in 1F0: stage 1 (linear), microbatch 0, rank 0"),
    "an error of its own": (raise_boom, {}, KeyError, "boom", "in 1F0: stage 1 (raise_boom), microbatch 0, rank 0"),
    "no tensor": (
        lambda p, x: 3,
        {},
        TypeError,
        "without any tensor; a stage returns a pytree of tensors.",
        "in 1F0: stage 1",
    ),
}


@pytest.mark.parametrize(
    ("stage", "params", "kind", "message", "note"), ERRORS_IN_STAGES.values(), ids=ERRORS_IN_STAGES.keys()
)
def test_errors_in_stages_keep_their_type_and_name_the_stage(
    stage, params, kind: type[Exception], message: str, note: str
):
    with pytest.raises(kind, match=re.escape(message)) as error_info:
        step_of(linear, stage)((EYE, params), BATCH)
    assert error_info.value.__notes__[0].startswith(note)


def test_an_error_leaves_the_next_step_intact():
    with pytest.raises(ValueError, match="rows"):
        STEP(PARAMS, NET.batch(2))
    assert torch.equal(STEP(PARAMS, BATCH).loss, plain_autograd(NET, PARAMS, BATCH, 3)[0])


def clamp_in_place(p, x: Tensor) -> Tensor:
    return x.relu_() @ p["w"]


def double_by_data(p, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x @ p["w"]


def double_shared_memory(p, x: Tensor) -> Tensor:
    alias = torch.empty(())
    alias.data = x
    alias.mul_(2)
    return x @ p["w"]


def double_param(p, x: Tensor) -> Tensor:
    with torch.no_grad():
        p["w"].mul_(2)
    return x @ p["w"]


@pytest.mark.parametrize("stage", [clamp_in_place, double_by_data, double_shared_memory, double_param])
def test_stages_that_write_their_inputs_are_refused_and_the_inputs_restored(stage):
    """Used to miss writes through .data, which left the batch changed."""
    batch = NET.batch(6)
    message = f"stage 0 ({stage.__name__}) writes what it was given in place; a stage and a loss are pure functions."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        step_of(stage)((EYE,), batch)
    with pytest.raises(RuntimeError, match="in place"):
        fpipe.reference(fpipe.from_functions([stage], squares), (EYE,), batch)
    assert torch.equal(batch[0], BATCH[0])
    assert torch.equal(EYE["w"], torch.eye(4))


def test_a_model_without_parameters_has_a_loss_and_no_gradients():
    net = Net(("plain", "plain"), ("batch", 0))
    result = fpipe.build(PIPELINE(fpipe.program(2)), net.model)(({}, {}), BATCH)
    assert (result.loss.item(), result.grads) == (plain_autograd(net, ({}, {}), BATCH, 3)[0].item(), ({}, {}))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_infinite_numbers_are_bitwise_equal(poison: float):
    inputs = BATCH[0].clone()
    inputs[3, 1] = poison
    assert fpipe.verify(PROGRAM, NET.model, PARAMS, (inputs, BATCH[1])).bitwise


def test_check_finite_keeps_all_bits_and_names_the_microbatch():
    step = fpipe.build(PROGRAM, NET.model, check_finite=True)
    assert torch.equal(step(PARAMS, BATCH).grads[0]["w"], STEP(PARAMS, BATCH).grads[0]["w"])
    inputs = BATCH[0].clone()
    inputs[5] = math.nan
    with pytest.raises(FloatingPointError, match=re.escape("SPLIT(x[0,2]) wrote x[0,2] with NaN or infinite numbers.")):
        step(PARAMS, (inputs, BATCH[1]))


def test_outputs_come_back_in_microbatch_order():
    rows = [["0F2", "0F1", "0F0", "0B1", "0B2", "0B0"], ["1F2", "1F1", "1B1", "1F0", "1B2", "1B0"]]
    table = fpipe.schedules.from_table(rows)
    program = fpipe.chain(fpipe.split(3), table, fpipe.merge(losses=True))(fpipe.program(NET.model))
    result = fpipe.build(program, NET.model)(PARAMS, BATCH)
    expected = fpipe.reference(NET.model, PARAMS, BATCH, microbatches=3)
    assert torch.equal(result.outputs, expected.outputs)
    assert [loss.item() for loss in result.losses] == [loss.item() for loss in expected.losses]


def test_stages_that_draw_without_a_key_are_refused_and_leave_the_generator_alone():
    """Used to be refused by verify alone; a recompute would silently draw other numbers."""
    step = step_of(lambda p, x: torch.nn.functional.dropout(x @ p["w"], 0.5))
    rng_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"stage 0 \(<lambda>\) draws random numbers: hand in key=, an int"):
        step((EYE,), NET.batch(6))
    assert torch.equal(rng_state, torch.get_rng_state())


@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_stages_read_the_parameters_that_an_op_wrote(monkeypatch, runtime: Literal["local", "threads"]):
    """Used to raise an IndexError: views of parameters were prepared before the op had written them."""
    monkeypatch.setitem(KINDS, "DOUBLE", fpipe.Kind("after"))
    monkeypatch.setitem(RULES, "DOUBLE", lambda op, args, context: [{"w": 2 * args[0]["w"]}])
    model = fpipe.from_functions([lambda p, x: (x @ p["w"].t()).tanh()] * 2, squares)
    plain = fpipe.chain(fpipe.split(2), fpipe.merge(), fpipe.schedules.gpipe(2))(fpipe.program(model))
    lines = re.sub(r"\bparams\[0\] x", "params[0,0] x", str(plain)).replace("params[0] res", "params[0,0] res")
    program = fpipe.Program.parse(lines.replace("inputs @ 0\n", "inputs @ 0\nparams[0,0] = DOUBLE[0] params[0] @ 0\n"))
    params, batch = ({"w": torch.randn(4, 4)}, {"w": torch.randn(4, 4)}), (torch.randn(4, 4), torch.randn(4, 4))
    result = fpipe.build(program, model, runtime=runtime)(params, batch)
    expected = fpipe.build(plain, model)(({"w": 2 * params[0]["w"]}, params[1]), batch)
    assert torch.equal(result.loss, expected.loss)
    assert all(
        torch.equal(actual_grads["w"], expected_grads["w"])
        for actual_grads, expected_grads in zip(result.grads, expected.grads, strict=True)
    )


THREE = fpipe.Costs(forward=[1, 1, 1])
NORMED = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
NORM, NORM_PARAMS, NORM_STATE = fpipe.from_sequential(NORMED, 2, loss=squares)
NO_STATE = "reads state[1], the module state of stage 1 (1): hand it in as "
STATES = {
    "none": (None, NO_STATE),
    "too few": (NORM_STATE[:1], "state has 2 entries, one a stage; found 1."),
    "empty ones": (({}, {}), "state of stage 1 must have '1.running_mean', which is missing."),
    "of other stages": (NORM_STATE[::-1], "state of stage 1 must have '1.running_mean', which is missing."),
    "no dict": ((None, None), "state of stage 1 is a dict of its buffers, found NoneType."),
}


@pytest.mark.parametrize(("state", "sentence"), STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("trace", [True, False, None], ids=["traced", "by autograd", "reference"])
def test_state_must_match_the_model(state, sentence: str, trace: bool | None):
    """Used to raise an AttributeError of None in the reference, and KeyErrors in a step."""
    step = partial(fpipe.reference, NORM)
    if trace is not None:
        step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(NORM)), NORM, trace=trace)
    if state is None:
        sentence += "reference(..., state=...)." if trace is None else "step(..., state=...)."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        step(NORM_PARAMS, BATCH, state=state)


NORM_STEP = fpipe.build(fpipe.program(NORM), NORM)
TAKES_A_BATCH = {
    "a step": lambda params, batch: NORM_STEP(params, batch, state=NORM_STATE),
    "verify": lambda params, batch: fpipe.verify(fpipe.program(NORM), NORM, params, batch, state=NORM_STATE),
    "reference": lambda params, batch: fpipe.reference(NORM, params, batch, state=NORM_STATE),
    "sizes": lambda params, batch: fpipe.sizes(fpipe.program(NORM), NORM, params, batch, state=NORM_STATE),
}


@pytest.mark.parametrize("use", TAKES_A_BATCH.values(), ids=TAKES_A_BATCH.keys())
def test_params_come_before_the_batch(use):
    sentence = "params of stage 0 is a dict of its parameters by name, found Tensor; the batch comes after params."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        use(BATCH, NORM_PARAMS)


@pytest.mark.parametrize("use", TAKES_A_BATCH.values(), ids=TAKES_A_BATCH.keys())
def test_batches_of_a_data_loader_must_become_tuples(use):
    """A DataLoader yields lists, where a step takes a tuple."""
    (batch,) = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*BATCH), batch_size=6)
    with pytest.raises(ValueError, match=re.escape("as a DataLoader gives it, hand in tuple(batch).")):
        use(NORM_PARAMS, batch)
    use(NORM_PARAMS, tuple(batch))


@pytest.mark.parametrize("use", TAKES_A_BATCH.values(), ids=TAKES_A_BATCH.keys())
def test_numpy_arrays_are_refused(use):
    """Used to hand a whole array to each microbatch, which ended in "'int' object is not callable"."""
    sentence = "target is a numpy.ndarray, which is no tensor of torch's: hand in torch.from_numpy(...) of it"
    with pytest.raises(TypeError, match=re.escape(sentence)):
        use(NORM_PARAMS, (BATCH[0], BATCH[1].numpy()))


FRONT_END_RESULT = fpipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), 1, loss=squares)


@pytest.mark.parametrize("x", [torch.ones(2, 5), "text"], ids=["shape", "type"])
def test_linearize_raises_mistakes_and_logs_nothing(x, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ValueError, match="cannot be written down as torch ops"):
        fpipe.linearize(lambda params, x: torch.relu(x @ params["w"], 1), EYE, x)
    with pytest.raises(ValueError, match="cannot be written down as torch ops"):
        fpipe.linearize(lambda params, x: x @ params["w"], EYE, x)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_rule_that_returns_too_many_values_is_named(monkeypatch: pytest.MonkeyPatch):
    model = fpipe.from_functions([lambda p, x: x @ p["w"]], loss=lambda y, t: (y.sum(), len(y)), reduction="count")
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model)
    params, batch = ({"w": torch.randn(2, 2)},), (torch.randn(4, 2), torch.randn(4, 2))
    step(params, batch)
    plain = RULES["SCALE"]
    monkeypatch.setitem(RULES, "SCALE", lambda op, args, run: [*plain(op, args, run), None])
    with pytest.raises(ValueError, match=r"SCALE.* writes 1 values, and its rule gave 2\."):
        step(params, batch)


def with_mean(p, x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ p["w"], x.mean()


KINDS_OF_LOSS = {
    "mean": fpipe.from_functions([toys.linear] * 2, squares),
    "count": fpipe.from_functions([toys.linear] * 2, lambda y, t: (y.sum(), len(t)), reduction="count"),
    "aux": fpipe.from_functions([toys.linear] * 2, lambda y, t: (y.sum(), t), aux=True),
    "aux_losses": fpipe.from_functions([with_mean, toys.linear], squares, aux_losses=[0]),
}
MISMATCHES = {
    ("mean", "count"): "stage 1 of the model gives loss and count, in the program 1F0 gives loss; start from",
    ("count", "mean"): "stage 1 of the model gives loss, in the program 1F0 gives loss and count; start from",
    ("mean", "aux"): "stage 1 of the model gives loss and aux, in the program 1F0 gives loss; start from",
    ("aux", "mean"): "stage 1 of the model gives loss, in the program 1F0 gives loss and aux; start from",
    ("mean", "aux_losses"): "stage 0 of the model gives loss, in the program 0F0 gives no loss; start from",
    ("aux_losses", "mean"): "stage 0 of the model gives no loss, in the program 0F0 gives loss; start from",
}


@pytest.mark.parametrize(("program_kind", "model_kind"), MISMATCHES)
@pytest.mark.parametrize("final_transform", [fpipe.identity(), fpipe.forward_only()], ids=["training", "evaluation"])
def test_programs_of_models_with_another_loss_are_refused(program_kind: str, model_kind: str, final_transform):
    """Used to run with wrong gradients.

    With a model whose loss counts they were not divided; with one whose middle stage has a loss, that was left out.
    The other way round it was KeyError('count').
    """
    program = fpipe.chain(fpipe.split(2), fpipe.merge(), final_transform)(fpipe.program(KINDS_OF_LOSS[program_kind]))
    with pytest.raises(ValueError, match=re.escape(MISMATCHES[program_kind, model_kind])):
        fpipe.build(program, KINDS_OF_LOSS[model_kind])


@pytest.mark.parametrize("use", [fpipe.build, fpipe.sizes, fpipe.verify, fpipe.profile])
def test_programs_that_would_lose_module_state_are_refused(use: Any):
    """Used to leave the running statistics out in a step of program(2), and verify agreed."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model, params, state = fpipe.from_sequential(net, 2, loss=squares)
    arguments = () if use is fpipe.build else (params, (torch.ones(4, 4), torch.ones(4)))
    message = (
        "stage 1 of the model takes params[1] y[0] state[1] target, in the program 1F0 takes params[1] y[0] target;"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        use(fpipe.split(2)(fpipe.program(2)), model, *arguments, **({} if use is fpipe.build else {"state": state}))
    evaluated, _, _ = fpipe.from_sequential(net.eval(), 2, loss=squares)
    message = (
        "stage 1 of the model takes params[1] y[0] target, in the program 1F0 takes params[1] y[0] state[1] target;"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        fpipe.build(fpipe.program(model), evaluated)


def step_asking_for(name: str):
    """Build a step of a stage that asks for another input by name."""
    model = fpipe.Model((fpipe.Stage(lambda p, x, **asked_values: x, keywords=frozenset({name})),), squares, ("batch",))
    return fpipe.build(fpipe.program(model), model)


TIED = fpipe.from_functions([lambda p, x: x, lambda p, x: x], squares, ties=[((0, "e"), (1, "e"))])
test_refusals = refusals(
    globals(),
    """
# Zero and NaN used to give gradients without an error.
fpipe.build(PROGRAM, NET.model, loss_scale=0)
    ValueError: loss_scale is a finite number above 0; found 0.
fpipe.build(PROGRAM, NET.model, loss_scale=math.nan)
    ValueError: loss_scale is a finite number above 0; found nan.
fpipe.verify(PROGRAM, NET.model, PARAMS, BATCH, rtol=math.nan)
    ValueError: rtol is None or a number from 0; found nan.
fpipe.verify(PROGRAM, NET.model, PARAMS, BATCH, atol=-1)
    ValueError: atol is None or a number from 0; found -1.
STEP(PARAMS, BATCH, key=1.5)
    TypeError: a key is a whole number, and so is what is folded into it; found
STEP(PARAMS, BATCH, key=True)
    TypeError: a key is a whole number, and so is what is folded into it; found
STEP(BATCH)
    TypeError: a step takes parameters and a batch: step(params, (inputs, target)).
STEP(PARAMS, *BATCH)
    TypeError: a batch is one pair: step(params, (inputs, target)); found 2 arguments after params. Pass
fpipe.sizes(PROGRAM, NET.model, PARAMS, BATCH, replicas=0)
    ValueError: replicas is a whole number, at least 1; found 0
fpipe.reference(NET.model, PARAMS, BATCH, microbatch=2)
    ValueError: without rule= reference takes no microbatch=; did you mean microbatches=?
fpipe.reference(NET.model, PARAMS, BATCH, clip=1.0)
    ValueError: without rule= reference takes no clip=; it goes with a rule, such as AdamW.
fpipe.schedules.register("qt", fpipe.schedules.gpipe(2))
    TypeError: 'qt' is registered as a transform; a schedule is a function of ranks: use lambda ranks:
step_asking_for("state")(({},), BATCH)
    ValueError: this program reads state[0]: hand it in as step(..., state=...).
step_asking_for("key")(({},), BATCH)
    ValueError: this program reads key: hand it in as step(..., key=...).
step_asking_for("mask")
    ValueError: keywords is a set of 'state', 'key', 'microbatch' and 'carry'; found
fpipe.build(fpipe.program(TIED), TIED)(([], []), NET.batch(6))
    ValueError: leaf 'e' of stage 0 is tied, so that stage's params are a dict
fpipe.reference(TIED, ({}, {}), NET.batch(6))
    ValueError: params of stage 0 must have the tied leaf 'e', which lives there.
fpipe.build(PROGRAM, NET.model, example=BATCH)
    ValueError: example is (params, batch), as a step takes them; found a batch alone.
fpipe.build(PROGRAM, NET.model, example=(PARAMS,))
    ValueError: example is (params, batch) or (params, batch, state), as a step takes them; found a tuple of 1
# The norm used to be 0, so gradients were never clipped.
fpipe.clip_grads(STEP(PARAMS, BATCH), 1.0)
    TypeError: global_norm takes a pytree of gradients, each a tensor or None; found Result. Hand in result.grads.
fpipe.clip_grads(STEP(PARAMS, BATCH).grads, 0)
    ValueError: max_norm is a number above 0, found 0.
fpipe.global_norm(STEP(PARAMS, BATCH).grads, 0)
    ValueError: norm_type is a number above 0, found 0.
fpipe.global_norm(torch.nn.Linear(4, 4).parameters())
    TypeError: global_norm takes a pytree of gradients, each a tensor or None; found generator. Hand in a list of them.
fpipe.global_norm(({"w": torch.ones(2), "b": 1.0},))
    TypeError: global_norm takes a pytree of gradients, each a tensor or None; found float at [0]['b'].
fpipe.register_cost("ZAP", 1.0)
    ProgramError: 'ZAP' is not a kind of op
STEP(PARAMS[:1], BATCH)
    ValueError: params is a tuple with one pytree for each of the 2 stages, found 1 of them.
STEP({"w": torch.eye(4)}, BATCH)
    ValueError: params is a tuple with one pytree for each of the 2 stages, found dict.
STEP(PARAMS, BATCH[0])
    ValueError: a batch is a pair (inputs, target), found Tensor.
STEP(PARAMS, (BATCH[0], BATCH[1][:5]))
    ValueError: inputs has 6 rows, target has 5.
STEP(PARAMS, (1, "two"))
    ValueError: no leaf of the batch has rows
fpipe.program(0)
    ValueError: stages is a whole number, at least 1; found 0.
fpipe.program(2, inputs=("batch", "batch"))
    ValueError: nobody takes the output of stage 0
fpipe.from_functions([linear], torch.nn.MSELoss)
    ValueError: loss is a class; make one: MSELoss().
fpipe.from_sequential(torch.nn.Sequential(torch.nn.Tanh()), 1, loss=torch.nn.CrossEntropyLoss)
    ValueError: loss is a class; make one: CrossEntropyLoss().
fpipe.from_functions([linear], lambda y: y.mean())
    ValueError: loss is a function loss(y, target), found one of (y).
fpipe.from_functions([linear], torch.nn.CosineEmbeddingLoss())
    ValueError: loss is a function loss(y, target), found one of (input1: torch.Tensor, input2: torch.Tensor, target:
fpipe.build(fpipe.program(3), NET.model)
    ValueError: the program has 3 stages and the model 2; start from fpipe.program(model).
fpipe.build(fpipe.program(2, inputs=("batch", (0, "batch"))), NET.model)
    ValueError: start from fpipe.program(model).
fpipe.build(fpipe.program(2), Net(("tied", "tied"), ("batch", 0)).model)
    ValueError: stage 0 of the model takes params[0] params[0]:1 inputs, in the program 0F0 takes params[0] inputs;
fpipe.split(0)
    ValueError: microbatches is a whole number, at least 1; found 0.
fpipe.split()
    ValueError: say either split(8) or split(size=4, rows=32)
fpipe.split(size=2)
    ValueError: split(size=2) needs rows=, the number of rows of a batch
step_of(linear, loss=lambda y, t: (y - t).square(), reduction="mean")((EYE,), BATCH)
    ValueError: the loss is a 0-d tensor, found shape (6, 4); reduce it, for instance by .mean().
step_of(linear, loss=lambda y, t: 1.0, reduction="mean")((EYE,), BATCH)
    TypeError: the loss is a 0-d tensor, found float.
step_of(linear, loss=lambda y, t: y.sum(), reduction="count")((EYE,), BATCH)
    TypeError: with reduction="count" the loss returns (total, count), found Tensor.
step_of(linear, loss=None, reduction="mean")((EYE,), BATCH)
    ValueError: the last stage's output, which is the loss since no loss= was given, is a 0-d tensor, found shape (6, 4)
step_of(linear, loss=lambda y, t: t.sub_(y).square().mean())((EYE,), NET.batch(6))
    RuntimeError: the loss writes what it was given in place
fpipe.build(PROGRAM, NET.model, check_finite=True)((PARAMS[0],
{name: leaf * math.inf for name, leaf in PARAMS[1].items()}), BATCH)
    FloatingPointError: 1F0 wrote y[1,0] with NaN or infinite numbers.
fpipe.checkpoint("except_last")(fpipe.program(2))
    ProgramError: put fpipe.split() before fpipe.checkpoint()
# Used to move nothing, silently.
fpipe.offload(values=["residuals"])(fpipe.place("linear")(fpipe.program(2)))
    ProgramError: values= names 'residuals', this program has values named
fpipe.communicate(again=["foo"])(fpipe.place("linear")(fpipe.program(2)))
    ProgramError: again= names 'foo', this program has values named dx,
# Used to be an AttributeError, or a TypeError from Python.
fpipe.plan(fpipe.Costs(), 2, stages="3")
    ValueError: stages is a whole number, at least 1; found '3'.
fpipe.plan([THREE], 2, stages=3)
    TypeError: stages has an entry for each model, found 3.
fpipe.plan(THREE, 2, memory=3, limit=4)
    TypeError: memory lists the bytes of each stage, found 3.
# Used to be an error from Python, far from the call.
fpipe.reorder(lambda program: None)(fpipe.program(2))
    TypeError: the order is a list of cells for each rank; the function gave None.
fpipe.add_grads(STEP(PARAMS, BATCH), STEP(PARAMS, BATCH))
    TypeError: gradients are tensors, as Result.grads has them; found Result.
fpipe.reference(NET.model, PARAMS, [])
    ValueError: is a list of pairs (inputs, target), cut already; found an empty
fpipe.linearize(torch.nn.Linear(4, 4), EYE, torch.ones(2, 4))
    TypeError: linearize takes a function f(params, x), found a module (Linear)
""",
)
