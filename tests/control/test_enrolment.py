"""Which agent may report for a cluster, and what a refused one is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isthmus.control.state.events import AgentLost, SiteEnrolling, SiteGone
from isthmus.core.errors import IsthmusError
from isthmus.core.messages.agent_messages import AgentIdentity, PeerAddress
from tests.control.driver import Driver, identity
from tests.control.samples import plan


def enrolled(*, runs: bool = False) -> Driver:
    """`a` is bound to an agent in its third session, with 5 saved changes; `runs`: job `j` trains there."""
    pool = Driver("a", "b")
    pool.addresses["a"] = PeerAddress(host="h", port=1)
    pool.identities["a"] = identity("own", 3, 5)
    pool.report("a")
    if runs:
        pool.submit("j", plan("a"))
        pool.obey()
        pool.obey()
        assert pool.state("j") == "running"
    return pool


def lost(*, runs: bool = False) -> Driver:
    """The same, and the agent is silent."""
    pool = enrolled(runs=runs)
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    return pool


def gone() -> Driver:
    """The same, and the operator has declared it gone."""
    pool = lost()
    pool.tell(SiteGone(now_s=pool.now_s, cluster="a", by="root"))
    return pool


def agent(said: AgentIdentity | None, incarnation: str = "2", host: str = "h") -> Callable[[Driver], None]:
    """An agent reports for `a`."""

    def report(pool: Driver) -> None:
        if said is None:
            pool.identities.pop("a")
        else:
            pool.identities["a"] = said
        pool.addresses["a"] = PeerAddress(host=host, port=1)
        pool.report("a", incarnation=incarnation)

    return report


def short(folder: str) -> str:
    """The beginning of the identifier of an agent, as it is shown."""
    pool = Driver("a")
    pool.identities["a"] = identity(folder)
    pool.report("a")
    known = pool.coordinator.state.clusters["a"].agent
    assert known is not None
    return known.id[:12]


OWN, NEW = short("own"), short("new")

REFUSALS: dict[str, tuple[Callable[[], Driver], Callable[[Driver], None]]] = {
    "cluster 'a' is bound to an agent, and this one names no identity (use the same release of agent and server)": (
        enrolled,
        agent(None),
    ),
    f"the agent {OWN} of cluster 'a' was declared gone (stop what still runs there, then start with an empty state "
    "folder and --enrol)": (gone, agent(identity("own", 4, 6))),
    f"cluster 'a' is bound to agent {OWN}, and this is {NEW}: its state folder is new (start the agent with its own "
    "state folder; if that is lost: isthmus agent --enrol)": (lost, agent(identity("new"))),
    f"cluster 'a' is bound to agent {OWN}, and this is {NEW}: its state folder is new (start the agent with its own "
    "state folder; if that is lost: isthmus site gone a --yes, then isthmus agent --enrol)": (
        lambda: lost(runs=True),
        agent(identity("new")),
    ),
    f"agent {NEW} cannot take the place of {OWN}: the agent of cluster 'a' is in contact with the server (stop the "
    "other agent and wait for its lease (isthmus site show a), or, if nothing runs there: isthmus site gone a --yes)": (
        enrolled,
        agent(identity("new", enrols=True)),
    ),
    f"agent {NEW} cannot take the place of {OWN}: workers of j may still run at 'a' (stop the other agent and wait "
    "for its lease (isthmus site show a), or, if nothing runs there: isthmus site gone a --yes)": (
        lambda: lost(runs=True),
        agent(identity("new", enrols=True)),
    ),
    "the state folder of cluster 'a' was copied: its agent is bound to another machine or folder (run the agent where "
    "it was enrolled, or start with an empty state folder and --enrol)": (
        enrolled,
        agent(identity("own", 4, 6, machine="other")),
    ),
    "the state folder of cluster 'a' is older than what its agent has reported: session 3 with 9 saved changes, known "
    "are session 3 with 5 (a second agent runs on a copy of the folder, or the folder was restored from a backup; if "
    "the present one is lost: isthmus site gone a --yes, then an empty folder and --enrol)": (
        enrolled,
        agent(identity("own", 3, 9)),
    ),
    "the state folder of cluster 'a' is older than what its agent has reported: session 4 with 4 saved changes, known "
    "are session 3 with 5 (a second agent runs on a copy of the folder, or the folder was restored from a backup; if "
    "the present one is lost: isthmus site gone a --yes, then an empty folder and --enrol)": (
        enrolled,
        agent(identity("own", 4, 4)),
    ),
    "cluster 'a' is in contact from another start of this machine (this agent takes over once the other one is "
    "silent)": (enrolled, agent(identity("own", 4, 6, boot="f" * 64))),
    "the workers of cluster 'a' listen at h since its enrolment, not at there (give the agent --host h; or, "
    "while no part runs there, restart it with --enrol)": (enrolled, agent(identity("own", 3, 5), "1", host="there")),
}


@pytest.mark.parametrize("words", REFUSALS, ids=lambda words: words.partition(" (")[0])
def test_a_refused_agent_is_told_why_and_what_to_do(words: str) -> None:
    """And nothing of its report is taken in."""
    make, act = REFUSALS[words]
    pool = make()
    before = list(pool.log)
    with pytest.raises(IsthmusError) as raised:
        act(pool)
    assert str(raised.value) == words
    assert pool.log == before


def test_the_next_session_of_the_agent_goes_on() -> None:
    """As many saved changes suffice; after a boot of the machine, once the previous start is silent."""
    pool = enrolled()
    agent(identity("own", 4, 5))(pool)
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    agent(identity("own", 5, 5, boot="f" * 64), "3")(pool)
    known = pool.coordinator.state.clusters["a"].agent
    assert known is not None
    assert (known.session, known.saves) == (5, 5)


def test_a_session_began_with_its_first_report() -> None:
    """Later reports of the same session change what the agent has saved, and not when it began."""
    pool = enrolled()
    pool.now_s += 7.0
    pool.identities["a"] = identity("own", 3, 6)
    pool.report("a", free=3)
    known = pool.coordinator.state.clusters["a"].agent
    assert known is not None
    assert (known.session, known.session_s, known.saves) == (3, pool.now_s - 7.0, 6)


def test_a_late_report_of_an_earlier_session_is_dropped() -> None:
    """It may have been on its way while the agent was restarted."""
    pool = enrolled()
    agent(identity("own", 4, 6))(pool)
    logged = len(pool.log)
    agent(identity("own", 3, 5), "1")(pool)
    assert len(pool.log) == logged


def test_another_agent_takes_the_place_by_an_act_once_nothing_can_run() -> None:
    """The act of its owner at the server, or `--enrol` of the agent; its workers may listen elsewhere."""
    for act in (True, False):
        pool = lost()
        if act:
            pool.tell(SiteEnrolling(now_s=pool.now_s, cluster="a", by="owner"))
        agent(identity("new", enrols=not act), host="there")(pool)
        record = pool.coordinator.state.clusters["a"]
        assert record.connected
        assert record.agent is not None
        assert (record.agent.id[:12], record.agent.host, record.enrolling) == (NEW, "there", False)
