"""A mixture of experts on 2 x 2 processes, its tokens exchanged by stages of their own, against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from examples import experts, ring_attention
from fpipe.program import is_exchange
from fpipe.tree import tree_map
from tests.processes import Processes
from tests.test_exchange import Swapped, meshed

MICROBATCHES = 4


def tokens(member: int) -> tuple[Tensor, Tensor]:
    found = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(member))
    return found[:, :-1], found[:, 1:].contiguous()


def by_autograd(blocks: int, params: Any, batch: Any, group: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The loss and gradients of this process's parameters, microbatch after microbatch."""
    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in own.items()} for own in params]
    whole = [leaf for own in leaves for leaf in own.values()]
    total, added = torch.zeros(()), [torch.zeros(())] * len(whole)
    for number, (x, target) in enumerate(zip(*(part.tensor_split(MICROBATCHES) for part in batch), strict=True)):
        taken: Any = x
        for block in range(blocks):
            router, own = leaves[4 * block], leaves[4 * block + 2]
            sent, beside = (experts.between if block else experts.first)(router, taken)
            taken = Swapped.apply(experts.worked(own, (Swapped.apply(sent, group),)), group), beside
        loss = experts.cross_entropy(experts.last(leaves[-1], taken), target) / MICROBATCHES
        found = torch.autograd.grad(loss, whole)
        added = [old + new if number else new for old, new in zip(added, found, strict=True)]
        total = total + loss.detach()
    grads = iter(added)
    return total, [{name: next(grads) for name in own} for own in leaves]


def trained(rank: int, name: str, blocks: int) -> tuple[list[str], float, float]:
    """What is odd in a step; the seconds that exchanges took on this rank, and for how many of these it worked."""
    mesh = meshed()
    place, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    model, params, batch = experts.mixture(blocks), experts.parameters(blocks, member, 2), tokens(member)
    schedule = fpipe.schedules.get(name)(2)
    program = fpipe.chain(fpipe.split(MICROBATCHES), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    how: Any = {"mesh": mesh, "example": example, "broadcast": True, "record": True}
    step = fpipe.build(program, model, runtime="distributed", **how)
    own = fpipe.local_params(program, params, place)
    step(own, batch)
    found = step(own, batch)
    loss, grads = by_autograd(blocks, params, batch, mesh.get_group("ep"))
    odd = [] if torch.equal(found.loss, loss) else [f"loss {found.loss} for {loss}"]
    odd += [
        f"stage {at}: {leaf}"
        for at, stage in enumerate(found.grads)
        for leaf, grad in (stage or {}).items()
        if not torch.equal(grad, grads[at][leaf])
    ]
    here = [event for event in found.timeline.events if event.op.rank == place and event.end > event.start]
    lane = [event for event in here if is_exchange(event.op)]
    work = [event for event in here if event.op.kind in "FBIW" and event not in lane]
    both = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in lane for b in work)
    return odd, sum(event.end - event.start for event in lane), both


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "one_f_one_b_overlap", "dualpipev"])
def test_experts_have_the_gradients_of_autograd(four: Processes, name: str):
    found = four.each(trained, name, 2 if name == "one_f_one_b_overlap" else 1)
    assert [odd for odd, _, _ in found] == [[]] * 4
    if name == "one_f_one_b_overlap":
        assert all(0 < both <= took for _, took, both in found)


def around(rank: int) -> float:
    return ring_attention.difference()


def test_attention_around_a_ring_has_the_gradients_of_whole_sequences(four: Processes):
    assert max(four.each(around)) < 1e-12
