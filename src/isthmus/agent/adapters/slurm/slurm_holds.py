"""`SlurmHold`: what is known of a hold on disk, in a folder that the nodes see.

Beside the files of every `HoldFolder`:

request.json   the request, as first asked for
granted.json   the allocations and the cards of each rank, once Slurm has granted them, and when it did
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Set
from pathlib import Path

from isthmus.agent.adapters.hold_folder import HoldFolder
from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process import rank_runner

JOB_PREFIX = "isthmus-"

RUNNER = (sys.executable, "-I", "-S", "-B", rank_runner.__file__)


class SlurmHold(HoldFolder):
    """The folder of a hold."""

    def job_name(self, number: int) -> str:
        """Return the name of the allocation `number` of the hold."""
        return f"{JOB_PREFIX}{self.id}-{number}"

    def said(self, number: int) -> Path:
        """Return the file with what `salloc` says of the allocation `number`."""
        return self.path / f"salloc.{number}"

    def renew(self, request: HoldRequest) -> bool:
        """Renew the lease; the first time also store the request. Return whether it is the first time."""
        is_new = not (self.path / "request.json").exists()
        if is_new:
            ranks = [(rank.node_group, rank.num_cards) for rank in request.ranks]
            text = {"job": request.job, "attempt": request.attempt, "ranks": ranks}
            write_atomically(self.path / "request.json", json.dumps(text))
        self.renew_lease(request.lease_s)
        return is_new

    def ranks(self) -> list[tuple[str, int]]:
        """Return node group and number of cards of each rank."""
        with contextlib.suppress(OSError):
            found = json.loads((self.path / "request.json").read_text(encoding="utf-8"))
            return [(group, num) for group, num in found["ranks"]]
        return []

    def part_name(self) -> str:
        """Return job and attempt of the part that holds, as `JOB/ATTEMPT`."""
        found = json.loads((self.path / "request.json").read_text(encoding="utf-8"))
        return f"{found['job']}/{found['attempt']}"

    def grant(self, jobs: list[int], cards: tuple[tuple[str, ...], ...]) -> Hold:
        """Store the allocations and the cards of each rank; return the hold.

        It is granted since the last `salloc` said so, which holds also if the agent was away then.
        """
        said_s: list[float] = []
        with contextlib.suppress(FileNotFoundError):
            said_s = [self.said(number).stat().st_mtime for number in range(len(jobs))]
        granted_at_s = max(said_s, default=None)
        text = {"jobs": jobs, "cards": cards, "granted_at_s": granted_at_s}
        write_atomically(self.path / "granted.json", json.dumps(text))
        return Hold(id=self.id, state="granted", cards=cards, granted_at_s=granted_at_s)

    def granted(self) -> tuple[list[int], Hold] | None:
        """Return the allocations and the hold with its cards, None before it is granted."""
        try:
            found = json.loads((self.path / "granted.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        cards = tuple(tuple(rank) for rank in found["cards"])
        granted_at_s = found.get("granted_at_s")
        return found["jobs"], Hold(id=self.id, state="granted", cards=cards, granted_at_s=granted_at_s)


def allocation_units(ranks: list[tuple[str, int]], apart: Set[str] = frozenset()) -> list[tuple[str, int, list[int]]]:
    """Return the allocations that hold `ranks`: node group, cards of a rank, and the numbers of its ranks.

    Slurm gives all tasks of an allocation the same number of cards, and takes them from one partition. Each rank of the
    node groups in `apart` has an allocation of its own.
    """
    units: dict[tuple[str, int, int], list[int]] = {}
    for number, (group, num_cards) in enumerate(ranks):
        units.setdefault((group, num_cards, number if group in apart else -1), []).append(number)
    return [(group, num_cards, numbers) for (group, num_cards, _), numbers in units.items()]
