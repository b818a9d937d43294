"""`remove_state_folder`: removes the files of an agent whose site has left the pool."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.containers.node_containers import NOTE_FILE
from isthmus.agent.service.agent_key import KEY_FILE_NAME
from isthmus.agent.service.state_identity import IDENTITY_FILE_NAME
from isthmus.core.errors import InputError
from isthmus.core.process.state_folder_lock import lock_state_folder, unwritable_folder_error

_LOCK = "lock"
_IDENTITIES = (IDENTITY_FILE_NAME, KEY_FILE_NAME)
_FOLDERS = ("runs", "cards", "lease", "queue", "holds", "cache", "images", "containers", "courier", "ray")
_OWN = frozenset({*_IDENTITIES, *_FOLDERS, "parts.json", _LOCK, NOTE_FILE})
"""What the agent itself makes in its folder; `local` has the jobs of the site's own users."""


@dataclass(frozen=True, kw_only=True)
class RemovedFiles:
    """The paths that were removed, and those that are left: what is not the agent's, and images at its nodes."""

    removed: tuple[str, ...]
    left: tuple[str, ...]


def remove_state_folder(state: Path) -> RemovedFiles:
    """Remove what an agent has made in its folder `state`, and the folder if nothing else is in it.

    Links are removed, not followed. A folder that is gone is no error. Raises `InputError` for a folder that is not an
    agent's, `UnavailableError` while an agent uses it, or if it cannot be changed.
    """
    if not state.exists():
        return RemovedFiles(removed=(), left=())
    if not any((state / name).is_file() for name in _IDENTITIES):
        raise InputError(
            f"{state} is not the state folder of an agent: it has neither {IDENTITY_FILE_NAME} nor {KEY_FILE_NAME}",
            hint="give the folder of `isthmus agent --state`",
        )
    removed, note = list[str](), state / NOTE_FILE
    images = [f"{note.read_text(encoding='utf-8')} of the site's nodes"] if note.is_file() else []
    with lock_state_folder(state, "agent"):
        try:
            # The identity goes last: an interrupted removal is continued.
            for path in sorted(state.iterdir(), key=lambda one: (one.name in _IDENTITIES, one.name == NOTE_FILE)):
                if _is_own(path):
                    _remove(path)
                    removed.append(str(path))
            left = tuple(sorted(str(path) for path in state.iterdir()))
            if not left:
                state.rmdir()
        except OSError as error:
            raise unwritable_folder_error(state, error) from error
    return RemovedFiles(removed=tuple(removed), left=(*left, *images))


def _is_own(path: Path) -> bool:
    if path.name == "local":
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    return path.name in _OWN


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
