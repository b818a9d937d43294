"""Rules of packets: what was written is read again, and anything else is left out, with its reason."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.messages.switch_keys import job_number
from isthmus.switch.packet import (
    OVERHEAD_BYTES,
    PacketKind,
    PacketRun,
    decode_runs,
    encode_run,
    packet_bytes,
)

JOB = job_number("job")
KEY = b"k" * 32


def run_of(num: int = 3, count: int = 5, **changes) -> PacketRun:
    values = {
        "kind": PacketKind.ADD, "job": JOB, "run": 2**63 + 1, "stream": 4, "worker": 1, "workers": 3, "incarnation": 9,
        "first_part": 12, "magnitudes": np.arange(num, dtype=np.uint32),
        "integers": np.arange(num * count, dtype=np.int32).reshape(num, count) - 7,
    } | changes  # fmt: skip
    return PacketRun(**values)


def read(data: bytes, size: int, key: bytes = KEY) -> tuple[list[PacketRun], dict[str, int]]:
    rejected: Counter[str] = Counter()
    runs = decode_runs(data, size, {JOB: key}.get, rejected)
    return runs, {reason: num for reason, num in rejected.items() if num}


@given(st.integers(1, 9), st.integers(0, 340), st.booleans(), st.integers(0, 2**64 - 20))
def test_runs_are_read_as_written(num, count, signed, part):
    """All fields and integers of a run come back as one run, signed or not."""
    key, sent = KEY if signed else b"", run_of(num, count, first_part=part)
    runs, rejected = read(encode_run(sent, key), packet_bytes(sent), key)
    assert rejected == {}
    (got,) = runs
    assert (got.kind, got.run, got.stream, got.worker, got.workers, got.incarnation, got.first_part) == (
        sent.kind, sent.run, sent.stream, sent.worker, sent.workers, sent.incarnation, part,
    )  # fmt: skip
    np.testing.assert_array_equal(got.integers, sent.integers)
    np.testing.assert_array_equal(got.magnitudes, sent.magnitudes)


def test_a_datagram_is_read_up_to_each_fault():
    """A forged packet inside a datagram is left out alone."""
    sent = run_of(5)
    data, size = bytearray(encode_run(sent, KEY)), packet_bytes(sent)
    data[2 * size + 50] ^= 1
    runs, rejected = read(bytes(data), size)
    assert rejected == {"forged": 1}
    assert [(run.first_part, run.num_packets) for run in runs] == [(12, 2), (15, 2)]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:10], "truncated"),
        (lambda data: data[:-4], "truncated"),
        (lambda data: data + b"1234", "oversized"),
        (lambda data: b"XX" + data[2:], "malformed"),
        (lambda data: data[:2] + b"\x02" + data[3:], "version"),
        (lambda data: data[:3] + b"\xff" + data[4:], "malformed"),
        (lambda data: data[:4] + b"\x07" + data[5:], "malformed"),  # worker 7 of 3
        (lambda data: data[:8] + b"\x00" * 8 + data[16:], "unknown job"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "forged"),
        (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], "forged"),
    ],
)
def test_bad_packets_are_left_out_by_reason(change, reason):
    """Truncated, oversized, forged, of another version or job: counted, never read."""
    data = change(encode_run(run_of(1), KEY))
    assert read(data, len(data)) == ([], {reason: 1})


def test_each_job_needs_its_own_key():
    """A packet with the key of another job, or without a tag, is forged."""
    data = encode_run(run_of(1), b"other" * 8)
    assert read(data, len(data)) == ([], {"forged": 1})
    assert read(encode_run(run_of(1), b""), len(data)) == ([], {"forged": 1})


@given(st.binary(max_size=600), st.integers(0, 700))
def test_any_bytes_are_rejected_or_empty(data, size):
    """No bytes without the key are read, whatever the size of a packet is said to be."""
    runs, rejected = read(data, size)
    assert runs == []
    assert bool(rejected) == bool(data)


def test_a_packet_fits_an_ethernet_frame():
    """The largest packet with the headers of IPv6 and UDP has at most 1,500 bytes."""
    assert OVERHEAD_BYTES + 4 * 340 + 48 <= 1500
