"""Define stages and models: pure stage functions in dataflow order, and a loss, without parameters or devices.

    batch -> stage 0 -> stage 1 -> stage 2 -> loss        inputs=("batch", 0, (1, 0))
                |                    ^
                +--------------------+                    stage 2 takes the outputs of stages 1 and 0

A model holds no tensor. Parameters and state are arguments of a step, so one model serves any number of them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fpipe.limits import argument_error, check_whole_number, checked_init
from fpipe.positional_stage import Names, net_stage_of
from fpipe.program import HtmlRepr, Op

if TYPE_CHECKING:
    from torch import Tensor

    from fpipe import tree

Source = int | Literal["batch"] | tuple[int, int]
"""An input of a stage: another's output, one of several (the stage and which), or the batch."""
Reduction = Literal["mean", "sum", "count"]

STAGE_KEYWORDS = frozenset({"state", "key", "microbatch", "carry"})
Turn = tuple[bool, bool]
"""Whether a microbatch (and slice) is the first, and whether it is the last, of its training step."""


@checked_init
@dataclass(frozen=True)
class Stage:
    """A pure stage function `f(params, x) -> y`, and the keyword-only arguments that it asks for.

    Args:
        forward: `f(params, x, *, state, key, microbatch) -> y`, with the keyword arguments that `keywords` names.
        keywords: which of "state", "key", "microbatch" and "carry" it takes. A stage with module state asks for `state`
            and returns `(y, state)`; its forwards run in microbatch order. One that runs on sequence slices takes what
            the slice before handed on as `carry` (None for the first) and returns `(y, carry)`; with both,
            `(y, state, carry)`.
        aux_loss: whether the stage returns `(y, loss)` (what else it returns, before the loss): a 0-d tensor that is
            added to the model's loss, or in the last stage of a model without a loss function is its loss.
        name: how errors call the stage.
        names: for a stage made from a module, what the whole net calls each leaf of its parameters, tied names
            together.
        exchange: for a stage that is a collective, as `fpipe.exchange` makes it, what its ops say of it in a program.
        with_params_bound: `with_params_bound(params, function)` calls the function while `params` stand in the module,
            which a backward pass needs where it computes something again.

    >>> scale = Stage(lambda params, x: x * params["w"], name="scale")
    >>> scale.forward({"w": 3}, 2)
    6
    """

    forward: Callable[..., Any]
    keywords: frozenset[str] = frozenset()
    aux_loss: bool = False
    name: str = ""
    names: Names | None = None
    with_params_bound: Callable[[Any, Callable[[], Any]], Any] | None = None
    exchange: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.keywords <= STAGE_KEYWORDS | {"turn"}:
            raise ValueError(f"keywords is a set of 'state', 'key', 'microbatch' and 'carry'; found {self.keywords!r}.")


class TiedLeaf(NamedTuple):
    """One use of a tied leaf: the stage that reads it, and its owner, which has it as the value `params[owner]:port`.

    Attributes:
        stage, name: the stage that reads it, and what it is called there.
        bundle: which of that stage's parameter bundles it is: 0 is the stage's own, then its tied leaves in order.
        owner, owner_name: the stage where it lives, and what it is called there.
        port: which of its owner's tied leaves it is, from 1.
    """

    stage: int
    name: str
    bundle: int
    owner: int
    owner_name: str
    port: int


class LossFunction(NamedTuple):
    """The loss function from which a model was cut.

    Attributes:
        call: `call(params, batch, key, microbatch)` is what it returns for the pytree of all parameters, or for a dict
            of them by name where they were in none; it draws the random numbers that the stages draw.
        eps: the machine epsilon of the least precise numbers that it computes with, where these are not those of the
            parameters.
        who, door: what errors call it, and what has traced it.
    """

    call: Callable[[Any, Any, int | None, int], Any]
    eps: float = 0.0
    who: str = "loss_fn"
    door: str = "from_loss"


class MeanLabels(NamedTuple):
    """Labels of a batch over which torch's cross entropy takes the mean.

    Attributes:
        side, path: where they are, such as "target" and "['labels']".
        ignored: the class that the mean leaves out.
        weighs_classes: whether classes have weights, which the mean divides by.
    """

    side: str
    path: str
    ignored: int
    weighs_classes: bool


class DerivedReport(NamedTuple):
    """The report of a model derived from another: how it was derived, and the report of the original."""

    derivation: str
    report: Any

    def __str__(self) -> str:
        return f"{self.derivation}\n{self.report}"


@checked_init
@dataclass(frozen=True)
class Model(HtmlRepr):
    """Stages in dataflow order and a loss.

    A stage that takes one source gets its value as `x`; one that takes a tuple of sources gets the tuple of values. A
    stage of which others take several outputs, as `(stage, which)`, returns the tuple of them.

    Args:
        stages, loss: the stage functions, and `loss(y, target)`; None: the last stage computes the loss.
        inputs: the sources of each stage.
        ties: groups of leaves that are one, each leaf as a stage and a name; the first one is the owner.
        reduction: "mean", "sum" or "count": how the loss reduces the rows of a batch.
        aux: whether the loss returns auxiliary results too.
        frozen: leaves without gradient: pairs of a stage and the name of a leaf (None: all of the stage's).
        params_spec: the leaves' names and the pytree of all parameters, if these were in one.
        function: the loss function that the model was cut out of, if it was.
        per_example: whether each row of a microbatch has parameters of its own, and gradients come row by row, as
            `fpipe.per_example` makes it.
        leaf_order: names of the parameters that train in the order of the net's `named_parameters()`, in which norms
            are stacked; parameters of functions come stage by stage.
        labels: of a net that computes its mean cross entropy, which of its inputs are the labels.
        report: where the net's parts are, if a front door knows: the model prints as it.
        fingerprint: what modules held when a front door made the model; it refuses to go on where that has changed.

    >>> scale = Stage(lambda params, x: x * params["w"])
    >>> add = Stage(lambda params, x: x[0] + x[1])
    >>> Model((scale, add), loss=lambda y, target: y.sum(), inputs=("batch", (0, "batch"))).sources(1)
    (0, 'batch')
    """

    stages: tuple[Stage, ...]
    loss: Callable[[Any, Any], Any] | None
    inputs: tuple[Source | tuple[Source, ...], ...]
    ties: tuple[tuple[tuple[int, str], ...], ...] = ()
    reduction: Reduction = "mean"
    aux: bool = False
    frozen: frozenset[tuple[int, str | None]] = frozenset()
    params_spec: tuple[tuple[str, ...], tree.Spec] | None = None
    function: LossFunction | None = None
    per_example: bool = False
    leaf_order: tuple[str, ...] = ()
    labels: MeanLabels | None = field(default=None, repr=False)
    report: Any = field(default=None, compare=False, repr=False)
    fingerprint: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return repr(self) if self.report is None else str(self.report)

    def derived_report(self, derivation: str) -> DerivedReport | None:
        """Return the report for a model derived from this one; None if this one has no report."""
        return None if self.report is None else DerivedReport(derivation, self.report)

    def __post_init__(self) -> None:
        if self.loss is not None:
            if isinstance(self.loss, type):
                raise ValueError(f"loss is a class; make one: {self.loss.__name__}().")
            signature = unsuitable_signature(self.loss)
            if signature is not None:
                raise ValueError(f"loss is a function loss(y, target), found one of {signature}.")
        if self.reduction not in ("mean", "sum", "count"):
            raise ValueError(f"reduction is 'mean', 'sum' or 'count', found {self.reduction!r}.")
        normalise_inputs(self.inputs, len(self.stages) or len(self.inputs))
        if self.stages and self.stages[-1].aux_loss and self.loss is not None:
            last_stage = len(self.stages) - 1
            raise ValueError(
                f"stage {last_stage} is the last, and what it returns goes to the loss: add its loss there."
            )

    @property
    def has_loss(self) -> bool:
        """Whether the model computes a loss; its programs have forwards alone if not."""
        return self.loss is not without_loss

    def sources(self, stage: int) -> tuple[Source, ...]:
        """Return the sources of a stage, always as a tuple."""
        stage_input = self.inputs[stage]
        return stage_input if isinstance(stage_input, tuple) else (stage_input,)

    @cached_property
    def _ports(self) -> dict[int, int]:
        return _count_ports(source for stage in range(len(self.inputs)) for source in self.sources(stage))

    def ports(self, stage: int) -> int:
        """Return how many outputs a stage has: one, or as many as other stages take."""
        return self._ports.get(stage, 1)

    def label_of(self, stage: int) -> str:
        """Return what errors call a stage: its number, and its name if it has one."""
        name = self.stages[stage].name
        return f"stage {stage} ({name})" if name else f"stage {stage}"

    @cached_property
    def tied_uses(self) -> tuple[tuple[TiedLeaf, ...], ...]:
        """The uses of each tied leaf, its owner's first."""
        # Bundle 0 of a stage is its own parameters, and port 0 of an owner too; so tied leaves count from 1.
        bundle_counts, port_counts = Counter[int](), Counter[int]()
        uses_by_leaf: list[tuple[TiedLeaf, ...]] = []
        for group in self.ties:
            owner, owner_name = group[0]
            port_counts[owner] += 1
            uses: list[TiedLeaf] = []
            for stage, name in group:
                bundle_counts[stage] += 1
                uses.append(TiedLeaf(stage, name, bundle_counts[stage], owner, owner_name, port_counts[owner]))
            uses_by_leaf.append(tuple(uses))
        return tuple(uses_by_leaf)

    @cached_property
    def _tied(self) -> dict[int, tuple[TiedLeaf, ...]]:
        leaves_by_stage: dict[int, tuple[TiedLeaf, ...]] = {}
        for leaf in (leaf for uses in self.tied_uses for leaf in uses):
            leaves_by_stage[leaf.stage] = (*leaves_by_stage.get(leaf.stage, ()), leaf)
        return leaves_by_stage

    def tied(self, stage: int) -> tuple[TiedLeaf, ...]:
        """Return the tied leaves that a stage reads, in the order of bundles."""
        return self._tied.get(stage, ())

    def owned(self, stage: int) -> tuple[TiedLeaf, ...]:
        """Return the tied leaves that a stage owns, in the order of ports."""
        return tuple(uses[0] for uses in self.tied_uses if uses[0].owner == stage)

    def owned_param_names(self, stage: int) -> list[tuple[str, ...]]:
        """Return the names of each parameter that a stage owns, its first name first; none for plain functions."""
        received_names = {leaf.name for leaf in self.tied(stage) if leaf.owner != stage}
        return [names for names in self.stages[stage].names or () if names[0] not in received_names]


def as_stage_input(sources: Sequence[Source]) -> Source | tuple[Source, ...]:
    """Return the sources of a stage as an entry of `Model.inputs`: a tuple, or a single source."""
    # A single source that is a tuple, (stage, port), stays inside a tuple: bare it would read as two sources.
    first_source, *other_sources = sources
    return tuple(sources) if other_sources or isinstance(first_source, tuple) else first_source


def unsuitable_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function that takes no two arguments; None if it does, or has no signature.

    >>> print(unsuitable_signature(lambda y: y), unsuitable_signature(lambda y, target, weight=None: y))
    (y) None
    """
    try:
        # A module, told without an import of torch: its __call__ takes anything.
        signature = inspect.signature(getattr(function, "forward", function))
    except ValueError:  # some functions written in C have no signature
        return None
    try:
        signature.bind(None, None)
    except TypeError:
        return signature
    return None


def without_loss(y: Any, target: Any) -> Tensor:
    """Stand for the loss function of a model that computes no loss; no program reads the number."""
    import torch

    return torch.zeros(())


def in_current_mode(model: Model) -> Model:
    """Return the model for the train or eval mode that its net is in now, where a front door can trace it again."""
    return model if require_model(model).fingerprint is None else model.fingerprint.model_in_current_modes(model)


def require_model(argument: object) -> Model:
    """Return the argument if it is a Model, else raise TypeError with a hint."""
    if isinstance(argument, Model):
        return argument
    raise argument_error("model", Model, argument)


def require_loss(model: Model, consequence: str) -> None:
    """Raise ValueError if a model computes no loss, and so has no gradients."""
    if not require_model(model).has_loss:
        raise ValueError(f"the net computes no loss, so {consequence}: say loss=.")


def normalise_inputs(
    inputs: Sequence[Source | tuple[Source, ...]] | None, n: int
) -> tuple[Source | tuple[Source, ...], ...]:
    """Return the checked inputs of n stages; None stands for a plain chain."""
    check_whole_number("stages", n)
    if inputs is None:
        return ("batch", *range(n - 1))
    if len(inputs) != n:
        raise ValueError(f"inputs says what each stage takes: {n} entries for {n} stages, found {len(inputs)}.")
    read_ports: set[tuple[Any, int]] = set()
    for stage, stage_input in enumerate(inputs):
        sources = stage_input if isinstance(stage_input, tuple) else (stage_input,)
        if not sources:
            raise ValueError(f"stage {stage} takes nothing; inputs are earlier stages or 'batch'.")
        for source in sources:
            home, port = source if isinstance(source, tuple) and len(source) == 2 else (source, 0)  # pyright: ignore[reportUnnecessaryComparison]
            if home != "batch" and (
                type(home) is not int or not 0 <= home < stage or type(port) is not int or port < 0
            ):
                earlier = f"a stage from 0 to {stage - 1}, or 'batch'" if stage else "'batch'"
                raise ValueError(f"stage {stage} takes {source!r}; it can take {earlier}.")
            read_ports.add((home, port))
    # Every output but the last stage's must be taken: an output that nobody takes would have no gradient, and in the
    # program a forward that nobody reads is an error.
    ports = _count_ports(read_ports)
    for stage in range(n - 1):
        unread = next((port for port in range(ports.get(stage, 1)) if (stage, port) not in read_ports), None)
        if unread is not None:
            unread_output = "the output" if ports.get(stage, 1) == 1 else f"output {unread}"
            rule = f"only the last stage, {n - 1}, gives the loss its input"
            raise ValueError(f"nobody takes {unread_output} of stage {stage}; {rule}.")
    return tuple(inputs)


def _count_ports(sources: Iterable[Source | tuple[Any, int]]) -> dict[int, int]:
    """Return how many outputs of each stage are taken."""
    ports: dict[int, int] = {}
    for source in sources:
        home, port = source if isinstance(source, tuple) else (source, 0)
        if home != "batch":
            ports[home] = max(ports.get(home, 1), port + 1)
    return ports


def wanted_input_gradients(model: Model, ops: Sequence[Op]) -> frozenset[tuple[int, int]]:
    """Return the batch inputs whose gradients a program computes, each as a stage and an index of its inputs."""
    return frozenset(
        (value.stage, value.port)
        for op in ops
        for value in op.writes
        if value.name == "dx" and value.stage is not None and model.sources(value.stage)[value.port] == "batch"
    )


def label_with_random_modules(model: Model, number: int) -> str:
    """Return what errors call a stage that draws random numbers: its label, and the modules that draw, if known."""
    net = net_stage_of(model.stages[number].forward)
    modules = net.random_modules() if net else []
    return f"{model.label_of(number)}: {', '.join(modules)}" if modules else model.label_of(number)


def check_keys(
    mapping: Mapping[Any, Any], expected: Sequence[Any], owner: str, key_meaning: str = "a parameter of it that trains"
) -> None:
    """Raise ValueError unless a mapping has exactly the expected keys."""
    for missing in (name for name in expected if name not in mapping):
        raise ValueError(f"{owner} must have {missing!r}, which is missing.{prefix_hint(mapping, missing)}")
    if len(mapping) != len(expected):
        extra = next(name for name in mapping if name not in expected)
        raise ValueError(f"{owner} has {extra!r}, which is not {key_meaning}.")


def prefix_hint(names: Iterable[object], missing: object) -> str:
    """Return the sentence, behind a space, on a prefix of names: DistributedDataParallel and torch.compile add one.

    >>> prefix_hint(["module.0.weight"], "0.weight")
    " Take the prefix off: name.removeprefix('module.')."
    """
    prefixes = [str(name).removesuffix(str(missing)) for name in names if str(name).endswith(f".{missing}")]
    return f" Take the prefix off: name.removeprefix({prefixes[0]!r})." if prefixes else ""
