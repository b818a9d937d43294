"""Timeline of a step: WAN transfers, and a Chrome trace for Perfetto.

Format: "Trace Event Format", Google, with complete ("X") and asynchronous ("b", "e") events; times in
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from isthmus.core.messages.agent_messages import ReceivedMessage, Span, StepMetrics
from isthmus.core.plan import Plan

_Record = TypeVar("_Record", Span, ReceivedMessage)


@dataclass(frozen=True, kw_only=True)
class WanTransfer:
    """One message between clusters (seconds since the epoch), as `ReceivedMessage` records it."""

    # `forward` (activations), `backward` (their gradients) or `reduce` (gradients of parameters).
    kind: str
    # -1 for `reduce`.
    micro_batch: int
    # Sending and receiving rank.
    source: int
    target: int
    num_bytes: int
    # Passed to the sender's transport.
    sent_s: float
    # From its first byte leaving the sender until its last byte arrived.
    start_s: float
    end_s: float


def wan_transfers(metrics: Iterable[StepMetrics], plan: Plan) -> list[WanTransfer]:
    """Return the messages of one step between ranks of different clusters, ordered by start.

    The receiver records them; a run of an earlier version has none. Call `on_one_clock` first.
    """
    found = [
        WanTransfer(
            kind=message.kind, micro_batch=message.micro_batch, source=message.source, target=one.rank,
            num_bytes=message.num_bytes, sent_s=message.sent_s, start_s=message.first_left_s,
            end_s=max(message.first_left_s, message.arrived_s),
        )
        for one in metrics
        for message in one.messages
        if max(one.rank, message.source) < len(plan.ranks)
    ]  # fmt: skip
    return sorted(found, key=lambda one: (one.start_s, one.source, one.micro_batch))


def on_one_clock(metrics: Sequence[StepMetrics], plan: Plan) -> list[StepMetrics]:
    """Return the metrics with all times on the clock of the first rank.

    The offsets of the clocks come from the messages. A rank without messages shares the clock of the first rank of
    its cluster that has some.
    """
    ahead_s = _clock_offsets_s(metrics)
    by_cluster: dict[str, float] = {}
    for rank in sorted(ahead_s):
        if rank < len(plan.ranks):
            by_cluster.setdefault(plan.stage_of(rank).cluster, ahead_s[rank])

    def shifted(one: StepMetrics) -> StepMetrics:
        cluster = plan.stage_of(one.rank).cluster if one.rank < len(plan.ranks) else ""
        return _shifted(one, ahead_s.get(one.rank, by_cluster.get(cluster, 0.0)))

    return [shifted(one) for one in metrics]


def _clock_offsets_s(metrics: Iterable[StepMetrics]) -> dict[int, float]:
    """Return by rank how far its clock is ahead of that of the first rank, through chains of messages."""
    samples: dict[tuple[int, int], list[float]] = {}
    for one in metrics:
        for message in one.messages:
            samples.setdefault((message.source, one.rank), []).append(message.clock_offset_s)
            samples.setdefault((one.rank, message.source), []).append(-message.clock_offset_s)
    neighbours: dict[int, list[int]] = {}
    for one_rank, other in samples:
        neighbours.setdefault(other, []).append(one_rank)
    found: dict[int, float] = {}
    for root in sorted(neighbours):
        queue = [] if root in found else [root]
        found.setdefault(root, 0.0)
        while queue:
            rank = queue.pop(0)
            for other in sorted(set(neighbours[rank]) - found.keys()):
                found[other] = found[rank] + median(samples[other, rank])
                queue.append(other)
    return found


def _shifted(one: StepMetrics, ahead_s: float) -> StepMetrics:
    """Return the metrics of a rank whose clock is `ahead_s` ahead, with its times on the reference clock."""
    if ahead_s == 0:
        return one

    def earlier(record: _Record, *names: str) -> _Record:
        return record.model_copy(update={name: getattr(record, name) - ahead_s for name in names})

    message_times = ("sent_s", "first_left_s", "last_left_s", "arrived_s")
    return one.model_copy(
        update={
            "spans": tuple(earlier(span, "start_s", "end_s") for span in one.spans),
            "messages": tuple(earlier(message, *message_times) for message in one.messages),
        }
    )


def trace_events(metrics: Sequence[StepMetrics], plan: Plan) -> list[dict[str, Any]]:
    """Return all spans as Chrome trace events in time order, after the name events.

    Clusters are processes. Each rank has one thread for its work and one for its sends, which overlap with
    computation. The process `WAN` has the transfers between clusters. Time 0 is the start of the first span.
    """
    metrics = on_one_clock(metrics, plan)
    spans = [(one, span) for one in metrics for span in one.spans]
    if not spans:
        return []
    zero_s = min(span.start_s for _, span in spans)
    pids = {cluster: pid for pid, cluster in enumerate(plan.clusters, start=1)}
    events = [_complete_event(one, span, plan, pids, zero_s) for one, span in spans if one.rank < len(plan.ranks)]
    for step in sorted({one.step for one in metrics}):
        for number, transfer in enumerate(wan_transfers([m for m in metrics if m.step == step], plan)):
            events += _transfer_events(transfer, f"{step}.{number}", plan, pids, zero_s)
    return [
        *_name_events(plan, pids),
        *sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0))),
    ]


def _complete_event(one: StepMetrics, span: Span, plan: Plan, pids: dict[str, int], zero_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.kind if span.micro_batch < 0 else f"{span.kind} {span.micro_batch}",
        "cat": span.kind,
        "pid": pids[plan.stage_of(one.rank).cluster],
        "tid": _thread_id(one.rank, sends=span.kind == "send"),
        "ts": _microseconds(span.start_s - zero_s),
        "dur": _microseconds(max(0.0, span.end_s - span.start_s)),
        "args": {"step": one.step, "micro_batch": span.micro_batch, "attempt": one.attempt},
    }


def _transfer_events(
    one: WanTransfer, ident: str, plan: Plan, pids: dict[str, int], zero_s: float
) -> Iterator[dict[str, Any]]:
    source, target = plan.stage_of(one.source).cluster, plan.stage_of(one.target).cluster
    shared = {"cat": "wan", "name": f"{source} > {target}", "id": ident, "pid": len(pids) + 1, "tid": 0}
    details = {
        "micro_batch": one.micro_batch, "kind": one.kind, "from": one.source, "to": one.target,
        "bytes": one.num_bytes, "queued_us": _microseconds(one.start_s - one.sent_s),
    }  # fmt: skip
    yield shared | {"ph": "b", "ts": _microseconds(one.start_s - zero_s), "args": details}
    yield shared | {"ph": "e", "ts": _microseconds(one.end_s - zero_s)}


def _name_events(plan: Plan, pids: dict[str, int]) -> list[dict[str, Any]]:
    named = [*pids.items(), ("WAN", len(pids) + 1)]
    names = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for name, pid in named]
    for rank, stage in enumerate(map(plan.stage_of, range(len(plan.ranks)))):
        label = f"rank {rank}: layers {stage.layers[0]}-{stage.layers[1] - 1}"
        for sends, name in ((False, label), (True, f"rank {rank}: sends")):
            thread = {"pid": pids[stage.cluster], "tid": _thread_id(rank, sends=sends)}
            names.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
    return names


def _thread_id(rank: int, *, sends: bool) -> int:
    return 2 * rank + sends


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
