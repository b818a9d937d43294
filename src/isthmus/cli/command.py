"""`command`: decorator that registers a command, adds shared options and passes in `CliEnvironment` and `ApiClient`.

A command function takes the `CliEnvironment`, a `client` if it talks to the server, and its own arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import ValidationError

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import resolve_settings
from isthmus.core.errors import InputError

JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job's id, a unique id prefix, or a name (the latest job with it)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one document per line.")]
ServerOption = Annotated[str | None, typer.Option("--server", metavar="URL", help="Server URL (env ISTHMUS_SERVER).")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="File with your token (env ISTHMUS_TOKEN_FILE)."),
]
CaOption = Annotated[
    Path | None,
    typer.Option("--ca", metavar="FILE", help="CA that signed the server's certificate (env ISTHMUS_CA)."),
]
_CONNECTION_OPTIONS: dict[str, Any] = {"server": ServerOption, "token_file": TokenFileOption, "ca": CaOption}


def command(
    app: typer.Typer,
    *,
    panel: str,
    examples: Sequence[str],
    name: str | None = None,
    is_default: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a function as a command of `app`, with `examples` in its help.

    The first parameter of the function is the `CliEnvironment`. A parameter named `client` adds the connection
    options; the client is closed when the command ends. With `is_default` it is what `app` does without a command.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        _, *others = inspect.signature(function).parameters.values()
        own = [p for p in others if p.name != "client"]
        remote = "client" in hints

        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> None:
            if ctx.invoked_subcommand is not None:
                return
            shell: CliEnvironment = ctx.obj
            shell.as_json = values.pop("json")
            if not remote:
                function(shell, **values)
                return
            settings = resolve_settings(shell.variables, **{key: values.pop(key) for key in _CONNECTION_OPTIONS})
            with open_client(shell, settings.server, settings.token, settings.ca) as client:
                function(shell, client, **values)

        shared = (_CONNECTION_OPTIONS if remote else {}) | {"json": JsonOption}
        parameters = [_parameter("ctx", typer.Context, inspect.Parameter.empty)]
        parameters += [_parameter(p.name, hints[p.name], p.default) for p in own]
        parameters += [_parameter(key, kind, False if key == "json" else None) for key, kind in shared.items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        text = _unwrap_paragraphs(inspect.getdoc(function) or "")
        if is_default:
            app.callback(help=text, epilog=_epilog(examples), invoke_without_command=True)(run)
        else:
            app.command(name, help=text, epilog=_epilog(examples), rich_help_panel=panel)(run)
        return function

    return register


def open_client(env: CliEnvironment, server: str, token: str | None, ca: Path | None) -> ApiClient:
    """Return a client that uses the transport and clock of `env`."""
    return ApiClient(server, token, ca, transport=env.transport, sleep=env.sleep)


def invalid_name(error: ValidationError) -> InputError:
    """Return the error of a request whose name is none."""
    return InputError(
        f"'{error.errors()[0]['input']}' is not a valid name", hint="use at most 63 letters, digits, '.', '_' and '-'"
    )


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _unwrap_paragraphs(text: str) -> str:
    """Return `text` with each paragraph on one line, so that the terminal wraps it."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _epilog(examples: Sequence[str]) -> str:
    lines = [example.replace("[", r"\[") for example in examples]
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])
