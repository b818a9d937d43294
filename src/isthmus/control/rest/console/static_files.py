"""The console's static files: a bundle in the package, read once, served by exact name with a strict policy.

The files hold no data and need no token. Their policy (W3C Content Security Policy 3, Trusted Types) admits scripts and
styles of this server alone, no inline ones, no frame around the pages, and no text that becomes HTML.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from isthmus.core.errors import NotFoundError
from isthmus.core.text.html_page import page_style

CONSOLE_PATH = "/console/"
INDEX = "index.html"
CONSOLE_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
CONSOLE_HEADERS = {
    "Content-Security-Policy": CONSOLE_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    # Asked again each time, answered by 304: files of two releases are never mixed.
    "Cache-Control": "no-cache",
}
"""Headers of every file of the console, beside those of every answer."""
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}

console_router = APIRouter(include_in_schema=False)


class StaticFile(NamedTuple):
    """A file of the bundle, its type, and the tag that changes with its content."""

    content: bytes
    media_type: str
    tag: str


@functools.cache
def console_files() -> dict[str, StaticFile]:
    """Return the bundle by path below `CONSOLE_PATH`, with the style sheet that all pages of Isthmus share."""
    found = {"page.css": _static_file("page.css", page_style().encode())}
    _collect(resources.files("isthmus.control.rest.console").joinpath("bundle"), "", found)
    return found


def _collect(folder: Traversable, prefix: str, found: dict[str, StaticFile]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _collect(entry, f"{prefix}{entry.name}/", found)
            continue
        found[f"{prefix}{entry.name}"] = _static_file(entry.name, entry.read_bytes())


def _static_file(name: str, content: bytes) -> StaticFile:
    kind = MEDIA_TYPES.get(f".{name.rpartition('.')[2]}", "text/plain")
    return StaticFile(content, f"{kind}; charset=utf-8", f'"{hashlib.sha256(content).hexdigest()[:32]}"')


@console_router.api_route(CONSOLE_PATH + "{name:path}", methods=["GET", "HEAD"])
async def get_console_file(name: str, request: Request) -> Response:
    """Return a file of the console; 304 if the browser has this version of it."""
    file = console_files().get(name or INDEX)
    if file is None:
        raise NotFoundError(f"the console has no file '{name[:100]}'", hint=f"it begins at {CONSOLE_PATH}")
    headers = CONSOLE_HEADERS | {"ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@console_router.get("/")
@console_router.get("/console")
async def open_console() -> Response:
    """Send a browser to the console."""
    return RedirectResponse(CONSOLE_PATH, status_code=307)
