"""`python -m isthmus.train.process.command_worker FOLDER`: the worker of a rank of a job with `engine: command`.

It checks in, waits for the rank map, and runs the job's program with the variables of torchrun. The program and all
that it starts end with the worker: on a stop signal, at the end of the site's run lease, and once the program itself
ends. The worker's output is the program's, up to `MAX_LOG_BYTES`.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from isthmus.core.errors import InputError, IsthmusError, PeerError
from isthmus.core.job_parts.command_job import CommandConfig
from isthmus.core.messages.agent_messages import RankMap, WorkerAddress
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED, WorkerFolder, WorkerSpec
from isthmus.train.liveness.run_lease_watch import RunLeaseWatch
from isthmus.train.process.command_progress import ProgressReader
from isthmus.wan import listen, local_address

MAX_LOG_BYTES = 256 << 20
"""Output of a program that is kept; what it writes beyond is read and dropped."""

GRACE_S = 2.0
"""How long a program has between SIGTERM and SIGKILL; less than a site waits before it kills the worker itself."""

COMMAND_FAILED = 1
"""Exit status of the worker after a program that ended with another status than 0."""

_POLL_S = 0.1
_PROGRESS_INTERVAL_S = 0.5
_CHUNK_BYTES = 1 << 16
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_SET_CHILD_SUBREAPER = 36


def run_command(folder: WorkerFolder, spec: WorkerSpec, command: CommandConfig) -> int:
    """Run the program of the rank to its end; return the exit status of the worker.

    Raises `InputError` if the program cannot be started, `PeerError` if not every rank checks in.
    """
    lease = RunLeaseWatch(Path(spec.run_lease) if spec.run_lease else None)
    with listen(spec.host, ports=spec.ports) as listener:
        if not lease.wait_until_held():
            return RUN_LEASE_ENDED
        folder.write_checkin(_address(spec, listener))
        ranks = _wait_for_rank_map(folder, spec, lease)
    if ranks is None:
        return RUN_LEASE_ENDED if lease.has_ended else 128 + signal.SIGTERM
    place = Path(spec.job.output)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {place}: {error.strerror}", hint="set output") from error
    return _Program(folder, spec, lease).run(command, rank_environment(spec, ranks, folder, command), place)


def rank_environment(spec: WorkerSpec, ranks: RankMap, folder: WorkerFolder, command: CommandConfig) -> dict[str, str]:
    """Return the environment of the program: the worker's, the job's variables, and the place of the rank.

    Rank 0 is the master; its listening port is free again when the programs start.
    """
    master = min(ranks.workers, key=lambda worker: worker.rank)
    nodes = list(dict.fromkeys((one.cluster, one.device.rpartition("/")[0]) for one in ranks.workers))
    own = next(one for one in ranks.workers if one.rank == spec.rank)
    return {
        **os.environ,
        **command.environment,
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(len(ranks.workers)),
        "LOCAL_RANK": str(spec.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_RANK": str(nodes.index((own.cluster, own.device.rpartition("/")[0]))),
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "ISTHMUS_JOB": spec.run,
        "ISTHMUS_ATTEMPT": str(spec.attempt),
        "ISTHMUS_CLUSTER": spec.cluster,
        "ISTHMUS_PROGRESS": str(folder.progress_path),
    }


class _Program:
    """The program of a rank and the processes that it starts."""

    def __init__(self, folder: WorkerFolder, spec: WorkerSpec, lease: RunLeaseWatch) -> None:
        self._lease, self._progress = lease, ProgressReader(folder, spec)
        self._num_logged = 0

    def run(self, command: CommandConfig, environment: dict[str, str], place: Path) -> int:
        """Run the program until it ends, is stopped, or the lease ends; return the exit status of the worker."""
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become children
        program = command.arguments[0]
        try:
            process = subprocess.Popen(  # noqa: S603 - a list of arguments, under the limits of workers
                command.arguments,
                env=environment,
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_unblock_signals,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot start '{program}': {reason}", hint="see command.arguments of the job") from error
        if process.stdout is None:
            raise RuntimeError("the program has no output pipe")
        os.set_blocking(process.stdout.fileno(), False)
        with process.stdout, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            cause = self._watch(process, selector)
            _end_descendants(GRACE_S if cause else 0.0)
            self._copy_rest(process.stdout.fileno())
        self._progress.read_rest()
        if cause:
            return cause
        return _status_of(process.wait())

    def _watch(self, process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> int:
        """Copy output until the program ends (return 0), or must be ended (return the worker's exit status)."""
        next_progress_s = 0.0
        while process.poll() is None:
            if selector.select(_POLL_S):
                for key, _ in selector.select(0):
                    if not self._copy(key.fd):
                        selector.unregister(key.fileobj)
            elif not selector.get_map():
                time.sleep(_POLL_S)
            if time.monotonic() >= next_progress_s:
                self._progress.read()
                _reap_orphans(process.pid)
                next_progress_s = time.monotonic() + _PROGRESS_INTERVAL_S
                if self._lease.has_ended:
                    return RUN_LEASE_ENDED
            if _stop_signal() is not None:
                return 128 + signal.SIGTERM
        return 0

    def _copy(self, source: int) -> bool:
        """Copy one piece of output to the log; return False at its end."""
        try:
            data = os.read(source, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        left = MAX_LOG_BYTES - self._num_logged
        if data and left > 0:
            _write(data[:left])
            self._num_logged += len(data)
            if len(data) >= left:
                _write(f"\nthe log has {MAX_LOG_BYTES} bytes; further output is dropped\n".encode())
        return bool(data)

    def _copy_rest(self, source: int) -> None:
        """Copy what the program has left in the pipe."""
        with suppress(OSError):
            while (data := os.read(source, _CHUNK_BYTES)) and self._num_logged < MAX_LOG_BYTES:
                _write(data[: MAX_LOG_BYTES - self._num_logged])
                self._num_logged += len(data)


def _write(data: bytes) -> None:
    """Write to the log; on a full disk the output is lost and the program runs on."""
    with suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def _status_of(status: int) -> int:
    """Return the worker's exit status after a program that ended with `status` (negative: by a signal)."""
    if status == 0:
        return 0
    if status < 0:
        print(f"error: the command was ended by {signal.Signals(-status).name}", flush=True)
        return 128 - status
    print(f"error: the command ended with status {status}", flush=True)
    return COMMAND_FAILED


def _end_descendants(grace_s: float) -> None:
    """Send SIGTERM to all processes that the program has started, then SIGKILL after `grace_s`; wait for their end."""
    deadline_s, sent = time.monotonic() + grace_s, set[int]()
    while living := _descendants():
        late = time.monotonic() >= deadline_s
        for one in living:
            if late or one.pid not in sent:
                sent.add(one.pid)
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.01 if late else 0.05)


def _descendants() -> list[psutil.Process]:
    """Return the running descendants of this process, and reap those that have ended."""
    _reap_orphans(0)
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def _reap_orphans(program: int) -> None:
    """Reap the ended children except process `program`, whose status `Popen` reads."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != program:
            os.waitpid(ended.si_pid, 0)


def _stop_signal() -> int | None:
    received = signal.sigtimedwait(_STOP_SIGNALS, 0)
    return received.si_signo if received else None


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _wait_for_rank_map(folder: WorkerFolder, spec: WorkerSpec, lease: RunLeaseWatch) -> RankMap | None:
    """Return the rank map, or None after a stop signal or at the end of the lease."""
    deadline_s = time.monotonic() + spec.rendezvous_timeout_s
    while (ranks := folder.read_rank_map()) is None:
        if time.monotonic() > deadline_s:
            raise PeerError(
                f"no {folder.rank_map_path} within {spec.rendezvous_timeout_s:g} s: not every rank has checked in",
                hint="check the job on its other sites",
            )
        if signal.sigtimedwait(_STOP_SIGNALS, 0.05) is not None or lease.has_ended:
            return None
    return ranks


def _address(spec: WorkerSpec, listener: socket.socket) -> WorkerAddress:
    host, port = listener.getsockname()[:2]
    devices = os.environ.get("ISTHMUS_CARDS", "").split(",")
    share = len(devices) // spec.local_world_size
    return WorkerAddress(
        rank=spec.rank, cluster=spec.cluster, host=host, port=port, device=devices[spec.local_rank * share]
    )


def main(arguments: list[str]) -> int:
    """Run the rank of the given folder; return its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.train.process.command_worker FOLDER")
        folder = WorkerFolder(Path(arguments[0]))
        spec = folder.read_spec()
        spec = spec.listening_at(local_address(spec.host))
        folder.take_keys()  # the keys of Isthmus' own links are no business of the program
        if spec.job.command is None:
            raise InputError(f"job {spec.run} has no command", hint="its worker is the supervisor")
        return run_command(folder, spec, spec.job.command)
    except IsthmusError as error:
        print(f"error: {' '.join(str(error).split())}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
