"""`FileFetcher`: copies job files to a site in the background, one thread per job."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.files.file_transfer import FileSource, PathFilter, fetch_job_files
from isthmus.core.errors import IsthmusError
from isthmus.core.job import Job

_MB = 10**6


@dataclass(frozen=True)
class FetchStatus:
    """Status of one job's file transfer."""

    # Progress, or the error if `failed`.
    progress_text: str = "locating its files"
    complete: bool = False
    failed: bool = False


class FileFetcher:
    """File transfers to the storage folder `root` from `sources`, by cluster."""

    def __init__(self, root: Path, sources: Mapping[str, FileSource]) -> None:
        self.root, self._sources = root, sources
        self._statuses: dict[str, FetchStatus] = {}

    def start(
        self,
        name: str,
        job: Job,
        clusters: Sequence[str],
        *,
        with_checkpoints: bool = True,
        admits: PathFilter = lambda _: True,
    ) -> None:
        """Start to fetch the files of job `name`, unless a transfer is running; `admits` as in `fetch_job_files`."""
        if name not in self._statuses:
            self._statuses[name] = FetchStatus()
            thread = threading.Thread(target=self._fetch_files, args=(name, job, clusters, with_checkpoints, admits))
            thread.daemon = True
            thread.start()

    def poll(self) -> dict[str, FetchStatus]:
        """Return the status of each transfer; finished ones are returned once."""
        found = dict(self._statuses)
        for name, fetch in found.items():
            if fetch.complete or fetch.failed:
                del self._statuses[name]
        return found

    def free_bytes(self) -> int | None:
        """Return the free storage in bytes, or None if unknown."""
        try:
            return shutil.disk_usage(self.root).free
        except OSError:
            return None

    def _fetch_files(
        self, name: str, job: Job, clusters: Sequence[str], with_checkpoints: bool, admits: PathFilter
    ) -> None:
        def tell(done: int, total: int) -> None:
            tenth = 10 * done // max(1, total)
            self._statuses[name] = FetchStatus(f"copying its files: {tenth * 10} % of {total / _MB:.0f} MB")

        try:
            fetch_job_files(
                job, clusters, self._sources, self.root, tell, with_checkpoints=with_checkpoints, admits=admits
            )
        except (IsthmusError, OSError) as error:
            self._statuses[name] = FetchStatus(str(error), failed=True)
        else:
            self._statuses[name] = FetchStatus("", complete=True)
