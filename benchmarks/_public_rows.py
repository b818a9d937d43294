"""The rows of the public sets: errors of time and memory, refused configurations, bands."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._bridge import read_bridge
from benchmarks._flagperf import read_flagperf
from benchmarks._public_bound import bound_rows, factor_rows
from benchmarks._public_growth import calibrated_on, error_and_band, growth_rows
from benchmarks._public_plans import plan_row
from benchmarks._public_run import PublicRun
from benchmarks._torchtitan import read_torchtitan
from benchmarks.table import Row
from isthmus.plan import predict
from isthmus.plan.memory.memory_limit import stage_memory_dict
from isthmus.plan.memory.stage_memory import StageMemory
from isthmus.plan.time.predict import Z_90_PERCENT
from isthmus.plan.time.stage_costs import StageCost

SEEN_SHARE = 0.1
"""Part of a set that a calibration may see."""

SEED = 0

READERS: dict[str, Callable[[Path], list[PublicRun]]] = {
    "torchtitan": read_torchtitan,
    "flagperf": read_flagperf,
    "bridge": read_bridge,
}
"""Readers of the sets by the option that names the folder."""


def split(runs: Sequence[PublicRun], seed: int) -> tuple[list[PublicRun], list[PublicRun]]:
    """Return (seen, unseen) of the runs that ran, drawn by `seed`."""
    ran = [run for run in runs if run.ran]
    chosen = set(random.Random(seed).sample(range(len(ran)), max(1, math.floor(SEEN_SHARE * len(ran)))))
    return [r for i, r in enumerate(ran) if i in chosen], [r for i, r in enumerate(ran) if i not in chosen]


def public_rows(name: str, folder: Path | None) -> list[Row]:
    """Return the rows of a set, or one that says why there are none."""
    if folder is None or not folder.is_dir():
        why = f"{name}: skipped, its data is not here; name a copy of its repository with --{name}"
        return [Row(what=why, ours=0, unit="points", target="see the rows of a full run")]
    runs = READERS[name](folder)
    sheet = {run.name: forecast_of(run) for run in runs}
    rows: list[Row] = []
    for kind in ("dense", "experts"):
        some = [run for run in runs if run.kind == kind]
        if some:
            rows += [*_time_rows(f"{name}, {len(some)} {kind}", some, sheet), *bound_rows(f"{name}, {kind}", some)]
            if sum(run.ran for run in some) > 2:
                seconds = {key: forecast.iteration_s for key, forecast in sheet.items()}
                rows += factor_rows(f"{name}, {kind}", some, seconds)
    return [*rows, *_memory_rows(name, runs, sheet), plan_row(name, runs)]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is compared with a run: seconds with their band, and the memory of the stages."""

    iteration_s: float
    low_s: float
    high_s: float
    memory: tuple[StageMemory, ...]
    stages: tuple[StageCost, ...]


def forecast_of(run: PublicRun) -> Forecast:
    """Return the forecast of a run; steps of many micro-batches are simulated twice shorter, and continued in line."""
    plan = run.plan
    counts: tuple[int, ...] = (plan.micro_batches,)
    depth = len(plan.pipeline())
    if plan.micro_batches > 8 * depth:
        counts = (4 * depth, 6 * depth)
    made = [predict(plan.model_copy(update={"micro_batches": n}), run.pool, run.profile) for n in counts]
    seconds = made[-1].iteration_s
    if len(made) == 2:
        each_s = (made[1].iteration_s - made[0].iteration_s) / (counts[1] - counts[0])
        seconds += (plan.micro_batches - counts[1]) * each_s
    scale = seconds / made[-1].iteration_s
    return Forecast(
        iteration_s=seconds, low_s=made[-1].low_s * scale, high_s=made[-1].high_s * scale, memory=made[-1].memory,
        stages=made[-1].stages,
    )  # fmt: skip


def _time_rows(label: str, runs: Sequence[PublicRun], sheet: dict[str, Forecast]) -> list[Row]:
    ran = [run for run in runs if run.ran]
    ratios = [sheet[run.name].iteration_s / (run.measured_s or 1) for run in ran]
    held = [sheet[run.name].low_s <= (run.measured_s or 0) <= sheet[run.name].high_s for run in ran]
    mean = 100 * statistics.fmean(abs(ratio - 1) for ratio in ratios)
    rows = [
        Row(what=f"{label}: data sheet and stack alone", ours=mean, unit="% mean error", target="at most 12",
            met=mean <= 12),
        Row(what=f"{label}: the same, mean ratio to the measured", ours=statistics.fmean(ratios), unit="ratio"),
        Row(what=f"{label}: the same, measured within the 90 % band", ours=100 * statistics.fmean(held),
            unit="% of runs", target="85 to 95", met=0.85 <= statistics.fmean(held) <= 0.95),
    ]  # fmt: skip
    seen, unseen = split(runs, SEED)
    if len(unseen) < 3:
        return rows
    error, _ = error_and_band(unseen, calibrated_on(seen))
    told = f"{label}: calibrated on {len(seen)} drawn by seed, compared on {len(unseen)} unseen"
    calibrated = Row(what=told, ours=error, unit="% mean error", target="at most 4", met=error <= 4)
    return [*rows, calibrated, *growth_rows(label, runs)]


def predicted_bytes(run: PublicRun, forecast: Forecast) -> float:
    """Return the predicted memory of the fullest stage, as the set counts it."""
    stages = zip(forecast.memory, forecast.stages, strict=True)
    found = (
        stage_memory_dict(memory, cost.memory_limit_bytes, cost.device_bytes, cost.stack) for memory, cost in stages
    )
    return max(one[run.memory_kind] for one in found)


def _memory_uncertainty(forecast: Forecast) -> float:
    """Return the relative uncertainty of the peak of the fullest stage."""
    pairs = zip(forecast.memory, forecast.stages, strict=True)
    memory, cost = max(pairs, key=lambda pair: pair[0].allocated_bytes)
    return cost.memory_uncertainty(memory)


def fits(forecast: Forecast) -> bool:
    """Return whether every stage fits its chip."""
    pairs = zip(forecast.memory, forecast.stages, strict=True)
    return all(memory.total_bytes <= cost.memory_limit_bytes for memory, cost in pairs)


def _memory_rows(name: str, runs: Sequence[PublicRun], sheet: dict[str, Forecast]) -> list[Row]:
    rows: list[Row] = []
    known = [(run, predicted_bytes(run, sheet[run.name]) / run.memory_bytes) for run in runs if run.memory_bytes]
    if known:
        mean = 100 * statistics.fmean(abs(ratio - 1) for _, ratio in known)
        kinds = ", ".join(sorted({run.memory_kind for run, _ in known}))
        rows.append(
            Row(what=f"{name}: memory ({kinds}), {len(known)} runs, stack alone", ours=mean, unit="% mean error",
                target="at most 3", met=mean <= 3)
        )  # fmt: skip
        rows.append(Row(what=f"{name}: the same, mean ratio", ours=statistics.fmean(r for _, r in known), unit="ratio"))
        spreads = [math.exp(Z_90_PERCENT * _memory_uncertainty(sheet[run.name])) for run, _ in known]
        held = [1 / spread <= ratio <= spread for (_, ratio), spread in zip(known, spreads, strict=True)]
        rows.append(
            Row(what=f"{name}: the same, measured within the 90 % band", ours=100 * statistics.fmean(held),
                unit="% of runs", target="85 to 95", met=0.85 <= statistics.fmean(held) <= 0.95)
        )  # fmt: skip
    refused = [not fits(sheet[run.name]) for run in runs if run.ran]
    share = 100 * statistics.fmean(refused)
    rows.append(
        Row(what=f"{name}: refused for memory of {len(refused)} that ran", ours=share, unit="% of runs",
            target="at most 1", met=share <= 1)
    )  # fmt: skip
    failed = [fits(sheet[run.name]) for run in runs if not run.ran]
    if failed:
        share = 100 * statistics.fmean(failed)
        rows.append(
            Row(what=f"{name}: accepted of {len(failed)} that ran out of memory", ours=share, unit="% of runs",
                target="at most 5", met=share <= 5)
        )  # fmt: skip
    return rows


def run_lines(name: str, folder: Path) -> list[str]:
    """Return a line per run: ratios of time and memory, and whether it fits."""
    lines = []
    for run in READERS[name](folder):
        forecast = forecast_of(run)
        time = f"{forecast.iteration_s / run.measured_s:.3f}" if run.measured_s else "ran out of memory"
        memory = f"{predicted_bytes(run, forecast) / run.memory_bytes:.3f}" if run.memory_bytes else "-"
        lines.append(f"{run.name}: time {time}, memory {memory}, {'fits' if fits(forecast) else 'refused'}")
    return lines
