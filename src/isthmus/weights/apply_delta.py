"""`apply_delta`: a version of weights and a delta become the next version, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from isthmus.weights.change_code import decode_changes
from isthmus.weights.delta_error import DeltaError, damaged
from isthmus.weights.delta_format import DeltaReader, DeltaRecord, RecordKind, largest_header
from isthmus.weights.delta_summary import DeltaSummary
from isthmus.weights.new_file import new_file
from isthmus.weights.weights_file import WeightsBlock, WeightsFile, WeightsHeader, parse_header
from isthmus.weights.weights_name import WeightsName
from isthmus.weights.write_delta import CODED, count_changes


def apply_delta(old: Path, delta: Path, output: Path) -> DeltaSummary:
    """Write the version that `delta` makes of the safetensors file `old` to `output`.

    Each block is checked before and after the change, and `output` appears only if the name of the result is the one
    that the delta states. Raises `DeltaError` for a delta on another base, cut short, or altered.
    """
    try:
        opened = delta.open("rb")
    except OSError as error:
        raise DeltaError(f"{delta} cannot be read: {error.strerror}", hint="pass a delta file") from error
    with opened as source, WeightsFile(old) as before, new_file(output) as stream:
        reader = DeltaReader(source, largest_header(len(before.header.content)))
        header = _new_header(before.header, reader.header)
        base, target = WeightsName(before.header.content), WeightsName(header.content)
        stream.write(header.content)
        changed = 0
        for block in before.header.blocks():
            content = before.read(block)
            record = reader.read(block.num_bytes)
            old_digest = hashlib.sha256(content).digest()
            base.add(old_digest)
            target.add(record.new_sha256 or old_digest)
            num_changed, new_content = _new_content(content, old_digest, record, block)
            changed += num_changed
            stream.write(new_content)
        num_bytes = reader.finish()
        _check_names(reader, base.digest, target.digest)
        return DeltaSummary(
            num_changed=changed, num_bytes=num_bytes, full_bytes=header.file_bytes,
            base=reader.base.hex(), target=reader.target.hex(),
        )  # fmt: skip


def _new_header(old: WeightsHeader, content: bytes) -> WeightsHeader:
    """Return the header of the new file, with the tensors of the old one; `content` is empty where both are equal."""
    if not content:
        return old
    if int.from_bytes(content[:8], "little") != len(content) - 8:
        raise damaged("its header has another length")
    header = parse_header(content, old.file_bytes - len(old.content) + len(content), "the delta")
    if header.tensors != old.tensors:
        raise _wrong_base("it is of a model with other tensors")
    return header


def _new_content(
    old: bytes, old_digest: bytes, record: DeltaRecord, block: WeightsBlock
) -> tuple[int, bytes | memoryview]:
    """Return the number of changes in a block, and its new content."""
    if record.kind == RecordKind.SAME:
        return 0, old
    if record.old_sha256 != old_digest:
        raise _wrong_base(f"the block at byte {block.begin_byte} differs")
    if record.kind == RecordKind.FULL:
        if len(record.payload) != len(old):
            raise damaged(f"a full block of {len(record.payload)} bytes instead of {len(old)}")
        num_changed, content = count_changes(old, record.payload, block.dtype), memoryview(record.payload)
    elif (bits := CODED.get(block.dtype)) is not None:
        new, num_changed = decode_changes(np.frombuffer(old, bits), record.payload)
        content = new.data.cast("B")
    else:
        raise damaged(f"changes of {block.dtype}, which are not coded")
    if hashlib.sha256(content).digest() != record.new_sha256:
        raise damaged(f"the block at byte {block.begin_byte} has another checksum")
    return num_changed, content


def _check_names(delta: DeltaReader, base: bytes, target: bytes) -> None:
    if delta.base != base:
        raise _wrong_base(f"it is for {delta.base.hex()[:12]}, the file is {base.hex()[:12]}")
    if delta.target != target:
        raise damaged("the new version has another name than the delta promises")


def _wrong_base(detail: str) -> DeltaError:
    return DeltaError(
        f"the delta was made for another base: {detail}", hint="apply it to the version that it was made for"
    )
