"""`RequestOrder`: which request of a queue pair comes next, by packet sequence number.

Source: InfiniBand Architecture Specification, volume 1, 9.7: each packet of a request takes one number; a READ takes
as many as its response has packets, which depends on the path MTU. Where no packet has shown the MTU yet, the numbers
that follow for each MTU of the specification are all expected.
"""

from __future__ import annotations

import enum

from isthmus.wan.roce.roce_opcodes import ENDS_OF_MESSAGES, PSN_SPAN, SENDS_AND_WRITES, Opcode, psn_distance
from isthmus.wan.roce.roce_view import RoceView

MTUS_BYTES = (256, 512, 1024, 2048, 4096)
FIRSTS = frozenset({Opcode.SEND_FIRST, Opcode.WRITE_FIRST})
MIDDLES = frozenset({Opcode.SEND_MIDDLE, Opcode.WRITE_MIDDLE})
READS_AND_ATOMICS = frozenset({Opcode.READ_REQUEST, Opcode.COMPARE_SWAP, Opcode.FETCH_ADD})
REQUESTS = SENDS_AND_WRITES | READS_AND_ATOMICS
STARTS = FIRSTS | READS_AND_ATOMICS | {
    Opcode.SEND_ONLY, Opcode.SEND_ONLY_IMMEDIATE, Opcode.SEND_ONLY_INVALIDATE, Opcode.WRITE_ONLY,
    Opcode.WRITE_ONLY_IMMEDIATE,
}  # fmt: skip
"""First packets of messages."""

MESSAGE_ENDS = ENDS_OF_MESSAGES | READS_AND_ATOMICS
"""Packets that raise the message sequence number."""

NEW_START_DISTANCE = 2**15
"""Packets from the expected one beyond which a number belongs to a new life of the queue pair; no NIC has this many
in flight."""


class Place(enum.Enum):
    """Where a request stands."""

    NEXT = enum.auto()
    BEHIND = enum.auto()
    """It has been taken before."""
    AHEAD = enum.auto()
    """One before it is missing."""
    ELSEWHERE = enum.auto()
    """Farther away than any resend: the queue pair has begun again."""


class RequestOrder:
    """The order of one direction; it begins with the first request that it is given."""

    def __init__(self) -> None:
        self.mtu_bytes: int | None = None
        """Path MTU, as soon as a packet shows it."""
        self._expected: tuple[int, ...] = ()
        self._rewound_from: int | None = None
        """What was expected before a rewind, until it is expected again."""

    @property
    def first_expected(self) -> int:
        """The next number, or the lowest that it may be."""
        return self._expected[0]

    @property
    def has_begun(self) -> bool:
        """Whether a request was taken."""
        return bool(self._expected)

    def is_next(self, psn: int) -> bool:
        """Return whether a request with this number comes next."""
        return psn in self._expected or not self._expected

    def place(self, psn: int) -> Place:
        """Return where a request with this number stands."""
        expected = self._expected
        if self.is_next(psn):
            return Place.NEXT
        distance = psn_distance(expected[0], psn)
        if abs(distance) > NEW_START_DISTANCE:
            return Place.ELSEWHERE
        return Place.BEHIND if distance < 0 else Place.AHEAD

    def take(self, view: RoceView) -> int:
        """Note that a request is taken; return its last number, the lowest one where it is not known."""
        if view.opcode in FIRSTS or view.opcode in MIDDLES:
            self.mtu_bytes = view.num_payload_bytes
        if self._rewound_from is not None and psn_distance(self._rewound_from, view.psn) >= 0:
            self._rewound_from = None
        if view.opcode != Opcode.READ_REQUEST:
            self._expected = ((view.psn + 1) % PSN_SPAN,)
            return view.psn
        spans = self._spans(view)
        self._expected = tuple((view.psn + span) % PSN_SPAN for span in spans)
        return (view.psn + spans[0] - 1) % PSN_SPAN

    def last_psn(self, view: RoceView) -> int:
        """Return the last number of a request, the lowest one where it is not known."""
        return (view.psn + self._spans(view)[0] - 1) % PSN_SPAN

    def _spans(self, view: RoceView) -> tuple[int, ...]:
        if view.opcode != Opcode.READ_REQUEST:
            return (1,)
        mtus = (self.mtu_bytes,) if self.mtu_bytes in MTUS_BYTES else reversed(MTUS_BYTES)
        return tuple(dict.fromkeys(max(1, -(-view.read_bytes // mtu)) for mtu in mtus if mtu))

    def begin(self, first_psn: int, mtu_bytes: int) -> None:
        """Expect the first request of a queue pair that was set up."""
        self._expected, self.mtu_bytes = (first_psn,), mtu_bytes

    def rewind(self, psn: int) -> None:
        """Expect `psn` again."""
        if self._rewound_from is None:
            self._rewound_from = self.first_expected
        self._expected = (psn,)

    def skip(self, psn: int) -> bool:
        """Expect what follows `psn`, which was acknowledged, if that was taken before a rewind; return whether it was.

        The NIC will not send it again.
        """
        before = self._rewound_from
        if before is None or psn_distance(psn, before) <= 0 or psn_distance(self.first_expected, psn) < 0:
            return False
        self._expected = ((psn + 1) % PSN_SPAN,)
        return True
