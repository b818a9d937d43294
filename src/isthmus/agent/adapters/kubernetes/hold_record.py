"""`HoldRecord`: what the agent knows of a hold on disk, written before anything is asked of the API server.

hold.json      the request, the number of the present try, and once granted the pods and the cards of each rank
lease          number of renewals and the lease in seconds; rewritten by each renewal
released       the hold has ended, and its id is used up
ranks/N        run folder of the keeper in the pod of rank N; starts are ordered there

The courier carries `lease`, `released` and the orders to the pods, so they work without the API server.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from isthmus.agent.adapters.kubernetes.manifests import HoldPlan, hold_units
from isthmus.agent.adapters.scheduler_adapter import ContainerNeed, Hold, HoldRequest
from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import write_atomically


class HoldState(FrozenModel):
    """The content of `hold.json`.

    `claim` numbers the tries; `open`: objects of the present one may be there, `asked`: all of them are.
    """

    job: str
    attempt: int
    ranks: tuple[tuple[str, int], ...]
    claim: int = 0
    preempts: bool = False
    open: bool = False
    asked: bool = False
    pods: tuple[str, ...] = ()
    cards: tuple[tuple[str, ...], ...] = ()
    containers: dict[str, ContainerNeed] = Field(default_factory=dict)
    nodes: tuple[str, ...] = ()


class HoldRecord:
    """The folder of the hold `hold_id` below `root`."""

    def __init__(self, root: Path, hold_id: str) -> None:
        self.id, self.path = hold_id, root / hold_id

    @property
    def is_released(self) -> bool:
        """Whether the hold has ended."""
        return (self.path / "released").exists()

    def release(self) -> None:
        """Use up the id: the keepers in its pods end, and nothing is created for it any more."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "released").touch()

    @property
    def is_cleared(self) -> bool:
        """Whether nothing of the ended hold is left at the API server."""
        return (self.path / "cleared").exists()

    def note_cleared(self, cleared: bool = True) -> None:
        """Note whether something of the ended hold may be left."""
        if cleared:
            (self.path / "cleared").touch()
        else:
            (self.path / "cleared").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one that asks for this hold, also among agents that follow each other."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def renew(self, request: HoldRequest) -> None:
        """Renew the lease; the first time also store the request and make the folders of its ranks."""
        if not (self.path / "hold.json").exists():
            for number in range(len(request.ranks)):
                self.rank_folder(number).mkdir(parents=True, exist_ok=True)
            ranks = tuple((rank.node_group, rank.num_cards) for rank in request.ranks)
            nodes = tuple(rank.node for rank in request.ranks)
            containers = dict(request.containers)
            self.save(
                HoldState(job=request.job, attempt=request.attempt, ranks=ranks, containers=containers, nodes=nodes)
            )
        number = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            number = int((self.path / "lease").read_text(encoding="ascii").split()[0])
        write_atomically(self.path / "lease", f"{number + 1} {request.lease_s}\n")

    def state(self) -> HoldState | None:
        """Return what is stored, None before the first `renew`."""
        try:
            return HoldState.model_validate_json((self.path / "hold.json").read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UnavailableError(f"{self.path / 'hold.json'} cannot be read") from error

    def save(self, state: HoldState) -> None:
        """Store `state`."""
        write_atomically(self.path / "hold.json", state.model_dump_json())

    def rank_folder(self, number: int) -> Path:
        """Return the run folder of the keeper of a rank."""
        return self.path / "ranks" / str(number)

    def granted(self) -> Hold | None:
        """Return the hold with its cards, None before it is granted and after it has ended."""
        state = self.state()
        if state is None or not state.cards or self.is_released:
            return None
        return Hold(id=self.id, state="granted", cards=state.cards)

    def plan(self, state: HoldState) -> HoldPlan:
        """Return what the present try asks for."""
        return HoldPlan(
            id=self.id, claim=state.claim, job=state.job, attempt=state.attempt,
            units=hold_units(state.ranks, state.nodes), preempts=state.preempts, containers=state.containers,
        )  # fmt: skip


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Be the only one that gives cards to the holds below `folder`, or starts workers from a rank's `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def uncleared_holds(root: Path) -> Iterator[HoldRecord]:
    """Yield the holds that have ended and of which something may be left."""
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(root.iterdir()):
            record = HoldRecord(root, folder.name)
            if (folder / "hold.json").exists() and record.is_released and not record.is_cleared:
                yield record


def known_holds(root: Path) -> Iterator[HoldRecord]:
    """Yield the holds that are on disk and not released."""
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(root.iterdir()):
            record = HoldRecord(root, folder.name)
            if folder.is_dir() and (folder / "hold.json").exists() and not record.is_released:
                yield record
