"""`verb`: declares a command. Adds the options all commands share, and hands over a shell and a client.

A command is a function of `shell`, of `client` where it talks to the server, and of its own arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from isthmus.cli.client.api_client import Client
from isthmus.cli.client.settings import resolve
from isthmus.cli.shell.shell import Shell

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's id, the beginning of one, or a name (the latest of it).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer in JSON, one document a line.")]
ServerOption = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="The server (env ISTHMUS_SERVER).")
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="Holds your token (env ISTHMUS_TOKEN_FILE)."),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="Authority that signed the server's certificate (env ISTHMUS_CA)."
    ),
]
_CONNECTION: dict[str, Any] = {"server": ServerOption, "token_file": TokenFileOption, "ca": CaOption}


def verb(
    app: typer.Typer,
    *,
    panel: str,
    examples: Sequence[str],
    name: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command of `app`, with `examples` under its help.

    The function's first parameter is `shell`; a second one called `client` adds the options that say which
    server to ask, and is closed when the command ends.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        own = [
            p for p in inspect.signature(function).parameters.values() if p.name not in ("shell", "client")
        ]
        remote = "client" in hints

        @functools.wraps(function)
        def command(ctx: typer.Context, **values: Any) -> None:
            shell: Shell = ctx.obj
            shell.as_json = values.pop("json")
            if not remote:
                function(shell, **values)
                return
            settings = resolve(shell.environ, **{key: values.pop(key) for key in _CONNECTION})
            with connect(shell, settings.server, settings.token, settings.ca) as client:
                function(shell, client, **values)

        shared = (_CONNECTION if remote else {}) | {"json": JsonOption}
        parameters = [_parameter("ctx", typer.Context, inspect.Parameter.empty)]
        parameters += [_parameter(p.name, hints[p.name], p.default) for p in own]
        parameters += [
            _parameter(key, kind, False if key == "json" else None) for key, kind in shared.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        text = _reflowed(inspect.getdoc(function) or "")
        app.command(name, help=text, epilog=_epilog(examples), rich_help_panel=panel)(command)
        return function

    return register


def connect(shell: Shell, server: str, token: str | None, ca: Path | None) -> Client:
    """Return a client that uses the shell's network and clock."""
    return Client(server, token, ca, transport=shell.transport, sleep=shell.sleep)


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _reflowed(text: str) -> str:
    """Return `text` with each paragraph in one line, for the terminal to break where it is wide enough."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _epilog(examples: Sequence[str]) -> str:
    lines = [example.replace("[", r"\[") for example in examples]
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])
