"""Run one worker's container: `python -I -S container_start.py [--delete] RUNC STATE BUNDLE ID`; exits with its status.

`runc run` passes signals on to the container and ends with it. A watcher in a process group of its own deletes the
container once this process has ended, also by SIGKILL, so a worker never outlives it. Where the watcher is killed as
well, its killer runs this file with `--delete`. The file needs the standard library only, and starts in milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

DELETE_TIMEOUT_S = 60.0
DELETE = "--delete"


def main(arguments: Sequence[str]) -> int:
    """Run the container and return its exit status; delete it before this process ends."""
    if arguments[0] == DELETE:
        _delete(*arguments[1:])
        return 0
    runtime, state, bundle, name = arguments
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # runc gets them too, and ends when the program does
    # Step 1: the watcher, which waits for the end of this process at a pipe that nothing writes to.
    waits, lives = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.setpgid(0, 0)
        os.close(lives)
        os.read(waits, 1)
        _delete(runtime, state, bundle, name)
        os._exit(0)
    os.close(waits)
    # Step 2: the container; its output is this process's.
    command = [runtime, "--root", state, "run", "--bundle", bundle, name]
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - the agent names the program
    # Step 3: let the watcher delete it.
    os.close(lives)
    os.waitpid(watcher, 0)
    return status if status >= 0 else 128 - status


def _delete(runtime: str, state: str, bundle: str, name: str) -> None:
    """Kill what is left of the container, and remove its root folder."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    subprocess.run([runtime, "--root", state, "delete", "--force", name], timeout=DELETE_TIMEOUT_S, **quiet)  # type: ignore[call-overload]  # noqa: S603
    shutil.rmtree(os.path.join(bundle, "rootfs"), ignore_errors=True)  # noqa: PTH118 - no import that is not needed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
