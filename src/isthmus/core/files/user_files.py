"""Read user files (pool, job, plan, owner policy) and return their JSON Schema.

An invalid file raises `FileError` with file, line, field, value and, for a misspelt word, a suggestion.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from isthmus.core.chip import chip_catalogue
from isthmus.core.files.validation_errors import to_file_error
from isthmus.core.files.yaml_lines import read_yaml
from isthmus.core.job import Job
from isthmus.core.owner_policy import OwnerPolicy
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool

FileKind = Literal["pool", "job", "plan", "policy"]
FILE_KINDS: dict[str, type[BaseModel]] = {"pool": Pool, "job": Job, "plan": Plan, "policy": OwnerPolicy}

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def load_pool(path: str | Path) -> Pool:
    """Read `pool.yaml`."""
    return _load(Path(path), Pool)


def load_policy(path: str | Path) -> OwnerPolicy:
    """Read `policy.yaml`."""
    return _load(Path(path), OwnerPolicy)


def load_plan(path: str | Path) -> Plan:
    """Read a plan, hand-written or from `isthmus plans --json`.

    A relative model path is resolved against the folder of the file.
    """
    plan = _load(Path(path), Plan)
    if plan.model is None or "://" in plan.model:
        return plan
    return plan.model_copy(update={"model": str(Path(path).resolve().parent / _expand_home(plan.model))})


def load_job(path: str | Path) -> Job:
    """Read `job.yaml`; resolve relative paths against its folder and `~` against the caller's home."""
    file = Path(path)
    job = _load(file, Job)
    base = file.resolve().parent

    def absolute(text: str) -> str:
        return text if "://" in text else str(base / _expand_home(text))

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


def _expand_home(text: str) -> Path:
    """Return `text` as a path with a leading `~` expanded."""
    return Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)


def _load(file: Path, kind: type[AnyModel]) -> AnyModel:
    document, lines = read_yaml(file)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise to_file_error(error, document, lines, file, kind) from error


def json_schema(kind: FileKind) -> dict[str, Any]:
    """Return the JSON Schema of a file kind; a pool's includes `between` and `round_trip_ms` on links."""
    schema = FILE_KINDS[kind].model_json_schema(by_alias=True)
    if kind == "pool":
        _add_short_forms(schema)
    meanings = field_meanings()
    for name, definition in ((schema["title"], schema), *schema.get("$defs", {}).items()):
        for field, text in meanings.get(name, {}).items():
            if field in definition.get("properties", {}):
                definition["properties"][field]["description"] = text
    return schema


@functools.cache
def field_meanings() -> dict[str, dict[str, str]]:
    """Return what each field of the user files means, by the name of its model."""
    text = resources.files("isthmus.core.files").joinpath("field_meanings.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = yaml.safe_load(text)
    return found


def _add_short_forms(schema: dict[str, Any]) -> None:
    """Add what a pool file may contain beside the fields of its models."""
    link = schema["$defs"]["Link"]
    cluster_name = link["properties"]["from"]
    link["properties"]["between"] = {
        "type": "array", "items": cluster_name, "minItems": 2, "maxItems": 2,
    }  # fmt: skip
    link["properties"]["round_trip_ms"] = {"type": "number", "minimum": 0}
    link["required"] = ["bandwidth_gbps"]
    group = schema["$defs"]["NodeGroup"]
    group["required"] = [name for name in group["required"] if name != "name"]
    group["properties"]["chip"]["examples"] = sorted(chip_catalogue())
