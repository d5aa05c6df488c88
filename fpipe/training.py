"""Write a model's training step down as a program: one batch, one rank, forward down the stages and backward up.

stage 0 -> stage 1 -> loss        -->        0F0 1F0 1B0 0B0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fpipe.model import Model, Source, normalise_inputs, the_model
from fpipe.order import in_order
from fpipe.program import Input, Op, Output, Program, Value


def program(
    model: Model | int,
    *,
    inputs: Sequence[Source | tuple[Source, ...]] | None = None,
    input_grads: bool = False,
) -> Program:
    """The training step of a model, or of a plain chain of n stages: one batch, one rank.

    Args:
        model: a `Model`, or a number of stages.
        inputs: for a number of stages, what each takes: stage indices or "batch", as in `from_functions`.
        input_grads: whether the gradients of the batch's inputs are a result too.

    Returns:
        A `Program` whose results are `loss`, `outputs` and `grads[s]` of each stage.

    Raises:
        ValueError: no stages, or a stage that takes what comes after it.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.program(3)))
    rank 0 | 0F0 1F0 2F0 2B0 1B0 0B0
    """
    if isinstance(model, bool) or not isinstance(model, int):
        model = the_model(model, "program() takes a Model or a number of stages,")
    if isinstance(model, int):
        taken = normalise_inputs(inputs, model)
        model = Model(stages=(), loss=None, inputs=taken)
    elif inputs is not None:
        raise ValueError("inputs= goes with a number of stages; a Model already says what its stages take.")
    return _Writer(model, input_grads).write()


class _Writer:
    """Names the values of a model's step, stage by stage."""

    def __init__(self, model: Model, input_grads: bool = False) -> None:
        self.model, self.input_grads = model, input_grads
        self.n = len(model.inputs)
        self.last = self.n - 1
        self.readers: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(
            list
        )  # stage and output -> (reading stage, its k-th input)
        for stage in range(self.n):
            for k, source in enumerate(model.sources(stage)):
                if source != "batch":
                    self.readers[source if isinstance(source, tuple) else (source, 0)].append((stage, k))

    def write(self) -> Program:
        model, n = self.model, self.n
        ops = [self.forward(stage) for stage in range(n)]
        loss = Value("loss", self.last, 0)
        extra = tuple(Value("loss", stage, 0) for stage in range(self.last) if self.adds_loss(stage))
        if extra:
            total = Value("total", self.last, 0)
            ops.append(Op("ADD", self.last, 0, None, 0, (loss, *extra), (total,)))
            loss = total
        for stage in reversed(range(n)):
            ops.extend(self.backward(stage))
        grads = [Output(Value("grads", stage), Value("g", stage, 0), (0,)) for stage in range(n)]
        for uses in model.tied_uses:
            parts = tuple(Value("g", leaf.stage, 0, port=leaf.bundle) for leaf in sorted(uses))
            owner, port = uses[0].owner, uses[0].port
            summed = Value("sum", owner, 0, port=port)
            ops.append(Op("ADD", owner, 0, None, 0, parts, (summed,)))
            grads.append(Output(Value("grads", owner, port=port), summed, (0,)))
        grads += self.of_inputs(ops)
        if model.reduction == "count":
            grads = [grad._replace(value=self.scaled(grad, ops)) for grad in grads]
            ops.append(self.scale(loss, Value("loss")))
            loss = Value("loss")
        outputs = [Output(Value("loss"), loss, (0,)), Output(Value("outputs"), Value("y", self.last, 0), (0,))]
        if model.aux:
            outputs.append(Output(Value("aux"), Value("aux", self.last, 0), (0,)))
        if model.reduction == "count":
            count = Value("count", self.last, 0)
            outputs.append(Output(Value("count"), count, (0,)))
        outputs += [
            Output(Value("state", s), Value("state", s, 0), (0,))
            for s in range(n)
            if self.has_update(s) or self.asks(s, "state")
        ]
        names = sorted({v for op in ops for v in op.reads if v.microbatch is None}, key=_input_order)
        return Program(tuple(Input(name, (0,)) for name in names), tuple(ops), in_order([*outputs, *grads]))

    def of_inputs(self, ops: list[Op]) -> list[Output]:
        """The gradient of the inputs, summed over the stages that take them, from the last one back."""
        if not self.input_grads:
            return []
        places = [(s, k) for s in range(self.n) for k, source in enumerate(self.model.sources(s)) if source == "batch"]
        found = tuple(Value("dx", stage, 0, port=k) for stage, k in sorted(places, reverse=True))
        if len(found) == 1:
            return [Output(Value("input_grads"), found[0], (0,))]
        summed = Value("dinputs", places[0][0], 0)
        ops.append(Op("ADD", summed.stage, 0, None, 0, found, (summed,)))
        return [Output(Value("input_grads"), summed, (0,))]

    def adds_loss(self, stage: int) -> bool:
        return bool(self.model.stages) and self.model.stages[stage].aux_loss

    def scaled(self, grad: Output, ops: list[Op]) -> Value:
        made = grad.name._replace(name="scaled")
        ops.append(self.scale(grad.value, made))
        return made

    def scale(self, total: Value, made: Value) -> Op:
        return Op("SCALE", total.stage, None, None, 0, (total, Value("count", self.last, 0)), (made,))

    def has_update(self, stage: int) -> bool:
        return bool(self.model.stages) and self.model.stages[stage].update is not None

    def asks(self, stage: int, word: str) -> bool:
        return bool(self.model.stages) and word in self.model.stages[stage].asks

    def params(self, stage: int) -> tuple[Value, ...]:
        tied = tuple(Value("params", leaf.owner, port=leaf.port) for leaf in self.model.tied(stage))
        return (Value("params", stage), *tied)

    def taken(self, stage: int) -> tuple[Value, ...]:
        return tuple(map(_value, self.model.sources(stage)))

    def forward(self, stage: int) -> Op:
        reads = [*self.params(stage), *self.taken(stage)]
        if self.asks(stage, "state"):
            reads.append(Value("state", stage))
        if self.asks(stage, "key"):
            reads.append(Value("key"))
        writes = [Value("y", stage, 0, port=port) for port in range(self.model.ports(stage))]
        if stage == self.last:
            reads.append(Value("target"))
            writes.append(Value("loss", stage, 0))
            if self.model.reduction == "count":
                writes.append(Value("count", stage, 0))
            if self.model.aux:
                writes.append(Value("aux", stage, 0))
        if self.adds_loss(stage):
            writes.append(Value("loss", stage, 0))
        if self.asks(stage, "state"):
            writes.append(Value("state", stage, 0))
        if self.model.stages and self.model.stages[stage].notes:
            writes.append(Value("seen", stage, 0))
        return Op("F", stage, 0, None, 0, tuple(reads), (*writes, Value("res", stage, 0)))

    def backward(self, stage: int) -> list[Op]:
        ops: list[Op] = []
        if self.has_update(stage):
            own = self.model.stages[stage]
            reads = (Value("state", stage), *((Value("seen", stage, 0),) if own.notes else self.taken(stage)))
            how = (("index", 0), ("count", 1)) if own.counts else ()
            ops.append(Op("U", stage, 0, None, 0, reads, (Value("state", stage, 0),), (), how))
        cotangents: list[Value] = []
        for port in range(self.model.ports(stage)):
            readers = sorted(self.readers[stage, port], reverse=True)
            found = tuple(Value("dx", reader, 0, port=k) for reader, k in readers)
            if len(found) > 1:
                summed = Value("dy", stage, 0, port=port)
                ops.append(Op("ADD", stage, 0, None, 0, found, (summed,)))
                found = (summed,)
            cotangents.extend(found)
        dx = tuple(
            Value("dx", stage, 0, port=k)
            for k, source in enumerate(self.model.sources(stage))
            if source != "batch" or self.input_grads
        )
        grads = tuple(Value("g", stage, 0, port=k) for k in range(len(self.params(stage))))
        reads = (*self.params(stage), Value("res", stage, 0), *cotangents)
        return [*ops, Op("B", stage, 0, None, 0, reads, (*dx, *grads))]


def _value(source: Source) -> Value:
    """The value that a stage reads of a source."""
    if isinstance(source, tuple):
        return Value("y", source[0], 0, port=source[1])
    return Value("inputs") if source == "batch" else Value("y", source, 0)


def _input_order(value: Value) -> tuple[int, int, int]:
    return (("params", "state", "key", "inputs", "target").index(value.name), value.stage or 0, value.port)
