"""Attacks on invitations and keys: guessed, stolen and reused codes, names of others, huge and odd inventories."""

from __future__ import annotations

import json

import pytest

from isthmus.control.queries.quotas import Quotas
from isthmus.control.service.access.login_backoff import FREE_FAILURES
from isthmus.core.pool import NodeGroup
from tests.control.joining import NORTH, actions, audit, invite, join, renew, sync
from tests.control.serving import EAST, WEST, cluster, report
from tests.control.test_server_api import Server
from tests.control.test_tenancy import operations

pytestmark = pytest.mark.attack
CODE = "A" * 26


def test_guessed_codes_are_limited_like_any_failed_login_and_recorded(server: Server) -> None:
    """After ten failures the address is answered 429 with a delay; the true code still counts."""
    code = invite(server)
    answers = [join(server, f"{number:026d}") for number in range(int(FREE_FAILURES) + 5)]
    assert {one.status_code for one in answers[: int(FREE_FAILURES) - 1]} == {401}
    assert {one.status_code for one in answers[-3:]} == {429}
    assert int(answers[-1].headers["Retry-After"]) >= 1
    server.shell.gate.report_failures(server.shell.audit.record_failed_login)
    assert "login-failed" in actions(server)
    assert join(server, code).status_code == 200


def test_a_code_joins_one_cluster_once(server: Server) -> None:
    """A thief that comes second is refused and named in the audit log; one that comes first is noticed by the owner."""
    code = invite(server)
    assert join(server, code).status_code == 200
    stolen = join(server, code, "thief")
    assert (stolen.status_code, "was used already" in stolen.json()["message"]) == (409, True)
    other = join(server, code, "thief", cluster("south", "owner-east"))
    assert other.status_code == 409
    assert sync(server, "thief").status_code == 401
    assert [one.cluster.name for one in server.shell.pool().clusters] == ["north"]


def test_a_code_does_nothing_but_join(server: Server) -> None:
    """Every operation of the interface refuses it, and `join` refuses every other token."""
    code = invite(server)
    server.sync(report(EAST))
    before = server.shell.pool()
    entry = {"kind": "data", "owner": "ann", "name": "words", "version": "0" * 64, "account": "user:ann"}
    for method, path in operations():
        if path in ("/v1/health", "/v1/join") or path.startswith("/v1/oidc"):  # for those who have no token yet
            continue
        where = path.format(job_id="j", cluster="east", plan_id="p1", token_id="t-0", party="user", **entry)
        answer = server.call(method, where, {}, token=code)
        assert answer.status_code == 403, (method, path, answer.text)
    for token in ("root", "ann", "owner-east"):
        assert join(server, token).status_code == 403
    assert server.shell.pool() == before
    assert any("does nothing else" in one.detail for one in audit(server))


@pytest.mark.parametrize(
    ("terms", "site", "says"),
    [
        ({}, cluster("south", "owner-west"), "is for a cluster of owner 'owner-east'"),
        ({"cluster": "south"}, NORTH, "is for cluster 'south', not for 'north'"),
        ({"max_chips": 1}, NORTH, "has 2 chips, and the invitation is for 1 at most"),
        ({}, WEST.model_copy(update={"owner": "owner-east"}), "belongs to another owner"),
        ({}, EAST, "a cluster 'east' has joined the pool already"),
    ],
)
def test_a_code_joins_no_cluster_of_others(server: Server, terms: dict[str, object], site: object, says: str) -> None:
    """Owner, name and size are those of the invitation; a name of another cluster is not taken over."""
    server.sync(report(EAST))
    server.sync(report(WEST))
    before = server.shell.pool()
    answer = join(server, invite(server, **terms), site=site)  # type: ignore[arg-type]
    assert answer.status_code in (403, 409), answer.text
    assert says in answer.json()["message"]
    assert server.shell.pool() == before


def test_an_operator_invites_nobody_to_the_cluster_of_another_owner(server: Server) -> None:
    """A mistake of the operator is refused before there is a code."""
    server.sync(report(WEST))
    answer = server.call("POST", "/v1/invitations", {"owner": "owner-east", "cluster": "west"}, token="root")
    assert (answer.status_code, "belongs to owner 'owner-west'" in answer.json()["message"]) == (409, True)
    unknown = server.call("POST", "/v1/invitations", {"owner": "stranger"}, token="root")
    assert unknown.status_code == 422


def test_huge_and_odd_inventories_are_refused_before_they_join(server: Server) -> None:
    """Too many node groups, names with odd characters, numbers out of range, a body without end."""
    code = invite(server)
    group = NORTH.node_groups[0]
    many = tuple(group.model_copy(update={"name": f"g{number}"}) for number in range(300))
    assert join(server, code, site=NORTH.model_copy(update={"node_groups": many})).status_code == 422
    plain = NORTH.model_dump(mode="json", by_alias=True)
    bad = [
        {"name": "no\nrth"}, {"name": "n" * 64}, {"name": "\u202ehtron"}, {"name": "../north"}, {"owner": "a b"},
        {"region": "x" * 5000}, {"node_groups": []}, {"storage_bytes": -1}, {"surplus": 1},
        {"node_groups": [plain["node_groups"][0] | {"nodes": -1}]},
        {"node_groups": [plain["node_groups"][0] | {"chip": "no such chip"}]},
    ]  # fmt: skip
    for change in bad:
        body = {"cluster": plain | change, "key": "0" * 64}
        answer = server.call("POST", "/v1/join", body, token=code)
        assert answer.status_code == 422, (change, answer.text)
    body = {"cluster": plain, "key": "0" * 64, "filler": "x" * (2 << 20)}
    assert server.call("POST", "/v1/join", body, token=code).status_code == 413
    for key in ("", "0" * 63, "G" * 64, "0" * 65):
        assert server.call("POST", "/v1/join", {"cluster": plain, "key": key}, token=code).status_code == 422
    assert server.shell.pool().clusters == ()
    assert join(server, code).status_code == 200, "a mistake does not spend the code"


def test_the_quota_of_an_owner_holds_for_codes_as_well() -> None:
    """Codes are no way around it."""
    server = Server(Quotas(clusters_per_owner=1))
    assert join(server, invite(server)).status_code == 200
    assert join(server, invite(server), "key-2", cluster("south", "owner-east")).status_code == 429


def test_the_key_of_a_site_acts_for_this_site_alone(server: Server) -> None:
    """Not for another site of its owner: no report, no drain, no token of it, and nothing of it is shown."""
    server.sync(report(EAST))
    join(server, invite(server))
    sync(server, "key-1")
    assert sync(server, "key-1", EAST).status_code == 403
    for act in ("cordon", "uncordon", "drain", "leave", "enrol"):
        assert server.call("POST", f"/v1/sites/east/{act}", {}, token="key-1").status_code == 404, act
    assert server.call("POST", "/v1/sites/north/accept", {}, token="key-1").status_code == 403
    assert renew(server, "key-1", "key-2", "east").status_code == 404
    assert renew(server, "owner-east", "key-2").status_code == 403, "a token of the owner is no key of the site"
    pool = server.call("GET", "/v1/pool", token="key-1").json()
    assert [one["cluster"]["name"] for one in pool["clusters"]] == ["north"]
    listed = server.call("GET", "/v1/tokens", token="key-1").json()
    assert [one["site"] for one in listed] == ["north"]
    owners = next(one.id for one in server.store.tokens() if one.role == "owner" and one.name == "owner-east")
    assert server.call("POST", f"/v1/tokens/{owners}/revoke", {}, token="key-1").status_code == 404


def test_a_key_cannot_be_extended_by_rotating_it_as_a_token(server: Server) -> None:
    """Of a site at most two keys count, whoever asks; a key's life is not changed by `token rotate`."""
    join(server, invite(server))
    sync(server, "key-1")
    listed = server.call("GET", "/v1/tokens", token="key-1").json()
    for token in ("key-1", "owner-east", "root"):
        answer = server.call("POST", f"/v1/tokens/{listed[0]['id']}/rotate", {}, token=token)
        assert answer.status_code == 409, token
    for number in range(2, 9):
        assert renew(server, "key-1", f"key-{number}").status_code == 200
        valid = [one for one in server.store.tokens() if one.site == "north" and one.is_valid(server.now_s)]
        assert len(valid) == 2
    assert renew(server, "key-1", "key-2").status_code == 409, "a key that has ended does not come back"
    assert renew(server, "key-1", "root").status_code == 409, "nor is another token made a key"
    server.now_s += 30 * 86400 + 1
    assert sync(server, "key-1").status_code == 401, "a key that is not renewed ends after 30 days"


def test_codes_and_keys_are_in_no_record_of_the_server(server: Server) -> None:
    """Not in the log of events, the audit log, the views or the tokens as they are stored."""
    code = invite(server)
    join(server, code)
    sync(server, "key-1")
    renew(server, "key-1", "key-2")
    events = "".join(event.model_dump_json() for _, event in server.store.events())
    assert "site-joined" in events
    stored = json.dumps([one.model_dump() for one in server.store.tokens()])
    views = server.call("GET", "/v1/invitations", token="root").text + server.call("GET", "/v1/pool", token="root").text
    for text in (events, stored, views, str(audit(server))):
        assert code not in text
        assert "key-1" not in text
        assert "key-2" not in text


def test_a_group_of_a_site_that_joins_is_what_its_agent_reports(server: Server) -> None:
    """Chips that the invitation does not allow are not added by the agent's reports afterwards."""
    join(server, invite(server, max_chips=2))
    grown = NORTH.model_copy(update={"node_groups": (NodeGroup(name="h20", chip="H20", nodes=9, chips_per_node=8),)})
    answer = sync(server, "key-1", grown)
    assert (answer.status_code, "at most" in answer.json()["message"]) == (403, True)
