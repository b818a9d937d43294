"""A worker's whole interface: one folder, the files in it, and who writes each (`docs/design/skeleton.md`).

Whoever can place `spec.json` and start `python -m isthmus.train.process.worker FOLDER` can run a worker.
Every file is written to a temporary name and renamed, or appended by one writer in whole lines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from isthmus.core.base import Count, Frozen, Index, Name, NotNegative, Positive
from isthmus.core.errors import InputError, ProtocolError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import Protection, RankMap, WorkerAddress
from isthmus.core.plan import Plan, Stage, StageTime

WORKER_VERSION: Literal[1] = 1
_Model = TypeVar("_Model", bound=Frozen)


class WorkerSpec(Frozen):
    """All that one rank of a run is told at its start.

    `run` is the job's id at the server, under which metrics are reported. `host` is where the worker
    listens; `routes` maps another cluster to the `host:port` of the HTTP CONNECT proxy that leads there.
    `device` `auto` computes on the first card that the agent made visible, and on the CPU without one.
    `stage_time` makes the chip virtual: every forward and backward is computed and then padded by waiting to
    that time; in a job of `compute: virtual` nothing is computed. `trace_steps` are the steps whose spans are
    recorded. A rank map must come within `rendezvous_timeout_s`. Workers in different clusters are joined by
    `lanes` connections a pair, under `congestion_control` where the kernel has it. Peers exchange a sign of
    life every `heartbeat_s`: a connection that misses three is made anew, and a peer silent for
    `peer_timeout_s` counts as lost; as long the others wait for a rank whose process is started again.
    """

    version: Literal[1] = WORKER_VERSION
    run: Name
    attempt: Count
    rank: Index
    job: Job
    plan: Plan
    host: str = "127.0.0.1"
    routes: dict[Name, str] = Field(default_factory=dict)
    backend: Name = "isthmus"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stage_time: StageTime | None = None
    trace_steps: tuple[Index, ...] = ()
    threads: Count = 1
    rendezvous_timeout_s: Positive = 120.0
    lanes: Count = 4
    congestion_control: Name = "bbr"
    heartbeat_s: Positive = 0.3
    peer_timeout_s: Positive = 60.0

    @model_validator(mode="after")
    def _rank_exists(self) -> WorkerSpec:
        if self.rank >= len(self.plan.ranks):
            raise ValueError(f"rank {self.rank} of a plan of {len(self.plan.ranks)} ranks")
        return self

    @property
    def stage(self) -> Stage:
        """The stage that this rank computes, or computes a share of."""
        return self.plan.stage_of(self.rank)

    @property
    def cluster(self) -> str:
        """The cluster that this rank runs in."""
        return self.stage.cluster


class ProtectRequest(Frozen):
    """A checkpoint is wanted that survives the run, of the state after more than `after` steps."""

    after: Index


EventKind = Literal[
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
    "resumed",
]
"""What befalls a rank. Told by its supervisor: its process `died`, was `restarted`, or it `gave_up`; it is
`frozen` (no sign of life), `stalled` (at work in one step for long), and then `going_on`. By itself: it is
`slow` (or no longer); nothing comes from a peer (`cut`), and then again (`mended`); a peer is `lost`; all
have `resumed` after a loss."""


class WorkerEvent(Frozen):
    """Something that befell `rank` at `time_s` (epoch), in words; `peer` is the other rank, if there is one.

    `seconds` is how long it lasted, where that is known; `step` the step it goes on with.
    """

    time_s: NotNegative
    rank: Index
    kind: EventKind
    detail: str
    peer: Index | None = None
    seconds: NotNegative | None = None
    step: Index | None = None


@dataclass(frozen=True)
class WorkerFolder:
    """The folder of one worker: paths, and reading and writing them whole."""

    path: Path

    @property
    def spec(self) -> Path:
        """`WorkerSpec`, written by the agent."""
        return self.path / "spec.json"

    @property
    def checkin(self) -> Path:
        """`WorkerAddress`, written by the worker once it listens."""
        return self.path / "checkin.json"

    @property
    def ranks(self) -> Path:
        """`RankMap`, written by the agent once the server has every address."""
        return self.path / "ranks.json"

    @property
    def metrics(self) -> Path:
        """One `StepMetrics` a line, appended by the worker."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One `WorkerEvent` a line, appended by the worker and its supervisor; the log has them in words."""
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """Standard output and error of the worker."""
        return self.path / "log"

    @property
    def protect(self) -> Path:
        """`ProtectRequest`, written by the agent that wants the work saved."""
        return self.path / "protect.json"

    @property
    def protected(self) -> Path:
        """`Protection`, written by the worker once it has read its part of such a checkpoint back."""
        return self.path / "protected.json"

    @property
    def saved(self) -> Path:
        """Written by the worker after each checkpoint: its time is that of the last one."""
        return self.path / "saved"

    @property
    def started(self) -> Path:
        """Written by the agent when it starts a job of the site's own: its time is that of the start."""
        return self.path / "started"

    @property
    def exit(self) -> Path:
        """The exit status in decimal, written by the adapter's wrapper."""
        return self.path / "exit"

    def read_spec(self) -> WorkerSpec:
        """Return the spec; raise `InputError` if it is missing or malformed, `ProtocolError` if too new."""
        spec = _read(self.spec, WorkerSpec)
        if spec is None:
            raise InputError(f"no {self.spec}", hint="the agent writes it before it starts the worker")
        return spec

    def write_spec(self, spec: WorkerSpec) -> None:
        """Make the folder and put the spec into it."""
        write_atomically(self.spec, spec.model_dump_json(by_alias=True, indent=1))

    def read_checkin(self) -> WorkerAddress | None:
        """Return where the worker listens, or None while it does not."""
        return _read(self.checkin, WorkerAddress)

    def write_checkin(self, address: WorkerAddress) -> None:
        """Say where the worker listens."""
        write_atomically(self.checkin, address.model_dump_json())

    def read_ranks(self) -> RankMap | None:
        """Return the rank map, or None while there is none."""
        return _read(self.ranks, RankMap)

    def write_ranks(self, ranks: RankMap) -> None:
        """Hand the worker its rank map."""
        write_atomically(self.ranks, ranks.model_dump_json())

    def read_protect(self) -> ProtectRequest | None:
        """Return the latest request for a checkpoint, or None where there was none."""
        return _read(self.protect, ProtectRequest)

    def write_protect(self, request: ProtectRequest) -> None:
        """Ask the worker for a checkpoint that survives it."""
        write_atomically(self.protect, request.model_dump_json())

    def read_protected(self) -> Protection | None:
        """Return the worker's last checkpoint that was read back, or None where there is none."""
        return _read(self.protected, Protection)

    def write_protected(self, protection: Protection) -> None:
        """Say which checkpoint was read back and is whole."""
        write_atomically(self.protected, protection.model_dump_json())

    def read_exit(self) -> int | None:
        """Return the exit status, or None while the worker runs (or its wrapper died with it)."""
        try:
            return int(self.exit.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def write_exit(self, status: int) -> None:
        """Record how the worker ended."""
        write_atomically(self.exit, f"{status}\n")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees it whole or not at all; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, kind: type[_Model]) -> _Model | None:
    try:
        text = path.read_text(encoding="utf-8")
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
            hint=f"agent and worker must be of one release (worker format {WORKER_VERSION})",
        ) from error
