"""Commands that need no server: schema, check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.read_job import read_job
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import (
    FILE_KINDS,
    FileKind,
    json_schema,
    load_accounts,
    load_oidc,
    load_plan,
    load_policy,
    load_pool,
    load_site,
    load_tariff,
)
from isthmus.core.files.yaml_lines import read_yaml
from isthmus.core.model import load_model, require_trainable
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.runs.check_plan import require_possible
from isthmus.core.runs.planned_sizes import ModelSizes

commands = typer.Typer()
PANEL = "Files"
KINDS = "|".join(FILE_KINDS)


@command(
    commands,
    panel=PANEL,
    examples=["isthmus schema job > job.schema.json", "isthmus schema pool", "isthmus schema plan --json"],
)
def schema(
    env: CliEnvironment,
    kind: Annotated[FileKind, typer.Argument(metavar=KINDS, help="The kind of file.")],
) -> None:
    """Print the JSON Schema of a file, for editors and other tools."""
    answer = json_schema(kind)
    env.answer(answer, lambda: json.dumps(answer, indent=2, ensure_ascii=False))


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus check job.yaml",
        "isthmus check pool.yaml --json",
        "isthmus check plan.yaml --model config.json --pool pool.yaml   (whether these chips can run it)",
    ],
)
def check(
    env: CliEnvironment,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A pool, a job, a plan, a policy, a site, a tariff, accounts or a provider."
        ),
    ],
    kind: Annotated[
        FileKind | None,
        typer.Option(metavar=KINDS, help="The kind of file (default: detected)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="For a plan: its model, whose heads and experts it must divide.")
    ] = None,
    pool: Annotated[Path | None, typer.Option(metavar="FILE", help="For a plan: the pool with its nodes.")] = None,
) -> None:
    """Check a file locally.

    An error shows its line, field, value and the nearest valid word. A plan is checked with its model, if it names one
    that is at hand, and with `--pool`.
    """
    found = kind or _detect_kind(file)
    if (model or pool) and found != "plan":
        raise InputError(f"--model and --pool are for plans, {file} is a {found}", hint="remove them")
    summary = _check_plan(file, model, pool) if found == "plan" else _CHECKS[found](file)
    env.answer({"file": str(file), "kind": found, "ok": True} | summary, lambda: _summary_text(file, found, summary))


def _summary_text(file: Path, kind: str, summary: dict[str, Any]) -> str:
    return f"{file}: a valid {kind} ({', '.join(f'{key} {value}' for key, value in summary.items())})"


def _detect_kind(file: Path) -> FileKind:
    """Return the file kind by its characteristic field; raise `InputError` if it has none."""
    document, _ = read_yaml(file)
    keys = set(document) if isinstance(document, dict) else set()
    characteristic: tuple[tuple[FileKind, str], ...] = (
        ("pool", "clusters"),
        ("job", "training"),
        ("plan", "stages"),
        ("site", "kind"),
        ("tariff", "prices"),
        ("accounts", "projects"),
        ("accounts", "users"),
        ("oidc", "issuer"),
        *(("policy", key) for key in sorted(OwnerPolicy.model_fields) if key != "version"),
    )
    for kind, key in characteristic:
        if key in keys:
            return kind
    raise InputError(
        f"{file} is none of pool (clusters), job (training), plan (stages), policy (pool_share), site (kind), "
        "tariff (prices), accounts (projects) and oidc (issuer)",
        hint="set --kind to pool, job, plan, policy, site, tariff, accounts or oidc",
    )


def _check_pool(file: Path) -> dict[str, Any]:
    pool = load_pool(file)
    chips = sum(group.num_chips for cluster in pool.clusters for group in cluster.node_groups)
    return {"clusters": len(pool.clusters), "chips": chips, "links": len(pool.links)}


def _check_job(file: Path) -> dict[str, Any]:
    read = read_job(file)
    require_trainable(read.model)
    found = {"name": read.job.name, "model": read.model.architecture, "layers": read.model.num_layers}
    return found | {"tokenizer": read.job.data.tokenizer}


def _check_plan(file: Path, model: str | None, pool: Path | None) -> dict[str, Any]:
    plan = load_plan(file)
    named = model or (plan.model if plan.model and Path(plan.model).exists() else None)
    read = load_model(named) if named else None
    require_possible(plan, ModelSizes.of(read) if read else None, load_pool(pool) if pool else None)
    return {"id": plan.id, "stages": len(plan.stages), "layers": plan.num_layers}


def _check_policy(file: Path) -> dict[str, Any]:
    policy = load_policy(file)
    return {"pool_share": policy.pool_share, "preemptible_from": policy.preemptible_from or "no level"}


def _check_site(file: Path) -> dict[str, Any]:
    site = load_site(file)
    return {"kind": site.kind, "node_groups": len(site.node_groups)}


def _check_tariff(file: Path) -> dict[str, Any]:
    tariff = load_tariff(file)
    return {"currency": tariff.currency, "prices": len(tariff.prices)}


def _check_oidc(file: Path) -> dict[str, Any]:
    found = load_oidc(file)
    return {"issuer": found.issuer, "rules": len(found.rules)}


def _check_accounts(file: Path) -> dict[str, Any]:
    accounts = load_accounts(file)
    return {"projects": len(accounts.projects), "groups": len(accounts.groups), "users": len(accounts.users)}


_CHECKS = {
    "pool": _check_pool, "job": _check_job, "policy": _check_policy, "site": _check_site, "tariff": _check_tariff,
    "accounts": _check_accounts, "oidc": _check_oidc,
}  # fmt: skip
