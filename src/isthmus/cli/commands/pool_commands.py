"""Commands on the pool and its access tokens: pool, token list|create|revoke|rotate."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from isthmus.cli.command import command, invalid_name
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.environment.parse_since import parse_age_s
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.text.printable import printable
from isthmus.core.views.access_views import TokenGrant, TokenRotation
from isthmus.core.views.api_views import TokenRequest

PANEL = "Pool"

commands = typer.Typer()
token_commands = typer.Typer(help="List, create, grant, revoke and rotate tokens.", no_args_is_help=False)
commands.add_typer(token_commands, name="token", rich_help_panel=PANEL)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of a token: see `isthmus token list`.")]


@command(commands, panel=PANEL, examples=["isthmus pool", "isthmus pool --json | jq '.clusters[].free_chips'"])
def pool(env: CliEnvironment, client: ApiClient) -> None:
    """Show the clusters with their free chips, and the links."""
    view = client.pool()

    def show() -> object:
        from isthmus.cli.terminal.tables import pool_table

        return pool_table(view)

    env.answer(view, show)


@command(
    token_commands,
    panel=PANEL,
    examples=[
        "isthmus token create --user alice --expires 90d > alice.token",
        "isthmus token create --owner hangzhou-lab > agent.token",
        "isthmus token create --admin second-operator --json",
    ],
)
def create(
    env: CliEnvironment,
    client: ApiClient,
    owner: Annotated[str | None, typer.Option(metavar="NAME", help="For an owner's agents.")] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="For a user that submits jobs.")] = None,
    admin: Annotated[str | None, typer.Option(metavar="NAME", help="For another operator of the pool.")] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="AGE", help="How long it counts: 12h, 90d, 52w (default: until revoked).")
    ] = None,
) -> None:
    """Create a token and print it (admin only).

    The token is shown only once; the server stores a hash.
    """
    roles = {"owner": owner, "user": user, "admin": admin}
    given = [(role, name) for role, name in roles.items() if name is not None]
    if len(given) != 1:
        raise InputError(
            f"{len(given)} of --owner, --user and --admin were given",
            hint="a token has one role; give one of them",
        )
    ((role, name),) = given
    wanted = {"role": role, "name": name}
    try:
        request = TokenRequest.model_validate(wanted)
    except ValidationError as error:
        raise invalid_name(error) from error
    if expires is not None:
        try:
            request = TokenRequest.model_validate(wanted | {"expires_in_s": parse_age_s(expires)})
        except ValidationError as error:
            raise InputError(
                f"--expires {expires[:80]}: a token counts for more than 0 s and at most 10 years"
            ) from error
    view = client.create_token(request)
    env.answer(view, lambda: view.token)


@command(token_commands, panel=PANEL, name="list", examples=["isthmus token list", "isthmus token list --json"])
def show_tokens(env: CliEnvironment, client: ApiClient) -> None:
    """List your tokens (an admin: all) with their ids, never the tokens themselves."""
    found = client.tokens()

    def show() -> object:
        from isthmus.cli.terminal.access_tables import token_table

        return token_table(found)

    env.answer(found, show)


@command(token_commands, panel=PANEL, examples=["isthmus token revoke t-3f9a01bc22de"])
def revoke(env: CliEnvironment, client: ApiClient, token: IdArgument) -> None:
    """Revoke a token: it is rejected within a second, and its event streams end."""
    view = client.revoke_token(token)
    env.answer(view, lambda: f"{printable(view.id)} of {view.role} {view.name} is {view.state}")


@command(
    token_commands,
    panel=PANEL,
    examples=[
        "isthmus token grant t-3f9a01bc22de",
        "isthmus token grant --user alice",
        "isthmus token grant --user alice --withdraw --json",
    ],
)
def grant(
    env: CliEnvironment,
    client: ApiClient,
    token: Annotated[str | None, typer.Argument(metavar="ID", help="The id of a token.")] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="All valid tokens of a user.")] = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take the grant back.")] = False,
) -> None:
    """Let jobs that are submitted with a token have priority high, which may preempt others (admin only).

    It counts within a second, at every server; a token that replaces another one keeps the grant.
    """
    if (token is None) == (user is None):
        raise InputError("give either the ID of a token or --user", hint="`isthmus token list` lists both")
    ids = (
        [token]
        if token is not None
        else [one.id for one in client.tokens() if (one.role, one.name, one.state) == ("user", user, "valid")]
    )
    if not ids:
        raise NotFoundError(f"user {user} has no valid token", hint="isthmus token create --user NAME")
    found = tuple(client.grant_token(one, TokenGrant(high=not withdraw)) for one in ids)
    verb = "may no longer" if withdraw else "may"
    env.answer(
        found,
        lambda: "\n".join(f"{printable(one.id)} of {one.role} {one.name} {verb} submit priority high" for one in found),
    )


@command(
    token_commands,
    panel=PANEL,
    examples=["isthmus token rotate t-3f9a01bc22de > alice.token", "isthmus token rotate t-3f9a01bc22de --grace 0s"],
)
def rotate(
    env: CliEnvironment,
    client: ApiClient,
    token: IdArgument,
    grace: Annotated[str, typer.Option(metavar="AGE", help="How long the old token still counts, at most 30d.")] = "1h",
) -> None:
    """Replace a token and print the new one; the old one counts for a grace period.

    The new token expires when the old one would have; an admin's rotation gives it a new period of the same length.
    """
    try:
        rotation = TokenRotation(grace_s=parse_age_s(grace))
    except ValidationError as error:
        raise InputError(f"--grace {grace[:80]}: at most 30 days") from error
    view = client.rotate_token(token, rotation)
    env.answer(view, lambda: view.token)
