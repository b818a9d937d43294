"""Commands on projects, groups and limits: quota set, quota limit, quota show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import FieldError, InputError
from isthmus.core.files.user_files import load_accounts, place_error
from isthmus.core.owner.with_quota import QuotaChange
from isthmus.core.views.quota_views import QuotaView

PANEL = "Pool"

commands = typer.Typer()
quota_commands = typer.Typer(help="Projects, groups and the limits of users.", no_args_is_help=False)
commands.add_typer(quota_commands, name="quota", rich_help_panel=PANEL)


@command(
    quota_commands,
    panel=PANEL,
    name="set",
    examples=["isthmus quota set accounts.yaml", "isthmus quota set accounts.yaml --json"],
)
def set_from_file(
    env: CliEnvironment,
    client: ApiClient,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Projects, groups and limited users.")],
) -> None:
    """Set the pool's projects, groups and limits to those of a file (admin only).

    They replace those before as a whole. A limit below what runs is refused with the time at which it would hold.
    """
    accounts = load_accounts(file)
    try:
        found = client.set_quotas(accounts)
    except FieldError as error:
        raise _placed(file, error) from error
    counts = f"{found.projects} projects, {found.groups} groups and {found.users} limited users"
    env.answer(found, lambda: f"{counts} are in effect")


def _placed(file: Path, error: FieldError) -> InputError:
    """Return the server's refusal of a field as the error of its line."""
    found = re.match(r"((?:projects|groups|users)(?:\.\w{1,40}){1,4}): (.*)", error.message, re.DOTALL)
    if found is None:
        return error
    place = tuple(int(step) if step.isdecimal() else step for step in found[1].split("."))
    placed: InputError = place_error(file, place, found[2], error.hint)
    return placed


@command(
    quota_commands,
    panel=PANEL,
    name="limit",
    examples=[
        "isthmus quota limit user:ann --chips 8 --spend 500",
        "isthmus quota limit project:east-lab --at east/h20=8 --guarantee east/h20=4",
        "isthmus quota limit group:speech --none   # no limits any more",
    ],
)
def limit(
    env: CliEnvironment,
    client: ApiClient,
    account: Annotated[str, typer.Argument(metavar="ACCOUNT", help="project:NAME, group:NAME or user:NAME.")],
    chips: Annotated[int | None, typer.Option(metavar="N", help="Most chips held at once.")] = None,
    at: Annotated[
        list[str] | None, typer.Option(metavar="PLACE=N", help="Most chips of CLUSTER or CLUSTER/GROUP; repeatable.")
    ] = None,
    chip_hours: Annotated[int | None, typer.Option(metavar="N", help="Most chip-hours in a calendar month.")] = None,
    spend: Annotated[str | None, typer.Option(metavar="AMOUNT", help="Most money in a calendar month.")] = None,
    guarantee: Annotated[
        list[str] | None, typer.Option(metavar="PLACE=N", help="Chips guaranteed there; without it as before.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove all limits.")] = False,
) -> None:
    """Set the limits of one account in place of those before, and what a project is guaranteed at clusters.

    For admins; an owner sets --at and --guarantee of its projects at its own clusters. What is left out is not limited.
    """
    given = {
        "chips": chips, "chip_hours_per_month": chip_hours, "spend_per_month": spend,
        "chips_at": [_placed_chips(one) for one in at or ()],
        "guaranteed_at": None if guarantee is None else [_placed_chips(one) for one in guarantee],
    }  # fmt: skip
    if none == any(value not in (None, []) for value in given.values()):
        raise InputError(
            "--none with limits" if none else "no limit is given",
            hint="give the limits that hold from now on, or --none alone to remove all",
        )
    try:
        change = QuotaChange.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", hint="see the examples") from error
    found = client.set_quota(account, change)
    env.answer(found, lambda: _table(found))


def _placed_chips(text: str) -> dict[str, Any]:
    """Return `CLUSTER=N` or `CLUSTER/GROUP=N` as fields."""
    place, found, chips = text.partition("=")
    cluster, with_group, group = place.partition("/")
    if not found:
        raise InputError(f"'{text}' names no chips", hint="write CLUSTER=N or CLUSTER/GROUP=N")
    return {"cluster": cluster, "node_group": group if with_group else None, "chips": chips}


@command(
    quota_commands,
    panel=PANEL,
    name="show",
    examples=[
        "isthmus quota show",
        "isthmus quota show --project nlp",
        "isthmus quota show --json | jq '.rows[] | select(.percent >= 80) | .name'",
    ],
)
def show(
    env: CliEnvironment,
    client: ApiClient,
    project: Annotated[str | None, typer.Option(metavar="NAME", help="One project.")] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="One group.")] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="One user.")] = None,
) -> None:
    """Show limits and what uses them: chips now, chip-hours and money of this month, and how many jobs wait for them.

    Users see their own account, their groups, and their projects with those above and below; owners their projects; an
    admin all.
    """
    given = [f"{kind}:{name}" for kind, name in (("project", project), ("group", group), ("user", user)) if name]
    if len(given) > 1:
        raise InputError("several of --project, --group and --user were given", hint="give one, or none for all")
    found = client.quotas(given[0] if given else None)
    env.answer(found, lambda: _table(found))


def _table(found: QuotaView) -> object:
    from isthmus.cli.terminal.quota_table import quota_table

    return quota_table(found)
