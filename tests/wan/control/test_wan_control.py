"""Choices of transport, gateway and path: by the report's formulas, stable, and never over-booked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.errors import InputError, UnavailableError
from isthmus.wan.control.choose_transport import GatewayAbility, MeasuredLink, RoceFlow, choose_transport
from isthmus.wan.control.pick_gateway import pick_gateway
from isthmus.wan.control.wan_topology import (
    Admission,
    AdmissionFile,
    Booking,
    PathRefusal,
    PathRequest,
    WanPipe,
    WanTopology,
)
from isthmus.wan.controller.admit_all import admit_all

ALL = GatewayAbility(name="g", roce_gbps=100, quic_gbps=0.2, tcp_gbps=1)


def flow(**fields: object) -> RoceFlow:
    """Return a flow of 0.8 Gbit/s between two servers."""
    return RoceFlow(
        **({"source": "10.1.0.1", "target": "10.2.0.9", "source_port": 50000, "required_gbps": 0.8} | fields)
    )


def test_rates_follow_the_report() -> None:
    """The gateway is set to n / a, the edge to n / (a b): more than is asked, never less."""
    link = MeasuredLink(bandwidth_gbps=1, round_trip_s=0.04, loss=0.01)
    gateways = ALL, GatewayAbility(name="r", roce_gbps=10)
    found = choose_transport(flow(), gateways, link)
    a = 1024 / (1024 + 124)
    assert found.transport == "roce"
    assert found.gateway_gbps == pytest.approx(0.8 / a)
    assert found.edge_gbps == pytest.approx(0.8 / a / 0.99)
    assert found.is_enough


def test_what_gateways_cannot_do_is_not_chosen() -> None:
    """The lesser of the two gateways counts; without any ability packets pass through."""
    link = MeasuredLink(bandwidth_gbps=1, round_trip_s=0.04, loss=0.001)
    tcp = GatewayAbility(name="t", tcp_gbps=0.9)
    bare = GatewayAbility(name="b")
    assert choose_transport(flow(), (ALL, tcp), link).transport == "tcp"
    found = choose_transport(flow(), (ALL, bare), link)
    assert (found.transport, found.is_enough) == ("pass-through", False)


def test_a_short_clean_link_needs_no_gateway() -> None:
    """Where NICs reach the line's rate by themselves nothing is put between them."""
    link = MeasuredLink(bandwidth_gbps=1, round_trip_s=0.001)
    assert choose_transport(flow(), (ALL, ALL), link).transport == "pass-through"


@given(st.floats(0.01, 400), st.floats(0.0001, 0.3), st.floats(0, 0.2), st.integers(1, 64), st.integers(576, 9000))
def test_a_choice_never_promises_more_than_the_link(
    bandwidth_gbps: float, round_trip_s: float, loss: float, num_flows: int, mtu_bytes: int
) -> None:
    """Expected goodput stays below the link's, rates at the edge are at least those at the gateway."""
    link = MeasuredLink(bandwidth_gbps=bandwidth_gbps, round_trip_s=round_trip_s, loss=loss, mtu_bytes=mtu_bytes)
    found = choose_transport(flow(num_flows=num_flows), (ALL, ALL), link)
    assert 0 < found.goodput_gbps <= bandwidth_gbps * (1 - loss)
    assert found.edge_gbps >= found.gateway_gbps > 0.8


@pytest.mark.parametrize("fields", [{"loss": 1.0}, {"bandwidth_gbps": 0.0}, {"round_trip_s": -1}, {"mtu_bytes": 100}])
def test_links_that_cannot_be_are_refused(fields: dict[str, float]) -> None:
    """A measurement that makes no sense is an error, no choice."""
    with pytest.raises(InputError):
        MeasuredLink(**({"bandwidth_gbps": 1.0, "round_trip_s": 0.01} | fields))


WEIGHTS = {"g1": 1.0, "g2": 2.0, "g3": 1.0}


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 65535))
def test_both_directions_of_a_queue_pair_go_through_one_gateway(one: int, other: int, port: int) -> None:
    """The choice depends on the five-tuple alone, and not on its direction."""
    from ipaddress import IPv4Address

    ends = str(IPv4Address(one)), str(IPv4Address(other))
    there = flow(source=ends[0], target=ends[1], source_port=port)
    back = flow(source=ends[1], target=ends[0], source_port=port, required_gbps=3.0)
    assert pick_gateway(there, WEIGHTS) == pick_gateway(back, WEIGHTS)


def test_queue_pairs_spread_by_weight_and_only_those_of_a_failed_gateway_move() -> None:
    """4,096 queue pairs: shares within 3 points of the weights; the others stay when one gateway fails."""
    flows = [flow(source=f"10.1.{n % 16}.{n // 256}", source_port=49152 + n) for n in range(4096)]
    before = [pick_gateway(one, WEIGHTS) for one in flows]
    counts = Counter(before)
    for name, share in (("g1", 0.25), ("g2", 0.5), ("g3", 0.25)):
        assert counts[name] / 4096 == pytest.approx(share, abs=0.03)
    after = [pick_gateway(one, WEIGHTS | {"g1": 0.0}) for one in flows]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "g1")
    assert "g1" not in after


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.integers(1, 200), st.integers(0, 2**16))
def test_a_caller_that_counts_queue_pairs_keeps_to_the_weights(shares: list[float], count: int, port: int) -> None:
    """Each gateway is within their number of its share after every queue pair, and again when one of them failed."""
    weights = {f"g{number}": share for number, share in enumerate(shares)}
    carried: Counter[str] = Counter()

    def place(number: int) -> None:
        one = flow(source=f"10.1.0.{number % 9}", source_port=(port + 7 * number) % 65_536)
        carried[pick_gateway(one, weights, carried)] += 1

    def worst() -> float:
        total = sum(weights.values())
        return max(abs(carried[name] - weight / total * carried.total()) for name, weight in weights.items())

    for number in range(count):
        place(number)
        assert worst() < len(weights)
    lost, weights["g0"] = carried.pop("g0", 0), 0.0
    for number in range(lost):
        place(count + number)
    assert worst() < len(weights)


def test_weights_that_make_no_sense_are_refused() -> None:
    """None at all, or a negative one, is an error and no gateway."""
    with pytest.raises(UnavailableError):
        pick_gateway(flow(), {"g1": 0.0})
    with pytest.raises(InputError):
        pick_gateway(flow(), {"g1": -1.0})


def random_topology(rng: Random) -> WanTopology:
    """Return a few nodes of two domains with pipes of all layers."""
    nodes = ["a", "b", "c", "d", "e"]
    pipes = []
    for number in range(rng.randint(4, 12)):
        source, target = rng.sample(nodes, 2)
        layer = rng.choice(["packet", "tdm", "wavelength"])
        pipes.append(
            WanPipe(
                name=f"p{number}", source=source, target=target, layer=layer, domain=rng.choice(["one", "two"]),
                capacity_gbps=rng.choice([1.0, 2.5, 10.0]), step_gbps=0.25 if layer == "tdm" else 0.0,
                delay_ms=rng.choice([1.0, 2.0, 5.0]), jitter_ms=rng.choice([0.0, 0.5]), loss=rng.choice([0.0, 0.01]),
            )
        )  # fmt: skip
    return WanTopology(pipes=tuple(pipes))


def random_request(rng: Random, number: int) -> PathRequest:
    """Return a request between any two nodes for some time."""
    source, target = rng.sample(["a", "b", "c", "d", "e"], 2)
    start_s = rng.choice([0.0, 10.0, 20.0])
    return PathRequest(
        name=f"r{number}", source=source, target=target, bandwidth_gbps=rng.choice([0.1, 0.3, 0.7, 2.0]),
        service=rng.choice(["training", "bulk"]), max_delay_ms=rng.choice([3.0, 8.0, 100.0]),
        max_jitter_ms=rng.choice([0.0, 2.0]), max_loss=rng.choice([0.0, 0.015, 0.5]),
        start_s=start_s, end_s=start_s + rng.choice([5.0, 10.0, 30.0]),
    )  # fmt: skip


def answer(topology: WanTopology, booked: Sequence[Booking], request: PathRequest) -> Admission:
    """Return what becomes of a request beside bookings."""
    return admit_all(AdmissionFile(topology=topology, booked=tuple(booked), requests=(request,)))


def admit(topology: WanTopology, booked: Sequence[Booking], request: PathRequest) -> Booking | PathRefusal:
    """Return the booking or the refusal of a request beside bookings that stay."""
    found = answer(topology, booked, request)
    assert found.booked[: len(booked)] == tuple(booked)
    return (*found.admitted, *found.refused)[0]


@given(st.integers(0, 2**32))
def test_nothing_is_over_booked_and_every_bound_holds(seed: int) -> None:
    """At every moment of any sequence, each pipe carries at most its capacity, and bulk at most its share."""
    rng = Random(seed)
    topology, booked = random_topology(rng), list[Booking]()
    by_name = {pipe.name: pipe for pipe in topology.pipes}
    for number in range(25):
        request = random_request(rng, number)
        became = answer(topology, booked, request)
        booked = list(became.booked)
        if not became.admitted:
            assert became.refused[0].nearest_gbps < request.bandwidth_gbps
            continue
        (found,) = became.admitted
        pipes = [by_name[name] for name in found.pipes]
        assert (pipes[0].source, pipes[-1].target) == (request.source, request.target)
        assert all(one.target == other.source for one, other in pairwise(pipes))
        assert found.delay_ms <= request.max_delay_ms
        assert found.jitter_ms <= request.max_jitter_ms
        assert found.loss <= request.max_loss + 1e-12
        assert all(rate >= request.bandwidth_gbps for rate in found.rates_gbps)
        if rng.random() < 0.2:
            booked.pop(rng.randrange(len(booked)))
    for at_s in (0.0, 4.9, 5.0, 9.9, 10.0, 15.0, 20.0, 29.9, 30.0, 49.0):
        for pipe in topology.pipes:
            used = [
                (one.request.service, rate)
                for one in booked
                if one.request.start_s <= at_s < one.request.end_s
                for name, rate in zip(one.pipes, one.rates_gbps, strict=True)
                if name == pipe.name
            ]
            assert sum(rate for _, rate in used) <= pipe.capacity_gbps * (1 + 1e-9)
            bulk = sum(rate for service, rate in used if service == "bulk")
            assert bulk <= pipe.capacity_gbps * topology.bulk_share * (1 + 1e-9)


@given(st.integers(0, 2**32))
def test_a_path_is_found_where_one_exists_and_it_has_the_least_delay(seed: int) -> None:
    """Beside an enumeration of all simple paths of an empty network."""
    rng = Random(seed)
    topology, request = random_topology(rng), random_request(rng, 0)
    best = _least_delay_ms(topology, request, request.source, frozenset(), (0.0, 0.0, 1.0))
    found = admit(topology, [], request)
    assert (found.delay_ms if isinstance(found, Booking) else None) == (None if best is None else pytest.approx(best))


def _least_delay_ms(
    topology: WanTopology, request: PathRequest, node: str, seen: frozenset[str], label: tuple[float, float, float]
) -> float | None:
    if node == request.target:
        return label[0] if label[2] >= 1 - request.max_loss - 1e-12 else None
    found = []
    for pipe in topology.pipes:
        share = topology.bulk_share if request.service == "bulk" else 1.0
        step = pipe.capacity_gbps if pipe.layer == "wavelength" else pipe.step_gbps
        rate = -(-request.bandwidth_gbps // step) * step if step else request.bandwidth_gbps
        after = label[0] + pipe.delay_ms, label[1] + pipe.jitter_ms, label[2] * (1 - pipe.loss)
        fits = rate <= pipe.capacity_gbps * share and after[0] <= request.max_delay_ms
        if pipe.source == node and pipe.target not in seen | {node} and fits and after[1] <= request.max_jitter_ms:
            found.append(_least_delay_ms(topology, request, pipe.target, seen | {node}, after))
    return min((one for one in found if one is not None), default=None)


def line(**fields: object) -> WanTopology:
    """Return one pipe from a to b."""
    return WanTopology(pipes=(WanPipe(**({"name": "p", "source": "a", "target": "b", "capacity_gbps": 1.0} | fields)),))


def ask(name: str = "r", **fields: object) -> PathRequest:
    """Return a request of 0.6 Gbit/s from a to b."""
    return PathRequest(**({"name": name, "source": "a", "target": "b", "bandwidth_gbps": 0.6} | fields))


def test_a_refusal_names_the_nearest_bandwidth() -> None:
    """What is left is said, so that the caller can ask for less; later times are free."""
    first = admit(line(), [], ask("one", end_s=10.0))
    assert isinstance(first, Booking)
    second = admit(line(), [first], ask("two"))
    assert isinstance(second, PathRefusal)
    assert second.nearest_gbps == pytest.approx(0.4)
    assert "0.4 is the most" in second.reason
    assert isinstance(admit(line(), [first], ask("three", start_s=10.0)), Booking)


def test_rates_are_rounded_up_to_the_step_of_a_layer() -> None:
    """A TDM slot and a wavelength are taken whole."""
    tdm = admit(line(layer="tdm", step_gbps=0.25), [], ask())
    wave = admit(line(layer="wavelength"), [], ask())
    assert isinstance(tdm, Booking)
    assert isinstance(wave, Booking)
    assert (tdm.rates_gbps, wave.rates_gbps) == ((0.75,), (1.0,))


def test_bulk_leaves_room_for_training() -> None:
    """A transfer gets at most its share of a pipe; training gets the rest at once."""
    assert isinstance(admit(line(), [], ask(service="bulk")), PathRefusal)
    bulk = admit(line(), [], ask("b", service="bulk", bandwidth_gbps=0.5))
    assert isinstance(bulk, Booking)
    assert isinstance(admit(line(), [bulk], ask("t", bandwidth_gbps=0.5)), Booking)


@pytest.mark.parametrize("fields", [{"end_s": 1.0, "start_s": 2.0}, {"bandwidth_gbps": 0}, {"bandwidth_gbps": 1e40}])
def test_requests_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    """An end before the start, no bandwidth, or more than any number stands for."""
    with pytest.raises(ValidationError):
        ask(**fields)
