"""Laws of pictures: whatever the program and its costs, each op is drawn once, where and when it happens."""

import json
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fpipe
from fpipe.pictures.box_labels import MIN_SIZE, SIZES, label_candidates, text_size, width_needed
from fpipe.pictures.drawn_shapes import Drawing, Rect, Text
from fpipe.pictures.layout import SEAM, lay_out
from fpipe.pictures.panel import Panel
from fpipe.pictures.perfetto import perfetto
from fpipe.program import lane_of
from property_tests.strategies import DrawnProgram, plans

SECONDS = st.sampled_from([0, 0.25, 1, 3])
COSTS = st.builds(fpipe.Costs, SECONDS, SECONDS, SECONDS, transfer=SECONDS)
SENDING = st.builds(fpipe.Costs, SECONDS, SECONDS, SECONDS, transfer=SECONDS, send=SECONDS, receive=SECONDS)

SWITCH = st.booleans()
STYLES = st.builds(
    fpipe.Style,
    width_mm=st.none() | st.floats(80, 300),
    font_pt=st.none() | st.floats(4, 9),
    labels=st.sampled_from(["all", "microbatch", "none"]),
    memory=SWITCH,
    waits=SWITCH,
    arrows=st.none() | SWITCH,
    figures=SWITCH,
    legend=SWITCH,
    critical_path=SWITCH,
    colours=st.sampled_from([{}, {"F": "#123456"}, lambda op: "#654321"]),
)


def panel(plan: DrawnProgram, costs: fpipe.Costs, transfers: bool) -> Panel:
    return Panel("", fpipe.simulate(fpipe.communicate()(plan.program) if transfers else plan.program, costs))


def boxes(drawing: Drawing) -> list[tuple[str, tuple[float, float]]]:
    """Return a drawing's ops, each with its left edge and its width, without the seam below the next box."""
    return [
        (shape.title.partition(": ")[0], (shape.x, shape.width - (0 if shape.edge else SEAM)))
        for shape in drawing.timed
        if isinstance(shape, Rect) and ", rank " in shape.title
    ]


def unlabelled_boxes(drawing: Drawing, panel: Panel, style: fpipe.Style) -> list[str]:
    """Return the cells whose boxes have room for their microbatch in small digits, and no text."""
    texts = [shape for shape in drawing.timed if isinstance(shape, Text) and not shape.grid]
    rects = {shape.title.partition(": ")[0]: shape for shape in drawing.timed if isinstance(shape, Rect)}
    (small, margin), cells = SIZES[-1], list[str]()
    for op, start, end in panel.timeline.events:
        names = label_candidates(op, "main", style)
        if end > start and names and lane_of(op) == "main":
            box = rects[f"{op.cell}, rank {op.rank}"]
            size = text_size(box.height)
            if size * small >= MIN_SIZE and width_needed(names[-1], size * small, margin) <= box.width:
                right = box.x + box.width
                inside = [text for text in texts if box.x < text.x < right and 0 < text.y - box.y < box.height]
                cells += [] if inside else [op.cell]
    return cells


@given(plans(), COSTS | SENDING, st.booleans(), STYLES)
def test_every_op_that_takes_time_is_one_box_at_its_time_in_every_style(
    plan: DrawnProgram, costs: fpipe.Costs, transfers: bool, style: fpipe.Style
):
    drawn_panel = panel(plan, costs, transfers)
    drawing = lay_out([drawn_panel], style=style)
    drawn_boxes = boxes(drawing)
    scale = drawing.span / (drawing.end or 1)
    expected = {
        f"{op.cell}, rank {op.rank}": (drawing.left + start * scale, (end - start) * scale)
        for op, start, end in drawn_panel.timeline.events
        if end > start
    }
    assert sorted(name for name, _ in drawn_boxes) == sorted(expected)
    assert all(box == pytest.approx(expected[name], abs=1e-6) for name, box in drawn_boxes)
    assert unlabelled_boxes(drawing, drawn_panel, style) == []


@given(plans(), COSTS, st.booleans(), st.sets(st.integers(0, 16), min_size=2, max_size=2))
def test_a_window_shows_exactly_the_events_that_overlap_it(
    plan: DrawnProgram, costs: fpipe.Costs, transfers: bool, part: set[int]
):
    timeline = panel(plan, costs, transfers).timeline
    start, end = (timeline.makespan * sixteenths / 16 for sixteenths in sorted(part))
    assume(start < end)
    events = [event for event in timeline.events if max(event.start, start) < min(event.end, end)]
    overlapping = Counter(f"{op.cell}, rank {op.rank}" for op, _, _ in events)
    drawn_panel = Panel("", timeline, (start, end))
    drawing = lay_out([drawn_panel], style=fpipe.Style(window=(start, end)))
    assert Counter(name for name, _ in boxes(drawing)) == overlapping
    for shape in drawing.timed:
        if isinstance(shape, Rect):
            assert drawing.left - 1e-6 <= shape.x <= shape.x + shape.width <= drawing.left + drawing.span + 1e-6
    trace_events = json.loads(perfetto([drawn_panel]))["traceEvents"]
    ops = [event for event in trace_events if event["ph"] == "X" and event["cat"] != "wait" and event["dur"] > 0]
    assert Counter(f"{op['name']}, rank {op['pid']}" for op in ops) == overlapping


@given(plans(), COSTS, st.booleans())
def test_ops_and_waits_fill_a_rank_until_it_is_done(plan: DrawnProgram, costs: fpipe.Costs, transfers: bool):
    drawn_panel = panel(plan, costs, transfers)
    for rank in range(drawn_panel.ranks):
        bars = drawn_panel.bars.get((rank, "main"), [])
        waits = [wait for wait in drawn_panel.waits if wait.rank == rank]
        pieces = [(piece.start, piece.end) for piece in (*bars, *waits)]
        reached = 0.0
        for start, end in sorted(pieces):
            assert start == pytest.approx(reached, abs=1e-9)
            reached = end


@given(plans(), COSTS, st.booleans())
def test_a_trace_has_every_event_and_the_peak(plan: DrawnProgram, costs: fpipe.Costs, transfers: bool):
    drawn_panel = panel(plan, costs, transfers)
    trace_events = json.loads(perfetto([drawn_panel]))["traceEvents"]
    ops = [trace_event for trace_event in trace_events if trace_event["ph"] == "X" and trace_event["cat"] != "wait"]
    events = ((op.cell, op.rank, start * 1e6, (end - start) * 1e6) for op, start, end in drawn_panel.timeline.events)
    assert Counter((op["name"], op["pid"], op["ts"], op["dur"]) for op in ops) == Counter(events)
    counters = [(event["pid"], event["args"]["microbatches"]) for event in trace_events if event["ph"] == "C"]
    for rank, peak in enumerate(drawn_panel.timeline.peak):
        if costs.forward and costs.backward_input and costs.backward_weight:  # else two changes may be one moment
            amounts = (amount for counter_rank, amount in counters if counter_rank == rank)
            assert max(amounts, default=0) == pytest.approx(peak)


@given(plans(), COSTS)
def test_text_to_scale_has_each_op_in_its_place(plan: DrawnProgram, costs: fpipe.Costs):
    drawn_panel = panel(plan, costs, transfers=False)
    rows = [line.partition("| ")[2] for line in fpipe.plot(drawn_panel.timeline, width=100_000).splitlines()]
    events = [event for event in drawn_panel.timeline.events if event.end > event.start]
    scale = max(((len(op.cell) + 1) / (end - start) for op, start, end in events), default=0)
    for op, start, _ in events:
        column = rows[op.rank].find(op.cell)
        assert column == pytest.approx(start * scale, abs=1)
        assert rows[op.rank].count(op.cell) == 1
