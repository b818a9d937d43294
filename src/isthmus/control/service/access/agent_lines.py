"""`report_lines`, `check_lines`: the audit lines of what a site's agent reports: itself, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.queries.accepted_output import new_refusals
from isthmus.control.queries.sites.agent_refusals import agent_refusals
from isthmus.control.service.access.audit_log import make_line
from isthmus.control.service.auth import Caller
from isthmus.control.state.events import AgentReported
from isthmus.control.state.job_records import PoolState
from isthmus.core.messages.agent_messages import AgentReport
from isthmus.core.messages.preflight import PreflightAnswer
from isthmus.core.views.access_views import AuditRecord


def report_lines(
    state: PoolState, caller: Caller | None, report: AgentReport, event: AgentReported, *, registers: bool
) -> Iterator[AuditRecord]:
    """Yield the lines of a report, from the state before it; `registers` says that another agent sent the last one."""
    name, now_s = report.cluster.name, event.now_s
    if registers:
        yield make_line("site-registered", caller, now_s, name, f"owner {report.cluster.owner}")
    for part, detail in agent_refusals(state, event):
        yield make_line("part-refused", caller, now_s, part.job, f"attempt {part.attempt} at {name}: {detail}")
    known = state.clusters[name].moves if name in state.clusters else ()
    for move in (one for one in event.moves if one not in known):
        moved = ", ".join(f"{one.job}/{one.attempt}" for one in move.moved)
        detail = (
            f"at {name}: moves {moved}; {move.cost_card_s:.0f} card-seconds, to end {move.loss_card_s:.0f} of waiting"
        )
        yield make_line("moves-proposed", caller, now_s, move.job, detail)
    for job_id, one in new_refusals(state, name, report):
        yield make_line("link-refused", caller, now_s, job_id, f"rank {one.rank} at {name}: {one.detail}")


def check_lines(caller: Caller | None, cluster: str, now_s: float, answer: PreflightAnswer) -> list[AuditRecord]:
    """Return the line of a site that cannot take a job, by the first check that failed there."""
    failed = [one for one in answer.results if one.status == "failed"]
    if not failed:
        return []
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    detail = f"at {cluster}: {failed[0].name}: {failed[0].detail}{more}"
    return [make_line("check-failed", caller, now_s, answer.job, detail)]
