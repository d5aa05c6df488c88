"""Reports of `verify`: the first wrong value of a program, and the comparison with the undivided batch."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.program import Program

F = nn.functional


def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


@cache
def make_chain(stages=3, rows=6, **options):
    """Return a chain of layers, its parameters and a batch."""
    generator = torch.Generator().manual_seed(0)
    params = tuple(
        {"w": torch.randn(4, 4, generator=generator), "b": torch.randn(4, generator=generator)} for _ in range(stages)
    )
    batch = torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)
    return fpipe.from_functions([layer] * stages, **({"loss": F.mse_loss} | options)), params, batch


def mismatch(program, model, params, batch, **options) -> fpipe.GradientMismatch:
    with pytest.raises(fpipe.GradientMismatch) as caught:
        fpipe.verify(program, model, params, batch, **options)
    return caught.value


def stage_by_stage(stages: int, microbatches: int) -> Program:
    """Run all microbatches through a stage before the next stage starts, so that there are values to mix up."""
    forwards = [f"{stage}F{index}" for stage in range(stages) for index in range(microbatches)]
    backwards = [f"{stage}B{index}" for stage in reversed(range(stages)) for index in range(microbatches)]
    table = fpipe.schedules.from_table([[*forwards, *backwards]])
    return fpipe.chain(fpipe.split(microbatches), table, fpipe.merge())(fpipe.program(stages))


def exchange_reads(program: Program, first_cell: str, second_cell: str, names: tuple[str, ...]) -> Program:
    """Let two ops read each other's values of these names."""
    ops = {op.cell: op for op in program.ops}
    a, b = ops[first_cell], ops[second_cell]
    swap = {x: y for x, y in zip(a.reads, b.reads, strict=True) if x.name in names}
    swap |= {y: x for x, y in swap.items()}
    op_by_cell = {op.cell: op._replace(reads=tuple(swap.get(value, value) for value in op.reads)) for op in (a, b)}
    return Program(program.inputs, tuple(op_by_cell.get(op.cell, op) for op in program.ops), program.outputs)


@settings(max_examples=12)
@given(st.data())
def test_an_op_with_an_exchanged_read_is_the_first_wrong_one(data):
    stages, microbatches = data.draw(st.integers(2, 3)), data.draw(st.integers(2, 3))
    kind = data.draw(st.sampled_from("FB"))
    stage = data.draw(st.integers(1, stages - 1) if kind == "F" else st.integers(0, stages - 2))
    microbatch, other_microbatch = sorted(data.draw(st.permutations(range(microbatches)))[:2])
    model, params, batch = make_chain(stages, 2 * microbatches)
    program = stage_by_stage(stages, microbatches)
    cells = f"{stage}{kind}{microbatch}", f"{stage}{kind}{other_microbatch}"
    wrong_value = mismatch(
        exchange_reads(program, *cells, ("y",) if kind == "F" else ("dx",)), model, params, batch
    ).first
    assert wrong_value is not None
    assert wrong_value.op.cell == cells[0]
    assert (wrong_value.value.stage, wrong_value.value.microbatch) == (stage, microbatch)
    assert wrong_value.value.name in (
        ("y",) if kind == "F" else ("dx", "g", "sum")
    )  # a backward adds to its sum itself
    assert 0 < wrong_value.error < float("inf")


def test_the_message_says_value_op_stage_microbatch_rank_and_difference():
    model, params, batch = make_chain()
    error = mismatch(exchange_reads(stage_by_stage(3, 3), "1F0", "1F2", ("y",)), model, params, batch)
    assert str(error).splitlines()[1] == (
        "The first wrong value: y[1,0], written by 1F0 (stage 1 (layer), microbatch 0, rank 0), is off by up to "
        f"{error.first.error:.3g}."
    )


def test_a_split_that_takes_fewer_rows_is_named_with_its_shape():
    model, params, batch = make_chain(rows=7)
    program = Program.parse(str(stage_by_stage(3, 3)).replace("index=0", "index=1"))
    assert "SPLIT(x[0,0]) (stage 0 (layer), microbatch 0, rank 0), is torch.float32 of shape (2, 4), and not " in str(
        mismatch(program, model, params, batch)
    )


def test_a_transfer_that_rounds_is_named():
    model, params, batch = make_chain()
    steps = fpipe.schedules.gpipe(3), fpipe.merge(), fpipe.communicate(cast=torch.bfloat16)
    error = mismatch(fpipe.chain(fpipe.split(3), *steps)(fpipe.program(model)), model, params, batch)
    assert (error.first.op.kind, error.first.op.cell) == ("SEND", "SEND(y[0,0]>1)")


def test_a_backward_that_changes_with_each_call_is_named():
    """A step traces such rules once, while the reference runs them each time."""
    calls = []

    def backward_weight(params, wres):
        calls.append(0)
        return {"w": wres[0].T @ wres[1] * len(calls)}

    forgetful = fpipe.custom_stage(
        lambda params, x: (x @ params["w"], x), lambda params, res, dy: (dy @ params["w"].T, (res, dy)), backward_weight
    )
    model = fpipe.from_functions([layer, forgetful, layer], loss=F.mse_loss)
    _, params, batch = make_chain()
    params = params[0], {"w": params[1]["w"]}, params[2]
    steps = fpipe.split_backward(), fpipe.schedules.zb_h1(3), fpipe.merge()
    error = mismatch(fpipe.chain(fpipe.split(3), *steps)(fpipe.program(model)), model, params, batch)
    assert (error.first.op.kind, error.first.op.stage, error.first.value.name) == ("W", 1, "g")


def test_values_joined_in_another_order_are_told_from_wrong_values():
    model, params, batch = make_chain(1, 32)
    table = fpipe.schedules.from_table([[*(f"0F{i}" for i in range(8)), *(f"0B{i}" for i in reversed(range(8)))]])
    program = fpipe.chain(fpipe.split(8), table, fpipe.merge(order="schedule"))(fpipe.program(model))
    error = mismatch(program, model, params, batch)
    assert error.first is None
    assert str(error).endswith(
        "What the stages compute for each microbatch is right; what joins it is not: ADD(sum[0,0])."
    )


def test_a_tolerance_holds_for_the_first_wrong_value_too():
    """A rounded transfer within the tolerance is not the mistake; the exchanged read after it is."""
    model, params, batch = make_chain()
    program = fpipe.chain(fpipe.place("linear"), fpipe.communicate(cast=torch.bfloat16))(
        exchange_reads(stage_by_stage(3, 3), "2F0", "2F1", ("y",))
    )
    error = mismatch(program, model, params, batch, rtol=0.05, atol=0.05)
    assert error.first.op.cell == "2F0"


def test_any_step_function_is_compared_with_the_reference():
    model, params, batch = make_chain()
    program = split_and_merge(model, 3)
    step = fpipe.build(program, model, trace=False)
    assert fpipe.verify(program, model, params, batch, step=step).bitwise
    error = mismatch(program, model, params, batch, step=lambda *inputs: replace(step(*inputs), loss=torch.zeros(())))
    assert str(error).endswith("The program is right, walked down op by op; the step that ran it is not.")
    with pytest.raises(ValueError, match=r"a Result with grads, loss, outputs; found no grads\.$"):
        fpipe.verify(program, model, params, batch, step=lambda *inputs: replace(step(*inputs), grads=None))
    with pytest.raises(ValueError, match="step= is of one replica"):
        fpipe.verify(fpipe.data_parallel()(program), model, params, batch, step=step, replicas=3)


# The undivided batch


def split_and_merge(model, count, **options):
    return fpipe.chain(fpipe.split(count), fpipe.merge(**options))(fpipe.program(model))


GIVES_THE_SAME = "The undivided batch gives the same loss and gradients, to rounding."
COUNT = 'reduction? Where some rows do not count, return (total, count) and say reduction="count".'


def test_the_undivided_batch_gives_equal_results():
    model, params, batch = make_chain()
    report = fpipe.verify(split_and_merge(model, 3), model, params, batch)
    assert (report.undivided, report.notes) == (GIVES_THE_SAME, ())
    assert fpipe.verify(split_and_merge(model, 1), model, params, batch).undivided == ""


def contrastive(y, target):
    return F.cross_entropy(y @ target.T, torch.arange(len(y)))


LABELS = torch.tensor([0, -100, 1, 2, 3, 0, 1, 2])
LOSSES_BY_CASE = {
    # `verify` says bitwise for a loss that is a quarter of what was meant.
    "a sum": (nn.MSELoss(reduction="sum"), None, "4 x this one .*the loss sums over its rows, so say reduction=.sum"),
    "padding": (nn.CrossEntropyLoss(), LABELS, re.escape(COUNT)),
    "padding alone": (
        nn.CrossEntropyLoss(),
        torch.tensor([0, 1, -100, -100, 2, 3, 0, 1]),
        "The loss of microbatch 1 is nan; that of the undivided batch is .*: where some rows do not count",
    ),
    "a contrastive one": (contrastive, None, "as a contrastive one does, a microbatch has fewer to compare."),
}
# Of a net with dropout or a batch norm a wrong reduction went unsaid: it "gives others, as it may". A key alone
# silenced all, of a net that draws nothing.
NETS = {"plain": lambda: nn.Linear(4, 4), "dropout": nn.Dropout, "norm": lambda: nn.BatchNorm1d(4)}


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("case", LOSSES_BY_CASE)
def test_a_loss_that_is_no_mean_over_rows_is_noted(case: str, net: str, outputs: bool):
    loss, target, pattern = LOSSES_BY_CASE[case]
    layers = nn.Sequential(nn.Linear(4, 4), NETS[net]())
    model, params, state = fpipe.from_sequential(layers, stages=1, loss=loss)
    batch = torch.randn(8, 4), torch.randn(8, 4) if target is None else target
    report = fpipe.verify(split_and_merge(model, 4, outputs=outputs), model, params, batch, state=state, key=1)
    assert report.bitwise
    assert re.search(pattern, report.undivided)
    assert report.notes[-1] == report.undivided
    assert str(report).splitlines()[-1] == report.undivided
    assert (report.notes[0] == "NaN or infinite numbers in loss.") == (case == "padding alone")


def test_a_loss_that_averages_under_a_sum_is_named():
    model, params, batch = make_chain(rows=7, reduction="sum")
    report = fpipe.verify(split_and_merge(model, 4), model, params, batch)
    assert report.undivided.endswith('the loss averages over its rows, so say reduction="mean".')


def test_a_few_tokens_that_do_not_count_are_noted():
    """A loss of 5.57124 used to count as equal to 5.57056, and rows of other microbatches were blamed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 50))
    model, params, _ = fpipe.from_sequential(net, 1, loss=lambda y, t: F.cross_entropy(y.transpose(1, 2), t))
    target = torch.randint(0, 50, (8, 64))
    target[0, :9] = -100
    assert COUNT in fpipe.verify(split_and_merge(model, 4), model, params, (torch.randn(8, 64, 4), target)).undivided


def test_a_stage_that_reads_rows_of_other_microbatches_is_noted():
    """The loss used to be blamed, although the outputs of all microbatches together give an equal loss."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    model, params, _ = fpipe.from_sequential(net, stages=1, loss=F.mse_loss)
    report = fpipe.verify(split_and_merge(model, 2), model, params, (torch.randn(8, 4), torch.randn(8, 4)))
    assert report.notes == (report.undivided,)
    assert report.undivided.endswith("a stage computes with rows that are in other microbatches, as a batch norm does.")


def test_rounding_by_autocast_is_no_difference():
    """`verify` used to say of a plain net under bfloat16 that it computes with rows of other microbatches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    model, params, _ = fpipe.from_sequential(net, 2, loss=F.cross_entropy)
    batch = torch.randn(24, 16), torch.randint(0, 8, (24,))
    with torch.autocast("cpu", torch.bfloat16):
        assert fpipe.verify(split_and_merge(model, 3), model, params, batch).undivided == GIVES_THE_SAME


def multiply_by_microbatch(p, x, *, microbatch):
    return x @ p["w"] * (1 + microbatch)


def with_module(module):
    return fpipe.from_sequential(nn.Sequential(nn.Linear(4, 4), module), stages=1, loss=F.mse_loss)


def with_stage(function, *keywords):
    stage = fpipe.Stage(function, keywords=frozenset(keywords), name=function.__name__)
    return fpipe.Model((stage,), F.mse_loss, ("batch",)), make_chain(1)[1], None


REASONS = {
    "gives others, as it may: stage 0 (0, 1) keeps state, as a batch norm": lambda: with_module(nn.BatchNorm1d(4)),
    "gives others, as it may: random numbers are drawn for each microbatch": lambda: with_module(nn.Dropout()),
    "gives others, as it may: stage 0 (multiply_by_microbatch) reads which microb": lambda: with_stage(
        multiply_by_microbatch, "microbatch"
    ),
    "was not compared: it ends in RuntimeError: shape '[2, 4]'": lambda: with_stage(
        lambda p, x: x.view(2, 4) @ p["w"] + p["b"]
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_expected_differences_are_no_notes(reason: str):
    model, params, state = REASONS[reason]()
    report = fpipe.verify(split_and_merge(model, 3), model, params, make_chain(1)[2], state=state, key=1)
    assert report.undivided.startswith(f"The undivided batch {reason}")
    assert report.notes == ()
    assert str(report).splitlines()[1:] == [report.undivided]


def test_a_presplit_batch_has_no_undivided_one():
    model, params, (inputs, target) = make_chain()
    program = fpipe.chain(fpipe.split(2, presplit=True), fpipe.merge())(fpipe.program(model))
    report = fpipe.verify(program, model, params, [(inputs[:2], target[:2]), (inputs[2:], target[2:])])
    assert report.undivided == "The batch came cut, so there is no undivided one to compare with."


def test_one_row_of_a_wider_tensor_is_compared_by_its_bits():
    """A slice of one number is contiguous, but has strides that a view in bytes cannot have."""
    model = fpipe.from_functions([lambda p, x: (x * p["w"])[:, :1]], loss=lambda y, t: (y - t).square().mean())
    batch = torch.randn(2, 3), torch.randn(2, 1)
    assert fpipe.verify(split_and_merge(model, 2), model, ({"w": torch.tensor(2.0)},), batch).bitwise
