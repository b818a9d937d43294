"""Commands that write a job's results to a file: report, trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import JobArgument, command
from isthmus.cli.commands.follow_commands import read_history
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.resolve_job import find_job
from isthmus.core.errors import ConflictError, UnavailableError
from isthmus.core.messages.agent_messages import StepMetrics

commands = typer.Typer()
PANEL = "Jobs"


def all_metrics(client: ApiClient, job: str) -> list[StepMetrics]:
    """Return all step metrics of job id `job`."""
    found: list[StepMetrics] = []
    cursor = 0
    while True:
        page = client.metrics(job, after=cursor)
        found += page.metrics
        if not page.metrics:
            return found
        cursor = page.next


@command(commands, panel=PANEL, examples=["isthmus report my-job", "isthmus report my-job -o /tmp/report.html"])
def report(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: JOB.html in the current folder."),
    ] = None,
) -> None:
    """Write a job's report as one self-contained HTML page.

    Loss, throughput, history, the timeline of traced steps, stages, links, and the plan predicted against measured.
    """
    from isthmus.cli.job_report.write_report import write_report

    view = find_job(client, job)
    path = output or Path(f"{view.id}.html")
    history = read_history(client, view.id).events
    write_report(view, all_metrics(client, view.id), client.pool(), path, history=history)
    env.answer({"report": str(path), "job": view.id}, lambda: f"wrote {path}")


@command(commands, panel=PANEL, examples=["isthmus trace my-job -o trace.json   (opens in ui.perfetto.dev)"])
def trace(
    env: CliEnvironment,
    client: ApiClient,
    job: JobArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")],
) -> None:
    """Write the timeline of a job's traced steps for Perfetto or chrome://tracing."""
    from isthmus.cli.job_report.stage_trace import trace_events
    from isthmus.core.messages.worker_folder import write_atomically

    view = find_job(client, job)
    if view.plan is None:
        raise ConflictError(f"job {view.id} has no plan yet", hint="a trace is available after the job has run")
    events = trace_events(all_metrics(client, view.id), view.plan)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"job": view.id, "name": view.name},
    }
    try:
        write_atomically(output, json.dumps(document))
    except OSError as error:
        raise UnavailableError(f"cannot write {output}: {error.strerror or error}") from error
    env.answer({"trace": str(output), "events": len(events)}, lambda: f"wrote {output} ({len(events)} events)")
