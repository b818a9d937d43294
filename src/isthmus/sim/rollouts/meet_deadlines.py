"""`meet_deadlines`: whether groups of samples can all be trained before they are too stale.

With `batch_prompts` groups a step, groups can all be trained in time exactly if, for every step d, at most
`batch_prompts * (d - next + 1)` of them have a deadline up to d: earliest deadline first is optimal for jobs of one
length (Jackson, 1955). The ledger of real runs and the simulator follow this one rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping


def meet_deadlines(deadlines: Iterable[float], next_step: int, batch_prompts: int) -> bool:
    """Return whether groups with these deadlines can all be trained in time, from step `next_step` on."""
    return meet_counted_deadlines(Counter(deadlines), next_step, batch_prompts)


def meet_counted_deadlines(counts: Mapping[float, int], next_step: int, batch_prompts: int) -> bool:
    """Return the same for the number of groups by deadline; infinite ones do not count."""
    total = 0
    for deadline in sorted(counts):
        if deadline == math.inf:
            break
        total += counts[deadline]
        if counts[deadline] and total > batch_prompts * (deadline - next_step + 1):
            return False
    return True
