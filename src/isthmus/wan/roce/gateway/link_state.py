"""`LinkState`: what a gateway knows of the other one: its epoch, and the round trip between the two.

An epoch names the table of a gateway: after a restart it is another one. A gateway believes a new epoch of its peer
once the peer has shown that it knows the epoch here, so a datagram that comes late from before a restart changes
nothing.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence

from isthmus.core.errors import InputError
from isthmus.wan.roce.gateway.gateway_datagram import (
    DatagramKind,
    GatewayDatagram,
    Origin,
    build_list,
    data_head,
)
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings

HELLO_INTERVAL_S = 0.1
REPLY_INTERVAL_S = 0.01
_MAX_RETIRED = 64
_CREEP = 1.002
"""Growth of the least round trip with each sample, so that it follows a path that got longer."""


class Heard(enum.Enum):
    """What a datagram is, by its epochs."""

    CURRENT = enum.auto()
    NEW_PEER = enum.auto()
    """The first one of a peer, or of its next table."""
    IGNORED = enum.auto()


class LinkState:
    """The link to one gateway; `epoch` is a random number from 1 to 2^32 - 1, another one at each start."""

    def __init__(self, epoch: int, settings: GatewaySettings) -> None:
        if not 0 < epoch < 2**32:
            raise InputError(f"a gateway has the epoch {epoch}", hint="a random number from 1 to 2^32 - 1")
        self.peer_acknowledges = False
        self.origin = Origin(epoch, 0, settings.acknowledge_near)
        """What datagrams say of this side."""
        self.peer_heads: Mapping[bytes, tuple[bool, bool]] = {}
        """What the peer's datagrams with frames begin with: whether it acknowledges near, and `is_shared`."""
        self.hello_s, self._replied_s = -math.inf, -math.inf
        self._hello_sent_s: float | None = None
        self._retired: deque[int] = deque(maxlen=_MAX_RETIRED)
        self._smooth_s = self.least_round_trip_s = settings.round_trip_s
        self._deviation_s, self._has_sample = settings.round_trip_s / 2, False
        self._reorder_s = settings.reorder_s
        self._margin_s = 2 * settings.feedback_interval_s + settings.reorder_s

    @property
    def is_known(self) -> bool:
        """Whether the peer has answered."""
        return self.origin.to_epoch != 0

    @property
    def timeout_s(self) -> float:
        """A time after which an answer is missing: above the round trip."""
        return self._smooth_s + 4 * self._deviation_s + self._margin_s

    @property
    def ask_again_s(self) -> float:
        """A time after which a frame that was asked for has not come."""
        return self._smooth_s + 4 * self._deviation_s + self._reorder_s

    def hear(self, datagram: GatewayDatagram, now_s: float) -> tuple[Heard, Sequence[bytes]]:
        """Take over a new epoch; return what a datagram is, and what to answer for the epochs' sake."""
        theirs = datagram.origin
        if theirs.from_epoch == self.origin.to_epoch and theirs.to_epoch == self.origin.from_epoch:
            self.peer_acknowledges = theirs.acknowledges
            return Heard.CURRENT, ()
        if theirs.from_epoch in self._retired or theirs.from_epoch == self.origin.from_epoch:
            return Heard.IGNORED, []
        if theirs.to_epoch != self.origin.from_epoch:
            if now_s - self._replied_s < REPLY_INTERVAL_S:
                return Heard.IGNORED, []
            self._replied_s = now_s
            return Heard.IGNORED, self.hello(now_s, theirs.from_epoch)
        self.peer_acknowledges = theirs.acknowledges
        if self.is_known:
            self._retired.append(self.origin.to_epoch)
        self.origin = Origin(self.origin.from_epoch, theirs.from_epoch, self.origin.acknowledges)
        flags = [(acknowledges, is_shared) for acknowledges in (False, True) for is_shared in (False, True)]
        self.peer_heads = {data_head(theirs._replace(acknowledges=one[0]), is_shared=one[1]): one for one in flags}
        if self._hello_sent_s is not None and self._hello_sent_s < math.inf:
            self.sample(now_s - self._hello_sent_s)
        self._hello_sent_s = math.inf
        self.hello_s = math.inf
        return Heard.NEW_PEER, self.hello(now_s)

    def hello(self, now_s: float, to_epoch: int | None = None) -> list[bytes]:
        """Return a HELLO, and set when the next one is due; `to_epoch` answers a peer that is not believed yet."""
        if to_epoch is not None:
            return self._build_hello(to_epoch)
        if not self.is_known:
            self.hello_s = now_s + HELLO_INTERVAL_S
            self._hello_sent_s = now_s if self._hello_sent_s is None else math.inf  # of two, which one is answered?
        return self._build_hello(self.origin.to_epoch)

    def _build_hello(self, to_epoch: int) -> list[bytes]:
        origin = Origin(self.origin.from_epoch, to_epoch, self.origin.acknowledges)
        return build_list(DatagramKind.HELLO, origin, [])

    def sample(self, round_trip_s: float) -> None:
        """Take a sample of the round trip (RFC 6298)."""
        if not self._has_sample:
            self._has_sample = True
            self._smooth_s = self.least_round_trip_s = round_trip_s
            self._deviation_s = round_trip_s / 2
            return
        self.least_round_trip_s = min(round_trip_s, self.least_round_trip_s * _CREEP)
        self._deviation_s += (abs(round_trip_s - self._smooth_s) - self._deviation_s) / 4
        self._smooth_s += (round_trip_s - self._smooth_s) / 8
