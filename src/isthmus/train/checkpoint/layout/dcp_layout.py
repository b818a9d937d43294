"""`read_dcp_layout`: the layout of a checkpoint of layout 2 (torch's `.metadata` and `.distcp`), without unpickling.

Releases before layout 3 wrote torch's Distributed Checkpoint: `.metadata` is a pickle of `Metadata`, and each shard
in a `.distcp` file is a zip archive of `torch.save` that has the elements as they are, in the entry `data/0`. The
pickle is decoded to inert records, the pickle inside the archive is not read at all: data type and sizes are those of
`.metadata`.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import (
    DTYPE_BYTES,
    MAX_LAYOUT_BYTES,
    MAX_SHARDS,
    CheckpointLayout,
    StoredShard,
    read_bounded,
    refused,
)
from isthmus.train.checkpoint.layout.inert_pickle import InertPickleError, Name, Record, decode_inert

METADATA_FILE = ".metadata"
MAX_DIRECTORY_BYTES = 1 << 16
"""Largest read from an archive's directory; torch's has about 600 bytes."""

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    **{
        (_METADATA, name): name
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "_get_layout",
    ("pathlib", "PosixPath"): "PosixPath",
    ("pathlib._local", "PosixPath"): "PosixPath",
    **{("torch", name): name for name in DTYPE_BYTES},
}  # fmt: skip
"""The names in torch's metadata; each stands for data, none is imported."""

_LOCAL_HEADER_BYTES = 30


def rank_of_dcp_file(name: str) -> int | None:
    """Return the rank that wrote a `.distcp` file; None for another file."""
    rank = name.removeprefix("__").removesuffix("_0.distcp")
    return int(rank) if name == f"__{rank}_0.distcp" and re.fullmatch("[0-9]{1,9}", rank) else None


def read_dcp_layout(folder: Path) -> CheckpointLayout:
    """Return the layout of the checkpoint of layout 2 in `folder`; the caller checks it.

    Raises `UnavailableError` if `.metadata` or an archive has another form than the ones Isthmus wrote.
    """
    file = folder / METADATA_FILE
    try:
        metadata = decode_inert(read_bounded(file, MAX_LAYOUT_BYTES), _NAMES)
        archives = _Archives(folder)
        with archives:
            shards = [archives.locate(*one) for one in _shards(metadata)]
    except (InertPickleError, ValidationError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise refused(file, str(error).partition("\n")[0]) from error
    except OSError as error:
        raise UnavailableError(f"cannot read checkpoint {folder}: {error.strerror or error}") from error
    return CheckpointLayout.model_construct(version=1, shards=tuple(shards))


def _shards(metadata: Any) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the fields of each shard but its first byte, and begin and length of its archive in the file."""
    state = _state(metadata, "Metadata")
    places = {}
    for key, info in _mapping(state["storage_data"]).items():
        index = _state(key, "MetadataIndex")
        places[index["fqn"], _size(index["offset"])] = _state(info, "_StorageInfo")
    number = 0
    for name, record in _mapping(state["state_dict_metadata"]).items():
        tensor = _state(record, "TensorStorageMetadata")
        properties = tensor["properties"]
        if not isinstance(properties, Record) or properties.name != "TensorProperties":
            raise ValueError("the properties of a tensor are missing")
        dtype = properties.state[0]
        for chunk in _list(tensor["chunks"]):
            if (number := number + 1) > MAX_SHARDS:
                raise ValueError(f"it has more than {MAX_SHARDS} shards")
            box = _state(chunk, "ChunkStorageMetadata")
            offsets = _size(box["offsets"])
            place = places[name, offsets]
            fields = {
                "name": name,
                "dtype": dtype.name if isinstance(dtype, Name) else None,
                "shape": _size(tensor["size"]),
                "offsets": offsets,
                "sizes": _size(box["sizes"]),
                "file": place["relative_path"],
            }
            yield fields, place["offset"], place["length"]


class _Archives:
    """Context manager that finds the elements of shards in the archives of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> _Archives:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()

    def locate(self, fields: dict[str, Any], begin: int, length: int) -> StoredShard:
        """Return the shard with the position of its first element."""
        shard = StoredShard.model_validate({**fields, "start_byte": 0})
        if shard.num_bytes == 0:
            return shard
        if shard.file not in self._open:
            self._open[shard.file] = (self._folder / shard.file).open("rb")
        stream = self._open[shard.file]
        num_bytes = os.fstat(stream.fileno()).st_size
        if type(begin) is not int or type(length) is not int or not 0 <= begin < begin + length <= num_bytes:
            raise ValueError(f"the archive of '{shard.name}' leaves {shard.file}")
        try:
            at = _find_elements(_Part(stream, begin, length), shard.num_bytes)
        except (zipfile.BadZipFile, RuntimeError, EOFError, struct.error) as error:
            raise ValueError(f"the archive of '{shard.name}' in {shard.file} is damaged: {error}") from error
        return shard.model_copy(update={"start_byte": begin + at})


def _find_elements(part: _Part, num_bytes: int) -> int:
    """Return where the entry `data/0` begins in an archive; raise `ValueError` unless it has `num_bytes`."""
    with zipfile.ZipFile(part) as archive:
        entries = {one.filename.partition("/")[2]: one for one in archive.infolist()}
        order = entries.get("byteorder")
        if order is not None and not _is_little(archive, order):
            raise ValueError("an archive has another byte order")
        data = entries.get("data/0")
        if data is None or data.compress_type != zipfile.ZIP_STORED or data.file_size != num_bytes:
            raise ValueError("an archive does not have the elements of its tensor as they are")
        part.seek(data.header_offset)
        header = part.read(_LOCAL_HEADER_BYTES)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = data.header_offset + _LOCAL_HEADER_BYTES + names
    if not header.startswith(b"PK\x03\x04") or start + num_bytes > part.length:
        raise ValueError("an archive ends within its elements")
    return start


def _is_little(archive: zipfile.ZipFile, order: zipfile.ZipInfo) -> bool:
    stored = order.compress_type == zipfile.ZIP_STORED and order.file_size == len(b"little")
    return stored and archive.read(order) == b"little"


class _Part(BufferedIOBase):
    """A range of bytes of a file as a file, for reads of a few bytes."""

    def __init__(self, stream: BinaryIO, begin: int, length: int) -> None:
        self._stream, self._begin, self.length, self._at = stream, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("a position before the begin of the archive")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self.length - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory is larger than {MAX_DIRECTORY_BYTES} bytes")
        self._stream.seek(self._begin + self._at)
        data = self._stream.read(wanted)
        self._at += len(data)
        return data


def _state(value: Any, name: str) -> dict[str, Any]:
    """Return the state of a record of this name."""
    if not isinstance(value, Record) or value.name != name or not isinstance(value.state, dict):
        raise ValueError(f"{name} expected")
    return value.state


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("a mapping is expected")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is expected")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a record of `torch.Size`."""
    if not isinstance(value, Record) or value.name != "Size":
        raise ValueError("a size is expected")
    numbers = value.arguments[0] if value.arguments else ()
    if not isinstance(numbers, tuple) or not all(type(one) is int for one in numbers):
        raise ValueError("a size has other parts than numbers")
    return numbers
