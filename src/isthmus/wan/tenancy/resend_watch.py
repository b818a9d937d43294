"""`ResendWatch`: how many frames of a RoCEv2 flow its NIC sends again, by their packet sequence numbers.

A NIC that goes back sends numbers that it has sent before. Only frames that pass the gateway's process are seen.
"""

from __future__ import annotations

from isthmus.wan.roce.roce_opcodes import psn_distance

MAX_QUEUE_PAIRS = 64
"""Of a flow whose numbers are kept; further ones replace the oldest."""
WINDOW_S = 1.0
MIN_FRAMES = 20
"""Fewer frames in a window say nothing."""


class ResendWatch:
    """Frames of one flow, by windows of a second."""

    __slots__ = ("_begin_s", "_highest", "_num_frames", "_num_resent", "_share")

    def __init__(self) -> None:
        self._highest: dict[int, int] = {}
        self._num_frames = self._num_resent = 0
        self._begin_s = self._share = 0.0

    def count(self, data: bytearray, base: int) -> None:
        """Count the frame whose base transport header is at `base`."""
        pair = int.from_bytes(data[base + 5 : base + 8], "big")
        number = int.from_bytes(data[base + 9 : base + 12], "big")
        self._num_frames += 1
        highest = self._highest.get(pair)
        if highest is None and len(self._highest) >= MAX_QUEUE_PAIRS:
            del self._highest[next(iter(self._highest))]
        if highest is None or psn_distance(highest, number) > 0:
            self._highest[pair] = number
        else:
            self._num_resent += 1

    def share(self, now_s: float) -> float:
        """Return the share of frames that were sent again in the last whole window."""
        if now_s - self._begin_s >= WINDOW_S:
            self._share = self._num_resent / self._num_frames if self._num_frames >= MIN_FRAMES else 0.0
            self._begin_s, self._num_frames, self._num_resent = now_s, 0, 0
        return self._share
