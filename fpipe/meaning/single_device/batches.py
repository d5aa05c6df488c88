"""Refuse what is no batch, and take one that is cut already as streams of microbatches.

step(params, (inputs, target))        --> inputs, target

[(x0, t0), (x1, t1)]        --> streams -->        [x0, x1], [t0, t1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.sharded import refuse_sharded
from fpipe.meaning.single_device.microbatch import BATCH, named, rows

_AS_A_PAIR = " If the list is [inputs, target], as a DataLoader gives it, hand in tuple(batch)."


def refuse_spread(more: Sequence[Any], call: str) -> None:
    """A TypeError for what is handed in after the batch, as in `step(params, x, y)`."""
    if more and callable(more[0]) and not isinstance(more[0], Tensor):
        raise TypeError("a step calls no closure: it computes loss, gradients and update itself; leave it out.")
    if more:
        raise TypeError(
            f"a batch is one pair: {call.format('(inputs, target)')}; found {len(more) + 1} arguments after params. "
            "State and key are handed in by name."
        )


def check_batch(batch: Any) -> None:
    """A batch is a pair of pytrees with tensors of torch's."""
    if not isinstance(batch, tuple) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
        more = (
            "" if not isinstance(batch, list) else f" What is cut already goes to split(m, presplit=True).{_AS_A_PAIR}"
        )
        raise ValueError(f"a batch is a pair (inputs, target), found {type(batch).__name__}.{more}")
    for place, leaf in named(batch, BATCH):
        refuse_sharded([leaf], place)
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__array__") and getattr(leaf, "ndim", 1):
            found = f"{type(leaf).__module__.split('.')[0]}.{type(leaf).__name__}"
            raise TypeError(
                f"{place} is a {found}, which is no tensor of torch's: hand in torch.from_numpy(...) of it, which "
                "shares its memory, or torch.as_tensor(...)."
            )


def refuse_meta(way_out: str, **given: Any) -> None:
    """A ValueError for a tensor without values."""
    for word, one in given.items():
        for place, leaf in tree.paths(one):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise ValueError(f"{word}{place} is on meta, without values: {way_out}.")


def refuse_unloaded(batch: Any, params: Any, state: Any) -> None:
    """A ValueError for parameters, or a state, without values where the batch has some: they would be read as nan."""
    if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree.leaves(batch)):
        refuse_meta("fpipe.load_params or fpipe.init_params gives it some", params=params)
        refuse_meta("fpipe.load_params(.., of=state) or fpipe.init_params(.., of=state) gives it some", state=state)


def batches_of(batch: Any, steps: int) -> Sequence[Any]:
    """The batches of several training steps."""
    if not isinstance(batch, list) or len(batch) != steps:
        found = f"a list of {len(batch)}" if isinstance(batch, list) else type(batch).__name__
        raise ValueError(f"a program of {steps} training steps takes a list of {steps} batches, found {found}.")
    return batch


def streams(batch: Any, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """A batch that is cut already as two streams, the inputs and the targets of its microbatches.

    It comes so, or as a list of pairs.

    >>> streams([("x0", "t0"), ("x1", "t1")], 2)
    (['x0', 'x1'], ['t0', 't1'])
    """
    if isinstance(batch, list):
        pairs: list[Any] = batch
        odd = next((at for at, pair in enumerate(pairs) if not isinstance(pair, tuple) or len(pair) != 2), None)  # pyright: ignore[reportUnknownArgumentType]
        if odd is not None:
            more = _AS_A_PAIR if len(pairs) == 2 else ""
            raise ValueError(f"microbatch {odd} is a pair (inputs, target), found {type(pairs[odd]).__name__}.{more}")
        batch = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    check_batch(batch)
    for word, stream in zip(BATCH, batch, strict=True):
        if not isinstance(stream, tuple | list):
            raise ValueError(
                f"{word} is a list of {count} microbatches, since they are cut already (presplit=True); found "
                f"{type(stream).__name__}."
            )
    inputs, target = batch
    if len(inputs) != len(target):
        raise ValueError(f"inputs has {len(inputs)} microbatches, target has {len(target)}; none of them is left out.")
    if len(inputs) != count:
        raise ValueError(f"the batch has {len(inputs)} microbatches, the program has {count}.")
    return inputs, target


def rows_of_each(batch: tuple[Sequence[Any], Sequence[Any]], spec: Any = None) -> tuple[int, ...]:
    """The rows of each microbatch of two streams."""
    pairs = enumerate(zip(*batch, strict=True))
    words = " of microbatch ".join
    return tuple(rows(pair, spec, what=(words(("inputs", f"{at}")), words(("target", f"{at}")))) for at, pair in pairs)
