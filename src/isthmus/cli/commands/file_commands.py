"""Commands that need no server: schema, check, chips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from isthmus.cli.command import verb
from isthmus.cli.shell.shell import Shell
from isthmus.core.chip import catalogue
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import (
    FILE_KINDS,
    FileKind,
    json_schema,
    load_job,
    load_plan,
    load_policy,
    load_pool,
)
from isthmus.core.files.yaml_lines import read_yaml
from isthmus.core.model import load_model, require_trainable
from isthmus.core.policy import OwnerPolicy

commands = typer.Typer()
PANEL = "Files"
KINDS = "|".join(FILE_KINDS)


@verb(
    commands,
    panel=PANEL,
    examples=["isthmus schema job > job.schema.json", "isthmus schema pool", "isthmus schema plan --json"],
)
def schema(
    shell: Shell,
    kind: Annotated[FileKind, typer.Argument(metavar=KINDS, help="The kind of file.")],
) -> None:
    """Print the JSON Schema of a file, for editors and other tools."""
    answer = json_schema(kind)
    shell.answer(answer, lambda: json.dumps(answer, indent=2, ensure_ascii=False))


@verb(
    commands,
    panel=PANEL,
    examples=["isthmus check job.yaml", "isthmus check pool.yaml --json", "isthmus check p.yaml --kind plan"],
)
def check(
    shell: Shell,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pool, a job, a plan or a policy.")],
    kind: Annotated[
        FileKind | None,
        typer.Option(metavar=KINDS, help="The kind of file (default: detected)."),
    ] = None,
) -> None:
    """Check a file locally.

    An error shows its line, field, value and the nearest valid word.
    """
    found = kind or _guess(file)
    summary = _CHECKS[found](file)
    shell.answer(
        {"file": str(file), "kind": found, "ok": True} | summary, lambda: _told(file, found, summary)
    )


def _told(file: Path, kind: str, summary: dict[str, Any]) -> str:
    return f"{file}: a valid {kind} ({', '.join(f'{key} {value}' for key, value in summary.items())})"


def _guess(file: Path) -> FileKind:
    """Return the file kind by its characteristic field; raise `InputError` if it has none."""
    document, _ = read_yaml(file)
    keys = set(document) if isinstance(document, dict) else set()
    characteristic: tuple[tuple[FileKind, str], ...] = (
        ("pool", "clusters"),
        ("job", "training"),
        ("plan", "stages"),
        *(("policy", key) for key in sorted(OwnerPolicy.model_fields) if key != "version"),
    )
    for kind, key in characteristic:
        if key in keys:
            return kind
    raise InputError(
        f"{file} is neither a pool (clusters), a job (training), a plan (stages) nor a policy (pool_share)",
        hint="set --kind to pool, job, plan or policy",
    )


def _check_pool(file: Path) -> dict[str, Any]:
    pool = load_pool(file)
    chips = sum(group.chips for cluster in pool.clusters for group in cluster.node_groups)
    return {"clusters": len(pool.clusters), "chips": chips, "links": len(pool.links)}


def _check_job(file: Path) -> dict[str, Any]:
    job = load_job(file)
    model = load_model(job.model)
    require_trainable(model)
    return {"name": job.name, "model": model.architecture, "layers": model.num_layers}


def _check_plan(file: Path) -> dict[str, Any]:
    plan = load_plan(file)
    return {"id": plan.id, "stages": len(plan.stages), "layers": plan.num_layers}


def _check_policy(file: Path) -> dict[str, Any]:
    policy = load_policy(file)
    return {"pool_share": policy.pool_share, "preemptible_from": policy.preemptible_from or "no level"}


_CHECKS = {"pool": _check_pool, "job": _check_job, "plan": _check_plan, "policy": _check_policy}


@verb(commands, panel=PANEL, examples=["isthmus chips", "isthmus chips --json | jq '.H20.source'"])
def chips(shell: Shell) -> None:
    """List the built-in chips with the source of their data."""
    known: dict[str, BaseModel] = dict(catalogue())

    def show() -> object:
        from isthmus.cli.terminal.tables import chips_table

        return chips_table(catalogue().values())

    shell.answer(known, show)
