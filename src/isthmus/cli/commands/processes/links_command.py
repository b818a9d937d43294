"""`isthmus links`: emulated links on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.commands.process_setup import (
    PANEL,
    configure_logging,
)
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.files.user_files import (
    load_model_file,
    load_pool,
)

commands = typer.Typer()


@command(
    commands,
    panel=PANEL,
    examples=[
        "isthmus links pool.yaml --state links",
        "isthmus links pool.yaml --state links --runs-first --seed 7",
        "isthmus links pool.yaml --state links --promises booked.json",
    ],
)
def links(
    env: CliEnvironment,
    pool: Annotated[Path, typer.Argument(metavar="POOL.yaml", help="The pool with the links to emulate.")],
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="Folder for routes.json and other output.")],
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of jitter and loss.")] = 0,
    runs_first: Annotated[
        bool, typer.Option("--runs-first", help="Prioritise runs over traffic through others.json.")
    ] = False,
    promises: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Bookings whose rates to enforce, as `isthmus wan admit --json` prints."),
    ] = None,
    at: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time of the bookings, on their clock.")] = 0.0,
) -> None:
    """Emulate the pool's wide-area links on this machine, without root.

    Each direction has its own bandwidth, delay, jitter and loss, shared by all its traffic: runs connect
    through the addresses in routes.json, other traffic through those in others.json. --runs-first gives
    other traffic only the bandwidth that runs leave, as on a link with guaranteed bandwidth. With --promises, the
    connections that a booking's `flows` match have its rate, neither more nor less, and all others share the rest.

    The process takes real-time priority where the system permits it, so that other load does not delay traffic.
    """
    from isthmus.wan import Admission, run_links

    configure_logging(env)
    booked = load_model_file(promises, Admission) if promises else None
    bookings = booked.all_booked if booked else ()
    run_links(load_pool(pool), state, seed, runs_first=runs_first, bookings=bookings, at_s=at)
