"""The agent's decisions, pure: `handle(event) -> instructions`. No clock, no file, no process.

The caller saves `parts` before it carries an instruction out (`isthmus.agent.shell`); so whatever is running
is in the table, and a part in the table that is not running is started again without harm (`Adapter.start`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from isthmus.agent.cards import Cards
from isthmus.agent.exits import fault_of, in_words, was_stopped
from isthmus.agent.parts import (
    Event,
    HeldPart,
    HeldWorker,
    Instruction,
    LocalJob,
    LocalJobsSeen,
    OrdersReceived,
    PartKey,
    SeenWorker,
    ShutdownAsked,
    StartWorker,
    State,
    StopWorker,
    WorkersSeen,
    WriteRanks,
)
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages import AgentOrders, Fault, ObservedPart, PartOrder, explains_more
from isthmus.core.plan import Part

STOP_GRACE_S = 3.0
"""From SIGTERM to SIGKILL."""

CHECKIN_TIMEOUT_S = 120.0
"""How long a worker may take from its start until it says where it listens."""

SILENCE_TIMEOUT_S = 7200.0
"""How long a worker that trains may write neither a metrics line nor a log line. Far longer than a step or a
checkpoint takes: it ends what would otherwise hold its cards for ever. A worker that no longer answers its
peers is found by them much earlier (`WorkerSpec.peer_timeout_s`)."""


class AgentMachine:
    """The parts that one site holds, and what to do about them.

    `parts` are those of the agent's last life. `inventory` maps a node group to its card ids.
    """

    def __init__(
        self,
        cluster: str,
        inventory: Mapping[str, Sequence[str]],
        parts: Iterable[HeldPart] = (),
        *,
        now_s: float = 0.0,
        stop_grace_s: float = STOP_GRACE_S,
        checkin_timeout_s: float = CHECKIN_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> None:
        self.cluster = cluster
        self.parts: dict[PartKey, HeldPart] = {part.key: part for part in parts}
        self.cards = Cards(inventory)
        self.ending = False
        self._stop_grace_s, self._checkin_timeout_s = stop_grace_s, checkin_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._out: list[Instruction] = []
        for part in self.parts.values():
            part.since_s, part.rank_map = now_s, None
            part.force_at_s = now_s if part.state in ("failed", "stopping") else None
            for worker in part.workers.values():
                worker.started, worker.wrote_s = False, now_s

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event in; return what is to be done, in order."""
        self._out = []
        match event:
            case OrdersReceived():
                self._obey(event.orders, event.now_s)
            case WorkersSeen():
                for seen in sorted(event.workers, key=_peers_last):
                    self._see(seen, event.now_s)
            case LocalJobsSeen():
                self._want_local(event.jobs, event.now_s)
            case ShutdownAsked():
                self.ending = True
        self._pass_time(event.now_s)
        return self._out

    def observed(self) -> tuple[ObservedPart, ...]:
        """Return what the server is told."""
        return tuple(_observed(part) for part in self.parts.values() if not part.local)

    def free_chips(self) -> dict[str, int]:
        """Return the cards of each node group that a new part could have, less what local jobs queue for."""
        queued = [part for part in self.parts.values() if part.state == "queued"]
        return self.cards.num_free(self.parts.values(), reserved=queued)

    # Orders -------------------------------------------------------------------------------------------

    def _obey(self, orders: AgentOrders, now_s: float) -> None:
        """Release first, so that cards given back are there for what is to be prepared."""
        named = {(order.job, order.attempt) for order in orders.parts}
        for part in list(self.parts.values()):
            if part.key not in named and not part.local:
                self._release(part, now_s)
                if part.state == "released":
                    self._move(part, "forgotten", now_s)
        for order in sorted(orders.parts, key=lambda order: order.desired != "released"):
            self._obey_one(order, now_s)

    def _obey_one(self, order: PartOrder, now_s: float) -> None:
        part = self.parts.get((order.job, order.attempt))
        if part is None:
            self._meet(order, now_s)
        elif order.desired == "released":
            self._release(part, now_s)
        elif part.state == "prepared" and not self.ending:
            part.lease_s, part.since_s = order.lease_s, now_s
            if order.desired == "running":
                self._move(part, "running", now_s)
        if part is not None and part.state == "running":
            self._pass_ranks(part, order)

    def _pass_ranks(self, part: HeldPart, order: PartOrder) -> None:
        if order.rank_map is not None and order.rank_map != part.rank_map:
            part.rank_map = order.rank_map
            self._out.append(WriteRanks(part=part, rank_map=order.rank_map))

    def _meet(self, order: PartOrder, now_s: float) -> None:
        """Take in a part that is named for the first time."""
        part = HeldPart(job=order.job, attempt=order.attempt, lease_s=order.lease_s)
        part.spec, part.plan = order.spec, order.plan
        self.parts[part.key] = part
        if order.desired == "released":
            self._move(part, "released", now_s)
        elif order.desired == "running":
            why = "ordered to run, but nothing is held here: the lease ended, or the agent's state was lost"
            self._fail(part, "own", now_s, why)
        else:
            why = self._cannot_hold(part)
            self._move(part, "refused" if why else "prepared", now_s, why)

    def _cannot_hold(self, part: HeldPart) -> str:
        """Give the part its cards and return "", or return why it cannot have them."""
        if self.ending:
            return f"the agent of {self.cluster} is being stopped"
        if part.plan is None or part.spec is None:
            return "the order to prepare came without its job or plan"
        stages = dict(enumerate(part.plan.stages))
        wanted = Part.of(part.plan, self.cluster)
        if not wanted.ranks:
            return f"the plan has no stage at {self.cluster}"
        queue = [other for other in self.parts.values() if other.state == "queued"]
        why = self.cards.lacking(wanted.chips, self.parts.values(), queue)
        if why:
            return f"{self.cluster}: {why}"
        for rank in wanted.ranks:
            group, num = stages[rank].node_group, stages[rank].tp
            held = [*self.parts.values()]
            part.workers[rank] = HeldWorker(node_group=group, cards=self.cards.take(group, num, held))
        return ""

    def _release(self, part: HeldPart, now_s: float) -> None:
        if part.state in ("running", "succeeded", "failed"):
            self._move(part, "stopping", now_s)
        elif part.state in ("queued", "prepared", "refused"):
            self._move(part, "released", now_s)

    # What is seen of workers --------------------------------------------------------------------------

    def _see(self, seen: SeenWorker, now_s: float) -> None:
        part = self.parts.get((seen.job, seen.attempt))
        worker = part.workers.get(seen.rank) if part else None
        if part is None or worker is None or not worker.live:
            return
        worker.address = seen.address or worker.address
        if seen.num_bytes != worker.num_bytes:
            worker.num_bytes, worker.wrote_s = seen.num_bytes, now_s
        if seen.state == "running":
            return
        if seen.state == "absent":
            self._see_absent(part, seen.rank, now_s)
            return
        worker.live, worker.exit_status = False, seen.exit_status
        if seen.exit_status != 0:
            self._see_failure(part, seen, now_s)
        elif part.state == "running" and not part.live:
            self._move(part, "succeeded", now_s)

    def _see_failure(self, part: HeldPart, seen: SeenWorker, now_s: float) -> None:
        """Fail the part; of several ranks that failed, the one whose failure explains most is told of."""
        fault = fault_of(seen.exit_status)
        words = f": {seen.last_words}" if seen.last_words else ""
        detail = f"rank {seen.rank} {in_words(seen.exit_status)}{words}"
        if part.state == "running":
            self._fail(part, fault, now_s, detail)
        elif not was_stopped(seen.exit_status) and explains_more(fault, part.fault):
            part.fault, part.detail = fault, detail

    def _see_absent(self, part: HeldPart, rank: int, now_s: float) -> None:
        """Start what the agent's last life was to start; stop for ever what is not to run."""
        worker = part.workers[rank]
        if part.state == "running" and not worker.started:
            worker.started = True
            self._out.append(StartWorker(part=part, rank=rank))
            return
        if part.state == "running":
            self._fail(part, "own", now_s, f"rank {rank} could not be started: its folder takes no files")
        self._out.append(StopWorker(part=part, rank=rank, force=True))

    def _pass_time(self, now_s: float) -> None:
        for part in list(self.parts.values()):
            if self.ending or (part.local and part.state in ("succeeded", "failed")):
                self._release(part, now_s)
            if part.state == "prepared" and now_s - part.since_s >= part.lease_s:
                self._move(part, "released", now_s, f"not renewed within its lease of {part.lease_s:g} s")
            if part.state == "running" and not part.local:
                self._watch_over(part, now_s)
            if part.force_at_s is not None and now_s >= part.force_at_s:
                part.force_at_s = now_s + self._stop_grace_s
                self._stop_live(part, force=True)
            if part.state == "stopping" and not part.live:
                self._move(part, "released", now_s)
            if part.local and part.state == "released":
                self._move(part, "forgotten", now_s)
        self._start_queued(now_s)

    def _watch_over(self, part: HeldPart, now_s: float) -> None:
        """Fail the part where a worker does not check in, or trains and writes nothing for far too long."""
        for rank, worker in part.workers.items():
            late = worker.address is None and now_s - part.since_s >= self._checkin_timeout_s
            stuck = part.rank_map is not None and now_s - worker.wrote_s >= self._silence_timeout_s
            if worker.live and (late or stuck):
                limit_s = self._checkin_timeout_s if late else self._silence_timeout_s
                what = "did not check in within" if late else "has written nothing for"
                self._fail(part, "own", now_s, f"rank {rank} {what} {limit_s:g} s")
                return

    # The site's own jobs ------------------------------------------------------------------------------

    def _want_local(self, jobs: tuple[LocalJob, ...], now_s: float) -> None:
        wanted = {job.name for job in jobs}
        for part in list(self.parts.values()):
            if part.local and part.job not in wanted:
                self._release(part, now_s)
        for job in jobs:
            if (job.name, 0) not in self.parts and not self.ending:
                part = HeldPart(job=job.name, attempt=0, command=job.command)
                part.workers[0] = HeldWorker(node_group=job.node_group, cards=("",) * job.chips)
                self.parts[part.key] = part
                self._move(part, "queued", now_s)

    def _start_queued(self, now_s: float) -> None:
        """Start local jobs in their order; one that does not fit holds back those behind it in its group."""
        blocked: set[str] = set()
        for part in [part for part in self.parts.values() if part.state == "queued"]:
            worker = part.workers[0]
            chips = {worker.node_group: len(worker.cards)}
            if worker.node_group in blocked or self.cards.lacking(chips, self.parts.values(), ()):
                blocked.add(worker.node_group)
                continue
            worker.cards = self.cards.take(worker.node_group, len(worker.cards), self.parts.values())
            self._move(part, "running", now_s)

    # Transitions --------------------------------------------------------------------------------------

    def _move(self, part: HeldPart, to: State, now_s: float, detail: str = "") -> None:
        """Take `part` to state `to` as the table says; an illegal step raises with the part's story."""
        step = _TRANSITIONS.get((part.state, to))
        if step is None:
            story = " -> ".join((*part.story, part.state, to))
            raise IllegalTransitionError(f"part {part.job}/{part.attempt} at {self.cluster}: {story}")
        part.story = (*part.story, part.state)
        part.state, part.since_s = to, now_s
        if detail:
            part.detail = detail
        if to in ("prepared", "refused", "running", "succeeded", "failed", "released"):
            part.reported = to
        step(self, part)

    def _fail(self, part: HeldPart, fault: Fault, now_s: float, detail: str) -> None:
        part.fault = fault
        self._move(part, "failed", now_s, detail)

    def _note(self, part: HeldPart) -> None:
        """Nothing to do."""

    def _start(self, part: HeldPart) -> None:
        for rank, worker in part.workers.items():
            worker.live, worker.started, worker.wrote_s = True, True, part.since_s
            self._out.append(StartWorker(part=part, rank=rank))

    def _stop(self, part: HeldPart) -> None:
        if part.force_at_s is None:
            part.force_at_s = part.since_s + self._stop_grace_s
        self._stop_live(part, force=False)

    def _free(self, part: HeldPart) -> None:
        part.workers, part.force_at_s, part.spec, part.plan = {}, None, None, None

    def _forget(self, part: HeldPart) -> None:
        del self.parts[part.key]

    def _stop_live(self, part: HeldPart, *, force: bool) -> None:
        for rank, worker in part.workers.items():
            if worker.live:
                self._out.append(StopWorker(part=part, rank=rank, force=force))


_TRANSITIONS: dict[tuple[State, State], Callable[[AgentMachine, HeldPart], None]] = {
    ("new", "queued"): AgentMachine._note,
    ("new", "prepared"): AgentMachine._note,
    ("new", "refused"): AgentMachine._note,
    ("new", "failed"): AgentMachine._note,
    ("new", "released"): AgentMachine._free,
    ("queued", "running"): AgentMachine._start,
    ("queued", "released"): AgentMachine._free,
    ("prepared", "running"): AgentMachine._start,
    ("prepared", "released"): AgentMachine._free,
    ("refused", "released"): AgentMachine._free,
    ("running", "succeeded"): AgentMachine._note,
    ("running", "failed"): AgentMachine._stop,
    ("running", "stopping"): AgentMachine._stop,
    ("succeeded", "stopping"): AgentMachine._stop,
    ("failed", "stopping"): AgentMachine._stop,
    ("stopping", "released"): AgentMachine._free,
    ("released", "forgotten"): AgentMachine._forget,
}


def _observed(part: HeldPart) -> ObservedPart:
    addresses = tuple(worker.address for worker in part.workers.values() if worker.address is not None)
    return ObservedPart(
        job=part.job,
        attempt=part.attempt,
        state=part.reported,
        detail=part.detail,
        fault=part.fault,
        workers=addresses,
    )


def _peers_last(seen: SeenWorker) -> bool:
    return fault_of(seen.exit_status) == "peer"
