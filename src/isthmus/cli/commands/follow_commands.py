"""Commands that follow a job: watch, logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from isthmus.cli.client.api_client import Client
from isthmus.cli.client.job_events import News
from isthmus.cli.client.resolve_job import ENDED, find_id
from isthmus.cli.command import JobArgument, verb
from isthmus.cli.figures import Figures
from isthmus.cli.shell.shell import Shell
from isthmus.cli.terminal.dashboard import as_line, as_record
from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.core.messages.agent_messages import LogChunk
from isthmus.core.messages.api_views import JobView, PoolView

commands = typer.Typer()
PANEL = "Jobs"
OUTAGE_S = 60.0
"""Seconds that a server may be unreachable before following a job fails."""

IntervalOption = Annotated[
    float,
    typer.Option("--interval", metavar="SECONDS", min=0.1, help="Minimum time between updates."),
]


@dataclass(frozen=True)
class Snapshot:
    """The state of a followed job at one time."""

    view: JobView
    # All metrics so far.
    figures: Figures
    # Whether the server was unreachable, so that `view` is the last known one.
    away: bool = False


class Outage:
    """Tracks how long the server has been unreachable, up to `OUTAGE_S`."""

    def __init__(self, shell: Shell) -> None:
        self._shell, self._seen_s = shell, shell.now()

    def end(self) -> None:
        """Record a response of the server."""
        self._seen_s = self._shell.now()

    def bear(self, error: UnavailableError) -> None:
        """Raise `error` if the server has been unreachable for longer than `OUTAGE_S`."""
        if self._shell.now() - self._seen_s > OUTAGE_S:
            raise error


def say_nothing(_text: str) -> None:
    """Ignore the text."""


def snapshots(
    shell: Shell,
    client: Client,
    job: str,
    interval_s: float,
    note: Callable[[str], None] = say_nothing,
) -> Iterator[Snapshot]:
    """Yield a snapshot of job id `job` at each change until it has ended and all metrics are read.

    Changes come from the server's event stream; if it breaks, `note` is called and the job is polled every
    `interval_s` seconds. Raises `UnavailableError` if the server is unreachable for longer than `OUTAGE_S`.
    """
    figures, cursor = Figures(), 0
    view = client.job(job)
    outage = Outage(shell)
    with News(shell, client, job, interval_s, note) as changes:
        while True:
            try:
                view = client.job(job)
                cursor = _drain_metrics(client, job, cursor, figures)
                outage.end()
            except UnavailableError as error:
                outage.bear(error)
                yield Snapshot(view, figures, away=True)
            else:
                yield Snapshot(view, figures)
                if view.state in ENDED:
                    return
            changes.wait()


def _drain_metrics(client: Client, job: str, cursor: int, figures: Figures) -> int:
    """Add all metrics after `cursor` to `figures` and return the new cursor."""
    while True:
        page = client.metrics(job, after=cursor)
        figures.add(page.metrics)
        if not page.metrics:
            return cursor
        cursor = page.next


def watch_job(shell: Shell, client: Client, job: str, interval_s: float = 1.0) -> None:
    """Display job id `job` until it ends; raise `IsthmusError` unless it succeeded."""
    last = _show_until_ended(shell, client, job, interval_s)
    if last.view.state != "succeeded":
        reason = f": {last.view.reason}" if last.view.reason else ""
        raise IsthmusError(f"job {job} {last.view.state}{reason}", hint=f"see `isthmus logs {job}`")


def _show_until_ended(shell: Shell, client: Client, job: str, interval_s: float) -> Snapshot:
    live = shell.stdout.isatty() and not shell.as_json
    followed = snapshots(shell, client, job, interval_s, say_nothing if live else shell.note)
    if shell.as_json:
        return _print_changes(followed, lambda now: shell.line(as_record(now.view, now.figures)))
    if live:
        return _show_live(shell, client, followed)
    return _print_changes(followed, lambda now: shell.print(as_line(now.view, now.figures)))


def _print_changes(looks: Iterator[Snapshot], emit: Callable[[Snapshot], None]) -> Snapshot:
    """Emit each snapshot whose state or step differs from the previous one; return the last."""
    previous: Any = None
    for snapshot in looks:
        view = snapshot.view
        state = (view.state, view.reason, view.attempt, snapshot.figures.steps[-1:])
        if state != previous:
            emit(snapshot)
            previous = state
    return snapshot


def _show_live(shell: Shell, client: Client, looks: Iterator[Snapshot]) -> Snapshot:
    from rich.live import Live

    from isthmus.cli.terminal.dashboard import dashboard

    pool = _pool_if_allowed(client)
    with Live(console=shell.console(), auto_refresh=False, vertical_overflow="visible") as live:
        for snapshot in looks:
            page = dashboard(snapshot.view, snapshot.figures, pool, away=snapshot.away)
            live.update(page, refresh=True)
    return snapshot


def _pool_if_allowed(client: Client) -> PoolView | None:
    try:
        return client.pool()
    except IsthmusError:  # show links without their capacity
        return None


@verb(
    commands,
    panel=PANEL,
    examples=["isthmus watch my-job", "isthmus watch my-job --json | jq -c '{step, loss}'"],
)
def watch(shell: Shell, client: Client, job: JobArgument, interval_s: IntervalOption = 1.0) -> None:
    """Follow a job until it ends: state, stages, loss, links.

    The exit status is 0 only if the job succeeded. Waits for a server that restarts.
    """
    watch_job(shell, client, find_id(client, job), interval_s)


@verb(
    commands,
    panel=PANEL,
    examples=["isthmus logs my-job", "isthmus logs my-job -f --rank 0", "isthmus logs my-job --json"],
)
def logs(
    shell: Shell,
    client: Client,
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this rank's log.")] = None,
    interval_s: IntervalOption = 1.0,
) -> None:
    """Print the logs of the workers.

    Each line is prefixed with its rank. Waits for a server that restarts.
    """
    found = find_id(client, job)
    lines = _Lines(shell, named=rank is None)
    outage, ended = Outage(shell), False
    while not ended:
        try:
            ended = not follow or client.job(found).state in ENDED
            lines.drain(client, found, rank)
            outage.end()
        except UnavailableError as error:
            if not follow:
                raise
            outage.bear(error)
            ended = False
        if not ended:
            shell.sleep(interval_s)
    lines.finish()


class _Lines:
    """Prints log chunks, which may end anywhere, as complete lines."""

    def __init__(self, shell: Shell, *, named: bool) -> None:
        self._shell, self._named = shell, named
        self._begun: dict[tuple[int, int], str] = {}
        self._cursor = 0

    def drain(self, client: Client, job: str, rank: int | None) -> None:
        """Print all new log text of `job`; safe to repeat after an error."""
        while (page := client.logs(job, after=self._cursor, rank=rank)).chunks:
            self._take(page.chunks)
            self._cursor = page.next

    def _take(self, chunks: Sequence[LogChunk]) -> None:
        """Print the lines completed by `chunks` (with `--json` the chunks themselves)."""
        for chunk in chunks:
            if self._shell.as_json:
                self._shell.line(chunk)
                continue
            key = (chunk.attempt, chunk.rank)
            *complete, self._begun[key] = (self._begun.get(key, "") + chunk.text).split("\n")
            for line in complete:
                self._print(chunk.rank, line)
        self._shell.stdout.flush()

    def finish(self) -> None:
        """Print incomplete last lines."""
        for (_, rank), line in sorted(self._begun.items()):
            if line:
                self._print(rank, line)
        self._shell.stdout.flush()

    def _print(self, rank: int, line: str) -> None:
        self._shell.stdout.write((f"{rank} | " if self._named else "") + line + "\n")
