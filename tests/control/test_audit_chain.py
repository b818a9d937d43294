"""The chain of the audit log: what `check_audit` finds, and that an act and its line are durable together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cli.commands.operations.audit_anchor import read_anchor, write_anchor
from isthmus.control.rest.create_app import create_app
from isthmus.control.service.auth import Caller
from isthmus.control.service.control_service import ControlService
from isthmus.control.state.events import Event, NoticeDue
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import ConflictError, FileError, UnavailableError
from isthmus.core.messages.agent_messages import ObservedPart
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from isthmus.core.views.audit_chain import PRUNED, AuditEnd, check_audit, line_end
from tests.control.serving import EAST, WEST, plan_across, report, submission
from tests.control.test_server_api import Server

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
RECORDS = st.builds(
    AuditRecord, at_s=st.floats(0, 2e9), action=st.sampled_from(["refused", "signed-in"]), actor=TEXTS, subject=TEXTS,
    detail=TEXTS, address=TEXTS,
)  # fmt: skip


def stored(records: Sequence[AuditRecord]) -> tuple[str, list[AuditRecord]]:
    """Return the identity of a store and its lines."""
    store = MemoryStore()
    store.append_audit(records)
    return store.store_id, list(store.audit(AuditFilter(), limit=10_000, oldest=True))


Change = Callable[[list[AuditRecord], int], list[AuditRecord]]
CHANGES: dict[str, Change] = {
    "changed": lambda lines, at: [*lines[:at], lines[at].model_copy(update={"actor": "x!"}), *lines[at + 1 :]],
    "later": lambda lines, at: [*lines[:at], lines[at].model_copy(update={"at_s": -1.0}), *lines[at + 1 :]],
    "missing": lambda lines, at: [*lines[:at], *lines[at + 1 :]],
    "swapped": lambda lines, at: [*lines[: at - 1], lines[at], lines[at - 1], *lines[at + 1 :]] if at else lines[::-1],
    "doubled": lambda lines, at: [*lines[:at], lines[at], lines[at], *lines[at + 1 :]],
    "cut off": lambda lines, at: lines[:at],
    "headless": lambda lines, at: lines[at + 1 :],
}


@given(records=st.lists(RECORDS, min_size=2, max_size=8), at=st.integers(0, 7), how=st.sampled_from(sorted(CHANGES)))
def test_every_change_of_a_log_is_found(records: list[AuditRecord], at: int, how: str) -> None:
    """A changed, missing, swapped, doubled or cut-off line is a problem; the log as it was written has none."""
    store_id, lines = stored(records)
    end = line_end(lines[-1])
    sound = check_audit(store_id, lines, end)
    assert (sound.problems, sound.num_lines, sound.end) == ((), len(lines), end)
    forged = CHANGES[how](lines, at % len(lines))
    found = check_audit(store_id, forged, end)
    assert found.problems, (how, at)
    assert check_audit("0" * 32, lines).problems, "the log of one store is none of another"


@given(records=st.lists(RECORDS, min_size=1, max_size=8), num_old=st.integers(1, 8))
def test_lines_that_leave_for_their_age_leave_a_sound_log(records: list[AuditRecord], num_old: int) -> None:
    """Pruning keeps the chain; the same lines removed by other means break it."""
    store = MemoryStore()
    old = min(num_old, len(records))
    store.append_audit([one.model_copy(update={"at_s": float(i >= old) * 5}) for i, one in enumerate(records)])
    before = store.audit(AuditFilter(), limit=100, oldest=True)
    store.prune_audit(3.0, 9.0)
    lines = store.audit(AuditFilter(), limit=100, oldest=True)
    assert check_audit(store.store_id, lines, line_end(before[-1])).problems == ()
    assert (lines[-1].action, lines[-1].subject) == (PRUNED, str(old))
    if len(lines) > 1:
        assert check_audit(store.store_id, lines[1:]).problems, "one more line is missing at the beginning"
    store.prune_audit(3.0, 9.0)
    assert len(store.audit(AuditFilter(), limit=100)) == len(lines), "nothing is left to prune"


def test_problems_name_the_line_and_are_bounded() -> None:
    """The first problems are listed, the rest is counted; the sound end stands before the first one."""
    store_id, lines = stored([AuditRecord(at_s=float(i), action="refused") for i in range(60)])
    forged = [one.model_copy(update={"detail": "x"}) if i >= 10 else one for i, one in enumerate(lines)]
    found = check_audit(store_id, forged)
    assert found.problems[0] == "line 11 or the one before it was changed"
    assert (found.problems[-1], found.end.number) == ("and 30 more", 10)
    missing = check_audit(store_id, [*lines[:5], *lines[9:]])
    assert missing.problems == ("line 10 does not follow line 5: lines are missing between them",)


# What each request that changes something is called in the audit log; None: it changes nothing.
ACTS: dict[tuple[str, str], str | None] = {
    ("POST", "/v1/jobs"): "job-submitted",
    ("POST", "/v1/jobs:bulk"): "job-submitted",
    ("POST", "/v1/jobs:dry-run"): None,
    ("POST", "/v1/jobs:read"): None,
    ("DELETE", "/v1/jobs/{job_id}"): "job-deleted",
    ("POST", "/v1/jobs/{job_id}/choose"): "plan-chosen",
    ("POST", "/v1/jobs/{job_id}/plans/{plan_id}/check"): None,
    ("POST", "/v1/jobs/{job_id}/preempt"): "job-preempted-others",
    ("POST", "/v1/jobs/{job_id}/cancel"): "job-cancelled",
    ("POST", "/v1/pool/unknown-jobs/{job_id}/end"): "unknown-job-ended",
    ("POST", "/v1/agents/{cluster}/sync"): "site-registered",
    ("POST", "/v1/agents/{cluster}/left"): "site-left",
    ("POST", "/v1/agents/{cluster}/key"): "key-renewed",
    ("POST", "/v1/sites/{cluster}/gone"): "site-gone",
    ("POST", "/v1/sites/{cluster}/enrol"): "site-enrolling",
    ("POST", "/v1/sites/{cluster}/cordon"): "site-cordoned",
    ("POST", "/v1/sites/{cluster}/uncordon"): "site-uncordoned",
    ("POST", "/v1/sites/{cluster}/drain"): "site-draining",
    ("POST", "/v1/sites/{cluster}/leave"): "site-leaving",
    ("POST", "/v1/sites/{cluster}/accept"): "site-accepted",
    ("POST", "/v1/invitations"): "site-invited",
    ("POST", "/v1/join"): "site-joined",
    ("POST", "/v1/tariffs"): "tariff-published",
    ("POST", "/v1/quotas"): "quotas-set",
    ("POST", "/v1/quotas/{account}"): "quotas-set",
    ("POST", "/v1/oidc/begin"): None,
    ("POST", "/v1/oidc/session"): "signed-in",
    ("POST", "/v1/oidc/device"): None,
    ("POST", "/v1/oidc/device/token"): "signed-in",
    ("POST", "/v1/tokens"): "token-created",
    ("POST", "/v1/tokens/{token_id}/revoke"): "token-revoked",
    ("POST", "/v1/tokens/{token_id}/rotate"): "token-rotated",
    ("POST", "/v1/tokens/{token_id}/grant"): "high-priority-granted",
    ("POST", "/v1/catalogue"): "version-added",
    ("POST", "/v1/catalogue/{kind}/{owner}/{name}/grants"): "entry-granted",
    ("DELETE", "/v1/catalogue/{kind}/{owner}/{name}"): "version-removed",
    ("PUT", "/v1/subscription"): "subscribed",
    ("DELETE", "/v1/subscription"): "unsubscribed",
    ("POST", "/v1/session"): "signed-in",
    ("DELETE", "/v1/session"): "signed-out",
}


def test_every_request_that_changes_something_has_an_act() -> None:
    """A new request has a name in the audit log, is in the guide, or is said to change nothing."""
    paths = create_app(ControlService(MemoryStore(), planner=plan_across)).openapi()["paths"]
    changing = {(method.upper(), path) for path, item in paths.items() for method in item if method != "get"}
    assert changing == set(ACTS)
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "access.md").read_text()
    assert [act for act in {*ACTS.values()} if act and f"`{act}`" not in guide] == []


def lines_of(server: Server) -> list[tuple[str, str, str]]:
    """Return act, actor and subject of the lines that the store has now, without waiting for any."""
    return [(one.action, one.actor, one.subject) for one in server.store.audit(AuditFilter(), limit=1000)]


def test_an_answered_act_is_in_the_log_already(server: Server) -> None:
    """Each line is in the store when the request returns, since it is written with the act."""
    assert server.submit(key="once").id == server.submit(key="once").id
    job_id = server.submit(key="once").id
    server.call("POST", "/v1/jobs:bulk", {"submissions": [submission().model_dump(mode="json")] * 2})
    server.call("POST", f"/v1/jobs/{job_id}/cancel", token="root")
    server.call("POST", f"/v1/jobs/{job_id}/cancel", token="root")
    server.call("DELETE", f"/v1/jobs/{job_id}")
    made = server.call("POST", "/v1/tokens", {"role": "user", "name": "carl"}, token="root").json()["id"]
    acts = lines_of(server)
    assert acts.count(("job-submitted", "ann", job_id)) == 1, "a repeated submission is one act"
    assert [one[0] for one in acts].count("job-submitted") == 3
    assert acts.count(("job-cancelled", "root", job_id)) == 1, "a repeated cancel changes nothing"
    assert [acts[-2], acts[-1]] == [("job-deleted", "ann", job_id), ("token-created", "root", made)]
    assert check_audit(server.store.store_id, server.store.audit(AuditFilter(), limit=1000)).problems == ()


def test_what_an_agent_refuses_is_in_the_log_with_its_reason(server: Server) -> None:
    """A part that a site refuses, once; and the first report of an agent."""
    job_id = server.prepared().id
    refused = ObservedPart(job=job_id, attempt=1, state="refused", detail="user ann is blocked here")
    for _ in range(2):
        server.sync(report(EAST, refused))
    found = [one for one in server.store.audit(AuditFilter()) if one.action == "part-refused"]
    assert [(one.actor, one.role, one.subject) for one in found] == [("owner-east", "owner", job_id)]
    assert found[0].detail == "attempt 1 at east: user ann is blocked here"
    assert {one for one in lines_of(server) if one[0] == "site-registered"} == {
        ("site-registered", "owner-east", "east"), ("site-registered", "owner-west", WEST.name),
    }  # fmt: skip


class FullDisk(MemoryStore):
    """A store that stores nothing while `full`."""

    full = False

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        if self.full:
            raise UnavailableError("the disk is full")
        return super().append(events, expected_last, audit, notices)


@pytest.mark.attack
def test_an_act_that_is_not_stored_has_no_line() -> None:
    """The request fails, and the log does not claim what has not happened."""
    store = FullDisk()
    full = ControlService(store, planner=plan_across)
    before, store.full = store.audit(AuditFilter()), True
    caller = Caller(role="user", name="ann")
    request = full.submissions.submit_request("ann", submission(), caller=caller)
    assert isinstance(full.execute([request])[0].error, UnavailableError)
    assert store.audit(AuditFilter()) == before
    full.close()


def test_an_anchor_is_of_one_store_and_bounded(tmp_path: Path) -> None:
    """What is noted is read back; a file that is no anchor, or another store's, is refused with what to do."""
    file, end = tmp_path / "anchor.json", AuditEnd(7, bytes(range(32)))
    assert read_anchor(file, "s-1") is None
    write_anchor(file, "s-1", end)
    assert read_anchor(file, "s-1") == end
    with pytest.raises(ConflictError, match="anchor of store s-1"):
        read_anchor(file, "s-2")
    for wrong in (
        b"",
        b"{}",
        b'{"store": "s-1", "last_line": 0, "last_hash": ""}',
        b"\xff" * 10,
        b"x" * 5000,
        b"[" * 900,
    ):
        file.write_bytes(wrong)
        with pytest.raises(FileError):
            read_anchor(file, "s-1")


def test_a_log_survives_a_reopening_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    """The chain begins with the identity of the file, and continues after each start."""
    for number in range(3):
        store = SqliteStore(tmp_path / "isthmus.db")
        store.append_audit([AuditRecord(at_s=float(number), action="refused")])
        lines = store.audit(AuditFilter(), oldest=True)
        store.close()
        assert [one.number for one in lines] == list(range(1, number + 2))
        assert check_audit(store.store_id, lines).problems == ()
