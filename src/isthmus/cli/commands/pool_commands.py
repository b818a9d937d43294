"""Commands on the pool and its access tokens: pool, token create."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import InputError
from isthmus.core.messages.api_views import TokenRequest

commands = typer.Typer()
token_commands = typer.Typer(help="Create tokens (admin only).", no_args_is_help=False)
commands.add_typer(token_commands, name="token", rich_help_panel="Pool")


@command(commands, panel="Pool", examples=["isthmus pool", "isthmus pool --json | jq '.clusters[].free_chips'"])
def pool(env: CliEnvironment, client: ApiClient) -> None:
    """Show the clusters with their free chips, and the links."""
    view = client.pool()

    def show() -> object:
        from isthmus.cli.terminal.tables import pool_table

        return pool_table(view)

    env.answer(view, show)


@command(
    token_commands,
    panel="Pool",
    examples=[
        "isthmus token create --user alice > alice.token",
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
) -> None:
    """Create a token and print it.

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
    try:
        request = TokenRequest.model_validate({"role": role, "name": name})
    except ValidationError as error:
        raise InputError(
            f"'{name}' is not a valid name", hint="use at most 63 letters, digits, '.', '_' and '-'"
        ) from error
    view = client.create_token(request)
    env.answer(view, lambda: view.token)
