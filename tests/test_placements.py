"""Each value is replicated, dealt, partial or sharded over replicas, and no op takes it for something else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fpipe
from fpipe.cli.app import app
from fpipe.program import Program, ProgramError, Value
from property_tests.test_shard_laws import counting_model, model_of, tied_model
from tests.processes import Processes

HYBRID = [fpipe.shard("shard", gather="run"), fpipe.data_parallel("replicate")]
REPLICAS: dict[str, list[Any]] = {
    "replicated": [fpipe.data_parallel()],
    "sharded": [fpipe.shard()],
    "gathered by use": [fpipe.shard(gather="use", scatter="microbatch")],
    "hybrid": HYBRID,
    "updated": [fpipe.data_parallel(), fpipe.update("AdamW", clip=1.0)],
    "updated shards": [fpipe.shard(), fpipe.update("SGD")],
    "scaled shards": [fpipe.shard(), fpipe.update("AdamW", clip=1.0, loss_scale="dynamic"), fpipe.steps(2)],
    "hybrid, updated": [*HYBRID, fpipe.update("SGD", clip=1.0, grads=True, lr=0.1)],
    "validated after": [fpipe.data_parallel(), fpipe.update("SGD", clip=1.0, validate="after")],
}


def program_of(
    replicas: str, schedule: str = "one_f_one_b", model: fpipe.Model | int = 2, microbatches: int = 4
) -> Program:
    """Return the program of two ranks under a schedule, with replicas."""
    transforms = [fpipe.split(microbatches), fpipe.schedules.get(schedule)(2), fpipe.merge(losses=True)]
    return fpipe.chain(*transforms, *REPLICAS[replicas])(fpipe.program(model))


def with_changed_sum(program: Program, position: int, count: int) -> Program:
    """Return the program with the sum at a position left out (0), or made twice (2)."""
    op = program.ops[position]
    final = op.reads[0] if count == 0 else op.writes[0]._replace(name="twice")
    ops = [later._replace(reads=tuple(final if v == op.writes[0] else v for v in later.reads)) for later in program.ops]
    ops[position : position + 1] = [] if count == 0 else [op, op._replace(reads=op.writes, writes=(final,))]
    outputs = (end._replace(value=final) if end.value == op.writes[0] else end for end in program.outputs)
    return Program.trusted(program.inputs, tuple(ops), tuple(outputs))


def programs_with_changed_sums(program: Program) -> Iterator[Program]:
    for position, op in enumerate(program.ops):
        if op.kind in ("REDUCE", "SCATTER"):
            yield from (with_changed_sum(program, position, count) for count in (0, 2))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_programs_of_all_schedules_pass(replicas: str):
    for schedule in ("gpipe", "zb_h1", "dualpipev", "zbv", "interleaved"):
        fpipe.check_placements(fpipe.communicate()(program_of(replicas, schedule, 4)))
    for model in (model_of(2)[0], tied_model()[0], counting_model()[0]):
        fpipe.check_placements(program_of(replicas, model=model), model)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_sum_that_is_left_out_or_made_twice_is_refused(replicas: str):
    refusals = 0
    for model in (2, tied_model()[0], counting_model()[0]):
        for program in programs_with_changed_sums(program_of(replicas, model=model, microbatches=2)):
            with pytest.raises(ProgramError, match=r"is partial over|is added up already"):
                fpipe.check_placements(program)
            refusals += 1
    assert refusals >= 12


def test_placements_of_hybrid_shards():
    placements = fpipe.check_placements(program_of("hybrid, updated"), mesh=("replicate", "shard", "pp"))
    values = {"shard": Value("shard", 0), "y": Value("y", 0, 0), "cut": Value("cut", 0), "all": Value("all", 0)}
    assert {axis: [typed[value] for value in values.values()] for axis, typed in placements.items()} == {
        "replicate": ["replicated", "dealt", "partial", "replicated"],
        "shard": ["sharded", "dealt", "sharded", "sharded"],
    }


MISTAKES = {
    # Each replica would weigh its microbatches among its own rows, and the sum would count every row twice.
    "SPLITs weigh rows within one replica": ("replicated", ", axis='dp'}", "}"),
    # Each replica would clip by the norm of its own shard.
    "which is partial over 'dp'": (
        "scaled shards",
        "norms[0,1] norms[0,1]:1 n",
        "squares[0,1] norms[0,1] norms[0,1]:1 n",
    ),
    "reads opt[0], which is sharded over 'dp'": ("scaled shards", "UPDATE[0,1] shard[0] ", "UPDATE[0,1] params[0] "),
    "which is replicated over 'dp'": ("updated shards", "= SCATTER[0] sum", "= REDUCE[0] sum"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_an_op_takes_for_another_placement_is_refused(message: str):
    replicas, right_text, wrong_text = MISTAKES[message]
    text = str(program_of(replicas, microbatches=2))
    assert right_text in text
    with pytest.raises(ProgramError, match=re.escape(message)):
        fpipe.check_placements(fpipe.Program.parse(text.replace(right_text, wrong_text)))


def test_rows_are_dealt_over_the_dp_dimensions_of_a_mesh():
    """Torchtitan's and Megatron's meshes call them dp, dp_shard, dp_replicate; such gradients would train apart."""
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(2))
    assert not fpipe.check_placements(program, mesh=("pp", "tp"))
    with pytest.raises(ProgramError, match=r"the result loss is partial over 'dp_shard': add a REDUCE"):
        fpipe.check_placements(program, mesh=("pp", "dp_shard"))


def test_exchanges_name_dimensions_of_the_mesh():
    layer = fpipe.Stage(lambda params, x: x)
    model = fpipe.from_functions([layer, fpipe.exchange("all_to_all", axis="ep")], lambda y, target: y.sum())
    program = fpipe.program(model)
    assert not fpipe.check_placements(program, model, ("pp", "ep"))
    with pytest.raises(ValueError, match=r"an exchange runs along 'ep'; the mesh has dimensions pp, dp"):
        fpipe.check_placements(program, model, ("pp", "dp"))
    with pytest.raises(ValueError, match="the model has 2 stages, the program 3"):
        fpipe.check_placements(fpipe.program(3), model)


def test_a_file_with_a_missing_sum_is_refused(tmp_path: Path):
    file = tmp_path / "step.fpipe"
    file.write_text(str(next(programs_with_changed_sums(program_of("replicated")))))
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code == 1
    assert "the result loss is partial over 'dp'" in " ".join(checked.output.split())


def build_without_sum(rank: int) -> str:
    """Return the error of a build whose program lacks a REDUCE."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    model, params = model_of(2)
    transforms = fpipe.split(2), fpipe.merge(), fpipe.data_parallel()
    program = next(programs_with_changed_sums(fpipe.chain(*transforms)(fpipe.program(model))))
    try:
        fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rank))
    except ProgramError as error:
        return str(error)
    return "built"


def test_a_build_in_processes_refuses_a_missing_sum():
    with Processes(2) as pair:
        assert (
            pair.run(build_without_sum)
            == ["the result loss is partial over 'dp': add a REDUCE, as fpipe.data_parallel('dp') does."] * 2
        )
