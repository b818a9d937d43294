"""One site of the model: the real agent's machine, its table on disk, its processes, its messages.

All sites are called `HERE` and have rank 0 of every job: which owner it is, only the server's side knows
(`server.part_failure_text`, `server.Server.orders`). So sites that are in the same state are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus.agent.service.part_table import SavedParts, dump_parts, parse_parts
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport, VerifiedCheckpoint, WorkerAddress
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import (
    LocalJob,
    LocalJobsObserved,
    ObservedWorker,
    OrdersReceived,
    ReportLocalExit,
    RequestCheckpoint,
    SiteEvent,
    SiteInstruction,
    StartWorker,
    StopWorker,
    WorkersObserved,
    WriteRankMap,
)
from isthmus.site.parts import LEASED, PartKey, SitePart
from tests.control.model.clone import clone
from tests.control.model.kinds import Kind

HERE = "s"
POLICY = OwnerPolicy(preemptible_from="low", hold_s=1e9)
CARD = "g/0/0"
GROUP = NodeGroup(name="g", chip="H20", nodes=1, chips_per_node=1)
CLUSTER = Cluster(name=HERE, owner="owner", node_groups=(GROUP,))
URGENT = LocalJob(name="x", command=("true",), node_group="g", chips=1, level="high")
ProcessKey = tuple[str, int, int]
"""(job, attempt, run): a job has one rank at a site."""


@dataclass(kw_only=True)
class Process:
    """A worker's process: `asked` to end, `trains` once it has the rank map, `saves` after that step.

    `exit_status` is None while it runs; `protected` is the step of its last verified checkpoint.
    """

    asked: bool = False
    trains: bool = False
    saves: int | None = None
    protected: int | None = None
    exit_status: int | None = None


def new_machine(table: SavedParts) -> SiteMachine:
    """Return the machine of an agent that comes up with a table."""
    return SiteMachine(HERE, DeviceIdAllocator({"g": (CARD,)}), table.parts, fence=table.fence, policy=POLICY)


@dataclass(kw_only=True)
class Site:
    """A site with one device. `late` is a report that still is in the network, `orders` those on their way.

    `jobs` are those of the owner's own users. `life` is the agent's; `late_life` that of the late report.
    """

    machine: SiteMachine = field(default_factory=lambda: new_machine(SavedParts()))
    life: int = 1
    processes: dict[ProcessKey, Process] = field(default_factory=dict)
    jobs: dict[str, LocalJob] = field(default_factory=dict)
    late: AgentReport | None = None
    orders: AgentOrders | None = None
    wrong: str = ""

    def copy(self) -> Site:
        """Return a site that may be changed."""
        copy: Site = clone(self)
        return copy

    @property
    def is_empty(self) -> bool:
        """Whether nothing of any job is here, or on its way."""
        return not (self.machine.parts or self.late or self.orders)

    def look(self) -> AgentReport:
        """Have the agent look at its processes and local jobs; return its report."""
        self.handle(WorkersObserved(now_s=0.0, workers=tuple(self._seen())))
        self.handle(LocalJobsObserved(now_s=0.0, jobs=tuple(self.jobs.values())))
        return AgentReport(
            cluster=CLUSTER,
            incarnation=str(self.life),
            free_chips=self.machine.free_chips(),
            parts=self.machine.observed_parts(),
            local_jobs=self.machine.local_jobs(),
        )

    def obey(self, orders: AgentOrders) -> None:
        """Have the agent take in orders."""
        self.handle(OrdersReceived(now_s=0.0, orders=orders))

    def die_obeying(self, orders: AgentOrders) -> None:
        """Let the agent die between saving what it decided and doing it; a new one comes up."""
        self.machine.handle(OrdersReceived(now_s=0.0, orders=orders))
        self.reboot()

    def reboot(self) -> None:
        """Bring up an agent that knows what the last one had on disk; its processes have lived on."""
        parts = list(self.machine.parts.values())
        self.machine = new_machine(parse_parts(dump_parts(SavedParts(fence=self.machine.fence, parts=parts))))
        self.life += 1
        for process in self.processes.values():
            process.saves = None

    def handle(self, event: SiteEvent) -> None:
        """Have the machine take an event in, and do what it asks for."""
        for instruction in self.machine.handle(event):
            self._do(instruction)

    def steps(self) -> Iterator[tuple[Kind, str, Site]]:
        """Yield what may happen here without server and fault: its kind, its name, the site behind it."""
        if self.orders is not None:
            after = self.copy()
            orders, after.orders = self.orders, None
            after.obey(orders)
            yield Kind.ORDINARY, "gets its orders", after
        for key, process in self.running():
            if process.asked:
                yield Kind.ORDINARY, f"ends {key[0]}/{key[1]} as asked", self.ended(key, 143)
            elif key[1] == 0:
                yield Kind.ORDINARY, f"has local job {key[0]} end", self.ended(key, 0)
        yield from self._timeouts()
        if URGENT.name not in self.jobs:
            after = self.copy()
            after.jobs[URGENT.name] = URGENT
            yield Kind.EVICT, "has an urgent job of its owner", after

    def faults(self) -> Iterator[tuple[Kind, str, Site]]:
        """Yield what may go wrong here without the server."""
        for key, process in self.running():
            if key[1] and not process.asked:
                yield Kind.FAULT, f"has {key[0]}/{key[1]} die", self.ended(key, 1)
        after = self.copy()
        after.reboot()
        yield Kind.FAULT, "has its agent die", after
        if self.orders is None and self.late is None:
            after = self.copy()
            after.late = after.look()
            yield Kind.FAULT, "sends a report that takes its time", after

    def ended(self, key: ProcessKey, status: int) -> Site:
        """Return the site with a process ended."""
        after = self.copy()
        after.processes[key].exit_status = status
        return after

    def running(self) -> Iterator[tuple[ProcessKey, Process]]:
        """Yield the processes that live."""
        return ((key, process) for key, process in self.processes.items() if process.exit_status is None)

    def _timeouts(self) -> Iterator[tuple[Kind, str, Site]]:
        for key, part in self.machine.parts.items():
            if part.state in LEASED and not part.local:
                after = self.copy()
                after.machine.parts[key].since_s = -1e9
                after.handle(WorkersObserved(now_s=0.0))
                yield Kind.TIMEOUT, f"does not renew the lease of {key}", after
            if part.force_at_s is not None or part.evict_at_s is not None:
                after = self.copy()
                held = after.machine.parts[key]
                held.force_at_s = held.force_at_s and 0.0
                held.evict_at_s = held.evict_at_s and 0.0
                after.handle(WorkersObserved(now_s=0.0))
                yield Kind.TIMEOUT, f"waits no longer for {key}", after

    def _do(self, instruction: SiteInstruction) -> None:
        match instruction:
            case StartWorker(part=part):
                if _of(part) not in self.processes:
                    self._start(_of(part))
            case StopWorker(part=part, force=force):
                process = self.processes.setdefault(_of(part), Process(exit_status=137))
                process.asked = True
                if force and process.exit_status is None:
                    process.exit_status = 137
            case WriteRankMap(part=part):
                if _of(part) in self.processes:
                    self.processes[_of(part)].trains = True
            case RequestCheckpoint(part=part, after=after):
                if _of(part) in self.processes:
                    self.processes[_of(part)].saves = after
            case ReportLocalExit(part=part):
                self.jobs.pop(part.job, None)

    def _start(self, key: ProcessKey) -> None:
        others = [other for other, _ in self.running()]
        if others:
            self.wrong = f"{key} starts on the card on which {others[0]} works"
        self.processes[key] = Process()

    def _seen(self) -> Iterator[ObservedWorker]:
        for part in self.machine.parts.values():
            for rank, worker in part.workers.items():
                if worker.live:
                    yield self._seen_one(part, rank)

    def _seen_one(self, part: SitePart, rank: int) -> ObservedWorker:
        process = self.processes.get(_of(part))
        if process is None:
            return ObservedWorker(job=part.job, attempt=part.attempt, rank=rank, state="absent")
        step = process.protected
        return ObservedWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state="running" if process.exit_status is None else "exited",
            exit_status=process.exit_status,
            address=WorkerAddress(rank=rank, cluster=HERE, host="h", port=1),
            protection=None if step is None else VerifiedCheckpoint(step=step, num_bytes=1),
        )


def attempts_at(site: Site) -> set[PartKey]:
    """Return the attempts of jobs that a site knows, or that are on the way from or to it."""
    known = {part.key for part in site.machine.parts.values()}
    known |= {victim for part in site.machine.parts.values() for victim in part.victims}
    known |= {key[:2] for key, _ in site.running()}
    if site.late is not None:
        known |= {(part.job, part.attempt) for part in site.late.parts}
    for order in site.orders.parts if site.orders is not None else ():
        known |= {(one.job, one.attempt) for one in (order, *order.victims)}
    return {key for key in known if key[1]}


def _of(part: SitePart) -> ProcessKey:
    """Return the name of a part's process."""
    return part.job, part.attempt, part.num_preemptions
