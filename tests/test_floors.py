"""The package is a house: imports point down, and nothing on the way up shadows a public name."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fpipe"

# A folder stands for all of its modules.
FLOORS = {
    4: {"__main__", "__init__", "cli"},
    3: {"verify", "profile", "interop", "testing"},
    2: {"runtimes", "schedules", "plot", "pictures"},
    1: {
        "average",
        "balance",
        "freeze",
        "skips",
        "batch_norm",
        "functions",
        "models",
        "returned",
        "kept",
        "reached",
        "watched",
        "loss_graph",
        "marks",
        "modes",
        "marked",
        "modules",
        "stage_module",
        "buffers",
        "cached",
        "attributes",
        "by_place",
        "graph_stage",
        "impure",
        "writers",
        "reads",
        "flows",
        "tapes",
        "twins",
        "params",
        "training",
        "reference",
        "one_graph",
        "result",
        "linearize",
        "graphs",
        "keys",
        "call",
        "traces",
        "custom",
        "check",
        "order",
        "microbatch",
        "specs",
        "transforms",
        "simulate",
        "timeline",
        "lanes",
        "columns",
        "deadlock",
        "waiting",
        "memory",
        "bounds",
        "plan",
        "costs",
    },
    0: {"tree", "program", "symbols"},
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """The name that FLOORS knows a module by: `fpipe.runtimes.local` is in `runtimes`."""
    return module.split(".")[1] if "." in module else "__init__"


def floor(module: str) -> int | None:
    return next((number for number, rooms in FLOORS.items() if room(module) in rooms), None)


def imports(module: str) -> Iterator[tuple[int, str, str | None]]:
    """Every import of a file, inside functions too: line, absolute name of the module, and the name taken from it."""
    file = FILES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, source, alias.name) for alias in node.names)


def inner_imports(module: str) -> Iterator[tuple[int, str]]:
    """The imports of our own modules. `from fpipe import tree` is an import of fpipe.tree, not of all of fpipe."""
    for line, source, name in imports(module):
        if source.split(".")[0] == "fpipe":
            yield line, f"{source}.{name}" if f"{source}.{name}" in FILES else source


def graph() -> dict[str, set[str]]:
    return {module: {target for _, target in inner_imports(module)} for module in FILES}


def reachable(module: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [module]
    while todo:
        new = edges.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def test_every_module_has_a_floor():
    homeless = [module for module in FILES if floor(module) is None]
    assert not homeless, f"Say in FLOORS of tests/test_floors.py which floor these modules are on: {homeless}"


def test_imports_point_down():
    wrong = [
        f"{FILES[module].relative_to(ROOT)}:{line}: {module} (floor {here}) imports {target} (floor {there})"
        for module in FILES
        for line, target in inner_imports(module)
        if (here := floor(module)) is not None and (there := floor(target)) is not None and there > here
    ]
    assert not wrong, "Imports point to the same floor or down:\n" + "\n".join(wrong)


def test_imports_have_no_cycle():
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        raise AssertionError("These modules import each other in a circle: " + " <- ".join(error.args[1])) from None


def test_runtimes_and_schedules_meet_only_in_the_program():
    edges = graph()
    apart = {"runtimes": "schedules", "schedules": "runtimes"}
    met = {
        f"{module} reaches {target}"
        for module in FILES
        for target in reachable(module, edges)
        if apart.get(room(module)) == room(target)
    }
    assert not met, sorted(met)


def test_only_tree_imports_optree():
    users = {module for module in FILES for _, source, _ in imports(module) if source.split(".")[0] == "optree"}
    assert users <= {"fpipe.tree"}


# In a process of its own: here pytest has imported the submodules already. A name that is a module holding a public
# thing of the same name (fpipe.check, with check in it) was shadowed before anybody looked.
SHADOWS = """
import importlib, pkgutil, types
import fpipe

before = {name: getattr(fpipe, name) for name in fpipe.__all__}
for module in pkgutil.walk_packages(fpipe.__path__, "fpipe."):
    importlib.import_module(module.name)
for name, value in before.items():
    if getattr(fpipe, name) is not value or isinstance(value, types.ModuleType) and hasattr(value, name):
        print(f"fpipe.{name} is hidden by the module of that name")
"""


def test_public_names_survive_the_import_of_every_module():
    run = subprocess.run([sys.executable, "-c", SHADOWS], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (run.stdout, run.returncode) == ("", 0), run.stderr
