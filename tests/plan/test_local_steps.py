"""Rules of plans with local steps or unlike micro-batches: what they take, and what they hold."""

import pytest

from isthmus.plan import predict, profile_model
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.stage_costs import stage_costs
from tests.plan.hand import model_of, plan_of, pool_of

MODEL = model_of(8)
PROFILE = profile_model(MODEL)
POOL = pool_of("H100", "A100", gbps=1.0, round_trip_ms=40.0)


def apart(**fields):
    """A replica of one stage in each of two clusters."""
    one = plan_of(clusters="a", dp=2)
    stages = (one.stages[0], one.stages[1].model_copy(update={"cluster": "b"}))
    return one.model_validate(dict(one) | {"stages": stages} | fields)


def test_the_average_between_clusters_is_spread_over_the_steps():
    """Bytes a step go with 1/H, and so does what the ring adds to the slower replica's step."""
    every, few, many = (predict(apart(local_steps=h), POOL, MODEL) for h in (1, 10, 100))
    assert every.iteration_s > few.iteration_s > many.iteration_s
    sent = [sum(link.num_bytes for link in one.result.links) for one in (few, many)]
    assert sent[0] == pytest.approx(10 * sent[1])
    assert sent[1] == pytest.approx(2 * 4 * PROFILE.num_parameters / 100)
    rate = simulated_links(apart(), POOL, DATA_SHEET)["a", "b"].bytes_per_s
    ring_s = 4 * PROFILE.num_parameters / rate + 2 * 0.02
    assert few.iteration_s - many.iteration_s == pytest.approx(ring_s * (1 / 10 - 1 / 100), rel=1e-6)
    assert any("every 10 steps" in note for note in few.assumptions)


def test_an_outer_optimizer_holds_eight_bytes_a_parameter():
    """The parameters as averaged last and a momentum, in fp32, dealt out as ZeRO deals the optimizer."""
    sizes = {"micro_batch_size": 1, "sequence_length": 512, "in_flight": 1, "is_first": True, "is_last": True}
    for dp, zero in ((1, 0), (4, 0), (4, 1)):
        plain = stage_memory(PROFILE, (0, 8), dp=dp, zero=zero, **sizes)
        outer = stage_memory(PROFILE, (0, 8), dp=dp, zero=zero, outer_optimizer=True, **sizes)
        dealt = dp if zero else 1
        assert outer.static_bytes - plain.static_bytes == pytest.approx(8 * PROFILE.num_parameters / dealt)


def test_zero_deals_out_within_the_group_alone():
    """A replica far away holds no part of another group's optimizer."""
    stage = {"zero": 1, "local_steps": 10}
    costs = stage_costs(apart(**stage), POOL, PROFILE, DATA_SHEET)
    assert costs[0].num_reducing == 1
    assert costs[0].memory.optimizer_bytes == pytest.approx((12 + 8) * PROFILE.num_parameters)


def test_a_replica_has_times_and_memory_of_its_own_size():
    """Each is what a plan of that size alone says; what is equal otherwise is no longer one kind."""
    plan = plan_of(clusters="a", dp=2, micro_batch_size=4, replica_micro_batch_sizes=(4, 1))
    for replica, size in enumerate((4, 1)):
        alone = plan_of(clusters="a", dp=2, micro_batch_size=size)
        mine = stage_costs(plan, POOL, PROFILE, DATA_SHEET, replica)[0]
        assert mine.load == stage_costs(alone, POOL, PROFILE, DATA_SHEET)[0].load
        assert mine.memory == stage_costs(alone, POOL, PROFILE, DATA_SHEET)[0].memory
    found = predict(plan, POOL, MODEL)
    assert found.samples == 8 * 5
    large, small = found.result.stages
    assert large.busy_s > small.busy_s
    assert large.peak_memory_bytes > small.peak_memory_bytes
