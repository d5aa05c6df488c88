"""Make a model of an nn.Sequential: pure stage functions over the modules it has, which stay as they are.

    Sequential(0: Linear, 1: Tanh, 2: Linear)     --> stages=2 -->     f0(params, x) = 1(0(x))    f1(params, x) = 2(x)

The parameters that train are handed out as detached aliases, so an optimizer that writes them trains the module. Frozen
parameters, and buffers that no stage writes, are constants: a stage reads the module's own at each call. What would
make a stage impure (random numbers, written buffers, hooks that nobody would run) is refused by the module's name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.spectral_norm import SpectralNorm

from fpipe.balance import balance
from fpipe.batch_norm import names_of, noted, remembers, updated, updated_at_the_end
from fpipe.graphs.alike import Same, alike
from fpipe.models import Model, Reduction, Stage, from_functions
from fpipe.params import same_keys

Params = tuple[dict[str, Tensor], ...]
Names = tuple[tuple[str, ...], ...]


def from_sequential(
    net: nn.Sequential,
    stages: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    reduction: Reduction = "mean",
    aux: bool = False,
) -> tuple[Model, Params, Params]:
    """Cut a Sequential into stages.

    Args:
        net: any nn.Sequential. It is not changed; its children's hooks and train or eval mode stay in force.
        stages: how many; the largest has as few bytes of parameters as can be.
        sizes: instead, the number of children in each stage.
        loss: `loss(y, target)`, as in `from_functions`.
        reduction, aux: as in `from_functions`.

    Returns:
        The model; per stage its trainable parameters by their names in `net.state_dict()`, one used twice under its
        first name; per stage its module state: the buffers that its batch norms write in training, by name.

    Raises:
        ValueError: sizes that do not fit, or a module that cannot be part of a pure stage, by name.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> [list(stage) for stage in params]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]
    """
    _refuse(net)
    children = list(_children(net))
    ends = list(accumulate(_sizes(net, stages, sizes)))
    groups = [dict(children[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    stage_of = {name: number for number, group in enumerate(groups) for name in group}
    leaves: dict[int, list[str]] = {}  # the names of one trainable parameter
    tensors: dict[str, Tensor] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            leaves.setdefault(id(parameter), []).append(name)
            tensors[name] = parameter.detach()
    _refuse_sharing(tensors, stage_of)
    names: list[Names] = [
        tuple(tuple(found) for found in leaves.values() if stage_of[found[0].split(".")[0]] == number)
        for number in range(len(groups))
    ]
    runs = [StageModule(number, group, names[number]) for number, group in enumerate(groups)]
    model = from_functions(runs, loss, reduction=reduction, aux=aux)
    cut = tuple(
        replace(stage, name=", ".join(group), names=run.names, within=run.within, **run.remembering())
        for stage, group, run in zip(model.stages, groups, runs, strict=True)
    )
    return (
        replace(model, stages=cut),
        tuple({leaf[0]: tensors[leaf[0]] for leaf in stage} for stage in names),
        tuple(run.state() for run in runs),
    )


class StageModule:
    """The function of a stage made of modules: they run one after the other, with `params` in place of their own.

    The modules' parameters are swapped while it runs, so threads that run one stage at once take turns.
    """

    def __init__(self, number: int, children: Mapping[str, nn.Module], names: Names, deferred: bool = False) -> None:
        self.number, self.children, self.names, self.deferred = number, dict(children), names, deferred
        self.bound = _Bound(children)
        modules = [(path, module) for path, module in self.bound.named_modules() if path]
        self.modules = modules
        self.moody = [(path, module) for path, module in modules if isinstance(module, _DEPEND_ON_MODE)]
        self.caching = [m for _, m in modules if isinstance(m, nn.RNNBase) or getattr(m, "_forward_pre_hooks", None)]
        self.lock = threading.RLock()
        self.norms = [(path, module) for path, module in modules if remembers(module)]
        trained = {name for leaf in names for name in leaf}
        fixed = [path for path, _ in self.bound.named_parameters(remove_duplicate=False) if path not in trained]
        written = {id(buffer) for _, module in self.norms for buffer in module.buffers(recurse=False)}
        named = self.bound.named_buffers(remove_duplicate=False)
        fixed += [path for path, buffer in named if id(buffer) not in written]
        self.fixed = [(path, *place) for path, place in self._places(fixed)]
        self.swapped = [[path for path, _ in self._places(leaf)] for leaf in names]

    def _places(self, paths: Iterable[str]) -> list[tuple[str, tuple[nn.Module, str]]]:
        """Each place where a tensor is, as its module and name, under the first of its paths.

        A module that stands twice has its tensors under two paths, but they can be swapped, and put back, only once.
        """
        first: dict[tuple[nn.Module, str], str] = {}
        for path in paths:
            owner, _, name = path.rpartition(".")
            first.setdefault((self.bound.get_submodule(owner), name), path)
        return [(path, place) for place, path in first.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return StageModule, (self.number, self.children, self.names, self.deferred)

    def __call__(self, params: Mapping[str, Tensor], x: Any) -> Any:
        """The stage's output; with norms that remember, also what their update needs."""
        return self.within(params, partial(self._through, x), noting=bool(self.norms))

    def _through(self, x: Any) -> Any:
        for module in self.children.values():
            x = module(x)
        return x

    def within(self, params: Mapping[str, Tensor], what: Callable[[], Any], noting: bool = False) -> Any:
        """Do something while `params` are in the modules' place.

        A backward pass needs this where a module runs again in it: torch.utils.checkpoint recomputes with whatever
        parameters the modules hold by then.
        """
        same_keys(params, [leaf[0] for leaf in self.names], f"params of stage {self.number}")
        self._refuse_changed()
        own = {path: params[leaf[0]] for leaf, paths in zip(self.names, self.swapped, strict=True) for path in paths}
        with self.lock:
            buffers = _Buffers(self.modules)
            kept = [_kept(module) for module in self.caching]
            try:
                with noted(self.norms, self.deferred) as notes:
                    made = torch.func.functional_call(self.bound, own, (what,), tie_weights=False)
            finally:
                for module, attributes in zip(self.caching, kept, strict=True):
                    vars(module).update(attributes)
                written = buffers.put_back()
        if written:
            raise RuntimeError(
                f"stage {self.number} wrote buffer {written[0]!r} of its module as it ran (it is put back): buffers "
                "that a stage writes are not supported yet. Switch the writing off, say by .eval()."
            )
        return (made, notes) if noting else made

    def _refuse_changed(self) -> None:
        """The mode may have changed since the stage was made."""
        norms = {path for path, _ in self.norms}
        for path, module in self.moody:
            _refuse_impure(path, module)
            if remembers(module) != (path in norms):
                was, now = ("training", "eval") if path in norms else ("eval", "training")
                raise ValueError(
                    f"module {path!r} ({type(module).__name__}) was in {was} when the net was cut into stages and is "
                    f"in {now} now: what it remembers is part of the program. Call from_sequential again."
                )

    def constants(self) -> list[Tensor]:
        """What the stage reads besides its parameters, as it is now: frozen parameters and buffers."""
        with self.lock:
            return [getattr(owner, name) for _, owner, name in self.fixed]

    def pure(self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any) -> Any:
        """The stage's output as a function of all that it reads, `params` in the order of its names."""
        self._refuse_changed()
        own = {path: tensor for paths, tensor in zip(self.swapped, params, strict=True) for path in paths}
        own |= {path: tensor for (path, _, _), tensor in zip(self.fixed, constants, strict=True)}
        with self.lock:
            kept = [vars(module) | _kept(module) for _, module in self.modules]
            try:
                with noted(self.norms, self.deferred) as notes:
                    through = (partial(self._through, x),)
                    made = torch.func.functional_call(self.bound, own, through, tie_weights=False)
                return (made, notes) if self.norms else made
            finally:  # as it was: whatever a module notes now is without data
                for (_, module), attributes in zip(self.modules, kept, strict=True):
                    vars(module).clear()
                    vars(module).update(attributes)

    def state(self) -> dict[str, Tensor]:
        """The buffers that the stage's norms write, by name, as they are now."""
        return {name: self.bound.get_buffer(name).detach() for name in names_of(self.norms)}

    def remembering(self) -> dict[str, Any]:
        """What a `Stage` says about its state: nothing without norms that remember."""
        if not self.norms:
            return {}
        update = updated_at_the_end if self.deferred else updated
        return {"update": partial(update, self.norms), "notes": True, "counts": self.deferred}

    def drawing(self) -> list[str]:
        """The modules that draw random numbers as they are now."""
        return [f"{path!r} ({type(module).__name__})" for path, module in self.modules if _draws(module)]

    def modes(self) -> list[bool]:
        """Which modules are in training."""
        return [module.training for _, module in self.modules]

    def twin(self) -> Any:
        """Equal for stages that compute the same function of their parameters and constants, in their order.

        A stage that holds on to an object which cannot be compared (a tensor, another module) is like no other.
        """
        place = {name: str(at) for at, name in enumerate(self.children)}
        short = [tuple(_short(name, place) for name in leaf) for leaf in self.names]
        fixed = tuple(_short(path, place) for path, _, _ in self.fixed)
        odd: list[Any] = []
        twins = tuple(_twin(module, odd) for module in self.children.values())
        return tuple(short), fixed, twins, self.deferred, Same(self) if odd else None


def _short(path: str, place: Mapping[str, str]) -> str:
    """A leaf's name with its child's place in the stage instead of the child's name."""
    child, dot, rest = path.partition(".")
    return place[child] + dot + rest


def _twin(module: nn.Module, odd: list[Any]) -> Any:
    """What a module computes, as a value to compare: class, plain attributes, mode, and the same of its children."""
    attributes = vars(module)
    plain = tuple((name, alike(attributes[name], odd)) for name in sorted(attributes) if name not in _NOT_PLAIN)
    children = tuple((name, child and _twin(child, odd)) for name, child in attributes["_modules"].items())
    forward = alike(type(module).forward, odd)
    return type(module), forward, plain, children, tuple(attributes["_parameters"]), tuple(attributes["_buffers"])


_NOT_PLAIN = ("_modules", "_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")


class _Bound(nn.Module):
    """A stage's modules under the names they have in the whole net; called, it does what it is given."""

    def __init__(self, children: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in children.items():
            self.add_module(name, module)

    def forward(self, what: Callable[[], Any]) -> Any:
        return what()


def _kept(module: nn.Module) -> dict[str, Any]:
    """What functional_call leaves behind in a module, as it was: the weight that pruning or old-style weight norm keeps
    as an attribute, and an RNN's list of its weights, which would go on computing with another's."""
    attributes = vars(module).items()
    tensors = {name: value for name, value in attributes if isinstance(value, Tensor)}
    return tensors | {name: list(value) for name, value in attributes if name in ("_flat_weights", "_flat_weight_refs")}


class _Buffers:
    """The buffers of modules as they are, to tell afterwards which were written, and to put them back.

    Versions tell most writes. `F.batch_norm` writes without a new one, so floating buffers of modules in training are
    compared.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.owners = [(path, owner, _own_buffers(owner)) for path, owner in modules]
        self.copies = [
            {name: (buffer._version, buffer.clone()) for name, buffer in found.items()} for _, _, found in self.owners
        ]

    def put_back(self) -> list[str]:
        """The names of what was written, which is now as it was."""
        written: list[str] = []
        for (path, owner, found), copies in zip(self.owners, self.copies, strict=True):
            now = _own_buffers(owner)
            for name, buffer in found.items():
                version, before = copies[name]
                told = buffer._version == version and not (owner.training and buffer.is_floating_point())
                if now.get(name) is not buffer or not (told or _equal(buffer, before)):
                    written.append(f"{path}.{name}")
                    setattr(owner, name, buffer)
                    with torch.no_grad():
                        buffer.copy_(before)
            for name in now.keys() - found.keys():
                written.append(f"{path}.{name}")
                delattr(owner, name)
        return written


def _own_buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal numbers, NaN for NaN."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _children(net: nn.Sequential) -> Iterable[tuple[str, nn.Module]]:
    """The children by name, one that stands in several places as often as it does."""
    return vars(net)["_modules"].items()


def _sizes(net: nn.Sequential, stages: int | None, sizes: Sequence[int] | None) -> Sequence[int]:
    """The number of children in each stage."""
    if sizes is not None:
        if stages not in (None, len(sizes)):
            raise ValueError(f"stages={stages}, but sizes={list(sizes)} are {len(sizes)} stages; say one of the two.")
        if min(sizes, default=0) < 1 or sum(sizes) != len(net):
            raise ValueError(
                f"sizes={list(sizes)} sum to {sum(sizes)}, the net has {len(net)} children; a stage has at least one."
            )
        return sizes
    if stages is None:
        raise ValueError("say the number of stages, or sizes= with the number of children in each.")
    if not 1 <= stages <= len(net):
        raise ValueError(f"{len(net)} children make at most {len(net)} stages and at least one, found stages={stages}.")
    bytes_of = [sum(p.numel() * p.element_size() for p in child.parameters()) for child in net]
    return balance(bytes_of, stages)


_DEPEND_ON_MODE = (_DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase, _NormBase, _SpectralNorm)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _refuse(net: nn.Module) -> None:
    """A ValueError for a net that stages could not stand for."""
    if not isinstance(net, nn.Sequential) or type(net).forward is not nn.Sequential.forward or "forward" in vars(net):
        raise ValueError(f"from_sequential cuts an nn.Sequential with its own forward, found {type(net).__name__}.")
    if any(getattr(net, hooks, None) for hooks in _HOOKS):
        raise ValueError(
            "the Sequential itself has hooks; stages call its children and never the whole, so nobody would run them. "
            "Remove them, or register them on the children."
        )
    own = [name for name, _ in (*net.named_parameters(recurse=False), *net.named_buffers(recurse=False))]
    if own:
        raise ValueError(f"{own[0]!r} belongs to the Sequential itself and to none of its children, so to no stage.")
    for path, module in net.named_modules():
        _refuse_impure(path, module)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} is not initialised yet (a lazy module); run the net once on an example.")
        if tensor.requires_grad and any(
            getattr(tensor, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ):
            raise ValueError(
                f"parameter {name!r} has a gradient hook; stages differentiate detached aliases of parameters, which "
                "no hook sees. Remove it, and change the gradients that a step returns."
            )


def _refuse_impure(path: str, module: nn.Module) -> None:
    """A ValueError for a module that would draw random numbers or write its buffers."""
    who = f"module {path!r} ({type(module).__name__})"
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(f"{who}: max_norm rewrites the weight as it runs, which a pure function cannot; leave it out.")
    if _writes(module):
        raise ValueError(f"{who}: buffers written in training that the output reads are not supported; call .eval().")


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return getattr(module, "_random_samples", None) is None
    if isinstance(module, nn.RReLU):
        return module.training and module.lower != module.upper
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0 and module.num_layers > 1
    return module.training and (
        (isinstance(module, _DropoutNd) and module.p > 0)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
    )


def _writes(module: nn.Module) -> bool:
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    spectral = (isinstance(module, _SpectralNorm) and hasattr(module, "_u")) or any(
        isinstance(hook, SpectralNorm) for hook in hooks
    )
    return module.training and spectral


def _refuse_sharing(tensors: Mapping[str, Tensor], stage_of: Mapping[str, int]) -> None:
    """A ValueError for memory that trains in two stages."""
    homes: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = homes.setdefault(StorageWeakRef(tensor.untyped_storage()).cdata, name)
        here, there = stage_of[name.split(".")[0]], stage_of[first.split(".")[0]]
        if here != there:
            raise ValueError(
                f"{first!r} in stage {there} and {name!r} in stage {here} share their memory; from_sequential cannot "
                "share a parameter between stages. Choose sizes= that keep them in one, or from_functions with ties=."
            )


def deferred_batch_norm(model: Model) -> Model:
    """The model with batch norms that update their running statistics once a step, with those of the whole batch.

    In training a batch norm normalises by its microbatch, so outputs and gradients depend on how a batch is cut. What
    it remembers for evaluation need not: a deferred one gathers mean and squared deviations over the microbatches, in
    float64, and updates at the last of them, as it would on a batch that is not cut.

    Args:
        model: made by `from_sequential`; it stays as it is.

    Returns:
        Another model for the same params and state. Without batch norms that remember it is the same.

    Source: torchgpipe's DeferredBatchNorm (Kim et al. 2020, section 3.3), whose variance is the biased one.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> model, params, state = fpipe.from_sequential(net, stages=1, loss=torch.nn.functional.mse_loss)
    >>> model = fpipe.deferred_batch_norm(model)
    >>> step = fpipe.build(fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model)), model)
    >>> batch = torch.randn(8, 2), torch.randn(8, 3)
    >>> step(params, batch, state=state).state[0]["1.num_batches_tracked"]
    tensor(1)
    """
    return replace(model, stages=tuple(map(_deferred, model.stages)))


def _deferred(stage: Stage) -> Stage:
    run = stage.forward
    if not isinstance(run, StageModule) or not any(isinstance(module, _BatchNorm) for _, module in run.norms):
        return stage
    later = StageModule(run.number, run.children, run.names, deferred=True)
    return replace(stage, forward=later, within=later.within, **later.remembering())
