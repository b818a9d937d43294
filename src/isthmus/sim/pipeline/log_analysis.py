"""Analysis of pipeline logs: time and memory of each stage, timeline spans and the critical path."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import cast

from isthmus.sim.pipeline.pipeline_processes import Barrier, LogEntry, Pipeline, SimulatedMessage
from isthmus.sim.simulation_result import MessageTrace, SpanKind, TimelineSpan

MemoryTimeline = tuple[tuple[float, float], ...]


def bubble_and_exposed_s(entry: LogEntry) -> tuple[float, float]:
    """Return the seconds of bubble and of exposed communication in the wait of a log entry."""
    start_s, end_s, _, _, cause = entry
    under_way_s = _cause_start_s(cause, end_s)
    exposed_s = end_s - max(start_s, under_way_s)
    return end_s - start_s - exposed_s, exposed_s


def _cause_start_s(cause: SimulatedMessage | Barrier | None, otherwise_s: float) -> float:
    if isinstance(cause, SimulatedMessage):
        return otherwise_s if cause.started_s is None else cause.started_s
    if cause is None or cause.last_arrival is None:
        return otherwise_s
    return cause.last_arrival[0]


def busy_and_exposed_s(log: list[LogEntry]) -> tuple[float, float]:
    """Return the compute time and the exposed communication time of a stage, in seconds."""
    busy_s = exposed_s = 0.0
    for entry in log:
        if entry[4] is None:
            busy_s += entry[1] - entry[0]
        else:
            exposed_s += bubble_and_exposed_s(entry)[1]
    return busy_s, exposed_s


def memory_over_time(log: list[LogEntry], static_bytes: float, activation_bytes: float) -> MemoryTimeline:
    """Return (seconds, bytes) at each change; activations live from forward to backward end."""
    now_bytes = static_bytes
    points = [(0.0, now_bytes)]
    for start_s, end_s, _, operation, cause in log:
        if cause is not None:
            continue
        if operation.kind == "forward":
            now_bytes += activation_bytes
            points.append((start_s, now_bytes))
        elif operation.kind in ("backward", "backward_weight"):
            now_bytes -= activation_bytes
            points.append((end_s, now_bytes))
    return tuple(points)


def peak_memory_bytes(log: list[LogEntry], static_bytes: float, activation_bytes: float) -> float:
    """Return the largest number of bytes of `memory_over_time`."""
    in_flight = peak = 0
    for entry in log:
        if entry[4] is None:
            kind = entry[3].kind
            if kind == "forward":
                in_flight += 1
                peak = max(peak, in_flight)
            elif kind in ("backward", "backward_weight"):
                in_flight -= 1
    return static_bytes + peak * activation_bytes


def timeline_spans(pipeline: Pipeline, replica: int) -> Iterator[TimelineSpan]:
    """Yield the computations and waits of a pipeline's stages, stage by stage."""
    for stage, log in enumerate(pipeline.logs):
        for entry in log:
            yield from _entry_spans(entry, replica, stage)


def _entry_spans(entry: LogEntry, replica: int, stage: int) -> Iterator[TimelineSpan]:
    start_s, end_s, _, operation, cause = entry
    what = str(operation)
    if cause is None:
        yield TimelineSpan(replica=replica, stage=stage, kind=cast(SpanKind, operation.kind), what=what,
                   start_s=start_s, end_s=end_s)  # fmt: skip
        return
    middle_s = end_s - bubble_and_exposed_s(entry)[1]
    kind: SpanKind = "exchange" if isinstance(cause, SimulatedMessage) else "all-reduce"
    for span_kind, a_s, b_s in (("bubble", start_s, middle_s), (kind, middle_s, end_s)):
        if b_s > a_s:
            yield TimelineSpan(replica=replica, stage=stage, kind=cast(SpanKind, span_kind), what=what,
                       start_s=a_s, end_s=b_s)  # fmt: skip


def message_traces(pipeline: Pipeline, replica: int, clusters: list[str]) -> Iterator[MessageTrace]:
    """Yield the messages of a pipeline between clusters."""
    for one in pipeline.messages:
        if one.link_queue is None or one.arrives_s is None:
            continue
        kind = "activation" if "forward" in one.operation.kind else "gradient"
        yield MessageTrace(
            replica=replica,
            source=clusters[one.sender],
            target=clusters[one.receiver],
            what=f"{kind}({one.operation.micro_batch})",
            sent_s=cast(float, one.sent_s),
            started_s=cast(float, one.started_s),
            left_s=cast(float, one.left_s),
            arrives_s=one.arrives_s,
            num_bytes=one.num_bytes,
        )


def critical_path(pipelines: list[Pipeline]) -> tuple[TimelineSpan, ...]:
    """Return the chain of spans from the start to the end of the run, each the cause of the next.

    A message on the path includes its time in the link queue.
    """
    ends = [[[entry[1] for entry in log] for log in pipeline.logs] for pipeline in pipelines]
    number = {pipeline.index: index for index, pipeline in enumerate(pipelines)}
    position = max(((e[-1], r, s) for r, logs in enumerate(ends) for s, e in enumerate(logs) if e), default=None)
    path: list[TimelineSpan] = []
    while position is not None and position[0] > 0:
        time_s, replica, stage = position
        log = pipelines[replica].logs[stage]
        index = bisect_right(ends[replica][stage], time_s) - 1
        while index >= 0 and log[index][0] == log[index][1]:
            index -= 1
        if index < 0:
            break
        span, position = _path_span(log[index], replica, stage, number)
        if span is not None:
            path.append(span)
    return tuple(reversed(path))


def _path_span(
    entry: LogEntry, replica: int, stage: int, number: dict[int, int]
) -> tuple[TimelineSpan | None, tuple[float, int, int]]:
    """Return the span that ends with `entry`, and the (time, replica, stage) of its cause."""
    start_s, end_s, _, operation, cause = entry
    kind = cast(SpanKind, operation.kind)
    before = (start_s, replica, stage)
    if isinstance(cause, SimulatedMessage):
        kind, begun_s = "exchange", cast(float, cause.started_s)
        sent_last = cause.posted_s is None or begun_s > cause.posted_s or not cause.rendezvous
        before = (begun_s, replica, cause.sender if sent_last else cause.receiver)
    elif isinstance(cause, Barrier) and cause.last_arrival is not None:
        kind = "all-reduce"
        before = (cause.last_arrival[0], number[cause.last_arrival[1].index], cause.last_arrival[2])
    if before[0] == end_s:
        return None, before
    span = TimelineSpan(replica=replica, stage=stage, kind=kind, what=str(operation), start_s=before[0], end_s=end_s)
    return span, before
