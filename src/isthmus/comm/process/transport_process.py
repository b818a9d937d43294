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
from functools import partial
from queue import SimpleQueue
from typing import Any

from isthmus.comm.process.arena import Arena
from isthmus.comm.process.control_messages import (
    ARRIVED,
    CLOSE,
    CLOSED,
    FAILED,
    LINK,
    LOST,
    MET,
    REFUSED,
    SEND,
    SENT,
    Line,
    Word,
    packed_error,
    packed_ranks,
)
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.rendezvous import connect
from isthmus.comm.tcp.tcp_transport import TcpTransport
from isthmus.comm.tcp.wire_format import Greeting
from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import IsthmusError, PeerError

_ENDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the worker; the transport process ignores them and exits after the worker."""

_AT_ONCE = 64


class Carrier:
    """Executes the worker's control messages from `line`; calls `gone` when the worker exits.

    Never blocks on the worker: replies are queued for a sender thread. Never blocks on a full send queue
    either: the worker keeps fewer messages in flight than `QUEUE_MESSAGES`.
    """

    def __init__(self, line: Line, arena: Arena, listener: socket.socket, gone: Callable[[], None]) -> None:
        self._line, self._arena, self._listener, self._gone = line, arena, listener, gone
        self._told: SimpleQueue[Word | None] = SimpleQueue()
        self._transport: TcpTransport | None = None
        self._end: Future[str] = Future()

    def run(self) -> None:
        """Connect to all ranks, transfer messages until CLOSE, then close the transport."""
        first = self._line.next()
        if first is None:
            return self._gone()
        threading.Thread(target=self._listen, name="isthmus-channel-receive", daemon=True).start()
        sender = threading.Thread(target=self._speak, name="isthmus-channel-send", daemon=True)
        sender.start()
        try:
            transport = self._transport = self._meet(**json.loads(first.text))
        except IsthmusError as error:
            self._told.put(Word(REFUSED, text=packed_error(error)))
        else:
            self._told.put(Word(MET))
            transport.close(self._end.result())
            self._told.put(Word(CLOSED, text=packed_ranks(transport.stragglers())))
        self._told.put(None)
        return sender.join()

    def _meet(
        self,
        greeting: dict[str, Any],
        endpoints: list[dict[str, Any]],
        timeout_s: float,
        heartbeat_s: float,
        peer_timeout_s: float,
    ) -> TcpTransport:
        mine, peers = Greeting(**greeting), [Endpoint(**one) for one in endpoints]
        return TcpTransport(
            mine,
            peers,
            connect(mine, peers, self._listener, timeout_s),
            self._listener,
            heartbeat_s=heartbeat_s,
            peer_timeout_s=peer_timeout_s,
            on_loss=lambda error: self._told.put(Word(LOST, text=packed_error(error))),
            on_link=self._tell_of_link,
        )

    def _listen(self) -> None:
        for message in self._line.hear():
            if message.kind == CLOSE:
                self._end.set_result(message.text)
            elif self._transport is not None:
                self._start(self._transport, message)
        self._gone()

    def _start(self, transport: TcpTransport, word: Word) -> None:
        start = transport.send if word.kind == SEND else transport.receive
        buffer = self._arena.view(word.offset, word.num_bytes)
        future: Future[Any] = start(word.peer, word.tag, word.text, buffer)
        future.add_done_callback(partial(self._tell_of_end, word.number))

    def _tell_of_end(self, number: int, future: Future[Arrival | None]) -> None:
        error = future.exception()
        if error is not None:
            self._told.put(Word(FAILED, number, text=packed_error(error)))
        elif (arrival := future.result()) is not None:
            self._told.put(Word(ARRIVED, number, times_s=(arrival.sent_s, arrival.arrived_s)))
        else:
            self._told.put(Word(SENT, number))

    def _tell_of_link(self, peer: int, why: str, lasted_s: float | None) -> None:
        self._told.put(Word(LINK, peer=peer, times_s=(lasted_s or 0.0, 0.0), text=why))

    def _speak(self) -> None:
        """Send queued replies, several per write."""
        with suppress(OSError):
            while (message := self._told.get()) is not None:
                messages = [message]
                while not self._told.empty() and len(messages) < _AT_ONCE:
                    following = self._told.get()
                    if following is None:
                        self._told.put(None)
                        break
                    messages.append(following)
                self._line.say(*messages)


def _end_by_defect(what: threading.ExceptHookArgs) -> None:
    traceback.print_exception(what.exc_value)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Run the transport process; it exits immediately when the worker does."""
    for one in _ENDED:
        signal.signal(one, signal.SIG_IGN)
    threading.excepthook = _end_by_defect
    channel, memory, listener = (int(one) for one in arguments)
    process = Carrier(
        Line(socket.socket(fileno=channel)),
        Arena(memory),
        socket.socket(fileno=listener),
        gone=lambda: os._exit(PeerError.exit_code),
    )
    process.run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
