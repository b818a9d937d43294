"""`Runs`: training progress and checkpoints of the pool's jobs across all their sites.

A run trains once every part of its attempt has the rank map, and all its parts end together. If a part ends
earlier, the run is interrupted: work since the last checkpoint is lost and the other parts fail as peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from isthmus.control.simulation.delays import Delays
from isthmus.core.errors import PeerError
from isthmus.core.messages.agent_messages import Protection
from isthmus.sim.kernel import Kernel

CHECKPOINT_BYTES = 10**9
"""Reported size of every checkpoint."""


@dataclass(eq=False)
class Progress:
    """Progress of one job in seconds of training."""

    # Training time of the complete job, and the part of it that checkpoints have saved.
    needs_s: float
    saved_s: float = 0.0
    # Step of the last requested checkpoint.
    step: int = 0


@dataclass(eq=False)
class Run:
    """One attempt of a job."""

    job: str
    attempt: int
    sites: frozenset[str]
    # Saved training time that it resumed from.
    base_s: float
    # Sites that have the rank map.
    ready: set[str] = field(default_factory=set)
    # When it started to train, None before.
    since_s: float | None = None
    over: bool = False
    # Sites that have requested the next checkpoint.
    protect: set[str] = field(default_factory=set)


class Runs:
    """The runs of all jobs.

    Callbacks: `end(site, job, attempt, status)` ends a part's processes, `save(site, job, attempt,
    checkpoint)` reports a verified checkpoint, `computes(job)` and `broke(job)` report the start and the
    interruption of training.
    """

    def __init__(
        self,
        kernel: Kernel,
        delays: Delays,
        *,
        end: Callable[[str, str, int, int], None],
        save: Callable[[str, str, int, Protection], None],
        computes: Callable[[str], None],
        broke: Callable[[str], None],
    ) -> None:
        self._kernel, self._delays = kernel, delays
        self._end, self._save, self._computes, self._broke = end, save, computes, broke
        self.progress: dict[str, Progress] = {}
        self._runs: dict[tuple[str, int], Run] = {}

    def ready(self, site: str, job: str, attempt: int, sites: Iterable[str]) -> None:
        """Record that a part has the rank map; start training once all parts do."""
        run = self._runs.get((job, attempt))
        if run is None:
            progress = self.progress[job]
            run = Run(job, attempt, frozenset(sites), progress.saved_s)
            self._runs[job, attempt] = run
        if run.over:
            self._end(site, job, attempt, PeerError.exit_code)
            return
        run.ready.add(site)
        if run.since_s is None and run.ready >= run.sites:
            progress = self.progress[job]
            run.base_s = progress.saved_s
            run.since_s = self._kernel.now + (self._delays.restore_s if run.base_s else 0.0)
            self._kernel.call(run.since_s + progress.needs_s - run.base_s, self._finish, run)
            self._computes(job)
            if run.protect:
                self._kernel.call(run.since_s + self._delays.checkpoint_s, self._protected, run)

    def protect(self, site: str, job: str, attempt: int) -> None:
        """Request a checkpoint for a part; concurrent requests of several sites share one checkpoint."""
        run = self._runs.get((job, attempt))
        if run is None or run.over:
            return
        asked = bool(run.protect)
        run.protect.add(site)
        if run.since_s is not None and not asked:
            self._kernel.call(self._kernel.now + self._delays.checkpoint_s, self._protected, run)

    def lost(self, site: str, job: str, attempt: int) -> None:
        """Interrupt the run, since the processes of one part have ended early."""
        run = self._runs.get((job, attempt))
        if run is None:
            return
        if not run.over:
            self._stop(run)
            self._kernel.call(self._kernel.now + self._delays.peer_s, self._lose_peers, (run, site))

    def unsaved_s(self, job: str, attempt: int) -> float:
        """Return the seconds of work since the last checkpoint."""
        run = self._runs.get((job, attempt))
        if run is None or run.over or run.since_s is None:
            return 0.0
        return max(0.0, self._reached_s(run) - self._saved_s(run))

    def _reached_s(self, run: Run) -> float:
        since_s = self._kernel.now if run.since_s is None else run.since_s
        return run.base_s + max(0.0, self._kernel.now - since_s)

    def _saved_s(self, run: Run) -> float:
        """Return the training time saved by periodic and requested checkpoints."""
        every_s = self._delays.checkpoint_every_s
        done_s = self._reached_s(run) - run.base_s
        return max(self.progress[run.job].saved_s, run.base_s + done_s // every_s * every_s)

    def _protected(self, run: Run) -> None:
        sites, run.protect = run.protect, set()
        if run.over or run.since_s is None:
            return
        progress = self.progress[run.job]
        reached_s = self._reached_s(run) - self._delays.checkpoint_s
        progress.saved_s = max(progress.saved_s, reached_s)
        progress.step = max(progress.step + 1, int(reached_s))
        checkpoint = Protection(step=progress.step, num_bytes=CHECKPOINT_BYTES)
        for site in sorted(sites):
            self._save(site, run.job, run.attempt, checkpoint)

    def _finish(self, run: Run) -> None:
        if run.over:
            return
        run.over = True
        self.progress[run.job].saved_s = self.progress[run.job].needs_s
        for site in sorted(run.sites):
            self._end(site, run.job, run.attempt, 0)

    def _stop(self, run: Run) -> None:
        if run.since_s is not None:
            self.progress[run.job].saved_s = min(self._saved_s(run), self.progress[run.job].needs_s)
            self._broke(run.job)
        run.over = True

    def _lose_peers(self, lost: tuple[Run, str]) -> None:
        run, first = lost
        for site in sorted(run.ready - {first}):
            self._end(site, run.job, run.attempt, PeerError.exit_code)
