"""`OutputQuota`: how much output of each job a server keeps, so that no program fills the disk of the pool's server."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from isthmus.core.messages.agent_messages import LogChunk, StepMetrics

ASSUMED_METRICS_BYTES = 1024
"""Size of a line of metrics that was stored before this server started."""
MAX_JOBS = 10_000
"""Jobs whose bytes are remembered; of others the store is asked again."""

_log = logging.getLogger("isthmus.server")


class OutputQuota:
    """Admits output of jobs up to `max_bytes` each, repetitions included; thread-safe.

    `stored` returns the number of metrics and the bytes of logs of a job that are in the store.
    """

    def __init__(self, stored: Callable[[str], tuple[int, int]], max_bytes: int) -> None:
        self._stored, self._max_bytes = stored, max_bytes
        self._lock = threading.Lock()
        self._num_bytes: OrderedDict[str, int] = OrderedDict()

    def admit_metrics(self, lines: Iterable[StepMetrics]) -> list[StepMetrics]:
        """Return the lines that are stored."""
        return [one for one in lines if self._take(one.job, len(one.model_dump_json())) >= 0]

    def admit_logs(self, chunks: Iterable[LogChunk]) -> list[LogChunk]:
        """Return the text that is stored; a note stands for the first that is not."""
        found = []
        for chunk in chunks:
            num_bytes = len(chunk.text.encode())
            left = self._take(chunk.job, num_bytes)
            if left >= 0:
                found.append(chunk)
            elif left + num_bytes >= 0:
                note = f"\n[the server keeps {self._max_bytes >> 20} MiB of a job's output: the rest is left out]\n"
                found.append(chunk.model_copy(update={"text": note}))
                _log.warning("job %s: output beyond %d MiB is not kept", chunk.job, self._max_bytes >> 20)
        return found

    def _take(self, job: str, num_bytes: int) -> int:
        """Count output of a job; return what is left of its quota, negative if it is exceeded."""
        with self._lock:
            known = self._num_bytes.pop(job, None)
        if known is None:
            num_lines, log_bytes = self._stored(job)
            known = num_lines * ASSUMED_METRICS_BYTES + log_bytes
        with self._lock:
            self._num_bytes[job] = known + num_bytes
            if len(self._num_bytes) > MAX_JOBS:
                self._num_bytes.popitem(last=False)
        return self._max_bytes - known - num_bytes
