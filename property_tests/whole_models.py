"""Random whole models as people write them, and a step of them written out by hand, with torch alone.

A recipe says the layers of each stage, what skips what, by which door it enters fpipe (`DOORS`) and what is frozen; it
makes the model, its parameters and a batch. Between layers goes a tensor of numbers
for each row, position and channel, or a dict of several with integers, a mask, a number and None; of that dict is the
batch, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fpipe
from fpipe import tree
from property_tests.bits import sum_of_uses
from property_tests.stage_functions import AROUND, Within, all_words, sized
from property_tests.stages import LAYERS
from property_tests.strategies import aliased
from tests.toys import Toy

WIDTH = 4
Front = Literal["modules", "functions", "loss", "net"]
DOORS: dict[str, Front] = {
    "from_sequential": "modules",
    "from_functions": "functions",
    "from_loss": "loss",
    "from_module": "net",
}
ONE_SHAPE = ("loss", "net")
"""The front doors that trace the whole: of a batch only the number of rows may vary."""
Reduction = Literal["mean", "sum", "count"]


def gathered(x: Any) -> Tensor:
    """One tensor of whatever a layer takes."""
    if isinstance(x, tuple):
        first, *more = map(gathered, x)
        return sum(more, first)
    if not isinstance(x, dict):
        return x
    h = (x["h"] * x["gate"]).masked_fill((x["ids"] == 0).unsqueeze(-1), 0.5) * x["scale"]
    return h + x["table"] + x["across"].t().unsqueeze(-1) if "table" in x else h


class Word(nn.Module):
    """A layer of the grammar as a module; its parameters are its own, or (the one called e) that of others too."""

    def __init__(self, word: str, e: nn.Parameter | None = None) -> None:
        super().__init__()
        self.word = word
        for name, shape in LAYERS[word].shapes.items():
            own = nn.Parameter(torch.randn(sized(shape, WIDTH)) * 0.5)
            self.register_parameter(name, e if name == "e" and e is not None else own)

    def forward(self, x: Any) -> Tensor:
        layer = LAYERS[self.word]
        return layer.apply({name: getattr(self, name) for name in layer.shapes}, gathered(x))


class Around(nn.Module):
    """Layers with something around them."""

    def __init__(self, how: str, inner: Sequence[nn.Module]) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Sequential(*inner)

    def forward(self, x: Any) -> Tensor:
        return AROUND[self.how](self.inner, gathered(x))


def normed(own: Any, x: Any) -> Tensor:
    """Over the channels."""
    return own.norm(gathered(x).transpose(1, 2)).transpose(1, 2)


def many(own: Any, x: Any) -> dict[str, Any]:
    """Several outputs in a dict: with a gradient, integers, a number, None; and integers that pick rows of a table."""
    h = gathered(x)
    ids = h.argmax(-1)
    return {"h": h @ own.weight, "nothing": None, "ids": ids, "gate": own.table(ids).sigmoid(), "scale": 2}


def inner(own: Any, x: Any) -> Tensor:
    return own.inner(gathered(x) * 1.5)


def counting(own: Any, x: Any) -> Tensor:
    """Counts its calls in place and binds a running mean of what it is given anew, in training. It reads neither."""
    h = gathered(x)
    if own.training:
        own.count += 1
        own.mean = own.mean.lerp(h.detach().mean((0, 1)), 0.1)
    return torch.sin(h)


def centred(own: Any, x: Any) -> Tensor:
    """Subtracts a running mean, which it updates first in training."""
    h = gathered(x)
    if own.training:
        own.mean.lerp_(h.detach().mean((0, 1)), 0.5)
    return h - own.mean


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)


NORMS = {"norm", "mean norm"}
"""The layers that remember statistics of batches."""
ORDERED = {"centred", "spectral norm"}
"""The layers whose output reads what they have written."""
WRITE = {*NORMS, *ORDERED, "counting"}
"""The layers that write buffers."""


def layers(stages: Sequence[Sequence[str | Within]]) -> dict[str, nn.Module]:
    """All layers by name; those called "tied" have one matrix, those called "reused" are one module."""
    shared, reused = weight(), Word("linear")
    make: dict[str, Callable[[], nn.Module]] = {
        **{word: partial(Word, word) for word in ("linear", "twice", "unused", "attention_in_time", "relu_")},
        "tied": partial(Word, "tied", shared),
        "reused": lambda: reused,
        "norm": lambda: Toy(normed, norm=nn.BatchNorm1d(WIDTH)),
        "mean norm": lambda: Toy(normed, norm=nn.BatchNorm1d(WIDTH, momentum=None)),
        "forgetful norm": lambda: Toy(normed, norm=nn.BatchNorm1d(WIDTH, track_running_stats=False)),
        "spectral norm": lambda: Toy(inner, inner=parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        "counting": lambda: Toy(counting, count=torch.zeros((), dtype=torch.long), mean=torch.zeros(WIDTH)),
        "centred": lambda: Toy(centred, mean=torch.zeros(WIDTH)),
        "dropout": lambda: Toy(inner, inner=nn.Dropout()),
        "many": lambda: Toy(many, weight=weight(), table=nn.Embedding(WIDTH, WIDTH)),
    }

    def made(one: str | Within) -> nn.Module:
        return make[one]() if isinstance(one, str) else Around(one.how, [*map(made, one.layers)])

    return {f"{stage}_{at}": made(one) for stage, kinds in enumerate(stages) for at, one in enumerate(kinds)}


KINDS = (
    *("tied", "linear", "twice", "tied", "unused", "reused", "reused", "tied", "attention_in_time"),
    *("norm", "mean norm", "forgetful norm", "spectral norm", "dropout", "dropout", "relu_", "many", "many", "norm"),
    *("counting", "counting", "centred"),
)


class Skip(NamedTuple):
    """A value that stage `into` takes beside its input: the batch (out = -1), or of stage `out` its output, or what
    enters its last layer (`inside`)."""

    out: int
    inside: bool
    into: int

    @property
    def name(self) -> str:
        return f"{self.out}{' inside' * self.inside}"


def squares(y: Any, target: Tensor) -> Tensor:
    return (gathered(y) - target).square().sum(-1)


def judged(reduction: Reduction, y: Any, target: Tensor) -> tuple[Any, dict[str, Any]]:
    """The loss, and metrics beside it."""
    each, kept = squares(y, target), target[..., 0] > 0
    loss = {"mean": each.mean, "sum": each.sum, "count": lambda: ((each * kept).sum(), kept.sum())}[reduction]()
    return loss, {"rows": target.shape[0], "size": gathered(y).abs().mean()}


@dataclass(frozen=True)
class Whole:
    """A model: the layers of each stage, what skips what, losses of middle stages, stages that ask for the number of
    their microbatch, layers that do not train (frozen, or constants of a module), and in which words it is said."""

    stages: tuple[tuple[str | Within, ...], ...]
    skips: tuple[Skip, ...] = ()
    front: Front = "modules"
    reduction: Reduction = "mean"
    losses: tuple[int, ...] = ()
    numbered: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    constant: bool = False
    training: bool = True
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = 0

    @cached_property
    def net(self) -> dict[str, nn.Module]:
        """The layers, by stage and place."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            made = layers(self.stages)
        for name, layer in made.items():
            layer.to(getattr(torch, self.dtype)).train(self.training)
            if self.constant and name in self.frozen:
                layer.requires_grad_(False)
        return made

    def of(self, stage: int) -> dict[str, nn.Module]:
        """The layers of one stage."""
        return {name: layer for name, layer in self.net.items() if name.split("_")[0] == str(stage)}

    def taken(self, stage: int) -> list[Skip]:
        return [skip for skip in self.skips if skip.into == stage]

    def aside(self, stage: int) -> list[str]:
        """What a stage gives beside its output."""
        return [*dict.fromkeys(skip.name for skip in self.skips if skip.out == stage and skip.inside)]

    def through(self, x: Any, call: Callable[..., tuple[Any, list[Any]]]) -> Any:
        """The output where stages are called with what they take, and give their output and what they put aside."""
        values: dict[tuple[int, bool], Any] = {(-1, False): x}
        for n in range(len(self.stages)):
            y, aside = call(n, *(values[skip[:2]] for skip in [Skip(n - 1, False, n), *self.taken(n)]))
            values |= {(n, False): y, **({(n, True): aside[0]} if aside else {})}
        return values[len(self.stages) - 1, False]

    @property
    def layers(self) -> list[str]:
        return [word for kinds in self.stages for word in all_words(kinds)]

    @property
    def kinds(self) -> set[str]:
        return {*self.layers}

    @property
    def draws(self) -> bool:
        """Whether a step wants a key."""
        return self.training and "dropout" in self.kinds

    @property
    def remembers(self) -> bool:
        """Whether a step has a state."""
        return self.training and not self.kinds.isdisjoint(WRITE)

    @property
    def in_order(self) -> bool:
        """Whether forwards read what those before have remembered; a function is taken to."""
        return self.remembers and (self.front == "functions" or not self.kinds.isdisjoint(ORDERED))

    @property
    def still(self) -> list[str]:
        """The names of parameters that do not train; all of a tied one, if one of its layers does not."""
        whole = nn.ModuleDict(self.net)
        parts = [f"{name}." for name in self.frozen]
        named = [*whole.named_parameters(remove_duplicate=False)]
        fixed = {id(leaf) for name, leaf in named if any(map(name.startswith, parts))}
        return [name for name, leaf in named if id(leaf) in fixed]

    def made(self, example: Any = None) -> tuple[fpipe.Model, Any, Any]:
        """The model, its parameters, and its state (None without). A loss function wants an example of a batch."""
        if self.front == "loss":
            return *self.as_loss(example), None
        if self.front == "net":
            return self.as_net(example)
        made = self.as_modules() if self.front == "modules" else self.as_functions()
        return made if self.remembers else (*made[:2], None)

    def named(self, model: fpipe.Model, grads: Any) -> dict[str, Tensor | None]:
        """Gradients of a step by the names of the whole net."""
        if self.front in ONE_SHAPE:
            return {of_layer(name): grad for name, grad in fpipe.join_params(model, grads).items()}
        return {name: grad for stage in grads for name, grad in stage.items()}

    def as_modules(self) -> tuple[fpipe.Model, Any, Any]:
        """By `from_sequential`, with Stash and Pop between the layers."""
        children: list[tuple[str, nn.Module]] = []
        sizes: list[int] = []
        for stage in range(len(self.stages)):
            own: list[tuple[str, nn.Module]] = []
            if stage == 0 and any(skip.out == -1 for skip in self.skips):
                own.append(("batch", fpipe.Stash("-1")))
            own += [(f"pop {skip.name} {stage}", fpipe.Pop(skip.name)) for skip in self.taken(stage)]
            own += self.of(stage).items()
            own[-1:-1] = [(f"stash {name}", fpipe.Stash(name)) for name in self.aside(stage)]
            if any(skip.out == stage and not skip.inside for skip in self.skips):
                own.append((f"stash {stage}", fpipe.Stash(str(stage))))
            sizes.append(len(own))
            children += own
        net = nn.Sequential()
        for name, child in children:
            net.add_module(name, child)
        example, _ = Cut((3,)).drawn(3, 2, torch.Generator(), getattr(torch, self.dtype))
        model, params, state = fpipe.from_sequential(
            net, sizes=sizes, loss=partial(judged, self.reduction), reduction=self.reduction, aux=True, example=example
        )
        return fpipe.freeze(model, *(() if self.constant else self.still)), params, state

    def as_functions(self) -> tuple[fpipe.Model, Any, Any]:
        """By `from_functions`: the same layers, called with what is handed in."""
        mine = [nn.ModuleDict(self.of(stage)) for stage in range(len(self.stages))]
        homes: dict[int, list[tuple[int, str]]] = {}
        params: list[dict[str, Tensor]] = []
        for stage, modules in enumerate(mine):
            params.append({})
            for name, leaf in modules.named_parameters():
                if leaf.requires_grad:
                    homes.setdefault(id(leaf), []).append((stage, name))
                    if len(homes[id(leaf)]) == 1:
                        params[stage][name] = leaf.detach()
        state = tuple(
            {name: buffer.clone() for name, buffer in modules.named_buffers()} if self.training else {}
            for modules in mine
        )
        model = fpipe.from_functions(
            [self.function(stage, mine[stage], bool(state[stage])) for stage in range(len(mine))],
            partial(judged, self.reduction),
            inputs=[self.sources(stage) for stage in range(len(mine))],
            ties=[group for group in homes.values() if len(group) > 1],
            reduction=self.reduction,
            aux=True,
            aux_losses=self.losses,
        )
        still = {group[-1] for group in homes.values() if not {name for _, name in group}.isdisjoint(self.still)}
        return fpipe.freeze(model, *still), tuple(params), state

    def as_loss(self, example: Any) -> tuple[fpipe.Model, Any]:
        """By `from_loss`: the same layers in one function, with a boundary between stages."""
        stages = [Stage(self, n, nn.ModuleDict(self.of(n))) for n in range(len(self.stages))]
        whole = nn.ModuleDict(self.net)
        first = {id(leaf): name for name, leaf in whole.named_parameters()}

        def loss_fn(params: dict[str, Tensor], batch: Any) -> Any:
            def call(n: int, before: Any, *taken: Any) -> tuple[Any, list[Any]]:
                given = (fpipe.boundary(before) if n else before, *taken)
                own = {name: params[first[id(leaf)]] for name, leaf in stages[n].layers.named_parameters()}
                swapped = {place: tensor for name, tensor in own.items() for place in stages[n].places(name)}
                return torch.func.functional_call(stages[n], swapped, (given, 0), tie_weights=False)[:2]

            return judged(self.reduction, self.through(batch[0], call), batch[1])[0]

        params = {name: leaf.detach() for name, leaf in whole.named_parameters()}
        model, own = fpipe.from_loss(loss_fn, params, example, reduction=self.reduction)
        owned = {name for stage in own for name in stage}
        return fpipe.freeze(model, *(name for name in self.still if name in owned)), own

    def as_net(self, example: Any) -> tuple[fpipe.Model, Any, Any]:
        """By `from_module`: one module that calls its stages."""
        net = Net(self)
        ends = [f"stages.{stage}" for stage in range(len(self.stages) - 1)]
        loss: dict[str, Any] = {"loss": partial(judged, self.reduction), "reduction": self.reduction, "aux": True}
        rows = Cut((3,)).drawn(3, example[1].shape[1], torch.Generator(), getattr(torch, self.dtype))
        model, params, state = fpipe.from_module(net, cuts=ends, example=rows, **loss)
        owned = {of_layer(name): name for stage in params for name in stage}
        still = [owned[name] for name in self.still if name in owned]
        return fpipe.freeze(model, *still), params, state if any(state) else None

    def sources(self, stage: int) -> Any:
        """What a stage takes: what is before, and of the skips the batch, an output, or what was put aside."""
        before = stage - 1 if stage else "batch"
        taken: list[Any] = []
        for skip in self.taken(stage):
            aside = (skip.out, 1 + self.aside(skip.out).index(skip.name)) if skip.inside else skip.out
            taken.append("batch" if skip.out == -1 else aside)
        return (before, *taken) if taken else before

    def function(self, number: int, modules: nn.ModuleDict, remembers: bool) -> Callable[..., Any]:
        """One stage; it asks for what it uses."""
        run = Stage(self, number, modules)

        def stage(p: dict[str, Tensor], x: Any, *, state: Any, microbatch: Any) -> Any:
            own = {name: buffer.clone() for name, buffer in state.items()}
            given = x if isinstance(self.sources(number), tuple) else (x,)
            swapped = {place: tensor for name, tensor in (p | own).items() for place in run.places(name)}
            y, aside, loss = torch.func.functional_call(run, swapped, (given, microbatch), tie_weights=False)
            own = {name: swapped[run.places(name)[0]] for name in own}  # where what is bound anew is noted
            made = [(y, *aside) if aside else y, *([own] if remembers else []), *([] if loss is None else [loss])]
            return tuple(made) if len(made) > 1 else made[0]

        if not remembers:
            stage = partial(stage, state={})
        return stage if number in self.numbered else partial(stage, microbatch=0)


class Stage(nn.Module):
    """The layers of a stage as a loop: from its input and what it takes up to its output, what it puts aside, and its
    loss."""

    def __init__(self, whole: Whole, number: int, modules: nn.ModuleDict) -> None:
        super().__init__()
        self.layers, self.number, self.whole = modules, number, whole

    def places(self, name: str) -> list[str]:
        """Where a parameter stands, each module once: `functional_call` leaves one that it meets twice with what was
        handed in."""
        here = dict(self.layers.named_parameters(remove_duplicate=False)) | dict(self.layers.named_buffers())
        found: dict[tuple[int, str], str] = {}
        for other, tensor in here.items():
            owner, _, leaf = other.rpartition(".")
            if tensor is here[name]:
                found.setdefault((id(self.layers.get_submodule(owner)), leaf), f"layers.{other}")
        return [*found.values()]

    def forward(self, given: tuple[Any, ...], microbatch: int) -> tuple[Any, list[Any], Tensor | None]:
        x, *taken = given
        for value in taken:
            x = (x, value)
        aside: list[Any] = []
        for at, layer in enumerate(self.layers.values()):
            if at == len(self.layers) - 1:
                aside = [x] * len(self.whole.aside(self.number))
            x = layer(x)
        if self.number in self.whole.numbered:
            x = gathered(x) * (1 + microbatch)
        if self.number not in self.whole.losses:
            return x, aside, None
        each = gathered(x).square()
        return x, aside, each.mean() if self.whole.reduction == "mean" else each.sum()


def of_layer(name: str) -> str:
    """A leaf of a `Net` as its layer calls it."""
    return re.sub(r"^stages\.\d+\.layers\.", "", name)


class Net(nn.Module):
    """The stages as one module, which takes the batch by keywords."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.whole = whole
        self.stages = nn.ModuleList(Stage(whole, n, nn.ModuleDict(whole.of(n))) for n in range(len(whole.stages)))

    def forward(self, h: Tensor, gate: Tensor, ids: Tensor, nothing: None = None, scale: float = 1.5) -> Any:
        x = {"h": h, "gate": gate, "ids": ids, "nothing": nothing, "scale": scale}
        return self.whole.through(x, lambda n, *given: self.stages[n](given, 0)[:2])


@dataclass(frozen=True)
class Cut:
    """How a batch is cut: microbatches by number or by size, or there already, each with a length of its own; leaves
    that are not cut along dim 0 (`spec`); sequences in slices."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...] = (2,)
    how: Literal["number", "size", "fewer", "presplit"] = "number"
    spec: bool = False
    slices: int = 1

    @property
    def microbatches(self) -> int:
        return len(self.rows)

    @property
    def specs(self) -> Any:
        """What goes whole, and what has its rows elsewhere."""
        if not self.spec:
            return None
        inputs = dict.fromkeys(("h", "gate", "ids", "nothing", "scale"), fpipe.Chunk())
        return inputs | {"table": fpipe.Replicate(), "across": fpipe.Chunk(1)}, fpipe.Chunk()

    @property
    def split(self) -> Callable[[Any], Any]:
        """The transform."""
        m, n = self.microbatches, sum(self.rows)
        said: dict[str, Any] = {
            "number": {"microbatches": m},
            "size": {"size": self.rows[0], "rows": n},
            "fewer": {"microbatches": m + 2, "rows": n, "allow_fewer": True},
            "presplit": {"microbatches": m, "presplit": True},
        }[self.how]
        return fpipe.split(spec=self.specs, slices=self.slices, **said)

    def drawn(self, rows: int, length: int, make: torch.Generator, dtype: torch.dtype) -> tuple[Any, Tensor]:
        """So many rows of a batch."""
        draw = partial(torch.randn, generator=make, dtype=dtype)
        shape = rows, length, WIDTH
        x = {"h": draw(shape), "gate": draw(shape), "ids": torch.randint(0, WIDTH, shape[:2], generator=make)}
        x |= {"nothing": None, "scale": 1.5}
        x |= {"table": draw(WIDTH), "across": draw(length, rows)} if self.spec else {}
        return x, draw(shape)

    def batch(self, seed: int, dtype: torch.dtype) -> Any:
        """What a step takes."""
        make = torch.Generator().manual_seed(seed)
        if self.how != "presplit":
            return self.drawn(sum(self.rows), self.lengths[0], make, dtype)
        lengths = [self.lengths[at % len(self.lengths)] for at in range(self.microbatches)]
        return [self.drawn(rows, long, make, dtype) for rows, long in zip(self.rows, lengths, strict=True)]

    def parts(self, batch: Any) -> list[tuple[Any, Tensor]]:
        """The microbatches, as views."""
        if self.how == "presplit":
            return batch
        ends = torch.tensor(self.rows).cumsum(0).tolist()[:-1]

        def cut(name: Any, leaf: Any) -> list[Any]:
            if not isinstance(leaf, Tensor) or name == "table":
                return [leaf] * self.microbatches
            return [*leaf.tensor_split(ends, 1 if name == "across" else 0)]

        inputs, target = batch
        each = {name: cut(name, leaf) for name, leaf in inputs.items()}
        targets = cut(None, target)
        return [({name: found[i] for name, found in each.items()}, targets[i]) for i in range(self.microbatches)]

    def sliced(self, part: tuple[Any, Tensor]) -> list[tuple[Any, Tensor]]:
        """The slices of a microbatch, as views."""

        def cut(leaf: Any, at: int) -> Any:
            return leaf.tensor_split(self.slices, 1)[at] if isinstance(leaf, Tensor) else leaf

        x, target = part
        pieces = range(self.slices) if self.slices > 1 else ()
        return [({name: cut(leaf, k) for name, leaf in x.items()}, cut(target, k)) for k in pieces] or [part]


@dataclass
class Torch:
    """What a step gives, as torch alone computes it. Outputs and metrics are those of each microbatch and slice."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    outputs: list[Any]
    aux: list[Any]
    state: dict[str, Tensor]
    input_grads: Any


def joined(parts: list[dict[str, Any]], dim: int) -> dict[str, Any]:
    """Gradients of inputs put together along the rows (dim 0), or the sequence."""
    made: dict[str, Any] = {}
    for name, first in parts[0].items():
        each = [part[name] for part in parts]
        if not isinstance(first, Tensor):
            made[name] = None
        else:
            made[name] = sum(each[1:], first) if name == "table" else torch.cat(each, 1 if name == "across" else dim)
    return made


def plain_step(whole: Whole, cut: Cut, batch: Any, key: int | None = None) -> Torch:
    """The layers one after the other, microbatch by microbatch, `.backward()` after each.

    Where bits are the matter, floating point sums have an order: a stage reads an alias of what another wrote, a leaf
    that several stages use is one of its own in each, and the uses are added by stage at the end.
    """
    stages = [Stage(whole, n, copy.deepcopy(nn.ModuleDict(whole.of(n)))) for n in range(len(whole.stages))]
    _still(whole, stages)
    loss, count, rows = torch.tensor(0.0), torch.tensor(0), sum(cut.rows)
    outputs: list[Any] = []
    extras: list[Any] = []
    of_inputs: list[dict[str, Tensor | None]] = []
    for index, part in enumerate(cut.parts(batch)):
        totals: list[tuple[Tensor, dict[str, Any]]] = []
        for k, (x, target) in enumerate(cut.sliced(part)):
            x = {name: _leaf(leaf) for name, leaf in x.items()}
            place = (index, k) if cut.slices > 1 else (index,)
            y, judgement, more = _forward(whole, stages, x, target, place, key)
            total, aux = judgement
            if whole.reduction == "count":
                total, counted = total
                count = count + counted
            total = sum(more, total)
            share = len(target) / rows * (target.shape[1] / part[1].shape[1] if cut.slices > 1 else 1.0)
            weighted = total * (share if whole.reduction == "mean" else 1.0)
            loss = loss + weighted.detach() if outputs else weighted.detach()
            totals.append((weighted, x))
            outputs.append(y)
            extras.append(aux)
        pieces: list[dict[str, Tensor | None]] = []
        for weighted, x in reversed(totals):
            if weighted.requires_grad:
                weighted.backward()
            pieces.insert(0, {name: leaf.grad if isinstance(leaf, Tensor) else None for name, leaf in x.items()})
        of_inputs.append(joined(pieces, 1))
    grads, input_grads = _summed(whole, stages), of_inputs if cut.how == "presplit" else joined(of_inputs, 0)
    if whole.reduction == "count":
        by = count if count != 0 else 1
        loss, grads = loss / by, {name: None if grad is None else grad / by for name, grad in grads.items()}
        divide = lambda grad: None if grad is None else grad / by  # noqa: E731
        input_grads = tree.tree_map(divide, input_grads)
    state = {name: buffer for stage in stages for name, buffer in stage.layers.named_buffers()}
    return Torch(loss, grads, outputs, extras, state, input_grads)


def _still(whole: Whole, stages: Sequence[Stage]) -> None:
    for stage in stages:
        for name, leaf in stage.layers.named_parameters(remove_duplicate=False):
            leaf.requires_grad_(name not in whole.still)


def _leaf(leaf: Any) -> Any:
    wants = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if wants else leaf


def _forward(
    whole: Whole, stages: Sequence[Stage], x: dict[str, Any], target: Tensor, place: tuple[int, ...], key: int | None
) -> tuple[Any, Any, list[Tensor]]:
    """Output, what the loss function gives, and the losses of middle stages."""
    losses: list[Tensor] = []

    def call(n: int, *given: Any) -> tuple[Any, list[Any]]:
        if key is not None:
            torch.manual_seed(fpipe.fold_in(key, n, *place))
        y, aside, more = stages[n](aliased(given), place[0])
        losses.extend([] if more is None else [more])
        return y, aside

    y = whole.through(x, call)
    return y, judged(whole.reduction, y, target), losses


def _summed(whole: Whole, stages: Sequence[Stage]) -> dict[str, Tensor | None]:
    """Gradients by the names of the whole net: of a leaf in several stages the sum, by stage; None where none is."""
    names: dict[int, list[str]] = {}
    for name, leaf in nn.ModuleDict(whole.net).named_parameters(remove_duplicate=False):
        names.setdefault(id(leaf), []).append(name)
    found: dict[str, Tensor | None] = {}
    own = [dict(stage.layers.named_parameters(remove_duplicate=False)) for stage in stages]
    for group in names.values():
        uses = [
            next(leaves[name] for name in group if name in leaves)
            for leaves in own
            if not leaves.keys().isdisjoint(group)
        ]
        found |= dict.fromkeys(group, sum_of_uses(use.grad for use in uses))
    return found


LEFT_OUT: dict[str, tuple[str, ...]] = {
    "functions": ("checkpoint",),  # which calls modules again when functional_call has put theirs back
    "net": ("mean norm",),  # reads a number from a buffer
}


@st.composite
def wholes(draw: st.DrawFn, reproducible: bool = False, front: Front | None = None) -> Whole:
    """Draw a model of 1 to 4 stages; with `reproducible` one whose gradients do not depend on how a batch is cut."""
    n = draw(st.sampled_from([3, 2, 4, 1]))
    front = front or draw(st.sampled_from(["functions", "modules", "functions", "modules", "loss"]))
    kinds = [kind for kind in KINDS if "norm" not in kind and kind != "dropout"] if reproducible else list(KINDS)
    if front == "loss" or reproducible:  # which write no buffers
        kinds = [kind for kind in kinds if kind not in WRITE]
    out = LEFT_OUT.get(front, ())
    kinds = [kind for kind in kinds if kind not in out]
    words = st.sampled_from(kinds)
    held = st.sampled_from([kind for kind in kinds if kind not in (*WRITE, "many")])  # a checkpoint would write twice
    around = st.sampled_from([how for how in AROUND if how not in ("autocast", *out)])
    within = st.builds(Within, around, st.lists(held, min_size=1, max_size=2).map(tuple))
    layers = st.lists(st.one_of(words, words, words, within), min_size=1, max_size=3).map(tuple)
    stages = tuple(draw(layers) for _ in range(n))
    possible = [Skip(out, False, into) for into in range(n) for out in range(-1, into - 1)]
    possible += [Skip(out, True, into) for into in range(n) for out in range(into) if len(stages[out]) > 1]
    skips = draw(st.lists(st.sampled_from(possible), min_size=draw(st.integers(0, 2)), max_size=9)) if possible else []
    some = st.lists(st.integers(0, n - 1), max_size=n, unique=True).map(sorted).map(tuple)
    names = [f"{stage}_{at}" for stage, kinds in enumerate(stages) for at in range(len(kinds))]
    frozen = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    return Whole(
        stages,
        tuple(sorted({*skips})),
        front,
        draw(st.sampled_from(["mean", "sum", "count"])),
        tuple(stage for stage in range(n - 1) if front == "functions" and draw(st.booleans())),
        draw(some) if front == "functions" and not reproducible else (),
        tuple(frozen),
        front in ("modules", "net") and draw(st.booleans()),
        reproducible or front == "loss" or draw(st.sampled_from([True, False, True])),
        "float64" if reproducible else draw(st.sampled_from(["float32", "float64"])),
        draw(st.integers(0, 99)),
    )


@st.composite
def cuts(draw: st.DrawFn, undivided: bool = False) -> Cut:
    """Draw how a batch is cut; with `undivided` so that it could stay whole."""
    m = draw(st.sampled_from([3, 2, 4, 1]))
    how = draw(st.sampled_from(["number", "size", "fewer"] + ["presplit"] * 2 * (not undivided)))
    slices = draw(st.sampled_from([1, 2])) if how in ("number", "presplit") and not undivided else 1
    lengths = st.integers(2 * slices, 5 * slices)
    long = (draw(lengths),) if how != "presplit" else tuple(draw(st.lists(lengths, min_size=3, max_size=3)))
    spec = draw(st.booleans()) and slices == 1
    if how == "number":
        rows = draw(st.integers(m, 3 * m))
        return Cut(tuple(rows // m + (at < rows % m) for at in range(m)), long, how, spec, slices)
    if how == "size":
        size = draw(st.integers(1, 3))
        return Cut((*[size] * (m - 1), draw(st.integers(1, size))), long, how, spec)
    if how == "fewer":
        return Cut((1,) * m, long, how, spec)
    return Cut(tuple(draw(st.lists(st.integers(1, 3), min_size=m, max_size=m))), long, how, spec, slices)
