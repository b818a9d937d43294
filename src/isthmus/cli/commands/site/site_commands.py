"""Commands on the sites of the pool and the agents that they are bound to: site list, show, gone, enrol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import import_extra, read_site, select_cluster
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.core.errors import InputError, NotFoundError
from isthmus.core.files.user_files import errors_placed, load_pool, place_error
from isthmus.core.views.api_views import ClusterView

commands = typer.Typer()
site_commands = typer.Typer(help="Sites and the agents that they are bound to.", no_args_is_help=False)
commands.add_typer(site_commands, name="site", rich_help_panel="Pool")

PANEL = "Pool"
CheckedPool = Annotated[Path, typer.Option("--pool", metavar="POOL.yaml", help="The pool with the site's cluster.")]
SiteArgument = Annotated[str, typer.Argument(metavar="NAME", help="The site's cluster.")]


@command(site_commands, panel=PANEL, name="list", examples=["isthmus site list"])
def list_sites(env: CliEnvironment, client: ApiClient) -> None:
    """List the sites with their agents: id, session, last contact, lease."""
    found = client.pool().clusters

    def show() -> object:
        from isthmus.cli.terminal.site_tables import sites_table

        return sites_table(found, env.now())

    env.answer(list(found), show)


@command(site_commands, panel=PANEL, examples=["isthmus site show qingyang"])
def show(env: CliEnvironment, client: ApiClient, name: SiteArgument) -> None:
    """Show a site: its agent, since when it is enrolled, its sessions, its lease, and what may run there."""
    found = find_site(client, name)

    def shown() -> object:
        from isthmus.cli.terminal.site_tables import site_page

        return site_page(found, env.now())

    env.answer(found, shown)


@command(site_commands, panel=PANEL, examples=["isthmus site gone qingyang --yes"])
def gone(
    env: CliEnvironment,
    client: ApiClient,
    name: SiteArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Nothing of the pool runs at the site any more.")] = False,
) -> None:
    """Declare that nothing of the pool runs at a lost site (admin only): its jobs go on elsewhere at once.

    Without this they go on when the lease of its workers has ended. If workers still run there, two attempts of a job
    train at once and overwrite each other's checkpoints. The site's agent is never admitted again: a new one starts
    with an empty state folder and --enrol.
    """
    found = find_site(client, name)
    if not yes:
        jobs = ", ".join(found.jobs) or "no job"
        raise InputError(
            f"if workers still run at {name}, two attempts of {jobs} train at once and overwrite each other's files",
            hint=f"end every worker there, then: isthmus site gone {name} --yes",
        )
    after = client.declare_site_gone(name)
    env.answer(after, lambda: f"{name} is gone; released there: {', '.join(found.jobs) or 'nothing'}")


@command(site_commands, panel=PANEL, examples=["isthmus site enrol qingyang"])
def enrol(env: CliEnvironment, client: ApiClient, name: SiteArgument) -> None:
    """Let the next new agent of a site take the place of the enrolled one (admin, or the site's owner).

    It is refused while the enrolled agent is in contact, or while workers that it started may still run.
    `isthmus agent --enrol` does the same with the agent's own token.
    """
    after = client.enrol_site(name)
    env.answer(after, lambda: f"the next new agent of {name} takes the place of the enrolled one")


def find_site(client: ApiClient, name: str) -> ClusterView:
    """Return the site of a cluster; raise `NotFoundError` if it has not joined."""
    found = client.pool().clusters
    for one in found:
        if one.cluster.name == name:
            return one
    known = ", ".join(one.cluster.name for one in found) or "none"
    raise NotFoundError(f"no cluster '{name}' has joined the pool", hint=f"joined: {known}")


@command(
    site_commands,
    panel=PANEL,
    name="check",
    examples=[
        "isthmus site check slurm.yaml --pool pool.yaml --cluster qingyang",
        "isthmus site check slurm.yaml --json",
    ],
)
def check_site_file(
    env: CliEnvironment,
    file: Annotated[Path, typer.Argument(metavar="SITE.yaml", help="The site's file: see `isthmus schema site`.")],
    pool: CheckedPool = Path("pool.yaml"),
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The site's cluster (required if the pool has several).")
    ] = None,
) -> None:
    """Compare a site's file with its scheduler: does it answer, does it have these partitions and cards.

    Nothing stays changed; at Ray a job tries the Python and is removed. A name that the scheduler does not know is an
    error (exit 2) with its line and the nearest word.
    """
    agents = import_extra("isthmus.agent", "agent")
    own = select_cluster(load_pool(pool), cluster)
    with errors_placed(file):
        found = agents.check_scheduler(read_site(file, own), own)
    rows = finding_rows(file, found)
    print_checks(env, rows)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(InputError.exit_code)


def finding_rows(file: Path, found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the findings on a site's `file`; what is wrong is placed at its line."""
    wrong = [place_error(file, one.file_path, one.detail, one.hint) if not one.ok else None for one in found]
    return [
        {"check": one.check, "ok": one.ok, "detail": str(error or one.detail), "hint": one.hint}
        for one, error in zip(found, wrong, strict=True)
    ]


def print_checks(env: CliEnvironment, rows: list[dict[str, Any]]) -> None:
    """Print the findings on a site as a table, or as JSON."""

    def show() -> object:
        from isthmus.cli.terminal.site_tables import site_checks_table

        return site_checks_table(rows)

    env.answer(rows, show)
