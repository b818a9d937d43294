"""Names and manifests of the catalogue."""

from __future__ import annotations

import json

import pytest

from isthmus.core.catalogue import MAX_FILES, CatalogueName, FileManifest
from isthmus.core.errors import InputError
from tests.control.catalogued import manifest


def test_a_version_is_the_digest_of_paths_sizes_and_digests() -> None:
    """It changes with each of them, and a manifest survives its canonical form."""
    one = manifest({"a.txt": b"1", "b/c.txt": b"2"})
    others = [
        manifest({"a.txt": b"1"}),
        manifest({"a.txt": b"2", "b/c.txt": b"2"}),
        manifest({"a": b"1", "b/c.txt": b"2"}),
    ]
    assert len({one.version, *(other.version for other in others)}) == 4
    assert FileManifest.from_canonical(one.canonical) == one
    assert json.loads(one.canonical)[0][:2] == ["a.txt", 1]


@pytest.mark.parametrize(
    "text",
    [
        "wiki",
        "catalogue:",
        "catalogue:a/b/c",
        "catalogue:a@xyz",
        "catalogue:../a",
        "catalogue:a@1234567",
        "catalogue:a b",
    ],
)
def test_other_words_are_no_names(text: str) -> None:
    """An owner, a name and at least eight digits of a version, each of the pool's form of names."""
    with pytest.raises(InputError, match="names no entry"):
        CatalogueName.parse(text)


def test_a_name_may_leave_out_owner_and_version() -> None:
    """Both are given in a pinned name, which reads back as it was written."""
    assert CatalogueName.parse("catalogue:wiki") == CatalogueName(name="wiki")
    full = CatalogueName(owner="ann", name="wiki", version="0" * 64)
    assert CatalogueName.parse(str(full)) == full
    assert (full.is_pinned, CatalogueName.parse("catalogue:ann/wiki@00000000").is_pinned) == (True, False)


def test_a_manifest_has_bounded_files() -> None:
    """More than the limit is refused, and so is none."""
    row = {"num_bytes": 1, "sha256": "0" * 64}
    for number in (0, MAX_FILES + 1):
        with pytest.raises(ValueError, match="files"):
            FileManifest.model_validate({"files": [{"path": f"f{n:05}"} | row for n in range(number)]})
