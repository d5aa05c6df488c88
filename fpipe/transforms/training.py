"""Write the training step of a model as a program: one batch, one rank, all forwards, then all backwards.

stage 0 -> stage 1 -> loss        -->        0F0 1F0 1B0 0B0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fpipe.model import Model, Source, Stage, normalise_inputs, require_loss
from fpipe.order import sort_outputs
from fpipe.positional_stage import net_stage_of
from fpipe.program import Input, Op, Output, Program, Value, with_buffer_names
from fpipe.transforms.split_backward import keep_outputs


def program(
    model: Model | int, *, inputs: Sequence[Source | tuple[Source, ...]] | None = None, input_grads: bool = False
) -> Program:
    """Return the training step of a model, or of a plain chain of n stages, for one batch on one rank.

    Args:
        model: a `Model`, or a number of stages.
        inputs: for a number of stages, what each takes: stage indices or "batch", as in `from_functions`.
        input_grads: whether the gradients of the batch's inputs are a result too.

    Returns:
        A `Program` whose results are `loss`, `outputs` and `grads[s]` of each stage; of a model that computes no loss,
        the forwards alone, with the results `outputs` and `state[s]`.

    Raises:
        ValueError: no stages, or a stage that takes what comes after it; gradients of a model without a loss.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.program(3)))
    rank 0 | 0F0 1F0 2F0 2B0 1B0 0B0
    """
    if isinstance(model, Model):
        if inputs is not None:
            raise ValueError("inputs= goes with a number of stages; a Model already says what its stages take.")
    else:
        stage_inputs = normalise_inputs(inputs, model)
        model = Model((Stage(_placeholder_stage),) * model, None, stage_inputs)
    if input_grads:
        require_loss(model, "its inputs have no gradients")
    step_program = _ProgramWriter(model, input_grads).write()
    return step_program if model.has_loss else keep_outputs(step_program, ("outputs", "state"))


class _ProgramWriter:
    """Writer of the ops and values of a model's step, stage by stage."""

    def __init__(self, model: Model, input_grads: bool) -> None:
        self.model, self.input_grads = model, input_grads
        self.last_stage = len(model.stages) - 1
        self.has_count = model.reduction == "count"
        self.ops: list[Op] = []
        self.cotangents_by_value: defaultdict[Value, list[Value]] = defaultdict(
            list
        )  # a stage's output -> cotangents of it
        # Readers are known before any backward is written: a stage's output has a cotangent from each of them, and B
        # reads their sum, dy, where there are several.
        for stage in range(len(model.stages)):
            for k, source in enumerate(self.inputs_of(stage)):
                self.cotangents_by_value[source].append(Value("dx", stage, 0, port=k))

    def write(self) -> Program:
        model, stages = self.model, range(len(self.model.stages))
        for stage in stages:
            self.forward(stage)
        # The last stage's loss first, then auxiliary losses of others: the order of additions is part of the bits.
        loss = [Value("loss", stage, 0) for stage in (self.last_stage, *stages[:-1]) if self.has_loss(stage)]
        total = self.add_sum(loss, Value("total", self.last_stage, 0))
        for stage in reversed(stages):
            self.backward(stage)
        grads = [(Value("grads", stage), Value("g", stage, 0)) for stage in stages]
        # A tied leaf has one gradient: the sum over its uses, by stage, at its owner.
        for uses in model.tied_uses:
            owner, port = uses[0].owner, uses[0].port
            parts = [Value("g", leaf.stage, 0, port=leaf.bundle) for leaf in sorted(uses)]
            grads.append((Value("grads", owner, port=port), self.add_sum(parts, Value("sum", owner, 0, port=port))))
        if self.input_grads:
            cotangents = self.cotangents_by_value[Value("inputs")]
            total_cotangent = Value("dinputs", cotangents[0].stage, 0)
            grads.append((Value("input_grads"), self.add_sum(sorted(cotangents, reverse=True), total_cotangent)))
        if self.has_count:
            grads = [(name, self.add_scale(value, name._replace(name="scaled"))) for name, value in grads]
            total = self.add_scale(total, Value("loss"))
        results = [(Value("loss"), total), (Value("outputs"), Value("y", self.last_stage, 0))]
        results += [(Value(name), Value(name, self.last_stage, 0)) for name in self.loss_companions()]
        stateful = (s for s in stages if "state" in model.stages[s].keywords)
        results += [(Value("state", stage), Value("state", stage, 0)) for stage in stateful]
        inputs = sorted({value for op in self.ops for value in op.reads if value.microbatch is None}, key=_input_order)
        outputs = sort_outputs(Output(name, value, (0,)) for name, value in (*results, *grads))
        step_program = Program(tuple(Input(value, (0,)) for value in inputs), tuple(self.ops), outputs)
        nets = ((stage, net_stage_of(model.stages[stage].forward)) for stage in stages)
        buffers = {stage: net.state_names for stage, net in nets if net is not None and net.state_names}
        return with_buffer_names(step_program, buffers)

    def add_sum(self, parts: Sequence[Value], total: Value) -> Value:
        """Return the sum of some values; add an ADD where there are several."""
        if len(parts) == 1:
            return parts[0]
        self.ops.append(Op("ADD", total.stage, 0, None, 0, tuple(parts), (total,)))
        return total

    def add_scale(self, total: Value, scaled_value: Value) -> Value:
        """Add a SCALE that divides a sum by the count of the loss; return its result."""
        self.ops.append(
            Op("SCALE", total.stage, None, None, 0, (total, Value("count", self.last_stage, 0)), (scaled_value,))
        )
        return scaled_value

    def has_loss(self, stage: int) -> bool:
        return stage == self.last_stage or self.model.stages[stage].aux_loss

    def loss_companions(self) -> list[str]:
        return ["count"] * self.has_count + ["aux"] * self.model.aux

    def params(self, stage: int) -> tuple[Value, ...]:
        tied = tuple(Value("params", leaf.owner, port=leaf.port) for leaf in self.model.tied(stage))
        return (Value("params", stage), *tied)

    def inputs_of(self, stage: int) -> tuple[Value, ...]:
        return tuple(map(_source_value, self.model.sources(stage)))

    def outputs(self, stage: int) -> list[Value]:
        return [Value("y", stage, 0, port=port) for port in range(self.model.ports(stage))]

    def forward(self, stage: int) -> None:
        stage_spec, is_last = self.model.stages[stage], stage == self.last_stage
        reads = [*self.params(stage), *self.inputs_of(stage)]
        reads += [Value("state", stage)] if "state" in stage_spec.keywords else []
        reads += [Value("key")] if "key" in stage_spec.keywords else []
        reads += [Value("target")] if is_last else []
        names = ["loss"] * self.has_loss(stage) + (self.loss_companions() if is_last else [])
        names += ["state"] * ("state" in stage_spec.keywords) + ["res"]
        writes = (*self.outputs(stage), *(Value(name, stage, 0) for name in names))
        self.ops.append(Op("F", stage, 0, None, 0, tuple(reads), writes, (), stage_spec.exchange))

    def backward(self, stage: int) -> None:
        stage_spec = self.model.stages[stage]
        outputs_with_cotangents = [
            (y, sorted(self.cotangents_by_value[y], reverse=True))
            for y in self.outputs(stage)
            if self.cotangents_by_value[y]
        ]
        cotangents = [self.add_sum(parts, y._replace(name="dy")) for y, parts in outputs_with_cotangents]
        stage_inputs = enumerate(self.inputs_of(stage))
        dx = [Value("dx", stage, 0, port=k) for k, value in stage_inputs if value.name == "y" or self.input_grads]
        params = self.params(stage)
        grads = [Value("g", stage, 0, port=k) for k in range(len(params))]
        reads = (*params, Value("res", stage, 0), *cotangents)
        self.ops.append(Op("B", stage, 0, None, 0, reads, (*dx, *grads), (), stage_spec.exchange))


def _placeholder_stage(params: object, x: object) -> object:
    """Stand for the stages of `program(n)`, which no step runs."""
    return x


def _source_value(source: Source) -> Value:
    if isinstance(source, tuple):
        return Value("y", source[0], 0, port=source[1])
    return Value("inputs") if source == "batch" else Value("y", source, 0)


def _input_order(value: Value) -> tuple[int, int, int]:
    return (("params", "state", "key", "inputs", "target").index(value.name), value.stage or 0, value.port)
