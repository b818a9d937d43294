"""Tables of the sites and the agents that they are bound to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.text import Text

from isthmus.cli.terminal.tables import table
from isthmus.core.text.printable import printable
from isthmus.core.units import format_seconds
from isthmus.core.views.api_views import ClusterView
from isthmus.core.views.site_views import InvitationView, ProbationView


def sites_table(sites: Iterable[ClusterView], now_s: float) -> RenderableType:
    """Return the table of sites; `now_s` is seconds since the epoch."""
    rows = [
        (
            one.cluster.name,
            one.cluster.owner,
            Text("connected", style="green") if one.connected else Text("disconnected", style="red"),
            _duty(one),
            one.agent.id if one.agent else "none",
            _ago(one.agent.enrolled_s if one.agent else None, now_s),
            f"{one.agent.session}" if one.agent else "",
            _ago(one.last_report_s, now_s),
            _lease(one, now_s),
        )
        for one in sites
    ]
    head = ("cluster", "owner", "state", "new parts", "agent", "enrolled", "session", "last contact")
    return table("Sites", (*head, "workers without contact"), rows)


def invitations_table(found: Iterable[InvitationView], now_s: float) -> RenderableType:
    """Return the table of invitations; `now_s` is seconds since the epoch."""
    rows = [
        (
            one.id,
            one.owner,
            one.cluster or "any",
            "any" if one.max_chips is None else f"{one.max_chips}",
            f"used by {one.joined}" if one.state == "used" else one.state,
            format_seconds(max(0.0, one.expires_s - now_s)) if one.state == "open" else "",
            one.by,
        )
        for one in found
    ]
    return table("Invitations", ("id", "owner", "cluster", "most chips", "state", "ends in", "by"), rows)


def site_checks_table(checks: Iterable[Mapping[str, object]]) -> RenderableType:
    """Return the table of what `isthmus site check` has found."""
    rows = [
        (
            str(one["check"]),
            Text("ok", style="green") if one["ok"] else Text("wrong", style="red"),
            printable(str(one["detail"])),
            printable(str(one["hint"])),
        )
        for one in checks
    ]
    return table("Checks of the site", ("check", "result", "finding", "hint"), rows)


def site_page(site: ClusterView, now_s: float) -> RenderableType:
    """Return what is known of one site; `now_s` is seconds since the epoch."""
    agent = site.agent
    lines = [f"{site.cluster.name} of {site.cluster.owner}: {'connected' if site.connected else 'disconnected'}"]
    if agent is None:
        lines.append("agent      none that names an identity")
    else:
        gone = "; declared gone" if agent.gone else ""
        lines.append(f"agent      {agent.id}, enrolled {_ago(agent.enrolled_s, now_s)}{gone}")
        lines.append(f"session    {agent.session}, since {_ago(agent.session_s, now_s)}")
        lines.append(f"address    {agent.host or 'not named'}")
        lines += ["enrolment  the next new agent takes its place"] if agent.enrolling else []
    lines.append(f"contact    {_ago(site.last_report_s, now_s)}")
    lines.append(f"lease      {_lease(site, now_s)}")
    lines.append(f"new parts  {_duty_line(site, now_s)}")
    lines.append(f"may run    {', '.join(site.jobs) or 'no job'}")
    return Text("\n".join(map(printable, lines)))


def _duty(site: ClusterView) -> Text:
    """Return whether a site takes new parts."""
    if site.duty.state != "open":
        return Text(site.duty.state, style="yellow")
    return Text("probation", style="yellow") if site.duty.probation else Text("taken", style="green")


def _duty_line(site: ClusterView, now_s: float) -> str:
    duty = site.duty
    if duty.state == "open":
        return _probation_line(duty.probation, now_s) if duty.probation else "taken"
    text = f"none: {duty.state} by {duty.by}, {_ago(duty.since_s, now_s)}"
    if duty.jobs:
        text += f"; still there: {', '.join(duty.jobs)}"
    if duty.deadline_s is not None and duty.jobs:
        text += f"; stopped without a new checkpoint in {format_seconds(max(0.0, duty.deadline_s - now_s))}"
    return text


def _probation_line(probation: ProbationView, now_s: float) -> str:
    done = f"{probation.num_succeeded} of {probation.num_needed} jobs"
    end = format_seconds(max(0.0, probation.ends_s - now_s))
    return f"on probation, one job at a time: {done} have trained to their end; ends in {end}"


def _ago(at_s: float | None, now_s: float) -> str:
    return "never" if at_s is None else f"{format_seconds(max(0.0, now_s - at_s))} ago"


def _lease(site: ClusterView, now_s: float) -> str:
    """Say how long the site's workers run without contact, or when those of a lost site count as ended."""
    if site.released_at_s is not None:
        return f"its parts count as ended in {format_seconds(max(0.0, site.released_at_s - now_s))}"
    lease_s = site.agent.run_lease_s if site.agent else 0.0
    return f"end themselves after {format_seconds(lease_s)}" if lease_s > 0 else "run without limit"
