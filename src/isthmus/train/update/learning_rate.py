"""`learning_rate`: linear warm-up, then cosine decay."""

from __future__ import annotations

import math

from isthmus.core.job import TrainingConfig


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Return the rate of `step` (from 0): linear warm-up, then cosine decay to `min_learning_rate`."""
    peak, floor, warm_up = training.learning_rate, training.min_learning_rate, training.warmup_steps
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = min((step - warm_up) / max(training.steps - warm_up, 1), 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
