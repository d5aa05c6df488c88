"""Random programs and models, as recipes: what is drawn is a value that says what it is, what is run is built from it.

A `Plan` is a pipeline: sizes, what each stage takes, what is recomputed, which backwards are split, and the table of a
random legal order. A `Net` is a model: a row of stage recipes, a reduction and a dtype. Both print as they are called,
so that a shrunk failure can be read, and copied into a test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from fpipe.models import Model, Source
from fpipe.program import Program

Takes = tuple[Source | tuple[Source, ...], ...]


# Sizes and graphs


@st.composite
def dags(draw: st.DrawFn, stages: st.SearchStrategy[int] | None = None) -> Takes:
    """What each stage takes: the batch or earlier stages, in any number; every stage but the last has a reader."""
    n = draw(st.integers(1, 5) if stages is None else stages)
    found: list[list[Source]] = [["batch"]]
    for stage in range(1, n):
        earlier: list[Source] = ["batch", *range(stage)]
        found.append(draw(st.lists(st.sampled_from(earlier[::-1]), min_size=1, max_size=3)))
    for stage in range(n - 1):
        if not any(stage in taken for taken in found):
            found[stage + 1].append(stage)
    return tuple(taken[0] if len(taken) == 1 else tuple(taken) for taken in found)


@dataclass(frozen=True)
class Plan:
    """A pipeline for a graph of stages: `takes`, `microbatches`, stages recomputed, backwards split, and a table."""

    takes: Takes
    microbatches: int
    recomputed: frozenset[tuple[int, int]]
    halved: frozenset[tuple[int, int]]
    table: tuple[tuple[str, ...], ...]

    @property
    def base(self) -> Program:
        return fpipe.program(len(self.takes), inputs=self.takes)

    @property
    def split(self) -> Callable[[Program], Program]:
        return fpipe.split(self.microbatches)

    @property
    def transforms(self) -> dict[str, Callable[[Program], Program]]:
        """The four that commute."""
        return {
            "checkpoint": fpipe.checkpoint(lambda stage, microbatch: (stage, microbatch) in self.recomputed),
            "split_backward": fpipe.split_backward(lambda stage, microbatch: (stage, microbatch) in self.halved),
            "schedule": fpipe.schedules.from_table(self.table),
            "merge": fpipe.merge(),
        }

    @property
    def program(self) -> Program:
        return fpipe.chain(self.split, *self.transforms.values())(self.base)


@st.composite
def placements(draw: st.DrawFn, stages: int) -> list[int]:
    """A rank for each stage; every rank has one."""
    found = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    ranks = sorted(set(found))
    return [ranks.index(rank) for rank in found]


@st.composite
def legal_tables(draw: st.DrawFn, program: Program, replicas: bool = False) -> tuple[tuple[str, ...], ...]:
    """A random placement, and for each rank a random order of its ops that all orders together allow.

    With replicas, each stage is placed anew for each microbatch.
    """
    times = program.microbatches if replicas else 1
    placement = draw(placements(program.stages * times))
    cells = {op.cell: op for op in program.ops if op.kind in "FBIW"}
    writer = {value: op for op in program.ops for value in op.writes}
    after: dict[str, set[str]] = {cell: set() for cell in cells}
    for cell, op in cells.items():
        todo = list(op.reads)
        while todo:
            source = writer.get(todo.pop())
            if source is not None and source.cell in cells:
                after[cell].add(source.cell)
            elif source is not None:
                todo += source.reads
    wish = {cell: number for number, cell in enumerate(draw(st.permutations(list(cells))))}
    rows: list[list[str]] = [[] for _ in range(1 + max(placement))]
    left = dict(after)
    while left:
        cell = min((cell for cell, needs in left.items() if not needs & left.keys()), key=wish.__getitem__)
        op = cells[cell]
        rows[placement[(op.stage or 0) * times + (op.microbatch or 0) % times]].append(cell)
        del left[cell]
    return tuple(map(tuple, rows))


@st.composite
def plans(draw: st.DrawFn, takes: st.SearchStrategy[Takes] | None = None, microbatches: int = 4) -> Plan:
    """A random graph, sizes, policies, and a random legal order over a random placement."""
    graph = draw(takes if takes is not None else dags())
    m = draw(st.integers(1, microbatches))
    every = list(itertools.product(range(len(graph)), range(m)))
    some = st.frozensets(st.sampled_from(every))
    recomputed, halved = draw(some), draw(some)
    split = fpipe.chain(fpipe.split(m), fpipe.split_backward(lambda stage, index: (stage, index) in halved))
    table = draw(legal_tables(split(fpipe.program(len(graph), inputs=graph))))
    return Plan(graph, m, recomputed, halved, table)


# Models


Body = Literal["linear", "mlp", "attention", "conv", "dict", "plain", "tied", "twice"]


@dataclass(frozen=True)
class Net:
    """A model over rows of four numbers: what each stage does and takes, how its losses reduce, and in which dtype."""

    bodies: tuple[Body, ...]
    takes: Takes
    reduction: Literal["mean", "sum", "count"] = "mean"
    dtype: Literal["float32", "float64"] = "float32"

    @property
    def ties(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """The leaf "e" of all stages that say "tied" is one."""
        group = tuple((stage, "e") for stage, body in enumerate(self.bodies) if body == "tied")
        return (group,) if len(group) > 1 else ()

    @property
    def model(self) -> Model:
        return fpipe.from_functions(
            [BODIES[body] for body in self.bodies],
            LOSSES[self.reduction],
            inputs=self.takes,
            ties=self.ties,
            reduction=self.reduction,
        )

    def params(self, seed: int = 0) -> tuple[dict[str, Tensor], ...]:
        make = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        made: list[dict[str, Tensor]] = []
        for stage, body in enumerate(self.bodies):
            shapes = SHAPES[body]
            if any(stage == reader and number for group in self.ties for number, (reader, _) in enumerate(group)):
                shapes = {name: shape for name, shape in shapes.items() if name != "e"}
            made.append({name: torch.randn(shape, generator=make, dtype=dtype) * 0.5 for name, shape in shapes.items()})
        return tuple(made)

    def batch(self, rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        return torch.randn(rows, 4, generator=make, dtype=dtype), torch.randn(rows, 4, generator=make, dtype=dtype)


def gathered(x: Any) -> Tensor:
    """One tensor from whatever a stage takes: a tensor, the dict of a "dict" stage, a tuple of these."""
    if isinstance(x, tuple):
        parts = [gathered(part) for part in x]
        return sum(parts[1:], parts[0])
    if isinstance(x, dict):
        return (x["h"] * x["gate"]).masked_fill(x["ids"].unsqueeze(1) == 0, 0.5)
    return x


def linear(p: dict[str, Tensor], x: Any) -> Tensor:
    return gathered(x) @ p["w"] + p["b"]


def mlp(p: dict[str, Tensor], x: Any) -> Tensor:
    h = gathered(x)
    return h + torch.relu(h @ p["w"] + p["b"]) @ p["v"]


def attention(p: dict[str, Tensor], x: Any) -> Tensor:
    q, k, v = (gathered(x) @ p["qkv"]).chunk(3, dim=1)
    q, k, v = (part.view(-1, 2, 2) for part in (q, k, v))
    return (torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v).reshape(-1, 4) @ p["o"]


def conv(p: dict[str, Tensor], x: Any) -> Tensor:
    return torch.nn.functional.conv1d(gathered(x).unsqueeze(1), p["w"], p["b"], padding=1).tanh().mean(1)


def many(p: dict[str, Tensor], x: Any) -> dict[str, Any]:
    h = gathered(x)
    return {"h": h @ p["w"], "nothing": None, "ids": h.argmax(1), "gate": torch.sigmoid(h + p["b"])}


def plain(p: dict[str, Tensor], x: Any) -> Tensor:
    return torch.tanh(gathered(x))


def tied(p: dict[str, Tensor], x: Any) -> Tensor:
    return torch.tanh(gathered(x) @ p["e"]) + p["b"]


def twice(p: dict[str, Tensor], x: Any) -> Tensor:
    return torch.tanh(gathered(x) @ p["w"]) @ p["v"] @ p["w"]


BODIES: dict[Body, Callable[..., Any]] = {
    "linear": linear,
    "mlp": mlp,
    "attention": attention,
    "conv": conv,
    "dict": many,
    "plain": plain,
    "tied": tied,
    "twice": twice,
}
SHAPES: dict[Body, dict[str, tuple[int, ...]]] = {
    "linear": {"w": (4, 4), "b": (4,)},
    "mlp": {"w": (4, 6), "b": (6,), "v": (6, 4)},
    "attention": {"qkv": (4, 12), "o": (4, 4)},
    "conv": {"w": (3, 1, 3), "b": (3,)},
    "dict": {"w": (4, 4), "b": (4,), "unused": (2,)},
    "plain": {},
    "tied": {"e": (4, 4), "b": (4,)},
    "twice": {"w": (4, 4), "v": (4, 4)},
}


def _squares(y: Any, target: Tensor) -> Tensor:
    return (gathered(y) - target).square().sum(1)


def _counted(y: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target[:, 0] > -0.5
    return (_squares(y, target) * kept).sum(), kept.sum()


LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "mean": lambda y, target: _squares(y, target).mean(),
    "sum": lambda y, target: _squares(y, target).sum(),
    "count": _counted,
}


@st.composite
def nets(draw: st.DrawFn, stages: st.SearchStrategy[int] | None = None) -> Net:
    """A random model: depth, stage functions, skips, ties, reduction, dtype."""
    takes = draw(dags(stages))
    bodies = draw(st.lists(st.sampled_from(list(BODIES)), min_size=len(takes), max_size=len(takes)))
    return Net(
        tuple(bodies),
        takes,
        draw(st.sampled_from(["mean", "sum", "count"])),
        draw(st.sampled_from(["float32", "float64"])),
    )


def tiny(takes: Takes) -> Net:
    """The smallest model of a graph: where the program is the matter, not the model."""
    return Net(("linear",) * len(takes), takes)


# Autograd, in plain sight


def plain_autograd(
    net: Net, params: Sequence[dict[str, Tensor]], batch: tuple[Tensor, Tensor], microbatches: int = 1
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Loss and gradients as anyone would write them: one graph over the whole model for each microbatch, `.backward()`.

    Where bits are the matter, floating point sums have an order: a stage reads an alias of what another wrote, and the
    uses of a tied leaf are leaves of their own, added by stage at the end.
    """
    full = [dict(stage) for stage in params]
    for group in net.ties:
        owner, name = group[0]
        for reader, leaf in group[1:]:
            full[reader][leaf] = params[owner][name]
    own = [{name: leaf.clone().requires_grad_() for name, leaf in stage.items()} for stage in full]
    rows, loss, count = len(batch[0]), None, torch.tensor(0)
    for x, target in zip(*(leaf.tensor_split(microbatches) for leaf in batch), strict=True):
        values: list[Any] = []
        for stage, body in enumerate(net.bodies):
            takes = net.takes[stage]
            taken = [
                x if source == "batch" else aliased(values[source])
                for source in (takes if isinstance(takes, tuple) else (takes,))
            ]
            values.append(BODIES[body](own[stage], tuple(taken) if isinstance(takes, tuple) else taken[0]))
        each = LOSSES[net.reduction](values[-1], target)
        if net.reduction == "count":
            each, counted = each
            count = count + counted
        share = each * (len(x) / rows) if net.reduction == "mean" else each
        if share.requires_grad:
            share.backward()
        loss = share.detach() if loss is None else loss + share.detach()
    assert loss is not None
    by = (count if count != 0 else 1) if net.reduction == "count" else None
    grads = [
        {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in stage.items()}
        for stage in own
    ]
    for group in net.ties:
        owner, name = group[0]
        uses = [grads[reader].pop(leaf) for reader, leaf in sorted(group)]
        grads[owner][name] = sum(uses[1:], uses[0])
    if by is not None:
        loss, grads = loss / by, [{name: leaf / by for name, leaf in stage.items()} for stage in grads]
    return loss, grads


def aliased(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: aliased(leaf) for name, leaf in value.items()}
    return value.view_as(value) if isinstance(value, Tensor) else value
