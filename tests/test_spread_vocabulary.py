"""A vocabulary spread over ranks: loss and gradients of the whole head and embedding, ignored labels, processes."""

from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from tests.processes import Processes
from tests.refusals import refusals
from tests.test_distributed import local_part

WORDS, WIDTH, ROWS = 11, 4, 6


class Body(nn.Module):
    """Blocks that share one weight, between an embedding and a head that it does not have."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        for block in self.blocks:
            block.weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def spread_model(ranks: int, tied: bool) -> tuple[nn.Module, Tensor, Tensor, fpipe.Model, Any]:
    """Return a body, the weights of its embedding and head, a model with these in shards, and its parameters."""
    torch.manual_seed(0)
    body, embedding = Body(ranks), torch.randn(WORDS, WIDTH)
    head = embedding if tied else torch.randn(WORDS, WIDTH)
    model, params, _ = fpipe.from_module(body, ranks, batch=(torch.randn(ROWS, 3, WIDTH), None))
    model = fpipe.spread_vocabulary(model, ranks, vocabulary=WORDS, tokens=itemgetter(0), tied=tied)
    embedding_shards, head_shards = (
        [{"weight": shard} for shard in weight.tensor_split(ranks)] for weight in (embedding, head)
    )
    head_shards = [{}] * ranks if tied else head_shards
    return body, embedding, head, model, (*embedding_shards, {}, *params, *head_shards, {})


def batch_of_words() -> tuple[tuple[Tensor, Tensor], None]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(WORDS, (2, ROWS, 3), generator=generator)
    labels[:2, 1:] = -100
    return (tokens, labels), None


def spread_program(model: fpipe.Model, ranks: int) -> fpipe.Program:
    """Return a program with a stage of the body, a shard of the embedding and one of the head on each rank."""
    placement = [*range(ranks), 0, *range(ranks), *range(ranks), ranks - 1]
    order = fpipe.schedules.from_priority(lambda op, now: (op.kind == "F", op.microbatch), ranks, placement=placement)
    return fpipe.chain(fpipe.split(3), order, fpipe.merge(outputs=False))(fpipe.program(model))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_the_cross_entropy_of_the_whole_head(ranks: int, tied: bool):
    body, embedding, head, model, params = spread_model(ranks, tied)
    (tokens, labels), _ = batch = batch_of_words()
    program = spread_program(model, ranks)
    result = fpipe.build(program, model)(params, batch)
    embedding.requires_grad_(), head.requires_grad_()
    logits = body(F.embedding(tokens, embedding)) @ head.T
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    weight_grads = [torch.cat([stage["weight"] for stage in result.grads[:ranks]])]
    weight_grads += [] if tied else [torch.cat([stage["weight"] for stage in result.grads[-ranks - 1 : -1]])]
    for grad, weight in zip(weight_grads, (embedding, head), strict=False):
        torch.testing.assert_close(grad, weight.grad)
    body_grads = {name: grad for stage in result.grads[ranks + 1 : 2 * ranks + 1] for name, grad in stage.items()}
    for name, parameter in body.named_parameters():
        torch.testing.assert_close(body_grads[name], parameter.grad)
    assert fpipe.verify(program, model, params, batch).bitwise


def train_on_rank(rank: int) -> float:
    *_, model, params = spread_model(4, tied=True)
    program = spread_program(model, 4)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch_of_words()))
    result = step(local_part(program, rank, params), batch_of_words())
    alone = fpipe.build(program, model)(params, batch_of_words())
    is_equal = [
        torch.equal(leaf, expected[name])
        for stage, expected in zip(result.grads, alone.grads, strict=True)
        for name, leaf in (stage or {}).items()
    ]
    return len(is_equal) if all(is_equal) else float("nan")


def test_four_processes_give_the_bits_of_one(four: Processes):
    """Each has a shard of the tied weight and the bias of a block, and the first one the shared weight of blocks."""
    assert four.run(train_on_rank) == [3, 2, 2, 2]


@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_word_makes_the_loss_nan(side: int):
    """In shards such a token has no row, and such a label no logit: both would silently count as zeros."""
    *_, model, params = spread_model(2, tied=False)
    inputs, _ = batch_of_words()
    step = fpipe.build(spread_program(model, 2), model)
    assert step(params, (inputs, None)).loss.isfinite()
    inputs[side][5, 2] = WORDS
    assert step(params, (inputs, None)).loss.isnan()


LABELLED = fpipe.from_module(
    nn.Linear(WIDTH, WIDTH), 1, loss=F.mse_loss, batch=(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
)[0]
WITH_LOSS = fpipe.Model((fpipe.Stage(lambda p, x: (x, x.sum()), aux_loss=True),), None, ("batch",))
test_refusals = refusals(
    globals(),
    """
fpipe.spread_vocabulary(LABELLED, 3, vocabulary=2)
    ValueError: ranks=3 shards of 2 words: each has at least one.
fpipe.spread_vocabulary(LABELLED, 2, vocabulary=2, tied=True)
    ValueError: tied=True needs tokens=, for the embedding that the head is tied to.
fpipe.spread_vocabulary(WITH_LOSS, 2, vocabulary=2)
    ValueError: the last stage gives the hidden states alone; found a loss next to them.
""",
)
