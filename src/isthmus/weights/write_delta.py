"""`write_delta`: the lossless difference of two versions of weights as a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from isthmus.weights.change_code import encode_changes
from isthmus.weights.delta_error import DeltaError
from isthmus.weights.delta_format import DeltaRecord, DeltaWriter, RecordKind, largest_header
from isthmus.weights.delta_summary import DeltaSummary
from isthmus.weights.new_file import new_file
from isthmus.weights.weights_file import DTYPE_BITS, WeightsBlock, WeightsFile, WeightsHeader
from isthmus.weights.weights_name import WeightsName

CODED = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}
"""Data types whose changes are coded, with their bits; blocks of others are sent in full when a byte changed."""


def write_delta(old: Path, new: Path, output: Path) -> DeltaSummary:
    """Write what changes `old` into `new`, two safetensors files with the same tensors, to `output`.

    One pass over both files; memory is bounded by some blocks. Raises `DeltaError` for files that are none, or of
    another model.
    """
    with WeightsFile(old) as before, WeightsFile(new) as after, new_file(output) as stream:
        _require_same_tensors(before.header, after.header, new)
        same_header = before.header.content == after.header.content
        base, target = WeightsName(before.header.content), WeightsName(after.header.content)
        writer = DeltaWriter(stream, b"" if same_header else after.header.content)
        changed = 0
        for one, other in zip(before.header.blocks(), after.header.blocks(), strict=True):
            record, old_digest, num_changed = _record(before.read(one), after.read(other), one)
            writer.add(record)
            base.add(old_digest)
            target.add(record.new_sha256 or old_digest)
            changed += num_changed
        num_bytes = writer.finish(base.digest, target.digest)
        return DeltaSummary(
            num_changed=changed, num_bytes=num_bytes, full_bytes=after.header.file_bytes,
            base=base.digest.hex(), target=target.digest.hex(),
        )  # fmt: skip


def count_changes(old: bytes, new: bytes, dtype: str) -> int:
    """Return how many elements of two blocks differ; elements below a byte count by bytes."""
    kind = f"u{max(DTYPE_BITS[dtype] // 8, 1)}"
    return int(np.count_nonzero(np.frombuffer(old, kind) != np.frombuffer(new, kind)))


def _record(old: bytes, new: bytes, block: WeightsBlock) -> tuple[DeltaRecord, bytes, int]:
    """Return the shortest record of a block, the SHA-256 of the old one, and the number of changed elements."""
    old_digest = hashlib.sha256(old).digest()
    if old == new:
        return DeltaRecord(kind=RecordKind.SAME), old_digest, 0
    kind, payload = RecordKind.FULL, new
    if (bits := CODED.get(block.dtype)) is not None:
        code = encode_changes(np.frombuffer(old, bits), np.frombuffer(new, bits))
        if len(code) < len(new):
            kind, payload = RecordKind.CHANGES, code
    record = DeltaRecord(kind=kind, old_sha256=old_digest, new_sha256=hashlib.sha256(new).digest(), payload=payload)
    return record, old_digest, count_changes(old, new, block.dtype)


def _require_same_tensors(old: WeightsHeader, new: WeightsHeader, path: Path) -> None:
    """Raise `DeltaError` unless both files have the same tensors at the same places; metadata may differ."""
    for one, other in zip(old.tensors, new.tensors, strict=False):
        if one != other:
            raise DeltaError(
                f"{path} has tensor '{other[0][:100]}' as {other[1]} {list(other[2])}, the old file "
                f"'{one[0][:100]}' as {one[1]} {list(one[2])}",
                hint="a delta needs two versions of one model with their tensors in one order",
            )
    if len(new.content) > largest_header(len(old.content)):
        raise DeltaError(
            f"{path} has a header of {len(new.content)} bytes, the old file {len(old.content)}",
            hint="keep the metadata of a version below 1 MiB",
        )
    if len(old.tensors) != len(new.tensors):
        raise DeltaError(
            f"{path} has {len(new.tensors)} tensors, the old file {len(old.tensors)}",
            hint="a delta needs two versions of one model",
        )
