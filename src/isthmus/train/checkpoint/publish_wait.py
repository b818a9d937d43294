"""`PublishWait`: how long a rank waits for the other ranks' parts of a checkpoint, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.core.errors import UnavailableError

MAX_NAMED_RANKS = 4
"""Ranks named in the reason of a wait; further ones are counted."""


@dataclass(frozen=True, kw_only=True)
class PublishProgress:
    """What a rank sees of a checkpoint that all ranks write."""

    # Ranks whose part is not complete.
    missing_ranks: tuple[int, ...]
    # Size of all files so far.
    num_bytes: int


class PublishWait:
    """The wait of a rank for the checkpoint after `step` steps in `folder`; `clusters` are the ranks' sites.

    It ends with an error `limit_s` after the last progress: a new part, or a file that grew. Times are in seconds.
    """

    def __init__(self, folder: Path, step: int, clusters: Sequence[str], *, limit_s: float, now_s: float) -> None:
        self._folder, self._step, self._clusters, self._limit_s = folder, step, clusters, limit_s
        self._progress: PublishProgress | None = None
        self._progress_s = now_s

    def update(self, progress: PublishProgress, now_s: float) -> None:
        """Record what is visible now; raises `UnavailableError` if nothing has changed for the limit."""
        if progress != self._progress:
            self._progress, self._progress_s = progress, now_s
        elif now_s - self._progress_s >= self._limit_s:
            raise UnavailableError(
                f"the checkpoint after step {self._step} is incomplete in {self._folder}: this rank {self.reason}, "
                f"without progress for {self._limit_s:g} s",
                hint="use a checkpoint folder that all sites of the job share, and see the log of the missing rank",
            )

    @property
    def reason(self) -> str:
        """What the rank waits for, as a predicate."""
        missing = self._progress.missing_ranks if self._progress else ()
        if not missing:
            return f"waits for rank 0 ({self._site(0)}) to publish checkpoint {self._step}"
        named = ", ".join(f"{rank} ({self._site(rank)})" for rank in missing[:MAX_NAMED_RANKS])
        more = f" and {len(missing) - MAX_NAMED_RANKS} more" if len(missing) > MAX_NAMED_RANKS else ""
        what = f"rank {named} to write its part" if len(missing) == 1 else f"ranks {named}{more} to write their parts"
        return f"waits for {what} of checkpoint {self._step}"

    def _site(self, rank: int) -> str:
        return f"site {self._clusters[rank]}" if rank < len(self._clusters) else "unknown site"
