"""Rules of the trace and of the page."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from isthmus.schedule import make_schedule
from isthmus.sim import (
    Replica,
    SimulatedLink,
    SimulatedTraining,
    SimulationResult,
    StageLoad,
    chrome_trace,
    simulate_training,
    timeline_page,
)
from isthmus.sim.output.fold_replicas import fold_replicas
from isthmus.sim.output.link_load import NUM_BINS, link_load
from isthmus.sim.simulation_result import LinkResult, MessageTrace


def run(name="a"):
    stages = tuple(StageLoad(cluster=c, forward_s=0.01, backward_s=0.02, boundary_bytes=1e5,
                             gradient_bytes=1e6, activation_bytes=100.0) for c in (name, "b"))  # fmt: skip
    wires = {ends: SimulatedLink(name="w", bytes_per_s=1e8, delay_s=0.005) for ends in ((name, "b"), ("b", name))}
    replica = Replica(stages=stages, schedule=make_schedule("1f1b", 2, 3))
    return simulate_training(SimulatedTraining(replicas=(replica, replica), links=wires))


def run_unequal():
    """Two equal replicas and one with a slower stage."""
    fast, slow = (
        tuple(
            StageLoad(cluster=c, forward_s=f, backward_s=0.02, boundary_bytes=1e3, activation_bytes=1.0) for c in "ab"
        )
        for f in (0.01, 0.03)
    )
    schedule = make_schedule("1f1b", 2, 3)
    wires = {ends: SimulatedLink(name="w", bytes_per_s=1e9, delay_s=0.005) for ends in (("a", "b"), ("b", "a"))}
    replicas = tuple(Replica(stages=stages, schedule=schedule) for stages in (fast, fast, slow))
    return simulate_training(SimulatedTraining(replicas=replicas, links=wires))


def test_the_trace_holds_every_span_and_message():
    """Spans become complete events with microseconds, messages begin and end, memory is a counter."""
    one = run()
    events = json.loads(json.dumps(chrome_trace(one)))["traceEvents"]
    by_phase = {phase: [e for e in events if e["ph"] == phase] for phase in "XbeCM"}
    assert len(by_phase["X"]) == len(one.spans)
    assert len(by_phase["b"]) == len(by_phase["e"]) == len(one.message_traces) == 6
    assert len(by_phase["C"]) == sum(len(stage.memory_over_time) for stage in one.stages)
    assert sum(e["dur"] for e in by_phase["X"]) > 0
    assert max(e["ts"] + e["dur"] for e in by_phase["X"]) <= one.total_s * 1e6 + 1e-3
    assert all(end["ts"] >= begin["ts"] for begin, end in zip(by_phase["b"], by_phase["e"], strict=True))
    names = [e["args"]["name"] for e in by_phase["M"]]
    assert {"links", "replica 0", "stage 0 (a)", "a to b"} <= set(names)


def tree_of(page):
    """The page as XML, which is well-formed."""
    return ET.fromstring(page.removeprefix("<!doctype html>\n"))


def test_the_page_is_whole_and_loads_nothing():
    """Well-formed, with a rectangle per span of the folded rows, and neither script nor address in it."""
    one = run()
    page = timeline_page(one, "two clusters")
    rectangles = [node for node in tree_of(page).iter() if node.tag == "rect"]
    assert len(rectangles) == sum(span.end_s > span.start_s for span in one.spans)
    assert any("critical" in node.get("class") for node in rectangles)
    for word in ("<script", "http:", "https:", "src=", "href", "@import", "url("):
        assert word not in page
    assert "default-src 'none'" in page
    assert "Simulated, not measured" in page


def test_equal_replicas_share_their_rows():
    """Two equal replicas and a slower one: two rows for the equal ones, in timeline and table, and two more."""
    page = timeline_page(run_unequal(), "three replicas")
    rows = [node.get("aria-label") for node in tree_of(page).iter("g")]
    assert [text.split(":")[0] for text in rows if text.startswith("replica")] == [
        "replicas 0-1, stage 0, a", "replicas 0-1, stage 1, b", "replica 2, stage 0, a", "replica 2, stage 1, b",
    ]  # fmt: skip
    cells = [node.text for node in tree_of(page).iter("td")]
    assert cells.count("replicas 0-1") == 2
    assert cells.count("replica 2") == 2


def test_equal_spans_fold_and_different_ones_do_not():
    """Where the simulator keeps replicas apart, rows fold only if every span agrees."""
    one = run()
    spans = tuple(replace(span, replica=replica) for replica in (0, 1) for span in one.spans)
    assert [folded.replicas for folded in fold_replicas(replace(one, spans=spans))] == [(0, 1)]
    late = (*spans[:-1], replace(spans[-1], end_s=spans[-1].end_s + 1e-3))
    assert [folded.replicas for folded in fold_replicas(replace(one, spans=late))] == [(0,), (1,)]


def test_rows_are_reached_by_keyboard_and_announce_their_figures():
    """Every stage and link takes the focus, and its label has the figures of its row."""
    groups = list(tree_of(timeline_page(run(), "keys")).iter("g"))
    assert {(node.get("tabindex"), node.get("role")) for node in groups} == {("0", "img")}
    labels = [node.get("aria-label") for node in groups]
    assert all("busy" in label and "%" in label for label in labels)
    assert [label.split(":")[0] for label in labels if label.startswith("link")] == ["link a to b", "link b to a"]


def test_links_are_drawn_with_their_busy_share():
    """The share in each interval is the covered part of it: messages that share the link count once."""
    spans = [(0.0, 0.25), (0.125, 0.5), (0.75, 0.8)]
    traces = tuple(
        MessageTrace(
            replica=0, source="a", target="b", what="x", sent_s=begin, started_s=begin, left_s=end, arrives_s=end,
            num_bytes=1.0,
        )
        for begin, end in spans
    )  # fmt: skip
    idle = LinkResult(source="b", target="a", num_bytes=0.0, utilisation=0.0)
    one = SimulationResult(iteration_s=1.0, iterations=1, stages=(), links=(idle,), message_traces=traces)
    shares = link_load(one, 4)
    assert shares["a", "b"] == pytest.approx((1.0, 1.0, 0.0, 0.2))
    assert shares["b", "a"] == (0.0,) * 4
    assert sum(link_load(one)["a", "b"]) / NUM_BINS == pytest.approx(0.55)


def test_the_page_escapes_names():
    """A title or cluster name cannot put markup on the page."""
    page = timeline_page(run("<b>x"), "<script>alert(1)</script>")
    assert "<script" not in page
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page


def test_a_page_without_links_or_time():
    """One stage alone has no links; a run of no time has no axis."""
    stage = StageLoad(cluster="a", forward_s=0.0, backward_s=0.0)
    alone = Replica(stages=(stage,), schedule=make_schedule("1f1b", 1, 1))
    page = timeline_page(simulate_training(SimulatedTraining(replicas=(alone,))), "nothing")
    assert "None." in page
