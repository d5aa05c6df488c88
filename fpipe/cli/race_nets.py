"""The nets that runtimes race on: two GPTs, blocks of a Llama, a perceptron and a mixture of experts.

Each is a chain of equal blocks with a squared error, so that it can be cut anywhere. Floating-point operations count
the products of weights and of causal attention: 6 for each weight and token, 6 for each layer, token, column and
position before it, halved by the mask (Narayanan et al. 2021, appendix, without the head).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MICROBATCHES, STAGES = 8, 4


@dataclass(frozen=True)
class Net:
    """A chain of equal blocks, and the rows that a step trains it on.

    Attributes:
        title: what the table calls it.
        blocks: the number of blocks.
        width: the columns of an activation.
        length: the tokens of a row; 1 for rows without a sequence.
        rows: the rows of a microbatch.
        make_block: makes a block from its width.
        active: the share of a block's weights that a token meets.
    """

    title: str
    blocks: int
    width: int
    length: int
    rows: int
    make_block: Callable[[int], nn.Module]
    active: float = 1.0

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return MICROBATCHES * self.rows * self.length

    def make(self, device: torch.device) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
        """Return the net with its first weights and a batch, the same on every call."""
        torch.manual_seed(0)
        with device:
            net = nn.Sequential(*(self.make_block(self.width) for _ in range(self.blocks)))
            shape = (MICROBATCHES * self.rows, *([self.length] if self.length > 1 else []), self.width)
            return net, (torch.randn(shape), torch.randn(shape))

    def flops(self) -> float:
        """Return the floating-point operations of a step."""
        with torch.device("meta"):
            block = self.make_block(self.width)
        weights = sum(weight.numel() for weight in block.parameters() if weight.dim() > 1) * self.active
        attention = self.length * self.width if self.length > 1 else 0
        return 6.0 * self.tokens * self.blocks * (weights + attention)


class Attention(nn.Module):
    """Causal self-attention whose keys may have fewer heads, with rotations of positions or without."""

    def __init__(self, width: int, heads: int, key_heads: int, theta: float | None, bias: bool) -> None:
        super().__init__()
        self.sizes, self.theta = [heads, key_heads, key_heads], theta
        self.columns = width // heads
        self.qkv = nn.Linear(width, sum(self.sizes) * self.columns, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token to those before it."""
        rows, length, width = x.shape
        heads = self.qkv(x).view(rows, length, -1, self.columns).transpose(1, 2)
        q, k, v = heads.split(self.sizes, 1)
        if self.theta is not None:
            q, k = _rotate(q, self.theta), _rotate(k, self.theta)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.sizes[0] != self.sizes[1])
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate pairs of columns by their position (Su et al. 2021, equation 34)."""
    length, columns = x.shape[-2:]
    steps = torch.arange(0, columns, 2, device=x.device, dtype=torch.float32) / columns
    angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), theta**-steps)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    real, imaginary = x.chunk(2, -1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)


class SwiGLU(nn.Module):
    """The perceptron of a Llama (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated product."""
        gate, hidden = self.gate_and_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * hidden)


class Experts(nn.Module):
    """Experts that each choose their tokens (Zhou et al. 2022), by products with a mask: shapes depend on no data."""

    def __init__(self, width: int, experts: int, capacity: float) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts, bias=False), capacity / experts
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of experts for each token."""
        tokens = x.flatten(0, -2)
        count = len(tokens)
        gates, chosen = self.router(tokens).softmax(-1).topk(max(1, int(self.capacity * count)), 0)
        # Experts x capacity x tokens. A product with a mask adds in a fixed order, which scatter_add on a GPU does not.
        mask = (chosen.T[..., None] == torch.arange(count, device=x.device)).to(x.dtype)
        hidden = F.gelu(mask @ tokens @ self.up)
        y = (mask * gates.T[..., None]).flatten(0, 1).T @ (hidden @ self.down).flatten(0, 1)
        return y.view_as(x)


class Residual(nn.Module):
    """A residual block: modules in turn, each on the normed sum so far."""

    def __init__(self, make_norm: Callable[[], nn.Module], *parts: nn.Module) -> None:
        super().__init__()
        self.norms, self.parts = nn.ModuleList(make_norm() for _ in parts), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and what each part adds."""
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


def gpt_block(width: int, heads: int) -> nn.Module:
    """Return a block of GPT-2."""
    perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return Residual(partial(nn.LayerNorm, width), Attention(width, heads, heads, None, bias=True), perceptron)


def llama_block(width: int, heads: int, key_heads: int, hidden: int) -> nn.Module:
    """Return a block of Llama 3."""
    attention = Attention(width, heads, key_heads, 5e5, bias=False)
    return Residual(partial(nn.RMSNorm, width, eps=1e-5), attention, SwiGLU(width, hidden))


def expert_block(width: int, heads: int, experts: int) -> nn.Module:
    """Return a GPT's block with experts, two for a token on average."""
    attention = Attention(width, heads, heads, None, bias=True)
    return Residual(partial(nn.LayerNorm, width), attention, Experts(width, experts, capacity=2))


def linear_block(width: int) -> nn.Module:
    """Return a linear layer with ReLU."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


# Of the weights of a block with 8 experts, 4 w² of attention and 8 * 8 w² of experts, a token meets 4 + 2 * 8.
NETS = {
    "gpt": Net("GPT 12 x 768", 12, 768, 512, 4, partial(gpt_block, heads=12)),
    "gpt-wide": Net("GPT 8 x 2048", 8, 2048, 1024, 4, partial(gpt_block, heads=16)),
    "llama": Net("Llama-8B block x 4", 4, 4096, 2048, 1, partial(llama_block, heads=32, key_heads=8, hidden=14336)),
    "mlp": Net("MLP 8 x 512", 8, 512, 1, 128, linear_block),
    "moe": Net("MoE 8 x 768, 8 experts", 8, 768, 512, 4, partial(expert_block, heads=12, experts=8), active=20 / 68),
}


def small(net: Net) -> Net:
    """Return a net of the same kind that a CPU trains in milliseconds."""
    make_blocks: dict[str, Callable[[int], nn.Module]] = {
        "GPT 12 x 768": partial(gpt_block, heads=4),
        "GPT 8 x 2048": partial(gpt_block, heads=4),
        "Llama-8B block x 4": partial(llama_block, heads=4, key_heads=2, hidden=224),
        "MoE 8 x 768, 8 experts": partial(expert_block, heads=4, experts=8),
    }
    width, length, rows = (128 if net.width == 2048 else 64, 32, 2) if net.length > 1 else (256, 1, 32)
    make_block = make_blocks.get(net.title, net.make_block)
    title = f"{net.title.partition(' ')[0]} {STAGES} x {width}"
    return replace(net, title=title, blocks=STAGES, width=width, length=length, rows=rows, make_block=make_block)
