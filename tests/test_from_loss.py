"""One loss function, cut where it is marked: dataflow, ties, skips and the function's own gradients."""

import functools
import linecache
import math
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.graphs.tracing import trace_cache
from fpipe.models.exporting.boundary import record_boundaries, seed_stages
from property_tests.bits import is_same_gradient
from tests.refusals import refusals
from tests.toys import merged, scripted

WIDTH, WORDS, LENGTH = 8, 16, 6


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(F.layer_norm(x, (WIDTH,), p["gain"]) @ p["w"])


def gpt(params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    """A tied embedding, positions from a mask made inside, and a skip from the embedding to the head."""
    ids, target = batch
    x = skip = F.embedding(ids, params["embed"]) + params["position"][torch.arange(ids.shape[1])]
    for own in params["blocks"]:
        x = block(own, fpipe.boundary(x))
    x = fpipe.boundary(x)
    return F.cross_entropy(F.linear(x + skip, params["embed"]).flatten(0, 1), target.flatten())


@functools.cache
def cut_gpt(blocks: int = 2) -> tuple[fpipe.Model, Any, Any, tuple[Tensor, Tensor]]:
    """The model, its parameters per stage and as a whole, and a batch."""
    torch.manual_seed(0)
    params = {
        "embed": torch.randn(WORDS, WIDTH),
        "position": torch.randn(LENGTH, WIDTH),
        "blocks": [{"gain": torch.ones(WIDTH), "w": torch.randn(WIDTH, WIDTH)} for _ in range(blocks)],
    }
    batch = torch.randint(0, WORDS, (8, LENGTH)), torch.randint(0, WORDS, (8, LENGTH))
    return *fpipe.from_loss(gpt, params, batch), params, batch


def square() -> dict[str, Tensor]:
    return {"w": torch.randn(4, 4)}


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randn(count, 4)


def simple(change: Any, fn: Any = lambda x, w: fpipe.boundary(x @ w)) -> Any:
    return lambda params, batch: change(fn(batch[0], params["w"]), params["w"], batch[1])


def of_net(net: nn.Module) -> Any:
    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(fpipe.boundary(torch.func.functional_call(net, params, (batch[0],))) * 2, batch[1])

    return loss_fn


def test_stages_skips_and_ties_fall_out_of_the_dataflow():
    model, own, _, _ = cut_gpt()
    assert model.inputs == ("batch", 0, 1, (0, 2))
    assert model.ties == (((0, "embed"), (3, "embed")),)
    assert [[*stage] for stage in own] == [
        ["embed", "position"],
        *([f"blocks.{at}.gain", f"blocks.{at}.w"] for at in range(2)),
        [],
    ]


def test_join_params_gives_the_pytree_back_and_split_params_undoes_it():
    model, own, params, _ = cut_gpt()
    whole = fpipe.join_params(model, own)
    flat = torch.utils._pytree.tree_leaves
    assert torch.utils._pytree.tree_structure(whole) == torch.utils._pytree.tree_structure(params)
    assert all(torch.equal(a, b) for a, b in zip(flat(whole), flat(params), strict=True))
    again = fpipe.split_params(model, whole)
    assert all(a.keys() == b.keys() and all(a[n] is b[n] for n in a) for a, b in zip(again, own, strict=True))


def test_a_boundary_outside_from_loss_changes_nothing():
    x = {"a": torch.ones(2), "n": 3}
    assert fpipe.boundary(x) is x


def handed_to_others_and_to_the_loss(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """IndexError: the last stage hands it to the loss as an output of another number than the early one's."""
    first = torch.tanh(x @ p["a"])
    gate = torch.sigmoid(first @ p["b"])
    second = torch.tanh(fpipe.boundary(first) @ p["b"])
    third = torch.tanh(fpipe.boundary(second) @ p["c"]) * gate
    return (third - target).square().mean() + (first * target).mean() + gate.mean()


def odd(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """no_grad, autocast, a change in place and a checkpoint, inside of stages."""
    with torch.no_grad():
        scale = (x @ p["a"]).abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        x = F.linear(x, p["a"])
    x = fpipe.boundary(F.relu(x.float() / scale, inplace=True))
    return (checkpoint(torch.tanh, x @ p["b"], use_reentrant=False) - target).square().mean()


def autocast_over_all(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = fpipe.boundary(torch.tanh(fpipe.boundary(x @ p["a"]) @ p["b"])) @ p["c"]
        return F.cross_entropy(y, target.argmax(-1))


def autocast_over_marks(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.tanh(fpipe.boundary(x @ p["a"]) @ p["b"])
        with torch.autocast("cpu", enabled=False):
            x = fpipe.boundary(x.float() @ p["c"]) * 2
        y = x @ p["c"].t()
    return F.mse_loss(y.float(), target)


def autocast_in_the_loss(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    x = fpipe.boundary(x @ p["a"])
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ p["b"] @ target.t()).float().square().mean()


def gradients_said_to_be_on(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    with torch.set_grad_enabled(True):
        return F.mse_loss(fpipe.boundary(torch.tanh(x @ p["a"])) @ p["b"], target)


def no_grad_over_a_mark(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        frozen = fpipe.boundary(torch.tanh(x @ p["a"])) @ p["b"]
        with torch.enable_grad():
            trained = x @ p["b"]
    return F.mse_loss(fpipe.boundary(trained @ p["c"]) + frozen, target)


def no_grad_in_the_loss(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    error = fpipe.boundary(x @ p["a"]) @ p["b"] - target
    with torch.no_grad():
        weight = error.abs()
    return (weight * error.square()).mean()


def tied_in_autocast(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """Cast once here, and so added up in bfloat16; in two stages added up in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.tanh(fpipe.boundary(torch.tanh(x @ p["a"])) @ p["b"]) @ p["a"]
        return F.mse_loss(y @ p["c"], target)


def a_checkpoint_in_a_checkpoint(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """A trace had its values and not their gradient: they were detached, and the function was refused."""

    def inner(x: Tensor) -> Any:
        return checkpoint(torch.tanh, x, use_reentrant=False)

    return (checkpoint(inner, fpipe.boundary(x @ p["a"]) @ p["b"], use_reentrant=False) - target).square().mean()


def read_by_a_write(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """A KeyError; and a later stage made the mask anew, without what was written into a view."""
    mask = torch.zeros(4)
    mask[1:].add_(1)
    y = (x @ p["a"]).add_(CLOSED_OVER) * mask
    return (fpipe.boundary(y) * mask + CLOSED_OVER - target).square().mean()


CLOSED_OVER = torch.arange(4.0)


def modules_made_meanwhile(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    made = Watching("another")
    made(made(x))
    made.register_buffer("late", x)
    made.itself = [made]
    return (fpipe.boundary(x @ p["a"]) * made.seen - target).square().mean()


def a_norm_in_eval(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    return (SETTLED(fpipe.boundary(x @ p["a"])) * 1.0 - target).square().mean()


SETTLED = nn.BatchNorm1d(4).eval().requires_grad_(False)


def a_local_that_is_assigned_later() -> Any:
    """An empty cell was read, and from_loss failed before it began."""

    def loss_fn(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return (fpipe.boundary(x @ p["a"]) - target).square().mean() if p else later

    later = torch.zeros(())
    return loss_fn


FUNCTIONS = [
    handed_to_others_and_to_the_loss,
    odd,
    tied_in_autocast,
    autocast_over_all,
    autocast_over_marks,
    autocast_in_the_loss,
    gradients_said_to_be_on,
    no_grad_over_a_mark,
    no_grad_in_the_loss,
    a_checkpoint_in_a_checkpoint,
    read_by_a_write,
    modules_made_meanwhile,
    a_norm_in_eval,
    a_local_that_is_assigned_later(),
]


def own_grads(loss_fn: Any, params: Any, batch: tuple[Tensor, Tensor], microbatches: int) -> dict[Any, Tensor]:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    for x, t in zip(*(half.tensor_split(microbatches) for half in batch), strict=True):
        (loss_fn(leaves, (x, t)) * (len(x) / len(batch[0]))).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def assert_own(loss_fn: Any, params: Any, batch: Any, microbatches: int) -> fpipe.Model:
    """The gradients of the cut function are its own, bit by bit; those of tied leaves are added in another order."""
    model, own = fpipe.from_loss(loss_fn, params, batch)
    program = merged(model, microbatches, fpipe.checkpoint("always"), fpipe.schedules.zb_h1(len(model.stages)))
    found = fpipe.join_params(model, fpipe.build(program, model)(own, batch).grads)
    tied = {leaf for group in model.ties for _, leaf in group}
    for name, right in own_grads(loss_fn, params, batch, microbatches).items():
        if name in tied:
            torch.testing.assert_close(found[name], right, rtol=1e-2, atol=1e-3)
        else:
            assert is_same_gradient(found[name], right), name
    return model


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_cut_function_has_its_own_gradients(function: Any):
    """The loss was computed outside of its block, and a mark inside one refused: autocast around all of a training
    step, as most people write it, had other bits, in words that blamed .item()."""
    torch.manual_seed(0)
    params = {name: torch.randn(4, 4) for name in "abc"}
    assert_own(lambda p, batch: function(p, *batch), params, rows(7), 3)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_a_gradient_in_python_is_warned_of_and_told_by_verify() -> None:
    """The stages differentiate the forward of a custom Function, and its backward is in no trace."""
    params, batch = square(), rows()
    with pytest.warns(UserWarning, match="loss_fn computes a gradient in Python"):
        model, own = fpipe.from_loss(simple(lambda y, w, t: (Tripled.apply(y @ w) - t).square().mean()), params, batch)
    with pytest.raises(fpipe.GradientMismatch, match="The gradient of w by the stages is off"):
        fpipe.verify(fpipe.program(model), model, own, batch)


def gradient_inside(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].clone().requires_grad_()
    y = fpipe.boundary(torch.tanh(x @ params["w"])) @ params["w"]
    return (torch.autograd.grad(y.sum(), x, create_graph=True)[0] - batch[1]).square().mean()


def rows_put_together(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    y = fpipe.boundary(torch.tanh(batch[0] @ params["w"]))
    return (y - batch[1]).square().sum() / batch[1].shape[0]


def beside_a_table(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
    (x, table), target = batch
    y = x @ params["w"] * (2 if x.shape[0] > table.shape[0] else 1)
    return (fpipe.boundary(y) @ params["w"] - target).mean()


def shifted(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
    (x, shift), target = batch
    return (fpipe.boundary(x @ params["w"] + shift) @ params["w"] - target).square().mean()


def refused(loss_fn: Any) -> Any:
    return fpipe.from_loss(loss_fn, {"w": torch.randn(4, 4), "loss": torch.ones(())}, rows())


def returned(of_error: Any, **options: Any) -> Any:
    """A loss function that returns what it is told to."""
    loss_fn = lambda params, batch: of_error(fpipe.boundary(batch[0] @ params["w"]) - batch[1])  # noqa: E731
    return fpipe.from_loss(loss_fn, square(), rows(), **options)


def taken(function: Any) -> Any:
    return fpipe.from_loss(function, {}, ONES)


def stepped(loss_fn: Any, example: Any, batch: Any, parts: int = 2, spec: Any = None) -> fpipe.Result:
    """A step of a function that was cut with an example."""
    params = square()
    model, own = fpipe.from_loss(loss_fn, params, example)
    return fpipe.build(fpipe.split(parts, spec=spec)(fpipe.program(model)), model)(own, batch)


def beside(table: int) -> tuple[Any, Tensor]:
    """A batch with a table beside its rows."""
    return (torch.ones(6, 4), torch.ones(table, 4)), torch.ones(6, 4)


ONES = torch.ones(2), torch.ones(2)
SCRIPTED = scripted()
TABLE = (fpipe.Chunk(0), fpipe.Replicate())
BESIDE = TABLE, fpipe.Chunk(0)
test_what_cannot_be_cut_is_refused_with_the_reason = refusals(
    globals(),
    """
refused(lambda params, batch: (fpipe.boundary(batch[0] @ params['w'] + batch[1]) @ params['w']).mean())
    ValueError: stage 0 reads the target (add); only what comes after the last boundary may
refused(simple(lambda y, w, t: (y - t @ w).mean()))
    ValueError: matmul_1 reads the target and the parameter 'w'. Apply the parameter before the target
refused(lambda params, batch: (fpipe.boundary(batch[0]), (batch[0] @ params['w'] - batch[1]).mean())[1])
    ValueError: boundary 1 has nothing to compute before it; leave it out
refused(simple(lambda y, w, t: (fpipe.boundary(y) @ w - t).mean()))
    ValueError: boundary 2 has nothing to compute before it; leave it out
refused(simple(lambda y, w, t: (y.register_hook(lambda grad: grad * 2), (y @ w - t).square().mean())[1]))
    ValueError: loss_fn registers a gradient hook or uses inference_mode, which no trace
refused(simple(lambda y, w, t: (y - torch.inference_mode()(lambda: y @ w)() - t).square().mean()))
    ValueError: or uses inference_mode, which no trace captures. Use no_grad for the latter, or
refused(simple(lambda y, w, t: (y @ w * torch.rand(y.shape, generator=torch.Generator()) - t).square().mean()))
    ValueError: loss_fn draws from a generator of its own (rand), which is in no key; draw without it.
refused(simple(lambda y, w, t: (checkpoint(torch.tanh, y @ w, use_reentrant=True) - t).square().mean()))
    ValueError: torch.utils.checkpoint(use_reentrant=True) has a backward that no trace captures; set
refused(simple(lambda y, w, t: (F.dropout(t) - F.dropout(y @ w)).square().mean()))
    ValueError: dropout draws random numbers for the loss, and dropout_1 later for a stage. Draw them
refused(simple(lambda y, w, t: (y @ w - t).sum() / len(y)))
    ValueError: loss_fn compares or fixes the number of rows, as len(x) and int(n / 4) do; x.shape[0] and n // 4 keep it
    symbolic
refused(lambda params, batch: (fpipe.boundary(batch[0] @ params['w']), batch[1].mean())[1])
    ValueError: the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.
refused(lambda params, batch: params['loss'])
    ValueError: loss_fn computes nothing, so there is no stage
refused(lambda params, batch: fpipe.boundary(3))
    ValueError: boundary() marks a pytree of tensors
refused(of_net(SCRIPTED))
    ValueError: module 'net' (RecursiveScriptModule) is compiled by torch.jit: no trace sees into it. Take the
    original module
returned(lambda error: error.flatten())
    ValueError: what loss_fn returns is a 0-d tensor, found shape (4*rows,); reduce it, for
returned(lambda error: error.square().mean().item())
    TypeError: what loss_fn returns is a 0-d tensor, found float.
returned(lambda error: (error > 0).any())
    TypeError: what loss_fn returns is a 0-d tensor of floats, found one of torch.bool, which has no gradient.
returned(lambda error: error.square().mean(), aux=True)
    TypeError: with aux=True the loss returns (loss, aux), found Tensor.
returned(lambda error: error.square().sum(), reduction='count')
    TypeError: with reduction="count" the loss returns (total, count), found Tensor.
taken(3)
    TypeError: , found int.
taken(torch.nn.MSELoss)
    TypeError: , found a class (MSELoss).
taken(lambda p, x, y: x)
    TypeError: , its batch one pair (inputs, target); found one of (p, x, y).
taken(nn.Linear(4, 4))
    TypeError: ; found one of (input: torch.Tensor) -> torch.Tensor.
taken(nn.MSELoss())
    TypeError: ; found MSELoss, a loss of an output and a target. Call it inside such a function.
taken(torch.compile(simple(torch.add)))
    TypeError: , found one that torch.compile made; hand in the function that it
taken(torch.nn.Sequential())
    TypeError:  A Sequential goes through fpipe.from_sequential.
fpipe.from_loss(gpt, {"n": 3}, ONES)
    ValueError: params['n'] is a int; parameters are tensors
fpipe.from_loss(gpt, nn.Linear(4, 4), ONES)
    ValueError: params is a Linear; parameters are tensors, and what else there is, close over. Of a module, hand in
    dict(
fpipe.from_loss(rows_put_together, square(), (torch.ones(6, 4), torch.ones(0, 4)))
    ValueError: target has 0 rows; an example has at least one
refused(lambda params, batch: (fpipe.boundary(batch[0] @ params["w"] * batch[1].shape[0]) @ batch[1].t()).mean())
    ValueError: stage 0 reads a size of the target; read it off the inputs
refused(simple(lambda y, w, t: (setattr(y, "data", y.detach() * 2), (y - t).square().mean())[1]))
    ValueError: loss_fn cannot be cut: it assigns the .data of a tensor, which no trace sees. Compute a new tensor
    in its
refused(gradient_inside)
    Exception: a tensor of shape (rows, 4) is computed where no trace sees it, as by torch.autograd.grad, torch.
refused(simple(lambda y, w, t: (torch.vmap(lambda x: torch.tanh(x @ w))(y) - t).square().mean()))
    Exception: a tensor of shape (rows, 4) is computed where no trace sees it, as by torch.autograd.grad, torch.
(lambda model, own, whole, batch: fpipe.build(fpipe.program(model), model)(whole, batch))(*cut_gpt())
    ValueError: found dict. fpipe.split_params(model, whole) makes it of the whole py
(lambda model, own, whole, batch: fpipe.reference(model, own, tuple(torch.cat([h, h], 1) for h in batch)))(*cut_gpt())
    ValueError: inputs was (8, 6) when loss_fn was traced, found (8, 12)
stepped(simple(lambda y, w, t: (y @ w * (2 if y.shape[0] > 3 else 1) - t).mean()), rows(), rows())
    ValueError: loss_fn takes another branch for 3 rows than for the example: rows > 3 is false
stepped(beside_a_table, beside(4), beside(4), spec=BESIDE)
    ValueError: another branch for 3 and 4 rows than for the example: len(inputs[0]) > len(inputs[1]) is false
# One row would be taken for as many as the inputs have.
stepped(rows_put_together, rows(), (torch.ones(12, 4), torch.ones(1, 4)), 3, TABLE)
    ValueError: target has 1 rows, expected 4 to go with the 4 of the last stage's output.
stepped(shifted, beside(1), beside(2), spec=BESIDE)
    ValueError: inputs[1] was (1, 4) when loss_fn was traced, found (2, 4): it is none of those whose rows may differ
""",
)


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("decides", [True, False])
def test_a_refusal_names_the_module_and_the_users_line(decides: bool) -> None:
    """It named an op, add_1 say, of a graph that the user never sees."""
    net = nn.Sequential(nn.Linear(4, 4), Decides() if decides else nn.Tanh())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = fpipe.boundary(torch.func.functional_call(net, params, (sum(batch),)))
        return (y @ y.T - batch[1].sum()).square().mean()

    words = "loss_fn branches on a number that it computes, as in" if decides else "stage 0 reads the ta"
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        fpipe.from_loss(loss_fn, dict(net.named_parameters()), rows())
    code = (Decides.forward if decides else loss_fn).__code__
    place = "in module 'net.1' (Decides), at" if decides else "at"
    line = code.co_firstlineno + 1
    words = linecache.getline(__file__, line).strip()
    assert str(error.value).splitlines()[1:] == [f"  {place} test_from_loss.py:{line}, in {code.co_name}: {words}"]


def test_what_torch_says_of_rows_is_explained():
    """It says "The size of tensor a (s93) must match the size of tensor b (s53)"."""
    loss_fn, params = simple(lambda y, w, t: (y - t).square().mean()), {"w": torch.eye(4)}
    with pytest.raises(RuntimeError, match=r"must match the size of tensor b \(s\d+\)") as error:
        fpipe.from_loss(loss_fn, params, (torch.randn(6, 4), torch.randn(3, 4)))
    notes = [re.sub(r"s\d+", "s", note) for note in sorted(error.value.__notes__, key=lambda note: "target" in note)]
    words, place = notes.pop(0).splitlines()
    assert words == "loss_fn was called on fake tensors, which have no data, as from_loss does to cut it."
    assert place.endswith(
        'in <lambda>: loss_fn, params = simple(lambda y, w, t: (y - t).square().mean()), {"w": torch.eye(4)}'
    )
    assert notes == [
        f"s is the number of rows of {half}, which from_loss keeps symbolic." for half in ("inputs", "target")
    ]


def test_a_gradient_that_is_zero_but_for_rounding():
    """The bias of a key moves all scores of a softmax alike: a right cut was refused for the noise in its gradient."""

    def attend(p: dict[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = x @ p["q"], x @ p["k"] + p["bias"], x @ p["v"]
        return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v

    def loss_fn(params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = fpipe.boundary(batch[0] + attend(params["one"], batch[0]))
        z = fpipe.boundary(attend(params["other"], y))
        return ((y * z + z.tanh() + y - batch[1]) ** 2).mean()

    make = torch.Generator().manual_seed(0)
    each = {name: torch.randn(16, 16, generator=make) / 4 for name in "qkv"} | {"bias": torch.ones(16)}
    batch = torch.randn(4, 7, 16, generator=make), torch.randn(4, 7, 16, generator=make)
    model, own = fpipe.from_loss(loss_fn, {"one": each, "other": {k: v.clone() for k, v in each.items()}}, batch)
    grads = fpipe.reference(model, own, batch).grads
    assert grads[0]["one.bias"].norm() < 1e-6 * fpipe.global_norm(grads)


def test_a_mask_of_the_sequences_length_is_a_table():
    """It was refused as if the function were one for a single number of rows."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
        (x, mask), target = batch
        length = mask.shape[0]
        y = fpipe.boundary(x @ params["w"])
        y = F.scaled_dot_product_attention(y, y, y, mask).view(-1, length, 4) * length
        return (fpipe.boundary(y) @ params["w"] - target).square().mean() / mask.shape[0]

    mask, (x, target) = torch.ones(4, 4, dtype=torch.bool).tril(), torch.randn(2, 4, 4, 4)
    model, own = fpipe.from_loss(loss_fn, square(), ((x, mask), target))
    program = fpipe.chain(fpipe.split(2, spec=BESIDE), fpipe.merge())(fpipe.program(model))
    assert fpipe.verify(program, model, own, ((x, mask), target)).bitwise


def flattened(w: Tensor, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return x + torch.tanh(flat @ w).reshape(x.shape) / flat.shape[0] / flat.numel()


def windowed(w: Tensor, x: Tensor) -> Tensor:
    """As in a Swin transformer: how many images there are is computed of the number of windows."""
    rows, height, width, channels = x.shape
    windows = x.view(rows, height // 2, 2, width // 2, 2, channels).transpose(2, 3).reshape(-1, 4, channels)
    y = torch.tanh(windows @ w)
    rows = math.floor(y.shape[0] / (height * width / 2 / 2))
    y = y.view(rows, height // 2, width // 2, 2, 2, channels).transpose(2, 3)
    return x + y.reshape(rows, height, width, channels)


def routed(w: Tensor, x: Tensor) -> Tensor:
    """As in a mixture of experts: how many tokens an expert has depends on data."""
    tokens = x.reshape(-1, x.shape[-1])
    mine = (tokens[:, 0] > 0).nonzero().squeeze(1)
    return tokens.index_add(0, mine, torch.tanh(tokens[mine] @ w) / (1 + mine.shape[0])).view_as(x)


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
@pytest.mark.parametrize("layer", [flattened, windowed, routed])
def test_a_stage_may_ask_for_the_sizes_of_what_it_computes(layer: Any):
    """It ended in "stage 0 takes 0; it can take 'batch'"."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x = layer(params["b"], fpipe.boundary(layer(params["a"], batch[0])))
        return F.mse_loss(x, batch[1])

    params, batch = {name: torch.randn(4, 4) for name in "ab"}, (torch.randn(4, 4, 4, 4), torch.randn(4, 4, 4, 4))
    assert assert_own(loss_fn, params, batch, 2).inputs == ("batch", 0)


def test_a_stage_that_takes_windows_computes_the_number_of_images_from_them():
    """It took an earlier stage's activations too, for their size alone."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = batch[0].shape
        windows = batch[0].reshape(rows * 2, length // 2, width)
        for w in params.values():
            windows = fpipe.boundary(torch.tanh(windows @ w))
        return F.mse_loss(windows.reshape(rows, length, width) * rows, batch[1])

    batch = torch.randn(6, 4, 4), torch.randn(6, 4, 4)
    assert assert_own(loss_fn, {name: torch.randn(4, 4) for name in "ab"}, batch, 4).inputs == ("batch", 0, 1)


def test_an_example_of_one_row_and_a_net_called_by_functional_call():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model, own = fpipe.from_loss(of_net(net), dict(net.named_parameters()), rows(1))
    assert list(own[0]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert fpipe.verify(merged(model, 3), model, own, rows(7)).bitwise


def traces_of(model: fpipe.Model, params: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many stages and losses a step traces."""
    traced: list[Any] = []
    trace = trace_cache.trace
    monkeypatch.setattr(trace_cache, "trace", lambda *args: traced.append(args) or trace(*args))
    assert fpipe.verify(merged(model, 2, fpipe.checkpoint()), model, params, batch).bitwise
    monkeypatch.undo()
    return len(traced)


def test_equal_stages_share_a_trace(monkeypatch: pytest.MonkeyPatch):
    """Three of four blocks; each was traced for itself. The first takes what the head takes too."""
    model, own, _, batch = cut_gpt(4)
    assert traces_of(model, own, batch, monkeypatch) == 4  # the embedding, a block, the head, the loss


def test_stages_that_differ_share_none(monkeypatch: pytest.MonkeyPatch):
    """In a number, its type or its sign, a tensor they hold on to, the order of what they take."""
    held = [torch.full((4,), 2.0), torch.full((4,), 2.0)]
    kinds = [
        (lambda x, w: torch.tanh(x * 2 @ w), lambda x, w: torch.tanh(x * 3 @ w)),
        (lambda x, w: x @ w + 1, lambda x, w: x @ w + 1.0),
        (lambda x, w: torch.clamp(x @ w, min=0.0), lambda x, w: torch.clamp(x @ w, min=-0.0)),
        (lambda x, w: x @ w * held[0], lambda x, w: x @ w * held[1]),
        (lambda x, w: x @ w, lambda x, w: x @ w.t()),
    ]
    for one, other in kinds:

        def loss_fn(params: list[Tensor], batch: tuple[Tensor, Tensor], each: Any = (one, other, one)) -> Tensor:
            x = fpipe.boundary(batch[0] * 1.5)
            for number, w in enumerate(params):
                x = fpipe.boundary(each[number](x, w))
            return (x.square() - batch[1]).mean()

        batch = torch.randn(4, 4), torch.randn(4, 4)
        model, own = fpipe.from_loss(loss_fn, [torch.randn(4, 4) for _ in range(3)], batch)
        twins = [stage.forward.sharing_key() for stage in model.stages[1:4]]
        assert twins[0] == twins[2] != twins[1]
    assert traces_of(model, own, batch, monkeypatch) == 5


# Random numbers: each stage draws as if it began with torch.manual_seed(fold_in(key, stage, microbatch)).

KEY = 11


def test_a_function_is_marked_and_seeded_on_after_another_inside_it():
    """The inner context took the state of the outer with it: AttributeError."""
    with record_boundaries():
        with record_boundaries():
            pass
        with pytest.raises(ValueError, match="marks a pytree of tensors"):
            fpipe.boundary(3)
    assert fpipe.boundary(3) == 3
    with seed_stages(KEY):
        first = torch.rand(2)
        with seed_stages(KEY + 1):
            fpipe.boundary(3)
        second = torch.rand(2)
        fpipe.boundary(3)
        third = torch.rand(2)
    torch.manual_seed(fpipe.fold_in(KEY, 0, 0))
    assert torch.equal(torch.cat([first, second]), torch.rand(4))
    torch.manual_seed(fpipe.fold_in(KEY, 1, 0))
    assert torch.equal(third, torch.rand(2))


def test_dropout_that_keeps_everything_draws_nothing_for_the_loss():
    """It was taken for a draw: "draws random numbers for the loss, and dropout_1 after it"."""
    refused(simple(lambda y, w, t: (F.dropout(t, 0.0) - F.dropout(y @ w)).square().mean()))


def noisy(mark: Any) -> Any:
    """A loss function with marks of one's choice: draws of every kind, that nobody reads, that need no tensor, that a
    later stage reads, and some in the loss itself."""

    def loss_fn(params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        later = torch.rand(4)
        torch.rand(3)
        x = mark(F.dropout(x @ params["a"], 0.3) + torch.rand(x.shape[0], 1))
        x = x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.empty_like(x).exponential_() * later
        x = mark(torch.tanh(x @ params["b"]) + torch.randn_like(x))
        heads = (x @ params["c"]).view(x.shape[0], 1, 2, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)
        x = F.rrelu(heads.flatten(1) + F.gumbel_softmax(x, dim=-1), training=True)[torch.randperm(x.shape[0])]
        torch.rand(2)
        return (x - F.dropout(target, 0.2)).square().mean()

    return loss_fn


def seeded(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The function as plain autograd runs it, torch seeded where each stage begins."""
    stage = 0

    def mark(value: Any) -> Any:
        nonlocal stage
        torch.manual_seed(fpipe.fold_in(KEY, stage, int(batch[1][0, 0])))
        stage += 1
        return value

    mark(None)
    return noisy(mark)(params, batch)


PLANS: dict[str, tuple[Any, ...]] = {
    "recomputed and split": (fpipe.checkpoint("always"), fpipe.schedules.zb_h1(3)),
    "by layers": (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.one_f_one_b(3)),
    "two ranks": (fpipe.schedules.gpipe(1), fpipe.place([0, 1, 0])),
}


def test_random_numbers_follow_from_the_key_under_every_plan():
    torch.manual_seed(1)
    params = {name: torch.randn(4, 4) for name in "abc"}
    batch = torch.randn(8, 4), torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 4)  # its microbatch's number
    right = own_grads(seeded, params, batch, 4)
    before = torch.get_rng_state()
    model, own = fpipe.from_loss(noisy(fpipe.boundary), params, batch)
    for plan in PLANS.values():
        program = merged(model, 4, *plan)
        for trace in (True, False):
            step = fpipe.build(program, model, trace=trace)
            whole = fpipe.join_params(model, step(own, batch, key=KEY).grads)
            assert all(torch.equal(whole[name], grad) for name, grad in right.items())
    assert torch.equal(torch.get_rng_state(), before)
    one, other = (step(own, batch, key=key).loss for key in (KEY, KEY + 1))
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match=r"^stage 0 draws random numbers: hand in key="):
        step(own, batch)


# Buffers of modules that the function closes over, or reaches by no name


class Watching(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen.add_(1)
        else:
            self.seen = self.seen + 1
        return x * self.seen


class Renewing(nn.Linear):
    """Its weight is another after each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight * 2)
        return super().forward(x)


CHANGES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a norm": (
        lambda: nn.BatchNorm1d(4),
        r"writes (a tensor|'\S*num_batches_tracked') in place \(aten\.add_\.Tensor\)",
    ),
    "in place": (lambda: Watching("in place"), r"writes (a tensor|'\S*seen') in place \(aten\.add_\.Tensor\)"),
    "a buffer": (lambda: Watching("another"), r"binds '\S*\.seen' anew"),
    "one inside": (lambda: nn.Sequential(nn.Tanh(), Watching("another")), r"binds '\S*\.seen' anew"),
    "a parameter": (lambda: Renewing(4, 4), r"binds '\S*\.weight' anew"),
}
HELD = "held_module"


def behind(net: nn.Module, named: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], nn.Module]:
    """How a function gets at a net: by a name of its own, or by a string."""
    monkeypatch.setitem(sys.modules, HELD, ModuleType(HELD))
    vars(sys.modules[HELD])["net"] = net
    return (lambda: net) if named else (lambda: sys.modules[HELD].net)


def held_in(net: nn.Module) -> dict[tuple[str, str], Any]:
    """What modules have as buffers and parameters, None too, by module and name."""
    each = [(path, {**module._buffers, **module._parameters}) for path, module in net.named_modules()]
    return {(path, name): one for path, own in each for name, one in own.items()}


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("what", CHANGES)
def test_a_net_that_the_function_changes_is_refused(
    what: str, named: bool, meta: bool, monkeypatch: pytest.MonkeyPatch
):
    """The trace once counted a batch, or left a tensor without data in the module, of which the next call said
    DataDependentOutputException: aten.equal.default."""
    make, does = CHANGES[what]
    net = make().to("meta" if meta else "cpu")
    get, before = behind(net, named, monkeypatch), held_in(net)
    values = [one.clone() for one in before.values() if one is not None]

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return (get()(fpipe.boundary(batch[0] @ params["w"])) * 1.0 - batch[1]).square().mean()

    w, *batch = (torch.randn(rows, 4, device="meta" if meta else "cpu") for rows in (4, 6, 6))
    with pytest.raises(RuntimeError, match=rf"^loss_fn {does}, which it closes over; a stage and a loss a"):
        fpipe.from_loss(loss_fn, {"w": w}, tuple(batch))
    assert list(held_in(net)) == list(before)
    assert all(one is before[place] for place, one in held_in(net).items())
    assert meta or all(map(torch.equal, values, [one for one in before.values() if one is not None]))


@pytest.mark.parametrize("named", [True, False])
def test_the_mode_and_the_parameters_of_a_net_are_known(named: bool, monkeypatch: pytest.MonkeyPatch):
    """A net was put into eval mode, or given other parameters, and steps went on as before, in silence."""
    net, batch = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), rows()
    get, params = behind(net, named, monkeypatch), dict(net.named_parameters())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return of_net(get())(params, batch)

    model, own = fpipe.from_loss(loss_fn, params, batch)
    step = fpipe.build(fpipe.program(model), model)
    before = step(own, batch, key=0).loss
    net.eval()
    words = r"\(Dropout\) was in training when loss_fn was traced and is in eval now: the trace goes on as"
    with pytest.raises(ValueError, match=words):
        step(own, batch, key=0)
    with pytest.raises(ValueError, match=re.escape("Call from_loss again in this mode.")):
        fpipe.reference(model, own, batch, key=0)
    still, _ = fpipe.from_loss(loss_fn, params, batch)
    assert torch.equal(fpipe.build(fpipe.program(still), still)(own, batch).loss, loss_fn(params, batch))
    net.train()
    assert torch.equal(step(own, batch, key=0).loss, before)
    net[0].weight.data = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"have the '0\.weight' that was handed out with the model; the net has"):
        step(own, batch, key=0)


def test_a_net_that_has_no_modes_may_be_put_into_eval_mode():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model, own = fpipe.from_loss(of_net(net), dict(net.named_parameters()), rows())
    net.eval()
    assert fpipe.verify(fpipe.program(model), model, own, rows()).bitwise


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda held: held.add_(1),
    "a view": lambda held: held[1:].mul_(2),
    "as out": lambda held: torch.add(held, 1, out=held),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_tensor_that_the_function_writes_is_refused(how: str):
    """KeyError: '_tensor_constant0'."""
    held = torch.ones(4)
    loss_fn = simple(lambda y, w, t: (WRITES[how](held), (y * held - t).square().mean())[1])
    sentence = r"loss_fn writes ('held'|a tensor of shape \(4,\)) in place \(aten\.\w+\.\w+\), which it closes over; "
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        fpipe.from_loss(loss_fn, square(), rows())
    assert torch.equal(held, torch.ones(4))  # the trace had written it


def test_a_function_of_torch_that_was_handed_the_loss_function_is_cut():
    """It was refused as a function of other things."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(fpipe.boundary(batch[0] @ params["a"]) @ params["b"], batch[1])

    params = {name: torch.randn(4, 4) for name in "ab"}
    model = assert_own(functools.partial(checkpoint, loss_fn, use_reentrant=False), params, rows(), 2)
    assert len(model.stages) == 2


@pytest.mark.parametrize("trace", [True, False])
def test_an_error_inside_of_a_block_closes_it(trace: bool):
    """Whatever ran after it ran in bfloat16, in silence."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            h = batch[0] @ params["a"]
        return F.mse_loss(fpipe.boundary(h.float() @ params["b"]), batch[1])

    params, batch = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}, rows()
    model, own = fpipe.from_loss(loss_fn, params, batch)
    step = fpipe.build(merged(model, 2), model, trace=trace)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        step(({**own[0], "a": torch.randn(5, 4)}, *own[1:]), batch)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


# The function itself, which `verify` compares with: a program and the reference run one trace, so that it is not the
# function any more neither of them can see.


def verified(model, params, batch, **more):
    return fpipe.verify(merged(model, 2), model, params, batch, **more)


def test_verify_compares_with_the_function_and_not_with_its_trace():
    scale = [1.0]
    batch = rows()
    model, params = fpipe.from_loss(simple(lambda y, w, t: (y @ w * scale[0] - t).square().mean()), square(), batch)
    assert verified(model, params, batch).bitwise
    scale[0] = 3.0
    with pytest.raises(
        fpipe.GradientMismatch, match=r"loss of microbatch 0 is .* by the stages and .* by loss_fn: it has"
    ):
        verified(model, params, batch)


def test_verify_draws_the_random_numbers_of_the_stages_in_the_function():
    batch = rows()
    model, params = fpipe.from_loss(simple(lambda y, w, t: F.mse_loss(F.dropout(y) @ w, t)), square(), batch)
    assert verified(model, params, batch, key=7).bitwise


def test_verify_compares_gradients_with_the_functions():
    """The same loss with another gradient: what is detached now was not when it was traced."""
    stopped = [False]

    def loss_fn(params, batch):
        hidden = fpipe.boundary(batch[0] @ params["w"])
        return F.mse_loss(hidden + (params["v"].detach() if stopped[0] else params["v"]), batch[1])

    batch = rows()
    model, params = fpipe.from_loss(loss_fn, {"w": torch.randn(4, 4), "v": torch.randn(4)}, batch)
    model = fpipe.freeze(model, (0, "w"))
    assert verified(model, params, batch).bitwise
    stopped[0] = True
    with pytest.raises(fpipe.GradientMismatch, match="The gradient of v by the stages is off by up to"):
        verified(model, params, batch)
