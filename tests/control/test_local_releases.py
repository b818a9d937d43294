"""Rules of the ends of sites' own jobs in start forecasts: what counts, whose they are, and their bounds."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from isthmus.control.queries.explain_wait import answer_query, query_job
from isthmus.control.queries.forecast_inputs import MAX_LOCAL_RELEASES, local_releases
from isthmus.core.messages.agent_messages import ObservedLocalJob
from isthmus.core.pool_resource import PoolResource
from tests.control.driver import Driver
from tests.control.samples import plan

CARDS = PoolResource.chips("a", "g")


def local(name: str, chips: int, ends_at_s: float | None = None, *, running: bool = True) -> ObservedLocalJob:
    return ObservedLocalJob(name=name, chips={"g": chips}, level="middle", running=running, ends_at_s=ends_at_s)


class FullSite(Driver):
    """One site of four chips, all in use by its own users."""

    def __init__(self, *jobs: ObservedLocalJob, free: int = 0) -> None:
        super().__init__("a", chips=4)
        self.report("a", free=free, local=jobs)

    def releases(self) -> list[tuple[float, int]]:
        found = local_releases(self.coordinator.state.clusters["a"], self.now_s)
        return [(one.at_s, one.chips[CARDS]) for one in found]


def test_a_waiting_job_is_expected_to_start_when_users_jobs_end() -> None:
    """The scheduler of the site says when; without it nothing is promised."""
    for ends_at_s, start_s in ((700.0, 700.0), (None, None)):
        pool = FullSite(local("u1", 4, ends_at_s))
        pool.submit("j", plan("a", "a"))
        job = pool.coordinator.state.jobs["j"]
        (found,) = answer_query(query_job(pool.coordinator.state, job, pool.now_s, {}, None))
        assert found.start_s == start_s


def test_an_end_that_has_passed_is_now() -> None:
    """Slurm ends such a job within a minute."""
    pool = FullSite(local("u1", 1, 3.0))
    assert pool.releases() == [(pool.now_s, 1)]


def test_what_queued_users_jobs_want_goes_to_them_first() -> None:
    """Unless chips are free: then the site has taken it off already."""
    jobs = (local("u1", 2, 500.0), local("u2", 2, 900.0), local("waits", 3, running=False))
    assert FullSite(*jobs).releases() == [(900.0, 1)]
    assert FullSite(*jobs[1:], free=1).releases() == [(900.0, 2)]


@pytest.mark.attack
def test_a_site_promises_no_more_chips_than_it_has_and_a_bounded_number_of_ends() -> None:
    """Its claims count for its own chips."""
    many = tuple(local(f"u{n}", 4, 500.0 + n) for n in range(9))
    assert FullSite(*many).releases() == [(500.0, 4)]
    ones = tuple(local(f"u{n}", 1, 500.0 + n) for n in range(MAX_LOCAL_RELEASES * 2))
    assert len(FullSite(*ones).releases()) <= 4


@pytest.mark.attack
@pytest.mark.parametrize("ends_at_s", [-1, "nan", "inf", 1e13, "tomorrow"])
def test_an_end_beyond_the_bounds_is_no_report(ends_at_s: object) -> None:
    """It ends at the edge."""
    with pytest.raises(ValidationError):
        ObservedLocalJob.model_validate(local("u", 1).model_dump() | {"ends_at_s": ends_at_s})
