"""`deadline_of`: the last step that may train on a group.

A group may be trained on until `max_staleness` steps after the oldest version of its tokens. The ledger starts no
sample, and claims no batch, after which not all groups could be trained in time (`meet_deadlines`), so no finished
group ever becomes stale.
"""

from __future__ import annotations

import math

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
