"""`run_site`: takes weights in over emulated links, as a rank that decodes does, with a virtual chip or none."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import torch

from isthmus.core.errors import IsthmusError, NotFoundError
from isthmus.rl.rollout.chunk_sender import ChunkSender
from isthmus.rl.rollout.engine_messages import DropSample, StartSample, SwitchVersion
from isthmus.rl.rollout.engine_runner import EngineRunner
from isthmus.rl.rollout.message_link import MessageLink
from isthmus.rl.rollout.weights_exchange import ORIGIN, RelaySource, Staged, WeightsExchange
from isthmus.rl.rollout.wire_messages import (
    EndRun,
    EngineGreeting,
    Message,
    Ready,
    RelayGreeting,
    VersionOffer,
    VersionStaged,
    WeightsChunk,
    WeightsLacking,
    pack_message,
    unpack_message,
)
from isthmus.rl.versions.weights_receiver import WeightsReceiver
from isthmus.serve import DecodeRequest, DecodingEnded, SequenceKey, TokenDecoded
from isthmus.wan import dial

NUM_SLOTS = 64
DIAL_TIMEOUT_S = 5.0


class VirtualEngine:
    """A `DecodeEngine` on a virtual chip: a step takes `step_s`, and the length of a response follows from its key."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self.version = step_s, -1
        self._sequences: dict[SequenceKey, list[int]] = {}

    @property
    def num_sequences(self) -> int:
        """Return how many sequences have not ended."""
        return len(self._sequences)

    def add(self, request: DecodeRequest) -> None:
        """Begin a response, or go on with one."""
        length = random.Random(str(request.key)).randint(request.max_response_tokens // 4, request.max_response_tokens)
        self._sequences[request.key] = [len(request.response_tokens), length, min(request.stop_tokens)]

    def stop(self, key: SequenceKey) -> None:
        """Drop a sequence."""
        if self._sequences.pop(key, None) is None:
            raise NotFoundError(f"no sequence {key}", hint="it has ended")

    def step(self) -> list[TokenDecoded | DecodingEnded]:
        """Decode a token of each sequence; the last one of a response is the end token."""
        time.sleep(self._step_s)
        found: list[TokenDecoded | DecodingEnded] = []
        for key, one in list(self._sequences.items()):
            position, length, end = one
            one[0] += 1
            token = end if one[0] == length else 1
            found.append(
                TokenDecoded(key=key, position=position, token=token, log_probability=-1.0, version=self.version)
            )  # fmt: skip
            if one[0] == length:
                found.append(DecodingEnded(key=key, num_tokens=length, reason="stopped"))
                del self._sequences[key]
        return found

    def stage_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Weights of a virtual chip are not copied."""

    def switch_weights(self, version: int, _on_switch: str) -> list[SequenceKey]:
        """Decode by `version` from now on."""
        self.version = version
        return []

    def export_sequence(self, key: SequenceKey) -> bytes:
        """Virtual sequences do not move."""
        raise NotImplementedError(key)

    def import_sequence(self, content: bytes) -> SequenceKey:
        """Virtual sequences do not move."""
        raise NotImplementedError(content)


class Site:
    """The weights and the virtual chip of one process."""

    def __init__(self, name: str, step_s: float, parent: Connection) -> None:
        self._parent, self._name, self._engine = parent, name, VirtualEngine(step_s) if step_s else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._staged: queue.Queue[Staged | None] = queue.Queue()
        self._inbox: queue.Queue[Message | None] = queue.Queue()
        self._exchange: WeightsExchange | None = None
        self._opened = threading.Event()
        self._sender: ChunkSender | None = None
        parent.send(self._listener.getsockname()[1])
        self._sources = tuple(
            RelaySource(
                name=one["name"], cluster=one["cluster"],
                dial=partial(dial, ("127.0.0.1", one["port"]), one["route"], DIAL_TIMEOUT_S),
            )
            for one in parent.recv()
        )  # fmt: skip

    def run(self) -> None:
        """Serve until the origin says that the run has ended."""
        threading.Thread(target=self._stage, daemon=True).start()
        while True:
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = MessageLink.accepted(sock, None)
            greeting = unpack_message(link.receive()[0])
            if isinstance(greeting, RelayGreeting):
                threading.Thread(target=self._serve, args=(link, greeting.name), daemon=True).start()
            elif isinstance(greeting, EngineGreeting):
                threading.Thread(target=self._follow, args=(link, greeting), daemon=True).start()

    def _serve(self, link: MessageLink, name: str) -> None:
        self._opened.wait()
        if self._exchange is not None:
            self._exchange.serve(link, name)

    def _follow(self, link: MessageLink, greeting: EngineGreeting) -> None:
        shapes = {name: torch.Size(one) for name, one in greeting.parameters.items()}
        if self._exchange is None:
            receiver = WeightsReceiver(shapes, torch.bfloat16)
            self._exchange = WeightsExchange(greeting.run, self._name, receiver, self._staged)
            self._exchange.start(self._sources)
            self._opened.set()
        link.send(pack_message(Ready(num_slots=NUM_SLOTS, version=self._exchange.version)))
        sender = self._sender = ChunkSender(link, ORIGIN)
        sender.start()
        self._exchange.join_origin(sender)
        runner = None if self._engine is None else EngineRunner(self._engine, greeting.sampling)
        threading.Thread(target=self._decode, args=(sender, runner), daemon=True).start()
        with suppress(OSError, IsthmusError):
            while True:
                header, content = link.receive()
                message = unpack_message(header)
                if isinstance(message, VersionOffer | WeightsChunk | WeightsLacking):
                    self._exchange.take(ORIGIN, message, content)
                elif isinstance(message, EndRun):
                    sender.send(message)
                    sender.close(DIAL_TIMEOUT_S)
                    return
                else:
                    self._inbox.put(message)
        self._exchange.lose_origin()
        sender.close()

    def _decode(self, sender: ChunkSender, runner: EngineRunner | None) -> None:
        while runner is not None and sender is self._sender:
            while not self._inbox.empty() or runner.is_idle:
                order = self._inbox.get()
                if isinstance(order, StartSample | DropSample | SwitchVersion):
                    runner.handle(order)
            for report in runner.step():
                sender.send(report)

    def _stage(self) -> None:
        while (staged := self._staged.get()) is not None:
            self._parent.send((staged.version.step, time.monotonic(), staged.problem))
            if self._sender is not None and self._exchange is not None:
                relayed = self._exchange.take_relayed()
                self._sender.send(VersionStaged(version=staged.version, problem=staged.problem, relayed=relayed))


def run_site(name: str, step_s: float, parent: Connection) -> None:
    """Send the port at which the site listens to `parent`, receive the sources that it asks before the origin, serve.

    A source has name, cluster, port and route. The time of each version that is complete here goes to `parent`, in
    seconds on this machine's steady clock. With `step_s` the site decodes a token of each sample in that time.
    """
    torch.set_num_threads(1)
    Site(name, step_s, parent).run()
