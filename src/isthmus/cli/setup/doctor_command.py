"""`isthmus doctor`: what is installed, reachable and missing on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from isthmus.cli.command import CaOption, ServerOption, TokenFileOption, command, open_client
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.setup.doctor_checks import Check, Machine, installed_checks, server_checks
from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import ClientSettings

commands = typer.Typer()


@command(
    commands,
    panel="Start here",
    examples=[
        "isthmus doctor",
        "isthmus doctor --server https://pool.example:8470 --token-file my.token --ca ca.pem",
        "isthmus doctor --json | jq '.checks[] | select(.status != \"ok\")'",
    ],
)
def doctor(
    env: CliEnvironment,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Check what is installed here and whether the server can be used; say what to do next.

    Checks Python, the package's extras, torch with its devices, Slurm, shared memory, what workers can be held to,
    server, TLS and token. The exit status is 1 if something is a problem, and 0 if optional parts are missing only.
    """
    status = run_doctor(env, Machine(), server=server, token_file=token_file, ca=ca)
    if status:
        raise typer.Exit(status)


def run_doctor(
    env: CliEnvironment, machine: Machine, *, server: str | None, token_file: Path | None, ca: Path | None
) -> int:
    """Print the checks of `machine` and of the server; return 1 if one is a problem, else 0."""

    def connect(settings: ClientSettings) -> ApiClient:
        return open_client(env, settings.server, settings.token, settings.ca)

    checks = [
        *installed_checks(machine),
        *server_checks(env.variables, connect, server=server, token_file=token_file, ca=ca),
    ]
    problems = sum(check.status == "problem" for check in checks)
    env.answer({"ok": not problems, "checks": [asdict(check) for check in checks]}, lambda: _page(checks, problems))
    return 1 if problems else 0


def _page(checks: list[Check], problems: int) -> object:
    from rich.console import Group
    from rich.text import Text

    from isthmus.cli.terminal.tables import table

    style = {"ok": "green", "missing": "yellow", "problem": "red"}
    rows = [(check.name, Text(check.status, style=style[check.status]), check.detail, check.next) for check in checks]
    end = f"{problems} problem{'s' if problems > 1 else ''} to solve" if problems else "no problem found"
    return Group(table("", ("check", "status", "detail", "next"), rows), Text(""), Text(end))
