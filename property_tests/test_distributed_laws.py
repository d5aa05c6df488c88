"""Two processes compute what one does, bit by bit, whatever the program; two replicas of two what one device does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from hypothesis import example, given

import fpipe
import property_tests.test_whole_laws as whole
from property_tests.chains import Chain, Run, runs
from property_tests.strategies import Net, few, nets, plain_autograd
from tests.processes import Processes
from tests.test_data_parallel import meshed
from tests.test_distributed import both, own


def differs(rank: int, run: whole.Run) -> list[str]:
    model, params, state = run.made
    return both(rank, run.program(model), model, params, run.batch, state=state, key=run.key)


def on_two_ranks(run: whole.Run) -> bool:
    if run.stream or not run.trace or "free()" in run.chain.steps:
        return False
    return run.chain.ranks == 2 and "roundpipe" not in run.chain.schedule


@few(4)
@given(run=whole.runs().filter(on_two_ranks))
def test_two_processes_give_the_bits_of_one(pair: Processes, run: whole.Run):
    """Skips, ties, None and integers on the way, what norms remember, dropout, residuals that wait elsewhere."""
    assert pair.each(differs, run) == [[], []]


def differs_from_one_device(rank: int, run: Run) -> list[str]:
    """What differs from plain autograd over all rows: in a bit where sums have one order, else beyond rounding."""
    mesh, replica, place = meshed()
    net, params, batch = run.net, run.net.params(run.seed), run.net.batch(2 * run.rows, run.seed)
    replicated = fpipe.chain(fpipe.merge(), fpipe.data_parallel())
    program = run.chain(fpipe.split(run.microbatches)(fpipe.program(net.model)), merge=replicated)
    mine = tuple(half.chunk(2)[replica] for half in batch)
    step = fpipe.build(program, net.model, runtime="distributed", mesh=mesh, example=(params, mine), broadcast=True)
    found = step(own(program, place, params), mine)
    one_order = run.microbatches == 1 and not net.ties
    loss, grads = plain_autograd(net, params, batch, 2 if one_order else 1)
    pairs = {"loss": (found.loss, loss)}
    for number, stage in enumerate(found.grads):
        pairs |= {f"{number} {name}": (grad, grads[number][name]) for name, grad in (stage or {}).items()}
    same = torch.equal if one_order else partial(torch.allclose, rtol=1e-10, atol=1e-12)
    differing = []
    for name, (grad, right) in pairs.items():
        if grad is None or right is None:
            differing += [name] if grad is not right else []
        elif not same(grad, right):
            differing.append(name)
    return differing


PRECISE = nets().map(lambda net: replace(net, dtype="float64"))


@example(Run(Net(("linear", "linear"), ("batch", 0), "count"), 1, 2, Chain(("schedule", "merge()"), ("gpipe", 2)), 1))
@few(4)
@given(run=runs(PRECISE).filter(lambda run: run.program.ranks == 2))
def test_two_replicas_of_two_processes_are_one_device(four: Processes, run: Run):
    assert four.each(differs_from_one_device, run) == [[]] * 4
