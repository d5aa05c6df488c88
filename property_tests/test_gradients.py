"""The one promise: loss and gradients are plain autograd's, bit by bit, whatever the program."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.meaning.single_device.result import Result
from property_tests.bits import is_same_gradient
from property_tests.strategies import DrawnProgram, Net, few, legal_tables, nets, plain_autograd, plans

SEED = st.integers(0, 2**16)


def same_bits(found: Result, loss: torch.Tensor, grads) -> bool:
    """Every leaf, by name."""
    assert [sorted(stage) for stage in found.grads] == [sorted(stage) for stage in grads]
    differ = [
        f"grads[{number}][{name}]"
        for number, stage in enumerate(grads)
        for name, grad in stage.items()
        if not is_same_gradient(found.grads[number][name], grad)
    ]
    if not torch.equal(found.loss, loss):
        differ.append(f"loss: {found.loss.item()!r} against {loss.item()!r}")
    assert not differ, differ
    return True


@few(10)
@given(plans(), SEED)
def test_gradients_do_not_depend_on_the_plan(plan: DrawnProgram, seed: int):
    """Without merge() every microbatch gives its own, in microbatch order, which add up to them."""
    net = Net(("mlp",) * len(plan.takes), plan.takes)
    given = net.params(seed), net.batch(7, seed)
    found = fpipe.build(plan.program, net.model)(*given)
    assert same_bits(found, *plain_autograd(net, *given, plan.microbatches))
    unmerged = [transform for name, transform in plan.transforms.items() if name != "merge"]
    apart = fpipe.build(fpipe.chain(plan.split, *unmerged)(plan.base), net.model)(*given)
    assert len(apart.loss) == len(apart.grads) == plan.microbatches
    parts = torch.empty(7).tensor_split(plan.microbatches)
    total = sum(loss * (len(part) / 7) for loss, part in zip(apart.loss, parts, strict=True))
    assert torch.equal(torch.as_tensor(total), found.loss)


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
