"""Make a model from pure functions: check what each stage takes and which leaves are tied, and refuse what is no stage.

[f0, f1, f2]        --> from_functions -->        Model(stages, loss, inputs, ties)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fpipe.model import MAY_ASK, Model, Reduction, Source, Stage, normalise_inputs


def from_functions(
    fns: Sequence[Callable[..., Any] | Stage],
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    inputs: Sequence[Source | tuple[Source, ...]] | None = None,
    ties: Sequence[Sequence[tuple[int, str]]] = (),
    reduction: Reduction = "mean",
    aux: bool = False,
    aux_losses: Sequence[int] = (),
) -> Model:
    """A model from pure functions, one per stage.

    Args:
        fns: `f(params, x) -> y`, or `f(params, x, *, microbatch)` for one that wants the microbatch's number, or
            `f(params, x, *, carry) -> (y, carry)` for one that runs on slices of a sequence: it takes what the slice
            before handed on, None for the first. A `Stage`, such as `fpipe.exchange` makes, is taken as it is.
        loss: `loss(y, target)` gives a 0-d tensor, or (total, count) with reduction="count"; None: the last stage does.
        inputs: what each stage takes as x: the number of an earlier stage, "batch", or a tuple of these for a tuple of
            values. None is a chain. In a tuple `(stage, which)` is one of several outputs of a stage, which returns the
            tuple of them: each is a value of its own and travels to its readers alone.
        ties: groups of leaves that are one, as in `((0, "e"), (3, "e"))`: it lives where named first, in the earliest
            stage, and the params of the others come without it.
        reduction: how the losses of microbatches make one: "mean" by rows, "sum", or "count".
        aux: whether the loss returns `(loss, aux)`, with "count" `((total, count), aux)`: any pytree of metrics. They
            are handed back detached, as `Result.aux`.
        aux_losses: the stages that return `(y, loss)`, such as a load balance of experts: a loss that is added to the
            model's, weighted as it is in a microbatch. Its gradient starts in that stage's own backward.

    Raises:
        ValueError: any of these that does not say what it should; the stage is named.

    >>> import fpipe
    >>> model = fpipe.from_functions([lambda p, x: x @ p["w"], lambda p, x: x.tanh()], loss=lambda y, t: (y - t).mean())
    >>> len(model.stages), model.inputs
    (2, ('batch', 0))
    """
    if callable(fns) or not isinstance(fns, Sequence):
        raise TypeError(f"from_functions takes a list of functions, one per stage; found {type(fns).__name__}.")
    taken = normalise_inputs(inputs, len(fns))
    if not isinstance(aux_losses, Collection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"aux_losses lists stages, as in [1]; found {type(aux_losses).__name__}.")
    for odd in (stage for stage in aux_losses if stage not in range(len(fns))):
        raise ValueError(f"aux_losses names stage {odd!r}; the stages are 0 to {len(fns) - 1}.")
    if aux and loss is None:
        raise ValueError("aux=True says what loss= returns, which is missing.")
    stages = tuple(
        fn
        if isinstance(fn, Stage)
        else Stage(fn, _asks(number, fn), aux_loss=number in aux_losses, name=getattr(fn, "__name__", ""))
        for number, fn in enumerate(fns)
    )
    if "torch.nn" in sys.modules:  # whoever has a module that computes with parameters of its own has torch
        from fpipe.meaning.purity.attributes import modules_of
        from fpipe.meaning.purity.fingerprint import Fingerprint, refuse_hooked

        functions = [stage.forward for stage in stages]
        for path, module in (one for fn in functions for one in modules_of(fn)):
            refuse_hooked(path, module)
        held = Fingerprint([*functions, loss])
    else:
        held = None
    return Model(stages, loss, taken, _normalise_ties(ties, len(fns)), reduction, aux, held=held)


def _asks(number: int, fn: Callable[..., Any]) -> frozenset[str]:
    """The keyword-only names a stage function asks for; refused if it is not f(params, x, *, ...)."""
    who = f"stage {number} ({getattr(fn, '__name__', type(fn).__name__)})"
    if not callable(fn) or hasattr(fn, "named_parameters"):
        kind = "a module; use from_sequential" if callable(fn) else type(fn).__name__
        raise ValueError(f"stage {number} is a function f(params, x), found {kind}.")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some functions written in C do not tell
        return frozenset()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in places)
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if needed > 2 or (len(places) < 2 and not many):
        found = ", ".join(p.name for p in places)
        raise ValueError(f"{who} takes ({found}); a stage is f(params, x), its x one pytree and never spread.")
    given = getattr(fn, "keywords", {})  # what functools.partial has filled in
    asked = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}
    for name, parameter in asked.items():
        if name not in MAY_ASK and parameter.default is parameter.empty:
            words = "state, key, microbatch and carry"
            raise ValueError(f"{who} asks for {name!r}; a stage can ask for {words}, and nothing else.")
    return frozenset(asked) & MAY_ASK


def _normalise_ties(ties: Sequence[Sequence[tuple[int, str]]], n: int) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Groups of tied leaves, checked: each in stages of its own, the earliest first, no leaf in two groups."""
    shape = "ties is a list of groups of (stage, leaf), as in [((0, 'e'), (3, 'e'))]"
    if not isinstance(ties, Collection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{shape}; found {type(ties).__name__}.")
    groups: list[tuple[tuple[int, str], ...]] = []
    seen: set[tuple[int, str]] = set()
    for found in ties:
        if not isinstance(found, Sequence) or not all(  # pyright: ignore[reportUnnecessaryIsInstance]
            isinstance(member, Sequence) and len(member) == 2 and type(member[0]) is int for member in found
        ):
            raise ValueError(f"{shape}; found the group {found!r}.")
        group = tuple((stage, leaf) for stage, leaf in found)
        stages = [stage for stage, _ in group]
        if len(group) < 2:
            raise ValueError(f"a tie is between leaves of at least two stages, found {group}.")
        for member in group:
            if not 0 <= member[0] < n:
                raise ValueError(f"the tie {group} names stage {member[0]}; the stages are 0 to {n - 1}.")
            if stages.count(member[0]) > 1:
                raise ValueError(
                    f"the tie {group} names stage {member[0]} twice; inside one stage, use one leaf twice."
                )
            if member in seen:
                raise ValueError(
                    f"leaf {member[1]!r} of stage {member[0]} is in two ties; put all of its uses in one group."
                )
        if stages[0] != min(stages):
            raise ValueError(
                f"the tie {group} names stage {stages[0]} first; the leaf lives in the earliest, {min(stages)}."
            )
        seen.update(group)
        groups.append(group)
    return tuple(groups)
