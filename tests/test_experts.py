"""A mixture of experts on 2 x 2 processes, its tokens exchanged by stages of their own, against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
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


class Sent(torch.autograd.Function):
    """Rows to each process, as many as sizes say, and their gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.how = received, sent, group
        return moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return moved(dy[0], *ctx.how), None, None, None


def moved(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    made = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(made, rows.contiguous(), received, sent, group=group)
    return made


def by_autograd(
    blocks: int, dropless: bool, params: Any, batch: Any, group: Any
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The loss and gradients of this process's parameters, microbatch after microbatch."""
    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in own.items()} for own in params]
    whole = [leaf for own in leaves for leaf in own.values()]
    total, added = torch.zeros(()), [torch.zeros(())] * len(whole)
    for number, (x, target) in enumerate(zip(*(part.tensor_split(MICROBATCHES) for part in batch), strict=True)):
        taken: Any = x
        for block in range(blocks):
            router, own = leaves[4 * block], leaves[4 * block + 2]
            if dropless:
                rows, sizes, beside = (experts.between_all if block else experts.first_of_all)(router, taken)
                theirs = moved(sizes, [2, 2], [2, 2], group)
                sent, came = ([*map(sum, one.view(2, -1).tolist())] for one in (sizes, theirs))
                made = experts.worked_on_all(own, (Sent.apply(rows, sent, came, group), theirs))
                taken = (Sent.apply(made, came, sent, group), sizes), beside
            else:
                sent, beside = (experts.between if block else experts.first)(router, taken)
                taken = Swapped.apply(experts.worked(own, (Swapped.apply(sent, group),)), group), beside
        end = experts.last_of_all if dropless else experts.last
        loss = experts.cross_entropy(end(leaves[-1], taken), target) / MICROBATCHES
        found = torch.autograd.grad(loss, whole)
        added = [old + new if number else new for old, new in zip(added, found, strict=True)]
        total = total + loss.detach()
    grads = iter(added)
    return total, [{name: next(grads) for name in own} for own in leaves]


def trained(rank: int, name: str, blocks: int, dropless: bool) -> tuple[list[str], float, float]:
    """What is odd in a step; the seconds that exchanges took here in five, and for how many of these it worked."""
    mesh = meshed()
    place, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    model, params, batch = experts.mixture(blocks, dropless), experts.parameters(blocks, member, 2), tokens(member)
    schedule = fpipe.schedules.get(name)(2)
    program = fpipe.chain(fpipe.split(MICROBATCHES), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    how: Any = {"mesh": mesh, "example": example, "broadcast": True, "record": True}
    step = fpipe.build(program, model, runtime="distributed", **how)
    own = fpipe.local_params(program, params, place)
    step(own, batch)
    found = step(own, batch)
    loss, grads = by_autograd(blocks, dropless, params, batch, mesh.get_group("ep"))
    odd = [] if torch.equal(found.loss, loss) else [f"loss {found.loss} for {loss}"]
    odd += [
        f"stage {at}: {leaf}"
        for at, stage in enumerate(found.grads)
        for leaf, grad in (stage or {}).items()
        if not torch.equal(grad, grads[at][leaf])
    ]
    took = both = 0.0
    for result in (found, *(step(own, batch) for _ in range(4))):  # work of well under a millisecond
        here = [event for event in result.timeline.events if event.op.rank == place and event.end > event.start]
        lane = [event for event in here if is_exchange(event.op)]
        work = [event for event in here if event.op.kind in "FBIW" and event not in lane]
        took += sum(event.end - event.start for event in lane)
        both += sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in lane for b in work)
    return odd, took, both


@pytest.mark.parametrize(
    ("name", "blocks", "dropless"),
    [
        ("one_f_one_b", 1, False),
        ("zb_h1", 1, False),
        ("one_f_one_b_overlap", 2, False),
        ("dualpipev", 1, False),
        ("one_f_one_b", 2, True),
        ("zb_h1", 2, True),
        ("one_f_one_b_overlap", 2, True),
        ("dualpipev", 4, True),
    ],
)
def test_experts_have_the_gradients_of_autograd(four: Processes, name: str, blocks: int, dropless: bool):
    found = four.each(trained, name, blocks, dropless)
    assert [odd for odd, _, _ in found] == [[]] * 4
    if name == "one_f_one_b_overlap":
        assert all(0 < both <= took for _, took, both in found)


def around(rank: int) -> float:
    return ring_attention.difference()


def test_attention_around_a_ring_has_the_gradients_of_whole_sequences(four: Processes):
    assert max(four.each(around)) < 1e-12
