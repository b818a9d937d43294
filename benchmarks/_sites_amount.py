"""`Amount`: how much of itself a part of `benchmarks.sites` runs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._sites_record import SeededRuns


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A run in full or a quick one, whose repeated faults end after `limit_s` seconds; rows name what was run."""

    quick: bool = False
    limit_s: float = float("inf")
    record: Path | None = None
    """Folder in which the runs by seeds are kept, and from which later ones go on."""
    begun_s: float = field(default_factory=time.monotonic)
    """When the part began, in seconds of the monotonic clock."""

    @property
    def is_over(self) -> bool:
        """Whether the time of the part is over."""
        return time.monotonic() - self.begun_s >= self.limit_s

    @contextlib.contextmanager
    def seeded_runs(self, part: str) -> Iterator[SeededRuns]:
        """Yield the runs of a part: those of the record, or new ones that are not kept."""
        with tempfile.TemporaryDirectory() as folder:
            yield SeededRuns((self.record or Path(folder)) / part)
