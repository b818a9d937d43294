"""Server URL, token and CA: from options, then environment variables, then the context file.

The context file is `isthmus/context.yaml` in `XDG_CONFIG_HOME` (by default `~/.config`), for example::

    server: https://pool.example:8470
    token_file: ~/.config/isthmus/token
    ca: ~/.config/isthmus/ca.pem

`isthmus login` writes the token's file, and this one if it is missing.

The token itself is not an option, because other users of a machine can read command lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError, InputError
from isthmus.core.files.yaml_lines import read_yaml

DEFAULT_PORT = 8470
DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
MAX_TOKEN_BYTES = 4096
"""Largest file with a token."""
_CONTEXT_FIELDS = ("server", "token_file", "ca")


@dataclass(frozen=True)
class ClientSettings:
    """The server's URL, the user's token, and the CA file for the server's certificate."""

    server: str = DEFAULT_SERVER
    token: str | None = None
    ca: Path | None = None
    # Where the token was read from.
    token_file: Path | None = field(default=None, compare=False)


def resolve_settings(
    environ: Mapping[str, str],
    *,
    server: str | None = None,
    token_file: Path | None = None,
    ca: Path | None = None,
) -> ClientSettings:
    """Return the effective settings; raise `InputError` for an unusable token or context file."""
    source = _token_source(environ, token_file)
    return replace(
        server_settings(environ, server=server, ca=ca),
        token=read_token(source) if isinstance(source, Path) else source,
        token_file=source if isinstance(source, Path) else None,
    )


def server_settings(environ: Mapping[str, str], *, server: str | None = None, ca: Path | None = None) -> ClientSettings:
    """Return the effective settings without a token."""
    context = read_context(environ)
    authority = ca or environ.get("ISTHMUS_CA") or context.get("ca")
    return ClientSettings(
        server=server or environ.get("ISTHMUS_SERVER") or context.get("server") or DEFAULT_SERVER,
        ca=Path(authority).expanduser() if authority else None,
    )


def context_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the context file."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config"
    return Path(base) / "isthmus" / "context.yaml"


def read_context(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the context file, empty if missing; raise `FileError` if malformed or beyond a limit."""
    file = context_path(environ)
    if not file.exists():
        return {}
    content: dict[str, Any]
    content, _ = read_yaml(file, may_be_empty=True)
    for key, value in content.items():
        if key not in _CONTEXT_FIELDS or not isinstance(value, str):
            raise FileError(
                "unknown field" if key not in _CONTEXT_FIELDS else "must be a string",
                file=str(file), field=str(key), value=value, hint="valid fields: " + ", ".join(_CONTEXT_FIELDS),
            )  # fmt: skip
    return content


def read_token(file: Path) -> str:
    """Return the token in `file`; raise `InputError` if missing or malformed."""
    try:
        token = read_within(file.expanduser(), MAX_TOKEN_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the token file {file} cannot be read: {error}") from error
    if not token or not token.isascii() or any(ch.isspace() for ch in token):
        hint = "it must contain the token on one line"
        raise InputError(f"the token file {file} contains no valid token", hint=hint)
    return token


def _token_source(environ: Mapping[str, str], given: Path | None) -> Path | str | None:
    """Return the file of the token, or the token itself if the environment has it."""
    if given is None and environ.get("ISTHMUS_TOKEN"):
        return environ["ISTHMUS_TOKEN"].strip()
    return given or token_path(environ)


def token_path(environ: Mapping[str, str]) -> Path | None:
    """Return the file of the token that the environment or the context file names."""
    file = environ.get("ISTHMUS_TOKEN_FILE") or read_context(environ).get("token_file")
    return Path(file) if file else None
