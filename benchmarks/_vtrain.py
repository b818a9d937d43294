"""vTrain's published measurements, read from a copy of its repository; none of its data is kept here."""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._models import cluster, even_plan, gpt
from benchmarks.table import Row, compared
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import DATA_SHEET, Calibration, Observation, estimate_s, fit_calibration, fit_shapes
from isthmus.plan.profile.model_profile import ModelProfile
from isthmus.plan.time.predict import simulate_plan
from isthmus.plan.time.time_model_parameters import shape_scope

REPOSITORY = "github.com/VIA-Research/vTrain"
NETWORK_GBPS = 100.0
"""Of each chip: the nodes' 800 Gbit/s (its validation configurations) over eight."""

KEYS = tuple(
    f"A100/{name}"
    for name in (
        "matmul_share", "attention_share", "memory_share", "launch_s", "skew_s", "link_share",
        "link_latency_s", "network_share", "network_latency_s", "step_s",
    )
)  # fmt: skip
SHARE = 0.1
"""Part of the points that a calibration may see."""

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Point:
    """One measured iteration on A100s: fp16, full recomputation, 1F1B."""

    name: str
    group: tuple[int, ...]
    measured_s: float
    plan: Plan
    pool: Pool
    profile: ModelProfile
    shape: str

    def model_s(self, calibration: Calibration) -> float:
        """Return the closed form's answer."""
        return estimate_s(self.plan, self.pool, self.profile, calibration)

    def observation(self) -> Observation:
        """Return the point as the fit takes it."""
        return Observation(name=self.name, measured_s=self.measured_s, predict_s=self.model_s, shape_scope=self.shape)


def read_points(folder: Path, kind: str) -> list[Point]:
    """Return the points of `multi` or `single` nodes; raise `FileNotFoundError` where they are not there."""
    file = folder / "data" / f"ground_truth_{kind}.csv"
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    return [_point(f"vtrain-{kind}-{i}", row[1:] if kind == "multi" else row) for i, row in enumerate(rows)]


def _point(name: str, row: Sequence[str]) -> Point:
    chips, batch, micro, hidden, heads, layers, sequence, tp, dp, pp = (int(x) for x in row[:10])
    plan = even_plan(
        layers, tp=tp, pp=pp, dp=dp, recompute="full", precision="fp16", sequence_length=sequence,
        micro_batches=batch // (micro * dp), micro_batch_size=micro,
    )  # fmt: skip
    return Point(
        name=name,
        group=(hidden, layers, chips, batch),
        measured_s=float(row[10]) / 1e3,
        plan=plan,
        pool=cluster("A100", chips, NETWORK_GBPS),
        profile=gpt(hidden, heads, layers),
        shape=shape_scope("A100", hidden, micro * sequence, tp),
    )


def split(points: Sequence[Point], seed: int) -> tuple[list[Point], list[Point]]:
    """Return (for calibration, for validation), drawn by `seed`."""
    chosen = set(random.Random(seed).sample(range(len(points)), int(SHARE * len(points))))
    return [p for i, p in enumerate(points) if i in chosen], [p for i, p in enumerate(points) if i not in chosen]


def calibrated(points: Sequence[Point], *, shapes: bool) -> Calibration:
    """Return the calibration on `points`, with or without a factor for each shape they hold."""
    runs = [point.observation() for point in points]
    made = fit_calibration(DATA_SHEET, KEYS, runs, name="vtrain", source=REPOSITORY)
    return fit_shapes(made, runs) if shapes else made


def mean_error(points: Sequence[Point], calibration: Calibration) -> float:
    """Return the mean relative error, in per cent; refuse points that were fitted on."""
    for point in points:
        calibration.require_unseen(point.name)
    return 100 * statistics.fmean(abs(p.model_s(calibration) / p.measured_s - 1) for p in points)


def simulated_error(points: Sequence[Point], calibration: Calibration) -> float:
    """Return the mean relative error of the simulator itself, in per cent."""
    errors = [
        abs(simulate_plan(p.plan, p.pool, p.profile, calibration)[0].iteration_s / p.measured_s - 1) for p in points
    ]
    return 100 * statistics.fmean(errors)


def regret(points: Sequence[Point], calibration: Calibration) -> float:
    """Return what the plan predicted best loses to the one measured best, mean over models and batches, in
    per cent.
    """
    groups: dict[tuple[int, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    losses = []
    for group in groups.values():
        chosen = min(group, key=lambda p: p.model_s(calibration))
        losses.append(chosen.measured_s / min(p.measured_s for p in group) - 1)
    return 100 * statistics.fmean(losses)


def rows(folder: Path | None, *, quick: bool) -> list[Row]:
    """Return the rows of both tables, or one that says why there are none."""
    if folder is None or not (folder / "data").is_dir():
        why = f"vTrain: skipped, its data is not here; clone {REPOSITORY}, name it with --vtrain"
        return [Row(what=why, ours=0, unit="points", target="see the rows of a full run")]
    seeds = SEEDS[:1] if quick else SEEDS
    found: list[Row] = []
    for kind, target, peer in (("multi", 8.0, 15.0), ("single", 5.0, 39.0)):
        found += _rows_of(read_points(folder, kind), kind, target, peer, seeds)
    return found


def _rows_of(points: list[Point], kind: str, target: float, peer: float, seeds: Sequence[int]) -> list[Row]:
    shaped, physical, best, simulated = [], [], [], []
    for seed in seeds:
        seen, unseen = split(points, seed)
        plain = calibrated(seen, shapes=False)
        full = fit_shapes(plain, [p.observation() for p in seen])
        physical.append(mean_error(unseen, plain))
        shaped.append(mean_error(unseen, full))
        best.append(regret(points, full))
        if seed == seeds[0]:
            simulated.append(simulated_error(unseen[:: 1 if kind == "multi" else 10], full))
    label = f"vTrain {kind}-node, {len(points)} points"
    mean = statistics.fmean
    sheet = mean_error(points, DATA_SHEET)
    told = f"mean of {len(seeds)} seeded splits, {int(SHARE * len(points))} points seen"
    peer_name = "Calculon (facts of peers)"
    return [
        compared(f"{label}: calibrated, {told}", mean(shaped), "% mean error", peer_name, peer,
                 target=f"at most {target:g}", met=mean(shaped) <= target),
        Row(what=f"{label}: the same, worst split", ours=max(shaped), unit="% mean error"),
        Row(what=f"{label}: the same, physical parameters alone, no shapes", ours=mean(physical),
            unit="% mean error"),
        Row(what=f"{label}: the same, simulated instead of in closed form, first split", ours=simulated[0],
            unit="% mean error", target=f"at most {target:g}", met=simulated[0] <= target),
        Row(what=f"{label}: data sheet only", ours=sheet, unit="% mean error", target="at most 20",
            met=sheet <= 20),
        Row(what=f"{label}: regret of the plan predicted best", ours=mean(best), unit="% mean loss",
            target="at most 1", met=mean(best) <= 1),
    ]  # fmt: skip
