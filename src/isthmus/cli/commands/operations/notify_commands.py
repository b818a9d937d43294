"""Commands on notices: notify set|show|remove."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import ValidationError

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import InputError
from isthmus.core.text.printable import printable
from isthmus.core.views.notice_views import Subscription, SubscriptionView

PANEL = "Pool"
commands = typer.Typer()
notify_commands = typer.Typer(help="Notices of jobs, faults and sites by webhook and e-mail.", no_args_is_help=False)
commands.add_typer(notify_commands, name="notify", rich_help_panel=PANEL)


@command(
    notify_commands,
    panel=PANEL,
    examples=[
        "isthmus notify set --webhook https://hooks.example.org/isthmus",
        "isthmus notify set --email alice@example.org --topic faults --topic state",
        "isthmus notify set --webhook https://hooks.example.org/isthmus --json | jq -r .secret",
    ],
    name="set",
)
def set_notify(
    env: CliEnvironment,
    client: ApiClient,
    webhook: Annotated[str, typer.Option(metavar="URL", help="Where messages are posted.")] = "",
    email: Annotated[str, typer.Option(metavar="ADDRESS", help="Where e-mail goes.")] = "",
    topic: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="state, faults, sites or budgets; repeat it for several (default: all)."),
    ] = None,
) -> None:
    """Subscribe to notices: users of their jobs, owners of their sites, admins of all. Replaces what was set before.

    The secret that signs webhooks is printed: the receiver checks `webhook-signature` with it, as Standard Webhooks
    describe it. Messages come at least once; `webhook-id` is the same when one is repeated.
    """
    fields: dict[str, Any] = {"webhook": webhook, "email": email} | ({"topics": tuple(topic)} if topic else {})
    try:
        subscription = Subscription.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).removesuffix("s")
        raise InputError(f"--{name} {printable(str(first['input'])[:80])}: {first['msg']}") from error
    view = client.set_subscription(subscription)
    env.answer(view, lambda: _text(view))


@command(notify_commands, panel=PANEL, examples=["isthmus notify show", "isthmus notify show --json"], name="show")
def show_notify(env: CliEnvironment, client: ApiClient) -> None:
    """Show your subscription to notices, without the secret of its webhooks."""
    view = client.subscription()
    env.answer(view, lambda: _text(view))


@command(notify_commands, panel=PANEL, examples=["isthmus notify remove"], name="remove")
def remove_notify(env: CliEnvironment, client: ApiClient) -> None:
    """End your subscription to notices; what waits for delivery is dropped."""
    client.remove_subscription()
    env.answer({"subscription": None}, lambda: "no notices are sent")


def _text(view: SubscriptionView) -> str:
    one = view.subscription
    if one is None:
        return "no notices are sent; isthmus notify set --help"
    where = [f"webhook {printable(one.webhook)}"] * bool(one.webhook) + [f"e-mail {one.email}"] * bool(one.email)
    lines = [f"{', '.join(one.topics)}: {', '.join(where)}"]
    return "\n".join(lines + [f"secret of the webhook: {view.secret}"] * bool(view.secret))
