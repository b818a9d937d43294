"""The agent's part table on disk, replaced atomically and durably before any worker starts or stops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isthmus.core.errors import FileError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.state_folder import sync_path, unwritable
from isthmus.site.parts import SitePart


@dataclass(kw_only=True)
class Table:
    """The agent's persistent state: its parts, and the highest fencing token seen in orders."""

    fence: int = 0
    parts: list[SitePart] = field(default_factory=list)


_TABLE: TypeAdapter[Table] = TypeAdapter(Table)
_OF_THIS_LIFE: dict[str, Any] = {
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

    def load(self) -> Table:
        """Return the saved table, empty if missing; raise `FileError` if malformed."""
        try:
            return read_table(self.path.read_bytes())
        except FileNotFoundError:
            return Table()
        except ValidationError as error:
            raise FileError(
                f"not a part table of this Isthmus version: {error.errors()[0]['msg']}",
                file=str(self.path),
                hint="run the version that wrote it, or stop its workers and remove the folder",
            ) from error

    def save(self, parts: Iterable[SitePart], fence: int) -> None:
        """Write the table durably if it changed; raise `UnavailableError` on failure."""
        data = write_table(Table(fence=fence, parts=list(parts)))
        if data == self._written:
            return
        try:
            write_atomically(self.path, data.decode())
            sync_path(self.path.parent)
        except OSError as error:
            raise unwritable(self.path.parent, error) from error
        self._written = data


def write_table(table: Table) -> bytes:
    """Return the table in its file format."""
    return _TABLE.dump_json(table, exclude={"parts": {"__all__": _OF_THIS_LIFE}}, by_alias=True)


def read_table(data: bytes) -> Table:
    """Parse the output of `write_table`; raise pydantic's `ValidationError` if malformed."""
    return _TABLE.validate_json(data)
