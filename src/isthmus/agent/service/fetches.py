"""`Fetches`: copies job files to a site in the background, one thread per job."""

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
    """Status of one job's file transfer."""

    # Progress, or the error if `failed`.
    words: str = "locating its files"
    here: bool = False
    failed: bool = False


class Fetches:
    """File transfers to the storage folder `root` from `sources`, by cluster."""

    def __init__(self, root: Path, sources: Mapping[str, Source]) -> None:
        self.root, self._sources = root, sources
        self._fetches: dict[str, Fetch] = {}

    def begin(self, name: str, job: Job, clusters: Sequence[str]) -> None:
        """Start to fetch the files of job `name`, unless a transfer is running."""
        if name not in self._fetches:
            self._fetches[name] = Fetch()
            thread = threading.Thread(target=self._run, args=(name, job, clusters), name=f"files of {name}")
            thread.daemon = True
            thread.start()

    def seen(self) -> dict[str, Fetch]:
        """Return the status of each transfer; finished ones are returned once."""
        found = dict(self._fetches)
        for name, fetch in found.items():
            if fetch.here or fetch.failed:
                del self._fetches[name]
        return found

    def free_bytes(self) -> int | None:
        """Return the free storage in bytes, or None if unknown."""
        try:
            return shutil.disk_usage(self.root).free
        except OSError:
            return None

    def _run(self, name: str, job: Job, clusters: Sequence[str]) -> None:
        def tell(done: int, total: int) -> None:
            tenth = 10 * done // max(1, total)
            self._fetches[name] = Fetch(f"copying its files: {tenth * 10} % of {total / _MB:.0f} MB")

        try:
            fetch_all(job, clusters, self._sources, self.root, tell)
        except (IsthmusError, OSError) as error:
            self._fetches[name] = Fetch(str(error), failed=True)
        else:
            self._fetches[name] = Fetch("", here=True)
