"""`RestoredLog`: what the coordinator does not know because its log is that of a backup, until every site has reported.

Later events of the lost log may have opened attempts and submitted jobs that still run at the sites.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PartKey = tuple[str, int]
"""(job, attempt)."""

MAX_ATTEMPTS_AHEAD = 1000
"""Attempts beyond the known one that a site's report of a job is believed to have had."""


@dataclass(slots=True, kw_only=True)
class RestoredLog:
    """The restore that was last noticed. Its jobs may have run meanwhile, in attempts that the log does not have."""

    at_s: float
    # Number of the last job that the log had then.
    last_job: int
    # The clusters that have not reported since.
    unheard: set[str]
    # By cluster: the running parts that it last reported and that the log does not have.
    unknown: dict[str, list[PartKey]] = field(default_factory=dict)
    # Those of them that are to end: one of their parts has failed, or an operator has decided so.
    ended: set[PartKey] = field(default_factory=set)
    # The highest attempt that any site has reported since, by job.
    attempts: dict[str, int] = field(default_factory=dict)
