"""The runs of `benchmarks/data/published_runs.yaml`, each with its source, beside what we predict."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from benchmarks._models import cluster, even_plan, gpt, llama
from benchmarks._vtrain import growth_rows
from benchmarks.table import Row
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import DATA_SHEET, Calibration, Observation, estimate_s, fit_calibration, profile_model
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.time.predict import Z_90_PERCENT, relative_uncertainty, simulate_plan

DATA = Path(__file__).parent / "data" / "published_runs.yaml"
CONFIGS = Path(__file__).parent.parent / "tests" / "plan" / "configs"
FITTED = ("matmul_share", "attention_share", "memory_share", "link_share", "network_share", "bias_factor")
ADDED = (0, 1, 2, 4, 8)
MIN_RUNS = 12
"""Groups with fewer runs are too small to add runs and compare the rest."""

ORDERS = 3
"""Number of seeded orders in which runs are added."""

_PLAN_FIELDS = (
    "precision", "zero", "overlap_gradients", "chunks", "recompute", "sp", "ep", "schedule", "experts", "formats",
)  # fmt: skip


class Run:
    """One published run: its plan, its pool, and what was measured."""

    def __init__(self, document: Mapping[str, Any], group: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        told = {**group, **row}
        self.name = str(told.get("name") if "name" in row else row["model"])
        self.chip, self.chips = str(group["chip"]), int(row["chips"])
        self.source = str(document["sources"][told["source"]])
        self.profile = _model(document["models"][row["model"]], told.get("kernel", "fused"))
        self.sequence = int(told.get("sequence", 2048))
        self.batch = int(row["batch"])
        tp, pp, cp = (int(row.get(name, 1)) for name in ("tp", "pp", "cp"))
        dp = self.chips // (tp * pp * cp)
        fields = {name: told[name] for name in _PLAN_FIELDS if name in told}
        fields.setdefault("schedule", "interleaved" if "chunks" in row else "1f1b")
        self.plan: Plan = even_plan(
            self.profile.num_layers, tp=tp, pp=pp, cp=cp, dp=dp, sequence_length=self.sequence,
            micro_batches=self.batch // (int(row["micro"]) * dp), micro_batch_size=int(row["micro"]),
            **fields,
        )  # fmt: skip
        self.pool: Pool = cluster(self.chip, self.chips, float(group["gbps"]))
        self.measured_s = self._measured(told)

    def _measured(self, told: Mapping[str, Any]) -> float:
        tokens = self.batch * self.sequence
        if "iteration_s" in told:
            return float(told["iteration_s"])
        if "tokens_per_chip_s" in told:
            return tokens / self.chips / float(told["tokens_per_chip_s"])
        flops = (
            _megatron(self) if told["counted"] == "megatron" else 3 * self.profile.forward_flops(self.sequence, tokens)
        )
        return flops / self.chips / (float(told["tflops"]) * 1e12)

    def model_s(self, calibration: Calibration) -> float:
        """Return the simulated iteration."""
        return simulate_plan(self.plan, self.pool, self.profile, calibration)[0].iteration_s

    def closed_form_s(self, calibration: Calibration) -> float:
        """Return the closed form's answer, scaled to what the simulator adds to it on the data sheet."""
        return self._added_ratio * estimate_s(self.plan, self.pool, self.profile, calibration)

    @cached_property
    def _added_ratio(self) -> float:
        return self.model_s(DATA_SHEET) / estimate_s(self.plan, self.pool, self.profile, DATA_SHEET)

    def uncertainty(self, calibration: Calibration) -> float:
        """Return the relative uncertainty of the prediction."""
        return relative_uncertainty(self.plan, self.pool, self.profile, calibration)


def _megatron(run: Run) -> float:
    h, s, layers = run.profile.hidden_size, run.sequence, run.profile.num_layers
    terms = 1 + s / (6 * h) + run.profile.vocab_size / (16 * layers * h)
    return 96 * run.batch * s * layers * h**2 * terms


def _model(told: Mapping[str, Any], kernel: Any) -> ModelProfile:
    if "config" in told:
        return profile_model(load_model(CONFIGS / f"{told['config']}.json"))
    return llama(**told) if "ffn" in told else gpt(**told, kernel=kernel)


def rows() -> list[Row]:
    """Return a row per run, calibrated on one run of each group, and their mean error."""
    document = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    found, errors, sheet_errors, count = [], [], [], 0
    for group in document["groups"]:
        runs = [Run(document, group, row) for row in group["rows"]]
        chosen = [run for run in runs if run.name == group.get("fit")]
        calibration = _fit(group, chosen) if chosen else DATA_SHEET
        for run in runs:
            count += 1
            sheet_errors.append(abs(run.model_s(DATA_SHEET) / run.measured_s - 1))
            if run.name in calibration.fitted_on:
                found.append(Row(what=f"{group['name']}: {run.name} (calibrated on it)", unit="s",
                                 ours=run.model_s(calibration), peer=run.source,
                                 peer_value=run.measured_s))  # fmt: skip
                continue
            ours = run.model_s(calibration)
            errors.append(abs(ours / run.measured_s - 1))
            found.append(Row(what=f"{group['name']}: {run.name}", ours=ours, unit="s", peer=run.source,
                             peer_value=run.measured_s, ratio=ours / run.measured_s))  # fmt: skip
    mean, sheet = 100 * statistics.fmean(errors), 100 * statistics.fmean(sheet_errors)
    return [
        *found,
        *_added_rows(document),
        Row(what=f"published rows: {len(errors)} predicted, {count - len(errors)} seen", ours=mean,
            unit="% mean error", target="at most 8", met=mean <= 8),
        Row(what=f"published rows: all {count}, data sheet only", ours=sheet, unit="% mean error",
            target="at most 20", met=sheet <= 20),
    ]  # fmt: skip


def _added_rows(document: Mapping[str, Any]) -> list[Row]:
    """Return, for large groups, the error on the runs that no fit sees as runs are added in seeded orders."""
    found: list[Row] = []
    for group in document["groups"]:
        runs = [Run(document, group, row) for row in group["rows"]]
        if len(runs) < MIN_RUNS:
            continue
        errors: dict[int, list[float]] = {count: [] for count in ADDED}
        bands: dict[int, list[float]] = {count: [] for count in ADDED}
        for seed in range(ORDERS):
            order = random.Random(f"rows {seed}").sample(runs, len(runs))
            for count in ADDED:
                made = _fit(group, order[:count]) if count else DATA_SHEET
                held = order[ADDED[-1] :]
                logs = [math.log(run.closed_form_s(made) / run.measured_s) for run in held]
                spread = [Z_90_PERCENT * run.uncertainty(made) for run in held]
                errors[count].append(100 * statistics.fmean(abs(math.expm1(x)) for x in logs))
                bands[count].append(
                    100 * statistics.fmean(abs(x) <= most for x, most in zip(logs, spread, strict=True))
                )
        label = f"papers, {group['name']}: {len(runs) - ADDED[-1]} held out, {ORDERS} orders"
        found += growth_rows(label, errors, bands)
    return found


def _fit(group: Mapping[str, Any], runs: list[Run]) -> Calibration:
    """Return the calibration of a group's chip on `runs`, in closed form."""
    keys = [*(f"{group['chip']}/{name}" for name in FITTED), "stack_factor"]
    seen = [Observation(name=run.name, measured_s=run.measured_s, predict_s=run.closed_form_s) for run in runs]
    return fit_calibration(DATA_SHEET, keys, seen, name=str(group["name"]), source=runs[0].source)
