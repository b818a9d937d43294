"""Expected starts: what follows from who runs and who is ahead."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from isthmus.control.algorithms.global_order import Release, WaitingJob
from isthmus.control.algorithms.start_forecast import forecast_starts
from isthmus.core.pool_resource import PoolResource

P, Q = PoolResource.chips("p", "g"), PoolResource.chips("q", "g")


def _job(name: str, chips: int, submitted_s: float, run_s: float = 0.0, queue: PoolResource = Q) -> WaitingJob:
    return WaitingJob(job=name, needs={queue: chips}, submitted_s=submitted_s, run_s=run_s)


def test_a_job_starts_when_those_ahead_of_it_have_given_back_what_it_needs() -> None:
    """Two chips, one in use until 100, two jobs of two chips: the second starts when the first ends."""
    waiting = [_job("first", 2, 1, run_s=50), _job("second", 2, 2, run_s=10)]
    found = forecast_starts(waiting, {Q: 1}, [Release(at_s=100, chips={Q: 1})], "arrival", 10.0)
    assert found["first"].start_s == 100
    assert found["second"].start_s == 150
    assert found["second"].ahead == ("first",)
    assert found["first"].ahead == ()


def test_the_band_grows_with_what_lies_ahead() -> None:
    """Every run ahead may end sooner or later: the further back, the wider."""
    waiting = [_job(f"j{n}", 1, n, run_s=100) for n in range(4)]
    found = forecast_starts(waiting, {Q: 0}, [Release(at_s=100, chips={Q: 1})], "arrival", 0.0, spread=0.2)
    widths = [found[f"j{n}"].latest_s - found[f"j{n}"].earliest_s for n in range(4)]
    assert widths == sorted(widths)
    assert (found["j1"].earliest_s, found["j1"].start_s, found["j1"].latest_s) == (160, 200, 240)


def test_what_waits_for_a_run_of_unknown_length_has_no_expected_start() -> None:
    """Nothing is promised on chips whose release time is unknown."""
    waiting = [_job("a", 1, 1), _job("b", 1, 2, run_s=5)]
    found = forecast_starts(waiting, {Q: 0}, [Release(at_s=20, chips={Q: 1})], "arrival", 0.0)
    assert found["a"].start_s == 20
    assert math.isinf(found["b"].start_s)


def test_jobs_on_other_queues_are_not_ahead() -> None:
    """Only a job that wants chips of the same queue is ahead."""
    waiting = [_job("a", 9, 1, queue=P), _job("b", 1, 2)]
    found = forecast_starts(waiting, {P: 0, Q: 1}, [], "arrival", 5.0)
    assert (found["b"].start_s, found["b"].ahead) == (5.0, ())


def test_those_ahead_are_named_in_their_order_and_only_the_first() -> None:
    """Not by name; 20 of them."""
    waiting = [_job(f"j{99 - n}", 1, n, run_s=1.0) for n in range(22)]
    found = forecast_starts(waiting, {Q: 0}, [], "arrival", 50.0)
    assert found["j97"].ahead == ("j99", "j98")
    assert found["j78"].ahead == tuple(f"j{99 - n}" for n in range(20))
    assert [found[f"j{99 - n}"].place for n in range(22)] == list(range(1, 23))


def test_chips_are_released_at_their_own_time() -> None:
    """A job that needs two waits for the later of two releases; runs that end together release together."""
    releases = [Release(at_s=200, chips={Q: 1}), Release(at_s=100, chips={Q: 1})]
    assert forecast_starts([_job("a", 2, 1)], {Q: 0}, releases, "arrival", 0.0)["a"].start_s == 200
    waiting = [_job("a", 1, 1, run_s=100), _job("b", 1, 2, run_s=100), _job("c", 3, 3, run_s=1)]
    found = forecast_starts(waiting, {Q: 2}, [Release(at_s=100, chips={Q: 1})], "arrival", 0.0)
    assert [found[name].start_s for name in "abc"] == [0, 0, 100]


def test_a_queue_without_chips_starts_nothing_until_some_are_released() -> None:
    """It is not even named among the free ones."""
    waiting = [_job("a", 1, 1, run_s=5), _job("b", 1, 2, run_s=5, queue=P)]
    found = forecast_starts(waiting, {}, [Release(at_s=30, chips={Q: 1})], "arrival", 0.0)
    assert (found["a"].start_s, found["b"].start_s) == (30, math.inf)


def test_chips_of_a_started_job_are_free_again_only_at_its_end() -> None:
    """What is released at another queue in between starts none of the jobs behind it."""
    waiting = [_job("a", 1, 1, run_s=100), _job("b", 1, 2, run_s=10)]
    found = forecast_starts(waiting, {Q: 1}, [Release(at_s=50, chips={P: 1})], "arrival", 0.0)
    assert (found["a"].start_s, found["b"].start_s) == (0, 100)


def test_the_forecast_follows_the_objective_of_the_queue() -> None:
    """By arrival the large job keeps its place; by throughput the two small ones start before it."""
    waiting = [_job("large", 2, 1, run_s=10), *(_job(f"small{n}", 1, 2 + n, run_s=100) for n in range(2))]
    releases = [Release(at_s=20, chips={Q: 1})]
    by_arrival = forecast_starts(waiting, {Q: 1}, releases, "arrival", 10.0)
    assert [by_arrival[one.job].start_s for one in waiting] == [20, 30, 30]
    by_count = forecast_starts(waiting, {Q: 1}, releases, "throughput", 10.0)
    assert [by_count[one.job].start_s for one in waiting] == [120, 10, 20]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(1, 50)), min_size=1, max_size=7),
    st.sampled_from(["arrival", "utilisation", "throughput"]),
)
def test_every_job_that_can_run_is_given_a_start_within_its_band(jobs: list[tuple[int, float]], objective: str) -> None:
    """With four chips and known lengths all start, none before now, each between its bounds."""
    waiting = [_job(f"j{n}", chips, n, run_s=run_s) for n, (chips, run_s) in enumerate(jobs)]
    found = forecast_starts(waiting, {Q: 4}, [], objective, 100.0)  # type: ignore[arg-type]
    for one in waiting:
        each = found[one.job]
        assert 100.0 <= each.earliest_s <= each.start_s <= each.latest_s < math.inf
