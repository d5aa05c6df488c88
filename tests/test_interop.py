"""Torch's pipeline tables and JSON: reading keeps the meaning, and torch reads our tables."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.interop import from_json, to_json, to_megatron, to_primus, torch_pipelining
from fpipe.program import Program, ProgramError, parts_of
from property_tests.drawn_programs import DrawnProgram, programs
from tests.torch_versions import POSTS_RECEIVES_BY_THE_TABLE

DATA_FOLDER = Path(__file__).parent / "data"
ORDERS: dict[str, list[str]] = json.loads((DATA_FOLDER / "torch_orders.json").read_text())["tables"]
COMMS: dict[str, list[str]] = json.loads((DATA_FOLDER / "torch_comms.json").read_text())["tables"]
WAITS: dict[str, list[str]] = json.loads((DATA_FOLDER / "torch_waits.json").read_text())["tables"]

# Tables of four chunks a rank are long, and alike in their cells: one runs, the rest are deep tests.
LONG = ("LoopedBFS/local=4", "Interleaved1F1B/local=4")
every_table = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name.startswith(LONG) else ()) for name in COMMS]
)


def order_table(name: str) -> str:
    """Return a table of computation in torch's format."""
    rows = [["" if cell == "." else cell for cell in row.split()] for row in ORDERS[name]]
    return to_csv([[cell.replace(")", ")OVERLAP_F_B") for cell in row] for row in rows])


def comms_table(name: str) -> str:
    return to_csv([row.split() for row in COMMS[name]])


def to_csv(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def one_f_one_b() -> Program:
    return fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(2))


@every_table
def test_transfers_written_for_an_order_are_those_torch_adds(name: str):
    program = torch_pipelining.from_csv(order_table(name))
    assert torch_pipelining.to_csv(program, format="compute_comms", waits=False) == comms_table(name)


@pytest.mark.parametrize("name", WAITS)
def test_waits_stand_where_torch_adds_them(name: str):
    """torch 2.15 lowers these orders to these waits."""
    program = torch_pipelining.from_csv(order_table(name))
    text = torch_pipelining.to_csv(program, format="compute_comms", waits=True)
    assert text == to_csv([row.split() for row in WAITS[name]])
    assert torch_pipelining.from_csv(text) == torch_pipelining.from_csv(comms_table(name))


@every_table
@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
def test_torch_loads_the_tables_we_write(name: str, format: str, tmp_path: Path):
    """torch's loader and checks run with stand-in stages; no process group is needed."""
    from torch.distributed.pipelining import schedules

    program = torch_pipelining.from_csv(comms_table(name))
    file = tmp_path / "schedule.csv"
    file.write_text(torch_pipelining.to_csv(program, format=format))
    stage = SimpleNamespace(num_stages=program.stages, group_size=program.ranks, group_rank=0, has_backward=True)
    runtime = schedules._PipelineScheduleRuntime([stage], program.microbatches, loss_fn=lambda y, target: y)
    runtime._load_csv(str(file), format=format)
    assert tuple(runtime.stage_index_to_group_rank[stage] for stage in range(program.stages)) == program.placement
    loaded = [[str(action) for action in row] for row in runtime.pipeline_order_with_comms.values()]
    if format == "compute_only":
        if POSTS_RECEIVES_BY_THE_TABLE:
            assert loaded == list(csv.reader(comms_table(name).splitlines()))
        return
    assert loaded == list(csv.reader(file.read_text().splitlines()))
    if "DualPipeV" not in name:  # torch's own simulation knows neither overlap nor ops on weights
        for rank, row in runtime.pipeline_order_with_comms.items():
            runtime.pipeline_order_with_comms[rank] = [
                action for action in row if not re.search("SHARD|GRAD|WAIT", str(action))
            ]
        runtime._simulate()


def test_a_torch_schedule_orders_an_own_program():
    program = fpipe.chain(
        fpipe.split(2), fpipe.checkpoint("always"), torch_pipelining.schedule("0F0,0F1,0B0,0B1"), fpipe.merge()
    )(fpipe.program(1))
    assert program.table() == [["0F0", "0F1", "0R0", "0B0", "0R1", "0B1"]]


def test_a_compute_table_may_contain_reduce_grad():
    """Torch's GPipe writes such tables; they used to be refused for missing transfers."""
    table = "0F0,0B0,0REDUCE_GRAD\n,1F0,1B0,1REDUCE_GRAD"
    assert torch_pipelining.from_csv(table) == torch_pipelining.from_csv("0F0,0B0\n1F0,1B0")
    with pytest.raises(ProgramError, match="the table has no 0SEND_F0"):
        torch_pipelining.from_csv(table, format="compute_comms")


@pytest.mark.parametrize("read_table", [torch_pipelining.from_csv, fpipe.schedules.from_table])
def test_a_missing_file_is_named_with_the_closest(read_table: Callable[[Path], object], tmp_path: Path):
    """Used to say only `[Errno 2] No such file or directory`."""
    (tmp_path / "orders.csv").write_text("0F0,0B0")
    assert read_table(tmp_path / "orders.csv")
    with pytest.raises(FileNotFoundError) as error_info:
        read_table(tmp_path / "order.csv")
    suggestion = f"Did you mean {str(tmp_path / 'orders.csv')!r}?"
    assert str(error_info.value) == f"there is no file {str(tmp_path / 'order.csv')!r}. {suggestion}"
    with pytest.raises(FileNotFoundError, match=r"there is no file 'order\.csv' here, in "):
        read_table(Path("order.csv"))
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        read_table(tmp_path)
    (tmp_path / "orders.csv").write_bytes(b"0F0,\xff")
    with pytest.raises(ProgramError, match="this is not text: byte 4 is no UTF-8"):
        read_table(tmp_path / "orders.csv")


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, column 2: '1X0' is not a cell of torch.distributed.pipelining"),
        ("0F0,0B0\n,,1F0,1B0garbage", "line 2, column 4: '1B0garbage' is not a cell"),
        ("0F,0B0", "line 1, column 1: '0F' is not a cell"),
        ("0UNSHARD1,0F0,0B0", "line 1, column 1: '0UNSHARD1' is not a cell"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B", "line 1, column 2: .* is to overlap two ops of computation"),
        ("0F0,(0B0)OVERLAP_F_B", "line 1, column 2: .* is to overlap two ops"),
        ("0F0,0B0,0F0", "line 1, column 3: 0F0 stands in line 1, column 1 already; each stands once"),
        ("0F0,0B0,7F0", "line 1, column 3: 7F0 names stage 7, but the table has no forward of stage 1"),
        ("0F0,0B0,0F5", "line 1, column 3: 0F5 names microbatch 5, but the table has no forward of microbatch 1"),
        ("0F0,0B0,4RESHARD", "line 1, column 3: 4RESHARD names stage 4"),
        ("0F0,0B0\n\n1F0,1B0", "line 2 has no cells"),
        ("", "the table is empty"),
        ("order.csv", r"pass pathlib.Path\('order.csv'\)"),
        ("0F0\n1F0,1B0", "the table has 0F0 without its backward"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "wait for each other in a circle"),
        ("0F0,0B0,0W0", "0W0 stands twice.*notation='zb'"),  # as torch 2.5 wrote ZB1P
        ("0F0,0SEND_F0,0B0", "line 1, column 2: 0SEND_F0 moves nothing"),
        (
            "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            "the table has no 0RECV_B0, though the value is read on another",
        ),
        ("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0", "rank 0, step 2: 0B0 reads .* comes later"),
    ],
)
def test_a_wrong_table_is_refused_with_line_and_column(table: str, sentence: str):
    with pytest.raises(ProgramError, match=sentence):
        torch_pipelining.from_csv(table)


def test_json_holds_the_table_of_the_program():
    program = one_f_one_b()
    parsed = json.loads(to_json(program))
    assert (parsed["stages"], parsed["microbatches"], parsed["ranks"]) == (2, 2, 2)
    rows = [[op for op in parsed["ops"] if op["rank"] == rank and op["kind"] in "FB"] for rank in range(2)]
    assert [[f"{op['stage']}{op['kind']}{op['microbatch']}" for op in row] for row in rows] == program.table()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[:-10], "this is not JSON: line"),
        (lambda text: "[]", 'this JSON is not a program: it says "format": "fpipe.program" at the top'),
        (lambda text: text.replace('"kind": "F"', '"kind": 3', 1), r"res\[0,0\] = 3\[0,0\] params"),
        (lambda text: text.replace('"reads"', '"read"', 1), "an entry lacks 'reads'"),
        (lambda text: text.replace('"homes": [0]', '"homes": 0', 1), "that to_json writes: .* not iterable"),
        (lambda text: text.replace('"F"', '"F G"', 1), r"res\[0,0\] = F G\[0,0\] params"),
        (lambda text: text.replace('"F"', '"Q"', 1), "'Q' is not a kind of op"),
        (lambda text: text.replace('"writes": ["dx[1,0]"', '"writes": ["dx[1,7]"', 1), "reads dx.1,0."),
    ],
)
def test_json_that_is_no_program_is_refused(change, sentence: str):
    with pytest.raises(ProgramError, match=sentence):
        from_json(change(to_json(one_f_one_b())))


@pytest.mark.parametrize("name", fpipe.schedules.names())
@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
def test_every_schedule_survives_the_round_trip_or_is_refused(name: str, format: str):
    """What torch cannot run: replicas, slices, recompute, offload."""
    program = fpipe.schedules.about(name).program(2, 4)
    is_refused = {
        op.kind for op in parts_of(program.ops) if op.kind in ("R", "LOAD", "OFFLOAD") or op.slice is not None
    } or any(isinstance(ranks, tuple) for ranks in program.placement)
    if is_refused:
        with pytest.raises(ProgramError, match=r"torch's (tables|runtime)"):
            torch_pipelining.to_csv(program, format=format)
        return
    round_trip = torch_pipelining.from_csv(torch_pipelining.to_csv(program, format=format), format=format)
    assert round_trip.table() == program.table()
    assert format == "compute_comms" or round_trip == program


def test_gathers_and_scatters_become_torchs_unshard_and_reshard():
    program = fpipe.shard(gather="use", lead=0)(one_f_one_b())
    rank_0_row, _ = torch_pipelining.to_csv(program, format="compute_comms", waits=True).splitlines()
    assert rank_0_row == (
        "0UNSHARD,0F0,0SEND_F0,0RESHARD,0UNSHARD,0F1,0SEND_F1,0RECV_B0,0RESHARD,0UNSHARD,0B0,0WAIT_SEND_F0,0RESHARD,"
        "0UNSHARD,0RECV_B1,0B1,0WAIT_SEND_F1,0RESHARD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD"
    )


@given(
    st.sampled_from(["gpipe", "one_f_one_b", "zb_h1", "interleaved", "zbv"]),
    st.sampled_from(["step", "run", "use"]),
    st.integers(2, 3),
)
def test_gathers_read_from_a_table_rebuild_its_program(name: str, gather: Any, ranks: int):
    base = fpipe.schedules.about(name).program(ranks, 4)
    program = fpipe.shard(gather=gather, lead=0)(base)
    text = torch_pipelining.to_csv(program, format="compute_comms", waits=False)
    rebuilt = fpipe.shard(gather=torch_pipelining.gathers(text), lead=0)(base)
    if gather == "step":  # it gathers at the start of the step
        rebuilt_text = torch_pipelining.to_csv(rebuilt, format="compute_comms", waits=False)
        assert sorted(re.split(r"[,\n]", rebuilt_text)) == sorted(re.split(r"[,\n]", text))
    else:
        assert rebuilt == program


CHAINS = st.integers(1, 5).map(lambda stages: ("batch", *range(stages - 1)))
FINAL_TRANSFORMS = {"nothing": fpipe.identity(), "communicate()": fpipe.communicate(), "free()": fpipe.free()}


def without_recompute(plan: DrawnProgram) -> Program:
    """Torch's tables have no R."""
    return DrawnProgram(plan.takes, plan.microbatches, frozenset(), plan.halved, plan.table).program


@pytest.mark.law
@given(programs(CHAINS).map(without_recompute))
def test_an_order_written_for_torch_is_read_back(program: Program):
    assert torch_pipelining.from_csv(torch_pipelining.to_csv(program)) == program


@pytest.mark.law
@given(programs(CHAINS).map(without_recompute))
def test_transfers_written_for_torch_are_read_back(program: Program):
    text = torch_pipelining.to_csv(program, format="compute_comms")
    program_read = torch_pipelining.from_csv(text, format="compute_comms")
    assert program_read.table() == program.table()
    assert torch_pipelining.to_csv(program_read, format="compute_comms") == text


@pytest.mark.law
@given(programs(), st.sampled_from(sorted(FINAL_TRANSFORMS)))
def test_json_is_read_back(plan: DrawnProgram, transform: str):
    program = FINAL_TRANSFORMS[transform](plan.program)
    assert from_json(to_json(program)) == program


# Megatron-LM and Primus


def named_program(schedule: str, ranks: int, microbatches: int) -> Program:
    return fpipe.schedules.notations.parse(schedule).program(ranks, microbatches)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "interleaved:stages=9", "gpipe"])
def test_megatron_runs_its_table_in_the_order_of_the_program(schedule: str):
    """Megatron-LM runs warm-up forwards, then a forward and a backward in turn, then the last backwards."""
    program = named_program(schedule, 3, 6)
    fields = json.loads(to_megatron(program))
    table, chunks = fields["schedule_table"], program.stages // 3
    for rank, warmup in enumerate(fields["num_warmup_microbatches"]):
        cells: list[str] = []
        for iteration in range(len(table) + warmup):
            if iteration < len(table):
                microbatch, chunk = table[iteration]
                cells.append(f"{chunk * 3 + rank}F{microbatch}")
            if iteration >= warmup:
                microbatch, chunk = table[iteration - warmup]
                cells.append(f"{(chunks - 1 - chunk) * 3 + rank}B{microbatch}")
        assert cells == program.table()[rank]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_h1", "zbv"])
def test_primus_runs_its_table_in_the_order_of_the_program(schedule: str):
    """A rank of Primus runs its nodes in order, and waits at a receive until the message has been sent."""
    program = named_program(schedule, 3, 6)
    rows = json.loads(to_primus(program))
    stages_by_rank = [[s for s, home in enumerate(program.placement) if home == rank] for rank in range(3)]
    cells: list[list[str]] = [[] for _ in rows]
    messages: set[tuple[object, ...]] = set()
    positions, is_stuck = [0, 0, 0], False
    while not is_stuck:
        is_stuck = True
        for rank, row in enumerate(rows):
            for node in row[positions[rank] :]:
                kind, microbatch, chunk, args = (node[name] for name in ("func_type", "mini_batch", "chunk", "args"))
                ends = (args["from_pp_rank"], args["to_pp_rank"]) if args else ()
                if kind[0] == "S":
                    messages.add((kind[1], microbatch, *ends, chunk, args["send_to_chunk"]))
                elif kind[0] == "R":
                    message = (kind[1], microbatch, *ends, args["recv_from_chunk"], chunk)
                    if message not in messages:
                        break
                    messages.remove(message)
                else:
                    letter = {"BW": "B", "B": "I"}.get(kind, kind)
                    cells[rank].append(f"{stages_by_rank[rank][chunk]}{letter}{microbatch}")
                positions[rank] += 1
                is_stuck = False
    assert not messages
    assert cells == program.table()


@pytest.mark.parametrize(
    ("write", "schedule", "error"),
    [
        (to_megatron, "zb_h1", "I0: Megatron-LM's table has no I"),
        (to_megatron, "hanayo", "F0 is on rank .; Megatron-LM has it on rank"),
        (to_megatron, "looped_bfs", "rank 0 runs .B7 where Megatron-LM runs .B0: its order is 1F1B"),
        (to_primus, "dualpipev", r"\(.*\): Primus's table has no PAIR"),
        (to_primus, "chimera", "stage 0 is on ranks"),
    ],
)
def test_tables_of_other_runtimes_refuse_what_they_cannot_say(
    write: Callable[[Program], str], schedule: str, error: str
):
    with pytest.raises(ProgramError, match=error):
        write(named_program(schedule, 4, 8))
