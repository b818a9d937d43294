"""`SlurmView`: what Slurm's commands show of a cluster: its jobs in one command, its nodes now and then."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import CardNode
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_holds import JOB_PREFIX
from isthmus.agent.adapters.slurm.slurm_output import (
    JOB_FIELDS,
    JobRow,
    parse_boot_time,
    parse_jobs,
    parse_nodes,
)
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.core.errors import UnavailableError

LOOKS_PER_INVENTORY = 5
"""How many looks share one question for the nodes and the run of slurmctld; a failed look asks again at once."""

_HOLD_ID = re.compile(rf"{JOB_PREFIX}([0-9a-f]{{32}})-(\d+)")
_FIELDS = ",".join(f"{field}:|" for field in JOB_FIELDS)


class SlurmView:
    """The newest list of jobs, with those of this account that are holds below the folder `holds`."""

    def __init__(self, site: SlurmSite, commands: SlurmCommands, holds: Path) -> None:
        self._site, self._commands, self._holds = site, commands, holds
        self._names: dict[tuple[int, str], str] = {}
        self._rows: dict[str, JobRow] = {}
        self._inventory: tuple[list[CardNode], str] | None = None
        self._num_looks = 0
        # Jobs by hold in the newest list; None before the first.
        self.live: dict[str, list[JobRow]] | None = None

    def jobs(self) -> list[JobRow]:
        """Ask for all jobs; a line that was there the last time is not parsed again."""
        try:
            text = self._commands.run("squeue", "--noheader", "--all", "--sort=i", "-O", _FIELDS)
            self._rows = parse_jobs(text, self._rows)
            rows = list(self._rows.values())
            self.live = self._own(rows)
        except UnavailableError:
            self._inventory = None
            raise
        return rows

    def inventory(self) -> tuple[list[CardNode], str]:
        """Return the nodes and the name of slurmctld's run, as of at most `LOOKS_PER_INVENTORY` looks ago."""
        self._num_looks += 1
        if self._inventory is None or self._num_looks >= LOOKS_PER_INVENTORY:
            rows = parse_nodes(self._commands.run("scontrol", "show", "node", "-o"))
            self._inventory, self._num_looks = (self._site.card_nodes(rows), self.epoch()), 0
        return self._inventory

    def epoch(self) -> str:
        """Ask for the name of slurmctld's run."""
        return parse_boot_time(self._commands.run("scontrol", "show", "config"))

    def number_of(self, row: JobRow) -> int:
        """Return the number of the allocation `row` among those of its hold, -1 if it is none."""
        found = _HOLD_ID.fullmatch(self._names.get(row.key, ""))
        return int(found[2]) if found is not None else -1

    def _own(self, rows: Sequence[JobRow]) -> dict[str, list[JobRow]]:
        """Return the jobs of this account that are holds, by hold; ask for the names of new ones."""
        mine = [row for row in rows if row.uid == os.geteuid()]
        if any(row.key not in self._names for row in mine):
            command = ("squeue", "-h", "-a", "--me", "-O", "JobID:|,SubmitTime:|,Name:|")
            for line in self._commands.run(*command).split("\n"):
                job, submitted, name = (*line.split("|"), "", "", "")[:3]
                if job.isdecimal():
                    self._names[int(job), submitted] = name
        keys = {row.key for row in mine}
        self._names = {key: name for key, name in self._names.items() if key in keys}
        found: dict[str, list[JobRow]] = {}
        for row in mine:
            hold = _HOLD_ID.fullmatch(self._names.get(row.key, ""))
            if hold is not None and (self._holds / hold[1]).is_dir():
                found.setdefault(hold[1], []).append(row)
        return found
