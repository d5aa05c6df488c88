"""Read a program as memory: the bytes of every value, and the most each rank holds, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fpipe.graphs.ambient import Untraceable
from fpipe.graphs.graph import Fact
from fpipe.memory import Account
from fpipe.models import Model
from fpipe.program import Program, Value
from fpipe.runtimes.book import Storages
from fpipe.runtimes.local import Prepared
from fpipe.runtimes.shapes import Plain


@dataclass(frozen=True)
class Sizes:
    """Bytes of a program's values for one model and one batch.

    Attributes:
        bytes: for each value the bytes of the distinct storages it lies in, those of params and batch aside.
        peak: for each rank the most bytes it holds: values from where they are written to where they are read last.
    """

    bytes: Mapping[Value, int]
    peak: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"rank {rank}: {size / 2**20:.2f} MiB at most" for rank, size in enumerate(self.peak)]
        largest = sorted(self.bytes.items(), key=lambda item: -item[1])[:8]
        return "\n".join([*lines, *(f"{value}: {size / 2**20:.2f} MiB" for value, size in largest)])


def sizes(
    program: Program, model: Model, params: Sequence[Any], batch: tuple[Any, Any], *, state: Sequence[Any] | None = None
) -> Sizes:
    """What a step would hold, from shapes alone: nothing is computed.

    Args:
        program: what to do, in which order.
        model: the stages it is about.
        params, batch, state: as a step takes them; tensors may be on the meta device.

    Returns:
        `Sizes`; `build(..., record=True)` counts the same peaks while it runs.

    Raises:
        ValueError: a stage that cannot be traced, with the reason.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    >>> model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> batch = torch.empty(1024, 256, device="meta"), torch.empty(1024, 1, device="meta")
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    >>> found = fpipe.sizes(program, model, params, batch)
    >>> found.bytes[fpipe.Value("y", 0, 0)]  # 256 rows, 256 wide, 4 bytes each
    262144
    """
    try:
        lowered = Prepared(program, model, params, batch, state, None, Plain())
    except Untraceable as error:
        raise ValueError(f"the sizes of this program's values are not known before it runs: {error}") from error
    things = lowered.things
    account = Account(program.ranks, lowered.given)
    for call in lowered.calls:
        account.note(call.ops[0].rank, [(value, _storages(things[value].leaves)) for value in call.written], call.dead)
    found = {value: _storages(thing.leaves) for value, thing in things.items()}
    own = {value: sum(size for s, size in each.items() if s not in lowered.given) for value, each in found.items()}
    return Sizes({value: size for value, size in own.items() if value in program.writer}, tuple(account.peak))


def _storages(leaves: Iterable[Any]) -> Storages:
    return {leaf.storage: leaf.bytes for leaf in leaves if isinstance(leaf, Fact)}
