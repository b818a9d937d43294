"""`isthmus place`: where the parts of a job go inside their sites, by nodes and cards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import import_extra
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.cli.terminal.tables import table
from isthmus.client.read_job import read_job
from isthmus.core.errors import InputError, PlanError
from isthmus.core.files.user_files import load_plan, load_pool
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import SearchRequest, search_plans

if TYPE_CHECKING:
    from isthmus.site import SitePlacement

commands = typer.Typer()
PANEL = "Know before you run"
MAX_SHOWN_RANKS = 64
"""Ranks of a node group that the terminal shows; `--json` has all."""


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus place job.yaml --pool pool.yaml",
        "isthmus place plan.json --pool pool.yaml --explain --json",
        "isthmus place plan.json --pool pool.yaml --state qingyang=agent   (beside what runs at the site)",
    ],
)
def place(
    env: CliEnvironment,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job, of which the best plan counts, or a plan.")],
    pool: Annotated[Path, typer.Option(metavar="FILE", help="The pool; `topology` of a node group is its tree.")],
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="CLUSTER=FOLDER", help="An agent's state folder: cards that its parts hold. Repeatable."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also what the placement costs at each level, and the alternatives.")
    ] = False,
) -> None:
    """Place each part of a job on nodes and cards of its site, as the site's agent does.

    Stages stay inside a super-node, parts smaller than a node fill broken nodes, larger ones broken ToRs. Exits with 3
    if a part has no place.
    """
    from isthmus.site import explain_part  # loads numpy, which few commands need

    on = load_pool(pool)
    plan = _plan_of(job, on)
    taken = _taken(state or [], on)
    found = [
        one for name in plan.clusters for one in explain_part(on.cluster(name), plan, taken.get(name, ()))
    ]  # fmt: skip
    record = {"plan": plan.id, "parts": [_record(one, explain) for one in found]}
    env.answer(record, lambda: Group(*(_page(one, explain) for one in found)))
    refused = next((one for one in found if one.refusal is not None), None)
    if refused is not None and refused.refusal is not None:
        raise PlanError(
            f"{refused.cluster}: node group '{refused.node_group}': {refused.refusal.reason}",
            hint="wait for parts to end, or let the owner reschedule them",
        )


def _plan_of(file: Path, pool: Pool) -> Plan:
    """Return the plan in `file`, or the best plan of the job in it."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if '"stages"' in text or "\nstages:" in f"\n{text}":
        return load_plan(file)
    given = read_job(file)
    answer = search_plans(SearchRequest(job=given.job, model=given.model, pool=pool, num_plans=1))
    if not answer.plans:
        raise PlanError(f"{file}: no plan fits the pool", hint="`isthmus plan` says what would make one fit")
    return answer.plans[0]


def _taken(states: list[str], pool: Pool) -> dict[str, list[str]]:
    """Return the devices in use by cluster, from agents' state folders."""
    known = [cluster.name for cluster in pool.clusters]
    found: dict[str, list[str]] = {}
    for text in states:
        name, separator, folder = text.partition("=")
        if not separator or not folder:
            raise InputError(f"'{text}' is not CLUSTER=FOLDER", hint="an example: --state qingyang=agent")
        if name not in known:
            raise InputError(f"the pool has no cluster '{name}'", hint=suggest_name(name, known))
        if not (Path(folder) / "parts.json").is_file():
            raise InputError(f"{folder} is no state folder of an agent", hint="give the folder of `isthmus agent`")
        found[name] = list(import_extra("isthmus.agent", "agent").held_devices(Path(folder)))
    return found


def _record(one: SitePlacement, explain: bool) -> dict[str, object]:
    record = one.as_dict()
    if not explain:
        for field in ("alternatives", "levels", "aim"):
            record.pop(field, None)
    return record


def _page(one: SitePlacement, explain: bool) -> RenderableType:
    title = f"{one.cluster}, node group {one.node_group}"
    if one.refusal is not None:
        return Text(f"{title}: no place: {one.refusal.reason}")
    first = one.found[0]
    rows = [(str(rank), node, ", ".join(map(str, cards))) for rank, node, cards in one.nodes_by_rank(first)]
    parts: list[RenderableType] = [table(title, ("rank", "node", "cards"), rows[:MAX_SHOWN_RANKS])]
    if len(rows) > MAX_SHOWN_RANKS:
        parts.append(Text(f"{len(rows) - MAX_SHOWN_RANKS} more ranks: --json lists them", style="dim"))
    if first.split_units:
        parts.append(Text(f"{first.split_units} stages are larger than every super-node, and are split"))
    if explain:
        scores = [
            (placement.aim, score.level, str(score.used), str(score.broken), str(score.left_cards))
            for placement in one.found
            for score in placement.scores
        ]
        columns = ("placement", "level", "used", "whole ones broken", "cards left free in them")
        parts += [Text(""), table("Score by level; the first is chosen", columns, scores, "|".join(columns[2:]))]
    return Group(*parts, Text(""))
