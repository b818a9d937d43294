"""Which metrics and log text of a report the server stores: those for which the site may speak, of possible size."""

from __future__ import annotations

import pytest

from isthmus.control.queries.accepted_output import (
    MAX_LOG_OFFSET,
    MAX_NAME_CHARS,
    MAX_RECORDS,
    MAX_VALUES,
    accept_output,
    name_clusters,
    num_foreign_lines,
)
from isthmus.core.messages.agent_messages import AgentReport, LogChunk, Span, StepMetrics
from tests.control.driver import Driver, started
from tests.control.samples import cluster

STEPS = 5_000_000


def pool() -> Driver:
    """`j`, of 5,000,000 steps, was submitted at 100 s; rank 0 runs at `a`, rank 1 at `b`."""
    return started("a", "b", steps=STEPS)


def metrics(rank: int = 0, step: int = 1, job: str = "j", **more: object) -> StepMetrics:
    """Metrics of a step of attempt 1."""
    fields = {"job": job, "attempt": 1, "rank": rank, "step": step, "values": {"loss": 1.0}} | more
    return StepMetrics.model_construct(**fields)


def text(rank: int = 0, offset: int = 0, job: str = "j", attempt: int = 1) -> LogChunk:
    """A line of log text."""
    return LogChunk(job=job, attempt=attempt, rank=rank, offset=offset, text="x")


def report(*lines: StepMetrics | LogChunk) -> AgentReport:
    """A report of `a` with lines of output."""
    return AgentReport.model_construct(
        cluster=cluster("a"),
        metrics=tuple(line for line in lines if isinstance(line, StepMetrics)),
        logs=tuple(line for line in lines if isinstance(line, LogChunk)),
    )


def accepted(*lines: StepMetrics | LogChunk, now_s: float = 100.0, at: str = "a") -> tuple[int, int]:
    """Return how many metrics and chunks are accepted."""
    found, logs = accept_output(pool().coordinator.state, at, report(*lines), now_s)
    assert {line.cluster for line in (*found, *logs)} <= {at}
    return len(found), len(logs)


def test_a_site_speaks_for_the_ranks_that_it_was_ordered_to_run() -> None:
    """Not for those of another site, of another attempt, of an unknown job; its own name is put in."""
    assert accepted(metrics(), text()) == (1, 1)
    assert accepted(metrics(), text(), at="b") == (0, 0)
    assert accepted(metrics(1), text(1), at="b") == (1, 1)
    assert accepted(metrics(attempt=2), text(attempt=2)) == (0, 0)
    assert accepted(metrics(job="x"), text(job="x")) == (0, 0)
    assert accepted(metrics(cluster="b"), text()) == (1, 1)


@pytest.mark.parametrize(
    ("step", "now_s", "accepts"),
    [
        (1000, 100, 1),
        (1001, 100, 0),
        (2000, 101, 1),
        (2001, 101, 0),
        (1000, 50, 1),
        (STEPS, 1e6, 1),
        (STEPS + 1, 1e6, 0),
    ],
)
def test_a_step_is_one_that_the_job_can_have_reached(step: int, now_s: float, accepts: int) -> None:
    """1,000 at once and 1,000 a second, whatever a clock that was set back says; and no more than it has."""
    assert accepted(metrics(step=step), now_s=now_s) == (accepts, 0)


def spans(num: int, kind: str = "forward") -> tuple[Span, ...]:
    return (Span.model_construct(kind=kind),) * num


@pytest.mark.parametrize(
    ("fields", "accepts"),
    [
        ({"values": {str(i): 1.0 for i in range(MAX_VALUES)}}, 1),
        ({"values": {str(i): 1.0 for i in range(MAX_VALUES + 1)}}, 0),
        ({"spans": spans(MAX_RECORDS - 1), "messages": spans(1)}, 1),
        ({"spans": spans(MAX_RECORDS), "messages": spans(1)}, 0),
        ({"values": {"x" * MAX_NAME_CHARS: 1.0}}, 1),
        ({"values": {"x" * (MAX_NAME_CHARS + 1): 1.0}}, 0),
        ({"spans": spans(1, "x" * (MAX_NAME_CHARS + 1))}, 0),
        ({"messages": spans(1, "x" * (MAX_NAME_CHARS + 1))}, 0),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_metrics_are_of_bounded_size(fields: dict[str, object], accepts: int) -> None:
    """The last value within each bound counts."""
    line = metrics(**{"spans": (), "messages": ()} | fields)
    assert accepted(line, metrics()) == (accepts + 1, 0), "a report as a whole stands"


def test_an_offset_of_log_text_is_one_that_a_file_can_have() -> None:
    """The largest is accepted."""
    assert accepted(text(offset=MAX_LOG_OFFSET), text(offset=MAX_LOG_OFFSET + 1)) == (0, 1)


def test_lines_of_ranks_elsewhere_are_counted() -> None:
    """Of known jobs only: an unknown one may have been deleted."""
    state = pool().coordinator.state
    assert num_foreign_lines(state, "a", report(metrics(), text(), metrics(job="x"), text(job="x"))) == 0
    assert num_foreign_lines(state, "a", report(metrics(1), text(1), metrics(), metrics(attempt=2))) == 3


def test_stored_text_is_shown_with_the_site_of_its_rank() -> None:
    """Also of attempts that have ended; a rank that no site has run has none."""
    driver = pool()
    state = driver.coordinator.state
    chunks = (text(0), text(1), text(7), text(job="x"), text(attempt=3))
    assert [chunk.cluster for chunk in name_clusters(state, chunks)] == ["a", "b", None, None, None]
