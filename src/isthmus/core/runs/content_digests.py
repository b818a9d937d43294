"""`content_digests`: digests of the files that decide a job's result, as far as this machine sees them."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from isthmus.core.job import Job

_SAMPLE_BYTES = 64 << 10
"""Bytes that are read at the begin and at the end of a file of weights."""


def content_digests(job: Job) -> dict[str, str]:
    """Return the digest of the tokenizer, and of the weights where the task loads them, by field of the identity.

    Weights are sampled: name, size, begin and end of each file. Missing files and URLs are absent.
    """
    found: dict[str, str] = {}
    with suppress(OSError):
        if job.data.tokenizer_path is not None:
            given = Path(job.data.tokenizer_path)
            file = given / "tokenizer.json" if given.is_dir() else given
            with file.open("rb") as stream:
                found["data.tokenizer_sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(OSError):
        if job.task != "pretrain" and (digest := _weights_digest(Path(job.model))):
            found["model.weights_sha256"] = digest
    return found


def _weights_digest(model: Path) -> str:
    """Return a digest of the samples of all `*.safetensors` of a model's folder; empty without one."""
    folder = model if model.is_dir() else model.parent
    files = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""
