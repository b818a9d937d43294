"""The built-in `local` adapter: virtual nodes and devices on this machine, workers as process groups.

A shell wrapper starts each worker: it claims the folder (the hard link to `pid` succeeds once), runs the
program with its output in `log`, and writes `exit`. The wrapper has its own session, so the worker outlives
the agent, and the next agent reads the worker's state from the folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil

from isthmus.agent.adapters.local_queue_file import LocalQueueFile
from isthmus.agent.adapters.nvidia_links import nvidia_links, read_links
from isthmus.agent.adapters.scheduler_adapter import (
    Capabilities,
    CardNode,
    QueueMove,
    RankStart,
    SchedulerAdapter,
    SchedulerCheck,
    SchedulerLook,
    WorkerStatus,
)
from isthmus.agent.adapters.worker_limits import TEMPORARY_FOLDER, allowed_variables
from isthmus.core.errors import UnavailableError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerLimits
from isthmus.core.pool import Cluster
from isthmus.core.pool_parts.group_topology import GroupTopology
from isthmus.core.process import confined_start
from isthmus.site import node_names

_SUPERVISOR, _RL_SUPERVISOR = "isthmus.train.process.supervisor", "isthmus.rl.process.rl_supervisor"

WORKER_COMMAND = (sys.executable, "-m", _SUPERVISOR)
"""The supervisor, which restarts its rank's process; the worker folder is appended as last argument."""

COMMAND_WORKER = (sys.executable, "-m", "isthmus.train.process.command_worker")
"""Runs the program of a job with `engine: command`; the worker folder is appended as last argument."""


def job_program(job: Job, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the program of the workers of `job` where the site or its image has `usual` for jobs that train."""
    if job.engine == "command":
        return COMMAND_WORKER
    if job.task == "rl":
        return tuple(_RL_SUPERVISOR if one == _SUPERVISOR else one for one in usual or WORKER_COMMAND)
    return usual


# Step 1: claim the folder; exit if another wrapper has it. Step 2: run the program. Step 3: write its status, to a
# file that was opened before the program could put a link in its place; a late signal must not end `mv`.
_WRAPPER = """
folder=$1; shift
echo $$ > "$folder/pid.$$" || exit 125
ln "$folder/pid.$$" "$folder/pid" 2>/dev/null; claimed=$?
rm -f "$folder/pid.$$"
[ $claimed -eq 0 ] || exit 0
trap : TERM INT HUP
exec 3>"$folder/exit.part"
"$@" </dev/null >"$folder/log" 2>&1 3>&-
status=$?
trap '' TERM INT HUP
echo $status >&3 && mv -f "$folder/exit.part" "$folder/exit"
"""
CONFINED_START = (sys.executable, "-I", "-S", "-B", confined_start.__file__)
"""Applies a worker's limits before its program starts."""

_NEVER_STARTED_PID = 0
"""Process id in the `pid` file of a folder that was stopped before its start."""
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SIGKILL_STATUS = 128 + signal.SIGKILL


class LocalAdapter(SchedulerAdapter):
    """Run the workers of `cluster` as processes of this machine (see `SchedulerAdapter`).

    The site's queue is the file `queue`, which local users may edit. Only the agent hands out the cards.
    """

    capabilities = Capabilities(holds="agent", blocks=False, orders=True, containers="agent", images=True)

    def __init__(
        self,
        cluster: Cluster,
        queue: Path,
        command: Sequence[str] = WORKER_COMMAND,
        read_links: Callable[[], str] = read_links,
    ) -> None:
        self._queue = LocalQueueFile(queue)
        self._nodes = tuple(
            CardNode(
                name=f"{group.name}/{node}",
                node_group=group.name,
                cards=tuple(f"{group.name}/{node}/{card}" for card in range(group.chips_per_node)),
            )
            for group in cluster.node_groups
            for node in node_names(cluster, group.name)
        )
        real_groups = [group.name for group in cluster.node_groups if group.virtual is None]
        real_cards = [card for node in self._nodes if node.node_group in real_groups for card in node.cards]
        self._cuda_indices = {card: i for i, card in enumerate(real_cards)}
        self._command, self._read_links = tuple(command), read_links
        nodes = [node for node in self._nodes if node.node_group in real_groups]
        # The node group whose only node is this machine.
        self._machine = nodes[0].node_group if len(nodes) == 1 else None
        self._children: dict[Path, int] = {}

    def topologies(self) -> dict[str, GroupTopology]:
        """Return which cards of this machine NVLink joins, where they are one node."""
        links = nvidia_links(self._read_links()) if self._machine is not None else ()
        return {self._machine: GroupTopology(card_links=links)} if self._machine is not None and links else {}

    def observe(self) -> SchedulerLook:
        """Return the nodes of `cluster` and the entries of the queue file."""
        return SchedulerLook(nodes=self._nodes, queue=self._queue.entries())

    def start(self, rank: RankStart) -> None:
        """Start a worker once, in a new session (see `SchedulerAdapter.start`)."""
        folder = rank.folder.absolute()
        if folder in self._children or (folder / "pid").exists():
            return
        program = rank.command or (*self._command, str(folder))
        limits = WorkerFolder(folder).read_limits()
        program = confined_worker(folder, program, limits)
        environment = worker_variables(folder, os.environ, rank, limits, self._cuda_indices)
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        try:
            self._children[folder] = os.posix_spawnp(
                "sh",
                wrapper_words(folder, program),
                environment,
                file_actions=null,
                setsid=True,
            )
        except OSError as error:
            raise UnavailableError(
                f"cannot start a worker in {folder}: {error.strerror or error}",
                hint="free processes or memory on this machine; the job restarts automatically",
            ) from error

    def poll(self, folder: Path) -> WorkerStatus:
        """Return the status of the worker; once its program has ended, kill leftover processes."""
        folder = folder.absolute()
        # Step 1: reap our own child; the folder's `pid` file names the wrapper that claimed it.
        child = self._running_child(folder)
        leader = _claiming_pid(folder)
        if leader is None:
            return WorkerStatus(state="running" if child is not None else "absent")
        if child == leader:
            return WorkerStatus(state="running")
        # Step 2: read the status before the liveness checks, so that a status means that the program ended.
        status = WorkerFolder(folder).read_exit()
        if _is_wrapper(leader, folder):
            return WorkerStatus(state="running")
        if _has_orphans(leader, folder):
            if status is not None:
                os.killpg(leader, signal.SIGKILL)
            return WorkerStatus(state="running")
        # Step 3: all processes have ended; a missing status means that the wrapper was killed.
        status = WorkerFolder(folder).read_exit()
        if status is None:
            status = _SIGKILL_STATUS
            with contextlib.suppress(OSError):  # on a full disk the next poll derives the same status
                WorkerFolder(folder).write_exit(status)
        return WorkerStatus(state="exited", exit_status=status)

    def stop(self, folder: Path, *, force: bool) -> None:
        """Send SIGTERM, or SIGKILL, to the worker's process group (see `SchedulerAdapter.stop`)."""
        folder = folder.absolute()
        leader = _claiming_pid(folder)
        if leader is None:
            leader = _claim_without_start(folder)
        if leader != _NEVER_STARTED_PID and (_is_wrapper(leader, folder) or _has_orphans(leader, folder)):
            try:
                os.killpg(leader, signal.SIGKILL if force else signal.SIGTERM)
            except ProcessLookupError:
                return

    def order(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry] = ()) -> None:
        """Rewrite the queue file (see `SchedulerAdapter.order`)."""
        self._queue.reorder(moves, removed)

    def check(self) -> Sequence[SchedulerCheck]:
        """Return the cards that this machine is taken to have."""
        num_cards = sum(len(node.cards) for node in self._nodes)
        detail = f"workers run as processes of this machine; pool.yaml says {num_cards} cards"
        return [SchedulerCheck(check="scheduler", ok=True, detail=detail)]

    def _running_child(self, folder: Path) -> int | None:
        """Return the pid of our running wrapper for `folder`, or None; reap it if it has ended."""
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


def wrapper_words(folder: Path, program: Sequence[str]) -> list[str]:
    """Return the command that claims `folder`, runs `program` and records its status."""
    return ["sh", "-c", _WRAPPER, "isthmus-worker", str(folder), *program]


def worker_environment(
    base: Mapping[str, str],
    device_ids: Sequence[str],
    cuda_indices: Mapping[str, int],
    limits: WorkerLimits | None = None,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return a worker's environment: its devices, those `chosen` by job and site, one thread unless set, no tokens.

    With `limits` it has the usual variables and those that the limits name, else all but the tokens of Isthmus.
    `cuda_indices` maps each real (not virtual) device id to its CUDA index on this machine.
    """
    if limits is None:
        environment = {name: value for name, value in base.items() if not _is_secret(name)}
    else:
        environment = allowed_variables(base, limits.environment)
    environment |= chosen
    for name in _THREAD_LIMITS:
        environment.setdefault(name, "1")
    environment["ISTHMUS_CARDS"] = ",".join(device_ids)
    visible = [str(cuda_indices[device]) for device in device_ids if device in cuda_indices]
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return environment


def worker_variables(
    folder: Path,
    base: Mapping[str, str],
    rank: RankStart,
    limits: WorkerLimits | None,
    cuda_indices: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the environment of the worker of `folder` (see `worker_environment`); under limits it has a `TMPDIR`."""
    environment = worker_environment(base, rank.cards, cuda_indices, limits, rank.variables)
    if limits is not None:
        environment["TMPDIR"] = str(folder / TEMPORARY_FOLDER)
    return environment


def confined_worker(folder: Path, program: Sequence[str], limits: WorkerLimits | None) -> tuple[str, ...]:
    """Return the command that applies the limits of `folder` and then runs `program`; without limits `program`."""
    if limits is None:
        return tuple(program)
    return (*CONFINED_START, str(WorkerFolder(folder).limits_path), *program)


def _is_secret(name: str) -> bool:
    return name.startswith("ISTHMUS_") and "TOKEN" in name


def _claiming_pid(folder: Path) -> int | None:
    """Return the pid that claimed `folder` (maybe `_NEVER_STARTED_PID`), or None if unclaimed."""
    try:
        return int((folder / "pid").read_text(encoding="ascii"))
    except FileNotFoundError:
        return None


def _claim_without_start(folder: Path) -> int:
    """Claim `folder` so that it can never start; return the pid that holds the claim."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"pid.never.{os.getpid()}"
    temporary.write_text(f"{_NEVER_STARTED_PID}\n", encoding="ascii")
    try:
        (folder / "pid").hardlink_to(temporary)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return int((folder / "pid").read_text(encoding="ascii"))


def _is_wrapper(pid: int, folder: Path) -> bool:
    """Return whether `pid` is a running wrapper of `folder`, by its command line (pids are reused)."""
    if pid == _NEVER_STARTED_PID:
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and str(folder) in process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _has_orphans(leader: int, folder: Path) -> bool:
    """Return whether session `leader` still has running processes after its wrapper has ended.

    The watcher of a container is in a process group of its own; all others are in the leader's.

    The kernel does not reuse a pid while it is a session id. So if `leader` is another process, the session
    is empty.
    """
    if leader == _NEVER_STARTED_PID:
        return False
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        if not (folder / "bundle").exists():
            return False
    return any(_is_in_session(pid, leader) for pid in psutil.pids())


def _is_in_session(pid: int, session: int) -> bool:
    try:
        if pid == session or os.getsid(pid) != session:
            return False
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        return False
