"""`DeviceProgram`: one rank's program of a collective whose tensors are on a device.

Inside a cluster the vendor's library carries messages from device to device; what ranks of other clusters receive
passes pinned memory and the transport. Sums are taken on the device in the order that programs have on the host, so
they have the same bits. Work is queued on a stream of its own, and the host goes on when all of it is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from isthmus.comm.group.collective_work import CollectiveWork
from isthmus.comm.group.composed.device_messages import DeviceMessages, DeviceSend, DeviceWork
from isthmus.comm.group.run_program import Block, Codec, Combine, run_program
from isthmus.comm.group.transport_messages import TransportMessages, sends_of
from isthmus.comm.group.vendors.device_memory import DeviceMemory
from isthmus.strategies import Message, RankProgram

_MIN_WAIT_S = 1.0
"""What is on its way gets at least this time."""


class DeviceProgram:
    """The part `program` of a rank of the group of `ranks`, ranks of the transport; begins behind what is queued.

    `inputs` and `outputs` are as for `run_program`, on the device of `near`, and share no memory. `what` says what all
    ranks agree on; `codec` encodes, in host memory, what crosses between clusters.
    """

    def __init__(
        self,
        near: DeviceMessages,
        ranks: Sequence[int],
        what: str,
        program: RankProgram,
        inputs: Sequence[Block],
        outputs: Sequence[Block],
        combine: Combine | None,
        codec: Codec | None,
    ) -> None:
        self._near, self._ranks, self._what = near, tuple(ranks), what
        self._program, self._inputs, self._outputs, self._combine = program, inputs, outputs, combine
        self._codec = None if codec is None else CodecOnDevice(codec, near.memory)
        self._device = next(tensor.device for _, tensor in (*inputs, *outputs))
        self._after = near.memory.record(self._device)
        self._end: Any = None

    @property
    def owed(self) -> list[Message]:
        """The messages that the transport carries."""
        return [one for one in sends_of(self._program) if self._ranks[one.peer] not in self._near.peers]

    def run(self, messages: TransportMessages) -> None:
        """Queue the program; raises `PeerError`."""
        memory = self._near.memory
        with torch.no_grad(), memory.aside(self._device, self._after):
            both = _Messages(messages, self._near, self._ranks, self._what)
            run_program(self._program, self._inputs, self._outputs, self._combine, both, self._codec, keeps_memory=True)
            both.finish()
            self._end = memory.record(self._device)

    def order_after(self) -> None:
        """Let what the calling thread queues next begin behind the program, all of which is queued."""
        self._near.memory.order_after(self._device, self._end)


class DeviceProgramWork(CollectiveWork):
    """The work of a `DeviceProgram`: the host waits until it is queued, and the device until it is done."""

    def __init__(
        self, future: Future[Any], operation: str, tensors: list[torch.Tensor], program: DeviceProgram
    ) -> None:
        super().__init__(future, operation, tensors)
        self._program = program

    def _finish(self, result: Any) -> None:
        super()._finish(result)
        self._program.order_after()


class CodecOnDevice:
    """`codec` for values of a device: they are encoded and decoded in host memory, as on the host."""

    def __init__(self, codec: Codec, memory: DeviceMemory) -> None:
        self.name, self._codec, self._memory = codec.name, codec, memory
        self._kept: list[torch.Tensor] = []

    def crosses(self, peer: int) -> bool:
        """Return whether messages to and from `peer` are encoded."""
        return self._codec.crosses(peer)

    def num_bytes(self, num_elements: int) -> int:
        """Return the size of a message."""
        return self._codec.num_bytes(num_elements)

    def encode(self, elements: tuple[int, int, int], value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the message for `value` [N] in host memory, and what its receivers decode, [N] on the device."""
        host, wait = self._memory.to_host(value)
        wait()
        message, decoded = self._codec.encode(elements, host)
        return message, self._to_device(decoded, torch.empty_like(value))

    def decode(self, data: torch.Tensor, into: torch.Tensor) -> None:
        """Store the values of the message `data` in `into` [N]."""
        host = self._memory.new_host(into)
        self._codec.decode(data, host)
        self._to_device(host, into)

    def _to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        self._memory.to_device(host, tensor)
        self._kept.append(host)
        return tensor


class _Messages:
    """The messages of a program: near ones by the library, the others by `messages`, from and to host memory."""

    def __init__(self, messages: TransportMessages, near: DeviceMessages, ranks: Sequence[int], what: str) -> None:
        self.rank = messages.rank
        self._messages, self._near, self._ranks, self._what = messages, near, ranks, what
        self._landing: dict[Future[Any], tuple[torch.Tensor, torch.Tensor]] = {}
        self._sent: list[DeviceSend] = []
        self._kept: list[torch.Tensor] = []

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Send `tensor`, flat [num_elements], which does not change afterwards."""
        memory, peer = self._near.memory, self._ranks[message.peer]
        if self._near.carries(peer, tensor):
            after, tag = memory.record(tensor.device), self._messages.tag_in_group(message)
            self._sent.append(self._near.send(tensor, peer, tag, after, self._what))
            return
        if memory.owns(tensor):
            tensor, wait = memory.to_host(tensor)
            wait()
        self._messages.send(message, tensor)

    def receive(self, message: Message, into: torch.Tensor) -> Any:
        """Post a receive into `into`, flat [num_elements]."""
        memory, peer = self._near.memory, self._ranks[message.peer]
        if self._near.carries(peer, into):
            after, tag = memory.record(into.device), self._messages.tag_in_group(message)
            return self._near.receive(into, peer, tag, after, self._what)
        if not memory.owns(into):
            return self._messages.receive(message, into)
        host = memory.new_host(into)
        future = self._messages.receive(message, host)
        self._landing[future] = host, into
        return future

    def wait(self, message_peer: int, future: Any) -> None:
        """Wait for a receive from `message_peer`, behind which the device goes on; raises `PeerError`."""
        if isinstance(future, DeviceWork):
            future.wait(self._limit())
            return
        self._messages.wait(message_peer, future)
        landing = self._landing.pop(future, None)
        if landing is not None:
            self._near.memory.to_device(*landing)
            self._kept.append(landing[0])  # until the copy has ended, which the program's work waits for

    def finish(self) -> None:
        """Wait until the library has been called for all that was sent, whose memory is free behind the program.

        Raises `PeerError`.
        """
        for one in self._sent:
            one.wait(self._limit())

    def _limit(self) -> timedelta:
        return timedelta(seconds=max(self._messages.left_s, _MIN_WAIT_S))
