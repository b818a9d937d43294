"""`EngineLink`: the connection to a rank that decodes, from the rank that holds the ledger; it dials again when cut."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.core.errors import IsthmusError, ProtocolError
from isthmus.rl.relay.relay_events import Coding
from isthmus.rl.rollout.chunk_sender import ChunkSender
from isthmus.rl.rollout.engine_messages import (
    EndReport,
    EngineOrder,
    SwitchVersion,
    TokensReport,
    VersionReport,
)
from isthmus.rl.rollout.message_link import MessageLink
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.weights_exchange import asked_numbers
from isthmus.rl.rollout.wire_messages import (
    Beat,
    EndRun,
    EngineGreeting,
    Message,
    Ready,
    VersionOffer,
    VersionStaged,
    WeightsAsked,
    WeightsChunk,
    WeightsLacking,
    pack_message,
    unpack_message,
)
from isthmus.rl.versions.version_store import VersionStore

RETRY_S = 0.5
"""Seconds between two attempts to connect."""
HANDSHAKE_TIMEOUT_S = 5.0
NUM_LAST_TRIES = 30
"""Attempts to reach an engine that is cut as the run ends: its process may just be starting again."""


class EngineLink:
    """Keeps one engine connected: threads send weights and orders, and take reports.

    `name` and the number of the connection name the engine in the ledger; `cluster` is its owner's. `dial` opens a
    connection, `keys` are those of the run.
    """

    def __init__(
        self,
        name: str,
        cluster: str,
        dial: Callable[[], socket.socket],
        keys: LinkKeys | None,
        greeting: EngineGreeting,
        coordinator: RolloutCoordinator,
        versions: VersionStore,
    ) -> None:
        self._name, self._cluster, self._dial, self._keys = name, cluster, dial, keys
        self._greeting, self._coordinator, self._versions = greeting, coordinator, versions
        self._stopped = threading.Event()
        self._turns: queue.Queue[EngineOrder | VersionStaged | None] = queue.Queue()
        self._number, self._has_ended = 0, False
        self._sender: ChunkSender | None = None
        self._link: MessageLink | None = None
        self._counted, self._counts = [0, 0, 0], threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"isthmus-engine-{name}", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def close(self) -> None:
        """Begin to end the run at the engine, also at one that is cut right now; `join` waits for it."""
        self._stopped.set()
        self._turns.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the engine knows the end, or does not answer within `timeout_s`."""
        self._thread.join(timeout_s)

    def count_bytes(self) -> None:
        """Add what has crossed this connection since the last call to the ledger."""
        with self._counts:
            if (link := self._link) is None:
                return
            weights_bytes = self._sender.weights_bytes if self._sender is not None else 0
            now = [weights_bytes, link.sent_bytes, link.received_bytes]
            new = [after - before for after, before in zip(now, self._counted, strict=True)]
            self._counted = now
        self._coordinator.count_bytes(self._cluster, *new)

    def _run(self) -> None:
        said, num_left = "", NUM_LAST_TRIES
        while not self._has_ended and num_left:
            num_left -= self._stopped.is_set()
            try:
                sock = self._dial()
                sock.settimeout(HANDSHAKE_TIMEOUT_S)
                with suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = MessageLink.dialled(sock, self._keys, self._cluster)
                with self._counts:
                    self._link, self._sender, self._counted = link, None, [0, 0, 0]
                try:
                    said = ""
                    self._serve(link)
                finally:
                    link.close()
                    self.count_bytes()
            except (OSError, IsthmusError) as error:
                if said != (said := " ".join(str(error).split())) and not self._stopped.is_set():
                    print(f"rollouts of {self._name} are cut: {said}", flush=True)
            if not self._has_ended:
                time.sleep(RETRY_S)

    def _serve(self, link: MessageLink) -> None:
        """Bring the engine to the newest version, let it join, and pass on orders until it is cut."""
        link.send(pack_message(self._greeting))
        while isinstance(ready := unpack_message(link.receive()[0]), Beat):
            pass
        if not isinstance(ready, Ready):
            raise ProtocolError(f"{self._name} did not say that it is ready")
        self._number += 1
        engine = f"{self._name}#{self._number}"
        self._turns = queue.Queue()
        sender = ChunkSender(link, engine)
        with self._counts:
            self._sender = sender
        reader = threading.Thread(
            target=self._read, args=(link, engine, sender), name=f"isthmus-reports-{engine}", daemon=True
        )  # fmt: skip
        reader.start()
        sender.start()
        try:
            if ready.problem:
                self._coordinator.refuse_owner(self._cluster, ready.problem)
            if ready.problem or self._stopped.is_set():  # `close` may have told the former queue
                sender.send(EndRun())
            else:
                self._offer_newest(sender)
                self._take_turns(sender, engine, ready)
            reader.join(HANDSHAKE_TIMEOUT_S)  # an engine that has got the end closes
        finally:
            sender.close()
            link.close()
            reader.join(HANDSHAKE_TIMEOUT_S)
            self._coordinator.lose_engine(engine)

    def _take_turns(self, sender: ChunkSender, engine: str, ready: Ready) -> None:
        """Let the engine take part with the first version that it has; pass on orders until it is cut or the run ends.

        An order to decode by new weights becomes an offer of the newest ones, and goes out once the engine has them.
        """
        joined = False
        while (turn := self._turns.get()) is not None:
            if isinstance(turn, VersionStaged):
                step = turn.version.step
                if not joined and (
                    barred := self._coordinator.join_engine(
                        engine, self._cluster, ready.num_slots, step, self._turns.put
                    )
                ):
                    print(f"rollouts of {self._name} end: {barred}", flush=True)
                    sender.send(EndRun())
                    return
                joined = True
                sender.send(SwitchVersion(version=step, on_update=self._coordinator.on_update))
            elif isinstance(turn, SwitchVersion):
                self._offer_newest(sender)
            else:
                sender.send(turn)
        if self._stopped.is_set():
            sender.send(EndRun())
        else:
            sender.close()

    def _offer_newest(self, sender: ChunkSender) -> None:
        offer, digests = self._versions.newest()
        sender.send_chunk(lambda: (VersionOffer(version=offer.version, bases=offer.bases), digests))

    def _answer(self, asked: WeightsAsked, sender: ChunkSender) -> None:
        """Send the chunks that a site asks for, each coded when its turn comes."""
        coding = asked.coding
        count = self._versions.num_chunks(coding)
        if not count:
            sender.send(WeightsLacking(coding=coding))
        for number in asked_numbers(asked, count):
            sender.send_chunk(partial(self._make_chunk, coding, number))

    def _make_chunk(self, coding: Coding, number: int) -> tuple[Message, bytes]:
        if (found := self._versions.chunk(coding, number)) is None:
            return WeightsLacking(coding=coding), b""
        kind, content = found
        return WeightsChunk(coding=coding, number=number, kind=kind), content

    def _read(self, link: MessageLink, engine: str, sender: ChunkSender) -> None:
        """Take reports until the connection is cut; an engine that reports what cannot be is dropped."""
        try:
            while True:
                report = unpack_message(*link.receive())
                problem = ""
                if isinstance(report, TokensReport | EndReport | VersionReport):
                    problem = self._coordinator.report(engine, report)
                elif isinstance(report, EndRun):
                    self._has_ended = True
                    return
                elif isinstance(report, VersionStaged):
                    problem = self._note_staged(report)
                elif isinstance(report, WeightsAsked):
                    self._answer(report, sender)
                elif not isinstance(report, Beat):
                    problem = f"it sent {type(report).__name__}"
                if problem:
                    print(f"warning: {engine} is dropped: {problem}", flush=True)
                    return
        except (OSError, IsthmusError):
            return
        finally:
            self._turns.put(None)

    def _note_staged(self, report: VersionStaged) -> str:
        """Pass on that the engine has a version; return what is wrong with it."""
        for source, (received, sent) in report.relayed.items():
            if min(received, sent) < 0:
                return f"it counts {received} and {sent} bytes from {source}"
            self._coordinator.count_bytes(f"{source}>{self._cluster}", received, received, sent)
        if not report.problem:
            self._turns.put(report)
        return report.problem
