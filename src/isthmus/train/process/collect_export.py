"""`collect_export`: brings the exported shards and the tokenizer of sites that share no output folder to one site."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel, NonNegativeInt
from isthmus.core.errors import UnavailableError
from isthmus.core.files.model_tokenizer import TOKENIZER_FILES
from isthmus.train.checkpoint.layout.checkpoint_layout import parse_bounded, refused
from isthmus.train.checkpoint.sites.peer_channel import PeerChannel
from isthmus.train.checkpoint.sites.site_stores import SiteStores
from isthmus.train.model.save_weights import pending_folder, pending_name

_TOPIC = 32
_TOKENIZER_NAMES = "|".join(map(re.escape, TOKENIZER_FILES))
_MAX_LIST_BYTES = 4 << 20


class _ExportedFile(FrozenModel):
    """A file with shards of the model, or of its tokenizer."""

    name: Annotated[str, Field(pattern=rf"^(rank-\d{{5}}-\d{{5}}\.safetensors|{_TOKENIZER_NAMES})$")]
    num_bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _ExportedFiles(FrozenModel):
    """The files of one stage."""

    files: Annotated[tuple[_ExportedFile, ...], Field(max_length=10_000)]


def choose_target(site: str | None, writers: Sequence[int], stores: SiteStores) -> int:
    """Return the rank whose folder gets the model: one at `site` if its folder is another, else the first writer."""
    there = [rank for rank, cluster in enumerate(stores.clusters) if cluster == site]
    if not there or any(stores.of_rank[one] == stores.of_rank[writers[0]] for one in there):
        return writers[0]
    return next((one for one in writers if one in there), there[0])


def collect_export(
    output: Path, rank: int, writers: Sequence[int], target: int, stores: SiteStores, channel: PeerChannel
) -> None:
    """Send this rank's exported files to rank `target`, or receive them there; all ranks may call this.

    `writers` are the ranks that export, by stage; the first may have added its tokenizer (`tokenizer_folder`). Files
    stream in chunks and are verified; those at other sites are removed once they have arrived. Raises
    `UnavailableError` if one cannot be written or arrives damaged.
    """
    away = [(stage, one) for stage, one in enumerate(writers) if stores.of_rank[one] != stores.of_rank[target]]
    folder = pending_folder(output)
    for stage, writer in away:
        if rank == writer:
            _send(folder, stage, target, channel)
        elif rank == target:
            _receive(folder, stage, writer, stores, channel)


def _send(folder: Path, stage: int, target: int, channel: PeerChannel) -> None:
    """Send the files of `stage` to `target`, then remove them here."""
    files = sorted(folder.glob(pending_name(stage, "*"))) + (sorted(_tokenizer(folder).glob("*")) if stage == 0 else [])
    listed = _ExportedFiles(files=tuple(_describe(file) for file in files))
    channel.send_text(target, _TOPIC, listed.model_dump_json().encode())
    for file, one in zip(files, listed.files, strict=True):
        channel.send_file(target, _TOPIC, file, one.num_bytes)
    channel.receive_text(target, _TOPIC, 0)
    with suppress(OSError):
        for file in files:
            file.unlink()
        if stage == 0:
            _tokenizer(folder).rmdir()
        folder.rmdir()


def _receive(folder: Path, stage: int, writer: int, stores: SiteStores, channel: PeerChannel) -> None:
    """Receive the files of `stage` from `writer` into `folder`, in place of those of an earlier export."""
    source = f"the export of rank {writer}"
    listed = parse_bounded(_ExportedFiles, channel.receive_text(writer, _TOPIC, _MAX_LIST_BYTES), source)
    with suppress(OSError):
        if stage == 0:
            _tokenizer(folder).mkdir(parents=True, exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob(pending_name(stage, "*")), *(_tokenizer(folder).glob("*") if stage == 0 else ())):
            old.unlink()
    for one in listed.files:
        is_shard = one.name.startswith(pending_name(stage, "").removesuffix(".safetensors"))
        if not is_shard and (stage > 0 or one.name not in TOKENIZER_FILES):
            raise refused(source, f"it has written no {one.name}")
        place = (folder if is_shard else _tokenizer(folder)) / one.name
        failure = channel.receive_file(writer, _TOPIC, place, one.num_bytes, one.sha256)
        if failure is not None:
            raise UnavailableError(
                f"the model of site {stores.clusters[writer]} cannot be kept: {failure}",
                hint="free space there; a restart only repeats the export",
            )
    channel.send_text(writer, _TOPIC, b"")


def move_tokenizer(output: Path) -> None:
    """Move the tokenizer that the first writer has sent to `output`, in place of an earlier one; raises `OSError`."""
    for name in TOKENIZER_FILES:
        (output / name).unlink(missing_ok=True)
    for file in _tokenizer(pending_folder(output)).iterdir():
        file.replace(output / file.name)


def tokenizer_folder(output: Path) -> Path:
    """Return the folder, created, in which the first writer puts the tokenizer for another site."""
    folder = _tokenizer(pending_folder(output))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tokenizer(folder: Path) -> Path:
    return folder / "tokenizer"


def _describe(file: Path) -> _ExportedFile:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return _ExportedFile(name=file.name, num_bytes=file.stat().st_size, sha256=digest)
