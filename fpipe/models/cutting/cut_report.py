"""Say what a net that was cut has where: the modules of each stage, its share of the work, and what travels to it.

stage 1: blocks.2, blocks.3
    1,168 parameters (4.6 KiB), 33% of the operations
    takes float32[8, 5, 8] (1.2 KiB) of stage 0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor, fx

from fpipe.models.cutting.cut_net import CutNet
from fpipe.models.cutting.place_cuts import costs_of
from fpipe.torch_private.fx import example_number


class CutReport:
    """Printed when it is asked for: counting operations takes a while. `words` are the modules of each stage."""

    def __init__(self, cut: CutNet, words: Sequence[str]) -> None:
        self.cut, self.words = cut, words

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy needs no graph of the whole net

    def __str__(self) -> str:
        costs = [sum(costs_of([*self._computed(stage)])) for stage in range(len(self.words))]
        return "\n".join(
            line for stage, cost in enumerate(costs) for line in self._lines(stage, cost / max(1, sum(costs)))
        )

    def _lines(self, stage: int, share: float) -> Iterable[str]:
        marked, part = self.cut.marked, self.cut.cut.parts[stage]
        yield f"stage {stage}: {self.words[stage]}"
        leaves = [self.cut.tensors.now(name) for name in self.cut.owned[stage]]
        size = _size(sum(leaf.numel() * leaf.element_size() for leaf in leaves))
        words = [f"{sum(leaf.numel() for leaf in leaves):,} parameters ({size})"]
        words += [f"{share:.0%} of the operations"] if share else []
        written = self.cut.stages[stage].holds
        words += [f"{len(written)} buffers of state"] if written else []
        ties = (group for group in self.cut.ties for at, _ in group[1:] if at == stage)
        words += [f"{name} is that of stage {owner}" for (owner, name), *_ in ties]
        yield f"    {', '.join(words)}"
        batch = [f"{_shape(node)} of the batch" for node in part.batch]
        taken = [f"{_shape(node)} ({_size(_bytes(node))}) of stage {marked.stage_of[node]}" for node in part.received]
        yield f"    takes {', '.join((*batch, *taken))}"
        earlier = {node for before in range(stage) for node in self._computed(before)}
        again = sum(node in earlier and _bytes(node) > 0 for node in self._computed(stage))
        if again:
            yield f"    makes {again} tensors again, which follow from sizes and constants"

    def _computed(self, stage: int) -> Iterable[fx.Node]:
        """The operations that a stage runs."""
        part = self.cut.cut.parts[stage]
        return (node for node in part.nodes if node.op == "call_function" and node not in part.received)


def _shape(node: fx.Node) -> str:
    """The dtype and the sizes that a value has in the example."""
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}{[*map(example_number, value.shape)]}"


def _bytes(node: fx.Node) -> int:
    """Those of a tensor; 0 of anything else."""
    value = node.meta.get("val")
    return math.prod(map(example_number, value.shape)) * value.element_size() if isinstance(value, Tensor) else 0


def _size(count: int) -> str:
    """Bytes in the largest unit of which there is one.

    >>> _size(900), _size(1200), _size(3 << 30)
    ('900 B', '1.2 KiB', '3.0 GiB')
    """
    power = min(3, (max(1, count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB'][power]}" if power else f"{count} B"
