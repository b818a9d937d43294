"""The built-in `local` adapter: virtual nodes with cards on this machine, workers as process groups.

A worker is started through a few lines of shell that claim its folder (a hard link to `pid` succeeds once),
run the program with its output in `log`, and write `exit`. They run in a session of their own, so a worker
outlives its agent, and the folder alone tells the next agent what became of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from isthmus.agent.adapters.adapter import Move, WorkerStatus
from isthmus.agent.adapters.local_queue import LocalQueue
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.pool import Cluster

WORKER_COMMAND = (sys.executable, "-m", "isthmus.train.process.supervisor")
"""The training program, which keeps its rank alive; it is given its folder as the last argument."""

_WRAPPER = """
folder=$1; shift
echo $$ > "$folder/pid.$$" || exit 125
ln "$folder/pid.$$" "$folder/pid" 2>/dev/null; claimed=$?
rm -f "$folder/pid.$$"
[ $claimed -eq 0 ] || exit 0
trap : TERM INT HUP
"$@" </dev/null >"$folder/log" 2>&1
status=$?
echo $status > "$folder/exit.tmp" && mv "$folder/exit.tmp" "$folder/exit"
"""
_NEVER = 0
"""Process id in the `pid` file of a folder that was stopped before it was started."""
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KILLED = 128 + signal.SIGKILL


class LocalAdapter:
    """Runs the workers of `cluster` as processes of this machine (see `Adapter`).

    The site's queue is the file `queue`, which people at the site may edit.
    """

    def __init__(self, cluster: Cluster, queue: Path, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._queue = LocalQueue(queue)
        self._cards = {
            group.name: tuple(
                f"{group.name}/{node}/{chip}"
                for node in range(group.nodes)
                for chip in range(group.chips_per_node)
            )
            for group in cluster.node_groups
        }
        real = [group.name for group in cluster.node_groups if group.virtual is None]
        self._devices = {
            card: i for i, card in enumerate(card for name in real for card in self._cards[name])
        }
        self._command = tuple(command)
        self._children: dict[Path, int] = {}

    def inventory(self) -> Mapping[str, Sequence[str]]:
        """Return card ids `group/node/card` by node group."""
        return self._cards

    def start(self, folder: Path, cards: Sequence[str], command: Sequence[str] = ()) -> None:
        """Start the worker of `folder` in a session of its own, once (see `Adapter.start`)."""
        folder = folder.absolute()
        if folder in self._children or (folder / "pid").exists():
            return
        program = tuple(command) or (*self._command, str(folder))
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        try:
            self._children[folder] = os.posix_spawnp(
                "sh",
                ["sh", "-c", _WRAPPER, "isthmus-worker", str(folder), *program],
                worker_environment(os.environ, cards, self._devices),
                file_actions=null,
                setsid=True,
            )
        except OSError as error:
            raise UnavailableError(
                f"cannot start a worker in {folder}: {error.strerror or error}",
                hint="free processes or memory on this machine; the job is started again by itself",
            ) from error

    def poll(self, folder: Path) -> WorkerStatus:
        """Return what is seen of the worker; once its program has ended, end what it left behind."""
        folder = folder.absolute()
        child = self._living_child(folder)
        leader = _claimed_by(folder)
        if leader is None:
            return WorkerStatus(state="running" if child is not None else "absent")
        if child == leader:
            return WorkerStatus(state="running")
        status = WorkerFolder(folder).read_exit()
        if _is_wrapper(leader, folder):
            return WorkerStatus(state="running")
        if _orphans(leader):
            if status is not None:
                os.killpg(leader, signal.SIGKILL)
            return WorkerStatus(state="running")
        status = WorkerFolder(folder).read_exit()
        if status is None:
            status = _KILLED
            with contextlib.suppress(OSError):  # on a full disk whoever looks next comes to the same
                WorkerFolder(folder).write_exit(status)
        return WorkerStatus(state="exited", exit_status=status)

    def stop(self, folder: Path, *, force: bool) -> None:
        """Send SIGTERM, or SIGKILL, to the worker's process group (see `Adapter.stop`)."""
        folder = folder.absolute()
        leader = _claimed_by(folder)
        if leader is None:
            leader = _claim_forever(folder)
        if leader != _NEVER and (_is_wrapper(leader, folder) or _orphans(leader)):
            try:
                os.killpg(leader, signal.SIGKILL if force else signal.SIGTERM)
            except ProcessLookupError:
                return

    def queue(self) -> Sequence[QueueEntry]:
        """Return the entries of the queue's file."""
        return self._queue.entries()

    def order(self, moves: Sequence[Move], gone: Sequence[QueueEntry] = ()) -> None:
        """Write the queue's file anew (see `Adapter.order`)."""
        self._queue.order(moves, gone)

    def _living_child(self, folder: Path) -> int | None:
        """Return the wrapper that this adapter started for `folder`; reap it, and None, once it ended."""
        child = self._children.get(folder)
        if child is None:
            return None
        try:
            ended, _ = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            ended = child
        if ended:
            del self._children[folder]
            return None
        return child


def worker_environment(
    base: Mapping[str, str], cards: Sequence[str], devices: Mapping[str, int]
) -> dict[str, str]:
    """Return the environment of a worker: its cards, one thread unless the user chose, and no token.

    `devices` maps each card that is not virtual to the index of this machine's device.
    """
    environment = {name: value for name, value in base.items() if not _is_secret(name)}
    for name in _THREAD_LIMITS:
        environment.setdefault(name, "1")
    environment["ISTHMUS_CARDS"] = ",".join(cards)
    visible = [str(devices[card]) for card in cards if card in devices]
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return environment


def _is_secret(name: str) -> bool:
    return name.startswith("ISTHMUS_") and "TOKEN" in name


def _claimed_by(folder: Path) -> int | None:
    """Return the process that claimed `folder`, `_NEVER`, or None while nobody has."""
    try:
        return int((folder / "pid").read_text(encoding="ascii"))
    except FileNotFoundError:
        return None


def _claim_forever(folder: Path) -> int:
    """Claim `folder` so that no wrapper ever starts it; return who holds the claim now."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"pid.never.{os.getpid()}"
    temporary.write_text(f"{_NEVER}\n", encoding="ascii")
    try:
        (folder / "pid").hardlink_to(temporary)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return int((folder / "pid").read_text(encoding="ascii"))


def _is_wrapper(pid: int, folder: Path) -> bool:
    """Tell whether `pid` is a living wrapper of `folder`: ids are reused, a command line with it is not."""
    if pid == _NEVER:
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and str(folder) in process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _orphans(leader: int) -> bool:
    """Tell whether processes of the session `leader` live although their wrapper is gone.

    The system gives no new process an id that is still a session's, so where the leader is another
    process, nothing of the session is left.
    """
    if leader == _NEVER:
        return False
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(_lives_in(pid, leader) for pid in psutil.pids())


def _lives_in(pid: int, session: int) -> bool:
    try:
        if pid == session or os.getsid(pid) != session:
            return False
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        return False
