"""`Meters`: the server's Prometheus metrics; `exposition` renders them as text.

Counters and histograms grow with durable events; gauges are read at each scrape.
"""

from __future__ import annotations

import functools
from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from isthmus.control.service.actor import Folded
from isthmus.control.service.auth import Caller
from isthmus.control.state.events import JobChanged
from isthmus.core.messages.api_views import PoolView

CONTENT_TYPE = CONTENT_TYPE_LATEST
WAITS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600, 168 * 3600)
APPENDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
BATCHES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Meters:
    """The metrics of one server. Only one thread at a time may call `look` and `flushed`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._states: dict[str, str] = {}
        self._by_state: Tally[str] = Tally()
        self._events = Counter(
            "isthmus_events", "Events applied from the log.", ["kind"], registry=self.registry
        )
        self._steps = Counter(
            "isthmus_job_steps", "Job transitions into a state.", ["state"], registry=self.registry
        )
        self._waits = Histogram(
            "isthmus_queue_wait_seconds",
            "Time from a job's submission until all its ranks first ran.",
            buckets=WAITS_S,
            registry=self.registry,
        )
        self._appends = Histogram(
            "isthmus_append_seconds",
            "Time from a batch's decision until it was on disk.",
            buckets=APPENDS_S,
            registry=self.registry,
        )
        self._batches = Histogram(
            "isthmus_append_events", "Events per flush.", buckets=BATCHES, registry=self.registry
        )
        # `labels` takes a lock at each call: cache its results.
        self._of_kind = functools.cache(self._events.labels)
        self._into_state = functools.cache(self._steps.labels)
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self.registry)

    def flushed(self, seconds: float, num_events: int) -> None:
        """Record an append: seconds until it was on disk, and its number of events."""
        self._appends.observe(seconds)
        self._batches.observe(num_events)

    def resume(self, job_id: str, state: str) -> None:
        """Restore a job's state from a snapshot."""
        self._states[job_id] = state
        self._by_state[state] += 1

    def look(self, folded: Folded) -> None:
        """Count the changes of a durable event; an event replayed at the start only sets job states."""
        if folded.live:
            self._of_kind(folded.event.kind).inc()
        for instruction in folded.asked:
            if isinstance(instruction, JobChanged):
                self._look_at(folded, instruction.job_id)

    def forget(self, job_id: str) -> None:
        """Remove a deleted job."""
        self._by_state[self._states.pop(job_id, "")] -= 1

    def _look_at(self, folded: Folded, job_id: str) -> None:
        job = folded.coordinator.state.jobs.get(job_id)
        before = self._states.get(job_id, "")
        if job is None or job.state == before:
            return
        self._states[job_id] = job.state
        self._by_state[before] -= 1
        self._by_state[job.state] += 1
        if not folded.live:
            return
        self._into_state(job.state).inc()
        if job.state == "running" and job.attempt == 1:
            self._waits.observe(folded.event.now_s - job.submitted_s)

    def jobs(self) -> dict[str, int]:
        """Return the number of jobs by state."""
        return {state: count for state, count in self._by_state.items() if state and count > 0}


class _Now(Collector):
    """Collects gauges at one scrape."""

    def __init__(self, pool: PoolView, plain: dict[str, tuple[str, float]], jobs: dict[str, int]) -> None:
        self._pool, self._plain, self._jobs = pool, plain, jobs

    def collect(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("isthmus_jobs", "Jobs by state.", labels=["state"])
        for state, count in sorted(self._jobs.items()):
            jobs.add_metric([state], count)
        yield jobs
        for name, (text, value) in self._plain.items():
            yield GaugeMetricFamily(name, text, value=value)
        yield from self._clusters()

    def _clusters(self) -> Iterable[Metric]:
        where = ["cluster", "owner"]
        up = GaugeMetricFamily("isthmus_cluster_connected", "1 while the agent reports.", labels=where)
        last_report = GaugeMetricFamily(
            "isthmus_agent_last_report_timestamp_seconds", "Time of the agent's last report.", labels=where
        )
        chips = GaugeMetricFamily("isthmus_chips", "Installed chips.", labels=[*where, "node_group", "chip"])
        free = GaugeMetricFamily(
            "isthmus_chips_free", "Chips available to jobs.", labels=[*where, "node_group", "chip"]
        )
        for view in self._pool.clusters:
            label_values = [view.cluster.name, view.cluster.owner]
            up.add_metric(label_values, view.connected)
            if view.last_report_s is not None:
                last_report.add_metric(label_values, view.last_report_s)
            for group in view.cluster.node_groups:
                chips.add_metric([*label_values, group.name, group.chip], group.chips)
                free.add_metric([*label_values, group.name, group.chip], view.free_chips.get(group.name, 0))
        return up, last_report, chips, free


def exposition(caller: Caller, meters: Meters, pool: PoolView, plain: dict[str, tuple[str, float]]) -> bytes:
    """Return the metrics in Prometheus text format: for an admin all, for an owner those of its clusters.

    `pool` is already restricted to what the caller may see; `plain` maps the names of further gauges to
    (help text, value).
    """
    registry = CollectorRegistry()
    if caller.role == "admin":
        registry.register(_Now(pool, plain, meters.jobs()))
        return generate_latest(meters.registry) + generate_latest(registry)
    registry.register(_Now(pool, {}, {}))
    return generate_latest(registry)
