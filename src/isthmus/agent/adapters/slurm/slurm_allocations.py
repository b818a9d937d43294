"""`SlurmAllocations`: the allocations behind holds: asked for with `salloc`, found again by our name, cancelled."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_holds import SlurmHold
from isthmus.agent.adapters.slurm.slurm_output import ENDED_STATES, parse_allocation
from isthmus.agent.adapters.slurm.slurm_scripts import SlurmScripts
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.agent.adapters.slurm.slurm_starts import KEEP, keeper_arguments, keeper_environment
from isthmus.agent.adapters.slurm.slurm_view import SlurmView
from isthmus.core.errors import UnavailableError

_ANSWER_POLL_S = 0.01
_GRANTED = re.compile(r"Granted job allocation (\d+)")


class SlurmAllocations:
    """Allocations of the holds below the folder `root`, one for each node group and size of rank of a hold."""

    def __init__(
        self, site: SlurmSite, commands: SlurmCommands, view: SlurmView, scripts: SlurmScripts, root: Path
    ) -> None:
        self._site, self._commands, self._view, self._scripts, self._root = site, commands, view, scripts, root
        self._missing: dict[str, str] = {}

    def folder(self, hold_id: str) -> SlurmHold:
        """Return the folder of a hold."""
        return SlurmHold(self._root, hold_id)

    def acquire(self, request: HoldRequest, *, preempts: bool) -> Hold:
        """Renew the lease of a hold; ask for its allocations unless Slurm has them. A new hold needs no search."""
        folder, units = self.folder(request.id), self._site.units(request)
        with folder.locked():
            if folder.is_released:
                return Hold(id=request.id, state="ended")
            found = None if folder.renew(request) else self._look_for(folder)
            if found is None and not folder.is_released and not (preempts and self._scripts.runs_for(folder.path)):
                self._ask(folder, units, [rank.node for rank in request.ranks], preempts=preempts)
                found = self._look_for(folder) if preempts else self._take_answers(folder, len(units))
            if folder.is_released:  # found to be gone, or released while it was asked for
                self.release(request.id)
                return Hold(id=request.id, state="ended")
            return found or Hold(id=request.id, state="waiting", detail="no free cards")

    def release(self, hold_id: str) -> None:
        """Use up the id, then cancel its allocations by name; their watcher does it as well."""
        folder = self.folder(hold_id)
        folder.release()
        self._cancel(folder, max(1, len(self._site.units_of(folder.ranks()))))

    def listed(self) -> list[Hold]:
        """Return the holds by the newest list of jobs, as ended those that were released and that Slurm still has."""
        return [hold for hold in map(self._hold, self._known_ids()) if hold is not None]

    def parts_by_job(self) -> dict[int, str]:
        """Return `JOB/ATTEMPT` of the part behind each allocation that was granted and not released."""
        folders = [self.folder(hold_id) for hold_id in self._known_ids()]
        granted = [(folder, folder.granted()) for folder in folders if not folder.is_released]
        return {job: folder.part_name() for folder, known in granted if known is not None for job in known[0]}

    def has_ended(self, hold_id: str) -> bool:
        """Return whether a hold was released and nothing of it is in the newest list of jobs."""
        return self.folder(hold_id).is_released and self._view.live is not None and hold_id not in self._view.live

    def job_of(self, hold_id: str, card: str) -> tuple[int, tuple[str, ...]] | None:
        """Return the allocation that has a card of a granted hold, and all its cards; None if there is none."""
        folder = self.folder(hold_id)
        known = folder.granted()
        if known is None:
            return None
        jobs, hold = known
        units = self._site.units_of(folder.ranks())
        for job, (_, _, numbers) in zip(jobs, units, strict=True):
            cards = tuple(one for number in numbers for one in hold.cards[number])
            if card in cards:
                return job, cards
        return None

    def _look_for(self, folder: SlurmHold) -> Hold | None:
        """Look once; return the hold if Slurm has all its allocations or is known to have granted them."""
        self._view.jobs()
        return self._hold(folder.id)

    def _hold(self, hold_id: str) -> Hold | None:
        """Return a hold by the newest list of jobs; one that is gone has ended only after two lists of one epoch."""
        folder = self.folder(hold_id)
        live = {row.key: row for row in (self._view.live or {}).get(hold_id, []) if row.state not in ENDED_STATES}
        if folder.is_released:
            is_left = any(row.state != "CG" for row in live.values())
            return Hold(id=hold_id, state="ended", detail="released, but Slurm still has it") if is_left else None
        known = folder.granted()
        if live:
            self._missing.pop(hold_id, None)
            if known is not None:
                return known[1]
            if any(row.state != "R" for row in live.values()):
                return Hold(id=hold_id, state="waiting", detail="queued at Slurm")
            jobs = {self._view.number_of(row): row.id for row in live.values()}
            if sorted(jobs) != list(range(len(self._site.units_of(folder.ranks())))):
                return Hold(id=hold_id, state="waiting", detail="not all allocations are there")
            return self._grant(folder, [job for _, job in sorted(jobs.items())])
        if known is None:
            return None
        epoch = self._view.epoch()
        if self._missing.get(hold_id) == epoch:
            folder.release()
            return None
        self._missing[hold_id] = epoch
        return known[1]

    def _grant(self, folder: SlurmHold, jobs: list[int]) -> Hold:
        """Find out which cards each rank of a running hold has, and store them."""
        ranks = folder.ranks()
        cards: dict[int, tuple[str, ...]] = {}
        for at, (job, (group, num_cards, numbers)) in enumerate(zip(jobs, self._site.units_of(ranks), strict=True)):
            text = self._commands.run("scontrol", "show", "job", "-d", "-o", str(job))
            if f" JobName={folder.job_name(at)} " not in text:
                raise UnavailableError(f"Slurm's job {job} is no allocation of hold {folder.id}: it used the id again")
            given = parse_allocation(text, self._site.resource(group))
            places = [
                tuple(f"{group}/{node}/{card}" for card in indices[at : at + num_cards])
                for node, indices in given.items()
                for at in range(0, len(indices) - num_cards + 1, num_cards)
            ]
            if len(places) < len(numbers):
                raise UnavailableError(f"Slurm's job {job} has too few cards for its ranks: {given}")
            cards |= dict(zip(numbers, places, strict=False))
        return folder.grant(jobs, tuple(cards[number] for number in range(len(ranks))))

    def _ask(
        self, folder: SlurmHold, units: list[tuple[str, int, list[int]]], nodes: list[str], *, preempts: bool
    ) -> None:
        """Start `salloc` for each allocation; without preemption it gives up soon."""
        environment = keeper_environment(self._commands.variables)
        for number, unit in enumerate(units):
            folder.said(number).unlink(missing_ok=True)
            arguments = keeper_arguments(self._site, folder, number, unit, preempts=preempts, nodes=nodes)
            self._scripts.start(folder.path, KEEP, arguments, environment)

    def _take_answers(self, folder: SlurmHold, num_units: int) -> Hold | None:
        """Wait for the answers; keep all allocations or none."""
        texts = [self._answer(folder.said(number)) for number in range(num_units)]
        granted = [found for found in map(_GRANTED.search, texts) if found is not None]
        if len(granted) == num_units:
            return self._grant(folder, [int(found[1]) for found in granted])
        self._cancel(folder, num_units)
        down = next((text for text in texts if _is_down(text)), None)
        if down is not None:
            raise UnavailableError(f"salloc failed: {' '.join(down.split())[:200]}")
        return None

    def _answer(self, said: Path) -> str:
        """Wait for what `salloc` says and return it; empty if it is late."""
        pause, text = threading.Event(), ""
        for _ in range(round(self._commands.timeout_s / _ANSWER_POLL_S)):
            with contextlib.suppress(FileNotFoundError):
                text = said.read_text(errors="replace")
            if text.startswith("status ") or "\nstatus " in text:
                return text
            pause.wait(_ANSWER_POLL_S)
        return ""

    def _cancel(self, folder: SlurmHold, num_units: int) -> None:
        names = ",".join(folder.job_name(number) for number in range(num_units))
        self._commands.run("scancel", f"--user={os.geteuid()}", f"--name={names}")

    def _known_ids(self) -> list[str]:
        """Return the ids of the holds that Slurm lists or that were granted and not released."""
        listed = list(self._view.live or {})
        with contextlib.suppress(FileNotFoundError):
            on_disk = [folder.name for folder in self._root.iterdir() if (folder / "granted.json").exists()]
            return list(dict.fromkeys((*listed, *on_disk)))
        return listed


def _is_down(text: str) -> bool:
    """Return whether `salloc` failed because the scheduler did not answer."""
    return "Unable to contact" in text or "Socket timed out" in text or not text.strip()
