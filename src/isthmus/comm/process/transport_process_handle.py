"""`TransportProcessHandle`: the worker's handle of its transport process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import suppress

from isthmus.comm.process.control_messages import ControlChannel, ControlMessage
from isthmus.comm.process.shared_memory_arena import SharedMemoryArena
from isthmus.core.errors import UnavailableError

EXIT_TIMEOUT_S = 15.0
"""Time the process has to exit after CLOSE before it is killed."""


class TransportProcessHandle:
    """Starts the transport process with `listener`; they share `channel` (control channel) and `arena` (memory).

    Its command line holds only descriptor numbers. It exits when the channel closes, hence when the
    worker exits.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.arena = SharedMemoryArena()
        ours, theirs = socket.socketpair()
        self.channel = ControlChannel(ours)
        files = (theirs.fileno(), self.arena.descriptor, listener.fileno())
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this Python with a module of this package
                [sys.executable, "-m", "isthmus.comm.process.transport_process", *map(str, files)],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
            )
        except OSError as error:
            self.close()
            raise UnavailableError(
                f"cannot start the transport process: {error.strerror or error}",
                hint="raise the worker's process limit (ulimit -u), or use transport: thread",
            ) from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ControlMessage) -> None:
        """Send a message; if the process is gone, receiving from the channel reports it."""
        with suppress(OSError):
            self.channel.send(message)

    def kill(self) -> None:
        """Kill the process; its connections break like those of a killed worker."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process exits; kill it after `EXIT_TIMEOUT_S`."""
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close channel and shared memory; call after the exit and after the reader thread ends."""
        self.channel.close()
        self.arena.close()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process; valid after its exit."""
        return (self._process.returncode or 0) < 0

    def exit_description(self) -> str:
        """Describe how the process ended; valid after its exit."""
        status = self._process.returncode
        return f"was killed by {signal.Signals(-status).name}" if self.was_killed else f"exited with status {status}"
