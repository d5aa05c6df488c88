"""Laws of processes: two compute the bits of one, whatever the program, and so do two replicas of two."""

from dataclasses import replace
from functools import partial

import torch
from hypothesis import example, given, seed

import fpipe
from property_tests import test_whole_laws as whole_laws
from property_tests.chains import Chain, Run, runs
from property_tests.strategies import Net, max_examples, nets, plain_autograd
from tests.processes import Processes
from tests.test_data_parallel import meshed
from tests.test_distributed import compare_with_one_process, local_part


def differences_from_one_process(rank: int, run: whole_laws.Run) -> list[str]:
    model, params, state = run.built
    return compare_with_one_process(rank, run.program(model), model, params, run.batch, state=state, key=run.key)


def runs_on_two_ranks(run: whole_laws.Run) -> bool:
    if run.stream or not run.trace or "free()" in run.chain.steps:
        return False
    return run.chain.ranks == 2 and "roundpipe" not in run.chain.schedule


@max_examples(2)
# Hypothesis takes the seed from the source, so a new name draws others: here its filter drops not too many.
@seed(1)
@given(run=whole_laws.runs().filter(runs_on_two_ranks))
def test_two_processes_give_the_bits_of_one(pair: Processes, run: whole_laws.Run):
    """With skips, ties, None and integers as values, norms' state, dropout, and offloaded residuals."""
    assert pair.run(differences_from_one_process, run) == [[], []]


def differences_from_one_device(rank: int, run: Run) -> list[str]:
    """Return the results that differ from plain autograd: in a bit if sums have one order, else beyond rounding."""
    mesh, replica, pp_rank = meshed()
    net, params, batch = run.net, run.net.params(run.seed), run.net.batch(2 * run.rows, run.seed)
    replicated = fpipe.chain(fpipe.merge(), fpipe.data_parallel())
    program = run.chain(fpipe.split(run.microbatches)(fpipe.program(net.model)), merge=replicated)
    mine = tuple(half.chunk(2)[replica] for half in batch)
    step = fpipe.build(program, net.model, runtime="distributed", mesh=mesh, example=(params, mine), broadcast=True)
    result = step(local_part(program, pp_rank, params), mine)
    one_order = run.microbatches == 1 and not net.ties
    loss, grads = plain_autograd(net, params, batch, 2 if one_order else 1)
    pairs = {"loss": (result.loss, loss)}
    for number, stage in enumerate(result.grads):
        pairs |= {f"{number} {name}": (grad, grads[number][name]) for name, grad in (stage or {}).items()}
    is_equal = torch.equal if one_order else partial(torch.allclose, rtol=1e-10, atol=1e-12)
    differing = []
    for name, (grad, expected) in pairs.items():
        if grad is None or expected is None:
            differing += [name] if grad is not expected else []
        elif not is_equal(grad, expected):
            differing.append(name)
    return differing


PRECISE = nets().map(lambda net: replace(net, dtype="float64"))


@example(Run(Net(("linear", "linear"), ("batch", 0), "count"), 1, 2, Chain(("schedule", "merge()"), ("gpipe", 2)), 1))
@max_examples(2)
@given(run=runs(PRECISE).filter(lambda run: run.program.ranks == 2))
def test_two_replicas_of_two_processes_are_one_device(four: Processes, run: Run):
    assert four.run(differences_from_one_device, run) == [[]] * 4
