"""A job's history for users: the words of an event, held-out loss and perplexity, the result, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from isthmus.cli.job_statistics import JobStatistics
from isthmus.client.resolve_job import TERMINAL_STATES
from isthmus.core.runs.job_id import short_job_id
from isthmus.core.text.printable import printable
from isthmus.core.units import format_seconds
from isthmus.core.views.api_views import HistoryEvent, HistoryKind, JobView

_WORDS: dict[HistoryKind, str] = {
    "submitted": "submitted",
    "planned": "planned",
    "waiting": "waits",
    "brought": "model and data brought",
    "preempting": "preempts",
    "reserving": "reserves chips",
    "held": "chips held at all sites, workers start",
    "started": "started",
    "resumed": "resumed",
    "checkpoint": "checkpoint saved",
    "worker-lost": "worker lost",
    "stalled": "worker makes no progress",
    "left": "goes on without a site that decoded",
    "joined": "a site joins that decodes",
    "lost": "attempt failed",
    "refused": "attempt ended before its start",
    "preempted": "preempted",
    "moved": "moved",
    "stopping": "stops",
    "finished": "finished",
    "failed": "failed",
    "cancelled": "cancelled",
}


def event_text(event: HistoryEvent) -> str:
    """Return what happened, where and why, in one line."""
    words = _WORDS[event.kind]
    if event.kind == "started":
        words += f", attempt {event.attempt}"
    if event.step is not None:
        words += f" from step {event.step}" if event.kind == "resumed" else f" after step {event.step}"
    if event.seconds is not None and event.kind in ("resumed", "checkpoint"):
        words += f" in {format_seconds(event.seconds)}"
    if event.rank is not None and event.kind in ("worker-lost", "stalled"):
        words += f": rank {event.rank}"
    if event.cluster is not None and event.kind not in ("resumed", "checkpoint"):
        words += f" at {event.cluster}"
    told = event.text if event.kind not in ("resumed", "checkpoint") else ""
    return f"{words}: {printable(told)}" if told else words


def local_time(time_s: float) -> str:
    """Format a time in seconds since the epoch as date and time of this machine's time zone."""
    return datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def event_line(event: HistoryEvent) -> str:
    """Return an event with its local time as one line."""
    return f"{local_time(event.time_s)}  {event_text(event)}"


def perplexity(loss: float | None) -> float | None:
    """Return the perplexity of a held-out loss in nats per token; None without one or where it overflows."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def held_out_text(stats: JobStatistics) -> str | None:
    """Return held-out loss and perplexity, None if the job has not evaluated."""
    loss = stats.latest("validation_loss")
    if loss is None:
        return None
    value = perplexity(loss)
    return f"{loss:.4f} nats per token" + (f", perplexity {value:,.2f}" if value is not None else "")


def untold_reason(view: JobView, events: Sequence[HistoryEvent]) -> str:
    """Return the reason of a job's state, "" if one of `events` names the cause of its end already."""
    told = view.state in TERMINAL_STATES and any(event.text and event.text in view.reason for event in events)
    return "" if told else printable(view.reason)


def restarts_text(view: JobView) -> str:
    """Return how often the job and its workers restarted; "" if never."""
    pieces = [f"{view.restarts} of {view.job.max_restarts} restarts of the job used"] if view.restarts else []
    if view.worker_restarts:
        pieces.append(f"{view.worker_restarts} worker processes replaced")
    return ", ".join(pieces)


def result_place(view: JobView) -> str | None:
    """Return where the trained model lies, None unless the job has succeeded."""
    if view.state != "succeeded" or not view.job.trains:
        return None
    site = view.plan and (view.job.output_site or view.plan.clusters[0])
    sites = f", at {site} and the sites that share its storage" if site else ""
    return f"{view.job.output} (Hugging Face format{sites})"


def next_steps(view: JobView) -> list[tuple[str, str]]:
    """Return the commands that make sense now, each with what it does."""
    job = short_job_id(view.id)
    if view.state == "succeeded":
        return [(f"isthmus report {job}", "writes the report as one HTML page")]
    if view.state == "failed":
        return [
            (f"isthmus logs {job}", "prints the workers' output; correct the cause, then submit the job again"),
            (f"isthmus report {job}", "writes what was measured"),
        ]
    if view.state == "cancelled":
        return [(f"isthmus delete {job}", "removes its metrics and logs; checkpoints stay")]
    if view.state in ("choosing", "waiting", "blocked") and view.plan is None and view.plans and view.plans.plans:
        return [
            (f"isthmus plans {job}", "lists its candidate plans"),
            (f"isthmus choose {job} {view.plans.plans[0].id}", "starts it with the fastest"),
        ]
    follow = (f"isthmus watch {job}", "follows it until it ends")
    if view.offer:
        return [(f"isthmus preempt {job}", "lists the jobs that it could preempt"), follow]
    return [follow]
