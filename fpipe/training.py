"""Write a model's training step down as a program: one batch, one rank, forward down the stages and backward up.

stage 0 -> stage 1 -> loss        -->        0F0 1F0 1B0 0B0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fpipe.model import Model, Source, Stage, normalise_inputs, the_model
from fpipe.order import in_order
from fpipe.positional_stage import of_net
from fpipe.program import Input, Op, Output, Program, Value, naming_buffers


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
        if inputs is not None:
            raise ValueError("inputs= goes with a number of stages; a Model already says what its stages take.")
    else:
        taken = normalise_inputs(inputs, model)
        model = Model((Stage(_nothing),) * model, None, taken)
    return _Writer(model, input_grads).write()


class _Writer:
    """Names the values of a model's step, stage by stage."""

    def __init__(self, model: Model, input_grads: bool) -> None:
        self.model, self.input_grads = model, input_grads
        self.last = len(model.stages) - 1
        self.counted = model.reduction == "count"
        self.ops: list[Op] = []
        self.readers: defaultdict[Value, list[Value]] = defaultdict(list)  # a stage's output -> cotangents of it
        for stage in range(len(model.stages)):
            for k, source in enumerate(self.taken(stage)):
                self.readers[source].append(Value("dx", stage, 0, port=k))

    def write(self) -> Program:
        model, stages = self.model, range(len(self.model.stages))
        for stage in stages:
            self.forward(stage)
        loss = [Value("loss", stage, 0) for stage in (self.last, *stages[:-1]) if self.has_loss(stage)]
        total = self.add(loss, Value("total", self.last, 0))
        for stage in reversed(stages):
            self.backward(stage)
        grads = [(Value("grads", stage), Value("g", stage, 0)) for stage in stages]
        for uses in model.tied_uses:
            owner, port = uses[0].owner, uses[0].port
            parts = [Value("g", leaf.stage, 0, port=leaf.bundle) for leaf in sorted(uses)]
            grads.append((Value("grads", owner, port=port), self.add(parts, Value("sum", owner, 0, port=port))))
        if self.input_grads:
            found = self.readers[Value("inputs")]
            first = Value("dinputs", found[0].stage, 0)
            grads.append((Value("input_grads"), self.add(sorted(found, reverse=True), first)))
        if self.counted:
            grads = [(name, self.scaled(value, name._replace(name="scaled"))) for name, value in grads]
            total = self.scaled(total, Value("loss"))
        results = [(Value("loss"), total), (Value("outputs"), Value("y", self.last, 0))]
        results += [(Value(name), Value(name, self.last, 0)) for name in self.beside_the_loss()]
        stateful = (s for s in stages if "state" in model.stages[s].asks)
        results += [(Value("state", stage), Value("state", stage, 0)) for stage in stateful]
        inputs = sorted({value for op in self.ops for value in op.reads if value.microbatch is None}, key=_input_order)
        outputs = in_order(Output(name, value, (0,)) for name, value in (*results, *grads))
        made = Program(tuple(Input(value, (0,)) for value in inputs), tuple(self.ops), outputs)
        nets = ((stage, of_net(model.stages[stage].forward)) for stage in stages)
        return naming_buffers(made, {stage: net.holds for stage, net in nets if net is not None and net.holds})

    def add(self, parts: Sequence[Value], made: Value) -> Value:
        """The sum of some values: an ADD where there are several."""
        if len(parts) == 1:
            return parts[0]
        self.ops.append(Op("ADD", made.stage, 0, None, 0, tuple(parts), (made,)))
        return made

    def scaled(self, total: Value, made: Value) -> Value:
        """A sum, divided by what the loss counts."""
        self.ops.append(Op("SCALE", total.stage, None, None, 0, (total, Value("count", self.last, 0)), (made,)))
        return made

    def has_loss(self, stage: int) -> bool:
        return stage == self.last or self.model.stages[stage].aux_loss

    def beside_the_loss(self) -> list[str]:
        return ["count"] * self.counted + ["aux"] * self.model.aux

    def params(self, stage: int) -> tuple[Value, ...]:
        tied = tuple(Value("params", leaf.owner, port=leaf.port) for leaf in self.model.tied(stage))
        return (Value("params", stage), *tied)

    def taken(self, stage: int) -> tuple[Value, ...]:
        return tuple(map(_value, self.model.sources(stage)))

    def outputs(self, stage: int) -> list[Value]:
        return [Value("y", stage, 0, port=port) for port in range(self.model.ports(stage))]

    def forward(self, stage: int) -> None:
        own, last = self.model.stages[stage], stage == self.last
        reads = [*self.params(stage), *self.taken(stage)]
        reads += [Value("state", stage)] if "state" in own.asks else []
        reads += [Value("key")] if "key" in own.asks else []
        reads += [Value("target")] if last else []
        names = ["loss"] * self.has_loss(stage) + (self.beside_the_loss() if last else [])
        names += ["state"] * ("state" in own.asks) + ["res"]
        writes = (*self.outputs(stage), *(Value(name, stage, 0) for name in names))
        self.ops.append(Op("F", stage, 0, None, 0, tuple(reads), writes, (), own.exchange))

    def backward(self, stage: int) -> None:
        own = self.model.stages[stage]
        read = [(y, sorted(self.readers[y], reverse=True)) for y in self.outputs(stage) if self.readers[y]]
        cotangents = [self.add(parts, y._replace(name="dy")) for y, parts in read]
        taken = enumerate(self.taken(stage))
        dx = [Value("dx", stage, 0, port=k) for k, value in taken if value.name == "y" or self.input_grads]
        params = self.params(stage)
        grads = [Value("g", stage, 0, port=k) for k in range(len(params))]
        reads = (*params, Value("res", stage, 0), *cotangents)
        self.ops.append(Op("B", stage, 0, None, 0, reads, (*dx, *grads), (), own.exchange))


def _nothing(params: object, x: object) -> object:
    """A stage of a number of stages, which no step runs."""
    return x


def _value(source: Source) -> Value:
    """The value that a stage reads of a source."""
    if isinstance(source, tuple):
        return Value("y", source[0], 0, port=source[1])
    return Value("inputs") if source == "batch" else Value("y", source, 0)


def _input_order(value: Value) -> tuple[int, int, int]:
    return (("params", "state", "key", "inputs", "target").index(value.name), value.stage or 0, value.port)
