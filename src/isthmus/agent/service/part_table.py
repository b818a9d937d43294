"""The agent's part table on disk, replaced atomically and durably before any worker starts or stops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isthmus.core.errors import FileError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.plan import with_stored_rank_order
from isthmus.core.process.state_folder_lock import fsync_path, unwritable_folder_error
from isthmus.site import CLAIMING, HOLDING, SitePart


@dataclass(kw_only=True)
class SavedParts:
    """The agent's persistent state: its parts, the highest fencing token seen in orders, and how often it changed."""

    fence: int = 0
    saves: int = 0
    parts: list[SitePart] = field(default_factory=list)


_SAVED_PARTS: TypeAdapter[SavedParts] = TypeAdapter(SavedParts)
_TRANSIENT_FIELDS: dict[str, Any] = {
    "since_s": True,
    "claimed_s": True,
    "force_at_s": True,
    "evict_at_s": True,
    "checkpoint_requested": True,
    "observation": True,
    "wanted": True,
    "rank_map": True,
    "workers": {"__all__": {"num_bytes", "last_write_s", "unsaved_s", "protection"}},
}
"""Part fields that are not saved: meaningless after a restart, or observed again."""


class PartTable:
    """The file `parts.json` of an agent's state folder."""

    def __init__(self, state: Path) -> None:
        self.path = state / "parts.json"
        self._written = b""
        self.saves = 0

    def load(self) -> SavedParts:
        """Return the saved table, empty if missing; raise `FileError` if malformed."""
        try:
            saved = parse_parts(self.path.read_bytes())
        except FileNotFoundError:
            return SavedParts()
        except ValidationError as error:
            raise FileError(
                f"not a part table of this Isthmus version: {error.errors()[0]['msg']}",
                file=str(self.path),
                hint="run the version that wrote it, or stop its workers and remove the folder",
            ) from error
        self.saves = saved.saves
        return saved

    def save(self, parts: Iterable[SitePart], fence: int) -> bool:
        """Write the table durably if it changed; return whether it did; raise `UnavailableError` on failure."""
        table = SavedParts(fence=fence, parts=list(parts))
        data = dump_parts(table)
        if data == self._written:
            return False
        table.saves = self.saves + 1
        try:
            write_atomically(self.path, dump_parts(table).decode(), 0o600)
            fsync_path(self.path.parent)
        except OSError as error:
            raise unwritable_folder_error(self.path.parent, error) from error
        self._written, self.saves = data, table.saves
        return True


def dump_parts(table: SavedParts) -> bytes:
    """Return the table in its file format."""
    return _SAVED_PARTS.dump_json(table, exclude={"parts": {"__all__": _TRANSIENT_FIELDS}}, by_alias=True)


def parse_parts(data: bytes) -> SavedParts:
    """Parse the output of `dump_parts`; raise pydantic's `ValidationError` if malformed."""
    saved = _SAVED_PARTS.validate_json(data)
    for part in saved.parts:
        part.plan = with_stored_rank_order(part.plan) if part.plan is not None else None
    return saved


def held_devices(state: Path) -> dict[str, str]:
    """Return the devices that parts hold or have claimed at a site, with the part, `JOB/ATTEMPT` or a local job's name.

    `state` is the agent's state folder. Raises `FileError` if its table is malformed.
    """
    return {
        device: f"{part.job}/{part.attempt}" if part.attempt else part.job
        for part in PartTable(state).load().parts
        if part.state in HOLDING or part.state in CLAIMING
        for worker in part.workers.values()
        for device in worker.devices
    }
