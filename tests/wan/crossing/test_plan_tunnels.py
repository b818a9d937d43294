"""Tunnels: a path of their own first, then several, else refused; never more than is free, and nothing stays booked."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.wan.control.choose_transport import RoceFlow
from isthmus.wan.control.pick_gateway import pick_gateway
from isthmus.wan.control.wan_topology import PathRefusal, WanTopology
from isthmus.wan.controller.path_plan import PathPlan, plan_path
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.wan_network import WanNetwork, whole_kbps
from isthmus.wan.crossing.plan_tunnels import Tunnel, plan_tunnels
from tests.wan.control.test_wan_control import random_request, random_topology
from tests.wan.controller.wan_lab import ask, pipe

PIPES = (pipe("wide", "ad", capacity_gbps=3.0), pipe("narrow", "ad", capacity_gbps=1.0))


def network(*pipes: object) -> tuple[WanNetwork, PipeBookings]:
    """Return a network of `pipes`, and its bookings."""
    found = WanNetwork(WanTopology(pipes=tuple(pipes)))  # type: ignore[arg-type]
    return found, PipeBookings(found.pipes, 0.5)


def test_a_tunnel_has_one_path_where_one_has_room() -> None:
    """No tunnel is divided that need not be."""
    found = plan_tunnels(*network(*PIPES), [ask("t", gbps=2.5)])
    assert [path.pipes for path in found.tunnels[0].paths] == [("wide",)]


def test_tunnels_of_one_path_go_before_divided_ones() -> None:
    """Where one edge node has a path of its own, another one's tunnel is refused and not divided."""
    found = plan_tunnels(*network(*PIPES), [ask("big", gbps=3.5), ask("small", gbps=2.0)])
    assert [one.name for one in found.tunnels] == ["small"]
    assert [(one.name, one.nearest_gbps) for one in found.refused] == [("big", 3.0)]


def test_a_tunnel_is_divided_where_no_path_has_room() -> None:
    """Its paths add up to what it asks for, and queue pairs follow their bandwidth."""
    found = plan_tunnels(*network(*PIPES), [ask("t", gbps=4.0)])
    assert not found.refused
    assert found.tunnels[0].weights == {"0": 3.0, "1": 1.0}
    flows = [
        RoceFlow(source="10.1.0.1", target="10.2.0.1", source_port=49_152 + n, required_gbps=1) for n in range(4000)
    ]
    counts = Counter(pick_gateway(one, found.tunnels[0].weights) for one in flows)
    assert counts["0"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_what_fits_over_no_paths_is_refused_with_what_would_fit() -> None:
    """The reason names the most that one path has."""
    found = plan_tunnels(*network(*PIPES), [ask("t", gbps=4.5)])
    assert not found.tunnels
    assert [one.nearest_gbps for one in found.refused] == [3.0]
    assert "8 paths" in found.refused[0].reason
    found = plan_tunnels(*network(*PIPES), [ask("t", gbps=4.0)], max_paths=1)
    assert not found.tunnels
    assert "paths" not in found.refused[0].reason


def test_questions_that_make_no_sense_are_refused() -> None:
    """None, or two of one name, is an error and no tunnel."""
    one = ask("t", gbps=1.0)
    for requests, max_paths in (([], 8), ([one], 0), ([one, one], 8)):
        with pytest.raises(InputError):
            plan_tunnels(*network(*PIPES), requests, max_paths=max_paths)


@given(st.integers(0, 2**32))
def test_tunnels_stay_within_what_is_free_and_their_bounds(seed: int) -> None:
    """All paths of an answer can be booked together; each keeps its bounds; without an answer no request has a path."""
    rng = Random(seed)
    topology = random_topology(rng)
    wan = WanNetwork(topology)
    bookings = PipeBookings(wan.pipes, topology.bulk_share)
    for number in range(100, 103):
        plan = plan_path(wan, bookings, random_request(rng, number))
        if isinstance(plan, PathPlan):
            bookings.book(number, plan.spans, plan.service)
    before = list(bookings)
    requests = [random_request(rng, number) for number in range(3)]
    asked = {one.name: one for one in requests}
    found = plan_tunnels(wan, bookings, requests)
    assert list(bookings) == before
    assert {one.name for one in (*found.tunnels, *found.refused)} == set(asked)
    assert len(found.tunnels) + len(found.refused) == len(asked)
    if not found.tunnels:
        assert all(isinstance(plan_path(wan, bookings, one), PathRefusal) for one in requests)
        return
    for tunnel in found.tunnels:
        _check(tunnel, asked[tunnel.name].bandwidth_gbps)
        for place, path in enumerate(tunnel.paths):
            request = asked[tunnel.name]
            assert path.delay_ms <= request.max_delay_ms
            assert path.jitter_ms <= request.max_jitter_ms
            assert path.loss <= request.max_loss + 1e-9
            assert bookings.book((tunnel.name, place), path.spans, path.service) is None
    assert bookings.over_booked() == []


def _check(tunnel: Tunnel, bandwidth_gbps: float) -> None:
    assert sum(path.rates_kbps[0][2] for path in tunnel.paths) == whole_kbps(bandwidth_gbps)
