"""Random events, lying agents included: every invariant holds after each, and no step is illegal."""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.control.coordinator import Coordinator
from isthmus.control.events import AgentLost, JobDeleted, Restarted
from isthmus.control.records import ENDED, State
from isthmus.control.validators import violations
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.messages import ObservedPart, WorkerAddress
from tests.control.driver import RULES, Driver
from tests.control.simulated import plan

SITES, JOBS = ("a", "b", "c"), ("j0", "j1", "j2", "j3")
STATES = ("prepared", "refused", "running", "succeeded", "failed", "released")
sites, jobs = st.sampled_from(SITES), st.sampled_from(JOBS)
allowed = contextlib.suppress(ConflictError, NotFoundError)


class AnyPool(RuleBasedStateMachine):
    """Three clusters, four jobs; any event at any time, in the words of users and of agents that may lie."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Driver(*SITES)
        self.incarnation = 1

    @rule(job=jobs, manual=st.booleans(), restarts=st.integers(0, 2))
    def submit(self, job: str, manual: bool, restarts: int) -> None:
        with allowed:
            self.pool.submit(job, policy="manual" if manual else "auto", key=job, restarts=restarts)

    @rule(job=jobs, wanted=st.lists(st.lists(sites, min_size=1, max_size=5), max_size=2))
    def answer(self, job: str, wanted: list[list[str]]) -> None:
        if job in self.pool.asked:
            self.pool.answer(job, *(plan(*names, id=f"p{i}") for i, names in enumerate(wanted)))

    @rule(job=jobs, index=st.integers(0, 1))
    def choose(self, job: str, index: int) -> None:
        with allowed:
            self.pool.choose(job, f"p{index}")

    @rule(job=jobs)
    def cancel(self, job: str) -> None:
        with allowed:
            self.pool.cancel(job)

    @rule(job=jobs)
    def delete(self, job: str) -> None:
        with allowed:
            self.pool.tell(JobDeleted(now_s=self.pool.now_s, job_id=job))

    @rule(which=st.sets(sites, min_size=1))
    def obey(self, which: set[str]) -> None:
        self.pool.obey(*sorted(which))

    @rule(site=sites, index=st.integers(0, 3), state=st.sampled_from(("running", "succeeded", "failed")))
    def end_a_part(self, site: str, index: int, state: str) -> None:
        """One part ends, or goes on; the site's others are as ordered."""
        orders = self.pool.coordinator.orders(site)
        done = [self.pool.done(site, order) for order in orders]
        if index < len(done) and done[index].state == "running":
            done[index] = done[index].model_copy(update={"state": state})
        self.pool.report(site, *done)

    @rule(
        site=sites,
        said=st.lists(
            st.tuples(jobs, st.integers(1, 4), st.sampled_from(STATES), st.integers(0, 5)), max_size=3
        ),
        free=st.integers(0, 9),
        reborn=st.booleans(),
    )
    def lie(self, site: str, said: list[tuple[str, int, str, int]], free: int, reborn: bool) -> None:
        """A site reports what it likes: of parts that it has, had or never had."""
        self.incarnation += reborn
        parts = {
            (job, attempt): ObservedPart(
                job=job,
                attempt=attempt,
                state=state,
                workers=(WorkerAddress(rank=rank, cluster=site, host="h", port=1),),
            )
            for job, attempt, state, rank in said
        }
        self.pool.report(site, *parts.values(), free=free, incarnation=str(self.incarnation))

    @rule(site=sites, chips=st.integers(1, 6))
    def resize(self, site: str, chips: int) -> None:
        orders = self.pool.coordinator.orders(site)
        self.pool.report(site, *(self.pool.done(site, order) for order in orders), chips=chips)

    @rule(site=sites)
    def lose(self, site: str) -> None:
        self.pool.tell(AgentLost(now_s=self.pool.now_s, cluster=site))

    @rule(seconds=st.sampled_from((0.5, 2.0, 5.0, 30.0)))
    def wait(self, seconds: float) -> None:
        self.pool.wait(seconds)
        assert violations(self.pool.coordinator.state, self.pool.now_s) == []

    @rule()
    def restart(self) -> None:
        """The server dies and comes back: the fold of its log is what it knew."""
        again = Coordinator.replay(self.pool.log, RULES)
        assert _durable(again.state) == _durable(self.pool.coordinator.state)
        again.handle(Restarted(now_s=self.pool.now_s))
        self.pool.coordinator = again

    @invariant()
    def only_prepared_attempts_run(self) -> None:
        """A site is told to run a part only of a job whose every part was held, and of its present attempt."""
        for site in SITES:
            for order in self.pool.coordinator.orders(site):
                if order.desired != "released":
                    job = self.pool.coordinator.job(order.job)
                    assert order.attempt == job.attempt
                    assert job.state in ("preparing", "starting", "running")
                    assert (order.desired == "running") == (job.state != "preparing")
                    assert (order.rank_map is not None) == (job.state == "running")

    def teardown(self) -> None:
        """Once every agent is honest and heard, every job comes to its end or waits, and its chips come back."""
        for job in JOBS:
            with allowed:
                self.pool.cancel(job)
        for site in SITES:
            self.pool.report(site, chips=4)
        for _ in range(3):
            self.pool.obey()
        state = self.pool.coordinator.state
        assert all(job.state in ENDED for job in state.jobs.values())
        assert not any(record.promised for record in state.clusters.values())


def _durable(state: State) -> State:
    for record in state.clusters.values():
        record.heard_s = None
    state.touched.clear()
    return state


AnyPool.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyPool = AnyPool.TestCase
