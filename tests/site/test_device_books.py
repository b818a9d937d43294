"""The site machine decides alike whether its devices have ids (agents) or are counted (the simulator)."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.core.messages.agent_messages import (
    AgentOrders,
    DesiredState,
    PartOrder,
    RankMap,
    VerifiedCheckpoint,
    Victim,
    WorkerAddress,
)
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.plan import Plan, PlanPart, Stage
from isthmus.core.priority import Priority
from isthmus.site import (
    DeviceAllocator,
    DeviceCountAllocator,
    DeviceIdAllocator,
    HoursObserved,
    LocalJob,
    LocalJobsObserved,
    LocalJobSubmitted,
    LocalJobWithdrawn,
    ObservedWorker,
    OrdersReceived,
    PartKey,
    ReportLocalExit,
    SiteEvent,
    SiteInstruction,
    SiteMachine,
    StopWorker,
    WorkersObserved,
    check_site,
)
from tests.site.samples import JOB

GROUPS = {"g": 6, "h": 4}
IDS = {group: [f"{group}{device}" for device in range(num)] for group, num in GROUPS.items()}
POLICY = OwnerPolicy(pool_chips={"g": 5}, preemptible_from="middle", grace_s=4, protect_s=6, hold_back_s=3, hold_s=20)
LEASE_S = 5.0

keys = st.tuples(st.sampled_from(("p", "q", "r", "s")), st.integers(1, 2))
levels = st.sampled_from(("high", "middle", "low"))
desired_states = st.sampled_from(("queued", "ready", "prepared", "prepared", "running", "running", "released"))
names = st.sampled_from(("l", "m", "n"))
any_key = keys | st.tuples(names, st.just(0))


def _plan(job: str) -> Plan:
    """A plan of its own for each job: some on one node group, some on both, one elsewhere too."""
    groups = {"p": "gggg", "q": "hhgg", "r": "gggggg", "s": "h"}[job]
    here = tuple(Stage(cluster="a", node_group=group, layers=(i, i + 1)) for i, group in enumerate(groups))
    there = Stage(cluster="b", node_group="g", layers=(len(groups), len(groups) + 1))
    return Plan(id=job, stages=(*here, there), micro_batches=1, micro_batch_size=1, sequence_length=1)


def _machine(devices: DeviceAllocator) -> SiteMachine:
    return SiteMachine("a", devices, policy=POLICY, checkin_timeout_s=30)


def _what(instruction: SiteInstruction) -> tuple[str, PartKey, int, bool]:
    """What an instruction asks for."""
    part = getattr(instruction, "part", None)
    rank, force = getattr(instruction, "rank", -1), getattr(instruction, "force", False)
    return type(instruction).__name__, part.key if part else ("", 0), rank, force


class TwoBooks(RuleBasedStateMachine):
    """The same events, given to a machine that names its devices and to one that counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.counted = _machine(DeviceIdAllocator(IDS)), _machine(DeviceCountAllocator(GROUPS))
        self.now_s = 0.0
        self.orders: dict[PartKey, PartOrder] = {}
        self.local: dict[str, LocalJob] = {}
        self.stopped: set[PartKey] = set()

    def handle(self, event: SiteEvent, other: SiteEvent | None = None) -> None:
        """Give both machines an event: both must ask for the same; `other` is its form for the second."""
        named, counted = self.named.handle(event), self.counted.handle(other or event)
        named = [one for one in named if not isinstance(one, ReportLocalExit)]  # only where all are listed
        assert sorted(map(_what, named)) == sorted(map(_what, counted))
        self.stopped.update(one.part.key for one in named if isinstance(one, StopWorker))

    def observe(self, key: PartKey, **seen: object) -> None:
        """Have every worker of a part observed alike."""
        part = self.named.parts.get(key)
        if part is not None and part.live:
            workers = tuple(ObservedWorker(job=key[0], attempt=key[1], rank=rank, **seen) for rank in part.workers)
            self.handle(WorkersObserved(now_s=self.now_s, workers=workers))

    @rule(
        key=keys,
        desired=desired_states,
        priority=levels,
        protect=st.booleans(),
        victims=st.lists(any_key, max_size=3),
    )
    def order(
        self, key: PartKey, desired: DesiredState, priority: Priority, protect: bool, victims: list[PartKey]
    ) -> None:
        """The server wants another state of one part."""
        plan = _plan(key[0])
        ranks = PlanPart.from_plan(plan, "a").ranks
        workers = tuple(WorkerAddress(rank=rank, cluster="a", host="h", port=1) for rank in ranks)
        self.orders[key] = PartOrder(
            job=key[0],
            attempt=key[1],
            desired=desired,
            lease_s=LEASE_S,
            priority=priority,
            protect=protect and desired == "running",
            victims=tuple(Victim(job=job, attempt=attempt) for job, attempt in victims),
            spec=JOB,
            plan=plan,
            rank_map=RankMap(workers=workers) if desired == "running" and protect else None,
        )
        self.send(())

    @rule(key=keys)
    def drop(self, key: PartKey) -> None:
        """The server no longer names a part."""
        self.orders.pop(key, None)
        self.send(())

    @rule(order=st.permutations(("p", "q", "r", "s")))
    def send(self, order: list[str] | tuple[str, ...]) -> None:
        """The server answers, with its own order of the queue."""
        orders = AgentOrders(parts=tuple(self.orders.values()), queue=tuple(order))
        self.handle(OrdersReceived(now_s=self.now_s, orders=orders))

    @rule(pause_s=st.sampled_from((0.5, 2.0, 4.0)))
    def wait(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.handle(WorkersObserved(now_s=self.now_s))

    @rule(key=keys)
    def check_in(self, key: PartKey) -> None:
        self.observe(key, state="running", address=WorkerAddress(rank=0, cluster="a", host="site", port=1))

    @rule(key=keys, step=st.integers(1, 5))
    def save(self, key: PartKey, step: int) -> None:
        self.observe(key, state="running", protection=VerifiedCheckpoint(step=step, num_bytes=7))

    @rule(key=any_key, status=st.sampled_from((0, 0, 1)))
    def end(self, key: PartKey, status: int) -> None:
        """Every process of a part ends: by itself, or because it was stopped."""
        status = 143 if key in self.stopped else status
        self.stopped.discard(key)
        self.observe(key, state="exited", exit_status=status)

    @rule(
        name=names,
        group=st.sampled_from(("g", "h")),
        chips=st.integers(1, 4),
        level=levels,
        preemptible=st.booleans(),
    )
    def submit(self, name: str, group: str, chips: int, level: str, preemptible: bool) -> None:
        """A local job arrives: an agent sees the list of all, the simulator gets an event for the one."""
        if name in self.local or (name, 0) in self.named.parts:
            return
        job = LocalJob(name=name, command=(), node_group=group, chips=chips, level=level, preemptible=preemptible)
        self.local[name] = job
        jobs = tuple(self.local.values())
        self.handle(LocalJobsObserved(now_s=self.now_s, jobs=jobs), LocalJobSubmitted(now_s=self.now_s, job=job))

    @rule(name=names)
    def withdraw(self, name: str) -> None:
        if self.local.pop(name, None) is not None:
            jobs = tuple(self.local.values())
            self.handle(LocalJobsObserved(now_s=self.now_s, jobs=jobs), LocalJobWithdrawn(now_s=self.now_s, name=name))

    @rule(is_open=st.booleans())
    def pass_hours(self, is_open: bool) -> None:
        """The owner's hours begin or end."""
        self.handle(HoursObserved(now_s=self.now_s, is_open=is_open))

    @rule()
    def restart(self) -> None:
        """The agent dies; another one goes on with its table, which has the ids of devices."""
        parts = list(self.named.parts.values())
        is_open = self.named.site.is_open
        self.named = SiteMachine(
            "a", DeviceIdAllocator(IDS), parts, policy=POLICY, checkin_timeout_s=30, now_s=self.now_s
        )
        self.named.site.is_open = is_open
        self.named.handle(WorkersObserved(now_s=self.now_s))
        self.counted.restart(self.now_s)

    @invariant()
    def both_report_the_same(self) -> None:
        assert self.named.observed_parts() == self.counted.observed_parts()
        assert self.named.free_chips() == self.counted.free_chips()
        assert self.named.local_jobs() == self.counted.local_jobs()
        assert self.named.queue() == self.counted.queue()
        assert self.named.next_due_s == self.counted.next_due_s

    @invariant()
    def both_are_consistent(self) -> None:
        check_site(self.named)
        check_site(self.counted)


TwoBooks.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.generate,),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTwoBooks = TwoBooks.TestCase
