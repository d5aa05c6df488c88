"""More than one loss and one gradient: auxiliary losses and results, frozen parameters, gradients of inputs, scales."""

import re
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe.tree import leaves
from tests.refusals import refusals


def linear(p, x):
    return torch.tanh(x @ p["w"])


def balanced(p, x):
    """Experts give their balance as a loss of their own."""
    y = torch.tanh(x @ p["w"])
    return y, (y.mean(0) ** 2).sum()


def last(p, x):
    return x[0] @ p["w"] + x[1]


def mean(y, t):
    return (y - t).square().mean()


def total(y, t):
    return (y - t).square().sum()


def counted(y, t):
    return total(y, t), y.numel()


def with_metrics(loss):
    def fn(y, t):
        return loss(y, t), {"right": (y > t).sum(), "error": (y - t).abs().mean(), "guess": y * 2}

    return fn


LOSSES = {"mean": mean, "sum": total, "count": counted}
JOIN = {"right": fpipe.Sum(), "error": None, "guess": fpipe.Chunk()}


@cache
def model_of(reduction: str) -> fpipe.Model:
    return fpipe.from_functions(
        [linear, balanced, balanced, last],
        with_metrics(LOSSES[reduction]),
        inputs=("batch", 0, 1, (2, "batch")),
        reduction=reduction,
        aux=True,
        aux_losses=[1, 2],
    )


def params(dtype=torch.float32, stages=4):
    make = torch.Generator().manual_seed(0)
    return tuple({"w": torch.randn(3, 3, generator=make, dtype=dtype)} for _ in range(stages))


def batch(rows=8, dtype=torch.float32):
    make = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, generator=make, dtype=dtype), torch.randn(rows, 3, generator=make, dtype=dtype)


# Auxiliary losses


def test_only_the_number_travels_and_the_gradient_starts_at_home():
    model = fpipe.from_functions([linear, balanced, linear], mean, aux_losses=[1])
    pipeline = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(3), fpipe.merge(), fpipe.communicate())
    program = pipeline(fpipe.program(model))
    assert {op.reads[0].name for op in program.ops if op.kind == "SEND"} == {"y", "dx", "loss"}
    backward = next(op for op in program.ops if op.cell == "1B0")
    assert fpipe.Value("w", 1, 0) in backward.reads
    assert all(v.stage == 1 or v.name == "dx" for v in backward.reads)


# Auxiliary results


def test_metrics_are_joined_like_outputs_or_left_as_a_stream():
    model = model_of("mean")
    whole = fpipe.reference(model, params(), batch())
    joined = fpipe.chain(fpipe.split(3), fpipe.merge(aux=JOIN))(fpipe.program(model))
    found = fpipe.build(joined, model)(params(), batch()).aux
    assert torch.equal(found["right"], whole.aux["right"])
    assert torch.allclose(found["error"], whole.aux["error"])
    assert torch.allclose(found["guess"], whole.aux["guess"])
    assert not found["guess"].requires_grad
    apart = fpipe.chain(fpipe.split(3), fpipe.merge(aux="stream"))(fpipe.program(model))
    stream = fpipe.build(apart, model)(params(), batch()).aux
    assert [len(one["guess"]) for one in stream] == [3, 3, 2]
    assert torch.equal(sum(one["right"] for one in stream), whole.aux["right"])
    assert fpipe.verify(apart, model, params(), batch()).bitwise


def test_metrics_of_one_loss_function_come_back_too():
    def loss_fn(p, pair):
        x, t = pair
        y = fpipe.boundary(torch.tanh(x @ p["a"])) @ p["b"]
        return counted(y, t), {"right": (y > t).sum(), "rows": 3}

    whole = {name: torch.randn(3, 3) for name in "ab"}
    model, own = fpipe.from_loss(loss_fn, whole, batch(), reduction="count", aux=True)
    merge = fpipe.merge(aux={"right": fpipe.Sum(), "rows": None})
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.zb_h1(2), merge)(fpipe.program(model))
    assert fpipe.verify(program, model, own, batch()).bitwise
    assert fpipe.build(program, model)(own, batch()).aux == loss_fn(whole, batch())[1]


def run(model, pipeline=None):
    own = tuple({"w": torch.eye(3)} for _ in model.stages)
    program = (pipeline or fpipe.identity())(fpipe.program(model))
    return fpipe.build(program, model, trace=False)(own, batch())


test_what_is_wrong_is_said = refusals(
    globals(),
    """
run(fpipe.from_functions([linear], mean, aux=True))
    TypeError: with aux=True the loss returns (loss, aux), found Tensor.
fpipe.from_functions([linear], aux=True)
    ValueError: aux=True says what loss= returns, which is missing.
fpipe.from_functions([linear] * 2, mean, aux_losses=[3])
    ValueError: aux_losses names stage 3; the stages are 0 to 1.
fpipe.from_functions([linear] * 2, mean, aux_losses=[1])
    ValueError: stage 1 is the last, and what it returns goes to the loss: add its loss there.
run(fpipe.from_functions([linear] * 2, mean, aux_losses=[0]))
    TypeError: a stage that gives its loss returns (y, loss).
run(fpipe.from_functions([lambda p, x: (x, x), linear], mean, aux_losses=[0]))
    ValueError: the loss of <lambda> is a 0-d tensor, found shape (8, 3)
fpipe.merge(outputs='apart')
    ValueError: outputs is True, False or 'stream', found 'apart'.
run(model_of('mean'), fpipe.chain(fpipe.split(3), fpipe.merge()))
    ValueError: aux['right'] is tensor(
run(model_of('mean'), fpipe.split(2, fpipe.Sum()))
    ValueError: Sum() says how parts are joined, and not how a leaf is cut
fpipe.freeze(model_of('mean'), 4)
    ValueError: there is no stage 4 to freeze; the stages are 0 to 3.
fpipe.freeze(model_of('mean'), 'w')
    ValueError: no stage has a parameter called 'w'; say (stage, name) for a model of functions.
run(fpipe.freeze(model_of('mean'), (0, 'b')))
    ValueError: leaf 'b' of stage 0 is frozen, but params of stage 0 have no such leaf.
fpipe.add_grads(({'w': torch.ones(2)},), ({'w': torch.ones(3)},))
    ValueError: gradients of two models: at [0]['w'] they are of shapes (2,) and (3,).
fpipe.add_grads(({'w': 1},), ({'v': 1},))
    ValueError: gradients of two structures: only one has a leaf at [0]['w']
""",
)


# Frozen parameters


def flops(model, given, trace: bool) -> int:
    step = fpipe.build(fpipe.program(model), model, trace=trace, audit="never")
    step(given, batch())
    with FlopCounterMode(display=False) as counter:
        step(given, batch())
    return counter.get_total_flops()


@pytest.mark.parametrize("trace", [True, False])
def test_a_frozen_parameter_costs_no_operation(trace: bool):
    """One product of 8x3 by 3x3 for a weight's gradient, and one more for the cotangent that nobody needs then."""
    model, product = fpipe.from_functions([linear] * 3, mean), 2 * 8 * 3 * 3
    given = params(stages=3)
    everything = flops(model, given, trace)
    assert everything == (3 + 3 + 2) * product
    assert flops(fpipe.freeze(model, 1), given, trace) == everything - product
    assert flops(fpipe.freeze(model, (0, "w")), given, trace) == everything - 2 * product
    assert flops(fpipe.freeze(model, 0, 1), given, trace) == everything - 4 * product


def test_frozen_leaves_have_no_gradient_and_the_others_theirs():
    model = fpipe.from_functions(
        [lambda p, x: x @ p["e"] + p["b"], lambda p, x: x @ p["e"]], mean, ties=[((0, "e"), (1, "e"))]
    )
    given = ({"e": torch.randn(3, 3), "b": torch.zeros(3)}, {})
    all_grads = fpipe.reference(model, given, batch()).grads
    for leaf in ((0, "e"), (1, "e")):
        frozen = fpipe.freeze(model, leaf)
        for trace in (True, False):
            grads = fpipe.build(fpipe.program(frozen), frozen, trace=trace)(given, batch()).grads
            assert grads[0]["e"] is None
            assert torch.equal(grads[0]["b"], all_grads[0]["b"])
    whole = given[0]["e"].clone().requires_grad_()
    fpipe.assign_grads(({"e": whole, "b": given[0]["b"]}, {}), grads)
    assert whole.grad is None


def test_what_does_not_train_is_not_kept():
    model = fpipe.from_functions([linear] * 2, mean)
    sizes = [fpipe.sizes(fpipe.program(m), m, params(stages=2), batch()) for m in (model, fpipe.freeze(model, 0))]
    kept, nothing = (each.bytes[fpipe.Value("res", 0, 0)] for each in sizes)
    assert (nothing, kept > 0) == (0, True)


# Scales, several steps, norms


@pytest.mark.parametrize("trace", [True, False])
def test_a_scaled_loss_scales_gradients_and_nothing_else(trace: bool):
    model = model_of("mean")
    program = fpipe.chain(fpipe.split(3), fpipe.merge(aux=JOIN))(fpipe.program(model))
    plain = fpipe.build(program, model, trace=trace)(params(), batch())
    scaled = fpipe.build(program, model, trace=trace, loss_scale=1024.0)(params(), batch())
    assert torch.equal(scaled.loss, plain.loss)
    for one, other in zip(leaves(scaled.grads), leaves(plain.grads), strict=True):
        assert torch.equal(one, other * 1024)


def test_a_scaled_loss_keeps_small_gradients_in_float16():
    model = fpipe.from_functions([lambda p, x: x * p["w"]], lambda y, t: (y * t).sum(), reduction="sum")
    given, small = ({"w": torch.ones(1, dtype=torch.float16)},), torch.full((1, 1), 2.0**-13, dtype=torch.float16)
    steps = (fpipe.build(fpipe.program(model), model, loss_scale=scale) for scale in (1.0, 2.0**12))
    lost, kept = (step(given, (small, small)).grads[0]["w"].item() for step in steps)
    assert (lost, kept) == (0.0, 2.0**-14)


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    ("dtype", "scale", "start"), [(torch.float32, 1e300, 5e299), (torch.float16, 2.0**17, 2.0**16)], ids=str
)
def test_a_scale_that_no_gradient_can_start_with_is_refused(dtype, scale: float, start: float, trace: bool):
    """torch said "value cannot be converted to type float without overflow"; in float16 gradients were NaN."""
    model = fpipe.from_functions([lambda p, x: x * p["w"]], lambda y, t: (y * t).mean())
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    given, half = ({"w": torch.ones(1, dtype=dtype)},), torch.ones(4, 1, dtype=dtype)
    words = f"loss_scale={scale!r} is too much for a loss in {dtype}, whose gradient would start at {start!r} (the most"
    with pytest.raises(ValueError, match=re.escape(words)):
        fpipe.build(program, model, trace=trace, loss_scale=scale)(given, (half, half))
    most = torch.finfo(dtype).max
    found = fpipe.build(program, model, trace=trace, loss_scale=most)(given, (half, half))
    assert found.grads[0]["w"].isfinite().all()


def test_a_counted_microbatch_without_anything_to_count_gives_zero():
    def masked(y, t):
        return ((y - t).square() * (t > 0)).sum(), (t > 0).sum()

    model = fpipe.from_functions([linear], masked, reduction="count")
    x, t = batch(6)
    for target in (torch.cat([t[:3].abs(), -t[3:].abs()]), -t.abs()):
        program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
        found = fpipe.build(program, model)(params(stages=1), (x, target))
        assert fpipe.verify(program, model, params(stages=1), (x, target)).bitwise
        assert torch.isfinite(found.grads[0]["w"]).all()
        assert (found.loss == 0) == bool((target <= 0).all()) == bool((found.grads[0]["w"] == 0).all())


@pytest.mark.parametrize("limit", [0.05, 50.0])
@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_gradients_are_clipped_as_torch_clips_them(limit: float, kind: float):
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model, own, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    x, t = torch.randn(6, 5), torch.randn(6, 3)
    nn.functional.mse_loss(net(x), t).backward()
    expected = nn.utils.clip_grad_norm_([*net.parameters()], limit, kind, foreach=False)
    given = fpipe.build(fpipe.program(model), model)(own, (x, t)).grads
    before = fpipe.tree.tree_map(torch.clone, given)
    clipped, norm = fpipe.clip_grads(given, limit, norm_type=kind)
    assert torch.equal(norm, expected)
    made = {name: grad for stage in clipped for name, grad in stage.items()}
    assert all(torch.equal(made[name], leaf.grad) for name, leaf in net.named_parameters() if leaf.grad is not None)
    assert all(map(torch.equal, fpipe.tree.leaves(given), fpipe.tree.leaves(before)))


def halves(dense: Tensor) -> Tensor:
    """A sparse tensor that says each of its numbers as two to be added."""
    at = dense.nonzero().t().repeat(1, 2)
    return torch.sparse_coo_tensor(at, dense[dense != 0].repeat(2) / 2, dense.shape, check_invariants=True)


LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "not added up": halves,
    "csr": lambda dense: dense.to_sparse_csr(),
    "jagged": lambda dense: torch.nested.as_nested_tensor([dense[:1], dense[1:]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_of_sparse_gradients_is_that_of_their_numbers(layout: str, kind: float):
    """torch said "Could not run 'aten::linalg_vector_norm' with arguments from the 'SparseCPU' backend"."""
    dense = torch.tensor([[3.0, 0.0, -4.0], [0.0, 12.0, 0.0]])
    found = fpipe.global_norm(({"w": LAYOUTS[layout](dense)}, {"w": torch.full((2,), 84.0)}), kind)
    torch.testing.assert_close(found, torch.cat([dense.flatten(), torch.full((2,), 84.0)]).norm(kind))
    assert fpipe.global_norm({"w": LAYOUTS[layout](torch.zeros(2, 3))}, kind) == 0


@pytest.mark.parametrize("trace", [True, False])
def test_a_gradient_that_no_step_would_give_is_refused_by_name(trace: bool):
    """A penalty on a net's own parameters, closed over, and a loss that learns lost their gradients without a word."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(8, 4), torch.randn(8, 4)

    def penalised(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean() + 0.01 * net[1].weight.square().sum()

    def told(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean() + 0.01 * net[1].weight.detach().square().sum()

    def run(loss: Any) -> Tensor:
        model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss)
        program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
        return fpipe.build(program, model, trace=trace)(params, batch).loss

    sentence = "the loss closes over 'net.1.weight' of shape (4, 4) that wants a gradient, which no step would give"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        run(penalised)
    assert torch.allclose(run(told), told(net(batch[0]), batch[1]))


def test_a_leaf_that_a_stage_makes_to_differentiate_by_is_no_missing_gradient():
    """Forces of an energy: it was refused as a tensor that the stage closes over, in traces and in the reference."""

    def force(params, x):
        with torch.enable_grad():
            places = x.detach().requires_grad_()
            energy = (places @ params).tanh().square().sum()
            return torch.autograd.grad(energy, places, create_graph=True)[0]

    model = fpipe.from_functions([force], loss=torch.nn.functional.mse_loss)
    params, batch = (torch.randn(4, 4, dtype=torch.float64),), torch.randn(2, 6, 4, dtype=torch.float64).unbind()
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    weight = params[0].clone().requires_grad_()
    halves = zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)
    loss = sum(torch.nn.functional.mse_loss(force(weight, x), t) * 0.5 for x, t in halves)
    (plain,) = torch.autograd.grad(loss, weight)
    for trace in (True, False):
        result = fpipe.build(program, model, trace=trace)(params, batch)
        torch.testing.assert_close(result.grads[0], plain, rtol=1e-12, atol=1e-14)
    assert fpipe.verify(program, model, params, batch).bitwise


# Padded labels


def embedded(p: Any, ids: Tensor) -> Tensor:
    return p["e"][ids]


def of_all(y: Tensor, t: Tensor, **how: Any) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), t.flatten(), **how)


def total_and_count(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return of_all(y, t, reduction="sum"), (t != -100).sum()


class Closes:
    """A loss that hands its criterion flat labels."""

    def __init__(self, criterion: nn.Module) -> None:
        self.loss = lambda y, t: criterion(y.flatten(0, 1), t.flatten())


IDS = torch.arange(12).view(4, 3) % 5
SOME = IDS.masked_fill(torch.arange(4)[:, None] * 3 < torch.arange(3) * 4, -100)  # in some rows more than in others
FIRST = IDS.masked_fill(torch.arange(3) == 0, -100)


def step_on(target: Tensor, loss: Any, reduction: Any = "mean", microbatches: int = 2) -> fpipe.Result:
    model = fpipe.from_functions([embedded], loss, reduction=reduction)
    program = fpipe.chain(fpipe.split(microbatches), fpipe.merge())(fpipe.program(model))
    return fpipe.build(program, model)(({"e": torch.eye(5)},), (IDS, target))


@pytest.mark.parametrize(
    ("target", "loss", "held"),
    [
        (SOME, of_all, -100),
        (SOME, Closes(nn.CrossEntropyLoss()).loss, -100),
        (SOME.where(SOME >= 0, 4), Closes(nn.CrossEntropyLoss(ignore_index=4)).loss, 4),
        (SOME.where(SOME >= 0, 4), partial(of_all, ignore_index=4), 4),
    ],
)
def test_padded_labels_under_a_mean_are_warned_of_at_the_first_step(target: Tensor, loss: Any, held: int):
    """Gradients were 12 to 20 % off, as with every mean of means, and nobody said so where dropout hid it."""
    words = f"target holds {held}, a class that the loss does not count, in some rows more often than in others: with"
    with pytest.warns(UserWarning, match=re.escape(words)):
        step_on(target, loss)


@pytest.mark.parametrize(
    ("target", "loss", "said"),
    [
        (IDS, of_all, {}),
        (FIRST, of_all, {}),  # equally many in each row: the mean of means is the mean
        (SOME, of_all, {"microbatches": 1}),
        (SOME, total_and_count, {"reduction": "count"}),
        (SOME, partial(of_all, reduction="sum"), {"reduction": "sum"}),
    ],
)
def test_labels_that_a_mean_is_right_for_are_not_warned_of(target: Tensor, loss: Any, said: Any):
    step_on(target, loss, **said)


@pytest.mark.parametrize("as_pairs", [False, True])
@pytest.mark.parametrize(
    ("target", "is_warned"), [(SOME, True), (FIRST, False), (SOME[[0, 1, 0, 1]], False), (IDS, False)]
)
def test_padding_is_compared_between_microbatches_that_are_cut_already(target: Tensor, is_warned: bool, as_pairs: bool):
    """Rows of a microbatch share its mean, however many labels each of them has."""
    model = fpipe.from_functions([embedded], of_all)
    program = fpipe.chain(fpipe.split(2, presplit=True), fpipe.merge())(fpipe.program(model))
    streams = [*IDS.split(2)], [*target.split(2)]
    batch: Any = [*zip(*streams, strict=True)] if as_pairs else streams
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fpipe.build(program, model)(({"e": torch.eye(5)},), batch)
    words = "target holds -100, a class that the loss does not count, in some microbatches more often than in others"
    assert [str(warning.message)[: len(words)] for warning in caught] == [words] * is_warned


class Judge(nn.Module):
    """Computes its loss, as models of transformers do, of all labels of a step where it is told how many there are."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Embedding(5, 8), nn.Dropout(p), nn.Linear(8, 8), nn.Linear(8, 5))

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        how = "mean" if num_items_in_batch is None else "sum"
        loss = of_all(self.blocks(ids), labels, reduction=how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_a_net_that_is_told_how_many_labels_a_step_has_trains_on_their_mean(kind: Any):
    net, count = Judge(), int((SOME >= 0).sum())
    with pytest.warns(UserWarning, match=re.escape("hand in num_items_in_batch, a tensor with the number of labels")):
        fpipe.from_module(net, 2, example={"ids": IDS, "labels": SOME})
    inputs = {"ids": IDS, "labels": SOME, "num_items_in_batch": kind(count)}
    model, params, _ = fpipe.from_module(net, 2, example=inputs, reduction="sum")
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model)
    of_all(net.blocks(IDS), SOME).backward()
    grads = fpipe.join_params(model, step(params, (inputs, None)).grads)
    for name, leaf in net.named_parameters():
        torch.testing.assert_close(grads[name], leaf.grad)
    other = inputs | {"num_items_in_batch": kind(count + 1)}
    if kind is int:
        words = f"was {count} when the net was traced, found {count + 1}. A number that changes goes in as torch.tensor"
        with pytest.raises(ValueError, match=re.escape(words)):
            step(params, (other, None))
    else:
        assert torch.allclose(step(params, (other, None)).loss, of_all(net.blocks(IDS), SOME) * count / (count + 1))


@pytest.mark.filterwarnings("ignore:.* holds -100")
@pytest.mark.parametrize("labels", [SOME, FIRST])
def test_verify_says_of_padded_labels_under_dropout_too(labels: Tensor):
    """Of a net that computes its loss it said that the undivided batch gives others, "as it may"."""
    inputs = {"ids": IDS, "labels": labels}
    model, params, _ = fpipe.from_module(Judge(0.5), 2, example=inputs)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    notes = fpipe.verify(program, model, params, (inputs, None), key=0).notes
    words = "inputs['labels'] holds -100, a class that the loss does not count, in some rows more often than in others"
    assert [note[: len(words)] for note in notes] == [words] * (labels is SOME)


def test_a_loss_that_ignores_no_class_is_not_searched_for_padding():
    """Labels were compared with the class None, which ended in an AttributeError."""
    x, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    model, params, _ = fpipe.from_module(nn.Linear(3, 3), 1, example=(x, labels), loss=nn.MultiMarginLoss())
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model)
    assert torch.isfinite(step(params, (x, labels)).loss)
