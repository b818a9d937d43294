"""Run a program with least rights: `python -I -S confined_start.py LIMITS.json PROGRAM [ARGUMENT ...]`.

In a process of its own, so that no code runs between fork and exec of the agent. In order: no core dumps, the umask,
open files closed, the paths that the program may use (Landlock), its account, no new privileges (and for root fewer
capabilities); then the program replaces this process. A step that fails ends it with status 126 and a reason, before
the program runs. The file needs the standard library only, and no package of Isthmus, so that it starts in
milliseconds.

Landlock: https://docs.kernel.org/userspace-api/landlock.html. It holds a process and its children to path hierarchies
at each access, so a link that is put in place between a check and a use leads nowhere, and it forbids to look into
processes outside (their memory and environment).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import stat
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

FAILED_STATUS = 126
"""Exit status if the program could not be started with its limits."""

MIN_LANDLOCK_ABI = 2
"""Earlier ones forbid to move files between folders."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH, _VERSION_FLAG = 1, 1
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38
_CAPBSET_READ, _CAPBSET_DROP, _MAX_CAPABILITIES = 23, 24, 64
_ROOTS_CAPABILITIES = frozenset({0, 1, 2, 3, 4, 14, 23, 24})
"""Owner, permissions and modes of files; locked memory; priorities; resource limits (capabilities(7))."""

_SCOPE_SIGNAL, _SCOPE_ABI = 1 << 1, 6

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_TRUNCATE, _TRUNCATE_ABI = 1 << 14, 3
_ALL_ABI_2 = (1 << 14) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE

_MOST_FILES = 1 << 20
"""Open files that are closed where the system sets no limit."""

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_abi() -> int:
    """Return the version of Landlock of this kernel, 0 without it."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def forbid_inspection() -> None:
    """Hide the memory and environment of this process from others of the same account; Linux only."""
    if sys.platform == "linux":
        _prctl(_SET_DUMPABLE, 0)


def main(arguments: Sequence[str]) -> int:
    """Limit this process as its file of limits says, and become the program; returns only on failure."""
    try:
        with open(arguments[0], encoding="utf-8") as stream:  # noqa: PTH123 - no import that is not needed
            limits = json.load(stream)
        _limit(limits)
        os.execvp(arguments[1], list(arguments[1:]))  # noqa: S606 - the program that the agent names
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        print(f"error: cannot start with the limits of this worker: {error}", file=sys.stderr, flush=True)
    return FAILED_STATUS


def _limit(limits: Mapping[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(int(limits["umask"], 8))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, most_files if most_files > 0 else _MOST_FILES)
    paths = limits.get("paths")
    ruleset = None if paths is None else _make_ruleset(paths["reads"], paths["writes"])
    if limits.get("account") is not None:
        _become(limits["account"])
    if sys.platform == "linux":
        if os.geteuid() == 0:
            _drop_capabilities()
        _prctl(_SET_NO_NEW_PRIVS, 1)
    if ruleset is not None:
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        os.close(ruleset)


def _become(account: Mapping[str, Any]) -> None:
    """Give up this account for another one, for good."""
    os.setgroups(account["groups"])
    os.setresgid(account["gid"], account["gid"], account["gid"])
    os.setresuid(account["uid"], account["uid"], account["uid"])
    os.environ.update({"HOME": account["home"], "USER": account["name"], "LOGNAME": account["name"]})


def _drop_capabilities() -> None:
    """Leave a program of root only those capabilities that files of other accounts and locked memory need.

    With all of them it could look into other processes, mount file systems, or load modules, whatever else limits it.
    """
    for capability in range(_MAX_CAPABILITIES):
        if capability not in _ROOTS_CAPABILITIES and _libc.prctl(_CAPBSET_READ, capability, 0, 0, 0) == 1:
            _prctl(_CAPBSET_DROP, capability)


def _make_ruleset(reads: Iterable[str], writes: Iterable[str]) -> int:
    """Return the descriptor of a Landlock ruleset; paths that do not exist are left out."""
    abi = landlock_abi()
    if abi < MIN_LANDLOCK_ABI:
        raise OSError("this kernel has no Landlock")
    handled = _ALL_ABI_2 | (_TRUNCATE if abi >= _TRUNCATE_ABI else 0)
    attributes = struct.pack("QQQ", handled, 0, _SCOPE_SIGNAL if abi >= _SCOPE_ABI else 0)
    size = len(attributes) if abi >= _SCOPE_ABI else 8
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset")
    for paths, rights in ((reads, _READ), (writes, handled)):
        for path in paths:
            with suppress(FileNotFoundError):
                _allow(ruleset, path, rights & handled)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        _check(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
