"""The agent's part table on disk: written whole, synced and renamed before anything is started or stopped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isthmus.agent.parts import HeldPart
from isthmus.core.errors import FileError
from isthmus.core.state_folder import sync_folder, unwritable
from isthmus.core.worker import write_atomically

_PARTS: TypeAdapter[list[HeldPart]] = TypeAdapter(list[HeldPart])
_OF_THIS_LIFE: dict[str, Any] = {
    "since_s": True,
    "force_at_s": True,
    "rank_map": True,
    "workers": {"__all__": {"num_bytes", "wrote_s"}},
}
"""Fields that mean nothing to the agent's next life."""


class PartTable:
    """The file `parts.json` of an agent's state folder."""

    def __init__(self, state: Path) -> None:
        self.path = state / "parts.json"
        self._written = b""

    def load(self) -> list[HeldPart]:
        """Return the parts of the agent's last life; raise `FileError` where the file does not read."""
        try:
            return _PARTS.validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except ValidationError as error:
            raise FileError(
                f"not a part table of this version: {error.errors()[0]['msg']}",
                file=str(self.path),
                hint="start the version of isthmus that wrote it, or end its workers and remove the folder",
            ) from error

    def save(self, parts: Iterable[HeldPart]) -> None:
        """Write `parts` durably unless they are what was last written; raise `UnavailableError` if not."""
        data = _PARTS.dump_json(list(parts), exclude={"__all__": _OF_THIS_LIFE}, by_alias=True)
        if data == self._written:
            return
        try:
            write_atomically(self.path, data.decode())
            sync_folder(self.path.parent)
        except OSError as error:
            raise unwritable(self.path.parent, error) from error
        self._written = data
