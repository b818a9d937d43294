"""`CourierTickets`: which token opens which run folder; a file each in the agent's state, so an agent may restart.

A token opens one folder, to the first worker that presents it. That worker also presents a secret of its own, whose
digest is in the folder's `pid` from then on, so a ticket that is stolen later opens nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.courier.courier_frames import TOKEN_BYTES
from isthmus.core.messages.worker_folder import write_atomically


@dataclass(frozen=True)
class TicketEntry:
    """What a token opens: a run folder, and the hold (`lease`, `released`) that its worker ends with, if any."""

    folder: Path
    hold: Path | None
    record: Path


class CourierTickets:
    """The tickets in the folder `root` of the agent's state, mode 0700."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, threading.Lock()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._by_digest: dict[bytes, tuple[str, TicketEntry]] = {}
        for file in root.glob("*.ticket"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._load(file)

    def token_of(self, folder: Path, hold: Path | None) -> bytes:
        """Return the token of a folder; a new one unless it has one that was not revoked."""
        name = _name_of(folder)
        with self._lock:
            for known, entry in self._by_digest.values():
                if known == name and (entry.folder, entry.hold) == (folder, hold):
                    return bytes.fromhex(json.loads(self._file(name).read_text(encoding="ascii"))["token"])
            token = secrets.token_bytes(TOKEN_BYTES)
            text = {"token": token.hex(), "folder": str(folder), "hold": None if hold is None else str(hold)}
            write_atomically(self._file(name), json.dumps(text), mode=0o600)
            self._forget(name)
            self._load(self._file(name))
            return token

    def find(self, token: bytes) -> TicketEntry | None:
        """Return what a token opens, in a time that does not depend on how much of the token is right."""
        with self._lock:
            found = self._by_digest.get(hashlib.sha256(token).digest())
        return found[1] if found is not None else None

    def revoke(self, folder: Path) -> None:
        """Revoke the token of a folder."""
        name = _name_of(folder)
        with self._lock:
            self._forget(name)
            for file in (self._file(name), self._record(name)):
                file.unlink(missing_ok=True)

    def remove_stale(self) -> None:
        """Revoke the tokens of folders that are gone."""
        with self._lock:
            gone = [entry.folder for _, entry in self._by_digest.values() if not entry.folder.is_dir()]
        for folder in gone:
            self.revoke(folder)

    def _load(self, file: Path) -> None:
        found = json.loads(file.read_text(encoding="ascii"))
        token, hold = bytes.fromhex(found["token"]), found["hold"]
        entry = TicketEntry(Path(found["folder"]), None if hold is None else Path(hold), self._record(file.stem))
        self._by_digest[hashlib.sha256(token).digest()] = file.stem, entry

    def _forget(self, name: str) -> None:
        self._by_digest = {key: found for key, found in self._by_digest.items() if found[0] != name}

    def _file(self, name: str) -> Path:
        return self._root / f"{name}.ticket"

    def _record(self, name: str) -> Path:
        return self._root / f"{name}.files"


def _name_of(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:32]
