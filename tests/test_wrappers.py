"""Nets as people write and wrap them: cut at stages they have their own loss and gradients, or are refused by name."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpipe
from tests.families import FAMILIES
from tests.own_autograd import own_autograd
from tests.toys import merged

WIDTH, ROWS, KEY, PARTS = 8, 4, 3, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Chain(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lightning(nn.Module):
    """A module with a training step, which logs as it goes where it has a trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Chain()
        self.logged: dict[str, Tensor] | None = None

    def log(self, name: str, value: Tensor) -> None:
        if self.logged is not None:
            self.logged[name] = value.detach()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        loss = F.mse_loss(self.model(x), target)
        self.log("loss", loss)
        return loss


class TrainingStep(nn.Module):
    """The training step of such a module as a net: it takes a batch, and returns the loss."""

    def __init__(self, module: Lightning) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Tensor:
        return self.module.training_step((batch[0], batch[1]), 0)


class LowRank(nn.Module):
    """A frozen layer, and beside it what is trained, as adapters have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(self.drop(x)))


def adapted() -> nn.Module:
    net = Chain().requires_grad_(False)
    for block in net.blocks:
        assert isinstance(block, Block)
        block.up, block.down = LowRank(block.up), LowRank(block.down)  # pyright: ignore[reportAttributeAccessIssue]
    return net


class Shared(nn.Module):
    """One block called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class Translator(nn.Module):
    """torch's own transformer, its decoder causal, its encoder's output read by both layers of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.both = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, source: Tensor, said: Tensor, padding: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(said.shape[1])
        y = self.both(
            self.words(source),
            self.words(said),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return {"loss": F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())}


def translation() -> dict[str, Tensor]:
    padding = torch.zeros(ROWS, 6, dtype=torch.bool)
    padding[:, -2:] = True
    said = torch.randint(0, 16, (ROWS, 6))
    return {"source": torch.randint(0, 16, (ROWS, 6)), "said": said[:, :-1], "padding": padding, "labels": said[:, 1:]}


class Convolved(nn.Module):
    """Two convolutions with a norm of groups, told the time where there is one."""

    def __init__(self, into: int, out: int, time: int = 0) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.GroupNorm(2, out)
        self.time = nn.Linear(time, out) if time else None

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        x = F.silu(self.norm(self.one(x)))
        if self.time is not None and time is not None:
            x = x + self.time(time)[:, :, None, None]
        return F.silu(self.other(x))


class UNet(nn.Module):
    """Down and up again, what was seen on the way down read once more on the way up."""

    def __init__(self, time: int = 0) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolved(3, 4, time), Convolved(4, 8, time)])
        self.middle = Convolved(8, 8, time)
        self.up = nn.ModuleList([Convolved(16, 4, time), Convolved(8, 4, time)])
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1), time)
        return self.head(x)


class Denoiser(nn.Module):
    """Adds noise that it draws itself, and says what it was; `alphas` is a table of the schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.embed = UNet(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.alphas: Tensor
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        alpha = self.alphas[time][:, None, None, None]
        rate = torch.exp(torch.arange(WIDTH // 2) * (-math.log(100.0) / WIDTH))
        angles = time[:, None] * rate
        told = F.silu(self.embed(torch.cat([angles.sin(), angles.cos()], -1)))
        return F.mse_loss(self.net(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, told), noise)


class TwoTowers(nn.Module):
    """Two nets side by side, compared with each other; a scale that neither of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Chain(2), Chain(2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, *, seen: Tensor, said: Tensor, smooth: float = 0.0) -> Tensor:
        one, other = F.normalize(self.left(seen), dim=-1), F.normalize(self.right(said), dim=-1)
        scores = self.scale.exp() * one @ other.T
        right = torch.arange(self.rows(seen))
        return (F.cross_entropy(scores, right, label_smoothing=smooth) + F.cross_entropy(scores.T, right)) / 2

    def rows(self, seen: Tensor) -> int:
        return seen.shape[0]


class FixedRows(TwoTowers):
    def rows(self, seen: Tensor) -> int:
        return len(seen)


class Reentrant(Chain):
    """Recomputes its blocks in the backward, in the way that torch has left behind."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)  # pyright: ignore[reportAssignmentType]
        return self.head(x)


class Wrapped(NamedTuple):
    """A net, its batch, where four stages end, and the leaves of which several stages add up gradients."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    ends: tuple[str, ...]
    loss: Callable[[Any, Any], Tensor] | None = None
    summed: tuple[str, ...] = ()


def rows(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def itself(output: Any, _: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
SLOW = pytest.mark.deep
NETS = {
    "the net of a Lightning module": Wrapped(
        lambda: Lightning().model, lambda: (rows(WIDTH), rows(WIDTH)), BLOCKS, F.mse_loss
    ),
    "a training step": Wrapped(
        lambda: TrainingStep(Lightning()),
        lambda: ((rows(WIDTH), rows(WIDTH)), None),
        tuple(f"module.model.{path}" for path in BLOCKS),
    ),
    "frozen weights with adapters": Wrapped(adapted, lambda: (rows(WIDTH), rows(WIDTH)), BLOCKS, F.mse_loss),
    "a shared block": Wrapped(Shared, lambda: (rows(WIDTH), rows(WIDTH)), ("block",) * 3, F.mse_loss, ("block.",)),
    "torch's transformer": Wrapped(
        Translator,
        lambda: (translation(), None),
        ("both.encoder.layers.0", "both.encoder.layers.1", "both.decoder.layers.0"),
        None,
        ("words.", "both.encoder."),
    ),
    "a U-Net": Wrapped(
        UNet, lambda: (rows(3, 8, 8), rows(3, 8, 8)), ("down.0", "down.1", "up.0"), F.mse_loss, ("down.",)
    ),
    "a denoiser": Wrapped(
        Denoiser,
        lambda: ((rows(3, 8, 8), torch.randint(0, 10, (ROWS,))), None),
        ("net.down.0", "net.down.1", "net.up.0"),
        None,
        ("net.down.", "embed."),
    ),
    "two towers": Wrapped(
        TwoTowers,
        lambda: ({"said": rows(WIDTH), "seen": rows(WIDTH), "smooth": 0.1}, None),
        ("left.blocks.0", "left.blocks.1", "right.blocks.0"),
    ),
}
FAST = ("a training step", "frozen weights with adapters", "a shared block")


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=SLOW) for name in NETS])
def test_a_net_as_people_write_it_has_its_own_gradients(name: str) -> None:
    torch.manual_seed(0)
    made = NETS[name]
    net, batch = made.make(), made.batch()
    model, params, _ = fpipe.from_module(net, 4, example=batch, loss=made.loss)
    program = merged(model, PARTS, fpipe.schedules.zb_h1(4), fpipe.checkpoint("except_last"))
    result = fpipe.build(program, model)(params, batch, key=KEY)
    loss, right = own_autograd(net, batch, PARTS, key=KEY, ends=made.ends, loss=made.loss or itself)
    assert torch.equal(result.loss, loss)
    found = fpipe.join_params(model, result.grads)
    assert found.keys() == right.keys()
    for name, grad in right.items():
        if made.summed and name.startswith(made.summed):
            torch.testing.assert_close(found[name], grad, msg=name)
        else:
            assert torch.equal(found[name], grad), (name, (found[name] - grad).abs().max())


def test_a_net_that_fixes_its_rows_is_told_how_it_would_not() -> None:
    inputs = {"said": rows(WIDTH), "seen": rows(WIDTH)}
    model, params, _ = fpipe.from_module(FixedRows(), 2, example=inputs)
    program = merged(model, 2)
    words = "if not, take an example with as many rows as a microbatch has, or ask x.shape[0] for its rows"
    with pytest.raises(ValueError, match=re.escape(words)):
        fpipe.build(program, model)(params, (inputs, None), key=KEY)
    half = {name: leaf[: ROWS // 2] for name, leaf in inputs.items()}
    model, params, _ = fpipe.from_module(FixedRows(), 2, example=half)
    assert fpipe.verify(program, model, params, (inputs, None), key=KEY).bitwise


def test_copies_on_devices_are_refused_with_the_way_out() -> None:
    """It ended in torch's own error about the stateless API."""
    words = "module '' (DataParallel) makes copies of its module as it runs; a stage computes with parameters"
    with pytest.raises(ValueError, match=re.escape(words)):
        fpipe.from_module(nn.DataParallel(Chain()), 2, example=(rows(WIDTH), rows(WIDTH)), loss=F.mse_loss)


def test_a_reentrant_checkpoint_is_refused_with_its_line() -> None:
    """It ended in torch's own error about .grad(), which names neither the net nor what to do in it."""
    line = re.escape("in forward: x = checkpoint(block, x, use_reentrant=True)")
    said = (
        r"Reentrant cannot be exported.*use_reentrant=True\) has a backward.*say use_reentrant=False, or leave it out"
    )
    with pytest.raises(ValueError, match=f"(?s){said}.*{line}"):
        fpipe.from_module(Reentrant(), 2, example=(rows(WIDTH), rows(WIDTH)), loss=F.mse_loss)


def test_a_training_step_that_keeps_tensors_is_refused_with_their_name() -> None:
    module = Lightning()
    module.logged = {}
    with pytest.raises(ValueError, match=r"self\.module\.logged\['loss'\] was assigned during export"):
        fpipe.from_module(TrainingStep(module), 2, example=((rows(WIDTH), rows(WIDTH)), None))


@pytest.mark.deep
def test_a_model_of_transformers_may_have_its_checkpoints_on() -> None:
    """What recomputes in a pipeline is said by the program: the net's own checkpoints are no part of the trace."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net, batch = FAMILIES["Llama"].make(hf), FAMILIES["Llama"].batch()
    net.activation_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    model, params, _ = fpipe.from_module(net, 2, example=batch)
    program = merged(model, PARTS, fpipe.schedules.zb_h1(2))
    found = fpipe.join_params(model, fpipe.build(program, model)(params, batch, key=KEY).grads)
    _, right = own_autograd(net, batch, PARTS, key=KEY, ends=("model.layers.1",))
    assert [name for name, grad in right.items() if not torch.equal(found[name], grad)] == []
    net.activation_checkpointing_enable({"use_reentrant": True})  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be exported.*use_reentrant=True"):
        fpipe.from_module(net, 2, example=batch)
