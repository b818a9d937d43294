"""`MeasuredSteps` and `efficiency_text`: what the wide-area links cost the demo, and whether the machine kept up.

Virtual chips pad real computation to their time. Where real computation takes longer, the machine overran: the step
measures the machine, and a ratio of two such steps may exceed 100 %.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from isthmus.cli.job_statistics import JobStatistics
from isthmus.core.units import format_seconds

WARM_UP_STEPS = 4
"""First steps that are not counted (allocations, connection setup)."""
MAX_OVERRUN_FRACTION = 0.05
"""A step is disturbed if real computation overran the virtual time by more than this fraction of the step."""
MIN_UNDISTURBED_STEPS = 5
"""With fewer undisturbed steps than this, all steps are counted."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """The steps of one run after its first ones."""

    # Median of the undisturbed steps; of all steps where too few are undisturbed.
    step_s: float
    num_steps: int
    num_disturbed: int
    # Mean time per step by which real computation overran the virtual chips' time.
    overrun_s: float

    @property
    def is_disturbed(self) -> bool:
        """Whether `step_s` contains disturbed steps."""
        return self.num_disturbed > 0 and self.num_steps - self.num_disturbed < MIN_UNDISTURBED_STEPS


def measure_steps(stats: JobStatistics) -> MeasuredSteps:
    """Return the measured steps of a finished run with at least one step."""
    times = dict(stats.series("step_s"))
    steps = {step: s for step, s in times.items() if step >= WARM_UP_STEPS} or times
    overruns = dict(stats.series("overrun_s"))
    undisturbed = [s for step, s in steps.items() if overruns.get(step, 0.0) <= MAX_OVERRUN_FRACTION * s]
    counted = undisturbed if len(undisturbed) >= MIN_UNDISTURBED_STEPS else list(steps.values())
    return MeasuredSteps(
        step_s=statistics.median(counted),
        num_steps=len(steps),
        num_disturbed=len(steps) - len(undisturbed),
        overrun_s=statistics.fmean(overruns.get(step, 0.0) for step in steps),
    )


def overran(linked: MeasuredSteps, near: MeasuredSteps) -> bool:
    """Return whether the machine overran so that the efficiency of a run with links over one without says little."""
    return linked.is_disturbed or near.is_disturbed or near.step_s > linked.step_s


def efficiency_text(linked: MeasuredSteps, near: MeasuredSteps) -> str:
    """Return the efficiency of a run with links beside one without, or why this machine cannot tell it."""
    share = near.step_s / linked.step_s
    if not overran(linked, near):
        return f"{share:.1%} of the same plan without wide-area links"
    if linked.num_disturbed == near.num_disturbed == 0:
        return f"{share:.1%}: the links cost less than two runs differ on this machine"
    return (
        f"not measured ({share:.1%}): this machine overran. Real computation took longer than the virtual chips' "
        f"time in {_disturbed_text(linked)} with links and {_disturbed_text(near)} without. "
        "Stop other programs and run the demo again"
    )


def _disturbed_text(run: MeasuredSteps) -> str:
    return f"{run.num_disturbed} of {run.num_steps} steps ({format_seconds(run.overrun_s)} per step)"
