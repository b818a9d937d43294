"""`LogLines`: complete lines from the log chunks of several ranks, which may end anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isthmus.core.messages.agent_messages import LogChunk


@dataclass(frozen=True)
class LogLine:
    """A line that a rank has logged, without its end."""

    rank: int
    text: str


class LogLines:
    """Joins the chunks of each rank and attempt to lines."""

    def __init__(self) -> None:
        self._partial: dict[tuple[int, int], str] = {}

    def add(self, chunks: Iterable[LogChunk]) -> Iterator[LogLine]:
        """Yield the lines that `chunks` complete."""
        for chunk in chunks:
            key = (chunk.attempt, chunk.rank)
            *complete, self._partial[key] = (self._partial.get(key, "") + chunk.text).split("\n")
            for text in complete:
                yield LogLine(chunk.rank, text)

    def flush(self) -> Iterator[LogLine]:
        """Yield the incomplete last lines."""
        for (_, rank), text in sorted(self._partial.items()):
            if text:
                yield LogLine(rank, text)
        self._partial.clear()
