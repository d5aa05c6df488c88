"""Kinds of layers and patterns that are traced, as data: how to make each, and the expected outcome.

Each entry of `CASES` makes a stage function with its parameters and an input that has its rows in dim 0.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.toys import Toy


class StageExample(NamedTuple):
    """A stage `function(params, x)` with its arguments, and the module that it calls, if any."""

    function: Callable[[Any, Any], Any]
    params: Any
    x: Any
    module: nn.Module | None = None


@dataclass(frozen=True)
class Case:
    """One kind of layer or pattern and its expected outcome: by default bitwise equal to plain autograd.

    Attributes:
        make: makes the same example each time.
        rounding: why its bits are not those of plain autograd.
        joint_op: the op that computes outputs of I and of W at once, so that W has nothing left to compute.
        extra_memory: the tensors it keeps that plain autograd does not, and why.
        untraced: why `linearize` refuses it. A step runs it under autograd and warns.
        refused: the sentence with which a step refuses it as well.
        step: whether a step of two stages tries it, and not only `linearize`: if no other case is traced and run alike.
    """

    name: str
    make: Callable[[], StageExample]
    rounding: str = ""
    joint_op: str = ""
    extra_memory: str = ""
    untraced: str = ""
    refused: str = ""
    step: bool = True

    @property
    def verdict(self) -> str:
        """The outcome in the words of docs/linearize.md."""
        if self.refused:
            return f"refused: {self.refused}"
        if self.untraced:
            return f"under autograd, with a warning: {self.untraced}"
        parts = [f"to rounding: {self.rounding}" if self.rounding else "bitwise"]
        parts += [f"in one piece: gradients are results of one `{self.joint_op}`"] if self.joint_op else []
        return "; ".join([*parts, *([self.extra_memory] if self.extra_memory else [])])


CASES: list[Case] = []


def layer(name: str, make: Callable[[], nn.Module], x: Callable[[], Any], **options: Any) -> None:
    """Add the case of a module."""

    def make_example() -> StageExample:
        torch.manual_seed(0)
        module = make()
        params = {key: leaf.detach() for key, leaf in module.named_parameters() if leaf.requires_grad}

        def function(params: Any, x: Any) -> Any:
            return torch.func.functional_call(module, params, x if isinstance(x, tuple) else (x,))

        return StageExample(function, params, x(), module)

    CASES.append(Case(name, make_example, **options))


def pattern(name: str, params: Any = None, x: Any = None, **options: Any) -> Any:
    """Add the case of a stage function, by default with one square matrix and four rows."""

    def add(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def make_example() -> StageExample:
            torch.manual_seed(0)
            return StageExample(function, (params or weights((8, 8)))(), (x or rows(4, 8))())

        CASES.append(Case(name, make_example, **options))
        return function

    return add


def rows(*shape: int, **options: Any) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, **options)


def ids(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


def weights(*shapes: Sequence[int], **options: Any) -> Callable[[], dict[str, Tensor]]:
    """Return a function that makes parameters named w0, w1, .. of these shapes."""
    return lambda: {f"w{k}": 0.3 * torch.randn(*shape, **options) for k, shape in enumerate(shapes)}


# Layers. What stands before and after an activation makes its input and its output something that autograd keeps.

RNN = "mkldnn_rnn_layer_backward"
CELL = "keeps more than autograd: the cell works in place, which a trace does not"


def conv(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(4, 4, 3), *modules)


def eval_with_statistics(module: nn.Module) -> nn.Module:
    """Put a norm in eval with random running statistics."""
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + ("var" in name))
    return module.eval()


def half_frozen(module: nn.Linear) -> nn.Module:
    module.bias.requires_grad_(False)
    return module


def hooked_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)


def attention(**options: Any) -> nn.Module:
    return Toy(lambda net, x: net.inner(x, x, x), inner=nn.MultiheadAttention(8, 2, batch_first=True, **options))


def two_layer_net(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Toy(function, first=nn.Linear(8, 8), second=nn.Linear(8, 8), norm=nn.LayerNorm(8))


def between_linears(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 3))


def distances(first: Tensor, second: Tensor) -> Tensor:
    return F.pairwise_distance(first, second) + torch.cdist(first, second).sum(1)


image, signal, table, sequence = rows(4, 4, 5, 5), rows(4, 4, 9), rows(4, 8), rows(4, 3, 8)

layer("Linear", lambda: nn.Linear(8, 6), table)
layer("Linear without bias", lambda: nn.Linear(8, 6, bias=False), table, step=False)
layer("Linear on a sequence", lambda: nn.Linear(8, 6), sequence, step=False)
layer("Bilinear", lambda: nn.Bilinear(8, 5, 6), lambda: (torch.randn(4, 8), torch.randn(4, 5)), step=False)
layer("Conv1d", lambda: nn.Conv1d(4, 6, 3, padding=1), signal, step=False)
layer("Conv2d", lambda: nn.Conv2d(4, 6, 3, stride=2), image, step=False)
layer("Conv2d, channels last", lambda: nn.Conv2d(4, 6, 3), lambda: image().to(memory_format=torch.channels_last))
layer("Conv2d, padding_mode reflect", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), image, step=False)
layer("Conv2d, padding same, dilated", lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), image, step=False)
layer("Conv2d, grouped", lambda: nn.Conv2d(4, 6, 3, groups=2), image, step=False)
layer("Conv2d, depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4), image, step=False)
layer("Conv3d", lambda: nn.Conv3d(4, 6, 3), rows(4, 4, 4, 4, 4), step=False)
layer("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), signal, step=False)
layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), image, step=False)
layer("MaxPool1d", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.MaxPool1d(2)), signal, step=False)
layer("MaxPool2d", conv(nn.MaxPool2d(2)), image, step=False)
layer("MaxPool3d", lambda: nn.Sequential(nn.Conv3d(4, 4, 1), nn.MaxPool3d(2)), rows(4, 4, 4, 4, 4), step=False)
layer("AvgPool1d", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.AvgPool1d(2)), signal, step=False)
layer("AvgPool2d", conv(nn.AvgPool2d(2)), image, step=False)
layer("AvgPool3d", lambda: nn.Sequential(nn.Conv3d(4, 4, 1), nn.AvgPool3d(2)), rows(4, 4, 4, 4, 4), step=False)
layer("AdaptiveAvgPool2d", conv(nn.AdaptiveAvgPool2d(2)), image, step=False)
layer("AdaptiveAvgPool2d to one", conv(nn.AdaptiveAvgPool2d(1)), image, step=False)
layer("AdaptiveMaxPool2d", conv(nn.AdaptiveMaxPool2d(2)), image, step=False)
layer("LPPool1d", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.LPPool1d(2, 2)), signal, step=False)
layer("LPPool2d", conv(nn.LPPool2d(2, 2)), image, step=False)
layer("Upsample, nearest", conv(nn.Upsample(scale_factor=2)), image, step=False)
layer("Upsample, bilinear", conv(nn.Upsample(scale_factor=2, mode="bilinear")), image, step=False)
layer("Upsample, bicubic", conv(nn.Upsample(scale_factor=2, mode="bicubic")), image, step=False)
layer("PixelShuffle", conv(nn.PixelShuffle(2)), image, step=False)
layer("PixelUnshuffle", lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.PixelUnshuffle(2)), image, step=False)
layer("ChannelShuffle", conv(nn.ChannelShuffle(2)), image, step=False)
layer("Unfold and Fold", lambda: nn.Sequential(nn.Unfold(2), nn.Linear(16, 9), nn.Fold(4, 2)), image)
layer(
    "Flatten and Unflatten",
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Unflatten(1, (3, 4))),
    signal,
    step=False,
)
layer("ZeroPad2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.ZeroPad2d(1), nn.Conv2d(4, 4, 2)), image, step=False)
layer(
    "ReflectionPad1d, ReplicationPad1d, CircularPad1d",
    lambda: nn.Sequential(nn.Conv1d(4, 4, 2), nn.ReflectionPad1d(1), nn.ReplicationPad1d(1), nn.CircularPad1d(1)),
    signal,
    step=False,
)
layer("BatchNorm1d without running statistics", lambda: nn.BatchNorm1d(8, track_running_stats=False), table, step=False)
layer("BatchNorm2d without running statistics", lambda: nn.BatchNorm2d(4, track_running_stats=False), image, step=False)
layer("BatchNorm1d in eval", lambda: eval_with_statistics(nn.BatchNorm1d(8)), table, step=False)
layer("BatchNorm2d in eval", lambda: eval_with_statistics(nn.BatchNorm2d(4)), image)
layer("GroupNorm", lambda: nn.GroupNorm(2, 4), image)
# Asked for the parameters' gradients alone, torch 2.13 writes the input's too, where there is no memory for it.
layer(
    "GroupNorm, channels last",
    lambda: nn.GroupNorm(2, 4),
    lambda: image().to(memory_format=torch.channels_last),
    joint_op="native_group_norm_backward",
)
layer("InstanceNorm1d", lambda: nn.InstanceNorm1d(4, affine=True), signal, step=False)
layer("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), image, step=False)
layer("LayerNorm", lambda: nn.LayerNorm(8), table, step=False)
layer("LayerNorm without bias", lambda: nn.LayerNorm(8, bias=False), table, step=False)
layer("RMSNorm", lambda: nn.RMSNorm(8), table, step=False)
layer("LocalResponseNorm", conv(nn.LocalResponseNorm(2)), image, step=False)
layer(
    "a shared LayerNorm",
    partial(two_layer_net, lambda net, x: net.norm(net.second(net.norm(net.first(net.norm(x)))))),
    table,
)
for name, activation in {
    "RReLU in eval": nn.RReLU().eval(),
    "Dropout in eval": nn.Dropout(0.5).eval(),
    "AlphaDropout in eval": nn.AlphaDropout(0.5).eval(),
}.items():
    layer(name, partial(between_linears, activation), table, step=False)
layer("PReLU", lambda: nn.PReLU(4), signal, step=False)
layer("Softmax2d", conv(nn.Softmax2d()), image, step=False)

# On transposed data, torch's meta kernels report other strides for these ops, or for their gradients, than the real
# kernels write.
TRANSPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "Hardtanh": F.hardtanh,
    "Softplus": F.softplus,
    "Hardswish": F.hardswish,
    "Hardsigmoid": F.hardsigmoid,
    "ELU": F.elu,
    "CELU": F.celu,
    "LogSigmoid": F.logsigmoid,
    "LogSoftmax": partial(F.log_softmax, dim=1),
    "logit": partial(torch.logit, eps=1e-3),
    "BatchNorm1d in eval": lambda h: F.batch_norm(h, torch.zeros(4), torch.ones(4)),
}


def transposed(act: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def transpose_before(p: Any, x: Tensor) -> Tensor:
        return F.conv1d(act(torch.tanh(x @ p["w0"]).transpose(1, 2)), p["w1"], padding=1)

    def transpose_after(p: Any, x: Tensor) -> Tensor:
        return F.conv1d(act(torch.tanh(x @ p["w0"])).transpose(1, 2), p["w1"], padding=1)

    return lambda p, x: (
        transpose_before(p, x),
        transpose_after(p, x) if act is not TRANSPOSED["BatchNorm1d in eval"] else None,
    )


for name, act in TRANSPOSED.items():
    step = name in ("LogSoftmax", "BatchNorm1d in eval")
    pattern(f"{name}, transposed between two layers", weights((5, 4), (5, 4, 3)), rows(4, 4, 5), step=step)(
        transposed(act)
    )

layer("RNN", lambda: nn.RNN(8, 6, batch_first=True), sequence, step=False)
layer(
    "RNN, relu, both ways", lambda: nn.RNN(8, 6, 1, "relu", batch_first=True, bidirectional=True), sequence, step=False
)
layer("GRU", lambda: nn.GRU(8, 6, batch_first=True), sequence, extra_memory=CELL, step=False)
layer("LSTM", lambda: nn.LSTM(8, 6, batch_first=True), sequence, joint_op=RNN)
layer("LSTM, two layers", lambda: nn.LSTM(8, 6, 2, batch_first=True), sequence, joint_op=RNN, step=False)
layer("LSTM, both ways", lambda: nn.LSTM(8, 6, batch_first=True, bidirectional=True), sequence, joint_op=RNN)
layer("LSTM, projected", lambda: nn.LSTM(8, 6, batch_first=True, proj_size=3), rows(4, 2, 8), step=False)
layer("RNNCell", lambda: nn.RNNCell(8, 6), table, step=False)
layer("GRUCell", lambda: nn.GRUCell(8, 6), table, extra_memory=CELL, step=False)
layer("LSTMCell", lambda: nn.LSTMCell(8, 6), table, step=False)
layer("Embedding", lambda: nn.Embedding(10, 6), ids(10, 4, 5))
layer("Embedding, padding_idx", lambda: nn.Embedding(10, 6, padding_idx=0), ids(10, 4, 5), step=False)
layer("Embedding, scale_grad_by_freq", lambda: nn.Embedding(10, 6, scale_grad_by_freq=True), ids(10, 4, 5), step=False)
layer(
    "Embedding, sparse",
    lambda: nn.Embedding(10, 6, sparse=True),
    ids(10, 4, 5),
    untraced="NotImplementedError: Cannot access storage of SparseTensorImpl",
)
layer("EmbeddingBag, sum", lambda: nn.EmbeddingBag(10, 6, mode="sum"), ids(10, 4, 5), step=False)
layer("EmbeddingBag, mean", lambda: nn.EmbeddingBag(10, 6), ids(10, 4, 5))
layer("EmbeddingBag, max", lambda: nn.EmbeddingBag(10, 6, mode="max"), ids(10, 4, 5), step=False)
layer("MultiheadAttention", attention, sequence)
layer(
    "MultiheadAttention, bias_kv, zero_attn",
    lambda: attention(add_bias_kv=True, add_zero_attn=True),
    sequence,
    step=False,
)
layer("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), sequence)
layer(
    "TransformerEncoderLayer, norm first, GELU",
    lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True),
    sequence,
    step=False,
)
layer(
    "TransformerEncoderLayer in eval",
    lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True).eval(),
    sequence,
    step=False,
)
layer(
    "TransformerDecoderLayer",
    lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True),
    lambda: (torch.randn(4, 3, 8), torch.randn(4, 2, 8)),
    step=False,
)
layer(
    "an ALBERT block applied three times",
    lambda: Toy(
        lambda net, x: net.block(net.block(net.block(x))),
        block=nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    ),
    rows(4, 2, 8),
)
layer("weight_norm, as a parametrization", lambda: parametrizations.weight_norm(nn.Linear(8, 6)), table, step=False)
layer("weight_norm, as a hook", lambda: hooked_weight_norm(nn.Linear(8, 6)), table)
layer("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(6, 6)), rows(4, 6), step=False)
layer("spectral_norm in eval", lambda: parametrizations.spectral_norm(nn.Linear(8, 6)).eval(), table)
layer(
    "CosineSimilarity",
    partial(two_layer_net, lambda net, x: F.cosine_similarity(net.first(x), net.second(x))),
    table,
    step=False,
)
layer(
    "PairwiseDistance, cdist",
    partial(two_layer_net, lambda net, x: distances(net.first(x), net.second(x))),
    table,
    step=False,
)
layer(
    "a frozen Linear", lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)), table, step=False
)
layer("a frozen bias", lambda: half_frozen(nn.Linear(8, 8)), table)


# Patterns.


pattern("a tied embedding: x@E, Linear, @E.T", weights((10, 8), (8, 8), (8,)), rows(4, 10))(
    lambda p, x: F.linear(x @ p["w0"], p["w1"], p["w2"]) @ p["w0"].T
)
pattern("an embedding that is also the head", weights((10, 8), (8, 8)), ids(10, 4, 5))(
    lambda p, x: torch.tanh(F.embedding(x, p["w0"]) @ p["w1"]) @ p["w0"].T
)
pattern("an output that is a view")(lambda p, x: (x @ p["w0"]).view(-1))
pattern("sin(x + p), whose two gradients are one", weights((4, 8)), joint_op="mul.Tensor", step=False)(
    lambda p, x: torch.sin(x + p["w0"])
)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x**3 * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        return dy * 3 * x**2 * scale, (dy * x**3).sum(0)


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


pattern("autograd.Function, setup_context", weights((8, 8), (8,)))(lambda p, x: Cube.apply(x @ p["w0"], p["w1"]))
pattern("autograd.Function, mark_dirty")(lambda p, x: InPlaceFunction.apply(x @ p["w0"]).sin())


pattern(
    "nested parameters, a list and a number among them",
    lambda: {"a": [torch.randn(8, 8), {"b": torch.randn(8)}], "n": 2},
)(lambda p, x: x @ p["a"][0] * p["n"] + p["a"][1]["b"])


pattern("amax, amin of a whole parameter", weights((8, 8), (8, 8)))(
    lambda p, x: x.exp() * -(p["w0"].t().amin() + p["w1"].amax())
)


@pattern("max of a whole parameter", untraced="the gradient of a whole tensor's max, min or median (MaxBackward1)")
def extreme_of_all(p, x):
    """Scale by a maximum, whose gradient elsewhere is exactly 0.

    A trace would give 0 times the cotangent there: -0, or NaN of an infinite one.
    """
    return (x @ p["w0"]).exp() * p["w0"].max()


@pattern(
    "prod, cumprod",
    rounding="autograd looks for zeros in its input and divides by it if there are none; a trace cannot look",
    step=False,
)
def product(p, x):
    y = x @ p["w0"]
    return y.prod(1, keepdim=True) + y.cumprod(1)


pattern("torch.masked.prod", rounding="as prod, which it ends in", step=False)(
    lambda p, x: torch.masked.prod(x @ p["w0"], dim=1, mask=torch.ones(8, 8).triu()[: len(x)] == 0)
)
pattern(
    "masked_fill by a parameter",
    lambda: {"w0": 0.3 * torch.randn(8, 8), "w1": torch.randn(())},
    rows(6, 8),
    rounding="autograd adds up the gradients at the mask, a trace, which cannot pick them, a 0 for each other",
    step=False,
)(lambda p, x: (x @ p["w0"]).masked_fill(torch.ones(8, 8).triu()[: len(x)] == 0, p["w1"]).softmax(-1) @ p["w0"])


@pattern("scaled_dot_product_attention, float mask", weights((8, 24), (5, 5)), rows(4, 5, 8))
def attention_mask(p, x):
    q, k, v = (x @ p["w0"]).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=p["w1"]).transpose(1, 2).reshape(x.shape)


@pattern("linalg: inverse, solve, cholesky, det", step=False)
def linalg(p, x):
    a = p["w0"] @ p["w0"].T + torch.eye(8)
    return (
        torch.linalg.solve(a, x.T).T + x @ torch.linalg.inv(a) @ torch.linalg.cholesky(a) + torch.linalg.slogdet(a)[1]
    )


@pattern("linalg: svd, eigh, qr", step=False)
def decompositions(p, x):
    s = torch.linalg.svdvals(p["w0"])
    values, _ = torch.linalg.eigh(p["w0"] @ p["w0"].T)
    q, r = torch.linalg.qr(p["w0"])
    return x * s + values + x @ q @ r


pattern(
    "a loss inside: cross_entropy", weights((8, 8)), lambda: (torch.randn(4, 8), torch.randint(8, (4,))), step=False
)(lambda p, x: (F.cross_entropy(x[0] @ p["w0"], x[1], reduction="none", label_smoothing=0.1), x[0] @ p["w0"]))
IGNORED = torch.arange(120).remainder(7)


pattern(
    "cross_entropy with weights, label_smoothing and targets to ignore",
    weights((8, 7)),
    lambda: (torch.randn(120, 8), torch.where(IGNORED == 3, -100, IGNORED)),
    rounding="autograd adds up the weights of targets that count, a trace, which cannot pick them, a 0 for each other",
    step=False,
)(lambda p, x: F.cross_entropy(x[0] @ p["w0"], x[1], weight=torch.linspace(0.3, 1.7, 7), label_smoothing=0.1))


@pattern("losses: nll, bce, huber, smooth_l1, kl_div", step=False)
def losses(p, x):
    y, t = x @ p["w0"], x.detach().sigmoid()
    return torch.stack(
        [
            F.nll_loss(y.log_softmax(1), torch.zeros(len(x), dtype=torch.long)),
            F.binary_cross_entropy_with_logits(y, t),
            F.binary_cross_entropy(y.sigmoid(), t),
            F.huber_loss(y, t),
            F.smooth_l1_loss(y, t),
            F.l1_loss(y, t),
            F.kl_div(y.log_softmax(1), t, reduction="batchmean"),
            F.mse_loss(y, t),
        ]
    ).expand(len(x), 8)


@pattern("masked_fill_ of transposed data", weights((4, 6)), rows(4, 5, 4))
def masked_fill_transposed_(p, x):
    h = (x @ p["w0"]).transpose(1, 2) * 2  # masked_fill itself would write it row by row
    return F.group_norm(h.masked_fill_(h.detach() > 1, 0.5).transpose(1, 2), 5)


@pattern("filled by rows", weights((8, 8)), rows(4, 5, 8), step=False)
def filled(p, x):
    filled_rows = torch.empty(len(x), 5, 8)
    h = torch.zeros(len(x), 8)
    for t in range(5):
        h = torch.tanh(x[:, t] + h @ p["w0"])
        filled_rows[:, t] = h
    return filled_rows


REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()"


@pattern(
    "torch.utils.checkpoint, reentrant",
    weights((8, 8), (8, 8)),
    untraced=f"RuntimeError: {REENTRANT}",
    refused=REENTRANT,
)
def checkpointed_reentrant(p, x):
    def block(x):
        return torch.tanh(x @ p["w0"]).exp() @ p["w1"]

    return checkpoint(block, x, use_reentrant=True)


@pattern("autocast with cache, Linear used twice", lambda: {"w0": torch.randn(8, 8), "w1": torch.randn(8)})
def autocast_linear(p, x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(F.layer_norm(F.linear(x, p["w0"], p["w1"]), (8,)), p["w0"], p["w1"]).softmax(-1)


pattern("float16", weights((8, 8), (8,), dtype=torch.float16), rows(4, 8, dtype=torch.float16))(
    lambda p, x: F.gelu(F.linear(x, p["w0"], p["w1"]))
)
pattern(
    "mixed dtypes: bfloat16 weights, float32 norm",
    lambda: {"w0": torch.randn(8, 8, dtype=torch.bfloat16), "w1": torch.ones(8)},
)(lambda p, x: F.rms_norm((x.bfloat16() @ p["w0"]).float(), (8,), p["w1"]))
pattern("zero rows", weights((8, 8)), rows(0, 8), step=False)(lambda p, x: torch.tanh(x @ p["w0"]))
CONSTANT = torch.arange(64.0).view(8, 8).sin()


pattern("parameters that share their memory", lambda: shared_memory(torch.randn(8, 8)))(
    lambda p, x: torch.tanh(x @ p["w0"]) @ p["w1"] @ p["w2"]
)


def shared_memory(w: Tensor) -> dict[str, Tensor]:
    return {"w0": w, "w1": w, "w2": w.t()}


pattern("a constant tensor of a closure")(lambda p, x: (x * CONSTANT[0]) @ p["w0"] @ CONSTANT)
pattern("a constant as an output", step=False)(lambda p, x: (x @ p["w0"], CONSTANT))
pattern("complex numbers", weights((8, 8), dtype=torch.complex64), rows(4, 8, dtype=torch.complex64))(
    lambda p, x: torch.tanh(x @ p["w0"]) * x.conj() + x.real
)


@pattern("a gradient taken within")
def inner_gradient(p, x):
    x = x if x.requires_grad else x.detach().requires_grad_()
    (g,) = torch.autograd.grad((x @ p["w0"]).sin().sum(), x, create_graph=True)
    return g * 2


pattern("torch.func.vmap")(lambda p, x: torch.func.vmap(lambda row: torch.tanh(row @ p["w0"]).sum() * row)(x))


@pattern("interpolation: grid_sample, affine_grid", weights((2, 3)), rows(4, 2, 5, 5), step=False)
def grid(p, x):
    locations = F.affine_grid(p["w0"].expand(len(x), 2, 3), [len(x), 2, 5, 5], align_corners=False)
    return F.grid_sample(x, locations, align_corners=False)


# Refused or untraced patterns.


CHANGED = "writes what it was given in place; a stage and a loss are pure functions."
LOOKS = "DataDependentOutputException: aten._local_scalar_dense.default"


@pattern("the input changed in place", untraced=f"it {CHANGED}", refused=CHANGED)
def changes_input(p, x):
    x.mul_(2)
    return x @ p["w0"]


@pattern("x[:, 0] = 0 on the input", untraced=f"it {CHANGED}", refused=CHANGED)
def changes_view(p, x):
    x[:, 0] = 0
    return x @ p["w0"]


@pattern(
    "an int input changed in place",
    weights((10, 8)),
    ids(8, 4),
    untraced=f"it {CHANGED}",
    refused="stage 1 (changes_ids) writes what it was given in place",
)
def changes_ids(p, x):
    return p["w0"][x.add_(1)]


@pattern(
    "a parameter changed in place",
    untraced=f"it {CHANGED}",
    refused="stage 1 (changes_param) writes what it was given in place; a stage and a loss are pure functions.",
)
def changes_param(p, x):
    with torch.no_grad():
        p["w0"].mul_(0.5)
    return x @ p["w0"]


pattern("if x.sum() > 0", untraced=LOOKS)(lambda p, x: x @ p["w0"] if x.sum() > 0 else x @ p["w0"].T)
pattern(".item()", untraced=LOOKS)(lambda p, x: x @ p["w0"] * x.abs().max().item())


@pattern("a boolean mask as an index", untraced="DynamicOutputShapeException: aten.nonzero.default")
def boolean_mask(p, x):
    y = x @ p["w0"]
    return y * y[y > 0].sum()


@pattern("nonzero", untraced="DynamicOutputShapeException: aten.nonzero.default")
def nonzero(p, x):
    y = x @ p["w0"]
    return y * y.nonzero().sum()


pattern("numpy", untraced="RuntimeError: .numpy() is not supported for tensor subclasses.")(
    lambda p, x: x @ p["w0"] * float(x.detach().numpy().sum())
)
pattern("torch.compile")(lambda p, x: sine_compiled(x @ p["w0"]))
sine_compiled = torch.compile(torch.sin, backend="eager")
