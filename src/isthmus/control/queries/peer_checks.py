"""Queries on the checks whether sites reach each other: orders for agents, and what keeps a plan from starting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from isthmus.control.state.job_records import PoolState
from isthmus.control.state.site_records import ClusterRecord, PeerResult
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.agent_messages import PeerAddress, PeerToCheck
from isthmus.core.plan import PlanPart

MAX_CHECKS_AT_ONCE = 8
"""Most sites that an agent is ordered to dial at a time."""

Pair = tuple[str, str]
"""The site that dials, and the site that listens."""


def opens_listener(state: PoolState, cluster: str) -> bool:
    """Return whether a connected site is to check `cluster`, so that its agent must listen."""
    record = state.clusters.get(cluster)
    return record is not None and any(state.clusters[name].connected for name in record.checked_by)


def peers_to_check(state: PoolState, cluster: str) -> tuple[PeerToCheck, ...]:
    """Return the open listeners that `cluster` is to dial now."""
    record = state.clusters.get(cluster)
    return tuple(islice(_open_listeners(state, record), MAX_CHECKS_AT_ONCE)) if record is not None else ()


def _open_listeners(state: PoolState, record: ClusterRecord) -> Iterator[PeerToCheck]:
    awaited_first = sorted(record.to_check.items(), key=lambda one: one[0] not in record.check_waits)
    for name, number in awaited_first:
        peer = state.clusters[name].peer_address
        if peer is not None and peer.port is not None and peer.nonce is not None:
            yield PeerToCheck(cluster=name, number=number, host=peer.host, port=peer.port, nonce=peer.nonce)


def pending_pairs(state: PoolState, parts: Sequence[PlanPart]) -> tuple[Pair, ...]:
    """Return the pairs of sites of a plan whose check is not done."""
    return tuple(pair for pair, result in _unproven_pairs(state, parts) if result is None)


def unreached_pairs(state: PoolState, parts: Sequence[PlanPart]) -> tuple[tuple[Pair, PeerResult], ...]:
    """Return the pairs of sites of a plan of which the first did not reach the second at its last check."""
    return tuple((pair, result) for pair, result in _unproven_pairs(state, parts) if result is not None)


def describe_unreached(state: PoolState, parts: Sequence[PlanPart]) -> str:
    """Describe what is closed between the sites of a plan, or which check it waits for; "" if all is proven.

    A failure is shown until its repetition has another result.
    """
    pairs = [pair for pair, _ in _unproven_pairs(state, parts)]
    last = {pair: state.clusters[pair[0]].peer_results.get(pair[1]) for pair in pairs}
    closed = [_describe(state, pair, result) for pair, result in last.items() if result and not result.reached]
    waits = [f"{source} reaches {target}" for (source, target), result in last.items() if not result or result.reached]
    return "; ".join([*closed, *([f"waits for the check that {', '.join(waits)}"] if waits else [])])


def _unproven_pairs(state: PoolState, parts: Sequence[PlanPart]) -> Iterator[tuple[Pair, PeerResult | None]]:
    """Yield the pairs without a positive result; None: no result yet. The higher rank of two dials the lower one."""
    for source in parts:
        for target in parts:
            record, peer = state.clusters.get(source.cluster), state.clusters.get(target.cluster)
            if source is target or record is None or peer is None:
                continue
            if record.peer_address is None or peer.peer_address is None:
                continue
            pending = target.cluster in record.to_check
            result = None if pending else record.peer_results.get(target.cluster)
            if (result is None or not result.reached) and max(source.ranks) > min(target.ranks):
                yield (source.cluster, target.cluster), result


def _describe(state: PoolState, pair: Pair, result: PeerResult) -> str:
    source, target = pair
    address = state.clusters[target].peer_address
    where = format_peer_address(address) if address else "an unknown address"
    if result.silent is not None:
        return f"{result.detail}; look at the log of the agent of {result.silent}, and restart it"
    text = f"site {source} cannot reach site {target} at {where} ({result.detail})"
    if address is not None and is_loopback(address.host):
        return f"{text}; this address leads to its own machine only: give --host ADDRESS to the agent of {target}"
    ports = "these ports" if address is not None and address.first_port else "its ports (or give --ports FIRST-LAST)"
    return f"{text}; open {ports} at {target} for {source}, or give --host ADDRESS to the agent of {target}"


def format_peer_address(address: PeerAddress) -> str:
    """Return `host:first-last`, or `host` where any port may be used."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.first_port}-{address.last_port}" if address.first_port else host
