"""What each gauge says, with bounded label sets, and that no name of others breaks the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from isthmus.control.accounting.ledger import Ledger, Transaction
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.forecast_inputs import JobProgress
from isthmus.control.queries.monitoring.pool_figures import MAX_JOBS, pool_figures
from isthmus.control.service.metrics.ledger_watch import LedgerWatch
from isthmus.control.state.job_history import JobHistory
from isthmus.core.messages.agent_messages import ObservedPart, StepMetrics, WorkerAddress
from isthmus.core.text.gauge_text import GaugeText
from isthmus.core.views.api_views import HistoryKind
from tests.control.serving import EAST, WEST, report
from tests.control.test_metrics import samples
from tests.control.test_server_api import Server


def running_job(server: Server, **fields: object) -> str:
    """Return a job whose ranks run at both sites."""
    job = server.committed(**fields).id
    for rank, site in enumerate((EAST, WEST)):
        workers = (WorkerAddress(rank=rank, cluster=site.name, host="127.0.0.1", port=4000 + rank),)
        server.sync(report(site, ObservedPart(job=job, attempt=1, state="running", workers=workers)))
    assert server.job(job).state == "running"
    return job


def test_a_running_job_has_its_steps_times_and_checkpoints(server: Server) -> None:
    """Measured beside predicted; without a checkpoint the time since the start counts."""
    job = running_job(server)
    line = StepMetrics(job=job, attempt=1, rank=0, step=1, values={"step_s": 0.5})
    part = ObservedPart(job=job, attempt=1, state="running")
    server.sync(report(EAST, part, metrics=(line,)))
    found = samples(server)
    assert found["isthmus_job_steps_done", job, "ann"] == 2
    assert found["isthmus_job_planned_steps", job, "ann"] == 2
    assert found["isthmus_job_step_seconds", job, "ann"] == 0.5
    assert found["isthmus_job_checkpoint_timestamp_seconds", job, "ann"] == 1000
    assert found["isthmus_job_checkpoint_interval_seconds", job, "ann"] == 100 * 0.5
    assert found["isthmus_parts", "east", "owner-east", "running"] == 1
    assert ("isthmus_job_predicted_step_seconds", job, "ann") not in found, "a plan without a prediction has none"


def test_attempts_that_end_before_they_save_count_together(server: Server) -> None:
    """The time without a checkpoint is that of running since the last one, without the waits between attempts."""
    job = running_job(server)
    state = Coordinator.replay(event for _, event in server.store.events()).state
    record = state.jobs[job]
    record.history, record.attempt, record.started_s = JobHistory(), 3, 2000.0
    lines: list[tuple[HistoryKind, int, float]] = [
        ("started", 1, 100.0), ("checkpoint", 1, 150.0), ("lost", 1, 170.0), ("started", 2, 900.0), ("lost", 2, 930.0),
        ("started", 3, 2000.0),
    ]  # fmt: skip
    for kind, attempt, at_s in lines:
        record.history.add(kind, at_s, attempt)

    def saved_s() -> float:
        (found,) = pool_figures(state, 3000.0, {}).jobs
        return found.saved_s

    assert saved_s() == 2000 - (170 - 150) - (930 - 900)
    record.history.add("checkpoint", 2040.0, 3)
    assert saved_s() == 2040


def test_the_first_of_the_waiting_jobs_says_how_long_the_queue_stands(server: Server) -> None:
    """By priority, and 0 without a job that waits; one whose user must choose a plan makes no queue stand."""
    assert samples(server)[("isthmus_queue_oldest_wait_seconds",)] == 0
    server.submit(policy="manual", priority="high")
    server.now_s += 30
    server.submit(policy="auto")
    server.now_s += 70
    server.submit(policy="auto", priority="low")
    found = samples(server)
    assert found[("isthmus_queue_oldest_wait_seconds",)] == 70
    assert sum(value for name, value in found.items() if name[0] == "isthmus_queue_jobs") == 3


def test_jobs_beyond_the_limit_have_no_series_and_are_counted(server: Server) -> None:
    """The number of series is bounded, whatever the users do."""
    job = running_job(server)
    state = Coordinator.replay(event for _, event in server.store.events()).state
    state.live_jobs.update({f"other-{i}": state.live_jobs[job] for i in range(MAX_JOBS + 6)})
    found = pool_figures(state, 2000.0, {job: JobProgress(1, 0.5)})
    assert (len(found.jobs), found.num_jobs_left_out) == (MAX_JOBS, 7)


@given(st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False), min_size=1, max_size=5))
def test_any_value_of_a_label_is_read_back_by_the_parser(values: dict[str, float]) -> None:
    """Quotes, backslashes and line ends of names stay inside of their value."""
    found = list({text.replace("\r", "?"): value for text, value in values.items()}.items())
    gauges = GaugeText()
    gauges.add_series("isthmus_of_test", "Help.", ("one",), [((text,), value) for text, value in found])
    (family,) = text_string_to_metric_families(gauges.encoded().decode())
    assert [(sample.labels["one"], sample.value) for sample in family.samples] == found


def test_the_ledger_is_followed_from_where_it_was() -> None:
    """Entries, their sum, and entries without a counterpart; a ledger that was rebuilt is counted from its start."""
    ledger, watch = Ledger(), LedgerWatch()

    def add(*entries: tuple[str, int]) -> None:
        number = ledger.next_number
        one = Transaction(number=number, kind="usage", dated_ms=0, job="a", user="ann", attempt=1, entries=entries)
        ledger.add(one)

    add(("job:a", -5), ("owner:o", 5))
    watch.follow(ledger)
    assert (watch.num_entries, watch.sum_millionths, watch.num_unpaired) == (2, 0, 0)
    add(("job:a", -5), ("owner:o", 4))
    add(("job:a", 0))
    watch.follow(ledger)
    watch.follow(ledger)
    assert (watch.num_entries, watch.sum_millionths, watch.num_unpaired) == (5, -1, 3)
    watch.follow(Ledger())
    assert (watch.num_entries, watch.sum_millionths, watch.num_unpaired) == (0, 0, 0)
