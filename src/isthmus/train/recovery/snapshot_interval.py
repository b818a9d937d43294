"""`SnapshotInterval`: after which steps the ranks snapshot their state to memory. Pure."""

from __future__ import annotations

import math
from typing import Literal

MAX_COST_SHARE = 0.01
"""Share of the ranks' time that snapshots may cost with the setting `auto`."""

MAX_INTERVAL = 1000
"""Most steps between snapshots with `auto`."""


class SnapshotInterval:
    """The steps between two snapshots: `setting`, or with `auto` what their measured cost allows.

    All ranks add the same sums and so decide alike.
    """

    def __init__(self, setting: int | Literal["auto"]) -> None:
        self._setting = setting
        self.restart()

    @property
    def steps(self) -> int:
        """Steps from one snapshot to the next."""
        if self._setting != "auto":
            return self._setting
        if not self._num_snapshots or self._steps_s <= 0:
            return 1
        cost_steps = self._cost_s / self._num_snapshots / (self._steps_s / self._num_steps)
        return min(max(math.ceil(cost_steps / MAX_COST_SHARE), 1), MAX_INTERVAL)

    def restart(self) -> None:
        """Begin a new group of ranks, of which some may know nothing of the earlier ones: measure afresh."""
        self._last: int | None = None
        self._cost_s = self._steps_s = 0.0
        self._num_snapshots = self._num_steps = 0

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot after `step` steps is due; the first one of a group of ranks always is."""
        return self._last is None or step - self._last >= self.steps

    def begin(self, step: int) -> None:
        """Record that the snapshot after `step` steps is begun on all ranks."""
        self._last = step
        self._num_snapshots += 1

    def add_step(self, cost_s: float, step_s: float) -> None:
        """Add a step: sums over all ranks of the seconds that training waited for snapshots, and of its duration."""
        self._cost_s += cost_s
        self._steps_s += step_s
        self._num_steps += 1
