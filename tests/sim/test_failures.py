"""Rules of failures and checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.sim import CheckpointInterval, Failure, draw_failures, simulate_failures

failures = st.lists(st.builds(Failure, at_s=st.floats(0, 200), restart_s=st.floats(0, 20)), max_size=6)
checkpoints = st.builds(CheckpointInterval, num_iterations=st.integers(1, 20), stall_s=st.floats(0, 3))


@given(st.floats(0.5, 5), st.integers(0, 40), checkpoints, failures)
def test_every_second_is_accounted_for(iteration_s, iterations, kept, failed):
    """Useful, repeated, stalled and down time sum to the whole, and none is negative."""
    run = simulate_failures(iteration_s, iterations, kept, failed)
    parts = (run.useful_s, run.repeated_s, run.stall_s, run.down_s)
    assert sum(parts) == pytest.approx(run.total_s, abs=1e-6)
    assert all(part >= -1e-6 for part in parts)
    assert 0 <= run.goodput <= 1 + 1e-9


@given(st.floats(0.5, 5), st.integers(1, 40), checkpoints, failures)
def test_one_failure_costs_at_most_a_period_and_a_restart(iteration_s, iterations, kept, failed):
    """A failure adds no more than the work and stall since the last checkpoint, and its restart."""
    clean = simulate_failures(iteration_s, iterations, kept)
    run = simulate_failures(iteration_s, iterations, kept, failed)
    most = sum(kept.num_iterations * iteration_s + kept.stall_s + one.restart_s for one in failed)
    assert clean.total_s - 1e-6 <= run.total_s <= clean.total_s + most + 1e-6


def test_a_failure_by_hand():
    """Ten iterations of 1 s, a checkpoint of 0.5 s after every third, death at 8.2 s, 5 s to restart.

    1. Iterations 1 to 3, checkpoint: 3.5 s. 4 to 6, checkpoint: 7 s. 7: 8 s. 0.2 s into the eighth: dead.
    2. Back at 13.2 s with six done. 7 to 9 and a checkpoint: 16.7 s. 10: 17.7 s.
    """
    run = simulate_failures(
        1.0, 10, CheckpointInterval(num_iterations=3, stall_s=0.5), [Failure(at_s=8.2, restart_s=5)]
    )
    assert run.total_s == pytest.approx(17.7)
    assert run.repeated_s == pytest.approx(1.2)
    assert run.stall_s == pytest.approx(1.5)
    assert run.down_s == pytest.approx(5)
    assert run.as_dict()["goodput"] == pytest.approx(10 / 17.7)


def test_a_failure_during_the_checkpoint_loses_it():
    """What is not finished is not there to go back to."""
    run = simulate_failures(1.0, 4, CheckpointInterval(num_iterations=2, stall_s=1.0), [Failure(at_s=2.5, restart_s=0)])
    assert run.total_s == pytest.approx(2.5 + 2 + 1 + 2)


def test_drawn_failures_follow_their_mean_and_their_seed():
    """On average one per mean time; the same seed draws the same; no failure after the end."""
    drawn = draw_failures([100.0, 50.0], 5.0, 1e5, seed=1)
    assert drawn == draw_failures([100.0, 50.0], 5.0, 1e5, seed=1)
    assert drawn != draw_failures([100.0, 50.0], 5.0, 1e5, seed=2)
    by_stage = [sum(one.stage == stage for one in drawn) for stage in (0, 1)]
    assert by_stage == [pytest.approx(1000, rel=0.15), pytest.approx(2000, rel=0.1)]
    assert max(one.at_s for one in drawn) < 1e5
    assert [one.at_s for one in drawn] == sorted(one.at_s for one in drawn)


def test_numbers_without_sense_are_refused():
    """No time, no period, failures more often than always."""
    with pytest.raises(InputError):
        simulate_failures(0.0, 1, CheckpointInterval(num_iterations=1))
    with pytest.raises(InputError):
        simulate_failures(1.0, 1, CheckpointInterval(num_iterations=0))
    with pytest.raises(InputError):
        draw_failures([0.0], 1.0, 1.0)
