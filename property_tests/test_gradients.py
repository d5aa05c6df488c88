"""The law of gradients: loss and gradients are plain autograd's, bit by bit, whatever the program."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.meaning.single_device.result import Result
from property_tests.bits import is_same_gradient
from property_tests.strategies import DrawnProgram, Net, legal_tables, max_examples, nets, plain_autograd, plans

SEED = st.integers(0, 2**16)


def assert_same_bits(result: Result, loss: torch.Tensor, grads) -> bool:
    """Assert that loss and gradients are equal bit by bit."""
    assert [sorted(stage) for stage in result.grads] == [sorted(stage) for stage in grads]
    differences = [
        f"grads[{number}][{name}]"
        for number, stage in enumerate(grads)
        for name, grad in stage.items()
        if not is_same_gradient(result.grads[number][name], grad)
    ]
    if not torch.equal(result.loss, loss):
        differences.append(f"loss: {result.loss.item()!r} against {loss.item()!r}")
    assert not differences, differences
    return True


@max_examples(3)
@given(plans(), SEED)
def test_gradients_do_not_depend_on_the_plan(plan: DrawnProgram, seed: int):
    """Without merge() a step returns each microbatch's gradients, which add up to the merged ones in their order."""
    net = Net(("mlp",) * len(plan.takes), plan.takes)
    inputs = net.params(seed), net.batch(7, seed)
    result = fpipe.build(plan.program, net.model)(*inputs)
    assert assert_same_bits(result, *plain_autograd(net, *inputs, plan.microbatches))
    unmerged = [transform for name, transform in plan.transforms.items() if name != "merge"]
    unmerged_result = fpipe.build(fpipe.chain(plan.split, *unmerged)(plan.base), net.model)(*inputs)
    assert len(unmerged_result.loss) == len(unmerged_result.grads) == plan.microbatches
    parts = torch.empty(7).tensor_split(plan.microbatches)
    total = sum(loss * (len(part) / 7) for loss, part in zip(unmerged_result.loss, parts, strict=True))
    assert torch.equal(torch.as_tensor(total), result.loss)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[Net, int, tuple[tuple[str, ...], ...]]:
    """Draw a model, a number of microbatches, and a table that puts a stage on any rank for each microbatch."""
    net, m = draw(nets()), draw(st.integers(1, 4))
    split = fpipe.chain(fpipe.split(m), fpipe.split_backward())(fpipe.program(net.model))
    return net, m, draw(legal_tables(split, replicas=True))


@max_examples(2)
@given(replicated(), st.sampled_from(["never", "except_last", "always"]), SEED)
def test_gradients_do_not_depend_on_where_replicas_are(
    drawn: tuple[Net, int, tuple[tuple[str, ...], ...]], policy, seed: int
):
    net, m, table = drawn
    steps = fpipe.checkpoint(policy), fpipe.schedules.from_table(table, replicated=True), fpipe.merge()
    loss, grads = plain_autograd(net, net.params(seed), net.batch(7, seed), m)
    for lowering in (fpipe.identity(), fpipe.communicate()):
        program = fpipe.chain(fpipe.split(m), *steps, lowering)(fpipe.program(net.model))
        fpipe.check(program)
        assert assert_same_bits(fpipe.build(program, net.model)(net.params(seed), net.batch(7, seed)), loss, grads)
