"""Commands by which sites join the pool: site invite, invitations, join, accept."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from isthmus.cli.command import CaOption, ServerOption, command, invalid_name, open_client
from isthmus.cli.commands.process_setup import import_extra, read_site, select_cluster
from isthmus.cli.commands.site.site_commands import PANEL, SiteArgument, finding_rows, print_checks, site_commands
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import resolve_settings
from isthmus.client.server_address import require_secure_server
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import errors_placed, load_pool
from isthmus.core.views.site_views import InvitationRequest, JoinRequest

commands = typer.Typer()
"""None of the top level: the commands of this module join the group `site`."""

_CODE_CHARS = 26
_GROUP_CHARS = 5


@command(
    site_commands,
    panel=PANEL,
    examples=["isthmus site invite hangzhou-lab", "isthmus site invite lab --cluster qingyang --max-chips 64 --json"],
)
def invite(
    env: CliEnvironment,
    client: ApiClient,
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="The owner whose cluster may join.")],
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster that may join; also one that has lost its key.")
    ] = None,
    max_chips: Annotated[int | None, typer.Option(metavar="N", min=1, help="The most chips of the cluster.")] = None,
    probation: Annotated[
        bool, typer.Option("--probation/--no-probation", help="The site first takes a few jobs of little value.")
    ] = True,
) -> None:
    """Make a code by which an owner's cluster joins the pool (admin only): it counts once, for an hour.

    The code is shown once; the server stores its hash. Give it to the owner on a way that only the owner reads.
    """
    wanted = {"owner": owner, "cluster": cluster, "max_chips": max_chips, "probation": probation}
    try:
        request = InvitationRequest.model_validate(wanted)
    except ValidationError as error:
        raise invalid_name(error) from error
    made = client.invite_owner(request)
    env.answer(made, lambda: _spaced(made.code))


@command(site_commands, panel=PANEL, examples=["isthmus site invitations"])
def invitations(env: CliEnvironment, client: ApiClient) -> None:
    """List the invitations, never their codes (admin only); `isthmus token revoke ID` takes one back."""
    found = client.invitations()

    def show() -> object:
        from isthmus.cli.terminal.site_tables import invitations_table

        return invitations_table(found, env.now())

    env.answer(found, show)


@command(site_commands, panel=PANEL, examples=["isthmus site accept qingyang"])
def accept(env: CliEnvironment, client: ApiClient, name: SiteArgument) -> None:
    """End the probation of a site (admin only); otherwise it ends by itself: see `isthmus site show`."""
    after = client.accept_site(name)
    env.answer(after, lambda: f"{name} takes any job")


@command(
    site_commands,
    panel=PANEL,
    examples=[
        "isthmus site join 7KQ2M-... --server https://pool.example:8470 --ca ca.pem --pool pool.yaml --state agent",
        "isthmus site join - --site slurm.yaml --pool pool.yaml --cluster qingyang --state /shared/agent < code",
    ],
)
def join(
    env: CliEnvironment,
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code of the pool's operator; - reads it.")],
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="The agent's state folder: it gets the agent's key.")
    ],
    pool: Annotated[Path, typer.Option("--pool", metavar="POOL.yaml", help="The file with the site's cluster.")] = Path(
        "pool.yaml"
    ),
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The site's cluster (required if the file has several).")
    ] = None,
    site: Annotated[
        Path | None, typer.Option(metavar="SITE.yaml", help="The site's scheduler: see `isthmus schema site`.")
    ] = None,
    server: ServerOption = None,
    ca: CaOption = None,
) -> None:
    """Join a cluster of yours to the pool: check the site, draw the agent's key, and have it accepted.

    A site that fails a check does not join. Nothing but the cluster's description and a hash of the key is sent. If
    the answer is lost, repeat the command with the same folder. The agent renews its key by itself every day.
    """
    agents = import_extra("isthmus.agent", "agent")
    settings = resolve_settings(env.variables, server=server, token_file=None, ca=ca)
    require_secure_server(settings.server)
    secret = _read_code(env, code)
    own = select_cluster(load_pool(pool), cluster)
    with errors_placed(site):
        rows = finding_rows(site or pool, agents.check_scheduler(read_site(site, own), own))
    if not all(row["ok"] for row in rows):
        print_checks(env, rows)
        raise typer.Exit(InputError.exit_code)
    digest = agents.draw_key(state, own.name, time.time)
    with open_client(env, settings.server, secret, settings.ca) as client:
        joined = client.join_pool(JoinRequest(cluster=own, key=digest))
    start = ["isthmus", "agent", "--state", str(state), "--pool", str(pool), "--cluster", own.name]
    start += ["--server", settings.server]
    start += ["--site", str(site)] if site is not None else []
    start += ["--ca", str(settings.ca)] if settings.ca is not None else []
    text = f"cluster {own.name} of {joined.owner} has joined the pool"
    text += ", on probation" if joined.probation else ""
    env.answer(joined, lambda: f"{text}; start its agent:\n  {shlex.join(start)}")


def _read_code(env: CliEnvironment, given: str) -> str:
    """Return the code without the signs that group it; raise `InputError` for what cannot be one."""
    text = env.stdin.readline(200) if given == "-" else given
    code = "".join(char for char in text.upper() if char not in "- \n\r\t")
    if len(code) != _CODE_CHARS or not code.isascii() or not code.isalnum():
        raise InputError(
            f"this is no code: it has {len(code)} letters and digits, a code has {_CODE_CHARS}",
            hint="copy all of what `isthmus site invite` has printed",
        )
    return code


def _spaced(code: str) -> str:
    """Return a code in groups that a person can read out."""
    return "-".join(code[place : place + _GROUP_CHARS] for place in range(0, len(code), _GROUP_CHARS))
