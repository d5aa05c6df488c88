"""Make a model from one loss function, cut at its marks.

    def loss_fn(params, batch):                       stage 0     x = embed(inputs)
        inputs, target = batch
        x = embed(params["embed"], inputs)            stage 1     y = block(x)
        y = block(params["block"], boundary(x))
        return loss(head(boundary(y), x), target)     stage 2     z = head(y, x)        loss(z, target)

The function is traced once into torch's own operations, above autograd, and each runs in the stage that the marks
before it say. What a stage reads of an earlier one is an edge of the dataflow, so skips and branches need no words of
their own; a parameter read in two stages is tied. The number of rows stays symbolic, other sizes are the example's.
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
from fpipe.meaning.from_functions import from_functions
from fpipe.meaning.purity.ambient import refuse_odd_modes
from fpipe.meaning.purity.attributes import modules_of
from fpipe.meaning.purity.fingerprint import Fingerprint, refuse_wrapped
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.params_and_state import check_batch
from fpipe.meaning.stages.outputs import split_loss
from fpipe.model import LossFunction, Model, Reduction, odd_signature
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.cut_at_marks import Subgraph
from fpipe.models.cutting.cut_net import CutNet
from fpipe.models.cutting.marked_graph import MarkedGraph, draws_random, has_effect
from fpipe.models.tracing.boundary import seeding
from fpipe.models.tracing.contexts import autocast_eps, restored_on_error
from fpipe.models.tracing.net_graph import NetTensors
from fpipe.models.tracing.places import place_of
from fpipe.models.tracing.trace_loss import trace_loss
from fpipe.torch_private.dispatch import is_compiled


class LossPart:
    """The loss behind the stages of a loss function: what depends on the target.

    Attributes:
        judging: the target, and all that is computed from it: operations of no stage.
        result: what the last stage hands on to it, a node or a tuple of them.

    Raises:
        ValueError: it is no loss behind stages: a stage reads the target, say, or the loss a parameter.
    """

    def __init__(self, marked: MarkedGraph) -> None:
        self.net, self.marked, self.params = marked.net, marked, marked.net.params
        leaves = enumerate(tree.leaves(self.net.inputs[1]))
        self.target = {leaf: place for place, leaf in leaves if isinstance(leaf, fx.Node)}
        self.judging = {*self.target, *marked.computed_from(self.target, marked.replicated)}
        self._refuse_mutated_constants()
        self._refuse_other_readers()
        self._refuse_random_numbers_after_loss()
        self.part = self._part()
        self.received = [node for node in marked.graph.nodes if node in self.part.received]
        self.result = tuple(self.received) if len(self.received) > 1 else self.received[0]

    def _is_of_loss(self, node: fx.Node) -> bool:
        """Whether the loss computes it: from the target, or as a count, which does not join as outputs do."""
        if node in self.judging:
            return True
        value = node.meta.get("val")
        is_count = isinstance(value, Tensor) and not value.ndim and not value.dtype.is_floating_point
        is_pure = node in self.marked.stage_of and node not in self.marked.mutators and not has_effect(node)
        return is_pure and is_count and not any(read in self.params for read in self.marked.reads(node))

    def _refuse_mutated_constants(self) -> None:
        """Refuse writes to what the function closes over: its views are fake, with a storage that nobody knows."""
        for constant, node in self.marked.mutators.items():
            if constant.op == "get_attr":
                shape = tuple(getattr(self.marked.module, str(constant.target)).shape)
                raise ValueError(
                    f"loss_fn writes a tensor of shape {shape} in place ({node.target}), which it closes over; a stage "
                    f"and a loss are pure functions. Hand it in, among params, or mutate a clone.{place_of(node)}"
                )

    def _refuse_other_readers(self) -> None:
        """Only what comes after the last mark may read the target, and with it no parameter."""
        for node, stage in self.marked.stage_of.items():
            if node not in self.judging:
                continue
            if stage < self.marked.stages - 1:
                raise ValueError(
                    f"stage {stage} reads the target ({node.name}); only what comes after the last boundary may. What "
                    f"a stage reads of the batch is one of its inputs.{place_of(node)}"
                )
            for name in (self.params[read] for read in self.marked.reads(node) if read in self.params):
                raise ValueError(
                    f"{node.name} reads the target and the parameter {name!r}: a loss(y, target) has no parameters. "
                    f"Compute what needs them before the target comes in.{place_of(node)}"
                )

    def _refuse_random_numbers_after_loss(self) -> None:
        """The last stage draws its random numbers before the loss draws any, since it runs before the loss."""
        for before, node in pairwise(node for node in self.marked.stage_of if draws_random(node)):
            if before in self.judging and node not in self.judging:
                raise ValueError(
                    f"{before.name} draws random numbers for the loss, and {node.name} after it for what comes before "
                    f"the loss; draw them in the other order.{place_of(before)}{place_of(node)}"
                )

    def _part(self) -> Subgraph:
        """The operations of the loss; what it receives is what the last stage hands on."""
        results = [self.marked.value(node) for node in self.marked.graph.output_node().all_input_nodes]
        own = {node for node in self.marked.graph.nodes if self._is_of_loss(node)}
        part = Subgraph(self.marked, results, own, {}, self.target)
        if not part.received:
            raise ValueError("the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.")
        return part

    def function(self, example: Any) -> Callable[[Any, Any], Any]:
        """The loss as a function `loss(y, target)`; `example` is one of the target."""
        run = self.part.module(self.net.output).forward
        of_target = list(self.part.batch.values())
        of_y = [self.received.index(node) for node in self.part.received]
        guard = BatchGuard(self.net, (*tree.leaves(self.net.inputs[1]), *self.part.received), example, "target")

        def loss(y: Any, target: Any) -> Any:
            targets, values = tree.leaves(target), tree.leaves(y)
            received = [values[place] for place in of_y]
            guard.check(targets, received)
            with restored_on_error():
                return run(*[targets[place] for place in of_target], *received)

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
    _check_function(loss_fn)
    check_batch(batch)
    _check_rows(batch)
    refuse_odd_modes()
    named = modules_of(loss_fn)
    for path, module in named:
        refuse_wrapped(path, module)
    names, spec = _names(params), tree.flatten(params)[1]
    paths, called = {module: path for path, module in named}, dict[nn.Module, str]()
    graph = trace_loss(_checked(loss_fn, reduction, aux), params, names, batch, paths, called)
    modules = called | paths
    leaves = dict(zip(names, tree.leaves(params), strict=True))
    marked = MarkedGraph(graph)
    behind = LossPart(marked)
    run_by = [(path, module) for module, path in modules.items()]
    tensors = NetTensors({}, frozenset(names))
    cut = CutNet(marked, tensors, leaves, graph.inputs[0], batch[0], behind.result, run_by, behind.judging)
    loss = behind.function(batch[1])
    model = from_functions(cut.stages, loss, inputs=cut.inputs, ties=cut.ties, reduction=reduction, aux=aux)
    stages = tuple(
        replace(stage, names=tuple((name,) for name in names), **run.remembering())
        for stage, run, names in zip(model.stages, cut.stages, cut.owned, strict=True)
    )
    function = LossFunction(partial(_called, loss_fn), autocast_eps(graph.module.graph))
    model = replace(
        model,
        stages=stages,
        whole=(tuple(names), spec),
        function=function,
        leaf_order=tuple(names),
        held=Fingerprint([loss_fn]),
    )
    return model, tuple({name: leaves[name].detach() for name in names} for names in cut.owned)


def _check_function(loss_fn: Any) -> None:
    """A loss function takes params and a batch, and is no function that torch has, nor one that it has compiled."""
    wanted = "from_loss takes a function loss_fn(params, batch)"
    if isinstance(loss_fn, type) or not callable(loss_fn):
        found = f"a class ({loss_fn.__name__})" if isinstance(loss_fn, type) else type(loss_fn).__name__
        raise TypeError(f"{wanted}, found {found}.")
    if is_compiled(loss_fn):
        raise TypeError(f"{wanted}, found one that torch.compile made; hand in the function that it was made from.")
    taken = odd_signature(loss_fn)
    if taken is not None:
        hint = " A Sequential goes through fpipe.from_sequential." if isinstance(loss_fn, nn.Sequential) else ""
        raise TypeError(f"{wanted}, its batch one pair (inputs, target); found one of {taken}.{hint}")
    # A partial that was handed a function, as torch.utils.checkpoint is, may call it.
    inner: Any = loss_fn.func if isinstance(loss_fn, partial) and not loss_fn.args else loss_fn
    home = type(inner) if isinstance(inner, nn.Module) else inner
    if (getattr(home, "__module__", None) or "").partition(".")[0] in ("torch", "builtins"):
        name = getattr(home, "__name__", type(inner).__name__)
        raise TypeError(
            f"{wanted}, which computes the loss of a whole net; found {name}, a function of other things. Call it on "
            "what the net gives and the target."
        )


def _check_rows(batch: tuple[Any, Any]) -> None:
    for word, half in zip(("inputs", "target"), batch, strict=True):
        for place, leaf in tree.paths(half):
            if isinstance(leaf, Tensor) and leaf.ndim and not len(leaf):
                raise ValueError(f"{word}{place} has 0 rows; an example has at least one.")


def _checked(loss_fn: Callable[[Any, Any], Any], reduction: Reduction, aux: bool) -> Callable[[Any, Any], Any]:
    """The loss function, with a look at what it returns."""

    def checked(params: Any, batch: Any) -> Any:
        with pure(loss_fn, "loss_fn", (params, batch), tracing=True):
            loss = loss_fn(params, batch)
        split_loss(loss, reduction, aux, "what loss_fn returns")
        return loss

    return checked


def _called(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any, key: int | None, microbatch: int) -> Any:
    """Call the function, drawing the random numbers that the stages draw for a microbatch."""
    with nullcontext() if key is None else seeding(key, microbatch):
        return loss_fn(params, batch)


def _names(params: Any) -> list[str]:
    """The leaves by their places: blocks.0.weight, or as Python writes them where that says two."""
    places = tree.paths(params)
    for place, leaf in places:
        if not isinstance(leaf, Tensor):
            who = f"params{place} is a {type(leaf).__name__}"
            hint = " Of a module, hand in dict(net.named_parameters())." if isinstance(leaf, nn.Module) else ""
            raise ValueError(f"{who}; parameters are tensors, and what else there is, close over.{hint}")
        if is_sharded(leaf):
            raise ValueError(
                f"params{place} is a DTensor, of which no loss function is traced whole. from_sequential and "
                "from_functions take them."
            )
    plain = [place.replace("['", ".").replace("[", ".").replace("']", "").replace("]", "")[1:] for place, _ in places]
    return plain if len(set(plain)) == len(plain) and all(plain) else [place or "params" for place, _ in places]
