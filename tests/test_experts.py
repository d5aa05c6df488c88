"""A mixture of experts on 2 x 2 processes, its tokens exchanged by stages of their own, against plain autograd."""

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
from tests.test_exchange import AllToAll, two_by_two_mesh

MICROBATCHES = 4


def tokens(member: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(member))
    return ids[:, :-1], ids[:, 1:].contiguous()


class AllToAllRows(torch.autograd.Function):
    """Send rows to each process, as many as sizes say, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent_sizes: list[int], received_sizes: list[int], group: Any) -> Tensor:
        ctx.sizes_and_group = received_sizes, sent_sizes, group
        return exchange_rows(rows, sent_sizes, received_sizes, group)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return exchange_rows(dy[0], *ctx.sizes_and_group), None, None, None


def exchange_rows(rows: Tensor, sent_sizes: list[int], received_sizes: list[int], group: Any) -> Tensor:
    received_rows = rows.new_empty((sum(received_sizes), *rows.shape[1:]))
    dist.all_to_all_single(received_rows, rows.contiguous(), received_sizes, sent_sizes, group=group)
    return received_rows


def autograd_loss_and_grads(
    blocks: int, dropless: bool, params: Any, batch: Any, group: Any
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return the loss and gradients of the parameters on this process, microbatch after microbatch."""
    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in stage_params.items()} for stage_params in params]
    all_leaves = [leaf for stage_params in leaves for leaf in stage_params.values()]
    total, added = torch.zeros(()), [torch.zeros(())] * len(all_leaves)
    for microbatch, (x, target) in enumerate(zip(*(part.tensor_split(MICROBATCHES) for part in batch), strict=True)):
        activations: Any = x
        for block in range(blocks):
            router, expert_leaves = leaves[4 * block], leaves[4 * block + 2]
            if dropless:
                rows, sizes, skip = (experts.combine_and_sort if block else experts.embed_and_sort)(router, activations)
                peer_sizes = exchange_rows(sizes, [2, 2], [2, 2], group)
                sent_sizes, received_sizes = (
                    [*map(sum, sizes_tensor.view(2, -1).tolist())] for sizes_tensor in (sizes, peer_sizes)
                )
                outputs = experts.run_experts_dropless(
                    expert_leaves, (AllToAllRows.apply(rows, sent_sizes, received_sizes, group), peer_sizes)
                )
                activations = (AllToAllRows.apply(outputs, received_sizes, sent_sizes, group), sizes), skip
            else:
                sent_rows, skip = (experts.combine_and_route if block else experts.embed_and_route)(router, activations)
                activations = (
                    AllToAll.apply(experts.run_experts(expert_leaves, (AllToAll.apply(sent_rows, group),)), group),
                    skip,
                )
        end = experts.project_dropless if dropless else experts.combine_and_project
        loss = experts.cross_entropy(end(leaves[-1], activations), target) / MICROBATCHES
        microbatch_grads = torch.autograd.grad(loss, all_leaves)
        added = [old + new if microbatch else new for old, new in zip(added, microbatch_grads, strict=True)]
        total = total + loss.detach()
    grads = iter(added)
    return total, [{name: next(grads) for name in stage_leaves} for stage_leaves in leaves]


def train_experts(rank: int, name: str, blocks: int, dropless: bool) -> tuple[list[str], float, float]:
    """Name wrong gradients of a step; add seconds of exchanges in five steps, and of those overlapped by compute."""
    mesh = two_by_two_mesh()
    pp_rank, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    model, params, batch = experts.mixture(blocks, dropless), experts.parameters(blocks, member, 2), tokens(member)
    schedule = fpipe.schedules.get(name)(2)
    program = fpipe.chain(fpipe.split(MICROBATCHES), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    options: Any = {"mesh": mesh, "example": example, "broadcast": True, "record": True}
    step = fpipe.build(program, model, runtime="distributed", **options)
    local_params = fpipe.local_params(program, params, pp_rank)
    step(local_params, batch)
    first_result = step(local_params, batch)
    loss, grads = autograd_loss_and_grads(blocks, dropless, params, batch, mesh.get_group("ep"))
    differences = [] if torch.equal(first_result.loss, loss) else [f"loss {first_result.loss} for {loss}"]
    differences += [
        f"stage {stage_index}: {leaf}"
        for stage_index, stage in enumerate(first_result.grads)
        for leaf, grad in (stage or {}).items()
        if not torch.equal(grad, grads[stage_index][leaf])
    ]
    exchange_seconds = overlap_seconds = 0.0
    for result in (
        first_result,
        *(step(local_params, batch) for _ in range(4)),
    ):  # each op takes well under a millisecond: five steps give overlap a chance
        events = [event for event in result.timeline.events if event.op.rank == pp_rank and event.end > event.start]
        lane = [event for event in events if is_exchange(event.op)]
        work = [event for event in events if event.op.kind in "FBIW" and event not in lane]
        exchange_seconds += sum(event.end - event.start for event in lane)
        overlap_seconds += sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in lane for b in work)
    return differences, exchange_seconds, overlap_seconds


@pytest.mark.parametrize(
    ("name", "blocks", "dropless"),
    [
        ("one_f_one_b", 1, False),
        pytest.param("zb_h1", 1, False, marks=pytest.mark.deep),
        pytest.param("one_f_one_b_overlap", 2, False, marks=pytest.mark.deep),
        ("dualpipev", 1, False),
        pytest.param("one_f_one_b", 2, True, marks=pytest.mark.deep),
        ("zb_h1", 2, True),
        ("one_f_one_b_overlap", 2, True),
        pytest.param("dualpipev", 4, True, marks=pytest.mark.deep),
    ],
)
def test_experts_have_the_gradients_of_autograd(four: Processes, name: str, blocks: int, dropless: bool):
    results = four.run(train_experts, name, blocks, dropless)
    assert [differences for differences, _, _ in results] == [[]] * 4
    if name == "one_f_one_b_overlap":
        assert all(0 < overlap_seconds <= exchange_seconds for _, exchange_seconds, overlap_seconds in results)


def ring_difference(rank: int) -> float:
    return ring_attention.difference()


def test_attention_around_a_ring_has_the_gradients_of_whole_sequences(four: Processes):
    assert max(four.run(ring_difference)) < 1e-12
