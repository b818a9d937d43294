"""Collectives by hand: alpha-beta by tier (Thakur et al., 2005), for groups in one node, in several, and apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.plan.profile.mean_places import Routing
from isthmus.plan.time.collectives import (
    NETWORK_HOP_S,
    NODE_HOP_S,
    all_gather_s,
    all_reduce_bytes_per_s,
    all_reduce_s,
    all_to_all_s,
    node_all_to_all_s,
    ring_all_reduce_s,
    ring_pass_s,
    send_s,
    tree_all_reduce_s,
)
from tests.plan.round_numbers import UNIT

H, N = NODE_HOP_S, NETWORK_HOP_S
ONE_EXPERT, ALL_EXPERTS = Routing(experts=8, chosen=1), Routing(experts=8, chosen=8)


def close(seconds: float) -> object:
    """These seconds; a thousandth of a hop would be seen."""
    return pytest.approx(seconds, rel=1e-12, abs=1e-10)


def test_a_ring_has_twice_as_many_steps_as_others_a_tree_twice_its_depth() -> None:
    """Of 5 chips, 40 bytes, 2 bytes a second: 8 steps and 8/5 of the bytes; 6 steps and twice the bytes."""
    assert ring_all_reduce_s(40.0, 5, 2.0, 0.5) == close(8 * 0.5 + 8 / 5 * 40 / 2)
    assert tree_all_reduce_s(40.0, 5, 2.0, 0.5) == close(6 * 0.5 + 2 * 40 / 2)
    assert tree_all_reduce_s(40.0, 4, 2.0, 0.5) == close(4 * 0.5 + 2 * 40 / 2)


@pytest.mark.parametrize(
    ("size", "stride", "seconds"),
    [
        (1, 1, 0.0),
        (2, 1, 1 + 2 * H + 96 / 8),
        (4, 1, 1 + 6 * H + 6 / 4 * 96 / 8),
        (5, 1, 1 + 6 * H + 6 / 4 * 96 / 8 + 10 + 2 * N + 24 / 2),
        (12, 1, 1 + 6 * H + 6 / 4 * 96 / 8 + 10 + 4 * N + 4 / 3 * 24 / 2),
        (4, 2, 1 + 2 * H + 96 / 8 + 10 + 2 * N + 48 / 2),
        (3, 4, 10 + 4 * N + 4 / 3 * 96 / 2),
        (2, 8, 10 + 2 * N + 96 / 2),
    ],
)
def test_an_all_reduce_of_96_bytes_takes_a_ring_inside_nodes_and_one_between_them(
    size: int, stride: int, seconds: float
) -> None:
    """2 (p - 1) / p of the bytes inside; of the part of each chip of a node between the nodes."""
    assert all_reduce_s(UNIT, 96.0, size, stride) == close(seconds)


def test_an_all_reduce_of_few_bytes_takes_a_tree_in_each_tier() -> None:
    """32 chips: 4 steps in a node of 4, where a ring has 6; 6 between 8 nodes, where a ring has 14."""
    num_bytes = 8e-9
    inside, between = 4 * H + 2 * num_bytes / 8, 6 * N + 2 * num_bytes / 4 / 2
    assert all_reduce_s(UNIT, num_bytes, 32) == close(1 + inside + 10 + between)


@pytest.mark.parametrize(
    ("size", "stride", "seconds"),
    [
        (1, 1, 0.0),
        (2, 1, 1 + H + 48 / 8),
        (4, 1, 1 + 3 * H + 72 / 8),
        (12, 1, 1 + 3 * H + 72 / 8 + 10 + 2 * N + 2 / 3 * 24 / 2),
        (16, 1, 1 + 3 * H + 72 / 8 + 10 + 3 * N + 3 / 4 * 24 / 2),
        (3, 4, 10 + 2 * N + 64 / 2),
        (2, 4, 10 + N + 48 / 2),
    ],
)
def test_an_all_gather_to_96_bytes_is_half_of_a_ring_in_each_tier(size: int, stride: int, seconds: float) -> None:
    """(p - 1) steps and (p - 1) / p of the bytes; between nodes of the part of each chip of a node."""
    assert all_gather_s(UNIT, 96.0, size, stride) == close(seconds)


@pytest.mark.parametrize(
    ("size", "stride", "seconds"),
    [(1, 1, 0.0), (2, 1, 1 + 48 / 8), (4, 1, 1 + 72 / 8), (12, 1, 10 + 64 / 2), (2, 4, 10 + 48 / 2), (3, 4, 10 + 32)],
)
def test_an_all_to_all_of_96_bytes_sends_each_of_its_chips_an_equal_part(
    size: int, stride: int, seconds: float
) -> None:
    """Of 12 chips in three nodes: 3 parts of 8 bytes in the node, 8 to others, at once; the slower counts."""
    assert all_to_all_s(UNIT, 96.0, size, stride) == close(seconds)


def test_the_part_inside_the_node_sets_the_time_of_an_all_to_all_where_the_network_is_fast() -> None:
    """Three parts of 8 bytes over the link."""
    fast = replace(UNIT, network_bytes_per_s=1e9, network_latency_s=0.0)
    assert all_to_all_s(fast, 96.0, 12) == close(1 + 24 / 8)
    assert node_all_to_all_s(fast, 96.0, 8, 1, ALL_EXPERTS) == close(1 + 8 * 3 / 4 * 96 / 8)


@pytest.mark.parametrize(
    ("size", "stride", "routing", "seconds"),
    [
        (1, 1, ONE_EXPERT, 0.0),
        (2, 1, ONE_EXPERT, 1 + 1 / 2 * 96 / 8),
        (4, 1, ALL_EXPERTS, 1 + 4 * 3 / 4 * 96 / 8),
        (8, 1, ONE_EXPERT, 10 + 1 / 2 * 96 / 2),
        (8, 1, ALL_EXPERTS, 1 + 8 * 3 / 4 * 96 / 8),
        (12, 1, Routing(experts=12, chosen=1), 10 + 2 / 3 * 96 / 2),
        (8, 4, ALL_EXPERTS, 10 + 8 * 7 / 8 * 96 / 2),
        (2, 4, ONE_EXPERT, 10 + 1 / 2 * 96 / 2),
    ],
)
def test_a_token_is_sent_once_to_each_node_with_an_expert_of_it(
    size: int, stride: int, routing: Routing, seconds: float
) -> None:
    """With one expert to one node, with all experts to every node; one of n is its own, which receives nothing."""
    assert node_all_to_all_s(UNIT, 96.0, size, stride, routing) == close(seconds)


def test_a_message_crosses_the_link_of_a_node_or_the_slower_of_two_networks() -> None:
    """The longer of the two latencies; a receiver with a faster network changes nothing."""
    slower = replace(UNIT, network_bytes_per_s=1.0, network_latency_s=5.0)
    later = replace(UNIT, network_bytes_per_s=4.0, network_latency_s=20.0)
    assert send_s(UNIT, 96.0, same_node=True, target=slower) == close(1 + 96 / 8)
    assert send_s(UNIT, 96.0, same_node=False) == close(10 + 96 / 2)
    assert send_s(UNIT, 96.0, same_node=False, target=slower) == close(10 + 96 / 1)
    assert send_s(UNIT, 96.0, same_node=False, target=later) == close(20 + 96 / 2)


@pytest.mark.parametrize(
    ("size", "stride", "seconds"),
    [(1, 1, 0.0), (2, 1, 1 + 12), (4, 1, 3 * (1 + 12)), (5, 1, 4 * (10 + 48)), (4, 2, 3 * (10 + 48))],
)
def test_a_ring_passes_the_bytes_of_each_chip_round_in_one_step_less_than_chips(
    size: int, stride: int, seconds: float
) -> None:
    """At the pace of its slowest hop: the network's, as soon as the group spans two nodes."""
    assert ring_pass_s(UNIT, 96.0, size, stride) == close(seconds)


def test_chips_without_a_neighbour_do_not_wait_for_the_links_of_their_nodes() -> None:
    """Whatever those take to start: three chips, one a node."""
    late = replace(UNIT, link_latency_s=1000.0)
    assert all_to_all_s(late, 96.0, 3, 4) == close(10 + 64 / 2)
    assert node_all_to_all_s(late, 96.0, 3, 4, Routing(experts=3, chosen=3)) == close(10 + 3 * 2 / 3 * 96 / 2)
    assert all_gather_s(late, 96.0, 3, 4) == close(10 + 2 * N + 64 / 2)
    assert all_reduce_s(late, 96.0, 3, 4) == close(10 + 4 * N + 4 / 3 * 96 / 2)


def test_the_rate_of_a_large_all_reduce_has_no_latencies() -> None:
    """Inside a node that of the link; of 8 chips in two 7/4 B in 3/2 B / 8 and B / 4 / 2 s; one waits for none."""
    assert all_reduce_bytes_per_s(UNIT, 4) == pytest.approx(8.0, rel=1e-9)
    assert all_reduce_bytes_per_s(UNIT, 2) == pytest.approx(8.0, rel=1e-9)
    assert all_reduce_bytes_per_s(UNIT, 8) == pytest.approx(7 / 4 / (3 / 16 + 1 / 8), rel=1e-9)
    assert all_reduce_bytes_per_s(UNIT, 2, 4) == pytest.approx(2.0, rel=1e-9)
    assert all_reduce_bytes_per_s(UNIT, 1) == float("inf")
