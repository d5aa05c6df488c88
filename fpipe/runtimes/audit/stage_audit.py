"""Record what one stage did with one microbatch in a step, and run it again by its definition.

    step         F reads x, writes y       B reads dy and sum, writes dx, adds g to sum
    afterwards   y' = stage(params, x)     dx', g' = autograd(y', dy)      y = y'?  dx = dx'?  sum = sum before + g'?

What a step writes later in place (sums, state, parameters that are updated) is copied as it is read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.meaning.meaning import RULES, summed
from fpipe.meaning.purity.attributes import Attributes, modules_of
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.meaning.step import StepInputs
from fpipe.positional_stage import of_net
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.lowered import Instruction, Leaves, whole
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.untraced import zeros
from fpipe.verification.report import Close, largest

_NEVER_OVERWRITTEN = frozenset(("x", "inputs", "t", "target", "y", "again", "carry", "dx", "dcarry", "loss", "count"))
_close = Close()


def audited_ops(prepared: Prepared, number: int) -> list[Op]:
    """Choose a forward for each rank of this process: all stages in turn, from the last one, then other microbatches.

    Not audited are stages that run under autograd, which is the definition, and those that talk to other processes.
    """
    lowered = prepared.lowered
    skipped = {stage for stage, graphs in lowered.graphs.items() if any(graph.collective for graph in graphs)}
    skipped |= {*prepared.untraced.stages}
    forwards: dict[int, list[Op]] = {}
    for part in prepared.rank_parts:
        for op in (instruction.ops[0] for instruction in part.instructions):
            facts = (leaf for value in op.reads for leaf in lowered.trees[value].leaves if isinstance(leaf, Fact))
            if op.kind == "F" and op.stage not in skipped and not any(leaf.aval.sharding for leaf in facts):
                forwards.setdefault(op.rank, []).append(op)
    for ops in forwards.values():
        ops.sort(key=lambda op: (op.microbatch or 0, op.slice or 0, -(op.stage or 0)))
    return [ops[number % len(ops)] for ops in forwards.values()]


@contextmanager
def running_again(who: str, attributes: Attributes, changes: str) -> Generator[None]:
    """Raise StepChanged for any error of a definition that runs again; restore what its modules held before.

    A lack of memory only ends the audit: a definition holds all residuals, which the step may recompute or offload.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        raise StepChanged(f"{who} does not run again as it was traced: {error}{changes}") from error
    finally:
        attributes.restore()


class StageAudit:
    """A stage on one microbatch (and slice) of a step: what its ops read and wrote, and the comparison afterwards."""

    def __init__(self, prepared: Prepared, forward: Op, leaves: Sequence[Any], inputs: StepInputs) -> None:
        self.prepared, self.forward, lowered = prepared, forward, prepared.lowered
        self.model, self.trees = prepared.model, lowered.trees
        self.context = replace(prepared.context, key=inputs.key, watch_saved=False)
        of_stage = [i for i in lowered.instructions if i.ops[0][1:4] == forward[1:4] and i.ops[0].kind in "FBIW"]
        self.instructions: dict[Op, Instruction] = {i.ops[0]: i for i in of_stage}
        self.names = {slot: name for name, slot in lowered.slots.items()}
        donated, reads = prepared.options.donate, {value for op in self.instructions for value in op.reads}
        self.read: dict[Value, Leaves] = {  # what a step is handed; other values are added as they are read
            self.names[slot]: [_copied(leaves[at]) if donated else leaves[at] for at in places]
            for slot, places in prepared.entrance.inputs
            if self.names[slot] in reads
        }
        self.written: dict[Value, Leaves] = {}
        self.ran = set[Op]()

    def tap(self, op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in the place of an instruction's function."""
        return partial(self._record, self.instructions[op], run) if op in self.instructions else run

    def _record(self, instruction: Instruction, run: Callable[..., Any], *lists: Any) -> Any:
        for slot, leaves in zip(instruction.reads, lists, strict=True):
            name = self.names[slot]
            if isinstance(name, Value) and name.name not in ("res", "wres", "const"):
                self.read[name] = [*leaves] if name.name == "params" else _kept(name, leaves)
        results = run(*lists)
        # Parameters may be in flight until `run` has waited for them, and be updated in place later.
        names = {self.names[slot] for slot in instruction.reads}
        self.read |= {name: [*map(_copied, self.read[name])] for name in names if name[0] == "params"}
        self.ran.add(instruction.ops[0])
        for value, leaves in zip(instruction.written, results, strict=True):
            if value.name not in ("res", "wres"):
                self.written[value] = _kept(value, leaves)
        return results

    def check(self, changes: str) -> None:
        """Raise StepChanged if the definition gives other bits, or, of compiled code, other numbers."""
        number = self.forward.stage or 0
        functions = self.model.stages[number].forward, self.model.loss
        modules = [pair for function in functions for pair in modules_of(of_net(function) or function)]
        attributes, place = Attributes(modules, contents=True), self.model.who(number)
        place += f", microbatch {self.forward.microbatch or 0}"
        differences: list[tuple[str, bool]] = []
        with running_again(place, attributes, changes):
            definition = self._definition()
            differences = [*self._differences(definition)]
            rounding = all(within for _, within in differences)
            if rounding and (self.prepared.options.compile or (differences and not self._is_repeatable(definition))):
                return
        if differences:
            raise StepChanged(f"{place}: {differences[0][0]}{changes}")

    def _is_repeatable(self, definition: Mapping[Value, Leaves]) -> bool:
        """Whether plain autograd gives the same bits each time, which kernels that add in any order do not."""
        for again in (self._definition() for _ in range(2)):
            pairs = chain.from_iterable(zip(definition[value], again[value], strict=True) for value in definition)
            if not all(_same_bits(a, b) for a, b in pairs if _is_alike(a, b)):
                return False
        return True

    def _definition(self) -> dict[Value, Leaves]:
        """Run the stage under plain autograd; return what it writes, by the values that the step wrote."""
        forward, ops = self.forward, {op.kind: op for op in self.instructions}
        backward = ops.get("B", ops.get("I"))
        weight = ops.get("W", backward)
        results = [value for value in forward.writes if value in self.written]
        residuals = Value("res", *forward[1:4])
        op = forward._replace(writes=(*results, residuals), how=())
        *made, kept = RULES["F"](op, [self._argument(value) for value in op.reads], self.context)
        written = {value: tree.leaves(each) for value, each in zip(results, made, strict=True)}
        if backward is None or weight is None or not self.ran >= {backward, weight} or backward.rank != forward.rank:
            return written  # the backward is elsewhere, perhaps on another device
        writes = [value for value in backward.writes if value.name in ("dx", "dcarry")]
        writes += [value for value in weight.writes if value.name == "g"]
        args = [kept if value.name == "res" else self._argument(value) for value in backward.reads]
        gradients = RULES["B"](backward._replace(kind="B", writes=tuple(writes)), args, self.context)
        made_by_value = dict(zip(writes, gradients, strict=True))
        for instruction in (self.instructions[op] for op in {backward: None, weight: None}):
            for add in instruction.ops[1:]:  # gradients that were added to a sum where they were made
                written[add.writes[0]] = summed([self.read[add.reads[0]], made_by_value.pop(add.reads[1])])
        return written | {value: leaves for value, leaves in made_by_value.items() if value in self.written}

    def _argument(self, value: Value) -> Any:
        """Return a value as the definition takes it: a leaf wants a gradient if what it was computed from does."""
        abstract = self.trees[value]
        leaves = self.read.get(value, abstract.leaves)
        return whole(abstract, [*map(_wanting, abstract.leaves, leaves)])

    def _differences(self, definition: Mapping[Value, Leaves]) -> Iterator[tuple[str, bool]]:
        """Describe each leaf that differs, and say whether rounding may explain it."""
        for value, expected in definition.items():
            for at, (a, b) in enumerate(zip_longest(self.written[value], expected)):
                if _is_alike(a, b):
                    if not _same_bits(a, b):
                        error, eps = largest(a, b), torch.finfo(a.dtype).eps if _has_numbers(a) else 0.0
                        scale = max((float(x.detach().abs().max()) for x in expected if _has_numbers(x)), default=0.0)
                        off = f"is off by up to {error:.3g} from what its definition gives now."
                        yield f"{self._what(value, at)} {off}", error <= eps**0.5 * scale
                elif isinstance(a, Tensor) or isinstance(b, Tensor) or repr(a) != repr(b):
                    shown = (f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in (a, b))
                    yield "{} is {}, and its definition gives {} now.".format(self._what(value, at), *shown), False

    def _what(self, value: Value, at: int) -> str:
        """Say what a leaf is in the user's words."""
        if value.name not in ("g", "sum"):
            words = {"y": "output", "dx": "gradient of input", "loss": "loss", "state": "state"}
            return f"the {words.get(value.name, value.name)} ({value})"
        params = [read for read in self.forward.reads if read.name == "params"][value.port]
        abstract = self.trees[params]
        path = tree.paths(whole(abstract, range(len(abstract.leaves))))[at][0]
        return f"the gradient of params[{params.stage}]{path}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not torch.float32:
        return _close(a.detach(), b.detach())
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))  # without copies


def _is_alike(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and (a.shape, a.dtype) == (b.shape, b.dtype)


def _has_numbers(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() > 0 and (leaf.is_floating_point() or leaf.is_complex())


def _wanting(known: Any, leaf: Any) -> Any:
    if not isinstance(known, Fact):
        return leaf
    leaf = zeros(known.aval._replace(wants=False)) if leaf is None else leaf  # it was not gathered: no op reads it
    return leaf.detach().requires_grad_() if known.aval.wants else leaf


def _kept(value: Value, leaves: Sequence[Any]) -> Leaves:
    """The leaves of a value, copied if a later op may overwrite them."""
    return [*leaves] if value.name in _NEVER_OVERWRITTEN else [*map(_copied, leaves)]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
