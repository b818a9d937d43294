"""`Progress`: how far running jobs are, from the metrics that pass this server. Not part of the log.

A server that has just started, or through which a job's agents do not report, knows nothing of it: then what
is left of a run is what its plan predicted, less the time it has run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from isthmus.control.queries.expected_releases import Pace
from isthmus.core.messages.agent_messages import StepMetrics

_SHARE = 0.2
"""Weight of the last step in the pace: a mean over about five."""


class Progress:
    """The pace of every job seen; any thread may ask and tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paces: dict[str, Pace] = {}

    def note(self, lines: Iterable[StepMetrics]) -> None:
        """Take in lines of metrics, in any order; those of steps behind the last known change nothing."""
        with self._lock:
            for line in lines:
                before = self._paces.get(line.job, Pace(0))
                if line.step + 1 <= before.steps_done:
                    continue
                took_s, mean_s = line.values.get("step_s"), before.step_s
                if took_s is not None:
                    mean_s = took_s if mean_s is None else (1 - _SHARE) * mean_s + _SHARE * took_s
                self._paces[line.job] = Pace(line.step + 1, mean_s)

    def forget(self, job_id: str) -> None:
        """Drop a job that has ended."""
        with self._lock:
            self._paces.pop(job_id, None)

    def paces(self) -> dict[str, Pace]:
        """Return the pace of each job as it is now."""
        with self._lock:
            return dict(self._paces)
