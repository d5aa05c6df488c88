"""Make a model from one loss function, cut at its marks.

    def loss_fn(params, batch):                       stage 0     x = embed(inputs)
        inputs, target = batch
        x = embed(params["embed"], inputs)            stage 1     y = block(x)
        y = block(params["block"], boundary(x))
        return loss(head(boundary(y), x), target)     stage 2     z = head(y, x)        loss(z, target)

The function is traced once into torch's own operations, above autograd, and each runs in the stage that the marks
before it say. What a stage reads of an earlier one is an edge of the dataflow, so skips and branches need no names; a
parameter read in two stages is tied. The number of rows stays symbolic, other sizes are the example's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from fpipe import tree
from fpipe.graphs.tracing.marks import seed_stages
from fpipe.meaning.from_functions import from_functions
from fpipe.meaning.purity.ambient import refuse_unsupported_modes
from fpipe.meaning.purity.attributes import modules_of
from fpipe.meaning.purity.fingerprint import Fingerprint, refuse_unswappable_params
from fpipe.meaning.purity.outputs import split_loss
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.params_and_state import check_batch
from fpipe.model import LossFunction, Model, Reduction, unsuitable_signature
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.cut_at_marks import Subgraph
from fpipe.models.cutting.cut_net import CutNet
from fpipe.models.cutting.marked_graph import MarkedGraph, has_effect, node_draws_random
from fpipe.models.exporting.net_graph import NetTensors, without_checkpoints
from fpipe.models.exporting.node_contexts import autocast_eps, restored_on_error
from fpipe.models.exporting.source_locations import location_of
from fpipe.models.exporting.trace_loss import trace_loss
from fpipe.torch_internals import is_compiled


class LossPart:
    """The part of a loss function behind the stages: the operations that depend on the target.

    Attributes:
        loss_nodes: the target, and all that is computed from it: operations of no stage.
        received: the values that it reads of the stages, in the order of the graph.
        result: the same as the output of the last stage, a node or a tuple of them.

    Raises:
        ValueError: a stage reads the target, or the loss reads a parameter.
    """

    def __init__(self, marked: MarkedGraph) -> None:
        self.net, self.marked, self.params = marked.net, marked, marked.net.params
        leaves = enumerate(tree.leaves(self.net.inputs[1]))
        self.target = {leaf: path for path, leaf in leaves if isinstance(leaf, fx.Node)}
        self.loss_nodes = {*self.target, *marked.dependents_of(self.target, marked.replicated)}
        self._refuse_mutated_constants()
        self._refuse_other_readers()
        self._refuse_random_numbers_after_loss()
        self.part = self._loss_subgraph()
        self.received = [node for node in marked.graph.nodes if node in self.part.received]
        self.result = tuple(self.received) if len(self.received) > 1 else self.received[0]

    def _is_of_loss(self, node: fx.Node) -> bool:
        """Whether the loss computes a node: it depends on the target, or is a count."""
        # A count, such as the number of tokens, is a whole number without dimensions. As an output of the last stage it
        # could not be joined over microbatches, as rows are.
        if node in self.loss_nodes:
            return True
        value = node.meta.get("val")
        is_count = isinstance(value, Tensor) and not value.ndim and not value.dtype.is_floating_point
        is_pure = node in self.marked.stage_of and node not in self.marked.mutators and not has_effect(node)
        return is_pure and is_count and not any(operand in self.params for operand in self.marked.reads(node))

    def _refuse_mutated_constants(self) -> None:
        """Raise ValueError if a tensor that the function closes over is written."""
        # In the trace it is fake, and so are its views, whose storages are unknown: no write could be carried over.
        for constant, node in self.marked.mutators.items():
            if constant.op == "get_attr":
                shape = tuple(getattr(self.marked.module, str(constant.target)).shape)
                raise ValueError(
                    f"loss_fn writes a tensor of shape {shape} in place ({node.target}), which it closes over. Hand it "
                    f"in, among params, or mutate a clone.{location_of(node)}"
                )

    def _refuse_other_readers(self) -> None:
        """Raise ValueError if the target is read before the last mark, or together with a parameter."""
        for node, stage in self.marked.stage_of.items():
            if node not in self.loss_nodes:
                continue
            if stage < self.marked.stage_count - 1:
                raise ValueError(
                    f"stage {stage} reads the target ({node.name}); only what comes after the last boundary may."
                    f"{location_of(node)}"
                )
            for name in (self.params[value] for value in self.marked.reads(node) if value in self.params):
                raise ValueError(
                    f"{node.name} reads the target and the parameter {name!r}. Apply the parameter before the target "
                    f"comes in.{location_of(node)}"
                )

    def _refuse_random_numbers_after_loss(self) -> None:
        """Raise ValueError if loss_fn draws random numbers for the loss before others of the last stage."""
        # The stage runs before the loss and would draw first, so the numbers would be others than those of loss_fn.
        for previous_node, node in pairwise(node for node in self.marked.stage_of if node_draws_random(node)):
            if previous_node in self.loss_nodes and node not in self.loss_nodes:
                raise ValueError(
                    f"{previous_node.name} draws random numbers for the loss, and {node.name} later for a stage. Draw "
                    f"them in the other order.{location_of(previous_node)}{location_of(node)}"
                )

    def _loss_subgraph(self) -> Subgraph:
        """Return the operations of the loss; the values that it receives are the output of the last stage."""
        results = [self.marked.value(node) for node in self.marked.graph.output_node().all_input_nodes]
        local_nodes = {node for node in self.marked.graph.nodes if self._is_of_loss(node)}
        subgraph = Subgraph(self.marked, results, local_nodes, {}, self.target)
        if not subgraph.received:
            raise ValueError("the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.")
        return subgraph

    def function(self, example: Any) -> Callable[[Any, Any], Any]:
        """Return the loss as a function `loss(y, target)`; `example` is a target."""
        run = self.part.module(self.net.output).forward
        # The graph takes leaves of the target, then values of y; y has them in the order of the graph.
        target_indices = list(self.part.batch.values())
        output_indices = [self.received.index(node) for node in self.part.received]
        guard = BatchGuard(self.net, (*tree.leaves(self.net.inputs[1]), *self.part.received), example, "target")

        def loss(y: Any, target: Any) -> Any:
            targets, values = tree.leaves(target), tree.leaves(y)
            received = [values[index] for index in output_indices]
            guard.check(targets, received)
            with restored_on_error():
                return run(*[targets[index] for index in target_indices], *received)

        return loss


def from_loss(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    batch: tuple[Any, Any],
    *,
    reduction: Reduction = "mean",
    aux: bool = False,
) -> tuple[Model, tuple[dict[str, Tensor], ...]]:
    """Cut a loss function into stages at its `fpipe.boundary` marks.

    Args:
        loss_fn: `loss_fn(params, (inputs, target))` gives a 0-d tensor, or (total, count) with reduction="count". It is
            called on fake tensors; modules that it closes over stay in the mode they are in then. Only what comes after
            the last mark may read the target, and with it no parameter. Random numbers are those that torch draws where
            each stage begins with `torch.manual_seed(fpipe.fold_in(key, stage, microbatch))`.
        params: any pytree of tensors.
        batch: an example (inputs, target); rows may differ later, other sizes may not.
        reduction, aux: how the losses of microbatches make one, and whether there are auxiliary results, as in
            `from_functions`.

    Returns:
        The model, and per stage the parameters it is the first to read, by their place in `params`; `join_params`
        makes the pytree of them again, and `split_params` the other way. Outputs are what the loss is computed from.

    Raises:
        ValueError: a mark with nothing to compute before it; a stage that reads the target; a function that branches
            on the number of rows or on data, or of which a trace captures only a part; a module that torch.jit made.
        RuntimeError: a function that mutates what it closes over: tensors, or buffers of modules.

    >>> import fpipe, torch
    >>> def loss_fn(params, batch):
    ...     inputs, target = batch
    ...     hidden = fpipe.boundary(torch.tanh(inputs @ params["w"]))
    ...     return (hidden @ params["w"] + inputs - target).square().mean()
    >>> model, params = fpipe.from_loss(loss_fn, {"w": torch.eye(2)}, (torch.ones(4, 2), torch.zeros(4, 2)))
    >>> model.inputs, model.ties, [list(stage) for stage in params]
    (('batch', ('batch', 0)), (((0, 'w'), (1, 'w')),), [['w'], []])
    """
    # 1) Refuse what cannot be traced: other callables, examples without rows, modes of torch, odd modules.
    _check_function(loss_fn)
    check_batch(batch)
    _check_rows(batch)
    refuse_unsupported_modes()
    named = modules_of(loss_fn)
    for path, module in named:
        refuse_unswappable_params(path, module)
    # 2) Trace the whole function; `called` collects the modules that it calls without closing over them.
    names, spec = _names(params), tree.flatten(params)[1]
    paths, called = {module: path for path, module in named}, dict[nn.Module, str]()
    graph = trace_loss(_checked(loss_fn, reduction, aux), params, names, batch, paths, called)
    modules = called | paths
    leaves = dict(zip(names, tree.leaves(params), strict=True))
    # 3) Split off the loss, and cut the rest at the marks.
    marked = MarkedGraph(graph)
    loss_part = LossPart(marked)
    run_by = [(path, module) for module, path in modules.items()]
    tensors = NetTensors({}, frozenset(names))
    cut = CutNet(marked, tensors, leaves, graph.inputs[0], batch[0], loss_part.result, run_by, loss_part.loss_nodes)
    loss = loss_part.function(batch[1])
    model = from_functions(cut.stages, loss, inputs=cut.inputs, ties=cut.ties, reduction=reduction, aux=aux)
    stages = tuple(
        replace(stage, names=tuple((name,) for name in names), **run.state_fields())
        for stage, run, names in zip(model.stages, cut.stages, cut.owned, strict=True)
    )
    # 4) Say of the model what its parameters are called, and which function computes the same uncut.
    function = LossFunction(partial(_called, loss_fn), autocast_eps(graph.module.graph))
    order, fingerprint = tuple(names), Fingerprint([loss_fn])
    model = replace(
        model, stages=stages, params_spec=(order, spec), function=function, leaf_order=order, fingerprint=fingerprint
    )
    return model, tuple({name: leaves[name].detach() for name in names} for names in cut.owned)


def _check_function(loss_fn: Any) -> None:
    """Raise TypeError unless it is a function of params and a batch that torch has neither defined nor compiled."""
    expected = "from_loss takes a function loss_fn(params, batch)"
    if isinstance(loss_fn, type) or not callable(loss_fn):
        description = f"a class ({loss_fn.__name__})" if isinstance(loss_fn, type) else type(loss_fn).__name__
        raise TypeError(f"{expected}, found {description}.")
    if is_compiled(loss_fn):
        raise TypeError(f"{expected}, found one that torch.compile made; hand in the function that it was made from.")
    parameters = unsuitable_signature(loss_fn)
    if parameters is not None:
        hint = " A Sequential goes through fpipe.from_sequential." if isinstance(loss_fn, nn.Sequential) else ""
        raise TypeError(f"{expected}, its batch one pair (inputs, target); found one of {parameters}.{hint}")
    # A partial that was handed a function, as torch.utils.checkpoint is, may call it.
    plain_function: Any = loss_fn.func if isinstance(loss_fn, partial) and not loss_fn.args else loss_fn
    home = type(plain_function) if isinstance(plain_function, nn.Module) else plain_function
    if (getattr(home, "__module__", None) or "").partition(".")[0] in ("torch", "builtins"):
        name = getattr(home, "__name__", type(plain_function).__name__)
        raise TypeError(f"{expected}; found {name}, a loss of an output and a target. Call it inside such a function.")


def _check_rows(batch: tuple[Any, Any]) -> None:
    for batch_part, half in zip(("inputs", "target"), batch, strict=True):
        for path, leaf in tree.paths(half):
            if isinstance(leaf, Tensor) and leaf.ndim and not len(leaf):
                raise ValueError(f"{batch_part}{path} has 0 rows; an example has at least one.")


def _checked(loss_fn: Callable[[Any, Any], Any], reduction: Reduction, aux: bool) -> Callable[[Any, Any], Any]:
    """Wrap the loss function so that each call is checked to be pure and to return a loss."""

    def checked(params: Any, batch: Any) -> Any:
        with pure(loss_fn, "loss_fn", (params, batch), tracing=True):
            loss = loss_fn(params, batch)
        split_loss(loss, reduction, aux, "what loss_fn returns")
        return loss

    return checked


def _called(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any, key: int | None, microbatch: int) -> Any:
    """Call the function, drawing the random numbers that the stages draw for a microbatch."""
    # A checkpoint calls modules again in the backward, when functional_call has put their own parameters back.
    with nullcontext() if key is None else seed_stages(key, microbatch), without_checkpoints():
        return loss_fn(params, batch)


def _names(params: Any) -> list[str]:
    """Return a name for each leaf: `blocks.0.weight`, or `['blocks'][0]['weight']` if two would have one name."""
    paths_and_leaves = tree.paths(params)
    for path, leaf in paths_and_leaves:
        if not isinstance(leaf, Tensor):
            hint = " Of a module, hand in dict(net.named_parameters())." if isinstance(leaf, nn.Module) else ""
            raise ValueError(
                f"params{path} is a {type(leaf).__name__}; parameters are tensors, and what else there is, close over."
                f"{hint}"
            )
        if is_sharded(leaf):
            raise ValueError(
                f"params{path} is a DTensor, of which no loss function is traced whole. from_sequential and "
                "from_functions take them."
            )
    paths = [path for path, _ in paths_and_leaves]
    dotted = [path.replace("['", ".").replace("[", ".").replace("']", "").replace("]", "")[1:] for path in paths]
    return dotted if len(set(dotted)) == len(dotted) and all(dotted) else [path or "params" for path in paths]
