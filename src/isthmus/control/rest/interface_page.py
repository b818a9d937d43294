"""`interface_page`: the description of the REST interface for people, one page without scripts or foreign hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.core.text.html_page import html_table, page_text, render_page

_ANY = "any"


def interface_page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document: each request, and each body field by field."""
    info = document["info"]
    head = (
        f"<p>{page_text(str(info.get('summary', '')))} Every request but <code>/v1/health</code> sends "
        "<code>Authorization: Bearer TOKEN</code>. For programs: <a href='/openapi.json'>openapi.json</a>.</p>"
    )
    requests = "".join(_requests(document["paths"]))
    bodies = "".join(_bodies(document.get("components", {}).get("schemas", {})))
    title = f"REST interface, version {info['version']}"
    return render_page(title, "Isthmus", f"{head}<h2>Requests</h2>{requests}<h2>Bodies</h2>{bodies}")


def _requests(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, by_method in paths.items():
        for method, operation in by_method.items():
            yield f"<h3><code>{page_text(method.upper())} {page_text(path)}</code></h3>"
            yield f"<p>{page_text(str(operation.get('description', '')))}</p>"
            body = operation.get("requestBody", {}).get("content", {})
            if body:
                yield f"<p>Body: {_content(body)}</p>"
            given = [
                (one["name"], one["in"], _kind(one.get("schema", {})), str(one.get("description", "")))
                for one in operation.get("parameters", ())
            ]
            if given:
                yield html_table(("parameter", "in", "type", ""), given, raw=(2,))
            answers = [
                (status, str(answer.get("description", "")), _content(answer.get("content", {})))
                for status, answer in operation.get("responses", {}).items()
            ]
            yield html_table(("status", "", "body"), answers, raw=(2,))


def _bodies(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f"<h3 id='{page_text(name)}'>{page_text(name)}</h3>"
        yield f"<p>{page_text(str(schema.get('description', '')))}</p>"
        required = schema.get("required", ())
        rows = [
            (field, _kind(kind), "required" if field in required else _default(kind), str(kind.get("description", "")))
            for field, kind in schema.get("properties", {}).items()
        ]
        if rows:
            yield html_table(("field", "type", "default", ""), rows, raw=(1,))
        elif "enum" in schema:
            yield f"<p>One of {page_text(json.dumps(schema['enum']))}</p>"


def _content(content: Mapping[str, Any]) -> str:
    return ", ".join(
        _kind(one.get("schema", {})) if media == "application/json" else page_text(media)
        for media, one in content.items()
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a schema as HTML."""
    if "$ref" in schema:
        name = page_text(str(schema["$ref"]).rsplit("/", 1)[-1])
        return f"<a href='#{name}'>{name}</a>"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(one) for one in schema[several])
    if "enum" in schema or "const" in schema:
        return page_text(" | ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return page_text(str(schema.get("type", _ANY)))


def _default(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema["default"])[:60] if "default" in schema else ""
