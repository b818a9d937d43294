"""`python -m isthmus.train.process.supervisor FOLDER`: restarts the worker process of a rank after failures.

The supervisor holds the listening socket, so that the rank keeps its address across worker processes. It
imports all modules, so that a restart is a fork, and holds no model, thread or device. When it ends, its
worker exits too, the address closes, and the other ranks detect the loss.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from isthmus.comm.group.isthmus_group import BACKEND
from isthmus.core.errors import InputError, IsthmusError, PeerError
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED, WorkerFolder, WorkerSpec
from isthmus.core.units import format_seconds
from isthmus.train.checkpoint.memory_lease import MemoryLease
from isthmus.train.liveness.heartbeat import Heartbeat
from isthmus.train.liveness.run_lease_watch import RunLeaseWatch
from isthmus.train.liveness.stall import detect_stall
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.process.next_tokens import NextTokens
from isthmus.train.process.take_rank_keys import take_rank_keys
from isthmus.train.process.trainer import TrainingMethod
from isthmus.train.process.worker import TERMINATED, UNEXPECTED_ERROR, RankResources, error_line, run_in_process
from isthmus.wan import listen, local_address

MAX_RESTARTS = 5
"""Restarts allowed within `WINDOW_S`."""

WINDOW_S = 600.0

_POLL_S = 0.1
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HANDLED_SIGNALS = _STOP_SIGNALS | {signal.SIGCHLD}
_GRACE_S = 2.0


def supervise(
    folder: WorkerFolder,
    method: TrainingMethod,
    run: Callable[[WorkerFolder, WorkerSpec, RankResources], None] | None = None,
) -> int:
    """Run the rank of `folder` to its end, restarting its worker process; return the exit status.

    It trains by `method`, or does what `run` does.

    A worker is restarted after a signal, or after an unexpected error that followed a completed step: an
    error before any step would recur. The keys of its links stay in memory, where each worker process gets them.
    """
    spec = folder.read_spec()
    spec = spec.listening_at(local_address(spec.host))
    keys = take_rank_keys(folder, spec)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    with listen(spec.host, ports=spec.ports) as listener, MemoryLease(spec) as lease:
        resources = RankResources(listener, lease.run, Heartbeat(), keys, method, run, is_supervised=True)
        status = _Supervisor(folder, spec, resources).run()
        if status == PeerError.exit_code:
            lease.keep_for_next_attempt()
        return status


class _Supervisor:
    """Forks, watches and restarts the worker process of one rank."""

    def __init__(self, folder: WorkerFolder, spec: WorkerSpec, resources: RankResources) -> None:
        self._folder, self._spec, self._resources = folder, spec, resources
        self._heartbeat, self._events = resources.heartbeat, EventLog(folder, spec.rank)
        self._restarts: deque[float] = deque()
        self._stalled = False
        self._lease = RunLeaseWatch(Path(spec.run_lease) if spec.run_lease else None)

    def run(self) -> int:
        """Run the worker, with restarts, until it exits for good; return the exit status."""
        gc.collect()
        gc.freeze()
        while self._lease.wait_until_held():
            status = self._wait_for_exit(*self._fork_worker())
            if status >= 0 and (status != UNEXPECTED_ERROR or self._heartbeat.read().median_step_s == 0):
                return status
            cause = f"ended by {signal.Signals(-status).name}" if status < 0 else "ended by an error"
            self._events.record("died", f"worker process {cause}")
            if not self._may_restart(cause):
                finished = self._heartbeat.read().is_finished
                return 0 if finished else 128 - status if status < 0 else status
            self._events.record("restarted", f"restart {len(self._restarts)} of {MAX_RESTARTS}")
        return RUN_LEASE_ENDED

    def _may_restart(self, cause: str) -> bool:
        if self._spec.backend != BACKEND or self._spec.job.compute != "real":
            return False
        now_s = time.monotonic()
        while self._restarts and now_s - self._restarts[0] > WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) < MAX_RESTARTS:
            self._restarts.append(now_s)
            return True
        times = f"{MAX_RESTARTS + 1} times within {format_seconds(WINDOW_S)}"
        self._events.record("gave_up", f"error: worker process ended {times}, last {cause}")
        return False

    def _fork_worker(self) -> tuple[int, int]:
        """Fork the worker; return its process id, and the file descriptor whose closing makes it exit."""
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        self._heartbeat.start_process()
        child = os.fork()
        if child:
            os.close(reader)
            return child, writer
        os.close(writer)
        status = UNEXPECTED_ERROR
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
            _exit_with_supervisor(reader)
            status = run_in_process(self._folder, self._spec, self._resources, self._lease)
            sys.stdout.flush()
        finally:
            os._exit(status)

    def _wait_for_exit(self, child: int, lifeline: int) -> int:
        """Wait for the worker; return its exit status, negative for a signal. A stop signal ends it."""
        try:
            while True:
                received = signal.sigtimedwait(_HANDLED_SIGNALS, _POLL_S)
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
                if received is not None and received.si_signo in _STOP_SIGNALS:
                    return _stop_worker(child)
                if self._lease.has_ended:
                    return self._end_with_lease(child)
                self._check_stall(child)
        finally:
            os.close(lifeline)

    def _end_with_lease(self, child: int) -> int:
        """Kill the worker: the server counts it as ended soon."""
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self._events.record("gave_up", "error: no contact with the server until the lease of the site ended")
        return RUN_LEASE_ENDED

    def _check_stall(self, child: int) -> None:
        """Record the begin and end of a stall; kill a worker that stalls for too long."""
        stall = detect_stall(self._heartbeat.read(), time.monotonic())
        if stall is not None and not self._stalled:
            self._events.record(stall.kind, stall.describe(), seconds=stall.lasted_s)
        elif stall is None and self._stalled:
            self._events.record("going_on", "progress resumed")
        self._stalled = stall is not None
        if stall is not None and stall.needs_restart:
            os.kill(child, signal.SIGKILL)


def _stop_worker(child: int) -> int:
    """Stop the worker with SIGTERM, then SIGKILL after `_GRACE_S`; return `TERMINATED`."""
    os.kill(child, signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline_s:
            os.kill(child, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
    return TERMINATED


def _exit_with_supervisor(lifeline: int) -> None:
    """Exit as soon as the other end of `lifeline` closes, which the supervisor holds."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(TERMINATED)

    threading.Thread(target=watch, name="isthmus-lifeline", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Supervise the worker of the given folder; return its exit status."""
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.train.process.supervisor FOLDER")
        return supervise(WorkerFolder(Path(arguments[0])), NextTokens())
    except IsthmusError as error:
        print(f"error: {error_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
