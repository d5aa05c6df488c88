"""Every refusal is reached by somebody: those that no test of their own subject quotes."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import fpipe
from fpipe import Op, Program, ProgramError, Value, schedules
from fpipe.program import KINDS
from fpipe.testing import BrokenLaw, check_schedule
from tests.toys import Toy, merged

ONE, TWO, FOUR = map(fpipe.program, (1, 2, 4))
SENT = fpipe.chain(fpipe.split(2), schedules.gpipe(2), fpipe.merge(), fpipe.communicate())(TWO)
FREED = fpipe.free()(SENT)
EYE = {"w": torch.eye(4)}
BATCH = torch.ones(4, 4), torch.zeros(4, 4)
WHOLE = {"a": torch.eye(2), "b": torch.eye(2)}


def first(program: Program, kind: str) -> Op:
    return next(op for op in program.ops if op.kind == kind)


def also_out(program: Program, value: Value) -> Program:
    """The program with one more result."""
    end = program.outputs[0]
    return Program(
        program.inputs,
        program.ops,
        (*program.outputs, end._replace(name=end.name._replace(name="aux"), value=value)),
    )


def at_homes(*homes: int) -> Program:
    return Program(ONE.inputs, ONE.ops, tuple(end._replace(homes=homes) for end in ONE.outputs))


def loss_fn(params: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    return (fpipe.boundary(batch[0] @ params["a"]) @ params["b"] - batch[1]).mean()


def linear(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x @ params["w"]


Case = tuple[Callable[[], Any], str]
PROGRAMS: dict[str, Case] = {
    "an output without a home": (lambda: fpipe.check(at_homes()), "loss[0,0] has no home: name at least one rank."),
    "a home below 0": (lambda: at_homes(-1), "rank -1 is no rank: ranks are 0..n-1."),
    "an output in flight": (
        lambda: also_out(SENT, first(SENT, "SEND").writes[0]),
        "the output aux = y[0,0]>1 @ 1 is in flight; name the copy that its RECV writes.",
    ),
    "an output that is freed": (
        lambda: also_out(FREED, first(FREED, "FREE").reads[0]),
        "the output aux = x[0,0] @ 1 is freed before it is handed back.",
    ),
    "a pair of one": (lambda: fpipe.pair(TWO.ops[0]), "a PAIR has two parts, found 1."),
    "a pair of texts": (lambda: fpipe.pair("0F0", "0B1"), "pair() takes ops, as a program has them; found str."),
    "text that is none": (lambda: Program.parse(3), "parse() reads the text of a program, str(program); found int."),
    "inputs of a model": (
        lambda: fpipe.program(fpipe.from_functions([linear]), inputs=("batch",)),
        "inputs= goes with a number of stages; a Model already says what its stages take.",
    ),
    "a kind by its place": (
        lambda: fpipe.register_kind("ZIP", "table"),
        "say fpipe.Kind('table'), 'before' or 'after', found str.",
    ),
    "a meaning twice": (lambda: fpipe.register_meaning("F", print), "F has its meaning already."),
    "no meaning": (lambda: fpipe.register_meaning("REDUCE", 3), "a rule is a function, found 3."),
}
TRANSFORMS: dict[str, Case] = {
    "a chain of a number": (
        lambda: fpipe.chain(fpipe.split(2), 3),
        "number 1 of the chain is no transform, found int; a transform is made by a call, such as fpipe.schedules.",
    ),
    "a chain of what gives no program": (
        lambda: fpipe.chain(lambda program: 3)(TWO),
        "number 0 of the chain gave a int, no Program; a transform is made by a call, such as fpipe.schedules.",
    ),
    "results in two places": (
        lambda: fpipe.chain(fpipe.split(4), schedules.chimera(2), fpipe.communicate(), fpipe.merge())(TWO),
        "results of this program travel to several homes already; merge before communicate().",
    ),
    "ranks of a list": (
        lambda: fpipe.place([0, 1], ranks=2),
        "ranks= goes with a named placement (linear, looped, v, bidirectional); a list or a function says them itself.",
    ),
    "a placement by number": (
        lambda: fpipe.place(3),
        "a placement is a name, a list with each stage's rank, or a function; found 3.",
    ),
    "a placement by another name": (lambda: fpipe.place("zigzag"), "'zigzag' is not a placement; known: linear,"),
    "a rank below 0": (
        lambda: fpipe.place([0, -1])(TWO),
        "the placement puts 1F0 on rank -1; a rank is a whole number from 0.",
    ),
    "a rank by name": (
        lambda: fpipe.place(lambda kind, stage, microbatch: "a")(TWO),
        "the placement puts 0F0 on rank 'a'; a rank is a whole number from 0.",
    ),
    "a pair on two ranks": (
        lambda: fpipe.chain(fpipe.split(4), schedules.dualpipev(2), fpipe.place(lambda kind, stage, at: at))(FOUR),
        "the parts of (0F3;3B1) would be on ranks [1, 3]; a PAIR is on one rank.",
    ),
    "an op that is not there": (
        lambda: fpipe.reorder([["0F0", "1F0", "1B0", "0B0", "ADD(sum[0,1])"]])(TWO),
        "rank 0, cell 4: the program has no op ADD(sum[0,1]).",
    ),
    "slices along a word": (
        lambda: fpipe.slice_sequence(2, dim="a"),
        "dim is the dimension of sequences, a whole number; found 'a'.",
    ),
    "three specs": (
        lambda: fpipe.slice_sequence(2, spec=(1, 2, 3)),
        "a spec that is a tuple says the inputs' and the target's, two of them; found (1, 2, 3).",
    ),
    "slices of the whole batch": (
        lambda: fpipe.slice_sequence(2)(TWO),
        "slices are parts of microbatches: put fpipe.split() before, if only split(1).",
    ),
    "slices of slices": (
        lambda: fpipe.chain(fpipe.split(2, slices=2), fpipe.slice_sequence(2))(TWO),
        "this program has 2 slices already; slice it once.",
    ),
    "slices of pairs": (
        lambda: fpipe.chain(fpipe.split(4), schedules.dualpipev(2), fpipe.slice_sequence(2))(FOUR),
        "this program has pairs, which are of whole microbatches; slice it before it is paired.",
    ),
    "slices of what is sent": (
        lambda: fpipe.slice_sequence(2)(SENT),
        "this program has its transfers already; slice it before fpipe.communicate().",
    ),
    "slices of what is merged": (
        lambda: fpipe.chain(fpipe.split(2), fpipe.merge(), fpipe.slice_sequence(2))(TWO),
        "this program is merged already, and what is added in which order is fixed: slice it before fpipe.merge(), as "
        "by fpipe.split(8, slices=4).",
    ),
    "fewer of unknown rows": (
        lambda: fpipe.split(3, allow_fewer=True),
        "allow_fewer needs rows=, the rows of a batch: a program has a fixed number of ops.",
    ),
    "where by number": (
        lambda: fpipe.split_backward(3),
        "where is f(stage, microbatch) -> bool or None, found 3.",
    ),
}
TABLES: dict[str, Case] = {
    "a file by its name": (
        lambda: schedules.from_table("own.csv"),
        "'own.csv' is the name of a file, it seems; hand in pathlib.Path('own.csv').",
    ),
    "a number": (
        lambda: schedules.from_table(3),
        "a table is a list of rows, {rank: row}, text or a path; found int.",
    ),
    "a number as a cell": (
        lambda: schedules.from_table([[3]]),
        "a cell is text such as '2F0', or (kind, stage, microbatch, slice); found 3.",
    ),
    "no rows": (lambda: schedules.from_table([]), "the table is empty; give a list of cells for each rank."),
    "no lines": (lambda: schedules.from_table("\n"), "the table is empty; write a line of cells for each rank."),
    "torch's as a number": (
        lambda: fpipe.interop.torch_pipelining.from_csv(3),
        "a table is CSV text or the path of a CSV file, found int.",
    ),
    "a generator for other ranks": (
        lambda: schedules.from_generator(lambda rank, ranks, microbatches: [], 2, placement=[0, 0])(TWO),
        "the placement names 1 ranks; from_generator was told 2.",
    ),
    "priorities for other ranks": (
        lambda: schedules.from_priority(lambda op, now: 0, 3, placement=[0, 1])(TWO),
        "the placement names 2 ranks; from_priority was told 3.",
    ),
    "a name of two words": (
        lambda: schedules.register("my own", schedules.gpipe),
        "a schedule's name is a word such as 'my_schedule', found 'my own'.",
    ),
    "a number by name": (
        lambda: schedules.register("mine", 3),
        "a schedule is a function of ranks that gives a transform, found 3.",
    ),
    "laws of no size": (
        lambda: check_schedule("gpipe", ranks=[2], microbatches=[2], serves=lambda ranks, microbatches: False),
        "there is no size to try: say other ranks=, microbatches= or serves=.",
    ),
    "laws that do not hold": (
        lambda: check_schedule(lambda ranks: schedules.from_table([["0F0", "0B0"]]), ranks=[2], microbatches=[2]),
        "<lambda> at ranks=2, microbatches=2, stages=2: it makes a program of these sizes.\n  the table does not",
    ),
}
MODELS: dict[str, Case] = {
    "one function": (
        lambda: fpipe.from_functions(linear),
        "from_functions takes a list of functions, one per stage; found function.",
    ),
    "two updates": (
        lambda: fpipe.Stage(lambda p, x, *, state: (x, state), frozenset({"state"}), update=lambda state, x: state),
        "a stage that asks for its state returns the new one itself; it has no update= beside that.",
    ),
    "notes for nothing": (
        lambda: fpipe.Stage(linear, notes=True),
        "notes and counts are for a stage's update=, which is missing.",
    ),
    "a function as a stage": (
        lambda: fpipe.Model((linear,), None, ("batch",)),
        "a Model is made of fpipe.Stage, found function; see from_functions.",
    ),
    "params of another structure": (
        lambda: fpipe.split_params(fpipe.from_loss(loss_fn, WHOLE, (torch.ones(2, 2), torch.ones(2, 2)))[0], [WHOLE]),
        "the whole has another structure than the params that the model was made with.",
    ),
    "other leaves": (
        lambda: fpipe.linearize(linear, EYE, BATCH[0]).forward(EYE | {"v": torch.eye(4)}, BATCH[0]),
        "forward takes 1 leaves as params, found 2.",
    ),
    "a pop outside": (
        lambda: nn.Sequential(fpipe.Pop("early"))(BATCH[0]),
        "Pop('early') takes a value up inside a stage of fpipe.from_sequential; for the whole net in one, stages=1 and",
    ),
    "a mark around the loss": (
        lambda: fpipe.from_loss(lambda p, b: fpipe.boundary((b[0] @ p["w"] - b[1]).mean()), EYE, BATCH),
        "boundary 1 has nothing to compute behind it; leave it out.",
    ),
}
TABLE = [
    pytest.param(*case, id=f"{what}: {name}")
    for what, cases in {"programs": PROGRAMS, "transforms": TRANSFORMS, "tables": TABLES, "models": MODELS}.items()
    for name, case in cases.items()
]


@pytest.mark.parametrize(("call", "sentence"), TABLE)
def test_every_refusal_is_reached(call: Callable[[], Any], sentence: str):
    with pytest.raises((ProgramError, BrokenLaw, TypeError, ValueError, RuntimeError), match=f"^{re.escape(sentence)}"):
        call()


class Odd:
    """Nobody can tell whether two of them are one."""

    __hash__ = None


def hooked() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


UNTRACED: dict[str, tuple[Callable[[], Any], Any, Any, Any, str]] = {
    "hooks": (hooked, linear, EYE, BATCH[0], "saved_tensors_hooks are on, which see only what autograd saves"),
    "a layout": (
        nullcontext,
        lambda p, x: torch.sparse.mm(p["w"], x),
        {"w": torch.eye(2).to_sparse()},
        BATCH[0],
        "it is handed a tensor of layout torch.sparse_coo",
    ),
    "what cannot be compared": (
        nullcontext,
        lambda p, x: linear(p, x[0]),
        EYE,
        (BATCH[0], Odd()),
        "a leaf cannot be compared",
    ),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_a_step_says_why_it_runs_under_autograd(name: str):
    around, stage, params, inputs, why = UNTRACED[name]
    model = fpipe.from_functions([stage], lambda y, target: (y - target).square().mean())
    step = fpipe.build(merged(model, 2), model)
    with around(), pytest.warns(UserWarning, match=re.escape(why)):
        found = step((params,), (inputs, BATCH[1]))
    assert torch.equal(found.loss, fpipe.reference(model, (params,), (inputs, BATCH[1]), microbatches=2).loss)


def test_a_leaf_between_stages_that_cannot_be_compared():
    model = fpipe.from_functions(
        [lambda p, x: (linear(p, x), Odd()), lambda p, x: linear(p, x[0])], lambda y, t: y.sum()
    )
    step = fpipe.build(merged(model, 2), model)
    with pytest.warns(UserWarning, match="it is handed something that cannot be compared"):
        found = step((EYE, EYE), BATCH)
    assert torch.equal(found.loss, fpipe.reference(model, (EYE, EYE), BATCH, microbatches=2).loss)


def by_sign(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    y = linear(params, x)
    return (y, y) if y.sum() > 0 else [y]


CHANGING: dict[str, tuple[Callable[..., Any], str]] = {
    "sizes": (lambda p, x: [linear(p, x)[x > 0]], r"0F0 wrote y\[0,0\] as .*, and before as "),
    "containers": (by_sign, r"0F0 wrote y\[0,0\] in other containers than before"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_stage_whose_output_depends_on_numbers_is_seen_through(name: str):
    """What the first step saw of it does not hold for the next."""
    stage, words = CHANGING[name]
    model = fpipe.from_functions([stage, lambda p, x: x[0] * p["w"][0, 0]], lambda y, target: y.square().sum())
    params = ({"w": torch.randn(4, 4)},) * 2
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False))(fpipe.program(model)), model)
    x = torch.ones(4, 4)
    other = torch.cat([-x[:2], x[:2].tril()]), x
    with pytest.warns(UserWarning, match="runs under autograd, without a trace"):
        step(params, (x, x))
    with pytest.warns(UserWarning, match=f"steps run every stage under autograd from now on: {words}"):
        found = step(params, other)
    for one, batch in ((found, other), (step(params, (x, x)), (x, x))):
        right = fpipe.reference(model, params, batch, microbatches=2)
        assert torch.equal(one.loss, right.loss)
        assert all(torch.equal(a["w"], b["w"]) for a, b in zip(one.grads, right.grads, strict=True))


def forgetful(own: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + own.seen
    own.seen = None
    return y


def test_a_module_that_drops_its_state_is_named():
    net = nn.Sequential(nn.Linear(4, 4), Toy(forgetful, seen=torch.zeros(())))
    model, params, state = fpipe.from_sequential(net, 2, loss=torch.dist, state={"1.seen": "ordered"})
    step = fpipe.build(merged(model, 2), model)
    words = "stage 1 left no tensor in buffer '1.seen', which is its module state."
    with pytest.raises(RuntimeError, match=re.escape(words)):
        step(params, BATCH, state=state)


def noisy(params: dict[str, torch.Tensor], x: torch.Tensor, *, key: int) -> torch.Tensor:
    return linear(params, x) * torch.rand(4, generator=torch.Generator().manual_seed(key))


def odd_or_even(params: dict[str, torch.Tensor], x: torch.Tensor, *, key: int) -> torch.Tensor:
    return linear(params, x) * (key % 2)


KEYED: dict[str, tuple[Any, Any, str]] = {
    "traced": (noisy, nullcontext, "stage 0 (noisy) draws random numbers: hand in key="),
    "untraced": (
        odd_or_even,
        lambda: pytest.warns(UserWarning, match="its key is not a number to compute with"),
        "this program reads key: hand it in as step(..., key=...).",
    ),
}


@pytest.mark.parametrize("name", KEYED)
def test_a_step_that_had_a_key_wants_one_again(name: str):
    stage, around, words = KEYED[name]
    model = fpipe.from_functions([stage], lambda y, target: y.sum())
    step = fpipe.build(fpipe.program(model), model)
    with around():
        step((EYE,), BATCH, key=3)
    with pytest.raises(ValueError, match=re.escape(words)):
        step((EYE,), BATCH)


def test_a_kind_that_nobody_gave_a_meaning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KINDS, "ZIP", fpipe.Kind("after"))
    zipped = Op("ZIP", 0, 0, None, 0, (ONE.outputs[1].value,), (Value("zip", 0, 0),))
    end = ONE.outputs[0]
    ends = (*ONE.outputs, end._replace(name=end.name._replace(name="aux"), value=zipped.writes[0]))
    program = Program(ONE.inputs, (*ONE.ops, zipped), ends)
    words = "ZIP(zip[0,0]): kind ZIP has no meaning here; add it by fpipe.register_meaning."
    with pytest.raises(ValueError, match=re.escape(words)):
        fpipe.build(program, fpipe.from_functions([linear], lambda y, target: y.sum()))((EYE,), BATCH)


HALVES = fpipe.split(2)(fpipe.program(2))
ZERO_BUBBLE = "0F0 0F1 0B0 0W0 0B1 0W1 \n 1F0 1B0 1F1 1B1 1W0 1W1"
SLIPS: dict[str, tuple[Callable[[], Any], str]] = {
    "a transform that was not made": (
        lambda: fpipe.chain(fpipe.split(2), fpipe.merge),
        "number 1 of the chain is merge itself, which makes a transform: say merge(...).",
    ),
    "a schedule that was not made": (
        lambda: fpipe.schedules.gpipe(HALVES),
        "gpipe makes a transform of a number of ranks: say gpipe(4), and hand that the program.",
    ),
    "rank for ranks": (
        lambda: fpipe.schedules.gpipe(rank=4),
        "gpipe takes the number of ranks, as gpipe(4) or gpipe(ranks=4); found rank.",
    ),
    "letters of the zero-bubble papers": (
        lambda: fpipe.schedules.from_table(ZERO_BUBBLE)(HALVES),
        "0W0 stands twice, or as B and as I and W; an op is named once. In the letters of the zero-bubble papers B is "
        "our I: from_table(..., notation='zb').",
    ),
    "cells without a stage": (
        lambda: fpipe.schedules.from_table("F0 F1 B0 B1 \n F0 B0 F1 B1")(HALVES),
        "rank 0, cell 0: the program has no op F0. A cell names its stage too: 0F0, if the stage is the rank.",
    ),
    "costs of a rank": (lambda: fpipe.Costs(F=10), "F are seconds of a whole rank: Costs.per_rank(F=...)."),
}


@pytest.mark.parametrize(("slip", "sentence"), SLIPS.values(), ids=SLIPS.keys())
def test_a_slip_of_somebody_new_ends_in_the_way_out(slip: Callable[[], Any], sentence: str):
    with pytest.raises((TypeError, fpipe.ProgramError), match=re.escape(sentence)):
        slip()


def test_tables_of_others_are_read_in_their_letters():
    ours = fpipe.schedules.from_table("0F0 0F1 0I0 0W0 0I1 0W1 \n 1F0 1I0 1F1 1I1 1W0 1W1")(HALVES)
    assert fpipe.schedules.from_table(ZERO_BUBBLE, notation="zb")(HALVES) == ours
    whole = fpipe.schedules.from_table("0F0 0F1 0BW0 0BW1 \n 1F0 1BW0 1F1 1BW1", notation="zb")(HALVES)
    assert whole == fpipe.schedules.from_table("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")(HALVES)
    pairs = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert fpipe.schedules.from_table(pairs)(HALVES).table()[0] == ["0F0", "(0F1;0B0)", "0B1"]
