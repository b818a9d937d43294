"""`falsify_report`: false reports of a site. Only the report is false; the site itself behaves correctly."""

from __future__ import annotations

from isthmus.control.simulation.faults.fault_injector import FaultInjector
from isthmus.core.messages.agent_messages import AgentReport, ObservedPart, PartState

_STATES: tuple[PartState, ...] = ("queued", "ready", "prepared", "refused", "running", "failed", "released")
FALSE_REPORT_RATE = 0.1
"""Fraction of false reports."""


def falsify_report(report: AgentReport, faults: FaultInjector) -> AgentReport:
    """Return `report`, or one with false free chips, a false part state or a part that was never ordered."""
    rng = faults.rng
    if rng.random() >= FALSE_REPORT_RATE:
        return report
    what = rng.randrange(3)
    if what == 0:
        free = {group.name: rng.randint(0, 2 * group.num_chips) for group in report.cluster.node_groups}
        return report.model_copy(update={"free_chips": free})
    if what == 1 and report.parts:
        at = rng.randrange(len(report.parts))
        # Never report a part that may run as released: that would harm only the site's own devices.
        states = [s for s in _STATES if s != "released" or report.parts[at].state == "queued"]
        changed = report.parts[at].model_copy(update={"state": rng.choice(states)})
        return report.model_copy(update={"parts": (*report.parts[:at], changed, *report.parts[at + 1 :])})
    strange = ObservedPart(job=f"unknown-{rng.randrange(9)}", attempt=1, state=rng.choice(_STATES))
    return report.model_copy(update={"parts": (*report.parts, strange)})
