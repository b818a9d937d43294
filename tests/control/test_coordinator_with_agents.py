"""Joint preemption between the real coordinator and the real agents' machines: who is ended, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.events import (
    AgentReported,
    Event,
    JobCancelled,
    JobSubmitted,
    MakePlans,
    PlanChosen,
    PlansMade,
    PreemptionAgreed,
    VictimNamed,
)
from isthmus.control.state.invariants import violations
from isthmus.core.messages.agent_messages import AgentOrders, VerifiedCheckpoint, WorkerAddress
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.plan import Plan, PlanSet
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import (
    LocalJob,
    LocalJobsObserved,
    ObservedWorker,
    OrdersReceived,
    RequestCheckpoint,
    SiteInstruction,
    StartWorker,
    StopWorker,
    WorkersObserved,
)
from isthmus.site.parts import PartKey, SitePart
from isthmus.site.site_invariants import check_site
from tests.control.samples import cluster, plan, submission

LENDS = OwnerPolicy(preemptible_from="low", grace_s=0)


class Site:
    """A machine with processes that run until they are ordered to end; `saves`: they save on request."""

    def __init__(self, name: str, policy: OwnerPolicy) -> None:
        self.cluster, self.saves = cluster(name), True
        self.machine = SiteMachine(name, DeviceIdAllocator({"g": tuple("0123")}), policy=policy)
        self.local: list[LocalJob] = []
        self.running: dict[tuple[str, int, int], bool] = {}
        self.saved: set[PartKey] = set()

    def look(self, now_s: float) -> None:
        """See local jobs and workers."""
        self._do(self.machine.handle(LocalJobsObserved(now_s=now_s, jobs=tuple(self.local))))
        self._do(self.machine.handle(WorkersObserved(now_s=now_s, workers=tuple(self._workers()))))
        check_site(self.machine)

    def _workers(self) -> Iterator[ObservedWorker]:
        for part in self.machine.parts.values():
            for rank, worker in part.workers.items():
                if worker.live:
                    yield self._worker(part, rank)

    def _worker(self, part: SitePart, rank: int) -> ObservedWorker:
        here = self.running.get((part.job, part.attempt, rank), False)
        return ObservedWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state="running" if here else "exited",
            exit_status=None if here else 143,
            address=WorkerAddress(rank=rank, cluster=self.cluster.name, host="h", port=rank + 1),
            protection=VerifiedCheckpoint(step=9, num_bytes=1) if part.key in self.saved and self.saves else None,
        )

    def obey(self, orders: AgentOrders, now_s: float) -> None:
        self._do(self.machine.handle(OrdersReceived(now_s=now_s, orders=orders)))
        check_site(self.machine)

    def _do(self, instructions: list[SiteInstruction]) -> None:
        for one in instructions:
            match one:
                case StartWorker(part=part, rank=rank):
                    self.running[part.job, part.attempt, rank] = True
                case StopWorker(part=part, rank=rank):
                    self.running[part.job, part.attempt, rank] = False
                case RequestCheckpoint(part=part):
                    self.saved.add(part.key)

    def runs(self, job: str) -> bool:
        """Tell whether a process of a job lives here."""
        return any(alive for (name, _, _), alive in self.running.items() if name == job)


class Pool:
    """Sites `a`, `b`, `c` of 4 devices, and a coordinator whose planner answers with the plan of the job."""

    def __init__(self, **policies: OwnerPolicy) -> None:
        self.coordinator, self.now_s = Coordinator(), 0.0
        self.sites = {name: Site(name, policies.get(name, OwnerPolicy())) for name in "abc"}
        self.plans: dict[str, Plan] = {}
        self.turn()

    def tell(self, event: Event) -> None:
        if not self.coordinator.admit(event):
            return
        for one in self.coordinator.handle(event):
            if isinstance(one, MakePlans):
                plans = PlanSet(plans=(self.plans[one.job_id],))
                self.tell(PlansMade(now_s=self.now_s, job_id=one.job_id, round=one.round, plans=plans))
        assert violations(self.coordinator.state, self.now_s, grace_s=5) == []

    def submit(self, job_id: str, sites: str, priority: str) -> None:
        self.plans[job_id] = plan(*sites)
        wish = submission(job_id, policy="manual", priority=priority)
        self.tell(JobSubmitted(now_s=self.now_s, job_id=job_id, user="u", submission=wish))
        self.tell(PlanChosen(now_s=self.now_s, job_id=job_id, plan_id="p"))

    def preempt(self, job_id: str) -> list[str]:
        offer = self.coordinator.job_view(job_id).offer
        named = tuple(VictimNamed(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in offer)
        self.tell(PreemptionAgreed(now_s=self.now_s, job_id=job_id, victims=named))
        return [one.job for one in offer]

    def turn(self) -> None:
        """A second: every site looks, reports and obeys."""
        self.now_s += 1
        for name, site in self.sites.items():
            site.look(self.now_s)
            report = AgentReported(
                now_s=self.now_s,
                cluster=site.cluster,
                incarnation="1",
                free_chips=site.machine.free_chips(),
                parts=site.machine.observed_parts(),
                local_jobs=site.machine.local_jobs(),
            )
            self.tell(report)
            orders = AgentOrders(parts=self.coordinator.orders(name), queue=self.coordinator.site_queue(name))
            site.obey(orders, self.now_s)
        for event in self.coordinator.due_events(self.now_s):
            self.tell(event)

    def until(self, wanted: Callable[[], bool], turns: int = 40) -> None:
        """Go on until something holds."""
        for _ in range(turns):
            if wanted():
                return
            self.turn()
        raise AssertionError({job.id: (job.state, job.reason) for job in self.coordinator.list_jobs()})

    def state(self, job_id: str) -> str:
        return self.coordinator.job_view(job_id).state


def test_victims_end_when_all_sites_are_ready_and_all_are_protected_and_come_back() -> None:
    """All steps with real agents: no victim ends before, and the victim resumes in its turn."""
    pool = Pool()
    pool.submit("low", "aaabbb", "low")
    pool.until(lambda: pool.state("low") == "running")
    pool.submit("high", "aabbc", "high")
    for site in pool.sites.values():
        site.saves = False
    assert pool.preempt("high") == ["low", "low"]
    for _ in range(10):
        pool.turn()
    assert (pool.state("high"), pool.state("low")) == ("preempting", "running")
    assert all(pool.sites[name].saved == {("low", 1)} for name in "ab")
    assert pool.sites["a"].runs("low")
    for site in pool.sites.values():
        site.saves = True
    pool.until(lambda: pool.state("high") == "running")
    assert not any(site.runs("low") for site in pool.sites.values())
    low = pool.coordinator.job_view("low")
    assert (low.state in ("waiting", "blocked"), low.restarts) == (True, 0)
    pool.tell(_cancel(pool, "high"))
    pool.until(lambda: pool.state("low") == "running")
    assert pool.coordinator.job_view("low").attempt == 2


def test_a_refusal_at_one_owner_leaves_every_victim_alone() -> None:
    """At `b` a local job of the highest level waits first: `b` refuses, and at `a` no job loses anything."""
    pool = Pool(b=OwnerPolicy(local_evicts_pool=False))
    pool.submit("low", "aaab", "low")
    pool.until(lambda: pool.state("low") == "running")
    pool.sites["b"].local.append(LocalJob(name="own", command=("x",), node_group="g", chips=4, level="high"))
    pool.turn()
    pool.submit("high", "aab", "high")
    assert pool.preempt("high") == ["low", "low"]
    pool.until(lambda: pool.state("high") in ("stopping", "waiting", "blocked"))
    assert "no job was stopped: b refused its part (ranks 2)" in pool.coordinator.job_view("high").reason
    for _ in range(5):
        pool.turn()
    assert (pool.state("low"), pool.coordinator.job_view("low").attempt) == ("running", 1)
    assert pool.sites["a"].runs("low")


def test_local_jobs_make_way_where_their_owner_lets_them_and_are_queued_again() -> None:
    """The agent ends them only once every other site is ready; they run again when there is room."""
    pool = Pool(a=LENDS)
    own = LocalJob(name="own", command=("x",), node_group="g", chips=3, level="low")
    pool.sites["a"].local.append(own)
    pool.until(lambda: pool.sites["a"].runs("own"))
    pool.turn()
    pool.submit("high", "aab", "high")
    assert pool.preempt("high") == ["own"]
    pool.until(lambda: pool.state("high") == "running")
    assert not pool.sites["a"].runs("own")
    pool.tell(_cancel(pool, "high"))
    pool.until(lambda: pool.sites["a"].runs("own"))


def test_whom_its_owner_evicts_leaves_all_its_sites_and_comes_back() -> None:
    """A local job of a higher level takes its devices at `a`: `b` releases too, no restart is used."""
    pool = Pool()
    pool.submit("low", "aaabbb", "low")
    pool.until(lambda: pool.state("low") == "running")
    pool.sites["a"].local.append(LocalJob(name="own", command=("x",), node_group="g", chips=3, level="high"))
    pool.until(lambda: pool.sites["a"].runs("own"))
    pool.until(lambda: pool.state("low") in ("waiting", "blocked"))
    assert not pool.sites["b"].runs("low")
    assert pool.coordinator.job_view("low").restarts == 0
    pool.sites["a"].local.clear()
    pool.until(lambda: pool.state("low") == "running")
    assert pool.coordinator.job_view("low").restarts == 0


def _cancel(pool: Pool, job_id: str) -> Event:
    return JobCancelled(now_s=pool.now_s, job_id=job_id)
