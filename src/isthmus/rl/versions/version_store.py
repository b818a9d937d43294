"""`VersionStore`: the newest versions of the weights, and their chunks, coded once for all sites."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from isthmus.rl.relay.relay_events import Coding, Version, VersionOffered
from isthmus.rl.versions.weights_stream import Kind, PolicyVersion, bits_of, encode_chunk


class VersionStore:
    """Keeps the last `num_kept` versions; threads may call it."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = max(num_kept, 2)
        self._versions: dict[int, PolicyVersion] = {}
        self._codes: dict[Coding, _Codes] = {}
        self._lock = threading.Lock()

    def add(self, version: PolicyVersion) -> None:
        """Add a version, which is the newest from now on; a trainer that went back may give a step again."""
        named = version.version
        with self._lock:
            for step in [one for one in self._versions if one >= version.step]:
                del self._versions[step]
            self._versions[version.step] = version
            for step in sorted(self._versions)[: -self._num_kept]:
                del self._versions[step]
            names = {one.version for one in self._versions.values()}
            self._codes = {
                coding: codes
                for coding, codes in self._codes.items()
                if names.issuperset(coding) and coding.version.step >= named.step - 1
            }

    def tensors(self, step: int) -> Mapping[str, torch.Tensor] | None:
        """Return the weights after `step` steps, None where they are no longer here."""
        with self._lock:
            found = self._versions.get(step)
            return None if found is None else found.tensors

    @property
    def newest_name(self) -> str:
        """Return the name of the newest version, which its content gives."""
        with self._lock:
            newest = self._versions[max(self._versions)]
        return newest.version.digest

    def newest(self) -> tuple[VersionOffered, bytes]:
        """Return the offer of the newest version, and the digests of its pieces."""
        with self._lock:
            newest = self._versions[max(self._versions)]
            bases = tuple(one.version for one in self._versions.values() if one is not newest)
        return VersionOffered(version=newest.version, bases=bases), newest.digests

    def num_chunks(self, coding: Coding) -> int:
        """Return how many chunks a coding has, 0 for one that cannot be had."""
        with self._lock:
            new = self._find(coding.version)
            return 0 if new is None or not self._has_base(coding) else new.table.num_chunks(coding)

    def chunk(self, coding: Coding, number: int) -> tuple[Kind, bytes] | None:
        """Return kind and content of a chunk; None where a version of it is no longer here."""
        with self._lock:
            new, old = self._find(coding.version), None if coding.base is None else self._find(coding.base)
            if new is None or not self._has_base(coding) or not 0 <= number < new.table.num_chunks(coding):
                return None
            if old is not None:
                codes = self._codes.setdefault(coding, _Codes(coding, new, old))
        if old is not None:
            return codes.chunk(number)
        one = new.table.pieces[number]
        return encode_chunk(bits_of(new.tensors[one.name])[one.start :][: one.num_elements], None)

    def _has_base(self, coding: Coding) -> bool:
        return coding.base is None or self._find(coding.base) is not None

    def _find(self, version: Version) -> PolicyVersion | None:
        found = self._versions.get(version.step)
        return found if found is not None and found.version == version else None


class _Codes:
    """The changes between two versions, each chunk coded when the first site needs it."""

    def __init__(self, coding: Coding, new: PolicyVersion, old: PolicyVersion) -> None:
        self._chunks, self._new, self._old = new.table.chunks(coding), new, old
        self._made: dict[int, tuple[Kind, bytes]] = {}
        self._lock = threading.Lock()

    def chunk(self, number: int) -> tuple[Kind, bytes]:
        with self._lock:
            if number not in self._made:
                one = self._chunks[number]
                of_chunk = slice(one.start, one.start + one.num_elements)
                new, old = (bits_of(version.tensors[one.name])[of_chunk] for version in (self._new, self._old))
                self._made[number] = encode_chunk(new, old)
            return self._made[number]
