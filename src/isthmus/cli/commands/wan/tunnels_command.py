"""The command `wan tunnels`: the paths of tunnels between the edge nodes of two sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.files.user_files import load_model_file
from isthmus.wan import AdmissionFile, TunnelPlan, plan_file_tunnels

EXAMPLES = ["isthmus wan tunnels network.yaml", "isthmus wan tunnels network.yaml --json"]


def show_tunnels(
    env: CliEnvironment,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Topology, bookings and requests, as for `isthmus wan admit`.")
    ],
) -> None:
    """Print the paths of a tunnel for each request of a file, one request for each edge node of two sites.

    Tunnels with a path of their own are the answer; only where none has one, those whose bandwidth several paths have
    together. The bandwidths of the paths are the weights by which an edge node divides queue pairs over them. It books
    nothing and changes no file. The exit status is 1 if a tunnel is refused.
    """
    plan = plan_file_tunnels(load_model_file(file, AdmissionFile))
    env.answer(_answer(plan), lambda: _text(plan))
    if plan.refused:
        raise typer.Exit(1)


def _answer(plan: TunnelPlan) -> dict[str, object]:
    fields = "pipes", "delay_ms", "jitter_ms", "loss"
    tunnels = [
        {
            "name": one.name,
            "weights": one.weights,
            "paths": [{name: getattr(path, name) for name in fields} for path in one.paths],
        }
        for one in plan.tunnels
    ]
    return {"tunnels": tunnels, "refused": [one.model_dump() for one in plan.refused]}


def _text(plan: TunnelPlan) -> str:
    lines = [
        f"{one.name}: {' > '.join(path.pipes)}, {gbps:g} Gbit/s, {path.delay_ms:g} ms"
        for one in plan.tunnels
        for path, gbps in zip(one.paths, one.weights.values(), strict=True)
    ]
    return "\n".join(lines + [f"{one.name}: refused, {one.reason}" for one in plan.refused])
