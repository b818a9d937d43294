"""What holds for every sequence of orders, failures, restarts and local jobs."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.agent.machine import AgentMachine
from isthmus.agent.parts import (
    Event,
    HeldPart,
    LocalJob,
    LocalJobsSeen,
    OrdersReceived,
    PartKey,
    SeenWorker,
    StartWorker,
    StopWorker,
    WorkersSeen,
)
from isthmus.agent.table import Table, read_table, write_table
from isthmus.agent.validators import validate
from isthmus.core.messages import PartOrder
from tests.agent.samples import INVENTORY, address, order, orders

PLACES = st.lists(st.sampled_from(["east/h20", "east/l40s"]), min_size=1, max_size=4)
KEYS = st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 2))
RANK = {"new": 0, "prepared": 1, "refused": 1, "running": 2, "succeeded": 3, "failed": 3, "released": 4}


class World(RuleBasedStateMachine):
    """A site whose processes are a dictionary: (job, attempt, rank) to `running` or an exit status."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.saved: list[HeldPart] = []
        self.machine = AgentMachine("east", INVENTORY)
        self.wanted: dict[PartKey, PartOrder] = {}
        self.jobs: dict[str, LocalJob] = {}
        self.processes: dict[tuple[str, int, int], str | int] = {}
        self.started: dict[tuple[str, int, int], int] = {}
        self.told: dict[PartKey, int] = {}
        self.cut = False

    def apply(self, event: Event) -> None:
        """Decide, save, act; where `cut`, the agent dies after the first act."""
        done = self.machine.handle(event)
        table = Table(fence=self.machine.fence, parts=list(self.machine.parts.values()))
        self.saved = read_table(write_table(table)).parts
        for step in done[:1] if self.cut else done:
            match step:
                case StartWorker(part=part, rank=rank):
                    key = (part.job, part.attempt, rank)
                    if key not in self.processes:
                        self.started[key] = self.started.get(key, 0) + 1
                        self.processes[key] = "running"
                case StopWorker(part=part, rank=rank, force=force):
                    key = (part.job, part.attempt, rank)
                    if force or key not in self.processes:
                        self.processes[key] = 137
        if self.cut:
            self.cut = False
            self.machine = AgentMachine("east", INVENTORY, self.saved, now_s=self.now_s)

    @rule(key=KEYS, places=PLACES)
    def prepare(self, key: PartKey, places: list[str]) -> None:
        if key not in self.told:
            wanted = order("prepared", *key, places=places, lease_s=5)
            self.wanted.setdefault(key, wanted)

    @rule(key=KEYS)
    def commit(self, key: PartKey) -> None:
        if key in self.wanted and self.wanted[key].desired == "prepared":
            self.wanted[key] = self.wanted[key].model_copy(update={"desired": "running"})

    @rule(key=KEYS)
    def release(self, key: PartKey) -> None:
        if key in self.wanted:
            self.wanted[key] = self.wanted[key].model_copy(update={"desired": "released"})

    @rule()
    def exchange(self) -> None:
        before = dict(self.told)
        for part in self.machine.observed():
            key, rank = (part.job, part.attempt), RANK[part.state]
            assert rank >= before.get(key, 0), "a part's life only moves forward"
            self.told[key] = rank
            if part.state == "released":
                self.wanted.pop(key, None)
                for name, process in self.processes.items():
                    assert name[:2] != key or process != "running", "released, yet a process is left"
        self.apply(OrdersReceived(now_s=self.now_s, orders=orders(*self.wanted.values())))

    @rule(name=st.sampled_from(["x", "y"]), chips=st.integers(1, 3))
    def submit_local(self, name: str, chips: int) -> None:
        if (name, 0, 0) not in self.processes:
            self.jobs[name] = LocalJob(name=name, command=("true",), node_group="h20", chips=chips)
        self.apply(LocalJobsSeen(now_s=self.now_s, jobs=tuple(self.jobs.values())))

    @rule(name=st.sampled_from(["x", "y"]))
    def withdraw_local(self, name: str) -> None:
        self.jobs.pop(name, None)
        self.apply(LocalJobsSeen(now_s=self.now_s, jobs=tuple(self.jobs.values())))

    @rule(status=st.sampled_from([0, 0, 1, 137]), data=st.data())
    def process_ends(self, status: int, data: st.DataObject) -> None:
        alive = sorted(key for key, process in self.processes.items() if process == "running")
        if alive:
            key = data.draw(st.sampled_from(alive))
            self.processes[key] = status
            if key[1] == 0:
                self.jobs.pop(key[0], None)

    @rule()
    def look(self) -> None:
        seen = []
        for part in self.machine.parts.values():
            for rank, worker in part.workers.items():
                if worker.live:
                    seen.append(self.seen(part, rank))
        self.apply(WorkersSeen(now_s=self.now_s, workers=tuple(seen)))

    def seen(self, part: HeldPart, rank: int) -> SeenWorker:
        process = self.processes.get((part.job, part.attempt, rank))
        state = "absent" if process is None else "running" if process == "running" else "exited"
        status = process if isinstance(process, int) else None
        return SeenWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state=state,  # type: ignore[arg-type]
            exit_status=status,
            address=address(rank) if state == "running" else None,
        )

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.apply(WorkersSeen(now_s=self.now_s))

    @rule()
    def agent_dies_after_the_next_act(self) -> None:
        self.cut = True

    @rule()
    def agent_restarts(self) -> None:
        self.machine = AgentMachine("east", INVENTORY, self.saved, now_s=self.now_s)

    @invariant()
    def cards_are_never_given_twice(self) -> None:
        validate(self.machine)

    @invariant()
    def nothing_is_started_twice(self) -> None:
        assert all(num == 1 for num in self.started.values())

    @invariant()
    def every_process_has_its_cards(self) -> None:
        for (job, attempt, rank), process in self.processes.items():
            if process == "running":
                part = self.machine.parts.get((job, attempt))
                assert part is not None, f"process {job}/{attempt}/{rank} belongs to nobody"
                assert part.workers[rank].cards, "a process without cards"

    def teardown(self) -> None:
        """Whatever happened: with everything released, every card is free and no process is left."""
        self.jobs.clear()
        self.wanted.clear()
        for _ in range(12):
            self.time_passes(4.0)
            self.withdraw_local("x")
            self.look()
            self.exchange()
        assert self.machine.parts == {}
        assert "running" not in self.processes.values()
        assert self.machine.free_chips() == {"h20": 3, "l40s": 2}


World.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase
