"""`collect_export`: brings the exported shards of sites that share no output folder to the first rank's site."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import parse_bounded, refused
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_stores import SiteStores
from isthmus.train.model.save_weights import pending_folder, pending_name

_TOPIC = 32
_MAX_LIST_BYTES = 4 << 20


class _ExportedFile(FrozenModel):
    """A file with shards of the model."""

    name: Annotated[str, Field(pattern=r"^rank-\d{5}-\d{5}\.safetensors$")]
    num_bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _ExportedFiles(FrozenModel):
    """The files of one stage."""

    files: Annotated[tuple[_ExportedFile, ...], Field(max_length=10_000)]


def collect_export(output: Path, rank: int, writers: Sequence[int], stores: SiteStores, channel: PeerChannel) -> None:
    """Send this rank's exported shards to the first of `writers`, or receive them there; all ranks may call this.

    `writers` are the ranks that export, by stage. Files stream in chunks and are verified; those at other sites are
    removed once they have arrived. Raises `UnavailableError` if one cannot be written or arrives damaged.
    """
    target = writers[0]
    away = [(stage, one) for stage, one in enumerate(writers) if stores.of_rank[one] != stores.of_rank[target]]
    folder = pending_folder(output)
    for stage, writer in away:
        if rank == writer:
            _send(folder, stage, target, channel)
        elif rank == target:
            _receive(folder, stage, writer, stores, channel)


def _send(folder: Path, stage: int, target: int, channel: PeerChannel) -> None:
    """Send the files of `stage` to `target`, then remove them here."""
    files = sorted(folder.glob(pending_name(stage, "*")))
    listed = _ExportedFiles(files=tuple(_describe(file) for file in files))
    channel.send_text(target, _TOPIC, listed.model_dump_json().encode())
    for file, one in zip(files, listed.files, strict=True):
        channel.send_file(target, _TOPIC, file, one.num_bytes)
    channel.receive_text(target, _TOPIC, 0)
    with suppress(OSError):
        for file in files:
            file.unlink()
        folder.rmdir()


def _receive(folder: Path, stage: int, writer: int, stores: SiteStores, channel: PeerChannel) -> None:
    """Receive the files of `stage` from `writer` into `folder`, in place of those of an earlier export."""
    source = f"the export of rank {writer}"
    listed = parse_bounded(_ExportedFiles, channel.receive_text(writer, _TOPIC, _MAX_LIST_BYTES), source)
    with suppress(OSError):
        for old in folder.glob(pending_name(stage, "*")):
            old.unlink()
    for one in listed.files:
        if not one.name.startswith(pending_name(stage, "").removesuffix(".safetensors")):
            raise refused(source, f"it has written no {one.name}")
        failure = channel.receive_file(writer, _TOPIC, folder / one.name, one.num_bytes, one.sha256)
        if failure is not None:
            raise UnavailableError(
                f"the model of site {stores.clusters[writer]} cannot be kept: {failure}",
                hint="free space there; a restart only repeats the export",
            )
    channel.send_text(writer, _TOPIC, b"")


def _describe(file: Path) -> _ExportedFile:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return _ExportedFile(name=file.name, num_bytes=file.stat().st_size, sha256=digest)
