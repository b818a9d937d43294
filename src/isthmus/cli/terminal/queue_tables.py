"""Terminal pages for waiting jobs: the queue, one job, a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.terminal.tables import plans_table, stages_text, state_text, table
from isthmus.client.resolve_job import TERMINAL_STATES
from isthmus.core.job import ResumeSource
from isthmus.core.messages.preflight import SitePreflight
from isthmus.core.plan import Refusal
from isthmus.core.runs.job_id import short_job_id, short_job_ids
from isthmus.core.text.printable import printable
from isthmus.core.units import format_seconds
from isthmus.core.views.api_views import JobView, PartView, VictimView
from isthmus.core.views.queue_status import DryRun, QueueStatus


def queue_table(statuses: Sequence[QueueStatus], now_s: float) -> RenderableType:
    """Return the table of waiting jobs in start order; `now_s` is in seconds since the epoch."""
    if not statuses:
        return Text("No waiting jobs.")
    short = short_job_ids(one.id for one in statuses)
    rows = [
        (
            str(one.place or "-"),
            short[one.id],
            one.user,
            one.priority,
            state_text(one.state),
            format_seconds(max(0.0, now_s - one.submitted_s)) + " ago",
            start_text(one, now_s),
            one.reason,
        )
        for one in statuses
    ]
    columns = ("place", "job", "user", "priority", "state", "submitted", "expected start", "reason")
    return table("", columns, rows, "place")


def start_text(one: QueueStatus, now_s: float) -> str:
    """Format the expected start: `in 2 min 0 s (1 min 36 s to 2 min 24 s)`, or `-` if unknown."""
    if one.start_s is None:
        return "-"
    if one.latest_s is not None and one.latest_s <= now_s:
        return "now"
    earliest = format_seconds(max(0.0, (one.earliest_s or one.start_s) - now_s))
    latest = "?" if one.latest_s is None else format_seconds(one.latest_s - now_s)
    return f"in {format_seconds(max(0.0, one.start_s - now_s))} ({earliest} to {latest})"


def job_page(view: JobView, status: QueueStatus, now_s: float) -> RenderableType:
    """Return the page of one job: where it runs, or why it waits."""
    head = Text(f"job {short_job_id(view.id)} of {view.user}, priority {status.priority}, is ")
    head.append_text(state_text(view.state))
    if view.reason and not status.needs:
        head.append(f": {printable(view.reason)}")
    shown: list[RenderableType] = [head, *queue_status_lines(status, now_s)]
    if view.plan is not None:
        shown.append(Text(f"  plan       {view.plan.id}: {stages_text(view.plan)}"))
    if view.job.resume is not None:
        shown.append(Text(f"  {printable(resume_text(view.job.resume))}"))
    if view.parts and view.state not in TERMINAL_STATES:
        rows = [
            (
                part.cluster,
                part.owner,
                " ".join(map(str, part.ranks)),
                part.desired,
                part.observed,
                _wait_text(part, now_s) or part.detail,
            )
            for part in view.parts
        ]
        columns = ("cluster", "owner", "ranks", "desired", "observed", "detail")
        shown += [Text(""), table("Parts", columns, rows)]
    if view.preflight and (view.state not in TERMINAL_STATES or view.state == "failed"):
        shown += [Text(""), preflight_table(view.preflight)]
    if status.refused:
        shown += [Text(""), refusals_table(status.refused)]
    if view.offer:
        shown += [Text(""), victims_table("Jobs it could preempt", view.offer)]
        shown.append(Text(f"  isthmus preempt {short_job_id(view.id)} --yes   preempts them"))
    if view.victims:
        shown += [Text(""), victims_table("Jobs it preempts", view.victims)]
    return Group(*shown, *(Text(f"- {printable(note)}", style="dim") for note in status.notes))


def _wait_text(part: PartView, now_s: float) -> str:
    """Return what a part waits for, and for how long: `rank 0 waits for ..., 12 s`."""
    if part.waiting_since_s is None:
        return part.waiting
    return f"{part.waiting}, {format_seconds(max(0.0, now_s - part.waiting_since_s))}"


def resume_text(resume: str | ResumeSource) -> str:
    """Format the source of a resumed job: `resumes    job old-1f, /ck; differs: seed: 1 there, 2 in this job`."""
    if isinstance(resume, str):
        return f"resumes    {resume}"
    source = f"job {short_job_id(resume.job)}, {resume.folder}" if resume.job else f"{resume.folder}, fields unknown"
    compared = "differs: " + "; ".join(resume.differences) if resume.differences else "same training fields"
    return f"resumes    {source}" + (f"; {compared}" if resume.job else "")


def dry_run_page(found: DryRun, now_s: float) -> RenderableType:
    """Return the page of a dry run: expected queue status, plans, missing resources."""
    one = found.standing
    shown: list[RenderableType] = [Text(f"dry run of job {one.name} (not submitted); if submitted now:")]
    shown += [*queue_status_lines(one, now_s), Text(""), plans_table(found.plans)]
    if found.preflight:
        shown += [Text(""), preflight_table(found.preflight)]
    missing = [refusal for refusal in one.refused if refusal not in found.plans.refused]
    if missing:
        shown += [Text(""), refusals_table(missing, "Missing now")]
    if found.victims:
        shown += [Text(""), victims_table("Jobs it could preempt", found.victims)]
    return Group(*shown, *(Text(f"- {printable(note)}", style="dim") for note in one.notes))


def preflight_table(sites: Sequence[SitePreflight]) -> RenderableType:
    """Return the table of the checks at each site: one row for those that passed, one for each that did not."""
    rows = []
    for site in sites:
        passed = [one.name for one in site.results if one.status == "passed"]
        if passed:
            names = ", ".join(dict.fromkeys(passed))
            rows.append((site.cluster, names, Text("passed", style="green"), format_seconds(site.seconds)))
        rows += [
            (site.cluster, one.name, Text(one.status, style="red"), f"{one.detail}; {one.hint}".rstrip("; "))
            for one in site.results
            if one.status != "passed"
        ]
        if site.state in ("waiting", "not checked"):
            why = "no answer yet" if site.state == "waiting" else "its agent executes no checks"
            rows.append((site.cluster, "", Text(site.state, style="yellow"), why))
    return table("Checks before the start", ("site", "checks", "result", "finding"), rows)


def queue_status_lines(one: QueueStatus, now_s: float) -> Iterable[Text]:
    """Yield lines with reason, queue position, expected start, needed chips and jobs ahead."""
    if one.reason and one.needs:
        yield Text(f"  reason     {printable(one.reason)}")
    if one.place is not None:
        yield Text(f"  position   {one.place} in the queue")
    if one.start_s is not None:
        yield Text(f"  starts     {start_text(one, now_s)}")
    if one.needs:
        pieces = (f"{n} {group} at {name}" for name, groups in one.needs.items() for group, n in groups.items())
        yield Text("  needs      " + ", ".join(pieces))
    if one.ahead:
        short = short_job_ids(ahead.job for ahead in one.ahead if ahead.job)
        names = (short[ahead.job] if ahead.job else f"another user's ({ahead.priority})" for ahead in one.ahead)
        yield Text("  ahead      " + ", ".join(names))


def refusals_table(refused: Sequence[Refusal], title: str = "Rejected") -> RenderableType:
    """Return the table of rejections by co-scheduling filter, owner and clusters."""
    rows = [(one.stage or "search", one.owner or "", " + ".join(one.clusters), one.reason) for one in refused]
    return table(title, ("filter", "owner", "clusters", "reason"), rows)


def victims_table(title: str, victims: Sequence[VictimView]) -> RenderableType:
    """Return the table of preemption victims with their chips and unsaved work."""
    short = short_job_ids(one.job for one in victims if one.attempt)
    rows = [
        (
            short.get(one.job, one.job),
            "pool job" if one.attempt else "local job",
            one.cluster,
            one.owner,
            " ".join(f"{number} {group}" for group, number in one.chips.items()),
            format_seconds(one.unsaved_s),
        )
        for one in victims
    ]
    return table(title, ("job", "kind", "cluster", "owner", "chips", "unsaved work"), rows)
