"""Record what one stage did with one microbatch in a step, and run it again by its definition.

    step         F reads x, writes y       B reads dy and sum, writes dx, adds g to sum
    afterwards   y' = stage(params, x)     dx', g' = autograd(y', dy)      y = y'?  dx = dx'?  sum = sum before + g'?

Values that a step overwrites later (sums, state, updated parameters) are copied when they are read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.meaning.meaning import RULES, sum_gradients
from fpipe.meaning.purity.ambient import ambient_eps
from fpipe.meaning.purity.attributes import AttributeSnapshot, CallCounter, modules_of
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.meaning.step import StepInputs
from fpipe.positional_stage import net_stage_of
from fpipe.program import Op, Value
from fpipe.runtimes.audit.tensor_bits import (
    are_same_shape,
    copy_leaf,
    have_same_bits,
    largest_error,
    may_be_rounding,
)
from fpipe.runtimes.lowering.lowered import Instruction, Leaves, unflatten_value
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.untraced_stages import zeros

# Values that no op writes in place, so that an audit need not copy them.
_NEVER_OVERWRITTEN = frozenset(("x", "inputs", "t", "target", "y", "again", "carry", "dx", "dcarry", "loss", "count"))


def choose_forwards(prepared: PreparedStep, audit_number: int) -> list[Op]:
    """Choose a forward for each rank of this process: all stages in turn, from the last one, then other microbatches.

    Stages that run under autograd, which is the definition, are not audited, nor are stages with collectives.
    """
    lowered = prepared.lowered
    skipped = {stage for stage, graphs in lowered.graphs.items() if any(graph.is_collective for graph, _ in graphs)}
    skipped |= {*prepared.untraced.stages}
    forwards: dict[int, list[Op]] = {}
    for part in prepared.rank_parts:
        for op in (instruction.ops[0] for instruction in part.instructions):
            read_facts = (leaf for value in op.reads for leaf in lowered.trees[value].leaves if isinstance(leaf, Fact))
            if op.kind == "F" and op.stage not in skipped and not any(leaf.aval.sharding for leaf in read_facts):
                forwards.setdefault(op.rank, []).append(op)
    for ops in forwards.values():
        ops.sort(key=lambda op: (op.microbatch or 0, op.slice or 0, -(op.stage or 0)))
    return [ops[audit_number % len(ops)] for ops in forwards.values()]


@contextmanager
def refuse_failed_rerun(subject: str, attributes: AttributeSnapshot, explanation: str) -> Generator[None]:
    """Raise StepChanged for any error of a definition that runs again, and restore what its modules held before."""
    # Running out of memory only ends the audit: a definition holds all residuals, which the step may recompute.
    try:
        yield
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        raise StepChanged(f"{subject} does not run again as it was traced: {error}{explanation}") from error
    finally:
        attributes.restore()


def follows_from(counters: Sequence[CallCounter], is_same: Callable[[], bool]) -> bool:
    """Return whether a definition that `is_same` runs gives equal results now, and others after a million calls."""
    agreements: list[bool] = []
    # An error may be an index in a table that a million calls do not reach.
    with suppress(Exception):
        for calls in (0, 1_000_000) if counters else ():
            for counter in counters:
                counter.set_calls(calls)
            agreements.append(is_same())
    for counter in counters:
        counter.set_calls(0)
    return agreements == [True, False]


def describe_counters(counters: Sequence[CallCounter]) -> str:
    """Describe the numbers of modules that a definition changes, and from which its results follow."""
    named = ", ".join(f"{c.name!r} of module {c.path!r} ({type(c.module).__name__})" for c in counters[:3])
    return f"results follow from {named}, which changes as it runs; keep such a count in a buffer."


class StageAudit:
    """A stage on one microbatch (and slice) of a step: what its ops read and wrote, and the comparison afterwards."""

    def __init__(self, prepared: PreparedStep, forward: Op, leaves: Sequence[Any], inputs: StepInputs) -> None:
        self.prepared, self.forward, lowered = prepared, forward, prepared.lowered
        self.model, self.trees = prepared.model, lowered.trees
        self.context = replace(prepared.context, key=inputs.key, watch_saved=False)
        # `op[1:4]` are stage, microbatch and slice: these are the ops of one cell, in all their kinds.
        instructions = [i for i in lowered.instructions if i.ops[0][1:4] == forward[1:4] and i.ops[0].kind in "FBIW"]
        reads = {value for i in instructions for value in i.ops[0].reads}
        # The HOISTs of the parameters that the ops of the cell read: the ops read only what those compute.
        instructions += [i for i in lowered.instructions if i.ops[0].kind == "HOIST" and reads & {*i.ops[0].reads}]
        self.instructions: dict[Op, Instruction] = {i.ops[0]: i for i in instructions}
        self.value_by_slot = {slot: name for name, slot in lowered.slots.items()}
        is_donated = prepared.options.donate
        # Begin with the arguments of the step; other values are added as they are read. Donated ones are overwritten.
        self.read_leaves: dict[Value, Leaves] = {}
        for slot, positions in prepared.entrance.inputs:
            if (value := self.value_by_slot[slot]) in reads:
                value_leaves = [leaves[position] for position in positions]
                self.read_leaves[value] = [*map(copy_leaf, value_leaves)] if is_donated else value_leaves
        # Parameters that an op of the step writes. A copy of the caller's could have other strides, and so other bits.
        self.written_params = {value for value in reads if value.name == "params"} - self.read_leaves.keys()
        self.written_leaves: dict[Value, Leaves] = {}
        self.ops_that_ran = set[Op]()

    def tap(self, op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs an instruction's `run` and records its values; `run` itself for other stages."""
        return partial(self._record, self.instructions[op], run) if op in self.instructions else run

    def _record(self, instruction: Instruction, run: Callable[..., Any], *operands: Any) -> Any:
        written_params = dict[Value, Leaves]()
        for slot, leaves in zip(instruction.reads, operands, strict=True):
            name = self.value_by_slot[slot]
            if name in self.written_params:
                written_params[name] = [*leaves]
            elif isinstance(name, Value) and name.name not in ("res", "wres", "const", "hoisted", "params"):
                self.read_leaves[name] = _copy_if_overwritten(name, leaves)
        results = run(*operands)
        # Parameters may be in flight until `run` has waited for them, and be updated in place later.
        self.read_leaves |= {name: [*map(copy_leaf, leaves)] for name, leaves in written_params.items()}
        self.ops_that_ran.add(instruction.ops[0])
        for value, leaves in zip(instruction.written_values, results, strict=True):
            if value.name not in ("res", "wres", "hoisted"):
                self.written_leaves[value] = _copy_if_overwritten(value, leaves)
        return results

    def check(self, explanation: str) -> None:
        """Raise StepChanged if the definition gives other bits, or, of compiled code, other numbers."""
        stage = self.forward.stage or 0
        functions = self.model.stages[stage].forward, self.model.loss
        modules = [pair for function in functions for pair in modules_of(net_stage_of(function) or function)]
        attributes, location = AttributeSnapshot(modules, with_containers=True), self.model.label_of(stage)
        location += f", microbatch {self.forward.microbatch or 0}"
        differences: list[tuple[str, bool]] = []
        with refuse_failed_rerun(location, attributes, explanation):
            definition = self._run_definition()
            differences = [*self._find_differences(definition)]
            counters = attributes.counters()
            if not differences and follows_from(counters, lambda: _are_same(definition, self._run_definition())):
                differences = [(describe_counters(counters), False)]
            # Compiled code may round otherwise, and so may kernels that add in any order.
            may_be_rounding = all(is_rounding for _, is_rounding in differences)
            is_compiled = self.prepared.options.compile
            if may_be_rounding and (is_compiled or (differences and not self._is_repeatable(definition))):
                return
        if differences:
            raise StepChanged(f"{location}: {differences[0][0]}{explanation}")

    def _is_repeatable(self, definition: Mapping[Value, Leaves]) -> bool:
        """Return whether plain autograd gives equal bits each time; kernels that add in any order do not."""
        return all(_are_same(definition, self._run_definition()) for _ in range(2))

    def _run_definition(self) -> dict[Value, Leaves]:
        # 1. The forward, with all residuals.
        forward, ops = self.forward, {op.kind: op for op in self.instructions}
        backward = ops.get("B", ops.get("I"))
        weight = ops.get("W", backward)
        results = [value for value in forward.writes if value in self.written_leaves]
        residuals = Value("res", *forward[1:4])
        op = forward._replace(writes=(*results, residuals), options=())
        operands = [self._definition_operand(value) for value in op.reads]
        *forward_results, forward_residuals = RULES["F"](op, operands, self.context)
        written_leaves = {value: tree.leaves(subtree) for value, subtree in zip(results, forward_results, strict=True)}
        # The next stage computes no gradient of an output that did not want one in the trace.
        for value in (value for value in results if value.name == "y" and backward is not None):
            for abstract_leaf, leaf in zip(self.trees[value].leaves, written_leaves[value], strict=False):
                if isinstance(abstract_leaf, Fact) and abstract_leaf.aval.wants_grad != leaf.requires_grad:
                    change = "has a gradient, and had none" if leaf.requires_grad else "has no gradient, and had one"
                    raise ValueError(f"the output ({value}) {change} in the trace.")
        # 2. The backward, if it ran in this process and on the forward's rank: another one may have another device.
        if backward is None or weight is None or backward.rank != forward.rank:
            return written_leaves
        if not self.ops_that_ran >= {backward, weight}:
            return written_leaves
        writes = [value for value in backward.writes if value.name in ("dx", "dcarry")]
        writes += [value for value in weight.writes if value.name == "g"]
        operands = [
            forward_residuals if value.name == "res" else self._definition_operand(value) for value in backward.reads
        ]
        gradients = RULES["B"](backward._replace(kind="B", writes=tuple(writes)), operands, self.context)
        grad_by_value = dict(zip(writes, gradients, strict=True))
        for instruction in (self.instructions[op] for op in {backward: None, weight: None}):
            # An ADD may be fused into the op that computes its gradient: add what the sum was before.
            for addition in instruction.ops[1:]:
                addends = [self.read_leaves[addition.reads[0]], grad_by_value.pop(addition.reads[1])]
                written_leaves[addition.writes[0]] = sum_gradients(addends)
        return written_leaves | {value: grad for value, grad in grad_by_value.items() if value in self.written_leaves}

    def _definition_operand(self, value: Value) -> Any:
        """Return a value as an operand of the definition, whose leaves want gradients as in the step."""
        abstract = self.trees[value]
        leaves = self.read_leaves.get(value, abstract.leaves)
        return unflatten_value(abstract, [*map(_with_wanted_grad, abstract.leaves, leaves)])

    def _find_differences(self, definition: Mapping[Value, Leaves]) -> Iterator[tuple[str, bool]]:
        """Describe each leaf that differs, and say whether rounding may explain it."""
        # Under autocast a gradient in float32 has been rounded to the dtype of autocast on its way.
        autocast_eps = ambient_eps()
        for value, expected in definition.items():
            for index, (actual, defined) in enumerate(zip_longest(self.written_leaves[value], expected)):
                if are_same_shape(actual, defined):
                    if not have_same_bits(actual, defined):
                        error = largest_error(actual, defined)
                        difference = f"is off by up to {error:.3g} from what its definition gives now."
                        yield (
                            f"{self._describe_leaf(value, index)} {difference}",
                            may_be_rounding(actual, defined, expected, autocast_eps),
                        )
                elif isinstance(actual, Tensor) or isinstance(defined, Tensor) or repr(actual) != repr(defined):
                    description, defined_shown = (
                        f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
                        for leaf in (actual, defined)
                    )
                    name = self._describe_leaf(value, index)
                    yield f"{name} is {description}, and its definition gives {defined_shown} now.", False

    def _describe_leaf(self, value: Value, index: int) -> str:
        if value.name not in ("g", "sum"):
            noun_by_name = {"y": "output", "dx": "gradient of input", "loss": "loss", "state": "state"}
            return f"the {noun_by_name.get(value.name, value.name)} ({value})"
        params = [read_value for read_value in self.forward.reads if read_value.name == "params"][value.port]
        abstract = self.trees[params]
        path = tree.paths(unflatten_value(abstract, range(len(abstract.leaves))))[index][0]
        return f"the gradient of params[{params.stage}]{path}"


def _are_same(definition: Mapping[Value, Leaves], repetition: Mapping[Value, Leaves]) -> bool:
    pairs = chain.from_iterable(zip(definition[value], repetition[value], strict=True) for value in definition)
    return all(have_same_bits(*leaf_pair) for leaf_pair in pairs if are_same_shape(*leaf_pair))


def _with_wanted_grad(abstract_leaf: Any, leaf: Any) -> Any:
    if not isinstance(abstract_leaf, Fact):
        return leaf
    # A parameter that was not gathered is None: no op reads it, so zeros do.
    leaf = zeros(abstract_leaf.aval._replace(wants_grad=False)) if leaf is None else leaf
    return leaf.detach().requires_grad_() if abstract_leaf.aval.wants_grad else leaf


def _copy_if_overwritten(value: Value, leaves: Sequence[Any]) -> Leaves:
    return [*leaves] if value.name in _NEVER_OVERWRITTEN else [*map(copy_leaf, leaves)]
