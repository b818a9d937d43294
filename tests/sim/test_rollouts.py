"""Rules of simulated rollouts: what real ledgers do token by token, in closed form."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._rollout_virtual import VirtualRun, random_pipeline
from isthmus.core.errors import InputError
from isthmus.sim import DecodeRates, DecodeSite, RolloutPipeline, WeightsWay, simulate_rollouts
from isthmus.sim.rollouts.meet_deadlines import meet_deadlines
from isthmus.sim.rollouts.simulate_rollouts import warm_steps

RATES = DecodeRates(host_s=0.0, weights_s=0.01, row_s=1e-4, cached_token_s=0.0)
ALONE = RolloutPipeline(
    train_s=3.0, steps=4, group=4, batch_prompts=8, max_staleness=0, lengths=(100,), prompt_tokens=0,
    sites=(DecodeSite(name="", slots=32, rates=RATES),),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_a_step_takes_what_the_real_ledger_takes_token_by_token(seed: int) -> None:
    """Within 2 % of a run of `TrajectoryLedger` with every decode step, order, report and version as an event."""
    pipeline = random_pipeline(seed)
    warm = warm_steps(pipeline.max_staleness)
    steps_s = VirtualRun(pipeline, warm + pipeline.steps).run().steps_s[warm:]
    assert simulate_rollouts(pipeline).step_s == pytest.approx(sum(steps_s) / len(steps_s), rel=0.02)


def test_a_chip_that_takes_turns_adds_decoding_to_training() -> None:
    """32 samples of 100 tokens at .01 s a step, then 3 s of training; half of the slots take twice as long."""
    found = simulate_rollouts(ALONE)
    assert found.step_s == pytest.approx(4.0)
    assert found.sites[0].tokens == pytest.approx(3200)
    half = replace(ALONE, sites=(DecodeSite(name="", slots=16, rates=RATES),))
    assert simulate_rollouts(half).step_s == pytest.approx(5.0, abs=0.011)


def test_staleness_hides_the_way_of_the_weights() -> None:
    """At staleness 0 a step is training, the way down, decoding and the reports; at 1 training hides the rest."""
    way = WeightsWay(occupied_s=1.0, delay_s=0.05)
    apart = replace(ALONE, sites=(DecodeSite(name="b", slots=32, rates=RATES, way=way, delay_s=0.05),))
    at_once = simulate_rollouts(apart)
    assert at_once.step_s == pytest.approx(3.0 + 1.0 + 0.05 + 0.05 + 0.05 + 1.0 + 0.05, abs=0.02)
    assert at_once.sites[0].wait_weights_s > at_once.sites[0].wait_samples_s
    later = simulate_rollouts(replace(apart, max_staleness=1))
    assert later.step_s == pytest.approx(3.0)
    assert later.staleness == 1


@given(seed=st.integers(8, 10**6))
@settings(max_examples=20, deadline=None)
def test_no_group_is_staler_than_its_bound_and_seconds_add_up(seed: int) -> None:
    """Whatever the sites; of each engine decoding and waiting make up the step, pauses in turns apart."""
    pipeline = random_pipeline(seed, steps=3)
    found = simulate_rollouts(pipeline)
    assert 0 <= found.staleness <= pipeline.max_staleness
    assert found.step_s >= pipeline.train_s * (1 - 1e-9)
    for one in found.sites:
        spent_s = one.decode_s + one.wait_samples_s + one.wait_weights_s
        assert spent_s <= found.step_s * (1 + 1e-9) + 0.1
        assert pipeline.sites[0].way is None or spent_s == pytest.approx(found.step_s, rel=0.05)


@given(
    deadlines=st.lists(st.integers(3, 6), max_size=6), batch=st.integers(1, 3),
)  # fmt: skip
@settings(deadline=None)
def test_deadlines_are_met_if_some_order_meets_them(deadlines: list[int], batch: int) -> None:
    """The condition holds exactly if there is an order of training that is in time for all."""
    orders = itertools.permutations(deadlines)
    possible = any(all(3 + at // batch <= one for at, one in enumerate(order)) for order in orders)
    assert meet_deadlines(deadlines, 3, batch) == possible


def test_what_cannot_be_simulated_is_refused() -> None:
    """No engine, no slot, no length, and one in turns beside others."""
    for wrong in ({"sites": ()}, {"lengths": ()}, {"lengths": (0,)}, {"steps": 0}, {"max_staleness": -1},
                  {"sites": ALONE.sites * 2}):  # fmt: skip
        with pytest.raises(InputError):
            replace(ALONE, **wrong)
    with pytest.raises(InputError, match="0 sequences at once"):
        DecodeSite(name="a", slots=0, rates=RATES)
