"""`CheckpointLayout`: where each shard of a checkpoint is: file, bytes, and its box in the full tensor.

Ranks exchange it and it is stored as `layout.json`. It is data from a disk or another rank, so `parse_layout` bounds
its size, and `check_layout` refuses every layout that does not describe whole tensors inside files of known sizes.
Both run before any tensor is allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import UnavailableError

LAYOUT_VERSION: Literal[1] = 1
LAYOUT_FILE = "layout.json"

MAX_LAYOUT_BYTES = 256 << 20
"""Largest file with a layout."""
MAX_SHARDS = 1_000_000
MAX_DIMENSIONS = 8
MAX_BOXES_PER_TENSOR = 4096
MAX_GRID_BOXES = 64
"""Most shards of a tensor that is cut along several dimensions: each is compared with each other."""
MAX_SIZE = 1 << 52
"""Largest number of elements of a tensor, and of bytes of a file."""

DTYPE_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2,
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip
"""Data types in a checkpoint by torch's names, with the size of an element."""

DtypeName = Literal[
    "float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"
]  # fmt: skip
FileName = Annotated[
    str,
    Field(pattern=r"^(shard-\d{5,7}-model-\d{5}-of-\d{5}\.safetensors|__\d{1,7}_0\.distcp)$", max_length=64),
]
"""Name of a file with shards: safetensors, or an archive of layout 2. It has no folder in it."""
TensorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-/]*$", max_length=512)]
Extent = Annotated[int, Field(ge=0, le=MAX_SIZE, strict=True)]
Extents = Annotated[tuple[Extent, ...], Field(max_length=MAX_DIMENSIONS)]

_Model = TypeVar("_Model", bound=FrozenModel)


class StoredShard(FrozenModel):
    """A shard in a file: the box of the full tensor `name` of `shape` at `offsets` with `sizes`.

    The file has its elements in row-major order from byte `start_byte` on.
    """

    name: TensorName
    dtype: DtypeName
    shape: Extents
    offsets: Extents
    sizes: Extents
    file: FileName
    start_byte: Extent

    @model_validator(mode="after")
    def _check_box(self) -> StoredShard:
        if ".." in self.name:
            raise ValueError(f"'{self.name}' is no name of a tensor")
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(f"'{self.name}': shape, offsets and sizes have different numbers of dimensions")
        if any(at + size > whole for at, size, whole in zip(self.offsets, self.sizes, self.shape, strict=True)):
            raise ValueError(f"'{self.name}': the box at {self.offsets} of {self.sizes} leaves {self.shape}")
        if prod(self.shape) > MAX_SIZE:
            raise ValueError(f"'{self.name}': {self.shape} has more than {MAX_SIZE} elements")
        return self

    @property
    def num_bytes(self) -> int:
        """Size of the shard."""
        return prod(self.sizes) * DTYPE_BYTES[self.dtype]

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes."""
        return self.offsets, self.sizes


class CheckpointLayout(FrozenModel):
    """All shards of a checkpoint."""

    version: Literal[1] = LAYOUT_VERSION
    shards: Annotated[tuple[StoredShard, ...], Field(max_length=MAX_SHARDS)]

    def by_tensor(self) -> dict[str, list[StoredShard]]:
        """Return the shards of each tensor."""
        found: dict[str, list[StoredShard]] = {}
        for one in self.shards:
            found.setdefault(one.name, []).append(one)
        return found


def read_bounded(file: Path, max_bytes: int) -> bytes:
    """Return the contents of `file`; raise `UnavailableError` if it is larger than `max_bytes`."""
    with file.open("rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise refused(file, f"it is larger than {max_bytes} bytes")
    return data


def parse_bounded(kind: type[_Model], data: bytes, source: object, max_bytes: int = MAX_LAYOUT_BYTES) -> _Model:
    """Return JSON `data` of `source` as `kind`; raise `UnavailableError` if it is too large or not of that form."""
    if len(data) > max_bytes:
        raise refused(source, f"it is larger than {max_bytes} bytes")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise refused(source, f"{where or 'contents'}: {first['msg']}") from error


def merge_layouts(parts: Iterable[Sequence[StoredShard]]) -> CheckpointLayout:
    """Return the layout of all parts; what several ranks hold alike is taken from the first."""
    known: dict[tuple[object, ...], StoredShard] = {}
    for one in itertools.chain.from_iterable(parts):
        known.setdefault((one.name, one.dtype, one.shape, *one.box), one)
    return CheckpointLayout.model_construct(version=LAYOUT_VERSION, shards=tuple(known.values()))


def check_layout(layout: CheckpointLayout, file_bytes: Mapping[str, int], source: object) -> None:
    """Raise `UnavailableError` unless every shard lies in a file and the shards form whole tensors.

    `file_bytes` are the sizes of the files. Refused are shards outside their file or over each other's bytes,
    boxes of one tensor that overlap or leave a gap, and tensors with two shapes or data types.
    """
    if len(layout.shards) > MAX_SHARDS:
        raise refused(source, f"it has more than {MAX_SHARDS} shards")
    _check_bytes(layout.shards, file_bytes, source)
    for name, shards in layout.by_tensor().items():
        first = shards[0]
        if any((one.shape, one.dtype) != (first.shape, first.dtype) for one in shards):
            raise refused(source, f"'{name}' has several shapes or data types")
        _check_cover(name, first.shape, [one.box for one in shards], source)


def _check_bytes(shards: Sequence[StoredShard], file_bytes: Mapping[str, int], source: object) -> None:
    """Refuse shards outside their file, or over the bytes of another."""
    ends: dict[str, int] = {}
    for one in sorted(shards, key=lambda shard: (shard.file, shard.start_byte, shard.num_bytes)):
        if one.file not in file_bytes:
            raise refused(source, f"'{one.name}' is in {one.file}, which is not a file of the checkpoint")
        end = one.start_byte + one.num_bytes
        if end > file_bytes[one.file]:
            raise refused(source, f"'{one.name}' ends at byte {end} of {one.file}, which has {file_bytes[one.file]}")
        if one.start_byte < ends.get(one.file, 0):
            raise refused(source, f"'{one.name}' overlaps another shard in {one.file}")
        ends[one.file] = end


def _check_cover(
    name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], source: object
) -> None:
    """Refuse boxes that overlap or leave a gap in `shape`."""
    filled = sorted(box for box in boxes if 0 not in box[1])
    split = [dim for dim, whole in enumerate(shape) if any(sizes[dim] != whole for _, sizes in filled)]
    if len(boxes) > (limit := MAX_BOXES_PER_TENSOR if len(split) == 1 else MAX_GRID_BOXES):
        raise refused(source, f"'{name}' is in more than {limit} shards")
    if len(split) == 1:  # cut along one dimension: neighbours suffice
        pairs: Iterable[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = itertools.pairwise(filled)
    else:
        pairs = itertools.combinations(filled, 2)
    if any(_overlap(*one, *other) for one, other in pairs):
        raise refused(source, f"shards of '{name}' overlap")
    if sum(prod(sizes) for _, sizes in filled) != prod(shape):
        raise refused(source, f"its shards leave a gap in '{name}': they do not form a complete model")


def _overlap(first: tuple[int, ...], sizes: tuple[int, ...], second: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(
        at < other_at + other and other_at < at + size
        for at, size, other_at, other in zip(first, sizes, second, others, strict=True)
    )


def refused(source: object, why: str) -> UnavailableError:
    """Return the error for a layout or file of `source` that is not used."""
    return UnavailableError(
        f"{source} is refused: {why}",
        hint="the file is damaged or forged: remove this checkpoint; a restart takes the one before it",
    )
