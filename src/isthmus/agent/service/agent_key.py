"""`AgentKey`: the key of an agent that has joined by a code, in its state folder, and its renewal.

The agent draws each key itself, writes it to the folder before it sends its digest, and goes on to it once the server
has accepted it. So whatever reply is lost and wherever the agent is killed, one of the two keys in the file counts.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from isthmus.agent.service.sync_client import SyncClient
from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.errors import AuthError, ConflictError, FileError, IsthmusError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.state_folder_lock import fsync_path, lock_state_folder, unwritable_folder_error

KEY_FILE_NAME = "agent.key"
RENEW_S = 24 * 3600.0
"""Age at which a key is renewed; one that is not renewed counts for 30 days."""
_KEY_BYTES = 32

_log = logging.getLogger("isthmus.agent")
_Secret = Annotated[str, Field(min_length=40, max_length=64)]


class SavedKey(FrozenModel):
    """The content of `agent.key`: the present key, and the `next` one while it is being renewed."""

    site: Name
    key: Annotated[_Secret, Field(repr=False)]
    renewed_s: float
    next: Annotated[_Secret | None, Field(repr=False)] = None


class AgentKey:
    """The key in a state folder; `clock` counts seconds from the epoch."""

    def __init__(self, state: Path, saved: SavedKey, clock: Callable[[], float]) -> None:
        self._state, self._saved, self._clock = state, saved, clock
        self._uses_next = False

    @classmethod
    def load(cls, state: Path, clock: Callable[[], float]) -> AgentKey | None:
        """Return the key of a state folder, None if it has none; raise `FileError` for a damaged file."""
        file = state / KEY_FILE_NAME
        try:
            return cls(state, SavedKey.model_validate_json(file.read_bytes()), clock)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise FileError(
                "not the key of an agent", file=str(file),
                hint="restore the file; or join again: isthmus site invite OWNER --cluster NAME",
            ) from error  # fmt: skip

    @classmethod
    def draw(cls, state: Path, site: str, clock: Callable[[], float]) -> AgentKey:
        """Return the key of a folder for cluster `site`, a new one if it has none.

        Raises `ConflictError` for the key of another cluster, `UnavailableError` if the folder cannot be written.
        """
        known = cls.load(state, clock)
        if known is not None and known._saved.site != site:
            raise ConflictError(
                f"the state folder {state} is that of cluster '{known._saved.site}'",
                hint=f"give cluster '{site}' a folder of its own: --state DIR",
            )
        if known is not None:
            return known
        made = cls(state, SavedKey(site=site, key=secrets.token_urlsafe(_KEY_BYTES), renewed_s=clock()), clock)
        made._save(made._saved)
        return made

    @property
    def site(self) -> str:
        """The cluster that the key is for."""
        return self._saved.site

    @property
    def token(self) -> str:
        """The key that requests are sent with."""
        return self._saved.next if self._uses_next and self._saved.next else self._saved.key

    @property
    def digest(self) -> str:
        """The SHA-256 of the present key, which is all that the server is sent of it."""
        return _digest(self._saved.key)

    def renew_if_due(self, server: SyncClient) -> None:
        """Have the next key accepted once the present one is old enough, and use it from then on.

        Problems are logged: the present key counts on, and the next call tries again.
        """
        if self._uses_next or (self._saved.next is None and self._clock() - self._saved.renewed_s < RENEW_S):
            return
        try:
            if self._saved.next is None:
                self._save(self._saved.model_copy(update={"next": secrets.token_urlsafe(_KEY_BYTES)}))
            server.renew_key(_digest(str(self._saved.next)))
        except AuthError:
            _log.info("the present key of %s has ended; the next one is used", self.site)
        except ConflictError as error:
            self._save(self._saved.model_copy(update={"next": None}))
            _log.warning("the key of %s is not renewed: %s", self.site, error)
            return
        except IsthmusError as error:
            _log.warning("the key of %s is not renewed yet: %s", self.site, error)
            return
        self._uses_next = True
        server.use_token(self.token)

    def confirm(self) -> None:
        """Forget the key before: the server has answered a request with the present one."""
        if self._uses_next and self._saved.next is not None:
            self._save(SavedKey(site=self.site, key=self._saved.next, renewed_s=self._clock()))
            self._uses_next = False

    def _save(self, saved: SavedKey) -> None:
        try:
            write_atomically(self._state / KEY_FILE_NAME, saved.model_dump_json(), 0o600)
            fsync_path(self._state)
        except OSError as error:
            raise unwritable_folder_error(self._state, error) from error
        self._saved = saved


def read_key(state: Path) -> str | None:
    """Return the present key in the state folder of an agent that has joined by a code, None for any other folder."""
    found = AgentKey.load(state, lambda: 0.0)
    return None if found is None else found.token


def draw_key(state: Path, site: str, clock: Callable[[], float]) -> str:
    """Return the digest of the key in a state folder, made for cluster `site` if the folder has none (`AgentKey.draw`).

    Raises `UnavailableError` while an agent uses the folder.
    """
    with lock_state_folder(state, "agent"):
        return AgentKey.draw(state, site, clock).digest


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
