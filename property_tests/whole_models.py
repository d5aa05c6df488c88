"""Draw random whole models as people write them, and compute their step by hand, with torch alone.

A recipe has the layers of each stage, skips, the door by which the model enters fpipe (`DOORS`) and frozen parameters;
it builds the model, its parameters and a batch. A layer passes on a tensor [rows, positions, channels], or a dict of
several with integers, a mask, a number and None. The batch is such a dict.
"""

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
from property_tests.stage_functions import AROUND, Wrapped, names_of_layers, sized
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
"""The front doors that trace a whole batch: only its number of rows may vary."""
Reduction = Literal["mean", "sum", "count"]


def as_tensor(x: Any) -> Tensor:
    """Combine whatever a layer takes into one tensor."""
    if isinstance(x, tuple):
        head, *tail = map(as_tensor, x)
        return sum(tail, head)
    if not isinstance(x, dict):
        return x
    h = (x["h"] * x["gate"]).masked_fill((x["ids"] == 0).unsqueeze(-1), 0.5) * x["scale"]
    return h + x["table"] + x["across"].t().unsqueeze(-1) if "table" in x else h


class GrammarLayer(nn.Module):
    """A layer of the grammar as a module, with parameters of its own, but for "e", which layers may share."""

    def __init__(self, layer_name: str, e: nn.Parameter | None = None) -> None:
        super().__init__()
        self.layer_name = layer_name
        for leaf_name, shape in LAYERS[layer_name].shapes.items():
            parameter = nn.Parameter(torch.randn(sized(shape, WIDTH)) * 0.5)
            self.register_parameter(leaf_name, e if leaf_name == "e" and e is not None else parameter)

    def forward(self, x: Any) -> Tensor:
        layer = LAYERS[self.layer_name]
        return layer.apply({name: getattr(self, name) for name in layer.shapes}, as_tensor(x))


class WrappedLayers(nn.Module):
    """Layers inside a wrapper, as a module."""

    def __init__(self, wrapper: str, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.wrapper, self.inner = wrapper, nn.Sequential(*modules)

    def forward(self, x: Any) -> Tensor:
        return AROUND[self.wrapper](self.inner, as_tensor(x))


def apply_norm(module: Any, x: Any) -> Tensor:
    return module.norm(as_tensor(x).transpose(1, 2)).transpose(1, 2)


def many_outputs(module: Any, x: Any) -> dict[str, Any]:
    """Return a dict: a tensor with a gradient, integers that pick rows of a table, these rows, a number and None."""
    h = as_tensor(x)
    ids = h.argmax(-1)
    return {"h": h @ module.weight, "nothing": None, "ids": ids, "gate": module.table(ids).sigmoid(), "scale": 2}


def apply_inner(module: Any, x: Any) -> Tensor:
    return module.inner(as_tensor(x) * 1.5)


def counting(module: Any, x: Any) -> Tensor:
    """Count calls in place and bind a new running mean, in training; the output reads neither."""
    h = as_tensor(x)
    if module.training:
        module.count += 1
        module.mean = module.mean.lerp(h.detach().mean((0, 1)), 0.1)
    return torch.sin(h)


def centred(module: Any, x: Any) -> Tensor:
    """Subtract a running mean, which training updates first."""
    h = as_tensor(x)
    if module.training:
        module.mean.lerp_(h.detach().mean((0, 1)), 0.5)
    return h - module.mean


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)


NORMS = {"norm", "mean norm"}
"""The layers that remember statistics of batches."""
ORDERED = {"centred", "spectral norm"}
"""The layers whose output reads what they have written."""
WRITE = {*NORMS, *ORDERED, "counting"}
"""The layers that write buffers."""


def build_layers(stages: Sequence[Sequence[str | Wrapped]]) -> dict[str, nn.Module]:
    """Build all layers by name; those called "tied" share one matrix, those called "reused" are one module."""
    shared, reused = weight(), GrammarLayer("linear")
    make: dict[str, Callable[[], nn.Module]] = {
        **{name: partial(GrammarLayer, name) for name in ("linear", "twice", "unused", "attention_in_time", "relu_")},
        "tied": partial(GrammarLayer, "tied", shared),
        "reused": lambda: reused,
        "norm": lambda: Toy(apply_norm, norm=nn.BatchNorm1d(WIDTH)),
        "mean norm": lambda: Toy(apply_norm, norm=nn.BatchNorm1d(WIDTH, momentum=None)),
        "forgetful norm": lambda: Toy(apply_norm, norm=nn.BatchNorm1d(WIDTH, track_running_stats=False)),
        "spectral norm": lambda: Toy(apply_inner, inner=parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        "counting": lambda: Toy(counting, count=torch.zeros((), dtype=torch.long), mean=torch.zeros(WIDTH)),
        "centred": lambda: Toy(centred, mean=torch.zeros(WIDTH)),
        "dropout": lambda: Toy(apply_inner, inner=nn.Dropout()),
        "many": lambda: Toy(many_outputs, weight=weight(), table=nn.Embedding(WIDTH, WIDTH)),
    }

    def build(kind: str | Wrapped) -> nn.Module:
        return make[kind]() if isinstance(kind, str) else WrappedLayers(kind.wrapper, [*map(build, kind.layers)])

    return {f"{stage}_{index}": build(kind) for stage, kinds in enumerate(stages) for index, kind in enumerate(kinds)}


KINDS = (
    *("tied", "linear", "twice", "tied", "unused", "reused", "reused", "tied", "attention_in_time"),
    *("norm", "mean norm", "forgetful norm", "spectral norm", "dropout", "dropout", "relu_", "many", "many", "norm"),
    *("counting", "counting", "centred"),
)


class Skip(NamedTuple):
    """A second input of a stage: the batch (origin -1), an output, or the input of a stage's last layer (`inside`)."""

    origin: int
    inside: bool
    into: int

    @property
    def name(self) -> str:
        return f"{self.origin}{' inside' * self.inside}"


def squares(y: Any, target: Tensor) -> Tensor:
    return (as_tensor(y) - target).square().sum(-1)


def loss_and_metrics(reduction: Reduction, y: Any, target: Tensor) -> tuple[Any, dict[str, Any]]:
    errors, is_counted = squares(y, target), target[..., 0] > 0
    losses: dict[Reduction, Callable[[], Any]] = {"mean": errors.mean, "sum": errors.sum}
    losses["count"] = lambda: ((errors * is_counted).sum(), is_counted.sum())
    return losses[reduction](), {"rows": target.shape[0], "size": as_tensor(y).abs().mean()}


@dataclass(frozen=True)
class ModelRecipe:
    """A recipe of a model. `numbered` stages read their microbatch's number; `constant` freezes modules' own leaves."""

    stages: tuple[tuple[str | Wrapped, ...], ...]
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
        """The layers, by stage and index."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            modules = build_layers(self.stages)
        for name, layer in modules.items():
            layer.to(getattr(torch, self.dtype)).train(self.training)
            if self.constant and name in self.frozen:
                layer.requires_grad_(False)
        return modules

    def layers_of(self, stage: int) -> dict[str, nn.Module]:
        return {name: layer for name, layer in self.net.items() if name.split("_")[0] == str(stage)}

    def skips_into(self, stage: int) -> list[Skip]:
        return [skip for skip in self.skips if skip.into == stage]

    def stashes_of(self, stage: int) -> list[str]:
        """Return the names of the values that a stage stashes for skips."""
        return [*dict.fromkeys(skip.name for skip in self.skips if skip.origin == stage and skip.inside)]

    def run_stages(self, x: Any, call: Callable[..., tuple[Any, list[Any]]]) -> Any:
        """Call all stages with inputs and skips, and return the last output; `call` returns an output and stashes."""
        values: dict[tuple[int, bool], Any] = {(-1, False): x}
        for n in range(len(self.stages)):
            y, aside = call(n, *(values[skip[:2]] for skip in [Skip(n - 1, False, n), *self.skips_into(n)]))
            values |= {(n, False): y, **({(n, True): aside[0]} if aside else {})}
        return values[len(self.stages) - 1, False]

    @property
    def layers(self) -> list[str]:
        return [name for kinds in self.stages for name in names_of_layers(kinds)]

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
        """Whether forwards read the state that earlier ones wrote, which is assumed of functions."""
        return self.remembers and (self.front == "functions" or not self.kinds.isdisjoint(ORDERED))

    @property
    def frozen_names(self) -> list[str]:
        """The names of parameters that do not train: all names of a tied one, if one of its layers is frozen."""
        modules = nn.ModuleDict(self.net)
        prefixes = [f"{name}." for name in self.frozen]
        named = [*modules.named_parameters(remove_duplicate=False)]
        fixed = {id(leaf) for name, leaf in named if any(map(name.startswith, prefixes))}
        return [name for name, leaf in named if id(leaf) in fixed]

    def build(self, example: Any = None) -> tuple[fpipe.Model, Any, Any]:
        """Return the model, its parameters, and its state or None. A loss function needs an example of a batch."""
        if self.front == "loss":
            return *self.as_loss(example), None
        if self.front == "net":
            return self.as_net(example)
        parts = self.as_modules() if self.front == "modules" else self.as_functions()
        return parts if self.remembers else (*parts[:2], None)

    def grads_by_name(self, model: fpipe.Model, grads: Any) -> dict[str, Tensor | None]:
        """Return a step's gradients by the names of the whole net."""
        if self.front in ONE_SHAPE:
            return {of_layer(name): grad for name, grad in fpipe.join_params(model, grads).items()}
        return {name: grad for stage in grads for name, grad in stage.items()}

    def as_modules(self) -> tuple[fpipe.Model, Any, Any]:
        """Build by `from_sequential`, with Stash and Pop between the layers."""
        children: list[tuple[str, nn.Module]] = []
        sizes: list[int] = []
        for stage in range(len(self.stages)):
            stage_children: list[tuple[str, nn.Module]] = []
            if stage == 0 and any(skip.origin == -1 for skip in self.skips):
                stage_children.append(("batch", fpipe.Stash("-1")))
            stage_children += [(f"pop {skip.name} {stage}", fpipe.Pop(skip.name)) for skip in self.skips_into(stage)]
            stage_children += self.layers_of(stage).items()
            stage_children[-1:-1] = [(f"stash {name}", fpipe.Stash(name)) for name in self.stashes_of(stage)]
            if any(skip.origin == stage and not skip.inside for skip in self.skips):
                stage_children.append((f"stash {stage}", fpipe.Stash(str(stage))))
            sizes.append(len(stage_children))
            children += stage_children
        net = nn.Sequential()
        for name, child in children:
            net.add_module(name, child)
        example, _ = Cut((3,)).drawn(3, 2, torch.Generator(), getattr(torch, self.dtype))
        loss = partial(loss_and_metrics, self.reduction)
        model, params, state = fpipe.from_sequential(
            net, sizes=sizes, loss=loss, reduction=self.reduction, aux=True, batch=(example, None)
        )
        return fpipe.freeze(model, *(() if self.constant else self.frozen_names)), params, state

    def as_functions(self) -> tuple[fpipe.Model, Any, Any]:
        """Build by `from_functions`: each stage calls its layers with the given parameters."""
        mine = [nn.ModuleDict(self.layers_of(stage)) for stage in range(len(self.stages))]
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
            partial(loss_and_metrics, self.reduction),
            inputs=[self.sources(stage) for stage in range(len(mine))],
            ties=[group for group in homes.values() if len(group) > 1],
            reduction=self.reduction,
            aux=True,
            aux_losses=self.losses,
        )
        fixed = {*self.frozen_names}
        frozen = {group[-1] for group in homes.values() if not fixed.isdisjoint(name for _, name in group)}
        return fpipe.freeze(model, *frozen), tuple(params), state

    def as_loss(self, example: Any) -> tuple[fpipe.Model, Any]:
        """Build by `from_loss`: one function calls all layers, with a boundary between stages."""
        stages = [Stage(self, n, nn.ModuleDict(self.layers_of(n))) for n in range(len(self.stages))]
        modules = nn.ModuleDict(self.net)
        name_by_id = {id(leaf): name for name, leaf in modules.named_parameters()}

        def loss_fn(params: dict[str, Tensor], batch: Any) -> Any:
            def call(n: int, value: Any, *skipped: Any) -> tuple[Any, list[Any]]:
                inputs = (fpipe.boundary(value) if n else value, *skipped)
                named = stages[n].layers.named_parameters()
                stage_params = {name: params[name_by_id[id(leaf)]] for name, leaf in named}
                swapped = {path: tensor for name, tensor in stage_params.items() for path in stages[n].paths(name)}
                return torch.func.functional_call(stages[n], swapped, (inputs, 0), tie_weights=False)[:2]

            return loss_and_metrics(self.reduction, self.run_stages(batch[0], call), batch[1])[0]

        params = {name: leaf.detach() for name, leaf in modules.named_parameters()}
        model, marked_params = fpipe.from_loss(loss_fn, params, example, reduction=self.reduction)
        owned = {name for stage in marked_params for name in stage}
        return fpipe.freeze(model, *(name for name in self.frozen_names if name in owned)), marked_params

    def as_net(self, example: Any) -> tuple[fpipe.Model, Any, Any]:
        """Build by `from_module`: one module calls its stages."""
        net = Net(self)
        ends = [f"stages.{stage}" for stage in range(len(self.stages) - 1)]
        loss: dict[str, Any] = {"loss": partial(loss_and_metrics, self.reduction), "reduction": self.reduction}
        rows = Cut((3,)).drawn(3, example[1].shape[1], torch.Generator(), getattr(torch, self.dtype))
        model, params, state = fpipe.from_module(net, cuts=ends, batch=rows, aux=True, **loss)
        owned = {of_layer(name): name for stage in params for name in stage}
        still = [owned[name] for name in self.frozen_names if name in owned]
        return fpipe.freeze(model, *still), params, state if any(state) else None

    def sources(self, stage: int) -> Any:
        """Return a stage's inputs: the previous stage, and for each skip the batch, an output, or a stashed value."""
        previous = stage - 1 if stage else "batch"
        skipped: list[Any] = []
        for skip in self.skips_into(stage):
            stashed = (skip.origin, 1 + self.stashes_of(skip.origin).index(skip.name)) if skip.inside else skip.origin
            skipped.append("batch" if skip.origin == -1 else stashed)
        return (previous, *skipped) if skipped else previous

    def function(self, number: int, modules: nn.ModuleDict, remembers: bool) -> Callable[..., Any]:
        """Return a stage function, with `state=` and `microbatch=` only if it reads them."""
        run = Stage(self, number, modules)

        def stage(p: dict[str, Tensor], x: Any, *, state: Any, microbatch: Any) -> Any:
            buffers = {name: buffer.clone() for name, buffer in state.items()}
            inputs = x if isinstance(self.sources(number), tuple) else (x,)
            swapped = {path: tensor for name, tensor in (p | buffers).items() for path in run.paths(name)}
            y, aside, loss = torch.func.functional_call(run, swapped, (inputs, microbatch), tie_weights=False)
            # functional_call writes buffers that a layer has bound anew back into the dict.
            buffers = {name: swapped[run.paths(name)[0]] for name in buffers}
            results = [(y, *aside) if aside else y, *([buffers] if remembers else [])]
            results += [] if loss is None else [loss]
            return tuple(results) if len(results) > 1 else results[0]

        if not remembers:
            stage = partial(stage, state={})
        return stage if number in self.numbered else partial(stage, microbatch=0)


class Stage(nn.Module):
    """The layers of a stage in a row, from input and skips to output, stashed values and loss."""

    def __init__(self, recipe: ModelRecipe, number: int, modules: nn.ModuleDict) -> None:
        super().__init__()
        self.layers, self.number, self.recipe = modules, number, recipe

    def paths(self, name: str) -> list[str]:
        """Return a parameter's paths, one a module: `functional_call` cannot restore a module that it swaps twice."""
        tensors = dict(self.layers.named_parameters(remove_duplicate=False)) | dict(self.layers.named_buffers())
        path_by_slot: dict[tuple[int, str], str] = {}
        for path, tensor in tensors.items():
            owner, _, leaf = path.rpartition(".")
            if tensor is tensors[name]:
                path_by_slot.setdefault((id(self.layers.get_submodule(owner)), leaf), f"layers.{path}")
        return [*path_by_slot.values()]

    def forward(self, inputs: tuple[Any, ...], microbatch: int) -> tuple[Any, list[Any], Tensor | None]:
        x, *skipped = inputs
        for value in skipped:
            x = (x, value)
        aside: list[Any] = []
        for index, layer in enumerate(self.layers.values()):
            if index == len(self.layers) - 1:
                aside = [x] * len(self.recipe.stashes_of(self.number))
            x = layer(x)
        if self.number in self.recipe.numbered:
            x = as_tensor(x) * (1 + microbatch)
        if self.number not in self.recipe.losses:
            return x, aside, None
        squared = as_tensor(x).square()
        return x, aside, squared.mean() if self.recipe.reduction == "mean" else squared.sum()


def of_layer(name: str) -> str:
    """Return the name of a `Net`'s leaf inside its layer."""
    return re.sub(r"^stages\.\d+\.layers\.", "", name)


class Net(nn.Module):
    """All stages as one module, which takes the batch by keywords."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        numbers = range(len(recipe.stages))
        self.stages = nn.ModuleList(Stage(recipe, n, nn.ModuleDict(recipe.layers_of(n))) for n in numbers)

    def forward(self, h: Tensor, gate: Tensor, ids: Tensor, nothing: None = None, scale: float = 1.5) -> Any:
        x = {"h": h, "gate": gate, "ids": ids, "nothing": nothing, "scale": scale}
        return self.recipe.run_stages(x, lambda n, *inputs: self.stages[n](inputs, 0)[:2])


@dataclass(frozen=True)
class Cut:
    """A recipe of a batch's cut. With `spec` some leaves are whole, or cut along another dim than 0."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...] = (2,)
    mode: Literal["number", "size", "fewer", "presplit"] = "number"
    spec: bool = False
    slices: int = 1

    @property
    def microbatches(self) -> int:
        return len(self.rows)

    @property
    def specs(self) -> Any:
        """The specs of leaves that every microbatch takes whole, and of leaves with rows outside dim 0."""
        if not self.spec:
            return None
        inputs = dict.fromkeys(("h", "gate", "ids", "nothing", "scale"), fpipe.Chunk())
        return inputs | {"table": fpipe.Replicate(), "across": fpipe.Chunk(1)}, fpipe.Chunk()

    @property
    def split(self) -> Callable[[Any], Any]:
        m, n = self.microbatches, sum(self.rows)
        arguments: dict[str, Any] = {
            "number": {"microbatches": m},
            "size": {"size": self.rows[0], "rows": n},
            "fewer": {"microbatches": m + 2, "rows": n, "allow_fewer": True},
            "presplit": {"microbatches": m, "presplit": True},
        }[self.mode]
        return fpipe.split(spec=self.specs, slices=self.slices, **arguments)

    def drawn(self, rows: int, length: int, make: torch.Generator, dtype: torch.dtype) -> tuple[Any, Tensor]:
        draw = partial(torch.randn, generator=make, dtype=dtype)
        shape = rows, length, WIDTH
        x = {"h": draw(shape), "gate": draw(shape), "ids": torch.randint(0, WIDTH, shape[:2], generator=make)}
        x |= {"nothing": None, "scale": 1.5}
        x |= {"table": draw(WIDTH), "across": draw(length, rows)} if self.spec else {}
        return x, draw(shape)

    def batch(self, seed: int, dtype: torch.dtype) -> Any:
        make = torch.Generator().manual_seed(seed)
        if self.mode != "presplit":
            return self.drawn(sum(self.rows), self.lengths[0], make, dtype)
        lengths = [self.lengths[index % len(self.lengths)] for index in range(self.microbatches)]
        return [self.drawn(rows, long, make, dtype) for rows, long in zip(self.rows, lengths, strict=True)]

    def parts(self, batch: Any) -> list[tuple[Any, Tensor]]:
        if self.mode == "presplit":
            return batch
        ends = torch.tensor(self.rows).cumsum(0).tolist()[:-1]

        def cut(name: Any, leaf: Any) -> list[Any]:
            if not isinstance(leaf, Tensor) or name == "table":
                return [leaf] * self.microbatches
            return [*leaf.tensor_split(ends, 1 if name == "across" else 0)]

        inputs, target = batch
        pieces_by_name = {name: cut(name, leaf) for name, leaf in inputs.items()}
        targets = cut(None, target)
        rows = range(self.microbatches)
        return [({name: pieces[i] for name, pieces in pieces_by_name.items()}, targets[i]) for i in rows]

    def sliced(self, part: tuple[Any, Tensor]) -> list[tuple[Any, Tensor]]:

        def cut(leaf: Any, index: int) -> Any:
            return leaf.tensor_split(self.slices, 1)[index] if isinstance(leaf, Tensor) else leaf

        x, target = part
        pieces = range(self.slices) if self.slices > 1 else ()
        return [({name: cut(leaf, k) for name, leaf in x.items()}, cut(target, k)) for k in pieces] or [part]


@dataclass
class TorchStep:
    """The results of a step by torch alone, with outputs and metrics of each microbatch and slice."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    outputs: list[Any]
    aux: list[Any]
    state: dict[str, Tensor]
    input_grads: Any


def join_input_grads(parts: list[dict[str, Any]], dim: int) -> dict[str, Any]:
    """Join gradients of inputs along the rows (dim 0) or the sequence (dim 1)."""
    joined: dict[str, Any] = {}
    for name, leaf in parts[0].items():
        grads = [part[name] for part in parts]
        if not isinstance(leaf, Tensor):
            joined[name] = None
        else:
            joined[name] = sum(grads[1:], leaf) if name == "table" else torch.cat(grads, 1 if name == "across" else dim)
    return joined


def plain_step(recipe: ModelRecipe, cut: Cut, batch: Any, key: int | None = None) -> TorchStep:
    """Compute a step by plain autograd: microbatch after microbatch, with `.backward()` after each.

    Bits depend on the order of sums. So a stage reads an alias of another's output, and a leaf of several stages is a
    leaf of its own in each; their gradients are added by stage at the end.
    """
    stages = [Stage(recipe, n, copy.deepcopy(nn.ModuleDict(recipe.layers_of(n)))) for n in range(len(recipe.stages))]
    _freeze(recipe, stages)
    loss, count, rows = torch.tensor(0.0), torch.tensor(0), sum(cut.rows)
    outputs: list[Any] = []
    extras: list[Any] = []
    of_inputs: list[dict[str, Tensor | None]] = []
    for index, part in enumerate(cut.parts(batch)):
        totals: list[tuple[Tensor, dict[str, Any]]] = []
        for k, (x, target) in enumerate(cut.sliced(part)):
            x = {name: _leaf(leaf) for name, leaf in x.items()}
            indices = (index, k) if cut.slices > 1 else (index,)
            y, judgement, stage_losses = _forward(recipe, stages, x, target, indices, key)
            total, aux = judgement
            if recipe.reduction == "count":
                total, counted = total
                count = count + counted
            total = sum(stage_losses, total)
            share = len(target) / rows * (target.shape[1] / part[1].shape[1] if cut.slices > 1 else 1.0)
            weighted = total * (share if recipe.reduction == "mean" else 1.0)
            loss = loss + weighted.detach() if outputs else weighted.detach()
            totals.append((weighted, x))
            outputs.append(y)
            extras.append(aux)
        pieces: list[dict[str, Tensor | None]] = []
        for weighted, x in reversed(totals):
            if weighted.requires_grad:
                weighted.backward()
            pieces.insert(0, {name: leaf.grad if isinstance(leaf, Tensor) else None for name, leaf in x.items()})
        of_inputs.append(join_input_grads(pieces, 1))
    input_grads = of_inputs if cut.mode == "presplit" else join_input_grads(of_inputs, 0)
    grads = _summed_grads(recipe, stages)
    if recipe.reduction == "count":
        divisor = count if count != 0 else 1
        loss, grads = loss / divisor, {name: None if grad is None else grad / divisor for name, grad in grads.items()}
        divide = lambda grad: None if grad is None else grad / divisor  # noqa: E731
        input_grads = tree.tree_map(divide, input_grads)
    state = {name: buffer for stage in stages for name, buffer in stage.layers.named_buffers()}
    return TorchStep(loss, grads, outputs, extras, state, input_grads)


def _freeze(recipe: ModelRecipe, stages: Sequence[Stage]) -> None:
    for stage in stages:
        for name, leaf in stage.layers.named_parameters(remove_duplicate=False):
            leaf.requires_grad_(name not in recipe.frozen_names)


def _leaf(leaf: Any) -> Any:
    wants = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if wants else leaf


def _forward(
    recipe: ModelRecipe, stages: Sequence[Stage], x: Any, target: Tensor, indices: tuple[int, ...], key: int | None
) -> tuple[Any, Any, list[Tensor]]:
    """Return the output, the loss function's results, and the losses of middle stages."""
    losses: list[Tensor] = []

    def call(n: int, *inputs: Any) -> tuple[Any, list[Any]]:
        if key is not None:
            torch.manual_seed(fpipe.fold_in(key, n, *indices))
        y, aside, stage_loss = stages[n](aliased(inputs), indices[0])
        losses.extend([] if stage_loss is None else [stage_loss])
        return y, aside

    y = recipe.run_stages(x, call)
    return y, loss_and_metrics(recipe.reduction, y, target), losses


def _summed_grads(recipe: ModelRecipe, stages: Sequence[Stage]) -> dict[str, Tensor | None]:
    """Return gradients by the names of the whole net, added by stage where stages share a leaf, or None."""
    names: dict[int, list[str]] = {}
    for name, leaf in nn.ModuleDict(recipe.net).named_parameters(remove_duplicate=False):
        names.setdefault(id(leaf), []).append(name)
    grads: dict[str, Tensor | None] = {}
    params_by_stage = [dict(stage.layers.named_parameters(remove_duplicate=False)) for stage in stages]
    for group in names.values():
        uses = [
            next(leaves[name] for name in group if name in leaves)
            for leaves in params_by_stage
            if not leaves.keys().isdisjoint(group)
        ]
        grads |= dict.fromkeys(group, sum_of_uses(use.grad for use in uses))
    return grads


UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "functions": ("checkpoint",),  # which calls modules again when functional_call has put theirs back
    "net": ("mean norm",),  # reads a number from a buffer
}


@st.composite
def model_recipes(draw: st.DrawFn, reproducible: bool = False, front: Front | None = None) -> ModelRecipe:
    """Draw a model of 1 to 4 stages; with `reproducible` one whose gradients do not depend on how a batch is cut."""
    n = draw(st.sampled_from([3, 2, 4, 1]))
    front = front or draw(st.sampled_from(["functions", "modules", "functions", "modules", "loss"]))
    kinds = [kind for kind in KINDS if "norm" not in kind and kind != "dropout"] if reproducible else list(KINDS)
    if front == "loss" or reproducible:  # which write no buffers
        kinds = [kind for kind in kinds if kind not in WRITE]
    excluded = UNSUPPORTED.get(front, ())
    kinds = [kind for kind in kinds if kind not in excluded]
    kind = st.sampled_from(kinds)
    # A checkpoint would write buffers twice.
    stateless = st.sampled_from([kind for kind in kinds if kind not in (*WRITE, "many")])
    around = st.sampled_from([wrapper for wrapper in AROUND if wrapper not in ("autocast", *excluded)])
    wrapped = st.builds(Wrapped, around, st.lists(stateless, min_size=1, max_size=2).map(tuple))
    layers = st.lists(st.one_of(kind, kind, kind, wrapped), min_size=1, max_size=3).map(tuple)
    stages = tuple(draw(layers) for _ in range(n))
    possible = [Skip(origin, False, into) for into in range(n) for origin in range(-1, into - 1)]
    possible += [Skip(origin, True, into) for into in range(n) for origin in range(into) if len(stages[origin]) > 1]
    skips = draw(st.lists(st.sampled_from(possible), min_size=draw(st.integers(0, 2)), max_size=9)) if possible else []
    stage_subsets = st.lists(st.integers(0, n - 1), max_size=n, unique=True).map(sorted).map(tuple)
    names = [f"{stage}_{index}" for stage, kinds in enumerate(stages) for index in range(len(kinds))]
    frozen = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    return ModelRecipe(
        stages,
        tuple(sorted({*skips})),
        front,
        draw(st.sampled_from(["mean", "sum", "count"])),
        tuple(stage for stage in range(n - 1) if front == "functions" and draw(st.booleans())),
        draw(stage_subsets) if front == "functions" and not reproducible else (),
        tuple(frozen),
        front in ("modules", "net") and draw(st.booleans()),
        reproducible or front == "loss" or draw(st.sampled_from([True, False, True])),
        "float64" if reproducible else draw(st.sampled_from(["float32", "float64"])),
        draw(st.integers(0, 99)),
    )


@st.composite
def cuts(draw: st.DrawFn, undivided: bool = False) -> Cut:
    """Draw the cut of a batch; with `undivided` one whose batch could stay whole."""
    m = draw(st.sampled_from([3, 2, 4, 1]))
    mode = draw(st.sampled_from(["number", "size", "fewer"] + ["presplit"] * 2 * (not undivided)))
    slices = draw(st.sampled_from([1, 2])) if mode in ("number", "presplit") and not undivided else 1
    lengths = st.integers(2 * slices, 5 * slices)
    long = (draw(lengths),) if mode != "presplit" else tuple(draw(st.lists(lengths, min_size=3, max_size=3)))
    spec = draw(st.booleans()) and slices == 1
    if mode == "number":
        rows = draw(st.integers(m, 3 * m))
        return Cut(tuple(rows // m + (index < rows % m) for index in range(m)), long, mode, spec, slices)
    if mode == "size":
        size = draw(st.integers(1, 3))
        return Cut((*[size] * (m - 1), draw(st.integers(1, size))), long, mode, spec)
    if mode == "fewer":
        return Cut((1,) * m, long, mode, spec)
    return Cut(tuple(draw(st.lists(st.integers(1, 3), min_size=m, max_size=m))), long, mode, spec, slices)
