"""The simulated site answers every order as the agent's machine does."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.agent.events import (
    Instruction,
    LocalJobsSeen,
    OrdersReceived,
    SeenWorker,
    StopWorker,
    WorkersSeen,
)
from isthmus.agent.events import LocalJob as AgentLocalJob
from isthmus.agent.machine import AgentMachine
from isthmus.agent.site_queue import queue
from isthmus.control.simulation.site import SimulatedSite
from isthmus.control.simulation.site_parts import Act, LocalJob, PartKey
from isthmus.core.messages import AgentOrders, Desired, PartOrder, Protection, RankMap, Victim, WorkerAddress
from isthmus.core.plan import Part, Plan, Stage
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.priority import Priority
from tests.control.samples import submission

PHASES = (Phase.generate,)
GROUPS = {"g": 6, "h": 4}
CARDS = {group: [f"{group}{card}" for card in range(chips)] for group, chips in GROUPS.items()}
CLUSTER = Cluster(
    name="a",
    owner="o",
    node_groups=tuple(
        NodeGroup(name=name, chip="H20", nodes=1, chips_per_node=chips) for name, chips in GROUPS.items()
    ),
)
POLICY = OwnerPolicy(
    pool_chips={"g": 5}, preemptible_from="middle", grace_s=4, protect_s=6, hold_back_s=3, hold_s=20
)
JOB = submission().job
LEASE_S = 5.0

keys = st.tuples(st.sampled_from(("p", "q", "r", "s")), st.integers(1, 2))
levels = st.sampled_from(("high", "middle", "low"))
wanted = st.sampled_from(("queued", "ready", "prepared", "prepared", "running", "running", "released"))
names = st.sampled_from(("l", "m", "n"))
groups = st.sampled_from(("g", "h"))
any_key = keys | st.tuples(names, st.just(0))


def _plan(job: str) -> Plan:
    """A plan of its own for each job: some on one node group, some on both, one elsewhere too."""
    cards = {"p": "gggg", "q": "hhgg", "r": "gggggg", "s": "h"}[job]
    here = tuple(Stage(cluster="a", node_group=group, layers=(i, i + 1)) for i, group in enumerate(cards))
    there = Stage(cluster="b", node_group="g", layers=(len(cards), len(cards) + 1))
    return Plan(id=job, stages=(*here, there), micro_batches=1, micro_batch_size=1, sequence_length=1)


class Both(RuleBasedStateMachine):
    """Orders, workers and local jobs as they may come, given to a machine and to a simulated site alike."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = AgentMachine("a", CARDS, policy=POLICY, checkin_timeout_s=30)
        self.site = SimulatedSite(CLUSTER, POLICY)
        self.site.books.checkin_timeout_s = 30
        self.now_s = 0.0
        self.orders: dict[PartKey, PartOrder] = {}
        self.local: dict[str, AgentLocalJob] = {}
        self.asked: set[PartKey] = set()

    def _did(self, agent: list[Instruction], acts: list[Act]) -> None:
        """Both must ask for the same processes to be stopped."""
        stops = {(one.part.key, one.force) for one in agent if isinstance(one, StopWorker)}
        assert stops == {(one.part.key, one.force) for one in acts if one.what == "stop"}
        self.asked.update(key for key, _ in stops)

    def _tick(self) -> None:
        for event in (WorkersSeen(now_s=self.now_s), self._seen_local()):
            agent = self.machine.handle(event)
            self._did(agent, self.site.pass_time(self.now_s) if isinstance(event, WorkersSeen) else [])

    def _seen_local(self) -> LocalJobsSeen:
        return LocalJobsSeen(now_s=self.now_s, jobs=tuple(self.local.values()))

    def _obey(self, queue: tuple[str, ...] = ()) -> None:
        orders = AgentOrders(parts=tuple(self.orders.values()), queue=queue)
        agent = self.machine.handle(OrdersReceived(now_s=self.now_s, orders=orders))
        self._did(agent, self.site.obey(orders, self.now_s))

    def _workers(self, key: PartKey, **seen: object) -> list[Instruction]:
        ranks = self.machine.parts[key].workers
        told = tuple(SeenWorker(job=key[0], attempt=key[1], rank=rank, **seen) for rank in ranks)
        return self.machine.handle(WorkersSeen(now_s=self.now_s, workers=told))

    def _live(self, key: PartKey) -> bool:
        return key in self.site.parts and self.site.parts[key].live

    @rule(
        key=keys,
        desired=wanted,
        priority=levels,
        protect=st.booleans(),
        victims=st.lists(keys | st.tuples(names, st.just(0)), max_size=3),
    )
    def order(
        self, key: PartKey, desired: Desired, priority: Priority, protect: bool, victims: list[PartKey]
    ) -> None:
        """The server wants another thing of one part."""
        plan = _plan(key[0])
        ranks = Part.of(plan, "a").ranks
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
        self._obey()

    @rule(key=keys)
    def forget(self, key: PartKey) -> None:
        """The server no longer names a part."""
        self.orders.pop(key, None)
        self._obey()

    @rule(order=st.permutations(("p", "q", "r", "s")))
    def sort(self, order: list[str]) -> None:
        self._obey(tuple(order))

    @rule(pause_s=st.sampled_from((0.5, 2.0, 4.0)))
    def wait(self, pause_s: float) -> None:
        self.now_s += pause_s
        self._tick()

    @rule(key=keys)
    def check_in(self, key: PartKey) -> None:
        if not self._live(key) or self.site.parts[key].addresses:
            return
        ranks = self.machine.parts[key].workers
        told = tuple(
            SeenWorker(
                job=key[0],
                attempt=key[1],
                rank=rank,
                state="running",
                address=WorkerAddress(rank=rank, cluster="a", host="site", port=rank + 1),
            )
            for rank in ranks
        )
        agent = self.machine.handle(WorkersSeen(now_s=self.now_s, workers=told))
        self._did(agent, self.site.checked_in(key, self.now_s))

    @rule(key=keys, step=st.integers(1, 5))
    def save(self, key: PartKey, step: int) -> None:
        if not self._live(key):
            return
        ranks = len(self.machine.parts[key].workers)
        if self.site.parts[key].saved and step <= self.site.parts[key].saved.step:
            return
        agent = self._workers(key, state="running", protection=Protection(step=step, num_bytes=7))
        whole = Protection(step=step, num_bytes=7 * ranks)
        self._did(agent, self.site.saved(key, whole, self.now_s))

    @rule(key=any_key, status=st.sampled_from((0, 0, 1)))
    def end(self, key: PartKey, status: int) -> None:
        """Every process of a part ends: as it likes, or because it was asked to."""
        if not self._live(key):
            return
        status = 143 if key in self.asked else status
        self.asked.discard(key)
        agent = self._workers(key, state="exited", exit_status=status)
        self._did(agent, self.site.exited(key, status, self.now_s))

    @rule(
        name=names,
        group=st.sampled_from(("g", "h")),
        chips=st.integers(1, 5),
        level=levels,
        takes=st.booleans(),
    )
    def submit(self, name: str, group: str, chips: int, level: str, takes: bool) -> None:
        if name in self.local or (name, 0) in self.machine.parts or chips > GROUPS[group]:
            return
        self.local[name] = AgentLocalJob(
            name=name, command=(), node_group=group, chips=chips, level=level, preemptible=takes
        )
        agent = self.machine.handle(self._seen_local())
        mine = LocalJob(name=name, node_group=group, chips=chips, level=level, preemptible=takes)
        self._did(agent, self.site.submit(mine, self.now_s))

    @rule(name=names)
    def withdraw(self, name: str) -> None:
        if self.local.pop(name, None) is not None:
            agent = self.machine.handle(self._seen_local())
            self._did(agent, self.site.withdraw(name, self.now_s))

    @rule()
    def restart(self) -> None:
        """The agent dies and another one goes on with its table."""
        known = list(self.machine.parts.values())
        self.machine = AgentMachine("a", CARDS, known, policy=POLICY, now_s=self.now_s, checkin_timeout_s=30)
        agent = self.machine.handle(WorkersSeen(now_s=self.now_s))
        self._did(agent, self.site.wake(self.now_s))

    @invariant()
    def the_same_is_told(self) -> None:
        report = self.site.report("i")
        mine = {(one.job, one.attempt): one for one in report.parts}
        for theirs in self.machine.observed():
            one = mine.pop((theirs.job, theirs.attempt))
            assert (one.state, one.fault) == (theirs.state, theirs.fault), (one, theirs)
            assert one.protection == theirs.protection
            assert len(one.workers) == len(theirs.workers) or one.state in ("released", "refused")
        assert not mine
        assert report.free_chips == self.machine.free_chips()
        assert report.local_jobs == self.machine.local_jobs()

    @invariant()
    def the_queues_are_alike(self) -> None:
        theirs = [part.key for part in queue(self.machine.site)]
        assert [part.key for part in self.site.books.queue()] == theirs


Both.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    phases=PHASES,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBoth = Both.TestCase
