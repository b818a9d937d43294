"""Convert a pydantic validation error to a `FileError` with line, field, value and suggestion."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from isthmus.core.base_model import NAME_PATTERN
from isthmus.core.errors import FileError
from isthmus.core.files.yaml_lines import LineNumbers, Location, format_location, value_at
from isthmus.core.pool import UnknownNameError
from isthmus.core.pool_parts.placed_error import PlacedError

_SHOWN_CHARS = 200
"""Longest value that a message shows."""

CLASH = "clash"
"""Type of an error of fields that are valid each but not together: its context has the `text` and the `hint`."""


def to_file_error(
    error: ValidationError, document: Any, lines: LineNumbers, file: Path, model_type: type[BaseModel]
) -> FileError:
    """Convert the first pydantic error (misspelt fields before others) to a `FileError` with its line."""
    mistakes = error.errors()
    details = next((x for x in mistakes if x["type"] == "extra_forbidden"), mistakes[0])
    place = _document_location(details["loc"], document)
    cause = (details.get("ctx") or {}).get("error")
    if isinstance(cause, UnknownNameError):
        place = _find_value(document, cause.value, cause.kind) or place
        message = str(cause)
        hint = chip_hint(cause.value, cause.known) if cause.kind == "chip" else suggest_name(cause.value, cause.known)
    else:
        message, hint = _message_and_hint(details, document, place, model_type)
        if isinstance(cause, PlacedError):
            place = _document_location((*details["loc"], *cause.place), document)
            message, hint = str(cause), cause.hint
    line = next((lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in lines), None)
    value = value_at(document, place)
    field = format_location(place) or None
    return FileError(message, file=str(file), line=line, field=field, value=value, hint=hint)


def _message_and_hint(
    details: ErrorDetails, document: Any, place: Location, model_type: type[BaseModel]
) -> tuple[str, str | None]:
    if details["type"] == "extra_forbidden":
        word = str(details["loc"][-1])
        return f"unknown field '{word}'", suggest_name(word, _valid_fields(model_type, details["loc"]))
    if details["type"] == "missing":
        return "is missing", None
    if details["type"] == CLASH:
        context = details.get("ctx") or {}
        return str(context.get("text")), context.get("hint")
    value = value_at(document, place)
    text = _plain_message(details)
    shown = f", not {_short(value)}" if isinstance(value, str | int | float | bool) else ""
    hint = None
    if details["type"] == "literal_error" and isinstance(value, str):
        expected = re.findall(r"'([^']+)'", str((details.get("ctx") or {}).get("expected", "")))
        hint = suggest_name(value, expected)
    return text + shown, hint


def _short(value: Any) -> str:
    """Return the literal of a value, cut after some words."""
    text = repr(value[:_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _plain_message(details: ErrorDetails) -> str:
    """Return a pydantic message in YAML terms (names, lists)."""
    context = details.get("ctx") or {}
    if details["type"] == "string_pattern_mismatch" and context.get("pattern") == NAME_PATTERN:
        return "must be a name of at most 63 letters, digits, '.', '_' and '-'"
    if details["type"] == "tuple_type":
        return "must be a list"
    text = details["msg"].removeprefix("Value error, ").replace("Tuple", "List")
    return text[0].lower() + text[1:]


def _valid_fields(model_type: type[BaseModel], loc: Location) -> list[str]:
    """Return the valid field names at location `loc`."""
    model: type[BaseModel] | None = model_type
    for step in loc[:-1]:
        if isinstance(step, int) or model is None:
            continue
        field = model.model_fields.get(step) or next((f for f in model.model_fields.values() if f.alias == step), None)
        model = None if field is None else _nested_model(field.annotation)
    if model is None:
        return []
    names = [field.alias or name for name, field in model.model_fields.items()]
    return [*names, "between", "round_trip_ms"] if "from" in names else names


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _nested_model(arg))), None)


def suggest_name(word: str, known: Iterable[str]) -> str | None:
    """Return a hint for an unknown `word`: the closest of `known`, or all if at most 24."""
    known = list(dict.fromkeys(known))
    lower = {name.lower(): name for name in known}
    match = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    if match:
        return f"did you mean '{lower[match[0]]}'?"
    return "known: " + ", ".join(known) if 0 < len(known) <= 24 else None


def chip_hint(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown chip: the nearest known one, and how to define another."""
    lower = {name.lower(): name for name in known}
    match = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.0)
    nearest = f"did you mean '{lower[match[0]]}'? " if match else ""
    return (
        f"{nearest}`isthmus chips` lists all known ones. Define another under `chips:` of the pool file, with name, "
        "peak_flop_per_s, memory_bytes, memory_bandwidth_bytes_per_s and in_node_link (docs/extend/add-a-chip.md)"
    )


def _document_location(loc: Location, document: Any) -> Location:
    """Map pydantic's `loc` to the document; links were expanded before validation."""
    if loc[:1] == ("links",) and len(loc) > 1 and isinstance(loc[1], int):
        count = -1
        for index, link in enumerate(document.get("links") or []):
            count += 2 if isinstance(link, dict) and "between" in link else 1
            if count >= loc[1]:
                delay = "delay_ms" if not isinstance(link, dict) or "delay_ms" in link else "round_trip_ms"
                return ("links", index, *(delay if step == "delay_ms" else step for step in loc[2:]))
    return loc


def _find_value(document: Any, value: str, kind: str) -> Location | None:
    """Return the location of `value` under a key that can hold a `kind`."""
    keys = {"cluster": ("from", "to", "between"), "chip": ("chip",), "owner": ("owner",)}[kind]

    def search(node: Any, at: Location) -> Location | None:
        if isinstance(node, dict):
            items: Iterable[tuple[int | str, Any]] = node.items()
        elif isinstance(node, list):
            items = enumerate(node)
        else:
            return None
        for key, child in items:
            if child == value and any(step in keys for step in (*at[-1:], key)):
                return (*at, key)
            if found := search(child, (*at, key)):
                return found
        return None

    return search(document, ())
