"""The catalogue over REST and in the log: who adds, sees, grants and removes; what a job pins."""

from __future__ import annotations

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.quotas import Quotas
from isthmus.control.store.snapshot_codec import restore_state, serialize_state
from tests.control.catalogued import SOURCE, addition, manifest
from tests.control.serving import report, submission
from tests.control.test_server_api import Server

WIKI = "/v1/catalogue/data/ann/wiki"


def test_an_entry_has_versions_in_the_order_in_which_they_came(server: Server) -> None:
    """The same version twice changes nothing; an older one that is added again is the newest, with its new source."""
    first, second = addition(), addition(files={"text.txt": b"more text"})
    for one in (first, first, second):
        assert server.call("POST", "/v1/catalogue", one).status_code == 201
    names = [one["version"] for one in server.call("GET", WIKI).json()["versions"]]
    assert names == [first.manifest.version, second.manifest.version]
    moved = first.model_copy(update={"source": "s3://bucket/wiki"})
    assert server.call("POST", "/v1/catalogue", moved).status_code == 201
    versions = server.call("GET", WIKI).json()["versions"]
    assert [one["version"] for one in versions] == [second.manifest.version, first.manifest.version]
    assert versions[-1]["source"] == "s3://bucket/wiki"
    assert versions[-1]["num_bytes"] == len(b"some text")


def test_grants_let_another_user_see_and_use_and_nothing_else(server: Server) -> None:
    """Bob lists and reads what ann granted; grants themselves, changes and removal stay ann's, or an admin's."""
    server.call("POST", "/v1/catalogue", addition())
    assert server.call("GET", "/v1/catalogue/data", token="bob").json() == []
    granted = server.call("POST", f"{WIKI}/grants", {"user": "bob"})
    assert granted.json()["grants"] == ["bob"]
    (seen,) = server.call("GET", "/v1/catalogue/data", token="bob").json()
    assert (seen["owner"], seen["grants"], seen["own"]) == ("ann", [], False)
    assert server.call("GET", f"{WIKI}/manifest", token="bob").json()["files"][0]["path"] == "text.txt"
    for method, path, body in (("POST", f"{WIKI}/grants", {"user": "eve"}), ("DELETE", WIKI, None)):
        assert server.call(method, path, body, token="bob").status_code == 403
    assert server.call("POST", f"{WIKI}/grants", {"user": "bob", "granted": False}, token="root").status_code == 200
    assert server.call("GET", WIKI, token="bob").status_code == 404
    assert server.call("DELETE", WIKI, token="root").status_code == 204
    assert server.call("GET", WIKI).status_code == 404


def test_a_job_pins_the_version_that_it_names_and_its_history_says_so(server: Server) -> None:
    """`catalogue:NAME` becomes owner and full version at submission; a repeated key brings the same job."""
    server.call("POST", "/v1/catalogue", addition())
    server.call("POST", "/v1/catalogue", addition("tiny", kind="model"))
    version, tiny = manifest().version, addition("tiny", kind="model").manifest.version
    named = {
        "model": f"catalogue:tiny@{tiny[:8]}",
        "data": {"paths": ["catalogue:wiki"], "tokenizer": "catalogue:tiny"},
    }
    wish = submission(key="k", **named)
    made = server.call("POST", "/v1/jobs", wish).json()
    assert made["job"]["data"]["paths"] == [f"catalogue:ann/wiki@{version}"]
    assert made["job"]["model"] == made["job"]["data"]["tokenizer"] == f"catalogue:ann/tiny@{tiny}"
    assert server.call("POST", "/v1/jobs", wish).json()["id"] == made["id"]
    other = submission(key="k", **named | {"model": "catalogue:ann/other"})
    assert server.call("POST", "/v1/jobs", other).status_code == 409
    first = server.call("GET", f"/v1/jobs/{made['id']}/history").json()["events"][0]
    assert first["kind"] == "submitted"
    assert f"data ann/wiki@{version}" in first["text"]
    assert f"model ann/tiny@{tiny}" in first["text"]


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"data": {"paths": ["catalogue:none"]}}, 404, "no data 'ann/none'"),
        ({"data": {"paths": ["catalogue:wiki@ffffffff"]}}, 404, "has no version"),
        ({"data": {"paths": ["catalogue:wiki/../x"]}}, 422, "names no entry"),
        ({"model": "catalogue:wiki"}, 404, "no model 'ann/wiki'"),
        ({"output": "catalogue:wiki"}, 422, "entry of the catalogue"),
        ({"data": {"paths": ["text"], "tokenizer": "catalogue:plain"}}, 422, "no tokenizer.json"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(
    server: Server, fields: dict[str, object], status: int, text: str
) -> None:
    """Before the job is stored, with what is wrong."""
    server.call("POST", "/v1/catalogue", addition())
    server.call("POST", "/v1/catalogue", addition("plain", kind="model", files={"config.json": b"{}"}))
    answer = server.call("POST", "/v1/jobs", submission(**fields))
    assert answer.status_code == status
    assert text in answer.text


def test_a_version_in_use_stays(server: Server) -> None:
    """It is removed after the job has ended; a version that no job names can go at any time."""
    used, unused = addition(), addition(files={"text.txt": b"unused"})
    for one in (unused, used):
        server.call("POST", "/v1/catalogue", one)
    job = server.call("POST", "/v1/jobs", submission(data={"paths": ["catalogue:wiki"]})).json()
    refused = server.call("DELETE", f"{WIKI}?version={used.manifest.version[:8]}")
    assert refused.status_code == 409
    assert job["id"] in refused.text
    assert server.call("DELETE", WIKI).status_code == 409
    assert server.call("DELETE", f"{WIKI}?version={unused.manifest.version}").status_code == 204
    server.call("POST", f"/v1/jobs/{job['id']}/cancel")
    assert server.call("DELETE", WIKI).status_code == 204


def test_quotas_bound_what_a_user_adds() -> None:
    """By the number of versions and of files in them; an admin is exempt."""
    small = Server(Quotas(versions_per_user=2, version_files_per_user=4))
    small.shell.start()
    with small.http:
        three = {"a": b"1", "b": b"2", "c": b"3"}
        assert small.call("POST", "/v1/catalogue", addition(files=three)).status_code == 201
        refused = small.call("POST", "/v1/catalogue", addition(files={"a": b"4", "b": b"5"}))
        assert refused.status_code == 429
        assert "would list 5 files" in refused.text
        assert small.call("POST", "/v1/catalogue", addition(files={"a": b"4"})).status_code == 201
        assert "has 2 versions" in small.call("POST", "/v1/catalogue", addition("more")).text
        assert small.call("POST", "/v1/catalogue", addition(files=three)).status_code == 201, "it is there already"
        assert small.call("POST", "/v1/catalogue", addition("more"), token="root").status_code == 201
    small.shell.close()


def test_the_catalogue_is_rebuilt_from_the_log_and_from_a_snapshot(server: Server) -> None:
    """Entries, grants and versions are what they were."""
    server.call("POST", "/v1/catalogue", addition())
    server.call("POST", "/v1/catalogue", addition("tiny", kind="model"))
    server.call("POST", f"{WIKI}/grants", {"user": "bob"})
    server.call("POST", "/v1/catalogue", addition("gone"))
    server.call("DELETE", "/v1/catalogue/data/ann/gone")
    server.sync(report())
    replayed = Coordinator.replay(event for _, event in server.store.events(0))
    assert set(replayed.state.catalogue) == {("data", "ann", "wiki"), ("model", "ann", "tiny")}
    assert replayed.state.catalogue["data", "ann", "wiki"].grants == {"bob"}
    assert set(replayed.state.num_entries) == {
        ("ann", one.version) for one in (manifest(), addition(kind="model").manifest)
    }
    restored = restore_state(serialize_state(replayed.state))
    assert restored.catalogue == replayed.state.catalogue
    assert restored.num_entries == replayed.state.num_entries
    assert restored.catalogue["data", "ann", "wiki"].newest.manifest == manifest()


def test_acts_on_the_catalogue_are_audited(server: Server) -> None:
    """Additions, grants and removals, with who did it to what; also a try on another user's entry."""
    server.call("POST", "/v1/catalogue", addition())
    server.call("POST", f"{WIKI}/grants", {"user": "bob"})
    server.call("GET", "/v1/catalogue/data/ann/wiki", token="bob")
    server.call("POST", f"{WIKI}/grants", {"user": "bob", "granted": False})
    server.call("GET", "/v1/catalogue/data/ann/wiki", token="bob")
    server.call("DELETE", WIKI)
    records = server.call("GET", "/v1/audit", token="root").json()["records"]
    mine = [(one["action"], one["actor"]) for one in records if one["subject"] == "ann/wiki"]
    mine.sort(key=lambda one: one[0] == "refused")  # a refusal is written a moment after the acts
    assert mine == [
        ("version-added", "ann"), ("entry-granted", "ann"), ("grant-revoked", "ann"), ("version-removed", "ann"),
        ("refused", "bob"),
    ]  # fmt: skip


def test_a_source_is_a_folder_without_a_secret() -> None:
    """The URL is stored in the log and shown to grantees, so passwords and signatures are refused."""
    assert addition().source == SOURCE
    assert addition(source="s3://bucket/").source == "s3://bucket"
    for wrong in (
        "/data/wiki", "https://ann:secret@host/x", "https://host/x?X-Amz-Signature=1", "https://host/x#y",
        "file://host/data", "https://host/../x", "https://host/%2E%2e/x", "simplecache::s3://b/x", "https://h/a b",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="source"):
            addition(source=wrong)
