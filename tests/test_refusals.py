"""Refusals that no other test file quotes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fpipe
from fpipe import Op, Program, Value, schedules
from fpipe.program import KINDS
from tests.refusals import refusals
from tests.toys import Toy, linear, merged

CHAIN_1, CHAIN_2, CHAIN_4 = map(fpipe.program, (1, 2, 4))
COMMUNICATED = fpipe.chain(fpipe.split(2), schedules.gpipe(2), fpipe.merge(), fpipe.communicate())(CHAIN_2)
FREED = fpipe.free()(COMMUNICATED)
EYE = {"w": torch.eye(4)}
BATCH = torch.ones(4, 4), torch.zeros(4, 4)
WHOLE_PARAMS = {"a": torch.eye(2), "b": torch.eye(2)}


def first_op(program: Program, kind: str) -> Op:
    return next(op for op in program.ops if op.kind == kind)


def also_out(program: Program, value: Value) -> Program:
    """Return the program with one more output."""
    end = program.outputs[0]
    return Program(
        program.inputs,
        program.ops,
        (*program.outputs, end._replace(name=end.name._replace(name="aux"), value=value)),
    )


def at_homes(*homes: int) -> Program:
    return Program(CHAIN_1.inputs, CHAIN_1.ops, tuple(end._replace(homes=homes) for end in CHAIN_1.outputs))


def loss_fn(params: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    return (fpipe.boundary(batch[0] @ params["a"]) @ params["b"] - batch[1]).mean()


MODEL = fpipe.from_functions([linear], nn.functional.mse_loss)


class Incomparable:
    """A value that can be neither hashed nor compared."""

    __hash__ = None


def test_an_incomparable_leaf_between_stages_warns():
    model = fpipe.from_functions(
        [lambda p, x: (linear(p, x), Incomparable()), lambda p, x: linear(p, x[0])], lambda y, t: y.sum()
    )
    step = fpipe.build(merged(model, 2), model)
    with pytest.warns(UserWarning, match="it is handed something that cannot be compared"):
        result = step((EYE, EYE), BATCH)
    assert torch.equal(result.loss, fpipe.reference(model, (EYE, EYE), BATCH, microbatches=2).loss)


def container_by_sign(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    y = linear(params, x)
    return (y, y) if y.sum() > 0 else [y]


CHANGING: dict[str, tuple[Callable[..., Any], str]] = {
    "sizes": (lambda p, x: [linear(p, x)[x > 0]], r"0F1 wrote y\[0,1\] as float32\[3\] .*, and for zeros as "),
    "containers": (container_by_sign, r"0F. wrote .* as float32\[2, 4\] .*, and for zeros as "),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_stage_whose_output_depends_on_data_loses_its_trace(name: str):
    """The shapes that the first step observed may not hold in the next one."""
    stage, reason = CHANGING[name]
    model = fpipe.from_functions([stage, lambda p, x: x[0] * p["w"][0, 0]], lambda y, target: y.square().sum())
    params = (EYE, EYE)
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False))(fpipe.program(model)), model)
    x = torch.ones(4, 4)
    changed_batch = torch.cat([-x[:2], x[:2].tril()]), x
    with pytest.warns(UserWarning, match="runs under autograd, without a trace"):
        step(params, (x, x))
    with pytest.warns(UserWarning, match=f"steps run every stage under autograd from now on: .*{reason}"):
        changed_result = step(params, changed_batch)
    for result, batch in ((changed_result, changed_batch), (step(params, (x, x)), (x, x))):
        expected = fpipe.reference(model, params, batch, microbatches=2)
        assert torch.equal(result.loss, expected.loss)
        assert all(torch.equal(a["w"], b["w"]) for a, b in zip(result.grads, expected.grads, strict=True))


def drop_state(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + module.seen
    module.seen = None
    return y


def test_a_module_that_drops_its_state_is_named():
    net = nn.Sequential(nn.Linear(4, 4), Toy(drop_state, seen=torch.zeros(())))
    model, params, state = fpipe.from_sequential(net, 2, loss=torch.dist, state={"1.seen": "ordered"})
    step = fpipe.build(merged(model, 2), model)
    message = "stage 1 left no tensor in buffer '1.seen', which is part of its state."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        step(params, BATCH, state=state)


def test_a_kind_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KINDS, "ZIP", fpipe.Kind("after"))
    zipped = Op("ZIP", 0, 0, None, 0, (CHAIN_1.outputs[1].value,), (Value("zip", 0, 0),))
    end = CHAIN_1.outputs[0]
    ends = (*CHAIN_1.outputs, end._replace(name=end.name._replace(name="aux"), value=zipped.writes[0]))
    program = Program(CHAIN_1.inputs, (*CHAIN_1.ops, zipped), ends)
    message = "ZIP(zip[0,0]): kind ZIP has no meaning; add it by fpipe.register_meaning."
    with pytest.raises(ValueError, match=re.escape(message)):
        fpipe.build(program, fpipe.from_functions([linear], lambda y, target: y.sum()))((EYE,), BATCH)


HALVES = fpipe.split(2)(fpipe.program(2))
ZERO_BUBBLE = "0F0 0F1 0B0 0W0 0B1 0W1 \n 1F0 1B0 1F1 1B1 1W0 1W1"


def test_tables_are_read_in_the_notation_of_the_zero_bubble_papers():
    expected = fpipe.schedules.from_table("0F0 0F1 0I0 0W0 0I1 0W1 \n 1F0 1I0 1F1 1I1 1W0 1W1")(HALVES)
    assert fpipe.schedules.from_table(ZERO_BUBBLE, notation="zb")(HALVES) == expected
    merged = fpipe.schedules.from_table("0F0 0F1 0BW0 0BW1 \n 1F0 1BW0 1F1 1BW1", notation="zb")(HALVES)
    assert merged == fpipe.schedules.from_table("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")(HALVES)
    pairs = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert fpipe.schedules.from_table(pairs)(HALVES).table()[0] == ["0F0", "(0F1;0B0)", "0B1"]


test_refusals = refusals(
    globals(),
    r"""
fpipe.check(at_homes())
    ProgramError: loss[0,0] has no home: name at least one rank.
at_homes(-1)
    ProgramError: rank -1 is no rank: ranks are 0..n-1.
also_out(COMMUNICATED, first_op(COMMUNICATED, "SEND").writes[0])
    ProgramError: the output aux = y[0,0]>1 @ 1 is in flight; name the copy that its RECV writes.
also_out(FREED, first_op(FREED, "FREE").reads[0])
    ProgramError: the output aux = x[0,0] @ 1 is freed before it is handed back.
fpipe.pair(CHAIN_2.ops[0])
    ProgramError: a PAIR has two parts, at most 16; found 1.
Program.parse(3)
    TypeError: parse() reads the text of a program, str(program); found int.
fpipe.program(fpipe.from_functions([linear]), inputs=("batch",))
    ValueError: inputs= goes with a number of stages; a Model already says what its stages take.
fpipe.register_meaning("F", print)
    ValueError: F has its meaning already.
fpipe.chain(lambda program: 3)(CHAIN_2)
    TypeError: number 0 of the chain gave a int, no Program; a transform is made by a call, such as fpipe.schedules.
fpipe.chain(fpipe.split(4), schedules.chimera(2), fpipe.communicate(), fpipe.merge())(CHAIN_2)
    ProgramError: results travel to several homes already; merge before communicate().
fpipe.place([0, 1], ranks=2)
    ValueError: ranks= goes with a named placement only (linear, looped, v, bidirectional).
fpipe.place("zigzag")
    ValueError: 'zigzag' is not a placement; known: linear,
fpipe.place([0, -1])(CHAIN_2)
    ProgramError: 1F0 would be on rank -1; ranks are whole numbers from 0.
fpipe.place(lambda kind, stage, microbatch: "a")(CHAIN_2)
    ProgramError: 0F0 would be on rank 'a'; ranks are whole numbers from 0.
fpipe.reorder([["0F0", "1F0", "1B0", "0B0", "ADD(sum[0,1])"]])(CHAIN_2)
    ProgramError: rank 0, cell 4: the program has no op ADD(sum[0,1]).
schedules.from_table("own.csv")
    ProgramError: 'own.csv' names a file; pass pathlib.Path('own.csv').
schedules.from_table("\n")
    ProgramError: the table is empty; write a row for each rank.
fpipe.interop.torch_pipelining.from_csv(3)
    TypeError: a table is CSV text or a path, found int.
schedules.from_generator(lambda rank, ranks, microbatches: [], 2, placement=[0, 0])(CHAIN_2)
    ProgramError: the placement names 1 ranks, but from_generator got 2.
schedules.from_priority(lambda op, now: 0, 3, placement=[0, 1])(CHAIN_2)
    ProgramError: the placement names 2 ranks, but from_priority got 3.
schedules.register("my own", schedules.gpipe)
    ValueError: a schedule's name is a word like 'my_schedule', found 'my own'.
fpipe.testing.check_schedule("gpipe", ranks=[2], microbatches=[2], serves=lambda ranks, microbatches: False)
    ValueError: no size to try: say other ranks=, microbatches= or serves=.
fpipe.testing.check_schedule(lambda ranks: schedules.from_table([["0F0", "0B0"]]), ranks=[2], microbatches=[2])
    BrokenLaw: <lambda> at ranks=2, microbatches=2, stages=2: it makes a program of these sizes. the table does not
fpipe.split_params(fpipe.from_loss(loss_fn, WHOLE_PARAMS, (torch.ones(2, 2), torch.ones(2, 2)))[0], [WHOLE_PARAMS])
    ValueError: the whole has another structure than the params that the model was made with.
fpipe.linearize(linear, EYE, BATCH[0]).forward(EYE | {"v": torch.eye(4)}, BATCH[0])
    ValueError: forward takes 1 leaves as params, found 2.
fpipe.from_loss(lambda p, b: fpipe.boundary((b[0] @ p["w"] - b[1]).mean()), EYE, BATCH)
    ValueError: boundary 1 has nothing to compute behind it; leave it out.
fpipe.chain(fpipe.split(2), fpipe.merge)
    TypeError: number 1 of the chain is merge itself, which makes a transform: say merge(...).
fpipe.schedules.from_table(ZERO_BUBBLE)(HALVES)
    ProgramError: 0W0 stands twice, or as B and as I and W; an op is named once. In the letters of the zero-bubble
    papers B is our I: from_table(..., notation='zb').
fpipe.schedules.from_table("F0 F1 B0 B1 \n F0 B0 F1 B1")(HALVES)
    ProgramError: rank 0, cell 0: the program has no op F0. A cell names its stage too: 0F0, if the stage is the rank.
fpipe.Costs(F=10)
    TypeError: F are seconds of a whole rank: Costs.per_rank(F=...).
fpipe.testing.check_schedule("gpip")
    ValueError: did you mean gpipe
fpipe.bounds(fpipe.place("looped", ranks=2)(CHAIN_4), memory_cap=0.4)
    ValueError: memory_cap is 0.4 microbatches on rank 0, where one op alone holds 0.5
fpipe.bounds(fpipe.place("linear")(CHAIN_4), memory_cap=[1, 2])
    ValueError: memory_cap lists 2 caps for 4 ranks
fpipe.balance([1, 2, 3], 2, parameters=[1])
    ValueError: parameters lists 1 layers, costs 3; give equally many.
fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False), fpipe.data_parallel("a"), fpipe.data_parallel("b"))(CHAIN_2)
    ProgramError: data_parallel() and shard() have one axis each
fpipe.update("SGD", clip=1.0, validate="after", loss_scale="dynamic")
    ValueError: leave validate= out
fpipe.interop.torch_pipelining.from_csv("0F0,0SEND_F0", format="compute_only")
    ProgramError: line 1, column 2: 0SEND_F0 does not compute; read this table with
fpipe.interop.torch_pipelining.to_csv(COMMUNICATED, format="comms")
    ValueError: format is 'compute_only' or 'compute_comms', found 'comms'
fpipe.interop.torch_pipelining.gathers("0UNSHARD,0F0,0RESHARD,0B0")
    ProgramError: line 1, column 4: 0B0 has no weights: there is no 0UNSHARD before it
fpipe.evaluating(MODEL)
    ValueError: evaluating takes models of from_module and from_sequential
fpipe.jvp(fpipe.from_functions([linear, fpipe.custom_stage(linear, linear, linear)]))
    ValueError: has hand-written rules (custom_stage), and jvp
fpipe.per_example(fpipe.from_functions([linear, fpipe.custom_stage(linear, linear, linear)]))
    ValueError: has hand-written rules (custom_stage), and per_example
fpipe.build(CHAIN_1, MODEL, compile=True, trace=False)
    ValueError: compile=True compiles traces; say trace=True
fpipe.build(CHAIN_1, MODEL, autocast=torch.float64)
    ValueError: autocast is torch.bfloat16, torch.float16 or None; found torch.float64
fpipe.build(CHAIN_1, MODEL, runtime="threads", trace=False)
    ValueError: say runtime='local' with trace=False
fpipe.build(CHAIN_1, MODEL, runtime="processes")
    ValueError: runtime is 'local', 'threads' or 'distributed'; found 'processes'
fpipe.sizes(CHAIN_1, MODEL, (EYE,), BATCH, runtime="gpu")
    ValueError: runtime is 'local', 'threads' or 'distributed'; found 'gpu'
fpipe.compare(["gpipe", "hanoyo:waves=2"], 4, 8)
    ValueError: there is no schedule 'hanoyo'; did you mean hanayo
fpipe.compare(["gpipe", "hanayo:wave=2"], 4, 8)
    ValueError: hanayo has no option 'wave'; it has: waves, stages
fpipe.compare(["gpipe"], 2, 2)["zbv"]
    KeyError: no row 'zbv'; there are gpipe
schedules.from_table([["0F0", "0B0"], ["1F0", "0F"]])(CHAIN_2)
    ProgramError: rank 1, cell 1: '0F' is not a cell:
schedules.from_table("0F0 0B0\n1F0 . 0F1garbage")
    ProgramError: line 2, column 3: '0F1garbage' is not a cell: after 0F1 comes 'garbage'
schedules.from_table("0F0,0B0\n1F0,,0F1garbage")
    ProgramError: line 2, column 3: '0F1garbage' is not a cell: after 0F1 comes 'garbage'
schedules.about("zb_auto").program(2, 4, stages=4)
    ProgramError: zb_auto: one stage on each rank, so 2 stages for 2 ranks; found 4
schedules.about("v_min").program(2, 4, stages=2)
    ProgramError: v_min: a V over 2 ranks has 4 stages, down and up; this program has 2
schedules.roundpipe(1, [range(2)], [range(2)])(fpipe.chain(fpipe.split(2), fpipe.forward_only())(CHAIN_2))
    ProgramError: this program has no backward; leave backward= out.
schedules.roundpipe(1, [range(1)])(fpipe.chain(fpipe.split(2), fpipe.forward_only())(CHAIN_2))
    ProgramError: the forward plan misses the last stage, 1.
fpipe.forward_only()(Program(CHAIN_1.inputs, (), (fpipe.Output(Value("grads", 0), Value("params", 0), (0,)),)))
    ProgramError: neither outputs nor a loss to keep
fpipe.search(fpipe.chain(fpipe.split(3), schedules.gpipe(2))(CHAIN_2), ranks=2, microbatches=3)
    ValueError: a program is split already
fpipe.search(fpipe.split(2, slices=2)(CHAIN_2), ranks=2)
    ProgramError: use fpipe.schedules.seq1f1b
fpipe.simulate(fpipe.split(2)(CHAIN_1), fpipe.Costs(bytes=fpipe.sizes(CHAIN_1, MODEL, (EYE,), BATCH)))
    ValueError: the bytes of x[0,0] are not known: these are sizes of another program
fpipe.sizes(CHAIN_1, fpipe.from_functions([container_by_sign], lambda y, target: y[0].sum()), (EYE,), BATCH)
    ValueError: not known before it runs: stage 0 (container_by_sign): DataDependent
fpipe.simulate(COMMUNICATED, fpipe.Costs(transfer=1), cluster="2 ranks; inside 1us")
    ValueError: leave out transfer= and bandwidth=
fpipe.simulate(COMMUNICATED, fpipe.Costs(bytes=lambda value: 1), cluster="2 ranks; inside 1GB/s shared", iterations=2)
    ValueError: shared links are simulated for one iteration, found iterations=2
fpipe.simulate(CHAIN_1).excess_bytes
    ValueError: excess memory needs a cluster and bytes
""",
)
