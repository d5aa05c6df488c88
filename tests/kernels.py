"""Kernels and patterns of large-model code: how to make a block with each, and how two front doors run it."""

import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import fpipe
from tests.toys import Toy

WIDTH, LENGTH, HEADS = 8, 16, 2
DOORS = ("from_sequential", "from_module")
KERNELS: dict[str, Callable[[], nn.Module]] = {}
"""Blocks of width 8 by their row of docs/kernels.md."""


def kernel(name: str, **modules: Callable[[], nn.Module | Tensor]) -> Callable[[Any], Any]:
    """Register a forward `f(module, x)` as a block that has two linear layers, `a` and `b`, and these modules."""

    def register(forward: Any) -> Any:
        makers = {"a": linear, "b": linear, **modules}
        KERNELS[name] = lambda: Toy(forward, **{key: make() for key, make in makers.items()})
        return forward

    return register


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


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


@kernel("autograd.Function: straight-through (QAT)")
def fake_quantized(module: Any, x: Tensor) -> Tensor:
    return F.linear(Rounded.apply(x), Rounded.apply(module.a.weight), module.a.bias)


class WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.ones(())


@kernel("autograd.Function: loss added in the backward")
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


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def flex(module: Any, x: Tensor, score: Any = None, mask: Any = None) -> Tensor:
    query, key, value = map(split_heads, (module.a(x), module.b(x), x))
    y = flex_attention.flex_attention(query, key, value, score_mod=score, block_mask=mask)
    assert isinstance(y, Tensor)
    return y.transpose(1, 2).flatten(2)


def make_block_mask() -> Any:
    return flex_attention.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")


@kernel("FlexAttention, score_mod")
def flex_score(module: Any, x: Tensor) -> Tensor:
    return flex(module, x, lambda score, batch, head, query, key: score + 0.1 * (query - key))


CAUSAL_BLOCKS = make_block_mask()


@kernel("FlexAttention, BlockMask of a closure")
def flex_mask(module: Any, x: Tensor) -> Tensor:
    return flex(module, x, mask=CAUSAL_BLOCKS)


@kernel("FlexAttention, BlockMask made in forward")
def flex_new_mask(module: Any, x: Tensor) -> Tensor:
    return flex(module, x, mask=make_block_mask())


@kernel(
    "FlexAttention, captured parameter",
    bias=lambda: nn.Parameter(torch.randn(HEADS, LENGTH)),
    slopes=lambda: torch.randn(HEADS),
)
def flex_parameter(module: Any, x: Tensor) -> Tensor:
    def modify_score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + module.bias[head, query] + module.slopes[head] * (query - key)

    return flex(module, x, modify_score, CAUSAL_BLOCKS)


@kernel("torch.cond")
def branched(module: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: module.a(y).sin(), lambda y: module.b(y).cos(), (x,))


@kernel("while_loop")
def looped(module: Any, x: Tensor) -> Any:
    start = torch.tensor(0), x.detach()
    return module.a(x) + while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), start)[1]


@kernel("scan, captured parameter")
def scanned(module: Any, x: Tensor) -> Any:
    def combine(carry: tuple[Tensor, Tensor], row: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        state, mean = module.b(carry[0]) + row, carry[1] * 0.5 + row
        return (state, mean), state + mean

    rows = module.a(x).transpose(0, 1)
    start = torch.zeros_like(rows[0])
    return scan(combine, (start, start.clone()), rows)[1].transpose(0, 1)


@kernel("associative_scan")
def scanned_in_parallel(module: Any, x: Tensor) -> Any:
    return associative_scan(lambda x0, x1: x0 * 0.5 + x1, module.a(x), 1, combine_mode="generic")


@torch.library.custom_op("fpipe_kernels::triple", mutates_args={"tripled"})
def triple(x: Tensor, tripled: Tensor) -> None:
    tripled.copy_(x * 3)


@kernel("custom_op that mutates an argument")
def with_mutating_op(module: Any, x: Tensor) -> Tensor:
    h = module.a(x)
    tripled = torch.empty_like(h)
    triple(h.detach(), tripled)
    return h + tripled


@torch.library.triton_op("fpipe_kernels::sine", mutates_args={})
def sine(x: Tensor) -> Tensor:
    return x.sin() * 2


sine.register_autograd(
    lambda context, grad: grad * 2 * context.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@kernel("triton_op")
def with_triton_op(module: Any, x: Tensor) -> Tensor:
    return module.b(sine(module.a(x)))


@kernel("a block wrapped in torch.compile", block=lambda: torch.compile(linear(), backend="eager"))
def with_compiled_block(module: Any, x: Tensor) -> Tensor:
    return module.block(module.a(x)).sin()


def compile_linear() -> nn.Module:
    module = linear()
    module.compile(backend="eager")
    return module


@kernel("a block after block.compile()", block=compile_linear)
def with_compiled_call(module: Any, x: Tensor) -> Tensor:
    return module.block(module.a(x)).sin()


compiled_gelu = torch.compile(lambda x: F.gelu(x) * 2, backend="eager")


@kernel("a function of torch.compile")
def with_compiled_function(module: Any, x: Tensor) -> Tensor:
    return compiled_gelu(module.a(x))


class Scaled(Tensor):
    """Tensor subclass with narrow numbers and a scale, as in torchao."""

    numbers: Tensor
    scale: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage]

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> "Scaled":
        options: Any = {"strides": numbers.stride(), "dtype": scale.dtype, "device": numbers.device}
        return Tensor._make_wrapper_subclass(cls, numbers.shape, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], *_: Any) -> "Scaled":
        return cls(tensors["numbers"], tensors["scale"])

    def dequantize_scaled(self) -> Tensor:
        return self.numbers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.t.default):
            return cls(func(args[0].numbers), args[0].scale)
        plain = [x.dequantize_scaled() if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))


def to_float8(x: Tensor) -> Scaled:
    scale = x.abs().amax() / 448
    return Scaled((x / scale).to(torch.float8_e4m3fn), scale)


class ScaledByFunction(Scaled):
    """A weight that multiplies in its `__torch_function__`, like the int8 weights of torchao."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return func(args[0], args[1].dequantize_scaled(), *args[2:], **(kwargs or {}))
            return func(*args, **(kwargs or {}))


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return to_float8(x) @ to_float8(weight).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = to_float8(grads[0])
        return grad @ to_float8(weight), grad.t() @ to_float8(x)


@kernel("float8, emulated")
def with_float8(module: Any, x: Tensor) -> Tensor:
    return Float8Product.apply(x.flatten(0, 1), module.a.weight).view_as(x)


def quantized(wrapper: type[Scaled]) -> nn.Module:
    module = linear()
    scale = module.weight.detach().abs().amax() / 127
    numbers = (module.weight.detach() / scale).round().to(torch.int8)
    module.weight = nn.Parameter(wrapper(numbers, scale), requires_grad=False)
    return module


@kernel("int8 weight with __torch_dispatch__", base=lambda: quantized(Scaled))
@kernel("int8 weight with __torch_function__", base=lambda: quantized(ScaledByFunction))
def with_quantized(module: Any, x: Tensor) -> Tensor:
    return module.a(x) + module.base(x)


@kernel("frozen int8 weight and LoRA", numbers=lambda: torch.randint(-9, 9, (WIDTH, WIDTH)).char())
def with_lora(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.numbers.float() * 0.1) + module.b(module.a(x))


@kernel("sparse embedding gradients", embedding=lambda: nn.Embedding(5, WIDTH, sparse=True))
def with_sparse_gradient(module: Any, x: Tensor) -> Tensor:
    return module.embedding(x.detach().abs().long().clamp(max=4)).mean(2) + module.a(x)


@kernel("grouped_mm")
def with_grouped_mm(module: Any, x: Tensor) -> Tensor:
    weights = torch.stack([module.a.weight, module.b.weight]).bfloat16()
    ends = torch.tensor([8, 32], dtype=torch.int32)
    return F.grouped_mm(x.flatten(0, 1).bfloat16(), weights, offs=ends).float().view_as(x)


@kernel("saved_tensors_hooks")
def with_saved_tensors_hooks(module: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return module.a(x).sin()


@kernel("causal_lower_right")
def with_lower_right(module: Any, x: Tensor) -> Tensor:
    return attend(module, x, attn_mask=causal_lower_right(LENGTH, LENGTH))


@kernel("jagged nested tensors")
def with_jagged(module: Any, x: Tensor) -> Tensor:
    rows = module.a(x).flatten(0, 1)
    return torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 8, 32])).sin().values().view_as(x)


def outcome(make: Callable[[], nn.Module], door: str) -> str:
    """Return in words how a net around a block runs, cut into three stages: its bits, and what warns or is refused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(make()), nn.Linear(WIDTH, WIDTH))
    batch = torch.randn(4, LENGTH, WIDTH), torch.randn(4, LENGTH, WIDTH)
    # torch refuses the backward of FlexAttention on the CPU, though its kernel there computes it.
    unchecked = patch.object(flex_attention, "_validate_device", new=lambda *_: None)
    with unchecked, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, target in zip(*(part.chunk(2) for part in batch), strict=True):
            (F.mse_loss(net(x), target) / 2).backward()
        expected_grads = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
        try:
            if door == "from_module":
                model, params, _ = fpipe.from_module(net, cuts=["0", "1"], loss=F.mse_loss, batch=batch)
            else:
                model, params, _ = fpipe.from_sequential(net, 3, loss=F.mse_loss)
            program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(3), fpipe.merge())(fpipe.program(model))
            step = fpipe.build(program, model)
            results = step(params, batch), step(params, batch)
        except (RuntimeError, ValueError) as error:
            return f"refused: {error}"
    bits = {compare_bits(expected_grads, fpipe.join_params(model, result.grads)) for result in results}
    warned = [describe_warning(str(x.message)) for x in caught if x.category is UserWarning and not is_of_torch(x)]
    return "; ".join([" and ".join(sorted(bits)), *dict.fromkeys(warned)])


def compare_bits(expected_grads: dict[str, Tensor], grads: dict[str, Tensor | None]) -> str:
    actual_grads = {name: grad for name, grad in grads.items() if grad is not None}
    is_bitwise = actual_grads.keys() == expected_grads.keys() and all(
        torch.equal(actual_grads[name].to_dense(), grad.to_dense()) for name, grad in expected_grads.items()
    )
    return "bitwise" if is_bitwise else "other bits"


def is_of_torch(warning: warnings.WarningMessage) -> bool:
    return "site-packages" in warning.filename


def describe_warning(message: str) -> str:
    for pattern, replacement in _DESCRIPTIONS.items():
        if (match := re.match(pattern, message)) is not None:
            return match.expand(replacement)
    return f"warns: {message}"


_DESCRIPTIONS = {
    r"The Python of '1.0' .*, so it is one operation of its stage": "one operation",
    r".* runs as it is written.*": "runs as it is written: say compile=True",
    r"a stage runs under autograd.*: stage 1 \(1\): (.*)": r"under autograd: \1",
    r"this step runs every stage under autograd.*: (.*)": r"whole step under autograd: \1",
}
