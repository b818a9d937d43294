"""`Scenario`: what is there and how much may go wrong; those that the tests and the benchmark look at."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.control.model.kinds import Kind


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is there, and how much may go wrong.

    `jobs` maps a job to the sites of its plan, one device at each; those of `urgent` have a high priority,
    may come at any time, and their user chooses their plan. `faults` is how many faults there may be,
    `cancels` how many jobs may be cancelled, `agreements` to how many preemptions users may agree,
    `evictions` at how many sites the owner's own urgent job may come; each job is restarted `restarts` times.
    """

    sites: tuple[str, ...] = ("a", "b", "c")
    jobs: tuple[tuple[str, str], ...] = (("j", "abc"), ("k", "abc"))
    urgent: tuple[str, ...] = ()
    faults: int = 1
    cancels: int = 0
    agreements: int = 0
    evictions: int = 0
    restarts: int = 1

    def __str__(self) -> str:
        jobs = " ".join(f"{job}:{places}" for job, places in self.jobs)
        counts = (
            (self.faults, "faults"),
            (self.cancels, "cancels"),
            (self.agreements, "preemptions"),
            (self.evictions, "evictions"),
        )
        return ", ".join([f"{len(self.sites)} owners", jobs, *(f"{num} {what}" for num, what in counts if num)])

    @property
    def wishes(self) -> dict[Kind, int]:
        """How often each wish may be had."""
        return {Kind.CANCEL: self.cancels, Kind.AGREE: self.agreements, Kind.EVICT: self.evictions}


PREEMPTION = Scenario(urgent=("k",), agreements=1, faults=0)
SMALL_PREEMPTION = replace(PREEMPTION, sites=("a", "b"), jobs=(("j", "ab"), ("k", "ab")))

QUICK = (
    Scenario(jobs=(("j", "abc"),), faults=1),
    Scenario(jobs=(("j", "abc"), ("k", "ab")), faults=0, cancels=1),
    Scenario(jobs=(("j", "abc"),), faults=0, evictions=1),
    SMALL_PREEMPTION,
)
"""What the tests run."""

WHOLE = (
    *QUICK,
    Scenario(faults=0, cancels=2),
    Scenario(faults=0, evictions=1),
    Scenario(jobs=(("j", "abc"),), faults=2),
    replace(PREEMPTION, jobs=(("j", "abc"), ("k", "ab"))),
    PREEMPTION,
    replace(SMALL_PREEMPTION, faults=1),
    Scenario(faults=1),
)
"""What `python -m benchmarks.model_check` runs."""

LARGEST = (replace(PREEMPTION, faults=1),)
"""What it also runs with `--all`."""
