"""`CarrierProcess`: the worker's handle of its transport process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import suppress

from isthmus.comm.process.arena import Arena
from isthmus.comm.process.control_messages import Line, Word
from isthmus.core.errors import UnavailableError

END_S = 15.0
"""Time the process has to exit after CLOSE before it is killed."""


class CarrierProcess:
    """Starts the transport process with `listener`; they share `line` (control channel) and `arena` (memory).

    Its command line holds only descriptor numbers. It exits when the channel closes, hence when the
    worker exits.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.arena = Arena()
        ours, theirs = socket.socketpair()
        self.line = Line(ours)
        files = (theirs.fileno(), self.arena.descriptor, listener.fileno())
        try:
            self._process = subprocess.Popen(
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

    def say(self, word: Word) -> None:
        """Send a message; if the process is gone, receiving from the channel reports it."""
        with suppress(OSError):
            self.line.say(word)

    def kill(self) -> None:
        """Kill the process; its connections break like those of a killed worker."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process exits; kill it after `END_S`."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close channel and shared memory; call after the exit and after the reader thread ends."""
        self.line.close()
        self.arena.close()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process; valid after its exit."""
        return (self._process.returncode or 0) < 0

    def how_it_ended(self) -> str:
        """Describe how the process ended; valid after its exit."""
        status = self._process.returncode
        return (
            f"was killed by {signal.Signals(-status).name}"
            if self.was_killed
            else f"exited with status {status}"
        )
