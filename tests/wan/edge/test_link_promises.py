"""Booked rates on emulated links: a booking's connections get their rate beside any number of others."""

from __future__ import annotations

import asyncio

import pytest

from isthmus.core.errors import InputError
from isthmus.wan.edge.link_promises import LinkPromises
from isthmus.wan.tcp_relay import TcpRelay
from tests.wan.edge.test_edge_settings import booking
from tests.wan.lab import link_of, pool_of
from tests.wan.virtual_links import Links, on_virtual_links

GOODPUT = 1448 / 1500


def joined() -> dict[str, object]:
    return {"between": ["a", "b"], "bandwidth_gbps": 0.05, "round_trip_ms": 20}


def test_a_booked_connection_has_its_rate_beside_seven_others() -> None:
    """Of 50 Mbit/s it has 30, as when it is alone; the others share 20 and take turns; the way back is not booked."""
    booked = booking("r", 0.03, {"from_network": "127.0.0.7/32"})
    num_bytes = 400_000
    alone_s = num_bytes * 8e-9 / (0.03 * GOODPUT)

    async def script(links: Links) -> None:
        idle_s = await (await links.dial(b"s", source="127.0.0.7")).swallow_s(num_bytes) - 0.020
        others = [await links.dial(b"s") for _ in range(7)]
        busy = [asyncio.create_task(one.swallow_s(400_000)) for one in others]
        await asyncio.sleep(0.2)
        took_s = await (await links.dial(b"s", source="127.0.0.7")).swallow_s(num_bytes) - 0.020
        assert not any(one.done() for one in busy)
        assert idle_s == pytest.approx(alone_s, rel=0.25)
        assert took_s == pytest.approx(alone_s, rel=0.35)
        total_s = max(await asyncio.gather(*busy))
        assert total_s == pytest.approx(7 * 400_000 * 8e-9 / (0.02 * GOODPUT), rel=0.1)

    on_virtual_links(pool_of(joined()), script, bookings=[booked])


def test_limits_follow_flows_and_time() -> None:
    """Two connections of a booking share one limit; others share another; a link without bookings has none."""
    flow = {"to_network": "127.0.0.1/32", "protocol": "tcp", "to_port": 7}
    link = LinkPromises(link_of(), [booking("r", 0.4, flow, end_s=5.0)], 0.0)
    ours = link.limit(host="127.0.0.1", port=7, peer="127.0.0.1")
    assert ours is not None
    assert ours.bytes_per_s == 50e6
    assert link.limit(host="127.0.0.1", port=7, peer="127.0.0.2") is ours
    other = link.limit(host="127.0.0.1", port=8, peer="127.0.0.1")
    assert other is not None
    assert other is not ours
    assert link.limit(host="127.0.0.1", port=None, peer="127.0.0.1") is other
    after = LinkPromises(link_of(), [booking("r", 0.4, flow, end_s=5.0)], 5.0)
    assert after.limit(host="127.0.0.1", port=7, peer="127.0.0.1") is None


def test_bookings_that_no_link_can_keep_are_refused_before_anything_listens() -> None:
    """More than the link has, or ends that the pool does not know."""
    pool = pool_of(joined())
    with pytest.raises(InputError, match=r"promised 0\.06"):
        TcpRelay(pool, bookings=[booking("r", 0.06, {"protocol": "tcp"})])
    with pytest.raises(InputError, match="c, which is no cluster"):
        TcpRelay(pool, bookings=[booking("r", 0.01, {"protocol": "tcp"}, to="c")])
