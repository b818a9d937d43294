"""The page of `isthmus show`: a job with its history, its held-out loss, its result, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.history_text import (
    event_text,
    held_out_text,
    local_time,
    next_steps,
    restarts_text,
    result_place,
    untold_reason,
)
from isthmus.cli.job_statistics import JobStatistics
from isthmus.cli.terminal.queue_tables import job_page
from isthmus.cli.terminal.tables import table
from isthmus.core.text.printable import printable
from isthmus.core.views.api_views import HistoryEvent, JobView
from isthmus.core.views.queue_status import QueueStatus

_STYLES = {
    "lost": "red",
    "failed": "red",
    "worker-lost": "yellow",
    "preempted": "yellow",
    "moved": "yellow",
    "finished": "green",
}


def show_page(
    view: JobView,
    status: QueueStatus,
    stats: JobStatistics,
    events: Sequence[HistoryEvent],
    *,
    num_older: int,
    now_s: float,
) -> RenderableType:
    """Return the page of one job; `num_older` events came before `events`."""
    head = view.model_copy(update={"reason": untold_reason(view, events)})
    shown: list[RenderableType] = [job_page(head, status, now_s), *_facts(view, stats)]
    if events:
        title = "History" + (f" ({num_older} older events: --events N)" if num_older else "")
        shown += [Text(""), history_table(title, events)]
    shown.append(Text(""))
    shown += [Text(f"  {command:<32} {what}") for command, what in next_steps(view)]
    return Group(*shown)


def history_table(title: str, events: Sequence[HistoryEvent]) -> RenderableType:
    """Return the table of events, oldest first."""
    rows = [(local_time(one.time_s), Text(event_text(one), style=_STYLES.get(one.kind, ""))) for one in events]
    return table(title, ("time", "event"), rows)


def _facts(view: JobView, stats: JobStatistics) -> Iterator[Text]:
    """Yield lines with restarts, held-out loss and the result, as far as there are any."""
    facts = {
        "restarts": restarts_text(view),
        "held out": held_out_text(stats),
        "result": result_place(view),
        "saves in": view.job.checkpoints.folder if view.state == "failed" else None,
    }
    for name, text in facts.items():
        if text:
            yield Text(f"  {name:<10} {printable(text)}")
