"""`TurnError`: an environment that gave no answer to a turn: it raised, was late, or answered what cannot be."""

from __future__ import annotations

from isthmus.core.errors import DataError


class TurnError(DataError):
    """An environment that raised, came late, or answered no text and no tokens of the vocabulary."""
