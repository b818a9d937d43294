"""One site of the model: the real agent's machine, its table on disk, its processes, its messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus.agent.machine import AgentMachine
from isthmus.agent.parts import (
    AskProtection,
    EndLocal,
    Event,
    HeldPart,
    Instruction,
    LocalJob,
    LocalJobsSeen,
    OrdersReceived,
    PartKey,
    SeenWorker,
    StartWorker,
    StopWorker,
    WorkersSeen,
    WriteRanks,
)
from isthmus.agent.table import Table, read_table, write_table
from isthmus.core.messages import AgentOrders, AgentReport, Protection, WorkerAddress
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster, NodeGroup
from tests.control.model.clone import clone

POLICY = OwnerPolicy(preemptible_from="low", hold_s=1e9)
CARD = "g/0/0"
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


@dataclass(kw_only=True)
class Site:
    """A site. `late` is a report that still is in the network, `orders` those that are on their way.

    `jobs` are those of the owner's own users. `lives` counts the lives of the agent.
    `attempts` and `keys` are what `canonical` has worked out of it.
    """

    name: str
    machine: AgentMachine
    lives: int = 1
    processes: dict[ProcessKey, Process] = field(default_factory=dict)
    jobs: dict[str, LocalJob] = field(default_factory=dict)
    late: AgentReport | None = None
    orders: AgentOrders | None = None
    wrong: str = ""
    attempts: frozenset[PartKey] | None = None
    keys: dict[tuple[object, ...], int] = field(default_factory=dict)

    @classmethod
    def named(cls, name: str) -> Site:
        """Return a site with one card."""
        return cls(name=name, machine=AgentMachine(name, {"g": (CARD,)}, policy=POLICY))

    def copy(self) -> Site:
        """Return a site that may be changed."""
        copy: Site = clone(self)
        copy.attempts, copy.keys = None, {}
        return copy

    @property
    def cluster(self) -> Cluster:
        """What the agent says of its cluster."""
        return _CLUSTERS.setdefault(
            self.name,
            Cluster(
                name=self.name,
                owner=f"owner-{self.name}",
                node_groups=(NodeGroup(name="g", chip="H20", nodes=1, chips_per_node=1),),
            ),
        )

    def look(self) -> AgentReport:
        """Have the agent look at its processes and local jobs; return its report."""
        self.handle(WorkersSeen(now_s=0.0, workers=tuple(self._seen())))
        self.handle(LocalJobsSeen(now_s=0.0, jobs=tuple(self.jobs.values())))
        return AgentReport(
            cluster=self.cluster,
            incarnation=str(self.lives),
            free_chips=self.machine.free_chips(),
            parts=self.machine.observed(),
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
        parts = self.machine.parts.values()
        table = read_table(write_table(Table(fence=self.machine.fence, parts=list(parts))))
        self.machine = AgentMachine(self.name, {"g": (CARD,)}, table.parts, fence=table.fence, policy=POLICY)
        self.lives += 1
        for process in self.processes.values():
            process.saves = None

    def end_lease(self, key: PartKey) -> None:
        """Let a part's lease run out."""
        self.machine.parts[key].since_s = -1e9
        self.handle(WorkersSeen(now_s=0.0))

    def insist(self, key: PartKey) -> None:
        """Let the time that a part has for its end, or for its checkpoint, run out."""
        part = self.machine.parts[key]
        part.force_at_s = part.force_at_s and 0.0
        part.evict_at_s = part.evict_at_s and 0.0
        self.handle(WorkersSeen(now_s=0.0))

    def handle(self, event: Event) -> None:
        """Have the machine take an event in, and do what it asks for."""
        for instruction in self.machine.handle(event):
            self._do(instruction)

    def of(self, part: HeldPart) -> ProcessKey:
        """Return the name of a part's process."""
        return part.job, part.attempt, part.runs

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case StartWorker(part=part):
                if self.of(part) not in self.processes:
                    self._start(self.of(part))
            case StopWorker(part=part, force=force):
                process = self.processes.setdefault(self.of(part), Process(exit_status=137))
                process.asked = True
                if force and process.exit_status is None:
                    process.exit_status = 137
            case WriteRanks(part=part):
                if self.of(part) in self.processes:
                    self.processes[self.of(part)].trains = True
            case AskProtection(part=part, after=after):
                if self.of(part) in self.processes:
                    self.processes[self.of(part)].saves = after
            case EndLocal(part=part):
                self.jobs.pop(part.job, None)

    def _start(self, key: ProcessKey) -> None:
        others = [other for other, process in self.processes.items() if process.exit_status is None]
        if others:
            self.wrong = f"{key} starts on the card at {self.name} on which {others[0]} works"
        self.processes[key] = Process()

    def _seen(self) -> Iterator[SeenWorker]:
        for part in self.machine.parts.values():
            for rank, worker in part.workers.items():
                if worker.live:
                    yield self._seen_one(part, rank)

    def _seen_one(self, part: HeldPart, rank: int) -> SeenWorker:
        process = self.processes.get(self.of(part))
        if process is None:
            return SeenWorker(job=part.job, attempt=part.attempt, rank=rank, state="absent")
        step = process.protected
        return SeenWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state="running" if process.exit_status is None else "exited",
            exit_status=process.exit_status,
            address=WorkerAddress(rank=rank, cluster=self.name, host="h", port=1),
            protection=None if step is None else Protection(step=step, num_bytes=1),
        )


_CLUSTERS: dict[str, Cluster] = {}
