"""Compute the answer to compare with: plain autograd, one microbatch after the other, no program anywhere.

It shares with the runtimes how a batch is cut into microbatches and joined, and how a stage is called, and nothing that
computes a gradient: an error in one of them is not in both. Every stage reads an alias of what another stage wrote, and
its own alias of each parameter, so that what one stage adds up inside is added up before it meets other stages. The
order of all other sums is said in `over_parts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from fpipe.limits import whole
from fpipe.meaning.optimizers.optimizer_state import Rate, initial_states, rates_of, words_of
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.over_parts import Joined, OverReplicas, Sliced, over_parts
from fpipe.meaning.single_device.params_and_state import (
    batches_of,
    check_all_state,
    check_batch,
    check_params,
    refuse_spread,
    refuse_unloaded,
    refuse_wanted_gradients,
    rows_of_each,
    streams,
)
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import of_one, training_loop
from fpipe.model import Model, the_model
from fpipe.transforms.update import words_of_update


def reference(
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any] | list[tuple[Any, Any]],
    *_spread: Any,
    microbatches: int = 1,
    slices: int = 1,
    state: Sequence[Any] | None = None,
    key: int | Sequence[int] | None = None,
    input_grads: bool = False,
    replicas: int | tuple[int, int] = 1,
    rule: str | type[Any] | None = None,
    steps: int = 1,
    stale: int | Literal["stash"] = 0,
    clip: float | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    opt: Sequence[Any] | None = None,
    lr: Rate | Sequence[Rate] | None = None,
    **settings: Any,
) -> Result:
    """Loss, gradients and outputs of a model by plain autograd; with a `rule`, training steps with torch.optim.

    Args:
        model: stages and a loss.
        params: one pytree of tensors per stage.
        batch: (inputs, target), pytrees whose leaves have rows in dim 0; or a list of them, cut already.
        microbatches: how many parts the batch is cut into; losses and gradients are added in their order. The uses of
            a tied leaf are summed after that, by stage.
        slices: how many slices the sequences (dim 1) of each part are cut into; each stage hands its carry from one to
            the next, and a backward goes from the last slice back.
        state: one pytree per stage, for models with module state.
        key: an int, for models with random numbers; of several training steps a list of them.
        input_grads: whether the gradients of the inputs are wanted too.
        replicas: how many equal parts the batch's rows are cut into first, each of which then has the `microbatches`:
            loss and gradients of each part are added up, then those of all, in their order. With a pair (m, n) there
            are m times n, of which each n add up first. The state is the first's.
        rule, clip, groups, settings: as for `update`: parameters are updated behind the gradients.
        steps: how many training steps; `batch` is then a list with the batch of each.
        stale: by how many steps the parameters are behind that gradients are taken of, as for `fpipe.steps`.
        opt, lr: the optimizer's state, that before the first step by default, and the learning rate, or one a step.

    Returns:
        A `Result` with loss, grads, outputs, losses and state, aux and input_grads; with a rule also params, opt and
        norm. Of several steps the first ones and norm are tuples with one for each.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> result = fpipe.reference(model, ({"w": torch.tensor(3.0)},), batch, microbatches=2)
    >>> result.loss.item(), result.grads[0]["w"].item()
    (22.5, 15.0)
    """
    refuse_spread(_spread, "reference(model, params, {})")
    for word, given in (("microbatches", microbatches), ("slices", slices)):
        whole(word, given)
    count, within = counted_replicas(replicas)
    check_params(the_model(model), params)
    check_all_state(model, state, "reference")
    refuse_unloaded(batch, params, state)

    def plain(read: Sequence[Any], own: Any, state: Any, key: int | None, scale: Tensor | None) -> Result:
        presplit = isinstance(own, list)
        own, cuts = _cut(own, microbatches, count, model)
        if not input_grads:
            refuse_wanted_gradients(own[0], "input_grads=True")
        joined = Joined(inputs=own[0] if input_grads else None, cut="stream" if presplit else None)
        sliced, added_by = Sliced(slices), OverReplicas(within=within)
        return over_parts(
            model, read, cuts, count, state=state, key=key, scale=scale, sliced=sliced, joined=joined, added_by=added_by
        )

    if rule is None:
        return plain(params, batch, state, one_key(key), None)
    words = words_of(words_of_update(rule, clip, groups, settings))
    keys: list[Any] = [*key] if isinstance(key, Sequence) else [key] * steps
    if len(keys) != steps:
        raise ValueError(f"key is one whole number, or a list of {steps}, one for each step; found {len(keys)}.")
    delays = range(len(params))[::-1] if stale == "stash" else [stale] * len(params)
    trained = training_loop(
        model,
        params,
        batches_of(batch, steps) if whole("steps", steps) > 1 else [batch],
        plain,
        words,
        rates=rates_of(lr, steps, words),
        keys=keys,
        opt=initial_states(words, params) if opt is None else opt,
        state=state,
        behind=lambda step, stage: delays[stage],
    )
    return trained if steps > 1 else of_one(trained)


def _cut(batch: Any, microbatches: int, replicas: int, model: Model) -> tuple[Any, list[tuple[Any, int]]]:
    """A batch, and the microbatches of each replica with their rows; of one that is cut already two streams."""
    if not isinstance(batch, list):
        check_batch(batch)
        each = parts_of_replicas(batch, replicas, model)
        return batch, [cut(own, index, microbatches) for own in each for index in range(microbatches)]
    pairs: list[Any] = batch
    if not pairs:
        raise ValueError("the batch is a list of pairs (inputs, target), cut already; found an empty list.")
    if replicas > 1:
        raise ValueError("a list is of one replica's microbatches; hand in the whole batch with replicas=.")
    taken = streams(pairs, len(pairs))
    return taken, [*zip(zip(*taken, strict=True), rows_of_each(taken), strict=True)]


def one_key(key: Any) -> int | None:
    """The key of one training step."""
    if isinstance(key, list | tuple):
        raise ValueError(f"key is a whole number; of one training step there are no several, found {key!r}.")
    return key


def counted_replicas(replicas: Any) -> tuple[int, int]:
    """How many replicas there are, and how many of them add up first."""
    if not isinstance(replicas, tuple):
        return whole("replicas", replicas), replicas
    if len(replicas) != 2:
        raise ValueError(f"replicas is a number, or a pair of which the second add up first; found {replicas!r}.")
    across, within = (whole("a number of replicas", one) for one in replicas)
    return across * within, within


def parts_of_replicas(batch: Any, replicas: int, model: Model, spec: Any = None) -> list[Any]:
    """The rows of each replica, as views."""
    if replicas == 1:
        return [batch]
    parts = [cut(batch, number, replicas, spec) for number in range(replicas)]
    if model.reduction != "count" and len({size for _, size in parts}) > 1:
        raise ValueError(f"{replicas} replicas, whose losses are means, have to have equally many of the batch's rows.")
    return [part for part, _ in parts]
