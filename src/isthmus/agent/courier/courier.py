"""`Courier`: the agent's end of the courier: tickets for run folders, and the listener that workers dial."""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Callable
from pathlib import Path

from isthmus.agent.courier.courier_certificate import courier_certificate, public_part
from isthmus.agent.courier.courier_frames import Frame
from isthmus.agent.courier.courier_listener import CourierListener
from isthmus.agent.courier.courier_tickets import CourierTickets, TicketEntry
from isthmus.agent.courier.folder_server import FolderServer, Leases
from isthmus.agent.courier.run_folder_files import RunFolderFiles
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.run_lease import NO_LIMIT_S, read_run_lease
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.boot_clock import boot_id, boot_time_s


class Courier:
    """The courier of an agent whose state folder is `state`; `host` is where its workers reach it.

    It listens at `bind` (empty: at `host`) from the first ticket on, at the port of its last life if that is free.
    """

    def __init__(self, state: Path, host: str = "127.0.0.1", *, port: int = 0, bind: str = "") -> None:
        self._root, self._host, self._bind = state.absolute() / "courier", host, bind or host
        self._lease = state.absolute() / "lease"
        self._port, self._lock = port, threading.Lock()
        self._listener: CourierListener | None = None
        self._files: dict[Path, tuple[RunFolderFiles, _Session | None]] = {}
        self._tickets = CourierTickets(self._root / "tickets")
        if any((self._root / "tickets").glob("*.ticket")):
            self._listen()

    def ticket(self, folder: Path, hold: Path | None = None) -> bytes:
        """Return the content of the ticket file for the worker of `folder`; the same until `revoke`.

        The worker ends with `hold`, a folder with `lease` and `released`; None: it ends by its stop file alone.
        """
        port = self._listen()
        self._tickets.remove_stale()
        token = self._tickets.token_of(folder.absolute(), hold.absolute() if hold is not None else None)
        found = {
            "address": self._host, "port": port, "certificate": public_part(self._root / "courier.pem"),
            "token": token.hex(),
        }  # fmt: skip
        return json.dumps(found).encode()

    def revoke(self, folder: Path) -> None:
        """Make the ticket of a folder useless, and cut the connection that it opened."""
        folder = folder.absolute()
        self._tickets.revoke(folder)
        with self._lock:
            _, session = self._files.pop(folder, (None, None))
        if session is not None:
            session.cut()

    def close(self) -> None:
        """Stop listening; tickets stay for a later agent."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _listen(self) -> int:
        with self._lock:
            if self._listener is None:
                now = datetime.datetime.now(datetime.UTC)
                pem = courier_certificate(self._root, now)
                self._listener = self._open_listener(str(pem))
                write_atomically(self._root / "port", str(self._listener.port))
            return self._listener.port

    def _open_listener(self, pem: str) -> CourierListener:
        """Listen at the given port or at that of the last life, which tickets name; at any other only without it."""
        last = 0
        with contextlib.suppress(OSError, ValueError):
            last = int((self._root / "port").read_text(encoding="ascii"))
        try:
            return CourierListener(self._bind, self._port or last, pem, self._open_session)
        except OSError as error:
            raise UnavailableError(
                f"the courier cannot listen at {self._bind}:{self._port or last}: {error.strerror or error}",
                hint="end what uses the port; workers with tickets know the agent by it",
            ) from error

    def _open_session(self, token: bytes, cut: Callable[[], None]) -> _Session | None:
        entry = self._tickets.find(token)
        if entry is None or not entry.folder.is_dir():
            return None
        with self._lock:
            files = self._files.get(entry.folder, (None, None))[0] or RunFolderFiles(entry.folder, entry.record)
            self._files.setdefault(entry.folder, (files, None))
        return _Session(self, entry, files, self._paths(entry.folder), cut)

    def _paths(self, folder: Path) -> dict[str, str]:
        return {str(folder): "folder", str(self._lease): "lease"}

    def _leases(self, entry: TicketEntry) -> Leases:
        lease = read_run_lease(self._lease / "lease.json")
        left_s = None
        if lease is not None:
            ours = lease.boot == boot_id()
            left_s = min(max(0.0, lease.until_s - boot_time_s()), NO_LIMIT_S) if ours else 0.0
        if entry.hold is None:
            return Leases(run_left_s=left_s)
        text = "0 0"  # without its file, the lease has ended
        with contextlib.suppress(OSError, ValueError):
            text = (entry.hold / "lease").read_text(encoding="ascii")[:200]
        return Leases(run_left_s=left_s, hold=text, released=(entry.hold / "released").exists())

    def _take_over(self, entry: TicketEntry, session: _Session) -> None:
        """Let the newest connection of a worker be its only one."""
        with self._lock:
            if entry.folder not in self._files:
                raise ConnectionResetError("the ticket was revoked")
            files, before = self._files[entry.folder]
            self._files[entry.folder] = files, session
        if before is not None and before is not session:
            before.cut()

    def _is_newest(self, entry: TicketEntry, session: _Session) -> bool:
        with self._lock:
            return self._files.get(entry.folder, (None, None))[1] is session

    def _leave(self, entry: TicketEntry, session: _Session) -> None:
        with self._lock:
            found = self._files.get(entry.folder)
            if found is not None and found[1] is session:
                self._files[entry.folder] = found[0], None


class _Session:
    """A connection with a valid token; it counts as the worker's once its `hello` was answered with `welcome`."""

    def __init__(
        self, courier: Courier, entry: TicketEntry, files: RunFolderFiles, paths: dict[str, str],
        cut: Callable[[], None],
    ) -> None:  # fmt: skip
        self._courier, self._entry, self._files, self.cut = courier, entry, files, cut
        self._server = FolderServer(files, lambda: courier._leases(entry), paths)

    def handle(self, frame: Frame) -> Frame:
        """Answer a frame, unless a later connection of the worker has taken over."""
        with self._files.lock:
            if frame.kind != "hello" and not self._courier._is_newest(self._entry, self):
                raise ConnectionResetError("a later connection has taken over, or the ticket was revoked")
            answer = self._server.handle(frame)
            if answer.kind == "welcome":
                self._courier._take_over(self._entry, self)
            return answer

    def close(self) -> None:
        """Release the folder to a later connection."""
        self._courier._leave(self._entry, self)
