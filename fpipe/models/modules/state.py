"""Find the buffers that a net mutates by running each stage on fake tensors, as `jax.eval_shape` would.

    a stage, all buffers as inputs                    a buffer is
    it is neither mutated nor bound anew              constant
    it is, and no output is computed from it          written, by updates of its own ("update")
    it is, and an output is computed from it          written in the order of the forwards ("ordered")

A stage that looks at data cannot run on fake tensors. It runs on the example itself, and what it writes is ordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, Fact, aval
from fpipe.graphs.purity.ambient import Untraceable
from fpipe.graphs.purity.attributes import Attributes
from fpipe.graphs.purity.own_memory import Followed, OwnMemory, memory
from fpipe.graphs.purity.pure import Impure, refused
from fpipe.graphs.tracing.fake import LeakedTensor
from fpipe.graphs.tracing.keys import seeded
from fpipe.graphs.tracing.outputs import outputs_of
from fpipe.graphs.tracing.trace import outline
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
    flow = _Flow(stages, model, example)
    return [flow.written(number) for number in range(len(stages))]


class _Flow:
    """Goes from stage to stage, on abstract values, and where one of them looks at data, on the example."""

    def __init__(self, stages: Sequence[StageModule], model: Model, example: Any) -> None:
        self.stages, self.model = stages, model
        self.real_example: Flat = tree.flatten(example)
        leaves, spec = self.real_example
        self.example: Flat = [_at_home(x) if isinstance(x, Tensor) else x for x in leaves], spec
        self.outputs: list[list[Flat]] = []
        self.real_outputs: list[list[Flat]] = []

    def written(self, number: int) -> dict[str, How]:
        """The buffers that a stage writes; its outputs are noted for the stages that take them."""
        stage = self.stages[number]
        taken = self._taken(number, self.outputs, self.example)
        params, buffers = _params(stage), _buffers(stage)
        found: dict[str, How] = {}
        specs: list[Any] = []

        def run(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
            own = dict(zip(params, given["params"], strict=True))
            held, x = dict(zip(buffers, given["buffers"], strict=True)), self._whole(number, taken, given["x"])
            ports, written, stale = self._observed(stage, own, held, x)
            if written:
                followed = Followed({path: held[path] for path in written})
                again, _, _ = self._observed(stage, own, held, x, followed)
                read = followed.behind(leaf for y in again for leaf in tree.leaves(y))
                found.update(dict.fromkeys(written, "update" if read is None else "ordered"))
            found.update(dict.fromkeys(stale, "ordered"))
            each = [tree.flatten(y) for y in ports]
            specs[:] = [spec for _, spec in each]
            return {f"y:{port}": leaves for port, (leaves, _) in enumerate(each)}

        reads = {
            "params": [aval(one) for one in params.values()],
            "buffers": [aval(one) for one in buffers.values()],
            "x": [leaf for leaves, _ in taken for leaf in leaves],
        }
        try:
            _, writes, _, _ = outline(run, reads)
        except (Untraceable, LeakedTensor) as error:
            return self._by_hand(number, error)
        each = zip(writes.values(), specs, strict=True)
        self.outputs.append([([_aval(leaf) for leaf in leaves], spec) for leaves, spec in each])
        return found

    def _taken(self, number: int, outputs: Sequence[Sequence[Flat]], example: Flat) -> list[Flat]:
        """The inputs of a stage: of the batch, and of stages before."""
        found: list[Flat] = []
        for source in self.model.sources(number):
            stage, port = source if isinstance(source, tuple) else (source, 0)
            found.append(example if stage == "batch" else outputs[stage][port])
        return found

    def _whole(self, number: int, taken: Sequence[Flat], leaves: Sequence[Any]) -> Any:
        """The input of a stage in its containers."""
        left = iter(leaves)
        each = [tree.unflatten(spec, [next(left) for _ in own]) for own, spec in taken]
        return tuple(each) if isinstance(self.model.inputs[number], tuple) else each[0]

    def _observed(
        self, stage: StageModule, params: Mapping[str, Any], buffers: Mapping[str, Any], x: Any, followed: Any = None
    ) -> tuple[tuple[Any, ...], list[str], list[str]]:
        """The outputs of a stage, the buffers that it writes, and the statistics of norms that it reads, on copies of
        its buffers; modules stay as they are."""

        def refuse(tensor: Tensor, op: Any) -> None:
            raise Impure(refused(stage.who, f"writes {{}} in place ({op})", None, True))

        attributes, mode = Attributes(stage.modules, stage.who, every=True), OwnMemory(refuse)
        empty = _empty(stage)
        try:
            with stage.lock, followed or nullcontext(), mode:
                copies = {path: one.clone() for path, one in buffers.items()}
                places = {path: memory(copy) for path, copy in copies.items()}
                y, new = stage.observed({**params, **copies}, x)
            if filled := empty - _empty(stage):
                raise ValueError(
                    f"{stage.who} makes a tensor of buffer {min(filled)!r}, which is None before: what a module "
                    "remembers is a tensor from the start. Make it in __init__."
                )
        finally:
            attributes.put_back()
        written = [path for path, place in places.items() if memory(new[path]) != place or place in mode.wrote]
        stale = [name for name, one in stage.unreadable() if memory(one) in mode.read]
        return outputs_of(self.model, stage.number, y), written, stale

    def _by_hand(self, number: int, why: Exception) -> dict[str, How]:
        """The buffers that a stage writes as it runs on the example."""
        if any(isinstance(x, Tensor) and (x.is_meta or hasattr(x, "fake_mode")) for x in self.real_example[0]):
            raise ValueError(
                f"stage {number} cannot run on tensors without data ({why}), so an example has to have some; or say "
                "what it writes by state={name: 'update' or 'ordered'}."
            )
        written: list[str] = []
        for at in range(len(self.real_outputs), number + 1):
            stage = self.stages[at]
            taken = self._taken(at, self.real_outputs, self.real_example)
            x = self._whole(at, taken, [leaf for leaves, _ in taken for leaf in leaves])
            with torch.no_grad(), seeded(0, stage.who):
                params = {path: one.detach().requires_grad_(one.requires_grad) for path, one in _params(stage).items()}
                ports, written, _ = self._observed(stage, params, _buffers(stage), x)
            self.real_outputs.append([tree.flatten(y) for y in ports])
        self.outputs.append([([_aval(leaf) for leaf in leaves], spec) for leaves, spec in self.real_outputs[-1]])
        return dict.fromkeys(written, "ordered")


def _params(stage: StageModule) -> dict[str, Tensor]:
    """Its parameters, each once: a module that stands twice has its tensors in one place."""
    paths = (path for path, _ in stage.bound.named_parameters(remove_duplicate=False))
    return {path: getattr(owner, name) for path, owner, name in stage.placed(paths)}


def _buffers(stage: StageModule) -> dict[str, Tensor]:
    """All buffers but the running statistics of norms whose updates are apart."""
    gone = {(norm, name) for _, norm in stage.norms for name in STATISTICS}
    return {path: getattr(owner, name) for path, owner, name in stage.buffers if (owner, name) not in gone}


def _empty(stage: StageModule) -> set[str]:
    """The buffers that are None."""
    buffers = ((path, name, one) for path, module in stage.modules for name, one in vars(module)["_buffers"].items())
    return {f"{path}.{name}" for path, name, one in buffers if one is None}


def _aval(leaf: Any) -> Any:
    """A leaf as an abstract value, if it is a tensor or known as one."""
    known = leaf.aval if isinstance(leaf, Fact) else aval(leaf) if isinstance(leaf, Tensor) else leaf
    return known._replace(wants=False) if isinstance(known, Aval) else known


def _at_home(leaf: Tensor) -> Aval:
    """The abstract value of an example: one without data stands for a tensor on the default device."""
    device = torch.get_default_device() if leaf.is_meta else leaf.device
    return aval(leaf)._replace(wants=False, device=device)
