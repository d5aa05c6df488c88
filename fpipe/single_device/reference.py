"""Compute the answer to compare with: plain autograd, one microbatch after the other, no program anywhere.

It shares with the runtimes how a batch is cut into microbatches and joined, and how a stage is called, and nothing that
computes a gradient: an error in one of them is not in both. Three rules fix its bits. Every
stage reads an alias of what another stage wrote, and its own alias of each parameter, so that what one stage adds up
inside is added up before it meets other stages. Parameter gradients are summed over microbatches in ascending order,
within each from the last slice of the sequence back. The uses of a tied leaf are summed after that, by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.purity.ambient import refuse_odd_modes
from fpipe.limits import whole
from fpipe.model import (
    Model,
    check_params,
    check_state,
    the_model,
    with_ties,
)
from fpipe.optimizers.op_words import words_of
from fpipe.optimizers.state import initial_states
from fpipe.program import Value
from fpipe.single_device.batches import batches_of, check_batch, refuse_spread, refuse_unloaded, rows_of_each, streams
from fpipe.single_device.joining import join, join_gradients, join_slices
from fpipe.single_device.microbatch import cut, cut_sequence
from fpipe.single_device.microbatch_graph import (
    MicrobatchGraph,
    See,
    added,
    aliases,
    detached,
    forward,
    gradients,
    leaf_of,
    readers_of,
    train,
)
from fpipe.single_device.result import Result
from fpipe.single_device.training_loop import of_one, training_loop
from fpipe.transforms.specs import Chunk
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
    lr: float | Sequence[float] | None = None,
    **settings: Any,
) -> Result:
    """Loss, gradients and outputs of a model by plain autograd; with a `rule`, training steps with torch.optim.

    Args:
        model: stages and a loss.
        params: one pytree of tensors per stage.
        batch: (inputs, target), pytrees whose leaves have rows in dim 0; or a list of them, cut already.
        microbatches: how many parts the batch is cut into; losses and gradients are added in their order.
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
    replicas_of = counted_replicas(replicas)
    check_params(the_model(model), params)
    check_all_state(model, state, "reference")
    refuse_unloaded(batch, params, state)
    if rule is None:
        return _plain(model, params, batch, microbatches, slices, state, one_key(key), input_grads, replicas_of)
    words = words_of(words_of_update(rule, clip, groups, settings))
    delays = range(len(params))[::-1] if stale == "stash" else [stale] * len(params)
    trained = training_loop(
        params,
        batches_of(batch, steps) if whole("steps", steps) > 1 else [batch],
        lambda read, own, now, one, _: _plain(
            model, read, own, microbatches, slices, now, one, False, replicas_of, False
        ),
        words,
        rates=[*lr] if isinstance(lr, Sequence) else [lr] * steps,
        keys=[*key] if isinstance(key, Sequence) else [key] * steps,
        opt=initial_states(words, params) if opt is None else opt,
        state=state,
        behind=lambda step, stage: delays[stage],
    )
    return trained if steps > 1 else of_one(trained)


def _plain(
    model: Model,
    params: Sequence[Any],
    batch: Any,
    microbatches: int,
    slices: int,
    state: Sequence[Any] | None,
    key: int | None,
    input_grads: bool,
    replicas: tuple[int, int],
    zeros: bool = True,
) -> Result:
    """Loss, gradients and outputs; without `zeros` None for a parameter that the loss does not depend on."""
    count, within = replicas
    presplit = isinstance(batch, list)
    if isinstance(batch, list):
        if not batch:
            raise ValueError("the batch is a list of pairs (inputs, target), cut already; found an empty list.")
        if count > 1:
            raise ValueError("a list is of one replica's microbatches; hand in the whole batch with replicas=.")
        batch = streams(batch, len(batch))
        cuts = [*zip(zip(*batch, strict=True), rows_of_each(batch), strict=True)]
    else:
        check_batch(batch)
        each = parts_of_replicas(batch, count, model)
        cuts = [cut(own, index, microbatches) for own in each for index in range(microbatches)]
    joined = Joined(inputs=batch[0] if input_grads else None, cut="stream" if presplit else None)
    sliced, added_by = Sliced(slices), OverReplicas(within=within)
    how: Any = {"sliced": sliced, "joined": joined, "added_by": added_by, "zeros": zeros}
    return over_parts(model, params, cuts, count, state=state, key=key, **how)


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


@dataclass(frozen=True)
class Sliced:
    """How sequences are cut: into how many slices, along which dim, and which leaves otherwise (`specs`, a pair)."""

    slices: int = 1
    dim: int = 1
    specs: tuple[Any, Any] = (None, None)
    row_specs: tuple[Any, Any] = (None, None)

    def of(self, part: tuple[Any, Any]) -> list[tuple[tuple[Any, Any], float]]:
        """The slices of a microbatch, each with its share of the target's length."""
        if self.slices == 1:
            return [(part, 1.0)]
        found: list[tuple[tuple[Any, Any], float]] = []
        for k in range(self.slices):
            (x, _), (target, share) = (
                cut_sequence(half, k, self.slices, self.dim, spec, row_spec=rows, what=what)
                for half, spec, rows, what in zip(part, self.specs, self.row_specs, ("inputs", "target"), strict=True)
            )
            found.append(((x, target), share))
        return found

    def joined(self, inputs: Any, parts: list[list[Any]]) -> list[Any]:
        """The gradients of a microbatch's inputs from those of its slices."""
        if not any(parts):
            return []
        return join_slices(inputs, parts, self.dim, self.specs[0], row_spec=self.row_specs[0])


@dataclass(frozen=True)
class Joined:
    """How what the microbatches gave is joined: outputs and auxiliary results by specs, or not ("stream"); gradients of
    the inputs if these are given, whole, with how they were cut ("stream": they came so)."""

    outputs: Any = None
    aux: Any = None
    inputs: Any = None
    cut: Any = None


@dataclass(frozen=True)
class OverReplicas:
    """How gradients are added over replicas: those of each microbatch before those of the next, or of all at once, and
    after which cast of each leaf; and how many replicas add up first, among themselves, if not all do."""

    by_microbatch: bool = False
    cast: Callable[[Any], Any] = detached
    within: int = 0


def check_all_state(model: Model, state: Sequence[Any] | None, call: str) -> None:
    """Every stage that has module state is handed it; `call` is what takes it."""
    reading = {n for n, stage in enumerate(model.stages) if stage.update is not None or "state" in stage.asks}
    check_state(model, state, reading, "this model", call)


def over_parts(
    model: Model,
    params: Sequence[Any],
    parts: Sequence[tuple[tuple[Any, Any], int]],
    replicas: int = 1,
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    sliced: Sliced | None = None,
    joined: Joined | None = None,
    see: See | None = None,
    added_by: OverReplicas | None = None,
    zeros: bool = True,
    scale: Tensor | None = None,
) -> Result:
    """Loss, gradients and outputs for a batch that is cut already: `parts` are the microbatches, each with rows, those
    of one replica after those of the other. A parameter that the loss does not depend on gets `zeros`, or None. `see`
    is handed what passes between stages, and each microbatch's gradients, by their names in a program. With a `scale`
    gradients, and they alone, are those of the loss times it."""
    sliced, joined, added_by = sliced or Sliced(), joined or Joined(), added_by or OverReplicas()
    refuse_odd_modes()
    whole = sum(size for _, size in parts)
    states: list[Any] = []
    kept: list[Any] = []  # of the first replica
    losses: list[Tensor] = []
    counts: list[Any] = []
    outputs: list[Any] = []
    extras: list[Any] = []
    shares: list[float] = []
    of_inputs: list[list[Any]] = []  # of each microbatch, the gradients of its inputs
    sums: list[Sums] = []
    each_loss: list[Tensor] = []
    many = len(parts) // replicas
    for index, (part, size) in enumerate(parts):
        if index % many == 0:
            kept = kept or states
            states = list(state) if state is not None else [None] * len(model.stages)
        carries: list[Any] = [None] * len(model.stages)
        graphs: list[MicrobatchGraph] = []
        weights: list[float] = []
        found: list[Any] = []
        for k, (piece, share) in enumerate(sliced.of(part)):
            own = [aliases(model, number, full, piece[0]) for number, full in enumerate(with_ties(model, params))]
            readers = readers_of(model, piece[0]) if joined.inputs is not None else {}
            weights.append(size / whole * share if sliced.slices > 1 else size / whole)
            taken = tree.tree_map(leaf_of, carries)
            place = (index, k if sliced.slices > 1 else None)
            between: dict[Value, list[Any]] = {}
            turn = (index % many * sliced.slices + k, many * sliced.slices)
            with torch.enable_grad():
                made = forward(model, own, readers, piece, states, taken, place, turn, key, see, between)
                each, count, aux, output, carries = made
                weighted = each * (weights[-1] if model.reduction == "mean" else 1.0)
                graphs.append(MicrobatchGraph(own, taken, _scaled(weighted, scale), carries, readers, place, between))
            _show_parts(see, model, piece, place)
            if index % many or k:
                each_loss[-1] = each_loss[-1] + weighted.detach()
            else:
                each_loss.append(weighted.detach())
            losses.append(each.detach())
            counts.append(count)
            extras.append(tree.tree_map(detached, aux))
            shares.append(weights[-1] * whole)
            found.append(tree.tree_map(detached, output))
        seeds: list[Tensor | None] = []  # what the slice after has for the leaves of the carries
        of_slices: list[list[Any]] = []
        if added_by.by_microbatch or index % many == 0:
            sums.append([])
        for graph in reversed(graphs):
            grads, seeds, inputs = gradients(model, graph, seeds, see)
            of_slices.insert(0, inputs)
            sums[-1] = _both(model, sums[-1], grads) if sums[-1] else grads
        outputs.append(join(found, weights, Chunk(sliced.dim)) if len(found) > 1 else found[0])
        of_inputs.append(of_slices[0] if len(found) == 1 else sliced.joined(part[0], of_slices))
    within = added_by.within or replicas
    loss = reduce(torch.add, [reduce(torch.add, each_loss[at : at + within]) for at in range(0, replicas, within)])
    first = within * (many if added_by.by_microbatch else 1)
    groups = [
        _over_replicas(model, params, sums[at : at + first], many, added_by, zeros) for at in range(0, len(sums), first)
    ]
    grads = reduce(partial(tree.tree_map, added), groups)
    input_grads = None if joined.inputs is None else _of_inputs(joined, of_inputs)
    if model.reduction == "count":
        total = sum(counts[1:], counts[0])
        divisor = total if total != 0 else 1
        loss = loss / divisor
        grads, input_grads = tree.tree_map(partial(_divided, divisor), (grads, input_grads))
    return Result(
        loss=loss,
        grads=grads,
        outputs=_whole(outputs, [size for _, size in parts], joined.outputs, "outputs"),
        aux=_whole(extras, shares, joined.aux, "aux") if model.aux else None,
        input_grads=input_grads,
        losses=tuple(losses),
        state=None if state is None else tuple(kept or states),
    )


Sums = list[list["Tensor | None"]]
"""Per stage, for each leaf it reads, its gradient over some microbatches."""


def _both(model: Model, one: Sums, other: Sums) -> Sums:
    both = _one_after_the_other if model.per_example else added
    return [list(map(both, *pair)) for pair in zip(one, other, strict=True)]


def _over_replicas(
    model: Model, params: Sequence[Any], sums: Sequence[Sums], microbatches: int, added_by: OverReplicas, zeros: bool
) -> tuple[Any, ...]:
    """Gradients over replicas that add up among themselves. What several stages share is added up in a replica
    first."""
    add, cast = partial(_both, model), partial(tree.tree_map, added_by.cast)
    many = microbatches if added_by.by_microbatch else 1
    collected = partial(_collected, model, params, zeros=zeros)
    whole = [cast(collected(reduce(add, sums[at : at + many]))) for at in range(0, len(sums), many)]
    grads = reduce(partial(tree.tree_map, added), whole)
    if many == 1:
        return grads
    apart = collected(reduce(add, [reduce(add, map(cast, sums[at::many])) for at in range(many)]))
    for leaf in (uses[0] for uses in model.tied_uses):
        apart[leaf.owner][leaf.name] = grads[leaf.owner][leaf.name]
    return apart


def _show_parts(see: See | None, model: Model, piece: tuple[Any, Any], place: tuple[int, int | None]) -> None:
    """Show what SPLIT writes: the part of the inputs for each stage that takes them, and that of the target."""
    for number in range(len(model.stages)) if see else ():
        for word, part in zip("xt", piece, strict=True):
            assert see is not None
            see(Value(word, number, *place), part)


def _one_after_the_other(rows: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Gradients of single rows, and those of the next."""
    return None if rows is None or more is None else torch.cat([rows, more])


def _scaled(loss: Tensor, scale: Tensor | None) -> Tensor:
    return loss if scale is None else loss * scale


def _divided(divisor: Any, grad: Tensor | None) -> Tensor | None:
    return grad if grad is None else grad / divisor


def _whole(parts: list[Any], weights: Sequence[float], spec: Any, what: str) -> Any:
    return tuple(parts) if spec == "stream" else join(parts, weights, spec, what=what)


def _of_inputs(joined: Joined, parts: list[list[Any]]) -> Any:
    """The gradients of the inputs, put together as these were cut."""
    containers = tree.flatten(joined.inputs)[1]
    if joined.cut == "stream":
        return tree.unflatten(containers, [leaf for part in parts for leaf in part])
    return tree.unflatten(containers, join_gradients(joined.inputs, parts, joined.cut))


def _collected(
    model: Model, params: Sequence[Any], sums: list[list[Tensor | None]], *, zeros: bool = True
) -> tuple[Any, ...]:
    """Gradients in the shape of params: a tied leaf's uses are added by stage and go to its owner."""
    full = [
        tree.unflatten(tree.flatten(stage)[1], grads)
        for stage, grads in zip(with_ties(model, params), sums, strict=True)
    ]
    for uses in model.tied_uses:
        each = [full[leaf.stage].pop(leaf.name) for leaf in sorted(uses)]
        full[uses[0].owner][uses[0].name] = reduce(partial(tree.tree_map, added), each)
    made: list[Any] = []
    for number, (own, grads) in enumerate(zip(params, full, strict=True)):
        leaves, containers = tree.flatten(own)
        filled = [zeros and one and not model.per_example for one in train(model, number, own)]
        each = zip(leaves, tree.leaves(tree.like(own, grads)), filled, strict=True)
        made.append(tree.unflatten(containers, [torch.zeros_like(a) if b is None and one else b for a, b, one in each]))
    return tuple(made)
