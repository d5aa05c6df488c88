"""Laws of RoundPipe: any two plans that cover a model compute its gradients, wherever groups are cut or run."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program
from property_tests.strategies import Net, max_examples, nets
from property_tests.test_gradients import assert_same_bits

Groups = list[list[int]]


@dataclass(frozen=True)
class Run:
    """A model, and both plans, whose groups go round `ranks` ranks."""

    net: Net
    forward: Groups
    backward: Groups
    ranks: int
    microbatches: int

    @property
    def program(self) -> Program:
        schedule = fpipe.schedules.roundpipe(self.ranks, self.forward, self.backward)
        return fpipe.chain(fpipe.split(self.microbatches), schedule, fpipe.merge())(fpipe.program(self.net.model))


@st.composite
def groups(draw: st.DrawFn, stages: int) -> Groups:
    """Cut stages 0..n-1 into groups of neighbours."""
    cuts = sorted(draw(st.sets(st.integers(1, stages - 1)))) if stages > 1 else []
    return [[*range(start, end)] for start, end in pairwise([0, *cuts, stages])] if stages else []


@st.composite
def runs(draw: st.DrawFn) -> Run:
    net = draw(nets())
    stages = len(net.bodies)
    backward = draw(groups(stages))
    forward = draw(groups(backward[-1][0]))
    ranks = draw(st.integers(1, len(forward) + len(backward)))
    return Run(net, forward, backward[::-1], ranks, draw(st.integers(1, 3)))


@max_examples(5)
@given(runs())
def test_gradients_do_not_depend_on_the_plans(run: Run):
    params, batch = run.net.params(), run.net.batch(run.microbatches + 1)
    expected = fpipe.reference(run.net.model, params, batch, microbatches=run.microbatches)
    resend = fpipe.communicate(again={"params": lambda op: op.kind == "F"})
    program = fpipe.chain(resend, fpipe.free())(run.program)
    assert assert_same_bits(fpipe.build(program, run.net.model)(params, batch), expected.loss, expected.grads)


@given(runs())
def test_residuals_live_for_one_group_and_microbatch(run: Run):
    """After each microbatch of a backward group, its rank holds no residual."""
    residuals_by_rank: dict[int, set[object]] = {}
    for op in run.program.ops:
        residuals = residuals_by_rank.setdefault(op.rank, set())
        residuals |= {value for value in op.writes if value.name == "res"}
        residuals -= set(op.reads)
        group = next(group for group in run.backward if (op.stage or 0) in group)
        if op.kind == "B" and op.stage == group[0]:
            assert not residuals
