"""`deadline_of` and `meet_deadlines`: the last step that may train on a group, and whether all groups can meet theirs.

A group may be trained on until `max_staleness` steps after the oldest version of its tokens. With `batch_prompts`
groups a step, groups can all be trained in time exactly if, for every step d, at most `batch_prompts * (d - next + 1)`
of them have a deadline up to d: earliest deadline first is optimal for jobs of one length (Jackson, 1955). The ledger
starts no sample, and claims no batch, after which that would not hold, so no finished group ever becomes stale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from isthmus.rl.ledger.ledger_records import LedgerConfig, PromptRecord


def deadline_of(prompt: PromptRecord, config: LedgerConfig) -> float:
    """Return the last step that may train on the group; infinite while none of its samples has begun."""
    oldest = math.inf
    for (
        one
    ) in prompt.samples:  # for all open groups after each event: `oldest_version` in line takes a fifth of the time
        version = one.ranges[0].version if one.ranges else one.begun_version
        if version is not None and version < oldest:
            oldest = version
    return oldest + config.max_staleness


def meet_deadlines(deadlines: Iterable[float], next_step: int, batch_prompts: int) -> bool:
    """Return whether groups with these deadlines can all be trained in time, from step `next_step` on."""
    finite = sorted(one for one in deadlines if one != math.inf)
    return all(place < batch_prompts * (one - next_step + 1) for place, one in enumerate(finite))
