"""Timeline of a step: WAN transfers, and a Chrome trace for Perfetto.

Format: "Trace Event Format", Google, with complete ("X") and asynchronous ("b", "e") events; times in
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.cli.job_statistics import pipeline_neighbours
from isthmus.core.messages.agent_messages import Span, StepMetrics
from isthmus.core.plan import Plan

COMPUTE_KINDS = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class WanTransfer:
    """One message between consecutive stages, from its send until its receive (seconds since the epoch)."""

    # `forward` (activations) or `backward` (gradients).
    kind: str
    micro_batch: int
    # Sending and receiving rank.
    source: int
    target: int
    start_s: float
    end_s: float


def wan_transfers(metrics: Iterable[StepMetrics], plan: Plan) -> list[WanTransfer]:
    """Return the messages of one step between ranks of different clusters, ordered by start.

    Spans have no peer or direction; both follow from the order of spans. A send after a forward goes to the
    next stage, after a backward to the previous one; a receive before a forward comes from the previous
    stage, before a backward from the next one. If one side recorded no span, the message starts at the end of
    the computation that produced it, or ends at the start of the one that used it.
    """
    spans = {one.rank: one.spans for one in metrics}
    found = []
    for source, own in spans.items():
        for kind, target in zip(COMPUTE_KINDS, reversed(pipeline_neighbours(plan, source)), strict=True):
            if target is None or plan.stage_of(source).cluster == plan.stage_of(target).cluster:
                continue
            sent_s, received_s = _send_times_s(own, kind), _receive_times_s(spans.get(target, ()), kind)
            for micro_batch in sorted(sent_s.keys() & received_s.keys()):
                start_s, end_s = sent_s[micro_batch], received_s[micro_batch]
                found.append(
                    WanTransfer(
                        kind=kind, micro_batch=micro_batch, source=source, target=target,
                        start_s=start_s, end_s=max(start_s, end_s),
                    )
                )  # fmt: skip
    return sorted(found, key=lambda one: (one.start_s, one.source, one.micro_batch))


def _send_times_s(spans: Sequence[Span], kind: str) -> dict[int, float]:
    """Return by micro-batch when the result of its `kind` computation was sent, in seconds."""
    sent_s = {span.micro_batch: span.end_s for span in spans if span.kind == kind}
    for span in spans:
        if span.kind == "send" and _last_compute_before(spans, span) == kind:
            sent_s[span.micro_batch] = span.start_s
    return sent_s


def _receive_times_s(spans: Sequence[Span], kind: str) -> dict[int, float]:
    """Return by micro-batch when the input of its `kind` computation was received, in seconds."""
    received_s = {span.micro_batch: span.start_s for span in spans if span.kind == kind}
    for span in spans:
        if span.kind == "receive" and _first_compute_after(spans, span) == kind:
            received_s[span.micro_batch] = span.end_s
    return received_s


def _last_compute_before(spans: Sequence[Span], at: Span) -> str | None:
    earlier = [
        x for x in spans
        if x.kind in COMPUTE_KINDS and x.micro_batch == at.micro_batch and x.start_s <= at.start_s
    ]  # fmt: skip
    return max(earlier, key=lambda x: x.start_s).kind if earlier else None


def _first_compute_after(spans: Sequence[Span], at: Span) -> str | None:
    later = [
        x for x in spans
        if x.kind in COMPUTE_KINDS and x.micro_batch == at.micro_batch and x.end_s >= at.end_s
    ]  # fmt: skip
    return min(later, key=lambda x: x.start_s).kind if later else None


def trace_events(metrics: Sequence[StepMetrics], plan: Plan) -> list[dict[str, Any]]:
    """Return all spans as Chrome trace events in time order, after the name events.

    Clusters are processes. Each rank has one thread for its work and one for its sends, which overlap with
    computation. The process `WAN` has the transfers between clusters. Time 0 is the start of the first span.
    """
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
    details = {"micro_batch": one.micro_batch, "kind": one.kind, "from": one.source, "to": one.target}
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
