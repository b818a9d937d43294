"""Read the files that users write (`pool.yaml`, `job.yaml`, a plan) and answer a mistake with its place.

A mistake becomes a `FileError` with file, line, field, value and, where a word is nearly right, the
nearest valid one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from isthmus.core.chip import catalogue
from isthmus.core.errors import FileError
from isthmus.core.job import Job
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool, UnknownNameError

FileKind = Literal["pool", "job", "plan"]
FILE_KINDS: dict[str, type[BaseModel]] = {"pool": Pool, "job": Job, "plan": Plan}

AnyModel = TypeVar("AnyModel", bound=BaseModel)
Location = tuple[int | str, ...]
Lines = dict[Location, int]


def load_pool(path: str | Path) -> Pool:
    """Read `pool.yaml`."""
    return _load(Path(path), Pool)


def load_plan(path: str | Path) -> Plan:
    """Read a plan written by hand or by `isthmus plans --json`."""
    return _load(Path(path), Plan)


def load_job(path: str | Path) -> Job:
    """Read `job.yaml`; relative paths in it are taken from the folder the file is in."""
    file = Path(path)
    job = _load(file, Job)
    base = file.resolve().parent

    def absolute(text: str) -> str:
        return text if "://" in text or Path(text).is_absolute() else str(base / text)

    data = job.data.model_copy(update={"paths": tuple(absolute(x) for x in job.data.paths)})
    if data.tokenizer != "bytes":
        data = data.model_copy(update={"tokenizer": absolute(data.tokenizer)})
    folder = job.checkpoints.model_copy(update={"folder": absolute(job.checkpoints.folder)})
    return job.model_copy(
        update={
            "model": absolute(job.model),
            "output": absolute(job.output),
            "data": data,
            "checkpoints": folder,
        }
    )


def _load(file: Path, kind: type[AnyModel]) -> AnyModel:
    document, lines = read_yaml(file)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _explain(error, document, lines, file, kind) from error


def read_yaml(file: Path) -> tuple[Any, Lines]:
    """Return the document in a YAML (or JSON) file and the 1-based line of each value in it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FileError(f"cannot be read: {reason}", file=str(file), hint="check the path") from error
    lines: Lines = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _collect_lines(node, (), lines, file)
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise FileError(f"is not YAML: {error.problem}", file=str(file), line=line) from error
    except yaml.YAMLError as error:
        raise FileError(f"is not YAML: {error}", file=str(file)) from error
    if not isinstance(document, dict):
        raise FileError("holds no fields", file=str(file), line=1, hint="see `isthmus schema --help`")
    return document, lines


def _collect_lines(node: yaml.Node, at: Location, lines: Lines, file: Path) -> None:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise FileError("appears twice", file=str(file), line=line, field=_dotted((*at, key.value)))
            seen.add(key.value)
            lines[(*at, key.value)] = line
            _collect_lines(value, (*at, key.value), lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _collect_lines(value, (*at, index), lines, file)


def _explain(
    error: ValidationError, document: Any, lines: Lines, file: Path, kind: type[BaseModel]
) -> FileError:
    """Turn the first of pydantic's complaints into one that points into the file."""
    details = error.errors()[0]
    place = _place_in_file(details["loc"], document)
    cause = (details.get("ctx") or {}).get("error")
    if isinstance(cause, UnknownNameError):
        place = _find_value(document, cause.value, cause.kind) or place
        message, hint = str(cause), _nearest(cause.value, cause.known)
    else:
        message, hint = _message(details, document, place, kind)
    line = next((lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in lines), None)
    value = _value_at(document, place)
    field = _dotted(place) or None
    return FileError(message, file=str(file), line=line, field=field, value=value, hint=hint)


def _message(
    details: ErrorDetails, document: Any, place: Location, kind: type[BaseModel]
) -> tuple[str, str | None]:
    if details["type"] == "extra_forbidden":
        word = str(details["loc"][-1])
        return f"unknown field '{word}'", _nearest(word, _siblings(kind, details["loc"]))
    if details["type"] == "missing":
        return "is missing", None
    value = _value_at(document, place)
    text = details["msg"].removeprefix("Value error, ")
    text = text[0].lower() + text[1:]
    shown = f", not {value!r}" if isinstance(value, str | int | float | bool) else ""
    hint = None
    if details["type"] == "literal_error" and isinstance(value, str):
        expected = re.findall(r"'([^']+)'", str((details.get("ctx") or {}).get("expected", "")))
        hint = _nearest(value, expected)
    return text + shown, hint


def _siblings(kind: type[BaseModel], loc: Location) -> list[str]:
    """Return the field names valid at the place where an unknown one was found."""
    model: type[BaseModel] | None = kind
    for step in loc[:-1]:
        if isinstance(step, int) or model is None:
            continue
        field = model.model_fields.get(step) or next(
            (f for f in model.model_fields.values() if f.alias == step), None
        )
        model = None if field is None else _model_in(field.annotation)
    if model is None:
        return []
    names = [field.alias or name for name, field in model.model_fields.items()]
    return [*names, "between", "round_trip_ms"] if "from" in names else names


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)


def _nearest(word: str, known: Iterable[str]) -> str | None:
    known = list(dict.fromkeys(known))
    lower = {name.lower(): name for name in known}
    match = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    if match:
        return f"did you mean '{lower[match[0]]}'?"
    return "known: " + ", ".join(known) if 0 < len(known) <= 24 else None


def _place_in_file(loc: Location, document: Any) -> Location:
    """Return the longest prefix of pydantic's location that names something in the document, plus its last step.

    Links are expanded before validation (`between` gives two), so an index into `links` is mapped back.
    """
    if loc[:1] == ("links",) and len(loc) > 1 and isinstance(loc[1], int):
        count = -1
        for index, link in enumerate(document.get("links") or []):
            count += 2 if isinstance(link, dict) and "between" in link else 1
            if count >= loc[1]:
                rest = tuple(
                    "round_trip_ms" if x == "delay_ms" and "delay_ms" not in link else x for x in loc[2:]
                )
                return ("links", index, *rest)
    return loc


def _find_value(document: Any, value: str, kind: str) -> Location | None:
    """Return where `value` stands in the document under a key that can hold a `kind`."""
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


def _value_at(document: Any, place: Location) -> Any:
    for step in place:
        if (isinstance(document, dict) and step in document) or (
            isinstance(document, list) and isinstance(step, int) and step < len(document)
        ):
            document = document[step]
        else:
            return None
    return document


def _dotted(place: Location) -> str:
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in place).lstrip(".")


def json_schema(kind: FileKind) -> dict[str, Any]:
    """Return the JSON Schema of a file form; a pool's also admits `between` and `round_trip_ms` on links."""
    schema = FILE_KINDS[kind].model_json_schema(by_alias=True)
    if kind != "pool":
        return schema
    link = schema["$defs"]["Link"]
    cluster_name = link["properties"]["from"]
    link["properties"]["between"] = {
        "type": "array", "items": cluster_name, "minItems": 2, "maxItems": 2,
        "description": "both directions at once, instead of from and to",
    }  # fmt: skip
    link["properties"]["round_trip_ms"] = {"type": "number", "minimum": 0, "description": "twice delay_ms"}
    link["required"] = ["bandwidth_gbps"]
    group = schema["$defs"]["NodeGroup"]
    group["required"] = [name for name in group["required"] if name != "name"]
    group["properties"]["chip"]["examples"] = sorted(catalogue())
    return schema
