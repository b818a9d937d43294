"""Rules of simulated training with a named strategy: the default's price is the torus, and aggregators must be there."""

import itertools
from dataclasses import replace

import pytest

from isthmus.core.errors import InputError, PlanError
from isthmus.schedule import make_schedule
from isthmus.sim import (
    Replica,
    SimulatedLink,
    SimulatedTraining,
    StageLoad,
    price_strategies,
    simulate_training,
)
from isthmus.sim.synchronisation import SyncCluster, SyncServers
from isthmus.strategies import STRATEGIES

ALONE = SyncCluster(
    num_servers=4, chips_per_server=2, num_aggregators=1,
    pcie_bytes_per_s=1e9, upi_bytes_per_s=1e9, nic_bytes_per_s=1e8, link_bytes_per_s=1e8,
)  # fmt: skip
SERVERS = SyncServers(place="cluster 'a'", alone=ALONE, with_aggregators=(("switch", ALONE),))


def training(*clusters: str, count: int = 1, **fields: object) -> SimulatedTraining:
    """Return one replica of one stage per cluster, `count` times each, with 8 MB of gradients."""
    replicas = tuple(
        Replica(
            stages=(
                StageLoad(
                    cluster=cluster, forward_s=0.01, backward_s=0.02, gradient_bytes=8e6, local_bytes_per_s=1e9,
                    servers=SERVERS,
                ),
            ),
            schedule=make_schedule("1f1b", 1, 4),
            count=count,
        )
        for cluster in clusters
    )  # fmt: skip
    links = {
        (a, b): SimulatedLink(name=f"{a}>{b}", bytes_per_s=1e7, delay_s=0.005)
        for a, b in itertools.permutations(set(clusters), 2)
    }
    return SimulatedTraining(replicas=replicas, links=links, **fields)  # type: ignore[arg-type]


def reduction_s(given: SimulatedTraining) -> float:
    """Return the seconds after the last backward."""
    return simulate_training(given).iteration_s - 4 * 0.03


@pytest.mark.parametrize("clusters", ["ab", "abc"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_default_between_clusters_costs_what_the_torus_costs(clusters: str, count: int) -> None:
    """Equal clusters: the same time, the same bytes on every link, and the price that is stated."""
    default = training(*clusters, count=count)
    forced = replace(default, synchronisation="2d-torus")
    assert reduction_s(forced) == pytest.approx(reduction_s(default))
    sent = [[(link.source, link.target, link.num_bytes) for link in simulate_training(one).links if link.num_bytes]
            for one in (default, forced)]  # fmt: skip
    assert sent[0] == [(a, b, pytest.approx(num)) for a, b, num in sent[1]]
    (prices,) = price_strategies(default)
    assert prices.default_s == pytest.approx(reduction_s(default))
    torus = next(time for time in prices.times if time.strategy == "2d-torus")
    assert torus.total_s == pytest.approx(reduction_s(forced))


def test_a_ring_over_all_replicas_sends_more_between_clusters_by_hand() -> None:
    """2 clusters of 3 replicas, 8 MB: 10/6 of 8 MB in place of 8 MB over 10 MB/s, and 10 delays in place of 2."""
    ring = training("a", "b", count=3, synchronisation="ring")
    assert reduction_s(ring) == pytest.approx(10 / 6 * 0.8 + 10 * 0.005, rel=1e-6)
    assert reduction_s(replace(ring, synchronisation="2d-torus")) == pytest.approx(0.8 + 2 * 0.005 + 4 / 3 * 0.008)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("passing", 0.004 + 0.08), ("switchml", 0.16), ("ring", 14 / 8 * 0.08), ("2d-torus", 0.008 + 0.12)],
)
def test_inside_a_cluster_a_strategy_takes_its_own_time(name: str, seconds: float) -> None:
    """8 MB on 4 servers of 2 chips, 1 GB/s inside and 0.1 GB/s outside, by hand."""
    assert reduction_s(training("a", count=8, synchronisation=name)) == pytest.approx(seconds)


def test_strategies_without_their_aggregators_are_impossible() -> None:
    """A named error on force, a reason in the prices; no aggregator serves several clusters."""
    with pytest.raises(PlanError, match="'psring' needs a server: cluster 'a' has none"):
        simulate_training(training("a", count=8, synchronisation="psring"))
    with pytest.raises(PlanError, match="'passing' needs a switch: a group of several clusters has none"):
        simulate_training(training("a", "b", synchronisation="passing"))
    (prices,) = price_strategies(training("a", count=8))
    assert [name for name, _ in prices.impossible] == ["parameter-server", "psring", "atp"]
    assert {time.strategy for time in prices.times} == set(STRATEGIES) - {"parameter-server", "psring", "atp"}


def test_bad_strategies_are_named_and_one_replica_has_no_group() -> None:
    """An unknown name gives the nearest; a load without servers says so."""
    with pytest.raises(InputError, match="did you mean 'passing'"):
        simulate_training(training("a", count=8, synchronisation="pasing"))
    one = training("a", count=8, synchronisation="ring")
    bare = replace(one, replicas=(replace(one.replicas[0], stages=(replace(one.replicas[0].stages[0], servers=None),)),))
    with pytest.raises(InputError, match="no servers for strategy 'ring'"):
        simulate_training(bare)
    assert price_strategies(training("a")) == ()
