"""`HoldRecord`: what the agent knows of a hold on disk, written before anything is asked of the API server.

Beside the files of every `HoldFolder`:

hold.json      the request, the number of the present try, and once granted the pods and the cards of each rank
ranks/N        run folder of the keeper in the pod of rank N; starts are ordered there

The courier carries `lease`, `released` and the orders to the pods, so they work without the API server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from isthmus.agent.adapters.hold_folder import HoldFolder
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


class HoldRecord(HoldFolder):
    """The folder of a hold."""

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
        self.renew_lease(request.lease_s)

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
