"""Collectives as stages on 2 x 2 processes: two ranks of a program, and two processes that exchange tokens."""

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


def two_by_two_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))


class AllToAll(torch.autograd.Function):
    """An all-to-all with its gradient, in plain torch.distributed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, received = group, torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        received = torch.empty_like(dy[0])
        dist.all_to_all_single(received, dy[0].contiguous(), group=ctx.group)
        return received, None


def test_each_thread_runs_collectives_by_its_own_runner():
    """Used to share one stack: a step ran collectives with the runner of another thread's step."""
    sums, barrier = CollectiveStage("all_reduce", "ep").bind_group("a group", 2, 0), threading.Barrier(2)

    def run(number: int) -> list[int]:
        owners = list[int]()
        with run_collectives_with(CollectiveRunner(lambda op, x, *options: (owners.append(number), x)[1], lambda x: x)):
            barrier.wait()
            y = sums({}, torch.ones(2, requires_grad=True))
            barrier.wait()
            y.sum().backward()
            barrier.wait()
        return owners

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(run, (0, 1))] == [[0, 0], [1, 1]]


def names_waited_for(rank: int) -> set[str]:
    """Return the names of the values that this process waits for, in steps whose exchanges have no gradients."""
    from fpipe.runtimes.lowering.lane import Lane

    waited_names, plain_wait = set[str](), Lane.wait_for
    Lane.wait_for = lambda self, value: (waited_names.add(value.name), plain_wait(self, value))[1]
    try:
        assert not block_differences(rank, "zb_h1", 5, None)
        assert not block_differences(rank, "one_f_one_b", 5, None)
    finally:
        Lane.wait_for = plain_wait
    return waited_names


def test_only_readers_of_an_exchange_wait_for_it(four: Processes):
    """Used to wait at once in the ADD of an exchange's gradients, though there are none, and in its W."""
    assert set.union(*four.run(names_waited_for)) == {"y", "dx"}


def block_differences(rank: int, name: str, stages: int, placed: Any, trace: bool = True) -> list[str]:
    mesh = two_by_two_mesh()
    place_stages = fpipe.place(placed) if placed else fpipe.identity()
    schedule = fpipe.chain(place_stages, getattr(fpipe.schedules, name)(2))
    pp_rank, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    torch.manual_seed(member)
    params = tuple({"w": torch.randn(6, 6)} if stage_index % 2 == 0 else {} for stage_index in range(stages))
    batch = torch.randn(16, 6), torch.randn(16, 6)
    fns = [layer if stage_index % 2 == 0 else fpipe.exchange("all_to_all", axis="ep") for stage_index in range(stages)]
    model = fpipe.from_functions(fns, loss=squares)
    program = fpipe.chain(fpipe.split(4), schedule, fpipe.merge())(fpipe.program(model))
    assert placed is None or [*program.placement] == placed
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, broadcast=True, trace=trace)
    result = step(fpipe.local_params(program, params, pp_rank), batch)

    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in stage_params.items()} for stage_params in params]
    total = torch.zeros(())
    for x, target in zip(*(part.tensor_split(4) for part in batch), strict=True):
        for stage_index, stage_leaves in enumerate(leaves):
            x = AllToAll.apply(x, mesh.get_group("ep")) if stage_index % 2 else layer(stage_leaves, x)
        local_loss = squares(x, target) * 0.25
        local_loss.backward()
        total = total + local_loss.detach()
    differences = [] if torch.equal(result.loss, total) else [f"loss {result.loss} for {total}"]
    pairs = enumerate(zip(result.grads, leaves, strict=True))
    return differences + [
        f"stage {stage_index}"
        for stage_index, (stage, stage_leaves) in pairs
        if stage and not torch.equal(stage["w"], stage_leaves["w"].grad)
    ]


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
    assert four.run(block_differences, name, stages, placed, trace) == [[]] * 4


def collectives_with_wrong_grads(rank: int) -> list[str]:
    """Name the collectives with gradients unlike those of both processes' losses, added up."""
    mesh, differences = two_by_two_mesh(), list[str]()
    pp_rank, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    shards = [
        torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    ]
    w = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for kind, meaning in MEANINGS.items():
        stages = [layer, fpipe.exchange(kind, axis="ep"), lambda p, x: (x @ p["w"]).square().mean()]
        model = fpipe.from_functions(stages)
        program = fpipe.chain(fpipe.split(2), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge())
        program = program(fpipe.program(model))
        params = ({"w": w[0]}, {}, {"w": w[1]})
        batch = shards[member].flatten(0, 1), torch.zeros(8)
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
        result = step(fpipe.local_params(program, params, pp_rank), batch)

        leaves_of = [[leaf.clone().requires_grad_() for leaf in w] for _ in (0, 1)]
        total = torch.zeros(())
        for microbatch in (0, 1):
            exchanged = meaning([torch.tanh(shards[peer][microbatch] @ leaves_of[peer][0]) for peer in (0, 1)])
            total = total + sum(
                (y @ leaves[1]).square().mean() / 2 for y, leaves in zip(exchanged, leaves_of, strict=True)
            )
        expected = torch.autograd.grad(total, leaves_of[member])
        for stage, expected_grad in zip((0, 2), expected, strict=True):
            grad = result.grads[stage]
            if grad and not torch.allclose(grad["w"], expected_grad, rtol=1e-12):
                differences.append(f"{kind}: stage {stage}")
    return differences


MEANINGS: dict[Any, Any] = {
    "all_to_all": lambda parts: [torch.cat([part.chunk(2)[member] for part in parts]) for member in (0, 1)],
    "all_gather": lambda parts: [torch.cat(parts)] * 2,
    "reduce_scatter": lambda parts: [(parts[0] + parts[1]).chunk(2)[member] for member in (0, 1)],
    "all_reduce": lambda parts: [parts[0] + parts[1]] * 2,
    "ring": lambda parts: [parts[1], parts[0]],
}


def test_each_collective_has_its_adjoint_as_backward(four: Processes):
    assert four.run(collectives_with_wrong_grads) == [[]] * 4


def test_an_exchange_over_one_process_returns_its_input():
    batch = torch.randn(4, 6), torch.randn(4, 6)
    params = ({"w": torch.randn(6, 6)}, {}, {"w": torch.randn(6, 6)})
    model = fpipe.from_functions([layer, fpipe.exchange("all_to_all", axis="ep"), layer], squares)
    plain = fpipe.from_functions([layer, layer], squares)
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge())(fpipe.program(model))
    assert fpipe.verify(program, model, params, batch).bitwise
    grads = fpipe.reference(plain, (params[0], params[2]), batch, microbatches=2).grads
    for runtime in ("local", "threads"):
        result = fpipe.build(program, model, runtime=runtime)(params, batch)
        assert torch.equal(result.grads[0]["w"], grads[0]["w"])


class Block(nn.Module):
    """A block with one expert on each process, called by torch's own functional collectives."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.route, self.expert, self.group = nn.Linear(6, 6), nn.Linear(6, 6), group

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.route(x))
        return h + self.swapped(self.expert(self.swapped(h)))

    def swapped(self, x: Tensor) -> Tensor:
        parts = [x.shape[0] // 2] * 2
        return funcol.all_to_all_single_autograd(x, parts, parts, self.group)


def cut_at_collectives(rank: int) -> list[Any]:
    """Cut a net at its collectives; return the names of stages, of wrong gradients, and the number of gradients."""
    mesh = two_by_two_mesh()
    pp_rank, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    torch.manual_seed(member)
    net, group = nn.Sequential(*(Block(mesh.get_group("ep")) for _ in range(2))), mesh.get_group("ep")
    batch = torch.randn(8, 6), torch.randn(8, 6)
    example = tuple(part[:4] for part in batch)
    model, params, _ = fpipe.from_module(net, batch=example, loss=nn.functional.mse_loss, cut_collectives=True)
    schedule = fpipe.schedules.one_f_one_b_overlap(2)
    program = fpipe.chain(fpipe.split(2), schedule, fpipe.merge())(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example)
    result = step(fpipe.local_params(program, params, pp_rank), batch)

    for x, target in zip(*(part.tensor_split(2) for part in batch), strict=True):
        for block in net:
            h = torch.tanh(block.route(x))
            x = h + AllToAll.apply(block.expert(AllToAll.apply(h, group)), group)
        (nn.functional.mse_loss(x, target) * 0.5).backward()
    params_by_name = dict(net.named_parameters())
    grads = {name: grad for stage in result.grads if stage for name, grad in stage.items()}
    return [
        [stage.name for stage in model.stages],
        [n for n in grads if not torch.equal(grads[n], params_by_name[n].grad)],
        len(grads),
    ]


def test_a_net_is_cut_where_it_calls_collectives(four: Processes):
    results = four.run(cut_at_collectives)
    names = " ".join(results[0][0]).replace("all_to_all over ep", "swap")
    assert names == "0.route swap 0.expert swap 1.route swap 1.expert swap 1"  # the last stage adds the skip
    assert [wrong_names for _, wrong_names, _ in results] == [[]] * 4
    assert sum(count for _, _, count in results) == 2 * 8


def exchange_refusals(rank: int) -> list[str]:
    messages: list[str] = []
    params, batch = ({"w": torch.randn(6, 6)}, {}), (torch.randn(6, 6), torch.randn(6, 6))
    for axis, rows in (("tp", 2), ("ep", 3)):
        renew()
        mesh = two_by_two_mesh()
        model = fpipe.from_functions([layer, fpipe.exchange("all_to_all", axis=axis)], squares)
        chain = fpipe.chain(fpipe.split(size=rows, rows=6), fpipe.schedules.gpipe(2), fpipe.merge())
        try:
            fpipe.build(chain(fpipe.program(model)), model, runtime="distributed", mesh=mesh, example=(params, batch))
        except ValueError as error:
            messages.append(str(error))
    for placed, sizes in SIZES:
        renew()
        mesh = two_by_two_mesh()
        counts = torch.tensor(sizes, dtype=torch.int32 if sizes == [2, 4] and rank % 2 else torch.int64)
        stages = [lambda p, x, counts=counts: (x, counts), fpipe.exchange("all_to_all", axis="ep", sizes=True), summed]
        model = fpipe.from_functions(stages, squares, inputs=["batch", ((0, 0), (0, 1)), 1])
        program = fpipe.chain(fpipe.place(placed), fpipe.merge(outputs=False))(fpipe.program(model))
        try:
            step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(({},) * 3, batch))
            step(({},) * 3, batch)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    for route in (wider, longer):
        renew()
        mesh = two_by_two_mesh()
        stages = [lambda p, x: x, route, fpipe.exchange("all_to_all", axis="ep", sizes=True), summed]
        model = fpipe.from_functions(stages, squares, inputs=["batch", 0, ((1, 0), (1, 1)), 2])
        program = fpipe.chain(fpipe.place([0, 1, 1, 1]), fpipe.merge(outputs=False))(fpipe.program(model))
        no_params, message = ({},) * 4, "nothing"
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(no_params, batch), trace=False)
        try:
            step(no_params, batch)
        except (ValueError, RuntimeError) as error:
            message = str(error)
        messages.append(message)
    return messages


def wider(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return wider rows unless they are zeros, as in the run on zeros that builds the step."""
    return (torch.cat([x, x], 1) if x.any() else x), torch.tensor([3, 3])


def longer(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return more sizes unless the rows are zeros, as in the run on zeros that builds the step."""
    return x, torch.tensor([1, 2, 1, 2] if x.any() else [3, 3])


def summed(params: Any, x: Any) -> Tensor:
    return x[0].sum(0) * torch.ones(6, 6)


UNEVEN = fpipe.from_functions(
    [lambda p, x: (x, torch.tensor([4, 1])), fpipe.exchange("all_to_all", axis="ep", sizes=True), summed],
    squares,
    inputs=["batch", ((0, 0), (0, 1)), 1],
)
SIZES = ([0, 0, 1], [3, 3]), ([0, 1, 1], [4, 1]), ([0, 1, 1], [7, -1]), ([0, 1, 1], [2, 2, 2]), ([0, 1, 1], [2, 4])


def test_impossible_exchanges_are_refused(four: Processes):
    for messages in four.run(exchange_refusals):
        no_tp, odd_rows, far_reader, odd_sizes, negative_size, uneven_sizes, dtypes, *changes = messages
        text = "stage 1 (all_to_all over ep) brings as many rows as the data say on rank 0, and stage 2 (summed) on ra"
        assert text in far_reader
        assert "all_to_all over ep: the sizes add up to 5 rows, but dim 0 of a tensor of shape (6, 6)" in odd_sizes
        assert "all_to_all over ep: sizes are whole numbers from 0; found -1." in negative_size
        assert "takes equally many sizes for each process, 2 here; found shape (3,)." in uneven_sizes
        assert "ep 1: rank 1 differs from ep 0: rank 1 in its exchanges over ep: 1F0 (all_to_all over ep) of " in dtypes
        exchanged = "rows of float32[6] and {}[2]"
        swapped = f"{exchanged.format('int32')} instead of 1F0 (all_to_all over ep) of {exchanged.format('int64')}."
        assert swapped in dtypes
        assert "a stage of the model is all_to_all over tp, a dimension of the mesh, and the mesh has pp, ep." in no_tp
        for message, sizes in zip(changes, ("rows of [12] with sizes [2]", "rows of [6] with sizes [4]"), strict=True):
            assert (
                f"stage 2 (all_to_all over ep) is handed {sizes} in 2F0, and all processes agreed on rows "
                "of [6] with sizes [2]; only the number of rows may change." in message
            )
        assert "all_to_all over ep cuts dim 0 into 2 parts, one for each process; found shape (3, 6)." in odd_rows


test_refusals = refusals(
    globals(),
    """
fpipe.exchange("ring", axis="ep", sizes=True)
    ValueError: sizes are those of an all-to-all, whose parts differ; found 'ring'
# They were handed on as they were, and then the first step over processes refused them.
fpipe.reference(UNEVEN, ({},) * 3, (torch.randn(6, 6), torch.randn(6, 6)))
    ValueError: the sizes add up to 5 rows, but dim 0 of a tensor of shape (6, 6)
""",
)


def leave_exchange(rank: int, culprit: int, failure: str) -> str | None:
    """Return the error of a step in which a process of an exchange fails, and may exit at once, or is killed."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "ep"))

    def doomed(params: Any, x: Tensor) -> Tensor:
        if rank == culprit and failure == "killed" and x.any():  # a run on zeros comes first
            os.kill(os.getpid(), signal.SIGKILL)
        return layer(params, x)

    params, batch = ({"w": torch.ones(6, 6)}, {}), (torch.ones(4, 6), torch.ones(4, 6))
    model = fpipe.from_functions([doomed, fpipe.exchange("all_to_all", axis="ep")], squares)
    program = fpipe.chain(fpipe.schedules.gpipe(1), fpipe.merge())(fpipe.program(model))
    options: Any = {
        "mesh": mesh,
        "example": (params, batch),
        "check_finite": True,
        "trace": False,
        "check_batch": "never",
    }
    step = fpipe.build(program, model, runtime="distributed", **options)
    bad = torch.full_like(batch[0], float("nan")) if rank == culprit else batch[0]
    try:
        step(params, (bad, batch[1]))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    except FloatingPointError:
        if failure == "failed":
            os._exit(1)
    return None


@pytest.mark.parametrize(
    ("culprit", "failure", "message"),
    [
        (0, "failed", r"ep 0: rank 0 failed in 0F0.*FloatingPointError: "),
        (1, "failed", r"ep 1: rank 0 failed in 0F0.*FloatingPointError: "),
        (1, "stayed", r"ep 1: rank 0 failed in 0F0.*FloatingPointError: "),
        (1, "killed", r"ep 1: rank 0 is gone and did not take part in 1F0"),
    ],
)
def test_a_process_that_leaves_an_exchange_is_named(culprit: int, failure: str, message: str):
    """Used to name no rank if the process ended at once: its partner said only "Connection closed by peer".

    Rank 0 keeps the store with the reasons, and leaves when they were read.
    """
    with Processes(2, tcp=True) as pair:
        pair.start(leave_exchange, culprit, failure)
        outcomes = pair.results()
    assert outcomes[culprit] is None
    assert re.match(f"RankError: {message}", str(outcomes[1 - culprit])), outcomes


def loss_of_late_exchange_is_right(rank: int) -> bool:
    """Check the loss of an output that is reduced with a late process."""
    mesh, plain_all_reduce = two_by_two_mesh(), dist.all_reduce
    pp_rank, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    parts = [torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    params, batch = ({"w": parts[member][0, :6]}, {}), (parts[member][1], parts[member][2])
    model = fpipe.from_functions([layer, fpipe.exchange("all_reduce", axis="ep")], loss=squares)
    program = fpipe.chain(fpipe.split(2), fpipe.place([0, 1]), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(
        program, model, runtime="distributed", mesh=mesh, example=(params, batch), broadcast=True, check_batch="never"
    )

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.2 * member)
        return plain_all_reduce(*args, **options)

    dist.all_reduce = late
    try:
        loss = step(fpipe.local_params(program, params, pp_rank), batch).loss
    finally:
        dist.all_reduce = plain_all_reduce
    reduced = sum(layer({"w": part[0, :6]}, part[1]) for part in parts)
    return torch.allclose(loss, squares(reduced, batch[1]))


def test_a_loss_waits_for_the_exchange_that_it_reads(four: Processes):
    """Used to read the output before the collective had filled it: 1.5782 instead of 1.7860 with one late process."""
    assert four.run(loss_of_late_exchange_is_right) == [True] * 4


def stages_of_net_ending_in_collective(rank: int) -> list[str]:
    """Cut a net that ends in a collective over all processes; name its stages, and "wrong" for a wrong loss."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "ep"))

    class Summed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return funcol.all_reduce(self[1](funcol.all_reduce(self[0](x), "sum", mesh["ep"])), "sum", mesh["ep"])

    torch.manual_seed(0)
    net, batch = Summed(nn.Linear(3, 3), nn.Linear(3, 3)), (torch.randn(4, 3), torch.randn(4, 3))
    model, params, _ = fpipe.from_module(net, batch=batch, loss=nn.functional.mse_loss, cut_collectives=True)
    program = fpipe.chain(fpipe.place([0] * len(model.stages)), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
    is_right = torch.equal(step(params, batch).loss, nn.functional.mse_loss(net(batch[0]), batch[1]).detach())
    return [*(stage.name.split(" over ")[0] for stage in model.stages), *(["wrong"] * (not is_right))]


def test_a_net_that_ends_in_a_collective_is_cut_before_it(four: Processes):
    """The last collective stays in the last stage; its group is the net's own, whatever the mesh calls it."""
    assert four.run(stages_of_net_ending_in_collective) == [["0", "all_reduce", "1"]] * 4
