"""`simulated_links`: the links between the clusters of a plan, as the simulator takes them."""

from __future__ import annotations

from dataclasses import replace

from isthmus.core.errors import PlanError
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.core.plan import Plan
from isthmus.core.pool import Link, Pool
from isthmus.plan.time.calibration import Calibration
from isthmus.sim import Interference, SimulatedLink, simulated_link


def share_key(calibration: Calibration, link: Link) -> str:
    """Return the key of the share of a link's rate that the transport reaches.

    Fitted, measured or given shares count for every link; without one, a link of class `reserved` reaches
    `reserved_share`, since no other traffic takes part of its rate.
    """
    key = calibration.scoped_key("wan_share", f"{link.source}>{link.target}")
    return "reserved_share" if link.link_class == "reserved" and key not in calibration.parameters else key


def reached_bytes_per_s(calibration: Calibration, link: Link, back: Link | None) -> float:
    """Return the rate that the transport reaches on a link; `back` is the opposite direction."""
    return effective_bytes_per_s(link, back) * min(calibration.key_value(share_key(calibration, link)), 1.0)


def simulated_links(
    plan: Plan,
    pool: Pool,
    calibration: Calibration,
    interference: dict[tuple[str, str], Interference] | None = None,
) -> dict[tuple[str, str], SimulatedLink]:
    """Return the simulated links between all clusters of the plan, at the rate that the transport reaches.

    `interference` takes from best-effort links only.

    Raises `PlanError` if neighbouring stages have no link, `InputError` for unknown clusters or node groups.
    """
    for place in dict.fromkeys((stage.cluster, stage.node_group) for stage in plan.stages):
        pool.node_group(*place)
    links, names = {}, set(plan.clusters)
    known = {(one.source, one.target): one for one in pool.links if one.source in names and one.target in names}
    for a in plan.clusters:
        for b in plan.clusters:
            link, back = known.get((a, b)), known.get((b, a))
            if a == b or link is None:
                continue
            shared = link.link_class != "reserved"  # a reserved rate is kept from the traffic of others
            simulated = simulated_link(link, back, (interference or {}).get((a, b)) if shared else None)
            rate = reached_bytes_per_s(calibration, link, back)
            delay_s = simulated.delay_s + calibration.value("message_s", f"{a}>{b}")
            links[a, b] = replace(simulated, bytes_per_s=rate, delay_s=delay_s)
    for replica in range(plan.dp):
        for a, b in plan.hops(replica):
            for ends in ((a, b), (b, a)):
                if ends not in links:
                    raise PlanError(f"no link from {ends[0]} to {ends[1]}", hint="add the link to the pool")
    return links
