"""Joint jobs on a real pool, one after another: from submission to all ranks up, beyond a bare `srun`; their skew."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Row, compared
from tests.control.processes import until
from tests.slurm.joint_pool import JointPool
from tests.slurm.slurm_cluster import SlurmCluster

STEPS = 1_000_000
LIMIT_S = 300.0
"""For all ranks to be up, and for all cards to be free again; the first job of a Ray also starts the agent's holder."""


def start_rows(
    where: str, pool: JointPool, num: int, *, p50_s: float, p99_s: float = 0.0, skew_s: float = 0.0
) -> list[Row]:
    """Submit a job over all cards of `pool` `num` times, each after a bare `srun` at every Slurm; return the rows.

    `p50_s`, `p99_s` and `skew_s` (of the p99) are the targets in seconds, 0 for none.
    """
    cards = {site.name: sum(group.num_chips for group in site.node_groups) for site in pool.pool.clusters}
    ranks, mark = sum(cards.values()), pool.folder / "bare"
    beyond_s, skews_s, bare_s = [], [], []
    _wait_free(pool, cards)
    for number in range(num + 1):
        bare = max(_bare_s(slurm, mark) for slurm in pool.slurms.values())
        _wait_free(pool, cards)
        joint = pool.joint_job(f"job-{number}", steps=STEPS)
        begun_s = time.time()
        job = pool.submit_joint(joint)
        until(lambda: len(pool.ups(job)) == ranks, "all ranks are up", LIMIT_S)  # noqa: B023 - called at once
        ups = pool.ups(job)
        pool.call("POST", f"/v1/jobs/{job}/cancel")
        _wait_free(pool, cards)
        if number:  # the first one also loads the planner
            bare_s.append(bare)
            beyond_s.append(ups[-1] - begun_s - bare)
            skews_s.append(ups[-1] - ups[0])
    what = f"one job over {where}, {ranks} ranks, {num} times: submission to all ranks up, beyond a bare srun"
    skew, p50, p99 = f"one job over {where}: skew of its ranks", _share(beyond_s, 0.5), _share(beyond_s, 0.99)
    return [
        compared(f"{what}, p50", p50, "s", "bare srun on the slower cluster", statistics.median(bare_s),
                 **_judged(p50, p50_s)),
        Row(what=f"{what}, p99", ours=p99, unit="s", **_judged(p99, p99_s)),
        Row(what=f"{skew}, p50", ours=1e3 * _share(skews_s, 0.5), unit="ms"),
        Row(what=f"{skew}, p99", ours=1e3 * _share(skews_s, 0.99), unit="ms",
            **_judged(1e3 * _share(skews_s, 0.99), 1e3 * skew_s)),
    ]  # fmt: skip


def end_pool(pool: JointPool) -> None:
    """End the agents, which give everything back, then the server."""
    for name in pool.sites:
        pool.end(name)
    pool.close()


def _bare_s(slurm: SlurmCluster, file: Path) -> float:
    """Return the seconds from the start of `srun` to the first line of its program."""
    file.unlink(missing_ok=True)
    begun_s = time.time()
    slurm.run("srun", "--ntasks=1", "--gpus-per-task=1", "--chdir=/", "sh", "-c", f"date +%s.%N >{file}")
    return float(file.read_text()) - begun_s


def _wait_free(pool: JointPool, cards: dict[str, int]) -> None:
    """Wait until every Slurm is empty and the server knows that all cards are free."""
    for slurm in pool.slurms.values():
        slurm.wait_empty()
    until(lambda: pool.free() == cards, "all cards are free", LIMIT_S)


def _share(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _judged(value: float, most: float) -> dict[str, Any]:
    """Return target and verdict of a row; nothing without a target."""
    return {"target": f"at most {most:g}", "met": value <= most} if most else {}
