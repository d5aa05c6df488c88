"""Make a model from pure functions, after checking the arguments of each stage and the groups of tied leaves.

[f0, f1, f2]        --> from_functions -->        Model(stages, loss, inputs, ties)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fpipe.model import STAGE_KEYWORDS, Model, Reduction, Source, Stage, normalise_inputs, without_loss


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
    """Return a model of pure functions, one per stage.

    Args:
        fns: `f(params, x) -> y`; or `f(params, x, *, microbatch)` for a stage that needs the microbatch's index; or
            `f(params, x, *, carry) -> (y, carry)` for one that runs on slices of a sequence and reads the carry of the
            slice before, None for the first. A `Stage`, such as `fpipe.exchange` makes, is used unchanged.
        loss: `loss(y, target)` returns a 0-d tensor, or (total, count) with reduction="count"; None: the last stage
            returns it.
        inputs: what each stage takes as x: the index of an earlier stage, "batch", or a tuple of these for a tuple of
            values. None is a chain. In a tuple, `(stage, port)` is one of several outputs of a stage that returns a
            tuple: each is a separate value, sent to its readers only.
        ties: groups of leaves that are one parameter, as in `((0, "e"), (3, "e"))`. The first, in the earliest stage,
            owns it; the params of the others do not have it.
        reduction: how the losses of microbatches make one: "mean" by rows, "sum", or "count".
        aux: whether the loss returns `(loss, aux)`, with "count" `((total, count), aux)`, where aux is a pytree of
            metrics. They are returned detached, as `Result.aux`.
        aux_losses: the stages that return `(y, loss)`, such as a load balance of experts. That loss is added to the
            model's, with the microbatch's weight. Its gradient starts in that stage's own backward.

    Raises:
        ValueError: one of these is malformed; the error names the stage.

    >>> import fpipe
    >>> model = fpipe.from_functions([lambda p, x: x @ p["w"], lambda p, x: x.tanh()], loss=lambda y, t: (y - t).mean())
    >>> len(model.stages), model.inputs
    (2, ('batch', 0))
    """
    sources = normalise_inputs(inputs, len(fns))
    for misfit in (stage for stage in aux_losses if stage not in range(len(fns))):
        raise ValueError(f"aux_losses names stage {misfit!r}; the stages are 0 to {len(fns) - 1}.")
    if aux and loss in (None, without_loss):
        raise ValueError("aux=True says what loss= returns, which is missing.")
    stages = tuple(
        fn
        if isinstance(fn, Stage)
        else Stage(fn, _asked_names(number, fn), aux_loss=number in aux_losses, name=getattr(fn, "__name__", ""))
        for number, fn in enumerate(fns)
    )
    # Stages of plain functions need no torch, whose import takes long. Who closes over a module has imported it.
    if "torch.nn" in sys.modules:
        from fpipe.meaning.purity.attributes import modules_of
        from fpipe.meaning.purity.fingerprint import Fingerprint, refuse_parallel_wrapper

        functions = [stage.forward for stage in stages]
        for path, module in (named_module for fn in functions for named_module in modules_of(fn)):
            refuse_parallel_wrapper(path, module)
        fingerprint = Fingerprint([*functions, loss])
    else:
        fingerprint = None
    return Model(stages, loss, sources, _normalise_ties(ties, len(fns)), reduction, aux, fingerprint=fingerprint)


def _asked_names(number: int, fn: Callable[..., Any]) -> frozenset[str]:
    """Return the keyword-only names that a stage function asks for; raise ValueError if it is no f(params, x)."""
    label = f"stage {number} ({getattr(fn, '__name__', type(fn).__name__)})"
    if not callable(fn) or hasattr(fn, "named_parameters"):
        kind = "a module; use from_sequential" if callable(fn) else type(fn).__name__
        raise ValueError(f"stage {number} is a function f(params, x), found {kind}.")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return frozenset()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A stage may have more positional parameters than (params, x) only if they have defaults.
    needed = sum(p.default is p.empty for p in positional)
    has_varargs = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if needed > 2 or (len(positional) < 2 and not has_varargs):
        parameter_names = ", ".join(p.name for p in positional)
        raise ValueError(
            f"{label} takes ({parameter_names}); a stage is f(params, x), its x one pytree and never spread."
        )
    filled = getattr(fn, "keywords", {})  # arguments that functools.partial has filled in
    keyword_only = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in filled}
    for name, parameter in keyword_only.items():
        if name not in STAGE_KEYWORDS and parameter.default is parameter.empty:
            offered = "state, key, microbatch and carry"
            raise ValueError(f"{label} asks for {name!r}; a stage can ask for {offered}, and nothing else.")
    return frozenset(keyword_only) & STAGE_KEYWORDS


def _normalise_ties(
    ties: Sequence[Sequence[tuple[int, str]]], stage_count: int
) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Return the groups of tied leaves, checked: distinct stages, the earliest first, no leaf in two groups."""
    # The order of a group says who owns the leaf, so a group that starts at a later stage is refused, not sorted.
    groups: list[tuple[tuple[int, str], ...]] = []
    tied_leaves: set[tuple[int, str]] = set()
    for members in ties:
        group = tuple((stage, leaf) for stage, leaf in members)
        stages = [stage for stage, _ in group]
        if len(group) < 2:
            raise ValueError(f"a tie joins leaves of several stages, found {group}.")
        for member in group:
            if not 0 <= member[0] < stage_count:
                raise ValueError(f"the tie {group} names stage {member[0]}; the stages are 0 to {stage_count - 1}.")
            if stages.count(member[0]) > 1:
                raise ValueError(
                    f"the tie {group} names stage {member[0]} twice; inside one stage, use one leaf twice."
                )
            if member in tied_leaves:
                raise ValueError(
                    f"leaf {member[1]!r} of stage {member[0]} is in two ties; put all of its uses in one group."
                )
        if stages[0] != min(stages):
            raise ValueError(
                f"the tie {group} names stage {stages[0]} first; the leaf lives in the earliest, {min(stages)}."
            )
        tied_leaves.update(group)
        groups.append(group)
    return tuple(groups)
