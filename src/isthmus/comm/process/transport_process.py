"""A worker's transport process: `python -m isthmus.comm.process.transport_process LINE MEMORY LISTENER`.

Started by `ProcessTransport` with three open files: the line to the worker, the memory shared with it, the
socket at which the rank listens. It owns all connections, and is gone when the worker is.
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
"""What ends a worker; its transport's process ends with it, and not before."""

_AT_ONCE = 64


class Carrier:
    """Does what the worker at the other end of `line` says; `gone` is called once that is no more.

    Never waits for the worker: what there is to tell is queued, and said by a thread of its own. Nor, while
    messages go, for the network: the worker has fewer on their way than a peer's outbox takes.
    """

    def __init__(self, line: Line, arena: Arena, listener: socket.socket, gone: Callable[[], None]) -> None:
        self._line, self._arena, self._listener, self._gone = line, arena, listener, gone
        self._told: SimpleQueue[Word | None] = SimpleQueue()
        self._transport: TcpTransport | None = None
        self._end: Future[str] = Future()

    def run(self) -> None:
        """Meet the others, carry messages, end."""
        first = self._line.next()
        if first is None:
            return self._gone()
        threading.Thread(target=self._listen, name="isthmus-listen", daemon=True).start()
        speaker = threading.Thread(target=self._speak, name="isthmus-speak", daemon=True)
        speaker.start()
        try:
            transport = self._transport = self._meet(**json.loads(first.text))
        except IsthmusError as error:
            self._told.put(Word(REFUSED, text=packed_error(error)))
        else:
            self._told.put(Word(MET))
            transport.close(self._end.result())
            self._told.put(Word(CLOSED, text=packed_ranks(transport.stragglers())))
        self._told.put(None)
        return speaker.join()

    def _meet(
        self,
        greeting: dict[str, Any],
        endpoints: list[dict[str, Any]],
        timeout_s: float,
        heartbeat_s: float,
        peer_timeout_s: float,
    ) -> TcpTransport:
        mine, places = Greeting(**greeting), [Endpoint(**one) for one in endpoints]
        return TcpTransport(
            mine,
            places,
            connect(mine, places, self._listener, timeout_s),
            self._listener,
            heartbeat_s=heartbeat_s,
            peer_timeout_s=peer_timeout_s,
            on_loss=lambda error: self._told.put(Word(LOST, text=packed_error(error))),
            on_link=self._tell_of_link,
        )

    def _listen(self) -> None:
        for word in self._line.hear():
            if word.kind == CLOSE:
                self._end.set_result(word.text)
            elif self._transport is not None:
                self._start(self._transport, word)
        self._gone()

    def _start(self, transport: TcpTransport, word: Word) -> None:
        start = transport.send if word.kind == SEND else transport.receive
        room = self._arena.view(word.offset, word.num_bytes)
        future: Future[Any] = start(word.peer, word.tag, word.text, room)
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
        """Say what there is to tell, all at once where it is several."""
        with suppress(OSError):
            while (word := self._told.get()) is not None:
                words = [word]
                while not self._told.empty() and len(words) < _AT_ONCE:
                    following = self._told.get()
                    if following is None:
                        self._told.put(None)
                        break
                    words.append(following)
                self._line.say(*words)


def _end_by_defect(what: threading.ExceptHookArgs) -> None:
    traceback.print_exception(what.exc_value)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Be the process; it ends at once when the worker does."""
    for one in _ENDED:
        signal.signal(one, signal.SIG_IGN)
    threading.excepthook = _end_by_defect
    line, memory, listener = (int(one) for one in arguments)
    carrier = Carrier(
        Line(socket.socket(fileno=line)),
        Arena(memory),
        socket.socket(fileno=listener),
        gone=lambda: os._exit(PeerError.exit_code),
    )
    carrier.run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
