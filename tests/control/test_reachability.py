"""Rules of the checks that sites reach each other: made before a job gets chips, and shown if they fail."""

from __future__ import annotations

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.coordinator.reachability import RETRY_S
from isthmus.control.queries.explain_wait import answer_query, query_job
from isthmus.control.queries.peer_checks import format_peer_address
from isthmus.control.state.events import AgentLost, PeerCheckTimedOut
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import PeerAddress, PeerCheck
from tests.control.driver import RULES, Driver
from tests.control.samples import cluster, plan

NONCE = "0123456789abcdef" * 2
OPEN = {"host": "10.0.0.1", "first_port": 41000, "last_port": 41100}


class Sites(Driver):
    """A pool whose agents take part in the checks; `closed` are pairs (dials, listens) with the reason."""

    def __init__(self, *names: str) -> None:
        self.closed: dict[tuple[str, str], str] = {}
        super().__init__()
        self.hosts = {name: {**OPEN, "host": f"10.0.0.{number}"} for number, name in enumerate(names, start=1)}
        for name in names:
            self.join(name)

    def join(self, name: str, incarnation: str = "1") -> None:
        self.clusters[name] = cluster(name, 4)
        self.addresses[name], self.checks[name] = PeerAddress.model_validate(self.hosts[name]), ()
        self.report(name, incarnation=incarnation)

    def check(self, *names: str) -> None:
        """Let the agents of all sites, or of `names`, follow the orders for checks, twice: listen, then dial."""
        for _ in range(2):
            for name in names or tuple(self.clusters):
                if self.coordinator.opens_listener(name):
                    found = {**self.hosts[name], "port": 41000, "nonce": NONCE}
                    self.addresses[name] = PeerAddress.model_validate(found)
                else:
                    self.addresses[name] = PeerAddress.model_validate(self.hosts[name])
                self.checks[name] = tuple(
                    PeerCheck(
                        cluster=peer.cluster,
                        number=peer.number,
                        reached=(name, peer.cluster) not in self.closed,
                        detail=self.closed.get((name, peer.cluster), ""),
                    )
                    for peer in self.coordinator.peers_to_check(name)
                )
                self.report(name)

    def wait(self, seconds: float) -> None:
        """Let `seconds` pass, and the deadlines in them."""
        self.now_s += seconds
        for name in self.clusters:
            self.coordinator.record_report(name, self.now_s)
        for event in self.coordinator.due_events(self.now_s):
            self.tell(event)

    def reason(self, job: str) -> str:
        return self.coordinator.job_view(job).reason


def test_sites_check_each_other_when_they_join_and_close_the_listeners_after() -> None:
    """Two agents that join are ordered to listen and to dial each other, once; an only site is not."""
    pool = Sites("a")
    assert not pool.coordinator.opens_listener("a")
    pool.hosts["b"] = {**OPEN, "host": "10.0.0.2"}
    pool.join("b")
    assert pool.coordinator.opens_listener("a")
    assert pool.coordinator.peers_to_check("b") == (), "the listener of a is not open yet"
    pool.check("a")
    (peer,) = pool.coordinator.peers_to_check("b")
    assert (peer.cluster, peer.host, peer.port, peer.nonce) == ("a", "10.0.0.1", 41000, NONCE)
    pool.check()
    pool.check()
    assert not any(pool.coordinator.opens_listener(name) for name in "ab")
    assert pool.coordinator.peers_to_check("a") == pool.coordinator.peers_to_check("b") == ()


def test_a_job_gets_chips_only_when_the_check_is_done() -> None:
    """Until the report arrives the job waits and says for what; then it starts at once."""
    pool = Sites("a", "b")
    pool.submit("j", plan("a", "b"))
    assert pool.state("j") == "waiting"
    assert pool.reason("j") == "waits for the check that b reaches a"
    assert pool.coordinator.pool_view().clusters[0].free_chips == {"g": 4}
    pool.check()
    assert pool.state("j") == "preparing"
    assert pool.reason("j") == ""


def test_a_closed_port_is_named_before_chips_are_held() -> None:
    """The reason names both sites, the address, the ports, what happened and what to do; no part is prepared."""
    pool = Sites("a", "b")
    pool.closed["b", "a"] = "timed out after 3 s"
    pool.check()
    pool.wait(60)
    pool.submit("j", plan("a", "b"))
    assert pool.state("j") == "waiting", "the old result is checked again first"
    pool.check()
    assert pool.reason("j") == (
        "site b cannot reach site a at 10.0.0.1:41000-41100 (timed out after 3 s); open these ports at a for b, "
        "or give --host ADDRESS to the agent of a"
    )
    assert all(part.desired in ("queued", "released") for part in pool.coordinator.state.jobs["j"].parts.values())
    state = pool.coordinator.state
    (status,) = answer_query(query_job(state, state.jobs["j"], pool.now_s, {}, None))
    assert status.reason.startswith("site b cannot reach site a")


def test_a_port_that_is_opened_lets_the_job_start() -> None:
    """The job is tried again after some seconds with a new check, however often it was before."""
    pool = Sites("a", "b")
    pool.closed["b", "a"] = "connection refused"
    pool.submit("j", plan("a", "b"))
    pool.check()
    assert "connection refused" in pool.reason("j")
    pool.check()
    assert pool.state("j") == "waiting"
    for _ in range(10):
        pool.wait(RETRY_S)
        pool.check()
    assert pool.state("j") == "waiting"
    del pool.closed["b", "a"]
    pool.wait(RETRY_S)
    assert "connection refused" in pool.reason("j"), "the known reason is shown while the check is repeated"
    pool.check()
    assert pool.state("j") == "preparing"


def test_only_the_direction_that_the_ranks_dial_must_be_open() -> None:
    """The higher rank dials the lower one: a site behind a firewall may hold the higher ranks."""
    pool = Sites("a", "b")
    pool.closed["a", "b"] = "timed out after 3 s"
    pool.check()
    pool.submit("j", plan("a", "b"))
    assert pool.state("j") == "preparing"
    pool.submit("k", plan("b", "a", name="other"))
    pool.check()
    assert pool.reason("k").startswith("site a cannot reach site b")


def test_a_loopback_address_is_explained() -> None:
    """An agent that announces 127.0.0.1 is told to give --host: no port can be opened for that."""
    pool = Sites("a", "b")
    pool.hosts["a"] = {"host": "127.0.0.1"}
    pool.join("a")
    pool.closed["b", "a"] = "another process answers there"
    pool.submit("j", plan("a", "b"))
    pool.check()
    assert pool.reason("j") == (
        "site b cannot reach site a at 127.0.0.1 (another process answers there); "
        "this address leads to its own machine only: give --host ADDRESS to the agent of a"
    )


def test_a_site_that_cannot_listen_is_named_without_a_dial() -> None:
    """All ports of the range are taken: the agent reports it, and the check of every other site has failed."""
    pool = Sites("a", "b")
    pool.addresses["a"] = PeerAddress.model_validate({**OPEN, "problem": "every port of the range is in use"})
    pool.submit("j", plan("a", "b"))
    pool.report("a")
    assert "(every port of the range is in use)" in pool.reason("j")


def test_a_restarted_agent_is_checked_again_both_ways() -> None:
    """Its address, its routes and its firewall may be others."""
    pool = Sites("a", "b")
    pool.check()
    pool.hosts["a"] = {**OPEN, "host": "10.0.0.9"}
    pool.join("a", incarnation="2")
    assert pool.coordinator.opens_listener("a")
    assert pool.coordinator.opens_listener("b")


def test_an_answer_to_an_earlier_order_counts_no_more() -> None:
    """A late report with an old number, or about a site that was not ordered, changes nothing."""
    pool = Sites("a", "b")
    pool.checks["b"] = (
        PeerCheck(cluster="a", number=999, reached=True),
        PeerCheck(cluster="no-such-site", number=1, reached=True),
    )
    assert pool.report("b") == []
    pool.submit("j", plan("a", "b"))
    assert pool.state("j") == "waiting"


def test_an_agent_without_checks_and_a_plan_at_one_site_start_as_before() -> None:
    """Nothing is to be checked."""
    pool = Sites("a", "b")
    pool.submit("one", plan("a", "a"))
    assert pool.state("one") == "preparing"
    old = Driver("a", "b")
    old.submit("j", plan("a", "b"))
    assert old.state("j") == "preparing"


def test_two_sites_check_each_other_only_if_both_take_part() -> None:
    """`a` does not: `b` and `c` wait for their check alone, in whichever order a plan names the three."""
    for order in ("abc", "bca", "cab"):
        pool = Sites("b", "c")
        pool.clusters["a"] = cluster("a", 4)
        pool.report("a")
        pool.submit("j", plan(*order))
        later, earlier = ("c", "b") if order.index("b") < order.index("c") else ("b", "c")
        assert pool.reason("j") == f"waits for the check that {later} reaches {earlier}"
        pool.check("b", "c")
        assert pool.state("j") == "preparing"


def test_no_job_is_preempted_for_one_that_cannot_start() -> None:
    """A user's agreement is refused with the reason while a site cannot reach another."""
    pool = Sites("a", "b")
    pool.closed["b", "a"] = "timed out after 3 s"
    pool.check()
    pool.submit("low", plan("a", "a", "a", "a", name="low"), priority="low")
    pool.obey()
    pool.submit("high", plan("a", "b", name="high"), priority="high")
    with pytest.raises(ConflictError, match="site b cannot reach site a"):
        pool.preempt("high")


def test_the_log_replays_to_the_same_checks() -> None:
    """Orders and results follow from the events alone."""
    pool = Sites("a", "b")
    pool.closed["b", "a"] = "timed out after 3 s"
    pool.submit("j", plan("a", "b"))
    pool.check()
    again = Coordinator.replay(pool.log, RULES)
    assert again.state.clusters == pool.coordinator.state.clusters
    assert again.job_view("j") == pool.coordinator.job_view("j")


LIMIT_S = RULES.peer_check_timeout_s


def test_an_agent_that_never_dials_is_named_after_the_limit_and_the_job_is_tried_again() -> None:
    """The reason names both sites and what to do; no chips are held; the job starts once the agent dials."""
    pool = Sites("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.check("a")
    for _ in range(3):
        pool.wait(LIMIT_S)
    assert pool.reason("j") == (
        "site b has not tried to reach site a within 30 s; look at the log of the agent of b, and restart it"
    )
    assert pool.state("j") == "waiting"
    assert pool.coordinator.pool_view().clusters[0].free_chips == {"g": 4}
    pool.wait(RETRY_S)
    pool.check()
    assert pool.state("j") == "preparing"


def test_a_site_that_opens_no_listener_is_the_one_that_is_named() -> None:
    """The other site cannot dial a port that it does not know."""
    pool = Sites("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.check("b")
    pool.wait(LIMIT_S + 1)
    assert pool.reason("j").startswith("site a has not opened a port for site b within 30 s; look at the log of the")


def test_the_limit_begins_when_a_job_waits_and_again_when_an_agent_restarts() -> None:
    """Time before the first job, and time of an agent that has ended, do not count."""
    pool = Sites("a", "b")
    pool.wait(10 * LIMIT_S)
    pool.submit("j", plan("a", "b"))
    pool.wait(LIMIT_S)
    pool.join("b", incarnation="2")
    pool.wait(LIMIT_S)
    assert pool.reason("j") == "waits for the check that b reaches a"
    pool.wait(1)
    assert "within 30 s" in pool.reason("j")


def test_a_site_that_is_away_has_the_whole_limit_when_it_is_back() -> None:
    """1. A job waits for a check. 2. The site is lost, for longer than the limit. 3. It reports again."""
    pool = Sites("a", "b")
    pool.submit("j", plan("a", "b"))
    pool.tell(AgentLost(now_s=pool.now_s, cluster="b"))
    pool.now_s += 2 * LIMIT_S
    pool.report("a")
    pool.report("b")
    assert not [one for one in pool.coordinator.due_events(pool.now_s) if isinstance(one, PeerCheckTimedOut)]
    pool.check()
    assert pool.state("j") == "preparing"


def test_a_job_takes_another_plan_around_two_sites_that_do_not_check() -> None:
    """A candidate plan without the pair starts; a plan that the user chose stays, with the reason."""
    pool = Sites("a", "b", "c")
    pool.check("a", "c")
    plans = plan("a", "b", name="first"), plan("a", "c", name="second")
    pool.submit("j", *plans)
    pool.submit("m", *plans, policy="manual")
    pool.choose("m", "first")
    pool.wait(LIMIT_S + 1)
    job = pool.coordinator.job_view("j")
    assert job.plan is not None
    assert (job.state, job.plan.id) == ("preparing", "second")
    assert "site b has not tried to reach site a within 30 s" in pool.coordinator.state.jobs["j"].last_restart_reason
    assert pool.state("m") == "waiting"
    assert "site b has not tried to reach site a" in pool.reason("m")


def test_a_result_before_the_limit_ends_the_wait() -> None:
    """The event of a limit that comes after the result changes nothing; nor does one of an earlier order."""
    pool = Sites("a", "b")
    pool.submit("j", plan("a", "b"))
    record = pool.coordinator.state.clusters["b"]
    late = PeerCheckTimedOut(now_s=pool.now_s, source="b", target="a", number=record.to_check["a"])
    assert not pool.coordinator.admit(late.model_copy(update={"number": 99}))
    assert pool.coordinator.admit(late)
    pool.check()
    assert not pool.coordinator.admit(late)
    assert record.check_waits == {}


def test_the_log_with_a_silent_site_replays_to_the_same_state() -> None:
    """The limit, the plan around the sites and the next check follow from the events alone."""
    pool = Sites("a", "b", "c")
    pool.check("a", "c")
    pool.submit("j", plan("a", "b", name="first"), plan("a", "c", name="second"))
    pool.submit("k", plan("a", "b", name="only"))
    pool.wait(LIMIT_S + 1)
    pool.wait(RETRY_S)
    again = Coordinator.replay(pool.log, RULES)
    for name, record in pool.coordinator.state.clusters.items():
        assert again.state.clusters[name].peer_results == record.peer_results
        assert again.state.clusters[name].check_waits == record.check_waits
    assert again.state.jobs == pool.coordinator.state.jobs


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": "10.0.0.1"}, "10.0.0.1"),
        ({"host": "10.0.0.1", "first_port": 1, "last_port": 9}, "10.0.0.1:1-9"),
        ({"host": "fe80::1", "first_port": 1, "last_port": 9}, "[fe80::1]:1-9"),
        ({"host": "fe80::1"}, "[fe80::1]"),
    ],
)
def test_an_address_is_written_with_its_ports(fields: dict[str, object], words: str) -> None:
    """Brackets keep the colons of IPv6 from the port; without ports any may be used."""
    assert format_peer_address(PeerAddress.model_validate(fields)) == words
