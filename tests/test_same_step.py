"""All ranks of a group run the same step of the same program, on the same batch; who does not is told so."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.runtimes.processes.transfers import Transfers
from tests.processes import SOON, Processes, timed
from tests.test_distributed import MSE, blocks, built, chained, own, rows

ORDERS = {"both send": False, "one only receives": True}


def in_another_order(rank: int, forward: bool) -> tuple[str, float]:
    """Two steps whose messages have the same sizes, called A B on rank 0 and B A on rank 1."""
    model, params, _ = fpipe.from_sequential(blocks(), stages=2, loss=MSE)
    train = chained(model, fpipe.schedules.one_f_one_b(2))
    program = fpipe.forward_only()(train) if forward else train
    steps = [fpipe.build(one, model, runtime="distributed", example=(params, rows())) for one in (train, program)]
    mine = own(train, rank, params)
    for step in steps:
        step(mine, rows())
    return timed(lambda: [step(mine, rows()) for step in (steps if rank == 0 else steps[::-1])])


@pytest.mark.parametrize("forward", ORDERS.values(), ids=ORDERS)
def test_steps_that_ranks_call_in_different_orders_end_both(forward: bool):
    """Where sizes agreed, each took the other's activations."""
    with Processes(2) as group:
        for said, seconds in group.each(in_another_order, forward):
            assert "is in a step of build " in said
            assert "all ranks of a group build the same steps and call them in the same order" in said
            assert said.startswith("RankError: ")
            assert seconds < SOON


def buffers_freed(rank: int, schedule: str) -> tuple[int, int]:
    """How many send buffers this rank has let go of when a step comes to its end, and of how many."""
    model, params, _ = fpipe.from_sequential(blocks(), stages=2, loss=MSE)
    program = chained(model, fpipe.schedules.get(schedule)(2), microbatches=8)
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(16)))
    found, end = list[tuple[int, int]](), Transfers.wait_for_sends

    def counted(transfers: Transfers) -> None:
        sent = [message for message, _ in transfers._sends.values()]
        found.append((sum(message is None for message in sent), len(sent)))
        end(transfers)

    Transfers.wait_for_sends = counted
    try:
        step(own(program, rank, params), rows(16))
    finally:
        Transfers.wait_for_sends = end
    return found[-1]


def test_a_send_buffer_is_freed_once_a_later_message_acknowledges_it(pair: Processes):
    """The first rank hears of all that it sent when gradients come back; under GPipe the last one never does, and under
    1F1B it does while activations still come."""
    for schedule, least in (("one_f_one_b", 5), ("gpipe", 0)):
        (freed, sent), (late, of) = pair.each(buffers_freed, schedule)
        assert freed == sent > 7
        assert least <= late < of


def beside_a_receive(rank: int) -> list[bool]:
    """A receive of the caller's own is pending on the group while steps run."""
    other = torch.zeros(3)
    pending = dist.irecv(other, 1 - rank)
    program, alone, step, params = built(broadcast=True)
    loss = [step(own(program, rank, params), rows()).loss for _ in range(2)]
    dist.send(torch.full((3,), 1.0 + rank), 1 - rank)
    assert pending is not None
    pending.wait()
    whole = alone(params, rows()).loss
    return [torch.equal(one, whole) for one in loss] + [bool((other == 2 - rank).all())]


def test_a_receive_of_the_callers_own_takes_no_message(pair: Processes):
    """It met the number of one of ours, and gloo ended the process."""
    assert pair.each(beside_a_receive) == [[True] * 3] * 2


def of_an_example(rank: int, on_meta: bool) -> str:
    """Build with the parameters of this rank's stage alone, or with those of the other on meta."""
    model = fpipe.from_functions([lambda p, x: (x @ p["w"]).tanh()] * 2, MSE)
    program, params = chained(model, fpipe.schedules.gpipe(2)), tuple({"w": torch.ones(8, 8)} for _ in range(2))
    mine = own(program, rank, params)
    example = tuple({"w": torch.empty(8, 8, device="meta")} if one is None else one for one in mine)
    example = example if on_meta else mine
    return timed(lambda: fpipe.build(program, model, runtime="distributed", example=(example, rows()))(mine, rows()))[0]


def test_an_example_has_the_parameters_of_all_stages(pair: Processes):
    """It was said that ranks differ in their parameters, and not that these are to be whole."""
    assert pair.each(of_an_example, True) == ["worked"] * 2
    for said in pair.each(of_an_example, False):
        assert said.endswith("An example has the parameters of all stages: on meta, those that a rank does not hold.")


@torch.library.custom_op("fpipe_tests::promises", mutates_args=())
def promises(x: Tensor, what: str) -> Tensor:
    """One whose fake kernel promises something else than it returns."""
    return {"strides": x.t().contiguous().t(), "dtype": x.double(), "shape": x[:, :4].clone()}[what]


promises.register_fake(lambda x, what: torch.empty_like(x))
promises.register_autograd(lambda ctx, grad: (grad, None))


def broken_promise(rank: int, what: str) -> str:
    model = fpipe.from_functions([lambda p, x: promises(x * p["w"], what), lambda p, x: x * p["w"]], MSE)
    params = tuple({"w": torch.ones(8)} for _ in range(2))
    program = chained(model, fpipe.schedules.gpipe(2))
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    return timed(lambda: step(own(program, rank, params), rows()))[0]


FOUND = {"strides": "float32[3, 8]|[1, 3]", "dtype": "float64[3, 8]|[8, 1]", "shape": "float32[3, 4]|[4, 1]"}
PROMISED = (
    "is to be sent, and the trace promised float32[3, 8] with strides [8, 1]. A custom op's register_fake returns"
)


@pytest.mark.parametrize("what", FOUND)
def test_what_is_sent_is_what_was_traced(pair: Processes, what: str):
    """The receiver read it as the trace promised: another loss, or the end of the process."""
    first, second = pair.each(broken_promise, what)
    assert first.startswith(f"TypeError: {FOUND[what].replace('|', ' with strides ')} {PROMISED}")
    assert second.startswith(
        "RankError: rank 0 failed in SEND(y[0,0]>1): stage 0 (<lambda>), microbatch 0, rank 0: TypeError: "
    )


def shuffled(rank: int, seeds: tuple[int, int], check: str, at: int) -> list[str]:
    """Steps of which the last has a batch that each rank drew by a seed of its own."""
    program, _, step, params = built(check_batch=check)
    told: list[str] = []
    for number in range(1, at + 1):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seeds[rank] if number == at else 0))
        batch = tuple(leaf[order] for leaf in rows())
        told.append(timed(lambda batch=batch: step(own(program, rank, params), batch))[0])
    return [said for number, said in enumerate(told, 1) if said != "worked" or number == at]


COMPARED = {("first", 1), ("first", 3), ("first", 100), ("always", 12)}
ADVICE = ". This is rank {}; all ranks come to step {} with the same. A DataLoader that shuffles needs the same seed"


@pytest.mark.parametrize(("check", "at"), [*sorted(COMPARED), ("first", 12), ("never", 3)])
def test_ranks_that_shuffle_apart_are_told_so(pair: Processes, check: str, at: int):
    """Rank 0 took its inputs and the last rank its own targets: another loss, and no word."""
    if at < 100:
        assert pair.each(shuffled, (0, 0), check, at) == [["worked"]] * 2
    for rank, (said,) in enumerate(pair.each(shuffled, (0, 1), check, at)):
        if (check, at) in COMPARED:
            assert said.startswith("ValueError: rank 1 differs from rank 0 in its batch[0]: float32[10, 8]: ")
            assert ADVICE.format(rank, at) in said
        else:
            assert said == "worked"


def partly(rank: int) -> list[str]:
    """Each rank is handed only the side that it reads, or the one in the middle nothing at all."""
    program, _, step, params = built(3)
    (inputs, targets), mine = rows(), own(program, rank, params)
    batch = [(inputs, None), None, (None, targets)][rank]
    return [timed(lambda: step(mine, batch))[0], timed(lambda: step(mine, rows() if rank else (inputs, None)))[0]]


def test_a_rank_that_is_handed_no_batch_compares_none(trio: Processes):
    assert trio.each(partly) == [["worked", "worked"]] * 3


def replicated(rank: int, apart: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, params, _ = fpipe.from_sequential(blocks(), stages=2, loss=MSE)
    program = chained(model, fpipe.schedules.one_f_one_b(2), microbatches=2)
    program = fpipe.data_parallel("dp")(program)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rows(4)))
    batch = tuple(leaf + (apart and mesh.get_local_rank("dp")) for leaf in rows(4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            step(own(program, mesh.get_local_rank("pp"), params), batch)
    return [str(one.message) for one in told if "replica" in str(one.message)]


@pytest.mark.parametrize("apart", [False, True])
def test_replicas_that_are_handed_the_same_rows_are_warned_of_once(four: Processes, apart: bool):
    for told in four.each(replicated, apart):
        assert len(told) == (not apart)
        assert all("replica 0 and replica 1 were handed the same rows" in one for one in told)
