"""A real PostgreSQL for tests: one server for the session, on a Unix socket in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INSTALL = "sudo apt-get install -y postgresql"


def binaries() -> Path | None:
    """Return the folder of initdb and postgres; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None


@contextmanager
def running(bin_folder: Path) -> Iterator[str]:
    """Run a server until the end of the context; yield a connection string without its database name.

    PostgreSQL refuses to run as root: then it runs as `postgres_store`, the user its package makes.
    """
    user = pwd.getpwnam("postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name)
    folder = Path(tempfile.mkdtemp(prefix="isthmus-pg-", dir="/tmp"))  # short: a socket's path has 107 bytes
    os.chown(folder, user.pw_uid, user.pw_gid)
    who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}

    def call(program: str, *words: str) -> None:
        command = [str(bin_folder / program), *words]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, timeout=60, **who)  # type: ignore[call-overload]

    data = folder / "data"
    try:
        call("initdb", "-D", str(data), "-A", "trust", "-U", "isthmus", "-E", "UTF8", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c max_connections=60 -c shared_buffers=16MB"
        call("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-w", "-o", options, "start")
        try:
            yield f"host={folder} user=isthmus"
        finally:
            call("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
