"""Messages in the order of the hardware: what each waits for, and which orders deadlock."""

import json
from pathlib import Path

import pytest

import fpipe
from fpipe.interop.torch_pipelining import from_csv
from fpipe.runtimes.processes.message_order import POSTED_BYTES, messages_of, peak_bytes_in_flight

HALF_SECOND_TRANSFER = fpipe.Costs(transfer=0.5)
RULES = ["eager", "nccl_directions", "nccl_pairs", "nccl", "rendezvous"]
TORCH_TABLES = json.loads((Path(__file__).parent / "data" / "torch_comms.json").read_text())["tables"]


def torch_program(rows: list[str]) -> fpipe.Program:
    """Return a program with the transfers of a torch table, in their places."""
    return from_csv("\n".join(",".join(row.split()) for row in rows), format="compute_comms")


def makespans(program: fpipe.Program, rules: list[str] = RULES) -> list[float]:
    return [fpipe.simulate(program, HALF_SECOND_TRANSFER, messages=rule).makespan for rule in rules]


def test_a_send_waits_for_its_receive():
    """Rank 1 computes stage 1 for three seconds before it receives the output of stage 0, ready after one."""
    pipeline = fpipe.chain(fpipe.forward_only(), fpipe.place([0, 1, 1, 0]), fpipe.communicate())
    program = pipeline(fpipe.program(4, inputs=[("batch",), ("batch",), (0, 1), (2,)]))
    rows = ["0F0 SEND(y[0,0]>1) RECV(y[2,0]@0) 3F0", "1F0 RECV(y[0,0]@1) 2F0 SEND(y[2,0]>0)"]
    assert [[cell for cell in row if "SPLIT" not in cell] for row in program.table(comms=True)] == [
        *map(str.split, rows)
    ]
    costs = fpipe.Costs(forward=[1, 3, 1, 1], transfer=0.5)
    for rule, start, makespan in [("eager", 1, 5.5), ("nccl", 3, 6), ("rendezvous", 3, 6)]:
        timeline = fpipe.simulate(program, costs, messages=rule)
        assert [*timeline.transfers[0][1:]] == [0, 1, start, start + 0.5]
        assert timeline.makespan == makespan
    assert "its receiver" in str(timeline.critical_path[1])


def test_an_earlier_message_in_a_queue_blocks_later_ones():
    """pytorch#188833: the receive of a message just sent is queued before sends that are ready."""
    rows = TORCH_TABLES["Interleaved1F1B/local=2/mb=8/ranks=4"]
    assert makespans(torch_program(rows)) == [64, 64, 64, 91.5, 136]
    path = fpipe.simulate(torch_program(rows), HALF_SECOND_TRANSFER, messages="nccl").critical_path
    assert sum(step.reason == "queue" for step in path) > 10
    compute = [[cell for cell in row if cell] for row in torch_program(rows).table()]
    own_program = fpipe.chain(fpipe.split(8), fpipe.schedules.from_table(compute), fpipe.merge())(fpipe.program(8))
    assert makespans(own_program) == [64, 67.5, 72, 83.5, 103]


@pytest.mark.parametrize("rule", ["rendezvous", "nccl"])
def test_a_critical_path_over_instant_messages_ends(rule: str):
    """Used to loop: an instant message was its own cause, also where a rank waits for a GATHER."""
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(3), fpipe.merge(), fpipe.shard(gather="use"))
    timeline = fpipe.simulate(program(fpipe.program(3)), fpipe.Costs(gather=1.5, scatter=1.5), messages=rule)
    assert timeline.critical_path[-1].end == timeline.makespan


@pytest.mark.parametrize("name", TORCH_TABLES)
def test_a_stricter_rule_never_shortens_torchs_tables(name: str):
    seconds = makespans(torch_program(TORCH_TABLES[name]))
    assert seconds == sorted(seconds)


def test_sends_that_wait_for_later_receives_are_refused():
    """pytorch#172668: each receive comes just before its reader, and a send blocks until it is received."""
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 "
        "2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 "
        "3RECV_F1 3F1 3B1 3SEND_B1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
    ]
    program = torch_program(rows)
    assert makespans(program, RULES[:2]) == [18, 18.5]
    sentence = (
        r'under messages="{}" ranks wait for one another: rank 0 in that of y\[0,1\] 0 > 1, rank 1 in that of '
        r"y\[1,0\] 1 > 0\.\nLeave SEND and RECV out of the program"
    )
    with pytest.raises(fpipe.ProgramError, match=sentence.format("rendezvous")):
        fpipe.simulate(program, HALF_SECOND_TRANSFER, messages="rendezvous")
    with pytest.raises(fpipe.ProgramError, match='under messages="nccl" ranks wait for one another: rank 0 in that of'):
        fpipe.simulate(program, HALF_SECOND_TRANSFER, messages="nccl")


def test_communicators_made_at_first_use_can_deadlock():
    """Megatron-LM#5240: each rank of a ring first connects to the next, though every value would arrive."""
    inputs = [("batch",), ("batch",), ("batch",), (0,), (1,), (2, 3, 4)]
    pipeline = fpipe.chain(fpipe.forward_only(), fpipe.place([0, 1, 2, 1, 2, 0]), fpipe.communicate())
    program = pipeline(fpipe.program(6, inputs=inputs))
    assert makespans(program, RULES[:2]) == [4, 4]
    sentence = (
        r'under messages="nccl_pairs" ranks wait for one another to make communicators: rank 0 makes that of y\[0,0\] '
        r"0 > 1, rank 1 makes that of y\[1,0\] 1 > 2, rank 2 makes that of y\[2,0\] 2 > 0\."
    )
    with pytest.raises(fpipe.ProgramError, match=sentence):
        fpipe.simulate(program, HALF_SECOND_TRANSFER, messages="nccl_pairs")


def test_peak_bytes_count_posted_and_unacknowledged_messages():
    """GPipe sends all outputs before a gradient returns: rank 0 holds all y until dx comes.

    It posts receives for all small dx, but of large ones for the first and two more.
    """
    program = fpipe.chain(fpipe.split(5), fpipe.schedules.gpipe(2), fpipe.communicate())(fpipe.program(2))
    messages = messages_of(program)
    small = peak_bytes_in_flight(program, {message.number: 10 for message in messages})
    assert small == [5 * 10 + 5 * 10, 5 * 10]  # nothing acknowledges dx to rank 1, which holds all to the end
    large = peak_bytes_in_flight(program, {message.number: POSTED_BYTES for message in messages})
    assert large == [(3 + 5) * POSTED_BYTES, 5 * POSTED_BYTES]
