"""`ServerMetrics`: the server's counters and histograms, which grow with durable events."""

from __future__ import annotations

import functools
import threading
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector

from isthmus.control.service.coordinator_actor import AppliedEvent
from isthmus.control.state.events import JobChanged
from isthmus.core.job_parts.rollout_figures import ROLLOUT_FIGURES
from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.views.api_views import JobState
from isthmus.core.views.notice_views import NoticeChannel

QUEUE_WAIT_BUCKETS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600, 168 * 3600)
APPEND_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
BATCH_SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class ServerMetrics:
    """The metrics of one server. Only one thread at a time may call `record_event` and `record_append`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._job_states: dict[str, str] = {}
        self._jobs_by_state: Tally[str] = Tally()
        # Figures of the samples of running jobs, by job and cluster: step, then value by name.
        self._rollouts: dict[tuple[str, str], tuple[int, dict[str, float]]] = {}
        self._rollouts_lock = threading.Lock()
        self._event_counter = Counter(
            "isthmus_events", "Events applied from the log.", ["kind"], registry=self.registry
        )
        self._transition_counter = Counter(
            "isthmus_job_steps", "Job transitions into a state.", ["state"], registry=self.registry
        )
        self._wait_histogram = Histogram(
            "isthmus_queue_wait_seconds",
            "Time from a job's submission until all its ranks first ran.",
            buckets=QUEUE_WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self._append_histogram = Histogram(
            "isthmus_append_seconds",
            "Time from a batch's decision until it was on disk.",
            buckets=APPEND_BUCKETS_S,
            registry=self.registry,
        )
        self._batch_histogram = Histogram(
            "isthmus_append_events", "Events per flush.", buckets=BATCH_SIZE_BUCKETS, registry=self.registry
        )
        self._message_counter = Counter(
            "isthmus_notification_messages",
            "Messages of notices by channel and outcome.",
            ["channel", "outcome"],
            registry=self.registry,
        )
        # `labels` takes a lock at each call: cache its results.
        self._counter_of_kind = functools.cache(self._event_counter.labels)
        self._counter_of_state = functools.cache(self._transition_counter.labels)
        # A series that begins with its first count shows no increase by it.
        for state in get_args(JobState):
            self._counter_of_state(state)
        for channel in get_args(NoticeChannel):
            for outcome in ("delivered", "failed", "dropped"):
                self._message_counter.labels(channel, outcome)
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self.registry)

    def record_append(self, seconds: float, num_events: int) -> None:
        """Record an append: seconds until it was on disk, and its number of events."""
        self._append_histogram.observe(seconds)
        self._batch_histogram.observe(num_events)

    def record_message(self, channel: str, outcome: str) -> None:
        """Count a message of notices: `delivered`, `failed` (it is repeated) or `dropped`."""
        self._message_counter.labels(channel, outcome).inc()

    def restore_job_states(self, states: Mapping[str, str]) -> None:
        """Restore the state of each job of a snapshot, by id."""
        self._job_states.update(states)
        for state, count in Tally(states.values()).items():
            self._jobs_by_state[state] += count

    def record_event(self, applied: AppliedEvent) -> None:
        """Count the changes of a durable event; an event replayed at the start only sets job states."""
        if applied.live:
            self._counter_of_kind(applied.event.kind).inc()
        for instruction in applied.instructions:
            if isinstance(instruction, JobChanged):
                self._record_job_state(applied, instruction.job_id)

    def record_figures(self, lines: Iterable[StepMetrics]) -> None:
        """Keep what the newest step of a running job says of its samples; any thread may call this."""
        with self._rollouts_lock:
            for line in lines:
                known = {name: line.values.get(name) for name in ROLLOUT_FIGURES}
                found = {name: value for name, value in known.items() if value is not None}
                key = line.job, line.cluster or ""
                step, before = self._rollouts.get(key, (-1, {}))
                if found and line.step >= step and self._job_states.get(line.job) == "running":
                    self._rollouts[key] = line.step, before | found

    def rollout_figures(self) -> dict[tuple[str, str], dict[str, float]]:
        """Return the newest figures of the samples of running jobs, by job and cluster."""
        with self._rollouts_lock:
            return {key: dict(values) for key, (_, values) in self._rollouts.items()}

    def forget_job(self, job_id: str) -> None:
        """Remove a deleted job."""
        self._jobs_by_state[self._job_states.pop(job_id, "")] -= 1

    def _record_job_state(self, applied: AppliedEvent, job_id: str) -> None:
        job = applied.coordinator.state.jobs.get(job_id)
        before = self._job_states.get(job_id, "")
        if job is None or job.state == before:
            return
        self._job_states[job_id] = job.state
        if job.state != "running":
            with self._rollouts_lock:
                for key in [one for one in self._rollouts if one[0] == job_id]:
                    del self._rollouts[key]
        self._jobs_by_state[before] -= 1
        self._jobs_by_state[job.state] += 1
        if not applied.live:
            return
        self._counter_of_state(job.state).inc()
        if job.state == "running" and job.attempt == 1:
            self._wait_histogram.observe(applied.event.now_s - job.submitted_s)

    def jobs_by_state(self) -> dict[str, int]:
        """Return the number of jobs by state."""
        return {state: count for state, count in self._jobs_by_state.items() if state and count > 0}
