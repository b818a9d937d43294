"""`python -m isthmus.train.process.worker FOLDER`: one rank of a run, from its spec to its exit status.

The folder is the whole interface (`WorkerFolder`). Nothing here depends on who started the process: it
goes on where that one dies, and ends at once on SIGTERM (143), or when a peer is lost for good. Run so, a
rank that dies is gone; under `isthmus.train.process.supervisor`, as agents run it, another process takes its
place.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from isthmus.core.errors import InputError, IsthmusError, PeerError
from isthmus.core.messages.agent_messages import RankMap, WorkerAddress
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_lease import MemoryLease
from isthmus.train.liveness.heartbeat import Pulse, start_beating
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.messages.device import set_up
from isthmus.train.pipeline.rehearsal import rehearse
from isthmus.train.process.check_executable import check_executable
from isthmus.train.process.prepare import Prepared, device_of, prepare
from isthmus.train.process.training_loop import train
from isthmus.train.recovery.recover import Recovery
from isthmus.train.recovery.rejoin import Membership, listen

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a worker that was told to end."""

FAREWELL_S = 5.0
"""How long a rank that has done all it had to waits for others who may need it once more."""

BROKEN = 1
"""The exit status of a worker that ended by an error that is nobody's: a defect, or a device's."""

_POLL_S = 0.02


@dataclass(frozen=True)
class Kept:
    """What stays when a rank's process is replaced by another.

    `listener` is where the rank listens; `memory` names its snapshots in shared memory. Where
    `is_supervised`, a process that breaks is replaced, and one that is lost costs the run no rank.
    """

    listener: socket.socket
    memory: str
    pulse: Pulse
    is_supervised: bool = False


def run(folder: WorkerFolder, spec: WorkerSpec, kept: Kept) -> None:
    """Do everything a worker does, in order; raises an `IsthmusError` where it cannot go on.

    A process that replaces another meets the others first, who wait for it, and prepares then.
    """
    schedule = check_executable(spec)
    device = device_of(spec)
    set_up(device, spec.threads)
    events = EventLog(folder, spec.rank)
    replaces = kept.pulse.incarnation >= 0
    folder.write_checkin(_address(spec, kept.listener))
    prepared = None if replaces else _prepared(spec)
    membership = Membership(spec, wait_for_ranks(folder, spec), kept.listener, device, kept.pulse, events)
    if not _join(membership, kept.pulse.read().finished):
        return
    memory = MemoryCheckpoint(kept.memory, spec.rank)
    try:
        if spec.job.compute == "virtual":
            rehearse(spec, schedule, folder)
            membership.leave()
        else:
            recovery = Recovery(spec, membership, memory, kept.pulse, events)
            train(spec, schedule, prepared or prepare(spec), folder, recovery)
    except BaseException as error:
        if kept.is_supervised and not isinstance(error, IsthmusError):
            membership.vanish()
        else:
            membership.leave(error.message if isinstance(error, IsthmusError) else one_line(error))
        raise


def _join(membership: Membership, finished: bool) -> bool:
    """Meet the others; False where the run had `finished` already, and nobody is there any more."""
    try:
        membership.join(FAREWELL_S if finished else None)
    except PeerError:
        if finished:
            return False
        raise
    return True


def _prepared(spec: WorkerSpec) -> Prepared | None:
    return prepare(spec) if spec.job.compute == "real" else None


def wait_for_ranks(folder: WorkerFolder, spec: WorkerSpec) -> RankMap:
    """Return the rank map once the agent has written it; `PeerError` where others check in too late."""
    deadline_s = time.monotonic() + spec.rendezvous_timeout_s
    while (ranks := folder.read_ranks()) is None:
        if time.monotonic() > deadline_s:
            raise PeerError(
                f"no {folder.ranks} within {spec.rendezvous_timeout_s:g} s: not every rank has checked in",
                hint="look at the other sites of the job",
            )
        time.sleep(_POLL_S)
    return ranks


def main(arguments: list[str]) -> int:
    """Run the worker of the folder named on the command line, unsupervised; return its exit status."""
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.train.process.worker FOLDER")
        folder = WorkerFolder(Path(arguments[0]))
        spec = folder.read_spec()
        with listen(spec.host) as listener, MemoryLease(spec) as lease:
            return main_in(folder, spec, Kept(listener, lease.run, Pulse()))
    except IsthmusError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code


def main_in(folder: WorkerFolder, spec: WorkerSpec, kept: Kept) -> int:
    """Run the worker of `folder` in this process; return its exit status, `BROKEN` after a defect."""
    _end_on_sigterm()
    start_beating(kept.pulse)
    try:
        run(folder, spec, kept)
    except IsthmusError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return BROKEN
    return 0


def _address(spec: WorkerSpec, listener: socket.socket) -> WorkerAddress:
    host, port = listener.getsockname()[:2]
    return WorkerAddress(rank=spec.rank, cluster=spec.cluster, host=host, port=port)


def one_line(error: BaseException) -> str:
    """Return an error as one line of the log."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _end_on_sigterm() -> None:
    """End at once on SIGTERM, also while the main thread waits inside a library and runs no handlers."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)

    def watch() -> None:
        while received := os.read(reader, 1):
            if received[0] == signal.SIGTERM:
                os._exit(TERMINATED)

    threading.Thread(target=watch, name="isthmus-sigterm", daemon=True).start()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Not sys.exit: a thread of gloo that still waits for a lost peer would keep the process.
    os._exit(status)
