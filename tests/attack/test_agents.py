"""Attacks on the binding of a site to its agent, and by a site on what belongs to others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.agent.service.state_identity import open_identity
from isthmus.control.coordinator.agent_reports import MAX_INCARNATIONS
from isthmus.control.service.agent_sessions import FAULT_PAUSE_S, AgentSessions
from isthmus.control.service.agent_takeover import MAX_REPLACED, AgentTakeover
from isthmus.control.service.change_feed import ChangeFeed
from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.control.service.dry_run_checks import DryRunChecks
from isthmus.control.service.progress_tracker import ProgressTracker
from isthmus.control.simulation.chaos.run_chaos import CONFIG, run_chaos
from isthmus.control.simulation.faults.fault_injector import FAULT_RATES
from isthmus.control.simulation.simulated_server import MemoryLog
from isthmus.control.state.events import SiteEnrolling, SiteGone, encode_event
from isthmus.control.store.leader_election import SingleServer
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import AuthError, ConflictError, UnavailableError
from isthmus.core.messages.agent_messages import (
    LogChunk,
    ObservedPart,
    PartEvent,
    PeerAddress,
    Span,
    StepMetrics,
    WorkerAddress,
)
from tests.control.driver import RULES, Driver, identity, seen
from tests.control.samples import plan
from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server

LEASE_S = RULES.run_lease_s
WORKER = {"rank": 0, "cluster": "east", "host": "h", "port": 1}


def running_at(*sites: str) -> Driver:
    """Job `j` runs at `sites`, whose agents are enrolled and whose workers have a lease."""
    pool = Driver("a", "b", "c")
    pool.run_lease_s = LEASE_S
    for site in ("a", "b", "c"):
        pool.identities[site] = identity(f"folder of {site}")
        pool.report(site)
    pool.submit("j", plan(*sites))
    pool.obey()
    pool.obey()
    assert pool.state("j") == "running"
    return pool


def lose(pool: Driver, site: str) -> None:
    """Let a site fall silent until the server counts it as lost."""
    pool.now_s += RULES.agent_timeout_s + 1
    for name in pool.clusters.keys() - {site}:
        pool.coordinator.record_report(name, pool.now_s)
    for event in pool.coordinator.due_events(pool.now_s):
        pool.tell(event)
    assert not pool.coordinator.state.clusters[site].connected


def live_attempts(pool: Driver) -> set[int]:
    """The attempts of `j` that may have processes, as the server sees it."""
    return {part.attempt for part in pool.coordinator.state.jobs["j"].unreleased_parts() if part.committed}


class _Breaking(CoordinatorActor):
    """An actor whose next requests fail as if an event had ended in an exception."""

    fault: Exception | None = None

    def execute(self, requests: Sequence[ActorRequest]) -> Sequence[ActorRequest]:
        found = super().execute(requests)
        for one in found:
            one.error = one.error or (self.fault if one.make_event else None)
        return found


@pytest.mark.attack
def test_a_report_that_ends_in_an_exception_is_not_repeated_at_once() -> None:
    """Each costs a rebuild of the state: a cluster that found such a report has one a minute, and others go on."""
    store, now_s = MemoryStore(), 1000.0
    actor = _Breaking(store, lambda _: None)
    feed, tracker = ChangeFeed(), ProgressTracker()
    sessions = AgentSessions(
        actor, store, None, lambda: now_s, feed, tracker, SingleServer(), DryRunChecks(lambda: now_s),
        steady_clock=lambda: now_s,
    )  # fmt: skip
    sessions.sync(report(EAST))
    actor.fault = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        sessions.sync(report(EAST))
    actor.fault = None
    with pytest.raises(UnavailableError, match="could not be handled"):
        sessions.sync(report(EAST))
    sessions.sync(report(WEST))
    now_s += FAULT_PAUSE_S
    sessions.sync(report(EAST))


@pytest.mark.attack
def test_an_agent_that_starts_again_and_again_takes_no_memory() -> None:
    """Of an enrolled agent's starts the last ones are remembered; late reports of earlier ones are refused."""
    pool = Driver("a")
    for session in range(1, MAX_INCARNATIONS + 50):
        pool.identities["a"] = identity("a", session)
        pool.report("a", incarnation=f"start {session}")
    record = pool.coordinator.state.clusters["a"]
    assert len(record.incarnations) <= MAX_INCARNATIONS
    pool.identities["a"] = identity("a", 3)
    with pytest.raises(AuthError, match="older than what its agent has reported"):
        pool.report("a", incarnation="start 3")
    site = AgentTakeover()
    for number in range(2 * MAX_REPLACED):
        with contextlib.suppress(UnavailableError):
            site.check("a", f"start {number}")
        site.check("a", f"start {number}")
    with pytest.raises(ConflictError):
        site.check("a", f"start {2 * MAX_REPLACED - 2}")


@pytest.mark.attack
def test_an_agent_with_an_empty_state_folder_cannot_release_what_runs() -> None:
    """Another identity of the cluster's owner is refused, also with --enrol, and the attempt stays unreleased."""
    pool = running_at("a")
    for enrols, is_lost, words in (
        (False, False, "bound to agent"),
        (True, False, "in contact"),
        (True, True, "may still"),
    ):
        if is_lost:
            lose(pool, "a")
        pool.identities["a"] = identity("an empty folder", enrols=enrols)
        with pytest.raises(AuthError, match=words):
            pool.report("a", seen("j", 1, "released"), incarnation="2")
    assert pool.state("j") == "running"
    assert live_attempts(pool) == {1}


@pytest.mark.attack
def test_an_agent_without_an_identity_does_not_speak_for_an_enrolled_cluster() -> None:
    """The owner's token alone, as an old agent or a thief has it, is not enough."""
    pool = running_at("a")
    del pool.identities["a"]
    with pytest.raises(AuthError, match="names no identity"):
        pool.report("a", seen("j", 1, "released"), incarnation="2")


@pytest.mark.attack
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (identity("folder of a", session=2, saves=9, machine="another"), "was copied"),
        (identity("folder of a", session=1, saves=9), "is older than"),
        (identity("folder of a", session=2, saves=0), "is older than"),
    ],
    ids=["on another machine", "a second agent of the same session", "restored from a backup"],
)
def test_a_copied_or_restored_state_folder_is_refused(other: object, words: str) -> None:
    """The same key from another machine, in a session that was seen, or with a part table that was newer before."""
    pool = running_at("a")
    pool.identities["a"] = other  # type: ignore[assignment]
    with pytest.raises(AuthError, match=words):
        pool.report("a", seen("j", 1, "released"), incarnation="2")
    assert live_attempts(pool) == {1}


@pytest.mark.attack
def test_a_clone_that_was_booted_elsewhere_waits_while_the_original_reports() -> None:
    """A cloned machine has the same ids and a higher session, but another boot: it may not take over a live site."""
    pool = running_at("a")
    pool.identities["a"] = identity("folder of a", session=2, boot="f" * 64)
    with pytest.raises(UnavailableError, match="another start of this machine"):
        pool.report("a", incarnation="2")
    lose(pool, "a")
    pool.report("a", seen("j", 1, "running"), incarnation="2")
    assert pool.coordinator.state.clusters["a"].connected


def test_a_restarted_agent_and_its_late_reports_are_known() -> None:
    """The same folder in its next session takes over; a late report of the session before changes nothing."""
    pool = running_at("a")
    before = pool.identities["a"]
    pool.identities["a"] = identity("folder of a", session=2)
    pool.report("a", seen("j", 1, "running"), incarnation="2")
    pool.identities["a"] = before
    assert pool.report("a", seen("j", 1, "released"), incarnation="1") == []
    assert live_attempts(pool) == {1}


def test_a_lost_site_ends_with_the_lease_of_its_workers_and_the_job_goes_on_elsewhere() -> None:
    """Nothing starts before lease, drift and margin have passed without contact; then no site blocks the job."""
    pool = running_at("a", "b")
    lose(pool, "a")
    pool.report("b", seen("j", 1, "failed", "lost a peer"))
    pool.report("b", seen("j", 1, "released"))
    assert pool.state("j") == "stopping"
    assert "without contact" in pool.reason("j")
    silent_s = pool.now_s - (pool.coordinator.state.clusters["a"].last_contact_s or 0)
    pool.wait(RULES.lease_wait_s(LEASE_S) - silent_s - 0.1)
    assert pool.state("j") == "stopping"
    pool.wait(0.2)
    assert pool.state("j") == "waiting"
    assert live_attempts(pool) == set()
    pool.report("a", seen("j", 1, "running"))
    assert pool.orders("a")["j", 1] == "released", "what a site brings back is released"


@pytest.mark.attack
def test_a_clock_that_is_set_ends_no_lease() -> None:
    """Leases are measured on a clock that is never set: years forwards lose the agents, and release nothing."""
    pool = running_at("a")
    steady_s = pool.now_s
    years_s = pool.now_s + 1e8
    for event in pool.coordinator.due_events(years_s, steady_s):
        pool.tell(event)
    assert not pool.coordinator.state.clusters["a"].connected
    assert pool.coordinator.due_events(years_s, steady_s + LEASE_S) == ()
    assert live_attempts(pool) == {1}


def test_workers_without_a_lease_are_released_only_by_report_or_by_an_act() -> None:
    """An agent that says that its workers run without limit is believed."""
    pool = running_at("a")
    pool.run_lease_s = 0.0
    pool.report("a", seen("j", 1, "running"))
    lose(pool, "a")
    pool.wait(1e6)
    assert live_attempts(pool) == {1}
    pool.tell(SiteGone(now_s=pool.now_s, cluster="a", by="root"))
    assert live_attempts(pool) == set()


def test_a_restarted_server_waits_for_the_whole_lease_again() -> None:
    """It cannot know when its predecessor heard the site last."""
    pool = running_at("a")
    lose(pool, "a")
    again = pool.coordinator.replay(pool.log, RULES)
    assert all(event.kind != "run-lease-ended" for event in again.due_events(pool.now_s + 1e6))


@pytest.mark.attack
def test_a_site_that_was_declared_gone_never_speaks_again() -> None:
    """Its parts are released at once; its agent comes back and is refused; a new one enrols by an act only."""
    pool = running_at("a")
    with pytest.raises(ConflictError, match="in contact"):
        pool.tell(SiteGone(now_s=pool.now_s, cluster="a", by="root"))
    lose(pool, "a")
    pool.tell(SiteGone(now_s=pool.now_s, cluster="a", by="root"))
    assert live_attempts(pool) == set()
    for more in ({}, {"enrols": True, "session": 2}):
        pool.identities["a"] = identity("folder of a", **more)  # type: ignore[arg-type]
        with pytest.raises(AuthError, match="declared gone"):
            pool.report("a", seen("j", 1, "running"))
    pool.identities["a"] = identity("a new folder")
    with pytest.raises(AuthError, match="its state folder is new"):
        pool.report("a", incarnation="3")
    pool.identities["a"] = identity("a new folder", enrols=True)
    pool.report("a", incarnation="3")
    assert pool.coordinator.state.clusters["a"].connected


def test_enrolment_is_agreed_to_only_once_nothing_can_run() -> None:
    """`isthmus site enrol` is refused while the agent is in contact or its parts may run, and then holds once."""
    pool = running_at("a")
    enrolling = SiteEnrolling(now_s=pool.now_s, cluster="a", by="owner-a")
    with pytest.raises(ConflictError, match="in contact"):
        pool.tell(enrolling)
    lose(pool, "a")
    with pytest.raises(ConflictError, match="may still run"):
        pool.tell(enrolling)
    pool.wait(RULES.lease_wait_s(LEASE_S))
    pool.tell(enrolling)
    pool.identities["a"] = identity("a new folder")
    pool.report("a", incarnation="2")
    lose(pool, "a")
    pool.identities["a"] = identity("another new folder")
    with pytest.raises(AuthError, match="its state folder is new"):
        pool.report("a", incarnation="3")


@pytest.mark.attack
def test_a_site_cannot_send_the_workers_of_others_to_a_foreign_address() -> None:
    """A worker's address is the one that the site was enrolled with, in its range of ports; else its part fails."""
    own = PeerAddress(host="10.0.0.1", first_port=4000, last_port=4009)
    for host, port in (("169.254.169.254", 4000), ("10.0.0.1", 22)):
        pool = Driver("a", "b")
        pool.submit("j", plan("a", "b"))
        pool.addresses["a"] = own
        pool.obey()
        pool.obey("b")
        there = WorkerAddress(rank=0, cluster="a", host=host, port=port)
        pool.report("a", seen("j", 1, "running").model_copy(update={"workers": (there,)}))
        job = pool.coordinator.state.jobs["j"]
        assert job.rank_map is None
        assert pool.state("j") == "stopping"
        assert f"{host}:{port}, which is not the site's own" in job.reason


@pytest.mark.attack
def test_the_address_of_a_site_changes_by_an_act_only() -> None:
    """A report with another host is refused, in the same session and after a restart; --enrol agrees to it."""
    pool = Driver("a")
    pool.identities["a"], pool.addresses["a"] = identity("f"), PeerAddress(host="10.0.0.1")
    pool.report("a")
    pool.addresses["a"] = PeerAddress(host="10.0.0.9")
    with pytest.raises(AuthError, match=r"listen at 10\.0\.0\.1 since its enrolment"):
        pool.report("a")
    pool.identities["a"] = identity("f", session=2)
    with pytest.raises(AuthError, match=r"listen at 10\.0\.0\.1 since its enrolment"):
        pool.report("a", incarnation="2")
    pool.identities["a"] = identity("f", session=2, enrols=True)
    pool.report("a", incarnation="2")
    assert pool.coordinator.state.clusters["a"].peer_address == PeerAddress(host="10.0.0.9")


@pytest.mark.attack
def test_a_copied_state_folder_is_noticed_before_the_agent_touches_it(tmp_path: Path) -> None:
    """A copy on the same machine is another folder; the original goes on, in its next session."""
    first = open_identity(_folder(tmp_path / "state"))
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with pytest.raises(ConflictError, match="was copied or restored"):
        open_identity(tmp_path / "copy")
    again = open_identity(tmp_path / "state")
    assert (again.key, again.machine, again.session) == (first.key, first.machine, first.session + 1)
    (tmp_path / "state").rename(tmp_path / "moved")
    assert open_identity(tmp_path / "moved").key == first.key, "a moved folder is the same folder"


@pytest.mark.attack
def test_only_the_operator_declares_a_site_gone_and_only_its_owner_enrols(server: Server) -> None:
    """A user, another owner and the owner itself get no further than their roles; an unknown site is not found."""
    server.sync(report(EAST, identity=identity("f").model_dump()))
    for token, path, status in (
        ("ann", "east/gone", 403),
        ("owner-east", "east/gone", 403),
        ("ann", "east/enrol", 403),
        ("owner-west", "east/enrol", 404),
        ("owner-east", "east/enrol", 409),
        ("root", "east/gone", 409),
        ("root", "north/gone", 404),
    ):
        assert server.call("POST", f"/v1/sites/{path}", token=token).status_code == status, (token, path)
    server.now_s += 60
    server.shell.tick()
    assert server.call("POST", "/v1/sites/east/gone", token="root").json()["agent"]["gone"]


@pytest.mark.attack
def test_users_do_not_see_agents_nor_what_others_run(server: Server) -> None:
    """The pool as a user sees it has clusters and chips; an agent's id, address and jobs are its owner's."""
    server.sync(report(EAST, identity=identity("f").model_dump()))
    for token, visible in (("ann", False), ("owner-east", True), ("root", True)):
        (view,) = server.call("GET", "/v1/pool", token=token).json()["clusters"]
        assert (view["agent"] is not None) == visible
    assert identity("f").key not in server.call("GET", "/v1/pool", token="root").text


@pytest.mark.attack
def test_the_output_of_a_refused_agent_is_not_stored(server: Server) -> None:
    """It is refused before its metrics and logs are kept; the right agent still reports."""
    found = server.prepared()
    server.sync(report(EAST, identity=identity("f").model_dump()))
    forged = LogChunk(job=found.id, attempt=1, rank=0, offset=0, text="forged")
    other = report(EAST, incarnation="i2", identity=identity("g").model_dump(), logs=(forged,))
    answer = server.call("POST", "/v1/agents/east/sync", other, token="owner-east")
    assert answer.status_code == 403
    assert "its state folder is new" in answer.json()["message"]
    assert server.call("GET", f"/v1/jobs/{found.id}/logs").json()["chunks"] == []
    server.sync(report(EAST, identity=identity("f").model_dump()))


def part_of(job: str, **more: object) -> ObservedPart:
    return ObservedPart.model_validate({"job": job, "attempt": 1, "state": "prepared"} | more)


@pytest.mark.attack
def test_a_site_cannot_silence_the_rank_of_another_site(server: Server) -> None:
    """A chunk at 2^62 for another's rank is dropped, one for its own rank as well; both ranks still write."""
    found, far = server.committed().id, 2**62
    for rank in (0, 1):
        chunk = LogChunk(job=found, attempt=1, rank=rank, offset=far, text="x")
        near = LogChunk(job=found, attempt=1, rank=rank, offset=2**40, text="y")
        server.sync(report(EAST, part_of(found), logs=(chunk, near)))
    for site, rank in ((EAST, 0), (WEST, 1)):
        chunk = LogChunk(job=found, attempt=1, rank=rank, offset=0, text=f"rank {rank}", cluster="forged")
        server.sync(report(site, part_of(found), logs=(chunk,)))
    chunks = server.call("GET", f"/v1/jobs/{found}/logs").json()["chunks"]
    assert [(one["rank"], one["text"], one["cluster"]) for one in chunks] == [
        (0, "rank 0", "east"),
        (1, "rank 1", "west"),
    ]


@pytest.mark.attack
def test_callers_that_a_rank_has_turned_away_are_in_the_audit_log_once(server: Server) -> None:
    """1. A stranger dials a rank: its event is in each report. 2. A second one. 3. Forged ones of another's rank.

    The history of the job, which is short, has none of them.
    """
    found = server.committed().id

    def refusal(number: int, rank: int = 0, detail: str = "refused connections: 3 from 192.0.2.7") -> PartEvent:
        return PartEvent(rank=rank, number=number, kind="refused", time_s=1.0, detail=detail)

    forged = refusal(5, rank=1), refusal(6, rank=7)
    for events in ((refusal(0),), (refusal(0),), (refusal(0), refusal(9, detail="\x1b[2Jagain"), *forged)):
        server.sync(report(EAST, part_of(found, events=events)))
    unknown = ObservedPart(job="another", attempt=1, state="prepared", events=(refusal(20),))
    server.sync(report(EAST, part_of(found), unknown))
    records = server.call("GET", "/v1/audit", token="root").json()["records"]
    assert [(one["subject"], one["detail"]) for one in records if one["action"] == "link-refused"] == [
        (found, "rank 0 at east: refused connections: 3 from 192.0.2.7"),
        (found, "rank 0 at east: ?[2Jagain"),
    ]
    assert "refused connections" not in server.call("GET", f"/v1/jobs/{found}/history").text


@pytest.mark.attack
def test_a_site_reports_metrics_of_its_ranks_and_of_possible_steps_only(server: Server) -> None:
    """Another's rank, an attempt that never was, steps beyond the job's, endless names and lists: all are dropped."""
    found = server.committed().id
    span = Span(kind="f" * 10_000, micro_batch=0, start_s=0, end_s=1)

    def line(**more: object) -> StepMetrics:
        known = {"job": found, "attempt": 1, "rank": 0, "step": 1, "values": {"loss": 1.0}}
        return StepMetrics.model_validate(known | more)

    forged = (
        line(rank=1),
        line(attempt=2),
        line(step=10**12),
        line(step=3),
        line(values={"n" * 10_000: 1.0}),
        line(values={str(number): 1.0 for number in range(1000)}),
        line(spans=(span,)),
        line(job="another"),
    )
    server.sync(report(EAST, part_of(found), metrics=(*forged, line(values={"loss": 2.0}, cluster="west"))))
    stored = server.call("GET", f"/v1/jobs/{found}/metrics").json()["metrics"]
    assert [(one["step"], one["values"], one["cluster"]) for one in stored] == [(1, {"loss": 2.0}, "east")]


@pytest.mark.attack
def test_steps_that_no_job_can_have_reached_by_now_are_dropped(server: Server) -> None:
    """A job of 10^12 steps may have them, but not in its first second; later it may."""
    steps = {"steps": 10**12, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2}
    found = server.committed(training=steps).id
    early = StepMetrics(job=found, attempt=1, rank=0, step=50_000, values={})
    server.sync(report(EAST, part_of(found), metrics=(early,)))
    assert server.call("GET", f"/v1/jobs/{found}/metrics").json()["metrics"] == []
    server.now_s += 60
    server.sync(report(EAST, part_of(found), metrics=(early,)))
    assert len(server.call("GET", f"/v1/jobs/{found}/metrics").json()["metrics"]) == 1


@pytest.mark.attack
def test_a_step_that_the_job_does_not_have_stays_out_of_its_history() -> None:
    """An event of a worker may be shown, without the step."""
    pool = running_at("a")
    told = PartEvent(rank=0, number=0, kind="saved", time_s=pool.now_s, step=10**12)
    pool.report("a", seen("j", 1, "running").model_copy(update={"events": (told,)}))
    entry = pool.coordinator.state.jobs["j"].history.entries[-1]
    assert (entry.kind, entry.step, entry.cluster) == ("checkpoint", None, "a")


@pytest.mark.attack
def test_a_long_detail_does_not_enter_the_log_and_an_equal_report_enters_it_once(server: Server) -> None:
    """8 MB of detail become 2,000 characters in the log, once."""
    found = server.committed().id
    before = server.shell.last_event()
    for _ in range(5):
        server.sync(report(EAST, part_of(found, state="running", detail="x" * 8_000_000)))
    assert server.shell.last_event() == before + 1
    (event,) = [event for number, event in server.store.events() if number == before + 1]
    assert len(encode_event(event)) < 8_000


@pytest.mark.attack
@pytest.mark.parametrize(
    "fields",
    [
        {"incarnation": "i" * 65},
        {"queue": [{"job": "j"}] * 65_537},
        {"parts": [{"job": "j", "attempt": 1, "state": "running", "workers": [WORKER] * 65_537}]},
        {"identity": {"key": "short"}},
        {"run_lease_s": float("1e400")},
    ],
    ids=["incarnation", "queue", "workers", "key", "lease"],
)
def test_an_oversize_report_is_refused_as_a_whole(server: Server, fields: dict[str, object]) -> None:
    """Lists and words of a report have bounds; the server stays up and keeps nothing of it."""
    body = report(EAST).model_dump(mode="json", by_alias=True) | fields
    data = json.dumps(body).replace("Infinity", "1e400")
    headers = {"Authorization": "Bearer owner-east", "Content-Type": "application/json"}
    before = server.shell.last_event()
    assert server.http.post("/v1/agents/east/sync", content=data, headers=headers).status_code in (413, 422)
    assert server.shell.last_event() == before


@pytest.mark.attack
def test_a_cluster_of_endless_groups_is_refused(server: Server) -> None:
    """The inventory is in every report that changes anything."""
    group = EAST.node_groups[0]
    many = tuple(group.model_copy(update={"name": f"g{number}"}) for number in range(300))
    for update in ({"node_groups": many}, {"region": "r" * 1_000_000}):
        wide = report(EAST.model_copy(update=update))
        assert server.call("POST", "/v1/agents/east/sync", wide, token="owner-east").status_code == 422


@pytest.mark.attack
def test_parts_at_other_sites_are_not_moved_by_a_report() -> None:
    """A site that reports a job of another site is ordered to release it, and changes nothing there."""
    pool = running_at("b")
    pool.report("a", seen("j", 1, "released"), seen("j", 7, "succeeded"))
    assert pool.state("j") == "running"
    assert live_attempts(pool) == {1}
    assert pool.orders("a") == {("j", 7): "released"}


def test_output_of_an_earlier_attempt_is_still_accepted() -> None:
    """Its lines arrive after the next attempt has begun, at the site that ran it, and at no other."""
    pool = running_at("a")
    pool.report("a", seen("j", 1, "failed"))
    pool.report("a", seen("j", 1, "released"))
    pool.wait(10)
    job = pool.coordinator.state.jobs["j"]
    assert job.attempt == 2
    assert (job.ranks_ordered(1, "a"), job.ranks_ordered(1, "b"), job.ranks_ordered(2, "a")) == ((0,), (), ())


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.attack
@pytest.mark.slow
def test_no_two_attempts_run_at_once_however_sites_are_lost() -> None:
    """Partitions longer than the lease, with every other fault: no overlap; a server that waits less finds some."""
    rates = {**FAULT_RATES, "partition": 0.02}
    ended, log = 0, MemoryLog()
    for seed in range(6):
        log = MemoryLog()
        assert run_chaos(seed, log, rates).problems == []
        ended += sum(event.kind == "run-lease-ended" for event in log.stored)
    assert ended > 10
    hasty = dataclasses.replace(CONFIG, run_lease_margin_s=-8)
    found = [problem for seed in range(6) for problem in run_chaos(seed, MemoryLog(), rates, hasty).problems]
    assert any("runs beside attempt" in problem for problem in found)
