"""`crossings_started`: the proxies and gateways that `pool.yaml` states for a site, while its agent runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.service.agent_state_folder import read_routes
from isthmus.core.pool import Pool
from isthmus.wan import site_crossings

CROSSINGS_FOLDER = "crossings"
"""Folder of the proxies and gateways in the agent's state folder."""

_log = logging.getLogger("isthmus.agent")


@dataclass(frozen=True)
class StartedCrossings:
    """The file of the workers' routes, and the keys that no worker may read."""

    routes: Path | None
    keys: tuple[Path, ...] = ()


@contextmanager
def crossings_started(
    pool: Pool | None, cluster: str, pool_folder: Path, state: Path, routes: Path | None
) -> Iterator[StartedCrossings]:
    """Start what carries the workers of `cluster` across its links.

    The routes are `routes` itself where no link of the cluster states a crossing. Key files are relative to
    `pool_folder`.
    Raises `IsthmusError` for what cannot be started, before any worker runs.
    """
    given = read_routes(routes, cluster)
    folder = state.absolute() / CROSSINGS_FOLDER
    processes = None
    if pool is not None:
        processes = site_crossings(pool, cluster, pool_folder.absolute(), folder, given, routes and routes.absolute())
    if processes is None:
        yield StartedCrossings(routes)
        return
    with processes:
        for one in processes.plan.choices:
            _log.info(
                "to %s: %d streams, %s; %.4g Gbit/s at the gateway, %.4g at the edge",
                one.target, one.streams, one.choice.reason, one.choice.gateway_gbps, one.choice.edge_gbps,
            )  # fmt: skip
        proxy = processes.plan.proxy
        keys = {Path(one.key) for one in proxy.sites.values()} if proxy is not None else set[Path]()
        yield StartedCrossings(folder / "routes.json", tuple(sorted(keys)))
