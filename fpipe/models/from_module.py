"""Make a model from any module: export its graph, and cut it between its blocks.

net: wte, h.0 .. h.3, head        --> stages=2 -->        [wte h.0 h.1]  [h.2 h.3 head]

The net's code stays unchanged: torch exports `forward` once, and each of its operations runs in the stage of the module
that it is in. What a stage reads of an earlier one is an edge of the dataflow, so skips need no names, and a parameter
read in two stages is tied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from fpipe import tree
from fpipe.limits import check_whole_number
from fpipe.meaning.from_functions import from_functions
from fpipe.meaning.purity.ambient import refuse_unsupported_modes
from fpipe.meaning.purity.attributes import warn_of_compiled
from fpipe.meaning.purity.fingerprint import Fingerprint
from fpipe.meaning.purity.outputs import with_rows_named
from fpipe.meaning.single_device.label_means import IGNORED, MEAN, describe_padding, weighs_unequally
from fpipe.meaning.single_device.microbatch import cut as cut_rows
from fpipe.meaning.single_device.params_and_state import check_batch
from fpipe.model import LossFunction, MeanLabels, Model, Reduction, Stage, without_loss
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.cut_net import CutNet, CutReport, with_untrained
from fpipe.models.cutting.marked_graph import MarkedGraph, node_draws_random, reads_written_buffer
from fpipe.models.cutting.place_cuts import as_exchange, place_cuts
from fpipe.models.exporting.module_calls import NetFunction
from fpipe.models.exporting.net_graph import NetGraph, NetTensors, read_graph, tensors_of
from fpipe.models.exporting.node_contexts import autocast_eps
from fpipe.models.exporting.opaque_modules import Exported, export_with_opaque_modules
from fpipe.timing.costs import Costs
from fpipe.torch_internals import warn

Params = tuple[dict[str, Tensor], ...]


def from_module(
    net: nn.Module | ExportedProgram,
    stages: int | None = None,
    *,
    batch: Any,
    microbatches: int | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    cuts: Sequence[str] | None = None,
    costs: Mapping[str, float] | Costs | None = None,
    reduction: Reduction = "mean",
    aux: bool = False,
    cut_collectives: bool = False,
) -> tuple[Model, Params, Params]:
    """Cut any module into stages.

    Args:
        net: a module that `torch.export.export(strict=False)` takes, in the mode in which it is to run, or a program
            that it made. `fpipe.boundary` in its forward is a cut too. A module in it whose Python no export
            contains, such as a dropless mixture of experts, is one operation of its stage, and a warning names it.
            Where parameters are on meta, the net is traced there, and `load_params` and `init_params` give them values.
        stages: how many; the blocks that repeat, such as the layers of a ModuleList, are dealt out so that the most
            expensive stage costs as little as can be.
        batch: (inputs, target), as a step takes it, with at least two rows. Inputs are a dict of keywords, a
            tuple of arguments, or the one argument. Rows may differ later, and so may the second dimension of integers,
            the length of a sequence, where the net allows it. A dict stands for (inputs, None).
        microbatches: trace the first of so many microbatches of the batch, for a net that fixes its rows, as
            `len(x)` does; a warning says which does.
        loss: `loss(output, target)`, as in `from_functions`. None: the net computes it, as those of transformers do
            when `labels` are among their inputs: it is the output's `.loss`, its entry "loss", or the only 0-d tensor
            in the output, such as that of (logits, loss); `Result.outputs` is what else it returns, such as logits.
            A net without a loss makes a model whose programs have forwards alone.
        cuts: instead of balanced blocks, the paths of modules after which stages end, as in ["encoder", "decoder.0"].
        costs: of each block by its path, or what `fpipe.profile` measured with a stage for each block, instead of
            floating-point operations.
        reduction, aux: as in `from_functions`.
        cut_collectives: make each collective of `torch.distributed._functional_collectives` over a dimension of a mesh
            a stage of its own too, as `fpipe.exchange` does: an all-to-all of equal splits, a gather or sum over dim 0;
            and each redistribute of a DTensor that is a collective forward or backward, such as those of
            `parallelize_module`. All processes along it cut alike. It keeps the net's own group, in every runtime.

    Returns:
        The model, which prints what is where; per stage its trainable parameters by their names in `net.state_dict()`,
        one used twice under its first name, as aliases of the net's memory; per stage its module state: the buffers
        that it writes. Frozen parameters and other buffers are constants, but those on meta are leaves without a
        gradient of each stage that reads them. `stage.name` says which modules are in a stage. Random numbers are those
        that torch draws where each stage begins with `torch.manual_seed(fpipe.fold_in(key, stage, microbatch))`.

    Raises:
        ValueError: a net that cannot be exported, with its own line; stages that are more than there are blocks; cuts
            that name no module; no loss.

    >>> import fpipe, torch
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    ...     def forward(self, x):
    ...         for block in self.blocks:
    ...             x = x + block(x).tanh()
    ...         return x
    >>> batch = (torch.ones(4, 2), torch.zeros(4, 2))
    >>> model, params, state = fpipe.from_module(Net(), 2, loss=torch.nn.functional.mse_loss, batch=batch)
    >>> [stage.name for stage in model.stages]
    ['blocks.0, blocks.1', 'blocks.2, blocks.3']
    """
    # 1) Check what was asked for. Cut only at collectives, a net is one stage but for these.
    stages = 1 if cut_collectives and stages is None and cuts is None else stages
    _check_cuts(stages, cuts, costs)
    refuse_unsupported_modes()
    warn_of_compiled([net], 2)
    batch = _checked_batch(batch, loss)
    if microbatches is not None:
        batch = cut_rows(batch, 0, check_whole_number("microbatches", microbatches))[0]
    # 2) Export the net as one flat graph, and put marks where stages end.
    exported = Exported(net) if isinstance(net, ExportedProgram) else export_with_opaque_modules(net, batch[0])
    tensors = tensors_of(net, exported.program)
    graph = read_graph(exported.program, tensors)
    try:
        plan = place_cuts(graph.module.graph, graph.params, stages, cuts, costs, cut_collectives)
    except ValueError as error:
        raise ValueError(" ".join([str(error), *exported.explanations])) from None
    if exported.explanations:
        warn("\n".join(exported.explanations), stacklevel=2)
    modules = [*net.named_modules()] if isinstance(net, nn.Module) else []
    own_loss = None if loss is not None or not _has_loss(graph.output) else _loss_of(graph.output)
    outputs = graph.output if own_loss is None else _without_loss(graph.output, own_loss)
    # Its loss is the only result of a net that returns nothing else.
    result = own_loss if outputs is None else outputs if own_loss is None else (outputs, own_loss)
    has_separate_loss = own_loss is not None and outputs is not None
    labels = None if loss is not None else _labels_of(graph, tensors, _inputs(graph, batch[0]))
    message = describe_padding(labels, batch) if labels and reduction == "mean" else ""
    if message:
        warn(message, stacklevel=2)
    # 3) Cut the graph at the marks into stage functions, and make a model of them.
    marked = MarkedGraph(graph)
    tensors = with_untrained(marked, tensors)
    leaves = {name: tensors.current_tensor(name) for name in graph.params.values()}
    cut = CutNet(marked, tensors, leaves, _inputs(graph, batch[0]), batch[0], result, modules)
    if microbatches is None:
        _warn_of_fixed_rows(cut.guard)
    cut.stages[-1].has_loss = has_separate_loss
    model = from_functions(
        cut.stages,
        without_loss if loss is None and own_loss is None else loss,
        inputs=cut.inputs,
        ties=cut.ties,
        reduction="mean" if loss is None and own_loss is None else reduction,
        aux=aux,
        aux_losses=[len(cut.stages) - 1] if has_separate_loss else [],
    )
    # 4) Give the stages their names and those of their parameters; a stage that is a collective becomes an exchange.
    names = ([tensors.names(name) for name in cut.readers if (name,) in run.names] for run in cut.stages)
    stages_of = [
        replace(stage, name=module_words, names=tuple(leaf_names), **run.state_fields())
        for stage, run, module_words, leaf_names in zip(model.stages, cut.stages, plan.module_words, names, strict=True)
    ]
    for number, function in plan.exchanges.items():
        stages_of[number] = as_exchange(stages_of[number], function)
    fingerprint = Fingerprint([loss], modules)
    frozen = frozenset((i, name) for i, owned in enumerate(cut.owned) for name in owned if name in tensors.untrained)
    report = CutReport(cut, plan.module_words)
    leaf_order = tuple(
        name for name, canonical_name in tensors.canonical_names.items() if name == canonical_name and name in leaves
    )
    model = replace(
        model,
        stages=tuple(stages_of),
        report=report,
        fingerprint=fingerprint,
        frozen=frozen,
        leaf_order=leaf_order,
        labels=labels,
    )
    params = tuple({name: leaves[name].detach() for name in owned} for owned in cut.owned)
    state = tuple(run.state() for run in cut.stages)
    # 5) Note how the model was made: the function that computes the same uncut, and how another net is cut alike.
    if isinstance(net, nn.Module):
        arguments: Any = {"batch": batch, "microbatches": 1, "loss": loss, "cuts": cuts, "costs": costs}
        arguments |= {"reduction": reduction, "aux": aux, "cut_collectives": cut_collectives}
        # Each stage seeds torch where it begins. The whole net is seeded where its blocks are, and so cannot draw
        # the numbers of stages that begin at a collective, in the middle of a block.
        draws_elsewhere = plan.exchanges and any(map(node_draws_random, marked.stage_of))
        if model.has_loss and not draws_elsewhere and not any(map(reads_written_buffer, cut.written_buffers)):
            function = NetFunction(net, loss or _loss_of, plan.last_calls)
            eps = autocast_eps(graph.module.graph)
            model = replace(model, function=LossFunction(function, eps, graph.who, graph.door))
        fingerprint.set_recut(model, lambda: from_module(net, stages, **arguments)[0])
        same_cuts: Any = arguments | {"cuts": [call.path for call in plan.last_calls], "costs": None}
        state_names = [run.state_names for run in cut.stages]
        fingerprint.set_source(net, lambda new_net: _with_state(from_module(new_net, **same_cuts)[0], state_names))
    return model, params, state


def _check_cuts(stages: int | None, cuts: Sequence[str] | None, costs: Any) -> None:
    """Raise ValueError for arguments that do not go together."""
    if stages is not None:
        check_whole_number("stages", stages)
    if stages is None and cuts is None:
        raise ValueError("say how many stages, or cuts=[...] with the modules after which they end.")
    if costs is not None and cuts is not None:
        raise ValueError("costs= balances stages, and cuts= says where they end; leave one of the two out.")


def _checked_batch(batch: Any, loss: Any) -> tuple[Any, Any]:
    """Return inputs and target of a batch, which is a pair, or a dict of inputs for a net that computes its loss."""
    if isinstance(batch, Mapping):
        batch = (batch, None)
    if not isinstance(batch, tuple | list) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"batch is (inputs, target), its inputs a dict, a tuple or the one argument; found {type(batch).__name__}."  # pyright: ignore[reportUnknownArgumentType]
        )
    inputs, target = batch  # pyright: ignore[reportUnknownVariableType]
    check_batch((inputs, target))
    if loss is not None and target is None:
        raise ValueError("the batch has no target for loss=; say batch=(inputs, target).")
    if loss is None and target is not None:
        raise ValueError(
            "without loss= the net computes the loss, and the target is not read. Hand in batch=(inputs, None), "
            "or say loss=."
        )
    if not any(isinstance(leaf, Tensor) for leaf in tree.leaves(inputs)):
        raise ValueError("the inputs of the batch have no tensor.")
    return inputs, target


def _with_state(model: Model, names_by_stage: Sequence[Sequence[str]]) -> Model:
    """Let the stages of a model that was just cut take and return these buffers as state."""
    stages: list[Stage] = []
    for stage, names in zip(model.stages, names_by_stage, strict=True):
        run: Any = stage.forward
        if names:
            run.return_state(names)
        stages.append(replace(stage, **run.state_fields()) if names else stage)
    return replace(model, stages=tuple(stages))


def _warn_of_fixed_rows(guard: BatchGuard) -> None:
    """Warn if the trace has fixed the number of rows, so that each microbatch must have as many."""
    if (fixed := guard.fixed_rows()) is not None:
        path, rows = fixed
        warn(
            f"the net fixes the {rows} rows of {path}, as len(x) and list(x) do (x.shape[0] leaves them open): it "
            f"runs in microbatches of {rows} rows only. Say microbatches=m to trace the first of m microbatches of the "
            "batch, or microbatches=1 if the batch is one.",
            stacklevel=3,
        )


def _labels_of(graph: NetGraph, tensors: NetTensors, inputs: Any) -> MeanLabels | None:
    """Return which inputs are the labels of the net's mean cross entropy."""
    path_by_node = {leaf: path for path, leaf in tree.paths(inputs) if isinstance(leaf, fx.Node)}
    for node in (node for node in graph.module.graph.nodes if node.target in _CROSS_ENTROPIES):
        # Labels are shifted, flattened and cast on their way: ops whose first argument is the tensor itself. The way of
        # labels that the net makes, as by torch.arange, ends in a number.
        arguments: Any = *node.args, *(None, MEAN, IGNORED)[len(node.args) - 2 :]
        _, labels, weight, reduction, ignored = arguments[:5]
        while isinstance(labels, fx.Node) and labels not in path_by_node:
            labels = labels.args[0] if labels.args else None
        if reduction == MEAN and isinstance(labels, fx.Node):
            weight = tensors.current_tensor(graph.constants[weight]) if weight in graph.constants else weight
            return MeanLabels("inputs", path_by_node[labels], ignored, weighs_unequally(weight))
    return None


_CROSS_ENTROPIES: Any = (torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss_nd.default)


def _inputs(graph: NetGraph, inputs: Any) -> Any:
    args, kwargs = graph.inputs
    if isinstance(inputs, Mapping):
        return {name: kwargs[name] for name in inputs}  # pyright: ignore[reportUnknownVariableType]
    return type(inputs)(args) if isinstance(inputs, tuple | list) else args[0]  # pyright: ignore[reportUnknownVariableType]


def _loss_of(output: Any, target: Any = None) -> Any:
    """Return the loss in a net's output: the value called "loss", or the only number."""
    named_loss, numbers = _named_loss(output), _numbers_in(output)
    loss: Any = named_loss if named_loss is not None else numbers[0] if len(numbers) == 1 else output
    shape = _shape(loss)
    if shape != ():
        kind = f"{type(output).__name__} with {len(numbers)} numbers in it"
        if shape is not None:
            kind = f"a tensor of shape {with_rows_named(shape)}, to be reduced, for instance by .mean()"
        raise ValueError(
            "without loss= the net returns the loss as .loss, as ['loss'], or as the one number; "
            f"found {kind}. Hand in labels= among the inputs, or say loss=."
        )
    return loss


def _named_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _numbers_in(output: Any) -> list[Any]:
    return [leaf for leaf in tree.leaves(output) if _shape(leaf) == ()]


def _has_loss(output: Any) -> bool:
    """Whether a net's output has a value called "loss", or a number."""
    return _named_loss(output) is not None or bool(_numbers_in(output))


def _without_loss(output: Any, loss: Any) -> Any:
    """Return the results of a net besides its loss: a lone value itself, None if there is nothing."""
    leaves, containers = tree.flatten(output)
    # A loss may stand anywhere in the containers; whoever returns (logits, loss) asks for logits and no tuple.
    outputs: Any = tree.unflatten(containers, [None if leaf is loss else leaf for leaf in leaves])
    if not isinstance(outputs, Mapping):
        outputs = dict(enumerate(outputs if isinstance(outputs, tuple | list) else [outputs]))
    results: dict[Any, Any] = {name: value for name, value in outputs.items() if value is not None}
    if len(results) < 2:
        return next(iter(results.values()), None)
    return results if isinstance(output, Mapping) else tuple(results.values())


def _shape(leaf: Any) -> tuple[Any, ...] | None:
    """Return the shape of a tensor of floats, or of a node that stands for one; None for other values."""
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    return tuple(value.shape) if isinstance(value, Tensor) and value.is_floating_point() else None
