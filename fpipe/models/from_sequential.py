"""Make a model from an nn.Sequential: its children, unchanged, become pure stage functions.

    Sequential(0: Linear, 1: Tanh, 2: Linear)     --> stages=2 -->     f0(params, x) = 1(0(x))    f1(params, x) = 2(x)

The parameters that train are returned as detached aliases, so an optimizer that writes them trains the module. Frozen
parameters, and buffers that no stage mutates, are constants: a stage reads the module's own at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import index
from typing import Any

from torch import Tensor, nn

from fpipe.meaning.from_functions import from_functions
from fpipe.meaning.purity.fingerprint import Fingerprint, refuse_unsupported_net
from fpipe.meaning.purity.write_guard import storage_key
from fpipe.meaning.single_device.params_and_state import check_batch
from fpipe.model import Model, Reduction
from fpipe.models.modules.skips import plan_skips
from fpipe.models.modules.stage_module import StageModule
from fpipe.models.modules.written_buffers import written_buffers
from fpipe.models.parameters.load import ParamAddresses
from fpipe.positional_stage import Names
from fpipe.timing.balance import balance
from fpipe.torch_internals import direct_members, hooks_of

Params = tuple[dict[str, Tensor], ...]
Leaf = dict[int, tuple[str, ...]]
"""The names of one parameter in each stage that reads it; it lives in the first."""


def _share_locks(runs: Sequence[StageModule]) -> None:
    """Let stages with a module in common share a lock; raise ValueError if that module has state."""
    # A call swaps the module's parameters, so only one of the stages may run at a time. State is one tensor of one
    # stage.
    _refuse_aliased_state(runs)
    first_stages: dict[int, StageModule] = {}
    for run in runs:
        for path, module in run.modules:
            first_stage = first_stages.setdefault(id(module), run)
            if first_stage is not run and any(module is buffer.module for buffer in run.state_owners):
                raise ValueError(
                    f"module {path!r} ({type(module).__name__}) with state stands in stages {first_stage.number} and "
                    f"{run.number}; choose sizes= that keep it in one."
                )
            if first_stage is not run and any(True for _ in module.parameters()):
                run.lock = first_stage.lock


def _refuse_aliased_state(runs: Sequence[StageModule]) -> None:
    """Raise ValueError if a buffer that a stage writes stands in a second place, which would not see the write."""
    written_by_id = {id(getattr(*buffer.home)): buffer for run in runs for buffer in run.state_owners}
    for owner in (owner for run in runs for owner in (*run.state_owners, *run.constant_owners)):
        written_owner = written_by_id.get(id(getattr(*owner.home)), owner)
        if written_owner.home != owner.home:
            raise ValueError(
                f"buffers {written_owner.path!r} and {owner.path!r} are one tensor, and the first is written; give "
                "each its own."
            )


def from_sequential(
    net: nn.Sequential,
    stages: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    reduction: Reduction = "mean",
    aux: bool = False,
    keywords: bool = False,
    batch: tuple[Any, Any] | None = None,
    state: Collection[str] = (),
) -> tuple[Model, Params, Params]:
    """Cut a Sequential into stages.

    Args:
        net: any nn.Sequential. It is not changed; its children's hooks and train or eval mode stay in force. Parameters
            may be DTensors, as `parallelize_module` makes them.
        stages: how many; the largest has as few bytes of parameters as can be.
        sizes: instead, the number of children in each stage.
        loss: `loss(y, target)`, as in `from_functions`.
        reduction, aux: as in `from_functions`.
        keywords: whether the inputs of a batch are a dict that the first child takes as keywords, as
            `forward(self, input_ids, mask=None)` does. Without it a dict is handed on as one argument.
        batch: (inputs, target), as a step takes it, for a net that mutates buffers of its own (a counter, a running
            mean): each stage runs once on fake tensors like these, which may be on the meta device. The batch, instance
            and spectral norms of torch need none.
        state: the names of these buffers instead.

    A parameter that stands in several stages is tied: it lives in the first, and its gradient is the sum. `Stash` and
    `Pop` among the children are skips.

    Returns:
        The model; per stage its trainable parameters by their names in `net.state_dict()`, one used twice under its
        first name, as aliases of the net's memory; per stage its module state: the buffers that its modules mutate. The
        forwards of a stage with module state run in microbatch order on one rank. All other buffers are constants; a
        step that would mutate one is refused by name.

    Raises:
        ValueError: sizes that do not fit, a module that cannot be part of a pure stage, or a name in `state` that is no
            buffer, by name.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> [list(stage) for stage in params]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]
    """
    # 1) Cut the list of children, which has a module several times if it stands in several places.
    net = _checked(net)
    children = [*direct_members(net).children.items()]
    ends = list(accumulate(_sizes(net, stages, sizes)))
    groups = [dict(children[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    leaves = _leaves_of(net, groups)
    _check_state(net, state)
    # 2) Make a function of each group, with the names of its parameters and the skips that it stashes and pops.
    skips, inputs = plan_skips(groups)
    skips[0] = skips[0]._replace(inputs_are_keywords=keywords)
    runs = [StageModule(i, group, _names_in(leaves, i), skips[i], state) for i, group in enumerate(groups)]
    ties = tuple(tuple((i, names[0]) for i, names in leaf.items()) for leaf in leaves.values() if len(leaf) > 1)
    model = from_functions(runs, loss, inputs=inputs, ties=ties, reduction=reduction, aux=aux)
    # 3) Find the buffers that the stages mutate, which becomes their state, before parameters are bound to stages.
    if batch is not None:
        check_batch(batch)
        for run, written_names in zip(runs, written_buffers(runs, model, batch[0]), strict=True):
            run.set_state([*run.named_state, *written_names])
    _share_locks(runs)
    params = tuple(_hand_out(run, leaves) for run in runs)
    order = tuple(leaf[min(leaf)][0] for leaf in leaves.values())
    stages_of = tuple(
        replace(
            stage,
            forward=run,
            name=", ".join(group),
            names=run.names,
            with_params_bound=run.with_params_bound,
            **run.state_fields(),
        )
        for stage, run, group in zip(model.stages, runs, groups, strict=True)
    )
    # 4) Note how the model was made, so that another net, such as the whole net in a comparison, is cut alike.
    fingerprint = Fingerprint([loss], [*net.named_modules()])
    model = replace(model, stages=stages_of, leaf_order=order, fingerprint=fingerprint)
    states = tuple(run.state() for run in runs)
    arguments: Any = {"loss": loss, "reduction": reduction, "aux": aux, "keywords": keywords}
    arguments |= {"sizes": [*map(len, groups)], "state": [name for state in states for name in state]}
    fingerprint.set_source(net, lambda other_net: from_sequential(other_net, **arguments)[0])
    return model, params, states


def _leaves_of(net: nn.Module, groups: Sequence[Mapping[str, nn.Module]]) -> dict[Tensor, Leaf]:
    """Return the names of each parameter that trains, by stage, in the order of `named_parameters()`."""
    stage_of = {name: number for number, group in enumerate(groups) for name in group}
    # remove_duplicate=False lists each name of a tied parameter; the tensor itself is the key that joins them.
    leaves: dict[Tensor, Leaf] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            leaf, number = leaves.setdefault(parameter, {}), stage_of[name.split(".")[0]]
            leaf[number] = (*leaf.get(number, ()), name)
    _refuse_shared_storage(leaves)
    return leaves


def _names_in(leaves: Mapping[Tensor, Leaf], stage: int) -> Names:
    return tuple(leaf[stage] for leaf in leaves.values() if stage in leaf)


def _hand_out(run: StageModule, leaves: Mapping[Tensor, Leaf]) -> dict[str, Tensor]:
    """Return the parameters that live in a stage as detached aliases, and note their addresses in the stage."""
    owned = {leaf[run.number][0]: tensor for tensor, leaf in leaves.items() if min(leaf) == run.number}
    run.param_addresses = ParamAddresses(owned, [module for _, module in run.modules])
    return {name: tensor.detach() for name, tensor in owned.items()}


def _check_state(net: nn.Module, state: Collection[str]) -> None:
    buffers = {name for name, _ in net.named_buffers(remove_duplicate=False)}
    for name in state:
        if name not in buffers:
            known = ", ".join(sorted(buffers)) or "none"
            raise ValueError(f"state= names {name!r}, which is no buffer of the net; these are: {known}.")


def _sizes(net: nn.Sequential, stages: int | None, sizes: Sequence[int] | None) -> Sequence[int]:
    if stages is not None and type(stages) is not int:
        raise ValueError(f"stages is a whole number, found {stages!r}.")
    if sizes is not None:
        try:
            sizes = [*map(index, sizes)]
        except TypeError:
            expected = "sizes lists whole numbers, the children of each stage, as in [2, 1]"
            raise ValueError(f"{expected}; found {sizes!r}.") from None
        if stages not in (None, len(sizes)):
            raise ValueError(f"stages={stages}, but sizes={list(sizes)} are {len(sizes)} stages; say one.")
        if min(sizes, default=0) < 1 or sum(sizes) != len(net):
            raise ValueError(
                f"sizes={list(sizes)} sum to {sum(sizes)}, the net has {len(net)} children; a stage has at least one."
            )
        return sizes
    if stages is None:
        raise ValueError("say the number of stages, or sizes= with the number of children in each.")
    if not 1 <= stages <= len(net):
        raise ValueError(f"{len(net)} children make at most {len(net)} stages and at least one, found stages={stages}.")
    # Without sizes, the stages are balanced by the bytes of their parameters: nothing has run that could be timed.
    bytes_of = [sum(p.numel() * p.element_size() for p in child.parameters()) for child in net]
    return balance(bytes_of, stages)


def _checked(net: nn.Sequential) -> nn.Sequential:
    """Return the net; raise ValueError if stages cannot compute the same as its forward."""
    if type(net).forward is not nn.Sequential.forward or "forward" in vars(net):
        raise ValueError(f"{type(net).__name__} has a forward of its own: use fpipe.from_module.")
    refuse_unsupported_net(net)
    if hooks_of(net):
        raise ValueError(
            "the Sequential itself has hooks, which no stage would run. Remove them, or register them on the children."
        )
    for name, _ in (*net.named_parameters(recurse=False), *net.named_buffers(recurse=False)):
        raise ValueError(f"{name!r} belongs to the Sequential itself; move it into one of its children.")
    return net


def _refuse_shared_storage(leaves: Mapping[Tensor, Leaf]) -> None:
    """Raise ValueError if two stages train one storage as two parameters, whose gradients would not be added."""
    first_by_storage: dict[Any, tuple[int, str]] = {}
    for tensor, leaf in leaves.items():
        stage, (name, *_) = next(iter(leaf.items()))
        first_stage, first_name = first_by_storage.setdefault(storage_key(tensor), (stage, name))
        if stage != first_stage:
            raise ValueError(
                f"{first_name!r} in stage {first_stage} and {name!r} in stage {stage} share a storage, but are two "
                "parameters; make them one, or keep them in one stage by sizes=."
            )
