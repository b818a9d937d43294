"""Rules of the demo's efficiency: a machine that overran is named; no ratio above 100 % stands without a word."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from isthmus.cli.demo.efficiency import WARM_UP_STEPS, efficiency_text, measure_steps, overran
from isthmus.cli.job_statistics import JobStatistics
from isthmus.core.messages.agent_messages import StepMetrics


def run_of(step_s: float, overruns_s: Sequence[float]) -> JobStatistics:
    """Return a run whose steps after the warm-up overran by `overruns_s`; the first steps are slow."""
    steps = [(9.0, 0.0)] * WARM_UP_STEPS + [(step_s + over_s, over_s) for over_s in overruns_s]
    return JobStatistics(
        StepMetrics(job="j", attempt=1, rank=0, step=step, values={"step_s": total_s, "overrun_s": over_s})
        for step, (total_s, over_s) in enumerate(steps)
    )


def test_undisturbed_runs_give_an_efficiency() -> None:
    """Single disturbed steps are left out of both medians."""
    linked, near = measure_steps(run_of(1.0, [0.0] * 9 + [3.0])), measure_steps(run_of(0.9, [0.0] * 9 + [0.5]))
    assert (linked.step_s, near.step_s) == (1.0, 0.9)
    assert not overran(linked, near)
    assert efficiency_text(linked, near) == "90.0% of the same plan without wide-area links"


def test_a_ratio_above_one_names_the_machine() -> None:
    """Without links a step cannot take longer: the text says that the machine overran, how much, what to do."""
    linked, near = measure_steps(run_of(1.0, [0.0] * 10)), measure_steps(run_of(0.9, [0.14] * 8))
    assert overran(linked, near)
    text = efficiency_text(linked, near)
    assert text.startswith("not measured (104.0%): this machine overran.")
    assert "0 of 10 steps (0.0 ms per step) with links and 8 of 8 steps (140.0 ms per step) without" in text
    assert text.endswith("Stop other programs and run the demo again")


def test_a_ratio_above_one_without_overrun_is_noise() -> None:
    """Nothing overran: the text says that the difference is within what runs differ by."""
    linked, near = measure_steps(run_of(1.0, [0.0] * 10)), measure_steps(run_of(1.01, [0.0] * 8))
    assert efficiency_text(linked, near) == "101.0%: the links cost less than two runs differ on this machine"


@pytest.mark.parametrize("disturbed_first", [True, False])
def test_a_run_without_calm_steps_names_the_machine_below_one_too(disturbed_first: bool) -> None:
    """Either run may be the disturbed one, and the ratio may still look plausible."""
    calm, busy = run_of(0.9, [0.0] * 8), run_of(1.0, [0.2] * 8)
    linked, near = (busy, calm) if disturbed_first else (calm, busy)
    assert overran(measure_steps(linked), measure_steps(near))
