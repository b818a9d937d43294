"""Commands that follow a job: watch, logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from isthmus.cli.command import JobArgument, command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.history_text import event_line, held_out_text, result_place
from isthmus.cli.job_statistics import JobStatistics
from isthmus.cli.terminal.dashboard import needs_choice, newest_measures, status_line, status_record
from isthmus.client.api_client import ApiClient
from isthmus.client.job_events import JobEvents
from isthmus.client.log_lines import LogLine, LogLines
from isthmus.client.outage import Outage
from isthmus.client.resolve_job import TERMINAL_STATES, find_job_id
from isthmus.core.errors import IsthmusError, NotFoundError, UnavailableError
from isthmus.core.messages.agent_messages import LogChunk
from isthmus.core.runs.job_id import short_job_id
from isthmus.core.text.printable import printable
from isthmus.core.views.api_views import HistoryEvent, JobView, PoolView

commands = typer.Typer()
PANEL = "Jobs"
HISTORY_PAGE_SIZE = 1000

IntervalOption = Annotated[
    float,
    typer.Option("--interval", metavar="SECONDS", min=0.1, help="Minimum time between updates."),
]


@dataclass(frozen=True)
class JobSnapshot:
    """The state of a followed job at one time."""

    view: JobView
    # All metrics so far.
    stats: JobStatistics
    # The history so far, as far as the server keeps it.
    history: tuple[HistoryEvent, ...] = ()
    # Whether the server was unreachable, so that `view` is the last known one.
    server_down: bool = False


@dataclass(frozen=True)
class KnownHistory:
    """The events of a job that the server keeps, and how many there were with those it dropped."""

    events: tuple[HistoryEvent, ...] = ()
    num_known: int = 0


def read_history(client: ApiClient, job: str) -> KnownHistory:
    """Return the history of job id `job`; empty from a server of an earlier version."""
    events: list[HistoryEvent] = []
    cursor = dropped = 0
    while True:
        try:
            page = client.history(job, after=cursor, limit=HISTORY_PAGE_SIZE)
        except NotFoundError:
            return KnownHistory(tuple(events), len(events))
        events += page.events
        cursor, dropped = page.next, page.dropped
        if len(page.events) < HISTORY_PAGE_SIZE:
            return KnownHistory(tuple(events), len(events) + dropped)


def ignore_note(_text: str) -> None:
    """Ignore the text."""


def job_snapshots(
    env: CliEnvironment,
    client: ApiClient,
    job: str,
    interval_s: float,
    on_stream_cut: Callable[[str], None] = ignore_note,
) -> Iterator[JobSnapshot]:
    """Yield a snapshot of job id `job` at each change until it has ended and all metrics are read.

    Changes come from the server's event stream; if it breaks, `on_stream_cut` is called and the job is polled every
    `interval_s` seconds. Raises `UnavailableError` if the server is unreachable for longer than `MAX_OUTAGE_S`.
    """
    figures, cursor, history = JobStatistics(), 0, KnownHistory()
    view = client.job(job)
    outage = Outage(env)
    with JobEvents(env, client, job, interval_s, on_stream_cut) as changes:
        while True:
            try:
                view = client.job(job)
                cursor = _drain_metrics(client, job, cursor, figures)
                history = read_history(client, job)
                outage.reset()
            except UnavailableError as error:
                outage.raise_if_expired(error)
                yield JobSnapshot(view, figures, history.events, server_down=True)
            else:
                yield JobSnapshot(view, figures, history.events)
                if view.state in TERMINAL_STATES:
                    return
            changes.wait()


def _drain_metrics(client: ApiClient, job: str, cursor: int, stats: JobStatistics) -> int:
    """Add all metrics after `cursor` to `stats` and return the new cursor."""
    while True:
        page = client.metrics(job, after=cursor)
        stats.add(page.metrics)
        if not page.metrics:
            return cursor
        cursor = page.next


def watch_job(env: CliEnvironment, client: ApiClient, job: str, interval_s: float = 1.0) -> None:
    """Display job id `job` until it ends; raise `IsthmusError` unless it succeeded."""
    last = _show_until_ended(env, client, job, interval_s)
    if last.view.state != "succeeded":
        is_told = bool(last.history) and not env.as_json  # the history names the cause once
        reason = f": {printable(last.view.reason)}" if last.view.reason and not is_told else ""
        raise IsthmusError(f"job {job} {last.view.state}{reason}", hint=f"see `isthmus logs {job}`")
    if not env.as_json:
        for text in (held_out_text(last.stats), result_place(last.view)):
            if text:
                env.print(text)


def _show_until_ended(env: CliEnvironment, client: ApiClient, job: str, interval_s: float) -> JobSnapshot:
    live = env.stdout.isatty() and not env.as_json
    followed = job_snapshots(env, client, job, interval_s, ignore_note if live else env.print_note)
    if env.as_json:
        return _print_changes(followed, lambda now, new: env.print_json(status_record(now.view, now.stats, new)))
    if live:
        return _show_live(env, client, followed)
    return _print_changes(followed, partial(_print_lines, env))


def _print_changes(
    snapshots: Iterator[JobSnapshot], emit: Callable[[JobSnapshot, Sequence[HistoryEvent]], None]
) -> JobSnapshot:
    """Emit each snapshot that differs from the previous one, with its new events; return the last."""
    previous: Any = None
    last_number = 0
    for snapshot in snapshots:
        view = snapshot.view
        new = [event for event in snapshot.history if event.number > last_number]
        state = (view.state, view.reason, view.attempt, snapshot.stats.steps[-1:])
        if new or state != previous:
            emit(snapshot, new)
            previous = state
            last_number = new[-1].number if new else last_number
    return snapshot


def _print_lines(env: CliEnvironment, now: JobSnapshot, new: Sequence[HistoryEvent]) -> None:
    """Print new events, then the state unless an event has told it; at the end, the last measures as well."""
    for event in new:
        env.print(f"{short_job_id(now.view.id)}  {event_line(event)}")
    if not now.history or (now.view.state == "running" and now.stats.steps) or needs_choice(now.view):
        env.print(status_line(now.view, now.stats))
    if now.view.state in TERMINAL_STATES and now.stats.steps:
        env.print(f"{short_job_id(now.view.id)}  {newest_measures(now.view, now.stats)}")


def _show_live(env: CliEnvironment, client: ApiClient, snapshots: Iterator[JobSnapshot]) -> JobSnapshot:
    from rich.live import Live

    from isthmus.cli.terminal.dashboard import dashboard

    pool = _pool_if_allowed(client)
    with Live(console=env.console(), auto_refresh=False, vertical_overflow="visible") as live:
        for snapshot in snapshots:
            page = dashboard(snapshot.view, snapshot.stats, pool, snapshot.history, server_down=snapshot.server_down)
            live.update(page, refresh=True)
    return snapshot


def _pool_if_allowed(client: ApiClient) -> PoolView | None:
    try:
        return client.pool()
    except IsthmusError:  # show links without their capacity
        return None


@command(
    commands,
    panel=PANEL,
    examples=["isthmus watch my-job", "isthmus watch my-job --json | jq -c '{step, loss}'"],
)
def watch(env: CliEnvironment, client: ApiClient, job: JobArgument, interval_s: IntervalOption = 1.0) -> None:
    """Follow a job until it ends: its history, state, stages, loss, links.

    The exit status is 0 only if the job succeeded. Waits for a server that restarts.
    """
    watch_job(env, client, find_job_id(client, job), interval_s)


@command(
    commands,
    panel=PANEL,
    examples=["isthmus logs my-job", "isthmus logs my-job -f --rank 0", "isthmus logs my-job --json"],
)
def logs(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this rank's log.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass control characters of the workers to the terminal, such as colours.")
    ] = False,
    interval_s: IntervalOption = 1.0,
) -> None:
    """Print the logs of the workers.

    Each line is prefixed with its rank. On a terminal, control and other invisible characters are shown as text;
    a pipe or file gets the log as it is. Waits for a server that restarts.
    """
    found = find_job_id(client, job)
    lines = _LogPrinter(env, show_rank=rank is None, raw=raw)
    outage, ended = Outage(env), False
    while not ended:
        try:
            ended = not follow or client.job(found).state in TERMINAL_STATES
            lines.drain(client, found, rank)
            outage.reset()
        except UnavailableError as error:
            if not follow:
                raise
            outage.raise_if_expired(error)
            ended = False
        if not ended:
            env.sleep(interval_s)
    lines.flush_partial_lines()


class _LogPrinter:
    """Prints log chunks, which may end anywhere, as complete lines."""

    def __init__(self, env: CliEnvironment, *, show_rank: bool, raw: bool) -> None:
        self._env, self._show_rank, self._raw = env, show_rank, raw
        self._lines, self._cursor = LogLines(), 0

    def drain(self, client: ApiClient, job: str, rank: int | None) -> None:
        """Print all new log text of `job`; safe to repeat after an error."""
        while (page := client.logs(job, after=self._cursor, rank=rank)).chunks:
            self._add_chunks(page.chunks)
            self._cursor = page.next

    def _add_chunks(self, chunks: Sequence[LogChunk]) -> None:
        """Print the lines completed by `chunks` (with `--json` the chunks themselves)."""
        if self._env.as_json:
            for chunk in chunks:
                self._env.print_json(chunk)
        else:
            self._print(self._lines.add(chunks))
        self._env.stdout.flush()

    def flush_partial_lines(self) -> None:
        """Print incomplete last lines."""
        self._print(self._lines.flush())
        self._env.stdout.flush()

    def _print(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self._env.write_text((f"{line.rank} | " if self._show_rank else "") + line.text + "\n", raw=self._raw)
