"""Read YAML (or JSON) and record the line of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from isthmus.core.errors import FileError

Location = tuple[int | str, ...]
LineNumbers = dict[Location, int]


def read_yaml(file: Path) -> tuple[Any, LineNumbers]:
    """Return the document of a YAML (or JSON) file and the 1-based line of each value."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FileError(f"cannot be read: {reason}", file=str(file), hint="check the path") from error
    lines: LineNumbers = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _collect_lines(node, (), lines, file)
        document = yaml.safe_load(text)
    except RecursionError as error:
        raise FileError(
            "is nested too deeply, or refers to itself",
            file=str(file),
            hint="replace anchors by their values",
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise FileError(f"is not YAML: {error.problem}", file=str(file), line=line) from error
    except yaml.YAMLError as error:
        raise FileError(f"is not YAML: {error}", file=str(file)) from error
    if not isinstance(document, dict):
        raise FileError("contains no fields", file=str(file), line=1, hint="see `isthmus schema --help`")
    return document, lines


def _collect_lines(node: yaml.Node, at: Location, lines: LineNumbers, file: Path) -> None:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise FileError("appears twice", file=str(file), line=line, field=format_location((*at, key.value)))
            seen.add(key.value)
            lines[(*at, key.value)] = line
            _collect_lines(value, (*at, key.value), lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _collect_lines(value, (*at, index), lines, file)


def value_at(document: Any, place: Location) -> Any:
    """Return the value at `place`, or None."""
    for step in place:
        try:
            document = document[step]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def format_location(place: Location) -> str:
    """Format a location: `clusters[0].node_groups[1].chip`."""
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in place).lstrip(".")
