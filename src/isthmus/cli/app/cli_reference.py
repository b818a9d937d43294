"""`render_cli_reference`: the command-line reference in Markdown for `docs/cli.md`, generated from the app."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import typer

from isthmus.cli.app.typer_app import app

_INTRODUCTION = """# Command line

Generated from the commands' help by `python -m scripts.docs`; a test checks that it is current.

With `--json` every command prints JSON, one document per line; an error is then one line
`{"error", "message", "hint"}` on standard output. Exit status: 0 success, 1 job did not succeed, 2 invalid
input, 3 no plan, 4 not allowed, 5 not found, 6 conflict (also: a plan has to be chosen first), 7 version
mismatch, 8 unavailable, 130 Ctrl-C.

Commands that connect to a server read its URL and your token from `--server` and `--token-file`, else from
`ISTHMUS_SERVER`, `ISTHMUS_TOKEN_FILE` or `ISTHMUS_TOKEN`, else from `isthmus/context.yaml` in
`$XDG_CONFIG_HOME` (`~/.config`) with the fields `server`, `token_file` and `ca`. No option takes the token.
"""
WIDTH = 110
_SHARED = ("help", "server", "token_file", "ca", "json")


def render_cli_reference() -> str:
    """Return the reference: every command with arguments, options and examples, in help order."""
    return "\n".join([_INTRODUCTION, *(_section(name, command) for name, command in all_commands())])


def all_commands() -> list[tuple[str, Any]]:
    """Return every command with its full name, such as `isthmus token create`, in help order."""
    return _leaves(typer.main.get_command(app), "isthmus")


def _leaves(group: Any, path: str) -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found += [(f"{path} {name}", command)] if not inner or command.invoke_without_command else []
        found += _leaves(command, f"{path} {name}") if inner else []
    return found


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in _SHARED]
    usage = " ".join([name, *(p.metavar or p.name.upper() for p in arguments), *(["[OPTIONS]"] if options else [])])
    paragraphs = (command.help or "").split("\n\n")
    lines = [f"## {name}", "", f"`{usage}`", ""]
    lines += [line for text in paragraphs for line in (*textwrap.wrap(text, WIDTH), "")]
    lines += [f"- `{p.metavar or p.name.upper()}`: {p.help}" for p in arguments]
    lines += [f"- `{', '.join(p.opts)}`{_metavar_text(p)}: {p.help}{_default_text(p)}" for p in options]
    lines += [""] if arguments or options else []
    return "\n".join([*lines, "```", *_examples(command.epilog or ""), "```", ""])


def _metavar_text(option: Any) -> str:
    if getattr(option, "is_flag", False):
        return ""
    return f" {option.metavar}" if option.metavar else ""


def _default_text(option: Any) -> str:
    if option.required:
        return " Required."
    if getattr(option, "is_flag", False) or option.default is None:
        return ""
    return f" Default `{option.default}`."


def _examples(epilog: str) -> list[str]:
    lines = [line.strip().replace(r"\[", "[") for line in epilog.split("\n")[1:]]
    return [re.sub(r" {2,}\((.*)\)$", r"   # \1", line) for line in lines]
