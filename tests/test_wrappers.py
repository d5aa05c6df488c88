"""Nets as people write and wrap them keep their loss and gradients when cut, or are refused by name."""

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
from tests.own_autograd import assert_cut_equals_net, eager_loss_and_grads
from tests.refusals import refusals
from tests.toys import Block, Toy, merged

WIDTH, ROWS, KEY, PARTS = 8, 4, 3, 2


class Chain(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, nn.Dropout(0.1)) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TrainingStep(nn.Module):
    """A Lightning training step as a net: it takes a batch, returns the loss, and may log it."""

    def __init__(self, **logged: Tensor | None) -> None:
        super().__init__()
        self.model, self.logged = Chain(), logged

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), target)
        if self.logged:
            self.logged["loss"] = loss.detach()
        return loss


class Translator(nn.Module):
    """torch's transformer with a causal decoder, whose two layers both read the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        y = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return {"loss": F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())}


def translation() -> dict[str, Tensor]:
    padding = torch.zeros(ROWS, 6, dtype=torch.bool)
    padding[:, -2:] = True
    target = torch.randint(0, 16, (ROWS, 6))
    return {
        "source": torch.randint(0, 16, (ROWS, 6)),
        "target": target[:, :-1],
        "padding": padding,
        "labels": target[:, 1:],
    }


class TwoTowers(nn.Module):
    """Two nets side by side whose outputs are compared, with a scale that belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Chain(2), Chain(2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, *, seen: Tensor, said: Tensor, smooth: float = 0.0) -> Tensor:
        left_rows, right_tower = F.normalize(self.left(seen), dim=-1), F.normalize(self.right(said), dim=-1)
        scores = self.scale.exp() * left_rows @ right_tower.T
        labels = torch.arange(self.rows(seen))
        return (F.cross_entropy(scores, labels, label_smoothing=smooth) + F.cross_entropy(scores.T, labels)) / 2

    def rows(self, seen: Tensor) -> int:
        return seen.shape[0]


class FixedRows(TwoTowers):
    def rows(self, seen: Tensor) -> int:
        return len(seen)


class Masked(Chain):
    """A net that needs the mask it declares optional, as LongT5 does in an export."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x * attention_mask.view(-1, 1))  # pyright: ignore[reportOptionalMemberAccess]


class Wrapped(NamedTuple):
    """A net, its batch, the paths where its stages end, and the leaves whose gradients several stages add."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    ends: tuple[str, ...]
    loss: Callable[[Any, Any], Tensor] | None = None
    summed: tuple[str, ...] = ()


def rows(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
DEEP = pytest.mark.deep
NETS = {
    "a training step": Wrapped(
        TrainingStep,
        lambda: ((rows(WIDTH), rows(WIDTH)), None),
        tuple(f"model.{path}" for path in BLOCKS),
    ),
    "torch's transformer": Wrapped(
        Translator,
        lambda: (translation(), None),
        ("transformer.encoder.layers.0", "transformer.encoder.layers.1", "transformer.decoder.layers.0"),
        None,
        ("embedding.", "transformer.encoder."),
    ),
    "two towers": Wrapped(
        TwoTowers,
        lambda: ({"said": rows(WIDTH), "seen": rows(WIDTH), "smooth": 0.1}, None),
        ("left.blocks.0", "left.blocks.1", "right.blocks.0"),
    ),
}
FAST = ("a training step", "two towers")


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=DEEP) for name in NETS])
def test_a_cut_net_has_the_gradients_of_the_net(name: str) -> None:
    torch.manual_seed(0)
    case = NETS[name]
    net, batch = case.make(), case.batch()
    assert_cut_equals_net(net, batch, case.ends, case.loss, case.summed)


compiled_gelu = torch.compile(F.gelu)


def activate(x: Tensor) -> Tensor:
    return compiled_gelu(x)


class Activated(nn.Module):
    """A module with its activation function as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = activate

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


@pytest.mark.parametrize(
    "cut",
    [
        lambda: fpipe.from_functions([lambda p, x: activate(x @ p["w"])], F.mse_loss),
        lambda: fpipe.from_sequential(nn.Sequential(nn.Linear(2, 2), Activated()), 1, loss=F.mse_loss)[0],
    ],
)
def test_compiled_code_behind_a_function_is_named(cut: Callable[[], fpipe.Model]) -> None:
    """Only names in a stage's own code were searched: deeper code ran uncompiled without a warning."""
    model = cut()
    with pytest.warns(UserWarning, match="'compiled_gelu' runs as it is written"):
        fpipe.build(fpipe.program(model), model)


def test_a_net_that_fixes_its_rows_gets_a_warning_with_the_remedy() -> None:
    inputs = {"said": rows(WIDTH), "seen": rows(WIDTH)}
    warning = f"the net fixes the {ROWS} rows of inputs['said'], as len(x) and list(x) do (x.shape[0] leaves them open)"
    with pytest.warns(UserWarning, match=re.escape(warning)):
        model, params, _ = fpipe.from_module(FixedRows(), 2, batch=inputs)
    program = merged(model, 2)
    message = "if not, take an example with as many rows as a microbatch has, or ask x.shape[0] for its rows"
    with pytest.raises(ValueError, match=re.escape(message)):
        fpipe.build(program, model)(params, (inputs, None), key=KEY)
    model, params, _ = fpipe.from_module(FixedRows(), 2, batch=inputs, microbatches=2)
    assert fpipe.verify(program, model, params, (inputs, None), key=KEY).bitwise


def cut_in_two(net: nn.Module, **inputs: Tensor) -> Any:
    return fpipe.from_module(net, 2, batch=(inputs or rows(WIDTH), rows(WIDTH)), loss=F.mse_loss)


RECOMPUTED = Toy(lambda own, x: checkpoint(torch.tanh, x, use_reentrant=True))
test_nets_that_cannot_be_cut_are_refused_by_name = refusals(
    globals(),
    """
# It ended in torch's own error about the stateless API.
cut_in_two(nn.DataParallel(Chain()))
    ValueError: module '' (DataParallel) makes copies of its module as it runs; a stage computes with parameters
# It ended in torch's own error about .grad(), which names neither the net nor what to do in it.
cut_in_two(RECOMPUTED)
    ValueError: Toy cannot be exported, so there is nothing to cut: ValueError:
    torch.utils.checkpoint(use_reentrant=True) has a backward that no trace captures; set
    use_reentrant=False, or use fpipe.checkpoint()
# LongT5 ended in "'NoneType' object has no attribute 'shape'", and a mask helps.
cut_in_two(Masked())
    ValueError: ; the batch has no attention_mask, with which it may. Change the
fpipe.from_module(TrainingStep(loss=None), 2, batch=((rows(WIDTH), rows(WIDTH)), None))
    ValueError: . If it does so in its first run alone, run it once before. Use from_loss
""",
)


def test_a_needed_mask_is_an_input() -> None:
    assert cut_in_two(Masked(), x=rows(WIDTH), attention_mask=torch.ones(ROWS))[0].inputs


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.* holds -100")  # as its own autograd, microbatch by microbatch, has it
def test_a_model_of_transformers_may_have_its_checkpoints_on() -> None:
    """The program decides about recomputation: a net's own checkpoints are no part of the trace."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net, batch = FAMILIES["Llama"].make(hf), FAMILIES["Llama"].batch()
    net.activation_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    model, params, _ = fpipe.from_module(net, 2, batch=batch)
    program = merged(model, PARTS, fpipe.schedules.zb_h1(2))
    grads = fpipe.join_params(model, fpipe.build(program, model)(params, batch, key=KEY).grads)
    _, expected = eager_loss_and_grads(net, batch, PARTS, key=KEY, ends=("model.layers.1",))
    assert [name for name, grad in expected.items() if not torch.equal(grads[name], grad)] == []
    net.activation_checkpointing_enable({"use_reentrant": True})  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be exported.*use_reentrant=True"):
        fpipe.from_module(net, 2, batch=batch)


def test_batches_as_tokenizers_make_them_are_split() -> None:
    """A BatchEncoding is no dict for torch, so it used to go whole to every microbatch."""
    hf = pytest.importorskip("transformers")

    def loss(y: Tensor, target: Any) -> Tensor:
        return (y.mean(1) - target["labels"]).square().mean()

    model = fpipe.from_functions([lambda p, x: p["e"][x["input_ids"]]], loss)
    params = ({"e": torch.randn(5, 3)},)
    inputs, target = {"input_ids": torch.arange(8).view(4, 2) % 5}, {"labels": torch.randn(4, 3)}
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model)
    result = step(params, (hf.BatchEncoding(inputs), hf.BatchFeature(target)))
    assert torch.equal(result.grads[0]["e"], step(params, (inputs, target)).grads[0]["e"])


def test_outputs_of_one_model_are_inputs_of_another() -> None:
    """A ModelOutput is a pytree for torch once transformers is imported, so each microbatch gets its rows."""
    hf = pytest.importorskip("transformers.modeling_outputs")
    model = fpipe.from_functions([lambda p, x: x.last_hidden_state @ p["w"]], nn.functional.mse_loss)
    params, hidden, target = ({"w": torch.randn(3, 2)},), torch.randn(4, 3), torch.randn(4, 2)
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model)
    weight = params[0]["w"].clone().requires_grad_()
    for rows, target_rows in zip(hidden.split(2), target.split(2), strict=True):
        (nn.functional.mse_loss(rows @ weight, target_rows) / 2).backward()
    result = step(params, (hf.BaseModelOutput(last_hidden_state=hidden), target))
    assert torch.equal(result.grads[0]["w"], weight.grad)
