"""`Delays`: how long everything takes in a simulated pool, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Seconds that things take; the defaults are those of an agent and of a server some 40 ms apart.

    A message travels for `network_s` each way. An agent looks again `quick_s` after something changed and
    hears of new orders with its next report, `poll_s` after they were made; one whose exchange failed tries
    again after `retry_s`. The planner answers after `planning_s`. Workers check in `check_in_s` after their
    start, end `stop_s` after they were asked to, and lose a dead peer after `peer_s`. A checkpoint is written
    every `checkpoint_every_s`; to write one and to read it back takes `checkpoint_s`, to go on from one
    `restore_s`. The server looks for what is due every `tick_s`. Sites
    share one storage unless `fetch_s` says how long a job's files take to a site that does not have them.

    Reports without news change nothing and are left out, unless `beat_s` says how often they are sent.
    """

    network_s: float = 0.02
    quick_s: float = 0.05
    poll_s: float = 0.2
    retry_s: float = 1.0
    planning_s: float = 0.01
    check_in_s: float = 2.0
    stop_s: float = 1.0
    peer_s: float = 10.0
    checkpoint_every_s: float = 1800.0
    checkpoint_s: float = 10.0
    restore_s: float = 20.0
    tick_s: float = 1.0
    fetch_s: float = 0.0
    beat_s: float = math.inf
