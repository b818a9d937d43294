"""`new_file`: a file that appears under its name when it is complete, and not at all otherwise."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from isthmus.core.errors import UnavailableError


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream; flush, sync and rename it to `path` at the end, or remove it where the body raises.

    Its name until then cannot be foreseen, so that no other account that may write there has put a link in its place.
    Raises `UnavailableError` if the folder cannot be written to.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error.strerror}", hint="check folder and free space") from error
    finally:
        draft.unlink(missing_ok=True)
