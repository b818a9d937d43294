"""The table of events: each kind has one check and one effect, and a check changes nothing."""

from __future__ import annotations

import copy
from typing import get_args

import pytest

from isthmus.control.coordinator.event_rules import EVENT_RULES
from isthmus.control.state.events import (
    AgentLost,
    AgentReported,
    DeadlinePassed,
    DrainTimedOut,
    EpochBegan,
    Event,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    LogRestored,
    MakePlans,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    PoolSet,
    PreemptionAgreed,
    Restarted,
    SiteCordoned,
    SiteDraining,
    SiteLeft,
    UnknownJobEnded,
)
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.messages.agent_messages import AgentReport
from isthmus.core.plan import PlanSet
from tests.control.driver import Driver
from tests.control.samples import plan, submission

NOW_S = 200.0


def pool() -> Driver:
    """Two clusters; `run` starts, `open` waits for its plans, `ended` was cancelled."""
    driver = Driver("a", "b")
    driver.tell(EpochBegan(now_s=driver.now_s, epoch=3))
    driver.submit("run", plan("a", "b"), key="run")
    driver.submit("open")
    driver.submit("ended")
    driver.cancel("ended")
    return driver


def report(driver: Driver, free: int) -> AgentReported:
    """Return a report of cluster `a` with `free` chips."""
    sent = AgentReport(cluster=driver.clusters["a"], incarnation="1", free_chips={"g": free})
    return AgentReported.from_report(sent, NOW_S)


def admitted(driver: Driver) -> tuple[Event, ...]:
    """Return one event of each kind that changes the state."""
    return (
        JobSubmitted(now_s=NOW_S, job_id="new", user="u", submission=submission("new")),
        PlansMade(now_s=NOW_S, job_id="open", round=1, plans=PlanSet(plans=(plan("a"),))),
        PlanningFailed(now_s=NOW_S, job_id="open", round=1, reason="broken"),
        JobCancelled(now_s=NOW_S, job_id="run"),
        JobDeleted(now_s=NOW_S, job_id="ended"),
        report(driver, free=3),
        AgentLost(now_s=NOW_S, cluster="a"),
        DeadlinePassed(now_s=NOW_S, job_id="run", state="preparing", attempt=1),
        EpochBegan(now_s=NOW_S, epoch=4),
        PoolSet(now_s=NOW_S, objective="throughput"),
        PoolSet(now_s=NOW_S, needs_free_chips=True),
        SiteCordoned(now_s=NOW_S, cluster="a", by="x", role="owner", cordoned=True),
        SiteDraining(now_s=NOW_S, cluster="a", by="x", role="owner", deadline_s=NOW_S + 1),
    )


def unchanged(driver: Driver) -> tuple[Event, ...]:
    """Return events that repeat what is known, or that come too late."""
    return (
        JobSubmitted(now_s=NOW_S, job_id="run", user="u", submission=submission("run", key="run")),
        PlansMade(now_s=NOW_S, job_id="open", round=2, plans=PlanSet(plans=(plan("a"),))),
        PlansMade(now_s=NOW_S, job_id="none", round=1, plans=PlanSet(plans=(plan("a"),))),
        PlanningFailed(now_s=NOW_S, job_id="run", round=1, reason="broken"),
        PlanChosen(now_s=NOW_S, job_id="run", plan_id="p"),
        JobCancelled(now_s=NOW_S, job_id="ended"),
        report(driver, free=4),
        AgentLost(now_s=NOW_S, cluster="z"),
        DeadlinePassed(now_s=NOW_S, job_id="run", state="preparing", attempt=2),
        DeadlinePassed(now_s=NOW_S, job_id="none", state="preparing", attempt=1),
        EpochBegan(now_s=NOW_S, epoch=3),
        LogRestored(now_s=NOW_S, fence=3, cluster="a"),
        PoolSet(now_s=NOW_S),
        SiteCordoned(now_s=NOW_S, cluster="a", by="x", role="owner", cordoned=False),
        DrainTimedOut(now_s=NOW_S, cluster="a"),
        SiteLeft(now_s=NOW_S, cluster="a"),
        SiteLeft(now_s=NOW_S, cluster="z"),
    )


def test_every_kind_of_event_has_a_rule() -> None:
    """The table has exactly the members of `Event`, and cannot be changed."""
    assert set(EVENT_RULES) == set(get_args(get_args(Event)[0]))
    with pytest.raises(TypeError):
        EVENT_RULES[JobSubmitted] = EVENT_RULES[JobDeleted]  # type: ignore[index]


def test_an_event_that_changes_the_state_is_admitted_by_a_check_that_does_not() -> None:
    """`admit` leaves the state as it is; `handle` then changes it."""
    for event in admitted(pool()):
        driver = pool()
        state = driver.coordinator.state
        before = copy.deepcopy(state)
        assert driver.coordinator.admit(event), event.kind
        assert state == before, event.kind
        driver.coordinator.handle(event)
        assert state != before, event.kind


def test_an_event_that_changes_nothing_is_neither_admitted_nor_handled() -> None:
    """A repeated or late event has no effect, also if it is handled without being admitted first."""
    driver = pool()
    state = driver.coordinator.state
    before = copy.deepcopy(state)
    for event in unchanged(driver):
        assert not driver.coordinator.admit(event), event.kind
        assert driver.coordinator.handle(event) == [], event.kind
        assert state == before, event.kind


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (JobSubmitted(now_s=NOW_S, job_id="run", user="v", submission=submission("run")), ConflictError),
        (PlanChosen(now_s=NOW_S, job_id="none", plan_id="p"), NotFoundError),
        (PlanChosen(now_s=NOW_S, job_id="run", plan_id="q"), NotFoundError),
        (PreemptionAgreed(now_s=NOW_S, job_id="run", victims=()), ConflictError),
        (JobCancelled(now_s=NOW_S, job_id="none"), NotFoundError),
        (JobDeleted(now_s=NOW_S, job_id="run"), ConflictError),
        (UnknownJobEnded(now_s=NOW_S, job_id="run"), NotFoundError),
        (SiteCordoned(now_s=NOW_S, cluster="z", by="x", role="owner", cordoned=True), NotFoundError),
        (SiteDraining(now_s=NOW_S, cluster="z", by="x", role="owner", deadline_s=NOW_S + 1), NotFoundError),
    ],
)
def test_an_event_that_is_not_allowed_raises_before_any_change(event: Event, error: type[Exception]) -> None:
    """Both `admit` and `handle` raise, and the state stays as it was."""
    driver = pool()
    before = copy.deepcopy(driver.coordinator.state)
    for step in (driver.coordinator.admit, driver.coordinator.handle):
        with pytest.raises(error):
            step(event)
    assert driver.coordinator.state == before


def test_a_restart_is_handled_without_being_admitted() -> None:
    """It repeats the open planner requests and restarts the timeout of every agent."""
    driver = pool()
    event = Restarted(now_s=NOW_S)
    assert not driver.coordinator.admit(event)
    (again,) = driver.coordinator.handle(event)
    assert isinstance(again, MakePlans)
    assert (again.job_id, again.round) == ("open", 1)
    assert {record.last_report_s for record in driver.coordinator.state.clusters.values()} == {NOW_S}
