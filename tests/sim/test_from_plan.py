"""Rules of turning a plan and a pool into something to simulate."""

import pytest

from isthmus.core.errors import InputError
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.schedule import make_schedule
from isthmus.sim import Interference, StageLoad, simulate, training_of

POOL = Pool.model_validate(
    {
        "clusters": [
            {"name": n, "owner": n, "node_groups": [{"chip": "H20", "nodes": 1, "chips_per_node": 8}]}
            for n in ("a", "b", "c")
        ],
        "links": [{"between": ["a", "b"], "bandwidth_gbps": 1, "round_trip_ms": 20}],
    }
)
LOAD = StageLoad(cluster="?", forward_s=0.1, backward_s=0.2, boundary_bytes=1e6, gradient_bytes=1e6)


def plan(clusters="ab", dp=1, schedule="1f1b"):
    stages = tuple(
        Stage(replica=r, cluster=c, node_group="h20", layers=(i, i + 1))
        for r in range(dp)
        for i, c in enumerate(clusters)
    )
    return Plan(
        id="p",
        stages=stages,
        dp=dp,
        micro_batches=4,
        micro_batch_size=1,
        sequence_length=8,
        schedule=schedule,
    )


def test_a_plan_runs_over_the_links_of_its_pool():
    """Stages take place and layers from the plan, wires rate and delay from the links."""
    training = training_of(plan(dp=2), POOL, [LOAD] * 4)
    assert [s.cluster for r in training.replicas for s in r.stages] == ["a", "b"] * 2
    assert training.replicas[0].stages[1].layers == (1, 2)
    assert set(training.wires) == {("a", "b"), ("b", "a")}
    run = simulate(training)
    assert len(run.stages) == 4
    hop_s = 0.01 + 1e6 / training.wires["a", "b"].bytes_per_s
    assert run.iteration_s > 5 * 0.3 + 2 * hop_s


def test_another_schedule_and_other_traffic_can_be_tried():
    """What if: without changing plan or pool."""
    base = simulate(training_of(plan(), POOL, [LOAD] * 2)).iteration_s
    other = make_schedule("overlapped", 2, 4)
    assert simulate(training_of(plan(), POOL, [LOAD] * 2, schedules={0: other})).iteration_s <= base
    crowded = {("a", "b"): Interference(bytes_per_s=1e8)}
    assert simulate(training_of(plan(), POOL, [LOAD] * 2, interference=crowded)).iteration_s > base


def test_a_load_or_link_too_few_is_refused():
    """One load per stage; a link where the plan crosses."""
    with pytest.raises(InputError, match="1 loads for 2 stages"):
        training_of(plan(), POOL, [LOAD])
    with pytest.raises(InputError, match="no link from a to c"):
        training_of(plan("ac"), POOL, [LOAD] * 2)
