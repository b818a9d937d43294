"""`accept_output`: the metrics and log text of a report that the site may speak for, each with the site's name.

`new_refusals`: what its ranks say of callers that they have turned away.

A site speaks for the ranks of the parts that it was ordered to run, attempt by attempt; for steps that the job has and
that it can have reached by now; and for values of bounded size. The rest is dropped: a report as a whole stands, so
that a fault in one worker's output silences no site.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.messages.agent_messages import AgentReport, LogChunk, PartEvent, StepMetrics

MAX_STEPS_PER_S = 1000
"""No job trains faster than this."""
MAX_VALUES, MAX_RECORDS = 256, 65_536
"""Largest numbers of values, and of spans and messages, in the metrics of a step."""
MAX_NAME_CHARS = 64
"""Longest name of a value, span or message."""
MAX_LOG_OFFSET = 2**53
"""Largest offset of log text."""
_FIRST_STEPS = 1000
"""Steps that a job may report however new it is."""


def new_refusals(state: PoolState, cluster: str, report: AgentReport) -> list[tuple[str, PartEvent]]:
    """Return the job and the event of each refusal of callers that a rank of the site reports for the first time."""
    record = state.clusters.get(cluster)
    found = []
    for seen in report.parts:
        part = record.parts.get((seen.job, seen.attempt)) if record is not None else None
        if part is None or not part.committed:
            continue
        for event in seen.events:
            is_new = event.rank in part.ranks and event.number > part.last_events.get(event.rank, -1)
            if event.kind == "refused" and is_new:
                found.append((seen.job, event))
    return found


def accept_output(
    state: PoolState, cluster: str, report: AgentReport, now_s: float
) -> tuple[list[StepMetrics], list[LogChunk]]:
    """Return the accepted metrics and log text of a report of `cluster`."""
    metrics = [
        line.model_copy(update={"cluster": cluster})
        for line in report.metrics
        if (job := _job_of_rank(state, cluster, line)) is not None and _is_possible(job, line, now_s)
    ]
    logs = [
        chunk.model_copy(update={"cluster": cluster})
        for chunk in report.logs
        if chunk.offset <= MAX_LOG_OFFSET and _job_of_rank(state, cluster, chunk) is not None
    ]
    return metrics, logs


def num_foreign_lines(state: PoolState, cluster: str, report: AgentReport) -> int:
    """Return how many lines of output are of known jobs, and of ranks that the site was never ordered to run."""
    lines: list[StepMetrics | LogChunk] = [*report.metrics, *report.logs]
    return sum(line.job in state.jobs and _job_of_rank(state, cluster, line) is None for line in lines)


def name_clusters(state: PoolState, chunks: Sequence[LogChunk]) -> tuple[LogChunk, ...]:
    """Return stored log text with the site of each rank; only that site could have sent it."""
    return tuple(chunk.model_copy(update={"cluster": _cluster_of_rank(state, chunk)}) for chunk in chunks)


def _job_of_rank(state: PoolState, cluster: str, line: StepMetrics | LogChunk) -> JobRecord | None:
    """Return the job if the rank belongs to a part that `cluster` was ordered to run in this attempt."""
    job = state.jobs.get(line.job)
    if job is None or line.rank not in job.ranks_ordered(line.attempt, cluster):
        return None
    return job


def _cluster_of_rank(state: PoolState, chunk: LogChunk) -> str | None:
    job = state.jobs.get(chunk.job)
    sites = {name for _, name in (*job.parts, *job.past_ranks)} if job else ()
    return next((name for name in sites if job and chunk.rank in job.ranks_ordered(chunk.attempt, name)), None)


def _is_possible(job: JobRecord, line: StepMetrics, now_s: float) -> bool:
    """Return whether a job can have reached a step by now, and the sizes are within bounds."""
    spec = job.spec
    reached = _FIRST_STEPS + MAX_STEPS_PER_S * max(0.0, now_s - job.submitted_s)
    if line.step > spec.training.steps or (spec.resume is None and line.step > reached):
        return False
    if len(line.values) > MAX_VALUES or len(line.spans) + len(line.messages) > MAX_RECORDS:
        return False
    names = [*line.values, *(one.kind for one in line.spans), *(one.kind for one in line.messages)]
    return all(len(name) <= MAX_NAME_CHARS for name in names)
