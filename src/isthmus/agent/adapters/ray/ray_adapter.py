"""`RayAdapter`: cards of a Ray cluster over its REST interface.

A hold is a placement group of the agent's holder job; a rank is a task in it with a courier beside the program. Orders,
ends and leases travel by the courier, so ranks start, stop and end while Ray's dashboard is down.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from isthmus.agent.adapters.file_workers import FileWorkers
from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, worker_variables
from isthmus.agent.adapters.ray.check_python import check_python
from isthmus.agent.adapters.ray.holder_job import HolderJob
from isthmus.agent.adapters.ray.ray_checks import check_ray
from isthmus.agent.adapters.ray.ray_holds import RayHold, rank_order
from isthmus.agent.adapters.ray.ray_rest import RayNode, RayRest
from isthmus.agent.adapters.ray.ray_site import RaySite
from isthmus.agent.adapters.scheduler_adapter import (
    Capabilities,
    Hold,
    HoldRequest,
    RankStart,
    SchedulerCheck,
    SchedulerLook,
)
from isthmus.agent.courier.courier import Courier
from isthmus.agent.courier.start_file import write_start
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, write_atomically
from isthmus.core.process.exclusive_lock import exclusive_lock


class RayAdapter(FileWorkers):
    """Hold cards of a Ray cluster and run workers on them (see `SchedulerAdapter`).

    All adapters of one `state` folder in a process share its `courier`.
    """

    def __init__(
        self, site: RaySite, state: Path, rest: RayRest, courier: Courier, program: Sequence[str] = WORKER_COMMAND,
    ) -> None:  # fmt: skip
        self._site, self._rest, self._courier, self._program = site, rest, courier, tuple(program)
        has_images = site.images is not None
        self.capabilities = Capabilities(
            holds="scheduler", containers="node" if has_images else "none", images=has_images, node_images=site.images
        )
        self._root = state.absolute() / "ray"
        self._holds = self._root / "holds"
        self._python = site.python
        self._holder = HolderJob(self._root, rest, courier, self._python)
        super().__init__(state / "queue")
        self._lock, self._are_ended = threading.Lock(), False  # the holds of earlier holder jobs

    def observe(self) -> SchedulerLook:
        """Look at nodes, their use and the holder job; renew the holder's lease."""
        with self._locked():
            epoch, nodes = self._rest.version()["session_name"], self._rest.nodes()
            self._look_at_holder(epoch)
            holds = tuple(self._live_holds(nodes))
            ours: dict[str, set[str]] = {}
            for card in (card for hold in holds for rank in hold.cards for card in rank):
                ours.setdefault(card.split("/")[1], set()).add(card)
            return SchedulerLook(
                nodes=tuple(self._site.card_nodes(nodes)), epoch=epoch, holds=holds, queue=self._queue.entries(),
                foreign=self._site.foreign_jobs(nodes, ours),
            )  # fmt: skip

    def hold(self, request: HoldRequest) -> Hold:
        """Have the holder ask for a placement group; renew the lease. Ray grants all of it or nothing."""
        for rank in request.ranks:
            self._site.resource(rank.node_group)
        with self._locked():
            hold = RayHold(self._holds, request.id)
            if hold.is_released:
                return Hold(id=request.id, state="ended")
            self._look_at_holder(self._rest.version()["session_name"])
            if hold.is_released:  # with the holder job that had it
                return Hold(id=request.id, state="ended")
            if self._holder.is_missing and not hold.ranks():  # a new one is not bound to a job that may be over
                return Hold(id=request.id, state="waiting", detail="Ray does not list the agent's job")
            hold.renew(request, self._holder.number)
            self._holder.ensure()
            self._order(hold)
            found = self._read(hold, None)
            if found is None and not hold.is_released:
                return Hold(id=request.id, state="waiting", detail=self._holder.trouble)
            return found or Hold(id=request.id, state="ended")

    def release(self, hold_id: str) -> None:
        """Use up the id: its ranks end, then the holder gives the cards back. Needs no answer from Ray."""
        with self._locked():
            hold = RayHold(self._holds, hold_id)
            hold.release()
            self._order(hold)

    def start(self, rank: RankStart) -> None:
        """Have the holder start the courier of a rank in its bundle (see `SchedulerAdapter.start`)."""
        folder = rank.folder.absolute()
        if (folder / "pid").exists():
            return
        with self._locked():
            hold = RayHold(self._holds, rank.hold)
            known = hold.granted()
            if known is None or hold.is_released:
                raise UnavailableError(f"the hold of {folder} is not granted, or has ended")
            bundle = next(at for at, cards in enumerate(known.cards) if rank.cards[0] in cards)
            if not (folder / "start.json").exists():
                write_atomically(folder / "hold", rank.hold)
                environment = worker_variables(folder, {}, rank, WorkerFolder(folder).read_limits())
                write_start(folder, rank.command or (*self._program, str(folder)), environment)
            ticket = self._courier.ticket(folder, hold.path).decode("ascii")
            self._holder.write_order(_order_name(folder), rank_order(hold.id, bundle, ticket))

    def leave(self) -> None:
        """End the holder job and have Ray forget it."""
        with self._locked():
            self._holder.end()

    def check(self) -> Sequence[SchedulerCheck]:
        """Return what `isthmus site check` finds."""
        found = check_ray(self._site, self._rest)
        answers = any(one.check == "scheduler" and one.ok for one in found)
        return (*found, *check_python(self._rest, self._python)) if answers else found

    def _look_at_holder(self, epoch: str) -> None:
        """End the holds of holder jobs that are over, also those that an earlier agent left; renew the present one."""
        if self._holder.has_ended(epoch):
            self._are_ended = False
        if not self._are_ended:
            for hold in self._known():
                if not hold.is_released and 0 < hold.holder() < self._holder.number:
                    hold.release()
            self._are_ended = True
        self._holder.renew()

    def _order(self, hold: RayHold) -> None:
        """Tell the holder of a hold's renewals and of its end."""
        ranks, (renewals, lease_s) = hold.ranks(), hold.lease()
        if not ranks or hold.holder() != self._holder.number:
            return
        order = self._site.hold_order(ranks, renewals=renewals, lease_s=lease_s, released=hold.is_released)
        self._holder.write_order(f"hold-{hold.id}.json", order)

    def _live_holds(self, nodes: Sequence[RayNode]) -> Iterator[Hold]:
        """Yield the holds that are granted; what has ended is cleared away."""
        for hold in self._known():
            if not hold.is_released:
                found = self._read(hold, nodes)
                if found is not None and found.state == "granted":
                    yield found
            elif hold.holder() == self._holder.number:
                order = self._holder.folder / f"hold-{hold.id}.json"
                if order.exists() and self._holder.read_state(hold.id, len(hold.ranks()))[0] == "ended":
                    self._holder.forget(hold.id)

    def _read(self, hold: RayHold, nodes: Sequence[RayNode] | None) -> Hold | None:
        """Return a hold by the holder's answer; None if it waits, or has ended, which is then noted."""
        ranks = hold.ranks()
        state, places = self._holder.read_state(hold.id, len(ranks))
        if state == "ended":
            hold.release()
            return None
        known = hold.granted()
        if known is not None or state == "waiting":
            return known
        names = self._site.names(self._rest.nodes() if nodes is None else nodes)
        if not set(places) <= names.keys():
            raise UnavailableError(f"a node of hold {hold.id} is not alive")
        taken = {card for one in self._known() if one.id != hold.id for card in _cards_of(one)}
        cards: list[tuple[str, ...]] = []
        for (group, num), node in zip(ranks, places, strict=True):
            numbered = (f"{group}/{names[node]}/{number}" for number in range(1_000_000))
            free = (card for card in numbered if card not in taken)
            cards.append(tuple(next(free) for _ in range(num)))
            taken.update(cards[-1])
        return hold.grant(tuple(cards))

    def _known(self) -> list[RayHold]:
        """Return the holds of the state folder that Ray may have."""
        with contextlib.suppress(FileNotFoundError):
            return [RayHold(self._holds, name) for name in sorted(one.name for one in self._holds.iterdir())]
        return []

    def _hold_of(self, folder: Path) -> RayHold:
        with contextlib.suppress(FileNotFoundError):
            return RayHold(self._holds, (folder / "hold").read_text(encoding="ascii"))
        return RayHold(self._holds, "none")

    def _is_asked_for(self, folder: Path) -> bool:
        return (folder / "start.json").exists()

    def _can_no_more_start(self, folder: Path) -> bool:
        return self._hold_of(folder).is_released

    def _has_lost(self, folder: Path) -> bool:
        """Return whether the worker's hold is long over."""
        return self._hold_of(folder).is_over()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only one that changes holds, also among agents that follow each other."""
        with self._lock, exclusive_lock(self._root / "lock"):
            yield


def _cards_of(hold: RayHold) -> Iterator[str]:
    granted = None if hold.is_released else hold.granted()
    for rank in granted.cards if granted is not None else ():
        yield from rank


def _order_name(folder: Path) -> str:
    return f"rank-{hashlib.sha256(str(folder).encode(errors='surrogateescape')).hexdigest()[:32]}.json"
