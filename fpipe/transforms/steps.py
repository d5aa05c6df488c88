"""Chain several training steps into one program: each reads the parameters that the previous one wrote.

    params[0,1] = UPDATE params[0] ..        --> steps(2) -->        params[0,1] = UPDATE params[0] ..
                                                                     params[0,3] = UPDATE params[0,1] ..

Microbatches are numbered across all steps. Step t reads the batch inputs:t, target:t and the learning rate lr:t. A
rank starts the next step when it has finished its part of this one: it waits only for values that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fpipe.limits import check_whole_number
from fpipe.order import sort_outputs
from fpipe.program import PARAMETERS, Input, Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, as_transform, map_parts, rebuild, refuse_freed, refuse_transfers

_INPUTS_OF_EACH_STEP = frozenset(("inputs", "target", "lr"))
_RESULTS_OF_LAST_STEP = frozenset(("params", "opt", "state", "scale"))


def steps(count: int, *, stale: int | Literal["stash"] = 0) -> Transform:
    """Chain several training steps into one program, without a flush between them where their data allow it.

    A step is then handed a list with the batch of each, and one learning rate or a list of them. `Result.loss` and
    `.norm` are tuples with one for each; parameters and states are those after the last.

    Args:
        count: how many training steps.
        stale: by how many steps the parameters are behind that gradients are taken of: 0 is the ordinary loop; with 1 a
            step need not wait for the one before (PipeDream-2BW); "stash" is PipeDream's: stage s of S is behind by
            S-1-s steps. Forward and backward read the same version, updates are of the latest, and the first steps read
            what is handed in. A schedule comes after it, and runs the microbatches of all steps as one stream; but
            before it where a host updates (`roundpipe`), which does so while the next step runs (RoundPipe).

    Returns:
        A transform, behind `update`, and if nothing is stale behind all but `communicate` and `free`.

    Raises:
        ProgramError: the program updates nothing, is not split, is several steps already, has its transfers, random
            keys or the gradients of inputs; or it has a schedule and stale parameters, and updates where it computes.

    >>> import fpipe
    >>> step = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge(outputs=False), fpipe.update("SGD"))
    >>> program = fpipe.steps(2)(step(fpipe.program(2)))
    >>> print(*(op for op in program.ops if op.kind in "FUPDATE" and op.stage == 0), sep="\\n")
    y[0,0] res[0,0] = F[0,0] params[0] x[0,0] @ 0
    y[0,1] res[0,1] = F[0,1] params[0] x[0,1] @ 0
    params[0,1] opt[0,1] = UPDATE[0,1] params[0] opt[0] sum[0,1] lr {by='SGD'} @ 0
    y[0,2] res[0,2] = F[0,2] params[0,1] x[0,2] @ 0
    y[0,3] res[0,3] = F[0,3] params[0,1] x[0,3] @ 0
    params[0,3] opt[0,3] = UPDATE[0,3] params[0,1] opt[0,1] sum[0,3] lr:1 {by='SGD'} @ 0
    """
    check_whole_number("steps", count)
    if stale != "stash":
        check_whole_number("stale", stale, minimum=0)

    @as_transform
    def transform(program: Program) -> Program:
        _refuse_unsuitable(program, stale)
        if count == 1:
            return program
        renamers = [_StepRenamer(program, number, stale) for number in range(count)]
        inputs = (*program.inputs, *(end for renamer in renamers[1:] for end in renamer.inputs()))
        ops = [map_parts(renamer.op, op) for renamer in renamers for op in program.ops]
        outputs = sort_outputs(end for renamer in renamers for end in renamer.outputs(renamer is renamers[-1]))
        return rebuild(program, ops, inputs=inputs, outputs=outputs)

    return transform


class _StepRenamer:
    """Renamer of a program's values, ops and outputs for one of several steps."""

    def __init__(self, program: Program, number: int, stale: int | Literal["stash"]) -> None:
        self.program, self.number, self.stale = program, number, stale
        self.size = program.microbatches
        self.inputs_of_call = {end.value for end in program.inputs}
        # sum[0]:1 adds up what two stages give their tied leaf; sum[0,3]:1 is what one of them gives.
        self.tied_sums = {value for value in program.writer if self.at_last_microbatch(value) in program.writer}

    def inputs(self) -> Iterator[Input]:
        for end in self.program.inputs:
            if end.value.name in _INPUTS_OF_EACH_STEP:
                yield end._replace(value=end.value._replace(port=self.number))

    def outputs(self, is_last: bool) -> Iterator[Output]:
        """Yield the outputs of this step; parameters and states only for the last step."""
        for end in self.program.outputs:
            name = end.name
            if name.name not in _RESULTS_OF_LAST_STEP:
                microbatch = self.size - 1 if name.microbatch is None else name.microbatch
                yield end._replace(name=name._replace(microbatch=self.count(microbatch)), value=self.rename(end.value))
            elif is_last:
                yield end._replace(value=self.rename(end.value))

    def op(self, op: Op) -> Op:
        # Stale parameters are for gradients alone: an update is always of the latest version.
        delays = [0 if op.kind == "UPDATE" else self.delay(value.stage or 0) for value in op.reads]
        reads = tuple(map(self.rename, op.reads, delays))
        microbatch = None if op.microbatch is None else self.count(op.microbatch)
        return op._replace(microbatch=microbatch, reads=reads, writes=tuple(map(self.rename, op.writes)))

    def delay(self, stage: int) -> int:
        """Return by how many steps the parameters of a stage are behind where they are read."""
        # "stash" is PipeDream's rule: stage s of S is S-1-s steps behind.
        return self.stale if isinstance(self.stale, int) else self.program.stages - 1 - stage

    def count(self, microbatch: int) -> int:
        """Return the number of a microbatch across all steps."""
        return self.number * self.size + microbatch

    def rename(self, value: Value, delay: int = 0) -> Value:
        """Rename a value to this step; parameters to the version of `delay` steps before."""
        if value.microbatch is not None:
            return value._replace(microbatch=self.count(value.microbatch))
        is_input = value in self.inputs_of_call
        if is_input and value.name in _INPUTS_OF_EACH_STEP:
            return value._replace(port=self.number)
        # Version v of params[s] is named by the last microbatch of step v-1, params[s,v*m-1]; version 0 is the input
        # itself. The parameters that a GATHER writes are no input, and are named by the step that gathers them.
        if is_input or value.name in PARAMETERS:
            version = max(self.number - (delay if is_input and value.name in PARAMETERS else 0), 0)
            return value._replace(microbatch=version * self.size - 1) if version else value
        if value in self.tied_sums:
            value = value._replace(name=f"tied_{value.name}")
        return value._replace(microbatch=self.count(self.size - 1))

    def at_last_microbatch(self, value: Value) -> Value | None:
        """Return the value of a program's last microbatch that has the name of a value without one; None for others."""
        return value._replace(microbatch=self.size - 1) if value.microbatch is None else None


def _refuse_unsuitable(program: Program, stale: object) -> None:
    refuse_freed(program)
    if not any(op.kind == "UPDATE" for op in program.ops):
        raise ProgramError("steps hand on updated parameters: put fpipe.update() before.")
    if program.steps > 1:
        raise ProgramError(f"this program is {program.steps} training steps already; say fpipe.steps() once.")
    refuse_transfers(program, "steps")
    splits = [dict(op.options) for op in program.ops if op.kind == "SPLIT"]
    if not splits or "presplit" in splits[0]:
        mend = "put fpipe.split() before, if only split(1), without presplit."
        raise ProgramError(f"each step cuts its own batch: {mend}")
    if any(end.value.name == "key" for end in program.inputs):
        raise ProgramError("a program that reads its random key is a single step; leave fpipe.steps() out.")
    if any(end.name.name == "input_grads" for end in program.outputs):
        raise ProgramError("input_grads= is for a single step; leave fpipe.steps() out.")
    computing = {op.rank for op in program.ops if op.kind in "FRBIW" or op.parts}
    host_updates = computing.isdisjoint(op.rank for op in program.ops if op.kind == "UPDATE")
    if stale and program.ranks > 1 and not host_updates:
        raise ProgramError(
            "stale parameters gain nothing where each step flushes. Put the schedule behind fpipe.steps(), or update "
            "on a rank that computes nothing else, as roundpipe() does."
        )
