"""`ClusterCodec`: encodes what one rank sends to other clusters in a wire format; the `Codec` of `run_program`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from isthmus.comm.wire_formats.error_feedback import ErrorFeedback
from isthmus.comm.wire_formats.wire_format import WireFormat


class ClusterCodec:
    """Encodes the messages of `rank` to other clusters; `clusters[r]` is that of rank `r` of the group.

    `feedback` is that of one tensor or bucket, which is summed by one codec at a time.
    """

    def __init__(
        self, wire_format: WireFormat, clusters: Sequence[str], rank: int, feedback: ErrorFeedback | None
    ) -> None:
        self.name = wire_format.name
        self._format, self._clusters, self._rank = wire_format, clusters, rank
        self._feedback = feedback or ErrorFeedback()

    def crosses(self, peer: int) -> bool:
        """Return whether messages with rank `peer` of the group are encoded."""
        return self._clusters[peer] != self._clusters[self._rank]

    def num_bytes(self, num_values: int) -> int:
        """Return the size of a message of `num_values`."""
        return self._format.num_bytes(num_values)

    def encode(self, elements: tuple[int, int, int], value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the message for `value` [N], and what its receivers decode, [N]."""
        data, decoded = self._feedback.encode(elements, value.numpy(), self._format)
        return torch.from_numpy(np.array(data)), torch.from_numpy(decoded)

    def rescale_errors(self, factor: float) -> None:
        """Multiply the rounding errors by `factor`; no sum is under way."""
        self._feedback.rescale(factor)

    def decode(self, data: torch.Tensor, into: torch.Tensor) -> None:
        """Store the values of the message `data` in `into` [N]."""
        into.copy_(torch.from_numpy(self._format.decode(data.numpy(), into.numel())))
