"""Imports: schedules are written, drawn and simulated without torch, and every public name is there."""

import ast
import importlib
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import fpipe
from tests.test_rooms import STOREYS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fpipe"

# In a process of its own: here torch is imported already. A module that is None in sys.modules cannot be imported, and
# whoever tries is in the traceback.
BLOCK_IMPORTS = """
import sys
sys.modules.update(dict.fromkeys({modules}))
"""
HEAVY = ("torch", "numpy", "optree", "rich", "typer", "matplotlib", "networkx", "ortools", "hypothesis")

SCHEDULES = """
import fpipe

def written(*steps, stages=4):
    program = fpipe.chain(*steps)(fpipe.program(stages))
    fpipe.check(program)
    assert fpipe.Program.parse(str(program)) == program
    costs = fpipe.Costs(transfer=0.1)
    timeline = fpipe.simulate(program, costs)
    assert fpipe.bounds(program, costs).makespan <= timeline.makespan
    assert "0F0" in str(fpipe.plot(program))
    fpipe.plot(program, timeline, file="{folder}/it.svg")
    fpipe.plot(timeline, file="{folder}/it.html")
    return program

named = fpipe.schedules
dicts = ({{"x": fpipe.Chunk(1), "table": [fpipe.Replicate(), None]}}, fpipe.Chunk)
one_f_one_b = written(fpipe.split(8, dicts), fpipe.checkpoint(), named.one_f_one_b(4), fpipe.merge())
written(fpipe.split(8), fpipe.split_backward(), named.zb_h1(4), fpipe.merge(), fpipe.communicate(), fpipe.free())
written(fpipe.split(4), named.from_table("0F0 0F1 0B0 0B1\\n0F2 0F3 0B2 0B3", replicated=True), fpipe.merge(), stages=1)
written(fpipe.split(8), named.one_f_one_b(4), fpipe.checkpoint(grain="layer"), fpipe.offload())
written(fpipe.split(4), fpipe.slice_sequence(2), named.seq1f1b(2), fpipe.merge(), stages=2)
written(fpipe.split(4), fpipe.forward_only(), fpipe.place("v"), stages=2)
fpipe.balance([1, 2, 3, 4], 2)
text = fpipe.interop.torch_pipelining.to_csv(named.gpipe(2)(fpipe.split(2)(fpipe.program(2))))
fpipe.interop.torch_pipelining.from_csv(text)
assert fpipe.interop.from_json(fpipe.interop.to_json(one_f_one_b)) == one_f_one_b
"""

CORE = """
import torch
import fpipe

def layer(params, x):
    return (x @ params["w"]).tanh()

model = fpipe.from_functions([layer, layer], torch.nn.functional.mse_loss)
params = ({"w": torch.eye(2)}, {"w": torch.eye(2)})
batch = torch.ones(4, 2), torch.zeros(4, 2)
program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
step = fpipe.build(program, model, trace=False)
assert torch.equal(step(params, batch).loss, fpipe.reference(model, params, batch, microbatches=2).loss)
assert fpipe.verify(program, model, params, batch, step=step).bitwise
assert fpipe.simulate(program).makespan == 9
"""

COMMANDS = """
import runpy

for typed in {commands}:
    sys.argv = ["fpipe", *typed.split()]
    try:
        runpy.run_module("fpipe", run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, typed
"""


def run_without(code: str, *modules: str) -> None:
    """Run code where some modules cannot be imported."""
    code = BLOCK_IMPORTS.format(modules=modules) + code
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


def test_a_schedule_is_written_drawn_checked_and_simulated_without_torch(tmp_path: Path):
    run_without(SCHEDULES.format(folder=tmp_path), *HEAVY)


def test_a_program_is_run_and_verified_without_the_engine():
    """The definition, the reference and verify run without the engine that makes them fast."""
    rooms = f"{STOREYS['engine']} {STOREYS['workshop']}".split()
    rooms.remove("runtimes")  # `build` itself, which chooses among these
    rooms += ["runtimes.lowering", "runtimes.in_process", "runtimes.processes"]
    run_without(CORE, *(f"fpipe.{room}" for room in rooms))


def test_the_commands_about_schedules_need_no_torch(tmp_path: Path):
    size = "--ranks 4 --microbatches 8"
    commands = (
        "--help",
        "schedules",
        f"show one_f_one_b {size} --svg {tmp_path / 'it.svg'}",
        f"compare gpipe one_f_one_b zbv {size}",
        f"export one_f_one_b {size} --output {tmp_path / 'it.csv'}",
        f"check {tmp_path / 'it.csv'}",
    )
    run_without(COMMANDS.format(commands=commands), "torch", "numpy", "optree", "matplotlib")


def test_a_lazy_name_is_imported_on_access(monkeypatch: pytest.MonkeyPatch):
    for name, home in fpipe._MODULE_BY_NAME.items():
        monkeypatch.delitem(vars(fpipe), name, raising=False)
        assert inspect.unwrap(getattr(fpipe, name)) is inspect.unwrap(getattr(sys.modules[f"fpipe.{home}"], name))
        assert name in fpipe.__dict__


def test_a_type_checker_sees_the_lazy_and_the_public_names():
    """Lazy names stand twice: for the type checker, and in the table by which they are found."""
    body = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    guarded = next(node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in guarded if isinstance(node, ast.ImportFrom) and node.module and node.module != "fpipe"]
    names = {node.module.removeprefix("fpipe."): tuple(alias.name for alias in node.names) for node in imports}
    assert names == fpipe._LAZY_NAMES
    eager_imports = [node for node in body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fpipe")]
    public = [alias.name for node in eager_imports for alias in node.names]
    assert sorted([*public, *fpipe._MODULE_BY_NAME, "interop"]) == sorted(fpipe.__all__)


def test_dir_shows_the_public_names_alone():
    """`tree`, `order` or `graphs` are not listed, though they are attributes once imported."""
    listed = {name for name in dir(fpipe) if not name.startswith("__")}
    assert listed == {*fpipe.__all__, "callbacks", "integrations", "testing"}
    assert all(hasattr(fpipe, name) for name in listed)


PUBLIC = ("schedules", "interop", "interop.torch_pipelining", "callbacks", "testing")


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_of_a_public_folder_shows_its_names_and_no_modules(name: str):
    """Completion after `fpipe.schedules.` offers schedules, not the 25 modules."""
    module = importlib.import_module(f"fpipe.{name}")
    assert dir(module) == module.__all__
    assert all(hasattr(module, public_name) for public_name in module.__all__)


def test_the_script_whose_types_are_checked_uses_every_public_name():
    """pyright reads the script in strict mode, so that every public name is typed for users.

    One decorator makes all schedules.
    """
    script = ast.parse((ROOT / "tests/user_script.py").read_text(encoding="utf-8"))
    used = {ast.unparse(node) for node in ast.walk(script) if isinstance(node, ast.Attribute)}
    names = {f"{module.split('.')[-1]}.{name}" for module in PUBLIC for name in sys.modules[f"fpipe.{module}"].__all__}
    names |= {f"fpipe.{name}" for name in fpipe.__all__ if name not in PUBLIC}
    missing = names - used - {"interop.torch_pipelining", *(f"schedules.{name}" for name in fpipe.schedules.names())}
    assert not missing, "a public name is missing in tests/user_script.py: add a line that uses it."


def test_the_signature_of_costs_lists_its_fields():
    """Used to be hidden by the `__new__` that explains the letters of papers."""
    parameters = inspect.signature(fpipe.Costs).parameters
    assert [*parameters] == [field.name for field in fields(fpipe.Costs)]
    assert parameters["forward"].default == 1
    assert parameters["bandwidth"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    ("name", "hint"), [("verfy", ". Did you mean: 'verify'?"), ("gpipe", ": write fpipe.schedules.gpipe")]
)
def test_a_misspelt_name_is_answered_with_the_closest(name: str, hint: str):
    process = subprocess.run(
        [sys.executable, "-c", f"import fpipe; fpipe.{name}"], capture_output=True, text=True, cwd=ROOT
    )
    assert process.stderr.endswith(f"module 'fpipe' has no attribute '{name}'{hint}\n")
