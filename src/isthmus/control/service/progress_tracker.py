"""`ProgressTracker`: steps done and seconds per step of running jobs, from metrics received by this server.

It is not part of the log. For a job without metrics here (after a restart, or with agents that report to
another server) the remaining time is the plan's prediction less the elapsed time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from isthmus.control.queries.forecast_inputs import JobProgress
from isthmus.core.messages.agent_messages import StepMetrics

_SMOOTHING_WEIGHT = 0.2
"""Weight of the last step in the exponential moving average: it covers about five steps."""
MAX_STEP_S = 1e7
"""No step lasts longer: what a site reports beyond it enters no forecast."""


class ProgressTracker:
    """Progress of every job seen; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job_progress: dict[str, JobProgress] = {}

    def record_metrics(self, lines: Iterable[StepMetrics]) -> None:
        """Record metrics in any order; steps before the last known one are ignored."""
        with self._lock:
            for line in lines:
                before = self._job_progress.get(line.job, JobProgress(0))
                if line.step + 1 <= before.steps_done:
                    continue
                took_s, mean_s = line.values.get("step_s"), before.step_s
                if took_s is not None and 0 < took_s <= MAX_STEP_S:
                    mean_s = took_s if mean_s is None else (1 - _SMOOTHING_WEIGHT) * mean_s + _SMOOTHING_WEIGHT * took_s
                self._job_progress[line.job] = JobProgress(line.step + 1, mean_s)

    def forget(self, job_id: str) -> None:
        """Remove an ended job."""
        with self._lock:
            self._job_progress.pop(job_id, None)

    def job_progress(self) -> dict[str, JobProgress]:
        """Return the present progress of each job."""
        with self._lock:
            return dict(self._job_progress)
