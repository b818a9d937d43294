"""Checks that sites reach each other: which ones agents are ordered to make, and the results that they report."""

from __future__ import annotations

from isthmus.control.state.events import AgentReported
from isthmus.control.state.job_records import PoolState
from isthmus.control.state.site_records import ClusterRecord, PeerResult
from isthmus.core.messages.agent_messages import PeerAddress


def record_peer_checks(
    state: PoolState, record: ClusterRecord, event: AgentReported, *, restarted: bool, back: bool
) -> None:
    """Adopt the address and the results that a site reports; order checks of a site that is new or has restarted.

    The limit of the checks of a site that is `back` begins again.
    """
    name, is_new = event.cluster.name, record.peer_address is None and event.peer_address is not None
    moved = None not in (record.peer_address, event.peer_address) and _place(record.peer_address) != _place(
        event.peer_address
    )
    record.peer_address = event.peer_address
    if event.peer_address is None:
        return
    if is_new or restarted or moved:
        others = (key for key, one in state.clusters.items() if key != name and one.peer_address is not None)
        for other in others:
            record.peer_results.pop(other, None)
            state.clusters[other].peer_results.pop(name, None)
            order_peer_check(state, name, other, event.now_s)
            order_peer_check(state, other, name, event.now_s)
    elif back:
        _renew_waits(state, name, event.now_s)
    for check in event.peer_checks:
        if record.to_check.get(check.cluster) == check.number:
            result = PeerResult(
                reached=check.reached, detail=check.detail, at_s=event.now_s,
                round_trip_s=check.round_trip_s, gbps=check.gbps,
            )  # fmt: skip
            record_peer_result(state, record, check.cluster, result)
    if event.peer_address.problem:
        result = PeerResult(reached=False, detail=event.peer_address.problem, at_s=event.now_s)
        for source in sorted(record.checked_by):
            record_peer_result(state, state.clusters[source], name, result)


def _place(address: PeerAddress | None) -> tuple[object, ...]:
    """Return where the workers of a site listen, without the listener of a check."""
    return () if address is None else (address.host, address.first_port, address.last_port)


def order_peer_check(state: PoolState, source: str, target: str, now_s: float) -> None:
    """Order `source` to check that it reaches `target`."""
    state.num_peer_checks += 1
    state.clusters[source].to_check[target] = state.num_peer_checks
    if target in state.clusters[source].check_waits:
        state.clusters[source].check_waits[target] = now_s
    state.clusters[target].checked_by.add(source)


def record_peer_result(state: PoolState, record: ClusterRecord, target: str, result: PeerResult) -> None:
    """Record the result of an ordered check; jobs that waited for it may start now."""
    del record.to_check[target]
    record.check_waits.pop(target, None)
    record.peer_results[target] = result
    state.clusters[target].checked_by.discard(record.cluster.name)
    state.indexes.capacity_freed = True


def _renew_waits(state: PoolState, name: str, now_s: float) -> None:
    """Begin the limit of the checks from and to a site again."""
    for source, record in state.clusters.items():
        for target in record.check_waits:
            if name in (source, target):
                record.check_waits[target] = now_s
