"""`DeviceExchange`: messages among the devices of the ranks that share a stage, by the library of their cluster."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from isthmus.comm.group.composed.device_messages import DeviceMessages, DeviceWork
from isthmus.comm.group.isthmus_group import IsthmusGroup

CONTEXT_TAGS, EXPERT_TAGS = 2**21, 2**22
"""First tags of the exchanges of ranks that share sequences, and experts; those between stages are below."""


class DeviceExchange:
    """Messages among `ranks`, ranks of the transport of `messages`, by their places; tags begin at `first_tag`."""

    def __init__(self, messages: DeviceMessages, ranks: Sequence[int], first_tag: int) -> None:
        self._messages, self._ranks, self._first_tag = messages, tuple(ranks), first_tag

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of any shape, is on the device."""
        return self._messages.memory.owns(tensor)

    def start(self, tensor: torch.Tensor, peer: int, tag: int = 0, *, is_send: bool) -> DeviceWork:
        """Start to send contiguous `tensor`, of any shape, to the rank at place `peer`, or to receive it from there.

        It begins behind what the calling thread has queued on the device.
        """
        begin = self._messages.send if is_send else self._messages.receive
        after = self._messages.memory.record(tensor.device)
        return begin(tensor, self._ranks[peer], self._first_tag + tag, after)


def find_device_exchange(ranks: Sequence[int], first_tag: int) -> DeviceExchange | None:
    """Return the exchange of `ranks` of the run, this one among them; None if no library carries their messages."""
    world = dist.group.WORLD
    messages = world.device_messages if isinstance(world, IsthmusGroup) else None
    if messages is None or not set(ranks) - {dist.get_rank()} <= set(messages.peers):
        return None
    return DeviceExchange(messages, ranks, first_tag)
