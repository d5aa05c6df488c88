"""Compute the reference for every step: plain autograd, one microbatch after another, without a program.

It shares with the runtimes how a batch is cut and joined and how a stage is called, and nothing that computes a
gradient, so that an error in one of them is not in both. Every stage reads an alias of what another stage wrote, and
its own alias of each parameter: so the uses of a value inside a stage are summed before those of other stages are
added. `microbatch_sums.py` fixes the order of all other sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal

from torch import Tensor

from fpipe.limits import check_whole_number
from fpipe.meaning.optimizers.optimizer_state import Rate, initial_states, rates_by_step, update_settings
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.microbatch_sums import JoinSpecs, ReplicaOrder, SequenceSlicing, sum_over_microbatches
from fpipe.meaning.single_device.params_and_state import (
    as_streams,
    check_all_state,
    check_batch,
    check_batches,
    check_params,
    refuse_extra_arguments,
    refuse_lost_gradients,
    refuse_unloaded,
    rows_per_microbatch,
)
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import training_loop, unwrap_single_step
from fpipe.model import Model, require_loss
from fpipe.transforms.update import update_options


def reference(
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any] | list[tuple[Any, Any]],
    *_extra: Any,
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
    """Return loss, gradients and outputs of a model by plain autograd; with a `rule`, train with torch.optim.

    Args:
        model: stages and a loss.
        params: one pytree of tensors per stage.
        batch: (inputs, target), pytrees whose leaves have rows in dim 0; or a list of such pairs, one a microbatch.
        microbatches: into how many the batch is cut; losses and gradients are added in their order. The uses of a
            tied leaf are summed after that, by stage.
        slices: into how many the sequences (dim 1) of each microbatch are cut; each stage hands its carry from one to
            the next, and a backward goes from the last slice to the first.
        state: one pytree per stage, for models with module state.
        key: an int, for models with random numbers; of several training steps a list of them.
        input_grads: whether to return the gradients of the inputs too.
        replicas: into how many equal parts the rows are cut first, each with its `microbatches`. Loss and gradients
            are added within each replica, then over replicas, in their order. With a pair (m, n) there are m times n,
            of which each n add up first. The state is the first replica's.
        rule, clip, groups, settings: as for `update`: how parameters are updated after the gradients.
        steps: how many training steps; `batch` is then a list with the batch of each.
        stale: by how many steps the parameters that gradients are taken of are old, as for `fpipe.steps`.
        opt, lr: the optimizer's state (by default as before a first step), and the learning rate, or one a step.

    Returns:
        A `Result` with loss, grads, outputs, losses, state, aux and input_grads; with a rule also params, opt and norm.
        With several steps, all but state, params and opt are tuples with one for each step.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> result = fpipe.reference(model, ({"w": torch.tensor(3.0)},), batch, microbatches=2)
    >>> result.loss.item(), result.grads[0]["w"].item()
    (22.5, 15.0)
    """
    # 1. Check the arguments.
    refuse_extra_arguments(_extra, "reference(model, params, {})")
    for name, part_count in (("microbatches", microbatches), ("slices", slices)):
        check_whole_number(name, part_count)
    replica_count, inner_replicas = replica_counts(replicas)
    check_params(model, params)
    check_all_state(model, state, "reference")
    refuse_unloaded(batch, params, state)

    # 2. One step: loss and gradients of a batch.
    def accumulate(
        params_read: Sequence[Any], step_batch: Any, state: Any, key: int | None, scale: Tensor | None
    ) -> Result:
        """Return loss and gradients of a batch, summed over its microbatches, in all replicas."""
        is_presplit = isinstance(step_batch, list)
        step_batch, microbatch_rows = _cut(step_batch, microbatches, replica_count, model)
        refuse_lost_gradients(None if input_grads else step_batch[0], step_batch[1], "input_grads=True")
        join_specs = JoinSpecs(
            inputs_to_differentiate=step_batch[0] if input_grads else None, input_spec="stream" if is_presplit else None
        )
        slicing, replica_order = SequenceSlicing(slices), ReplicaOrder(inner_replicas=inner_replicas)
        return sum_over_microbatches(
            model,
            params_read,
            microbatch_rows,
            replica_count,
            state=state,
            key=key,
            scale=scale,
            slicing=slicing,
            join_specs=join_specs,
            replica_order=replica_order,
        )

    if rule is None:
        training = {"steps": steps != 1, "stale": stale != 0} | dict.fromkeys(settings, True)
        training |= {name: value is not None for name, value in {"clip": clip, "opt": opt, "lr": lr}.items()}
        for name in (name for name, is_passed in (training | {"groups": groups is not None}).items() if is_passed):
            similar_names = get_close_matches(name, signature(reference).parameters, n=1) if name in settings else ()
            hint = f"did you mean {similar_names[0]}=?" if similar_names else "it goes with a rule, such as AdamW."
            raise ValueError(f"without rule= reference takes no {name}=; {hint}")
        return accumulate(params, batch, state, single_key(key), None)
    # 3. Several steps, with an update behind each.
    require_loss(model, "there are no gradients to update by")
    update = update_settings(update_options(rule, clip, groups, settings))
    keys: list[Any] = [*key] if isinstance(key, Sequence) else [key] * steps
    if len(keys) != steps:
        raise ValueError(f"key is one whole number, or a list of {steps}, one for each step; found {len(keys)}.")
    # With "stash" (PipeDream) stage s of n reads parameters that are n - 1 - s steps old.
    delays = range(len(params))[::-1] if stale == "stash" else [stale] * len(params)
    result_per_step = training_loop(
        model,
        params,
        check_batches(batch, steps) if check_whole_number("steps", steps) > 1 else [batch],
        accumulate,
        update,
        rates=rates_by_step(lr, steps, update),
        keys=keys,
        opt=initial_states(update, params) if opt is None else opt,
        state=state,
        delay=lambda step, stage: delays[stage],
    )
    return result_per_step if steps > 1 else unwrap_single_step(result_per_step)


def _cut(batch: Any, microbatches: int, replicas: int, model: Model) -> tuple[Any, list[tuple[Any, int]]]:
    """Return the whole batch, and the microbatches of all replicas with their numbers of rows.

    If the batch is a list of microbatches, the whole batch is a pair of streams: all inputs and all targets.
    """
    if not isinstance(batch, list):
        check_batch(batch)
        replica_batches = split_over_replicas(batch, replicas, model)
        return batch, [
            cut(replica_batch, index, microbatches)
            for replica_batch in replica_batches
            for index in range(microbatches)
        ]
    pairs: list[Any] = batch
    if not pairs:
        raise ValueError("the batch is a list of pairs (inputs, target), cut already; found an empty list.")
    if replicas > 1:
        raise ValueError("a list is of one replica's microbatches; hand in the whole batch with replicas=.")
    input_and_target_streams = as_streams(pairs, len(pairs))
    return input_and_target_streams, [
        *zip(zip(*input_and_target_streams, strict=True), rows_per_microbatch(input_and_target_streams), strict=True)
    ]


def single_key(key: Any) -> int | None:
    """Return the key of a single training step, or raise ValueError for a list of keys."""
    if isinstance(key, list | tuple):
        raise ValueError(f"key is a whole number; of one training step there are no several, found {key!r}.")
    return key


def replica_counts(replicas: Any) -> tuple[int, int]:
    """Return the number of replicas, and the number of neighbours that add up first."""
    if not isinstance(replicas, tuple):
        return check_whole_number("replicas", replicas), replicas
    if len(replicas) != 2:
        raise ValueError(f"replicas is a number, or a pair of which the second add up first; found {replicas!r}.")
    outer, inner = (check_whole_number("a number of replicas", count) for count in replicas)
    return outer * inner, inner


def split_over_replicas(batch: Any, replicas: int, model: Model, spec: Any = None) -> list[Any]:
    """Return the rows of each replica, as views of the batch."""
    if replicas == 1:
        return [batch]
    parts = [cut(batch, number, replicas, spec) for number in range(replicas)]
    if model.reduction != "count" and len({size for _, size in parts}) > 1:
        raise ValueError(f"{replicas} replicas, whose losses are means, have to have equally many of the batch's rows.")
    return [part for part, _ in parts]
