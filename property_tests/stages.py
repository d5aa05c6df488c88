"""Draw random stages: more layers for the grammar of `stage_functions`, and more kinds of outputs."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from property_tests.stage_functions import AROUND, LAYERS, NN, RETURNS, DrawnStage, Layer, N, Params, Wrapped, row
from property_tests.strategies import Net, dags


def layer(**options: Any) -> Callable[[Any], None]:
    return lambda apply: row(apply.__name__, apply, **options)


row("matmul", lambda p, h: h @ p["w"], w=NN)
row("tied_turned", lambda p, h: F.linear(h, p["e"]), e=NN)


@layer(w=("3n", "n"))
def sliced_weight(p: Params, h: Tensor) -> Tensor:
    q, _, v = p["w"].chunk(3)
    return F.linear(h, q).sigmoid() * F.linear(h, v)


@layer(w=(2, "n"))
def unbound_weight(p: Params, h: Tensor) -> Tensor:
    scale, shift = p["w"].unbind()
    return h * scale + shift


row("layer_norm", lambda p, h: F.layer_norm(h, h.shape[-1:], p["w"], p["b"]), w=N, b=N)
row("layer_norm_alone", lambda p, h: F.layer_norm(h, h.shape[-1:]))
row("rms_norm", lambda p, h: F.rms_norm(h, h.shape[-1:], p["w"]), w=N)
row("group_norm", lambda p, h: F.group_norm(h.transpose(1, -1), 2, p["w"], p["b"]).transpose(1, -1), w=N, b=N)


@layer(w=("n", "n", 3), b=N)
def conv1d(p: Params, h: Tensor) -> Tensor:
    if h.ndim == 2:
        return F.conv1d(h.unsqueeze(-1), p["w"], p["b"], padding=1).squeeze(-1)
    return F.conv1d(h.transpose(1, 2), p["w"], p["b"], padding=1).transpose(1, 2)


@layer(w=("n", 1, 3))
def depthwise(p: Params, h: Tensor) -> Tensor:
    moved = h.unsqueeze(-1) if h.ndim == 2 else h.transpose(1, 2)
    return F.conv1d(moved, p["w"], padding=1, groups=len(p["w"])).transpose(1, -1).reshape(h.shape)


def heads(p: Params, h: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (h.reshape(h.shape[0], -1, h.shape[-1]) @ p["qkv"]).chunk(3, dim=-1)
    return tuple(part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v))


@layer(qkv=("n", "3n"), o=NN)
def attention_in_time(p: Params, h: Tensor) -> Tensor:
    q, k, v = heads(p, h)
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    attended = torch.softmax((q @ k.mT).masked_fill(later, -math.inf), dim=-1) @ v
    return attended.transpose(1, 2).reshape(h.shape) @ p["o"]


@layer(qkv=("n", "3n"), o=NN)
def sdpa(p: Params, h: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(*heads(p, h), is_causal=True)
    return F.linear(attended.transpose(1, 2).reshape(h.shape), p["o"])


@layer(qkv=("n", "3n"), o=NN)
def sdpa_masked(p: Params, h: Tensor) -> Tensor:
    q, k, v = heads(p, h)
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(h.shape) @ p["o"]


def elementwise(**functions: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
    for name, function in functions.items():
        LAYERS[name] = Layer(lambda p, h, function=function: function(h), {})
    return tuple(functions)


ACTIVATIONS = elementwise(
    relu=torch.relu,
    gelu=F.gelu,
    silu=F.silu,
    sigmoid=torch.sigmoid,
    softmax=lambda h: h.softmax(-1),
    log_softmax=lambda h: h.log_softmax(-1),
    softplus=F.softplus,
    leaky_relu=F.leaky_relu,
    elu=F.elu,
    hardtanh=F.hardtanh,
    relu6=F.relu6,
    mish=F.mish,
    celu=F.celu,
    selu=F.selu,
    softsign=F.softsign,
    softshrink=F.softshrink,
    hardshrink=F.hardshrink,
    tanhshrink=F.tanhshrink,
    hardswish=F.hardswish,
    hardsigmoid=F.hardsigmoid,
    gelu_tanh=lambda h: F.gelu(h, approximate="tanh"),
    threshold=lambda h: F.threshold(h, 0.1, 0.2),
    logsigmoid=F.logsigmoid,
    softmin=lambda h: F.softmin(h, -1),
)
elementwise(
    square=torch.square,
    cube=lambda h: h**3,
    divided=lambda h: h / (1 + h.abs()),
    itself=lambda h: h,
    view_as=lambda h: h.view_as(h),
    chunk_cat=lambda h: torch.cat([h.chunk(2, -1)[1].tanh(), h.chunk(2, -1)[0]], -1),
    swap_halves=lambda h: torch.cat(h.split(h.shape[-1] // 2, -1)[::-1], -1),
    half_read=lambda h: torch.cat([h.chunk(2, -1)[0]] * 2, -1),
    unbind_stack=lambda h: torch.stack([h.unbind(-1)[0], *h.unbind(-1)[:0:-1]], -1),
    glu=lambda h: F.glu(torch.cat([h, h], -1), -1),
    transposed=lambda h: torch.sin(h.transpose(0, -1)).transpose(0, -1),
    flattened=lambda h: h.reshape(-1).sin().view(h.shape),
    expanded=lambda h: h[..., :1].expand_as(h) * h,
    only_first=lambda h: h[..., :1].expand_as(h),
    sliced=lambda h: F.pad(h[..., 1:], (1, 0)),
    every_second=lambda h: h[..., ::2].repeat_interleave(2, -1),
    flipped=lambda h: h.flip(-1),
    flipped_rows=lambda h: h.flip(0).sin(),
    rolled=lambda h: h.roll(1, -1) + h,
    gathered=lambda h: h.gather(-1, h.argsort(-1)),
    scattered=lambda h: torch.zeros_like(h).scatter_add(-1, h.argsort(-1) // 2, h.exp()),
    selected=lambda h: h.index_select(-1, torch.arange(h.shape[-1]).flip(0) // 2),
    indexed=lambda h: h[..., torch.arange(h.shape[-1]) // 2],
    put=lambda h: torch.zeros_like(h).index_add(-1, torch.arange(h.shape[-1]) // 2, h),
    where=lambda h: torch.where(h > 0, h, h.exp() - 1),
    masked=lambda h: h.masked_fill(h.detach() > 0.5, 0.25),
    tril=torch.tril,
    cumsum=lambda h: h.cumsum(-1),
    cumsum_rows=lambda h: h.cumsum(0),
    logsumexp=lambda h: h - h.logsumexp(-1, keepdim=True),
    centred=lambda h: h - h.mean(-1, keepdim=True),
    of_all_rows=lambda h: h - h.mean(),
    standardised=lambda h: (h - h.mean(-1, True)) * (h.var(-1, keepdim=True) + 0.1).rsqrt(),
    var_mean=lambda h: h + torch.var_mean(h, -1, keepdim=True)[0],
    largest=lambda h: h + h.max(-1, keepdim=True)[0] + h.amin(-1, keepdim=True),
    sorted=lambda h: h.sort(-1)[0],
    topk=lambda h: torch.cat([h.topk(2, -1)[0], h[..., 2:]], -1),
    clamped=lambda h: h.clamp(-0.5, 0.5),
    normalised=lambda h: h / (1 + torch.linalg.vector_norm(h, dim=-1, keepdim=True)),
    of_its_own=lambda h: h * h,
    added_to_itself=lambda h: h + h,
    halves_detached=lambda h: h * h.detach().tanh(),
    to_double=lambda h: h.double().sin().to(h.dtype),
    to_bfloat16=lambda h: h.bfloat16().tanh().to(h.dtype),
    complex_turned=lambda h: torch.view_as_real(
        torch.view_as_complex(h.float().contiguous().unflatten(-1, (-1, 2))) * (0.6 + 0.8j)
    ).contiguous().reshape(h.shape).to(h.dtype),
    fft=lambda h: torch.fft.irfft(torch.fft.rfft(h.float()), n=h.shape[-1]).to(h.dtype),
    with_constant=lambda h: h * CONSTANT[: h.shape[-1]].to(h.dtype),
    with_number=lambda h: h * torch.tensor(1.5, dtype=h.dtype),
    no_grad_scale=lambda h: h / (1 + _largest(h)),
    contiguous=lambda h: h.contiguous().clone(),
    dropout_none=lambda h: F.dropout(h, 0.0),
)  # fmt: skip


CONSTANT = torch.arange(8.0).cos()


@torch.no_grad()
def _largest(h: Tensor) -> Tensor:
    return h.abs().amax()


row("bias", lambda p, h: h + p["b"], b=N)


# Where there is one row, the gradient of `b` is the cotangent itself.
row("row_bias", lambda p, h: h + p["b"], b=(1, "n"))
row("sine_of_sum", lambda p, h: torch.sin(h + p["b"]), b=(1, "n"))


# The gradients of `a` and `b` are one tensor.
row("two_biases", lambda p, h: h + (p["a"] + p["b"]), a=N, b=N)
row("numbers", lambda p, h: h * p["a"] + p["b"], a=(), b=())
row("sum_with_turned", lambda p, h: h + (p["w"] + p["w"].T)[0] * p["w"].sum(), w=NN)
row("by_the_largest", lambda p, h: h - p["w"].amax() * p["w"].amin(), w=NN)
row("frozen", lambda p, h: F.linear(h, p["w"].detach(), p["b"]), w=NN, b=N)


# A parameter of ints, which has no gradient.
row("permuted", lambda p, h: h[..., p["order"]], order=("order",))
row("embedded", lambda p, h: h + F.embedding(h.argmax(-1), p["table"]), table=(8, "n"))


# Depends on the input through whole numbers only.
row("looked_up", lambda p, h: p["table"][h.argmax(-1)], table=(8, "n"))
row("prelu", lambda p, h: F.prelu(h.reshape(-1, h.shape[-1]), p["w"]).reshape(h.shape), w=N)
row("einsum", lambda p, h: torch.einsum("...i,ikj->...kj", h, p["w"]).sum(-2), w=("n", 2, "n"))
row(
    "addmm",
    lambda p, h: torch.addmm(p["b"], h.reshape(-1, h.shape[-1]), p["w"], beta=0.5, alpha=2.0).view(h.shape),
    w=NN,
    b=N,
)
row("weight_norm", lambda p, h: h @ (p["w"] / torch.linalg.vector_norm(p["w"], dim=0)), w=("n", "n"))


@layer(w=("n", "n"))
def cat_with_weight(p: Params, h: Tensor) -> Tensor:
    flat = h.reshape(-1, h.shape[-1])
    return torch.cat([flat, p["w"]])[: len(flat)].view(h.shape) * 1.5


class Scaled(torch.autograd.Function):
    """A product whose gradients differ from autograd's."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(h, w)
        ids = h.argmax(-1)
        ctx.mark_non_differentiable(ids)
        return h * w, ids

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> Any:
        h, w = ctx.saved_tensors
        return dy * w * 0.5, (dy * h).reshape(-1, h.shape[-1]).sum(0)


row("own_function", lambda p, h: Scaled.apply(h, p["w"])[0], w=N)


class Doubled(torch.autograd.Function):
    """Doubles its input, saves its output, and passes the cotangent on unchanged."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        output = h * 2
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


row("straight_through", lambda p, h: Doubled.apply(h))


@layer()
def hooked(p: Params, h: Tensor) -> Tensor:
    scaled = h * 1.25
    if scaled.requires_grad:
        scaled.register_hook(lambda dy: dy * 0.5)
    return scaled


# In place, on a tensor that the layer itself makes.


row("relu_", lambda p, h: (h + p["b"]).relu_(), in_place=True, b=N)
for function in (F.silu, F.leaky_relu, F.elu, F.celu, F.selu, F.mish, F.hardswish, F.hardtanh):
    row(f"{function.__name__}_", lambda p, h, function=function: function(h * 1.5, inplace=True), in_place=True)
row("threshold_", lambda p, h: F.threshold(h * 1.5, 0.1, 0.2, inplace=True), in_place=True)


@layer(in_place=True, w=NN)
def add_(p: Params, h: Tensor) -> Tensor:
    output = h @ p["w"]
    output += h
    output.add_(1).mul_(0.5)
    return output


@layer(in_place=True)
def masked_fill_(p: Params, h: Tensor) -> Tensor:
    output = h * 2
    return output.masked_fill_(output.detach() > 1, 0.5)


@layer(in_place=True)
def first_column_(p: Params, h: Tensor) -> Tensor:
    output = h.clone()
    output[..., 0] = 0
    output[..., 1] *= 2
    return output


@layer(in_place=True)
def through_view_(p: Params, h: Tensor) -> Tensor:
    output = h + 1
    output[0].mul_(3)
    output[..., ::2].tanh_()
    return output


@layer(in_place=True)
def index_put_(p: Params, h: Tensor) -> Tensor:
    output = torch.zeros_like(h)
    output[..., torch.tensor([0, 2, 2])] = h[..., :3]
    return output + h


# Outputs of a stage, from its parameters, the first leaf of its input, and the tensor h of its layers.


def _first_float(p: Params, h: Tensor) -> Tensor:
    return next((leaf for leaf in p.values() if leaf.is_floating_point()), h)


RETURNS |= {
    "tuple": lambda p, x, h: (h, None, h.argmax(-1), 3, "name"),
    "mask": lambda p, x, h: [h, h > 0],
    "view": lambda p, x, h: (h, h[..., 1:]),
    "view_first": lambda p, x, h: (h.view_as(h), h),
    "expanded": lambda p, x, h: (h, h[..., :1].expand_as(h)),
    "turned": lambda p, x, h: h.transpose(0, -1).contiguous().transpose(0, -1),
    "twice": lambda p, x, h: (h, h),
    "number": lambda p, x, h: (h, h.mean()),
    "detached": lambda p, x, h: (h, h.detach()),
    "parts": lambda p, x, h: (h, *h.chunk(2, -1)),
    "part_unread": lambda p, x, h: (h, h.unbind(-1)[1]),
    "input": lambda p, x, h: (h, x),
    "input_view": lambda p, x, h: (h, x[..., ::2]),
    "input_alone": lambda p, x, h: x,
    "param": lambda p, x, h: (h, _first_float(p, h)),
    # Rows stay in dim 0.
    "param_view": lambda p, x, h: (h, _first_float(p, h[0]).expand(2, *_first_float(p, h[0]).shape)),
    "of_params": lambda p, x, h: (h, _first_float(p, h).sin()),
    "params_alone": lambda p, x, h: torch.tanh(_first_float(p, h).sum()).expand(h.shape),
    "all_params": lambda p, x, h: {"h": h, **{f"p{k}": leaf for k, leaf in enumerate(p.values())}},
}


def works_in_place(stage: DrawnStage) -> bool:
    return any(LAYERS[name].in_place for name in stage.layer_names & LAYERS.keys())


def has_unread_work(stage: DrawnStage) -> bool:
    """Whether autograd runs unread layers, or recomputes values that its backward does not need."""
    return "checkpoint" in stage.layer_names or stage.returns in ("params_alone", "input_alone")


INPUT_KINDS = ("plain", "strided", "transposed", "misaligned", "expanded", "pair", "two", "one twice", "dict")


# Under autocast layers pass bfloat16 on, which not all of them accept with float32 parameters.
CASTABLE = ("linear", "matmul", "twice", "tied", "sdpa", "attention", "conv1d", "tanh", "gelu", "relu", "softmax")


def layers(castable: bool = False) -> st.SearchStrategy[tuple[Any, ...]]:
    names = st.sampled_from(CASTABLE if castable else list(LAYERS))
    if castable:
        return st.lists(names, min_size=1, max_size=3).map(tuple)
    wrappers = st.sampled_from([wrapper for wrapper in AROUND if wrapper != "autocast"])
    wrapped = st.builds(Wrapped, wrappers, st.lists(names, min_size=1, max_size=3).map(tuple))
    cast = st.builds(Wrapped, st.just("autocast"), layers(castable=True))
    return st.lists(st.one_of(names, names, names, wrapped, cast), max_size=5).map(tuple)


WIDTHS, TIMES = st.sampled_from([4, 6, 8]), st.sampled_from([0, 0, 3, 5])
DTYPES = ("float32", "float64", "bfloat16")
LAYOUTS = ("plain", "strided", "transposed", "misaligned", "one memory")
ANY_DTYPE = st.sampled_from(["float32", *DTYPES])


def recipes(
    widths: st.SearchStrategy[int] = WIDTHS,
    times: st.SearchStrategy[int] = TIMES,
    dtypes: st.SearchStrategy[str] = ANY_DTYPE,
) -> st.SearchStrategy[DrawnStage]:
    """Draw stages; they shrink to no layers at all, in float32, on plain inputs."""
    takes, returns = st.sampled_from(["first", "all"]), st.sampled_from(list(RETURNS))
    layouts = st.sampled_from(["plain", *LAYOUTS])
    return st.builds(DrawnStage, layers(), widths, times, dtypes, takes, returns, st.sampled_from(INPUT_KINDS), layouts)


@st.composite
def stacks(draw: st.DrawFn, max_stages: int = 4) -> Net:
    takes = draw(dags(st.integers(1, max_stages)))
    width, time = draw(WIDTHS), draw(st.sampled_from([0, 0, 3]))
    recipe = recipes(st.just(width), st.just(time), ANY_DTYPE if draw(st.booleans()) else st.just(draw(ANY_DTYPE)))
    stages = tuple(draw(st.lists(recipe, min_size=len(takes), max_size=len(takes))))
    dtypes = {stage.dtype for stage in stages if "e" in stage.shapes}
    return Net(
        stages, takes, draw(st.sampled_from(["mean", "sum", "count"])), tie=len(dtypes) == 1 and draw(st.booleans())
    )
