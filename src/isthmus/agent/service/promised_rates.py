"""`PromiseFile`: what the pool has promised a site's jobs on its links, as bookings that the site's edge shapes.

The coordinator allocates bandwidth of links with chips and storage in one step, and sends the plan with the order of a
part. From the same plan the agent states, for each running part, the rate from its cluster to each other one and the
addresses of the ranks at both ends. `isthmus wan shape --follow` gives that to the kernel.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import WorkerAddress
from isthmus.core.pool_resource import KBPS_PER_GBPS
from isthmus.site import PartKey, SitePart, outgoing_kbps
from isthmus.wan import Admission, Booking, FlowMatch, PathRequest

_MAX_FLOWS = 64
"""Beyond it only the addresses of machines distinguish the flows of a part."""
_MAX_NAME_CHARS = 63


class PromiseFile:
    """The file at `path`, rewritten when what is promised changes."""

    def __init__(self, path: Path, cluster: str) -> None:
        self._path, self._cluster = path, cluster
        self._written = b""

    def update(self, parts: Iterable[SitePart]) -> None:
        """Write what `parts` are promised; raise `UnavailableError` if the file cannot be written."""
        bookings = tuple(one for part in parts for one in promised_rates(part, self._cluster))
        content = Admission(admitted=(), refused=(), booked=bookings).model_dump_json(by_alias=True).encode()
        if content == self._written:
            return
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            temporary.write_bytes(content)
            temporary.replace(self._path)
        except OSError as error:
            raise UnavailableError(f"cannot write the promised rates to {self._path}: {error.strerror}") from error
        self._written = content


def promised_rates(part: SitePart, cluster: str) -> list[Booking]:
    """Return what a part is promised from `cluster`; nothing before all its ranks have an address."""
    ranks = part.rank_map
    if ranks is None or part.state != "running":
        return []
    found = []
    for target, kbps in outgoing_kbps(part, cluster).items():
        near = [one for one in ranks.workers if one.cluster == cluster]
        far = [one for one in ranks.workers if one.cluster == target]
        flows = _flows(near, far)
        if not flows:
            continue
        request = PathRequest(
            name=path_name(part.key, target),
            source=cluster,
            target=target,
            bandwidth_gbps=kbps / KBPS_PER_GBPS,
            flows=flows,
        )
        rates = (request.bandwidth_gbps,)
        name = f"{cluster}-{target}"[:_MAX_NAME_CHARS]
        found.append(Booking(request=request, pipes=(name,), rates_gbps=rates, delay_ms=0.0, jitter_ms=0.0, loss=0.0))
    return found


def _flows(near: list[WorkerAddress], far: list[WorkerAddress]) -> tuple[FlowMatch, ...]:
    """Return which packets go from ranks to ranks: to a listening rank, or from one to a machine that dialled it."""
    here = [(_network(one.host), one.port) for one in near]
    there = [(_network(one.host), one.port) for one in far]
    if any(network is None for network, _ in (*here, *there)):
        return ()  # a name, which the edge does not see
    machines = dict.fromkeys(network for network, _ in there)
    found = [FlowMatch(to_network=network, protocol="tcp", to_port=port) for network, port in there]
    found += [
        FlowMatch(from_network=network, protocol="tcp", from_port=port, to_network=machine)
        for network, port in here
        for machine in machines
        if network is not None and machine is not None and network.version == machine.version
    ]
    if len(found) > _MAX_FLOWS:
        found = [
            FlowMatch(from_network=network, to_network=machine)
            for network in dict.fromkeys(network for network, _ in here)
            for machine in machines
            if network is not None and machine is not None and network.version == machine.version
        ]
    return tuple(found[:_MAX_FLOWS])


def _network(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(host)
    except ValueError:
        return None


def path_name(part: PartKey, target: str) -> str:
    """Return a name of a booking, which no other part or target has."""
    name = f"{part[0]}.{part[1]}.{target}"
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{name[: _MAX_NAME_CHARS - 17]}.{digest}"
