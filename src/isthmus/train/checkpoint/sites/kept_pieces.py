"""`KeptPieces`: verified pieces of a fetch on a site's disk, so that a fetch that is cut goes on in the next attempt.

    FOLDER/fetched/CHECKPOINT/00001-5f0c.pieces    what rank 1 of an attempt has received, in the order of its arrival

CHECKPOINT is the SHA-256 of the manifest, so pieces of another checkpoint never count. A record is a head, the
piece as JSON, and its bytes; its checksum covers both. A record that a crash left half written ends the file for the
next reader. All ranks of a site read all files there, so that another plan also uses what an earlier one received.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from isthmus.comm.group.group_work import tensor_bytes
from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.checkpoint_folder import Manifest
from isthmus.train.checkpoint.layout.checkpoint_layout import DTYPE_BYTES, CheckpointLayout, parse_bounded
from isthmus.train.checkpoint.sites.pieces import Piece, check_piece, piece_buffer

FETCHED_FOLDER = "fetched"
"""Folder of kept pieces in a folder of checkpoints."""

_MAGIC = b"IFP1"
_HEAD = struct.Struct("<4sIQI")
"""Magic, bytes of the JSON, bytes of the data, CRC-32 of both."""
_MAX_JSON_BYTES = 4096


@dataclass(frozen=True)
class _Record:
    """A piece in a file: where its data begin, and their checksum with that of the JSON."""

    piece: Piece
    file: Path
    start_byte: int
    json_checksum: int
    checksum: int


class KeptPieces:
    """The pieces of checkpoint `manifest` that the site with `folder` has received; context manager of `rank`.

    What cannot be written is not kept: the next attempt fetches it again.
    """

    def __init__(self, folder: Path, manifest: Manifest, layout: CheckpointLayout, rank: int) -> None:
        self._place = folder / FETCHED_FOLDER / hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
        self._layout = layout
        self._mine = self._place / f"{rank:05d}-{secrets.token_hex(8)}.pieces"
        self._descriptor: int | None = None
        self._has_failed, self._lock = False, threading.Lock()
        self._records: dict[int, list[_Record]] = {}

    def __enter__(self) -> KeptPieces:
        for file in sorted(self._place.glob("*.pieces")):
            for one in self._scan(file):
                self._records.setdefault(one.piece.shard, []).append(one)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def fill(self, piece: Piece, target: torch.Tensor) -> bool:
        """Copy a piece, or the part of one that contains it, to `target` of its shape; return whether one is here."""
        for record in self._records.get(piece.shard, ()):
            if record.piece.contains(piece) and (packed := self._read(record)) is not None:
                for dim, (start, at, length) in enumerate(
                    zip(record.piece.starts, piece.starts, piece.lengths, strict=True)
                ):
                    packed = packed.narrow(dim, at - start, length)
                target.copy_(packed)
                return True
        return False

    def keep(self, piece: Piece, data: memoryview) -> None:
        """Write a verified piece; any thread may call this."""
        text = piece.model_dump_json().encode()
        head = _HEAD.pack(_MAGIC, len(text), len(data), zlib.crc32(data, zlib.crc32(text)))
        with self._lock:
            if self._has_failed:
                return
            try:
                if self._descriptor is None:
                    self._place.mkdir(parents=True, exist_ok=True)
                    self._descriptor = os.open(self._mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                for part in (head + text, data):
                    done = 0
                    while done < len(part):
                        done += os.write(self._descriptor, part[done:])
            except OSError:
                self._has_failed = True

    def _scan(self, file: Path) -> Iterator[_Record]:
        """Yield the records of a file, up to the first that is cut or is no piece of this checkpoint."""
        with suppress(OSError, UnavailableError), file.open("rb") as stream:
            size = file.stat().st_size
            while len(head := stream.read(_HEAD.size)) == _HEAD.size:
                magic, json_bytes, num_bytes, checksum = _HEAD.unpack(head)
                if magic != _MAGIC or json_bytes > _MAX_JSON_BYTES:
                    return
                text = stream.read(json_bytes)
                piece = parse_bounded(Piece, text, file, _MAX_JSON_BYTES)
                stored = check_piece(piece, self._layout, str(file))
                start_byte = stream.tell()
                if num_bytes != prod(piece.lengths) * DTYPE_BYTES[stored.dtype] or start_byte + num_bytes > size:
                    return
                yield _Record(piece, file, start_byte, zlib.crc32(text), checksum)
                stream.seek(num_bytes, os.SEEK_CUR)

    def _read(self, record: _Record) -> torch.Tensor | None:
        """Return a kept piece; None if it has been damaged."""
        packed = piece_buffer(record.piece, self._layout)
        data = tensor_bytes(packed)
        with suppress(OSError), record.file.open("rb") as stream:
            stream.seek(record.start_byte)
            if stream.readinto(data) == len(data) and zlib.crc32(data, record.json_checksum) == record.checksum:
                return packed
        return None


def remove_kept_pieces(folder: Path, manifest: Manifest | None = None) -> None:
    """Remove the pieces in `folder` of all checkpoints but that of `manifest`."""
    kept = "" if manifest is None else hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
    with suppress(OSError):
        for place in (folder / FETCHED_FOLDER).iterdir():
            if place.name != kept:
                shutil.rmtree(place, ignore_errors=True)
        if not kept:
            (folder / FETCHED_FOLDER).rmdir()
