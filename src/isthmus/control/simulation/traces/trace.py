"""`Trace`: who asked for what, when, and how long it ran. Read from a file, or generated.

Two forms of files are read: what Slurm's accounting prints (`sacct -a -X -P`), and the CSV of Alibaba's GPU
traces of 2026 (`organization,gpu_model,gpu_request,worker_num,submit_time,duration,job_type`).
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

Row = Mapping[str, str]
_GPUS = re.compile(r"gres/gpu(?::(?P<kind>[^=,]+))?=(?P<count>\d+)")
_ELAPSED = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceJob:
    """A gang of `workers` with `chips_per_worker` chips each, which `owner`'s users asked for at `submit_s`.

    It runs for `run_s` seconds once all have started. `chip` is empty where any will do.
    """

    name: str
    owner: str
    submit_s: float
    run_s: float
    workers: int = 1
    chips_per_worker: int = 1
    chip: str = ""
    priority: Priority = "middle"

    @property
    def chips(self) -> int:
        """Chips of the whole gang."""
        return self.workers * self.chips_per_worker


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Jobs by the time of their submission, the first at 0; `skipped` counts rows left out, by reason."""

    jobs: tuple[TraceJob, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def owners(self) -> tuple[str, ...]:
        """All owners, by name."""
        return tuple(sorted({job.owner for job in self.jobs}))


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Return the first `limit` jobs (all, without it) of a file; its header says what it is.

    Rows without chips or without a run are left out and counted. Raises `InputError` for a file that cannot
    be read, is of neither form, or has a value that is no number, with its line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header = file.readline()
            separator = "|" if "|" in header else ","
            form = _FORMS[separator]
            names = [name.strip() for name in header.strip().split(separator)]
            _require_columns(path, names, form.needed)
            rows = csv.DictReader(file, fieldnames=names, delimiter=separator)
            return _trace(_jobs(path, rows, form.read), limit)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}", hint="name a trace file") from error


def _trace(found: Iterable[TraceJob | str], limit: int | None) -> Trace:
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


def _jobs(path: Path, rows: Iterable[Row], read: Callable[[Row], TraceJob | str]) -> Iterable[TraceJob | str]:
    for number, row in enumerate(rows, start=2):
        try:
            yield read({name: value or "" for name, value in row.items() if name})
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}", hint="mend or remove the line") from error


def _require_columns(path: Path, names: list[str], needed: tuple[str, ...]) -> None:
    lacking = [name for name in needed if name not in names]
    if lacking:
        raise InputError(
            f"{path} has no column {', '.join(lacking)}",
            hint="print it with `sacct -a -X -P -o JobID,Account,Submit,Elapsed,NNodes,ReqTRES,QOS`, or take "
            "a CSV with organization,gpu_model,gpu_request,worker_num,submit_time,duration,job_type",
        )


def _sacct_job(row: Row) -> TraceJob | str:
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
        priority=_named_priority(row.get("QOS", "")),
    )


def _named_priority(name: str) -> Priority:
    """Return `high` or `low` where a quality of service says so in its name."""
    lower = name.lower()
    if any(word in lower for word in ("high", "urgent")):
        return "high"
    return "low" if any(word in lower for word in ("low", "spot", "scaven", "preempt")) else "middle"


def _elapsed_s(text: str) -> float:
    found = _ELAPSED.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"'{text}' is no elapsed time like 1-02:03:04")
    days, hours, minutes, seconds = (
        int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds")
    )
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"'{text}' is no number")
    return value


def _alibaba_job(row: Row) -> TraceJob | str:
    chips, run_s = _number(row["gpu_request"]), _number(row["duration"])
    if chips <= 0:
        return "no chips asked for"
    if run_s <= 0:
        return "never ran"
    return TraceJob(
        name=row["job_name"],
        owner=row["organization"] or "unknown",
        submit_s=_number(row["submit_time"]),
        run_s=run_s,
        workers=max(1, int(_number(row["worker_num"]))),
        chips_per_worker=max(1, round(chips + 0.499)),
        chip=row["gpu_model"],
        priority="low" if row["job_type"].lower() == "spot" else "high",
    )


@dataclass(frozen=True)
class _Form:
    needed: tuple[str, ...]
    read: Callable[[Row], TraceJob | str]


_FORMS: Mapping[str, _Form] = {
    "|": _Form(("JobID", "Account", "Submit", "Elapsed", "NNodes", "ReqTRES"), _sacct_job),
    ",": _Form(
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
