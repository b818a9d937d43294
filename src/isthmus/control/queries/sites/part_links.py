"""`part_links`: the links between a part's site and the other sites of its plan, by which the site renders the part."""

from __future__ import annotations

from isthmus.control.queries.sites.measured_links import measured_links
from isthmus.control.state.job_records import PoolState
from isthmus.core.plan import Plan
from isthmus.core.pool import Link


def part_links(state: PoolState, plan: Plan | None, cluster: str) -> tuple[Link, ...]:
    """Return the operator's and the measured links from and to `cluster` within `plan`."""
    if plan is None or len(plan.clusters) < 2:
        return ()
    known = (*state.links.values(), *measured_links(state, plan.clusters))
    return tuple(
        link
        for link in known
        if cluster in (link.source, link.target) and {link.source, link.target} <= set(plan.clusters)
    )
