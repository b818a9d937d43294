"""Rules of the report's tasks on virtual chips: ratios are kept, and withheld figures stay empty."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks import whitepaper
from benchmarks._tasks import TASK_1, TASK_3, Task, calibrate, pool
from benchmarks._tasks_scaled import SCALES, scaled
from benchmarks._tasks_tables import Result, page, rows
from benchmarks._virtual_run import Rehearsed, rehearse
from benchmarks.whitepaper import by_delay, run_tasks, tasks
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.plan import Calibration, predict
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.stage_costs import stage_costs

pytestmark = pytest.mark.integration


@cache
def calibration() -> Calibration:
    """Return what the report's tasks 1 and 3 say, once for all tests."""
    return calibrate()


EIGHT = next(task for task in whitepaper.OTHERS if task.name == "task 8")
TWELVE = next(task for task in whitepaper.OTHERS if task.name == "task 12")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("task", [TASK_3, EIGHT, TWELVE], ids=lambda task: task.name)
def test_a_scaled_task_keeps_every_ratio_of_times(task: Task, scale: int) -> None:
    """Chips, delay and the time of a message are all 1/S; a message is 1/S² of its bytes."""
    small = scaled(task, calibration(), 10.0, scale)
    loads = [
        cost.load for r in range(task.dp) for cost in stage_costs(task.plan, pool(), task.profile, calibration(), r)
    ]
    assert len(small.plan.ranks) == len(small.times) == len(loads)
    for time, load in zip(small.times, loads, strict=True):
        assert time.forward_s * scale == pytest.approx(load.forward_s)
        assert time.backward_s * scale == pytest.approx(load.backward_s)
        assert time.update_s * scale >= load.update_s
    wire = simulated_links(task.plan, pool(), calibration())["cluster1", "cluster3"]
    link = small.pool.link("cluster1", "cluster3")
    assert link is not None
    message = small.plan.micro_batch_size * small.plan.sequence_length * 4096 * 2
    assert message * scale**2 == loads[0].boundary_bytes
    assert link.delay_s * scale == pytest.approx(wire.delay_s)
    small_s, whole_s = message / effective_bytes_per_s(link), loads[0].boundary_bytes / wire.bytes_per_s
    assert small_s * scale == pytest.approx(whole_s)


def test_gradients_reduced_in_a_cluster_are_part_of_the_update() -> None:
    """The two replicas of task 12 share their clusters: what their reduction takes is waited for."""
    alone = scaled(EIGHT, calibration(), 10.0, 16).times[0].update_s
    both = scaled(TWELVE, calibration(), 10.0, 16).times[0].update_s
    assert both > 1.3 * alone


def of_task(task: Task, seconds: float, delay_ms: float = 10.0) -> Result:
    run = Rehearsed((seconds,), 1, 1, 0.0)
    forecast = predict(task.plan, pool(), task.profile, calibration())
    return Result(task=task, delay_ms=delay_ms, forecast=forecast, iteration_s=seconds, rehearsed=run)


def test_the_tables_put_published_figures_beside_ours() -> None:
    """Efficiency is the share of TGS, at equal times the published 94.26 %; what was withheld is empty."""
    results = [of_task(TASK_1, 60.7), of_task(EIGHT, 64.4), of_task(TWELVE, 41.0)]
    found = {row.what: row for row in rows(results, [])}
    share = found["task 8: share of task 1's TGS"]
    assert (share.peer, share.peer_value) == ("report", pytest.approx(94.26, abs=0.01))
    assert share.ours == pytest.approx(94.26, abs=0.1)
    assert found["task 8: iteration"].ratio == 1.0
    assert found["task 12: TGS"].peer == "simulator"
    assert "task 12: iteration" not in found
    text = page(results, results[:2])
    assert "| task 12 |  |" in text
    assert "94.26" in text


def test_task_7_is_task_3_once_more() -> None:
    """Eleven tasks run (task 2 never starts; task 10 counts twice), task 7 with the figures of task 3."""
    ran = []

    class Counting:
        def run(self, task: Task, delay_ms: float = 10.0) -> Result:
            ran.append((task.name, delay_ms))
            return of_task(task, 60.0, delay_ms)

    results = run_tasks(Counting(), tasks(calibration(), quick=False))  # type: ignore[arg-type]
    names = [one.task.name for one in results]
    assert names == [f"task {n}" for n in ("1", "3", "4", "5", "6", "7", "8", "9", "10", "10b", "11", "12")]
    assert "task 7" not in dict(ran)
    ran.clear()
    assert [one.delay_ms for one in by_delay(Counting(), results)] == [10.0, 10.0, 25.0, 25.0, 50.0, 50.0]  # type: ignore[arg-type]
    assert len(ran) == 4


@pytest.mark.slow
def test_a_task_runs_by_real_workers(tmp_path: Path) -> None:
    """Task 1 with three micro-batches takes at least its stages' time, in six processes."""
    small = scaled(TASK_1, calibration(), 10.0, 32)
    plan = small.plan.model_copy(update={"micro_batches": 3})
    run = rehearse(plan, small.times, whitepaper.model_file(tmp_path, 70), tmp_path, {}, 1)
    slowest = max(small.times, key=lambda time: time.forward_s)
    assert run.step_s >= 3 * (slowest.forward_s + slowest.backward_s) + slowest.update_s
    assert run.num_steps == 1
