"""Pictures show the ops and transfers at their times: as text, SVG, PNG, a page and a trace."""

import html
import json
import re
import runpy
import struct
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from fpipe.pictures.panel import Panel
from fpipe.pictures.style import FILLS
from fpipe.program import Program
from fpipe.verification.report import Report
from tests.refusals import refusals
from tests.test_memory import OFFLOADED

ONE_F_ONE_B = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(3), fpipe.merge())(fpipe.program(3))
GPIPE = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(3), fpipe.merge())(fpipe.program(3))
QUICK = fpipe.Costs(transfer=0.1)
SLOW = fpipe.Costs(forward=1.5, transfer=0.5)
SVG = "{http://www.w3.org/2000/svg}"


def read_boxes(file: Path) -> tuple[ET.Element, dict[str, tuple[float, float]]]:
    """Return the root of an SVG file, and (x, width) of each box by its title, which names an op and its rank."""
    root = ET.parse(file).getroot()
    span_by_title: dict[str, tuple[float, float]] = {}
    for box in root.iter(f"{SVG}rect"):
        title = box.findtext(f"{SVG}title") or ""
        if ", rank " in title:
            assert title not in span_by_title
            span_by_title[title] = float(box.get("x", "")), float(box.get("width", ""))
    return root, span_by_title


def read_labels(file: Path) -> list[str]:
    return [text.text or "" for text in ET.parse(file).getroot().iter(f"{SVG}text")]


# Text


def test_a_wide_grid_folds_into_blocks():
    wide = str(fpipe.plot(ONE_F_ONE_B)).splitlines()
    folded = str(fpipe.plot(ONE_F_ONE_B, width=40)).splitlines()
    assert max(map(len, folded)) <= 40
    blocks = "\n".join(folded).split("\nfrom tick 8:\n")
    assert len(blocks) == 2
    joined = zip(*(block.splitlines() for block in blocks), strict=True)
    assert [f"{line} {continuation.partition('| ')[2]}" for line, continuation in joined] == wide
    assert fpipe.plot(ONE_F_ONE_B, width=400) == fpipe.plot(ONE_F_ONE_B)


def test_a_long_program_stays_within_its_width():
    long = fpipe.chain(fpipe.split(128), fpipe.schedules.one_f_one_b(4))(fpipe.program(4))
    lines = fpipe.plot(long, costs=SLOW, width=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert set(lines[0].partition("|")[2]) <= set(" .FB-")
    assert lines[-1] == "F forward, B backward, - goes on, . idle; a character is 6.12 seconds"


def test_the_heading_of_a_text_stays_within_its_width():
    text = fpipe.plot(ONE_F_ONE_B, GPIPE, names=["one forward, one backward", "GPipe"], width=40).splitlines()
    assert max(map(len, text)) <= 40
    assert "one forward, one backward: makespan 18, span 18, bubble 33.3%, peak 3" in " ".join(text)


def test_a_grid_shows_pairs_and_the_copy_lane():
    table = fpipe.schedules.from_table("0F0 0F1 0B0 0B1\n1F0 (1F1;1B0) 1B1")
    paired = fpipe.chain(fpipe.split(2), table)(fpipe.program(2))
    assert "(1F1;1B0)" in fpipe.plot(paired, costs=fpipe.Costs(offload=1, pair="max")).splitlines()[1]
    assert fpipe.plot(OFFLOADED, costs=fpipe.Costs(offload=1)).splitlines()[1] == "  copy | ....O---LOAD............"


def test_colour_is_printed_on_terminals_or_on_request(monkeypatch):
    plain, coloured = fpipe.plot(GPIPE), fpipe.plot(GPIPE, colour=True)
    assert "\x1b[" not in str(plain)
    assert "\x1b[" in str(coloured)
    assert plain == coloured, "colour is how it prints, not what it is: a table reads it back either way"
    assert fpipe.schedules.from_table(coloured)(fpipe.split(4)(fpipe.program(3))).table() == GPIPE.table()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in str(plain)
    assert "\x1b[" not in f"{plain}"
    assert "\x1b[" not in str(fpipe.plot(GPIPE, colour=False))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in str(plain)


# SVG


def test_tooltips_give_the_times_and_waits_of_ops(tmp_path: Path):
    root, boxes = read_boxes(Path(fpipe.plot(ONE_F_ONE_B, costs=SLOW, file=tmp_path / "a.svg")))
    assert "1F0, rank 1: 2 to 3.5\nreads params[1] y[0,0]\nwrites y[1,0] res[1,0]" in boxes
    titles = {title.text for title in root.iter(f"{SVG}title")}
    assert {"rank 1 waits from 0 to 2\nfor 0F0 on rank 0", "rank 0 holds at most 3"} <= titles


def test_names_are_left_out_where_they_do_not_fit(tmp_path: Path):
    long = fpipe.chain(fpipe.split(64), fpipe.schedules.one_f_one_b(4))(fpipe.program(4))
    labels = read_labels(Path(fpipe.plot(long, file=tmp_path / "a.svg", width=600)))
    assert not set(labels) & {op.cell for op in long.ops}


def test_labels_show_slices_and_copies(tmp_path: Path):
    """Used to label every slice of microbatch 0 with 0."""
    sliced = fpipe.schedules.about("seq1f1b").program(3, 2, slices=3)
    labels = read_labels(Path(fpipe.plot(sliced, file=tmp_path / "a.svg")))
    assert {"0.0", "0.1", "1.2"} <= set(labels) or {"0F0.0", "0F0.1", "2F1.2"} <= set(labels)
    copied = fpipe.schedules.about("bpipe").program(4, 6)
    labels = read_labels(Path(fpipe.plot(copied, costs=fpipe.Costs(offload=1), file=tmp_path / "b.svg")))
    assert {"O", "L"} <= {label[:1] for label in labels}


# Many ranks


def test_a_row_of_microbatches_without_room_has_one_label(tmp_path: Path):
    """Used to label microbatches 0 to 9 alone on 16 ranks, and later none, though 0 to 9 fit."""
    labels = read_labels(Path(fpipe.plot(named_program("one_f_one_b", 16, 64), costs=QUICK, file=tmp_path / "a.svg")))
    assert {"10-15", "10-14"} <= set(labels)
    assert {str(microbatch) for microbatch in range(64)} <= set(labels)


def test_a_picture_has_all_arrows_or_none(tmp_path: Path):
    """Used to draw arrows between narrow ops, where they became a grey band."""
    _, few_arrows = draw_arrows(named_program("one_f_one_b", 4, 8), tmp_path)
    assert len(few_arrows) == 2 * 3 * 8
    _, no_arrows = draw_arrows(named_program("one_f_one_b", 16, 64), tmp_path)
    assert not no_arrows
    _, forced_arrows = draw_arrows(named_program("one_f_one_b", 16, 64), tmp_path, arrows=True)
    assert len(forced_arrows) == 2 * 15 * 64


def test_the_legend_explains_lighter_fills_once(tmp_path: Path):
    """Used to repeat the same words for schedules of two, four and six chunks a rank."""
    programs = [named_program(schedule, 4, 8) for schedule in ("hanayo", "zbv", "interleaved", "dualpipe", "gpipe")]
    labels = read_labels(Path(fpipe.plot(*programs, file=tmp_path / "a.svg")))
    lighter = ["first to last chunk of a rank", "first and second direction"]
    assert [label for label in labels if label.startswith("first ")] == lighter
    assert not [label for label in draw_labels(tmp_path) if label.startswith("first ")]


def test_the_heading_is_never_cut(tmp_path: Path):
    name = "One forward, one backward, of three ranks and four microbatches"
    root, _ = read_boxes(Path(fpipe.plot(ONE_F_ONE_B, names=[name], file=tmp_path / "a.svg", width=260)))
    lines = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert f"{name} makespan 18, span 18, bubble 33.3%, peak 3" in " ".join(lines)
    assert max(map(len, lines)) * 7.5 < 260


# Style


def draw_arrows(
    program: Program, folder: Path, costs: fpipe.Costs = SLOW, **style: object
) -> tuple[ET.Element, list[str]]:
    """Plot a program; return the root of the SVG and the titles of its transfers."""
    file = fpipe.plot(program, costs=costs, file=folder / "a.svg", style=fpipe.Style(**style))
    root = ET.parse(file).getroot()
    titles = [path.findtext(f"{SVG}title") or "" for path in root.iter(f"{SVG}path")]
    return root, [title for title in titles if " to " in title]


def draw_labels(folder: Path, costs: fpipe.Costs = SLOW, **style: object) -> list[str]:
    """Plot 1F1B; return the titles of the SVG, then its texts."""
    root, _ = draw_arrows(ONE_F_ONE_B, folder, costs, **style)
    return [node.text or "" for kind in ("title", "text") for node in root.iter(f"{SVG}{kind}")]


def test_a_picture_has_the_requested_size_on_paper(tmp_path: Path):
    paper = fpipe.Style(width_mm=84, font_pt=7)
    root = ET.parse(fpipe.plot(ONE_F_ONE_B, style=paper, file=tmp_path / "a.svg")).getroot()
    assert root.get("width") == "84mm"
    points = 84 / 25.4 * 72 / float(root.get("viewBox", "").split()[2])
    names = [group for group in root.iter(f"{SVG}g") if group.findtext(f"{SVG}text") == "rank 0"]
    sizes = {round(float(group.get("font-size", "")) * points, 2) for group in names}
    assert sizes == {7.0, 6.42}, "the names of ranks, twice"
    png = Path(fpipe.plot(ONE_F_ONE_B, style=paper, file=tmp_path / "a.png")).read_bytes()
    assert struct.unpack(">I", png[16:20])[0] == pytest.approx(84 / 25.4 * 300, abs=1)


def test_three_schedules_with_their_memory_are_no_higher_than_a_column(tmp_path: Path):
    """Rows on paper are as low as their unchanged text allows, and no rule crosses a text."""
    three = [named_program(name, 3, 4) for name in ("one_f_one_b", "zb_h1", "gpipe")]
    file = fpipe.plot(*three, names=["a", "b", "c"], style=fpipe.Style(width_mm=84, font_pt=7), file=tmp_path / "a.svg")
    root = ET.parse(file).getroot()
    assert float(root.get("height", "").removesuffix("mm")) <= 120
    label_heights = [float(text.get("y", "")) for text in root.iter(f"{SVG}text") if text.text == "microbatches held"]
    strokes = re.compile(r"M([\d.]+),([\d.]+) \1,([\d.]+)")
    rules = {stroke for path in root.iter(f"{SVG}path") for stroke in strokes.findall(path.get("d", ""))}
    assert rules
    assert len(label_heights) == 3
    assert not [rule for rule in rules for y in label_heights if float(rule[1]) < y - 4 < float(rule[2])]


def test_a_pdf_embeds_its_fonts_as_truetype(tmp_path: Path):
    """Journals refuse Type 3 fonts, which matplotlib embeds by default."""
    pdf = Path(fpipe.plot(ONE_F_ONE_B, file=tmp_path / "a.pdf")).read_bytes()
    assert b"/Type3" not in pdf
    assert b"/CIDFontType2" in pdf


def test_labels_are_whole_names_microbatches_or_none(tmp_path: Path):
    cells = {op.cell for op in ONE_F_ONE_B.ops if op.kind in "FB"}
    assert cells <= set(draw_labels(tmp_path))
    assert not cells & set(draw_labels(tmp_path, labels="microbatch"))
    assert {"0", "1", "2", "3"} <= set(draw_labels(tmp_path, labels="microbatch", window=(0, 9)))
    assert not cells & set(draw_labels(tmp_path, labels="none"))
    assert not [label for label in draw_labels(tmp_path, labels="none") if label.startswith("waits for")]


@pytest.mark.parametrize(
    ("switch", "label"),
    [
        ("memory", "microbatches held"),
        ("waits", "rank 1 waits from 0 to 2\nfor 0F0 on rank 0"),
        ("arrows", "y[0,0], rank 0 to 1: 1.5 to 2"),
        ("figures", "makespan 25, span 25, bubble 44.0%, peak 3"),
        ("legend", "F forward"),
    ],
)
def test_each_part_can_be_left_out(switch: str, label: str, tmp_path: Path):
    assert label in draw_labels(tmp_path)[1:]
    assert label not in draw_labels(tmp_path, **{switch: False})[1:]


@pytest.mark.parametrize("costs", [SLOW, fpipe.Costs(send=0.5, receive=0.5)], ids=["transfers", "sends"])
def test_the_critical_path_is_outlined(costs: fpipe.Costs, tmp_path: Path):
    """Used to raise KeyError: a SEND that costs add to a program takes rank time and has no lane."""
    path = fpipe.simulate(ONE_F_ONE_B, costs).critical_path
    ops = [f"{step.activity.cell} is on the critical path" for step in path if isinstance(step.activity, fpipe.Op)]
    labels = draw_labels(tmp_path, costs, critical_path=True)
    assert [label for label in labels if label.endswith("is on the critical path")] == ops
    assert "critical path" in labels
    assert not [label for label in draw_labels(tmp_path) if "critical" in label]


def test_narrow_ops_of_the_critical_path_keep_their_colours(tmp_path: Path):
    """Used to outline ops by two pixels, which covered ops four pixels wide."""
    style = fpipe.Style(width_mm=84, font_pt=7, critical_path=True)
    root, boxes = read_boxes(Path(fpipe.plot(named_program("zbv", 4, 8), style=style, file=tmp_path / "a.svg")))
    narrowest = min(width for _, width in boxes.values())
    frames = [group for group in root.iter(f"{SVG}g") if "critical" in "".join(group.itertext())]
    assert frames
    assert max(float(frame.get("stroke-width", 0)) for frame in frames) < narrowest / 4


def test_colours_are_by_kind_or_by_op(tmp_path: Path):
    def paints(colours: object) -> set[str]:
        root, _ = draw_arrows(ONE_F_ONE_B, tmp_path, colours=colours)
        return {str(group.get("fill")) for group in root.iter(f"{SVG}g")}

    assert {"#123456", FILLS["B"]} <= paints({"F": "#123456"})
    stages = ["#100000", "#200000", "#300000"]
    assert {*stages} <= paints(lambda op: stages[op.stage])
    assert FILLS["F"] not in paints(lambda op: stages[op.stage])


def test_ranks_may_be_renamed(tmp_path: Path):
    names = ["GPU 0", "GPU 1", "host"]
    assert draw_labels(tmp_path, ranks=names).count("host") == 2
    for event in read_trace(fpipe.plot(ONE_F_ONE_B, file=tmp_path / "a.json", style=fpipe.Style(ranks=names))):
        if event["name"] == "process_name":
            assert event["args"] == {"name": names[event["pid"]]}


def test_onto_axes_x_is_the_time(tmp_path: Path):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(6, 2))
    axes = figure.add_subplot()
    caption = fpipe.plot(ONE_F_ONE_B, ax=axes, style=fpipe.Style(memory=False))
    assert caption == "makespan 18, span 18, bubble 33.3%, peak 3"
    ends: set[float] = set()
    for collection in axes.collections:
        to_data = collection.get_transform() - axes.transData
        paths = map(to_data.transform_path, collection.get_paths())
        ends |= {round(float(path.vertices[:, 0].max()), 2) for path in paths}
    assert {1.0, 2.0, 3.0, 18.0} <= ends
    assert "0B3" in {text.get_text() for text in axes.texts}
    figure.savefig(tmp_path / "a.png")


# Measured


def test_a_measured_step_is_drawn_like_a_simulated_one(tmp_path: Path):
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=torch.nn.functional.mse_loss)
    for program in (GPIPE, fpipe.communicate()(GPIPE)):
        step = fpipe.build(program, model, record=True)
        timeline = step(params, (torch.randn(8, 8), torch.randn(8, 8))).timeline
        _, boxes = read_boxes(Path(fpipe.plot(timeline, ONE_F_ONE_B, names=["run", "plan"], file=tmp_path / "a.svg")))
        for cell in ("0F0", "2B3"):
            assert sum(title.startswith(f"{cell}, rank") for title in boxes) == 2
        assert {"bytes held", "gradients", "residuals", "in flight"} <= {*read_labels(tmp_path / "a.svg")}
        for rank in range(3):
            assert max(byte_count for _, byte_count in timeline.memory_curve(rank)) == timeline.peak[rank]
        path = Panel("", timeline, (timeline.makespan / 4, timeline.makespan / 2)).path
        assert {step[:3] for step in path if isinstance(step.activity, fpipe.Op)} <= {*timeline.events}, "no idle time"
        assert any(wait.op and wait.op.cell == "1F0" and wait.writer.cell == "0F0" for wait in timeline.waits)


def test_ops_that_differ_most_are_outlined_and_named(tmp_path: Path):
    costs = fpipe.Costs(lambda s, i: 1 + ((s, i) == (1, 2)), backward=lambda s, i: 2 + 3 * ((s, i) == (2, 0)))
    slower = fpipe.simulate(ONE_F_ONE_B, costs)
    style = fpipe.Style(differences=3)
    assert "differs most: 2B0 +3, 1F2 +1\n" in fpipe.plot(ONE_F_ONE_B, slower, names=["plan", "run"], style=style)
    file = Path(fpipe.plot(ONE_F_ONE_B, slower, style=style, file=tmp_path / "a.svg"))
    assert {"2B0 takes 5, not 2", "1F2 takes 2, not 1"} <= {title.text for title in ET.parse(file).iter(f"{SVG}title")}


# PNG, PDF, HTML


def test_a_png_has_twice_the_pixels(tmp_path: Path):
    fpipe.plot(ONE_F_ONE_B, file=tmp_path / "a.svg", width=800)
    fpipe.plot(ONE_F_ONE_B, file=tmp_path / "a.png", width=800)
    root, _ = read_boxes(tmp_path / "a.svg")
    png = (tmp_path / "a.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    expected = 1600, 2 * float(root.get("height", ""))
    assert struct.unpack(">II", png[16:24]) == pytest.approx(expected, abs=1)


def test_a_png_without_matplotlib_names_the_alternatives(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install matplotlib, or write \.svg or \.html"):
        fpipe.plot(GPIPE, file=tmp_path / "a.png")


def test_a_page_is_self_contained_and_names_every_op(tmp_path: Path):
    page = Path(fpipe.plot(GPIPE, names=["x < y"], file=tmp_path / "a.html")).read_text(encoding="utf-8")
    assert "<title>x &lt; y</title>" in page
    assert not [
        scheme for scheme in ("http://", "https://") if scheme in page.replace("http://www.w3.org/2000/svg", "")
    ]
    picture = ET.fromstring(page[page.index("<svg") : page.rindex("</svg>") + 6])
    assert {op.cell for op in GPIPE.ops if op.kind in "FB"} <= {text.text for text in picture.iter(f"{SVG}text")}
    assert float(picture.get("width", "")) == 600, "its script widens it to the window"
    moving = next(group for group in picture.iter(f"{SVG}g") if group.get("id") == "right")
    assert [text.text for text in moving.iter(f"{SVG}text")] == ["4", "4", "4", "time"]


# Perfetto


def read_trace(file: str) -> list[dict[str, object]]:
    return json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]


def test_a_trace_keeps_to_its_format(tmp_path: Path):
    needed = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "C": {"ts", "args"}, "s": {"ts", "id"}, "f": {"ts", "id", "bp"}}
    events = read_trace(fpipe.plot(ONE_F_ONE_B, GPIPE, costs=SLOW, file=tmp_path / "a.json"))
    for event in events:
        assert {"ph", "name", "pid", "tid"} | needed[event["ph"]] <= event.keys()
    assert {event["pid"] for event in events} == set(range(6))


@pytest.mark.parametrize("program", [ONE_F_ONE_B, fpipe.communicate()(ONE_F_ONE_B)], ids=["plain", "with transfers"])
def test_an_arrow_of_a_trace_goes_from_the_writer_to_the_reader(program: Program, tmp_path: Path):
    events = read_trace(fpipe.plot(program, costs=SLOW, file=tmp_path / "a.json"))
    ops = [event for event in events if event["ph"] == "X" and event["cat"] in "FB"]

    def op_name_at(flow):
        ops_around = (op for op in ops if op["pid"] == flow["pid"] and op["ts"] <= flow["ts"] <= op["ts"] + op["dur"])
        return next(ops_around)["name"]

    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    arrows = {(op_name_at(flow), op_name_at(ends[flow["id"]])) for flow in events if flow["ph"] == "s"}
    hops = [((f"{s}F{m}", f"{s + 1}F{m}"), (f"{s + 1}B{m}", f"{s}B{m}")) for s in range(2) for m in range(4)]
    assert arrows == {*chain.from_iterable(hops)}


# The pages' own


def test_the_pictures_of_the_docs_are_up_to_date(tmp_path: Path):
    folder = Path(__file__).parents[1] / "docs" / "pictures"
    runpy.run_path(str(folder / "draw.py"))["draw_simulated"](tmp_path)
    for file in tmp_path.iterdir():
        hint = f"python docs/pictures/draw.py makes a new {file.name}"
        assert file.read_text() == (folder / file.name).read_text(), hint
        assert file.stat().st_size < 60_000


# Notebooks


def test_programs_timelines_and_plots_have_notebook_pictures():
    for drawable in (GPIPE, fpipe.simulate(GPIPE), fpipe.plot(GPIPE, ONE_F_ONE_B)):
        html = drawable._repr_html_()
        picture = html[html.index("<svg") : html.rindex("</svg>") + 6]
        assert ET.fromstring(picture).tag == f"{SVG}svg"


@pytest.mark.parametrize(
    ("make_result", "pictures"),
    [
        (lambda: fpipe.compare(["gpipe", "zbv", "chimera"], 3, 4), 1),
        (lambda: fpipe.search(2, ranks=2, microbatches=2, seconds=0.01, solver="local"), 1),
        (lambda: fpipe.plan_run(fpipe.Costs(), fpipe.Machine(2), fpipe.Candidates([2], schedules=["gpipe"])), 1),
        (lambda: fpipe.from_functions([lambda params, x: x]), 0),
        (lambda: Report(()), 0),
    ],
    ids=["Comparison", "SearchResult", "RunPlan", "Model", "Report"],
)
def test_results_have_notebook_text_and_pictures(make_result: Callable[[], Any], pictures: int):
    result = make_result()
    page = result._repr_html_()
    assert page.startswith(f"<pre>{html.escape(str(result))}</pre>")
    assert page.count("<svg") == pictures
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        ET.fromstring(svg)


def test_a_program_too_long_for_a_notebook_shows_a_hint(monkeypatch):
    monkeypatch.setattr("fpipe.pictures.plot._MAX_EVENTS", 10)
    assert GPIPE._repr_html_() == (
        "<pre>makespan 18, span 18, bubble 33.3%, peak 4\nfpipe.plot(..., file='picture.html') draws it.</pre>"
    )


# Errors


test_refusals = refusals(
    globals(),
    """
fpipe.Style(width_mm=-1)
    ValueError: width_mm= is a positive number; found -1
fpipe.Style(window=(4, 2))
    ValueError: window= is (start, end) in seconds, 0 <= start < end; found (4, 2)
fpipe.Style(colours={'F': 'blue'})
    ValueError: a colour is written as '#2a66be'; found 'blue' for F
fpipe.Style(colours={'G': '#2a66be'})
    ValueError: 'G' is not a kind of op
fpipe.plot(GPIPE, file='a.svg', style=fpipe.Style(ranks=['a']))
    ValueError: ranks= lists 3 names, one a rank; found 1
fpipe.plot(GPIPE, file='a.svg', style=fpipe.Style(window=(18, 20)))
    ValueError: window= starts at 18, when all is done: the end is 18
fpipe.plot(GPIPE, file='a.svg', style=fpipe.Style(width_mm=20))
    ValueError: the picture is too narrow: 0 of at least 80 pixels are left for ops.
    Give it more width, or a smaller font.
fpipe.plot(GPIPE, file='a.svg', style=fpipe.Style(width_mm=84), width=800)
    ValueError: leave width= out
fpipe.plot(GPIPE, style=fpipe.Style(memory=False))
    ValueError: text has no memory=; of a style it takes figures, differences, window, ranks
fpipe.plot(GPIPE, file='a.html', style=fpipe.Style(font_pt=7))
    ValueError: a page has no font_pt=
fpipe.plot(GPIPE, file='a.json', style=fpipe.Style(labels='none'))
    ValueError: a trace has no labels=
fpipe.plot(GPIPE, ax='here')
    TypeError: ax= is a matplotlib Axes, as plt.subplots() makes; found str
fpipe.plot(GPIPE, file='a.gif')
    ValueError: ends in .svg, .png, .pdf, .html, .json; found 'a.gif'
fpipe.plot(GPIPE, file='none/a.svg')
    FileNotFoundError: is not a folder: create it first
fpipe.plot(GPIPE, GPIPE, names=['one'])
    ValueError: names= lists 2 names, one a schedule; found 1
fpipe.plot(fpipe.simulate(GPIPE), costs=SLOW)
    ValueError: a Timeline has its times already
fpipe.plot(GPIPE, width=3)
    ValueError: at least 40; found 3
""",
)


def test_a_program_of_no_duration_is_drawn(tmp_path: Path):
    free = fpipe.Costs(forward=0, backward_input=0, backward_weight=0)
    for ending in (".svg", ".png", ".html", ".json"):
        fpipe.plot(GPIPE, costs=free, file=tmp_path / f"a{ending}")
    assert fpipe.plot(GPIPE, costs=free).splitlines()[0] == "rank 0 |"


def named_program(schedule: str, ranks: int, microbatches: int) -> Program:
    return fpipe.schedules.about(schedule).program(ranks, microbatches)
