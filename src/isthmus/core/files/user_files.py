"""Read user files (pool, job, plan, policy, site, tariff, accounts, provider) and return their JSON Schema.

An invalid file raises `FileError` with file, line, field, value and, for a misspelt word, a suggestion.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from isthmus.core.catalogue import is_catalogue_name
from isthmus.core.chip import chip_catalogue
from isthmus.core.errors import FieldError, FileError
from isthmus.core.files.validation_errors import to_file_error
from isthmus.core.files.yaml_lines import LineNumbers, format_location, parse_yaml, read_yaml
from isthmus.core.job import (
    MAX_TEMPLATE_CHARS,
    PLAIN_TEMPLATE,
    Job,
    ResumeSource,
    is_folder,
    is_template_text,
    job_accesses,
)
from isthmus.core.model import HUB_SCHEME, HubName
from isthmus.core.owner.accounts import Accounts
from isthmus.core.owner.check_accounts import check_accounts
from isthmus.core.owner.check_tariff import check_tariff
from isthmus.core.owner.oidc_file import OidcFile
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.owner.tariff import Tariff
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.runs.check_job import job_problems
from isthmus.core.runs.check_plan import plan_problems
from isthmus.core.runs.field_problem import FieldProblem
from isthmus.core.stack import Stack, find_stack, is_stack_file

FileKind = Literal["pool", "job", "plan", "policy", "site", "stack", "tariff", "accounts", "oidc"]
FILE_KINDS: dict[str, type[BaseModel]] = {
    "pool": Pool,
    "job": Job,
    "plan": Plan,
    "policy": OwnerPolicy,
    "site": SiteFile,
    "stack": Stack,
    "tariff": Tariff,
    "accounts": Accounts,
    "oidc": OidcFile,
}

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def load_pool(path: str | Path) -> Pool:
    """Read `pool.yaml`."""
    return _load(Path(path), Pool)


def load_policy(path: str | Path) -> OwnerPolicy:
    """Read `policy.yaml`."""
    return _load(Path(path), OwnerPolicy)


def load_site(path: str | Path) -> SiteFile:
    """Read `site.yaml`."""
    return _load(Path(path), SiteFile)


def load_tariff(path: str | Path) -> Tariff:
    """Read `tariff.yaml`; raises `FileError` also for prices that overlap or leave a gap (`check_tariff`)."""
    tariff = _load(Path(path), Tariff)
    with _placed(path):
        check_tariff(tariff)
    return tariff


def load_oidc(path: str | Path) -> OidcFile:
    """Read `oidc.yaml`."""
    return _load(Path(path), OidcFile)


def load_accounts(path: str | Path) -> Accounts:
    """Read `accounts.yaml`; raises `FileError` also for names and guarantees that cannot hold (`check_accounts`)."""
    accounts = _load(Path(path), Accounts)
    with _placed(path):
        check_accounts(accounts)
    return accounts


@contextmanager
def _placed(path: str | Path) -> Iterator[None]:
    """Raise a `FieldError` again as the error of its line."""
    try:
        yield
    except FieldError as error:
        place = tuple(int(step) if step.isdecimal() else step for step in error.place)
        raise place_error(path, place, error.problem, error.hint) from error


def load_stack(path: str | Path) -> Stack:
    """Read the file of a stack."""
    return _load(Path(path), Stack)


def read_stack_choice(choice: str, folder: Path) -> str | Stack:
    """Return a choice of a stack: a built-in name, or the content of a file relative to `folder`.

    Raises `InputError` for an unknown name, `FileError` for a file that cannot be read or is no stack.
    """
    return load_stack(folder / _expand_home(choice)) if is_stack_file(choice) else find_stack(choice).name


def load_plan(path: str | Path) -> Plan:
    """Read a plan, hand-written or from `isthmus plans --json`.

    Relative paths of the model and of a stack's file are resolved against the folder of the file. Raises `FileError`
    also for fields that are valid each but not together (`check_plan.py`).
    """
    file = Path(path)
    document, lines = read_yaml(file)
    plan = _validate(file, Plan, _with_stack(document, file), lines)
    for problem in plan_problems(plan):
        raise _problem_error(problem, file, lines)
    if plan.model is None or "://" in plan.model:
        return plan
    return plan.model_copy(update={"model": str(Path(path).resolve().parent / _expand_home(plan.model))})


def place_error(path: str | Path, place: tuple[str | int, ...], message: str, hint: str | None = None) -> FileError:
    """Return the error of what stands at `place` of a file that was read before, with its line."""
    _, lines = read_yaml(Path(path))
    line = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)
    return FileError(message, file=str(path), line=line, field=format_location(place) or None, hint=hint or None)


@contextmanager
def errors_placed(path: str | Path | None) -> Iterator[None]:
    """Raise a `FieldError` of the body as the `FileError` of its line in a file that was read before."""
    try:
        yield
    except FieldError as error:
        if path is None:
            raise
        raise place_error(path, error.place, error.problem, error.hint) from error


def load_job(path: str | Path) -> Job:
    """Read `job.yaml`; resolve relative paths against its folder and `~` against the caller's home.

    Raises `FileError` also for fields that are valid each but not together (`check_job.py`).
    """
    file = Path(path)
    document, lines = read_yaml(file)
    job = _resolve_paths(_validate(file, Job, _with_stack(document, file), lines), file)
    for problem in job_problems(job):
        raise _problem_error(problem, file, lines)
    return job


def read_job_text(text: str, name: str = "job.yaml") -> Job:
    """Return the job that a text describes; no file is read, and errors name it `name`.

    Raises `FileError` as `load_job` does, and for what only the machine of its author could resolve: a relative path, a
    name of the Hub, the file of a stack or of a chat template.
    """
    file = Path(name)
    document, lines = parse_yaml(text, file)
    job = _validate(file, Job, document, lines)
    for problem in itertools.chain(job_problems(job), _unresolved(job)):
        raise _problem_error(problem, file, lines)
    return job


def _unresolved(job: Job) -> Iterator[FieldProblem]:
    """Yield the fields that need the folder or the files of the machine where the job was written."""
    template = job.data.chat_template
    if template is not None and template != PLAIN_TEMPLATE and not is_template_text(template):
        hint = "put the text of the template here, or 'plain'"
        yield FieldProblem("data.chat_template", template, "is a file, which is read where the job is written", hint)
    hint = "write the whole path at the sites, from /, or an entry of the catalogue"
    for field, path, _ in job_accesses(job):
        is_url = "://" in path and not path.startswith(HUB_SCHEME)
        if not (path.startswith("/") or is_url or is_catalogue_name(path)):
            yield FieldProblem(
                field, path, "depends on the folder of the job's file, which the server does not know", hint
            )


def _with_stack(document: Any, file: Path) -> Any:
    """Return a document in which the path of a stack's file is replaced by its content."""
    if not isinstance(document, dict) or not is_stack_file(document.get("stack")):
        return document
    return {**document, "stack": read_stack_choice(document["stack"], file.resolve().parent)}


def _problem_error(problem: FieldProblem, file: Path, lines: LineNumbers) -> FileError:
    """Return the error of fields that are valid each but not together, with the line of the field named."""
    place = tuple(int(step) if step.isdecimal() else step for step in problem.field.split("."))
    line = next((lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in lines), None)
    return FileError(
        problem.message, file=str(file), line=line, field=problem.field, value=problem.value, hint=problem.hint
    )


def _resolve_paths(job: Job, file: Path) -> Job:
    """Return `job` with absolute paths."""
    base = file.resolve().parent

    def absolute(text: str) -> str:
        return text if "://" in text or is_catalogue_name(text) else str(base / _expand_home(text))

    if job.engine == "command":
        return job.model_copy(update={"output": absolute(job.output)})
    data = job.data.model_copy(
        update={
            "paths": tuple(absolute(x) for x in job.data.paths),
            "tokenizer": job.data.tokenizer if job.data.tokenizer_path is None else absolute(job.data.tokenizer),
            "chat_template": _read_template(job.data.chat_template, absolute),
        }
    )
    folder = job.checkpoints.model_copy(update={"folder": absolute(job.checkpoints.folder)})
    runtime = job.runtime
    if runtime.code is not None:
        runtime = runtime.model_copy(update={"code": absolute(runtime.code)})
    rl = job.rl
    if rl is not None:
        rl = rl.with_function_files(tuple(absolute(path) for path in rl.function_files))
    resume: str | ResumeSource | None = job.resume
    if isinstance(resume, ResumeSource):
        resume = resume.model_copy(update={"folder": absolute(resume.folder)})
    elif resume is not None and is_folder(resume):
        resume = absolute(resume)
    return job.model_copy(
        update={
            "resume": resume,
            "model": _hub_name(job.model, base) or absolute(job.model),
            "output": absolute(job.output),
            "data": data,
            "checkpoints": folder,
            "runtime": runtime,
            "rl": rl,
        }
    )


def _hub_name(model: str, base: Path) -> str | None:
    """Return `hf://NAME` for the name of a model of the Hub; None for a path, which is preferred if it exists."""
    name = HubName.parse(model)
    if name is None or (not model.startswith(HUB_SCHEME) and (base / model).exists()):
        return None
    return f"{HUB_SCHEME}{name}"


def _read_template(value: str | None, absolute: Callable[[str], str]) -> str | None:
    """Return the text of a chat template that may be given as a path; raise `FileError` for an invalid one."""
    if value is None or value == PLAIN_TEMPLATE or is_template_text(value):
        return value
    file = Path(absolute(value))
    hint = "chat_template is a Jinja template, the path of one, or 'plain'"
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FileError(f"chat template cannot be read: {reason}", file=str(file), hint=hint) from error
    if len(text) > MAX_TEMPLATE_CHARS or not is_template_text(text):
        what = f"exceeds {MAX_TEMPLATE_CHARS:,} characters" if len(text) > MAX_TEMPLATE_CHARS else "has no {{ or {%"
        raise FileError(f"chat template {what}", file=str(file), hint=hint)
    return text


def _expand_home(text: str) -> Path:
    """Return `text` as a path with a leading `~` expanded."""
    return Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)


def _load(file: Path, kind: type[AnyModel]) -> AnyModel:
    return _validate(file, kind, *read_yaml(file))


def _validate(file: Path, kind: type[AnyModel], document: Any, lines: LineNumbers) -> AnyModel:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise to_file_error(error, document, lines, file, kind) from error


def load_model_file(file: Path, kind: type[AnyModel]) -> AnyModel:
    """Read a YAML file of another form; raise `FileError` with the line of what is wrong."""
    return _load(file, kind)


def json_schema(kind: FileKind) -> dict[str, Any]:
    """Return the JSON Schema of a file kind; a pool's includes `between` and `round_trip_ms` on links."""
    schema = FILE_KINDS[kind].model_json_schema(by_alias=True)
    if kind == "pool":
        _add_short_forms(schema)
    if kind == "plan":
        schema["properties"]["equal_replicas"] = {"type": "boolean", "default": False}
        schema["properties"]["equal_stages"] = {"type": "integer", "minimum": 1}
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
