"""Known answers: equations (1) to (4) of the PASSING paper."""

from dataclasses import replace

import pytest
from hypothesis import given
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
)

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
