"""`open_identity`: the identity of an agent, kept in its state folder and bound to the machine and the folder.

The server admits only the agent that it has enrolled. A copied state folder is refused here, before anything in it is
touched: its part table names workers of another folder or machine.
"""

from __future__ import annotations

import hashlib
import platform
import secrets
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.errors import ConflictError, FileError
from isthmus.core.messages.agent_messages import AgentIdentity, Digest
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.boot_clock import boot_id
from isthmus.core.process.state_folder_lock import fsync_path, unwritable_folder_error

IDENTITY_FILE_NAME = "agent.json"
_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


class SavedIdentity(FrozenModel):
    """The content of `agent.json`."""

    key: Digest
    machine: Digest
    session: NonNegativeInt = 0


def open_identity(
    state: Path, *, enrols: bool = False, read_machine: Callable[[Path], str] | None = None
) -> AgentIdentity:
    """Return the identity of the agent of folder `state` in a new session; make one for a folder without.

    Raises `ConflictError` for a copied folder, `FileError` for a damaged file, `UnavailableError` if the folder cannot
    be written.
    """
    file, machine = state / IDENTITY_FILE_NAME, (read_machine or machine_of)(state)
    known = _read(file) or SavedIdentity(key=secrets.token_hex(32), machine=machine)
    if known.machine != machine:
        raise ConflictError(
            f"the state folder {state} was copied or restored: its agent is bound to another folder or machine",
            hint="start the agent with its original folder; or, if that is lost, with an empty folder and --enrol",
        )
    known = known.model_copy(update={"session": known.session + 1})
    try:
        write_atomically(file, known.model_dump_json(), 0o600)
        fsync_path(state)
    except OSError as error:
        raise unwritable_folder_error(state, error) from error
    return AgentIdentity(key=known.key, machine=machine, boot=_digest(boot_id()), session=known.session, enrols=enrols)


def machine_of(state: Path) -> str:
    """Return a digest of the machine's id and of the folder on it, which a copy of the folder does not share."""
    return _digest(f"{_machine_id()} {state.stat().st_ino}")


def _machine_id() -> str:
    """Return the id of this installation, the host's name where it has none."""
    for file in _MACHINE_ID_FILES:
        try:
            if found := file.read_text(encoding="ascii").strip():
                return found
        except (OSError, UnicodeDecodeError):
            continue
    return platform.node()


def _read(file: Path) -> SavedIdentity | None:
    try:
        return SavedIdentity.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise FileError(
            "not the identity of an agent",
            file=str(file),
            hint="restore the file, or start with an empty state folder and --enrol",
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
