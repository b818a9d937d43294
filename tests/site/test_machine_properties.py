"""What holds for every sequence of orders, preemptions, failures, restarts, local jobs and hours."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.agent.service.part_table import SavedParts, dump_parts, parse_parts
from isthmus.core.messages.agent_messages import PartOrder, RankMap, VerifiedCheckpoint, Victim
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool_parts.group_topology import GroupTopology, TopologyDomain
from isthmus.site.devices.device_allocator import DeviceAllocator
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.devices.topology_allocator import TopologyAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import (
    HoursObserved,
    LocalJob,
    LocalJobsObserved,
    ObservedWorker,
    OrdersReceived,
    QueueObserved,
    ReorderQueue,
    RequestCheckpoint,
    SiteEvent,
    StartWorker,
    StopWorker,
    WorkersObserved,
)
from isthmus.site.parts import PartKey, SitePart
from isthmus.site.site_invariants import check_site
from tests.site.samples import EAST, INVENTORY, address, order, orders

PLACES = st.lists(st.sampled_from(["east/h20", "east/h20", "east/l40s"]), min_size=1, max_size=3)
KEYS = st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 6))
LEVELS = st.sampled_from(["high", "middle", "low"])
LOCAL_LEVELS = st.sampled_from(["high", "low", "low", "low"])
RANK = {
    "new": 0, "queued": 0, "ready": 1, "prepared": 2, "refused": 2, "running": 3, "succeeded": 4, "failed": 4,
    "released": 5,
}  # fmt: skip
POLICY = OwnerPolicy(pool_chips={"l40s": 1}, preemptible_from="middle", grace_s=2, protect_s=3, hold_s=12)
TORS = (TopologyDomain(name="t0", nodes=("0",)), TopologyDomain(name="t1", nodes=("1",)))
Process = tuple[str, int, int, int]
"""(job, attempt, run of a local job, rank)"""


class World(RuleBasedStateMachine):
    """A site whose processes are a dictionary: its name to `running` or an exit status."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.saved: list[SitePart] = []
        self.machine = SiteMachine("east", self.devices(), policy=POLICY)
        self.wanted: dict[PartKey, PartOrder] = {}
        self.jobs: dict[str, LocalJob] = {}
        self.processes: dict[Process, str | int] = {}
        self.started: dict[Process, int] = {}
        self.asked: dict[PartKey, int] = {}
        self.queue: list[PartKey] = []
        self.told: dict[PartKey, int] = {}
        self.cut = False

    def devices(self) -> DeviceAllocator:
        return DeviceIdAllocator(INVENTORY)

    def boot(self) -> None:
        self.machine = SiteMachine("east", self.devices(), self.saved, policy=POLICY, now_s=self.now_s)

    def apply(self, event: SiteEvent) -> None:
        """Decide, save, act; where `cut`, the agent dies after the first act."""
        done = self.machine.handle(event)
        table = SavedParts(fence=self.machine.fence, parts=list(self.machine.parts.values()))
        self.saved = parse_parts(dump_parts(table)).parts
        for step in done[:1] if self.cut else done:
            match step:
                case StartWorker(part=part, rank=rank):
                    key = (part.job, part.attempt, part.num_preemptions, rank)
                    if key not in self.processes:
                        self.started[key] = self.started.get(key, 0) + 1
                        self.processes[key] = "running"
                case StopWorker(part=part, rank=rank, force=force):
                    key = (part.job, part.attempt, part.num_preemptions, rank)
                    if key not in self.processes or (force and self.processes[key] == "running"):
                        self.processes[key] = 137
                case RequestCheckpoint(part=part, after=after):
                    self.asked[part.key] = after
                case ReorderQueue(moves=moves, removed=gone):
                    self.reorder(moves, gone)
        if self.cut:
            self.cut = False
            self.boot()

    def reorder(self, moves: tuple[tuple[PartKey, PartKey | None], ...], gone: tuple[PartKey, ...]) -> None:
        self.queue = [key for key in self.queue if key not in gone]
        for key, after in moves:
            if key in self.queue:
                self.queue.remove(key)
            self.queue.insert(self.queue.index(after) + 1 if after in self.queue else 0, key)

    @rule(key=KEYS, places=PLACES, level=LEVELS, first=st.sampled_from(["queued", "ready"]))
    def want(self, key: PartKey, places: list[str], level: str, first: str) -> None:
        """The server wants a part to queue, or to have a claim on free devices and those of all other parts."""
        if key not in self.told and key not in self.wanted:
            others = (Victim(job=job, attempt=attempt) for job, attempt in self.machine.parts)
            fields = {"victims": tuple(others), "priority": level}
            self.wanted[key] = order(first, *key, places=places, lease_s=5, **fields)  # type: ignore[arg-type]
            self.exchange()

    @rule(key=KEYS)
    def go_on(self, key: PartKey) -> None:
        """From `queued` over `ready` to `prepared`: what the server does when all sites have come so far."""
        after = {"queued": "ready", "ready": "prepared"}
        if key in self.wanted and self.wanted[key].desired in after:
            self.desire(key, desired=after[self.wanted[key].desired])
            self.exchange()

    @rule(key=KEYS, places=PLACES)
    def preempt(self, key: PartKey, places: list[str]) -> None:
        """A part takes the devices of local jobs, and of parts of the pool that the server releases for it."""
        self.want(key, places, "high", "ready")
        if key in self.machine.parts and self.machine.parts[key].state == "ready":
            self.desire(key, desired="prepared")
            for victim in self.wanted[key].victims:
                self.release((victim.job, victim.attempt))
            self.exchange()

    @rule(key=KEYS, places=PLACES, level=LEVELS)
    def prepare(self, key: PartKey, places: list[str], level: str) -> None:
        if key not in self.told:
            wanted = order("prepared", *key, places=places, lease_s=5, priority=level)
            self.wanted.setdefault(key, wanted)

    @rule(key=KEYS)
    def commit(self, key: PartKey) -> None:
        if key in self.wanted and self.wanted[key].desired == "prepared":
            self.desire(key, desired="running")

    @rule(key=KEYS)
    def train(self, key: PartKey) -> None:
        """Commit what is prepared; all ranks check in, and train."""
        state = self.machine.parts[key].state if key in self.machine.parts else ""
        if key in self.wanted and (state, self.wanted[key].desired) == ("prepared", "prepared"):
            self.desire(key, desired="running")
            self.exchange()
            self.desire(key, rank_map=RankMap(workers=(address(0),)))
            self.exchange()
            self.look()

    @rule(key=KEYS, protect=st.booleans())
    def protect(self, key: PartKey, protect: bool) -> None:
        if key in self.wanted and self.wanted[key].desired == "running":
            self.desire(key, protect=protect)

    @rule(key=KEYS)
    def release(self, key: PartKey) -> None:
        if key in self.wanted:
            self.desire(key, desired="released")

    def desire(self, key: PartKey, **fields: object) -> None:
        self.wanted[key] = self.wanted[key].model_copy(update=fields)

    @rule()
    def exchange(self) -> None:
        before = dict(self.told)
        for part in self.machine.observed_parts():
            key, rank = (part.job, part.attempt), RANK[part.state]
            assert rank >= before.get(key, 0), "a part's life only moves forward"
            self.told[key] = rank
            if part.state == "released":
                self.wanted.pop(key, None)
                for name, process in self.processes.items():
                    assert name[:2] != key or process != "running", "released, yet a process is left"
        self.apply(OrdersReceived(now_s=self.now_s, orders=orders(*self.wanted.values())))

    @rule(name=st.sampled_from(["x", "y"]), chips=st.integers(1, 2), level=LOCAL_LEVELS, willing=st.booleans())
    def submit_local(self, name: str, chips: int, level: str, willing: bool) -> None:
        if not any(process[:2] == (name, 0) for process in self.processes):
            self.jobs[name] = LocalJob(
                name=name, command=("true",), node_group="h20", chips=chips, level=level, preemptible=willing
            )
        self.apply(LocalJobsObserved(now_s=self.now_s, jobs=tuple(self.jobs.values())))

    @rule(name=st.sampled_from(["x", "y"]))
    def withdraw_local(self, name: str) -> None:
        self.jobs.pop(name, None)
        self.apply(LocalJobsObserved(now_s=self.now_s, jobs=tuple(self.jobs.values())))

    @rule(status=st.sampled_from([0, 0, 1, 137]), data=st.data())
    def process_ends(self, status: int, data: st.DataObject) -> None:
        alive = sorted(key for key, process in self.processes.items() if process == "running")
        if alive:
            key = data.draw(st.sampled_from(alive))
            self.processes[key] = status
            part = self.machine.parts.get(key[:2])
            if key[1] == 0 and not (part and part.requeue):
                self.jobs.pop(key[0], None)

    @rule()
    def look(self) -> None:
        seen = []
        for part in self.machine.parts.values():
            for rank, worker in part.workers.items():
                if worker.live:
                    seen.append(self.seen(part, rank))
        self.apply(WorkersObserved(now_s=self.now_s, workers=tuple(seen)))

    def seen(self, part: SitePart, rank: int) -> ObservedWorker:
        process = self.processes.get((part.job, part.attempt, part.num_preemptions, rank))
        after = self.asked.get(part.key)
        state = "absent" if process is None else "running" if process == "running" else "exited"
        status = process if isinstance(process, int) else None
        return ObservedWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state=state,  # type: ignore[arg-type]
            exit_status=status,
            address=address(rank) if state == "running" else None,
            protection=None if after is None else VerifiedCheckpoint(step=after + 1, num_bytes=1),
        )

    @rule(seconds=st.sampled_from([0.1, 0.1, 1.0, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.apply(WorkersObserved(now_s=self.now_s))

    @rule(is_open=st.booleans())
    def hours(self, is_open: bool) -> None:
        self.apply(HoursObserved(now_s=self.now_s, is_open=is_open))

    @rule(swap=st.booleans())
    def look_at_the_queue(self, swap: bool) -> None:
        """With or without its first entry moved last: what the machine asks for leads to the order it wants."""
        if swap and self.queue:
            self.queue.append(self.queue.pop(0))
        self.apply(QueueObserved(now_s=self.now_s, entries=tuple(self.queue)))

    @rule()
    def agent_dies_after_the_next_act(self) -> None:
        self.cut = True

    @rule()
    def agent_restarts(self) -> None:
        self.boot()

    @invariant()
    def cards_are_never_given_twice(self) -> None:
        check_site(self.machine)

    @invariant()
    def nothing_is_started_twice(self) -> None:
        assert all(num == 1 for num in self.started.values())

    @invariant()
    def every_process_has_its_cards(self) -> None:
        for (job, attempt, run, rank), process in self.processes.items():
            if process == "running":
                part = self.machine.parts.get((job, attempt))
                assert part is not None, f"process {job}/{attempt}/{rank} belongs to nobody"
                assert part.workers[rank].devices, "a process without cards"
                assert part.num_preemptions == run, "an earlier run of a local job is still there"

    @invariant()
    def processes_on_one_card_are_of_one_part(self) -> None:
        """Whatever was claimed: no two parts use one device."""
        users: dict[str, PartKey] = {}
        for (job, attempt, _, rank), process in self.processes.items():
            if process == "running":
                for card in self.machine.parts[job, attempt].workers[rank].devices:
                    assert users.setdefault(card, (job, attempt)) == (job, attempt)

    @invariant()
    def the_owners_unwilling_jobs_are_never_preempted(self) -> None:
        for part in self.machine.parts.values():
            assert not part.requeue or (part.preemptible and part.level != "high")

    def teardown(self) -> None:
        """Whatever happened: with everything released, every device is free and no process is left."""
        self.jobs.clear()
        self.wanted.clear()
        self.hours(True)
        for _ in range(12):
            self.time_passes(4.0)
            self.withdraw_local("x")
            self.look()
            self.exchange()
        self.look_at_the_queue(False)
        assert self.queue == []
        assert self.machine.parts == {}
        assert "running" not in self.processes.values()
        assert self.machine.free_chips() == {"h20": 3, "l40s": 1}


class PlacedWorld(World):
    """The same rules where devices are placed by topology: two nodes, of two cards and of one."""

    def devices(self) -> DeviceAllocator:
        groups = [EAST.group("h20").model_copy(update={"topology": GroupTopology(tors=TORS)}), EAST.group("l40s")]
        return TopologyAllocator("east", groups, {**INVENTORY, "h20": ("h20/0/0", "h20/0/1", "h20/1/0")})


PlacedWorld.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestPlacedWorld = PlacedWorld.TestCase
World.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestWorld = World.TestCase
