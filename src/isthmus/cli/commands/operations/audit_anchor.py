"""`read_anchor`, `write_anchor`: the end of an audit log as it was verified last, in a file of the operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from isthmus.core.base_model import FrozenModel, PositiveInt
from isthmus.core.bounded_file import read_within
from isthmus.core.errors import ConflictError, FileError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.views.audit_chain import AuditEnd

MAX_ANCHOR_BYTES = 4096


class _Anchor(FrozenModel):
    store: Annotated[str, Field(max_length=100)]
    last_line: PositiveInt
    last_hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def read_anchor(file: Path, store: str) -> AuditEnd | None:
    """Return the noted end, None without a file.

    Raises `FileError` for a file that is no anchor, `ConflictError` for the anchor of another store.
    """
    try:
        found = _Anchor.model_validate_json(read_within(file, MAX_ANCHOR_BYTES))
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        raise FileError(
            "it is no anchor of an audit log", file=str(file), hint="name the file of an earlier `isthmus audit verify`"
        ) from error
    if found.store != store:
        raise ConflictError(
            f"{file} is the anchor of store {found.store}, the server has store {store}",
            hint="use an anchor per pool; after a move to another store begin a new one",
        )
    return AuditEnd(found.last_line, bytes.fromhex(found.last_hash))


def write_anchor(file: Path, store: str, end: AuditEnd) -> None:
    """Note the end of a log; raise `FileError` if the file cannot be written."""
    if not end.number:
        return
    text = json.dumps({"store": store, "last_line": end.number, "last_hash": end.digest.hex()})
    try:
        write_atomically(file, f"{text}\n", 0o600)
    except OSError as error:
        raise FileError(f"cannot be written: {error}", file=str(file), hint="name another file: --anchor") from error
