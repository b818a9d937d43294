"""`ObjectCopies`: the copies of a job's checkpoints in an object store.

    JOB/step-00000200.7f3a/shard-00001-model-00001-of-00001.safetensors    a rank's file, sealed (`object_seal.py`)
    JOB/step-00000200.7f3a/layout.json, JOB/step-00000200.7f3a/manifest.json    sealed as well, the manifest last

A checkpoint whose manifest is there is complete there. 7f3a is its write id, so no object is written twice.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.checkpoint_folder import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    CheckpointFile,
    Manifest,
    checkpoint_name,
)
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    LAYOUT_FILE,
    MAX_LAYOUT_BYTES,
    StoredShard,
    parse_bounded,
)
from isthmus.train.checkpoint.layout.shard_files import ReadAt
from isthmus.train.checkpoint.objects.object_seal import (
    HEAD_BYTES,
    PIECE_BYTES,
    SALT_BYTES,
    ObjectSeal,
    contents_bytes,
    object_refused,
    sealed_bytes,
)
from isthmus.train.checkpoint.objects.object_store import MAX_READ_BYTES, ObjectStore

WriteKey = tuple[int, str]
"""Step and write id of a checkpoint."""

_FOLDER = re.compile(r"step-(\d{8,12})\.([0-9a-f]{1,32})")
_PIECES_PER_READ = MAX_READ_BYTES // (PIECE_BYTES * 2)


class ObjectCopies:
    """The copies of job `run` in `store`, encrypted with the job's `key`.

    An upload takes at most `link_share` of the time of its link. `clock` and `sleep` are in seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: bytes,
        run: str,
        *,
        link_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._key, self._run = store, key, run
        self._link_share, self._clock, self._sleep = link_share, clock, sleep

    def put_file(self, written: WriteKey, file: Path, described: CheckpointFile) -> None:
        """Store a file of a checkpoint; raise `UnavailableError` if that fails or the file is not as described."""
        digest = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            with file.open("rb") as stream:
                for _ in range(0, described.num_bytes, PIECE_BYTES):
                    piece = stream.read(PIECE_BYTES)
                    digest.update(piece)
                    yield piece

        try:
            self._put(self._name(written, file.name), described.num_bytes, pieces())
        except OSError as error:
            raise UnavailableError(f"cannot read {file}: {error.strerror}") from error
        if digest.hexdigest() != described.sha256:
            raise UnavailableError(f"{file} has changed since it was written", hint="check the disk of the site")

    def put_manifest(self, manifest: Manifest, layout: bytes) -> None:
        """Complete a checkpoint whose files are all stored; raises `UnavailableError`."""
        written = (manifest.step, manifest.write_id)
        for name, data in ((LAYOUT_FILE, layout), (MANIFEST_FILE, manifest.model_dump_json().encode())):
            pieces = (data[begin : begin + PIECE_BYTES] for begin in range(0, len(data), PIECE_BYTES))
            self._put(self._name(written, name), len(data), pieces)

    def checkpoints(self) -> list[WriteKey]:
        """Return what the store has folders of, newest first; raises `UnavailableError`."""
        found = (_FOLDER.fullmatch(name) for name in self._store.names(self._run))
        return sorted(((int(one[1]), one[2]) for one in found if one), reverse=True)

    def read_manifest(self, written: WriteKey) -> Manifest | None:
        """Return the manifest of a checkpoint, None without one; raises `UnavailableError` if it is not the job's."""
        name = self._name(written, MANIFEST_FILE)
        data = self._read_whole(name, MAX_MANIFEST_BYTES)
        if data is None:
            return None
        manifest = parse_bounded(Manifest, data, name, MAX_MANIFEST_BYTES)
        if (manifest.step, manifest.write_id) != written or manifest.run not in ("", self._run):
            raise object_refused(name)
        return manifest

    def read_layout(self, manifest: Manifest) -> bytes:
        """Return the layout of a checkpoint; raises `UnavailableError`."""
        name = self._name((manifest.step, manifest.write_id), LAYOUT_FILE)
        data = self._read_whole(name, MAX_LAYOUT_BYTES)
        if data is None:
            raise object_refused(name)
        return data

    def has(self, manifest: Manifest, file: CheckpointFile) -> bool:
        """Return whether a file of a checkpoint is here in full size; its contents are verified as they are read."""
        name = self._name((manifest.step, manifest.write_id), file.name)
        return self._store.size(name) == sealed_bytes(file.num_bytes)

    def reader(self, manifest: Manifest) -> ObjectReader:
        """Return what reads shards of a checkpoint."""
        return ObjectReader(self, manifest)

    def remove(self, written: WriteKey) -> None:
        """Remove a checkpoint, as far as that is possible."""
        self._store.remove(self._name(written))

    def remove_older(self, written: WriteKey, keep: int) -> None:
        """Remove the checkpoints up to `written` but the newest `keep`."""
        for old in [one for one in self.checkpoints() if one[0] <= written[0]][keep:]:
            self.remove(old)

    def remove_unfinished(self, known: Collection[WriteKey]) -> None:
        """Remove checkpoints without a manifest, except those `known` to be complete at the sites."""
        for one in self.checkpoints():
            if one not in known and self._store.size(self._name(one, MANIFEST_FILE)) is None:
                self.remove(one)

    def open_object(self, written: WriteKey, file: str, num_bytes: int) -> tuple[str, ObjectSeal]:
        """Return name and seal of an object with contents of `num_bytes`; raises `UnavailableError`."""
        name = self._name(written, file)
        if self._store.size(name) != sealed_bytes(num_bytes):
            raise object_refused(name)
        return name, ObjectSeal.of_head(self._key, name, self._store.read(name, 0, HEAD_BYTES), num_bytes)

    def read_pieces(self, name: str, seal: ObjectSeal, first: int, end: int) -> bytes:
        """Return the contents of pieces `first` to `end - 1`, a few at once; raises `UnavailableError`."""
        return seal.open(first, self._store.read(name, *seal.span(first, end)))

    def _put(self, name: str, num_bytes: int, pieces: Iterator[bytes]) -> None:
        seal = ObjectSeal(self._key, name, secrets.token_bytes(SALT_BYTES), num_bytes)

        def sealed() -> Iterator[bytes]:
            yield seal.head
            since_s = self._clock()
            for number, piece in enumerate(pieces):
                yield seal.seal(number, piece)
                self._sleep(max(self._clock() - since_s, 0.0) * (1 / self._link_share - 1))
                since_s = self._clock()

        self._store.write(name, sealed())
        if self._store.size(name) != sealed_bytes(num_bytes):
            raise UnavailableError(f"{name} was not stored whole", hint="check the object store")

    def _read_whole(self, name: str, max_bytes: int) -> bytes | None:
        size = self._store.size(name)
        if size is None:
            return None
        if size > sealed_bytes(max_bytes):
            raise object_refused(name)
        seal = ObjectSeal.of_head(self._key, name, self._store.read(name, 0, HEAD_BYTES), contents_bytes(size))
        return b"".join(
            self.read_pieces(name, seal, first, min(first + _PIECES_PER_READ, seal.num_pieces))
            for first in range(0, seal.num_pieces, _PIECES_PER_READ)
        )

    def _name(self, written: WriteKey, file: str | None = None) -> str:
        folder = f"{self._run}/{checkpoint_name(written[0])}.{written[1]}"
        return folder if file is None else f"{folder}/{file}"


class ObjectReader:
    """Reads ranges of the files of a checkpoint from `copies`; `num_bytes` counts what was read. Used by one thread."""

    def __init__(self, copies: ObjectCopies, manifest: Manifest) -> None:
        self._copies, self._written = copies, (manifest.step, manifest.write_id)
        self._sizes = {one.name: one.num_bytes for one in manifest.files}
        self._objects: dict[str, tuple[str, ObjectSeal]] = {}
        self._last: tuple[str, int, bytes] = ("", 0, b"")
        self.num_bytes = 0

    def read_at(self, stored: StoredShard) -> ReadAt:
        """Return the reader of a stored shard; it raises `UnavailableError` if the object is missing or was changed."""

        def read(at: int, into: memoryview) -> None:
            begin = stored.start_byte + at
            done = 0
            while done < len(into):
                number, offset = divmod(begin + done, PIECE_BYTES)
                end = min(-(-(begin + len(into)) // PIECE_BYTES), number + _PIECES_PER_READ)
                data = self._pieces(stored.file, number, end)[offset : offset + len(into) - done]
                into[done : done + len(data)] = data
                done += len(data)

        return read

    def _pieces(self, file: str, first: int, end: int) -> bytes:
        """Return pieces of a file; the last one read is remembered, since shards share it with their neighbours."""
        if file not in self._objects:
            self._objects[file] = self._copies.open_object(self._written, file, self._sizes[file])
        name, seal = self._objects[file]
        if self._last[:2] == (file, first):
            return self._last[2]
        data = self._copies.read_pieces(name, seal, first, end)
        self.num_bytes += len(data)
        self._last = (file, end - 1, data[(end - 1 - first) * PIECE_BYTES :])
        return data
