"""`await_checks`: what the checks at the sites say of a job that was just submitted, within seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from isthmus.client.api_client import ApiClient
from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.messages.preflight import ANSWER_TIMEOUT_S, SitePreflight
from isthmus.core.runs.job_id import short_job_id
from isthmus.core.views.api_views import JobState, JobView

CHECKS_WAIT_S = 10.0
"""Longest wait of `isthmus submit` for the checks of the sites."""

POLL_S = 0.3
MIN_ANSWER_S = 1.0
"""Shortest time that the sites get to check an offered plan."""

_HOLDS_CHIPS: frozenset[JobState] = frozenset({"preempting", "preparing", "starting", "running", "succeeded"})

ChecksState = Literal["passed", "refused", "not checked", "incomplete"]


class ChecksVerdict(FrozenModel):
    """What the sites of a job's plan have found so far.

    `state`: `passed`; `refused`, with the `reason`; `not checked`, as no agent of the plan executes checks; or
    `incomplete`. `plan` is the id of the plan that was checked.
    """

    state: ChecksState
    reason: str = ""
    plan: str | None = None
    sites: tuple[SitePreflight, ...] = ()


def await_checks(
    api: ApiClient, view: JobView, *, limit_s: float, now: Callable[[], float], sleep: Callable[[float], None]
) -> tuple[JobView, ChecksVerdict]:
    """Return the job and the verdict of its sites, at the latest after `limit_s` (`incomplete`).

    The first plan of a job whose user chooses is checked by itself, without choosing it.
    """
    deadline_s = now() + limit_s
    while True:
        offered = view.plans.plans if view.plans is not None else ()
        if view.plan is None and offered and view.state in ("choosing", "waiting"):
            left_s = min(ANSWER_TIMEOUT_S, max(MIN_ANSWER_S, deadline_s - now()))
            return view, _check_offered(api, view.id, offered[0].id, left_s)
        found = read_verdict(view)
        if found.state != "incomplete" or now() >= deadline_s:
            return view, found
        sleep(min(POLL_S, deadline_s - now()))
        view = api.job(view.id)


def read_verdict(view: JobView) -> ChecksVerdict:
    """Return what is known of the checks of a job's plan. A job that its sites refuse takes another plan, or fails."""
    sites, plan = view.preflight, view.plan.id if view.plan is not None else None
    if view.state in ("failed", "cancelled"):
        return ChecksVerdict(state="refused", reason=view.reason, plan=plan, sites=sites)
    open_yet = view.state == "planning" or plan is None or not sites or any(site.state == "failed" for site in sites)
    if view.state not in _HOLDS_CHIPS and open_yet:
        return ChecksVerdict(state="incomplete", reason=view.reason, plan=plan, sites=sites)
    return _verdict_of(sites, plan, view.reason)


def require_not_refused(view: JobView, found: ChecksVerdict) -> None:
    """Raise `ConflictError` if the sites have refused the job."""
    if found.state != "refused":
        return
    job = short_job_id(view.id)
    if view.state in ("failed", "cancelled"):
        hint = f"repair it and submit again; `isthmus show {job}` shows the checks"
        raise ConflictError(f"job {job} {view.state}: {found.reason}", hint=hint)
    raise ConflictError(
        f"the sites refuse plan {found.plan} of job {job}: {found.reason}",
        hint=f"repair it, then `isthmus choose {job} {found.plan}`; or take another plan "
        f"(`isthmus plans {job}`), or `isthmus cancel {job}`",
    )


def _check_offered(api: ApiClient, job: str, plan: str, limit_s: float) -> ChecksVerdict:
    try:
        sites = api.check_plan(job, plan, timeout_s=limit_s)
    except (NotFoundError, ConflictError) as error:  # an earlier server, or the job has gone on
        return ChecksVerdict(state="incomplete", reason=error.message, plan=plan)
    return _verdict_of(tuple(sites), plan, "")


def _verdict_of(sites: tuple[SitePreflight, ...], plan: str | None, reason: str) -> ChecksVerdict:
    """Return the verdict of the answers of a plan's sites."""
    states = {site.state for site in sites}
    state: ChecksState = "passed"
    if "failed" in states:
        state, reason = "refused", _describe_failures(sites) or reason
    elif "waiting" in states:
        state = "incomplete"
    elif "passed" not in states:
        state = "not checked"
    return ChecksVerdict(state=state, reason=reason, plan=plan, sites=sites)


def _describe_failures(sites: tuple[SitePreflight, ...]) -> str:
    """Return what the sites have found: `nanjing: data: /pool/text: no such file or folder; copy it ...`."""
    return "; ".join(
        f"{site.cluster}: {one.name}: {one.detail}" + (f" ({one.hint})" if one.hint else "")
        for site in sites
        for one in site.results
        if one.status == "failed"
    )
