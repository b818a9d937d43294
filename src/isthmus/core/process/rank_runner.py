"""Runs the program of one worker on a node: claims its folder, watches the lease of its hold, leaves no process.

The agent starts `python -I -S rank_runner.py FOLDER HOLD POSITIONS START PROGRAM...` through `srun`. It needs nothing
but Python and the agent's folder, which the node must see:

- `pid` is made once, by the first process that starts or stops the worker;
- `stop` holds the signal that the agent wants sent, so a stop needs no scheduler;
- `after.json`, if it was there before the program began, is a command that runs once every process of it has ended;
- `exit` gets the program's status after that.

Without a program it watches the lease alone, and cancels the allocation when it has ended (`watch_lease`). The lease is
counted here, from when a renewal was last seen: no clock is compared with another machine's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.05
WATCH_S = 0.25
_SET_CHILD_SUBREAPER = 36
_CANCEL_TIMEOUT_S = 60.0
AFTER_FILE, _AFTER_TIMEOUT_S = "after.json", 90.0
_NUM_CANCELS = 30
"""How often slurmctld must have accepted a cancellation: beyond it, it knows no such job, and this step just ends."""


class Lease:
    """The lease in the folder `hold`: it ends with `released`, or `lease_s` after the last renewal was seen."""

    def __init__(self, hold: str) -> None:
        self._hold, self._seen, self._until_s, self._next_s = Path(hold), "", 0.0, 0.0

    def has_ended(self) -> bool:
        """Return whether the hold has ended; mark it as released if its lease has."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + WATCH_S
        if (self._hold / "released").exists():
            return True
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (self._hold / "lease").read_text(encoding="ascii")
            if text != self._seen:
                self._until_s, self._seen = now_s + float(text.split()[1]), text
        if now_s < self._until_s:
            return False
        with contextlib.suppress(OSError):
            (self._hold / "released").touch()
        return True


def watch_lease(hold: str, name: str) -> int:
    """Wait for the end of the lease, then cancel the allocation that this step runs in; repeat until that ends it.

    It is cancelled by its `name`: a restarted slurmctld may have given its number to another job.
    """
    lease = Lease(hold)
    while not lease.has_ended():
        time.sleep(WATCH_S)
    num_left = _NUM_CANCELS
    while num_left:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = ["scancel", f"--user={os.geteuid()}", f"--name={name}"]
            num_left -= subprocess.run(command, check=False, timeout=_CANCEL_TIMEOUT_S).returncode == 0  # noqa: S603 - the node's own
        time.sleep(1.0)
    return 0


def run(folder: str, hold: str, positions: str, start: str, program: list[str]) -> int:
    """Run `program` in `folder`; return its status, 0 if another start than `start` has the folder."""
    if not take_folder(folder, f"{start} {socket.gethostname()} {os.getpid()}"):
        return 0
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: signals.append(received))
    after = _command_after(folder)  # read before the program can write here
    exit_part = Path(folder, "exit.part")
    exit_file = os.open(exit_part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with Path(folder, "log").open("ab") as log:
        try:
            child = subprocess.Popen(  # noqa: S603 - the owner's worker program
                program, env=_environment(positions), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            log.write(f"{program[0]}: {error.strerror}\n".encode())
            status = 127
        else:
            status = _wait(child, folder, Lease(hold), signals)
    while _kill_descendants():
        _reap_orphans()
        time.sleep(POLL_S / 5)
    if after:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(after, stdin=subprocess.DEVNULL, check=False, timeout=_AFTER_TIMEOUT_S)  # noqa: S603 - the agent's
    os.write(exit_file, f"{status}\n".encode())
    os.close(exit_file)
    exit_part.replace(Path(folder, "exit"))
    return status


def _command_after(folder: str) -> list[str]:
    """Return the command that the agent wants run after the program, none without a file."""
    with contextlib.suppress(FileNotFoundError):
        return [str(word) for word in json.loads(Path(folder, AFTER_FILE).read_bytes())]
    return []


def take_folder(folder: str, owner: str) -> bool:
    """Take `folder` for one start; return whether it was free before."""
    temporary = Path(folder, f"pid.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}")
    temporary.write_text(f"{owner}\n", encoding="ascii")
    try:
        Path(folder, "pid").hardlink_to(temporary)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _wait(child: subprocess.Popen[bytes], folder: str, lease: Lease, signals: list[int]) -> int:
    """Return the status of the program; pass on signals, and end it with its hold."""
    wanted, sent, wait = Path(folder, "stop"), "", _waiter(child)
    while child.poll() is None:
        asked = ""
        with contextlib.suppress(OSError):
            asked = _read_signal(wanted)
        if lease.has_ended() or asked == "KILL":
            _kill_descendants()
        elif asked == "TERM" and sent != asked:
            _signal_group(child.pid, signal.SIGTERM)
        sent = asked
        while signals:
            _signal_group(child.pid, signals.pop())
        wait()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _waiter(child: subprocess.Popen[bytes]) -> Callable[[], object]:
    """Return what waits for the program's end, up to `WATCH_S`; a kernel without pidfd is asked more often."""
    with contextlib.suppress(AttributeError, OSError):
        end = os.pidfd_open(child.pid)
        return lambda: select.select([end], [], [], WATCH_S)
    return lambda: time.sleep(POLL_S)


def _read_signal(file: Path) -> str:
    """Return the signal in `file`; a pipe or a link that the program has put there holds up no lease."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, 16).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _kill_descendants() -> bool:
    """Kill every process that the program has started; return whether there was one."""
    found = False
    for pid in _descendants(os.getpid()):
        found = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


def _reap_orphans() -> None:
    """Reap the processes whose parents have ended; the program's own status has been read before."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text(encoding="ascii").split()):
                found += [child, *_descendants(child)]
    return found


def _environment(positions: str) -> dict[str, str]:
    """Return the environment: of the cards that Slurm gave the step, those at `positions` are visible."""
    environment = dict(os.environ)
    given = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = [int(one) for one in positions.split(",") if one]
    if chosen and max(chosen) < len(given) and given != [""]:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(given[place] for place in chosen)
    return environment


if __name__ == "__main__":
    if sys.argv[1] == "--watch":
        sys.exit(watch_lease(sys.argv[2], sys.argv[3]))
    folder, hold, positions, start, *program = sys.argv[1:]
    sys.exit(run(folder, hold, positions, start, program))
