"""Commands on money: tariff set, bill, ledger check, ledger compare."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from typing import Annotated, Literal

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.accounting.owner_waits import owner_waits
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.resolve_job import find_job_id
from isthmus.core.errors import ConflictError, FieldError, FileError, InputError, NotFoundError
from isthmus.core.files.user_files import load_tariff, place_error
from isthmus.core.views.ledger_views import LedgerEntry, PartyKind, StatementView
from isthmus.core.views.wait_views import OwnerStatement, OwnerWaits

PANEL = "Pool"
StatementFormat = Literal["json", "csv", "focus", "html"]

commands = typer.Typer()
tariff_commands = typer.Typer(help="Publish the prices of an owner's clusters.", no_args_is_help=False)
ledger_commands = typer.Typer(help="Check the ledger of the pool.", no_args_is_help=False)
commands.add_typer(tariff_commands, name="tariff", rich_help_panel=PANEL)
commands.add_typer(ledger_commands, name="ledger", rich_help_panel=PANEL)


@command(
    tariff_commands,
    panel=PANEL,
    name="set",
    examples=["isthmus tariff set tariff.yaml", "isthmus tariff set tariff.yaml --json"],
)
def set_tariff(
    env: CliEnvironment,
    client: ApiClient,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tariff: currency and prices.")],
) -> None:
    """Publish the prices of a file: of your clusters, or as operator of any cluster and of links.

    They hold from the time that they name, or from now. Published prices do not change; later ones replace them.
    """
    tariff = load_tariff(file)
    try:
        found = client.publish_tariff(tariff)
    except FieldError as error:
        raise _placed(file, error) from error
    env.answer(found, lambda: f"{found.prices} prices in {found.currency} are published")


def _placed(file: Path, error: FieldError) -> InputError:
    """Return the server's refusal of a price as the error of its line."""
    found = re.match(r"prices\.(\d{1,5})(?:\.(\w+))?: (.*)", error.message, re.DOTALL)
    if found is None:
        return error
    place: tuple[str | int, ...] = ("prices", int(found[1]), *((found[2],) if found[2] else ()))
    placed: FileError = place_error(file, place, found[3], error.hint)
    return placed


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus bill --owner hangzhou-lab --month 2027-01 --format html > january.html",
        "isthmus bill --user alice --month 2027-01 --format csv",
        "isthmus bill --project nlp --month 2027-01 --format focus",
        "isthmus bill --job 3f2a --month 2027-01 --format json | jq .total_cents",
    ],
)
def bill(
    env: CliEnvironment,
    client: ApiClient,
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help="The month, in UTC.")],
    owner: Annotated[str | None, typer.Option(metavar="NAME", help="The income of an owner.")] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="The cost of a user's jobs.")] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="The cost of one job, also of a deleted one.")] = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cost of a project and of those below it.")
    ] = None,
    output_format: Annotated[
        StatementFormat,
        typer.Option(
            "--format", metavar="json|csv|focus|html", help="JSON, CSV, CSV with the columns of FOCUS, or a page."
        ),
    ] = "json",
) -> None:
    """Print the statement of an owner, a user, a job or a project for a month.

    Each line is rounded once to a hundredth; what is left goes into the next line, and into the next month. In a month
    that is not over, what is held now is counted up to now. An owner's statement has the waits of its own users in the
    pool beside those alone, as `isthmus waits` prints them.
    """
    given: list[tuple[PartyKind, str]] = []
    given += [("owner", owner)] if owner is not None else []
    given += [("user", user)] if user is not None else []
    given += [("job", _job_id(client, job))] if job is not None else []
    given += [("project", project)] if project is not None else []
    if len(given) != 1:
        raise InputError(
            f"{len(given)} of --owner, --user, --job and --project were given",
            hint="a statement is of one of them; give one",
        )
    found = client.statement(*given[0], month)
    if owner is not None:
        found = OwnerStatement(**dict(found), waits=_waits(env, client, owner, month))
    if env.as_json or output_format == "json":
        env.print_json(found)
    else:
        env.write_text(_formatted(found, output_format))


def _waits(env: CliEnvironment, client: ApiClient, owner: str, month: str) -> OwnerWaits | None:
    """Return the waits of an owner's own users; None without users, and with more jobs than are simulated."""
    try:
        return owner_waits(env, client, owner, month)
    except NotFoundError:
        return None
    except InputError as error:
        env.print_note(f"without the waits of the owner's users: {error.message}")
        return None


def _job_id(client: ApiClient, job: str) -> str:
    """Return the id of a job; of one that is deleted the given text, since its cost outlives it."""
    try:
        return find_job_id(client, job)
    except NotFoundError:
        return job


def _formatted(found: StatementView, output_format: StatementFormat) -> str:
    from isthmus.cli.commands.accounting.statement_formats import FORMATS

    return FORMATS[output_format](found)


@command(
    ledger_commands,
    panel=PANEL,
    examples=["isthmus ledger check", "isthmus ledger check --json | jq '{entries, sum, unpaired, differences}'"],
)
def check(env: CliEnvironment, client: ApiClient) -> None:
    """Recount the ledger (admin only): sum of all entries, pairs, balances, each amount from its price and time.

    Ends with status 6 if anything differs.
    """
    found = client.check_ledger()
    summary = f"{found.entries} entries, sum {found.sum} millionths, {found.unpaired} without a pair"
    env.answer(found, lambda: "\n".join([summary, *(f"  {one}" for one in found.differences)]))
    if found.sum or found.unpaired or found.differences:
        raise ConflictError(f"the ledger is out of balance: {summary}", hint="keep the state folder and report it")


@command(
    ledger_commands,
    panel=PANEL,
    examples=[
        "isthmus ledger compare --site east --month 2027-01 --cards /var/lib/isthmus/cards",
        "isthmus ledger compare --site east --month 2027-01 --cards cards --slurm sacct.txt --slurmctld-log ctld.log",
        "isthmus ledger compare --site west --month 2027-01 --cards cards --kubernetes list.json --json",
    ],
)
def compare(
    env: CliEnvironment,
    client: ApiClient,
    site: Annotated[str, typer.Option(metavar="NAME", help="The cluster whose records these are.")],
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help="The month, in UTC.")],
    cards: Annotated[
        Path, typer.Option(metavar="PATH", help="The agent's record of cards: `cards` in its state folder, or a file.")
    ],
    slurm: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Slurm's record: sacct -P, jobcomp/filetxt or scontrol -o.")
    ] = None,
    kubernetes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Kubernetes' record: kubectl get events,pods -o json.")
    ] = None,
    slurmctld_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The log of slurmctld, which has its restarts.")
    ] = None,
    utc: Annotated[bool, typer.Option("--utc", help="Slurm's times are UTC, not in this machine's zone.")] = False,
    only_differences: Annotated[
        bool, typer.Option("--only-differences", help="Leave out parts on which both agree.")
    ] = False,
) -> None:
    """Compare the ledger of a month with a site's own records, interval by interval, each difference with its cause.

    Causes: whole seconds, clock skew, queue end, late release, killed daemon, unknown. Ends with status 6 if the cause
    of a difference is unknown.
    """
    from isthmus.cli.commands.accounting.compare_ledger import compare_ledger
    from isthmus.cli.commands.accounting.records_table import records_table
    from isthmus.core.records.read_records import RecordFiles, read_records

    files = RecordFiles(
        cards=cards, slurm=slurm, kubernetes=kubernetes, slurmctld_log=slurmctld_log, zone=UTC if utc else None
    )
    found = compare_ledger(_entries(client), read_records(files), site, month)
    env.answer(found, lambda: records_table(found, only_differences=only_differences))
    if found.unexplained:
        raise ConflictError(
            f"{found.unexplained} differences have no known cause",
            hint="tell the operator the job, the attempt and the interval; `isthmus show JOB` has its history",
        )


def _entries(client: ApiClient) -> Iterator[LedgerEntry]:
    """Yield the entries that the caller may see."""
    after: int | None = 0
    while after is not None:
        page = client.ledger(after=after)
        yield from page.entries
        after = page.after
