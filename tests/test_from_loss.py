"""One loss function, cut at its boundaries: dataflow, ties, skips and the function's own gradients."""

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
from fpipe.graphs.tracing.marks import record_marks, seed_stages
from property_tests.bits import is_same_gradient
from tests.refusals import refusals
from tests.toys import merged, scripted

WIDTH, VOCABULARY, LENGTH = 8, 16, 6


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(F.layer_norm(x, (WIDTH,), p["gain"]) @ p["w"])


def gpt(params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with a tied embedding, positions, and a skip from the embedding to the head."""
    ids, target = batch
    x = skip = F.embedding(ids, params["embed"]) + params["position"][torch.arange(ids.shape[1])]
    for layer_params in params["blocks"]:
        x = block(layer_params, fpipe.boundary(x))
    x = fpipe.boundary(x)
    return F.cross_entropy(F.linear(x + skip, params["embed"]).flatten(0, 1), target.flatten())


@functools.cache
def cut_gpt(blocks: int = 2) -> tuple[fpipe.Model, Any, Any, tuple[Tensor, Tensor]]:
    """Return the model, its parameters per stage and as a whole, and a batch."""
    torch.manual_seed(0)
    params = {
        "embed": torch.randn(VOCABULARY, WIDTH),
        "position": torch.randn(LENGTH, WIDTH),
        "blocks": [{"gain": torch.ones(WIDTH), "w": torch.randn(WIDTH, WIDTH)} for _ in range(blocks)],
    }
    batch = torch.randint(0, VOCABULARY, (8, LENGTH)), torch.randint(0, VOCABULARY, (8, LENGTH))
    return *fpipe.from_loss(gpt, params, batch), params, batch


def square() -> dict[str, Tensor]:
    return {"w": torch.randn(4, 4)}


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randn(count, 4)


def simple(change: Any, fn: Any = lambda x, w: fpipe.boundary(x @ w)) -> Any:
    return lambda params, batch: change(fn(batch[0], params["w"]), params["w"], batch[1])


def loss_of_net(net: nn.Module) -> Any:
    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(fpipe.boundary(torch.func.functional_call(net, params, (batch[0],))) * 2, batch[1])

    return loss_fn


def test_stages_skips_and_ties_follow_the_dataflow():
    model, stage_params, _, _ = cut_gpt()
    assert model.inputs == ("batch", 0, 1, (0, 2))
    assert model.ties == (((0, "embed"), (3, "embed")),)
    assert [[*stage] for stage in stage_params] == [
        ["embed", "position"],
        *([f"blocks.{index}.gain", f"blocks.{index}.w"] for index in range(2)),
        [],
    ]


def test_join_params_gives_the_pytree_back_and_split_params_undoes_it():
    model, stage_params, params, _ = cut_gpt()
    joined = fpipe.join_params(model, stage_params)
    tree_leaves = torch.utils._pytree.tree_leaves
    assert torch.utils._pytree.tree_structure(joined) == torch.utils._pytree.tree_structure(params)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(joined), tree_leaves(params), strict=True))
    split_again = fpipe.split_params(model, joined)
    assert all(
        a.keys() == b.keys() and all(a[n] is b[n] for n in a) for a, b in zip(split_again, stage_params, strict=True)
    )


def test_a_boundary_outside_from_loss_changes_nothing():
    x = {"a": torch.ones(2), "n": 3}
    assert fpipe.boundary(x) is x


def activations_read_by_stages_and_loss(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """Used to end in IndexError: the last stage numbers an activation that the loss reads otherwise than the first."""
    activations = torch.tanh(x @ p["a"])
    gate = torch.sigmoid(activations @ p["b"])
    second_activations = torch.tanh(fpipe.boundary(activations) @ p["b"])
    output = torch.tanh(fpipe.boundary(second_activations) @ p["c"]) * gate
    return (output - target).square().mean() + (activations * target).mean() + gate.mean()


def mixed_contexts(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """no_grad, autocast, a write in place and a checkpoint, inside stages."""
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


def gradients_enabled_explicitly(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
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
    """Autocast casts the weight once here, so gradients add up in bfloat16; in two stages they do in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.tanh(fpipe.boundary(torch.tanh(x @ p["a"])) @ p["b"]) @ p["a"]
        return F.mse_loss(y @ p["c"], target)


def a_checkpoint_in_a_checkpoint(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """Used to be refused: the trace detached the inner checkpoint, and lost its gradient."""

    def inner_tanh(x: Tensor) -> Any:
        return checkpoint(torch.tanh, x, use_reentrant=False)

    return (checkpoint(inner_tanh, fpipe.boundary(x @ p["a"]) @ p["b"], use_reentrant=False) - target).square().mean()


def writes_into_a_view(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    """Used to end in a KeyError, or in a later stage that made the mask again without the write into its view."""
    mask = torch.zeros(4)
    mask[1:].add_(1)
    y = (x @ p["a"]).add_(CLOSED_OVER) * mask
    return (fpipe.boundary(y) * mask + CLOSED_OVER - target).square().mean()


CLOSED_OVER = torch.arange(4.0)


def makes_modules(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    module = Watching("another")
    module(module(x))
    module.register_buffer("late", x)
    module.itself = [module]
    return (fpipe.boundary(x @ p["a"]) * module.seen - target).square().mean()


def a_norm_in_eval(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    return (SETTLED(fpipe.boundary(x @ p["a"])) * 1.0 - target).square().mean()


SETTLED = nn.BatchNorm1d(4).eval().requires_grad_(False)


def a_local_that_is_assigned_later() -> Any:
    """Used to fail at once: from_loss read an empty closure cell."""

    def loss_fn(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return (fpipe.boundary(x @ p["a"]) - target).square().mean() if p else later

    later = torch.zeros(())
    return loss_fn


FUNCTIONS = [
    activations_read_by_stages_and_loss,
    mixed_contexts,
    tied_in_autocast,
    autocast_over_all,
    autocast_over_marks,
    autocast_in_the_loss,
    gradients_enabled_explicitly,
    no_grad_over_a_mark,
    no_grad_in_the_loss,
    a_checkpoint_in_a_checkpoint,
    writes_into_a_view,
    makes_modules,
    a_norm_in_eval,
    a_local_that_is_assigned_later(),
]


def function_grads(loss_fn: Any, params: Any, batch: tuple[Tensor, Tensor], microbatches: int) -> dict[Any, Tensor]:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    for x, t in zip(*(half.tensor_split(microbatches) for half in batch), strict=True):
        (loss_fn(leaves, (x, t)) * (len(x) / len(batch[0]))).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def assert_grads(loss_fn: Any, params: Any, batch: Any, microbatches: int) -> fpipe.Model:
    """Assert that a cut function has its own gradients bit by bit, and up to rounding for tied leaves.

    Those add up in another order.
    """
    model, stage_params = fpipe.from_loss(loss_fn, params, batch)
    program = merged(model, microbatches, fpipe.checkpoint("always"), fpipe.schedules.zb_h1(len(model.stages)))
    actual_grads = fpipe.join_params(model, fpipe.build(program, model)(stage_params, batch).grads)
    tied = {leaf for group in model.ties for _, leaf in group}
    for name, expected_grad in function_grads(loss_fn, params, batch, microbatches).items():
        if name in tied:
            torch.testing.assert_close(actual_grads[name], expected_grad, rtol=1e-2, atol=1e-3)
        else:
            assert is_same_gradient(actual_grads[name], expected_grad), name
    return model


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_cut_function_has_its_own_gradients(function: Any):
    """Used to compute the loss outside its autocast block, and to refuse a boundary inside one, with an error that
    blamed .item(). Most training steps are wrapped in autocast as a whole.
    """
    torch.manual_seed(0)
    params = {name: torch.randn(4, 4) for name in "abc"}
    assert_grads(lambda p, batch: function(p, *batch), params, rows(7), 3)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class TripledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 3, None


def test_the_gradient_of_a_function_is_its_own() -> None:
    """Used to warn, and to differentiate the forward: the Function is one operation of its stage."""
    loss_fn = simple(lambda y, w, t: (Tripled.apply(y @ w) - t).square().mean())
    model, stage_params = fpipe.from_loss(loss_fn, square(), rows())
    assert fpipe.verify(fpipe.program(model), model, stage_params, rows()).bitwise


def test_a_gradient_in_python_warns_and_fails_verify() -> None:
    """A Function that is handed a size is traced through: stages differentiate its forward."""
    params, batch = square(), rows()
    with pytest.warns(UserWarning, match="loss_fn computes a gradient in Python"):
        model, stage_params = fpipe.from_loss(
            simple(lambda y, w, t: (TripledRows.apply(y @ w, y.shape[0]) - t).square().mean()), params, batch
        )
    with pytest.raises(fpipe.GradientMismatch, match="The gradient of w by the stages is off"):
        fpipe.verify(fpipe.program(model), model, stage_params, batch)


def gradient_inside(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].clone().requires_grad_()
    y = fpipe.boundary(torch.tanh(x @ params["w"])) @ params["w"]
    return (torch.autograd.grad(y.sum(), x, create_graph=True)[0] - batch[1]).square().mean()


def rows_put_together(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    y = fpipe.boundary(torch.tanh(batch[0] @ params["w"]))
    return (y - batch[1]).square().sum() / batch[1].shape[0]


def branches_on_table(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
    (x, table), target = batch
    y = x @ params["w"] * (2 if x.shape[0] > table.shape[0] else 1)
    return (fpipe.boundary(y) @ params["w"] - target).mean()


def shifted(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
    (x, shift), target = batch
    return (fpipe.boundary(x @ params["w"] + shift) @ params["w"] - target).square().mean()


def cut_fn(loss_fn: Any) -> Any:
    return fpipe.from_loss(loss_fn, {"w": torch.randn(4, 4), "loss": torch.ones(())}, rows())


def cut_returning(of_error: Any, **options: Any) -> Any:
    """Cut a loss function that returns what `of_error` makes of its error."""
    loss_fn = lambda params, batch: of_error(fpipe.boundary(batch[0] @ params["w"]) - batch[1])  # noqa: E731
    return fpipe.from_loss(loss_fn, square(), rows(), **options)


def cut_without_params(function: Any) -> Any:
    return fpipe.from_loss(function, {}, ONES_BATCH)


def step_of(loss_fn: Any, example: Any, batch: Any, microbatches: int = 2, spec: Any = None) -> fpipe.Result:
    """Run a step of a function that was cut with an example."""
    params = square()
    model, stage_params = fpipe.from_loss(loss_fn, params, example)
    return fpipe.build(fpipe.split(microbatches, spec=spec)(fpipe.program(model)), model)(stage_params, batch)


def batch_with_table(table: int) -> tuple[Any, Tensor]:
    """Return a batch with a table next to its rows."""
    return (torch.ones(6, 4), torch.ones(table, 4)), torch.ones(6, 4)


ONES_BATCH = torch.ones(2), torch.ones(2)
SCRIPTED = scripted()
TABLE = (fpipe.Chunk(0), fpipe.Replicate())
TABLE_SPEC = TABLE, fpipe.Chunk(0)
test_a_function_that_cannot_be_cut_is_refused_with_the_reason = refusals(
    globals(),
    """
cut_fn(lambda params, batch: (fpipe.boundary(batch[0] @ params['w'] + batch[1]) @ params['w']).mean())
    ValueError: stage 0 reads the target (add); only what comes after the last boundary may
cut_fn(simple(lambda y, w, t: (y - t @ w).mean()))
    ValueError: matmul_1 reads the target and the parameter 'w'. Apply the parameter before the target
cut_fn(lambda params, batch: (fpipe.boundary(batch[0]), (batch[0] @ params['w'] - batch[1]).mean())[1])
    ValueError: boundary 1 has nothing to compute before it; leave it out
cut_fn(simple(lambda y, w, t: (fpipe.boundary(y) @ w - t).mean()))
    ValueError: boundary 2 has nothing to compute before it; leave it out
cut_fn(simple(lambda y, w, t: (y.register_hook(lambda grad: grad * 2), (y @ w - t).square().mean())[1]))
    ValueError: loss_fn registers a gradient hook or uses inference_mode, which no trace
cut_fn(simple(lambda y, w, t: (y - torch.inference_mode()(lambda: y @ w)() - t).square().mean()))
    ValueError: or uses inference_mode, which no trace captures. Use no_grad for the latter, or
cut_fn(simple(lambda y, w, t: (y @ w * torch.rand(y.shape, generator=torch.Generator()) - t).square().mean()))
    ValueError: loss_fn draws from a generator of its own (rand), which is in no key; draw without it.
cut_fn(simple(lambda y, w, t: (checkpoint(torch.tanh, y @ w, use_reentrant=True) - t).square().mean()))
    ValueError: torch.utils.checkpoint(use_reentrant=True) has a backward that no trace captures; set
cut_fn(simple(lambda y, w, t: (F.dropout(t) - F.dropout(y @ w)).square().mean()))
    ValueError: dropout draws random numbers for the loss, and dropout_1 later for a stage. Draw them
cut_fn(simple(lambda y, w, t: (y @ w - t).sum() / len(y)))
    ValueError: loss_fn fixes the number of rows, as len(x), int(n / 4) and torch.jit do. x.shape[0] and n // 4 keep it
    symbolic.
cut_fn(lambda params, batch: (fpipe.boundary(batch[0] @ params['w']), batch[1].mean())[1])
    ValueError: the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.
cut_fn(lambda params, batch: params['loss'])
    ValueError: loss_fn computes nothing: there is no stage
cut_fn(lambda params, batch: fpipe.boundary(3))
    ValueError: boundary() marks a pytree of tensors
cut_fn(loss_of_net(SCRIPTED))
    ValueError: module 'net' (RecursiveScriptModule) is compiled by torch.jit: no trace sees into it. Take the
    original module
cut_returning(lambda error: error.flatten())
    ValueError: what loss_fn returns is a 0-d tensor, found shape (4*rows,); reduce it, for
cut_returning(lambda error: error.square().mean().item())
    TypeError: what loss_fn returns is a 0-d tensor, found float.
cut_returning(lambda error: (error > 0).any())
    TypeError: what loss_fn returns is a 0-d tensor of floats, found one of torch.bool, which has no gradient.
cut_returning(lambda error: error.square().mean(), aux=True)
    TypeError: with aux=True the loss returns (loss, aux), found Tensor.
cut_returning(lambda error: error.square().sum(), reduction='count')
    TypeError: with reduction="count" the loss returns (total, count), found Tensor.
cut_without_params(torch.nn.MSELoss)
    TypeError: , found a class (MSELoss).
cut_without_params(lambda p, x, y: x)
    TypeError: , its batch one pair (inputs, target); found one of (p, x, y).
cut_without_params(nn.Linear(4, 4))
    TypeError: ; found one of (input: torch.Tensor) -> torch.Tensor.
cut_without_params(nn.MSELoss())
    TypeError: ; found MSELoss, a loss of an output and a target. Call it inside such a function.
cut_without_params(torch.compile(simple(torch.add)))
    TypeError: , found one that torch.compile made; hand in the function that it
cut_without_params(torch.nn.Sequential())
    TypeError:  A Sequential goes through fpipe.from_sequential.
fpipe.from_loss(gpt, {"n": 3}, ONES_BATCH)
    ValueError: params['n'] is a int; parameters are tensors
fpipe.from_loss(gpt, nn.Linear(4, 4), ONES_BATCH)
    ValueError: params is a Linear; parameters are tensors, and what else there is, close over. Of a module, hand in
    dict(
fpipe.from_loss(rows_put_together, square(), (torch.ones(6, 4), torch.ones(0, 4)))
    ValueError: target has 0 rows; an example has at least one
cut_fn(lambda params, batch: (fpipe.boundary(batch[0] @ params["w"] * batch[1].shape[0]) @ batch[1].t()).mean())
    ValueError: stage 0 reads a size of the target; read it off the inputs
cut_fn(simple(lambda y, w, t: (setattr(y, "data", y.detach() * 2), (y - t).square().mean())[1]))
    ValueError: loss_fn cannot be cut: it assigns a tensor's .data, which no trace sees. Compute a new tensor
    in its
cut_fn(gradient_inside)
    Exception: a tensor of shape (rows, 4) is computed where no trace sees it, as by torch.autograd.grad, torch.
cut_fn(simple(lambda y, w, t: (torch.vmap(lambda x: torch.tanh(x @ w))(y) - t).square().mean()))
    Exception: a tensor of shape (rows, 4) is computed where no trace sees it, as by torch.autograd.grad, torch.
(lambda model, own, whole, batch: fpipe.build(fpipe.program(model), model)(whole, batch))(*cut_gpt())
    ValueError: found dict. fpipe.split_params(model, whole) makes it of the whole py
(lambda model, own, whole, batch: fpipe.reference(model, own, tuple(torch.cat([h, h], 1) for h in batch)))(*cut_gpt())
    ValueError: inputs was (8, 6) when loss_fn was traced, found (8, 12)
step_of(simple(lambda y, w, t: (y @ w * (2 if y.shape[0] > 3 else 1) - t).mean()), rows(), rows())
    ValueError: loss_fn takes another branch for 3 rows than for the example: rows > 3 is false
step_of(branches_on_table, batch_with_table(4), batch_with_table(4), spec=TABLE_SPEC)
    ValueError: another branch for 3 and 4 rows than for the example: len(inputs[0]) > len(inputs[1]) is false
# Used to broadcast one row of target over all rows of the inputs.
step_of(rows_put_together, rows(), (torch.ones(12, 4), torch.ones(1, 4)), 3, TABLE)
    ValueError: target has 1 rows, expected 4 to go with the 4 of the last stage's output, as in x + y.
step_of(shifted, batch_with_table(1), batch_with_table(2), spec=TABLE_SPEC)
    ValueError: inputs[1] was (1, 4) when loss_fn was traced, found (2, 4): it is none of those whose rows may differ
""",
)


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("decides", [True, False])
def test_a_refusal_names_the_module_and_the_users_line(decides: bool) -> None:
    """Used to name an op, such as add_1, of a graph that the user never sees."""
    net = nn.Sequential(nn.Linear(4, 4), Decides() if decides else nn.Tanh())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = fpipe.boundary(torch.func.functional_call(net, params, (sum(batch),)))
        return (y @ y.T - batch[1].sum()).square().mean()

    message = "loss_fn branches on a number that it computes, as in" if decides else "stage 0 reads the ta"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        fpipe.from_loss(loss_fn, dict(net.named_parameters()), rows())
    code = (Decides.forward if decides else loss_fn).__code__
    location = "in module 'net.1' (Decides), at" if decides else "at"
    line = code.co_firstlineno + 1
    text = linecache.getline(__file__, line).strip()
    assert str(error.value).splitlines()[1:] == [f"  {location} test_from_loss.py:{line}, in {code.co_name}: {text}"]


def test_torchs_error_on_row_counts_is_explained():
    """torch says only "The size of tensor a (s93) must match the size of tensor b (s53)"."""
    loss_fn, params = simple(lambda y, w, t: (y - t).square().mean()), {"w": torch.eye(4)}
    with pytest.raises(RuntimeError, match=r"must match the size of tensor b \(s\d+\)") as error:
        fpipe.from_loss(loss_fn, params, (torch.randn(6, 4), torch.randn(3, 4)))
    notes = [re.sub(r"s\d+", "s", note) for note in sorted(error.value.__notes__, key=lambda note: "target" in note)]
    note_text, location = notes.pop(0).splitlines()
    assert note_text == "loss_fn was called on fake tensors, which have no data, as from_loss does to cut it."
    assert location.endswith(
        'in <lambda>: loss_fn, params = simple(lambda y, w, t: (y - t).square().mean()), {"w": torch.eye(4)}'
    )
    assert notes == [
        f"s is the number of rows of {half}, which from_loss keeps symbolic." for half in ("inputs", "target")
    ]


def test_a_gradient_of_rounding_noise_is_accepted():
    """Used to refuse a right cut for noise in a gradient: the bias of a key shifts all scores of a softmax alike."""

    def attend(p: dict[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = x @ p["q"], x @ p["k"] + p["bias"], x @ p["v"]
        return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v

    def loss_fn(params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = fpipe.boundary(batch[0] + attend(params["one"], batch[0]))
        z = fpipe.boundary(attend(params["other"], y))
        return ((y * z + z.tanh() + y - batch[1]) ** 2).mean()

    generator = torch.Generator().manual_seed(0)
    attention = {name: torch.randn(16, 16, generator=generator) / 4 for name in "qkv"} | {"bias": torch.ones(16)}
    batch = torch.randn(4, 7, 16, generator=generator), torch.randn(4, 7, 16, generator=generator)
    model, stage_params = fpipe.from_loss(
        loss_fn, {"one": attention, "other": {k: v.clone() for k, v in attention.items()}}, batch
    )
    grads = fpipe.reference(model, stage_params, batch).grads
    assert grads[0]["one.bias"].norm() < 1e-6 * fpipe.global_norm(grads)


def test_a_mask_of_the_sequence_length_is_a_table():
    """Used to be refused as a function of one number of rows."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
        (x, mask), target = batch
        length = mask.shape[0]
        y = fpipe.boundary(x @ params["w"])
        y = F.scaled_dot_product_attention(y, y, y, mask).view(-1, length, 4) * length
        return (fpipe.boundary(y) @ params["w"] - target).square().mean() / mask.shape[0]

    mask, (x, target) = torch.ones(4, 4, dtype=torch.bool).tril(), torch.randn(2, 4, 4, 4)
    model, stage_params = fpipe.from_loss(loss_fn, square(), ((x, mask), target))
    program = fpipe.chain(fpipe.split(2, spec=TABLE_SPEC), fpipe.merge())(fpipe.program(model))
    assert fpipe.verify(program, model, stage_params, ((x, mask), target)).bitwise


def flattened(w: Tensor, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return x + torch.tanh(flat @ w).reshape(x.shape) / flat.shape[0] / flat.numel()


def windowed(w: Tensor, x: Tensor) -> Tensor:
    """Attend in windows, like a Swin transformer: the number of images is computed from the number of windows."""
    rows, height, width, channels = x.shape
    windows = x.view(rows, height // 2, 2, width // 2, 2, channels).transpose(2, 3).reshape(-1, 4, channels)
    y = torch.tanh(windows @ w)
    rows = math.floor(y.shape[0] / (height * width / 2 / 2))
    y = y.view(rows, height // 2, width // 2, 2, 2, channels).transpose(2, 3)
    return x + y.reshape(rows, height, width, channels)


def routed(w: Tensor, x: Tensor) -> Tensor:
    """Route tokens, like a mixture of experts: how many an expert gets depends on the data."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen = (tokens[:, 0] > 0).nonzero().squeeze(1)
    return tokens.index_add(0, chosen, torch.tanh(tokens[chosen] @ w) / (1 + chosen.shape[0])).view_as(x)


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
@pytest.mark.parametrize("layer", [flattened, windowed, routed])
def test_a_stage_may_read_sizes_that_it_computes(layer: Any):
    """Used to end in "stage 0 takes 0; it can take 'batch'"."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x = layer(params["b"], fpipe.boundary(layer(params["a"], batch[0])))
        return F.mse_loss(x, batch[1])

    params, batch = {name: torch.randn(4, 4) for name in "ab"}, (torch.randn(4, 4, 4, 4), torch.randn(4, 4, 4, 4))
    assert assert_grads(loss_fn, params, batch, 2).inputs == ("batch", 0)


def test_a_stage_that_takes_windows_computes_the_number_of_images_from_them():
    """Used to take the activations of an earlier stage too, only for their size."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = batch[0].shape
        windows = batch[0].reshape(rows * 2, length // 2, width)
        for w in params.values():
            windows = fpipe.boundary(torch.tanh(windows @ w))
        return F.mse_loss(windows.reshape(rows, length, width) * rows, batch[1])

    batch = torch.randn(6, 4, 4), torch.randn(6, 4, 4)
    assert assert_grads(loss_fn, {name: torch.randn(4, 4) for name in "ab"}, batch, 4).inputs == ("batch", 0, 1)


def test_an_example_may_have_one_row():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model, stage_params = fpipe.from_loss(loss_of_net(net), dict(net.named_parameters()), rows(1))
    assert list(stage_params[0]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert fpipe.verify(merged(model, 3), model, stage_params, rows(7)).bitwise


def traces_of(model: fpipe.Model, params: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many stages and losses a step traces."""
    traced: list[Any] = []
    trace = trace_cache.trace
    monkeypatch.setattr(trace_cache, "trace", lambda *args: traced.append(args) or trace(*args))
    assert fpipe.verify(merged(model, 2, fpipe.checkpoint()), model, params, batch).bitwise
    monkeypatch.undo()
    return len(traced)


def test_equal_stages_share_a_trace(monkeypatch: pytest.MonkeyPatch):
    """Used to trace each block. Of four blocks three share a trace; the first also takes the skip to the head."""
    model, stage_params, _, batch = cut_gpt(4)
    assert traces_of(model, stage_params, batch, monkeypatch) == 4  # the embedding, a block, the head, the loss


def test_stages_that_differ_share_no_trace(monkeypatch: pytest.MonkeyPatch):
    """Stages may differ in a number, its type or sign, a captured tensor, or the order of arguments."""
    scales = [torch.full((4,), 2.0), torch.full((4,), 2.0)]
    layer_pairs = [
        (lambda x, w: torch.tanh(x * 2 @ w), lambda x, w: torch.tanh(x * 3 @ w)),
        (lambda x, w: x @ w + 1, lambda x, w: x @ w + 1.0),
        (lambda x, w: torch.clamp(x @ w, min=0.0), lambda x, w: torch.clamp(x @ w, min=-0.0)),
        (lambda x, w: x @ w * scales[0], lambda x, w: x @ w * scales[1]),
        (lambda x, w: x @ w, lambda x, w: x @ w.t()),
    ]
    for layer, other_layer in layer_pairs:

        def loss_fn(
            params: list[Tensor], batch: tuple[Tensor, Tensor], layers: Any = (layer, other_layer, layer)
        ) -> Tensor:
            x = fpipe.boundary(batch[0] * 1.5)
            for index, w in enumerate(params):
                x = fpipe.boundary(layers[index](x, w))
            return (x.square() - batch[1]).mean()

        batch = torch.randn(4, 4), torch.randn(4, 4)
        model, stage_params = fpipe.from_loss(loss_fn, [torch.randn(4, 4) for _ in range(3)], batch)
        sharing_keys = [stage.forward.sharing_key() for stage in model.stages[1:4]]
        assert sharing_keys[0] == sharing_keys[2] != sharing_keys[1]
    assert traces_of(model, stage_params, batch, monkeypatch) == 5


# Random numbers: each stage draws as if it began with torch.manual_seed(fold_in(key, stage, microbatch)).

KEY = 11


def test_a_nested_context_leaves_marking_and_seeding_on():
    """Used to raise AttributeError: the inner context dropped the state of the outer one."""
    with record_marks():
        with record_marks():
            pass
        with pytest.raises(ValueError, match="marks a pytree of tensors"):
            fpipe.boundary(3)
    assert fpipe.boundary(3) == 3
    with seed_stages(KEY):
        first_draw = torch.rand(2)
        with seed_stages(KEY + 1):
            fpipe.boundary(3)
        second_draw = torch.rand(2)
        fpipe.boundary(3)
        third_draw = torch.rand(2)
    torch.manual_seed(fpipe.fold_in(KEY, 0, 0))
    assert torch.equal(torch.cat([first_draw, second_draw]), torch.rand(4))
    torch.manual_seed(fpipe.fold_in(KEY, 1, 0))
    assert torch.equal(third_draw, torch.rand(2))


def test_dropout_that_keeps_everything_draws_nothing_for_the_loss():
    """Used to be refused as a draw: "draws random numbers for the loss, and dropout_1 after it"."""
    cut_fn(simple(lambda y, w, t: (F.dropout(t, 0.0) - F.dropout(y @ w)).square().mean()))


def noisy_loss(mark: Any) -> Any:
    """Return a loss function with the given marks and draws of every kind: unread, without a tensor, read by a later
    stage, and in the loss itself.
    """

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


def seeded_loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Run the function in plain autograd, with torch seeded at the start of each stage."""
    stage = 0

    def mark(value: Any) -> Any:
        nonlocal stage
        torch.manual_seed(fpipe.fold_in(KEY, stage, int(batch[1][0, 0])))
        stage += 1
        return value

    mark(None)
    return noisy_loss(mark)(params, batch)


PLANS: dict[str, tuple[Any, ...]] = {
    "recomputed and split": (fpipe.checkpoint("always"), fpipe.schedules.zb_h1(3)),
    "by layers": (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.one_f_one_b(3)),
    "two ranks": (fpipe.schedules.gpipe(1), fpipe.place([0, 1, 0])),
}


def test_random_numbers_follow_from_the_key_under_every_plan():
    torch.manual_seed(1)
    params = {name: torch.randn(4, 4) for name in "abc"}
    batch = torch.randn(8, 4), torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 4)  # its microbatch's number
    expected_grads = function_grads(seeded_loss, params, batch, 4)
    rng_state = torch.get_rng_state()
    model, stage_params = fpipe.from_loss(noisy_loss(fpipe.boundary), params, batch)
    for plan in PLANS.values():
        program = merged(model, 4, *plan)
        for trace in (True, False):
            step = fpipe.build(program, model, trace=trace)
            grads = fpipe.join_params(model, step(stage_params, batch, key=KEY).grads)
            assert all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())
    assert torch.equal(torch.get_rng_state(), rng_state)
    loss, other_loss = (step(stage_params, batch, key=key).loss for key in (KEY, KEY + 1))
    assert not torch.equal(loss, other_loss)
    with pytest.raises(ValueError, match=r"^stage 0 draws random numbers: hand in key="):
        step(stage_params, batch)


# Buffers of modules that the function closes over, or reaches by no name


class Watching(nn.Module):
    def __init__(self, update: str) -> None:
        super().__init__()
        self.update = update
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.update == "in place":
            self.seen.add_(1)
        else:
            self.seen = self.seen + 1
        return x * self.seen


class Renewing(nn.Linear):
    """A linear layer that replaces its weight in each call."""

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
MODULE_NAME = "held_module"


def access_net(net: nn.Module, is_named: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], nn.Module]:
    """Return a function that reaches a net through a closure variable, or through sys.modules."""
    monkeypatch.setitem(sys.modules, MODULE_NAME, ModuleType(MODULE_NAME))
    vars(sys.modules[MODULE_NAME])["net"] = net
    return (lambda: net) if is_named else (lambda: sys.modules[MODULE_NAME].net)


def tensors_of(net: nn.Module) -> dict[tuple[str, str], Any]:
    """Return buffers and parameters of all modules, also None, by module path and name."""
    tensors_by_path = [(path, {**module._buffers, **module._parameters}) for path, module in net.named_modules()]
    return {(path, name): tensor for path, tensors in tensors_by_path for name, tensor in tensors.items()}


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_net_that_the_function_changes_is_refused(
    change: str, is_named: bool, on_meta: bool, monkeypatch: pytest.MonkeyPatch
):
    """Used to count a batch in the trace, or to leave a tensor without data in the module, on which the next call
    failed with DataDependentOutputException: aten.equal.default.
    """
    make, problem = CHANGES[change]
    net = make().to("meta" if on_meta else "cpu")
    get_net, tensors = access_net(net, is_named, monkeypatch), tensors_of(net)
    values = [tensor.clone() for tensor in tensors.values() if tensor is not None]

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return (get_net()(fpipe.boundary(batch[0] @ params["w"])) * 1.0 - batch[1]).square().mean()

    w, *batch = (torch.randn(rows, 4, device="meta" if on_meta else "cpu") for rows in (4, 6, 6))
    with pytest.raises(RuntimeError, match=rf"^loss_fn {problem}, which it closes over; a stage and a loss a"):
        fpipe.from_loss(loss_fn, {"w": w}, tuple(batch))
    assert list(tensors_of(net)) == list(tensors)
    assert all(tensor is tensors[tensor_path] for tensor_path, tensor in tensors_of(net).items())
    assert on_meta or all(map(torch.equal, values, [tensor for tensor in tensors.values() if tensor is not None]))


@pytest.mark.parametrize("is_named", [True, False])
def test_a_net_in_another_mode_or_with_other_parameters_is_refused(is_named: bool, monkeypatch: pytest.MonkeyPatch):
    """Used to continue in silence after net.eval(), or with other parameters in the net."""
    net, batch = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), rows()
    get_net, params = access_net(net, is_named, monkeypatch), dict(net.named_parameters())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of_net(get_net())(params, batch)

    model, stage_params = fpipe.from_loss(loss_fn, params, batch)
    step = fpipe.build(fpipe.program(model), model)
    loss_before = step(stage_params, batch, key=0).loss
    net.eval()
    message = r"\(Dropout\) was in training when loss_fn was traced and is in eval now: the trace stays as"
    with pytest.raises(ValueError, match=message):
        step(stage_params, batch, key=0)
    with pytest.raises(ValueError, match=re.escape("Call from_loss again in this mode.")):
        fpipe.reference(model, stage_params, batch, key=0)
    recut, _ = fpipe.from_loss(loss_fn, params, batch)
    assert torch.equal(fpipe.build(fpipe.program(recut), recut)(stage_params, batch).loss, loss_fn(params, batch))
    net.train()
    assert torch.equal(step(stage_params, batch, key=0).loss, loss_before)
    net[0].weight.data = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"have the '0\.weight' that was handed out with the model; the net has"):
        step(stage_params, batch, key=0)


def test_a_net_that_has_no_modes_may_be_put_into_eval_mode():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model, stage_params = fpipe.from_loss(loss_of_net(net), dict(net.named_parameters()), rows())
    net.eval()
    assert fpipe.verify(fpipe.program(model), model, stage_params, rows()).bitwise


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda tensor: tensor.add_(1),
    "a view": lambda tensor: tensor[1:].mul_(2),
    "as out": lambda tensor: torch.add(tensor, 1, out=tensor),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_that_the_function_writes_is_refused(write: str):
    """Used to raise KeyError: '_tensor_constant0'."""
    tensor = torch.ones(4)
    loss_fn = simple(lambda y, w, t: (WRITES[write](tensor), (y * tensor - t).square().mean())[1])
    text = r"loss_fn writes ('tensor'|a tensor of shape \(4,\)) in place \(aten\.\w+\.\w+\), which it closes over[;.] "
    with pytest.raises((RuntimeError, ValueError), match=text):
        fpipe.from_loss(loss_fn, square(), rows())
    assert torch.equal(tensor, torch.ones(4))  # a trace must not write it


def test_a_checkpoint_around_the_loss_function_is_cut():
    """Used to be refused for the parameters of the wrapper."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(fpipe.boundary(batch[0] @ params["a"]) @ params["b"], batch[1])

    params = {name: torch.randn(4, 4) for name in "ab"}
    model = assert_grads(functools.partial(checkpoint, loss_fn, use_reentrant=False), params, rows(), 2)
    assert len(model.stages) == 2


@pytest.mark.parametrize("trace", [True, False])
def test_an_error_inside_a_context_exits_it(trace: bool):
    """Used to leave autocast on: later code ran in bfloat16, in silence."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            h = batch[0] @ params["a"]
        return F.mse_loss(fpipe.boundary(h.float() @ params["b"]), batch[1])

    params, batch = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}, rows()
    model, stage_params = fpipe.from_loss(loss_fn, params, batch)
    step = fpipe.build(merged(model, 2), model, trace=trace)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        step(({**stage_params[0], "a": torch.randn(5, 4)}, *stage_params[1:]), batch)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


# A program and the reference run one trace, so neither can see that the trace differs from the function by now.
# `verify` compares with the function itself.


def verify_merged(model, params, batch, **options):
    return fpipe.verify(merged(model, 2), model, params, batch, **options)


def test_verify_compares_with_the_function_and_not_with_its_trace():
    scale = [1.0]
    batch = rows()
    model, params = fpipe.from_loss(simple(lambda y, w, t: (y @ w * scale[0] - t).square().mean()), square(), batch)
    assert verify_merged(model, params, batch).bitwise
    scale[0] = 3.0
    with pytest.raises(
        fpipe.GradientMismatch, match=r"loss of microbatch 0 is .* by the stages and .* by loss_fn: it has"
    ):
        verify_merged(model, params, batch)


def test_verify_draws_the_random_numbers_of_the_stages_in_the_function():
    batch = rows()
    model, params = fpipe.from_loss(simple(lambda y, w, t: F.mse_loss(F.dropout(y) @ w, t)), square(), batch)
    assert verify_merged(model, params, batch, key=7).bitwise


def test_verify_compares_gradients_with_those_of_the_function():
    """The loss stays equal when a term is detached after the trace, but its gradient is lost."""
    stopped = [False]

    def loss_fn(params, batch):
        hidden = fpipe.boundary(batch[0] @ params["w"])
        return F.mse_loss(hidden + (params["v"].detach() if stopped[0] else params["v"]), batch[1])

    batch = rows()
    model, params = fpipe.from_loss(loss_fn, {"w": torch.randn(4, 4), "v": torch.randn(4)}, batch)
    model = fpipe.freeze(model, (0, "w"))
    assert verify_merged(model, params, batch).bitwise
    stopped[0] = True
    with pytest.raises(fpipe.GradientMismatch, match="The gradient of v by the stages is off by up to"):
        verify_merged(model, params, batch)
