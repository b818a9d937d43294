"""Attacks on a switch: strangers, replayed packets, other jobs, and members that send what they should not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.messages.datagram import Datagram
from isthmus.core.messages.switch_keys import job_number
from isthmus.switch.packet import PacketKind, PacketRun, decode_runs, encode_run, packet_bytes
from isthmus.switch.slot_pool import SlotPool

pytestmark = pytest.mark.attack

JOB, OTHER = job_number("job"), job_number("other")
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
HOME = [("10.0.0.1", 5000), ("10.0.0.2", 5000)]
THIEF = ("10.9.9.9", 6666)


def pool(**changes) -> SlotPool:
    values = {"keys": {JOB: KEY, OTHER: OTHER_KEY}, "incarnation": 7, "secret": b"s"} | changes
    return SlotPool(8, 4, **values)


def packet(kind: PacketKind, worker: int = 0, **changes) -> PacketRun:
    values = {"kind": kind, "job": JOB, "run": 1, "stream": 0, "worker": worker, "workers": 2} | changes
    return PacketRun(**values)


def ask(switch: SlotPool, run: PacketRun, source: tuple[str, int], now_s: float = 0.0, key: bytes = KEY):
    """Send `run`; return the answers as (address, run)."""
    out = switch.handle(Datagram(source, encode_run(run, key), packet_bytes(run)), now_s)
    switch.check()
    found = []
    for one in out:
        (got,) = decode_runs(one.data, one.packet_bytes, {JOB: KEY, OTHER: OTHER_KEY}.get, Counter())
        found.append((one.address, got))
    return found


def join(switch: SlotPool, worker: int, source: tuple[str, int], now_s: float = 0.0, **changes) -> PacketRun:
    """Join with the cookie; return the WELCOME."""
    run = packet(PacketKind.JOIN, worker, slots=2, integers=np.zeros((1, 4), np.int32), **changes)
    key = OTHER_KEY if run.job == OTHER else KEY
    ((_, challenge),) = ask(switch, run, source, now_s, key)
    ((_, welcome),) = ask(switch, replace(run, first_part=challenge.first_part), source, now_s, key)
    assert welcome.kind is PacketKind.WELCOME
    return welcome


def add(worker: int, part: int, value: int, incarnation: int) -> PacketRun:
    return packet(
        PacketKind.ADD, worker, first_part=part, incarnation=incarnation, integers=np.full((1, 4), value, np.int32)
    )


def joined() -> tuple[SlotPool, int]:
    switch = pool()
    join(switch, 0, HOME[0])
    return switch, join(switch, 1, HOME[1]).incarnation


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 500), st.booleans())
def test_any_bytes_get_no_answer_and_no_slot(data, size, has_head):
    """A stranger without the key: nothing is sent, nothing is held, whatever the bytes."""
    switch = pool()
    if has_head:
        data = encode_run(packet(PacketKind.JOIN), KEY)[:48] + data
    assert switch.handle(Datagram(THIEF, data, size), 0.0) == []
    assert switch.statistics()["streams"] == 0


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(list(PacketKind)), worker=st.integers(0, 70) | st.just(0xFFFF), workers=st.integers(0, 70),
    run=st.integers(0, 3), stream=st.integers(0, 3), incarnation=st.integers(0, 20), slots=st.integers(0, 2**16 - 1),
    part=st.integers(0, 2**64 - 1) | st.integers(0, 20), num=st.integers(1, 9), count=st.integers(0, 9),
)  # fmt: skip
def test_a_member_that_lies_changes_no_other_stream(
    kind, worker, workers, run, stream, incarnation, slots, part, num, count
):
    """Any fields with a valid key: no exception, bounded state, and another job's sums are as they were."""
    switch = pool()
    theirs = min(join(switch, one, HOME[one], job=OTHER).incarnation for one in range(2))
    made = PacketRun(
        kind=kind, job=JOB, run=run, stream=stream, worker=worker, workers=workers, incarnation=incarnation,
        slots=slots, first_part=min(part, 2**64 - num), magnitudes=np.zeros(num, np.uint32),
        integers=np.ones((num, count), np.int32),
    )  # fmt: skip
    switch.handle(Datagram(THIEF, encode_run(made, KEY), packet_bytes(made)), 1.0)
    switch.check()
    answers = []
    for one in range(2):
        answers = ask(switch, replace(add(one, 0, 5, theirs), job=OTHER), HOME[one], 2.0, OTHER_KEY)
    assert [(address, got.integers.tolist()) for address, got in answers] == [(at, [[10] * 4]) for at in HOME]


def test_a_replayed_packet_is_never_added_twice():
    """While a part is summed, after its result, and after its slot serves a later part."""
    switch, lease = joined()
    first = add(0, 0, 5, lease)
    ask(switch, first, HOME[0])
    assert [got.kind for _, got in ask(switch, first, THIEF)] == [PacketKind.PENDING]
    answers = ask(switch, add(1, 0, 7, lease), HOME[1])
    assert [got.integers[0, 0] for _, got in answers] == [12, 12]
    ((address, again),) = ask(switch, first, THIEF)
    assert (address, again.integers[0, 0]) == (HOME[0], 12)
    for worker in range(2):
        ask(switch, add(worker, 4, 1, lease), HOME[worker])  # same slot, same version
    assert ask(switch, first, THIEF) == []
    assert switch.statistics()["duplicates"] == 3


def test_a_replayed_packet_of_an_earlier_lease_is_stale():
    """Packets of slots that were freed, or of an earlier start of the switch, are added to nothing."""
    switch, lease = joined()
    old = add(0, 0, 5, lease)
    ask(switch, old, HOME[0])
    ask(switch, packet(PacketKind.LEAVE, incarnation=lease), HOME[0])
    again = min(join(switch, one, HOME[one], now_s=1.0).incarnation for one in range(2))
    assert [got.kind for _, got in ask(switch, old, THIEF, 1.0)] == [PacketKind.STALE]
    answers = [ask(switch, add(one, 0, 1, again), HOME[one], 1.0) for one in range(2)][1]
    assert [got.integers[0, 0] for _, got in answers] == [2, 2]
    restarted = pool(incarnation=99)
    assert [got.kind for _, got in ask(restarted, old, THIEF)] == [PacketKind.STALE]


def test_a_recorded_join_redirects_nothing_and_takes_no_slot():
    """A cookie is for one address and a minute: results go to the workers, and a gone job's slots stay free."""
    switch = pool()
    run = packet(PacketKind.JOIN, 0, slots=2, integers=np.zeros((1, 4), np.int32))
    ((_, challenge),) = ask(switch, run, HOME[0])
    recorded = replace(run, first_part=challenge.first_part)
    ((_, welcome),) = ask(switch, recorded, HOME[0])
    assert [got.kind for _, got in ask(switch, recorded, THIEF)] == [PacketKind.CHALLENGE]
    join(switch, 1, HOME[1])
    ask(switch, add(0, 0, 1, welcome.incarnation), HOME[0])
    answers = ask(switch, add(1, 0, 1, welcome.incarnation), THIEF)
    assert [address for address, _ in answers] == HOME
    later = ask(switch, recorded, HOME[0], 400.0)
    assert [got.kind for _, got in later] == [PacketKind.CHALLENGE]
    assert switch.statistics()["slots_used"] == 0


def test_an_answer_is_never_longer_than_its_request():
    """A forged source address turns the switch into no amplifier."""
    switch = pool()
    for run in (
        packet(PacketKind.JOIN, integers=np.zeros((1, 4), np.int32)), packet(PacketKind.PROBE), add(0, 0, 1, 3),
    ):  # fmt: skip
        data = encode_run(run, KEY)
        out = switch.handle(Datagram(THIEF, data, len(data)), 0.0)
        assert sum(len(one.data) for one in out) <= len(data)


def test_one_job_takes_no_slots_that_another_holds():
    """A job that asks for everything gets what is free; the slots of the other stay its own, and it is refused next."""
    switch = pool()
    join(switch, 0, HOME[0], job=OTHER)
    run = packet(PacketKind.JOIN, slots=2**16 - 1, integers=np.zeros((1, 4), np.int32))
    ((_, challenge),) = ask(switch, run, HOME[0])
    ((_, welcome),) = ask(switch, replace(run, first_part=challenge.first_part), HOME[0])
    assert welcome.slots == 6
    run = replace(run, run=2)
    ((_, challenge),) = ask(switch, run, HOME[0])
    ((_, refused),) = ask(switch, replace(run, first_part=challenge.first_part), HOME[0])
    assert refused.kind is PacketKind.REFUSED
