"""The report page and the trace."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cli.job_report.stage_trace import on_one_clock, trace_events, wan_transfers
from isthmus.cli.job_report.write_report import MAX_POINTS, MAX_TIMELINES, render_report
from isthmus.core.messages.agent_messages import Span, StepMetrics
from isthmus.core.views.api_views import HistoryEvent
from tests.cli.samples import CLUSTERS, START_S, make_job, make_metrics, make_plan, make_pool, make_view, message

pytestmark = pytest.mark.integration

VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Collects a page's tags, attributes, text and scripts, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts = "", []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data

    @property
    def data(self) -> dict[str, Any]:
        """The figures inside the page."""
        return json.loads(self.scripts[0])


def page_of(**changes: Any) -> Page:
    return Page(render_report(make_view(**changes), make_metrics(), make_pool()))


def test_the_page_names_the_tokenizer_and_the_commit_of_the_model() -> None:
    """What a job was given by default or by name is in the facts of the report."""
    job = make_job()
    data = job.data.model_copy(update={"tokenizer": "/models/tiny/tokenizer.json"})
    page = page_of(job=job.model_copy(update={"data": data, "model_source": "org/tiny@0123"}))
    assert "/models/tiny/tokenizer.json" in page.text
    assert "org/tiny@0123" in page.text


def test_the_page_says_what_was_trained_where_and_how_it_went() -> None:
    """Job, owners, virtual chips, loss, prediction against measurement, refusals with reasons."""
    page = Page(render_report(make_view(state="succeeded"), make_metrics(), make_pool(), extra={"efficiency": 0.87}))
    for word in (
        "stdlib-moe", "succeeded", "alice", "qingyang (owner-a)", "Virtual chips:", "BI-V150 at nanjing",
        "tiny-mixtral", "620.0 ms", "catalogue speed at 40 % of peak", "needs 93.1 MiB", "p2",
        "by 2.0 ms per step", "efficiency", "0.87", "38.1 MiB", "nanjing\u00a0→\u00a0hangzhou",
        "learning rate",
    ):  # fmt: skip
        assert word in page.text, word
    assert len(page.data["loss"]) == 40
    assert len(page.data["validation"]) == 4
    assert [one["step"] for one in page.data["timelines"]] == [5, 20]


def test_the_page_says_that_a_rehearsal_learned_nothing() -> None:
    """The page distinguishes a job of `compute: virtual` from one that computed on virtual chips."""
    page = page_of(job=make_job(compute="virtual"))
    assert "Virtual computation:" in page.text
    assert "Virtual chips:" not in page.text


def test_the_page_needs_no_network() -> None:
    """No address of anything outside, no element that would load one, and a policy that forbids it."""
    text = render_report(make_view(), make_metrics(), make_pool())
    assert not re.search(r"(https?:)?//[a-z]", text.replace("// ", ""), re.IGNORECASE)
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in page.tags)
    assert any("default-src 'none'" in (attributes.get("content") or "") for _, attributes in page.tags)


HOSTILE = '</script><script>alert(1)</script><b onclick="x">&amp;{{js}}\\u003c'


def test_what_users_and_sites_wrote_stays_text() -> None:
    """Names, reasons and labels never become elements, scripts, or marks of the template."""
    view = make_view(
        reason=HOSTILE,
        user="alice",
        job=make_job(model=f"/m/{HOSTILE}"),
        plan=make_plan().model_copy(update={"why": HOSTILE}),
    )
    benign = Page(render_report(make_view(reason="r"), make_metrics(), make_pool(), extra={"a": "b"}))
    page = Page(render_report(view, make_metrics(), make_pool(), extra={HOSTILE: HOSTILE}))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in benign.tags]
    assert page.scripts == benign.scripts
    assert page.text.count(HOSTILE) >= 4


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_any_reason_is_shown_as_it_was_written(reason: str) -> None:
    """Whatever the characters, the page stays well formed and the data stays JSON."""
    page = Page(render_report(make_view(reason=reason), make_metrics(2), None))
    assert page.data["loss"]


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "planning", "plan": None, "plans": None, "parts": ()},
        {"state": "failed", "reason": "no worker came up"},
    ],
)
def test_a_job_that_never_ran_has_a_page_too(changes: dict[str, Any]) -> None:
    """Without plan or metrics the page says so instead of failing."""
    page = Page(render_report(make_view(**changes), [], None))
    assert page.data["loss"] == page.data["timelines"] == []
    assert "Virtual" not in page.text


def test_a_long_job_keeps_the_page_small() -> None:
    """Curves and timelines are thinned; the first and the last point stay."""
    metrics = make_metrics(2000, traced=tuple(range(0, 200, 5)))
    page = Page(render_report(make_view(job=make_job()), metrics, make_pool()))
    assert len(page.data["loss"]) == MAX_POINTS
    assert (page.data["loss"][0][0], page.data["loss"][-1][0]) == (0, 1999)
    assert len(page.data["timelines"]) == MAX_TIMELINES


def test_transfers_follow_the_pipeline_both_ways() -> None:
    """Each micro-batch crosses each hop once forward and once backward, and arrives after it was sent."""
    step = [one for one in make_metrics(6) if one.step == 5]
    found = wan_transfers(step, make_plan())
    assert len(found) == 4 * 2 * 2
    ways = {(one.kind, one.source, one.target) for one in found}
    assert ways == {("forward", 0, 1), ("forward", 1, 2), ("backward", 2, 1), ("backward", 1, 0)}
    assert all(one.end_s >= one.start_s for one in found)
    first = next(one for one in found if (one.kind, one.source, one.micro_batch) == ("forward", 0, 0))
    assert first.end_s - first.start_s == pytest.approx(0.013, abs=1e-6)
    assert first.start_s - first.sent_s == pytest.approx(0.001, abs=1e-6)


def test_a_late_wait_moves_no_message() -> None:
    """Under the overlapped schedule a stage waits for its sends long after they arrived: bars follow the record.

    1. Rank 0 computes micro-batch 0 until 20 ms; the message leaves at 21 ms and arrives at 31 ms. 2. It waits for
    that send at 200 ms, in 0 ms. 3. Rank 1 waits for the receive from 30 to 31 ms. 4. The bar lasts from 21 to 31 ms.
    """
    spans = [
        [
            Span(kind="forward", micro_batch=0, start_s=0.0, end_s=0.020),
            Span(kind="send", micro_batch=0, start_s=0.2, end_s=0.2),
        ],
        [Span(kind="receive", micro_batch=0, start_s=0.030, end_s=0.031)],
    ]
    received = (message("forward", 0, 0, 0.020, 0.021, 0.031),)
    step = [
        StepMetrics(job="j", attempt=1, rank=rank, step=5, values={"step_s": 1.0}, spans=tuple(own), messages=messages)
        for rank, (own, messages) in enumerate(zip(spans, ((), received), strict=True))
    ]
    page = Page(render_report(make_view(), step, make_pool()))
    (link,) = page.data["timelines"][0]["links"]
    assert link == {"label": f"{CLUSTERS[0]} → {CLUSTERS[1]}", "spans": [["forward", 0, 21.0, 31.0, 1.0]]}


def test_ranks_with_different_clocks_share_one_timeline() -> None:
    """Clocks may be seconds apart: spans and messages are drawn on the clock of the first rank, via any chain.

    Rank 1 is 5 s ahead of rank 0, rank 2 is 2 s behind rank 1. Every rank records its own clock.
    """
    ahead_s = (0.0, 5.0, 3.0)
    truth = [one for one in make_metrics(6) if one.step == 5]

    def recorded(one: StepMetrics) -> StepMetrics:
        own_s = ahead_s[one.rank]
        spans = [x.model_copy(update={"start_s": x.start_s + own_s, "end_s": x.end_s + own_s}) for x in one.spans]
        times = ("sent_s", "first_left_s", "last_left_s", "arrived_s")
        messages = [
            x.model_copy(
                update={name: getattr(x, name) + own_s for name in times}
                | {"clock_offset_s": ahead_s[x.source] - own_s}
            )
            for x in one.messages
        ]
        return one.model_copy(update={"spans": tuple(spans), "messages": tuple(messages)})

    found = on_one_clock([recorded(one) for one in truth], make_plan())
    for one, true in zip(found, truth, strict=True):
        assert [x.start_s for x in one.spans] == pytest.approx([x.start_s for x in true.spans], abs=1e-5)
        assert [x.arrived_s for x in one.messages] == pytest.approx([x.arrived_s for x in true.messages], abs=1e-5)


def test_a_run_that_recorded_no_messages_gets_no_invented_ones() -> None:
    """Metrics of an earlier version have spans only: the page says so instead of drawing guesses."""
    old = [one.model_copy(update={"messages": ()}) for one in make_metrics()]
    text = render_report(make_view(), old, make_pool())
    timelines = Page(text).data["timelines"]
    assert [(one["links"], one["has_links"]) for one in timelines] == [([], True)] * 2
    assert "not recorded by this run" in text


def test_a_trace_is_json_in_the_order_of_time() -> None:
    """Names come first; then events whose times never go back; every span is there once."""
    metrics = make_metrics()
    events = trace_events(metrics, make_plan())
    assert json.loads(json.dumps(events)) == events
    names = [event for event in events if event["ph"] == "M"]
    assert events[: len(names)] == names
    assert {event["args"]["name"] for event in names} >= {*CLUSTERS, "WAN"}
    times = [event["ts"] for event in events[len(names) :]]
    assert times == sorted(times)
    assert times[0] == 0
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(one.spans) for one in metrics)
    assert all(event["dur"] >= 0 for event in complete)


def test_a_trace_pairs_what_it_begins() -> None:
    """Each asynchronous begin has its end, and no id comes twice."""
    events = trace_events(make_metrics(), make_plan())
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e")
    assert len(begun) == len(set(begun)) == 2 * 16


def test_what_shares_a_thread_of_a_trace_never_overlaps() -> None:
    """Viewers drop events that do not nest: sends, which go on beside computation, have their own thread."""
    events = [event for event in trace_events(make_metrics(), make_plan()) if event["ph"] == "X"]
    for thread in {event["tid"] for event in events}:
        own = [event for event in events if event["tid"] == thread]
        assert len({event["pid"] for event in own}) == 1
        for one, following in pairwise(own):
            assert one["ts"] + one["dur"] <= following["ts"] + 0.5


def test_no_spans_give_no_events() -> None:
    """An untraced job has an empty trace; a rank that the plan lacks is left out."""
    assert trace_events(make_metrics(traced=()), make_plan()) == []
    stranger = [StepMetrics(job="j", attempt=1, rank=9, step=5, values={}, spans=make_metrics(6)[15].spans)]
    assert [event for event in trace_events(stranger, make_plan()) if event["ph"] == "X"] == []


def test_the_page_tells_the_history_and_the_first_cause_once() -> None:
    """Events with their times, perplexity, both kinds of restarts, and what to do next; the cause stands once."""
    cause = "hangzhou failed its part (ranks 1): out of memory"
    events = (
        HistoryEvent(number=1, time_s=START_S, kind="started", attempt=1),
        HistoryEvent(number=2, time_s=START_S + 5, kind="worker-lost", attempt=1, cluster="nanjing", rank=2),
        HistoryEvent(number=3, time_s=START_S + 7, kind="resumed", attempt=1, step=40, seconds=2.0),
        HistoryEvent(number=4, time_s=START_S + 9, kind="lost", attempt=1, cluster="hangzhou", text=cause),
        HistoryEvent(number=5, time_s=START_S + 9, kind="failed", attempt=1, text="restarts used: 1 of 1"),
    )
    view = make_view(state="failed", restarts=1, worker_restarts=1, reason=f"{cause}; restarts used: 1 of 1")
    page = Page(render_report(view, make_metrics(), make_pool(), history=events))
    for word in (
        "worker lost: rank 2 at nanjing", "resumed from step 40 in 2", "perplexity", "isthmus logs j-3f9a2c",
        "1 worker processes replaced", "1 of 3 restarts of the job used",
    ):  # fmt: skip
        assert word in page.text, word
    assert page.text.count("out of memory") == 1
