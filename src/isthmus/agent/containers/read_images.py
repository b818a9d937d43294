"""`read_images`: the images of an OCI image layout on disk, each verified by its digests.

Source: OCI image specification 1.0.2, https://github.com/opencontainers/image-spec. Name and version are the labels
`org.opencontainers.image.title` and `.version`; the facts for matching are the label `io.isthmus.image`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import FileError
from isthmus.render import IMAGE_LABEL, Image, ImageFacts

TITLE_LABEL, VERSION_LABEL = "org.opencontainers.image.title", "org.opencontainers.image.version"
REFERENCE_ANNOTATION = "org.opencontainers.image.ref.name"

MAX_DOCUMENT_BYTES = 4 << 20
"""Longest index, manifest or configuration that is read."""

MAX_IMAGES = 1024
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def read_images(layout: Path) -> tuple[Image, ...]:
    """Return the images of `layout` that carry `io.isthmus.image`; others are left out.

    Raises `FileError` if a document is missing, too long, malformed, or differs from its digest.
    """
    index = _document(layout / "index.json")
    manifests = index.get("manifests") or []  # null in a new layout
    if not isinstance(manifests, list) or len(manifests) > MAX_IMAGES:
        raise FileError(f"not a list of at most {MAX_IMAGES} images", file=str(layout / "index.json"))
    images = [_read_image(layout, entry) for entry in manifests]
    return tuple(image for image in images if image is not None)


def reference_of(layout: Path, image: Image) -> str:
    """Return the tag of `image` in its layout; raise `FileError` if the layout has it no more."""
    for entry in _document(layout / "index.json").get("manifests") or ():
        if isinstance(entry, dict) and entry.get("digest") == image.digest:
            name = (entry.get("annotations") or {}).get(REFERENCE_ANNOTATION)
            if isinstance(name, str):
                return name
    raise FileError(f"image {image.reference} has no tag", file=str(layout / "index.json"))


def _read_image(layout: Path, entry: Any) -> Image | None:
    manifest = _blob(layout, entry)
    config = _blob(layout, manifest.get("config"))
    inner = config.get("config")
    if not isinstance(inner, dict):
        return None
    labels = inner.get("Labels") or {}
    if not isinstance(labels, dict) or IMAGE_LABEL not in labels:
        return None
    try:
        facts = ImageFacts.model_validate_json(labels[IMAGE_LABEL])
        return Image(
            name=labels.get(TITLE_LABEL, ""),
            version=labels.get(VERSION_LABEL, ""),
            digest=entry["digest"],
            created=str(config.get("created", "")),
            labels={name: text for name, text in labels.items() if name != IMAGE_LABEL},
            environment=dict(line.split("=", 1) for line in inner.get("Env") or () if "=" in line),
            facts=facts,
        )
    except (ValidationError, TypeError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise FileError(
            f"image {labels.get(TITLE_LABEL, entry['digest'])}: label {IMAGE_LABEL}: {reason}",
            file=str(layout),
            hint="build it again with `isthmus images build`",
        ) from error


def _blob(layout: Path, descriptor: Any) -> dict[str, Any]:
    """Return the JSON document of a descriptor; its bytes must have the descriptor's digest."""
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise FileError(f"not a sha256 digest: {str(digest)[:80]!r}", file=str(layout / "index.json"))
    file = layout / "blobs" / "sha256" / digest.removeprefix("sha256:")
    return _document(file, digest)


def _document(file: Path, digest: str | None = None) -> dict[str, Any]:
    try:
        data = read_within(file, MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", file=str(file), hint="is it an OCI layout?") from error
    if digest is not None and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise FileError("its content differs from its digest", file=str(file), hint="copy the image again")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FileError("not JSON", file=str(file)) from error
    if not isinstance(document, dict):
        raise FileError("not a JSON object", file=str(file))
    return document
