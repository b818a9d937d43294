"""Seeded faults on a real Slurm: what was lost, doubled or half started, and the longest hold."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks.table import Row
from tests.slurm.faulty_run import FaultyRun
from tests.slurm.slurm_cluster import slurm_clusters

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS = 1000, 10, 24


def rows(amount: Amount) -> list[Row]:
    """Make runs by seeds until there were enough faults, or the time is over."""
    wanted, seed, num_faults, longest_s = NUM_QUICK_FAULTS if amount.quick else NUM_FAULTS, 0, 0, 0.0
    problems = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, slurm_clusters(Path(folder), 2, 4, "east") as slurms:
        while num_faults < wanted and not amount.is_over:
            place = Path(folder) / f"run-{seed}"
            place.mkdir()
            run = FaultyRun(slurms["east"], place, seed)
            run.run(STEPS)
            problems += run.problems
            num_faults, longest_s, seed = num_faults + run.num_faults, max(longest_s, run.longest_hold_s), seed + 1
            text = f"seed {seed - 1}: {num_faults} faults, {dict(+run.problems)}, {run.longest_hold_s:.1f} s"
            print(text, file=sys.stderr, flush=True)
    what = f"{num_faults:,} seeded faults on a real Slurm, {seed} runs"
    return [
        Row(what=f"{what}: holds and workers lost, doubled, half started or left", ours=problems.total(),
            unit="cases", target="0", met=not problems.total()),
        Row(what=f"{what}: longest hold after it was given up", ours=longest_s, unit="s", target="at most 60",
            met=longest_s <= 60),
    ]  # fmt: skip
