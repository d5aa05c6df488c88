"""The folders of the package import each other in one direction, and no module shadows a public name."""

import ast
import graphlib
import importlib
import inspect
import pkgutil
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import fpipe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fpipe"

# Each folder, and what it may import: exactly that, and itself. A room's own files stand above its subfolders.
PLAN = """
root <-
meaning/purity <- root
meaning/optimizers <- root
transforms <- root meaning/optimizers
timing <- root transforms
schedules <- root transforms timing
meaning/single_device <- root meaning/purity meaning/optimizers transforms timing
meaning <- root meaning/purity meaning/optimizers transforms timing meaning/single_device
verification <- root meaning/purity meaning/optimizers transforms meaning/single_device meaning
torch_private <- root
graphs/language <- root meaning/purity
finding <- root transforms timing schedules
graphs/tracing <- root meaning/purity torch_private graphs/language
graphs/compiling <- root meaning/purity torch_private graphs/language graphs/tracing
graphs <- root meaning/purity graphs/language graphs/tracing graphs/compiling
models/parameters <- root meaning/purity meaning/single_device torch_private
interop <- root transforms timing meaning/single_device meaning torch_private
models/modules <- root meaning/purity torch_private graphs/language graphs/tracing models/parameters
models/exporting <- root meaning/purity torch_private graphs/tracing
derived <- root meaning/purity torch_private graphs/language graphs/tracing models/modules
recording <- root meaning/purity torch_private models/parameters
oracle <- root meaning/purity meaning/optimizers transforms meaning/single_device verification models/parameters
    recording
models/cutting <- root meaning/purity timing torch_private graphs/language graphs/tracing
    models/parameters models/exporting
runtimes/lowering <- root meaning/purity meaning/optimizers meaning/single_device meaning torch_private
    graphs/language graphs/tracing graphs/compiling
runtimes/faults <- root meaning/purity torch_private graphs/language runtimes/lowering
runtimes/audit <- root meaning/purity meaning/single_device meaning verification torch_private graphs/language
    runtimes/lowering
runtimes/capture <- root meaning/purity meaning/optimizers meaning/single_device meaning torch_private graphs/language
    runtimes/lowering runtimes/audit
runtimes/in_process <- root meaning/purity meaning/optimizers transforms meaning/single_device meaning graphs/language
    graphs/tracing runtimes/lowering runtimes/capture runtimes/audit
models <- root meaning/purity timing meaning/single_device meaning graphs/tracing
    models/parameters models/modules models/exporting models/cutting
runtimes/processes <- root meaning/purity meaning/optimizers transforms timing meaning/single_device meaning
    verification torch_private graphs/language graphs/tracing graphs/compiling runtimes/lowering runtimes/faults
    runtimes/capture runtimes/audit
runtimes <- root meaning/purity meaning/optimizers transforms meaning runtimes/capture runtimes/audit
    runtimes/in_process runtimes/processes
measuring <- root meaning/purity meaning/optimizers transforms timing meaning/single_device meaning graphs/language
    runtimes/lowering runtimes/processes runtimes
planning <- root transforms timing schedules finding measuring
pictures <- root timing planning
callbacks <- root meaning/single_device
integrations <- root transforms schedules meaning/purity meaning/single_device meaning models/parameters derived models
    runtimes
testing <- root transforms timing schedules meaning verification pictures
cli <- root transforms timing schedules meaning/optimizers meaning verification finding models/parameters interop oracle
    models runtimes measuring planning pictures
"""
ROOMS = {
    name: {*allowed.split()}
    for name, _, allowed in (line.partition(" <-") for line in PLAN.replace("\n    ", " ").strip().splitlines())
}
# Rooms by storey, their subfolders with them. The core says what a program is, what it means and how long it takes; the
# engine computes the same, fast and on many processes; the workshop searches, plans, draws and diagnoses.
STOREYS = {
    "core": "root transforms timing schedules meaning verification",
    "engine": "torch_private graphs models runtimes",
    "workshop": "recording oracle finding planning pictures derived interop measuring callbacks integrations cli "
    "testing",
}
STOREY_BY_ROOM = {room: storey for storey, rooms in STOREYS.items() for room in rooms.split()}
# Folders that list things of one kind, and so may be long.
LISTS = {"cli", "schedules", "transforms"}
# Nobody imports these: the list of public names, and the command line's door.
DOORS = ("fpipe", "fpipe.__main__")
# `verify` builds the step that it is not handed: the one import that points up, and only when it is needed.
UPWARD = ("fpipe.verification.verify", "fpipe.runtimes.build")


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """Return the folder of a module: `fpipe.runtimes.lowering.lower` is in `runtimes/lowering`."""
    return "/".join(FILES[module].relative_to(PACKAGE).parts[:-1]) or "root"


@cache
def statements(file: Path) -> tuple[ast.AST, ...]:
    """Return all statements of a file, nested ones too, without their expressions."""
    nodes: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    for node in nodes:  # as it grows
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, ())
    return tuple(nodes)


@cache
def imports(module: str) -> set[str]:
    """Return the absolute names that a file imports, inside functions too. `from fpipe import tree` counts as
    fpipe.tree, not as fpipe."""
    file, imported = FILES[module], set[str]()
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in statements(file):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parent, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            imported |= (names & FILES.keys()) | ({source} if names - FILES.keys() else set())
    return imported


def inner_imports(module: str) -> set[str]:
    """Return the imports within fpipe, except the one that points up."""
    return {name for name in imports(module) if name.split(".")[0] == "fpipe" and (module, name) != UPWARD}


def reachable(module: str, edges: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    todo = [module]
    while todo:
        new = edges.get(todo.pop(), set()) - reached
        reached |= new
        todo += new
    return reached


def test_the_root_has_at_most_twelve_files():
    """The root has the language, the model, pytrees, and two doors."""
    assert len([*PACKAGE.glob("*.py")]) <= 12


def test_every_folder_is_a_room():
    assert {room(module) for module in FILES} == {*ROOMS}


def test_every_room_opens_with_its_signature_in_one_line():
    for name in {*ROOMS} - {"root"}:
        opening = (PACKAGE / name / "__init__.py").read_text(encoding="utf-8").splitlines()[0]
        assert re.fullmatch(r'""".+\."""', opening), name


def test_every_room_is_on_the_map():
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert not [name for name in {*ROOMS} - {"root"} if f"`{name}/`" not in page]


def test_no_room_holds_more_than_twenty_files():
    sizes = Counter(room(module) for module, file in FILES.items() if file.name != "__init__.py")
    assert {name for name, size in sizes.items() if size > 20} <= LISTS


def test_rooms_import_each_other_in_one_direction():
    lower_rooms: set[str] = set()
    for name, allowed in ROOMS.items():
        assert allowed <= lower_rooms, f"{name} may import a room that stands above it: {allowed - lower_rooms}"
        lower_rooms.add(name)


def test_rooms_import_exactly_the_listed_rooms():
    imported_by_room = {name: set[str]() for name in ROOMS}
    for module in FILES:
        if module not in DOORS:
            imported_by_room[room(module)] |= {room(target) for target in inner_imports(module)} - {room(module)}
    assert imported_by_room == ROOMS


def storey(room: str) -> str:
    return STOREY_BY_ROOM[room.partition("/")[0]]


def test_storeys_import_only_themselves_and_those_below():
    storeys = [*STOREYS]
    upward = {
        f"{name} <- {imported}"
        for name, allowed in ROOMS.items()
        for imported in allowed
        if storeys.index(storey(imported)) > storeys.index(storey(name))
    }
    assert not upward


def test_the_core_is_read_in_an_evening():
    """The page lists files of the core only, at most 6,000 lines."""
    page = (ROOT / "docs/reading.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `(fpipe/\S+\.py)` \|", page, re.MULTILINE)
    assert len(files) == len({*files}) >= 20
    assert {storey(room(module_name(ROOT / file))) for file in files} == {"core"}
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 6000


def test_nobody_imports_the_doors():
    users = [module for module in FILES for target in inner_imports(module) if target in DOORS]
    assert not users


def test_imports_have_no_cycle():
    try:
        graphlib.TopologicalSorter({module: inner_imports(module) for module in FILES}).prepare()
    except graphlib.CycleError as error:
        raise AssertionError("These modules import each other in a circle: " + " <- ".join(error.args[1])) from None


def test_runtimes_and_schedules_meet_only_in_the_program():
    edges = {module: inner_imports(module) for module in FILES}
    counterpart_by_room = {"runtimes": "schedules", "schedules": "runtimes"}
    crossings = {
        f"{module} reaches {target}"
        for module in FILES
        for target in reachable(module, edges)
        if counterpart_by_room.get(room(module).split("/")[0]) == room(target).split("/")[0]
    }
    assert not crossings, sorted(crossings)


def test_only_tree_imports_optree():
    users = {module for module in FILES for name in imports(module) if name.split(".")[0] == "optree"}
    assert users <= {"fpipe.tree"}


def test_private_names_of_torch_are_in_one_room():
    """The engine uses them in torch_private, the core in torch_internals; fpipe.tree registers containers of torch."""
    private_names = [
        f"{module}: {name}"
        for module, file in FILES.items()
        if room(module) != "torch_private" and module != "fpipe.torch_internals"
        for node in ast.walk(statements(file)[0])
        for name in torch_names(node)
        if re.search(r"\._(?!_)", name) and not name.startswith("torch.ops.aten.")
    ]
    pytrees = ["torch.utils._cxx_pytree", "torch.utils._pytree.register_pytree_node"]
    assert private_names == [f"fpipe.tree: {name}" for name in pytrees]


def torch_names(node: ast.AST) -> list[str]:
    """Return the names of torch that a statement imports or an expression reads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("torch.")]
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    return [name] if name.startswith("torch.") else []


def test_two_classes_never_share_a_name():
    modules_by_class: dict[str, list[str]] = {}
    for module, file in FILES.items():
        for node in statements(file):
            if isinstance(node, ast.ClassDef):
                modules_by_class.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in modules_by_class.items() if len(modules) > 1}


def test_two_files_share_a_name_only_where_one_serves_the_other():
    """A shell command has the name of the function it runs, a file of torch_private the name of its subject."""
    files = Counter(file.name for module, file in FILES.items() if room(module) not in ("cli", "torch_private"))
    files.pop("__init__.py")
    assert not [name for name, count in files.items() if count > 1]


def test_docstrings_open_with_a_noun_or_a_verb():
    """ "Drop received parameters after their last read" reads at once; an opening question word does not."""
    opening = re.compile(r'^\s*r?"""(What|The same)\b', re.MULTILINE)
    offenders = [module for module, file in FILES.items() if opening.search(file.read_text(encoding="utf-8"))]
    assert not offenders


def test_the_glossary_has_at_most_forty_words_of_one_meaning():
    meanings = re.findall(r"^(\w.*)\n  (.+)$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for term, _ in meanings]
    assert 30 <= len(terms) <= 40
    assert terms == sorted({*terms})
    assert not [term for term, meaning in meanings if ";" in meaning or ". " in meaning or meaning[-1] != "."]


def hidden_names() -> set[str]:
    """Return public names that importing a module of the root would replace by that module. A name that is looked up
    late (in _MODULE_BY_NAME) is hidden if its module is imported first."""
    shared_names = {module.name for module in pkgutil.iter_modules(fpipe.__path__)} & {*fpipe.__all__}
    for name in shared_names:
        importlib.import_module(f"fpipe.{name}")
    value_by_name = {name: getattr(fpipe, name) for name in shared_names}
    return {
        name
        for name in value_by_name
        if name in fpipe._MODULE_BY_NAME
        or (inspect.ismodule(value_by_name[name]) and hasattr(value_by_name[name], name))
    }


def test_public_names_survive_the_import_of_every_module_of_the_root(monkeypatch: pytest.MonkeyPatch):
    assert not hidden_names()
    monkeypatch.setattr(fpipe, "check", sys.modules["fpipe.check"])
    monkeypatch.setitem(fpipe._MODULE_BY_NAME, "program", "program")
    assert hidden_names() == {"check", "program"}
