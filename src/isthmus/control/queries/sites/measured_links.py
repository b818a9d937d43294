"""`measured_links`: the links between sites as their agents have measured them, where the operator names none.

Each site claims what it measured towards another one. A claim counts for links of the site itself only, and only with
the other end's claim: of two rates the lower one, of two round trips the longer one. So no owner makes a link look
better than the other end saw it, and none touches a link between others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from isthmus.control.state.job_records import PoolState
from isthmus.core.pool import Link
from isthmus.core.pool_resource import PoolResource


def measured_links(state: PoolState, names: Collection[str]) -> tuple[Link, ...]:
    """Return the measured links, in both directions, between the sites `names` without a link of the operator.

    In the order of their ends. The cost follows the number of reported results, not that of pairs of sites.
    """
    found = []
    for source, target in _measured_pairs(state, set(names)):
        pair = PoolResource.link(source, target), PoolResource.link(target, source)
        there, back = (_result(state, *ends) for ends in ((source, target), (target, source)))
        if there is None or back is None or any(one in state.links for one in pair):
            continue
        round_trip_s, gbps = max(there[0], back[0]), min(there[1], back[1])
        link = {"from": source, "to": target, "bandwidth_gbps": gbps, "delay_ms": round_trip_s * 1e3 / 2}
        found.append(Link.model_validate(link))
    return tuple(found)


def _measured_pairs(state: PoolState, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of `names` of which the first has reported a result towards the second, sorted."""
    for source in sorted(names):
        record = state.clusters.get(source)
        if record is not None and record.peer_results:
            yield from ((source, target) for target in sorted(names & record.peer_results.keys()) if target != source)


def _result(state: PoolState, source: str, target: str) -> tuple[float, float] | None:
    """Return the round trip and the rate that `source` last measured towards `target`, None if it reported none."""
    record = state.clusters.get(source)
    result = record.peer_results.get(target) if record is not None else None
    if result is None or not result.reached or result.round_trip_s is None or result.gbps is None:
        return None
    return result.round_trip_s, result.gbps
