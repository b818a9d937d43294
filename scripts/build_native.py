"""Compile the native form of the RoCEv2 gateway beside its sources: `python scripts/build_native.py`, or `make native`.

It needs a C++17 compiler (`CXX`, else `c++`) and the headers of Python. `ISTHMUS_NATIVE=1 pip install .` does the same
for a wheel. Without it the gateway runs in Python. Nothing is compiled again while no source is newer.
"""

from __future__ import annotations

import os
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


def build_native(gateway: Path = GATEWAY, flags: Sequence[str] = ()) -> Path:
    """Compile the sources in `gateway`/native, with `flags` besides; return the module. Exits where that fails."""
    module = gateway / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = sorted((gateway / "native").iterdir())
    if module.exists() and not flags and all(one.stat().st_mtime <= module.stat().st_mtime for one in sources):
        return module
    command = compiler()
    if command is None:
        raise SystemExit("build_native: no C++ compiler; install one (`apt install g++`) or name it in CXX")
    made = module.with_suffix(".part")
    include = f"-I{sysconfig.get_path('include')}"
    main = str(gateway / "native" / "native_gateway.cpp")
    argv = [*command, *FLAGS, *flags, include, main, "-o", str(made)]
    done = subprocess.run(argv, check=False)  # noqa: S603 - the compiler that the caller names
    if done.returncode:
        raise SystemExit(f"build_native: {command[0]} has ended with status {done.returncode}; see above")
    return made.replace(module)


if __name__ == "__main__":
    print(build_native(), file=sys.stderr)
