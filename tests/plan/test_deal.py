"""Rules of dealing micro-batches, recomputed layers, and replica groups."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.search.costs.recomputation import fewest_recomputed
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming, distribute_micro_batches
from isthmus.plan.search.splits.partitions import all_partitions, nested_partitions

paces = st.lists(
    st.builds(ReplicaTiming, st.floats(0.1, 5), st.floats(0.05, 2), st.integers(1, 2)), min_size=1, max_size=3
)


def end_s(paces, counts):
    return max(pace.end_s(m) for pace, row in zip(paces, counts, strict=True) for m in row)


@settings(deadline=None)
@given(paces, st.integers(1, 9))
def test_micro_batches_are_dealt_so_that_the_last_replica_ends_earliest(paces, total):
    """All are dealt, each replica has one, and no other way of dealing ends earlier."""
    found = distribute_micro_batches(paces, total)
    replicas = [pace for pace in paces for _ in range(pace.num_replicas)]
    ways = (
        [
            max(pace.end_s(m) for pace, m in zip(replicas, counts, strict=True))
            for counts in itertools.product(range(1, total + 1), repeat=len(replicas))
            if sum(counts) == total
        ]
        if len(replicas) <= 5
        else []
    )
    if len(replicas) > total:
        assert found is None
        return
    assert sum(map(sum, found)) == total
    assert min(map(min, found)) >= 1
    if ways:
        assert math.isclose(end_s(paces, found), min(ways), rel_tol=1e-6)


def test_seven_and_a_half_micro_batches_a_replica_are_eight_and_seven():
    """Task 12 of the report: 15 micro-batches over two equal replicas."""
    assert distribute_micro_batches([ReplicaTiming(1.0, 0.5, 2)], 15) == ((8, 7),)


@given(st.integers(1, 20), st.floats(1, 10), st.floats(0, 5), st.floats(0, 120))
def test_layers_are_recomputed_one_by_one_until_the_stage_fits(layers, each, working, limit):
    """The answer fits, one layer fewer does not, and None means that not even all are enough."""

    def stage_bytes(r):
        return each * (layers - 0.8 * r) + (working if r else 0.0)

    found = fewest_recomputed(layers, stage_bytes, limit)
    fitting = [r for r in range(layers + 1) if stage_bytes(r) <= limit]
    assert found == (fitting[0] if fitting else None)


def test_every_partition_is_yielded_once():
    """Their numbers are Bell's."""
    for count, bell in enumerate((1, 1, 2, 5, 15, 52)):
        found = list(all_partitions(count))
        assert len(found) == len(set(found)) == bell
        assert all(sorted(itertools.chain(*one)) == list(range(count)) for one in found)


def test_islands_join_along_the_fastest_links_first():
    """Two fast pairs joined by a slow link: alone, in pairs, together."""
    rates = {(0, 1): 10, (2, 3): 10, (1, 2): 1}
    found = nested_partitions(4, lambda i, j: rates.get((i, j), 0))
    assert found == (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),))
