"""Attacks by data in place of a checkpoint: files and messages that would become code, or take memory without bound."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.errors import UnavailableError
from isthmus.train.checkpoint.checkpoint_folder import (
    CheckpointFile,
    Manifest,
    describe_file,
    load_shards,
    newest_valid,
)
from isthmus.train.checkpoint.layout.shard_files import rank_file_name
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_slot import SlotIndex
from isthmus.train.checkpoint.snapshot_replicator import receive_slot
from isthmus.train.checkpoint.write_checkpoint import publish, write_rank_part

pytestmark = pytest.mark.attack

OLD = Path(__file__).parents[1] / "train" / "data" / "checkpoint-v2"
STEP = "step-00000003"


class Code:
    """An object that becomes a file when it is unpickled: the attacker's code."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.proof,)


def old_checkpoint(folder: Path) -> Path:
    """Copy a checkpoint that an earlier release wrote; return its folder."""
    shutil.copytree(OLD / STEP, folder / STEP)
    return folder / STEP


def sign(place: Path) -> None:
    """Give the manifest the checksums of the files as they are now: the attacker can compute them as well."""
    manifest = Manifest.model_validate_json((place / "manifest.json").read_bytes())
    files = tuple(describe_file(place / one.name) for one in manifest.files)
    (place / "manifest.json").write_text(manifest.model_copy(update={"files": files}).model_dump_json())


def load(folder: Path) -> None:
    """Restore the tensor `weight/a` of the newest checkpoint, as a run that resumes does."""
    manifest = newest_valid(folder)
    assert manifest is not None
    load_shards(folder, manifest.step, [TensorShard.full("weight/a", torch.zeros(6, 4))])


def call_of(module: str, name: str, *arguments: str) -> bytes:
    """Return a pickle that calls a function by its name."""
    text = b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in arguments)
    names = b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in (module, name))
    return b"\x80\x04" + names + b"\x93(" + text + b"tR."


def test_a_crafted_metadata_runs_no_code(tmp_path: Path) -> None:
    """A user resumes from a folder whose `.metadata` is a pickle of code, with right checksums: it is refused."""
    place = old_checkpoint(tmp_path)
    (place / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "proof")))
    sign(place)
    with pytest.raises(UnavailableError, match=r"metadata is refused: the name pathlib.*Path.touch is not allowed"):
        load(tmp_path)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    "target",
    [
        ("os", "system", "true"),
        ("builtins", "eval", "1"),
        ("torch", "load", "x"),
        ("torch.serialization", "load", "x"),
        ("torch.distributed.checkpoint.metadata", "os.system", "true"),
        ("isthmus.train.checkpoint.memory_lease", "shutil.rmtree", "x"),
    ],
)
def test_names_outside_the_allow_list_are_refused(tmp_path: Path, target: tuple[str, ...]) -> None:
    """Also names of modules that are allowed, and dotted names that lead elsewhere."""
    place = old_checkpoint(tmp_path)
    (place / ".metadata").write_bytes(call_of(*target))
    sign(place)
    with pytest.raises(UnavailableError, match="is not allowed"):
        load(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04t.",
        b"\x80\x04" + b"(" * 100_000 + b".",
        b"\x80\x04h\x07.",
        b"\x80\x04}]K\x01s.",
        b"\x80\x04" + b"\x85" * 100 + b".",
        b"\x80\x04N" + b"\x85" * 200_000 + b".",
        b"\x80\x04}N" + b"\x85" * 200_000 + b"Ns.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x8d" + b"\xff" * 8 + b"x.",
        b"\x80\x04B\xff\xff\xff\xff.",
    ],
)
def test_damaged_pickles_end_in_an_error(tmp_path: Path, data: bytes) -> None:
    """Missing marks, loops, depth and lengths beyond the file are errors, not crashes or memory."""
    place = old_checkpoint(tmp_path)
    (place / ".metadata").write_bytes(data)
    sign(place)
    with pytest.raises(UnavailableError, match="refused"):
        load(tmp_path)


def rewrite_archive(place: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> None:
    """Replace the archive of the first shard of rank 0 by one with other entries, in the same bytes."""
    file = place / "__0_0.distcp"
    data = file.read_bytes()
    begin = data.index(b"PK\x03\x04")
    with zipfile.ZipFile(io.BytesIO(data[begin : data.index(b"PK\x05\x06") + 22])) as archive:
        entries = {one.filename: archive.read(one) for one in archive.infolist()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in entries.items():
            change(archive, name, content)
    file.write_bytes(packed.getvalue() + data[len(packed.getvalue()) :])


def test_the_pickle_in_a_part_file_is_not_read(tmp_path: Path) -> None:
    """The archive of a shard has code for its pickle: it does not run, whether or not the elements are whole."""
    place = old_checkpoint(tmp_path)
    file = place / "__0_0.distcp"
    code = pickle.dumps(Code(tmp_path / "proof"))
    data = bytearray(file.read_bytes())
    at = data.index(b"\x80\x02")  # the pickle of the first archive
    data[at : at + len(code)] = code
    file.write_bytes(data)
    sign(place)
    load_or_refuse(tmp_path)
    assert not (tmp_path / "proof").exists()


def load_or_refuse(folder: Path) -> None:
    try:
        load(folder)
    except UnavailableError as error:
        assert "refused" in error.message  # noqa: PT017 - both ends are right


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """A few bytes that stand for gigabytes are not unpacked."""
    place = old_checkpoint(tmp_path)

    def compress(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
        archive.writestr(name, content, zipfile.ZIP_DEFLATED)

    rewrite_archive(place, compress)
    sign(place)
    with pytest.raises(UnavailableError, match="refused"):
        load(tmp_path)


def written(folder: Path) -> Path:
    """Write a checkpoint of two ranks; return its folder."""
    for rank in (0, 1):
        half = torch.full((3, 4), float(rank))
        shard = TensorShard("weight/a", (6, 4), (3 * rank, 0), half)
        write_rank_part(folder, [shard], step=3, rank=rank, write_id="1")
    assert publish(folder, step=3, samples=24, num_ranks=2, write_id="1", keep=1)
    return folder / STEP


def test_a_crafted_part_of_a_rank_runs_no_code(tmp_path: Path) -> None:
    """A rank, or another that can write to the folder, reports its layout as a pickle: rank 0 refuses it by name."""
    write_rank_part(tmp_path, [TensorShard.full("weight/a", torch.ones(2))], step=3, rank=0, write_id="1")
    part = tmp_path / f"{STEP}.1.tmp" / "0.part"
    report = json.loads(part.read_text())
    code = pickle.dumps((Code(tmp_path / "proof"), [])).decode("latin-1")
    for forged in (code, json.dumps({"file": report["files"][0], "layout": code}), json.dumps({**report, "x": 1})):
        part.write_text(forged, encoding="utf-8")
        with pytest.raises(UnavailableError, match=r"0\.part is refused"):
            publish(tmp_path, step=3, samples=24, num_ranks=1, write_id="1", keep=1)
    assert not (tmp_path / "proof").exists()


HOSTILE_SHARDS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an offset outside the tensor": (lambda one: one.update(offsets=[4, 0]), "leaves"),
    "a negative offset": (lambda one: one.update(offsets=[-1, 0]), "greater than or equal to 0"),
    "a huge shape": (lambda one: one.update(shape=[2**47, 2**47], offsets=[0, 0]), "more than"),
    "a number beyond 64 bits": (lambda one: one.update(start_byte=10**30), "less than or equal"),
    "NaN": (lambda one: one.update(start_byte=float("nan")), "contents|start_byte"),
    "a fraction": (lambda one: one.update(start_byte=1.5), "integer"),
    "text in place of a number": (lambda one: one.update(start_byte="8"), "integer"),
    "another number of dimensions": (lambda one: one.update(offsets=[0]), "numbers of dimensions"),
    "a path in the name of a file": (lambda one: one.update(file="../" + one["file"]), "pattern"),
    "another file": (lambda one: one.update(file=rank_file_name(7)), "not a file of the checkpoint"),
    "a path in the name of a tensor": (lambda one: one.update(name="weight/../../a"), "no name of a tensor"),
    "an unknown data type": (lambda one: one.update(dtype="load"), "float32"),
    "bytes beyond the file": (lambda one: one.update(start_byte=10**9), "ends at byte"),
    "a gap": (lambda one: one.update(sizes=[2, 4]), "leave a gap"),
    "an overlap": (lambda one: one.update(offsets=[0, 0]), "overlap"),
}


@pytest.mark.parametrize("attack", HOSTILE_SHARDS)
def test_a_hostile_layout_is_refused_before_memory_is_taken(tmp_path: Path, attack: str) -> None:
    """Each value that does not describe a part of the tensor within its file is named and refused."""
    place, (change, match) = written(tmp_path), HOSTILE_SHARDS[attack]
    layout = json.loads((place / "layout.json").read_text())
    change(layout["shards"][1])
    (place / "layout.json").write_text(json.dumps(layout))
    sign(place)
    with pytest.raises(UnavailableError, match=match):
        load(tmp_path)


def test_two_shards_over_the_same_bytes_are_refused(tmp_path: Path) -> None:
    """A few bytes cannot stand for a large model."""
    place = written(tmp_path)
    layout = json.loads((place / "layout.json").read_text())
    one = layout["shards"][0]
    layout["shards"] += [{**one, "name": f"x/{number}", "shape": [3, 4], "offsets": [0, 0]} for number in range(5)]
    (place / "layout.json").write_text(json.dumps(layout))
    sign(place)
    with pytest.raises(UnavailableError, match="overlaps another shard"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "shard-00001-model-00001-of-00001.pkl", "x\x00"])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    """A manifest with a path does not lead a reader elsewhere: the checkpoint does not count."""
    place = written(tmp_path)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"][0]["name"] = name
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert newest_valid(tmp_path) is None
    with pytest.raises(ValueError, match="name"):
        CheckpointFile(name=name, num_bytes=0, sha256="0" * 64)  # type: ignore[arg-type]


def test_a_file_that_grew_beyond_its_limit_is_not_read(tmp_path: Path) -> None:
    """A manifest of gigabytes of holes costs an error, not memory."""
    place = written(tmp_path)
    with (place / "manifest.json").open("r+b") as stream:
        stream.truncate(1 << 40)
    assert newest_valid(tmp_path) is None
    with pytest.raises(UnavailableError, match="larger than"):
        load_shards(tmp_path, 3, [])


def test_a_safetensors_header_is_not_believed(tmp_path: Path) -> None:
    """Positions come from the checked layout: a header that announces 2^60 bytes changes nothing."""
    place = written(tmp_path)
    file = place / rank_file_name(0)
    data = bytearray(file.read_bytes())
    data[:8] = (2**60).to_bytes(8, "little")
    file.write_bytes(data)
    sign(place)
    load(tmp_path)


@pytest.mark.parametrize("sizes", [(-1, 64), (2**62, 64), (64, -1), (64, 2**62)])
def test_a_peer_announces_a_copy_of_any_size(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """A rank announces a snapshot of 2^62 bytes, or of fewer than none: the holder refuses it and takes no memory."""
    sender, holder = memory_transports(2)
    try:
        sender.send(1, 1 << 40, "head", memoryview(b"".join(one.to_bytes(8, "little", signed=True) for one in sizes)))
        held = MemoryCheckpoint("attacked", 0, tmp_path)
        assert not receive_slot(holder, 0, held)
        answer = bytearray(1)
        sender.receive(1, (1 << 40) + 2, "answer", memoryview(answer)).result(5)
        assert answer == b"\0"
        assert held.steps() == ()
        held.clear()
    finally:
        sender.close()
        holder.close()


@pytest.mark.parametrize(
    "tensors",
    [
        [{"name": "a", "dtype": "load", "shape": [1], "offset_bytes": 0}],
        [{"name": "a", "dtype": "float32", "shape": [10**9], "offset_bytes": 0}],
        [{"name": "a", "dtype": "float32", "shape": [1], "offset_bytes": 2}],
        [{"name": "a", "dtype": "float32", "shape": [-1], "offset_bytes": 0}],
        [{"name": name, "dtype": "float32", "shape": [2], "offset_bytes": 4 * at} for at, name in enumerate("ab")],
        [{"name": "a", "dtype": "float32", "shape": [1], "offset_bytes": 64 * at} for at in range(2)],
    ],
)
def test_the_index_of_a_peers_snapshot_describes_its_own_data(tensors: list[dict[str, Any]]) -> None:
    """Tensors outside the data, over each other, of one name, or of a type that is none are refused."""
    with pytest.raises(ValueError, match="tensor"):
        SlotIndex.model_validate({"step": 1, "samples": 1, "num_bytes": 128, "tensors": tensors})
