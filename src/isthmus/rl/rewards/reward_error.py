"""`RewardError`: a reward that cannot be had for a sample: raised, late, or no finite number."""

from __future__ import annotations

from isthmus.core.errors import DataError


class RewardError(DataError):
    """A reward that raised, came late, or is no finite number; the sample has no reward by this try."""
