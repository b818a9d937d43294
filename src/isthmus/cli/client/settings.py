"""Which server, with which token: options first, then the environment, then the context file.

The context file is `isthmus/context.yaml` under `XDG_CONFIG_HOME` (by default `~/.config`), for example::

    server: https://pool.example:8470
    token_file: ~/.config/isthmus/token
    ca: ~/.config/isthmus/ca.pem

A token is never an option: other users of the machine can read a process's command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isthmus.core.errors import FileError, InputError

DEFAULT_PORT = 8470
DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
_FIELDS = ("server", "token_file", "ca")


@dataclass(frozen=True)
class Settings:
    """The server's URL, the token of who asks, and the authority that signed the server's certificate."""

    server: str = DEFAULT_SERVER
    token: str | None = None
    ca: Path | None = None


def resolve(
    environ: Mapping[str, str],
    *,
    server: str | None = None,
    token_file: Path | None = None,
    ca: Path | None = None,
) -> Settings:
    """Return the settings in force; raise `InputError` for a token or context file that cannot be used."""
    context = read_context(environ)
    authority = ca or environ.get("ISTHMUS_CA") or context.get("ca")
    return Settings(
        server=server or environ.get("ISTHMUS_SERVER") or context.get("server") or DEFAULT_SERVER,
        token=_token(environ, token_file, context.get("token_file")),
        ca=Path(authority).expanduser() if authority else None,
    )


def context_path(environ: Mapping[str, str]) -> Path:
    """Return where the context file is looked for."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config"
    return Path(base) / "isthmus" / "context.yaml"


def read_context(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the context file, none without a file; raise `FileError` if it is malformed."""
    file = context_path(environ)
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FileError(f"cannot be read: {error}", file=str(file)) from error
    if not isinstance(content, dict):
        raise FileError("is not a mapping", file=str(file), hint="it holds " + ", ".join(_FIELDS))
    for key, value in content.items():
        if key not in _FIELDS or not isinstance(value, str):
            raise FileError(
                "unknown field" if key not in _FIELDS else "a text is needed",
                file=str(file), field=str(key), value=value, hint="it holds " + ", ".join(_FIELDS),
            )  # fmt: skip
    return content


def read_token(file: Path) -> str:
    """Return the token in `file`; raise `InputError` if there is none."""
    try:
        token = file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the token file {file} cannot be read: {error}") from error
    if not token or not token.isascii() or any(ch.isspace() for ch in token):
        raise InputError(f"the token file {file} holds no token", hint="it holds one line, the token")
    return token


def _token(environ: Mapping[str, str], given: Path | None, context: str | None) -> str | None:
    if given is not None:
        return read_token(given)
    if environ.get("ISTHMUS_TOKEN"):
        return environ["ISTHMUS_TOKEN"].strip()
    file = environ.get("ISTHMUS_TOKEN_FILE") or context
    return read_token(Path(file)) if file else None
