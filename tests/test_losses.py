"""Several losses and gradients: auxiliary losses and metrics, frozen parameters, input gradients, scales."""

import re
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe.meaning.single_device.microbatch import cut
from fpipe.tree import leaves
from tests.refusals import refusals


def linear(p, x):
    return torch.tanh(x @ p["w"])


def balanced(p, x):
    """Apply a layer that returns the balance of its experts as an auxiliary loss."""
    y = torch.tanh(x @ p["w"])
    return y, (y.mean(0) ** 2).sum()


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
        [linear, balanced, balanced, lambda p, x: x[0] @ p["w"] + x[1]],
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


def test_an_auxiliary_loss_sends_only_its_number():
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
    undivided = fpipe.reference(model, params(), batch())
    joined = fpipe.chain(fpipe.split(3), fpipe.merge(aux=JOIN))(fpipe.program(model))
    aux = fpipe.build(joined, model)(params(), batch()).aux
    assert torch.equal(aux["right"], undivided.aux["right"])
    assert torch.allclose(aux["error"], undivided.aux["error"])
    assert torch.allclose(aux["guess"], undivided.aux["guess"])
    assert not aux["guess"].requires_grad
    streamed = fpipe.chain(fpipe.split(3), fpipe.merge(aux="stream"))(fpipe.program(model))
    stream = fpipe.build(streamed, model)(params(), batch()).aux
    assert [len(metrics["guess"]) for metrics in stream] == [3, 3, 2]
    assert torch.equal(sum(metrics["right"] for metrics in stream), undivided.aux["right"])
    assert fpipe.verify(streamed, model, params(), batch()).bitwise


def test_from_loss_returns_metrics():
    def loss_fn(p, pair):
        x, t = pair
        y = fpipe.boundary(torch.tanh(x @ p["a"])) @ p["b"]
        return counted(y, t), {"right": (y > t).sum(), "rows": 3}

    joined_params = {name: torch.randn(3, 3) for name in "ab"}
    model, stage_params = fpipe.from_loss(loss_fn, joined_params, batch(), reduction="count", aux=True)
    merge = fpipe.merge(aux={"right": fpipe.Sum(), "rows": None})
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.zb_h1(2), merge)(fpipe.program(model))
    assert fpipe.verify(program, model, stage_params, batch()).bitwise
    assert fpipe.build(program, model)(stage_params, batch()).aux == loss_fn(joined_params, batch())[1]


def run(model, pipeline=None):
    stage_params = tuple({"w": torch.eye(3)} for _ in model.stages)
    program = (pipeline or fpipe.identity())(fpipe.program(model))
    return fpipe.build(program, model, trace=False)(stage_params, batch())


test_wrong_losses_are_refused = refusals(
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
fpipe.add_grads(({'w': torch.ones(2)},), ({'v': torch.ones(2)},))
    ValueError: gradients differ: only one structure has a leaf at [0]['w']
""",
)


# Frozen parameters


def flops(model, stage_params, trace: bool) -> int:
    step = fpipe.build(fpipe.program(model), model, trace=trace, audit="never")
    step(stage_params, batch())
    with FlopCounterMode(display=False) as counter:
        step(stage_params, batch())
    return counter.get_total_flops()


@pytest.mark.parametrize("trace", [True, False])
def test_a_frozen_parameter_costs_no_operation(trace: bool):
    """A weight's gradient costs one product of 8x3 by 3x3, and the cotangent that nobody then needs one more."""
    model, product = fpipe.from_functions([linear] * 3, mean), 2 * 8 * 3 * 3
    stage_params = params(stages=3)
    all_flops = flops(model, stage_params, trace)
    assert all_flops == (3 + 3 + 2) * product
    assert flops(fpipe.freeze(model, 1), stage_params, trace) == all_flops - product
    assert flops(fpipe.freeze(model, (0, "w")), stage_params, trace) == all_flops - 2 * product
    assert flops(fpipe.freeze(model, 0, 1), stage_params, trace) == all_flops - 4 * product


def test_only_frozen_leaves_have_no_gradient():
    model = fpipe.from_functions(
        [lambda p, x: x @ p["e"] + p["b"], lambda p, x: x @ p["e"]], mean, ties=[((0, "e"), (1, "e"))]
    )
    stage_params = ({"e": torch.randn(3, 3), "b": torch.zeros(3)}, {})
    all_grads = fpipe.reference(model, stage_params, batch()).grads
    for leaf in ((0, "e"), (1, "e")):
        frozen = fpipe.freeze(model, leaf)
        for trace in (True, False):
            grads = fpipe.build(fpipe.program(frozen), frozen, trace=trace)(stage_params, batch()).grads
            assert grads[0]["e"] is None
            assert torch.equal(grads[0]["b"], all_grads[0]["b"])
    embedding = stage_params[0]["e"].clone().requires_grad_()
    fpipe.assign_grads(({"e": embedding, "b": stage_params[0]["b"]}, {}), grads)
    assert embedding.grad is None


def test_residuals_of_frozen_stages_are_not_kept():
    model = fpipe.from_functions([linear] * 2, mean)
    sizes = [fpipe.sizes(fpipe.program(m), m, params(stages=2), batch()) for m in (model, fpipe.freeze(model, 0))]
    trained_bytes, frozen_bytes = (model_sizes.bytes[fpipe.Value("res", 0, 0)] for model_sizes in sizes)
    assert (frozen_bytes, trained_bytes > 0) == (0, True)


# Scales, several steps, norms


@pytest.mark.parametrize("trace", [True, False])
def test_a_scaled_loss_scales_gradients_and_nothing_else(trace: bool):
    model = model_of("mean")
    program = fpipe.chain(fpipe.split(3), fpipe.merge(aux=JOIN))(fpipe.program(model))
    plain = fpipe.build(program, model, trace=trace)(params(), batch())
    scaled = fpipe.build(program, model, trace=trace, loss_scale=1024.0)(params(), batch())
    assert torch.equal(scaled.loss, plain.loss)
    for scaled_grad, plain_grad in zip(leaves(scaled.grads), leaves(plain.grads), strict=True):
        assert torch.equal(scaled_grad, plain_grad * 1024)


def test_a_scaled_loss_keeps_small_gradients_in_float16():
    model = fpipe.from_functions([lambda p, x: x * p["w"]], lambda y, t: (y * t).sum(), reduction="sum")
    stage_params, small = (
        ({"w": torch.ones(1, dtype=torch.float16)},),
        torch.full((1, 1), 2.0**-13, dtype=torch.float16),
    )
    steps = (fpipe.build(fpipe.program(model), model, loss_scale=scale) for scale in (1.0, 2.0**12))
    plain_grad, scaled_grad = (step(stage_params, (small, small)).grads[0]["w"].item() for step in steps)
    assert (plain_grad, scaled_grad) == (0.0, 2.0**-14)


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    ("dtype", "scale", "start"), [(torch.float32, 1e300, 5e299), (torch.float16, 2.0**17, 2.0**16)], ids=str
)
def test_a_scale_that_no_gradient_can_start_with_is_refused(dtype, scale: float, start: float, trace: bool):
    """Used to end in torch's "value cannot be converted to type float without overflow"; float16 gave NaN."""
    model = fpipe.from_functions([lambda p, x: x * p["w"]], lambda y, t: (y * t).mean())
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    stage_params, half = ({"w": torch.ones(1, dtype=dtype)},), torch.ones(4, 1, dtype=dtype)
    message = f"loss_scale={scale!r} is too much for a loss in {dtype}, whose gradient would start at {start!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        fpipe.build(program, model, trace=trace, loss_scale=scale)(stage_params, (half, half))
    largest = torch.finfo(dtype).max
    result = fpipe.build(program, model, trace=trace, loss_scale=largest)(stage_params, (half, half))
    assert result.grads[0]["w"].isfinite().all()


def test_a_microbatch_that_counts_nothing_gives_zero():
    def masked(y, t):
        return ((y - t).square() * (t > 0)).sum(), (t > 0).sum()

    model = fpipe.from_functions([linear], masked, reduction="count")
    x, t = batch(6)
    for target in (torch.cat([t[:3].abs(), -t[3:].abs()]), -t.abs()):
        program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
        result = fpipe.build(program, model)(params(stages=1), (x, target))
        assert fpipe.verify(program, model, params(stages=1), (x, target)).bitwise
        assert torch.isfinite(result.grads[0]["w"]).all()
        assert (result.loss == 0) == bool((target <= 0).all()) == bool((result.grads[0]["w"] == 0).all())


@pytest.mark.parametrize("limit", [0.05, 50.0])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_are_clipped_as_torch_clips_them(limit: float, norm_type: float):
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model, stage_params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    x, t = torch.randn(6, 5), torch.randn(6, 3)
    nn.functional.mse_loss(net(x), t).backward()
    expected = nn.utils.clip_grad_norm_([*net.parameters()], limit, norm_type, foreach=False)
    grads = fpipe.build(fpipe.program(model), model)(stage_params, (x, t)).grads
    grads_before = fpipe.tree.tree_map(torch.clone, grads)
    clipped, norm = fpipe.clip_grads(grads, limit, norm_type=norm_type)
    assert torch.equal(norm, expected)
    by_name = {name: grad for stage in clipped for name, grad in stage.items()}
    assert all(torch.equal(by_name[name], leaf.grad) for name, leaf in net.named_parameters() if leaf.grad is not None)
    assert all(map(torch.equal, fpipe.tree.leaves(grads), fpipe.tree.leaves(grads_before)))


def halved_sparse(dense: Tensor) -> Tensor:
    """Return a sparse tensor with each number split into two halves, to be added."""
    indices = dense.nonzero().t().repeat(1, 2)
    return torch.sparse_coo_tensor(indices, dense[dense != 0].repeat(2) / 2, dense.shape, check_invariants=True)


LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "not added up": halved_sparse,
    "csr": lambda dense: dense.to_sparse_csr(),
    "jagged": lambda dense: torch.nested.as_nested_tensor([dense[:1], dense[1:]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_of_sparse_gradients_is_that_of_their_numbers(layout: str, norm_type: float):
    """Used to end in torch's "Could not run 'aten::linalg_vector_norm'" for the SparseCPU backend."""
    dense = torch.tensor([[3.0, 0.0, -4.0], [0.0, 12.0, 0.0]])
    norm = fpipe.global_norm(({"w": LAYOUTS[layout](dense)}, {"w": torch.full((2,), 84.0)}), norm_type)
    torch.testing.assert_close(norm, torch.cat([dense.flatten(), torch.full((2,), 84.0)]).norm(norm_type))
    assert fpipe.global_norm({"w": LAYOUTS[layout](torch.zeros(2, 3))}, norm_type) == 0


@pytest.mark.parametrize("trace", [True, False])
def test_a_closed_over_leaf_that_wants_a_gradient_is_refused_by_name(trace: bool):
    """Used to lose, in silence, the gradient of a penalty on the net's own parameters, and of a loss that learns."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(8, 4), torch.randn(8, 4)

    def penalised(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean() + 0.01 * net[1].weight.square().sum()

    def detached_penalty(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean() + 0.01 * net[1].weight.detach().square().sum()

    def run(loss: Any) -> Tensor:
        model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss)
        program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
        return fpipe.build(program, model, trace=trace)(params, batch).loss

    sentence = "the loss closes over 'net.1.weight' of shape (4, 4) that wants a gradient, which no step would give"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        run(penalised)
    assert torch.allclose(run(detached_penalty), detached_penalty(net(batch[0]), batch[1]))


def test_a_leaf_made_inside_a_stage_is_no_missing_gradient():
    """Used to be refused as a captured tensor that needs a gradient: a stage gets forces as gradients of an energy."""

    def force(params, x):
        with torch.enable_grad():
            positions = x.detach().requires_grad_()
            energy = (positions @ params).tanh().square().sum()
            return torch.autograd.grad(energy, positions, create_graph=True)[0]

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


def entropy(y: Tensor, t: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), t.flatten(), **options)


class FlatLabelLoss:
    """A loss that calls a criterion on flat outputs and labels."""

    def __init__(self, criterion: nn.Module) -> None:
        self.loss = lambda y, t: criterion(y.flatten(0, 1), t.flatten())


IDS = torch.arange(12).view(4, 3) % 5
UNEVEN = IDS.masked_fill(torch.arange(4)[:, None] * 3 < torch.arange(3) * 4, -100)  # rows pad unequally
EVEN = IDS.masked_fill(torch.arange(3) == 0, -100)


def step_on(target: Tensor, loss: Any, reduction: Any = "mean", microbatches: int = 2) -> fpipe.Result:
    model = fpipe.from_functions([embedded], loss, reduction=reduction)
    program = fpipe.chain(fpipe.split(microbatches), fpipe.merge())(fpipe.program(model))
    return fpipe.build(program, model)(({"e": torch.eye(5)},), (IDS, target))


@pytest.mark.parametrize(
    ("target", "loss", "ignored_class"),
    [
        (UNEVEN, entropy, -100),
        (UNEVEN, FlatLabelLoss(nn.CrossEntropyLoss()).loss, -100),
        (UNEVEN.where(UNEVEN >= 0, 4), FlatLabelLoss(nn.CrossEntropyLoss(ignore_index=4)).loss, 4),
        (UNEVEN.where(UNEVEN >= 0, 4), partial(entropy, ignore_index=4), 4),
        (UNEVEN.where(UNEVEN >= 0, 4), lambda y, t: entropy(y, t, ignore_index=4), 4),
        (UNEVEN.where(UNEVEN >= 0, -1), lambda y, t: entropy(y, t.int().long(), ignore_index=-1), -1),
        (UNEVEN, lambda y, t: entropy(y, t, reduction="sum") / (t != -100).sum(), -100),
    ],
)
def test_padded_labels_under_a_mean_warn_at_the_first_step(target: Tensor, loss: Any, ignored_class: int):
    """Used to give gradients that were 12 to 20 % off, as any mean of means, and dropout hid it."""
    message = f"target holds {ignored_class}, a class that the loss does not count, in some rows more often"
    message += " than in others: with"
    with pytest.warns(UserWarning, match=re.escape(message)):
        step_on(target, loss)


@pytest.mark.parametrize(
    ("target", "loss", "options"),
    [
        (IDS, entropy, {}),
        (EVEN, entropy, {}),  # equally many in each row: the mean of means is the mean
        (UNEVEN, entropy, {"microbatches": 1}),
        (UNEVEN, lambda y, t: (entropy(y, t, reduction="sum"), (t != -100).sum()), {"reduction": "count"}),
        (UNEVEN, partial(entropy, reduction="sum"), {"reduction": "sum"}),
        # These used to warn too, since any whole numbers of -100 counted as labels.
        (UNEVEN, lambda y, t: entropy(y, t, reduction="sum") / t.numel(), {}),
        (UNEVEN, lambda y, t: entropy(y, t, reduction="none").mean(), {}),
        (UNEVEN, lambda y, t: (y.sum(-1) - t).square().mean(), {}),
        (IDS.roll(1, 1), partial(entropy, weight=torch.arange(5.0)), {"microbatches": 1}),
        (IDS[:1].expand(4, -1), partial(entropy, weight=torch.arange(5.0)), {}),
        (IDS, partial(entropy, weight=torch.full((5,), 2.0)), {}),  # equal weights: used to warn
    ],
)
def test_labels_that_a_mean_weighs_equally_do_not_warn(target: Tensor, loss: Any, options: Any):
    step_on(target, loss, **options)


@pytest.mark.parametrize("presplit", [False, True])
@pytest.mark.parametrize("has_own_loss", [False, True])
def test_weights_of_classes_under_a_mean_warn(has_own_loss: bool, presplit: bool):
    """A weighted mean divides by the weights of a microbatch's labels; nothing used to say so."""
    split_and_merge = fpipe.chain(fpipe.split(2, presplit=presplit), fpipe.merge())
    loss = partial(entropy, weight=torch.arange(1.0, 6.0))
    side = "inputs['labels']" if has_own_loss else "target"
    parts = "microbatches" if presplit else "rows"
    if has_own_loss:
        # Equal weights cancel: no warning, which would be an error here.
        equal_weights = NetWithLoss(loss=partial(entropy, weight=torch.ones(5)))
        fpipe.from_module(equal_weights, 2, batch={"ids": IDS, "labels": IDS})
    net = NetWithLoss(loss=loss) if has_own_loss else NetWithLoss().blocks
    batch: Any = ({"ids": IDS, "labels": IDS}, None) if has_own_loss else (IDS, IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a net that computes its loss warns at the cut
        model, params, _ = fpipe.from_module(net, 2, batch=batch, loss=None if has_own_loss else loss)
    batch = [cut(batch, index, 2)[0] for index in range(2)] if presplit else batch
    step = fpipe.build(split_and_merge(fpipe.program(model)), model)
    with pytest.warns(UserWarning, match=re.escape(f"{side} holds classes that the loss weighs in some {parts} more")):
        step(params, batch)


@pytest.mark.parametrize("as_pairs", [False, True])
@pytest.mark.parametrize(
    ("target", "is_warned"), [(UNEVEN, True), (EVEN, False), (UNEVEN[[0, 1, 0, 1]], False), (IDS, False)]
)
def test_padding_is_compared_between_presplit_microbatches(target: Tensor, is_warned: bool, as_pairs: bool):
    """All rows of a presplit microbatch share its mean, so only counts of whole microbatches matter."""
    model = fpipe.from_functions([embedded], entropy)
    program = fpipe.chain(fpipe.split(2, presplit=True), fpipe.merge())(fpipe.program(model))
    streams = [*IDS.split(2)], [*target.split(2)]
    batch: Any = [*zip(*streams, strict=True)] if as_pairs else streams
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fpipe.build(program, model)(({"e": torch.eye(5)},), batch)
    message = "target holds -100, a class that the loss does not count, in some microbatches more often than in others"
    assert [str(warning.message)[: len(message)] for warning in caught] == [message] * is_warned


def test_presplit_microbatches_of_unequal_lengths_warn():
    """Used to be silent, as no label is ignored: a mean over 2 labels a row weighed as much as one over 3."""
    model = fpipe.from_functions([embedded], entropy)
    program = fpipe.chain(fpipe.split(2, presplit=True), fpipe.merge(outputs=False))(fpipe.program(model))
    streams = [IDS[:2], IDS[2:, :2]]
    with pytest.warns(UserWarning, match=re.escape("target has more labels a row in some microbatches than in others")):
        fpipe.build(program, model)(({"e": torch.eye(5)},), (streams, streams))


def test_a_class_that_only_the_code_of_a_loss_ignores_is_found_in_presplit_steps():
    model = fpipe.from_functions([embedded], lambda y, t: entropy(y, t["labels"], ignore_index=4))
    program = fpipe.chain(fpipe.split(2, presplit=True), fpipe.merge())(fpipe.program(model))
    targets = [{"labels": labels} for labels in UNEVEN.where(UNEVEN >= 0, 4).split(2)]
    step = fpipe.build(program, model)
    with pytest.warns(UserWarning, match=re.escape("target['labels'] holds 4, a class that the loss does not count")):
        step(({"e": torch.eye(5)},), ([*IDS.split(2)], targets))
    step(({"e": torch.eye(5)},), ([*IDS.split(2)], targets))  # said once


class NetWithLoss(nn.Module):
    """A net that computes its loss, like models of transformers: over all labels of a step if given their number."""

    def __init__(self, p: float = 0.0, ignored_class: int = -100, loss: Any = entropy) -> None:
        super().__init__()
        self.ignored_class, self.loss = ignored_class, loss
        self.blocks = nn.Sequential(nn.Embedding(5, 8), nn.Dropout(p), nn.Linear(8, 8), nn.Linear(8, 5))

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        label_reduction = "mean" if num_items_in_batch is None else "sum"
        loss = self.loss(self.blocks(ids), labels, reduction=label_reduction, ignore_index=self.ignored_class)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


@pytest.mark.parametrize("number_type", [int, torch.tensor])
def test_a_net_with_num_items_in_batch_trains_on_the_mean_of_labels(number_type: Any):
    net, count = NetWithLoss(), int((UNEVEN >= 0).sum())
    with pytest.warns(UserWarning, match=re.escape("hand in num_items_in_batch, a tensor with the number of labels")):
        fpipe.from_module(net, 2, batch={"ids": IDS, "labels": UNEVEN})
    inputs = {"ids": IDS, "labels": UNEVEN, "num_items_in_batch": number_type(count)}
    model, params, _ = fpipe.from_module(net, 2, batch=inputs, reduction="sum")
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model)
    entropy(net.blocks(IDS), UNEVEN).backward()
    grads = fpipe.join_params(model, step(params, (inputs, None)).grads)
    for name, leaf in net.named_parameters():
        torch.testing.assert_close(grads[name], leaf.grad)
    other_inputs = inputs | {"num_items_in_batch": number_type(count + 1)}
    if number_type is int:
        text = f"was {count} when the net was traced, found {count + 1}. A number that changes goes in as torch.tensor"
        with pytest.raises(ValueError, match=re.escape(text)):
            step(params, (other_inputs, None))
    else:
        assert torch.allclose(
            step(params, (other_inputs, None)).loss, entropy(net.blocks(IDS), UNEVEN) * count / (count + 1)
        )


@pytest.mark.parametrize("ignored_class", [-100, -1, 4])
def test_a_net_that_computes_its_loss_warns_of_labels_that_are_padded_only_in_a_step(ignored_class: int):
    """Used to look for -100 alone at the step, and at the cut to take token ids for labels."""
    whole = IDS % 4
    labels = whole.where(UNEVEN >= 0, ignored_class)
    example = {"ids": IDS, "labels": whole}
    model, params, _ = fpipe.from_module(NetWithLoss(ignored_class=ignored_class), 2, batch=example)
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model)
    with pytest.warns(UserWarning, match=re.escape(f"inputs['labels'] holds {ignored_class}, a class that")):
        step(params, ({"ids": IDS, "labels": labels}, None))


@pytest.mark.filterwarnings("ignore:.* holds -100")
@pytest.mark.parametrize("labels", [UNEVEN, EVEN])
def test_verify_notes_padded_labels_under_dropout(labels: Tensor):
    """Used to say, for a net that computes its loss, only that the undivided batch differs, "as it may"."""
    inputs = {"ids": IDS, "labels": labels}
    model, params, _ = fpipe.from_module(NetWithLoss(0.5), 2, batch=inputs)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    notes = fpipe.verify(program, model, params, (inputs, None), key=0).notes
    text = "inputs['labels'] holds -100, a class that the loss does not count, in some rows more often than in others"
    assert [note[: len(text)] for note in notes] == [text] * (labels is UNEVEN)
