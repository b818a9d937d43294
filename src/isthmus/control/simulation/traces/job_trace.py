"""`Trace`: jobs with owner, size, submission time and run time; `read_trace` reads one from a file.

Two formats are supported: Slurm accounting (`sacct -a -X -P`), and the CSV of Alibaba's GPU traces of 2026
(`organization,gpu_model,gpu_request,worker_num,submit_time,duration,job_type`).
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.priority import Priority

TraceRow = Mapping[str, str]
_GPUS = re.compile(r"gres/gpu(?::(?P<kind>[^=,]+))?=(?P<count>\d+)")
_ELAPSED = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceJob:
    """A job of a trace: a gang of `workers` with `chips_per_worker` chips each."""

    name: str
    owner: str
    # Submission time, and run time once all workers have started.
    submit_s: float
    run_s: float
    workers: int = 1
    chips_per_worker: int = 1
    # Chip model; "": any.
    chip: str = ""
    priority: Priority = "middle"

    @property
    def chips(self) -> int:
        """Chips of the whole gang."""
        return self.workers * self.chips_per_worker


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Jobs ordered by submission time, the first at 0; `skipped` counts skipped rows by reason."""

    jobs: tuple[TraceJob, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def owners(self) -> tuple[str, ...]:
        """All owners, sorted by name."""
        return tuple(sorted({job.owner for job in self.jobs}))


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Return the first `limit` jobs (None: all) of a file; the header determines its format.

    Rows without chips or with a run time of 0 are skipped and counted. Raises `InputError` for a file that
    cannot be read or has an unknown format, and for an invalid value, with its line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header = file.readline()
            separator = "|" if "|" in header else ","
            form = _TRACE_FORMATS[separator]
            names = [name.strip() for name in header.strip().split(separator)]
            _require_columns(path, names, form.required_columns)
            rows = csv.DictReader(file, fieldnames=names, delimiter=separator)
            return _build_trace(_parse_rows(path, rows, form.parse_row), limit)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}", hint="give the path of a trace file") from error


def _build_trace(found: Iterable[TraceJob | str], limit: int | None) -> Trace:
    skipped: Counter[str] = Counter()
    jobs: list[TraceJob] = []
    for one in found:
        if isinstance(one, str):
            skipped[one] += 1
        else:
            jobs.append(one)
    jobs.sort(key=lambda job: (job.submit_s, job.name))
    first_s = jobs[0].submit_s if jobs else 0.0
    kept = (replace(job, submit_s=job.submit_s - first_s) for job in jobs[:limit])
    return Trace(jobs=tuple(kept), skipped=dict(skipped))


def _parse_rows(
    path: Path, rows: Iterable[TraceRow], parse_row: Callable[[TraceRow], TraceJob | str]
) -> Iterable[TraceJob | str]:
    for number, row in enumerate(rows, start=2):
        try:
            yield parse_row({name: value or "" for name, value in row.items() if name})
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}", hint="fix or remove the line") from error


def _require_columns(path: Path, names: list[str], required: tuple[str, ...]) -> None:
    missing = [name for name in required if name not in names]
    if missing:
        raise InputError(
            f"{path} has no column {', '.join(missing)}",
            hint="export it with `sacct -a -X -P -o JobID,Account,Submit,Elapsed,NNodes,ReqTRES,QOS`, or use "
            "a CSV with organization,gpu_model,gpu_request,worker_num,submit_time,duration,job_type",
        )


def _sacct_job(row: TraceRow) -> TraceJob | str:
    if "." in row["JobID"]:
        return "steps of a job"
    gpus = _GPUS.search(row["ReqTRES"])
    run_s = _elapsed_s(row["Elapsed"])
    if gpus is None or int(gpus["count"]) == 0:
        return "no chips asked for"
    if run_s == 0:
        return "never ran"
    nodes = max(1, int(row["NNodes"]))
    return TraceJob(
        name=row["JobID"],
        owner=row["Account"] or "unknown",
        submit_s=datetime.fromisoformat(row["Submit"]).timestamp(),
        run_s=run_s,
        workers=nodes,
        chips_per_worker=max(1, -(-int(gpus["count"]) // nodes)),
        chip=gpus["kind"] or "",
        priority=_qos_priority(row.get("QOS", "")),
    )


def _qos_priority(name: str) -> Priority:
    """Return the priority that the name of a Slurm QOS suggests, `middle` by default."""
    lower = name.lower()
    if any(word in lower for word in ("high", "urgent")):
        return "high"
    return "low" if any(word in lower for word in ("low", "spot", "scaven", "preempt")) else "middle"


def _elapsed_s(text: str) -> float:
    found = _ELAPSED.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"'{text}' is not an elapsed time such as 1-02:03:04")
    days, hours, minutes, seconds = (int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"'{text}' is not a finite number")
    return value


def _alibaba_job(row: TraceRow) -> TraceJob | str:
    chips, run_s = _finite_number(row["gpu_request"]), _finite_number(row["duration"])
    if chips <= 0:
        return "no chips asked for"
    if run_s <= 0:
        return "never ran"
    return TraceJob(
        name=row["job_name"],
        owner=row["organization"] or "unknown",
        submit_s=_finite_number(row["submit_time"]),
        run_s=run_s,
        workers=max(1, int(_finite_number(row["worker_num"]))),
        chips_per_worker=max(1, round(chips + 0.499)),
        chip=row["gpu_model"],
        priority="low" if row["job_type"].lower() == "spot" else "high",
    )


@dataclass(frozen=True)
class _TraceFormat:
    required_columns: tuple[str, ...]
    parse_row: Callable[[TraceRow], TraceJob | str]


_TRACE_FORMATS: Mapping[str, _TraceFormat] = {
    "|": _TraceFormat(("JobID", "Account", "Submit", "Elapsed", "NNodes", "ReqTRES"), _sacct_job),
    ",": _TraceFormat(
        (
            "job_name",
            "organization",
            "gpu_model",
            "gpu_request",
            "worker_num",
            "submit_time",
            "duration",
            "job_type",
        ),
        _alibaba_job,
    ),
}
