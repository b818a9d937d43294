"""Paths of parts on the wide-area network, where a decision centre books them: held while prepared, kept while it runs.

The agent of the site where a path begins asks the centre for every part whose `path` is set, and releases what no part
wants: so the centre is a party of the joint start. A part that gets no path is refused, with the centre's reason.
"""

from __future__ import annotations

from isthmus.core.pool_resource import PoolResource
from isthmus.site.machine_events import PathObserved
from isthmus.site.part_lifecycle import move_part, release_part
from isthmus.site.parts import SitePart
from isthmus.site.site_state import SiteState


def outgoing_kbps(part: SitePart, cluster: str) -> dict[str, int]:
    """Return the whole kbit/s that a part is promised from `cluster` to each other cluster, as the ledger counts it."""
    if part.plan is None or part.spec is None or not part.spec.placement.network:
        return {}
    capacity_gbps: dict[PoolResource, float] = {}
    for link in part.links:
        capacity_gbps.setdefault(PoolResource.link(link.source, link.target), link.bandwidth_gbps)
    found = sorted(part.plan.link_kbps(capacity_gbps).items())
    return {resource.name: kbps for resource, kbps in found if resource.cluster == cluster and kbps}


def ask_for_path(site: SiteState, part: SitePart) -> bool:
    """Want the paths that leave this site for the part; return whether they are held, or none is promised."""
    if not site.asks_for_paths or not outgoing_kbps(part, site.cluster):
        return True
    if not part.path:
        part.path = "asked"
        site.mark_changed(part)
    return part.path == "held"


def observe_path(site: SiteState, seen: PathObserved) -> None:
    """Record what became of a part's paths; without one a part that does not run yet ends."""
    part = site.parts.get(seen.part)
    if part is None or not part.path:
        return
    if seen.state == "held":
        if part.path != "held":
            part.path = "held"
            site.mark_changed(part)
        return
    if part.state == "running":
        return  # it goes on without its promise: the centre seeks another path
    part.path = ""
    site.mark_changed(part)
    detail = f"{site.cluster}: {seen.detail}"
    if part.state in ("ready", "evicting"):
        move_part(site, part, "refused", seen.now_s, detail)
    elif part.state == "prepared":
        release_part(site, part, seen.now_s, detail)
