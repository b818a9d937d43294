"""A hand on the coordinator for tests: logs what it admits, checks the invariants after every event."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from isthmus.control.coordinator.accounting.check_metering import metering_problems
from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.state.events import (
    AgentReported,
    Event,
    Instruction,
    JobCancelled,
    JobSubmitted,
    MakePlans,
    PlanChosen,
    PlansMade,
    PreemptionAgreed,
    SiteChecked,
    VictimNamed,
)
from isthmus.control.state.invariants import violations
from isthmus.core.catalogue import HeldCopy
from isthmus.core.messages.agent_messages import (
    AgentIdentity,
    AgentReport,
    MoveProposal,
    ObservedLocalJob,
    ObservedPart,
    PartOrder,
    PeerAddress,
    PeerCheck,
    QueueEntry,
    VerifiedCheckpoint,
    WorkerAddress,
)
from isthmus.core.messages.preflight import CheckResult, CheckStatus, PreflightAnswer, PreflightOrder
from isthmus.core.plan import Plan, PlanPart, PlanSet, Refusal
from isthmus.core.pool import Cluster
from isthmus.core.views.api_views import JobState
from tests.control.samples import cluster, plan, submission

RULES = CoordinatorConfig(
    reservation_timeout_s=10, start_timeout_s=20, lease_s=5, agent_timeout_s=3, retry_s=2, max_retry_s=8
)


class Driver:
    """A pool of clusters `a`, `b`, `c` with 4 chips each, whose agents say what the test says."""

    def __init__(self, *names: str, chips: int = 4) -> None:
        self.coordinator, self.log = Coordinator(RULES), list[Event]()
        self.now_s = 100.0
        self.clusters: dict[str, Cluster] = {name: cluster(name, chips) for name in names}
        self.asked: dict[str, MakePlans] = {}
        self.local: dict[str, tuple[ObservedLocalJob, ...]] = {}
        # What the agents of sites that check each other report.
        self.addresses: dict[str, PeerAddress] = {}
        self.checks: dict[str, tuple[PeerCheck, ...]] = {}
        self.checking: set[str] = set()
        # The copies of sites that bring versions of the catalogue, and their rate.
        self.copies: dict[str, tuple[HeldCopy, ...]] = {}
        self.fetch_gbps: dict[str, float] = {}
        # The free bytes of sites with storage of their own.
        self.storage_bytes: dict[str, int] = {}
        self.identities: dict[str, AgentIdentity] = {}
        self.run_lease_s = 0.0
        # The time on the agents' own clocks; None: they do not tell it.
        self.clock_s: float | None = None
        for name in names:
            self.report(name)

    def tell(self, event: Event) -> list[Instruction]:
        """Admit, log and handle an event as the shell does."""
        if not self.coordinator.admit(event):
            return []
        self.log.append(event)
        instructions = self.coordinator.handle(event)
        for instruction in instructions:
            if isinstance(instruction, MakePlans):
                self.asked[instruction.job_id] = instruction
        assert violations(self.coordinator.state, self.now_s, grace_s=1e9) == []
        assert list(metering_problems(self.coordinator.state)) == []
        return instructions

    def submit(
        self,
        job_id: str,
        *plans: Plan,
        policy: str = "auto",
        key: str = "",
        restarts: int = 3,
        user: str = "u",
        **more: Any,
    ) -> None:
        """Submit a job and, where `plans` are given and it is its turn, answer for the planner.

        `more` are its other fields.
        """
        wish = submission(job_id, policy=policy, key=key, restarts=restarts, **more)
        self.tell(JobSubmitted(now_s=self.now_s, job_id=job_id, user=user, submission=wish))
        if plans and job_id in self.asked:
            self.answer(job_id, *plans)

    def answer(self, job_id: str, *plans: Plan, why: str = "too few chips") -> None:
        """Answer the latest request for plans of a job."""
        refused = () if plans else (Refusal(clusters=(), reason=why),)
        answer = PlanSet(plans=plans, refused=refused)
        request = self.asked.pop(job_id)
        self.tell(PlansMade(now_s=self.now_s, job_id=job_id, round=request.round, plans=answer))

    def choose(self, job_id: str, plan_id: str) -> None:
        self.tell(PlanChosen(now_s=self.now_s, job_id=job_id, plan_id=plan_id))

    def preempt(self, job_id: str) -> tuple[str, ...]:
        """Agree to whatever the job is offered; return the victims as `CLUSTER/JOB`."""
        offer = self.coordinator.job_view(job_id).offer
        named = tuple(VictimNamed(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in offer)
        self.tell(PreemptionAgreed(now_s=self.now_s, job_id=job_id, victims=named))
        return tuple(f"{one.cluster}/{one.job}" for one in offer)

    def cancel(self, job_id: str) -> None:
        self.tell(JobCancelled(now_s=self.now_s, job_id=job_id))

    def report(
        self,
        site: str,
        *parts: ObservedPart,
        free: int | None = None,
        incarnation: str = "1",
        chips: int | None = None,
        local: tuple[ObservedLocalJob, ...] | None = None,
        queue: tuple[QueueEntry, ...] = (),
        moves: tuple[MoveProposal, ...] = (),
    ) -> list[Instruction]:
        """Report `parts` of a site. `free` follows from what the parts hold; `chips` is all there are.

        `local` are the site's own jobs from now on.
        """
        if local is not None:
            self.local[site] = local
        if chips is not None:
            self.clusters[site] = cluster(site, chips)
        here = self.clusters[site]
        report = AgentReport(
            cluster=here,
            incarnation=incarnation,
            identity=self.identities.get(site),
            run_lease_s=self.run_lease_s,
            free_chips={"g": self._free(here, parts) if free is None else free},
            free_storage_bytes=self.storage_bytes.get(site),
            parts=parts,
            local_jobs=self.local.get(site, ()),
            queue=queue,
            moves=moves,
            peer_address=self.addresses.get(site),
            peer_checks=self.checks.get(site, ()),
            checks=site in self.checking,
            copies=self.copies.get(site),
            fetch_gbps=self.fetch_gbps.get(site),
            clock_s=self.clock_s,
        )
        told = self.tell(AgentReported.from_report(report, self.now_s))
        self.coordinator.record_report(site, self.now_s, report)
        return told

    def _free(self, here: Cluster, parts: Sequence[ObservedPart]) -> int:
        record = self.coordinator.state.clusters.get(here.name)
        running = (one for one in self.local.get(here.name, ()) if one.running)
        held = sum(one.chips["g"] for one in running)
        for part in parts:
            promised = record.parts.get((part.job, part.attempt)) if record else None
            if promised is not None and part.state in ("prepared", "running"):
                held += promised.chips["g"]
        return max(0, here.node_groups[0].num_chips - held)

    def obey(self, *sites: str) -> None:
        """Let each site do at once what its orders say, and report it."""
        for site in sites or tuple(self.clusters):
            self.report(site, *(self.done(site, order) for order in self.coordinator.orders(site)))

    def done(self, site: str, order: PartOrder) -> ObservedPart:
        """Return what a site reports that has carried an order out; workers check in at once."""
        workers: tuple[WorkerAddress, ...] = ()
        if order.desired == "running" and order.plan is not None:
            ranks = PlanPart.from_plan(order.plan, site).ranks
            workers = tuple(WorkerAddress(rank=r, cluster=site, host="h", port=r + 1) for r in ranks)
        saved = VerifiedCheckpoint(step=7, num_bytes=1) if order.protect and order.rank_map else None
        return ObservedPart(
            job=order.job, attempt=order.attempt, state=order.desired, workers=workers, protection=saved
        )

    def check(self, *sites: str, phases: int = 1, **failed: CheckStatus) -> None:
        """Let each site answer its checks in `phases` phases; `failed` are the names of those that do not pass."""
        for _ in range(phases):
            for site in sites:
                for order in self.coordinator.preflight_orders(site):
                    self.tell(SiteChecked(now_s=self.now_s, cluster=site, answer=answered(order, **failed)))

    def orders(self, site: str) -> dict[tuple[str, int], str]:
        """Return what is wanted at a site, by (job, attempt)."""
        return {(order.job, order.attempt): order.desired for order in self.coordinator.orders(site)}

    def wait(self, seconds: float) -> None:
        """Let time pass while every agent is heard, and take in what is due."""
        self.now_s += seconds
        for name, record in self.coordinator.state.clusters.items():
            if record.connected:
                self.coordinator.record_report(name, self.now_s)
        for event in self.coordinator.due_events(self.now_s):
            self.tell(event)

    def state(self, job_id: str) -> JobState:
        return self.coordinator.job_view(job_id).state

    def reason(self, job_id: str) -> str:
        return self.coordinator.job_view(job_id).reason


def identity(folder: str, session: int = 1, saves: int = 1, *, machine: str = "m", **more: Any) -> AgentIdentity:
    """The identity of the agent whose state folder is called `folder`, in one of its sessions."""
    key, place, boot = (hashlib.sha256(one.encode()).hexdigest() for one in (folder, machine, "boot"))
    return AgentIdentity.model_validate(
        {"key": key, "machine": place, "boot": boot, "session": session, "saves": saves} | more
    )


def checked_pool(*names: str) -> Driver:
    """A pool whose agents execute checks."""
    pool = Driver(*names)
    pool.checking = set(names)
    for name in names:
        pool.report(name)
    return pool


def answered(order: PreflightOrder, **failed: CheckStatus) -> PreflightAnswer:
    """What a site answers to its checks: all pass but those named in `failed`."""
    results = tuple(
        CheckResult(
            name=one.name,
            status=failed.get(one.name, "passed"),
            detail=f"{one.path} is bad" if one.name in failed else "",
            peer=one.peer,
        )
        for one in order.checks
    )
    facts = {"checkpoints": "/there/c"} if order.phase == "own" else {}
    return PreflightAnswer(
        job=order.job, round=order.round, phase=order.phase, results=results, facts=facts, seconds=0.5
    )


def seen(job: str, attempt: int, state: str, detail: str = "") -> ObservedPart:
    """What a site says of a part."""
    return ObservedPart(job=job, attempt=attempt, state=state, detail=detail)


def started(*sites: str, restarts: int = 3, **more: Any) -> Driver:
    """A pool in which job `j` runs one stage at each of `sites`."""
    pool = Driver("a", "b", "c")
    pool.submit("j", plan(*sites), restarts=restarts, **more)
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    return pool
