"""Attacks on the catalogue: entries of others, crafted manifests, a site's cache, and addresses that a site reaches."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.files.version_fetcher import MIN_BYTES, MIN_BYTES_S, TURN_S, VersionFetcher
from isthmus.core.catalogue import FileManifest
from isthmus.core.errors import InputError
from isthmus.core.job import DataConfig
from isthmus.core.network.address_rules import allowed_address
from isthmus.core.owner.owner_policy import FetchPolicy, OwnerPolicy
from isthmus.core.rights.storage_rules import StorageRules
from tests.agent.bringing import LOCAL, Site
from tests.agent.file_server import serving
from tests.attack.conftest import server
from tests.control.catalogued import addition, held, key, manifest
from tests.control.serving import job, report, submission
from tests.control.test_server_api import Server

__all__ = ["server"]
pytestmark = pytest.mark.attack
WIKI = "/v1/catalogue/data/ann/wiki"
SECRET = b"ann's secret text"
OF = manifest({"a.txt": SECRET})


def test_another_users_entry_does_not_exist_whatever_is_asked(server: Server) -> None:
    """Each endpoint answers bob as for an entry that there is not, word by word; so does a job that names it."""
    server.call("POST", "/v1/catalogue", addition())
    version = addition().manifest.version
    asks = (
        ("GET", "", None), ("GET", "/manifest", None), ("GET", f"/manifest?version={version}", None),
        ("POST", "/grants", {"user": "bob"}), ("DELETE", "", None), ("DELETE", f"?version={version[:8]}", None),
    )  # fmt: skip
    for method, rest, body in asks:
        answers = [
            server.call(method, f"/v1/catalogue/data/ann/{name}{rest}", body, token="bob") for name in ("wiki", "none")
        ]
        assert [one.status_code for one in answers] == [404, 404]
        assert answers[0].text.replace("wiki", "none") == answers[1].text
    for name in ("catalogue:ann/wiki", f"catalogue:ann/wiki@{version}"):
        refused = server.call("POST", "/v1/jobs", submission(data={"paths": [name]}), token="bob")
        assert refused.status_code == 404
        assert version not in refused.text.replace(name, "")
    assert server.call("GET", WIKI).status_code == 200, "nothing was removed"
    taken_back = (True, False)
    for granted in taken_back:
        server.call("POST", f"{WIKI}/grants", {"user": "bob", "granted": granted})
    assert (
        server.call("POST", "/v1/jobs", submission(data={"paths": ["catalogue:ann/wiki"]}), token="bob").status_code
        == 404
    )


def test_who_names_the_digests_of_anothers_version_owns_a_version_of_its_own(server: Server) -> None:
    """Bob adds ann's manifest with a source of his: neither her entry nor what sites have of it is his or changes."""
    server.call("POST", "/v1/catalogue", addition())
    of = addition().manifest
    server.sync(report(copies=[held("ann", of).model_dump()]))
    assert server.call("GET", WIKI).json()["versions"][0]["copies"][0]["complete"]
    mine = server.call("POST", "/v1/catalogue", addition(source="https://evil.example.org/x"), token="bob").json()
    assert mine["owner"] == "bob"
    assert mine["versions"][0]["copies"] == [], "it does not show that ann has such files, or where"
    assert server.call("GET", WIKI).json()["versions"][0]["source"] == addition().source
    assert server.call("DELETE", "/v1/catalogue/data/bob/wiki", token="bob").status_code == 204
    assert server.sync(report(copies=[held("ann", of).model_dump()])).drop_copies == ()


def test_an_agent_gets_the_manifests_of_what_it_was_ordered_only(server: Server) -> None:
    """Neither another site, nor another owner, nor this site before and after the job."""
    server.call("POST", "/v1/catalogue", addition())
    of = addition().manifest
    path = f"/v1/agents/east/versions/ann/{of.version}"
    server.sync(report(copies=[]))
    assert server.call("GET", path, token="owner-east").status_code == 404
    for token in ("owner-west", "bob", "ann", None):
        assert server.call("GET", path, token=token).status_code in (401, 403, 404)


@pytest.mark.parametrize(
    "path",
    [
        "../up", "/etc/passwd", "a/../../b", "a//b", "./a", "a/.", "", "a\\..\\b", "C:/x", "a\0b", "a\nb", "x" * 300,
        "\u202etxt.exe", "a/" * 600 + "b",
    ],
)  # fmt: skip
def test_a_path_of_a_manifest_names_a_file_below_its_folder(path: str) -> None:
    """Anything else is refused by the model that server, agent and client read manifests with."""
    with pytest.raises(ValueError, match=r"path|name|part|character|backslash|at least|at most"):
        FileManifest.model_validate({"files": [{"path": path, "num_bytes": 1, "sha256": "0" * 64}]})


@pytest.mark.parametrize(
    "files",
    [
        [("a", 1, "0" * 64), ("a", 1, "1" * 64)],
        [("a", 1, "0" * 64), ("a/b", 1, "1" * 64)],
        [("b", 1, "0" * 64), ("a", 1, "1" * 64)],
        [("a", -1, "0" * 64)],
        [("a", 2**63, "0" * 64)],
        [("a", 2**50, "0" * 64), ("b", 2**50, "1" * 64)],
        [("a", 1, "../../../../etc/passwd")],
        [("a", 1, "A" * 64)],
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(server: Server, files: list[tuple[str, int, str]]) -> None:
    """Files twice or inside files, sizes beyond any disk, digests that are paths: at the edge, before the log."""
    rows = [{"path": path, "num_bytes": size, "sha256": digest} for path, size, digest in files]
    body = {"kind": "data", "name": "x", "source": "https://h/x", "manifest": {"files": rows}}
    assert server.call("POST", "/v1/catalogue", body).status_code == 422
    assert server.call("GET", "/v1/catalogue/data").json() == []


def test_an_announced_size_beyond_the_cache_takes_no_byte(tmp_path: Path) -> None:
    """A manifest of 1 TB is refused before anything is asked for."""
    of = FileManifest.model_validate({"files": [{"path": "a", "num_bytes": 10**12, "sha256": "0" * 64}]})
    with serving({"a": b"x"}) as source:
        site = Site(tmp_path)
        assert "exceeds the cache of this site" in site.order(site.need(of, source.url))[of.version].problem
        assert source.requests == []


def test_an_endless_body_ends_at_the_announced_size(tmp_path: Path) -> None:
    """Not a byte beyond the manifest's is kept, and the connection is closed."""
    of = manifest({"a": b"x" * 100_000})
    with serving({}) as source:
        source.endless.add("a")
        site = Site(tmp_path)
        assert "more than the 100000 bytes" in site.order(site.need(of, source.url))[of.version].problem
        assert source.sent < 100 << 20
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) == 0


def test_wrong_content_never_becomes_a_copy(tmp_path: Path) -> None:
    """Of the right size, from the right place: the digest decides; nothing of it is kept."""
    of = manifest({"a": b"right"})
    with serving({"a": b"wrong"}) as source:
        site = Site(tmp_path)
        copy = site.order(site.need(of, source.url))[of.version]
    assert not copy.complete
    assert "SHA-256 differs" in copy.problem
    assert not site.cache.place(key("ann", of)).exists()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_source_that_drips_loses_its_thread(tmp_path: Path) -> None:
    """On the fetcher's clock: fewer than `MIN_BYTES` in `MIN_BYTES_S`, and the tries are counted."""
    of = manifest({"a": os.urandom(3 * MIN_BYTES)})
    site = Site(tmp_path)
    now_s = iter(range(0, 10**9, int(MIN_BYTES_S) + 1))

    class Drip:
        def read(self, *_: object) -> object:
            yield from ((place, b"x") for place in range(10**6))

    fetcher = type(site.fetcher)(
        site.cache,
        Drip(),
        lambda _: of,
        clock=lambda: float(next(now_s)),
        wait=site.waits_s.append,  # type: ignore[arg-type]
    )
    fetcher.update([site.need(of, "https://h/x")])
    assert fetcher.join(60)
    assert "bytes came in" in fetcher.copies()[0].problem
    assert len(site.waits_s) < 10


def test_slow_sources_of_several_owners_delay_others_by_a_turn(tmp_path: Path) -> None:
    """Four owners' sources send just fast enough to keep their places; a fifth owner's version waits for one turn.

    What they have brought so far is kept, and they go on after it.
    """
    block, num_blocks = b"x" * MIN_BYTES, 12
    slow, quick = manifest({"a": block * num_blocks}), manifest({"a": b"ann"})
    lock, now_s, began, places = threading.Lock(), 0.0, threading.Event(), list[tuple[str, int]]()
    late = list[float]()

    class Sources:
        def read(self, _source: str, _path: str, owner: str, present: int) -> Iterator[tuple[int, bytes]]:
            nonlocal now_s
            with lock:
                places.append((owner, present))
            if owner == "ann":
                began.set()
                yield 0, b"ann"
                return
            for number in range(present // MIN_BYTES, num_blocks):
                with lock:
                    waits = now_s > TURN_S and not began.is_set()
                    now_s += 0.0 if waits else 10.0
                if waits and not began.wait(10):
                    late.append(now_s)
                yield number * MIN_BYTES, block

    site = Site(tmp_path)
    manifests = {of.version: of for of in (slow, quick)}
    fetcher = VersionFetcher(
        site.cache,
        Sources(),  # type: ignore[arg-type]
        lambda key: manifests[key.version],
        clock=lambda: now_s,
        wait=site.waits_s.append,
    )
    owners = ["eve", "mallory", "trudy", "oscar"]
    needed = [*(site.need(slow, "https://h/x", owner=one) for one in owners), site.need(quick, "https://h/y")]
    fetcher.update(needed)
    while not all(one.complete for one in fetcher.copies()):
        assert fetcher.join(60)
        fetcher.update(needed)
    assert not late, "the fifth version begins after one turn"
    assert any(owner != "ann" and present for owner, present in places), "a slow one goes on where it was"
    assert len(places) < 40, "turns end only while others wait"


def test_a_digest_is_no_way_to_anothers_file_in_the_cache(tmp_path: Path) -> None:
    """Eve names ann's digest with a source that has no such file: the site asks that source, and she gets nothing."""
    with serving({"a.txt": SECRET}) as hers, serving({}) as eves:
        site = Site(tmp_path)
        assert site.order(site.need(OF, hers.url))[OF.version].complete
        site.order()
        copies = site.order(site.need(OF, eves.url, owner="eve"))
        assert eves.requests == [("a.txt", 0)]
        assert not next(one for one in site.fetcher.copies() if one.owner == "eve").complete
    assert len(copies) == 1
    assert site.tree(OF, "eve") == {}
    assert site.tree(OF) == {"a.txt": SECRET}


@pytest.mark.parametrize("with_roots", [True, False])
def test_no_path_of_a_job_leads_into_the_cache(tmp_path: Path, *, with_roots: bool) -> None:
    """By name, link, glob, a folder above it, or as a source: only versions that the job names, through the server."""
    users = tmp_path / "users"
    (users / "eve").mkdir(parents=True)
    cache = users / "cache"
    rules = StorageRules.model_validate({"roots": [{"path": str(users)}]}) if with_roots else None
    with serving({"a.txt": SECRET}) as hers:
        site = Site(cache, LOCAL.model_copy(update={"schemes": ("http", "file")}), rules)
        assert site.order(site.need(OF, hers.url))[OF.version].complete
    tree = site.cache.place(key("ann", OF))
    (users / "eve" / "link").symlink_to(tree)
    run = {"checkpoints": {"folder": f"{users}/eve/ck"}, "output": f"{users}/eve/out", "model": f"{users}/eve/m"}
    for path in (
        tree,
        tree / "a.txt",
        users / "eve" / "link",
        cache,
        users,
        cache / "objects" / "*" / "*",
        users / "*",
    ):
        wish = job(data=DataConfig(paths=(str(path),)), **run)
        with pytest.raises(InputError):
            site.storage.resolve_job("j", wish, "eve")
    stolen = site.order(site.need(OF, f"file://{tree}", owner="eve"))[OF.version]
    assert site.tree(OF, "eve") == {}
    assert stolen.problem or stolen.owner == "ann"
    named = job(data=DataConfig(paths=(f"catalogue:ann/wiki@{OF.version}",)), **run)
    found, _ = site.storage.resolve_job("j", named, "eve")
    assert found.data.paths == (str(tree),), "the server lets only users with a grant name it"
    unpinned = job(data=DataConfig(paths=("catalogue:ann/wiki",)), **run)
    with pytest.raises(InputError):
        site.storage.resolve_job("j", unpinned, "eve")


def test_a_link_in_the_cache_is_not_followed(tmp_path: Path) -> None:
    """Where the beginning of a file is kept: another file is neither written nor taken for the version's."""
    victim = tmp_path / "victim"
    victim.write_bytes(SECRET)
    place = tmp_path / "cache" / "partial" / "ann"
    place.mkdir(parents=True)
    for link in (victim, tmp_path / "missing"):
        (place / OF.files[0].sha256).symlink_to(link)
        with serving({"a.txt": SECRET[:-1] + b"!"}) as source:
            site = Site(tmp_path / "cache")
            assert not site.order(site.need(OF, source.url))[OF.version].complete
        (place / OF.files[0].sha256).unlink(missing_ok=True)
    assert victim.read_bytes() == SECRET
    assert not (tmp_path / "missing").exists()


FORBIDDEN = (
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "::1", "::", "fe80::1", "fd00:ec2::254", "fec0::1", "::ffff:169.254.169.254", "::ffff:127.0.0.1",
    "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1:0:0:80ff:fffe", "224.0.0.1", "ff02::1",
    "255.255.255.255", "198.18.0.1", "192.0.2.1",
)  # fmt: skip


@pytest.mark.parametrize("address", FORBIDDEN)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    """Loopback, link-local with the metadata of clouds, private, and all forms of IPv6 that lead to them."""
    with pytest.raises(InputError, match="no public address"):
        allowed_address("innocent.example.org", 80, (), lambda *_: [address])
    assert allowed_address("h", 80, (), lambda *_: [address, "93.184.216.34"]) == "93.184.216.34"


def test_the_owner_allows_networks_by_name(tmp_path: Path) -> None:
    """Only those; a policy with something else in the list does not load."""
    assert allowed_address("h", 80, ("10.0.0.0/8",), lambda *_: ["10.1.2.3"]) == "10.1.2.3"
    with pytest.raises(InputError):
        allowed_address("h", 80, ("10.0.0.0/8",), lambda *_: ["11.0.0.1", "192.168.0.1"][1:])
    with pytest.raises(ValueError, match="network"):
        OwnerPolicy.model_validate({"fetch": {"networks": ["everything"]}})


def test_a_url_or_a_redirect_to_this_machine_is_not_followed(tmp_path: Path) -> None:
    """By default no request arrives; with a redirect from an allowed address, none at the second."""
    of = manifest({"a.txt": SECRET})
    with serving({"a.txt": SECRET}) as inner, serving({}) as outer:
        shy = Site(tmp_path / "one", FetchPolicy())
        for url in (
            inner.url,
            f"http://localhost:{inner.port}",
            f"http://2130706433:{inner.port}",
            f"http://[::1]:{inner.port}",
        ):
            problem = shy.order(shy.need(of, url))[of.version].problem
            assert "no public address" in problem or "cannot resolve" in problem
            shy.order()
        outer.redirects["a.txt"] = f"http://127.0.0.2:{inner.port}/a.txt"
        site = Site(tmp_path / "two", FetchPolicy(networks=("127.0.0.1/32",)))
        assert "no public address" in site.order(site.need(of, outer.url))[of.version].problem
        assert outer.requests
        assert inner.requests == []


def test_a_name_is_resolved_once_for_check_and_connection(tmp_path: Path) -> None:
    """A name server that answers something public first and this machine afterwards changes nothing."""
    answers = iter(["93.184.216.34", "127.0.0.1", "127.0.0.1"])
    asked: list[str] = []

    def rebinding(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    of = manifest({"a.txt": SECRET})
    with serving({"a.txt": SECRET}) as source:
        site = Site(tmp_path, LOCAL, resolve=rebinding)
        assert site.order(site.need(of, f"http://files.example.org:{source.port}"))[of.version].complete
        assert asked == ["files.example.org"], "the connection goes to the address that was checked"
        assert source.hosts == [f"files.example.org:{source.port}"]
    assert allowed_address("h", 80, (), lambda *_: [next(answers)]) == "93.184.216.34"


@pytest.mark.parametrize("target", ["ftp://h/a", "file:///etc/passwd", "gopher://h", "//", "http://u:p@h/a", ""])
def test_a_redirect_to_another_scheme_is_refused(tmp_path: Path, target: str) -> None:
    """Only `http` and `https`, as the policy lists them, and without a password."""
    of = manifest({"a.txt": SECRET})
    with serving({}) as source:
        source.redirects["a.txt"] = target
        site = Site(tmp_path)
        copy = site.order(site.need(of, source.url))[of.version]
        assert copy.problem
        assert not copy.complete


def test_redirects_in_a_circle_end(tmp_path: Path) -> None:
    """After a handful of requests."""
    of = manifest({"a.txt": SECRET})
    with serving({}) as source:
        source.redirects["a.txt"] = "/a.txt"
        site = Site(tmp_path)
        assert "redirects more than" in site.order(site.need(of, source.url))[of.version].problem
        assert len(source.requests) == 6


@pytest.mark.parametrize("source", ["file:///etc", "file:///proc/self", "memory://x/y", "ftp://h/x", "sftp://h/x"])
def test_a_source_of_another_kind_needs_the_owners_word(tmp_path: Path, source: str) -> None:
    """With the default policy a site reads neither its own files nor stores with its own credentials."""
    of = manifest({"passwd": b"root"})
    site = Site(tmp_path)
    assert "the site reads URLs of https, http" in site.order(site.need(of, source))[of.version].problem


def test_roots_hold_sources_as_they_hold_paths(tmp_path: Path) -> None:
    """A folder or bucket of another user, also through a link, is outside the roots of the entry's owner."""
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/users/ann/a.txt", SECRET)
    users = tmp_path / "users"
    (users / "ann").mkdir(parents=True)
    (users / "eve").mkdir()
    (users / "ann" / "a.txt").write_bytes(SECRET)
    (users / "eve" / "a.txt").symlink_to(users / "ann" / "a.txt")
    roots = [{"path": f"{users}/{{user}}"}, {"path": "memory://users/{user}", "access": "read"}]
    site = Site(
        tmp_path / "cache", FetchPolicy(schemes=("memory", "file")), StorageRules.model_validate({"roots": roots})
    )
    for source in (f"file://{users}/ann", f"file://{users}/eve", "memory://users/ann"):
        copy = site.order(site.need(OF, source, owner="eve"))[OF.version]
        assert not copy.complete
        assert "outside the storage roots of user 'eve'" in copy.problem
        site.order()
    assert site.order(site.need(OF, "memory://users/ann"))[OF.version].complete
    fsspec.filesystem("memory").rm("/users", recursive=True)


def test_a_false_report_of_copies_gives_a_site_nothing(server: Server) -> None:
    """A site that claims copies of anything learns no source and no name, and costs bounded memory."""
    server.call("POST", "/v1/catalogue", addition())
    claims = [held("ann", addition().manifest).model_dump()]
    claims += [{"owner": f"u{n}", "version": hashlib.sha256(b"%d" % n).hexdigest(), "num_bytes": 1} for n in range(50)]
    orders = server.sync(report(copies=claims))
    assert orders.parts == ()
    assert len(orders.drop_copies) == 50
    assert "files.example.org" not in orders.model_dump_json()
    many = [{"owner": "u", "version": f"{n:064x}", "num_bytes": 1} for n in range(4097)]
    refused = server.call(
        "POST",
        "/v1/agents/east/sync",
        report().model_dump(mode="json", by_alias=True) | {"copies": many},
        token="owner-east",
    )
    assert refused.status_code == 422
