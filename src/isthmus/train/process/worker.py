"""`python -m isthmus.train.process.worker FOLDER`: runs one rank, from its spec to its exit status.

The folder is the only interface (`WorkerFolder`); the process outlives its parent. It exits at once on
SIGTERM (143), and when a peer is lost for good. Started this way a failed rank is not replaced; agents start
`isthmus.train.process.supervisor`, which restarts it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.core.errors import InputError, IsthmusError, PeerError
from isthmus.core.messages.agent_messages import RankMap, WorkerAddress
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED, WorkerFolder, WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_lease import MemoryLease
from isthmus.train.communication.torch_device import configure_torch
from isthmus.train.kernels.compile_layers import COMPILED_FOLDER, keep_compiled_graphs
from isthmus.train.liveness.heartbeat import Heartbeat, start_heartbeat
from isthmus.train.liveness.run_lease_watch import RunLeaseWatch, end_with_run_lease
from isthmus.train.liveness.worker_events import EventLog
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.process.next_tokens import NextTokens
from isthmus.train.process.prepare_stage import PreparedStage, prepare_stage, worker_device
from isthmus.train.process.take_rank_keys import RankKeys, take_rank_keys
from isthmus.train.process.trainer import TrainingMethod
from isthmus.train.process.training_loop import train
from isthmus.train.recovery.group_membership import GroupMembership
from isthmus.train.recovery.rank_recovery import RankRecovery
from isthmus.wan import listen, local_address

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM."""

UNEXPECTED_ERROR = 1
"""Exit status after an unexpected error: a bug or a device failure."""

_POLL_S = 0.02


@dataclass(frozen=True)
class RankResources:
    """Resources of a rank that outlive its worker process."""

    # The rank's listening socket.
    listener: socket.socket
    # Name of the rank's snapshots in shared memory.
    memory_name: str
    heartbeat: Heartbeat
    keys: RankKeys = field(default_factory=RankKeys)
    method: TrainingMethod = field(default_factory=NextTokens)
    # Another program than `run_worker` for the rank; called with folder, spec and these resources.
    run: Callable[[WorkerFolder, WorkerSpec, RankResources], None] | None = None
    # Whether a supervisor restarts the worker after unexpected errors.
    is_supervised: bool = False


def run_worker(folder: WorkerFolder, spec: WorkerSpec, resources: RankResources) -> None:
    """Check, prepare, join and train; raises `IsthmusError` on expected failures.

    A restarted worker joins before it prepares, because the other ranks wait for it.
    """
    # Step 1: check the plan and configure the device.
    schedule = check_plan_supported(spec)
    device, training = worker_device(spec), spec.job.training
    configure_torch(device, spec.threads, deterministic=training.deterministic)
    if training.compile:
        keep_compiled_graphs(folder.path / COMPILED_FOLDER)
    events = EventLog(folder, spec.rank)
    with suppress(OSError):  # left by an earlier process of this rank
        folder.write_wait("", 0.0)
    # Step 2: check in and join the process group.
    is_restart = resources.heartbeat.incarnation >= 0
    folder.write_checkin(worker_address(spec, resources.listener))
    prepared = None if is_restart else _prepare_if_real(spec, resources.method)
    ranks = wait_for_rank_map(folder, spec)
    membership = GroupMembership(
        spec, ranks, resources.listener, device, resources.heartbeat, events, keys=resources.keys.links
    )
    if not _join_group(membership, spec.peer_timeout_s, resources.heartbeat.read().is_finished):
        return
    # Step 3: train.
    memory = MemoryCheckpoint(resources.memory_name, spec.rank)
    try:
        if spec.job.compute == "virtual":
            from isthmus.train.pipeline.virtual_training import run_virtual_training  # loads the planner

            run_virtual_training(spec, schedule, folder, resources.keys.switch)
            membership.leave()
        else:
            recovery = RankRecovery(spec, membership, memory, resources.heartbeat, events)
            prepared = prepared or prepare_stage(spec, resources.method.open_data)
            train(spec, schedule, prepared, folder, recovery, resources.keys, resources.method)
    except BaseException as error:
        if resources.is_supervised and not isinstance(error, IsthmusError):
            membership.abandon()
        else:
            membership.leave(error.message if isinstance(error, IsthmusError) else error_line(error))
        raise


def _join_group(membership: GroupMembership, peer_timeout_s: float, finished: bool) -> bool:
    """Join the group; return False if the run had `finished` and the other ranks have left.

    A rank that had finished waits for the others as long as they wait for it: one of them may not have finished. The
    address of a rank that has left refuses connections, which ends the wait.
    """
    try:
        membership.join(peer_timeout_s if finished else None)
    except PeerError:
        if finished:
            return False
        raise
    return True


def _prepare_if_real(spec: WorkerSpec, method: TrainingMethod) -> PreparedStage | None:
    """Build the stage and open the data, except in virtual training."""
    return prepare_stage(spec, method.open_data) if spec.job.compute == "real" else None


def wait_for_rank_map(folder: WorkerFolder, spec: WorkerSpec) -> RankMap:
    """Return the rank map once the agent has written it; raises `PeerError` after the rendezvous timeout."""
    deadline_s = time.monotonic() + spec.rendezvous_timeout_s
    while (ranks := folder.read_rank_map()) is None:
        if time.monotonic() > deadline_s:
            raise PeerError(
                f"no {folder.rank_map_path} within {spec.rendezvous_timeout_s:g} s: not every rank has checked in",
                hint="check the job on its other sites",
            )
        time.sleep(_POLL_S)
    return ranks


def main(arguments: list[str]) -> int:
    """Run the worker of the given folder without a supervisor; return its exit status."""
    try:
        if len(arguments) != 1:
            raise InputError("one argument is needed", hint="python -m isthmus.train.process.worker FOLDER")
        folder = WorkerFolder(Path(arguments[0]))
        spec = folder.read_spec()
        spec = spec.listening_at(local_address(spec.host))
        watch = RunLeaseWatch(Path(spec.run_lease) if spec.run_lease else None)
        keys = take_rank_keys(folder, spec)
        with listen(spec.host, ports=spec.ports) as listener, MemoryLease(spec) as memory:
            if not watch.wait_until_held():
                return RUN_LEASE_ENDED
            return run_in_process(folder, spec, RankResources(listener, memory.run, Heartbeat(), keys), watch)
    except IsthmusError as error:
        print(f"error: {error_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code


def run_in_process(folder: WorkerFolder, spec: WorkerSpec, resources: RankResources, lease: RunLeaseWatch) -> int:
    """Run the worker of `folder` in this process, which ends with the `lease`; return its exit status."""
    _exit_on_sigterm()
    start_heartbeat(resources.heartbeat)
    if spec.run_lease:
        end_with_run_lease(lease)
    try:
        (resources.run or run_worker)(folder, spec, resources)
    except IsthmusError as error:
        print(f"error: {error_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return UNEXPECTED_ERROR
    return 0


def worker_address(spec: WorkerSpec, listener: socket.socket) -> WorkerAddress:
    """Return where the rank listens, for its check-in."""
    host, port = listener.getsockname()[:2]
    device = os.environ.get("ISTHMUS_CARDS", "").partition(",")[0]
    return WorkerAddress(rank=spec.rank, cluster=spec.cluster, host=host, port=port, device=device)


def error_line(error: BaseException) -> str:
    """Return the type and message of `error` as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _exit_on_sigterm() -> None:
    """Exit at once on SIGTERM, even while the main thread blocks in a library and runs no handlers."""
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
    # Not sys.exit: a gloo thread that waits for a lost peer would keep the process alive.
    os._exit(status)
