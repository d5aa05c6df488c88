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
from typing import Any

from torch import Tensor, nn

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
from fpipe.models.cutting.cut_net import CutNet
from fpipe.models.cutting.loss_part import LossPart
from fpipe.models.cutting.marked_graph import MarkedGraph
from fpipe.models.tracing.boundary import seeding
from fpipe.models.tracing.contexts import autocast_eps
from fpipe.models.tracing.net_graph import NetTensors
from fpipe.models.tracing.trace_loss import trace_loss
from fpipe.torch_private.dispatch import is_compiled


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
    each = zip(model.stages, cut.stages, cut.owned, strict=True)
    stages = tuple(
        replace(stage, names=tuple((name,) for name in own), **run.remembering()) for stage, run, own in each
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
    own = tuple({name: leaves[name].detach() for name in stage} for stage in cut.owned)
    return model, own


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
    """An example has rows to compute with."""
    for word, half in zip(("inputs", "target"), batch, strict=True):
        for place, leaf in tree.paths(half):
            if isinstance(leaf, Tensor) and leaf.ndim and not len(leaf):
                raise ValueError(f"{word}{place} has 0 rows; an example has at least one.")


def _checked(loss_fn: Callable[[Any, Any], Any], reduction: Reduction, aux: bool) -> Callable[[Any, Any], Any]:
    """The loss function, with a look at what it returns."""

    def checked(params: Any, batch: Any) -> Any:
        with pure(loss_fn, "loss_fn", (params, batch), tracing=True):
            made = loss_fn(params, batch)
        split_loss(made, reduction, aux, "what loss_fn returns")
        return made

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
