"""`isthmus login`: sign in at the pool's provider; the token goes to a file that later commands read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import CaOption, ServerOption, command, open_client
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import ClientSettings, context_path, server_settings, token_path
from isthmus.core.errors import AuthError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.text.printable import printable
from isthmus.core.views.access_views import DeviceAnswer, DeviceBegun

PANEL = "Pool"
SLOW_DOWN_S = 5
"""How much longer the pause becomes when the provider asks for it (RFC 8628, 3.5)."""

commands = typer.Typer()


@command(
    commands,
    panel=PANEL,
    examples=["isthmus login --server https://pool.example:8470", "isthmus login --save my.token --json"],
)
def login(
    env: CliEnvironment,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file for the token, instead of that of later commands.")
    ] = None,
    server: ServerOption = None,
    ca: CaOption = None,
) -> None:
    """Sign in at the pool's provider in a browser on any device, and keep the token for later commands.

    The token counts for 12 hours. It is written with mode 0600 to the file that `ISTHMUS_TOKEN_FILE` or the context
    file names, else to `isthmus/token` in `$XDG_CONFIG_HOME` (`~/.config`), with a context file if there is none.
    """
    settings = server_settings(env.variables, server=server, ca=ca)
    with open_client(env, settings.server, None, settings.ca) as client:
        begun = client.begin_sign_in()
        where, code = printable(begun.complete_url or begun.url), printable(begun.user_code)
        env.print_note(f"open {where} and enter the code {code}, within {begun.expires_in_s // 60} minutes")
        found = _await_token(env, begun, client)
    file = (save or token_path(env.variables) or context_path(env.variables).parent / "token").expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, f"{found.token}\n", 0o600)
    if save is None and not context_path(env.variables).exists():
        _write_context(env, settings, file)
    ends = datetime.fromtimestamp(found.expires_s or 0.0, UTC).isoformat(timespec="minutes")
    answer = {"role": found.role, "name": found.name, "expires_s": found.expires_s, "token_file": str(file)}
    env.answer(answer, lambda: f"signed in as {found.role} {found.name} until {ends}; the token is in {file}")
    if save is None and token_path(env.variables) is None:
        env.print_note(f"later commands need it: add `token_file: {file}` to {context_path(env.variables)}")


def _await_token(env: CliEnvironment, begun: DeviceBegun, client: ApiClient) -> DeviceAnswer:
    """Ask for the token until the person has signed in; raise `AuthError` once the code has expired."""
    pause_s, deadline_s = begun.interval_s, env.now() + begun.expires_in_s
    while env.now() < deadline_s:
        env.sleep(pause_s)
        found = client.finish_sign_in(begun.device_code)
        if found.token is not None:
            return found
        pause_s += SLOW_DOWN_S if found.slow_down else 0
    raise AuthError(
        f"no sign-in within {begun.expires_in_s} s: the code has expired", hint="run isthmus login again"
    )  # fmt: skip


def _write_context(env: CliEnvironment, settings: ClientSettings, file: Path) -> None:
    """Let later commands find the server and the token."""
    fields = {"server": settings.server, "token_file": str(file)}
    fields |= {"ca": str(settings.ca.absolute())} if settings.ca is not None else {}
    write_atomically(context_path(env.variables), "".join(f"{key}: {json.dumps(one)}\n" for key, one in fields.items()))
