"""All ranks of a group run the same step of the same program on the same batch, or raise an error."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.runtimes.processes.transfers import Transfers
from tests.processes import SOON, Processes, time_call
from tests.test_distributed import MSE, build_blocks, cut_blocks, local_part, pipeline_program, rows

ORDERS = {"both send": False, "one only receives": True}


def call_in_another_order(rank: int, forward: bool) -> tuple[str, float]:
    """Call two steps with messages of equal sizes, as A B on rank 0 and as B A on rank 1."""
    model, params, _ = cut_blocks(4, 2)
    train = pipeline_program(model, fpipe.schedules.one_f_one_b(2))
    program = fpipe.forward_only()(train) if forward else train
    steps = [
        fpipe.build(step_program, model, runtime="distributed", example=(params, rows()))
        for step_program in (train, program)
    ]
    mine = local_part(train, rank, params)
    for step in steps:
        step(mine, rows())
    return time_call(lambda: [step(mine, rows()) for step in (steps if rank == 0 else steps[::-1])])


@pytest.mark.parametrize("forward", ORDERS.values(), ids=ORDERS)
def test_steps_called_in_different_orders_fail_on_both_ranks(forward: bool):
    """Used to let each step read activations of the wrong step if their sizes agreed."""
    with Processes(2) as group:
        for message, seconds in group.run(call_in_another_order, forward):
            assert "is in a step of build " in message
            assert "all ranks of a group build the same steps and call them in the same order" in message
            assert message.startswith("RankError: ")
            assert seconds < SOON


def count_freed_buffers(rank: int, schedule: str) -> tuple[int, int]:
    """Return how many send buffers this rank has freed at the end of a step, and how many there were."""
    model, params, _ = cut_blocks(4, 2)
    program = pipeline_program(model, fpipe.schedules.get(schedule)(2), microbatches=8)
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(16)))
    counts, wait_for_sends = list[tuple[int, int]](), Transfers.wait_for_sends

    def count_and_wait(transfers: Transfers) -> None:
        messages = [message for message, _ in transfers._sends.values()]
        counts.append((sum(message is None for message in messages), len(messages)))
        wait_for_sends(transfers)

    Transfers.wait_for_sends = count_and_wait
    try:
        step(local_part(program, rank, params), rows(16))
    finally:
        Transfers.wait_for_sends = wait_for_sends
    return counts[-1]


def test_a_send_buffer_is_freed_once_a_later_message_acknowledges_it(pair: Processes):
    """Gradients acknowledge all that the first rank sent. The last rank gets no acknowledgement under GPipe, and gets
    it by later activations under 1F1B."""
    for schedule, lower_bound in (("one_f_one_b", 5), ("gpipe", 0)):
        (first_freed, first_total), (last_freed, last_total) = pair.run(count_freed_buffers, schedule)
        assert first_freed == first_total > 7
        assert lower_bound <= last_freed < last_total


def step_during_a_receive(rank: int) -> list[bool]:
    """Run steps while a receive of the caller is pending on the group."""
    received = torch.zeros(3)
    pending = dist.irecv(received, 1 - rank)
    program, alone, step, params = build_blocks(broadcast=True)
    loss = [step(local_part(program, rank, params), rows()).loss for _ in range(2)]
    dist.send(torch.full((3,), 1.0 + rank), 1 - rank)
    assert pending is not None
    pending.wait()
    local_loss = alone(params, rows()).loss
    return [torch.equal(step_loss, local_loss) for step_loss in loss] + [bool((received == 2 - rank).all())]


def test_a_pending_receive_of_the_caller_takes_no_message(pair: Processes):
    """Used to receive a message of fpipe with the same number, and gloo ended the process."""
    assert pair.run(step_during_a_receive) == [[True] * 3] * 2


def build_from_example(rank: int, on_meta: bool) -> str:
    """Build with an example that lacks the parameters of the second rank, or has them on meta."""
    model = fpipe.from_functions([lambda p, x: (x @ p["w"]).tanh()] * 2, MSE)
    program, params = (
        pipeline_program(model, fpipe.schedules.gpipe(2)),
        tuple({"w": torch.ones(8, 8)} for _ in range(2)),
    )
    mine = local_part(program, rank, params)
    example = tuple({"w": torch.empty(8, 8, device="meta")} if stage is None else stage for stage in mine)
    example = example if on_meta else mine
    return time_call(
        lambda: fpipe.build(program, model, runtime="distributed", example=(example, rows()))(mine, rows())
    )[0]


def test_an_example_needs_the_parameters_of_all_stages(pair: Processes):
    """Used to report ranks that differ in parameters, and not that the example must be complete."""
    assert pair.run(build_from_example, True) == ["worked"] * 2
    for message in pair.run(build_from_example, False):
        assert message.endswith(
            "An example has the parameters of all stages: on meta, those that a rank does not hold."
        )


@torch.library.custom_op("fpipe_tests::promises", mutates_args=())
def promises(x: Tensor, kind: str) -> Tensor:
    """Return another tensor than the fake kernel of the op promises."""
    return {"strides": x.t().contiguous().t(), "dtype": x.double(), "shape": x[:, :4].clone()}[kind]


promises.register_fake(lambda x, what: torch.empty_like(x))
promises.register_autograd(lambda ctx, grad: (grad, None))


def send_broken_promise(rank: int, kind: str) -> str:
    model = fpipe.from_functions([lambda p, x: promises(x * p["w"], kind), lambda p, x: x * p["w"]], MSE)
    params = tuple({"w": torch.ones(8)} for _ in range(2))
    program = pipeline_program(model, fpipe.schedules.gpipe(2))
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    return time_call(lambda: step(local_part(program, rank, params), rows()))[0]


RETURNED = {"strides": "float32[3, 8]|[1, 3]", "dtype": "float64[3, 8]|[8, 1]", "shape": "float32[3, 4]|[4, 1]"}
PROMISED = (
    "is to be sent, and the trace promised float32[3, 8] with strides [8, 1]. A custom op's register_fake returns"
)


@pytest.mark.parametrize("kind", RETURNED)
def test_a_value_that_differs_from_its_trace_is_not_sent(pair: Processes, kind: str):
    """Used to be received as the trace promised it: another loss, or the end of the process."""
    sender_message, receiver_message = pair.run(send_broken_promise, kind)
    assert sender_message.startswith(f"TypeError: {RETURNED[kind].replace('|', ' with strides ')} {PROMISED}")
    assert receiver_message.startswith(
        "RankError: rank 0 failed in SEND(y[0,0]>1): stage 0 (<lambda>), microbatch 0, rank 0: TypeError: "
    )


def step_on_shuffled_rows(rank: int, seeds: tuple[int, int], check: str, last_step: int) -> list[str]:
    """Run steps on equal rows, then one step on rows that each rank shuffled by its seed."""
    program, _, step, params = build_blocks(check_batch=check)
    outcomes: list[str] = []
    for step_number in range(1, last_step + 1):
        order = torch.randperm(
            10, generator=torch.Generator().manual_seed(seeds[rank] if step_number == last_step else 0)
        )
        batch = tuple(leaf[order] for leaf in rows())
        outcomes.append(time_call(lambda batch=batch: step(local_part(program, rank, params), batch))[0])
    return [
        outcome for step_number, outcome in enumerate(outcomes, 1) if outcome != "worked" or step_number == last_step
    ]


COMPARED = {("first", 1), ("first", 3), ("first", 100), ("always", 12)}
ADVICE = ". This is rank {}; all ranks come to step {} with the same. A DataLoader that shuffles needs the same seed"


@pytest.mark.parametrize(("check", "last_step"), [*sorted(COMPARED), ("first", 12), ("never", 3)])
def test_ranks_that_shuffle_differently_are_refused(pair: Processes, check: str, last_step: int):
    """Used to pair the inputs of rank 0 with other targets of the last rank, silently."""
    if last_step < 100:
        assert pair.run(step_on_shuffled_rows, (0, 0), check, last_step) == [["worked"]] * 2
    for rank, (outcome,) in enumerate(pair.run(step_on_shuffled_rows, (0, 1), check, last_step)):
        if (check, last_step) in COMPARED:
            assert outcome.startswith("ValueError: rank 1 differs from rank 0 in its batch[0]: float32[10, 8]: ")
            assert ADVICE.format(rank, last_step) in outcome
        else:
            assert outcome == "worked"


def step_on_partial_batch(rank: int) -> list[str]:
    """Step with only the side of the batch that a rank reads, or with None in the middle."""
    program, _, step, params = build_blocks(3)
    (inputs, targets), mine = rows(), local_part(program, rank, params)
    batch = [(inputs, None), None, (None, targets)][rank]
    return [
        time_call(lambda: step(mine, batch))[0],
        time_call(lambda: step(mine, rows() if rank else (inputs, None)))[0],
    ]


def test_a_rank_without_a_batch_compares_none(trio: Processes):
    assert trio.run(step_on_partial_batch) == [["worked", "worked"]] * 3


def step_on_replicas(rank: int, has_other_rows: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, params, _ = cut_blocks(4, 2)
    program = pipeline_program(model, fpipe.schedules.one_f_one_b(2), microbatches=2)
    program = fpipe.data_parallel("dp")(program)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rows(4)))
    batch = tuple(leaf + (has_other_rows and mesh.get_local_rank("dp")) for leaf in rows(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(local_part(program, mesh.get_local_rank("pp"), params), batch)
    return [str(warning.message) for warning in caught if "replica" in str(warning.message)]


@pytest.mark.parametrize("has_other_rows", [False, True])
def test_replicas_with_the_same_rows_warn_once(four: Processes, has_other_rows: bool):
    """Each of four ranks used to."""
    messages = [message for messages in four.run(step_on_replicas, has_other_rows) for message in messages]
    assert len(messages) == (not has_other_rows)
    assert all("replica 0 and replica 1 were handed the same rows" in message for message in messages)
