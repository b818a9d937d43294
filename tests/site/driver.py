"""A hand on the agent's machine for tests: a clock, short words for events, invariants after each of them."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.messages.agent_messages import AgentOrders, PartOrder, VerifiedCheckpoint
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.priority import PriorityMap
from isthmus.site.devices.device_allocator import DeviceAllocator
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import (
    HoursObserved,
    LocalJob,
    LocalJobsObserved,
    ObservedWorker,
    OrdersReceived,
    QueueObserved,
    RequestCheckpoint,
    ShutdownRequested,
    SiteEvent,
    SiteInstruction,
    StartWorker,
    StopWorker,
    WorkersObserved,
)
from isthmus.site.parts import PartKey, SitePart
from isthmus.site.site_invariants import check_site
from tests.site.samples import INVENTORY, orders, states


class Site:
    """A machine with a clock, validated after every event."""

    def __init__(
        self,
        policy: OwnerPolicy | None = None,
        priorities: PriorityMap | None = None,
        devices: DeviceAllocator | None = None,
    ) -> None:
        self.now_s = 0.0
        devices = devices or DeviceIdAllocator(INVENTORY)
        self.machine = SiteMachine("east", devices, policy=policy, priorities=priorities)
        self.jobs: dict[str, LocalJob] = {}

    def obey(self, *parts: PartOrder, fence: int = 0, queue: Sequence[str] = ()) -> list[SiteInstruction]:
        """Take in what the server orders."""
        answer = orders(*parts).model_copy(update={"fence": fence, "queue": tuple(queue)})
        return self.handle(OrdersReceived(now_s=self.now_s, orders=AgentOrders.model_validate(answer)))

    def see(self, state: str, rank: int = 0, job: str = "a", **fields: object) -> list[SiteInstruction]:
        """See one worker."""
        attempt = int(str(fields.pop("attempt", 1)))
        seen = ObservedWorker(job=job, attempt=attempt, rank=rank, state=state, **fields)  # type: ignore[arg-type]
        return self.handle(WorkersObserved(now_s=self.now_s, workers=(seen,)))

    def saved(self, step: int, rank: int = 0, job: str = "a") -> list[SiteInstruction]:
        """See that a rank has verified its file of a checkpoint."""
        return self.see("running", rank, job, protection=VerifiedCheckpoint(step=step, num_bytes=10))

    def local(self, *jobs: LocalJob) -> list[SiteInstruction]:
        """See these jobs of the site's own users, and no others."""
        return self.handle(LocalJobsObserved(now_s=self.now_s, jobs=jobs))

    def queued(self, *entries: PartKey) -> list[SiteInstruction]:
        """See the site's queue."""
        return self.handle(QueueObserved(now_s=self.now_s, entries=entries))

    def hours(self, is_open: bool) -> list[SiteInstruction]:
        """See that the pool's hours have begun or ended."""
        return self.handle(HoursObserved(now_s=self.now_s, is_open=is_open))

    def wait(self, seconds: float) -> list[SiteInstruction]:
        """Let time pass."""
        self.now_s += seconds
        return self.handle(WorkersObserved(now_s=self.now_s))

    def shut_down(self, *, saves_first: bool = False) -> list[SiteInstruction]:
        """Ask the agent to end."""
        return self.handle(ShutdownRequested(now_s=self.now_s, saves_first=saves_first))

    def handle(self, event: SiteEvent) -> list[SiteInstruction]:
        """Take an event in."""
        done = self.machine.handle(event)
        check_site(self.machine)
        return done

    @property
    def states(self) -> dict[str, str]:
        """What the site reports to the server, as `job/attempt: state`."""
        return states(self.machine)

    def part(self, job: str = "a", attempt: int = 1) -> SitePart:
        """Return a part of the table."""
        return self.machine.parts[job, attempt]

    def detail(self, job: str = "a", attempt: int = 1) -> str:
        """Return what is said of a part."""
        return self.part(job, attempt).detail


def local(name: str = "x", chips: int = 3, level: str = "middle", *, preemptible: bool = True) -> LocalJob:
    """A job of the site's own users on `chips` devices of its three."""
    return LocalJob(name=name, command=("true",), node_group="h20", chips=chips, level=level, preemptible=preemptible)


def starts(done: list[SiteInstruction]) -> list[int]:
    """Ranks that are started."""
    return [step.rank for step in done if isinstance(step, StartWorker)]


def started_jobs(done: list[SiteInstruction]) -> list[str]:
    """Jobs of which something is started."""
    return [step.part.job for step in done if isinstance(step, StartWorker)]


def stops(done: list[SiteInstruction]) -> list[tuple[int, bool]]:
    """Ranks that are stopped, and whether by force."""
    return [(step.rank, step.force) for step in done if isinstance(step, StopWorker)]


def asked_to_save(done: list[SiteInstruction]) -> list[tuple[str, int]]:
    """Jobs that are asked for a checkpoint, and of a step after which."""
    return [(step.part.job, step.after) for step in done if isinstance(step, RequestCheckpoint)]
