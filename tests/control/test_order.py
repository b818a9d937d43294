"""The global order of several owners' queues: the report's worked cases, and what holds of every instance."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.control.algorithms.global_order import Objective, Release, WaitingJob, global_order
from isthmus.control.algorithms.knapsack import pack_jobs
from isthmus.core.pool_resource import PoolResource

QUEUE1, QUEUE2, QUEUE3, Q, *OTHERS = (PoolResource.chips(name, "g") for name in ("q1", "q2", "q3", "q", "a", "b", "c"))

FREE = {QUEUE1: 6, QUEUE2: 6, QUEUE3: 6}
JOB1 = {QUEUE1: 8}
JOB2 = {QUEUE1: 5, QUEUE2: 5}
JOB3 = {QUEUE1: 6, QUEUE2: 6, QUEUE3: 6}
JOB4 = {QUEUE3: 4}


def _requests(deadline_s: float | None = None) -> list[WaitingJob]:
    needs = (JOB1, JOB2, JOB3, JOB4)
    return [
        WaitingJob(job=f"job{n}", needs=need, submitted_s=n, deadline_s=deadline_s if n == 1 else None)
        for n, need in enumerate(needs, start=1)
    ]


@pytest.mark.parametrize(
    ("objective", "deadline_s", "start"),
    [
        ("utilisation", None, {"job3"}),
        ("throughput", None, {"job4", "job2"}),
        ("deadline", 1000.0, {"job4"}),
    ],
)
def test_the_worked_cases_of_the_report(objective: Objective, deadline_s: float | None, start: set[str]) -> None:
    """Capacities 6, 6, 6 (4.3.1): the objective fixes what starts; queue1 is kept for Job1's deadline."""
    order = global_order(_requests(deadline_s), FREE, objective, now_s=10.0)
    assert set(order.start) == start
    assert order.exact
    assert order.reserve == (("job1",) if deadline_s else ())
    assert sorted(order.jobs) == ["job1", "job2", "job3", "job4"]


def test_first_come_first_served_keeps_chips_for_the_first_that_does_not_fit() -> None:
    """By arrival Job1 keeps queue1: neither Job2 nor Job3 overtakes it there; Job4 is not in its way."""
    order = global_order(_requests(), FREE, "arrival", now_s=10.0)
    assert (order.start, order.reserve) == (("job4",), ("job1",))


def test_a_hopeless_deadline_reserves_nothing() -> None:
    """A job that could not end in time even if it started now does not hold up the others."""
    order = global_order(_requests(deadline_s=5.0), FREE, "deadline", now_s=10.0)
    assert order.reserve == ()
    assert set(order.start) == {"job2", "job4"}


@pytest.mark.parametrize("objective", ["arrival", "utilisation", "throughput", "deadline"])
def test_no_job_is_overtaken_for_ever(objective: Objective) -> None:
    """Jobs of one chip that never stop coming let one of two chips start once its patience has ended."""
    running = [3.0, 4.0]
    large = WaitingJob(job="large", needs={Q: 2}, submitted_s=0.0)
    for now in range(1, 40):
        running = [end for end in running if end > now]
        small = [WaitingJob(job=f"s{now}-{n}", needs={Q: 1}, submitted_s=float(now)) for n in range(2)]
        order = global_order([large, *small], {Q: 2 - len(running)}, objective, float(now), patience_s=10)
        if "large" in order.start:
            return
        running += [now + 2.0 for _ in order.start]
    pytest.fail("the large job never started")


@pytest.mark.parametrize(("now_s", "reserves"), [(100.0, False), (100.1, True)])
def test_a_job_reserves_once_it_has_waited_longer_than_the_patience(now_s: float, reserves: bool) -> None:
    """Under any objective; a moment before, a later job that fits starts."""
    jobs = [
        WaitingJob(job="large", needs={Q: 4}, submitted_s=0.0),
        WaitingJob(job="small", needs={Q: 1}, submitted_s=50.0),
    ]
    order = global_order(jobs, {Q: 3}, "utilisation", now_s, patience_s=100.0)
    assert (order.start, order.reserve) == (((), ("large",)) if reserves else (("small",), ()))


@pytest.mark.parametrize(("deadline_s", "reserves"), [(60.0, True), (59.9, False)])
def test_a_deadline_reserves_while_the_job_can_still_end_in_time(deadline_s: float, reserves: bool) -> None:
    """Up to the last moment: 10 s from now and 50 s of training."""
    jobs = [WaitingJob(job="due", needs={Q: 4}, submitted_s=0.0, deadline_s=deadline_s, run_s=50.0)]
    order = global_order(jobs, {Q: 3}, "deadline", 10.0)
    assert order.reserve == (("due",) if reserves else ())


def test_jobs_with_a_deadline_go_by_it_and_then_by_their_arrival() -> None:
    """Those that have waited too long go first; the others follow by chips or count."""
    jobs = [
        WaitingJob(job="plain", needs={Q: 1}, submitted_s=40.0),
        WaitingJob(job="late", needs={Q: 1}, submitted_s=60.0, deadline_s=900.0),
        WaitingJob(job="soon", needs={Q: 1}, submitted_s=70.0, deadline_s=500.0),
        WaitingJob(job="early", needs={Q: 1}, submitted_s=50.0, deadline_s=900.0),
        WaitingJob(job="patient", needs={Q: 1}, submitted_s=0.0, deadline_s=950.0),
    ]
    order = global_order(jobs, {Q: 5}, "deadline", 100.0, patience_s=80.0)
    assert order.start == ("patient", "soon", "early", "late", "plain")


def test_a_higher_priority_goes_before_the_objective() -> None:
    """Although two jobs of lower priority would start in its place."""
    jobs = [
        WaitingJob(job="low", needs={Q: 2}, submitted_s=0.0, priority="low"),
        WaitingJob(job="middle", needs={Q: 2}, submitted_s=1.0),
        WaitingJob(job="high", needs={Q: 3}, submitted_s=2.0, priority="high"),
    ]
    assert global_order(jobs, {Q: 4}, "throughput", 5.0).start == ("high",)
    assert global_order(jobs[:2], {Q: 3}, "throughput", 5.0).jobs == ("middle", "low")


@pytest.mark.parametrize(("num", "exact"), [(64, True), (65, False)])
def test_a_choice_is_exact_while_all_jobs_are_packed_together(num: int, exact: bool) -> None:
    """64 of a priority; by arrival there is nothing to pack."""
    jobs = [WaitingJob(job=f"j{n}", needs={Q: 1}, submitted_s=float(n)) for n in range(num)]
    assert global_order(jobs, {Q: 3}, "throughput", 100.0).exact is exact
    assert global_order(jobs, {Q: 3}, "arrival", 100.0).exact
    others = [WaitingJob(job="low", needs={Q: 1}, submitted_s=0.0, priority="low")]
    assert global_order([*jobs, *others], {Q: 3}, "throughput", 100.0).exact is exact


def test_reserved_chips_are_lent_until_the_first_of_the_reservations_begins() -> None:
    """Two jobs reserve at one queue: the one may start at 50, the other at 90; a queue without chips lends none."""
    jobs = [
        WaitingJob(job="first", needs={Q: 3}, submitted_s=0.0),
        WaitingJob(job="second", needs={Q: 4}, submitted_s=1.0),
        WaitingJob(job="short", needs={Q: 2}, submitted_s=60.0, run_s=45.0),
        WaitingJob(job="long", needs={Q: 2}, submitted_s=61.0, run_s=55.0),
        WaitingJob(job="away", needs={QUEUE1: 1}, submitted_s=62.0, run_s=1.0),
    ]
    releases = [Release(at_s=150.0, chips={Q: 1}), Release(at_s=190.0, chips={Q: 4})]

    def order(*chosen: int) -> tuple[str, ...]:
        found = global_order(
            [jobs[n] for n in chosen], {Q: 2}, "utilisation", 100.0, releases=releases, patience_s=50.0
        )
        assert found.reserve == ("first", "second")
        return found.start

    assert order(0, 1, 2, 4) == ("short",)
    assert order(0, 1, 3, 4) == ()


def test_a_packing_cut_short_tries_each_job_that_was_left_out_first() -> None:
    """The best by value and by value per chip blocks two that are worth more together."""
    packing = pack_jobs([6.1, 5.0, 5.0], [{Q: 6}, {Q: 5}, {Q: 5}], {Q: 10}, node_limit=1)
    assert (packing.chosen, packing.value, packing.exact) == ((1, 2), 10.0, False)


def test_kept_chips_are_lent_to_a_job_that_gives_them_back_in_time() -> None:
    """A short job starts on chips kept for another, a long one and one of unknown length do not."""
    waiting = [
        WaitingJob(job="large", needs={Q: 4}, submitted_s=0.0),
        WaitingJob(job="unknown", needs={Q: 1}, submitted_s=1.0),
        WaitingJob(job="long", needs={Q: 1}, submitted_s=2.0, run_s=20.0),
        WaitingJob(job="short", needs={Q: 1}, submitted_s=3.0, run_s=9.0),
    ]
    ends = [Release(at_s=20.0, chips={Q: 2})]
    order = global_order(waiting, {Q: 2}, "arrival", 10.0, releases=ends)
    assert (order.start, order.reserve, order.wait) == (("short",), ("large",), ("unknown", "long"))
    assert global_order(waiting, {Q: 2}, "arrival", 10.0).start == ()


def test_a_job_may_end_in_the_moment_in_which_the_reservation_begins() -> None:
    """Also one that needs chips of a queue in which none are reserved."""
    waiting = [
        WaitingJob(job="large", needs={Q: 4}, submitted_s=0.0),
        WaitingJob(job="short", needs={Q: 1, QUEUE1: 1}, submitted_s=1.0, run_s=10.0),
    ]
    ends = [Release(at_s=20.0, chips={Q: 2})]
    order = global_order(waiting, {Q: 2, QUEUE1: 1}, "arrival", 10.0, releases=ends)
    assert (order.start, order.reserve) == (("short",), ("large",))


_needs = st.dictionaries(st.sampled_from(OTHERS), st.integers(1, 6), min_size=1)
_free = st.fixed_dictionaries({queue: st.integers(0, 9) for queue in OTHERS})
_objectives = st.sampled_from(["arrival", "utilisation", "throughput", "deadline"])


@st.composite
def _waiting(draw: st.DrawFn) -> list[WaitingJob]:
    return [
        WaitingJob(
            job=f"j{n}",
            needs=draw(_needs),
            submitted_s=draw(st.floats(0, 50)),
            priority=draw(st.sampled_from(["low", "middle", "high"])),
            deadline_s=draw(st.none() | st.floats(0, 200)),
            run_s=draw(st.floats(0, 60)),
        )
        for n in range(draw(st.integers(0, 8)))
    ]


@given(_waiting(), _free, _objectives, st.floats(0, 100))
def test_what_starts_fits_and_every_job_is_in_the_order_once(
    waiting: list[WaitingJob], free: dict[PoolResource, int], objective: Objective, patience_s: float
) -> None:
    """Started jobs take no more of any queue than it has free; the order lists each job exactly once."""
    order = global_order(waiting, free, objective, 100.0, patience_s=patience_s)
    assert sorted(order.jobs) == sorted(one.job for one in waiting)
    for queue, chips in free.items():
        assert sum(one.needs.get(queue, 0) for one in waiting if one.job in order.start) <= chips


@given(_waiting(), _free, _objectives, st.data())
def test_the_order_depends_on_the_set_of_jobs_alone(
    waiting: list[WaitingJob], free: dict[PoolResource, int], objective: Objective, data: st.DataObject
) -> None:
    """The same jobs in another order give the same answer."""
    shuffled = data.draw(st.permutations(waiting))
    assert global_order(waiting, free, objective, 100.0) == global_order(shuffled, free, objective, 100.0)


@given(st.lists(_needs, max_size=8), _free, st.sampled_from(["utilisation", "throughput"]))
def test_the_choice_is_the_exact_optimum_of_its_objective(
    needs: list[dict[PoolResource, int]], free: dict[PoolResource, int], objective: Objective
) -> None:
    """No set of jobs that fits uses more chips (utilisation), or is larger (throughput), than what starts."""
    waiting = [WaitingJob(job=f"j{n}", needs=need, submitted_s=n) for n, need in enumerate(needs)]
    order = global_order(waiting, free, objective, 100.0)

    def value(chosen: list[WaitingJob]) -> int:
        return sum(sum(one.needs.values()) if objective == "utilisation" else 1 for one in chosen)

    best = 0
    for size in range(len(waiting) + 1):
        for chosen in combinations(waiting, size):
            if all(sum(one.needs.get(queue, 0) for one in chosen) <= n for queue, n in free.items()):
                best = max(best, value(list(chosen)))
    assert value([one for one in waiting if one.job in order.start]) == best


@given(st.lists(st.tuples(st.floats(0.5, 9), _needs), max_size=9), _free)
def test_packing_equals_the_best_of_all_subsets(
    jobs: list[tuple[float, dict[PoolResource, int]]], free: dict[PoolResource, int]
) -> None:
    """Branch and bound finds the optimum that enumeration finds."""
    values, needs = [value for value, _ in jobs], [need for _, need in jobs]
    best = 0.0
    for size in range(len(jobs) + 1):
        for chosen in combinations(range(len(jobs)), size):
            if all(sum(needs[i].get(q, 0) for i in chosen) <= n for q, n in free.items()):
                best = max(best, sum(values[i] for i in chosen))
    packing = pack_jobs(values, needs, free, node_limit=10_000)
    assert packing.exact
    assert packing.value == pytest.approx(best)
    assert packing.value == pytest.approx(sum(values[i] for i in packing.chosen))


@given(st.lists(_needs, min_size=1, max_size=30), _free)
def test_a_packing_cut_short_still_fits_and_says_so(
    needs: list[dict[PoolResource, int]], free: dict[PoolResource, int]
) -> None:
    """With hardly any nodes the answer is feasible, and never called exact where the search was cut."""
    packing = pack_jobs([1.0] * len(needs), needs, free, node_limit=len(needs))
    for queue, chips in free.items():
        assert sum(needs[i].get(queue, 0) for i in packing.chosen) <= chips
    whole = pack_jobs([1.0] * len(needs), needs, free, node_limit=50_000)
    assert packing.value <= whole.value
    assert not packing.exact or packing.value == whole.value
