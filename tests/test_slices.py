"""Sequences cut into slices: causal attention carries keys and values on, with the bits of plain autograd."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.program import Program
from tests.refusals import refusals
from tests.toys import squares

WIDTH, HEADS = 8, 2


def block(p: dict[str, Tensor], x: Tensor, *, carry: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute causal attention over this slice and the keys and values of the slices before, then an MLP."""
    rows, length, width = x.shape
    q, k, v = (x @ p["qkv"]).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
    if carry is not None:
        k, v = torch.cat([carry[0], k], 2), torch.cat([carry[1], v], 2)
    scores = q @ k.transpose(2, 3) / (width // HEADS) ** 0.5
    offset = k.shape[2] - length
    later = torch.arange(k.shape[2]) > torch.arange(offset, offset + length)[:, None]
    mixed = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v
    x = x + mixed.transpose(1, 2).reshape(rows, length, width) @ p["o"]
    return x + torch.tanh(x @ p["up"]) @ p["down"], (k, v)


def head(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Project each position separately; nothing is carried."""
    return torch.nn.functional.layer_norm(x, (WIDTH,), p["scale"]) @ p["w"]


def sum_and_count(y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    is_counted = target[..., 0] > -0.5
    return ((y - target).square().mean(-1) * is_counted).sum(), is_counted.sum()


LOSSES: dict[str, Any] = {"sum": lambda y, t: (y - t).square().sum(), "mean": squares, "count": sum_and_count}


@cache
def attention_model(reduction: Any = "mean") -> fpipe.Model:
    return fpipe.from_functions([block, block, block, head], LOSSES[reduction], reduction=reduction)


def params_of(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], ...]:
    make = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=dtype) * 0.3

    shapes = {"qkv": (WIDTH, 3 * WIDTH), "o": (WIDTH, WIDTH), "up": (WIDTH, 16), "down": (16, WIDTH)}
    blocks = tuple({name: leaf(*shape) for name, shape in shapes.items()} for _ in range(3))
    return (*blocks, {"scale": 1 + leaf(WIDTH), "w": leaf(WIDTH, WIDTH)})


def sequences(rows: int = 5, length: int = 10, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, length, WIDTH, generator=make, dtype=dtype) for _ in range(2))  # type: ignore[return-value]


Expected = tuple[Tensor, list[dict[str, Tensor]]]


def run_by_hand(
    batch: tuple[Tensor, Tensor], microbatches: int, sizes: list[int], reduction: str, dtype=torch.float32
) -> Expected:
    """Run one graph for each microbatch, from its first slice to its last. Each slice has its own copy of the
    parameters, whose gradients are added from the last slice back, microbatch after microbatch."""
    params, total, count = params_of(dtype), None, torch.tensor(0)
    sums: list[dict[str, Any]] = [dict.fromkeys(stage) for stage in params]
    for x, target in zip(*(leaf.tensor_split(microbatches) for leaf in batch), strict=True):
        params_of_slices = [
            [{n: leaf.clone().requires_grad_() for n, leaf in p.items()} for p in params] for _ in sizes
        ]
        carries: list[Any] = [None] * 3
        losses: list[Tensor] = []
        for index, (x_slice, target_slice) in enumerate(zip(x.split(sizes, 1), target.split(sizes, 1), strict=True)):
            h = x_slice
            for stage_index in range(3):
                h, carry = block(params_of_slices[index][stage_index], h, carry=carries[stage_index])
                carries[stage_index] = tuple(leaf.view_as(leaf) for leaf in carry)
            loss = LOSSES[reduction](head(params_of_slices[index][3], h), target_slice)
            if reduction == "count":
                loss, counts = loss
                count = count + counts
            share = len(x) / len(batch[0]) * (x_slice.shape[1] / x.shape[1])
            losses.append(loss * share if reduction == "mean" else loss)
            total = losses[-1].detach() if total is None else total + losses[-1].detach()
        sum(losses[1:], losses[0]).backward()
        for stages in reversed(params_of_slices):
            for stage_index, stage in enumerate(stages):
                for name, leaf in stage.items():
                    total_grad = sums[stage_index][name]
                    sums[stage_index][name] = leaf.grad if total_grad is None else total_grad + leaf.grad
    assert total is not None
    if reduction == "count":
        return total / count, [{name: leaf / count for name, leaf in stage.items()} for stage in sums]
    return total, sums


def assert_equal_bits(result: fpipe.Result, expected: Expected) -> None:
    loss, grads = expected
    differences = [
        f"grads[{n}][{name}]"
        for n, stage in enumerate(grads)
        for name in stage
        if not torch.equal(result.grads[n][name], stage[name])
    ]
    assert (torch.equal(result.loss, loss), differences) == (True, [])


@pytest.mark.crossed
@pytest.mark.parametrize("reduction", LOSSES)
@pytest.mark.parametrize("trace", [False, True])
def test_attention_in_slices_has_the_gradients_of_plain_autograd(reduction: str, trace: bool):
    model = attention_model(reduction)
    program = fpipe.chain(fpipe.split(2, slices=3), fpipe.merge())(fpipe.program(model))
    result = fpipe.build(program, model, trace=trace)(params_of(), sequences())
    assert_equal_bits(result, run_by_hand(sequences(), 2, [4, 3, 3], reduction))


@pytest.mark.parametrize("reduction", ["mean", pytest.param("count", marks=pytest.mark.deep)])
@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=repr)
def test_slices_may_have_sizes_of_their_own(reduction: str, options: dict[str, Any]):
    model, batch = attention_model(reduction), sequences()
    transforms = fpipe.slice_sequence(sizes=[5, 1, 4]), fpipe.schedules.seq1f1b(2), fpipe.merge(), fpipe.communicate()
    program = fpipe.chain(fpipe.split(2), *transforms)(fpipe.program(model))
    assert Program.parse(str(program)) == program
    assert_equal_bits(
        fpipe.build(program, model, **options)(params_of(), batch), run_by_hand(batch, 2, [5, 1, 4], reduction)
    )
    assert fpipe.verify(program, model, params_of(), batch).bitwise


def test_per_microbatch_and_slice_results_come_in_order():
    model, params, batch = attention_model(), params_of(), sequences()
    program = fpipe.split(2, slices=3)(fpipe.program(model))
    result, merged_result = (
        fpipe.build(variant, model)(params, batch) for variant in (program, fpipe.merge()(program))
    )
    joined = torch.cat([torch.cat(result.outputs[start : start + 3], 1) for start in (0, 3)])
    assert torch.equal(joined, merged_result.outputs)
    assert (len(result.loss), len(result.grads)) == (6, 6)


def enter(p: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
    return (x["x"] + x["table"]) * x["scale"]


@pytest.mark.parametrize("reduction", [pytest.param("mean", marks=pytest.mark.deep), "count"])
def test_gradients_of_inputs_are_joined_along_the_sequence(reduction: str):
    """Inputs that every slice takes whole add their gradients like parameters: from the last slice back, microbatch
    after microbatch, divided once by the count. They used to be refused."""
    x, target = sequences()
    inputs = {"x": x, "table": torch.randn(WIDTH), "scale": torch.tensor(1.5)}
    model = fpipe.from_functions([enter, block, block, block, head], LOSSES[reduction], reduction=reduction)
    spec = ({"x": fpipe.Chunk(), "table": fpipe.Replicate(), "scale": None}, None)
    program = fpipe.chain(
        fpipe.split(2, spec, slices=3), fpipe.schedules.seq1f1b(2), fpipe.merge(), fpipe.communicate()
    )(fpipe.program(model, input_grads=True))
    params, batch = ({}, *params_of()), (inputs, target)
    assert fpipe.verify(program, model, params, batch).bitwise
    traced, walked = (fpipe.build(program, model, trace=trace)(params, batch).input_grads for trace in (True, False))
    for name, leaf in inputs.items():
        assert traced[name].shape == leaf.shape
        assert torch.equal(traced[name], walked[name])


def test_a_stream_has_one_output_per_microbatch_for_any_number_of_slices():
    """A stream used to have one output per slice, which the next pipeline does not take and `verify` could not
    compare."""
    model, params, batch = attention_model(), params_of(), sequences()
    base = fpipe.split(2, slices=3)(fpipe.program(model))
    program = fpipe.chain(fpipe.schedules.seq1f1b(2), fpipe.merge(outputs="stream"), fpipe.communicate())(base)
    assert Program.parse(str(program)) == program
    assert fpipe.merge()(program) == program
    result = fpipe.build(program, model)(params, batch)
    merged_result = fpipe.build(fpipe.merge()(base), model)(params, batch)
    assert [len(y) for y in result.outputs] == [3, 2]
    assert torch.equal(torch.cat(result.outputs), merged_result.outputs)
    assert fpipe.verify(program, model, params, batch).bitwise


def test_metrics_of_slices_have_the_weights_of_the_reference():
    """The step weighed metrics by shares and the reference by rows, so they sometimes differed in the last bit."""

    def loss_with_metric(y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return squares(y, target), y.abs().mean()

    model = fpipe.from_functions([head], loss_with_metric, aux=True)
    program = fpipe.chain(fpipe.split(4, slices=2), fpipe.merge())(fpipe.program(model))
    step, params = fpipe.build(program, model), params_of(torch.float64)[3:]
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        batch = tuple(torch.randn(6, 7, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        aux = step(params, batch).aux
        assert torch.equal(aux, fpipe.reference(model, params, batch, microbatches=4, slices=2).aux)


def test_a_stream_of_metrics_has_one_for_each_call_of_the_loss():
    """Metrics of slices are not joined, since they may be counts, means or rows."""

    def loss_with_metrics(y: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return squares(y, target), {"right": (y > target).sum(), "length": y.shape[1]}

    model = fpipe.from_functions([head], loss_with_metrics, aux=True)
    params, (x, target) = params_of()[3:], sequences()
    program = fpipe.chain(fpipe.split(2, slices=3), fpipe.merge(aux="stream", losses=True))(fpipe.program(model))
    result = fpipe.build(program, model)(params, (x, target))
    pieces = [
        loss_with_metrics(head(params[0], a), b)
        for rows in zip(x.tensor_split(2), target.tensor_split(2), strict=True)
        for a, b in zip(*(leaf.tensor_split(3, dim=1) for leaf in rows), strict=True)
    ]
    assert list(result.aux) == [aux for _, aux in pieces]
    assert list(result.losses) == [loss for loss, _ in pieces]
    assert fpipe.verify(program, model, params, (x, target)).bitwise


def test_any_dim_may_be_the_sequence():
    """Time is dim 0, rows are dim 1, and one input has no time."""

    def stage(p: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        return torch.tanh(x["h"] @ p["w"]) * x["gain"][:, None]

    model = fpipe.from_functions([stage], squares)
    params = ({"w": params_of()[0]["o"]},)
    (x, target), gain = sequences(), torch.rand(5, generator=torch.Generator().manual_seed(4))
    split_spec = ({"h": fpipe.Chunk(1), "gain": fpipe.Chunk(0)}, fpipe.Chunk(1))
    slice_spec = ({"h": fpipe.Chunk(0), "gain": fpipe.Replicate()}, fpipe.Chunk(0))
    program = fpipe.chain(
        fpipe.split(2, split_spec), fpipe.slice_sequence(3, dim=0, spec=slice_spec), fpipe.merge(fpipe.Chunk(1))
    )(fpipe.program(model))
    batch = ({"h": x.transpose(0, 1).contiguous(), "gain": gain}, target.transpose(0, 1).contiguous())
    assert Program.parse(str(program)) == program
    assert fpipe.verify(program, model, params, batch).bitwise
    expected_loss = squares(stage(params[0], batch[0]), batch[1])
    torch.testing.assert_close(fpipe.build(program, model)(params, batch).loss, expected_loss)


def run_step(*transforms: Any, batch: Any = None) -> fpipe.Result:
    model = attention_model()
    program = fpipe.chain(*transforms)(fpipe.program(model))
    return fpipe.build(program, model)(params_of(), sequences() if batch is None else batch)


PAIRS = """
0F0 1F0 2F0 3F0 3B0 2B0 1B0 (0B0;0F1) 1F1 2F1 3F1 3B1 2B1 1B1 0B1
"""
slices, split, schedules = fpipe.slice_sequence, fpipe.split, fpipe.schedules


test_refusals = refusals(
    globals(),
    """
run_step(slices(2))
    ProgramError: put fpipe.split(), at least split(1), before slices.
run_step(split(1, slices=2), slices(2))
    ProgramError: this program has 2 slices already
run_step(split(2), fpipe.merge(), slices(2))
    ProgramError: as by fpipe.split(8, slices=4)
run_step(split(2), fpipe.place(), fpipe.communicate(), slices(2))
    ProgramError: put fpipe.slice_sequence() before fpipe.communicate()
slices(3, sizes=[5, 5])
    ValueError: say either slice_sequence(2) or slice_sequence(sizes=[5, 3]).
slices(sizes=[5, 0])
    ValueError: a size is a whole number, at least 1; found 0
run_step(split(2), slices(sizes=[5, 4]))
    ValueError: the sequence of inputs has 10 positions, and slices of (5, 4) 9.
Program.parse(str(slices(sizes=[5, 5])(split(1)(fpipe.program(1)))).replace("(5, 5)", "(10,)"))
    ProgramError: SPLIT(x[0,0.0]) says {'index': 0, 'count': 1, 'slices': 2, 'sizes': (10,)}, but the program has
split(2, slices=0)
    ValueError: slices is a whole number, at least 1; found 0
slices(2, spec=(1, 2, 3))
    ValueError: a tuple of specs has two, for inputs and target
run_step(split(1, slices=11))
    ValueError: inputs has 10 positions, too few for 11 slices
run_step(split(1, slices=2), schedules.seq1f1b(2, slices=3))
    ProgramError: seq1f1b(slices=3): this program has 2 slices already
run_step(split(1, slices=2), schedules.gpipe(2))
    ProgramError: use seq1f1b
run_step(split(2), schedules.from_table(PAIRS), slices(2))
    ProgramError: has pairs already; slice it before
run_step(split(2, slices=2), batch=(torch.zeros(4, 6, 8), torch.zeros(4)))
    ValueError: target has no dim 1 to slice along: its shape is (2,). Say where its sequence
run_step(split(2, slices=2), batch=({"a": torch.zeros(4, 6), "b": torch.zeros(4, 5)}, torch.zeros(4, 6)))
    ValueError: the sequence of inputs['a'] has 6 positions, that of inputs['b'] has 5
""",
)
