"""Which agent may report for a cluster: the enrolled one, from the machine and state folder of its enrolment.

A cluster's first agent enrols by its first report. Any other takes its place only by an act of a person
(`SiteEnrolling`, or `enrols` in its report), and only once nothing of the pool can run at the site: an agent without
the part table of its predecessor would otherwise report parts as released whose workers still train.
"""

from __future__ import annotations

from isthmus.control.state.events import AgentReported, AgentSession
from isthmus.control.state.site_records import ClusterRecord, EnrolledAgent
from isthmus.core.errors import AuthError, UnavailableError


def admit_agent(record: ClusterRecord | None, event: AgentReported) -> bool:
    """Return whether the report is of the enrolled agent's latest session; False for a late one of an earlier session.

    Raises `AuthError` for any other agent, `UnavailableError` while the machine's previous start is still in contact.
    """
    if record is None or (record.agent is None and event.agent is None):
        return True
    name, known, said = event.cluster.name, record.agent, event.agent
    if said is None:
        raise AuthError(
            f"cluster '{name}' is bound to an agent, and this one names no identity",
            hint="use the same release of agent and server",
        )
    if said.id in record.gone_agents:
        raise AuthError(
            f"the agent {said.id[:12]} of cluster '{name}' was declared gone",
            hint="stop what still runs there, then start with an empty state folder and --enrol",
        )
    if known is None:
        return True
    if said.id != known.id:
        _check_enrolment(record, known, said)
        return True
    return _is_latest_session(record, known, event, said)


def is_new_session(record: ClusterRecord, event: AgentReported) -> bool:
    """Return whether a report enrols its agent or begins a session of it."""
    known, said = record.agent, event.agent
    return said is not None and (known is None or (known.id, known.session) != (said.id, said.session))


def enrolment_obstacle(record: ClusterRecord) -> str:
    """Return why no other agent may take the place of the enrolled one now, or ""."""
    name = record.cluster.name
    if record.connected:
        return f"the agent of cluster '{name}' is in contact with the server"
    parts = record.may_run
    if not parts:
        return ""
    jobs = ", ".join(sorted({part.job for part in parts}))
    return f"workers of {jobs} may still run at '{name}'"


def _check_enrolment(record: ClusterRecord, known: EnrolledAgent, said: AgentSession) -> None:
    """Raise `AuthError` unless the new agent `said` may take the place of `known`."""
    name = record.cluster.name
    if not (record.enrolling or said.enrols):
        first = f"isthmus site gone {name} --yes, then " if record.may_run else ""
        raise AuthError(
            f"cluster '{name}' is bound to agent {known.id[:12]}, and this is {said.id[:12]}: its state folder is new",
            hint=f"start the agent with its own state folder; if that is lost: {first}isthmus agent --enrol",
        )
    if obstacle := enrolment_obstacle(record):
        raise AuthError(
            f"agent {said.id[:12]} cannot take the place of {known.id[:12]}: {obstacle}",
            hint=f"stop the other agent and wait for its lease (isthmus site show {name}), or, if nothing runs there: "
            f"isthmus site gone {name} --yes",
        )


def _is_latest_session(record: ClusterRecord, known: EnrolledAgent, event: AgentReported, said: AgentSession) -> bool:
    """Return False for a late report of an earlier session; raise `AuthError` for a copied or restored folder."""
    name = record.cluster.name
    if said.machine != known.machine:
        raise AuthError(
            f"the state folder of cluster '{name}' was copied: its agent is bound to another machine or folder",
            hint="run the agent where it was enrolled, or start with an empty state folder and --enrol",
        )
    if event.incarnation == record.incarnation:
        _check_address(record, known, event, restarted=False)
        return True
    if said.session < known.session and event.incarnation in record.incarnations:
        return False
    if said.session <= known.session or said.saves < known.saves:
        raise AuthError(
            f"the state folder of cluster '{name}' is older than what its agent has reported: session {said.session} "
            f"with {said.saves} saved changes, known are session {known.session} with {known.saves}",
            hint="a second agent runs on a copy of the folder, or the folder was restored from a backup; "
            f"if the present one is lost: isthmus site gone {name} --yes, then an empty folder and --enrol",
        )
    if said.boot != known.boot and record.connected:
        raise UnavailableError(
            f"cluster '{name}' is in contact from another start of this machine",
            hint="this agent takes over once the other one is silent",
        )
    _check_address(record, known, event, restarted=True)
    return True


def _check_address(record: ClusterRecord, known: EnrolledAgent, event: AgentReported, *, restarted: bool) -> None:
    """Raise `AuthError` if the address of the site's workers has changed without an act."""
    address, name = event.peer_address, record.cluster.name
    if address is None or known.host is None or address.host == known.host:
        return
    agreed = restarted and (record.enrolling or (event.agent is not None and event.agent.enrols))
    if not agreed or record.may_run:
        raise AuthError(
            f"the workers of cluster '{name}' listen at {known.host} since its enrolment, not at {address.host}",
            hint=f"give the agent --host {known.host}; or, while no part runs there, restart it with --enrol",
        )
