"""Rules of stages of unlike layers: their tables, bounds on their pipelines, and merging small layers."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._planning import job, pool
from isthmus.core.model import Model
from isthmus.plan.profile.layer_matrix import merge_small_layers
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import cluster_slots
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.splits.split_layers import split_layers
from isthmus.plan.time.calibration import DATA_SHEET
from tests.plan.test_search_bound import UNLIKE
from tests.plan.test_split import lines, table

LAYERS = 7
POOL = pool({"a": [("A100", 16)], "b": [("V100", 16)]}, 100, 10)


def space_of(more, architecture, memory=1.0):
    """The space of a small model of unlike layers on A100s and V100s with a part of their memory."""
    sizes = {"hidden_size": 2048, "vocab_size": 1000, "num_hidden_layers": LAYERS, "intermediate_size": 8192}
    config = sizes | {"num_attention_heads": 16, "num_key_value_heads": 16} | more
    model = Model(
        path="m", architecture=architecture, num_layers=LAYERS, hidden_size=2048, vocab_size=1000,
        config=config,
    )  # fmt: skip
    task = TrainingWorkload(profile_model(model), 4096, "bf16", DATA_SHEET)
    space = SearchSpace(task, Routes(POOL, DATA_SHEET), SearchLimits())
    spots = []
    for cluster in POOL.clusters:
        for spot in cluster_slots(POOL, cluster, job(8).placement, None):
            chip = spot.chip.model_copy(update={"memory_bytes": round(spot.chip.memory_bytes * memory)})
            spots.append(type(spot)(cluster=spot.cluster, owner=spot.owner, group=spot.group, chip=chip, chips=16))
    return space, spots


@pytest.mark.parametrize("model", UNLIKE)
@pytest.mark.parametrize("memory", [1.0, 0.3, 0.15])
def test_rows_are_what_cutting_each_stage_gives(model, memory):
    """Seconds by range, shared between ranges of the same layers, equal `cut`; the least are below all."""
    space, spots = space_of(*model, memory)
    seat = space.cost_table(spots[0], space.degree_choices(spots[0])[1], 1)
    for ends, in_flight in itertools.product(itertools.product((False, True), repeat=2), (1, 4)):
        found = seat.range_times(*ends, in_flight, 4, 1)
        known = {(first, last): s for first, line in enumerate(found.by_first_layer) for last, s in line}
        for first, last in itertools.combinations(range(LAYERS + 1), 2):
            if (first == 0, last == LAYERS) != ends:
                assert (first, last) not in known
                continue
            cut = seat.fit_stage(first, last, in_flight, 4, 1)
            assert ((first, last) in known) == (cut is not None)
            if cut is not None:
                assert known[first, last] == pytest.approx(cut.total_s, rel=1e-9)
                assert found.least_times.seconds[last - first - 1] <= known[first, last]


@pytest.mark.parametrize("model", UNLIKE)
@pytest.mark.parametrize("memory", [1.0, 0.3])
def test_no_split_of_unlike_layers_beats_the_bounds_of_its_chain(model, memory):
    """A pipeline's bound and `split_bound` are below first micro-batch and pace of every split; `cut` finds one."""
    space, spots = space_of(*model, memory)
    for bound in itertools.islice(space.enumerate_pipelines(spots, 1, 16).all_pipelines(), 0, 400, 9):
        shape = bound.make("1f1b")
        found = shape.best_split(16)
        outlook, every = shape.split_bound(16), []
        for cuts in itertools.combinations(range(1, LAYERS), shape.num_stages - 1):
            chain = shape.with_layers(list(itertools.pairwise((0, *cuts, LAYERS))), 16)
            if chain is not None:
                every.append(chain)
                for one in (bound, outlook):
                    assert one.first_s <= chain.cost.first_s * (1 + 1e-9)
                    assert one.interval_s <= chain.cost.interval_s * (1 + 1e-9)
        assert (found is None) == (not every)


@settings(deadline=None)
@given(
    st.lists(st.floats(0.1, 3), min_size=1, max_size=7),
    st.lists(st.tuples(st.floats(0.2, 4), st.integers(1, 7)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.floats(0, 4),
)
def test_merging_small_layers_first_never_makes_a_split_better(layer_s, stages, micro_batches, smallest_s):
    """Every split of merged layers is one of the layers themselves: the exact split is at least as good."""
    times = [table(layer_s, *stage) for stage in stages]
    groups = merge_small_layers(layer_s, smallest_s)
    ends = [0, *(last for _, last in groups)]
    merged = [[[row[last] for last in ends] for first, row in enumerate(one) if first in ends[:-1]] for one in times]
    whole = split_layers(len(layer_s), [lines(one) for one in times], micro_batches)
    coarse = split_layers(len(groups), [lines(one) for one in merged], micro_batches)
    if coarse is not None:
        assert whole.total_s <= coarse.total_s * (1 + 1e-9)
    assert math.isclose(sum(layer_s), sum(sum(layer_s[a:b]) for a, b in groups), rel_tol=1e-9)
