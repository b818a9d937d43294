"""Rules of the trace and of the page."""

import json
import xml.etree.ElementTree as ET

from isthmus.schedule import make_schedule
from isthmus.sim import (
    Replica,
    SimulatedLink,
    SimulatedTraining,
    StageLoad,
    chrome_trace,
    simulate_training,
    timeline_page,
)


def run(name="a"):
    stages = tuple(StageLoad(cluster=c, forward_s=0.01, backward_s=0.02, boundary_bytes=1e5,
                             gradient_bytes=1e6, activation_bytes=100.0) for c in (name, "b"))  # fmt: skip
    wires = {ends: SimulatedLink(name="w", bytes_per_s=1e8, delay_s=0.005) for ends in ((name, "b"), ("b", name))}
    replica = Replica(stages=stages, schedule=make_schedule("1f1b", 2, 3))
    return simulate_training(SimulatedTraining(replicas=(replica, replica), links=wires))


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


def test_the_page_is_whole_and_loads_nothing():
    """Well-formed, with a rectangle per span, and neither script nor address in it."""
    one = run()
    page = timeline_page(one, "two clusters")
    tree = ET.fromstring(page.removeprefix("<!DOCTYPE html>").replace('<meta charset="utf-8">', ""))
    rectangles = [node for node in tree.iter() if node.tag == "rect"]
    assert len(rectangles) == sum(span.end_s > span.start_s for span in one.spans)
    assert any(node.get("stroke") == "#000" for node in rectangles)
    for word in ("<script", "http", "src=", "href", "@import", "url("):
        assert word not in page
    assert "Simulated, not measured" in page


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
