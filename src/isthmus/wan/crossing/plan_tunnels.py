"""`plan_tunnels`: tunnels between the edges of two sites: on one path each, else over several paths, else refused.

Source: the report on cross-domain pooling, 4.2.5: tunnels on one path are asked for at each edge node first; only if
all of those fail, tunnels over several paths; if these fail too, the answer is no. An edge node divides a tunnel's
queue pairs over its paths by their bandwidth, so `Tunnel.weights` are weights of `pick_gateway`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError
from isthmus.wan.control.wan_topology import PathRefusal, PathRequest
from isthmus.wan.controller.path_plan import PathPlan, plan_path
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.wan_network import KBPS_PER_GBPS, WanNetwork, whole_kbps

MAX_PATHS = 8
"""Most paths of a tunnel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunnel:
    """What one edge node got: the paths of its request, whose rates add up to what it asks for."""

    name: str
    paths: tuple[PathPlan, ...]

    @property
    def weights(self) -> dict[str, float]:
        """The bandwidth of each path in Gbit/s, by its place."""
        return {str(place): path.rates_kbps[0][2] / KBPS_PER_GBPS for place, path in enumerate(self.paths)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelPlan:
    """The tunnels of a pair of sites, and what was refused."""

    tunnels: tuple[Tunnel, ...]
    refused: tuple[PathRefusal, ...]


def plan_tunnels(
    network: WanNetwork, bookings: PipeBookings, requests: Sequence[PathRequest], *, max_paths: int = MAX_PATHS
) -> TunnelPlan:
    """Return the tunnels of `requests`, one for each edge node, beside what is booked; book nothing.

    Those that have a path of their own are the answer; if none has, those that fit over at most `max_paths` paths.
    All others are refused, with the most that one path has. Several paths are found widest first, which is not exact: a
    division over more paths may exist where this finds none. Raises `InputError` for two requests of one name.
    """
    if not requests or max_paths < 1:
        raise InputError(f"{len(requests)} tunnels over {max_paths} paths", hint="ask for at least one of each")
    if len({one.name for one in requests}) != len(requests):
        raise InputError("two tunnels have the same name", hint="give each a name of its own")
    tunnels: dict[str, Tunnel] = {}
    refused: dict[str, PathRefusal] = {}
    for most in sorted({1, max_paths}):
        held: list[tuple[str, int]] = []
        for request in requests:
            found = _hold_paths(network, bookings, request, most, held)
            if not isinstance(found, PathRefusal):
                tunnels[request.name] = Tunnel(name=request.name, paths=found)
            elif most == 1:
                refused[request.name] = found
            else:
                reason = f"{refused[request.name].reason}; up to {most} paths do not add up to it either"
                refused[request.name] = refused[request.name].model_copy(update={"reason": reason})
        _release(bookings, held)
        if tunnels:
            break
    return TunnelPlan(
        tunnels=tuple(tunnels.values()), refused=tuple(one for name, one in refused.items() if name not in tunnels)
    )


def _hold_paths(
    network: WanNetwork, bookings: PipeBookings, request: PathRequest, most: int, held: list[tuple[str, int]]
) -> tuple[PathPlan, ...] | PathRefusal:
    """Return paths that carry `request` together and book them for now, or why there are none."""
    paths: list[PathPlan] = []
    mine: list[tuple[str, int]] = []
    refusal: PathRefusal | None = None
    left_kbps = whole_kbps(request.bandwidth_gbps)
    while left_kbps:
        found = plan_path(network, bookings, _at(request, left_kbps), explains=not paths or len(paths) + 1 < most)
        if isinstance(found, PathRefusal):
            refusal = refusal or found
            if len(paths) + 1 < most and found.nearest_gbps:
                found = plan_path(network, bookings, _at(request, whole_kbps(found.nearest_gbps)))
        if isinstance(found, PathRefusal):
            _release(bookings, mine)
            return refusal or found
        key = f"tunnel {request.name}", len(paths)
        bookings.book(key, found.spans, found.service)
        mine.append(key)
        paths.append(found)
        left_kbps -= found.rates_kbps[0][2]
    held += mine
    return tuple(paths)


def _at(request: PathRequest, kbps: int) -> PathRequest:
    return request.model_copy(update={"bandwidth_gbps": kbps / KBPS_PER_GBPS})


def _release(bookings: PipeBookings, keys: Iterable[tuple[str, int]]) -> None:
    for key in keys:
        bookings.release(key)
