"""`Progress`: steps done and seconds per step of running jobs, from metrics received by this server.

It is not part of the log. For a job without metrics here (after a restart, or with agents that report to
another server) the remaining time is the plan's prediction less the elapsed time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from isthmus.control.queries.expected_releases import Pace
from isthmus.core.messages.agent_messages import StepMetrics

_SHARE = 0.2
"""Weight of the last step in the exponential moving average: it covers about five steps."""


class Progress:
    """Progress of every job seen; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paces: dict[str, Pace] = {}

    def note(self, lines: Iterable[StepMetrics]) -> None:
        """Record metrics in any order; steps before the last known one are ignored."""
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
        """Remove an ended job."""
        with self._lock:
            self._paces.pop(job_id, None)

    def paces(self) -> dict[str, Pace]:
        """Return the present progress of each job."""
        with self._lock:
            return dict(self._paces)
