"""`read_route`: the proxy by which one site dials another one, from a file of routes."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.core.errors import InputError, NotFoundError
from isthmus.wan.dial import parse_address

MAX_ROUTES_BYTES = 2**20


def read_route(file: Path, source: str, target: str) -> str:
    """Return the `host:port` that `source` dials for `target`.

    Raises `InputError` for a file without routes, and `NotFoundError` if it has none between these two.
    """
    try:
        with file.open("rb") as stream:
            content = json.loads(stream.read(MAX_ROUTES_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file} has no routes: {error}", hint="name the routes.json of `isthmus proxy` or `isthmus links`"
        ) from error
    routes = content.get(source) if isinstance(content, dict) else None
    address = routes.get(target) if isinstance(routes, dict) else None
    if not isinstance(address, str):
        raise NotFoundError(f"{file} has no route from {source} to {target}", hint="see its names, and `--peer`")
    parse_address(address)
    return address
