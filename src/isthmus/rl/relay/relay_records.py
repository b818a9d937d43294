"""What a `VersionRelay` knows of its sources, of the version that arrives, and of the sites that ask it."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.rl.relay.relay_events import Coding


@dataclass(slots=True, kw_only=True)
class SourceRecord:
    """A source of chunks."""

    name: str
    place: int
    is_up: bool = True
    # It is being connected, and waited for until then.
    expected_until_s: float | None = None
    # Codings that it said it does not have.
    lacks: set[Coding] = field(default_factory=set)
    num_damaged: int = 0
    # When it last delivered, or was asked while it owed nothing.
    active_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class ArrivalRecord:
    """The version that arrives."""

    coding: Coding
    missing: set[int]
    # By chunk that was asked for: its source.
    asked: dict[int, str] = field(default_factory=dict)
    # By chunk: how often each source has sent it damaged.
    damaged: dict[int, dict[str, int]] = field(default_factory=dict)
    # Sources that owed chunks and delivered none for too long.
    slow: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class ChildRecord:
    """A site that asks: by coding, the chunks that it does not have yet, in the order in which it asked."""

    waits: dict[Coding, dict[int, None]] = field(default_factory=dict)
