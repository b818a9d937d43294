"""Compile the native form of the RoCEv2 gateway beside its sources: `python scripts/build_native.py`, or `make native`.

It needs a C++17 compiler (`CXX`, else `c++`) and the headers of Python. `ISTHMUS_NATIVE=1 pip install .` does the same
for a wheel. Without it the gateway runs in Python. Nothing is compiled again while the sources are the same.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

GATEWAY = Path(__file__).parent.parent / "src" / "isthmus" / "wan" / "roce" / "gateway"
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared", "-fPIC")


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler, None without one."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    return command if command and shutil.which(command[0]) else None


def build_native(folder: Path = GATEWAY, command: Sequence[str] | None = None) -> Path:
    """Compile the sources into `folder` with `command`, else `compiler()`; return the module. Exits where that fails.

    Builders at the same time do not disturb each other: each renames a whole module of its own.
    """
    module = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    digest: str = runpy.run_path(str(GATEWAY / "native_digest.py"))["native_digest"](GATEWAY / "native")
    if module.exists() and digest.encode() in module.read_bytes():
        return module
    command = command or compiler()
    if command is None:
        raise SystemExit("build_native: no C++ compiler; install one (`apt install g++`) or name it in CXX")
    made = folder / f".{module.name}.{os.getpid()}"
    given = f"-I{sysconfig.get_path('include')}", f'-DSOURCES="{digest}"'
    argv = [*command, *FLAGS, *given, str(GATEWAY / "native" / "native_gateway.cpp"), "-o", str(made)]
    try:
        done = subprocess.run(argv, check=False)  # noqa: S603 - the compiler that the caller names
        if done.returncode:
            raise SystemExit(f"build_native: {command[0]} has ended with status {done.returncode}; see above")
        return made.replace(module)
    finally:
        made.unlink(missing_ok=True)


if __name__ == "__main__":
    print(build_native(), file=sys.stderr)
