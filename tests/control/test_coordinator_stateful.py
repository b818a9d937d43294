"""Random events, lying agents included: every invariant holds after each, and no step is illegal."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.agent_orders import held_parts
from isthmus.control.state.events import (
    AccountsSet,
    AgentLost,
    EpochBegan,
    JobDeleted,
    LogRestored,
    PoolSet,
    Restarted,
    SiteCordoned,
    SiteDraining,
    SiteLeft,
    UnknownJobEnded,
)
from isthmus.control.state.invariants import violations
from isthmus.control.state.job_records import TERMINAL_STATES, PoolState
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.messages.agent_messages import ObservedLocalJob, ObservedPart, WorkerAddress
from isthmus.core.owner.accounts import Accounts
from isthmus.core.plan import Plan, Prediction
from isthmus.core.pool import Link
from tests.control.driver import RULES, Driver
from tests.control.samples import plan

pytestmark = pytest.mark.integration

SITES = ("a", "b", "c")
STATES = ("queued", "ready", "prepared", "refused", "running", "succeeded", "failed", "released")
sites, numbers = st.sampled_from(SITES), st.integers(0, 5)
shapes = st.sampled_from(("a", "b", "ab", "abc", "ccb", "aabb", "bbbbb", "aa|b", "b|ac", "c|ab|a"))
allowed = contextlib.suppress(ConflictError, NotFoundError)
priorities = st.sampled_from(("low", "middle", "high"))
limited = st.tuples(*[st.tuples(st.integers(0, 3), st.none() | st.integers(3, 6))] * 2)
"""Guaranteed chips and the limit on chips of two projects."""


LINKS = tuple(
    Link.model_validate({"from": one, "to": other, "bandwidth_gbps": 1, "delay_ms": 5})
    for one in SITES
    for other in SITES
    if one != other
)


def crossing(candidate: Plan) -> Plan:
    """Give a plan 0.4 Gbit/s at each of its hops and for its gradients, and a TB at each of its stages."""
    ends = itertools.permutations(candidate.clusters, 2) if candidate.dp > 1 else ()
    predicted = Prediction(
        iteration_s=1,
        tgs_tokens_per_card_s=1,
        samples_per_s=1,
        peak_memory_bytes=(),
        wan_gbps=(0.4,) * len(candidate.all_hops()),
        gradient_gbps={f"{a}>{b}": 0.4 for a, b in ends},
        storage_bytes=(10**12,) * len(candidate.stages),
    )
    return candidate.model_copy(update={"predicted": predicted})


class AnyPool(RuleBasedStateMachine):
    """Three clusters, any number of jobs; any event at any time, of users and of agents that may lie."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Driver(*SITES)
        self.pool.tell(PoolSet(now_s=1, links=LINKS))
        self.set_limits(((0, None), (0, None)), None)
        self.incarnation = 1
        self.submitted = 0

    def job(self, number: int) -> str:
        """Name one of the latest jobs."""
        return f"j{max(0, self.submitted - 1 - number)}"

    @rule(projects=limited, hours=st.none() | st.integers(0, 1), priority=priorities, site=st.none() | sites)
    def set_accounts(
        self, projects: tuple[tuple[int, int | None], ...], hours: int | None, priority: str, site: str | None
    ) -> None:
        """The operator guarantees chips to two projects, and limits them and their only user, unless more is held."""
        with allowed:
            self.set_limits(projects, hours, priority, site)

    def set_limits(
        self, projects: tuple[tuple[int, int | None], ...], hours: int | None, priority: str = "middle",
        site: str | None = None,
    ) -> None:  # fmt: skip
        rows = [
            {"name": name, "members": ["u"], "guaranteed_chips": have, "limits": {"chips": most}, "priority": priority}
            for name, (have, most) in zip("pq", projects, strict=True)
        ]
        placed: list[dict[str, Any]] = []
        if site is not None:  # the first of them at one site
            have, most = projects[0]
            placed = [{"cluster": site, "chips": have}]
            limits = {} if most is None else {"chips_at": [{"cluster": site, "node_group": "g", "chips": most}]}
            rows[0] |= {"guaranteed_at": placed, "limits": limits, "guaranteed_chips": 0}
        total = sum(have for have, _ in projects)
        if total:  # both below one that may hold no more than it is guaranteed
            rows = [row | {"parent": "lab"} for row in rows]
            rows.append({"name": "lab", "guaranteed_at": placed, "limits": {"chips": max(3, total)}})
            rows[-1]["guaranteed_chips"] = total - sum(one["chips"] for one in placed)
        users = [{"name": "u", "limits": {"chip_hours_per_month": hours}}]
        given = Accounts.model_validate({"projects": rows, "users": users})
        self.pool.tell(AccountsSet(now_s=self.pool.now_s, by="root", accounts=given, ranks_waiting=True))

    @rule(
        first=shapes, second=shapes, manual=st.booleans(), restarts=st.integers(0, 2), priority=priorities,
        project=st.sampled_from((None, "p", "q")),
    )  # fmt: skip
    def submit(
        self, first: str, second: str, manual: bool, restarts: int, priority: str, project: str | None = None
    ) -> None:
        """A job comes in and, if it was its turn, is planned: with no plan where both shapes are the same."""
        job = f"j{self.submitted}"
        self.submitted += 1
        policy = "manual" if manual else "auto"
        self.pool.submit(job, policy=policy, key=job, restarts=restarts, priority=priority, project=project)
        self.plan(first, second)

    def plan(self, first: str, second: str) -> None:
        plans = [crossing(plan(*first, name="p0")), crossing(plan(*second, name="p1"))]
        for asked in list(self.pool.asked):
            self.pool.answer(asked, *(plans if first != second else []))

    @rule(first=shapes, second=shapes)
    def work(self, first: str, second: str) -> None:
        """The planner, the users and all agents do what is asked of them."""
        self.plan(first, second)
        for job in self.pool.coordinator.list_jobs():
            if job.state == "choosing":
                self.pool.choose(job.id, "p0")
        self.pool.obey()

    @rule(which=st.sets(sites, min_size=1))
    def work_at_some(self, which: set[str]) -> None:
        self.pool.obey(*sorted(which))

    @rule(number=numbers, index=st.integers(0, 1))
    def choose(self, number: int, index: int) -> None:
        with allowed:
            self.pool.choose(self.job(number), f"p{index}")

    @rule(first=shapes, turns=st.integers(0, 3))
    def push_in(self, first: str, turns: int) -> None:
        """A job of high priority comes, its user takes a plan for which chips are lacking, and agrees.

        All sites then execute their orders for some turns.
        """
        job = f"j{self.submitted}"
        self.submitted += 1
        self.pool.submit(job, policy="manual", key=job, priority="high")
        for turn in range(2):
            if job in self.pool.asked and self.pool.state(job) == "planning":
                self.pool.answer(job, *([crossing(plan(*first, name="p0"))] if turn else []))
        with allowed:
            self.pool.choose(job, "p0")
        self.preempt(0)
        for _ in range(turns):
            self.pool.obey()

    @rule(number=numbers)
    def preempt(self, number: int) -> None:
        """The user agrees to whatever a job is offered."""
        with allowed:
            if self.pool.coordinator.job_view(self.job(number)).offer:
                self.pool.preempt(self.job(number))

    @rule(which=st.sets(sites, min_size=1))
    def work_unprotected(self, which: set[str]) -> None:
        """Some sites execute their orders, but no checkpoint is verified yet."""
        for site in sorted(which):
            done = [self.pool.done(site, order) for order in self.pool.coordinator.orders(site)]
            self.pool.report(site, *(one.model_copy(update={"protection": None}) for one in done))

    @rule(site=sites, chips=st.integers(0, 3), running=st.booleans(), level=priorities)
    def local_job(self, site: str, chips: int, running: bool, level: str) -> None:
        """A user of a site has a job of the site's own, or none any more."""
        own = ObservedLocalJob(name="own", chips={"g": max(1, chips)}, level=level, running=running, preemptible=True)
        done = [self.pool.done(site, order) for order in self.pool.coordinator.orders(site)]
        self.pool.report(site, *done, local=(own,) if chips else ())

    @rule(
        epochs=st.integers(1, 3),
        objective=st.sampled_from(("arrival", "utilisation", "throughput", "deadline")),
    )
    def new_leader(self, epochs: int, objective: str) -> None:
        """Another server speaks for the pool, and its operator wants another order of the queue."""
        now_s, state = self.pool.now_s, self.pool.coordinator.state
        self.pool.tell(EpochBegan(now_s=now_s, epoch=state.epoch + epochs))
        self.pool.tell(PoolSet(now_s=now_s, links=LINKS, objective=objective, patience_s=30))

    @rule(fence=st.integers(0, 3), site=st.sampled_from((*SITES, None)), gone=st.sets(sites, max_size=2))
    def restore_log(self, fence: int, site: str | None, gone: set[str]) -> None:
        """The log turns out to be that of a backup: by a command, or by the fence of a site."""
        epoch = self.pool.coordinator.epoch
        event = LogRestored(
            now_s=self.pool.now_s, fence=epoch + fence if fence else 0, cluster=site, gone=tuple(sorted(gone))
        )
        self.pool.tell(event)
        assert self.pool.coordinator.epoch > max(epoch, event.fence)

    @rule(number=numbers)
    def end_unknown(self, number: int) -> None:
        with allowed:
            self.pool.tell(UnknownJobEnded(now_s=self.pool.now_s, job_id=self.job(number)))

    @rule(number=numbers, delete=st.booleans())
    def cancel_or_delete(self, number: int, delete: bool) -> None:
        with allowed:
            if delete:
                self.pool.tell(JobDeleted(now_s=self.pool.now_s, job_id=self.job(number)))
            else:
                self.pool.cancel(self.job(number))

    @rule(which=st.sets(sites, min_size=1), state=st.sampled_from(("succeeded", "succeeded", "failed")))
    def end_parts(self, which: set[str], state: str) -> None:
        """At some sites every part that runs comes to its end."""
        for site in sorted(which):
            done = [self.pool.done(site, order) for order in self.pool.coordinator.orders(site)]
            ended = [one.model_copy(update={"state": state}) if one.state == "running" else one for one in done]
            self.pool.report(site, *ended)

    @rule(number=numbers, state=st.sampled_from(STATES))
    def misbehave(self, number: int, state: str) -> None:
        """A site reports any state of one part that it has; of the others, what was ordered."""
        with allowed:
            for site in self.pool.coordinator.job_view(self.job(number)).parts[:1]:
                done = [self.pool.done(site.cluster, o) for o in self.pool.coordinator.orders(site.cluster)]
                mine = self.job(number)
                said = [one.model_copy(update={"state": state}) if one.job == mine else one for one in done]
                self.pool.report(site.cluster, *said)

    @rule(
        site=sites,
        said=st.lists(st.tuples(numbers, st.integers(1, 3), st.sampled_from(STATES), numbers), max_size=2),
        free=st.integers(0, 9),
        reborn=st.booleans(),
    )
    def lie(self, site: str, said: list[tuple[int, int, str, int]], free: int, reborn: bool) -> None:
        """A site reports what it likes: of parts that it has, had or never had."""
        self.incarnation += reborn
        parts = {
            (number, attempt): ObservedPart(
                job=self.job(number),
                attempt=attempt,
                state=state,
                workers=(WorkerAddress(rank=rank, cluster=site, host="h", port=1),),
            )
            for number, attempt, state, rank in said
        }
        self.pool.report(site, *parts.values(), free=free, incarnation=str(self.incarnation))

    @rule(site=sites, chips=st.integers(1, 6))
    def resize(self, site: str, chips: int) -> None:
        orders = self.pool.coordinator.orders(site)
        self.pool.report(site, *(self.pool.done(site, order) for order in orders), chips=chips)

    @rule(site=sites, name=st.sampled_from(("g", "x")))
    def regroup(self, site: str, name: str) -> None:
        """The site's owner calls its node group otherwise."""
        here = self.pool.clusters[site]
        group = here.node_groups[0].model_copy(update={"name": name})
        self.pool.clusters[site] = here.model_copy(update={"node_groups": (group,)})
        orders = self.pool.coordinator.orders(site)
        self.pool.report(site, *(self.pool.done(site, order) for order in orders))

    @rule(site=sites)
    def lose(self, site: str) -> None:
        self.pool.tell(AgentLost(now_s=self.pool.now_s, cluster=site))

    @rule(site=sites, act=st.sampled_from(("cordon", "open", "drain", "leave")), limit_s=st.sampled_from((1.0, 60.0)))
    def close(self, site: str, act: str, limit_s: float) -> None:
        """A site is closed, opened, drained, or leaves once it is empty; its next report lets it join again."""
        told, now_s = self.pool.tell, self.pool.now_s
        with allowed:
            if act in ("cordon", "open"):
                told(SiteCordoned(now_s=now_s, cluster=site, by="x", role="admin", cordoned=act == "cordon"))
            else:
                until_s, leaves = now_s + limit_s, act == "leave"
                told(SiteDraining(now_s=now_s, cluster=site, by="x", role="owner", deadline_s=until_s, leaves=leaves))
        if self.pool.coordinator.may_leave(site):
            told(SiteLeft(now_s=now_s, cluster=site))
            assert self.pool.coordinator.orders(site) == ()
            self.pool.report(site)

    @invariant()
    def drained_sites_get_nothing_new(self) -> None:
        """A site that takes no parts has no part that the coordinator wants held or queued for a waiting job."""
        state = self.pool.coordinator.state
        for record in state.clusters.values():
            for part in record.parts.values() if record.drain is not None else ():
                held = state.jobs[part.job].state in ("preempting", "preparing", "starting")
                assert part.desired == "released" or not held, "nothing may start at a site that is drained"

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

    @rule()
    def start_from_snapshot(self) -> None:
        """The server starts from a snapshot: state, indexes and the order of every dictionary are what they were."""
        known = self.pool.coordinator.state
        again = restore_state(serialize_state(self.pool.coordinator.state))
        assert again == known
        assert again.indexes == known.indexes
        assert list(again.jobs) == list(known.jobs)
        assert list(again.live_jobs) == list(known.live_jobs)
        for name, record in again.clusters.items():
            assert list(record.parts) == list(known.clusters[name].parts)
            assert all(part is again.jobs[part.job].parts[part.attempt, name] for part in record.parts.values())
        self.pool.coordinator.state = again

    @invariant()
    def only_prepared_attempts_run(self) -> None:
        """A site is ordered to run only a part of the present attempt of a job whose every part was held.

        Besides, a part goes on of which the log of a backup knows nothing. Its order says nothing to start it with.
        """
        for site in SITES:
            unknown = held_parts(self.pool.coordinator.state, site)
            orders = self.pool.coordinator.orders(site)
            assert len({(order.job, order.attempt) for order in orders}) == len(orders)
            for order in orders:
                if (order.job, order.attempt) in unknown:
                    assert (order.desired, order.spec, order.plan, order.rank_map) == ("running", None, None, None)
                    assert (order.job, order.attempt) in self.pool.coordinator.state.clusters[site].reported_parts
                elif order.desired != "released":
                    job = self.pool.coordinator.job_view(order.job)
                    assert order.attempt == job.attempt
                    wanted = {"preparing": "prepared", "starting": "running", "running": "running"}
                    wanted |= {"preempting": "ready", "waiting": "queued", "blocked": "queued"}
                    assert order.desired == wanted[job.state]
                    assert (order.rank_map is not None) == (job.state == "running")

    def teardown(self) -> None:
        """Once all is cancelled and every agent is honest and heard, no chip is held."""
        for job in self.pool.coordinator.list_jobs():
            with allowed:
                self.pool.cancel(job.id)
        for site in SITES:
            self.pool.report(site, chips=4, local=())
        for _ in range(5):
            self.pool.obey()
        state = self.pool.coordinator.state
        assert all(job.state in TERMINAL_STATES for job in state.jobs.values())
        assert not any(record.parts for record in state.clusters.values())
        assert not state.allocated_kbps


def _durable(state: PoolState) -> PoolState:
    for record in state.clusters.values():
        record.last_report_s = None
    state.changed_jobs.clear()
    return state


AnyPool.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyPool = AnyPool.TestCase


def test_a_part_that_runs_after_a_restore_may_be_of_a_job_that_the_log_has_not_got() -> None:
    """The site that brought the old log to light reports a running part of an unknown job: it goes on, once.

    1. The server starts on the log of a backup and learns it from the fence of site `a`.
    2. It restarts. `a` reports attempt 1 of job `j0`, which the log does not have, and is ordered to let it run.
    3. A job gets the name `j0` and its attempt the number 1: `a` has one order for it, that of the log.
    """
    pool = AnyPool()
    pool.restart()
    pool.restore_log(fence=0, gone=set(), site="a")
    pool.restart()
    pool.lie(free=0, reborn=False, said=[(0, 1, "running", 0)], site="a")
    pool.only_prepared_attempts_run()
    assert pool.pool.orders("a") == {("j0", 1): "running"}
    pool.lie(free=4, reborn=False, said=[], site="b")
    pool.lie(free=4, reborn=False, said=[], site="c")
    pool.lie(free=4, reborn=False, said=[(0, 1, "running", 0)], site="a")
    pool.submit(first="a", second="b", manual=False, restarts=0, priority="middle")
    pool.only_prepared_attempts_run()
    assert pool.pool.orders("a") == {("j0", 1): "prepared"}
    pool.teardown()
