"""Rules of deltas as files: bit for bit the new version, or a named error and no file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from benchmarks._weight_versions import adam_versions
from isthmus.core.errors import UnavailableError
from isthmus.weights import DeltaError, apply_delta, write_delta
from isthmus.weights.weights_file import BLOCK_BYTES, WeightsFile
from tests.cli.test_plan_commands import answer, run


def write_weights(path: Path, tensors: dict[str, tuple[str, np.ndarray]], metadata: dict[str, str]) -> Path:
    """Write a safetensors file by the format's description, independently of the code under test."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, values) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(entries).encode()
    data = b"".join(values.tobytes() for _, values in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def versions(folder: Path, num_weights: int = 60_000, metadata: str = "") -> tuple[Path, Path]:
    """Write two versions: bfloat16 and float16 that changed a little, an equal tensor, a float32 one that changed."""
    old, new = adam_versions(num_weights, 1e-5)
    norm = np.arange(64, dtype=np.float32)
    both = []
    for name, bits, add in (("old", old, 0.0), ("new", new, 0.5)):
        tensors = {
            "embed": ("BF16", bits[: num_weights // 2].reshape(-1, 10)),
            "head": ("BF16", bits[num_weights // 2 :]),
            "half": ("F16", bits[:1000]),
            "fixed": ("I64", np.arange(1000)),
            "norm": ("F32", norm + np.float32(add)),
            "empty": ("U8", np.zeros((0, 3), np.uint8)),
        }
        given_metadata = {"step": name} if metadata == "differs" else {}
        both.append(write_weights(folder / f"{name}.safetensors", tensors, given_metadata))
    return both[0], both[1]


@pytest.mark.parametrize("metadata", ["", "differs"])
def test_the_new_version_comes_back_bit_for_bit(tmp_path: Path, metadata: str) -> None:
    """The file is equal, its header included; the summary counts changes and bytes, and names both versions."""
    old, new = versions(tmp_path, metadata=metadata)
    made = write_delta(old, new, tmp_path / "d")
    got = apply_delta(old, tmp_path / "d", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == new.read_bytes()
    assert got == made
    assert made.num_bytes == (tmp_path / "d").stat().st_size < made.full_bytes / 10
    assert made.full_bytes == new.stat().st_size
    with safe_open(old, "np") as before:  # the library agrees that this is such a file
        assert set(before.keys()) == {"embed", "head", "half", "fixed", "norm", "empty"}
    bits = adam_versions(60_000, 1e-5)
    assert made.num_changed == differing(*bits) + differing(bits[0][:1000], bits[1][:1000]) + 64


def differing(old: np.ndarray, new: np.ndarray) -> int:
    """Return how many elements [n] differ."""
    return int(np.count_nonzero(old != new))


def test_a_version_is_named_by_its_content(tmp_path: Path) -> None:
    """The target of one delta is the base of the next; equal files have one name; nothing changed is nearly nothing."""
    old, new = versions(tmp_path)
    first, back = write_delta(old, new, tmp_path / "1"), write_delta(new, old, tmp_path / "2")
    assert (first.base, first.target) == (back.target, back.base)
    assert first.base != first.target
    nothing = write_delta(old, old, tmp_path / "3")
    assert nothing.base == nothing.target == first.base
    assert nothing.num_changed == 0
    assert nothing.num_bytes < 200


def test_a_block_is_sent_in_full_where_that_is_smaller(tmp_path: Path) -> None:
    """All weights drawn again: the delta has the new data and little more."""
    numbers = np.random.default_rng(0)
    paths = [
        write_weights(tmp_path / name, {"w": ("BF16", numbers.integers(0, 2**16, 50_000, dtype=np.uint16))}, {})
        for name in "ab"
    ]
    made = write_delta(*paths, tmp_path / "d")
    assert made.full_bytes < made.num_bytes < made.full_bytes + 300
    apply_delta(paths[0], tmp_path / "d", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == paths[1].read_bytes()


def test_a_delta_for_another_base_is_refused(tmp_path: Path) -> None:
    """Also where the only difference is in a block that the delta leaves alone, or in the metadata."""
    old, new = versions(tmp_path)
    write_delta(old, new, tmp_path / "d")
    content = bytearray(old.read_bytes())
    for place in (len(content) - 5000, len(content) - 60_000):
        other = bytearray(content)
        other[place] ^= 1
        (tmp_path / "other").write_bytes(other)
        refused(tmp_path, tmp_path / "other", "another base")
    refused(tmp_path, new, "another base")
    (tmp_path / "m").mkdir()
    refused(tmp_path, versions(tmp_path / "m", metadata="differs")[0], "another base")


def refused(folder: Path, base: Path, message: str | None, delta: str = "d") -> None:
    """Check that a delta is refused with this message and leaves no file behind."""
    before = sorted(folder.iterdir())
    with pytest.raises(DeltaError, match=message):
        apply_delta(base, folder / delta, folder / "out")
    assert sorted(folder.iterdir()) == before


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True), st.sampled_from(["cut", "flip", "add", "double"]), st.integers(1, 255))
def test_a_damaged_delta_is_refused(tmp_path: Path, share: float, how: str, mask: int) -> None:
    """Cut anywhere, any byte altered, bytes added or doubled: a named error, and no file is left."""
    old, delta = (tmp_path / name for name in ("old.safetensors", "good"))
    if not delta.exists():
        write_delta(*versions(tmp_path, 4_000, "differs"), delta)
    good = delta.read_bytes()
    at = int(share * len(good))
    flipped = good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :]
    bad = {"cut": good[:at], "flip": flipped, "add": good + b"\0", "double": good[:at] + good[at // 2 :]}[how]
    if bad == good:
        return
    (tmp_path / "d").write_bytes(bad)
    refused(tmp_path, old, None)


def test_sizes_beyond_the_file_are_refused(tmp_path: Path) -> None:
    """A header of 4 GB, a record longer than its block, and another magic, before anything is allocated for them."""
    old, new = versions(tmp_path)
    write_delta(old, new, tmp_path / "good")
    good = bytearray((tmp_path / "good").read_bytes())
    cases = (
        (76, b"\xff\xff\xff\xff", "header of"),
        (81, b"\xff\xff\xff\x7f", "record of kind"),
        (80, b"\x07", "record of kind 7"),
        (0, b"X", "no delta of this version"),
    )
    for place, value, message in cases:
        bad = bytearray(good)
        bad[place : place + len(value)] = value
        (tmp_path / "d").write_bytes(bad)
        refused(tmp_path, old, message)


@pytest.mark.attack
def test_a_header_is_as_large_as_that_of_its_base_and_metadata(tmp_path: Path) -> None:
    """A delta with a header of 2 MiB is refused before it is parsed, and not written either."""
    old, new = versions(tmp_path)
    write_delta(old, new, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    size = 2 << 20
    (tmp_path / "d").write_bytes(good[:76] + struct.pack("<I", size) + b"[" * size + good[80:])
    refused(tmp_path, old, "header of")
    tensors = {"a": ("I64", np.arange(3))}
    short = write_weights(tmp_path / "short", tensors, {})
    long = write_weights(tmp_path / "long", tensors, {"x": "y" * size})
    with pytest.raises(DeltaError, match="has a header of"):
        write_delta(short, long, tmp_path / "d")


@pytest.mark.attack
def test_no_link_is_written_through(tmp_path: Path) -> None:
    """Another account foresees the draft of a file in a folder that both may write to."""
    old, new = versions(tmp_path)
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    folder.mkdir()
    victim.write_text("mine")
    (folder / f".d.{os.getpid()}.tmp").symlink_to(victim)
    write_delta(old, new, folder / "d")
    assert victim.read_text() == "mine"
    assert sorted(one.name for one in folder.iterdir() if not one.is_symlink()) == ["d"]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"[]", b"", "no JSON object"),
        (b"{" * 20_000, b"", "cannot be read"),
        (b'{"a": 1}', b"", "no dtype, shape"),
        (b'{"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}', b"1234", "unknown data type"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234", "valid shape"),
        (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', b"1234", "valid shape"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234", "size of its shape"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', b"12345678", "hole or an overlap"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"12345678", "has 77 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [4000000000], "data_offsets": [0, 16000000000]}}', b"", "describes 16"),
        (b'{"a": {}, "a": {}}', b"", "occurs twice"),
    ],
)
def test_files_that_are_no_weights_are_named(tmp_path: Path, header: bytes, data: bytes, message: str) -> None:
    """Every number of the header is compared with the file before it is used."""
    path = tmp_path / "w"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    with pytest.raises(DeltaError, match=message), WeightsFile(path):
        pass


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """Missing, empty, with a header longer than the file; of another model; a folder that cannot be written to."""
    old, new = versions(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "long").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    for name, message in (("none", "cannot be read"), ("empty", "too early"), ("long", "has a header of")):
        with pytest.raises(DeltaError, match=message):
            write_delta(tmp_path / name, new, tmp_path / "d")
    other = write_weights(tmp_path / "other", {"embed": ("F32", np.zeros(3, np.float32))}, {})
    with pytest.raises(DeltaError, match=r"'embed' as F32 \[3\]"):
        write_delta(old, other, tmp_path / "d")
    with pytest.raises(DeltaError, match="has 0 tensors"):
        write_delta(old, write_weights(tmp_path / "no", {}, {}), tmp_path / "d")
    with pytest.raises(UnavailableError, match="cannot write"):
        write_delta(old, new, tmp_path / "nowhere" / "d")


@pytest.mark.integration
def test_memory_is_bounded_by_blocks(tmp_path: Path) -> None:
    """A delta of 160 MB of weights is made and applied in less memory than the file has, numpy included."""
    old, new = adam_versions(BLOCK_BYTES // 2)
    names = []
    for name, bits in (("old", old), ("new", new)):
        values = np.tile(bits, 20)
        names.append(write_weights(tmp_path / name, {"w": ("BF16", values)}, {}))
    limit = names[0].stat().st_size * 3 // 2
    code = (
        "import resource, sys; from pathlib import Path; import numpy; "
        "from isthmus.weights import apply_delta, write_delta; a, b, d, c = map(Path, sys.argv[1:5]); "
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; write_delta(a, b, d); apply_delta(a, d, c); "
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024)"
    )
    places = [*map(str, names), str(tmp_path / "d"), str(tmp_path / "c")]
    done = subprocess.run(
        [sys.executable, "-c", code, *places], check=True, capture_output=True, text=True, timeout=120
    )
    assert int(done.stdout) < limit
    digests = [hashlib.sha256(path.read_bytes()).digest() for path in (names[1], tmp_path / "c")]
    assert digests[0] == digests[1]


def test_the_commands_answer_the_contract(tmp_path: Path) -> None:
    """`rl delta` and `rl apply` print what they made, as JSON or a line; errors are named with exit status 2."""
    old, new = versions(tmp_path)
    made = answer("rl", "delta", old, new, "-o", tmp_path / "d")
    got = answer("rl", "apply", old, tmp_path / "d", "-o", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == new.read_bytes()
    for one in (made, got):
        assert one["cpu_s"] >= 0
        assert one["full_bytes"] == new.stat().st_size
        assert one["bytes"] == (tmp_path / "d").stat().st_size
    assert made["changed"] == got["changed"] > 0
    status, text = run("rl", "apply", old, tmp_path / "d", "-o", tmp_path / "c")
    assert status == 0
    assert "changed values" in text
    status, text = run("rl", "apply", new, tmp_path / "d", "-o", tmp_path / "c2")
    assert status == 2
    assert "another base" in text
    assert not (tmp_path / "c2").exists()
