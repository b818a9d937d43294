"""`PreflightRecord`: the checks of one job at the sites of one plan, and the answers so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from isthmus.control.preflight.plan_checks import marker_name, own_checks, peer_checks
from isthmus.core.job import Job
from isthmus.core.messages.preflight import (
    MAX_CHECKS,
    CheckResult,
    PreflightAnswer,
    PreflightOrder,
    PreflightPhase,
    SiteCheck,
    SitePreflight,
)
from isthmus.core.plan import Plan

PreflightState = Literal["pending", "passed", "failed", "unknown"]
"""`unknown`: a site did not answer, or a check did not finish; the preflight is repeated."""


@dataclass(slots=True, kw_only=True)
class PreflightRecord:
    """One preflight of a job: both phases at the sites of plan `plan_id`. Times are in seconds since the epoch."""

    job: str
    plan_id: str
    # The user of the job.
    user: str = ""
    # Number of this preflight of the job, from 1.
    round: int
    # When the current phase began.
    asked_s: float
    # The folders that the checks make are removed afterwards.
    temporary: bool = False
    # The sites of the plan that execute checks, and those that do not.
    sites: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    phase: PreflightPhase = "own"
    state: PreflightState = "pending"
    # When the last answer arrived.
    answered_s: float = 0.0
    # The orders of the current phase and the answers of all phases, by cluster.
    orders: dict[str, PreflightOrder] = field(default_factory=dict)
    answers: dict[str, PreflightAnswer] = field(default_factory=dict)
    results: dict[str, tuple[CheckResult, ...]] = field(default_factory=dict)
    # Seconds that each site has spent on its checks.
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        job_id: str,
        job: Job,
        plan: Plan,
        now_s: float,
        *,
        user: str = "",
        number: int = 1,
        sites: Collection[str],
        fetching: Collection[str] = (),
        temporary: bool = False,
    ) -> PreflightRecord:
        """Return the preflight of `plan` at those of its clusters that are in `sites`; it has passed without checks.

        The sites `fetching` copy the files that the job reads from another site before it starts.
        """
        found = cls(
            job=job_id,
            plan_id=plan.id,
            user=user,
            round=number,
            asked_s=now_s,
            temporary=temporary,
            sites=tuple(name for name in plan.clusters if name in sites),
            unchecked=tuple(name for name in plan.clusters if name not in sites),
        )
        found._ask(
            {
                name: own_checks(job, plan, name, found.marker(name), has_files=name not in fetching)
                for name in found.sites
            }
        )
        if not any(order.checks for order in found.orders.values()):
            found._end("passed", now_s)
        return found

    def marker(self, cluster: str) -> str:
        """Return the name of the file that a cluster leaves in the job's shared folders."""
        return marker_name(self.job, self.round, cluster)

    def expects(self, cluster: str, answer: PreflightAnswer) -> bool:
        """Return whether `answer` is one that this preflight waits for."""
        order = self.orders.get(cluster)
        return (
            self.state == "pending"
            and order is not None
            and cluster not in self.answers
            and (answer.round, answer.phase) == (order.round, order.phase)
            and [one.name for one in answer.results] == [one.name for one in order.checks]
        )

    def add_answer(self, cluster: str, answer: PreflightAnswer, job: Job, now_s: float) -> None:
        """Add an expected answer; once all sites have answered, begin the next phase or end."""
        self.answers[cluster] = answer
        self.results[cluster] = (*self.results.get(cluster, ()), *answer.results)
        self.seconds[cluster] = self.seconds.get(cluster, 0.0) + answer.seconds
        if len(self.answers) < len(self.sites):
            return
        found = {one.status for results in self.results.values() for one in results}
        if found - {"passed"}:
            self._end("failed" if "failed" in found else "unknown", now_s)
            return
        if self.phase == "own" and len(self.sites) > 1:
            markers = {name: self.marker(name) for name in self.sites}
            facts = {name: answer.facts for name, answer in self.answers.items()}
            self.phase, self.asked_s = "peers", now_s
            self._ask({name: peer_checks(job, name, markers, facts) for name in self.sites})
            if any(order.checks for order in self.orders.values()):
                return
        self._end("passed", now_s)

    def end_unanswered(self, now_s: float) -> None:
        """End the preflight although some sites have not answered."""
        self._end("unknown", now_s)

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The sites that have not answered the current phase."""
        return tuple(name for name in self.sites if name not in self.answers) if self.state == "pending" else ()

    def conflicts(self) -> dict[frozenset[str], str]:
        """Return the sets of clusters that the job cannot use together, each with the reason: one cluster or two."""
        found: dict[frozenset[str], str] = {}
        for cluster, results in self.results.items():
            for one in results:
                if one.status == "failed":
                    found.setdefault(frozenset({cluster, one.peer or cluster}), _describe(cluster, one))
        return found

    def unknowns(self) -> list[str]:
        """Return what is not known: the sites without an answer, and the checks that did not finish."""
        return [
            *(f"{name} has not answered the checks of the job" for name in self._silent),
            *(
                _describe(name, one)
                for name, results in self.results.items()
                for one in results
                if one.status == "unknown"
            ),
        ]

    @property
    def unknown_sites(self) -> tuple[str, ...]:
        """The sites that have not answered, or have a check that did not finish."""
        return tuple(
            name
            for name in self.sites
            if name in self._silent or any(one.status == "unknown" for one in self.results.get(name, ()))
        )

    @property
    def _silent(self) -> tuple[str, ...]:
        """The sites without an answer in the phase in which the preflight ended."""
        return tuple(name for name in self.sites if name not in self.answers)

    def views(self) -> tuple[SitePreflight, ...]:
        """Return the state and the results of each site of the plan."""
        checked = tuple(
            SitePreflight(
                cluster=name,
                state=self._site_state(name),
                results=self.results.get(name, ()),
                seconds=self.seconds.get(name, 0.0),
            )
            for name in self.sites
        )
        return (*checked, *(SitePreflight(cluster=name, state="not checked") for name in self.unchecked))

    def _site_state(self, cluster: str) -> Literal["passed", "failed", "waiting"]:
        if any(one.status != "passed" for one in self.results.get(cluster, ())):
            return "failed"
        return "passed" if cluster in self.answers or self.state == "passed" else "waiting"

    def _ask(self, checks: dict[str, tuple[SiteCheck, ...]]) -> None:
        self.answers = {}
        self.orders = {
            name: PreflightOrder(
                job=self.job,
                user=self.user,
                round=self.round,
                phase=self.phase,
                temporary=self.temporary,
                checks=here[:MAX_CHECKS],
            )
            for name, here in checks.items()
        }

    def _end(self, state: PreflightState, now_s: float) -> None:
        self.state, self.answered_s = state, now_s
        self.orders = {}


def _describe(cluster: str, result: CheckResult) -> str:
    """Return a result that did not pass as `SITE: NAME: DETAIL (HINT)`."""
    return f"{cluster}: {result.name}: {result.detail}" + (f" ({result.hint})" if result.hint else "")
