"""Programs in a valid order that compute nothing meaningful are refused at the door."""

import re

import pytest

import fpipe
from tests.refusals import refusals

BASE = str(fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(2)))
WITH_TRANSFERS = str(fpipe.chain(fpipe.place("linear"), fpipe.communicate())(fpipe.program(2)))


def test_a_backward_with_unadded_cotangents_is_refused():
    """Used to put the second cotangent in the place of the first, where one ADD of both belongs."""
    model = fpipe.from_functions(
        [lambda p, x: x * 2, lambda p, x: x, lambda p, x: x[0] + x[1]],
        lambda y, t: y.sum(),
        inputs=["batch", 0, (1, 0)],
    )
    text = str(fpipe.program(model))
    add_line = next(line for line in text.splitlines() if "dy[0,0] = ADD" in line)
    summands = add_line.split("] ", 2)[2].removesuffix(" @ 0")
    wrong = fpipe.Program.parse(text.replace(add_line + "\n", "").replace("res[0,0] dy[0,0]", f"res[0,0] {summands}"))
    with pytest.raises(ValueError, match=re.escape("in the program 0B0 takes")):
        fpipe.build(wrong, model)


test_refusals = refusals(
    globals(),
    r"""
fpipe.Program.parse("params[0] @ 0\nsum[0] = ADD[0] params[0] {**{'a': 1}} @ 0\ngrads[0] = sum[0] @ 0")
    ProgramError: is not a list of name=literal
fpipe.Program.parse("params[0] @ 0\nsum[0] = ADD[0] params[0] {x=1, x=2} @ 0\ngrads[0] = sum[0] @ 0")
    ProgramError: is not a list of name=literal
fpipe.Program.parse("params[0] @ 0\nsum[0] = ADD[0] params[0] {x=[1]} @ 0\ngrads[0] = sum[0] @ 0")
    ProgramError: is not a list of name=literal
fpipe.Program.parse(BASE.replace("B[0,0] params[0] res[0,0]",
"B[0,0] params[0] res[0,#]").replace("B[0,1] params[0] res[0,1]", "B[0,1] params[0] res[0,0]").replace("#", "1"))
    ProgramError: 0B0 reads res[0,1] (the residuals of 0F1), which is not its own
fpipe.Program.parse(BASE.replace("grads[0] = sum[0,1]",
"grads[0] = sum[1,1]").replace("grads[1] = sum[1,1]", "grads[1] = sum[0,1]"))
    ProgramError: the output grads[0] = sum[1,1] @ 0 gives stage 0 the gradient of another.
fpipe.Program.parse(BASE + "\nloss = loss @ 1")
    ProgramError: the output loss stands twice
fpipe.Program.parse(WITH_TRANSFERS.replace("y[0,0]>1", "y[0,0]>0").replace("y[0,0]@1",
"y[0,0]@0").replace("RECV[0,0] y[0,0]>0 @ 1", "RECV[0,0] y[0,0]>0 @ 0"))
    ProgramError: sends to its own rank
fpipe.Program.parse(WITH_TRANSFERS.replace("y[0,0]>1", "y[0,0]@5"))
    ProgramError: SEND(y[0,0]@5) does not read a value and write it in flight.
fpipe.Program.parse("params[0] @ 0\ng[0,0] = B[0,0] params[0] @ 0\ngrads[0] = g[0,0] @ 0")
    ProgramError: 0B0 reads no res
fpipe.Program.parse("params[0] @ 0\ny = F[] params[0] @ 0\noutputs = y @ 0")
    ProgramError: names no stage and microbatch
""",
)
