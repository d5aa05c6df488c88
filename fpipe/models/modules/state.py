"""Find the buffers that a net mutates by running each stage once on fake tensors, as `jax.eval_shape` would.

    trace of a stage, all buffers as inputs           a buffer is
    the node that comes out is the input              constant
    it is another, and no output reads the input      written, by updates of its own ("update")
    it is another, and an output reads the input      written in the order of the forwards ("ordered")

A stage that looks at data cannot run on fake tensors. It runs on the example itself, and what it writes is ordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, Graph, Name, aval
from fpipe.graphs.purity.ambient import Untraceable
from fpipe.graphs.purity.attributes import Attributes
from fpipe.graphs.purity.own_memory import OwnMemory, memory
from fpipe.graphs.purity.pure import Impure, refused
from fpipe.graphs.tracing.keys import seeded
from fpipe.graphs.tracing.outputs import outputs_of
from fpipe.graphs.tracing.trace import trace
from fpipe.model import Model
from fpipe.models.modules.batch_norm import STATISTICS
from fpipe.models.modules.stage_module import How, StageModule

Flat = tuple[list[Any], Any]
"""The leaves of a value, tensors as abstract values or as they are, and its containers."""


def written_buffers(stages: Sequence[StageModule], model: Model, example: Any) -> list[dict[str, How]]:
    """For each stage the buffers that it writes, and how, besides the running statistics of torch's norms.

    Args:
        stages: as they are without them.
        model: says what each takes.
        example: the inputs of a batch; tensors may be on the meta device.

    Raises:
        ValueError: a stage looks at data, and the example has none.
    """
    run = _Run(stages, model, example)
    return [run.written(number) for number in range(len(stages))]


class _Run:
    """Goes from stage to stage, on abstract values, and where one of them looks at data, on the example."""

    def __init__(self, stages: Sequence[StageModule], model: Model, example: Any) -> None:
        self.stages, self.model = stages, model
        leaves, spec = tree.flatten(example)
        self.example: list[Flat] = [([_at_home(x) if _is(x) else x for x in leaves], spec)]
        self.has_data = not any(leaf.is_meta or hasattr(leaf, "fake_mode") for leaf in leaves if _is(leaf))
        self.real = _taken_apart((example,))
        self.outputs: list[list[Flat]] = []
        self.real_outputs: list[list[Flat]] = []

    def written(self, number: int) -> dict[str, How]:
        """What a stage writes, and what it hands on."""
        stage = self.stages[number]
        try:
            graph, specs, stale = self._traced(stage, self._taken(number, self.outputs, self.example))
        except Untraceable as error:
            return self._by_hand(number, error)
        self.outputs.append([(_avals(graph, label), spec) for label, spec in specs.items()])
        ordered = _read(graph, [leaf for label in specs for leaf in graph.writes[label]])
        found: dict[str, How] = dict.fromkeys(stale, "ordered")
        copies = {node.name: node.args[0] for node in graph.nodes if node.op is torch.ops.aten.clone.default}
        names = zip(_buffers(stage), graph.reads["buffers"], graph.writes["buffers"], strict=True)
        for path, before, after in names:
            if before not in (after, copies.get(after)):
                found[path] = "ordered" if before in ordered else "update"
        return found

    def _taken(self, number: int, outputs: Sequence[Sequence[Flat]], example: Sequence[Flat]) -> list[Flat]:
        """What a stage takes of the batch and of the stages before."""
        found: list[Flat] = []
        for source in self.model.sources(number):
            stage, port = source if isinstance(source, tuple) else (source, 0)
            found.append(example[0] if stage == "batch" else outputs[stage][port])
        return found

    def _traced(self, stage: StageModule, taken: Sequence[Flat]) -> tuple[Graph, dict[str, Any], list[str]]:
        """The stage as a graph, the containers of its outputs, and the running statistics of norms that it reads."""
        params, buffers = _params(stage), _buffers(stage)
        specs: dict[str, Any] = {}
        stale: list[str] = []

        def run(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
            x = _whole(taken, given["x"], isinstance(self.model.inputs[stage.number], tuple))
            own = dict(zip(params, given["params"], strict=True))
            ports, new, mode = self._observed(stage, own, dict(zip(buffers, given["buffers"], strict=True)), x)
            stale[:] = [name for name, one in stage.unreadable() if memory(one) in mode.read]
            made = {f"y:{port}" if port else "y": tree.flatten(y) for port, y in enumerate(ports)}
            specs.update({label: spec for label, (_, spec) in made.items()})
            return {label: leaves for label, (leaves, _) in made.items()} | {"buffers": [new[path] for path in buffers]}

        reads = {
            "params": [aval(one) for one in params.values()],
            "buffers": [aval(one) for one in buffers.values()],
            "x": [leaf for leaves, _ in taken for leaf in leaves],
        }
        return trace(run, reads, {}), specs, stale

    def _observed(
        self, stage: StageModule, params: Mapping[str, Any], buffers: Mapping[str, Any], x: Any
    ) -> tuple[tuple[Any, ...], dict[str, Tensor], OwnMemory]:
        """The outputs of a stage, its buffers afterwards, and what it read and wrote; modules stay as they are."""

        def refuse(tensor: Tensor, op: Any) -> None:
            raise Impure(refused(stage.who, f"writes {{}} in place ({op})", None, True))

        attributes, mode = Attributes(stage.modules, stage.who, every=True), OwnMemory(refuse)
        empty = _empty(stage)
        try:
            with stage.lock, mode:
                copies = {path: one.clone() for path, one in buffers.items()}
                y, new = stage.observed({**params, **copies}, x)
            if filled := empty - _empty(stage):
                raise ValueError(
                    f"{stage.who} makes a tensor of buffer {min(filled)!r}, which is None before: what a module "
                    "remembers is a tensor from the start. Make it in __init__."
                )
        finally:
            attributes.put_back()
        return (
            outputs_of(self.model, stage.number, y),
            {path: one.detach() for path, one in new.items()},
            mode,
        )

    def _by_hand(self, number: int, why: Untraceable) -> dict[str, How]:
        """What a stage writes as it runs on the example."""
        if not self.has_data:
            raise ValueError(
                f"stage {number} cannot run on tensors without data ({why}), so an example has to have some; or say "
                "what it writes by state={name: 'update' or 'ordered'}."
            )
        found: dict[str, How] = {}
        for at in range(len(self.real_outputs), number + 1):
            stage = self.stages[at]
            taken = self._taken(at, self.real_outputs, self.real)
            leaves = [leaf for leaves, _ in taken for leaf in leaves]
            x = _whole(taken, leaves, isinstance(self.model.inputs[at], tuple))
            before = _buffers(stage)
            with torch.no_grad(), seeded(0, stage.who):
                params = {path: _copy(one) for path, one in _params(stage).items()}
                ports, new, mode = self._observed(stage, params, before, x)
            self.real_outputs.append(_taken_apart(ports))
            found = {path: "ordered" for path in new if memory(new[path]) in mode.wrote or _differs(new, before, path)}
        self.outputs.append(
            [([aval(x) if _is(x) else x for x in leaves], spec) for leaves, spec in self.real_outputs[-1]]
        )
        return found


def _params(stage: StageModule) -> dict[str, Tensor]:
    """Its parameters, each once: a module that stands twice has its tensors in one place."""
    paths = (path for path, _ in stage.bound.named_parameters(remove_duplicate=False))
    return {path: getattr(owner, name) for path, owner, name in stage.places(paths)}


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().requires_grad_(parameter.requires_grad)


def _buffers(stage: StageModule) -> dict[str, Tensor]:
    """All buffers but the running statistics of norms whose updates are apart."""
    gone = {(norm, name) for _, norm in stage.norms for name in STATISTICS}
    return {path: getattr(owner, name) for path, owner, name in stage.buffers if (owner, name) not in gone}


def _empty(stage: StageModule) -> set[str]:
    """The buffers that are None."""
    buffers = ((path, name, one) for path, module in stage.modules for name, one in vars(module)["_buffers"].items())
    return {f"{path}.{name}" for path, name, one in buffers if one is None}


def _differs(new: Mapping[str, Tensor], before: Mapping[str, Tensor], path: str) -> bool:
    return new[path].shape != before[path].shape or not torch.equal(new[path], before[path])


def _taken_apart(ports: Sequence[Any]) -> list[Flat]:
    return [tree.flatten(y) for y in ports]


def _whole(taken: Sequence[Flat], leaves: Sequence[Any], many: bool) -> Any:
    """What a stage takes, from its leaves."""
    left = iter(leaves)
    each = [tree.unflatten(spec, [next(left) for _ in own]) for own, spec in taken]
    return tuple(each) if many else each[0]


def _avals(graph: Graph, label: str) -> list[Any]:
    return [graph.facts[leaf].aval if isinstance(leaf, Name) else leaf for leaf in graph.writes[label]]


def _read(graph: Graph, results: Sequence[Any]) -> set[Name]:
    """All that these results are computed from."""
    needed = graph.behind(results)
    read = {name for node in graph.nodes if node.name in needed for name in node.reads}
    return read | {leaf for leaf in results if isinstance(leaf, Name)}


def _at_home(leaf: Tensor) -> Aval:
    """What an example stands for: one without data for a tensor on the default device."""
    device = torch.get_default_device() if leaf.is_meta else leaf.device
    return aval(leaf)._replace(wants=False, device=device)


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
