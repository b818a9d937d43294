"""Read YAML (or JSON) and record the line of each value, in bounded time and memory.

Before values are built, a pass over the parser's events (yaml.org/spec, chapter 3.1) counts them and their depth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError

Location = tuple[int | str, ...]
LineNumbers = dict[Location, int]

MAX_VALUES = 100_000
"""Values and field names that a file may spell out."""
MAX_DEPTH = 64
MAX_WORD_CHARS = 4096
"""Longest value without quotes: it may be read as a number or date, which takes more than linear time."""
MAX_REPEATED_VALUES = 100_000
"""Values that aliases may add to those which the file spells out."""

MAX_FIELD_CHARS = 200
_CHARS_PER_VALUE = 256
"""Text of this length counts as one more value where aliases repeat it."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where it is there, ten times as fast."""
_EXPLAINED_CHARS = 65_536
"""Files up to this size are read again by the parser in Python, whose messages say more."""


def read_yaml(file: Path, *, may_be_empty: bool = False) -> tuple[Any, LineNumbers]:
    """Return the document of a YAML (or JSON) file and the 1-based line of each value.

    Raises `FileError` for a file that cannot be read, is not YAML, has tags, or exceeds a limit: 16 MiB, 100,000
    values, 64 levels, and as many values again by aliases (nine lines of aliases can stand for a billion values).
    An empty file has no fields if it `may_be_empty`, else it is an error.
    """
    return parse_yaml(_read_text(file), file, may_be_empty=may_be_empty)


def parse_yaml(text: str, file: Path, *, may_be_empty: bool = False) -> tuple[Any, LineNumbers]:
    """Return the document of a text and the line of each value, as `read_yaml`; errors name `file`, never read."""
    lines: LineNumbers = {}
    try:
        _check_events(text, file)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            document = None
        else:
            _check_aliases(node, file)
            _collect_lines(node, (), lines, file)
            document = loader.construct_document(node)
    except RecursionError as error:
        raise _too_deep(file) from error
    except yaml.MarkedYAMLError as error:
        explained = _explain(text, error)
        mark = explained.problem_mark or explained.context_mark
        line = None if mark is None else mark.line + 1
        raise FileError(f"is not YAML: {explained.problem}", file=str(file), line=line) from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise FileError(f"is not YAML: {error}", file=str(file)) from error
    if document is None and may_be_empty:
        return {}, lines
    if not isinstance(document, dict):
        raise FileError("contains no fields", file=str(file), line=1, hint="see `isthmus schema --help`")
    return document, lines


def _read_text(file: Path) -> str:
    try:
        return read_within(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FileError(f"cannot be read: {reason}", file=str(file), hint="check the path") from error


def _check_events(text: str, file: Path) -> None:
    """Raise `FileError` if the file has too many values, too many levels, a tag, or a word that is too long."""
    num_values = depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if not isinstance(event, yaml.NodeEvent):
            continue
        num_values += 1
        line = event.start_mark.line + 1 if event.start_mark is not None else None
        if num_values > MAX_VALUES:
            raise FileError(f"has more than {MAX_VALUES:,} values", file=str(file), line=line, hint="check the path")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(file, line)
        if getattr(event, "tag", None) not in (None, "tag:yaml.org,2002:str"):
            shown = str(getattr(event, "tag", ""))[:80]
            raise FileError(f"has the tag '{shown}'", file=str(file), line=line, hint="remove it: no field needs a tag")
        if isinstance(event, yaml.ScalarEvent) and not event.style and len(event.value) > MAX_WORD_CHARS:
            raise FileError(
                f"has a value of {len(event.value):,} characters without quotes; {MAX_WORD_CHARS:,} are allowed",
                file=str(file),
                line=line,
                hint="put long text between quotes",
            )


def _too_deep(file: Path, line: int | None = None) -> FileError:
    hint = "replace anchors by their values"
    return FileError("is nested too deeply, or refers to itself", file=str(file), line=line, hint=hint)


def _explain(text: str, error: yaml.MarkedYAMLError) -> yaml.MarkedYAMLError:
    """Return the error of the parser in Python for a small file, else `error`."""
    if len(text) <= _EXPLAINED_CHARS:
        try:
            for _ in yaml.parse(text, Loader=yaml.SafeLoader):
                pass
        except yaml.MarkedYAMLError as found:
            return found
        except (yaml.YAMLError, ValueError, RecursionError):
            pass
    return error


def _check_aliases(root: yaml.Node, file: Path) -> None:
    """Raise `FileError` if aliases repeat too many values; a long text counts as several."""
    sizes: dict[int, int] = {}
    spelled = 0

    def size(node: yaml.Node) -> int:
        nonlocal spelled
        if id(node) not in sizes:
            own = 1 + (len(node.value) // _CHARS_PER_VALUE if isinstance(node, yaml.ScalarNode) else 0)
            spelled += own
            sizes[id(node)] = own  # of a node that refers to itself; the walk below ends with RecursionError there
            sizes[id(node)] = own + sum(size(child) for child in _children(node))
        return sizes[id(node)]

    repeated = size(root) - spelled
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
            if len(key.value) > MAX_FIELD_CHARS:
                raise FileError(f"has a field name of {len(key.value):,} characters", file=str(file), line=line)
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
