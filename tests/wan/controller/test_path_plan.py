"""Paths and transfers: as good as by enumeration, within every bound, never beyond what is free."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.wan.control.wan_topology import (
    Booking,
    FlowMatch,
    PathRefusal,
    PathRequest,
    TransferRequest,
    WanNode,
    WanTopology,
)
from isthmus.wan.controller.path_plan import plan_path
from isthmus.wan.controller.pipe_bookings import PipeBookings, PipeSpan
from isthmus.wan.controller.plan_batch import plan_batch
from isthmus.wan.controller.plan_transfer import plan_transfer
from isthmus.wan.controller.rate_calendar import RateCalendar
from isthmus.wan.controller.wan_network import WanNetwork
from tests.wan.control.reference_admission import admit
from tests.wan.control.test_wan_control import random_request, random_topology
from tests.wan.controller.wan_lab import ask, pipe, send

TIMES = st.integers(0, 12)


@given(st.lists(st.tuples(TIMES, TIMES, st.integers(1, 9)), max_size=12), st.randoms())
def test_a_calendar_is_the_sum_of_what_was_added(spans: list[tuple[int, int, int]], rng: Random) -> None:
    """At each moment, and released in any order it is empty again, without steps left behind."""
    calendar = RateCalendar()
    spans = [(min(a, b), max(a, b), kbps) for a, b, kbps in spans if a != b]
    for start_s, end_s, kbps in spans:
        calendar.add(start_s, end_s, kbps)
    at = [sum(kbps for a, b, kbps in spans if a <= moment < b) for moment in range(13)]
    for start_s in range(12):
        for end_s in range(start_s + 1, 13):
            assert calendar.peak_kbps(start_s, end_s) == max(at[start_s:end_s])
            assert calendar.least_kbps(start_s, end_s) == min(at[start_s:end_s])
    rng.shuffle(spans)
    for start_s, end_s, kbps in spans:
        calendar.add(start_s, end_s, -kbps)
    assert list(calendar.steps(0, 12)) == [(0, 12, 0)]


def network_of(topology: WanTopology) -> tuple[WanNetwork, PipeBookings]:
    network = WanNetwork(topology)
    return network, PipeBookings(network.pipes, topology.bulk_share)


@given(st.integers(0, 2**32))
def test_paths_equal_those_of_the_reference(seed: int) -> None:
    """`admit`, which enumerates without guidance or calendars, books the same: delay, quality, refusals, best rate."""
    rng = Random(seed)
    topology, booked = random_topology(rng), list[Booking]()
    network, bookings = network_of(topology)
    for number in range(15):
        request = random_request(rng, number)
        expected = admit(topology, booked, request)
        found = plan_path(network, bookings, request, explains=True)
        if isinstance(expected, PathRefusal):
            assert isinstance(found, PathRefusal)
            assert found.nearest_gbps <= expected.nearest_gbps + 1e-6
            continue
        assert not isinstance(found, PathRefusal)
        assert found.delay_ms == pytest.approx(expected.delay_ms)
        assert len(found.pipes) == len(expected.pipes)
        assert found.jitter_ms <= request.max_jitter_ms
        assert found.loss <= request.max_loss + 1e-12
        rates = [round(rate * 1e6) for rate in expected.rates_gbps]
        by_name = {one.name: one for one in network.pipes}
        spans = tuple(
            PipeSpan(name, request.start_s, request.end_s, kbps)
            for name, kbps in zip(expected.pipes, rates, strict=True)
        )
        assert all(span.kbps % by_name[span.pipe].step_kbps == 0 for span in found.spans)
        booked.append(expected)
        assert bookings.book(request.name, spans, request.service) is None
    assert bookings.over_booked() == []


def test_only_edges_begin_and_end_paths_and_layers_change_where_nodes_adapt() -> None:
    """A core node is only passed; one that does not adapt passes a layer on as it came."""
    pipes = (
        pipe("ab", "ab"), pipe("bd", "bd", layer="tdm", step_gbps=0.25),
        pipe("ac", "ac", delay_ms=9.0), pipe("cd", "cd", layer="tdm", step_gbps=0.25),
    )  # fmt: skip
    nodes = (
        WanNode(name="a"), WanNode(name="d"),
        WanNode(name="b", role="core", adapts=False), WanNode(name="c", role="core"),
    )  # fmt: skip
    network, bookings = network_of(WanTopology(pipes=pipes, nodes=nodes))
    found = plan_path(network, bookings, ask())
    assert not isinstance(found, PathRefusal)
    assert found.pipes == ("ac", "cd")
    refused = plan_path(network, bookings, PathRequest(name="x", source="b", target="d", bandwidth_gbps=0.1))
    assert isinstance(refused, PathRefusal)
    assert "no edge node" in refused.reason
    with pytest.raises(NotFoundError):
        network.pipe("zz")


@given(st.integers(0, 2**32))
def test_a_transfer_arrives_whole_and_in_time_or_is_refused(seed: int) -> None:
    """Its segments carry its bytes within its time and its ends' rate, beside what is booked, in its share."""
    rng = Random(seed)
    topology = random_topology(rng)
    network, bookings = network_of(topology)
    for number in range(12):
        if rng.random() < 0.5:
            found = plan_path(network, bookings, random_request(rng, number))
            if not isinstance(found, PathRefusal):
                assert bookings.book(number, found.spans, found.service) is None
            continue
        source, target = rng.sample(["a", "b", "c", "d", "e"], 2)
        request = TransferRequest(
            name=f"t{number}", source=source, target=target, num_bytes=rng.randint(1, 4 * 10**9),
            start_s=rng.choice([0.0, 12.0]), deadline_s=rng.choice([15.0, 40.0]), max_gbps=rng.choice([0.3, 100.0]),
        )  # fmt: skip
        if source not in network.nodes or target not in network.nodes:
            continue
        plan = plan_transfer(network, bookings, request)
        if isinstance(plan, PathRefusal):
            assert plan.nearest_gbps * (request.deadline_s - request.start_s) * 1e9 / 8 <= request.num_bytes
            continue
        sent_kbits = sum((end_s - start_s) * kbps for start_s, end_s, kbps in plan.rates_kbps)
        assert sent_kbits == pytest.approx(request.num_bytes / 125, rel=1e-5)
        assert request.start_s <= plan.rates_kbps[0][0]
        assert plan.rates_kbps[-1][1] <= request.deadline_s
        assert all(0 < kbps <= request.max_gbps * 1e6 + 1 for _, _, kbps in plan.rates_kbps)
        assert bookings.book(number, plan.spans, "bulk") is None
    assert bookings.over_booked() == []


def test_a_transfer_takes_the_path_that_is_done_first() -> None:
    """The long path is free at once, the short one later: the bytes go where their last one is sent first."""
    pipes = (pipe("ad", "ad"), pipe("ab", "ab", delay_ms=9.0), pipe("bd", "bd", delay_ms=9.0))
    network, bookings = network_of(WanTopology(pipes=pipes))
    assert bookings.book("other", (PipeSpan("ad", 0.0, 60.0, 1_000_000),), "training") is None
    found = plan_transfer(network, bookings, send(num_bytes=10**9))
    assert not isinstance(found, PathRefusal)
    assert found.pipes == ("ab", "bd")
    assert found.rates_kbps == ((0.0, 16.0, 500_000),)
    refused = plan_transfer(network, bookings, send(num_bytes=10**11))
    assert isinstance(refused, PathRefusal)
    assert "6% fit" in refused.reason


def test_a_batch_admits_what_one_order_alone_does_not() -> None:
    """A large request on the short path blocks two others; led around, all three fit. Nothing stays booked."""
    pipes = (
        pipe("ab", "ab"), pipe("bd", "bd"), pipe("ac", "ac", delay_ms=5.0), pipe("cd", "cd", delay_ms=5.0)
    )  # fmt: skip
    network, bookings = network_of(WanTopology(pipes=pipes))
    requests = [
        ask("large", 0.8),
        PathRequest(name="one", source="a", target="b", bandwidth_gbps=0.7),
        PathRequest(name="two", source="b", target="d", bandwidth_gbps=0.7),
    ]
    assert set(plan_batch(network, bookings, requests, Random(0), 1)) == {"large"}
    assert set(plan_batch(network, bookings, requests, Random(0), 20)) == {"large", "one", "two"}
    assert list(bookings) == []


def test_a_name_is_booked_once() -> None:
    """A second booking of a key is an error, and changes nothing."""
    _, bookings = network_of(WanTopology(pipes=(pipe("ad", "ad"),)))
    span = (PipeSpan("ad", 0.0, 1.0, 1),)
    assert bookings.book("r", span, "bulk") is None
    with pytest.raises(ConflictError):
        bookings.book("r", span, "bulk")
    assert bookings.release("r")
    assert not bookings.release("r")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"to_port": 80},
        {"to_network": "10.0.0.0/8", "from_network": "fd00::/8"},
        {"to_network": "10.0.0.1/8"},
        {"protocol": "icmp"},
        {"protocol": "tcp", "to_port": 70_000},
    ],
)
def test_flows_that_match_everything_or_nothing_are_refused(fields: dict[str, object]) -> None:
    """A match states something that the edge can tell apart."""
    with pytest.raises(ValidationError):
        FlowMatch.model_validate(fields)


@pytest.mark.parametrize("fields", [{"num_bytes": 0}, {"start_s": 100.0}, {"max_gbps": 0}, {"deadline_s": 1e40}])
def test_transfers_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    """No bytes, no time, or no rate."""
    with pytest.raises(ValidationError):
        send(**fields)  # type: ignore[arg-type]
