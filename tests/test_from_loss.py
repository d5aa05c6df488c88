"""One loss function, cut where it is marked: dataflow, ties, skips and the function's own gradients."""

import functools
import itertools
import linecache
import math
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.graphs.tracing import trace_cache
from tests.refusals import refusals
from tests.toys import merged

WIDTH, WORDS, LENGTH = 8, 16, 6


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    rows, length, width = x.shape
    h = F.layer_norm(x, (width,), p["gain"], p["bias"])
    q, k, v = (
        part.view(rows, length, 2, width // 2).transpose(1, 2) for part in F.linear(h, p["qkv"]).split(width, dim=2)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
    x = x + F.linear(y, p["out"])
    return x + F.linear(F.gelu(F.linear(x, p["up"])), p["down"])


def block_params() -> dict[str, Tensor]:
    norm = {"gain": torch.ones(WIDTH), "bias": torch.zeros(WIDTH)}
    shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    return norm | {name: torch.randn(shape) / 4 for name, shape in shapes.items()}


def gpt(params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    """A tied embedding, positions from a mask made inside, and a skip from the embedding to the head."""
    ids, target = batch
    x = skip = F.embedding(ids, params["embed"]) + params["position"][torch.arange(ids.shape[1])]
    for own in params["blocks"]:
        x = block(own, fpipe.boundary(x))
    x = fpipe.boundary(x)
    return F.cross_entropy(F.linear(x + skip, params["embed"]).flatten(0, 1), target.flatten())


def gpt_case(rows: int = 8) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    params = {
        "embed": torch.randn(WORDS, WIDTH),
        "position": torch.randn(LENGTH, WIDTH),
        "blocks": [block_params(), block_params()],
    }
    return params, (torch.randint(0, WORDS, (rows, LENGTH)), torch.randint(0, WORDS, (rows, LENGTH)))


@functools.cache
def cut_gpt() -> tuple[fpipe.Model, Any, Any, tuple[Tensor, Tensor]]:
    """The model, its parameters per stage and as a whole, and a batch."""
    params, batch = gpt_case()
    model, own = fpipe.from_loss(gpt, params, batch)
    return model, own, params, batch


def own_grads(loss_fn: Any, params: Any, batch: tuple[Tensor, Tensor], microbatches: int) -> list[Tensor]:
    leaves, containers = torch.utils._pytree.tree_flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    total: list[Tensor] = []
    for x, t in zip(*(half.tensor_split(microbatches) for half in batch), strict=True):
        loss = loss_fn(torch.utils._pytree.tree_unflatten(leaves, containers), (x, t)) * (len(x) / len(batch[0]))
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        found = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
        total = [a + b for a, b in zip(total, found, strict=True)] if total else found
    return total


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


def assert_own(loss_fn: Any, params: Any, batch: Any, microbatches: int) -> fpipe.Model:
    """The gradients of the cut function are its own, bit by bit."""
    model, own = fpipe.from_loss(loss_fn, params, batch)
    program = merged(model, microbatches)
    found = fpipe.join_params(model, fpipe.build(program, model)(own, batch).grads)
    right = own_grads(loss_fn, params, batch, microbatches)
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(found), right))
    return model


def test_stages_skips_and_ties_fall_out_of_the_dataflow():
    model, own, _, _ = cut_gpt()
    assert model.inputs == ("batch", 0, 1, (0, 2))
    assert model.ties == (((0, "embed"), (3, "embed")),)
    assert [len(stage) for stage in own] == [2, 6, 6, 0]
    assert list(own[2])[:2] == ["blocks.1.gain", "blocks.1.bias"]


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


def test_what_an_early_stage_hands_to_others_and_to_the_loss():
    """IndexError: the last stage hands it to the loss as an output of another number than the early one's."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        first = torch.tanh(x @ params["a"])
        gate = torch.sigmoid(first @ params["b"])
        second = torch.tanh(fpipe.boundary(first) @ params["b"])
        third = torch.tanh(fpipe.boundary(second) @ params["c"]) * gate
        return (third - target).square().mean() + (first * target).mean() + gate.mean()

    params, batch = {name: torch.randn(4, 4) for name in "abc"}, rows()
    model, own = fpipe.from_loss(loss_fn, params, batch)
    program = merged(model, 3, fpipe.schedules.one_f_one_b(3))
    assert fpipe.verify(program, model, own, batch).bitwise
    found = fpipe.join_params(model, fpipe.build(program, model)(own, batch).grads)
    for one, other in zip(found.values(), own_grads(loss_fn, params, batch, 3), strict=True):
        torch.testing.assert_close(one, other)


def odd(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """no_grad, autocast, a change in place and a checkpoint, inside of stages."""
    x, target = batch
    with torch.no_grad():
        scale = (x @ params["a"]).abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        x = F.linear(x, params["a"])
    x = fpipe.boundary(F.relu(x.float() / scale, inplace=True))
    return (checkpoint(torch.tanh, x @ params["b"], use_reentrant=False) - target).square().mean()


def autocast_over_all(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = fpipe.boundary(torch.tanh(fpipe.boundary(batch[0] @ params["a"]) @ params["b"])) @ params["c"]
        return F.cross_entropy(y, batch[1].argmax(-1))


def autocast_over_marks(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.tanh(fpipe.boundary(batch[0] @ params["a"]) @ params["b"])
        with torch.autocast("cpu", enabled=False):
            x = fpipe.boundary(x.float() @ params["c"]) * 2
        y = x @ params["c"].t()
    return F.mse_loss(y.float(), batch[1])


def autocast_in_the_loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x = fpipe.boundary(batch[0] @ params["a"])
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ params["b"] @ batch[1].t()).float().square().mean()


def gradients_said_to_be_on(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.set_grad_enabled(True):
        return F.mse_loss(fpipe.boundary(torch.tanh(batch[0] @ params["a"])) @ params["b"], batch[1])


def no_grad_over_a_mark(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        frozen = fpipe.boundary(torch.tanh(batch[0] @ params["a"])) @ params["b"]
        with torch.enable_grad():
            trained = batch[0] @ params["b"]
    return F.mse_loss(fpipe.boundary(trained @ params["c"]) + frozen, batch[1])


def no_grad_in_the_loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    error = fpipe.boundary(batch[0] @ params["a"]) @ params["b"] - batch[1]
    with torch.no_grad():
        weight = error.abs()
    return (weight * error.square()).mean()


def tied_in_autocast(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cast once here, and so added up in bfloat16; in two stages added up in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.tanh(fpipe.boundary(torch.tanh(batch[0] @ params["a"])) @ params["b"]) @ params["a"]
        return F.mse_loss(y @ params["c"], batch[1])


BLOCKS = [
    odd,
    tied_in_autocast,
    autocast_over_all,
    autocast_over_marks,
    autocast_in_the_loss,
    gradients_said_to_be_on,
    no_grad_over_a_mark,
    no_grad_in_the_loss,
]


@pytest.mark.parametrize("loss_fn", BLOCKS, ids=[one.__name__ for one in BLOCKS])
def test_blocks_may_hold_marks_and_the_loss(loss_fn: Any):
    """The loss was computed outside of its block, and a mark inside one refused: autocast around all of a training
    step, as most people write it, had other bits, in words that blamed .item()."""
    torch.manual_seed(0)
    params, batch = {name: torch.randn(4, 4) for name in "abc"}, (torch.randn(7, 4), torch.randn(7, 4))
    model, own = fpipe.from_loss(loss_fn, params, batch)
    plan = fpipe.checkpoint("always"), fpipe.schedules.zb_h1(len(model.stages))
    program = merged(model, 3, *plan)
    found = fpipe.join_params(model, fpipe.build(program, model)(own, batch).grads)
    right = own_grads(loss_fn, params, batch, 3)
    for name, one, other in zip(params, found.values(), right, strict=True):
        if name in {leaf for group in model.ties for _, leaf in group}:
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(one, other)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def gradient_inside(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].clone().requires_grad_()
    y = fpipe.boundary(torch.tanh(x @ params["w"])) @ params["w"]
    return (torch.autograd.grad(y.sum(), x, create_graph=True)[0] - batch[1]).square().mean()


def refused(loss_fn: Any) -> Any:
    return fpipe.from_loss(loss_fn, {"w": torch.randn(4, 4), "loss": torch.ones(())}, rows())


def returned(of_error: Any, **options: Any) -> Any:
    """A loss function that returns what it is told to."""
    loss_fn = lambda params, batch: of_error(fpipe.boundary(batch[0] @ params["w"]) - batch[1])  # noqa: E731
    return fpipe.from_loss(loss_fn, square(), rows(), **options)


def taken(function: Any) -> Any:
    return fpipe.from_loss(function, {}, ONES)


ONES = torch.ones(2), torch.ones(2)
test_what_cannot_be_cut_is_refused_with_the_reason = refusals(
    globals(),
    """
refused(lambda params, batch: (fpipe.boundary(batch[0] @ params['w'] + batch[1]) @ params['w']).mean())
    ValueError: stage 0 reads the target (add); only what comes after the last boundary may
refused(simple(lambda y, w, t: (y - t @ w).mean()))
    ValueError: matmul_1 reads the target and the parameter 'w': a loss(y, target) has no parameters
refused(lambda params, batch: (fpipe.boundary(batch[0]), (batch[0] @ params['w'] - batch[1]).mean())[1])
    ValueError: boundary 1 has nothing to compute before it; leave it out
refused(simple(lambda y, w, t: (fpipe.boundary(y) @ w - t).mean()))
    ValueError: boundary 2 has nothing to compute before it; leave it out
refused(simple(lambda y, w, t: (lambda loss: loss if loss > 0 else -loss)((y @ w - t).mean())))
    ValueError: loss_fn branches on a number that it computes (if loss > 0, say), which is not known while it is
    traced.
refused(simple(lambda y, w, t: (y.register_hook(lambda grad: grad * 2), (y @ w - t).square().mean())[1]))
    ValueError: the stages give another gradient of w than loss_fn: a custom autograd.Function, a hook or
    inference_mode, say
refused(simple(lambda y, w, t: (y - torch.inference_mode()(lambda: y @ w)() - t).square().mean()))
    ValueError: a hook or inference_mode, say, which no trace above autograd captures. Use no_grad for the last, or
refused(simple(lambda y, w, t: (Tripled.apply(y @ w) - t).square().mean()))
    ValueError: the stages give another gradient of w than loss_fn: a custom autograd.Function, a hook or
    inference_mode, say
refused(simple(lambda y, w, t: (y @ w * torch.rand(4, generator=torch.Generator()) - t).square().mean()))
    ValueError: loss_fn draws from a generator of its own (rand), which is in no key; draw without it.
refused(simple(lambda y, w, t: (y @ w * torch.rand(y.shape, generator=torch.Generator()) - t).square().mean()))
    ValueError: loss_fn draws from a generator of its own (rand), which is in no key; draw without it.
refused(simple(lambda y, w, t: (checkpoint(torch.tanh, y @ w, use_reentrant=True) - t).square().mean()))
    ValueError: torch.utils.checkpoint(use_reentrant=True) has a backward that no trace above autograd captures; say
refused(simple(lambda y, w, t: (F.dropout(t) - F.dropout(y @ w)).square().mean()))
    ValueError: dropout draws random numbers for the loss, and dropout_1 after it for what comes before the loss;
    draw them
refused(simple(lambda y, w, t: (torch.manual_seed(3), (F.dropout(y @ w) - t).square().mean())[1]))
    ValueError: it does something that a trace does not capture, such as values read by .item(), or a seed of its
    own.
refused(simple(lambda y, w, t: (y @ w - t).mean() * (2 if y.shape[0] == 6 else 1)))
    ValueError: loss_fn can be traced for one number of rows only, that of the example
refused(simple(lambda y, w, t: (y @ w - t).sum() / len(y)))
    ValueError: as len(x), int(n / 4) and functions of torch.jit do; x.shape[0] and n // 4 keep it symbolic
refused(lambda params, batch: (fpipe.boundary(batch[0] @ params['w']), batch[1].mean())[1])
    ValueError: the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.
refused(lambda params, batch: torch.tensor(3.0))
    ValueError: the loss reads nothing that loss_fn computes from params
refused(lambda params, batch: params['loss'])
    ValueError: loss_fn computes nothing, so there is no stage
refused(lambda params, batch: fpipe.boundary(3))
    ValueError: boundary() marks a pytree of tensors
returned(lambda error: error.square().sum(1))
    ValueError: what loss_fn returns is a 0-d tensor, found shape (rows,); reduce it, for
returned(lambda error: error.flatten())
    ValueError: what loss_fn returns is a 0-d tensor, found shape (4*rows,); reduce it, for
returned(lambda error: error.square().mean().item())
    TypeError: what loss_fn returns is a 0-d tensor, found float.
returned(lambda error: 1.0)
    TypeError: what loss_fn returns is a 0-d tensor, found float.
returned(lambda error: None)
    TypeError: what loss_fn returns is a 0-d tensor, found NoneType.
returned(lambda error: (error.square().mean(), error))
    TypeError: what loss_fn returns is a 0-d tensor, found tuple.
returned(lambda error: (error > 0).any())
    TypeError: what loss_fn returns is a 0-d tensor of floats, found one of torch.bool, which has no gradient.
returned(lambda error: (error > 0).sum())
    TypeError: what loss_fn returns is a 0-d tensor of floats, found one of torch.int64, which has no gradient.
returned(lambda error: {'loss': error.square().mean()})
    TypeError: what loss_fn returns is a 0-d tensor, found dict.
returned(lambda error: error.square().mean(), aux=True)
    TypeError: with aux=True the loss returns (loss, aux), found Tensor.
returned(lambda error: error.square().sum(), reduction='count')
    TypeError: with reduction="count" the loss returns (total, count), found Tensor.
returned(lambda error: (error.sum(1), 6), reduction='count')
    ValueError: what loss_fn returns is a 0-d tensor, found shape (rows,)
returned(lambda error: (error.square().sum(), 6), reduction='count', aux=True)
    TypeError: with reduction="count" the loss returns (total, count), found Tensor.
taken(3)
    TypeError: , found int.
taken(torch.nn.MSELoss)
    TypeError: , found a class (MSELoss).
taken(lambda params: params)
    TypeError: , its batch one pair (inputs, target); found one of (params).
taken(lambda p, x, y: x)
    TypeError: , its batch one pair (inputs, target); found one of (p, x, y).
taken(None)
    TypeError: , found NoneType.
taken(lambda x: x)
    TypeError: ; found one of (x).
taken(nn.Linear(4, 4))
    TypeError: ; found one of (input: torch.Tensor) -> torch.Tensor.
taken(nn.MSELoss())
    TypeError: , which computes the loss of a whole net; found MSELoss, a function of other things. Call it on what
    the net
taken(F.cross_entropy)
    TypeError: , which computes the loss of a whole net; found cross_entropy, a function of other things. Call it on
    what the net
taken(functools.partial(F.mse_loss, reduction='sum'))
    TypeError: , which computes the loss of a whole net; found mse_loss, a function of other things. Call it on what
    the net
taken(torch.matmul)
    TypeError: , which computes the loss of a whole net; found matmul, a function of other things. Call it on what
    the net
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
    ValueError: stage 0 asks for a size of the target, which only the loss has; ask the inp
refused(simple(lambda y, w, t: (setattr(y, "data", y.detach() * 2), (y - t).square().mean())[1]))
    ValueError: loss_fn cannot be cut: it assigns the .data of a tensor, which no trace sees. Compute a new tensor
    in its
refused(gradient_inside)
    Exception: a tensor of shape (rows, 4) is computed where no trace sees it: by torch.autograd.grad, torch.
refused(simple(lambda y, w, t: (torch.func.vmap(torch.func.grad(lambda x: torch.tanh(x @ w).sum()))(y) - t).mean()))
    Exception: a tensor of shape (rows, 4) is computed where no trace sees it: by torch.autograd.grad, torch.
refused(simple(lambda y, w, t: (torch.vmap(lambda x: torch.tanh(x @ w))(y) - t).square().mean()))
    Exception: a tensor of shape (rows, 4) is computed where no trace sees it: by torch.autograd.grad, torch.
(lambda model, own, whole, batch: fpipe.build(fpipe.program(model), model)(whole, batch))(*cut_gpt())
    ValueError: found dict. fpipe.split_params(model, whole) makes it of the whole py
(lambda model, own, whole, batch: fpipe.reference(model, own, tuple(torch.cat([h, h], 1) for h in batch)))(*cut_gpt())
    ValueError: inputs was (8, 6) when loss_fn was traced, found (8, 12)
""",
)


def test_a_checkpoint_in_a_checkpoint_is_traced() -> None:
    """A trace had its values and not their gradient: they were detached, and the function was refused."""

    def inner(x: Tensor) -> Any:
        return checkpoint(torch.tanh, x, use_reentrant=False)

    loss_fn = simple(lambda y, w, t: (checkpoint(inner, y @ w, use_reentrant=False) - t).square().mean())
    assert_own(loss_fn, square(), rows(), 1)


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

    with pytest.raises(
        ValueError, match="Use torch.where, or from_fun" if decides else "stage 0 reads the ta"
    ) as error:
        fpipe.from_loss(loss_fn, dict(net.named_parameters()), rows())
    code = (Decides.forward if decides else loss_fn).__code__
    place = "in module 'net.1' (Decides), at" if decides else "at"
    line = code.co_firstlineno + 1
    words = linecache.getline(__file__, line).strip()
    assert str(error.value).splitlines()[1:] == [f"  {place} test_from_loss.py:{line}, in {code.co_name}: {words}"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_module_is_refused_with_the_way_out():
    net = torch.jit.script(nn.Linear(4, 4))

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(fpipe.boundary(net(batch[0])) @ params["w"], batch[1])

    words = "module 'net' (RecursiveScriptModule) is compiled by torch.jit: no trace sees into it, and it runs with no "
    with pytest.raises(ValueError, match=re.escape(words + "parameters but its own. Take the module that it was made")):
        fpipe.from_loss(loss_fn, {"w": torch.eye(4)}, (torch.ones(6, 4), torch.ones(6, 4)))


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


def test_a_number_of_rows_that_takes_another_way():
    loss_fn = simple(lambda y, w, t: (y @ w * (2 if y.shape[0] > 3 else 1) - t).mean())
    params, batch = square(), rows()
    model, own = fpipe.from_loss(loss_fn, params, batch)
    fpipe.build(fpipe.program(model), model)(own, batch)
    words = "loss_fn takes another branch for 3 rows than for the example: rows > 3 is false"
    with pytest.raises(ValueError, match=words):
        fpipe.build(merged(model, 2), model)(own, batch)


TABLE = (fpipe.Chunk(0), fpipe.Replicate())


def size_of_the_target(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    y = fpipe.boundary(torch.tanh(batch[0] @ params["w"]))
    return (y @ batch[1].t()).square().sum() / batch[1].shape[0]


def rows_put_together(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    y = fpipe.boundary(torch.tanh(batch[0] @ params["w"]))
    return (y - batch[1]).square().sum() / batch[1].shape[0]


def test_leaves_with_as_many_rows_in_the_example_may_have_others_later():
    """The rows of a table that every microbatch takes whole were taken for those of the batch: 259.65 for 21.52."""
    params, x, target = square(), torch.randn(12, 4), torch.randn(6, 4)
    model, own = fpipe.from_loss(size_of_the_target, params, (x[:6], target))
    program = fpipe.chain(fpipe.split(3, spec=TABLE), fpipe.merge(outputs=False))(fpipe.program(model))
    right = sum(size_of_the_target(params, (part, target)) / 3 for part in x.chunk(3))
    torch.testing.assert_close(fpipe.build(program, model)(own, (x, target)).loss, right)


@pytest.mark.parametrize("count", [1, 6])
def test_rows_that_are_put_together_are_as_many(count: int):
    """One row would be taken for as many as the inputs have."""
    params = square()
    model, own = fpipe.from_loss(rows_put_together, params, rows())
    step = fpipe.build(fpipe.split(3, spec=TABLE)(fpipe.program(model)), model)
    words = f"target has {count} rows, expected 4 to go with the 4 of the last stage's output: loss_fn puts the two"
    with pytest.raises(ValueError, match=re.escape(words)):
        step(own, (torch.randn(12, 4), torch.randn(count, 4)))
    step(own, (torch.randn(12, 4), torch.randn(4, 4)))


def test_one_row_among_many_is_a_table():
    """The example was given two of it, which do not fit."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
        (x, shift), target = batch
        return (fpipe.boundary(x @ params["w"] + shift) @ params["w"] - target).square().mean()

    params, inputs, target = square(), (torch.randn(6, 4), torch.randn(1, 4)), torch.randn(6, 4)
    model, own = fpipe.from_loss(loss_fn, params, (inputs, target))
    spec = (fpipe.Chunk(0), fpipe.Replicate()), fpipe.Chunk(0)
    program = fpipe.chain(fpipe.split(3, spec=spec), fpipe.merge())(fpipe.program(model))
    assert fpipe.verify(program, model, own, (inputs, target)).bitwise
    with pytest.raises(ValueError, match=r"inputs\[1\] was \(1, 4\) when .* it is none of those whose rows may differ"):
        fpipe.build(program, model)(own, ((inputs[0], torch.randn(2, 4)), target))


@pytest.mark.parametrize("rows", [4, 8])
def test_a_mask_of_the_sequences_length_is_a_table(rows: int):
    """It was refused as if the function were one for a single number of rows."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
        (x, mask), target = batch
        length = mask.shape[0]
        y = fpipe.boundary(x @ params["w"])
        y = F.scaled_dot_product_attention(y, y, y, mask).view(-1, length, 4) * length
        return (fpipe.boundary(y) @ params["w"] - target).square().mean() / mask.shape[0]

    x, mask, target = torch.randn(rows, 4, 4), torch.ones(4, 4, dtype=torch.bool).tril(), torch.randn(rows, 4, 4)
    params = square()
    model, own = fpipe.from_loss(loss_fn, params, ((x, mask), target))
    spec = (fpipe.Chunk(0), fpipe.Replicate()), fpipe.Chunk(0)
    program = fpipe.chain(fpipe.split(2, spec=spec), fpipe.merge())(fpipe.program(model))
    found = fpipe.build(program, model)(own, ((x, mask), target))
    w = params["w"].requires_grad_()
    parts = zip(x.chunk(2), target.chunk(2), strict=True)
    losses = [loss_fn({"w": w}, ((x, mask), target)) / 2 for x, target in parts]
    torch.testing.assert_close(found.loss, torch.stack(losses).sum().detach())
    torch.testing.assert_close(found.grads[0]["w"], torch.autograd.grad(sum(losses), w)[0])
    words = "inputs[1] was (4, 4) when loss_fn was traced, found (2, 4): it is none of those whose rows may differ"
    with pytest.raises(ValueError, match=re.escape(words)):
        fpipe.build(program, model)(own, ((x, mask[:2]), target))


def test_leaves_are_compared_by_their_rows():
    def loss_fn(params: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
        (x, table), target = batch
        y = x @ (params["w"] if x.shape[0] > table.shape[0] else params["v"])
        return (fpipe.boundary(y) @ params["w"] - target).mean()

    params = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}
    inputs, target = (torch.randn(6, 4), torch.randn(4, 4)), torch.randn(6, 4)
    model, own = fpipe.from_loss(loss_fn, params, (inputs, target))
    spec = TABLE, fpipe.Chunk(0)
    words = r"another branch for 3 and 4 rows than for the example: len\(inputs\[0\]\) > len\(inputs\[1\]\) is false"
    with pytest.raises(ValueError, match=words):
        fpipe.build(fpipe.split(2, spec=spec)(fpipe.program(model)), model)(own, (inputs, target))


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

    def loss_fn(params: list[Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        for number, w in enumerate(params):
            x = layer(w, fpipe.boundary(x) if number else x)
        return F.mse_loss(x, batch[1])

    params, batch = [torch.randn(4, 4) for _ in range(2)], (torch.randn(4, 4, 4, 4), torch.randn(4, 4, 4, 4))
    assert assert_own(loss_fn, params, batch, 2).inputs == ("batch", 0)


def test_a_stage_that_takes_windows_computes_the_number_of_images_from_them():
    """It took an earlier stage's activations too, for their size alone."""

    def loss_fn(params: list[Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = batch[0].shape
        windows = batch[0].reshape(rows * 2, length // 2, width)
        for w in params:
            windows = fpipe.boundary(torch.tanh(windows @ w))
        return F.mse_loss(windows.reshape(rows, length, width) * rows, batch[1])

    batch = torch.randn(6, 4, 4), torch.randn(6, 4, 4)
    assert assert_own(loss_fn, [torch.randn(4, 4) for _ in range(2)], batch, 4).inputs == ("batch", 0, 1)


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
    params, batch = gpt_case()
    params["blocks"] = [block_params() for _ in range(4)]
    model, own = fpipe.from_loss(gpt, params, batch)
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
        twins = [stage.forward.twin() for stage in model.stages[1:4]]
        assert twins[0] == twins[2] != twins[1]
    assert traces_of(model, own, batch, monkeypatch) == 5


# Random numbers: each stage draws as if it began with torch.manual_seed(fold_in(key, stage, microbatch)).

KEY = 11


def noisy(mark: Any) -> Any:
    """A loss function with marks of one's choice: draws of every kind, that nobody reads, that need no tensor, that a
    later stage reads, and some in the loss itself."""

    def loss_fn(params: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        later = torch.rand(4)
        torch.rand(3)
        x = mark(F.dropout(x @ params["w0"], 0.3) + torch.rand(x.shape[0], 1))
        x = x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.empty_like(x).exponential_() * later
        x = mark(torch.tanh(x @ params["w1"]) + torch.randn_like(x))
        heads = (x @ params["w2"]).view(x.shape[0], 1, 2, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)
        x = F.rrelu(heads.flatten(1) + F.gumbel_softmax(x, dim=-1), training=True)[torch.randperm(x.shape[0])]
        torch.rand(2)
        return (x - F.dropout(target, 0.2)).square().mean()

    return loss_fn


def noisy_case() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return {name: torch.randn(4, 4) for name in ("w0", "w1", "w2")}, (torch.randn(10, 4), torch.randn(10, 4))


def seeded(make: Any, params: Any, batch: tuple[Tensor, Tensor], microbatches: int) -> tuple[Tensor, Any]:
    """Plain autograd that seeds torch where each stage begins."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    total = torch.tensor(0.0)
    for index, (x, t) in enumerate(zip(*(half.tensor_split(microbatches) for half in batch), strict=True)):
        stage = 0

        def mark(value: Any, index: int = index) -> Any:
            nonlocal stage
            stage += 1
            torch.manual_seed(fpipe.fold_in(KEY, stage, index))
            return value

        torch.manual_seed(fpipe.fold_in(KEY, 0, index))
        loss = make(mark)(leaves, (x, t)) * (len(x) / len(batch[0]))
        loss.backward()
        total = total + loss.detach() if index else loss.detach()
    return total, {name: leaf.grad for name, leaf in leaves.items()}


PLANS: dict[str, tuple[Any, ...]] = {
    "kept": (),
    "recomputed and split": (fpipe.checkpoint("always"), fpipe.schedules.zb_h1(3)),
    "by layers": (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.one_f_one_b(3)),
    "two ranks": (fpipe.schedules.gpipe(1), fpipe.place([0, 1, 0])),
}


def test_random_numbers_follow_from_the_key_under_every_plan():
    params, batch = noisy_case()
    before = torch.get_rng_state()
    model, own = fpipe.from_loss(noisy(fpipe.boundary), params, batch)
    found = []
    for plan in PLANS.values():
        program = merged(model, 4, *plan)
        for trace in (True, False):
            step = fpipe.build(program, model, trace=trace)
            found.append(step(own, batch, key=KEY))
    found.append(step(own, batch, key=KEY))
    assert torch.equal(torch.get_rng_state(), before)
    loss, grads = seeded(noisy, params, batch, 4)
    for result in found:
        whole = fpipe.join_params(model, result.grads)
        assert torch.equal(result.loss, loss)
        assert all(torch.equal(whole[name], grad) for name, grad in grads.items())
    assert not torch.equal(fpipe.build(program, model)(own, batch, key=KEY + 1).loss, loss)
    with pytest.raises(ValueError, match=r"^stage 0 draws random numbers: hand in key="):
        fpipe.build(program, model)(own, batch)


# Buffers of modules that the function closes over


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


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("how", ["norm", "in place", "another", "a helper's", "in a dict"])
def test_a_buffer_that_the_function_writes_is_refused_by_name(how: str, meta: bool):
    """The trace once counted a batch, or left a fake tensor in the module."""
    net = nn.BatchNorm1d(4) if how == "norm" else Watching("another" if how == "another" else "in place")
    nets = {"inner": net}
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}

    def helper(x: Tensor) -> Tensor:
        return net(x)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = fpipe.boundary(batch[0] @ params["w"])
        y = helper(y) if how == "a helper's" else nets["inner"](y) if how == "in a dict" else net(y)
        return (y - batch[1]).square().mean()

    name = "num_batches_tracked" if how == "norm" else "seen"
    params, batch = square(), rows()
    if meta:
        params, batch = {"w": params["w"].to("meta")}, tuple(half.to("meta") for half in batch)
    does = r"binds '\S*{}' anew" if how == "another" else r"writes '\S*{}' in place \(aten\.add_\.Tensor\)"
    sentence = f"loss_fn {does.format(name)}, which it closes over; a stage and a loss are pure functions"
    with pytest.raises(RuntimeError, match=sentence):
        fpipe.from_loss(loss_fn, params, batch)
    assert all(torch.equal(before[name], buffer) and type(buffer) is Tensor for name, buffer in net.named_buffers())


def test_a_norm_in_eval_is_closed_over_as_it_is():
    net = nn.BatchNorm1d(4).eval().requires_grad_(False)
    assert_own(simple(lambda y, w, t: (net(y) * 1.0 - t).square().mean()), square(), rows(), 1)


class Trainer:
    """What loss functions are written in: its net is no name of theirs."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = fpipe.boundary(torch.func.functional_call(self.net, params, (batch[0],)))
        return (y - batch[1]).square().mean()


class Slotted:
    __slots__ = ("net",)

    def __init__(self, net: nn.Module) -> None:
        self.net = net


BEHIND: dict[str, Callable[[nn.Module], Any]] = {
    "a callable": Trainer,
    "a bound method": lambda net: Trainer(net).__call__,
    "a callable in a lambda": lambda net: (lambda trainer: lambda params, batch: trainer(params, batch))(Trainer(net)),
    "a holder": lambda net: (lambda held: lambda p, b: Trainer(held.net)(p, b))(Slotted(net)),
    "a namespace": lambda net: (lambda held: lambda p, b: Trainer(held.net)(p, b))(SimpleNamespace(net=net)),
    "a class": lambda net: (lambda held: lambda p, b: Trainer(held.net)(p, b))(type("Held", (), {"net": net})),
    "a python module": lambda net: (setattr(held_module, "net", net), in_module)[1],
    "a default": lambda net: lambda params, batch, net=net: Trainer(net)(params, batch),
    "a cached function": lambda net: (lambda get: lambda p, b: Trainer(get())(p, b))(functools.cache(lambda: net)),
}
HELD = "held_module"
held_module = ModuleType(HELD)


def in_module(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return (lambda: Trainer(held_module.net)(params, batch))()


@pytest.mark.parametrize(("behind", "kind"), [*zip(BEHIND, itertools.cycle(["norm", "another"]))])
def test_a_module_behind_an_object_is_found(behind: str, kind: str):
    """A trainer's loss was cut with a tensor without data left in its net, or failed in words that said nothing."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if kind == "norm" else Watching(kind))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with pytest.raises(RuntimeError, match=r"loss_fn (writes|binds) .*, which it closes over; a stage and a loss are"):
        fpipe.from_loss(BEHIND[behind](net), dict(net.named_parameters()), rows())
    assert all(torch.equal(before[name], buffer) and type(buffer) is Tensor for name, buffer in net.named_buffers())


@pytest.mark.parametrize("behind", BEHIND)
def test_the_mode_of_a_module_behind_an_object_is_known(behind: str):
    """A trainer's net was put into eval mode, or given other parameters, and steps went on as before, in silence."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    batch = rows()
    model, own = fpipe.from_loss(BEHIND[behind](net), dict(net.named_parameters()), batch)
    step = fpipe.build(fpipe.program(model), model)
    net.eval()
    with pytest.raises(ValueError, match=r"Dropout\) was in training when loss_fn was traced and is in eval now"):
        step(own, batch, key=0)
    net.train()
    net[0].weight.data = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"have the '0\.weight' that was handed out with the model; the net has"):
        step(own, batch, key=0)


def test_a_local_that_is_assigned_later_is_no_obstacle():
    """An empty cell was read, and from_loss failed before it began."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = fpipe.boundary(batch[0] @ params["w"])
        return (y - batch[1]).square().mean() if params else later

    assert_own(loss_fn, square(), rows(), 1)
    later = torch.zeros(())


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


def test_what_a_write_only_reads_and_what_is_written_before_it_is_used():
    """The first was a KeyError too; and a later stage made the mask anew, without what was written into a view."""
    held = torch.randn(4)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        mask = torch.zeros(4)
        mask[1:].add_(1)
        y = (batch[0] @ params["w"]).add_(held) * mask
        return (fpipe.boundary(y) * mask + held - batch[1]).square().mean()

    assert_own(loss_fn, square(), rows(), 3)


def test_a_norm_that_no_name_leads_to_is_seen_too(monkeypatch: pytest.MonkeyPatch):
    """Found by a string: nobody knew of it beforehand, and its count of batches was another afterwards."""
    norm = nn.BatchNorm1d(4)
    monkeypatch.setattr(held_module, "net", norm, raising=False)
    monkeypatch.setitem(sys.modules, HELD, held_module)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = sys.modules[HELD].net(fpipe.boundary(batch[0] @ params["w"]))
        return (y * 1.0 - batch[1]).square().mean()

    batch = rows()
    with pytest.raises(RuntimeError, match=r"loss_fn writes a tensor in place .*, which it closes over; .* \.eval\(\)"):
        fpipe.from_loss(loss_fn, square(), batch)
    assert all(map(torch.equal, norm.buffers(), nn.BatchNorm1d(4).buffers()))


class Renewing(nn.Linear):
    """Its weight is another after each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight * 2)
        return super().forward(x)


REPLACES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a buffer": (lambda: Watching("another"), "'Watching.seen'"),
    "one inside": (lambda: nn.Sequential(nn.Tanh(), Watching("another")), "'Watching.seen'"),
    "a parameter": (lambda: Renewing(4, 4), "'Renewing.weight'"),
}


def held_in(net: nn.Module) -> dict[tuple[str, str], Any]:
    """What modules have as buffers and parameters, None too, by module and name."""
    each = [(path, {**module._buffers, **module._parameters}) for path, module in net.named_modules()]
    return {(path, name): one for path, own in each for name, one in own.items()}


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("what", REPLACES)
def test_what_is_replaced_in_a_module_that_no_name_leads_to(what: str, meta: bool, monkeypatch: pytest.MonkeyPatch):
    """It kept a tensor without data, of which the next call said DataDependentOutputException: aten.equal.default."""
    make, words = REPLACES[what]
    hidden = make().to("meta" if meta else "cpu")
    before = held_in(hidden)
    monkeypatch.setattr(held_module, "net", hidden, raising=False)
    monkeypatch.setitem(sys.modules, HELD, held_module)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        y = sys.modules[HELD].net(fpipe.boundary(batch[0] @ params["w"]))
        return (y * 1.0 - batch[1]).square().mean()

    w, *batch = (torch.randn(rows, 4, device="meta" if meta else "cpu") for rows in (4, 6, 6))
    with pytest.raises(RuntimeError, match=rf"^loss_fn binds {words} anew, which it closes over; a stage and a loss a"):
        fpipe.from_loss(loss_fn, {"w": w}, tuple(batch))
    assert list(held_in(hidden)) == list(before)
    assert all(one is before[place] for place, one in held_in(hidden).items())


@pytest.mark.parametrize("trace", [True, False])
def test_a_net_that_is_put_into_eval_mode_is_refused_with_the_way_out(trace: bool):
    """Dropout stayed on, in silence."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    params, batch, loss_fn = dict(net.named_parameters()), rows(), of_net(net)
    model, own = fpipe.from_loss(loss_fn, params, batch)
    step = fpipe.build(fpipe.program(model), model, trace=trace)
    before = step(own, batch, key=0).loss
    net.eval()
    words = "module 'net.1' (Dropout) was in training when loss_fn was traced and is in eval now: the trace goes on as "
    with pytest.raises(ValueError, match=re.escape(words)):
        step(own, batch, key=0)
    with pytest.raises(ValueError, match=re.escape("Call from_loss again in this mode.")):
        fpipe.reference(model, own, batch, key=0)
    model, own = fpipe.from_loss(loss_fn, params, batch)
    assert torch.equal(fpipe.build(fpipe.program(model), model)(own, batch).loss, loss_fn(params, batch))
    net.train()
    assert torch.equal(step(own, batch, key=0).loss, before)


def test_a_net_that_has_no_modes_may_be_put_into_eval_mode():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model, own = fpipe.from_loss(of_net(net), dict(net.named_parameters()), rows())
    net.eval()
    assert fpipe.verify(fpipe.program(model), model, own, rows()).bitwise


def test_modules_made_meanwhile_are_nobodys_state():
    kept = dict[str, nn.Module]()

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        made = Watching("another")
        made(made(batch[0]))
        made.register_buffer("late", batch[0])
        made.itself = [made]
        kept["module"] = Watching("another")
        kept["module"](batch[0])
        return (fpipe.boundary(batch[0] @ params["w"]) * made.seen - batch[1]).square().mean()

    assert_own(loss_fn, square(), rows(), 3)


def test_a_function_of_torch_that_was_handed_the_loss_function_is_cut():
    """It was refused as a function of other things."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(fpipe.boundary(batch[0] @ params["a"]) @ params["b"], batch[1])

    params, batch = {"a": torch.randn(4, 4), "b": torch.randn(4, 2)}, (torch.randn(6, 4), torch.randn(6, 2))
    recomputed = functools.partial(torch.utils.checkpoint.checkpoint, loss_fn, use_reentrant=False)
    model, own = fpipe.from_loss(recomputed, params, batch)
    plain, _ = fpipe.from_loss(loss_fn, params, batch)
    assert len(model.stages) == 2
    one, other = (fpipe.reference(each, own, batch, microbatches=2) for each in (model, plain))
    assert torch.equal(one.loss, other.loss)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one.grads, other.grads, strict=True) for name in a)


@pytest.mark.parametrize("trace", [True, False])
def test_an_error_inside_of_a_block_closes_it(trace: bool):
    """Whatever ran after it ran in bfloat16, in silence."""

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            h = batch[0] @ params["a"]
        return F.mse_loss(fpipe.boundary(h.float() @ params["b"]), batch[1])

    params, batch = {"a": torch.randn(4, 4), "b": torch.randn(4, 2)}, (torch.randn(6, 4), torch.randn(6, 2))
    model, own = fpipe.from_loss(loss_fn, params, batch)
    step = fpipe.build(merged(model, 2), model, trace=trace)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        step(({**own[0], "a": torch.randn(5, 4)}, *own[1:]), batch)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


# The function itself, which `verify` compares with


def verified(model, params, batch, **more):
    return fpipe.verify(merged(model, 2), model, params, batch, **more)


def remade(scale, dropout=0.0):
    """A loss function with a number that it closes over."""

    def loss_fn(params, batch):
        inputs, target = batch
        hidden = fpipe.boundary(F.dropout(inputs @ params["w"], dropout))
        return F.mse_loss(F.dropout(hidden, dropout) @ params["w"] * scale[0], target)

    batch = rows()
    return *fpipe.from_loss(loss_fn, square(), batch), batch


def test_verify_compares_with_the_function_and_not_with_its_trace():
    """A program and the reference run one trace: that it is not the function any more, neither of them can see."""
    scale = [1.0]
    model, params, batch = remade(scale)
    assert verified(model, params, batch).bitwise
    scale[0] = 3.0
    with pytest.raises(
        fpipe.GradientMismatch, match=r"loss of microbatch 0 is .* by the stages and .* by loss_fn: it has"
    ):
        verified(model, params, batch)


def test_verify_draws_the_random_numbers_of_the_stages_in_the_function():
    model, params, batch = remade([1.0], dropout=0.5)
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
