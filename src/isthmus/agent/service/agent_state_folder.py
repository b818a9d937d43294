"""Layout of the agent's state folder; content of worker folders; the site's local jobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from isthmus.agent.files.site_storage import SiteStorage
from isthmus.core.base_model import FrozenModel, Name, PositiveInt
from isthmus.core.errors import FileError, UnavailableError
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec, open_regular, write_atomically
from isthmus.core.pool import Cluster
from isthmus.site import LocalJob, SitePart
from isthmus.wan import PortRange

_NAME: TypeAdapter[Name] = TypeAdapter(Name)
_ROUTES: TypeAdapter[dict[str, dict[str, str]]] = TypeAdapter(dict[str, dict[str, str]])
_TAIL_BYTES = 8192
_MAX_ERROR_CHARS = 500


class AgentStateFolder:
    """The layout of an agent's state folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.runs = self.path / "runs"
        self.local = self.path / "local"
        self.run_lease = self.path / "lease" / "lease.json"

    def make_lease_folder(self) -> None:
        """Make the folder of the run lease, which workers of all accounts may enter."""
        self.run_lease.parent.mkdir(parents=True, exist_ok=True)
        self.run_lease.parent.chmod(0o755)

    def worker_folder(self, part: SitePart, rank: int) -> Path:
        """Return the folder of one worker."""
        if part.local:
            return self.local / part.job / f"run-{part.num_preemptions}"
        return self.runs / part.job / str(part.attempt) / f"rank-{rank}"


def worker_spec(
    part: SitePart,
    rank: int,
    cluster: Cluster,
    *,
    host: str,
    ports: PortRange | None = None,
    routes: dict[str, str],
    rdma: Sequence[str] = (),
    storage: SiteStorage,
    run_lease: Path | None = None,
) -> WorkerSpec:
    """Return the `WorkerSpec` of `rank`, with the places to which the job's paths lead in `storage`.

    Ranks of the clusters `rdma` are reached by RDMA. It includes the predicted stage time on virtual chips and for
    `compute: virtual`. `run_lease` is the file that a part with a run lease ends itself on. Raises `InputError` if the
    job's user may not use a path of the job.
    """
    if part.plan is None or part.spec is None:
        raise UnavailableError(f"part {part.job}/{part.attempt} has no plan, cannot start rank {rank}")
    stage, predicted = part.plan.stage_of(rank), part.plan.predicted
    stage_time = None
    place = len(part.plan.stages) if part.plan.is_rollout(rank) else part.plan.ranks[rank].stage
    if predicted is not None and place < len(predicted.stage_times):
        virtual = part.spec.compute == "virtual" or cluster.group(stage.node_group).virtual
        stage_time = predicted.stage_times[place] if virtual else None
    steps = part.spec.training.steps
    job, allowed = storage.resolve_job(part.job, part.spec, part.user)
    neighbours = ranks_of_node(part, rank)
    return WorkerSpec(
        run=part.job,
        attempt=part.attempt,
        rank=rank,
        user=part.user,
        storage=allowed,
        job=job,
        plan=part.plan,
        host=host,
        ports=ports,
        routes=routes,
        rdma=dict.fromkeys(rdma, "auto"),
        stage_time=stage_time,
        trace_steps=tuple(sorted({min(2, steps - 1), steps // 2, steps - 1})),
        has_trained=part.has_trained,
        switches=part.switches,
        run_lease=str(run_lease) if part.has_run_lease else None,
        local_rank=neighbours.index(rank),
        local_world_size=len(neighbours),
    )


def ranks_of_node(part: SitePart, rank: int) -> list[int]:
    """Return the ranks of a part on the node of `rank`, ascending."""
    node = _node_of(part, rank)
    return sorted(one for one in part.workers if _node_of(part, one) == node)


def devices_for(part: SitePart, rank: int) -> tuple[str, ...]:
    """Return the devices that a rank sees: its own, or for a command those of all ranks of its node, in their order.

    Programs choose the device with the number `LOCAL_RANK`, as under torchrun.
    """
    if part.spec is None or part.spec.engine != "command":
        return part.workers[rank].devices
    return tuple(device for one in ranks_of_node(part, rank) for device in part.workers[one].devices)


def _node_of(part: SitePart, rank: int) -> str:
    """Return `group/node` of a rank's first device, or its node group at a site that only counts devices."""
    worker = part.workers[rank]
    return worker.devices[0].rpartition("/")[0] if worker.devices else worker.node_group


def read_routes(path: Path | None, cluster: str) -> dict[str, str]:
    """Return the routes of `cluster` from a file `{cluster: {other: "host:port"}}`; empty without a file."""
    if path is None:
        return {}
    try:
        return _ROUTES.validate_json(path.read_bytes()).get(cluster, {})
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", file=str(path)) from error
    except ValidationError as error:
        raise FileError(
            error.errors()[0]["msg"],
            file=str(path),
            hint='routes are JSON: {"hangzhou": {"nanjing": "127.0.0.1:7001"}}',
        ) from error


def log_tail(folder: Path) -> str:
    """Return the last log line with an error, else the last line; at most 500 characters."""
    try:
        with open_regular(folder / "log") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or [""])[-1][:_MAX_ERROR_CHARS]


def output_bytes(folder: Path) -> int:
    """Return the bytes that the worker of `folder` has written to its log and metrics."""
    num_bytes = 0
    for file in (WorkerFolder(folder).log_path, WorkerFolder(folder).metrics_path):
        with contextlib.suppress(FileNotFoundError):
            num_bytes += file.stat().st_size
    return num_bytes


def unsaved_work_s(folder: Path, now_s: float) -> float:
    """Return the seconds since the last checkpoint of the worker of `folder`, or since its start.

    `now_s` is in seconds since the epoch.
    """
    worker = WorkerFolder(folder)
    for mark in (worker.saved_path, worker.rank_map_path, worker.started_path):
        with contextlib.suppress(FileNotFoundError):
            return max(0.0, now_s - mark.stat().st_mtime)
    return 0.0


class LocalJobFile(FrozenModel):
    """`job.json` of a local job: the command, the chips it needs, and its priority.

    `level` is one of the site's own priorities (default: the level that `middle` maps to). Pool jobs never
    preempt a job with `preemptible: false`, whatever the owner's policy.
    """

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    node_group: Name
    chips: PositiveInt = 1
    level: Name | None = None
    preemptible: bool = True


def read_local_jobs(state: AgentStateFolder, cluster: Cluster) -> tuple[tuple[LocalJob, ...], tuple[str, ...]]:
    """Return the active local jobs, and the names of those whose file cannot be read now.

    An active job is a folder with `job.json` and without `exit` and `cancel`. A job that can never run gets
    the reason in `log` and status 2 in `exit`. A job with an unreadable file may be running.
    """
    found, unread = list[LocalJob](), list[str]()
    for file in sorted(state.local.glob("*/job.json"), key=lambda file: (_modified_ns(file), file)):
        folder = file.parent
        if (folder / "exit").exists() or (folder / "cancel").exists():
            continue
        try:
            _check_name(folder.name)
            job = LocalJobFile.model_validate_json(file.read_bytes())
            level = job.level or cluster.priorities.middle
            cluster.priorities.rank(level)
            _check_fits(job, cluster)
        except FileNotFoundError:  # removed meanwhile
            continue
        except (IsADirectoryError, ValueError) as error:
            with contextlib.suppress(OSError):  # on a full disk the next poll retries
                write_atomically(folder / "log", f"{error}\n")
                WorkerFolder(folder).write_exit(2)
            continue
        except OSError:
            unread.append(folder.name)
            continue
        found.append(
            LocalJob(
                name=folder.name,
                command=job.command,
                node_group=job.node_group,
                chips=job.chips,
                level=level,
                preemptible=job.preemptible,
            )
        )
    return tuple(found), tuple(unread)


def submit_local_job(state: Path, name: str, job: LocalJobFile) -> Path:
    """Queue a local job with the agent of state folder `state`; return the job's folder."""
    folder = AgentStateFolder(state).local / name
    write_atomically(folder / "job.json", json.dumps(job.model_dump(mode="json")))
    return folder


def _modified_ns(file: Path) -> int:
    """Return the mtime of `file`, 0 if missing."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _check_name(name: str) -> None:
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        rule = "use at most 63 letters, digits, '.', '_' and '-'"
        raise ValueError(f"the folder name '{name}' is not a valid job name: {rule}") from error


def _check_fits(job: LocalJobFile, cluster: Cluster) -> None:
    groups = {group.name: group.num_chips for group in cluster.node_groups}
    if job.chips > groups.get(job.node_group, 0):
        raise ValueError(
            f"the job needs {job.chips} chips of node group '{job.node_group}'; {cluster.name} has "
            + ", ".join(f"{num} of '{name}'" for name, num in groups.items())
        )
