"""`render`: the reference of the REST interface as Markdown, made from the interface's own description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from isthmus.control.rest.access_endpoints import access_router
from isthmus.control.rest.catalogue_endpoints import catalogue_router
from isthmus.control.rest.endpoints import metrics_router, router
from isthmus.control.rest.ledger_endpoints import ledger_router
from isthmus.control.rest.site_endpoints import site_router
from isthmus.control.rest.subscription_endpoints import subscription_router

INTRODUCTION = """\
# REST interface

What commands and agents say to the server (`isthmus serve`); other programs may say the same. A running
server describes every body at `/openapi.json`, and at `/docs` for people.

A request carries `Authorization: Bearer TOKEN`, with a token that `isthmus token create` made: of a user, who
sees the user's own jobs; of an owner, for the agents of its clusters; or of an admin. Bodies are JSON; an
unknown field is an error. A page of a long list ends with where the next one begins (`next`, or the last id).

Every error is `{"error", "message", "hint"}`, by the names of the error's kind: 401 no valid token, 403 not
with this token, 404 not there or not yours, 409 not now, 413 too large, 422 a mistake in it, 426 another
protocol, 429 too many requests (wait as `Retry-After` says), 503 unavailable. Submitting again under the same `key`
is safe.
"""


def render() -> str:
    """Return a table of every path: what it takes, what it answers, what it does."""
    app = FastAPI()
    app.include_router(router)
    app.include_router(access_router)
    app.include_router(catalogue_router)
    app.include_router(site_router)
    app.include_router(ledger_router)
    app.include_router(subscription_router)
    app.include_router(metrics_router)
    lines = ["| request | takes | answers | |", "|---|---|---|---|"]
    for path, by_method in app.openapi()["paths"].items():
        for method, described in by_method.items():
            cells = f"`{method.upper()} {path}`", _takes(described), _answers(described)
            lines.append("| " + " | ".join([*cells, " ".join(described["description"].split())]) + " |")
    return "\n".join([INTRODUCTION, *lines]) + "\n"


def _takes(described: Mapping[str, Any]) -> str:
    """Return the body's name, and the options behind `?` or in headers; the path says the rest."""
    options = [f"`{one['name']}`" for one in described.get("parameters", ()) if one["in"] != "path"]
    return ", ".join([_named(one) for one in _contents(described.get("requestBody", {}))] + options)


def _answers(described: Mapping[str, Any]) -> str:
    good = [one for status, one in described["responses"].items() if status.startswith("2")]
    return ", ".join(_named(one) for response in good for one in _contents(response))


def _contents(holder: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(kind, content.get("schema", {})) for kind, content in holder.get("content", {}).items()]


def _named(content: tuple[str, Mapping[str, Any]]) -> str:
    """Return `Name`, `list of Name`, or the media type of what is no JSON."""
    kind, schema = content
    name = schema.get("items", schema).get("$ref", "").rpartition("/")[2]
    if not name:
        return kind
    return f"list of {name}" if "items" in schema else name
