"""`PassingWorker`: one worker's all-reduce over switches, which goes on without them: a pure state machine.

Source: section 4.2 of the PASSING paper (several switches by hashing); section 4.1 (PSRing) where a switch fails. Each
sum ends with a vote over the reliable transport. If a switch failed at any worker, all workers sum the parts that any
of them lacks by parameter servers, one part at each worker in turn. The scale of a part follows from the data, and sums
of integers do not depend on their path, so a worker that has the switch's result ends with the same integers.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from isthmus.core.errors import InputError, PeerError
from isthmus.switch.fixed_point import NON_FINITE_BITS, FixedPoint, NonFiniteError, magnitude_bits
from isthmus.switch.switch_client import Abort, ClientState, Received, Start, StreamSettings, SwitchClient, Timer

MAX_SWITCHES = 32
MAX_PAUSE = 64
"""Sums for which a switch that failed is not asked again, at most; the number doubles with each failure."""

_VOTE = struct.Struct("<BxxxIQ")


class PassingPhase(IntEnum):
    """Messages between workers: each sum has a VOTE; the others follow if a switch failed."""

    VOTE = 0
    STATE = 1
    SHARE = 2
    TOTAL = 3


@dataclass(frozen=True)
class Begin:
    """Sum flat `values` [num_values]; all workers give values of one size in one order."""

    values: NDArray[np.float32]


@dataclass(frozen=True)
class FromSwitch:
    """A datagram from switch number `switch`."""

    switch: int
    data: bytes
    packet_bytes: int


@dataclass(frozen=True)
class FromWorker:
    """Message of `phase` from worker `peer`, of its sum number `number`."""

    peer: int
    number: int
    phase: PassingPhase
    payload: bytes


@dataclass(frozen=True)
class Lost:
    """Worker `peer` is lost."""

    peer: int
    reason: str


PassingEvent = Begin | FromSwitch | FromWorker | Lost | Timer


@dataclass
class Actions:
    """Datagrams `(switch, data, packet_bytes)` and messages to send, receives to post, the time of the next `Timer`."""

    packets: list[tuple[int, bytes, int]] = field(default_factory=list)
    messages: list[tuple[int, PassingPhase, bytes]] = field(default_factory=list)
    expected: list[tuple[int, PassingPhase, int]] = field(default_factory=list)
    """Peer, phase and number of bytes of messages that will come."""
    wake_s: float | None = None


class PassingWorker:
    """Worker `settings.worker` at `num_switches` switches; without any, all sums are by parameter servers.

    After `Begin`, feed events until `result` [num_values] or `error` is set. All workers end with equal integers, so
    with equal bits, or with an error: NaN, infinity or a sum beyond float32 (`NonFiniteError`), sizes that differ
    (`InputError`), a worker that is lost or sends nothing within `timeout_s` (`PeerError`). After an error the worker
    is not used again.
    """

    def __init__(self, settings: StreamSettings, num_switches: int, timeout_s: float) -> None:
        if not 0 <= num_switches <= MAX_SWITCHES:
            raise InputError(f"{num_switches} switches", hint=f"0 to {MAX_SWITCHES} are possible")
        self.settings, self.timeout_s = settings, timeout_s
        self.result: NDArray[np.float32] | None = None
        self.error: InputError | PeerError | None = None
        self.number = -1
        self.counters: Counter[str] = Counter()
        self._point = FixedPoint(settings.workers)
        self._peers = [one for one in range(settings.workers) if one != settings.worker]
        self._groups = max(num_switches, 1)
        self._clients: list[SwitchClient | None] = [
            SwitchClient(settings) if place < num_switches else None for place in range(self._groups)
        ]
        self._failures = [0] * self._groups
        self._pauses = [0] * self._groups
        self._renewals = 0
        self.failure = ""
        """Why a switch failed last."""
        self._inbox: dict[tuple[int, PassingPhase, int], bytes] = {}
        self._deadline_s = 0.0
        self._reset(np.zeros(0, np.float32))

    @property
    def running(self) -> bool:
        """Whether a sum is under way."""
        return self.number >= 0 and self.result is None and self.error is None

    def handle(self, event: PassingEvent, now_s: float) -> Actions:
        """Return what to do after `event`."""
        out = Actions()
        if isinstance(event, Begin):
            self._begin(event, now_s, out)
        elif isinstance(event, FromWorker):
            if event.number >= self.number:
                self._inbox[event.number, event.phase, event.peer] = event.payload
        elif self.running:
            if isinstance(event, FromSwitch):
                self._feed(event.switch, Received(event.data, event.packet_bytes), now_s, out)
            elif isinstance(event, Lost):
                self._fail(PeerError(f"worker {event.peer} is lost: {event.reason}"))
            else:
                for place in range(self._groups):
                    self._feed(place, Timer(), now_s, out)
        if self.running:
            self._advance(now_s, out)
        if self.running and now_s >= self._deadline_s:
            self._fail(self._overdue())
        if self.running:
            out.wake_s = min([self._deadline_s, *(one for one in self._wakes if one is not None)])
        return out

    def leave(self) -> list[tuple[int, bytes, int]]:
        """Return the datagrams that free the slots at the switches."""
        return [(place, *one.leave()) for place, one in enumerate(self._clients) if one is not None]

    @property
    def integers(self) -> NDArray[np.int32]:
        """Sums of integers of the last all-reduce, [num_parts, part_integers]."""
        return self._sums

    # --- a sum

    def _reset(self, values: NDArray[np.float32]) -> None:
        width = self.settings.part_integers
        self._num_values = len(values)
        num = -(-len(values) // width)
        padded = np.zeros(num * width, np.float32)
        padded[: len(values)] = values
        self._parts = padded.reshape(num, width)
        self._bits = magnitude_bits(self._parts)
        self._rows = [np.flatnonzero(switch_of_part(num, self._groups) == place) for place in range(self._groups)]
        self._sums = np.zeros((num, width), np.int32)
        self._sum_bits = np.zeros(num, np.uint32)
        self._wakes: list[float | None] = [None] * self._groups
        self._phase = PassingPhase.VOTE
        self._has_voted = False
        self._redone = np.zeros(0, np.int64)  # rows that are summed by parameter servers
        self._failed = 0  # mask of the switches that failed at any worker

    def _begin(self, event: Begin, now_s: float, out: Actions) -> None:
        if self.running or self.error is not None:
            raise ValueError("a sum is under way, or the one before has failed")
        self.number += 1
        self._inbox = {key: payload for key, payload in self._inbox.items() if key[0] >= self.number}
        self.result = None
        self._reset(event.values)
        self._deadline_s = now_s + self.timeout_s
        out.expected += [(peer, PassingPhase.VOTE, _VOTE.size) for peer in self._peers]
        if (self._bits >= NON_FINITE_BITS).any():
            self._vote(out)
            self._fail(_non_finite([self.settings.worker]))
            return
        for place in range(self._groups):
            client = self._clients[place]
            if client is not None and not self._pauses[place]:
                rows = self._rows[place]
                self._feed(place, Start(self._parts[rows], self._bits[rows]), now_s, out)

    def _feed(self, place: int, event: Start | Received | Timer | Abort, now_s: float, out: Actions) -> None:
        client = self._clients[place]
        if client is None or self._pauses[place]:
            return
        made = client.handle(event, now_s)
        out.packets += [(place, data, size) for data, size in made.send]
        self._wakes[place] = made.wake_s

    def _advance(self, now_s: float, out: Actions) -> None:
        """Take the steps for which all messages are there."""
        if self._phase is PassingPhase.VOTE:
            self._read_votes(now_s, out)
            if self.running and not self._has_voted and self._is_settled():
                self._vote(out)
            if self.running and self._has_voted and self._is_complete(PassingPhase.VOTE, self._peers):
                self._decide(out)
        if self.running and self._phase is PassingPhase.STATE and self._is_complete(PassingPhase.STATE, self._peers):
            self._share(out)
        if self.running and self._phase is PassingPhase.SHARE and self._is_complete(PassingPhase.SHARE, self._givers()):
            self._total(out)
        if (
            self.running
            and self._phase is PassingPhase.TOTAL
            and self._is_complete(PassingPhase.TOTAL, self._servers())
        ):
            for peer in self._servers():
                rows = self._redone_at(peer)
                self._sums[rows] = self._integers_of(self._message(PassingPhase.TOTAL, peer), len(rows))
            self._finish(out)

    def _message(self, phase: PassingPhase, peer: int) -> bytes:
        return self._inbox[self.number, phase, peer]

    def _is_complete(self, phase: PassingPhase, peers: Sequence[int]) -> bool:
        return all((self.number, phase, peer) in self._inbox for peer in peers)

    # --- votes

    def _is_settled(self) -> bool:
        return all(
            client is None or self._pauses[place] or client.state in (ClientState.DONE, ClientState.FAILED)
            for place, client in enumerate(self._clients)
        )

    def _mask(self) -> int:
        """Return the switches that this worker got no sum from, as bits."""
        return sum(
            1 << place
            for place, client in enumerate(self._clients)
            if len(self._rows[place])
            and (client is None or self._pauses[place] or client.state is not ClientState.DONE)
        )

    def _vote(self, out: Actions) -> None:
        self._has_voted = True
        bad = bool((self._bits >= NON_FINITE_BITS).any())
        payload = _VOTE.pack(bad, self._mask(), self._num_values)
        out.messages += [(peer, PassingPhase.VOTE, payload) for peer in self._peers]

    def _read_votes(self, now_s: float, out: Actions) -> None:
        """Stop waiting for a switch that another worker has given up; fail if values differ in size or are NaN."""
        for peer in self._peers:
            if (self.number, PassingPhase.VOTE, peer) not in self._inbox:
                continue
            bad, mask, num_values = self._read_vote(peer)
            problem: InputError | None = _non_finite([peer]) if bad else None
            if num_values != self._num_values:
                problem = InputError(
                    f"worker {peer} sums {num_values} values, worker {self.settings.worker} {self._num_values}",
                    hint="all ranks call collectives in one order with tensors of one size",
                )
            if problem is not None:
                if not self._has_voted:
                    self._vote(out)
                self._fail(problem)
                return
            for place in range(self._groups):
                if mask >> place & 1:
                    self._feed(place, Abort(f"worker {peer} goes on without the switch"), now_s, out)

    def _read_vote(self, peer: int) -> tuple[int, int, int]:
        payload = self._message(PassingPhase.VOTE, peer)
        if len(payload) != _VOTE.size:
            return 0, 0, -1
        bad, mask, num_values = _VOTE.unpack(payload)
        return bad, mask, num_values

    def _decide(self, out: Actions) -> None:
        """All votes are there: collect what the switches summed, then finish or sum the rest without them."""
        self._failed = self._mask()
        for peer in self._peers:
            self._failed |= self._read_vote(peer)[1]
        for place, client in enumerate(self._clients):
            if client is not None and not self._pauses[place]:
                rows = self._rows[place][client.finished]
                self._sums[rows] = client.sums[client.finished]
                self._sum_bits[rows] = client.sum_bits[client.finished]
        if not self._failed:
            self._finish(out)
            return
        self._phase = PassingPhase.STATE
        rows = self._failed_rows()
        payload = self._lacking(rows).astype(np.uint8).tobytes() + self._bits[rows].astype("<u4").tobytes()
        out.messages += [(peer, PassingPhase.STATE, payload) for peer in self._peers]
        out.expected += [(peer, PassingPhase.STATE, 5 * len(rows)) for peer in self._peers]

    # --- parameter servers

    def _failed_rows(self) -> NDArray[np.int64]:
        found = [self._rows[place] for place in range(self._groups) if self._failed >> place & 1]
        return np.sort(np.concatenate(found))

    def _lacking(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of `rows` have no result here."""
        lacking = np.ones(len(self._sums), np.bool_)
        for place, client in enumerate(self._clients):
            if client is not None and not self._pauses[place]:
                lacking[self._rows[place][client.finished]] = False
        return lacking[rows]

    def _share(self, out: Actions) -> None:
        """Every worker knows what others lack, and all magnitudes: send integers to the servers of their parts."""
        rows = self._failed_rows()
        lacking, bits = self._lacking(rows), self._bits[rows]
        for peer in self._peers:
            payload = self._message(PassingPhase.STATE, peer)
            if len(payload) != 5 * len(rows):
                self._fail(PeerError(f"worker {peer} sent {len(payload)} bytes of state, not {5 * len(rows)}"))
                return
            lacking = lacking | (np.frombuffer(payload, np.uint8, len(rows)) != 0)
            bits = np.maximum(bits, np.frombuffer(payload, "<u4", len(rows), len(rows)))
        self._redone = rows[lacking]
        self._sum_bits[self._redone] = bits[lacking]
        self.counters["parts_without_switch"] += len(self._redone)
        try:
            for peer in range(self.settings.workers):
                mine = self._redone_at(peer)
                scales = self._point.scales(self._sum_bits[mine])
                self._sums[mine] = self._point.to_integers(self._parts[mine], scales)
                if peer != self.settings.worker and len(mine):
                    out.messages.append((peer, PassingPhase.SHARE, self._sums[mine].astype("<i4").tobytes()))
        except NonFiniteError as error:
            self._fail(error)
            return
        self._phase = PassingPhase.SHARE
        size = 4 * self.settings.part_integers
        out.expected += [(peer, PassingPhase.SHARE, size * len(self._own())) for peer in self._givers()]
        out.expected += [(peer, PassingPhase.TOTAL, size * len(self._redone_at(peer))) for peer in self._servers()]

    def _total(self, out: Actions) -> None:
        rows = self._own()
        for peer in self._givers():
            self._sums[rows] += self._integers_of(self._message(PassingPhase.SHARE, peer), len(rows))
        if len(rows):
            payload = self._sums[rows].astype("<i4").tobytes()
            out.messages += [(peer, PassingPhase.TOTAL, payload) for peer in self._peers]
        self._phase = PassingPhase.TOTAL

    def _redone_at(self, worker: int) -> NDArray[np.int64]:
        """Return the rows that `worker` sums."""
        return self._redone[worker :: self.settings.workers]

    def _own(self) -> NDArray[np.int64]:
        return self._redone_at(self.settings.worker)

    def _givers(self) -> list[int]:
        return self._peers if len(self._own()) else []

    def _servers(self) -> list[int]:
        return [peer for peer in self._peers if len(self._redone_at(peer))]

    def _integers_of(self, payload: bytes, num_rows: int) -> NDArray[np.int32]:
        return np.frombuffer(payload, "<i4").reshape(num_rows, self.settings.part_integers)

    # --- the end

    def _finish(self, out: Actions) -> None:
        for place in range(self._groups):
            self._renew(place, out)
        try:
            values = self._point.to_values(self._sums, self._point.scales(self._sum_bits))
        except NonFiniteError as error:
            self._fail(error)
            return
        self.result = values.reshape(-1)[: self._num_values]

    def _renew(self, place: int, out: Actions) -> None:
        """Replace a client that failed at any worker: all workers do, so the next run is one to which all belong."""
        client = self._clients[place]
        if client is None:
            return
        if self._pauses[place]:
            self._pauses[place] -= 1
        elif self._failed >> place & 1:
            self._pauses[place] = min(2 ** self._failures[place], MAX_PAUSE)
            self._failures[place] += 1
            self._renewals += 1
            self.counters["switch_failures"] += 1
            self.failure = client.failure or "another worker goes on without the switch"
            out.packets.append((place, *client.leave()))
            run = (self.settings.run + self._renewals) % 2**64
            self._clients[place] = SwitchClient(replace(self.settings, run=run))
        else:
            self._failures[place] = 0

    def _fail(self, error: InputError | PeerError) -> None:
        if self.error is None:
            self.error = error

    def _overdue(self) -> PeerError:
        """Return the error of a sum that is not done within the time-out, with the workers that are waited for."""
        wanted = {PassingPhase.SHARE: self._givers, PassingPhase.TOTAL: self._servers}.get(
            self._phase, lambda: self._peers
        )()
        silent = [one for one in wanted if (self.number, self._phase, one) not in self._inbox]
        pending = {one for client in self._clients if client is not None for one in client.pending_workers()}
        return PeerError(
            f"nothing from workers {sorted(pending or set(silent))} within {self.timeout_s:g} s",
            hint="see their logs: they have not called this collective, or wait themselves",
        )


def switch_of_part(num_parts: int, num_switches: int) -> NDArray[np.int64]:
    """Return the switch of each part, [num_parts]: a hash of its number (Knuth's multiplicative method)."""
    mixed = np.arange(num_parts, dtype=np.uint64) * np.uint64(2654435761) & np.uint64(0xFFFF_FFFF)
    return (mixed >> np.uint64(16)).astype(np.int64) % num_switches


def _non_finite(workers: Sequence[int]) -> NonFiniteError:
    return NonFiniteError(
        f"values of worker {', '.join(map(str, workers))} contain NaN or infinity", hint="skip the step, or sum in fp32"
    )
