"""Kernels and patterns of large-model code: how to make a block with each, and how two front doors run it."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fpipe
from tests.toys import Toy

WIDTH, LENGTH, HEADS = 8, 16, 2
DOORS = ("from_sequential", "from_module")
KERNELS: dict[str, Callable[[], nn.Module]] = {}
"""Blocks of width 8 by their row of docs/kernels.md."""


def kernel(name: str, *layers: nn.Module | Tensor) -> Callable[[Any], Any]:
    """Register a forward `f(module, x)` as a block that has two linear layers, `a` and `b`."""

    def register(forward: Any) -> Any:
        KERNELS[name] = lambda: Toy(forward, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))
        return forward

    return register


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(module: Any, x: Tensor, **options: Any) -> Tensor:
    query, key, value = map(split_heads, (module.a(x), module.b(x), x))
    return F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(2)


@kernel("scaled_dot_product_attention, causal")
def causal_attention(module: Any, x: Tensor) -> Tensor:
    return attend(module, x, is_causal=True)


@kernel("scaled_dot_product_attention, float mask")
def masked_attention(module: Any, x: Tensor) -> Tensor:
    return attend(module, x, attn_mask=torch.arange(LENGTH * 1.0).expand(LENGTH, LENGTH))


@kernel("scaled_dot_product_attention inside sdpa_kernel")
def math_attention(module: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attend(module, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.factor * grads[0], None


@kernel("autograd.Function: gradient reversal")
def reversal(module: Any, x: Tensor) -> Tensor:
    return module.b(Reversed.apply(module.a(x), 0.5))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 127
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


@kernel("autograd.Function: straight-through rounding of weights (QAT)")
def fake_quantized(module: Any, x: Tensor) -> Tensor:
    return F.linear(Rounded.apply(x), Rounded.apply(module.a.weight), module.a.bias)


class WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.ones(())


@kernel("autograd.Function: a loss added in the backward (mixture of experts)")
def with_router_loss(module: Any, x: Tensor) -> Tensor:
    return WithLoss.apply(x, module.a(x).logsumexp(-1).square().mean())


@kernel("torch.vmap")
def mapped(module: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: module.a(row).sin())(x)


@kernel("torch.func.grad")
def differentiated(module: Any, x: Tensor) -> Tensor:
    return module.a(torch.func.grad(lambda y: (y**3).sum())(x))


@kernel("torch.func.jvp")
def forward_differentiated(module: Any, x: Tensor) -> Tensor:
    return module.a(torch.func.jvp(torch.sin, (x,), (x,))[1])


@kernel("torch.autograd.grad, create_graph")
def gradient_penalty(module: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad((module.a(leaf) ** 3).sum(), leaf, create_graph=True)[0]


@kernel("torch.utils.checkpoint, non-reentrant")
def checkpointed(module: Any, x: Tensor) -> Any:
    return checkpoint(lambda y: module.b(module.a(y).sin()), x, use_reentrant=False)


@kernel("save_on_cpu")
def saved_on_cpu(module: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module.a(x).sin()


@torch.library.custom_op("fpipe_kernels::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x**3


cubed.register_fake(torch.empty_like)
cubed.register_autograd(
    lambda context, grad: grad * 3 * context.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@kernel("custom_op with register_autograd")
def with_custom_op(module: Any, x: Tensor) -> Tensor:
    return module.b(cubed(module.a(x)))


def outcome(make: Callable[[], nn.Module], door: str) -> str:
    """Return in words how a net around a block runs, cut into three stages: its bits, and what warns or is refused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(make()), nn.Linear(WIDTH, WIDTH))
    batch = torch.randn(4, LENGTH, WIDTH), torch.randn(4, LENGTH, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, target in zip(*(part.chunk(2) for part in batch), strict=True):
            (F.mse_loss(net(x), target) / 2).backward()
        expected_grads = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
        try:
            if door == "from_module":
                model, params, _ = fpipe.from_module(net, cuts=["0", "1"], loss=F.mse_loss, example=batch)
            else:
                model, params, _ = fpipe.from_sequential(net, 3, loss=F.mse_loss)
            program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(3), fpipe.merge())(fpipe.program(model))
            step = fpipe.build(program, model)
            results = step(params, batch), step(params, batch)
        except (RuntimeError, ValueError) as error:
            return f"refused: {error}"
    bits = {compare_bits(expected_grads, fpipe.join_params(model, result.grads)) for result in results}
    warned = [describe_warning(str(warning.message)) for warning in caught if warning.category is UserWarning]
    return "; ".join([" and ".join(sorted(bits)), *dict.fromkeys(warned)])


def compare_bits(expected_grads: dict[str, Tensor], grads: dict[str, Tensor | None]) -> str:
    actual_grads = {name: grad for name, grad in grads.items() if grad is not None}
    is_bitwise = actual_grads.keys() == expected_grads.keys() and all(
        torch.equal(actual_grads[name].to_dense(), grad.to_dense()) for name, grad in expected_grads.items()
    )
    return "bitwise" if is_bitwise else "other bits"


def describe_warning(message: str) -> str:
    for pattern, replacement in _DESCRIPTIONS.items():
        if (match := re.match(pattern, message)) is not None:
            return match.expand(replacement)
    return f"warns: {message}"


_DESCRIPTIONS = {
    r"The Python of '1.0' (.*), so it is one operation of its stage": r"one operation, since its Python \1",
    r"a stage runs under autograd.*: stage 1 \(1\): (.*)": r"under autograd: \1",
    r"this step runs every stage under autograd.*: (.*)": r"whole step under autograd: \1",
}
