"""Commands on the audit log: audit, audit verify."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from isthmus.cli.command import command
from isthmus.cli.commands.operations.audit_anchor import read_anchor, write_anchor
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.parse_since import parse_since_s
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import ConflictError, InputError
from isthmus.core.text.printable import printable
from isthmus.core.views.access_views import AuditFilter, AuditPage, AuditRecord
from isthmus.core.views.audit_chain import AuditReport, check_audit

PANEL = "Pool"
MAX_RECORDS = 10_000
"""Most records that `audit` prints."""
PAGE_SIZE = 1000

commands = typer.Typer()
audit_commands = typer.Typer(no_args_is_help=False)
commands.add_typer(audit_commands, name="audit", rich_help_panel=PANEL)


@command(
    audit_commands,
    panel=PANEL,
    examples=["isthmus audit --since 1d", "isthmus audit --user alice --json | jq '.[].action'"],
    is_default=True,
)
def audit(
    env: CliEnvironment,
    client: ApiClient,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Records since then: an age such as 12h or 7d, or a date.")
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="Only acts of this name, or on it.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_RECORDS, help="The newest N records.")] = 200,
) -> None:
    """Print the audit log (admin only): acts on jobs, tokens and sites, failed logins, refusals.

    Nothing changes or removes a record; the server keeps them for 400 days. `isthmus audit verify` checks that.
    """
    since_s = None if since is None else parse_since_s(since, env.now())
    try:
        wanted = AuditFilter(since_s=since_s, user=user)
    except ValidationError as error:
        raise InputError(
            "--user is longer than any name", hint="give the name of a token or the id of a job"
        ) from error
    found = client.audit(wanted, limit=limit).records

    def show() -> object:
        from isthmus.cli.terminal.access_tables import audit_table

        return audit_table(found)

    env.answer(found, show)


@command(
    audit_commands,
    panel=PANEL,
    examples=[
        "isthmus audit verify",
        "isthmus audit verify --anchor ~/pool-audit.json",
        "isthmus audit verify --json | jq .problems",
    ],
    name="verify",
)
def verify_audit(
    env: CliEnvironment,
    client: ApiClient,
    anchor: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Note the end of the log there; a later run requires that it is still in it."
        ),
    ] = None,
) -> None:
    """Verify the hash chain of the audit log: find changed, missing and swapped lines (admin only).

    The hashes are computed here, from all lines. That lines were cut off at the end shows by an end that was noted
    before: with `--anchor` on this machine, and in the server's state folder by `isthmus server check`. Ends with
    status 6 if there is a problem; the anchor then stays as it was.
    """
    first = client.audit(AuditFilter(), limit=PAGE_SIZE, oldest=True)
    known = None if anchor is None else read_anchor(anchor, first.store)
    report = check_audit(first.store, _all_lines(client, first), known)
    if anchor is not None and not report.problems:
        write_anchor(anchor, report.store, report.end)
    env.answer(
        report.as_dict(), lambda: "\n".join([_summary(report), *(f"  {printable(one)}" for one in report.problems)])
    )
    if report.problems:
        raise ConflictError(
            f"the audit log has a problem: {report.problems[0]}",
            hint="stop the servers, keep their state folders, and see docs/guide/monitoring.md",
        )


def _all_lines(client: ApiClient, page: AuditPage) -> Iterator[AuditRecord]:
    while page.records:
        yield from page.records
        page = client.audit(AuditFilter(), after=page.records[-1].number, limit=PAGE_SIZE)


def _summary(report: AuditReport) -> str:
    state = f"{len(report.problems)} problems" if report.problems else "every line follows the one before"
    last = f"line {report.end.number}, {report.end.digest.hex()[:16]}..." if report.end.number else "no line"
    return f"{report.num_lines:,} lines of store {printable(report.store)}: {state}; it ends with {last}"
