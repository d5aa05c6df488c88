"""Any module, cut between its blocks: its own gradients, state, ties and skips, and what cannot be cut."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe

WIDTH = 8


class Block(nn.Module):
    """A residual block with whatever is asked for in the middle."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.middle = nn.Sequential(*middle)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """An embedding whose weight is the head's too, a table, blocks, and a skip from the first to the last."""

    def __init__(self, blocks: int = 4, *middle: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(*(one() for one in middle)) for _ in range(blocks))
        self.head.weight = self.embed.weight
        self.table: Tensor
        self.register_buffer("table", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.embed(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x + skip) + torch.tensor(4.0)


class Statistics(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(2 * WIDTH)


def rows(count: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randn(count, WIDTH)


def own(net: nn.Module, batch: Any, loss: Any, microbatches: int, key: int, ends: tuple[str, ...]) -> dict[str, Tensor]:
    """The gradients of the net under plain autograd, microbatch after microbatch, seeded where a stage begins."""
    params = {name: leaf.detach().requires_grad_() for name, leaf in net.named_parameters()}
    total = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    parts = zip(*(half.tensor_split(microbatches) for half in batch), strict=True)
    index = 0

    def seed(stage: int) -> Any:
        return lambda *_: torch.manual_seed(fpipe.fold_in(key, stage, index)) and None

    hooks = [net.get_submodule(path).register_forward_hook(seed(at + 1)) for at, path in enumerate(ends)]
    for index, (x, target) in enumerate(parts):
        seed(0)()
        made = loss(torch.func.functional_call(net, params, (x,)), target) * (len(x) / len(batch[0]))
        for name, grad in zip(params, torch.autograd.grad(made, [*params.values()]), strict=True):
            total[name] = grad if index == 0 else total[name] + grad
    for hook in hooks:
        hook.remove()
    return total


def pipeline(model: fpipe.Model, microbatches: int = 4) -> fpipe.Program:
    stages = len(model.stages)
    return fpipe.chain(fpipe.split(microbatches), fpipe.schedules.zb_h1(stages), fpipe.merge())(fpipe.program(model))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_gradients_are_the_nets_own(stages: int) -> None:
    """Bit by bit, dropout drawn by key, but for the tied leaf, whose two uses are added up stage by stage."""
    torch.manual_seed(0)
    net, batch = Net(4, nn.Dropout), rows()
    model, params, state = fpipe.from_module(net, stages, loss=F.mse_loss, example=batch)
    ends = {2: ("blocks.1",), 3: ("blocks.0", "blocks.2"), 4: ("blocks.0", "blocks.1", "blocks.2")}[stages]
    result = fpipe.build(pipeline(model), model)(params, batch, key=5)
    found = fpipe.join_params(model, result.grads)
    right = own(net, batch, F.mse_loss, 4, 5, ends)
    torch.testing.assert_close(found["embed.weight"], right.pop("embed.weight"))
    assert [name for name in right if not torch.equal(found[name], right[name])] == []
    assert fpipe.verify(pipeline(model), model, params, batch, key=5).bitwise
    assert found.keys() == {name for name, _ in net.named_parameters(remove_duplicate=False)}
    assert not any(state)


def test_embeddings_are_in_the_first_stage_and_the_head_in_the_last() -> None:
    net = Net(4)
    model, _, _ = fpipe.from_module(net, 4, loss=F.mse_loss, example=rows())
    names = [stage.name for stage in model.stages]
    assert names == ["embed, blocks.0", "blocks.1", "blocks.2", "blocks.3, head"]
    assert model.ties == (((0, "embed.weight"), (3, "embed.weight")),)
    assert model.inputs == ("batch", 0, 1, ((0, 1), 2))  # the skip passes by those between


def test_batch_norms_are_state_as_the_modules_have_it() -> None:
    torch.manual_seed(0)
    net, batch = Net(4, Statistics), rows()
    model, params, state = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    assert [len(one) for one in state] == [6, 6]
    result = fpipe.build(pipeline(model), model)(params, batch, state=state)
    assert fpipe.verify(pipeline(model), model, params, batch, state=state).bitwise
    for part in batch[0].tensor_split(4):
        net(part)
    now = dict(net.named_buffers())
    assert [name for one in result.state for name in one if not torch.equal(one[name], now[name])] == []


def test_other_numbers_of_rows_need_no_other_graph() -> None:
    net = Net(4)
    model, params, _ = fpipe.from_module(net, 2, loss=F.mse_loss, example=rows(4))
    for count in (1, 3, 8):
        batch = rows(count)
        assert fpipe.verify(pipeline(model, 1), model, params, batch).bitwise


def test_cuts_name_the_modules_after_which_stages_end() -> None:
    model, _, _ = fpipe.from_module(Net(4), loss=F.mse_loss, example=rows(), cuts=["blocks.2", "embed"])
    assert [stage.name for stage in model.stages] == ["embed", "blocks.0 to blocks.2", "blocks.3, head"]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"stages": 0}, "stages is a whole number from 1, found 0."),
        ({"stages": None}, "say how many stages, or cuts=[...] with the modules after which they end."),
        ({"stages": 99}, "make as many stages; found stages=99."),
        ({"cuts": ["block.2"]}, "cuts= names 'block.2', but no module of that path is called when the net runs; close"),
        ({"stages": 5, "cuts": ["embed"]}, "stages=5, but cuts= and the boundaries in forward make 2 stages"),
        ({"example": None}, "example is a batch (inputs, target), inputs a dict of keywords, a tuple of arguments"),
        ({"example": (torch.ones(4, WIDTH), None)}, "the example has no target for loss=; hand in example=(inputs,"),
        ({"loss": None}, "without loss= the net computes the loss of its inputs, labels among them"),
        ({"loss": None, "example": (torch.ones(4, WIDTH), None)}, "found a tensor of shape"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(said: dict[str, Any], sentence: str) -> None:
    asked = {"stages": None if "cuts" in said else 2, "loss": F.mse_loss, "example": rows(4)} | said
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fpipe.from_module(Net(4), **asked)
