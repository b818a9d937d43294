"""`FlowCongestion`: how a flow is carried while its link is congested, as a state machine with hysteresis.

Source: the report on cross-domain pooling, 4.3.3 (2): congestion first marks a RoCEv2 flow's packets again (DSCP), so
that they take queues of low latency; where packets are lost all the same, the flow goes over TCP, whose resends spare
NICs going back; when congestion has passed, the flow comes back, the same way.

| from | to | when |
|---|---|---|
| direct | marked | congested for `RAISE_S` |
| marked | tcp | lossy for `RAISE_S`, at least `DWELL_S` after it was marked |
| marked | direct | calm for as long as `calm_s` |
| tcp | marked | calm for as long as `calm_s` |

What is neither congested nor calm changes nothing. A flow that is raised again within `RELAPSE_S` of its return waits
twice as long for the next one, up to `MAX_CALM_S`: a link at the edge of congestion does not move it to and fro.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

RAISE_S = 0.3
DWELL_S = 0.5
CALM_S = 2.0
MAX_CALM_S = 64.0
RELAPSE_S = 10.0

CONGESTED_MARKS, CALM_MARKS = 0.01, 0.001
"""Share of packets with a congestion mark above which a link is congested, and up to which it may be calm."""
CONGESTED_DELAY_S, CALM_DELAY_S = 0.005, 0.002
"""Round trip beyond the least one."""
LOSSY_SHARE, CALM_LOSS = 0.001, 0.0001


class CarriedBy(enum.Enum):
    """How a flow's frames go to the other site."""

    DIRECT = "direct"
    """By VXLAN, with the mark of its class."""
    MARKED = "marked"
    """By VXLAN, with the mark of its class under congestion."""
    TCP = "tcp"
    """In the TCP connection between the gateways."""


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """A link as measured over the last second."""

    marked_share: float = 0.0
    queue_delay_s: float = 0.0
    lost_share: float = 0.0

    @property
    def is_lossy(self) -> bool:
        """Whether NICs that go back would waste the link."""
        return self.lost_share >= LOSSY_SHARE

    @property
    def is_congested(self) -> bool:
        """Whether packets wait, are marked or are lost."""
        return (
            self.marked_share >= CONGESTED_MARKS or self.queue_delay_s >= CONGESTED_DELAY_S or self.is_lossy
        )  # fmt: skip

    @property
    def is_calm(self) -> bool:
        """Whether nothing speaks of congestion; between the two, a link keeps what it was."""
        return (
            self.marked_share <= CALM_MARKS and self.queue_delay_s <= CALM_DELAY_S and self.lost_share <= CALM_LOSS
        )  # fmt: skip


class FlowCongestion:
    """The state of one flow, or of all flows of a link that are carried alike."""

    __slots__ = ("_calm_since_s", "_changed_s", "_congested_since_s", "_lossy_since_s", "_returned_s", "calm_s", "now")

    def __init__(self) -> None:
        self.now = CarriedBy.DIRECT
        self.calm_s = CALM_S
        """How long a link has to be calm before the flow goes a step back."""
        self._congested_since_s = self._lossy_since_s = self._calm_since_s = math.inf
        self._changed_s = self._returned_s = -math.inf

    def measured(self, quality: LinkQuality, now_s: float) -> CarriedBy:
        """Take in a measurement of the link; return how the flow goes from now on."""
        self._congested_since_s = min(self._congested_since_s, now_s) if quality.is_congested else math.inf
        self._lossy_since_s = min(self._lossy_since_s, now_s) if quality.is_lossy else math.inf
        self._calm_since_s = min(self._calm_since_s, now_s) if quality.is_calm else math.inf
        is_calm = now_s - max(self._calm_since_s, self._changed_s) >= self.calm_s
        if self.now is CarriedBy.DIRECT and now_s - self._congested_since_s >= RAISE_S:
            relapsed = now_s - self._returned_s < RELAPSE_S
            self.calm_s = min(self.calm_s * 2, MAX_CALM_S) if relapsed else CALM_S
            self._change(CarriedBy.MARKED, now_s)
        elif self.now is CarriedBy.MARKED and self._is_beyond_marks(now_s):
            self._change(CarriedBy.TCP, now_s)
        elif self.now is CarriedBy.TCP and is_calm:
            self._change(CarriedBy.MARKED, now_s)
        elif self.now is CarriedBy.MARKED and is_calm:
            self._returned_s = now_s
            self._change(CarriedBy.DIRECT, now_s)
        return self.now

    def _is_beyond_marks(self, now_s: float) -> bool:
        return now_s - self._lossy_since_s >= RAISE_S and now_s - self._changed_s >= DWELL_S

    def _change(self, to: CarriedBy, now_s: float) -> None:
        self.now, self._changed_s = to, now_s
