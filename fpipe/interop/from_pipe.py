"""Make a model from a Pipe of torch.distributed.pipelining: the graphs that torch has split are the stages.

    submod_pp_0(ids)    submod_pp_1(y0[0], mask)    -->    f0(params, ids)    f1(params, ((ids, mask), y0[0]))

Torch has traced the net on a microbatch of one shape, with the mode that its modules had: a stage takes no other, and
`train()` and `eval()` change nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe

from fpipe.model import Model, Reduction, Source, one_or_all, same_keys
from fpipe.models.modules.stage_module import BoundModules, StageModule
from fpipe.models.of_modules import Leaf, Params, names_of, of_modules
from fpipe.torch_internals import held_by
from fpipe.torch_private.modules import generated_code


def from_pipe(
    pipe: Pipe,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    reduction: Reduction = "mean",
    aux: bool = False,
    example: Any = None,
) -> tuple[Model, Params, Params]:
    """Take the stages that torch's `pipeline(module, mb_args, split_spec=...)` has made.

    Args:
        pipe: torch's split of a net. Nothing in it is changed.
        loss: `loss(y, target)`, where y is what the last of torch's stages returns: a tensor, or a tuple of them.
        reduction, aux: as in `from_functions`.
        example: the inputs of a microbatch, for a net that mutates buffers, such as a batch norm's: each stage runs
            once on fake tensors like these, which may be on the meta device.

    Returns:
        The model; per stage its trainable parameters by their names in the net's state_dict; per stage its module
        state: the buffers that it mutates, of a batch norm in the order of the forwards, since torch's graph does not
        say which these are. The inputs of a batch are one tensor, or a dict by the names of the net's arguments as
        torch's graph has them, or a tuple in their order. A microbatch has as many rows as the one that torch traced.

    Raises:
        ValueError: the net returns what an earlier stage makes, or torch has put a backward into the graph.

    Source: torch.distributed.pipelining, `pipeline` and `Pipe`.

    >>> import fpipe, torch
    >>> from torch.distributed.pipelining import SplitPoint, pipeline
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> pipe = pipeline(net, (torch.ones(4, 2),), split_spec={"2": SplitPoint.BEGINNING})
    >>> model, params, state = fpipe.from_pipe(pipe, loss=torch.nn.functional.mse_loss)
    >>> [list(stage) for stage in params], model.inputs
    ([['0.weight', '0.bias'], ['2.weight', '2.bias']], ('batch', 0))
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    >>> fpipe.verify(program, model, params, (torch.randn(8, 2), torch.randn(8, 1))).bitwise
    True
    """
    if not isinstance(pipe, Pipe):  # pyright: ignore[reportUnnecessaryIsInstance]
        found = type(pipe).__name__
        raise TypeError(f"from_pipe takes what torch.distributed.pipelining.pipeline returns, found {found}.")
    if pipe.has_loss_and_backward:
        raise ValueError(
            "this Pipe has a loss and its backward in its graph (output_loss_value_spec=); split the net without, and "
            "say loss= here."
        )
    taken = [*_taken(pipe.split_gm.graph)]
    modules = [pipe.get_stage_module(number) for number in range(pipe.num_stages)]
    together = _together(pipe)
    _refuse_lost_ties(modules, together)
    leaves = _leaves(modules, together)
    each = zip(modules, taken, names_of(leaves, len(modules)), strict=True)
    runs = [
        StageModule(number, {one.called: _Call(module, one)}, names, bound=_Own(module))
        for number, (module, one, names) in enumerate(each)
    ]
    called = [one.called for one in taken]
    inputs: list[Source | tuple[Source, ...]] = [one.inputs for one in taken]
    owned = [(leaf, modules[min(leaf)].get_parameter(leaf[min(leaf)][0])) for leaf in leaves]
    how: Any = {"loss": loss, "inputs": inputs, "reduction": reduction, "aux": aux, "example": example}
    return of_modules(runs, called, owned, **how, net=pipe)


class Taken(NamedTuple):
    """The inputs of a stage of torch's, as it is called in torch's graph, by their sources, each once: in which place
    each argument has its source, and of the batch its leaf; for leaves of the batch the name and the traced shape."""

    called: str
    inputs: Source | tuple[Source, ...]
    places: tuple[tuple[int, int | None], ...]
    root: tuple[tuple[str, tuple[int, ...] | None], ...]


def _taken(graph: fx.Graph) -> Iterator[Taken]:
    """The inputs of each stage, in order."""
    calls = {node: number for number, node in enumerate(node for node in graph.nodes if node.op == "call_module")}
    leaves = [node for node in graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in leaves]
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in values]
    root = tuple((str(node.target), shape) for node, shape in zip(leaves, shapes, strict=True))

    def source(node: fx.Node) -> tuple[Source, int | None]:
        if node in leaves:
            return "batch", leaves.index(node)
        if node.target is operator.getitem:
            return (calls[node.args[0]], node.args[1]), None  # pyright: ignore[reportArgumentType, reportReturnType]
        return calls[node], None

    for node in calls:
        found = [source(arg) for arg in node.all_input_nodes]
        sources: list[Source] = [*dict.fromkeys([one for one, _ in found])]
        places = tuple((sources.index(one), leaf) for one, leaf in found)
        yield Taken(str(node.target), one_or_all(sources), places, root)
    last = len(calls) - 1
    for node in graph.output_node().all_input_nodes:
        home, _ = source(node)
        home = home[0] if isinstance(home, tuple) else home
        if home != last:
            made = "is handed" if home == "batch" else f"makes in stage {home}"
            raise ValueError(
                f"the net returns {node.name!r}, which it {made}; the outputs of a pipeline are those of its last "
                f"stage, {last}. Return it no more, or split the net behind it."
            )


class _Own(BoundModules):
    """The parameters and buffers of torch's graph under the names that they have there."""

    def __init__(self, module: nn.Module) -> None:
        held = held_by(module)
        super().__init__(held.children, held.parameters, held.buffers)
        vars(self)["of"] = module

    def __reduce__(self) -> tuple[Any, ...]:
        return _Own, (vars(self)["of"],)  # of a copy, those of the copied module


class _Call(nn.Module):
    """Torch's graph of a stage, on one pytree."""

    def __init__(self, module: nn.Module, taken: Taken) -> None:
        super().__init__()
        self.module, self.taken = module, taken

    def forward(self, x: Any) -> Any:
        """Its output."""
        sources = x if isinstance(self.taken.inputs, tuple) else (x,)
        found = [leaf_of(sources[at], leaf, self.taken) for at, leaf in self.taken.places]
        with generated_code(self.module):
            return self.module(*found)


def leaf_of(source: Any, leaf: int | None, taken: Taken) -> Any:
    """An argument: all of what a stage gives, or a leaf of the batch, refused if torch has traced another."""
    if leaf is None:
        return source
    name, shape = taken.root[leaf]
    names = [name for name, _ in taken.root]
    if isinstance(source, Mapping):
        same_keys(source, names, "the inputs", "an argument of the net as torch's pipeline() traced it")  # pyright: ignore[reportUnknownArgumentType]
        found: Any = source[name]
    else:
        each: Sequence[Any] = source if isinstance(source, tuple | list) else (source,)
        if len(each) != len(names):
            raise ValueError(f"the net was traced for the inputs {', '.join(names)}; found {len(each)} of them.")
        found = each[leaf]
    if shape is not None and (not isinstance(found, Tensor) or found.shape != shape):
        other = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"{name} was {shape} when torch's pipeline() traced the net, found {other}: a Pipe takes microbatches of "
            f"one shape. Split batches so that each has {shape[0] if shape else 'one'} rows, or trace the net again."
        )
    return found  # pyright: ignore[reportUnknownVariableType]


def _leaves(modules: Sequence[nn.Module], together: Mapping[tuple[int, str], int]) -> list[Leaf]:
    """The parameters that train and that some graph reads."""
    found: dict[Any, Leaf] = {}
    for number, module in enumerate(modules):
        for name, one in _read(module).items():
            if one.requires_grad:
                leaf = found.setdefault(together.get((number, name), one), {})
                leaf[number] = (*leaf.get(number, ()), name)
    return [*found.values()]


def _together(pipe: Pipe) -> dict[tuple[int, str], int]:
    """Of the parameters that torch has copied into several stages which are one."""
    calls = [str(node.target) for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    return {
        (calls.index(stage), name): number
        for number, uses in enumerate(pipe.replicated_params)
        for stage, name in uses.items()
    }


def _refuse_lost_ties(modules: Sequence[nn.Module], together: Mapping[tuple[int, str], int]) -> None:
    """A ValueError where torch has copied a parameter under one of the two names that a stage reads it by."""
    for stage, copied in together:
        one = modules[stage].get_parameter(copied)
        for name, other in _read(modules[stage]).items():
            if (stage, name) in together or one.is_meta or one.shape != other.shape or one.numel() < 2:
                continue
            if torch.equal(one, other) and one.unique().numel() > 1:
                raise ValueError(
                    f"{copied!r} and {name!r} of stage {stage} have the same numbers: torch's pipeline() copies a "
                    "parameter that several stages read, and one that a stage reads by two names it makes two. Read it "
                    "by one name there, or cut the net by fpipe.from_loss."
                )


def _read(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the graphs of a stage read; torch leaves others behind."""
    read = {
        f"{path}.{node.target}" if path else str(node.target)
        for path, one in module.named_modules(remove_duplicate=False)
        if isinstance(graph := getattr(one, "graph", None), fx.Graph)
        for node in graph.find_nodes(op="get_attr")
    }
    return {name: one for name, one in module.named_parameters(remove_duplicate=False) if name in read}
