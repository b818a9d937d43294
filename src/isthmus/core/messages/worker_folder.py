"""The interface of a worker: the files of one folder and the writer of each (`docs/design/skeleton.md`).

To run a worker, write `spec.json` and start `python -m isthmus.train.process.worker FOLDER`. Files are
replaced atomically (write to a temporary name, then rename) or appended in whole lines by a single writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from isthmus.core.base_model import (
    FrozenModel,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from isthmus.core.errors import InputError, ProtocolError
from isthmus.core.job import Job, with_own_folders
from isthmus.core.messages.agent_messages import (
    LinkKey,
    PortNumber,
    RankMap,
    TimeS,
    VerifiedCheckpoint,
    WorkerAddress,
)
from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.core.pool import Aggregators
from isthmus.core.rights.storage_rules import AllowedStorage

WORKER_VERSION: Literal[1] = 1
MAX_MESSAGE_BYTES = 256 << 20
"""A longer file of a worker folder is malformed."""
MAX_WORKER_MESSAGE_BYTES = 64 << 10
"""The same for a file that the worker writes, and the agent reads at each look."""
RUN_LEASE_ENDED = 75
"""Exit status of a worker that ended itself with its run lease (EX_TEMPFAIL of sysexits.h)."""
_Model = TypeVar("_Model", bound=FrozenModel)


class WorkerSpec(FrozenModel):
    """Start configuration of one rank.

    `run` is the server's job id, used for metrics. The worker listens on `host`, on another node than its agent at that
    node's address on the route to `host`; at a port of `ports` (first and last; None: any free one). `routes` maps
    another cluster to the `host:port` of the HTTP CONNECT proxy that leads there; `rdma` maps a
    cluster to the RDMA device by which connections to its ranks go on (`auto`: a card of this node, by `local_rank`).
    `device` `auto` uses the first GPU that the agent made visible, else the CPU.
    `stage_time` emulates a virtual chip: each forward and backward is padded to that time (with `compute: virtual`
    the worker only waits). `trace_steps` are the steps whose spans are recorded. `rendezvous_timeout_s` limits the
    wait for the rank map. Two workers in different clusters share `lanes` TCP connections, with
    `congestion_control` if the kernel supports it. Peers send a heartbeat every `heartbeat_s`; a connection
    reconnects after three missed ones, and a peer silent for `peer_timeout_s` is lost. `peer_timeout_s` also limits
    the wait for a rank whose process restarts. A rank that waits for other ranks' parts of a checkpoint fails after
    `checkpoint_timeout_s` without progress. `has_trained`: an earlier attempt of the job has trained, so files in
    its folders without a claim are its own. `user` submitted the job (empty: the server did not say); `storage` is what
    the user's jobs may read and write at this site (None: any path). `run_lease` is the file of the site's
    `RunLease`, on which the worker ends itself (None: it runs without limit). `switches` sum the gradients of a
    job with `synchronisation: passing`. The rank is number `local_rank` of the `local_world_size` ranks of its node.
    """

    version: Literal[1] = WORKER_VERSION
    run: Name
    user: str = ""
    storage: AllowedStorage | None = None
    attempt: PositiveInt
    rank: NonNegativeInt
    job: Job
    plan: Plan
    host: str = "127.0.0.1"
    ports: tuple[PortNumber, PortNumber] | None = None
    routes: dict[Name, str] = Field(default_factory=dict)
    rdma: dict[Name, str] = Field(default_factory=dict)
    backend: Name = "isthmus"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stage_time: StageTime | None = None
    trace_steps: tuple[NonNegativeInt, ...] = ()
    threads: PositiveInt = 1
    rendezvous_timeout_s: PositiveFloat = 120.0
    lanes: PositiveInt = 4
    congestion_control: Name = "bbr"
    heartbeat_s: PositiveFloat = 0.3
    peer_timeout_s: PositiveFloat = 60.0
    checkpoint_timeout_s: PositiveFloat = 600.0
    has_trained: bool = False
    run_lease: str | None = None
    switches: tuple[Aggregators, ...] = ()
    local_rank: NonNegativeInt = 0
    local_world_size: PositiveInt = 1

    @model_validator(mode="after")
    def _check_rank(self) -> WorkerSpec:
        if self.rank >= self.plan.num_ranks:
            raise ValueError(f"rank {self.rank} of a plan of {self.plan.num_ranks} ranks")
        return self

    def listening_at(self, host: str) -> WorkerSpec:
        """Return it with another address to listen at: that of the rank's own node."""
        return self.model_copy(update={"host": host})

    def rdma_device(self, cluster: str) -> str | None:
        """Return the device by which connections to the ranks of another `cluster` go on, None for TCP."""
        device = None if cluster == self.cluster else self.rdma.get(cluster)
        return f"auto:{self.local_rank}" if device == "auto" else device

    @property
    def stage(self) -> Stage:
        """The stage of this rank."""
        return self.plan.stage_of(self.rank)

    @property
    def cluster(self) -> str:
        """The cluster of this rank."""
        return self.stage.cluster


class WorkerKeys(FrozenModel):
    """The keys of a worker: by site of the plan, the one that its own site shares with it, and those of its job.

    `copies` is the key of the job's copies in an object store, `switch` that of its packets to switches.
    """

    keys: Annotated[dict[Name, LinkKey], Field(repr=False)]
    copies: Annotated[LinkKey | None, Field(repr=False)] = None
    switch: Annotated[LinkKey | None, Field(repr=False)] = None


class WorkerAccount(FrozenModel):
    """The account of the machine that a worker runs as."""

    name: str
    uid: NonNegativeInt
    gid: NonNegativeInt
    groups: tuple[NonNegativeInt, ...] = ()
    home: str = "/"


class WorkerPaths(FrozenModel):
    """The folders and files below which a worker may read, and below which it may also write."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


class WorkerLimits(FrozenModel):
    """What a worker's program may do; `core/process/confined_start.py` applies it before the program starts.

    Without `account` the program runs as the agent's account. `paths` are enforced by Landlock; None: not limited.
    `environment` are the names of variables that it gets beside the usual ones.
    """

    umask: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "077"
    account: WorkerAccount | None = None
    paths: WorkerPaths | None = None
    environment: tuple[str, ...] = ()


class CheckpointRequest(FrozenModel):
    """Request for a durable checkpoint of a state after more than `after` steps."""

    after: NonNegativeInt


MAX_REASON_CHARS = 300
"""Longest reason of a wait, in characters."""


class WorkerWait(FrozenModel):
    """What a worker waits for, and since when (epoch)."""

    reason: Annotated[str, Field(max_length=MAX_REASON_CHARS)]
    since_s: TimeS


WorkerEventKind = Literal[
    "died",
    "restarted",
    "gave_up",
    "frozen",
    "stalled",
    "going_on",
    "slow",
    "cut",
    "mended",
    "lost",
    "refused",
    "resumed",
    "saved",
]
"""Kinds of worker event. From the supervisor: the process `died` or was `restarted`, or the supervisor
`gave_up`; the rank is `frozen` (no heartbeat), `stalled` (too long in one step), then `going_on`. From the
rank: it is `slow` (or no longer); a peer's messages stop (`cut`) and return (`mended`); a peer is `lost`;
callers that do not belong to the run were `refused`; all ranks `resumed` after a loss or a restart; a checkpoint of
all ranks is `saved`."""


class WorkerEvent(FrozenModel):
    """An event of `rank` at `time_s` (epoch), described by `detail`; `peer` is the other rank, if any.

    `seconds` is its duration, if known; `step` the step at which the rank continues.
    """

    time_s: TimeS
    rank: NonNegativeInt
    kind: WorkerEventKind
    detail: str
    peer: NonNegativeInt | None = None
    seconds: NonNegativeFloat | None = None
    step: NonNegativeInt | None = None


@dataclass(frozen=True)
class WorkerFolder:
    """The folder of one worker: its paths, with atomic reads and writes."""

    path: Path

    @property
    def spec_path(self) -> Path:
        """`WorkerSpec`, written by the agent."""
        return self.path / "spec.json"

    @property
    def limits_path(self) -> Path:
        """`WorkerLimits`, written by the agent; without it the worker has those of the agent."""
        return self.path / "limits.json"

    @property
    def checkin_path(self) -> Path:
        """`WorkerAddress`, written by the worker once it listens."""
        return self.path / "checkin.json"

    @property
    def keys_path(self) -> Path:
        """`WorkerKeys`, mode 0600, written by the agent before the start; the worker removes it once it has read it."""
        return self.path / "keys.json"

    @property
    def rank_map_path(self) -> Path:
        """`RankMap`, written by the agent once the server has all addresses."""
        return self.path / "ranks.json"

    @property
    def metrics_path(self) -> Path:
        """`StepMetrics`, one per line, appended by the worker."""
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """`WorkerEvent`, one per line, appended by the worker and its supervisor; also logged as text."""
        return self.path / "events.jsonl"

    @property
    def log_path(self) -> Path:
        """Standard output and error of the worker."""
        return self.path / "log"

    @property
    def checkpoint_request_path(self) -> Path:
        """`CheckpointRequest`, written by the agent to request a checkpoint."""
        return self.path / "protect.json"

    @property
    def verified_checkpoint_path(self) -> Path:
        """`VerifiedCheckpoint`, written by the worker once it has verified its part of the requested checkpoint."""
        return self.path / "protected.json"

    @property
    def progress_path(self) -> Path:
        """Steps that the program of a job with `engine: command` reports, as lines of JSON."""
        return self.path / "progress.jsonl"

    @property
    def saved_path(self) -> Path:
        """Touched by the worker after each checkpoint; its mtime is the time of the last one."""
        return self.path / "saved"

    @property
    def wait_path(self) -> Path:
        """`WorkerWait`, written by the worker while it waits for other ranks; absent otherwise."""
        return self.path / "wait.json"

    @property
    def started_path(self) -> Path:
        """Written by the agent when it starts a local job; its mtime is the start time."""
        return self.path / "started"

    @property
    def exit_path(self) -> Path:
        """Exit status in decimal, written by the adapter's wrapper."""
        return self.path / "exit"

    def read_spec(self) -> WorkerSpec:
        """Return the spec, with the job's own folders in its job.

        Raises `InputError` if it is missing or malformed, `ProtocolError` if too new.
        """
        spec = _read_model(self.spec_path, WorkerSpec)
        if spec is None:
            raise InputError(f"{self.spec_path} is missing", hint="the agent writes it before it starts the worker")
        return spec.model_copy(update={"job": with_own_folders(spec.job, spec.run)})

    def write_spec(self, spec: WorkerSpec) -> None:
        """Create the folder and write the spec."""
        write_atomically(self.spec_path, spec.model_dump_json(by_alias=True, indent=1))

    def read_checkin(self) -> WorkerAddress | None:
        """Return the worker's address, or None before check-in."""
        return _read_model(self.checkin_path, WorkerAddress, MAX_WORKER_MESSAGE_BYTES)

    def write_checkin(self, address: WorkerAddress) -> None:
        """Publish the worker's address."""
        write_atomically(self.checkin_path, address.model_dump_json())

    def write_keys(self, keys: WorkerKeys, account: WorkerAccount | None = None) -> None:
        """Write the keys for the worker, which runs as `account` (None: as the caller) and alone may read the file."""
        write_atomically(self.keys_path, keys.model_dump_json(), mode=0o600)
        if account is not None and account.uid != os.geteuid():
            os.chown(self.keys_path, account.uid, account.gid, follow_symlinks=False)

    def take_keys(self) -> WorkerKeys | None:
        """Return the keys and remove their file; None if there is none. Raises `InputError` if it is malformed."""
        try:
            return _read_model(self.keys_path, WorkerKeys)
        finally:
            self.keys_path.unlink(missing_ok=True)

    def left_keys(self, account: WorkerAccount | None = None) -> WorkerKeys | None:
        """Return the keys that an earlier agent left for the worker; a file of a third account counts as missing."""
        with contextlib.suppress(OSError, InputError):
            owner = self.keys_path.lstat().st_uid
            return _read_model(self.keys_path, WorkerKeys) if owner in (os.geteuid(), account and account.uid) else None
        return None

    def read_limits(self) -> WorkerLimits | None:
        """Return the limits of the worker's program, or None."""
        return _read_model(self.limits_path, WorkerLimits)

    def write_limits(self, limits: WorkerLimits) -> None:
        """Write the limits of the worker's program."""
        write_atomically(self.limits_path, limits.model_dump_json())

    def read_rank_map(self) -> RankMap | None:
        """Return the rank map, or None if not written yet."""
        return _read_model(self.rank_map_path, RankMap)

    def write_rank_map(self, ranks: RankMap) -> None:
        """Write the rank map for the worker."""
        write_atomically(self.rank_map_path, ranks.model_dump_json())

    def read_checkpoint_request(self) -> CheckpointRequest | None:
        """Return the latest checkpoint request, or None."""
        return _read_model(self.checkpoint_request_path, CheckpointRequest)

    def write_checkpoint_request(self, request: CheckpointRequest) -> None:
        """Request a durable checkpoint from the worker."""
        write_atomically(self.checkpoint_request_path, request.model_dump_json())

    def read_verified_checkpoint(self) -> VerifiedCheckpoint | None:
        """Return the worker's last verified checkpoint, or None."""
        return _read_model(self.verified_checkpoint_path, VerifiedCheckpoint, MAX_WORKER_MESSAGE_BYTES)

    def write_verified_checkpoint(self, protection: VerifiedCheckpoint) -> None:
        """Publish the last verified checkpoint."""
        write_atomically(self.verified_checkpoint_path, protection.model_dump_json())

    def read_wait(self) -> WorkerWait | None:
        """Return what the worker waits for, or None."""
        return _read_model(self.wait_path, WorkerWait, MAX_WORKER_MESSAGE_BYTES)

    def write_wait(self, reason: str, now_s: float) -> bool:
        """Publish that the worker waits since `now_s`; "" ends the wait. Return whether the reason is new."""
        if not reason:
            self.wait_path.unlink(missing_ok=True)
            return False
        reason, known = reason[:MAX_REASON_CHARS], self.read_wait()
        if known is not None and known.reason == reason:
            return False
        write_atomically(self.wait_path, WorkerWait(reason=reason, since_s=now_s).model_dump_json())
        return True

    def read_exit(self) -> int | None:
        """Return the exit status, or None while the worker runs or if its wrapper died too."""
        try:
            with open_regular(self.exit_path) as stream:
                return int(stream.read(32))
        except (OSError, ValueError):
            return None

    def write_exit(self, status: int) -> None:
        """Write the exit status of the worker."""
        write_atomically(self.exit_path, f"{status}\n")


def open_regular(path: Path) -> BufferedReader:
    """Open a file that another account may have made, for reading; a link, pipe or device counts as missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write `content` to `path` atomically and durably; create its folder. A new file has `mode` less the umask.

    It follows no link that another account has put there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_model(path: Path, kind: type[_Model], max_bytes: int = MAX_MESSAGE_BYTES) -> _Model | None:
    try:
        with open_regular(path) as stream:
            text = stream.read(max_bytes)
    except FileNotFoundError:
        return None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = ProtocolError if where == "version" else InputError
        raise problem(
            f"{path}: {where or 'file'}: {first['msg']}",
            hint=f"use the same release of agent and worker (worker format {WORKER_VERSION})",
        ) from error
