"""`SchedulerAdapter`: the interface between the agent and a site's scheduler, and the values that cross it.

An adapter makes no decisions: the site machine decides what to hold, start and stop. It identifies workers by their
folders (`WorkerFolder`) and holds by ids of the agent. Every adapter must pass `check_adapter`;
`docs/design/adapters.md` gives the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.pool_parts.group_topology import GroupTopology


class WorkerStatus(FrozenModel):
    """The observed state of one worker.

    `absent`: never started. `running`: a process of it may exist. `exited`: all of its processes have ended;
    `exit_status` is then the program's status, or 128 + n if signal n ended it.
    """

    state: Literal["absent", "running", "exited"]
    exit_status: int | None = None


class QueueMove(FrozenModel):
    """Move or insert `entry` directly after `after` (None: to the front)."""

    entry: QueueEntry
    after: QueueEntry | None = None


@dataclass(frozen=True, kw_only=True)
class NodeImages:
    """Where each node has the images of the policy, an OCI layout, and where it unpacks them: a folder of its own."""

    layout: str
    store: str


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an adapter's scheduler can do."""

    # What keeps held cards from others; `none`: nothing does, so a start may find them taken.
    holds: Literal["agent", "scheduler", "none"]
    # Calls may take long, so the agent makes them in a thread of their own.
    blocks: bool = True
    # `probe` knows start and victims; `commit` can preempt; `order` reaches the scheduler's own queue.
    probes: bool = False
    preempts: bool = False
    orders: bool = False
    # A restart may lose what it had acknowledged, and then changes the epoch; else the epoch names its store.
    forgets: bool = True
    # What makes the containers of workers: `agent`, by `runc`, whose bundles the nodes see; `node`, by `runc` from
    # `node_images`; `scheduler`, as pods with the limits of `HoldRequest.containers`; `none`: workers are processes of
    # the nodes. `images`: of rendered images.
    containers: Literal["agent", "node", "scheduler", "none"] = "none"
    images: bool = False
    node_images: NodeImages | None = None
    # Where pods see the files of jobs, below which every path of a job must then lie; empty: what their image has.
    storage_path: str = ""


@dataclass(frozen=True, kw_only=True)
class CardNode:
    """A node and its cards, ids `GROUP/NODE/CARD`; `usable`: its scheduler gives them out."""

    name: str
    node_group: str
    cards: tuple[str, ...]
    usable: bool = True


@dataclass(frozen=True, kw_only=True)
class ForeignJob:
    """A job of the site's other users. Its name is unique at the site as long as it lives."""

    name: str
    # What the scheduler orders by, higher first.
    priority: int
    # Number of cards by node group, and, once it runs, the cards as far as the scheduler tells.
    wanted: Mapping[str, int]
    cards: tuple[str, ...] = ()
    running: bool = False
    # One of the site's priority levels; empty: the one that the pool's middle maps to.
    level: str = ""
    preemptible: bool = False
    # When a running one ends at the latest, in seconds since the epoch (None: unknown).
    ends_at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankNeed:
    """Cards of one rank: `num_cards` on one node of `node_group`, on `node` where the site's topology chose one."""

    node_group: str
    num_cards: int
    node: str = ""


class ContainerNeed(FrozenModel):
    """What the container of a rank is made from: an image as `NAME@DIGEST` (empty: the site's), cores and memory.

    None: not limited.
    """

    image: str = ""
    cpu_cores: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class HoldRequest:
    """Cards for all ranks of a part, or for none. The id, 32 hexadecimal digits, is the agent's own.

    `containers` are those of the ranks by node group, where the scheduler makes them.
    """

    id: str
    job: str
    attempt: int
    ranks: tuple[RankNeed, ...]
    lease_s: float
    # Jobs that `commit` may preempt, named as in `Probe`.
    victims: tuple[str, ...] = ()
    containers: Mapping[str, ContainerNeed] = field(default_factory=dict)

    @property
    def preempts(self) -> bool:
        """Whether `commit` may preempt jobs."""
        return bool(self.victims)


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A hold as the scheduler has it.

    `waiting`: not yet, and `detail` says for what. `granted`: `cards` are those of each rank, in the order of the
    request, and `granted_at_s`, in seconds since the epoch, is since when (None: unknown). `ended`: released, expired
    or unknown; the id is used up.
    """

    id: str
    state: Literal["waiting", "granted", "ended"]
    cards: tuple[tuple[str, ...], ...] = ()
    detail: str = ""
    granted_at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """When a request could start, in seconds from now (None: unknown), and which jobs it would preempt.

    Jobs of others go by their name, parts of this agent by `JOB/ATTEMPT`.
    """

    start_in_s: float | None = None
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SchedulerLook:
    """One look at the scheduler."""

    nodes: tuple[CardNode, ...]
    # Names the run of the scheduler that answered; a restart changes it within a few looks.
    epoch: str = ""
    foreign: tuple[ForeignJob, ...] = ()
    # The live holds of this agent, also those of an earlier process of it; `ended` ones must be released again.
    holds: tuple[Hold, ...] = ()
    # The site's queue in start order, without duplicates.
    queue: tuple[QueueEntry, ...] = ()

    def cards(self) -> dict[str, tuple[str, ...]]:
        """Return the ids of all usable cards by node group; cards of one node are adjacent."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            found[node.node_group] = (*found.get(node.node_group, ()), *(node.cards if node.usable else ()))
        return found


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """Start the worker of `folder` on `cards`, inside `hold` where the scheduler holds.

    `command` replaces the site's worker program, `variables` are set above those of the site, and `image` is the one
    that the pods of the hold must have, where the scheduler makes them.
    """

    folder: Path
    cards: tuple[str, ...]
    command: tuple[str, ...] = ()
    hold: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    image: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulerCheck:
    """One finding of `isthmus site check`; `file_path` is the field of `site.yaml` that is wrong."""

    check: str
    ok: bool
    detail: str
    hint: str = ""
    file_path: tuple[str, ...] = ()


class SchedulerAdapter(ABC):
    """Observe a scheduler, hold its cards, start, watch and stop workers, order its queue.

    Every call is idempotent. `UnavailableError` leaves the outcome open, and the caller repeats the call. Only `poll`
    must not block; the agent makes the other calls in a thread of their own if `capabilities.blocks`.

    State comes from the folders and the scheduler, never from the adapter's memory alone, so a new agent finds the
    workers and holds of its predecessor.
    """

    capabilities: Capabilities

    @abstractmethod
    def observe(self) -> SchedulerLook:
        """Look at the scheduler once, cheaply. Raises `UnavailableError` rather than report less than there is."""

    def probe(self, request: HoldRequest) -> Probe:  # noqa: ARG002 - a scheduler without estimates answers so
        """Return when `request` could start and which jobs it would preempt; nothing changes."""
        return Probe()

    def hold(self, request: HoldRequest) -> Hold:
        """Reserve cards for all ranks without disturbing a job of others, or renew the lease of the hold."""
        raise InputError(f"this scheduler holds no cards for {request.job}/{request.attempt}")

    def commit(self, request: HoldRequest) -> Hold:
        """Make the hold certain: with `preempts` at the cost of other jobs. Renews the lease as well."""
        return self.hold(request)

    def release(self, hold_id: str) -> None:  # noqa: B027 - where nothing is held there is nothing to end
        """End a hold, with everything that runs in it. An id once released holds nothing again."""

    @abstractmethod
    def start(self, rank: RankStart) -> None:
        """Start the worker of a folder at most once, also when several agents in succession call this repeatedly.

        The program gets the comma-separated card ids in `ISTHMUS_CARDS`, the `variables`, and no tokens. `WorkerLimits`
        in the folder are applied before the program starts (`core/process/confined_start.py`). No effect if the folder
        was started or stopped before. Raises `UnavailableError` if it cannot be started.
        """

    @abstractmethod
    def poll(self, folder: Path) -> WorkerStatus:
        """Return the status of the worker of `folder`, from its files and what was observed last."""

    @abstractmethod
    def stop(self, folder: Path, *, force: bool) -> None:
        """Send SIGTERM, or with `force` SIGKILL, to the worker of `folder`.

        A worker that has not started can no longer start.
        """

    @abstractmethod
    def order(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry] = ()) -> None:
        """Remove `removed` from the site's queue, then apply `moves` in order.

        Other entries keep their order. If `after` of a move is not in the queue, the entry goes last. A
        thousand moves must take at most one second. Raises `OSError` if the queue cannot be changed.
        """

    def topologies(self) -> Mapping[str, GroupTopology]:
        """Return how the nodes of node groups are joined, as far as the scheduler says; asked once, at the start.

        Raises `InputError` for what it says that cannot be used.
        """
        return {}

    def leave(self) -> None:  # noqa: B027 - where nothing but holds is kept there is nothing to remove
        """Remove what this agent keeps at the scheduler beside its holds, which have ended: its site leaves."""

    def check(self) -> Sequence[SchedulerCheck]:
        """Return what `isthmus site check` finds out about the scheduler; what it starts there has ended after it."""
        return ()
