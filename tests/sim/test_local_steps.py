"""Rules of local steps: groups of replicas train apart, and average every H steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.schedule import make_schedule
from isthmus.sim import Replica, SimulatedLink, SimulatedTraining, StageLoad, simulate_training

BYTES, RATE, DELAY_S = 1e8, 1e9, 0.01


def replica(cluster, seconds=0.1, stages=1, count=1):
    """A replica in one cluster, of stages with ten layers together."""
    loads = tuple(
        StageLoad(
            cluster=cluster,
            forward_s=seconds,
            backward_s=2 * seconds,
            layers=(10 * i // stages, 10 * (i + 1) // stages),
            gradient_bytes=BYTES / stages,
            averaged_bytes=BYTES / stages,
            local_bytes_per_s=1e10,
        )
        for i in range(stages)
    )
    return Replica(stages=loads, schedule=make_schedule("1f1b", stages, 4), count=count)


def run(*replicas, local_steps, rate=RATE, delay_s=DELAY_S):
    names = dict.fromkeys(load.cluster for one in replicas for load in one.stages)
    wires = {
        (a, b): SimulatedLink(name=f"{a}>{b}", bytes_per_s=rate, delay_s=delay_s)
        for a in names
        for b in names
        if a != b
    }
    return simulate_training(SimulatedTraining(replicas=replicas, links=wires, local_steps=local_steps))


def moved(found):
    return sum(link.num_bytes for link in found.links)


def test_an_iteration_is_the_mean_of_the_steps_between_two_averages():
    """The slowest group's step, and 1/H of the ring that averages: bytes, delays and all."""
    found = run(replica("a"), replica("b", 0.2), local_steps=10)
    ring_s = BYTES / RATE + 2 * DELAY_S  # two clusters: two steps of half the bytes each
    assert found.iteration_s == pytest.approx(4 * 0.6 + ring_s / 10)
    slow = next(stage for stage in found.stages if stage.replica == 1)
    assert slow.exposed_communication_s == pytest.approx(ring_s / 10)
    assert moved(found) == pytest.approx(2 * BYTES / 10)


def test_a_group_reduces_its_gradients_every_step():
    """Two replicas of one cluster wait for their own all-reduce, and for the average beside."""
    alone = run(replica("a", count=2), local_steps=1).iteration_s
    both = run(replica("a", count=2), replica("b", 0.01), local_steps=1000).iteration_s
    assert alone == pytest.approx(1.2 + BYTES / 1e10)
    assert alone < both < alone + 0.001


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 0.2), st.integers(1, 3)), min_size=2, max_size=4),
    st.integers(1, 50),
    st.integers(2, 10),
    st.floats(1e8, 1e11),
)
def test_more_local_steps_or_bandwidth_are_never_slower(kinds, steps, factor, rate):
    """What crosses goes with 1/H; no step is shorter than that of the slowest replica alone."""
    replicas = [replica(cluster, seconds, stages) for cluster, seconds, stages in kinds]
    few = run(*replicas, local_steps=steps, rate=rate)
    many = run(*replicas, local_steps=steps * factor, rate=rate)
    wide = run(*replicas, local_steps=steps, rate=rate * factor)
    assert many.iteration_s <= few.iteration_s * (1 + 1e-9)
    assert wide.iteration_s <= few.iteration_s * (1 + 1e-9)
    assert moved(many) == pytest.approx(moved(few) / factor)
    alone = max(run(one, local_steps=1).iteration_s for one in replicas)
    assert many.iteration_s >= alone * (1 - 1e-9)


@given(st.integers(2, 40), st.integers(2, 3))
def test_folding_equal_replicas_changes_nothing(steps, count):
    """Equal replicas run as one, with local steps too."""
    training = SimulatedTraining(
        replicas=(replica("a", count=count), replica("b", 0.15, stages=2, count=count)),
        links={(x, y): SimulatedLink(name=x + y, bytes_per_s=RATE, delay_s=DELAY_S) for x, y in ("ab", "ba")},
        local_steps=steps,
    )
    apart = simulate_training(training, merge_replicas=False)
    assert simulate_training(training).iteration_s == pytest.approx(apart.iteration_s, rel=1e-9)
    assert simulate_training(replace(training, local_steps=1)).iteration_s >= apart.iteration_s


def test_a_group_that_spans_clusters_reduces_over_its_wire_every_step():
    """Two replicas that cross a and b in turn are one group; a third in c only averages with them."""
    a, b = replica("a", stages=2).stages[0], replica("b", stages=2).stages[1]
    ahead = Replica(stages=(a, b), schedule=make_schedule("1f1b", 2, 4))
    back = Replica(stages=(replace(a, cluster="b"), replace(b, cluster="a")), schedule=make_schedule("1f1b", 2, 4))
    found = run(ahead, back, replica("c"), local_steps=10**6)
    sent = {(link.source, link.target): link.num_bytes for link in found.links}
    assert sent["a", "b"] == pytest.approx(BYTES, rel=1e-3)  # both halves, each a ring of two
    assert sent["b", "c"] < 1e-3 * BYTES
