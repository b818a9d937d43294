"""vTrain's published measurements, read from a copy of its repository; none of its data is kept here."""

from __future__ import annotations

import csv
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._models import cluster, even_plan, gpt
from benchmarks.table import Row, compared
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import DATA_SHEET, Calibration, Observation, estimate_s, fit_calibration
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.time.predict import Z_90_PERCENT, relative_uncertainty, simulate_plan
from isthmus.plan.time.time_model_parameters import shape_scope

REPOSITORY = "github.com/VIA-Research/vTrain"
NETWORK_GBPS = 100.0
"""Of each chip: the nodes' 800 Gbit/s (its validation configurations) over eight."""

KEYS = (
    *(
        f"A100/{name}"
        for name in (
            "matmul_share", "attention_share", "memory_share", "launch_s", "skew_s", "link_share",
            "link_latency_s", "network_share", "network_latency_s", "step_s", "bias_factor",
        )
    ),
    "stack_factor",
)  # fmt: skip
SHARE = 0.1
"""Part of the points that a calibration may see."""

SEEDS = (0, 1, 2)

ADDED = (0, 1, 2, 4, 8, 16)
"""Numbers of runs that a calibration sees in the rows of added runs."""

NUM_HELD_OUT = 60
"""Points that those rows compare: none of them is ever fitted."""


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
    return fit_calibration(DATA_SHEET, KEYS, runs, name="vtrain", source=REPOSITORY, shapes=shapes)


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


def within_band(points: Sequence[Point], calibration: Calibration) -> float:
    """Return how many points, in per cent, are within the 90 % band of their predictions."""
    held = 0
    for point in points:
        spread = Z_90_PERCENT * relative_uncertainty(point.plan, point.pool, point.profile, calibration)
        held += abs(math.log(point.model_s(calibration) / point.measured_s)) <= spread
    return 100 * held / len(points)


def added_rows(points: Sequence[Point], label: str, seeds: Sequence[int]) -> list[Row]:
    """Return the error on held-out points as runs are added, and how often the band holds, means over `seeds`."""
    errors: dict[int, list[float]] = {count: [] for count in ADDED}
    bands: dict[int, list[float]] = {count: [] for count in ADDED}
    for seed in seeds:
        order = random.Random(f"added {seed}").sample(list(points), min(len(points), ADDED[-1] + NUM_HELD_OUT))
        held = order[ADDED[-1] :]
        for count in ADDED:
            made = calibrated(order[:count], shapes=True) if count else DATA_SHEET
            errors[count].append(mean_error(held, made))
            bands[count].append(within_band(held, made))
    return growth_rows(f"{label}: {NUM_HELD_OUT} held out, {len(seeds)} orders", errors, bands)


def growth_rows(label: str, errors: Mapping[int, Sequence[float]], bands: Mapping[int, Sequence[float]]) -> list[Row]:
    """Return a row for each number of runs added, one of the largest rise, and one of the bands."""
    means = {count: statistics.fmean(some) for count, some in errors.items()}
    seen = [count for count in means if count]
    rise = max(means[b] - means[a] for a, b in itertools.pairwise(means))
    held = statistics.fmean(share for count in seen for share in bands[count])
    return [
        *(Row(what=f"{label}: error after {count} runs", ours=mean, unit="% mean error")
          for count, mean in means.items()),
        Row(what=f"{label}: largest rise as runs are doubled", ours=rise, unit="points", target="at most 1",
            met=rise <= 1),
        Row(what=f"{label}: 90 % band of the data sheet holds", ours=statistics.fmean(bands[0]), unit="% of points"),
        Row(what=f"{label}: 90 % band after 1 to {seen[-1]} runs holds", ours=held, unit="% of points",
            target="85 to 95", met=85 <= held <= 95),
    ]  # fmt: skip


def rows(folder: Path | None, *, quick: bool) -> list[Row]:
    """Return the rows of both tables, or one that says why there are none."""
    if folder is None or not (folder / "data").is_dir():
        why = f"vTrain: skipped, its data is not here; clone {REPOSITORY}, name it with --vtrain"
        return [Row(what=why, ours=0, unit="points", target="see the rows of a full run")]
    seeds = SEEDS[:1] if quick else SEEDS
    found: list[Row] = []
    for kind, target, peer in (("multi", 8.0, 15.0), ("single", 5.0, 39.0)):
        points = read_points(folder, kind)
        found += _rows_of(points, kind, target, peer, seeds)
        found += added_rows(points, f"vTrain {kind}-node", seeds)
    return found


def _rows_of(points: list[Point], kind: str, target: float, peer: float, seeds: Sequence[int]) -> list[Row]:
    shaped, physical, best, best_plain, simulated = [], [], [], [], []
    for seed in seeds:
        seen, unseen = split(points, seed)
        plain = calibrated(seen, shapes=False)
        full = calibrated(seen, shapes=True)
        physical.append(mean_error(unseen, plain))
        shaped.append(mean_error(unseen, full))
        best.append(regret(points, full))
        best_plain.append(regret(points, plain))
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
        Row(what=f"{label}: the same, physical parameters alone, no shapes", ours=mean(best_plain),
            unit="% mean loss", target="at most 1", met=mean(best_plain) <= 1),
    ]  # fmt: skip
