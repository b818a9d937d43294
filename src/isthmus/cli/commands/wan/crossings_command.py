"""The command `wan crossings`: what carries workers' connections across the links of a pool."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.files.user_files import load_pool
from isthmus.wan import CrossingChoice, choose_crossing

EXAMPLES = ["isthmus wan crossings pool.yaml", "isthmus wan crossings pool.yaml --json"]


def show_crossings(
    env: CliEnvironment,
    pool: Annotated[Path, typer.Argument(metavar="POOL.yaml", help="The pool whose links state a `crossing`.")],
) -> None:
    """Print how workers' connections cross each link, and the rates that follow at gateway and edge.

    The transport is the one that the pool states, or for `auto` the one with the highest expected goodput on the link
    and between the proxies and gateways of both sites. Agents start what is printed; this starts nothing.
    """
    found = load_pool(pool)
    choices = [choose_crossing(found, link.source, link.target) for link in found.links if link.crossing is not None]
    env.answer([dataclasses.asdict(one) for one in choices], lambda: _text(choices))


def _text(choices: list[CrossingChoice]) -> str:
    lines = []
    for one in choices:
        rates = f"{one.choice.gateway_gbps:.4g} Gbit/s at the gateway, {one.choice.edge_gbps:.4g} at the edge"
        enough = "" if one.choice.is_enough else "; less than required"
        lines.append(f"{one.source} to {one.target}: {one.streams} streams, {one.choice.reason}{enough}; {rates}")
        if one.nics is not None:
            lines.append(f"{one.source} to {one.target}: NICs: {one.nics.reason}")
    return "\n".join(lines) or "no link of the pool states a crossing: workers connect directly, or by --routes"
