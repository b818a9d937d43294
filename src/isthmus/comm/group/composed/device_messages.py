"""`DeviceMessages`: messages between the devices of a cluster, by the vendor's library.

A library executes the messages of two ranks in the order in which both call it, and keeps a device busy until both
have. So ranks agree first, over the transport: the receiver says that it has posted a receive ("ready"), and the
sender, once it has the message too, gives it the next number of its messages to that rank ("go"). Both then call the
library, the receiver in the order of the numbers. So any order of sends and receives works, no memory is needed but
that of the caller, and devices never wait for a rank that has not called. Label and size are compared with "ready" and
"go".

Threads of this object call the library, one for each direction: a first call waits for that of the other rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from isthmus.comm.group.group_work import IsthmusWork, tensor_label
from isthmus.comm.group.vendors.device_memory import DeviceMemory
from isthmus.comm.group.vendors.vendor_group import VendorGroup
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError

_FIRST_TAG = -(2**40)
"""Tags of "ready" and "go" are below it; those of stores begin at -1, those of groups at 0."""

_CLOSED = "the process group is closed"

_NUMBER_BYTES, _MAX_LABEL_BYTES = 8, 200


class DeviceWork(IsthmusWork):
    """A message between devices. `wait` ends when the library has been called on this side.

    What the waiting thread queues next on the device begins behind the message; the host goes on.
    """

    def __init__(self, future: Future[Any], operation: str, tensor: torch.Tensor, memory: DeviceMemory) -> None:
        super().__init__(future, operation, [tensor])
        self._memory, self._device = memory, tensor.device

    def wait_until_called(self, timeout: timedelta) -> None:
        """Wait until the library has been called; the device goes on. Raises `PeerError`."""
        try:
            self._future.result(timeout.total_seconds())
        except FutureTimeoutError as error:
            raise PeerError(f"{self._operation}: the other rank has not begun it") from error

    def _finish(self, result: Any) -> None:
        self._memory.order_after(self._device, result)


class DeviceSend(DeviceWork):
    """A send: its tensor is kept until the device has read it, so only who changes it needs to wait."""


@dataclass(frozen=True)
class _Message:
    """A tensor [N] and the mark behind which the device may use it; `called` has the mark behind the library's work."""

    tensor: torch.Tensor
    peer: int
    tag: int
    label: str
    after: Any
    number: memoryview
    called: Future[Any] = field(default_factory=Future)


_Item: TypeAlias = "tuple[_Message, Future[Any]] | None"


class DeviceMessages:
    """Messages of this rank of `transport`; `places` has the place in `library` of each rank that it can be sent to.

    A lost peer fails all messages, by the transport.
    """

    def __init__(self, transport: Transport, library: VendorGroup, places: Mapping[int, int]) -> None:
        self._transport, self._library, self._places = transport, library, dict(places)
        self._sends: SimpleQueue[_Item] = SimpleQueue()
        self._receives: SimpleQueue[_Item] = SimpleQueue()
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        self._early: dict[tuple[int, int], _Message] = {}
        self._lock = threading.Lock()
        self._is_open, self._has_threads = True, False

    @property
    def memory(self) -> DeviceMemory:
        """The memory of the devices."""
        return self._library.vendor.memory

    @property
    def peers(self) -> Collection[int]:
        """The ranks that messages go to and come from."""
        return self._places.keys()

    def carries(self, peer: int, tensor: torch.Tensor) -> bool:
        """Return whether messages like `tensor`, of any shape, go to and come from rank `peer` this way."""
        return peer in self._places and self.memory.owns(tensor) and tensor.numel() > 0

    def send(self, tensor: torch.Tensor, peer: int, tag: int, after: Any, what: str = "") -> DeviceSend:
        """Send contiguous `tensor`, of any shape, behind the mark `after`; nothing changes it until the device has.

        `what`, with type and shape, must be equal at both ranks; tags are below 2**28.
        """
        one = self._message(tensor, peer, tag, after, what)
        ready = self._transport.receive(peer, _ready(tag), one.label, memoryview(bytearray(1)))
        ready.add_done_callback(lambda done: self._agreed(self._sends, one, done))
        return DeviceSend(one.called, f"send to rank {peer} (tag {tag})", tensor, self.memory)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, after: Any, what: str = "") -> DeviceWork:
        """Receive into contiguous `tensor`, of any shape, behind the mark `after`; see `send`."""
        one = self._message(tensor, peer, tag, after, what)
        go = self._transport.receive(peer, _go(tag), one.label, one.number)
        self._transport.send(peer, _ready(tag), one.label, memoryview(bytearray(1)))
        go.add_done_callback(lambda done: self._agreed(self._receives, one, done))
        return DeviceWork(one.called, f"receive from rank {peer} (tag {tag})", tensor, self.memory)

    def close(self) -> None:
        """Stop the threads behind what they do; messages that begin, or are agreed on, later fail."""
        with self._lock:
            self._is_open = False
            self._sends.put(None)
            self._receives.put(None)

    def _agreed(self, queue: SimpleQueue[_Item], one: _Message, done: Future[Any]) -> None:
        """Pass a message that ranks have agreed on, or that has failed, to its thread."""
        with self._lock:
            if self._is_open:
                queue.put((one, done))
                return
        one.called.set_exception(done.exception() or PeerError(_CLOSED))

    def _message(self, tensor: torch.Tensor, peer: int, tag: int, after: Any, what: str) -> _Message:
        with self._lock:
            if not self._is_open:
                raise PeerError(_CLOSED)
            if not self._has_threads:
                self._has_threads = True
                for name, queue, call in (
                    ("isthmus-device-send", self._sends, self._send_next),
                    ("isthmus-device-receive", self._receives, self._receive_next),
                ):
                    threading.Thread(target=_run_queue, args=(queue, call), name=name, daemon=True).start()
        label = f"{tensor_label(tensor)} {what}".rstrip().encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")
        return _Message(tensor.detach().view(-1), peer, tag, label, after, memoryview(bytearray(_NUMBER_BYTES)))

    def _send_next(self, one: _Message) -> None:
        number = self._num_sent[one.peer]
        self._num_sent[one.peer] += 1
        one.number[:] = number.to_bytes(_NUMBER_BYTES, "little")
        self._transport.send(one.peer, _go(one.tag), one.label, one.number)
        self._call(one, self._library.send)

    def _receive_next(self, one: _Message) -> None:
        self._early[one.peer, int.from_bytes(one.number, "little")] = one
        while (following := self._early.pop((one.peer, self._num_received[one.peer]), None)) is not None:
            self._num_received[one.peer] += 1
            self._call(following, self._library.receive)

    def _call(self, one: _Message, call: Callable[[torch.Tensor, int], Any]) -> None:
        """Call the library on a stream behind what makes or frees the memory; the message is done behind that."""
        memory, device = self.memory, one.tensor.device
        try:
            with torch.no_grad(), memory.aside(device, one.after):
                call(one.tensor, self._places[one.peer]).wait()
                memory.keep(one.tensor)
                one.called.set_result(memory.record(device))
        except Exception as error:
            loss = self._transport.loss()
            reason = loss.message if loss else str(error).strip().partition("\n")[0]
            one.called.set_exception(PeerError(f"{self._library.vendor.name}: {reason}"))


def _ready(tag: int) -> int:
    return _FIRST_TAG - 2 * tag


def _go(tag: int) -> int:
    return _FIRST_TAG - 2 * tag - 1


def _run_queue(queue: SimpleQueue[_Item], call: Callable[[_Message], None]) -> None:
    while _process_item(queue.get(), call):
        pass  # `_process_item` drops its references before the next wait


def _process_item(item: _Item, call: Callable[[_Message], None]) -> bool:
    """Process what has been agreed on, or has failed; return False for the end of the queue."""
    if item is None:
        return False
    one, agreed = item
    try:
        agreed.result()
        call(one)
    except Exception as error:
        if not one.called.done():
            one.called.set_exception(error if isinstance(error, PeerError) else PeerError(str(error)))
    return True
