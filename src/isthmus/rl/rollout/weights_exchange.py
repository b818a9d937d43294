"""`WeightsExchange`: the shell around `VersionRelay` at a site: connections to sources, and of sites that ask."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.core.errors import InputError, IsthmusError, ProtocolError
from isthmus.rl.relay.relay_events import (
    ChildLost,
    ChunkArrived,
    ChunksAsked,
    Coding,
    RelayEvent,
    RelayTick,
    SourceExpected,
    SourceJoined,
    SourceLacks,
    SourceLost,
    Version,
    VersionOffered,
)
from isthmus.rl.relay.relay_instructions import (
    AskChunks,
    BeginVersion,
    CompleteVersion,
    FailVersion,
    ForgetCoding,
    RefuseChunks,
    RelayInstruction,
    SendChunk,
)
from isthmus.rl.relay.version_relay import VersionRelay
from isthmus.rl.rollout.chunk_sender import ChunkSender
from isthmus.rl.rollout.message_link import BEAT_S, MessageLink
from isthmus.rl.rollout.wire_messages import (
    Beat,
    Message,
    RelayGreeting,
    VersionOffer,
    WeightsAsked,
    WeightsChunk,
    WeightsLacking,
    pack_message,
    unpack_message,
)
from isthmus.rl.versions.weights_receiver import WeightsReceiver

ORIGIN = "origin"
"""Name of the source that makes the versions."""
RETRY_S, MAX_RETRY_S = 0.5, 8.0
"""Seconds between two attempts to reach a source: at first, and at most."""
HANDSHAKE_TIMEOUT_S = 5.0
SENT_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RelaySource:
    """A rank that is asked for weights: its name, its cluster, and what opens a connection to it."""

    name: str
    cluster: str
    dial: Callable[[], socket.socket]


@dataclass(frozen=True)
class Staged:
    """A version that is complete, or `problem` why it cannot be had."""

    version: Version
    tensors: Mapping[str, torch.Tensor]
    problem: str = ""


class WeightsExchange:
    """The weights of a rank that decodes; `staged` gets each version that is complete. `run` names the job's run."""

    def __init__(
        self, run: str, name: str, receiver: WeightsReceiver, staged: queue.Queue[Staged | None],
        keys: LinkKeys | None = None,
    ) -> None:  # fmt: skip
        self._run, self._name, self._receiver, self._staged, self._keys = run, name, receiver, staged, keys
        self._relay = VersionRelay(ORIGIN, receiver.table.num_chunks)
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._clock = time.monotonic
        self._sources: dict[str, ChunkSender] = {}
        self._children: dict[str, ChunkSender] = {}
        self._arrived: tuple[WeightsChunk, bytes, Any] | None = None
        self._num_children = 0
        self._relayed: dict[str, list[int]] = {}
        self._threads: list[threading.Thread] = []

    @property
    def version(self) -> Version | None:
        """Return the version that is complete here."""
        with self._lock:
            return self._relay.complete

    def start(self, sources: tuple[RelaySource, ...]) -> None:
        """Begin to keep connections to the sources before the origin, the nearest first."""
        for place, one in enumerate(sources):
            with self._lock:
                self._handle(SourceExpected(source=one.name, place=place))
            follow = partial(self._follow_source, one, place)
            self._threads.append(threading.Thread(target=follow, name=f"isthmus-weights-{one.name}", daemon=True))
        self._threads.append(threading.Thread(target=self._tick, name="isthmus-weights-time", daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all connections of this rank to other sites."""
        self._ended.set()
        with self._lock:
            for sender in (*self._sources.values(), *self._children.values()):
                sender.close()
        for thread in self._threads:
            thread.join(HANDSHAKE_TIMEOUT_S)

    def take_relayed(self) -> dict[str, tuple[int, int]]:
        """Return the bytes received from and sent to the sources beside the origin since the last call, by cluster."""
        with self._lock:
            found = {cluster: (one[0], one[1]) for cluster, one in self._relayed.items() if any(one)}
            self._relayed = {}
        return found

    def join_origin(self, sender: ChunkSender) -> None:
        """Ask over a new connection to the origin from now on; its messages go to `take`."""
        with self._lock:
            self._sources[ORIGIN] = sender
            self._handle(SourceJoined(source=ORIGIN, place=1 << 20))

    def lose_origin(self) -> None:
        """Note that the connection to the origin is gone."""
        self._lose_source(ORIGIN)

    def take(self, source: str, message: Message, content: bytes) -> None:
        """Take in what a source sent; raises `ProtocolError` for what no source sends."""
        with self._lock:
            match message:
                case VersionOffer() if source == ORIGIN:
                    self._take_offer(message, content)
                case WeightsChunk():
                    self._take_chunk(source, message, content)
                case WeightsLacking():
                    self._handle(SourceLacks(source=source, coding=message.coding))
                case Beat():
                    pass
                case _:
                    raise ProtocolError(f"{source} sent {type(message).__name__}")

    def serve(self, link: MessageLink, name: str) -> None:
        """Send to a rank of another site what it asks for, until its connection ends."""
        with self._lock:
            self._num_children += 1
            child = f"{name}/{self._num_children}"
            sender = self._children[child] = ChunkSender(link, child)
        sender.start()
        try:
            while not self._ended.is_set():
                message = unpack_message(link.receive()[0])
                with self._lock:
                    if isinstance(message, WeightsAsked):
                        numbers = asked_numbers(message, self._receiver.table.num_chunks(message.coding))
                        self._handle(ChunksAsked(child=child, coding=message.coding, numbers=numbers))
                    elif not isinstance(message, Beat):
                        raise ProtocolError(f"{name} sent {type(message).__name__}")
        except (OSError, IsthmusError):
            return
        finally:
            with self._lock:
                self._children.pop(child, None)
                self._handle(ChildLost(child=child))
            sender.close()
            link.close()

    def _count(self, cluster: str, link: MessageLink, counted: list[int]) -> None:
        """Add what has crossed the connection to a source since it was `counted`."""
        now = [link.received_bytes, link.sent_bytes]
        total = self._relayed.setdefault(cluster, [0, 0])
        for place in (0, 1):
            total[place] += now[place] - counted[place]
        counted[:] = now

    def _take_offer(self, message: VersionOffer, content: bytes) -> None:
        try:
            self._receiver.learn(message.version, content)
        except InputError as error:
            self._staged.put(Staged(message.version, {}, error.message))
            return
        if self._relay.complete == message.version:
            self._staged.put(Staged(message.version, self._receiver.tensors))
        self._handle(VersionOffered(version=message.version, bases=message.bases))

    def _take_chunk(self, source: str, message: WeightsChunk, content: bytes) -> None:
        bits = self._receiver.decode(message.coding, message.number, message.kind, content)
        self._arrived = message, content, bits
        self._handle(
            ChunkArrived(source=source, coding=message.coding, number=message.number, is_right=bits is not None)
        )  # fmt: skip
        self._arrived = None

    def _handle(self, event: RelayEvent) -> None:
        for one in self._relay.handle(event, self._clock()):
            self._follow(one)

    def _follow(self, one: RelayInstruction) -> None:
        match one:
            case BeginVersion():
                self._receiver.give_up()
                self._receiver.begin(one.coding)
            case AskChunks():
                if (source := self._sources.get(one.source)) is not None:
                    source.send(WeightsAsked(coding=one.coding, ranges=_ranges(one.numbers)))
            case SendChunk():
                self._send_chunk(one.child, one.coding, one.number)
            case RefuseChunks():
                if (child := self._children.get(one.child)) is not None:
                    child.send(WeightsLacking(coding=one.coding))
            case CompleteVersion():
                self._staged.put(Staged(one.version, self._receiver.complete(one.version)))
            case ForgetCoding():
                self._receiver.forget(one.coding)
            case FailVersion():
                self._receiver.give_up()
                self._staged.put(Staged(one.version, {}, one.problem))
            case _ if self._arrived is not None:  # KeepChunk
                message, content, bits = self._arrived
                self._receiver.keep(one.coding, one.number, bits, message.kind, content)

    def _send_chunk(self, name: str, coding: Coding, number: int) -> None:
        if (child := self._children.get(name)) is not None:
            kind, content = self._receiver.chunk(coding, number)
            message = WeightsChunk(coding=coding, number=number, kind=kind)
            child.send_chunk(lambda: (message, content))

    def _lose_source(self, name: str) -> None:
        with self._lock:
            self._sources.pop(name, None)
            self._handle(SourceLost(source=name))

    def _follow_source(self, source: RelaySource, place: int) -> None:
        """Keep a connection to a source, and take in what it sends."""
        wait_s = RETRY_S
        while not self._ended.wait(wait_s):
            wait_s = min(2 * wait_s, MAX_RETRY_S)
            with suppress(OSError, IsthmusError):
                sock = source.dial()
                try:
                    sock.settimeout(HANDSHAKE_TIMEOUT_S)
                    link = MessageLink.dialled(sock, self._keys, source.cluster)
                    self._read_source(source, place, link)
                finally:
                    sock.close()

    def _read_source(self, source: RelaySource, place: int, link: MessageLink) -> None:
        link.send(pack_message(RelayGreeting(run=self._run, name=self._name)))
        sender, counted = ChunkSender(link, source.name), [0, 0]
        with self._lock:
            self._sources[source.name] = sender
            self._handle(SourceJoined(source=source.name, place=place))
        sender.start()
        try:
            while not self._ended.is_set():
                header, content = link.receive()
                self.take(source.name, unpack_message(header), content)
                with self._lock:
                    self._count(source.cluster, link, counted)
        finally:
            self._lose_source(source.name)
            sender.close(SENT_TIMEOUT_S)
            with self._lock:
                self._count(source.cluster, link, counted)

    def _tick(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._lock:
                self._handle(RelayTick())


def _ranges(numbers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return numbers that rise as ranges, each from its first to before its last."""
    found: list[tuple[int, int]] = []
    for one in numbers:
        if found and found[-1][1] == one:
            found[-1] = found[-1][0], one + 1
        else:
            found.append((one, one + 1))
    return tuple(found)


def asked_numbers(message: WeightsAsked, count: int) -> tuple[int, ...]:
    """Return the numbers of the ranges that are below `count`; raises `ProtocolError` unless the ranges rise."""
    found: list[int] = []
    last = 0
    for first, end in message.ranges:
        if not last <= first < end:
            raise ProtocolError(f"chunks {first} to {end} are asked for after those to {last}")
        found += range(first, min(end, count))
        last = end
    return tuple(found)
