"""Read YAML (or JSON) and record the line of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from isthmus.core.errors import FileError

Location = tuple[int | str, ...]
LineNumbers = dict[Location, int]

MAX_FILE_BYTES = 64 * 2**20
MAX_REPEATED_VALUES = 100_000
"""Values that aliases may add to those which the file spells out."""


def read_yaml(file: Path) -> tuple[Any, LineNumbers]:
    """Return the document of a YAML (or JSON) file and the 1-based line of each value.

    Raises `FileError` for a file that cannot be read, is larger than 64 MiB, is not YAML, or whose aliases repeat
    more than 100,000 values (nine lines of aliases can stand for a billion values).
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise FileError("is larger than 64 MiB", file=str(file), hint="check the path; user files are small")
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FileError(f"cannot be read: {reason}", file=str(file), hint="check the path") from error
    lines: LineNumbers = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_aliases(node, file)
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
    except (yaml.YAMLError, ValueError) as error:
        raise FileError(f"is not YAML: {error}", file=str(file)) from error
    if not isinstance(document, dict):
        raise FileError("contains no fields", file=str(file), line=1, hint="see `isthmus schema --help`")
    return document, lines


def _check_aliases(root: yaml.Node, file: Path) -> None:
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1  # of a node that refers to itself; the walk below ends with RecursionError there
            sizes[id(node)] = 1 + sum(size(child) for child in _children(node))
        return sizes[id(node)]

    repeated = size(root) - len(sizes)
    if repeated > MAX_REPEATED_VALUES:
        raise FileError(
            f"repeats {min(repeated, 10**9):,}{' or more' if repeated > 10**9 else ''} values by aliases; "
            f"{MAX_REPEATED_VALUES:,} are allowed",
            file=str(file),
            hint="replace anchors by their values",
        )


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _collect_lines(node: yaml.Node, at: Location, lines: LineNumbers, file: Path) -> None:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise FileError("has a field name that is no word", file=str(file), line=line)
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
