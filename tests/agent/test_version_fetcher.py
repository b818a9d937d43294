"""A site brings versions by URL into its cache: once, resumed, checked, bounded, and apart by owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isthmus.agent.files import version_fetcher
from isthmus.agent.files.version_cache import VersionCache
from isthmus.core.owner.owner_policy import FetchPolicy
from isthmus.core.rights.storage_rules import StorageRules
from tests.agent.bringing import LOCAL, Site
from tests.agent.file_server import serving
from tests.control.catalogued import key, manifest

TEXT = {"a.txt": b"first " * 50_000, "part/b c.txt": b"second", "empty": b""}


def test_a_version_is_brought_once_and_appears_as_a_whole(tmp_path: Path) -> None:
    """A second order, and an agent that starts again, ask the source for nothing."""
    of = manifest(TEXT)
    with serving(TEXT) as server:
        site = Site(tmp_path)
        copy = site.order(site.need(of, server.url))[of.version]
        assert (copy.complete, copy.num_bytes, copy.problem) == (True, of.num_bytes, "")
        assert site.tree(of) == TEXT
        assert len(server.requests) == len(TEXT) - 1, "an empty file needs none"
        assert server.hosts[0] == f"127.0.0.1:{server.port}"
        again = Site(tmp_path)
        assert again.order(again.need(of, server.url))[of.version].complete
        assert len(server.requests) == len(TEXT) - 1
    assert all(file.stat().st_mode & 0o222 == 0 for file in tmp_path.rglob("*") if file.is_file())


def test_a_file_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    """By a range; a server without ranges sends it from its beginning."""
    files = {"a.txt": os.urandom(3 << 20)}
    of = manifest(files)
    for has_ranges, second in ((True, 2 << 20), (False, 0)):
        with serving(files) as server:
            server.breaks, server.has_ranges = [2 << 20], has_ranges
            site = Site(tmp_path / str(has_ranges))
            assert site.order(site.need(of, server.url))[of.version].complete
            assert server.requests == [("a.txt", 0), ("a.txt", second)]
            assert site.tree(of) == files


def test_an_agent_that_starts_again_goes_on_with_the_bytes_that_it_has(tmp_path: Path) -> None:
    """The beginning of a file survives; a wrong beginning is found by the digest and brought again."""
    files = {"a.txt": os.urandom(1 << 20)}
    of = manifest(files)
    for number, (begin, requests) in enumerate(((files["a.txt"][:1000], [1000]), (b"wrong" * 200, [1000, 0]))):
        with serving(files) as server:
            cache = VersionCache(tmp_path / str(number), 1 << 30)
            cache.write(key("ann", of), of.files[0], 0, begin)
            site = Site(tmp_path / str(number))
            assert site.order(site.need(of, server.url))[of.version].complete
            assert [first for _, first in server.requests] == requests
            assert site.tree(of) == files


def test_a_new_version_brings_only_what_is_new(tmp_path: Path) -> None:
    """Files that another version of the same owner has are linked, not fetched; equal files of it come once."""
    old = {"a.txt": b"same", "b.txt": b"old"}
    new = {"a.txt": b"same", "b.txt": b"new", "again/b.txt": b"new"}
    with serving(new | {"old/a.txt": b"same", "old/b.txt": b"old"}) as server:
        site = Site(tmp_path)
        site.order(site.need(manifest(old), f"{server.url}/old"))
        server.requests.clear()
        site.order(site.need(manifest(new), server.url))
        assert len(server.requests) == 1
        assert server.requests[0][0].endswith("b.txt")
    assert site.tree(manifest(new)) == new


def test_the_cache_keeps_to_its_bound_and_drops_the_longest_unused(tmp_path: Path) -> None:
    """What parts use stays; what cannot fit beside it is refused before a byte is asked for."""
    sets = [{f"{number}.txt": bytes([number]) * 1000} for number in range(4)]
    of = [manifest(one) for one in sets]
    every = {path: content for one in sets for path, content in one.items()}
    policy = LOCAL.model_copy(update={"cache_bytes": 2500})
    with serving(every) as server:
        site = Site(tmp_path, policy)
        need = [site.need(one, server.url) for one in of]
        site.order(need[0])
        os.utime(site.cache.place(key("ann", of[0])), (1, 1))
        site.order(need[1])
        kept = site.order(need[2])
        assert set(kept) == {of[1].version, of[2].version}
        server.requests.clear()
        full = site.order(need[1], need[2], need[3])
        assert "exceeds the cache of this site by 500 B" in full[of[3].version].problem
        assert server.requests == []
        site.order()
        assert site.order(need[3])[of[3].version].complete, "a later order tries again"
    stored = sum(file.stat().st_size for file in (tmp_path / "objects").rglob("*") if file.is_file())
    assert stored <= 2500


def test_a_removed_version_is_dropped(tmp_path: Path) -> None:
    """With its objects, unless a part still needs it or another version has them."""
    one, two = {"a.txt": b"shared", "b.txt": b"only one"}, {"a.txt": b"shared"}
    with serving(one) as server:
        site = Site(tmp_path)
        needs = [site.need(manifest(files), server.url) for files in (one, two)]
        site.order(*needs)
        gone = key("ann", manifest(one))
        assert set(site.order(*needs, dropped=[gone])) == {manifest(one).version, manifest(two).version}
        assert set(site.order(needs[1], dropped=[gone])) == {manifest(two).version}
    assert len(list((tmp_path / "objects" / "ann").iterdir())) == 1
    assert site.tree(manifest(two)) == two


def test_a_source_that_is_away_is_tried_again_and_then_named(tmp_path: Path) -> None:
    """With rising waits; a file that is not there is a problem at once. A later order tries again."""
    of = manifest({"a.txt": b"text"})
    with serving({"a.txt": b"text"}) as server:
        url = server.url
    site = Site(tmp_path)
    away = site.order(site.need(of, url))[of.version]
    assert "127.0.0.1" in away.problem
    assert site.waits_s == list(version_fetcher.RETRIES_S)
    with serving({}) as empty:
        site.order()
        assert "answered 404" in site.order(site.need(of, empty.url))[of.version].problem
        empty.files["a.txt"] = b"text"
        site.order()
        assert site.order(site.need(of, empty.url))[of.version].complete


def test_a_folder_of_the_site_is_a_source_where_the_roots_of_the_entrys_owner_admit_it(tmp_path: Path) -> None:
    """With roots, `file` needs no mention in the policy; without, it does."""
    (tmp_path / "users" / "ann" / "wiki").mkdir(parents=True)
    (tmp_path / "users" / "ann" / "wiki" / "a.txt").write_bytes(b"text")
    of, source = manifest({"a.txt": b"text"}), f"file://{tmp_path}/users/ann/wiki"
    rules = StorageRules.model_validate({"roots": [{"path": f"{tmp_path}/users/{{user}}"}]})
    inside = Site(tmp_path / "one", rules=rules)
    assert inside.order(inside.need(of, source))[of.version].complete
    unlisted = Site(tmp_path / "two")
    assert "reads URLs of https, http" in unlisted.order(unlisted.need(of, source))[of.version].problem
    listed = Site(tmp_path / "three", FetchPolicy(schemes=("file",)))
    assert listed.order(listed.need(of, source))[of.version].complete


def test_other_schemes_go_through_fsspec_where_the_owner_lists_them(tmp_path: Path) -> None:
    """As object stores do: read from an offset, errors of the store named."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/wiki/a.txt", b"text")
    of = manifest({"a.txt": b"text"})
    site = Site(tmp_path, FetchPolicy(schemes=("memory",)))
    assert site.order(site.need(of, "memory://bucket/wiki"))[of.version].complete
    missing = manifest({"none.txt": b"other"})
    assert "is not there" in site.order(site.need(missing, "memory://bucket/wiki"))[missing.version].problem
    unlisted = Site(tmp_path / "other", LOCAL)
    assert "reads URLs of" in unlisted.order(unlisted.need(of, "memory://bucket/wiki"))[of.version].problem
    store.rm("/bucket", recursive=True)


def test_a_rate_is_measured_and_reported_with_two_digits(tmp_path: Path) -> None:
    """Over versions of a size that says something, on the fetcher's clock."""
    files = {"a.bin": os.urandom(2 << 20)}
    of = manifest(files)
    with serving(files) as server:
        site = Site(tmp_path)
        assert site.fetcher.fetch_gbps is None
        site.order(site.need(of, server.url))
    found = site.fetcher.fetch_gbps
    assert found is not None
    assert found > 0
    assert found == float(f"{found:.2g}")


def test_copies_on_the_way_are_reported_in_tenths(tmp_path: Path) -> None:
    """So that a report changes at most ten times, and never looks complete before it is."""
    files = {"a.txt": os.urandom(100_000), "b.txt": b"gone"}
    of = manifest(files)
    with serving({"a.txt": files["a.txt"]}) as server:
        site = Site(tmp_path)
        copy = site.order(site.need(of, server.url))[of.version]
    assert (copy.complete, copy.num_bytes) == (False, 100_000)
