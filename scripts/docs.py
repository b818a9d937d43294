"""`python -m scripts.docs`: write the pages that are made from the code. A test holds them current."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from isthmus.cli.app.cli_reference import render_cli_reference as render_cli
from isthmus.core.base_model import MAX_INTEGER, MAX_NUMBER
from isthmus.core.chip import chip_catalogue
from isthmus.core.files.user_files import FILE_KINDS, json_schema
from isthmus.core.units import format_bytes
from scripts.python_api import render_package
from scripts.rest import render as render_rest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "tests" / "core" / "formats"

INTRODUCTION = """\
# File formats

`pool.yaml`, `job.yaml`, plans, an owner's `policy.yaml` and `tariff.yaml`, a site's `site.yaml` and the operator's
`accounts.yaml` and `oidc.yaml` are YAML (JSON is YAML too). Each has a `version`, 1 today; a file of version 1 will
load for as long as Isthmus exists, and a file of a later version is refused with a clear error. An unknown field is an
error: a typing mistake never passes silently. Sizes may be written `64 MiB` or `96 GB`. Integers are at most 2^63 - 1,
other numbers at most 1e30, unless a table says less.

`isthmus schema pool|job|plan|policy|site|tariff|accounts|oidc` prints the JSON Schema of a form, `isthmus check FILE`
what is wrong with a file."""

CHIPS_INTRODUCTION = """\
# Chips known by data sheet

Dense peaks per device as a training framework sees it, in TFLOP/s; where a card carries two devices, `chips
per card` is 2. A pool file may add chips of its own (`chips:`).

| chip | vendor | fp32 | bf16 | fp8 | memory | GB/s | in a node, GB/s | library | chips per card | source |
|---|---|---|---|---|---|---|---|---|---|---|"""


def pages() -> dict[Path, Callable[[], str]]:
    """Return every generated page with the function that makes its text."""
    return {
        DOCS / "cli.md": render_cli,
        DOCS / "formats.md": _formats,
        DOCS / "chips.md": _chips,
        DOCS / "api.md": render_rest,
        DOCS / "reference" / "client.md": partial(render_package, "isthmus"),
        DOCS / "reference" / "plan.md": partial(render_package, "isthmus.plan"),
        DOCS / "reference" / "sim.md": partial(render_package, "isthmus.sim"),
    }


def _formats() -> str:
    parts = [INTRODUCTION]
    for kind in FILE_KINDS:
        schema = json_schema(kind)  # type: ignore[arg-type]
        parts.append(f"## `{kind}`\n\n{schema.get('description', '')}")
        parts.append(_fields(schema, schema))
        for name in _used(schema, schema, []):
            definition = schema["$defs"][name]
            parts.append(f"### {name}\n\n{definition.get('description', '')}")
            parts.append(_fields(definition, schema))
        example = (EXAMPLES / f"{kind}-v1.yaml").read_text(encoding="utf-8")
        parts.append(f"An example:\n\n```yaml\n{example}```")
    return "\n\n".join(parts) + "\n"


def _used(node: Any, schema: Mapping[str, Any], found: list[str]) -> list[str]:
    """Return the definitions that have fields of their own, in the order in which they are met."""
    for name in _references(node):
        if name not in found and "properties" in schema["$defs"][name]:
            found.append(name)
            _used(schema["$defs"][name], schema, found)
    return found


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rsplit("/", 1)[-1]
        for key, value in node.items():
            if key != "$defs":
                yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _fields(definition: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    required = set(definition.get("required", ()))
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in definition["properties"].items():
        if name in required:
            default = "**required**"
        elif "default" in field:
            default = f"`{json.dumps(field['default'])}`" if not isinstance(field["default"], dict) else ""
        else:
            default = ""
        lines.append(f"| `{name}` | {_type(field, schema)} | {default} | {field['description']} |")
    return "\n".join(lines)


def _type(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rsplit("/", 1)[-1])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field:
        return " or ".join(_type(one, schema) for one in field["anyOf"])
    if field.get("type") == "array":
        if "prefixItems" in field:
            return "[" + ", ".join(_type(one, schema) for one in field["prefixItems"]) + "]"
        return f"list of {_type(field.get('items', {}), schema)}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"mapping to {_type(field['additionalProperties'], schema)}"
    bounds = [
        f"{sign} {field[key]:g}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", "≥"),
            ("exclusiveMaximum", "<"),
            ("maximum", "≤"),
        )
        if key in field and field[key] not in (MAX_INTEGER, MAX_NUMBER)
    ]
    return " ".join([str(field.get("type", "any")), *bounds])


def _chips() -> str:
    lines = [CHIPS_INTRODUCTION]
    for chip in chip_catalogue().values():
        peaks = [chip.peak_flop_per_s.get(p) for p in ("fp32", "bf16", "fp8")]
        shown = [f"{peak / 1e12:g}" if peak else "" for peak in peaks]
        link = chip.in_node_link
        cells = [
            chip.name, chip.vendor, *shown, format_bytes(chip.memory_bytes),
            f"{chip.memory_bandwidth_bytes_per_s / 1e9:g}",
            f"{link.name} {link.bandwidth_bytes_per_s / 1e9:g}",
            chip.collective_library, str(chip.chips_per_card), chip.source,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page, make_text in pages().items():
        page.write_text(make_text(), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
