"""`VersionStore`: the newest versions of the weights, and the chunks of the newest, coded once for all sites."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from isthmus.rl.rollout.weights_stream import PolicyVersion, encode_version

Chunk = tuple[dict[str, Any], bytes]


class VersionStore:
    """Keeps the last `num_kept` versions; threads may call it."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = max(num_kept, 2)
        self._versions: dict[int, PolicyVersion] = {}
        self._digests: dict[int, str] = {}
        self._chunks: dict[tuple[int | None, int], _SharedChunks] = {}
        self._lock = threading.Lock()

    def add(self, version: PolicyVersion) -> None:
        """Add a version, which is the newest from now on; a trainer that went back may give a step again."""
        digest = version.digest()
        with self._lock:
            for step in [one for one in self._versions if one >= version.step]:
                del self._versions[step]
            self._versions[version.step] = version
            self._digests[version.step] = digest
            for step in sorted(self._versions)[: -self._num_kept]:
                del self._versions[step]
            self._chunks.clear()

    def is_known(self, step: int, digest: str) -> bool:
        """Return whether the version after `step` steps is here, and is the one that `digest` names."""
        with self._lock:
            return step in self._versions and self._digests[step] == digest

    def tensors(self, step: int) -> Mapping[str, torch.Tensor] | None:
        """Return the weights after `step` steps, None where they are no longer here."""
        with self._lock:
            found = self._versions.get(step)
            return None if found is None else found.tensors

    def digest(self, step: int) -> str:
        """Return the digest of a version."""
        with self._lock:
            return self._digests[step]

    def newest_from(self, base: int | None) -> tuple[PolicyVersion, int | None, Iterator[Chunk]]:
        """Return the newest version, the base that its chunks change (None: whole), and the chunks."""
        with self._lock:
            newest = self._versions[max(self._versions)]
            known = base if base in self._versions else None
            key = known, newest.step
            if key not in self._chunks:
                old = None if known is None else self._versions[known]
                self._chunks[key] = _SharedChunks(encode_version(newest, old))
            return newest, known, iter(self._chunks[key])


class _SharedChunks:
    """Chunks that several threads read, each coded when the first of them needs it."""

    def __init__(self, source: Iterator[Chunk]) -> None:
        self._source, self._made = source, list[Chunk]()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Chunk]:
        number = 0
        while True:
            with self._lock:
                if number == len(self._made):
                    one = next(self._source, None)
                    if one is None:
                        return
                    self._made.append(one)
                chunk = self._made[number]
            yield chunk
            number += 1
