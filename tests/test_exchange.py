"""Stages that are collectives, on 2 x 2 processes: two ranks of a program, times two that exchange tokens."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from fpipe.graphs.tracing.collective_stage import CollectiveRunner, CollectiveStage, run_collectives_with
from fpipe.tree import tree_map
from tests.processes import Processes, renew
from tests.refusals import refusals
from tests.toys import layer, squares


def meshed() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))


class Swapped(torch.autograd.Function):
    """An all-to-all and its gradient, in plain torch.distributed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, made = group, torch.empty_like(x)
        dist.all_to_all_single(made, x.contiguous(), group=group)
        return made

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        made = torch.empty_like(dy[0])
        dist.all_to_all_single(made, dy[0].contiguous(), group=ctx.group)
        return made, None


def test_two_threads_run_collectives_each_by_its_own_carrier():
    """The carriers were one stack: a step ran what another thread's step began."""
    sums, both = CollectiveStage("all_reduce", "ep").bind_group("a group", 2, 0), threading.Barrier(2)

    def run(number: int) -> list[int]:
        carried = list[int]()
        with run_collectives_with(CollectiveRunner(lambda op, x, *how: (carried.append(number), x)[1], lambda x: x)):
            both.wait()
            y = sums({}, torch.ones(2, requires_grad=True))
            both.wait()
            y.sum().backward()
            both.wait()
        return carried

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(run, (0, 1))] == [[0, 0], [1, 1]]


def waited_for(rank: int) -> set[str]:
    """The names of values for which this process waits in a step whose exchanges have gradients of nothing, too."""
    from fpipe.runtimes.lowering.lane import Lane

    seen, wait = set[str](), Lane.wait_for
    Lane.wait_for = lambda self, value: (seen.add(value.name), wait(self, value))[1]
    try:
        assert not one_block(rank, "zb_h1", 5, None)
        assert not one_block(rank, "one_f_one_b", 5, None)
    finally:
        Lane.wait_for = wait
    return seen


def test_only_who_reads_what_an_exchange_brings_waits_for_it(four: Processes):
    """The ADD of an exchange's gradients, of which there are none, and its W waited at once: nothing was hidden."""
    assert set.union(*four.each(waited_for)) == {"y", "dx"}


def one_block(rank: int, name: str, stages: int, placed: Any, trace: bool = True) -> list[str]:
    mesh = meshed()
    where = fpipe.place(placed) if placed else fpipe.identity()
    schedule = fpipe.chain(where, getattr(fpipe.schedules, name)(2))
    place, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    torch.manual_seed(member)
    params = tuple({"w": torch.randn(6, 6)} if at % 2 == 0 else {} for at in range(stages))
    batch = torch.randn(16, 6), torch.randn(16, 6)
    fns = [layer if at % 2 == 0 else fpipe.exchange("all_to_all", axis="ep") for at in range(stages)]
    model = fpipe.from_functions(fns, loss=squares)
    program = fpipe.chain(fpipe.split(4), schedule, fpipe.merge())(fpipe.program(model))
    assert placed is None or [*program.placement] == placed
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, broadcast=True, trace=trace)
    found = step(fpipe.local_params(program, params, place), batch)

    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in one.items()} for one in params]
    total = torch.zeros(())
    for x, target in zip(*(part.tensor_split(4) for part in batch), strict=True):
        for at, own in enumerate(leaves):
            x = Swapped.apply(x, mesh.get_group("ep")) if at % 2 else layer(own, x)
        own_loss = squares(x, target) * 0.25
        own_loss.backward()
        total = total + own_loss.detach()
    odd = [] if torch.equal(found.loss, total) else [f"loss {found.loss} for {total}"]
    pairs = enumerate(zip(found.grads, leaves, strict=True))
    return odd + [f"stage {at}" for at, (stage, own) in pairs if stage and not torch.equal(stage["w"], own["w"].grad)]


@pytest.mark.parametrize(
    ("name", "stages", "placed", "trace"),
    [
        ("one_f_one_b", 5, [0, 0, 0, 0, 1], True),
        ("zb_h1", 5, None, True),
        ("zb_h1", 5, None, False),
        ("dualpipev", 9, None, True),
    ],
)
def test_a_block_over_an_exchange_has_the_gradients_of_autograd(
    four: Processes, name: str, stages: int, placed: list[int] | None, trace: bool
):
    assert four.each(one_block, name, stages, placed, trace) == [[]] * 4


def every_kind(rank: int) -> list[str]:
    """What is odd of each collective between two layers: against a sum of both processes' losses in one."""
    mesh, odd = meshed(), list[str]()
    place, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    shards = [torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(at)) for at in (0, 1)]
    w = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for kind, meaning in MEANINGS.items():
        stages = [layer, fpipe.exchange(kind, axis="ep"), lambda p, x: (x @ p["w"]).square().mean()]
        model = fpipe.from_functions(stages)
        program = fpipe.chain(fpipe.split(2), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge())
        program = program(fpipe.program(model))
        params = ({"w": w[0]}, {}, {"w": w[1]})
        batch = shards[member].flatten(0, 1), torch.zeros(8)
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
        found = step(fpipe.local_params(program, params, place), batch)

        own = [[leaf.clone().requires_grad_() for leaf in w] for _ in (0, 1)]
        total = torch.zeros(())
        for at in (0, 1):  # the microbatches
            between = meaning([torch.tanh(shards[one][at] @ own[one][0]) for one in (0, 1)])
            total = total + sum((y @ leaves[1]).square().mean() / 2 for y, leaves in zip(between, own, strict=True))
        expected = torch.autograd.grad(total, own[member])
        for stage, right in zip((0, 2), expected, strict=True):
            grad = found.grads[stage]
            if grad and not torch.allclose(grad["w"], right, rtol=1e-12):
                odd.append(f"{kind}: stage {stage}")
    return odd


MEANINGS: dict[Any, Any] = {
    "all_to_all": lambda each: [torch.cat([one.chunk(2)[at] for one in each]) for at in (0, 1)],
    "all_gather": lambda each: [torch.cat(each)] * 2,
    "reduce_scatter": lambda each: [(each[0] + each[1]).chunk(2)[at] for at in (0, 1)],
    "all_reduce": lambda each: [each[0] + each[1]] * 2,
    "ring": lambda each: [each[1], each[0]],
}


def test_each_collective_has_its_adjoint_as_backward(four: Processes):
    assert four.each(every_kind) == [[]] * 4


def test_an_axis_of_one_process_hands_on_what_it_is_given():
    batch = torch.randn(4, 6), torch.randn(4, 6)
    params = ({"w": torch.randn(6, 6)}, {}, {"w": torch.randn(6, 6)})
    model = fpipe.from_functions([layer, fpipe.exchange("all_to_all", axis="ep"), layer], squares)
    plain = fpipe.from_functions([layer, layer], squares)
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge())(fpipe.program(model))
    assert fpipe.verify(program, model, params, batch).bitwise
    grads = fpipe.reference(plain, (params[0], params[2]), batch, microbatches=2).grads
    for runtime in ("local", "threads"):
        found = fpipe.build(program, model, runtime=runtime)(params, batch)
        assert torch.equal(found.grads[0]["w"], grads[0]["w"])


class Block(nn.Module):
    """Experts of which each process has one, called as torch's own collectives are."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.route, self.expert, self.group = nn.Linear(6, 6), nn.Linear(6, 6), group

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.route(x))
        return h + self.swapped(self.expert(self.swapped(h)))

    def swapped(self, x: Tensor) -> Tensor:
        parts = [x.shape[0] // 2] * 2
        return funcol.all_to_all_single_autograd(x, parts, parts, self.group)


def cut(rank: int) -> list[Any]:
    """The stages of a net that calls collectives, and what is odd of a step, and of the same net cut elsewhere."""
    mesh = meshed()
    place, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    torch.manual_seed(member)
    net, group = nn.Sequential(*(Block(mesh.get_group("ep")) for _ in range(2))), mesh.get_group("ep")
    batch = torch.randn(8, 6), torch.randn(8, 6)
    example = tuple(part[:4] for part in batch)
    model, params, _ = fpipe.from_module(net, example=example, loss=nn.functional.mse_loss, cut_collectives=True)
    schedule = fpipe.schedules.one_f_one_b_overlap(2)
    program = fpipe.chain(fpipe.split(2), schedule, fpipe.merge())(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example)
    found = step(fpipe.local_params(program, params, place), batch)

    for x, target in zip(*(part.tensor_split(2) for part in batch), strict=True):
        for block in net:
            h = torch.tanh(block.route(x))
            x = h + Swapped.apply(block.expert(Swapped.apply(h, group)), group)
        (nn.functional.mse_loss(x, target) * 0.5).backward()
    own = dict(net.named_parameters())
    grads = {name: grad for stage in found.grads if stage for name, grad in stage.items()}
    return [
        [stage.name for stage in model.stages],
        [n for n in grads if not torch.equal(grads[n], own[n].grad)],
        len(grads),
    ]


def test_a_net_is_cut_where_it_calls_collectives(four: Processes):
    found = four.each(cut)
    names = " ".join(found[0][0]).replace("all_to_all over ep", "swap")
    assert names == "0.route swap 0.expert swap 1.route swap 1.expert swap 1"  # the last adds up
    assert [odd for _, odd, _ in found] == [[]] * 4
    assert sum(count for _, _, count in found) == 2 * 8


def refused(rank: int) -> list[str]:
    told: list[str] = []
    params, batch = ({"w": torch.randn(6, 6)}, {}), (torch.randn(6, 6), torch.randn(6, 6))
    for axis, rows in (("tp", 2), ("ep", 3)):
        renew()
        mesh = meshed()
        model = fpipe.from_functions([layer, fpipe.exchange("all_to_all", axis=axis)], squares)
        chain = fpipe.chain(fpipe.split(size=rows, rows=6), fpipe.schedules.gpipe(2), fpipe.merge())
        try:
            fpipe.build(chain(fpipe.program(model)), model, runtime="distributed", mesh=mesh, example=(params, batch))
        except ValueError as error:
            told.append(str(error))
    for placed, sizes in SIZES:
        renew()
        mesh = meshed()
        sent = torch.tensor(sizes, dtype=torch.int32 if sizes == [2, 4] and rank % 2 else torch.int64)
        stages = [lambda p, x, sent=sent: (x, sent), fpipe.exchange("all_to_all", axis="ep", sizes=True), summed]
        model = fpipe.from_functions(stages, squares, inputs=["batch", ((0, 0), (0, 1)), 1])
        program = fpipe.chain(fpipe.place(placed), fpipe.merge(outputs=False))(fpipe.program(model))
        try:
            step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(({},) * 3, batch))
            step(({},) * 3, batch)
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    for route in (wider, longer):
        renew()
        mesh = meshed()
        stages = [lambda p, x: x, route, fpipe.exchange("all_to_all", axis="ep", sizes=True), summed]
        model = fpipe.from_functions(stages, squares, inputs=["batch", 0, ((1, 0), (1, 1)), 2])
        program = fpipe.chain(fpipe.place([0, 1, 1, 1]), fpipe.merge(outputs=False))(fpipe.program(model))
        given, found = ({},) * 4, "nothing"
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(given, batch), trace=False)
        try:
            step(given, batch)
        except (ValueError, RuntimeError) as error:
            found = str(error)
        told.append(found)
    return told


def wider(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that are wider where they are not zeros."""
    return (torch.cat([x, x], 1) if x.any() else x), torch.tensor([3, 3])


def longer(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """More sizes where rows are not zeros."""
    return x, torch.tensor([1, 2, 1, 2] if x.any() else [3, 3])


def summed(params: Any, x: Any) -> Tensor:
    return x[0].sum(0) * torch.ones(6, 6)


UNEVEN = fpipe.from_functions(
    [lambda p, x: (x, torch.tensor([4, 1])), fpipe.exchange("all_to_all", axis="ep", sizes=True), summed],
    squares,
    inputs=["batch", ((0, 0), (0, 1)), 1],
)
SIZES = ([0, 0, 1], [3, 3]), ([0, 1, 1], [4, 1]), ([0, 1, 1], [7, -1]), ([0, 1, 1], [2, 2, 2]), ([0, 1, 1], [2, 4])


def test_what_cannot_be_exchanged_is_refused(four: Processes):
    for no_axis, odd_rows, elsewhere, odd_sizes, below, uneven, other, *later in four.each(refused):
        assert (
            "stage 1 (all_to_all over ep) brings as many rows as the data say on rank 0, and stage 2 (summed) on ra"
            in (elsewhere)
        )
        assert "all_to_all over ep: the sizes add up to 5 rows, but dim 0 of a tensor of shape (6, 6)" in odd_sizes
        assert "all_to_all over ep: a size is -1; sizes are whole numbers from 0." in below
        assert "takes equally many sizes for each process, 2 here; found shape (3,)." in uneven
        assert "ep 1: rank 1 differs from ep 0: rank 1 in its exchanges over ep: 1F0 (all_to_all over ep) of " in other
        assert (
            "rows of float32[6] and int32[2] instead of 1F0 (all_to_all over ep) of rows of float32[6] and int64[2]."
            in other
        )
        assert (
            "a stage of the model is all_to_all over tp, a dimension of the mesh, and the mesh has pp, ep." in no_axis
        )
        for one, by in zip(later, ("rows of [12] with sizes [2]", "rows of [6] with sizes [4]"), strict=True):
            assert (
                f"stage 2 (all_to_all over ep) is handed {by} in 2F0, and all processes agreed on rows "
                "of [6] with sizes [2]; only the number of rows may change." in one
            )
        assert "all_to_all over ep cuts dim 0 into 2 parts, one for each process; found shape (3, 6)." in odd_rows


test_refusals = refusals(
    globals(),
    """
fpipe.exchange("all_to_all", axis="ep", sizes="no")
    ValueError: sizes is True or False: whether x is (rows, .., sizes); found 'no'
fpipe.exchange("ring", axis="ep", sizes=True)
    ValueError: sizes are those of an all-to-all, whose parts differ; found 'ring'
fpipe.exchange("broadcast", axis="ep")
    ValueError: an exchange is one of 'all_to_all',
fpipe.exchange("ring", axis=2)
    ValueError: axis is the name of a dimension of the mesh, such as 'ep'; found 2
# They were handed on as they were, and then the first step over processes refused them.
fpipe.reference(UNEVEN, ({},) * 3, (torch.randn(6, 6), torch.randn(6, 6)))
    ValueError: the sizes add up to 5 rows, but dim 0 of a tensor of shape (6, 6)
""",
)


def leaving(rank: int, who: int, how: str) -> str | None:
    """What a step raises where the other process of an exchange fails, and may end at once, or is killed."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "ep"))

    def doomed(params: Any, x: Tensor) -> Tensor:
        if rank == who and how == "killed" and x.any():  # a run on zeros comes first
            os.kill(os.getpid(), signal.SIGKILL)
        return layer(params, x)

    params, batch = ({"w": torch.ones(6, 6)}, {}), (torch.ones(4, 6), torch.ones(4, 6))
    model = fpipe.from_functions([doomed, fpipe.exchange("all_to_all", axis="ep")], squares)
    program = fpipe.chain(fpipe.schedules.gpipe(1), fpipe.merge())(fpipe.program(model))
    more: Any = {"mesh": mesh, "example": (params, batch), "check_finite": True, "trace": False, "check_batch": "never"}
    step = fpipe.build(program, model, runtime="distributed", **more)
    bad = torch.full_like(batch[0], float("nan")) if rank == who else batch[0]
    try:
        step(params, (bad, batch[1]))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    except FloatingPointError:
        if how == "failed":
            os._exit(1)
    return None


@pytest.mark.parametrize(
    ("who", "how", "told"),
    [
        (0, "failed", r"ep 0: rank 0 failed in 0F0.*FloatingPointError: "),
        (1, "failed", r"ep 1: rank 0 failed in 0F0.*FloatingPointError: "),
        (1, "stayed", r"ep 1: rank 0 failed in 0F0.*FloatingPointError: "),
        (1, "killed", r"ep 1: rank 0 is gone and did not take part in 1F0"),
    ],
)
def test_a_process_that_leaves_an_exchange_is_named(who: int, how: str, told: str):
    """If it ended at once, its partner had only "failed or is late (.. Connection closed by peer)" to say. Rank 0 keeps
    the store where words are left, and goes when they were read."""
    with Processes(2, tcp=True) as pair:
        pair.start(leaving, who, how)
        found = pair.results()
    assert found[who] is None
    assert re.match(f"RankError: {told}", str(found[1 - who])), found


def ends_in_an_exchange(rank: int) -> bool:
    """Whether the loss is that of the sum of both processes, of which one comes late."""
    mesh, plain = meshed(), dist.all_reduce
    place, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    parts = [torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(at)) for at in (0, 1)]
    params, batch = ({"w": parts[member][0, :6]}, {}), (parts[member][1], parts[member][2])
    model = fpipe.from_functions([layer, fpipe.exchange("all_reduce", axis="ep")], loss=squares)
    program = fpipe.chain(fpipe.split(2), fpipe.place([0, 1]), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(
        program, model, runtime="distributed", mesh=mesh, example=(params, batch), broadcast=True, check_batch="never"
    )

    def late(*args: Any, **how: Any) -> Any:
        time.sleep(0.2 * member)
        return plain(*args, **how)

    dist.all_reduce = late
    try:
        found = step(fpipe.local_params(program, params, place), batch).loss
    finally:
        dist.all_reduce = plain
    both = sum(layer({"w": one[0, :6]}, one[1]) for one in parts)
    return torch.allclose(found, squares(both, batch[1]))


def test_a_loss_waits_for_the_exchange_that_it_is_of(four: Processes):
    """It was computed of what the collective had not brought yet: 1.5782 for 1.7860 where one process was late."""
    assert four.each(ends_in_an_exchange) == [True] * 4


def ended(rank: int) -> list[str]:
    """The stages of a net whose last op is a collective over all processes."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "ep"))

    class Summed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return funcol.all_reduce(self[1](funcol.all_reduce(self[0](x), "sum", mesh["ep"])), "sum", mesh["ep"])

    torch.manual_seed(0)
    net, batch = Summed(nn.Linear(3, 3), nn.Linear(3, 3)), (torch.randn(4, 3), torch.randn(4, 3))
    model, params, _ = fpipe.from_module(net, example=batch, loss=nn.functional.mse_loss, cut_collectives=True)
    program = fpipe.chain(fpipe.place([0] * len(model.stages)), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
    right = torch.equal(step(params, batch).loss, nn.functional.mse_loss(net(batch[0]), batch[1]).detach())
    return [*(stage.name.split(" over ")[0] for stage in model.stages), *(["wrong"] * (not right))]


def test_a_net_that_ends_in_a_collective_is_cut_before_it(four: Processes):
    """The last one stays with what it ends; the group is the net's own, whatever the mesh calls it."""
    assert four.each(ended) == [["0", "all_reduce", "1"]] * 4
