"""`SimulatedRuns`: training progress and checkpoints of the pool's jobs across all their sites.

A run trains once every part of its attempt has the rank map, and all its parts end together. If a part ends
earlier, the run is interrupted: work since the last checkpoint is lost and the other parts fail as peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from isthmus.control.simulation.delays import Delays
from isthmus.core.errors import PeerError
from isthmus.core.messages.agent_messages import VerifiedCheckpoint
from isthmus.sim import Kernel

CHECKPOINT_BYTES = 10**9
"""Reported size of every checkpoint."""


@dataclass(eq=False)
class SimulatedProgress:
    """Progress of one job in seconds of training."""

    # Training time of the complete job, and the part of it that checkpoints have saved.
    total_s: float
    saved_s: float = 0.0
    # Step of the last requested checkpoint.
    step: int = 0


@dataclass(eq=False)
class SimulatedRun:
    """One attempt of a job."""

    job: str
    attempt: int
    sites: frozenset[str]
    # Saved training time that it resumed from.
    resumed_from_s: float
    # Sites that have the rank map.
    ready_sites: set[str] = field(default_factory=set)
    # When it started to train, None before.
    started_s: float | None = None
    ended: bool = False
    # Sites that have requested the next checkpoint.
    checkpoint_sites: set[str] = field(default_factory=set)


class SimulatedRuns:
    """The runs of all jobs.

    Callbacks: `on_part_end(site, job, attempt, status)` ends a part's processes, `on_checkpoint(site, job, attempt,
    checkpoint)` reports a verified checkpoint, `on_start(job)` reports the start of training, and
    `on_interrupt(job, lost_s)` its interruption, with the seconds of training that no checkpoint has saved.
    """

    def __init__(
        self,
        kernel: Kernel,
        delays: Delays,
        *,
        on_part_end: Callable[[str, str, int, int], None],
        on_checkpoint: Callable[[str, str, int, VerifiedCheckpoint], None],
        on_start: Callable[[str], None],
        on_interrupt: Callable[[str, float], None],
    ) -> None:
        self._kernel, self._delays = kernel, delays
        self._on_part_end, self._on_checkpoint, self._on_start, self._on_interrupt = (
            on_part_end,
            on_checkpoint,
            on_start,
            on_interrupt,
        )
        self.job_progress: dict[str, SimulatedProgress] = {}
        self._runs: dict[tuple[str, int], SimulatedRun] = {}

    def deliver_rank_map(self, site: str, job: str, attempt: int, sites: Iterable[str]) -> None:
        """Record that a part has the rank map; start training once all parts do."""
        run = self._runs.get((job, attempt))
        if run is None:
            progress = self.job_progress[job]
            run = SimulatedRun(job, attempt, frozenset(sites), progress.saved_s)
            self._runs[job, attempt] = run
        if run.ended:
            self._on_part_end(site, job, attempt, PeerError.exit_code)
            return
        run.ready_sites.add(site)
        if run.started_s is None and run.ready_sites >= run.sites:
            progress = self.job_progress[job]
            run.resumed_from_s = progress.saved_s
            run.started_s = self._kernel.now_s + (self._delays.restore_s if run.resumed_from_s else 0.0)
            self._kernel.call_at(run.started_s + progress.total_s - run.resumed_from_s, self._finish, run)
            self._on_start(job)
            if run.checkpoint_sites:
                self._kernel.call_at(run.started_s + self._delays.checkpoint_s, self._complete_checkpoint, run)

    def request_checkpoint(self, site: str, job: str, attempt: int) -> None:
        """Request a checkpoint for a part; concurrent requests of several sites share one checkpoint."""
        run = self._runs.get((job, attempt))
        if run is None or run.ended:
            return
        asked = bool(run.checkpoint_sites)
        run.checkpoint_sites.add(site)
        if run.started_s is not None and not asked:
            self._kernel.call_at(self._kernel.now_s + self._delays.checkpoint_s, self._complete_checkpoint, run)

    def lose_part(self, site: str, job: str, attempt: int) -> None:
        """Interrupt the run, since the processes of one part have ended early."""
        run = self._runs.get((job, attempt))
        if run is None:
            return
        if not run.ended:
            self._stop(run)
            self._kernel.call_at(self._kernel.now_s + self._delays.peer_timeout_s, self._fail_peers, (run, site))

    def unsaved_s(self, job: str, attempt: int) -> float:
        """Return the seconds of work since the last checkpoint."""
        run = self._runs.get((job, attempt))
        if run is None or run.ended or run.started_s is None:
            return 0.0
        return max(0.0, self._reached_s(run) - self._saved_s(run))

    def _reached_s(self, run: SimulatedRun) -> float:
        since_s = self._kernel.now_s if run.started_s is None else run.started_s
        return run.resumed_from_s + max(0.0, self._kernel.now_s - since_s)

    def _saved_s(self, run: SimulatedRun) -> float:
        """Return the training time saved by periodic and requested checkpoints."""
        every_s = self._delays.checkpoint_interval_s
        done_s = self._reached_s(run) - run.resumed_from_s
        return max(self.job_progress[run.job].saved_s, run.resumed_from_s + done_s // every_s * every_s)

    def _complete_checkpoint(self, run: SimulatedRun) -> None:
        sites, run.checkpoint_sites = run.checkpoint_sites, set()
        if run.ended or run.started_s is None:
            return
        progress = self.job_progress[run.job]
        reached_s = self._reached_s(run) - self._delays.checkpoint_s
        progress.saved_s = max(progress.saved_s, reached_s)
        progress.step = max(progress.step + 1, int(reached_s))
        checkpoint = VerifiedCheckpoint(step=progress.step, num_bytes=CHECKPOINT_BYTES)
        for site in sorted(sites):
            self._on_checkpoint(site, run.job, run.attempt, checkpoint)

    def _finish(self, run: SimulatedRun) -> None:
        if run.ended:
            return
        run.ended = True
        self.job_progress[run.job].saved_s = self.job_progress[run.job].total_s
        for site in sorted(run.sites):
            self._on_part_end(site, run.job, run.attempt, 0)

    def _stop(self, run: SimulatedRun) -> None:
        if run.started_s is not None:
            progress = self.job_progress[run.job]
            progress.saved_s = min(self._saved_s(run), progress.total_s)
            self._on_interrupt(run.job, max(0.0, min(self._reached_s(run), progress.total_s) - progress.saved_s))
        run.ended = True

    def _fail_peers(self, lost: tuple[SimulatedRun, str]) -> None:
        run, first = lost
        for site in sorted(run.ready_sites - {first}):
            self._on_part_end(site, run.job, run.attempt, PeerError.exit_code)
