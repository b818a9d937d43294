"""`SlurmAdapter`: cards of a Slurm cluster by its commands.

A hold is an allocation (`salloc --no-shell`) under our own name, with a watcher of its lease inside; a rank is a step
in it (`srun`) that runs `rank_runner`. Starts, stops and ends of workers go through files that agent and nodes share,
so they survive a dead slurmctld.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from isthmus.agent.adapters.file_workers import FileWorkers
from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, confined_worker, worker_variables
from isthmus.agent.adapters.scheduler_adapter import (
    Capabilities,
    Hold,
    HoldRequest,
    Probe,
    RankStart,
    SchedulerCheck,
    SchedulerLook,
)
from isthmus.agent.adapters.slurm.slurm_allocations import SlurmAllocations
from isthmus.agent.adapters.slurm.slurm_checks import check_slurm
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_output import ENDED_STATES
from isthmus.agent.adapters.slurm.slurm_scripts import SlurmScripts
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite, job_name
from isthmus.agent.adapters.slurm.slurm_starts import STEP, step_arguments
from isthmus.agent.adapters.slurm.slurm_topology import slurm_topology
from isthmus.agent.adapters.slurm.slurm_view import SlurmView
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.pool_parts.group_topology import GroupTopology

_PREEMPTS = re.compile(r"Preempts: ([\d,]+)")
_STARTS = re.compile(r"to start at (\S+)")


class SlurmAdapter(FileWorkers):
    """Hold cards of a Slurm cluster and run workers on them (see `SchedulerAdapter`).

    The nodes must see the folder `state` and the worker folders under the same paths.
    """

    def __init__(
        self,
        site: SlurmSite,
        state: Path,
        commands: SlurmCommands,
        program: Sequence[str] = WORKER_COMMAND,
        scripts: SlurmScripts | None = None,
    ) -> None:
        self._site, self._commands, self._program = site, commands, tuple(program)
        self.capabilities = Capabilities(
            holds="scheduler", probes=True, preempts=bool(site.preempting_partition), containers="agent", images=True
        )
        root = state.absolute() / "holds"
        super().__init__(state / "queue")
        self._scripts = scripts or SlurmScripts()
        self._view = SlurmView(site, commands, root)
        self._allocations = SlurmAllocations(site, commands, self._view, self._scripts, root)
        self._lock = threading.RLock()

    def topologies(self) -> dict[str, GroupTopology]:
        """Return what `scontrol show topology` says of the nodes of each node group."""
        with self._lock:
            text, (nodes, _) = self._commands.run("scontrol", "show", "topology"), self._view.inventory()
        groups = {node.node_group: {one.name for one in nodes if one.node_group == node.node_group} for node in nodes}
        found = {group: slurm_topology(text, names) for group, names in groups.items()}
        return {group: one for group, one in found.items() if one is not None}

    def observe(self) -> SchedulerLook:
        """Ask for all jobs in one command; for the nodes and the run of slurmctld only now and then."""
        with self._lock:
            rows = self._view.jobs()
            nodes, epoch = self._view.inventory()
            own = {row.key for rows_of in (self._view.live or {}).values() for row in rows_of}
            holds = self._allocations.listed()
            foreign = [row for row in rows if row.key not in own and row.state not in ENDED_STATES]
            taken = {card for hold in holds for cards in hold.cards for card in cards}
            return SchedulerLook(
                nodes=tuple(nodes), epoch=epoch, holds=tuple(holds), queue=self._queue.entries(),
                foreign=self._site.foreign_jobs(foreign, nodes, taken),
            )  # fmt: skip

    def probe(self, request: HoldRequest) -> Probe:
        """Ask `sbatch --test-only` for the start and the victims of each allocation."""
        starts_s, victims, own = [0.0], dict[str, None](), self._allocations.parts_by_job()
        for group, num_cards, numbers in self._site.units(request):
            _, said = self._commands.run_fully(
                "sbatch", "--test-only", *self._site.asks(group, num_cards, len(numbers), preempts=request.preempts),
                "--wrap=true",
            )  # fmt: skip
            found = _STARTS.search(said)
            if found is None:
                raise UnavailableError(f"line 1 of the output of sbatch --test-only cannot be read: {said[:120]!r}")
            starts_s.append((datetime.fromisoformat(found[1]) - datetime.now()).total_seconds())  # noqa: DTZ005
            for listed in _PREEMPTS.findall(said):
                victims |= dict.fromkeys(own.get(int(job), job_name(int(job))) for job in listed.split(","))
        return Probe(start_in_s=max(starts_s), victims=tuple(victims))

    def hold(self, request: HoldRequest) -> Hold:
        """Allocate free cards at once or not at all; renew the lease."""
        with self._lock:
            return self._allocations.acquire(request, preempts=False)

    def commit(self, request: HoldRequest) -> Hold:
        """As `hold`; with `preempts` wait for the cards in the partition whose jobs preempt."""
        with self._lock:
            return self._allocations.acquire(request, preempts=request.preempts)

    def release(self, hold_id: str) -> None:
        """Use up the id, then cancel its allocations by name; their watcher does it as well."""
        self._allocations.release(hold_id)

    def start(self, rank: RankStart) -> None:
        """Start a step on the node of the rank's cards (see `SchedulerAdapter.start`)."""
        folder = rank.folder.absolute()
        if (folder / "pid").exists() or self._scripts.runs_for(folder):
            return
        found = self._allocations.job_of(rank.hold, rank.cards[0])
        if found is None:
            raise UnavailableError(f"the hold of {folder} is not granted, or has other cards")
        job, cards = found
        group, node, _ = rank.cards[0].split("/")
        program = rank.command or (*self._program, str(folder))
        limits = WorkerFolder(folder).read_limits()
        program = confined_worker(folder, program, limits)
        environment = worker_variables(folder, os.environ, rank, limits) | self._site.visible_cards(group, rank.cards)
        on_node = sorted((card for card in cards if card.split("/")[1] == node), key=_number)
        places = ",".join(str(on_node.index(card)) for card in rank.cards)
        asks = self._site.asks_of_step(group, str(len(on_node)))
        others = sorted({card.split("/")[1] for card in cards} - {node})
        (folder / "hold").write_text(rank.hold, encoding="ascii")
        arguments = step_arguments(
            folder, self._allocations.folder(rank.hold), job=str(job), node=node, other_nodes=others, asks=asks,
            places=places, start=uuid.uuid4().hex, program=program,
        )  # fmt: skip
        variables = self._commands.variables
        chosen = {"SLURM_CONF": variables["SLURM_CONF"]} if "SLURM_CONF" in variables else {}
        self._scripts.start(folder, STEP, arguments, environment | chosen)

    def check(self) -> Sequence[SchedulerCheck]:
        """Return what `isthmus site check` finds."""
        return check_slurm(self._site, self._commands)

    def _is_asked_for(self, folder: Path) -> bool:
        return self._scripts.runs_for(folder)

    def _has_lost(self, folder: Path) -> bool:
        """Return whether the worker's step has ended, or its hold in the last look."""
        with contextlib.suppress(OSError, IndexError):
            attempt = (folder / "pid").read_text(encoding="ascii").split()[0]
            if (folder / f"step.{attempt}").exists():
                return True
            return self._allocations.has_ended((folder / "hold").read_text(encoding="ascii"))
        return False


def _number(card: str) -> int:
    return int(card.rpartition("/")[2])
