"""Known answers: equations (1) to (4) of the PASSING paper, and the prices of the strategies' steps beside them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.sim.synchronisation import (
    SyncCluster,
    parameter_server_network,
    parameter_server_s,
    passing_s,
    psring_network,
    psring_s,
    reduce_scatter_s,
    seconds,
)
from isthmus.strategies import STRATEGIES, check_steps, steps

CLUSTER = SyncCluster(
    num_servers=4, chips_per_server=4, num_aggregators=1,
    pcie_bytes_per_s=16e9, upi_bytes_per_s=20e9, nic_bytes_per_s=1.25e9, link_bytes_per_s=12.5e9,
)  # fmt: skip
K = 1e9
clusters = st.builds(
    SyncCluster,
    num_servers=st.integers(1, 64),
    chips_per_server=st.integers(1, 16),
    num_aggregators=st.integers(1, 64),
    pcie_bytes_per_s=st.floats(1e9, 1e11),
    upi_bytes_per_s=st.floats(1e9, 1e11),
    nic_bytes_per_s=st.floats(1e8, 1e11),
    link_bytes_per_s=st.floats(1e8, 1e11),
)
small_clusters = st.builds(
    SyncCluster,
    num_servers=st.integers(1, 4),
    chips_per_server=st.integers(1, 4),
    num_aggregators=st.integers(1, 4),
    pcie_bytes_per_s=st.floats(1e9, 1e11),
    upi_bytes_per_s=st.floats(1e9, 1e11),
    nic_bytes_per_s=st.floats(1e8, 1e11),
    link_bytes_per_s=st.floats(1e8, 1e11),
)
"""Few enough chips that steps are quick to make."""


def test_equations_by_hand():
    """K = 1 GB on 4 servers of 4 chips, one parameter server, 16 GB/s inside, 1.25 GB/s outside.

    (1) 3 / 4 / 16 s. (2) 2 x 4 / 1.25 s. (3) their sum. (4) four times (2).
    """
    assert reduce_scatter_s(K, CLUSTER) == pytest.approx(0.75 / 16)
    assert psring_network(K, CLUSTER).total_s == pytest.approx(6.4)
    assert psring_s(K, CLUSTER) == pytest.approx(6.4 + 0.75 / 16)
    assert parameter_server_s(K, CLUSTER) == pytest.approx(25.6)
    assert passing_s(K, CLUSTER) == pytest.approx(0.8 + 0.75 / 16)


def test_the_workers_own_card_binds_with_many_parameter_servers():
    """Equation (2) alone would let time go to zero; 2 K / B of the worker's card stays."""
    assert psring_network(K, CLUSTER).bound == "aggregator"
    many = psring_network(K, replace(CLUSTER, num_aggregators=100))
    assert many.bound == "worker"
    assert many.total_s == pytest.approx(1.6)
    assert many.aggregator_s == pytest.approx(0.064)
    assert parameter_server_network(K, replace(CLUSTER, num_aggregators=100)).total_s == pytest.approx(6.4)


@given(clusters, st.floats(1, 1e12))
def test_the_ring_inside_cuts_the_network_by_the_chips_of_a_server(cluster, num_bytes):
    """(4) is n times (2); switches are never slower than parameter servers; time is linear in bytes."""
    n = cluster.chips_per_server
    outside_s = psring_network(num_bytes, cluster).total_s
    assert parameter_server_s(num_bytes, cluster) == pytest.approx(n * outside_s)
    assert passing_s(num_bytes, cluster) <= psring_s(num_bytes, cluster) * (1 + 1e-12)
    assert psring_s(2 * num_bytes, cluster) == pytest.approx(2 * psring_s(num_bytes, cluster))


def test_a_cluster_without_servers_or_rates_is_refused():
    """Counts from 1 on, rates above 0."""
    with pytest.raises(InputError):
        replace(CLUSTER, num_servers=0)
    with pytest.raises(InputError):
        replace(CLUSTER, nic_bytes_per_s=0.0)


def test_a_cluster_with_negative_delays_or_no_rate_of_a_switch_is_refused():
    """Delays from 0 on; optional rates above 0."""
    for wrong in ({"network_delay_s": -1.0}, {"ring_delay_s": -1e-9}, {"switch_bytes_per_s": 0.0},
                  {"slot_pool_bytes": 0.0}, {"server_bytes_per_s": -1.0}):  # fmt: skip
        with pytest.raises(InputError):
            replace(CLUSTER, **wrong)


@settings(max_examples=60, deadline=None)
@given(small_clusters, st.floats(1, 1e12))
def test_equations_come_out_of_the_steps(cluster, num_bytes):
    """The steps of PSRing, parameter server and PASSING cost what equations (3), (4) and section 4.2 say.

    The equations leave out the last all-gather, which streams behind the broadcast: they hold where the network, and
    not the ring, binds there. One server needs no parameter server for PSRing.
    """
    ring_s = reduce_scatter_s(num_bytes, cluster)
    assert seconds("parameter-server", num_bytes, cluster).total_s == pytest.approx(
        parameter_server_s(num_bytes, cluster)
    )
    if cluster.num_servers > 1:
        each_way_s = psring_network(num_bytes, cluster).total_s / 2
        exposed_s = max(0.0, ring_s - each_way_s)
        priced = seconds("psring", num_bytes, cluster)
        assert priced.total_s == pytest.approx(psring_s(num_bytes, cluster) + exposed_s)
        exposed_s = max(0.0, ring_s - num_bytes / cluster.network_bytes_per_s)
        assert seconds("passing", num_bytes, cluster).total_s == pytest.approx(
            passing_s(num_bytes, cluster) + exposed_s
        )


def test_every_strategy_by_hand():
    """K = 1 GB on 4 x 4 chips at 16 GB/s inside and 1.25 GB/s outside; a gigabyte takes 1/16 s and 0.8 s.

    Ring 30/16 K outside. Hierarchical ring 6/4 K inside, 6/4 K outside, K inside. Torus 3/4 K, 6/4 K, 3/4 K. Mesh
    2 x 4 chips x 6/4 of K/2 outside. Parameter server 2 x 16 K at the server. PSRing 3/4 K inside, then 2 x 4 K at the
    server. PASSING 3/4 K inside, then K outside. SwitchML and ATP 4 K outside.
    """
    inside, outside = 1 / 16, 0.8
    want = {
        "ring": (30 / 16 * outside, "worker"),
        "hierarchical-ring": (6 / 4 * inside + 6 / 4 * outside + inside, "worker"),
        "2d-torus": (6 / 4 * inside + 6 / 4 * outside, "worker"),
        "2d-mesh": (6 * outside, "worker"),
        "parameter-server": (32 * outside, "aggregator"),
        "psring": (3 / 4 * inside + 8 * outside, "aggregator"),
        "passing": (3 / 4 * inside + outside, "worker"),
        "switchml": (4 * outside, "worker"),
        "atp": (4 * outside, "worker"),
    }
    assert set(want) <= set(STRATEGIES)
    for name, (total_s, bound) in want.items():
        time = seconds(name, K, CLUSTER)
        assert (time.total_s, time.bound) == (pytest.approx(total_s), bound), name


def test_each_end_can_bind():
    """A slow ring, many rounds of delay, few slots, a switch of one shared port, and a slow parameter server."""
    slow_ring = seconds("passing", K, replace(CLUSTER, pcie_bytes_per_s=1e8))
    assert slow_ring.bound == "ring"
    assert slow_ring.total_s == pytest.approx(2 * 0.75 * 10)
    small = seconds("ring", 1e4, replace(CLUSTER, network_delay_s=0.01))
    assert small.bound == "delay"
    assert small.total_s == pytest.approx(30 * 0.01 + 30 / 16 * 1e4 / 1.25e9)
    slots = seconds("switchml", K, replace(CLUSTER, network_delay_s=1e-4, slot_pool_bytes=8192))
    assert slots.bound == "slots"
    assert slots.total_s == pytest.approx(K / 8192 * 2e-4 + 2e-4)
    shared = seconds("passing", K, replace(CLUSTER, switch_bytes_per_s=1.25e9))
    assert shared.bound == "aggregator"
    assert shared.total_s == pytest.approx(0.75 / 16 + 4 * 0.8)
    slow_server = seconds("psring", K, replace(CLUSTER, num_aggregators=8, server_bytes_per_s=1.25e8))
    assert slow_server.bound == "aggregator"
    assert slow_server.total_s == pytest.approx(0.75 / 16 + 2 * 4 * 8 / 8)


def test_atp_pays_for_what_finds_no_slot():
    """Half of K finds a slot: the parameter server receives, and sends, half of 16 K."""
    half = seconds("atp", K, replace(CLUSTER, slot_pool_bytes=K / 2))
    assert half.bound == "aggregator"
    assert half.total_s == pytest.approx(8 * 0.8)
    assert seconds("atp", K, replace(CLUSTER, slot_pool_bytes=2 * K)).total_s == pytest.approx(3.2)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(STRATEGIES)), small_clusters, st.floats(1, 1e12))
def test_prices_grow_with_bytes_and_delays_and_shrink_with_rates(name, cluster, num_bytes):
    """Linear in bytes without delays; a faster cluster is never slower; a delay adds its rounds."""
    time = seconds(name, num_bytes, cluster)
    assert seconds(name, 2 * num_bytes, cluster).total_s == pytest.approx(2 * time.total_s)
    faster = replace(
        cluster,
        pcie_bytes_per_s=2 * cluster.pcie_bytes_per_s,
        upi_bytes_per_s=2 * cluster.upi_bytes_per_s,
        nic_bytes_per_s=2 * cluster.nic_bytes_per_s,
        link_bytes_per_s=2 * cluster.link_bytes_per_s,
    )
    assert seconds(name, num_bytes, faster).total_s == pytest.approx(time.total_s / 2)
    late = seconds(name, num_bytes, replace(cluster, network_delay_s=1.0, ring_delay_s=1.0))
    size = 2 * cluster.num_servers * cluster.chips_per_server * cluster.num_aggregators
    rounds = check_steps(
        steps(name, cluster.num_servers, cluster.chips_per_server, size, num_aggregators=cluster.num_aggregators)
    ).num_rounds
    assert late.total_s - time.total_s == pytest.approx(rounds, rel=1e-6, abs=1e-3)


def test_one_chip_alone_needs_no_time_and_bad_arguments_are_named():
    """Nothing is sent among one worker; an unknown strategy gives the nearest name."""
    alone = replace(CLUSTER, num_servers=1, chips_per_server=1)
    assert (seconds("ring", K, alone).total_s, seconds("ring", K, alone).bound) == (0, "worker")
    with pytest.raises(InputError, match="did you mean 'psring'"):
        seconds("psrng", K, CLUSTER)
    with pytest.raises(InputError, match="num_bytes is -1"):
        seconds("ring", -1, CLUSTER)
