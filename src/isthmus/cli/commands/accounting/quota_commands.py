"""Commands on projects, groups and limits: quota set, quota show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import FieldError, InputError
from isthmus.core.files.user_files import load_accounts, place_error

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

    Users see their own account, their groups, and their projects with those above and below; an admin all.
    """
    given = [f"{kind}:{name}" for kind, name in (("project", project), ("group", group), ("user", user)) if name]
    if len(given) > 1:
        raise InputError("several of --project, --group and --user were given", hint="give one, or none for all")
    found = client.quotas(given[0] if given else None)

    def text() -> object:
        from isthmus.cli.terminal.quota_table import quota_table

        return quota_table(found)

    env.answer(found, text)
