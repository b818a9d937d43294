"""`run_batch`, `run_nft`, `run_ip`: the kernel's settings through iproute2 and nftables, many in one process."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from isthmus.core.errors import UnavailableError

_LIMIT_S = 60.0
"""Longest run of a command."""


def run_batch(command: str, lines: Sequence[str]) -> None:
    """Run lines of `tc` or `ip`, in order, up to the first that the kernel refuses; raise `UnavailableError` then."""
    if lines:
        run_checked([command, "-batch", "-"], "\n".join(lines) + "\n")


def run_nft(script: str) -> None:
    """Run a script of nftables, whole or not at all."""
    run_checked(["nft", "-f", "-"], script)


def run_checked(argv: Sequence[str], text: str = "") -> str:
    """Run a command with `text` on its standard input; return what it prints."""
    if shutil.which(argv[0]) is None:
        raise UnavailableError(f"the command `{argv[0]}` is missing", hint="install iproute2 and nftables")
    try:
        done = subprocess.run(  # noqa: S603 - commands of this package, names checked by patterns; no shell
            list(argv), input=text, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"`{' '.join(argv)}` took more than {_LIMIT_S:g} s", hint="try again") from error
    if done.returncode:
        why = next((line for line in done.stderr.splitlines() if line.strip()), "no reason given")
        raise UnavailableError(
            f"`{' '.join(argv)}` failed: {why}", hint="it needs root; see `isthmus wan tenants FILE --check`"
        )
    return done.stdout
