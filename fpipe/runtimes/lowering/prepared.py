"""Prepare a program for one signature of a step's arguments: what runs, and the ways into its slots and out of them.

params, batch, state        --> slots --> instructions --> slots -->        Result
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, repeat
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.compiling.inductor import compile_all
from fpipe.graphs.language.graph import Fact, fact, in_own_storage, is_strided, layout_of
from fpipe.graphs.purity.ambient import Untraceable, raw_ops
from fpipe.graphs.purity.sharded import Sharding, local_of, sharding_of
from fpipe.graphs.tracing.keys import needs_key
from fpipe.model import Model, PositionalStage, taken_gradients, trained, who_draws
from fpipe.program import Program, Value
from fpipe.runtimes.definition.by_autograd import StepContext
from fpipe.runtimes.definition.devices import BATCH, check_at_home, homes_of
from fpipe.runtimes.definition.ends import NO_KEY, bind_inputs, check_inputs, collect_results
from fpipe.runtimes.definition.meaning import batch_of
from fpipe.runtimes.definition.moves import brought, moves_of
from fpipe.runtimes.definition.recorder import Recorder, Row
from fpipe.runtimes.lowering.abstract_tree import AbstractTree, dense
from fpipe.runtimes.lowering.lower import FACTORS, lower
from fpipe.runtimes.lowering.part import Part, See, Slots, Watch
from fpipe.runtimes.lowering.shapes import Untraced
from fpipe.single_device.batches import streams
from fpipe.single_device.result import Result


class _Leaf:
    """The place of a leaf among those that a step is handed, or in a slot."""

    def __init__(self, at: int, slot: int = -1, copied: bool = False) -> None:
        self.at, self.slot, self.copied = at, slot, copied
        self.sharding: Sharding | None = None


class _Zeros:
    """The gradient of a parameter that nothing depends on, and where that is at home."""

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self.like, self.device = like, device


class Prepared:
    """A program lowered for one signature, and the ways from what a step is handed into slots and out of them."""

    def __init__(
        self,
        program: Program,
        model: Model,
        params: Any,
        batch: Any,
        state: Any,
        key: int | None,
        untraced: Untraced,
        loss_scale: float = 1.0,
        compile: bool = False,
        home: torch.device | None = None,
        replica: tuple[int, int] = (0, 1),
        devices: Sequence[torch.device] = (),
    ) -> None:
        check_inputs(program, model, params, state)
        whole, sizes = batch_of(program, batch)
        self.untraced = untraced
        leaves, containers = tree.flatten((params, batch, state))
        own_params, own_batch, own_state = tree.unflatten(containers, [_Leaf(at) for at in range(len(leaves))])
        storages: dict[int, int] = {}
        trees: dict[Value, AbstractTree] = {}
        handed: dict[Value, list[int]] = {}
        homes = homes_of(program, devices)
        self.at_home = [*repeat(home or torch.get_default_device(), len(leaves))]  # where a leaf without data would be
        own_batch = own_batch if whole is batch else streams(own_batch, len(sizes))
        ends = bind_inputs(program, model, own_params, own_batch, None if state is None else own_state, key)
        if ends.pop(Value("key"), None) is not None:  # who asks for it is told apart, by stage and microbatch
            trees[Value("key")] = AbstractTree((key,), tree.flatten(key)[1])
        for value, held in ends.items():
            found, spec = tree.flatten(held)
            handed[value] = [leaf.at for leaf in found]
            if value in homes and value.name not in BATCH:
                check_at_home(value, (leaves[leaf.at] for leaf in found), homes[value], example=True)
                for leaf in found:
                    self.at_home[leaf.at] = homes[value]
            if value.name == "params":
                real = tree.unflatten(spec, [leaves[leaf.at] for leaf in found])
                train = trained(model, value.stage or 0, value.port, real)
            else:
                train = [False] * len(found)
            pairs = zip(found, train, strict=True)
            facts = (_fact(leaves[leaf.at], storages, one, self.at_home[leaf.at]) for leaf, one in pairs)
            trees[value] = AbstractTree(tuple(_at(fact, homes.get(value)) for fact in facts), spec)
        cut = {n: stage.forward for n, stage in enumerate(model.stages) if isinstance(stage.forward, PositionalStage)}
        constants = {Value("const", number): stage for number, stage in cut.items() if stage.constants()}
        for value, stage in constants.items():
            trees[value] = AbstractTree(tuple(_fact(leaf, storages) for leaf in stage.constants()))
        wanted = taken_gradients(model, program.ops)
        context = StepContext(model, sum(sizes), input_grads=wanted, loss_scale=loss_scale, sizes=sizes)
        context.first, context.replicas = replica[0] * program.microbatches, replica[1]
        context.moves = moves_of(program, devices)
        lowered = self.lowered = lower(program, context, trees, untraced, compile)
        self.instructions, self.trees, self.given = lowered.instructions, lowered.trees, lowered.given
        self.model, self.program = model, program
        self.weighed_rows = sum(sizes) if model.reduction == "mean" else 0
        slots = self.lowered.slots
        count = len(slots) - sum(len(one.writes) for one in self.instructions)
        self.start: list[Any] = [self.lowered.constants.get(slot) for slot in range(count)]
        self.inputs = [(slots[value], at) for value, at in handed.items()]
        self.homes = [(slots[value], home) for value, home in homes.items() if value in handed and value.name in BATCH]
        self.constants = [(slots[value], stage) for value, stage in constants.items() if value in slots]
        self.factors = [(slots[*FACTORS, n], stage) for n, stage in cut.items() if (*FACTORS, n) in slots]
        self.key = self.lowered.key
        self.asked = slots.get(Value("key"))
        self.prepare = [*lowered.prepare]
        self.part = Part(self.instructions, model)
        self.recorder: Recorder | None = None
        self.results = self._results(self._asked(program), params, whole, state, {*self.given})

    def compile(self) -> None:
        """Compile what this process runs of it."""
        compile_all(
            self.lowered.kernels[one.ops[0]] for one in self.part.instructions if one.ops[0] in self.lowered.kernels
        )

    def run(
        self,
        leaves: Sequence[Any],
        state: Any,
        key: int | None,
        *,
        record: Program | None,
        check_finite: bool,
        see: See | None = None,
    ) -> Result:
        """One step."""
        slots = self.start[:]
        leaves = [*map(local_of, leaves)]
        if self.key is not None:
            if key is None and self.lowered.drawing:
                raise ValueError(needs_key(who_draws(self.model, self.lowered.drawing[0].stage or 0)))
            slots[self.key] = key
        if self.asked is not None:
            if key is None:
                raise ValueError(NO_KEY)
            slots[self.asked] = [None]  # a list of its own, which its last reader empties
        for slot, places in self.inputs:
            slots[slot] = [leaves[at] for at in places]
        for slot, stage in self.constants:
            slots[slot] = [*map(local_of, stage.constants())]
        for slot, stage in self.factors:
            slots[slot] = stage.momenta()
        with raw_ops():
            for slot, home in self.homes:
                slots[slot] = [brought(leaf, home) for leaf in slots[slot]]
            for function, reads, slot in self.prepare:
                slots[slot] = function(*[slots[k] for k in reads])[0]
            own = [leaf for slot, _ in self.constants for leaf in slots[slot]]
            own += [leaf for leaves in self.lowered.constants.values() for leaf in leaves]
            if record and self.recorder is None:
                rows = [Row(one.ops, one.written, one.dead) for one in self.instructions]
                self.recorder = Recorder(record, rows)
            notes = self.recorder.begin([*leaves, *own]) if record and self.recorder else None
            device = next(iter(notes.devices), None) if notes else None
            self._execute(slots, Watch(notes, check_finite, see, device) if notes or check_finite or see else None)
            containers, found, untouched = self.results
            whole = tree.unflatten(containers, [_result(leaf, slots) for leaf in found])
        if untouched:
            assert state is not None
            whole["state"] = tuple(state[n] if n in untouched else own for n, own in enumerate(whole["state"]))
        return Result(**whole, timeline=self.recorder.timeline(notes) if self.recorder and notes else None)

    def _execute(self, slots: Slots, watch: Watch | None) -> None:
        """All instructions."""
        self.part.run(slots, watch)

    def _asked(self, program: Program) -> Program:
        """The program with one output of each name: where several ranks want one, all are the same in one process."""
        return program

    def _results(
        self, program: Program, params: Any, batch: Any, state: Any, given: set[int]
    ) -> tuple[Any, list[Any], set[int]]:
        """The containers of the results, for each leaf its place, and the stages whose state stays the caller's."""
        trees, slots = self.lowered.trees, self.lowered.slots
        values: dict[Value, Any] = {}
        facts: dict[_Leaf, Any] = {}
        for end in program.outputs:
            abstract = trees[end.value]
            places = [_Leaf(at, slots[end.value]) for at in range(len(abstract.leaves))]
            facts |= dict(zip(places, abstract.leaves, strict=True))
            kept = [None if leaf is None else place for leaf, place in zip(abstract.leaves, places, strict=True)]
            values[end.value] = kept if abstract.spec is None else tree.unflatten(abstract.spec, kept)
        written = {end.name.stage for end in program.outputs if end.name.name == "state"}
        untouched = {n for n in range(len(self.model.stages)) if written and n not in written}
        state = [None if n in untouched else own for n, own in enumerate(state)] if written else None
        whole = collect_results(program, self.model, params, batch, state, values, lambda leaf: leaf)
        found, containers = tree.flatten(whole)
        of_params = cycle(zip(tree.leaves(params), self.at_home, strict=False))
        zeros: dict[int, _Zeros] = {}
        for leaf, (param, home) in zip(tree.leaves(whole.get("grads", [])), of_params, strict=False):
            if isinstance(leaf, _Leaf):  # in the containers of params, once or for each microbatch
                leaf.sharding = sharding_of(param)
            elif isinstance(leaf, Tensor):
                zeros[id(leaf)] = _Zeros(leaf, home if leaf.is_meta else leaf.device)
        for leaf in found:
            known = facts.get(leaf) if isinstance(leaf, _Leaf) else None
            if isinstance(known, Fact):
                leaf.copied = bool(self.untraced.stages) or known.storage in given or not dense(known)
                given.add(known.storage)
        return containers, [zeros.get(id(leaf), leaf) for leaf in found], untouched


def _fact(leaf: Any, storages: dict[int, int], trains: bool = False, home: torch.device | None = None) -> Any:
    """What is known of a leaf that a step is handed, and whether it gets a gradient."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_strided(leaf):
        raise Untraceable(f"it is handed a {layout_of(leaf)}")
    known = fact(leaf, storages)
    device = (home or torch.get_default_device()) if leaf.is_meta else known.aval.device  # an example without data
    return known._replace(aval=known.aval._replace(wants=trains, device=device))


def _at(known: Any, home: torch.device | None) -> Any:
    """What is known of a leaf of the batch once it is on the device of the rank that reads it."""
    if home is None or not isinstance(known, Fact) or known.aval.device == home:
        return known
    return in_own_storage(known.aval._replace(device=home))


def _result(leaf: Any, slots: Sequence[Any]) -> Any:
    """A leaf of the results: from its slot, zeros like a parameter that nothing depends on, or itself."""
    if isinstance(leaf, _Zeros):
        return torch.zeros_like(leaf.like, device=leaf.device)
    if not isinstance(leaf, _Leaf):
        return leaf
    made = slots[leaf.slot][leaf.at]
    made = made.clone(memory_format=torch.contiguous_format) if leaf.copied else made
    return made if leaf.sharding is None else leaf.sharding.whole(made)
