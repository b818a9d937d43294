"""What an edge sends: each booking at its rate, in its time, told apart by its flows; changes disturb no other flow."""

from __future__ import annotations

import ipaddress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.wan.control.wan_topology import (
    Booking,
    FlowMatch,
    PathRequest,
    TransferBooking,
    TransferRequest,
    TransferSegment,
)
from isthmus.wan.edge.edge_settings import (
    FIRST_MINOR,
    OTHER_MINOR,
    EdgeFilter,
    EdgeSettings,
    edge_changes,
    edge_settings,
)


def booking(name: str, gbps: float, *flows: dict[str, object], **fields: object) -> Booking:
    """Return a booking from a to b."""
    matches = [FlowMatch.model_validate(flow) for flow in flows]
    given_ = {"name": name, "from": "a", "to": "b", "bandwidth_gbps": gbps, "flows": matches} | fields
    request = PathRequest.model_validate(given_)
    return Booking(request=request, pipes=(), rates_gbps=(), delay_ms=0.0, jitter_ms=0.0, loss=0.0)


TCP = {"to_network": "10.2.0.0/15", "protocol": "tcp", "to_port": 5001}


def test_each_booking_under_way_has_a_class_of_its_rate_and_others_share_the_rest() -> None:
    """Bookings of other edges, and those before or after their time, have none."""
    found = edge_settings(
        [
            booking("now", 0.3, TCP, end_s=10.0),
            booking("later", 0.2, TCP, start_s=10.0),
            booking("elsewhere", 0.2, TCP, **{"from": "c"}),
        ],
        "a", 9.9, 1.0,
    )  # fmt: skip
    assert [(one.name, one.rate_kbps, one.ceil_kbps) for one in found.classes] == [
        ("all packets", 1_000_000, 1_000_000),
        ("other packets", 700_000, 1_000_000),
        ("now", 300_000, 300_000),
    ]
    assert {one.minor for one in found.filters} == {FIRST_MINOR}


def test_a_transfer_has_the_rate_of_its_segment() -> None:
    """It changes as its plan says, and ends with it."""
    request = TransferRequest.model_validate(
        {"name": "t", "from": "a", "to": "b", "num_bytes": 1, "deadline_s": 9.0, "flows": [TCP]}
    )
    segments = tuple(TransferSegment(start_s=at, end_s=at + 2, gbps=gbps) for at, gbps in ((0.0, 0.1), (3.0, 0.4)))
    one = TransferBooking(
        request=request, pipes=(), segments=segments, end_s=5.0, delay_ms=0.0, jitter_ms=0.0, loss=0.0
    )
    rates = []
    for at_s in (1.0, 2.5, 3.0, 5.0):
        classes = edge_settings([one], "a", at_s, 1.0).classes[2:]
        rates.append([found.rate_kbps for found in classes])
    assert rates == [[100_000], [], [400_000], []]


def test_more_than_the_device_sends_and_flows_without_a_match_are_refused() -> None:
    """A hundredth is kept for other packets; a booking whose packets cannot be told apart is said."""
    with pytest.raises(InputError, match=r"promised 0\.995"):
        edge_settings([booking("r", 0.995, TCP)], "a", 0.0, 1.0)
    with pytest.raises(InputError, match="no flows"):
        edge_settings([booking("r", 0.5)], "a", 0.0, 1.0)


FLOWS = st.builds(
    lambda v6, near, far, protocol, port, near_port: FlowMatch.model_validate(
        {
            "to_network": str(ipaddress.ip_network(far[v6], strict=False)),
            "protocol": protocol,
            "to_port": port if protocol else None,
            "from_port": near_port if protocol else None,
        }
        | ({"from_network": str(ipaddress.ip_network(near[v6], strict=False))} if near else {})
    ),
    st.integers(0, 1),
    st.none() | st.tuples(*(st.sampled_from([f"10.1.2.3/{n}" for n in (8, 9, 31)]), st.just("fd00:1::7/49"))),
    st.tuples(*(st.sampled_from([f"10.3.2.1/{n}" for n in (0, 13, 32)]), st.just("fd00:2::7/127"))),
    st.sampled_from([None, "tcp", "udp"]),
    st.none() | st.integers(1, 65535),
    st.none() | st.integers(1, 65535),
)


def packet(version: int, source: str, target: str, protocol: str, ports: tuple[int, int]) -> bytes:
    """Return the headers of a packet as far as a filter looks."""
    number = {"tcp": 6, "udp": 17}[protocol]
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(target).packed
    start = bytes(9) + bytes([number]) + bytes(2) if version == 4 else bytes(6) + bytes([number]) + bytes(1)
    return start + ends + b"".join(port.to_bytes(2, "big") for port in ports)


def meets(one: EdgeFilter, data: bytes) -> bool:
    """Match as the kernel's u32 does."""
    return all(data[offset] & mask == value & mask for offset, value, mask in one.keys)


@given(FLOWS, st.integers(0, 2**32))
def test_filters_match_exactly_what_flows_state(flow: FlowMatch, seed: int) -> None:
    """Random packets, of which some bits are those of the flow, meet the filter if and only if they meet the flow."""
    rng = Random(seed)
    settings = edge_settings([booking("r", 0.1, flow.model_dump())], "a", 0.0, 1.0)
    for version in (4, 6):
        filters = [one for one in settings.filters if one.version == version]
        assert len(filters) == (flow.version in (None, version))
        size = 32 if version == 4 else 128
        for _ in range(8):
            ends = []
            for network in (flow.from_network, flow.to_network):
                base = int(network.network_address) if network and network.version == version else rng.getrandbits(size)
                ends.append(base ^ (1 << rng.randrange(size)) if rng.random() < 0.7 else base)
            make = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address
            protocol = rng.choice([flow.protocol or "tcp", "udp"])
            ports = tuple(
                rng.choice([wanted or 1, wanted or 2, rng.randint(1, 65535)])
                for wanted in (flow.from_port, flow.to_port)
            )
            source, target = make(ends[0]), make(ends[1])
            expected = (
                flow.version in (None, version)
                and (flow.from_network is None or source in flow.from_network)
                and (flow.to_network is None or target in flow.to_network)
                and flow.protocol in (None, protocol)
                and flow.from_port in (None, ports[0])
                and flow.to_port in (None, ports[1])
            )
            data = packet(version, str(source), str(target), protocol, ports)
            assert any(meets(one, data) for one in filters) == expected


def test_a_narrower_match_goes_first() -> None:
    """A port of a network is told apart from the rest of that network, in whatever order they are booked."""
    wide, narrow = booking("wide", 0.1, {"to_network": "10.2.0.0/15"}), booking("narrow", 0.1, TCP)
    for order in ([wide, narrow], [narrow, wide]):
        settings = edge_settings(order, "a", 0.0, 1.0)
        names = {one.minor: one.name for one in settings.classes}
        assert [names[one.minor] for one in settings.filters] == ["narrow", "wide"]


@given(
    st.lists(st.lists(st.tuples(st.sampled_from("uvwxyz"), st.sampled_from([0.05, 0.1, 0.15])), max_size=5), max_size=6)
)
def test_changes_lead_to_the_new_settings_and_touch_nothing_else(rounds: list[list[tuple[str, float]]]) -> None:
    """Applied one after the other they give what is wanted; a booking that stays keeps its class and its filters."""
    before: EdgeSettings | None = None
    classes: dict[int, object] = {}
    filters: set[object] = set()
    for wanted in rounds:
        bookings = [booking(name, gbps, TCP | {"to_port": ord(name)}) for name, gbps in dict(wanted).items()]
        after = edge_settings(bookings, "a", 0.0, 1.0, before)
        changes = edge_changes(before, after)
        filters.difference_update(changes.removed_filters)
        for one in changes.removed_classes:
            del classes[one.minor]
        for one in changes.changed_classes:
            assert one.minor in classes
            classes[one.minor] = one
        for one in changes.added_classes:
            assert one.minor not in classes
            classes[one.minor] = one
        filters.update(changes.added_filters)
        assert (set(classes.values()), filters) == (set(after.classes), set(after.filters))
        if before is not None:
            old = {one.name: one.minor for one in before.classes}
            assert all(old.get(one.name, one.minor) == one.minor for one in after.classes)
        before = after
    assert before is None or OTHER_MINOR in classes
