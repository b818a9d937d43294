"""`Fetches`: jobs whose files are being brought to a site, a thread each; it goes on while the job waits."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.service.file_transfer import Source, fetch_all
from isthmus.core.errors import IsthmusError
from isthmus.core.job import Job

_MB = 10**6


@dataclass(frozen=True)
class Fetch:
    """One job's files: `words` tell how far they are, or why they cannot be had."""

    words: str = "its files are looked for"
    here: bool = False
    failed: bool = False


class Fetches:
    """What is on its way to the storage folder `root`, from other clusters' `sources`."""

    def __init__(self, root: Path, sources: Mapping[str, Source]) -> None:
        self.root, self._sources = root, sources
        self._fetches: dict[str, Fetch] = {}

    def begin(self, name: str, job: Job, clusters: Sequence[str]) -> None:
        """Bring the files of the job `name` here, unless that is going on already."""
        if name not in self._fetches:
            self._fetches[name] = Fetch()
            thread = threading.Thread(target=self._run, args=(name, job, clusters), name=f"files of {name}")
            thread.daemon = True
            thread.start()

    def seen(self) -> dict[str, Fetch]:
        """Return how far each job is; those that came to their end are told of once."""
        found = dict(self._fetches)
        for name, fetch in found.items():
            if fetch.here or fetch.failed:
                del self._fetches[name]
        return found

    def free_bytes(self) -> int | None:
        """Return what is free of the storage, in bytes; None where it cannot be told now."""
        try:
            return shutil.disk_usage(self.root).free
        except OSError:
            return None

    def _run(self, name: str, job: Job, clusters: Sequence[str]) -> None:
        def tell(done: int, total: int) -> None:
            tenth = 10 * done // max(1, total)
            words = f"its files are on their way: {tenth * 10} % of {total / _MB:.0f} MB"
            self._fetches[name] = Fetch(words)

        try:
            fetch_all(job, clusters, self._sources, self.root, tell)
        except (IsthmusError, OSError) as error:
            self._fetches[name] = Fetch(str(error), failed=True)
        else:
            self._fetches[name] = Fetch("", here=True)
