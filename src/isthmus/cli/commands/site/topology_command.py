"""`isthmus site topology`: the topology of a site's nodes as files of its own scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import select_cluster
from isthmus.cli.commands.site.site_commands import PANEL, site_commands
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError
from isthmus.core.files.user_files import load_pool
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.pool_parts.scheduler_topology import SchedulerKind, scheduler_topology

commands = typer.Typer()
"""None of the top level: the command joins the group `site`."""


@command(
    site_commands,
    panel=PANEL,
    examples=[
        "isthmus site topology --pool pool.yaml --cluster qingyang --as slurm-tree > topology.conf",
        "isthmus site topology --pool pool.yaml --cluster qingyang --as kubernetes | sh",
    ],
)
def topology(
    env: CliEnvironment,
    pool: Annotated[Path, typer.Option(metavar="FILE", help="The pool, with a `topology` of the node group.")],
    kind: Annotated[
        str, typer.Option("--as", metavar="KIND", help="slurm-tree, slurm-block (super-nodes alone) or kubernetes.")
    ],
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster (required if there are several).")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="The node group (required if several have a topology).")
    ] = None,
) -> None:
    """Print how a site's nodes are joined for its scheduler, so that it places its own jobs by the same tree.

    Slurm gets a topology.conf, Kubernetes labels of nodes and a Topology object of Kueue. Jobs of the pool are placed
    by the agent, as node lists and affinities.
    """
    from isthmus.site import node_names  # loads numpy, which few commands need

    kinds: tuple[SchedulerKind, ...] = get_args(SchedulerKind)
    wanted = next((one for one in kinds if one == kind), None)
    if wanted is None:
        raise InputError(f"unknown kind '{kind}'", hint=suggest_name(kind, kinds))
    where = select_cluster(load_pool(pool), cluster)
    known = {one.name: one.topology for one in where.node_groups if one.topology is not None}
    name = group or (next(iter(known)) if len(known) == 1 else None)
    if name is None or name not in known:
        listed = ", ".join(known) or "none"
        raise InputError(
            f"cluster '{where.name}': " + (f"node group '{name}' has no topology" if name else "name a node group"),
            hint=f"node groups with a topology: {listed}",
        )
    text = scheduler_topology(name, node_names(where, name), known[name], wanted)
    env.answer({"cluster": where.name, "node_group": name, "kind": kind, "text": text}, lambda: text.rstrip("\n"))
