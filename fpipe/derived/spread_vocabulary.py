"""Spread the vocabulary over ranks: the head becomes a stage for each shard of its weight, and a stage that joins them.

hidden --> scores of shard 0 --+
       --> scores of shard 1 --+--> cross entropy of each position --> mean
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fpipe.limits import check_whole_number
from fpipe.model import Model, Source, Stage, require_model

if TYPE_CHECKING:
    from torch import Tensor


def spread_vocabulary(
    model: Model, ranks: int, *, vocabulary: int, labels: Callable[[Any], Any] = itemgetter(1)
) -> Model:
    """Append a head without bias and its mean cross entropy, in a stage for each of `ranks` shards of the vocabulary.

    A forward of a shard computes the logits of its words and hands on two numbers for each position: the logsumexp of
    these logits, and the logit of the label if it is there. The last stage joins them. So the forward and backward of a
    shard are the passes S and T of the paper with its one barrier (algorithm 2), and no rank has all logits.

    Args:
        model: its last stage gives the hidden states; its loss is replaced. It stays as it is.
        ranks: how many shards, the first ones a word longer where the division has a rest.
        vocabulary: the number of words.
        labels: from the inputs of a microbatch to the labels; by default their second entry. Every label counts.

    Returns:
        A model whose params have another `{"weight": weight}` for each shard, rows of the head's weight, and `{}`.

    Raises:
        ValueError: more shards than words; a model whose loss is no mean.

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
    if model.reduction != "mean":
        raise ValueError(f"the loss of a spread vocabulary is a mean; found reduction={model.reduction!r}.")
    hidden_stage = len(model.stages) - 1
    # The shards are those of torch.tensor_split.
    starts = [rank * (vocabulary // ranks) + min(rank, vocabulary % ranks) for rank in range(ranks)]
    shards = [Stage(_Shard(start, labels)) for start in starts]
    sources: list[Source | tuple[Source, ...]] = [(hidden_stage, "batch")] * ranks
    return replace(
        model,
        stages=(*model.stages, *shards, Stage(_cross_entropy)),
        inputs=(*model.inputs, *sources, tuple(range(hidden_stage + 1, hidden_stage + 1 + ranks))),
        loss=_mean_loss,
        labels=None,
        params_spec=None,
        report=model.derived_report(f"a vocabulary of {vocabulary} words in {ranks} shards"),
    )


@dataclass(frozen=True)
class _Shard:
    """Scores of the words from `start` on."""

    start: int
    labels: Callable[[Any], Any]

    def __call__(self, params: Any, sources: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
        hidden, inputs = sources
        # logits: (..., words of the shard); all else has a number for each position.
        logits, index = hidden @ params["weight"].T, self.labels(inputs) - self.start
        # A label of another shard reads word 0, and its logit counts as 0.
        is_local = (index >= 0) & (index < logits.shape[-1])
        logit = logits.gather(-1, (index * is_local)[..., None])[..., 0]
        return logits.logsumexp(-1), logit * is_local


def _cross_entropy(params: Any, scores: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    import torch

    # One shard alone has each label, and 0 comes from the others. logsumexp of logsumexps is that of all words.
    sums, logits = zip(*scores, strict=True)
    return torch.stack(sums).logsumexp(0) - torch.stack(logits).sum(0)


def _mean_loss(losses: Tensor, target: Any) -> Tensor:
    return losses.mean()
