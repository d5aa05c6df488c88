"""Messages as the hardware carries them: what waits for what, and which orders would stand still."""

import json
from pathlib import Path

import pytest

import fpipe
from fpipe.interop.torch_pipelining import from_csv
from fpipe.runtimes.processes.message_order import POSTED_BYTES, messages_of, peak_bytes_in_flight

HALF = fpipe.Costs(transfer=0.5)
RULES = ["eager", "nccl_directions", "nccl_pairs", "nccl", "rendezvous"]
TORCH = json.loads((Path(__file__).parent / "data" / "torch_comms.json").read_text())["tables"]


def torchs(rows: list[str]) -> fpipe.Program:
    """A program with the transfers of a table of torch's runtime, where they stand there."""
    return from_csv("\n".join(",".join(row.split()) for row in rows), format="compute_comms")


def times(program: fpipe.Program, rules: list[str] = RULES) -> list[float]:
    return [fpipe.simulate(program, HALF, messages=rule).makespan for rule in rules]


def test_a_send_waits_for_its_receive():
    """Rank 1 is busy with stage 1 for three seconds before it takes what stage 0 has made in one."""
    step = fpipe.chain(fpipe.forward_only(), fpipe.place([0, 1, 1, 0]), fpipe.communicate())
    program = step(fpipe.program(4, inputs=[("batch",), ("batch",), (0, 1), (2,)]))
    rows = ["0F0 SEND(y[0,0]>1) RECV(y[2,0]@0) 3F0", "1F0 RECV(y[0,0]@1) 2F0 SEND(y[2,0]>0)"]
    assert [[cell for cell in row if "SPLIT" not in cell] for row in program.table(comms=True)] == [
        *map(str.split, rows)
    ]
    costs = fpipe.Costs(forward=[1, 3, 1, 1], transfer=0.5)
    for rule, leaves, makespan in [("eager", 1, 5.5), ("nccl", 3, 6), ("rendezvous", 3, 6)]:
        timeline = fpipe.simulate(program, costs, messages=rule)
        assert [*timeline.transfers[0][1:]] == [0, 1, leaves, leaves + 0.5]
        assert timeline.makespan == makespan
    assert "its receiver" in str(timeline.critical_path[1])


def test_what_is_queued_first_holds_up_what_follows():
    """pytorch#188833: the receive of what has just been sent stands in the queue before sends that are ready."""
    rows = TORCH["Interleaved1F1B/local=2/mb=8/ranks=4"]
    assert times(torchs(rows)) == [64, 64, 64, 91.5, 136]
    path = fpipe.simulate(torchs(rows), HALF, messages="nccl").critical_path
    assert sum(step.why == "queue" for step in path) > 10
    compute = [[cell for cell in row if cell] for row in torchs(rows).table()]
    ours = fpipe.chain(fpipe.split(8), fpipe.schedules.from_table(compute), fpipe.merge())(fpipe.program(8))
    assert times(ours) == [64, 67.5, 72, 83.5, 103]


@pytest.mark.parametrize("rule", ["rendezvous", "nccl"])
def test_a_path_over_messages_that_take_no_time_ends(rule: str):
    """Such a message was found as its own cause, for ever, where a rank waits for a GATHER, too."""
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(3), fpipe.merge(), fpipe.shard(gather="use"))
    timeline = fpipe.simulate(program(fpipe.program(3)), fpipe.Costs(gather=1.5, scatter=1.5), messages=rule)
    assert timeline.critical_path[-1].end == timeline.makespan


@pytest.mark.parametrize("name", TORCH)
def test_what_torch_runs_ends_and_waits_no_less_under_a_stricter_rule(name: str):
    found = times(torchs(TORCH[name]))
    assert found == sorted(found)


def test_sends_that_wait_for_receives_behind_them_are_refused():
    """pytorch#172668: each receive just before its reader, and sends that stay until they are received."""
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 "
        "2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 "
        "3RECV_F1 3F1 3B1 3SEND_B1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
    ]
    program = torchs(rows)
    assert times(program, RULES[:2]) == [18, 18.5]
    sentence = (
        r'under messages="{}" ranks wait for one another: rank 0 in that of y\[0,1\] 0 > 1, rank 1 in that of '
        r"y\[1,0\] 1 > 0\.\nLeave SEND and RECV out of the program"
    )
    with pytest.raises(fpipe.ProgramError, match=sentence.format("rendezvous")):
        fpipe.simulate(program, HALF, messages="rendezvous")
    with pytest.raises(fpipe.ProgramError, match='under messages="nccl" ranks wait for one another: rank 0 in that of'):
        fpipe.simulate(program, HALF, messages="nccl")


def test_communicators_that_are_made_at_their_first_use_can_wait_in_a_circle():
    """Megatron-LM#5240: each rank begins with the next one of a ring, though all values would arrive."""
    inputs = [("batch",), ("batch",), ("batch",), (0,), (1,), (2, 3, 4)]
    step = fpipe.chain(fpipe.forward_only(), fpipe.place([0, 1, 2, 1, 2, 0]), fpipe.communicate())
    program = step(fpipe.program(6, inputs=inputs))
    assert times(program, RULES[:2]) == [4, 4]
    sentence = (
        r'under messages="nccl_pairs" ranks wait for one another to make communicators: rank 0 makes that of y\[0,0\] 0 > '
        r"1, rank 1 makes that of y\[1,0\] 1 > 2, rank 2 makes that of y\[2,0\] 2 > 0\."
    )
    with pytest.raises(fpipe.ProgramError, match=sentence):
        fpipe.simulate(program, HALF, messages="nccl_pairs")


def test_what_is_posted_or_not_acknowledged_is_counted():
    """GPipe of three microbatches: nothing comes back before all have gone, so rank 0 holds y[0,0] .. y[0,2] until dx
    comes, and has posted three dx: all are small. Of large ones it has posted the first and two more."""
    step = fpipe.chain(fpipe.split(5), fpipe.schedules.gpipe(2), fpipe.communicate())(fpipe.program(2))
    every = messages_of(step)
    small = peak_bytes_in_flight(step, {one.number: 10 for one in every})
    assert small == [5 * 10 + 5 * 10, 5 * 10]  # rank 1 is told by nobody, and holds dx to the end
    large = peak_bytes_in_flight(step, {one.number: POSTED_BYTES for one in every})
    assert large == [(3 + 5) * POSTED_BYTES, 5 * POSTED_BYTES]
