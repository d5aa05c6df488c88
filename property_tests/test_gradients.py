"""The one promise: loss and gradients are plain autograd's, bit by bit, whatever the program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program
from fpipe.single_device.result import Result
from fpipe.tree import leaves
from property_tests.chains import Chain, chains
from property_tests.strategies import DrawnProgram, Net, few, legal_tables, nets, plain_autograd, plans

SEED = st.integers(0, 2**16)


@dataclass(frozen=True)
class Run:
    """A model, a batch of `rows` in `microbatches`, and the chain of transforms that makes the program."""

    net: Net
    microbatches: int
    rows: int
    chain: Chain
    seed: int

    @property
    def program(self) -> Program:
        return self.chain(fpipe.split(self.microbatches)(fpipe.program(self.net.model)))

    def result(self, runtime: Any = "local") -> Result:
        step = fpipe.build(self.program, self.net.model, runtime=runtime)
        return step(self.net.params(self.seed), self.net.batch(self.rows, self.seed))


@st.composite
def runs(draw: st.DrawFn, models: st.SearchStrategy[Net] | None = None) -> Run:
    net = draw(nets() if models is None else models)
    m = draw(st.integers(1, 4))
    rows = m * draw(st.integers(1, 3)) + draw(st.integers(0, m - 1))
    named = st.sampled_from(["gpipe", "one_f_one_b"]).map(lambda name: (name, min(2, len(net.bodies))))
    return Run(net, m, rows, draw(chains(fpipe.split(m)(fpipe.program(net.model)), named)), draw(SEED))


def same_bits(found: Result, loss: torch.Tensor, grads) -> bool:
    """Every leaf, by name."""
    assert [sorted(stage) for stage in found.grads] == [sorted(stage) for stage in grads]
    differ = [
        f"grads[{number}][{name}]"
        for number, stage in enumerate(grads)
        for name, grad in stage.items()
        if not torch.equal(found.grads[number][name], grad)
    ]
    if not torch.equal(found.loss, loss):
        differ.append(f"loss: {found.loss.item()!r} against {loss.item()!r}")
    assert not differ, differ
    return True


@given(runs())
def test_gradients_are_plain_autograds_bit_by_bit(run: Run):
    """Of each of two steps, which change nothing that they are given."""
    random, params, batch = torch.get_rng_state(), run.net.params(run.seed), run.net.batch(run.rows, run.seed)
    step = fpipe.build(run.program, run.net.model)
    one, other = step(params, batch), step(params, batch)
    fresh = (run.net.params(run.seed), run.net.batch(run.rows, run.seed))
    assert all(map(torch.equal, leaves((params, batch, torch.get_rng_state())), leaves((*fresh, random))))
    assert same_bits(one, *plain_autograd(run.net, *fresh, run.microbatches))
    added = fpipe.add_grads(one.grads, other.grads)
    assert all(torch.equal(both, 2 * once) for both, once in zip(leaves(added), leaves(one.grads), strict=True))


@given(plans(), SEED)
def test_gradients_do_not_depend_on_the_plan(plan: DrawnProgram, seed: int):
    net = Net(("mlp",) * len(plan.takes), plan.takes)
    loss, grads = plain_autograd(net, net.params(seed), net.batch(7, seed), plan.microbatches)
    assert same_bits(fpipe.build(plan.program, net.model)(net.params(seed), net.batch(7, seed)), loss, grads)


@few(8)
@given(runs())
def test_results_per_microbatch_add_up_to_the_merged_ones(run: Run):
    """Without merge() every microbatch gives its own, in microbatch order."""
    if run.net.reduction == "count":
        return
    apart = replace(run, chain=run.chain.without("merge()"))
    found, whole = apart.result(), run.result()
    weights = [1.0] * run.microbatches
    if run.net.reduction == "mean":
        weights = [len(part) / run.rows for part in torch.empty(run.rows).tensor_split(run.microbatches)]
    assert len(found.loss) == len(found.grads) == run.microbatches
    total = sum(loss * weight for loss, weight in zip(found.loss, weights, strict=True))
    assert torch.equal(torch.as_tensor(total), whole.loss)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[Net, int, tuple[tuple[str, ...], ...]]:
    """A model, a number of microbatches, and a table that puts a stage on any rank for each of them."""
    net, m = draw(nets()), draw(st.integers(1, 4))
    split = fpipe.chain(fpipe.split(m), fpipe.split_backward())(fpipe.program(net.model))
    return net, m, draw(legal_tables(split, replicas=True))


@few(8)
@given(replicated(), st.sampled_from(["never", "except_last", "always"]), SEED)
def test_gradients_do_not_depend_on_where_replicas_are(
    found: tuple[Net, int, tuple[tuple[str, ...], ...]], policy, seed: int
):
    net, m, table = found
    steps = fpipe.checkpoint(policy), fpipe.schedules.from_table(table, replicated=True), fpipe.merge()
    loss, grads = plain_autograd(net, net.params(seed), net.batch(7, seed), m)
    for last in (fpipe.identity(), fpipe.communicate()):
        program = fpipe.chain(fpipe.split(m), *steps, last)(fpipe.program(net.model))
        fpipe.check(program)
        assert same_bits(fpipe.build(program, net.model)(net.params(seed), net.batch(7, seed)), loss, grads)
