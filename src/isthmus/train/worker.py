"""`python -m isthmus.train.worker FOLDER`: one rank of a run, from its spec to its exit status.

The folder is the whole interface (`isthmus.core.worker`). Nothing here depends on who started the process: it
goes on where that one dies, and ends at once on SIGTERM (143) or when a peer is lost.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from isthmus.core.errors import InputError, IsthmusError, PeerError
from isthmus.core.messages import RankMap, WorkerAddress
from isthmus.core.worker import WorkerFolder, WorkerSpec
from isthmus.train.device import set_up
from isthmus.train.executable import check_executable
from isthmus.train.loop import device_of, prepare, train
from isthmus.train.membership import join_group, leave_group, listen
from isthmus.train.rehearsal import rehearse

TERMINATED = 128 + signal.SIGTERM
GRACE_S = 4.0
"""How long after the loss of a peer the main thread may take to end by itself."""

_POLL_S = 0.02


def run(folder: WorkerFolder) -> None:
    """Do everything a worker does, in order; raises an `IsthmusError` where it cannot go on."""
    spec = folder.read_spec()
    schedule = check_executable(spec)
    device = device_of(spec)
    set_up(device, spec.threads)
    with listen(spec.host) as listener:
        folder.write_checkin(_address(spec, listener))
        prepared = prepare(spec) if spec.job.compute == "real" else None
        ranks = wait_for_ranks(folder, spec)
        membership = join_group(spec, ranks, listener, _end_soon, device)
    try:
        if prepared is None:
            rehearse(spec, schedule, folder)
        else:
            train(spec, schedule, prepared, folder)
    except BaseException as error:
        leave_group(membership, reason=error.message if isinstance(error, IsthmusError) else _one_line(error))
        raise
    leave_group(membership)


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
    """Run the worker of the folder named on the command line; return its exit status."""
    _end_on_sigterm()
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.train.worker FOLDER")
        run(WorkerFolder(Path(arguments[0])))
    except IsthmusError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _address(spec: WorkerSpec, listener: socket.socket) -> WorkerAddress:
    host, port = listener.getsockname()[:2]
    return WorkerAddress(rank=spec.rank, cluster=spec.cluster, host=host, port=port)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _end_soon(error: PeerError) -> None:
    """End the process `GRACE_S` after a loss, should the main thread be stuck inside a library by then."""

    def end() -> None:
        print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    timer = threading.Timer(GRACE_S, end)
    timer.daemon = True
    timer.start()


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
