"""`SwitchClient`: one worker's side of the sums at one switch, as a pure state machine: events in, instructions out.

Source: algorithms 1 and 3 of the PASSING paper (section 4.2). The worker sends the first `y` parts, one for each slot,
and part `j + y` when it has the result of part `j`. The scale of a part is agreed a packet ahead: each packet has the
largest magnitude of the sender's next part in that slot, and the result has the largest over all workers. A round of
packets without integers agrees on the scales of the first parts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from isthmus.switch.fixed_point import FixedPoint, NonFiniteError
from isthmus.switch.packet import (
    MAX_INTEGERS,
    MAX_WORKERS,
    PacketKind,
    PacketRun,
    decode_runs,
    encode_run,
    packet_bytes,
)
from isthmus.switch.slot_pool import JoinRefusal

BATCH = 8
"""Packets of one system call."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """What the workers of a stream agree on, and the number of this one."""

    job: int
    run: int
    stream: int
    worker: int
    workers: int
    key: bytes = b""
    slots: int = 64
    """Slots to ask for."""
    part_integers: int = 256
    first_resend_s: float = 0.2
    """Time-out of a packet before any round trip was measured."""
    min_resend_s: float = 0.01
    max_resend_s: float = 0.5
    silence_s: float = 2.0
    """The switch is dead if it sends nothing for this long while the worker waits for it."""

    def __post_init__(self) -> None:
        if not (1 <= self.workers <= MAX_WORKERS and 0 <= self.worker < self.workers):
            raise ValueError(f"worker {self.worker} of {self.workers}: a switch sums for 1 to {MAX_WORKERS} workers")
        if not 1 <= self.part_integers <= MAX_INTEGERS:
            raise ValueError(f"{self.part_integers} integers a packet: 1 to {MAX_INTEGERS} are possible")


@dataclass(frozen=True)
class Start:
    """Sum `parts` [num_parts, part_integers] over the workers; `bits` are their magnitudes."""

    parts: NDArray[np.float32]
    bits: NDArray[np.uint32]


@dataclass(frozen=True)
class Received:
    """A datagram of packets of `packet_bytes` each from the switch."""

    data: bytes
    packet_bytes: int


@dataclass(frozen=True)
class Timer:
    """The time of `Instructions.wake_s` has come."""


@dataclass(frozen=True)
class Abort:
    """Stop: another worker goes on without the switch."""

    reason: str


ClientEvent = Start | Received | Timer | Abort


@dataclass
class Instructions:
    """Datagrams to send, each of packets of one size, and the time of the next `Timer`, None while idle."""

    send: list[tuple[bytes, int]] = field(default_factory=list)
    wake_s: float | None = None


class ClientState(Enum):
    """IDLE becomes JOINING or SUMMING by `Start`, which end in DONE or FAILED; DONE allows another `Start`."""

    IDLE = "idle"
    JOINING = "joining"
    SUMMING = "summing"
    DONE = "done"
    FAILED = "failed"


class SwitchClient:
    """Sums parts at one switch; repairs losses: a packet without an answer is followed by a probe.

    The switch answers a probe with the result, with the request to send the part again, or with the workers whose
    packets it has. So integers are sent again only where a packet was lost. The client fails, with `failure`, when the
    switch is silent for `silence_s`, was restarted, refuses, or has no slots left; a failed client stays failed.
    """

    def __init__(self, settings: StreamSettings) -> None:
        self.settings = settings
        self.state = ClientState.IDLE
        self.failure = ""
        self.counters: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.slots = 0
        self._fixed_point = FixedPoint(settings.workers)
        self._incarnation = 0
        self._cookie = 0
        self._next_base = 0
        self._heard_s = 0.0
        self._join_s = 0.0
        self._smoothed_s: float | None = None
        self._deviation_s = 0.0
        self._seen = 0
        self._set_parts(Start(np.zeros((0, settings.part_integers), np.float32), np.zeros(0, np.uint32)))

    def handle(self, event: ClientEvent, now_s: float) -> Instructions:
        """Return what to do after `event`."""
        out = Instructions()
        if isinstance(event, Start):
            self._start(event, now_s, out)
        elif isinstance(event, Received):
            for run in decode_runs(event.data, event.packet_bytes, self._key_of, self.rejected):
                self._receive(run, now_s, out)
        elif isinstance(event, Abort):
            if self.state in _WAITING:
                self._fail(event.reason)
        elif self.state in _WAITING:
            self._check_time(now_s, out)
        out.wake_s = self._wake_s()
        return out

    def leave(self) -> tuple[bytes, int]:
        """Return a datagram that frees the slots of the stream, whose run ends."""
        return self._encode(self._packet(PacketKind.LEAVE))

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which parts have their result, [num_parts]."""
        return self._finished

    @property
    def sums(self) -> NDArray[np.int32]:
        """The results, [num_parts, part_integers]: sums of the integers; valid where `finished`."""
        return self._sums

    @property
    def sum_bits(self) -> NDArray[np.uint32]:
        """Magnitudes over all workers, as bits, [num_parts]: those of the scales of `sums`; valid where `finished`."""
        return self._sum_bits

    def pending_workers(self) -> list[int]:
        """Return the workers whose packets the switch lacked when it last answered a probe."""
        return [one for one in range(min(self.settings.workers, 32)) if self._seen and not self._seen >> one & 1]

    def _key_of(self, job: int) -> bytes | None:
        return self.settings.key if job == self.settings.job else None

    # --- starting

    def _set_parts(self, start: Start) -> None:
        num = len(start.parts)
        self._values, self._bits = start.parts, start.bits
        self._sums = np.zeros(start.parts.shape, np.int32)
        self._sum_bits = np.zeros(num, np.uint32)
        self._finished = np.zeros(num, np.bool_)
        self._num_left = num
        width = min(self.slots, num)
        self._rounds = np.full(
            width, -1
        )  # of each slot: round under way; 0 agrees on scales, r sums part (r-1)y + slot
        self._waiting = np.zeros(width, np.bool_)
        self._due_s = np.zeros(width)
        self._sent_s = np.zeros(width)
        self._tries = np.zeros(width, np.int64)
        self._base = 0
        self._newest_answered_s = -np.inf  # when the newest packet left that has its result
        self._result_s = -np.inf  # when the last result came

    def _start(self, start: Start, now_s: float, out: Instructions) -> None:
        if self.state in _WAITING:
            raise ValueError("the client has not finished the sum before")
        self._set_parts(start)
        self._heard_s = now_s
        if self.state is ClientState.FAILED:
            return
        if not len(start.parts):
            self.state = ClientState.DONE
        elif self._incarnation:
            self._begin_rounds(now_s, out)
        else:
            self.state = ClientState.JOINING
            self._join(now_s, out)

    def _join(self, now_s: float, out: Instructions) -> None:
        packet = self._packet(
            PacketKind.JOIN,
            part=self._cookie,
            slots=self.settings.slots,
            integers=np.zeros((1, self.settings.part_integers), np.int32),
        )
        out.send.append(self._encode(packet))
        self._join_s = now_s + self.settings.first_resend_s

    def _begin_rounds(self, now_s: float, out: Instructions) -> None:
        """Send the packets without integers that agree on the scales of the first parts."""
        self.state = ClientState.SUMMING
        num, width = len(self._values), min(self.slots, len(self._values))
        self._base = self._next_base
        self._next_base += self.slots * (1 + -(-num // self.slots))
        self._rounds = np.zeros(width, np.int64)
        self._waiting = np.ones(width, np.bool_)
        self._due_s, self._sent_s = np.zeros(width), np.zeros(width)
        self._tries = np.zeros(width, np.int64)
        empty = np.zeros((width, 0), np.int32)
        for first in range(0, width, BATCH):
            stop = min(first + BATCH, width)
            self._send(out, now_s, first, self._base + first, self._bits[first:stop], empty[first:stop])

    # --- receiving

    def _receive(self, run: PacketRun, now_s: float, out: Instructions) -> None:
        ours = (run.run, run.stream) == (self.settings.run, self.settings.stream)
        if not ours or self.state not in _WAITING:
            self.counters["late"] += run.num_packets
            return
        if self.state is ClientState.JOINING:
            self._receive_join(run, now_s, out)
        elif run.incarnation != self._incarnation or run.kind is PacketKind.STALE:
            if run.kind is PacketKind.STALE:
                self._fail("the switch was restarted, or has given the slots to others")
        else:
            self._heard_s = now_s
            if run.kind is PacketKind.SUM:
                self._receive_sums(run, now_s, out)
            elif run.kind in (PacketKind.MISSING, PacketKind.PENDING):
                for place in range(run.num_packets):
                    self._receive_state(run, place, now_s, out)

    def _receive_join(self, run: PacketRun, now_s: float, out: Instructions) -> None:
        if run.kind is PacketKind.CHALLENGE:
            self._heard_s = now_s
            if run.first_part != self._cookie:
                self._cookie = run.first_part
                self._join(now_s, out)
        elif run.kind is PacketKind.WELCOME and run.slots:
            self._heard_s = now_s
            self._incarnation, self.slots = run.incarnation, run.slots
            self._begin_rounds(now_s, out)
        elif run.kind is PacketKind.REFUSED:
            self._fail(_REFUSALS.get(run.first_part, "workers of this stream differ in number or part size"))

    def _locate(self, part: int, num: int) -> tuple[int, int] | None:
        """Return slot and round of a run of `num` parts of this sum that are waited for, None for other parts."""
        offset = part - self._base
        if offset < 0 or not self.slots:
            return None
        slot, number = offset % self.slots, offset // self.slots
        stop = slot + num
        if stop > len(self._rounds):
            return None
        rounds, waiting = self._rounds[slot:stop], self._waiting[slot:stop]
        return (slot, number) if (rounds == number).all() and waiting.all() else None

    def _receive_sums(self, run: PacketRun, now_s: float, out: Instructions) -> None:
        num = run.num_packets
        place = self._locate(run.first_part, num)
        if place is None:
            if num > 1:
                for one in range(num):
                    self._receive_sums(run.part_of(one, one + 1), now_s, out)
            else:
                self.counters["duplicates"] += 1
            return
        slot, number = place
        if run.integers.shape[1] != (self.settings.part_integers if number else 0):
            self.rejected["malformed"] += num
            return
        self._measure(slot, now_s)
        stop = slot + num
        if number:
            index = (number - 1) * self.slots + slot
            self._sums[index : index + num] = run.integers
            self._finished[index : index + num] = True
            self._num_left -= num
        following = number * self.slots + slot
        going_on = max(min(num, len(self._values) - following), 0)
        self._waiting[slot + going_on : stop] = False
        if going_on:
            self._send_parts(slot, number + 1, run.magnitudes[:going_on], now_s, out)
        if self._num_left == 0 and self.state is ClientState.SUMMING:
            self.state = ClientState.DONE

    def _send_parts(self, slot: int, number: int, bits: NDArray[np.uint32], now_s: float, out: Instructions) -> None:
        """Send the parts of round `number` for the slots from `slot` on; `bits` are magnitudes over all workers."""
        num, index = len(bits), (number - 1) * self.slots + slot
        self._sum_bits[index : index + num] = bits
        self._rounds[slot : slot + num] = number
        try:
            scales = self._fixed_point.scales(bits)
            integers = self._fixed_point.to_integers(self._values[index : index + num], scales)
        except NonFiniteError as error:
            self._fail(error.message)
            return
        part = self._base + number * self.slots + slot
        self._send(out, now_s, slot, part, self._next_bits(index, num), integers)

    def _next_bits(self, index: int, num: int) -> NDArray[np.uint32]:
        """Return the own magnitudes of the parts that follow parts `[index, index + num)` in their slots."""
        found = np.zeros(num, np.uint32)
        following = self._bits[index + self.slots : index + self.slots + num]
        found[: len(following)] = following
        return found

    def _receive_state(self, run: PacketRun, at: int, now_s: float, out: Instructions) -> None:
        place = self._locate(run.first_part + at, 1)
        if place is None:
            return
        slot, number = place
        if run.kind is PacketKind.PENDING:
            self._seen = int(run.magnitudes[at])
            return
        if run.slots != int(self._tries[slot]) & 0xFFFF:
            return  # of a probe before the part was sent again
        index = (number - 1) * self.slots + slot
        self.counters["resent"] += 1
        with_it = self._waiting & (self._sent_s <= self._sent_s[slot]) & (self._tries == 0)
        self._due_s[with_it] = now_s
        self._newest_answered_s = max(
            self._newest_answered_s, np.nextafter(self._sent_s[slot], np.inf) + self._disorder_s
        )
        if number:
            scales = self._fixed_point.scales(self._sum_bits[index : index + 1])
            integers = self._fixed_point.to_integers(self._values[index : index + 1], scales)
            self._send(out, now_s, slot, run.first_part + at, self._next_bits(index, 1), integers, again=True)
        else:
            empty = np.zeros((1, 0), np.int32)
            self._send(out, now_s, slot, run.first_part + at, self._bits[slot : slot + 1], empty, again=True)

    # --- time

    def _check_time(self, now_s: float, out: Instructions) -> None:
        if now_s >= self._heard_s + self.settings.silence_s:
            self._fail(f"the switch has sent nothing for {self.settings.silence_s:g} s")
        elif self.state is ClientState.JOINING:
            if now_s >= self._join_s:
                self._join(now_s, out)
        else:
            due = self._find_overdue(now_s)
            for slot in due.tolist():
                part = self._base + int(self._rounds[slot]) * self.slots + slot
                self._tries[slot] += 1
                number = int(self._tries[slot]) & 0xFFFF
                out.send.append(self._encode(self._packet(PacketKind.PROBE, part=part, slots=number)))
            self.counters["probes"] += len(due)
            self._due_s[due] = now_s + np.minimum(
                self._resend_s() * 2.0 ** np.minimum(self._tries[due], 16), self.settings.max_resend_s
            )

    def _find_overdue(self, now_s: float) -> NDArray[np.intp]:
        """Return the slots to probe: a packet is lost if newer ones have their results, or if no more results come.

        Time alone says little where switch and workers wait for a processor: the results of probes then come twice.
        The order of packets is what RFC 8985 (RACK) goes by; a quarter of a round trip allows for disorder. After a
        silence the oldest packet is probed, then twice as many each time, and all that left with one that is lost.
        """
        due = self._waiting & (self._due_s <= now_s)
        quiet_s = self._result_s + self._resend_s()
        if now_s >= quiet_s:
            found = np.flatnonzero(due)
            found = found[np.argsort(self._sent_s[found], kind="stable")]
            num = 2 ** min(int(self._tries[found].max(initial=0)), 16)
            self._due_s[found[num:]] = now_s + self._resend_s() * num
            return found[:num]
        overtaken = self._sent_s < self._newest_answered_s - self._disorder_s
        self._due_s[due & ~overtaken] = quiet_s
        return np.flatnonzero(due & overtaken)

    @property
    def _disorder_s(self) -> float:
        return (self._smoothed_s or 0.0) / 4

    def _wake_s(self) -> float | None:
        if self.state not in _WAITING:
            return None
        silent_s = self._heard_s + self.settings.silence_s
        if self.state is ClientState.JOINING:
            return min(self._join_s, silent_s)
        due_s = self._due_s[self._waiting].min(initial=np.inf)
        return float(min(due_s, silent_s))

    def _measure(self, slot: int, now_s: float) -> None:
        """Take the time to a result (RFC 6298), also after probes: else a switch that is always late is never known."""
        sample_s = now_s - float(self._sent_s[slot])
        self._newest_answered_s = max(self._newest_answered_s, float(self._sent_s[slot]))
        self._result_s = now_s
        if self._smoothed_s is None:
            self._smoothed_s, self._deviation_s = sample_s, sample_s / 2
        else:
            self._deviation_s += (abs(sample_s - self._smoothed_s) - self._deviation_s) / 4
            self._smoothed_s += (sample_s - self._smoothed_s) / 8

    def _resend_s(self) -> float:
        if self._smoothed_s is None:
            return self.settings.first_resend_s
        needed_s = self._smoothed_s + 4 * self._deviation_s
        return min(max(needed_s, self.settings.min_resend_s), self.settings.max_resend_s)

    def _fail(self, reason: str) -> None:
        self.state, self.failure = ClientState.FAILED, reason

    # --- sending

    def _send(
        self,
        out: Instructions,
        now_s: float,
        slot: int,
        part: int,
        bits: NDArray[np.uint32],
        integers: NDArray[np.int32],
        *,
        again: bool = False,
    ) -> None:
        stop = slot + len(bits)
        self._due_s[slot:stop] = now_s + self._resend_s()
        if again:
            self._tries[slot:stop] += 1
        else:
            self._sent_s[slot:stop] = now_s
            self._tries[slot:stop] = 0
        for first in range(0, len(bits), BATCH):
            run = self._packet(
                PacketKind.ADD, part=part + first, integers=integers[first : first + BATCH],
                bits=bits[first : first + BATCH],
            )  # fmt: skip
            out.send.append(self._encode(run))
            self.counters["payload_bytes"] += run.integers.nbytes

    def _packet(
        self,
        kind: PacketKind,
        *,
        part: int = 0,
        slots: int = 0,
        integers: NDArray[np.int32] | None = None,
        bits: NDArray[np.uint32] | None = None,
    ) -> PacketRun:
        one = self.settings
        return PacketRun(
            kind=kind, job=one.job, run=one.run, stream=one.stream, worker=one.worker, workers=one.workers,
            incarnation=self._incarnation, slots=slots, first_part=part,
            magnitudes=np.zeros(1, np.uint32) if bits is None else bits,
            integers=np.zeros((1, 0), np.int32) if integers is None else integers,
        )  # fmt: skip

    def _encode(self, run: PacketRun) -> tuple[bytes, int]:
        return encode_run(run, self.settings.key), packet_bytes(run)


_WAITING = frozenset({ClientState.JOINING, ClientState.SUMMING})

_REFUSALS = {
    int(JoinRefusal.FULL): "the switch has no free slots",
    int(JoinRefusal.TOO_LARGE): "the slots of the switch are smaller than the parts",
}
