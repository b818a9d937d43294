"""`Entrance`: accepts connections and answers those that begin with a valid greeting.

One thread reads the first bytes of all connections. Strangers cost a file descriptor for at most `FIRST_TIMEOUT_S` and
no thread. When too many connections wait, the oldest one of the address that has the most makes room, so that silent
strangers never keep a member out.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from isthmus.comm.channel.channel import Channel
from isthmus.comm.tcp.greeting import Claim
from isthmus.comm.tcp.handshake import Handshake
from isthmus.comm.tcp.reconnect import GreetedChannel
from isthmus.core.errors import IsthmusError, RestartError, UnavailableError

FIRST_TIMEOUT_S = 10.0
"""Longest time from accepting a connection to its first bytes."""

GREETING_TIMEOUT_S = 10.0
"""Longest time from there to the end of the greeting."""

MAX_WAITING = 256
"""Most connections that have not sent their first bytes."""

MAX_ANSWERING = 64
"""Most connections in the middle of their greeting: with keys, only members come that far."""

_MAX_ACCEPTS = 64

Admit = Callable[[int, int, GreetedChannel], bool]
"""(rank, number, connection) -> whether the connection was taken."""

Unclaim = Callable[[int, int, Exception], object]
"""(rank, number, why) for a connection that was claimed and then failed."""


@dataclass(eq=False)
class _Waiting:
    """A connection before its first bytes are complete."""

    sock: socket.socket
    address: str
    deadline_s: float
    first: bytes = b""


class Entrance:
    """The entrance of `listener`, which it leaves open. `poll` accepts and reads; `close` ends what is under way.

    `claim` and `unclaim` mark a connection as being opened, or not any more, `admit` takes it, `on_restart` handles a
    rank with a later incarnation, and `on_refused` counts a caller that was turned away, by its address.
    """

    def __init__(
        self,
        listener: socket.socket,
        handshake: Handshake,
        admit: Admit,
        *,
        claim: Claim = lambda _rank, _number: True,
        unclaim: Unclaim = lambda _rank, _number, _why: None,
        on_restart: Callable[[RestartError], None] = lambda _: None,
        on_refused: Callable[[str], None] = lambda _: None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._listener, self._handshake, self._admit = listener, handshake, admit
        self._claim, self._unclaim, self._on_restart, self._on_refused = claim, unclaim, on_restart, on_refused
        self._max_waiting = max_waiting
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._answering: dict[threading.Thread, tuple[socket.socket | None, float]] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the current or next `poll`."""
        self._waker.send(b"w")

    def poll(self, timeout_s: float) -> None:
        """Handle what arrives within `timeout_s`; return after the first of it."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(1)
            elif key.fileobj in self._waiting:
                self._read(self._waiting[key.fileobj])
        now_s = time.monotonic()
        for one in list(self._waiting.values()):
            if now_s < one.deadline_s:
                break
            self._refuse(one)
        with self._lock:
            late = [sock for sock, deadline_s in self._answering.values() if now_s >= deadline_s]
        for sock in late:
            _shut_down(sock)

    def close(self) -> None:
        """Close waiting connections, shut down those in their greeting, and join their threads."""
        for one in list(self._waiting.values()):
            self._drop(one).close()
        self._selector.close()
        self._waker.close()
        self._woken.close()
        with self._lock:
            answering = dict(self._answering)
        for thread, (sock, _) in answering.items():
            _shut_down(sock)
            thread.join()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the caller is gone, or no file descriptor is left
                if self._waiting:
                    self._refuse(next(iter(self._waiting.values())))
                return
            sock.setblocking(False)
            one = _Waiting(sock, str(address[0]) if address else "", time.monotonic() + FIRST_TIMEOUT_S)
            self._waiting[sock] = one
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._waiting) > self._max_waiting:
                place = evicted_place([each.address for each in self._waiting.values()])
                self._refuse(list(self._waiting.values())[place])
            if sock in self._waiting:
                self._read(one)

    def _read(self, one: _Waiting) -> None:
        try:
            data = one.sock.recv(self._handshake.first_bytes - len(one.first))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        one.first += data
        if not data and not one.first:  # a peer that checks whether this rank listens
            self._drop(one).close()
        elif not data:
            self._refuse(one)
        elif len(one.first) == self._handshake.first_bytes:
            opened = self._handshake.open(one.first)
            if opened is None:
                self._refuse(one)
            else:
                self._start_answer(self._drop(one), opened, one.address)

    def _drop(self, one: _Waiting) -> socket.socket:
        self._selector.unregister(one.sock)
        del self._waiting[one.sock]
        return one.sock

    def _refuse(self, one: _Waiting) -> None:
        self._drop(one).close()
        self._on_refused(one.address)

    def _start_answer(self, sock: socket.socket, opened: Any, address: str) -> None:
        thread = threading.Thread(target=self._answer, args=(sock, opened, address), name="isthmus-answer", daemon=True)
        with self._lock:
            if len(self._answering) >= MAX_ANSWERING:
                _shut_down(next(iter(self._answering.values()))[0])
            self._answering[thread] = sock, time.monotonic() + GREETING_TIMEOUT_S
        thread.start()

    def _answer(self, sock: socket.socket, opened: Any, address: str) -> None:
        claimed: list[tuple[int, int]] = []
        end: socket.socket | Channel = sock

        def claim(rank: int, number: int) -> bool:
            if self._claim(rank, number):
                claimed.append((rank, number))
            return bool(claimed)

        try:
            sock.settimeout(GREETING_TIMEOUT_S)
            rank, number, greeted = self._handshake.answer(sock, opened, claim)
            end = greeted[0]
            with self._lock:  # from here on `close` and `poll` leave the connection alone
                self._answering[threading.current_thread()] = None, float("inf")
            if not self._admit(rank, number, greeted):
                end.close()
        except (IsthmusError, OSError) as error:
            end.close()
            for one in claimed:
                self._unclaim(*one, error)
            if isinstance(error, RestartError):
                self._on_restart(error)
            elif not isinstance(error, UnavailableError):  # a member that comes too early dials again
                self._on_refused(address)
        finally:
            with self._lock:
                del self._answering[threading.current_thread()]


def evicted_place(addresses: Iterable[str]) -> int:
    """Return which of the waiting connections, oldest first, makes room: the oldest of the address with the most.

    Of addresses with equally many it is the one with the oldest connection.
    """
    places = list(addresses)
    most, _ = Counter(places).most_common(1)[0]
    return places.index(most)


def _shut_down(sock: socket.socket | None) -> None:
    if sock is None:
        return
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
