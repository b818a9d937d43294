"""A worker's transport process: `python -m isthmus.comm.process.transport_process CHANNEL MEMORY LISTENER`.

`ProcessTransport` starts it with three open descriptors: the control channel, the shared memory and the
rank's listening socket. The process owns all connections and exits when the worker exits.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple
from queue import SimpleQueue
from typing import Any, TypeVar

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.join_ranks import join_ranks
from isthmus.comm.process.control_messages import (
    ARRIVED,
    CLOSE,
    CLOSED,
    CONNECT_FAILED,
    CONNECTED,
    FAILED,
    LINK,
    LOST,
    RECEIVE_ANY,
    REFUSED,
    SEND,
    SENT,
    ControlChannel,
    ControlMessage,
    pack_error,
    pack_ranks,
    unpack_ranks,
)
from isthmus.comm.process.shared_memory_arena import SharedMemoryArena
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import IsthmusError, PeerError
from isthmus.core.process.steady_clock import steady_clock

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the worker; the transport process ignores them and exits after the worker."""

_MAX_BATCH = 64

_Result = TypeVar("_Result")


class TransportProcess:
    """Executes the worker's control messages from `channel`; calls `on_worker_exit` when the worker exits.

    Never blocks on the worker: replies are queued for a sender thread. Never blocks on a full send queue
    either: the worker keeps fewer messages in flight than `MAX_UNACKED_MESSAGES`.
    """

    def __init__(
        self,
        channel: ControlChannel,
        arena: SharedMemoryArena,
        listener: socket.socket,
        on_worker_exit: Callable[[], None],
    ) -> None:
        self._channel, self._arena, self._listener, self._on_worker_exit = (
            channel,
            arena,
            listener,
            on_worker_exit,
        )
        self._outgoing: SimpleQueue[ControlMessage | None] = SimpleQueue()
        self._transport: TcpTransport | None = None
        self._close_reason: Future[str] = Future()

    def run(self) -> None:
        """Connect to all ranks, transfer messages until CLOSE, then close the transport."""
        first = self._channel.receive()
        if first is None:
            return self._on_worker_exit()
        threading.Thread(target=self._receive_loop, name="isthmus-channel-receive", daemon=True).start()
        sender = threading.Thread(target=self._send_loop, name="isthmus-channel-send", daemon=True)
        sender.start()
        try:
            transport = self._transport = self._connect(**json.loads(first.text))
        except IsthmusError as error:
            self._outgoing.put(ControlMessage(CONNECT_FAILED, text=pack_error(error)))
        else:
            self._outgoing.put(ControlMessage(CONNECTED))
            transport.close(self._close_reason.result())
            self._outgoing.put(ControlMessage(CLOSED, text=pack_ranks(transport.unclosed_peers())))
        self._outgoing.put(None)
        return sender.join()

    def _connect(
        self,
        greeting: dict[str, Any],
        endpoints: list[dict[str, Any]],
        timeout_s: float,
        heartbeat_s: float,
        peer_timeout_s: float,
        clock_anchor_s: float,
        keys: dict[str, Any] | None,
        max_message_bytes: int,
    ) -> TcpTransport:
        own_keys = None if keys is None else LinkKeys.from_hex(**keys)
        mine, peers = Greeting(**greeting), [Endpoint(**one) for one in endpoints]
        clock = steady_clock(clock_anchor_s)
        return join_ranks(
            mine,
            peers,
            self._listener,
            timeout_s,
            heartbeat_s=heartbeat_s,
            peer_timeout_s=peer_timeout_s,
            on_loss=lambda error: self._outgoing.put(ControlMessage(LOST, text=pack_error(error))),
            on_link=self._report_link,
            clock=clock,
            keys=own_keys,
            max_message_bytes=max_message_bytes,
            on_refused=self._report_refused,
        )

    def _receive_loop(self) -> None:
        for message in self._channel.receive_all():
            if message.kind == CLOSE:
                self._close_reason.set_result(message.text)
            elif self._transport is not None:
                self._start_transfer(self._transport, message)
        self._on_worker_exit()

    def _start_transfer(self, transport: TcpTransport, message: ControlMessage) -> None:
        buffer = self._arena.view(message.offset, message.num_bytes)
        peer, tag, number = message.peer, message.tag, message.number
        if message.kind == SEND:
            sent = transport.send(peer, tag, message.text, buffer)
            self._report_done(number, sent, lambda _: ControlMessage(SENT, number))
        elif message.kind == RECEIVE_ANY:
            peers, _, label = message.text.partition("\n")
            found = transport.receive_any(unpack_ranks(peers), tag, label, buffer)
            self._report_done(number, found, lambda of: _arrived(number, *of))
        else:
            received = transport.receive(peer, tag, message.text, buffer)
            self._report_done(number, received, lambda arrival: _arrived(number, peer, arrival))

    def _report_done(self, number: int, future: Future[_Result], reply: Callable[[_Result], ControlMessage]) -> None:
        """Send `reply` of the result of message `number` when it is there, or its error."""

        def report(done: Future[_Result]) -> None:
            error = done.exception()
            failed = error and ControlMessage(FAILED, number, text=pack_error(error))
            self._outgoing.put(failed or reply(done.result(0)))

        future.add_done_callback(report)

    def _report_link(self, peer: int, reason: str, lasted_s: float | None) -> None:
        self._outgoing.put(ControlMessage(LINK, peer=peer, times_s=(lasted_s or 0.0, 0.0, 0.0, 0.0, 0.0), text=reason))

    def _report_refused(self, address: str) -> None:
        self._outgoing.put(ControlMessage(REFUSED, text=address))

    def _send_loop(self) -> None:
        """Send queued replies, several per write."""
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                messages = [message]
                while not self._outgoing.empty() and len(messages) < _MAX_BATCH:
                    following = self._outgoing.get()
                    if following is None:
                        self._outgoing.put(None)
                        break
                    messages.append(following)
                self._channel.send(*messages)


def _arrived(number: int, source: int, arrival: Arrival) -> ControlMessage:
    return ControlMessage(ARRIVED, number, source, times_s=astuple(arrival))


def _exit_on_exception(what: threading.ExceptHookArgs) -> None:
    traceback.print_exception(what.exc_value)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Run the transport process; it exits immediately when the worker does."""
    for one in _IGNORED_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    threading.excepthook = _exit_on_exception
    channel, memory, listener = (int(one) for one in arguments)
    process = TransportProcess(
        ControlChannel(socket.socket(fileno=channel)),
        SharedMemoryArena(memory),
        socket.socket(fileno=listener),
        on_worker_exit=lambda: os._exit(PeerError.exit_code),
    )
    process.run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
