"""Instructions of a `VersionRelay`: what its shell is to ask, keep and send."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.rl.relay.relay_events import Coding, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginVersion:
    """Prepare to take in the chunks of a coding; the chunks of an unfinished version are given up."""

    coding: Coding


@dataclass(frozen=True, slots=True, kw_only=True)
class AskChunks:
    """Ask a source for chunks."""

    source: str
    coding: Coding
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepChunk:
    """Take in the chunk that has just arrived."""

    coding: Coding
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendChunk:
    """Send a chunk that is here to a site that asked for it."""

    child: str
    coding: Coding
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseChunks:
    """Tell a site that chunks of a coding cannot be had here."""

    child: str
    coding: Coding


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteVersion:
    """All chunks of a version are here."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetCoding:
    """Free the chunks of a coding."""

    coding: Coding


@dataclass(frozen=True, slots=True, kw_only=True)
class FailVersion:
    """No source gives a version undamaged."""

    version: Version
    problem: str


RelayInstruction = (
    BeginVersion | AskChunks | KeepChunk | SendChunk | RefuseChunks | CompleteVersion | ForgetCoding | FailVersion
)  # fmt: skip
