"""`native_digest`: which C++ sources a native module was made of. `scripts/build_native.py` runs this file alone."""

from __future__ import annotations

import hashlib
from pathlib import Path


def native_digest(folder: Path) -> str:
    """Return the digest of the names and contents of all files in `folder`."""
    found = hashlib.sha256()
    for one in sorted(folder.iterdir()):
        content = one.read_bytes()
        found.update(f"{one.name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()
