"""The command line prints results, answers mistakes in one sentence, and works in a pipe."""

import html
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fpipe
from fpipe.__main__ import main
from fpipe.cli.app import app
from fpipe.cli.options import parse_style, program_of
from fpipe.cli.output import table

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCHEDULE_SCRIPT = """
import fpipe
fpipe.schedules.register("{name}", lambda ranks: fpipe.schedules.gpipe(ranks))
"""


def run(*typed: str, stdin: str | None = None) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error of a command."""
    result = CliRunner().invoke(app, list(typed), input=stdin, prog_name="python -m fpipe")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def output_of(*typed: str, stdin: str | None = None) -> str:
    code, printed, complaint = run(*typed, stdin=stdin)
    assert (code, complaint) == (0, "")
    return printed


def program(name: str, ranks: int, microbatches: int) -> fpipe.Program:
    return fpipe.schedules.about(name).program(ranks, microbatches)


def test_schedules_prints_one_line_per_schedule():
    lines = output_of("schedules").splitlines()
    assert lines[0].split() == ["name", "title", "source", "accepts", "idle", "peak"]
    assert [line.split()[0] for line in lines[1:]] == list(fpipe.schedules.names())


def test_show_prints_grid_time_and_memory():
    expected_program = program("one_f_one_b", 3, 4)
    assert output_of("show", "one_f_one_b", "--ranks", "3", "--microbatches", "4").splitlines() == [
        "1F1B (DAPPLE, PipeDream-flush): Narayanan et al. 2021 (Megatron-LM), figure 3",
        f"3 stages, 4 microbatches, 3 ranks, {len(expected_program.ops)} ops",
        *str(fpipe.plot(expected_program)).splitlines(),
        str(fpipe.simulate(expected_program)),
        "at least 18 (fused), this is 0.0% above",
    ]


def test_style_applies_to_files(tmp_path: Path):
    svg, pdf = tmp_path / "a.svg", tmp_path / "a.pdf"
    style = "width_mm=84,labels=none,memory=no,window=0/4,ranks=x/y,F=#123456"
    printed = output_of("show", "gpipe", "-p", "2", "-m", "2", "--svg", str(svg), "--pdf", str(pdf), "--style", style)
    assert printed.splitlines()[-2:] == [f"wrote {svg}", f"wrote {pdf}"]
    expected_file = fpipe.plot(
        program("gpipe", 2, 2), names=["gpipe"], style=parse_style(style), file=tmp_path / "b.svg"
    )
    assert svg.read_text() == Path(expected_file).read_text()


def test_compare_prints_a_table_and_writes_it_above_the_pictures(tmp_path: Path):
    page = tmp_path / "both.html"
    names = ["gpipe", "hanayo:waves=2", "chimera"]
    compared = fpipe.compare(names, 3, 3, fpipe.Costs(2, 1, 1))
    printed = output_of("compare", *names, "-p", "3", "-m", "3", "-c", "F=2,B=1,W=1", "--html", str(page))
    assert printed == f"{compared}\nwrote {page}\n"
    assert output_of("compare", "-p", "3", "-m", "2") == f"{fpipe.compare(fpipe.schedules.names(), 3, 2)}\n"
    table, _, pictures = page.read_text().partition("</pre>")
    assert table.endswith(f"<pre>{html.escape(str(compared))}")
    assert "<svg" in pictures
    assert "src=" not in pictures


MODEL_SCRIPT = """
import fpipe, torch

def step():
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=torch.nn.functional.mse_loss)
    return model, params, (torch.ones(8, 8), torch.ones(8, 8))
"""


def test_options_follow_a_name_or_a_letter():
    size = ("-p", "2", "-m", "4")
    assert output_of("show", "hanayo:waves=2", *size) == output_of("show", "hanayo", "-o", "waves=2", *size)


@pytest.mark.parametrize("format", ["csv", "comms", "json", "text", "table"])
def test_check_reads_exported_files(format: str, tmp_path: Path):
    exported = output_of("export", "one_f_one_b", "--format", format, "-p", "2", "-m", "4")
    file = tmp_path / "file"
    assert (
        output_of("export", "one_f_one_b", "-f", format, "-p", "2", "-m", "4", "--output", str(file))
        == f"wrote {file}\n"
    )
    assert file.read_text() == exported
    assert program_of(exported).table() == program("one_f_one_b", 2, 4).table()
    assert output_of("check", str(file)).startswith(f"{file} is right: 2 stages, 4 microbatches, 2 ranks, ")
    assert output_of("check", "-", stdin=exported).startswith(
        "standard input is right: 2 stages, 4 microbatches, 2 ranks, "
    )
    assert "6 of 6 leaves bitwise equal to plain autograd" in output_of("verify", str(file))


def test_import_registers_user_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fpipe.schedules.registry, "SCHEDULE_BY_NAME", dict(fpipe.schedules.registry.SCHEDULE_BY_NAME))
    file = tmp_path / "mine.py"
    file.write_text(SCHEDULE_SCRIPT.format(name="my_own"))
    assert "rank 1 |  .  1F0 1B0  ." in output_of("--import", str(file), "show", "my_own", "-p", "2", "-m", "1")


MISTAKES = {
    # Refused by the library: exit code 1.
    "check missing.csv": "error: there is no file 'missing.csv' here, in '",
    "check gpipe": "It is a schedule's name: python -m fpipe verify gpipe.",
    "export gpipe --output missing/gpipe.csv": "error: 'missing' is not a folder: make it before a file is written",
    "show chimera -p 3": "error: chimera: ",
    "export chimera -m 4": "(--format json and text write any program.)",
    "export gpipe -o waves=2": "error: gpipe has no option 'waves'; it has: stages.",
    "race gpipe --timelines missing/a.svg": "error: 'missing' is not a folder: create it first.",
    "search -p 2 -m 2 --memory-cap 0.5": "error: nothing fits memory_cap=0.5: the smallest cap that does is 1.",
    "search -p 2 -m 2 --memory-cap 1GB": "error: the memory of a rank is in bytes, so --costs need bytes too",
    "search --placement zigzag": 'error: placement is "any", "linear", "looped", "v" or the rank of each stage',
    "plan run gpipe --memory 0.5": "error: nothing fits: rank 0 must hold 1 rows at least, by gpipe, m=8",
    "plan run gpipe -c y=8MiB --memory 3": "error: --costs are in bytes, and the memory of a rank (3) has no unit",
    "plan run gpipe -c res=8GiB --memory 3GiB": "rank 0 must hold 8 GiB at least, by gpipe, m=8, recompute always",
    "plan run gpipe -c 8:F=1,B=1,W=1 -c F=1,B=1,W=1": "each size once; found them once without its rows.",
    "plan run --cluster '4 ranks; inside 1GB/s'": "error: a cluster's bandwidths need the bytes of values: add them to",
    # Typed wrongly: exit code 2, below the usage.
    "shwo gpipe": "No such command 'shwo'. Did you mean 'show'?",
    "show gpip": "there is no schedule 'gpip'; did you mean gpipe",
    "show missing.csv": "there is no file 'missing.csv' here, in '",
    "show nope": "there is no schedule 'nope'; python -m fpipe schedules lists them all.",
    "show /": "'/' is a folder; name a file in it.",
    "export gpipe --format csvv": "Invalid value for '--format' / '-f': there is no format 'csvv'; did you mean csv?",
    "export gpipe -f x": "there is no format 'x'; it is csv, comms, megatron, primus, json, table, text.",
    "show gpipe --rank 2": "No such option: --rank (Possible options: --ranks)",
    "show gpipe --ranks 0": "--ranks",
    "show gpipe --png a/x.svg": "--png writes .png, found 'a/x.svg'; name it a/x.png.",
    "show gpipe --perfetto x.html": "--perfetto writes .json, found 'x.html'; name it x.json.",
    "show README.md --ranks=4": "--ranks is of a schedule by name; README.md is a file, which has its own.",
    "verify README.md -o waves=2": "--option is of a schedule by name; README.md is a file, which has its own.",
    "compare README.md -m 8": "--microbatches is of a schedule by name; README.md is a file, which has its own.",
    "export README.md -s 8": "--stages is of a schedule by name; README.md is a file, which has its own.",
    "show gpipe --style memory=no": "--style is of a file: add --svg, --png, --pdf, --html or --perfetto.",
    "show gpipe --svg a.svg --style labls=no": "a style has no 'labls'; did you mean labels?",
    "show gpipe --svg a.svg --style memory=0": "memory= is yes or no, found '0'.",
    "show gpipe --svg a.svg --style window=2": "window is a pair; found a tuple.",
    "show gpipe --svg a.svg --style font_pt=x": "font_pt= is a number, found 'x'.",
    "show gpipe --costs G=1": "costs have no 'G'. Of a whole rank: F, B, W, R, c; of a stage: forward,",
    "show gpipe --costs forwrad=1": "did you mean forward?",
    "show gpipe --costs F=nan": "F is a time in seconds, at least 0",
    "show gpipe --costs F=x": "F is a time (0.5 or 10ms), or one for each",
    "show gpipe --costs F=1/2": "F is of a whole rank, one number; one for each stage is forward=1/2.",
    "show gpipe --costs F": "'F' says no cost; costs read F=1,B=1,W=1,c=0.1",
    "show gpipe --costs F=1,forward=2": "forward is said twice.",
    "show gpipe --costs F=1,recompute=2": "mixes costs of a whole rank (F, B, W, R, c) with those of",
    "show gpipe --costs F=1,B=1": "'F=1,B=1' says F and B and nothing of the rest",
    "show gpipe --costs sender=lazy": "sender is free or busy, found 'lazy'.",
    "show gpipe --costs y=8GX": "an amount of bytes reads 40GiB or 512B, in B, KB, KiB,",
    "show gpipe --cluster '4 rank; inside'": "a link has latency (5us), bandwidth (200GB/s) or both, at 'inside'",
    "export hanayo -o waves": "an option reads waves=2, found 'waves'.",
    "race table.csv": "name a schedule; found the file 'table.csv'. Register it in a file for --import.",
    "race conftest.py": "conftest.py registers no schedule: call fpipe.schedules.register(name, f) in it.",
    "race torch:2F2B": "torch has no schedule '2F2B'; it has GPipe, 1F1B, Interleaved1F1B,",
    "show gpipe --ranks x": "'--ranks' / '-p': it is a whole number, at least 1; found 'x'.",
    "race gpipe --width 10": "--width is a multiple of the 4 heads, found 10.",
    "race gpipe -m 4/0": "several numbers read 8/16/32, found '4/0'.",
    "race gpipe --memory-cap much": "memory caps are microbatches that a rank may hold, 2/4, found 'much'.",
    "race gpipe --timelines a.txt": "--timelines writes .svg, .png, .pdf, .html or .json, found 'a.txt'.",
    "race gpipe -m 4/8 --timelines a.svg": "--timelines draws one setting, found 2.",
    "race gpipe --model mine": "a function reads mine.py:step or package.module:step, found 'mine'.",
    "race gpipe --model fractions:Fraction --rows 8": "--width and --rows are of the layers that run without --model.",
    "search --placement 0/x": "a placement is a word, or the rank of each stage as in 0/1/1/0; found '0/x'.",
    "search --output found.txt": "--output writes .fpipe, .json, .csv; found 'found.txt'.",
    "plan run -m 8,16": "several numbers read 8/16/32, found '8,16'.",
    "plan run -c x:F=1,B=1,W=1": "costs of microbatches of 8 rows read 8:F=1,B=1,W=1, found 'x:F=1,B=1,W=1'.",
    "plan run --memory much": "an amount of bytes reads 40GiB or 512B",
    "plan run -c F=1,B=1,W=1 --model fractions:Fraction": "a --model is measured, and --costs are given",
    "--import no_such_module schedules": "No module named 'no_such_module'",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_answered_in_a_sentence(typed: str):
    code, _, complaint = run(*shlex.split(typed))
    assert code == 1 + complaint.startswith("Usage: python -m fpipe")
    assert MISTAKES[typed] in " ".join(complaint.split())


@pytest.mark.parametrize(
    ("stdin", "sentence"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1F1x 1B0 1B1\n", "line 2, column 2: '1F1x' is not a cell"),
        ("", "there is nothing in it; write a program, a table, CSV or JSON."),
        ("rank 0 | .\n", "the table names no F, B, I or W."),
    ],
)
def test_errors_in_standard_input_name_their_position(stdin: str, sentence: str):
    code, _, complaint = run("check", "-", stdin=stdin)
    assert (code, complaint.startswith(f"error: standard input: {sentence}")) == (1, True)


@pytest.mark.parametrize("command", ["schedules", "show", "compare", "check", "verify", "export"])
def test_examples_of_the_help_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pipes into other tools are left out."""
    monkeypatch.chdir(tmp_path)
    Path("my_table.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    Path("mine.py").write_text(SCHEDULE_SCRIPT.format(name="my_schedule"))
    examples = re.findall(r"^ +python -m fpipe ([^|>\n]+)$", output_of(command, "--help"), re.M)
    assert examples
    for example in examples:
        output_of(*example.split())


REPLICATED_TABLE = "0F0,0F1,0B0,0B1\n0F2,0F3,0B2,0B3\n"


def test_a_replicated_table_is_drawn_compared_and_exported(tmp_path: Path):
    """Used to work for check and verify alone."""
    file = tmp_path / "twice.csv"
    file.write_text(REPLICATED_TABLE)
    code, _, complaint = run("show", str(file))
    assert code == 1
    assert "from_table: replicated=True" in complaint
    assert "rank 1 | 0F2 0F3 0B2 0B3" in output_of("show", str(file), "--replicated")
    assert "twice.csv" in output_of("compare", str(file), "--replicated")
    assert "1 stages, 4 microbatches" in repr(program_of(output_of("export", str(file), "-f", "json", "--replicated")))


def test_export_into_a_closed_pipe_ends_quietly():
    """`python -m fpipe export ... | head -1`."""
    typed = [sys.executable, "-m", "fpipe", "export", "gpipe", "-f", "text", "-m", "150"]
    with subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"params[0] @ 0\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_main_without_typer_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "fpipe.cli.app")
    with pytest.raises(SystemExit, match=r"^the command line needs typer, which is not installed: pip install"):
        main()


def test_the_fpipe_command_runs_the_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Usage lines name the command that was typed."""
    assert EntryPoint("fpipe", PROJECT["scripts"]["fpipe"], "console_scripts").load() is main
    for typed, called in (("/usr/bin/fpipe", "fpipe"), ("/lib/fpipe/__main__.py", "python -m fpipe")):
        monkeypatch.setattr(sys, "argv", [typed, "show"])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert capsys.readouterr().err.startswith(f"Usage: {called} show ")


def test_version_prints_the_package_version():
    assert output_of("--version") == f"fpipe {PROJECT['version']}\n"


@pytest.mark.parametrize(("width", "lines"), [(80, 6), (60, 16)])
def test_narrow_terminals_get_one_line_per_number(
    width: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Used to break numbers, with `27.` above `3%`."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("fpipe.cli.output.sys.stdout.isatty", lambda: True)
    columns = ("schedule", "makespan", "span", "bubble", "bubble of span", "peak", "bound", "above")
    row = ("33", "33", "27.3%", "27.3%", "4", "33", "0.0%")
    table(columns, [("gpipe", *row), ("one_f_one_b", *row)])
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, printed)) <= width
    assert len(printed) == lines
    assert sum("27.3%" in line for line in printed) == (2 if width == 80 else 4)


def test_search_prints_and_writes_its_program(tmp_path: Path):
    file = tmp_path / "found.csv"
    typed = "-p 2 -m 3 --placement linear --memory-cap 1 --seconds 0.1 --without bpipe --without pipe_offload"
    printed = output_of("search", *typed.split(), "-c", "F=1,B=1,W=1", "--output", str(file))
    assert re.search(r"^makespan \d+: (no order of|none of) these ops", printed, re.MULTILINE)
    assert [line.split()[0] for line in printed.splitlines() if line.endswith("fits")] == ["found"]
    assert f"wrote {file}" in printed
    makespan = re.search(r"makespan \d+", printed)
    assert makespan is not None
    assert makespan[0] in output_of("show", str(file), "-c", "F=1,B=1,W=1")


def test_all_commands_simulate_on_a_cluster():
    """Shared links queue and slow ranks are slow in every command."""
    text, costs = "2 ranks; inside 1s 2GB/s shared; rank 1 speed 0.5", "F=2,B=2,W=2,y=1GB,res=4GB,params=1GB"
    sizes = ("-p", "2", "-m", "4")
    scheduled = program("one_f_one_b", 2, 4)
    bytes_of = {"y": 1e9, "dx": 1e9, "res": 4e9, "params": 1e9}
    expected = fpipe.simulate(
        scheduled, fpipe.Costs(2, 2, 2, bytes=lambda value: bytes_of.get(value.name, 0.0)), cluster=text
    )
    options = ("--costs", costs, "--cluster", text)
    assert f"makespan {expected.makespan:g}, " in output_of("show", "one_f_one_b", *sizes, *options)
    for command in (["compare", "one_f_one_b"], ["plan", "run", "one_f_one_b"]):
        row = next(
            line for line in output_of(*command, *sizes, *options).splitlines() if line.startswith("one_f_one_b")
        )
        assert f"{expected.makespan:g}" in row.split()
    rows = output_of("search", *sizes, *options, "--seconds", "0.1", "--solver", "local").splitlines()
    assert float(next(line for line in rows if line.startswith("found")).split()[1]) <= expected.makespan


def test_plan_run_ranks_plans_by_costs_and_for_a_model(tmp_path: Path):
    picture = tmp_path / "front.svg"
    sizes = ("-p", "2", "-m", "2/4", "--rows", "8")
    costs = ("-c", "4:F=9,B=9,W=9,y=1MB,res=8MB", "-c", "1: F=3,B=3,W=3,y=1MB,res=2MB")
    lines = output_of(
        "plan", "run", "gpipe", "zb_h1", *sizes, *costs, "--memory", "18MB", "--svg", str(picture)
    ).splitlines()
    assert lines[0].split() == ["schedule", "m", "rows", "recompute", "seconds", "bubble", "held", "rows/s", "costs"]
    assert {cell for line in lines[1:13] for cell in line.split()} >= {"given", "interpolated", "*", "too", "much"}
    assert lines[-1] == f"wrote {picture}"
    file = tmp_path / "mine.py"
    file.write_text(MODEL_SCRIPT.replace("3", "2"))
    model_options = ("-p", "2", "-m", "2", "--repeats", "1", "--checkpoint", "never")
    lines = output_of("plan", "run", "gpipe", "chimera", "zbv", "--model", f"{file}:step", *model_options).splitlines()
    assert "measured" in {cell for line in lines[:3] for cell in line.split()}
    assert "transfers take no time here: --cluster says what links there are" in lines
    assert lines[-1].startswith("zbv: ")


def test_a_weight_host_is_not_a_cluster_rank():
    """Used to end the whole plan with an error."""
    costs = ("-c", "F=2ms,B=2ms,W=2ms,y=1GB,res=4GB,params=6GB", "--cluster", "2 ranks; inside 1us")
    for command in (["compare"], ["plan", "run", "--checkpoint", "never"]):
        lines = output_of(*command, "gpipe", "roundpipe", "-p", "2", "-m", "4", *costs).splitlines()
        assert {line.split()[0] for line in lines} >= {"gpipe", "roundpipe"}


def test_model_files_import_their_neighbours(tmp_path: Path):
    """Used to fail for the `fpipe` script, which like -P keeps the user's folder off Python's path."""
    (tmp_path / "neighbour.py").write_text("made = 'no model'")
    (tmp_path / "mine.py").write_text("import neighbour\nstep = lambda: neighbour.made")
    command = [sys.executable, "-P", "-m", "fpipe", "plan", "run", "--model", "mine.py:step"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr.startswith("error: --model returns (model, params, batch)")
    assert "found 'no model'" in process.stderr


@pytest.mark.parametrize("name", ["roundpipe", "dualpipe", "chimera", "pipe_offload", "zb_h1"])
def test_a_file_of_a_program_reads_back_in_every_command(name: str, tmp_path: Path):
    """Tables dropped offloads and updates without a word, and tables of programs with replicas could not be read."""
    file = tmp_path / "step.fpipe"
    output_of("export", name, "-p", "2", "-m", "4", "--output", str(file))
    exported = fpipe.Program.parse(file.read_text())
    assert exported == fpipe.Program.parse(output_of("export", str(file), "--format", "text"))
    assert f"{exported.microbatches} microbatches" in output_of("check", str(file))
    assert "makespan" in output_of("show", str(file))
    assert "bitwise equal to plain autograd" in output_of("verify", str(file))


LOSSES = {"pipe_offload": "would lose LOAD, OFFLOAD", "roundpipe": "would lose where some ops stand"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_table_that_would_lose_something_is_refused(name: str):
    code, _, complaint = run("export", name, "-p", "2", "-m", "4", "--format", "table")
    assert code == 1
    assert LOSSES[name] in " ".join(complaint.split())
    assert "rite a .fpipe file." in " ".join(complaint.split())
