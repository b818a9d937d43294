"""Images are found in an OCI layout by their own words; a layout that was tampered with is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent.containers.read_images import MAX_DOCUMENT_BYTES, TITLE_LABEL, VERSION_LABEL, read_images
from isthmus.core.errors import FileError
from isthmus.render import IMAGE_LABEL

LABELS = {TITLE_LABEL: "isthmus", VERSION_LABEL: "1.2", IMAGE_LABEL: '{"chips": ["H20"]}', "torch": "2.13"}


def write_blob(layout: Path, document: Any) -> dict[str, Any]:
    data = json.dumps(document).encode()
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (layout / "blobs" / "sha256" / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def write_layout(layout: Path, labels: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = {"created": "2026-01-01T00:00:00Z", "config": {"Labels": labels or LABELS, "Env": ["PATH=/bin", "A=b=c"]}}
    manifest = {"config": write_blob(layout, config), "layers": []}
    entry = write_blob(layout, manifest) | changes
    (layout / "index.json").write_text(json.dumps({"manifests": [entry]}))
    return entry


def test_image_of_a_layout(tmp_path: Path) -> None:
    entry = write_layout(tmp_path)
    (image,) = read_images(tmp_path)
    assert (image.reference, image.digest, image.facts.chips) == ("isthmus:1.2", entry["digest"], ("H20",))
    assert image.labels["torch"] == "2.13"
    assert image.environment == {"PATH": "/bin", "A": "b=c"}


def test_image_without_facts_is_left_out(tmp_path: Path) -> None:
    write_layout(tmp_path, {TITLE_LABEL: "debian"})
    assert read_images(tmp_path) == ()


@pytest.mark.attack
def test_document_that_differs_from_its_digest(tmp_path: Path) -> None:
    entry = write_layout(tmp_path)
    (tmp_path / "blobs" / "sha256" / entry["digest"].removeprefix("sha256:")).write_text("{}")
    with pytest.raises(FileError, match="differs from its digest"):
        read_images(tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "md5:00", "", None, 7, "sha256:" + "g" * 64])
def test_digest_that_is_a_path(tmp_path: Path, digest: Any) -> None:
    write_layout(tmp_path, digest=digest)
    with pytest.raises(FileError, match="not a sha256 digest"):
        read_images(tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ('{"manifests": 7}', "not a list"),
        ('{"manifests": [7]}', "not a sha256 digest"),
        ("", "not JSON"),
        (" " * (MAX_DOCUMENT_BYTES + 1), "is larger than"),
    ],
)
def test_malformed_index(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(FileError, match=reason):
        read_images(tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize("facts", ["{", '{"chips": 7}', '{"unknown": 1}', '{"drivers": "$(id)"}', 7, None])
def test_malformed_facts(tmp_path: Path, facts: Any) -> None:
    write_layout(tmp_path, LABELS | {IMAGE_LABEL: facts})
    with pytest.raises(FileError, match=IMAGE_LABEL):
        read_images(tmp_path)


def test_missing_layout(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read") as caught:
        read_images(tmp_path / "none")
    assert caught.value.hint == "is it an OCI layout?"
