"""`EngineLink`: the connection to a rank that decodes, from the rank that holds the ledger; it dials again when cut."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.core.errors import IsthmusError, ProtocolError
from isthmus.rl.rollout.engine_messages import (
    EndReport,
    EngineOrder,
    SwitchVersion,
    TokensReport,
    VersionReport,
)
from isthmus.rl.rollout.message_link import BEAT_S, MessageLink
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.version_store import VersionStore
from isthmus.rl.rollout.wire_messages import (
    Beat,
    EndRun,
    EngineGreeting,
    Ready,
    VersionBegin,
    VersionChunk,
    VersionEnd,
    VersionStaged,
    pack_message,
    unpack_message,
)

RETRY_S = 0.5
"""Seconds between two attempts to connect."""
HANDSHAKE_TIMEOUT_S = 5.0
NUM_LAST_TRIES = 30
"""Attempts to reach an engine that is cut as the run ends: its process may just be starting again."""


class EngineLink:
    """Keeps one engine connected, in two threads: one sends weights and orders, one takes reports.

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
        self._orders: queue.Queue[EngineOrder | None] = queue.Queue()
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._number, self._staged, self._has_ended = 0, -1, False
        self._link: MessageLink | None = None
        self._counted, self._counts = [0, 0, 0], threading.Lock()
        self._weights_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"isthmus-engine-{name}", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def close(self) -> None:
        """Begin to end the run at the engine, also at one that is cut right now; `join` waits for it."""
        self._stopped.set()
        self._orders.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the engine knows the end, or does not answer within `timeout_s`."""
        self._thread.join(timeout_s)

    def count_bytes(self) -> None:
        """Add what has crossed this connection since the last call to the ledger."""
        with self._counts:
            if (link := self._link) is None:
                return
            now = [self._weights_bytes, link.sent_bytes, link.received_bytes]
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
                    self._link, self._counted, self._weights_bytes = link, [0, 0, 0], 0
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
        engine, self._staged = f"{self._name}#{self._number}", -1
        self._orders, self._answers = queue.Queue(), queue.Queue()
        reader = threading.Thread(target=self._read, args=(link, engine), name=f"isthmus-reports-{engine}", daemon=True)
        reader.start()
        try:
            if ready.problem:
                self._coordinator.refuse_owner(self._cluster, ready.problem)
            if ready.problem or self._stopped.is_set():
                self._end(link)
            elif self._join(link, engine, ready):
                if self._stopped.is_set():  # `close` may have told the former queue
                    self._orders.put(None)
                self._send_orders(link)
            reader.join(HANDSHAKE_TIMEOUT_S)  # an engine that has got the end closes
        finally:
            link.close()
            reader.join(HANDSHAKE_TIMEOUT_S)
            self._coordinator.lose_engine(engine)

    def _join(self, link: MessageLink, engine: str, ready: Ready) -> bool:
        """Send the newest version and let the engine take part; False, and its end, where its owner may not."""
        has = ready.step if self._versions.is_known(ready.step, ready.digest) else None
        step = self._send_version(link, has)
        if problem := self._wait_staged(link):
            print(f"warning: {self._name}: {problem}; sends whole weights", flush=True)
            step = self._send_version(link, None)
            if problem := self._wait_staged(link):
                raise ProtocolError(f"{self._name}: {problem}")
        self._staged = step
        barred = self._coordinator.join_engine(engine, self._cluster, ready.num_slots, step, self._orders.put)
        if barred:
            print(f"rollouts of {self._name} end: {barred}", flush=True)
            self._end(link)
        else:  # an engine that comes back with older weights has only staged these
            link.send(pack_message(SwitchVersion(version=step, on_update="keep")))
        return not barred

    def _send_orders(self, link: MessageLink) -> None:
        """Send orders until the connection is cut or the run ends."""
        while True:
            try:
                order = self._orders.get(timeout=BEAT_S)
            except queue.Empty:
                link.send(pack_message(Beat()))
                continue
            if order is None:
                break
            if not isinstance(order, SwitchVersion):
                link.send(pack_message(order))
            elif order.version > self._staged:
                self._staged = self._send_version(link, self._staged)
                link.send(pack_message(SwitchVersion(version=self._staged, on_update=order.on_update)))
        if self._stopped.is_set():
            self._end(link)
        else:
            link.close()

    def _end(self, link: MessageLink) -> None:
        """Say that the run has ended; an engine that knows it answers the same."""
        link.send(pack_message(EndRun()))

    def _send_version(self, link: MessageLink, base: int | None) -> int:
        """Send the newest version as changes to version `base`, if that is still here; return its step."""
        newest, known, chunks = self._versions.newest_from(base)
        before = link.sent_bytes
        link.send(pack_message(VersionBegin(step=newest.step, base=known)))
        for header, content in chunks:
            link.send(pack_message(VersionChunk(**header)), content)
        link.send(pack_message(VersionEnd(step=newest.step, digest=self._versions.digest(newest.step))))
        self._weights_bytes += link.sent_bytes - before
        return newest.step

    def _wait_staged(self, link: MessageLink) -> str:
        """Return what the engine says is wrong with a version, "" if it has it; raises `ConnectionResetError`."""
        while True:
            try:
                answer = self._answers.get(timeout=BEAT_S)
            except queue.Empty:
                link.send(pack_message(Beat()))
                continue
            if answer is None:
                raise ConnectionResetError("cut before it had weights")
            return answer

    def _read(self, link: MessageLink, engine: str) -> None:
        """Take reports until the connection is cut; an engine that reports what cannot be is dropped."""
        try:
            while True:
                report = unpack_message(link.receive()[0])
                problem = ""
                if isinstance(report, TokensReport | EndReport | VersionReport):
                    problem = self._coordinator.report(engine, report)
                elif isinstance(report, EndRun):
                    self._has_ended = True
                    return
                elif isinstance(report, VersionStaged):
                    if self._staged < 0:
                        self._answers.put(report.problem)
                    else:
                        problem = report.problem
                elif isinstance(report, Beat):
                    continue
                else:
                    problem = f"it sent {type(report).__name__}"
                if problem:
                    print(f"warning: {engine} is dropped: {problem}", flush=True)
                    return
        except (OSError, IsthmusError):
            return
        finally:
            self._orders.put(None)
            self._answers.put(None)
