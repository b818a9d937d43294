"""Steps of the demo's pipeline with keys on its links and without: real workers, emulated links, by turns."""

from __future__ import annotations

import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from benchmarks._real_pipeline import Pipeline, Timed, emulated
from benchmarks.table import Row
from isthmus.cli.demo.demo_folder import demo_folder
from isthmus.core.files.user_files import load_job, load_plan, load_pool
from isthmus.core.messages.worker_folder import WorkerKeys
from isthmus.core.plan import Plan

ENDLESS_STEPS = 1_000_000
"""Steps of the job: it ends with the measurement."""


def measure(quick: bool) -> list[Row]:
    """Return by how much keys lengthen the demo's step, and the processor time that they take."""
    rounds, steps = (3, 3) if quick else (16, 5)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = stack.enter_context(demo_folder(Path(name) / "demo"))
        pool, plan = load_pool(folder / "pool.yaml"), _best_plan(folder)
        assert plan.predicted is not None
        job = load_job(folder / "job.yaml")
        training = job.training.model_copy(update={"steps": ENDLESS_STEPS, "evaluate_every": 0})
        quiet = job.checkpoints.model_copy(update={"every_steps": 0})
        job = job.model_copy(update={"training": training, "checkpoints": quiet})
        (folder / "links").mkdir()
        routes = stack.enter_context(emulated(pool, folder / "links"))
        plain, sealed = (
            stack.enter_context(
                Pipeline(job, plan, folder / side, routes, plan.predicted.stage_times, keys=keys, is_pinned=False)
            )
            for side, keys in (("plain", None), ("sealed", new_keys(plan.clusters)))
        )
        pairs = []
        for turn in range(rounds):  # each side goes first in turn
            first, second = (plain, sealed) if turn % 2 else (sealed, plain)
            one, other = first.timed(steps), second.timed(steps)
            pairs.append((one, other) if turn % 2 else (other, one))
    return rows_of(pairs, steps)


def rows_of(pairs: list[tuple[Timed, Timed]], steps: int) -> list[Row]:
    """Return the rows of pairs (without keys, with keys), each of `steps` steps."""
    ratios = [sealed.step_s / plain.step_s for plain, sealed in pairs]
    quarters = statistics.quantiles(ratios, n=4)
    longer = 100 * (statistics.median(ratios) - 1)
    more_s = statistics.median(sealed.processor_s - plain.processor_s for plain, sealed in pairs)
    plain_s = statistics.median(plain.step_s for plain, _ in pairs)
    busy_s = statistics.median(plain.processor_s for plain, _ in pairs)
    what = f"step of the demo's pipeline ({plain_s:.3f} s) with keys, {len(pairs)} pairs of {steps} steps by turns, "
    what += f"half of the ratios within {quarters[0]:.4f} to {quarters[2]:.4f}"
    return [
        Row(what=f"{what}: longer by", ours=longer, unit="%", target="≤ 1", met=longer <= 1),
        Row(what=f"the same, processor time of all workers in a step (without {busy_s:.3f} s): more by",
            ours=1e3 * more_s, unit="ms"),
    ]  # fmt: skip


def _best_plan(folder: Path) -> Plan:
    """Return the plan that the demo chooses: the planner's fastest."""
    command = ["plan", str(folder / "job.yaml"), "--pool", str(folder / "pool.yaml"), "--runnable"]
    saved = folder / "plans"
    subprocess.run(
        [sys.executable, "-m", "isthmus", *command, "--top", "1", "--save", str(saved)],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return load_plan(next(saved.iterdir()))


def new_keys(clusters: Iterable[str]) -> dict[str, WorkerKeys]:
    """Return the keys of the links of each cluster, one for each pair."""
    sites = sorted(set(clusters))
    pairs = {frozenset((one, other)): secrets.token_hex(32) for one in sites for other in sites}
    return {one: WorkerKeys(keys={other: pairs[frozenset((one, other))] for other in sites}) for one in sites}
