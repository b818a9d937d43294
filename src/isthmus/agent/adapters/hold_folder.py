"""`HoldFolder`: what every adapter keeps of a hold on disk; each adapter adds its own files.

lease      number of renewals and the lease in seconds; rewritten by each renewal
released   the hold has ended, and its id is used up
lock       held by the agent that asks for the hold
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.exclusive_lock import exclusive_lock


class HoldFolder:
    """The folder of the hold `hold_id` below `root`."""

    def __init__(self, root: Path, hold_id: str) -> None:
        self.id, self.path = hold_id, root / hold_id

    @property
    def is_released(self) -> bool:
        """Whether the hold has ended."""
        return (self.path / "released").exists()

    def release(self) -> None:
        """Use up the id: whatever watches the lease ends it, and nothing is asked for it any more."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "released").touch()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one that asks for this hold, also among agents that follow each other."""
        with exclusive_lock(self.path / "lock"):
            yield

    def lease(self) -> tuple[int, float]:
        """Return the number of renewals and the lease in seconds."""
        with contextlib.suppress(OSError, ValueError):
            number, lease_s = (self.path / "lease").read_text(encoding="ascii").split()
            return int(number), float(lease_s)
        return 0, 0.0

    def renew_lease(self, lease_s: float) -> None:
        """Renew the lease, for `lease_s` from now on."""
        write_atomically(self.path / "lease", f"{self.lease()[0] + 1} {lease_s}\n")
