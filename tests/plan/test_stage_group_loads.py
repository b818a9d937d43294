"""The load ratio of node groups: equation 8 of the heterogeneous-training report, 3.2.2."""

import pytest

from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.search.finish.stage_group_loads import stage_group_loads
from isthmus.plan.time.predict import predict
from tests.plan.test_search_properties import PROFILE

GROUPS = {"fast": 2e14, "slow": 1e14}


def pool():
    """A cluster of two node groups, one of chips twice as fast as those of the other."""
    chips = [
        {
            "name": name, "peak_flop_per_s": {"bf16": flops}, "memory_bytes": 40 * 10**9, "power_w": 400,
            "memory_bandwidth_bytes_per_s": 2e12, "in_node_link": {"name": "x", "bandwidth_bytes_per_s": 2e11},
        }
        for name, flops in GROUPS.items()
    ]  # fmt: skip
    groups = [{"name": name, "chip": name, "nodes": 1, "chips_per_node": 2} for name in GROUPS]
    return Pool.model_validate({"chips": chips, "clusters": [{"name": "c", "owner": "o", "node_groups": groups}]})


def plan(*stages, **more):
    rows = [{"cluster": "c", **one} for one in stages]
    usual = {"micro_batches": 4, "micro_batch_size": 1, "sequence_length": 512, "precision": "bf16"}
    return Plan.model_validate({"id": "p", "stages": rows, **usual, **more})


def loads(given):
    found = stage_group_loads(given, pool(), predict(given, pool(), PROFILE))
    return {one.node_group: one for one in found}


def test_layers_in_proportion_to_speed_are_an_even_load():
    """A pipeline: twice the layers on chips twice as fast is N = 1, equal layers are N = 2, its inverse the other's."""
    even = loads(plan({"node_group": "fast", "layers": [0, 4]}, {"node_group": "slow", "layers": [4, 6]}))
    assert even["fast"].load_ratio == pytest.approx(1)
    equal = loads(plan({"node_group": "fast", "layers": [0, 3]}, {"node_group": "slow", "layers": [3, 6]}))
    assert equal["fast"].load_ratio == pytest.approx(2)
    assert equal["slow"].load_ratio == pytest.approx(0.5)
    assert equal["fast"].busy_share < equal["slow"].busy_share


def test_micro_batches_in_proportion_to_speed_are_an_even_load():
    """Data parallelism: K is the number of micro-batches."""
    stages = [{"node_group": name, "layers": [0, 6], "replica": place} for place, name in enumerate(GROUPS)]
    found = loads(plan(*stages, dp=2, micro_batches=4, replica_micro_batches=[4, 2]))
    assert found["fast"].load_ratio == pytest.approx(1)
    assert found["fast"].num_layer_samples == 2 * found["slow"].num_layer_samples == 24


def test_a_single_group_has_no_ratio_and_memory_is_that_of_its_fullest_chip():
    """Two stages in one group: nothing to compare with, and the peak of the larger one."""
    given = plan({"node_group": "fast", "layers": [0, 5]}, {"node_group": "fast", "layers": [5, 6]})
    one = loads(given)["fast"]
    peaks = [stage.peak_memory_bytes for stage in predict(given, pool(), PROFILE).result.stages]
    assert one.load_ratio is None
    assert one.peak_memory_bytes == max(peaks) > min(peaks)
