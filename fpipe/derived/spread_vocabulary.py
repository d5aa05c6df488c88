"""Spread the vocabulary over ranks: head and embedding become a stage for each shard, and a stage that joins them.

tokens --> rows of shard 0 --+              hidden --> scores of shard 0 --+
       --> rows of shard 1 --+--> sum              --> scores of shard 1 --+--> cross entropy of each position
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any

from fpipe.limits import check_whole_number
from fpipe.model import Model, Source, Stage, require_model

if TYPE_CHECKING:
    from torch import Tensor


def spread_vocabulary(
    model: Model,
    ranks: int,
    *,
    vocabulary: int,
    labels: Callable[[Any], Any] = itemgetter(1),
    tokens: Callable[[Any], Any] | None = None,
    tied: bool = False,
    ignore_index: int = -100,
) -> Model:
    """Append a head without bias and its cross entropy, in a stage for each of `ranks` shards of the vocabulary.

    A forward of a shard computes the logits of its words and hands on two numbers for each position: the logsumexp of
    these logits, and the logit of the label if it is there. The last stage joins them. So the forward and backward of a
    shard are the passes S and T of the paper's algorithm 1, with its two barriers, and no rank has all logits. The loss
    is the mean over all labels of a batch, as with `reduction="count"`.

    Args:
        model: its last stage gives the hidden states; its loss, if it has one, is replaced. It stays as it is.
        ranks: how many shards, the first ones a word longer where the division has a rest.
        vocabulary: the number of words.
        labels: from the inputs of a microbatch to the labels; by default their second entry. A label that is no word
            makes the loss NaN.
        tokens: from the inputs to the tokens, to spread an embedding too, in front of the model: its stages read the
            embedded tokens in place of the batch. A token that is no word has a row of NaN.
        tied: whether the head has the weight of the embedding.
        ignore_index: the label that does not count.

    Returns:
        A model whose params have another `{"weight": weight}` for each shard, rows of the head's weight, and `{}`; with
        `tokens` first those of the embedding, and `{}`. Where they are tied, the head's shards have `{}`.

    Raises:
        ValueError: more shards than words; `tied` without `tokens`; a last stage with a loss next to its output.

    Source: Yeung et al. 2024 (Vocabulary Parallelism, arXiv 2411.05288), section 4.

    >>> import fpipe, torch
    >>> body = fpipe.from_functions([lambda p, inputs: p["w"][inputs[0]]], lambda y, _: y.mean())
    >>> model = fpipe.spread_vocabulary(body, 2, vocabulary=10)
    >>> params = {"w": torch.randn(10, 4)}, {"weight": torch.randn(5, 4)}, {"weight": torch.randn(5, 4)}, {}
    >>> tokens, labels = torch.randint(10, (2, 6, 3))
    >>> table = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 \\n 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1"
    >>> steps = fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(table), fpipe.merge(outputs=False))
    >>> program = steps(fpipe.program(model))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0  .   .  1B0 0B0 0F1 1F1  .   .  1B1 0B1
    rank 1 |  .  2F0 3F0 3B0 2B0  .   .  2F1 3F1 3B1 2B1  .
    >>> fpipe.verify(program, model, params, ((tokens, labels), labels)).bitwise
    True
    """
    require_model(model)
    if check_whole_number("ranks", ranks) > check_whole_number("vocabulary", vocabulary, maximum=math.inf):
        raise ValueError(f"ranks={ranks} shards of {vocabulary} words: each has at least one.")
    if tied and tokens is None:
        raise ValueError("tied=True needs tokens=, for the embedding that the head is tied to.")
    if model.stages[-1].aux_loss:
        raise ValueError("the last stage gives the hidden states alone; found a loss next to them.")
    # The shards are those of torch.tensor_split.
    starts = [rank * (vocabulary // ranks) + min(rank, vocabulary % ranks) for rank in range(ranks)]
    embedding: list[Stage] = []
    embedding_inputs: list[Source | tuple[Source, ...]] = []
    if tokens is not None:
        embedding = [
            *(Stage(_EmbeddingShard(start, tokens)) for start in starts),
            Stage(_SumOfRows(tokens, vocabulary)),
        ]
        embedding_inputs = [*["batch"] * ranks, (*range(ranks), "batch")]  # pyright: ignore[reportAssignmentType]
    offset, hidden_stage = len(embedding), len(embedding) + len(model.stages) - 1
    # The body's stages move behind the embedding, and with them all that names a stage by its number.
    body_inputs = [
        tuple(_shift(source, offset) for source in stage_input)
        if isinstance(stage_input, tuple)
        else _shift(stage_input, offset)
        for stage_input in model.inputs
    ]
    shard_stages = range(hidden_stage + 1, hidden_stage + 1 + ranks)
    ties = [tuple((stage + offset, name) for stage, name in group) for group in model.ties]
    # A tied weight lives with the embedding; its gradient is the sum of both uses.
    ties += [((shard, "weight"), (stage, "weight")) for shard, stage in enumerate(shard_stages)] if tied else []
    head = [
        *(Stage(_HeadShard(start, labels)) for start in starts),
        Stage(_CrossEntropy(labels, vocabulary, ignore_index)),
    ]
    return replace(
        model,
        stages=(*embedding, *model.stages, *head),
        inputs=(
            *embedding_inputs,
            *body_inputs,
            *[(hidden_stage, "batch")] * ranks,
            (*shard_stages, "batch"),
        ),
        ties=tuple(ties),
        frozen=frozenset((stage + offset, name) for stage, name in model.frozen),
        loss=_total_and_count,
        reduction="count",
        aux=False,
        labels=None,
        params_spec=None,
        function=None,
        report=model.derived_report(f"a vocabulary of {vocabulary} words in {ranks} shards"),
    )


def _shift(source: Source, offset: int) -> Source:
    """Return a source in a model behind `offset` stages; the last of these writes the body's batch."""
    if not offset:
        return source
    if isinstance(source, tuple):
        return source[0] + offset, source[1]
    return offset - 1 if source == "batch" else source + offset


@dataclass(frozen=True)
class _EmbeddingShard:
    """The embedding of the words from `start` on; tokens that are other words have rows of zeros."""

    start: int
    tokens: Callable[[Any], Any]

    def __call__(self, params: Any, inputs: Any) -> Tensor:
        from torch.nn.functional import embedding

        index, is_local = _local_index(self.tokens(inputs) - self.start, len(params["weight"]))
        return embedding(index, params["weight"]) * is_local[..., None]


@dataclass(frozen=True)
class _SumOfRows:
    """The embedding of the whole vocabulary: one shard has the row of a token, and zeros come from the others."""

    tokens: Callable[[Any], Any]
    vocabulary: int

    def __call__(self, params: Any, sources: tuple[Any, ...]) -> Tensor:
        *rows, inputs = sources
        # torch raises IndexError for such a token; a trace cannot, and zeros would pass for a row.
        _, is_word = _local_index(self.tokens(inputs), self.vocabulary)
        return reduce(add, rows).masked_fill(~is_word[..., None], math.nan)


@dataclass(frozen=True)
class _HeadShard:
    """Scores of the words from `start` on."""

    start: int
    labels: Callable[[Any], Any]

    def __call__(self, params: Any, sources: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
        hidden, inputs = sources
        # logits: (..., words of the shard); all else has a number for each position.
        logits = hidden @ params["weight"].T
        index, is_local = _local_index(self.labels(inputs) - self.start, logits.shape[-1])
        return logits.logsumexp(-1), logits.gather(-1, index[..., None])[..., 0] * is_local


@dataclass(frozen=True)
class _CrossEntropy:
    """The cross entropy of each position from the scores of all shards, and whether its label counts."""

    labels: Callable[[Any], Any]
    vocabulary: int
    ignore_index: int

    def __call__(self, params: Any, sources: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        import torch

        *scores, inputs = sources
        # One shard alone has each label, and 0 comes from the others. logsumexp of logsumexps is that of all words.
        sums, logits = zip(*scores, strict=True)
        losses = torch.stack(sums).logsumexp(0) - torch.stack(logits).sum(0)
        labels = self.labels(inputs)
        # No gradient flows behind ignored labels: masked_fill gives zeros, where products with infinity are NaN.
        _, is_word = _local_index(labels, self.vocabulary)
        is_counted = labels != self.ignore_index
        return losses.masked_fill(~is_word, math.nan).masked_fill(~is_counted, 0), is_counted


def _local_index(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return an index into a shard, 0 for the words of others, and where words are the shard's."""
    is_local = (index >= 0) & (index < size)
    return index * is_local, is_local


def _total_and_count(outputs: tuple[Tensor, Tensor], target: Any) -> tuple[Tensor, Tensor]:
    losses, is_counted = outputs
    return losses.sum(), is_counted.sum()
