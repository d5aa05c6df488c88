"""Tell all ranks of a pipeline what each was handed, in a header of three numbers, and choose the steps that fit.

    rank 0: 3 microbatches, signature 7          --> header -->        all: the step of (3, 7) (0, 1) (3, 9)
    rank 1: None, signature 1                                          is new to all ranks, or known to all
    rank 2: 3 microbatches, signature 9

Where all ranks were handed both sides in the first step, each knows all that a header tells, and sends none. A rank
that is handed other sides than the others is then named by its first message, or by the next agreement.

Else a rank tells its number of microbatches (0 for None), the number that it gave to its arguments' signature, and
whether it has a key. All ranks have the same headers, and so the same table of what they have run: lengths are new to
all of them or to none. What is new is described in full, and lowered by all at once. Replicas have headers of their
own: they share their REDUCEs, GATHERs and SCATTERs, and tell one number, how many microbatches they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any

import torch.distributed as dist

from fpipe import tree
from fpipe.graphs.tracing.trace_cache import LRUCache
from fpipe.meaning.single_device.params_and_state import as_streams, check_batch
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.meaning.step_by_count import MOST_COUNTS, ProgramOfCount, count_microbatches
from fpipe.program import Program, parts_of
from fpipe.runtimes.faults.agreement import Claims, first_unequal_lines
from fpipe.runtimes.faults.watchdog import PeerWait
from fpipe.runtimes.processes.exchange_lane import ExchangeLane
from fpipe.runtimes.processes.rank_steps import MAX_SIGNATURES, RankSteps, as_meta
from fpipe.runtimes.processes.replicas import EXCHANGED_KINDS, Replicas

Sides = tuple[Any, Any]
"""The inputs and the target of a batch; None for a side that a rank was not handed."""
Header = tuple[tuple[int, ...], ...]


@dataclass
class StepsByHeader:
    """The steps of one rank for any lengths and, if the program follows from it, any number of microbatches.

    Attributes:
        example_steps: the steps of the example's program.
        make_program: returns the program for a number of microbatches; None for a program that is fixed.
        add_program: agrees on a program with the other ranks, connects them, and returns its steps.
    """

    example_steps: RankSteps
    make_program: ProgramOfCount | None
    add_program: Callable[[Program, int], RankSteps]

    def __post_init__(self) -> None:
        example_steps = self.example_steps
        # Whether steps begin with a header. The first step decides it; several training steps of a fixed program have
        # several batches, and no header.
        self._has_header = False if self.make_program is None and example_steps.program.steps > 1 else None
        self._is_presplit = any(
            "presplit" in dict(op.options) for op in example_steps.program.ops if op.kind == "SPLIT"
        )
        self._example_sides = (None, None)
        if self._has_header is not False:
            self._example_sides = sides_of(example_steps.shapes.batch, self._is_presplit)
        self._reads_microbatch = any("microbatch" in stage.keywords for stage in example_steps.model.stages)
        self._numbers, self._next_number = LRUCache[Any, int](MAX_SIGNATURES), count(1)
        self._steps_by_header = LRUCache[tuple[Header | int, int | None], RankSteps](MAX_SIGNATURES)
        self._steps_by_count = LRUCache[int, RankSteps](MOST_COUNTS)
        self._steps_by_count[example_steps.program.microbatches] = example_steps

    def run(self, local_inputs: StepInputs) -> Result:
        """Run the step of the batch that the ranks were handed; all ranks of a pipeline call it."""
        example_steps = self.example_steps
        if self._has_header is False and self.make_program is None:
            return example_steps.run(local_inputs)
        sides = sides_of(local_inputs.batch, self._is_presplit)
        voters, sync_point = example_steps.voters, f"step {example_steps.begun}"
        wait = voters.wait_at(sync_point)
        misses_side = any(map(_is_missing, sides, self._example_sides))
        if self._has_header is None:
            # A rank that is handed None cannot see lengths change: if there is one, all need headers.
            self._has_header = any(voters.gather((misses_side,), wait)[0])
            return self.run(local_inputs)
        local_inputs = replace(local_inputs, batch=sides)
        microbatches = 0 if self.make_program is None else count_microbatches(sides)
        has_key, header = local_inputs.key is not None, microbatches
        if self._has_header:
            leaves, containers = tree.flatten(local_inputs.trees)
            signature = example_steps.signatures.of(leaves, containers, homes=repeat(example_steps.device))
            number = self._numbers.get_or_make(signature, lambda: next(self._next_number))
            header = tuple(zip(*voters.gather((microbatches, number, has_key), wait), strict=True))
            microbatches = _count_of_header(header) if self.make_program is not None else 0
            has_key = any(is_keyed for *_, is_keyed in header)
        elif misses_side:
            raise ValueError("a rank was handed None, and both sides in the first step: pass both in each step.")
        first_microbatch = None
        if self.make_program is not None and example_steps.links.replicas is not None:
            earlier_count = example_steps.links.replicas.count_earlier(microbatches, sync_point)
            # Only stages that see the index of a microbatch, or draw by it, are lowered anew for another one.
            first_microbatch = earlier_count if has_key or self._reads_microbatch else None
        steps = self._steps_by_header.get((header, first_microbatch))
        if steps is None:
            steps = self._steps_of_new_header(microbatches, sides, wait)
            steps = replace(steps, links=steps.links._replace(first_microbatch=first_microbatch))
            self._steps_by_header[header, first_microbatch] = steps
        steps.begun = example_steps.begun
        return steps.run(local_inputs)

    def _steps_of_new_header(self, microbatches: int, sides: Sides, wait: PeerWait) -> RankSteps:
        """Return the steps of a header that no rank has met, which know the shapes of the whole batch."""
        steps = self.example_steps
        sides_by_rank: list[Any] = [None] * steps.links.group.size()
        if self._has_header:
            steps.links.watchdog.wait = wait
            dist.all_gather_object(sides_by_rank, tree.tree_map(as_meta, sides), group=steps.links.group)
            steps.links.watchdog.wait = None
        if self.make_program is not None:
            known_steps = self._steps_by_count.get(microbatches)
            steps = known_steps or self.add_program(self.make_program(microbatches), steps.begun)
            self._steps_by_count[microbatches] = steps
        if not self._has_header:
            return steps
        batch = merge_sides(sides_by_rank, self._example_sides, microbatches)
        return replace(steps, shapes=replace(steps.shapes, batch=batch), has_one_signature=True)


def sides_of(batch: Any, is_presplit: bool = True) -> Sides:
    """Return both sides of a batch; of a list of microbatches two lists, or None where all are None.

    >>> sides_of([("x0", None), ("x1", None)]), sides_of(None)
    ((['x0', 'x1'], None), (None, None))
    """
    if batch is None:
        return None, None
    sides = as_streams(batch, len(batch)) if is_presplit and isinstance(batch, list) else batch  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(sides, tuple) or len(sides) != 2:  # pyright: ignore[reportUnknownArgumentType]
        check_batch(sides)

    def is_none(side: Any) -> bool:
        return is_presplit and isinstance(side, list) and bool(side) and all(part is None for part in side)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    inputs, target = (None if is_none(side) else side for side in sides)
    return inputs, target


def merge_sides(sides_by_rank: Sequence[Sides], example_sides: Sides, microbatches: int) -> Sides:
    """Return each side as the first rank that has it was handed it.

    Args:
        sides_by_rank: both sides of each rank's batch.
        example_sides: of the example.
        microbatches: how many there are, if their number differs from step to step; else 0.
    """
    sides = list[Any]()
    for index, name in enumerate(("inputs", "target")):
        side = next((sides[index] for sides in sides_by_rank if sides[index] is not None), None)
        if side is None and microbatches:
            if _is_missing(side, example_sides[index]):
                raise ValueError(f"no rank was handed the {name} of this step.")
            side = [None] * microbatches
        # In a fixed program the rank that reads what is missing is named where it reads it.
        sides.append(example_sides[index] if side is None else side)
    return sides[0], sides[1]


def _is_missing(side: Any, example_side: Any) -> bool:
    return side is None and example_side is not None


def _count_of_header(header: Header) -> int:
    count_by_rank = {rank: microbatches for rank, (microbatches, *_) in enumerate(header) if microbatches}
    if not count_by_rank:
        raise ValueError("no rank was handed a batch.")
    first_rank, first_count = next(iter(count_by_rank.items()))
    for rank, microbatches in count_by_rank.items():
        if microbatches != first_count:
            raise ValueError(
                f"rank {rank} was handed {microbatches} microbatches, and rank {first_rank} {first_count}."
            )
    return first_count


def exchange_lines(program: Program) -> list[str]:
    """Return a line for each exchange with replicas, by rank, in the order of the program."""
    exchanges = [op for op in parts_of(program.ops) if op.kind in EXCHANGED_KINDS]
    exchanges.sort(key=lambda op: op.rank)
    return [f"{op.kind} of {op.writes[0]} on rank {op.rank} along {dict(op.options)['axis']!r}" for op in exchanges]


def refuse_other_exchanges(program: Program, other_program: Program) -> None:
    """Raise ValueError if two programs exchange other values with replicas, or in another order.

    Replicas with unlike numbers of microbatches run both at once, and each collective has to find its counterpart.
    """
    lines, other_lines = exchange_lines(program), exchange_lines(other_program)
    if lines != other_lines:
        line, expected = first_unequal_lines(other_lines, lines)
        raise ValueError(
            f"{other_program.microbatches} microbatches exchange {line}, and {program.microbatches} {expected}."
        )


def refuse_varying_counts(lane: ExchangeLane, options: StepOptions, replicas: Replicas | None) -> None:
    """Raise ValueError for a step of any number of microbatches that would need the same number in all pipelines."""
    if lane.groups:
        raise ValueError("stages exchange along an axis: build a program, not a function.")
    if options.graph and replicas is not None:
        raise ValueError("graph=True with replicas: build a program, not a function.")


def claims_by_count(program: Program, claims: Claims) -> Claims:
    """Return the claims of a build, with the program's among replicas of equally many microbatches only."""
    other_claims = {name: claim for name, claim in claims.items() if name != "program"}
    name = f"program|{program.microbatches} microbatches"
    return {name: claims["program"], "exchanges": exchange_lines(program), **other_claims}
